//! The ranks of a group as one rank sees them: calls of all ranks, waits for ranks, and failures of ranks.

pub mod messages;

use std::borrow::Cow;
use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::call::PostedCall;
use super::deadlines::{Clock, Deadlines};
#[cfg(feature = "cuda")]
use super::failure_reporter::FailureReporter;
use super::mirror::{HostLink, Mirror};
use super::naming::Naming;
use super::reports::ReportSender;
use super::shared_state::SharedState;
use super::tree::Tree;
use super::wait_times::WaitTimes;
use super::watcher::{Watched, Watcher};
use super::{last_panic, panics};
use crate::error::{Error, Kind, MadeCall, Result};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::{Awaited, Flag, Wait};
use crate::schedule::Hosts;

/// How much longer a rank waits for an intermediary than the intermediary waits itself. So the intermediary, which
/// knows the culprit, reports first.
const GRACE: Duration = Duration::from_millis(500);
/// A very long time that can still be added to others.
const FOREVER: Duration = Duration::from_secs(1 << 32);
/// A wait is this long before it asks whether all ranks have begun the call, which takes some microseconds.
const NOT_SHORT: Duration = Duration::from_millis(1);
/// The shortest and the longest sleep of a waiting thread between two looks.
const NAPS: [Duration; 2] = [Duration::from_micros(50), Duration::from_millis(4)];

/// How long a thread sleeps that has waited for `waited`. The sleep prolongs the wait by a thirtieth at most.
///
/// A look costs a few microseconds, and two threads of each rank may wait. With short sleeps, the waiting ranks of a
/// few groups would leave no time for anything else.
fn nap(waited: Duration) -> Duration {
    let [shortest, longest] = NAPS;
    (waited / 32).clamp(shortest, longest)
}

/// The call in which the backends of the ranks open.
pub fn opening() -> MadeCall {
    MadeCall::named("the opening of the backend")
}

/// This rank's end of the group.
#[derive(Debug)]
pub struct Members {
    pub rank: usize,
    pub world: usize,
    pub deadlines: Deadlines,
    /// True if the ranks are threads of one process.
    pub in_process: bool,
    /// True while ranks that are threads of one process open the group. They wait longer for one another there.
    pub is_opening: bool,
    /// Which ranks share a host.
    pub hosts: Hosts,
    /// True if the rank's function says why it has left, after this has been dropped.
    pub(super) says_farewell: bool,
    shared: Arc<SharedState>,
    waits: Arc<WaitTimes>,
    /// The number of this rank's latest collective call. Locked while one is posted or refused.
    calls: Mutex<u64>,
    /// The number of this rank's latest operation.
    operation: AtomicU64,
    /// Its key, if there are several hosts.
    key: AtomicU64,
    /// If this rank leads one of several hosts. It ends after the farewell, and takes that to the other hosts.
    mirror: Option<Arc<Mirror>>,
    /// Locked for one exchange of messages at a time, which ends if the group fails, and calls no function of the
    /// caller's.
    tree: Mutex<Tree>,
    /// The watcher ends when this is dropped, after the farewell. It shares the connections, which only end then.
    _watcher: Option<Watcher>,
}

/// A rank's control connections, to its parent and its children in the tree ([`Shape`](super::tree::Shape)).
#[derive(Debug, Default)]
pub struct Connections {
    /// Those within its host.
    pub near: Vec<Watched>,
    /// Those between leaders.
    pub links: Vec<HostLink>,
}

