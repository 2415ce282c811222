//! Predicts how long operations take on GPUs, and chooses configurations where nothing was measured.
//!
//! The model knows waves of tiles ([`tiles`]). The limit of a wave is the tensor cores, the loads of each
//! multiprocessor, the loads of all multiprocessors from the L2 cache, or device memory. The model knows when gathered
//! rows arrive ([`gather`]), and when partial sums have been made and moved ([`sums`]). It plays the tiles through in
//! their order, with a few rates of the device ([`rates`](crate::backend::cuda::family::rates)). Times are in
//! microseconds. Numbers that were [fitted] to measurements stand in tables.
//!
//! What is chosen is asked for in four steps: the candidates, those that fit, what each costs, and the least
//! ([`search`]).
//!
//! The model is a pure function of what all ranks know alike, and of the rank's own N (if rows are gathered) or K (if
//! sums are made). Ranks whose N or K differ still agree on everything that they must agree on.

pub mod choices;
mod clocks;
pub mod fitted;
pub mod gather;
mod search;
pub mod sums;
pub mod tiles;
pub mod tuned;

use search::{Least, Search};
use tiles::Tiles;
use tuned::Measured;

use crate::backend::cuda::family::Variant;
use crate::backend::cuda::family::launch::TARGETS;
use crate::backend::cuda::family::rates::Rates;
use crate::explanation::Prediction;
use crate::schedule::plan::chunks::rows_of_rail_chunk;
use crate::schedule::plan::partial_sums;
use crate::schedule::plan::partials::{follows_product, sends_all_partials};
use crate::schedule::{Chunking, Config, Numerics, Problem, Route, WeightLayout};

/// Chooses an operation's configuration: the fastest measured for this very problem, or else the model's choice.
///
/// `pushes`: whether rows may be pushed or stored.
pub fn choose(
    rates: &Rates,
    problem: &Problem,
    numerics: Numerics,
    pushes: bool,
    measured: Option<Measured>,
) -> Config {
    let measured = measured.filter(|m| pushes || m.alike.route == Route::Pull);
    let exact = measured.and_then(|measured| measured.exact);
    let is_plain = !problem.form.gated
        && problem.form.weights == WeightLayout::Nk
        && problem.form.widths.is_empty();
    let exact = exact.filter(|exact| is_plain && exact.check_numerics(numerics).is_ok());
    if let Some(exact) = exact {
        return exact;
    }
    let near = measured.map(|measured| measured.alike);
    if !problem.operation.sends_product() {
        return gather::choose(rates, problem, numerics, pushes, near);
    }
    if pushes && near.is_none() && (2..=TARGETS).contains(&problem.layout.world()) {
        return sums::choose(rates, problem, numerics);
    }
    let base = near.unwrap_or(Config::new(
        rates.family.widest(),
        Chunking::new(1),
        Route::Pull,
    ));
    tiled(rates, problem, numerics, base).config
}

/// Chooses the tiles of an operation over several hosts. Within a host its rows are pushed, unless a sum has so few that
/// its product is better made first: see `is_better_first`.
///
/// `network`: the bytes per microsecond that a rank sends and receives. If that takes as long as the product, the
/// tiles of a chunk are left to make when the last rows have come, or a row of tiles has to be made before the first
/// partials can go. So tiles are better whose rows take few waves, and for sums low ones.
pub fn over_hosts(rates: &Rates, problem: &Problem, numerics: Numerics, network: f64) -> Config {
    if problem.operation.sends_product() && is_better_first(rates, problem) {
        let base = Config::new(rates.family.widest(), Chunking::new(1), Route::Pull);
        return tiled(rates, problem, numerics, base).config;
    }
    pushed_over_hosts(rates, problem, numerics, network)
}

/// As [`over_hosts`], if rows are pushed.
pub fn pushed_over_hosts(
    rates: &Rates,
    problem: &Problem,
    numerics: Numerics,
    network: f64,
) -> Config {
    let m = problem.layout.m();
    let is_sent = problem.operation.sends_product();
    let widest = rates.family.widest();
    let tile = if is_sent && m < fitted::search::MANY_ROWS_OVER_HOSTS {
        widest.with_cluster(1, 1)
    } else {
        widest
    };
    let base = Config::new(tile, Chunking::new(1), Route::Push);
    let sent = time_of_network(problem, network);
    let search = Search::new(rates, problem, numerics, base);
    let least = search.least(|tiles, config, _| {
        // Ranks whose K differ must agree on the pieces of sums.
        let agrees = !is_sent || partial_sums::agree(problem, config, &base);
        if agrees {
            until_complete(problem, config, tiles, sent)
        } else {
            f64::INFINITY
        }
    });
    least.config
}

