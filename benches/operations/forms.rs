//! Products with several weights, with an epilogue, with weights [K, N], and of one rank, timed beside plain products.

use std::fmt::Write;
use std::ops::Range;

use clap::ValueEnum;
use gemmesh::schedule::{Layout, Refusal};
use gemmesh::{
    Activation, AllGatherMatmul, Backend, Config, DType, Float, Group, Half, Host, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, Prepared, PreparedAllReduce, PreparedMatmul,
    PreparedReduceScatter, Result, ShardedMatrix, WeightLayout,
};
use rayon::prelude::*;
use serde_json::json;

use crate::common::{self, Check, Exact, Factors, Failure, Row, random, rows_within, sample_rows};
use crate::{Args, Op, PRODUCTS, Sweep, append, commit, sweep, unix_time};

/// A step of the epilogue, which follows a product before it is stored.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Epilogue {
    Bias,
    Relu,
    Gelu,
    GeluTanh,
    Silu,
    /// Two weights of N columns: the function of the first product, times the second.
    Gated,
    Residual,
    /// The output is of f32.
    F32,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Layouts {
    Nk,
    Kn,
}

/// The form that the arguments ask for, without extents.
#[derive(Clone)]
struct Form {
    /// The columns that are multiplied, of each weight.
    widths: Vec<usize>,
    epilogue: Vec<Epilogue>,
    layout: WeightLayout,
}

impl Form {
    fn of(args: &Args, n: usize) -> Form {
        let shares = &args.weights;
        let all: usize = shares.iter().sum();
        let width = |share: usize| (n * share / all).next_multiple_of(8);
        let widths = match args.epilogue.contains(&Epilogue::Gated) {
            true => vec![n, n],
            false if shares.is_empty() => vec![n],
            false => shares.iter().map(|&share| width(share)).collect(),
        };
        Form {
            widths,
            epilogue: args.epilogue.clone(),
            layout: match args.b_layout {
                Layouts::Nk => WeightLayout::Nk,
                Layouts::Kn => WeightLayout::Kn,
            },
        }
    }

    /// One weight [N, K] of `n` columns, and nothing else.
    fn plain(n: usize) -> Form {
        Form {
            widths: vec![n],
            epilogue: Vec::new(),
            layout: WeightLayout::Nk,
        }
    }

    fn has(&self, what: Epilogue) -> bool {
        self.epilogue.contains(&what)
    }

    fn activation(&self) -> Activation {
        let of = |what: &Epilogue| match what {
            Epilogue::Relu => Some(Activation::Relu),
            Epilogue::Gelu => Some(Activation::Gelu),
            Epilogue::GeluTanh => Some(Activation::GeluTanh),
            Epilogue::Silu => Some(Activation::Silu),
            _ => None,
        };
        self.epilogue.iter().find_map(of).unwrap_or_default()
    }

    /// Columns of each output.
    fn outputs(&self) -> &[usize] {
        &self.widths[..if self.has(Epilogue::Gated) {
            1
        } else {
            self.widths.len()
        }]
    }

    /// Columns that are multiplied.
    fn multiplied(&self) -> usize {
        self.widths.iter().sum()
    }
}

/// The rows that a rank multiplies.
enum Rows<B: Backend, T: Half> {
    Own(Matrix<B, T>),
    Gathered(ShardedMatrix<B, T>),
}

/// The operands of a form.
struct Operands<B: Backend, T: Half> {
    op: Op,
    form: Form,
    group: Group<B>,
    m: usize,
    k: usize,
    a: Rows<B, T>,
    weights: Vec<Matrix<B, T>>,
    bias: Option<Matrix<B, T>>,
    residual: Option<Matrix<B, T>>,
}

/// The outputs.
enum Out<B: Backend, T: Half> {
    Own(Vec<Matrix<B, T>>),
    Wide(Vec<Matrix<B, f32>>),
    Shared(ShardedMatrix<B, T>),
}

