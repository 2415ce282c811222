//! Who gets into a group, and who can keep others out: other users, namespaces, names that are held, floods of
//! connections.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::launch::{self, Launch};
use gemmesh::testing::{PROTOCOL_VERSION, meeting_texts};
use gemmesh::{Error, Group, Host, all_gather_matmul};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::support::errors::{kind_of, parts, parts_of};
use crate::support::patience::{again_if_busy, stretched};
use crate::support::processes::{
    Rank, Setting, as_user, in_namespaces, start, start_with, this_program,
};
use crate::support::tested::{Tested, ranks};
use crate::{Arguments, PROMPT, TIMEOUT, short, test_name};

/// Not this user, whoever that is.
const STRANGER: u32 = 4_242;

fn name(text: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(text).unwrap()
}

/// An address of no other test.
fn address(test: &str) -> String {
    format!("{test} of {}", std::process::id())
}

fn meet(rank: usize, world: usize, address: &str, timeout: Duration) -> Result<(), Error> {
    let builder = Group::<Host>::builder().arrival_timeout(timeout).workers(1);
    builder.connect(rank, world, address)?.barrier()
}

/// Tries until it succeeds.
#[track_caller]
fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            begin.elapsed() < stretched(PROMPT),
            "{what} is waited for in vain"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What a rank says, as any process can that has read this library's source.
fn introduction(rank: u32, world: usize) -> Vec<u8> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let (boot_id, pid) = (boot_id.trim(), std::process::id());
    let words =
        format!(r#"{{"world":{world},"backend":"host","boot_id":"{boot_id}","pid":{pid}}}"#);
    let numbers = [PROTOCOL_VERSION, rank, words.len() as u32];
    let numbers = numbers.map(u32::to_le_bytes).concat();
    [b"gemmesh\0", numbers.as_slice(), words.as_bytes()].concat()
}

/// How many bytes come before the other end closes the connection.
fn bytes_from(mut stream: &UnixStream) -> usize {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes.len(),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => bytes.len(),
        Err(error) => panic!("{error} after {} bytes", bytes.len()),
    }
}

/// Another user's process: it listens where rank 0 would, and then says that it is rank 1.
fn intrude(me: &Rank) -> Result<String, Error> {
    let names = meeting_texts(&me.address);
    let listener = UnixListener::bind_addr(&name(&names[0])).unwrap();
    me.say("listens");
    let rank_0 = until("rank 0", || UnixStream::connect_addr(&name(&names[1])).ok());
    // It may be dropped before it has said all.
    let _ = (&rank_0).write_all(&introduction(1, 2));
    assert_eq!(bytes_from(&rank_0), 0, "rank 0 answers");
    me.say("was turned away");
    me.hear();
    listener.set_nonblocking(true).unwrap();
    let mut visitors = 0;
    while let Ok((visitor, _)) = listener.accept() {
        assert_eq!(bytes_from(&visitor), 0, "a rank speaks to a stranger");
        visitors += 1;
    }
    Ok(format!(
        "{} ranks looked",
        if visitors > 0 { "the" } else { "no" }
    ))
}

/// Launches two ranks, and in such a rank: meets the other at the test's address.
fn launch_two(me: &Rank, test: &str) -> Result<String, Error> {
    if !launch::is_rank() {
        me.hear();
        let launch = Launch::new(2).args(["--exact", test, "--nocapture", "--test-threads=1"]);
        let result = launch.run();
        me.say("over");
        return result.map(|()| "both have met".into());
    }
    let rank: usize = std::env::var("GEMMESH_RANK").unwrap().parse().unwrap();
    if rank == 1 {
        let gate = name(&format!("gate of {}", me.address));
        until("the gate", || UnixStream::connect_addr(&gate).ok());
    }
    let met = meet(rank, 2, &me.address, TIMEOUT);
    if let Err(error) = &met {
        eprintln!("rank {rank}: {error}");
    }
    std::process::exit(met.is_err().into())
}

