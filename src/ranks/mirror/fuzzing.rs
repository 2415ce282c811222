//! The bytes that come from another host's leader.

use std::io::Write;

use super::peer::{CROWDED, READ};
use super::record::MAX_RECORD;
use super::*;
use crate::ranks::call::WORDS;
use crate::ranks::memfd::{Mapping, memfd};
use crate::schedule::Hosts;

/// How often the input comes, so that it is a flood.
const ROUNDS: usize = 64;
/// What may be kept of a peer. A whole record waits until its end has come, and vectors grow by doubling. A rank may be
/// 256 calls ahead of others, and there are two ranks on a host.
const MOST: usize = 8 * (READ + CROWDED + MAX_RECORD) + 2 * 2 * 256 * MAX_RECORD;

/// A relay that has heard nothing: of rank 0, whose third host takes nothing, or of rank 2. The other end of its first
/// peer, and of the others.
fn relay(of_rank_0: bool) -> Option<(Relay, Connection, Vec<Connection>)> {
    let memory = memfd(SharedState::BYTES).ok()?;
    let memory = Mapping::shared(memory, SharedState::BYTES).ok()?;
    let hosts = Hosts::of(&[0, 0, 1, 1, 2, 2]).ok()?;
    let rank = if of_rank_0 { 0 } else { 2 };
    let shared = Arc::new(SharedState::new(memory, rank, 6).on_hosts(hosts));
    let peers: &[usize] = if of_rank_0 { &[2, 4] } else { &[0] };
    let (mut links, mut others) = (Vec::new(), Vec::new());
    for &rank in peers {
        let (other, mirror) = wire::pair().ok()?;
        let messages = Arc::new(wire::pair().ok()?.0);
        links.push(HostLink {
            rank,
            messages,
            mirror,
        });
        others.push(other);
    }
    let first = others.remove(0);
    Some((Relay::new(shared, links, Duration::MAX), first, others))
}

/// The first byte says on which host they come. They come again and again.
pub fn parse(data: &[u8]) {
    let Some((host, sent)) = data.split_first() else {
        return;
    };
    let Some((mut relay, other, _others)) = relay(host % 2 == 0) else {
        return;
    };
    for _ in 0..ROUNDS {
        // Bytes that do not fit in the socket's buffer are not sent.
        if (&*other).write(sent).is_err() {
            break;
        }
        relay.look();
        let kept = relay.peers.iter().map(PeerLeader::kept).max();
        assert!(kept.is_none_or(|kept| kept <= MOST), "{kept:?} bytes");
    }
    let shared = &relay.shared;
    if let Some((number, _)) = relay.differing {
        shared.report_odd_one(number);
    }
    for rank in 0..shared.world() {
        drop((shared.refusal(rank, 1), shared.is_gone(rank)));
    }
    drop(shared.fault().map(|fault| fault.to_string()));
}

/// What rank 2 tells.
pub fn seeds() -> Vec<Vec<u8>> {
    let rank = 2;
    let failure = br#"{"RankLost":{"rank":3,"noticed_by":2}}"#.to_vec();
    let records = [
        Record::Beat { leader: rank },
        Record::Post {
            rank,
            number: 1,
            words: Box::new([u64::MAX; WORDS]),
            lines: Some(b"barrier".to_vec()),
        },
        Record::Refusal {
            rank,
            number: 1,
            age: Some(5),
            note: [&1_u64.to_le_bytes(), &failure[..]].concat(),
        },
        Record::Wait {
            rank,
            peer: 1,
            age: 3,
        },
        Record::PartWait {
            rank,
            peer: 3,
            age: 3,
            call: b"group \"pair\" in barrier()".to_vec(),
        },
        Record::Proposal {
            rank,
            failure: failure.clone(),
        },
        Record::Fault {
            rank,
            failure: failure.clone(),
        },
        Record::Left {
            rank,
            is_gone: true,
            reason: Some(failure),
        },
    ];
    let seed = |record: &Record| {
        let mut bytes = vec![0];
        record.encode(&mut bytes);
        bytes
    };
    records.iter().map(seed).collect()
}
