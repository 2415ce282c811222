//! gemmesh-doctor: it reports what works and what does not, and neither crashes nor hangs.
//!
//! This program is the doctor itself where [`DOCTOR`] is set: so what is tested is what has just been built.

#[path = "../examples/doctor/main.rs"]
mod doctor;

use std::panic::catch_unwind;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Makes this program the doctor. Inherited by the processes that it starts.
const DOCTOR: &str = "GEMMESH_TEST_DOCTOR";
/// Set where the driver is that of tests/cpu_driver.
const CPU_DRIVER: &str = "GEMMESH_TEST_CPU_DRIVER";
/// The key of a job of several hosts.
const SECRET: &str = "a key that nobody guesses";
/// What the environment of a test says of ranks, and what it must not.
static TORCHRUN: LazyLock<[(&str, &str); 4]> = LazyLock::new(|| {
    // Of this program alone, because its ranks must not meet those of a different one.
    let port = 1024 + std::process::id() % 64_000;
    [
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", port.to_string().leak()),
    ]
});

/// Its name, what it needs, and what it does.
type Test = (&'static str, fn() -> bool, fn());

/// The tests of these names.
macro_rules! tests {
    ($($needs:ident: $($name:ident)*;)*) => {
        &[$($((stringify!($name), $needs, $name)),*),*]
    };
}

const TESTS: &[Test] = tests! {
    nothing:
        the_host_backend_is_measured_and_works
        a_person_reads_the_same
        nobody_need_read_it
        a_broken_environment_is_a_finding
        variables_that_do_nothing_are_named
        variables_of_hosts_are_named_and_the_key_is_not_shown
        a_step_that_fails_is_a_finding_and_the_next_go_on
        the_ranks_of_a_launcher_meet
        a_rank_that_is_alone_does_not_wait_for_ever;
    no_gpu:
        what_is_missing_for_gpus_is_said;
    cuda:
        what_is_not_the_driver_is_a_finding;
    cpu_driver:
        two_gpus_are_measured
        what_takes_stores_away_is_named
        rates_that_cannot_be_read_are_a_finding
        a_driver_without_gpus_is_a_finding
        a_driver_that_hangs_is_a_finding;
};

fn main() -> ExitCode {
    if std::env::var_os(DOCTOR).is_some() {
        return doctor::main();
    }
    let arguments = std::env::args().skip(1);
    let problem: Vec<String> = arguments.filter(|name| !name.starts_with('-')).collect();
    let is_asked =
        |name: &str| problem.is_empty() || problem.iter().any(|part| name.contains(&**part));
    let mut failed = false;
    for (name, needs, test) in TESTS.iter().filter(|(name, ..)| is_asked(name)) {
        let outcome = match needs().then(|| catch_unwind(test)) {
            None => "ignored",
            Some(Ok(())) => "ok",
            Some(Err(_)) => "FAILED",
        };
        failed |= outcome == "FAILED";
        println!("test {name} ... {outcome}");
    }
    ExitCode::from(u8::from(failed))
}

fn nothing() -> bool {
    true
}

fn cuda() -> bool {
    cfg!(feature = "cuda")
}

/// Whether GPUs of the CPU's driver are there.
fn cpu_driver() -> bool {
    cfg!(feature = "cuda") && std::env::var_os(CPU_DRIVER).is_some()
}

/// Whether no GPU of any kind is there.
fn no_gpu() -> bool {
    !cpu_driver() && !std::path::Path::new("/dev/nvidia0").exists()
}

fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    gemmesh::launch::variables().for_each(|name| {
        command.env_remove(name);
    });
    let command = command
        .env(DOCTOR, "1")
        .args(arguments)
        .envs(variables.iter().copied());
    command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What it printed, and its exit code. It must end, and without a panic.
fn end(process: Child) -> (String, String, i32) {
    let output = process.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (said, complained) = (text(output.stdout), text(output.stderr));
    assert!(!complained.contains("panicked"), "{complained}");
    (
        said,
        complained,
        output.status.code().expect("an exit code"),
    )
}

fn json(arguments: &[&str], variables: &[(&str, &str)]) -> (Value, i32) {
    let (said, _, code) = end(start(&[&["--json"], arguments].concat(), variables));
    (serde_json::from_str(&said).unwrap(), code)
}

/// The severity of the first finding that says so.
fn severity(report: &Value, words: &str) -> Option<String> {
    let findings = report["findings"].as_array().unwrap();
    let says = |finding: &&Value| finding["what"].as_str().unwrap().contains(words);
    findings.iter().find(says).map(|finding| {
        let severity = finding["severity"].as_str().unwrap();
        assert_eq!(finding["advice"].is_null(), severity == "ok", "{finding}");
        severity.into()
    })
}

#[track_caller]
fn assert_severity(report: &Value, words: &str, expected: &str) {
    assert_eq!(
        severity(report, words).as_deref(),
        Some(expected),
        "{words}: {report:#}"
    );
}

fn the_host_backend_is_measured_and_works() {
    let (report, code) = json(&["--backend", "host", "--ranks", "3"], &[]);
    assert_eq!(code, 0, "{report:#}");
    let fields = [
        "gemmesh",
        "backend",
        "machine",
        "launcher",
        "variables",
        "host",
        "cuda",
        "findings",
    ];
    let found: Vec<&String> = report.as_object().unwrap().keys().collect();
    assert!(
        fields
            .iter()
            .all(|field| found.contains(&&field.to_string())),
        "{found:?}"
    );
    assert_eq!(report["backend"], "host");
    assert_eq!(report["gemmesh"], env!("CARGO_PKG_VERSION"));
    assert!(report["machine"]["cores"].as_u64() > Some(0) && report["machine"]["memfd"] == true);
    assert!(report["launcher"].is_null());
    let host = &report["host"];
    assert_eq!(host["ranks"], 3);
    // Each rank has compared its own 512 × 128.
    assert_eq!(host["product"]["elements"], 3 * 512 * 128);
    let worst = host["product"]["worst"].as_f64().unwrap();
    assert!(worst > 0.0 && worst <= 1.0, "{worst}");
    for field in ["latency_us", "gb_per_s"] {
        assert!(host["copies"][field].as_f64() > Some(0.0), "{host}");
    }
    assert_severity(&report, "the host backend works on 3 ranks", "ok");
}

fn a_person_reads_the_same() {
    let (said, _, code) = end(start(
        &["--backend", "host"],
        &[("CUDA_VISIBLE_DEVICES", "7,5")],
    ));
    assert_eq!(code, 0, "{said}");
    for words in [
        "Machine\nLinux",
        "Environment",
        "7,5",
        "Host backend\n2 ranks as threads: all 131072 elements of a product agree with float64",
        "GB/s come to each",
        "GPUs\n",
        "Findings",
        "the host backend works on 2 ranks",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
}

fn nobody_need_read_it() {
    let mut process = start(&["--backend", "host"], &[]);
    drop(process.stdout.take());
    let (_, _, code) = end(process);
    assert_eq!(code, 0);
}

fn a_broken_environment_is_a_finding() {
    let counts = [("RANK", "0"), ("WORLD_SIZE", "2")];
    let (report, code) = json(&["--backend", "host"], &counts);
    assert_severity(&report, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "problem");
    assert_eq!(code, 1, "{report:#}");
    // Nobody's in particular.
    let (report, code) = json(&["--backend", "host"], &counts[..1]);
    assert_severity(&report, "no launcher", "ok");
    assert_eq!(code, 0, "{report:#}");
    let value = [&[("RANK", "-1")], &TORCHRUN[..]].concat();
    let (report, code) = json(&["--backend", "host"], &value);
    assert_severity(&report, "environment variable RANK is \"-1\"", "problem");
    assert_eq!(code, 1);
    // What it says of itself does not keep the doctor from starting ranks.
    assert_severity(&report, "the host backend works", "ok");
    let (report, code) = json(
        &["--backend", "host"],
        &[
            ("GEMMESH_RANK", "x"),
            ("GEMMESH_WORLD_SIZE", "2"),
            ("GEMMESH_ADDRESS", "y"),
        ],
    );
    assert_severity(&report, "GEMMESH_RANK is \"x\"", "problem");
    assert_eq!(code, 1);
}

fn variables_that_do_nothing_are_named() {
    let variables = [
        ("GEMMESH_TUND", "none"),
        ("GEMMESH_TUNED", "/nonexistent/winners"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_LAUNCH_BLOCKING", "0"),
    ];
    let (report, code) = json(&["--backend", "host"], &variables);
    assert_eq!(code, 0, "{report:#}");
    assert_severity(&report, "no variable GEMMESH_TUND", "note");
    assert_severity(&report, "/nonexistent/winners", "note");
    assert_severity(&report, "CUDA_DEVICE_MAX_CONNECTIONS=1", "note");
    assert_eq!(severity(&report, "CUDA_LAUNCH_BLOCKING"), None);
    let of = |name: &str| {
        let all = report["variables"].as_array().unwrap();
        let found = all.iter().find(|variable| variable["name"] == name);
        found.unwrap()["effect"].as_str().unwrap().to_string()
    };
    for (name, _) in variables {
        assert_eq!(
            of(name).starts_with("none"),
            !["GEMMESH_TUNED", "CUDA_DEVICE_MAX_CONNECTIONS"].contains(&name),
            "{name}"
        );
    }
}

fn variables_of_hosts_are_named_and_the_key_is_not_shown() {
    let variables = [
        ("GEMMESH_KEY", SECRET),
        ("GEMMESH_PORT", "7000"),
        ("GEMMESH_HOST", "a"),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ];
    let (report, code) = json(&["--backend", "host"], &variables);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(severity(&report, "gemmesh reads no variable"), None);
    let all = report["variables"].as_array().unwrap();
    for (name, _) in variables {
        let found = all.iter().find(|variable| variable["name"] == name);
        let effect = found.unwrap()["effect"].as_str().unwrap();
        assert!(!effect.starts_with("none"), "{name}: {effect}");
    }
    assert!(!report.to_string().contains(SECRET), "{report:#}");
}

fn a_step_that_fails_is_a_finding_and_the_next_go_on() {
    let (report, code) = json(&["--backend", "host", "--ranks", "65"], &[]);
    assert_eq!(code, 1);
    assert_severity(
        &report,
        "world size is 65; it must be from 1 to 64",
        "problem",
    );
    assert!(report["host"].is_null());
    let findings = report["findings"].as_array().unwrap();
    assert_eq!(findings.last().unwrap()["about"], "GPUs", "{report:#}");
}

fn the_ranks_of_a_launcher_meet() {
    let environment = |rank| [&[("RANK", rank)], &TORCHRUN[..]].concat();
    let arguments = ["--backend", "host", "--json"];
    let other = start(&arguments, &environment("1"));
    let (said, _, code) = end(start(&arguments, &environment("0")));
    assert_eq!(code, 0, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(report["launcher"]["name"], "torchrun");
    assert_eq!(report["launcher"]["world_size"], 2);
    assert_severity(&report, "the 2 ranks have met", "ok");
    assert_eq!(
        end(other),
        (String::new(), String::new(), 0),
        "rank 0 reports"
    );
}

fn a_rank_that_is_alone_does_not_wait_for_ever() {
    let environment = [&[("RANK", "0")], &TORCHRUN[..]].concat();
    let begin = Instant::now();
    let (report, code) = json(&["--backend", "host", "--timeout", "12"], &environment);
    assert!(begin.elapsed() < Duration::from_secs(40));
    assert_eq!(code, 1);
    assert_severity(&report, "rank 1 has not come", "problem");
    assert_severity(&report, "the host backend works", "ok");
}

fn what_is_missing_for_gpus_is_said() {
    let words = match cfg!(feature = "cuda") {
        true => "libcuda.so.1) is not installed",
        false => "built without feature cuda",
    };
    for (backend, expected, exit) in [("host", "note", 0), ("cuda", "problem", 1)] {
        let (report, code) = json(&["--backend", backend], &[]);
        assert_severity(&report, words, expected);
        assert_eq!(code, exit);
        assert_eq!(report["cuda"]["compiled"], cfg!(feature = "cuda"));
        assert_severity(&report, "the host backend works", "ok");
    }
}

fn what_is_not_the_driver_is_a_finding() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let mut paths = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let libc = paths.find(|path| path.contains("libc.so.6")).unwrap();
    let folder = std::env::temp_dir().join(format!("gemmesh-doctor-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::os::unix::fs::symlink(libc, folder.join(name)).unwrap();
    }
    let process = start(
        &["--json"],
        &[("LD_LIBRARY_PATH", folder.to_str().unwrap())],
    );
    let (said, _, code) = end(process);
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(code, 1);
    let report = serde_json::from_str(&said).unwrap();
    assert_severity(&report, "it has crashed", "problem");
    assert_severity(&report, "cuInit", "problem");
    assert_severity(&report, "the host backend works", "ok");
}

fn two_gpus_are_measured() {
    let (report, code) = json(&[], &[("CPU_DRIVER_GPUS", "2")]);
    assert_eq!(code, 0, "{report:#}");
    let cuda = &report["cuda"];
    assert_eq!(cuda["driver"], "13.0");
    assert!(cuda["nvcc"].as_str().unwrap().contains('.'));
    let gpus = cuda["gpus"].as_array().unwrap();
    assert_eq!(gpus.len(), 2);
    for (ordinal, gpu) in gpus.iter().enumerate() {
        assert_eq!(
            (&gpu["ordinal"], &gpu["hopper"]),
            (&ordinal.into(), &true.into())
        );
        assert_eq!(gpu["product"]["elements"], 512 * 128);
    }
    assert_ne!(gpus[0]["uuid"], gpus[1]["uuid"]);
    assert_eq!(cuda["links"].as_array().unwrap().len(), 2);
    assert_severity(
        &report,
        "2 GPUs work by themselves, and 1 of 1 pairs together",
        "ok",
    );
    let pairs = cuda["pairs"].as_array().unwrap();
    assert_eq!(pairs.len(), 1);
    let measured = &pairs[0]["measured"];
    assert_eq!(measured["product"]["elements"], 2 * 512 * 128);
    for way in ["copies", "stores"] {
        for field in ["latency_us", "gb_per_s"] {
            assert!(measured[way][field].as_f64() > Some(0.0), "{measured}");
        }
    }
}

fn what_takes_stores_away_is_named() {
    let single = [
        ("CPU_DRIVER_GPUS", "2"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
    ];
    let (report, code) = json(&[], &single);
    assert_eq!(code, 0, "{report:#}");
    let measured = &report["cuda"]["pairs"][0]["measured"];
    assert!(measured["stores"].is_null(), "{measured}");
    let reason = measured["no_stores"].as_str().unwrap();
    assert!(reason.contains("CUDA_DEVICE_MAX_CONNECTIONS=1"), "{reason}");
}

fn rates_that_cannot_be_read_are_a_finding() {
    let unreadable = [
        ("CPU_DRIVER_GPUS", "2"),
        ("GEMMESH_RATES", "/nonexistent/rates"),
    ];
    let (report, code) = json(&[], &unreadable);
    assert_eq!(code, 1);
    assert_severity(&report, "GEMMESH_RATES names", "problem");
    assert_severity(&report, "GPU 0: ", "problem");
}

fn a_driver_without_gpus_is_a_finding() {
    let (report, code) = json(&[], &[("CPU_DRIVER_GPUS", "0")]);
    assert_eq!(code, 1);
    assert_eq!(report["cuda"]["driver"], "13.0");
    assert_severity(&report, "shows no GPU", "problem");
    assert_severity(&report, "the host backend works", "ok");
}

fn a_driver_that_hangs_is_a_finding() {
    let begin = Instant::now();
    let (report, code) = json(&["--timeout", "5"], &[("CPU_DRIVER_HANGS", "1")]);
    assert!(begin.elapsed() < Duration::from_secs(30));
    assert_eq!(code, 1);
    assert_severity(&report, "did not end within 5 s", "problem");
    assert_severity(&report, "the host backend works", "ok");
}