/// Two ranks that `command` starts this test's first process with, and an intruder.
#[track_caller]
fn assert_intruder_gets_nothing(test: &str, command: impl Fn() -> Command) {
    let Some(stranger) = as_user(STRANGER) else {
        return;
    };
    let command = |place| match place {
        0 => command(),
        _ => stranger(),
    };
    let setting = Setting {
        command: &command,
        ..Setting::default()
    };
    let mut ranks = start_with(test, &[(0, 2), (1, 2)], &setting, |me| match me.place {
        0 => launch_two(me, test),
        _ => intrude(me),
    });
    ranks.heard(1, "listens");
    ranks.tell(0);
    ranks.heard(1, "was turned away");
    let _gate = UnixListener::bind_addr(&name(&format!("gate of {}", ranks.address))).unwrap();
    // Rank 1 has seen who listens at the first name before it met the other.
    ranks.heard(0, "over");
    ranks.tell(1);
    let outcomes = ranks.outcomes();
    assert_eq!(outcomes[0].value(), "both have met");
    assert_eq!(outcomes[1].value(), "the ranks looked");
}

#[test]
fn another_user_gets_nothing_and_keeps_no_rank_away() {
    assert_intruder_gets_nothing(test_name!(), || Command::new(this_program()));
}

#[test]
fn another_user_gets_nothing_from_ranks_whose_user_is_not_mapped() {
    if let Some(command) = in_namespaces(&["--user"]) {
        assert_intruder_gets_nothing(test_name!(), command);
    }
}

#[test]
fn another_user_gets_nothing_from_nobody_of_a_container() {
    if let Some(command) = in_namespaces(&["--user", "--map-user=65534", "--map-group=65534"]) {
        assert_intruder_gets_nothing(test_name!(), command);
    }
}

