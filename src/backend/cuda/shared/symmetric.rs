//! Symmetric memory between processes: device memory that every rank maps.
//!
//! Ranks send one another file descriptors of the driver's virtual memory. Unlike a legacy CUDA IPC handle, a mapping
//! keeps the memory alive, whatever happens to the rank that allocated it. So a rank unmaps everything when its own
//! work has ended, without asking the others. When all ranks have unmapped the memory or have died, the driver frees
//! it.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::backend::cuda::driver::{Device, DeviceMapping, DevicePtr, DeviceRegion, Uuid};
use crate::backend::cuda::family::rates::Rates;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::Deferred;
use crate::error::{Error, Kind, MadeCall, Result};
use crate::ranks::members::{Members, opening};
use crate::schedule::Hosts;

/// The same number of bytes on every rank's device.
#[derive(Debug)]
pub struct Symmetric {
    rank: usize,
    maps: Deferred<PeerMappings>,
}

/// Every rank's memory as this rank has mapped it.
#[derive(Debug)]
struct PeerMappings {
    own: DeviceMapping,
    /// By rank. None for this rank, and for ranks of other hosts.
    peers: Vec<Option<DeviceMapping>>,
}

impl Symmetric {
    /// Allocates zeroed memory on every rank. Collective, as `call`.
    ///
    /// `initialise` writes this rank's memory before another rank can see it. If a rank has no room, all ranks free
    /// what they have dropped, and try once more.
    pub fn allocate(
        gpu: &Gpu,
        members: &Members,
        peers: &Peers,
        call: &MadeCall,
        bytes: usize,
        initialise: impl Fn(&mut DeviceRegion) -> Result<()>,
    ) -> Result<Symmetric> {
        let (device, reclaimer) = (&gpu.device, &gpu.reclaimer);
        let attempt = || -> Result<PeerMappings> {
            reclaimer.settle();
            let mut own = None;
            let mut offer = || -> Result<OwnedFd> {
                let (mut memory, fd) = DeviceMapping::create(device, bytes)?;
                initialise(memory.region_mut())?;
                own = Some(memory);
                Ok(fd)
            };
            let offered = offer();
            let rank = members.rank;
            let peers = members.share(call, offered, |fds| {
                // Those of other hosts' ranks do not come.
                let maps = fds.iter().enumerate().map(|(peer, fd)| {
                    let near = fd.as_ref().filter(|_| peer != rank);
                    let import = |fd| peers.import(device, members, peer, fd, bytes);
                    near.map(import).transpose()
                });
                maps.collect()
            })?;
            let own = own.ok_or_else(|| {
                Kind::Internal {
                    what: "its own memory is missing".into(),
                }
                .on(rank)
            })?;
            Ok(PeerMappings { own, peers })
        };
        let maps = match attempt() {
            // Every rank gets this error.
            Err(error) if matches!(error.kind(), Kind::OutOfMemory { .. }) => {
                // The others wait for this rank meanwhile.
                reclaimer.drain(members.deadlines.call() / 2);
                members.gather_messages(call, Ok((Vec::new(), None)))?;
                attempt()?
            }
            first => first?,
        };
        Ok(Symmetric {
            rank: members.rank,
            maps: Deferred::new(maps, reclaimer),
        })
    }

    /// Leaves the memory mapped forever, because this rank's device may still write to it.
    pub fn abandon(&mut self) {
        self.maps.abandon();
    }

    /// This rank's memory.
    pub fn own(&self) -> DevicePtr {
        self.maps.own.ptr()
    }

    /// This rank's memory, for copies to and from the host.
    pub fn own_region(&self) -> &DeviceRegion {
        self.maps.own.region()
    }

    /// As [`Symmetric::own_region`].
    pub fn own_region_mut(&mut self) -> &mut DeviceRegion {
        self.maps.own.region_mut()
    }

    /// The memory of `rank`, as this rank has mapped it. 0 if the rank is on another host.
    pub fn of(&self, rank: usize) -> DevicePtr {
        if rank == self.rank {
            self.own()
        } else {
            self.maps.peers[rank].as_ref().map_or(0, DeviceMapping::ptr)
        }
    }
}

/// What a rank says of itself when the group opens.
#[derive(Debug, Serialize, Deserialize)]
pub struct Introduction {
    /// Its process.
    pid: u32,
    /// The PID namespace.
    namespace: String,
    uuid: Uuid,
    /// The GPUs that it sees.
    visible: Vec<Uuid>,
    /// Whether its GPU was chosen by the caller.
    chosen: bool,
    rates: Rates,
    /// Whether its copies run while its kernels do.
    pushes: bool,
}

