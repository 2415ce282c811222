//! Recorded environments of launchers, their shells and other programs, and what is read from them.

use std::ffi::OsString;

use proptest::strategy::Strategy;

use super::*;
use crate::error::{Class, Error, Kind};
use crate::ranks::meeting::Key;
use crate::ranks::naming::JobRank;

/// The surroundings of a process in a test.
#[derive(Default)]
struct Recorded {
    variables: Vec<(String, OsString)>,
    /// True if it has a terminal.
    terminal: bool,
    /// True if the task of its step has a terminal. None if that task cannot be seen.
    task_terminal: Option<bool>,
    batch_step: bool,
    /// True if that task is a batch script.
    batch_task: bool,
}

impl Surroundings for Recorded {
    fn variable(&self, name: &str) -> Option<OsString> {
        let mut variables = self.variables.iter();
        Some(variables.find(|(n, _)| n == name)?.1.clone())
    }

    fn agent(&self, task: &[&str]) -> String {
        let set = task.iter().filter(|name| self.variable(name).is_some());
        format!(
            "whoever has no {}",
            set.copied().collect::<Vec<_>>().join(", ")
        )
    }

    fn has_terminal(&self, pid: Option<u32>) -> Option<bool> {
        match pid {
            None => Some(self.terminal),
            Some(_) => self.task_terminal,
        }
    }

    fn is_in_batch_step(&self) -> bool {
        self.batch_step
    }

    fn runs_batch_script(&self, _pid: u32) -> bool {
        self.batch_task
    }
}

/// A process with these variables, one `NAME=value` in each word. The first of a name counts.
fn process(variables: &[&str]) -> Recorded {
    let words = variables.iter().flat_map(|part| part.split_whitespace());
    Recorded {
        variables: words
            .filter_map(|word| word.split_once('='))
            .map(|(name, value)| (name.into(), value.into()))
            .collect(),
        ..Recorded::default()
    }
}

/// `variables` without those of these names.
fn without(variables: &str, names: &[&str]) -> String {
    let words = variables.split_whitespace();
    let kept = words.filter(|word| {
        !names
            .iter()
            .any(|name| word.split('=').next() == Some(*name))
    });
    kept.collect::<Vec<_>>().join(" ")
}

/// The same variables for rank 0.
fn first(variables: &str) -> String {
    let ranks = ["RANK=1", "RANKID=1", "PMI_ID=1"];
    let words = variables.split_whitespace().map(|word| {
        if ranks.iter().any(|rank| word.ends_with(rank)) {
            word.replace("=1", "=0")
        } else {
            word.into()
        }
    });
    words.collect::<Vec<String>>().join(" ")
}

const LAUNCHED: &str = "GEMMESH_RANK=1 GEMMESH_WORLD_SIZE=2 GEMMESH_ADDRESS=x";

/// torchrun --standalone --nproc-per-node 2
const TORCHRUN: &str = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_RANK=1
    ROLE_WORLD_SIZE=2 ROLE_NAME=default MASTER_ADDR=localhost MASTER_PORT=36713 TORCHELASTIC_RUN_ID=5f0c
    TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_USE_AGENT_STORE=True";
/// DeepSpeed's launcher, with two processes on one host.
const DEEPSPEED: &str =
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_RANK=0 CROSS_SIZE=1 MASTER_ADDR=127.0.0.1
    MASTER_PORT=29500";
/// A pod of Kubernetes' PyTorchJob with two pods, without and with the variables that it sets for torchrun.
const OLD_POD: &str =
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PYTHONUNBUFFERED=1";
const POD: &str =
    "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456 PET_NODE_RANK=1 PET_NNODES=2
    PET_NPROC_PER_NODE=auto PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456";
/// Open MPI 4.1's mpirun -n 2
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
    OMPI_COMM_WORLD_NODE_RANK=1 OMPI_UNIVERSE_SIZE=2 OMPI_MCA_ess_base_jobid=1601437697 OMPI_MCA_ess_base_vpid=1
    OMPI_MCA_orte_ess_num_procs=2 PMIX_RANK=1 PMIX_NAMESPACE=1601437697 PMIX_ID=1601437697.1 PMIX_HOSTNAME=vm";
/// Open MPI 5's.
const OPEN_MPI_5: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=prterun-vm-4711@1";
/// prterun, for a program that does not use Open MPI.
const PRTERUN: &str = "PMIX_RANK=1 PMIX_NAMESPACE=prterun-vm-4711@1 PMIX_HOSTNAME=vm";
/// MPICH 4.0's mpiexec -n 2, and with -pmi-port.
const HYDRA: &str =
    "PMI_RANK=1 PMI_SIZE=2 PMI_FD=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=7
    GFORTRAN_UNBUFFERED_PRECONNECTED=y MPIR_CVAR_CH3_INTERFACE_HOSTNAME=vm";
