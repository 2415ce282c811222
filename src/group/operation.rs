//! What keeps an operation apart from other calls of its group: turns, functions of the caller's, captures.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::Duration;

use super::turns::{ThreadTurn, Turns};
use super::{Group, GroupState};
use crate::backend::Backend;
use crate::error::{Kind, Result};
use crate::protocol::epoch::Epoch;
use crate::ranks::call::PostedCall;
use crate::schedule::{Agreed, Operation};

thread_local! {
    /// The groups in whose operations this thread runs a function of the caller's.
    static CALLBACKS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

const CALL_IN_CALLBACK: &str = "a function that was given to a call of a group makes another call of the same group; \
                                return from it first";

impl<B: Backend> Group<B> {
    /// Begins a collective operation. No other begins on this rank before `run` returns.
    pub(crate) fn operate<R>(
        &self,
        call: PostedCall<'_>,
        run: impl FnOnce(Epoch) -> Result<R>,
    ) -> Result<R> {
        self.check()?;
        // Before the operation gets its number, so that a refusal on one rank leaves all ranks in step.
        self.refuse_recording()
            .inspect_err(|error| self.inner.members.refuse(error))?;
        let state = self.state(Some(call.agreed));
        let mut state = state.inspect_err(|error| self.inner.members.refuse(error))?;
        let epoch = state.epoch;
        self.inner.members.post(epoch, call)?;
        // What follows in the same call of the program is counted with it.
        if !Operation::ends_another(call.agreed.name()) {
            self.inner.members.note_made();
        }
        state.epoch = epoch.next();
        run(epoch).map_err(|error| self.inner.members.named(error))
    }

    /// Runs something that has no number of its own but must not overlap with operations. `run` gets the epoch of the
    /// last operation.
    pub(crate) fn exclusively<R>(&self, run: impl FnOnce(Epoch) -> Result<R>) -> Result<R> {
        self.check()?;
        let state = self.state(None);
        self.noted(state.and_then(|state| run(state.epoch.previous())))
    }

    /// True while operations are only captured, to run later.
    pub(crate) fn is_recording(&self) -> Result<bool> {
        self.refuse_misplaced()?;
        let members = &self.inner.members;
        let is_recording = self.inner.backend.is_recording(members);
        is_recording.map_err(|error| members.named(error))
    }

    pub(super) fn refuse_recording(&self) -> Result<()> {
        if self.is_recording()? {
            let rank = self.rank();
            return Err(self.inner.members.named(Kind::Capturing.on(rank)));
        }
        Ok(())
    }

    /// Waits for this thread's turn, which is for `operation` or for something else.
    pub(super) fn state(
        &self,
        operation: Option<&Agreed>,
    ) -> Result<ThreadTurn<'_, GroupState<B>>> {
        self.turn(&self.inner.state, operation)
    }

    /// Waits for the turn of this thread to set the group's stream and to make a call there. Fails in a function that an
    /// operation has called: its own operation may have the turn.
    pub(crate) fn stream_turn(&self) -> Result<ThreadTurn<'_, ()>> {
        self.refuse_misplaced()?;
        self.turn(&self.inner.stream_turns, None)
    }

    fn turn<'a, T>(
        &'a self,
        turns: &'a Turns<T>,
        operation: Option<&Agreed>,
    ) -> Result<ThreadTurn<'a, T>> {
        let members = &self.inner.members;
        let (rank, longest) = (members.rank, members.deadlines.call());
        // How long this thread had waited when a rank was last seen not to have come to the other thread's operation.
        let until_all_came = Cell::new(Duration::ZERO);
        turns.take(operation, |waited, other| {
            members.check()?;
            if members.awaits_a_rank() {
                until_all_came.set(waited);
            }
            if waited - until_all_came.get() < longest {
                return Ok(());
            }
            Err(members.named(
                Kind::Busy {
                    call: other.map_or("call", Agreed::name).into(),
                    waited_ms: waited.as_millis() as u64,
                }
                .on(rank),
            ))
        })
    }

    /// Calls a function of the caller's within an operation. Calls of this group that the function makes are refused,
    /// because they would wait for the operation.
    pub(crate) fn in_callback<R>(&self, f: impl FnOnce() -> R) -> R {
        let this = Arc::as_ptr(&self.inner).addr();
        CALLBACKS.with_borrow_mut(|groups| groups.push(this));
        let result = f();
        CALLBACKS.with_borrow_mut(|groups| groups.pop());
        result
    }

    /// True if this thread runs a function of the caller's that an operation of this group has called.
    pub(crate) fn is_in_callback(&self) -> bool {
        let this = Arc::as_ptr(&self.inner).addr();
        CALLBACKS.with_borrow(|groups| groups.contains(&this))
    }

    /// Fails in a fork of this rank's process, and in a function that an operation has called.
    pub(crate) fn refuse_misplaced(&self) -> Result<()> {
        let members = &self.inner.members;
        members.refuse_fork()?;
        if self.is_in_callback() {
            let error = members.named(
                Kind::Misuse {
                    what: CALL_IN_CALLBACK.into(),
                }
                .on(self.rank()),
            );
            members.note_given(&error);
            Err(error)
        } else {
            Ok(())
        }
    }
}
