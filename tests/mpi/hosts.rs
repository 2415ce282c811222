//! Groups whose ranks play several hosts on one machine: MPI carries rows from host to host.
#![allow(unsafe_code)] // The environment names hosts.

use std::convert::Infallible;
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::testing::delay_chunks;
use gemmesh::{Builder, Error, Group, Host, all_gather, bf16};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::{Communicator, CommunicatorCollectives};

use crate::support::numbers::{bits, normal};
use crate::support::products::Arguments;
use crate::support::shared::hosts::{
    LAYOUTS, addends_are_added_host_by_host, blocks_and_a_root_s_rows_come, columns_of_many,
    gathers_bring_all_rows, products, sums_are_those_of_hosts,
};

/// The layout of the tests that take long.
const LONG: &str = "aabb";

/// Runs the tests that this many ranks can run. Returns how many have passed on this rank.
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
                let group = group(&part, hosts);
                let one = open(Group::builder(), &part, &"a".repeat(hosts.len())).unwrap();
                assert_eq!(products(&group, rows), products(&one, rows), "{hosts}");
                gathers_bring_all_rows(&group, hosts, rows);
                sums_are_those_of_hosts(&group, hosts, rows);
                blocks_and_a_root_s_rows_come(&group, hosts, rows);
                delay_chunks(Some(13));
                let m = rows.iter().sum();
                for n in [6, 8, columns_of_many(m)] {
                    addends_are_added_host_by_host::<_, f32>(&group, hosts, [m, n]).unwrap();
                    addends_are_added_host_by_host::<_, bf16>(&group, hosts, [m, n]).unwrap();
                }
                delay_chunks(None);
                passed += 5;
            }
            what_spans_no_hosts_is_refused(&part, hosts);
            a_failure_ends_the_group_on_all_hosts(&part, hosts);
            rows_of_a_different_call_end_the_group(&part, hosts);
            a_rank_that_leaves_is_named(&part, hosts);
            passed += 4;
            if hosts == LONG {
                large_shards_go_in_many_messages(&part, hosts);
                a_late_rank_is_named(&part, hosts);
                passed += 2;
            }
        }
        world.barrier();
    }
    passed
}

/// The group of a communicator's ranks, of which `hosts` has the hosts.
pub fn group(communicator: &SimpleCommunicator, hosts: &str) -> Group<Host> {
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
    let (Some(rank), Kind::ProgramFailed { .. }) = (error.rank(), error.kind()) else {
        panic!("{error}")
    };
    assert_eq!(rank, last);
}

/// Messages of a different call are longer or shorter than those that MPI expects.
fn rows_of_a_different_call_end_the_group(part: &SimpleCommunicator, hosts: &str) {
    for odd in [0, hosts.len() - 1] {
        let group = group(part, hosts);
        let m = 4 * group.world_size();
        let [narrow, wide] = [4, 400].map(|k| {
            let mut a = group.sharded::<bf16>(m, k).unwrap();
            a.shard_mut()
                .copy_from_host(&vec![bf16::ONE; 4 * k])
                .unwrap();
            a
        });
        let error = all_gather(if group.rank() == odd { &wide } else { &narrow });
        let error = error.unwrap_err();
        let (Some(rank), Kind::CallMismatch { .. }) = (error.rank(), error.kind()) else {
            panic!("{hosts}: {error}")
        };
        // Of two ranks, the lower is right.
        let named = if hosts.len() == 2 { 1 } else { odd };
        assert_eq!(rank, named, "{hosts}");
        part.barrier();
    }
}

fn a_rank_that_leaves_is_named(part: &SimpleCommunicator, hosts: &str) {
    let group = group(part, hosts);
    group.barrier().unwrap();
    let last = group.world_size() - 1;
    if group.rank() == last {
        return;
    }
    let error = group.barrier().unwrap_err();
    let (Some(rank), Kind::RankLeft { .. }) = (error.rank(), error.kind()) else {
        panic!("{hosts}: {error}")
    };
    assert_eq!(rank, last);
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
    let (Some(0), Kind::Timeout { .. }) = (error.rank(), error.kind()) else {
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
