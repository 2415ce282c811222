//! Starting ranks as processes of this program.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::address::{self, Address};
use super::children::Child;
use super::output::RankOutputs;
use super::reports::{FailureReport, ReportReceiver};
use super::{env, poll};
use crate::error::{Error, Kind, Result};
use crate::one_line::{option, write_parts};
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::limits::limit;

/// After a rank has failed, the other ranks have this long to end before they are killed. [`Kind::RankFailed`] says it
/// too.
const GRACE: Duration = Duration::from_millis(1500);
/// The death of a rank may be seen this much later than the end of a rank that failed because of it.
const SETTLED: Duration = Duration::from_millis(200);
/// How often a launcher asks if it goes on.
const GLANCE: Duration = Duration::from_millis(50);
/// The pause between looks. It can be long, because every end and every report wakes the launcher.
const PAUSE: Duration = Duration::from_secs(3600);
/// The pause after a report, because a rank that is stopped wakes no one.
const LOOK: Duration = Duration::from_millis(100);

/// True if a launcher started this process as a rank, also if its variables are incomplete or wrong.
///
/// The launchers are [`launch`] and all that [`Group::from_env`](crate::Group::from_env) knows. If variables are wrong,
/// `from_env` says what is wrong.
///
/// An interactive shell such as `srun --pty bash` is no rank, and neither is a process that it starts. sbatch's script
/// is no rank either.
pub fn is_rank() -> bool {
    env::has_rank()
}

/// This process's rank, as its launcher's environment describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankEnvironment {
    /// This process's rank.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
    /// The launcher's name.
    pub launcher: &'static str,
}

/// Reads this process's rank from the environment, as [`Group::from_env`](crate::Group::from_env) does. It is `None`
/// unless [`is_rank`].
///
/// ```no_run
/// if let Some(rank) = gemmesh::launch::rank_environment()? {
///     println!("rank {} of {}, by {}", rank.rank, rank.world_size, rank.launcher);
/// }
/// # Ok::<(), gemmesh::Error>(())
/// ```
///
/// # Errors
/// [`Kind::Environment`] names the variables that are missing, [`Kind::EnvironmentValue`] one that can't be used.
pub fn rank_environment() -> Result<Option<RankEnvironment>> {
    let described = env::describe_this_process()?;
    Ok(described.map(|described| RankEnvironment {
        rank: described.rank,
        world_size: described.world,
        launcher: described.launcher,
    }))
}

/// The environment variables by which all launchers tell ranks who they are. Some are named several times.
pub fn variables() -> impl Iterator<Item = &'static str> {
    env::variables()
}

/// True if the value of this variable is a secret of the job: `GEMMESH_KEY`, and the variable by which [`launch`] tells
/// ranks their address. No error shows it; a program that prints its environment should leave it out.
pub fn is_secret(variable: &str) -> bool {
    env::is_secret(variable)
}

