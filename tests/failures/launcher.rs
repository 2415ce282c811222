//! The launcher: which rank it returns, and what it leaves. Rank processes inherit the test's environment, so they play
//! the same part.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use gemmesh::error::{Class, Kind};
use gemmesh::launch::{self, Launch};
use gemmesh::{Error, Group, Host, bf16};
use rustix::process::Signal;

use crate::support::errors::{parts, parts_of};
use crate::support::patience::{again_if_busy, stretched};
use crate::support::processes::{
    Outcome, Processes, Rank, Setting, in_namespaces, runs, start, start_with, this_program,
};
use crate::{Arguments, TIMEOUT, noticed, short, test_name};

/// Longer than any test waits for what is killed.
const FOREVER: Duration = Duration::from_secs(3600);

/// This process's arguments name the test.
fn launched(rank: &Rank, world: usize) -> Result<String, Error> {
    assert_eq!(rank.place, 0);
    Launch::new(world)
        .run()
        .map(|()| "all ranks have succeeded".into())
}

/// Starts a process that launches `world` ranks, each of which plays its part.
fn launching(
    test: &str,
    world: usize,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    start(test, &[(0, 1)], |me| match launch::is_rank() {
        true => part(me),
        false => launched(me, world),
    })
}

#[test]
fn launched_ranks_meet_and_their_output_is_forwarded() {
    let ranks = launching(test_name!(), 3, |me| {
        let group = Group::<Host>::from_env()?;
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        me.say(format!("rank {} of {}", group.rank(), group.world_size()));
        let message = format!("an error message of rank {}\n", group.rank());
        std::io::stderr().write_all(message.as_bytes()).unwrap();
        drop(group);
        std::process::exit(0);
    });
    let outcome = &ranks.outcomes()[0];
    assert_eq!(outcome.value(), "all ranks have succeeded");
    let lines: Vec<&str> = outcome.text.lines().collect();
    for rank in 0..3 {
        let said = format!("[{rank}] @say rank {rank} of 3");
        assert!(lines.contains(&&*said), "{lines:?}");
        let written = format!("[{rank}] an error message of rank {rank}");
        assert!(lines.contains(&&*written), "{lines:?}");
    }
}

#[test]
fn lines_that_launched_ranks_write_in_pieces_at_the_same_time_do_not_mix() {
    const LINES: usize = 100;
    let ranks = launching(test_name!(), 4, |_| {
        let group = Group::<Host>::from_env()?;
        let rank = group.rank();
        group.barrier()?;
        for line in 0..LINES {
            // The error output has no buffer: each part is written by itself.
            eprintln!("line {line} of rank {rank}: {} {} {}", 1, 2, 3);
        }
        drop(group);
        std::process::exit(0);
    });
    let outcome = &ranks.outcomes()[0];
    assert_eq!(outcome.value(), "all ranks have succeeded");
    for rank in 0..4 {
        let begin = format!("[{rank}] line ");
        let own: Vec<&str> = outcome
            .text
            .lines()
            .filter(|line| line.starts_with(&begin))
            .collect();
        let written: Vec<String> = (0..LINES)
            .map(|line| format!("{begin}{line} of rank {rank}: 1 2 3"))
            .collect();
        assert_eq!(own, written);
    }
}

#[test]
fn what_launched_ranks_write_last_comes_out_however_they_end() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if launch::is_rank() {
            let rank = std::env::var("GEMMESH_RANK").unwrap();
            std::io::stdout().write_all(b"\nlast words").unwrap();
            std::io::stdout().flush().unwrap();
            eprint!("last words of {rank}");
            match &*rank {
                "0" => std::process::abort(),
                "1" => std::process::exit(3),
                "2" => rustix::process::kill_process(rustix::process::getpid(), Signal::KILL),
                // It is killed.
                _ => rustix::process::kill_process(rustix::process::getpid(), Signal::STOP),
            }
            .unwrap();
            std::thread::sleep(FOREVER);
        }
        let failed = launched(me, 4);
        // The error is returned after all else.
        me.say("returned");
        failed
    });
    let outcome = &ranks.outcomes()[0];
    assert!(matches!(outcome.error().kind(), Kind::RankFailed { .. }));
    let lines: Vec<&str> = outcome.text.lines().collect();
    let place = |what: &str| lines.iter().position(|line| line.ends_with(what));
    for rank in 0..4 {
        let said = place(&format!("[{rank}] last words")).expect("its last words");
        assert!(Some(said) < place("@say returned"));
        assert!(place(&format!("[{rank}] last words of {rank}")).is_some());
    }
}

