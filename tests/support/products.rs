//! Products as their ranks see them.

use gemmesh::elements::Half;
use gemmesh::products::Prepared;
use gemmesh::tuning::Route;
use gemmesh::{
    AllGatherMatmul, Backend, Config, Error, Group, Matrix, ShardedMatrix, all_gather_matmul, bf16,
};

use super::numbers::{Reference, bits, nan, normal};
use super::tested::Tested;

pub const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];

/// A small product and its arguments.
pub struct Arguments<B: Backend> {
    pub a: ShardedMatrix<B, bf16>,
    pub b: Matrix<B, bf16>,
    pub out: Matrix<B, bf16>,
    /// What stands in the rows of rank r is r + this.
    base: usize,
}

impl<B: Tested> Arguments<B> {
    /// Collective.
    pub fn new(group: &Group<B>, m: usize, n: usize, k: usize) -> Result<Arguments<B>, Error> {
        let mut arguments = Arguments {
            a: group.sharded(m, k)?,
            b: group.upload(&vec![bf16::ONE; n * k], n, k)?,
            out: group.zeros(m, n)?,
            base: 0,
        };
        arguments.fill(group, 1)?;
        Ok(arguments)
    }

    /// A product that takes no time.
    pub fn small(group: &Group<B>) -> Result<Arguments<B>, Error> {
        let [m, n, k] = B::SMALL;
        Arguments::new(group, m, n, k)
    }

    /// A product amid which something can happen.
    pub fn larger(group: &Group<B>) -> Result<Arguments<B>, Error> {
        let [m, n, k] = B::LARGER;
        Arguments::new(group, m, n, k)
    }

    /// Other values, once all is complete.
    pub fn fill(&mut self, group: &Group<B>, base: usize) -> Result<(), Error> {
        group.synchronize()?;
        self.base = base;
        let value = bf16::from_f32((base + group.rank()) as f32);
        let rows = vec![value; self.a.rows().len() * self.a.shape()[1]];
        self.a.shard_mut().copy_from_host(&rows)
    }

    #[track_caller]
    pub fn run(&mut self) -> Result<(), Error> {
        all_gather_matmul(&self.a, &self.b, &mut self.out)
    }

    pub fn prepare(&self, route: Route) -> Result<Prepared<'static, B, bf16>, Error> {
        let n = self.b.shape()[0];
        let config = B::config(&self.a, n)?.with_route(route);
        let operation = AllGatherMatmul::new().config(config);
        operation.prepare(&self.a, n)
    }

    pub fn run_by(&mut self, route: Route) -> Result<(), Error> {
        self.prepare(route)?.run(&self.a, &self.b, &mut self.out)
    }

    pub fn verify_by(&mut self, group: &Group<B>, route: Route) -> Result<(), Error> {
        self.run_by(route)?;
        self.check(group.world_size())
    }

    /// Looks at the result of the last run. Small whole numbers are exact in bf16.
    #[track_caller]
    pub fn check(&self, world: usize) -> Result<(), Error> {
        let [_, k] = self.a.shape();
        let [_, n] = self.out.shape();
        let out = self.out.to_vec()?;
        for rank in 0..world {
            let expected = bf16::from_f32(((self.base + rank) * k) as f32);
            let rows = self.a.rows_of(rank);
            let found = &out[rows.start * n..rows.end * n];
            assert!(
                found.iter().all(|&x| x == expected),
                "wrong rows of rank {rank}: {:?} and not {expected}",
                &found[..found.len().min(8)]
            );
        }
        Ok(())
    }

    pub fn verify(&mut self, group: &Group<B>) -> Result<(), Error> {
        self.run()?;
        self.check(group.world_size())
    }
}

/// The matrices of a product, and how it is cut up.
#[derive(Clone, Debug, Default)]
pub struct Case {
    pub rows: Vec<usize>,
    /// On rank 0.
    pub n: usize,
    /// By how much it is more on each next rank.
    pub more: usize,
    pub k: usize,
    pub bias: bool,
    /// The backend's if there is none.
    pub config: Option<Config>,
    /// Threads that multiply, on the host.
    pub workers: usize,
    pub seed: u64,
}

