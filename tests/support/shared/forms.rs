//! Products of other forms: several weights, functions, gates, weights [K, N], outputs of f32, residuals, parts of
//! matrices, and products of one rank alone.

use std::ops::Range;

use gemmesh::elements::Float;
use gemmesh::error::Kind;
use gemmesh::products::{Outputs, WeightLayout};
use gemmesh::tuning::{Numerics, Route, TileShape};
use gemmesh::views::MatrixView;
use gemmesh::{
    Activation, AllGatherMatmul, Backend, Config, DType, Error, Group, Matmul, MatmulAllReduce,
    MatmulReduceScatter, Matrix, ShardedMatrix, bf16,
};

use crate::support::errors::{kind_of, parts_of};
use crate::support::numbers::{bits, nan, normal};
use crate::support::processes::Rank;
use crate::support::tested::{Tested, all_done, ranks};

const ACTIVATIONS: [Activation; 5] = [
    Activation::Identity,
    Activation::Relu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
];
/// Rows of the two ranks.
const ROWS: [usize; 2] = [90, 61];
const M: usize = ROWS[0] + ROWS[1];
const K: usize = 648;

/// A number in float64, and how far another may be from it before it is rounded.
#[derive(Clone, Copy)]
struct Number {
    exact: f64,
    off: f64,
}

impl Number {
    const ZERO: Number = Number {
        exact: 0.0,
        off: 0.0,
    };

    /// Numbers of f32 are rounded to 24 bits.
    fn rounded(self, bits: i32) -> Number {
        Number {
            off: self.off + self.exact.abs() * 2f64.powi(-bits),
            ..self
        }
    }

    fn plus(self, other: impl Into<f64>) -> Number {
        let exact = self.exact + other.into();
        Number { exact, ..self }.rounded(23)
    }

    fn add(self, other: Number) -> Number {
        let off = self.off + other.off;
        Number { off, ..self }.plus(other.exact)
    }

    fn times(self, other: Number) -> Number {
        Number {
            exact: self.exact * other.exact,
            off: self.off * other.exact.abs() + other.off * self.exact.abs() + self.off * other.off,
        }
        .rounded(23)
    }

    /// No slope is above 1.13, and the function itself may be off by 2⁻¹⁹ of x; GELU, for an output of 16 bits, by
    /// 2⁻¹⁵.
    fn activated<T: Float>(self, activation: Activation) -> Number {
        let x = self.exact;
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let exact = match activation {
            Activation::Identity => return self,
            Activation::Relu => x.max(0.0),
            // erfc(x) by its continued fraction would be no other than what is tested: by the sum of the series of erf.
            Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
            Activation::GeluTanh => {
                x * sigmoid(2.0 * (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3)))
            }
            Activation::Silu => x * sigmoid(x),
            other => panic!("{other:?}"),
        };
        let bits = match activation {
            Activation::Gelu if T::DIGITS < <f32 as gemmesh::elements::Number>::DIGITS => 15,
            _ => 19,
        };
        let off = 1.13 * self.off + x.abs() * 2f64.powi(-bits);
        Number { exact, off }
    }
}

/// By its Taylor series, which loses digits only where erf is 1.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI
}

/// `a · bᵀ + bias`, element by element.
fn product(a: &[bf16], b: &[bf16], bias: Option<&[bf16]>, k: usize) -> Vec<Number> {
    let mut all = Vec::new();
    for row in a.chunks_exact(k) {
        for (column, weights) in b.chunks_exact(k).enumerate() {
            let (mut exact, mut size) = (0.0, 0.0);
            for (a, b) in row.iter().zip(weights) {
                let term = f64::from(a.to_f32()) * f64::from(b.to_f32());
                exact += term;
                size += term.abs();
            }
            let off = (k as f64).sqrt() * 2f64.powi(-23) * size;
            let bias = bias.map_or(0.0, |bias| bias[column].to_f32());
            all.push(Number { exact, off }.plus(bias));
        }
    }
    all
}

#[track_caller]
fn check<T: Float>(what: &str, expected: &[Number], found: &[T]) {
    assert_eq!(expected.len(), found.len(), "{what}");
    for (index, (expected, found)) in expected.iter().zip(found).enumerate() {
        let allowed = expected.rounded(T::DIGITS).off * 1.001 + 1e-30;
        let off = (f64::from(found.to_f32()) - expected.exact).abs();
        // False if it is NaN.
        assert!(
            off <= allowed,
            "{what}: element {index} is {found:?}, must be {:e} and may be off by {allowed:e}",
            expected.exact
        );
    }
}

