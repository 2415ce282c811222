//! Rows that ranks exchange and add up: what they have, and what the caller makes while it is on its way.

use std::time::Duration;

use bytemuck::Pod;
use gemmesh::elements::{Float, Value};
use gemmesh::error::Kind;
use gemmesh::pipelines::{
    Block, ProduceAndAllToAll, ProduceAndReduceScatter, produce_and_all_to_all,
    produce_and_reduce_scatter,
};
use gemmesh::trace::{Span, Work};
use gemmesh::{
    Error, F8E4M3, F8E5M2, Group, Host, Matrix, all_gather, all_reduce, all_to_all, bf16,
    broadcast, f16, reduce_scatter,
};
use rand::RngExt;

use crate::support::errors::{assert_call_in_callback, parts, parts_of};
use crate::support::numbers::{nan, normal, rng};
use crate::support::processes::Rank;
use crate::support::shared::pipelines::{TICK, assert_in_turn, called};
use crate::support::tested::{
    Tested, all_done, assert_call_mismatch, connect, connect_short, poisoned, ranks, same_error,
    until_failure,
};

/// A backend whose blocks the tests make.
pub trait Produces: Tested {
    /// The block becomes rows of `from` from `first` on, which hold `values`.
    fn put<T: Value>(
        block: &mut Block<Self, T>,
        from: &Matrix<Self, T>,
        values: &[T],
        first: usize,
    );

    /// Nothing that is made after this is there for a while.
    fn linger<T: Value>(block: &Block<Self, T>, time: Duration);
}

impl Produces for Host {
    fn put<T: Value>(block: &mut Block<Host, T>, _: &Matrix<Host, T>, values: &[T], first: usize) {
        let ([rows, n], pitch) = (block.shape(), block.pitch());
        let to = block.values_mut().chunks_mut(pitch);
        for (to, from) in to.zip(values[first * n..(first + rows) * n].chunks(n)) {
            to[..n].copy_from_slice(from);
        }
    }

    fn linger<T: Value>(_: &Block<Host, T>, time: Duration) {
        std::thread::sleep(time);
    }
}

pub fn bytes<T: Pod>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Any bits.
pub fn random<T: Value>(seed: u64, count: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); count];
    rng(seed).fill(bytemuck::cast_slice_mut::<T, u8>(&mut values));
    values
}

/// The sums in f32, in the order of the addends, rounded once.
fn sums<T: Float>(addends: &[Vec<T>]) -> Vec<T> {
    let sum = |i: usize| {
        let first = addends[0][i].to_f32();
        let rest = addends[1..].iter();
        T::from_f32(rest.fold(first, |sum, addend| sum + addend[i].to_f32()))
    };
    (0..addends[0].len()).map(sum).collect()
}

/// How often a test goes on with other data, delays and shapes.
const SEEDS: u64 = 24;

/// Runs `step` with seeds, most of them with delays.
pub fn with_delays(mut step: impl FnMut(u64) -> Result<(), Error>) -> Result<String, Error> {
    for seed in 0..SEEDS {
        gemmesh::testing::delay_chunks((seed > 3).then_some(seed));
        step(seed)?;
    }
    gemmesh::testing::delay_chunks(None);
    Ok(format!("{SEEDS} times"))
}

const ROWS: [[usize; 3]; 4] = [[40, 0, 17], [1, 1, 1], [0, 0, 65], [128, 300, 130]];

