//! Quantising: bits of plain loops, and errors that say what is wrong.

use gemmesh::elements::{Float, Number};
use gemmesh::error::Kind;
use gemmesh::fp8::{Quantization, Quantize, Quantized, Scales, ShardedScales, quantize};
use gemmesh::{AllGatherMatmul, Error, F8E4M3, Group, Matmul, Matrix, bf16, f16};

use crate::support::errors::parts_of;
use crate::support::numbers::{nan, normal};
use crate::support::tested::{Tested, all_done, connect, ranks};

/// Columns that share a scale.
const BLOCK: usize = 128;
/// Columns in front of an output that is a part of a wider one.
const BEFORE: usize = 16;

/// How an output is quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    pub scheme: Scheme,
    pub power_of_two: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    Blocks,
    /// Of which the first begins so many columns before the first column.
    BlocksFrom(usize),
    Transposed,
    /// By this scale.
    Given(f32),
}

impl Rule {
    pub const ALL: [Rule; 5] = [
        Rule::new(Scheme::Blocks, false),
        Rule::new(Scheme::Blocks, true),
        Rule::new(Scheme::Transposed, false),
        Rule::new(Scheme::Transposed, true),
        Rule::new(Scheme::Given(0.0123), false),
    ];

    /// Rules for outputs that begin inside a block.
    pub const INSIDE: [Rule; 3] = [
        Rule::new(Scheme::BlocksFrom(16), false),
        Rule::new(Scheme::BlocksFrom(64), true),
        Rule::new(Scheme::BlocksFrom(112), false),
    ];

    /// How many columns the first block begins before the first column.
    fn first_column(self) -> usize {
        match self.scheme {
            Scheme::BlocksFrom(first) => first,
            _ => 0,
        }
    }

    const fn new(scheme: Scheme, power_of_two: bool) -> Rule {
        Rule {
            scheme,
            power_of_two,
        }
    }

    pub fn quantization(self) -> Quantization {
        let quantization = match self.scheme {
            Scheme::Blocks => Quantization::blocks(),
            Scheme::BlocksFrom(first) => Quantization::blocks().first_column(first),
            Scheme::Transposed => Quantization::transposed_blocks(),
            Scheme::Given(_) => Quantization::tensor(),
        };
        match self.power_of_two {
            true => quantization.power_of_two(),
            false => quantization,
        }
    }

    /// A matrix for the scales of an output [m, n]. It holds NaN, or the scale that is given.
    pub fn scales<B: Tested>(
        self,
        group: &Group<B>,
        [m, n]: [usize; 2],
    ) -> Result<Matrix<B, f32>, Error> {
        let blocks = (self.first_column() + n).div_ceil(BLOCK);
        let ([rows, columns], value) = match self.scheme {
            Scheme::Blocks | Scheme::BlocksFrom(_) => ([m, blocks], f32::NAN),
            Scheme::Transposed => ([blocks, m], f32::NAN),
            Scheme::Given(scale) => ([1, 1], scale),
        };
        group.upload(&vec![value; rows * columns], rows, columns)
    }