/// A [rows, columns] matrix turned.
fn turned(values: &[bf16], columns: usize) -> Vec<bf16> {
    let rows = values.len() / columns;
    let all =
        (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column]));
    all.collect()
}

fn poisoned<B: Backend, T: Float>(
    group: &Group<B>,
    rows: usize,
    columns: usize,
) -> Result<Matrix<B, T>, Error> {
    group.upload(&vec![nan::<T>(); rows * columns], rows, columns)
}

fn connect<B: Tested>(rank: &Rank, numerics: Numerics) -> Result<Group<B>, Error> {
    let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(2);
    let builder = builder.numerics(numerics);
    builder.connect(rank.rank, rank.world, &rank.address)
}

/// Whether the configuration has no kernel for what is asked: of these there are others.
fn is_elsewhere(result: &Result<(), Error>) -> bool {
    matches!(kind_of(result), Some(Kind::Unsupported { .. }))
}

/// How many columns each of several weights has.
const WIDTHS: [usize; 3] = [200, 72, 8];
const ALL_WIDTHS: usize = WIDTHS[0] + WIDTHS[1] + WIDTHS[2];

/// Rows that are gathered for several weights, and the biases of these.
struct SeveralWeights<'a, B: Tested> {
    group: &'a Group<B>,
    rows: Vec<bf16>,
    a: ShardedMatrix<B, bf16>,
    bias_values: Vec<bf16>,
    bias: Matrix<B, bf16>,
}

/// One of several weights, and what it gives alone.
struct Alone<B: Tested> {
    values: Vec<bf16>,
    weight: Matrix<B, bf16>,
    out: Vec<bf16>,
}

impl<'a, B: Tested> SeveralWeights<'a, B> {
    /// Collective.
    fn new(group: &'a Group<B>) -> Result<Self, Error> {
        let rows: Vec<bf16> = normal(1, M * K);
        let mut a = group.sharded_rows::<bf16>(&ROWS, K)?;
        let own = a.rows();
        a.shard_mut()
            .copy_from_host(&rows[own.start * K..own.end * K])?;
        let bias_values: Vec<bf16> = normal(2, ALL_WIDTHS);
        let bias = group.upload(&bias_values, 1, ALL_WIDTHS)?;
        Ok(SeveralWeights {
            group,
            rows,
            a,
            bias_values,
            bias,
        })
    }

    /// The product of each weight alone, compared with float64. Collective, as what follows.
    fn multiply_alone(&self, config: Option<Config>) -> Result<Vec<Alone<B>>, Error> {
        let mut first = 0;
        let mut all = Vec::new();
        for (number, n) in WIDTHS.into_iter().enumerate() {
            let values: Vec<bf16> = normal(10 + number as u64, n * K);
            let weight = self.group.upload(&values, n, K)?;
            let of_bias = &self.bias_values[first..first + n];
            let bias = self.group.upload(of_bias, 1, n)?;
            let mut out = poisoned::<B, bf16>(self.group, M, n)?;
            let operation = gather_matmul(config).bias(&bias);
            operation.run(&self.a, &weight, &mut out)?;
            let out = out.to_vec()?;
            let exact = product(&self.rows, &values, Some(of_bias), K);
            check(&format!("{config:?}, {n} columns"), &exact, &out);
            first += n;
            all.push(Alone {
                values,
                weight,
                out,
            });
        }
        Ok(all)
    }

    /// An output for each weight.
    fn outputs_apart(&self) -> [Matrix<B, bf16>; 3] {
        WIDTHS.map(|n| poisoned::<B, bf16>(self.group, M, n).unwrap())
    }

    fn check_outputs_apart(&self, config: Option<Config>, alone: &[Alone<B>]) -> Result<(), Error> {
        let mut outputs = self.outputs_apart();
        let operation = gather_matmul(config).bias(&self.bias);
        operation.run(&self.a, weights_of(alone), outputs.each_mut())?;
        for (out, alone) in outputs.iter().zip(alone) {
            assert_eq!(bits(&out.to_vec()?), bits(&alone.out), "{config:?}");
        }
        Ok(())
    }

