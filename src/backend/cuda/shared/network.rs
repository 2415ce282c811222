//! The network to GPUs of other hosts: NCCL's communicators.
//!
//! NCCL moves a message by a kernel with a few CTAs, so the library's own kernels leave it multiprocessors
//! ([`CTAS`]). Such a kernel ends when its messages have come or gone, or when its communicator is aborted. Messages of
//! one communicator are moved one after the other. So there are two communicators, the **lanes**, which have even and odd
//! turns ([`Transfer::turn`](crate::schedule::Transfer::turn)). Of a long last message each may have a half.
//!
//! Opening and closing wait for other ranks. A thread does them, so that the caller's wait has a deadline. (If a rank dies
//! while NCCL opens a communicator, the thread may never end.) Putting a message on a lane waits for no one, because each
//! lane's queue has room for what is under way. If the group has failed, the monitor aborts the communicators.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::backend::cuda::driver::{
    Communicator, CommunicatorId, Device, DeviceMemory, ID_BYTES, Nccl, NcclMessage, Stream,
};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::{Deferred, Reclaimer};
use crate::backend::cuda::gpu::streams::LANES;
use crate::error::{Error, Kind, Result};
use crate::ranks::members::{Members, opening};
use crate::schedule::Hosts;

/// The most CTAs of NCCL's kernel of one turn.
const LANE_CTAS: usize = 2;
/// Multiprocessors that the library's own kernels leave to NCCL's.
pub const CTAS: usize = LANES * LANE_CTAS;

/// How long NCCL may take to connect ranks, at least.
const LONG: Duration = Duration::from_secs(60);

/// How long after a failure of NCCL it is known that a rank has died or has left. A rank that leaves closes its
/// communicators first, and then says so.
pub const EXPLAINED: Duration = Duration::from_millis(2500);

/// This rank's ends of the communicators.
#[derive(Debug)]
pub struct Network {
    lanes: Vec<Lane>,
    /// By lane: the turns of all operations that were enqueued.
    turns: [AtomicU32; LANES],
    /// By rank: bytes per microsecond that it sends and receives at the same time, as measured.
    pub rates: Vec<f64>,
}

/// A communicator. None once it was closed or aborted.
#[derive(Debug)]
struct Lane(Mutex<Option<Communicator>>);

impl Network {
    /// Opens the communicators, and connects this rank with all ranks of other hosts, because the first message between
    /// two ranks waits for the other. Collective.
    ///
    /// # Errors
    /// [`Kind::Device`] of the first rank that has no NCCL; what NCCL says; the group's failure.
    pub fn open(gpu: &Gpu, members: &Members) -> Result<Network> {
        let nccl = Nccl::load(members.rank);
        let ids = agree(members, &nccl)?;
        let waiting = Arc::new(());
        let opening = Opening {
            waiting: Arc::downgrade(&waiting),
            nccl: nccl?,
            device: gpu.device.clone(),
            reclaimer: gpu.reclaimer.clone(),
            scratch: gpu.scratch(2 * LANES * Opening::LONG)?,
            ends: (members.rank, members.world),
            hosts: members.hosts.clone(),
        };
        let opened = begin(members.rank, move || opening.open(&ids))?;
        let (lanes, rate) = wait_for(members, &opened)?;
        Ok(Network {
            lanes,
            turns: Default::default(),
            rates: gather_rates(members, rate)?,
        })
    }

    /// The lowest of all ranks' rates, by which they choose alike.
    pub fn rate(&self) -> f64 {
        self.rates.iter().copied().fold(f64::INFINITY, f64::min)
    }

