//! Products with several weights, with an epilogue, with weights [K, N], and of one rank, timed beside plain products.

use std::fmt::Write;
use std::ops::Range;

use clap::ValueEnum;
use gemmesh::elements::{Number as _, OutputOf};
use gemmesh::fp8::{Accumulation, Quantization, Scaling};
use gemmesh::products::{
    Prepared, PreparedAllReduce, PreparedMatmul, PreparedReduceScatter, WeightLayout,
};
use gemmesh::schedule::Layout;
use gemmesh::{
    Activation, AllGatherMatmul, Backend, Config, DType, F8E4M3, Group, Host, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, Result, ShardedMatrix,
};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::common::scales::{BLOCK, GatheredScales, Placed, ScaleValues};
use crate::common::time::Time;
use crate::common::{
    self, Check, Exact, Factors, Failure, Multiplied, fast_sums_off, nearest, random, rows_within,
    sample_rows, sums_off,
};
use crate::{Args, Op, PRODUCTS, Sweep, append, commit, sweep, types, unix_time};

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
    /// The output is fp8, with a scale for each 128 columns of a row.
    Quantized,
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
    accumulation: Accumulation,
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
            accumulation: match args.fast_accumulation {
                true => Accumulation::Fast,
                false => Accumulation::Promoted,
            },
        }
    }

    /// One weight [N, K] of `n` columns, and nothing else.
    fn plain(n: usize) -> Form {
        Form {
            widths: vec![n],
            epilogue: Vec::new(),
            layout: WeightLayout::Nk,
            accumulation: Accumulation::Promoted,
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

/// The rows that a rank multiplies, with their scales.
enum Rows<B: Backend, T: Multiplied> {
    Own(Matrix<B, T>, Placed<B>),
    Gathered(ShardedMatrix<B, T>, GatheredScales<B>),
}

/// The operands of a form.
struct Operands<B: Backend, T: Multiplied> {
    op: Op,
    form: Form,
    group: Group<B>,
    m: usize,
    k: usize,
    a: Rows<B, T>,
    weights: Vec<(Matrix<B, T>, Placed<B>)>,
    scaling: Scaling,
    bias: Option<Matrix<B, T::Addend>>,
    residual: Option<Matrix<B, T::Addend>>,
}

/// The outputs.
enum Out<B: Backend, T: Multiplied, O: OutputOf<T>> {
    Own(Vec<Matrix<B, O>>),
    Wide(Vec<Matrix<B, f32>>),
    Quantized(Vec<(Matrix<B, F8E4M3>, Matrix<B, f32>)>),
    Shared(ShardedMatrix<B, T::Addend>),
}

enum Call<'a, B: Backend, T: Multiplied> {
    Alone(PreparedMatmul<'a, B, T>),
    Gathers(Prepared<'a, B, T>),
    Scatters(PreparedReduceScatter<'a, B, T>),
    Reduces(PreparedAllReduce<'a, B, T>),
}

impl<B: Backend, T: Multiplied> Call<'_, B, T> {
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
fn weight_of<T: Multiplied>(rank: usize, weight: usize, n: usize, k: usize) -> Vec<T> {
    random(n * k, 1001 + 16 * rank as u64 + weight as u64)
}

/// A rank's rows, or its part of K of all.
fn rows_of<T: Multiplied>(rank: usize, count: usize) -> Vec<T> {
    random(count, 1 + rank as u64)
}

const SCALES: u64 = 400_001;

const BIAS: u64 = 500_001;
const RESIDUAL: u64 = 500_002;

impl<B: Backend, T: Multiplied> Operands<B, T> {
    fn random(
        group: &Group<B>,
        op: Op,
        [m, k]: [usize; 2],
        form: Form,
        scaling: Scaling,
    ) -> Result<Self> {
        let rank = group.rank();
        let a = match op {
            Op::AllGatherMatmul => {
                let mut a = group.sharded::<T>(m, k)?;
                let count = a.rows().len() * k;
                a.shard_mut().copy_from_host(&rows_of::<T>(rank, count))?;
                let scales = GatheredScales::random(group, scaling, [m, k], 1, SCALES)?;
                Rows::Gathered(a, scales)
            }
            _ => {
                let scales = scales_of_rows(scaling, rank, [m, k]);
                let placed = Placed::new(group, scales.as_ref())?;
                Rows::Own(group.upload(&rows_of::<T>(rank, m * k), m, k)?, placed)
            }
        };
        let terms = terms(group, op, k);
        let upload = |(weight, &n): (usize, &usize)| -> Result<_> {
            let values = weight_of::<T>(rank, weight, n, k);
            let scales = scales_of_weight(scaling, (rank, weight), [n, k], terms);
            let matrix = match form.layout {
                WeightLayout::Nk => group.upload(&values, n, k),
                WeightLayout::Kn => group.upload(&turned(&values, k), k, n),
            };
            Ok((matrix?, Placed::new(group, scales.as_ref())?))
        };
        let weights = form
            .widths
            .iter()
            .enumerate()
            .map(upload)
            .collect::<Result<_>>()?;
        let columns = form.multiplied();
        let bias = || group.upload(&random(columns, BIAS), 1, columns);
        let n = form.outputs()[0];
        let own = own_rows(group, op, m)?;
        let residual = || -> Result<_> {
            let all = random::<T::Addend>(m * n, RESIDUAL);
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
            scaling,
            bias: form.has(Epilogue::Bias).then(bias).transpose()?,
            residual: form.has(Epilogue::Residual).then(residual).transpose()?,
            form,
        })
    }

    fn outputs<O: OutputOf<T>>(&self) -> Result<Out<B, T, O>> {
        let rows = own_rows(&self.group, self.op, self.m)?.len();
        let widths = self.form.outputs().iter();
        Ok(match self.op {
            Op::MatmulAllReduce => Out::Shared(self.group.sharded(self.m, self.form.widths[0])?),
            _ if self.form.has(Epilogue::Quantized) => {
                let nan = F8E4M3::from_f32(f32::NAN);
                let make = |&n: &usize| -> Result<_> {
                    let values = self.group.upload(&vec![nan; rows * n], rows, n)?;
                    let blocks = n.div_ceil(BLOCK);
                    let scales = vec![f32::NAN; rows * blocks];
                    Ok((values, self.group.upload(&scales, rows, blocks)?))
                };
                Out::Quantized(widths.map(make).collect::<Result<_>>()?)
            }
            _ if self.form.has(Epilogue::F32) => {
                let make = |&n: &usize| self.group.upload(&vec![f32::NAN; rows * n], rows, n);
                Out::Wide(widths.map(make).collect::<Result<_>>()?)
            }
            _ => {
                let nan = O::from_f32(f32::NAN);
                let make = |&n: &usize| self.group.upload(&vec![nan; rows * n], rows, n);
                Out::Own(widths.map(make).collect::<Result<_>>()?)
            }
        })
    }

    fn prepare<'a, O: OutputOf<T>>(
        &'a self,
        out: &Out<B, T, O>,
        config: Option<Config>,
    ) -> Result<Call<'a, B, T>> {
        let form = &self.form;
        let of_a = match &self.a {
            Rows::Own(..) => self.scaling,
            Rows::Gathered(_, scales) => scales.scaling(),
        };
        /// Sets the options that all operations have.
        macro_rules! told {
            ($operation:expr) => {{
                let mut operation = $operation
                    .activation(form.activation())
                    .weight_layout(form.layout)
                    .accumulation(form.accumulation)
                    .scaling(of_a, self.scaling);
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
        let out_dtype = match form.has(Epilogue::F32) {
            true => DType::F32,
            false => O::DTYPE,
        };
        (product, gathers) = match form.has(Epilogue::Quantized) {
            true => (
                product.quantization(Quantization::blocks()),
                gathers.quantization(Quantization::blocks()),
            ),
            false => (
                product.output_dtype(out_dtype),
                gathers.output_dtype(out_dtype),
            ),
        };
        scatters = scatters.output_dtype(out_dtype);
        Ok(match (&self.a, out) {
            (Rows::Gathered(a, _), _) => Call::Gathers(gathers.prepare(a, &form.widths[..])?),
            (Rows::Own(a, _), Out::Shared(out)) => Call::Reduces(reduces.prepare(a, out)?),
            (Rows::Own(a, _), _) if self.op == Op::MatmulReduceScatter => {
                Call::Scatters(scatters.prepare(a, form.widths[0])?)
            }
            _ => Call::Alone(product.prepare((&self.group, [self.m, self.k]), &form.widths[..])?),
        })
    }

    fn run<O: OutputOf<T>>(&self, call: &Call<B, T>, out: &mut Out<B, T, O>) -> Result<()> {
        let weights = self.weights.iter();
        let weights = || weights.clone().map(|(b, scales)| scales.of(b));
        macro_rules! to {
            ($outputs:expr) => {
                $outputs
                    .iter_mut()
                    .map(Matrix::view_mut)
                    .collect::<gemmesh::products::Outputs<_, _>>()
            };
        }
        let all = || weights().collect::<gemmesh::products::Weights<_, _>>();
        macro_rules! quantized {
            ($outputs:expr) => {
                $outputs
                    .iter_mut()
                    .map(|(values, scales)| values.quantized(scales))
                    .collect::<gemmesh::products::Outputs<_, _>>()
            };
        }
        match (call, &self.a, out) {
            (Call::Alone(call), Rows::Own(a, scales), Out::Quantized(out)) => {
                call.run(scales.of(a), all(), quantized!(out))
            }
            (Call::Gathers(call), Rows::Gathered(a, scales), Out::Quantized(out)) => {
                call.run(scales.of(a), all(), quantized!(out))
            }
            (Call::Alone(call), Rows::Own(a, scales), Out::Own(out)) => {
                call.run(scales.of(a), all(), to!(out))
            }
            (Call::Alone(call), Rows::Own(a, scales), Out::Wide(out)) => {
                call.run(scales.of(a), all(), to!(out))
            }
            (Call::Gathers(call), Rows::Gathered(a, scales), Out::Own(out)) => {
                call.run(scales.of(a), all(), to!(out))
            }
            (Call::Gathers(call), Rows::Gathered(a, scales), Out::Wide(out)) => {
                call.run(scales.of(a), all(), to!(out))
            }
            (Call::Scatters(call), Rows::Own(a, scales), Out::Own(out)) => {
                call.run(scales.of(a), all(), &mut out[0])
            }
            (Call::Scatters(call), Rows::Own(a, scales), Out::Wide(out)) => {
                call.run(scales.of(a), all(), &mut out[0])
            }
            (Call::Reduces(call), Rows::Own(a, scales), Out::Shared(out)) => {
                call.run(scales.of(a), all(), out)
            }
            _ => unreachable!("a call is prepared for its operands"),
        }
    }

    /// Compares the output with float64, or some rows of it if all take more than `products` products.
    fn check<O: OutputOf<T>>(&self, out: &mut Out<B, T, O>, products: usize) -> Result<Check> {
        let mut check = Check::default();
        let own = own_rows(&self.group, self.op, self.m)?;
        let seed = 7 + own.start as u64;
        let count = rows_within(products, self.form.multiplied(), self.k).min(own.len());
        let rows = sample_rows(own.len(), count, seed);
        let mut exact = self.exact_products(own.start, &rows)?;
        self.follow(&mut exact);
        if self.residual.is_some() {
            let n = self.form.outputs()[0];
            let all: Vec<T::Addend> = random(self.m * n, RESIDUAL);
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
                Out::Quantized(out) => {
                    let (values, scales) = &out[output];
                    let found = (values.to_vec()?, scales.to_vec()?);
                    compare_quantized(&mut check, exact, found, &rows, n);
                }
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
        let of_a = self.scales_of_multiplied_rows(ranks.clone())?;
        let first = if of_k { first } else { 0 };
        let terms = terms(&self.group, self.op, self.k);
        let bias: Vec<T::Addend> = random(self.form.multiplied(), BIAS);
        let mut bias = &bias[..];
        let mut exact = Vec::new();
        for (weight, &n) in self.form.widths.iter().enumerate() {
            let of = |rank| weight_of(rank, weight, n, self.k);
            let b: Vec<Vec<T>> = ranks.clone().map(of).collect();
            let of_b = ranks
                .clone()
                .map(|rank| scales_of_weight(self.scaling, (rank, weight), [n, self.k], terms));
            let of_b: Vec<Option<ScaleValues>> = of_b.collect();
            let operands = a.iter().zip(&b).zip(of_a.iter().zip(&of_b));
            let factors = operands.map(|((a, b), (of_a, of_b))| {
                let factors = Factors::new(a, b, self.k).at_row(first);
                factors.scaled([of_a.as_ref(), of_b.as_ref()])
            });
            let factors: Vec<Factors<T>> = factors.collect();
            let off = match self.form.accumulation {
                Accumulation::Fast => fast_sums_off(self.k * factors.len()),
                _ => sums_off::<B, T>(self.k * factors.len()),
            };
            let mut numbers = in_blocks(&factors, rows, n, |exact| {
                let sums = off * exact.magnitude;
                let off = if of_k {
                    sums + exact.products * 2f64.powi(-T::Addend::DIGITS)
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
            Rows::Gathered(..) => {
                let layout = Layout::balanced(self.m, k, world)?;
                let of = |rank| rows_of::<T>(rank, layout.rows_of(rank).len() * k);
                vec![(0..world).flat_map(of).collect()]
            }
            Rows::Own(..) => ranks.map(|rank| rows_of(rank, self.m * k)).collect(),
        })
    }

    /// Their scales.
    fn scales_of_multiplied_rows(&self, ranks: Range<usize>) -> Result<Vec<Option<ScaleValues>>> {
        let shape = [self.m, self.k];
        Ok(match &self.a {
            Rows::Gathered(_, scales) => vec![scales.values()?],
            Rows::Own(..) => ranks
                .map(|rank| scales_of_rows(self.scaling, rank, shape))
                .collect(),
        })
    }

    /// Applies the function to products. With a gate, the second factors are taken out of them.
    fn follow(&self, exact: &mut Vec<Vec<Number>>) {
        let to_f32 = self.form.has(Epilogue::F32) || self.form.has(Epilogue::Quantized);
        let activation = self.form.activation();
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

/// How many products are added up in an element.
fn terms<B: Backend>(group: &Group<B>, op: Op, k: usize) -> usize {
    match op {
        Op::MatmulReduceScatter | Op::MatmulAllReduce => k * group.world_size(),
        _ => k,
    }
}

/// The scales of the rows that a rank has.
fn scales_of_rows(scaling: Scaling, rank: usize, shape: [usize; 2]) -> Option<ScaleValues> {
    ScaleValues::of_rows(scaling, shape, SCALES + 1000 + rank as u64)
}

/// The scales of a rank's weight.
fn scales_of_weight(
    scaling: Scaling,
    (rank, weight): (usize, usize),
    shape: [usize; 2],
    terms: usize,
) -> Option<ScaleValues> {
    let seed = SCALES + 2000 + (16 * rank + weight) as u64;
    ScaleValues::of_weight(scaling, shape, terms, seed)
}

/// The rows of the output, of M, that this rank makes.
fn own_rows<B: Backend>(group: &Group<B>, op: Op, m: usize) -> Result<Range<usize>> {
    Ok(match op {
        Op::MatmulReduceScatter | Op::MatmulAllReduce => {
            Layout::balanced(m, 1, group.world_size())?.rows_of(group.rank())
        }
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
pub fn in_blocks<T: gemmesh::elements::Number>(
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
pub fn compare<T: gemmesh::elements::Number>(
    check: &mut Check,
    exact: &[Number],
    out: &[T],
    rows: &[usize],
    n: usize,
) {
    let mut largest = 0f64;
    for (exact, &row) in exact.chunks_exact(n).zip(rows) {
        for (exact, found) in exact.iter().zip(&out[row * n..]) {
            let error = (f64::from(found.to_f32()) - nearest::<T>(exact.exact)).abs();
            let rounding = (exact.exact.abs() + exact.off) * 2f64.powi(-T::DIGITS);
            // This also holds for numbers near zero, which have fewer digits.
            let allowed = 1.001 * (exact.off + rounding) + 2f64.powi(T::MIN_EXPONENT - T::DIGITS);
            check.add(error, error / allowed);
            largest = largest.max(exact.exact.abs());
        }
    }
    check.max_rel_err = check.max_rel_err.max(check.max_abs_err / largest);
}

/// [`compare`] of numbers with a scale for each block of a row. The scale's own rounding moves them, too.
fn compare_quantized(
    check: &mut Check,
    exact: &[Number],
    (values, scales): (Vec<F8E4M3>, Vec<f32>),
    rows: &[usize],
    n: usize,
) {
    const DIGITS: i32 = <F8E4M3 as gemmesh::elements::Number>::DIGITS;
    const LEAST: i32 = <F8E4M3 as gemmesh::elements::Number>::MIN_EXPONENT - DIGITS;
    let blocks = n.div_ceil(BLOCK);
    let mut largest = 0f64;
    for (exact, &row) in exact.chunks_exact(n).zip(rows) {
        for (column, exact) in exact.iter().enumerate() {
            let scale = f64::from(scales[row * blocks + column / BLOCK]);
            let found = f64::from(values[row * n + column].to_f32()) * scale;
            let error = (found - exact.exact).abs();
            let rounding = (exact.exact.abs() + exact.off) * 2f64.powi(-DIGITS);
            let least = scale * 2f64.powi(LEAST);
            check.add(error, error / (1.001 * (exact.off + rounding) + least));
            largest = largest.max(exact.exact.abs());
        }
    }
    check.max_rel_err = check.max_rel_err.max(check.max_abs_err / largest);
}

/// Transposes a matrix of `columns` columns.
fn turned<T: Multiplied>(values: &[T], columns: usize) -> Vec<T> {
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

/// A product of one rank, for a different library.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub struct Product<'a, B: Backend, T: Multiplied> {
    pub a: &'a Matrix<B, T>,
    pub b: &'a Matrix<B, T>,
    pub scales: [Option<ScaleValues>; 2],
    pub out: DType,
    pub fast_accumulation: bool,
}

/// A product that a different library has prepared.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub enum Peer<'a> {
    Prepared(Box<dyn Fn() -> Result<()> + 'a>),
    Refused,
    /// There is no such library here.
    Absent,
}

/// A clock for the calls of a backend.
pub trait Clock<B: Backend, T: Multiplied>: Sized {
    fn new(group: &Group<B>) -> Result<Self>;
    /// Microseconds that the work takes that `run` begins. Collective.
    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64>;
    /// The product by a different library.
    fn peer<'a>(&'a self, _product: Product<'a, B, T>) -> Result<Peer<'a>> {
        Ok(Peer::Absent)
    }
}

/// The time on the wall.
pub struct Wall(Group<Host>);

impl<T: Multiplied> Clock<Host, T> for Wall {
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
const VARIANTS: [(&str, &str); 5] = [
    ("as problem", "form_us"),
    ("plain: one weight [N, K] of all columns", "plain_us"),
    ("plain: a call for each weight", "calls_us"),
    ("cuBLASLt, one weight [N, K] of all columns", "cublaslt_us"),
    ("cuBLASLt with fast accumulation", "cublaslt_fast_us"),
];
/// The ratios of the first variant to the others.
const RATIOS: [(&str, usize); 4] = [
    ("/ plain", 1),
    ("/ calls", 2),
    ("/ cuBLASLt", 3),
    ("/ fast cuBLASLt", 4),
];

/// Times products of the form that is asked for.
pub fn run<B, T, O, C>(args: &Args) -> Result<(), Failure>
where
    B: Backend,
    T: Multiplied,
    O: OutputOf<T>,
    C: Clock<B, T>,
{
    check(args)?;
    let group = args.group::<B>()?;
    let clock = C::new(&group)?;
    let is_sweep = args.sweep.is_some_and(Sweep::is_drawn);
    let products = if is_sweep { 1 << 30 } else { PRODUCTS };
    let mut ratios: Vec<Vec<(usize, f64)>> = vec![Vec::new(); RATIOS.len()];
    for (index, [m, n, k]) in args.shapes().into_iter().enumerate() {
        let form = Form::of(args, n);
        let (check, config, times) =
            time::<B, T, O, C>(args, &group, &clock, [m, k], &form, products)
                .map_err(|failure| failure.of(format!("M = {m}, N = {n}, K = {k}")))?;
        for (ratios, &(_, variant)) in ratios.iter_mut().zip(&RATIOS) {
            let ratio = times[0].over(times[variant]);
            ratios.extend(ratio.get().map(|ratio| (m, ratio)));
        }
        if group.rank() > 0 {
            continue;
        }
        let out = match (form.has(Epilogue::F32), form.has(Epilogue::Quantized)) {
            (true, _) => DType::F32,
            (_, true) => DType::F8E4M3,
            _ => O::DTYPE,
        };
        if index == 0 {
            println!(
                "\n{:?} {}, {} backend, {} ranks, {}",
                args.op,
                described(args),
                B::NAME,
                group.world_size(),
                types::<T>(args, out)
            );
            println!("medians in µs: {}", titles(&times));
        }
        let line = line(index, [m, k], &form, &config, &times);
        println!("{line}");
        if let Some(path) = &args.json {
            let mut object = json!({
                "op": format!("{:?}", args.op), "form": described(args), "backend": B::NAME, "world": group.world_size(),
                "m": m, "widths": form.widths, "k": k, "dtype": T::DTYPE.to_string(), "out": out.to_string(), "scales": args.scales_name(),
                "numerics": format!("{:?}", args.numerics), "max_rel_err": check.max_rel_err,
                "ok": check.ok(), "config": format!("{config:?}"), "iters": args.iters, "commit": commit(), "unix_time": unix_time(),
            });
            for ((_, key), time) in VARIANTS.iter().zip(times) {
                object[key] = Value::from(time);
            }
            append(path, &object.to_string())?;
        }
    }
    if group.rank() == 0 {
        summarize(&ratios);
    }
    Ok(())
}

/// A shape's line of the table.
fn line(index: usize, [m, k]: [usize; 2], form: &Form, config: &Config, times: &[Time]) -> String {
    let mut line = format!(
        "{:>4} {m:>6} {:>16} {k:>6}  {:<29}",
        index + 1,
        format!("{:?}", form.widths),
        sweep::in_short(config)
    );
    for time in times.iter().filter(|&&time| time != Time::Absent) {
        let _ = write!(line, " {:>9}", time.text(1));
    }
    for (name, variant) in RATIOS {
        if let Some(ratio) = times[0].over(times[variant]).get() {
            let _ = write!(line, "  {name} {ratio:.3}");
        }
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
    if args.tune.is_some() {
        return Err(Failure::Usage("--tune: not of matmul, nor of forms"));
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
    if has(Epilogue::Quantized) && (is_sum || has(Epilogue::F32) || args.out.is_some()) {
        return Err(Failure::Usage(
            "--epilogue quantized: only of matmul and all-gather-matmul, and without --out and f32",
        ));
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
    if args.fast_accumulation {
        words.push("fast accumulation".into());
    }
    words.join(", ")
}

fn titles(times: &[Time]) -> String {
    let there = VARIANTS
        .iter()
        .zip(times)
        .filter(|(_, time)| **time != Time::Absent);
    let titles: Vec<&str> = there.map(|(&(title, _), _)| title).collect();
    titles.join("; ")
}

/// Verifies a form, and times it beside others. Returns the medians of [`VARIANTS`].
fn time<B, T, O, C>(
    args: &Args,
    group: &Group<B>,
    clock: &C,
    [m, k]: [usize; 2],
    form: &Form,
    products: usize,
) -> Result<(Check, Config, [Time; VARIANTS.len()]), Failure>
where
    B: Backend,
    T: Multiplied,
    O: OutputOf<T>,
    C: Clock<B, T>,
{
    let make = |form: Form| Operands::<B, T>::random(group, args.op, [m, k], form, args.scaling());
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
        .map(|one| one.outputs::<O>())
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
    let peer = |fast_accumulation: bool| match (&plain.a, args.op) {
        (Rows::Own(a, _), Op::Matmul) => {
            let (rank, n) = (group.rank(), plain.form.widths[0]);
            clock.peer(Product {
                a,
                b: &plain.weights[0].0,
                scales: [
                    scales_of_rows(plain.scaling, rank, [m, k]),
                    scales_of_weight(plain.scaling, (rank, 0), [n, k], k),
                ],
                out: O::DTYPE,
                fast_accumulation,
            })
        }
        _ => Ok(Peer::Absent),
    };
    let peers = [
        peer(false)?,
        match args.fast_accumulation {
            true => peer(true)?,
            false => Peer::Absent,
        },
    ];
    let [promoted, fast] = peers
        .each_ref()
        .map(|peer| matches!(peer, Peer::Prepared(_)));
    let there = [true, true, !each.is_empty(), promoted, fast];
    let run = |variant: usize| match variant {
        0 | 1 => all[variant].run(&calls[variant], &mut outs[variant]),
        2 => (2..all.len()).try_for_each(|one| all[one].run(&calls[one], &mut outs[one])),
        _ => match &peers[variant - 3] {
            Peer::Prepared(run) => run(),
            Peer::Refused | Peer::Absent => Ok(()),
        },
    };
    let samples = samples::<B, T, C>(args, clock, there, run)?;
    let times = common::medians(&common::slowest(group, &samples)?);
    let time = |variant: usize| match peers.get(variant.wrapping_sub(3)) {
        Some(Peer::Refused) => Time::Refused,
        _ => there[variant].then_some(times[variant]).into(),
    };
    Ok((check, config, std::array::from_fn(time)))
}

/// The times of those variants that are `there`, in turn.
fn samples<B: Backend, T: Multiplied, C: Clock<B, T>>(
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
