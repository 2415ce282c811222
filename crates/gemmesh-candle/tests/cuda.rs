//! Layers on tensors of GPUs, two ranks that are processes, against float64.
//!
//! Without a GPU nothing is tested, unless GEMMESH_REQUIRE_GPU is set. Arguments choose tests by parts of their names.
//! Candle's own kernels are not used, so that a driver without them will do.
#![allow(unsafe_code)]

mod support;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::cuda::cudarc::driver::sys;
use candle_core::{
    CpuStorage, CudaStorage, Device, InplaceOp1, Layout, Module, Storage, Tensor,
    backend::BackendStorage,
};
use gemmesh::bf16;
use gemmesh::error::{Class, Kind};
use gemmesh_candle::{
    ColumnParallelLinear, Cuda, GatedParallelLinear, Group, QkvParallelLinear, RowParallelLinear,
    TensorParallel, gemmesh_error, launch,
};

use support::sentence;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Failure> = std::result::Result<T, E>;

const WORLD: usize = 2;
const CAPACITY: usize = 40;
/// Of steps: as many as there is room for, and a number that two ranks don't share evenly.
const TOKENS: [usize; 3] = [CAPACITY, 7, 33];
const N: usize = 48;
const K: usize = 64;

type Test = (&'static str, fn(&Rank) -> Result<()>);

/// The last one ends the group.
const TESTS: [Test; 11] = [
    ("column_parallel_layers", column_parallel_layers),
    ("several_weights", several_weights),
    ("gathered_tokens", gathered_tokens),
    ("row_parallel_layers", row_parallel_layers),
    ("sums", sums),
    ("weights_that_are_replaced", weights_that_are_replaced),
    (
        "weights_of_one_tensor_that_is_written",
        weights_of_one_tensor_that_is_written,
    ),
    ("streams_of_two_models", streams_of_two_models),
    (
        "tensors_that_are_written_late",
        tensors_that_are_written_late,
    ),
    ("refusals", refusals),
    ("what_one_rank_is_refused", what_one_rank_is_refused),
];

struct Rank {
    group: Group<Cuda>,
    ranks: TensorParallel,
    device: Device,
}

fn main() -> Result<()> {
    if !launch::is_rank() {
        return Ok(launch::launch(WORLD)?);
    }
    let group = match Group::<Cuda>::from_env() {
        Err(error)
            if error.kind().class() == Class::Device
                && std::env::var_os("GEMMESH_REQUIRE_GPU").is_none() =>
        {
            return Ok(());
        }
        group => group?,
    };
    let device = Device::new_cuda_with_stream(group.device_ordinal())?;
    let shared = Device::new_cuda(group.device_ordinal())?;
    let says = "on each thread's default stream";
    assert_says(TensorParallel::new(group.clone(), &shared, 1), says);
    assert_says(
        TensorParallel::new(group.clone(), &Device::Cpu, 1),
        "is the CPU and must be the group's GPU",
    );
    let ranks = TensorParallel::new(group.clone(), &device, CAPACITY)?;
    let rank = Rank {
        group,
        ranks,
        device,
    };
    let asked: Vec<String> = std::env::args()
        .skip(1)
        .filter(|name| !name.starts_with('-'))
        .collect();
    for (name, test) in TESTS {
        if asked.is_empty() || asked.iter().any(|asked| name.contains(asked)) {
            test(&rank)?;
            println!("rank {}: {name} ... ok", rank.ranks.rank());
        }
    }
    Ok(())
}

fn column_parallel_layers(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let weight = Matrix::random(1 + ranks.rank(), N, K);
    let bias = Matrix::random(3, 1, N);
    let layer = ColumnParallelLinear::new(ranks, weight.on(device)?, Some(bias.row_on(device)?))?;
    // The layer keeps what it needs.
    let scribble = Matrix::random(4, N, K).on(device)?;
    for (step, m) in TOKENS.into_iter().enumerate() {
        let x = Matrix::random(10 + step, m, K);
        let exact = x.times(&weight, Some(&bias));
        let own = ranks.set_tokens(m)?;
        let y = layer.forward(&x.rows(own.clone()).on(device)?)?;
        exact.check(&y)?;
        // Rows of a larger tensor; what they are part of is dropped before anything has run.
        let y = layer.forward(&x.on(device)?.narrow(0, own.start, own.len())?)?;
        exact.check(&y)?;
        exact.check(&layer.forward_replicated(&x.on(device)?)?)?;
        // Columns of a larger tensor.
        let wide = x.beside(&Matrix::random(5, m, 16)).on(device)?;
        let own = wide.narrow(0, own.start, own.len())?.narrow(1, 0, K)?;
        exact.check(&layer.forward(&own)?)?;
        exact.check(&layer.forward_replicated(&wide.narrow(1, 0, K)?)?)?;
    }
    drop(scribble);
    Ok(())
}

fn several_weights(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let weights = [N, 16, 24].map(|n| Matrix::random(n + ranks.rank(), n, K));
    let [q, k, v] = weights.each_ref().map(|weight| weight.on(device));
    let qkv = QkvParallelLinear::new(ranks, [q?, k?, v?], None)?;
    let [gate, up] = [7, 9].map(|seed| Matrix::random(seed + ranks.rank(), N, K));
    let gated = GatedParallelLinear::new(ranks, [gate.on(device)?, up.on(device)?], None)?;
    for (step, m) in TOKENS.into_iter().enumerate() {
        let x = Matrix::random(10 + step, m, K);
        let own = ranks.set_tokens(m)?;
        let own = x.rows(own).on(device)?;
        let all = x.on(device)?;
        for outputs in [qkv.forward(&own)?, qkv.forward_replicated(&all)?] {
            for (weight, y) in weights.iter().zip(&outputs) {
                x.times(weight, None).check(y)?;
            }
        }
        let exact = x.times(&gate, None).gated(&x.times(&up, None));
        exact.check(&gated.forward(&own)?)?;
        exact.check(&gated.forward_replicated(&all)?)?;
    }
    Ok(())
}

fn gathered_tokens(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    for (step, m) in TOKENS.into_iter().enumerate() {
        let x = Matrix::random(10 + step, m, K);
        let own = ranks.set_tokens(m)?;
        let all = ranks.all_gather(&x.rows(own).on(device)?)?;
        assert_eq!(values(&all)?, x.values);
    }
    Ok(())
}

fn row_parallel_layers(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let weight = Matrix::random(1, N, WORLD * K);
    let part = ranks.rank() * K..(ranks.rank() + 1) * K;
    let bias = Matrix::random(3, 1, N);
    let own_weight = weight.columns(part.clone()).on(device)?;
    let layer = RowParallelLinear::new(ranks, own_weight, Some(bias.row_on(device)?))?;
    for (step, m) in TOKENS.into_iter().enumerate() {
        let x = Matrix::random(10 + step, m, WORLD * K);
        let residual = Matrix::random(20 + step, m, N);
        let own = ranks.set_tokens(m)?;
        let exact = x.times(&weight, Some(&bias)).rounded_parts(&x, &weight);
        let added = exact.clone().plus(&residual);
        let x = x.columns(part.clone()).on(device)?;
        exact.rows(own.clone()).check(&layer.forward(&x)?)?;
        exact.check(&layer.forward_replicated(&x, None)?)?;
        let own_residual = residual.rows(own.clone()).on(device)?;
        added
            .rows(own)
            .check(&layer.forward_residual(&x, &own_residual)?)?;
        added.check(&layer.forward_replicated(&x, Some(&residual.on(device)?))?)?;
    }
    Ok(())
}

fn sums(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    for (step, m) in TOKENS.into_iter().enumerate() {
        let own = ranks.set_tokens(m)?;
        let addends = [0, 1].map(|rank| Matrix::random(100 * rank + step, m, N));
        let exact = Exact::of(&addends[0]).plus(&addends[1]);
        let addend = addends[ranks.rank()].on(device)?;
        exact.check(&ranks.all_reduce(&addend)?)?;
        exact.rows(own).check(&ranks.reduce_scatter(&addend)?)?;
    }
    Ok(())
}

/// Puts a copy in place of a tensor.
struct Replace(Tensor);
impl InplaceOp1 for Replace {
    fn name(&self) -> &'static str {
        "replace"
    }
    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("the tensor is on a GPU")
    }
    fn cuda_fwd(&self, replaced: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let (storage, layout) = self.0.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            candle_core::bail!("the tensor is on the CPU")
        };
        *replaced = storage.try_clone(layout)?;
        Ok(())
    }
}

