//! The weights and the bias of a layer, as it keeps them and as a call reads them.

use std::fmt::{self, Debug};

use candle_core::{Layout, Storage, StorageRef, Tensor};
use gemmesh::Matrix;
use gemmesh::fp8::Scales;
use gemmesh::views::MatrixView;

use crate::device::{Device, Input, Value};
use crate::failure::Failure;
use crate::multiplied::Multiplied;
use crate::ranks::Ranks;

/// The weights and the bias that a layer keeps.
pub struct Parameters<B: Device, T: Multiplied> {
    pub weights: Vec<Parameter<B, T>>,
    /// Those of each weight's blocks, and the row and the column of its first block at which the weight begins. Empty if
    /// weights have none.
    pub scales: Vec<(Parameter<B, f32>, [usize; 2])>,
    pub bias: Option<Parameter<B, T::Token>>,
}

/// A matrix [rows, columns].
pub enum Parameter<B: Device, T> {
    /// On the CPU.
    Copy(Matrix<B, T>),
    /// On a GPU. It is read in place. In-place operations may change its storage between calls.
    Tensor(Tensor, [usize; 2]),
}

/// The locked parameters and inputs of a call. Their storages do not change while this lives.
pub struct Held<'a, B: Device, T: Multiplied> {
    weights: Vec<HeldParameter<'a, B, T>>,
    scales: Vec<(HeldParameter<'a, B, f32>, [usize; 2])>,
    bias: Option<HeldParameter<'a, B, T::Token>>,
    inputs: Vec<(StorageRef<'a>, &'a Layout)>,
}

enum HeldParameter<'a, B: Device, T> {
    Copy(&'a Matrix<B, T>),
    Tensor(StorageRef<'a>, &'a Layout, [usize; 2]),
}

/// The parameters of a layer as a product takes them.
pub struct Operands<'a, B: Device, T: Multiplied> {
    weights: Vec<Operand<'a, B, T>>,
    scales: Vec<(Operand<'a, B, f32>, [usize; 2])>,
    bias: Option<Operand<'a, B, T::Token>>,
}

enum Operand<'a, B: Device, T> {
    Copy(&'a Matrix<B, T>),
    Tensor(Input<'a, B, T>),
}

impl<B: Device, T: Multiplied> Parameters<B, T> {
    /// Locks the parameters and the other inputs of a call.
    pub fn hold<'a>(&'a self, inputs: &[&'a Tensor]) -> Held<'a, B, T> {
        let weights = self.weights.iter().filter_map(Parameter::tensor);
        let scales = self.scales.iter().filter_map(|(one, _)| one.tensor());
        let bias = self.bias.iter().filter_map(Parameter::tensor);
        let tensors = weights.chain(scales).chain(bias);
        let mut storages = locked(tensors.chain(inputs.iter().copied())).into_iter();
        let weights = self.weights.iter();
        let weights = weights.filter_map(|weight| weight.hold(&mut storages));
        let weights = weights.collect();
        let scales = self.scales.iter();
        let scales = scales.filter_map(|(one, first)| Some((one.hold(&mut storages)?, *first)));
        let scales = scales.collect();
        let bias = self.bias.as_ref();
        let bias = bias.and_then(|bias| bias.hold(&mut storages));
        let inputs = inputs.iter().map(|input| input.layout());
        Held {
            weights,
            scales,
            bias,
            inputs: storages.zip(inputs).collect(),
        }
    }
}

/// Locks the storages of tensors for reading. Some tensors may share a storage, as parts of a packed weight do.
fn locked<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Vec<StorageRef<'a>> {
    // `storage_and_layout` waits behind a thread that waits to write. That thread would wait for this one if this one
    // held the lock already. So this runs before any storage is locked, and each is then locked without waiting for
    // such a thread.
    let locks = tensors.map(|tensor| {
        let (storage, _) = tensor.storage_and_layout();
        StorageRef::rwlock(&storage)
    });
    let locks: Vec<_> = locks.collect();
    locks.iter().map(|lock| lock.read_recursive()).collect()
}

impl<B: Device, T: Value> Parameter<B, T> {
    /// Checks a tensor that should be [rows, columns].
    pub fn new(
        ranks: &Ranks<B>,
        argument: &str,
        tensor: Tensor,
        shape: [usize; 2],
    ) -> Result<Self, Failure> {
        // As in every call, this comes before a tensor is locked.
        ranks.group.check()?;
        let matrix = {
            let (storage, layout) = tensor.storage_and_layout();
            let rows = ranks.rows::<T>(argument, (&storage, layout), shape)?;
            ranks.input(&rows)?.matrix
        };
        Ok(if tensor.device().is_cpu() {
            Parameter::Copy(matrix)
        } else {
            Parameter::Tensor(tensor, shape)
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

    /// The tensor that is read in place, if it is one.
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Parameter::Copy(_) => None,
            Parameter::Tensor(tensor, _) => Some(tensor),
        }
    }

    /// The parameter with the next of the storages, if it is a tensor.
    fn hold<'a>(
        &'a self,
        storages: &mut impl Iterator<Item = StorageRef<'a>>,
    ) -> Option<HeldParameter<'a, B, T>> {
        Some(match self {
            Parameter::Copy(matrix) => HeldParameter::Copy(matrix),
            Parameter::Tensor(tensor, shape) => {
                HeldParameter::Tensor(storages.next()?, tensor.layout(), *shape)
            }
        })
    }
}

