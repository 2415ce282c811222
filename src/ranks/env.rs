//! Who this process is, as its launcher's environment says.

use std::ffi::OsString;
use std::fs;

use crate::error::{Error, Result};

/// A rank as a launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Described {
    pub rank: usize,
    pub world: usize,
    /// The same for all ranks of a job, and no other job's.
    pub address: String,
    /// The launcher's name.
    pub launcher: &'static str,
}

impl Described {
    /// Whether [`super::launch`] has started it.
    pub fn launched(&self) -> bool {
        self.launcher == LAUNCHERS[0].name
    }
}

/// The variables that [`super::launch`] sets.
pub const RANK: &str = "GEMMESH_RANK";
pub const WORLD_SIZE: &str = "GEMMESH_WORLD_SIZE";
pub const ADDRESS: &str = "GEMMESH_ADDRESS";

struct Launcher {
    name: &'static str,
    rank: &'static str,
    world: &'static str,
    /// Variables without which rank and world size may mean something else.
    required: &'static [&'static str],
    /// How many of the ranks run on this host: all must.
    local_world: Option<&'static str>,
    /// Variables that together tell this job from others.
    job: &'static [&'static str],
}

impl Launcher {
    /// The variables that it sets and that are not there.
    fn missing(&self, get: impl Fn(&str) -> Option<OsString>) -> Vec<&'static str> {
        let needed = [self.world]
            .into_iter()
            .chain(self.required.iter().copied());
        needed.filter(|name| get(name).is_none()).collect()
    }
}

/// The innermost first, of those that start one another: mpirun and mpiexec start their agents by srun where Slurm is, so
/// what srun says in the environment of their ranks is about the agent.
const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        name: "gemmesh::launch",
        rank: RANK,
        world: WORLD_SIZE,
        required: &[ADDRESS],
        local_world: None,
        job: &[ADDRESS],
    },
    Launcher {
        name: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        // Without LOCAL_RANK, RANK and WORLD_SIZE are set by others too, and may count nodes.
        required: &["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"],
        local_world: Some("LOCAL_WORLD_SIZE"),
        job: &[
            "MASTER_ADDR",
            "MASTER_PORT",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        ],
    },
    Launcher {
        name: "Open MPI's mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        required: &[],
        local_world: Some("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"],
    },
    Launcher {
        name: "a PMI launcher (mpiexec)",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        required: &[],
        local_world: Some("MPI_LOCALNRANKS"),
        job: &[],
    },
    Launcher {
        name: "srun",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        required: &["SLURM_STEP_ID"],
        local_world: Some("SLURM_STEP_TASKS_PER_NODE"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
];

/// As [`describe`], for this process.
pub fn describe_this_process() -> Result<Described> {
    describe(|name| std::env::var_os(name), parent)
}

/// Whether some launcher has set a rank in the environment of this process.
pub fn has_rank() -> bool {
    recognise(|name| std::env::var_os(name)).is_some()
}

/// All variables that are read, by launcher; some launchers share some.
pub fn variables() -> impl Iterator<Item = &'static str> {
    LAUNCHERS.into_iter().flat_map(|launcher| {
        let own = [launcher.rank, launcher.world];
        let own = own.into_iter().chain(launcher.local_world);
        own.chain(launcher.required.iter().chain(launcher.job).copied())
    })
}

/// Names the parent of this process, which is the launcher's agent on this host: the same for all ranks of a job, and no other
/// job's, be that in another container, or its agent a later process of the same number.
fn parent() -> String {
    let pid = std::os::unix::process::parent_id();
    let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    parent_name(
        pid,
        &String::from_utf8_lossy(&stat),
        &namespace.to_string_lossy(),
    )
}

/// `stat` is what /proc says of the process, `namespace` the one in which `pid` counts. What the system does not tell, it
/// tells none of the ranks.
fn parent_name(pid: u32, stat: &str, namespace: &str) -> String {
    // The name in parentheses may hold anything; the 22nd field of all is the 20th behind it.
    let begun = stat
        .rsplit_once(')')
        .and_then(|(_, fields)| fields.split_whitespace().nth(19))
        .unwrap_or("?");
    format!("{pid}/{begun}/{namespace}")
}

