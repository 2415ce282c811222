//! Partial sums are added up in the order of the ranks, whoever owns a row and however they come.

use std::time::Duration;

use gemmesh::elements::Half;
use gemmesh::error::Kind;
use gemmesh::tuning::Route;
use gemmesh::{
    Config, Error, Group, MatmulAllReduce, MatmulReduceScatter, Matrix, ShardedMatrix,
    all_gather_matmul, bf16, matmul_reduce_scatter,
};
use rustix::process::Signal;

use super::failures;
use crate::support::numbers::{Reference, bits, nan, normal};
use crate::support::processes::Rank;
use crate::support::tested::{Tested, all_done, connect, poisoned, ranks, same_error};

/// The matrices of a product whose K is spread over the ranks.
#[derive(Clone, Debug, Default)]
pub struct Case {
    pub rows: Vec<usize>,
    pub n: usize,
    /// On rank 0.
    pub k: usize,
    /// By how much it is more on each next rank.
    pub more: usize,
    pub bias: bool,
    /// What ranks 0 and 1 make is large, and adds up to nothing: added in another order, it takes what rank 2 makes
    /// with it.
    pub cancels: bool,
    pub workers: usize,
    pub seed: u64,
}

impl Case {
    /// Small, for three ranks of which one has no rows.
    fn of_three(bias: bool) -> Case {
        Case {
            rows: vec![40, 0, 61],
            n: 48,
            k: 16,
            more: 16,
            bias,
            seed: 9,
            ..Case::default()
        }
    }

    fn m(&self) -> usize {
        self.rows.iter().sum()
    }

    fn k_of(&self, rank: usize) -> usize {
        self.k + rank * self.more
    }

    /// The part of `a` and of the weight that a rank has.
    fn operands<T: Half>(&self, rank: usize) -> [Vec<T>; 2] {
        let k = self.k_of(rank);
        let like = if self.cancels && rank == 1 { 0 } else { rank };
        let seed = self.seed ^ (like as u64 + 1) << 40;
        let scale = match rank {
            0 if self.cancels => 2f32.powi(20),
            1 if self.cancels => -2f32.powi(20),
            _ => 1.0,
        };
        let mut a: Vec<T> = normal(seed, self.m() * k);
        a.iter_mut()
            .for_each(|x| *x = T::from_f32(x.to_f32() * scale));
        [a, normal(!seed, self.n * k)]
    }

    fn bias<T: Half>(&self) -> Option<Vec<T>> {
        self.bias.then(|| normal(self.seed ^ 77, self.n))
    }

    /// Where the rows of `rank` begin.
    fn first(&self, rank: usize) -> usize {
        self.rows[..rank].iter().sum()
    }
}

/// Sums of `partials` in f32, one after the other, then the bias; rounded once.
fn plain_sum<T: Half>(partials: &[Vec<T>], bias: Option<&[T]>) -> Vec<T> {
    let sum = |index: usize| {
        let mut values = partials.iter().map(|partial| partial[index].to_f32());
        let first = values.next().unwrap();
        let sum = values.fold(first, |sum, value| sum + value);
        let n = bias.map_or(1, <[T]>::len);
        T::from_f32(bias.map_or(sum, |bias| sum + bias[index % n].to_f32()))
    };
    (0..partials[0].len()).map(sum).collect()
}

/// A case in a rank's memory.
pub struct Placed<B: Tested, T: Half> {
    a: Matrix<B, T>,
    b: Matrix<B, T>,
    bias: Option<Matrix<B, T>>,
    pub out: Matrix<B, T>,
}

impl<B: Tested, T: Half> Placed<B, T> {
    pub fn new(group: &Group<B>, case: &Case) -> Result<Placed<B, T>, Error> {
        let rank = group.rank();
        let [a, b] = case.operands::<T>(rank);
        let (n, k) = (case.n, case.k_of(rank));
        let bias = case.bias::<T>();
        Ok(Placed {
            a: group.upload(&a, case.m(), k)?,
            b: group.upload(&b, n, k)?,
            bias: bias.map(|bias| group.upload(&bias, 1, n)).transpose()?,
            out: group.zeros(case.rows[rank], n)?,
        })
    }

    /// The output of this rank, made anew.
    pub fn run(&mut self, case: &Case, config: Option<Config>) -> Result<Vec<T>, Error> {
        self.poison()?;
        self.enqueue(case, config)?;
        self.out.to_vec()
    }

