//! Products of other forms: several weights, functions, gates, weights [K, N], outputs of f32, residuals, parts of
//! matrices, and products of one rank alone.

use gemmesh::{
    Activation, AllGatherMatmul, Backend, Config, Error, Float, Group, Matmul, MatmulAllReduce,
    MatmulReduceScatter, Matrix, Numerics, Outputs, Route, TileShape, WeightLayout, bf16,
};

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
            Activation::Gelu if T::DIGITS < <f32 as Float>::DIGITS => 15,
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
    matches!(result, Err(Error::NoKernel { .. }))
}

/// Several weights for one gather give the bits that each gives alone, apart and side by side in one matrix; and so do
/// weights [K, N].
#[track_caller]
pub fn several_weights_give_the_bits_of_each<B: Tested>(
    test: &str,
    numerics: Numerics,
    configs: impl Fn() -> Vec<Option<Config>>,
) {
    const WIDTHS: [usize; 3] = [200, 72, 8];
    const N: usize = WIDTHS[0] + WIDTHS[1] + WIDTHS[2];
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, numerics)?;
        let rows: Vec<bf16> = normal(1, M * K);
        let mut a = group.sharded_rows::<bf16>(&ROWS, K)?;
        let own = a.rows();
        a.shard_mut()
            .copy_from_host(&rows[own.start * K..own.end * K])?;
        let bias_values: Vec<bf16> = normal(2, N);
        let bias = group.upload(&bias_values, 1, N)?;
        let mut tested = [0; 2];
        for config in configs() {
            let operation = || match config {
                Some(config) => AllGatherMatmul::new().config(config),
                None => AllGatherMatmul::new(),
            };
            let mut first = 0;
            let (mut weights, mut values, mut alone) = (Vec::new(), Vec::new(), Vec::new());
            for (number, n) in WIDTHS.into_iter().enumerate() {
                let of_weight: Vec<bf16> = normal(10 + number as u64, n * K);
                let weight = group.upload(&of_weight, n, K)?;
                let columns = first..first + n;
                let of_bias = group.upload(&bias_values[columns], 1, n)?;
                let mut out = poisoned::<B, bf16>(&group, M, n)?;
                operation().bias(&of_bias).run(&a, &weight, &mut out)?;
                let out = out.to_vec()?;
                let exact = product(&rows, &of_weight, Some(&bias_values[first..first + n]), K);
                check(&format!("{config:?}, {n} columns"), &exact, &out);
                first += n;
                weights.push(weight);
                values.push(of_weight);
                alone.push(out);
            }
            let weights: [Matrix<B, bf16>; 3] = weights.try_into().unwrap();
            let apart = || WIDTHS.map(|n| poisoned::<B, bf16>(&group, M, n).unwrap());
            let mut outputs = apart();
            let operation = || operation().bias(&bias);
            operation().run(&a, weights.each_ref(), outputs.each_mut())?;
            for (out, alone) in outputs.iter().zip(&alone) {
                assert_eq!(bits(&out.to_vec()?), bits(alone), "{config:?}");
            }
            tested[0] += 1;
            // side by side, in the middle of a larger one
            let mut whole = poisoned::<B, bf16>(&group, M, N + 16)?;
            let parts = whole.view_mut().columns(8..8 + N)?.split_columns(WIDTHS)?;
            operation().run(&a, weights.each_ref(), parts)?;
            for (row, values) in whole.to_vec()?.chunks(N + 16).enumerate() {
                assert!(
                    values[..8]
                        .iter()
                        .chain(&values[8 + N..])
                        .all(|x| x.is_nan())
                );
                let mut first = 8;
                for (alone, n) in alone.iter().zip(WIDTHS) {
                    let expected = &alone[row * n..(row + 1) * n];
                    assert_eq!(
                        bits(&values[first..first + n]),
                        bits(expected),
                        "{config:?} row {row}"
                    );
                    first += n;
                }
            }
            let mut turned_weights = Vec::new();
            for (values, n) in values.iter().zip(WIDTHS) {
                turned_weights.push(group.upload(&turned(values, K), K, n)?);
            }
            let turned: [Matrix<B, bf16>; 3] = turned_weights.try_into().unwrap();
            let mut outputs = apart();
            let operation = operation().weight_layout(WeightLayout::Kn);
            let result = operation.run(&a, turned.each_ref(), outputs.each_mut());
            if config.is_some() && is_elsewhere(&result) {
                continue;
            }
            result?;
            for (out, alone) in outputs.iter().zip(&alone) {
                assert_eq!(
                    bits(&out.to_vec()?),
                    bits(alone),
                    "{config:?}, weights [K, N]"
                );
            }
            tested[1] += 1;
        }
        assert!(tested.iter().all(|&count| count > 0), "{tested:?}");
        Ok(format!("{tested:?}"))
    }));
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
        let rows: Vec<bf16> = normal(1, M * K);
        let a = group.upload(&rows, M, K)?;
        // Sums of about one.
        let weight = |seed| -> Vec<bf16> {
            let all = normal::<bf16>(seed, n * K).into_iter();
            all.map(|x| bf16::from_f32(x.to_f32() * 0.06)).collect()
        };
        let (gate, up) = (weight(3), weight(4));
        let biases: Vec<bf16> = normal(5, 2 * n);
        let residuals: Vec<bf16> = normal(6, M * n);
        let [b, b_up] = [&gate, &up].map(|values| group.upload(values, n, K).unwrap());
        let [kn, kn_up] =
            [&gate, &up].map(|values| group.upload(&turned(values, K), K, n).unwrap());
        let bias = group.upload(&biases[..n], 1, n)?;
        let both = group.upload(&biases, 1, 2 * n)?;
        let residual = group.upload(&residuals, M, n)?;
        let of_gate = product(&rows, &gate, Some(&biases[..n]), K);
        let of_up = product(&rows, &up, Some(&biases[n..]), K);
        let plus = |number: Number, index: usize| number.plus(residuals[index].to_f32());
        let mut tested = [0; 4];
        for config in configs() {
            let operation = || match config {
                Some(config) => Matmul::new().config(config),
                None => Matmul::new(),
            };
            for activation in ACTIVATIONS {
                let what = format!("{config:?}, {activation:?}");
                let plus_all = |x: Vec<Number>| -> Vec<Number> {
                    x.into_iter().enumerate().map(|(i, x)| plus(x, i)).collect()
                };
                let to_narrow = of_gate.iter().map(|x| x.activated::<bf16>(activation));
                let to_wide = of_gate.iter().map(|x| x.activated::<f32>(activation));
                let (to_narrow, to_wide) =
                    (plus_all(to_narrow.collect()), plus_all(to_wide.collect()));
                let plain = || {
                    operation()
                        .activation(activation)
                        .bias(&bias)
                        .residual(&residual)
                };
                let (mut narrow, mut wide) = (
                    poisoned::<B, bf16>(&group, M, n)?,
                    poisoned::<B, f32>(&group, M, n)?,
                );
                plain().run(&a, &b, &mut narrow)?;
                check(&what, &to_narrow, &narrow.to_vec()?);
                plain().run(&a, &b, &mut wide)?;
                check(&format!("{what}, to f32"), &to_wide, &wide.to_vec()?);
                tested[0] += 1;

                let both_of = || of_gate.iter().zip(&of_up);
                let to_narrow =
                    both_of().map(|(gate, up)| gate.activated::<bf16>(activation).times(*up));
                let to_wide =
                    both_of().map(|(gate, up)| gate.activated::<f32>(activation).times(*up));
                let (to_narrow, to_wide) =
                    (plus_all(to_narrow.collect()), plus_all(to_wide.collect()));
                let gated = || {
                    operation()
                        .activation(activation)
                        .bias(&both)
                        .residual(&residual)
                        .gated()
                };
                for (layout, weights) in [
                    (WeightLayout::Nk, [&b, &b_up]),
                    (WeightLayout::Kn, [&kn, &kn_up]),
                ] {
                    let gated = || gated().weight_layout(layout);
                    let (mut narrow, mut wide) = (
                        poisoned::<B, bf16>(&group, M, n)?,
                        poisoned::<B, f32>(&group, M, n)?,
                    );
                    let result = gated().run(&a, weights, &mut narrow);
                    if config.is_some() && is_elsewhere(&result) {
                        continue;
                    }
                    result?;
                    check(
                        &format!("{what}, gated, {layout:?}"),
                        &to_narrow,
                        &narrow.to_vec()?,
                    );
                    gated().run(&a, weights, &mut wide)?;
                    check(
                        &format!("{what}, gated, {layout:?}, to f32"),
                        &to_wide,
                        &wide.to_vec()?,
                    );
                    tested[1 + usize::from(layout == WeightLayout::Kn)] += 1;
                }
            }
            // [K, N], to odd columns of f32
            let plain = operation().weight_layout(WeightLayout::Kn).bias(&bias);
            let mut wide = poisoned::<B, f32>(&group, M, n)?;
            let result = plain.run(&a, &kn, &mut wide);
            if config.is_some() && is_elsewhere(&result) {
                continue;
            }
            result?;
            check(&format!("{config:?}, [K, N]"), &of_gate, &wide.to_vec()?);
            tested[3] += 1;
        }
        assert!(tested.iter().all(|&count| count > 0), "{tested:?}");
        Ok(format!("{tested:?}"))
    }));
}

