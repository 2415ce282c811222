//! The ranks of a group as one rank sees them: messages to all, and who is still alive.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::commons::{Commons, Operation};
use super::wire::{self, Frame, Line, MAX_FRAME, WireError};
use crate::element::DType;
use crate::error::{Error, Result};
use crate::protocol::Epoch;
use crate::protocol::flag::{Awaited, Flag, Wait};

/// How much longer a wait for an intermediary lasts than the intermediary's own, so that it is the
/// intermediary, which knows the culprit, that reports.
const GRACE: Duration = Duration::from_millis(500);
/// A rank that waits says so more often than this, even on a busy machine.
const FRESH: Duration = Duration::from_millis(250);

/// More than what stands around a rank's message among those of all.
const OVERHEAD: usize = 4096;

/// A call that all ranks make together, as far as they must agree on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Call {
    Barrier,
    AllGatherBytes,
    OpenBackend,
    Sharded {
        rows: Vec<usize>,
        k: usize,
        dtype: DType,
    },
    CollectTraces,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Call::Barrier => f.write_str("barrier()"),
            Call::AllGatherBytes => f.write_str("all_gather_bytes()"),
            Call::OpenBackend => f.write_str("the opening of the backend"),
            Call::Sharded { rows, k, dtype } => {
                write!(f, "sharded(rows of each rank = {rows:?}, K = {k}, {dtype})")
            }
            Call::CollectTraces => f.write_str("Timeline::collect()"),
        }
    }
}

/// What every rank sent, by rank.
pub struct Gathered {
    pub payloads: Vec<Vec<u8>>,
    /// One descriptor of each rank if they were sent, none otherwise.
    pub fds: Vec<OwnedFd>,
}

/// This rank's end of the group.
#[derive(Debug)]
pub struct Members {
    pub rank: usize,
    pub world: usize,
    pub timeout: Duration,
    /// Whether the ranks are threads of one process.
    pub in_process: bool,
    commons: Arc<Commons>,
    /// On rank 0 the connections to 1, 2, …; elsewhere the one to rank 0. Locked for one exchange at a time.
    connections: Mutex<Vec<Arc<UnixStream>>>,
    /// Ends when this is dropped, after the farewell.
    _watcher: Option<Watcher>,
}

impl Members {
    /// `connections` are as in the struct, each non-blocking.
    pub fn new(
        rank: usize,
        timeout: Duration,
        in_process: bool,
        commons: Commons,
        world: usize,
        connections: Vec<UnixStream>,
    ) -> Result<Members> {
        let commons = Arc::new(commons);
        let connections: Vec<_> = connections.into_iter().map(Arc::new).collect();
        let watcher = if world > 1 {
            Some(Watcher::spawn(rank, commons.clone(), connections.clone())?)
        } else {
            None
        };
        Ok(Members {
            rank,
            world,
            timeout,
            in_process,
            commons,
            connections: Mutex::new(connections),
            _watcher: watcher,
        })
    }

    /// Fails if the group has failed.
    pub fn check(&self) -> Result<()> {
        match self.commons.fault() {
            None => Ok(()),
            Some(cause) => Err(Error::Poisoned {
                cause: Box::new(cause),
            }),
        }
    }

    /// The group's first failure, if there is one.
    pub fn fault(&self) -> Option<Error> {
        self.commons.fault()
    }

    /// Reports a failure to every rank; the group can do nothing more. Returns the first failure.
    pub fn fail(&self, error: Error) -> Error {
        self.commons.fail(error)
    }

    /// For a thread of a backend that watches over this rank.
    #[cfg(feature = "cuda")]
    pub fn witness(&self) -> Witness {
        Witness {
            rank: self.rank,
            timeout: self.timeout,
            commons: self.commons.clone(),
        }
    }

    /// Says that this rank has stopped mapping its peers' memory.
    #[cfg(feature = "cuda")]
    pub fn mark_closed(&self) {
        self.commons.mark_closed();
    }

