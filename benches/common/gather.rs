//! A product of rows that are gathered.

use gemmesh::trace::Trace;
use gemmesh::{
    AllGatherMatmul, Backend, Config, Explanation, Group, Half, Matrix, Prepared, Result,
    ShardedMatrix,
};

use super::{Check, Factors, Operation, check, half_ulp, random, rows_within, sample_rows};

/// `out[M, N] = gather(a)[M, K] · b[N, K]ᵀ`, N columns a rank.
pub struct AllGather<B: Backend, T: Half> {
    pub a: ShardedMatrix<B, T>,
    pub b: Matrix<B, T>,
    pub out: Matrix<B, T>,
    weight: Vec<T>,
}

impl<B: Backend, T: Half> Operation<B, T> for AllGather<B, T> {
    const NAME: &'static str = "all_gather_matmul";
    const COLLECTIVE: &'static str = "gather";
    const SEQUENTIAL: &'static str = "gather then matmul";
    type Prepared = Prepared<'static, B, T>;

    fn random(group: &Group<B>, [m, n, k]: [usize; 3], stages: usize) -> Result<Self> {
        let rank = group.rank() as u64;
        let mut a = group.sharded_staged::<T>(m, k, stages)?;
        let count = a.rows().len() * k;
        a.shard_mut()
            .copy_from_host(&random::<T>(count, 1 + rank))?;
        let weight = random::<T>(n * k, 1001 + rank);
        let b = group.upload(&weight, n, k)?;
        let out = group.zeros(m, n)?;
        Ok(AllGather { a, b, out, weight })
    }

    fn describe([m, n, k]: [usize; 3]) -> String {
        format!("M = {m}, N = {n} a rank, K = {k}")
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let [n, _] = self.b.shape();
        let mut operation = AllGatherMatmul::new();
        if let Some(config) = config {
            operation = operation.config(config);
        }
        operation.prepare(&self.a, n)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.run(&self.a, &self.b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.matmul(&self.a, &self.b, &mut self.out)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.gather(&self.a)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.communicate(prepared)?;
        self.multiply(prepared)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        prepared.run_traced(&self.a, &self.b, &mut self.out)
    }

    fn poison(&mut self) -> Result<()> {
        let nan = T::from_f32(f32::NAN);
        let [m, n] = self.out.shape();
        self.a.poison(nan)?;
        self.out.copy_from_host(&vec![nan; m * n])
    }

    /// An element may be off by half an ulp of its type for its one rounding, and by √K · 2⁻²³ · Σ|a·b| for the sums in
    /// f32.
    fn check(&mut self, products: usize) -> Result<Check> {
        let ([m, n], [_, k]) = (self.out.shape(), self.a.shape());
        // Each rank compares different rows.
        let seed = 7 + self.a.rows().start as u64;
        let rows = sample_rows(m, rows_within(products, n, k), seed);
        let (a, out) = (self.a.to_vec()?, self.out.to_vec()?);
        let factors = Factors {
            a: &a,
            b: &self.weight,
            k,
        };
        let sums = (k as f64).sqrt() * 2f64.powi(-23);
        Ok(check(&[factors], &out, n, &rows, |exact| {
            half_ulp::<T>(exact.value) + sums * exact.magnitude
        }))
    }
}
