//! Layers of fp8 with scales of blocks, against candle's own linear layer with the same numbers in f64.

use std::collections::HashMap;

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::{Backend, VarBuilderArgs};
use gemmesh_candle::{
    ColumnParallelLinear, GatedParallelLinear, Group, Hints, Host, QkvParallelLinear,
    RowParallelLinear, TensorParallel, Weight,
};

use crate::exact::{CAPACITY, Exact, Failure, Result, V, each, random, wide};
use crate::load::File;
use crate::support::sentence;

const BLOCK: usize = 128;
/// The unit roundoff of bf16.
const U: f64 = 1.0 / (1 << 8) as f64;
/// Of the groups of [`each`].
const MOST_RANKS: usize = 4;
const TOKENS: [usize; 4] = [CAPACITY, 7, 1, 0];

/// A weight of fp8, as tensors of a checkpoint and as the numbers that they mean.
struct Fp8 {
    values: Tensor,
    scales: Tensor,
    /// In f64.
    exact: Tensor,
}

impl Fp8 {
    /// Random numbers whose blocks have scales of their own.
    fn new(seed: usize, (n, k): (usize, usize)) -> Result<Fp8> {
        let (rows, columns) = (n.div_ceil(BLOCK), k.div_ceil(BLOCK));
        let values = (random(seed, (n, k), DType::F32)? * 448.0)?.to_dtype(DType::F8E4M3)?;
        // Powers of two, so that a value is exact in f32.
        let scale = |block: usize| 2f32.powi(-9 - ((block + seed) % 4) as i32);
        let scales = Tensor::from_iter((0..rows * columns).map(scale), &Device::Cpu)?;
        let scales = scales.reshape((rows, columns))?;
        let spread = |scales: &Tensor, dim: usize, size: usize| {
            let numbers = Tensor::arange(0u32, size as u32, &Device::Cpu)?;
            let blocks = (numbers.to_dtype(DType::F64)? / BLOCK as f64)?.floor()?;
            scales.index_select(&blocks.to_dtype(DType::U32)?, dim)
        };
        let of_values = spread(&spread(&scales, 0, n)?, 1, k)?;
        let numbers = values.to_dtype(DType::F32)?;
        let exact = (numbers * of_values)?.to_dtype(DType::F64)?;
        Ok(Fp8 {
            values,
            scales,
            exact,
        })
    }

    fn weight(&self) -> Weight {
        Weight::blocks(self.values.clone(), self.scales.clone())
    }
}

/// Tokens of so many columns. Either fp8 holds them exactly, as whole numbers of which each block, and each part of one, has
/// a 7: its scale is 7 / 448 = 2⁻⁶. Or they are any.
fn tokens(seed: usize, (m, k): (usize, usize), exact: bool) -> Result<Tensor> {
    let any = random(seed, (m, k), DType::F32)?;
    if !exact {
        return any.to_dtype(DType::BF16);
    }
    let whole = (any * 7.0)?.round()?.flatten_all()?.to_vec1::<f32>()?;
    let whole = whole
        .into_iter()
        .enumerate()
        .map(|(index, x)| if index % k % 16 == 0 { 7.0 } else { x });
    let whole = Tensor::from_iter(whole, &Device::Cpu)?.reshape((m, k))?;
    whole.to_dtype(DType::BF16)
}

/// What a layer of fp8 should say, and by how much it may differ.
///
/// A number of a block is off by a part of 2⁻⁴ at most, or, among the smallest, by half of fp8's smallest number, 2⁻¹⁰,
/// times the block's scale. Its inverse and the product are rounded in f32. Sums are f32 with a multiplication for
/// each block, and each rank's part of K may begin with a part of one. `Exact::check` counts this twice.
fn exact(x: &Tensor, weight: &Fp8, bias: Option<&Tensor>, is_exact: bool) -> Result<Exact> {
    let mut exact = Exact::new(x, &weight.exact, bias)?;
    // A block's product of scales, its multiplication, and its addition.
    let blocks = (x.dim(1)?.div_ceil(BLOCK) + MOST_RANKS) as f64;
    let magnitudes = Exact::new(&x.abs()?, &weight.exact.abs()?, None)?.value;
    exact.slack = (exact.slack + (&magnitudes * ((3.0 * blocks + 4.0) * V))?)?;
    if is_exact {
        return Ok(exact);
    }
    let by_part = (&magnitudes / 16.0)?;
    let mut slack = (exact.slack + by_part)?;
    let (x, k) = (x.to_dtype(DType::F64)?, x.dim(1)?);
    for first in (0..k).step_by(BLOCK) {
        let width = BLOCK.min(k - first);
        let amax = x.narrow(1, first, width)?.abs()?;
        if amax.elem_count() == 0 {
            continue;
        }
        let scale = (amax.max_keepdim(1)?.clamp(1e-4, f64::MAX)? / 448.0)?;
        let smallest = (scale / 1024.0)?;
        let weights = weight.exact.narrow(1, first, width)?.abs()?.sum(1)?;
        slack = (slack + smallest.matmul(&weights.unsqueeze(0)?)?)?;
    }
    Ok(Exact { slack, ..exact })
}