impl Introduction {
    fn of(device: &Device, chosen: bool, rates: Rates, pushes: bool) -> Result<Introduction> {
        let namespace = std::fs::read_link("/proc/self/ns/pid");
        Ok(Introduction {
            pid: std::process::id(),
            namespace: namespace.map_or(String::new(), |link| link.to_string_lossy().into()),
            uuid: device.uuid(),
            visible: device.visible_uuids()?,
            chosen,
            rates,
            pushes,
        })
    }

    /// Parses what another rank has sent.
    pub fn parse(bytes: &[u8]) -> Result<Introduction, String> {
        let parsed: Result<Introduction, _> = serde_json::from_slice(bytes);
        let introduction = parsed.map_err(|error| error.to_string())?;
        introduction.rates.check().map(|()| introduction)
    }
}

/// The ranks' GPUs.
#[derive(Debug)]
pub struct Peers {
    uuids: Vec<Uuid>,
    /// Whether each rank has a GPU to itself, also in the group that this one is a part of.
    pub distinct: bool,
    /// Rank 0's rates. All ranks use them, because they must choose alike.
    pub rates: Rates,
    /// Whether copies run while kernels do, on all of them.
    push: bool,
}

impl Peers {
    /// Gathers the ranks' introductions. Collective.
    ///
    /// A rank without a device tells the others why.
    ///
    /// # Errors
    /// The error of the first rank that has one; [`Kind::Misuse`]; [`Kind::SharedGpu`].
    pub fn meet(
        members: &Members,
        own: Result<(&Device, Rates, bool)>,
        chosen: bool,
    ) -> Result<Peers> {
        let introduce = || -> Result<Vec<u8>> {
            let (device, rates, pushes) = own?;
            let introduction = Introduction::of(device, chosen, rates, pushes)?;
            serde_json::to_vec(&introduction).map_err(|e| {
                Kind::Internal {
                    what: format!("an introduction cannot be written: {e}"),
                }
                .on(members.rank)
            })
        };
        let own = introduce().map(|bytes| (bytes, None));
        let gathered = members.gather_messages(&opening(), own)?;
        let introductions = gathered.payloads.iter().enumerate();
        let introductions = introductions.map(|(rank, bytes)| {
            Introduction::parse(bytes).map_err(|reason| Kind::Message { reason }.on(rank))
        });
        let ranks = introductions.collect::<Result<Vec<_>>>();
        ranks
            .and_then(|ranks| check(&ranks, &members.hosts).map(|()| ranks))
            .map(|ranks| Peers {
                distinct: ranks
                    .iter()
                    .map(|rank| rank.uuid)
                    .collect::<HashSet<_>>()
                    .len()
                    == ranks.len(),
                uuids: ranks.iter().map(|rank| rank.uuid).collect(),
                rates: ranks[0].rates,
                push: ranks.iter().all(|rank| rank.pushes),
            })
            .map_err(|error| members.fail(error))
    }

    /// Whether rows may be pushed or stored.
    ///
    /// For that, kernels that wait for one another must be able to run at the same time.
    pub fn can_push(&self) -> bool {
        self.distinct && self.push
    }

    fn import(
        &self,
        device: &Arc<Device>,
        members: &Members,
        peer: usize,
        fd: &OwnedFd,
        bytes: usize,
    ) -> Result<DeviceMapping> {
        let refused = |reason: String| {
            Kind::PeerMemory {
                peer,
                reason: Some(reason),
            }
            .on(members.rank)
        };
        if !device.can_access(&self.uuids[peer])? {
            return Err(refused("the driver says that it cannot".into()));
        }
        DeviceMapping::import(device, fd, bytes).map_err(|e| refused(e.to_string()))
    }
}

/// In one process, the driver puts copies of different devices' streams one after the other, and a wait in one stream
/// would block all.
pub fn needs_processes(rank: usize) -> Error {
    let what = "it is in one process with another rank: ranks on GPUs must be processes of their own; start them with \
                gemmesh::launch, torchrun or mpirun";
    Kind::Misuse { what: what.into() }.on(rank)
}

