//! Gathers of fp8 with their scales: gates, several weights, stages, and M that changes.

use gemmesh::elements::{Number, Value};
use gemmesh::error::Kind;
use gemmesh::fp8::{Scales, ShardedScales};
use gemmesh::products::{Outputs, Weights};
use gemmesh::{
    Activation, AllGatherMatmul, Error, F8E4M3, F8E5M2, Group, Matmul, Matrix, ShardedMatrix, bf16,
};

use crate::support::errors::parts_of;
use crate::support::numbers::{nan, normal};
use crate::support::tested::{Tested, all_done, connect, ranks};

const K: usize = 272;
const BLOCKS: usize = K.div_ceil(128);

/// A sharded matrix of fp8 and its scales, which are split alike.
struct Rows<B: Tested> {
    values: ShardedMatrix<B, F8E4M3>,
    scales: ShardedMatrix<B, f32>,
}

impl<B: Tested> Rows<B> {
    /// Writes each rank's own rows, and overwrites those of the others.
    fn fill(&mut self, rank: usize, seed: u64) -> Result<(), Error> {
        fill(&mut self.values, rank, seed)?;
        fill(&mut self.scales, rank, seed + 10)
    }

    /// Checks that all rows are there.
    fn check(&self, seed: u64) -> Result<(), Error> {
        check(&self.values, seed)?;
        check(&self.scales, seed + 10)
    }

    fn sharded(&self) -> gemmesh::products::ShardedOperand<'_, B, F8E4M3> {
        self.values.scaled(ShardedScales::blocks(&self.scales))
    }

    /// All rows, once they have been gathered.
    fn gathered(&self) -> gemmesh::products::Operand<'_, B, F8E4M3> {
        let scales = Scales::blocks(self.scales.view());
        self.values.view().scaled(scales)
    }
}

/// The rows of a rank.
fn rows_of<T: Number>(rank: usize, seed: u64, rows: usize, columns: usize) -> Vec<T> {
    normal(seed + 1000 * rank as u64, rows * columns)
}

fn fill<B: Tested, T: Number>(
    matrix: &mut ShardedMatrix<B, T>,
    rank: usize,
    seed: u64,
) -> Result<(), Error> {
    let (rows, [_, columns]) = (matrix.rows().len(), matrix.shape());
    let own = rows_of::<T>(rank, seed, rows, columns);
    matrix.shard_mut().copy_from_host(&own)?;
    matrix.poison(nan())
}

fn check<B: Tested, T: Number>(matrix: &ShardedMatrix<B, T>, seed: u64) -> Result<(), Error> {
    let (all, [_, columns]) = (matrix.to_vec()?, matrix.shape());
    for rank in 0..3 {
        let own = rows_of::<T>(rank, seed, matrix.rows_of(rank).len(), columns);
        let blocks = matrix.blocks_of(rank).into_iter();
        let found = blocks.flat_map(|rows| &all[rows.start * columns..rows.end * columns]);
        assert!(found.eq(&own), "rows of rank {rank}, seed {seed}");
    }
    Ok(())
}

/// Weights with their scales.
struct Layer<B: Tested>(Vec<(Matrix<B, F8E5M2>, Matrix<B, f32>)>);

impl<B: Tested> Layer<B> {
    fn new(group: &Group<B>, widths: &[usize], seed: u64) -> Result<Self, Error> {
        let weight = |(seed, &n): (u64, &usize)| {
            let rows = n.div_ceil(128);
            let values = group.upload(&normal(seed, n * K), n, K)?;
            let scales = group.upload(&normal(seed + 5, rows * BLOCKS), rows, BLOCKS)?;
            Ok((values, scales))
        };
        let weights = (seed..).zip(widths).map(weight);
        Ok(Layer(weights.collect::<Result<_, Error>>()?))
    }

    fn weights(&self) -> Weights<'_, B, F8E4M3> {
        let weights = self.0.iter();
        let scaled = weights.map(|(values, scales)| values.scaled(Scales::blocks(scales)));
        scaled.collect()
    }
}

/// Outputs of these widths, which hold NaN.
fn outputs<B: Tested>(
    group: &Group<B>,
    m: usize,
    widths: &[usize],
) -> Result<Vec<Matrix<B, bf16>>, Error> {
    let output = |&n: &usize| group.upload(&vec![nan(); m * n], m, n);
    widths.iter().map(output).collect()
}

fn views<B: Tested>(outputs: &mut [Matrix<B, bf16>]) -> Outputs<'_, B, F8E4M3> {
    outputs.iter_mut().map(Matrix::view_mut).collect()
}

