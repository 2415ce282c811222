//! This process's rank and world size, as its launcher's environment describes them.

mod several;

use std::ffi::OsString;
use std::num::IntErrorKind;

pub use self::several::NamedMeeting;
use self::several::{KEY, hosts, meeting};
use super::address::Address;
use super::secret::Secret;
use super::surroundings::{Surroundings, ThisProcess};
use crate::error::{Error, Kind, Result};
use crate::schedule::Hosts;

/// A rank as a launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    pub rank: usize,
    pub world: usize,
    /// The same for all ranks of a job, and different for other jobs.
    pub address: Address,
    /// The launcher's name.
    pub launcher: &'static str,
    /// Which ranks share a host.
    pub hosts: Hosts,
    /// Where the hosts' leaders meet, if there are several hosts.
    pub meeting: Option<NamedMeeting>,
}

impl Described {
    /// True if [`super::launch`] has started this rank.
    pub fn launched(&self) -> bool {
        self.launcher == LAUNCHERS[0].name
    }
}

/// A secret in an error.
const NOT_SHOWN: &str = "…";

/// The variables that [`super::launch`] sets.
pub const RANK: &str = "GEMMESH_RANK";
pub const WORLD_SIZE: &str = "GEMMESH_WORLD_SIZE";
pub const ADDRESS: &str = "GEMMESH_ADDRESS";

struct Launcher {
    name: &'static str,
    /// A process that has all variables of one of these sets was started by this launcher.
    marks: &'static [&'static [&'static str]],
    /// If none of these variables is set, somebody else may have set the marks. If this list is empty, the marks are
    /// proof.
    sure: &'static [&'static str],
    /// Several variables may hold the rank. The first that is set counts. The same goes for `world`, `required` and
    /// `job`.
    rank: &'static [&'static str],
    world: &'static [&'static str],
    /// Without these variables, rank and world size may mean something else.
    required: &'static [&'static [&'static str]],
    /// The variable that holds the number of ranks on this host. The first that is set counts.
    local_world: &'static [&'static str],
    /// The variable that holds a rank's number on its host. The first that is set counts.
    local_rank: &'static [&'static str],
    /// True if this launcher's ranks may run on several hosts.
    spans_hosts: bool,
    /// The variables that together tell this job from others.
    job: &'static [&'static [&'static str]],
    /// If srun also sets this launcher's variables, for MPI, the variable that tells who has set them. srun does not
    /// set `local_world`.
    imitated: Option<&'static str>,
}

