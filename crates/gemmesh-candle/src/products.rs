//! Products of candle's tensors with weights that are spread over the ranks, by backend and type.

use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::{DType, Tensor};
use gemmesh::error::{Call, Kind};
use gemmesh::{
    Activation, AllGatherMatmul, Error, Matmul, MatmulAllReduce, MatmulReduceScatter, Result,
};

use crate::device::Device;
use crate::failure::Failure;
use crate::multiplied::{Multiplied, SharedRows, check_columns, check_rows};
use crate::parameters::{Parameter, Parameters};
use crate::pools::{Symmetric, lock};
use crate::ranks::{Ranks, own_of, with_leading};
use crate::weight::{BLOCK, Weight};

/// The collective call in which ranks make a layer.
pub const MAKE: &str = "a parallel layer";

/// A rank's tensors of a layer: weights [N, K], and a bias [N] for each or none.
pub struct LayerTensors {
    pub weights: Vec<Weight>,
    pub biases: Vec<Tensor>,
}

impl LayerTensors {
    pub fn dtype(&self) -> DType {
        self.weights[0].values.dtype()
    }
}

/// A layer's products, for every backend and type.
pub trait Product: Send + Sync + Debug {
    /// The product of tokens that are spread over the ranks. The residual is added last.
    fn sequence_parallel(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Vec<Tensor>, Failure>;

    /// The product of tokens that every rank has.
    fn replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Vec<Tensor>, Failure>;
}

/// Checks a weight and returns its N and K.
fn extents<B: Device>(ranks: &Ranks<B>, weight: &Weight) -> Result<[usize; 2], Failure> {
    match weight.values.dims() {
        &[n, k] => Ok([n, k]),
        other => {
            let what = "the number of dimensions of a weight [N, K]";
            let error = Error::unsuitable(what, "2", other.len().to_string());
            let error = error.on(ranks.group.rank()).in_call(Call::here(MAKE));
            Err(Failure::Gemmesh(error))
        }
    }
}

/// A weight [n, k] as a parameter, and its scales with the place at which it begins in its first block, if it must have
/// scales.
#[allow(clippy::type_complexity)]
fn with_scales<B: Device, T: Multiplied>(
    ranks: &Ranks<B>,
    weight: Weight,
    [n, k]: [usize; 2],
) -> Result<(Parameter<B, T>, Option<(Parameter<B, f32>, [usize; 2])>), Failure> {
    let is_placed = weight.check_first(ranks.group.rank());
    let Weight {
        values,
        scales,
        first,
    } = weight;
    let name = "scales of weight [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉]";
    if scales.is_some() != T::IS_SCALED {
        let found = format!("{:?}", values.dtype());
        let (what, expected, found) = if T::IS_SCALED {
            (
                "the number of",
                "1, as the weight is F8E4M3 (Weight::blocks)",
                "0".to_string(),
            )
        } else {
            ("the dtype of a weight with", "F8E4M3", found)
        };
        let error = Error::unsuitable(format!("{what} {name}"), expected, found);
        let error = error.on(ranks.group.rank()).in_call(Call::here(MAKE));
        return Err(Failure::Gemmesh(error));
    }
    is_placed?;
    let weight = Parameter::new(ranks, "weight [N, K]", values, [n, k])?;
    let blocks = |first: usize, extent: usize| (first + extent).div_ceil(BLOCK);
    let shape = [blocks(first[0], n), blocks(first[1], k)];
    let scales = scales.map(|scales| Parameter::new(ranks, name, scales, shape));
    let scales = scales.transpose()?;
    Ok((weight, scales.map(|scales| (scales, first))))
}

/// Joins the biases of all weights. Each must be as long as its weight has rows, or columns would get a neighbour's
/// bias.
fn bias_of(rank: usize, biases: &[Tensor], widths: &[usize]) -> Result<Option<Tensor>, Failure> {
    for (bias, &n) in biases.iter().zip(widths) {
        if bias.elem_count() != n {
            return Err(Failure::Gemmesh(
                Kind::Shape {
                    argument: "bias [N]".into(),
                    expected: vec![n],
                    found: bias.dims().to_vec(),
                }
                .on(rank)
                .in_call(Call::here(MAKE)),
            ));
        }
    }
    Ok(match biases {
        [] => None,
        [bias] => Some(bias.clone()),
        several => Some(Tensor::cat(several, 0)?),
    })
}

/// Column-parallel weights.
pub struct Columns<B: Device, T: Multiplied> {
    parameters: Parameters<B, T>,
    /// N of each output.
    widths: Vec<usize>,
    /// True if the weights are a gate and its up projection.
    gated: bool,
    k: usize,
    gathered: SharedRows<B, T>,
    ranks: Arc<Ranks<B>>,
}

impl<B: Device, T: Multiplied> Columns<B, T> {
    pub fn new(ranks: Arc<Ranks<B>>, tensors: LayerTensors, gated: bool) -> Result<Self, Failure> {
        let prepare = || {
            let _order = ranks.enter()?;
            let [first, k] = extents(&ranks, &tensors.weights[0])?;
            let (mut parameters, mut widths) = (Vec::new(), Vec::new());
            let (mut scales, mut places) = (Vec::new(), Vec::new());
            for weight in tensors.weights {
                let [n, _] = extents(&ranks, &weight)?;
                let n = if gated { first } else { n };
                B::check_columns::<T::Token>(&ranks.group, n)?;
                places.push(weight.first);
                let (weight, of_weight) = with_scales(&ranks, weight, [n, k])?;
                parameters.push(weight);
                scales.extend(of_weight);
                widths.push(n);
            }
            check_columns::<B, T>(&ranks, &widths, &places, gated, k)?;
            let n = widths.iter().sum();
            let bias = bias_of(ranks.group.rank(), &tensors.biases, &widths)?;
            let bias = bias.map(|bias| Parameter::bias(&ranks, bias, n));
            let bias = bias.transpose()?;
            if gated {
                widths.truncate(1);
            }
            let parameters = Parameters {
                weights: parameters,
                scales,
                bias,
            };
            Ok((parameters, widths, k))
        };
        let (parameters, widths, k) = ranks.before(MAKE, prepare)?;
        Ok(Columns {
            parameters,
            widths,
            gated,
            k,
            gathered: SharedRows::new(&ranks, k)?,
            ranks,
        })
    }

