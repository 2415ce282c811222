//! Products whose outputs are quantised: they have the bits of their f32 results, quantised by plain loops.

use gemmesh::elements::{AddendOf, Element, WeightOf};
use gemmesh::error::Kind;
use gemmesh::fp8::{Quantization, Quantized, QuantizedOutput, Scales, ShardedScales};
use gemmesh::products::{Operand, Outputs, Weights};
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    Activation, AllGatherMatmul, Config, Error, F8E4M3, Group, Matmul, MatmulReduceScatter, Matrix,
    bf16, f16,
};

use super::fp8::under_delays;
use super::quantized::{Rule, Scheme, assert_same};
use crate::support::errors::{kind_of, parts_of};
use crate::support::numbers::{nan, normal};
use crate::support::tested::{Tested, all_done, connect, ranks};

const BLOCK: usize = 128;

fn alone<B: Tested>(test: &str, part: impl FnOnce(&Group<B>) -> Result<(), Error>) {
    all_done(ranks::<B>(test, 1, |rank| {
        part(&connect::<B>(rank, B::TIMEOUT)?)?;
        Ok(String::new())
    }));
}

/// Outputs [m, n] for each of these n, and their scales.
pub struct Made<B: Tested> {
    rule: Rule,
    values: Vec<Matrix<B, F8E4M3>>,
    scales: Vec<Matrix<B, f32>>,
}

impl<B: Tested> Made<B> {
    pub fn new(group: &Group<B>, rule: Rule, m: usize, widths: &[usize]) -> Result<Self, Error> {
        let values = |&n: &usize| group.upload(&vec![nan(); m * n], m, n);
        let scales = |&n: &usize| rule.scales(group, [m, n]);
        Ok(Made {
            rule,
            values: widths.iter().map(values).collect::<Result<_, _>>()?,
            scales: widths.iter().map(scales).collect::<Result<_, _>>()?,
        })
    }

    pub fn outputs<T: Element>(&mut self) -> Outputs<'_, B, T> {
        let both = self.values.iter_mut().zip(&mut self.scales);
        let rule = self.rule;
        both.map(|(values, scales)| values.quantized(rule.by(scales)))
            .collect()
    }

    /// Compares every bit with what these f32 results become.
    pub fn check(&self, results: &[Matrix<B, f32>], what: &str) -> Result<(), Error> {
        let both = self.values.iter().zip(&self.scales);
        for ((values, scales), result) in both.zip(results) {
            let [_, n] = result.shape();
            let found = (values.to_vec()?, scales.to_vec()?);
            let expected = self.rule.expected(&result.to_vec()?, n);
            assert_same(found, expected, &format!("{what}, {:?}", self.rule));
        }
        Ok(())
    }
}

/// A product of one rank.
#[derive(Clone, Debug)]
pub struct Case {
    pub m: usize,
    /// N of each weight.
    pub widths: Vec<usize>,
    pub k: usize,
    pub gated: bool,
    /// True if there is neither a bias nor a function.
    pub plain: bool,
    pub residual: bool,
    /// True if both operands have scales of blocks.
    pub scaled: bool,
    pub config: Option<Config>,
}

impl Case {
    /// Compares every bit of quantised outputs with what the product's f32 results become.
    pub fn verify<B, T, W, V>(&self, group: &Group<B>, rule: Rule, seed: u64) -> Result<(), Error>
    where
        B: Tested,
        T: Element,
        W: WeightOf<T>,
        V: AddendOf<T>,
    {
        let &Case { m, k, .. } = self;
        let blocks = k.div_ceil(BLOCK);
        let a = group.upload(&normal::<T>(seed, m * k), m, k)?;
        let of_a = group.upload(&normal::<f32>(seed + 1, m * blocks), m, blocks)?;
        let weight = |(seed, &n): (u64, &usize)| {
            let rows = n.div_ceil(BLOCK);
            let values = group.upload(&normal::<W>(seed, n * k), n, k)?;
            let scales = group.upload(&normal::<f32>(seed + 9, rows * blocks), rows, blocks)?;
            Ok((values, scales))
        };
        let weights = (seed + 10..).zip(&self.widths).map(weight);
        let weights = weights.collect::<Result<Vec<_>, Error>>()?;
        let rows = || match self.scaled {
            true => a.scaled(Scales::blocks(&of_a)),
            false => Operand::from(&a),
        };
        let scaled = || -> Weights<'_, B, T> {
            let weights = weights.iter().map(|(values, scales)| match self.scaled {
                true => values.scaled(Scales::blocks(scales)),
                false => Operand::from(values),
            });
            weights.collect()
        };
        let all: usize = self.widths.iter().sum();
        let outputs = match self.gated {
            true => &self.widths[..1],
            false => &self.widths[..],
        };
        let bias = group.upload(&normal::<V>(seed + 30, all), 1, all)?;
        let n = outputs[0];
        let residual = group.upload(&normal::<V>(seed + 31, m * n), m, n)?;
        let mut operation = Matmul::new();
        if !self.plain {
            operation = operation.bias(&bias).activation(Activation::Silu);
        }
        if self.gated {
            operation = operation.gated();
        }
        if self.residual {
            operation = operation.residual(&residual);
        }
        if let Some(config) = self.config {
            operation = operation.config(config);
        }
        let results = outputs.iter().map(|&n| group.zeros::<f32>(m, n));
        let mut results = results.collect::<Result<Vec<_>, Error>>()?;
        let views: Outputs<_, T> = results.iter_mut().map(Matrix::view_mut).collect();
        operation.run(rows(), scaled(), views)?;
        let mut made = Made::new(group, rule, m, outputs)?;
        operation.run(rows(), scaled(), made.outputs())?;
        made.check(&results, &format!("{} {self:?}", T::DTYPE))
    }
}

