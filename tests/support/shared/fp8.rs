//! Products of fp8: their bits are those of plain loops, and their errors say what is wrong.

use std::ops::Range;

use gemmesh::elements::{AddendOf, Element, Float, Number, OutputOf, Value, WeightOf};
use gemmesh::error::Kind;
use gemmesh::fp8::{Accumulation, Quantized, Scales, Scaling, ShardedScales, quantize};
use gemmesh::products::{Operand, WeightLayout};
use gemmesh::{
    Activation, AllGatherMatmul, Config, DType, Error, F8E4M3, F8E5M2, Group, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, bf16, f16,
};

use rand::RngExt;

use crate::support::errors::{kind_of, parts_of};
use crate::support::numbers::{nan, normal, rng};
use crate::support::tested::{Tested, all_done, connect, ranks};

/// Every so many of K are summed separately.
const PART: usize = 128;

/// Columns in front of a matrix that is a part of a wider one, so that its rows begin at a multiple of 16 bytes.
const BEFORE: usize = 16;

/// A product of fp8 on one rank.
#[derive(Clone, Debug, Default)]
struct Case {
    m: usize,
    /// N of each weight.
    widths: Vec<usize>,
    k: usize,
    bias: bool,
    residual: bool,
    activation: Activation,
    gated: bool,
    /// How many values share a scale, in `a` and in each weight.
    scaling: [Scaling; 2],
    /// True if `a` and its scales are parts of wider matrices.
    pitched: bool,
    seed: u64,
}

impl Case {
    /// The scales of `a` or of a weight with these rows, if it has any.
    fn scales(&self, of: usize, rows: usize, seed: u64) -> Option<ScaleValues> {
        let [first_row, first_column] = place(self.scaling[of]);
        let blocks = (first_column + self.k).div_ceil(PART);
        let shape = match (self.scaling[of], of) {
            (Scaling::None, _) => return None,
            (Scaling::Tensor, _) => [1, 1],
            (Scaling::Rows, _) => [1, rows],
            (Scaling::Blocks | Scaling::BlocksFrom { .. }, 0) => [rows, blocks],
            (Scaling::TransposedBlocks, 0) => [blocks, rows],
            (Scaling::Blocks | Scaling::BlocksFrom { .. }, _) => {
                [(first_row + rows).div_ceil(PART), blocks]
            }
            other => panic!("{other:?}"),
        };
        Some(ScaleValues {
            scaling: self.scaling[of],
            of_a: of == 0,
            shape,
            values: normal(seed, shape[0] * shape[1]),
        })
    }
}

/// The scales of an operand.
struct ScaleValues {
    scaling: Scaling,
    of_a: bool,
    shape: [usize; 2],
    values: Vec<f32>,
}

impl ScaleValues {
    /// The scale of a row's block of K.
    fn of(&self, row: usize, block: usize) -> f32 {
        let [rows, columns] = self.shape;
        match self.scaling {
            Scaling::Tensor => self.values[0],
            Scaling::Rows => self.values[row],
            Scaling::Blocks | Scaling::BlocksFrom { .. } if self.of_a => {
                self.values[row * columns + block]
            }
            Scaling::TransposedBlocks => self.values[block * (self.values.len() / rows) + row],
            scaling @ (Scaling::Blocks | Scaling::BlocksFrom { .. }) => {
                let [first, _] = place(scaling);
                self.values[(first + row) / PART * columns + block]
            }
            other => panic!("{other:?}"),
        }
    }

    fn place<'a, B: Tested>(&self, matrix: &'a Placed<B, f32>) -> Result<Scales<'a, B>, Error> {
        let view = matrix.view()?;
        Ok(match self.scaling {
            Scaling::Tensor => Scales::tensor(view),
            Scaling::Rows => Scales::rows(view),
            Scaling::Blocks => Scales::blocks(view),
            Scaling::BlocksFrom { row, column } => {
                Scales::blocks(view).first_row(row).first_column(column)
            }
            Scaling::TransposedBlocks => Scales::transposed_blocks(view),
            other => panic!("{other:?}"),
        })
    }
}

/// The row and the column of its first block at which an operand begins.
fn place(scaling: Scaling) -> [usize; 2] {
    match scaling {
        Scaling::BlocksFrom { row, column } => [row, column],
        _ => [0, 0],
    }
}

