//! gemmesh-doctor: it reports what works and what does not, and neither crashes nor hangs.
//!
//! This program is the doctor itself where [`DOCTOR`] is set: so what is tested is what has just been built.

#[path = "../src/bin/doctor/main.rs"]
mod doctor;

#[path = "../../../tests/support/patience.rs"]
#[allow(dead_code)]
mod patience;
#[path = "../../../tests/support/ports.rs"]
mod ports;

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use doctor::report::Via;
use doctor::routes::{self, Rates};
use patience::{agreed, stretched};
use ports::free_port;
use serde_json::{Value, json as value};

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
        a_rank_that_is_alone_does_not_wait_for_ever
        the_host_backend_is_measured_and_works
        a_person_reads_the_same
        nobody_need_read_it
        a_report_that_a_full_disk_does_not_take_is_a_failure
        no_report_shows_a_secret
        a_broken_environment_is_a_finding
        variables_that_do_nothing_are_named
        variables_of_hosts_are_named_and_the_key_is_not_shown
        a_step_that_fails_is_a_finding_and_the_next_go_on
        the_ranks_of_a_launcher_meet
        network_devices_are_shown
        two_hosts_are_shown
        uneven_network_devices_are_a_note
        ranks_of_a_host_meet_in_pairs
        routes_go_along_rails;
    no_gpu:
        what_is_missing_for_gpus_is_said;
    cuda:
        what_is_not_the_driver_is_a_finding
        hosts_without_nccl_are_named;
    cpu_driver:
        two_gpus_are_measured
        gpus_of_a_launcher_s_ranks_are_measured
        what_takes_stores_away_is_named
        rates_that_cannot_be_read_are_a_finding
        a_driver_without_gpus_is_a_finding
        a_driver_that_hangs_is_a_finding;
    gpu:
        gpus_of_two_hosts_are_measured;
};

fn main() -> ExitCode {
    if std::env::var_os(DOCTOR).is_some() {
        return doctor::main();
    }
    let arguments = std::env::args().skip(1);
    let problem: Vec<String> = arguments.filter(|name| !name.starts_with('-')).collect();
    let is_asked =
        |name: &str| problem.is_empty() || problem.iter().any(|part| name.contains(&**part));
    let asked: Vec<&Test> = TESTS.iter().filter(|(name, ..)| is_asked(name)).collect();
    ExitCode::from(u8::from(!all_pass(&asked)))
}

/// Runs tests from the first on, two at a time. GPUs of the CPU's driver take all of the machine, so beside them one.
fn all_pass(tests: &[&Test]) -> bool {
    let lanes = if cpu_driver() { 1 } else { 2 };
    let left = Mutex::new(tests.iter());
    let next = || left.lock().unwrap().next();
    let passes = |(name, needs, test): &Test| {
        let outcome = match needs().then(|| catch_unwind(test)) {
            None => "ignored",
            Some(Ok(())) => "ok",
            Some(Err(_)) => "FAILED",
        };
        println!("test {name} ... {outcome}");
        outcome != "FAILED"
    };
    // Also those behind a test that fails.
    let lane = || {
        std::iter::from_fn(next)
            .filter(|test| !passes(test))
            .count()
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        let failed = lanes.into_iter().map(|lane| lane.join().unwrap());
        failed.sum::<usize>() == 0
    })
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

/// Whether a real GPU is there.
fn gpu() -> bool {
    cfg!(feature = "cuda") && !cpu_driver() && Path::new("/dev/nvidia0").exists()
}

/// Whether no GPU of any kind is there.
fn no_gpu() -> bool {
    !cpu_driver() && !Path::new("/dev/nvidia0").exists()
}

fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Child {
    let mut command = command(arguments);
    command.envs(variables.iter().copied()).spawn().unwrap()
}

/// The doctor, without a launcher around it.
fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    gemmesh::launch::variables().for_each(|name| {
        command.env_remove(name);
    });
    command.env(DOCTOR, "1").args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
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