/// Backends whose sums have the same bits whatever the output's type is run this.
pub fn quantized_products_have_the_bits_of_their_f32_results<B: Tested>(test: &str) {
    let narrow = Config::new(TileShape::new(16, 128, 64), Chunking::new(1), Route::Pull);
    let one = |n| Case {
        m: 5,
        widths: vec![n],
        k: 144,
        gated: false,
        plain: false,
        residual: true,
        scaled: false,
        config: None,
    };
    let cases = [
        one(16),
        one(400),
        Case {
            m: 130,
            config: Some(narrow),
            ..one(272)
        },
        Case {
            widths: vec![16, 400, 128],
            plain: true,
            residual: false,
            ..one(16)
        },
        Case {
            widths: vec![400; 2],
            gated: true,
            ..one(400)
        },
    ];
    alone::<B>(test, |group| {
        let all = cases
            .iter()
            .flat_map(|case| Rule::ALL.map(|rule| (case, rule)));
        // Tiles that a call gives have whole blocks.
        let by_default = cases.iter().filter(|case| case.config.is_none());
        let inside = by_default.flat_map(|case| Rule::INSIDE.map(|rule| (case, rule)));
        for (case, rule) in all.chain(inside) {
            let scaled = Case {
                scaled: true,
                ..case.clone()
            };
            case.verify::<B, bf16, bf16, bf16>(group, rule, 100)?;
            case.verify::<B, f16, f16, f16>(group, rule, 200)?;
            case.verify::<B, F8E4M3, F8E4M3, bf16>(group, rule, 300)?;
            scaled.verify::<B, F8E4M3, gemmesh::F8E5M2, bf16>(group, rule, 400)?;
        }
        Ok(())
    });
}

pub fn nan_and_large_results_are_quantised<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [4, 144, 16];
        let row = |x: f32| vec![bf16::from_f32(x); k];
        let rows = [row(f32::NAN), row(3e38), row(0.0), row(1.0)].concat();
        let a = group.upload(&rows, m, k)?;
        let b = group.upload(&normal::<bf16>(1, n * k), n, k)?;
        let given = |scale| Rule {
            scheme: Scheme::Given(scale),
            power_of_two: false,
        };
        for rule in Rule::ALL.into_iter().chain([given(1e-3), given(0.0)]) {
            let mut result = [group.zeros::<f32>(m, n)?];
            Matmul::new().run(&a, &b, &mut result[0])?;
            let mut made = Made::new(group, rule, m, &[n])?;
            Matmul::new().run(&a, &b, made.outputs())?;
            made.check(&result, "numbers")?;
        }
        Ok(())
    });
}

/// Gathers of fp8 rows with their scales, under delays that differ each time. `config`: how a gather of rows of depth `k` is
/// cut up, by its seed.
pub fn gathers_quantise_their_products<B: Tested>(
    test: &str,
    k: usize,
    config: impl Fn(&Group<B>, u64) -> Result<Config, Error>,
) {
    under_delays::<B>(test, 30, |group, seed| {
        gather(group, seed, k, config(group, seed)?)
    });
}

