//! That schedules can say what no operation does yet: the host engine does what planners of these tests ask for.
#![allow(unsafe_code)]

#[path = "support/planners.rs"]
mod planners;

use gemmesh::error::Kind;
use gemmesh::schedule::{
    Hosts, Layout, Move, Operation, Parts, Problem, Region, RowOrder, Schedule, Transfer, plan,
};
use gemmesh::testing::{delay_chunks, run_schedule};
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, DType, Error, Group, Host, ShardedMatrix, bf16};
use planners::{Asked, SCALED};

const CONFIG: Config = Config::new(
    TileShape::new(4, 4, 4).with_group_m(2),
    Chunking::new(1),
    Route::Pull,
);
const ASKED: Asked = Asked {
    world: 4,
    block: 3,
    k: 8,
    n: 9,
};
/// Operations of each test, one after the other, with chunks that come late.
const OPERATIONS: usize = 40;

/// What stands in row `row` and column `column` of matrix `matrix` in operation `operation`: small numbers, whose
/// products bf16 and f32 hold exactly.
fn value(matrix: usize, row: usize, column: usize, operation: usize) -> bf16 {
    bf16::from_f32(((matrix * 7 + row * 3 + column + operation) % 5) as f32 - 2.0)
}

fn rows(
    matrix: usize,
    rows: std::ops::Range<usize>,
    columns: usize,
    operation: usize,
) -> Vec<bf16> {
    rows.flat_map(|row| (0..columns).map(move |column| value(matrix, row, column, operation)))
        .collect()
}

/// Runs schedules as `plan` makes them on every rank, on matrices of which each rank has written the rows that `owner`
/// gives it; then sees whether all rows are there and the product is right. `widths`: the columns of the matrices.
fn check(
    widths: &[usize],
    problem: Asked,
    m: usize,
    owner: impl Fn(usize) -> usize + Sync,
    plan: impl Fn(usize) -> Schedule + Sync,
) {
    delay_chunks(Some(7));
    let ranks = Group::<Host>::threads(problem.world, |group| {
        let rank = group.rank();
        let new = |&k: &usize| group.sharded::<bf16>(m, k);
        let mut shared: Vec<ShardedMatrix<Host, bf16>> =
            widths.iter().map(new).collect::<Result<_, _>>()?;
        let weight = rows(2, 0..problem.n.max(1), problem.k, 0);
        let b = group.upload(&weight, problem.n.max(1), problem.k)?;
        let mut out = group.zeros::<bf16>(m, problem.n.max(1))?;
        for operation in 0..OPERATIONS {
            for (number, matrix) in shared.iter_mut().enumerate() {
                let columns = widths[number];
                matrix.write(0, &vec![bf16::NAN; m * columns])?;
                for row in (0..m).filter(|&row| owner(row) == rank) {
                    matrix.write(row, &rows(number, row..row + 1, columns, operation))?;
                }
            }
            // No one writes what a peer has moved already.
            group.barrier()?;
            let refs: Vec<_> = shared.iter().collect();
            let product = (problem.n > 0).then_some((&b, &mut out));
            // SAFETY: a planner has made the schedules of all ranks.
            unsafe { run_schedule(&group, plan(rank), &refs, product)? };
            for (number, matrix) in shared.iter_mut().enumerate() {
                let expected = rows(number, 0..m, widths[number], operation);
                assert_eq!(matrix.to_vec()?, expected, "rank {rank}, matrix {number}");
            }
            if problem.n > 0 {
                let a = rows(0, 0..m, problem.k, operation);
                assert_eq!(
                    out.to_vec()?,
                    product_of(&a, &weight, problem.k),
                    "rank {rank}"
                );
            }
            group.barrier()?;
        }
        Ok::<(), Error>(())
    });
    ranks.unwrap();
}

fn product_of(a: &[bf16], b: &[bf16], k: usize) -> Vec<bf16> {
    let dot = |x: &[bf16], y: &[bf16]| -> f64 {
        x.iter().zip(y).map(|(x, y)| x.to_f64() * y.to_f64()).sum()
    };
    let rows = a.chunks_exact(k);
    rows.flat_map(|row| {
        b.chunks_exact(k)
            .map(move |column| bf16::from_f64(dot(row, column)))
    })
    .collect()
}

fn by(route: Route) -> Config {
    CONFIG.with_route(route)
}

#[test]
fn rows_that_each_rank_owns_in_several_blocks_are_gathered_stage_by_stage() {
    for route in [Route::Pull, Route::Push] {
        for stages in [1, 2, 5] {
            let plan = |rank| planners::staged(ASKED, stages, rank, by(route));
            let m = stages * ASKED.world * ASKED.block;
            let owner = |row: usize| row / ASKED.block % ASKED.world;
            check(&[ASKED.k], ASKED, m, owner, plan);
        }
    }
}

#[test]
fn a_matrix_and_its_scales_arrive_under_one_flag() {
    for route in [Route::Pull, Route::Push] {
        let plan = |rank| planners::with_scales(ASKED, false, rank, by(route));
        let m = ASKED.world * ASKED.block;
        check(
            &[ASKED.k, ASKED.k / SCALED],
            ASKED,
            m,
            |row| row / ASKED.block,
            plan,
        );
    }
}

#[test]
fn rows_that_others_pass_on_arrive_and_are_multiplied() {
    let plan = |rank| planners::relayed(ASKED, rank, CONFIG);
    let m = ASKED.world * ASKED.block;
    check(&[ASKED.k], ASKED, m, |row| row / ASKED.block, plan);
}

