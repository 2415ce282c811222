//! Deferred frees: what has been dropped while the device may still use it.
//!
//! An operation returns before the device has done it, so a matrix, a product's tables or a whole group may be dropped
//! while they are in use. Whoever drops them waits for nothing: they are kept until everything that was put on the device
//! before has ended, and then freed, at once where that is so already, else by a thread that lives as long as something is
//! kept. It outlives the group if need be.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::driver::{Device, Event, Stream};
use crate::error::Result;

/// How often it is looked whether something can be freed: at first, and in the end.
const PAUSES: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(20)];

/// Where the streams of a group stood after an operation was put on them.
#[derive(Debug)]
pub struct Mark {
    main: Event,
    copies: Event,
}

impl Mark {
    /// Whether the device has done everything before it. A device that has failed does nothing any more.
    pub fn is_passed(&self) -> bool {
        self.main_is_passed().unwrap_or(true) && self.copies.is_done().unwrap_or(true)
    }

    /// The same for the main stream alone: the operation is complete, unless it has failed.
    pub fn main_is_passed(&self) -> Result<bool> {
        self.main.is_done()
    }
}

/// What one group has dropped.
#[derive(Debug)]
pub struct Reclaimer {
    device: Arc<Device>,
    kept: Arc<Kept>,
}

#[derive(Debug, Default)]
struct Kept(Mutex<State>);

#[derive(Default)]
struct State {
    latest: Option<Arc<Mark>>,
    entries: Vec<Entry>,
    /// Whether the thread lives.
    watched: bool,
}

struct Entry {
    after: Arc<Mark>,
    what: Box<dyn Send>,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} kept", self.entries.len())
    }
}

impl Reclaimer {
    pub fn new(device: &Arc<Device>) -> Arc<Reclaimer> {
        Arc::new(Reclaimer {
            device: device.clone(),
            kept: Arc::default(),
        })
    }

    /// Notes where the streams stand. What is dropped from now on is kept until they have come there.
    pub fn mark(&self, main: &Stream, copies: &Stream) -> Result<()> {
        let mut state = self.kept.lock();
        // A mark that somebody waits for stays where it is.
        let reused = state.latest.take().and_then(Arc::into_inner);
        let mark = match reused {
            Some(mark) => mark,
            None => Mark {
                main: Event::new(&self.device, false)?,
                copies: Event::new(&self.device, false)?,
            },
        };
        mark.main.record(main)?;
        mark.copies.record(copies)?;
        state.latest = Some(Arc::new(mark));
        Ok(())
    }

    /// The latest mark, if anything was put on the device yet.
    pub fn latest(&self) -> Option<Arc<Mark>> {
        self.kept.lock().latest.clone()
    }

    /// Drops `what` when the device has passed the latest mark.
    pub fn retire(&self, what: impl Send + 'static) {
        let mut state = self.kept.lock();
        let after = state.latest.clone().filter(|mark| !mark.is_passed());
        let Some(after) = after else {
            // It may be large, and nobody else need wait for it.
            drop(state);
            drop(what);
            return;
        };
        let what = Box::new(what);
        state.entries.push(Entry { after, what });
        if !state.watched {
            let kept = self.kept.clone();
            let thread = std::thread::Builder::new().name("gemmesh-reclaim".into());
            // Without a thread it is freed by the next allocation, or when the group ends.
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

impl Kept {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves the lists whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees what can be freed, and says how much is left.
    fn settle(&self) -> usize {
        let mut state = self.lock();
        let (free, left) = std::mem::take(&mut state.entries)
            .into_iter()
            .partition(|entry: &Entry| entry.after.is_passed());
        state.entries = left;
        let left = state.entries.len();
        drop(state);
        for Entry { what, .. } in free {
            drop(what);
        }
        left
    }

    /// The thread's life.
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

/// Something that the device may use until it has passed the mark that is the latest when this is dropped.
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

    /// Never drops it.
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
        if self.abandoned {
            return;
        }
        // SAFETY: taken once, and not used after this.
        let what = unsafe { ManuallyDrop::take(&mut self.what) };
        self.reclaimer.retire(what);
    }
}
