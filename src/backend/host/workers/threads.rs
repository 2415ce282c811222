//! A replacement of rayon's pool under miri.
//!
//! Rayon uses crossbeam-epoch, which stacked borrows do not accept.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Like rayon's, as far as this crate uses it.
pub struct ThreadPoolBuilder(usize);

/// Like rayon's, but dropping it waits for the threads.
pub struct ThreadPool {
    count: usize,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Which thread it is.
pub struct ThreadContext(usize);

impl ThreadContext {
    pub fn index(&self) -> usize {
        self.0
    }
}

impl ThreadPoolBuilder {
    pub fn new() -> Self {
        ThreadPoolBuilder(1)
    }

    pub fn num_threads(self, count: usize) -> Self {
        ThreadPoolBuilder(count)
    }

    pub fn thread_name(self, _: impl Fn(usize) -> String) -> Self {
        self
    }

    pub fn build(self) -> Result<ThreadPool, Infallible> {
        Ok(ThreadPool {
            count: self.0,
            threads: Mutex::default(),
        })
    }
}

impl ThreadPool {
    pub fn current_num_threads(&self) -> usize {
        self.count
    }

    pub fn spawn_broadcast(&self, f: impl Fn(ThreadContext) + Send + Sync + 'static) {
        let f = Arc::new(f);
        let threads = (0..self.count).map(|index| {
            let f = f.clone();
            std::thread::spawn(move || f(ThreadContext(index)))
        });
        let mut all = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        all.extend(threads);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let threads = self
            .threads
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        for thread in threads.drain(..) {
            // Its panics are caught where it runs.
            let _ = thread.join();
        }
    }
}