/// Starts this program again, `world` times, as ranks, and returns when all of them have ended.
///
/// Each process has this process's arguments, environment and current folder, and joins the group by
/// [`Group::from_env`](crate::Group::from_env). If the program has changed its folder, its own file is found all the
/// same, and ranks look for arguments that are relative paths in the new folder.
///
/// What ranks print comes out here in whole lines, with the rank before each line, such
/// as `[2] text`: their standard output on this process's, their error output on this process's. So ranks write to
/// pipes, also if this process writes to a terminal. A carriage return ends a line too, and a line of more than 64 KiB
/// comes in pieces. The call returns when all lines are out. If their reader has gone, as `head` goes, they are
/// dropped, and the ranks go on. If an output fails, for example because its disk is full, a line on the error output
/// says so at once, lines are dropped until the output works again, and the call returns an error when the ranks have
/// ended. Nothing else is printed.
///
/// Ranks have no input: they read the end of a file. [`Launch::inherit_stdin`] gives rank 0 this process's.
///
/// When a rank has failed, the others have 1.5 seconds to end, and are killed then. The error names them. Ranks that
/// are stopped, for example by SIGSTOP, are killed when their group has failed and all others have ended. If this
/// process is killed, its ranks are killed too. `ps` shows ranks by the program's name.
///
/// If this process ignores SIGCHLD, the signal has its default action until the call returns. Otherwise no one could
/// learn how the ranks end. Ranks begin with the default action too.
///
/// A rank cannot launch, whichever launcher started it. Otherwise ranks would launch ranks without end, or each rank of
/// a launcher's job would launch a whole job on the same machine. So ask [`is_rank`] first:
///
/// ```no_run
/// # fn main() -> gemmesh::Result<()> {
/// if !gemmesh::launch::is_rank() {
///     return gemmesh::launch::launch(4);
/// }
/// let group = gemmesh::Group::<gemmesh::Host>::from_env()?;
/// # drop(group); Ok(()) }
/// ```
///
/// # Errors
/// - [`Kind::RankFailed`] if a rank fails. It names the rank at fault, how it ended, and the cause if the ranks know
///   it. If the group has failed, this is the rank that the group blames, although others may have ended before it, and
///   although its process may have ended without an error. Otherwise it is the first rank that failed.
/// - [`Kind::Misuse`] if this process is a rank; [`Kind::Environment`] or [`Kind::EnvironmentValue`] if it is a
///   rank whose variables are incomplete or wrong.
/// - [`Kind::Limit`] unless there are 1 to 64 ranks.
/// - [`Kind::System`] if the system refuses something, or if all ranks have succeeded but not all that they printed
///   could be written. It then names the output and says how many bytes are missing.
#[track_caller]
pub fn launch(world: usize) -> Result<()> {
    Launch::new(world).run()
}

/// Builder for [`launch`]: arguments, variables and input of the ranks.
///
/// ```no_run
/// # fn main() -> gemmesh::Result<()> {
/// use gemmesh::launch::{Launch, is_rank};
///
/// if !is_rank() {
///     return Launch::new(4).args(["--verbose"]).env("RUST_BACKTRACE", "1").run();
/// }
/// # Ok(()) }
/// ```
#[must_use = "nothing is started before `run`"]
pub struct Launch {
    world: usize,
    /// The arguments of the ranks. If there are none, this process's.
    args: Option<Vec<OsString>>,
    envs: Vec<(OsString, OsString)>,
    /// The name by which ranks are started. Without it, this process's.
    name: Option<OsString>,
    inherits_stdin: bool,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let args = option("args", self.args.as_ref().map(Vec::len));
        // Values may be secrets.
        let envs = (!self.envs.is_empty()).then(|| format!("envs {}", self.envs.len()));
        let ranks = Some(format!("ranks {}", self.world));
        let stdin = self.inherits_stdin.then(|| "inherit_stdin".into());
        f.write_str("Launch")?;
        write_parts(f, [ranks, args, envs, stdin].into_iter().flatten())
    }
}

impl Launch {
    /// Starts `world` ranks of this program, with this process's arguments and environment, as [`launch`] does.
    pub fn new(world: usize) -> Launch {
        Launch {
            world,
            args: None,
            envs: Vec::new(),
            name: None,
            inherits_stdin: false,
        }
    }

    /// Gives every rank these arguments instead of this process's. Repeated calls append.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Launch {
        let given = self.args.get_or_insert_default();
        given.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to every rank's environment.
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Launch {
        self.envs.push((name.into(), value.into()));
        self
    }

    /// Gives rank 0 this process's standard input, be it a terminal, a pipe or a file. The other ranks still have none.
    ///
    /// This process should not read it meanwhile: what one of them reads, the other does not get.
    pub fn inherit_stdin(mut self) -> Launch {
        self.inherits_stdin = true;
        self
    }