    /// Allocates the outputs, with `m` rows.
    fn outputs(&self, m: usize) -> Result<Vec<B::Output<T::Token>>, Failure> {
        let widths = self.widths.iter();
        widths.map(|&n| self.ranks.output([m, n])).collect()
    }

    fn finish(
        &self,
        outputs: Vec<B::Output<T::Token>>,
        x: &Tensor,
    ) -> Result<Vec<Tensor>, Failure> {
        let tensor = |output| Ok(with_leading(self.ranks.finish(output)?, x)?);
        outputs.into_iter().map(tensor).collect()
    }
}

impl<B: Device, T: Multiplied> Debug for Columns<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.parameters.fmt(f)
    }
}

fn views<B: Device, T: Multiplied>(
    outputs: &mut [B::Output<T::Token>],
) -> gemmesh::products::Outputs<'_, B, T> {
    let views = outputs
        .iter_mut()
        .map(|output| B::matrix(output).view_mut());
    views.collect::<gemmesh::products::Outputs<'_, B, T>>()
}

impl<B: Device, T: Multiplied> Product for Columns<B, T> {
    /// `gather(x) · weightᵀ`.
    fn sequence_parallel(&self, x: &Tensor, _: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        const CALL: &str = "all_gather_matmul";
        let ranks = &*self.ranks;
        let (m, split) = ranks.step()?;
        let own = own_of(&split, ranks.group.rank());
        let held = self.parameters.hold(&[x]);
        let mut gathered = self.gathered.lock();
        let prepare = || {
            let shape = [own.len(), self.k];
            let rows =
                ranks.rows::<T::Token>("x [tokens of this rank, K]", held.input(0), shape)?;
            let order = ranks.enter()?;
            let operands = held.operands(ranks)?;
            let outputs = self.outputs(m)?;
            gathered.set_rows(&split)?;
            T::put(ranks, &rows, &mut gathered)?;
            Ok((order, operands, outputs))
        };
        let (_order, operands, mut outputs) = ranks.before(CALL, prepare)?;
        let mut product = AllGatherMatmul::new();
        if let Some(bias) = operands.bias() {
            product = product.bias(bias);
        }
        if self.gated {
            product = product.gated().activation(Activation::Silu);
        }
        product.run(
            gathered.operand(),
            operands.weights(),
            views::<B, T>(&mut outputs),
        )?;
        self.finish(outputs, x)
    }

    /// `x · weightᵀ`, with no communication.
    fn replicated(&self, x: &Tensor, _: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        let ranks = &*self.ranks;
        ranks.group.check()?;
        let held = self.parameters.hold(&[x]);
        let m = rows_of(x.dims());
        let shape = [m, self.k];
        let rows = ranks.rows::<T::Token>("x [tokens, K]", held.input(0), shape)?;
        let _order = ranks.enter()?;
        let operands = held.operands(ranks)?;
        let mut input = T::input(ranks, &rows, shape, 0)?;
        let mut outputs = self.outputs(m)?;
        let mut product = Matmul::new();
        if let Some(bias) = operands.bias() {
            product = product.bias(bias);
        }
        if self.gated {
            product = product.gated().activation(Activation::Silu);
        }
        product.run(
            input.operand(),
            operands.weights(),
            views::<B, T>(&mut outputs),
        )?;
        self.finish(outputs, x)
    }
}

/// A row-parallel weight.
pub struct RowsOfWeight<B: Device, T: Multiplied> {
    parameters: Parameters<B, T>,
    n: usize,
    k: usize,
    /// Where K begins in its first block of scales.
    first_column: usize,
    sums: Symmetric<B, T::Token>,
    ranks: Arc<Ranks<B>>,
}