/// What a launcher's process writes to, other than its parent's pipes.
#[derive(Clone, Copy)]
struct Full {
    out: bool,
    err: bool,
}

/// Makes this process's descriptor of this number the one that `to` is.
fn redirect(number: i32, to: &impl AsFd) {
    // SAFETY: both descriptors are open. The standard library owns neither of the two outputs.
    #[allow(unsafe_code)]
    let done = unsafe { libc::dup2(to.as_fd().as_raw_fd(), number) };
    assert_eq!(done, number);
}

/// Launches two ranks that write a line to each output and end with `status`. The outputs that are `full` are on a full
/// disk meanwhile.
fn launched_onto_a_full_disk(test: &str, full: Full, status: i32) -> Outcome {
    let ranks = start(test, &[(0, 1)], |me| {
        if launch::is_rank() {
            println!("a line");
            eprintln!("an error line");
            std::process::exit(status);
        }
        let disk = File::options().write(true).open("/dev/full").unwrap();
        let out = std::io::stdout().as_fd().try_clone_to_owned().unwrap();
        let err = std::io::stderr().as_fd().try_clone_to_owned().unwrap();
        if full.out {
            redirect(1, &disk);
        }
        if full.err {
            redirect(2, &disk);
        }
        let result = launched(me, 2);
        redirect(1, &out);
        redirect(2, &err);
        result
    });
    ranks.outcomes().remove(0)
}

const NO_SPACE: &str = "No space left on device";

#[test]
fn lines_that_a_full_disk_does_not_take_are_an_error_which_says_how_many_bytes_are_missing() {
    let full = Full {
        out: true,
        err: false,
    };
    let outcome = launched_onto_a_full_disk(test_name!(), full, 0);
    let (None, Kind::System { action, reason }) = (outcome.error().rank(), outcome.error().kind())
    else {
        panic!("{}", outcome.error());
    };
    assert_eq!(action, "write all that ranks printed");
    // libtest writes lines of its own.
    let bytes = reason.split_once(" bytes were not written to standard output: ");
    let (bytes, why) = bytes.expect(reason);
    assert!(bytes.parse::<usize>().unwrap() >= 2 * "[0] a line\n".len());
    assert!(why.contains(NO_SPACE), "{reason}");
    // The error output has told at once, and has the ranks' other lines.
    let lines: Vec<&str> = outcome.text.lines().collect();
    let said = |begin: &str| lines.iter().filter(|line| line.starts_with(begin)).count();
    assert_eq!(said("gemmesh: standard output fails: No space left"), 1);
    for rank in 0..2 {
        assert_eq!(said(&format!("[{rank}] an error line")), 1, "{lines:?}");
    }
}

#[test]
fn an_error_output_on_a_full_disk_is_an_error_too() {
    let full = Full {
        out: false,
        err: true,
    };
    let outcome = launched_onto_a_full_disk(test_name!(), full, 0);
    let error = outcome.error().to_string();
    assert!(error.contains("not written to the error output"), "{error}");
    assert!(!error.contains("standard output"), "{error}");
    assert!(error.contains(NO_SPACE), "{error}");
}

#[test]
fn of_two_outputs_on_a_full_disk_the_error_says_both() {
    let full = Full {
        out: true,
        err: true,
    };
    let outcome = launched_onto_a_full_disk(test_name!(), full, 0);
    let error = outcome.error().to_string();
    assert!(error.contains("not written to standard output"), "{error}");
    assert!(error.contains("not written to the error output"), "{error}");
}

#[test]
fn a_rank_that_fails_is_returned_also_if_a_disk_is_full() {
    let full = Full {
        out: true,
        err: false,
    };
    let outcome = launched_onto_a_full_disk(test_name!(), full, 3);
    assert!(matches!(outcome.error().kind(), Kind::RankFailed { .. }));
    assert!(outcome.text.contains("gemmesh: standard output fails"));
}

