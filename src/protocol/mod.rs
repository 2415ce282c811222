#![doc = include_str!("README.md")]

pub mod board;
pub mod epoch;
pub mod flag;
pub mod primitive;
pub mod seat;
pub mod waits;