enum Call<'a, B: Backend, T: Half> {
    Alone(PreparedMatmul<'a, B, T>),
    Gathers(Prepared<'a, B, T>),
    Scatters(PreparedReduceScatter<'a, B, T>),
    Reduces(PreparedAllReduce<'a, B, T>),
}

impl<B: Backend, T: Half> Call<'_, B, T> {
    fn config(&self) -> Config {
        match self {
            Call::Alone(call) => call.config(),
            Call::Gathers(call) => call.config(),
            Call::Scatters(call) => call.config(),
            Call::Reduces(call) => call.config(),
        }
    }
}

/// The elements of a rank's weight number `weight`, [N, K].
fn weight_of<T: Half>(rank: usize, weight: usize, n: usize, k: usize) -> Vec<T> {
    random(n * k, 1001 + 16 * rank as u64 + weight as u64)
}

/// A rank's rows, or its part of K of all.
fn rows_of<T: Half>(rank: usize, count: usize) -> Vec<T> {
    random(count, 1 + rank as u64)
}

const BIAS: u64 = 500_001;
const RESIDUAL: u64 = 500_002;

impl<B: Backend, T: Half> Operands<B, T> {
    fn random(group: &Group<B>, op: Op, [m, k]: [usize; 2], form: Form) -> Result<Self> {
        let rank = group.rank();
        let a = match op {
            Op::AllGatherMatmul => {
                let mut a = group.sharded::<T>(m, k)?;
                let count = a.rows().len() * k;
                a.shard_mut().copy_from_host(&rows_of::<T>(rank, count))?;
                Rows::Gathered(a)
            }
            _ => Rows::Own(group.upload(&rows_of::<T>(rank, m * k), m, k)?),
        };
        let upload = |(weight, &n): (usize, &usize)| -> Result<Matrix<B, T>> {
            let values = weight_of::<T>(rank, weight, n, k);
            match form.layout {
                WeightLayout::Nk => group.upload(&values, n, k),
                WeightLayout::Kn => group.upload(&turned(&values, k), k, n),
            }
        };
        let weights = form
            .widths
            .iter()
            .enumerate()
            .map(upload)
            .collect::<Result<_>>()?;
        let columns = form.multiplied();
        let bias = || group.upload(&random::<T>(columns, BIAS), 1, columns);
        let n = form.outputs()[0];
        let own = own_rows(group, op, m)?;
        let residual = || -> Result<_> {
            let all = random::<T>(m * n, RESIDUAL);
            let rows = if op == Op::MatmulAllReduce { 0..m } else { own };
            group.upload(&all[rows.start * n..rows.end * n], rows.len(), n)
        };
        Ok(Operands {
            op,
            group: group.clone(),
            m,
            k,
            a,
            weights,
            bias: form.has(Epilogue::Bias).then(bias).transpose()?,
            residual: form.has(Epilogue::Residual).then(residual).transpose()?,
            form,
        })
    }

    fn outputs(&self) -> Result<Out<B, T>> {
        let rows = own_rows(&self.group, self.op, self.m)?.len();
        let widths = self.form.outputs().iter();
        Ok(match self.op {
            Op::MatmulAllReduce => Out::Shared(self.group.sharded(self.m, self.form.widths[0])?),
            _ if self.form.has(Epilogue::F32) => {
                let make = |&n: &usize| self.group.upload(&vec![f32::NAN; rows * n], rows, n);
                Out::Wide(widths.map(make).collect::<Result<_>>()?)
            }
            _ => {
                let nan = T::from_f32(f32::NAN);
                let make = |&n: &usize| self.group.upload(&vec![nan; rows * n], rows, n);
                Out::Own(widths.map(make).collect::<Result<_>>()?)
            }
        })
    }

    fn prepare<'a>(&'a self, out: &Out<B, T>, config: Option<Config>) -> Result<Call<'a, B, T>> {
        let form = &self.form;
        /// Sets the options that all operations have.
        macro_rules! told {
            ($operation:expr) => {{
                let mut operation = $operation
                    .activation(form.activation())
                    .weight_layout(form.layout);
                if let Some(bias) = &self.bias {
                    operation = operation.bias(bias);
                }
                if let Some(config) = config {
                    operation = operation.config(config);
                }
                operation
            }};
        }
        let mut product = told!(Matmul::new());
        let mut gathers = told!(AllGatherMatmul::new());
        let mut scatters = told!(MatmulReduceScatter::new());
        let mut reduces = told!(MatmulAllReduce::new());
        if let Some(residual) = &self.residual {
            product = product.residual(residual);
            scatters = scatters.residual(residual);
            reduces = reduces.residual(residual);
        }
        if form.has(Epilogue::Gated) {
            (product, gathers) = (product.gated(), gathers.gated());
        }
        if form.has(Epilogue::F32) {
            (product, gathers) = (
                product.output_dtype(DType::F32),
                gathers.output_dtype(DType::F32),
            );
            scatters = scatters.output_dtype(DType::F32);
        }
        Ok(match (&self.a, out) {
            (Rows::Gathered(a), _) => Call::Gathers(gathers.prepare(a, &form.widths[..])?),
            (Rows::Own(a), Out::Shared(out)) => Call::Reduces(reduces.prepare(a, out)?),
            (Rows::Own(a), _) if self.op == Op::MatmulReduceScatter => {
                Call::Scatters(scatters.prepare(a, form.widths[0])?)
            }
            _ => Call::Alone(product.prepare(&self.group, [self.m, self.k], &form.widths[..])?),
        })
    }

    fn run(&self, call: &Call<B, T>, out: &mut Out<B, T>) -> Result<()> {
        let weights = || self.weights.iter().map(Matrix::view);
        macro_rules! to {
            ($outputs:expr) => {
                $outputs.iter_mut().map(Matrix::view_mut)
            };
        }
        let b = &self.weights[0];
        match (call, &self.a, out) {
            (Call::Alone(call), Rows::Own(a), Out::Own(out)) => call.run(
                a,
                weights().collect::<gemmesh::Weights<_, _>>(),
                to!(out).collect::<gemmesh::Outputs<_, _>>(),
            ),
            (Call::Alone(call), Rows::Own(a), Out::Wide(out)) => call.run(
                a,
                weights().collect::<gemmesh::Weights<_, _>>(),
                to!(out).collect::<gemmesh::Outputs<_, _>>(),
            ),
            (Call::Gathers(call), Rows::Gathered(a), Out::Own(out)) => call.run(
                a,
                weights().collect::<gemmesh::Weights<_, _>>(),
                to!(out).collect::<gemmesh::Outputs<_, _>>(),
            ),
            (Call::Gathers(call), Rows::Gathered(a), Out::Wide(out)) => call.run(
                a,
                weights().collect::<gemmesh::Weights<_, _>>(),
                to!(out).collect::<gemmesh::Outputs<_, _>>(),
            ),
            (Call::Scatters(call), Rows::Own(a), Out::Own(out)) => call.run(a, b, &mut out[0]),
            (Call::Scatters(call), Rows::Own(a), Out::Wide(out)) => call.run(a, b, &mut out[0]),
            (Call::Reduces(call), Rows::Own(a), Out::Shared(out)) => call.run(a, b, out),
            _ => unreachable!("a call is prepared for its operands"),
        }
    }

    /// Compares the output with float64, or some rows of it if all take more than `products` products.
    fn check(&self, out: &mut Out<B, T>, products: usize) -> Result<Check> {
        let mut check = Check::default();
        let own = own_rows(&self.group, self.op, self.m)?;
        let seed = 7 + own.start as u64;
        let count = rows_within(products, self.form.multiplied(), self.k).min(own.len());
        let rows = sample_rows(own.len(), count, seed);
        let mut exact = self.exact_products(own.start, &rows)?;
        self.follow(&mut exact);
        if self.residual.is_some() {
            let n = self.form.outputs()[0];
            let all: Vec<T> = random(self.m * n, RESIDUAL);
            let place = own.start * n;
            for (index, number) in exact[0].iter_mut().enumerate() {
                let residual = all[place + rows[index / n] * n + index % n];
                *number = number.plus(residual.to_f32().into());
            }
        }
        for (output, (exact, &n)) in exact.iter().zip(self.form.outputs()).enumerate() {
            match out {
                Out::Own(out) => compare(&mut check, exact, &out[output].to_vec()?, &rows, n),
                Out::Wide(out) => compare(&mut check, exact, &out[output].to_vec()?, &rows, n),
                Out::Shared(out) => {
                    let all = out.to_vec()?;
                    compare(&mut check, exact, &all[own.start * n..], &rows, n);
                }
            }
        }
        Ok(check)
    }

    /// Rows of the product with each weight, counted from the `first` that this rank makes, with the bias.
    fn exact_products(&self, first: usize, rows: &[usize]) -> Result<Vec<Vec<Number>>> {
        // If the operation is a sum, each rank has a part of K. If it gathers, each rank has a part of the rows.
        let (ranks, of_k) = match self.op {
            Op::MatmulReduceScatter | Op::MatmulAllReduce => (0..self.group.world_size(), true),
            _ => (self.group.rank()..self.group.rank() + 1, false),
        };
        let a = self.multiplied_rows(ranks.clone())?;
        let begin = if of_k { first } else { 0 } * self.k;
        let bias: Vec<T> = random(self.form.multiplied(), BIAS);
        let mut bias = &bias[..];
        let mut exact = Vec::new();
        for (weight, &n) in self.form.widths.iter().enumerate() {
            let of = |rank| weight_of(rank, weight, n, self.k);
            let b: Vec<Vec<T>> = ranks.clone().map(of).collect();
            let factors = a.iter().zip(&b).map(|(a, b)| Factors {
                a: &a[begin..],
                b,
                k: self.k,
            });
            let factors: Vec<Factors<T>> = factors.collect();
            let terms = self.k * factors.len();
            let mut numbers = in_blocks(&factors, rows, n, |exact| {
                let sums = (terms as f64).sqrt() * 2f64.powi(-23) * exact.magnitude;
                let off = if of_k {
                    sums + exact.products * 2f64.powi(-T::DIGITS)
                } else {
                    sums
                };
                Number {
                    exact: exact.value,
                    off,
                }
            });
            if self.bias.is_some() {
                for (index, number) in numbers.iter_mut().enumerate() {
                    *number = number.plus(bias[index % n].to_f32().into());
                }
            }
            bias = &bias[n..];
            exact.push(numbers);
        }
        Ok(exact)
    }

    /// The rows that each of these ranks multiplies. If rows are gathered, these are the rows of all ranks.
    fn multiplied_rows(&self, ranks: Range<usize>) -> Result<Vec<Vec<T>>> {
        let (world, k) = (self.group.world_size(), self.k);
        Ok(match &self.a {
            Rows::Gathered(_) => {
                let layout = Layout::balanced(self.m, k, world)
                    .map_err(Refusal::of(self.group.rank(), "Layout::balanced"))?;
                let of = |rank| rows_of::<T>(rank, layout.rows_of(rank).len() * k);
                vec![(0..world).flat_map(of).collect()]
            }
            Rows::Own(_) => ranks.map(|rank| rows_of(rank, self.m * k)).collect(),
        })
    }

    /// Applies the function to products. With a gate, the second factors are taken out of them.
    fn follow(&self, exact: &mut Vec<Vec<Number>>) {
        let (activation, to_f32) = (self.form.activation(), self.form.has(Epilogue::F32));
        let is_gated = self.form.has(Epilogue::Gated);
        let up = if is_gated { exact.pop() } else { None };
        for number in exact.iter_mut().flatten() {
            *number = number.activated(activation, to_f32);
        }
        for (gate, up) in exact.iter_mut().flatten().zip(up.unwrap_or_default()) {
            *gate = gate.times(up);
        }
    }
}

