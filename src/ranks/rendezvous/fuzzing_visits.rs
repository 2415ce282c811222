//! The bytes that come to the port at which rank 0 waits for the leaders of other hosts, and those that answer a leader.

use std::io::{Read, Write};
use std::net::Shutdown;

use super::PROTOCOL_VERSION;
use super::attempt::Rendezvous;
use super::introduction::Hello;
use crate::json;
use crate::protocol::seat::{Line, Visit};
use crate::ranks::identity::Identity;
use crate::ranks::meeting::fuzzing::{Greeting, Nonces, Proof, read_answer};
use crate::ranks::meeting::{Key, Lobby, VisitReport};
use crate::ranks::tcp;
use crate::ranks::wire;
use crate::schedule::Hosts;

const JOB: &str = "fuzzing";

fn identity() -> Identity {
    Identity {
        hosts: Hosts::of(&[0, 0, 1, 1]).unwrap_or_default(),
        ..Identity::of_test(0, 4, "")
    }
}

thread_local! {
    static RANK_0: &'static Identity = Box::leak(Box::new(identity()));
}

/// The first byte says what the rest is: what comes instead of a greeting; what comes after one; a report with its proof,
/// three times; or an answer to a leader.
pub fn parse(data: &[u8]) {
    let Some((&first, sent)) = data.split_first() else {
        return;
    };
    let key = Key::of("a key", JOB);
    if first % 4 == 3 {
        return read_answer(sent, &key);
    }
    let identity = RANK_0.with(|identity| *identity);
    let mut rank_0 = Rendezvous::for_fuzzing(identity);
    let Ok(listener) = tcp::listen(0) else {
        return;
    };
    let mut lobby = Lobby::new(listener, key.clone()).expect("a lobby");
    for _ in 0..if first % 4 == 2 { 3 } else { 1 } {
        let Ok((other, stream)) = wire::pair() else {
            return;
        };
        lobby.admit(stream);
        if first % 4 > 0 {
            let nonces = greet(&mut lobby, &other, &key);
            let proof = Proof::encode(&nonces, sent, &key);
            let bytes = if first % 4 == 1 { sent } else { &proof };
            let _ = (&*other).write(bytes);
        } else {
            let _ = (&*other).write(sent);
        }
        let _ = other.shutdown(Shutdown::Write);
        let (_, visitors) = lobby.receive(PROTOCOL_VERSION).expect("descriptors");
        for visitor in visitors {
            if let Err(error) = rank_0.seat_leader(visitor, std::time::Instant::now()) {
                let _ = error.to_string();
            }
        }
    }
}

/// Greets as rank 2, and returns the numbers of both ends.
fn greet(lobby: &mut Lobby, other: &wire::Connection, key: &Key) -> Nonces {
    let greeting = Greeting {
        version: PROTOCOL_VERSION,
        rank: 2,
        nonce: [7; 32],
    };
    let _ = (&**other).write(&greeting.encode(key));
    let _ = lobby.receive(PROTOCOL_VERSION);
    let mut answer = [0; Nonces::ANSWER_BYTES];
    let _ = (&**other).read(&mut answer);
    Nonces::of_answer(greeting.nonce, &answer, key).expect("an answer")
}

/// Both connections of a visit, of a later one, and of a leader that lacks ranks; and an answer.
pub fn seeds() -> Vec<Vec<u8>> {
    let identity = identity();
    let lacks = crate::error::Kind::NeverJoined.on(3);
    let cases = [
        (1, Line::Messages, Ok(())),
        (1, Line::Mirror, Ok(())),
        (2, Line::Mirror, Ok(())),
        (1, Line::Messages, Err(lacks)),
    ];
    let reports = cases.map(|(number, line, outcome)| {
        let report = VisitReport {
            visit: Visit { leader: 7, number },
            line,
            hello: Hello::new(&identity).expect("the kernel's id"),
            ranks: vec![2, 3],
            outcome: String::from_utf8_lossy(&json::of_outcome(&outcome)).into_owned(),
        };
        [&[2], &serde_json::to_vec(&report).unwrap_or_default()[..]].concat()
    });
    let greeting = Greeting {
        version: PROTOCOL_VERSION,
        rank: 2,
        nonce: [7; 32],
    };
    let key = Key::of("a key", JOB);
    let nonces = Nonces {
        leaders: [7; 32],
        first: [8; 32],
    };
    let raw = [
        [&[0], &greeting.encode(&key)[..]].concat(),
        [&[3], &nonces.answer(&key)[..]].concat(),
    ];
    reports.into_iter().chain(raw).collect()
}