/// The parts of K that are summed separately, if the first column is this one of its block.
fn parts(k: usize, first: usize) -> impl Iterator<Item = Range<usize>> {
    let mut begin = 0;
    std::iter::from_fn(move || {
        let part = begin..(begin + PART - (first + begin) % PART).min(k);
        begin = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// A matrix of its own, or the middle columns of a wider one.
struct Placed<B: Tested, T> {
    whole: Matrix<B, T>,
    before: usize,
    columns: usize,
}

impl<B: Tested, T: Value> Placed<B, T> {
    fn new(group: &Group<B>, values: &[T], rows: usize, pitched: bool) -> Result<Self, Error> {
        let columns = values.len() / rows;
        let before = if pitched { BEFORE } else { 0 };
        let width = columns + 2 * before;
        let mut whole = vec![T::zeroed(); rows * width];
        for (to, from) in whole.chunks_mut(width).zip(values.chunks(columns)) {
            to[before..before + columns].copy_from_slice(from);
        }
        Ok(Placed {
            whole: group.upload(&whole, rows, width)?,
            before,
            columns,
        })
    }

    fn view(&self) -> Result<gemmesh::views::MatrixView<'_, B, T>, Error> {
        self.whole.columns(self.before..self.before + self.columns)
    }
}

/// One output of a product and what is added to it, in f32.
struct Added {
    bias: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
}

fn wide<T: Number>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// An operand's values and scales.
struct Values {
    values: Vec<f32>,
    scales: Option<ScaleValues>,
}

/// An element of a product.
struct Sum {
    /// Float by float.
    found: f32,
    /// In float64.
    exact: f64,
    /// The sum of the absolute values of all terms.
    magnitude: f64,
}

/// `a · bᵀ`.
fn product(a: &Values, b: &Values, k: usize) -> Vec<Sum> {
    let mut all = Vec::new();
    for (row, of_a) in a.values.chunks_exact(k).enumerate() {
        for (column, of_b) in b.values.chunks_exact(k).enumerate() {
            let scales = |block: usize| {
                let of = |operand: &Values, row| {
                    let scales = operand.scales.as_ref();
                    scales.map(|scales| scales.of(row, block))
                };
                [of(a, row), of(b, column)]
            };
            all.push(sum(of_a, of_b, scales, blocks_of(a)));
        }
    }
    all
}

/// The place of the first column in its block, if blocks have scales.
fn blocks_of(a: &Values) -> Option<usize> {
    let scaling = a.scales.as_ref()?.scaling;
    let [_, first] = place(scaling);
    scaling.has_blocks().then_some(first)
}

fn sum(
    a: &[f32],
    b: &[f32],
    scales: impl Fn(usize) -> [Option<f32>; 2],
    blocks: Option<usize>,
) -> Sum {
    let (mut sum, mut exact, mut magnitude) = (0.0f32, 0.0, 0.0);
    for (block, part) in parts(a.len(), blocks.unwrap_or(0)).enumerate() {
        let (a, b) = (&a[part.clone()], &b[part]);
        let [of_a, of_b] = scales(block).map(|scale| scale.unwrap_or(1.0));
        let mut part = 0.0f32;
        for (a, b) in a.iter().zip(b) {
            // Products of fp8 are exact in f32.
            part += a * b;
            let term = f64::from(a * b) * f64::from(of_a) * f64::from(of_b);
            exact += term;
            magnitude += term.abs();
        }
        sum = match blocks {
            Some(_) => (of_a * of_b).mul_add(part, sum),
            None => sum + part,
        };
    }
    if let ([of_a, of_b], None) = (scales(0), blocks) {
        sum = of_b.map_or(sum, |scale| scale * sum);
        sum = of_a.map_or(sum, |scale| scale * sum);
    }
    Sum {
        found: sum,
        exact,
        magnitude,
    }
}

/// What follows the product: bias, activation, gate, residual.
fn finished(case: &Case, products: &[Vec<Sum>], n: usize, added: &Added) -> Vec<f32> {
    let [gate, up @ ..] = products else {
        panic!("no product")
    };
    let bias = |index: usize, of: usize| {
        let bias = added.bias.as_ref();
        bias.map_or(0.0, |bias| bias[of * n + index % n])
    };
    let finish = |(index, sum): (usize, &Sum)| {
        let mut x = sum.found;
        if case.bias {
            x += bias(index, 0);
        }
        x = case.activation.apply(x);
        if let [up] = up {
            let mut up = up[index].found;
            if case.bias {
                up += bias(index, 1);
            }
            x *= up;
        }
        match &added.residual {
            Some(residual) => x + residual[index],
            None => x,
        }
    };
    gate.iter().enumerate().map(finish).collect()
}

/// The bits of a product's output.
fn bits<O: Number>(values: &[O]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// Checks a sum against float64.
///
/// Let u be 2⁻²⁴. A part of at most 128 terms is off by at most 127 u · Σ|term| of its terms, for its products are
/// exact. Adding up the parts is off by at most one u · Σ|term| for each of them. Two scales, whose product may be
/// rounded too, and the bias add one u each, of the sum and of the bias. To first order that is at most
/// (131 + ⌈K/128⌉) u · (Σ|term| + |bias|), of which each term has its scales. The output is then off by half an ulp.
fn check_bound<O: Number>(case: &Case, sums: &[Sum], found: &[O], bias: Option<&[f32]>) {
    let n = found.len() / case.m;
    let roundings = 131.0 + case.k.div_ceil(PART) as f64;
    for (index, (sum, found)) in sums.iter().zip(found).enumerate() {
        let bias = f64::from(bias.map_or(0.0, |bias| bias[index % n]));
        let found = f64::from(found.to_f32());
        let exact = sum.exact + bias;
        let summing = roundings * 2f64.powi(-24) * (sum.magnitude + bias.abs());
        let least = 2f64.powi(O::MIN_EXPONENT);
        let exponent = exact.abs().max(least).log2().floor() as i32;
        let ulp = 2f64.powi(exponent + 1 - O::DIGITS);
        let allowed = summing * 1.001 + ulp / 2.0;
        let is_saturated = O::DTYPE == DType::F8E4M3 && found.abs() == 448.0 && exact.abs() > 448.0;
        let is_near = (found - exact).abs() <= allowed;
        assert!(
            is_near || is_saturated,
            "{case:?} {index}: {found:e} {exact:e}"
        );
    }
}

fn rounded<O: Number>(values: &[f32]) -> Vec<O> {
    values.iter().map(|&value| O::from_f32(value)).collect()
}

/// Runs a case, and compares every bit of its outputs.
fn verify<B, T, W, O, V>(group: &Group<B>, case: &Case) -> Result<(), Error>
where
    B: Tested,
    T: Element,
    W: WeightOf<T>,
    O: OutputOf<T>,
    V: AddendOf<T>,
{
    let &Case { m, k, seed, .. } = case;
    let outputs = if case.gated { 1 } else { case.widths.len() };
    let n: usize = case.widths[..outputs].iter().sum();
    let a = normal::<T>(seed, m * k);
    let seeds = || (seed + 1..).zip(&case.widths);
    let weights: Vec<Vec<W>> = seeds().map(|(seed, n)| normal(seed, n * k)).collect();
    let scales_of_a = case.scales(0, m, seed + 500);
    let scales_of_b = seeds().map(|(seed, &n)| case.scales(1, n, seed + 600));
    let scales_of_b: Vec<Option<ScaleValues>> = scales_of_b.collect();
    let all: usize = case.widths.iter().sum();
    let bias = case.bias.then(|| normal::<V>(seed + 8, all));
    let residual = case.residual.then(|| normal::<V>(seed + 9, m * n));

    let on = |values: &Vec<V>, rows| group.upload(values, rows, values.len() / rows);
    let bound_bias = bias.as_ref().map(|bias| on(bias, 1)).transpose()?;
    let bound_residual = residual.as_ref().map(|values| on(values, m)).transpose()?;
    let mut operation = Matmul::new().activation(case.activation);
    if case.gated {
        operation = operation.gated();
    }
    if let Some(bias) = &bound_bias {
        operation = operation.bias(bias);
    }
    if let Some(residual) = &bound_residual {
        operation = operation.residual(residual);
    }
    let place = |scales: &ScaleValues, pitched| {
        let [rows, _] = scales.shape;
        Placed::new(group, &scales.values, rows, pitched)
    };
    let bound_a = Placed::new(group, &a, m, case.pitched)?;
    let bound_scales = scales_of_a.as_ref();
    let bound_scales = bound_scales
        .map(|scales| place(scales, case.pitched))
        .transpose()?;
    let mut operand = Operand::from(bound_a.view()?);
    if let (Some(values), Some(scales)) = (&scales_of_a, &bound_scales) {
        operand = bound_a.view()?.scaled(values.place(scales)?);
    }
    let bound = weights.iter().zip(&scales_of_b).zip(&case.widths);
    let bound = bound.map(|((values, scales), &n)| {
        let scales = scales.as_ref().map(|scales| place(scales, false));
        Ok((group.upload(values, n, k)?, scales.transpose()?))
    });
    let bound = bound.collect::<Result<Vec<(Matrix<B, W>, _)>, Error>>()?;
    let views = bound
        .iter()
        .zip(&scales_of_b)
        .map(|((matrix, scales), values)| match (values, scales) {
            (Some(values), Some(scales)) => Ok(matrix.scaled(values.place(scales)?)),
            _ => Ok(matrix.into()),
        });
    let views = views.collect::<Result<Vec<Operand<B, W>>, Error>>()?;
    let views: gemmesh::products::Weights<_, T> = views.into_iter().collect();
    let out = case.widths[..outputs].iter().map(|&n| group.zeros(m, n));
    let mut out = out.collect::<Result<Vec<Matrix<B, O>>, Error>>()?;
    let views_mut: gemmesh::products::Outputs<_, T> =
        out.iter_mut().map(Matrix::view_mut).collect();
    operation.run(operand, views, views_mut)?;

    let a = Values {
        values: wide(&a),
        scales: scales_of_a,
    };
    let products = weights.iter().zip(scales_of_b).map(|(b, scales)| {
        let b = Values {
            values: wide(b),
            scales,
        };
        product(&a, &b, k)
    });
    let products: Vec<Vec<Sum>> = products.collect();
    let mut begin = 0;
    for (number, out) in out.iter().enumerate() {
        let n = case.widths[number];
        let own = match case.gated {
            true => &products[..],
            false => &products[number..=number],
        };
        let added = Added {
            bias: bias.as_ref().map(|bias| wide(&bias[begin..])),
            residual: residual.as_deref().map(wide),
        };
        let expected = rounded::<O>(&finished(case, own, n, &added));
        let what = [T::DTYPE, W::DTYPE, O::DTYPE];
        let found = out.to_vec()?;
        assert_eq!(bits(&found), bits(&expected), "{what:?} {case:?}");
        if !case.gated && case.activation == Activation::Identity && !case.residual {
            check_bound(case, &products[number], &found, added.bias.as_deref());
        }
        begin += n;
    }
    Ok(())
}

/// Runs a case with each pair of operands and each type of output.
fn verify_all<B: Tested>(group: &Group<B>, case: &Case) -> Result<(), Error> {
    macro_rules! outputs {
        ($($rows:ident $weights:ident),+) => {$(
            verify::<B, $rows, $weights, bf16, bf16>(group, case)?;
            verify::<B, $rows, $weights, f16, bf16>(group, case)?;
            verify::<B, $rows, $weights, f32, bf16>(group, case)?;
            verify::<B, $rows, $weights, F8E4M3, bf16>(group, case)?;
        )+};
    }
    outputs!(F8E4M3 F8E4M3, F8E4M3 F8E5M2, F8E5M2 F8E4M3);
    Ok(())
}

/// The extents of products: with and without tails, and K of several parts.
fn shapes() -> impl Iterator<Item = [usize; 3]> {
    [1, 5, 130].into_iter().flat_map(|m| {
        let of_n = move |n| [16, 144, 1040].map(|k| [m, n, k]);
        [16, 48].into_iter().flat_map(of_n)
    })
}

fn alone<B: Tested>(test: &str, part: impl FnOnce(&Group<B>) -> Result<(), Error>) {
    all_done(ranks::<B>(test, 1, |rank| {
        part(&connect::<B>(rank, B::TIMEOUT)?)?;
        Ok(String::new())
    }));
}

/// Backends whose tensor cores sum in a different order do not run this.
pub fn products_of_fp8_have_the_bits_of_plain_loops<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        for (seed, [m, n, k]) in shapes().enumerate() {
            let plain = Case {
                m,
                widths: vec![n],
                k,
                seed: seed as u64 * 10,
                ..Case::default()
            };
            let gated = Case {
                widths: vec![n, n],
                bias: true,
                residual: true,
                activation: Activation::Silu,
                gated: true,
                ..plain.clone()
            };
            let added = Case {
                bias: true,
                residual: true,
                activation: Activation::Relu,
                ..plain.clone()
            };
            let several = Case {
                widths: vec![n, 16, 32],
                bias: true,
                ..plain.clone()
            };
            verify_all(group, &plain)?;
            for case in [gated, added, several] {
                verify::<B, F8E4M3, F8E5M2, F8E4M3, bf16>(group, &case)?;
                verify::<B, F8E5M2, F8E4M3, f16, bf16>(group, &case)?;
            }
        }
        Ok(())
    });
}