/// The rows of the output, of M, that this rank makes.
fn own_rows<B: Backend>(group: &Group<B>, op: Op, m: usize) -> Result<Range<usize>> {
    Ok(match op {
        Op::MatmulReduceScatter | Op::MatmulAllReduce => Layout::balanced(m, 1, group.world_size())
            .map_err(Refusal::of(group.rank(), "Layout::balanced"))?
            .rows_of(group.rank()),
        _ => 0..m,
    })
}

/// A number in float64, and how far a result may be from it before it is rounded to its type.
#[derive(Clone, Copy)]
pub struct Number {
    pub exact: f64,
    pub off: f64,
}

impl Number {
    fn plus(self, addend: f64) -> Number {
        let exact = self.exact + addend;
        let off = self.off + exact.abs() * 2f64.powi(-23);
        Number { exact, off }
    }

    pub fn times(self, other: Number) -> Number {
        let exact = self.exact * other.exact;
        let off = self.off * other.exact.abs() + other.off * self.exact.abs();
        Number {
            exact,
            off: off + self.off * other.off + exact.abs() * 2f64.powi(-23),
        }
    }

    /// No function's slope is above 1.13. The function may be off by 2⁻¹⁹ of its argument, and GELU, for an output of
    /// 16 bits, by 2⁻¹⁵.
    pub fn activated(self, activation: Activation, to_f32: bool) -> Number {
        let x = self.exact;
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let exact = match activation {
            Activation::Relu => x.max(0.0),
            Activation::Gelu => 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2),
            Activation::GeluTanh => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                x * sigmoid(2.0 * u)
            }
            Activation::Silu => x * sigmoid(x),
            _ => return self,
        };
        let bits = match activation {
            Activation::Gelu if !to_f32 => 15,
            _ => 19,
        };
        let off = 1.13 * self.off + x.abs() * 2f64.powi(-bits);
        Number { exact, off }
    }
}

