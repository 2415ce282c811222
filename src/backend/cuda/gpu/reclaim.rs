//! Deferred frees of objects that were dropped while the device may still use them.
//!
//! An operation returns before the device has done it. So a matrix, a product's tables or a whole group may be dropped
//! while they are in use. The drop does not wait for operations. It keeps the object until everything that was put on
//! the group's streams before has ended. If this is so already, the object is freed at once. Otherwise a thread frees
//! it. The thread lives as long as something is kept, if need be longer than the group.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::streams::Streams;
use crate::backend::cuda::driver::{Device, Event, Stream, is_fork};
use crate::error::Result;

/// Idle streams pass a mark within this time.
const MOMENT: Duration = Duration::from_micros(50);
/// The first pause of the thread, and the longest: each is twice the one before.
const PAUSES: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(20)];

/// A position on each of several streams.
#[derive(Debug)]
pub struct Mark {
    device: Arc<Device>,
    /// Empty if the driver failed to record the mark. Then no one knows when it is passed.
    events: Vec<Event>,
}

impl Mark {
    fn new(device: &Arc<Device>, streams: usize) -> Result<Mark> {
        let events = (0..streams).map(|_| Event::new(device, false));
        Ok(Mark {
            device: device.clone(),
            events: events.collect::<Result<_>>()?,
        })
    }

    fn lost(device: &Arc<Device>) -> Mark {
        Mark {
            device: device.clone(),
            events: Vec::new(),
        }
    }

    fn is_lost(&self) -> bool {
        self.events.is_empty()
    }

    fn record(&self, streams: &[&Stream]) -> Result<()> {
        let mut places = self.events.iter().zip(streams);
        places.try_for_each(|(event, stream)| event.record(stream))
    }

    /// Whether the device has done everything before the mark, or has ended. False if the driver can't be asked.
    pub fn is_passed(&self) -> bool {
        if self.is_lost() {
            self.device.has_ended()
        } else {
            self.events.iter().all(Event::is_over)
        }
    }

    /// Whether the main stream has passed the mark. Then the operation is complete, unless it has failed.
    pub fn main_is_passed(&self) -> Result<bool> {
        match self.events.first() {
            Some(event) => event.is_done(),
            None => self.device.require_alive().map(|()| false),
        }
    }
}

/// Keeps dropped objects while streams may still use them.
#[derive(Debug)]
pub struct Reclaimer {
    device: Arc<Device>,
    pub streams: Streams,
    kept: Arc<KeptObjects>,
}

#[derive(Debug, Default)]
struct KeptObjects(Mutex<KeptState>);

#[derive(Default)]
struct KeptState {
    /// The marks after operations. The latest operation's is last.
    marks: Vec<Arc<Mark>>,
    entries: Vec<KeptEntry>,
    /// Whether the thread lives.
    watched: bool,
}

struct KeptEntry {
    after: Arc<Mark>,
    what: Box<dyn Send>,
}

impl std::fmt::Debug for KeptState {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} kept", self.entries.len())
    }
}

impl Drop for KeptState {
    fn drop(&mut self) {
        // No thread could be started, and the group has ended. Objects that may still be in use are never freed.
        for entry in self.entries.drain(..) {
            if !entry.after.is_passed() {
                std::mem::forget(entry.what);
            }
        }
    }
}

impl Reclaimer {
    pub fn new(device: &Arc<Device>) -> Result<Arc<Reclaimer>> {
        Ok(Arc::new(Reclaimer {
            device: device.clone(),
            streams: Streams::new(device)?,
            kept: Arc::default(),
        }))
    }

    /// Records a mark on the streams, after an operation has been put on them.
    pub fn mark(&self) -> Result<()> {
        // Held, so that the main stream is not replaced in between.
        let main = self.streams.lock_main();
        let KeptState { marks, .. } = &mut *self.kept.lock();
        // The new mark stands after all lost ones, which are needed no longer.
        marks.retain(|mark| !mark.is_lost());
        // A mark that somebody holds must not be recorded again. Table slots hold the marks after which they are free,
        // and the oldest marks come free first.
        let is_unheld = |mark: &Arc<Mark>| Arc::strong_count(mark) == 1;
        let oldest = |marks: &mut Vec<Arc<Mark>>| {
            let unheld = marks.iter().position(is_unheld)?;
            Some(marks.remove(unheld))
        };
        let latest = marks.pop_if(|mark| is_unheld(mark));
        let place = |unheld: Option<Arc<Mark>>| -> Result<Arc<Mark>> {
            let mark = match unheld {
                Some(unheld) => unheld,
                None => Arc::new(Mark::new(&self.device, 2)?),
            };
            mark.record(&[&main, &self.streams.copies])?;
            Ok(mark)
        };
        let placed = place(latest.or_else(|| oldest(marks)));
        // If no mark could be recorded, no one may think that the operation has ended.
        let (mark, result) = match placed {
            Ok(mark) => (mark, Ok(())),
            Err(error) => (Arc::new(Mark::lost(&self.device)), Err(error)),
        };
        marks.push(mark);
        result
    }