/// In-place operations may put a tensor elsewhere.
fn weights_that_are_replaced(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let [before, after] = [1, 2].map(|seed| Matrix::random(seed + ranks.rank(), N, K));
    let biases = [3, 4].map(|seed| Matrix::random(seed, 1, N));
    let (weight, bias) = (before.on(device)?, biases[0].row_on(device)?);
    let layer = ColumnParallelLinear::new(ranks, weight.clone(), Some(bias.clone()))?;
    let x = Matrix::random(5, CAPACITY, K);
    let own = ranks.set_tokens(CAPACITY)?;
    let own = x.rows(own).on(device)?;
    x.times(&before, Some(&biases[0]))
        .check(&layer.forward(&own)?)?;
    weight.inplace_op1(&Replace(after.on(device)?))?;
    bias.inplace_op1(&Replace(biases[1].row_on(device)?))?;
    x.times(&after, Some(&biases[1]))
        .check(&layer.forward(&own)?)
}

/// They share a lock, for which another thread waits between any two of a call's.
fn weights_of_one_tensor_that_is_written(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let widths = [N, 16, 24];
    let all = Matrix::random(1 + ranks.rank(), widths.iter().sum(), K);
    let (packed, copy) = (all.on(device)?, all.on(device)?);
    let mut begin = 0;
    let [q, k, v] = widths.map(|n| {
        begin += n;
        packed.narrow(0, begin - n, n)
    });
    let layer = QkvParallelLinear::new(ranks, [q?, k?, v?], None)?;
    let x = Matrix::random(5, CAPACITY, K);
    let own = ranks.set_tokens(CAPACITY)?;
    let own = x.rows(own).on(device)?;
    let done = AtomicBool::new(false);
    let outputs = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                packed.inplace_op1(&Replace(copy.clone()))?;
            }
            Ok::<_, candle_core::Error>(())
        });
        let outputs: Vec<_> = (0..200).map(|_| layer.forward(&own)).collect();
        done.store(true, Ordering::Relaxed);
        writer.join().expect("the writer ends")?;
        outputs.into_iter().collect::<candle_core::Result<Vec<_>>>()
    })?;
    for outputs in [&outputs[0], &outputs[199]] {
        let mut begin = 0;
        for (n, y) in widths.into_iter().zip(outputs) {
            x.times(&all.rows(begin..begin + n), None).check(y)?;
            begin += n;
        }
    }
    Ok(())
}

