//! What all that is put on streams needs.

use crate::backend::cuda::driver::Stream;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::Program;
use crate::backend::cuda::program::operands::Operands;
use crate::backend::cuda::program::params::CallNumbers;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::{Signals, Waits};
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::Agreed;

/// Where an operation is put.
#[derive(Clone, Copy)]
pub struct EnqueueContext<'a> {
    pub gpu: &'a Gpu,
    pub shared: &'a Shared,
    pub members: &'a Members,
    pub main: &'a Stream,
    /// It is recorded, to run later and often.
    pub recorded: bool,
}

/// A call of a program.
pub struct ProgramCall<'a> {
    /// The operation's number; that of the one before for what is no operation.
    pub epoch: Epoch,
    pub operands: Operands<'a>,
    /// Where what happened when is noted.
    pub trace: Option<&'a mut Vec<Span>>,
}

impl<'a> EnqueueContext<'a> {
    /// The words of operation `epoch`, or of one that is recorded.
    pub fn signals(&self, epoch: Epoch) -> Signals<'a> {
        match self.recorded {
            true => self.shared.control.graph_words(),
            false => self.shared.control.flags(epoch),
        }
    }

    /// How a kernel of `program` runs.
    pub fn run(&self, program: &Program, epoch: Epoch) -> CallNumbers {
        let recording = self.recorded.then(|| self.record(program, program.waits));
        CallNumbers { epoch, recording }
    }

    /// The number under which `program` is recorded.
    pub fn record(&self, program: &Program, waits: Waits) -> u32 {
        let name = program.schedule.agreed().map_or("", Agreed::name);
        self.shared.monitor.record(name, waits)
    }
}