const HYDRA_PORT: &str =
    "PMI_ID=1 PMI_PORT=vm:33781 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 HYDI_CONTROL_FD=7";
const MVAPICH: &str = "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2
    PMI_ID=1 PMI_PORT=vm:40001";
const MVAPICH_3: &str = "MVP_COMM_WORLD_RANK=1 MVP_COMM_WORLD_SIZE=2 MVP_COMM_WORLD_LOCAL_RANK=1";
const PALS: &str = "PALS_RANKID=1 PALS_LOCAL_RANKID=1 PALS_APID=6d7e PALS_NODEID=0 PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1
    PMI_LOCAL_SIZE=2 PMI_CONTROL_PORT=20196";
const FLUX: &str = "FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=1 FLUX_JOB_ID=f23 PMI_RANK=1 PMI_SIZE=2
    PMI_FD=20";

/// Slurm 22.05: srun -n 2
const SRUN_TASK: &str = "SLURM_GTIDS=0,1 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 SLURM_LOCALID=1
    SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_SRUN_COMM_HOST=127.0.0.1 SLURM_SRUN_COMM_PORT=39015 SLURM_STEPID=0
    SLURM_STEP_ID=0 SLURM_STEP_LAUNCHER_PORT=39015 SLURM_STEP_NODELIST=vm SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=2
    SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2 SLURM_TASK_PID=14857";
/// The additional variables of --mpi=pmi2, --mpi=pmix and Cray's plugin.
const PMI2: &str = "PMI_FD=13 PMI_JOBID=9.0 PMI_RANK=1 PMI_SIZE=2";
const PMIX: &str = "PMIX_NAMESPACE=slurm.pmix.9.0 PMIX_RANK=1 PMIX_HOSTNAME=vm PMIX_SERVER_TMPDIR=/tmp/slurm/spool/pmix.9.0/";
const CRAY: &str = "PMI_JOBID=9.0 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2 PMI_RANK=1 PMI_SIZE=2 PALS_APID=9.0 PALS_RANKID=1 PALS_LOCAL_RANKID=1
    PALS_NODEID=0";
/// srun -n 1
const ONE_TASK: &str = "SLURM_GTIDS=0 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LOCALID=0 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=vm SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURM_TASK_PID=15007";
/// The additional variables of srun --pty.
const PTY: &str = "SLURM_PTY_PORT=40721 SLURM_PTY_WIN_COL=80 SLURM_PTY_WIN_ROW=24";
/// salloc -n 2: its shell, and its shell as a step (use_interactive_step).
const SALLOC: &str =
    "SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_TASKS_PER_NODE=2";
const INTERACTIVE: &str = "SLURM_GTIDS=0 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0
    SLURM_PTY_PORT=44427 SLURM_STEPID=4294967290 SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=vm SLURM_STEP_NUM_NODES=1
    SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=2 SLURM_TASK_PID=15087";
/// The script of sbatch -n 2, submitted outside of a job, and submitted in a step of one task.
const BATCH: &str = "ENVIRONMENT=BATCH SLURM_GTIDS=0 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_NTASKS=2
    SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2 SLURM_TASK_PID=15922";
const BATCH_OF_STEP: &str = "ENVIRONMENT=BATCH SLURM_GTIDS=0 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1
    SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1
    SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=2 SLURM_TASK_PID=16054";
/// srun -E -n 1 in an allocation of two tasks. The job's variables keep the job's values.
const PRESERVED: &str = "SLURM_GTIDS=0 SLURM_JOBID=9 SLURM_JOB_ID=9 SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0
    SLURM_STEPID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=2 SLURM_TASK_PID=16342";

/// The environments of Slurm in which launchers run their agents.
const AGENTS: [&str; 4] = [ONE_TASK, INTERACTIVE, BATCH, BATCH_OF_STEP];

const PMI: &str = "a PMI launcher (mpiexec)";
const OF_PMI: &str = "a PMI launcher (mpiexec)/whoever has no PMI_RANK, PMI_SIZE, MPI_LOCALNRANKS";

