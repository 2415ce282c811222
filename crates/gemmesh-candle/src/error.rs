//! gemmesh's errors inside candle's.

use std::fmt;
use std::panic::Location;

use candle_core::Error as CandleError;
use gemmesh::error::called_at;

use crate::failure::Failure;

/// An error whose `Debug` is a sentence, because candle prints wrapped errors by `Debug`.
struct Sentence(gemmesh::Error);

impl fmt::Debug for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // At once, so that the lines of several ranks do not mix.
        f.write_str(&self.0.to_string())
    }
}

impl fmt::Display for Sentence {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for Sentence {}

/// Runs `f` for `call`, a function of this library. Errors of arguments name the place from which the calling function
/// is called.
#[track_caller]
pub(crate) fn within<R, E: Into<Failure>>(
    call: &'static str,
    f: impl FnOnce() -> Result<R, E>,
) -> Result<R, CandleError> {
    let made = called_at(place(), f);
    made.map_err(|error| Failure::of(call)(error.into()))
}

/// The place from which the calling function is called. It is not known if that function is a trait object's method:
/// the caller is then a line of this library.
#[track_caller]
pub(crate) fn place() -> Option<&'static Location<'static>> {
    let library = file!().trim_end_matches("error.rs");
    Some(Location::caller()).filter(|caller| !caller.file().starts_with(library))
}

/// For `map_err`: wraps an error of `call` in candle's error.
pub(crate) fn of(call: &'static str) -> impl Fn(gemmesh::Error) -> CandleError {
    move |error| {
        CandleError::WrappedContext {
            wrapped: Box::new(Sentence(error)),
            context: call.into(),
        }
        .bt()
    }
}

/// What an error of candle says, without the backtrace that it may have.
pub(crate) fn words(error: &CandleError) -> String {
    match error {
        CandleError::WithBacktrace { inner, .. } => words(inner),
        other => other.to_string(),
    }
}

/// The error of gemmesh inside an error of candle, if there is one. It says which rank is at fault and what to do.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use gemmesh_candle::{ColumnParallelLinear, Group, Host, TensorParallel, gemmesh_error};
///
/// Group::<Host>::threads(1, |group| {
///     let ranks = TensorParallel::new(group, &Device::Cpu, 8).unwrap();
///     let weight = Tensor::ones((4, 8), DType::F32, &Device::Cpu).unwrap();
///     let refused = ColumnParallelLinear::new(&ranks, weight, None).unwrap_err();
///     let error = gemmesh_error(&refused).unwrap();
///     // With the file and the line between: "rank 0: a parallel layer at src/model.rs:31: the dtype of ..."
///     let sentence = error.to_string();
///     assert!(sentence.starts_with("rank 0: a parallel layer at "));
///     assert!(sentence.ends_with(": the dtype of weight is F32 and must be BF16, F16 or F8E4M3"));
///     Ok::<_, gemmesh::Error>(())
/// }).unwrap();
/// ```
pub fn gemmesh_error(error: &CandleError) -> Option<&gemmesh::Error> {
    match error {
        CandleError::WrappedContext { wrapped, .. } => {
            let sentence: &Sentence = wrapped.downcast_ref()?;
            Some(&sentence.0)
        }
        CandleError::WithBacktrace { inner, .. }
        | CandleError::Context { inner, .. }
        | CandleError::WithPath { inner, .. } => gemmesh_error(inner),
        _ => None,
    }
}