/// True if all ranks get few sums, or if the tiles of each owner's rows would be at least twice as many as the tiles of all
/// rows. Each tile reads its part of the weight. Ranks whose K differ agree on it.
fn is_better_first(rates: &Rates, problem: &Problem) -> bool {
    let layout = &problem.layout;
    if sends_all_partials(problem) {
        return true;
    }
    let tiles = |rows: usize| rows.div_ceil(rates.family.widest().m);
    let apart: usize = layout.rows().into_iter().map(tiles).sum();
    apart >= 2 * tiles(layout.m())
}

/// Predicts the times of an operation over several hosts, as [`predict`].
pub fn predict_over_hosts(
    rates: &Rates,
    problem: &Problem,
    config: &Config,
    network: f64,
) -> Vec<Prediction> {
    let tiles = Tiles::of(rates, problem, config);
    let product = tiles.cold();
    let sent = time_of_network(problem, network);
    let all = [
        ("of the product alone", product),
        ("that the network takes", sent),
        (
            "until the operation is complete",
            until_complete(problem, config, &tiles, sent),
        ),
    ];
    let predictions = all.into_iter();
    predictions
        .map(|(what, micros)| Prediction { what, micros })
        .collect()
}

/// Until an operation over hosts of these tiles is complete, whose network takes so long.
fn until_complete(problem: &Problem, config: &Config, tiles: &Tiles, sent: f64) -> f64 {
    let moved = sent.max(time_of_copies(tiles.rates, problem));
    if follows_product(problem, config) {
        return tiles.cold() + moved;
    }
    let is_sent = problem.operation.sends_product();
    // Pieces of sums are cut by owners. Of a gather, a tile with rows of two ranks waits for both.
    let owned = problem.layout.m() / problem.layout.world();
    let tiles = if is_sent || config.entry_rows() <= owned {
        &tiles.by_owners(problem)
    } else {
        tiles
    };
    let product = tiles.cold();
    let height = config.entry_rows();
    let rest = match is_sent {
        // Before the first partials go. Pieces are at least as high as a tile, and there should be many.
        true => {
            let m = problem.layout.m().max(1);
            product * height.min(m) as f64 / m as f64
        }
        // When the last rows have come. A chunk may have rows of several tiles, and tiles rows of several chunks.
        false => {
            let chunk = rows_of_rail_chunk(problem);
            let rows = (chunk + height - gcd(chunk, height)).div_ceil(height);
            let count = rows * tiles.columns;
            count.div_ceil(tiles.slots) as f64 * tiles.wave(count.min(tiles.slots))
        }
    };
    product.max(moved + rest)
}

/// The greatest number that divides both.
fn gcd(one: usize, other: usize) -> usize {
    match other {
        0 => one,
        _ => gcd(other, one % other),
    }
}

/// Microseconds in which a rank sends its rows over the network, and receives as many, at `network` bytes per
/// microsecond.
fn time_of_network(problem: &Problem, network: f64) -> f64 {
    network_bytes(problem) as f64 / network
}

/// Microseconds in which a rank's copy engine moves rows within its host: to each neighbour all rows, or as many for each
/// host as it sends to each other host.
fn time_of_copies(rates: &Rates, problem: &Problem) -> f64 {
    let (world, hosts) = (problem.layout.world(), problem.hosts.count());
    let places = world / hosts;
    let (for_each, receivers) = if sends_all_partials(problem) {
        (1, world - places)
    } else {
        (hosts, hosts - 1)
    };
    let bytes = network_bytes(problem) as f64 / receivers as f64;
    (for_each * (places - 1)) as f64 * (rates.push.chunk + bytes / rates.push.bytes)
}