/// Parts of matrices as operands and outputs; nothing beside these is written. Odd extents of f32.
#[track_caller]
pub fn parts_of_matrices_are_operands<B: Tested>(test: &str) {
    const N: usize = 40;
    all_done(ranks::<B>(test, 1, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        let [rows, weights] = [(M, 1), (N, 2)].map(|(rows, seed)| normal::<bf16>(seed, rows * K));
        let framed = |values: &[bf16], columns: usize| -> Vec<bf16> {
            let frame = [nan::<bf16>(); 8];
            let row = |row: &[bf16]| [&frame[..], row, &frame[..]].concat();
            let rows: Vec<_> = values.chunks(columns).map(row).collect();
            let edge = vec![nan::<bf16>(); columns + 16];
            [edge.clone(), rows.concat(), edge].concat()
        };
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
        let found = out.to_vec()?;
        for (row, values) in found.chunks(N + 16).enumerate() {
            let (inside, first) = (1..=M, 8..N + 8);
            if inside.contains(&row) {
                check(
                    "a part",
                    &exact[(row - 1) * N..row * N],
                    &values[first.clone()],
                );
            }
            let beside = values.iter().enumerate();
            let mut beside =
                beside.filter(|(column, _)| !inside.contains(&row) || !first.contains(column));
            assert!(beside.all(|(_, x)| x.is_nan()), "row {row}");
        }
        // Fewer columns, of which the last is odd.
        let mut out = poisoned::<B, f32>(&group, M, N - 3)?;
        Matmul::new().run(a, b.rows(0..N - 3)?, &mut out)?;
        let exact: Vec<Number> = exact
            .chunks(N)
            .flat_map(|row| &row[..N - 3])
            .copied()
            .collect();
        check("odd columns", &exact, &out.to_vec()?);

        // Bad parts.
        let limits = |result: Result<(), Error>| {
            assert!(matches!(result, Err(Error::Limit { .. })), "{result:?}")
        };
        limits(a.rows(0..M + 1).map(drop));
        assert_eq!(a.rows(3..3)?.shape(), [0, K]);
        limits(a.columns(8..8).map(drop));
        limits(a.columns(K..K + 1).map(drop));
        #[allow(clippy::reversed_empty_ranges)]
        limits(a.columns(8..2).map(drop));
        if B::NAME == "cuda" {
            let error = a.columns(3..K).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Unaligned {
                        rank: 0,
                        value: 3,
                        multiple: 8,
                        ..
                    }
                ),
                "{error}"
            );
            let words = error.to_string();
            assert!(words.contains("0 and 8"), "{words}");
            let error = out.view_mut().columns(0..5).unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Unaligned {
                        value: 5,
                        multiple: 4,
                        ..
                    }
                ),
                "{error}"
            );
        }
        let split = out.view_mut().split_columns([4, 4]);
        assert!(matches!(split, Err(Error::Shape { .. })), "{split:?}");
        Ok("parts".into())
    }));
}

