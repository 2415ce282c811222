//! Layers of two products each, and their reference in float64.

use gemmesh::products::{Prepared, PreparedReduceScatter};
use gemmesh::{
    Activation, AllGatherMatmul, Backend, Group, MatmulReduceScatter, Matrix, Result,
    ShardedMatrix, bf16,
};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// A rank's part of a model. Each layer is `x = relu(x · upᵀ) · downᵀ`.
pub struct Model<B: Backend> {
    group: Group<B>,
    layers: Vec<Layer<B>>,
    /// All ranks' weights of two layers, which the layers use in turn. They are few enough to be kept for the checks.
    weights: [Vec<[Vec<bf16>; 2]>; 2],
    x: ShardedMatrix<B, bf16>,
    hidden: Matrix<B, bf16>,
    width: [usize; 2],
}

struct Layer<B: Backend> {
    up: Matrix<B, bf16>,
    down: Matrix<B, bf16>,
}

/// The products of all layers, for one M.
pub struct PreparedLayers<B: Backend> {
    up: Prepared<'static, B, bf16>,
    down: PreparedReduceScatter<'static, B, bf16>,
}

impl<B: Backend> Model<B> {
    pub fn new(
        group: &Group<B>,
        capacity: usize,
        [model, hidden]: [usize; 2],
        layers: usize,
    ) -> Result<Self> {
        let rank = group.rank();
        let world = group.world_size();
        let of_ranks =
            |number| (0..world).map(move |rank| weights(rank, world, number, [model, hidden]));
        let weights = [0, 1].map(|number| of_ranks(number).collect::<Vec<_>>());
        let layer = |number: usize| -> Result<Layer<B>> {
            let [up, down] = &weights[number % 2][rank];
            Ok(Layer {
                up: group.upload(up, hidden, model)?,
                down: group.upload(down, model, hidden)?,
            })
        };
        Ok(Model {
            group: group.clone(),
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            weights,
            x: group.sharded_with_capacity(capacity, model)?,
            hidden: group.zeros(capacity, hidden)?,
            width: [model, hidden],
        })
    }

    /// The most tokens of a step.
    #[cfg(feature = "cudarc")]
    pub fn capacity(&self) -> usize {
        self.x.capacity()
    }

    /// Sets M of the next steps. Each rank owns an even part of the rows.
    pub fn set_tokens(&mut self, tokens: usize) -> Result<()> {
        self.x.set_rows(&self.group.even_rows(tokens))?;
        self.hidden.set_rows(tokens)
    }

    /// Sets M and writes this rank's tokens of a step.
    pub fn take_tokens(&mut self, tokens: usize, step: usize) -> Result<()> {
        self.set_tokens(tokens)?;
        self.write_tokens(step)
    }

    /// Writes this rank's tokens of a step, if M is set already, perhaps to more than the tokens. Rows after them are
    /// computed too, and not read.
    pub fn write_tokens(&mut self, step: usize) -> Result<()> {
        let [model, _] = self.width;
        let own = self.x.rows();
        let all = tokens_of(step, own.end, model);
        self.x.shard_mut().copy_from_host(&all[own.start * model..])
    }

    pub fn run(&mut self) -> Result<()> {
        for layer in &self.layers {
            let up = AllGatherMatmul::new().activation(Activation::Relu);
            up.run(&self.x, &layer.up, &mut self.hidden)?;
            MatmulReduceScatter::new().run_into(&self.hidden, &layer.down, &mut self.x)?;
        }
        Ok(())
    }

    /// Prepares the products for the current M.
    pub fn prepare(&self) -> Result<PreparedLayers<B>> {
        let [model, hidden] = self.width;
        let up = AllGatherMatmul::new().activation(Activation::Relu);
        Ok(PreparedLayers {
            up: up.prepare(&self.x, hidden)?,
            down: MatmulReduceScatter::new().prepare(&self.hidden, model)?,
        })
    }

