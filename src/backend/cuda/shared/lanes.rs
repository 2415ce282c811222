//! The lanes to GPUs of other hosts: a transport and a stream each.
//!
//! A transport moves a message by a kernel with a few CTAs, so the library's own kernels leave it multiprocessors
//! ([`CTAS`]). Such a kernel ends when its messages have come or gone, or when its transport is aborted. Messages of
//! one transport are moved one after the other. So there are two lanes, which have even and odd turns
//! ([`Transfer::turn`](crate::schedule::Transfer::turn)). Of a long last message each may have a half.
//!
//! Opening and closing wait for other ranks. A thread does them, so that the caller's wait has a deadline. (If a rank
//! dies while a transport opens, the thread may never end.) Putting a message on a lane waits for no one, because each
//! lane's queue has room for what is under way. If the group has failed, the monitor aborts the transports.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::backend::cuda::driver::{Device, DeviceMemory, DevicePtr, Stream};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::{Deferred, Reclaimer};
use crate::backend::cuda::gpu::streams::LANES;
use crate::backend::transport::device::{self, DeviceBytes, DeviceTransport, Opener};
use crate::error::{Error, Kind, Result};
use crate::ranks::members::{Members, opening};
use crate::schedule::Hosts;

/// The most CTAs of a transport's kernel of one turn.
const LANE_CTAS: usize = 2;
/// Multiprocessors that the library's own kernels leave to transports.
pub const CTAS: usize = LANES * LANE_CTAS;

/// How long transports may take to connect ranks, at least.
const LONG: Duration = Duration::from_secs(60);

/// How long after a failure of a transport it is known that a rank has died or has left. A rank that leaves closes its
/// transports first, and then says so.
pub const EXPLAINED: Duration = Duration::from_millis(2500);

/// Bytes of this rank's memory that go to `peer`, or come from it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMessage {
    pub peer: usize,
    pub place: DevicePtr,
    pub bytes: usize,
}

/// This rank's ends of the transports to other hosts.
#[derive(Debug)]
pub struct Lanes {
    lanes: Vec<LaneTransport>,
    /// By lane: the turns of all operations that were enqueued.
    turns: [AtomicU32; LANES],
    /// By rank: bytes per microsecond that it sends and receives at the same time, as measured.
    pub rates: Vec<f64>,
}

/// A transport. None once it was closed or aborted.
#[derive(Debug)]
struct LaneTransport(Mutex<Option<Box<DeviceTransport>>>);

