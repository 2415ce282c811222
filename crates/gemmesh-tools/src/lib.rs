//! What gemmesh's tools are made of: [`player`] plays schedules through, and [`calibrate`] fits the rates of the
//! library's model to measurements.
#![cfg(feature = "cuda")]

pub mod calibrate;
pub mod player;
