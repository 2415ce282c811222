//! Products whose K is spread over the ranks, and their sums. Each rank gets its rows of a sum, or all rows.

use std::ops::Range;

use gemmesh::elements::{Number, OutputOf, Value};
use gemmesh::fp8::Scaling;
use gemmesh::products::{Operand, PreparedAllReduce, PreparedMatmul, PreparedReduceScatter};
use gemmesh::schedule::Layout;
use gemmesh::trace::Trace;
use gemmesh::tuning::Explanation;
use gemmesh::{
    Backend, Config, DType, Group, Matmul, MatmulAllReduce, MatmulReduceScatter, Matrix, Result,
    ShardedMatrix,
};

use crate::common::scales::{Placed, ScaleValues};
use crate::common::{
    Check, Factors, Multiplied, Operation, check, random, rounded, rows_within, sample_rows,
    sums_off,
};

/// A rank's part of K: `a` is [M, K], `b` is [N, K].
pub struct Operands<B: Backend, T: Multiplied> {
    pub group: Group<B>,
    pub a: Matrix<B, T>,
    pub b: Matrix<B, T>,
    scaling: Scaling,
    placed: [Placed<B>; 2],
    /// The product, if it is scaled: a prepared sum multiplies without scales only.
    partial: Option<Matrix<B, T::Addend>>,
    /// The rows of the sum that this rank owns.
    own: Range<usize>,
}

/// A sum that has been planned.
pub struct Planned<P, B: Backend, T: Multiplied> {
    pub sum: P,
    /// Its product alone, if it is scaled. The library chooses the kernel.
    product: Option<PreparedMatmul<'static, B, T>>,
}

impl<B: Backend, T: Multiplied> Operands<B, T> {
    fn random(group: &Group<B>, shape: [usize; 3], scaling: Scaling) -> Result<Self> {
        let ([m, n, k], rank) = (shape, group.rank());
        let [a, b] = values::<T>(rank, shape);
        let scales = scales(scaling, rank, group.world_size(), shape);
        let [of_a, of_b] = scales.each_ref().map(Option::as_ref);
        let partial = of_a.map(|_| group.zeros(m, n));
        Ok(Operands {
            group: group.clone(),
            a: group.upload(&a, m, k)?,
            b: group.upload(&b, n, k)?,
            scaling,
            placed: [Placed::new(group, of_a)?, Placed::new(group, of_b)?],
            partial: partial.transpose()?,
            own: Layout::balanced(m, k, group.world_size())?.rows_of(rank),
        })
    }

    /// M, N, and the K of a rank.
    pub fn shape(&self) -> [usize; 3] {
        let ([m, k], [n, _]) = (self.a.shape(), self.b.shape());
        [m, n, k]
    }

    /// The scales of this rank's operands.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub fn scales(&self) -> [Option<ScaleValues>; 2] {
        let (rank, world) = (self.group.rank(), self.group.world_size());
        scales(self.scaling, rank, world, self.shape())
    }

    fn scaled(&self) -> [Operand<'_, B, T>; 2] {
        let [of_a, of_b] = &self.placed;
        [of_a.of(&self.a), of_b.of(&self.b)]
    }

    fn plan<P>(&self, sum: P) -> Result<Planned<P, B, T>> {
        let [m, n, k] = self.shape();
        let prepare = |_| {
            let operation = Matmul::new().scaling(self.scaling, self.scaling);
            operation.prepare((&self.group, [m, k]), n)
        };
        let product = self.partial.as_ref().map(prepare).transpose()?;
        Ok(Planned { sum, product })
    }

    /// Multiplies with scales, or by `plain` if there are none.
    fn multiply<P>(
        &mut self,
        planned: &Planned<P, B, T>,
        plain: impl FnOnce(&P, &Matrix<B, T>, &Matrix<B, T>) -> Result<()>,
    ) -> Result<()> {
        let Operands {
            a,
            b,
            placed: [of_a, of_b],
            partial,
            ..
        } = self;
        match (&planned.product, partial) {
            (Some(product), Some(partial)) => product.run(of_a.of(a), of_b.of(b), partial),
            _ => plain(&planned.sum, a, b),
        }
    }

    /// Compares rows of `out`, which are the rows `of` of the sum. The documentation of
    /// [`matmul_reduce_scatter`](gemmesh::matmul_reduce_scatter) says how far an element may be off.
    fn check<O: Number>(&self, out: &[O], of: Range<usize>, products: usize) -> Check {
        let shape = self.shape();
        let [_, n, k] = shape;
        let world = self.group.world_size();
        let operands: Vec<[Vec<T>; 2]> = (0..world).map(|rank| values(rank, shape)).collect();
        let scales = (0..world).map(|rank| scales(self.scaling, rank, world, shape));
        let scales: Vec<[Option<ScaleValues>; 2]> = scales.collect();
        let factors = operands.iter().zip(&scales).map(|([a, b], scales)| {
            let factors = Factors::new(a, b, k).at_row(of.start);
            factors.scaled(scales.each_ref().map(Option::as_ref))
        });
        let factors: Vec<Factors<T>> = factors.collect();
        let count = rows_within(products, n, k * world);
        let rows = sample_rows(of.len(), count, 7 + self.group.rank() as u64);
        // Unit roundoffs of the partial sums' type and of f32, and a factor for what the first order leaves out.
        let (u, v, more) = (2f64.powi(-T::Addend::DIGITS), 2f64.powi(-24), 1.01);
        let sums = match T::DTYPE.is_fp8() {
            true => sums_off::<B, T>(k),
            false => k as f64 * v,
        };
        let added = world as f64 * v;
        // Partials are rounded, and over hosts also each host's sum of them.
        let u = if self.group.host_count() > 1 {
            2.0 * u
        } else {
            u
        };
        check(&factors, out, n, &rows, |exact| {
            let off = (sums + added) * exact.magnitude + u * exact.products;
            rounded::<O>(exact.value, more * off)
        })
    }
}