fn bits<B: Tested, T: Value>(outputs: &[Matrix<B, T>]) -> Result<Vec<u8>, Error> {
    let bits = outputs.iter().map(|out| {
        let values = out.to_vec()?;
        Ok(bytemuck::cast_slice(&values).to_vec())
    });
    Ok(bits.collect::<Result<Vec<Vec<u8>>, Error>>()?.concat())
}

/// Gathers `rows` and multiplies them, with several weights and with a gate. Compares every bit with products of all
/// rows at once.
fn verify<B: Tested>(group: &Group<B>, rows: &mut Rows<B>, seed: u64) -> Result<(), Error> {
    let [m, _] = rows.values.shape();
    for (weights, widths) in [(&[32, 16, 144][..], &[32, 16, 144][..]), (&[48; 2], &[48])] {
        let layer = Layer::new(group, weights, seed + 20)?;
        let columns: usize = weights.iter().sum();
        let bias = group.upload(&normal::<bf16>(seed + 30, columns), 1, columns)?;
        let mut operation = AllGatherMatmul::new().bias(&bias);
        let mut reference = Matmul::new().bias(&bias);
        if widths.len() == 1 {
            operation = operation.gated().activation(Activation::Silu);
            reference = reference.gated().activation(Activation::Silu);
        }
        rows.fill(group.rank(), seed)?;
        let mut out = outputs(group, m, widths)?;
        operation.run(rows.sharded(), layer.weights(), views(&mut out))?;
        rows.check(seed)?;
        let mut expected = outputs(group, m, widths)?;
        reference.run(rows.gathered(), layer.weights(), views(&mut expected))?;
        assert_eq!(bits(&out)?, bits(&expected)?, "seed {seed}, {weights:?}");
        // No one writes rows that a peer still reads.
        group.barrier()?;
    }
    Ok(())
}

fn on_three_ranks<B: Tested>(test: &str, part: impl Fn(&Group<B>) -> Result<(), Error>) {
    all_done(ranks::<B>(test, 3, |rank| {
        part(&connect::<B>(rank, B::TIMEOUT)?)?;
        Ok(String::new())
    }));
}

pub fn gathers_of_fp8_have_gates_and_several_weights<B: Tested>(test: &str) {
    on_three_ranks::<B>(test, |group| {
        for (seed, split) in [[20, 0, 13], [1, 130, 40]].iter().enumerate() {
            let mut rows = Rows {
                values: group.sharded_rows(split, K)?,
                scales: group.sharded_rows(split, BLOCKS)?,
            };
            verify(group, &mut rows, 100 * seed as u64)?;
        }
        Ok(())
    });
}

pub fn scales_of_staged_rows_are_staged<B: Tested>(test: &str) {
    on_three_ranks::<B>(test, |group| {
        for stages in [1, 2, 3] {
            let mut rows = Rows {
                values: group.sharded_staged(50, K, stages)?,
                scales: group.sharded_staged(50, BLOCKS, stages)?,
            };
            verify(group, &mut rows, 100 * stages as u64)?;
        }
        let values = group.sharded_staged::<F8E4M3>(60, K, 2)?;
        let scales = group.sharded_staged::<f32>(60, BLOCKS, 3)?;
        let rows = Rows { values, scales };
        refused(group, &rows, "scales of a (rows of each rank)")
    });
}

pub fn scales_have_as_many_rows_as_their_operand<B: Tested>(test: &str) {
    on_three_ranks::<B>(test, |group| {
        let mut rows = Rows {
            values: group.sharded_with_capacity(200, K)?,
            scales: group.sharded_with_capacity(200, BLOCKS)?,
        };
        for (step, split) in [[0, 1, 0], [60, 70, 5], [2, 2, 2], [100, 0, 100]]
            .iter()
            .enumerate()
        {
            rows.values.set_rows(split)?;
            rows.scales.set_rows(split)?;
            verify(group, &mut rows, 100 * step as u64)?;
        }
        rows.values.set_rows(&[100, 1, 99])?;
        refused(group, &rows, "scales of a (rows of each rank)")?;
        rows.values.set_rows(&[100, 0, 99])?;
        refused(group, &rows, "scales of a [M, ⌈K/128⌉]")
    });
}

/// Every rank refuses these rows, so none waits.
fn refused<B: Tested>(group: &Group<B>, rows: &Rows<B>, words: &str) -> Result<(), Error> {
    let [m, _] = rows.values.shape();
    let (layer, mut out) = (Layer::new(group, &[16], 0)?, outputs(group, m, &[16])?);
    match parts_of(&AllGatherMatmul::new().run(rows.sharded(), layer.weights(), views(&mut out))) {
        Some((_, Kind::Shape { argument, .. })) => assert_eq!(argument, words),
        other => panic!("{other:?}"),
    }
    Ok(())
}
