//! What panics say, for those who hear of them only when they unwind.

use std::any::Any;
use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::{Arc, Mutex, Once, PoisonError, Weak};

use super::shared_state::SharedState;
use crate::error::Error;

thread_local! {
    /// What the last panic of this thread said, and where.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The groups of a process that a panic aborts: it unwinds nothing that would tell the other ranks.
static ABORTED: Mutex<Vec<Weak<SharedState>>> = Mutex::new(Vec::new());

/// Notes from now on what panics say, before the process's own hook hears it; where they abort, tells this group. A
/// hook that the program sets later may replace this one: then that a rank panicked is known, and not why.
pub fn listen(group: &Arc<SharedState>) {
    static ONCE: Once = Once::new();
    if cfg!(panic = "abort") {
        let mut groups = ABORTED.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }
    // A thread that unwinds may set no hook; the next group does.
    if std::thread::panicking() {
        return;
    }
    ONCE.call_once(|| {
        let program = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            note(panic);
            program(panic);
        }));
    });
}

fn note(panic: &PanicHookInfo) {
    let words = panic.payload_as_str().unwrap_or(NO_WORDS);
    let message = match panic.location() {
        Some(place) => format!("{words} ({place})"),
        None => words.into(),
    };
    // (Not while the thread that panics is changing the list.)
    if let (true, Ok(groups)) = (cfg!(panic = "abort"), ABORTED.try_lock()) {
        tell(&groups, &message);
    }
    set(Some(message));
}

/// Tells groups of a panic that ends this process.
fn tell(groups: &[Weak<SharedState>], message: &str) {
    for group in groups.iter().filter_map(Weak::upgrade) {
        group.fail(Error::RankPanicked {
            rank: group.rank(),
            message: Some(message.into()),
        });
    }
}

/// Of a payload that is no text.
const NO_WORDS: &str = "a value without words";

fn set(message: Option<String>) {
    // A thread that ends has no place for it any more.
    let _ = LAST.try_with(|last| last.replace(message));
}

/// What the panic of this thread that unwinds said, if that is known.
pub fn message() -> Option<String> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

/// The same of a panic that has been caught.
pub fn message_of(payload: &(dyn Any + Send)) -> Option<String> {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    match (message(), text) {
        // What was noted may be of an earlier panic: who resumes one calls no hook.
        (Some(noted), Some(text)) if !noted.starts_with(text) => Some(text.into()),
        (None, text) => text.map(str::to_string),
        (noted, _) => noted,
    }
}

/// This thread goes on: a panic that it had is over.
pub fn forget() {
    if !std::thread::panicking() {
        set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::memfd::{Mapping, memfd};

    #[test]
    fn a_process_that_aborts_tells_the_groups_that_it_is_in() {
        let memory = memfd(SharedState::BYTES).unwrap();
        let rank = |rank| {
            let memory = Mapping::shared(&memory, SharedState::BYTES).unwrap();
            Arc::new(SharedState::new(memory, rank, 2))
        };
        let (own, others) = (rank(1), rank(0));
        tell(&[Weak::new(), Arc::downgrade(&own)], "planted (here)");
        let fault = others.fault().map(|fault| fault.to_string());
        assert_eq!(fault.as_deref(), Some("rank 1 panicked: planted (here)"));
    }

    #[test]
    fn a_panic_that_was_caught_says_what_its_payload_does_unless_more_was_noted_of_it() {
        let said = |payload: Box<dyn Any + Send>| message_of(&*payload);
        set(None);
        assert_eq!(said(Box::new(7)), None);
        assert_eq!(said(Box::new("planted")).as_deref(), Some("planted"));
        set(Some("planted (here)".into()));
        assert_eq!(said(Box::new("planted")).as_deref(), Some("planted (here)"));
        assert_eq!(
            said(Box::new("another".to_string())).as_deref(),
            Some("another")
        );
        forget();
        assert_eq!(message(), None);
    }
}