/// Refuses GPUs of different families, two ranks of one process, and two ranks that share a GPU by accident although there
/// is one for each rank. (Processes of different hosts may have the same numbers.)
fn check(ranks: &[Introduction], hosts: &Hosts) -> Result<()> {
    let visible: HashSet<&Uuid> = ranks.iter().flat_map(|rank| &rank.visible).collect();
    for (later, rank) in ranks.iter().enumerate() {
        let (family, first) = (rank.rates.family, ranks[0].rates.family);
        if family != first {
            let (family, first) = (family.name(), first.name());
            let what = format!("a GPU of family {family} in a group with GPUs of family {first}");
            return Err(Error::of(later, &opening().name)(Error::unsupported(what)));
        }
        let near = ranks[..later].iter().enumerate();
        for (earlier, other) in near.filter(|&(earlier, _)| hosts.share(earlier, later)) {
            if (rank.pid, &rank.namespace) == (other.pid, &other.namespace) {
                return Err(needs_processes(later));
            }
            // NCCL refuses it.
            if rank.uuid == other.uuid && hosts.count() > 1 {
                let what = format!(
                    "ranks {earlier} and {later} of one host on one GPU in a group of several hosts"
                );
                return Err(Error::of(later, &opening().name)(Error::unsupported(what)));
            }
            let by_accident = rank.uuid == other.uuid && !rank.chosen && !other.chosen;
            if by_accident && visible.len() >= ranks.len() {
                return Err(Error::of_kind(Kind::SharedGpu {
                    ranks: [earlier, later],
                    visible: visible.len(),
                }));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::family::{H200, named};

    fn rank(pid: u32, gpu: u8, visible: &[u8], chosen: bool) -> Introduction {
        Introduction {
            pid,
            namespace: "pid:[1]".into(),
            uuid: [gpu; 16],
            visible: visible.iter().map(|&gpu| [gpu; 16]).collect(),
            chosen,
            rates: H200,
            pushes: true,
        }
    }

    #[test]
    fn two_ranks_of_one_process_are_told_so() {
        let ranks = [rank(1, 1, &[1, 2], false), rank(1, 2, &[1, 2], false)];
        assert_eq!(check(&ranks, &Hosts::default()), Err(needs_processes(1)));
        let mut elsewhere = ranks;
        elsewhere[1].namespace = "pid:[2]".into();
        assert_eq!(check(&elsewhere, &Hosts::default()), Ok(()));
        let hosts = Hosts::of(&["a", "b"]).unwrap();
        elsewhere[1].namespace = "pid:[1]".into();
        assert_eq!(check(&elsewhere, &hosts), Ok(()));
        let [first, second] = elsewhere;
        let beside = [
            first,
            rank(2, 1, &[1, 2], true),
            second,
            rank(4, 2, &[1, 2], true),
        ];
        let hosts = Hosts::of(&["a", "a", "b", "b"]).unwrap();
        let error = check(&beside, &hosts).unwrap_err().to_string();
        assert!(
            error.contains("ranks 0 and 1 of one host on one GPU"),
            "{error}"
        );
    }

    #[test]
    fn ranks_that_share_a_gpu_by_accident_are_told_so() {
        // Rank 0 sees GPUs 1 and 2, rank 1 sees 2 and 1, and each takes the one of its number.
        let crossed = [rank(1, 1, &[1, 2], false), rank(2, 1, &[2, 1], false)];
        let shared = Error::of_kind(Kind::SharedGpu {
            ranks: [0, 1],
            visible: 2,
        });
        assert_eq!(check(&crossed, &Hosts::default()), Err(shared));
        let chosen = [rank(1, 1, &[1, 2], true), rank(2, 1, &[2, 1], false)];
        assert_eq!(check(&chosen, &Hosts::default()), Ok(()));
        let scarce = [rank(1, 1, &[1], false), rank(2, 1, &[1], false)];
        assert_eq!(check(&scarce, &Hosts::default()), Ok(()));
    }

    #[test]
    fn gpus_of_different_families_are_refused_by_name() {
        let mut ranks = [rank(1, 1, &[1, 2], false), rank(2, 2, &[1, 2], false)];
        ranks[1].rates.family = named("sm80").unwrap();
        let words = check(&ranks, &Hosts::default()).unwrap_err().to_string();
        assert!(
            words.contains("rank 1") && words.contains("sm80"),
            "{words}"
        );
    }

    #[test]
    fn an_introduction_that_makes_no_sense_is_an_error() {
        for bytes in [&b""[..], b"{}", b"[1,2]", b"{\"pid\":-1}", b"\xff"] {
            assert!(Introduction::parse(bytes).is_err());
        }
        let sent = serde_json::to_vec(&rank(7, 1, &[1, 2], true)).unwrap();
        assert_eq!(Introduction::parse(&sent).unwrap().visible.len(), 2);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! What another rank says of itself.
    use super::*;
    use crate::backend::cuda::family::H200;

    /// Parses each line as an introduction, and checks all that parse together.
    pub fn parse(data: &[u8]) {
        let ranks = data.split(|&byte| byte == b'\n');
        let ranks: Vec<_> = ranks.flat_map(Introduction::parse).collect();
        let _ = check(&ranks, &Hosts::default());
    }

    /// Introductions as ranks make them.
    pub fn seeds() -> Vec<Vec<u8>> {
        let introduction = |pid, chosen| Introduction {
            pid,
            namespace: "pid:[4026531836]".into(),
            uuid: [200; 16],
            visible: vec![[200; 16], [7; 16]],
            chosen,
            rates: H200,
            pushes: chosen,
        };
        let ranks = [introduction(7, false), introduction(8, true)];
        let ranks = ranks.map(|rank| serde_json::to_vec(&rank).unwrap_or_default());
        vec![ranks[0].clone(), ranks.join(&b'\n')]
    }
}
