//! Products of fp8 by each kernel, with scales of each kind.

use gemmesh::elements::{AddendOf, Element, Number, OutputOf, WeightOf};
use gemmesh::fp8::{Accumulation, Scales, Scaling, ShardedScales};
use gemmesh::products::Operand;
use gemmesh::testing::Variant;
use gemmesh::tuning::Route;
use gemmesh::{
    Activation, AllGatherMatmul, Config, Cuda, DType, Error, F8E4M3, F8E5M2, Group, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, bf16, f16,
};
use rand::RngExt;

use crate::support::errors::is_unsupported;
use crate::support::gpu::*;
use crate::support::numbers::{nan, normal, rng};
use crate::test_name;

const E4M3: [DType; 2] = [DType::F8E4M3; 2];
/// Columns of K that are promoted together, and that a scale of a block is for.
const PART: usize = 128;

/// A product of one rank.
#[derive(Clone, Copy, Debug)]
struct Product {
    m: usize,
    n: usize,
    k: usize,
    scaling: [Scaling; 2],
    bias: bool,
    residual: bool,
    activation: Activation,
    gated: bool,
    accumulation: Accumulation,
    config: Option<Config>,
    seed: u64,
}

/// The scales of `a`, or of a weight of `rows` rows.
struct Scaled {
    scaling: Scaling,
    shape: [usize; 2],
    values: Vec<f32>,
}

impl Scaled {
    fn new(scaling: Scaling, is_weight: bool, rows: usize, k: usize, seed: u64) -> Scaled {
        let [first_row, first_column] = place(scaling);
        let blocks = (first_column + k).div_ceil(PART);
        let shape = match (scaling, is_weight) {
            (Scaling::None | Scaling::Tensor, _) => [1, 1],
            (Scaling::Rows, _) => [1, rows],
            (Scaling::TransposedBlocks, _) => [blocks, rows],
            (_, true) => [(first_row + rows).div_ceil(PART), blocks],
            (_, false) => [rows, blocks],
        };
        let values: Vec<f32> = normal(seed, shape[0] * shape[1]);
        let values = values.into_iter().map(|x| 0.5 + x.abs()).collect();
        Scaled {
            scaling,
            shape,
            values,
        }
    }

    fn of_row(&self, row: usize, block: usize) -> f64 {
        let [row, column] = self.scaling.place_of_row(row, block);
        self.at(row, column)
    }

    fn of_column(&self, n: usize, block: usize) -> f64 {
        let [row, column] = self.scaling.place_of_column(n, block);
        self.at(row, column)
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        match self.scaling {
            Scaling::None => 1.0,
            _ => self.values[row * self.shape[1] + column].into(),
        }
    }

    fn place(&self, group: &Group<Cuda>) -> Result<Matrix<Cuda, f32>, Error> {
        let [rows, columns] = self.shape;
        group.upload(&self.values, rows, columns)
    }

    fn bind<'a, T: Element>(
        &self,
        values: &'a Matrix<Cuda, T>,
        placed: &'a Matrix<Cuda, f32>,
    ) -> Operand<'a, Cuda, T> {
        match self.scaling {
            Scaling::None => values.into(),
            Scaling::Tensor => values.scaled(Scales::tensor(placed)),
            Scaling::Rows => values.scaled(Scales::rows(placed)),
            Scaling::TransposedBlocks => values.scaled(Scales::transposed_blocks(placed)),
            scaling => {
                let [row, column] = place(scaling);
                values.scaled(Scales::blocks(placed).first_row(row).first_column(column))
            }
        }
    }
}

/// The row and the column of its first block at which an operand begins.
fn place(scaling: Scaling) -> [usize; 2] {
    match scaling {
        Scaling::BlocksFrom { row, column } => [row, column],
        _ => [0, 0],
    }
}

/// What an element must be, and by how much it may be off.
#[derive(Clone, Copy)]
struct Exact {
    value: f64,
    off: f64,
}

impl Exact {
    /// Rounded to f32.
    fn rounded(self) -> Exact {
        let off = self.off + self.value.abs() * 2f64.powi(-23);
        Exact { off, ..self }
    }

