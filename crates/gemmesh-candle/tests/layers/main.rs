//! Layers on tensors of the CPU, by ranks that are threads, against candle's own linear layer with the whole weight in
//! f64.

#[path = "../support/mod.rs"]
mod support;

mod exact;
mod fp8;
mod load;

use candle_core::{DType, Device, Module, Tensor};
use gemmesh_candle::{
    ColumnParallelLinear, GatedParallelLinear, Group, Host, QkvParallelLinear, RowParallelLinear,
    TensorParallel,
};

use crate::exact::{CAPACITY, DTYPES, Exact, Failure, Result, V, each, random, wide};

/// Of steps: as many as there is room for, a number that no world shares evenly, one, none, and again more.
const TOKENS: [usize; 5] = [CAPACITY, 7, 1, 0, 22];

#[test]
fn column_parallel_layers_equal_candles_linear() -> Result<(), Failure> {
    let (n, k) = (48, 40);
    for (dtype, u) in DTYPES {
        let weight = random(1, (n, k), dtype)?;
        let bias = random(2, n, dtype)?;
        for bias in [None, Some(bias)] {
            each(|ranks| {
                let layer = ColumnParallelLinear::from_whole(ranks, &weight, bias.as_ref())?;
                for (step, m) in TOKENS.into_iter().enumerate() {
                    let x = random(10 + step, (m, k), dtype)?;
                    let exact = Exact::new(&x, &weight, bias.as_ref())?;
                    let exact = exact.columns(ranks)?;
                    let own = ranks.set_tokens(m)?;
                    let own = x.narrow(0, own.start, own.len())?;
                    exact.check(&layer.forward(&own)?, u)?;
                    exact.check(&layer.forward(&own.unsqueeze(0)?)?.squeeze(0)?, u)?;
                    exact.check(&layer.forward_replicated(&x)?, u)?;
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn queries_keys_and_values_of_different_widths_are_three_tensors_of_one_gather()
-> Result<(), Failure> {
    let (widths, k) = ([32, 16, 16], 24);
    let (dtype, u) = DTYPES[0];
    let weights = [
        random(1, (widths[0], k), dtype)?,
        random(2, (widths[1], k), dtype)?,
        random(3, (widths[2], k), dtype)?,
    ];
    let biases = [
        random(4, widths[0], dtype)?,
        random(5, widths[1], dtype)?,
        random(6, widths[2], dtype)?,
    ];
    for with_bias in [false, true] {
        each(|ranks| {
            let bias = with_bias.then(|| biases.each_ref());
            let layer = QkvParallelLinear::from_whole(ranks, [8, 4], weights.each_ref(), bias)?;
            for (step, m) in TOKENS.into_iter().enumerate() {
                let x = random(10 + step, (m, k), dtype)?;
                let own = ranks.set_tokens(m)?;
                let gathered = layer.forward(&x.narrow(0, own.start, own.len())?)?;
                let replicated = layer.forward_replicated(&x)?;
                for part in 0..3 {
                    let exact = Exact::new(&x, &weights[part], bias.map(|bias| bias[part]))?;
                    let exact = exact.columns(ranks)?;
                    exact.check(&gathered[part], u)?;
                    exact.check(&replicated[part], u)?;
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn ranks_have_whole_heads_and_share_those_of_keys_that_are_fewer_than_they() -> Result<(), Failure>
{
    const HEAD: usize = 8;
    let (dtype, k) = (DTYPES[0].0, 16);
    for [heads, kv_heads] in [[8, 1], [8, 2], [4, 2], [4, 4], [8, 8]] {
        // Each output of a head is the head's number.
        let of = |count: usize, first: usize| -> Result<Tensor> {
            let value = |row: usize| (first + row / HEAD) as f32 / k as f32;
            let rows = (0..count * HEAD).flat_map(|row| std::iter::repeat_n(value(row), k));
            Tensor::from_iter(rows, &Device::Cpu)?
                .reshape((count * HEAD, k))?
                .to_dtype(dtype)
        };
        let weights = [of(heads, 0)?, of(kv_heads, 16)?, of(kv_heads, 32)?];
        let bias = |heads: usize| Tensor::zeros(heads * HEAD, dtype, &Device::Cpu);
        let biases = [bias(heads)?, bias(kv_heads)?, bias(kv_heads)?];
        each(|ranks| {
            let (rank, world) = (ranks.rank(), ranks.world_size());
            let layer = QkvParallelLinear::from_whole(
                ranks,
                [heads, kv_heads],
                weights.each_ref(),
                Some(biases.each_ref()),
            )?;
            let x = Tensor::ones((1, k), dtype, &Device::Cpu)?;
            let [q, keys, values] = layer.forward_replicated(&x)?.map(|x| wide(&x));
            let heads_of = |elements: Result<Vec<f64>>, first: usize| -> Result<Vec<usize>> {
                let elements = elements?;
                let chunks = elements.chunks(HEAD);
                let heads = chunks.map(|head| {
                    assert!(head.iter().all(|&x| x == head[0]), "half a head");
                    head[0] as usize - first
                });
                Ok(heads.collect())
            };
            let q = heads_of(q, 0)?;
            assert_eq!(
                q,
                Vec::from_iter(heads / world * rank..heads / world * (rank + 1))
            );
            // Those that these queries go with.
            let mut needed: Vec<usize> = q.iter().map(|q| q / (heads / kv_heads)).collect();
            needed.dedup();
            assert_eq!(heads_of(keys, 16)?, needed);
            assert_eq!(heads_of(values, 32)?, needed);
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn threads_of_a_rank_have_results_of_their_own() -> Result<(), Failure> {
    const THREADS: usize = 3;
    let (n, k) = (48, 40);
    let dtype = DTYPES[0].0;
    let (weight, back) = (random(1, (n, k), dtype)?, random(2, (k, n), dtype)?);
    Group::<Host>::threads(1, |group| {
        let ranks = TensorParallel::new(group, &Device::Cpu, CAPACITY)?;
        let columns = ColumnParallelLinear::from_whole(&ranks, &weight, None)?;
        let rows = RowParallelLinear::from_whole(&ranks, &back, None)?;
        let outputs = |x: &Tensor| -> Result<[Vec<f64>; 5], Failure> {
            let y = columns.forward(x)?;
            let all = [
                rows.forward(&y)?,
                rows.forward_replicated(&y, None)?,
                ranks.all_gather(x)?,
                ranks.all_reduce(x)?,
                y,
            ];
            let [a, b, c, d, e] = all.map(|out| wide(&out));
            Ok([a?, b?, c?, d?, e?])
        };
        let calls = |thread: usize| -> Result<(), Failure> {
            let x = random(10 + thread, (CAPACITY, k), dtype)?;
            let expected = outputs(&x)?;
            for _ in 0..50 {
                assert!(outputs(&x)? == expected, "another thread's rows");
            }
            Ok(())
        };
        let calls = &calls;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| scope.spawn(move || calls(thread)))
                .collect();
            threads.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    })
    .map(drop)
}

#[test]
fn a_rank_without_tokens_takes_views_of_none() -> Result<(), Failure> {
    let (n, k) = (16, 48);
    let (dtype, u) = DTYPES[0];
    let weight = random(1, (n, k), dtype)?;
    let wide_weight = random(2, (k, n), dtype)?;
    each(|ranks| {
        let layer = ColumnParallelLinear::from_whole(ranks, &weight, None)?;
        let rows = RowParallelLinear::from_whole(ranks, &wide_weight, None)?;
        let packed = random(3, (1, 3 * k), dtype)?;
        let own = ranks.set_tokens(1)?;
        // As one of three parts of what another layer has made, of tokens that this rank may have none of.
        let part = packed.narrow(0, own.start, own.len())?.narrow(1, k, k)?;
        let exact = Exact::new(&packed.narrow(1, k, k)?.contiguous()?, &weight, None)?;
        let out = layer.forward(&part)?;
        exact.columns(ranks)?.check(&out, u)?;
        let empty = Tensor::zeros((0, 3 * k), dtype, &Device::Cpu)?.narrow(1, k, k)?;
        assert_eq!(
            layer.forward_replicated(&empty)?.dims(),
            [0, n / ranks.world_size()]
        );
        ranks.set_tokens(0)?;
        assert_eq!(layer.forward(&empty)?.dims(), [0, n / ranks.world_size()]);
        // Without rows, strides say nothing.
        let transposed = Tensor::zeros((k, 0), dtype, &Device::Cpu)?.t()?;
        assert_eq!(
            layer.forward(&transposed)?.dims(),
            [0, n / ranks.world_size()]
        );
        let part = n / ranks.world_size();
        let none = Tensor::zeros((0, 3 * part), dtype, &Device::Cpu)?.narrow(1, part, part)?;
        let residual = Tensor::zeros((0, 2 * k), dtype, &Device::Cpu)?.narrow(1, k, k)?;
        assert_eq!(rows.forward_residual(&none, &residual)?.dims(), [0, k]);
        assert_eq!(
            rows.forward_replicated(&none, Some(&residual))?.dims(),
            [0, k]
        );
        assert_eq!(ranks.all_gather(&empty)?.dims(), [0, k]);
        assert_eq!(ranks.reduce_scatter(&empty)?.dims(), [0, k]);
        assert_eq!(ranks.all_reduce(&empty)?.dims(), [0, k]);
        let none = vec![0; ranks.world_size() * ranks.world_size()];
        assert_eq!(ranks.all_to_all(&empty, &none)?.dims(), [0, k]);
        Ok(())
    })
}

#[test]
fn gated_layers_equal_candles_linears_and_silu() -> Result<(), Failure> {
    let (n, k) = (32, 40);
    for (dtype, u) in DTYPES {
        let [gate, up] = [random(1, (n, k), dtype)?, random(2, (n, k), dtype)?];
        let [gate_bias, up_bias] = [random(3, n, dtype)?, random(4, n, dtype)?];
        for with_bias in [false, true] {
            each(|ranks| {
                let bias = with_bias.then_some([&gate_bias, &up_bias]);
                let layer = GatedParallelLinear::from_whole(ranks, [&gate, &up], bias)?;
                for (step, m) in TOKENS.into_iter().enumerate() {
                    let x = random(10 + step, (m, k), dtype)?;
                    let [gate_bias, up_bias] = bias.map_or([None; 2], |bias| bias.map(Some));
                    let gate = Exact::new(&x, &gate, gate_bias)?.columns(ranks)?;
                    let up = Exact::new(&x, &up, up_bias)?.columns(ranks)?;
                    let exact = gate.gated(&up)?;
                    let own = ranks.set_tokens(m)?;
                    exact.check(&layer.forward(&x.narrow(0, own.start, own.len())?)?, u)?;
                    exact.check(&layer.forward_replicated(&x)?, u)?;
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn row_parallel_layers_equal_candles_linear() -> Result<(), Failure> {
    let (n, k) = (24, 64);
    for (dtype, u) in DTYPES {
        let weight = random(1, (n, k), dtype)?;
        let bias = random(2, n, dtype)?;
        for bias in [None, Some(bias)] {
            each(|ranks| {
                let layer = RowParallelLinear::from_whole(ranks, &weight, bias.as_ref())?;
                for (step, m) in TOKENS.into_iter().enumerate() {
                    let x = random(10 + step, (m, k), dtype)?;
                    let residual = random(20 + step, (m, n), dtype)?;
                    let own = ranks.set_tokens(m)?;
                    let part = ranks.shard(&x, 1)?;
                    let exact = Exact::new(&x, &weight, bias.as_ref())?;
                    let exact = exact.partials(&x, &weight, ranks.world_size(), u)?;
                    let added = exact.plus(&residual)?;
                    let rows = |tensor: &Tensor| tensor.narrow(0, own.start, own.len());
                    exact.rows(&own)?.check(&layer.forward(&part)?, u)?;
                    exact.check(&layer.forward_replicated(&part, None)?, u)?;
                    let sums = layer.forward_residual(&part, &rows(&residual)?)?;
                    added.rows(&own)?.check(&sums, u)?;
                    added.check(&layer.forward_replicated(&part, Some(&residual))?, u)?;
                    // Columns of a larger tensor are operands as they are.
                    let columns = x.narrow(1, ranks.rank() * part.dim(1)?, part.dim(1)?)?;
                    exact.rows(&own)?.check(&layer.forward(&columns)?, u)?;
                }
                Ok(())
            })?;
        }
    }
    Ok(())
}

#[test]
fn tokens_come_to_the_ranks_that_are_counted_and_back() -> Result<(), Failure> {
    let n = 16;
    for (dtype, _) in DTYPES {
        each(|ranks| {
            let (rank, world) = (ranks.rank(), ranks.world_size());
            let of_pair = |from: usize, to: usize| (2 * from + to) % 3;
            let pairs = |from: usize| (0..world).map(move |to| (from, to));
            let all = || (0..world).flat_map(pairs);
            let counts: Vec<usize> = all().map(|(from, to)| of_pair(from, to)).collect();
            let sent = |from: usize| pairs(from).map(|(from, to)| of_pair(from, to)).sum();
            let x = |from: usize| random(from + 1, (sent(from), n), dtype);
            let received = ranks.all_to_all(&x(rank)?, &counts)?;
            let mut blocks = Vec::new();
            for from in 0..world {
                let first = (0..rank).map(|to| of_pair(from, to)).sum();
                blocks.push(x(from)?.narrow(0, first, of_pair(from, rank))?);
            }
            assert_eq!(wide(&received)?, wide(&Tensor::cat(&blocks, 0)?)?);
            let back: Vec<usize> = all().map(|(from, to)| of_pair(to, from)).collect();
            let returned = ranks.all_to_all(&received, &back)?;
            assert_eq!(wide(&returned)?, wide(&x(rank)?)?);
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn collectives_gather_and_add_up_the_tokens_of_a_step() -> Result<(), Failure> {
    let n = 16;
    for (dtype, u) in DTYPES {
        each(|ranks| {
            for (step, m) in TOKENS.into_iter().enumerate() {
                let own = ranks.set_tokens(m)?;
                let x = random(step, (m, n), dtype)?;
                let gathered = ranks.all_gather(&x.narrow(0, own.start, own.len())?)?;
                assert_eq!(wide(&gathered)?, wide(&x)?);

                let addend = |rank: usize| random(100 * (rank + 1) + step, (m, n), dtype);
                let addends: Vec<Tensor> =
                    (0..ranks.world_size()).map(addend).collect::<Result<_>>()?;
                let exact: Vec<Tensor> = addends
                    .iter()
                    .map(|x| x.to_dtype(DType::F64))
                    .collect::<Result<_>>()?;
                let stacked = Tensor::stack(&exact, 0)?;
                let exact = Exact {
                    value: stacked.sum(0)?,
                    slack: (stacked.abs()?.sum(0)? * (ranks.world_size() as f64 * V))?,
                };
                let addend = &addends[ranks.rank()];
                exact.check(&ranks.all_reduce(addend)?, u)?;
                exact.rows(&own)?.check(&ranks.reduce_scatter(addend)?, u)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
