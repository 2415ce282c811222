//! Groups over several hosts. The ranks of one machine play them, and NCCL carries rows from host to host over sockets.

use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::pipelines::{AllGatherAndConsume, Chunk};
use gemmesh::testing::{Variant, delay_chunks};
use gemmesh::trace::{Lane, Work};
use gemmesh::tuning::Route;
use gemmesh::{
    AllGatherMatmul, Cuda, Error, Group, MatmulAllReduce, MatmulReduceScatter, Matrix, all_gather,
    all_to_all, bf16, broadcast, matmul,
};

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal};
use crate::support::processes::Rank;
use crate::support::shared::failures;
use crate::support::shared::hosts::{addends_are_added_host_by_host, bytes, sum_of_hosts};
use crate::test_name;

/// Makes this process's host another than those of other names, also for NCCL, which then uses sockets alone.
fn play(host: char) {
    let variables = [
        ("GEMMESH_HOST", host.to_string()),
        ("NCCL_HOSTID", host.to_string()),
        ("NCCL_SOCKET_IFNAME", "lo".into()),
        ("NCCL_IB_DISABLE", "1".into()),
    ];
    for (name, value) in variables {
        // SAFETY: no other thread of this process reads the environment yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// A group of all ranks, whose hosts `hosts` names letter by letter.
fn connect_hosts(rank: &Rank, hosts: &str, timeout: Duration) -> Result<Group<Cuda>, Error> {
    let together = host_group(rank)?;
    play(hosts.as_bytes()[rank.rank] as char);
    std::mem::forget(Cuda::keep(rank));
    let builder = Group::<Cuda>::builder()
        .timeout(timeout)
        .arrival_timeout(timeout)
        // Both hosts have the same GPUs.
        .device(rank.rank % devices());
    builder.connect_with(rank.rank, rank.world, |own| {
        Ok(together.all_gather_bytes(own)?)
    })
}

/// Calls `part` on each rank of hosts, on GPUs.
fn over_hosts(
    test: &str,
    hosts: &str,
    part: impl FnOnce(&Rank, &Group<Cuda>) -> Result<(), Error>,
) {
    // NCCL wants a GPU for each rank of a host.
    let of_first = hosts.chars().filter(|&host| hosts.starts_with(host));
    let Some(_leave) = gpus(of_first.count()) else {
        return;
    };
    all_done(ranks(test, hosts.len(), |rank| {
        let group = connect_hosts(rank, hosts, TIMEOUT)?;
        delay_chunks(Some(3));
        part(rank, &group)?;
        group.synchronize()?;
        Ok("right".into())
    }));
}

/// A test for each of these hosts.
macro_rules! each_layout {
    ($part:path: $($test:ident over $hosts:literal,)+) => {
        $(
            #[test]
            fn $test() {
                over_hosts(test_name!(), $hosts, |rank, group| $part(rank, group, $hosts));
            }
        )+
    };
}

/// The rows of each rank, for as many ranks. Some have none, and some shards cross the network in several chunks.
fn rows_of(world: usize) -> [Vec<usize>; 3] {
    let rows = [[300, 300, 300, 300], [1300, 0, 517, 33], [1700, 2100, 8, 1]];
    rows.map(|rows| rows[..world].to_vec())
}

/// Wide enough for 1024 rows to cross the network in two chunks.
const K: usize = 2048;

fn products(rank: &Rank, group: &Group<Cuda>, _: &str) -> Result<(), Error> {
    let one_host = another_group(rank, "one-host", TIMEOUT)?;
    let configs = [None, Some(config(0, 2, 1)), Some(config(5, 2, 4))];
    for (seed, rows) in rows_of(rank.world).into_iter().enumerate() {
        for config in configs {
            let case = Case {
                rows: rows.clone(),
                n: 264,
                more: 8,
                k: K,
                bias: true,
                config: config.map(|config| config.with_route(Route::Push)),
                seed: seed as u64 + 1,
                ..Case::default()
            };
            case.verify::<Cuda, bf16>(group).unwrap();
            let (b, bias) = case.b::<bf16>(rank.rank);
            let a = case.a::<bf16>();
            let mut placed = Placed::new(group, &case, &a, &b, bias.as_deref())?;
            for _ in 0..3 {
                placed.poison()?;
                placed
                    .a
                    .shard_mut()
                    .copy_from_host(own_rows(&case, rank.rank, &a))?;
                placed.fused(case.config)?;
            }
            let (gathered, out) = placed.read()?;
            assert!(bits(&gathered) == bits(&a), "{rows:?} {config:?}");
            // The same kernel makes the same bits of rows that came otherwise.
            let Some(config) = case.config else { continue };
            let mut near = Placed::new(&one_host, &case, &a, &b, bias.as_deref())?;
            near.fused(Some(config.with_route(Route::Pull)))?;
            assert!(bits(&near.read()?.1) == bits(&out), "{rows:?} {config:?}");
        }
    }
    Ok(())
}

fn own_rows<'a>(case: &Case, rank: usize, a: &'a [bf16]) -> &'a [bf16] {
    let first = case.rows[..rank].iter().sum::<usize>() * case.k;
    &a[first..first + case.rows[rank] * case.k]
}