/// As [`products_of_fp8_have_the_bits_of_plain_loops`].
pub fn scaled_products_have_the_bits_of_plain_loops<B: Tested>(test: &str) {
    use Scaling::{Blocks, None, Rows, Tensor, TransposedBlocks};
    let free = [None, Tensor, Rows];
    let free = free.into_iter().flat_map(|a| free.map(|b| [a, b]));
    let of_b = [0, 16, 64, 112].map(|row| Scaling::blocks_from(row, 0));
    let of_a = [Blocks, TransposedBlocks].into_iter();
    let blocks = of_a.flat_map(|a| of_b.map(|b| [a, b]));
    let inside = [[0, 64], [16, 112], [64, 16]];
    let inside = inside.map(|[row, column]| [0, row].map(|row| Scaling::blocks_from(row, column)));
    alone::<B>(test, |group| {
        for (seed, scaling) in free.chain(blocks).chain(inside).skip(1).enumerate() {
            for [m, n, k] in [
                [1, 16, 16],
                [5, 48, 144],
                [130, 48, 272],
                [5, 272, 144],
                [3, 16, 64],
                [3, 32, 192],
                [3, 16, 320],
                [2, 16, 1040],
            ] {
                let plain = Case {
                    m,
                    widths: vec![n],
                    k,
                    scaling,
                    seed: 1000 * seed as u64,
                    ..Case::default()
                };
                let gated = Case {
                    widths: vec![n, n],
                    bias: true,
                    activation: Activation::Silu,
                    gated: true,
                    pitched: true,
                    ..plain.clone()
                };
                let several = Case {
                    widths: vec![n, 16],
                    bias: true,
                    ..plain.clone()
                };
                match m * n * k < 100_000 {
                    true => verify_all(group, &plain)?,
                    false => verify::<B, F8E4M3, F8E5M2, F8E4M3, bf16>(group, &plain)?,
                }
                verify::<B, F8E4M3, F8E4M3, bf16, bf16>(group, &gated)?;
                verify::<B, F8E5M2, F8E4M3, f32, bf16>(group, &several)?;
            }
        }
        Ok(())
    });
}