impl Members {
    /// Makes this rank's end.
    ///
    /// # Errors
    /// Errors of this rank. The other ranks hear of them before they see its connections close.
    pub fn new(
        rank: usize,
        deadlines: Deadlines,
        in_process: bool,
        shared: SharedState,
        world: usize,
        connections: Connections,
    ) -> Result<Members> {
        let shared = Arc::new(shared);
        panics::listen(&shared);
        let Connections { near, links } = connections;
        let hosts = shared.hosts().clone();
        let near_ends = near.iter().map(|peer| (peer.rank, peer.connection.clone()));
        let far_ends = links.iter().map(|link| (link.rank, link.messages.clone()));
        let ends: Vec<_> = near_ends.chain(far_ends).collect();
        let watch = || Watcher::spawn(rank, shared.clone(), near);
        let watcher = (world > 1).then(watch).transpose();
        let watcher = watcher.map_err(|error| shared.fail(error))?;
        let mirror = || Mirror::spawn(shared.clone(), links, deadlines.host()).map(Arc::new);
        let leads = hosts.count() > 1 && hosts.leader_of(rank) == rank;
        let mirror = leads.then(mirror).transpose();
        let mirror = mirror.map_err(|error| shared.fail(error))?;
        Ok(Members {
            rank,
            world,
            deadlines,
            in_process,
            is_opening: in_process,
            tree: Mutex::new(Tree::new(&hosts, world, rank, &ends)),
            hosts,
            says_farewell: in_process,
            shared,
            waits: Arc::new(WaitTimes::new(world)),
            calls: Mutex::new(0),
            operation: AtomicU64::new(0),
            key: AtomicU64::new(0),
            mirror,
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
            Some(cause) => Err(self.got(cause).again()),
        }
    }

    /// The group's first failure, if there is one.
    pub fn fault(&self) -> Option<Error> {
        let forked = self.refuse_fork().err();
        forked.or_else(|| self.shared.fault().map(|failure| self.got(failure)))
    }

    /// Notes a failure of the group that this rank's program gets.
    fn got(&self, failure: Error) -> Error {
        self.shared.note_got_failure(&failure);
        failure
    }

    /// Reports a failure to every rank, after which the group can do nothing more. Returns the first failure.
    pub fn fail(&self, error: Error) -> Error {
        self.got(self.shared.fail(error))
    }

    /// As [`Members::fail`], if nothing explains the error that comes from another host within a moment.
    pub fn fail_if_unexplained(&self, error: Error) -> Error {
        let deadline = Instant::now() + GRACE;
        while self.shared.reporter().is_none() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.fail(error)
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

    /// Relay to other hosts; outlives `Members`. None unless this rank leads its host.
    pub fn mirror(&self) -> Option<Arc<Mirror>> {
        self.mirror.clone()
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
    /// [`Kind::CallMismatch`] if another rank called something else; the group's failure while this rank waits for one
    /// that is so far behind that its calls can't be compared any more.
    pub fn post(&self, epoch: Epoch, operation: PostedCall<'_>) -> Result<()> {
        self.refuse_fork()?;
        let post = |number| self.shared.post_operation(number, epoch, operation);
        let number = self.next_call(&|| operation.in_words(), post)?;
        self.operation.store(number, Ordering::Relaxed);
        if self.hosts.count() > 1 {
            self.key.store(operation.key(epoch), Ordering::Relaxed);
        }
        Ok(())
    }

    /// A number of this rank's latest operation that is the same for all ranks that make the same one. What goes over a
    /// network carries it, because calls of other hosts' ranks may be compared only later.
    pub fn key_of_operation(&self) -> u64 {
        self.key.load(Ordering::Relaxed)
    }

    /// Waits until the group has failed, because `rank` of another host makes a different call than this rank, which is
    /// in operation `epoch`. Returns the failure.
    pub fn await_mismatch(&self, rank: usize, epoch: Epoch) -> Error {
        let awaited = Awaited::Chunk {
            source: rank,
            flag: 0,
            pulled: false,
        };
        match self.wait_until(|| Ok(false), epoch, awaited) {
            Ok(()) => self.fail(
                Kind::Internal {
                    what: "a wait without an end has ended".into(),
                }
                .on(self.rank),
            ),
            Err(error) => error,
        }
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
        self.shared.note_next_call();
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
                what: &|| {
                    let rank = self.shared.job_rank(rank);
                    format!("{}: rank {rank} is too many calls behind", words())
                },
            })?;
            std::thread::sleep(nap(clock.total()));
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

    /// Notes an error that this rank's program gets from a call that changes nothing.
    pub fn note_given(&self, error: &Error) {
        self.shared.note_given(error);
    }

    /// Notes that this rank makes its next collective call after all.
    ///
    /// It is called before long work that precedes the call, so that the waiting ranks do not take an earlier refusal
    /// for the end.
    pub fn withdraw_refusal(&self) {
        if self.refuse_fork().is_err() {
            return;
        }
        let latest = self.calls();
        self.shared.withdraw_refusal(*latest + 1);
    }

    /// Notes that this rank's program has made a collective call, for the number of the next one.
    pub fn note_made(&self) {
        self.shared.note_made();
    }

    /// One check during a wait.
    ///
    /// # Errors
    /// The group's first failure. It may be new: a deadline has passed, or a rank was refused the call and does not
    /// make it.
    fn pause(&self, waiting: &PeerWait) -> Result<()> {
        if let Some(fault) = self.shared.fault() {
            return Err(self.got(fault));
        }
        let &PeerWait { clock, rank, .. } = waiting;
        if waiting.is_for_a_peer {
            self.shared.note_wait(rank, waiting.what);
        }
        if clock.total() >= NOT_SHORT {
            // A call that is no more among this rank's latest has been begun by all.
            let all_have_begun = |number| self.shared.all_have_begun(number);
            clock.look(|| (waiting.call)().is_none_or(all_have_begun));
        }
        // The deadline is looked at first, so that a refusal that stands at the deadline is the reason, also if this
        // thread does not run in between.
        let deadlines = if self.is_opening {
            self.deadlines.of_opening()
        } else {
            self.deadlines
        };
        let passed = deadlines.passed(clock, waiting.grace);
        let refusal = self
            .shared
            .standing_refusal(waiting.call, clock.total(), &deadlines);
        if let Some(error) = refusal {
            return Err(self.fail(error));
        }
        match passed {
            Some(passed) => {
                let what = (waiting.what)();
                Err(self.fail(self.shared.timed_out(passed, rank, clock.waited(), what)))
            }
            None => Ok(()),
        }
    }

    /// The error if `rank` has left, for which this rank waits in operation `epoch`.
    #[cfg(feature = "cuda")]
    pub fn has_left(&self, rank: usize, epoch: Epoch, awaited: Awaited) -> Option<Error> {
        let number = self.shared.number_of(epoch);
        let what = || self.shared.describe(epoch, awaited);
        let has_left = self.shared.has_left(rank);
        has_left.then(|| self.left(rank, number, what()))
    }

    /// The error if `rank` has left while this rank waits for it in its call `number`. `what` is the call and what
    /// `rank` has not done.
    fn left(&self, rank: usize, number: Option<u64>, what: String) -> Error {
        let reason = self.shared.why_left(rank, number);
        reason.unwrap_or(
            Kind::RankLeft {
                waiting: self.rank,
                what,
            }
            .on(rank),
        )
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

impl Drop for Members {
    fn drop(&mut self) {
        self.report_panic();
        // A rank that unwinds has not completed what it began, so it does not leave in order.
        if std::thread::panicking() {
            return;
        }
        // A thread's error is known when its function has returned. No one hears of a process's error.
        if self.says_farewell {
            self.shared.let_go()
        } else {
            self.shared.leave_with_what_it_got()
        }
    }
}

/// Waiting on a thread of the host. The thread looks, then yields, then sleeps longer and longer, so that ranks and
/// workers can outnumber the cores.
impl Wait for Members {
    type Error = Error;

    fn wait(&self, flag: &Flag, epoch: Epoch, awaited: Awaited) -> Result<()> {
        self.wait_until(|| Ok(flag.reached(epoch)), epoch, awaited)
    }
}

impl Members {
    /// Waits until `is_there` says true, in operation `epoch`, as [`Wait::wait`] waits for a flag.
    pub fn wait_until(
        &self,
        mut is_there: impl FnMut() -> Result<bool>,
        epoch: Epoch,
        awaited: Awaited,
    ) -> Result<()> {
        self.refuse_fork()?;
        const SPINS: u32 = 100;
        const YIELDS: u32 = 20;
        for _ in 0..SPINS {
            if is_there()? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let number = OnceCell::new();
        let call = || *number.get_or_init(|| self.shared.number_of(epoch));
        let what = || self.shared.describe(epoch, awaited);
        // The flag of a chunk that this rank pulls or receives is written by a thread of this rank. That may wait for a
        // rank other than the chunk's source, and knows the culprit. A block that this rank's workers make takes as long
        // as it takes, because their waits for other ranks end.
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
            if is_there()? {
                return Ok(());
            }
            // A rank that has begun the call completed it before it left. What it sent over a network comes.
            let began = |number| self.shared.has_begun(awaited.peer(), number);
            if left && !call().is_some_and(began) {
                return Err(self.fail(self.left(awaited.peer(), call(), what())));
            }
            if let Err(error) = self.pause(&waiting) {
                // The rank may have signalled after the look above, and a failure that followed says nothing of this call.
                return if is_there()? { Ok(()) } else { Err(error) };
            }
            if yields > 0 {
                yields -= 1;
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap(waiting.clock.total()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::identity::Identity;
    use crate::ranks::rendezvous;

    #[test]
    fn a_long_wait_costs_few_looks_and_lasts_hardly_longer() {
        let (mut waited, mut looks) = (Duration::ZERO, 0);
        while waited < Duration::from_secs(1) {
            let nap = nap(waited);
            assert!(nap <= NAPS[0].max(waited / 32), "{nap:?} after {waited:?}");
            waited += nap;
            looks += 1;
        }
        assert!(looks < 500, "{looks} looks in a second");
    }

    /// Rank 0 of a group of its own.
    fn alone() -> Members {
        let identity = Identity::of_test(0, 1, "");
        rendezvous::meet_speaking(&identity, rendezvous::PROTOCOL_VERSION).unwrap()
    }

    fn wait(members: &Members, is_there: impl FnMut() -> Result<bool>) -> Result<()> {
        members.wait_until(is_there, Epoch::FIRST, Awaited::Ready { source: 0 })
    }

    #[test]
    fn a_failure_that_follows_a_signal_fails_no_wait_for_the_signal() {
        for signalled in [true, false] {
            let members = alone();
            let (mut looks, failed_at) = (0, 150);
            let waited = wait(&members, || {
                looks += 1;
                if looks == failed_at {
                    members.fail(Kind::RankPanicked { message: None }.on(0));
                }
                Ok(signalled && looks > failed_at)
            });
            assert_eq!(waited.is_ok(), signalled, "{waited:?}");
            assert_eq!(looks, failed_at + 1);
        }
    }
}