    pub fn by<B: Tested>(self, scales: &mut Matrix<B, f32>) -> Quantized<'_, B> {
        let quantized = match self.scheme {
            Scheme::Blocks => Quantized::blocks(scales),
            Scheme::BlocksFrom(first) => Quantized::blocks(scales).first_column(first),
            Scheme::Transposed => Quantized::transposed_blocks(scales),
            Scheme::Given(_) => Quantized::tensor(&*scales),
        };
        match self.power_of_two {
            true => quantized.power_of_two(),
            false => quantized,
        }
    }

    /// What values [m, n] become, and their scales.
    pub fn expected(self, values: &[f32], n: usize) -> (Vec<F8E4M3>, Vec<f32>) {
        let (mut all, mut scales) = (Vec::new(), Vec::new());
        for row in values.chunks(n) {
            // At least one column.
            let short = (BLOCK - self.first_column()).min(n);
            let (first, others) = row.split_at(short);
            for block in [first].into_iter().chain(others.chunks(BLOCK)) {
                let scale = match self.scheme {
                    Scheme::Given(scale) => scale,
                    _ => self.scale_of(block),
                };
                scales.push(scale);
                let inverse = 1.0 / scale;
                all.extend(block.iter().map(|x| F8E4M3::from_f32(x * inverse)));
            }
        }
        let rows = values.len() / n;
        let blocks = scales.len() / rows;
        let scales = match self.scheme {
            Scheme::Blocks | Scheme::BlocksFrom(_) => scales,
            Scheme::Transposed => (0..blocks * rows)
                .map(|index| scales[index % rows * blocks + index / rows])
                .collect(),
            Scheme::Given(scale) => vec![scale],
        };
        (all, scales)
    }

    fn scale_of(self, block: &[f32]) -> f32 {
        let mut amax = 1e-4;
        for x in block {
            // False for NaN.
            if x.abs() > amax {
                amax = x.abs();
            }
        }
        let scale = amax / 448.0;
        if !self.power_of_two || scale.is_infinite() {
            return scale;
        }
        let mut power = 2f32.powi(-30);
        while power < scale {
            power *= 2.0;
        }
        power
    }
}

pub fn assert_same(found: (Vec<F8E4M3>, Vec<f32>), expected: (Vec<F8E4M3>, Vec<f32>), what: &str) {
    let scales = |values: &[f32]| -> Vec<u32> { values.iter().map(|x| x.to_bits()).collect() };
    assert_eq!(scales(&found.1), scales(&expected.1), "scales, {what}");
    // NaN has a sign on some backends and none on others.
    let bits_of = |x: &F8E4M3| if x.is_nan() { 0x7f } else { x.to_bits() };
    let bits = |values: &[F8E4M3]| -> Vec<u8> { values.iter().map(bits_of).collect() };
    assert_eq!(bits(&found.0), bits(&expected.0), "{what}");
}

fn wide<T: Number>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

fn alone<B: Tested>(test: &str, part: impl FnOnce(&Group<B>) -> Result<(), Error>) {
    all_done(ranks::<B>(test, 1, |rank| {
        part(&connect::<B>(rank, B::TIMEOUT)?)?;
        Ok(String::new())
    }));
}

/// Quantises the last columns of a wider matrix into those of another, and compares every bit.
fn verify<B: Tested, T: Float>(
    group: &Group<B>,
    rule: Rule,
    values: &[T],
    n: usize,
) -> Result<(), Error> {
    let (m, width) = (values.len() / n, BEFORE + n);
    let columns = BEFORE..width;
    let mut wider = vec![T::from_f32(1e4); m * width];
    for (to, from) in wider.chunks_mut(width).zip(values.chunks(n)) {
        to[columns.clone()].copy_from_slice(from);
    }
    let wider = group.upload(&wider, m, width)?;
    let mut out = group.upload(&vec![nan::<F8E4M3>(); m * width], m, width)?;
    let mut scales = rule.scales(group, [m, n])?;
    let x = wider.columns(columns.clone())?;
    let to = out.view_mut().columns(columns.clone())?;
    quantize(x, to, rule.by(&mut scales))?;
    let found = (out.columns(columns)?.to_vec()?, scales.to_vec()?);
    let what = format!("{rule:?} {} [{m}, {n}]", T::DTYPE);
    assert_same(found, rule.expected(&wide(values), n), &what);
    let beside = out.columns(0..BEFORE)?.to_vec()?;
    assert!(beside.iter().all(|x| x.to_f32().is_nan()), "{what}");
    Ok(())
}