#[test]
fn a_launched_rank_shows_its_secret_in_no_text() {
    let ranks = launching(test_name!(), 2, |_| {
        let secret = std::env::var("GEMMESH_ADDRESS").unwrap();
        assert!(launch::is_secret("GEMMESH_ADDRESS"));
        let environment = launch::rank_environment()?;
        let builder = Group::<Host>::builder();
        let mut texts = vec![format!("{environment:?} {builder:?}")];
        let group = Group::<Host>::from_env()?;
        texts.push(format!("{group:?} {group:#?}"));
        // Rank 1 of this one does not come. Its address has the secret's form.
        let other: String = secret
            .chars()
            .rev()
            .filter(|c| c.is_ascii_hexdigit())
            .collect();
        let other = format!("drawn:{}", &other[..32]);
        let alone = Group::<Host>::builder().arrival_timeout(Duration::from_millis(10));
        let missing = alone.connect(0, 2, &other).unwrap_err();
        texts.push(format!("{missing} {missing:?} {missing:#?}"));
        group.barrier()?;
        for piece in [&secret[6..14], &secret[30..], &other[6..14], &other[30..]] {
            assert!(texts.iter().all(|text| !text.contains(piece)), "{texts:?}");
        }
        drop(group);
        std::process::exit(0);
    });
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

/// Says what it reads from standard input.
fn say_input(me: &Rank) -> ! {
    let mut input = String::new();
    std::io::stdin().read_line(&mut input).unwrap();
    let rank = std::env::var("GEMMESH_RANK").unwrap();
    me.say(format!("rank {rank} reads {input:?}"));
    std::process::exit(0);
}

#[test]
fn ranks_have_no_input() {
    let mut ranks = launching(test_name!(), 2, |me| say_input(me));
    ranks.tell(0);
    ranks.heard(0, "rank 0 reads \"\"");
    ranks.heard(0, "rank 1 reads \"\"");
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

#[test]
fn rank_0_reads_the_launchers_input_if_it_is_to() {
    let mut ranks = start(test_name!(), &[(0, 1)], |me| {
        if launch::is_rank() {
            say_input(me);
        }
        let launch = Launch::new(2).inherit_stdin();
        assert_eq!(format!("{launch:?}"), "Launch(ranks 2, inherit_stdin)");
        launch.run().map(|()| String::new())
    });
    ranks.tell(0);
    ranks.heard(0, "rank 0 reads \"go on\\n\"");
    ranks.heard(0, "rank 1 reads \"\"");
    ranks.outcomes()[0].value();
}

#[test]
fn a_program_that_has_changed_its_folder_launches_itself_in_the_new_one() {
    let by_relative_path = |_| {
        let mut command = Command::new("sh");
        let script = r#"cd "$(dirname "$0")" && exec "./$(basename "$0")" "$@""#;
        command.arg("-c").arg(script).arg(this_program());
        command
    };
    let setting = Setting {
        command: &by_relative_path,
        ..Setting::default()
    };
    let ranks = start_with(test_name!(), &[(0, 1)], &setting, |me| {
        if launch::is_rank() {
            me.say(std::env::current_dir().unwrap().display());
            std::process::exit(0);
        }
        std::env::set_current_dir("/").unwrap();
        launched(me, 2)
    });
    ranks.heard(0, "/");
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

#[test]
fn a_process_that_a_launched_rank_leaves_behind_is_not_waited_for() {
    let ranks = launching(test_name!(), 2, |me| {
        let left = Command::new("sleep").arg("300").spawn();
        me.say(format!("left {}", left.unwrap().id()));
        std::process::exit(0);
    });
    let outcomes = ranks.outcomes();
    let lines = outcomes[0].text.lines();
    for pid in lines.filter_map(|line| line.split_once("@say left ")) {
        let pid = rustix::process::Pid::from_raw(pid.1.parse().unwrap()).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }
    assert_eq!(outcomes[0].value(), "all ranks have succeeded");
}

/// How `ps` shows this process: its name, and the program in its command line.
fn shown() -> String {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).unwrap();
    let command = read("cmdline");
    let program = command.split('\0').next().unwrap();
    format!("{} {program}", read("comm").trim_end())
}

#[test]
fn ps_shows_launched_ranks_by_the_name_of_the_program() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            return launched(me, 2).map(|_| shown());
        }
        me.say(shown());
        std::process::exit(0);
    });
    let outcomes = ranks.outcomes();
    let launcher = outcomes[0].value();
    for rank in 0..2 {
        let said = format!("[{rank}] @say {launcher}");
        assert!(outcomes[0].text.contains(&said), "{}", outcomes[0].text);
    }
    assert!(!launcher.starts_with("exe "), "{launcher}");
}

