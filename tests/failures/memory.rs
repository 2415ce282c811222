//! Memory that a rank cannot have.

use gemmesh::error::Kind;
use gemmesh::{Error, Group, Host, bf16};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::support::errors::parts;
use crate::support::shared::refusals::too_much_memory;
use crate::support::tested::ranks;
use crate::{Arguments, TIMEOUT, same_error, test_name};

/// Lets this process map `spare` bytes more than now, until the limit is lifted.
fn limit_memory(spare: u64) -> Rlimit {
    let before = getrlimit(Resource::As);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mapped = status.lines().find_map(|l| l.strip_prefix("VmSize:"));
    let mapped: u64 = mapped
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    let limit = Rlimit {
        current: Some(mapped * 1024 + spare),
        maximum: before.maximum,
    };
    setrlimit(Resource::As, limit).unwrap();
    before
}

const MIB: u64 = 1 << 20;

/// So that none of them maps memory for its first allocation later.
fn start_all_threads(group: &Group<Host>) -> Result<(), Error> {
    Arguments::new(group, 999, 300, 3)?.verify(group)?;
    group.barrier()
}

/// Rank 1 has no room for more than `spare` bytes, and all are told. Then the group goes on.
#[track_caller]
fn too_little_memory(test: &str, spare: u64) {
    let ranks = ranks::<Host>(test, 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        start_all_threads(&group)?;
        let limit = (rank.rank == 1).then(|| limit_memory(spare));
        let error = group.sharded::<bf16>(32 << 10, 1 << 10).unwrap_err();
        if let Some(limit) = limit {
            setrlimit(Resource::As, limit).unwrap();
        }
        // With the limit lifted, this works: also the call that has failed. The others have given their memory back.
        group.sharded::<bf16>(32 << 10, 1 << 10)?;
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        Err(error)
    });
    match parts(&same_error(&ranks.outcomes())) {
        (Some(rank), Kind::OutOfMemory { bytes, .. }) => assert_eq!((rank, *bytes), (1, 64 << 20)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_without_memory_is_named_and_the_group_goes_on() {
    too_little_memory(test_name!(), 32 * MIB);
}

#[test]
fn a_rank_that_cannot_map_its_peers_memory_is_named_and_the_group_goes_on() {
    // Enough for its own memory, not for that of all ranks.
    too_little_memory(test_name!(), 150 * MIB);
}

#[test]
fn more_memory_than_the_machine_has_is_refused_and_the_group_goes_on() {
    let outcomes = too_much_memory::<Host>(test_name!(), 3, [1 << 24, 1 << 24]);
    assert!(matches!(
        same_error(&outcomes).kind(), Kind::OutOfMemory { bytes, .. } if *bytes == 1 << 49
    ));
}

#[test]
fn memory_for_one_rank_but_not_for_all_is_refused_before_any_takes_it() {
    let ranks = ranks::<Host>(test_name!(), 3, |rank| {
        let group = rank.connect(TIMEOUT)?;
        // Half of what rank 0 sees, in rows of 2 MiB.
        let seen = group.all_gather_bytes(&available().to_le_bytes())?;
        let available = usize::from_le_bytes(seen[0][..].try_into().unwrap());
        let error = group.sharded::<bf16>((available / 2) >> 21, 1 << 20);
        let error = error.unwrap_err();
        Arguments::new(&group, 9, 5, 3)?.verify(&group)?;
        Err(error)
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    let Kind::OutOfMemory { reason, .. } = error.kind() else {
        panic!("{error}")
    };
    assert!(reason.contains("are needed in all"), "{reason}");
}

/// What the machine has left, in bytes.
fn available() -> usize {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = memory.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    let kib: usize = line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap();
    kib << 10
}
