//! Functions that a caller gives to operations.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::backend::Backend;
use crate::error::{Kind, Result};
use crate::group::{Group, in_words};
use crate::ranks::last_panic;

/// The result of a function that a caller gives to an operation. An error of any type ends the operation on every rank.
pub type CallbackResult = std::result::Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Calls the caller's functions within operation `call` of `group`.
pub struct Callbacks<'a, B: Backend> {
    group: &'a Group<B>,
    call: &'static str,
    panic: Option<Box<dyn Any + Send>>,
}

impl<'a, B: Backend> Callbacks<'a, B> {
    pub fn new(group: &'a Group<B>, call: &'static str) -> Self {
        Callbacks {
            group,
            call,
            panic: None,
        }
    }

    /// Calls `f`, unless the group has failed. If `f` returns an error or panics, the group fails.
    pub fn call(&mut self, f: impl FnOnce() -> CallbackResult) -> Result<()> {
        let members = &self.group.inner().members;
        members.fault().map_or(Ok(()), Err)?;
        let rank = members.rank;
        // Formatting and dropping the error may also run the caller's code.
        let f = || f().map_err(|error| in_words(&error));
        let called = self.group.in_callback(|| catch_unwind(AssertUnwindSafe(f)));
        // The function may have forked and also return in the child. The operation ends there.
        let forked = self.group.inner().members.refuse_fork();
        let error = match called {
            Ok(Ok(())) => return forked,
            Ok(Err(reason)) => Kind::ProgramFailed {
                function_of: Some(self.call.into()),
                reason,
            }
            .on(rank),
            Err(payload) => {
                let message = last_panic::message_of(&*payload);
                self.panic = Some(payload);
                Kind::RankPanicked { message }.on(rank)
            }
        };
        Err(members.fail(error))
    }

    /// Returns the operation's result, or resumes the panic of a function.
    pub fn finish(self, result: Result<()>) -> Result<()> {
        match self.panic {
            Some(payload) => resume_unwind(payload),
            None => result,
        }
    }
}