/// Checks that the process is rank 1 of 2, started by `launcher`, with `address`.
#[track_caller]
fn assert_described(variables: &[&str], launcher: &'static str, address: &str) {
    let described = describe(&process(variables)).unwrap().unwrap();
    let expected = Described {
        rank: 1,
        world: 2,
        address: match launcher {
            "gemmesh::launch" => Address::of_secret(&Secret::new(address.into())),
            _ => Address::of(address),
        },
        launcher,
        hosts: Hosts::default(),
        meeting: None,
    };
    assert_eq!(described, expected);
}

/// Checks that the process is a rank and that these variables are missing.
#[track_caller]
fn assert_missing(variables: &[&str], launcher: &str, missing: &str) {
    let process = process(variables);
    assert!(recognise(&process).is_some());
    let expected = Error::of_kind(Kind::Environment {
        launcher: launcher.into(),
        missing: missing.into(),
    });
    assert_eq!(describe(&process), Err(expected));
}

#[track_caller]
fn assert_no_rank(process: &Recorded) {
    assert_eq!(describe(process), Ok(None));
}

#[test]
fn every_launcher_is_understood() {
    assert_described(&[LAUNCHED], "gemmesh::launch", "x");
    assert_described(&[TORCHRUN], "torchrun", "localhost/36713/5f0c/0");
    assert_described(&[DEEPSPEED], "torchrun", "127.0.0.1/29500");
    assert_described(&[OPEN_MPI], "Open MPI's mpirun", "1601437697");
    assert_described(&[OPEN_MPI_5], "Open MPI's mpirun", "prterun-vm-4711@1");
    assert_described(&[HYDRA], PMI, OF_PMI);
    let agent = "MVAPICH's mpirun_rsh/whoever has no ";
    let address =
        format!("{agent}MV2_COMM_WORLD_RANK, MV2_COMM_WORLD_SIZE, MV2_COMM_WORLD_LOCAL_SIZE");
    assert_described(&[MVAPICH], "MVAPICH's mpirun_rsh", &address);
    let address = format!("{agent}MVP_COMM_WORLD_RANK, MVP_COMM_WORLD_SIZE");
    assert_described(&[MVAPICH_3], "MVAPICH's mpirun_rsh", &address);
    assert_described(&[PALS], "PALS' mpiexec", "6d7e");
    assert_described(&[FLUX], "Flux", "f23");
    assert_described(&[SRUN_TASK], "srun", "9/0");
}

/// torchrun --nnodes 2 --nproc-per-node 2, on the second node.
const TORCHRUN_2: &str =
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2
    MASTER_ADDR=node1 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=5f0c TORCHELASTIC_RESTART_COUNT=0";
/// DeepSpeed's launcher, with two processes on each of two hosts: the first of the second host.
const DEEPSPEED_2: &str = "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_SIZE=2 CROSS_RANK=1 CROSS_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=29500";
/// srun -N 2 -n 4, on the second node.
const SRUN_2: &str = "SLURM_JOB_ID=9 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_NTASKS=4
    SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=node[1-2] MASTER_ADDR=fd00::1";
const SECRET: &str = "GEMMESH_KEY=0123456789abcdef";

#[test]
fn ranks_of_several_hosts_are_told_apart_if_they_have_a_key() {
    let described = |variables: &[&str]| describe(&process(variables)).unwrap().unwrap();
    let hosts = |names: &[u8]| Hosts::of(names).unwrap();
    let by_torchrun = described(&[TORCHRUN_2, SECRET]);
    assert_eq!(by_torchrun.hosts, hosts(b"aabb"));
    let address = "node1/29500/5f0c/0";
    assert_eq!(
        (by_torchrun.rank, by_torchrun.address.reveal()),
        (3, address)
    );
    let key = Key::of("0123456789abcdef", address);
    let (name, port) = ("node1".into(), 29501);
    let meeting = NamedMeeting { name, port, key };
    assert_eq!(by_torchrun.meeting, Some(meeting));
    let by_srun = described(&[SRUN_2, SECRET, "GEMMESH_PORT=7000"]);
    assert_eq!(by_srun.hosts, hosts(b"aabb"));
    let meeting = by_srun.meeting.unwrap();
    assert_eq!((meeting.name.as_str(), meeting.port), ("fd00::1", 7000));
    let cyclic = [
        "SLURM_DISTRIBUTION=cyclic",
        SRUN_2,
        SECRET,
        "GEMMESH_PORT=7000",
    ];
    assert_eq!(described(&cyclic).hosts, hosts(b"abab"));
    let by_deepspeed = described(&[DEEPSPEED_2, SECRET]);
    assert_eq!((by_deepspeed.rank, by_deepspeed.hosts), (2, hosts(b"aabb")));
    assert_eq!(by_deepspeed.meeting.unwrap().port, 29501);
    // One host needs no key, and takes no port.
    let alone = described(&[TORCHRUN, SECRET, "GEMMESH_PORT=none"]);
    assert_eq!((alone.hosts, alone.meeting), (Hosts::default(), None));
}

