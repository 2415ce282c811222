//! A leader that has the key, and sends what it likes.

use std::io::Write;

use super::peer::{CROWDED, READ};
use super::record::MAX_RECORD;
use super::*;
use crate::error::{Error, Kind};
use crate::ranks::acknowledged::Acknowledged;
use crate::ranks::call::WORDS;
use crate::ranks::memfd::{Mapping, memfd};
use crate::ranks::silence::Silence;
use crate::schedule::Hosts;

/// Rank 0's relay of three hosts with two ranks each, and the other ends of its lines, those of ranks 2 and 4.
fn relay() -> (Relay, [Connection; 2]) {
    let memory = memfd(SharedState::BYTES).unwrap();
    let memory = Mapping::shared(memory, SharedState::BYTES).unwrap();
    let hosts = Hosts::of(&[0, 0, 1, 1, 2, 2]).unwrap();
    let shared = SharedState::new(memory, 0, 6).on_hosts(hosts);
    let link = |rank| {
        let (other, mirror) = wire::pair().unwrap();
        let messages = Arc::new(wire::pair().unwrap().0);
        let link = HostLink {
            rank,
            messages,
            mirror,
        };
        (link, other)
    };
    let (links, others): (Vec<HostLink>, Vec<Connection>) = [2, 4].map(link).into_iter().unzip();
    let others = others.try_into().expect("two lines");
    (Relay::new(Arc::new(shared), links, Duration::MAX), others)
}

fn post(rank: usize, number: u64) -> Record {
    Record::Post {
        rank,
        number,
        words: Box::new([number; WORDS]),
        lines: Some(vec![b'x'; 2000]),
    }
}

/// The failure of the group, once rank 2 has sent `records`.
fn failure(records: impl IntoIterator<Item = Record>) -> Option<Error> {
    let (mut relay, [two, _four]) = relay();
    for record in records {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        (&*two).write_all(&bytes).unwrap();
        relay.look();
    }
    relay.shared.fault()
}

#[test]
fn calls_that_a_rank_can_have_made_are_taken() {
    let calls = (1..=256).flat_map(|number| [post(2, number), post(3, number)]);
    assert_eq!(failure(calls), None);
}

#[test]
fn calls_that_a_rank_cannot_have_made_end_the_group() {
    let ahead: Vec<Record> = (1..=257).map(|number| post(2, number)).collect();
    let wrong = [
        vec![post(2, 0)],
        vec![post(2, 2)],
        vec![post(2, 1), post(2, 1)],
        vec![post(2, u64::MAX)],
        // Rank 0 has made no call.
        ahead,
        vec![post(4, 1)],
    ];
    for records in wrong {
        let last = records.last().cloned();
        let error = failure(records).unwrap_or_else(|| panic!("{last:?} was taken"));
        let is_message = matches!(error.kind(), Kind::Message { .. });
        assert!(is_message && error.rank() == Some(2), "{error}");
    }
}

/// The first of both ends that sees a silence closes the connection.
#[test]
fn a_connection_that_closes_after_a_silence_is_a_lost_host_and_otherwise_a_lost_rank() {
    let failure = |silence| {
        let (mut relay, [two, _four]) = relay();
        relay.peers[0].acknowledged = Acknowledged::nothing_for(Silence::of(silence));
        drop(two);
        relay.look();
        let error = relay.shared.fault().expect("its end");
        assert_eq!(error.rank(), Some(2));
        error.kind().clone()
    };
    let (short, long) = (BEAT, 2 * BEAT);
    assert!(matches!(failure(short), Kind::RankLost { .. }));
    assert!(matches!(failure(long), Kind::HostLost { .. }));
}

/// However fast it sends, and though another host takes nothing that is passed on.
#[test]
fn a_flood_of_records_leaves_little() {
    const FLOOD: usize = 64 << 20;
    // A whole record waits until its end has come, and vectors grow by doubling.
    const MOST: usize = 8 * (READ + CROWDED + 2 * MAX_RECORD);
    let (mut relay, [two, _four]) = relay();
    let mut round = Vec::new();
    for rank in [2, 3] {
        Record::Beat { leader: 2 }.encode(&mut round);
        let (peer, age, number) = (1, 3, 1);
        Record::Wait { rank, peer, age }.encode(&mut round);
        let note = vec![7; 2000];
        let age = Some(age);
        Record::Refusal {
            rank,
            number,
            age,
            note,
        }
        .encode(&mut round);
        Record::Left {
            rank,
            is_gone: false,
            reason: Some(vec![b'x'; 2000]),
        }
        .encode(&mut round);
    }
    two.set_nonblocking(false).unwrap();
    let flood = std::thread::spawn(move || {
        for _ in 0..FLOOD / round.len() {
            (&*two).write_all(&round).unwrap();
        }
    });
    while !flood.is_finished() {
        relay.look();
        let kept: usize = relay.peers.iter().map(PeerLeader::kept).sum();
        assert!(kept < MOST, "{kept} bytes are kept");
    }
    flood.join().unwrap();
}

#[test]
fn a_look_reads_a_limited_number_of_bytes_and_later_looks_the_rest() {
    let (mut relay, [two, _four]) = relay();
    let mut beats = Vec::new();
    (0..READ).for_each(|_| Record::Beat { leader: 2 }.encode(&mut beats));
    // As much as the system takes, which is more than a look reads.
    let sent = (&*two).write(&beats).unwrap();
    assert!(sent > 2 * READ, "{sent}");
    let peer = &mut relay.peers[0];
    let (mut looks, mut heard) = (0, 0);
    while heard < sent / 6 {
        peer.receive();
        assert!(peer.kept() <= 2 * (READ + 4096), "{}", peer.kept());
        heard += std::iter::from_fn(|| peer.next_record()).count();
        looks += 1;
        assert!(looks < 100, "{heard} of {} were heard", sent / 6);
    }
    assert!(looks >= 2);
}
