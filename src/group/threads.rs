//! Ranks as threads of one process.

use std::fmt;
use std::io;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Builder, Group, in_words};
use crate::backend::Backend;
use crate::error::{Error, Kind, Result};
use crate::ranks::members::{Connections, Members};
use crate::ranks::memfd::{Mapping, memfd};
use crate::ranks::mirror::{HostLink, Mirror};
use crate::ranks::naming::Naming;
use crate::ranks::pidfd::PeerProcess;
use crate::ranks::shared_state::SharedState;
use crate::ranks::tree::Shape;
use crate::ranks::watcher::Watched;
use crate::ranks::wire;
use crate::schedule::Hosts;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::limits::limit;

/// Runs `f` on `world` threads, each with its rank's group. Returns the results by rank, or the error of the rank that
/// failed first.
#[track_caller]
pub(super) fn run<B, T, E, F>(builder: &Builder<B>, world: usize, f: F) -> Result<Vec<T>, E>
where
    B: Backend,
    T: Send,
    E: From<Error> + fmt::Display + Send,
    F: Fn(Group<B>) -> Result<T, E> + Sync,
{
    let ends = connect(world, &builder.hosts)?;
    let results: Vec<Mutex<Option<Result<T, E>>>> = ends.iter().map(|_| Mutex::default()).collect();
    let failed_first = start(builder, ends, &|rank, group| {
        let result = group.map_err(E::from).and_then(&f);
        let reason = result.as_ref().err().map(in_words);
        *results[rank].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        reason
    })?;
    let results = results.into_iter();
    let mut results: Vec<Result<T, E>> = results
        .filter_map(|result| result.into_inner().unwrap_or_else(PoisonError::into_inner))
        .collect();
    let failed = |rank: &usize| results.get(*rank).is_some_and(Result::is_err);
    let first = failed_first.into_iter().find(failed);
    results.swap(0, first.unwrap_or(0));
    results.into_iter().collect()
}

/// Starts a thread for each rank and waits for them all. Returns the ranks whose errors are reported before others',
/// the first one first.
///
/// `part` gets a rank and its group, or the reason why there is no group. It returns its error in words. `start` does
/// not depend on the types of `f`, so it is compiled only once.
#[track_caller]
fn start<B: Backend>(
    builder: &Builder<B>,
    ends: Vec<Connections>,
    part: &(dyn Fn(usize, Result<Group<B>>) -> Option<String> + Sync),
) -> Result<Vec<usize>> {
    let (world, place) = (ends.len(), Location::caller());
    let hosts = &builder.hosts;
    // Each host has a block of its own.
    let blocks = (0..hosts.count()).map(|_| memfd(SharedState::BYTES));
    let blocks = blocks.collect::<io::Result<Vec<_>>>();
    let blocks = blocks.map_err(Error::out_of_memory(0, SharedState::BYTES))?;
    let shared_state = |rank| {
        Mapping::shared(&blocks[hosts.host_of(rank)], SharedState::BYTES)
            .map_err(Error::out_of_memory(rank, SharedState::BYTES))
            .map(|memory| SharedState::new(memory, rank, world).on_hosts(hosts.clone()))
    };
    // For a last look at the group's failure.
    let group = shared_state(0)?;
    let ranks = ends.into_iter().enumerate().map(|(rank, ends)| {
        let parts = (shared_state(rank)?, ends);
        Ok(JoiningRank(Mutex::new(Some(parts))))
    });
    let ranks = ranks.collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, joining) in ranks.iter().enumerate() {
            let run = move || joining.run(builder, rank, world, part, place);
            let thread = std::thread::Builder::new().name(format!("rank {rank}"));
            match thread.spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                // The other ranks need not wait for this one.
                Err(error) => {
                    let error = Error::not_started(rank, "a thread")(error);
                    let own = joining.take().map(|(own, _)| own.fail(error.clone()));
                    part(rank, Err(own.unwrap_or(error)));
                }
            }
        }
        for thread in threads {
            if let Err(panic) = thread.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    // The failure of one rank makes others fail after it. So the error of a rank that left while another waited for it
    // comes first, then that of the rank that reported the group's failure.
    let fault = group.fault();
    let left = fault.as_ref().filter(|fault| {
        matches!(
            fault.kind(),
            Kind::RankLeft { .. }
                | Kind::ProgramFailed {
                    function_of: None,
                    ..
                }
        )
    });
    let left = left.map_or_else(Vec::new, Error::at_fault);
    Ok(left.into_iter().chain(group.reporter()).collect())
}

