//! Kernels of a different library that overlap with gemmesh's communication. cuBLASLt multiplies rows while more rows
//! are gathered, and makes partial sums while earlier ones are sent. It runs in bf16 and in fp8, directly and from a
//! CUDA graph. Each result is compared with float64.
//!
//! ```sh
//! cargo run --release --features cuda --example pipelines
//! ```
//!
//! It launches two ranks if no launcher has started it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::process::ExitCode;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::{result as driver, sys};
use gemmesh::elements::Value;
use gemmesh::pipelines::{all_gather_and_consume, produce_and_reduce_scatter};
use gemmesh::{Cuda, F8E4M3, Group, Matrix, bf16, launch};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const M: usize = 2048;
const N: usize = 1024;
const K: usize = 2048;
/// The scale of an fp8 matrix: its numbers are multiplied by this.
const SCALE: f32 = 0.25;
/// How often a graph is launched.
const REPLAYS: usize = 10;

fn main() -> ExitCode {
    let result = match launch::is_rank() {
        false => launch::launch(2).map_err(Into::into),
        true => run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome {
    let group = Group::<Cuda>::from_env()?;
    // cuBLASLt works in the current context, which is made the group's.
    let mut context = std::ptr::null_mut();
    // SAFETY: the group lives, so its stream does, and the context lives as long.
    unsafe {
        sys::cuStreamGetCtx(group.stream().cast(), &mut context).result()?;
        driver::ctx::set_current(context)?;
    }
    consume::<bf16>(&group)?;
    consume::<F8E4M3>(&group)?;
    produce::<bf16>(&group)?;
    produce::<F8E4M3>(&group)
}

/// out[M, N] = gather(a)[M, K] · b[N, K]ᵀ
fn consume<T: Operand>(group: &Group<Cuda>) -> Outcome {
    // The same on every rank, so that each can check its output.
    let (all, weight) = (random::<T>(1, M * K), random::<T>(2, N * K));
    let mut a = group.sharded::<T>(M, K)?;
    let own = a.rows();
    a.shard_mut()
        .copy_from_host(&all[own.start * K..own.end * K])?;
    let b = group.upload(&weight, N, K)?;
    let mut out = group.zeros::<bf16>(M, N)?;
    let multiply = Multiply::<T>::new(group)?;

    let pipeline = |out: &mut Matrix<Cuda, bf16>| {
        let mut calls = 0;
        all_gather_and_consume(&a, |chunk| {
            let (ptr, pitch) = out.as_device_ptr();
            let rows = chunk.rows();
            let to = (ptr + (rows.start * pitch) as u64, pitch / 2);
            let from = (chunk.as_device_ptr(), K);
            calls += 1;
            multiply.rows(calls % 2, chunk.stream(), from, &b, to, rows.len())
        })
    };
    let expected = |row: usize, column: usize| dot(&all, &weight, row, column);
    check::<T>(group, "consumed", &mut out, 0..M, pipeline, expected)
}

/// out = the rows of this rank of Σ_p a_p[M, K_p] · b_p[N, K_p]ᵀ
fn produce<T: Operand>(group: &Group<Cuda>) -> Outcome {
    let world = group.world_size();
    let a = |rank: usize| random::<T>(10 + rank as u64, M * K);
    let b = |rank: usize| random::<T>(20 + rank as u64, N * K);
    let own = group.upload(&a(group.rank()), M, K)?;
    let weight = group.upload(&b(group.rank()), N, K)?;
    let rows = M * group.rank() / world..M * (group.rank() + 1) / world;
    let mut out = group.zeros::<bf16>(rows.len(), N)?;
    let multiply = Multiply::<T>::new(group)?;

    let (ptr, pitch) = own.as_device_ptr();
    let pipeline = |out: &mut Matrix<Cuda, bf16>| {
        let mut calls = 0;
        produce_and_reduce_scatter(M, out, |block| {
            let rows = block.rows();
            let from = (ptr + (rows.start * pitch) as u64, pitch / size_of::<T>());
            let to = (block.as_device_ptr(), block.pitch());
            calls += 1;
            multiply.rows(calls % 2, block.stream(), from, &weight, to, rows.len())
        })
    };
    let parts: Vec<_> = (0..world).map(|rank| (a(rank), b(rank))).collect();
    let expected = |row: usize, column: usize| {
        let parts = parts.iter();
        parts.map(|(a, b)| dot(a, b, row, column)).sum()
    };
    check::<T>(group, "produced", &mut out, rows, pipeline, expected)
}

/// Runs `pipeline` directly and from a graph, and compares its output with these rows of the expected result.
fn check<T: Operand>(
    group: &Group<Cuda>,
    what: &str,
    out: &mut Matrix<Cuda, bf16>,
    rows: Range<usize>,
    mut pipeline: impl FnMut(&mut Matrix<Cuda, bf16>) -> gemmesh::Result<()>,
    expected: impl Fn(usize, usize) -> f64,
) -> Outcome {
    /// Elements that are compared.
    const SAMPLES: usize = 2000;
    let poison = vec![bf16::NAN; rows.len() * N];
    let mut random = StdRng::seed_from_u64(group.rank() as u64);
    let mut compare = |out: &Matrix<Cuda, bf16>, how: &str| -> Outcome {
        let found = out.to_vec()?;
        let (mut worst, mut largest) = (0.0f64, 0.0f64);
        for _ in 0..SAMPLES {
            let (row, column) = (
                random.random_range(0..rows.len()),
                random.random_range(0..N),
            );
            let expected = expected(rows.start + row, column);
            let error = (found[row * N + column].to_f64() - expected).abs();
            // NaN is kept.
            worst = if error > worst || error.is_nan() {
                error
            } else {
                worst
            };
            largest = largest.max(expected.abs());
        }
        let is_allowed = worst <= ALLOWED * largest;
        if !is_allowed {
            return Err(format!("{what} in {}, {how}: {worst} off", T::NAME).into());
        }
        if group.rank() == 0 {
            println!(
                "{what} in {}, {how}: off by {:.1e} at most",
                T::NAME,
                worst / largest
            );
        }
        Ok(())
    };

    out.copy_from_host(&poison)?;
    pipeline(out)?;
    compare(out, "at once")?;

    let graph = Graph::capture(group, || pipeline(out))?;
    out.copy_from_host(&poison)?;
    for _ in 0..REPLAYS {
        graph.launch()?;
    }
    compare(out, "from a graph")?;
    // A rank that ends ends its group.
    Ok(group.barrier()?)
}

/// The allowed error, relative to the largest expected number. Partial sums are rounded to bf16, and so is their sum.
const ALLOWED: f64 = 1.0 / 128.0;

/// Captured work of a group's stream, to be replayed.
struct Graph {
    executable: sys::CUgraphExec,
    stream: sys::CUstream,
}

impl Graph {
    fn capture(group: &Group<Cuda>, put: impl FnOnce() -> gemmesh::Result<()>) -> Outcome<Graph> {
        let stream: sys::CUstream = group.stream().cast();
        let relaxed = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives as long as the group, and the calls write the locals.
        unsafe {
            sys::cuStreamBeginCapture_v2(stream, relaxed).result()?;
            let put = put();
            sys::cuStreamEndCapture(stream, &mut graph).result()?;
            put?;
            sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result()?;
            sys::cuGraphDestroy(graph).result()?;
        }
        Ok(Graph { executable, stream })
    }

    fn launch(&self) -> Outcome {
        // SAFETY: both live, and so does all that was captured.
        unsafe { sys::cuGraphLaunch(self.executable, self.stream).result()? };
        Ok(())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`. The driver keeps it until it has run.
        let _ = unsafe { sys::cuGraphExecDestroy(self.executable) };
    }
}

/// Products by cuBLASLt.
struct Multiply<T: Operand> {
    handle: lt_sys::cublasLtHandle_t,
    /// One for each of the two streams.
    workspaces: [Matrix<Cuda, u8>; 2],
    /// The scale, which is the same for both operands.
    scale: Matrix<Cuda, f32>,
    operands: std::marker::PhantomData<T>,
}

const WORKSPACE_BYTES: usize = 32 << 20;

impl<T: Operand> Multiply<T> {
    fn new(group: &Group<Cuda>) -> Outcome<Self> {
        let workspace = || group.zeros::<u8>(WORKSPACE_BYTES >> 10, 1 << 10);
        Ok(Multiply {
            handle: lt::create_handle()?,
            workspaces: [workspace()?, workspace()?],
            scale: group.upload(&[SCALE], 1, 1)?,
            operands: std::marker::PhantomData,
        })
    }

    /// out[rows, N] = a[rows, K] · b[N, K]ᵀ on `stream`, which is the one for calls of this parity. Matrices are
    /// addresses, and pitches are elements from row to row.
    fn rows(
        &self,
        parity: usize,
        stream: *mut c_void,
        a: (u64, usize),
        b: &Matrix<Cuda, T>,
        out: (u64, usize),
        rows: usize,
    ) -> Outcome {
        let [n, k] = b.shape();
        let (b, b_pitch) = b.as_device_ptr();
        let (one, zero) = (1f32, 0f32);
        let (workspace, _) = self.workspaces[parity].as_device_ptr();
        let desc = self.describe()?;
        // Row-major out is column-major out' = b' · a'.
        let layout = |kind, rows: usize, columns: usize, pitch: usize| {
            lt::create_matrix_layout(kind, rows as u64, columns as u64, pitch as i64)
        };
        let of_b = layout(T::KIND, k, n, b_pitch / size_of::<T>())?;
        let of_a = layout(T::KIND, k, rows, a.1)?;
        let of_out = layout(lt_sys::cudaDataType::CUDA_R_16BF, n, rows, out.1)?;
        let best = self.choose(desc, [of_b, of_a, of_out])?;
        // SAFETY: handles are used as they were made, and destroyed once. The memory holds matrices of these shapes,
        // and lives until the streams have passed.
        unsafe {
            lt::matmul(
                self.handle,
                desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                b as *const c_void,
                of_b,
                a.0 as *const c_void,
                of_a,
                out.0 as *const c_void,
                of_out,
                out.0 as *mut c_void,
                of_out,
                &raw const best.algo,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )?;
            for layout in [of_a, of_b, of_out] {
                lt::destroy_matrix_layout(layout)?;
            }
            lt::destroy_matmul_desc(desc)?;
        }
        Ok(())
    }

    /// A product in f32 whose first operand is transposed. Operands of fp8 are scaled.
    fn describe(&self) -> Outcome<lt_sys::cublasLtMatmulDesc_t> {
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        let desc = lt::create_matmul_desc(
            lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt_sys::cudaDataType::CUDA_R_32F,
        )?;
        // SAFETY: attributes have the types that they name.
        let set = |attribute, value: *const c_void, bytes| unsafe {
            lt::set_matmul_desc_attribute(desc, attribute, value, bytes)
        };
        let transposed = 1i32;
        let transa = Attribute::CUBLASLT_MATMUL_DESC_TRANSA;
        set(transa, (&raw const transposed).cast(), size_of::<i32>())?;
        if T::IS_SCALED {
            let (scale, _) = self.scale.as_device_ptr();
            for of in [
                Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
            ] {
                set(of, (&raw const scale).cast(), size_of::<u64>())?;
            }
        }
        Ok(desc)
    }

    /// The algorithm that cuBLASLt ranks first.
    fn choose(
        &self,
        desc: lt_sys::cublasLtMatmulDesc_t,
        [b, a, out]: [lt_sys::cublasLtMatrixLayout_t; 3],
    ) -> Outcome<lt_sys::cublasLtMatmulHeuristicResult_t> {
        use lt_sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let workspace_bytes = WORKSPACE_BYTES;
        let preference = lt::create_matmul_pref()?;
        // SAFETY: handles are used as they were made, and destroyed once. The attribute has the type that it names.
        unsafe {
            lt::set_matmul_pref_attribute(
                preference,
                Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace_bytes).cast(),
                size_of::<usize>(),
            )?;
            let best =
                lt::get_matmul_algo_heuristic(self.handle, desc, b, a, out, out, preference)?;
            lt::destroy_matmul_pref(preference)?;
            Ok(best)
        }
    }
}

impl<T: Operand> Drop for Multiply<T> {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used again.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// An element type that cuBLASLt multiplies.
trait Operand: Value {
    const NAME: &'static str;
    const KIND: lt_sys::cudaDataType;
    const IS_SCALED: bool;
    fn random(random: &mut StdRng) -> Self;
    fn to_f64(self) -> f64;
}

impl Operand for bf16 {
    const NAME: &'static str = "bf16";
    const KIND: lt_sys::cudaDataType = lt_sys::cudaDataType::CUDA_R_16BF;
    const IS_SCALED: bool = false;

    fn random(random: &mut StdRng) -> bf16 {
        bf16::from_f32(random.random_range(-1.0..1.0))
    }

    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
}

impl Operand for F8E4M3 {
    const NAME: &'static str = "fp8";
    const KIND: lt_sys::cudaDataType = lt_sys::cudaDataType::CUDA_R_8F_E4M3;
    const IS_SCALED: bool = true;

    /// From 1/16 to 3.75, of any sign.
    fn random(random: &mut StdRng) -> F8E4M3 {
        let sign = random.random_range(0..2u8) << 7;
        let exponent = random.random_range(3..9u8) << 3;
        F8E4M3::from_bits(sign | exponent | random.random_range(0..8u8))
    }

    fn to_f64(self) -> f64 {
        f64::from(SCALE) * F8E4M3::to_f64(&self)
    }
}

fn random<T: Operand>(seed: u64, count: usize) -> Vec<T> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| T::random(&mut random)).collect()
}

fn dot<T: Operand>(a: &[T], b: &[T], row: usize, column: usize) -> f64 {
    let (a, b) = (&a[row * K..(row + 1) * K], &b[column * K..(column + 1) * K]);
    a.iter().zip(b).map(|(x, y)| x.to_f64() * y.to_f64()).sum()
}
