//! Fits the rates of a device to measurements.

use gemmesh::Config;
use gemmesh::schedule::Problem;
use gemmesh::tools::{Rates, Tiles, gathered};

/// The measured time of a gather and its product.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The problem that was measured.
    pub problem: Problem,
    /// Its configuration.
    pub config: Config,
    /// Whether rows were gathered. If not, the product ran alone, with all rows there.
    pub gathers: bool,
    /// Microseconds on the device.
    pub micros: f64,
}

impl Sample {
    /// The model's error: the logarithm of the ratio of predicted to measured time.
    fn off(&self, rates: &Rates) -> f64 {
        let predicted = if self.gathers {
            gathered(rates, &self.problem, &self.config)
        } else {
            Tiles::of(rates, &self.problem, &self.config).cold()
        };
        (predicted / self.micros).ln()
    }

    fn is_like(&self, other: &Sample) -> bool {
        self.problem == other.problem && self.gathers == other.gathers
    }
}

/// The rates with which the model comes closest to the samples, starting with those of a similar device.
///
/// A rate stays as it is if no sample depends on it, or if it is 0. Faster configurations weigh more, because the model
/// chooses among these.
pub fn fit(begin: &Rates, samples: &[Sample]) -> Rates {
    /// If its error is greater than this, a sample pulls no harder.
    const CLOSE: f64 = 0.1;
    /// How fast a sample's weight falls with its extra time over the best sample like it.
    const FALL: f64 = 5.0;
    /// Keeps rates in place if they hardly matter.
    const KEEP: f64 = 4e-4;
    const FIRST_STEP: f64 = 0.3;
    const LAST_STEP: f64 = 0.004;
    let weight = |sample: &Sample| {
        let alike = samples.iter().filter(|other| sample.is_like(other));
        let best = alike
            .map(|other| other.micros)
            .fold(f64::INFINITY, f64::min);
        (-FALL * (sample.micros / best - 1.0)).exp().max(0.03)
    };
    let weights: Vec<f64> = samples.iter().map(weight).collect();
    let all: f64 = weights.iter().sum();
    let cost = |rates: &mut Rates| {
        let pull = |(sample, weight): (&Sample, &f64)| {
            let off = sample.off(rates).abs();
            weight * off.min(CLOSE) * (2.0 * off - off.min(CLOSE))
        };
        let apart = samples.iter().zip(&weights).map(pull).sum::<f64>() / all;
        let mut first = *begin;
        let pairs = rates.fields().into_iter().zip(first.fields());
        let pairs = pairs.map(|(now, first)| (*now.value, *first.value));
        let moved = pairs.filter(|(_, first)| *first > 0.0);
        let moved = moved.map(|(now, first)| (now / first).ln().powi(2));
        apart + KEEP * moved.sum::<f64>()
    };
    let mut rates = *begin;
    let mut best = cost(&mut rates);
    let mut step = FIRST_STEP;
    while step > LAST_STEP {
        let mut is_better = false;
        for index in 0..rates.fields().len() {
            for factor in [1.0 + step, 1.0 / (1.0 + step)] {
                let mut other = rates;
                *other.fields()[index].value *= factor;
                let cost = cost(&mut other);
                if cost < best {
                    (best, rates, is_better) = (cost, other, true);
                }
            }
        }
        if !is_better {
            step *= 0.6;
        }
    }
    rates
}

/// The median of the model's relative errors on the samples.
pub fn median_error(rates: &Rates, samples: &[Sample]) -> f64 {
    let off = samples
        .iter()
        .map(|sample| sample.off(rates).exp_m1().abs());
    let mut off: Vec<f64> = off.collect();
    off.sort_by(f64::total_cmp);
    off.get(off.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use gemmesh::DType;
    use gemmesh::schedule::{Layout, Operation};
    use gemmesh::testing::{Variant, with_each_kernel};
    use gemmesh::tools::{H100, H200, Link};
    use gemmesh::tuning::{Chunking, Route};

    use super::*;

    /// The times of an imagined device for each kernel, alone and with rows that arrive.
    fn samples(device: &Rates, shapes: &[[usize; 3]]) -> Vec<Sample> {
        let of = |&[m, n, k]: &[usize; 3]| {
            let layout = Layout::balanced(m, k, 2).unwrap();
            let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, n);
            let routes = [Route::Pull, Route::Push, Route::Store];
            let configs = routes.into_iter().flat_map(|route| {
                let base = Config::new(H200.family.widest(), Chunking::new(1), route);
                with_each_kernel(&base, Variant::Forms, [DType::Bf16; 2])
            });
            let both = configs.flat_map(|config| [(config, false), (config, true)]);
            let sample = move |(config, gathers)| {
                let mut sample = Sample {
                    problem: problem.clone(),
                    config,
                    gathers,
                    micros: 1.0,
                };
                sample.micros = sample.off(device).exp();
                sample
            };
            both.map(sample).collect::<Vec<_>>()
        };
        shapes.iter().flat_map(of).collect()
    }

    const MEASURED: [[usize; 3]; 6] = [
        [16, 1792, 4096],
        [200, 8192, 1024],
        [700, 512, 16_384],
        [4096, 1792, 4096],
        [2048, 8192, 512],
        [8192, 512, 2048],
    ];

    #[test]
    fn the_rates_of_another_device_are_found() {
        let device = Rates {
            push: Link {
                around: 14.0,
                bytes: 150e3,
                ..H100.push
            },
            ..H100
        };
        let measured = samples(&device, &MEASURED);
        let rates = fit(&H200, &measured);
        assert_eq!(rates.check(), Ok(()));
        assert!(median_error(&H200, &measured) > 0.05);
        assert!(median_error(&rates, &measured) < 0.01, "{rates:?}");
        // And for shapes that are not among the samples.
        let others = samples(&device, &[[64, 3584, 8192], [1024, 3584, 2048]]);
        let error = median_error(&rates, &others);
        assert!(error < 0.03, "{error}: {rates:?}");
    }

    #[test]
    fn what_no_sample_tells_of_stays_as_it_is() {
        let mut measured = samples(&H100, &MEASURED[..2]);
        measured.retain(|sample| !sample.gathers);
        let rates = fit(&H200, &measured);
        assert_eq!([rates.pull, rates.push], [H200.pull, H200.push]);
        assert_eq!(rates.multiprocessors, H200.multiprocessors);
    }
}