/// Another user's process holds all names, each with a queue for so many, while these of two ranks look for each other.
fn assert_user_is_named(test: &str, queue: i32, looking: &[usize]) {
    let Some(stranger) = as_user(STRANGER) else {
        return;
    };
    let holder = looking.len();
    let command = |place| match place == holder {
        true => stranger(),
        false => Command::new(this_program()),
    };
    let setting = Setting {
        command: &command,
        ..Setting::default()
    };
    let places: Vec<_> = looking.iter().chain(&[2]).map(|&rank| (rank, 2)).collect();
    let mut ranks = start_with(test, &places, &setting, |me| {
        if me.rank < 2 {
            me.hear();
            let timeout = Duration::from_secs(1);
            let met = meet(me.rank, 2, &me.address, timeout);
            me.say("over");
            return met.map(|()| "met".into());
        }
        let texts = meeting_texts(&me.address);
        let _all: Vec<_> = texts.iter().map(|text| listen(text, queue)).collect();
        me.say("holds all");
        me.hear();
        Ok("was there".into())
    });
    ranks.heard(holder, "holds all");
    (0..holder).for_each(|place| ranks.tell(place));
    let named = format!("process {} of user {STRANGER}", ranks.pid(holder));
    for place in 0..holder {
        ranks.heard(place, "over");
    }
    ranks.tell(holder);
    for outcome in &ranks.outcomes()[..holder] {
        match parts(outcome.error()) {
            (_, Kind::AddressTaken { holder, .. }) => assert_eq!(*holder, named),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_user_who_holds_all_names_is_named() {
    assert_user_is_named(test_name!(), 4096, &[0, 1]);
}

// One rank alone, whose first try comes before the queues are full.

#[test]
fn a_user_who_holds_all_names_and_accepts_few_is_named_by_rank_0() {
    assert_user_is_named(test_name!(), 4, &[0]);
}

#[test]
fn a_user_who_holds_all_names_and_accepts_few_is_named_by_another_rank() {
    assert_user_is_named(test_name!(), 4, &[1]);
}

fn socket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

/// Listens at a name, with a queue for one more than `queue`.
fn listen(text: &str, queue: i32) -> OwnedFd {
    let listener = socket();
    let name = SocketAddrUnix::new_abstract_name(text.as_bytes()).unwrap();
    net::bind(&listener, &name).unwrap();
    net::listen(&listener, queue).unwrap();
    listener
}

/// Whoever holds all names, and whose queues are full.
fn hold_all_and_accept_nobody(address: &str) -> Vec<OwnedFd> {
    let mut held = Vec::new();
    for text in meeting_texts(address) {
        held.push(listen(&text, 0));
        let name = SocketAddrUnix::new_abstract_name(text.as_bytes()).unwrap();
        until("a full queue", || {
            held.push(socket());
            let connected = net::connect(held.last()?, &name);
            (connected == Err(Errno::AGAIN)).then_some(())
        });
    }
    held
}

#[test]
fn who_holds_all_names_and_accepts_nobody_is_in_the_way() {
    let address = &address(test_name!());
    let _held = hold_all_and_accept_nobody(address);
    std::thread::scope(|scope| {
        let meet = |rank| scope.spawn(move || meet(rank, 2, address, short()));
        for rank in [0, 1].map(meet) {
            match parts_of(&rank.join().unwrap()) {
                Some((_, Kind::AddressTaken { holder, .. })) => {
                    assert_eq!(holder, "a process that accepts no connections");
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

#[test]
fn rank_0_that_accepts_nobody_is_missing() {
    let address = &address(test_name!());
    let mut held = hold_all_and_accept_nobody(address);
    // The listener at the last name, and who waits there.
    held.truncate(held.len() - held.len() / meeting_texts(address).len());
    let met = meet(1, 2, address, Duration::from_millis(100));
    assert!(
        matches!(kind_of(&met), Some(Kind::RanksMissing { ranks, .. }) if ranks == &[0]),
        "{met:?}"
    );
}

#[test]
fn ranks_that_cannot_tell_their_user_from_others_say_so() {
    let Some(alone) = in_namespaces(&["--user"]) else {
        return;
    };
    let setting = Setting {
        command: &|_| alone(),
        ..Setting::default()
    };
    // Each in a namespace of its own, where they could be anybody's.
    let timeout = 2 * short();
    let mut ranks = start_with(test_name!(), &[(0, 2), (1, 2)], &setting, |me| {
        me.say("here");
        me.hear();
        meet(me.rank, 2, &me.address, timeout).map(|()| "met".into())
    });
    ranks.all_heard("here");
    (0..2).for_each(|place| ranks.tell(place));
    for outcome in ranks.outcomes() {
        let error = outcome.error().to_string();
        assert!(
            matches!(outcome.error().kind(), Kind::RanksMissing { .. }),
            "{error}"
        );
        assert!(error.contains("runs as user 65534"), "{error}");
        assert!(
            error.contains("run the ranks as a user of another number"),
            "{error}"
        );
    }
}

/// Two ranks of a product, each of which `command` starts.
#[track_caller]
fn assert_meet(test: &str, command: &dyn Fn(usize) -> Command) {
    let setting = Setting {
        command,
        ..Setting::default()
    };
    let ranks = start_with(test, &[(0, 2), (1, 2)], &setting, |me| {
        let group = me.connect(TIMEOUT)?;
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        group.barrier().map(|()| "done".into())
    });
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "done");
    }
}

#[test]
fn ranks_in_pid_namespaces_of_their_own_meet() {
    if let Some(alone) = in_namespaces(&["--pid", "--fork", "--kill-child"]) {
        assert_meet(test_name!(), &|_| alone());
    }
}

#[test]
fn a_rank_in_a_pid_namespace_meets_one_outside() {
    if let Some(within) = in_namespaces(&["--pid", "--fork", "--kill-child"]) {
        assert_meet(test_name!(), &|place| match place {
            0 => Command::new(this_program()),
            _ => within(),
        });
    }
}

#[test]
fn a_rank_in_a_user_namespace_meets_the_same_user_outside() {
    if let Some(within) = in_namespaces(&["--user", "--map-user=7", "--map-group=7"]) {
        assert_meet(test_name!(), &|place| match place {
            0 => Command::new(this_program()),
            _ => within(),
        });
    }
}

#[test]
fn a_refusal_in_another_time_namespace_is_as_old_as_it_is() {
    let ahead = ["--time", "--monotonic", "100000", "--fork", "--kill-child"];
    let Some(ahead) = in_namespaces(&ahead) else {
        return;
    };
    let command = |place| match place {
        0 => ahead(),
        _ => Command::new(this_program()),
    };
    let setting = Setting {
        command: &command,
        ..Setting::default()
    };
    // The rank that is refused may run again too late for the others.
    again_if_busy(|| {
        let ranks = start_with(test_name!(), &[(0, 2), (1, 2)], &setting, |me| {
            let group = me.connect(TIMEOUT)?;
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            if me.rank == 1 {
                // Longer than the others give to a rank that was refused.
                std::thread::sleep(Duration::from_millis(700));
                let wrong = group.zeros::<gemmesh::bf16>(5, 3)?;
                all_gather_matmul(&arguments.a, &wrong, &mut arguments.out).unwrap_err();
                std::thread::sleep(Duration::from_millis(20));
            }
            arguments.run()?;
            group.barrier().map(|()| "done".into())
        });
        for outcome in ranks.outcomes() {
            assert_eq!(outcome.value(), "done");
        }
    });
}

#[test]
fn ranks_go_by_their_effective_user() {
    let ranks = ranks::<Host>(test_name!(), 2, |rank| {
        use rustix::process::{Uid, getuid};
        if !getuid().is_root() {
            println!("not tested: only root becomes another user");
            return Ok("met".into());
        }
        // This thread's alone, as of a program with the setuid bit.
        let [root, other] = [0, STRANGER].map(Uid::from_raw);
        rustix::thread::set_thread_res_uid(root, other, root).unwrap();
        meet(rank.rank, 2, &rank.address, TIMEOUT).map(|()| "met".into())
    });
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "met");
    }
}

#[test]
fn a_flood_of_connections_keeps_no_rank_past_its_deadline() {
    const DEADLINE: Duration = Duration::from_millis(500);
    let address = address(test_name!());
    let names = meeting_texts(&address);
    let over = AtomicBool::new(false);
    let begin = Instant::now();
    let flood = || {
        while !over.load(Ordering::Relaxed)
            && begin.elapsed() < stretched(DEADLINE + 2 * Host::SLACK)
        {
            let _ = UnixStream::connect_addr(&name(&names[0]));
        }
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(flood)));
        let result = meet(0, 2, &address, DEADLINE);
        over.store(true, Ordering::Relaxed);
        let took = begin.elapsed();
        assert!(
            matches!(kind_of(&result), Some(Kind::RanksMissing { ranks, .. }) if ranks == &[1])
        );
        assert!(took < stretched(DEADLINE + Host::SLACK), "{took:?}");
    });
}

#[test]
fn a_rank_gets_through_a_flood_of_connections() {
    let address = address(test_name!());
    let names = meeting_texts(&address);
    let over = AtomicBool::new(false);
    let flood = || {
        while !over.load(Ordering::Relaxed) {
            let _ = UnixStream::connect_addr(&name(&names[0]));
        }
    };
    std::thread::scope(|scope| {
        (0..2).for_each(|_| drop(scope.spawn(flood)));
        let other = scope.spawn(|| meet(1, 2, &address, TIMEOUT));
        let results = [meet(0, 2, &address, TIMEOUT), other.join().unwrap()];
        over.store(true, Ordering::Relaxed);
        assert_eq!(results, [Ok(()), Ok(())]);
    });
}

#[test]
fn a_name_that_is_taken_is_waited_for() {
    let address = address(test_name!());
    let taken = UnixListener::bind_addr(&name(&meeting_texts(&address)[0])).unwrap();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let address = &address;
            scope.spawn(move || meet(rank, 2, address, TIMEOUT))
        });
        // Both have come to the wrong place.
        let visitors = [(); 2].map(|()| taken.accept().unwrap());
        drop(taken);
        drop(visitors);
        assert_eq!(ranks.map(|rank| rank.join().unwrap()), [Ok(()), Ok(())]);
    });
}