    /// Starts ranks by this name instead of this process's first argument. For languages whose interpreters look by it
    /// for their files.
    #[cfg(feature = "unstable-doors")]
    pub fn name(mut self, name: impl Into<OsString>) -> Launch {
        self.name = Some(name.into());
        self
    }

    /// As [`launch`].
    ///
    /// # Errors
    /// As [`launch`].
    #[track_caller]
    pub fn run(self) -> Result<()> {
        self.run_while(None)
    }

    /// As [`run`](Launch::run), as long as `goes_on` returns true, which is asked every 50 ms. Then the ranks have 1.5
    /// seconds to end, and are killed. For languages whose handlers of signals don't end the process.
    ///
    /// # Errors
    /// As [`launch`].
    #[track_caller]
    pub(crate) fn run_while(self, goes_on: Option<&mut dyn FnMut() -> bool>) -> Result<()> {
        refuse_rank(env::describe_this_process())?;
        let world = limit("the number of ranks", self.world, 1, MAX_WORLD);
        world.map_err(Error::of(None, "launch"))?;
        let address = address::draw().map_err(Error::system(None, "draw a random address"))?;
        let receiver = ReportReceiver::new(&address, self.world)?;
        let mut outputs = RankOutputs::default();
        let ranks = (0..self.world).map(|rank| self.start(rank, &address, &mut outputs));
        let ranks = ranks.collect::<Result<_>>();
        let wait = |ranks| LaunchWait {
            ranks,
            receiver,
            goes_on,
            failure: None,
            stopped_since: None,
            given_up: None,
        };
        let (result, written) = outputs
            .forward_during(|| wait(ranks?).finish())
            .map_err(Error::system(None, "forward what ranks print"))?;
        // If both have failed, the error output has told of the other one.
        result?;
        written.map_err(Error::system(None, "write all that ranks printed"))
    }

    fn start(&self, rank: usize, address: &Address, outputs: &mut RankOutputs) -> Result<Rank> {
        let launcher = rustix::process::getpid();
        let mut own = std::env::args_os();
        let mut command = Command::new(this_program());
        let own_name = own.next();
        if let Some(name) = self.name.as_ref().or(own_name.as_ref()) {
            command.arg0(name);
        }
        let stdin = if rank == 0 && self.inherits_stdin {
            Stdio::inherit()
        } else {
            Stdio::null()
        };
        let args = self.args.clone().unwrap_or_else(|| own.collect());
        command
            .args(args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            .env(env::RANK, rank.to_string())
            .env(env::WORLD_SIZE, self.world.to_string())
            .env(env::ADDRESS, address.reveal())
            .stdin(stdin);
        // SAFETY: between fork and exec only async-signal-safe system calls are made, no allocation.
        unsafe {
            command.pre_exec(move || {
                use rustix::process::{Signal, getppid, set_parent_process_death_signal};
                set_parent_process_death_signal(Some(Signal::KILL))?;
                // The launcher may have died before the line above.
                if getppid() != Some(launcher) {
                    return Err(io::Error::from_raw_os_error(
                        rustix::io::Errno::SRCH.raw_os_error(),
                    ));
                }
                Ok(())
            });
        }
        let process = outputs
            .take(rank, &mut command)
            .and_then(|()| Child::start(&mut command))
            .map_err(Error::not_started(rank, "a process of this program"))?;
        Ok(Rank {
            rank,
            process,
            ended: None,
        })
    }
}

/// This program's file, by the path that it was started from, so that its processes have its name. If a different file
/// is there by now, or none, it is the kernel's link to the file.
fn this_program() -> PathBuf {
    const LINK: &str = "/proc/self/exe";
    let file = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino()));
    let path = std::env::current_exe().ok().filter(|path| {
        let files = file(path).and_then(|there| Ok((there, file(LINK.as_ref())?)));
        files.is_ok_and(|(there, here)| there == here)
    });
    path.unwrap_or_else(|| LINK.into())
}

