//! A failed call of gemmesh or candle.

use candle_core::Error as CandleError;

use crate::error;

pub enum Failure {
    Gemmesh(gemmesh::Error),
    Candle(CandleError),
}

impl Failure {
    /// For `map_err`: turns the failure into candle's error, which names `call`.
    pub fn of(call: &'static str) -> impl Fn(Failure) -> CandleError {
        move |failure| match failure {
            Failure::Gemmesh(error) => error::of(call)(error),
            Failure::Candle(error) => error,
        }
    }
}

impl From<gemmesh::Error> for Failure {
    fn from(error: gemmesh::Error) -> Self {
        Failure::Gemmesh(error)
    }
}

impl From<CandleError> for Failure {
    fn from(error: CandleError) -> Self {
        Failure::Candle(error)
    }
}