#[test]
fn a_program_whose_file_has_been_replaced_launches_itself_and_not_the_new_one() {
    let test = test_name!();
    let file = this_program().with_file_name(format!("replaced-{}", std::process::id()));
    let setting = Setting {
        command: &|_| {
            std::fs::hard_link(this_program(), &file).unwrap();
            Command::new(&file)
        },
        ..Setting::default()
    };
    let ranks = start_with(test, &[(0, 1)], &setting, |me| {
        if launch::is_rank() {
            std::process::exit(0);
        }
        let own = this_program();
        std::fs::remove_file(&own).unwrap();
        std::os::unix::fs::symlink("/bin/false", &own).unwrap();
        let launched = launched(me, 2);
        std::fs::remove_file(&own).unwrap();
        launched
    });
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

/// As the agent of mpiexec: starts this process again as `world` ranks, each through a shell that waits for it, in a
/// shell that does.
fn started_through_shells(world: usize) -> Result<String, Error> {
    const SHELL: &str = r#""$@"; exit $?"#;
    let this: Vec<_> = std::env::args_os().collect();
    let start = |rank: usize| {
        let mut command = Command::new("sh");
        command.args(["-c", SHELL, "sh", "sh", "-c", SHELL, "sh"]);
        command.args(&this).stdin(Stdio::null());
        command.env("PMI_RANK", rank.to_string());
        command.env("PMI_SIZE", world.to_string());
        command.env("MPI_LOCALNRANKS", world.to_string());
        command.spawn().expect("a shell")
    };
    let ranks: Vec<_> = (0..world).map(start).collect();
    for mut rank in ranks {
        assert!(rank.wait().expect("its end").success());
    }
    Ok("all ranks have succeeded".into())
}

#[test]
fn ranks_that_a_launcher_starts_through_wrappers_meet_those_of_their_own_job() {
    let test = test_name!();
    // Two jobs at once, whose ranks are told nothing else.
    let jobs = start(test, &[(0, 1), (0, 1)], |me| {
        if !launch::is_rank() {
            return started_through_shells(2);
        }
        let builder = Group::<Host>::builder().timeout(short());
        let group = builder.from_env()?;
        group.barrier()?;
        me.say(format!("rank {} of {}", group.rank(), group.world_size()));
        drop(group);
        std::process::exit(0);
    });
    for outcome in jobs.outcomes() {
        assert_eq!(outcome.value(), "all ranks have succeeded");
        for rank in 0..2 {
            let said = format!("rank {rank} of 2");
            assert_eq!(outcome.text.matches(&said).count(), 1, "{}", outcome.text);
        }
    }
}

#[test]
fn ranks_of_one_launcher_meet_whichever_time_namespaces_they_are_in() {
    let Some(ahead) = in_namespaces(&["--time", "--boottime", "100000", "--fork", "--kill-child"])
    else {
        return;
    };
    // This process stands for mpiexec's agent.
    let setting = Setting {
        command: &|place| match place {
            0 => ahead(),
            _ => Command::new(this_program()),
        },
        variables: &|place| {
            let variables = [("PMI_RANK", place), ("PMI_SIZE", 2), ("MPI_LOCALNRANKS", 2)];
            variables
                .map(|(name, value)| (name, value.to_string()))
                .into()
        },
        ..Setting::default()
    };
    let ranks = start_with(test_name!(), &[(0, 2), (1, 2)], &setting, |_| {
        let group = Group::<Host>::builder().timeout(TIMEOUT).from_env()?;
        group.barrier().map(|()| "met".into())
    });
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "met");
    }
}

