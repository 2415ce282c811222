//! Finding the other ranks over an MPI communicator. Only the rendezvous uses MPI.

use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, CommunicatorCollectives};

use super::{Builder, GATHERED_BYTES, Group};
use crate::backend::Backend;
use crate::error::{Error, Result};

/// Rendezvous over MPI.
#[cfg_attr(docsrs, doc(cfg(feature = "mpi")))]
impl<B: Backend> Builder<B> {
    /// Joins the group of the ranks of `communicator`, which must all run on this host. Collective.
    ///
    /// The ranks learn rank 0's address in an MPI_Allgather, which has no deadline: see [`Builder::connect_with`].
    ///
    /// # Errors
    /// As [`Builder::connect`].
    #[track_caller]
    pub fn from_communicator(self, communicator: &impl Communicator) -> Result<Group<B>> {
        let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
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
    /// As [`Builder::connect`]; [`Error::Environment`] if MPI is not initialised.
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