each_layout!(products:
    products_over_two_hosts_are_right over "ab",
    products_over_two_hosts_of_two_are_right over "aabb",
    products_over_hosts_that_alternate_are_right over "abba",
    products_over_three_hosts_are_right over "abc",
);

fn collectives(rank: &Rank, group: &Group<Cuda>, hosts: &str) -> Result<(), Error> {
    for rows in rows_of(rank.world) {
        gathers(rank, group, &rows)?;
        blocks_and_a_root_s_rows(rank, group, &rows)?;
    }
    // Rows of six numbers have gaps between them. The most rows cross the network in several chunks, and what is alone in
    // halves.
    for shape in [[131, 6], [12_000, 6], [160, 64], [2800, 2048]] {
        addends_are_added_host_by_host::<_, f32>(group, hosts, shape)?;
    }
    addends_are_added_host_by_host::<_, bf16>(group, hosts, [160, 1024])?;
    Ok(())
}

fn gathers(rank: &Rank, group: &Group<Cuda>, rows: &[usize]) -> Result<(), Error> {
    let all: Vec<bf16> = normal(7, rows.iter().sum::<usize>() * K);
    let mut a = group.sharded_rows::<bf16>(rows, K)?;
    let own = a.rows().start * K..a.rows().end * K;
    for consumes in [false, true] {
        a.poison(nan())?;
        a.shard_mut().copy_from_host(&all[own.clone()])?;
        group.barrier()?;
        let mut come = 0;
        if consumes {
            let count = |chunk: Chunk<'_, Cuda, bf16>| {
                come += chunk.rows().len();
                Ok(())
            };
            AllGatherAndConsume::new().run(&a, count)?;
            assert_eq!(come, rows.iter().sum::<usize>());
        } else {
            all_gather(&a)?;
        }
        assert!(
            bits(&a.to_vec()?) == bits(&all),
            "rank {}, {rows:?}",
            rank.rank
        );
        group.barrier()?;
    }
    Ok(())
}

fn blocks_and_a_root_s_rows(rank: &Rank, group: &Group<Cuda>, rows: &[usize]) -> Result<(), Error> {
    const N: usize = 8;
    let (own, world) = (rank.rank, rank.world);
    let value =
        |from: usize, to: usize, row: usize| (from * 10_000 + to * 1000 + row % 1000) as u32;
    let block =
        |from: usize, to: usize| (0..rows[from]).flat_map(move |row| [value(from, to, row); N]);
    let blocks: Vec<u32> = (0..world).flat_map(|to| block(own, to)).collect();
    let come: Vec<u32> = (0..world).flat_map(|from| block(from, own)).collect();
    let a = group.upload(&blocks, world * rows[own], N)?;
    let mut out = group.sharded_rows::<u32>(rows, N)?;
    out.poison(u32::MAX)?;
    group.barrier()?;
    all_to_all(&a, &mut out)?;
    assert!(out.to_vec()? == come, "rank {own}, {rows:?}");
    for root in 0..world {
        out.poison(u32::MAX)?;
        let all: Vec<u32> = (0..come.len()).map(|index| (index + root) as u32).collect();
        if own == root {
            out.write(0, &all)?;
        }
        group.barrier()?;
        broadcast(&mut out, root)?;
        assert!(out.to_vec()? == all, "rank {own}, {rows:?}, {root}");
        group.barrier()?;
    }
    Ok(())
}