/// The operands of a rank. Each rank can make those of the others, to check the sum.
fn values<T: Multiplied>(rank: usize, [m, n, k]: [usize; 3]) -> [Vec<T>; 2] {
    let seed = rank as u64;
    [random(m * k, 1 + seed), random(n * k, 1001 + seed)]
}

/// Their scales.
fn scales(
    scaling: Scaling,
    rank: usize,
    world: usize,
    [m, n, k]: [usize; 3],
) -> [Option<ScaleValues>; 2] {
    let seed = rank as u64;
    [
        ScaleValues::of_rows(scaling, [m, k], 3001 + seed),
        ScaleValues::of_weight(scaling, [n, k], world * k, 2001 + seed),
    ]
}

fn describe([m, n, k]: [usize; 3]) -> String {
    format!("M = {m}, N = {n}, K = {k} a rank")
}

/// Each rank gets its rows of the sum.
pub struct ReduceScatter<B: Backend, T: Multiplied, O: Number = T> {
    pub operands: Operands<B, T>,
    pub out: Matrix<B, O>,
}

impl<B: Backend, T: Multiplied, O: OutputOf<T>> Operation<B, T> for ReduceScatter<B, T, O> {
    const NAME: &'static str = "matmul_reduce_scatter";
    const COLLECTIVE: &'static str = "reduce-scatter";
    const SEQUENTIAL: &'static str = "matmul then reduce-scatter";
    const OUT: DType = O::DTYPE;
    type Prepared = Planned<PreparedReduceScatter<'static, B, T>, B, T>;

    fn scaled(group: &Group<B>, shape: [usize; 3], _: usize, scaling: Scaling) -> Result<Self> {
        let operands = Operands::random(group, shape, scaling)?;
        let out = group.zeros(operands.own.len(), shape[1])?;
        Ok(ReduceScatter { operands, out })
    }

    fn describe(shape: [usize; 3]) -> String {
        describe(shape)
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let [_, n, _] = self.operands.shape();
        let scaling = self.operands.scaling;
        let mut operation = MatmulReduceScatter::new()
            .output_dtype(O::DTYPE)
            .scaling(scaling, scaling);
        if let Some(config) = config {
            operation = operation.config(config);
        }
        let sum = operation.prepare(&self.operands.a, n)?;
        self.operands.plan(sum)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.sum.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let [a, b] = self.operands.scaled();
        prepared.sum.run(a, b, &mut self.out)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        let [a, b] = self.operands.scaled();
        prepared.sum.run_traced(a, b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let plain =
            |sum: &PreparedReduceScatter<'static, B, T>, a: &_, b: &_| sum.multiply_partials(a, b);
        self.operands.multiply(prepared, plain)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.sum.sum_partials(&mut self.out)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.multiply(prepared)?;
        self.communicate(prepared)
    }

    fn poison(&mut self) -> Result<()> {
        let [rows, n] = self.out.shape();
        self.out
            .copy_from_host(&vec![O::from_f32(f32::NAN); rows * n])
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        let out = self.out.to_vec()?;
        let own = self.operands.own.clone();
        Ok(self.operands.check(&out, own, products))
    }
}

/// All ranks get all rows of the sum.
pub struct AllReduce<B: Backend, T: Multiplied> {
    pub operands: Operands<B, T>,
    pub out: ShardedMatrix<B, T::Addend>,
}

impl<B: Backend, T: Multiplied> Operation<B, T> for AllReduce<B, T> {
    const NAME: &'static str = "matmul_all_reduce";
    const COLLECTIVE: &'static str = "all-reduce";
    const SEQUENTIAL: &'static str = "matmul then all-reduce";
    const OUT: DType = T::Addend::DTYPE;
    type Prepared = Planned<PreparedAllReduce<'static, B, T>, B, T>;

    fn scaled(group: &Group<B>, shape: [usize; 3], _: usize, scaling: Scaling) -> Result<Self> {
        let [m, n, _] = shape;
        let operands = Operands::random(group, shape, scaling)?;
        let out = group.sharded(m, n)?;
        Ok(AllReduce { operands, out })
    }

    fn describe(shape: [usize; 3]) -> String {
        describe(shape)
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let scaling = self.operands.scaling;
        let mut operation = MatmulAllReduce::new().scaling(scaling, scaling);
        if let Some(config) = config {
            operation = operation.config(config);
        }
        let sum = operation.prepare(&self.operands.a, &self.out)?;
        self.operands.plan(sum)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.sum.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let [a, b] = self.operands.scaled();
        prepared.sum.run(a, b, &mut self.out)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        let [a, b] = self.operands.scaled();
        prepared.sum.run_traced(a, b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let plain =
            |sum: &PreparedAllReduce<'static, B, T>, a: &_, b: &_| sum.multiply_partials(a, b);
        self.operands.multiply(prepared, plain)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.sum.sum_partials(&mut self.out)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.multiply(prepared)?;
        self.communicate(prepared)
    }

    fn poison(&mut self) -> Result<()> {
        let [m, n] = self.out.shape();
        let nan = T::Addend::from_f32(f32::NAN);
        self.out.write(0, &vec![nan; m * n])
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        let out = self.out.to_vec()?;
        let [m, ..] = self.operands.shape();
        Ok(self.operands.check(&out, 0..m, products))
    }
}
