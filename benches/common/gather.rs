//! A product of rows that are gathered.

use gemmesh::elements::{Number, OutputOf};
use gemmesh::fp8::Scaling;
use gemmesh::products::{Operand, Prepared, ShardedOperand};
use gemmesh::trace::Trace;
use gemmesh::tuning::Explanation;
use gemmesh::{AllGatherMatmul, Backend, Config, DType, Group, Matrix, Result, ShardedMatrix};

use super::scales::{GatheredScales, Placed, ScaleValues};
use super::{
    Check, Factors, Multiplied, Operation, check, random, rounded, rows_within, sample_rows,
    sums_off,
};

/// `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`, N columns a rank.
pub struct AllGather<B: Backend, T: Multiplied, O: Number = T> {
    pub a: ShardedMatrix<B, T>,
    pub b: Matrix<B, T>,
    pub out: Matrix<B, O>,
    pub scales: Scales<B>,
    weight: Vec<T>,
}

/// The scales of both operands.
pub struct Scales<B: Backend> {
    pub a: GatheredScales<B>,
    pub b: Option<ScaleValues>,
    placed_b: Placed<B>,
}

impl<B: Backend> Scales<B> {
    /// The operands with these scales.
    pub fn of<'a, T: Multiplied>(
        &'a self,
        a: &'a ShardedMatrix<B, T>,
        b: &'a Matrix<B, T>,
    ) -> (ShardedOperand<'a, B, T>, Operand<'a, B, T>) {
        (self.a.of(a), self.placed_b.of(b))
    }
}

impl<B: Backend, T: Multiplied, O: OutputOf<T>> Operation<B, T> for AllGather<B, T, O> {
    const NAME: &'static str = "all_gather_matmul";
    const COLLECTIVE: &'static str = "gather";
    const SEQUENTIAL: &'static str = "gather then matmul";
    const OUT: DType = O::DTYPE;
    type Prepared = Prepared<'static, B, T>;

    fn scaled(
        group: &Group<B>,
        [m, n, k]: [usize; 3],
        stages: usize,
        scaling: Scaling,
    ) -> Result<Self> {
        let rank = group.rank() as u64;
        let mut a = group.sharded_staged::<T>(m, k, stages)?;
        let count = a.rows().len() * k;
        a.shard_mut()
            .copy_from_host(&random::<T>(count, 1 + rank))?;
        let weight = random::<T>(n * k, 1001 + rank);
        let b = group.upload(&weight, n, k)?;
        let out = group.zeros(m, n)?;
        let of_b = ScaleValues::of_weight(scaling, [n, k], k, 2001 + rank);
        Ok(AllGather {
            a,
            b,
            out,
            scales: Scales {
                a: GatheredScales::random(group, scaling, [m, k], stages, 3001)?,
                placed_b: Placed::new(group, of_b.as_ref())?,
                b: of_b,
            },
            weight,
        })
    }

    fn describe([m, n, k]: [usize; 3]) -> String {
        format!("M = {m}, N = {n} a rank, K = {k}")
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let [n, _] = self.b.shape();
        let of_b = self.scales.b.as_ref();
        let of_b = of_b.map_or(Scaling::None, |scales| scales.scaling);
        let mut operation = AllGatherMatmul::new()
            .output_dtype(O::DTYPE)
            .scaling(self.scales.a.scaling(), of_b);
        if let Some(config) = config {
            operation = operation.config(config);
        }
        operation.prepare(&self.a, n)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let (a, b) = self.scales.of(&self.a, &self.b);
        prepared.run(a, b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        let (a, b) = self.scales.of(&self.a, &self.b);
        prepared.matmul(a, b, &mut self.out)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.gather(self.scales.a.of(&self.a))
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.communicate(prepared)?;
        self.multiply(prepared)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        let (a, b) = self.scales.of(&self.a, &self.b);
        prepared.run_traced(a, b, &mut self.out)
    }

    fn poison(&mut self) -> Result<()> {
        let [m, n] = self.out.shape();
        self.a.poison(T::from_f32(f32::NAN))?;
        self.scales.a.poison()?;
        self.out.copy_from_host(&vec![O::from_f32(f32::NAN); m * n])
    }

    /// An element may be off by half an ulp of its type for its one rounding, and by what [`sums_off`] says of the sums
    /// in f32.
    fn check(&mut self, products: usize) -> Result<Check> {
        let ([m, n], [_, k]) = (self.out.shape(), self.a.shape());
        // Each rank compares different rows.
        let seed = 7 + self.a.rows().start as u64;
        let rows = sample_rows(m, rows_within(products, n, k), seed);
        let (a, out) = (self.a.to_vec()?, self.out.to_vec()?);
        let of_a = self.scales.a.values()?;
        let factors = Factors::new(&a, &self.weight, k);
        let factors = factors.scaled([of_a.as_ref(), self.scales.b.as_ref()]);
        let sums = sums_off::<B, T>(k);
        Ok(check(&[factors], &out, n, &rows, |exact| {
            rounded::<O>(exact.value, sums * exact.magnitude)
        }))
    }
}