/// [`common::exact`] of all columns, by several threads.
pub fn in_blocks<T: Half>(
    factors: &[Factors<T>],
    rows: &[usize],
    n: usize,
    number: impl Fn(&Exact) -> Number + Sync,
) -> Vec<Number> {
    const COLUMNS: usize = 256;
    let blocks: Vec<(usize, Vec<Exact>)> = (0..n)
        .into_par_iter()
        .step_by(COLUMNS)
        .map(|first| {
            (
                first,
                common::exact(factors, rows, first..n.min(first + COLUMNS)),
            )
        })
        .collect();
    let mut all = vec![
        Number {
            exact: 0.0,
            off: 0.0
        };
        rows.len() * n
    ];
    for (first, block) in blocks {
        // No rows have no columns either.
        let width = (block.len() / rows.len().max(1)).max(1);
        for (row, values) in block.chunks_exact(width).enumerate() {
            let to = &mut all[row * n + first..][..width];
            to.iter_mut()
                .zip(values)
                .for_each(|(to, exact)| *to = number(exact));
        }
    }
    all
}

/// Compares the given rows of an output of `n` columns with what they should be.
pub fn compare<T: Float>(check: &mut Check, exact: &[Number], out: &[T], rows: &[usize], n: usize) {
    let mut largest = 0f64;
    for (exact, &row) in exact.chunks_exact(n).zip(rows) {
        for (exact, found) in exact.iter().zip(&out[row * n..]) {
            let error = (f64::from(found.to_f32()) - exact.exact).abs();
            let rounding = (exact.exact.abs() + exact.off) * 2f64.powi(-T::DIGITS);
            // This also holds for numbers near zero, which have fewer digits.
            let allowed = 1.001 * (exact.off + rounding) + 2f64.powi(T::MIN_EXPONENT - T::DIGITS);
            check.add(error, error / allowed);
            largest = largest.max(exact.exact.abs());
        }
    }
    check.max_rel_err = check.max_rel_err.max(check.max_abs_err / largest);
}

