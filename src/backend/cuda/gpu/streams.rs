//! The streams that operations are put on, and the events by which these wait for one another.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::cuda::driver::{Device, Event, Priority, Stream};
use crate::error::Result;

/// The streams of a group's operations.
#[derive(Debug)]
pub struct Streams {
    /// Where operations are put; the caller may replace it.
    main: Mutex<Arc<Stream>>,
    pub copies: Stream,
    /// For what tiles need late: it may come beside what they need first.
    pub deferred_copies: Stream,
    /// For what callers do with rows that come, by turns: the end of one kernel beside the beginning of the next.
    pub callers: [Stream; 2],
    /// The main stream has come to an operation's copies.
    pub begun: Event,
    /// The copies of an operation have begun.
    pub forked: Event,
    /// Those that are needed late are done.
    pub joined: Event,
    /// The copies of a gather are done.
    pub gathered: Event,
    /// A stream of the caller's functions has made a block.
    pub produced: Event,
    /// Stream 0 has reached the first callback's work.
    pub turn: Event,
    /// A stream has done all of the callbacks' work.
    pub called: Event,
    /// Recorded on the old stream by [`Streams::set_main`].
    handed_over: Event,
    /// Held by all who want the main stream to stay what it is.
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
            callers: [stream(Priority::Kernels)?, stream(Priority::Kernels)?],
            begun: event()?,
            forked: event()?,
            joined: event()?,
            gathered: event()?,
            produced: event()?,
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

    /// Puts later operations on `stream`. Not while another thread has put a part of an operation on the stream before.
    ///
    /// # Safety
    /// It is a stream of the device's primary context, and lives until another takes over or the group has ended.
    pub unsafe fn set_main(&self, stream: Stream) -> Result<()> {
        let mut main = self.lock_main();
        stream.wait_for(&main, &self.handed_over)?;
        *main = Arc::new(stream);
        Ok(())
    }

    /// As long as it is held, no other stream should take over from the main stream.
    pub fn guard(&self) -> Arc<()> {
        self.guard.clone()
    }

    /// How many hold that.
    pub fn guards(&self) -> usize {
        Arc::strong_count(&self.guard) - 1
    }
}
