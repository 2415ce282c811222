//! What a call returns if it fails, and what it leaves behind for `gemmesh_last_error`.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::CString;

use gemmesh::Error;
use gemmesh::error::{Class, Dialect};

use crate::status::gemmesh_status;

pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a call fails.
#[derive(Debug)]
pub(crate) enum Failure {
    /// gemmesh says so, before this process is a rank of a group.
    Gemmesh(Error),
    /// A group says so to its rank.
    OfGroup(Error, usize),
    /// An argument that only this library sees.
    Unsuitable(Box<Unsuitable>),
    /// The call may not be made now.
    Misuse(String),
}

/// `(property, expected, found)`.
#[derive(Debug)]
pub(crate) struct Unsuitable {
    pub argument: String,
    pub what: &'static str,
    pub expected: String,
    pub found: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Gemmesh(error)
    }
}

impl Failure {
    pub fn unsuitable(
        argument: &str,
        what: &'static str,
        expected: impl ToString,
        found: impl ToString,
    ) -> Failure {
        Failure::Unsuitable(Box::new(Unsuitable {
            argument: argument.into(),
            what,
            expected: expected.to_string(),
            found: found.to_string(),
        }))
    }

    pub fn null(argument: &str) -> Failure {
        Failure::unsuitable(argument, "the pointer", "that of memory", "null")
    }

    /// The failure of `call`, in words.
    pub fn told(self, call: &'static str) -> Told {
        match self {
            Failure::Gemmesh(error) => Told::of(call, error.kind().class(), &error),
            Failure::OfGroup(error, rank) => Told::of(call, error.class_on(rank), &error),
            Failure::Unsuitable(found) => {
                let Unsuitable {
                    argument,
                    what,
                    expected,
                    found,
                } = *found;
                let sentence =
                    format!("{call}: {what} of {argument} is {found} and must be {expected}");
                Told::new(gemmesh_status::GEMMESH_ERROR_ARGUMENT, call, &sentence)
            }
            Failure::Misuse(what) => {
                let sentence = format!("{call}: {what}");
                Told::new(gemmesh_status::GEMMESH_ERROR_MISUSE, call, &sentence)
            }
        }
    }
}

/// A failure, as the functions of the header tell it.
pub(crate) struct Told {
    pub status: gemmesh_status,
    pub rank: i64,
    pub call: CString,
    pub sentence: CString,
}

impl Told {
    fn of(call: &'static str, class: Class, error: &Error) -> Told {
        Told {
            status: status_of(class),
            rank: error.at_fault().first().map_or(-1, |rank| *rank as i64),
            call: text(&Dialect::C.of(error.call().map_or(call, |call| call.name()))),
            sentence: text(&Dialect::C.sentence(error)),
        }
    }

    fn new(status: gemmesh_status, call: &str, sentence: &str) -> Told {
        Told {
            status,
            rank: -1,
            call: text(call),
            sentence: text(sentence),
        }
    }

    /// A panic in `call`.
    pub fn panic(call: &str, payload: &(dyn Any + Send)) -> Told {
        let message = payload
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no message");
        let sentence = format!("{call}: panicked: {message}");
        Told::new(gemmesh_status::GEMMESH_ERROR_INTERNAL, call, &sentence)
    }

    /// Keeps it for `gemmesh_last_error`.
    pub fn keep(self) -> gemmesh_status {
        let status = self.status;
        // There is no one to tell while the thread ends.
        let _ = LAST.try_with(|last| last.replace(Some(self)));
        status
    }
}

thread_local! {
    /// The last failure of a call on this thread.
    static LAST: RefCell<Option<Told>> = const { RefCell::new(None) };
}

/// Looks at the last failure on this thread. There is none while the thread ends.
pub(crate) fn last<R>(otherwise: R, f: impl FnOnce(&Told) -> R) -> R {
    let looked = LAST.try_with(|last| last.borrow().as_ref().map(f));
    looked.ok().flatten().unwrap_or(otherwise)
}

/// A string of C, without what it cannot hold.
pub(crate) fn text(words: &str) -> CString {
    CString::new(words.replace('\0', "")).unwrap_or_default()
}

fn status_of(class: Class) -> gemmesh_status {
    match class {
        Class::Argument => gemmesh_status::GEMMESH_ERROR_ARGUMENT,
        Class::Misuse => gemmesh_status::GEMMESH_ERROR_MISUSE,
        Class::Environment => gemmesh_status::GEMMESH_ERROR_ENVIRONMENT,
        Class::Rendezvous => gemmesh_status::GEMMESH_ERROR_RENDEZVOUS,
        Class::CallMismatch => gemmesh_status::GEMMESH_ERROR_CALL_MISMATCH,
        Class::OutOfMemory => gemmesh_status::GEMMESH_ERROR_OUT_OF_MEMORY,
        Class::Rank => gemmesh_status::GEMMESH_ERROR_RANK,
        Class::Timeout => gemmesh_status::GEMMESH_ERROR_TIMEOUT,
        Class::Device => gemmesh_status::GEMMESH_ERROR_DEVICE,
        Class::System => gemmesh_status::GEMMESH_ERROR_SYSTEM,
        _ => gemmesh_status::GEMMESH_ERROR_INTERNAL,
    }
}