    fn plus(self, other: f64) -> Exact {
        let value = self.value + other;
        Exact { value, ..self }.rounded()
    }

    /// No activation is steeper than 1.2.
    fn activated(self, activation: Activation) -> Exact {
        let value = activation.apply(self.value as f32).into();
        let off = self.off * 1.2 + 1e-6;
        Exact { value, off }.rounded()
    }

    fn times(self, other: Exact) -> Exact {
        let off =
            self.off * other.value.abs() + other.off * self.value.abs() + self.off * other.off;
        Exact {
            value: self.value * other.value,
            off,
        }
        .rounded()
    }
}

/// The matrices of a product on the host.
struct Values<T, W, V> {
    a: Vec<T>,
    weights: Vec<Vec<W>>,
    of_a: Scaled,
    of_b: Vec<Scaled>,
    bias: Vec<V>,
    residual: Vec<V>,
}

impl Product {
    fn values<T: Element, W: Element, V: Number>(&self) -> Values<T, W, V> {
        let &Product { m, n, k, seed, .. } = self;
        let weights = 0..1 + u64::from(self.gated);
        let [of_a, of_b] = self.scaling;
        Values {
            a: normal(seed, m * k),
            weights: weights
                .clone()
                .map(|w| normal(seed + 1 + w, n * k))
                .collect(),
            of_a: Scaled::new(of_a, false, m, k, seed + 3),
            of_b: weights
                .map(|w| Scaled::new(of_b, true, n, k, seed + 4 + w))
                .collect(),
            bias: normal(seed + 6, 2 * n),
            residual: normal(seed + 7, m * n),
        }
    }

    /// Runs it, and returns its bits.
    fn run<T, W, O, V>(&self, group: &Group<Cuda>) -> Result<Vec<O>, Error>
    where
        T: Element,
        W: WeightOf<T>,
        O: OutputOf<T>,
        V: AddendOf<T>,
    {
        let &Product { m, n, k, .. } = self;
        let values = self.values::<T, W, V>();
        let a = group.upload(&values.a, m, k)?;
        let of_a = values.of_a.place(group)?;
        let weights = values.weights.iter().map(|b| group.upload(b, n, k));
        let weights = weights.collect::<Result<Vec<_>, Error>>()?;
        let of_b = values.of_b.iter().map(|scales| scales.place(group));
        let of_b = of_b.collect::<Result<Vec<_>, Error>>()?;
        let columns = values.weights.len() * n;
        let bias = group.upload(&values.bias[..columns], 1, columns)?;
        let residual = group.upload(&values.residual, m, n)?;
        let mut out = group.upload::<O>(&vec![nan(); m * n], m, n)?;
        let mut operation = Matmul::new()
            .activation(self.activation)
            .accumulation(self.accumulation);
        if self.gated {
            operation = operation.gated();
        }
        if self.bias {
            operation = operation.bias(&bias);
        }
        if self.residual {
            operation = operation.residual(&residual);
        }
        if let Some(config) = self.config {
            operation = operation.config(config);
        }
        let operands = values.of_b.iter().zip(&weights).zip(&of_b);
        let operands = operands.map(|((scales, b), placed)| scales.bind(b, placed));
        let operands: gemmesh::products::Weights<_, T> = operands.collect();
        operation.run(values.of_a.bind(&a, &of_a), operands, &mut out)?;
        out.to_vec()
    }

    /// An element of a weight's product.
    ///
    /// A part of 128 columns is off by what the tensor cores drop, 2⁻¹² of the sum of its terms' absolute values at the
    /// most, and the rest of the sum by what f32 rounds. Fast sums drop 2⁻¹³ with each 32 columns, and once more.
    fn exact<T: Element, W: Element, V: Number>(
        &self,
        values: &Values<T, W, V>,
        weight: usize,
        [row, column]: [usize; 2],
    ) -> Exact {
        let k = self.k;
        let (of_a, of_b) = (&values.of_a, &values.of_b[weight]);
        let (mut value, mut size) = (0.0, 0.0);
        let [_, first] = place(of_a.scaling);
        let a = &values.a[row * k..][..k];
        let b = &values.weights[weight][column * k..][..k];
        for (index, (a, b)) in a.iter().zip(b).enumerate() {
            let block = (first + index) / PART;
            let scale = of_a.of_row(row, block) * of_b.of_column(column, block);
            let term = f64::from(a.to_f32() * b.to_f32()) * scale;
            value += term;
            size += term.abs();
        }
        let dropped = match self.accumulation {
            Accumulation::Fast => (k / 32 + 1) as f64 * 2f64.powi(-13),
            _ => 2f64.powi(-12),
        };
        let off = size * (dropped + (k / PART + 4) as f64 * 2f64.powi(-23));
        Exact { value, off }
    }

