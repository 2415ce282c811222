//! Ranks as processes: a test starts itself again for each rank, and is told by each how it went.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gemmesh::{Error, Group, Host};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::patience::{self, STRETCH, stretched};

/// The variables that make a process of the test binary a rank.
const TEST: &str = "GEMMESH_TEST";
const PLACE: &str = "GEMMESH_TEST_PLACE";
const ADDRESS: &str = "GEMMESH_TEST_ADDRESS";
/// The test's process.
const PARENT: &str = "GEMMESH_TEST_PARENT";
/// Begins a line that is for the parent.
const SAY: &str = "@say ";
const OUTCOME: &str = "@outcome ";
/// What ranks say that come together.
const THERE: &str = "there";
/// Nothing here lasts longer, except on a busy machine; what does, hangs.
const DEADLINE: Duration = Duration::from_secs(60);

/// Options of processes.
pub struct Setting<'a> {
    /// How long they may take, if the machine is not busy.
    pub deadline: Duration,
    /// What is in the environment of the process at a place.
    pub variables: &'a dyn Fn(usize) -> Vec<(&'static str, String)>,
    /// The command that starts this program at a place, directly or through other programs.
    pub command: &'a dyn Fn(usize) -> Command,
}

impl Default for Setting<'_> {
    fn default() -> Self {
        Setting {
            deadline: DEADLINE,
            variables: &|_| Vec::new(),
            command: &|_| Command::new(this_program()),
        }
    }
}

pub fn this_program() -> PathBuf {
    std::env::current_exe().expect("this program")
}

/// This program in namespaces of its own, which `unshare` makes of `options`. None, said in a line, where that is not
/// permitted.
pub fn in_namespaces(options: &[&str]) -> Option<impl Fn() -> Command> {
    let unshare = move || {
        let mut command = Command::new("unshare");
        command.args(options);
        command
    };
    // What a process of a test is started with has been tried.
    let tried = || unshare().arg("true").output();
    let tried = (!is_rank()).then(tried);
    let worked = |output: &io::Result<Output>| matches!(output, Ok(o) if o.status.success());
    if !tried.as_ref().is_none_or(worked) {
        println!("not tested: unshare {options:?} is not permitted here: {tried:?}");
        return None;
    }
    Some(move || {
        let mut command = unshare();
        command.arg(this_program());
        command
    })
}

/// This program as another user, where this one may become that.
pub fn as_user(uid: u32) -> Option<impl Fn() -> Command> {
    let own = move || {
        // Wherever it lies.
        let mut command = Command::new("/proc/self/exe");
        command.uid(uid).gid(uid);
        command
    };
    let tried = (!is_rank()).then(|| own().arg("--list").output());
    let worked = |output: &io::Result<Output>| matches!(output, Ok(o) if o.status.success());
    if !tried.as_ref().is_none_or(worked) {
        println!("not tested: this user may not become user {uid}: {tried:?}");
        return None;
    }
    Some(own)
}

/// Whether this process has been started as a rank of a test.
pub fn is_rank() -> bool {
    std::env::var_os(TEST).is_some()
}

/// The name of the test function in which it stands, as the test binary's `--exact` takes it.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        let path = std::any::type_name_of_val(&here);
        let path = path.strip_suffix("::here").unwrap_or(path);
        let path = path.trim_end_matches("::{{closure}}");
        path.split_once("::").map_or(path, |(_, name)| name)
    }};
}

/// One process, as it sees itself.
pub struct Rank {
    /// Where it stands in the list that the test gave.
    pub place: usize,
    pub rank: usize,
    pub world: usize,
    /// No other test's.
    pub address: String,
}

impl Rank {
    /// This process, if it is a rank of this test.
    fn here(test: &str, places: &[(usize, usize)]) -> Option<Rank> {
        if std::env::var(TEST).as_deref() != Ok(test) {
            return None;
        }
        let place: usize = std::env::var(PLACE).unwrap().parse().unwrap();
        let (rank, world) = places[place];
        let parent = std::env::var(PARENT).unwrap().parse().unwrap();
        let parent = Pid::from_raw(parent).expect("a process");
        // A namespace of its own does not show the test. It ends with what the test has started.
        if let Ok(parent) = pidfd_open(parent, PidfdFlags::empty()) {
            std::thread::spawn(move || end_with(&parent));
        }
        Some(Rank {
            place,
            rank,
            world,
            address: std::env::var(ADDRESS).unwrap(),
        })
    }

