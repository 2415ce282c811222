//! Ranks as threads of one process.

use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use super::commons::Commons;
use super::members::Members;
use super::{Builder, Group, wire};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::memory::{Mapping, memfd};
use crate::protocol::plan::MAX_WORLD;

/// Runs `f` on `world` threads, each with its rank's group. Returns the results by rank, or the error of the
/// lowest rank that failed on its own account.
pub(super) fn run<B, T, E, F>(builder: &Builder<B>, world: usize, f: F) -> Result<Vec<T>, E>
where
    B: Backend,
    T: Send,
    E: From<Error> + Send,
    F: Fn(Group<B>) -> Result<T, E> + Sync,
{
    if !(1..=MAX_WORLD).contains(&world) {
        return Err(E::from(Error::Limit {
            what: "world size".into(),
            value: world,
            min: 1,
            max: MAX_WORLD,
        }));
    }
    let ends = connect(world)?;
    let memory =
        memfd(Commons::BYTES).map_err(Error::system(None, "allocate the group's shared memory"))?;
    // The failure of one rank makes others fail after it: the first in time is the cause.
    let first_failure = Mutex::new(None);
    let results: Vec<Option<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .into_iter()
            .enumerate()
            .map(|(rank, connections)| {
                let (memory, first_failure, f) = (&memory, &first_failure, &f);
                scope.spawn(move || {
                    let members = Mapping::shared(memory, Commons::BYTES)
                        .map_err(Error::system(rank, "map the group's shared memory"))
                        .and_then(|memory| {
                            let commons = Commons::new(memory, rank, world);
                            Members::new(rank, builder.timeout, true, commons, world, connections)
                        });
                    let result = members
                        .and_then(|members| Group::open(members, builder))
                        .map_err(E::from)
                        .and_then(f);
                    match result {
                        Ok(value) => Some(value),
                        Err(error) => {
                            if let Ok(mut first) = first_failure.lock() {
                                first.get_or_insert(error);
                            }
                            None
                        }
                    }
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    });
    let failure = first_failure.into_inner().unwrap_or_default();
    match failure {
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// The control connections, by rank: rank 0 holds one to each other rank.
fn connect(world: usize) -> Result<Vec<Vec<UnixStream>>> {
    let mut ends = vec![Vec::new()];
    for rank in 1..world {
        let (ours, theirs) = wire::pair().map_err(Error::system(rank, "open a socket pair"))?;
        ends[0].push(ours);
        ends.push(vec![theirs]);
    }
    Ok(ends)
}