/// Each rank gets its rows of the sum of what the ranks make: the peers' rows are asked for first, and its own last,
/// each row once.
#[track_caller]
pub fn what_is_produced_is_summed_by_its_owner<B: Produces>(test: &str) {
    fn step<B: Produces, T: Float>(group: &Group<B>, seed: u64) -> Result<(), Error> {
        let (rank, world) = (group.rank(), group.world_size());
        let rows = ROWS[seed as usize % ROWS.len()];
        let (m, n) = (rows.iter().sum::<usize>(), [8, 13, 24][seed as usize % 3]);
        let chunks = 1 + seed as usize % 4;
        let made = |rank: usize| normal::<T>(seed * 8 + rank as u64, m * n);
        let own = made(rank);
        let source = group.upload(&own, m, n)?;
        let mut out = group.upload(&vec![nan::<T>(); rows[rank] * n], rows[rank], n)?;
        let mut calls = Vec::new();
        ProduceAndReduceScatter::new()
            .rows(&rows)
            .chunks(chunks)
            .run(m, &mut out, |mut block| {
                assert_eq!(block.shape(), [block.rows().len(), n]);
                let first = block.rows().start;
                B::put(&mut block, &source, &own, first);
                calls.push((block.owner(), block.rows()));
                Ok(())
            })?;
        let first: usize = rows[..rank].iter().sum();
        let addends: Vec<Vec<T>> = (0..world).map(made).collect();
        let expected = &sums(&addends)[first * n..(first + rows[rank]) * n];
        assert_eq!(bytes(&out.to_vec()?), bytes(expected), "seed {seed}");
        let mut next = 0;
        for owner in (1..=world).map(|step| (rank + step) % world) {
            let mut row = rows[..owner].iter().sum::<usize>();
            let end = row + rows[owner];
            while row < end {
                let (problem, of) = &calls[next];
                assert_eq!((*problem, of.start), (owner, row), "seed {seed}");
                (row, next) = (of.end, next + 1);
            }
            assert_eq!(row, end, "seed {seed}");
        }
        assert_eq!(next, calls.len(), "seed {seed}");
        Ok(())
    }
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        with_delays(|seed| match seed % 3 {
            0 => step::<B, bf16>(&group, seed),
            1 => step::<B, f16>(&group, seed),
            _ => step::<B, f32>(&group, seed),
        })
    }));
}

/// A trace shows the peers' blocks made first, and each sent when it was made.
#[track_caller]
pub fn a_trace_shows_blocks_sent_when_they_are_made<B: Produces>(test: &str) {
    let (m, n) = (900, 64);
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let own = normal::<f32>(rank.rank as u64, m * n);
        let source = group.upload(&own, m, n)?;
        let mut out = group.zeros::<f32>(m / 3, n)?;
        let operation = ProduceAndReduceScatter::new();
        for seed in 0..10 {
            gemmesh::testing::delay_chunks(Some(seed));
            let trace = operation.run_traced(m, &mut out, |mut block| {
                let first = block.rows().start;
                B::put(&mut block, &source, &own, first);
                Ok(())
            })?;
            let calls = called(&trace);
            assert_in_turn(&calls, [1, 2, 3].map(|step| (rank.rank + step) % 3));
            for (owner, call) in calls.iter().filter(|(owner, _)| *owner != rank.rank) {
                let sent =
                    |span: &&Span| matches!(span.work, Work::Push { to, .. } if to == *owner);
                let sent: Vec<&Span> = trace.spans.iter().filter(sent).collect();
                assert_eq!(sent.len(), 1, "seed {seed}, rows of {owner}");
                let early = call.end.saturating_sub(sent[0].begin);
                assert!(early < TICK, "seed {seed}: {:?} before {call:?}", sent[0]);
            }
        }
        gemmesh::testing::delay_chunks(None);
        Ok("10 times".into())
    }));
}

/// The same into a sharded matrix, which the next operation gathers; in as many blocks as the library chooses.
#[track_caller]
pub fn what_is_produced_is_the_next_input<B: Produces>(test: &str) {
    const N: usize = 16;
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        with_delays(|seed| {
            let m = [512, 301, 2, 1][seed as usize % 4];
            let made = |rank: usize| normal::<bf16>(seed * 8 + rank as u64, m * N);
            let own = made(rank.rank);
            let source = group.upload(&own, m, N)?;
            let mut out = group.sharded::<bf16>(m, N)?;
            let poison = vec![nan(); out.rows().len() * N];
            out.shard_mut().copy_from_host(&poison)?;
            out.poison(nan())?;
            ProduceAndReduceScatter::new().run_into(&mut out, |mut block| {
                let first = block.rows().start;
                B::put(&mut block, &source, &own, first);
                Ok(())
            })?;
            all_gather(&out)?;
            let expected = sums(&[made(0), made(1)]);
            assert_eq!(bytes(&out.to_vec()?), bytes(&expected), "seed {seed}");
            Ok(())
        })
    }));
}