    /// Waits until no peer maps this rank's memory any more. False if that can't be known in time.
    #[cfg(feature = "cuda")]
    pub fn await_closed(&self) -> bool {
        // Once the group has failed, nobody has a reason to keep its mappings for long.
        const AFTER_FAILURE: Duration = Duration::from_secs(2);
        let begin = Instant::now();
        loop {
            let fault = self.commons.fault();
            let dead = match &fault {
                Some(Error::RankLost { rank, .. }) => Some(*rank),
                _ => None,
            };
            if (0..self.world).all(|rank| self.commons.is_closed(rank) || Some(rank) == dead) {
                return true;
            }
            let limit = if fault.is_some() {
                AFTER_FAILURE.min(self.timeout)
            } else {
                self.timeout
            };
            if begin.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Agrees with the other ranks on what operation `epoch` is, without a message.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] if another rank called something else; [`Error::Timeout`] if a rank is so
    /// far behind that its calls can't be compared any more.
    pub fn post(&self, epoch: Epoch, operation: Operation) -> Result<()> {
        let begin = Instant::now();
        while let Err(rank) = self.commons.may_post(epoch) {
            self.pause(begin, Duration::ZERO, rank, || {
                "its earlier operations".into()
            })?;
            std::thread::sleep(Duration::from_micros(100));
        }
        self.commons
            .post(epoch, operation)
            .map_err(|error| self.fail(error))
    }

    /// One look around in a wait for `rank` that began at `begin`, and may last `grace` longer than the
    /// timeout.
    ///
    /// # Errors
    /// The group's first failure; or that the deadline has passed, or `rank` has left, which becomes it.
    fn pause(
        &self,
        begin: Instant,
        grace: Duration,
        rank: usize,
        what: impl Fn() -> String,
    ) -> Result<()> {
        if let Some(fault) = self.commons.fault() {
            return Err(fault);
        }
        // A wait for an intermediary of this same rank says nothing about another.
        if grace.is_zero() {
            self.commons.note_wait(rank);
        }
        if begin.elapsed() >= self.timeout + grace {
            return Err(self.fail(self.timeout(begin, rank, what())));
        }
        Ok(())
    }

    /// A wait for `rank` to deliver `what` that began at `begin` has been in vain.
    fn timeout(&self, begin: Instant, rank: usize, what: String) -> Error {
        let culprit = self.commons.culprit(rank, FRESH.min(self.timeout / 2));
        Error::Timeout {
            rank: culprit,
            waiting: self.rank,
            what: if culprit == rank {
                what
            } else {
                format!("what rank {rank} waits for, which therefore did not deliver {what}")
            },
            waited_ms: begin.elapsed().as_millis() as u64,
        }
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&Call::Barrier, &[], None).map(drop)
    }

    /// Exchanges what each rank has made, a message and perhaps a descriptor, or why it could not make it: if one
    /// could not, all get its error, and the group goes on.
    pub fn exchange(
        &self,
        call: &Call,
        own: Result<(Vec<u8>, Option<OwnedFd>)>,
    ) -> Result<Gathered> {
        let outcome = match &own {
            Ok(_) => Ok(()),
            Err(error) => Err(error.clone()),
        };
        let (payload, fd) = own.unwrap_or_default();
        let outcome: std::result::Result<(), Error> = outcome;
        let outcome = serde_json::to_vec(&outcome).unwrap_or_default();
        let fd = fd.as_ref().map(AsFd::as_fd);
        let mut gathered = self.all_gather(call, &join(&[outcome, payload]), fd)?;
        for (rank, bytes) in gathered.payloads.iter_mut().enumerate() {
            let parts = self::outcome(bytes).ok_or_else(|| self.garbage(rank, "an outcome"))?;
            let (outcome, payload) = parts;
            outcome?;
            *bytes = payload.to_vec();
        }
        Ok(gathered)
    }

    /// Sends `payload`, and a descriptor if there is one, to every rank, and returns what all sent.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] unless all ranks make the same `call`; the group's failure if a rank does not
    /// come within the timeout, is lost or has left.
    pub fn all_gather(
        &self,
        call: &Call,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Gathered> {
        self.check()?;
        let longest = MAX_FRAME / self.world - OVERHEAD;
        if payload.len() > longest {
            return Err(self.fail(Error::Limit {
                what: format!("bytes that rank {} sends to all", self.rank),
                value: payload.len(),
                min: 0,
                max: longest,
            }));
        }
        let connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mine = encode(call, payload)?;
        let begin = Instant::now();
        let frames = if self.rank == 0 {
            self.collect(&connections, call, mine, fd, begin)?
        } else {
            let line = self.line(0, &connections[0], begin, GRACE);
            line.send(&mine, fd.as_slice())
                .map_err(|e| self.wire_failure(0, call, begin, e))?;
            line.receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(0, call, begin, e))?
        };
        let (bytes, fds) = frames;
        let parts = split(&bytes).ok_or_else(|| self.garbage(0, "a list of messages"))?;
        let mut calls = Vec::new();
        let mut payloads = Vec::new();
        for (rank, part) in parts.into_iter().enumerate() {
            let (call, payload) = decode(part).ok_or_else(|| self.garbage(rank, "a call"))?;
            calls.push(call);
            payloads.push(payload.to_vec());
        }
        if let Some(error) = odd_one_out(&calls) {
            return Err(self.fail(error));
        }
        Ok(Gathered { payloads, fds })
    }

