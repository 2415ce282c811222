//! Checks that each rank can read and write every peer's memory.

use super::wait;
use crate::backend::cuda::driver::{DeviceMemory, Stream};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::Deferred;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::words::BOX;
use crate::backend::delays::scatter;
use crate::error::{Kind, Result};
use crate::ranks::members::Members;

/// Writes a pattern to the memory of every peer of this host, reads one from it, and verifies both. Collective.
///
/// # Errors
/// [`Kind::PeerMemory`] names a pair that fails. Otherwise the group's failure.
pub fn check_peers(gpu: &Gpu, shared: &Shared, members: &Members) -> Result<()> {
    let (rank, world) = (members.rank, members.world);
    let _bound = gpu.device.bind()?;
    let main = gpu.main();
    let mut check = PeerCheck {
        shared,
        members,
        stream: &main,
        scratch: gpu.scratch(2 * BOX)?,
    };
    if main.is_capturing()? {
        return Err(Kind::Capturing.on(rank));
    }
    let peers = || members.hosts.neighbours(rank, world);
    let inbox = |of: usize, by: usize| shared.control.inbox(of, by);
    // Box p of rank r belongs to this pair. First r writes it and p reads it ...
    for peer in peers() {
        check.write(inbox(rank, peer), rank, peer)?;
    }
    members.barrier()?;
    for peer in peers() {
        check.verify(inbox(peer, rank), peer, rank, peer)?;
    }
    members.barrier()?;
    // ... then p writes it and r reads it.
    for peer in peers() {
        check.write(inbox(peer, rank), rank + world, peer)?;
    }
    members.barrier()?;
    for peer in peers() {
        check.verify(inbox(rank, peer), peer + world, rank, peer)?;
    }
    members.barrier()
}

struct PeerCheck<'a> {
    shared: &'a Shared,
    members: &'a Members,
    stream: &'a Stream,
    scratch: Deferred<DeviceMemory>,
}

impl PeerCheck<'_> {
    /// Writes the pattern of `from` for `to` to a box.
    fn write(&mut self, to_box: u64, from: usize, to: usize) -> Result<()> {
        let bytes = pattern(from, to);
        self.scratch.region_mut().write_rows(0, BOX, BOX, &bytes)?;
        self.copy(to_box, self.scratch.ptr())
    }

    /// Checks that a box of `peer`, or a box for it, holds the pattern of `from` for `to`.
    fn verify(&self, in_box: u64, from: usize, to: usize, peer: usize) -> Result<()> {
        self.copy(self.scratch.ptr(), in_box)?;
        let mut seen = vec![0u8; BOX];
        self.scratch.region().read_rows(0, BOX, BOX, &mut seen)?;
        if seen == pattern(from, to) {
            return Ok(());
        }
        let rank = self.members.rank;
        Err(self
            .members
            .fail(Kind::PeerMemory { peer, reason: None }.on(rank)))
    }

    fn copy(&self, to: u64, from: u64) -> Result<()> {
        // SAFETY: boxes and the scratch are BOX bytes long; the barriers keep writers and readers apart.
        unsafe { self.stream.copy(to, from, BOX)? };
        wait::until_idle(self.shared, self.members, self.stream)
    }
}

/// Bytes that depend on who wrote them for whom.
fn pattern(from: usize, to: usize) -> Vec<u8> {
    let seed = (from as u64) << 32 | to as u64;
    (0..BOX as u64 / 8)
        .flat_map(|i| scatter(seed ^ i << 8).to_le_bytes())
        .collect()
}