pub fn nan_of_a_scale_reaches_its_elements_only<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [3, 16, 144];
        let a = group.upload(&vec![F8E4M3::from_f32(1.0); m * k], m, k)?;
        let b = group.upload(&vec![F8E4M3::from_f32(1.0); n * k], n, k)?;
        let of_a = group.upload(&[1.0, f32::NAN, 1.0], 1, m)?;
        let mut out = group.zeros::<bf16>(m, n)?;
        Matmul::new().run(a.scaled(Scales::rows(&of_a)), &b, &mut out)?;
        let is_nan = |values: Vec<bf16>| values.into_iter().map(|x| x.is_nan());
        assert!(is_nan(out.to_vec()?).eq((0..m * n).map(|index| index / n == 1)));
        // The second block of K of the last row.
        let of_a = group.upload(&[1.0, 1.0, 1.0, 1.0, 1.0, f32::NAN], m, 2)?;
        let of_b = group.upload(&[1.0f32; 2], 1, 2)?;
        let (a, b) = (
            a.scaled(Scales::blocks(&of_a)),
            b.scaled(Scales::blocks(&of_b)),
        );
        Matmul::new().run(a, b, &mut out)?;
        assert!(is_nan(out.to_vec()?).eq((0..m * n).map(|index| index / n == 2)));
        Ok(())
    });
}

pub fn prepared_products_take_the_scales_that_they_were_prepared_for<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [3, 16, 32];
        let a = group.upload(&vec![F8E4M3::from_f32(1.0); m * k], m, k)?;
        let b = group.upload(&vec![F8E4M3::from_f32(0.5); n * k], n, k)?;
        let of_a = group.upload(&[1.0f32, 2.0, 3.0], 1, m)?;
        let of_b = group.upload(&[0.25f32], 1, 1)?;
        let mut out = group.zeros::<bf16>(m, n)?;
        let operation = Matmul::new().scaling(Scaling::Rows, Scaling::Tensor);
        let operation = operation.accumulation(Accumulation::Fast);
        let prepared = operation.prepare((group, [m, k]), n)?;
        let scaled = a.scaled(Scales::rows(&of_a));
        prepared.run(scaled, b.scaled(Scales::tensor(&of_b)), &mut out)?;
        let rows = [4.0, 8.0, 12.0].map(bf16::from_f32);
        assert!(
            out.to_vec()?
                .chunks(n)
                .zip(rows)
                .all(|(row, x)| row == [x; 16])
        );
        let refused = |result: Result<(), Error>, words: &str| match parts_of(&result) {
            Some((_, Kind::Unsuitable { what, found, .. })) => {
                assert_eq!(format!("{what} is {found}"), words);
            }
            other => panic!("{other:?}"),
        };
        let result = prepared.run(&a, b.scaled(Scales::tensor(&of_b)), &mut out);
        refused(result, "the scaling of a is None");
        let result = prepared.run(scaled, &b, &mut out);
        refused(result, "the scaling of b is None");
        Ok(())
    });
}

pub fn prepared_products_take_the_weights_that_they_were_prepared_for<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [3, 16, 32];
        let a = group.upload(&vec![F8E4M3::from_f32(1.0); m * k], m, k)?;
        let of_e4m3 = group.upload(&vec![F8E4M3::from_f32(0.5); n * k], n, k)?;
        let of_e5m2 = group.upload(&vec![F8E5M2::from_f32(0.5); n * k], n, k)?;
        let mut out = group.zeros::<bf16>(m, n)?;
        let prepared = Matmul::new().weight_dtype(DType::F8E5M2);
        let prepared = prepared.prepare((group, [m, k]), n)?;
        prepared.run(&a, &of_e5m2, &mut out)?;
        assert_eq!(out.to_vec()?, vec![bf16::from_f32(16.0); m * n]);
        let words = prepared
            .run(&a, &of_e4m3, &mut out)
            .unwrap_err()
            .to_string();
        assert!(words.contains("weight_dtype(DType::F8E4M3)"), "{words}");
        let wrong = Matmul::<B, F8E5M2>::new().weight_dtype(DType::F8E5M2);
        let wrong = wrong.prepare((group, [m, k]), n).map(drop);
        let words = "rows of f8e5m2 cannot be multiplied by weights of f8e5m2";
        unsupported(wrong, words);
        Ok(())
    });
}

