//! Limits of one rank's process: it tells every rank which, no signal ends it, and no one else is blamed.

use std::path::PathBuf;
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::{
    AllGatherMatmul, Config, Error, Group, Host, MatmulReduceScatter, ShardedMatrix, bf16,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support::patience::{again_if_busy, agreed};
use crate::support::processes::{Processes, start};
use crate::support::tested::{all_done, ranks};
use crate::{Arguments, TIMEOUT, test_name};

/// Sets a limit, until it is lifted.
pub struct Limited(Resource, Rlimit);

impl Limited {
    pub fn to(resource: Resource, value: u64) -> Limited {
        let before = getrlimit(resource);
        let limit = Rlimit {
            current: Some(value),
            maximum: before.maximum,
        };
        setrlimit(resource, limit).unwrap();
        Limited(resource, before)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let Limited(resource, before) = self;
        setrlimit(*resource, *before).unwrap();
    }
}

const MIB: u64 = 1 << 20;

/// The bytes of address space that this process has taken.
fn mapped() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    pages * 4096
}

/// The limit on descriptors with which a process can open so many more.
pub fn limit_for(more: u64) -> u64 {
    use std::os::fd::AsRawFd;
    let open = |_| std::fs::File::open("/dev/null").unwrap();
    let opened: Vec<_> = (0..=more).map(open).collect();
    // Each gets the lowest number that is free.
    opened.last().map_or(0, |last| last.as_raw_fd() as u64)
}

/// What a rank does that may meet a limit.
fn work(group: &Group<Host>) -> Result<(), Error> {
    Arguments::new(group, 9, 5, 3)?.verify(group)
}

/// As [`work`] in a group of its own, where `limited` limits one rank; and again without a limit if the group was
/// opened: it goes on.
fn attempt(
    connect: impl FnOnce() -> Result<Group<Host>, Error>,
    limited: Option<Limited>,
) -> Result<(), Error> {
    let group = connect()?;
    let worked = work(&group);
    drop(limited);
    if worked.is_err() {
        work(&group).expect("a group that goes on");
    }
    worked
}

/// What all ranks say of an attempt, by rank, told in a group that has no limit.
fn told(keeper: &Group<Host>, own: &Result<(), Error>) -> Vec<Result<String, Error>> {
    let own = own.clone().map(|()| String::new());
    let told = keeper.all_gather_bytes(&gemmesh::testing::of_outcome(&own));
    let told = told.expect("a group without limits").into_iter();
    told.map(|bytes| gemmesh::testing::outcome(&bytes).expect("an outcome"))
        .collect()
}

/// All ranks are told the same, and of rank `limited` and its limit.
#[track_caller]
fn assert_told(told: &[Result<String, Error>], limited: usize, limit: &str, case: &str) {
    for (rank, told) in told.iter().enumerate() {
        let Err(error) = told else {
            panic!("rank {rank} has no error, {case}");
        };
        let words = error.cause().to_string();
        assert!(
            words.contains(&format!("rank {limited}")) && words.contains(limit),
            "rank {rank}, {case}: {words}"
        );
    }
}

/// Three ranks open groups, and use them, while rank `limited` may have ever more descriptors: from none on, to as many
/// as it needs.
fn few_descriptors(test: &str, limited: usize) {
    again_if_busy(|| {
        /// With less it cannot reach the others, or hear them.
        const LEAST: [u64; 3] = [1, 1, 1];
        all_done(ranks::<Host>(test, 3, |rank| {
            let keeper = rank.connect(TIMEOUT)?;
            let mut refused = 0;
            for more in 0.. {
                let limit =
                    (rank.rank == limited).then(|| Limited::to(Resource::Nofile, limit_for(more)));
                let connect = || {
                    let builder = Group::<Host>::builder().workers(1);
                    let builder =
                        builder.arrival_timeout(agreed(Duration::from_millis(if more < 2 {
                            1000
                        } else {
                            10_000
                        })));
                    builder.connect(rank.rank, 3, &format!("{}-{more}", rank.address))
                };
                let own = attempt(connect, limit);
                let told = told(&keeper, &own);
                if told.iter().all(Result::is_ok) {
                    break;
                }
                refused += 1;
                let case = format!("with {more} more");
                if more >= LEAST[limited] {
                    assert_told(&told, limited, "RLIMIT_NOFILE", &case);
                } else {
                    // Its own error says why; the others can say no more than who it is.
                    assert_told(&told, limited, "", &case);
                    assert_told(&told[limited..=limited], limited, "RLIMIT_NOFILE", &case);
                }
                assert!(refused < 40, "{told:?}");
            }
            assert!(refused > 5, "only {refused} attempts were refused");
            Ok("done".into())
        }));
    });
}

