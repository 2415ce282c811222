//! Who this process is, as its launcher's environment says.

use crate::error::{Error, Result};

/// A rank as a launcher describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Described {
    pub rank: usize,
    pub world: usize,
    /// The same for all ranks of a job, and no other job's.
    pub address: String,
}

/// The variables that [`super::launch`] sets.
pub(super) const RANK: &str = "GEMMESH_RANK";
pub(super) const WORLD_SIZE: &str = "GEMMESH_WORLD_SIZE";
pub(super) const ADDRESS: &str = "GEMMESH_ADDRESS";

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

/// In the order in which they are looked for. A launcher is recognised by its rank.
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
        name: "srun",
        rank: "SLURM_PROCID",
        world: "SLURM_NTASKS",
        required: &["SLURM_STEP_ID"],
        local_world: Some("SLURM_STEP_TASKS_PER_NODE"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    Launcher {
        name: "a PMI launcher (mpiexec)",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        required: &[],
        local_world: Some("MPI_LOCALNRANKS"),
        job: &[],
    },
];

/// As [`describe`], for this process.
pub(super) fn describe_this_process() -> Result<Described> {
    let get = |name: &str| std::env::var(name).ok();
    describe(get, std::os::unix::process::parent_id())
}

/// Reads the environment through `get`. `parent` is the parent's process id: the launcher's local agent, the
/// same for all ranks of a job where the environment does not name the job.
///
/// # Errors
/// [`Error::Environment`] names what is missing, [`Error::EnvironmentValue`] what can't be used.
fn describe(get: impl Fn(&str) -> Option<String>, parent: u32) -> Result<Described> {
    let Some(launcher) = LAUNCHERS.iter().find(|l| get(l.rank).is_some()) else {
        return Err(Error::Environment {
            launcher: LAUNCHERS.map(|l| l.name).join(", "),
            missing: LAUNCHERS.map(|l| l.rank).join(", "),
        });
    };
    let missing: Vec<&str> = [launcher.world]
        .iter()
        .chain(launcher.required)
        .copied()
        .filter(|name| get(name).is_none())
        .collect();
    if !missing.is_empty() {
        return Err(Error::Environment {
            launcher: launcher.name.into(),
            missing: missing.join(", "),
        });
    }
    let number = |name: &str| {
        let value = get(name).unwrap_or_default();
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
    if let Some((name, value)) = launcher
        .local_world
        .and_then(|name| get(name).map(|value| (name, value)))
        .filter(|(_, value)| value.parse() != Ok(world))
    {
        return Err(Error::EnvironmentValue {
            name: name.into(),
            value,
            reason: format!("all {world} ranks must be on one host"),
        });
    }
    let job: Vec<String> = launcher.job.iter().filter_map(|name| get(name)).collect();
    let address = if job.is_empty() {
        format!("{}/{parent}", launcher.name)
    } else {
        job.join("/")
    };
    Ok(Described {
        rank,
        world,
        address,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Described> {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| v.to_string())
        };
        describe(get, 77)
    }

    const TORCHRUN: [(&str, &str); 5] = [
        ("RANK", "1"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn every_launcher_is_understood() {
        let (rank, world) = (1, 4);
        let cases: [(&[(&str, &str)], &str); 5] = [
            (&[(RANK, "1"), (WORLD_SIZE, "4"), (ADDRESS, "x")], "x"),
            (&TORCHRUN, "127.0.0.1/29500"),
            (
                &[
                    ("OMPI_COMM_WORLD_RANK", "1"),
                    ("OMPI_COMM_WORLD_SIZE", "4"),
                    ("PMIX_NAMESPACE", "123"),
                ],
                "123",
            ),
            (
                &[
                    ("SLURM_PROCID", "1"),
                    ("SLURM_NTASKS", "4"),
                    ("SLURM_JOB_ID", "9"),
                    ("SLURM_STEP_ID", "0"),
                ],
                "9/0",
            ),
            (
                &[("PMI_RANK", "1"), ("PMI_SIZE", "4")],
                "a PMI launcher (mpiexec)/77",
            ),
        ];
        for (variables, address) in cases {
            let address = address.to_string();
            assert_eq!(
                read(variables),
                Ok(Described {
                    rank,
                    world,
                    address
                })
            );
        }
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
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! The environment that a launcher or somebody else has made.
    use std::collections::HashMap;

    use super::*;

    /// A variable a line.
    pub fn parse(data: &[u8]) {
        let text = String::from_utf8_lossy(data);
        let variables: HashMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once('='))
            .collect();
        let get = |name: &str| variables.get(name).map(ToString::to_string);
        match describe(get, 77) {
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