#[test]
fn a_rank_that_is_not_on_rank_0s_host_by_its_own_numbers_says_so() {
    let unknown = without(DEEPSPEED_2, &["LOCAL_SIZE"]);
    let srun = without(SRUN_2, &["SLURM_STEP_TASKS_PER_NODE"]);
    let flux = FLUX.replace("RANK=1", "RANK=3").replace("SIZE=2", "SIZE=4");
    let one_host = "all 4 ranks must be on one host";
    let cases: [(&[&str], &str, &str); 5] = [
        (
            &[&unknown, SECRET],
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE must be set",
        ),
        (&[&srun], "SLURM_LOCALID", one_host),
        (
            &[&srun, SECRET],
            "SLURM_LOCALID",
            "SLURM_STEP_TASKS_PER_NODE must be set",
        ),
        (&[&flux], "FLUX_TASK_LOCAL_ID", one_host),
        (
            &[&MVAPICH_3.replace(
                "RANK=1 MVP_COMM_WORLD_SIZE=2",
                "RANK=3 MVP_COMM_WORLD_SIZE=4",
            )],
            "MVP_COMM_WORLD_LOCAL_RANK",
            one_host,
        ),
    ];
    for (variables, name, words) in cases {
        let error = describe(&process(variables)).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("environment variable {name} is ")),
            "{error}"
        );
        assert!(error.contains(" is not on rank 0's host"), "{error}");
        assert!(error.contains(words), "{error}");
    }
    // The ranks of rank 0's host, too, do not wait for others that have given up.
    let first = unknown.replace("RANK=2", "RANK=0");
    let missing = "LOCAL_WORLD_SIZE (or unset GEMMESH_KEY, if all ranks are on one host)";
    assert_missing(&[&first, SECRET], "torchrun", missing);
    // Without a key all ranks may be on one host, where each sees one GPU, its number 0.
    for numbers in [&first, &unknown] {
        let alone = describe(&process(&[numbers])).unwrap().unwrap();
        assert_eq!(alone.hosts, Hosts::default());
    }
}

#[test]
fn what_several_hosts_lack_is_named() {
    let error = |variables: &[&str]| describe(&process(variables)).unwrap_err().to_string();
    let cases: [(&[&str], &str); 9] = [
        (
            &[TORCHRUN_2],
            "all 4 ranks must be on one host, unless GEMMESH_KEY is set",
        ),
        (&["GEMMESH_KEY=short", TORCHRUN_2], "16 characters or more"),
        (
            &["LOCAL_RANK=0", TORCHRUN_2, SECRET],
            "rank 3 must be the rank 1 of its host",
        ),
        (
            &["LOCAL_WORLD_SIZE=3", TORCHRUN_2, SECRET],
            "as many of the 4 ranks as the others",
        ),
        (
            &["MASTER_PORT=65535", TORCHRUN_2, SECRET],
            "\"65535\": rank 0 cannot listen at the port after it",
        ),
        (&["GEMMESH_PORT=x", TORCHRUN_2, SECRET], "GEMMESH_PORT"),
        (
            &["SLURM_STEP_TASKS_PER_NODE=3,1", SRUN_2, SECRET],
            "as many of the 4 ranks as the others",
        ),
        (&[SRUN_2, SECRET], "GEMMESH_PORT"),
        (&[&without(SRUN_2, &["MASTER_ADDR"]), SECRET], "MASTER_ADDR"),
    ];
    for (variables, words) in cases {
        let error = error(variables);
        assert!(error.contains(words), "{error}");
        assert!(!error.contains("short"), "{error}");
    }
    let mpi = OPEN_MPI.replace("LOCAL_SIZE=2", "LOCAL_SIZE=1");
    assert!(error(&[&mpi, SECRET]).contains("all 2 ranks must be on one host"));
}

/// All that can be read of a process with `variables`, of which one is `name=secret`.
fn texts(variables: &[&str], name: &str, secret: &[u8]) -> [String; 3] {
    use std::os::unix::ffi::OsStringExt;

    let mut process = process(variables);
    let secret = OsString::from_vec(secret.to_vec());
    process.variables.insert(0, (name.into(), secret));
    let described = describe(&process);
    let words = match &described {
        Ok(described) => {
            let job = described.as_ref().map(JobRank::of);
            serde_json::to_string(&job).unwrap()
        }
        Err(error) => format!("{error} {error:#}"),
    };
    [format!("{described:?}"), format!("{described:#?}"), words]
}

