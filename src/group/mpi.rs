//! Finding the other ranks over an MPI communicator. Only the rendezvous uses MPI.

use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Root};

use super::{Builder, Group};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::ranks::address::draw;

/// The length of the message by which rank 0 tells the others the address that it has drawn.
const ADDRESS_BYTES: usize = 64;

/// Rendezvous over MPI.
#[cfg_attr(docsrs, doc(cfg(feature = "mpi")))]
impl<B: Backend> Builder<B> {
    /// Joins the group of the ranks of `communicator`, which must all run on this host. Collective.
    ///
    /// Rank 0 tells the others an address in a broadcast, for which MPI has no deadline. All later steps have the
    /// builder's deadlines.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    #[track_caller]
    pub fn from_communicator(self, communicator: &impl Communicator) -> Result<Group<B>> {
        let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
        let mut address = [b' '; ADDRESS_BYTES];
        let drawn = match rank {
            0 => draw(),
            _ => Ok(String::new()),
        };
        if let Ok(drawn) = &drawn {
            address[..drawn.len()].copy_from_slice(drawn.as_bytes());
        }
        communicator
            .process_at_rank(0)
            .broadcast_into(&mut address[..]);
        // After the broadcast, in which the others wait without a deadline.
        drawn.map_err(Error::system(rank, "draw a random address"))?;
        let address = String::from_utf8_lossy(&address);
        self.connect(rank, world, address.trim())
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
