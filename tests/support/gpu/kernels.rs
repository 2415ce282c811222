//! The kernels, and problems that are likely to break one.

use std::sync::LazyLock;

use gemmesh::testing::{Variant, with_each_kernel};
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, DType};
use rand::RngExt;
use rand::rngs::StdRng;

use super::{Case, ROUTES};

/// A configuration for every kernel of elements of 16 bits, and for some with K in slices.
pub static SHAPES: LazyLock<Vec<Config>> = LazyLock::new(|| shapes_of([DType::Bf16; 2]));

/// A configuration for every kernel for these types of `a` and `b`, and for some with K in slices.
pub fn shapes_of(dtypes: [DType; 2]) -> Vec<Config> {
    let base = Config::new(
        TileShape::new(0, 0, 0)
            .with_stages(0)
            .with_cluster(0, 1)
            .with_split_k(0),
        Chunking::new(1),
        Route::Pull,
    );
    let mut shapes = with_each_kernel(&base, Variant::Forms, dtypes);
    let mut counts = [2, 4, 3, 7].into_iter().cycle();
    let whole = shapes.iter().filter(|config| config.tile.split_k == 1);
    let sliced: Vec<Config> = whole
        .zip(&mut counts)
        .map(|(config, count)| {
            let tile = config.tile.with_k_slices(count);
            Config::new(tile, config.chunking, config.route)
        })
        .collect();
    shapes.extend(sliced);
    shapes
}

/// Configurations of sums: each kernel of this variant for elements of 16 bits, with K in so many parts.
pub fn configs_of_sums(variant: Variant, route: Route, parts: usize) -> Vec<Config> {
    sums_of([DType::Bf16; 2], variant, route, parts)
}

/// The same for these types of `a` and `b`.
pub fn sums_of(dtypes: [DType; 2], variant: Variant, route: Route, parts: usize) -> Vec<Config> {
    let base = Config::new(TileShape::new(128, 128, 64), Chunking::new(1), route);
    let mut configs = with_each_kernel(&base, variant, dtypes);
    configs.retain(|config| config.tile.split_k == parts);
    configs
}

pub fn config(shape: usize, group_m: usize, chunks: usize) -> Config {
    Config::new(
        SHAPES[shape % SHAPES.len()].tile.with_group_m(group_m),
        Chunking::new(chunks).with_cut_last(chunks.is_multiple_of(2)),
        ROUTES[shape % ROUTES.len()],
    )
}

/// Half of the time one of the extents that are likely to break something.
pub fn extent(random: &mut StdRng, special: &[usize], most: usize) -> usize {
    if random.random_bool(0.5) {
        special[random.random_range(0..special.len())]
    } else {
        random.random_range(1..=most)
    }
}

/// The same on every rank.
pub fn random_case(random: &mut StdRng, world: usize, index: usize) -> Case {
    let (m, n, k) = loop {
        let m = extent(
            random,
            &[
                1, 2, 3, 7, 64, 97, 127, 128, 129, 131, 251, 255, 256, 257, 383, 385, 509, 511,
                512, 513, 640,
            ],
            700,
        );
        let n = extent(
            random,
            &[
                1, 2, 7, 8, 9, 31, 63, 64, 65, 79, 81, 95, 97, 111, 113, 127, 128, 129, 159, 161,
                191, 193, 207, 208, 209, 223, 225, 255, 256, 257, 385, 416, 449, 511, 513, 600,
            ],
            600,
        );
        let k = 8 * extent(random, &[1, 2, 7, 8, 9, 15, 16, 17, 24, 32, 33, 64, 65], 87);
        if m * n * k <= 20_000_000 {
            break (m, n, k);
        }
    };
    let rows = if random.random_bool(0.5) {
        // Anywhere, and often the same place twice: a rank without rows.
        let mut cuts: Vec<usize> = (1..world).map(|_| random.random_range(0..=m)).collect();
        if world > 2 && random.random_bool(0.3) {
            cuts[0] = cuts[1];
        }
        cuts.extend([0, m]);
        cuts.sort();
        cuts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    } else {
        let split = |rank| m / world + usize::from(rank < m % world);
        (0..world).map(split).collect()
    };
    // Every kernel in turn, then the default.
    let shape = index / 2 % (SHAPES.len() + 1);
    let route = ROUTES[random.random_range(0..ROUTES.len())];
    let (group_m, chunks) = (random.random_range(1..=8), random.random_range(1..=5));
    Case {
        rows,
        n,
        more: [0, 0, 1, 8, 72][random.random_range(0..5)],
        k,
        bias: random.random_bool(0.5),
        config: (shape < SHAPES.len()).then(|| config(shape, group_m, chunks).with_route(route)),
        seed: random.random(),
        ..Case::default()
    }
}