#[test]
fn no_text_shows_a_secret() {
    // All of them have this piece.
    const PIECE: &str = "sesame";
    let secrets: [&[u8]; 6] = [
        b"sesame",
        b"open-sesame-of-16-characters",
        b"sesame\xff\xfe-which-is-not-UTF-8",
        "sesame 🗝🗝🗝🗝".as_bytes(),
        b"drawn:sesame",
        b"drawn:0123456789abcdef0123456789sesame",
    ];
    let jobs: [&[&str]; 7] = [
        &[TORCHRUN_2],
        &[SRUN_2],
        &["GEMMESH_PORT=7000", SRUN_2],
        &["GEMMESH_PORT=x", TORCHRUN_2],
        &["LOCAL_RANK=0", TORCHRUN_2],
        &[LAUNCHED],
        &["GEMMESH_RANK=3", LAUNCHED],
    ];
    for (secret, job) in secrets
        .iter()
        .flat_map(|s| jobs.iter().map(move |job| (s, job)))
    {
        for name in ["GEMMESH_KEY", "GEMMESH_ADDRESS"] {
            assert!(is_secret(name));
            for text in texts(job, name, secret) {
                assert!(!text.contains(PIECE), "{name}: {text}");
            }
        }
    }
    let drawn = crate::ranks::address::draw().unwrap();
    let text = drawn.reveal();
    for shown in texts(&[LAUNCHED], "GEMMESH_ADDRESS", text.as_bytes()) {
        assert!(!shown.contains(&text[6..14]), "{shown}");
    }
}

#[test]
fn a_key_has_sixteen_characters_of_which_four_differ() {
    let found = |key: &str| match describe(&process_with_key(key)) {
        Ok(described) => described.map(|_| String::new()),
        Err(error) => Some(error.to_string()),
    };
    let words = "16 characters or more, 4 of them different";
    for (key, counted) in [
        ("", "it has 0 characters, 0 of them different"),
        ("🗝🔑🔐🔒", "it has 4 characters, 4 of them different"),
        ("0123456789abcde", "it has 15 characters"),
        (
            "aaaaaaaaaaaaaaaaaaaaaaaa",
            "24 characters, 1 of them different",
        ),
        ("0110100110010110", "16 characters, 2 of them different"),
    ] {
        let error = found(key).unwrap();
        assert!(error.contains(words) && error.contains(counted), "{error}");
        assert!(error.contains("openssl rand -hex 16"), "{error}");
    }
    for key in [
        "0123456789abcdef",
        "ключ от шести дверей",
        "3141592653589793",
    ] {
        assert_eq!(found(key), Some(String::new()));
    }
}

fn process_with_key(key: &str) -> Recorded {
    let mut process = process(&[TORCHRUN_2]);
    process.variables.push(("GEMMESH_KEY".into(), key.into()));
    process
}

#[test]
fn the_launcher_that_another_started_is_the_one_that_counts() {
    let jobs = "1601437697";
    // mpiexec starts each of its agents by srun as the one task of a step. srun gives its own ranks PMI's variables.
    for of_slurm in [ONE_TASK, SRUN_TASK, BATCH, INTERACTIVE, SALLOC] {
        assert_described(&[HYDRA, of_slurm], PMI, OF_PMI);
        assert_described(&[HYDRA, PMI2, of_slurm], PMI, OF_PMI);
        assert_described(&[OPEN_MPI, of_slurm], "Open MPI's mpirun", jobs);
        assert_described(&[OPEN_MPI, PMIX, of_slurm], "Open MPI's mpirun", jobs);
        assert_described(&[TORCHRUN, of_slurm], "torchrun", "localhost/36713/5f0c/0");
        assert_described(&[FLUX, of_slurm], "Flux", "f23");
    }
    let outer = [ONE_TASK, HYDRA, OPEN_MPI, TORCHRUN];
    assert_described(&[&[LAUNCHED], &outer[..]].concat(), "gemmesh::launch", "x");
    assert_described(&[TORCHRUN, OPEN_MPI], "torchrun", "localhost/36713/5f0c/0");
}

#[test]
fn all_ranks_of_mpiexec_meet_where_one_is_called_as_the_task_that_started_it() {
    let described = |rank: &str| {
        let own = format!("PMI_RANK={rank} PMI_SIZE=2 MPI_LOCALNRANKS=2");
        // The shell of an allocation of two tasks is a task.
        let shell = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_JOB_ID=9";
        describe(&process(&[&own, shell])).unwrap().unwrap()
    };
    let (first, second) = (described("0"), described("1"));
    assert_eq!((first.rank, second.rank), (0, 1));
    assert_eq!(first.address, second.address);
}