    pub fn run_prepared(&mut self, layers: &PreparedLayers<B>) -> Result<()> {
        for layer in &self.layers {
            layers.up.run(&self.x, &layer.up, &mut self.hidden)?;
            layers
                .down
                .run_into(&self.hidden, &layer.down, &mut self.x)?;
        }
        Ok(())
    }

    /// Compares some of this rank's own rows with float64, the last among them.
    pub fn check(&mut self, step: usize) -> Result<()> {
        const ROWS: usize = 4;
        let [model, hidden] = self.width;
        let own = self.x.rows();
        let apart = own.len().div_ceil(ROWS).max(1);
        let rows = |values: &[bf16]| -> Vec<f64> {
            let rows = own.clone().rev().step_by(apart);
            rows.flat_map(|row| &values[row * model..][..model])
                .map(|x| x.to_f64())
                .collect()
        };
        let mut exact = rows(&tokens_of(step, own.end, model));
        for number in 0..self.layers.len() {
            let mut next = vec![0.0; exact.len()];
            for [up, down] in &self.weights[number % 2] {
                let products = product(&exact, up, model);
                let products: Vec<f64> = products.into_iter().map(|x| x.max(0.0)).collect();
                let part = product(&products, down, hidden);
                next.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
            exact = next;
        }
        let found = rows(&self.x.to_vec()?);
        let size =
            |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
        let off = size(&mut found.iter().zip(&exact).map(|(x, y)| x - y));
        let all = size(&mut exact.iter().copied());
        // Each layer rounds three times. Each error is less than 2⁻⁹ in the root mean square, and errors are
        // independent. This allows twice their sum.
        let tolerance = 2.0 * 2f64.powi(-9) * (3.0 * self.layers.len() as f64).sqrt();
        assert!(off <= tolerance * all, "step {step}: off by {off} of {all}");
        Ok(())
    }
}

/// A rank's weights of a layer. Their scale keeps the scale of `x`.
fn weights(rank: usize, world: usize, layer: usize, [model, hidden]: [usize; 2]) -> [Vec<bf16>; 2] {
    let seed = 1 + 2 * (rank + 64 * layer) as u64;
    let scale = |k: usize| (3.0 / k as f32).sqrt();
    // For x ~ N(0, 1), the square of relu(x) is 1/2 on average.
    let [up, down] = [scale(model), scale(world * hidden) * 2f32.sqrt()];
    [
        random(seed, hidden * model, up),
        random(seed + 1, model * hidden, down),
    ]
}

/// The first rows of a step's tokens.
fn tokens_of(step: usize, rows: usize, model: usize) -> Vec<bf16> {
    random(1 << 32 | step as u64, rows * model, 3f32.sqrt())
}

fn random(seed: u64, count: usize, scale: f32) -> Vec<bf16> {
    let mut random = SmallRng::seed_from_u64(seed);
    let value = |_| bf16::from_f32(random.random_range(-scale..scale));
    (0..count).map(value).collect()
}

/// `a · bᵀ`, over `k`.
fn product(a: &[f64], b: &[bf16], k: usize) -> Vec<f64> {
    let n = b.len() / k;
    let mut products = vec![0.0; a.len() / k * n];
    for (column, b) in b.chunks_exact(k).enumerate() {
        let b: Vec<f64> = b.iter().map(|x| x.to_f64()).collect();
        for (row, a) in a.chunks_exact(k).enumerate() {
            products[row * n + column] = dot(a, &b);
        }
    }
    products
}

/// The dot product, in as many sums as fill a processor's vectors.
fn dot(x: &[f64], y: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0; LANES];
    for (x, y) in x.chunks(LANES).zip(y.chunks(LANES)) {
        for (sum, (x, y)) in sums.iter_mut().zip(x.iter().zip(y)) {
            *sum += x * y;
        }
    }
    sums.iter().sum()
}
