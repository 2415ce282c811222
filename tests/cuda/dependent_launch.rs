//! Kernels that begin before the kernel in front of them has ended.

use gemmesh::testing::ranks_share_gpus;
use gemmesh::{
    Config, Cuda, Group, Matmul, MatmulAllReduce, Matrix, Result, ShardedMatrix, bf16, matmul,
};

use crate::support::gpu::*;
use crate::support::numbers::{bits, nan, normal};
use crate::test_name;

const WIDTH: usize = 584;

/// Products one after the other. Each reads what the one in front of it writes, and writes what that one reads.
struct Chain {
    group: Group<Cuda>,
    input: Matrix<Cuda, bf16>,
    pair: [Matrix<Cuda, bf16>; 2],
    weights: Vec<Matrix<Cuda, bf16>>,
    bias: Matrix<Cuda, bf16>,
}

impl Chain {
    fn new(group: &Group<Cuda>, m: usize) -> Result<Chain> {
        let input = group.upload(&normal(1, m * WIDTH), m, WIDTH)?;
        let weight = |seed| group.upload(&normal(seed, WIDTH * WIDTH), WIDTH, WIDTH);
        Ok(Chain {
            group: group.clone(),
            input,
            pair: [group.zeros(m, WIDTH)?, group.zeros(m, WIDTH)?],
            weights: (2..7).map(weight).collect::<Result<_>>()?,
            bias: group.upload(&normal(7, WIDTH), 1, WIDTH)?,
        })
    }

    /// Enqueues the products. `each` is called after each of them.
    fn run(
        &mut self,
        config: Config,
        constant_weights: bool,
        each: impl Fn(&Group<Cuda>) -> Result<()>,
    ) -> Result<()> {
        for (number, weight) in self.weights.iter().enumerate() {
            let [from, to] = &mut self.pair;
            let (from, to) = match number % 2 {
                0 => (to, from),
                _ => (from, to),
            };
            let from = if number == 0 { &self.input } else { &*from };
            let mut product = Matmul::new().config(config);
            if constant_weights {
                product = product.constant_weights();
            }
            // A kernel for products alone, or for plain ones if K is cut into slices, and that of all forms.
            if number >= 3 {
                product = product.bias(&self.bias).residual(&self.input);
            }
            product.run(from, weight, to)?;
            each(&self.group)?;
        }
        Ok(())
    }

    fn poison(&mut self) -> Result<()> {
        for matrix in &mut self.pair {
            let [m, n] = matrix.shape();
            matrix.copy_from_host(&vec![nan(); m * n])?;
        }
        Ok(())
    }

    /// The outputs of the last two products.
    fn outputs(&self) -> Result<[Vec<bf16>; 2]> {
        let [one, other] = &self.pair;
        Ok([one.to_vec()?, other.to_vec()?])
    }

    /// Checks that the products have the same bits one after the other as apart.
    fn check(&mut self, config: Config) -> Result<()> {
        let same = |outputs: [Vec<bf16>; 2], expected: &[Vec<bf16>; 2]| {
            let pairs = outputs.iter().zip(expected);
            pairs
                .into_iter()
                .all(|(one, other)| bits(one) == bits(other))
        };
        self.poison()?;
        self.run(config, false, |group| group.synchronize())?;
        let expected = self.outputs()?;
        assert!(expected.iter().flatten().all(|x| x.to_f32().is_finite()));
        for constant_weights in [false, true] {
            let what = format!("{config:?}, constant weights: {constant_weights}");
            self.poison()?;
            for _ in 0..5 {
                self.run(config, constant_weights, |_| Ok(()))?;
            }
            assert!(same(self.outputs()?, &expected), "calls, {what}");
            self.poison()?;
            let group = self.group.clone();
            let replay = Replay::capture(&group, RELAXED, || {
                for _ in 0..3 {
                    self.run(config, constant_weights, |_| Ok(())).unwrap();
                }
            });
            for _ in 0..5 {
                replay.launch();
            }
            group.synchronize()?;
            assert!(same(self.outputs()?, &expected), "a graph, {what}");
        }
        Ok(())
    }
}

#[test]
fn chained_products_have_the_bits_of_products_apart_by_each_kernel() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for m in [3, 211] {
            let mut chain = Chain::new(&group, m)?;
            for config in SHAPES.iter() {
                chain.check(*config)?;
            }
        }
        Ok(format!("{} kernels", SHAPES.len()))
    }));
}