#[test]
fn what_srun_sets_for_mpi_is_its_own() {
    for of_mpi in [PMI2, PMIX, CRAY] {
        assert_described(&[of_mpi, SRUN_TASK], "srun", "9/0");
        let alone = first(of_mpi).replace("SIZE=2", "SIZE=1");
        assert_no_rank(&process(&[&alone, PTY, ONE_TASK]));
        // A variable that is left from a different step.
        let left = describe(&process(&[of_mpi, ONE_TASK])).unwrap().unwrap();
        assert_eq!((left.rank, left.world, left.launcher), (0, 1, "srun"));
    }
    // A container may have only these variables, and only some of srun's own.
    let agent = format!("{PMI}/whoever has no PMI_RANK, PMI_SIZE");
    assert_described(&[PMI2], PMI, &agent);
    assert_described(&[PMI2, "SLURM_PROCID=1"], PMI, &agent);
}

#[test]
fn what_flux_sets_for_mpi_is_its_own() {
    let of_mpi = "PMIX_RANK=1 PMIX_NAMESPACE=f23";
    assert_described(&[of_mpi, FLUX], "Flux", "f23");
    let alone = first(FLUX).replace("SIZE=2", "SIZE=1");
    let alone = without(&alone, &["PMI_RANK", "PMI_SIZE"]);
    let alone = describe(&process(&[&first(of_mpi), &alone]))
        .unwrap()
        .unwrap();
    assert_eq!((alone.rank, alone.world, alone.launcher), (0, 1, "Flux"));
}

#[test]
fn a_rank_of_srun_is_one_whatever_tells_the_number_of_tasks() {
    let counts = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"];
    for there in counts {
        let others: Vec<&str> = counts.into_iter().filter(|name| *name != there).collect();
        assert_described(&[&without(SRUN_TASK, &others)], "srun", "9/0");
    }
    assert_missing(
        &[&without(SRUN_TASK, &counts)],
        "srun",
        "SLURM_STEP_NUM_TASKS",
    );
    let old = without(SRUN_TASK, &["SLURM_STEP_ID", "SLURM_JOB_ID"]);
    assert_described(&[&old], "srun", "9/0");
    // A container may have too few of them.
    assert_missing(
        &["SLURM_PROCID=0 SLURM_NTASKS=2"],
        "srun",
        "SLURM_JOB_ID, SLURM_STEP_ID",
    );
    let alone = describe(&process(&[PRESERVED])).unwrap().unwrap();
    assert_eq!((alone.rank, alone.world), (0, 1), "of two in the job");
    let alone = describe(&process(&[ONE_TASK])).unwrap().unwrap();
    assert_eq!((alone.rank, alone.world), (0, 1));
}

#[test]
fn a_shell_of_slurm_is_no_rank() {
    assert_no_rank(&process(&[SALLOC]));
    assert_no_rank(&process(&[INTERACTIVE]));
    let signed = INTERACTIVE.replace("4294967290", "-6");
    assert_no_rank(&process(&[&signed]));
    assert_no_rank(&process(&[PTY, ONE_TASK]));
    // A notebook's server is a task without a terminal. It gives its users' programs one.
    let terminal = true;
    assert_no_rank(&Recorded {
        terminal,
        ..process(&[ONE_TASK])
    });
    // A process without a terminal, in the background of a shell, still belongs to the shell.
    let task_terminal = Some(true);
    assert_no_rank(&Recorded {
        task_terminal,
        ..process(&[PTY, ONE_TASK])
    });
}

#[test]
fn a_step_that_a_shell_of_slurm_starts_has_ranks() {
    assert_described(&[PTY, SRUN_TASK], "srun", "9/0");
    assert_described(&["SLURM_PTY_PORT=44427", SRUN_TASK], "srun", "9/0");
    let task_terminal = Some(false);
    let alone = Recorded {
        task_terminal,
        ..process(&[PTY, ONE_TASK])
    };
    let alone = describe(&alone).unwrap().unwrap();
    assert_eq!((alone.rank, alone.world), (0, 1));
    // Each rank has a debugger in a window of its own.
    let terminal = true;
    let debugged = Recorded {
        terminal,
        ..process(&[SRUN_TASK])
    };
    assert_eq!(describe(&debugged).unwrap().unwrap().world, 2);
}