/// Each rank gets what the others make for it, of any width.
#[track_caller]
pub fn what_is_produced_reaches_its_rank<B: Produces>(test: &str) {
    fn step<B: Produces, T: Value>(group: &Group<B>, seed: u64) -> Result<(), Error> {
        let (rank, world) = (group.rank(), group.world_size());
        let rows = ROWS[seed as usize % ROWS.len()];
        let (m, n) = (rows.iter().sum::<usize>(), 16 * (1 + seed as usize % 3));
        let made = |rank: usize| random::<T>(seed * 8 + rank as u64, world * rows[rank] * n);
        let own = made(rank);
        let source = group.upload(&own, world * rows[rank], n)?;
        let mut out = group.sharded_rows::<T>(&rows, n)?;
        let mut owners = Vec::new();
        ProduceAndAllToAll::new()
            .chunks(1 + seed as usize % 4)
            .run(&mut out, |mut block| {
                let first = block.owner() * rows[rank] + block.rows().start;
                B::put(&mut block, &source, &own, first);
                owners.push(block.owner());
                Ok(())
            })?;
        let mut expected = Vec::new();
        for (from, &rows) in rows.iter().enumerate() {
            let of = made(from);
            expected.extend_from_slice(&of[rank * rows * n..(rank + 1) * rows * n]);
        }
        assert_eq!(expected.len(), m * n);
        assert_eq!(bytes(&out.to_vec()?), bytes(&expected), "seed {seed}");
        owners.dedup();
        let ring = (1..=world).map(|step| (rank + step) % world);
        let ring: Vec<usize> = ring.filter(|_| rows[rank] > 0).collect();
        assert_eq!(owners, ring, "seed {seed}");
        Ok(())
    }
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        with_delays(|seed| match seed % 3 {
            0 => step::<B, u8>(&group, seed),
            1 => step::<B, bf16>(&group, seed),
            _ => step::<B, u64>(&group, seed),
        })
    }));
}

/// Where one rank's first block is late, so that its second is made first, and each rank's function is held up for a
/// while now and then, that costs time: 100 times, the sums are right.
#[track_caller]
pub fn ranks_out_of_step_lose_time_only<B: Produces>(test: &str) {
    const ROUNDS: u64 = 100;
    const LATE: Duration = Duration::from_millis(3);
    let (m, n) = (900, 16);
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let made: Vec<Vec<f32>> = (0..3).map(|rank| normal(rank, m * n)).collect();
        let expected = sums(&made);
        let own = &made[rank.rank];
        let source = group.upload(own, m, n)?;
        let mut out = group.zeros::<f32>(m / 3, n)?;
        let mut delays = rng(7 + rank.rank as u64);
        for round in 0..ROUNDS {
            out.copy_from_host(&vec![nan(); m / 3 * n])?;
            let mut calls = 0;
            produce_and_reduce_scatter(m, &mut out, |mut block| {
                if calls == 0 && round % 3 == rank.rank as u64 {
                    B::linger(&block, LATE);
                }
                calls += 1;
                std::thread::sleep(Duration::from_micros(delays.random_range(0..1500)));
                let first = block.rows().start;
                B::put(&mut block, &source, own, first);
                Ok(())
            })?;
            let own = rank.rank * m / 3 * n..(rank.rank + 1) * m / 3 * n;
            assert_eq!(
                bytes(&out.to_vec()?),
                bytes(&expected[own]),
                "round {round}"
            );
        }
        Ok(format!("{ROUNDS} times"))
    }));
}