/// The launchers, with inner ones first. In a Slurm job, mpirun and mpiexec start their agents by srun, so srun's
/// variables in the environment of their ranks describe the agent.
const LAUNCHERS: [Launcher; 9] = [
    Launcher {
        name: "gemmesh::launch",
        marks: &[&[RANK]],
        rank: &[RANK],
        world: &[WORLD_SIZE],
        required: &[&[ADDRESS]],
        job: &[&[ADDRESS]],
        ..NONE
    },
    Launcher {
        name: "torchrun",
        marks: &[
            &["TORCHELASTIC_RUN_ID"],
            &["RANK", "LOCAL_RANK"],
            &["RANK", "WORLD_SIZE"],
            &["RANK", "MASTER_ADDR"],
            &["RANK", "MASTER_PORT"],
        ],
        // Programs other than torchrun set RANK and WORLD_SIZE too, and may count nodes. They don't set LOCAL_RANK.
        sure: &["LOCAL_RANK", "TORCHELASTIC_RUN_ID"],
        rank: &["RANK"],
        world: &["WORLD_SIZE"],
        required: &[&["LOCAL_RANK"], &["MASTER_ADDR"], &["MASTER_PORT"]],
        // DeepSpeed's launcher sets the second.
        local_world: &["LOCAL_WORLD_SIZE", "LOCAL_SIZE"],
        local_rank: &["LOCAL_RANK"],
        spans_hosts: true,
        job: &[
            &["MASTER_ADDR"],
            &["MASTER_PORT"],
            &["TORCHELASTIC_RUN_ID"],
            &["TORCHELASTIC_RESTART_COUNT"],
        ],
        ..NONE
    },
    Launcher {
        name: "Open MPI's mpirun",
        marks: &[&["OMPI_COMM_WORLD_RANK"]],
        rank: &["OMPI_COMM_WORLD_RANK"],
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        job: &[&["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"]],
        ..NONE
    },
    Launcher {
        name: "MVAPICH's mpirun_rsh",
        marks: &[&["MV2_COMM_WORLD_RANK"], &["MVP_COMM_WORLD_RANK"]],
        rank: &["MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK"],
        world: &["MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"],
        local_world: &["MV2_COMM_WORLD_LOCAL_SIZE"],
        local_rank: &["MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK"],
        ..NONE
    },
    Launcher {
        name: "a PMI launcher (mpiexec)",
        // With -pmi-port, ranks have to ask for their number and for the number of ranks.
        marks: &[&["PMI_RANK"], &["PMI_ID", "PMI_PORT"]],
        rank: &["PMI_RANK", "PMI_ID"],
        world: &["PMI_SIZE"],
        local_world: &["MPI_LOCALNRANKS"],
        local_rank: &["MPI_LOCALRANKID"],
        imitated: Some("PMI_JOBID"),
        ..NONE
    },
    Launcher {
        name: "PALS' mpiexec",
        marks: &[&["PALS_RANKID"]],
        rank: &["PALS_RANKID"],
        world: &["PMI_SIZE"],
        required: &[&["PALS_APID"]],
        local_world: &["PALS_LOCAL_SIZE"],
        local_rank: &["PALS_LOCAL_RANKID"],
        job: &[&["PALS_APID"]],
        imitated: Some("PALS_APID"),
        ..NONE
    },
    Launcher {
        name: "a PMIx launcher (prterun)",
        marks: &[&["PMIX_RANK", "PMIX_NAMESPACE"]],
        rank: &["PMIX_RANK"],
        // Without Open MPI's variable, only calls of PMIx tell the world size.
        world: &["OMPI_COMM_WORLD_SIZE"],
        job: &[&["PMIX_NAMESPACE"]],
        imitated: Some("PMIX_NAMESPACE"),
        ..NONE
    },
    Launcher {
        name: "Flux",
        marks: &[&["FLUX_TASK_RANK"]],
        rank: &["FLUX_TASK_RANK"],
        world: &["FLUX_JOB_SIZE"],
        required: &[&["FLUX_JOB_ID"]],
        local_rank: &["FLUX_TASK_LOCAL_ID"],
        job: &[&["FLUX_JOB_ID"]],
        ..NONE
    },
    Launcher {
        name: SRUN,
        marks: &[&["SLURM_PROCID"]],
        rank: &["SLURM_PROCID"],
        // The other two hold the job's size if srun preserves the job's environment.
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"],
        required: &[&["SLURM_JOB_ID", "SLURM_JOBID"], STEP],
        local_world: &["SLURM_STEP_TASKS_PER_NODE"],
        local_rank: &["SLURM_LOCALID"],
        spans_hosts: true,
        job: &[&["SLURM_JOB_ID", "SLURM_JOBID"], STEP],
        ..NONE
    },
];

const NONE: Launcher = Launcher {
    name: "",
    marks: &[],
    sure: &[],
    rank: &[],
    world: &[],
    required: &[],
    local_world: &[],
    local_rank: &[],
    spans_hosts: false,
    job: &[],
    imitated: None,
};

const SRUN: &str = "srun";
const STEP: &[&str] = &["SLURM_STEP_ID", "SLURM_STEPID"];
/// The number of the step in which salloc runs a shell, as 32 bits without and with a sign.
const INTERACTIVE_STEP: [&str; 2] = ["4294967290", "-6"];
/// If Kubernetes' PyTorchJob has set one of these, RANK and WORLD_SIZE count its pods.
const COUNTED_PODS: [&str; 2] = ["PET_NNODES", "PET_NODE_RANK"];

impl Launcher {
    /// True if this launcher has started this process as a rank, also if its variables are incomplete or wrong.
    fn has_started(&self, process: &impl Surroundings) -> bool {
        let is_set = |name: &&str| process.variable(name).is_some();
        // srun's own variables may be left from a different step. If they are missing, the imitated ones have to do.
        let srun = &LAUNCHERS[LAUNCHERS.len() - 1];
        let is_known = || srun.missing(process).is_empty() || is_batch_script(process);
        if self.is_of_srun(process) == Some(true) && is_known() {
            return false;
        }
        if !self.is_sure(process) && COUNTED_PODS.iter().any(is_set) {
            return false;
        }
        self.marks.iter().any(|names| names.iter().all(is_set))
    }

