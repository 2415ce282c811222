//! That the host backend keeps the protocol, when chunks come late and ranks run ahead.

#[path = "support/patience.rs"]
#[allow(dead_code)]
mod patience;

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{AllGatherMatmul, Builder, Config, Error, Group, Host, all_gather_matmul, bf16};
use patience::{agreed, stretched};

const CONFIG: Config = Config::new(
    TileShape::new(4, 4, 4).with_group_m(2),
    Chunking::new(3).with_last(4).with_cut_last(true),
    Route::Pull,
);
const WORLD: usize = 3;
const M: usize = 23;
const K: usize = 2;

/// A number that bf16 holds exactly, another for each row of each operation that is near.
fn value(row: usize, operation: usize) -> bf16 {
    bf16::from_f32(((row + 31 * operation) % 251 + 1) as f32)
}

/// Overwrites the own rows, multiplies them with a matrix of which every product is the row's number, and looks
/// at every row of the result and of the gathered matrix.
fn operations(group: &Group<Host>, count: usize, ways: &[Route]) -> Result<(), Error> {
    let mut a = group.sharded::<bf16>(M, K)?;
    let b = group.upload(&[bf16::ONE, bf16::ZERO].repeat(5), 5, K)?;
    let mut out = group.zeros::<bf16>(M, 5)?;
    for operation in 0..count {
        let rows: Vec<bf16> = a
            .rows()
            .flat_map(|row| [value(row, operation); K])
            .collect();
        a.shard_mut().copy_from_host(&rows)?;
        AllGatherMatmul::new()
            .config(CONFIG.with_route(ways[operation % ways.len()]))
            .run(&a, &b, &mut out)?;
        for (row, columns) in out.to_vec()?.chunks(5).enumerate() {
            assert_eq!(columns, [value(row, operation); 5], "operation {operation}");
        }
        for (row, columns) in a.to_vec()?.chunks(K).enumerate() {
            assert_eq!(columns, [value(row, operation); K], "operation {operation}");
        }
    }
    Ok(())
}

fn group(first_epoch: u32) -> Builder<Host> {
    gemmesh::testing::delay_chunks(Some(7));
    Group::builder()
        .timeout(agreed(Duration::from_secs(10)))
        .workers(2)
        .first_epoch(first_epoch)
}

#[test]
fn the_first_operation_waits_for_rows_whatever_its_number() -> Result<(), Error> {
    for first in [0, 1, 2, 1 << 28, 1 << 31, u32::MAX - 1, u32::MAX] {
        for way in [Route::Pull, Route::Push] {
            group(first).threads(WORLD, |group| operations(&group, 1, &[way]))?;
        }
    }
    Ok(())
}

#[test]
fn own_rows_are_not_overwritten_before_every_peer_has_pulled_them() -> Result<(), Error> {
    group(u32::MAX - 30).threads(WORLD, |group| operations(&group, 60, &[Route::Pull]))?;
    Ok(())
}

#[test]
fn gathered_rows_are_not_overwritten_before_their_rank_is_ready() -> Result<(), Error> {
    group(u32::MAX - 30).threads(WORLD, |group| operations(&group, 60, &[Route::Push]))?;
    Ok(())
}

#[test]
fn rows_may_move_one_way_now_and_another_then() -> Result<(), Error> {
    use Route::{Pull, Push, Store};
    let ways = [Pull, Push, Push, Pull, Pull, Store, Push];
    group(u32::MAX - 30).threads(WORLD, |group| operations(&group, 60, &ways))?;
    Ok(())
}