    /// In the middle of a larger matrix.
    fn check_outputs_side_by_side(
        &self,
        config: Option<Config>,
        alone: &[Alone<B>],
    ) -> Result<(), Error> {
        let columns = 8..8 + ALL_WIDTHS;
        let mut whole = poisoned::<B, bf16>(self.group, M, ALL_WIDTHS + 16)?;
        let parts = whole.view_mut().columns(columns.clone())?;
        let parts = parts.split_columns(WIDTHS)?;
        let operation = gather_matmul(config).bias(&self.bias);
        operation.run(&self.a, weights_of(alone), parts)?;
        for (row, values) in whole.to_vec()?.chunks(ALL_WIDTHS + 16).enumerate() {
            let mut beside = values[..8].iter().chain(&values[columns.end..]);
            assert!(beside.all(|x| x.is_nan()));
            let mut first = columns.start;
            for (alone, n) in alone.iter().zip(WIDTHS) {
                let expected = &alone.out[row * n..(row + 1) * n];
                let found = &values[first..first + n];
                assert_eq!(bits(found), bits(expected), "{config:?} row {row}");
                first += n;
            }
        }
        Ok(())
    }

    /// Whether the configuration has a kernel for weights [K, N].
    fn check_turned_weights(
        &self,
        config: Option<Config>,
        alone: &[Alone<B>],
    ) -> Result<bool, Error> {
        let mut turned_weights = Vec::new();
        for (alone, n) in alone.iter().zip(WIDTHS) {
            turned_weights.push(self.group.upload(&turned(&alone.values, K), K, n)?);
        }
        let turned: [Matrix<B, bf16>; 3] = turned_weights.try_into().unwrap();
        let mut outputs = self.outputs_apart();
        let operation = gather_matmul(config).bias(&self.bias);
        let operation = operation.weight_layout(WeightLayout::Kn);
        let result = operation.run(&self.a, turned.each_ref(), outputs.each_mut());
        if config.is_some() && is_elsewhere(&result) {
            return Ok(false);
        }
        result?;
        for (out, alone) in outputs.iter().zip(alone) {
            assert_eq!(
                bits(&out.to_vec()?),
                bits(&alone.out),
                "{config:?}, weights [K, N]"
            );
        }
        Ok(true)
    }
}

fn weights_of<B: Tested>(alone: &[Alone<B>]) -> [&Matrix<B, bf16>; 3] {
    [0, 1, 2].map(|number| &alone[number].weight)
}

fn gather_matmul<'a, B: Tested>(config: Option<Config>) -> AllGatherMatmul<'a, B, bf16> {
    match config {
        Some(config) => AllGatherMatmul::new().config(config),
        None => AllGatherMatmul::new(),
    }
}

/// Several weights for one gather give the bits that each gives alone, apart and side by side in one matrix; and so do
/// weights [K, N].
#[track_caller]
pub fn several_weights_give_the_bits_of_each<B: Tested>(
    test: &str,
    numerics: Numerics,
    configs: impl Fn() -> Vec<Option<Config>>,
) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, numerics)?;
        let several = SeveralWeights::new(&group)?;
        let mut tested = [0; 2];
        for config in configs() {
            let alone = several.multiply_alone(config)?;
            several.check_outputs_apart(config, &alone)?;
            tested[0] += 1;
            several.check_outputs_side_by_side(config, &alone)?;
            tested[1] += usize::from(several.check_turned_weights(config, &alone)?);
        }
        assert!(tested.iter().all(|&count| count > 0), "{tested:?}");
        Ok(format!("{tested:?}"))
    }));
}

/// What functions and gates are given, and the sums that they are functions of.
struct GivenSums<'a, B: Tested> {
    group: &'a Group<B>,
    n: usize,
    a: Matrix<B, bf16>,
    /// The weights of the gate and of what it lets through, [N, K]
    nk: [Matrix<B, bf16>; 2],
    /// and [K, N].
    kn: [Matrix<B, bf16>; 2],
    /// The bias of the gate,
    bias: Matrix<B, bf16>,
    /// and of both.
    both: Matrix<B, bf16>,
    residuals: Vec<bf16>,
    residual: Matrix<B, bf16>,
    of_gate: Vec<Number>,
    of_up: Vec<Number>,
}