each_layout!(collectives:
    collectives_over_two_hosts_are_right over "ab",
    collectives_over_two_hosts_of_two_are_right over "aabb",
    collectives_over_three_hosts_are_right over "abc",
);

/// Of its own host a rank adds each rank's partial, and of another host their sum, which is rounded. But if all ranks get
/// few sums, each rank adds all partials.
fn sums(rank: &Rank, group: &Group<Cuda>, hosts: &str) -> Result<(), Error> {
    let own = rank.rank;
    let (n, k) = (1032, 192);
    let kernels = configs_of_sums(Variant::Sums, Route::Push, 1);
    let pulled = configs_of_sums(Variant::Sums, Route::Pull, 1);
    let configs = [
        None,
        Some(kernels[0]),
        kernels.last().copied(),
        pulled.last().copied(),
    ];
    let few = [3, 0, 5, 1][..rank.world].to_vec();
    for rows in rows_of(rank.world).into_iter().chain([few.clone()]) {
        let m: usize = rows.iter().sum();
        let a = group.upload(&normal::<bf16>(own as u64, m * k), m, k)?;
        let b = group.upload(&normal::<bf16>(!own as u64, n * k), n, k)?;
        for config in configs {
            let mut out = group.zeros::<bf16>(rows[own], n)?;
            out.copy_from_host(&vec![nan(); rows[own] * n])?;
            for _ in 0..3 {
                let sum = MatmulReduceScatter::new().rows(&rows);
                match config {
                    Some(config) => sum.config(config).run(&a, &b, &mut out)?,
                    None => sum.run(&a, &b, &mut out)?,
                }
            }
            let of_hosts = |value: &dyn Fn(usize) -> f32| sum_of_hosts(hosts, own, value);
            let expected = expected_sums(group, &rows, [&a, &b], of_hosts)?;
            let out = out.to_vec()?;
            assert!(
                bits(&out) == bits(&expected),
                "rank {own}, {rows:?}, {config:?}"
            );
            let mut all = group.sharded_rows::<bf16>(&rows, n)?;
            all.poison(nan())?;
            group.barrier()?;
            let sum = MatmulAllReduce::new();
            match config {
                Some(config) => sum.config(config).run(&a, &b, &mut all)?,
                None => sum.run(&a, &b, &mut all)?,
            }
            let of_all =
                |value: &dyn Fn(usize) -> f32| bf16::from_f32((0..rank.world).map(value).sum());
            let expected = match rows == few {
                true => expected_sums(group, &rows, [&a, &b], of_all)?,
                false => expected,
            };
            let owned = group.all_gather_bytes(&bytes(&expected))?;
            assert!(
                bytes(&all.to_vec()?) == owned.concat(),
                "rank {own}, {rows:?}, {config:?}"
            );
        }
    }
    Ok(())
}