pub fn quantized_rows_have_the_bits_of_plain_loops<B: Tested>(test: &str) {
    let shapes = [
        [1, 1],
        [3, 16],
        [5, 128],
        [3, 130],
        [130, 300],
        [2, 1040],
        [40, 512],
    ];
    alone::<B>(test, |group| {
        for (seed, [m, n]) in shapes.into_iter().enumerate() {
            for rule in Rule::ALL.into_iter().chain(Rule::INSIDE) {
                let seed = seed as u64;
                verify::<B, bf16>(group, rule, &normal(seed, m * n), n)?;
                verify::<B, f16>(group, rule, &normal(seed, m * n), n)?;
                verify::<B, f32>(group, rule, &normal(seed, m * n), n)?;
            }
        }
        Ok(())
    });
}

/// NaN, infinities, zeros, and numbers so small or so large that a scale is clamped or a quotient saturates.
pub fn every_kind_of_number_is_quantised<B: Tested>(test: &str) {
    let special = [
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-40,
        1e-5,
        -1e-4,
        -0.0,
        448.0,
        -449.0,
        1.0,
    ];
    let blocks = [
        vec![f32::NAN; BLOCK],
        vec![0.0; BLOCK],
        vec![-0.0; BLOCK],
        vec![1e-6; BLOCK],
        vec![f32::MAX; BLOCK],
    ];
    let n = 3 * BLOCK + 7;
    alone::<B>(test, |group| {
        for rule in Rule::ALL {
            for number in special {
                let mut values = normal::<f32>(1, 2 * n);
                (values[0], values[BLOCK + 1], values[2 * n - 1]) = (number, number, number);
                verify::<B, f32>(group, rule, &values, n)?;
                let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
                verify::<B, bf16>(group, rule, &values, n)?;
            }
            verify::<B, f32>(group, rule, &blocks.concat(), blocks.len() * BLOCK)?;
        }
        let given = |scale| Rule::new(Scheme::Given(scale), false);
        for scale in [1.0, 1e-3, 1e30, 0.0, f32::INFINITY, f32::NAN] {
            verify::<B, f32>(group, given(scale), &special, special.len())?;
        }
        Ok(())
    });
}

pub fn rows_are_quantised_into_the_next_gathers_input<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let [m, n, k] = [41, 48, 512];
        let rows = normal::<bf16>(1, m * k);
        let mut a = group.sharded::<F8E4M3>(m, k)?;
        let mut scales = group.sharded::<f32>(m, k / BLOCK)?;
        let own = a.rows();
        let x = group.upload(&rows[own.start * k..own.end * k], own.len(), k)?;
        let (to, of_to) = (a.shard_mut().view_mut()?, scales.shard_mut().view_mut()?);
        quantize(&x, to, of_to)?;
        let b = group.upload(&normal::<F8E4M3>(2, n * k), n, k)?;
        let of_b = group.upload(&normal::<f32>(3, k / BLOCK), 1, k / BLOCK)?;
        let b = b.scaled(Scales::blocks(&of_b));
        let mut out = group.zeros::<bf16>(m, n)?;
        let scaled = a.scaled(ShardedScales::blocks(&scales));
        AllGatherMatmul::new().run(scaled, b, &mut out)?;

        let expected = Rule::ALL[0].expected(&wide(&rows), k);
        assert_same(
            (a.to_vec()?, scales.to_vec()?),
            expected.clone(),
            "gathered",
        );
        let whole = group.upload(&expected.0, m, k)?;
        let of_whole = group.upload(&expected.1, m, k / BLOCK)?;
        let mut product = group.zeros::<bf16>(m, n)?;
        Matmul::new().run(whole.scaled(Scales::blocks(&of_whole)), b, &mut product)?;
        assert_eq!(out.to_vec()?, product.to_vec()?);
        Ok(String::new())
    }));
}

