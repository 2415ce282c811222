//! MPI's end. Almost any call of MPI after it would end the process, so every call of ours asks first.
//!
//! MPI_Finalize first deletes the attributes of MPI_COMM_SELF. An attribute of ours learns of the end in this way, and
//! makes MPI_Finalize wait for calls that are under way.

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use mpi::topology::SimpleCommunicator;
use mpi::traits::{AnyCommunicator, CommAttribute};

/// How far MPI's finalization is, as far as is known.
#[derive(Clone, Copy, PartialEq)]
enum Finalization {
    /// Nothing, because no call has asked yet.
    Unwatched,
    Ahead,
    Complete,
}

static FINALIZATION: RwLock<Finalization> = RwLock::new(Finalization::Unwatched);

/// Why MPI can't be called.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unusable {
    NotInitialised,
    Finalised,
}

/// Keeps MPI_Finalize from ending MPI, for a call that waits for no other process.
pub struct Hold {
    _end: RwLockReadGuard<'static, Finalization>,
}

/// Fails unless MPI is initialised and not finalised.
pub fn check() -> Result<(), Unusable> {
    hold().map(drop)
}

/// As [`check`], and it stays so while the result lives.
///
/// A thread that has a `Hold` must not ask for one more: it would wait for an MPI_Finalize that waits for the first.
pub fn hold() -> Result<Hold, Unusable> {
    watch()?;
    let end = FINALIZATION.read().unwrap_or_else(PoisonError::into_inner);
    match *end {
        Finalization::Complete => Err(Unusable::Finalised),
        _ => Ok(Hold { _end: end }),
    }
}

/// Sees to it that the end will be known.
fn watch() -> Result<(), Unusable> {
    if *FINALIZATION.read().unwrap_or_else(PoisonError::into_inner) != Finalization::Unwatched {
        return Ok(());
    }
    let mut end = FINALIZATION.write().unwrap_or_else(PoisonError::into_inner);
    if *end != Finalization::Unwatched {
        return Ok(());
    }
    if !mpi::environment::is_initialized() {
        return Err(Unusable::NotInitialised);
    }
    if mpi::is_finalized() {
        return Err(Unusable::Finalised);
    }
    SimpleCommunicator::self_comm().set_attr(EndWatcher);
    *end = Finalization::Ahead;
    Ok(())
}

/// An attribute of MPI_COMM_SELF.
#[derive(Clone)]
struct EndWatcher;

impl CommAttribute for EndWatcher {}

impl Drop for EndWatcher {
    fn drop(&mut self) {
        *FINALIZATION.write().unwrap_or_else(PoisonError::into_inner) = Finalization::Complete;
    }
}
