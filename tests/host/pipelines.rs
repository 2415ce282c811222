//! What the caller computes, beside what is moved, on the host.

use std::time::Duration;

use crate::support::numbers::{nan, rng};
use crate::support::shared::pipelines::{Consumes, called};
use gemmesh::trace::{Lane, Timeline, Trace};
use gemmesh::{
    AllGatherAndConsume, Chunk, Error, Group, Host, Matrix, ProduceAndReduceScatter, bf16,
};
use rand::RngExt;

impl Consumes for Host {
    type Sink = (Vec<bf16>, usize);

    fn sink(rows: usize, k: usize) -> Self::Sink {
        (vec![nan(); rows * k], k)
    }

    fn take((sink, k): &mut Self::Sink, chunk: &Chunk<Host, bf16>) {
        let rows = chunk.rows();
        sink[rows.start * *k..rows.end * *k].copy_from_slice(chunk.values());
    }

    fn take_by_way_of(sink: &mut Self::Sink, _: Matrix<Host, bf16>, chunk: &Chunk<Host, bf16>) {
        // Matrices of the host are read and written by calls, which a consumer makes none of.
        Self::take(sink, chunk);
    }

    fn taken((sink, _): &Self::Sink) -> Vec<bf16> {
        sink.clone()
    }
}

/// What a link takes for a chunk.
const CHUNK: Duration = Duration::from_millis(8);
/// What the machine's scheduler may take; where it takes longer, the same delays are tried again.
const SLACK: Duration = Duration::from_millis(4);
const TRIES: usize = 4;
/// Rows of each of three ranks, as one chunk.
const ROWS: usize = 16;
const K: usize = 512;

/// Runs what `prepare` makes on three ranks 100 times, with a link that takes [`CHUNK`] for a chunk, each rank a while
/// later than others; it is given what each call of the caller's function is to do. `loses` says by how much a rank's
/// last transfer came later than it could have.
#[track_caller]
fn check_order<F: FnMut(&mut dyn FnMut()) -> Result<Trace, Error>>(
    prepare: impl Fn(Group<Host>) -> Result<F, Error> + Sync,
    loses: impl Fn(&Timeline, usize) -> Duration + Sync,
) {
    let bytes_per_second = (ROWS * K * size_of::<bf16>()) as f64 / CHUNK.as_secs_f64();
    let builder = Group::<Host>::builder()
        .workers(1)
        .link(bytes_per_second as usize);
    let ranks = builder.threads(3, |group| {
        let mut losses = Vec::new();
        let mut operation = prepare(group.clone())?;
        for round in 0..100 {
            let mut tries = 0;
            let loss = loop {
                let mut random = rng(round * 3 + group.rank() as u64);
                group.barrier()?;
                std::thread::sleep(CHUNK.mul_f64(random.random_range(0.0..2.0)));
                let mut linger =
                    || std::thread::sleep(CHUNK.mul_f64(random.random_range(0.0..1.0)));
                let trace = operation(&mut linger)?;
                let timeline = Timeline::collect(&group, &trace)?;
                // The same on all ranks.
                let loss = (0..3).map(|rank| loses(&timeline, rank)).max();
                let loss = loss.unwrap_or_default();
                tries += 1;
                if loss < CHUNK + SLACK || tries == TRIES {
                    break loss;
                }
            };
            assert!(loss < CHUNK + SLACK, "round {round}: {loss:?}");
            losses.push(loss);
        }
        Ok::<_, Error>(losses)
    });
    let losses = ranks.expect("all are in order").swap_remove(0);
    let longest = losses.iter().max().expect("there are 100");
    println!("at most {longest:?} lost to order, of chunks of {CHUNK:?}");
}

/// When one engine could have ended transfers of a chunk each that can begin at these times, and from `begin` on; by
/// how much later it has.
fn late(mut begins: Vec<u64>, begin: u64, end: u64) -> Duration {
    begins.sort_unstable();
    let chunk = CHUNK.as_nanos() as u64;
    let soonest = begins
        .iter()
        .fold(begin, |end, &begin| end.max(begin) + chunk);
    Duration::from_nanos(end.saturating_sub(soonest))
}

/// When a rank's function was called first: it had told its peers before.
fn begun(timeline: &Timeline, rank: usize) -> u64 {
    called(&timeline.traces[rank])[0].1.begin
}

fn last_transfer(timeline: &Timeline, rank: usize) -> u64 {
    let copies = timeline.traces[rank].spans.iter();
    let ends = copies.filter(|span| span.lane == Lane::Copy);
    ends.map(|span| span.end).max().expect("rows were moved")
}

#[test]
fn no_rank_waits_for_another_longer_than_a_chunk_because_of_the_order_in_which_rows_are_gathered() {
    check_order(
        |group| {
            let a = group.sharded::<bf16>(3 * ROWS, K)?;
            let operation = AllGatherAndConsume::new().chunks(1);
            Ok(move |linger: &mut dyn FnMut()| {
                operation.run_traced(&a, |_| {
                    linger();
                    Ok(())
                })
            })
        },
        |timeline, rank| {
            let peers = (1..3).map(|step| (rank + step) % 3);
            let begins = peers.map(|peer| begun(timeline, peer)).collect();
            let own = begun(timeline, rank);
            late(begins, own, last_transfer(timeline, rank))
        },
    );
}

#[test]
fn no_rank_waits_for_another_longer_than_a_chunk_because_of_the_order_in_which_blocks_are_made() {
    check_order(
        |group| {
            let mut out = group.zeros::<bf16>(ROWS, K)?;
            Ok(move |linger: &mut dyn FnMut()| {
                ProduceAndReduceScatter::new().run_traced(3 * ROWS, &mut out, |mut block| {
                    linger();
                    block.values_mut().fill(bf16::ONE);
                    Ok(())
                })
            })
        },
        |timeline, rank| {
            let calls = called(&timeline.traces[rank]);
            let others = calls.iter().filter(|(owner, _)| *owner != rank);
            let begins = others.map(|(owner, call)| call.end.max(begun(timeline, *owner)));
            let own = begun(timeline, rank);
            late(begins.collect(), own, last_transfer(timeline, rank))
        },
    );
}

crate::support::shared::pipelines_tests!(Host, Some(()));