pub fn prepared_calls_quantise_as_they_were_prepared<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n] = [5, 144];
        let values = normal::<f16>(1, m * n);
        let x = group.upload(&values, m, n)?;
        let mut out = group.zeros::<F8E4M3>(m, n)?;
        for rule in Rule::ALL {
            let operation = Quantize::new().quantization(rule.quantization());
            let prepared = operation.prepare(group, [m, n])?;
            for other in Rule::ALL {
                let mut scales = other.scales(group, [m, n])?;
                match parts_of(&prepared.run(&x, &mut out, other.by(&mut scales))) {
                    None => {
                        let found = (out.to_vec()?, scales.to_vec()?);
                        let expected = rule.expected(&wide(&values), n);
                        assert_same(found, expected, &format!("{rule:?}"));
                        assert_eq!(rule, other);
                    }
                    Some((_, Kind::Unsuitable { what, found, .. })) => {
                        assert_eq!(what, "the quantization of out");
                        assert_eq!(*found, format!("{:?}", other.quantization()));
                        assert_ne!(rule, other);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        // No rows are nothing to do.
        let prepared = Quantize::new().prepare(group, [0, n])?;
        let (none, mut out) = (group.zeros::<f16>(0, n)?, group.zeros(0, n)?);
        prepared.run(&none, &mut out, &mut group.zeros::<f32>(0, 2)?)
    });
}

pub fn wrong_arguments_of_quantize_are_refused<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n] = [5, 144];
        let x = group.zeros::<f32>(m, n)?;
        let mut wrong = group.zeros::<f32>(3, 3)?;
        for (rule, words) in [
            (Rule::ALL[0], "scales of out [M, ⌈N/128⌉] [5, 2]"),
            (Rule::ALL[2], "scales of out [⌈N/128⌉, M] [2, 5]"),
            (Rule::ALL[4], "scales of out [1, 1] [1, 1]"),
        ] {
            let mut out = group.zeros::<F8E4M3>(m, n)?;
            shape(quantize(&x, &mut out, rule.by(&mut wrong)), words);
        }
        let mut out = group.zeros::<F8E4M3>(m, n)?;
        let words = "scales of out [M, ⌈(first column + N)/128⌉] [5, 2]";
        let [inside, ..] = Rule::INSIDE;
        shape(quantize(&x, &mut out, inside.by(&mut wrong)), words);
        let mut scales = group.zeros::<f32>(m, 2)?;
        let unsupported = |result: Result<(), Error>, words: &str| match parts_of(&result) {
            Some((_, Kind::Unsupported { what, .. })) => assert_eq!(what, words),
            other => panic!("{other:?}"),
        };
        unsupported(
            quantize(&x, &mut out, Quantized::blocks(&mut scales).first_column(8)),
            "the first column of an output in its first block must be a multiple of 16, not 8",
        );
        let transposed = Quantized::transposed_blocks(&mut scales).first_column(16);
        unsupported(
            quantize(&x, &mut out, transposed),
            "Quantization::first_column is for Quantization::blocks",
        );
        let mut narrow = group.zeros::<F8E4M3>(m, n - 16)?;
        shape(
            quantize(&x, &mut narrow, &mut scales),
            "out [M, N] [5, 144]",
        );
        let prepared = Quantize::new().prepare(group, [m + 1, n])?;
        let mut out = group.zeros::<F8E4M3>(m, n)?;
        let words = "x [M, N] of a prepared call [6, 144]";
        shape(prepared.run(&x, &mut out, &mut scales), words);
        let scale = group.zeros::<f32>(1, 1)?;
        let scale = Quantized::tensor(&scale).power_of_two();
        let words = "a scale that is given must not be rounded to a power of two";
        match parts_of(&quantize(&x, &mut out, scale)) {
            Some((_, Kind::Unsupported { what, .. })) => assert_eq!(what, words),
            other => panic!("{other:?}"),
        }
        Ok(())
    });
}

#[track_caller]
fn shape(result: Result<(), Error>, words: &str) {
    match parts_of(&result) {
        Some((
            _,
            Kind::Shape {
                argument, expected, ..
            },
        )) => assert_eq!(format!("{argument} {expected:?}"), words),
        other => panic!("{other:?}"),
    }
}
