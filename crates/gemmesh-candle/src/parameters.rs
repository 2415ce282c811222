//! The weights and the bias of a layer: when it is made, and during a call.

use std::fmt::{self, Debug};
use std::ops::Deref;

use candle_core::{Layout, Storage, Tensor};
use gemmesh::{Matrix, MatrixView};

use crate::device::{Device, Half, Input};
use crate::failure::Failure;
use crate::ranks::Ranks;

/// What a layer keeps.
#[derive(Debug)]
pub struct Parameters<B: Device, T: Half> {
    pub weights: Vec<Parameter<B, T>>,
    pub bias: Option<Parameter<B, T>>,
}

/// A matrix [rows, columns].
pub enum Parameter<B: Device, T> {
    /// On the CPU.
    Copy(Matrix<B, T>),
    /// On a GPU: read where it lies, which in-place operations may change between calls.
    Tensor(Tensor, [usize; 2]),
}

/// The parameters of a layer while nobody changes where they lie.
pub struct Held<'a, B: Device, T> {
    weights: Vec<HeldParameter<'a, B, T>>,
    bias: Option<HeldParameter<'a, B, T>>,
}

enum HeldParameter<'a, B: Device, T> {
    Copy(&'a Matrix<B, T>),
    Tensor(LockedStorage<'a>, &'a Layout, [usize; 2]),
}

/// A tensor's storage, which candle has locked.
type LockedStorage<'a> = Box<dyn Deref<Target = Storage> + 'a>;

/// The parameters of a layer as a product takes them.
pub struct Operands<'a, B: Device, T> {
    weights: Vec<Operand<'a, B, T>>,
    bias: Option<Operand<'a, B, T>>,
}

enum Operand<'a, B: Device, T> {
    Copy(&'a Matrix<B, T>),
    Tensor(Input<'a, B, T>),
}

impl<B: Device, T: Half> Parameters<B, T> {
    pub fn hold(&self) -> Held<'_, B, T> {
        Held {
            weights: self.weights.iter().map(Parameter::hold).collect(),
            bias: self.bias.as_ref().map(Parameter::hold),
        }
    }
}

impl<B: Device, T: Half> Parameter<B, T> {
    /// Checks a tensor that should be [rows, columns].
    pub fn new(
        ranks: &Ranks<B>,
        argument: &str,
        tensor: Tensor,
        shape: [usize; 2],
    ) -> Result<Self, Failure> {
        let matrix = {
            let (storage, layout) = tensor.storage_and_layout();
            let rows = ranks.rows::<T>(argument, (&storage, layout), shape)?;
            ranks.input(&rows)?.matrix
        };
        Ok(match tensor.device().is_cpu() {
            true => Parameter::Copy(matrix),
            false => Parameter::Tensor(tensor, shape),
        })
    }

    /// [N], as candle has it.
    pub fn bias(ranks: &Ranks<B>, bias: Tensor, n: usize) -> Result<Self, Failure> {
        let row = match bias.rank() {
            1 => bias.unsqueeze(0)?,
            _ => bias,
        };
        Parameter::new(ranks, "bias [N]", row, [1, n])
    }

    fn hold(&self) -> HeldParameter<'_, B, T> {
        match self {
            Parameter::Copy(matrix) => HeldParameter::Copy(matrix),
            Parameter::Tensor(tensor, shape) => {
                let (storage, layout) = tensor.storage_and_layout();
                HeldParameter::Tensor(Box::new(storage), layout, *shape)
            }
        }
    }
}

impl<B: Device, T: Half> Held<'_, B, T> {
    pub fn operands<'a>(&'a self, ranks: &'a Ranks<B>) -> Result<Operands<'a, B, T>, Failure> {
        let operand = |parameter: &'a HeldParameter<'_, B, T>| parameter.operand(ranks);
        Ok(Operands {
            weights: self.weights.iter().map(operand).collect::<Result<_, _>>()?,
            bias: self.bias.as_ref().map(operand).transpose()?,
        })
    }
}

impl<B: Device, T: Half> HeldParameter<'_, B, T> {
    fn operand<'a>(&'a self, ranks: &'a Ranks<B>) -> Result<Operand<'a, B, T>, Failure> {
        Ok(match self {
            HeldParameter::Copy(matrix) => Operand::Copy(matrix),
            HeldParameter::Tensor(storage, layout, shape) => {
                let rows = ranks.rows::<T>("a weight or a bias", (storage, layout), *shape)?;
                Operand::Tensor(ranks.input(&rows)?)
            }
        })
    }
}

impl<B: Device, T: Half> Operands<'_, B, T> {
    pub fn weights(&self) -> gemmesh::Weights<'_, B, T> {
        self.weights.iter().map(Operand::view).collect()
    }

    /// The only one.
    pub fn weight(&self) -> MatrixView<'_, B, T> {
        self.weights[0].view()
    }

    pub fn bias(&self) -> Option<MatrixView<'_, B, T>> {
        self.bias.as_ref().map(Operand::view)
    }
}

impl<B: Device, T: Half> Operand<'_, B, T> {
    fn view(&self) -> MatrixView<'_, B, T> {
        match self {
            Operand::Copy(matrix) => matrix.view(),
            Operand::Tensor(input) => input.matrix.view(),
        }
    }
}

impl<B: Device, T: Half> Debug for Parameter<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Parameter::Copy(matrix) => write!(f, "{:?}", matrix.shape()),
            Parameter::Tensor(_, shape) => write!(f, "{shape:?}"),
        }
    }
}