    fn is_sure(&self, process: &impl Surroundings) -> bool {
        let mut sure = self.sure.iter();
        self.sure.is_empty() || sure.any(|name| process.variable(name).is_some())
    }

    fn is_local(&self, process: &impl Surroundings) -> bool {
        let mut local = self.local_world.iter();
        local.any(|name| process.variable(name).is_some())
    }

    /// True if srun has set this launcher's variables. `None` if nothing tells.
    fn is_of_srun(&self, process: &impl Surroundings) -> Option<bool> {
        match self.imitated {
            Some(job) if !self.is_local(process) => {
                let job = process.variable(job)?;
                Some(job.to_str().is_some_and(is_step))
            }
            _ => Some(false),
        }
    }

    /// The variables that this launcher sets and that are missing.
    fn missing(&self, process: &impl Surroundings) -> Vec<&'static str> {
        let needed = [self.rank, self.world].into_iter();
        let needed = needed.chain(self.required.iter().copied());
        let missing = needed.filter(|names| first_of(process, names).is_none());
        missing.map(|names| names[0]).collect()
    }

    /// True if `other` may have set the variables of both launchers, because it contradicts neither rank nor world
    /// size.
    fn agrees(&self, process: &impl Surroundings, other: &Launcher) -> bool {
        let value = |names| process.variable(first_of(process, names)?);
        let agrees = |own, others| value(own).is_none_or(|own| Some(own) == value(others));
        let is_srun = other.name == SRUN;
        let is_batch = is_srun && is_batch_script(process);
        let is_told_apart = match self.imitated {
            Some(_) => is_srun && self.is_of_srun(process) == Some(false),
            None => is_batch,
        };
        // The only rank of `other` may be this launcher's agent, and its number is that of rank 0.
        let is_agent = (is_srun || self.imitated.is_none())
            && value(self.world).is_none()
            && (is_batch || value(other.world).is_some_and(|world| world == "1"));
        !is_told_apart
            && !is_agent
            && agrees(self.rank, other.rank)
            && agrees(self.world, other.world)
    }

    /// The variables that differ between this launcher's ranks, or between its jobs.
    fn of_task(&self) -> Vec<&'static str> {
        let names = self.rank.iter().chain(self.world);
        names.chain(self.local_world).copied().collect()
    }
}

/// The first of these variables that is set.
fn first_of(process: &impl Surroundings, names: &[&'static str]) -> Option<&'static str> {
    let mut names = names.iter().copied();
    names.find(|name| process.variable(name).is_some())
}

/// True if `job` is a name that srun gives a step for MPI: 9.0, or slurm.pmix.9.0.
fn is_step(job: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = job.split_once('.');
    job.starts_with("slurm.")
        || numbers.is_some_and(|(job, step)| is_number(job) && is_number(step))
}

/// The process that Slurm started as this step's task on this host, or as the batch script.
fn task(process: &impl Surroundings) -> Option<u32> {
    let number = process.variable("SLURM_TASK_PID")?;
    number.to_str()?.parse().ok()
}

/// True in sbatch's script, which is task 0 but belongs to no step.
///
/// Its environment still has the variables of the process that submitted it, which may have a step's number.
fn is_batch_script(process: &impl Surroundings) -> bool {
    let is_batch = process
        .variable("ENVIRONMENT")
        .is_some_and(|of| of == "BATCH");
    is_batch && first_of(process, STEP).is_none()
        || process.is_in_batch_step()
        || task(process).is_some_and(|task| process.runs_batch_script(task))
}

/// True if a user works in this step of Slurm, or started this process there: `srun --pty bash`, salloc's shell, or a
/// notebook's terminal.
///
/// Such a step has one task. srun gives its tasks no terminal except by --pty. The tasks of steps that are started in
/// such a shell inherit the variables of --pty.
fn is_interactive(process: &impl Surroundings) -> bool {
    let text = |names: &[&'static str]| process.variable(first_of(process, names)?);
    if text(STEP).is_some_and(|step| INTERACTIVE_STEP.iter().any(|&number| step == number)) {
        return true;
    }
    let is_pty = || match (text(&["SLURM_PTY_PORT"]), task(process)) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(_), Some(task)) => process.has_terminal(Some(task)) != Some(false),
    };
    let is_alone = text(LAUNCHERS[LAUNCHERS.len() - 1].world).is_some_and(|world| world == "1");
    is_alone && (process.has_terminal(None) == Some(true) || is_pty())
}

/// [`describe`], for this process.
pub fn describe_this_process() -> Result<Option<Described>> {
    describe(&ThisProcess)
}

/// True if a launcher has started this process as a rank.
pub fn has_rank() -> bool {
    recognise(&ThisProcess).is_some()
}

/// The error that no launcher has started this process as a rank.
pub fn no_launcher() -> Error {
    if std::env::var_os("SLURM_PROCID").is_some() {
        return Error::of_kind(Kind::Environment {
            launcher: SRUN.into(),
            missing:
                "a rank's variables (those here are a batch script's or an interactive shell's)"
                    .into(),
        });
    }
    Error::of_kind(Kind::Environment { launcher: "a launcher".into(), missing: "the rank's variables, such as RANK and LOCAL_RANK of torchrun, OMPI_COMM_WORLD_RANK of mpirun \
                  or SLURM_PROCID of srun"
            .into() })
}

/// All variables that are read, by launcher. Launchers share some of them.
pub fn variables() -> impl Iterator<Item = &'static str> {
    LAUNCHERS.into_iter().flat_map(|launcher| {
        let sets = launcher.marks.iter().chain(launcher.required);
        let sets = sets.chain(launcher.job).copied().flatten().copied();
        let sets = sets.chain(launcher.local_rank.iter().copied());
        sets.chain(launcher.of_task())
    })
}