    /// Checks some of the elements, those at the edges among them. Returns the worst error as a share of the allowed one.
    fn check<T, W, O, V>(&self, found: &[O]) -> f64
    where
        T: Element,
        W: WeightOf<T>,
        O: OutputOf<T>,
        V: AddendOf<T>,
    {
        const STRIDE: usize = 13;
        let n = self.n;
        let values = self.values::<T, W, V>();
        let mut worst = 0f64;
        let last = found.len() - n;
        let chosen = (0..found.len()).step_by(STRIDE).chain(last..found.len());
        for index in chosen {
            let place = [index / n, index % n];
            let bias = |of: usize| match self.bias {
                true => f64::from(values.bias[of * n + place[1]].to_f32()),
                false => 0.0,
            };
            let mut exact = self.exact(&values, 0, place).plus(bias(0));
            exact = exact.activated(self.activation);
            if self.gated {
                exact = exact.times(self.exact(&values, 1, place).plus(bias(1)));
            }
            if self.residual {
                exact = exact.plus(values.residual[index].to_f32().into());
            }
            let Exact { value, off } = exact;
            let least = 2f64.powi(O::MIN_EXPONENT);
            let exponent = (value.abs() + off).max(least).log2().floor() as i32;
            let allowed = off + 2f64.powi(exponent - O::DIGITS);
            let most = if O::DTYPE == DType::F8E4M3 {
                448.0
            } else {
                f64::MAX
            };
            let share =
                (f64::from(found[index].to_f32()) - value.clamp(-most, most)).abs() / allowed;
            assert!(
                share <= 1.0,
                "{self:?}: {place:?} is {} and not {value}, within {allowed}",
                found[index].to_f32(),
            );
            worst = worst.max(share);
        }
        worst
    }

    /// Runs it with an output of some type, and checks it.
    fn verify<T, W>(&self, group: &Group<Cuda>, turn: usize) -> Result<f64, Error>
    where
        T: Element,
        W: WeightOf<T>,
        bf16: OutputOf<T> + AddendOf<T>,
        f16: OutputOf<T>,
        f32: OutputOf<T>,
        F8E4M3: OutputOf<T>,
    {
        let is_plain = !self.bias && !self.residual;
        Ok(match turn % 4 {
            0 => self.check::<T, W, bf16, bf16>(&self.run::<T, W, bf16, bf16>(group)?),
            1 => self.check::<T, W, f32, bf16>(&self.run::<T, W, f32, bf16>(group)?),
            2 => self.check::<T, W, F8E4M3, bf16>(&self.run::<T, W, F8E4M3, bf16>(group)?),
            _ if is_plain => self.check::<T, W, f16, bf16>(&self.run::<T, W, f16, bf16>(group)?),
            _ => self.check::<T, W, bf16, bf16>(&self.run::<T, W, bf16, bf16>(group)?),
        })
    }
}

/// Scales of each kind, of `a` and of `b`.
const SCALINGS: [[Scaling; 2]; 11] = [
    [Scaling::None, Scaling::None],
    [Scaling::Blocks, Scaling::Blocks],
    [Scaling::Tensor, Scaling::Tensor],
    [Scaling::TransposedBlocks, Scaling::blocks_from(48, 0)],
    [Scaling::Rows, Scaling::Rows],
    [Scaling::Blocks, Scaling::blocks_from(112, 0)],
    [Scaling::Tensor, Scaling::Rows],
    [Scaling::TransposedBlocks, Scaling::Blocks],
    [Scaling::blocks_from(0, 64), Scaling::blocks_from(0, 64)],
    [Scaling::blocks_from(0, 112), Scaling::blocks_from(48, 112)],
    [Scaling::blocks_from(0, 16), Scaling::blocks_from(112, 16)],
];