impl Case {
    pub fn m(&self) -> usize {
        self.rows.iter().sum()
    }

    pub fn n_of(&self, rank: usize) -> usize {
        self.n + rank * self.more
    }

    pub fn a<T: Half>(&self) -> Vec<T> {
        normal(self.seed, self.m() * self.k)
    }

    /// Each rank has a weight and a bias of its own.
    pub fn b<T: Half>(&self, rank: usize) -> (Vec<T>, Option<Vec<T>>) {
        let seed = self.seed ^ (rank as u64 + 1) << 40;
        let n = self.n_of(rank);
        let bias = self.bias.then(|| normal(!seed, n));
        (normal(seed, n * self.k), bias)
    }

    /// Collective. Checks everything on this rank.
    pub fn verify<B: Backend, T: Half>(&self, group: &Group<B>) -> Result<f64, String> {
        let (b, bias) = self.b::<T>(group.rank());
        self.verify_values(group, &self.a::<T>(), &b, bias.as_deref())
    }

    pub fn verify_values<B: Backend, T: Half>(
        &self,
        group: &Group<B>,
        a: &[T],
        b: &[T],
        bias: Option<&[T]>,
    ) -> Result<f64, String> {
        let words = |error: Error| error.to_string();
        let mut placed = Placed::new(group, self, a, b, bias).map_err(words)?;
        placed.poison().map_err(words)?;
        placed.fused(self.config).map_err(words)?;
        let (gathered, out) = placed.read().map_err(words)?;
        if bits(&gathered) != bits(a) {
            return Err("the gathered matrix is not the one that was spread".into());
        }
        Reference::new(a, b, bias, self.k).check(&out)
    }
}

/// A case's matrices in a rank's memory.
pub struct Placed<B: Backend, T: Half> {
    pub a: ShardedMatrix<B, T>,
    pub b: Matrix<B, T>,
    pub bias: Option<Matrix<B, T>>,
    pub out: Matrix<B, T>,
}

impl<B: Backend, T: Half> Placed<B, T> {
    /// Collective.
    pub fn new(
        group: &Group<B>,
        case: &Case,
        a: &[T],
        b: &[T],
        bias: Option<&[T]>,
    ) -> Result<Placed<B, T>, Error> {
        let mut sharded = group.sharded_rows::<T>(&case.rows, case.k)?;
        let own = sharded.rows();
        sharded
            .shard_mut()
            .copy_from_host(&a[own.start * case.k..own.end * case.k])?;
        let n = case.n_of(group.rank());
        Ok(Placed {
            a: sharded,
            b: group.upload(b, n, case.k)?,
            bias: bias.map(|bias| group.upload(bias, 1, n)).transpose()?,
            out: group.zeros(case.m(), n)?,
        })
    }

    /// Nothing of an earlier operation, and no zero of a new matrix, can pass for a result.
    pub fn poison(&mut self) -> Result<(), Error> {
        let [m, n] = self.out.shape();
        self.a.poison(nan())?;
        self.out.copy_from_host(&vec![nan::<T>(); m * n])
    }

    pub fn operation<'a>(
        bias: &'a Option<Matrix<B, T>>,
        config: Option<Config>,
    ) -> AllGatherMatmul<'a, B, T> {
        let mut operation = AllGatherMatmul::new();
        if let Some(bias) = bias {
            operation = operation.bias(bias);
        }
        match config {
            Some(config) => operation.config(config),
            None => operation,
        }
    }

    pub fn fused(&mut self, config: Option<Config>) -> Result<(), Error> {
        Self::operation(&self.bias, config).run(&self.a, &self.b, &mut self.out)
    }

    pub fn gather_then_matmul(&mut self, config: Option<Config>) -> Result<(), Error> {
        let operation = Self::operation(&self.bias, config);
        let prepared = operation.prepare(&self.a, self.b.shape()[0])?;
        prepared.gather(&self.a)?;
        prepared.matmul(&self.a, &self.b, &mut self.out)
    }

    pub fn read(&mut self) -> Result<(Vec<T>, Vec<T>), Error> {
        Ok((self.a.to_vec()?, self.out.to_vec()?))
    }
}