#[test]
fn rank_0_that_may_have_few_descriptors_is_named_with_its_limit() {
    few_descriptors(test_name!(), 0);
}

#[test]
fn a_rank_that_may_have_few_descriptors_is_named_with_its_limit() {
    few_descriptors(test_name!(), 1);
}

#[test]
fn ranks_as_threads_that_may_have_few_descriptors_are_told_of_the_limit() {
    let ranks = start(test_name!(), &[(0, 1)], |_| {
        let mut refused = 0;
        for more in 0.. {
            let limit = Limited::to(Resource::Nofile, limit_for(more));
            let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
            let worked = builder.threads(3, |group| work(&group));
            drop(limit);
            let Err(error) = worked else { break };
            let words = error.cause().to_string();
            assert!(words.contains("RLIMIT_NOFILE"), "with {more} more: {words}");
            refused += 1;
        }
        assert!(refused > 10, "only {refused} attempts were refused");
        Ok("done".into())
    });
    assert_eq!(ranks.outcomes()[0].value(), "done");
}

#[test]
fn a_rank_whose_files_may_not_be_large_is_named_with_its_limit_and_lives() {
    all_done(ranks::<Host>(test_name!(), 3, |rank| {
        let keeper = rank.connect(TIMEOUT)?;
        for limited in [0, 1] {
            let limit = (rank.rank == limited).then(|| Limited::to(Resource::Fsize, 4096));
            let address = format!("{}-{limited}", rank.address);
            let builder = Group::<Host>::builder().timeout(TIMEOUT);
            let own = attempt(|| builder.connect(rank.rank, 3, &address), limit);
            let told = told(&keeper, &own);
            assert_told(&told, limited, "RLIMIT_FSIZE", "opening");
        }
        let limit = (rank.rank == 2).then(|| Limited::to(Resource::Fsize, 1 << 20));
        let own = keeper.sharded::<bf16>(1 << 10, 1 << 10).map(drop);
        drop(limit);
        assert_told(&told(&keeper, &own), 2, "RLIMIT_FSIZE", "a matrix");
        work(&keeper)?;
        Ok("done".into())
    }));
}

#[test]
fn a_rank_that_may_map_little_memory_is_named_with_its_limit() {
    all_done(ranks::<Host>(test_name!(), 3, |rank| {
        let keeper = rank.connect(TIMEOUT)?;
        let mut refused = 0;
        // Below the first, the program itself has no memory for its own small things.
        for more in 1.. {
            let limit = (rank.rank == 1).then(|| Limited::to(Resource::As, mapped() + more * MIB));
            let address = format!("{}-{more}", rank.address);
            let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
            let own = attempt(|| builder.connect(rank.rank, 3, &address), limit);
            let told = told(&keeper, &own);
            if told.iter().all(Result::is_ok) {
                break;
            }
            assert_told(&told, 1, "RLIMIT_AS", &format!("with {more} MiB more"));
            refused += 1;
        }
        assert!(refused > 2, "only {refused} attempts were refused");
        Ok("done".into())
    }));
}

/// Where this process ignores limits of users, it becomes a user that does not.
fn become_anybody() -> bool {
    if !rustix::process::geteuid().is_root() {
        return true;
    }
    // SAFETY: a plain call, for all threads of this process.
    #[allow(unsafe_code)]
    unsafe {
        libc::setuid(54_321) == 0
    }
}

