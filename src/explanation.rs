//! Why an operation is cut up as it is.

use std::fmt::{Display, Formatter, Result};

use crate::schedule::Config;

/// How an operation is cut up, and what that is expected to take. Displayed as a line for each.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// How it is cut up.
    pub config: Config,
    /// What the parts are expected to take, and at last the whole; on GPUs by the model that chooses configurations, where it knows the
    /// operation. Nothing on the host backend, which has one configuration for all.
    pub predicted: Vec<Prediction>,
}

/// What something is expected to take.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// What.
    pub what: &'static str,
    /// From the beginning of the operation, in microseconds on the device.
    pub micros: f64,
}

impl Explanation {
    /// What the whole operation is expected to take, in microseconds on the device, if that is known.
    pub fn micros(&self) -> Option<f64> {
        self.predicted.last().map(|whole| whole.micros)
    }
}

impl Display for Explanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let Config {
            tile,
            chunking,
            route,
        } = &self.config;
        write!(f, "tiles of {}x{}, ", tile.m, tile.n)?;
        if tile.cluster > 1 {
            write!(f, "{} of which share loads, ", tile.cluster)?;
        }
        if tile.split_k > 1 {
            write!(f, "K split by {}, ", tile.split_k)?;
        }
        if tile.k_slices > 1 {
            write!(f, "K in {} slices, ", tile.k_slices)?;
        }
        if tile.stream_k {
            write!(f, "those of the last wave cut along K, ")?;
        }
        write!(f, "{} stages; {route:?}", tile.stages)?;
        write!(
            f,
            ", chunks {}, of the last {}",
            chunking.count, chunking.last
        )?;
        if chunking.cut_last {
            write!(f, " and a cut along K")?;
        }
        for Prediction { what, micros } in &self.predicted {
            write!(f, "\n{what}: {micros:.1} µs expected")?;
        }
        Ok(())
    }
}