/// What is gathered, what one rank has, and what each has for each other. Collective.
fn values_of_any_type_are_exchanged<B: Tested, T: Value>(
    group: &Group<B>,
    seed: u64,
) -> Result<(), Error> {
    let (rank, world) = (group.rank(), group.world_size());
    let rows = (0..world).map(|rank| [40, 0, 17, 301][(seed as usize + rank) % 4]);
    let mut rows: Vec<usize> = rows.collect();
    rows[0] = rows[0].max(1);
    let (m, n) = (rows.iter().sum::<usize>(), 16);
    let all = random::<T>(seed, m * n);
    let mut a = group.sharded_rows::<T>(&rows, n)?;
    let own = a.rows();
    a.shard_mut()
        .copy_from_host(&all[own.start * n..own.end * n])?;
    a.poison(T::zeroed())?;
    all_gather(&a)?;
    assert_eq!(bytes(&a.to_vec()?), bytes(&all), "gather, seed {seed}");

    let root = seed as usize % world;
    let roots = |rank: usize| random::<T>(seed * 8 + rank as u64 + 1, m * n);
    let whole = roots(rank);
    a.shard_mut()
        .copy_from_host(&whole[own.start * n..own.end * n])?;
    for others in [0..own.start, own.end..m] {
        a.write(others.start, &whole[others.start * n..others.end * n])?;
    }
    broadcast(&mut a, root)?;
    assert_eq!(
        bytes(&a.to_vec()?),
        bytes(&roots(root)),
        "broadcast from {root}, seed {seed}"
    );

    let sent = |rank: usize| random::<T>(seed * 8 + rank as u64 + 2, world * rows[rank] * n);
    let input = sent(rank);
    let input = group.upload(&input, world * rows[rank], n)?;
    all_to_all(&input, &mut a)?;
    let mut expected = Vec::new();
    for (from, &rows) in rows.iter().enumerate() {
        let of = sent(from);
        expected.extend_from_slice(&of[rank * rows * n..(rank + 1) * rows * n]);
    }
    assert_eq!(
        bytes(&a.to_vec()?),
        bytes(&expected),
        "all to all, seed {seed}"
    );
    Ok(())
}

/// Sums of which each rank gets its rows, and sums of which each gets all. Collective.
fn floats_are_added_up<B: Tested, T: Float>(group: &Group<B>, seed: u64) -> Result<(), Error> {
    let (rank, world) = (group.rank(), group.world_size());
    // The last is too large for each rank to get all of it, where there are more than two.
    let m = [7, 64, 1, 5000][seed as usize % 4];
    let n = [13, 16, 40][seed as usize % 3];
    let addend = |rank: usize| normal::<T>(seed * 8 + rank as u64, m * n);
    let expected = sums(&(0..world).map(addend).collect::<Vec<_>>());
    let input = group.upload(&addend(rank), m, n)?;
    let rows = |rank: usize| m / world + usize::from(rank < m % world);
    let first: usize = (0..rank).map(rows).sum();
    let mut out = group.upload(&vec![nan::<T>(); rows(rank) * n], rows(rank), n)?;
    reduce_scatter(&input, &mut out)?;
    let own = &expected[first * n..(first + rows(rank)) * n];
    assert_eq!(bytes(&out.to_vec()?), bytes(own), "scatter, seed {seed}");

    // The rows of a sharded matrix are whole 16 bytes.
    let n = n.next_multiple_of(8);
    let addend = |rank: usize| normal::<T>(seed * 8 + rank as u64, m * n);
    let expected = sums(&(0..world).map(addend).collect::<Vec<_>>());
    let input = group.upload(&addend(rank), m, n)?;
    let mut all = group.sharded::<T>(m, n)?;
    let poison = vec![nan(); all.rows().len() * n];
    all.shard_mut().copy_from_host(&poison)?;
    all.poison(nan())?;
    all_reduce(&input, &mut all)?;
    assert_eq!(
        bytes(&all.to_vec()?),
        bytes(&expected),
        "reduce, seed {seed}"
    );
    Ok(())
}

