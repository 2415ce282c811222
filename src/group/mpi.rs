//! Groups over an MPI communicator: the rendezvous, and what goes from host to host.

use std::sync::Arc;

use mpi::Threading;
use mpi::environment::threading_support;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

use super::{Builder, GATHERED_BYTES, Group};
use crate::backend::{Backend, Mpi};
use crate::error::{Error, Result};
use crate::ranks::host;
use crate::refusal::Refusal;
use crate::schedule::Hosts;
use crate::schedule::agreed::hash;
use crate::schedule::limits::require;

/// The name of the call.
const CALL: &str = "Group::from_communicator";

/// Rendezvous over MPI.
#[cfg_attr(docsrs, doc(cfg(feature = "mpi")))]
impl<B: Backend> Builder<B> {
    /// Joins the group of the ranks of `communicator`, which must all run on this machine. Collective.
    ///
    /// The ranks learn rank 0's address in an MPI_Allgather, which has no deadline: see [`Builder::connect_with`].
    ///
    /// # Errors
    /// As [`Builder::connect`]; [`Error::Mismatch`] if a rank runs on another machine than rank 0.
    #[track_caller]
    pub fn from_communicator(mut self, communicator: &impl Communicator) -> Result<Group<B>> {
        let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
        self.hosts = hosts(communicator)?;
        if self.hosts.count() > 1 {
            let what = "for a group of several hosts MPI must be initialised by \
                        mpi::initialize_with_threading(mpi::Threading::Multiple), because several threads call it";
            require(what, threading_support() == Threading::Multiple)
                .map_err(Refusal::of(rank, CALL))?;
            self.network = Some(Arc::new(Mpi::new(communicator)));
        }
        self.connect_with(rank, world, |mine| {
            let mut all = vec![0; world * GATHERED_BYTES];
            communicator.all_gather_into(&mine[..], &mut all[..]);
            Ok(all.chunks(GATHERED_BYTES).map(<[u8]>::to_vec).collect())
        })
    }

    /// Joins the group of all ranks that mpirun started. MPI must be initialised. The group does not need MPI
    /// afterwards.
    ///
    /// ```no_run
    /// use gemmesh::{Group, Host};
    ///
    /// let _mpi = mpi::initialize().expect("MPI was initialised before");
    /// let group = Group::<Host>::builder().from_mpi()?;
    /// # Ok::<(), gemmesh::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::from_communicator`]; [`Error::Environment`] if MPI is not initialised.
    #[track_caller]
    pub fn from_mpi(self) -> Result<Group<B>> {
        if !mpi::environment::is_initialized() {
            return Err(Error::Environment {
                launcher: "MPI".into(),
                missing: "mpi::initialize()".into(),
            });
        }
        self.from_communicator(&SimpleCommunicator::world())
    }
}

/// The hosts of the communicator's ranks. Collective.
fn hosts(communicator: &impl Communicator) -> Result<Hosts> {
    /// The kernel's id, and behind it the hash of the host's name.
    const BYTES: usize = 48;
    const ID: usize = BYTES - size_of::<u64>();
    let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
    let id = host::boot_id(rank);
    let mut mine = [b' '; BYTES];
    if let Ok(id) = &id {
        let length = id.len().min(ID);
        mine[..length].copy_from_slice(&id.as_bytes()[..length]);
        mine[ID..].copy_from_slice(&hash(host::name(id).as_bytes()).to_le_bytes());
    }
    let mut all = vec![0; world * BYTES];
    communicator.all_gather_into(&mine[..], &mut all[..]);
    // Also without an id, because the other ranks wait in the gather.
    id?;
    let (ids, names): (Vec<_>, Vec<_>) = all.chunks(BYTES).map(|one| one.split_at(ID)).unzip();
    let in_words = |id: &[u8]| String::from_utf8_lossy(id).trim().to_string();
    if let Some(other) = ids.iter().position(|id| *id != ids[0]) {
        return Err(Error::Mismatch {
            rank: other,
            what: "host (boot id)".into(),
            theirs: in_words(ids[other]),
            other: 0,
            expected: in_words(ids[0]),
            call: None,
        });
    }
    Hosts::of(&names).map_err(Refusal::of(rank, CALL))
}
