//! Chooses a product's kernel and its slices of K: [candidates], those that [fit](fits), what each costs, and the one
//! that costs the [least](Least).

use super::fitted::search as fitted;
use super::tiles::{self, Tiles};
use super::variant_of;
use crate::backend::cuda::family::Variant;
use crate::backend::cuda::family::rates::Rates;
use crate::backend::cuda::gpu::kernels;
use crate::backend::cuda::program::k_slices;
use crate::schedule::{Config, Form, Numerics, Problem};

/// `base` with the shape of each kernel of this variant that multiplies the problem's types in this form.
pub fn candidates(
    rates: &Rates,
    base: Config,
    variant: Variant,
    problem: &Problem,
    form: &Form,
) -> impl Iterator<Item = Config> + use<> {
    kernels::configs(
        rates.family,
        base,
        variant,
        problem.dtypes.multiplied(),
        form,
    )
}

/// Whether the device has multiprocessors for a cluster of the kernel, and whether the kernel's bits depend only on
/// what they may.
pub fn fits(rates: &Rates, numerics: Numerics, config: &Config) -> bool {
    config.tile.ctas() <= rates.multiprocessors && config.check_numerics(numerics).is_ok()
}

/// The configuration with the least cost, in microseconds: the first of several with the same.
#[derive(Clone, Copy)]
pub struct Least {
    pub config: Config,
    /// Infinite if none has a finite cost.
    pub cost: f64,
}

impl Least {
    /// `config`, unless another one has a finite cost.
    pub fn or(config: Config) -> Least {
        let cost = f64::INFINITY;
        Least { config, cost }
    }

    pub fn consider(&mut self, config: &Config, cost: f64) {
        if cost < self.cost {
            let config = *config;
            *self = Least { config, cost };
        }
    }
}

/// The search for the kernel that is the fastest for a problem, if its rows are moved as in `base`.
pub struct Search<'a> {
    rates: &'a Rates,
    problem: &'a Problem,
    numerics: Numerics,
    base: Config,
    variant: Variant,
}

impl<'a> Search<'a> {
    pub fn new(
        rates: &'a Rates,
        problem: &'a Problem,
        numerics: Numerics,
        base: Config,
    ) -> Search<'a> {
        Search {
            rates,
            problem,
            numerics,
            base: Config {
                tile: base.tile.with_k_slices(1),
                ..base
            },
            variant: variant_of(problem, &base),
        }
    }

    /// The kernel and the slices of K that cost the least.
    ///
    /// `cost` gets the least cost so far. It is infinite if a configuration cannot be used, or costs no less.
    pub fn least(&self, cost: impl Fn(&Tiles, &Config, f64) -> f64) -> Least {
        let Search { rates, problem, .. } = *self;
        let mut least = Least::or(self.base);
        let candidates = candidates(rates, self.base, self.variant, problem, &problem.form);
        // The configuration is changed in place, because copying one takes as long as a part of the prediction.
        for mut config in candidates.filter(|config| self.fits(config)) {
            config.tile.group_m = group_m(rates, &config, problem.layout.m());
            let tiles = Tiles::of(rates, problem, &config);
            least.consider(&config, cost(&tiles, &config, least.cost));
            // Slices would not help: the tiles take longer than the least even if they filled all multiprocessors.
            if tiles.start + tiles.filled() >= least.cost {
                continue;
            }
            for slices in tiles.slices(self.most_slices(&config)) {
                config.tile.k_slices = slices;
                if k_slices::fit(&config, tiles.entries) {
                    let tiles = Tiles::of(rates, problem, &config);
                    least.consider(&config, cost(&tiles, &config, least.cost));
                }
            }
        }
        least
    }

    /// Whether a candidate can be used, and its tiles are not at least half empty. Ranks may have to agree on the
    /// height of the tiles of `base`.
    fn fits(&self, config: &Config) -> bool {
        let highest = 2 * self.problem.layout.m().max(fitted::FEW_ROWS);
        config.entry_rows() <= highest.max(self.base.entry_rows())
            && fits(self.rates, self.numerics, config)
    }

    /// The most slices into which the K of a candidate may be cut.
    ///
    /// Kernels that add partials have none. With few rows, CTAs that share K are as fast as slices in a product alone,
    /// and faster while rows arrive. But clusters leave multiprocessors idle, which costs more if kernels begin early.
    fn most_slices(&self, config: &Config) -> usize {
        let problem = self.problem;
        let can = self.numerics != Numerics::Invariant
            && self.variant == Variant::Forms
            && config.tile.split_k == 1
            && self.rates.family.adds_slices(config, problem.form.gated);
        if can && (problem.layout.m() > fitted::FEW_ROWS || tiles::begins_early(problem)) {
            fitted::MOST_SLICES
        } else {
            1
        }
    }
}

/// Tile rows that are walked together.
///
/// Single CTAs with successive tiles lie on one GPC, up to 16 at a time, and what they load at about the same time
/// comes from the L2 cache once. Fewest bytes come if they have about a square of the output. Ranks whose N or K differ
/// agree on it.
fn group_m(rates: &Rates, config: &Config, m: usize) -> usize {
    let most = rates.family.widest().group_m;
    let tile = &config.tile;
    if tile.ctas() > 1 || m.div_ceil(tile.m) <= most {
        return most;
    }
    let square = (fitted::MERGED_TILES * tile.n as f64 / tile.m as f64).sqrt();
    let power = square.log2().round();
    (power.exp2() as usize).clamp(1, most)
}