#[test]
fn a_batch_script_is_no_rank_and_what_it_starts_by_srun_is() {
    assert_no_rank(&process(&[BATCH]));
    // Variables from the place where the script was submitted: a shell, a terminal's shell, a notebook's server.
    assert_no_rank(&process(&[BATCH, PTY, ONE_TASK]));
    assert_no_rank(&process(&[BATCH, INTERACTIVE]));
    let batch_step = true;
    assert_no_rank(&Recorded {
        batch_step,
        ..process(&[BATCH_OF_STEP])
    });
    assert_described(&["ENVIRONMENT=BATCH", SRUN_TASK], "srun", "9/0");
    let task_terminal = Some(false);
    let alone = Recorded {
        task_terminal,
        ..process(&["ENVIRONMENT=BATCH", PTY, ONE_TASK])
    };
    let alone = describe(&alone).unwrap().unwrap();
    assert_eq!((alone.rank, alone.world), (0, 1));
}

#[test]
fn a_batch_script_that_a_step_of_one_task_has_submitted_is_no_rank() {
    for of_mpi in ["", PMI2, PMIX, CRAY] {
        let left = first(of_mpi).replace("SIZE=2", "SIZE=1");
        assert_no_rank(&process(&[&left, BATCH]));
        // Slurm may use no control groups, and its task may be hidden.
        for (batch_step, batch_task) in [(false, true), (true, false)] {
            assert_no_rank(&Recorded {
                batch_step,
                batch_task,
                task_terminal: Some(false),
                ..process(&[&left, BATCH, PTY, ONE_TASK])
            });
            assert_no_rank(&Recorded {
                batch_step,
                batch_task,
                ..process(&[&left, BATCH_OF_STEP])
            });
        }
    }
}

#[test]
fn a_rank_of_torchrun_is_one_though_variables_are_missing() {
    for name in ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"] {
        assert_missing(&[&without(TORCHRUN, &[name])], "torchrun", name);
        // The agent is the one task of a step. The rank is not.
        assert_missing(
            &[
                &without(TORCHRUN, &[name]),
                &ONE_TASK.replace("PROCID=0", "PROCID=5"),
            ],
            "torchrun",
            name,
        );
        for of_slurm in AGENTS {
            let first = without(&first(TORCHRUN), &[name]);
            assert_missing(&[&first, of_slurm], "torchrun", name);
        }
        let alone = OPEN_MPI.replace("SIZE=2", "SIZE=1");
        let first = without(&first(TORCHRUN), &[name]);
        assert_missing(
            &[&first, &alone.replace("RANK=1", "RANK=0")],
            "torchrun",
            name,
        );
    }
    let elastic = ["TORCHELASTIC_RUN_ID", "LOCAL_RANK"];
    assert_missing(&[&without(TORCHRUN, &elastic)], "torchrun", "LOCAL_RANK");
    assert_missing(
        &[&without(DEEPSPEED, &["LOCAL_RANK"])],
        "torchrun",
        "LOCAL_RANK",
    );
    assert_missing(
        &["RANK=0 WORLD_SIZE=2"],
        "torchrun",
        "LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    );
}

