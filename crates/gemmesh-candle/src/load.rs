//! A rank's parts of the tensors that a `VarBuilder` gives.

use candle_core::{DType, Error as CandleError, Result, Tensor};
use candle_nn::Init;
use candle_nn::var_builder::{Backend, Shard, VarBuilderArgs};
use gemmesh::error::{Call, Kind};

use crate::error;
use crate::tensor_parallel::TensorParallel;
use crate::weight::{BLOCK, Weight};

/// How the backend of a `VarBuilder` gives a part of a tensor.
///
/// A `ShardedVarBuilder` takes a `Shard`, and reads only this part of the file. A plain `VarBuilder` takes an `Init`,
/// and reads the whole tensor, of which the part is then copied.
pub trait Hints: Sized {
    /// Reads a part of `name`, which should be `whole` in the file.
    ///
    /// # Errors
    /// candle's. An error for a different shape holds the shape in the file.
    fn read<B: Backend<Hints = Self>>(
        vb: &VarBuilderArgs<B>,
        name: &str,
        whole: &[usize],
        part: Shard,
    ) -> Result<Tensor>;
}

impl Hints for Shard {
    fn read<B: Backend<Hints = Self>>(
        vb: &VarBuilderArgs<B>,
        name: &str,
        whole: &[usize],
        part: Shard,
    ) -> Result<Tensor> {
        // candle does not check the shape of a tensor that it splits. But if there are more parts than elements, it
        // reads nothing, and its error holds the shape.
        let no_part = Shard {
            dim: 0,
            rank: 0,
            world_size: usize::MAX,
        };
        match vb.get_with_hints((), name, no_part) {
            Err(error) if shape_in(&error).is_some_and(|found| found != whole) => Err(error),
            _ => vb.get_with_hints(whole, name, part),
        }
    }
}

impl Hints for Init {
    fn read<B: Backend<Hints = Self>>(
        vb: &VarBuilderArgs<B>,
        name: &str,
        whole: &[usize],
        part: Shard,
    ) -> Result<Tensor> {
        let size = whole[part.dim] / part.world_size;
        let tensor = vb.get(whole, name)?;
        let part = tensor.narrow(part.dim, part.rank * size, size)?;
        part.force_contiguous()
    }
}

/// The shape in the file, if the error is about it.
fn shape_in(error: &CandleError) -> Option<&[usize]> {
    match error {
        CandleError::ShapeMismatchSplit { shape, .. }
        | CandleError::UnexpectedShape { got: shape, .. } => Some(shape.dims()),
        CandleError::WithBacktrace { inner, .. }
        | CandleError::Context { inner, .. }
        | CandleError::WithPath { inner, .. } => shape_in(inner),
        _ => None,
    }
}

/// The layer that reads tensors, and the rank that it does so for.
pub struct Reader<'a> {
    pub ranks: &'a TensorParallel,
    pub layer: &'static str,
}

