//! Timelines of operations, as pictures and for Perfetto.
//!
//! `run_traced` of a prepared call gives this rank's [`Trace`], and [`Timeline::collect`] brings all ranks' traces
//! together.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use crate::backend::Backend;
use crate::error::{Error, Kind, MadeCall, Result};
use crate::group::Group;
use crate::json;
pub use crate::profile::span::{Lane, Span, Work};
use crate::resources::require_file_size;

#[cfg(feature = "timeline")]
mod svg;
#[cfg(feature = "timeline")]
pub use svg::Picture;

/// What one rank did in one or more operations.
#[derive(Clone, PartialEq, Eq)]
pub struct Trace {
    /// The rank.
    pub rank: usize,
    /// The spans, in the order in which they begin.
    pub spans: Vec<Span>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Trace(rank {}, {} spans)", self.rank, self.spans.len())
    }
}

impl Trace {
    pub(crate) fn new(rank: usize, mut spans: Vec<Span>) -> Trace {
        spans.sort_by_key(|span| (span.begin, span.lane));
        Trace { rank, spans }
    }

    /// Adds the trace of the same rank's next operation, which began when this one had ended.
    ///
    /// On the host all operations have one clock. On GPUs each trace begins at 0, so the next trace is moved after the
    /// end of this one.
    pub fn extend(&mut self, next: Trace) {
        let end = self.spans.iter().map(|span| span.end).max().unwrap_or(0);
        let begin = next.spans.iter().map(|span| span.begin).min();
        let late = end.saturating_sub(begin.unwrap_or(end));
        self.spans.extend(next.spans.into_iter().map(|span| Span {
            begin: span.begin + late,
            end: span.end + late,
            ..span
        }));
    }

    /// Parses the trace that `rank` has sent.
    fn parse(rank: usize, bytes: &[u8]) -> serde_json::Result<Trace> {
        let spans = json::spans(bytes)?;
        Ok(Trace { rank, spans })
    }
}

/// What all ranks did in one or more operations.
///
/// ```
/// use gemmesh::trace::Timeline;
/// use gemmesh::{AllGatherMatmul, Group, Host, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let (m, n, k) = (8, 4, 16);
///     let a = group.sharded::<bf16>(m, k)?;
///     let b = group.zeros::<bf16>(n, k)?;
///     let mut out = group.zeros::<bf16>(m, n)?;
///     let product = AllGatherMatmul::new().prepare(&a, n)?;
///     let trace = product.run_traced(&a, &b, &mut out)?;
///     let timeline = Timeline::collect(&group, &trace)?;
///     assert_eq!(timeline.traces.len(), group.world_size());
///     Ok(())
/// }
///
/// Group::threads(2, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The traces, by rank.
    pub traces: Vec<Trace>,
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let spans: usize = self.traces.iter().map(|trace| trace.spans.len()).sum();
        write!(f, "Timeline({} ranks, {spans} spans)", self.traces.len())
    }
}

impl Timeline {
    /// Brings the ranks' traces together. Collective. Every rank gets all traces.
    ///
    /// # Errors
    /// [`Kind::Limit`] on this rank alone, and nothing is sent, if `trace` takes more than 256 MiB / W - 4 KiB; the
    /// group's failure.
    #[track_caller]
    pub fn collect<B: Backend>(group: &Group<B>, trace: &Trace) -> Result<Timeline> {
        let bytes = json::of_spans(&trace.spans).map_err(|e| {
            Kind::System {
                action: "encode a trace".into(),
                reason: e.to_string(),
            }
            .on(group.rank())
        });
        let bytes = bytes.inspect_err(|error| group.inner().members.refuse(error))?;
        let traces = group
            .gather_bytes(&MadeCall::named("Timeline::collect"), &bytes)?
            .iter()
            .enumerate()
            .map(|(rank, bytes)| {
                Trace::parse(rank, bytes).map_err(|e| {
                    Kind::Message {
                        reason: e.to_string(),
                    }
                    .on(rank)
                })
            })
            .collect::<Result<_>>()?;
        Ok(Timeline { traces })
    }

    /// Writes the timeline in the Trace Event Format, which <https://ui.perfetto.dev> and chrome://tracing read.
    ///
    /// Each rank is a process, and each lane is a thread. Times are in microseconds from the beginning of the first
    /// span.
    ///
    /// # Errors
    /// [`Kind::System`] if the file can't be written.
    pub fn write_chrome(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes = serde_json::to_vec(&self.chrome()).map_err(std::io::Error::from);
        bytes
            .map_err(Error::system(None, "write a trace as JSON"))
            .and_then(|bytes| write(path, &bytes))
    }

