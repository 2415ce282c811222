//! Who meets whom, and on which GPU: what keeps ranks apart is named to each.

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::{Cuda, Error, Group};

use crate::support::errors::parts;
use crate::support::gpu::*;
use crate::support::processes::{Setting, is_rank};
use crate::test_name;

#[test]
fn ranks_as_threads_are_refused() {
    let error = Group::<Cuda>::threads(2, |_| Ok::<(), Error>(())).unwrap_err();
    assert!(matches!(error.kind(), Kind::Misuse { .. }), "{error}");
}

#[test]
fn without_a_driver_every_rank_is_told_which_has_no_gpu() {
    if !is_rank() && absence().is_none() {
        println!("there is a GPU: not run");
        return;
    }
    let ranks = ranks(test_name!(), 3, |rank| {
        let begin = Instant::now();
        let error = connect(rank, TIMEOUT).unwrap_err();
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
        Err(error)
    });
    match parts(&same_error(&ranks.outcomes())) {
        (Some(rank), Kind::Device { .. }) => assert!(rank < 3),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_host_rank_among_cuda_ranks_is_named() {
    let ranks = ranks(test_name!(), 3, |rank| match rank.rank {
        2 => rank.connect(TIMEOUT).map(|_| "a group".into()),
        _ => connect(rank, TIMEOUT).map(|_| "a group".into()),
    });
    let expected = Kind::Mismatch {
        what: "backend".into(),
        theirs: "host".into(),
        other: 0,
        expected: "cuda".into(),
    }
    .on(2);
    assert_eq!(same_error(&ranks.outcomes()), expected);
}

#[test]
fn a_gpu_that_is_not_there_is_named_to_every_rank() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let mut builder = Group::<Cuda>::builder().timeout(TIMEOUT);
        if rank.rank == 1 {
            builder = builder.device(99);
        }
        builder
            .connect(rank.rank, rank.world, &rank.address)
            .map(|_| "a group".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!((error.rank(), error.kind()), (Some(1), Kind::Device { .. })),
        "{error}"
    );
}

#[test]
fn a_table_that_cannot_be_read_is_named_to_every_rank() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|place| match place {
            1 => vec![("GEMMESH_TUNED", "/nowhere/table".into())],
            _ => Vec::new(),
        },
        ..Setting::default()
    };
    let ranks = ranks_with(test_name!(), 3, &setting, |rank| {
        connect(rank, TIMEOUT).map(|_| "a group".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!((error.rank(), error.kind()), (Some(1), Kind::System { action, .. }) if action.contains("/nowhere/table")),
        "{error}"
    );
}

/// A verified operation and the GPU of each rank.
fn verify_device(group: &Group<Cuda>) -> Result<String, Error> {
    group.check_peers()?;
    let mut arguments = Arguments::new(group, 301, 72, 16)?;
    for _ in 0..10 {
        arguments.verify(group)?;
    }
    Ok(group.device_name().into())
}

#[test]
fn ranks_that_see_one_gpu_each_work() {
    let Some(_leave) = gpu() else { return };
    let devices = devices().max(1);
    let setting = Setting {
        deadline: DEADLINE,
        variables: &|place| vec![("CUDA_VISIBLE_DEVICES", (place % devices).to_string())],
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        verify_device(&connect(rank, TIMEOUT)?)
    }));
}

#[test]
fn ranks_that_see_all_gpus_work_in_any_order() {
    let Some(_leave) = gpus(2) else { return };
    // In a rank it is not used.
    let world = devices().clamp(2, 4);
    all_done(ranks(test_name!(), world, |rank| {
        let forward = connect(rank, TIMEOUT)?;
        verify_device(&forward)?;
        drop(forward);
        let address = format!("{}-reversed", rank.address);
        let builder = Group::<Cuda>::builder().timeout(TIMEOUT);
        let reversed = builder
            .device(rank.world - 1 - rank.rank)
            .connect(rank.rank, rank.world, &address)?;
        verify_device(&reversed)
    }));
}

#[track_caller]
fn check_peers(test: &str, world: usize) {
    all_done(ranks(test, world, |rank| {
        let group = connect(rank, TIMEOUT)?;
        group.barrier()?;
        let begin = Instant::now();
        group.check_peers()?;
        let took = begin.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        for _ in 0..20 {
            group.check_peers()?;
        }
        Arguments::new(&group, 20, 24, 16)?.verify(&group)?;
        Ok(format!("{took:?}"))
    }));
}

#[test]
fn check_peers_finds_2_ranks_well_in_under_a_second() {
    if let Some(_leave) = gpu_alone() {
        check_peers(test_name!(), 2);
    }
}

#[test]
fn check_peers_finds_4_ranks_well_in_under_a_second() {
    if let Some(_leave) = gpu_alone() {
        check_peers(test_name!(), 4);
    }
}
