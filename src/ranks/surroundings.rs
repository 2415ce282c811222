//! What the system tells of this process and its ancestors, besides environment variables.

use std::ffi::OsString;
use std::fs;

use crate::profile::span::namespace_offset;

/// The surroundings of a process, by which launchers are recognised.
pub trait Surroundings {
    /// An environment variable.
    fn variable(&self, name: &str) -> Option<OsString>;

    /// A name of the launcher's agent on this host. It is the same for all ranks of a job, and no other job has it.
    ///
    /// `task` are the variables by which the launcher tells its ranks apart.
    fn agent(&self, task: &[&str]) -> String;

    /// True if process `pid`, or this one, has a terminal. `None` if that can't be known.
    fn has_terminal(&self, pid: Option<u32>) -> Option<bool>;

    /// True if Slurm counts this process to a batch script.
    fn is_in_batch_step(&self) -> bool;

    /// True if process `pid` is one of sbatch's scripts.
    fn runs_batch_script(&self, pid: u32) -> bool;
}

/// The surroundings of this process.
pub struct ThisProcess;

impl Surroundings for ThisProcess {
    fn variable(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    fn agent(&self, task: &[&str]) -> String {
        let values = |name: &&str| Some((name.to_string(), std::env::var_os(name)?));
        agent(&task.iter().filter_map(values).collect::<Vec<_>>())
    }

    fn has_terminal(&self, pid: Option<u32>) -> Option<bool> {
        let pid = pid.unwrap_or(std::process::id());
        Some(Stat::of(pid)?.terminal != 0)
    }

    fn is_in_batch_step(&self) -> bool {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        groups.contains("/step_batch")
    }

    fn runs_batch_script(&self, pid: u32) -> bool {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_batch_script(&command)
    }
}

/// True if a command is Slurm's copy of a script, as slurmd starts it: a shell with `…/job00042/slurm_script`.
fn is_batch_script(command: &[u8]) -> bool {
    let mut words = command.split(|&byte| byte == 0);
    words.any(|word| {
        let mut folders = word.rsplit(|&byte| byte == b'/');
        folders.next() == Some(b"slurm_script")
            && folders.next().is_some_and(|job| job.starts_with(b"job"))
    })
}

/// Programs that start ranks on their host. If a rank of a different job has started one, it has that rank's variables,
/// which may be equal to those of one of its own ranks.
const AGENTS: [&str; 3] = ["hydra_pmi_proxy", "pmi_proxy", "mpispawn"];
/// More ancestors than a rank has.
const MOST_ANCESTORS: usize = 1000;

/// The name of the nearest ancestor that does not belong to this rank.
///
/// Processes between the agent and a rank, such as a profiler or a shell, have the rank's variables. An ancestor that
/// cannot be read, such as one of a different user, counts as one of these.
///
/// If no ancestor is the agent, it is the name of the parent.
fn agent(task: &[(String, OsString)]) -> String {
    let parent = std::os::unix::process::parent_id();
    let mut pid = parent;
    for _ in 0..MOST_ANCESTORS {
        let Some(stat) = Stat::of(pid) else {
            break;
        };
        if AGENTS.contains(&&*stat.name) || is_other_task(pid, task) {
            return name(pid, Some(stat));
        }
        pid = stat.parent;
    }
    name(parent, Stat::of(parent))
}

/// True if process `pid` was started with different values of these variables.
fn is_other_task(pid: u32, task: &[(String, OsString)]) -> bool {
    use std::os::unix::ffi::OsStrExt;
    let Ok(environment) = fs::read(format!("/proc/{pid}/environ")) else {
        return false;
    };
    let has = |(name, value): &(String, OsString)| {
        let lines = environment.split(|&byte| byte == 0);
        let mut values = lines.filter_map(|line| {
            line.strip_prefix(name.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
        });
        values.any(|found| found == value.as_bytes())
    };
    // A process that is ending has no environment any more.
    !environment.is_empty() && !task.iter().all(has)
}

/// A name that tells a process from others, also in other containers, and from later ones with the same number.
///
/// What the system does not tell this rank, it tells none of the ranks.
fn name(pid: u32, stat: Option<Stat>) -> String {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let offset = namespace_offset("boottime");
    let begun = stat.map_or("?".into(), |stat| begun(stat.begun, offset).to_string());
    format!("{pid}/{begun}/{}", namespace.to_string_lossy())
}

/// The tick at which a process began, as processes in all time namespaces compute it, if this one's shows `shown`.
///
/// This process's time namespace sets the clock forward by `offset` nanoseconds. The system rounds the sum of both, so
/// the result may be a tick off if the offset is no whole number of ticks. The offset is whole seconds, unless a
/// process was restored from a checkpoint. Then all ranks were, and all are off by the same.
fn begun(shown: i64, offset: i64) -> i64 {
    // A tick is 10 ms on all of Linux's processors, whatever its timer does.
    const TICK: i64 = 10_000_000;
    shown.wrapping_sub(offset.div_euclid(TICK))
}

/// The fields of a process in /proc.
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    name: String,
    parent: u32,
    /// The terminal's number, or 0.
    terminal: i64,
    /// When the process began, in ticks since the machine began, in the reader's time namespace.
    begun: i64,
}

impl Stat {
    fn of(pid: u32) -> Option<Stat> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        Stat::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Option<Stat> {
        // The name in parentheses may hold anything. The state after it is the third field.
        let (before, fields) = text.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        let field = |number: usize| fields.split_whitespace().nth(number - 3);
        Some(Stat {
            name: name.into(),
            parent: field(4)?.parse().ok()?,
            terminal: field(7)?.parse().ok()?,
            begun: field(22)?.parse().ok()?,
        })
    }
}

#[cfg(fuzzing)]
pub fn parse_stat(text: &str) {
    drop(Stat::parse(text));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_whatever_its_name() {
        // A line as /proc shows it, with a name that looks like fields.
        let fields: Vec<String> = (4..=30).map(|field| field.to_string()).collect();
        let text = format!("77 (a) S 1 (b) S {}\n", fields.join(" "));
        let stat = Stat {
            name: "a) S 1 (b".into(),
            parent: 4,
            terminal: 7,
            begun: 22,
        };
        assert_eq!(Stat::parse(&text), Some(stat));
        for cut in ["", "77 (cut", "77 (cut) S 1", "77) S 1 2 3 4"] {
            assert_eq!(Stat::parse(cut), None, "{cut}");
        }
    }

    #[test]
    fn a_batch_script_is_known_by_where_slurm_puts_it() {
        assert!(is_batch_script(
            b"/bin/bash\0-l\0/var/spool/slurmd/job00042/slurm_script\0x\0"
        ));
        assert!(is_batch_script(b"/spool/vm/job123456/slurm_script\0"));
        for other in [
            &b""[..],
            b"bash\0slurm_script\0",
            b"bash\0./slurm_script\0",
            b"job1/slurm_script/x",
        ] {
            assert!(!is_batch_script(other));
        }
    }

    #[test]
    fn processes_of_one_number_are_told_apart() {
        let begun = |begun| {
            name(
                77,
                Some(Stat {
                    name: String::new(),
                    parent: 1,
                    terminal: 0,
                    begun,
                }),
            )
        };
        let shown = 5000 + namespace_offset("boottime") / 10_000_000;
        assert!(begun(shown).starts_with("77/5000/pid:["));
        assert_ne!(begun(shown), begun(shown + 1), "it was reused");
        assert!(name(77, None).starts_with("77/?/pid:["));
    }

    #[test]
    fn a_process_has_begun_at_one_time_in_all_time_namespaces() {
        const SECOND: i64 = 1_000_000_000;
        for (shown, offset) in [(77, 0), (10_000_077, 100_000 * SECOND), (-23, -SECOND)] {
            assert_eq!(begun(shown, offset), 77);
        }
    }

    #[test]
    fn the_agent_is_the_nearest_ancestor_that_is_not_of_the_rank() {
        let parent = std::os::unix::process::parent_id();
        // No one has this variable, so the parent does not belong to the rank.
        let rank = [("GEMMESH_TEST_RANK".to_string(), "1".into())];
        assert_eq!(agent(&rank), name(parent, Stat::of(parent)));
        assert_eq!(
            std::thread::spawn(move || agent(&rank)).join().unwrap(),
            agent(&[("X".into(), "1".into())])
        );
        // Every ancestor belongs to the rank. No agent is found, and the parent stands for it.
        assert_eq!(agent(&[]), name(parent, Stat::of(parent)));
    }

    #[test]
    fn who_can_tell_no_variables_is_no_agent() {
        assert!(!is_other_task(u32::MAX, &[("X".into(), "1".into())]));
    }
}