#[test]
fn a_rank_that_may_start_no_thread_is_named_with_its_limit() {
    all_done(ranks::<Host>(test_name!(), 3, |rank| {
        if !become_anybody() {
            println!("not permitted to become another user");
            return Ok("not tested".into());
        }
        let keeper = rank.connect(TIMEOUT)?;
        for limited in [0, 2] {
            let limit = (rank.rank == limited).then(|| Limited::to(Resource::Nproc, 1));
            let address = format!("{}-{limited}", rank.address);
            let builder = Group::<Host>::builder().timeout(TIMEOUT);
            let own = attempt(|| builder.connect(rank.rank, 3, &address), limit);
            assert_told(&told(&keeper, &own), limited, "RLIMIT_NPROC", "opening");
        }
        let limit = Limited::to(Resource::Nproc, 1);
        let own = Group::<Host>::threads(3, |group| group.barrier());
        drop(limit);
        let words = own.unwrap_err().to_string();
        assert!(words.contains("RLIMIT_NPROC"), "{words}");
        Ok("done".into())
    }));
}

#[test]
fn tiles_larger_than_memory_are_refused_before_the_operation_and_the_group_goes_on() {
    let result = Group::<Host>::builder().workers(1).threads(2, |group| {
        let a = group.sharded::<bf16>(1 << 18, 16)?;
        let b = group.zeros::<bf16>(1 << 18, 16)?;
        // Of no memory, as nothing of it is touched.
        let prepare = |config: Config| gemmesh::AllGatherMatmul::new().config(config).prepare(&a, 1 << 18);
        let mut config = gemmesh::AllGatherMatmul::new().prepare(&a, 1 << 18)?.config();
        (config.tile.m, config.tile.n) = (1 << 18, 1 << 18);
        drop(b);
        let error = prepare(config).map(drop).unwrap_err();
        assert!(
            matches!((error.rank(), error.kind()), (Some(rank), Kind::OutOfMemory { bytes, .. }) if rank == group.rank() && *bytes >= 1 << 37),
            "{error}"
        );
        work(&group)
    });
    assert_eq!(result.map(drop), Ok(()));
}

/// What has 2²⁴ tiles of 16 bytes, if it is multiplied with 2²⁰ rows.
fn tiles_of_256_mib(group: &Group<Host>) -> Result<(ShardedMatrix<Host, bf16>, Config), Error> {
    let a = group.sharded::<bf16>(1 << 18, 1)?;
    let mut config = AllGatherMatmul::new().prepare(&a, 1)?.config();
    (config.tile.m, config.tile.n) = (128, 128);
    Ok((a, config))
}

#[test]
fn tiles_that_memory_cannot_list_are_refused_by_the_rank_and_no_signal_ends_it() {
    let ranks = start(test_name!(), &[(0, 1)], |_| {
        let group = Group::<Host>::builder()
            .workers(1)
            .threads(1, Ok::<_, Error>)?
            .remove(0);
        let (a, config) = tiles_of_256_mib(&group)?;
        let own = group.zeros::<bf16>(1 << 18, 1)?;
        let limit = Limited::to(Resource::As, mapped() + 64 * MIB);
        let product = AllGatherMatmul::<_, bf16>::new().config(config);
        let refused = product.prepare(&a, 1 << 20).map(drop);
        let reduced = MatmulReduceScatter::<_, bf16>::new().config(config);
        let reduced = reduced.prepare(&own, 1 << 20).map(drop);
        drop(limit);
        for refused in [refused, reduced] {
            let error = refused.unwrap_err();
            let (Some(0), Kind::OutOfMemory { bytes, .. }) = (error.rank(), error.kind()) else {
                panic!("{error}");
            };
            assert_eq!(*bytes, 1 << 28);
        }
        work(&group)?;
        Ok("done".into())
    });
    assert_eq!(ranks.outcomes()[0].value(), "done");
}