impl<B: Device, T: Multiplied> Held<'_, B, T> {
    /// The input of this index.
    pub fn input(&self, index: usize) -> (&Storage, &Layout) {
        let (storage, layout) = &self.inputs[index];
        (storage, layout)
    }

    pub fn operands<'a>(&'a self, ranks: &'a Ranks<B>) -> Result<Operands<'a, B, T>, Failure> {
        let weights = self.weights.iter().map(|weight| weight.operand(ranks));
        let scales = self.scales.iter();
        let scales = scales.map(|(one, first)| Ok::<_, Failure>((one.operand(ranks)?, *first)));
        let bias = self.bias.as_ref().map(|bias| bias.operand(ranks));
        Ok(Operands {
            weights: weights.collect::<Result<_, _>>()?,
            scales: scales.collect::<Result<_, _>>()?,
            bias: bias.transpose()?,
        })
    }
}

impl<B: Device, T: Value> HeldParameter<'_, B, T> {
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

impl<B: Device, T: Multiplied> Operands<'_, B, T> {
    /// The weights, with their scales if they have any.
    pub fn weights(&self) -> gemmesh::products::Weights<'_, B, T> {
        let weights = self.weights.iter().enumerate();
        let operands = weights.map(|(number, weight)| match self.scales.get(number) {
            Some((scales, [row, column])) => {
                let scales = Scales::blocks(scales.view());
                let scales = scales.first_row(*row).first_column(*column);
                weight.view().scaled(scales)
            }
            None => weight.view().into(),
        });
        operands.collect::<gemmesh::products::Weights<'_, B, T>>()
    }

    pub fn bias(&self) -> Option<MatrixView<'_, B, T::Token>> {
        self.bias.as_ref().map(Operand::view)
    }
}

impl<B: Device, T: Value> Operand<'_, B, T> {
    fn view(&self) -> MatrixView<'_, B, T> {
        match self {
            Operand::Copy(matrix) => matrix.view(),
            Operand::Tensor(input) => input.matrix.view(),
        }
    }
}

impl<B: Device, T: Multiplied> Debug for Parameters<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut line = f.debug_struct("Parameters");
        line.field("weights", &self.weights);
        if T::IS_SCALED {
            line.field(
                "scales",
                &Vec::from_iter(self.scales.iter().map(|(one, _)| one)),
            );
        }
        line.field("bias", &self.bias).finish()
    }
}

impl<B: Device, T: Value> Debug for Parameter<B, T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Parameter::Copy(matrix) => write!(f, "{:?}", matrix.shape()),
            Parameter::Tensor(_, shape) => write!(f, "{shape:?}"),
        }
    }
}
