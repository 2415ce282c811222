//! The ranks of a group as one rank sees them: messages to all ranks, and failures of ranks.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::PostedCall;
use super::deadlines::{Clock, Deadlines};
use super::naming::Naming;
use super::pidfd;
use super::reports::ReportSender;
use super::shared_state::SharedState;
use super::waits::WaitTimes;
use super::watcher::{Watched, Watcher};
use super::wire::{Channel, Connection, Frame, MAX_FRAME, WireError};
use super::{last_panic, panics};
use crate::error::{Deadline, Error, Result};
use crate::json;
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::{Awaited, Flag, Wait};
use crate::schedule::agreed::hash;

/// How much longer a rank waits for an intermediary than the intermediary waits itself. So the intermediary, which
/// knows the culprit, reports first.
const GRACE: Duration = Duration::from_millis(500);
/// A very long time that can still be added to others.
const FOREVER: Duration = Duration::from_secs(1 << 32);
/// A rank that waits notes it more often than this, even on a busy machine.
const FRESH: Duration = Duration::from_millis(250);
/// A wait is this long before it asks whether all ranks have begun the call, which takes some microseconds.
const NOT_SHORT: Duration = Duration::from_millis(1);

/// The call in which the backends of the ranks open.
pub const OPENING: &str = "the opening of the backend";

/// Room for what is added around a rank's message.
const OVERHEAD: usize = 4096;

/// The messages of all ranks, by rank.
pub struct Gathered {
    pub payloads: Vec<Vec<u8>>,
    /// One descriptor of each rank, if ranks sent descriptors and rank 0 could receive them all. Otherwise none. An
    /// error if this rank could not receive them.
    pub fds: io::Result<Vec<OwnedFd>>,
}

/// This rank's end of the group.
#[derive(Debug)]
pub struct Members {
    pub rank: usize,
    pub world: usize,
    pub deadlines: Deadlines,
    /// True if the ranks are threads of one process.
    pub in_process: bool,
    /// True if the rank's function says why it has left, after this has been dropped.
    pub(super) says_farewell: bool,
    shared: Arc<SharedState>,
    waits: Arc<WaitTimes>,
    /// The number of this rank's latest collective call. Locked while one is posted or refused.
    calls: Mutex<u64>,
    /// The number of this rank's latest operation.
    operation: AtomicU64,
    /// On rank 0 the connections to 1, 2, …, and on other ranks the one to rank 0. Locked for one exchange of messages
    /// at a time, which ends if the group fails, and calls no function of the caller's.
    connections: Mutex<Vec<Arc<Connection>>>,
    /// The watcher ends when this is dropped, after the farewell. It shares the connections, which only end then.
    _watcher: Option<Watcher>,
}

impl Members {
    /// Makes this rank's end. `peers` are in the order of the struct's connections.
    ///
    /// # Errors
    /// Errors of this rank. The other ranks hear of them before they see its connections close.
    pub fn new(
        rank: usize,
        deadlines: Deadlines,
        in_process: bool,
        shared: SharedState,
        world: usize,
        peers: Vec<Watched>,
    ) -> Result<Members> {
        let shared = Arc::new(shared);
        panics::listen(&shared);
        let connections = peers.iter().map(|peer| peer.connection.clone()).collect();
        let watch = || Watcher::spawn(rank, shared.clone(), peers);
        let watcher = (world > 1).then(watch).transpose();
        let watcher = watcher.map_err(|error| shared.fail(error))?;
        Ok(Members {
            rank,
            world,
            deadlines,
            in_process,
            says_farewell: in_process,
            shared,
            waits: Arc::new(WaitTimes::new(world)),
            calls: Mutex::new(0),
            operation: AtomicU64::new(0),
            connections: Mutex::new(connections),
            _watcher: watcher,
        })
    }

    /// Fails in a fork of this rank's process. It touches nothing there that other threads may have locked, and tells
    /// the other ranks and the launcher nothing.
    pub fn refuse_fork(&self) -> Result<()> {
        self.shared.refuse_fork()
    }