/// What a rank joins its group with, until its thread takes it. If no thread takes it, its connections close after the
/// other ranks know why.
struct JoiningRank(Mutex<Option<(SharedState, Connections)>>);

impl JoiningRank {
    fn take(&self) -> Option<(SharedState, Connections)> {
        let mut parts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        parts.take()
    }

    /// Joins the group as `rank`, does its part, and tells the others how that ended. `place`: of the call that opens the
    /// group.
    fn run<B: Backend>(
        &self,
        builder: &Builder<B>,
        rank: usize,
        world: usize,
        part: &(dyn Fn(usize, Result<Group<B>>) -> Option<String> + Sync),
        place: &'static Location<'static>,
    ) {
        let Some((shared_state, ends)) = self.take() else {
            return;
        };
        let deadlines = builder.deadlines(None);
        shared_state.set_naming(Naming::of_job(builder.name.clone(), world));
        let members = Members::new(rank, deadlines, true, shared_state, world, ends);
        let farewell = members.as_ref().ok().map(Farewell::of);
        let open = |members| builder.open(members, None, place);
        let reason = part(rank, members.and_then(open));
        if let Some(farewell) = farewell {
            farewell.say(reason);
        }
    }
}

/// Tells the other ranks that a rank's function has ended.
struct Farewell(Arc<SharedState>, #[allow(dead_code)] Option<Arc<Mirror>>);

impl Farewell {
    fn of(members: &Members) -> Farewell {
        Farewell(members.shared_state(), members.mirror())
    }

    /// Tells that the function has returned. `reason`: its error in words, if it returned one.
    fn say(self, reason: Option<String>) {
        if self.0.refuse_fork().is_ok() {
            let reason = reason.map(|reason| self.0.program_failed(reason));
            self.0.end(reason);
        }
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        // If the function panics, its group may already be gone, or be in other hands, and not report it.
        self.0.report_panic();
    }
}

/// The control connections, by rank. Those between hosts are TCP's, as between machines.
#[track_caller]
fn connect(world: usize, hosts: &Hosts) -> Result<Vec<Connections>> {
    let world_size = limit("the world size", world, 1, MAX_WORLD);
    world_size.map_err(Error::of(None, "Group::threads"))?;
    let mut ends: Vec<Connections> = (0..world).map(|_| Connections::default()).collect();
    for rank in 0..world {
        for child in Shape::of(hosts, world, rank).children {
            if hosts.share(rank, child) {
                let pair = wire::pair().map_err(Error::system(child, "open a socket pair"))?;
                let pair = [pair.0, pair.1].map(Arc::new);
                for (rank, peer, connection) in [(rank, child, &pair[0]), (child, rank, &pair[1])] {
                    ends[rank].near.push(Watched {
                        rank: peer,
                        connection: connection.clone(),
                        process: PeerProcess::Unknown,
                    });
                }
            } else {
                let links = HostLink::pair([rank, child]);
                let links = links.map_err(Error::system(child, "open a pair of TCP sockets"))?;
                for (rank, link) in [rank, child].into_iter().zip(links) {
                    ends[rank].links.push(link);
                }
            }
        }
    }
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Mutex;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;
    use crate::backend::Host;
    use crate::backend::transport::{Message, Transport};
    use crate::element::bf16;
    use crate::ops::{AllGatherMatmul, all_gather};

    const LATE: Duration = Duration::from_millis(100);

    #[test]
    fn a_rank_that_left_for_a_reason_of_its_own_is_the_first_to_fail() {
        let error = Group::<Host>::threads(
            3,
            |group| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
                if group.rank() == 1 {
                    drop(group);
                    std::thread::sleep(LATE);
                    return Err("its own reason".into());
                }
                Ok(group.barrier()?)
            },
        );
        assert_eq!(error.unwrap_err().to_string(), "its own reason");
    }

    #[test]
    fn ranks_open_their_group_however_short_its_deadlines_are() {
        let builder = Group::<Host>::builder().timeout(Duration::ZERO);
        let builder = builder.arrival_timeout(Duration::ZERO);
        let hosts = Hosts::of(&["a", "a", "b", "b"]).unwrap();
        let opened = builder
            .play_hosts(hosts)
            .threads(4, |group| Ok::<_, Error>(group.rank()));
        assert_eq!(opened, Ok(vec![0, 1, 2, 3]));
    }

    /// A transport of its own: channels between threads, by sender and receiver.
    #[derive(Clone, Debug, Default)]
    struct Channels(Arc<Mutex<HashMap<[usize; 2], MessageChannel>>>);

    type MessageChannel = (Sender<Vec<u8>>, Arc<Mutex<Receiver<Vec<u8>>>>);

    impl Channels {
        fn between(&self, ends: [usize; 2]) -> MessageChannel {
            let new = || {
                let (sender, receiver) = channel();
                (sender, Arc::new(Mutex::new(receiver)))
            };
            let mut channels = self.0.lock().unwrap();
            channels.entry(ends).or_insert_with(new).clone()
        }
    }

    impl Transport<Vec<u8>, Box<dyn Message>> for Channels {
        fn send(&self, ends: [usize; 2], bytes: Vec<u8>) -> Result<Box<dyn Message>> {
            self.between(ends).0.send(bytes.clone()).unwrap();
            Ok(Box::new(Some(bytes)))
        }

        fn receive(&self, ends: [usize; 2], _: Vec<u8>) -> Result<Box<dyn Message>> {
            Ok(Box::new(self.between(ends).1))
        }
    }

    impl Message for Option<Vec<u8>> {
        fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>> {
            Ok(self.take())
        }
    }

    impl Message for Arc<Mutex<Receiver<Vec<u8>>>> {
        fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>> {
            Ok(self.lock().unwrap().try_recv().ok())
        }
    }

    #[test]
    fn a_transport_is_what_sends_and_receives() {
        let channels = Channels::default();
        let hosts = Hosts::of(&["a", "a", "b", "b"]).unwrap();
        let builder = Group::<Host>::builder().play_hosts(hosts);
        let builder = builder.over(Arc::new(channels.clone()));
        let gathered = builder.threads(4, |group| {
            let mut a = group.sharded::<f32>(8, 3)?;
            let own = [group.rank() as f32; 6];
            a.shard_mut().copy_from_host(&own)?;
            all_gather(&a)?;
            a.to_vec()
        });
        let expected: Vec<f32> = (0..4).flat_map(|rank| [rank as f32; 6]).collect();
        assert_eq!(gathered, Ok(vec![expected; 4]));
        // Each rank has sent its rows to the other host and received the rows of its place there.
        let mut used: Vec<_> = channels.0.lock().unwrap().keys().copied().collect();
        used.sort();
        assert_eq!(used, [[0, 2], [1, 3], [2, 0], [3, 1]]);
    }

    #[test]
    fn the_rank_that_reports_a_failure_comes_before_those_that_learn_of_it() {
        let error = Group::<Host>::threads(3, |group| match group.rank() {
            0 => Ok(()),
            1 => {
                let result = group.barrier();
                std::thread::sleep(LATE);
                result
            }
            _ => loop {
                group.inner.members.check()?;
                std::thread::yield_now();
            },
        });
        let error = error.unwrap_err();
        assert!(
            matches!(error.kind(), Kind::RankLeft { .. }) && error.rank() == Some(0),
            "{error}"
        );
    }

    #[test]
    fn matrices_that_two_threads_of_a_rank_make_at_once_are_paired_and_numbered_alike() {
        const EACH: usize = 10;
        let made = Group::<Host>::threads(2, |group| {
            let make = || -> Result<Vec<_>> {
                let matrix = |_| group.sharded::<bf16>(2, 1);
                (0..EACH).map(matrix).collect()
            };
            let mut matrices = std::thread::scope(|scope| {
                let other = scope.spawn(make);
                let mut matrices = make()?;
                matrices.extend(other.join().unwrap()?);
                Ok::<_, Error>(matrices)
            })?;
            matrices.sort_by_key(|matrix| matrix.id());
            for (number, matrix) in matrices.iter_mut().enumerate() {
                assert_eq!(matrix.id(), number as u32);
                let row = bf16::from_f32(number as f32);
                matrix.shard_mut().copy_from_host(&[row])?;
                let prepared = AllGatherMatmul::new().prepare(&*matrix, 1)?;
                prepared.gather(&*matrix)?;
                assert_eq!(matrix.to_vec()?, [row; 2], "paired with another");
            }
            Ok::<_, Error>(matrices.len())
        });
        assert_eq!(made, Ok(vec![2 * EACH; 2]));
    }
}