#[test]
fn who_holds_the_name_at_the_deadline_is_told() {
    let address = address(test_name!());
    let _taken = UnixListener::bind_addr(&name(&meeting_texts(&address)[0])).unwrap();
    let error = meet(0, 2, &address, Duration::from_millis(100)).unwrap_err();
    let (Some(0), Kind::AddressTaken { holder, .. }) = (error.rank(), error.kind()) else {
        panic!("{error}");
    };
    let own = format!("process {} of user ", std::process::id());
    assert!(holder.starts_with(&own), "{error}");
}

#[test]
fn nobody_is_in_the_way_of_a_rank_that_meets_nobody() {
    let address = address(test_name!());
    let taken = |text: String| UnixListener::bind_addr(&name(&text)).unwrap();
    let _taken: Vec<_> = meeting_texts(&address).into_iter().map(taken).collect();
    assert_eq!(meet(0, 1, &address, TIMEOUT), Ok(()));
}

#[test]
fn a_new_job_at_an_address_gets_no_verdict_of_the_one_before() {
    let address = &address(test_name!());
    let short = short();
    std::thread::scope(|scope| {
        let first = scope.spawn(move || meet(0, 3, address, short));
        let told = meet(1, 3, address, TIMEOUT).unwrap_err();
        assert!(
            matches!(told.kind(), Kind::RanksMissing { ranks, .. } if ranks == &[2]),
            "{told}"
        );
        // The first rank 0 may not have returned yet.
        let second = scope.spawn(move || meet(0, 2, address, TIMEOUT));
        assert_eq!(meet(1, 2, address, TIMEOUT), Ok(()));
        assert_eq!(second.join().unwrap(), Ok(()));
        assert_eq!(first.join().unwrap(), Err(told));
    });
}