/// All collectives, one after the other on the same memory, of `world` ranks.
#[track_caller]
pub fn collectives_exchange_what_ranks_have<B: Tested>(test: &str, world: usize) {
    all_done(ranks::<B>(test, world, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        with_delays(|seed| {
            match seed % 6 {
                0 => values_of_any_type_are_exchanged::<B, u8>(&group, seed)?,
                1 => values_of_any_type_are_exchanged::<B, F8E4M3>(&group, seed)?,
                2 => values_of_any_type_are_exchanged::<B, F8E5M2>(&group, seed)?,
                3 => values_of_any_type_are_exchanged::<B, u16>(&group, seed)?,
                4 => values_of_any_type_are_exchanged::<B, f32>(&group, seed)?,
                _ => values_of_any_type_are_exchanged::<B, u64>(&group, seed)?,
            }
            match seed % 3 {
                0 => floats_are_added_up::<B, bf16>(&group, seed),
                1 => floats_are_added_up::<B, f16>(&group, seed),
                _ => floats_are_added_up::<B, f32>(&group, seed),
            }
        })
    }));
}

/// A rank that only adds up, and sends nothing, completes its operations too: many in a row, and no deadline passes
/// afterwards.
#[track_caller]
pub fn a_rank_that_sends_nothing_completes<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let (_kept, group) = connect_short::<B>(rank)?;
        // Rank 0 owns the only row.
        let n = 16;
        let input = group.upload(&vec![1.0f32; n], 1, n)?;
        let mut out = group.zeros::<f32>(1 - rank.rank, n)?;
        for _ in 0..100 {
            reduce_scatter(&input, &mut out)?;
        }
        group.synchronize()?;
        std::thread::sleep(B::away());
        group.synchronize()?;
        assert!(out.to_vec()?.iter().all(|&sum| sum == 2.0));
        group.barrier()?;
        Ok("100 times".into())
    }));
}

/// An error of the function that rank 1 gives, amid what it makes for others, is every rank's.
#[track_caller]
pub fn an_error_of_a_producer_is_every_ranks<B: Produces>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let values = vec![bf16::ONE; 30 * 8];
        let source = group.upload(&values, 30, 8)?;
        let mut out = group.zeros::<bf16>(10, 8)?;
        until_failure(&group, || {
            let mut calls = 0;
            produce_and_reduce_scatter(30, &mut out, |mut block| {
                calls += 1;
                if (rank.rank, calls) == (1, 2) {
                    return Err("no second block".into());
                }
                let first = block.rows().start;
                B::put(&mut block, &source, &values, first);
                Ok(())
            })
        })
    });
    let outcomes = ranks.outcomes();
    let expected = Kind::ProgramFailed {
        function_of: Some("produce_and_reduce_scatter".into()),
        reason: "no second block".into(),
    }
    .on(1);
    assert_eq!(same_error(&outcomes), expected);
}

/// A panic of the function that rank 0 gives goes on there, and ends the group on every rank.
#[track_caller]
pub fn a_panic_of_a_producer_ends_the_group<B: Produces>(test: &str) {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    let ranks = ranks::<B>(test, 2, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut out = group.sharded::<u8>(30, 16)?;
        if rank.rank == 0 {
            let panic = catch_unwind(AssertUnwindSafe(|| {
                // As a panic, without its words.
                produce_and_all_to_all(&mut out, |_| resume_unwind(Box::new("planted")))
            }));
            let payload = panic.expect_err("the panic goes on");
            assert_eq!(payload.downcast_ref(), Some(&"planted"));
        }
        until_failure(&group, || produce_and_all_to_all(&mut out, |_| Ok(())))
    });
    let outcomes = ranks.outcomes();
    let message = Some("planted".into());
    let expected = Kind::RankPanicked { message }.on(0);
    assert_eq!(same_error(&outcomes), expected);
}