/// Transposes a matrix of `columns` columns.
fn turned<T: Half>(values: &[T], columns: usize) -> Vec<T> {
    let rows = values.len() / columns;
    let mut turned: Vec<T> = bytemuck::zeroed_vec(values.len());
    let lines = turned.par_chunks_mut(rows).enumerate();
    lines.for_each(|(column, line)| {
        let of_column = values[column..].iter().step_by(columns);
        line.iter_mut()
            .zip(of_column)
            .for_each(|(to, from)| *to = *from);
    });
    turned
}

/// A clock for the calls of a backend.
pub trait Clock<B: Backend, T: Half>: Sized {
    fn new(group: &Group<B>) -> Result<Self>;
    /// Microseconds that the work takes that `run` begins. Collective.
    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64>;
    /// `a · bᵀ` by a different library, if there is one here.
    #[allow(clippy::type_complexity)]
    fn peer<'a>(
        &'a self,
        _a: &'a Matrix<B, T>,
        _b: &'a Matrix<B, T>,
    ) -> Result<Option<Box<dyn Fn() -> Result<()> + 'a>>> {
        Ok(None)
    }
}

/// The time on the wall.
pub struct Wall(Group<Host>);

impl<T: Half> Clock<Host, T> for Wall {
    fn new(group: &Group<Host>) -> Result<Self> {
        Ok(Wall(group.clone()))
    }

    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.0.barrier()?;
        let begin = std::time::Instant::now();
        run()?;
        self.0.synchronize()?;
        Ok(begin.elapsed().as_secs_f64() * 1e6)
    }
}