    /// Rank 0's part: receives every rank's message, then sends all of them to all.
    fn collect(
        &self,
        connections: &[Arc<UnixStream>],
        call: &Call,
        mine: Vec<u8>,
        fd: Option<BorrowedFd>,
        begin: Instant,
    ) -> Result<Frame> {
        let mut parts = vec![mine];
        let mut fds = Vec::new();
        if let Some(fd) = fd {
            let own = fd
                .try_clone_to_owned()
                .map_err(Error::system(self.rank, "duplicate a descriptor"))
                .map_err(|e| self.fail(e))?;
            fds.push(own);
        }
        for (index, connection) in connections.iter().enumerate() {
            let (part, sent) = self
                .line(index + 1, connection, begin, Duration::ZERO)
                .receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(index + 1, call, begin, e))?;
            parts.push(part);
            fds.extend(sent);
        }
        let all = join(&parts);
        for (index, connection) in connections.iter().enumerate() {
            self.line(index + 1, connection, begin, GRACE)
                .send(&all, &wire::borrow(&fds))
                .map_err(|e| self.wire_failure(index + 1, call, begin, e))?;
        }
        Ok((all, fds))
    }

    /// The connection to `rank`.
    fn line<'a>(
        &'a self,
        rank: usize,
        stream: &'a UnixStream,
        begin: Instant,
        grace: Duration,
    ) -> Line<'a, impl Fn() -> Result<(), Error>> {
        Line {
            stream,
            deadline: begin + self.timeout + grace,
            check: move || {
                self.commons.note_wait(rank);
                self.commons.fault().map_or(Ok(()), Err)
            },
        }
    }

    fn wire_failure(
        &self,
        rank: usize,
        call: &Call,
        begin: Instant,
        error: WireError<Error>,
    ) -> Error {
        let waiting = self.rank;
        self.fail(match error {
            WireError::Stopped(fault) => fault,
            WireError::Late => self.timeout(begin, rank, format!("its part of {call}")),
            WireError::Closed if self.commons.has_left(rank) => Error::RankLeft {
                rank,
                waiting,
                what: call.to_string(),
            },
            WireError::Closed => Error::RankLost {
                rank,
                noticed_by: waiting,
            },
            WireError::Garbage(reason) => Error::Message { rank, reason },
            WireError::Io(error) => {
                Error::system(waiting, format!("talk to rank {rank} in {call}"))(error)
            }
        })
    }

    fn garbage(&self, rank: usize, expected: &str) -> Error {
        self.fail(Error::Message {
            rank,
            reason: format!("not {expected}"),
        })
    }
}

/// A share in a rank's right to report failures, for a thread of its backend.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct Witness {
    pub rank: usize,
    pub timeout: Duration,
    commons: Arc<Commons>,
}

#[cfg(feature = "cuda")]
impl Witness {
    /// As [`Members::fail`].
    pub fn fail(&self, error: Error) -> Error {
        self.commons.fail(error)
    }

    /// As [`Members::fault`].
    pub fn fault(&self) -> Option<Error> {
        self.commons.fault()
    }

    /// Whether `rank` has left the group in order.
    pub fn has_left(&self, rank: usize) -> bool {
        self.commons.has_left(rank)
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        // A rank that unwinds has not completed what it began: its peers must see it as lost.
        if !std::thread::panicking() {
            self.commons.leave();
        }
    }
}

/// Waiting as a thread of the host does it: it looks, then yields, then sleeps, so that ranks and
/// workers can outnumber the cores.
impl Wait for Members {
    type Error = Error;