#[test]
fn ranks_that_cut_pushed_rows_differently_are_told() -> Result<(), Error> {
    // Long enough to be cut.
    const K: usize = 300;
    let differences: [fn(&mut Config, usize); 4] = [
        |config, rank| config.chunking.count += rank,
        |config, rank| config.chunking.last += rank,
        |config, rank| config.chunking.cut_last = rank == 1,
        // What is stored is cut by itself.
        |config, rank| config.route = [Route::Push, Route::Store][rank],
    ];
    for differ in differences {
        two_ranks(K, |group, run| {
            let mut pushed = CONFIG.with_route(Route::Push);
            differ(&mut pushed, group.rank());
            // How rows are pulled is each rank's own affair, and so are tiles.
            run(pushed.with_route(Route::Pull))?;
            let mut other_tiles = CONFIG.with_route(Route::Push);
            other_tiles.tile.m += group.rank();
            run(other_tiles)?;
            let error = run(pushed).and_then(|()| group.barrier());
            let error = error.unwrap_err();
            assert!(matches!(error.kind(), Kind::CallMismatch { .. }), "{error}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn ranks_that_cut_pushed_rows_no_further_agree_whatever_they_ask_for() -> Result<(), Error> {
    // Too short to be cut.
    const K: usize = 64;
    two_ranks(K, |group, run| {
        let mut config = CONFIG.with_route(Route::Push);
        config.chunking.cut_last = group.rank() == 1;
        run(config)
    })
}

/// What a rank runs its product by.
type Run<'a> = &'a mut dyn FnMut(Config) -> Result<(), Error>;

/// Two ranks, each with a product of depth `k` that it may run by any configuration.
fn two_ranks(
    k: usize,
    each: impl Fn(&Group<Host>, Run) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    let group = Group::<Host>::builder().timeout(agreed(Duration::from_secs(2)));
    group.threads(2, |group| {
        let a = group.sharded::<bf16>(M, k)?;
        let b = group.zeros::<bf16>(5, k)?;
        let mut out = group.zeros::<bf16>(M, 5)?;
        let mut run = |config| AllGatherMatmul::new().config(config).run(&a, &b, &mut out);
        each(&group, &mut run)
    })?;
    Ok(())
}

#[test]
fn a_rank_that_is_late_is_named_and_the_group_starts_nothing_more() -> Result<(), Error> {
    // By rank 1: then rank 0 comes.
    let given_up = AtomicBool::new(false);
    let group = Group::<Host>::builder().arrival_timeout(agreed(Duration::from_secs(1)));
    group.threads(2, |group| {
        let a = group.sharded::<bf16>(M, K)?;
        let b = group.zeros::<bf16>(5, K)?;
        let mut out = group.zeros::<bf16>(M, 5)?;
        let begin = Instant::now();
        while group.rank() == 0
            && !given_up.load(Ordering::Relaxed)
            && begin.elapsed() < stretched(Duration::from_secs(10))
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        let first = all_gather_matmul(&a, &b, &mut out).unwrap_err();
        given_up.store(true, Ordering::Relaxed);
        let cause = first.cause();
        assert!(
            matches!(
                (cause.rank(), cause.kind()),
                (Some(0), Kind::Timeout { .. })
            ),
            "{first}"
        );
        let second = all_gather_matmul(&a, &b, &mut out).unwrap_err();
        assert!(second.has_ended_group(), "{second}");
        assert_eq!(second.cause(), cause);
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn a_group_may_wait_for_ever() -> Result<(), Error> {
    let group = Group::<Host>::builder().timeout(Duration::MAX);
    group.threads(WORLD, |group| operations(&group, 2, &[Route::Pull]))?;
    Ok(())
}

#[test]
fn a_message_too_long_for_all_is_refused_and_its_sender_named() {
    let error = Group::<Host>::threads(2, |group| {
        group.all_gather_bytes(&vec![0; group.rank() << 28])
    });
    let error = error.unwrap_err();
    let Kind::Limit { value, .. } = error.kind() else {
        panic!("{error}");
    };
    let call = error.call().map(|call| call.name());
    assert_eq!((error.rank(), call), (Some(1), Some("all_gather_bytes")));
    assert_eq!(*value, 1 << 28);
}

#[test]
fn the_failure_of_a_rank_ends_the_waits_of_the_others_at_once() -> Result<(), Error> {
    let timeout = agreed(Duration::from_secs(30));
    let all_have_failed = Barrier::new(2);
    let group = Group::<Host>::builder().timeout(timeout);
    group.threads(2, |group| {
        let a = group.sharded::<bf16>(M, K)?;
        let b = group.zeros::<bf16>(5, K)?;
        let mut out = group.zeros::<bf16>(M, 5)?;
        let prepared = AllGatherMatmul::new().prepare(&a, 5)?;
        if group.rank() == 1 {
            // Rank 0 waits by then; two that come together both see the mismatch, and neither waits.
            std::thread::sleep(Duration::from_millis(100));
        }
        let begin = Instant::now();
        let result = match group.rank() {
            0 => all_gather_matmul(&a, &b, &mut out),
            _ => prepared.gather(&a),
        };
        let (error, took) = (result.unwrap_err(), begin.elapsed());
        // A rank that leaves would end the other's wait as well.
        all_have_failed.wait();
        assert!(matches!(error.kind(), Kind::CallMismatch { .. }), "{error}");
        assert!(took < timeout / 2, "{took:?}");
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn rows_that_are_split_evenly_are_those_of_a_sharded_matrix() {
    let shapes = [1, 3, 8, 10].map(|m| (m, 4));
    Group::<Host>::threads(3, |group| {
        for (m, k) in shapes {
            let mut a = group.sharded::<bf16>(m, k)?;
            let rows: Vec<usize> = (0..3).map(|rank| a.rows_of(rank).len()).collect();
            assert_eq!(rows, group.even_rows(m));
            assert_eq!(
                (a.rows_of(3), a.blocks_of(3)),
                (m..m, Vec::new()),
                "no such rank"
            );
            let own = a.rows();
            let shard = a.shard_mut();
            assert_eq!(
                (shard.len(), shard.is_empty()),
                (own.len() * k, own.is_empty())
            );
        }
        Ok::<_, gemmesh::Error>(())
    })
    .unwrap();
}
