//! The words that let this rank's kernels and streams run through once the group has failed.

use std::mem::offset_of;
use std::sync::atomic::Ordering;

use super::{Watch, lock};
use crate::backend::cuda::abi::{GEMMESH_GROUP_FAILED, GemmeshPushEpoch};
use crate::backend::cuda::driver::StreamMemOp;
use crate::backend::cuda::shared::words::OwnWords;
use crate::error::Result;
use crate::protocol::epoch::Epoch;
use crate::schedule::{MAX_BLOCKS, MAX_FLAGS};

/// Values that copies bring to the words that streams wait for.
///
/// (A fill will not do, because it is a kernel, which may have to wait for the kernel that it is to release.)
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Satisfying {
    chunks: [u32; MAX_FLAGS],
    open: [u32; MAX_BLOCKS],
}

// SAFETY: plain words, for which zero is valid.
unsafe impl bytemuck::Zeroable for Satisfying {}

impl Watch {
    /// Lets what was put on the device since the last release run through, too, unless that one's words are still on their
    /// way.
    pub(super) fn release_again(&self) {
        if self.rescue.is_idle().unwrap_or(false) {
            // If the words can't be written, the device has failed, and nothing helps.
            let _ = self.release();
        }
    }

    /// Lets this rank's kernels and streams run through. Their results are void, because the group has failed.
    ///
    /// It is safe that this writes flags of other writers, because no one uses what they guard any more.
    pub(super) fn release(&self) -> Result<()> {
        let last = self.begun.load(Ordering::Acquire);
        let _bound = self.device.bind()?;
        let mut words = vec![
            StreamMemOp::Write(self.own.abort, GEMMESH_GROUP_FAILED),
            StreamMemOp::Write(
                self.own.push_epoch + offset_of!(GemmeshPushEpoch, permit) as u64,
                1,
            ),
        ];
        let OwnWords { flags, graph, .. } = &self.own;
        for (lines, value) in [(flags, last), (graph, Epoch::OPEN.raw())] {
            for peer in 0..self.world as u64 {
                words.push(StreamMemOp::Write(lines.ready + 4 * peer, value));
                words.push(StreamMemOp::Write(lines.done + 4 * peer, value));
            }
        }
        const { assert!(MAX_FLAGS <= MAX_BLOCKS) };
        // The monitor's thread and the thread that closes the group may both be here.
        let _alone = lock(&self.releases);
        self.satisfying.write(Satisfying {
            chunks: [last; MAX_FLAGS],
            open: [Epoch::OPEN.raw(); MAX_BLOCKS],
        });
        let chunks = self.satisfying.ptr() + offset_of!(Satisfying, chunks) as u64;
        let open = self.satisfying.ptr() + offset_of!(Satisfying, open) as u64;
        let (flags_bytes, blocks_bytes) = (4 * MAX_FLAGS, 4 * MAX_BLOCKS);
        // SAFETY: the control block lives as long as this thread, and what is copied until its stream has passed.
        unsafe {
            self.rescue.words(&words)?;
            self.rescue.copy(flags.chunk, chunks, flags_bytes)?;
            // A replay closes them again, so this is repeated as long as the replay goes on.
            self.rescue.copy(graph.chunk, open, flags_bytes)?;
            // For the blocks of a product whose kernel was not launched.
            self.rescue.copy(self.own.stored, open, blocks_bytes)
        }
    }
}