    /// The output of all ranks, made anew.
    fn run_all(
        &self,
        config: Option<Config>,
        out: &mut ShardedMatrix<B, T>,
    ) -> Result<Vec<T>, Error> {
        let [m, n] = out.shape();
        out.write(0, &vec![nan::<T>(); m * n])?;
        all_reduce(self.bias.as_ref(), config).run(&self.a, &self.b, &mut *out)?;
        out.to_vec()
    }

    /// The call alone.
    pub fn enqueue(&mut self, case: &Case, config: Option<Config>) -> Result<(), Error> {
        let operation = reduce_scatter(case, self.bias.as_ref(), config);
        operation.run(&self.a, &self.b, &mut self.out)
    }

    pub fn poison(&mut self) -> Result<(), Error> {
        let [rows, n] = self.out.shape();
        self.out.copy_from_host(&vec![nan::<T>(); rows * n])
    }
}

fn reduce_scatter<'a, B: Tested, T: Half>(
    case: &'a Case,
    bias: Option<&'a Matrix<B, T>>,
    config: Option<Config>,
) -> MatmulReduceScatter<'a, B, T> {
    let mut operation = MatmulReduceScatter::new().rows(&case.rows);
    if let Some(bias) = bias {
        operation = operation.bias(bias);
    }
    if let Some(config) = config {
        operation = operation.config(config);
    }
    operation
}

fn all_reduce<'a, B: Tested, T: Half>(
    bias: Option<&'a Matrix<B, T>>,
    config: Option<Config>,
) -> MatmulAllReduce<'a, B, T> {
    let mut operation = MatmulAllReduce::new();
    if let Some(bias) = bias {
        operation = operation.bias(bias);
    }
    if let Some(config) = config {
        operation = operation.config(config);
    }
    operation
}

/// The group of all ranks; on the host with so many workers a rank.
fn group<B: Tested>(rank: &Rank, workers: usize) -> Result<Group<B>, Error> {
    let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(workers);
    builder.connect(rank.rank, rank.world, &rank.address)
}

/// What each rank makes of its part of K, rounded: by itself, with no others.
fn partials<B: Tested, T: Half>(
    group: &Group<B>,
    address: &str,
    case: &Case,
    config: Option<Config>,
) -> Result<Vec<Vec<T>>, Error> {
    let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
    let alone = builder.connect(0, 1, &format!("{address}-alone-{}", group.rank()))?;
    let rank = group.rank();
    let [a, b] = case.operands::<T>(rank);
    let (m, n, k) = (case.m(), case.n, case.k_of(rank));
    let (placed_a, placed_b) = (alone.upload(&a, m, k)?, alone.upload(&b, n, k)?);
    let mut out = alone.zeros::<T>(m, n)?;
    let mut operation = MatmulReduceScatter::new();
    // The kernels of sums have tiles of their own, but the bits are those of each route.
    if let Some(config) = config {
        operation = operation.config(config.with_route(Route::Pull));
    }
    operation.run(&placed_a, &placed_b, &mut out)?;
    let partial = out.to_vec()?;
    if let Err(what) = Reference::new(&a, &b, None, k).check(&partial) {
        panic!("the partial of rank {rank}, {case:?}: {what}");
    }
    let all = group.all_gather_bytes(bytemuck::cast_slice(&partial))?;
    let value = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes);
    let values = |bytes: &Vec<u8>| bytes.chunks_exact(size_of::<T>()).map(value).collect();
    Ok(all.iter().map(values).collect())
}