#[test]
fn the_first_launched_rank_that_fails_is_returned_and_the_others_are_killed() {
    // A rank may find that another has died before it finds that their barrier is complete, and then ends by itself.
    again_if_busy(|| {
        let ranks = launching(test_name!(), 3, |me| {
            let group = Group::<Host>::from_env()?;
            me.say(format!("pid {}", std::process::id()));
            group.barrier()?;
            if group.rank() == 1 {
                std::process::exit(7);
            }
            // The others don't end by themselves.
            std::thread::sleep(FOREVER);
            std::process::exit(0);
        });
        let begin = Instant::now();
        let outcome = &ranks.outcomes()[0];
        assert!(begin.elapsed() < stretched(Duration::from_secs(30)));
        match parts(outcome.error()) {
            (Some(rank), Kind::RankFailed { status, killed, .. }) => {
                assert_eq!((rank, killed.as_slice()), (1, &[0, 2][..]));
                assert!(status.contains('7'), "{status}");
            }
            other => panic!("{other:?}"),
        }
        let words = outcome.error().to_string();
        let says =
            "; the launcher killed ranks 0 and 2, which still ran 1.5 seconds after the failure";
        assert!(words.ends_with(says), "{words}");
        assert_all_ended(&outcome.text, 3);
    });
}

#[test]
fn a_launched_rank_that_is_killed_is_returned() {
    let ranks = launching(test_name!(), 3, |me| {
        let group = Group::<Host>::from_env()?;
        me.say(format!("pid {}", std::process::id()));
        group.barrier()?;
        if group.rank() == 2 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        }
        // The others find it lost and fail at once, on its account.
        std::process::exit(group.barrier().is_err().into());
    });
    let outcome = &ranks.outcomes()[0];
    match parts(outcome.error()) {
        (Some(rank), Kind::RankFailed { status, .. }) => {
            assert_eq!(rank, 2);
            assert!(status.contains("signal: 9"), "{status}");
        }
        other => panic!("{other:?}"),
    }
    assert_all_ended(&outcome.text, 3);
}

#[test]
fn launched_ranks_die_with_their_launcher() {
    let ranks = launching(test_name!(), 3, |me| {
        let group = Group::<Host>::from_env()?;
        me.say(format!("pid {}", std::process::id()));
        group.barrier()?;
        me.say(format!("rank {} is here", group.rank()));
        std::thread::sleep(FOREVER);
        std::process::exit(0);
    });
    for rank in 0..3 {
        ranks.heard(0, &format!("rank {rank} is here"));
    }
    let killed = ranks.signal(0, Signal::KILL);
    // Also the ends of their outputs have been waited for here.
    let outcome = &ranks.outcomes()[0];
    outcome.assert_killed();
    assert!(outcome.at - killed < noticed());
    assert_all_ended(&outcome.text, 3);
}

/// Says in the environment of launched ranks what they are to do.
const PART: &str = "GEMMESH_TEST_PART";

/// What is wrong with one of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Panics,
    ExitsWith3,
    ReturnsAnError,
    ReturnsEarly,
    ExitsWith0,
    IsKilled,
}

impl Fault {
    const ALL: [Fault; 6] = [
        Fault::Panics,
        Fault::ExitsWith3,
        Fault::ReturnsAnError,
        Fault::ReturnsEarly,
        Fault::ExitsWith0,
        Fault::IsKilled,
    ];

    fn status(self) -> &'static str {
        match self {
            Fault::Panics => "exit status: 101",
            Fault::ExitsWith3 => "exit status: 3",
            Fault::ReturnsAnError => "exit status: 1",
            Fault::ReturnsEarly | Fault::ExitsWith0 => "exit status: 0",
            Fault::IsKilled => "signal: 9 (SIGKILL)",
        }
    }

    /// Whether `error` is what the other ranks see of it, if `faulty` has it.
    fn is_seen_as(self, error: &Error, faulty: usize) -> bool {
        let is_seen = match self {
            Fault::ReturnsAnError | Fault::ReturnsEarly => {
                matches!(error.kind(), Kind::RankLeft { .. })
            }
            Fault::Panics => matches!(error.kind(), Kind::RankPanicked { .. }),
            _ => matches!(error.kind(), Kind::RankLost { .. }),
        };
        is_seen && error.rank() == Some(faulty)
    }
}

/// Ends a launched rank as a `main` that returns `result` would.
fn end(result: Result<(), Error>) -> ! {
    std::process::exit(result.is_err().into())
}

