//! The rows of the CUDA backend's benchmark: gemmesh, and its peers NCCL and cuBLASLt through cudarc.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::time::Instant;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::{result as driver, sys as driver_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gemmesh::{Cuda, DType, Element, Error, Group, Prepared, Result};

use crate::common::{self, Case};

/// More than the L2 cache of any Hopper GPU holds.
const FLUSH_BYTES: usize = 256 << 20;
const WORKSPACE_BYTES: usize = 64 << 20;
/// Calls in a row whose time on the host is taken; few enough for the device's queues.
const CALLS: usize = 12;
/// Algorithms of cuBLASLt's choice that are tried; the fastest is its row.
const ALGORITHMS: usize = 8;

/// Median times in microseconds, the slowest rank counted in each run.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub cublaslt: f64,
    pub matmul: f64,
    pub nccl: f64,
    pub gather: f64,
    pub nccl_cublaslt: f64,
    pub sequential: f64,
    pub fused: f64,
    pub ideal: f64,
    /// What one of several fused calls in a row takes on the host, on the slowest rank.
    pub host: f64,
}

impl Times {
    pub fn rows(&self) -> [(&'static str, f64); 9] {
        [
            ("cuBLASLt alone", self.cublaslt),
            ("gemmesh matmul alone", self.matmul),
            ("NCCL gather alone", self.nccl),
            ("gemmesh gather alone", self.gather),
            ("NCCL + cuBLASLt", self.nccl_cublaslt),
            ("gemmesh gather then matmul", self.sequential),
            ("gemmesh fused", self.fused),
            ("ideal", self.ideal),
            ("host, a fused call", self.host),
        ]
    }
}

fn failed(what: &str) -> impl FnOnce(String) -> Error {
    move |reason| Error::System {
        rank: None,
        action: what.into(),
        reason,
    }
}

macro_rules! call {
    ($what:expr, $call:expr) => {
        $call.map_err(|e| failed($what)(format!("{e:?}")))
    };
}

/// A buffer of this benchmark's own.
struct Scratch(driver_sys::CUdeviceptr);

impl Scratch {
    fn new(bytes: usize) -> Result<Scratch> {
        // SAFETY: the context of the group's device is current.
        call!("allocate device memory", unsafe {
            driver::malloc_sync(bytes)
        })
        .map(Scratch)
    }

    fn ptr<T>(&self) -> *mut T {
        self.0 as *mut T
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the streams that used it have been waited for.
        let _ = unsafe { driver::free_sync(self.0) };
    }
}

/// One product by cuBLASLt: out[M, N] = a[M, K] · b[N, K]ᵀ, row-major, as out' = b' · a' in its column-major eyes.
struct Product {
    handle: lt_sys::cublasLtHandle_t,
    desc: lt_sys::cublasLtMatmulDesc_t,
    layouts: [lt_sys::cublasLtMatrixLayout_t; 3],
    algorithms: Vec<lt_sys::cublasLtMatmulAlgo_t>,
    chosen: usize,
    workspace: Scratch,
    a: *const c_void,
    b: *const c_void,
    out: *mut c_void,
}

impl Product {
    fn new<T: Element>(case: &Case<Cuda, T>, gathered: u64, out: &Scratch) -> Result<Product> {
        let [m, k] = case.a.shape();
        let n = case.b.shape()[0];
        let kind = match T::DTYPE {
            DType::F16 => lt_sys::cudaDataType::CUDA_R_16F,
            _ => lt_sys::cudaDataType::CUDA_R_16BF,
        };
        let what = "set up cuBLASLt";
        // SAFETY: handles are used as they were made; attributes are of the types that they name.
        unsafe {
            let handle = call!(what, lt::create_handle())?;
            let desc = call!(
                what,
                lt::create_matmul_desc(
                    lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    lt_sys::cudaDataType::CUDA_R_32F
                )
            )?;
            let transposed = 1i32;
            call!(
                what,
                lt::set_matmul_desc_attribute(
                    desc,
                    lt_sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                    (&raw const transposed).cast(),
                    size_of::<i32>(),
                )
            )?;
            let pitch = case.out.as_device_ptr().1 / size_of::<T>();
            let layouts = [
                call!(
                    what,
                    lt::create_matrix_layout(kind, k as u64, n as u64, k as i64)
                )?,
                call!(
                    what,
                    lt::create_matrix_layout(kind, k as u64, m as u64, k as i64)
                )?,
                call!(
                    what,
                    lt::create_matrix_layout(kind, n as u64, m as u64, pitch as i64)
                )?,
            ];
            let workspace = WORKSPACE_BYTES;
            let preference = call!(what, lt::create_matmul_pref())?;
            call!(
                what,
                lt::set_matmul_pref_attribute(
                    preference,
                    lt_sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                    (&raw const workspace).cast(),
                    size_of::<usize>(),
                )
            )?;
            let mut found: Vec<lt_sys::cublasLtMatmulHeuristicResult_t> =
                vec![std::mem::zeroed(); ALGORITHMS];
            let mut count = 0;
            let status = lt_sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                desc,
                layouts[0],
                layouts[1],
                layouts[2],
                layouts[2],
                preference,
                ALGORITHMS as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            call!(what, status.result())?;
            call!(what, lt::destroy_matmul_pref(preference))?;
            if count == 0 {
                return Err(failed(what)("it knows no algorithm".into()));
            }
            Ok(Product {
                handle,
                desc,
                layouts,
                algorithms: found[..count as usize].iter().map(|f| f.algo).collect(),
                chosen: 0,
                workspace: Scratch::new(WORKSPACE_BYTES)?,
                a: gathered as *const c_void,
                b: case.b.as_device_ptr().0 as *const c_void,
                out: out.ptr(),
            })
        }
    }

