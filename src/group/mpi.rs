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
            self.network = Some(Arc::new(Mpi::new(communicator)));
        }
        self.connect_with(rank, world, |mine| {
            let mut all = vec![0; world * GATHERED_BYTES];
            communicator.all_gather_into(&mine[..], &mut all[..]);
            Ok(all.chunks(GATHERED_BYTES).map(<[u8]>::to_vec).collect())
        })
    }

    /// Joins the group of all ranks that mpirun started. MPI must be initialised. A group of one host does not need MPI
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

/// What a rank tells the others: its kernel's id, the hash of its host's name, and whether any of its threads may call
/// MPI.
struct Told([u8; Told::BYTES]);

impl Told {
    const ID: usize = 40;
    const NAME: usize = Self::ID + size_of::<u64>();
    const BYTES: usize = Self::NAME + 1;

    fn of(boot_id: &str) -> Told {
        let mut bytes = [b' '; Self::BYTES];
        let length = boot_id.len().min(Self::ID);
        bytes[..length].copy_from_slice(&boot_id.as_bytes()[..length]);
        let name = hash(host::name(boot_id).as_bytes());
        bytes[Self::ID..Self::NAME].copy_from_slice(&name.to_le_bytes());
        bytes[Self::NAME] = u8::from(threading_support() == Threading::Multiple);
        Told(bytes)
    }
}

/// The hosts of the communicator's ranks. Collective.
///
/// # Errors
/// On all ranks or on none.
fn hosts(communicator: &impl Communicator) -> Result<Hosts> {
    let (rank, world) = (communicator.rank() as usize, communicator.size() as usize);
    let id = host::boot_id(rank);
    // Also without an id, because the other ranks wait in the gather. They take it for another machine's.
    let mine = id
        .as_ref()
        .map_or(Told([0; Told::BYTES]), |id| Told::of(id));
    let mut all = vec![0; world * Told::BYTES];
    communicator.all_gather_into(&mine.0[..], &mut all[..]);
    id?;
    let told: Vec<&[u8]> = all.chunks(Told::BYTES).collect();
    let id_of = |rank: usize| &told[rank][..Told::ID];
    if let Some(other) = (0..world).find(|&other| id_of(other) != id_of(0)) {
        let in_words = |id: &[u8]| String::from_utf8_lossy(id).trim_matches([' ', '\0']).into();
        return Err(Error::Mismatch {
            rank: other,
            what: "host (boot id)".into(),
            theirs: in_words(id_of(other)),
            other: 0,
            expected: in_words(id_of(0)),
            call: None,
        });
    }
    let names: Vec<&[u8]> = told
        .iter()
        .map(|told| &told[Told::ID..Told::NAME])
        .collect();
    let hosts = Hosts::of(&names).map_err(Refusal::of(rank, CALL))?;
    let single = told.iter().position(|told| told[Told::NAME] == 0);
    if let Some(rank) = single.filter(|_| hosts.count() > 1) {
        let what = "for a group of several hosts MPI must be initialised by \
                    mpi::initialize_with_threading(mpi::Threading::Multiple), because several threads call it";
        let refused = Refusal::Unsupported { what: what.into() };
        return Err(Refusal::of(rank, CALL)(refused));
    }
    Ok(hosts)
}