pub fn wrong_scales_are_refused<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [3, 32, 144];
        let (a, b) = (group.zeros::<F8E4M3>(m, k)?, group.zeros::<F8E4M3>(n, k)?);
        let ones = |rows: usize, columns: usize| {
            group.upload(&vec![1.0f32; rows * columns], rows, columns)
        };
        let mut out = group.zeros::<bf16>(m, n)?;
        let mut run =
            |a: Operand<_, F8E4M3>, b: Operand<_, F8E4M3>| Matmul::new().run(a, b, &mut out);
        let shape = |result: Result<(), Error>, words: &str| match parts_of(&result) {
            Some((
                _,
                Kind::Shape {
                    argument, expected, ..
                },
            )) => assert_eq!(format!("{argument} {expected:?}"), words),
            other => panic!("{other:?}"),
        };
        let wrong = ones(3, 3)?;
        let (of_a, of_b) = (ones(3, 2)?, ones(1, 2)?);
        let plain = || Operand::from(&b);
        let blocks = || b.scaled(Scales::blocks(&of_b));
        shape(
            run(a.scaled(Scales::tensor(&wrong)), plain()),
            "scales of a [1, 1] [1, 1]",
        );
        shape(
            run(a.scaled(Scales::rows(&wrong)), plain()),
            "scales of a [1, M] [1, 3]",
        );
        shape(
            run(a.scaled(Scales::blocks(&wrong)), blocks()),
            "scales of a [M, ⌈K/128⌉] [3, 2]",
        );
        shape(
            run(a.scaled(Scales::transposed_blocks(&wrong)), blocks()),
            "scales of a [⌈K/128⌉, M] [2, 3]",
        );
        shape(
            run((&a).into(), b.scaled(Scales::rows(&wrong))),
            "scales of b [1, N] [1, 32]",
        );
        let of_blocks = || a.scaled(Scales::blocks(&of_a));
        shape(
            run(of_blocks(), b.scaled(Scales::blocks(&wrong))),
            "scales of b [⌈N/128⌉, ⌈K/128⌉] [1, 2]",
        );
        shape(
            run(of_blocks(), b.scaled(Scales::blocks(&of_b).first_row(112))),
            "scales of b [⌈(first row + N)/128⌉, ⌈K/128⌉] [2, 2]",
        );
        let mixed = "scales of blocks must be those of both operands, or of none";
        unsupported(run(of_blocks(), plain()), mixed);
        unsupported(run((&a).into(), blocks()), mixed);
        let tensor = ones(1, 1)?;
        unsupported(
            run(a.scaled(Scales::tensor(&tensor).first_row(1)), plain()),
            "Scales::first_row is for the blocks of a weight",
        );
        unsupported(
            run(a.scaled(Scales::blocks(&of_a).first_row(1)), blocks()),
            "only blocks of a weight begin at a row",
        );
        unsupported(
            run(of_blocks(), b.scaled(Scales::transposed_blocks(&of_b))),
            "scales of a weight must be Tensor, Rows or Blocks",
        );
        unsupported(
            run(a.scaled(Scales::tensor(&tensor).first_column(16)), plain()),
            "Scales::first_column is for Scales::blocks",
        );
        let inside = |first| b.scaled(Scales::blocks(&of_b).first_column(first));
        unsupported(
            run(of_blocks(), inside(16)),
            "the first column of a weight in its first block must be that of a, 0, not 16, so that each part of K has one \
             scale of either",
        );
        unsupported(
            run(a.scaled(Scales::blocks(&of_a).first_column(8)), inside(8)),
            "the first column of a in its first block must be a multiple of 16, not 8",
        );
        let of_inside = a.scaled(Scales::blocks(&of_a).first_column(112));
        shape(
            run(
                a.scaled(Scales::blocks(&wrong).first_column(112)),
                inside(112),
            ),
            "scales of a [M, ⌈(first column + K)/128⌉] [3, 2]",
        );
        shape(
            run(
                of_inside,
                b.scaled(Scales::blocks(&wrong).first_column(112)),
            ),
            "scales of b [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉] [1, 2]",
        );
        let result = run(
            a.scaled(Scales::blocks(&of_a).first_column(usize::MAX)),
            inside(0),
        );
        assert!(
            matches!(kind_of(&result), Some(Kind::Limit { .. })),
            "{result:?}"
        );
        let result = run(
            of_blocks(),
            b.scaled(Scales::blocks(&ones(2, 2)?).first_row(128)),
        );
        assert!(
            matches!(kind_of(&result), Some(Kind::Limit { .. })),
            "{result:?}"
        );
        unsupported(
            run(of_blocks(), b.scaled(Scales::blocks(&of_b).first_row(8))),
            "the first row of a weight in its first block must be a multiple of 16, not 8",
        );
        let mut two = [group.zeros::<bf16>(m, n)?, group.zeros::<bf16>(m, n)?];
        let [one, other] = &mut two;
        let weights = [b.scaled(Scales::tensor(&tensor)), plain()];
        let result = Matmul::new().run(&a, weights, [one, other]);
        unsupported(result, "all weights must be scaled alike");
        let (a, b) = (group.zeros::<bf16>(m, k)?, group.zeros::<bf16>(n, k)?);
        let result = Matmul::new().run(a.scaled(Scales::tensor(&tensor)), &b, &mut out);
        unsupported(result, "only operands of fp8 have scales");
        Ok(())
    });
}

pub fn outputs_of_e4m3_saturate_and_nan_stays<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let k = 16;
        let of = |value: f32| vec![F8E4M3::from_f32(value); k];
        let rows = [of(448.0), of(-448.0), of(f32::NAN), of(1.0)].concat();
        let a = group.upload(&rows, 4, k)?;
        let b = group.upload(&of(448.0).repeat(16), 16, k)?;
        let mut out = group.zeros::<F8E4M3>(4, 16)?;
        gemmesh::matmul(&a, &b, &mut out)?;
        let out = wide(&out.to_vec()?);
        assert!(out[..16].iter().all(|&x| x == 448.0));
        assert!(out[16..32].iter().all(|&x| x == -448.0));
        assert!(out[32..48].iter().all(|x| x.is_nan()));
        assert!(out[48..].iter().all(|&x| x == 448.0));
        Ok(())
    });
}

#[track_caller]
fn unsupported(result: Result<(), Error>, words: &str) {
    match parts_of(&result) {
        Some((_, Kind::Unsupported { what, .. })) => assert_eq!(what, words),
        other => panic!("{other:?}"),
    }
}

pub fn what_fp8_cannot_do_is_refused<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let run = |m, n, k| {
            let (a, b) = (group.zeros::<F8E4M3>(m, k)?, group.zeros::<F8E4M3>(n, k)?);
            gemmesh::matmul(&a, &b, &mut group.zeros::<bf16>(m, n)?)
        };
        unsupported(run(3, 24, 16), "N of fp8 must be a multiple of 16, not 24");
        unsupported(run(3, 16, 40), "K of fp8 must be a multiple of 16, not 40");
        let (a, b) = (
            group.zeros::<F8E5M2>(3, 32)?,
            group.zeros::<F8E4M3>(32, 16)?,
        );
        let kn = Matmul::new().weight_layout(WeightLayout::Kn);
        let result = kn.run(&a, &b, &mut group.zeros::<bf16>(3, 16)?);
        unsupported(result, "weights of fp8 must be [N, K] (WeightLayout::Nk)");
        let b = group.zeros::<F8E4M3>(16, 32)?;
        let wrong = |result: Result<(), Error>| match result.unwrap_err().kind() {
            Kind::Unsuitable { what, .. } => what.clone(),
            other => panic!("{other:?}"),
        };
        let prepared = Matmul::new().prepare((group, [3, 32]), 16)?;
        let result = prepared.run(&a, &b, &mut group.zeros::<f32>(3, 16)?);
        assert_eq!(wrong(result), "the dtype of out");
        let stored = Matmul::<B, F8E4M3>::new().output_dtype(gemmesh::DType::F8E5M2);
        let result = stored.prepare((group, [3, 32]), 16).map(drop);
        unsupported(result, "a product of f8e4m3 cannot be stored as f8e5m2");
        Ok(())
    });
}

// Gathers.

/// Gathers of rows with their scales, under delays that differ each time, have the bits of products of all rows at
/// once. `config`: how a gather is cut up, by its seed.
pub fn scales_arrive_with_their_rows<B: Tested>(test: &str, config: fn(u64) -> Config) {
    under_delays::<B>(test, 90, |group, seed| gather(group, seed, config(seed)));
}

