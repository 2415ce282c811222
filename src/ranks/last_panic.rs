//! The messages of panics, for code that notices a panic only while it unwinds.

use std::any::Any;
use std::cell::RefCell;

thread_local! {
    /// What the last panic of this thread said, and where.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The message of a payload that is no text.
pub const NO_WORDS: &str = "a value without words";

pub fn set(message: Option<String>) {
    // A thread that ends may have destroyed its place for the message.
    let _ = LAST.try_with(|last| last.replace(message));
}

/// The message of the panic that unwinds this thread, if it is known.
pub fn message() -> Option<String> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

/// The text of a panic's payload, if it is one.
pub fn text_of(payload: &(dyn Any + Send)) -> Option<&str> {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str))
}

/// The message of a panic that has been caught.
pub fn message_of(payload: &(dyn Any + Send)) -> Option<String> {
    match (message(), text_of(payload)) {
        // The noted message may be of an earlier panic, because resuming a panic calls no hook.
        (Some(noted), Some(text)) if !noted.starts_with(text) => Some(text.into()),
        (None, text) => text.map(str::to_string),
        (noted, _) => noted,
    }
}

/// Forgets the last panic of this thread, which goes on.
pub fn forget() {
    if !std::thread::panicking() {
        set(None);
    }
}