/// The variants that are timed: their titles, and their fields in the JSON.
const VARIANTS: [(&str, &str); 4] = [
    ("as problem", "form_us"),
    ("plain: one weight [N, K] of all columns", "plain_us"),
    ("plain: a call for each weight", "calls_us"),
    ("cuBLASLt, one weight [N, K] of all columns", "cublaslt_us"),
];
/// The ratios of the first variant to the others.
const RATIOS: [(&str, usize); 3] = [("/ plain", 1), ("/ calls", 2), ("/ cuBLASLt", 3)];

/// Times products of the form that is asked for.
pub fn run<B: Backend, T: Half, C: Clock<B, T>>(args: &Args) -> Result<(), Failure> {
    check(args)?;
    let group = args.group::<B>()?;
    let clock = C::new(&group)?;
    let is_sweep = args.sweep.is_some_and(Sweep::is_drawn);
    let products = if is_sweep { 1 << 30 } else { PRODUCTS };
    let mut ratios: Vec<Vec<(usize, f64)>> = vec![Vec::new(); RATIOS.len()];
    for (index, [m, n, k]) in args.shapes().into_iter().enumerate() {
        let form = Form::of(args, n);
        let (check, config, times) = time(args, &group, &clock, [m, k], &form, products)
            .map_err(|failure| failure.of(format!("M = {m}, N = {n}, K = {k}")))?;
        for (ratios, &(_, variant)) in ratios.iter_mut().zip(&RATIOS) {
            ratios.extend(times[variant].map(|time| (m, times[0].unwrap_or(f64::NAN) / time)));
        }
        if group.rank() > 0 {
            continue;
        }
        if index == 0 {
            println!(
                "\n{:?} {}, {} backend, {} ranks, {}",
                args.op,
                described(args),
                B::NAME,
                group.world_size(),
                T::DTYPE
            );
            println!("medians in µs: {}", titles(&times));
        }
        let line = line(index, [m, k], &form, &config, &times, &ratios);
        println!("{line}");
        if let Some(path) = &args.json {
            let rows = VARIANTS
                .iter()
                .zip(times)
                .map(|(&(name, key), time)| Row::new(name, key, time));
            let mut object = json!({
                "op": format!("{:?}", args.op), "form": described(args), "backend": B::NAME, "world": group.world_size(),
                "m": m, "widths": form.widths, "k": k, "dtype": T::DTYPE.to_string(), "numerics": format!("{:?}", args.numerics), "max_rel_err": check.max_rel_err,
                "ok": check.ok(), "config": format!("{config:?}"), "iters": args.iters, "commit": commit(), "unix_time": unix_time(),
            });
            rows.for_each(|row| object[row.key] = json!(row.time));
            append(path, &object.to_string())?;
        }
    }
    if group.rank() == 0 {
        summarize(&ratios);
    }
    Ok(())
}

