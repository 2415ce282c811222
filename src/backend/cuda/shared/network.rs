//! The network to GPUs of other hosts: NCCL's communicators.
//!
//! NCCL moves a message by a kernel with a few CTAs, so the library's own kernels leave it multiprocessors
//! ([`CTAS`]). Such a kernel ends when its messages have come or gone, or when its communicator is aborted. Messages of
//! one communicator are moved one after the other. So there are two communicators, the **lanes**, which have every
//! second turn ([`Transfer::turn`](crate::schedule::Transfer::turn)).
//!
//! The communicators do not block, so each wait has the group's deadline. If the group has failed, the monitor aborts
//! them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::words::Control;
use crate::backend::cuda::driver::{
    Communicator, CommunicatorId, ID_BYTES, Nccl, NcclMessage, Stream,
};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::streams::LANES;
use crate::error::{Error, Result};
use crate::ranks::members::{Members, opening};

/// The most CTAs of NCCL's kernel of one turn.
const LANE_CTAS: usize = 2;
/// Multiprocessors that the library's own kernels leave to NCCL's.
pub const CTAS: usize = LANES * LANE_CTAS;

/// How long NCCL may take to connect ranks, at least.
const LONG: Duration = Duration::from_secs(60);

/// This rank's ends of the communicators.
#[derive(Debug)]
pub struct Network {
    lanes: Vec<Lane>,
    /// By lane: the turns of all operations that were enqueued.
    turns: [AtomicU32; LANES],
}

/// A communicator. None once it was closed or aborted.
#[derive(Debug)]
struct Lane(Mutex<Option<Communicator>>);

impl Network {
    /// Opens the communicators, and connects this rank with all ranks of other hosts, because the first message between
    /// two ranks takes long. Collective.
    ///
    /// # Errors
    /// [`Error::NoNccl`] of the first rank that has no NCCL; what NCCL says; the group's failure.
    pub fn open(gpu: &Gpu, members: &Members, control: &Control) -> Result<Network> {
        let nccl = Nccl::load(members.rank);
        let ids = agree(members, &nccl)?;
        let nccl = nccl?;
        let ends = (members.rank, members.world);
        let begin = |id| Communicator::begin(&nccl, &gpu.device, id, ends, LANE_CTAS);
        let lanes = ids.iter().map(|id| begin(id).map(Lane::new));
        let network = Network {
            lanes: lanes.collect::<Result<_>>()?,
            turns: Default::default(),
        };
        for lane in &network.lanes {
            lane.settle(members)?;
        }
        for (lane, stream) in gpu.streams().lanes.iter().enumerate() {
            network.connect(members, control, lane, stream)?;
        }
        Ok(network)
    }

    /// Sends a few bytes to all ranks of other hosts, and receives theirs.
    fn connect(
        &self,
        members: &Members,
        control: &Control,
        lane: usize,
        stream: &Stream,
    ) -> Result<()> {
        const BYTES: usize = 64;
        let (rank, hosts) = (members.rank, &members.hosts);
        let others = (0..members.world).filter(|&peer| !hosts.share(rank, peer));
        let message = |peer: usize, by: usize| NcclMessage {
            peer,
            place: control.inbox(rank, by),
            bytes: BYTES,
        };
        let sent: Vec<_> = others.clone().map(|peer| message(peer, rank)).collect();
        let received: Vec<_> = others.map(|peer| message(peer, peer)).collect();
        // SAFETY: boxes of this rank's control block, which is unmapped when the streams have passed. No rank uses them
        // before all have met again.
        unsafe { self.exchange(members, lane, stream, &sent, &received)? };
        await_with_deadline(members, || stream.is_idle())
    }

    /// Puts messages on a lane's stream. They are sent and received at the same time. Returns when more can be put on
    /// the stream.
    ///
    /// # Errors
    /// What NCCL says; the group's failure.
    ///
    /// # Safety
    /// As [`Stream::copy`] for each message.
    pub unsafe fn exchange(
        &self,
        members: &Members,
        lane: usize,
        stream: &Stream,
        sent: &[NcclMessage],
        received: &[NcclMessage],
    ) -> Result<()> {
        let lane = &self.lanes[lane];
        // SAFETY: as this function's.
        let begun =
            lane.with(|communicator| unsafe { communicator.exchange(stream, sent, received) });
        begun.unwrap_or_else(|| Err(aborted(members)))?;
        lane.settle(members)
    }