/// The bytes that a rank sends over the network, and that it receives. Those of a gather that follows do not count.
fn network_bytes(problem: &Problem) -> usize {
    let Problem {
        layout,
        dtypes,
        hosts,
        n,
        ..
    } = problem;
    let row = if problem.operation.sends_product() {
        n.saturating_mul(dtypes.partials.bytes())
    } else {
        layout.k().saturating_mul(dtypes.operands.bytes())
    };
    let world = layout.world();
    let rows = if sends_all_partials(problem) {
        layout.m() * (world - world / hosts.count())
    } else {
        layout.m() / world * (hosts.count() - 1)
    };
    rows.saturating_mul(row)
}

/// Predicts the times of an operation's parts, and last of the whole. Empty if they are not known.
pub fn predict(rates: &Rates, problem: &Problem, config: &Config) -> Vec<Prediction> {
    if problem.operation.sends_product() {
        sums::predict(rates, problem, config)
    } else {
        gather::predict(rates, problem, config)
    }
}

/// The kernels that make a product, if partial sums are moved as in `config`.
fn variant_of(problem: &Problem, config: &Config) -> Variant {
    let is_apart = config.route == Route::Pull || config.stores_behind();
    if problem.operation.sends_product() && !is_apart {
        Variant::Sums
    } else {
        Variant::Forms
    }
}

/// Chooses the tiles of partial sums that are moved as in `base`, if moving them takes as long with any tiles. The cost
/// is the time of the product.
fn tiled(rates: &Rates, problem: &Problem, numerics: Numerics, base: Config) -> Least {
    Search::new(rates, problem, numerics, base).least(|tiles, config, _| {
        // Pieces that are sent are cut by tiles. Ranks must agree on them, although their K may differ.
        if partial_sums::agree(problem, config, &base) {
            tiles.cold()
        } else {
            f64::INFINITY
        }
    })
}

#[cfg(test)]
mod testing {
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::backend::cuda::gpu::kernels::configs;
    use crate::element::DType;

    /// A configuration with the kernel of this shape: rows, columns, CTAs that share `b`, and CTAs that share K.
    pub fn config(shape: [usize; 4], route: Route, chunking: Chunking) -> Config {
        let [m, n, cluster, split_k] = shape;
        config_of([m, n, cluster, 1, split_k], route, chunking)
    }