/// Both operations give the bits of the plain sum of partials, which is as near to float64 as the documentation says.
#[track_caller]
pub fn verify<B: Tested, T: Half>(
    group: &Group<B>,
    address: &str,
    case: &Case,
    config: Option<Config>,
) -> Result<(), Error> {
    let mut placed = Placed::<B, T>::new(group, case)?;
    let mut out = group.sharded_rows::<T>(&case.rows, case.n)?;
    // What the library chooses may cut K otherwise for each operation, and for one rank alone.
    let scatter = reduce_scatter(case, placed.bias.as_ref(), config).prepare(&placed.a, case.n)?;
    let reduce = all_reduce(placed.bias.as_ref(), config).prepare(&placed.a, &out)?;
    let configs = [scatter.config(), reduce.config()];
    let sum = |name: &str, config| -> Result<Vec<T>, Error> {
        let address = format!("{address}-{name}");
        let partials = partials::<B, T>(group, &address, case, Some(config))?;
        let sum = plain_sum(&partials, case.bias::<T>().as_deref());
        Exact::new(case, &partials).check(case, &sum);
        Ok(sum)
    };
    let own = case.first(group.rank()) * case.n..case.first(group.rank() + 1) * case.n;
    let expected = sum("scatter", configs[0])?;
    let found = placed.run(case, config)?;
    assert!(
        bits(&found) == bits(&expected[own]),
        "{case:?}, {configs:?}"
    );
    let expected = match configs[0].tile.split_k == configs[1].tile.split_k {
        true => expected,
        false => sum("reduce", configs[1])?,
    };
    let found = placed.run_all(config, &mut out)?;
    assert!(bits(&found) == bits(&expected), "{case:?}, {configs:?}");
    Ok(())
}

/// 100 times, under delays that differ each time, by all routes and in several ways to cut it up: the bits of a plain
/// sum of partials in the order of the ranks. And each is as near to float64 as the documentation says.
#[track_caller]
pub fn partials_are_added_in_the_order_of_the_ranks<B: Tested>(
    test: &str,
    world: usize,
    cases: &[Case],
    configs: &[Option<Config>],
    routes: &[Route],
) {
    all_done(ranks::<B>(test, world, |rank| {
        let workers = cases.iter().map(|case| case.workers).max();
        let group = group::<B>(rank, workers.unwrap_or(1))?;
        let mut placed = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let address = format!("{}-{index}", rank.address);
            let partials = partials::<B, bf16>(&group, &address, case, configs[0])?;
            let bias = case.bias::<bf16>();
            let own = case.first(rank.rank) * case.n..case.first(rank.rank + 1) * case.n;
            let sum = plain_sum(&partials, bias.as_deref());
            let exact = Exact::new(case, &partials);
            exact.check(case, &sum);
            placed.push((Placed::<B, bf16>::new(&group, case)?, sum[own].to_vec()));
        }
        for seed in 0..100usize {
            gemmesh::testing::delay_chunks(Some(seed as u64));
            let case = seed % cases.len();
            let (matrices, expected) = &mut placed[case];
            let turn = seed / cases.len();
            let route = routes[turn % routes.len()];
            let config = configs[turn / routes.len() % configs.len()];
            let config = config.map(|config| config.with_route(route));
            let found = matrices.run(&cases[case], config)?;
            assert!(
                bits(&found) == bits(expected),
                "seed {seed}, {config:?}, {:?}",
                cases[case]
            );
        }
        gemmesh::testing::delay_chunks(None);
        Ok("the same bits 100 times".into())
    }));
}

/// 100 times, as [`partials_are_added_in_the_order_of_the_ranks`]: every rank gets the bits of that sum, of all rows.
#[track_caller]
pub fn all_ranks_get_the_same_bits<B: Tested>(
    test: &str,
    world: usize,
    cases: &[Case],
    configs: &[Option<Config>],
    routes: &[Route],
) {
    all_done(ranks::<B>(test, world, |rank| {
        let group = group::<B>(rank, 2)?;
        let mut placed = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let address = format!("{}-{index}", rank.address);
            let partials = partials::<B, bf16>(&group, &address, case, configs[0])?;
            let sum = plain_sum(&partials, case.bias::<bf16>().as_deref());
            let out = group.sharded_rows::<bf16>(&case.rows, case.n)?;
            placed.push((Placed::<B, bf16>::new(&group, case)?, out, sum));
        }
        for seed in 0..100usize {
            gemmesh::testing::delay_chunks(Some(seed as u64));
            let case = seed % cases.len();
            let (matrices, out, expected) = &mut placed[case];
            let turn = seed / cases.len();
            let route = routes[turn % routes.len()];
            let config = configs[turn / routes.len() % configs.len()];
            let config = config.map(|config| config.with_route(route));
            let found = matrices.run_all(config, out)?;
            assert!(
                bits(&found) == bits(expected),
                "seed {seed}, {config:?}, {:?}",
                cases[case]
            );
        }
        gemmesh::testing::delay_chunks(None);
        Ok("the same bits 100 times".into())
    }));
}