/// Reads the environment through `get`. `parent` names the parent of this process, the launcher's local agent: the same for
/// all ranks of a job where the environment does not name the job.
///
/// # Errors
/// [`Error::Environment`] names what is missing, [`Error::EnvironmentValue`] what can't be used.
pub fn describe(
    get: impl Fn(&str) -> Option<OsString>,
    parent: impl FnOnce() -> String,
) -> Result<Described> {
    let text = |name: &str| match get(name).map(OsString::into_string) {
        None => Ok(None),
        Some(Ok(text)) => Ok(Some(text)),
        Some(Err(bytes)) => Err(Error::EnvironmentValue {
            name: name.into(),
            value: bytes.to_string_lossy().into_owned(),
            reason: "it is not UTF-8".into(),
        }),
    };
    let Some(launcher) = recognise(&get) else {
        return Err(Error::Environment {
            launcher: LAUNCHERS.map(|l| l.name).join(", "),
            missing: LAUNCHERS.map(|l| l.rank).join(", "),
        });
    };
    let missing = launcher.missing(&get);
    if !missing.is_empty() {
        return Err(Error::Environment {
            launcher: launcher.name.into(),
            missing: missing.join(", "),
        });
    }
    let number = |name: &str| {
        let value = text(name)?.unwrap_or_default();
        value.parse::<usize>().map_err(|e| Error::EnvironmentValue {
            name: name.into(),
            value,
            reason: e.to_string(),
        })
    };
    let (rank, world) = (number(launcher.rank)?, number(launcher.world)?);
    if rank >= world {
        return Err(Error::EnvironmentValue {
            name: launcher.rank.into(),
            value: rank.to_string(),
            reason: format!("it must be below {}, which is {world}", launcher.world),
        });
    }
    if let Some(name) = launcher.local_world
        && let Some(value) = text(name)?.filter(|value| value.parse() != Ok(world))
    {
        return Err(Error::EnvironmentValue {
            name: name.into(),
            value,
            reason: format!("all {world} ranks must be on one host"),
        });
    }
    let mut job = Vec::new();
    for name in launcher.job {
        job.extend(text(name)?);
    }
    let address = if job.is_empty() {
        format!("{}/{}", launcher.name, parent())
    } else {
        job.join("/")
    };
    Ok(Described {
        rank,
        world,
        address,
        launcher: launcher.name,
    })
}

/// The launcher that started this process: the innermost that has set all it sets, or else the innermost that has set its
/// rank.
fn recognise(get: impl Fn(&str) -> Option<OsString>) -> Option<&'static Launcher> {
    let present = || LAUNCHERS.iter().filter(|l| get(l.rank).is_some());
    let mut complete = present().filter(|l| l.missing(&get).is_empty());
    let Some(first) = complete.next() else {
        return present().next();
    };
    // srun sets PMI's variables too, and names the job beside them; it does not set the count of mpiexec's local ranks. What
    // ranks say alone would not do: a rank of mpiexec may be called as the srun task is that started mpiexec.
    let says = |l: &Launcher| (get(l.rank), get(l.world));
    let is_pmi = first.job.is_empty() && first.local_world.is_none_or(|name| get(name).is_none());
    let same = complete.find(|l| is_pmi && says(l) == says(first));
    same.or(Some(first))
}

