//! Who the ranks of a group are: how they find one another, what they tell one another, who has failed. Knows no backend and no
//! matrix.

pub mod call;
pub mod env;
pub mod launch;
pub mod members;
pub mod rendezvous;
pub mod reports;
pub mod shared_state;
pub mod waits;
mod watcher;
pub mod wire;
