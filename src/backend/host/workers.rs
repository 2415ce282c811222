//! The threads of a rank: those that move rows, and rayon workers that multiply.
//!
//! They live as long as the group and wait for the next operation, so that an operation starts no thread and allocates
//! nothing, apart from messages to other hosts.

use std::any::Any;
use std::error::Error as _;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

#[cfg(not(miri))]
use rayon::{ThreadPool, ThreadPoolBuilder};
#[cfg(miri)]
use threads::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};
use crate::process::Process;

#[cfg(miri)]
mod threads;

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Copier,
    /// Sends to other hosts.
    Sender,
    /// Receives from other hosts.
    Receiver,
    Worker(usize),
}

type Job<'a> = dyn Fn(Role) + Sync + 'a;

/// The threads. Dropping it ends them.
pub struct Workers {
    /// The threads' process. A fork of it has none of them.
    process: Process,
    /// Held while a job runs, because there is one slot.
    turn: Mutex<()>,
    movers: Movers,
    /// Its threads run [`work`] until they end.
    pool: ThreadPool,
}

/// The job that all threads do at the moment.
#[derive(Default)]
struct JobSlot {
    state: Mutex<WorkersState>,
    /// There is a new job, or none will come.
    posted: Condvar,
    /// The last thread has finished the job.
    finished: Condvar,
}

#[derive(Default)]
struct WorkersState {
    /// Counts jobs, so that each thread takes each job once.
    number: u64,
    job: Option<WorkersShared>,
    /// Threads that have not finished the job.
    busy: usize,
    panic: Option<Box<dyn Any + Send>>,
    closed: bool,
}

/// A job, borrowed from the caller of [`Workers::run`] until that returns.
#[derive(Clone, Copy)]
struct WorkersShared(*const Job<'static>);

// SAFETY: the job is Sync, and [`Workers::run`] keeps it alive as long as a thread may use it.
unsafe impl Send for WorkersShared {}

impl Workers {
    /// Starts the threads: as many `workers`, one that copies and, with a transport, one that sends and one that receives.
    pub fn start(rank: usize, workers: usize, has_transport: bool) -> Result<Workers> {
        let slot = Arc::new(JobSlot::default());
        let mut movers = Movers {
            slot: slot.clone(),
            threads: Vec::new(),
        };
        movers.start(format!("gemmesh-copy-{rank}"), Role::Copier, rank)?;
        if has_transport {
            movers.start(format!("gemmesh-send-{rank}"), Role::Sender, rank)?;
            movers.start(format!("gemmesh-recv-{rank}"), Role::Receiver, rank)?;
        }
        let pool = ThreadPoolBuilder::new()
            .num_threads(workers)
            .thread_name(move |index| format!("gemmesh-work-{rank}-{index}"))
            .build()
            .map_err(|error| {
                let refused = error.source().and_then(|source| source.downcast_ref());
                // Rayon's own words, if the system is not what refuses.
                let refused = refused.and_then(io::Error::raw_os_error);
                let refused = match refused {
                    Some(number) => io::Error::from_raw_os_error(number),
                    None => io::Error::other(error),
                };
                Error::not_started(rank, format!("{workers} workers"))(refused)
            });
        let workers = Workers {
            process: Process::this(),
            turn: Mutex::new(()),
            movers,
            pool: pool?,
        };
        workers
            .pool
            .spawn_broadcast(move |context| work(&slot, Role::Worker(context.index())));
        Ok(workers)
    }

    /// Calls `job` once on each thread and `beside` on the caller's thread. Returns when all calls have returned.
    ///
    /// If `beside` forks, this returns in the child at once.
    pub fn run(&self, job: &Job, beside: impl FnOnce()) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.movers.slot.lock();
        // SAFETY: only the lifetime changes. The pointer is used by the threads between here and the end
        // of this function, which waits for all of them, also if they panic.
        state.job = Some(WorkersShared(unsafe {
            std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job)
        }));
        state.number += 1;
        state.busy = self.pool.current_num_threads() + self.movers.threads.len();
        self.movers.slot.posted.notify_all();
        drop(state);
        let beside = catch_unwind(AssertUnwindSafe(beside));
        if !self.process.is_this() {
            return beside.unwrap_or_else(|panic| resume_unwind(panic));
        }
        let mut state = self.movers.slot.lock();
        while state.busy > 0 {
            state = wait(&self.movers.slot.finished, state);
        }
        state.job = None;
        let panic = state.panic.take();
        drop(state);
        if let Some(panic) = panic.or(beside.err()) {
            resume_unwind(panic);
        }
    }
}

