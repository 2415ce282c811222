//! Groups over an MPI communicator: the rendezvous, and what goes from host to host.

use std::sync::Arc;

use mpi::Threading;
use mpi::environment::threading_support;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

use super::{Builder, GATHERED_BYTES, Group};
use crate::backend::sealed::Implementation;
use crate::backend::transport::mpi::{Mpi, Unusable, check};
use crate::backend::{Backend, Host};
use crate::error::{Error, Kind, Result};
use crate::ranks::host;
use crate::schedule::Hosts;

/// The name of the call.
const CALL: &str = "Group::from_communicator";

/// Rendezvous over MPI.
#[cfg_attr(docsrs, doc(cfg(feature = "mpi")))]
impl<B: Backend> Builder<B> {
    /// Joins the group of the ranks of `communicator`, on one host or on several. Collective.
    ///
    /// The ranks learn rank 0's address in an MPI_Allgather, which has no deadline: see [`Builder::connect_with`]. If
    /// there are several hosts, MPI carries rows from host to host on the host backend. On GPUs NCCL does.
    ///
    /// # Errors
    /// As [`Builder::connect_with`]; [`Kind::Unsupported`] if MPI is to carry rows and was not initialised by
    /// `mpi::initialize_with_threading(mpi::Threading::Multiple)`; [`Kind::Environment`] if MPI is not initialised or is
    /// finalised.
    ///
    /// If MPI carries rows, the group must be dropped before the `mpi::Universe`. Calls that are under way when MPI is
    /// finalised, and later ones, return [`Kind::System`], and the group has failed.
    #[track_caller]
    pub fn from_communicator(mut self, communicator: &impl Communicator) -> Result<Group<B>> {
        require_mpi()?;
        let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
        let carries_rows = B::NAME == Host::NAME;
        let hosts = hosts(communicator, carries_rows)?;
        if carries_rows && hosts.count() > 1 {
            self = self.over(Arc::new(Mpi::new(communicator)));
        }
        self.connect_by(rank, world, Some(hosts), |mine| {
            let mut all = vec![0; world * GATHERED_BYTES];
            communicator.all_gather_into(&mine[..], &mut all[..]);
            Ok(all.chunks(GATHERED_BYTES).map(<[u8]>::to_vec).collect())
        })
    }

    /// Joins the group of all ranks that mpirun started. MPI must be initialised. A group of one host, or of GPUs, does not
    /// need MPI afterwards.
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
    /// As [`Builder::from_communicator`].
    #[track_caller]
    pub fn from_mpi(self) -> Result<Group<B>> {
        require_mpi()?;
        self.from_communicator(&SimpleCommunicator::world())
    }
}

/// Fails unless MPI can be called.
fn require_mpi() -> Result<()> {
    check().map_err(|unusable| {
        Error::of_kind(Kind::Environment {
            launcher: "MPI".into(),
            missing: match unusable {
                Unusable::NotInitialised => "mpi::initialize()".into(),
                Unusable::Finalised => "an mpi::Universe (MPI has been finalised)".into(),
            },
        })
    })
}

/// What a rank tells the others: its host's tag, and whether any of its threads may call MPI.
const TOLD: usize = size_of::<u64>() + 1;

/// The hosts of the communicator's ranks. Collective. `carries_rows`: whether MPI does, if there are several.
///
/// # Errors
/// On all ranks or on none, except if this rank has no descriptors left.
fn hosts(communicator: &impl Communicator, carries_rows: bool) -> Result<Hosts> {
    let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
    let id = host::boot_id(rank);
    // Also without an id, because the other ranks wait in the gather. They take it for another host's.
    let tag = id.as_deref().map_or(0, host::tag);
    let is_multiple = threading_support() == Threading::Multiple;
    let mine = [&tag.to_le_bytes()[..], &[u8::from(is_multiple)]].concat();
    let mut all = vec![0; world * TOLD];
    communicator.all_gather_into(&mine[..], &mut all[..]);
    id?;
    let told: Vec<&[u8]> = all.chunks(TOLD).collect();
    let tags: Vec<&[u8]> = told.iter().map(|told| &told[..TOLD - 1]).collect();
    let hosts = Hosts::of(&tags).map_err(Error::of(rank, CALL))?;
    let single = told.iter().position(|told| told[TOLD - 1] == 0);
    if let Some(rank) = single.filter(|_| carries_rows && hosts.count() > 1) {
        let what = "for a group of several hosts MPI must be initialised by \
                    mpi::initialize_with_threading(mpi::Threading::Multiple), because several threads call it";
        let refused = Error::unsupported(what);
        return Err(Error::of(rank, CALL)(refused));
    }
    Ok(hosts)
}
