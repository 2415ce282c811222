//! Products whose K is spread over the ranks, and their sums. Each rank gets its rows of a sum, or all rows.

use std::ops::Range;

use gemmesh::schedule::{Layout, Refusal};
use gemmesh::trace::Trace;
use gemmesh::{
    Backend, Config, Explanation, Group, Half, MatmulAllReduce, MatmulReduceScatter, Matrix,
    PreparedAllReduce, PreparedReduceScatter, Result, ShardedMatrix,
};

use crate::common::{Check, Factors, Operation, check, random, rows_within, sample_rows};

/// A rank's part of K: `a` is [M, K], `b` is [N, K].
pub struct Operands<B: Backend, T: Half> {
    pub group: Group<B>,
    pub a: Matrix<B, T>,
    pub b: Matrix<B, T>,
    /// The rows of the sum that this rank owns.
    own: Range<usize>,
}

impl<B: Backend, T: Half> Operands<B, T> {
    fn random(group: &Group<B>, shape: [usize; 3]) -> Result<Self> {
        let ([m, n, k], rank) = (shape, group.rank());
        let [a, b] = values::<T>(rank, shape);
        Ok(Operands {
            group: group.clone(),
            a: group.upload(&a, m, k)?,
            b: group.upload(&b, n, k)?,
            own: Layout::balanced(m, k, group.world_size())
                .map_err(Refusal::of(rank, "Layout::balanced"))?
                .rows_of(rank),
        })
    }

    /// M, N, and the K of a rank.
    pub fn shape(&self) -> [usize; 3] {
        let ([m, k], [n, _]) = (self.a.shape(), self.b.shape());
        [m, n, k]
    }

    /// Compares rows of `out`, which are the rows `of` of the sum. The documentation of
    /// [`matmul_reduce_scatter`](gemmesh::matmul_reduce_scatter) says how far an element may be off.
    fn check(&self, out: &[T], of: Range<usize>, products: usize) -> Check {
        let shape = self.shape();
        let [_, n, k] = shape;
        let world = self.group.world_size();
        let operands: Vec<[Vec<T>; 2]> = (0..world).map(|rank| values(rank, shape)).collect();
        let factors: Vec<Factors<T>> = operands
            .iter()
            .map(|[a, b]| Factors {
                a: &a[of.start * k..of.end * k],
                b,
                k,
            })
            .collect();
        let count = rows_within(products, n, k * world);
        let rows = sample_rows(of.len(), count, 7 + self.group.rank() as u64);
        // Unit roundoffs of the type and of f32, and a factor for what the first order leaves out.
        let (u, v, more) = (2f64.powi(-T::DIGITS), 2f64.powi(-24), 1.01);
        let terms = (k + world) as f64;
        check(&factors, out, n, &rows, |exact| {
            more * (terms * v * exact.magnitude + u * (exact.products + exact.value.abs()))
        })
    }
}

/// The operands of a rank. Each rank can make those of the others, to check the sum.
fn values<T: Half>(rank: usize, [m, n, k]: [usize; 3]) -> [Vec<T>; 2] {
    let seed = rank as u64;
    [random(m * k, 1 + seed), random(n * k, 1001 + seed)]
}

fn describe([m, n, k]: [usize; 3]) -> String {
    format!("M = {m}, N = {n}, K = {k} a rank")
}

/// Each rank gets its rows of the sum.
pub struct ReduceScatter<B: Backend, T: Half> {
    pub operands: Operands<B, T>,
    pub out: Matrix<B, T>,
}

impl<B: Backend, T: Half> Operation<B, T> for ReduceScatter<B, T> {
    const NAME: &'static str = "matmul_reduce_scatter";
    const COLLECTIVE: &'static str = "reduce-scatter";
    const SEQUENTIAL: &'static str = "matmul then reduce-scatter";
    type Prepared = PreparedReduceScatter<'static, B, T>;

    fn random(group: &Group<B>, shape: [usize; 3], _: usize) -> Result<Self> {
        let operands = Operands::random(group, shape)?;
        let out = group.zeros(operands.own.len(), shape[1])?;
        Ok(ReduceScatter { operands, out })
    }

    fn describe(shape: [usize; 3]) -> String {
        describe(shape)
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let [_, n, _] = self.operands.shape();
        let mut operation = MatmulReduceScatter::new();
        if let Some(config) = config {
            operation = operation.config(config);
        }
        operation.prepare(&self.operands.a, n)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.run(&self.operands.a, &self.operands.b, &mut self.out)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        prepared.run_traced(&self.operands.a, &self.operands.b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.matmul(&self.operands.a, &self.operands.b)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.reduce_scatter(&mut self.out)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.multiply(prepared)?;
        self.communicate(prepared)
    }

    fn poison(&mut self) -> Result<()> {
        let [rows, n] = self.out.shape();
        self.out
            .copy_from_host(&vec![T::from_f32(f32::NAN); rows * n])
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        let out = self.out.to_vec()?;
        let own = self.operands.own.clone();
        Ok(self.operands.check(&out, own, products))
    }
}

/// All ranks get all rows of the sum.
pub struct AllReduce<B: Backend, T: Half> {
    pub operands: Operands<B, T>,
    pub out: ShardedMatrix<B, T>,
}

impl<B: Backend, T: Half> Operation<B, T> for AllReduce<B, T> {
    const NAME: &'static str = "matmul_all_reduce";
    const COLLECTIVE: &'static str = "all-reduce";
    const SEQUENTIAL: &'static str = "matmul then all-reduce";
    type Prepared = PreparedAllReduce<'static, B, T>;

    fn random(group: &Group<B>, shape: [usize; 3], _: usize) -> Result<Self> {
        let [m, n, _] = shape;
        let operands = Operands::random(group, shape)?;
        let out = group.sharded(m, n)?;
        Ok(AllReduce { operands, out })
    }

    fn describe(shape: [usize; 3]) -> String {
        describe(shape)
    }

    fn prepare(&self, config: Option<Config>) -> Result<Self::Prepared> {
        let mut operation = MatmulAllReduce::new();
        if let Some(config) = config {
            operation = operation.config(config);
        }
        operation.prepare(&self.operands.a, &self.out)
    }

    fn explain(prepared: &Self::Prepared) -> Explanation {
        prepared.explain()
    }

    fn run(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.run(&self.operands.a, &self.operands.b, &mut self.out)
    }

    fn trace(&mut self, prepared: &Self::Prepared) -> Result<Trace> {
        prepared.run_traced(&self.operands.a, &self.operands.b, &mut self.out)
    }

    fn multiply(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.matmul(&self.operands.a, &self.operands.b)
    }

    fn communicate(&mut self, prepared: &Self::Prepared) -> Result<()> {
        prepared.all_reduce(&mut self.out)
    }

    fn run_in_sequence(&mut self, prepared: &Self::Prepared) -> Result<()> {
        self.multiply(prepared)?;
        self.communicate(prepared)
    }

    fn poison(&mut self) -> Result<()> {
        let [m, n] = self.out.shape();
        self.out.write(0, &vec![T::from_f32(f32::NAN); m * n])
    }

    fn check(&mut self, products: usize) -> Result<Check> {
        let out = self.out.to_vec()?;
        let [m, ..] = self.operands.shape();
        Ok(self.operands.check(&out, 0..m, products))
    }
}