/// Launches three ranks of `test` with each fault, `times` times each, on rank `faulty`, and lists what was returned
/// and is wrong; in such a rank: plays its part.
fn faulty(test: &str, faulty: usize, times: usize) -> Result<String, Error> {
    if !launch::is_rank() {
        let mut wrong = Vec::new();
        for fault in Fault::ALL {
            for time in 0..times {
                let result = Launch::new(3)
                    .args(["--exact", test])
                    .args(["--nocapture", "--test-threads=1"])
                    .env(PART, format!("{fault:?}"))
                    .run();
                let right = match parts_of(&result) {
                    Some((
                        Some(rank),
                        Kind::RankFailed {
                            status,
                            cause: Some(cause),
                            ..
                        },
                    )) => {
                        (rank, status.as_str()) == (faulty, fault.status())
                            && fault.is_seen_as(cause, faulty)
                    }
                    _ => false,
                };
                if !right {
                    wrong.push(format!("{fault:?}, time {time}: {result:?}"));
                }
            }
        }
        return Ok(wrong.join("\n"));
    }
    let part = std::env::var(PART).unwrap();
    let fault = Fault::ALL.into_iter().find(|f| format!("{f:?}") == part);
    let group = Group::<Host>::from_env()?;
    let met = group.barrier();
    if group.rank() != faulty {
        // The faulty rank may be gone before this one is out of the first.
        let result = met.and_then(|()| group.barrier());
        drop(group);
        end(result);
    }
    match fault.unwrap() {
        Fault::Panics => {
            let _dropped_by_the_panic = group;
            std::panic::resume_unwind(Box::new("planted"));
        }
        Fault::ExitsWith3 => std::process::exit(3),
        Fault::ReturnsAnError => {
            drop(group);
            end(Err(Kind::Capturing.on(faulty)));
        }
        Fault::ReturnsEarly => {
            drop(group);
            end(Ok(()));
        }
        Fault::ExitsWith0 => std::process::exit(0),
        Fault::IsKilled => {
            rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
            unreachable!("killed");
        }
    }
}

#[test]
fn the_rank_that_made_the_others_fail_is_returned_with_the_cause_however_it_ends() {
    again_if_busy(|| {
        let test = test_name!();
        let ranks = start(test, &[(0, 1)], |_| faulty(test, 1, 12));
        assert_eq!(ranks.outcomes()[0].value(), "", "wrong");
    });
}

#[test]
fn rank_0_that_made_the_others_fail_is_returned_with_the_cause_however_it_ends() {
    again_if_busy(|| {
        let test = test_name!();
        let ranks = start(test, &[(0, 1)], |_| faulty(test, 0, 12));
        assert_eq!(ranks.outcomes()[0].value(), "", "wrong");
    });
}

/// What the launch of three ranks returns, each of which is `part`. It leaves nothing open, here or in the ranks.
#[track_caller]
fn launched_failure(test: &str, part: impl Fn() -> Result<(), Error>) -> Error {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let ranks = start(test, &[(0, 1)], |me| {
        if launch::is_rank() {
            let launchers = std::env::var(PART).unwrap().parse().unwrap();
            assert!(open() <= launchers, "inherited");
            end(part());
        }
        assert_eq!(me.place, 0);
        let before = open();
        let result = Launch::new(3)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(PART, before.to_string())
            .run();
        assert_eq!(open(), before, "left open");
        result.map(|()| "all ranks have succeeded".into())
    });
    ranks.outcomes()[0].error().clone()
}