#[test]
fn a_rank_that_gave_up_and_comes_again_is_no_duplicate() {
    let address = &address(test_name!());
    let names = meeting_texts(address);
    std::thread::scope(|scope| {
        let rank_0 = scope.spawn(|| meet(0, 3, address, TIMEOUT));
        let come = |rank| {
            let connect = || UnixStream::connect_addr(&name(&names[0])).ok();
            let stream = until("rank 0", connect);
            (&stream).write_all(&introduction(rank, 3)).unwrap();
            stream
        };
        drop(come(1));
        let guests = [come(1), come(2)];
        for mut guest in &guests {
            let mut verdict = [0; 8];
            guest.set_read_timeout(Some(TIMEOUT)).unwrap();
            guest.read_exact(&mut verdict).unwrap();
            // Behind its length.
            assert_eq!(String::from_utf8_lossy(&verdict[4..]), "{\"Ok");
        }
        drop(guests);
        let alone = rank_0.join().unwrap().unwrap_err();
        assert!(matches!(alone.kind(), Kind::RankLost { .. }), "{alone}");
    });
}

#[test]
fn any_text_is_an_address() {
    let long = "long ".repeat(20_000);
    for text in [
        &long,
        "",
        "\0",
        "nul\0within",
        "Umläute und 漢字",
        "a/b",
        "%s\n",
    ] {
        let address = &format!("{text}{}", std::process::id());
        std::thread::scope(|scope| {
            let other = scope.spawn(move || meet(1, 2, address, TIMEOUT));
            assert_eq!(meet(0, 2, address, TIMEOUT), Ok(()));
            assert_eq!(other.join().unwrap(), Ok(()));
        });
    }
    let error = meet(0, 3, &long, Duration::from_millis(100)).unwrap_err();
    assert!(error.to_string().len() < 300, "{error}");
}

#[test]
fn what_launch_makes_is_in_no_list_that_others_can_read() {
    let test = test_name!();
    let ranks = start(test, &[(0, 1)], |me| {
        if !launch::is_rank() {
            let launch = Launch::new(2).args(["--exact", test, "--nocapture", "--test-threads=1"]);
            return launch.run().map(|()| "both have met".into());
        }
        let secret = std::env::var("GEMMESH_ADDRESS").unwrap();
        let readable = || {
            let command = std::fs::read("/proc/self/cmdline").unwrap();
            let sockets = std::fs::read("/proc/net/unix").unwrap();
            String::from_utf8_lossy(&[command, sockets].concat()).into_owned()
        };
        let listed = std::thread::scope(|scope| {
            let group = scope.spawn(|| Group::<Host>::from_env().map(|group| (readable(), group)));
            let listed = readable();
            let (then, group) = group.join().unwrap()?;
            group.barrier()?;
            Ok::<_, Error>(listed + &then + &readable())
        })?;
        let hex = secret.trim_start_matches("drawn:");
        let pieces = hex
            .as_bytes()
            .windows(8)
            .map(|piece| String::from_utf8_lossy(piece));
        assert_eq!(hex.len(), 32);
        for piece in pieces {
            assert!(!listed.contains(&*piece), "{secret} is shown: {listed}");
        }
        me.say("not shown");
        std::process::exit(0);
    });
    ranks.heard(0, "not shown");
    assert_eq!(ranks.outcomes()[0].value(), "both have met");
}
