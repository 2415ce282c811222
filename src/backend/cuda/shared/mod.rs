//! What a group's ranks share on their GPUs: control words, symmetric memory, and the thread that watches them.
//!
//! Knows no operation.

pub mod monitor;
pub mod network;
pub mod symmetric;
pub mod words;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::gpu::Gpu;
use super::gpu::streams::LANES;
use crate::error::{MadeCall, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use monitor::{Monitor, OperationWaits};
use network::Network;
use symmetric::{Peers, Symmetric};
use words::{Control, NetworkTurns, Waits};

/// One group's control words, peers and monitor.
#[derive(Debug)]
pub struct Shared {
    /// Dropped first, because its thread uses the other fields.
    pub monitor: Monitor,
    pub control: Control,
    /// The network to other hosts, if there are any.
    pub network: Option<Arc<Network>>,
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
        let open = || Network::open(gpu, members).map(Arc::new);
        let network = spans_hosts.then(open).transpose()?;
        Ok(Shared {
            // After the monitor's start, nothing fails without closing the group, and closing waits for the monitor's
            // work on the device.
            monitor: Monitor::start(&gpu.device, members, own, first, network.clone())?,
            control,
            network,
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
        let network = self.network.as_ref();
        let waits = OperationWaits {
            words: words.clone(),
            turns: turns.clone(),
            before: network.map_or([0; LANES], |network| network.turns()),
        };
        self.monitor.begin(epoch, waits);
    }

    /// The number of the alignment that begins now, counted from 1.
    pub fn next_alignment(&self) -> u32 {
        self.alignments.fetch_add(1, Ordering::Relaxed) + 1
    }
}