impl Lanes {
    /// Opens the transports, and connects this rank with all ranks of other hosts, because the first message between
    /// two ranks waits for the other. Collective.
    ///
    /// # Errors
    /// As [`device::openers`].
    pub fn open(gpu: &Gpu, members: &Members) -> Result<Lanes> {
        let openers = device::openers(members, LANES, LANE_CTAS)?;
        let waiting = Arc::new(());
        let opening = Opening {
            waiting: Arc::downgrade(&waiting),
            device: gpu.device.clone(),
            reclaimer: gpu.reclaimer.clone(),
            scratch: gpu.scratch(2 * LANES * Opening::LONG)?,
            ends: (members.rank, members.world),
            hosts: members.hosts.clone(),
        };
        let opened = begin(members.rank, move || opening.open(openers))?;
        let (lanes, rate) = wait_for(members, &opened)?;
        Ok(Lanes {
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
    /// What the transport says; the group's failure.
    ///
    /// # Safety
    /// As [`Stream::copy`] for each message.
    pub unsafe fn exchange(
        &self,
        members: &Members,
        lane: usize,
        stream: &Stream,
        sent: &[DeviceMessage],
        received: &[DeviceMessage],
    ) -> Result<()> {
        // SAFETY: as this function's.
        let exchanged = unsafe { self.lanes[lane].exchange(members.rank, stream, sent, received) };
        exchanged.unwrap_or_else(|| Err(aborted(members)))
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

    /// What a transport says has failed, if anything has. A lane in use is not asked.
    pub fn failure(&self) -> Option<Error> {
        let idle = self.lanes.iter().filter_map(|lane| lane.0.try_lock().ok());
        let mut failures = idle.filter_map(|lane| lane.as_ref()?.require_alive().err());
        failures.next()
    }

    /// Ends all messages that are under way. It takes half a second.
    ///
    /// A transport waits for what is on the device, so `release` lets that run through. It is called again and again,
    /// because another thread may put an operation on the streams that waits for more.
    pub fn abort(&self, release: impl Fn()) {
        const PERIOD: Duration = Duration::from_millis(2);
        std::thread::scope(|scope| {
            // Another thread may hold a lane until the streams are released.
            let abort =
                |lane: &LaneTransport| lane.take().map_or((), |transport| transport.abort());
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

    /// Closes the transports when what they have sent has gone. Waits for that no longer than `longest`. No message is
    /// under way on this rank's streams.
    pub fn close(&self, rank: usize, longest: Duration) {
        let lanes: Vec<_> = self.lanes.iter().filter_map(LaneTransport::take).collect();
        let close = move || lanes.into_iter().for_each(|transport| transport.close());
        // If there is no thread, the transports live as long as the process.
        if let Ok(closed) = begin(rank, close) {
            let _ = closed.recv_timeout(longest);
        }
    }
}

/// What opens the lanes.
struct Opening {
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
    fn open(&self, openers: Vec<Opener>) -> Result<(Vec<LaneTransport>, f64)> {
        let open = |open: Opener| open(&self.device).map(LaneTransport::new);
        let lanes = openers.into_iter().map(open).collect::<Result<Vec<_>>>()?;
        let (rank, world) = self.ends;
        let others: Vec<usize> = (0..world)
            .filter(|&peer| !self.hosts.share(rank, peer))
            .collect();
        self.exchange(&lanes, [&others, &others], Self::SHORT)?;
        let rate = self.time(&lanes)?;
        Ok((lanes, rate))
    }

    /// Times messages along the rail, from the next host and to the one before.
    fn time(&self, lanes: &[LaneTransport]) -> Result<f64> {
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

    /// Sends a message of `bytes` bytes to some ranks and receives one from some, on all lanes.
    fn exchange(
        &self,
        lanes: &[LaneTransport],
        [to, from]: [&[usize]; 2],
        bytes: usize,
    ) -> Result<()> {
        let rank = self.ends.0;
        let streams = &self.reclaimer.streams.lanes;
        for (index, (lane, stream)) in lanes.iter().zip(streams).enumerate() {
            // No one reads what comes, so messages may overwrite one another.
            let message = |&peer: &usize, place: usize| DeviceMessage {
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
            let exchanged = unsafe { lane.exchange(rank, stream, &sent, &received) };
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
    let thread =
        std::thread::Builder::new().name(format!("gemmesh-{}-{rank}", device::NAME.to_lowercase()));
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
            action: format!("reach the ranks of other hosts by {}", device::NAME),
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

/// The error of a call after the transports were aborted.
fn aborted(members: &Members) -> Error {
    members.fault().unwrap_or_else(|| {
        Kind::Internal {
            what: format!("a communicator of {} was closed", device::NAME),
        }
        .on(members.rank)
    })
}

impl LaneTransport {
    fn new(transport: Box<DeviceTransport>) -> LaneTransport {
        LaneTransport(Mutex::new(Some(transport)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Box<DeviceTransport>>> {
        // Each change is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<Box<DeviceTransport>> {
        self.lock().take()
    }

    /// Puts messages on a stream. They are sent and received at the same time. None if the transport was closed.
    ///
    /// # Safety
    /// As [`Stream::copy`] for each message.
    unsafe fn exchange(
        &self,
        rank: usize,
        stream: &Stream,
        sent: &[DeviceMessage],
        received: &[DeviceMessage],
    ) -> Option<Result<()>> {
        let lane = self.lock();
        let transport = lane.as_ref()?;
        // SAFETY: as this function's.
        let bytes = |of: &DeviceMessage| unsafe { DeviceBytes::new(of.place, of.bytes, stream) };
        Some(transport.together(&mut || {
            for message in sent {
                transport.send([rank, message.peer], bytes(message))?;
            }
            for message in received {
                transport.receive([message.peer, rank], bytes(message))?;
            }
            Ok(())
        }))
    }
}

impl Drop for LaneTransport {
    fn drop(&mut self) {
        if let Some(transport) = self.take() {
            transport.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::backend::transport::Transport;

    /// What became of a transport.
    type Ends = Arc<Mutex<Vec<&'static str>>>;

    /// Moves nothing. Notes how it ends; an abort waits for a release.
    #[derive(Debug)]
    struct EndRecorder(Ends, Arc<AtomicUsize>);

    impl Transport<DeviceBytes> for EndRecorder {
        fn send(&self, _: [usize; 2], _: DeviceBytes) -> Result<()> {
            Ok(())
        }

        fn receive(&self, _: [usize; 2], _: DeviceBytes) -> Result<()> {
            Ok(())
        }

        fn require_alive(&self) -> Result<()> {
            Err(Kind::Capturing.on(3))
        }

        fn close(self: Box<Self>) {
            self.0.lock().unwrap().push("closed");
        }

        fn abort(self: Box<Self>) {
            while self.1.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            self.0.lock().unwrap().push("aborted");
        }
    }

    fn lanes() -> (Lanes, Ends, Arc<AtomicUsize>) {
        let (ends, releases) = (Ends::default(), Arc::<AtomicUsize>::default());
        let recorder = || EndRecorder(ends.clone(), releases.clone());
        let lanes = Lanes {
            lanes: vec![
                LaneTransport::new(Box::new(recorder())),
                LaneTransport::new(Box::new(recorder())),
            ],
            turns: Default::default(),
            rates: vec![3.0, 2.0],
        };
        (lanes, ends, releases)
    }

    #[test]
    fn lanes_are_released_until_they_are_aborted() {
        let (lanes, ends, releases) = lanes();
        assert_eq!(lanes.failure(), Some(Kind::Capturing.on(3)));
        lanes.abort(|| {
            releases.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(*ends.lock().unwrap(), ["aborted"; 2]);
        assert_eq!(lanes.failure(), None);
        lanes.close(0, Duration::ZERO);
        drop(lanes);
        assert_eq!(ends.lock().unwrap().len(), 2);
    }

    #[test]
    fn lanes_that_are_not_closed_are_aborted() {
        let (closed, ends, _) = lanes();
        closed.close(0, LONG);
        drop(closed);
        assert_eq!(*ends.lock().unwrap(), ["closed"; 2]);
        let (dropped, ends, releases) = lanes();
        releases.store(1, Ordering::Relaxed);
        drop(dropped);
        assert_eq!(*ends.lock().unwrap(), ["aborted"; 2]);
    }
}
