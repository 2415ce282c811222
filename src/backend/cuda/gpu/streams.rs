//! The streams that operations are put on, and the events by which these wait for one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::cuda::driver::{Device, Event, Priority, Stream};
use crate::error::Result;

/// Messages over the network that are under way at once. While one begins or ends, the other keeps the network busy.
pub const LANES: usize = 2;

/// The streams of a group's operations.
#[derive(Debug)]
pub struct Streams {
    /// Where operations are put; the caller may replace it.
    main: Mutex<Arc<Stream>>,
    pub copies: Stream,
    /// For rows that tiles need late. They may arrive together with the rows that tiles need first.
    pub deferred_copies: Stream,
    /// For what goes over the network, a stream for each lane.
    pub lanes: [Stream; LANES],
    /// For the work of callbacks. They alternate, so that one kernel's end overlaps the next one's beginning.
    pub callers: [Stream; 2],
    /// The main stream has reached an operation's copies.
    pub begun: Event,
    /// The deferred copy stream may begin: the stream from which it forks has reached the fork.
    pub forked: Event,
    /// The deferred copies are done.
    pub joined: Event,
    /// An operation's copies are done.
    pub gathered: Event,
    /// A producer's stream has made a block.
    pub produced: Event,
    /// A kernel runs, and has given the copy stream its permit.
    pub permitted: Event,
    /// A lane has received a chunk that is passed on.
    pub received: Event,
    /// A lane has reached a message of which the other lane moves a half, or the other lane has moved that half.
    pub halved: Event,
    /// A lane has done its part of an operation.
    pub carried: Event,
    /// Stream 0 has reached the first callback's work.
    pub turn: Event,
    /// A stream has done all of the callbacks' work.
    pub called: Event,
    /// Recorded on the old stream by [`Streams::set_main`].
    handed_over: Event,
    /// Held by all who need the main stream to stay the same.
    guard: Arc<()>,
}

impl Streams {
    pub fn new(device: &Arc<Device>) -> Result<Streams> {
        let stream = |priority| Stream::new(device, priority);
        let event = || Event::new(device, false);
        Ok(Streams {
            main: Mutex::new(Arc::new(stream(Priority::Kernels)?)),
            copies: stream(Priority::Copies)?,
            deferred_copies: stream(Priority::Copies)?,
            lanes: [stream(Priority::Copies)?, stream(Priority::Copies)?],
            callers: [stream(Priority::Kernels)?, stream(Priority::Kernels)?],
            begun: event()?,
            forked: event()?,
            joined: event()?,
            gathered: event()?,
            produced: event()?,
            permitted: event()?,
            received: event()?,
            halved: event()?,
            carried: event()?,
            turn: event()?,
            called: event()?,
            handed_over: event()?,
            guard: Arc::new(()),
        })
    }

    /// The main stream at this moment.
    pub fn main(&self) -> Arc<Stream> {
        self.lock_main().clone()
    }

    pub fn lock_main(&self) -> MutexGuard<'_, Arc<Stream>> {
        // Each change is one assignment.
        self.main.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts later operations on `stream`. Not to be called while a thread is enqueueing an operation on the old stream.
    ///
    /// # Safety
    /// `stream` belongs to the device's primary context, and lives until a different stream replaces it or the group
    /// has ended.
    pub unsafe fn set_main(&self, stream: Stream) -> Result<()> {
        let mut main = self.lock_main();
        follow(&stream, &main, &self.handed_over)?;
        *main = Arc::new(stream);
        Ok(())
    }

    /// Makes later work on `stream` wait for the work that is on the main stream now.
    pub fn order(&self, stream: &Stream, event: &Event) -> Result<()> {
        follow(stream, &self.lock_main(), event)
    }

    /// A guard. While it is held, the main stream should not be replaced.
    pub fn guard(&self) -> Arc<()> {
        self.guard.clone()
    }

    /// How many guards are held.
    pub fn guards(&self) -> usize {
        Arc::strong_count(&self.guard) - 1
    }
}

/// Makes later work on `stream` wait for the work that is on `main` now.
///
/// Work that is not captured can't be waited for in a graph. Whoever launches the graph orders it after that work, as
/// the documentation of `Group::set_stream` says.
fn follow(stream: &Stream, main: &Stream, event: &Event) -> Result<()> {
    let begins_capture = stream.is_capturing()? && !main.is_capturing()?;
    if begins_capture {
        Ok(())
    } else {
        stream.wait_for(main, event)
    }
}