/// The sum in float64, and what the documentation allows each element to be off.
struct Exact {
    values: Vec<f64>,
    allowed: Vec<f64>,
}

impl Exact {
    fn new<T: Half>(case: &Case, partials: &[Vec<T>]) -> Exact {
        // Unit roundoffs of the type and of f32, and what a number too small for the former's may be off.
        let (u, v) = (2f64.powi(-T::DIGITS), 2f64.powi(-24));
        let tiny = 2f64.powi(T::MIN_EXPONENT - T::DIGITS);
        let (m, n, world) = (case.m(), case.n, partials.len());
        let (mut values, mut allowed) = (vec![0.0f64; m * n], vec![0.0f64; m * n]);
        let deepest = (0..world).map(|rank| case.k_of(rank)).max().unwrap();
        for (rank, partial) in partials.iter().enumerate() {
            let [a, b] = case.operands::<T>(rank);
            let k = case.k_of(rank);
            for (index, (value, allowed)) in values.iter_mut().zip(&mut allowed).enumerate() {
                let (row, column) = (index / n, index % n);
                let rows = a[row * k..][..k].iter().zip(&b[column * k..][..k]);
                for (x, y) in rows {
                    let term = f64::from(x.to_f32()) * f64::from(y.to_f32());
                    *value += term;
                    *allowed += (deepest + world) as f64 * v * term.abs();
                }
                *allowed += (u * f64::from(partial[index].to_f32()).abs()).max(tiny);
            }
        }
        let bias = case.bias::<T>();
        for (index, (value, allowed)) in values.iter_mut().zip(&mut allowed).enumerate() {
            *value += bias
                .as_ref()
                .map_or(0.0, |bias| bias[index % n].to_f32().into());
            *allowed += (u * value.abs()).max(tiny);
            // What is left out at first order.
            *allowed *= 1.01;
        }
        Exact { values, allowed }
    }

    #[track_caller]
    fn check<T: Half>(&self, case: &Case, found: &[T]) {
        for (index, found) in found.iter().enumerate() {
            let error = (f64::from(found.to_f32()) - self.values[index]).abs();
            assert!(
                error <= self.allowed[index],
                "{case:?}: element {index} is {} and should be {}",
                found.to_f32(),
                self.values[index]
            );
        }
    }
}

/// The bits of a row do not depend on who owns it.
#[track_caller]
pub fn bits_do_not_depend_on_the_split<B: Tested>(
    test: &str,
    splits: &[[usize; 3]],
    [n, k]: [usize; 2],
    config: Option<Config>,
) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = group::<B>(rank, 1)?;
        let mut first: Option<Vec<u8>> = None;
        for split in splits {
            let case = Case {
                rows: split.to_vec(),
                n,
                k,
                more: 8,
                bias: true,
                seed: 5,
                ..Case::default()
            };
            let own = Placed::<B, bf16>::new(&group, &case)?.run(&case, config)?;
            let all = group.all_gather_bytes(bytemuck::cast_slice(&own))?.concat();
            assert_eq!(all.len(), 2 * case.m() * case.n);
            assert!(*first.get_or_insert(all.clone()) == all, "{split:?}");
        }
        Ok("the same".into())
    }));
}

/// The output is the next product's input: rows of a sharded matrix.
#[track_caller]
pub fn the_output_may_be_the_own_rows_of_a_sharded_matrix<B: Tested>(
    test: &str,
    configs: &[Option<Config>],
) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = group::<B>(rank, 1)?;
        let case = Case::of_three(false);
        let mut placed = Placed::<B, bf16>::new(&group, &case)?;
        let expected = placed.run(&case, None)?;
        let all = group
            .all_gather_bytes(bytemuck::cast_slice(&expected))?
            .concat();
        let mut x = group.sharded_rows::<bf16>(&case.rows, case.n)?;
        let weight = normal::<bf16>(3, 8 * case.n);
        let b = group.upload(&weight, 8, case.n)?;
        let mut out = group.zeros::<bf16>(case.m(), 8)?;
        for &config in configs.iter().cycle().take(10) {
            x.poison(bf16::NAN)?;
            group.barrier()?;
            let operation = reduce_scatter(&case, None, config);
            operation.run_into(&placed.a, &placed.b, &mut x)?;
            all_gather_matmul(&x, &b, &mut out)?;
            let rows = x.to_vec()?;
            assert!(bytemuck::cast_slice::<bf16, u8>(&rows) == all);
            if let Err(what) = Reference::new(&rows, &weight, None, case.n).check(&out.to_vec()?) {
                panic!("rank {}: {what}", rank.rank);
            }
        }
        let wrong = [case.m(), 0, 0];
        let operation = MatmulReduceScatter::new().rows(&wrong);
        let error = operation
            .run_into(&placed.a, &placed.b, &mut x)
            .unwrap_err();
        assert!(matches!(error.kind(), Kind::Shape { .. }), "{error}");
        Ok("right".into())
    }));
}

