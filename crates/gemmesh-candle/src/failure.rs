//! What fails in between: a call of gemmesh's, or one of candle's.

use candle_core::Error as CandleError;

use crate::error;

pub enum Failure {
    Gemmesh(gemmesh::Error),
    Candle(CandleError),
}

impl Failure {
    /// For `map_err`: as an error of candle's, which names `call`.
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