impl<'a, B: Tested> GivenSums<'a, B> {
    fn new(group: &'a Group<B>, n: usize) -> Result<Self, Error> {
        let rows: Vec<bf16> = normal(1, M * K);
        let a = group.upload(&rows, M, K)?;
        let (gate, up) = (small_weight(3, n), small_weight(4, n));
        let biases: Vec<bf16> = normal(5, 2 * n);
        let residuals: Vec<bf16> = normal(6, M * n);
        let weights = [&gate, &up];
        Ok(GivenSums {
            group,
            n,
            a,
            nk: weights.map(|values| group.upload(values, n, K).unwrap()),
            kn: weights.map(|values| group.upload(&turned(values, K), K, n).unwrap()),
            bias: group.upload(&biases[..n], 1, n)?,
            both: group.upload(&biases, 1, 2 * n)?,
            residual: group.upload(&residuals, M, n)?,
            residuals,
            of_gate: product(&rows, &gate, Some(&biases[..n]), K),
            of_up: product(&rows, &up, Some(&biases[n..]), K),
        })
    }

    /// With the residuals.
    fn finished(&self, values: impl Iterator<Item = Number>) -> Vec<Number> {
        let residuals = self.residuals.iter().map(|residual| residual.to_f32());
        let both = values.zip(residuals);
        both.map(|(value, residual)| value.plus(residual)).collect()
    }

    fn check_function(&self, config: Option<Config>, activation: Activation) -> Result<(), Error> {
        let what = format!("{config:?}, {activation:?}");
        let of_gate = || self.of_gate.iter();
        let to_narrow = self.finished(of_gate().map(|x| x.activated::<bf16>(activation)));
        let to_wide = self.finished(of_gate().map(|x| x.activated::<f32>(activation)));
        let plain = || {
            matmul(config)
                .activation(activation)
                .bias(&self.bias)
                .residual(&self.residual)
        };
        let (mut narrow, mut wide) = (self.output::<bf16>()?, self.output::<f32>()?);
        let [b, _] = &self.nk;
        plain().run(&self.a, b, &mut narrow)?;
        check(&what, &to_narrow, &narrow.to_vec()?);
        plain().run(&self.a, b, &mut wide)?;
        check(&format!("{what}, to f32"), &to_wide, &wide.to_vec()?);
        Ok(())
    }

    /// What the gate lets through, for outputs of T.
    fn gated<T: Float>(&self, activation: Activation) -> Vec<Number> {
        let both = self.of_gate.iter().zip(&self.of_up);
        self.finished(both.map(|(gate, up)| gate.activated::<T>(activation).times(*up)))
    }

    /// Whether the configuration has a kernel for the gate. The output must be `to_narrow` in bf16, `to_wide` in f32.
    fn check_gate(
        &self,
        config: Option<Config>,
        activation: Activation,
        layout: WeightLayout,
        [to_narrow, to_wide]: [&[Number]; 2],
    ) -> Result<bool, Error> {
        let what = format!("{config:?}, {activation:?}, gated, {layout:?}");
        let weights = match layout {
            WeightLayout::Kn => self.kn.each_ref(),
            _ => self.nk.each_ref(),
        };
        let gated = || {
            matmul(config)
                .activation(activation)
                .bias(&self.both)
                .residual(&self.residual)
                .gated()
                .weight_layout(layout)
        };
        let (mut narrow, mut wide) = (self.output::<bf16>()?, self.output::<f32>()?);
        let result = gated().run(&self.a, weights, &mut narrow);
        if config.is_some() && is_elsewhere(&result) {
            return Ok(false);
        }
        result?;
        check(&what, to_narrow, &narrow.to_vec()?);
        gated().run(&self.a, weights, &mut wide)?;
        check(&format!("{what}, to f32"), to_wide, &wide.to_vec()?);
        Ok(true)
    }

    /// A weight [K, N], to columns of f32 of which there may be an odd number. Whether the configuration has a kernel
    /// for it.
    fn check_turned_weight(&self, config: Option<Config>) -> Result<bool, Error> {
        let plain = matmul(config).weight_layout(WeightLayout::Kn);
        let plain = plain.bias(&self.bias);
        let mut wide = self.output::<f32>()?;
        let result = plain.run(&self.a, &self.kn[0], &mut wide);
        if config.is_some() && is_elsewhere(&result) {
            return Ok(false);
        }
        result?;
        check(
            &format!("{config:?}, [K, N]"),
            &self.of_gate,
            &wide.to_vec()?,
        );
        Ok(true)
    }

    fn output<T: Float>(&self) -> Result<Matrix<B, T>, Error> {
        poisoned(self.group, M, self.n)
    }
}

