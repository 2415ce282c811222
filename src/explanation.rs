//! How an operation is cut up, and why.

use std::fmt::{Debug, Display, Formatter, Result};

use crate::schedule::Config;

/// How an operation is cut up, and its predicted time. `Display` prints a line for each prediction.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let product = Matmul::<Host, bf16>::new().prepare(&group, [128, 64], 32)?;
///     println!("{}", product.explain());
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The configuration that was chosen.
    pub config: Config,
    /// The predicted times of the parts, and last that of the whole. On GPUs the model that chooses configurations
    /// makes them, if it knows the operation. On the host backend there are none, because it has one configuration for
    /// all shapes.
    pub predicted: Vec<Prediction>,
}

impl Debug for Explanation {
    fn fmt(&self, f: &mut Formatter) -> Result {
        write!(f, "Explanation({:?}", self.config)?;
        match self.micros() {
            Some(micros) => write!(f, ", {micros:.1} µs expected)"),
            None => f.write_str(")"),
        }
    }
}

/// A predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// The part of the operation that it is of.
    pub what: &'static str,
    /// From the beginning of the operation, in microseconds on the device.
    pub micros: f64,
}

impl Explanation {
    /// The predicted time of the whole operation, in microseconds on the device, if it is known.
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