    /// Puts messages on a lane's stream. They are sent and received at the same time.
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
        // SAFETY: as this function's.
        let exchange = |lane: &Communicator| unsafe { lane.exchange(stream, sent, received) };
        self.lanes[lane]
            .with(exchange)
            .unwrap_or_else(|| Err(aborted(members)))
    }

    /// By lane: the turns of all operations that were enqueued.
    pub fn turns(&self) -> [u32; LANES] {
        std::array::from_fn(|lane| self.turns[lane].load(Ordering::Relaxed))
    }

    /// Counts a turn of a lane, and returns the new count.
    pub fn count_turn(&self, lane: usize) -> u32 {
        let before = self.turns[lane].fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1)
    }

    /// What NCCL says has failed, if anything has. A lane in use is not asked.
    pub fn failure(&self) -> Option<Error> {
        let idle = self.lanes.iter().filter_map(|lane| lane.0.try_lock().ok());
        let mut failures = idle.filter_map(|lane| lane.as_ref()?.require_alive().err());
        failures.next()
    }

    /// Ends all messages that are under way. It takes half a second.
    ///
    /// NCCL waits for what is on the device, so `release` lets that run through. It is called again and again, because
    /// another thread may put an operation on the streams that waits for more.
    pub fn abort(&self, release: impl Fn()) {
        const PERIOD: Duration = Duration::from_millis(2);
        std::thread::scope(|scope| {
            // Another thread may hold a lane until the streams are released.
            let abort = |lane: &Lane| lane.take().map_or((), Communicator::abort);
            let aborts = self
                .lanes
                .iter()
                .map(|lane| scope.spawn(move || abort(lane)));
            let aborts: Vec<_> = aborts.collect();
            while !aborts.iter().all(|abort| abort.is_finished()) {
                release();
                std::thread::sleep(PERIOD);
            }
        });
    }

    /// Closes the communicators when what they have sent has gone. Waits for that no longer than `longest`. No message is
    /// under way on this rank's streams.
    pub fn close(&self, rank: usize, longest: Duration) {
        let lanes: Vec<Communicator> = self.lanes.iter().filter_map(Lane::take).collect();
        let close = move || lanes.into_iter().for_each(Communicator::destroy);
        // If there is no thread, the communicators live as long as the process.
        if let Ok(closed) = begin(rank, close) {
            let _ = closed.recv_timeout(longest);
        }
    }
}

/// What opens the lanes.
struct Opening {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    /// Has the lanes' streams.
    reclaimer: Arc<Reclaimer>,
    /// Room for a long message each way on each lane.
    scratch: Deferred<DeviceMemory>,
    /// This rank and the number of ranks.
    ends: (usize, usize),
    hosts: Hosts,
    /// Dead once the wait for this was given up.
    waiting: Weak<()>,
}

impl Opening {
    /// Bytes of a message that connects two ranks, and of one that is timed.
    const SHORT: usize = 64;
    const LONG: usize = 4 << 20;

    /// Waits for the other ranks. Returns the lanes, and how many bytes per microsecond they send and receive together.
    fn open(&self, ids: &[CommunicatorId]) -> Result<(Vec<Lane>, f64)> {
        let open = |id| {
            let communicator =
                Communicator::open(&self.nccl, &self.device, id, self.ends, LANE_CTAS);
            communicator.map(Lane::new)
        };
        let lanes = ids.iter().map(open).collect::<Result<Vec<_>>>()?;
        let (rank, world) = self.ends;
        let others: Vec<usize> = (0..world)
            .filter(|&peer| !self.hosts.share(rank, peer))
            .collect();
        self.exchange(&lanes, [&others, &others], Self::SHORT)?;
        let rate = self.time(&lanes)?;
        Ok((lanes, rate))
    }

    /// Times messages along the rail, from the next host and to the one before.
    fn time(&self, lanes: &[Lane]) -> Result<f64> {
        let rank = self.ends.0;
        let next: Vec<usize> = self.hosts.rail(rank).take(1).collect();
        let before: Vec<usize> = self.hosts.rail(rank).rev().take(1).collect();
        let mut best = f64::INFINITY;
        // The first one starts slowly.
        for _ in 0..3 {
            let begin = Instant::now();
            self.exchange(lanes, [&before, &next], Self::LONG)?;
            best = best.min(begin.elapsed().as_secs_f64() * 1e6);
        }
        Ok((lanes.len() * Self::LONG) as f64 / best)
    }

