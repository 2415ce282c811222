//! The context of an enqueued call.

use crate::backend::cuda::driver::Stream;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::operands::Operands;
use crate::backend::cuda::program::params::CallNumbers;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::{Signals, Waits};
use crate::profile::span::Span;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::Agreed;

/// What enqueueing an operation needs.
#[derive(Clone, Copy)]
pub struct EnqueueContext<'a> {
    pub gpu: &'a Gpu,
    pub shared: &'a Shared,
    pub members: &'a Members,
    pub main: &'a Stream,
    /// Whether the operation is captured into a graph, to run later and often.
    pub recorded: bool,
}

/// A call of a program.
pub struct ProgramCall<'a> {
    /// The operation's epoch. A call that is no operation has the epoch of the operation before.
    pub epoch: Epoch,
    pub operands: Operands<'a>,
    /// Where the spans of a traced call go.
    pub trace: Option<&'a mut Vec<Span>>,
}

impl<'a> EnqueueContext<'a> {
    /// The flags of operation `epoch`, or the graph words if it is captured.
    pub fn signals(&self, epoch: Epoch) -> Signals<'a> {
        if self.recorded {
            self.shared.control.graph_words()
        } else {
            self.shared.control.flags(epoch)
        }
    }

    /// The epoch and, in a capture, the recording's number of a call of `program`.
    pub fn run(&self, program: &GpuProgram, epoch: Epoch) -> CallNumbers {
        let recording = self.recorded.then(|| self.record(program, &program.waits));
        CallNumbers { epoch, recording }
    }

    /// The number of the recording of `program`.
    pub fn record(&self, program: &GpuProgram, waits: &Waits) -> u32 {
        let name = program.schedule.agreed().map_or("", Agreed::name);
        self.shared.monitor.record(name, waits)
    }
}
