//! The words of the protocol: epochs, flags, and the board on which a rank's failure stands.

pub mod board;
pub mod epoch;
pub mod flag;
pub mod primitive;
