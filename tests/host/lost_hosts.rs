//! Control over hosts that threads play: calls are compared, and failures are told, as within a host.

use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::schedule::Hosts;
use gemmesh::{Builder, Error, Group, Host, all_gather, bf16};

use crate::support::patience::{again_if_busy, agreed, stretched};
use crate::support::tested::Tested;

/// Long before the timeout, if the machine is not busy.
const NOTICED: Duration = Duration::from_secs(2);
const TIMEOUT: Duration = Host::TIMEOUT;
const LAYOUTS: [&str; 4] = ["aabbcc", "abba", "abc", "aab"];

fn builder(hosts: &str) -> Builder<Host> {
    let names: Vec<char> = hosts.chars().collect();
    Group::builder()
        .workers(1)
        .timeout(TIMEOUT)
        .play_hosts(Hosts::of(&names).unwrap())
}

/// The error that each rank of `hosts` gets from `part`, but those in `apart`. They get it in time.
fn errors(
    hosts: &str,
    builder: Builder<Host>,
    apart: &[usize],
    part: impl Fn(&Group<Host>) -> Result<(), Error> + Sync,
) -> Vec<Error> {
    let ranks = builder.threads(hosts.len(), |group| {
        // A rank may fail the group before another has left the barrier.
        let met = group.barrier();
        let begin = Instant::now();
        let outcome = met.and_then(|()| part(&group));
        let took = begin.elapsed();
        if apart.contains(&group.rank()) {
            return Ok(None);
        }
        assert!(
            took < stretched(NOTICED),
            "{hosts}: rank {} took {took:?}",
            group.rank()
        );
        Ok::<_, Error>(Some(outcome.unwrap_err().cause()))
    });
    let errors: Vec<Error> = ranks.unwrap().into_iter().flatten().collect();
    assert_eq!(errors.len(), hosts.len() - apart.len());
    for error in &errors {
        assert_eq!(error, &errors[0], "{hosts}");
    }
    errors
}

#[test]
fn the_first_failure_of_any_host_is_everybodys() {
    again_if_busy(|| {
        for hosts in LAYOUTS.into_iter().filter(|hosts| *hosts != "aab") {
            for culprit in 0..hosts.len() {
                let errors = errors(hosts, builder(hosts), &[], |group| match group.rank() {
                    rank if rank == culprit => Err(group.fail("no more weights")),
                    _ => group.barrier(),
                });
                assert!(
                    matches!((errors[0].rank(), errors[0].kind()), (Some(rank), Kind::ProgramFailed { .. }) if rank == culprit),
                    "{}",
                    errors[0]
                );
            }
        }
    });
}

#[test]
fn of_failures_at_the_same_time_all_hosts_get_one() {
    again_if_busy(|| {
        let hosts = "aabbcc";
        for _ in 0..10 {
            errors(hosts, builder(hosts), &[], |group| {
                Err(group.fail(format!("rank {}'s", group.rank())))
            });
        }
    });
}

#[test]
fn a_call_that_differs_on_another_host_is_named() {
    again_if_busy(|| {
        for hosts in ["aabbcc", "abba", "abc"] {
            for odd in 0..hosts.len() {
                let errors = errors(hosts, builder(hosts), &[], |group| {
                    let k = if group.rank() == odd { 8 } else { 4 };
                    group.sharded::<bf16>(12, k).map(drop)
                });
                let (
                    Some(rank),
                    Kind::CallMismatch {
                        theirs,
                        expected,
                        number: call,
                        ..
                    },
                ) = (errors[0].rank(), errors[0].kind())
                else {
                    panic!("{hosts}: {}", errors[0])
                };
                assert_eq!((rank, *call), (odd, 2), "{hosts}");
                assert!(theirs.to_string().contains("K = 8"), "{theirs}");
                assert!(expected.to_string().contains("K = 4"), "{expected}");
            }
        }
    });
}

