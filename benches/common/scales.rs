//! Random scales of fp8 operands.

use gemmesh::elements::Element;
use gemmesh::fp8::{Scales, Scaling, ShardedScales};
use gemmesh::products::{Operand, ShardedOperand};
use gemmesh::{Backend, Group, Matrix, Result, ShardedMatrix};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// Columns that share a scale, if blocks have scales.
pub const BLOCK: usize = 128;

/// An operand's scales, on the host.
#[derive(Clone)]
pub struct ScaleValues {
    pub scaling: Scaling,
    pub shape: [usize; 2],
    pub values: Vec<f32>,
    /// The place of the scale of a row and a block of K.
    place: fn(Scaling, usize, usize) -> [usize; 2],
}

impl ScaleValues {
    /// Scales of `a` [M, K], from a half to two, if it has any.
    pub fn of_rows(scaling: Scaling, shape: [usize; 2], seed: u64) -> Option<ScaleValues> {
        let (shape, _) = scaling.of_rows(shape)?;
        Some(ScaleValues {
            scaling,
            shape,
            values: draw(shape, 1.0, seed),
            place: Scaling::place_of_row,
        })
    }

    /// Scales of a weight [N, K], if it has any. The elements of a sum of `terms` products are near one.
    pub fn of_weight(
        scaling: Scaling,
        shape: [usize; 2],
        terms: usize,
        seed: u64,
    ) -> Option<ScaleValues> {
        let (shape, _) = scaling.of_weight(shape)?;
        Some(ScaleValues {
            scaling,
            shape,
            values: draw(shape, (terms as f32).sqrt().recip(), seed),
            place: Scaling::place_of_column,
        })
    }

    /// The scale of a row and a block of K.
    pub fn of(&self, row: usize, block: usize) -> f64 {
        let [row, column] = (self.place)(self.scaling, row, block);
        self.values[row * self.shape[1] + column].into()
    }
}

/// From a half to two of `middle`.
fn draw([rows, columns]: [usize; 2], middle: f32, seed: u64) -> Vec<f32> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let draw = || middle * (2.0 * rng.random::<f32>() - 1.0).exp2();
    std::iter::repeat_with(draw).take(rows * columns).collect()
}

/// Scales in the memory of the rank, if there are any.
pub struct Placed<B: Backend>(Option<(Scaling, Matrix<B, f32>)>);

impl<B: Backend> Placed<B> {
    pub fn new(group: &Group<B>, scales: Option<&ScaleValues>) -> Result<Self> {
        let place = |scales: &ScaleValues| {
            let [rows, columns] = scales.shape;
            let matrix = group.upload(&scales.values, rows, columns)?;
            Ok((scales.scaling, matrix))
        };
        Ok(Placed(scales.map(place).transpose()?))
    }

    /// The values with these scales.
    pub fn of<'a, T: Element>(&'a self, values: &'a Matrix<B, T>) -> Operand<'a, B, T> {
        match self.scales() {
            Some(scales) => values.scaled(scales),
            None => values.into(),
        }
    }

    fn scales(&self) -> Option<Scales<'_, B>> {
        let (scaling, matrix) = self.0.as_ref()?;
        Some(match scaling {
            Scaling::Tensor => Scales::tensor(matrix),
            Scaling::Rows => Scales::rows(matrix),
            _ => Scales::blocks(matrix),
        })
    }
}

/// Scales of rows that are gathered. Those of blocks are gathered with them. Of others each rank has all.
pub enum GatheredScales<B: Backend> {
    Replicated(Option<ScaleValues>, Placed<B>),
    Sharded(ShardedMatrix<B, f32>),
}

impl<B: Backend> GatheredScales<B> {
    /// Random ones, for `a` [M, K], which comes in `stages` stages. Collective.
    pub fn random(
        group: &Group<B>,
        scaling: Scaling,
        [m, k]: [usize; 2],
        stages: usize,
        seed: u64,
    ) -> Result<Self> {
        if scaling != Scaling::Blocks {
            let values = ScaleValues::of_rows(scaling, [m, k], seed);
            let placed = Placed::new(group, values.as_ref())?;
            return Ok(GatheredScales::Replicated(values, placed));
        }
        let mut shards = group.sharded_staged::<f32>(m, k.div_ceil(BLOCK), stages)?;
        let own = [shards.rows().len(), k];
        let values = ScaleValues::of_rows(scaling, own, seed + 1 + group.rank() as u64);
        let values = values.map(|scales| scales.values).unwrap_or_default();
        shards.shard_mut().copy_from_host(&values)?;
        Ok(GatheredScales::Sharded(shards))
    }

    /// How a prepared call is told of them.
    pub fn scaling(&self) -> Scaling {
        match self {
            GatheredScales::Replicated(Some(values), _) => values.scaling,
            GatheredScales::Replicated(None, _) => Scaling::None,
            GatheredScales::Sharded(_) => Scaling::ShardedBlocks,
        }
    }

    /// The rows with these scales.
    pub fn of<'a, T: Element>(&'a self, rows: &'a ShardedMatrix<B, T>) -> ShardedOperand<'a, B, T> {
        match self {
            GatheredScales::Sharded(shards) => rows.scaled(ShardedScales::blocks(shards)),
            GatheredScales::Replicated(_, placed) => match placed.scales() {
                Some(scales) => rows.scaled(scales),
                None => rows.into(),
            },
        }
    }

    /// Spoils those that a gather brings.
    pub fn poison(&mut self) -> Result<()> {
        match self {
            GatheredScales::Sharded(shards) => shards.poison(f32::NAN),
            GatheredScales::Replicated(..) => Ok(()),
        }
    }

    /// Those of all rows, after a gather.
    pub fn values(&self) -> Result<Option<ScaleValues>> {
        Ok(match self {
            GatheredScales::Replicated(values, _) => values.clone(),
            GatheredScales::Sharded(shards) => Some(ScaleValues {
                scaling: Scaling::ShardedBlocks,
                shape: shards.shape(),
                values: shards.to_vec()?,
                place: Scaling::place_of_row,
            }),
        })
    }
}
