//! The arguments of a product, from descriptions to what its group takes.

use super::Memory;
use super::group::AnyBackend;
use super::product::{AnyOperand, AnyOutputs, AnyShardedScales, ProductCall, RowOperand};
use crate::backend::Backend;
use crate::element::DType;
use crate::error::Result;
use crate::group::Group;
use crate::ops::Quantized;
use crate::ops::call::{RawOutput, RawView, require_property};
use crate::ops::product_operands::{
    Addends, ProductOperands, RawOutputs, RawResults, RawRows, RawWeights,
};
use crate::ops::quantized::ProductOutput;
use crate::ops::scales::{Placed as PlacedScales, RawOperand, RawShardedOperand, Scales};
use crate::schedule::Quantization;

/// The arguments of a call as its group takes them. They have the safety of the call that gives them.
pub(super) struct CallArguments<'g, 'c, B: Backend> {
    pub group: &'g Group<B>,
    pub call: &'c ProductCall<'c>,
}

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

    fn operand(
        &self,
        [name, scales]: [&str; 2],
        operand: &AnyOperand,
    ) -> Result<RawOperand<'g, B>> {
        let scales = match operand.scales {
            Some((memory, scaling)) => Some(Scales::raw(self.scales(scales, memory)?, scaling)),
            None => None,
        };
        Ok(RawOperand::new(self.view(name, operand.values)?, scales))
    }

    fn addends(&self) -> Result<Addends<'g, B>> {
        let ProductCall { bias, residual, .. } = self.call;
        Ok(Addends {
            bias: bias.map(|bias| self.view("bias", bias)).transpose()?,
            residual: residual
                .map(|residual| self.view("residual", residual))
                .transpose()?,
        })
    }

    fn rows(&self) -> Result<RawRows<'g, B>> {
        let (shards, scales) = match &self.call.a {
            RowOperand::Own(own) => {
                return Ok(RawRows::Own(self.operand(["a", SCALES_OF_A], own)?));
            }
            RowOperand::Sharded(shards, scales) => (shards, scales),
        };
        let scales = match scales {
            None => None,
            Some(AnyShardedScales::Own(memory, scaling)) => {
                let scales = self.scales(SCALES_OF_A, *memory)?;
                Some(PlacedScales::Own(Scales::raw(scales, *scaling)))
            }
            Some(AnyShardedScales::Sharded(shards, scaling)) => {
                Some(PlacedScales::sharded(shards.raw(SCALES_OF_A)?, *scaling)?)
            }
        };
        let shards = shards.raw("a")?;
        self.group.require_same("a", shards.group)?;
        Ok(RawRows::Sharded(RawShardedOperand::new(shards, scales)))
    }

    pub fn operands(&self) -> Result<ProductOperands<'g, B>> {
        let mut operands = ProductOperands {
            a: self.rows()?,
            weights: RawWeights::new(),
            addends: self.addends()?,
        };
        for weight in self.call.weights {
            let weight = self.operand(["b", SCALES_OF_B], weight)?;
            operands.weights.push(weight);
        }
        Ok(operands)
    }

    pub fn results(&self) -> Result<RawResults<'g, B>> {
        let all = match self.call.outputs {
            AnyOutputs::Sharded(shards) => return Ok(RawResults::Sharded(shards.raw("out")?)),
            AnyOutputs::Own(all) => all,
        };
        let mut outputs = RawOutputs::new();
        for output in all {
            let scales = match output.scales {
                // SAFETY: as that of the call.
                Some((memory, how)) => Some(unsafe { quantized(self.group, memory, how)? }),
                None => None,
            };
            let values = self.output("out", output.values)?;
            outputs.push(ProductOutput::new(values, scales));
        }
        Ok(RawResults::Own(outputs))
    }
}

const SCALES_OF_A: &str = "scales of a";
const SCALES_OF_B: &str = "scales of b";
const SCALES_OF_OUT: &str = "scales of out";

fn require_f32(name: &str, found: DType) -> Result<()> {
    require_property(name, "the dtype", found == DType::F32, DType::F32, found)
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