/// The sums of this rank's rows, made on the host of the partials of all ranks. `sum` adds up an element.
fn expected_sums(
    group: &Group<Cuda>,
    rows: &[usize],
    [a, b]: [&Matrix<Cuda, bf16>; 2],
    sum: impl Fn(&dyn Fn(usize) -> f32) -> bf16,
) -> Result<Vec<bf16>, Error> {
    let (own, n) = (group.rank(), b.shape()[0]);
    let mut partial = group.zeros::<bf16>(a.shape()[0], n)?;
    // Every kernel adds up so short a K in the same order.
    matmul(a, b, &mut partial)?;
    let partials = group.all_gather_bytes(&bytes(&partial.to_vec()?))?;
    let first = rows[..own].iter().sum::<usize>() * n;
    let value = |rank: usize, index: usize| {
        let bytes = [partials[rank][2 * index], partials[rank][2 * index + 1]];
        bf16::from_bits(u16::from_le_bytes(bytes)).to_f32()
    };
    let indices = first..first + rows[own] * n;
    Ok(indices
        .map(|index| sum(&|rank| value(rank, index)))
        .collect())
}

each_layout!(sums:
    sums_over_two_hosts_are_those_of_hosts over "ab",
    sums_over_two_hosts_of_two_are_those_of_hosts over "aabb",
    sums_over_hosts_that_alternate_are_those_of_hosts over "abba",
    sums_over_three_hosts_are_those_of_hosts over "abc",
);

#[test]
fn a_trace_shows_the_network() {
    over_hosts(test_name!(), "ab", |rank, group| {
        let [m, n] = [2048, 256];
        let mut a = group.sharded::<bf16>(m, K)?;
        let own = a.rows().len() * K;
        a.shard_mut()
            .copy_from_host(&normal(rank.rank as u64, own))?;
        let b = group.upload(&normal::<bf16>(3, n * K), n, K)?;
        let mut out = group.zeros::<bf16>(m, n)?;
        let prepared = AllGatherMatmul::new().prepare(&a, n)?;
        prepared.run(&a, &b, &mut out)?;
        let trace = prepared.run_traced(&a, &b, &mut out)?;
        let spans = trace.spans.iter();
        let on_network: Vec<_> = spans.filter(|span| span.lane == Lane::Network).collect();
        assert_eq!(on_network.len(), 2, "{on_network:?}");
        let other = 1 - rank.rank;
        let came = |work: &Work| matches!(work, Work::Pull { source, .. } if *source == other);
        assert!(
            on_network
                .iter()
                .all(|span| came(&span.work) && span.begin < span.end)
        );
        Ok(())
    });
}

#[test]
fn graphs_over_hosts_are_refused_and_the_group_goes_on() {
    over_hosts(test_name!(), "ab", |_, group| {
        let mut arguments = Arguments::small(group)?;
        arguments.verify(group)?;
        let mut refused = None;
        captured(group, RELAXED, || refused = arguments.run().err());
        let words = refused.unwrap().to_string();
        assert!(
            words.contains("graphs of operations over several hosts"),
            "{words}"
        );
        arguments.verify(group)
    });
}

#[test]
fn a_rank_of_another_host_that_is_killed_amid_products_is_named() {
    if let Some(_leave) = gpu() {
        let connect = |rank: &Rank| connect_hosts(rank, "abc", TIMEOUT);
        failures::kill_amid_operations_of(test_name!(), Route::Push, connect);
    }
}

#[test]
fn a_rank_of_another_host_that_is_stopped_amid_products_is_named_at_the_timeout() {
    if let Some(_leave) = gpu() {
        let connect = |rank: &Rank| connect_hosts(rank, "abc", SHORT);
        failures::stop_amid_operations_of(test_name!(), Route::Push, connect);
    }
}

#[test]
fn a_rank_of_another_host_that_has_left_is_named() {
    let Some(_leave) = gpu() else { return };
    let ranks = ranks(test_name!(), 2, |rank| {
        let group = connect_hosts(rank, "ab", TIMEOUT)?;
        let mut arguments = Arguments::small(&group)?;
        arguments.verify(&group)?;
        if rank.rank == 1 {
            return Ok("left".into());
        }
        let result = arguments.run().and_then(|()| group.synchronize());
        poisoned(&group, result)
    });
    let outcomes = ranks.outcomes();
    assert_eq!(outcomes[1].value(), "left");
    let error = outcomes[0].error().cause();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::RankLeft { .. })
        ),
        "{error}"
    );
}