/// A shape's line of the table.
fn line(
    index: usize,
    [m, k]: [usize; 2],
    form: &Form,
    config: &Config,
    times: &[Option<f64>],
    ratios: &[Vec<(usize, f64)>],
) -> String {
    let mut line = format!(
        "{:>4} {m:>6} {:>16} {k:>6}  {:<29}",
        index + 1,
        format!("{:?}", form.widths),
        sweep::in_short(config)
    );
    for time in times.iter().flatten() {
        let _ = write!(line, " {time:>9.1}");
    }
    let last = |(&(name, _), all): (&(_, usize), &Vec<(usize, f64)>)| Some((name, *all.last()?));
    for (name, (_, ratio)) in RATIOS.iter().zip(ratios).filter_map(last) {
        let _ = write!(line, "  {name} {ratio:.3}");
    }
    line
}

/// Prints the summary of all shapes.
fn summarize(ratios: &[Vec<(usize, f64)>]) {
    let there = RATIOS.iter().zip(ratios);
    let there = there.filter(|(_, ratios)| !ratios.is_empty());
    let rows = there.flat_map(|(&(name, _), ratios)| {
        let name = format!("as problem {name} ({} shapes)", ratios.len());
        sweep::spread(&name, ratios)
    });
    println!("\n{}", sweep::table(&rows.collect::<Vec<_>>()));
}

/// Refuses arguments that don't fit together.
fn check(args: &Args) -> Result<(), Failure> {
    #[cfg(feature = "cuda")]
    if args.tune.is_some() || args.calibrate.is_some() {
        return Err(Failure::Usage(
            "--tune and --calibrate: not of matmul, nor of forms",
        ));
    }
    let has = |what| args.epilogue.contains(&what);
    let is_sum = matches!(args.op, Op::MatmulReduceScatter | Op::MatmulAllReduce);
    if args.weights.contains(&0) || args.weights.len() > 4 {
        return Err(Failure::Usage(
            "--weights: up to four shares, none of them 0",
        ));
    }
    if !is_sum && !matches!(args.op, Op::Matmul | Op::AllGatherMatmul) {
        return Err(Failure::Usage(
            "--weights, --epilogue and --b-layout: only of products",
        ));
    }
    if is_sum && (!args.weights.is_empty() || has(Epilogue::Gated)) {
        return Err(Failure::Usage(
            "--weights and --epilogue gated: only of matmul and all-gather-matmul",
        ));
    }
    if has(Epilogue::Gated) && !args.weights.is_empty() {
        return Err(Failure::Usage(
            "--epilogue gated: two weights of N columns, so without --weights",
        ));
    }
    if has(Epilogue::Residual) && (matches!(args.op, Op::AllGatherMatmul) || args.weights.len() > 1)
    {
        return Err(Failure::Usage(
            "--epilogue residual: of products with one output that are not of gathered rows",
        ));
    }
    if has(Epilogue::F32) && matches!(args.op, Op::MatmulAllReduce) {
        return Err(Failure::Usage("--epilogue f32: not of matmul-all-reduce"));
    }
    Ok(())
}