fn gather<B: Tested>(group: &Group<B>, seed: u64, k: usize, config: Config) -> Result<(), Error> {
    let [m, n] = [70, 272];
    let (blocks, columns) = (k.div_ceil(BLOCK), ShardedScales::<B>::columns_of_blocks(k));
    let rule = Rule::ALL[seed as usize % Rule::ALL.len()];
    let gated = seed % 2 == 1;
    let mut a = group.sharded::<F8E4M3>(m, k)?;
    let mut of_a = group.sharded::<f32>(m, columns)?;
    let (values, scales) = (normal(seed, m * k), normal(seed + 1, m * columns));
    let own = a.rows();
    let rows = &values[own.start * k..own.end * k];
    a.shard_mut().copy_from_host(rows)?;
    let rows = &scales[own.start * columns..own.end * columns];
    of_a.shard_mut().copy_from_host(rows)?;
    a.poison(nan())?;
    of_a.poison(f32::NAN)?;
    let a = a.scaled(ShardedScales::blocks(&of_a));

    let layers = (0..1 + u64::from(gated)).map(|number| {
        let rows = n.div_ceil(BLOCK);
        let values = group.upload(&normal::<F8E4M3>(seed + 2 + number, n * k), n, k)?;
        let scales = normal(seed + 4 + number, rows * blocks);
        Ok((values, group.upload(&scales, rows, blocks)?))
    });
    let layers = layers.collect::<Result<Vec<_>, Error>>()?;
    let weights = || -> Weights<'_, B, F8E4M3> {
        let layers = layers.iter();
        layers
            .map(|(values, scales)| values.scaled(Scales::blocks(scales)))
            .collect()
    };
    let mut operation = AllGatherMatmul::new().config(config);
    if gated {
        operation = operation.gated().activation(Activation::Silu);
    }
    let mut made = Made::new(group, rule, m, &[n])?;
    operation.run(a, weights(), made.outputs())?;
    let mut result = [group.zeros::<f32>(m, n)?];
    operation.run(a, weights(), &mut result[0])?;
    made.check(&result, &format!("seed {seed}, {config:?}"))
}

pub fn products_are_quantised_into_the_next_gathers_input<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let [m, n, k] = [20, 272, 48];
        let rows = normal::<bf16>(1, m * k);
        let b = group.upload(&normal::<bf16>(2, n * k), n, k)?;
        let mut next = group.sharded::<F8E4M3>(m, n)?;
        let columns = ShardedScales::<B>::columns_of_blocks(n);
        let mut scales = group.sharded::<f32>(m, columns)?;
        let own = next.rows();
        let a = group.upload(&rows[own.start * k..own.end * k], own.len(), k)?;
        let (to, of_to) = (next.shard_mut().view_mut()?, scales.shard_mut().view_mut()?);
        Matmul::new().run(&a, &b, to.quantized(of_to))?;
        gemmesh::all_gather(&next)?;
        gemmesh::all_gather(&scales)?;
        let mut result = group.zeros::<f32>(m, n)?;
        gemmesh::matmul(&group.upload(&rows, m, k)?, &b, &mut result)?;
        let expected = Rule::ALL[0].expected(&result.to_vec()?, n);
        let blocks = n.div_ceil(BLOCK);
        let scales = scales.to_vec()?;
        let found = scales
            .chunks(columns)
            .flat_map(|row| row[..blocks].to_vec());
        let found = (next.to_vec()?, found.collect());
        assert_same(found, expected, "gathered");
        Ok(String::new())
    }));
}

pub fn prepared_products_quantise_as_they_were_prepared<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, n, k] = [3, 144, 32];
        let a = group.upload(&normal::<f16>(1, m * k), m, k)?;
        let b = group.upload(&normal::<f16>(2, n * k), n, k)?;
        let mut result = [group.zeros::<f32>(m, n)?];
        gemmesh::matmul(&a, &b, &mut result[0])?;
        for rule in Rule::ALL {
            let operation = Matmul::new().quantization(rule.quantization());
            let prepared = operation.prepare((group, [m, k]), n)?;
            let mut made = Made::new(group, rule, m, &[n])?;
            prepared.run(&a, &b, made.outputs())?;
            made.check(&result, "prepared")?;
            let other = Rule {
                scheme: match rule.scheme {
                    Scheme::Blocks => Scheme::Transposed,
                    _ => Scheme::Blocks,
                },
                ..rule
            };
            let mut made = Made::new(group, other, m, &[n])?;
            match parts_of(&prepared.run(&a, &b, made.outputs())) {
                Some((_, Kind::Unsuitable { what, .. })) => {
                    assert_eq!(what, "the quantization of out");
                }
                other => panic!("{other:?}"),
            }
            match parts_of(&prepared.run(&a, &b, &mut group.zeros::<f16>(m, n)?)) {
                Some((_, Kind::Unsuitable { what, .. })) => assert_eq!(what, "the dtype of out"),
                other => panic!("{other:?}"),
            }
        }
        let rows = group.zeros::<F8E4M3>(m, k)?;
        let weight = group.zeros::<F8E4M3>(n, k)?;
        let plain = Matmul::new().output_dtype(gemmesh::DType::F8E4M3);
        let plain = plain.prepare((group, [m, k]), n)?;
        let mut made = Made::new(group, Rule::ALL[0], m, &[n])?;
        let result = plain.run(&rows, &weight, made.outputs());
        assert!(
            matches!(kind_of(&result), Some(Kind::Unsuitable { .. })),
            "{result:?}"
        );
        Ok(())
    });
}

