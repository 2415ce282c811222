//! Products of candle's tensors with weights that are spread over the ranks, by backend and type.

use std::fmt::{self, Debug};
use std::sync::Arc;

use candle_core::Tensor;
use gemmesh::{
    Activation, AllGatherMatmul, Error, Matmul, MatmulAllReduce, MatmulReduceScatter, Matrix,
    Result,
};

use crate::device::{Device, Half};
use crate::failure::Failure;
use crate::ranks::{MAKE, Parameters, Ranks, Symmetric, lock, own_of, with_leading};

/// What a layer does, whatever its backend and type.
pub trait Product: Send + Sync + Debug {
    /// Of tokens that are spread over the ranks. The residual is added last.
    fn sequence_parallel(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Vec<Tensor>, Failure>;

    /// Of tokens that every rank has.
    fn replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Vec<Tensor>, Failure>;
}

/// A weight or a bias.
struct Parameter<B: Device, T> {
    matrix: Matrix<B, T>,
    /// On GPUs the matrix is a view of its memory.
    _tensor: Option<Tensor>,
}

impl<B: Device, T: Half> Parameter<B, T> {
    fn new(
        ranks: &Ranks<B>,
        argument: &str,
        tensor: Tensor,
        shape: [usize; 2],
    ) -> Result<Self, Failure> {
        let matrix = {
            let (storage, layout) = tensor.storage_and_layout();
            let rows = ranks.rows::<T>(argument, (&storage, layout), shape);
            ranks.input(&rows.map_err(ranks.refuse(MAKE))?)?.matrix
        };
        let is_view = !tensor.device().is_cpu();
        Ok(Parameter {
            matrix,
            _tensor: is_view.then_some(tensor),
        })
    }

    /// [N], as candle has it.
    fn bias(ranks: &Ranks<B>, bias: Tensor, n: usize) -> Result<Self, Failure> {
        let row = match bias.rank() {
            1 => bias.unsqueeze(0)?,
            _ => bias,
        };
        Parameter::new(ranks, "bias [N]", row, [1, n])
    }
}

impl<B: Device, T: Half> Debug for Parameter<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.matrix.fmt(f)
    }
}

/// [N, K] of a weight.
fn extents<B: Device>(ranks: &Ranks<B>, weight: &Tensor) -> Result<[usize; 2], Failure> {
    match weight.dims() {
        &[n, k] => Ok([n, k]),
        other => Err(ranks.refuse(MAKE)(Error::Shape {
            rank: ranks.group.rank(),
            argument: "how many dimensions weight [N, K] has".into(),
            expected: vec![2],
            found: vec![other.len()],
        })),
    }
}

/// Weights of which each rank has some columns of the output.
#[derive(Debug)]
pub struct Columns<B: Device, T: Half> {
    weights: Vec<Parameter<B, T>>,
    bias: Option<Parameter<B, T>>,
    /// The weights are a gate and its up projection.
    gated: bool,
    k: usize,
    gathered: Symmetric<B, T>,
    ranks: Arc<Ranks<B>>,
}

impl<B: Device, T: Half> Columns<B, T> {
    pub fn new(ranks: Arc<Ranks<B>>, parameters: Parameters, gated: bool) -> Result<Self, Failure> {
        ranks.enter()?;
        let [first, k] = extents(&ranks, &parameters.weights[0])?;
        let mut weights = Vec::new();
        for weight in parameters.weights {
            let [n, _] = extents(&ranks, &weight)?;
            let n = if gated { first } else { n };
            weights.push(Parameter::new(&ranks, "weight [N, K]", weight, [n, k])?);
        }
        let n = weights.iter().map(|weight| weight.matrix.shape()[0]).sum();
        let bias = parameters.bias;
        let bias = bias
            .map(|bias| Parameter::bias(&ranks, bias, n))
            .transpose()?;
        Ok(Columns {
            weights,
            bias,
            gated,
            k,
            gathered: ranks.symmetric(k)?,
            ranks,
        })
    }

    fn weights(&self) -> gemmesh::Weights<'_, B, T> {
        let views = self.weights.iter().map(|weight| weight.matrix.view());
        views.collect()
    }

    /// Of `m` rows, for each weight or for the gate and its up projection together.
    fn outputs(&self, m: usize) -> Result<Vec<B::Output<T>>, Failure> {
        let weights = match self.gated {
            true => &self.weights[..1],
            false => &self.weights,
        };
        let widths = weights.iter().map(|weight| weight.matrix.shape()[0]);
        widths.map(|n| self.ranks.output([m, n])).collect()
    }

    fn finish(&self, outputs: Vec<B::Output<T>>, x: &Tensor) -> Result<Vec<Tensor>, Failure> {
        let tensor = |output| Ok(with_leading(self.ranks.finish(output)?, x)?);
        outputs.into_iter().map(tensor).collect()
    }
}

fn views<B: Device, T: Half>(outputs: &mut [B::Output<T>]) -> gemmesh::Outputs<'_, B, T> {
    let views = outputs
        .iter_mut()
        .map(|output| B::matrix(output).view_mut());
    views.collect::<gemmesh::Outputs<'_, B, T>>()
}

impl<B: Device, T: Half> Product for Columns<B, T> {
    /// `gather(x) · weightᵀ`.
    fn sequence_parallel(&self, x: &Tensor, _: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        let ranks = &*self.ranks;
        let (m, split) = (ranks.tokens(), ranks.split());
        let own = own_of(&split, ranks.group.rank());
        let (storage, layout) = x.storage_and_layout();
        let shape = [own.len(), self.k];
        let rows = ranks.rows::<T>("x [tokens of this rank, K]", (&storage, layout), shape);
        let rows = rows.map_err(ranks.refuse("all_gather_matmul"))?;
        ranks.enter()?;
        let mut outputs = self.outputs(m)?;
        let mut gathered = lock(&self.gathered);
        gathered.set_rows(&split)?;
        ranks.put(&rows, &mut gathered)?;
        let mut product = AllGatherMatmul::new();
        if let Some(bias) = &self.bias {
            product = product.bias(&bias.matrix);
        }
        if self.gated {
            product = product.gated().activation(Activation::Silu);
        }
        product.run(&gathered, self.weights(), views::<B, T>(&mut outputs))?;
        drop(gathered);
        self.finish(outputs, x)
    }