/// Calls `gather` with each seed below `count` on three ranks, whose chunks are delayed with three of four seeds.
pub fn under_delays<B: Tested>(
    test: &str,
    count: u64,
    gather: impl Fn(&Group<B>, u64) -> Result<(), Error>,
) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        for seed in 0..count {
            gemmesh::testing::delay_chunks((seed % 4 > 0).then_some(seed));
            gather(&group, seed)?;
        }
        gemmesh::testing::delay_chunks(None);
        Ok(String::new())
    }));
}

/// A product of fp8 rows of three ranks, which are gathered with their scales.
pub fn gather<B: Tested>(group: &Group<B>, seed: u64, config: Config) -> Result<(), Error> {
    let mut rng = rng(seed);
    let k: usize = [16, 144, 272, 400][rng.random_range(0..4)];
    let rows: [usize; 3] = std::array::from_fn(|_| rng.random_range(0..60));
    let (m, n) = (
        rows.iter().sum::<usize>() + 1,
        [16, 48][rng.random_range(0..2)],
    );
    let rows = [rows[0] + 1, rows[1], rows[2]];
    let has_blocks = rng.random_bool(0.5);
    let columns = if has_blocks { k.div_ceil(PART) } else { 1 };

    let values = normal::<F8E4M3>(seed, m * k);
    let scales = normal::<f32>(seed + 1, m * columns);
    let b = group.upload(&normal::<F8E5M2>(seed + 2, n * k), n, k)?;
    let blocks = group.upload(&normal::<f32>(seed + 3, columns), 1, columns)?;
    let b = match has_blocks {
        true => b.scaled(Scales::blocks(&blocks)),
        false => b.scaled(Scales::tensor(&blocks)),
    };
    let mut a = group.sharded_rows::<F8E4M3>(&rows, k)?;
    let own = a.rows();
    a.shard_mut()
        .copy_from_host(&values[own.start * k..own.end * k])?;
    a.poison(nan())?;
    let mut sharded = group.sharded_rows::<f32>(&rows, columns)?;
    let own = &scales[own.start * columns..own.end * columns];
    sharded.shard_mut().copy_from_host(own)?;
    sharded.poison(f32::NAN)?;

    let whole = group.upload(&values, m, k)?;
    let (of_rows, of_blocks) = (
        group.upload(&scales, columns, m)?,
        group.upload(&scales, m, columns)?,
    );
    let own = match has_blocks {
        true => Scales::blocks(&of_blocks),
        false => Scales::rows(&of_rows),
    };
    let mut expected = group.zeros::<bf16>(m, n)?;
    Matmul::new().run(whole.scaled(own), b, &mut expected)?;

    let mut out = group.upload::<bf16>(&vec![nan(); m * n], m, n)?;
    let (scaled, scaling) = match (seed % 3, has_blocks) {
        (0, _) => (
            a.scaled(own),
            [Scaling::Blocks, Scaling::Rows][usize::from(!has_blocks)],
        ),
        (_, true) => (
            a.scaled(ShardedScales::blocks(&sharded)),
            Scaling::ShardedBlocks,
        ),
        (_, false) => (
            a.scaled(ShardedScales::rows(&sharded)),
            Scaling::ShardedRows,
        ),
    };
    let operation = AllGatherMatmul::new().config(config);
    let operation = operation.stages(1 + seed as usize % 2);
    match seed % 5 {
        0 => operation.run(scaled, b, &mut out)?,
        step => {
            let of_b = if has_blocks {
                Scaling::Blocks
            } else {
                Scaling::Tensor
            };
            let operation = operation.scaling(scaling, of_b);
            let b = &group.upload(&normal::<F8E4M3>(seed + 2, n * k), n, k)?;
            let b = match has_blocks {
                true => b.scaled(Scales::blocks(&blocks)),
                false => b.scaled(Scales::tensor(&blocks)),
            };
            Matmul::new().run(whole.scaled(own), b, &mut expected)?;
            let prepared = operation.prepare(&a, n)?;
            match step {
                1 => {
                    prepared.gather(scaled)?;
                    prepared.matmul(scaled, b, &mut out)?;
                }
                _ => prepared.run(scaled, b, &mut out)?,
            }
        }
    }
    assert_eq!(
        bits(&out.to_vec()?),
        bits(&expected.to_vec()?),
        "seed {seed}, {config:?}"
    );
    assert_eq!(bits(&a.to_vec()?), bits(&values), "seed {seed}");
    if !seed.is_multiple_of(3) {
        assert_eq!(bits(&sharded.to_vec()?), bits(&scales), "seed {seed}");
    }
    Ok(())
}

pub fn scales_of_other_rows_are_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.sharded_rows::<F8E4M3>(&[3, 5], 512)?;
        let b = group.zeros::<F8E4M3>(16, 512)?;
        let of_b = group.zeros::<f32>(1, 4)?;
        let mut out = group.zeros::<bf16>(8, 16)?;
        let [narrow, split] = [[[3, 5], [8, 8]], [[4, 4], [4, 4]]];
        for (rows, [columns, _], expected) in [
            (narrow[0], narrow[1], "scales of a [M, ⌈K/128⌉]"),
            (split[0], split[1], "scales of a (rows of each rank)"),
        ] {
            let scales = group.sharded_rows::<f32>(&rows, columns)?;
            let scaled = a.scaled(ShardedScales::blocks(&scales));
            let b = b.scaled(Scales::blocks(&of_b));
            // Every rank refuses, so none waits.
            match parts_of(&AllGatherMatmul::new().run(scaled, b, &mut out)) {
                Some((_, Kind::Shape { argument, .. })) => assert_eq!(argument, expected),
                other => panic!("{other:?}"),
            }
        }
        let operation = Matmul::<B, F8E4M3>::new().scaling(Scaling::ShardedRows, Scaling::None);
        unsupported(
            operation.prepare((&group, [3, 16]), 16).map(drop),
            "only scales of rows that are gathered can be sharded",
        );
        Ok(String::new())
    }));
}

// Sums over ranks.

/// Sums of products of fp8 have the bits of their rounded partials, added in the order of the ranks.
pub fn sums_of_fp8_have_the_bits_of_their_partials<B: Tested>(
    test: &str,
    configs: fn() -> Vec<Config>,
) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let scalings = [
            [Scaling::None; 2],
            [Scaling::Rows, Scaling::Tensor],
            [Scaling::Blocks, Scaling::blocks_from(96, 0)],
            [Scaling::blocks_from(0, 64), Scaling::blocks_from(96, 64)],
        ];
        for (number, config) in configs().into_iter().enumerate() {
            for (seed, scaling) in (100 * number as u64..).step_by(10).zip(scalings) {
                let case = SumCase {
                    scaling,
                    config,
                    seed,
                };
                case.reduce_scatter::<B, bf16, bf16>(&group)?;
                case.reduce_scatter::<B, f16, bf16>(&group)?;
                case.reduce_scatter::<B, f32, bf16>(&group)?;
                case.reduce_scatter::<B, F8E4M3, bf16>(&group)?;
                case.all_reduce::<B, bf16>(&group)?;
            }
        }
        Ok(String::new())
    }));
}