/// Describes `process` as its launcher does. `None` if no launcher has started it as a rank.
///
/// # Errors
/// [`Kind::Environment`] names missing variables, and [`Kind::EnvironmentValue`] a value that cannot be used.
pub fn describe(process: &impl Surroundings) -> Result<Option<Described>> {
    let Some(launcher) = recognise(process) else {
        return Ok(None);
    };
    let missing = launcher.missing(process);
    if !missing.is_empty() {
        return Err(Error::of_kind(Kind::Environment {
            launcher: launcher.name.into(),
            missing: missing.join(", "),
        }));
    }
    let (rank_name, rank) = number(process, launcher.rank)?;
    let (world_name, world) = number(process, launcher.world)?;
    if rank >= world {
        return Err(Error::of_kind(Kind::EnvironmentValue {
            name: rank_name.into(),
            value: rank.to_string(),
            reason: format!("it must be below {world_name}, which is {world}"),
        }));
    }
    let hosts = hosts(process, launcher, rank, world)?;
    let address = address(process, launcher)?;
    let meeting = match hosts.count() {
        1 => None,
        _ => Some(meeting(process, launcher, &address)?),
    };
    Ok(Some(Described {
        rank,
        world,
        address,
        launcher: launcher.name,
        hosts,
        meeting,
    }))
}

/// The address at which the ranks of this process's job meet.
fn address(process: &impl Surroundings, launcher: &Launcher) -> Result<Address> {
    if let [[ADDRESS]] = launcher.job {
        let secret = secret(process, ADDRESS)?;
        return Ok(Address::of_secret(&secret.unwrap_or_default()));
    }
    let mut job = Vec::new();
    for names in launcher.job {
        if let Some(name) = first_of(process, names) {
            job.extend(text(process, name)?);
        }
    }
    let address = if job.is_empty() {
        format!("{}/{}", launcher.name, process.agent(&launcher.of_task()))
    } else {
        job.join("/")
    };
    Ok(Address::of(&address))
}

/// True if the value of the variable is a secret, which no text shows.
pub fn is_secret(name: &str) -> bool {
    [KEY, ADDRESS].contains(&name)
}

/// A variable that [`is_secret`].
fn secret(process: &impl Surroundings, name: &str) -> Result<Option<Secret<String>>> {
    Ok(text(process, name)?.map(Secret::new))
}

/// A variable. The error does not show a secret.
fn text(process: &impl Surroundings, name: &str) -> Result<Option<String>> {
    match process.variable(name).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text)),
        Some(Err(bytes)) => Err(Error::of_kind(Kind::EnvironmentValue {
            name: name.into(),
            value: if is_secret(name) {
                NOT_SHOWN.into()
            } else {
                bytes.to_string_lossy().into_owned()
            },
            reason: "it is not UTF-8".into(),
        })),
    }
}

