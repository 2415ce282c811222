//! gemmesh's errors inside candle's.

use std::fmt;

use candle_core::Error as CandleError;

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
///     assert_eq!(error.to_string(), "rank 0: a parallel layer: the dtype of weight is F32 and must be BF16 or F16");
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