#[cfg(test)]
mod tests {
    use proptest::strategy::Strategy;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Described> {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.into())
        };
        describe(get, || "its parent".into())
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    /// What srun sets for the one task of a step, be it an agent of mpiexec.
    const SRUN: [(&str, &str); 5] = [
        ("SLURM_PROCID", "0"),
        ("SLURM_NTASKS", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "1"),
        ("SLURM_JOB_ID", "9"),
        ("SLURM_STEP_ID", "0"),
    ];
    /// What MPICH's mpiexec sets.
    const HYDRA: [(&str, &str); 4] = [
        ("PMI_RANK", "1"),
        ("PMI_SIZE", "4"),
        ("MPI_LOCALRANKID", "1"),
        ("MPI_LOCALNRANKS", "4"),
    ];
    const OPEN_MPI: [(&str, &str); 5] = [
        ("OMPI_COMM_WORLD_RANK", "1"),
        ("OMPI_COMM_WORLD_SIZE", "4"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ("PMIX_NAMESPACE", "123"),
        ("PMIX_RANK", "1"),
    ];
    /// What srun sets for one of four tasks.
    const SRUN_TASK: [(&str, &str); 4] = [
        ("SLURM_PROCID", "1"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_JOB_ID", "9"),
        ("SLURM_STEP_ID", "2"),
    ];

    /// Rank 1 of 4, started by `launcher` and met at `address`.
    #[track_caller]
    fn assert_described(variables: &[&[(&str, &str)]], launcher: &'static str, address: &str) {
        assert_eq!(
            read(&variables.concat()),
            Ok(Described {
                rank: 1,
                world: 4,
                address: address.into(),
                launcher
            })
        );
    }

    const PMI: &str = "a PMI launcher (mpiexec)";

    #[test]
    fn every_launcher_is_understood() {
        let launched = [(RANK, "1"), (WORLD_SIZE, "4"), (ADDRESS, "x")];
        assert_described(&[&launched], "gemmesh::launch", "x");
        assert_described(&[&TORCHRUN], "torchrun", "127.0.0.1/29500");
        assert_described(&[&OPEN_MPI], "Open MPI's mpirun", "123");
        assert_described(&[&SRUN_TASK], "srun", "9/2");
        assert_described(&[&HYDRA], PMI, "a PMI launcher (mpiexec)/its parent");
    }

    #[test]
    fn the_launcher_that_another_started_is_the_one_that_counts() {
        let address = "a PMI launcher (mpiexec)/its parent";
        assert_described(&[&HYDRA, &SRUN], PMI, address);
        assert_described(&[&SRUN, &HYDRA], PMI, address);
        // In the script that sbatch runs there is a rank, and no step.
        assert_described(&[&HYDRA, &SRUN[..4]], PMI, address);
        assert_described(&[&OPEN_MPI, &SRUN], "Open MPI's mpirun", "123");
        assert_described(&[&TORCHRUN, &SRUN], "torchrun", "127.0.0.1/29500");
        assert_described(&[&TORCHRUN, &SRUN_TASK], "torchrun", "127.0.0.1/29500");
        let launched = [(RANK, "1"), (WORLD_SIZE, "4"), (ADDRESS, "x")];
        assert_described(
            &[&SRUN, &HYDRA, &OPEN_MPI, &TORCHRUN, &launched],
            "gemmesh::launch",
            "x",
        );
    }

    #[test]
    fn all_ranks_of_mpiexec_meet_where_one_is_called_as_the_task_that_started_it() {
        let described = |rank| {
            let own = [
                ("PMI_RANK", rank),
                ("PMI_SIZE", "4"),
                ("MPI_LOCALNRANKS", "4"),
            ];
            // The shell of an allocation of four tasks is a task.
            let shell = [
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "4"),
                ("SLURM_STEP_ID", "0"),
            ];
            read(&[own, shell].concat()).unwrap()
        };
        let (first, second) = (described("0"), described("1"));
        assert_eq!((first.rank, second.rank), (0, 1));
        assert_eq!(first.address, second.address);
    }

    #[test]
    fn what_srun_sets_for_mpi_is_its_own() {
        let pmi2 = [("PMI_RANK", "1"), ("PMI_SIZE", "4"), ("PMI_JOBID", "9.2")];
        assert_described(&[&pmi2, &SRUN_TASK], "srun", "9/2");
        let pmix = [("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "slurm.pmix.9.2")];
        assert_described(&[&pmix, &SRUN_TASK], "srun", "9/2");
    }

    #[test]
    fn variables_that_somebody_else_sets_do_not_hide_a_launcher() {
        let nodes = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")];
        assert_described(&[&nodes, &OPEN_MPI], "Open MPI's mpirun", "123");
        assert_described(&[&nodes, &SRUN_TASK], "srun", "9/2");
    }

    #[test]
    fn parents_of_one_number_are_told_apart() {
        // As /proc shows it, with a name that looks like fields.
        let stat = |begun| {
            let before: Vec<String> = (3..22).map(|field| field.to_string()).collect();
            format!("77 (a) S 1 (b) {} {begun} 23 24\n", before.join(" "))
        };
        let own = parent_name(77, &stat(5000), "pid:[1]");
        assert_eq!(own, "77/5000/pid:[1]");
        assert_ne!(
            own,
            parent_name(77, &stat(5001), "pid:[1]"),
            "it was reused"
        );
        assert_ne!(own, parent_name(77, &stat(5000), "pid:[2]"), "a container");
        assert_eq!(parent_name(77, "", ""), "77/?/");
        assert_eq!(parent_name(77, "77 (cut", ""), "77/?/");
    }

    #[test]
    fn the_parent_of_this_process_is_known_and_remains_the_same() {
        let name = parent();
        assert!(!name.contains('?') && name.contains("/pid:["), "{name}");
        assert_eq!(std::thread::spawn(parent).join().unwrap(), name);
    }

    #[test]
    fn the_error_names_what_is_missing() {
        let nothing = read(&[]).unwrap_err().to_string();
        assert!(nothing.contains("RANK, OMPI_COMM_WORLD_RANK"), "{nothing}");
        let nodes = read(&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")]);
        assert_eq!(
            nodes,
            Err(Error::Environment {
                launcher: "torchrun".into(),
                missing: "LOCAL_RANK, MASTER_PORT".into()
            })
        );
    }

    #[test]
    fn values_that_cannot_be_are_refused() {
        let with = |name, value| {
            let mut variables = TORCHRUN.to_vec();
            variables.retain(|(n, _)| *n != name);
            variables.push((name, value));
            match read(&variables) {
                Err(Error::EnvironmentValue { name, value, .. }) => (name, value),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(with("RANK", "-1"), ("RANK".into(), "-1".into()));
        assert_eq!(with("RANK", "4"), ("RANK".into(), "4".into()));
        assert_eq!(with("WORLD_SIZE", "x"), ("WORLD_SIZE".into(), "x".into()));
        assert_eq!(
            with("LOCAL_WORLD_SIZE", "2"),
            ("LOCAL_WORLD_SIZE".into(), "2".into())
        );
    }

    #[test]
    fn a_value_that_is_no_text_is_refused_not_overlooked() {
        use std::os::unix::ffi::OsStringExt;
        for broken in ["RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"] {
            let get = |name: &str| match name {
                _ if name == broken => Some(OsString::from_vec(b"4\xff".to_vec())),
                "LOCAL_WORLD_SIZE" => Some("4".into()),
                _ => {
                    let found = TORCHRUN.iter().find(|(n, _)| *n == name);
                    found.map(|(_, value)| value.into())
                }
            };
            let error = describe(get, String::new).unwrap_err();
            assert_eq!(
                error,
                Error::EnvironmentValue {
                    name: broken.into(),
                    value: "4\u{fffd}".into(),
                    reason: "it is not UTF-8".into()
                }
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn any_environment_gives_a_rank_below_its_world_or_an_error(
            values in proptest::collection::vec(
                proptest::option::of(proptest::prop_oneof![
                    (0..6_u64).prop_map(|n| n.to_string().into_bytes()),
                    proptest::collection::vec(proptest::num::u8::ANY, 0..24),
                    proptest::strategy::Just(u64::MAX.to_string().into_bytes()),
                ]),
                32,
            )
        ) {
            use std::os::unix::ffi::OsStringExt;
            let names: Vec<&str> = variables().collect();
            let get = |name: &str| {
                let index = names.iter().position(|n| *n == name)?;
                values[index % values.len()].clone().map(OsString::from_vec)
            };
            match describe(get, || "its parent".into()) {
                Ok(described) => {
                    proptest::prop_assert!(described.rank < described.world);
                }
                Err(Error::Environment { .. } | Error::EnvironmentValue { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! The environment that a launcher or somebody else has made.
    use std::collections::HashMap;
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    /// A variable a line; `stat` is what the system tells of the parent.
    pub fn parse(data: &[u8]) {
        let lines = data.split(|&byte| byte == b'\n');
        let pairs = lines.filter_map(|line| {
            let equals = line.iter().position(|&byte| byte == b'=')?;
            Some((&line[..equals], &line[equals + 1..]))
        });
        let variables: HashMap<&[u8], &[u8]> = pairs.collect();
        let get = |name: &str| {
            let value = variables.get(name.as_bytes())?;
            Some(OsString::from_vec(value.to_vec()))
        };
        let stat = variables.get(&b"stat"[..]).copied().unwrap_or_default();
        let stat = String::from_utf8_lossy(stat);
        match describe(get, || parent_name(77, &stat, "pid:[1]")) {
            Ok(described) => assert!(described.rank < described.world),
            Err(error) => drop(error.to_string()),
        }
    }

    /// What each launcher sets.
    pub fn seeds() -> Vec<Vec<u8>> {
        let environments = LAUNCHERS.iter().map(|launcher| {
            let named = launcher.required.iter().chain(launcher.job);
            let others = named.map(|name| format!("{name}=7\n"));
            let local = launcher.local_world.map(|name| format!("{name}=4\n"));
            let ranks = format!("{}=1\n{}=4\n", launcher.rank, launcher.world);
            let lines: String = others.chain(local).collect();
            (ranks + &lines).into_bytes()
        });
        environments.collect()
    }
}