/// The first of these variables that is set, and its number.
fn number(process: &impl Surroundings, names: &[&'static str]) -> Result<(&'static str, usize)> {
    let name = first_of(process, names).unwrap_or(names[0]);
    let value = text(process, name)?.unwrap_or_default();
    match value.parse() {
        Ok(number) => Ok((name, number)),
        Err(error) => Err(Error::of_kind(Kind::EnvironmentValue {
            name: name.into(),
            reason: match std::num::ParseIntError::kind(&error) {
                IntErrorKind::PosOverflow => "it is too large".into(),
                _ => "it must be a number, 0 or more".into(),
            },
            value,
        })),
    }
}

/// The launcher that started this process as a rank: the innermost one.
///
/// If its variables are incomplete, or srun may have set them, a different launcher that contradicts neither rank nor
/// world size may be the one. That launcher then set the variables of both, for programs that only know the first.
fn recognise(process: &impl Surroundings) -> Option<&'static Launcher> {
    let started = || LAUNCHERS.iter().filter(|l| l.has_started(process));
    let sure = started().find(|l| l.is_sure(process));
    let inner = sure.or(started().next())?;
    let is_complete = |l: &Launcher| l.missing(process).is_empty();
    let agreeing = || {
        let outer = started().skip_while(|l| l.name != inner.name).skip(1);
        outer.filter(|l| is_complete(l) && inner.agrees(process, l))
    };
    let is_known = match inner.imitated {
        None => is_complete(inner),
        Some(_) => inner.is_local(process),
    };
    let launcher = if is_known {
        inner
    } else {
        agreeing()
            .find(|l| l.imitated.is_none())
            .or(agreeing().next())
            .unwrap_or(inner)
    };
    let is_rank = launcher.name != SRUN || !is_interactive(process) && !is_batch_script(process);
    is_rank.then_some(launcher)
}

#[cfg(test)]
#[path = "recorded.rs"]
mod recorded;

#[cfg(fuzzing)]
pub mod fuzzing {
    //! The environment that a launcher or a different program has made.
    use std::collections::HashMap;
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::ranks::surroundings::parse_stat;

    struct Lines<'a>(HashMap<&'a [u8], &'a [u8]>);

    impl Surroundings for Lines<'_> {
        fn variable(&self, name: &str) -> Option<OsString> {
            let value = self.0.get(name.as_bytes())?;
            Some(OsString::from_vec(value.to_vec()))
        }

        fn agent(&self, _task: &[&str]) -> String {
            "its agent".into()
        }

        fn has_terminal(&self, pid: Option<u32>) -> Option<bool> {
            Some(pid? % 2 == 1)
        }

        fn is_in_batch_step(&self) -> bool {
            self.0.contains_key(&b"batch"[..])
        }

        fn runs_batch_script(&self, pid: u32) -> bool {
            pid % 3 == 0
        }
    }

    /// One variable in each line. `stat` is what the system tells of a process.
    pub fn parse(data: &[u8]) {
        let lines = data.split(|&byte| byte == b'\n');
        let pairs = lines.filter_map(|line| {
            let equals = line.iter().position(|&byte| byte == b'=')?;
            Some((&line[..equals], &line[equals + 1..]))
        });
        let process = Lines(pairs.collect());
        let stat = process.variable("stat").unwrap_or_default();
        parse_stat(&stat.to_string_lossy());
        match describe(&process) {
            Ok(described) => assert!(described.is_none_or(|this| this.rank < this.world)),
            Err(error) => drop(error.to_string()),
        }
    }

    /// The variables that each launcher sets.
    pub fn seeds() -> Vec<Vec<u8>> {
        let environments = LAUNCHERS.iter().map(|launcher| {
            let named = launcher.required.iter().chain(launcher.job);
            let others = named.map(|names| format!("{}=7\n", names[0]));
            let local = launcher.local_world.first();
            let local = local.map(|name| format!("{name}=4\n"));
            let ranks = format!("{}=1\n{}=4\n", launcher.rank[0], launcher.world[0]);
            let lines: String = others.chain(local).collect();
            (ranks + &lines).into_bytes()
        });
        environments.collect()
    }
}