/// Runs products of random shapes and forms by each kernel for these types.
fn verify_each_kernel<T, W>(test: &str, dtypes: [DType; 2], rounds: usize)
where
    T: Element,
    W: WeightOf<T>,
    bf16: OutputOf<T> + AddendOf<T>,
    f16: OutputOf<T>,
    f32: OutputOf<T>,
    F8E4M3: OutputOf<T>,
{
    all_done(ranks(test, 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut random = rng(8);
        let mut worst = 0f64;
        let shapes = shapes_of(dtypes);
        for (index, config) in shapes
            .iter()
            .cycle()
            .take(rounds * shapes.len())
            .enumerate()
        {
            // Of a prime number of turns, each kernel meets another scaling and another form.
            let turn = index + index / shapes.len() * 3;
            let gated = turn % 5 == 2 && config.tile.k_slices == 1 && config.tile.split_k < 8;
            let product = Product {
                m: extent(&mut random, &[1, 8, 63, 64, 65, 128, 129, 200], 260),
                n: 16 * extent(&mut random, &[1, 4, 8, 9, 16, 17], 20),
                k: 16 * extent(&mut random, &[1, 8, 9, 40, 72], 80),
                scaling: SCALINGS[turn % SCALINGS.len()],
                bias: turn % 3 == 1,
                residual: turn % 7 == 3,
                activation: match turn % 4 {
                    3 => Activation::Silu,
                    _ => Activation::Identity,
                },
                gated,
                accumulation: Accumulation::Promoted,
                config: Some(config.with_route(Route::Pull)),
                seed: 100 * index as u64,
            };
            match product.verify::<T, W>(&group, turn) {
                Ok(share) => worst = worst.max(share),
                // Narrow tiles are not gated.
                Err(error) if is_unsupported(&error) && gated => (),
                Err(error) => return Err(error),
            }
        }
        Ok(format!("worst error {worst:.3} of allowed"))
    }));
}

#[test]
fn products_of_fp8_are_those_of_float64_by_every_kernel() {
    let Some(_leave) = gpu() else { return };
    verify_each_kernel::<F8E4M3, F8E4M3>(test_name!(), E4M3, 8);
}

#[test]
fn products_of_e4m3_and_e5m2_are_those_of_float64_by_every_kernel() {
    let Some(_leave) = gpu() else { return };
    verify_each_kernel::<F8E4M3, F8E5M2>(test_name!(), [DType::F8E4M3, DType::F8E5M2], 8);
}

#[test]
fn products_of_e5m2_and_e4m3_are_those_of_float64_by_every_kernel() {
    let Some(_leave) = gpu() else { return };
    verify_each_kernel::<F8E5M2, F8E4M3>(test_name!(), [DType::F8E5M2, DType::F8E4M3], 8);
}

/// A product without forms.
fn plain([m, n, k]: [usize; 3], scaling: [Scaling; 2], seed: u64) -> Product {
    Product {
        m,
        n,
        k,
        scaling,
        bias: false,
        residual: false,
        activation: Activation::Identity,
        gated: false,
        accumulation: Accumulation::Promoted,
        config: None,
        seed,
    }
}