/// A weight whose sums are about one.
fn small_weight(seed: u64, n: usize) -> Vec<bf16> {
    let all = normal::<bf16>(seed, n * K).into_iter();
    all.map(|x| bf16::from_f32(x.to_f32() * 0.06)).collect()
}

fn matmul<'a, B: Tested>(config: Option<Config>) -> Matmul<'a, B, bf16> {
    match config {
        Some(config) => Matmul::new().config(config),
        None => Matmul::new(),
    }
}

/// A function of the sum and of the bias, and a gate, with outputs of both types.
#[track_caller]
pub fn functions_and_gates_are_theirs_in_float64<B: Tested>(
    test: &str,
    n: usize,
    configs: impl Fn() -> Vec<Option<Config>>,
) {
    all_done(ranks::<B>(test, 1, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        let given = GivenSums::new(&group, n)?;
        let mut tested = [0; 4];
        for config in configs() {
            for activation in ACTIVATIONS {
                given.check_function(config, activation)?;
                tested[0] += 1;
                let to_narrow = given.gated::<bf16>(activation);
                let to_wide = given.gated::<f32>(activation);
                for (index, layout) in [(1, WeightLayout::Nk), (2, WeightLayout::Kn)] {
                    let expected = [&to_narrow[..], &to_wide];
                    let is_tested = given.check_gate(config, activation, layout, expected)?;
                    tested[index] += usize::from(is_tested);
                }
            }
            tested[3] += usize::from(given.check_turned_weight(config)?);
        }
        assert!(tested.iter().all(|&count| count > 0), "{tested:?}");
        Ok(format!("{tested:?}"))
    }));
}

/// The values, with NaN around them: a row above and one below, and 8 columns on either side.
fn framed(values: &[bf16], columns: usize) -> Vec<bf16> {
    let frame = [nan::<bf16>(); 8];
    let row = |row: &[bf16]| [&frame[..], row, &frame[..]].concat();
    let rows: Vec<_> = values.chunks(columns).map(row).collect();
    let edge = vec![nan::<bf16>(); columns + 16];
    [edge.clone(), rows.concat(), edge].concat()
}

/// That the values are in a frame as [`framed`] gives them, which is as it was.
#[track_caller]
fn check_framed(exact: &[Number], found: &[bf16], n: usize) {
    for (row, values) in found.chunks(n + 16).enumerate() {
        let (inside, first) = (1..=M, 8..n + 8);
        if inside.contains(&row) {
            check(
                "a part",
                &exact[(row - 1) * n..row * n],
                &values[first.clone()],
            );
        }
        let beside = values.iter().enumerate();
        let mut beside =
            beside.filter(|(column, _)| !inside.contains(&row) || !first.contains(column));
        assert!(beside.all(|(_, x)| x.is_nan()), "row {row}");
    }
}

#[track_caller]
fn assert_limited(result: Result<(), Error>) {
    assert!(
        matches!(kind_of(&result), Some(Kind::Limit { .. })),
        "{result:?}"
    );
}

fn bad_parts_are_refused<B: Tested>(
    a: MatrixView<'_, B, bf16>,
    out: &mut Matrix<B, f32>,
) -> Result<(), Error> {
    assert_limited(a.rows(0..M + 1).map(drop));
    assert_eq!(a.rows(3..3)?.shape(), [0, K]);
    assert_limited(a.columns(8..8).map(drop));
    assert_limited(a.columns(K..K + 1).map(drop));
    #[allow(clippy::reversed_empty_ranges)]
    assert_limited(a.columns(8..2).map(drop));
    if B::NAME == "cuda" {
        unaligned_parts_are_refused(a, out);
    }
    let split = out.view_mut().split_columns([4, 4]);
    assert!(
        matches!(kind_of(&split), Some(Kind::Unsuitable { .. })),
        "{split:?}"
    );
    Ok(())
}

fn unaligned_parts_are_refused<B: Tested>(a: MatrixView<'_, B, bf16>, out: &mut Matrix<B, f32>) {
    let error = a.columns(3..K).unwrap_err();
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(0), Kind::Unsuitable { .. })
        ),
        "{error}"
    );
    let words = error.to_string();
    assert!(words.contains("0 and 8"), "{words}");
    let error = out.view_mut().columns(0..5).unwrap_err();
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
}