#[track_caller]
fn assert_failed(error: &Error, culprit: usize, its_status: &str) -> Option<Error> {
    let Kind::RankFailed { status, cause, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(
        (error.rank(), status.as_str()),
        (Some(culprit), its_status),
        "{error}"
    );
    cause.clone()
}

#[test]
fn launched_ranks_without_a_group_are_judged_by_how_they_end() {
    let error = launched_failure(test_name!(), || {
        if std::env::var("GEMMESH_RANK").unwrap() == "1" {
            std::process::exit(4);
        }
        Ok(())
    });
    assert_eq!(assert_failed(&error, 1, "exit status: 4"), None);
}

#[test]
fn a_launched_rank_that_ends_before_the_others_meet_it_is_returned() {
    ends_before_the_others_meet_it(test_name!(), 1);
}

#[test]
fn a_launched_rank_0_that_ends_before_the_others_meet_it_is_returned() {
    ends_before_the_others_meet_it(test_name!(), 0);
}

/// The others know that rank `missing` has ended, and do not wait for it.
#[track_caller]
fn ends_before_the_others_meet_it(test: &str, missing: usize) {
    let error = launched_failure(test, || {
        if std::env::var("GEMMESH_RANK").unwrap() == missing.to_string() {
            return Ok(());
        }
        Group::<Host>::from_env().map(drop)
    });
    let cause = assert_failed(&error, missing, "exit status: 0").expect("a cause");
    assert_eq!(cause, Kind::NeverJoined.on(missing));
}

#[test]
fn a_launched_rank_that_never_calls_is_returned_and_killed() {
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::builder()
            .arrival_timeout(2 * short())
            .from_env()?;
        group.barrier()?;
        if group.rank() == 2 {
            std::thread::sleep(FOREVER);
        }
        group.barrier()
    });
    let cause = assert_failed(&error, 2, "still running, and killed").expect("a cause");
    assert!(
        matches!(
            (cause.rank(), cause.kind()),
            (Some(2), Kind::Timeout { .. })
        ),
        "{cause}"
    );
}

#[test]
fn the_failure_of_an_earlier_group_is_not_the_cause() {
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::from_env()?;
        let m = if group.rank() == 1 { 9 } else { 6 };
        group.sharded::<bf16>(m, 4).map(drop).unwrap_err();
        drop(group);
        let group = Group::<Host>::from_env()?;
        let rank = group.rank();
        group.barrier()?;
        drop(group);
        if rank == 2 {
            std::process::exit(5);
        }
        Ok(())
    });
    assert_eq!(assert_failed(&error, 2, "exit status: 5"), None);
}

#[test]
fn the_failure_of_a_later_group_is_the_cause() {
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::from_env()?;
        group.barrier()?;
        drop(group);
        let group = Group::<Host>::from_env()?;
        if group.rank() == 1 {
            return Ok(());
        }
        group.barrier()
    });
    let cause = assert_failed(&error, 1, "exit status: 0").expect("a cause");
    assert!(
        matches!(
            (cause.rank(), cause.kind()),
            (Some(1), Kind::RankLeft { .. })
        ),
        "{cause}"
    );
}

/// What becomes of children: as `nohup`-like parents leave it, and as a program may set it.
fn ignore_children(flags: i32) {
    // SAFETY: the default action or none, of zeroed bytes, which are a valid action.
    #[allow(unsafe_code)]
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_flags = flags;
        action.sa_sigaction = if flags == 0 {
            libc::SIG_IGN
        } else {
            libc::SIG_DFL
        };
        assert_eq!(
            libc::sigaction(libc::SIGCHLD, &action, std::ptr::null_mut()),
            0
        );
    }
}

/// Whether this process ignores SIGCHLD, as the kernel has it.
fn ignores_children() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.unwrap().trim(), 16).unwrap();
    ignored >> (libc::SIGCHLD - 1) & 1 == 1
}

#[test]
fn a_process_that_ignores_its_children_learns_how_its_ranks_end() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |_| {
        if launch::is_rank() {
            let group = Group::<Host>::from_env()?;
            group.barrier()?;
            let rank = group.rank();
            drop(group);
            let fails = std::env::var(PART).as_deref() == Ok("fail");
            std::process::exit(if fails && rank == 1 { 3 } else { 0 });
        }
        let launch = |part: &str| {
            let launch = Launch::new(2).args(["--exact", test, "--nocapture", "--test-threads=1"]);
            launch.env(PART, part).run()
        };
        for flags in [0, libc::SA_NOCLDWAIT] {
            ignore_children(flags);
            // Of two at once, the first that ends leaves the other's ranks to be waited for.
            std::thread::scope(|scope| {
                let other = scope.spawn(|| launch("succeed"));
                assert_eq!(launch("succeed"), Ok(()));
                assert_eq!(other.join().unwrap(), Ok(()));
            });
            let failed = launch("fail").unwrap_err();
            assert_eq!(assert_failed(&failed, 1, "exit status: 3"), None);
            assert_eq!(ignores_children(), flags == 0, "as it was");
        }
        Ok("all ranks were seen to end".into())
    });
    assert_eq!(ranks.outcomes()[0].value(), "all ranks were seen to end");
}