/// Messages arrive before it is known that the calls differ.
#[test]
fn messages_that_differ_on_another_host_end_no_call() {
    again_if_busy(|| {
        for hosts in ["abc", "abba"] {
            for odd in 0..hosts.len() {
                let errors = errors(hosts, builder(hosts), &[], |group| {
                    match group.rank() == odd {
                        true => group.all_gather_bytes(&[]).map(drop),
                        false => group.barrier(),
                    }
                });
                let (Some(rank), Kind::CallMismatch { .. }) = (errors[0].rank(), errors[0].kind())
                else {
                    panic!("{hosts}: {}", errors[0])
                };
                assert_eq!(rank, odd, "{hosts}");
            }
        }
    });
}

/// Rows of as many bytes, for a different product.
#[test]
fn an_operation_that_differs_on_another_host_is_named_before_it_is_complete() {
    again_if_busy(|| {
        for hosts in ["aabb", "abba", "abc"] {
            for odd in 0..hosts.len() {
                let errors = errors(hosts, builder(hosts), &[], |group| {
                    let mut a = group.sharded::<bf16>(12, 4)?;
                    let mut other = group.sharded::<bf16>(12, 4)?;
                    for a in [&mut a, &mut other] {
                        let rows = a.rows().len();
                        a.shard_mut().copy_from_host(&vec![bf16::ONE; rows * 4])?;
                    }
                    let a = if group.rank() == odd { &other } else { &a };
                    all_gather(a)
                });
                let (Some(rank), Kind::CallMismatch { .. }) = (errors[0].rank(), errors[0].kind())
                else {
                    panic!("{hosts}: {}", errors[0])
                };
                assert_eq!(rank, odd, "{hosts}");
            }
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_on_all_hosts() {
    again_if_busy(|| {
        for hosts in ["aabb", "abba", "abc"] {
            for leaver in 0..hosts.len() {
                let errors = errors(hosts, builder(hosts), &[leaver], |group| {
                    match group.rank() == leaver {
                        true => Ok(()),
                        false => group.barrier(),
                    }
                });
                assert!(
                    matches!((errors[0].rank(), errors[0].kind()), (Some(rank), Kind::RankLeft { .. }) if rank == leaver),
                    "{hosts}, {leaver}: {}",
                    errors[0]
                );
            }
        }
    });
}

#[test]
fn a_rank_that_was_refused_a_call_says_why_to_all_hosts() {
    again_if_busy(|| {
        for refused in 0..4 {
            let errors = errors("aabb", builder("aabb"), &[], |group| {
                if group.rank() != refused {
                    return group.barrier();
                }
                let out = group.upload(&[bf16::ONE; 3], 5, 4).map(drop);
                let refused = out.map_err(|error| group.refuse("barrier", error));
                std::thread::sleep(Duration::from_millis(1200));
                refused
            });
            assert!(
                matches!((errors[0].rank(), errors[0].kind()), (Some(rank), Kind::Unsuitable { .. }) if rank == refused)
            );
        }
    });
}

#[test]
fn a_late_rank_of_another_host_is_named_at_the_deadline() {
    again_if_busy(|| {
        for late in 0..4 {
            let short = agreed(Duration::from_millis(700));
            let builder = builder("aabb").arrival_timeout(short);
            let errors = errors("aabb", builder, &[late], |group| {
                if group.rank() == late {
                    while group.check().is_ok() {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                group.barrier()
            });
            assert!(
                matches!((errors[0].rank(), errors[0].kind()), (Some(rank), Kind::Timeout { .. }) if rank == late),
                "{}",
                errors[0]
            );
        }
    });
}

#[test]
fn more_calls_than_a_block_holds_are_compared() {
    again_if_busy(|| {
        let ranks = builder("aabb").threads(4, |group| {
            let begin = Instant::now();
            for number in 0..1000_u32 {
                let sent = group.all_gather_bytes(&number.to_le_bytes())?;
                assert!(sent.iter().all(|sent| sent[..] == number.to_le_bytes()));
            }
            Ok::<_, Error>(begin.elapsed())
        });
        println!("1000 messages over hosts: {:?}", ranks.unwrap());
    });
}
