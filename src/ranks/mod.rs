//! Who the ranks of a group are: how they find one another, what they tell one another, who has failed. Knows no backend and no
//! matrix.

pub mod address;
pub mod call;
mod children;
pub mod env;
pub mod identity;
pub mod last_panic;
pub mod launch;
pub mod members;
#[cfg(not(any(miri, gemmesh_heap)))]
pub mod memfd;
#[cfg(any(miri, gemmesh_heap))]
#[path = "memfd/heap.rs"]
pub mod memfd;
pub mod panics;
mod peer;
mod pidfd;
mod poll;
pub mod rendezvous;
pub mod reports;
mod search;
pub mod shared_state;
mod surroundings;
pub mod waits;
mod watcher;
pub mod wire;