/// A sum over three ranks.
struct SumCase {
    scaling: [Scaling; 2],
    config: Config,
    seed: u64,
}

/// The matrices of a rank's product.
struct SumOperands<B: Tested> {
    a: Matrix<B, F8E4M3>,
    b: Matrix<B, F8E4M3>,
    scales: [Option<(ScaleValues, Placed<B, f32>)>; 2],
}

impl<B: Tested> SumOperands<B> {
    fn scaled(&self) -> Result<[Operand<'_, B, F8E4M3>; 2], Error> {
        let [mut a, mut b] = [&self.a, &self.b].map(Operand::from);
        let [of_a, of_b] = &self.scales;
        if let Some((values, placed)) = of_a {
            a = self.a.scaled(values.place(placed)?);
        }
        if let Some((values, placed)) = of_b {
            b = self.b.scaled(values.place(placed)?);
        }
        Ok([a, b])
    }
}

impl SumCase {
    const M: usize = 70;
    const N: usize = 48;

    /// Those of a rank, whose K may be different.
    fn operands<B: Tested>(&self, group: &Group<B>, rank: usize) -> Result<SumOperands<B>, Error> {
        let (k, seed) = ([144, 16, 272][rank], self.seed + 1000 * rank as u64);
        let case = Case {
            k,
            scaling: self.scaling,
            ..Case::default()
        };
        let place = |of, rows, seed| -> Result<_, Error> {
            let Some(scales) = case.scales(of, rows, seed) else {
                return Ok(None);
            };
            let placed = Placed::new(group, &scales.values, scales.shape[0], false)?;
            Ok(Some((scales, placed)))
        };
        Ok(SumOperands {
            a: group.upload(&normal(seed, Self::M * k), Self::M, k)?,
            b: group.upload(&normal(seed + 1, Self::N * k), Self::N, k)?,
            scales: [place(0, Self::M, seed + 2)?, place(1, Self::N, seed + 3)?],
        })
    }

    /// Bias and residual.
    fn added<V: Float>(&self) -> [Vec<V>; 2] {
        [
            normal(self.seed + 4, Self::N),
            normal(self.seed + 5, Self::M * Self::N),
        ]
    }

    /// All rows of the sum, from partials of `V`.
    fn expected<B: Tested, V: AddendOf<F8E4M3> + OutputOf<F8E4M3>>(
        &self,
        group: &Group<B>,
    ) -> Result<Vec<f32>, Error> {
        let mut sums = vec![0.0f32; Self::M * Self::N];
        for rank in 0..3 {
            let operands = self.operands(group, rank)?;
            let mut partials = group.zeros::<V>(Self::M, Self::N)?;
            let [a, b] = operands.scaled()?;
            Matmul::new().run(a, b, &mut partials)?;
            for (sum, partial) in sums.iter_mut().zip(wide(&partials.to_vec()?)) {
                *sum += partial;
            }
        }
        let [bias, residual] = self.added::<V>().map(|values| wide(&values));
        let finish = |(index, sum): (usize, f32)| {
            let sum = Activation::Relu.apply(sum + bias[index % Self::N]);
            sum + residual[index]
        };
        Ok(sums.into_iter().enumerate().map(finish).collect())
    }

    fn reduce_scatter<B, O, V>(&self, group: &Group<B>) -> Result<(), Error>
    where
        B: Tested,
        O: OutputOf<F8E4M3>,
        V: AddendOf<F8E4M3> + OutputOf<F8E4M3>,
    {
        let expected = rounded::<O>(&self.expected::<B, V>(group)?);
        let own = group.even_rows(Self::M);
        let first: usize = own[..group.rank()].iter().sum();
        let rows = own[group.rank()];
        let own = first * Self::N..(first + rows) * Self::N;
        let [bias, residual] = self.added::<V>();
        let bias = group.upload(&bias, 1, Self::N)?;
        let residual = group.upload(&residual[own.clone()], rows, Self::N)?;
        let operands = self.operands(group, group.rank())?;
        let [a, b] = operands.scaled()?;
        let operation = MatmulReduceScatter::new().config(self.config);
        let operation = operation.bias(&bias).residual(&residual);
        let operation = operation.activation(Activation::Relu);
        let mut out = group.zeros::<O>(rows, Self::N)?;
        operation.run(a, b, &mut out)?;
        let what = (O::DTYPE, self.scaling, self.config);
        assert_eq!(
            bits(&out.to_vec()?),
            bits(&expected[own.clone()]),
            "{what:?}"
        );
        let operation = operation.scaling(self.scaling[0], self.scaling[1]);
        let prepared = operation.output_dtype(O::DTYPE).prepare(a, Self::N)?;
        let mut out = group.zeros::<O>(rows, Self::N)?;
        prepared.run(a, b, &mut out)?;
        assert_eq!(bits(&out.to_vec()?), bits(&expected[own]), "{what:?}");
        Ok(())
    }

    fn all_reduce<B, V>(&self, group: &Group<B>) -> Result<(), Error>
    where
        B: Tested,
        V: AddendOf<F8E4M3> + OutputOf<F8E4M3>,
    {
        let expected = rounded::<V>(&self.expected::<B, V>(group)?);
        let [bias, residual] = self.added::<V>();
        let bias = group.upload(&bias, 1, Self::N)?;
        let residual = group.upload(&residual, Self::M, Self::N)?;
        let operands = self.operands(group, group.rank())?;
        let [a, b] = operands.scaled()?;
        let operation = MatmulAllReduce::new().config(self.config);
        let operation = operation.bias(&bias).residual(&residual);
        let mut out = group.sharded::<V>(Self::M, Self::N)?;
        let operation = operation.activation(Activation::Relu);
        operation.run(a, b, &mut out)?;
        let what = (V::DTYPE, self.scaling, self.config);
        assert_eq!(bits(&out.to_vec()?), bits(&expected), "{what:?}");
        Ok(())
    }
}

/// K of each rank and N of a weight whose ranks' parts of K begin inside blocks.
const SPLITS: [[usize; 2]; 4] = [[64, 48], [192, 48], [320, 272], [208, 16]];