/// A group has one stream at a time: each call goes on its own model's.
fn streams_of_two_models(rank: &Rank) -> Result<()> {
    let device = Device::new_cuda_with_stream(rank.group.device_ordinal())?;
    let other = TensorParallel::new(rank.group.clone(), &device, CAPACITY)?;
    let models = [(&rank.ranks, &rank.device), (&other, &device)];
    let weight = Matrix::random(1, N, K);
    let mut layers = Vec::new();
    for (ranks, device) in models {
        ranks.set_tokens(CAPACITY)?;
        layers.push(ColumnParallelLinear::new(ranks, weight.on(device)?, None)?);
    }
    for seed in 10..20 {
        let x = Matrix::random(seed, CAPACITY, K);
        let exact = x.times(&weight, None);
        let mut outputs = Vec::new();
        for (layer, (ranks, device)) in layers.iter().zip(models) {
            outputs.push(layer.forward(&x.rows(ranks.tokens()).on(device)?)?);
            outputs.push(ranks.all_gather(&x.rows(ranks.tokens()).on(device)?)?);
        }
        for outputs in outputs.chunks_exact(2) {
            exact.check(&outputs[0])?;
            assert_eq!(values(&outputs[1])?, x.values);
        }
    }
    Ok(())
}

/// Layers and collectives find what was put on candle's stream before them.
fn tensors_that_are_written_late(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    unsafe extern "C" fn sleep(_: *mut std::ffi::c_void) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let stream = device.as_cuda_device()?.cuda_stream();
    let weight = Matrix::random(1 + ranks.rank(), N, K);
    let layer = ColumnParallelLinear::new(ranks, weight.on(device)?, None)?;
    let own = ranks.set_tokens(CAPACITY)?;
    let written = Matrix::random(9, own.len(), K).on(device)?;
    for seed in 10..14 {
        let x = Matrix::random(seed, CAPACITY, K);
        let rows = x.rows(own.clone()).on(device)?;
        let null = std::ptr::null_mut();
        // SAFETY: the function reads nothing and makes no CUDA call.
        let paused = unsafe { sys::cuLaunchHostFunc(stream.cu_stream(), Some(sleep), null) };
        assert_eq!(paused, sys::CUresult::CUDA_SUCCESS);
        written.inplace_op1(&Replace(rows))?;
        x.times(&weight, None).check(&layer.forward(&written)?)?;
        assert_eq!(values(&ranks.all_gather(&written)?)?, x.values);
    }
    Ok(())
}