#[test]
fn fast_sums_of_fp8_are_those_of_float64_to_fewer_bits() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut random = rng(10);
        let (mut worst, mut differ) = (0f64, 0);
        for (turn, config) in shapes_of(E4M3).into_iter().enumerate() {
            let shape = [
                extent(&mut random, &[1, 64, 128], 260),
                16 * extent(&mut random, &[1, 8, 17], 20),
                16 * extent(&mut random, &[1, 8, 200], 256),
            ];
            let scaling = SCALINGS[turn % SCALINGS.len()];
            let promoted = Product {
                config: Some(config),
                bias: turn % 3 == 1,
                ..plain(shape, scaling, turn as u64)
            };
            let fast = Product {
                accumulation: Accumulation::Fast,
                ..promoted
            };
            let found = fast.run::<F8E4M3, F8E4M3, f32, bf16>(&group)?;
            worst = worst.max(fast.check::<F8E4M3, F8E4M3, f32, bf16>(&found));
            let same = found == promoted.run::<F8E4M3, F8E4M3, f32, bf16>(&group)?;
            // Blocks are summed separately, and so are the sums of wide tiles.
            if scaling[0].has_blocks() || config.tile.n > 176 {
                assert!(same, "{config:?}");
            }
            differ += usize::from(!same);
        }
        assert!(differ > 10, "{differ}");
        Ok(format!(
            "worst error {worst:.3} of allowed, {differ} differ"
        ))
    }));
}

#[test]
fn fast_sums_are_right_by_choice_and_promoted_where_bits_depend_on_k_alone() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let alike = invariant(&beside_the_host(rank))?;
        for (turn, shape) in [[1, 512, 1024], [300, 4096, 512], [2000, 2048, 1024]]
            .into_iter()
            .enumerate()
        {
            let product = Product {
                accumulation: Accumulation::Fast,
                ..plain(shape, [Scaling::Tensor; 2], turn as u64)
            };
            product.verify::<F8E4M3, F8E4M3>(&group, turn)?;
            let fast = product.run::<F8E4M3, F8E4M3, f32, bf16>(&alike)?;
            let promoted = plain(shape, product.scaling, product.seed);
            let promoted = promoted.run::<F8E4M3, F8E4M3, f32, bf16>(&alike)?;
            assert!(fast == promoted, "{shape:?}");
        }
        Ok(String::new())
    }));
}

#[test]
fn every_kernel_gives_the_same_bits_of_fp8() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for scaling in SCALINGS {
            let product = plain([150, 272, 1040], scaling, 5);
            let by = |config| {
                let product = Product { config, ..product };
                product.run::<F8E4M3, F8E4M3, f32, bf16>(&group)
            };
            let whole = |config: &&Config| config.tile.split_k * config.tile.k_slices == 1;
            let shapes = shapes_of(E4M3);
            let mut configs = shapes.iter().filter(whole);
            let expected = by(configs.next().copied())?;
            for config in configs {
                let found = by(Some(*config))?;
                let differ = found
                    .iter()
                    .zip(&expected)
                    .filter(|(x, y)| x.to_bits() != y.to_bits());
                assert_eq!(differ.count(), 0, "{scaling:?} {config:?}");
            }
        }
        Ok(String::new())
    }));
}

#[test]
fn what_the_library_chooses_for_fp8_is_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let mut random = rng(9);
        for turn in 0..60 {
            let shape = [
                extent(&mut random, &[1, 16, 64, 512], 700),
                16 * random.random_range(1..60),
                16 * random.random_range(1..200),
            ];
            let product = plain(shape, SCALINGS[turn % SCALINGS.len()], turn as u64);
            product.verify::<F8E4M3, F8E4M3>(&group, turn)?;
        }
        Ok(String::new())
    }));
}