/// Parts of K that begin inside a block of a whole weight's scales give the sums that float64 gives.
pub fn parts_of_k_that_begin_inside_a_block_are_summed_up<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        for (seed, [k, n]) in SPLITS.into_iter().enumerate() {
            for m in [1, 70, 300] {
                SplitCase::new(1000 * seed as u64, [m, n, k]).verify(&group)?;
            }
        }
        Ok(String::new())
    }));
}

/// A weight [N, 3 K] with the scales of its blocks, whose columns three ranks share, and each rank's rows.
struct SplitCase {
    shape: [usize; 3],
    rows: [Vec<bf16>; 3],
    /// Of each rank, [N, K]
    weights: [Vec<F8E4M3>; 3],
    /// Of the whole weight.
    scales: Vec<f32>,
}

/// Rows of fp8 and their scales.
type QuantizedRows<B> = (Matrix<B, F8E4M3>, Matrix<B, f32>);

/// The values of a rank's operands, times their scales.
struct Dequantized {
    a: Vec<f64>,
    b: Vec<f64>,
}

impl SplitCase {
    fn new(seed: u64, [m, n, k]: [usize; 3]) -> SplitCase {
        let ranks = [0, 1, 2].map(|rank| seed + 10 * rank);
        let blocks = n.div_ceil(PART) * (3 * k).div_ceil(PART);
        SplitCase {
            shape: [m, n, k],
            rows: ranks.map(|seed| normal(seed, m * k)),
            weights: ranks.map(|seed| normal(seed + 1, n * k)),
            scales: normal::<f32>(seed + 2, blocks),
        }
    }

    /// The place of a rank's first column in its block, and the scales of its part of the weight.
    fn part(&self, rank: usize) -> (usize, Vec<f32>) {
        let [_, _, k] = self.shape;
        let own = rank * k / PART..((rank + 1) * k).div_ceil(PART);
        let rows = self.scales.chunks((3 * k).div_ceil(PART));
        let scales = rows.flat_map(|row| &row[own.clone()]).copied();
        (rank * k % PART, scales.collect())
    }

    /// What a rank multiplies, if it has quantised its rows.
    fn dequantized<B: Tested>(&self, group: &Group<B>, rank: usize) -> Result<Dequantized, Error> {
        let [m, _, k] = self.shape;
        let (first, of_b) = self.part(rank);
        let (a, of_a) = self.quantized(group, rank)?;
        let blocks = (first + k).div_ceil(PART);
        let wide = |values: &[F8E4M3], scale: &dyn Fn(usize, usize) -> f32| {
            let value = |(index, value): (usize, &F8E4M3)| {
                let (row, column) = (index / k, index % k);
                let scale = scale(row, (first + column) / PART);
                f64::from(value.to_f32()) * f64::from(scale)
            };
            values.iter().enumerate().map(value).collect::<Vec<f64>>()
        };
        assert_eq!(of_a.shape(), [m, blocks]);
        let (a, of_a) = (a.to_vec()?, of_a.to_vec()?);
        Ok(Dequantized {
            a: wide(&a, &|row, block| of_a[row * blocks + block]),
            b: wide(&self.weights[rank], &|row, block| {
                of_b[row / PART * blocks + block]
            }),
        })
    }

    /// A rank's rows and their scales.
    fn quantized<B: Tested>(
        &self,
        group: &Group<B>,
        rank: usize,
    ) -> Result<QuantizedRows<B>, Error> {
        let [m, _, k] = self.shape;
        let (first, _) = self.part(rank);
        let rows = group.upload(&self.rows[rank], m, k)?;
        let mut values = group.zeros::<F8E4M3>(m, k)?;
        let mut scales = group.zeros::<f32>(m, (first + k).div_ceil(PART))?;
        let to = Quantized::blocks(&mut scales).first_column(first);
        quantize(&rows, &mut values, to)?;
        Ok((values, scales))
    }

    /// Elements of the sum, each with the sum of the absolute values of all its terms.
    fn exact<B: Tested>(&self, group: &Group<B>) -> Result<Vec<[f64; 2]>, Error> {
        let [m, n, k] = self.shape;
        let mut exact = vec![[0.0; 2]; m * n];
        for rank in 0..3 {
            let Dequantized { a, b } = self.dequantized(group, rank)?;
            for (index, [sum, size]) in exact.iter_mut().enumerate() {
                let (row, column) = (index / n, index % n);
                for (a, b) in a[row * k..][..k].iter().zip(&b[column * k..][..k]) {
                    *sum += a * b;
                    *size += (a * b).abs();
                }
            }
        }
        Ok(exact)
    }

    fn verify<B: Tested>(&self, group: &Group<B>) -> Result<(), Error> {
        let [m, n, k] = self.shape;
        let exact = self.exact(group)?;
        let (first, of_b) = self.part(group.rank());
        let (a, of_a) = self.quantized(group, group.rank())?;
        let b = group.upload(&self.weights[group.rank()], n, k)?;
        let blocks = (first + k).div_ceil(PART);
        let of_b = group.upload(&of_b, n.div_ceil(PART), blocks)?;
        let a = a.scaled(Scales::blocks(&of_a).first_column(first));
        let b = b.scaled(Scales::blocks(&of_b).first_column(first));
        let scaling = Scaling::blocks_from(0, first);
        let reduce = MatmulAllReduce::<B, F8E4M3>::new();
        let planned = reduce.scaling(scaling, scaling);
        planned.supported(group, [m, k], n)?;
        let mut sums = group.sharded::<bf16>(m, n)?;
        MatmulAllReduce::new().run(a, b, &mut sums)?;
        check_sums(&exact, &sums.to_vec()?, self.shape);
        let own = sums.rows();
        let mut out = group.zeros::<bf16>(own.len(), n)?;
        MatmulReduceScatter::new().run(a, b, &mut out)?;
        check_sums(
            &exact[own.start * n..own.end * n],
            &out.to_vec()?,
            self.shape,
        );
        Ok(())
    }
}

/// Compares sums over three ranks with float64, of which each element comes with the sum of its terms' absolute values.
#[track_caller]
fn check_sums(exact: &[[f64; 2]], found: &[bf16], shape: [usize; 3]) {
    assert_eq!(exact.len(), found.len());
    for (index, (&[exact, size], found)) in exact.iter().zip(found).enumerate() {
        // Tensor cores drop 2⁻¹² of a part's terms, and the partials and their sum are rounded to bf16.
        let allowed = size * (2f64.powi(-12) + 2f64.powi(-8));
        let off = (f64::from(found.to_f32()) - exact).abs();
        assert!(
            off <= allowed,
            "{shape:?}: element {index} is {found}, not {exact}"
        );
    }
}