/// Parts of matrices as operands and outputs; nothing beside these is written. Odd extents of f32.
#[track_caller]
pub fn parts_of_matrices_are_operands<B: Tested>(test: &str) {
    const N: usize = 40;
    all_done(ranks::<B>(test, 1, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        let [rows, weights] = [(M, 1), (N, 2)].map(|(rows, seed)| normal::<bf16>(seed, rows * K));
        let a = group.upload(&framed(&rows, K), M + 2, K + 16)?;
        let b = group.upload(&framed(&weights, K), N + 2, K + 16)?;
        let (a, b) = (
            a.rows(1..M + 1)?.columns(8..K + 8)?,
            b.columns(8..K + 8)?.rows(1..N + 1)?,
        );
        assert_eq!((a.shape(), b.shape()), ([M, K], [N, K]));
        let mut out = poisoned::<B, bf16>(&group, M + 2, N + 16)?;
        let part = out.view_mut().rows(1..M + 1)?.columns(8..N + 8)?;
        Matmul::new().run(a, b, part)?;
        let exact = product(&rows, &weights, None, K);
        check_framed(&exact, &out.to_vec()?, N);
        // Fewer columns, of which the last is odd.
        let mut out = poisoned::<B, f32>(&group, M, N - 3)?;
        Matmul::new().run(a, b.rows(0..N - 3)?, &mut out)?;
        let exact: Vec<Number> = exact
            .chunks(N)
            .flat_map(|row| &row[..N - 3])
            .copied()
            .collect();
        check("odd columns", &exact, &out.to_vec()?);
        bad_parts_are_refused(a, &mut out)?;
        Ok("parts".into())
    }));
}

/// What two ranks multiply, and what becomes of the sums.
struct GivenPartials<'a, B: Tested> {
    group: &'a Group<B>,
    /// The rows of each rank.
    rows: [usize; 2],
    n: usize,
    a: Matrix<B, bf16>,
    b: Matrix<B, bf16>,
    kn: Matrix<B, bf16>,
    biases: Vec<bf16>,
    bias: Matrix<B, bf16>,
    residuals: Vec<bf16>,
    /// Of the own rows,
    residual: Matrix<B, bf16>,
    /// and of all.
    residual_of_all: Matrix<B, bf16>,
    /// Of each rank, before they are rounded on their way.
    partials: [Vec<Number>; 2],
}

impl<'a, B: Tested> GivenPartials<'a, B> {
    fn new(group: &'a Group<B>, rows: [usize; 2], n: usize) -> Result<Self, Error> {
        let m = rows[0] + rows[1];
        let of = |rank: usize| -> [Vec<bf16>; 2] {
            [
                normal(10 + rank as u64, m * K),
                small_weight(20 + rank as u64, n),
            ]
        };
        let [a_values, b_values] = of(group.rank());
        let biases: Vec<bf16> = normal(30, n);
        let residuals: Vec<bf16> = normal(31, m * n);
        let own = own_rows(group, rows);
        let owned = &residuals[own.start * n..own.end * n];
        Ok(GivenPartials {
            group,
            rows,
            n,
            a: group.upload(&a_values, m, K)?,
            b: group.upload(&b_values, n, K)?,
            kn: group.upload(&turned(&b_values, K), K, n)?,
            bias: group.upload(&biases, 1, n)?,
            residual: group.upload(owned, own.len(), n)?,
            residual_of_all: group.upload(&residuals, m, n)?,
            biases,
            residuals,
            partials: [0, 1].map(|rank| {
                let [a, b] = of(rank);
                product(&a, &b, None, K)
            }),
        })
    }

    /// What all rows become.
    fn exact(&self, activation: Activation) -> Vec<Number> {
        let sums = self.partials[0].iter().zip(&self.partials[1]).enumerate();
        let sums = sums.map(|(index, (x, y))| {
            let sum = Number::ZERO.add(x.rounded(8)).add(y.rounded(8));
            let sum = sum.plus(self.biases[index % self.n].to_f32());
            let sum = sum.activated::<bf16>(activation);
            sum.plus(self.residuals[index].to_f32())
        });
        sums.collect()
    }