#[test]
fn a_rank_that_is_stopped_when_its_group_has_failed_and_the_others_have_ended_is_returned_and_killed()
 {
    let begin = Instant::now();
    let error = launched_failure(test_name!(), || {
        let group = Group::<Host>::builder()
            .arrival_timeout(2 * short())
            .from_env()?;
        group.barrier()?;
        if group.rank() == 1 {
            rustix::process::kill_process(rustix::process::getpid(), Signal::STOP).unwrap();
            // Another thread may take the signal first.
            std::thread::sleep(FOREVER);
        }
        // The others bear it, and succeed.
        group.barrier().unwrap_err();
        Ok(())
    });
    let cause = assert_failed(&error, 1, "still running, and killed").expect("a cause");
    assert!(
        matches!(
            (cause.rank(), cause.kind()),
            (Some(1), Kind::Timeout { .. })
        ),
        "{cause}"
    );
    assert!(begin.elapsed() < stretched(Duration::from_secs(30)));
}

/// How many processes of this program this one descends from.
fn generation() -> usize {
    let program = |pid: &str| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
    let parent = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (_, fields) = stat.rsplit_once(')')?;
        fields.split_whitespace().nth(1).map(str::to_string)
    };
    let own = program("self");
    let ancestors = std::iter::successors(parent("self"), |pid| parent(pid));
    ancestors.take_while(|pid| program(pid) == own).count()
}

/// Tries to launch as a rank of some launcher. Were it possible, the ranks would try too: those of a third generation
/// don't.
fn launch_as_rank(me: &Rank, test: &str) -> Result<String, Error> {
    if generation() > 2 {
        me.say("a rank of a rank");
        std::process::exit(1);
    }
    let refused = |result: Result<(), Error>| match result {
        Err(error) if error.kind().class() == Class::Misuse => {
            let said = error.to_string();
            let (_, launcher) = said.split_once("started by ").expect("a launcher");
            launcher.split_once(", and cannot").unwrap().0.to_string()
        }
        other => panic!("not refused: {other:?}"),
    };
    let simple = refused(launch::launch(2));
    let builder = Launch::new(2).args(["--exact", test, "--nocapture", "--test-threads=1"]);
    assert_eq!(refused(builder.run()), simple);
    me.say(format!("refused: {simple}"));
    Ok(simple)
}

#[test]
fn a_launched_rank_cannot_launch() {
    let test = test_name!();
    let ranks = launching(test, 2, |me| {
        launch_as_rank(me, test)?;
        std::process::exit(0);
    });
    ranks.heard(0, "refused: gemmesh::launch");
    let said = ranks.said(0);
    assert!(!said.contains(&"a rank of a rank".into()), "{said:?}");
    assert_eq!(ranks.outcomes()[0].value(), "all ranks have succeeded");
}

#[test]
fn a_rank_of_another_launcher_cannot_launch() {
    let test = test_name!();
    let environments: [&[(&str, &str)]; 3] = [
        &[
            ("GEMMESH_RANK", "0"),
            ("GEMMESH_WORLD_SIZE", "1"),
            ("GEMMESH_ADDRESS", "by hand"),
        ],
        &[
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ],
        &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
    ];
    let variables = |place: usize| {
        let variables = environments[place].iter();
        variables.map(|&(k, v)| (k, v.to_string())).collect()
    };
    let setting = Setting {
        variables: &variables,
        ..Setting::default()
    };
    let places = [(0, 1), (1, 1), (2, 1)];
    let ranks = start_with(test, &places, &setting, |me| launch_as_rank(me, test));
    let outcomes = ranks.outcomes();
    let launchers: Vec<&str> = outcomes.iter().map(Outcome::value).collect();
    let expected = ["gemmesh::launch", "torchrun", "a PMI launcher (mpiexec)"];
    assert_eq!(launchers, expected);
}

#[track_caller]
fn assert_all_ended(text: &str, world: usize) {
    let pids: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_once("pid "))
        .map(|(_, pid)| pid.trim())
        .collect();
    assert_eq!(pids.len(), world, "{text}");
    // A process that is killed closes its outputs before it has ended.
    let deadline = Instant::now() + noticed();
    for pid in pids {
        while runs(pid) {
            assert!(Instant::now() < deadline, "process {pid} still runs");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
