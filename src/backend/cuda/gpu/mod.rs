//! One GPU as a process uses it: its kernels, its queues, and what is freed late. Knows no group.

pub mod kernels;
pub mod queues;
pub mod reclaim;