    /// With all functions and layouts of weights. Collective.
    fn check_by(&self, config: Config) -> Result<(), Error> {
        let (n, rows) = (self.n, self.rows);
        let mut sharded = self.group.sharded_rows::<bf16>(&rows, n)?;
        for activation in ACTIVATIONS {
            let expected = self.exact(activation);
            let own = own_rows(self.group, rows);
            let own = &expected[own.start * n..own.end * n];
            for layout in [WeightLayout::Nk, WeightLayout::Kn] {
                self.check_reduce_scatter(config, activation, layout, own)?;
                let all = MatmulAllReduce::new()
                    .bias(&self.bias)
                    .activation(activation);
                let all = all.residual(&self.residual_of_all).weight_layout(layout);
                let all = all.config(config);
                all.run(&self.a, self.weight(layout), &mut sharded)?;
                let what = self.description(config, activation);
                check(
                    &format!("all-reduce, {what}"),
                    &expected,
                    &sharded.to_vec()?,
                );
            }
        }
        Ok(())
    }

    fn check_reduce_scatter(
        &self,
        config: Config,
        activation: Activation,
        layout: WeightLayout,
        expected: &[Number],
    ) -> Result<(), Error> {
        let what = self.description(config, activation);
        let scatter = MatmulReduceScatter::new().rows(&self.rows);
        let scatter = scatter.bias(&self.bias).activation(activation);
        let scatter = scatter.residual(&self.residual);
        let scatter = scatter.weight_layout(layout).config(config);
        let own = own_rows(self.group, self.rows).len();
        let mut out = poisoned::<B, bf16>(self.group, own, self.n)?;
        scatter.run(&self.a, self.weight(layout), &mut out)?;
        let case = format!("reduce-scatter, {what}, {layout:?}");
        check(&case, expected, &out.to_vec()?);
        let mut out = poisoned::<B, f32>(self.group, own, self.n)?;
        scatter.run(&self.a, self.weight(layout), &mut out)?;
        let case = format!("reduce-scatter to f32, {what}");
        check(&case, expected, &out.to_vec()?);
        Ok(())
    }

    fn weight(&self, layout: WeightLayout) -> &Matrix<B, bf16> {
        match layout {
            WeightLayout::Kn => &self.kn,
            _ => &self.b,
        }
    }

    fn description(&self, config: Config, activation: Activation) -> String {
        let m = self.rows[0] + self.rows[1];
        format!("{m} rows, {config:?}, {activation:?}")
    }
}

/// Of the two ranks' rows this rank's.
fn own_rows<B: Tested>(group: &Group<B>, rows: [usize; 2]) -> Range<usize> {
    let first = group.rank() * rows[0];
    first..first + rows[group.rank()]
}

/// What becomes of sums over ranks becomes of the sums, not of their parts.
#[track_caller]
pub fn sums_are_finished_by_their_owners<B: Tested>(test: &str, configs: &[Config]) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        // few rows, which are exchanged, and more
        for (rows, n) in [([3, 2], 72), (ROWS, 200)] {
            let given = GivenPartials::new(&group, rows, n)?;
            for &config in configs {
                given.check_by(config)?;
            }
        }
        Ok("sums".into())
    }));
}

#[track_caller]
fn assert_shape_of(what: &str, result: Result<(), Error>) {
    match parts_of(&result) {
        Some((_, Kind::Shape { argument, .. })) if argument.contains(what) => {}
        other => panic!("{what}: {other:?}"),
    }
}

#[track_caller]
fn assert_count_of(what: &str, result: Result<(), Error>) {
    match parts_of(&result) {
        Some((_, Kind::Unsuitable { what: found, .. })) if found.contains(what) => {}
        other => panic!("{what}: {other:?}"),
    }
}

#[track_caller]
fn assert_limit_of(what: &str, result: Result<(), Error>) {
    match parts_of(&result) {
        Some((_, Kind::Limit { what: found, .. })) if found.contains(what) => {}
        other => panic!("{what}: {other:?}"),
    }
}

/// A product, whose matrices fit.
struct Fitting<'a, B: Tested> {
    group: &'a Group<B>,
    a: Matrix<B, bf16>,
    b: Matrix<B, bf16>,
    out: Matrix<B, bf16>,
}