/// The threads that move rows. Dropping it ends them, and the workers too.
struct Movers {
    slot: Arc<JobSlot>,
    threads: Vec<JoinHandle<()>>,
}

impl Movers {
    fn start(&mut self, name: String, role: Role, rank: usize) -> Result<()> {
        let slot = self.slot.clone();
        let thread = std::thread::Builder::new().name(name);
        let thread = thread.spawn(move || work(&slot, role));
        self.threads
            .push(thread.map_err(Error::not_started(rank, "a thread"))?);
        Ok(())
    }
}

impl Drop for Movers {
    fn drop(&mut self) {
        self.slot.close();
        for thread in self.threads.drain(..) {
            // Its panics are caught and handed on in `run`.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Workers {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Workers")
            .field("workers", &self.pool.current_num_threads())
            .finish()
    }
}

impl JobSlot {
    fn lock(&self) -> MutexGuard<'_, WorkersState> {
        // No code that can panic runs while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        self.lock().closed = true;
        self.posted.notify_all();
    }
}

fn wait<'a>(
    condition: &Condvar,
    state: MutexGuard<'a, WorkersState>,
) -> MutexGuard<'a, WorkersState> {
    condition
        .wait(state)
        .unwrap_or_else(PoisonError::into_inner)
}

/// The loop of a thread.
fn work(slot: &JobSlot, role: Role) {
    let mut done = 0;
    let mut state = slot.lock();
    loop {
        if state.closed {
            return;
        }
        let Some(job) = state.job.filter(|_| state.number != done) else {
            state = wait(&slot.posted, state);
            continue;
        };
        done = state.number;
        drop(state);
        // SAFETY: `Workers::run` keeps the job alive until `busy` is 0, and this thread still counts.
        let result = catch_unwind(AssertUnwindSafe(|| (unsafe { &*job.0 })(role)));
        state = slot.lock();
        if let Err(panic) = result {
            state.panic.get_or_insert(panic);
        }
        state.busy -= 1;
        if state.busy == 0 {
            slot.finished.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_thread_does_every_job_once() {
        let workers = Workers::start(0, 3, true).unwrap();
        let counts: [AtomicUsize; 6] = Default::default();
        // Miri is slow.
        const JOBS: usize = if cfg!(miri) { 10 } else { 1000 };
        for _ in 0..JOBS {
            workers.run(
                &|role| {
                    let index = match role {
                        Role::Copier => 3,
                        Role::Sender => 4,
                        Role::Receiver => 5,
                        Role::Worker(index) => index,
                    };
                    counts[index].fetch_add(1, Ordering::Relaxed);
                },
                || (),
            );
        }
        assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == JOBS));
    }

    #[test]
    fn a_panic_reaches_the_caller_after_all_have_ended() {
        let workers = Workers::start(0, 2, false).unwrap();
        let ended = AtomicUsize::new(0);
        let result = catch_unwind(AssertUnwindSafe(|| {
            workers.run(
                &|role| {
                    if role == Role::Worker(1) {
                        panic!("planted");
                    }
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    ended.fetch_add(1, Ordering::Relaxed);
                },
                || (),
            );
        }));
        assert!(result.is_err());
        assert_eq!(ended.load(Ordering::Relaxed), 2);
        let each = |_| {
            ended.fetch_add(1, Ordering::Relaxed);
        };
        workers.run(&each, || ());
        assert_eq!(ended.load(Ordering::Relaxed), 5);
        let result = catch_unwind(AssertUnwindSafe(|| {
            workers.run(&each, || panic!("planted"))
        }));
        assert!(result.is_err());
        assert_eq!(ended.load(Ordering::Relaxed), 8);
    }
}