/// What becomes of sums over ranks becomes of the sums, not of their parts.
#[track_caller]
pub fn sums_are_finished_by_their_owners<B: Tested>(test: &str, routes: &[Route]) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        // few rows, which are exchanged, and more
        for (rows, n) in [([3, 2], 72), (ROWS, 200)] {
            let m = rows[0] + rows[1];
            let of = |rank: usize| -> [Vec<bf16>; 2] {
                let weights = normal::<bf16>(20 + rank as u64, n * K).into_iter();
                let weights = weights.map(|x| bf16::from_f32(x.to_f32() * 0.06));
                [normal(10 + rank as u64, m * K), weights.collect()]
            };
            let [a_values, b_values] = of(rank.rank);
            let (a, b) = (
                group.upload(&a_values, m, K)?,
                group.upload(&b_values, n, K)?,
            );
            let kn = group.upload(&turned(&b_values, K), K, n)?;
            let biases: Vec<bf16> = normal(30, n);
            let bias = group.upload(&biases, 1, n)?;
            let residuals: Vec<bf16> = normal(31, m * n);
            let first = rank.rank * rows[0];
            let own = first..first + rows[rank.rank];
            let owned = &residuals[own.start * n..own.end * n];
            let residual = group.upload(owned, own.len(), n)?;
            let residual_of_all = group.upload(&residuals, m, n)?;
            // Partials are rounded on their way.
            let partials = [0, 1].map(|rank| {
                let [a, b] = of(rank);
                product(&a, &b, None, K)
            });
            let exact = |activation| -> Vec<Number> {
                let sums = partials[0].iter().zip(&partials[1]).enumerate();
                let sums = sums.map(|(index, (x, y))| {
                    let sum = Number::ZERO.add(x.rounded(8)).add(y.rounded(8));
                    let sum = sum.plus(biases[index % n].to_f32());
                    let sum = sum.activated::<bf16>(activation);
                    sum.plus(residuals[index].to_f32())
                });
                sums.collect()
            };
            for &route in routes {
                let mut sharded = group.sharded_rows::<bf16>(&rows, n)?;
                let config = MatmulReduceScatter::new()
                    .rows(&rows)
                    .prepare(&a, n)?
                    .config();
                let config_of_all = MatmulAllReduce::new().prepare(&a, &sharded)?.config();
                for activation in ACTIVATIONS {
                    let what = format!("{m} rows, {route:?}, {activation:?}");
                    let expected = exact(activation);
                    let own = &expected[own.start * n..own.end * n];
                    for (b, layout) in [(&b, WeightLayout::Nk), (&kn, WeightLayout::Kn)] {
                        let scatter = || {
                            let scatter = MatmulReduceScatter::new().rows(&rows).bias(&bias);
                            let scatter = scatter.activation(activation).residual(&residual);
                            scatter
                                .weight_layout(layout)
                                .config(config.with_route(route))
                        };
                        let mut out = poisoned::<B, bf16>(&group, rows[rank.rank], n)?;
                        scatter().run(&a, b, &mut out)?;
                        check(
                            &format!("reduce-scatter, {what}, {layout:?}"),
                            own,
                            &out.to_vec()?,
                        );
                        let mut out = poisoned::<B, f32>(&group, rows[rank.rank], n)?;
                        scatter().run(&a, b, &mut out)?;
                        check(
                            &format!("reduce-scatter to f32, {what}"),
                            own,
                            &out.to_vec()?,
                        );
                        let all = MatmulAllReduce::new().bias(&bias).activation(activation);
                        let all = all.residual(&residual_of_all).weight_layout(layout);
                        all.config(config_of_all.with_route(route))
                            .run(&a, b, &mut sharded)?;
                        check(
                            &format!("all-reduce, {what}"),
                            &expected,
                            &sharded.to_vec()?,
                        );
                    }
                }
            }
        }
        Ok("sums".into())
    }));
}

