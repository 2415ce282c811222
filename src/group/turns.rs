//! Turns, by which threads of a rank act one after the other. Each thread has a deadline for its turn to come.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::process::Process;
use crate::schedule::Agreed;

/// How long a thread sleeps before it looks around again.
const PERIOD: Duration = Duration::from_millis(10);
/// More threads than this in line cost an allocation.
const EXPECTED: usize = 16;

/// A value that threads use by turns, in the order in which they come.
///
/// A turn lasts as long as an operation and the caller's functions that it calls. Such a function may wait for a thread
/// that waits for its turn. Then neither would go on. So unlike a mutex, a thread that waits for its turn checks from
/// time to time, and can give up.
pub struct Turns<T> {
    line: Mutex<Tickets>,
    moved: Condvar,
    /// Locked by the thread whose turn it is.
    value: Mutex<T>,
    /// The process whose threads take turns.
    process: Process,
}

struct Tickets {
    /// The ticket of the thread whose turn it is, then those of the threads that wait.
    tickets: VecDeque<u64>,
    next: u64,
    /// The operation of the thread whose turn it is, if the turn is for an operation of all ranks.
    operation: Option<Agreed>,
}

/// A thread's turn, which ends when this is dropped.
pub struct ThreadTurn<'a, T> {
    // Unlocked before the next thread's turn begins.
    value: MutexGuard<'a, T>,
    _place: FirstInLine<'a, T>,
}

/// The first place in the line.
struct FirstInLine<'a, T>(&'a Turns<T>);

impl<T> Turns<T> {
    pub fn new(value: T) -> Turns<T> {
        let line = Tickets {
            tickets: VecDeque::with_capacity(EXPECTED),
            next: 0,
            operation: None,
        };
        Turns {
            line: Mutex::new(line),
            moved: Condvar::new(),
            value: Mutex::new(value),
            process: Process::this(),
        }
    }

    /// Waits for this thread's turn, which is for `operation` or for something else.
    ///
    /// Now and then `look` is called with the time that this thread has waited, and the operation that it waits for. If
    /// `look` returns an error, the wait ends.
    pub fn take<E>(
        &self,
        operation: Option<&Agreed>,
        look: impl Fn(Duration, Option<&Agreed>) -> Result<(), E>,
    ) -> Result<ThreadTurn<'_, T>, E> {
        let begin = Instant::now();
        let mut line = lock(&self.line);
        let ticket = line.next;
        line.next += 1;
        line.tickets.push_back(ticket);
        while line.tickets.front() != Some(&ticket) {
            if let Err(error) = look(begin.elapsed(), line.operation.as_ref()) {
                line.tickets.retain(|&other| other != ticket);
                return Err(error);
            }
            let waited = self.moved.wait_timeout(line, PERIOD);
            (line, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        line.operation = operation.cloned();
        drop(line);
        Ok(ThreadTurn {
            value: lock(&self.value),
            _place: FirstInLine(self),
        })
    }
}

impl<T> Drop for FirstInLine<'_, T> {
    fn drop(&mut self) {
        // In a fork, a thread that the fork lacks may hold the lock. No other thread of the fork waits for a turn.
        if !self.0.process.is_this() {
            return;
        }
        let mut line = lock(&self.0.line);
        line.tickets.pop_front();
        line.operation = None;
        let is_awaited = !line.tickets.is_empty();
        drop(line);
        if is_awaited {
            self.0.moved.notify_all();
        }
    }
}

impl<T> Deref for ThreadTurn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ThreadTurn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while it was held has not left it half-changed, because each change is one assignment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    fn patient(_: Duration, _: Option<&Agreed>) -> Result<(), ()> {
        Ok(())
    }

    #[test]
    fn threads_have_their_turns_in_the_order_in_which_they_come() {
        let turns = Turns::new(Vec::new());
        let in_line = || lock(&turns.line).tickets.len();
        std::thread::scope(|scope| {
            let first = turns.take(None, patient).unwrap();
            for thread in 0..4 {
                let turns = &turns;
                scope.spawn(move || turns.take(None, patient).unwrap().push(thread));
                while in_line() < 2 + thread {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(*turns.take(None, patient).unwrap(), [0, 1, 2, 3]);
    }

    #[test]
    fn a_thread_that_gives_up_leaves_the_line_and_knows_what_it_waited_for() {
        let turns = Turns::new(0);
        let gather = Agreed::new::<&str>("gather", []);
        let first = turns.take(Some(&gather), patient);
        let look = |waited: Duration, operation: Option<&Agreed>| {
            assert_eq!(operation, Some(&gather));
            if waited < PERIOD { Ok(()) } else { Err("late") }
        };
        assert_eq!(turns.take(None, look).err(), Some("late"));
        drop(first);
        assert_eq!(turns.take(None, look).map(|turn| *turn), Ok(0));
    }

    #[test]
    fn in_a_fork_a_turn_ends_without_a_lock_that_another_thread_may_have_held() {
        let mut turns = Turns::new(0);
        turns.process = Process::another();
        let both = std::sync::Barrier::new(2);
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let (turns, both) = (&turns, &both);
            scope.spawn(move || {
                let turn = turns.take(None, patient).unwrap();
                both.wait();
                both.wait();
                drop(turn);
                ended.send(()).unwrap();
            });
            both.wait();
            let line = lock(&turns.line);
            both.wait();
            let ended = end.recv_timeout(Duration::from_secs(10));
            drop(line);
            assert_eq!(ended, Ok(()));
        });
    }

    #[test]
    fn a_panic_ends_a_turn() {
        let turns = Turns::new(0);
        let panic = catch_unwind(AssertUnwindSafe(|| {
            *turns.take(None, patient).unwrap() += 1;
            let _turn = turns.take(None, patient);
            resume_unwind(Box::new("planted"));
        }));
        panic.unwrap_err();
        assert_eq!(turns.take(None, patient).map(|turn| *turn), Ok(1));
    }
}