/// Compares a gather and its product with the product of the gathered rows.
fn gathered(group: &Group<Cuda>, seed: u64, route: Option<Route>) -> Result<(), Error> {
    let world = group.world_size();
    let mut random = rng(seed);
    let rows: Vec<usize> = (0..world).map(|_| random.random_range(0..50)).collect();
    let m: usize = rows.iter().sum();
    let (n, k) = (
        16 * random.random_range(1..9),
        16 * random.random_range(1..90),
    );
    let values: Vec<F8E4M3> = normal(seed, m * k);
    let scaled = |scaling, is_weight, rows, seed| Scaled::new(scaling, is_weight, rows, k, seed);
    let [of_a, of_b] = SCALINGS[seed as usize % SCALINGS.len()];
    let of_a = scaled(of_a, false, m, seed + 1);
    let of_b = scaled(of_b, true, n, seed + 2 + group.rank() as u64);
    let whole = group.upload(&values, m, k)?;
    let b = group.upload(
        &normal::<F8E4M3>(seed + 50 + group.rank() as u64, n * k),
        n,
        k,
    )?;
    let (placed_a, placed_b) = (of_a.place(group)?, of_b.place(group)?);
    let b = of_b.bind(&b, &placed_b);
    let mut expected = group.zeros::<bf16>(m, n)?;
    Matmul::new().run(of_a.bind(&whole, &placed_a), b, &mut expected)?;

    let mut a = group.sharded_rows::<F8E4M3>(&rows, k)?;
    let own = a.rows();
    a.poison(nan())?;
    a.shard_mut()
        .copy_from_host(&values[own.start * k..own.end * k])?;
    let mut out = group.upload::<bf16>(&vec![nan(); m * n], m, n)?;
    let mut operation = AllGatherMatmul::new();
    if let Some(route) = route {
        let prepared = Matmul::<_, F8E4M3>::new().prepare((group, [m.max(1), k]), n)?;
        let chunks = 1 + seed as usize % 3;
        let chunking = gemmesh::tuning::Chunking::new(chunks).with_cut_last(seed.is_multiple_of(2));
        operation = operation.config(Config::new(prepared.config().tile, chunking, route));
    }
    let (scales, columns) = match of_a.scaling {
        Scaling::Blocks => (
            k.div_ceil(PART),
            ShardedScales::<Cuda>::columns_of_blocks(k),
        ),
        Scaling::Rows => (1, ShardedScales::<Cuda>::columns_of_rows()),
        _ => (0, 4),
    };
    let mut sharded = group.sharded_rows::<f32>(&rows, columns)?;
    sharded.poison(f32::NAN)?;
    if scales > 0 {
        let mut padded = vec![f32::NAN; own.len() * columns];
        let values = of_a.values[own.start * scales..own.end * scales].chunks(scales);
        for (row, values) in padded.chunks_mut(columns).zip(values) {
            row[..scales].copy_from_slice(values);
        }
        sharded.shard_mut().copy_from_host(&padded)?;
        let scales = match of_a.scaling {
            Scaling::Rows => ShardedScales::rows(&sharded),
            _ => ShardedScales::blocks(&sharded),
        };
        operation.run(a.scaled(scales), b, &mut out)?;
    } else {
        let scaled = match of_a.scaling {
            Scaling::None => (&a).into(),
            Scaling::Tensor => a.scaled(Scales::tensor(&placed_a)),
            Scaling::TransposedBlocks => a.scaled(Scales::transposed_blocks(&placed_a)),
            scaling => {
                let [_, column] = place(scaling);
                a.scaled(Scales::blocks(&placed_a).first_column(column))
            }
        };
        operation.run(scaled, b, &mut out)?;
    }
    let bits = |values: Vec<bf16>| values.into_iter().map(bf16::to_bits).collect::<Vec<_>>();
    assert!(
        bits(out.to_vec()?) == bits(expected.to_vec()?),
        "seed {seed}, {route:?}, {rows:?}, {n}, {k}, {:?}",
        of_a.scaling
    );
    Ok(())
}

#[test]
fn gathers_of_fp8_have_the_bits_of_gather_then_matmul() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 3, |rank| {
        let group = invariant(rank)?;
        for seed in 0..32 {
            let route = ROUTES.get(seed as usize / 8).copied();
            gathered(&group, seed, route)?;
        }
        Ok(String::new())
    }));
}

/// Scatters sums of some type, and compares this rank's with these sums [m, n].
fn scattered<O: OutputOf<F8E4M3>>(
    group: &Group<Cuda>,
    config: Option<Config>,
    [a, b]: [Operand<Cuda, F8E4M3>; 2],
    (sums, [m, n]): (&[f32], [usize; 2]),
) -> Result<(), Error> {
    let mut scatter = MatmulReduceScatter::new();
    if let Some(config) = config {
        scatter = scatter.config(config);
    }
    let mut out = group.upload::<O>(&vec![nan(); m * n], m, n)?;
    scatter.run(a, b, &mut out)?;
    let bits = |x: O| x.to_f32().to_bits();
    let differ = |(&found, &sum): (&O, &f32)| bits(found) != bits(O::from_f32(sum));
    let differ = out
        .to_vec()?
        .iter()
        .zip(sums)
        .filter(|&pair| differ(pair))
        .count();
    assert_eq!(differ, 0, "{} scattered, {config:?}, {m} {n}", O::DTYPE);
    Ok(())
}

