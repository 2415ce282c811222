//! Products of fp8: their bits are those of plain loops, and their errors say what is wrong.

use gemmesh::{
    Activation, AddendOf, Element, Error, F8E4M3, F8E5M2, Group, Matmul, Matrix, Number, OutputOf,
    WeightLayout, WeightOf, bf16, f16,
};

use crate::support::numbers::normal;
use crate::support::tested::{Tested, all_done, connect, ranks};

/// Every so many of K are summed separately.
const PART: usize = 128;

/// A product of fp8 on one rank.
#[derive(Clone, Debug)]
struct Case {
    m: usize,
    /// N of each weight.
    widths: Vec<usize>,
    k: usize,
    bias: bool,
    residual: bool,
    activation: Activation,
    gated: bool,
    seed: u64,
}

/// One output of a product and what is added to it, in f32.
struct Added {
    bias: Option<Vec<f32>>,
    residual: Option<Vec<f32>>,
}

fn wide<T: Number>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// `a · bᵀ`, float by float.
fn product(a: &[f32], b: &[f32], k: usize) -> Vec<f32> {
    let mut all = Vec::new();
    for a in a.chunks_exact(k) {
        for b in b.chunks_exact(k) {
            let mut sum = 0.0f32;
            for begin in (0..k).step_by(PART) {
                let mut part = 0.0f32;
                for at in begin..k.min(begin + PART) {
                    // Products of fp8 are exact in f32.
                    part += a[at] * b[at];
                }
                sum += part;
            }
            all.push(sum);
        }
    }
    all
}

/// What follows the product: bias, activation, gate, residual.
fn finished(case: &Case, products: &[Vec<f32>], n: usize, added: &Added) -> Vec<f32> {
    let [gate, up @ ..] = products else {
        panic!("no product")
    };
    let bias = |index: usize, of: usize| {
        let bias = added.bias.as_ref();
        bias.map_or(0.0, |bias| bias[of * n + index % n])
    };
    let finish = |(index, &x): (usize, &f32)| {
        let mut x = x;
        if case.bias {
            x += bias(index, 0);
        }
        x = case.activation.apply(x);
        if let [up] = up {
            let mut up = up[index];
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
    let weights = case.widths.iter().enumerate();
    let weights = weights.map(|(number, n)| normal::<W>(seed + 1 + number as u64, n * k));
    let weights: Vec<Vec<W>> = weights.collect();
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
    let bound_a = group.upload(&a, m, k)?;
    let bound = weights.iter().zip(&case.widths);
    let bound = bound.map(|(values, &n)| group.upload(values, n, k));
    let bound = bound.collect::<Result<Vec<Matrix<B, W>>, Error>>()?;
    let out = case.widths[..outputs].iter().map(|&n| group.zeros(m, n));
    let mut out = out.collect::<Result<Vec<Matrix<B, O>>, Error>>()?;
    let views: gemmesh::Weights<_, T> = bound.iter().map(Matrix::view).collect();
    let views_mut: gemmesh::Outputs<_, T> = out.iter_mut().map(Matrix::view_mut).collect();
    operation.run(&bound_a, views, views_mut)?;

    let products = weights.iter().map(|b| product(&wide(&a), &wide(b), k));
    let products: Vec<Vec<f32>> = products.collect();
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
        assert_eq!(bits(&out.to_vec()?), bits(&expected), "{what:?} {case:?}");
        begin += n;
    }
    Ok(())
}

/// Runs a case with each pair of operands and each type of output.
fn verify_all<B: Tested>(group: &Group<B>, case: &Case) -> Result<(), Error> {
    macro_rules! outputs {
        ($($rows:ident $weights:ident),+) => {$(
            verify::<B, $rows, $weights, bf16, bf16>(group, case)?;
            verify::<B, $rows, $weights, f16, f16>(group, case)?;
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
                bias: false,
                residual: false,
                activation: Activation::Identity,
                gated: false,
                seed: seed as u64 * 10,
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
            for case in [plain, gated, added, several] {
                verify_all(group, &case)?;
            }
        }
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
    match result {
        Err(Error::Unsupported { what, .. }) => assert_eq!(what, words),
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
        let wrong = |result| match result {
            Err(Error::DType { argument, .. }) => argument,
            other => panic!("{other:?}"),
        };
        let bias = group.zeros::<f16>(1, 16)?;
        let result = Matmul::new()
            .bias(&bias)
            .run(&a, &b, &mut group.zeros::<bf16>(3, 16)?);
        assert_eq!(wrong(result), "bias");
        let residual = group.zeros::<f16>(3, 16)?;
        let operation = Matmul::new().residual(&residual);
        let result = operation.run(&a, &b, &mut group.zeros::<F8E4M3>(3, 16)?);
        assert_eq!(wrong(result), "residual");
        let prepared = Matmul::new().prepare(group, [3, 32], 16)?;
        let result = prepared.run(&a, &b, &mut group.zeros::<f32>(3, 16)?);
        assert_eq!(wrong(result), "out");
        let stored = Matmul::<B, F8E4M3>::new().output_dtype(gemmesh::DType::F8E5M2);
        let result = stored.prepare(group, [3, 32], 16).map(drop);
        unsupported(result, "a product of f8e4m3 cannot be stored as f8e5m2");
        Ok(())
    });
}