/// Fails if `this` process is a rank.
fn refuse_rank(this: Result<Option<env::Described>>) -> Result<()> {
    match this? {
        Some(described) => Err(Error::of_kind(already_rank(described.launcher))),
        None => Ok(()),
    }
}

fn already_rank(launcher: &str) -> Kind {
    let what = format!(
        "this process is a rank, started by {launcher}, and cannot launch ranks; if it is a rank, as is_rank() says, call \
         Group::from_env instead"
    );
    Kind::Misuse { what }
}

/// A rank's process, which does not outlive this value.
struct Rank {
    rank: usize,
    process: Child,
    ended: Option<ExitStatus>,
}

impl Rank {
    /// Returns how the process has ended, if it has ended since the last look.
    fn look(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        self.ended = self
            .process
            .look()
            .map_err(Error::system(self.rank, "learn how its process ended"))?;
        Ok(self.ended)
    }

    fn is_stopped(&self) -> bool {
        self.ended.is_none() && self.process.is_stopped()
    }
}

/// The first rank that has not ended, if all ranks that have not ended are stopped.
fn stopped(ranks: &[Rank]) -> Option<usize> {
    let mut running = ranks.iter().filter(|rank| rank.ended.is_none());
    let first = running.clone().next()?;
    running.all(Rank::is_stopped).then_some(first.rank)
}

/// A launcher's wait for its ranks.
struct LaunchWait<'a> {
    ranks: Vec<Rank>,
    receiver: ReportReceiver,
    goes_on: Option<&'a mut dyn FnMut() -> bool>,
    failure: Option<RankFailure>,
    /// Since when all ranks that have not ended are stopped, of a group that has failed.
    stopped_since: Option<Instant>,
    /// When `goes_on` first returned false.
    given_up: Option<Instant>,
}

impl LaunchWait<'_> {
    /// Waits until all ranks have ended, or one has failed and the others have had time to report why, or `goes_on` has
    /// returned false and they have had time to end.
    fn finish(mut self) -> Result<()> {
        loop {
            self.look_for_ends()?;
            // This comes after the look at the ranks, so that the reports of ended ranks are all here.
            self.receiver.read();
            let failure = self.failure.clone().or_else(|| self.hang());
            if self.given_up.is_none() && self.goes_on.as_mut().is_some_and(|goes_on| !goes_on()) {
                self.given_up = Some(Instant::now());
            }
            let ending = failure.as_ref().map(|failure| failure.since);
            let ending = ending.or(self.given_up);
            let left = ending.map(|since| GRACE.saturating_sub(since.elapsed()));
            if self.have_all_ended() || left.is_some_and(|left| left.is_zero()) {
                return self.end(failure);
            }
            self.pause(left)?;
        }
    }

    /// Notes which ranks have ended since the last look.
    fn look_for_ends(&mut self) -> Result<()> {
        for rank in &mut self.ranks {
            let Some(status) = rank.look()? else {
                continue;
            };
            self.receiver.show_end(rank.rank);
            let follows = |first: &RankFailure| first.follows(status);
            if !status.success() && self.failure.as_ref().is_none_or(follows) {
                self.failure = Some(RankFailure {
                    rank: rank.rank,
                    status: Some(status),
                    since: Instant::now(),
                });
            }
        }
        Ok(())
    }

    /// The failure of a stopped rank. Nothing else ends it if its group has failed and the others have ended, in whatever
    /// way.
    fn hang(&mut self) -> Option<RankFailure> {
        let stopped = stopped(&self.ranks).filter(|_| self.has_failed());
        self.stopped_since = stopped.and(self.stopped_since.or_else(|| Some(Instant::now())));
        Some(RankFailure {
            rank: stopped?,
            status: None,
            since: self.stopped_since?,
        })
    }

    /// True if a rank has reported a failure.
    fn has_failed(&self) -> bool {
        !self.receiver.reports().is_empty()
    }

    fn have_all_ended(&self) -> bool {
        self.ranks.iter().all(|rank| rank.ended.is_some())
    }

    /// Waits for an end or a report, at most as long as is `left`.
    fn pause(&self, left: Option<Duration>) -> Result<()> {
        let longest = if self.has_failed() { LOOK } else { PAUSE };
        let pause = match (left, &self.goes_on) {
            (Some(left), _) => left,
            (None, Some(_)) => longest.min(GLANCE),
            (None, None) => longest,
        };
        let running = self.ranks.iter().filter(|rank| rank.ended.is_none());
        let ends = running.map(|rank| PollFd::new(&rank.process, PollFlags::IN));
        let report = PollFd::new(&self.receiver, PollFlags::IN);
        let mut events: Vec<PollFd> = ends.chain([report]).collect();
        poll::poll(&mut events, pause).map_err(Error::system(None, "wait for the ranks"))
    }

    /// Kills the ranks that still run.
    fn end(self, failure: Option<RankFailure>) -> Result<()> {
        // All are killed at once. Each is waited for when it is dropped.
        self.ranks.iter().for_each(|rank| rank.process.kill());
        let ends: Vec<_> = self.ranks.iter().map(|rank| rank.ended).collect();
        failure.map_or(Ok(()), |failure| {
            Err(failure.error(&ends, self.receiver.reports()))
        })
    }
}

