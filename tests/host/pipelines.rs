//! What the caller computes, beside what is moved, on the host.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::numbers::nan;
use crate::support::patience::stretched;
use crate::support::shared::pipelines::Consumes;
use gemmesh::pipelines::{AllGatherAndConsume, Chunk, ProduceAndReduceScatter};
use gemmesh::{Error, Group, Host, Matrix, bf16};

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

/// Rows of each of three ranks, as one chunk.
const ROWS: usize = 16;
const K: usize = 512;

/// Three ranks make what `prepare` returns, which counts the calls of the caller's functions. One rank, each in turn,
/// begins only when the functions of the others have been called `before` times: what needs nothing of it is done
/// without it.
#[track_caller]
fn begin_last<C: FnMut(&dyn Fn()) -> Result<(), Error>>(
    before: usize,
    prepare: impl Fn(Group<Host>) -> Result<C, Error> + Sync,
) {
    for late in 0..3 {
        let called = AtomicUsize::new(0);
        let ranks = Group::<Host>::builder().workers(1).threads(3, |group| {
            let rank = group.rank();
            let mut call = prepare(group)?;
            let begin = Instant::now();
            while rank == late && called.load(Ordering::Relaxed) < before {
                let waits = begin.elapsed() < stretched(Duration::from_secs(20));
                assert!(waits, "rank {late} is waited for");
                std::thread::sleep(Duration::from_millis(1));
            }
            call(&|| {
                called.fetch_add(1, Ordering::Relaxed);
            })
        });
        ranks.unwrap();
        assert_eq!(called.into_inner(), 9);
    }
}

#[test]
fn no_rank_waits_for_a_late_one_before_it_has_consumed_what_comes_before_the_rows_of_that() {
    // Both others consume their own rows. One of them gets the other's before those of the late rank.
    begin_last(3, |group| {
        let a = group.sharded::<bf16>(3 * ROWS, K)?;
        Ok(move |count: &dyn Fn()| {
            AllGatherAndConsume::new().chunks(1).run(&a, |_| {
                count();
                Ok(())
            })
        })
    });
}

#[test]
fn no_rank_waits_for_a_late_one_before_it_has_made_all_blocks() {
    begin_last(2 * 3, |group| {
        let mut out = group.zeros::<bf16>(ROWS, K)?;
        let mut run = move |count: &dyn Fn()| {
            ProduceAndReduceScatter::new().run(3 * ROWS, &mut out, |mut block| {
                count();
                block.values_mut().fill(bf16::ONE);
                Ok(())
            })
        };
        // In their first call the ranks make room for partial sums together.
        run(&|| ())?;
        Ok(run)
    });
}

crate::support::shared::pipelines_tests!(Host, Some(()));
