//! The ranks of a group: how they find one another, what they tell one another, and which of them has failed.
//!
//! Nothing here knows a backend or a matrix.

mod acknowledged;
pub mod address;
pub mod call;
mod children;
pub mod deadlines;
pub mod env;
#[cfg(feature = "cuda")]
pub mod failure_reporter;
mod family;
mod forked;
pub mod host;
pub mod identity;
pub mod last_panic;
pub mod launch;
pub mod meeting;
pub mod members;
#[cfg(not(any(miri, gemmesh_heap)))]
pub mod memfd;
#[cfg(any(miri, gemmesh_heap))]
#[path = "memfd/heap.rs"]
pub mod memfd;
pub mod mirror;
pub mod naming;
mod notice;
mod output;
pub mod panics;
mod peer;
pub mod pidfd;
mod poll;
pub mod rendezvous;
pub mod reports;
mod search;
mod secret;
pub mod shared_state;
mod silence;
pub mod split;
mod surroundings;
pub mod tcp;
pub mod tree;
pub mod wait_times;
pub mod watcher;
pub mod wire;