impl<B: Device, T: Multiplied> RowsOfWeight<B, T> {
    pub fn new(ranks: Arc<Ranks<B>>, tensors: LayerTensors) -> Result<Self, Failure> {
        let LayerTensors {
            mut weights,
            biases,
        } = tensors;
        let prepare = || {
            let _order = ranks.enter()?;
            let weight = weights.remove(0);
            let [n, k] = extents(&ranks, &weight)?;
            B::check_columns::<T::Token>(&ranks.group, n)?;
            let first = weight.first;
            let (weight, scales) = with_scales(&ranks, weight, [n, k])?;
            check_rows::<B, T>(&ranks, [n, k], first)?;
            let bias = bias_of(ranks.group.rank(), &biases, &[n])?;
            let bias = bias.map(|bias| Parameter::bias(&ranks, bias, n));
            let bias = bias.transpose()?;
            let parameters = Parameters {
                weights: vec![weight],
                scales: scales.into_iter().collect(),
                bias,
            };
            Ok((parameters, n, k, first[1]))
        };
        let (parameters, n, k, first_column) = ranks.before(MAKE, prepare)?;
        Ok(RowsOfWeight {
            parameters,
            n,
            k,
            first_column,
            sums: ranks.symmetric(n)?,
            ranks,
        })
    }
}

impl<B: Device, T: Multiplied> Debug for RowsOfWeight<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.parameters.fmt(f)
    }
}

impl<B: Device, T: Multiplied> Product for RowsOfWeight<B, T> {
    /// This rank's rows of `Σ x · weightᵀ`.
    fn sequence_parallel(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Vec<Tensor>, Failure> {
        const CALL: &str = "matmul_reduce_scatter";
        let ranks = &*self.ranks;
        let (m, split) = ranks.step()?;
        let own = own_of(&split, ranks.group.rank());
        let inputs: Vec<&Tensor> = [x].into_iter().chain(residual).collect();
        let held = self.parameters.hold(&inputs);
        let prepare = || {
            let argument = "x [tokens, K of this rank]";
            let shape = [m, self.k];
            let x = ranks.rows::<T::Token>(argument, held.input(0), shape)?;
            let residual = residual.map(|_| {
                let argument = "residual [tokens of this rank, N]";
                ranks.rows::<T::Token>(argument, held.input(1), [own.len(), self.n])
            });
            let residual = residual.transpose()?;
            let order = ranks.enter()?;
            let operands = held.operands(ranks)?;
            let x = T::input(ranks, &x, shape, self.first_column)?;
            let residual = residual
                .map(|rows| ranks.input::<T::Token>(&rows))
                .transpose()?;
            let out = ranks.output::<T::Token>([own.len(), self.n])?;
            Ok((order, operands, x, residual, out))
        };
        let (_order, operands, mut input, residual, mut out) = ranks.before(CALL, prepare)?;
        let mut product = MatmulReduceScatter::new().rows(&split);
        if let Some(bias) = operands.bias() {
            product = product.bias(bias);
        }
        if let Some(residual) = &residual {
            product = product.residual(&residual.matrix);
        }
        product.run(input.operand(), operands.weights(), B::matrix(&mut out))?;
        Ok(vec![with_leading(ranks.finish(out)?, x)?])
    }

    /// All rows of `Σ x · weightᵀ`, on every rank.
    fn replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        const CALL: &str = "matmul_all_reduce";
        let ranks = &*self.ranks;
        let (m, split) = ranks.step()?;
        let inputs: Vec<&Tensor> = [x].into_iter().chain(residual).collect();
        let held = self.parameters.hold(&inputs);
        let mut sums = lock(&self.sums);
        let prepare = || {
            let argument = "x [tokens, K of this rank]";
            let shape = [m, self.k];
            let x = ranks.rows::<T::Token>(argument, held.input(0), shape)?;
            let residual = residual.map(|_| {
                ranks.rows::<T::Token>("residual [tokens, N]", held.input(1), [m, self.n])
            });
            let residual = residual.transpose()?;
            let order = ranks.enter()?;
            let operands = held.operands(ranks)?;
            let x = T::input(ranks, &x, shape, self.first_column)?;
            let residual = residual
                .map(|rows| ranks.input::<T::Token>(&rows))
                .transpose()?;
            sums.set_rows(&split)?;
            let out = ranks.allocate::<T::Token>([m, self.n])?;
            Ok((order, operands, x, residual, out))
        };
        let (_order, operands, mut input, residual, out) = ranks.before(CALL, prepare)?;
        let mut product = MatmulAllReduce::new();
        if let Some(bias) = operands.bias() {
            product = product.bias(bias);
        }
        if let Some(residual) = &residual {
            product = product.residual(&residual.matrix);
        }
        product.run(input.operand(), operands.weights(), &mut *sums)?;
        Ok(vec![with_leading(ranks.take(&mut sums, out)?, x)?])
    }
}

/// The number of rows of a tensor with these dimensions.
fn rows_of(dims: &[usize]) -> usize {
    match dims {
        [.., rows, _] => *rows,
        _ => 0,
    }
}