/// Compares sums over ranks with the rounded partials, added in the order of the ranks.
fn summed(group: &Group<Cuda>, seed: u64, config: Option<Config>) -> Result<(), Error> {
    let (world, rank) = (group.world_size(), group.rank());
    let mut random = rng(seed);
    let most = if config.is_some_and(|config| config.tile.m <= 64) {
        60
    } else {
        300
    };
    let m = random.random_range(1..=most);
    let n = 16 * random.random_range(1..20);
    let scaling = SCALINGS[seed as usize % SCALINGS.len()];
    let of_rank = |rank: usize| Product {
        config: None,
        ..plain(
            [m, n, 16 * (20 + 7 * rank)],
            scaling,
            1000 * seed + rank as u64 * 10,
        )
    };
    let mut sums = vec![0f32; m * n];
    for rank in 0..world {
        let partial = of_rank(rank).run::<F8E4M3, F8E4M3, bf16, bf16>(group)?;
        for (sum, partial) in sums.iter_mut().zip(partial) {
            *sum = if rank == 0 {
                partial.to_f32()
            } else {
                *sum + partial.to_f32()
            };
        }
    }
    let expected: Vec<bf16> = sums.iter().copied().map(bf16::from_f32).collect();

    let Product { k, .. } = of_rank(rank);
    let values = of_rank(rank).values::<F8E4M3, F8E4M3, bf16>();
    let a = group.upload(&values.a, m, k)?;
    let b = group.upload(&values.weights[0], n, k)?;
    let (of_a, of_b) = (values.of_a.place(group)?, values.of_b[0].place(group)?);
    let (a, b) = (values.of_a.bind(&a, &of_a), values.of_b[0].bind(&b, &of_b));
    let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let mut reduce = MatmulAllReduce::new();
    if let Some(config) = config {
        reduce = reduce.config(config);
    }
    let mut all = group.sharded::<bf16>(m, n)?;
    all.poison(nan())?;
    let own = all.rows();
    let own = (&sums[own.start * n..own.end * n], [own.len(), n]);
    match seed % 4 {
        0 => scattered::<f16>(group, config, [a, b], own)?,
        1 => scattered::<f32>(group, config, [a, b], own)?,
        2 => scattered::<F8E4M3>(group, config, [a, b], own)?,
        _ => scattered::<bf16>(group, config, [a, b], own)?,
    }
    reduce.run(a, b, &mut all)?;
    group.synchronize()?;
    assert!(
        bits(&all.to_vec()?) == bits(&expected),
        "reduced, seed {seed}, {config:?}, {m} {n}"
    );
    Ok(())
}

#[test]
fn sums_of_fp8_are_those_of_their_rounded_partials() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 3, |rank| {
        let group = invariant(rank)?;
        let sums = ROUTES
            .into_iter()
            .flat_map(|route| sums_of(E4M3, Variant::Sums, route, 1));
        let low = sums_of(E4M3, Variant::LowLatency, Route::Store, 1);
        let behind = sums_of(E4M3, Variant::Forms, Route::Store, 1);
        let behind = behind
            .into_iter()
            .map(|config| config.with_product_first(true));
        let configs = sums.chain(low).chain(behind).map(Some);
        for (seed, config) in configs.chain([None; 16]).enumerate() {
            summed(&group, seed as u64, config)?;
        }
        Ok(String::new())
    }));
}

crate::support::shared::on_backend! {
    Cuda, gpu();
    fp8 {
        parts_of_k_that_begin_inside_a_block_are_summed_up
    }
    quantized {
        quantized_rows_have_the_bits_of_plain_loops
        every_kind_of_number_is_quantised
        rows_are_quantised_into_the_next_gathers_input
        prepared_calls_quantise_as_they_were_prepared
        wrong_arguments_of_quantize_are_refused
    };
}
