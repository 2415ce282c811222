//! What cannot be done is refused. Only ranks whose calls differ lose their group by it.

use std::time::Instant;

use gemmesh::error::Kind;
use gemmesh::tuning::{Route, TileShape};
use gemmesh::{AllGatherMatmul, Cuda, Error, Matmul, all_gather_matmul, bf16};

use crate::support::gpu::*;
use crate::support::processes::Setting;
use crate::{exchanges_that_differ, test_name};

#[test]
fn what_cannot_be_done_is_refused_and_the_group_goes_on() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 20, 24, 16)?;
        arguments.verify(&group)?;
        let unaligned = Error::unaligned("K", 12, 8).on(rank.rank);
        let unaligned = unaligned.in_call("Group::sharded".into());
        assert_eq!(group.sharded::<bf16>(20, 12).unwrap_err(), unaligned);
        let changes: [fn(&mut TileShape); 6] = [
            |tile| tile.n = 100,
            |tile| tile.m = 64,
            |tile| tile.k = 32,
            |tile| tile.stages = 3,
            |tile| tile.cluster_m = 4,
            |tile| tile.cluster_n = 4,
        ];
        let own = group.zeros::<bf16>(20, 16)?;
        for change in changes {
            let mut wrong = config(0, 1, 1);
            change(&mut wrong.tile);
            let operation = AllGatherMatmul::new().config(wrong);
            let error = operation
                .run(&arguments.a, &arguments.b, &mut arguments.out)
                .unwrap_err();
            let Kind::Unsupported { what } = error.kind() else {
                panic!("{error}");
            };
            assert_eq!(error.rank(), Some(rank.rank), "{error}");
            assert!(what.contains("128x256x64"), "{error}");
            // A product of this rank alone fails on this rank, too.
            let alone = Matmul::new().config(wrong);
            let result = alone.run(&own, &arguments.b, &mut arguments.out);
            assert_eq!(result, Err(error.in_call("matmul".into())));
        }
        let error = group.zeros::<bf16>(1 << 24, 1 << 24).unwrap_err();
        assert!(matches!(error.kind(), Kind::OutOfMemory { .. }), "{error}");
        let error = group.sharded::<bf16>(1 << 24, 1 << 24).unwrap_err();
        assert!(matches!(error.kind(), Kind::OutOfMemory { .. }), "{error}");
        arguments.verify(&group)?;
        Ok("right".into())
    }));
}

#[test]
fn of_ranks_that_were_all_refused_one_that_gives_up_is_named_with_the_reason() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let steps = host_group(rank)?;
        let (_context, group) = connect_short(&beside_the_host(rank))?;
        let mut arguments = Arguments::new(&group, 20, 24, 16)?;
        let wrong = group.zeros::<bf16>(24, 8)?;
        let refused = all_gather_matmul(&arguments.a, &wrong, &mut arguments.out);
        let refused = refused.unwrap_err();
        assert!(matches!(refused.kind(), Kind::Shape { .. }), "{refused}");
        if rank.rank == 0 {
            let begin = Instant::now();
            let result = arguments.run().and_then(|()| group.synchronize());
            let error = poisoned(&group, result).unwrap_err();
            assert!(
                matches!((error.rank(), error.kind()), (Some(1), Kind::Shape { .. })),
                "{error}"
            );
            // Until then it might have come.
            assert!(begin.elapsed() > SHORT / 2, "{:?}", begin.elapsed());
        }
        steps.barrier()?;
        Ok("named".into())
    }));
}

#[test]
fn pushes_are_refused_where_copies_and_kernels_share_a_queue() {
    let Some(_leave) = gpu() else { return };
    // The macro names the function that it stands in, which a closure is too.
    let name = test_name!();
    for variable in ["CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING"] {
        let setting = Setting {
            deadline: DEADLINE,
            variables: &|_| vec![(variable, "1".into())],
            ..Setting::default()
        };
        all_done(ranks_with(name, 2, &setting, |rank| {
            let blocking = std::env::var_os("CUDA_LAUNCH_BLOCKING").is_some();
            let cause = match blocking {
                true => "CUDA_LAUNCH_BLOCKING",
                false => "CUDA_DEVICE_MAX_CONNECTIONS=1",
            };
            let group = connect(rank, TIMEOUT)?;
            let mut arguments = Arguments::new(&group, 301, 72, 16)?;
            let error = arguments.run_by(Route::Push).unwrap_err();
            assert!(matches!(error.kind(), Kind::Misuse { .. }), "{error}");
            let words =
                format!("Route::Push needs streams that do not block one another, which {cause}");
            assert!(error.to_string().contains(&words), "{error}");
            arguments.verify_by(&group, Route::Store)?;
            Ok("right".into())
        }));
    }
}

#[test]
fn ranks_that_cut_pushed_rows_differently_are_told() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        arguments.run_by(ROUTES[rank.rank])?;
        group.synchronize()?;
        Ok("no error".into())
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(matches!(error.kind(), Kind::CallMismatch { .. }), "{error}");
}

exchanges_that_differ!(Cuda);