/// A call that was prepared gives the bits of the plain one each time, and refuses other shapes; then the group goes
/// on.
#[track_caller]
pub fn a_prepared_call_gives_the_bits_of_the_plain_one<B: Tested>(
    test: &str,
    configs: &[Option<Config>],
) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = group::<B>(rank, 1)?;
        let case = Case::of_three(true);
        let (m, n, k) = (case.m(), case.n, case.k_of(rank.rank));
        let own = case.first(rank.rank) * n..case.first(rank.rank + 1) * n;
        let mut placed = Placed::<B, bf16>::new(&group, &case)?;
        let mut sharded = group.sharded_rows::<bf16>(&case.rows, n)?;
        let mut other = group.sharded_rows::<bf16>(&[m, 0, 0], n)?;
        for &config in configs {
            let expected = placed.run(&case, config)?;
            let all = group.all_gather_bytes(bytemuck::cast_slice(&expected))?;
            let Placed { a, b, bias, out } = &mut placed;
            let (a, b) = (&*a, &*b);
            let scatter = reduce_scatter(&case, bias.as_ref(), config).prepare(a, n)?;
            let reduce = all_reduce(bias.as_ref(), config).prepare(a, &sharded)?;
            if let Some(config) = config {
                assert_eq!([scatter.config(), reduce.config()], [config; 2]);
            }
            for _ in 0..3 {
                out.copy_from_host(&vec![bf16::NAN; own.len()])?;
                scatter.run(a, b, &mut *out)?;
                assert!(bits(&out.to_vec()?) == bits(&expected), "{config:?}");
                sharded.write(0, &vec![bf16::NAN; m * n])?;
                group.barrier()?;
                scatter.run_into(a, b, &mut sharded)?;
                let rows = sharded.to_vec()?;
                assert!(bits(&rows[own.clone()]) == bits(&expected), "{config:?}");
                reduce.run(a, b, &mut sharded)?;
                let rows = sharded.to_vec()?;
                assert!(
                    bytemuck::cast_slice::<bf16, u8>(&rows) == all.concat(),
                    "{config:?}"
                );
            }

            let refused = |result: Result<(), Error>, what: &str| {
                let error = result.unwrap_err();
                assert!(matches!(error.kind(), Kind::Shape { .. }), "{error}");
                assert!(error.to_string().contains(what), "{error}");
            };
            let tall = group.zeros::<bf16>(m + 1, k)?;
            refused(scatter.run(&tall, b, &mut *out), "a [M, K]");
            refused(reduce.run(&tall, b, &mut sharded), "a [M, K]");
            let deep = group.zeros::<bf16>(n, k + 8)?;
            refused(scatter.run(a, &deep, &mut *out), "b [N, K]");
            refused(reduce.run(a, &deep, &mut sharded), "b [N, K]");
            let mut long = group.zeros::<bf16>(case.rows[rank.rank] + 1, n)?;
            refused(scatter.run(a, b, &mut long), "out [rows of this rank, N]");
            let split = "out (rows of each rank)";
            refused(scatter.run_into(a, b, &mut other), split);
            refused(reduce.run(a, b, &mut other), split);
        }
        Ok("the same".into())
    }));
}