#[test]
fn ranks_of_every_launcher_are_ranks_though_the_size_is_missing() {
    for (variables, size, launcher) in [
        (LAUNCHED, "GEMMESH_WORLD_SIZE", "gemmesh::launch"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
        (HYDRA, "PMI_SIZE", PMI),
        (HYDRA_PORT, "PMI_SIZE", PMI),
        (PRTERUN, "OMPI_COMM_WORLD_SIZE", "a PMIx launcher (prterun)"),
        (MVAPICH, "MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun_rsh"),
    ] {
        assert_missing(&[&without(variables, &[size])], launcher, size);
        // It does not become the only task of the launcher's step either.
        for variables in [variables, &first(variables)] {
            for of_slurm in AGENTS {
                assert_missing(&[&without(variables, &[size]), of_slurm], launcher, size);
                let shell = [&without(variables, &[size]), PTY, of_slurm];
                assert_missing(&shell, launcher, size);
            }
        }
    }
    // A shell is no rank either if a script runs it that a task of two has submitted.
    let script = BATCH_OF_STEP.replace("TASKS=1", "TASKS=2");
    for (variables, launcher) in [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI's mpirun")] {
        let batch_step = true;
        let rank = without(&first(variables), &["MASTER_PORT", "OMPI_COMM_WORLD_SIZE"]);
        let rank = Recorded {
            batch_step,
            ..process(&[&rank, &script])
        };
        let described = describe(&rank);
        let error = described.unwrap_err();
        let Kind::Environment {
            launcher: named, ..
        } = error.kind()
        else {
            panic!("{error}");
        };
        assert_eq!(named, launcher);
    }
    let nothing_else = without(&first(HYDRA_PORT), &["MPI_LOCALNRANKS"]);
    assert_missing(&[&nothing_else, ONE_TASK], PMI, "PMI_SIZE");
    // It does not become one of the ranks of the step either, in whose only shell it runs.
    for (variables, size, launcher) in [
        (HYDRA, "PMI_SIZE", PMI),
        (PRTERUN, "OMPI_COMM_WORLD_SIZE", "a PMIx launcher (prterun)"),
    ] {
        assert_missing(&[&without(variables, &[size]), SRUN_TASK], launcher, size);
    }
}

#[test]
fn variables_of_one_launcher_that_another_sets_do_not_hide_it() {
    // Scripts that srun or mpirun starts set torch's variables, often not all.
    let exported = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 MASTER_ADDR=vm";
    assert_described(&[exported, SRUN_TASK], "srun", "9/0");
    assert_described(&[exported, OPEN_MPI], "Open MPI's mpirun", "1601437697");
    // These count nodes.
    let nodes = "RANK=0 WORLD_SIZE=2 MASTER_ADDR=h";
    assert_described(&[nodes, OPEN_MPI], "Open MPI's mpirun", "1601437697");
    assert_described(&[nodes, SRUN_TASK], "srun", "9/0");
}

#[test]
fn pods_of_kubernetes_are_no_ranks() {
    assert_no_rank(&process(&[POD]));
    assert_described(&[TORCHRUN, POD], "torchrun", "localhost/36713/5f0c/0");
    // Nothing tells these from ranks, so the user has to.
    assert_missing(&[OLD_POD], "torchrun", "LOCAL_RANK");
}

#[test]
fn without_a_launcher_there_is_no_rank() {
    assert_no_rank(&process(&[]));
    // Anybody may set these.
    assert_no_rank(&process(&["RANK=3 LOCAL_RANK=1"].map(|own| &own[..6])));
    assert_no_rank(&process(&[
        "LOCAL_RANK=0 ENVIRONMENT=production MASTER_ADDR=h",
    ]));
    let nothing = no_launcher().to_string();
    assert!(
        nothing.contains("such as RANK and LOCAL_RANK of torchrun"),
        "{nothing}"
    );
}

#[test]
fn values_that_cannot_be_are_refused() {
    let with = |name: &str, value: &str| {
        let own = format!("{name}={value}");
        let error = describe(&process(&[&own, TORCHRUN])).unwrap_err();
        match error.kind() {
            Kind::EnvironmentValue { name, value, .. } => (name.clone(), value.clone()),
            _ => panic!("{error}"),
        }
    };
    for (name, value) in [
        ("RANK", "-1"),
        ("RANK", "2"),
        ("RANK", ""),
        ("WORLD_SIZE", "x"),
        ("LOCAL_WORLD_SIZE", "1"),
    ] {
        assert_eq!(with(name, value), (name.into(), value.into()));
    }
    let two_hosts = describe(&process(&["SLURM_STEP_TASKS_PER_NODE=1(x2)", SRUN_TASK]));
    let error = two_hosts.unwrap_err();
    let Kind::EnvironmentValue { name, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(name, "SLURM_STEP_TASKS_PER_NODE");
}

#[test]
fn a_value_that_is_no_text_is_refused_not_overlooked() {
    use std::os::unix::ffi::OsStringExt;
    for broken in ["RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"] {
        let mut process = process(&[TORCHRUN]);
        let value = OsString::from_vec(b"4\xff".to_vec());
        process.variables.insert(0, (broken.into(), value));
        let expected = Error::of_kind(Kind::EnvironmentValue {
            name: broken.into(),
            value: "4\u{fffd}".into(),
            reason: "it is not UTF-8".into(),
        });
        assert_eq!(describe(&process), Err(expected));
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
            64,
        )
    ) {
        use std::os::unix::ffi::OsStringExt;
        let set = variables().zip(values).filter_map(|(name, value)| {
            Some((name.into(), OsString::from_vec(value?)))
        });
        let process = Recorded { variables: set.collect(), ..Recorded::default() };
        match describe(&process) {
            Ok(described) => {
                proptest::prop_assert!(described.is_none_or(|this| this.rank < this.world));
            }
            Err(error) => {
                proptest::prop_assert_eq!(error.kind().class(), Class::Environment);
                proptest::prop_assert!(recognise(&process).is_some());
            }
        }
    }
}
