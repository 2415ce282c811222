//! What panics say, for those who hear of them only when they unwind.

use std::any::Any;
use std::cell::RefCell;

thread_local! {
    /// What the last panic of this thread said, and where.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Of a payload that is no text.
pub const NO_WORDS: &str = "a value without words";

pub fn set(message: Option<String>) {
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
