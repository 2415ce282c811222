//! The arguments of a product, from descriptions to what its group takes.

use super::Memory;
use super::group::AnyBackend;
use super::product::{Operand, Outputs, ProductCall, RowOperand, ShardedScales};
use crate::backend::Backend;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::ops::Quantized;
use crate::ops::call::{RawOutput, RawShards, RawView, require_property};
use crate::ops::partial_sums::SumOperands;
use crate::ops::product::{Addends, RawOutputs, RawProduct, RawWeights};
use crate::ops::quantized::ProductOutput;
use crate::ops::scales::{Placed as PlacedScales, RawOperand, RawShardedOperand, Scales};
use crate::schedule::Quantization;

/// The arguments of a call as its group takes them. They have the safety of the call that gives them.
pub(super) struct CallArguments<'g, 'c, B: Backend> {
    pub group: &'g Group<B>,
    pub call: &'c ProductCall<'c>,
}

// Operands are large, and returning one moves it. So those that make one are inlined where it is kept, and lists are lent.
impl<'g, 'c: 'g, B: AnyBackend> CallArguments<'g, 'c, B> {
    fn view(&self, name: &str, memory: Memory) -> Result<RawView<'g, B>> {
        // SAFETY: as that of the call.
        unsafe { RawView::at(self.group, name, memory) }
    }

    fn output(&self, name: &str, memory: Memory) -> Result<RawOutput<'g, B>> {
        // SAFETY: as that of the call.
        unsafe { RawOutput::at(self.group, name, memory) }
    }

    /// Scales in this rank's memory. `name`: theirs in messages.
    fn scales(&self, name: &str, memory: Memory) -> Result<RawView<'g, B>> {
        require_f32(name, memory.dtype)?;
        self.view(name, memory)
    }

    #[inline(always)]
    fn operand(&self, [name, scales]: [&str; 2], operand: &Operand) -> Result<RawOperand<'g, B>> {
        let scales = match operand.scales {
            Some((memory, scaling)) => Some(Scales::raw(self.scales(scales, memory)?, scaling)),
            None => None,
        };
        Ok(RawOperand::new(self.view(name, operand.values)?, scales))
    }

    #[inline(always)]
    pub fn addends(&self) -> Result<Addends<'g, B>> {
        let ProductCall { bias, residual, .. } = self.call;
        Ok(Addends {
            bias: bias.map(|bias| self.view("bias", bias)).transpose()?,
            residual: residual
                .map(|residual| self.view("residual", residual))
                .transpose()?,
        })
    }

    /// Adds the weights to a list.
    fn weights(&self, weights: &mut RawWeights<'g, B>) -> Result<()> {
        for weight in self.call.weights {
            weights.push(self.operand(["b", SCALES_OF_B], weight)?);
        }
        Ok(())
    }

    /// The rows, which must be this rank's own.
    pub fn own(&self) -> Result<RawOperand<'g, B>> {
        match &self.call.a {
            RowOperand::Own(own) => self.operand(["a", SCALES_OF_A], own),
            RowOperand::Sharded(..) => Err(misplaced("a", "a matrix of this rank's own")),
        }
    }

    /// The rows, which must be sharded.
    #[inline(always)]
    pub fn sharded(&self) -> Result<RawShardedOperand<'g, B>> {
        let RowOperand::Sharded(shards, scales) = &self.call.a else {
            return Err(misplaced("a", "a sharded matrix"));
        };
        let scales = match scales {
            None => None,
            Some(ShardedScales::Own(memory, scaling)) => {
                let scales = self.scales(SCALES_OF_A, *memory)?;
                Some(PlacedScales::Own(Scales::raw(scales, *scaling)))
            }
            Some(ShardedScales::Sharded(shards, scaling)) => {
                Some(PlacedScales::sharded(shards.raw(SCALES_OF_A)?, *scaling)?)
            }
        };
        let shards = shards.raw("a")?;
        self.group.require_same("a", shards.group)?;
        Ok(RawShardedOperand::new(shards, scales))
    }

    pub fn operands(&self) -> Result<SumOperands<'g, 'g, B>> {
        let mut operands = SumOperands {
            a: self.own()?,
            weights: RawWeights::new(),
            addends: self.addends()?,
        };
        self.weights(&mut operands.weights)?;
        Ok(operands)
    }

    /// Adds the outputs, which must be this rank's own, to a list.
    pub fn outputs(&self, outputs: &mut RawOutputs<'g, B>) -> Result<()> {
        let Outputs::Own(all) = self.call.outputs else {
            return Err(misplaced("out", "a matrix of this rank's own"));
        };
        for output in all {
            let scales = match output.scales {
                // SAFETY: as that of the call.
                Some((memory, how)) => Some(unsafe { quantized(self.group, memory, how)? }),
                None => None,
            };
            outputs.push(ProductOutput::new(
                self.output("out", output.values)?,
                scales,
            ));
        }
        Ok(())
    }

    /// Makes lists of the weights and of the outputs, which must be this rank's own, and lends them to `run`.
    pub fn with_product(
        &self,
        refuse: &dyn Fn(Error) -> Error,
        run: impl FnOnce(RawProduct<'_, 'g, 'g, B>) -> Result<()>,
    ) -> Result<()> {
        let (mut weights, mut outputs) = (RawWeights::new(), RawOutputs::new());
        self.weights(&mut weights).map_err(refuse)?;
        self.outputs(&mut outputs).map_err(refuse)?;
        run((&weights, &mut outputs))
    }

    /// The sums, which must go to a sharded matrix.
    pub fn sums(&self) -> Result<RawShards<'g, B>> {
        match self.call.outputs {
            Outputs::Sharded(shards) => shards.raw("out"),
            Outputs::Own(_) => Err(misplaced("out", "a sharded matrix")),
        }
    }
}

const SCALES_OF_A: &str = "scales of a";
const SCALES_OF_B: &str = "scales of b";
const SCALES_OF_OUT: &str = "scales of out";

fn require_f32(name: &str, found: DType) -> Result<()> {
    require_property(name, "the dtype", found == DType::F32, DType::F32, found)
}

pub(super) fn misplaced(argument: &str, expected: &str) -> Error {
    let found = match expected {
        "a sharded matrix" => "a matrix of this rank's own",
        _ => "a sharded matrix",
    };
    Error::unsuitable(format!("the kind of {argument}"), expected, found)
}

/// Scales of an output, which are made or given as `how` says.
///
/// # Safety
/// As [`RawOutput::at`].
pub(super) unsafe fn quantized<B: Backend>(
    group: &Group<B>,
    memory: Memory,
    how: Quantization,
) -> Result<Quantized<'_, B>> {
    require_f32(SCALES_OF_OUT, memory.dtype)?;
    // SAFETY: as this function's.
    unsafe {
        let given = RawView::at(group, SCALES_OF_OUT, memory)?;
        let made = RawOutput::at(group, SCALES_OF_OUT, memory)?;
        Ok(Quantized::raw(given, made, how))
    }
}