#[test]
fn weights_that_a_product_makes_are_read_when_it_has_ended() {
    let Some(_leave) = gpu() else { return };
    const N: usize = 4096;
    const K: usize = 1024;
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let (a, factor) = (normal::<bf16>(1, 4 * K), normal::<bf16>(2, N * 64));
        let (a, factor) = (group.upload(&a, 4, K)?, group.upload(&factor, N, 64)?);
        let mut weight = group.zeros::<bf16>(N, K)?;
        let mut out = group.zeros::<bf16>(4, N)?;
        for seed in 3..9 {
            let other = group.upload(&normal::<bf16>(seed, K * 64), K, 64)?;
            matmul(&factor, &other, &mut weight)?;
            group.synchronize()?;
            matmul(&a, &weight, &mut out)?;
            let expected = out.to_vec()?;
            weight.copy_from_host(&vec![nan(); N * K])?;
            out.copy_from_host(&vec![nan(); 4 * N])?;
            let replay = Replay::capture(&group, RELAXED, || {
                matmul(&factor, &other, &mut weight).unwrap();
                matmul(&a, &weight, &mut out).unwrap();
            });
            replay.launch();
            group.synchronize()?;
            assert!(bits(&out.to_vec()?) == bits(&expected), "{seed}");
        }
        Ok("new weights".into())
    }));
}

/// Two blocks of a layer that is split over the ranks: each a product, and a sum of what the ranks have.
struct Blocks {
    /// Of the products, so that their bits do not depend on what is promised.
    config: Config,
    input: Matrix<Cuda, bf16>,
    weights: Vec<Matrix<Cuda, bf16>>,
    inner: Matrix<Cuda, bf16>,
    sums: [ShardedMatrix<Cuda, bf16>; 2],
}

impl Blocks {
    fn new(group: &Group<Cuda>, m: usize) -> Result<Blocks> {
        let weight = |seed: u64| {
            let values = normal(seed + 100 * group.rank() as u64, WIDTH * WIDTH);
            group.upload(&values, WIDTH, WIDTH)
        };
        Ok(Blocks {
            config: Matmul::<_, bf16>::new()
                .prepare((group, [m, WIDTH]), WIDTH)?
                .config(),
            input: group.upload(&normal(1, m * WIDTH), m, WIDTH)?,
            weights: (2..6).map(weight).collect::<Result<_>>()?,
            inner: group.zeros(m, WIDTH)?,
            sums: [group.sharded(m, WIDTH)?, group.sharded(m, WIDTH)?],
        })
    }

    /// Enqueues the operations. `each` is called after each of them.
    fn run(&mut self, constant_weights: bool, each: impl Fn() -> Result<()>) -> Result<()> {
        let (mut product, mut sum) = (Matmul::new().config(self.config), MatmulAllReduce::new());
        if constant_weights {
            (product, sum) = (product.constant_weights(), sum.constant_weights());
        }
        let [first, last] = &mut self.sums;
        product.run(&self.input, &self.weights[0], &mut self.inner)?;
        each()?;
        sum.run(&self.inner, &self.weights[1], &mut *first)?;
        each()?;
        product.run(first.view(), &self.weights[2], &mut self.inner)?;
        each()?;
        sum.run(&self.inner, &self.weights[3], last)?;
        each()
    }

    fn poison(&mut self) -> Result<()> {
        let [m, n] = self.inner.shape();
        let nans = vec![nan(); m * n];
        self.inner.copy_from_host(&nans)?;
        let mut sums = self.sums.iter_mut();
        sums.try_for_each(|sums| sums.write(0, &nans))
    }

    fn outputs(&self) -> Result<[Vec<bf16>; 2]> {
        let [first, last] = &self.sums;
        Ok([first.to_vec()?, last.to_vec()?])
    }
}

#[test]
fn sums_behind_products_have_the_bits_of_operations_apart() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let group = connect(rank, TIMEOUT)?;
        for m in [1, 7, 40, 128, 700] {
            let mut blocks = Blocks::new(&group, m)?;
            blocks.run(false, || group.synchronize())?;
            let expected = blocks.outputs()?;
            for constant_weights in [false, true] {
                let same = |blocks: &Blocks, how: &str| -> Result<()> {
                    let outputs = blocks.outputs()?;
                    let mut pairs = outputs.iter().zip(&expected);
                    let same = pairs.all(|(one, other)| bits(one) == bits(other));
                    let what = format!("{m} rows, {how}, constant weights: {constant_weights}");
                    assert!(same, "{what}");
                    Ok(())
                };
                blocks.poison()?;
                blocks.run(constant_weights, || Ok(()))?;
                same(&blocks, "calls")?;
                // Sums whose rows are pulled can't be captured.
                if ranks_share_gpus(&group) {
                    continue;
                }
                let replay = Replay::capture(&group, RELAXED, || {
                    blocks.run(constant_weights, || Ok(())).unwrap();
                });
                for _ in 0..10 {
                    blocks.poison()?;
                    group.barrier()?;
                    replay.launch();
                    group.synchronize()?;
                    same(&blocks, "a graph")?;
                }
            }
        }
        Ok("the same bits".into())
    }));
}
