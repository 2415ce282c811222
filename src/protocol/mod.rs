#![doc = include_str!("README.md")]

pub mod board;
pub mod drive;
pub mod epoch;
pub mod flag;
pub mod plan;
pub mod primitive;
mod schedule;

pub use epoch::Epoch;
pub use flag::{Awaited, Flag, FlagBlock};
pub use plan::{Config, Plan, Problem, Pull, Push, Tile, Transport};