    fn chrome(&self) -> serde_json::Value {
        use serde_json::json;
        let origin = self.origin();
        let mut events = Vec::new();
        for Trace { rank, spans } in &self.traces {
            events.push(json!({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": format!("rank {rank}")}}));
            let mut lanes: Vec<Lane> = spans.iter().map(|span| span.lane).collect();
            lanes.sort();
            lanes.dedup();
            for lane in lanes {
                let thread = thread_of(lane);
                let name = match lane {
                    Lane::Copy => "copy engine".to_string(),
                    Lane::Network => "network card".to_string(),
                    Lane::Caller(index) => format!("caller's stream {index}"),
                    Lane::Worker(index) => format!("worker {index}"),
                };
                events.push(json!({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}));
            }
            for span in spans {
                let (category, name, args) = words_of(&span.work);
                let micros = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
                events.push(json!({
                    "ph": "X", "cat": category, "name": name, "pid": rank, "tid": thread_of(span.lane),
                    "ts": micros(origin, span.begin), "dur": micros(span.begin, span.end), "args": args,
                }));
            }
        }
        json!({ "traceEvents": events, "displayTimeUnit": "ms" })
    }

    /// The time from the beginning of the first span to the end of the last.
    pub fn duration(&self) -> Duration {
        let ends = self.traces.iter().flat_map(|trace| &trace.spans);
        let end = ends.map(|span| span.end).max().unwrap_or(0);
        Duration::from_nanos(end.saturating_sub(self.origin()))
    }

    /// When the first span of any rank began.
    fn origin(&self) -> u64 {
        let begins = self.traces.iter().flat_map(|trace| &trace.spans);
        begins.map(|span| span.begin).min().unwrap_or(0)
    }
}

/// The category, the name and the arguments of a span's work.
fn words_of(work: &Work) -> (&'static str, String, serde_json::Value) {
    use serde_json::json;
    match work {
        Work::Pull { source, rows } => (
            "pull",
            format!("pull from {source}"),
            json!({"source": source, "first_row": rows.start, "rows": rows.len()}),
        ),
        Work::Push { to, rows } => (
            "push",
            format!("push to {to}"),
            json!({"to": to, "first_row": rows.start, "rows": rows.len()}),
        ),
        Work::Wait { source } => (
            "wait",
            format!("wait for {source}"),
            json!({"source": source}),
        ),
        Work::Tile { source, m, n } => (
            "tile",
            format!("tile {m}, {n}"),
            json!({"source": source, "m": m, "n": n}),
        ),
        Work::Call { rank } => (
            "call",
            format!("caller's work, rank {rank}"),
            json!({"rank": rank}),
        ),
        Work::Add { rows } => (
            "add",
            "add".to_string(),
            json!({"first_row": rows.start, "rows": rows.len()}),
        ),
    }
}

/// The number of a lane in its process.
fn thread_of(lane: Lane) -> usize {
    match lane {
        Lane::Copy => 0,
        Lane::Network => 1,
        Lane::Caller(index) => index.saturating_add(2),
        Lane::Worker(index) => index.saturating_add(4),
    }
}

/// Writes a file, unless it is larger than this process may write.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    // Devices and pipes have no size.
    let is_file = std::fs::metadata(path).map_or(true, |metadata| metadata.is_file());
    let allowed = if is_file {
        require_file_size(bytes.len() as u64)
    } else {
        Ok(())
    };
    allowed
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(Error::system(None, format!("write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_began_at_zero_is_put_behind_what_there_is_and_what_came_later_stays() {
        let trace = |begin| {
            let work = Work::Wait { source: 1 };
            let (lane, end) = (Lane::Copy, begin + 10);
            Trace::new(
                0,
                vec![Span {
                    lane,
                    work,
                    begin,
                    end,
                }],
            )
        };
        let mut all = trace(0);
        all.extend(trace(0));
        all.extend(trace(50));
        let begins: Vec<u64> = all.spans.iter().map(|span| span.begin).collect();
        assert_eq!(begins, [0, 10, 50]);
        assert_eq!(all.spans[1].end, 20);
    }

    #[test]
    fn the_chrome_trace_holds_every_span_with_its_rank_lane_and_time() {
        let span = |lane, work, begin| Span {
            lane,
            work,
            begin,
            end: begin + 1500,
        };
        let pull = Work::Pull {
            source: 1,
            rows: 8..16,
        };
        let tile = Work::Tile {
            source: 1,
            m: 1,
            n: 2,
        };
        let timeline = Timeline {
            traces: vec![Trace::new(
                0,
                vec![
                    span(Lane::Worker(0), tile, 3000),
                    span(Lane::Copy, pull, 1000),
                ],
            )],
        };
        let events = timeline.chrome()["traceEvents"].as_array().unwrap().clone();
        let spans: Vec<_> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(spans.len(), 2);
        assert_eq!(spans[0]["name"], "pull from 1");
        assert_eq!(spans[0]["ts"], 0.0);
        assert_eq!(spans[0]["dur"], 1.5);
        assert_eq!(spans[1]["ts"], 2.0);
        assert_eq!(spans[1]["tid"], 4);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! Parses the trace of another rank and converts it for Chrome.
    use super::*;

    /// Parses a trace and converts it for Chrome.
    pub fn parse(data: &[u8]) {
        if let Ok(trace) = Trace::parse(0, data) {
            let timeline = Timeline {
                traces: vec![trace],
            };
            let _ = timeline.chrome();
        }
    }

    /// A trace with work and lanes of every kind.
    pub fn seeds() -> Vec<Vec<u8>> {
        let pull = Work::Pull {
            source: 1,
            rows: 8..16,
        };
        let tile = Work::Tile {
            source: 1,
            m: 1,
            n: 2,
        };
        let push = Work::Push { to: 0, rows: 0..8 };
        let add = Work::Add { rows: 0..8 };
        let call = Work::Call { rank: 1 };
        let works = [pull, push, Work::Wait { source: 1 }, tile, add, call];
        let lanes = [
            Lane::Copy,
            Lane::Caller(1),
            Lane::Worker(0),
            Lane::Worker(usize::MAX),
        ];
        let spans = works.into_iter().zip(lanes.into_iter().cycle()).zip(1000..);
        let spans = spans.map(|((work, lane), begin)| Span {
            lane,
            work,
            begin,
            end: begin + 1500,
        });
        let trace = Trace::new(1, spans.collect());
        vec![json::of_spans(&trace.spans).unwrap_or_default()]
    }
}