fn described(args: &Args) -> String {
    let name = |value: &Epilogue| {
        value
            .to_possible_value()
            .map(|value| value.get_name().to_string())
    };
    let mut words: Vec<String> = args.epilogue.iter().filter_map(name).collect();
    if args.b_layout == Layouts::Kn {
        words.push("[K, N]".into());
    }
    if !args.weights.is_empty() {
        words.push(format!("weights {:?}", args.weights));
    }
    words.join(", ")
}

fn titles(times: &[Option<f64>]) -> String {
    let there = VARIANTS
        .iter()
        .zip(times)
        .filter(|(_, time)| time.is_some());
    let titles: Vec<&str> = there.map(|(&(title, _), _)| title).collect();
    titles.join("; ")
}

/// Verifies a form, and times it beside others. Returns the medians of [`VARIANTS`].
fn time<B: Backend, T: Half, C: Clock<B, T>>(
    args: &Args,
    group: &Group<B>,
    clock: &C,
    [m, k]: [usize; 2],
    form: &Form,
    products: usize,
) -> Result<(Check, Config, [Option<f64>; VARIANTS.len()]), Failure> {
    let make = |form: Form| Operands::<B, T>::random(group, args.op, [m, k], form);
    let problem = make(form.clone())?;
    let plain = make(Form::plain(form.multiplied()))?;
    let each = match form.widths.len() {
        1 => Vec::new(),
        _ => form
            .widths
            .iter()
            .map(|&n| make(Form::plain(n)))
            .collect::<Result<Vec<_>>>()?,
    };
    let all: Vec<&Operands<B, T>> = [&problem, &plain].into_iter().chain(&each).collect();
    let mut outs = all
        .iter()
        .map(|one| one.outputs())
        .collect::<Result<Vec<_>>>()?;
    let calls: Vec<Call<B, T>> = all
        .iter()
        .zip(&outs)
        .map(|(one, out)| {
            let default = one.prepare(out, None)?.config();
            one.prepare(out, Some(args.config(default)))
        })
        .collect::<Result<_>>()?;
    let config = calls[0].config();
    group.barrier()?;
    problem.run(&calls[0], &mut outs[0])?;
    group.synchronize()?;
    let check = problem.check(&mut outs[0], products)?.everywhere(group)?;
    if !check.ok() {
        return Err(Failure::Wrong(check));
    }
    let peer = match (&plain.a, args.op) {
        (Rows::Own(a), Op::Matmul) => clock.peer(a, &plain.weights[0])?,
        _ => None,
    };
    let there = [true, true, !each.is_empty(), peer.is_some()];
    let run = |variant: usize| match variant {
        0 | 1 => all[variant].run(&calls[variant], &mut outs[variant]),
        2 => (2..all.len()).try_for_each(|one| all[one].run(&calls[one], &mut outs[one])),
        _ => peer.iter().try_for_each(|peer| peer()),
    };
    let samples = samples::<B, T, C>(args, clock, there, run)?;
    let times = common::medians(&common::slowest(group, &samples)?);
    Ok((
        check,
        config,
        std::array::from_fn(|variant| there[variant].then_some(times[variant])),
    ))
}

/// The times of those variants that are `there`, in turn.
fn samples<B: Backend, T: Half, C: Clock<B, T>>(
    args: &Args,
    clock: &C,
    there: [bool; VARIANTS.len()],
    mut run: impl FnMut(usize) -> Result<()>,
) -> Result<Vec<[f64; VARIANTS.len()]>> {
    let mut samples = Vec::new();
    for round in 0..args.warmup + args.iters {
        let mut times = [0.0; VARIANTS.len()];
        let mut order: Vec<usize> = (0..VARIANTS.len())
            .filter(|&variant| there[variant])
            .collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for variant in order {
            times[variant] = clock.time(|| run(variant))?;
        }
        if round >= args.warmup {
            samples.push(times);
        }
    }
    Ok(samples)
}
