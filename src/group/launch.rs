//! Starting ranks as processes of this program.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{PollFd, PollFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{env, wire};
use crate::error::{Error, Result};
use crate::protocol::plan::MAX_WORLD;

/// How long the other ranks have to report their own view of a failure before they are killed.
const GRACE: Duration = Duration::from_millis(1500);
/// How much later than a rank that fails on its account the death of a rank may be seen.
const SETTLED: Duration = Duration::from_millis(200);
/// Nothing but an end wakes the launcher, so the pause between looks can be long.
const PAUSE: Duration = Duration::from_secs(3600);

/// Whether a launcher, [`launch`] or any that [`Group::from_env`](crate::Group::from_env) knows, has started
/// this process as a rank, be it one that can't be: then `from_env` says why.
pub fn is_rank() -> bool {
    !matches!(env::describe_this_process(), Err(Error::Environment { .. }))
}

/// Starts this program again, `world` times, with this process's arguments; each is a rank that
/// [`Group::from_env`](crate::Group::from_env) recognises. They write where this process writes.
/// Returns when all have ended.
///
/// A rank cannot launch, whoever started it: the ranks would launch ranks in turn, without end, or each rank of another
/// launcher's job a whole job on the same machine. So ask [`is_rank`] first:
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
/// [`Error::RankFailed`] for the first rank that fails; the others are killed. If this process is killed,
/// its ranks are too. [`Error::AlreadyRank`] if this process is a rank, or [`Error::EnvironmentValue`] if it is one that can't
/// be; [`Error::Limit`] unless there are 1 to 64 ranks.
pub fn launch(world: usize) -> Result<()> {
    Launch::new(world).args(std::env::args_os().skip(1)).run()
}

/// A launch with other arguments or variables than this process's own.
#[derive(Debug)]
pub struct Launch {
    world: usize,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
}

impl Launch {
    /// `world` ranks of this program, with no arguments.
    pub fn new(world: usize) -> Launch {
        Launch {
            world,
            args: Vec::new(),
            envs: Vec::new(),
        }
    }

    /// Adds arguments for every rank.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<OsString>>) -> Launch {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to every rank's environment.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Launch {
        self.envs.push((name.into(), value.into()));
        self
    }

    /// As [`launch`].
    ///
    /// # Errors
    /// As [`launch`].
    pub fn run(self) -> Result<()> {
        refuse_rank(env::describe_this_process())?;
        if !(1..=MAX_WORLD).contains(&self.world) {
            return Err(Error::Limit {
                what: "world size".into(),
                value: self.world,
                min: 1,
                max: MAX_WORLD,
            });
        }
        let address = unique_address();
        let ranks = (0..self.world).map(|rank| self.start(rank, &address));
        wait(ranks.collect::<Result<_>>()?)
    }

    fn start(&self, rank: usize, address: &str) -> Result<Rank> {
        let launcher = rustix::process::getpid();
        // Not current_exe(): the program's file may have been replaced meanwhile.
        let mut command = Command::new("/proc/self/exe");
        command
            .args(&self.args)
            .envs(self.envs.iter().map(|(name, value)| (name, value)))
            .env(env::RANK, rank.to_string())
            .env(env::WORLD_SIZE, self.world.to_string())
            .env(env::ADDRESS, address)
            .stdin(Stdio::null());
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
        let mut process = command
            .spawn()
            .map_err(Error::system(rank, "start a process of this program"))?;
        match pidfd_open(Pid::from_child(&process), PidfdFlags::empty()) {
            Ok(end) => Ok(Rank {
                rank,
                process,
                end,
                ended: None,
            }),
            Err(error) => {
                // Fails if it has ended already.
                let _ = process.kill();
                let _ = process.wait();
                Err(Error::system(rank, "watch its process")(error.into()))
            }
        }
    }
}

/// Fails if `this` process is a rank.
fn refuse_rank(this: Result<env::Described>) -> Result<()> {
    match this {
        Ok(described) => Err(Error::AlreadyRank {
            launcher: described.launcher.into(),
        }),
        Err(Error::Environment { .. }) => Ok(()),
        Err(unusable) => Err(unusable),
    }
}

/// A name that no other launch has.
pub(super) fn unique_address() -> String {
    static LAUNCHES: AtomicU32 = AtomicU32::new(0);
    let launch = LAUNCHES.fetch_add(1, Ordering::Relaxed);
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos();
    format!("{time:x}.{launch}/{}", std::process::id())
}

/// A process, which does not outlive this value.
struct Rank {
    rank: usize,
    process: Child,
    /// Readable once the process has ended.
    end: OwnedFd,
    ended: Option<ExitStatus>,
}

impl Rank {
    /// Looks whether it has ended, and says how if it had not at the last look.
    fn look(&mut self) -> Result<Option<ExitStatus>> {
        if self.ended.is_some() {
            return Ok(None);
        }
        self.ended = self
            .process
            .try_wait()
            .map_err(Error::system(self.rank, "wait for its process"))?;
        Ok(self.ended)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.ended.is_none() {
            // Fails if it has ended meanwhile.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
}

/// Waits until all have ended, or one has failed and the others have had time to say what they know of it.
fn wait(mut ranks: Vec<Rank>) -> Result<()> {
    let mut failure: Option<Failure> = None;
    loop {
        for rank in &mut ranks {
            let Some(status) = rank.look()?.filter(|status| !status.success()) else {
                continue;
            };
            if failure.as_ref().is_none_or(|first| first.follows(status)) {
                failure = Some(Failure {
                    rank: rank.rank,
                    status,
                    since: Instant::now(),
                });
            }
        }
        let left = failure.as_ref().map_or(PAUSE, |failure| {
            GRACE.saturating_sub(failure.since.elapsed())
        });
        let running = ranks.iter().filter(|rank| rank.ended.is_none());
        let mut ends: Vec<PollFd> = running
            .map(|rank| PollFd::new(&rank.end, PollFlags::IN))
            .collect();
        if ends.is_empty() || left.is_zero() {
            drop(ranks);
            return failure.map_or(Ok(()), |failure| {
                Err(Error::RankFailed {
                    rank: failure.rank,
                    status: failure.status.to_string(),
                })
            });
        }
        wire::poll(&mut ends, left).map_err(Error::system(None, "wait for the ranks"))?;
    }
}

/// How a rank failed.
struct Failure {
    rank: usize,
    status: ExitStatus,
    since: Instant,
}

impl Failure {
    /// Whether it comes of a failure that is seen later. The system closes the connections of a rank that is killed, which
    /// ends the others, before it tells of its death.
    fn follows(&self, status: ExitStatus) -> bool {
        self.status.signal().is_none()
            && status.signal().is_some()
            && self.since.elapsed() < SETTLED
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_any_launcher_is_refused() {
        let described = env::Described {
            rank: 0,
            world: 1,
            address: "x".into(),
            launcher: "torchrun",
        };
        let refused = refuse_rank(Ok(described)).unwrap_err();
        assert_eq!(
            refused,
            Error::AlreadyRank {
                launcher: "torchrun".into()
            }
        );
        let nobody = Error::Environment {
            launcher: String::new(),
            missing: String::new(),
        };
        assert_eq!(refuse_rank(Err(nobody)), Ok(()));
        let unusable = Error::EnvironmentValue {
            name: "RANK".into(),
            value: "-1".into(),
            reason: String::new(),
        };
        assert_eq!(refuse_rank(Err(unusable.clone())), Err(unusable));
    }
}