/// What does not fit is refused before anything is done, and the group goes on.
#[track_caller]
pub fn forms_that_do_not_fit_are_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 1, |rank| {
        let group = connect::<B>(rank, Numerics::Fast)?;
        let (m, n, k) = (4, 16, 8);
        let a = group.zeros::<bf16>(m, k)?;
        let [b, other] = [n, n + 8].map(|n| group.zeros::<bf16>(n, k).unwrap());
        let mut out = group.zeros::<bf16>(m, n)?;
        let shape = |result: Result<(), Error>, what: &str| match result {
            Err(Error::Shape { argument, .. }) if argument.contains(what) => {}
            other => panic!("{what}: {other:?}"),
        };
        let limit = |result: Result<(), Error>, what: &str| match result {
            Err(Error::Limit { what: found, .. }) if found.contains(what) => {}
            other => panic!("{what}: {other:?}"),
        };
        let op = || Matmul::<B, bf16>::new();
        shape(op().run(&a, [&b, &b], &mut out), "outputs");
        shape(op().gated().run(&a, &b, &mut out), "weights");
        shape(op().gated().run(&a, [&b, &other], &mut out), "b [N, K]");
        shape(op().gated().run(&a, [&b, &b, &b], &mut out), "weights");
        let short = group.zeros::<bf16>(1, n)?;
        shape(
            op().gated().bias(&short).run(&a, [&b, &b], &mut out),
            "bias [1, 2 N]",
        );
        shape(op().residual(&b).run(&a, &b, &mut out), "residual");
        shape(
            op().weight_layout(WeightLayout::Kn).run(&a, &b, &mut out),
            "b [K, N]",
        );
        let mut second = group.zeros::<bf16>(m, n)?;
        let residual = group.zeros::<bf16>(m, 2 * n)?;
        let two = op()
            .residual(&residual)
            .run(&a, [&b, &b], [&mut out, &mut second]);
        limit(two, "residual");
        let five = op().prepare(&group, [m, k], [n; 5]);
        limit(five.map(drop), "weights of a product");
        let unequal = op().gated().prepare(&group, [m, k], [n, n + 8]);
        limit(unequal.map(drop), "N of up");
        let three = op().gated().prepare(&group, [m, k], [n; 3]);
        shape(three.map(drop), "weights");
        let rows = group.sharded::<bf16>(m, k)?;
        let gather = AllGatherMatmul::new().gated();
        let unequal = gather.prepare(&rows, [n, n + 8]);
        limit(unequal.map(drop), "N of up");
        let prepared = op().prepare(&group, [m, k], [n])?;
        let mut wide = group.zeros::<f32>(m, n)?;
        shape(
            prepared.run(&a, &b, Outputs::from(&mut wide)),
            "bytes of an element",
        );
        let prepared = op().f32_output().prepare(&group, [m, k], [n])?;
        shape(prepared.run(&a, &b, &mut out), "bytes of an element");
        prepared.run(&a, &b, &mut wide)?;
        prepared.run(&a, &b, wide.view_mut())?;
        // A call that was not prepared sees what it is given.
        op().f32_output().run(&a, &b, &mut out)?;
        // Of a gated product gate and up share a tile.
        let narrow = prepared.config();
        let narrow = Config::new(
            TileShape::new(narrow.tile.m, 1, narrow.tile.k),
            narrow.chunking,
            narrow.route,
        );
        limit(
            op().gated().config(narrow).run(&a, [&b, &b], &mut out),
            "tile.n",
        );
        let parts = out.view_mut().split_columns([usize::MAX, 1]);
        shape(parts.map(drop), "widths");
        group.synchronize()?;
        Ok("refused".into())
    }));
}