/// A control group of this process's own, of either version, that may have `bytes`; none where that is not permitted.
fn enter_control_group(bytes: u64) -> Option<PathBuf> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let candidates = groups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?.trim_start_matches('/'));
        match controllers {
            "" => Some((PathBuf::from("/sys/fs/cgroup").join(path), "memory.max")),
            "memory" => Some((
                PathBuf::from("/sys/fs/cgroup/memory").join(path),
                "memory.limit_in_bytes",
            )),
            _ => None,
        }
    });
    for (own, limit) in candidates {
        let group = own.join(format!("gemmesh-test-{}", std::process::id()));
        let enter = || -> std::io::Result<()> {
            std::fs::create_dir(&group)?;
            std::fs::write(group.join(limit), bytes.to_string())?;
            std::fs::write(group.join("cgroup.procs"), std::process::id().to_string())
        };
        if enter().is_ok() {
            return Some(group);
        }
        let _ = std::fs::remove_dir(&group);
    }
    None
}

/// What a process says when it has said which control group it has entered, if any.
const ENTERED: &str = "it has entered what it may";

/// All end well. Then the control group that the process at `place` has entered goes.
#[track_caller]
fn all_done_but_control_group(ranks: Processes, place: usize) {
    ranks.heard(place, ENTERED);
    let said = ranks.said(place);
    let outcomes = ranks.outcomes();
    for path in said.iter().filter(|said| *said != ENTERED) {
        // Empty now.
        let _ = std::fs::remove_dir(path);
    }
    for outcome in outcomes {
        outcome.value();
    }
}

#[test]
fn a_rank_whose_control_group_has_no_memory_is_named_and_none_is_killed() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        work(&group)?;
        let entered = match rank.rank {
            1 => enter_control_group(96 * MIB),
            _ => None,
        };
        if let Some(path) = &entered {
            rank.say(path.display());
        }
        rank.say(ENTERED);
        let may = group.all_gather_bytes(&[u8::from(entered.is_some())])?;
        if may[1] == [0] {
            println!("not permitted to make a control group");
            return Ok("not tested".into());
        }
        let shared = group.sharded::<bf16>(192 << 10, 1 << 10).map(drop);
        assert_told(&told(&group, &shared), 1, "control group", "a matrix");
        if rank.rank == 1 {
            let own = group.zeros::<bf16>(64 << 10, 1 << 10).map(drop);
            assert_told(
                &[own.map(|()| String::new())],
                1,
                "control group",
                "its own",
            );
        }
        work(&group)?;
        Ok("done".into())
    });
    all_done_but_control_group(ranks, 1);
}

#[test]
fn a_rank_that_takes_its_control_groups_memory_bit_by_bit_is_refused_what_is_not_there() {
    let ranks = start(test_name!(), &[(0, 1)], |me| {
        const ROWS: usize = 30 << 10;
        // 60 MiB.
        let values = vec![bf16::ONE; ROWS << 10];
        let group = Group::<Host>::builder()
            .workers(1)
            .threads(1, Ok::<_, Error>)?
            .remove(0);
        work(&group)?;
        let (a, config) = tiles_of_256_mib(&group)?;
        let entered = enter_control_group(96 * MIB);
        if let Some(path) = &entered {
            me.say(path.display());
        }
        me.say(ENTERED);
        if entered.is_none() {
            println!("not permitted to make a control group");
            return Ok("not tested".into());
        }
        let refused = |of: &str, error: Error| {
            let told = [Err(error)];
            assert_told(&told, 0, "control group", of);
        };
        let tiles = AllGatherMatmul::<_, bf16>::new().config(config);
        refused("tiles", tiles.prepare(&a, 1 << 20).map(drop).unwrap_err());
        // Whether it is written or not.
        let mut matrix = group.zeros::<bf16>(ROWS, 1 << 10)?;
        refused("another", group.zeros::<bf16>(ROWS, 1 << 10).unwrap_err());
        matrix.copy_from_host(&values)?;
        refused("a copy", matrix.to_vec().unwrap_err());
        drop(matrix);
        let shared = group.sharded::<bf16>(ROWS, 1 << 10)?;
        refused("a copy of what is shared", shared.to_vec().unwrap_err());
        drop(shared);
        work(&group)?;
        Ok("done".into())
    });
    all_done_but_control_group(ranks, 0);
}
