//! What the ranks of a group share on their GPUs: control words, symmetric memory, and the thread that watches both. Knows no operation.

pub mod monitor;
pub mod symmetric;
pub mod words;
