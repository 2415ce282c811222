//! Groups whose ranks play several hosts on one machine: MPI carries rows from host to host.
#![allow(unsafe_code)] // The environment names hosts.

use std::convert::Infallible;
use std::time::Duration;

use gemmesh::testing::delay_chunks;
use gemmesh::{
    AllGatherAndConsume, Builder, Chunk, Chunking, Config, Error, Group, Host, MatmulAllReduce,
    MatmulReduceScatter, Route, TileShape, all_gather, all_to_all, bf16, broadcast, matmul,
    reduce_scatter,
};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives};

use crate::support::numbers::{bits, normal};
use crate::support::products::{Arguments, Case, Placed};

/// Ranks' hosts, and the rows of each rank. Ranks are not all numbered host by host, and some have no rows.
const LAYOUTS: [(&str, &[&[usize]]); 6] = [
    ("aabbcc", &[&[4; 6], &[9, 0, 3, 14, 1, 0]]),
    ("aabb", &[&[16; 4], &[9, 0, 21, 4], &[0, 0, 0, 33]]),
    ("abba", &[&[5, 0, 7, 3], &[0, 11, 0, 0]]),
    ("abcd", &[&[6; 4], &[1, 0, 12, 5]]),
    ("abc", &[&[7; 3], &[0, 13, 2]]),
    ("ab", &[&[8, 8], &[0, 9]]),
];

/// The layout of the tests that wait for a deadline.
const SLOW: &str = "aabb";

/// Runs the tests that this many ranks can run. Returns how many have passed.
pub fn test(world: &SimpleCommunicator) -> usize {
    let mut passed = 0;
    for (hosts, rows) in LAYOUTS {
        if hosts.len() > world.size() as usize {
            continue;
        }
        let takes_part = (world.rank() as usize) < hosts.len();
        let color = if takes_part { 0 } else { 1 };
        let part = world.split_by_color(Color::with_value(color));
        if let Some(part) = part.filter(|_| takes_part) {
            for &rows in rows {
                products_have_the_bits_of_one_host(&part, hosts, rows);
                gathers_bring_all_rows(&part, hosts, rows);
                sums_are_those_of_hosts(&part, hosts, rows);
                blocks_and_a_root_s_rows_come(&part, hosts, rows);
            }
            large_shards_go_in_many_messages(&part, hosts);
            what_spans_no_hosts_is_refused(&part, hosts);
            a_failure_ends_the_group_on_all_hosts(&part, hosts);
            if hosts == SLOW {
                a_late_rank_is_named(&part, hosts);
            }
        }
        world.barrier();
        passed += 4 * rows.len() + 3 + usize::from(hosts == SLOW);
    }
    passed
}

/// The group of a communicator's ranks, of which `hosts` has the hosts.
fn group(communicator: &SimpleCommunicator, hosts: &str) -> Group<Host> {
    open(Group::builder(), communicator, hosts).unwrap()
}

fn open(
    options: Builder<Host>,
    communicator: &SimpleCommunicator,
    hosts: &str,
) -> Result<Group<Host>, Error> {
    let own = &hosts[communicator.rank() as usize..][..1];
    // SAFETY: this program has no other threads at this time that read the environment.
    unsafe { std::env::set_var("GEMMESH_HOST", own) };
    options.workers(1).from_communicator(communicator)
}

fn config(route: Route) -> Config {
    Config::new(
        TileShape::new(4, 4, 4).with_group_m(2),
        Chunking::new(2),
        route,
    )
}

fn products_have_the_bits_of_one_host(part: &SimpleCommunicator, hosts: &str, rows: &[usize]) {
    let several = group(part, hosts);
    let one = group(part, &"a".repeat(hosts.len()));
    delay_chunks(Some(11));
    for (seed, route) in [Route::Pull, Route::Push, Route::Store]
        .into_iter()
        .enumerate()
    {
        let case = Case {
            rows: rows.to_vec(),
            n: 9,
            more: 1,
            k: 24,
            bias: true,
            config: Some(config(route)),
            seed: seed as u64 + 1,
            ..Case::default()
        };
        let (b, bias) = case.b::<bf16>(part.rank() as usize);
        let of = |group: &Group<Host>| {
            let a = case.a::<bf16>();
            let mut placed = Placed::new(group, &case, &a, &b, bias.as_deref()).unwrap();
            for _ in 0..5 {
                // Nobody writes what a neighbour passes on.
                group.barrier().unwrap();
                placed.poison().unwrap();
                placed.fused(case.config).unwrap();
            }
            placed.read().unwrap().1
        };
        assert_eq!(
            bits(&of(&several)),
            bits(&of(&one)),
            "{hosts}, {rows:?}, {route:?}"
        );
        case.verify::<Host, bf16>(&several).unwrap();
    }
    delay_chunks(None);
}