    /// `x · weightᵀ`, with no communication.
    fn replicated(&self, x: &Tensor, _: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        let ranks = &*self.ranks;
        let (storage, layout) = x.storage_and_layout();
        let m = rows_of(layout.dims());
        let rows = ranks.rows::<T>("x [tokens, K]", (&storage, layout), [m, self.k])?;
        ranks.enter()?;
        let input = ranks.input::<T>(&rows)?;
        let mut outputs = self.outputs(m)?;
        let mut product = Matmul::new();
        if let Some(bias) = &self.bias {
            product = product.bias(&bias.matrix);
        }
        if self.gated {
            product = product.gated().activation(Activation::Silu);
        }
        product.run(&input.matrix, self.weights(), views::<B, T>(&mut outputs))?;
        self.finish(outputs, x)
    }
}

/// A weight of which each rank has a part of K.
#[derive(Debug)]
pub struct RowsOfWeight<B: Device, T: Half> {
    weight: Parameter<B, T>,
    bias: Option<Parameter<B, T>>,
    n: usize,
    k: usize,
    sums: Symmetric<B, T>,
    ranks: Arc<Ranks<B>>,
}

impl<B: Device, T: Half> RowsOfWeight<B, T> {
    pub fn new(ranks: Arc<Ranks<B>>, parameters: Parameters) -> Result<Self, Failure> {
        ranks.enter()?;
        let Parameters { mut weights, bias } = parameters;
        let weight = weights.remove(0);
        let [n, k] = extents(&ranks, &weight)?;
        Ok(RowsOfWeight {
            weight: Parameter::new(&ranks, "weight [N, K]", weight, [n, k])?,
            bias: bias
                .map(|bias| Parameter::bias(&ranks, bias, n))
                .transpose()?,
            n,
            k,
            sums: ranks.symmetric(n)?,
            ranks,
        })
    }
}

impl<B: Device, T: Half> Product for RowsOfWeight<B, T> {
    /// This rank's rows of `Σ x · weightᵀ`.
    fn sequence_parallel(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
    ) -> Result<Vec<Tensor>, Failure> {
        const CALL: &str = "matmul_reduce_scatter";
        let ranks = &*self.ranks;
        let (m, split) = (ranks.tokens(), ranks.split());
        let own = own_of(&split, ranks.group.rank());
        let (storage, layout) = x.storage_and_layout();
        let rows = ranks.rows::<T>(
            "x [tokens, K of this rank]",
            (&storage, layout),
            [m, self.k],
        );
        let rows = rows.map_err(ranks.refuse(CALL))?;
        let added = residual.map(Tensor::storage_and_layout);
        let added = added.as_ref().map(|(storage, layout)| {
            let shape = [own.len(), self.n];
            ranks.rows::<T>(
                "residual [tokens of this rank, N]",
                (storage, layout),
                shape,
            )
        });
        let added = added.transpose().map_err(ranks.refuse(CALL))?;
        ranks.enter()?;
        let input = ranks.input::<T>(&rows)?;
        let added = added.map(|rows| ranks.input::<T>(&rows)).transpose()?;
        let mut out = ranks.output::<T>([own.len(), self.n])?;
        let mut product = MatmulReduceScatter::new().rows(&split);
        if let Some(bias) = &self.bias {
            product = product.bias(&bias.matrix);
        }
        if let Some(added) = &added {
            product = product.residual(&added.matrix);
        }
        product.run(&input.matrix, &self.weight.matrix, B::matrix(&mut out))?;
        Ok(vec![with_leading(ranks.finish(out)?, x)?])
    }

    /// All rows of `Σ x · weightᵀ`, on every rank.
    fn replicated(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Vec<Tensor>, Failure> {
        const CALL: &str = "matmul_all_reduce";
        let ranks = &*self.ranks;
        let (m, split) = (ranks.tokens(), ranks.split());
        let (storage, layout) = x.storage_and_layout();
        let rows = ranks.rows::<T>(
            "x [tokens, K of this rank]",
            (&storage, layout),
            [m, self.k],
        );
        let rows = rows.map_err(ranks.refuse(CALL))?;
        let added = residual.map(Tensor::storage_and_layout);
        let added = added.as_ref().map(|(storage, layout)| {
            ranks.rows::<T>("residual [tokens, N]", (storage, layout), [m, self.n])
        });
        let added = added.transpose().map_err(ranks.refuse(CALL))?;
        ranks.enter()?;
        let input = ranks.input::<T>(&rows)?;
        let added = added.map(|rows| ranks.input::<T>(&rows)).transpose()?;
        let mut sums = lock(&self.sums);
        sums.set_rows(&split)?;
        let mut product = MatmulAllReduce::new();
        if let Some(bias) = &self.bias {
            product = product.bias(&bias.matrix);
        }
        if let Some(added) = &added {
            product = product.residual(&added.matrix);
        }
        product.run(&input.matrix, &self.weight.matrix, &mut sums)?;
        Ok(vec![with_leading(ranks.take(&mut sums)?, x)?])
    }
}

/// The rows of a tensor, if it is one of rows.
fn rows_of(dims: &[usize]) -> usize {
    match dims {
        [.., rows, _] => *rows,
        _ => 0,
    }
}