    /// Tells the parent how its part went, and ends the process.
    fn end(&self, outcome: Result<String, Error>) -> ! {
        let outcome = gemmesh::testing::of_outcome(&outcome);
        line(OUTCOME, &String::from_utf8(outcome).unwrap());
        std::process::exit(0);
    }

    /// The group of all processes of the test, with this timeout for late ranks too.
    pub fn connect(&self, timeout: Duration) -> Result<Group<Host>, Error> {
        self.connect_as(&self.address, timeout)
    }

    /// As [`Rank::connect`], at a different address.
    pub fn connect_as(&self, address: &str, timeout: Duration) -> Result<Group<Host>, Error> {
        let builder = Group::<Host>::builder().timeout(timeout);
        let builder = builder.arrival_timeout(timeout);
        builder.connect(self.rank, self.world, address)
    }

    /// Tells the parent.
    pub fn say(&self, what: impl std::fmt::Display) {
        line(SAY, &what.to_string());
    }

    /// Waits for the other processes. A rank that comes a second after a rendezvous has failed is not told.
    pub fn come_together(&self) {
        self.say(THERE);
        self.hear();
    }

    /// Waits until the parent says something.
    pub fn hear(&self) {
        let mut word = String::new();
        let bytes = std::io::stdin()
            .read_line(&mut word)
            .expect("standard input");
        assert!(bytes > 0, "the parent is gone");
    }
}

/// Ends this process when the test has ended, which was killed if this process still runs.
fn end_with(test: &OwnedFd) {
    loop {
        let mut end = [PollFd::new(test, PollFlags::IN)];
        if poll(&mut end, None).is_ok() {
            std::process::exit(99);
        }
    }
}

/// Writes a line for the parent, in one piece: libtest may have begun one.
fn line(marker: &str, text: &str) {
    let line = format!("\n{marker}{text}\n");
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).expect("standard output");
    out.flush().expect("standard output");
}

/// In the test: starts the test again as one process for each (rank, world size) of `places`. In such a process:
/// plays its part, says how it went, and ends the process.
pub fn start(
    test: &str,
    places: &[(usize, usize)],
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    start_with(test, places, &Setting::default(), part)
}

/// As [`start`], with options.
pub fn start_with(
    test: &str,
    places: &[(usize, usize)],
    setting: &Setting,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    if let Some(rank) = Rank::here(test, places) {
        rank.end(part(&rank));
    }
    launch(test, places, setting)
}

/// Starts the test again as one process for each place.
fn launch(test: &str, places: &[(usize, usize)], setting: &Setting) -> Processes {
    static TESTS: AtomicU32 = AtomicU32::new(0);
    let address = format!(
        "test-{}-{}",
        std::process::id(),
        TESTS.fetch_add(1, Ordering::Relaxed)
    );
    let litter = Litter::now();
    let processes = places.iter().enumerate();
    Processes {
        processes: processes
            .map(|(place, &(rank, _))| Process::start(test, place, rank, &address, setting))
            .collect(),
        deadline: setting.deadline,
        address,
        litter,
    }
}

/// As [`start`], with the ranks of one group.
pub fn group(
    test: &str,
    world: usize,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    let places: Vec<_> = (0..world).map(|rank| (rank, world)).collect();
    start(test, &places, part)
}

/// The processes of a test, seen by the test. None outlives this value.
pub struct Processes {
    pub address: String,
    processes: Vec<Process>,
    deadline: Duration,
    litter: Litter,
}

/// How a process ended.
#[derive(Debug)]
pub enum Ending {
    /// Its part returned this.
    Returned(Result<String, Error>),
    /// By a signal.
    Killed(i32),
}

#[derive(Debug)]
pub struct Outcome {
    pub rank: usize,
    pub ending: Ending,
    /// When it was started.
    pub begun: Instant,
    /// When it said how it ended.
    pub at: Instant,
    /// All that it and its children wrote.
    pub text: String,
}

impl Outcome {
    #[track_caller]
    pub fn value(&self) -> &str {
        match &self.ending {
            Ending::Returned(Ok(value)) => value,
            other => panic!("rank {}: {other:?}", self.rank),
        }
    }

    /// The error that ended it.
    #[track_caller]
    pub fn error(&self) -> &Error {
        match &self.ending {
            Ending::Returned(Err(error)) => error,
            other => panic!("rank {} has no error: {other:?}", self.rank),
        }
    }