#[test]
fn rows_of_other_hosts_come_over_a_rail_and_are_passed_on() {
    // Hosts of two ranks, of three, and of one, whose ranks are not all numbered host by host.
    for (hosts, rows) in [
        (&["a", "b", "b", "a"][..], &[5, 0, 7, 3][..]),
        (&["a", "a", "a", "b", "b", "b"], &[4, 1, 0, 6, 5, 2]),
        (&["a", "b", "c"], &[3, 4, 5]),
    ] {
        for (operation, n) in [
            (Operation::ALL_GATHER_MATMUL, ASKED.n),
            (Operation::ALL_GATHER, 0),
        ] {
            for (stages, route) in [(1, Route::Pull), (3, Route::Push), (2, Route::Store)] {
                let layout = Layout::new(rows, ASKED.k).unwrap();
                let layout = layout.staged(stages, RowOrder::ByRank).unwrap();
                let problem = Problem {
                    // Of ranks that share memory.
                    hosts: Hosts::of(hosts).unwrap().sharing_memory(),
                    ..Problem::new(operation, DType::Bf16, layout.clone(), n)
                };
                let owner = |row| (0..rows.len()).find(|&r| layout.rows_of(r).contains(&row));
                let asked = Asked {
                    world: rows.len(),
                    n,
                    ..ASKED
                };
                check(
                    &[ASKED.k],
                    asked,
                    layout.m(),
                    |row| owner(row).unwrap(),
                    |rank| plan::plan(&problem, rank, by(route)).unwrap(),
                );
            }
        }
    }
}

#[test]
fn an_operation_without_tiles_ends_when_all_that_others_write_has_come() {
    let problem = Asked { n: 0, ..ASKED };
    let m = problem.world * problem.block;
    let owner = |row: usize| row / problem.block;
    let plan = |rank| planners::relayed(problem, rank, CONFIG);
    check(&[problem.k], problem, m, owner, plan);
    let plan = |rank| planners::with_scales(problem, false, rank, by(Route::Push));
    check(&[problem.k, problem.k / SCALED], problem, m, owner, plan);
}

#[test]
fn an_operation_with_tiles_ends_when_what_no_tile_waits_for_has_come_too() {
    let m = ASKED.world * ASKED.block;
    for route in [Route::Pull, Route::Push] {
        let plan = |rank| planners::with_scales(ASKED, true, rank, by(route));
        check(
            &[ASKED.k, ASKED.k / SCALED],
            ASKED,
            m,
            |row| row / ASKED.block,
            plan,
        );
    }
}

/// The schedule of one rank that copies rows 0 and 1 within matrix 0, [4, 4], to rows from `first` on.
fn copies_within(first: usize, rank: usize, world: usize) -> Result<Schedule, Error> {
    let region = |first: usize| Region {
        matrix: planners::A,
        rows: first..first + 2,
        columns: 0..4,
    };
    let transfer = Transfer {
        from: rank,
        to: rank,
        source: rank,
        regions: [Move {
            from: region(0),
            to: region(first),
        }]
        .into_iter()
        .collect(),
        after: 0..0,
        produced: None,
        added: None,
        flag: 0,
        route: Route::Pull,
        turn: 0,
        last_step: false,
    };
    let problem = Asked {
        world,
        block: 4 / world,
        k: 4,
        n: 0,
    };
    let empty = planners::relayed(
        Asked {
            world: 1,
            ..problem
        },
        0,
        CONFIG,
    );
    Schedule::new(Parts {
        rank,
        world,
        agreed: empty.agreed().cloned(),
        matrices: planners::relayed(problem, rank, CONFIG).matrices().to_vec(),
        arrivals: vec![transfer],
        departures: Vec::new(),
        product: None,
        tiles: Vec::new(),
        requests: Vec::new(),
        host_sums: Vec::new(),
        reduction: None,
        one_shot: false,
    })
}

#[test]
fn what_lies_within_itself_is_not_copied() {
    let refused = copies_within(1, 0, 1).unwrap_err();
    assert!(format!("{refused:?}").contains("overlap"), "{refused:?}");
    let ranks = Group::<Host>::threads(1, |group| {
        let mut a = group.sharded::<bf16>(4, 4)?;
        let values: Vec<bf16> = rows(0, 0..4, 4, 0);
        a.write(0, &values)?;
        // SAFETY: there are no other ranks, and no tiles.
        unsafe { run_schedule(&group, copies_within(2, 0, 1).unwrap(), &[&a], None)? };
        assert_eq!(a.to_vec()?, [&values[..8]; 2].concat());
        Ok::<(), Error>(())
    });
    ranks.unwrap();
}

#[test]
fn what_a_schedule_moves_is_bound_and_it_is_this_ranks() {
    let ranks = Group::<Host>::threads(1, |group| {
        let a = group.sharded::<bf16>(4, 4)?;
        for (schedule, shared) in [
            (copies_within(2, 0, 1).unwrap(), &[][..]),
            (copies_within(2, 0, 2).unwrap(), &[&a][..]),
            (copies_within(2, 1, 2).unwrap(), &[&a][..]),
        ] {
            // SAFETY: it is refused.
            let refused = unsafe { run_schedule(&group, schedule, shared, None) };
            let error = refused.unwrap_err();
            assert!(matches!(error.kind(), Kind::Limit { .. }), "{error}");
        }
        Ok::<(), Error>(())
    });
    ranks.unwrap();
}
