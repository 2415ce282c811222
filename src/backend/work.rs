//! Transfers as a trace shows them.

use crate::profile::span::Work;
use crate::schedule::Transfer;

/// What `rank`, which moves the regions of a transfer or receives them, does.
pub fn work_of(transfer: &Transfer, rank: usize) -> Work {
    let rows = transfer.regions[0].to.rows.clone();
    if transfer.to == rank {
        Work::Pull {
            source: transfer.source,
            rows,
        }
    } else {
        Work::Push {
            to: transfer.to,
            rows,
        }
    }
}