    #[track_caller]
    pub fn assert_killed(&self) {
        assert!(
            matches!(self.ending, Ending::Killed(9)),
            "rank {}: {:?}",
            self.rank,
            self.ending
        );
    }
}

impl Processes {
    /// Waits until the process at `place` has said `what`, and returns when that was.
    #[track_caller]
    pub fn heard(&self, place: usize, what: &str) -> Instant {
        let begin = Instant::now();
        let process = &self.processes[place];
        let mut heard = process.heard.lock();
        loop {
            if let Some((_, at)) = heard.said.iter().find(|(said, _)| said == what) {
                return *at;
            }
            assert!(
                begin.elapsed() < stretched(self.deadline) && heard.open > 0,
                "process {place} has not said {what:?}:\n{}",
                heard.text
            );
            heard = process.heard.wait(heard);
        }
    }

    /// Waits until all processes have said `what`.
    #[track_caller]
    pub fn all_heard(&self, what: &str) {
        for place in 0..self.processes.len() {
            self.heard(place, what);
        }
    }

    /// Everything that the process at `place` has said.
    pub fn said(&self, place: usize) -> Vec<String> {
        let heard = self.processes[place].heard.lock();
        heard.said.iter().map(|(said, _)| said.clone()).collect()
    }

    /// Lets the process at `place` go on from [`Rank::hear`].
    pub fn tell(&mut self, place: usize) {
        let stdin = &mut self.processes[place].stdin;
        // It fails if the process has ended, which its outcome will tell.
        let _ = stdin.write_all(b"go on\n").and_then(|()| stdin.flush());
    }

    /// Lets all processes go on from [`Rank::come_together`], when all have come there.
    #[track_caller]
    pub fn let_all_go(&mut self) {
        self.all_heard(THERE);
        (0..self.processes.len()).for_each(|place| self.tell(place));
    }

    /// Sends a signal, and returns when.
    pub fn signal(&self, place: usize, signal: Signal) -> Instant {
        kill_process(self.pid(place), signal).expect("a signal");
        Instant::now()
    }

    pub fn pid(&self, place: usize) -> Pid {
        Pid::from_child(&self.processes[place].child)
    }

    /// Waits until all have ended, and makes sure that they have left nothing behind.
    #[track_caller]
    pub fn outcomes(mut self) -> Vec<Outcome> {
        let begin = Instant::now();
        let mut outcomes = Vec::new();
        for place in 0..self.processes.len() {
            let status = self.processes[place].wait(begin, self.deadline);
            let process = &self.processes[place];
            let heard = process.heard.lock();
            let Some(status) = status else {
                panic!("rank {} hangs:\n{}", process.rank, heard.text);
            };
            let (ending, at) = heard.ending(status).unwrap_or_else(|| {
                panic!("rank {} ended with {status}:\n{}", process.rank, heard.text)
            });
            outcomes.push(Outcome {
                rank: process.rank,
                ending,
                begun: process.begun,
                at,
                text: heard.text.clone(),
            });
        }
        let pids: Vec<String> = (0..self.processes.len())
            .map(|place| self.pid(place).to_string())
            .collect();
        self.litter.assert_none_added(&self.address, &pids);
        for outcome in &outcomes {
            // As a panic's hook says it.
            assert!(!outcome.text.contains(" panicked at "), "{}", outcome.text);
        }
        outcomes
    }
}

struct Process {
    rank: usize,
    begun: Instant,
    child: Child,
    stdin: ChildStdin,
    heard: Arc<Ear>,
    readers: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Ear {
    heard: Mutex<Heard>,
    changed: Condvar,
}

#[derive(Default)]
struct Heard {
    said: Vec<(String, Instant)>,
    outcome: Option<(Result<String, Error>, Instant)>,
    text: String,
    /// How many of its outputs are still open.
    open: usize,
    closed_at: Option<Instant>,
}

impl Heard {
    fn ending(&self, status: ExitStatus) -> Option<(Ending, Instant)> {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            return Some((Ending::Killed(signal), self.closed_at?));
        }
        let (outcome, at) = self.outcome.clone()?;
        status.success().then_some((Ending::Returned(outcome), at))
    }
}

impl Ear {
    fn lock(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.heard.lock().unwrap()
    }