impl Reader<'_> {
    /// This rank's rows of a column-parallel weight, [N, K], and its part of the bias, if it is wanted.
    pub fn rows<B: Backend<Hints: Hints>>(
        &self,
        vb: &VarBuilderArgs<B>,
        [n, k]: [usize; 2],
        bias: bool,
    ) -> Result<(Weight, Option<Tensor>)> {
        let part = self.even_part(vb, [n, k], 0)?;
        self.part_of_rows(vb, [n, k], bias, part)
    }

    /// These rows of a column-parallel weight, [N, K], and of the bias, if it is wanted.
    pub fn part_of_rows<B: Backend<Hints: Hints>>(
        &self,
        vb: &VarBuilderArgs<B>,
        [n, k]: [usize; 2],
        bias: bool,
        part: Shard,
    ) -> Result<(Weight, Option<Tensor>)> {
        let weight = self.read(vb, "weight", &[n, k], part)?;
        let rows = n / part.world_size;
        let whole = self.scales(vb, [n, k])?;
        let weight = match whole {
            Some(scales) => Weight::of_rows(weight, &scales, part.rank * rows)?,
            None => weight.into(),
        };
        let bias = bias.then(|| self.read(&addends(vb), "bias", &[n], part));
        Ok((weight, bias.transpose()?))
    }

    /// This rank's columns of a row-parallel weight, [N, K], and the whole bias, if it is wanted.
    pub fn columns<B: Backend<Hints: Hints>>(
        &self,
        vb: &VarBuilderArgs<B>,
        [n, k]: [usize; 2],
        bias: bool,
    ) -> Result<(Weight, Option<Tensor>)> {
        let part = self.even_part(vb, [n, k], 1)?;
        let columns = k / part.world_size;
        let weight = self.read(vb, "weight", &[n, k], part)?;
        let weight = match self.scales(vb, [n, k])? {
            Some(scales) => Weight::of_columns(weight, &scales, part.rank * columns)?,
            None => weight.into(),
        };
        let bias = bias.then(|| self.read(&addends(vb), "bias", &[n], Shard::default()));
        Ok((weight, bias.transpose()?))
    }

    /// All scales of a weight [N, K] of fp8. They are few, and a rank's need not be an even part.
    fn scales<B: Backend<Hints: Hints>>(
        &self,
        vb: &VarBuilderArgs<B>,
        [n, k]: [usize; 2],
    ) -> Result<Option<Tensor>> {
        if vb.dtype() != DType::F8E4M3 {
            return Ok(None);
        }
        let (vb, shape) = (
            vb.to_dtype(DType::F32),
            [n.div_ceil(BLOCK), k.div_ceil(BLOCK)],
        );
        let scales = self.read(&vb, "weight_scale_inv", &shape, Shard::default());
        scales.map(Some)
    }

    /// This rank's part of a dimension that the ranks share evenly.
    fn even_part<B: Backend>(
        &self,
        vb: &VarBuilderArgs<B>,
        shape: [usize; 2],
        dim: usize,
    ) -> Result<Shard> {
        let weight = path(vb, "weight");
        let shared = self.ranks.check_even(&weight, shape[dim], dim);
        shared.map_err(error::of(self.layer))?;
        Ok(Shard {
            dim,
            rank: self.ranks.rank(),
            world_size: self.ranks.world_size(),
        })
    }

    fn read<B: Backend<Hints: Hints>>(
        &self,
        vb: &VarBuilderArgs<B>,
        name: &str,
        whole: &[usize],
        part: Shard,
    ) -> Result<Tensor> {
        let rank = self.ranks.rank();
        let shape = |what, expected: &[usize], found: &[usize]| {
            Kind::Shape {
                argument: format!("{} {what}", path(vb, name)),
                expected: expected.to_vec(),
                found: found.to_vec(),
            }
            .on(rank)
            .in_call(Call::here("loading a weight"))
        };
        let read = B::Hints::read(vb, name, whole, part);
        let read = read.map_err(|error| match shape_in(&error) {
            Some(found) => shape("in the file", whole, found),
            None => Kind::System {
                action: format!("read {}", path(vb, name)),
                reason: error::words(&error),
            }
            .on(rank),
        });
        let read = read.and_then(|tensor| {
            let mut expected = whole.to_vec();
            expected[part.dim] /= part.world_size;
            if tensor.dims() == expected {
                Ok(tensor)
            } else {
                Err(shape("as this rank's part", &expected, tensor.dims()))
            }
        });
        read.map_err(error::of(self.layer))
    }
}

/// What reads a bias: BF16 beside weights of fp8.
fn addends<'a, B: Backend>(vb: &VarBuilderArgs<'a, B>) -> VarBuilderArgs<'a, B> {
    match vb.dtype() {
        DType::F8E4M3 => vb.to_dtype(DType::BF16),
        _ => vb.clone(),
    }
}

/// The name of a tensor in the file.
fn path<B: Backend>(vb: &VarBuilderArgs<B>, name: &str) -> String {
    match vb.prefix() {
        prefix if prefix.is_empty() => name.into(),
        prefix => format!("{prefix}.{name}"),
    }
}
