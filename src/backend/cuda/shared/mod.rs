//! What a group's ranks share on their GPUs: control words, symmetric memory, and the thread that watches them.
//!
//! Knows no operation.

pub mod lanes;
pub mod monitor;
pub mod symmetric;
pub mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::gpu::Gpu;
use super::gpu::streams::LANES;
use crate::error::{MadeCall, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use lanes::Lanes;
use monitor::{Monitor, OperationWaits};
use symmetric::{Peers, Symmetric};
use words::{Control, NetworkTurns, Waits};

/// One group's control words, peers and monitor.
#[derive(Debug)]
pub struct Shared {
    /// Dropped first, because its thread uses the other fields.
    pub monitor: Monitor,
    pub control: Control,
    /// The lanes to other hosts, if there are any.
    pub lanes: Option<Arc<Lanes>>,
    pub peers: Peers,
    /// How often the ranks' streams have been aligned.
    alignments: AtomicU32,
}

impl Shared {
    /// Collective. All flags hold the epoch before `first`.
    pub fn open(gpu: &Gpu, members: &Members, peers: Peers, first: Epoch) -> Result<Shared> {
        let control = Control::open(gpu, members, &peers, first)?;
        let own = control.own(members.rank);
        let spans_hosts = members.hosts.count() > 1;
        let open = || Lanes::open(gpu, members).map(Arc::new);
        let lanes = spans_hosts.then(open).transpose()?;
        Ok(Shared {
            // After the monitor's start, nothing fails without closing the group, and closing waits for the monitor's
            // work on the device.
            monitor: Monitor::start(&gpu.device, members, own, first, lanes.clone())?,
            control,
            lanes,
            peers,
            alignments: AtomicU32::new(0),
        })
    }

    /// Allocates `bytes` zeroed bytes on each rank. Collective, as `call`.
    pub fn symmetric(
        &self,
        gpu: &Gpu,
        members: &Members,
        call: &MadeCall,
        bytes: usize,
    ) -> Result<Symmetric> {
        Symmetric::allocate(gpu, members, &self.peers, call, bytes, |_| Ok(()))
    }

    /// Notes that an operation is about to be enqueued, and what it waits for.
    pub fn begin(&self, epoch: Epoch, words: &Waits, turns: &Arc<NetworkTurns>) {
        let lanes = self.lanes.as_ref();
        let waits = OperationWaits {
            words: words.clone(),
            turns: turns.clone(),
            before: lanes.map_or([0; LANES], |lanes| lanes.turns()),
        };
        self.monitor.begin(epoch, waits);
    }

    /// The number of the alignment that begins now, counted from 1.
    pub fn next_alignment(&self) -> u32 {
        self.alignments.fetch_add(1, Ordering::Relaxed) + 1
    }
}