pub fn what_products_cannot_quantise_is_refused<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, k] = [3, 16];
        let a = group.zeros::<bf16>(m, k)?;
        let run = |operation: Matmul<B, bf16>, n, rule: Rule| {
            let b = group.zeros::<bf16>(n, k)?;
            let mut made = Made::new(group, rule, m, &[n])?;
            operation.run(&a, &b, made.outputs())
        };
        let [blocks, .., given] = Rule::ALL;
        let words = "N of an output that is quantised must be a multiple of 16, not 24";
        unsupported(run(Matmul::new(), 24, blocks), words);
        unsupported(run(Matmul::new(), 24, given), words);
        let power = Rule {
            power_of_two: true,
            ..given
        };
        let words = "a scale that is given must not be rounded to a power of two";
        unsupported(run(Matmul::new(), 16, power), words);

        let b = group.zeros::<bf16>(144, k)?;
        let mut out = group.zeros::<F8E4M3>(m, 144)?;
        let mut wrong = group.zeros::<f32>(3, 3)?;
        for (rule, words) in [
            (blocks, "scales of out [M, ⌈N/128⌉]"),
            (Rule::ALL[2], "scales of out [⌈N/128⌉, M]"),
            (given, "scales of out [1, 1]"),
        ] {
            match parts_of(&Matmul::new().run(&a, &b, out.quantized(rule.by(&mut wrong)))) {
                Some((_, Kind::Shape { argument, .. })) => assert_eq!(argument, words),
                other => panic!("{other:?}"),
            }
        }
        let mut made = Made::new(group, blocks, m, &[144; 2])?;
        let [one, two] = &mut made.values[..] else {
            panic!("two outputs")
        };
        let [of_one, of_two] = &mut made.scales[..] else {
            panic!("two outputs")
        };
        let outputs: [QuantizedOutput<B>; 2] = [
            one.quantized(of_one),
            two.quantized(Quantized::blocks(of_two).power_of_two()),
        ];
        let result = Matmul::new().run(&a, [&b, &b], outputs);
        unsupported(result, "all outputs must be quantised alike");
        let mut made = Made::new(group, blocks, m, &[144])?;
        let result = MatmulReduceScatter::new().run(&a, &b, made.outputs());
        unsupported(result, "sums over ranks must not be quantised");
        let stored = Matmul::<B, bf16>::new().quantization(Quantization::blocks());
        let stored = stored.output_dtype(gemmesh::DType::Bf16);
        let result = stored.prepare((group, [m, k]), 16).map(drop);
        unsupported(result, "outputs that are quantised must be F8E4M3");
        let none = Matmul::<B, bf16>::new().output_dtype(gemmesh::DType::F8E4M3);
        let result = none.prepare((group, [m, k]), 16).map(drop);
        unsupported(result, "a product of bf16 cannot be stored as f8e4m3");
        Ok(())
    });
}

/// Backends that quantise tile by tile run this.
pub fn tiles_of_quantised_outputs_have_whole_blocks<B: Tested>(test: &str) {
    alone::<B>(test, |group| {
        let [m, k] = [3, 16];
        let a = group.zeros::<bf16>(m, k)?;
        let run = |columns, n, rule: Rule| {
            let tile = TileShape::new(16, columns, 16);
            let config = Config::new(tile, Chunking::new(1), Route::Pull);
            let b = group.zeros::<bf16>(n, k)?;
            let mut made = Made::new(group, rule, m, &[n])?;
            Matmul::new().config(config).run(&a, &b, made.outputs())
        };
        let [blocks, .., given] = Rule::ALL;
        let words = "tiles of an output that is quantised in blocks must have a multiple of 128 columns, or all";
        unsupported(run(64, 80, blocks), words);
        run(64, 64, blocks)?;
        run(64, 80, given)
    });
}

#[track_caller]
fn unsupported(result: Result<(), Error>, words: &str) {
    match parts_of(&result) {
        Some((_, Kind::Unsupported { what, .. })) => assert_eq!(what, words),
        other => panic!("{other:?}"),
    }
}
