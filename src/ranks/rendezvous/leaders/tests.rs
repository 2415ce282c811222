//! Leaders that meet over networks that delay, break and keep silent.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use super::*;
use crate::error::{Error, Kind, Result};
use crate::protocol::seat::Visit;
use crate::ranks::address;
use crate::ranks::deadlines::Deadlines;
use crate::ranks::meeting::{Greeting, Key, MeetingPlace, Nonces, Proof, VisitReport};
use crate::ranks::rendezvous::{PROTOCOL_VERSION, meet_speaking};
use crate::ranks::tcp;
use crate::schedule::Hosts;

/// The errors of ranks that [`meet`].
fn errors(
    ranks: &[usize],
    world: usize,
    version: impl Fn(usize) -> u32 + Sync,
    change: impl Fn(usize, &mut Identity) + Sync,
) -> Vec<Error> {
    let met = meet(ranks, world, version, change).into_iter();
    met.map(Result::unwrap_err).collect()
}

/// Ranks meet, each alone on its host, after `change` of the rank at a place. Ranks stand at the places of `ranks`.
fn meet(
    ranks: &[usize],
    world: usize,
    version: impl Fn(usize) -> u32 + Sync,
    change: impl Fn(usize, &mut Identity) + Sync,
) -> Vec<Result<()>> {
    let listener = tcp::listen(0).unwrap();
    let port = listener.local_addr().unwrap().port();
    let rank_0 = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let address = address::draw().unwrap();
    let hosts: Vec<usize> = (0..world).collect();
    let identity = |place: usize| {
        let place_of_rank_0 = match ranks[place] {
            0 => MeetingPlace::Listening(listener.try_clone().unwrap()),
            _ => MeetingPlace::At(vec![rank_0]),
        };
        let mut identity = Identity {
            hosts: Hosts::of(&hosts).unwrap(),
            meeting: Some(Arc::new(Meeting {
                key: Key::of(address.reveal(), "test"),
                place: place_of_rank_0,
            })),
            ..Identity::of_test(ranks[place], world, address.reveal())
        };
        change(place, &mut identity);
        identity
    };
    let (identity, version) = (&identity, &version);
    std::thread::scope(|scope| {
        let meet = |place| move || meet_speaking(&identity(place), version(place)).map(drop);
        let threads: Vec<_> = (0..ranks.len())
            .map(|place| scope.spawn(meet(place)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// What a network does to the connections of a leader, in the order in which it makes them.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Passes,
    /// What the leader says of itself arrives when the other connection's has arrived.
    ComesSecond,
    /// Nothing arrives after the greeting, and the connection ends.
    Breaks,
}

/// Passes a leader's connections on to rank 0 at `to`, and does to each what its fate says. All later ones pass.
fn network(fates: &'static [Fate], to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        // One word for each connection whose introduction has been passed on.
        let (passed, others) = mpsc::channel();
        let others = Arc::new(Mutex::new(others));
        for number in 0.. {
            let Ok((leader, _)) = listener.accept() else {
                return;
            };
            let fate = fates.get(number).copied().unwrap_or(Fate::Passes);
            let rank_0 = TcpStream::connect(to).unwrap();
            let (passed, others) = (passed.clone(), others.clone());
            let answers = [&rank_0, &leader].map(|end| end.try_clone().unwrap());
            std::thread::spawn(move || pass_on(&answers[0], &answers[1]));
            std::thread::spawn(move || {
                let mut greeting = [0; Greeting::BYTES];
                (&leader).read_exact(&mut greeting).unwrap();
                (&rank_0).write_all(&greeting).unwrap();
                let mut introduction = [0; 64 << 10];
                let length = (&leader).read(&mut introduction).unwrap();
                match fate {
                    Fate::Passes => {}
                    Fate::ComesSecond => others.lock().unwrap().recv().unwrap(),
                    Fate::Breaks => {
                        rank_0.shutdown(Shutdown::Both).unwrap();
                        return leader.shutdown(Shutdown::Both).unwrap();
                    }
                }
                (&rank_0).write_all(&introduction[..length]).unwrap();
                if fate == Fate::Passes {
                    // Rank 0 reads it before it reads what comes later.
                    std::thread::sleep(Duration::from_millis(100));
                    passed.send(()).unwrap();
                }
                pass_on(&leader, &rank_0);
            });
        }
    });
    address
}

fn pass_on(mut from: &TcpStream, mut to: &TcpStream) {
    let _ = std::io::copy(&mut from, &mut to);
    let _ = to.shutdown(Shutdown::Both);
}

/// Two ranks meet, each alone on its host, over a network that does this.
#[track_caller]
fn assert_meet(fates: &'static [Fate]) {
    let met = meet(
        &[0, 1],
        2,
        |_| PROTOCOL_VERSION,
        |place, identity| {
            let meeting = identity.meeting.as_ref().unwrap();
            if let (1, MeetingPlace::At(addresses)) = (place, &meeting.place) {
                identity.meeting = Some(Arc::new(Meeting {
                    key: meeting.key.clone(),
                    place: MeetingPlace::At(vec![network(fates, addresses[0])]),
                }));
            }
        },
    );
    for (rank, met) in met.iter().enumerate() {
        assert!(met.is_ok(), "{fates:?}, rank {rank}: {met:?}");
    }
}

#[test]
fn what_comes_late_on_one_of_two_connections_is_taken_for_what_it_is() {
    assert_meet(&[Fate::ComesSecond]);
}

/// What rank 1, a leader, says of a connection of its first visit.
fn report(leader: u64, line: Line) -> VisitReport {
    VisitReport {
        visit: Visit { leader, number: 0 },
        line,
        hello: Hello::new(&Identity::of_test(1, 2, "")).unwrap(),
        ranks: vec![1],
        outcome: String::from_utf8_lossy(&json::of_outcome(&Ok(()))).into_owned(),
    }
}

/// What arrives of a leader, and the other end.
fn visitor(leader: u64, line: Line) -> (Visitor, Connection) {
    let (stream, other) = tcp::pair().unwrap();
    let visitor = Visitor {
        rank: 1,
        version: PROTOCOL_VERSION,
        report: Some(report(leader, line)),
        stream,
    };
    (visitor, other)
}

/// Rank 0 of two hosts, to whose leader `deadline` is left.
fn rank_0(deadline: Duration) -> Identity {
    Identity {
        hosts: Hosts::of(&[0, 1]).unwrap(),
        meeting: Some(Arc::new(Meeting {
            key: Key::of("secret", "test"),
            place: MeetingPlace::Listening(tcp::listen(0).unwrap()),
        })),
        deadlines: Deadlines::new(deadline, Some(deadline)),
        ..Identity::of_test(0, 2, "")
    }
}

/// The attempt of this rank 0, with its lobby open. No rank of its host is expected.
fn attempt(identity: &Identity) -> Rendezvous<'_> {
    let address = address::meeting_names(&address::draw().unwrap()).unwrap();
    let listener = UnixListener::bind_addr(&address[0]).unwrap();
    let listeners = [listener.try_clone().unwrap(), listener];
    let hello = Hello::new(identity).unwrap();
    let mut attempt = Rendezvous::new(identity, hello, listeners, PROTOCOL_VERSION).unwrap();
    attempt.open_lobby().unwrap();
    attempt
}

/// Rank 0's outcome if it hears `last` when all have come: the leader 7 with both connections.
fn outcome_of_last_call(deadline: Duration, last: &VisitReport) -> Result<()> {
    let identity = rank_0(deadline);
    let meeting = identity.meeting.as_ref().unwrap();
    let mut rank_0 = attempt(&identity);
    let port = meeting.listener().unwrap().local_addr().unwrap().port();
    let mut late = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let greeting = Greeting {
        version: PROTOCOL_VERSION,
        rank: 1,
        nonce: [7; 32],
    };
    late.write_all(&greeting.encode(&meeting.key)).unwrap();
    late.set_nonblocking(true).unwrap();
    let mut answer = [0; Nonces::ANSWER_BYTES];
    while late.peek(&mut answer).unwrap_or(0) < answer.len() {
        rank_0.welcome().1.unwrap();
    }
    let nonces = Nonces::of_answer(greeting.nonce, &answer, &meeting.key).unwrap();
    let _ends = [Line::Messages, Line::Mirror].map(|line| {
        let (visitor, end) = visitor(7, line);
        rank_0.seat_leader(visitor, Instant::now()).unwrap();
        end
    });
    let last = serde_json::to_vec(last).unwrap();
    let proof = Proof::encode(&nonces, &last, &meeting.key);
    late.write_all(&proof).unwrap();
    rank_0.receive_all(Instant::now())
}

#[test]
fn a_rival_that_comes_in_the_last_call_is_a_second_process_of_its_rank() {
    let own = std::process::id();
    let duplicate = Kind::DuplicateRank { pids: [own, own] }.on(1);
    let rival = report(8, Line::Messages);
    let outcome = outcome_of_last_call(Duration::from_secs(60), &rival);
    assert_eq!(outcome, Err(duplicate));
}

#[test]
fn a_visit_that_begins_in_the_last_call_is_waited_for() {
    let visit = Visit {
        leader: 7,
        number: 1,
    };
    let again = VisitReport {
        visit,
        ..report(7, Line::Mirror)
    };
    // Its connection for messages does not come.
    let outcome = outcome_of_last_call(Duration::ZERO, &again);
    let error = outcome.expect_err("no mirror has come");
    assert_eq!(lacks(&error), Some(&[1][..]));
}

#[test]
fn a_leader_whose_end_is_seen_late_does_not_keep_its_successor_away() {
    let now = Instant::now();
    let mut seat = Leader::expected(1);
    let lines = [Line::Messages, Line::Mirror];
    let first = lines.map(|line| visitor(7, line));
    let ends = first.map(|(visitor, end)| {
        seat.take(visitor, false, now).unwrap();
        end
    });
    assert!(seat.has_come());
    let second = lines.map(|line| visitor(8, line));
    let _ends = second.map(|(visitor, end)| {
        seat.take(visitor, false, now).unwrap();
        end
    });
    assert!(seat.has_rivals());
    drop(ends);
    for (since, visitor) in std::mem::take(&mut seat.rivals) {
        seat.take(visitor, false, since).unwrap();
    }
    assert!(seat.has_come() && !seat.has_rivals());
}

#[test]
fn two_leaders_of_a_host_that_stay_are_two_processes_of_one_rank() {
    let mut seat = Leader::expected(1);
    let (first, _end) = visitor(7, Line::Messages);
    seat.take(first, false, Instant::now()).unwrap();
    let (second, _end) = visitor(8, Line::Messages);
    let own = std::process::id();
    let duplicate = Kind::DuplicateRank { pids: [own, own] }.on(1);
    let since = Instant::now() - RIVALRY;
    assert_eq!(seat.take(second, false, since), Err(duplicate));
}

#[test]
fn a_leader_whose_connection_breaks_visits_rank_0_again() {
    assert_meet(&[Fate::Breaks]);
    assert_meet(&[Fate::Passes, Fate::Breaks]);
}

#[track_caller]
fn assert_mismatch(errors: &[Error], of: usize, expected: &str) {
    for error in errors {
        let (Some(rank), Kind::Mismatch { what, .. }) = (error.rank(), error.kind()) else {
            panic!("{error}");
        };
        assert_eq!((rank, what.as_str()), (of, expected));
    }
}

#[test]
fn all_hosts_are_told_which_one_speaks_another_version() {
    let version = |place| PROTOCOL_VERSION + u32::from(place == 2);
    let errors = errors(&[0, 1, 2], 3, version, |_, _| {});
    assert_mismatch(&errors, 2, "protocol version");
}

#[test]
fn all_hosts_are_told_which_one_has_another_backend() {
    let change = |place, identity: &mut Identity| {
        if place == 1 {
            identity.backend = "cuda";
        }
    };
    let errors = errors(&[0, 1, 2], 3, |_| PROTOCOL_VERSION, change);
    assert_mismatch(&errors, 1, "backend");
}

#[track_caller]
fn assert_two_are_rank_1(errors: Vec<Error>) {
    let (rank, pids) = (1, [std::process::id(); 2]);
    for error in errors {
        assert_eq!(error, Kind::DuplicateRank { pids }.on(rank));
    }
}

#[test]
fn two_hosts_that_are_one_are_told() {
    let errors = errors(&[0, 1, 1], 3, |_| PROTOCOL_VERSION, |_, _| {});
    assert_two_are_rank_1(errors);
}

/// They do not share a machine, so they do not meet before they come to rank 0.
#[test]
fn two_machines_that_are_one_host_are_told() {
    let change = |place, identity: &mut Identity| {
        if place == 2 {
            identity.address = address::draw().unwrap();
        }
    };
    let errors = errors(&[0, 1, 1], 3, |_| PROTOCOL_VERSION, change);
    assert_two_are_rank_1(errors);
}

#[test]
fn rank_0_that_is_silent_at_all_of_its_addresses_is_missing_at_the_deadline() {
    let silent = [(); 8].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = silent.each_ref().map(|one| one.local_addr().unwrap());
    let deadline = Duration::from_millis(700);
    let change = |_, identity: &mut Identity| {
        identity.deadlines = Deadlines::new(deadline, Some(deadline));
        identity.meeting = Some(Arc::new(Meeting {
            key: Key::of("secret", "test"),
            place: MeetingPlace::At(addresses.to_vec()),
        }));
    };
    let errors = errors(&[1], 2, |_| PROTOCOL_VERSION, change);
    let Kind::RanksMissing {
        ranks,
        waited_ms,
        reason,
        ..
    } = errors[0].kind()
    else {
        panic!("{}", errors[0]);
    };
    assert_eq!(ranks[..], [0]);
    println!("waited for {waited_ms} ms");
    // Each address would take two seconds.
    assert!((700..10_000).contains(waited_ms));
    let words = "the process there does not answer";
    assert_eq!(reason.as_ref().unwrap().matches(words).count(), 8);
}

/// The error of a leader that rank 0 answers on this number of connections, and then sends this on the first.
fn error_after(connections: usize, verdict: Option<Result<()>>) -> Error {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let key = Key::of("secret", "test");
    let rank_0_s = key.clone();
    std::thread::spawn(move || {
        let mut listener = Some(listener);
        let answered = (1..=connections).map(|number| {
            let (mut leader, _) = listener.as_ref().unwrap().accept().unwrap();
            listener = listener.take().filter(|_| number < connections);
            let mut greeting = [0; Greeting::BYTES];
            leader.read_exact(&mut greeting).unwrap();
            let nonces = Nonces {
                leaders: Greeting::decode(&greeting, &rank_0_s).unwrap().nonce,
                first: [8; 32],
            };
            leader.write_all(&nonces.answer(&rank_0_s)).unwrap();
            leader
        });
        let mut answered: Vec<TcpStream> = answered.collect();
        if let Some(verdict) = verdict {
            let words = json::of_outcome(&verdict);
            let length = (words.len() as u32).to_le_bytes();
            answered[0]
                .write_all(&[&length, &words[..]].concat())
                .unwrap();
        }
        // The connections stay until the leader has gone.
        let _ = std::io::copy(&mut answered[0], &mut std::io::sink());
    });
    let deadline = Duration::from_secs(2);
    let change = |_, identity: &mut Identity| {
        identity.deadlines = Deadlines::new(deadline, Some(deadline));
        identity.meeting = Some(Arc::new(Meeting {
            key: key.clone(),
            place: MeetingPlace::At(vec![(Ipv4Addr::LOCALHOST, port).into()]),
        }));
    };
    errors(&[1], 2, |_| PROTOCOL_VERSION, change).remove(0)
}

#[track_caller]
fn assert_no_verdict(connections: usize, words: &str) {
    let error = error_after(connections, None);
    let Kind::RanksMissing { ranks, reason, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(ranks[..], [0]);
    let reason = reason.as_ref().unwrap();
    assert!(reason.contains(words), "{reason}");
}

#[test]
fn rank_0_that_has_answered_and_gives_no_verdict_is_not_said_to_have_ended() {
    assert_no_verdict(2, "rank 0 has answered, and has given no verdict in time");
    assert_no_verdict(1, "the second connection failed: Connection refused");
}

#[test]
fn a_good_verdict_for_a_leader_with_one_connection_is_refused() {
    let error = error_after(1, Some(Ok(())));
    assert!(
        matches!(error.kind(), Kind::Message { .. }) && error.rank() == Some(0),
        "{error}"
    );
}

#[test]
fn rank_0_without_descriptors_fails_only_if_a_leader_is_missing() {
    let identity = rank_0(Duration::ZERO);
    let mut rank_0 = attempt(&identity);
    let refused = || Error::system(0, "accept")(std::io::ErrorKind::Other.into());
    assert_eq!(rank_0.without_descriptor(refused()), Err(refused()));
    let _ends = [Line::Messages, Line::Mirror].map(|line| {
        let (visitor, end) = visitor(7, line);
        rank_0.seat_leader(visitor, Instant::now()).unwrap();
        end
    });
    assert_eq!(rank_0.without_descriptor(refused()), Ok(()));
}

#[test]
fn hosts_that_disagree_about_hosts_are_told() {
    let change = |place, identity: &mut Identity| {
        if place == 1 {
            identity.hosts = Hosts::of(&[0, 1, 0, 1]).unwrap();
            identity.deadlines = Deadlines::new(Duration::ZERO, Some(Duration::ZERO));
        }
    };
    let errors = errors(&[0, 1], 4, |_| PROTOCOL_VERSION, change);
    assert_mismatch(&errors[..1], 1, "ranks of its host");
}