/// Alike on both ranks, so that no one waits.
fn refusals(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let layer = ColumnParallelLinear::new(ranks, Matrix::random(1, N, K).on(device)?, None)?;
    let own = ranks.set_tokens(CAPACITY)?;
    let x = Matrix::random(2, own.len(), K);
    let cpu = x.on(&Device::Cpu)?;
    assert_says(
        layer.forward(&cpu),
        "all_gather_matmul: the device of x [tokens of this rank, K] is the CPU",
    );
    let candle_core::DeviceLocation::Cuda { gpu_id } = device.location() else {
        unreachable!("the device is a GPU")
    };
    // Another stream, and one of another GPU where there is one.
    let of_other_gpu = Device::new_cuda_with_stream(gpu_id ^ 1).ok();
    let others = [Some(Device::new_cuda_with_stream(gpu_id)?), of_other_gpu];
    for other in others.into_iter().flatten() {
        assert_says(
            layer.forward(&x.on(&other)?),
            "is CUDA, of another GPU or stream",
        );
    }
    let narrow = Matrix::random(3, N, 60).on(device)?;
    assert_says(
        ColumnParallelLinear::new(ranks, narrow, None),
        "is 60 and must be a multiple of 8 on this backend",
    );
    let odd = Matrix::random(3, N - 4, K).on(device)?;
    let says = "is 44 and must be a multiple of 8 on this backend";
    assert_says(ColumnParallelLinear::new(ranks, odd.clone(), None), says);
    assert_says(RowParallelLinear::new(ranks, odd, None), says);
    let shifted = shifted(own.len(), device)?;
    assert_says(layer.forward_replicated(&shifted), "the address of");
    Ok(())
}

/// The other is told, and does not wait for the timeout.
fn what_one_rank_is_refused(Rank { ranks, device, .. }: &Rank) -> Result<()> {
    let layer = RowParallelLinear::new(ranks, Matrix::random(1, N, K).on(device)?, None)?;
    ranks.set_tokens(CAPACITY)?;
    let x = match ranks.rank() {
        1 => shifted(CAPACITY, device)?,
        _ => Matrix::random(2, CAPACITY, K).on(device)?,
    };
    let begin = Instant::now();
    let refused = layer.forward(&x).and_then(|_| ranks.synchronize());
    let error = refused.expect_err("it should be refused");
    let error = gemmesh_error(&error).ok_or("not gemmesh's")?;
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(1), Kind::Unsuitable { .. })
        ),
        "{error}"
    );
    assert!(begin.elapsed().as_secs() < 5, "waited for the timeout");
    if ranks.rank() == 1 {
        // It does not try again while the other waits.
        std::thread::sleep(Duration::from_secs(2));
    }
    Ok(())
}

/// [rows, K], at an address that is no multiple of 16 bytes.
fn shifted(rows: usize, device: &Device) -> Result<Tensor> {
    let larger = Matrix::random(4, rows + 1, K).on(device)?.flatten_all()?;
    Ok(larger.narrow(0, 4, rows * K)?.reshape((rows, K))?)
}

/// A matrix of the host's.
#[derive(Clone)]
struct Matrix {
    values: Vec<f64>,
    columns: usize,
}

impl Matrix {
    /// Uniform in -1..1 and rounded to bf16, the same for the same seed.
    fn random(seed: usize, rows: usize, columns: usize) -> Matrix {
        let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f64()
        };
        let values = std::iter::repeat_with(next).take(rows * columns).collect();
        Matrix { values, columns }
    }

    fn lines(&self) -> std::slice::ChunksExact<'_, f64> {
        self.values.chunks_exact(self.columns)
    }

    fn rows(&self, rows: Range<usize>) -> Matrix {
        let values = &self.values[rows.start * self.columns..rows.end * self.columns];
        Matrix {
            values: values.into(),
            columns: self.columns,
        }
    }

    fn columns(&self, columns: Range<usize>) -> Matrix {
        let values = self.lines().flat_map(|row| row[columns.clone()].to_vec());
        Matrix {
            values: values.collect(),
            columns: columns.len(),
        }
    }

    fn beside(&self, other: &Matrix) -> Matrix {
        let rows = self.lines().zip(other.lines());
        let values = rows.flat_map(|(left, right)| [left, right].concat());
        Matrix {
            values: values.collect(),
            columns: self.columns + other.columns,
        }
    }

    /// In bf16.
    fn on(&self, device: &Device) -> Result<Tensor> {
        let values: Vec<bf16> = self.values.iter().map(|&x| bf16::from_f64(x)).collect();
        let shape = (values.len() / self.columns, self.columns);
        Ok(Tensor::from_vec(values, shape, device)?)
    }

    fn row_on(&self, device: &Device) -> Result<Tensor> {
        Ok(self.on(device)?.squeeze(0)?)
    }

    /// `self · weightᵀ + bias`.
    fn times(&self, weight: &Matrix, bias: Option<&Matrix>) -> Exact {
        let (mut value, mut slack) = (Vec::new(), Vec::new());
        for row in self.lines() {
            for (n, column) in weight.lines().enumerate() {
                let bias = bias.map_or(0.0, |bias| bias.values[n]);
                let products = || row.iter().zip(column).map(|(x, y)| x * y);
                value.push(products().sum::<f64>() + bias);
                let magnitude = products().map(f64::abs).sum::<f64>() + bias.abs();
                slack.push((self.columns + 1) as f64 * V * magnitude);
            }
        }
        let columns = weight.lines().len();
        Exact {
            value: Matrix {
                values: value,
                columns,
            },
            slack: Matrix {
                values: slack,
                columns,
            },
        }
    }
}

