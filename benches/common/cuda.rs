//! The rows of the CUDA backend's benchmark: gemmesh, and its peers NCCL and cuBLASLt through cudarc.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::time::Instant;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::{result as driver, sys as driver_sys};
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gemmesh::{
    AllGatherMatmul, Chunking, Config, Cuda, DType, Element, Error, Group, Prepared, Result, Route,
};

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
    /// The same, replayed from a CUDA graph; none where rows are pulled, for that can't be captured.
    pub graph: Option<f64>,
    /// cuBLASLt on one stream and plain copies on another, with nothing between them.
    pub ideal: f64,
    /// What one of several fused calls in a row takes on the host, on the slowest rank.
    pub host: f64,
}

impl Times {
    pub fn rows(&self) -> Vec<(&'static str, f64)> {
        let mut rows = vec![
            ("cuBLASLt alone", self.cublaslt),
            ("gemmesh matmul alone", self.matmul),
            ("NCCL gather alone", self.nccl),
            ("gemmesh gather alone", self.gather),
            ("NCCL + cuBLASLt", self.nccl_cublaslt),
            ("gemmesh gather then matmul", self.sequential),
            ("gemmesh fused", self.fused),
        ];
        rows.extend(self.graph.map(|graph| ("gemmesh fused, in a graph", graph)));
        rows.extend([("ideal", self.ideal), ("host, a fused call", self.host)]);
        rows
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

/// The starting line of every measurement, and the clock.
struct Course<'a> {
    group: &'a Group<Cuda>,
    stream: driver_sys::CUstream,
    begin: driver_sys::CUevent,
    end: driver_sys::CUevent,
    flush: Scratch,
}

impl<'a> Course<'a> {
    fn new(group: &'a Group<Cuda>) -> Result<Course<'a>> {
        Ok(Course {
            group,
            stream: group.stream().cast(),
            begin: event()?,
            end: event()?,
            flush: Scratch::new(FLUSH_BYTES)?,
        })
    }

    /// Flushes the L2 cache and aligns the ranks, on the device.
    fn prepare(&self) -> Result<()> {
        // SAFETY: the buffer is as long.
        call!("flush the cache", unsafe {
            driver::memset_d8_async(self.flush.0, 0, FLUSH_BYTES, self.stream)
        })?;
        gemmesh::testing::align_streams(self.group)
    }

    /// Microseconds on the device from the starting line to the end of what `run` puts on the stream.
    fn time(&self, run: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.prepare()?;
        record(self.begin, self.stream)?;
        run()?;
        record(self.end, self.stream)?;
        self.group.synchronize()?;
        // Also the peers', which the group knows nothing of.
        // SAFETY: the event lives.
        call!("wait for the end", unsafe {
            driver::event::synchronize(self.end)
        })?;
        // SAFETY: both have been recorded, and passed.
        call!("read the time", unsafe {
            driver::event::elapsed(self.begin, self.end)
        })
        .map(|millis| f64::from(millis) * 1e3)
    }
}

impl Drop for Course<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`; what recorded them has been waited for.
        unsafe {
            let _ = driver::event::destroy(self.begin);
            let _ = driver::event::destroy(self.end);
        }
    }
}

fn event() -> Result<driver_sys::CUevent> {
    call!(
        "make an event",
        driver::event::create(driver_sys::CUevent_flags::CU_EVENT_DEFAULT)
    )
}

fn record(event: driver_sys::CUevent, stream: driver_sys::CUstream) -> Result<()> {
    // SAFETY: both live.
    call!("record an event", unsafe {
        driver::event::record(event, stream)
    })
}

fn wait(stream: driver_sys::CUstream, event: driver_sys::CUevent) -> Result<()> {
    // SAFETY: both live.
    call!("wait for an event", unsafe {
        driver::stream::wait_event(
            stream,
            event,
            driver_sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
        )
    })
}

/// What a stream was told, to be told again.
struct Graph {
    graph: driver_sys::CUgraph,
    executable: driver_sys::CUgraphExec,
}

impl Graph {
    fn capture(stream: driver_sys::CUstream, run: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let mode = driver_sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let what = "capture a graph";
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives; the calls write the locals.
        unsafe {
            call!(
                what,
                driver_sys::cuStreamBeginCapture_v2(stream, mode).result()
            )?;
            let done = run();
            call!(
                what,
                driver_sys::cuStreamEndCapture(stream, &mut graph).result()
            )?;
            done?;
            call!(
                what,
                driver_sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0).result()
            )?;
        }
        Ok(Graph { graph, executable })
    }

    fn launch(&self, stream: driver_sys::CUstream) -> Result<()> {
        // SAFETY: both live; what was captured is alive as long as the benchmark.
        let result = unsafe { driver_sys::cuGraphLaunch(self.executable, stream) };
        call!("launch a graph", result.result())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; its last launch has been waited for.
        unsafe {
            let _ = driver_sys::cuGraphExecDestroy(self.executable);
            let _ = driver_sys::cuGraphDestroy(self.graph);
        }
    }
}

/// Makes the primary context of the rank's GPU, in which everything lies, current for the calls of this file.
fn bind(group: &Group<Cuda>) -> Result<()> {
    // SAFETY: a stream of a group that lives; the context does as long.
    unsafe {
        let mut context = std::ptr::null_mut();
        let stream = group.stream().cast();
        call!(
            "find the context",
            driver_sys::cuStreamGetCtx(stream, &mut context).result()
        )?;
        call!("bind the context", driver::ctx::set_current(context))
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
    const ROWS: usize = 9;
    bind(group)?;
    let [m, k] = case.a.shape();
    let shard_bytes = case.a.rows().len() * k * size_of::<T>();
    // NCCL gathers equal shards only; where the rows don't divide, each rank sends as many as the longest has.
    let longest = m.div_ceil(group.world_size()) * k * size_of::<T>();
    let shard = Scratch::new(longest)?;
    let gathered = Scratch::new(longest * group.world_size())?;
    let [m, n] = case.out.shape();
    let out = Scratch::new(m * n.next_multiple_of(8) * size_of::<T>())?;
    let course = Course::new(group)?;
    let stream = course.stream;
    let side = call!(
        "make a stream",
        driver::stream::create(driver::stream::StreamKind::NonBlocking)
    )?;
    let joined = event()?;
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

    let mut best = (f64::INFINITY, 0);
    for algorithm in 0..product.algorithms.len() {
        product.chosen = algorithm;
        for _ in 0..4 {
            let time = course.time(|| product.run(stream))?;
            if time < best.0 {
                best = (time, algorithm);
            }
        }
    }
    product.chosen = best.1;

    let Case { a, b, out, .. } = case;
    let graph = match prepared.config().route {
        Route::Pull => None,
        _ => Some(Graph::capture(stream, || prepared.run(a, b, out))?),
    };
    let mut samples: Vec<[f64; ROWS]> = Vec::new();
    for round in 0..warmup + iterations {
        let mut times = [0.0; ROWS];
        for (row, time) in times.iter_mut().enumerate() {
            *time = course.time(|| match row {
                0 => product.run(stream),
                1 => prepared.matmul(a, b, out),
                2 => nccl.gather(shard.0, gathered.0, longest, stream),
                3 => prepared.gather(a),
                4 => {
                    nccl.gather(shard.0, gathered.0, longest, stream)?;
                    product.run(stream)
                }
                5 => {
                    prepared.gather(a)?;
                    prepared.matmul(a, b, out)
                }
                6 => prepared.run(a, b, out),
                7 => graph.as_ref().map_or(Ok(()), |graph| graph.launch(stream)),
                _ => {
                    wait(side, course.begin)?;
                    product.run(side)?;
                    record(joined, side)?;
                    prepared.copy(a)?;
                    wait(stream, joined)
                }
            })?;
        }
        if round >= warmup {
            samples.push(times);
        }
        progress();
    }
    // What the host spends on a call, when calls follow one another.
    let mut host = Vec::new();
    for _ in 0..iterations.min(5) {
        course.prepare()?;
        let begin = Instant::now();
        for _ in 0..CALLS {
            prepared.run(a, b, out)?;
        }
        host.push([begin.elapsed().as_secs_f64() * 1e6 / CALLS as f64]);
        group.synchronize()?;
    }
    // SAFETY: made above, used no more: every row has been waited for.
    unsafe {
        let _ = driver::stream::destroy(side);
        let _ = driver::event::destroy(joined);
    }
    let medians = common::medians(&common::slowest(group, &samples)?);
    let [
        cublaslt,
        matmul,
        nccl,
        gather,
        nccl_cublaslt,
        sequential,
        fused,
        replayed,
        ideal,
    ] = medians;
    let [host] = common::medians(&common::slowest(group, &host)?);
    Ok(Times {
        cublaslt,
        matmul,
        nccl,
        gather,
        nccl_cublaslt,
        sequential,
        fused,
        graph: graph.is_some().then_some(replayed),
        ideal,
        host,
    })
}

/// The fastest configuration for a case, and its median time in microseconds. Collective.
pub fn fastest<T: Element>(group: &Group<Cuda>, case: &mut Case<Cuda, T>) -> Result<(Config, f64)> {
    const ROUNDS: usize = 9;
    /// Longer by this in a first round is reason enough to go on to the next.
    const HOPELESS: f64 = 1.2;
    /// Shorter by less than this is no reason to choose another configuration: it is noise.
    const NOISE: f64 = 0.995;
    let n = case.b.shape()[0];
    bind(group)?;
    let course = Course::new(group)?;
    let mut best = AllGatherMatmul::new().prepare(&case.a, n)?;
    let mut best_time = f64::INFINITY;
    let default = best.config();
    // (route, chunks, chunks of the last shard, whether the last is cut)
    let mut ways = vec![(Route::Store, 64, 64, false)];
    for (chunks, last_chunks) in [(1, 1), (1, 2), (1, 4), (2, 2), (4, 4)] {
        for cut_last in [false, true] {
            ways.extend(
                [Route::Pull, Route::Push].map(|route| (route, chunks, last_chunks, cut_last)),
            );
        }
    }
    for (route, chunks, last_chunks, cut_last) in ways {
        let chunking = Chunking::new(chunks)
            .with_last(last_chunks)
            .with_cut_last(cut_last);
        let way = Config::new(default.tile, chunking, route);
        for config in gemmesh::testing::with_each_kernel(&way) {
            let other = AllGatherMatmul::new().config(config).prepare(&case.a, n)?;
            let mut run = |prepared: &Prepared<Cuda, T>| {
                course.time(|| prepared.run(&case.a, &case.b, &mut case.out))
            };
            run(&other)?;
            // In turn with the best so far: what a GPU loses as it grows warm, both lose.
            let mut rounds = |count: usize| -> Result<[f64; 2]> {
                let times: Vec<[f64; 2]> = (0..count)
                    .map(|_| Ok([run(&best)?, run(&other)?]))
                    .collect::<Result<_>>()?;
                Ok(common::medians(&common::slowest(group, &times)?))
            };
            let mut times = rounds(1)?;
            if times[1] < HOPELESS * times[0] {
                times = rounds(ROUNDS)?;
                best_time = times[0];
            }
            let [champion, challenger] = times;
            if group.rank() == 0 {
                println!("{challenger:.1} µs, the best {champion:.1} µs: {config:?}");
            }
            if challenger < NOISE * champion {
                (best, best_time) = (other, challenger);
            }
        }
    }
    Ok((best.config(), best_time))
}
