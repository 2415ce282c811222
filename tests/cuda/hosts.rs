//! Gathers over several hosts: rows come over rails and are passed on. The hosts' ranks share memory, because there is no
//! network yet.

use gemmesh::schedule::{Hosts, Layout, Operation, Problem, plan};
use gemmesh::testing::{delay_chunks, run_schedule};
use gemmesh::{DType, Route, bf16};

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal};
use crate::test_name;

/// Two chunks of the first shard cross the network. A rank has no rows.
const ROWS: [usize; 4] = [1100, 300, 0, 517];
const K: usize = 2048;

#[test]
fn rows_come_over_rails_and_are_passed_on() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 4, |rank| {
        let _context = Context::retain(rank.rank);
        delay_chunks(Some(3));
        let group = connect(rank, TIMEOUT)?;
        let values: Vec<bf16> = normal(1, ROWS.iter().sum::<usize>() * K);
        let mut a = group.sharded_rows::<bf16>(&ROWS, K)?;
        let first = a.rows().start * K;
        let own = &values[first..first + a.rows().len() * K];
        a.shard_mut().copy_from_host(own)?;
        for names in [
            ["a", "a", "b", "b"],
            ["a", "b", "b", "a"],
            ["a", "b", "c", "d"],
        ] {
            let problem = Problem {
                hosts: Hosts::of(&names).unwrap().sharing_memory(),
                ..Problem::new(
                    Operation::AllGather,
                    DType::Bf16,
                    Layout::new(&ROWS, K).unwrap(),
                    0,
                )
            };
            for chunks in [1, 2, 5] {
                let config = config(0, 2, chunks).with_route(Route::Push);
                a.poison(nan())?;
                group.barrier()?;
                let schedule = plan::plan(&problem, rank.rank, config).unwrap();
                // SAFETY: a planner has made the schedules of all ranks.
                unsafe { run_schedule(&group, schedule, &[&a], None)? };
                assert!(bits(&a.to_vec()?) == bits(&values), "{names:?} {chunks}");
                group.barrier()?;
            }
        }
        Ok("right".into())
    }));
}