    fn wait(&self, flag: &Flag, epoch: Epoch, awaited: Awaited) -> Result<()> {
        const SPINS: u32 = 100;
        const YIELDS: u32 = 20;
        const NAP: Duration = Duration::from_micros(50);
        for _ in 0..SPINS {
            if flag.reached(epoch) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let begin = Instant::now();
        let what = || awaited.describe(epoch, flag.peek());
        // A chunk that is pulled is written by this rank's own copy thread, which may itself wait for another rank than the
        // chunk's source: it knows the culprit.
        let grace = match awaited {
            Awaited::Chunk { .. } => GRACE,
            _ => Duration::ZERO,
        };
        let mut yields = YIELDS;
        loop {
            // A rank that left had signalled everything before, and for a chunk that is pulled waited for `done`, which
            // follows the flag; so look at the flag after that.
            let left = self.commons.has_left(awaited.peer());
            if flag.reached(epoch) {
                return Ok(());
            }
            if left {
                return Err(self.fail(Error::RankLeft {
                    rank: awaited.peer(),
                    waiting: self.rank,
                    what: what(),
                }));
            }
            self.pause(begin, grace, awaited.peer(), what)?;
            if yields > 0 {
                yields -= 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// Names the rank whose call fewer ranks made, if not all made the same.
fn odd_one_out(calls: &[Call]) -> Option<Error> {
    let votes = |call: &Call| calls.iter().filter(|other| *other == call).count();
    let other = (0..calls.len()).max_by_key(|&rank| (votes(&calls[rank]), calls.len() - rank))?;
    let rank = calls.iter().position(|call| *call != calls[other])?;
    Some(Error::CallMismatch {
        rank,
        theirs: calls[rank].to_string(),
        other,
        expected: calls[other].to_string(),
        call: 0,
    })
}

fn encode(call: &Call, payload: &[u8]) -> Result<Vec<u8>> {
    let call = serde_json::to_vec(call).map_err(|e| Error::System {
        rank: None,
        action: "encode a call".into(),
        reason: e.to_string(),
    })?;
    Ok(join(&[call, payload.to_vec()]))
}

fn decode(bytes: &[u8]) -> Option<(Call, &[u8])> {
    match split(bytes)?[..] {
        [call, payload] => Some((serde_json::from_slice(call).ok()?, payload)),
        _ => None,
    }
}

/// Puts parts behind one another, each behind its length.
fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
    bytes
}

fn split(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (part, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        parts.push(part);
        bytes = rest;
    }
    Some(parts)
}

/// What a rank sends in an exchange: what it has made, or why it could not.
fn outcome(bytes: &[u8]) -> Option<(Result<()>, &[u8])> {
    match split(bytes)?[..] {
        [outcome, payload] => Some((serde_json::from_slice(outcome).ok()?, payload)),
        _ => None,
    }
}

/// A thread that sees the other ends of the control connections close.
#[derive(Debug)]
struct Watcher {
    /// Closing it ends the thread.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    fn spawn(
        rank: usize,
        commons: Arc<Commons>,
        connections: Vec<Arc<UnixStream>>,
    ) -> Result<Watcher> {
        let (stop, stopped) = wire::pair().map_err(Error::system(rank, "open a socket pair"))?;
        let thread = std::thread::Builder::new()
            .name(format!("gemmesh-watch-{rank}"))
            .spawn(move || watch(rank, &commons, &connections, &stopped))
            .map_err(Error::system(rank, "start a thread"))?;
        Ok(Watcher {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It can't panic, and there is nothing to do if it did.
            let _ = thread.join();
        }
    }
}

fn watch(rank: usize, commons: &Commons, connections: &[Arc<UnixStream>], stopped: &UnixStream) {
    // Nothing wakes the thread but an end that closes, so the pause between looks can be long.
    const PAUSE: Duration = Duration::from_secs(3600);
    let peer_of = |index: usize| if rank == 0 { index + 1 } else { 0 };
    let mut open: Vec<usize> = (0..connections.len()).collect();
    loop {
        let mut fds: Vec<PollFd> = open
            .iter()
            .map(|&index| PollFd::new(&*connections[index], PollFlags::RDHUP))
            .collect();
        fds.push(PollFd::new(stopped, PollFlags::IN | PollFlags::RDHUP));
        if wire::poll(&mut fds, PAUSE).is_err() {
            return;
        }
        let closed = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
        if fds.pop().is_some_and(|fd| fd.revents().intersects(closed)) {
            return;
        }
        let hung_up: Vec<usize> = open
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| fd.revents().intersects(closed))
            .map(|(&index, _)| index)
            .collect();
        drop(fds);
        for index in hung_up {
            open.retain(|&other| other != index);
            if !commons.has_left(peer_of(index)) {
                commons.fail(Error::RankLost {
                    rank: peer_of(index),
                    noticed_by: rank,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minority_is_blamed_and_in_a_tie_rank_0_is_right() {
        let (a, b) = (Call::Barrier, Call::AllGatherBytes);
        let blame = |calls: &[&Call]| {
            let calls: Vec<Call> = calls.iter().map(|call| (*call).clone()).collect();
            odd_one_out(&calls).map(|error| match error {
                Error::CallMismatch { rank, other, .. } => (rank, other),
                other => panic!("{other}"),
            })
        };
        assert_eq!(blame(&[&a, &a, &a]), None);
        assert_eq!(blame(&[&a, &b, &a]), Some((1, 0)));
        assert_eq!(blame(&[&b, &a, &a]), Some((0, 1)));
        assert_eq!(blame(&[&a, &b]), Some((1, 0)));
    }

    #[test]
    fn parts_are_split_as_they_were_joined_and_nonsense_is_not() {
        let parts = [vec![], vec![1, 2, 3], vec![0; 300]];
        assert_eq!(split(&join(&parts)).unwrap(), parts);
        assert_eq!(split(&[1, 2, 3]), None);
        assert_eq!(split(&u64::MAX.to_le_bytes()), None);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! Frames, and the messages of ranks in them.
    use std::convert::Infallible;
    use std::io::Write;
    use std::net::Shutdown;

    use super::*;

    /// The first byte says how long a frame may be; the rest is what the other end of a connection sends.
    pub fn parse(data: &[u8]) {
        let Some((limit, sent)) = data.split_first() else {
            return;
        };
        let Ok((mut other, stream)) = wire::pair() else {
            return;
        };
        // What the socket's buffer does not hold is not sent.
        let _ = other.write(sent);
        let _ = other.shutdown(Shutdown::Write);
        let line = Line {
            stream: &stream,
            deadline: Instant::now() + Duration::from_secs(1),
            check: || Ok::<(), Infallible>(()),
        };
        let limit = MAX_FRAME >> (limit % 32);
        while let Ok((frame, _)) = line.receive(limit) {
            assert!(frame.len() <= limit);
            let messages = split(&frame).unwrap_or_default();
            let bytes: usize = messages.iter().map(|message| 8 + message.len()).sum();
            assert!(bytes == 0 || bytes == frame.len());
            let mut calls = Vec::new();
            for message in messages {
                let Some((call, payload)) = decode(message) else {
                    continue;
                };
                calls.push(call);
                if let Some((Err(error), _)) = outcome(payload) {
                    let _ = (error.to_string(), error.cause());
                }
            }
            if let Some(error) = odd_one_out(&calls) {
                let _ = error.to_string();
            }
        }
    }

    /// What ranks send in an exchange that all complete, and in one that a rank can't.
    pub fn seeds() -> Vec<Vec<u8>> {
        let sharded = Call::Sharded {
            rows: vec![3, 0, 5],
            k: 64,
            dtype: DType::Bf16,
        };
        let died = Error::RankLost {
            rank: 2,
            noticed_by: 1,
        };
        let cause = Box::new(died.clone());
        let outcomes = [Ok(()), Err(died), Err(Error::Poisoned { cause })];
        let message = |call: &Call, outcome: &Result<()>| {
            let outcome = serde_json::to_vec(outcome).unwrap_or_default();
            encode(call, &join(&[outcome, b"payload".to_vec()])).unwrap_or_default()
        };
        let calls = [Call::Barrier, Call::OpenBackend, sharded];
        let frames = calls.iter().flat_map(|call| {
            let messages: Vec<_> = outcomes.iter().map(|made| message(call, made)).collect();
            [messages[0].clone(), join(&messages)]
        });
        let frames = frames.map(|frame| sent(&frame));
        // Headers of what never comes.
        let huge = [vec![0, 0, 0, 0, 16], sent(&u64::MAX.to_le_bytes())];
        frames.chain(huge).collect()
    }

    /// As [`Line::send`] puts it on the connection, behind the byte for the longest limit.
    fn sent(frame: &[u8]) -> Vec<u8> {
        [&[0], &(frame.len() as u32).to_le_bytes()[..], frame].concat()
    }
}
