//! A cache of chosen configurations.
//!
//! In a serving loop M differs from step to step, and choosing takes as long as planning.

use std::sync::{Mutex, PoisonError};

use lru::LruCache;

use super::tuned::Measured;
use crate::backend::contract::KEPT;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::{Config, Layout, Numerics, Problem};

/// Everything that a choice depends on, except the device.
type ChoiceKey = (Problem, Numerics, Option<Measured>);

/// The latest choices.
#[derive(Debug)]
pub struct Choices(Mutex<LruCache<ChoiceKey, Config>>);

impl Choices {
    pub fn new() -> Choices {
        Choices(Mutex::new(LruCache::new(KEPT)))
    }

    /// The choice for `problem`.
    ///
    /// It is that of `choose` for its [representative](representative), with the `measured` configurations of `problem`
    /// itself.
    pub fn of(
        &self,
        problem: &Problem,
        numerics: Numerics,
        measured: Option<Measured>,
        choose: impl FnOnce(&Problem) -> Config,
    ) -> Config {
        let key = (representative(problem), numerics, measured);
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(config) = known.get(&key) {
            return *config;
        }
        let config = choose(&key.0);
        known.put(key, config);
        config
    }
}

/// The problem whose choice is taken for all problems like `problem`.
///
/// It is a function of `problem` alone, so no choice depends on earlier calls.
///
/// M is rounded up to a multiple of 8 rows or, if that is more, of M / 256 to M / 128 rows. Every tile's height is a
/// multiple of 8, so up to M = 2048 the prediction counts the same tiles. The rows are split evenly, because the
/// prediction takes rank 0's view as every rank's. If one rank waits for more rows, the others have more rows of their
/// own.
fn representative(problem: &Problem) -> Problem {
    const STEP: usize = 8;
    let layout = &problem.layout;
    let m = layout.m();
    let step = STEP.max(m.next_power_of_two() / 256);
    let rounded = m.next_multiple_of(step).min(MAX_EXTENT);
    let layout = Layout::balanced(rounded, layout.k(), layout.world())
        .and_then(|even| even.staged(layout.stages(), layout.order()))
        // This does not fail, because a layout with these extents exists.
        .unwrap_or_else(|_| layout.clone());
    Problem {
        layout,
        ..problem.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::super::choose;
    use super::super::tiles::Tiles;
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::backend::cuda::family::Variant;
    use crate::backend::cuda::gpu::kernels::configs;
    use crate::element::DType;
    use crate::schedule::{Chunking, Operation, Route, RowOrder};

    fn problem(rows: &[usize]) -> Problem {
        let layout = Layout::new(rows, 4096).unwrap();
        Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, 1792)
    }

    #[test]
    fn a_choice_does_not_depend_on_what_was_asked_before() {
        let problems: Vec<[usize; 2]> = (0..600).map(|i| [i * 37 % 4099, i * 101 % 997]).collect();
        let of = |choices: &Choices, rows: &[usize; 2]| {
            choices.of(&problem(rows), Numerics::Fast, None, |problem| {
                choose(&H200, problem, Numerics::Fast, true, None)
            })
        };
        let (upward, downward) = (Choices::new(), Choices::new());
        let first: Vec<Config> = problems.iter().map(|rows| of(&upward, rows)).collect();
        let second = problems.iter().rev().map(|rows| of(&downward, rows));
        let second: Vec<Config> = second.collect();
        assert!(first.iter().eq(second.iter().rev()));
        // Some choices came from the cache, and not all choices are the same.
        assert!(upward.0.lock().unwrap().len() < problems.len());
        assert!(first.iter().any(|config| *config != first[0]));
    }

    #[test]
    fn few_rows_are_rounded_to_as_many_tiles_of_every_shape_and_many_by_a_128th_at_most() {
        let base = Config::new(H200.family.widest(), Chunking::new(1), Route::Pull);
        for m in (0..2050).chain([4095, 4096, 4097, 100_001, MAX_EXTENT]) {
            let real = problem(&[m, 0]);
            let rounded = representative(&real);
            assert!(rounded.layout.is_balanced());
            let [real_m, rounded_m] = [&real, &rounded].map(|problem| problem.layout.m());
            let more = rounded_m - real_m;
            assert!(more < 8 || more < m / 128, "{m}: {more}");
            if m > 2048 {
                continue;
            }
            for config in configs(
                H200.family,
                base,
                Variant::Forms,
                [DType::Bf16; 2],
                &Default::default(),
            ) {
                let [real, rounded] =
                    [&real, &rounded].map(|problem| Tiles::of(&H200, problem, &config).entries);
                assert_eq!(real, rounded, "{m} {config:?}");
            }
        }
    }

    #[test]
    fn all_that_is_no_row_is_kept() {
        let layout = Layout::new(&[40, 8], 512).unwrap();
        let staged = Problem {
            layout: layout.staged(4, RowOrder::ByStage).unwrap(),
            beside: Some((DType::F32, 3)),
            ..problem(&[1])
        };
        let rounded = representative(&staged);
        let layout = &rounded.layout;
        assert_eq!((layout.stages(), layout.order()), (4, RowOrder::ByStage));
        assert_eq!((layout.k(), layout.world()), (512, 2));
        let back = Problem {
            layout: staged.layout.clone(),
            ..rounded
        };
        assert_eq!(back, staged);
    }
}
