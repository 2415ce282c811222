//! What tests ask of errors.

use gemmesh::Error;
use gemmesh::error::{Class, Kind};

/// The rank of an error and its kind.
pub fn parts(error: &Error) -> (Option<usize>, &Kind) {
    (error.rank(), error.kind())
}

/// Those of the error that a result is.
pub fn parts_of<T>(result: &Result<T, Error>) -> Option<(Option<usize>, &Kind)> {
    result.as_ref().err().map(parts)
}

/// The kind of the error that a result is.
pub fn kind_of<T>(result: &Result<T, Error>) -> Option<&Kind> {
    result.as_ref().err().map(Error::kind)
}

/// Whether no kernel, or no route, does what was asked for.
pub fn is_unsupported(error: &Error) -> bool {
    matches!(error.kind(), Kind::Unsupported { .. })
}

/// That a function made a call of the group that had called it.
#[track_caller]
pub fn assert_call_in_callback(error: &Error, rank: usize) {
    let words =
        "a function that was given to a call of a group makes another call of the same group";
    assert!(error.to_string().contains(words), "{error}");
    assert_eq!(
        (error.rank(), error.kind().class()),
        (Some(rank), Class::Misuse)
    );
}