fn a_report_that_a_full_disk_does_not_take_is_a_failure() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut command = command(&["--backend", "host"]);
    let (_, complained, code) = end(command.stdout(full).spawn().unwrap());
    assert!(complained.contains("the report can't be written: No space"));
    assert_eq!(code, 1);
}

fn no_report_shows_a_secret() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    // A key that is none, an address of `launch`, and a key whose name is misspelt.
    let key = OsStr::from_bytes(b"a sesame that is \xff not UTF-8");
    let sets: [&[(&str, &OsStr)]; 3] = [
        &[
            ("GEMMESH_KEY", key),
            ("RANK", "0".as_ref()),
            ("WORLD_SIZE", "2".as_ref()),
            ("LOCAL_RANK", "0".as_ref()),
            ("LOCAL_WORLD_SIZE", "1".as_ref()),
            ("MASTER_ADDR", "localhost".as_ref()),
            ("MASTER_PORT", "1".as_ref()),
        ],
        &[
            ("GEMMESH_ADDRESS", "sesame of two ranks".as_ref()),
            ("GEMMESH_RANK", "0".as_ref()),
            ("GEMMESH_WORLD_SIZE", "2".as_ref()),
        ],
        &[("GEMMESH_KEYS", "open sesame, says a job".as_ref())],
    ];
    let timeout = agreed(Duration::from_secs(6)).as_secs().to_string();
    for (number, set) in sets.into_iter().enumerate() {
        for form in [&["--json"][..], &[]] {
            let mut doctor =
                command(&[&["--backend", "host", "--timeout", &timeout], form].concat());
            let doctor = doctor.envs(set.iter().copied()).spawn().unwrap();
            let (said, complained, code) = end(doctor);
            assert!(!(said.clone() + &complained).contains("sesame"), "{said}");
            assert!(said.contains(set[0].0), "{said}");
            // Rank 1 of the second one does not come.
            assert_eq!(code, i32::from(number < 2), "{said}");
        }
    }
}