/// The unit roundoffs of bf16 and f32.
const U: f64 = 1.0 / (1 << 8) as f64;
const V: f64 = 1.0 / (1 << 24) as f64;

/// What an output should be, and by how much it may differ before it is rounded.
#[derive(Clone)]
struct Exact {
    value: Matrix,
    slack: Matrix,
}

impl Exact {
    fn of(value: &Matrix) -> Exact {
        let slack = Matrix {
            values: vec![0.0; value.values.len()],
            columns: value.columns,
        };
        Exact {
            value: value.clone(),
            slack,
        }
    }

    fn plus(mut self, other: &Matrix) -> Exact {
        let all = self.value.values.iter_mut().zip(&mut self.slack.values);
        for ((value, slack), other) in all.zip(&other.values) {
            *value += other;
            *slack += V * value.abs();
        }
        self
    }

    /// Each rank's part of the sum is rounded before it is sent.
    fn rounded_parts(mut self, x: &Matrix, weight: &Matrix) -> Exact {
        for rank in 0..WORLD {
            let part = rank * K..(rank + 1) * K;
            let part = x.columns(part.clone()).times(&weight.columns(part), None);
            let parts = self.slack.values.iter_mut().zip(&part.value.values);
            parts.for_each(|(slack, part)| *slack += (U + WORLD as f64 * V) * part.abs());
        }
        self
    }

    /// `silu(self) * up`: silu's slope is less than 1.1, and it is itself exact to 2⁻¹⁹.
    fn gated(&self, up: &Exact) -> Exact {
        let mut gated = self.clone();
        for (i, value) in gated.value.values.iter_mut().enumerate() {
            let (gate, up, by_up) = (*value, up.value.values[i], up.slack.values[i]);
            let silu = gate / (1.0 + (-gate).exp());
            *value = silu * up;
            let slack = &mut gated.slack.values[i];
            let by_gate = 1.1 * *slack + gate.abs() / (1 << 19) as f64;
            *slack = by_gate * up.abs() + silu.abs() * by_up + 2.0 * V * value.abs();
        }
        gated
    }

    fn rows(&self, rows: Range<usize>) -> Exact {
        Exact {
            value: self.value.rows(rows.clone()),
            slack: self.slack.rows(rows),
        }
    }

    /// Every element; the first order counts twice for all but the last rounding.
    fn check(&self, found: &Tensor) -> Result<()> {
        assert_eq!(found.dims(), [self.value.lines().len(), self.value.columns]);
        let both = self.value.values.iter().zip(&self.slack.values);
        for (element, (found, (exact, slack))) in values(found)?.iter().zip(both).enumerate() {
            let tolerance = 2.0 * slack + U * exact.abs();
            assert!(
                (found - exact).abs() <= tolerance,
                "element {element} is {found} and should be {exact} ± {tolerance}"
            );
        }
        Ok(())
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    let values = tensor.flatten_all()?.to_vec1::<bf16>()?;
    Ok(values.iter().map(|x| x.to_f64()).collect())
}

/// An error of gemmesh's, in so many words, apart from the place of the call.
#[track_caller]
fn assert_says<T>(refused: candle_core::Result<T>, words: &str) {
    let sentence = sentence(&refused.err().expect("it should be refused"));
    assert!(sentence.contains(words), "{sentence}\nshould say: {words}");
}