    /// The same for clusters in both directions.
    pub fn config_of(shape: [usize; 5], route: Route, chunking: Chunking) -> Config {
        let has_shape = |c: &Config| {
            let tile = c.tile;
            [tile.m, tile.n, tile.cluster_m, tile.cluster_n, tile.split_k] == shape
        };
        let mut all = configs(
            H200.family,
            Config::new(H200.family.widest(), chunking, route),
            Variant::Forms,
            [DType::Bf16; 2],
            &Default::default(),
        );
        all.find(has_shape).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::testing::config;
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::backend::cuda::gpu::kernels::configs;
    use crate::backend::cuda::program::support;
    use crate::element::DType;
    use crate::schedule::Operation;
    use crate::schedule::plan::plan;
    use crate::schedule::{Form, Hosts, Layout};

    #[test]
    fn what_is_chosen_over_hosts_runs_and_is_low_if_there_are_few_rows() {
        let hosts = Hosts::of(&["a", "b"]).unwrap();
        for operation in Operation::PRODUCTS {
            for [m, n, k] in [
                [1024, 106_496, 16_384],
                [4096, 16_384, 53_248],
                [16, 8192, 4096],
            ] {
                let problem = Problem {
                    hosts: hosts.clone(),
                    ..problem(operation, m, n, k)
                };
                // As long as the product.
                let product = 2.0 * m as f64 * n as f64 * k as f64 / 700e6;
                let network = network_bytes(&problem) as f64 / product;
                let config = over_hosts(&H200, &problem, Numerics::Fast, network);
                let route = if operation.sends_product() && m == 16 {
                    Route::Pull
                } else {
                    Route::Push
                };
                assert_eq!(config.route, route, "{operation} {m}");
                let most = if m < 4096 { 128 } else { 256 };
                assert!(config.entry_rows() <= most, "{operation} {m}: {config:?}");
                let fast = over_hosts(&H200, &problem, Numerics::Fast, 1e6);
                let is_wide = operation.sends_product() || m < 1024 || fast.entry_rows() == 256;
                assert!(is_wide, "{operation} {m}: {fast:?}");
                for rank in 0..2 {
                    let schedule = plan(&problem, rank, config).unwrap();
                    assert!(
                        support::check(&schedule).is_ok(),
                        "{operation} {m}: {config:?}"
                    );
                }
            }
        }
    }

    /// `places`: ranks of each of two hosts.
    fn chosen_over_hosts(
        operation: Operation,
        [m, n, k]: [usize; 3],
        places: usize,
        network: f64,
    ) -> Config {
        let hosts: Vec<usize> = (0..2 * places).map(|rank| rank / places).collect();
        let layout = Layout::balanced(m, k, 2 * places).unwrap();
        let problem = Problem {
            hosts: Hosts::of(&hosts).unwrap(),
            ..Problem::new(operation, DType::Bf16, layout, n)
        };
        over_hosts(&H200, &problem, Numerics::Fast, network)
    }

    #[test]
    fn tiles_of_a_gather_over_hosts_may_have_rows_of_several_ranks() {
        let config = chosen_over_hosts(Operation::ALL_GATHER_MATMUL, [256, 3328, 16_384], 8, 50e3);
        assert!(config.entry_rows() > 256 / 16, "{config:?}");
    }

    #[test]
    fn low_tiles_do_not_help_if_a_chunk_has_many_rows() {
        let config = chosen_over_hosts(
            Operation::ALL_GATHER_MATMUL,
            [1024, 14_336, 4096],
            1,
            3300.0,
        );
        assert!(config.entry_rows() >= 128, "{config:?}");
    }

    #[test]
    fn a_sum_of_few_rows_over_hosts_is_made_after_its_product() {
        let hosts: Vec<usize> = (0..8).map(|rank| rank / 4).collect();
        let rows = [(16, Route::Pull), (512, Route::Pull), (1024, Route::Push)];
        let both = Operation::SUMS.into_iter();
        for (operation, (m, route)) in both.flat_map(|of| rows.map(|rows| (of, rows))) {
            let layout = Layout::balanced(m, 3584, 8).unwrap();
            let problem = Problem {
                hosts: Hosts::of(&hosts).unwrap(),
                ..Problem::new(operation, DType::Bf16, layout, 8192)
            };
            let config = over_hosts(&H200, &problem, Numerics::Fast, 50e3);
            assert_eq!(config.route, route, "{operation} {m}");
            for rank in 0..8 {
                let schedule = plan(&problem, rank, config).unwrap();
                let is_supported = support::check(&schedule).is_ok();
                assert!(is_supported, "{operation} {m}: {config:?}");
            }
        }
    }

    fn problem(operation: Operation, m: usize, n: usize, k: usize) -> Problem {
        let layout = Layout::balanced(m, k, 2).unwrap();
        Problem::new(operation, DType::Bf16, layout, n)
    }

    #[test]
    fn ranks_that_send_sums_cut_them_alike_whatever_their_k() {
        let shapes = [[128, 256, 2, 1], [64, 128, 1, 4], [128, 128, 1, 2]];
        for (shape, route) in shapes
            .iter()
            .flat_map(|shape| [(shape, Route::Push), (shape, Route::Store)])
        {
            let alike = config(*shape, route, Chunking::new(1));
            let measured = Some(Measured { alike, exact: None });
            for operation in Operation::SUMS {
                for (m, n, k) in [64, 1600, 1792, 20_000]
                    .into_iter()
                    .flat_map(|k| [(48, 6144, k), (120, 2048, k), (4096, 4096, k)])
                    .chain([(512, 1792, 7168), (2048, 512, 14_336)])
                {
                    let problem = problem(operation, m, n, k);
                    let config = choose(&H200, &problem, Numerics::Fast, true, measured);
                    assert!(
                        partial_sums::agree(&problem, &config, &alike),
                        "{problem:?}"
                    );
                    assert_eq!(config.tile.k_slices, 1, "{k}");
                }
            }
        }
    }

    #[test]
    fn what_was_measured_for_the_very_problem_is_taken_unless_it_may_not_be() {
        let [alike, mut exact] =
            [Route::Push; 2].map(|route| config([128, 128, 1, 2], route, Chunking::new(2)));
        exact.tile.group_m += 1;
        let measured = Some(Measured {
            alike,
            exact: Some(exact),
        });
        for operation in Operation::PRODUCTS {
            let problem = problem(operation, 4096, 1792, 4096);
            let of = |numerics, pushes| choose(&H200, &problem, numerics, pushes, measured);
            assert_eq!(of(Numerics::Fast, true), exact);
            assert_eq!(of(Numerics::Invariant, true).tile.split_k, 1);
            assert_eq!(of(Numerics::Fast, false).route, Route::Pull);
        }
    }

    #[test]
    fn constant_weights_are_multiplied_by_as_many_ctas_as_there_are_multiprocessors() {
        let layout = Layout::new(&[8], 14_336).unwrap();
        let mut problem = Problem::new(Operation::MATMUL, DType::Bf16, layout, 4096);
        let ctas = |problem: &Problem| {
            let config = choose(&H200, problem, Numerics::Fast, true, None);
            Tiles::of(&H200, problem, &config).entries * config.tile.split_k
        };
        // 32 clusters of two. Clusters of four would need two waves.
        assert_eq!(ctas(&problem), 64);
        problem.form.constant_weights = true;
        // 32 tiles in four slices, without clusters.
        assert_eq!(ctas(&problem), 128);
    }

    #[test]
    fn for_a_part_of_the_device_a_kernel_is_chosen_that_fits_it_and_takes_longer() {
        let gated = Form {
            gated: true,
            ..Form::default()
        };
        let time = |rates: &Rates, problem: &Problem| {
            let config = choose(rates, problem, Numerics::Fast, true, None);
            let ctas = config.tile.ctas();
            assert!(ctas <= rates.multiprocessors, "{problem:?}: {config:?}");
            predict(rates, problem, &config).last().unwrap().micros
        };
        for operation in Operation::PRODUCTS {
            for [m, n, k] in [[6, 1792, 4096], [300, 1792, 4096], [4096, 1792, 8192]] {
                let plain = problem(operation, m, n, k);
                let gated = Problem {
                    form: gated.clone(),
                    ..plain.clone()
                };
                // Sums have no gates.
                let gated = (!operation.sends_product()).then_some(gated);
                for problem in [plain].into_iter().chain(gated) {
                    let [one, few, most, all] = [1, 7, 100, 132].map(|multiprocessors| {
                        let rates = Rates {
                            multiprocessors,
                            ..H200
                        };
                        time(&rates, &problem)
                    });
                    assert!(one > few && few > most && most >= all, "{problem:?}");
                }
            }
        }
    }

    #[test]
    fn slices_of_a_line_that_is_near_are_not_taken_over() {
        let mut alike = config([128, 128, 2, 1], Route::Pull, Chunking::new(1));
        alike.tile = alike.tile.with_k_slices(4);
        let measured = Some(Measured { alike, exact: None });
        for numerics in [Numerics::Fast, Numerics::Invariant] {
            for operation in [
                Operation::MATMUL_REDUCE_SCATTER,
                Operation::ALL_GATHER_MATMUL,
            ] {
                let problem = problem(operation, 4096, 4096, 1024);
                let config = choose(&H200, &problem, numerics, false, measured);
                assert_eq!(config.tile.k_slices, 1, "{operation}");
                assert_eq!(config.check_numerics(numerics), Ok(()));
            }
        }
    }

    #[test]
    fn each_kernel_is_chosen_for_some_shape() {
        // Evenly spread over the logarithms of the extents.
        let extent = |index: usize, stride: f64, least: f64, most: f64| {
            let fraction = (index as f64 * stride).fract();
            (least * (most / least).powf(fraction)) as usize
        };
        let mut unused: Vec<Config> = configs(
            H200.family,
            Config::new(H200.family.widest(), Chunking::new(1), Route::Pull),
            Variant::Forms,
            [DType::Bf16; 2],
            &Default::default(),
        )
        .collect();
        for index in 0..4000 {
            let m = extent(index, 0.819_172_513_396, 1.0, 16384.0);
            let n = 8 * extent(index, 0.671_043_606_704, 32.0, 3584.0);
            let k = 64 * extent(index, 0.549_700_477_902, 8.0, 448.0);
            for operation in [
                Operation::ALL_GATHER_MATMUL,
                Operation::MATMUL_REDUCE_SCATTER,
            ] {
                let problem = problem(operation, m, n, k);
                let tile = choose(&H200, &problem, Numerics::Fast, true, None).tile;
                let kernel = tile
                    .with_k_slices(1)
                    .with_group_m(H200.family.widest().group_m);
                unused.retain(|config| config.tile != kernel);
            }
        }
        assert_eq!(unused, []);
    }
}