impl<B: Tested> Fitting<'_, B> {
    const M: usize = 4;
    const N: usize = 16;
    const K: usize = 8;

    fn operands_that_do_not_fit_are_refused(&mut self) -> Result<(), Error> {
        let Fitting { group, a, b, out } = self;
        let (a, b) = (&*a, &*b);
        let other = group.zeros::<bf16>(Self::N + 8, Self::K)?;
        let op = Matmul::<B, bf16>::new;
        assert_count_of("output", op().run(a, [b, b], &mut *out));
        assert_count_of("weight", op().gated().run(a, b, &mut *out));
        let result = op().gated().run(a, [b, &other], &mut *out);
        assert_shape_of("b [N, K]", result);
        assert_count_of("weight", op().gated().run(a, [b, b, b], &mut *out));
        let short = group.zeros::<bf16>(1, Self::N)?;
        let result = op().gated().bias(&short).run(a, [b, b], &mut *out);
        assert_shape_of("bias [1, 2 N]", result);
        assert_shape_of("residual", op().residual(b).run(a, b, &mut *out));
        let turned = op().weight_layout(WeightLayout::Kn);
        assert_shape_of("b [K, N]", turned.run(a, b, &mut *out));
        let mut second = group.zeros::<bf16>(Self::M, Self::N)?;
        let residual = group.zeros::<bf16>(Self::M, 2 * Self::N)?;
        let two = op().residual(&residual);
        let two = two.run(a, [b, b], [&mut *out, &mut second]);
        assert_limit_of("residual", two);
        Ok(())
    }

    /// Before there are any.
    fn weights_that_do_not_fit_are_refused(&self) -> Result<(), Error> {
        let (group, shape, n) = (self.group, [Self::M, Self::K], Self::N);
        let op = Matmul::<B, bf16>::new;
        let five = op().prepare((group, shape), [n; 5]);
        assert_limit_of("weights of a product", five.map(drop));
        let unequal = op().gated().prepare((group, shape), [n, n + 8]);
        assert_limit_of("N of up", unequal.map(drop));
        let three = op().gated().prepare((group, shape), [n; 3]);
        assert_count_of("weight", three.map(drop));
        let rows = group.sharded::<bf16>(Self::M, Self::K)?;
        let gather = AllGatherMatmul::new().gated();
        let unequal = gather.prepare(&rows, [n, n + 8]);
        assert_limit_of("N of up", unequal.map(drop));
        Ok(())
    }

    fn outputs_that_do_not_fit_are_refused(&mut self) -> Result<(), Error> {
        let Fitting { group, a, b, out } = self;
        let (group, a, b) = (*group, &*a, &*b);
        let (shape, n) = ([Self::M, Self::K], Self::N);
        let op = Matmul::<B, bf16>::new;
        let prepared = op().prepare((group, shape), [n])?;
        let mut wide = group.zeros::<f32>(Self::M, n)?;
        let result = prepared.run(a, b, Outputs::from(&mut wide));
        assert!(
            matches!(kind_of(&result), Some(Kind::Unsuitable { .. })),
            "{result:?}"
        );
        let prepared = op().output_dtype(DType::F32).prepare((group, shape), [n])?;
        let result = prepared.run(a, b, &mut *out);
        assert!(
            matches!(kind_of(&result), Some(Kind::Unsuitable { .. })),
            "{result:?}"
        );
        prepared.run(a, b, &mut wide)?;
        prepared.run(a, b, wide.view_mut())?;
        // A call that was not prepared sees what it is given.
        op().output_dtype(DType::F32).run(a, b, &mut *out)?;
        // Of a gated product gate and up share a tile.
        let narrow = prepared.config();
        let narrow = Config::new(
            TileShape::new(narrow.tile.m, 1, narrow.tile.k),
            narrow.chunking,
            narrow.route,
        );
        let result = op().gated().config(narrow).run(a, [b, b], &mut *out);
        assert_limit_of("tile.n", result);
        let parts = out.view_mut().split_columns([usize::MAX, 1]);
        assert_count_of("column", parts.map(drop));
        Ok(())
    }
}

/// What does not fit is refused before anything is done, and the group goes on.
#[track_caller]
pub fn forms_that_do_not_fit_are_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 1, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        let (m, n, k) = (Fitting::<B>::M, Fitting::<B>::N, Fitting::<B>::K);
        let mut fitting = Fitting {
            a: group.zeros(m, k)?,
            b: group.zeros(n, k)?,
            out: group.zeros(m, n)?,
            group: &group,
        };
        fitting.operands_that_do_not_fit_are_refused()?;
        fitting.weights_that_do_not_fit_are_refused()?;
        fitting.outputs_that_do_not_fit_are_refused()?;
        group.synchronize()?;
        Ok("refused".into())
    }));
}
