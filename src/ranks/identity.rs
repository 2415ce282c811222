//! How a process that looks for its group introduces itself.

use super::deadlines::Deadlines;
use super::reports::ReportSender;

/// A process that looks for the others of its group.
#[derive(Clone, Debug)]
pub struct Identity {
    pub rank: usize,
    pub world: usize,
    pub address: String,
    pub backend: &'static str,
    pub deadlines: Deadlines,
    /// Sends reports to the launcher, if it described this rank.
    pub launcher: Option<ReportSender>,
}