fn a_broken_environment_is_a_finding() {
    let counts = [("RANK", "0"), ("WORLD_SIZE", "2")];
    let (report, code) = json(&["--backend", "host"], &counts);
    assert_severity(&report, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT", "problem");
    assert_eq!(code, 1, "{report:#}");
    // No one's in particular.
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

/// A folder that is removed in the end, with libraries or with files as /sys has them.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let name = format!("doctors-test-{}-{name}", std::process::id());
        Folder(std::env::temp_dir().join(name))
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// Gives the C library other names, under which programs look for other libraries.
    fn with_libc_as(self, names: &[&str]) -> Folder {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let mut paths = maps
            .lines()
            .filter_map(|line| line.split_whitespace().nth(5));
        let libc = paths.find(|path| path.contains("libc.so.6")).unwrap();
        fs::create_dir(&self.0).unwrap();
        for name in names {
            std::os::unix::fs::symlink(libc, self.0.join(name)).unwrap();
        }
        self
    }

    /// Adds files of a folder, each with what it holds.
    fn with(self, folder: &str, files: &[(&str, &str)]) -> Folder {
        let folder = self.0.join("class").join(folder);
        fs::create_dir_all(&folder).unwrap();
        for (name, text) in files {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
        self
    }

    /// Adds an interface of hardware that is up, and its active RDMA port.
    fn with_nic(self, number: usize, gbit: usize) -> Folder {
        let (interface, device) = (format!("net/ib{number}"), format!("mlx5_{number}"));
        let (mbit, rate) = (format!("{gbit}000"), format!("{gbit} Gb/sec (4X NDR)"));
        let port = [
            ("state", "4: ACTIVE"),
            ("rate", &rate),
            ("link_layer", "InfiniBand"),
        ];
        self.with(
            &interface,
            &[("operstate", "up"), ("speed", &mbit), ("type", "32")],
        )
        .with(&format!("{interface}/device/infiniband/{device}"), &[])
        .with(&format!("infiniband/{device}/ports/1"), &port)
    }

    fn arguments(&self) -> [&str; 4] {
        ["--backend", "host", "--sys", self.path()]
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn network_devices_are_shown() {
    let sys = Folder::new("devices")
        .with(
            "net/lo",
            &[("operstate", "unknown"), ("carrier", "1"), ("type", "772")],
        )
        .with("net/docker0", &[("operstate", "down"), ("type", "1")])
        .with(
            "net/eth0",
            &[("operstate", "unknown"), ("carrier", "1"), ("type", "1")],
        )
        .with("net/eno1/device", &[])
        .with(
            "net/eno1",
            &[("operstate", "down"), ("speed", "-1"), ("type", "1")],
        )
        .with(
            "infiniband/mlx5_1/ports/1",
            &[("state", "1: DOWN"), ("rate", "2.5 Gb/sec (1X SDR)")],
        )
        .with_nic(0, 400);
    let (report, code) = json(&sys.arguments(), &[]);
    assert_eq!(code, 0, "{report:#}");
    let host = &report["hosts"][0];
    assert_eq!(report["hosts"].as_array().unwrap().len(), 1);
    assert_eq!(host["ranks"], value!([]));
    let interface = |name, up, is_virtual, mbit_per_s: Option<u64>, rdma: &[&str]| {
        value!({
            "name": name, "up": up, "is_virtual": is_virtual, "mbit_per_s": mbit_per_s, "rdma": rdma,
        })
    };
    let expected = value!([
        interface("eno1", false, false, None, &[]),
        interface("eth0", true, true, None, &[]),
        interface("ib0", true, false, Some(400_000), &["mlx5_0"]),
    ]);
    assert_eq!(host["interfaces"], expected);
    let expected = value!([
        {
            "device": "mlx5_0", "port": "1", "active": true, "state": "active",
            "link_layer": "InfiniBand", "mbit_per_s": 400_000,
        },
        {
            "device": "mlx5_1", "port": "1", "active": false, "state": "down",
            "link_layer": null, "mbit_per_s": 2_500,
        },
    ]);
    assert_eq!(host["rdma_ports"], expected);
    // It has one or says why not.
    assert_ne!(
        host["nccl"].is_null(),
        host["no_nccl"].is_null(),
        "{host:#}"
    );
}

/// Starts the doctor on two hosts, named a and b, with arguments for each, and more variables. Returns what rank 0
/// prints, and its exit code.
fn two_hosts(places: usize, arguments: [&[&str]; 2], others: &[(&str, &str)]) -> (String, i32) {
    let port = free_port().to_string();
    let [world, of_host] = [2 * places, places].map(|count| count.to_string());
    let ranks = (0..2 * places).map(|rank| {
        let host = rank / places;
        let [own, place] = [rank, rank % places].map(|number| number.to_string());
        let name = ["a", "b"][host];
        let variables = [
            ("RANK", &*own),
            ("WORLD_SIZE", &world),
            ("LOCAL_RANK", &place),
            ("LOCAL_WORLD_SIZE", &of_host),
            ("MASTER_ADDR", "localhost"),
            ("MASTER_PORT", "1"),
            ("TORCHELASTIC_RUN_ID", &port),
            ("GEMMESH_PORT", &port),
            ("GEMMESH_KEY", SECRET),
            ("GEMMESH_HOST", name),
            // NCCL's name of a host.
            ("NCCL_HOSTID", name),
        ];
        start(arguments[host], &[&variables, others].concat())
    });
    let ranks: Vec<Child> = ranks.collect();
    let mut ends = ranks.into_iter().map(end);
    let (said, complained, code) = ends.next().unwrap();
    for (rank, end) in ends.enumerate() {
        assert_eq!(end, (String::new(), String::new(), 0), "rank {}", rank + 1);
    }
    assert_eq!(complained, "", "{said}");
    (said, code)
}

fn two_hosts_are_shown() {
    let [a, b] =
        ["equal-a", "equal-b"].map(|name| Folder::new(name).with_nic(0, 400).with_nic(1, 400));
    let (said, code) = two_hosts(2, [&a.arguments(), &b.arguments()], &[]);
    assert_eq!(code, 0, "{said}");
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let name = name.trim();
    for words in [
        "launcher: the 4 ranks have met, on 2 hosts",
        &format!("{name} as a  0 to 1"),
        &format!("{name} as b  2 to 3"),
        "ib1        up     400   hardware  mlx5_1",
        "mlx5_0:1   active  400   InfiniBand",
    ] {
        assert!(said.contains(words), "no {words:?} in {said}");
    }
    assert!(!said.contains("slowest rail"), "{said}");
}

fn uneven_network_devices_are_a_note() {
    let a = Folder::new("uneven-a").with_nic(0, 400).with_nic(1, 400);
    let interface = [("operstate", "up"), ("speed", "100000")];
    let slower = Folder::new("slower").with_nic(0, 400).with_nic(1, 200);
    let fewer = Folder::new("fewer")
        .with_nic(0, 400)
        .with("net/eth0", &interface);
    let none = Folder::new("none")
        .with("net/eth0/device", &[])
        .with("net/eth0", &interface);
    for (b, words) in [
        (&slower, "as b of 1 × 200 Gb/s and 1 × 400 Gb/s"),
        (&fewer, "as b of 1 × 400 Gb/s"),
        (&none, "as b of none"),
    ] {
        let arguments = [&a, b].map(|sys| [&["--json"], &sys.arguments()[..]].concat());
        let (said, code) = two_hosts(1, [&arguments[0], &arguments[1]], &[]);
        assert_eq!(code, 0, "{said}");
        let report = serde_json::from_str(&said).unwrap();
        assert_severity(
            &report,
            "as a has active RDMA ports of 2 × 400 Gb/s",
            "note",
        );
        assert_severity(&report, words, "note");
        assert_eq!(report["hosts"][1]["ranks"], value!([1]));
    }
}

fn ranks_of_a_host_meet_in_pairs() {
    for places in 1..10 {
        let mut pairs = BTreeSet::new();
        for round in 0..routes::rounds(places) {
            for place in 0..places {
                let Some(partner) = routes::partner(place, round, places) else {
                    continue;
                };
                assert_eq!(routes::partner(partner, round, places), Some(place));
                assert!(partner != place && pairs.insert((place, partner)));
            }
        }
        assert_eq!(pairs.len(), places * (places - 1));
    }
}

fn routes_go_along_rails() {
    let hosts = [vec![0, 3], vec![1, 2]];
    let within = |from: usize| (0..4).map(move |to| Some((10 * from + to) as f64));
    let rates = Rates {
        near: Via::Push,
        within: (0..4).map(|rank| within(rank).collect()).collect(),
        rails: vec![40.0, 50.0, 60.0, 20.0],
    };
    let peers = routes::peers(&hosts, &rates);
    assert_eq!(peers.len(), 4 * 3);
    let route = |from, to| {
        let mut peers = peers.iter();
        let peer = peers
            .find(|peer| (peer.from, peer.to) == (from, to))
            .unwrap();
        (peer.via, peer.gb_per_s)
    };
    // What rank 3 has measured of rank 0.
    assert_eq!(route(0, 3), (Via::Push, Some(30.0)));
    assert_eq!(route(0, 1), (Via::Network, Some(40.0)));
    assert_eq!(route(3, 2), (Via::Network, Some(20.0)));
    assert_eq!(route(0, 2), (Via::Rank(1), None));
    assert_eq!(route(2, 0), (Via::Rank(3), None));
}

fn a_rank_that_is_alone_does_not_wait_for_ever() {
    // Of a job whose other rank no other test starts.
    let own = [("RANK", "0"), ("TORCHELASTIC_RUN_ID", "alone")];
    let environment = [&own, &TORCHRUN[..]].concat();
    let begin = Instant::now();
    let seconds = agreed(Duration::from_secs(12)).as_secs().to_string();
    let (report, code) = json(&["--backend", "host", "--timeout", &seconds], &environment);
    assert!(begin.elapsed() < stretched(Duration::from_secs(40)));
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
    let folder = Folder::new("driver").with_libc_as(&["libcuda.so", "libcuda.so.1"]);
    let process = start(&["--json"], &[("LD_LIBRARY_PATH", folder.path())]);
    let (said, _, code) = end(process);
    assert_eq!(code, 1);
    let report = serde_json::from_str(&said).unwrap();
    assert_severity(&report, "it has crashed", "problem");
    assert_severity(&report, "cuInit", "problem");
    assert_severity(&report, "the host backend works", "ok");
}

fn hosts_without_nccl_are_named() {
    let folder = Folder::new("nccl").with_libc_as(&["libnccl.so.2"]);
    let arguments: &[&str] = &["--backend", "host", "--json"];
    let libraries = [("LD_LIBRARY_PATH", folder.path())];
    let (said, code) = two_hosts(1, [arguments, arguments], &libraries);
    assert_eq!(code, 0, "{said}");
    let report = serde_json::from_str(&said).unwrap();
    for name in ["as a", "as b"] {
        let words = format!("{name} has no NCCL, which carries rows between hosts");
        assert_severity(&report, &words, "note");
    }
    for host in report["hosts"].as_array().unwrap() {
        let reason = host["no_nccl"].as_str().unwrap();
        assert!(reason.contains("has no ncclGetVersion"), "{reason}");
    }
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
            (&gpu["ordinal"], &gpu["has_kernels"]),
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

fn gpus_of_a_launcher_s_ranks_are_measured() {
    let environment = |rank| {
        let own = [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("CPU_DRIVER_GPUS", "2"),
        ];
        let job = TORCHRUN.iter().filter(|(name, _)| *name != "LOCAL_RANK");
        own.into_iter().chain(job.copied()).collect::<Vec<_>>()
    };
    let other = start(&["--json"], &environment("1"));
    let (said, _, code) = end(start(&["--json"], &environment("0")));
    assert_eq!(end(other), (String::new(), String::new(), 0));
    assert_eq!(code, 0, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_severity(&report, "the ranks' GPUs reach one another", "ok");
    let peers = report["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 2);
    for peer in peers {
        assert!(
            ["pull", "push", "store"].contains(&peer["via"].as_str().unwrap()),
            "{peer}"
        );
        assert!(peer["gb_per_s"].as_f64() > Some(0.0), "{peer}");
    }
}

/// Two hosts of a rank each, which share GPU 0. NCCL carries rows over the loopback device.
fn gpus_of_two_hosts_are_measured() {
    let arguments: &[&str] = &["--backend", "cuda", "--json"];
    let sockets = [("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_IB_DISABLE", "1")];
    let (said, code) = two_hosts(1, [arguments, arguments], &sockets);
    assert_eq!(code, 0, "{said}");
    let report: Value = serde_json::from_str(&said).unwrap();
    assert_severity(&report, "the 2 ranks have met, on 2 hosts", "ok");
    assert_severity(&report, "the ranks' GPUs reach one another", "ok");
    for host in report["hosts"].as_array().unwrap() {
        let nccl = &host["nccl"];
        assert!(
            nccl["version"].as_str().unwrap().starts_with("2."),
            "{nccl}"
        );
        assert!(nccl["path"].as_str().unwrap().contains("libnccl"), "{nccl}");
    }
    let peers = report["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 2);
    for peer in peers {
        assert_eq!(peer["via"], "network", "{peer}");
        assert!(peer["gb_per_s"].as_f64() > Some(0.0), "{peer}");
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
    let seconds = agreed(Duration::from_secs(5)).as_secs().to_string();
    let (report, code) = json(&["--timeout", &seconds], &[("CPU_DRIVER_HANGS", "1")]);
    assert!(begin.elapsed() < stretched(Duration::from_secs(30)));
    assert_eq!(code, 1);
    let words = format!("did not end within {seconds} s");
    assert_severity(&report, &words, "problem");
    assert_severity(&report, "the host backend works", "ok");
}
