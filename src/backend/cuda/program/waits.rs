//! Which ranks' words a schedule's operation waits for.

use crate::backend::cuda::shared::words::Waits;
use crate::schedule::{Schedule, Transfer};

impl Waits {
    /// The waits of an operation that is not captured. `has_flags`: false if rows come through low-latency areas. `near`:
    /// the ranks of this rank's host, bit r for rank r.
    pub fn of(schedule: &Schedule, has_flags: bool, near: u64) -> Waits {
        if schedule.is_pushed() {
            let sources = if has_flags { schedule.sources() } else { &[] };
            return Waits::Kernel {
                ready: near,
                sources: sources.into(),
            };
        }
        let Masks {
            ready,
            sources,
            done,
        } = Masks::of(schedule);
        // A transfer that passes rows on waits for their source. So the source is to blame before other ranks that wait
        // for it too.
        Waits::Streams {
            ready: ready | sources,
            done,
        }
    }

    /// The waits of a captured operation, for graph words.
    pub fn in_graph(schedule: &Schedule) -> Waits {
        let Masks {
            ready,
            sources,
            done,
        } = Masks::of(schedule);
        Waits::Graph {
            ready,
            sources: sources & done,
            done,
        }
    }
}

/// The ranks that streams wait for: bit r for rank r.
struct Masks {
    /// Ranks from or to whose memory this rank moves something.
    ready: u64,
    /// Ranks whose rows this rank passes on.
    sources: u64,
    /// Ranks that move something from or to this rank's memory.
    done: u64,
}

impl Masks {
    fn of(schedule: &Schedule) -> Masks {
        let ranks = |ranks: &mut dyn Iterator<Item = usize>| ranks.fold(0, |all, r| all | 1 << r);
        let others = || schedule.moves().filter(|moved| moved.from != moved.to);
        let passed_on = others().filter(|moved| !moved.after.is_empty());
        Masks {
            ready: ranks(&mut others().map(Transfer::peer)),
            sources: ranks(&mut passed_on.map(|moved| moved.source)),
            done: ranks(&mut schedule.movers().iter().copied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::plan::collectives::chunked;
    use crate::schedule::plan::plan;
    use crate::schedule::{Layout, Operation, Problem};

    #[test]
    fn who_passes_on_waits_for_the_source_too() {
        let layout = Layout::new(&[512, 0, 0], 16).unwrap();
        let problem = Problem::new(Operation::BROADCAST, DType::U8, layout, 16);
        let schedule = |rank| plan(&problem, rank, chunked(2)).unwrap();
        let waits = |rank| Waits::of(&schedule(rank), true, u64::MAX);
        let streams = |ready, done| Waits::Streams { ready, done };
        assert_eq!(waits(0), streams(0b110, 0));
        assert_eq!(waits(1), streams(0b101, 0b101));
        assert_eq!(waits(2), streams(0b011, 0b011));
        // No one brings anything to rank 0, so it opens no graph word.
        let graph = Waits::Graph {
            ready: 0b100,
            sources: 0b1,
            done: 0b101,
        };
        assert_eq!(Waits::in_graph(&schedule(1)), graph);
    }
}