fn gathers_bring_all_rows(part: &SimpleCommunicator, hosts: &str, rows: &[usize]) {
    let group = group(part, hosts);
    let (m, k) = (rows.iter().sum(), 10);
    let expected: Vec<bf16> = normal(7, m * k);
    let mut a = group.sharded_rows::<bf16>(rows, k).unwrap();
    let own = a.rows();
    let own = own.start * k..own.end * k;
    for consumes in [false, true] {
        a.poison(bf16::NAN).unwrap();
        a.shard_mut()
            .copy_from_host(&expected[own.clone()])
            .unwrap();
        group.barrier().unwrap();
        let mut come = vec![0; m];
        if consumes {
            let consume = AllGatherAndConsume::new();
            let count = |chunk: Chunk<'_, Host, bf16>| {
                chunk.rows().for_each(|row| come[row] += 1);
                Ok(())
            };
            consume.run(&a, count).unwrap();
            assert!(come.iter().all(|&times| times == 1), "{hosts}: {come:?}");
        } else {
            all_gather(&a).unwrap();
        }
        assert_eq!(
            bits(&a.to_vec().unwrap()),
            bits(&expected),
            "{hosts}, {rows:?}"
        );
        group.barrier().unwrap();
    }
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    let values = bits(values).iter();
    values.flat_map(|value| value.to_le_bytes()).collect()
}

/// The sum that `rank` makes of all ranks' values.
fn sum_of_hosts(hosts: &str, rank: usize, value: impl Fn(usize) -> f32) -> bf16 {
    let own = hosts.as_bytes()[rank] as char;
    let mut sum = 0.0;
    for host in ('a'..='z').filter(|host| hosts.contains(*host)) {
        let ranks = hosts.char_indices().filter(|(_, its)| *its == host);
        let values = ranks.map(|(rank, _)| value(rank));
        sum = match host == own {
            true => values.fold(sum, |sum, value| sum + value),
            false => sum + bf16::from_f32(values.sum()).to_f32(),
        };
    }
    bf16::from_f32(sum)
}

/// Of its own host a rank adds each rank's partial, and of another host their sum, which is rounded.
fn sums_are_those_of_hosts(part: &SimpleCommunicator, hosts: &str, rows: &[usize]) {
    let group = group(part, hosts);
    let rank = group.rank();
    let (m, n, k) = (rows.iter().sum::<usize>(), 11, 12);
    let a = group
        .upload(&normal::<bf16>(rank as u64, m * k), m, k)
        .unwrap();
    let b = group
        .upload(&normal::<bf16>(!rank as u64, n * k), n, k)
        .unwrap();
    let mut partial = group.zeros::<bf16>(m, n).unwrap();
    matmul(&a, &b, &mut partial).unwrap();
    let partial = partial.to_vec().unwrap();
    let partials = group.all_gather_bytes(&bytes(&partial)).unwrap();
    let first = rows[..rank].iter().sum::<usize>() * n;
    let value = |rank: usize, index: usize| {
        let bytes = [partials[rank][2 * index], partials[rank][2 * index + 1]];
        bf16::from_bits(u16::from_le_bytes(bytes)).to_f32()
    };
    let indices = first..first + rows[rank] * n;
    let expected: Vec<bf16> = indices
        .map(|index| sum_of_hosts(hosts, rank, |rank| value(rank, index)))
        .collect();
    delay_chunks(Some(5));
    let mut out = group.zeros::<bf16>(rows[rank], n).unwrap();
    for chunks in [1, 2, 5] {
        let config = Config::new(TileShape::new(4, 4, 4), Chunking::new(chunks), Route::Push);
        out.copy_from_host(&vec![bf16::NAN; rows[rank] * n])
            .unwrap();
        for _ in 0..5 {
            let sum = MatmulReduceScatter::new().config(config).rows(rows);
            sum.run(&a, &b, &mut out).unwrap();
        }
        let out = out.to_vec().unwrap();
        assert_eq!(bits(&out), bits(&expected), "{hosts}, {rows:?}, {chunks}");
        let mut all = group.sharded_rows::<bf16>(rows, n).unwrap();
        all.poison(bf16::NAN).unwrap();
        group.barrier().unwrap();
        let sum = MatmulAllReduce::new().config(config);
        sum.run(&a, &b, &mut all).unwrap();
        let all = all.to_vec().unwrap();
        let of_rank = &all[first..first + rows[rank] * n];
        assert_eq!(
            bits(of_rank),
            bits(&expected),
            "{hosts}, {rows:?}, {chunks}"
        );
        // Its other rows are their owners'.
        let owned = group.all_gather_bytes(&bytes(of_rank)).unwrap();
        assert_eq!(bytes(&all), owned.concat(), "{hosts}, {rows:?}, {chunks}");
    }
    delay_chunks(None);
}

