//! Ranks that meet: those that differ or never come are named, and strangers change nothing.

use std::io::Write;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::testing::{PROTOCOL_VERSION, connect_speaking};
use gemmesh::{Error, Group, Host};

use crate::support::errors::parts;
use crate::support::patience::{again_if_busy, stretched};
use crate::support::processes::{Outcome, Processes, sockets_of, start};
use crate::support::shared::failures::assert_waited;
use crate::support::tested::ranks;
use crate::{Arguments, PROMPT, TIMEOUT, same_error, short, test_name};

#[test]
fn a_rank_with_another_world_size_is_named() {
    again_if_busy(|| {
        let places = [(0, 3), (1, 3), (2, 4)];
        let mut ranks = start(test_name!(), &places, |rank| {
            rank.come_together();
            rank.connect(TIMEOUT).map(|_| "a group".into())
        });
        ranks.let_all_go();
        let expected = Kind::Mismatch {
            what: "world size".into(),
            theirs: "4".into(),
            other: 0,
            expected: "3".into(),
        }
        .on(2);
        assert_eq!(same_error(&ranks.outcomes()), expected);
    });
}

#[test]
fn rank_0_with_another_world_size_is_named_to_every_rank() {
    again_if_busy(|| {
        let places = [(0, 2), (1, 4), (2, 4), (3, 4)];
        let mut ranks = start(test_name!(), &places, |rank| {
            rank.come_together();
            rank.connect(TIMEOUT).map(|_| "a group".into())
        });
        ranks.let_all_go();
        match parts(&same_error(&ranks.outcomes())) {
            (
                _,
                Kind::Mismatch {
                    what,
                    theirs,
                    expected,
                    ..
                },
            ) => assert_eq!(
                (what.as_str(), theirs.as_str(), expected.as_str()),
                ("world size", "4", "2")
            ),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn two_processes_with_one_rank_are_named() {
    duplicates_are_named(test_name!(), [0, 1, 1], [1, 2]);
}

#[test]
fn two_processes_that_are_both_rank_0_are_named() {
    duplicates_are_named(test_name!(), [0, 0, 1], [0, 1]);
}

/// Of three processes that are these ranks of three, the two at `places` are one rank.
#[track_caller]
fn duplicates_are_named(test: &str, ranks: [usize; 3], places: [usize; 2]) {
    again_if_busy(|| {
        let mut processes = start(test, &ranks.map(|rank| (rank, 3)), |rank| {
            rank.come_together();
            rank.connect(TIMEOUT).map(|_| "a group".into())
        });
        processes.let_all_go();
        assert_duplicates(processes, ranks[places[0]], places);
    });
}

#[track_caller]
fn assert_duplicates(ranks: Processes, duplicate: usize, places: [usize; 2]) {
    let mut expected = places.map(|place| ranks.pid(place).as_raw_nonzero().get() as u32);
    expected.sort();
    match parts(&same_error(&ranks.outcomes())) {
        (Some(rank), Kind::DuplicateRank { pids }) => {
            let mut pids = *pids;
            pids.sort();
            assert_eq!((rank, pids), (duplicate, expected));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_never_comes_is_named_at_the_timeout() {
    let mut ranks = start(test_name!(), &[(0, 3), (1, 3)], |rank| {
        rank.come_together();
        rank.connect(short()).map(|_| "a group".into())
    });
    ranks.let_all_go();
    assert_missing(&ranks.outcomes(), 2);
}

#[test]
fn ranks_that_wait_for_long_say_for_whom() {
    let patience = Duration::from_secs(11);
    // Ranks 0 and 1 of three meet, and one looks for a rank 0 that does not come.
    let places = [(0, 3), (1, 3), (1, 2)];
    let ranks = start(test_name!(), &places, |rank| {
        let address = format!("{} of {}", rank.address, rank.world);
        rank.connect_as(&address, patience)
            .map(|_| "a group".into())
    });
    let address = ranks.address.clone();
    let outcomes = ranks.outcomes();
    let lines = [
        format!("gemmesh: rank 0 has waited for 10 s at \"{address} of 3\" for rank 2\n"),
        format!("gemmesh: rank 1 has waited for 10 s at \"{address} of 2\" for rank 0\n"),
    ];
    for (outcome, line) in [&outcomes[0], &outcomes[2]].into_iter().zip(lines) {
        assert_eq!(outcome.text.matches(&line).count(), 1, "{}", outcome.text);
    }
    assert!(
        !outcomes[1].text.contains("gemmesh:"),
        "{}",
        outcomes[1].text
    );
}

#[test]
fn rank_0_that_never_comes_is_named_at_the_timeout() {
    let mut ranks = start(test_name!(), &[(1, 3), (2, 3)], |rank| {
        rank.come_together();
        rank.connect(short()).map(|_| "a group".into())
    });
    ranks.let_all_go();
    assert_missing(&ranks.outcomes(), 0);
}

#[track_caller]
fn assert_missing(outcomes: &[Outcome], missing: usize) {
    for outcome in outcomes {
        match parts(outcome.error()) {
            (_, Kind::RanksMissing { ranks, .. }) => {
                assert_eq!(ranks, &[missing]);
                assert_waited::<Host>(outcome.error());
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn two_ranks_of_one_process_meet_as_processes_do() {
    let address = format!("threads of {}", std::process::id());
    let rank = |rank| -> Result<(), Error> {
        let builder = Group::<Host>::builder().timeout(TIMEOUT);
        let group = builder.connect(rank, 2, &address)?;
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        group.barrier()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| rank(1));
        assert_eq!(rank(0), Ok(()));
        assert_eq!(other.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_rank_of_another_protocol_version_is_named() {
    again_if_busy(|| {
        let mut ranks = ranks::<Host>(test_name!(), 3, |rank| {
            rank.come_together();
            let builder = Group::<Host>::builder().timeout(TIMEOUT);
            let group = match rank.rank {
                2 => connect_speaking(builder, 2, rank.world, &rank.address, 999),
                _ => builder.connect(rank.rank, rank.world, &rank.address),
            };
            group.map(|_| "a group".into())
        });
        ranks.let_all_go();
        match parts(&same_error(&ranks.outcomes())) {
            (Some(rank), Kind::Mismatch { what, theirs, .. }) => assert_eq!(
                (rank, what.as_str(), theirs.as_str()),
                (2, "protocol version", "999")
            ),
            other => panic!("{other:?}"),
        }
    });
}

/// A group of three whose rank 0 waits; `strangers` come to its socket; then the others do.
#[track_caller]
fn group_that_strangers_visit(
    test: &str,
    strangers: impl FnOnce(&dyn Fn() -> UnixStream) -> Vec<UnixStream>,
) {
    let mut ranks = ranks::<Host>(test, 3, |rank| {
        if rank.rank != 0 {
            rank.hear();
        }
        let group = rank.connect(TIMEOUT)?;
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        group.barrier()?;
        Ok("done".into())
    });
    let begin = Instant::now();
    let name = loop {
        match sockets_of(&ranks.address).pop() {
            Some(name) => break name,
            None => assert!(
                begin.elapsed() < stretched(PROMPT),
                "rank 0 does not listen"
            ),
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let connect = || UnixStream::connect_addr(&address).expect("a connection to rank 0");
    let visitors = strangers(&connect);
    ranks.tell(1);
    ranks.tell(2);
    for outcome in ranks.outcomes() {
        assert_eq!(outcome.value(), "done");
    }
    drop(visitors);
}

fn introduction(length: u32, words: &[u8]) -> Vec<u8> {
    let rank = 1;
    let numbers = [PROTOCOL_VERSION, rank, length]
        .map(u32::to_le_bytes)
        .concat();
    [b"gemmesh\0", numbers.as_slice(), words].concat()
}

#[test]
fn strangers_on_the_socket_are_no_ranks_and_keep_none_away() {
    group_that_strangers_visit(test_name!(), |connect| {
        let messages = [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            b"gemmash\0\x01\0\0\0\x01\0\0\0".to_vec(),
            vec![0; 1 << 16],
            introduction(u32::MAX, b"{}"),
            introduction(16, b"this is no JSON!"),
            // The right words so far, then silence.
            b"gemm".to_vec(),
            introduction(100, b"{\"world\":3,"),
            vec![],
        ];
        let mut visitors = Vec::new();
        for message in &messages {
            let mut silent = connect();
            // Rank 0 may hang up before it has read everything.
            let _ = silent.write_all(message);
            visitors.push(silent);
            let mut half_open = connect();
            let _ = half_open.write_all(message);
            half_open.shutdown(std::net::Shutdown::Write).unwrap();
            visitors.push(half_open);
            let mut gone = connect();
            let _ = gone.write_all(message);
        }
        visitors
    });
}

#[test]
fn a_crowd_of_silent_strangers_keeps_no_rank_away() {
    group_that_strangers_visit(test_name!(), |connect| {
        (0..400).map(|_| connect()).collect()
    });
}