    fn wait<'a>(
        &self,
        heard: std::sync::MutexGuard<'a, Heard>,
    ) -> std::sync::MutexGuard<'a, Heard> {
        let slice = Duration::from_millis(100);
        self.changed.wait_timeout(heard, slice).unwrap().0
    }

    /// Listens to one output of a process until it ends.
    fn listen(&self, output: impl Read) {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            let mut heard = self.lock();
            let text = without_rank(&line);
            if let Some(said) = text.strip_prefix(SAY) {
                heard.said.push((said.into(), Instant::now()));
            } else if let Some(outcome) = text.strip_prefix(OUTCOME) {
                let outcome = gemmesh::testing::outcome(outcome.as_bytes());
                let outcome = outcome.expect("an outcome");
                heard.outcome = Some((outcome, Instant::now()));
            }
            heard.text += &line;
            heard.text.push('\n');
            self.changed.notify_all();
        }
        let mut heard = self.lock();
        heard.open -= 1;
        heard.closed_at = Some(Instant::now());
        self.changed.notify_all();
    }
}

/// A line without the rank that `gemmesh::launch` puts before it.
fn without_rank(line: &str) -> &str {
    let parts = line
        .strip_prefix('[')
        .and_then(|line| line.split_once("] "));
    match parts {
        Some((rank, text)) if rank.parse::<usize>().is_ok() => text,
        _ => line,
    }
}

impl Process {
    fn start(test: &str, place: usize, rank: usize, address: &str, setting: &Setting) -> Process {
        let begun = Instant::now();
        let mut child = (setting.command)(place)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(TEST, test)
            .env(PLACE, place.to_string())
            .env(ADDRESS, address)
            .env(PARENT, std::process::id().to_string())
            .env(STRETCH, patience::stretch())
            .envs((setting.variables)(place))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a process");
        let heard = Arc::new(Ear::default());
        heard.lock().open = 2;
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let (first, second) = (heard.clone(), heard.clone());
        Process {
            rank,
            begun,
            stdin: child.stdin.take().unwrap(),
            child,
            heard,
            readers: vec![
                std::thread::spawn(move || first.listen(out)),
                std::thread::spawn(move || second.listen(err)),
            ],
        }
    }

    /// Waits until it has ended and so have its outputs, also those that its children hold.
    fn wait(&mut self, begin: Instant, longest: Duration) -> Option<ExitStatus> {
        let mut status = None;
        while begin.elapsed() < stretched(longest) {
            status = status.or_else(|| self.child.try_wait().expect("a child"));
            if status.is_some() && self.readers.iter().all(JoinHandle::is_finished) {
                return status;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What lies where a killed process could have left something.
struct Litter {
    names: Vec<String>,
}

impl Litter {
    fn now() -> Litter {
        let names = ["/dev/shm", "/tmp"].iter().flat_map(|directory| {
            let entries = fs::read_dir(directory).into_iter().flatten().flatten();
            entries.map(|entry| entry.path().to_string_lossy().into_owned())
        });
        Litter {
            names: names.collect(),
        }
    }

    /// Other programs use these directories too; so a new name counts if it tells of us.
    #[track_caller]
    fn assert_none_added(&self, address: &str, pids: &[String]) {
        let ours = |name: &str| {
            let name = name.to_lowercase();
            name.contains("gemmesh")
                || name.contains(address)
                || pids.iter().any(|pid| {
                    name.split(|c: char| !c.is_ascii_digit())
                        .any(|number| number == pid)
                })
        };
        let added: Vec<String> = Litter::now()
            .names
            .into_iter()
            .filter(|name| !self.names.contains(name) && ours(name))
            .collect();
        assert!(added.is_empty(), "left behind: {added:?}");
        let sockets = sockets_of(address);
        assert!(sockets.is_empty(), "left behind: {sockets:?}");
    }
}

/// The abstract sockets of a group that is met, or was met, at `address`.
pub fn sockets_of(address: &str) -> Vec<String> {
    let ours = gemmesh::testing::meeting_texts(address);
    let sockets = fs::read_to_string("/proc/net/unix").expect("the list of sockets");
    let names = sockets.lines().filter_map(|line| line.split_once('@'));
    let names = names.map(|(_, name)| name.to_string());
    names.filter(|name| ours.contains(name)).collect()
}

/// Whether a process runs: it exists, and not only until its parent takes note of its end.
pub fn runs(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(") ").map(|(_, rest)| rest.to_string()))
        .is_some_and(|rest| !rest.starts_with(['Z', 'X']))
}
