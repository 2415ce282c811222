//! Waits for work on the device, each with a deadline.

use std::time::{Duration, Instant};

use crate::backend::cuda::driver::{Event, Stream};
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::shared::Shared;
use crate::backend::cuda::shared::monitor::Monitor;
use crate::error::{Deadline, Kind, Result};
use crate::ranks::members::Members;

/// How much longer than the deadline the operations of a group that ends may last.
const GRACE: Duration = Duration::from_secs(2);
/// How long the lanes may take to close.
const CLOSED: Duration = Duration::from_secs(2);

/// Waits until the operations on the main stream are done.
///
/// The monitor ends an operation that is stuck. The wait for the caller's own work in front of the operations ends with
/// [`Kind::Timeout`] if nothing moves for longer than the timeout, and no rank is late.
pub fn for_operations(gpu: &Gpu, shared: &Shared, members: &Members) -> Result<()> {
    if let Some(mark) = gpu.reclaimer.latest() {
        poll(shared, members, || mark.main_is_passed())?;
    }
    report(shared, members)
}

/// Waits until everything on `stream` is done.
pub fn until_idle(shared: &Shared, members: &Members, stream: &Stream) -> Result<()> {
    poll(shared, members, || stream.is_idle())?;
    report(shared, members)
}

fn report(shared: &Shared, members: &Members) -> Result<()> {
    shared.monitor.look();
    members.fault().map_or(Ok(()), Err)
}

/// Waits until everything that is on the main stream now is done: operations, and then the caller's own work.
///
/// Operations have their deadline. Work of the caller's own has none, because only the caller knows how long it may
/// take, and no rank is late meanwhile. This adds no hang:
/// - Graphs, and operations that other threads put on the stream meanwhile, may wait for other ranks. If such a wait
///   takes too long or its rank has gone, the monitor fails the group and lets the wait run through.
/// - A failure of the group ends this wait, whoever reports it, and so does an error of the device.
/// - Then only a kernel of the caller's own that never ends is left. cuStreamSynchronize would wait for it, too.
pub fn for_all_work(gpu: &Gpu, shared: &Shared, members: &Members) -> Result<()> {
    for_operations(gpu, shared, members)?;
    let main = gpu.main();
    if main.is_idle().map_err(|e| members.fail(e))? {
        return report(shared, members);
    }
    // Not the stream itself, because other threads may put work there for ever.
    let mark = Event::new(&gpu.device, false)?;
    mark.record(&main)?;
    let check = || report(shared, members);
    poll_while(members, || mark.is_done(), check)?;
    check()
}

/// Polls until `is_done`. Fails if nothing moves on the device for longer than the timeout, although all ranks have
/// begun what runs there.
pub fn poll(shared: &Shared, members: &Members, is_done: impl Fn() -> Result<bool>) -> Result<()> {
    let mut progress = Progress::of(&shared.monitor);
    poll_while(members, is_done, || {
        if shared.monitor.awaits_a_rank() {
            progress = Progress::of(&shared.monitor);
        }
        let waited = progress.still_for(&shared.monitor);
        if waited <= members.deadlines.call() + GRACE {
            return Ok(());
        }
        // The group goes on, and this rank may wait again.
        Err(Kind::Timeout {
            waiting: members.rank,
            what: "the work that its own program has put on the stream before".into(),
            waited_ms: waited.as_millis() as u64,
            deadline: Deadline::Call,
        }
        .on(members.rank))
    })
}

/// Polls until `is_done`, or until `check` fails.
fn poll_while(
    members: &Members,
    is_done: impl Fn() -> Result<bool>,
    mut check: impl FnMut() -> Result<()>,
) -> Result<()> {
    const SPINS: u32 = 1000;
    const NAP: Duration = Duration::from_micros(50);
    let mut turn = 0;
    while !is_done().map_err(|e| members.fail(e))? {
        if turn < SPINS {
            turn += 1;
        } else {
            std::thread::sleep(NAP);
        }
        check()?;
    }
    Ok(())
}

/// Waits until the operations have ended, because the group ends.
///
/// They end by themselves, or the monitor ends them, unless the caller's own work in front of them does not end. From
/// now on a rank that has not come is waited for no longer than a rank that has, so that dropping a group always ends.
pub fn for_the_end(gpu: &Gpu, shared: &mut Shared, members: &Members, has_graphs: bool) {
    shared.monitor.hurry();
    let longest = members.deadlines.call() + GRACE;
    if has_graphs && !gpu.main().is_capturing().unwrap_or(true) {
        // No mark follows replays yet. If marking fails, the device has failed.
        let _ = gpu.reclaimer.mark();
    }
    let at_rest = || gpu.reclaimer.latest().is_none_or(|mark| mark.is_passed());
    let mut progress = Progress::of(&shared.monitor);
    while !at_rest() && progress.still_for(&shared.monitor) < longest {
        std::thread::sleep(Duration::from_micros(200));
    }
    if !at_rest() {
        // Operations that have not begun yet then run through without waiting.
        shared.monitor.release();
        if let Some(lanes) = &shared.lanes {
            lanes.abort(|| shared.monitor.release_again());
        }
    }
    let (arrived, reports) = shared.monitor.stop();
    if let Some(lanes) = &shared.lanes {
        if members.fault().is_none() && at_rest() {
            lanes.close(members.rank, CLOSED)
        } else {
            lanes.abort(|| ())
        }
    }
    if arrived {
        gpu.reclaimer.retire(reports);
    } else {
        std::mem::forget(reports);
        shared.control.abandon();
    }
    gpu.reclaimer.drain(Duration::from_millis(200));
}

/// The last progress that the monitor has seen, and since when.
struct Progress {
    seen: (u32, u32),
    since: Instant,
}

impl Progress {
    fn of(monitor: &Monitor) -> Progress {
        Progress {
            seen: monitor.progress(),
            since: Instant::now(),
        }
    }

    /// How long nothing has moved.
    fn still_for(&mut self, monitor: &Monitor) -> Duration {
        let now = monitor.progress();
        if now != self.seen {
            *self = Progress::of(monitor);
        }
        self.since.elapsed()
    }
}
