//! Calls as errors name them: their names, their places in the user's source, and what all ranks must give alike.

use std::cell::Cell;
use std::fmt;
use std::panic::Location;

use serde::{Deserialize, Serialize};

mod made_call;

use self::made_call::At;
pub use self::made_call::MadeCall;
pub(crate) use self::made_call::{Difference, Ordinal, of_configuration};

/// A call that was refused: its name, and its place in the user's source.
///
/// `Display` prints `all_gather_matmul at src/block.rs:31`, or the name alone if the place is not known. Calls are equal
/// if their names are.
///
/// ```
/// use gemmesh::{Error, Group, Host, bf16};
///
/// Group::<Host>::threads(1, |group| {
///     let error = group.zeros::<bf16>(2, 0).unwrap_err();
///     let call = error.call().expect("an argument is wrong");
///     assert_eq!(call.name(), "Group::zeros");
///     let here = call.place().expect("a line of this program");
///     assert!(error.to_string().starts_with(&format!("rank 0: Group::zeros at {here}: ")));
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Call(Box<NamedCall>);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct NamedCall {
    name: String,
    place: Option<String>,
}

thread_local! {
    /// The place of the call that [`called_at`] runs on this thread.
    static PLACE: Cell<Option<SourceLine>> = const { Cell::new(None) };
}

/// A line of the source, if it is known.
pub(crate) type SourceLine = Option<&'static Location<'static>>;

/// The place of a call: `place`, or that of [`called_at`].
pub(crate) fn place_of(place: &'static Location<'static>) -> SourceLine {
    PLACE.get().unwrap_or(Some(place))
}

/// The place of [`called_at`], if it runs a call on this thread.
pub(crate) fn place_of_outer() -> SourceLine {
    PLACE.get().flatten()
}

/// The file and the line of a place.
pub(crate) fn in_words(place: SourceLine) -> Option<String> {
    place.map(|place| format!("{}:{}", place.file(), place.line()))
}

/// Runs `f`, the calls of a library that is built on this one. Errors of their arguments name `place`, where the program
/// calls that library, instead of a line of the library. Without a place they name none.
///
/// This holds for calls on this thread, also through trait objects. If `f` calls this function again, the outer place
/// stays.
///
/// ```
/// use std::panic::Location;
///
/// use gemmesh::error::called_at;
/// use gemmesh::{Group, Host, Matrix, Result, bf16};
///
/// #[track_caller]
/// fn square(group: &Group<Host>, n: usize) -> Result<Matrix<Host, bf16>> {
///     called_at(Some(Location::caller()), || group.zeros(n, n))
/// }
///
/// Group::<Host>::threads(1, |group| {
///     let line = line!() + 1;
///     let error = square(&group, 0).unwrap_err();
///     let place = error.call().and_then(|call| call.place()).expect("a place");
///     assert!(place.ends_with(&format!(":{line}")));
///     Ok::<_, gemmesh::Error>(())
/// })?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
pub fn called_at<R>(place: Option<&'static Location<'static>>, f: impl FnOnce() -> R) -> R {
    /// Sets the place back, also after a panic.
    struct Before(Option<SourceLine>);

    impl Drop for Before {
        fn drop(&mut self) {
            PLACE.set(self.0);
        }
    }

    let before = Before(PLACE.get());
    PLACE.set(before.0.or(Some(place)));
    f()
}

impl Call {
    /// The call `name` at the place from which the calling function is called, if that function is `#[track_caller]`.
    /// Within [`called_at`], at that place.
    #[track_caller]
    pub fn here(name: impl Into<String>) -> Call {
        Call::at(name, Location::caller())
    }

    /// The call `name` at `place`, or at that of [`called_at`].
    pub(crate) fn at(name: impl Into<String>, place: &'static Location<'static>) -> Call {
        Call::new(name.into(), in_words(place_of(place)))
    }

    pub(crate) fn new(name: String, place: Option<String>) -> Call {
        Call(Box::new(NamedCall { name, place }))
    }

    /// The call's name, such as `all_gather_matmul`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The file and the line of the call, such as `src/block.rs:31`. `None` if it is not known.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }
}

/// A call without a place.
impl From<&str> for Call {
    fn from(name: &str) -> Call {
        Call::new(name.into(), None)
    }
}

/// A call without a place.
impl From<String> for Call {
    fn from(name: String) -> Call {
        Call::new(name, None)
    }
}

impl PartialEq for Call {
    fn eq(&self, other: &Call) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Call {}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}{}", self.name(), At(self.place()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn place_within() -> Option<String> {
        let call = called_at(Some(Location::caller()), || Call::here("inner"));
        call.place().map(String::from)
    }

    fn line(line: u32) -> Option<String> {
        Some(format!("{}:{line}", file!()))
    }

    #[test]
    fn the_outermost_place_counts_and_is_forgotten_afterwards() {
        assert_eq!(place_within(), line(line!()));
        let outer = Location::caller();
        let expected = Some(format!("{}:{}", outer.file(), outer.line()));
        called_at(Some(outer), || {
            assert_eq!(place_within(), expected);
            assert_eq!(place_within(), expected, "after an inner call");
        });
        let panicked = std::panic::catch_unwind(|| called_at(Some(outer), || panic!("planted")));
        assert!(panicked.is_err());
        assert_eq!(place_within(), line(line!()));
        called_at(None, || assert_eq!(place_within(), None));
    }

    #[test]
    fn calls_are_equal_by_name_and_print_their_place() {
        let call = Call::here("matmul");
        let at = format!("matmul at {}:{}", file!(), line!() - 1);
        assert_eq!((call.to_string(), call.clone()), (at, "matmul".into()));
        assert_eq!(Call::from("matmul").to_string(), "matmul");
        assert_ne!(call, "all_gather".into());
    }
}
