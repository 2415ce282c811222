//! Groups of threads that play several hosts: messages carry rows from host to host.

use std::time::Duration;

use gemmesh::schedule::Hosts;
use gemmesh::testing::delay_chunks;
use gemmesh::trace::{Lane, Work};
use gemmesh::tuning::Route;
use gemmesh::{Builder, Error, Group, Host, bf16};

use crate::fp8;
use crate::support::patience::stretched;
use crate::support::products::Arguments;
use crate::support::shared::{
    self,
    hosts::{
        LAYOUTS, addends_are_added_host_by_host, blocks_and_a_root_s_rows_come, columns_of_many,
        gathers_bring_all_rows, products, sums_are_those_of_hosts, sums_of_columns,
    },
};

/// A group whose ranks play hosts of these names. Many ranks share a machine that may be busy.
fn playing<N: PartialEq>(names: &[N]) -> Builder<Host> {
    let builder = Group::<Host>::builder().workers(1);
    let builder = builder.timeout(stretched(Duration::from_secs(60)));
    builder.play_hosts(Hosts::of(names).unwrap())
}

/// Calls `rank` on each rank of each layout, and returns what it returns, in the same order each time.
fn over_hosts<T: Send>(rank: impl Fn(&Group<Host>, &str, &[usize]) -> T + Sync) -> Vec<Vec<T>> {
    let layouts = LAYOUTS
        .iter()
        .flat_map(|(hosts, all)| all.iter().map(move |rows| (hosts, rows)));
    let each = layouts.map(|(hosts, rows)| {
        let names: Vec<char> = hosts.chars().collect();
        let builder = playing(&names);
        let ranks = builder.threads(names.len(), |group| {
            Ok::<_, Error>(rank(&group, hosts, rows))
        });
        ranks.unwrap()
    });
    each.collect()
}

#[test]
fn ranks_know_the_ranks_of_each_host() {
    let builder = playing(&["a", "b", "b", "a"]);
    let ranks = builder.threads(4, |group| Ok::<_, Error>(group.hosts()));
    for hosts in ranks.unwrap() {
        assert_eq!(hosts, [[0, 3], [1, 2]]);
    }
}

#[test]
fn products_over_hosts_have_the_bits_of_one_host() {
    let of_hosts = over_hosts(|group, _, rows| products(group, rows));
    let mut of_one = Vec::new();
    for (hosts, all) in LAYOUTS {
        for rows in all {
            let builder = Group::<Host>::builder().workers(1);
            let ranks =
                builder.threads(hosts.len(), |group| Ok::<_, Error>(products(&group, rows)));
            of_one.push(ranks.unwrap());
        }
    }
    assert_eq!(of_hosts, of_one);
}

#[test]
fn gathers_over_hosts_bring_all_rows() {
    over_hosts(gathers_bring_all_rows);
}

#[test]
fn sums_over_hosts_are_those_of_hosts() {
    over_hosts(sums_are_those_of_hosts);
}

#[test]
fn addends_over_hosts_are_added_host_by_host() {
    over_hosts(|group, hosts, rows| {
        delay_chunks(Some(13));
        let m = rows.iter().sum();
        for n in [6, 8, columns_of_many(m)] {
            addends_are_added_host_by_host::<_, f32>(group, hosts, [m, n]).unwrap();
            addends_are_added_host_by_host::<_, bf16>(group, hosts, [m, n]).unwrap();
        }
    });
}

/// Of 16 rows, 5440 columns are few and 6000 are not, because each rank would send them to 12 ranks of other hosts.
#[test]
fn sums_for_all_over_four_hosts_of_four_are_right_on_either_side_of_what_is_few() {
    let hosts = "aaaabbbbccccdddd";
    let names: Vec<char> = hosts.chars().collect();
    let builder = playing(&names);
    let done = builder.threads(names.len(), |group| {
        for n in [5440, 6000] {
            addends_are_added_host_by_host::<_, bf16>(&group, hosts, [16, n])?;
        }
        sums_of_columns(&group, hosts, &[1; 16], [6000, 1024]);
        Ok::<_, Error>(())
    });
    done.unwrap();
}

#[test]
fn blocks_and_a_root_s_rows_come_over_hosts() {
    over_hosts(blocks_and_a_root_s_rows_come);
}

#[test]
fn scales_come_over_hosts_with_their_rows() {
    let builder = playing(&["a", "b", "c"]);
    let ranks = builder.threads(3, |group| {
        (0..40).try_for_each(|seed| shared::fp8::gather(&group, seed, fp8::gather(seed)))
    });
    ranks.unwrap();
}

#[test]
fn a_trace_shows_what_goes_over_the_network_and_what_is_passed_on() {
    let builder = playing(&["a", "a", "b", "b"]);
    let ranks = builder.threads(4, |group| {
        let mut arguments = Arguments::small(&group)?;
        let prepared = arguments.prepare(Route::Push)?;
        let Arguments { a, b, out, .. } = &mut arguments;
        let trace = prepared.run_traced(&*a, &*b, out)?;
        let rank = group.rank();
        // How many rows it sends to `peer`.
        let sent = |lane: Lane, peer: usize| -> usize {
            let spans = trace.spans.iter().filter(|span| span.lane == lane);
            let rows = spans.map(|span| match &span.work {
                Work::Push { to, rows } if *to == peer => rows.len(),
                _ => 0,
            });
            rows.sum()
        };
        let (peer, neighbour) = (rank ^ 2, rank ^ 1);
        let [own, of_peer] = [rank, peer].map(|rank| a.rows_of(rank).len());
        assert_eq!(sent(Lane::Network, peer), own);
        assert_eq!(sent(Lane::Copy, neighbour), own + of_peer);
        Ok::<_, Error>(())
    });
    ranks.unwrap();
}