    /// Fails if the group has failed.
    pub fn check(&self) -> Result<()> {
        last_panic::forget();
        self.refuse_fork()?;
        match self.shared.fault() {
            None => Ok(()),
            Some(cause) => Err(Error::Poisoned {
                cause: Box::new(cause),
            }),
        }
    }

    /// The group's first failure, if there is one.
    pub fn fault(&self) -> Option<Error> {
        let forked = self.refuse_fork().err();
        forked.or_else(|| self.shared.fault())
    }

    /// Reports a failure to every rank, after which the group can do nothing more. Returns the first failure.
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(error)
    }

    /// Reports that this rank's program has failed, with an error of these words.
    pub fn fail_because(&self, reason: String) -> Error {
        if let Err(forked) = self.refuse_fork() {
            return forked;
        }
        self.fail(self.shared.program_failed(reason))
    }

    /// Tells the other ranks that this rank panics, if this thread does.
    pub fn report_panic(&self) {
        self.shared.report_panic();
    }

    /// The ranks' shared state, for users that outlive this value.
    pub fn shared_state(&self) -> Arc<SharedState> {
        self.shared.clone()
    }

    /// What the group is called, and which ranks of the job its ranks are.
    pub fn naming(&self) -> Cow<'_, Naming> {
        let unnamed = || Cow::Owned(Naming::of_job(None, self.world));
        self.shared.naming().map_or_else(unnamed, Cow::Borrowed)
    }

    /// An error of this rank or of a different one, with the group's name if it has one.
    pub fn named(&self, error: Error) -> Error {
        self.shared.named(error)
    }

    /// The group's name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.shared.naming()?.name.as_deref()
    }

    /// The sender of reports to the launcher, if it wants to know of failures.
    pub fn launcher(&self) -> Option<&ReportSender> {
        self.shared.launcher()
    }

    /// Names the group, once.
    pub fn set_naming(&self, naming: Naming) {
        self.shared.set_naming(naming);
    }

    /// A reporter for a thread of a backend that watches this rank.
    #[cfg(feature = "cuda")]
    pub fn failure_reporter(&self) -> FailureReporter {
        FailureReporter {
            rank: self.rank,
            deadlines: self.deadlines,
            shared: self.shared.clone(),
            waits: self.waits.clone(),
        }
    }

    /// How long this rank has waited for each rank in operations.
    pub fn wait_times(&self) -> Vec<Duration> {
        match self.refuse_fork() {
            Ok(()) => self.waits.all(),
            Err(_) => vec![Duration::ZERO; self.world],
        }
    }

    /// Agrees with the other ranks that the next call is operation `epoch`, without a message.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] if another rank called something else; the group's failure while this rank waits for one
    /// that is so far behind that its calls can't be compared any more.
    pub fn post(&self, epoch: Epoch, operation: PostedCall<'_>) -> Result<()> {
        self.refuse_fork()?;
        let post = |number| self.shared.post_operation(number, epoch, operation);
        let number = self.next_call(&|| operation.to_string(), post)?;
        self.operation.store(number, Ordering::Relaxed);
        Ok(())
    }

    /// True if a rank has not begun this rank's latest operation.
    pub fn awaits_a_rank(&self) -> bool {
        let latest = self.operation.load(Ordering::Relaxed);
        !self.shared.all_have_begun(latest)
    }

    /// Gives the next number to a call of this rank, which `post` posts, and returns it.
    fn next_call(
        &self,
        words: &dyn Fn() -> String,
        post: impl FnOnce(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut latest = self.calls();
        let number = *latest + 1;
        if self.shared.may_post(number).is_err() {
            self.await_slower_ranks(number, words)?;
        }
        *latest = number;
        self.shared.note_got(None);
        post(number).map_err(|error| self.fail(error))?;
        Ok(number)
    }

    fn calls(&self) -> MutexGuard<'_, u64> {
        // A panic while it was held has not left it half-changed.
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn await_slower_ranks(&self, number: u64, words: &dyn Fn() -> String) -> Result<()> {
        let clock = Clock::start();
        let needed = SharedState::needed_for(number);
        while let Err(rank) = self.shared.may_post(number) {
            self.pause(&PeerWait {
                clock: &clock,
                grace: Duration::ZERO,
                is_for_a_peer: true,
                rank,
                call: &|| Some(needed),
                what: &|| format!("{}: rank {rank} is too many calls behind", words()),
            })?;
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Notes why this rank was refused a collective call. The rank may make the call after all. Otherwise the ranks
    /// that wait for it in that call get the error.
    pub fn refuse(&self, error: &Error) {
        if self.refuse_fork().is_err() {
            return;
        }
        let latest = self.calls();
        self.shared.note_refusal(*latest + 1, error);
        self.shared.note_got(Some(error));
    }

    /// Notes an error that this rank got from a call, if the group goes on. The ranks that wait for this rank get the
    /// error if it leaves next. `None` says that it went on after an error.
    pub fn note(&self, error: Option<&Error>) {
        self.shared.note_got(error);
    }

    /// Notes that this rank makes its next collective call after all.
    ///
    /// It is called before long work that precedes the call, so that the waiting ranks do not take an earlier refusal
    /// for the end.
    pub fn withdraw_refusal(&self) {
        if self.refuse_fork().is_err() {
            return;
        }
        let _latest = self.calls();
        self.shared.withdraw_refusal();
    }

    /// One check during a wait.
    ///
    /// # Errors
    /// The group's first failure. It may be new: a deadline has passed, or a rank was refused the call and does not
    /// make it.
    fn pause(&self, waiting: &PeerWait) -> Result<()> {
        if let Some(fault) = self.shared.fault() {
            return Err(fault);
        }
        let &PeerWait { clock, rank, .. } = waiting;
        if waiting.is_for_a_peer {
            self.shared.note_wait(rank);
        }
        let total = clock.total();
        let refusal = self
            .shared
            .standing_refusal(waiting.call, total, &self.deadlines);
        if let Some(error) = refusal {
            return Err(self.fail(error));
        }
        if total >= NOT_SHORT {
            // A call that is no more among this rank's latest has been begun by all.
            let all_have_begun = |number| self.shared.all_have_begun(number);
            clock.look(|| (waiting.call)().is_none_or(all_have_begun));
        }
        match self.deadlines.passed(clock, waiting.grace) {
            Some(passed) => {
                let what = (waiting.what)();
                Err(self.fail(timeout(&self.shared, passed, clock.waited(), rank, what)))
            }
            None => Ok(()),
        }
    }

    /// The error if `rank` has left while this rank waits for it in its call `number`. `what` is the call and what
    /// `rank` has not done.
    fn left(&self, rank: usize, number: Option<u64>, what: String) -> Error {
        let reason = self.shared.why_left(rank, number);
        reason.unwrap_or(Error::RankLeft {
            rank,
            waiting: self.rank,
            what,
        })
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather("barrier()", &[], None).map(drop)
    }

    /// Exchanges a message, and perhaps a descriptor, that each rank has made.
    ///
    /// A rank that could not make its part sends the reason. Then all ranks get its error, and the group goes on.
    /// `call` is the call in words.
    pub fn gather_messages(
        &self,
        call: &str,
        own: Result<(Vec<u8>, Option<OwnedFd>)>,
    ) -> Result<Gathered> {
        let outcome = json::of_outcome(&own.as_ref().map(|_| ()).map_err(Error::clone));
        let (payload, fd) = own.unwrap_or_default();
        let fd = fd.as_ref().map(AsFd::as_fd);
        let mut gathered = self.all_gather(call, &join(&[outcome, payload]), fd)?;
        for (rank, bytes) in gathered.payloads.iter_mut().enumerate() {
            let parts = self::outcome(bytes).ok_or_else(|| self.garbage(rank, "an outcome"))?;
            let (outcome, payload) = parts;
            outcome.map_err(|error| self.named(error))?;
            *bytes = payload.to_vec();
        }
        Ok(gathered)
    }

    /// Shares a descriptor that each rank has made, and returns what `take` makes of all ranks' descriptors, by rank.
    ///
    /// If a rank could not do its part, all ranks get its error, and the group goes on.
    pub fn share<R>(
        &self,
        call: &str,
        own: Result<OwnedFd>,
        take: impl FnOnce(Vec<OwnedFd>) -> Result<R>,
    ) -> Result<R> {
        let gathered = self.gather_messages(call, own.map(|fd| (Vec::new(), Some(fd))))?;
        let taken = match gathered.fds {
            Ok(fds) if fds.len() == self.world => take(fds).map(Some),
            // Rank 0 could not receive them all, and says so.
            Ok(_) => Ok(None),
            Err(error) => {
                let action = format!("receive {} descriptors", self.world);
                Err(Error::system(self.rank, action)(error))
            }
        };
        let outcome = taken.as_ref().map(|_| (Vec::new(), None));
        self.gather_messages(call, outcome.map_err(Error::clone))?;
        taken?.ok_or_else(|| self.garbage(0, "a descriptor of each rank"))
    }

    /// Tells the other ranks why this rank has no memory to share with them, in the place of its part in their first
    /// exchange.
    pub fn decline(stream: &UnixStream, deadlines: &Deadlines, error: &Error) {
        let outcome = json::of_outcome::<()>(&Err(error.clone()));
        let channel = Channel {
            stream,
            deadline: Instant::now() + deadlines.rendezvous() + GRACE,
            check: || pidfd::check(stream),
        };
        let mut told = channel.send(&join(&[outcome, Vec::new()]), &[]);
        // This waits until rank 0 has told all and closes the connection. Rank 0 would take this rank for dead if it
        // left earlier.
        while told.is_ok() {
            told = channel.receive(MAX_FRAME).map(drop);
        }
    }

    /// Sends `payload`, and a descriptor if there is one, to every rank, and returns what all sent.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] unless all ranks make the same `call`; the group's failure if a rank is lost or has
    /// left, or if a deadline has passed.
    pub fn all_gather(
        &self,
        call: &str,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Gathered> {
        self.check()?;
        let longest = MAX_FRAME / self.world - OVERHEAD;
        if payload.len() > longest {
            return Err(self.fail(Error::Limit {
                rank: Some(self.rank),
                call: call.trim_end_matches("()").into(),
                what: "the number of bytes".into(),
                value: payload.len(),
                min: 0,
                max: longest,
            }));
        }
        let connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let words = call.to_string();
        // Calls are compared before anything is sent. So an exchange is complete only if all ranks made it.
        let number = self.next_call(&|| words.clone(), |number| {
            self.shared
                .post_messages(number, hash(words.as_bytes()), &words)
        })?;
        let messages = MessageCall {
            words,
            number,
            clock: Clock::start(),
        };
        let (bytes, fds) = if self.rank == 0 {
            self.collect(&connections, &messages, payload, fd)?
        } else {
            let channel = self.channel(0, &connections[0], &messages, GRACE);
            channel
                .send(payload, fd.as_slice())
                .map_err(|e| self.wire_failure(0, &messages, e))?;
            channel
                .receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(0, &messages, e))?
        };
        let parts = split(&bytes).filter(|parts| parts.len() == self.world);
        let parts = parts.ok_or_else(|| self.garbage(0, "a list of messages"))?;
        let payloads = parts.into_iter().map(|part| self.copied(part));
        Ok(Gathered {
            payloads: payloads.collect::<Result<_>>()?,
            fds,
        })
    }

    /// Memory for a message. A failed allocation of a vector would end the process. Other ranks wait for the message,
    /// so it is the group's failure instead.
    fn room(&self, bytes: usize) -> Result<Vec<u8>> {
        let mut room = Vec::new();
        let refused = Error::out_of_memory(self.rank, bytes);
        match room.try_reserve_exact(bytes) {
            Ok(()) => Ok(room),
            Err(_) => Err(self.fail(refused(rustix::io::Errno::NOMEM.into()))),
        }
    }

    fn copied(&self, message: &[u8]) -> Result<Vec<u8>> {
        let mut copy = self.room(message.len())?;
        copy.extend_from_slice(message);
        Ok(copy)
    }

    /// As [`join`].
    fn joined(&self, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
        let lengths = parts.iter().map(|part| size_of::<u64>() + part.len());
        let mut all = self.room(lengths.sum())?;
        join_into(&mut all, parts);
        Ok(all)
    }

    /// Rank 0's part: receives every rank's message, then sends all of them to all.
    fn collect(
        &self,
        connections: &[Arc<Connection>],
        messages: &MessageCall,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Frame> {
        let mut parts = vec![self.copied(payload)?];
        let mut fds = Ok(Vec::new());
        for (index, connection) in connections.iter().enumerate() {
            let (part, sent) = self
                .channel(index + 1, connection, messages, Duration::ZERO)
                .receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(index + 1, messages, e))?;
            parts.push(part);
            fds = fds.and_then(|mut fds: Vec<OwnedFd>| {
                fds.extend(sent?);
                Ok(fds)
            });
        }
        let all = self.joined(&parts)?;
        // A rank gets all descriptors or none, so that it takes none for a different rank's.
        let others = fds.as_ref().map_or(&[][..], |fds| fds);
        let own = fd.filter(|_| fds.is_ok());
        let sent: Vec<BorrowedFd> = own
            .into_iter()
            .chain(others.iter().map(AsFd::as_fd))
            .collect();
        for (index, connection) in connections.iter().enumerate() {
            self.channel(index + 1, connection, messages, GRACE)
                .send(&all, &sent)
                .map_err(|e| self.wire_failure(index + 1, messages, e))?;
        }
        let own = own.map(|fd| fd.try_clone_to_owned()).transpose();
        let fds = fds.and_then(|fds| Ok(own?.into_iter().chain(fds).collect()));
        Ok((all, fds))
    }

    /// The connection to `rank`.
    fn channel<'a>(
        &'a self,
        rank: usize,
        stream: &'a UnixStream,
        messages: &'a MessageCall,
        grace: Duration,
    ) -> Channel<'a, impl Fn() -> Result<(), Error>> {
        Channel {
            stream,
            // The check has the deadlines.
            deadline: Instant::now() + FOREVER,
            check: move || {
                self.pause(&PeerWait {
                    clock: &messages.clock,
                    grace,
                    is_for_a_peer: true,
                    rank,
                    call: &|| Some(messages.number),
                    what: &|| messages.awaited(rank),
                })
            },
        }
    }

    fn wire_failure(&self, rank: usize, messages: &MessageCall, error: WireError<Error>) -> Error {
        let call = &messages.words;
        self.fail(match error {
            WireError::Stopped(error) => error,
            WireError::Late => {
                let (waited, what) = (messages.clock.waited(), messages.awaited(rank));
                let passed = (Deadline::Call, FOREVER);
                timeout(&self.shared, passed, waited, rank, what)
            }
            WireError::Closed if self.shared.has_left(rank) => {
                self.left(rank, Some(messages.number), call.clone())
            }
            WireError::Closed => Error::RankLost {
                rank,
                noticed_by: self.rank,
            },
            WireError::Garbage(reason) => Error::Message { rank, reason },
            WireError::Io(error) => {
                Error::system(self.rank, format!("talk to rank {rank} in {call}"))(error)
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

/// A call in which all ranks send something to all.
struct MessageCall {
    /// The call, in words.
    words: String,
    number: u64,
    clock: Clock,
}

impl MessageCall {
    /// The call, and what `rank` has not done in it.
    fn awaited(&self, rank: usize) -> String {
        let what = match self.clock.has_begun() {
            true => "has not sent its part",
            false => "has not come",
        };
        format!("{}: rank {rank} {what}", self.words)
    }
}

/// A wait for another rank.
struct PeerWait<'a> {
    clock: &'a Clock,
    /// How much longer than its deadline the wait may last.
    grace: Duration,
    /// False if a thread of this rank is waited for, which says nothing about other ranks.
    is_for_a_peer: bool,
    rank: usize,
    /// The number of the call in which this rank waits.
    call: &'a dyn Fn() -> Option<u64>,
    /// The call in words, and what the other rank has not done.
    what: &'a dyn Fn() -> String,
}

/// The error of a rank that has waited for `rank` this long in vain. `passed` is the deadline and its length. `what` is
/// the call and what `rank` has not done.
fn timeout(
    shared: &SharedState,
    (deadline, longest): (Deadline, Duration),
    waited: Duration,
    rank: usize,
    what: String,
) -> Error {
    let culprit = shared.culprit(rank, FRESH.min(longest / 2));
    Error::Timeout {
        rank: culprit,
        waiting: shared.rank(),
        what: if culprit == rank {
            what
        } else {
            format!("{what}, held up by rank {culprit}")
        },
        waited_ms: waited.as_millis() as u64,
        deadline,
    }
}

/// A share in a rank's right to report failures, for a thread of its backend.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct FailureReporter {
    pub rank: usize,
    pub deadlines: Deadlines,
    shared: Arc<SharedState>,
    waits: Arc<WaitTimes>,
}

#[cfg(feature = "cuda")]
impl FailureReporter {
    /// As [`Members::fail`].
    pub fn fail(&self, error: Error) -> Error {
        self.shared.fail(error)
    }

    /// As [`Members::fault`].
    pub fn fault(&self) -> Option<Error> {
        self.shared.fault()
    }

    /// Notes that this rank waits for `peer`, and has waited for `time` since the last note. It has to be called a few
    /// times a second during a wait.
    pub fn note_wait(&self, peer: usize, time: Duration) {
        self.shared.note_wait(peer);
        self.waits.add(peer, time);
    }

    /// The error if this rank has waited for `peer` this long in vain. `passed` is the deadline and its length. `what`
    /// is the call and what `peer` has not done.
    pub fn timed_out(
        &self,
        passed: (Deadline, Duration),
        peer: usize,
        waited: Duration,
        what: String,
    ) -> Error {
        timeout(&self.shared, passed, waited, peer, what)
    }

    /// True if every rank has begun operation `epoch`, which this rank has begun.
    pub fn all_have_begun(&self, epoch: Epoch) -> bool {
        let number = self.shared.number_of(epoch);
        number.is_none_or(|number| self.shared.all_have_begun(number))
    }

    /// True if `rank` has left the group in order.
    pub fn has_left(&self, rank: usize) -> bool {
        self.shared.has_left(rank)
    }

    /// Operation `epoch` of this rank, in words.
    pub fn call_of(&self, epoch: Epoch) -> String {
        self.shared.call_of(epoch)
    }

    /// Why `rank`, which has left, does not come to operation `epoch`, or to any operation, if it has said so.
    pub fn why_left(&self, rank: usize, epoch: Option<Epoch>) -> Option<Error> {
        let number = epoch.and_then(|epoch| self.shared.number_of(epoch));
        self.shared.why_left(rank, number)
    }

    /// Why `rank` was refused operation `epoch`, if it was.
    pub fn refusal(&self, rank: usize, epoch: Epoch) -> Option<Error> {
        let number = self.shared.number_of(epoch)?;
        self.shared.refusal(rank, number)
    }

    /// Why some rank was refused operation `epoch`. None until this rank has waited there for so long that the other
    /// had time to make the call after all.
    pub fn standing_refusal(&self, epoch: Epoch, waited: Duration) -> Option<Error> {
        let number = || self.shared.number_of(epoch);
        self.shared
            .standing_refusal(number, waited, &self.deadlines)
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        self.report_panic();
        // A rank that unwinds has not completed what it began, so it does not leave in order.
        if std::thread::panicking() {
            return;
        }
        // A thread's error is known when its function has returned. Nobody hears of a process's error.
        match self.says_farewell {
            true => self.shared.let_go(),
            false => self.shared.leave_with_what_it_got(),
        }
    }
}

/// Waiting on a thread of the host. The thread looks, then yields, then sleeps, so that ranks and workers can outnumber
/// the cores.
impl Wait for Members {
    type Error = Error;

    fn wait(&self, flag: &Flag, epoch: Epoch, awaited: Awaited) -> Result<()> {
        self.refuse_fork()?;
        const SPINS: u32 = 100;
        const YIELDS: u32 = 20;
        const NAP: Duration = Duration::from_micros(50);
        for _ in 0..SPINS {
            if flag.reached(epoch) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let number = OnceCell::new();
        let call = || *number.get_or_init(|| self.shared.number_of(epoch));
        let what = || self.shared.describe(epoch, awaited);
        // The flag of a pulled chunk is written by this rank's copy thread. That may wait for a rank other than the
        // chunk's source, and knows the culprit. A block that this rank's workers make takes as long as it takes,
        // because their waits for other ranks end.
        let grace = match awaited {
            Awaited::Chunk { pulled: true, .. } => GRACE,
            Awaited::Produced { .. } => FOREVER,
            _ => Duration::ZERO,
        };
        let waiting = PeerWait {
            clock: &Clock::start(),
            grace,
            is_for_a_peer: grace.is_zero(),
            rank: awaited.peer(),
            call: &call,
            what: &what,
        };
        let _waits = (waiting.is_for_a_peer).then(|| self.waits.begin(waiting.rank));
        let mut yields = YIELDS;
        loop {
            // A rank that left had signalled everything before. For a pulled chunk it had waited for `done`, which
            // follows the flag. So the flag is read after that.
            let left = self.shared.has_left(awaited.peer());
            if flag.reached(epoch) {
                return Ok(());
            }
            if left {
                return Err(self.fail(self.left(awaited.peer(), call(), what())));
            }
            self.pause(&waiting)?;
            if yields > 0 {
                yields -= 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

/// Joins parts, each after its length.
fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    join_into(&mut bytes, parts);
    bytes
}

fn join_into(bytes: &mut Vec<u8>, parts: &[Vec<u8>]) {
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
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

/// Splits what a rank sends in an exchange into its result and its bytes.
fn outcome(bytes: &[u8]) -> Option<(Result<()>, &[u8])> {
    match split(bytes)?[..] {
        [outcome, payload] => Some((json::outcome(outcome).ok()?, payload)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    use super::super::wire;
    use std::convert::Infallible;
    use std::io::Write;
    use std::net::Shutdown;

    use super::*;

    /// The first byte says how long a frame may be. The rest is what the other end of a connection sends.
    pub fn parse(data: &[u8]) {
        let Some((limit, sent)) = data.split_first() else {
            return;
        };
        let Ok((other, stream)) = wire::pair() else {
            return;
        };
        // Bytes that do not fit in the socket's buffer are not sent.
        let _ = (&*other).write(sent);
        let _ = other.shutdown(Shutdown::Write);
        let channel = Channel {
            stream: &stream,
            deadline: Instant::now() + Duration::from_secs(1),
            check: || Ok::<(), Infallible>(()),
        };
        let limit = MAX_FRAME >> (limit % 32);
        while let Ok((frame, _)) = channel.receive(limit) {
            assert!(frame.len() <= limit);
            let messages = split(&frame).unwrap_or_default();
            let bytes: usize = messages.iter().map(|message| 8 + message.len()).sum();
            assert!(bytes == 0 || bytes == frame.len());
            for message in messages {
                if let Some((Err(error), _)) = outcome(message) {
                    let _ = (error.to_string(), error.cause());
                }
            }
        }
    }

    /// Messages of an exchange that all complete, and of one that a rank can't complete.
    pub fn seeds() -> Vec<Vec<u8>> {
        let died = Error::RankLost {
            rank: 2,
            noticed_by: 1,
        };
        let cause = Box::new(died.clone());
        let outcomes = [Ok(()), Err(died), Err(Error::Poisoned { cause })];
        let message =
            |outcome: &Result<()>| join(&[json::of_outcome(outcome), b"payload".to_vec()]);
        let messages = outcomes.each_ref().map(message);
        let frames = [messages[0].clone(), messages[2].clone(), join(&messages)];
        let frames = frames.into_iter().map(|frame| sent(&frame));
        // Headers of frames that never come.
        let huge = [vec![0, 0, 0, 0, 16], sent(&u64::MAX.to_le_bytes())];
        frames.chain(huge).collect()
    }

    /// A frame as [`Channel::send`] sends it, after the byte for the longest limit.
    fn sent(frame: &[u8]) -> Vec<u8> {
        [&[0], &(frame.len() as u32).to_le_bytes()[..], frame].concat()
    }
}