    /// Sends a message of so many bytes to some ranks and receives one from some, on all lanes.
    fn exchange(&self, lanes: &[Lane], [to, from]: [&[usize]; 2], bytes: usize) -> Result<()> {
        let streams = &self.reclaimer.streams.lanes;
        for (index, (lane, stream)) in lanes.iter().zip(streams).enumerate() {
            // No one reads what comes, so messages may overwrite one another.
            let message = |&peer: &usize, place: usize| NcclMessage {
                peer,
                place: self.scratch.ptr() + (place * Self::LONG) as u64,
                bytes,
            };
            let sent: Vec<_> = to.iter().map(|peer| message(peer, 2 * index)).collect();
            let received: Vec<_> = from
                .iter()
                .map(|peer| message(peer, 2 * index + 1))
                .collect();
            // SAFETY: the scratch has room for two messages of a lane, and lives until the streams have passed.
            let exchanged = lane.with(|lane| unsafe { lane.exchange(stream, &sent, &received) });
            exchanged.transpose()?;
        }
        for stream in streams {
            while !stream.is_idle()? {
                if self.waiting.strong_count() == 0 {
                    // No one gets the error. The lanes are aborted when they are dropped.
                    return Err(Kind::Internal {
                        what: "the group did not open".into(),
                    }
                    .on(self.ends.0));
                }
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

/// Runs `work`, which may wait for other ranks, on a thread. The thread ends when it is done.
fn begin<T: Send + 'static>(
    rank: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Receiver<T>> {
    let (tell, told) = channel();
    let thread = std::thread::Builder::new().name(format!("gemmesh-nccl-{rank}"));
    let spawned = thread.spawn(move || {
        // No one listens any more if the wait was given up.
        let _ = tell.send(work());
    });
    spawned.map_err(Error::not_started(rank, "a thread"))?;
    Ok(told)
}

/// The rates that the ranks have measured, by rank. Collective.
fn gather_rates(members: &Members, own: f64) -> Result<Vec<f64>> {
    let own = own.to_le_bytes().to_vec();
    let gathered = members.gather_messages(&opening(), Ok((own, None)))?;
    let rates = gathered.payloads.iter().enumerate().map(|(rank, bytes)| {
        let rate = bytes.as_slice().try_into().ok().map(f64::from_le_bytes);
        let rate = rate.filter(|rate| rate.is_finite() && *rate > 0.0);
        rate.ok_or_else(|| {
            members.fail(
                Kind::Message {
                    reason: format!("{bytes:?} is no rate of a network"),
                }
                .on(rank),
            )
        })
    });
    rates.collect()
}

/// Waits for what a thread does.
fn wait_for<T>(members: &Members, opened: &Receiver<Result<T>>) -> Result<T> {
    const PERIOD: Duration = Duration::from_millis(5);
    let begin = Instant::now();
    // Connecting many ranks may take longer than a call.
    let deadline = members.deadlines.call().max(LONG);
    let failed = |reason: String| {
        Kind::System {
            action: "reach the ranks of other hosts by NCCL".into(),
            reason,
        }
        .on(members.rank)
    };
    loop {
        match opened.recv_timeout(PERIOD) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Disconnected) => return Err(failed("its thread ended".into())),
            Err(RecvTimeoutError::Timeout) => members.fault().map_or(Ok(()), Err)?,
        }
        if begin.elapsed() > deadline {
            return Err(failed(format!("it takes longer than {deadline:?}")));
        }
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
    if ids.len() == LANES && rest.is_empty() {
        Ok(ids.to_vec())
    } else {
        Err(members.fail(
            Kind::Message {
                reason: format!("{} bytes of ids of NCCL", gathered.payloads[0].len()),
            }
            .on(0),
        ))
    }
}

/// The error of a call after the communicators were aborted.
fn aborted(members: &Members) -> Error {
    members.fault().unwrap_or_else(|| {
        Kind::Internal {
            what: "a communicator of NCCL was closed".into(),
        }
        .on(members.rank)
    })
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
}

impl Drop for Lane {
    fn drop(&mut self) {
        if let Some(communicator) = self.take() {
            communicator.abort();
        }
    }
}