/// How a rank failed.
#[derive(Clone)]
struct RankFailure {
    rank: usize,
    /// None if the rank hangs.
    status: Option<ExitStatus>,
    since: Instant,
}

impl RankFailure {
    /// True if a failure that is seen later has caused this one.
    ///
    /// The system closes the connections of a rank that is killed, which ends the other ranks, before it tells of its
    /// death.
    fn follows(&self, status: ExitStatus) -> bool {
        self.status.and_then(|status| status.signal()).is_none()
            && status.signal().is_some()
            && self.since.elapsed() < SETTLED
    }

    /// The error that names the rank at fault: the one that the ranks blame, or else the rank of this failure. `ends`
    /// are by rank. A rank that still runs has none.
    fn error(&self, ends: &[Option<ExitStatus>], reports: &[FailureReport]) -> Error {
        let done = |rank: usize| ends[rank].is_some_and(|status| status.success());
        let blamed = reports.iter().find_map(|report| {
            let error = report.error.as_ref()?;
            let mut at_fault = error.at_fault();
            at_fault.retain(|rank| *rank < ends.len());
            if at_fault.is_empty() {
                at_fault.push(report.by);
            }
            // Of several ranks, one that has failed is the likeliest, then one that still runs, then one that ended
            // without an error.
            let rank = at_fault.into_iter().min_by_key(|&rank| match ends[rank] {
                Some(status) if !status.success() => 0,
                None => 1,
                Some(_) => 2,
            })?;
            // A report is not the cause if both the rank at fault and the reporter ended without an error.
            (!done(rank) || !done(report.rank)).then(|| (rank, error.clone()))
        });
        let (rank, cause) = match blamed {
            Some((rank, error)) => (rank, Some(error)),
            None => (self.rank, None),
        };
        let status = match ends[rank] {
            Some(status) => status.to_string(),
            None => "still running, and killed".into(),
        };
        let killed = (0..ends.len()).filter(|&other| other != rank && ends[other].is_none());
        Kind::RankFailed {
            status,
            cause,
            killed: killed.collect(),
        }
        .on(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(wait_status: i32) -> Option<ExitStatus> {
        Some(ExitStatus::from_raw(wait_status))
    }

    const OK: i32 = 0;
    const ONE: i32 = 1 << 8;
    const KILLED: i32 = 9;

    fn report(rank: usize, error: Error) -> FailureReport {
        let error = Some(error);
        FailureReport { rank, by: 0, error }
    }

    fn left(rank: usize) -> Error {
        Kind::RankLeft {
            waiting: 0,
            what: "barrier()".into(),
        }
        .on(rank)
    }

    /// The rank that the launcher blames if rank 0 was seen to fail first, how it ended, and the cause.
    fn blame(
        ends: &[Option<ExitStatus>],
        reports: &[FailureReport],
    ) -> (usize, String, Option<Error>) {
        let failure = RankFailure {
            rank: 0,
            status: Some(ExitStatus::from_raw(ONE)),
            since: Instant::now(),
        };
        let error = failure.error(ends, reports);
        let Kind::RankFailed { status, cause, .. } = error.kind() else {
            panic!("{error}");
        };
        (error.rank().unwrap(), status.clone(), cause.clone())
    }

    #[test]
    fn the_rank_that_the_group_blames_is_named_however_it_ended() {
        let reports = [report(0, left(1)), report(2, left(1))];
        for (end, words) in [
            (ended(OK), "exit status: 0"),
            (ended(ONE), "exit status: 1"),
            (ended(KILLED), "signal: 9 (SIGKILL)"),
            (None, "still running, and killed"),
        ] {
            let blamed = blame(&[ended(ONE), end, ended(ONE)], &reports);
            assert_eq!(blamed, (1, words.into(), Some(left(1))));
        }
    }

    #[test]
    fn without_a_group_or_if_all_could_live_with_its_failure_the_first_that_fails_is_named() {
        let ends = [ended(ONE), ended(OK), ended(OK)];
        let first = (0, "exit status: 1".to_string(), None);
        assert_eq!(blame(&ends, &[]), first);
        assert_eq!(blame(&ends, &[report(2, left(1))]), first);
    }

    #[test]
    fn of_several_missing_ranks_one_that_failed_is_named() {
        let missing = Error::of_kind(Kind::RanksMissing {
            ranks: vec![1, 2, 3, 70],
            address: "job".into(),
            waited_ms: 1,
            reason: None,
        });
        let ends = [ended(ONE), ended(OK), None, ended(KILLED)];
        let (rank, ..) = blame(&ends, &[report(0, missing.clone())]);
        assert_eq!(rank, 3);
        let (rank, ..) = blame(&ends[..3], &[report(0, missing)]);
        assert_eq!(rank, 2);
    }

    #[test]
    fn an_error_that_names_no_rank_is_that_of_the_rank_that_reported_it() {
        let error = Error::of_kind(Kind::Environment {
            launcher: "torchrun".into(),
            missing: "RANK".into(),
        });
        let error = Some(error);
        let report = FailureReport {
            rank: 0,
            by: 2,
            error,
        };
        let (rank, ..) = blame(&[ended(ONE), ended(ONE), ended(ONE)], &[report]);
        assert_eq!(rank, 2);
    }

    #[test]
    fn a_rank_of_any_launcher_is_refused() {
        use crate::schedule::Hosts;

        let described = env::Described {
            rank: 0,
            world: 1,
            address: Address::of("x"),
            launcher: "torchrun",
            hosts: Hosts::default(),
            meeting: None,
        };
        let refused = refuse_rank(Ok(Some(described))).unwrap_err();
        assert_eq!(refused, Error::of_kind(already_rank("torchrun")));
        assert_eq!(refuse_rank(Ok(None)), Ok(()));
        let incomplete = Error::of_kind(Kind::Environment {
            launcher: "torchrun".into(),
            missing: "LOCAL_RANK".into(),
        });
        assert_eq!(refuse_rank(Err(incomplete.clone())), Err(incomplete));
        let unusable = Error::of_kind(Kind::EnvironmentValue {
            name: "RANK".into(),
            value: "-1".into(),
            reason: String::new(),
        });
        assert_eq!(refuse_rank(Err(unusable.clone())), Err(unusable));
    }
}