/// What does not fit is refused, and the group goes on.
#[track_caller]
pub fn what_does_not_fit_is_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = group::<B>(rank, 1)?;
        let [m, n, k] = [9, 8, 16];
        let own = m / 2 + usize::from(rank.rank < m % 2);
        let a = group.zeros::<bf16>(m, k)?;
        let b = group.zeros::<bf16>(n, k)?;
        let mut out = group.zeros::<bf16>(own, n)?;
        let refused = |result: Result<(), Error>, what: &str| {
            let error = result.unwrap_err();
            let said = error.to_string();
            let fits = matches!(error.kind(), Kind::Shape { .. } | Kind::Unsuitable { .. });
            assert!(fits, "{error}");
            assert!(
                said.contains(what) && said.contains("matmul_reduce_scatter"),
                "{said}"
            );
        };
        let narrow = group.zeros::<bf16>(n, k - 1)?;
        refused(matmul_reduce_scatter(&a, &narrow, &mut out), "b [N, K]");
        let mut long = group.zeros::<bf16>(own + 1, n)?;
        refused(
            matmul_reduce_scatter(&a, &b, &mut long),
            "out [rows of this rank, N]",
        );
        let [few, more] = [vec![m], vec![m, 1]];
        let few = MatmulReduceScatter::new().rows(&few);
        refused(
            few.run(&a, &b, &mut out),
            "is 1 and must be 2, that of the group",
        );
        let more = MatmulReduceScatter::new().rows(&more);
        refused(more.run(&a, &b, &mut out), "must be 9, that of the product");
        let bias = group.zeros::<bf16>(1, n + 1)?;
        let biased = MatmulReduceScatter::new().bias(&bias);
        refused(biased.run(&a, &b, &mut out), "bias [1, N]");
        matmul_reduce_scatter(&a, &b, &mut out)?;
        assert!(out.to_vec()?.iter().all(|&x| x == bf16::ZERO));
        Ok("refused".into())
    }));
}

/// A rank whose M or split is another is named.
#[track_caller]
pub fn other_rows_are_a_mismatch<B: Tested>(test: &str, theirs: [usize; 2]) {
    let ranks = ranks::<B>(test, 2, |rank| {
        let group = group::<B>(rank, 1)?;
        let rows = if rank.rank == 1 { theirs } else { [5, 4] };
        let a = group.zeros::<bf16>(rows.iter().sum(), 16)?;
        let b = group.zeros::<bf16>(8, 16)?;
        let mut out = group.zeros::<bf16>(rows[rank.rank], 8)?;
        let operation = MatmulReduceScatter::new().rows(&rows);
        let result = operation.run(&a, &b, &mut out);
        poisoned(&group, result.and_then(|()| group.synchronize()))
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::CallMismatch { .. })
        ),
        "{error}"
    );
    let words = error.to_string();
    assert!(
        words.contains("matmul_reduce_scatter(M = 9, N = 8"),
        "{words}"
    );
}

/// A rank that gives a bias, where others give none, is named: they would add up other sums.
#[track_caller]
pub fn a_bias_on_some_ranks_only_is_a_mismatch<B: Tested>(test: &str) {
    let ranks = ranks::<B>(test, 2, |rank| {
        let group = group::<B>(rank, 1)?;
        let case = Case {
            rows: vec![5, 4],
            n: 8,
            k: 16,
            bias: rank.rank == 1,
            seed: 3,
            ..Case::default()
        };
        let mut placed = Placed::<B, bf16>::new(&group, &case)?;
        let result = placed.run(&case, None);
        poisoned(&group, result.and_then(|_| group.synchronize()))
    });
    let outcomes = ranks.outcomes();
    let error = same_error(&outcomes);
    let words = error.to_string();
    assert!(
        matches!(error.kind(), Kind::CallMismatch { .. })
            && words.contains("rank 1 called matmul_reduce_scatter at ")
            && words.contains(" with a bias, and rank 0 at "),
        "{words}"
    );
}

/// Rank `victim` is killed while it does not make the call in which the others wait for its partials.
#[track_caller]
pub fn kill_while_the_others_wait<B: Tested>(test: &str, victim: usize, config: Option<Config>) {
    let ranks = ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let case = Case {
            rows: vec![3, 2, 4],
            n: 8,
            k: 16,
            more: 8,
            seed: 1,
            ..Case::default()
        };
        let mut placed = Placed::<B, bf16>::new(&group, &case)?;
        placed.run(&case, config)?;
        rank.say("here");
        if rank.rank == victim {
            rank.hear();
        }
        let result = placed.run(&case, config);
        failures::fails(rank, &group, result.map(drop))
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(victim, Signal::KILL);
    failures::assert_lost::<B>(ranks, 3, victim, killed);
}