fn blocks_and_a_root_s_rows_come(part: &SimpleCommunicator, hosts: &str, rows: &[usize]) {
    let group = group(part, hosts);
    let (rank, world) = (group.rank(), group.world_size());
    let (m, n) = (rows.iter().sum::<usize>(), 5);
    delay_chunks(Some(3));
    // Rank s has the row (s, p, i) in row i of its block for rank p.
    let value = |from: usize, to: usize, row: usize| (from * 100 + to * 10 + row % 10) as u32;
    let blocks = (0..world).flat_map(|to| (0..rows[rank]).map(move |row| (to, row)));
    let blocks: Vec<u32> = blocks
        .flat_map(|(to, row)| [value(rank, to, row); 5])
        .collect();
    let a = group.upload(&blocks, world * rows[rank], n).unwrap();
    let mut out = group.sharded_rows::<u32>(rows, n).unwrap();
    let come = (0..world).flat_map(|from| (0..rows[from]).map(move |row| (from, row)));
    let come: Vec<u32> = come
        .flat_map(|(from, row)| [value(from, rank, row); 5])
        .collect();
    for _ in 0..3 {
        out.poison(u32::MAX).unwrap();
        group.barrier().unwrap();
        all_to_all(&a, &mut out).unwrap();
        assert_eq!(out.to_vec().unwrap(), come, "{hosts}, {rows:?}");
    }
    for root in 0..world {
        out.poison(u32::MAX).unwrap();
        let all: Vec<u32> = (0..m * n).map(|index| (index + root) as u32).collect();
        if rank == root {
            out.write(0, &all).unwrap();
        }
        group.barrier().unwrap();
        broadcast(&mut out, root).unwrap();
        assert_eq!(out.to_vec().unwrap(), all, "{hosts}, {rows:?}, {root}");
        group.barrier().unwrap();
    }
    delay_chunks(None);
}

/// More messages than are under way at once.
fn large_shards_go_in_many_messages(part: &SimpleCommunicator, hosts: &str) {
    let group = group(part, hosts);
    let (rows, k) = (2400, 4096);
    let m = rows * group.world_size();
    let mut a = group.sharded::<bf16>(m, k).unwrap();
    let of = |rank: usize| normal::<bf16>(rank as u64, k);
    let own = of(group.rank()).repeat(rows);
    a.shard_mut().copy_from_host(&own).unwrap();
    all_gather(&a).unwrap();
    let gathered = a.to_vec().unwrap();
    for (row, values) in gathered.chunks(k).enumerate() {
        assert_eq!(bits(values), bits(&of(row / rows)), "{hosts}, row {row}");
    }
}

fn what_spans_no_hosts_is_refused(part: &SimpleCommunicator, hosts: &str) {
    let group = group(part, hosts);
    let world = group.world_size();
    let a = group
        .upload(&vec![bf16::ONE; 4 * world], 4 * world, 1)
        .unwrap();
    let mut out = group.zeros::<bf16>(4, 1).unwrap();
    let error = reduce_scatter(&a, &mut out).unwrap_err().to_string();
    assert!(error.contains("over several hosts"), "{error}");
    // A part within a host is a group as any other.
    let own = hosts.as_bytes()[group.rank()] as usize;
    let local = group.split(own, 0).unwrap();
    Arguments::small(&local).unwrap().verify(&local).unwrap();
    let error = group.split(0, 0).unwrap_err().to_string();
    assert!(error.contains("must all run on one host"), "{error}");
    group.barrier().unwrap();
    // Hosts of unequal numbers of ranks.
    if hosts.len() == 4 {
        let error = open(Group::builder(), part, "aaab")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("rank 0 has 3 and that of rank 3 has 1"),
            "{error}"
        );
    }
}

fn a_failure_ends_the_group_on_all_hosts(part: &SimpleCommunicator, hosts: &str) {
    let group = group(part, hosts);
    let last = group.world_size() - 1;
    // A rank may hear of the failure in any of its calls.
    let until_failure = || -> Result<Infallible, Error> {
        let mut arguments = Arguments::small(&group)?;
        arguments.verify(&group)?;
        if group.rank() == last {
            return Err(group.fail("no more weights"));
        }
        loop {
            arguments.run()?;
        }
    };
    let Err(error) = until_failure();
    let Error::ProgramFailed { rank, .. } = error.cause() else {
        panic!("{error}")
    };
    assert_eq!(*rank, last);
}

/// Ranks that wait for rows which pass through others too name the rank that is late.
fn a_late_rank_is_named(part: &SimpleCommunicator, hosts: &str) {
    let options = Group::<Host>::builder().arrival_timeout(Duration::from_secs(5));
    let group = open(options, part, hosts).unwrap();
    let mut arguments = Arguments::small(&group).unwrap();
    arguments.verify(&group).unwrap();
    while group.rank() == 0 && group.check().is_ok() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = arguments.run().unwrap_err();
    let Error::Timeout { rank: 0, .. } = error.cause() else {
        panic!("{hosts}: {error}")
    };
}

/// Without leave to call MPI from several threads there is no group of several hosts.
pub fn several_need_threads(world: &SimpleCommunicator) {
    let hosts: String = ('a'..='z').take(world.size() as usize).collect();
    let error = open(Group::builder(), world, &hosts)
        .unwrap_err()
        .to_string();
    assert!(error.contains("mpi::Threading::Multiple"), "{error}");
    let one = open(Group::builder(), world, &"a".repeat(hosts.len())).unwrap();
    Arguments::small(&one).unwrap().verify(&one).unwrap();
}