#[test]
fn column_parallel_layers_equal_candles_linear() -> Result<(), Failure> {
    let (n, k) = (192, 272);
    let weight = Fp8::new(1, (n, k))?;
    let bias = random(2, n, DType::BF16)?;
    for bias in [None, Some(bias)] {
        each(|ranks| {
            // Of four ranks, the second and the last have parts that begin inside a block.
            let layer = ColumnParallelLinear::from_whole(ranks, weight.weight(), bias.as_ref())?;
            for (step, m) in TOKENS.into_iter().enumerate() {
                let is_exact = step % 2 == 0;
                let x = tokens(10 + step, (m, k), is_exact)?;
                let exact = exact(&x, &weight, bias.as_ref(), is_exact)?.columns(ranks)?;
                let own = ranks.set_tokens(m)?;
                let own = x.narrow(0, own.start, own.len())?;
                exact.check(&layer.forward(&own)?, U)?;
                exact.check(&layer.forward(&own.unsqueeze(0)?)?.squeeze(0)?, U)?;
                exact.check(&layer.forward_replicated(&x)?, U)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn queries_keys_and_values_are_of_whole_heads() -> Result<(), Failure> {
    let (heads, head, k) = ([8, 2], 16, 144);
    let of = |seed, heads: usize| Fp8::new(seed, (heads * head, k));
    let weights = [of(1, heads[0])?, of(2, heads[1])?, of(3, heads[1])?];
    each(|ranks| {
        let whole = weights.each_ref().map(Fp8::weight);
        let layer = QkvParallelLinear::from_whole(ranks, heads, whole, None)?;
        let own_heads = ranks.heads(heads[0], heads[1])?;
        for is_exact in [true, false] {
            let m = 9;
            let x = tokens(5, (m, k), is_exact)?;
            let own = ranks.set_tokens(m)?;
            let spread = layer.forward(&x.narrow(0, own.start, own.len())?)?;
            let replicated = layer.forward_replicated(&x)?;
            for (number, weight) in weights.iter().enumerate() {
                let heads = &own_heads[number.min(1)];
                let columns = heads.start * head..heads.end * head;
                let exact = exact(&x, weight, None, is_exact)?.of_columns(&columns)?;
                exact.check(&spread[number], U)?;
                exact.check(&replicated[number], U)?;
            }
        }
        Ok(())
    })
}

#[test]
fn gated_layers_equal_candles_linears_and_silu() -> Result<(), Failure> {
    let (n, k) = (192, 256);
    let [gate, up] = [Fp8::new(1, (n, k))?, Fp8::new(2, (n, k))?];
    each(|ranks| {
        let layer = GatedParallelLinear::from_whole(ranks, [gate.weight(), up.weight()], None)?;
        for (step, m) in TOKENS.into_iter().enumerate() {
            let is_exact = step % 2 == 0;
            let x = tokens(10 + step, (m, k), is_exact)?;
            let gate = exact(&x, &gate, None, is_exact)?.columns(ranks)?;
            let up = exact(&x, &up, None, is_exact)?.columns(ranks)?;
            // Both factors may be off.
            let both = Exact {
                value: gate.value.zeros_like()?,
                slack: (&gate.slack * &up.slack)?,
            };
            let mut exact = gate.gated(&up)?;
            exact.slack = (exact.slack + (both.slack * 2.2)?)?;
            let own = ranks.set_tokens(m)?;
            exact.check(&layer.forward(&x.narrow(0, own.start, own.len())?)?, U)?;
            exact.check(&layer.forward_replicated(&x)?, U)?;
        }
        Ok(())
    })
}

#[test]
fn row_parallel_layers_equal_candles_linear() -> Result<(), Failure> {
    // Four ranks have 128, 64, 192 or 320 columns each. Most of these parts begin inside a block.
    [512, 256, 768, 1280]
        .into_iter()
        .try_for_each(row_parallel_layers_equal)
}

fn row_parallel_layers_equal(k: usize) -> Result<(), Failure> {
    let n = 48;
    let weight = Fp8::new(1, (n, k))?;
    let bias = random(2, n, DType::BF16)?;
    each(|ranks| {
        let layer = RowParallelLinear::from_whole(ranks, weight.weight(), Some(&bias))?;
        for (step, m) in TOKENS.into_iter().enumerate() {
            let is_exact = step % 2 == 0;
            let x = tokens(10 + step, (m, k), is_exact)?;
            let residual = random(20 + step, (m, n), DType::BF16)?;
            let own = ranks.set_tokens(m)?;
            let part = ranks.shard(&x, 1)?;
            let exact = exact(&x, &weight, Some(&bias), is_exact)?;
            let world = ranks.world_size();
            let exact = exact.partials(&x, &weight.exact, world, U)?;
            let added = exact.plus(&residual)?;
            let own_residual = residual.narrow(0, own.start, own.len())?;
            exact.rows(&own)?.check(&layer.forward(&part)?, U)?;
            exact.check(&layer.forward_replicated(&part, None)?, U)?;
            let sums = layer.forward_residual(&part, &own_residual)?;
            added.rows(&own)?.check(&sums, U)?;
            added.check(&layer.forward_replicated(&part, Some(&residual))?, U)?;
        }
        Ok(())
    })
}

/// Layers of one checkpoint.
struct Layers {
    up: ColumnParallelLinear,
    down: RowParallelLinear,
    gate_up: GatedParallelLinear,
    qkv: QkvParallelLinear,
}

const MODEL: usize = 128;
/// Of which four ranks have parts of 192, which begin inside blocks.
const HIDDEN: usize = 768;
const HEAD: usize = 64;

impl Layers {
    fn load<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        vb: VarBuilderArgs<B>,
    ) -> Result<Layers> {
        let vb = vb.to_dtype(DType::F8E4M3);
        let (up, down) = (vb.pp("up"), vb.pp("down"));
        let (gate_up, qkv) = (
            [up.clone(), up.clone()],
            [up.clone(), up.clone(), up.clone()],
        );
        let heads = [HIDDEN / HEAD; 2];
        Ok(Layers {
            up: ColumnParallelLinear::load(ranks, MODEL, HIDDEN, true, up)?,
            down: RowParallelLinear::load(ranks, HIDDEN, MODEL, true, down)?,
            gate_up: GatedParallelLinear::load(ranks, MODEL, HIDDEN, true, gate_up)?,
            qkv: QkvParallelLinear::load(ranks, MODEL, heads, HEAD, true, qkv)?,
        })
    }

    /// The same layers, of whole tensors.
    fn whole(ranks: &TensorParallel, tensors: &HashMap<String, Tensor>) -> Result<Layers> {
        let weight = |name: &str| {
            let tensor = |part: &str| tensors[&format!("model.{name}.{part}")].clone();
            (
                Weight::blocks(tensor("weight"), tensor("weight_scale_inv")),
                tensor("bias"),
            )
        };
        let ((up, up_bias), (down, down_bias)) = (weight("up"), weight("down"));
        let heads = [HIDDEN / HEAD; 2];
        Ok(Layers {
            up: ColumnParallelLinear::from_whole(ranks, &up, Some(&up_bias))?,
            down: RowParallelLinear::from_whole(ranks, &down, Some(&down_bias))?,
            gate_up: GatedParallelLinear::from_whole(ranks, [&up; 2], Some([&up_bias; 2]))?,
            qkv: QkvParallelLinear::from_whole(ranks, heads, [&up; 3], Some([&up_bias; 3]))?,
        })
    }

    /// What they make of some tokens.
    fn outputs(&self, ranks: &TensorParallel) -> Result<Vec<Vec<f64>>> {
        let m = 5;
        ranks.set_tokens(m)?;
        let (x, h) = (
            tokens(1, (m, MODEL), false)?,
            tokens(2, (m, HIDDEN), false)?,
        );
        let [q, keys, values] = self.qkv.forward_replicated(&x)?;
        let outputs = [
            self.up.forward_replicated(&x)?,
            self.down.forward(&ranks.shard(&h, 1)?)?,
            self.gate_up.forward_replicated(&x)?,
            q,
            keys,
            values,
        ];
        outputs.iter().map(wide).collect()
    }
}

#[test]
fn layers_read_from_a_checkpoint_are_those_of_its_tensors() -> Result<(), Failure> {
    let mut tensors = HashMap::new();
    for (seed, (name, shape)) in [("up", (HIDDEN, MODEL)), ("down", (MODEL, HIDDEN))]
        .into_iter()
        .enumerate()
    {
        let Fp8 { values, scales, .. } = Fp8::new(seed, shape)?;
        let bias = random(seed + 10, shape.0, DType::BF16)?;
        let parts = [
            ("weight", values),
            ("weight_scale_inv", scales),
            ("bias", bias),
        ];
        tensors.extend(parts.map(|(part, tensor)| (format!("model.{name}.{part}"), tensor)));
    }
    let file = File::new(&tensors)?;
    each(|ranks| {
        let expected = Layers::whole(ranks, &tensors)?.outputs(ranks)?;
        // A model's other tensors are BF16.
        let read = Layers::load(ranks, file.sharded(DType::BF16)?)?;
        assert_eq!(read.outputs(ranks)?, expected);
        let plain = VarBuilder::from_tensors(tensors.clone(), DType::BF16, &Device::Cpu);
        let read = Layers::load(ranks, plain.pp("model"))?;
        assert_eq!(read.outputs(ranks)?, expected);
        Ok(())
    })
}

#[test]
fn a_weight_that_is_quantised_is_near_what_it_was() -> Result<(), Failure> {
    let (n, k) = (144, 272);
    let weight = random(1, (n, k), DType::F32)?;
    let quantized = Weight::quantized(&weight)?;
    Group::<Host>::threads(1, |group| {
        let ranks = TensorParallel::new(group, &Device::Cpu, CAPACITY)?;
        let layer = ColumnParallelLinear::from_whole(&ranks, &quantized, None)?;
        // A row of one 7 and zeros, which fp8 holds exactly, picks a column.
        for column in [0, 127, 128, 271] {
            let picks = (0..k).map(|index| if index == column { 7f32 } else { 0.0 });
            let x = Tensor::from_iter(picks, &Device::Cpu)?.reshape((1, k))?;
            let found = layer.forward_replicated(&x.to_dtype(DType::BF16)?)?;
            let of_column = weight.narrow(1, column, 1)?.flatten_all()?;
            for (found, w) in wide(&found)?.into_iter().zip(wide(&of_column)?) {
                // By 2⁻⁴, or by half of the smallest number; then by bf16's rounding.
                let tolerance = (w.abs() / 16.0 + 1.0 / 448.0 / 1024.0) * (1.0 + U) + U * w.abs();
                assert!(
                    (found / 7.0 - w).abs() <= tolerance,
                    "{} for {w}",
                    found / 7.0
                );
            }
        }
        Ok::<_, Failure>(())
    })
    .map(drop)
}

/// What this rank is told of a layer that cannot be made.
#[track_caller]
fn assert_says<L>(ranks: &TensorParallel, made: Result<L>, said: &str) -> Result<(), Failure> {
    let error = made.err().expect("a layer that cannot be made");
    assert_eq!(
        sentence(&error),
        format!("rank {}: a parallel layer: {said}", ranks.rank())
    );
    Ok(ranks.barrier()?)
}

#[test]
fn weights_that_do_not_fit_are_refused_when_the_layer_is_made() -> Result<(), Failure> {
    Group::<Host>::threads(2, |group| {
        let ranks = &TensorParallel::new(group, &Device::Cpu, CAPACITY)?;
        let Fp8 { values, scales, .. } = Fp8::new(1, (32, 256))?;

        let made = ColumnParallelLinear::new(ranks, values.clone(), None);
        let said = "the number of scales of weight [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉] is 0 and must \
        be 1, as the weight is \
                    F8E4M3 (Weight::blocks)";
        assert_says(ranks, made, said)?;

        let half = Weight::blocks(values.to_dtype(DType::BF16)?, scales.clone());
        let made = ColumnParallelLinear::new(ranks, half, None);
        let said = "the dtype of a weight with scales of weight [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉] is \
        BF16 and must be \
                    F8E4M3";
        assert_says(ranks, made, said)?;

        let other = Weight::blocks(values.clone(), scales.narrow(1, 0, 1)?);
        let made = RowParallelLinear::new(ranks, other, None);
        let said = "scales of weight [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉] is [1, 1] and must be [1, 2]";
        assert_says(ranks, made, said)?;

        let weight = Weight::blocks(values.clone(), scales.clone());
        let made = ColumnParallelLinear::new(ranks, weight.clone().first_row(8), None);
        let said = "the first row of a weight in its first block must be a multiple of 16, not 8";
        assert_says(ranks, made, said)?;
        let made = RowParallelLinear::new(ranks, weight.clone().first_row(8), None);
        assert_says(ranks, made, said)?;
        for first in [128, usize::MAX] {
            let said = format!(
                "[first row, first column] of a weight in its first block is [{first}, 0] and must be below 128"
            );
            let inside = weight.clone().first_row(first);
            let made = ColumnParallelLinear::new(ranks, &inside, None);
            assert_says(ranks, made, &said)?;
            let made = RowParallelLinear::new(ranks, &inside, None);
            assert_says(ranks, made, &said)?;
            let made = ColumnParallelLinear::from_whole(ranks, &inside, None);
            assert_says(ranks, made, &said)?;
            let said = said.replace(&format!("[{first}, 0]"), &format!("[0, {first}]"));
            let made = RowParallelLinear::from_whole(ranks, weight.clone().first_column(first), None);
            assert_says(ranks, made, &said)?;
        }
        let half = Weight::from(values.to_dtype(DType::BF16)?);
        for (inside, first) in [
            (half.clone().first_row(64), [64, 0]),
            (half.first_column(64), [0, 64]),
        ] {
            let said = &format!(
                "[first row, first column] of a weight without scales in its first block is {first:?} and must be \
                 [0, 0]"
            );
            assert_says(ranks, ColumnParallelLinear::new(ranks, &inside, None), said)?;
            assert_says(ranks, RowParallelLinear::new(ranks, &inside, None), said)?;
            let made = ColumnParallelLinear::from_whole(ranks, &inside, None);
            assert_says(ranks, made, said)?;
            let made = RowParallelLinear::from_whole(ranks, &inside, None);
            assert_says(ranks, made, said)?;
        }

        let of_parts = Tensor::zeros((1, 3), DType::F32, &Device::Cpu)?;
        let inside = Weight::blocks(values.clone(), of_parts).first_column(16);
        let made = ColumnParallelLinear::new(ranks, inside, None);
        let said = "the first column of a weight in its first block must be that of a, 0, not 16, so that \
                    each part of K has one scale of either";
        assert_says(ranks, made, said)?;
        let made = RowParallelLinear::new(ranks, weight.clone().first_column(16), None);
        let said = "scales of weight [⌈(first row + N)/128⌉, ⌈(first column + K)/128⌉] is [1, 2] and must be [1, 3]";
        assert_says(ranks, made, said)?;
        // 136 columns of each rank.
        let Fp8 { values, scales, .. } = Fp8::new(1, (32, 272))?;
        let made = RowParallelLinear::from_whole(ranks, Weight::blocks(values, scales), None);
        let said = "K of fp8 must be a multiple of 16, not 136";
        assert_says(ranks, made, said)?;
        // 24 rows of each rank.
        let Fp8 { values, scales, .. } = Fp8::new(1, (48, 256))?;
        let made = ColumnParallelLinear::from_whole(ranks, Weight::blocks(values, scales), None);
        let said = "N of fp8 must be a multiple of 16, not 24";
        assert_says(ranks, made, said)?;
        Ok::<_, Failure>(())
    })
    .map(drop)
}