    fn run(&self, stream: driver_sys::CUstream) -> Result<()> {
        let (one, zero) = (1f32, 0f32);
        let [b, a, out] = self.layouts;
        // SAFETY: the matrices are as the layouts say and live as long as the benchmark.
        let result = unsafe {
            lt::matmul(
                self.handle,
                self.desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                self.b,
                b,
                self.a,
                a,
                self.out,
                out,
                self.out,
                out,
                &self.algorithms[self.chosen],
                self.workspace.ptr(),
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        call!("multiply with cuBLASLt", result)
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used no more.
        unsafe {
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
            let _ = lt::destroy_matmul_desc(self.desc);
            let _ = lt::destroy_handle(self.handle);
        }
    }
}

/// NCCL's view of the group.
struct Nccl(nccl_sys::ncclComm_t);

impl Nccl {
    fn new(group: &Group<Cuda>) -> Result<Nccl> {
        let what = "set up NCCL";
        let mut id = nccl_sys::ncclUniqueId { internal: [0; 128] };
        if group.rank() == 0 {
            id = call!(what, nccl::get_uniqueid())?;
        }
        let bytes = group.all_gather_bytes(&id.internal.map(|c| c as u8))?;
        for (to, from) in id.internal.iter_mut().zip(&bytes[0]) {
            *to = *from as std::ffi::c_char;
        }
        let mut comm = std::ptr::null_mut();
        let (rank, world) = (group.rank() as i32, group.world_size() as i32);
        // SAFETY: writes the local; every rank makes the same call.
        call!(what, unsafe {
            nccl::comm_init_rank(&mut comm, world, id, rank)
        })?;
        Ok(Nccl(comm))
    }

    fn gather(
        &self,
        shard: u64,
        all: u64,
        bytes: usize,
        stream: driver_sys::CUstream,
    ) -> Result<()> {
        // SAFETY: `shard` holds `bytes` bytes, `all` as many for each rank.
        let result = unsafe {
            nccl::all_gather(
                shard as *const c_void,
                all as *mut c_void,
                bytes,
                nccl_sys::ncclDataType_t::ncclInt8,
                self.0,
                stream.cast(),
            )
        };
        call!("gather with NCCL", result).map(drop)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: made by `new`, used no more.
        let _ = unsafe { nccl::comm_destroy(self.0) };
    }
}

/// Times all rows, alternating, `iterations` times after `warmup`; `progress` is called after each round.
pub fn measure<T: Element>(
    group: &Group<Cuda>,
    prepared: &Prepared<Cuda, T>,
    case: &mut Case<Cuda, T>,
    warmup: usize,
    iterations: usize,
    mut progress: impl FnMut(),
) -> Result<Times> {
    const ROWS: usize = 8;
    let [m, k] = case.a.shape();
    let shard_bytes = case.a.rows().len() * k * size_of::<T>();
    // NCCL gathers equal shards only; where the rows don't divide, each rank sends as many as the longest has.
    let longest = m.div_ceil(group.world_size()) * k * size_of::<T>();
    let shard = Scratch::new(longest)?;
    let gathered = Scratch::new(longest * group.world_size())?;
    let [m, n] = case.out.shape();
    let out = Scratch::new(m * n.next_multiple_of(8) * size_of::<T>())?;
    let flush = Scratch::new(FLUSH_BYTES)?;
    let stream: driver_sys::CUstream = group.stream().cast();
    let side = call!(
        "make a stream",
        driver::stream::create(driver::stream::StreamKind::NonBlocking)
    )?;
    let event = || {
        call!(
            "make an event",
            driver::event::create(driver_sys::CUevent_flags::CU_EVENT_DEFAULT)
        )
    };
    let (begin, end, joined) = (event()?, event()?, event()?);
    let mine = case.a.as_device_ptr() + (case.a.rows().start * k * size_of::<T>()) as u64;
    // SAFETY: both hold a shard.
    call!("copy a shard", unsafe {
        driver::memcpy_dtod_sync(shard.0, mine, shard_bytes)
    })?;
    // The products of cuBLASLt read what a gather has brought, like gemmesh's own.
    prepared.gather(&case.a)?;
    group.synchronize()?;
    // SAFETY: both hold M rows.
    call!("copy the matrix", unsafe {
        driver::memcpy_dtod_sync(gathered.0, case.a.as_device_ptr(), m * k * size_of::<T>())
    })?;
    let mut product = Product::new(case, gathered.0, &out)?;
    let nccl = Nccl::new(group)?;

    // Flushes the L2 cache and aligns the ranks, on the device.
    let prepare = || -> Result<()> {
        // SAFETY: the buffer is as long.
        call!("flush the cache", unsafe {
            driver::memset_d8_async(flush.0, 0, FLUSH_BYTES, stream)
        })?;
        gemmesh::testing::align_streams(group)
    };
    let record = |event, stream| {
        // SAFETY: both live.
        call!("record an event", unsafe {
            driver::event::record(event, stream)
        })
    };
    let wait = |stream, event| {
        // SAFETY: both live.
        call!("wait for an event", unsafe {
            driver::stream::wait_event(
                stream,
                event,
                driver_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
            )
        })
    };
    let elapsed = || -> Result<f64> {
        group.synchronize()?;
        // SAFETY: both have been recorded, and passed.
        call!("read the time", unsafe {
            driver::event::elapsed(begin, end)
        })
        .map(|millis| f64::from(millis) * 1e3)
    };

    let mut best = (f64::INFINITY, 0);
    for algorithm in 0..product.algorithms.len() {
        product.chosen = algorithm;
        let mut times = Vec::new();
        for _ in 0..4 {
            prepare()?;
            record(begin, stream)?;
            product.run(stream)?;
            record(end, stream)?;
            times.push(elapsed()?);
        }
        let fastest = times.into_iter().fold(f64::INFINITY, f64::min);
        if fastest < best.0 {
            best = (fastest, algorithm);
        }
    }
    product.chosen = best.1;

    let mut samples: Vec<[f64; ROWS]> = Vec::new();
    for round in 0..warmup + iterations {
        let mut times = [0.0; ROWS];
        for (row, time) in times.iter_mut().enumerate() {
            prepare()?;
            record(begin, stream)?;
            let Case { a, b, out, .. } = &mut *case;
            match row {
                0 => product.run(stream)?,
                1 => prepared.matmul(a, b, out)?,
                2 => nccl.gather(shard.0, gathered.0, longest, stream)?,
                3 => prepared.gather(a)?,
                4 => {
                    nccl.gather(shard.0, gathered.0, longest, stream)?;
                    product.run(stream)?;
                }
                5 => {
                    prepared.gather(a)?;
                    prepared.matmul(a, b, out)?;
                }
                6 => prepared.run(a, b, out)?,
                _ => {
                    wait(side, begin)?;
                    product.run(side)?;
                    record(joined, side)?;
                    prepared.gather(a)?;
                    wait(stream, joined)?;
                }
            }
            record(end, stream)?;
            *time = elapsed()?;
        }
        if round >= warmup {
            samples.push(times);
        }
        progress();
    }
    // What the host spends on a call, when calls follow one another.
    let mut host = Vec::new();
    for _ in 0..iterations.min(5) {
        prepare()?;
        let begin = Instant::now();
        for _ in 0..CALLS {
            prepared.run(&case.a, &case.b, &mut case.out)?;
        }
        host.push([begin.elapsed().as_secs_f64() * 1e6 / CALLS as f64]);
        group.synchronize()?;
    }
    // SAFETY: made above, used no more: every row has been waited for.
    unsafe {
        let _ = driver::stream::destroy(side);
        for event in [begin, end, joined] {
            let _ = driver::event::destroy(event);
        }
    }
    let medians = common::medians(group, &samples)?;
    let [
        cublaslt,
        matmul,
        nccl,
        gather,
        nccl_cublaslt,
        sequential,
        fused,
        ideal,
    ] = medians;
    let [host] = common::medians(group, &host)?;
    Ok(Times {
        cublaslt,
        matmul,
        nccl,
        gather,
        nccl_cublaslt,
        sequential,
        fused,
        ideal,
        host,
    })
}
