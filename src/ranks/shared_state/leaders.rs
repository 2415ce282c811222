//! What a rank sees of leaders' mirrors.

use std::time::{Duration, Instant};

use crate::ranks::silence::Silence;
use crate::schedule::Hosts;

/// The leaders of all hosts, if there are several.
#[derive(Debug, Default)]
pub struct Leaders(Vec<LeaderPulse>);

#[derive(Debug)]
struct LeaderPulse {
    rank: usize,
    /// When its mirror was last known to run, in ms. 0: it has not run yet, as far as is known.
    ran: u64,
    silence: Silence,
}

impl Leaders {
    pub fn of(hosts: &Hosts, world: usize) -> Leaders {
        let several = if hosts.count() > 1 { world } else { 0 };
        let ranks = (0..several).filter(|&rank| hosts.leader_of(rank) == rank);
        let leaders = ranks.map(|rank| LeaderPulse {
            rank,
            ran: 0,
            silence: Silence::new(),
        });
        Leaders(leaders.collect())
    }

    /// Looks when their mirrors last ran, which `ran` says.
    pub fn look(&mut self, ran: impl Fn(usize) -> u64) {
        let now = Instant::now();
        for leader in &mut self.0 {
            let before = std::mem::replace(&mut leader.ran, ran(leader.rank));
            leader
                .silence
                .look(before != 0 && before == leader.ran, now);
        }
    }

    /// How long the mirror of the leader `rank` had not run at the last look, as far as this rank has watched.
    pub fn silence(&self, rank: usize) -> Duration {
        let leader = self.0.iter().find(|leader| leader.rank == rank);
        leader.map_or(Duration::ZERO, |leader| leader.silence.watched())
    }
}