    /// The mark of the latest operation, if anything was put on the device yet.
    pub fn latest(&self) -> Option<Arc<Mark>> {
        self.kept.lock().marks.last().cloned()
    }

    /// A mark after all work that is on the streams now, including the caller's kernels and replays of graphs.
    ///
    /// While the main stream is being captured, its new work does not run. Then this is the latest operation's mark, if
    /// there is one.
    fn mark_of_all(&self) -> Result<Option<Arc<Mark>>> {
        let main = self.streams.main();
        if main.is_capturing()? {
            return Ok(self.latest());
        }
        // During a call, the callbacks' streams may be ahead of the main stream.
        let Streams {
            copies,
            deferred_copies,
            lanes,
            callers,
            ..
        } = &self.streams;
        let mut streams = vec![&*main, copies, deferred_copies];
        streams.extend(lanes.iter().chain(callers));
        let mark = Mark::new(&self.device, streams.len())?;
        mark.record(&streams)?;
        Ok(Some(Arc::new(mark)))
    }

    /// Drops `what` when the device has done all work that is on the streams now. Never drops it if no one can say
    /// when.
    pub fn retire(&self, what: impl Send + 'static) {
        let after = match self.mark_of_all() {
            Ok(Some(mark)) => mark,
            Ok(None) => return,
            Err(_) if self.device.has_ended() => return,
            Err(_) => return std::mem::forget(what),
        };
        // If no operation is under way, this mark is passed in a moment, and the object is freed on return.
        let is_idle = self.latest().is_none_or(|mark| mark.is_passed());
        let begin = Instant::now();
        while is_idle && !after.is_passed() && begin.elapsed() < MOMENT {
            std::hint::spin_loop();
        }
        if after.is_passed() {
            return;
        }
        let what = Box::new(what);
        let mut state = self.kept.lock();
        state.entries.push(KeptEntry { after, what });
        if !state.watched {
            let kept = self.kept.clone();
            let thread = std::thread::Builder::new().name("gemmesh-reclaim".into());
            // Without a thread, the object is freed by the next allocation or when the group ends.
            state.watched = thread.spawn(move || kept.watch()).is_ok();
        }
    }

    /// Frees what can be freed.
    pub fn settle(&self) {
        self.kept.settle();
    }

    /// Waits until all is freed, or `longest` has passed.
    pub fn drain(&self, longest: Duration) {
        let begin = Instant::now();
        while self.kept.settle() > 0 && begin.elapsed() < longest {
            std::thread::sleep(PAUSES[0]);
        }
    }
}

impl KeptObjects {
    fn lock(&self) -> MutexGuard<'_, KeptState> {
        // Each change leaves the lists whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what can be freed. Returns how many objects are left.
    fn settle(&self) -> usize {
        let mut state = self.lock();
        let (free, left) = std::mem::take(&mut state.entries)
            .into_iter()
            .partition(|entry: &KeptEntry| entry.after.is_passed());
        state.entries = left;
        let left = state.entries.len();
        drop(state);
        for KeptEntry { what, .. } in free {
            drop(what);
        }
        left
    }

    /// The loop of the thread.
    fn watch(&self) {
        let mut pause = PAUSES[0];
        loop {
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES[1]);
            if self.settle() > 0 {
                continue;
            }
            let mut state = self.lock();
            if state.entries.is_empty() {
                state.watched = false;
                return;
            }
        }
    }
}

/// An object that the device may use.
///
/// After this value is dropped, the object lives until the device has done all work that is on the streams then.
#[derive(Debug)]
pub struct Deferred<T: Send + 'static> {
    what: ManuallyDrop<T>,
    reclaimer: Arc<Reclaimer>,
    abandoned: bool,
}

impl<T: Send + 'static> Deferred<T> {
    pub fn new(what: T, reclaimer: &Arc<Reclaimer>) -> Deferred<T> {
        Deferred {
            what: ManuallyDrop::new(what),
            reclaimer: reclaimer.clone(),
            abandoned: false,
        }
    }

    /// Makes the object live forever.
    pub fn abandon(&mut self) {
        self.abandoned = true;
    }
}

impl<T: Send + 'static> Deref for Deferred<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.what
    }
}

impl<T: Send + 'static> DerefMut for Deferred<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.what
    }
}

impl<T: Send + 'static> Drop for Deferred<T> {
    fn drop(&mut self) {
        if self.abandoned || is_fork() {
            return;
        }
        // SAFETY: taken once, and not used after this.
        let what = unsafe { ManuallyDrop::take(&mut self.what) };
        self.reclaimer.retire(what);
    }
}