    /// By lane: the turns of all operations that were enqueued.
    pub fn turns(&self) -> [u32; LANES] {
        std::array::from_fn(|lane| self.turns[lane].load(Ordering::Relaxed))
    }

    /// Counts a turn of a lane, and returns the new count.
    pub fn count_turn(&self, lane: usize) -> u32 {
        self.turns[lane].fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What NCCL says has failed, if anything has.
    pub fn failure(&self) -> Option<Error> {
        let asked = self.lanes.iter();
        let asked = asked.filter_map(|lane| lane.with(Communicator::is_settled));
        asked.filter_map(Result::err).next()
    }

    /// Ends all messages that are under way. It takes half a second.
    pub fn abort(&self) {
        std::thread::scope(|scope| {
            for communicator in self.lanes.iter().filter_map(Lane::take) {
                scope.spawn(|| communicator.abort());
            }
        });
    }

    /// Closes the communicators once what they have sent has gone, or aborts them after `longest`. No message is under
    /// way on this rank's streams.
    pub fn close(&self, longest: Duration) {
        let begin = Instant::now();
        for lane in &self.lanes {
            let mut has_gone = lane.with(Communicator::finalize).is_some_and(|r| r.is_ok());
            while has_gone {
                match lane.with(Communicator::is_settled) {
                    Some(Ok(true)) => break,
                    Some(Ok(false)) if begin.elapsed() < longest => std::thread::yield_now(),
                    _ => has_gone = false,
                }
            }
            if let Some(communicator) = lane.take().filter(|_| has_gone) {
                communicator.destroy();
            }
        }
        self.abort();
    }
}

/// Makes the lanes' ids on rank 0, for all ranks. Collective.
fn agree(members: &Members, nccl: &Result<Arc<Nccl>>) -> Result<Vec<CommunicatorId>> {
    let own = nccl.as_ref().map_err(Error::clone).and_then(|nccl| {
        let count = if members.rank == 0 { LANES } else { 0 };
        let ids = (0..count).map(|_| nccl.new_id(members.rank));
        ids.collect::<Result<Vec<_>>>()
    });
    let own = own.map(|ids| (ids.concat(), None));
    let gathered = members.gather_messages(&opening(), own)?;
    let (ids, rest) = gathered.payloads[0].as_chunks::<ID_BYTES>();
    match ids.len() == LANES && rest.is_empty() {
        true => Ok(ids.to_vec()),
        false => Err(members.fail(Error::Message {
            rank: 0,
            reason: format!("{} bytes of ids of NCCL", gathered.payloads[0].len()),
        })),
    }
}

/// The error of a call after the communicators were aborted.
fn aborted(members: &Members) -> Error {
    members.fault().unwrap_or_else(|| Error::Internal {
        rank: members.rank,
        what: "a communicator of NCCL was closed".into(),
    })
}

/// Polls until `is_done`.
fn await_with_deadline(members: &Members, is_done: impl Fn() -> Result<bool>) -> Result<()> {
    const SPINS: usize = 1000;
    let begin = Instant::now();
    // Connecting many ranks may take longer than a call.
    let deadline = members.deadlines.call().max(LONG);
    let mut turns = 0;
    while !is_done()? {
        members.fault().map_or(Ok(()), Err)?;
        if begin.elapsed() > deadline {
            return Err(Error::System {
                rank: Some(members.rank),
                action: "reach the ranks of other hosts by NCCL".into(),
                reason: format!("it takes longer than {deadline:?}"),
            });
        }
        turns += 1;
        match turns < SPINS {
            true => std::hint::spin_loop(),
            false => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    Ok(())
}

impl Lane {
    fn new(communicator: Communicator) -> Lane {
        Lane(Mutex::new(Some(communicator)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Communicator>> {
        // Each change is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `call` returns. None if the communicator was closed.
    fn with<R>(&self, call: impl FnOnce(&Communicator) -> R) -> Option<R> {
        self.lock().as_ref().map(call)
    }

    fn take(&self) -> Option<Communicator> {
        self.lock().take()
    }

    /// Waits until no call is in progress.
    fn settle(&self, members: &Members) -> Result<()> {
        await_with_deadline(members, || {
            let settled = self.with(Communicator::is_settled);
            settled.unwrap_or_else(|| Err(aborted(members)))
        })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(communicator) = self.take() {
            communicator.abort();
        }
    }
}