/// A function that does not return is named by its rank, at the deadline: the others wait for what it makes.
#[track_caller]
pub fn a_producer_that_takes_too_long_is_named<B: Produces>(test: &str) {
    let ranks = ranks::<B>(test, 2, |rank: &Rank| {
        let (_kept, group) = connect_short::<B>(rank)?;
        let mut out = group.sharded::<u8>(30, 16)?;
        let mut slow = rank.rank == 1;
        until_failure(&group, || {
            produce_and_all_to_all(&mut out, |_| {
                if std::mem::take(&mut slow) {
                    std::thread::sleep(B::away() + Duration::from_secs(3));
                }
                Ok(())
            })
        })
    });
    for outcome in ranks.outcomes() {
        match parts(outcome.error()) {
            (Some(1), Kind::Timeout { what, .. }) => {
                // Whoever is the first to say so.
                let of_call = what.contains("produce_and_all_to_all");
                let of_function = what.contains("its caller's function has not returned");
                assert!(of_call || of_function, "{what}");
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Ranks agree on the blocks that are sent.
#[track_caller]
pub fn producers_of_other_blocks_are_a_mismatch<B: Produces>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut out = group.zeros::<f32>(10, 8)?;
        let chunks = if rank.rank == 2 { 3 } else { 1 };
        let produce = ProduceAndReduceScatter::new().chunks(chunks);
        let result = produce.run(30, &mut out, |_| Ok(()));
        poisoned(&group, result.and_then(|()| group.synchronize()))
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    let call = "produce_and_reduce_scatter(M = 30, N = 8, f32)";
    assert_call_mismatch(&error, 2, call, call);
    let words = error.to_string();
    assert!(words.contains("with chunks = 3, and rank 0"), "{words}");
}

/// What does not fit is refused by name before anything is done, and the group goes on.
#[track_caller]
pub fn what_cannot_be_exchanged_is_refused<B: Produces>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let other = {
            let address = format!("{}-other", rank.address);
            let builder = Group::<B>::builder().timeout(B::TIMEOUT);
            builder.connect(rank.rank, rank.world, &address)?
        };
        let mut sharded = group.sharded::<bf16>(8, 8)?;
        let input = group.zeros::<bf16>(8, 8)?;
        let mut long = group.zeros::<bf16>(5, 8)?;
        let mut foreign = other.zeros::<bf16>(4, 8)?;
        let shape = |result: Result<(), Error>| match parts_of(&result) {
            Some((_, Kind::Shape { .. })) => {}
            other => panic!("{other:?}"),
        };
        shape(reduce_scatter(&input, &mut long));
        shape(all_to_all(&long, &mut sharded));
        shape(all_reduce(&long, &mut sharded));
        shape(produce_and_reduce_scatter(8, &mut long, |_| Ok(())));
        let split = ProduceAndReduceScatter::new().rows(&[3, 5]);
        shape(split.run_into(&mut sharded, |_| Ok(())));
        let limit = |result: Result<(), Error>| match parts_of(&result) {
            Some((_, Kind::Limit { .. })) => {}
            other => panic!("{other:?}"),
        };
        limit(broadcast(&mut sharded, 2));
        let none = ProduceAndReduceScatter::new().chunks(0);
        limit(none.run_into(&mut sharded, |_| Ok(())));
        let many = ProduceAndAllToAll::new().chunks(65);
        limit(many.run(&mut sharded, |_| Ok(())));
        match parts_of(
            &reduce_scatter(&input, &mut foreign)
                .as_ref()
                .map_err(Error::cause),
        ) {
            Some((_, Kind::Unsuitable { .. })) => {}
            other => panic!("{other:?}"),
        }
        let mut refused = 0;
        produce_and_all_to_all(&mut sharded, |_| {
            let result = group.synchronize();
            let error = result.expect_err("it would wait for itself");
            assert_call_in_callback(&error, rank.rank);
            refused += 1;
            Ok(())
        })?;
        assert!(refused > 0);
        all_gather(&sharded)?;
        group.synchronize()?;
        Ok("refused".into())
    }));
}
