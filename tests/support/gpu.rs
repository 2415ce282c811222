//! What the tests of the CUDA backend share: leave to use GPUs, ranks, a small product, graphs.

use std::sync::{LazyLock, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use cudarc::driver::sys;
use gemmesh::testing::with_each_kernel;
use gemmesh::{
    AllGatherMatmul, Builder, Config, Cuda, Element, Error, Group, Host, Matrix, Prepared,
    ShardedMatrix, Transport, all_gather_matmul, bf16,
};
use rand::RngExt;
use rand::rngs::StdRng;

use super::numbers::{Reference, bits, nan, normal};
use super::processes::{Outcome, Processes, Rank, Setting, is_rank, start_with};

/// Of groups in which nobody is waited for in vain.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// Of groups in which somebody is.
pub const SHORT: Duration = Duration::from_millis(1500);
/// Survivors know within this after a kill or after their timeout.
pub const NOTICED: Duration = Duration::from_secs(2);
/// Of the processes of one test.
pub const DEADLINE: Duration = Duration::from_secs(90);

pub const TRANSPORTS: [Transport; 3] = [Transport::Pull, Transport::Push, Transport::Store];

/// A configuration for every kernel.
pub static SHAPES: LazyLock<Vec<Config>> = LazyLock::new(|| {
    with_each_kernel(&Config {
        tile_m: 0,
        tile_n: 0,
        tile_k: 0,
        stages: 0,
        cluster: 0,
        split_k: 0,
        group_m: 1,
        chunks: 1,
        last_chunks: 1,
        cut_last: false,
        transport: Transport::Pull,
    })
});

pub fn config(shape: usize, group_m: usize, chunks: usize) -> Config {
    Config {
        group_m,
        chunks,
        last_chunks: chunks,
        cut_last: chunks.is_multiple_of(2),
        transport: TRANSPORTS[shape % TRANSPORTS.len()],
        ..SHAPES[shape % SHAPES.len()]
    }
}

// GPUs.

/// How many GPUs this process can have.
pub fn devices() -> usize {
    let names = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let there = names
        .filter(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            name.strip_prefix("nvidia").is_some_and(|number| {
                !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit())
            })
        })
        .count();
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => there.min(list.split(',').filter(|item| !item.is_empty()).count()),
        Err(_) => there,
    }
}

/// Why there is no GPU, if there is none.
pub fn absence() -> Option<&'static str> {
    static REASON: OnceLock<Option<String>> = OnceLock::new();
    let reason = REASON.get_or_init(|| {
        if is_rank() || devices() > 0 {
            return None;
        }
        let address = format!("probe-{}", std::process::id());
        let builder = Builder::<Cuda>::new().timeout(Duration::from_secs(5));
        builder
            .connect(0, 1, &address)
            .err()
            .map(|error| error.to_string())
    });
    reason.as_deref()
}

pub fn present() -> bool {
    let Some(reason) = absence() else {
        return true;
    };
    assert!(
        std::env::var("GEMMESH_REQUIRE_GPU").as_deref() != Ok("1"),
        "a GPU is required: {reason}"
    );
    eprintln!("no GPU: not run ({reason})");
    false
}

/// A test that measures a GPU's memory or a time, or in which ranks soon give up on one another, needs it for itself.
static TURN: RwLock<()> = RwLock::new(());

/// Leave to use the GPUs, beside other tests; none if there is none.
pub fn gpu() -> Option<RwLockReadGuard<'static, ()>> {
    present().then(|| TURN.read().unwrap_or_else(PoisonError::into_inner))
}

/// As [`gpu`], beside no other test.
pub fn gpu_alone() -> Option<RwLockWriteGuard<'static, ()>> {
    present().then(|| TURN.write().unwrap_or_else(PoisonError::into_inner))
}

/// As [`gpu`]; none also if there are fewer than `count`.
pub fn gpus(count: usize) -> Option<RwLockReadGuard<'static, ()>> {
    let leave = gpu()?;
    if !is_rank() && devices() < count {
        eprintln!("fewer than {count} GPUs: not run");
        return None;
    }
    Some(leave)
}

#[track_caller]
pub fn driver(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// The primary context of a rank's GPU, current on this thread and kept while groups come and go.
pub struct Context(sys::CUdevice);

impl Context {
    pub fn retain(rank: usize) -> Context {
        let (mut count, mut device, mut context) = (0, 0, std::ptr::null_mut());
        // SAFETY: writes the locals.
        unsafe {
            driver(sys::cuInit(0));
            driver(sys::cuDeviceGetCount(&mut count));
            driver(sys::cuDeviceGet(&mut device, rank as i32 % count));
            driver(sys::cuDevicePrimaryCtxRetain(&mut context, device));
            driver(sys::cuCtxSetCurrent(context));
        }
        Context(device)
    }

    pub fn free_bytes(&self) -> usize {
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes the locals.
        unsafe { driver(sys::cuMemGetInfo_v2(&mut free, &mut total)) };
        free
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once.
        unsafe { driver(sys::cuDevicePrimaryCtxRelease_v2(self.0)) };
    }
}

// Ranks.

pub fn ranks(
    test: &str,
    world: usize,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    let setting = Setting {
        deadline: DEADLINE,
        ..Setting::default()
    };
    ranks_with(test, world, &setting, part)
}

pub fn ranks_with(
    test: &str,
    world: usize,
    setting: &Setting,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    let places: Vec<_> = (0..world).map(|rank| (rank, world)).collect();
    start_with(test, &places, setting, part)
}

/// A group of all ranks. The GPU's primary context is current from now on.
pub fn connect(rank: &Rank, timeout: Duration) -> Result<Group<Cuda>, Error> {
    let builder = Builder::<Cuda>::new().timeout(timeout);
    let group = builder.connect(rank.rank, rank.world, &rank.address)?;
    std::mem::forget(Context::retain(rank.rank));
    Ok(group)
}

/// The same ranks without a GPU, to keep step.
pub fn host_group(rank: &Rank) -> Result<Group<Host>, Error> {
    let address = format!("{}-host", rank.address);
    let builder = Builder::<Host>::new().timeout(DEADLINE).workers(1);
    builder.connect(rank.rank, rank.world, &address)
}

/// A group whose timeout is shorter than the start of CUDA may take.
pub fn connect_short(rank: &Rank) -> Result<(Context, Group<Cuda>), Error> {
    let context = Context::retain(rank.rank);
    host_group(rank)?.barrier()?;
    Ok((context, connect(rank, SHORT)?))
}

/// All must have done well.
#[track_caller]
pub fn all_done(ranks: Processes) {
    let outcomes = ranks.outcomes();
    for outcome in &outcomes {
        println!("rank {}: {:?}", outcome.rank, outcome.ending);
    }
    for outcome in &outcomes {
        outcome.value();
    }
}

#[track_caller]
pub fn same_error(outcomes: &[Outcome]) -> &Error {
    let error = outcomes[0].error().cause();
    for outcome in outcomes {
        assert_eq!(outcome.error().cause(), error, "rank {}", outcome.rank);
    }
    error
}

/// A small product and its arguments.
pub struct Arguments {
    pub a: ShardedMatrix<Cuda, bf16>,
    pub b: Matrix<Cuda, bf16>,
    pub out: Matrix<Cuda, bf16>,
    /// What stands in the rows of rank r is r + this.
    base: usize,
}

impl Arguments {
    /// Collective.
    pub fn new(group: &Group<Cuda>, m: usize, n: usize, k: usize) -> Result<Arguments, Error> {
        let mut arguments = Arguments {
            a: group.sharded(m, k)?,
            b: group.upload(&vec![bf16::ONE; n * k], n, k)?,
            out: group.zeros(m, n)?,
            base: 0,
        };
        arguments.fill(group, 1)?;
        Ok(arguments)
    }

    /// Other values, once all is complete.
    pub fn fill(&mut self, group: &Group<Cuda>, base: usize) -> Result<(), Error> {
        group.synchronize()?;
        self.base = base;
        let value = bf16::from_f32((base + group.rank()) as f32);
        let rows = vec![value; self.a.rows().len() * self.a.shape()[1]];
        self.a.shard_mut().copy_from_host(&rows)
    }

    pub fn run(&mut self) -> Result<(), Error> {
        all_gather_matmul(&self.a, &self.b, &mut self.out)
    }

    pub fn prepare(&self, transport: Transport) -> Result<Prepared<'static, Cuda, bf16>, Error> {
        let config = Config {
            transport,
            ..config(6, 2, 2)
        };
        let operation = AllGatherMatmul::new().config(config);
        operation.prepare(&self.a, self.b.shape()[0])
    }

    pub fn run_by(&mut self, transport: Transport) -> Result<(), Error> {
        self.prepare(transport)?
            .run(&self.a, &self.b, &mut self.out)
    }

    pub fn verify_by(&mut self, group: &Group<Cuda>, transport: Transport) -> Result<(), Error> {
        self.run_by(transport)?;
        self.check(group.world_size())
    }

    /// Looks at the result of the last run. Small whole numbers are exact in bf16.
    #[track_caller]
    pub fn check(&self, world: usize) -> Result<(), Error> {
        let [_, k] = self.a.shape();
        let [_, n] = self.out.shape();
        let out = self.out.to_vec()?;
        for rank in 0..world {
            let expected = bf16::from_f32(((self.base + rank) * k) as f32);
            let rows = self.a.rows_of(rank);
            let found = &out[rows.start * n..rows.end * n];
            assert!(
                found.iter().all(|&x| x == expected),
                "wrong rows of rank {rank}: {:?} and not {expected}",
                &found[..found.len().min(8)]
            );
        }
        Ok(())
    }

    pub fn verify(&mut self, group: &Group<Cuda>) -> Result<(), Error> {
        self.run()?;
        self.check(group.world_size())
    }
}

/// Makes sure that the group does nothing after `result`'s error but repeat it, and returns it.
#[track_caller]
pub fn poisoned(group: &Group<Cuda>, result: Result<(), Error>) -> Result<String, Error> {
    let error = result.expect_err("an operation that cannot have worked");
    let repeated = Error::Poisoned {
        cause: Box::new(error.cause().clone()),
    };
    assert_eq!(group.barrier(), Err(repeated.clone()));
    assert_eq!(group.sharded::<bf16>(4, 8).unwrap_err(), repeated);
    assert_eq!(group.synchronize(), Err(repeated));
    Err(error.cause().clone())
}

#[track_caller]
pub fn assert_timeout_names(error: &Error, culprit: usize) {
    match error.cause() {
        Error::Timeout { rank, .. } => assert_eq!(*rank, culprit, "{error}"),
        other => panic!("{other}"),
    }
}

/// Records what `f` puts on the group's stream, and throws it away.
pub fn captured(group: &Group<Cuda>, mode: sys::CUstreamCaptureMode, f: impl FnOnce()) {
    let stream: sys::CUstream = group.stream().cast();
    // SAFETY: the stream lives as long as the group.
    unsafe { driver(sys::cuStreamBeginCapture_v2(stream, mode)) };
    f();
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; a graph that was made is destroyed once.
    unsafe {
        driver(sys::cuStreamEndCapture(stream, &mut graph));
        driver(sys::cuGraphDestroy(graph));
    }
}

pub const GLOBAL: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_GLOBAL;
pub const RELAXED: sys::CUstreamCaptureMode =
    sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;

/// A graph that was captured from the group's stream, ready to run.
pub struct Replay {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    stream: sys::CUstream,
}

impl Replay {
    pub fn capture(
        group: &Group<Cuda>,
        mode: sys::CUstreamCaptureMode,
        f: impl FnOnce(),
    ) -> Replay {
        let stream: sys::CUstream = group.stream().cast();
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream lives as long as the group; the calls write the locals.
        unsafe {
            driver(sys::cuStreamBeginCapture_v2(stream, mode));
            f();
            driver(sys::cuStreamEndCapture(stream, &mut graph));
            driver(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        }
        Replay {
            graph,
            executable,
            stream,
        }
    }

    pub fn launch(&self) {
        // SAFETY: both live, and so does what was captured.
        unsafe { driver(sys::cuGraphLaunch(self.executable, self.stream)) };
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        // SAFETY: made by `capture`; the stream lives as long as the group, and the last launch is waited for.
        unsafe {
            driver(sys::cuStreamSynchronize(self.stream));
            driver(sys::cuGraphExecDestroy(self.executable));
            driver(sys::cuGraphDestroy(self.graph));
        }
    }
}

/// Device memory of the caller's, full of 0x5a.
pub struct Foreign {
    pub ptr: u64,
    pub bytes: usize,
}

impl Foreign {
    pub fn new(bytes: usize) -> Foreign {
        let mut ptr = 0;
        // SAFETY: writes the local, then what was allocated.
        unsafe {
            driver(sys::cuMemAlloc_v2(&mut ptr, bytes));
            driver(sys::cuMemsetD8_v2(ptr, 0x5a, bytes));
            driver(sys::cuCtxSynchronize());
        }
        Foreign { ptr, bytes }
    }

    pub fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        // SAFETY: as many bytes as were allocated.
        unsafe {
            driver(sys::cuMemcpyDtoH_v2(
                bytes.as_mut_ptr().cast(),
                self.ptr,
                self.bytes,
            ));
        }
        bytes
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: allocated once.
        unsafe { driver(sys::cuMemFree_v2(self.ptr)) };
    }
}

/// A test for each transport, whose `$part` is given the test's name.
#[macro_export]
macro_rules! each_transport {
    ($leave:ident, $part:ident: $($test:ident by $transport:ident,)+) => {
        $(
            #[test]
            fn $test() {
                if let Some(_leave) = $leave() {
                    $part(test_name!(), gemmesh::Transport::$transport);
                }
            }
        )+
    };
}

// Problems.

/// A product as its ranks see it.
#[derive(Clone, Debug)]
pub struct Case {
    pub rows: Vec<usize>,
    /// On rank 0.
    pub n: usize,
    /// By how much it is more on each next rank.
    pub more: usize,
    pub k: usize,
    pub bias: bool,
    pub config: Option<Config>,
    pub seed: u64,
}

/// Half of the time one of the extents that are likely to break something.
pub fn extent(random: &mut StdRng, special: &[usize], most: usize) -> usize {
    if random.random_bool(0.5) {
        special[random.random_range(0..special.len())]
    } else {
        random.random_range(1..=most)
    }
}

impl Case {
    /// The same on every rank.
    pub fn random(random: &mut StdRng, world: usize, index: usize) -> Case {
        let (m, n, k) = loop {
            let m = extent(
                random,
                &[
                    1, 2, 3, 7, 64, 97, 127, 128, 129, 131, 251, 255, 256, 257, 383, 385, 509, 511,
                    512, 513, 640,
                ],
                700,
            );
            let n = extent(
                random,
                &[
                    1, 2, 7, 8, 9, 31, 63, 64, 65, 127, 128, 129, 191, 193, 207, 208, 209, 223,
                    225, 255, 256, 257, 416, 449, 511, 513, 600,
                ],
                600,
            );
            let k = 8 * extent(random, &[1, 2, 7, 8, 9, 15, 16, 17, 24, 32, 33, 64, 65], 87);
            if m * n * k <= 20_000_000 {
                break (m, n, k);
            }
        };
        let rows = if random.random_bool(0.5) {
            // Anywhere, and often the same place twice: a rank without rows.
            let mut cuts: Vec<usize> = (1..world).map(|_| random.random_range(0..=m)).collect();
            if world > 2 && random.random_bool(0.3) {
                cuts[0] = cuts[1];
            }
            cuts.extend([0, m]);
            cuts.sort();
            cuts.windows(2).map(|ends| ends[1] - ends[0]).collect()
        } else {
            let split = |rank| m / world + usize::from(rank < m % world);
            (0..world).map(split).collect()
        };
        // Every kernel in turn, then the default.
        let shape = index / 2 % (SHAPES.len() + 1);
        let transport = TRANSPORTS[random.random_range(0..TRANSPORTS.len())];
        let (group_m, chunks) = (random.random_range(1..=8), random.random_range(1..=5));
        Case {
            rows,
            n,
            more: [0, 0, 1, 8, 72][random.random_range(0..5)],
            k,
            bias: random.random_bool(0.5),
            config: (shape < SHAPES.len()).then(|| Config {
                transport,
                ..config(shape, group_m, chunks)
            }),
            seed: random.random(),
        }
    }

    pub fn m(&self) -> usize {
        self.rows.iter().sum()
    }

    pub fn n_of(&self, rank: usize) -> usize {
        self.n + rank * self.more
    }

    pub fn a<T: Element>(&self) -> Vec<T> {
        normal(self.seed, self.m() * self.k)
    }

    /// Each rank has a weight and a bias of its own.
    pub fn b<T: Element>(&self, rank: usize) -> (Vec<T>, Option<Vec<T>>) {
        let seed = self.seed ^ (rank as u64 + 1) << 40;
        let n = self.n_of(rank);
        let bias = self.bias.then(|| normal(!seed, n));
        (normal(seed, n * self.k), bias)
    }

    /// Collective. Checks everything on this rank.
    pub fn verify<T: Element>(&self, group: &Group<Cuda>) -> Result<f64, String> {
        let (b, bias) = self.b::<T>(group.rank());
        self.verify_values(group, &self.a::<T>(), &b, bias.as_deref())
    }

    pub fn verify_values<T: Element>(
        &self,
        group: &Group<Cuda>,
        a: &[T],
        b: &[T],
        bias: Option<&[T]>,
    ) -> Result<f64, String> {
        let words = |error: Error| error.to_string();
        let mut placed = Placed::new(group, self, a, b, bias).map_err(words)?;
        placed.poison().map_err(words)?;
        placed.fused(self.config).map_err(words)?;
        let (gathered, out) = placed.read().map_err(words)?;
        if bits(&gathered) != bits(a) {
            return Err("the gathered matrix is not the one that was spread".into());
        }
        Reference::new(a, b, bias, self.k).check(&out)
    }
}

/// A case's matrices in a rank's memory.
pub struct Placed<T: Element> {
    pub a: ShardedMatrix<Cuda, T>,
    pub b: Matrix<Cuda, T>,
    pub bias: Option<Matrix<Cuda, T>>,
    pub out: Matrix<Cuda, T>,
}

impl<T: Element> Placed<T> {
    /// Collective.
    pub fn new(
        group: &Group<Cuda>,
        case: &Case,
        a: &[T],
        b: &[T],
        bias: Option<&[T]>,
    ) -> Result<Placed<T>, Error> {
        let mut sharded = group.sharded_rows::<T>(&case.rows, case.k)?;
        let own = sharded.rows();
        sharded
            .shard_mut()
            .copy_from_host(&a[own.start * case.k..own.end * case.k])?;
        let n = case.n_of(group.rank());
        Ok(Placed {
            a: sharded,
            b: group.upload(b, n, case.k)?,
            bias: bias.map(|bias| group.upload(bias, 1, n)).transpose()?,
            out: group.zeros(case.m(), n)?,
        })
    }

    /// Nothing of an earlier operation, and no zero of a new matrix, can pass for a result.
    pub fn poison(&mut self) -> Result<(), Error> {
        let [m, n] = self.out.shape();
        self.a.poison(nan())?;
        self.out.copy_from_host(&vec![nan::<T>(); m * n])
    }

    pub fn operation<'a>(
        bias: &'a Option<Matrix<Cuda, T>>,
        config: Option<Config>,
    ) -> AllGatherMatmul<'a, Cuda, T> {
        let mut operation = AllGatherMatmul::new();
        if let Some(bias) = bias {
            operation = operation.bias(bias);
        }
        match config {
            Some(config) => operation.config(config),
            None => operation,
        }
    }

    pub fn fused(&mut self, config: Option<Config>) -> Result<(), Error> {
        Self::operation(&self.bias, config).run(&self.a, &self.b, &mut self.out)
    }

    pub fn gather_then_matmul(&mut self, config: Option<Config>) -> Result<(), Error> {
        let operation = Self::operation(&self.bias, config);
        let prepared = operation.prepare(&self.a, self.b.shape()[0])?;
        prepared.gather(&self.a)?;
        prepared.matmul(&self.a, &self.b, &mut self.out)
    }

    pub fn read(&mut self) -> Result<(Vec<T>, Vec<T>), Error> {
        Ok((self.a.to_vec()?, self.out.to_vec()?))
    }
}

// Other people's kernels.

/// A kernel that holds multiprocessors until it is told to let go.
pub struct Hold {
    stream: sys::CUstream,
    module: sys::CUmodule,
    word: *mut u32,
}

/// Each CTA takes so much shared memory that it has its multiprocessor to itself, and ends when the word is not zero, or
/// after some twenty seconds whatever happens.
const HOLD: &str = "
.version 7.8
.target sm_90
.address_size 64
.visible .entry hold(.param .u64 word)
{
    .reg .u64 %address;
    .reg .u32 %value;
    .reg .u32 %turns;
    .reg .pred %go_on;
    ld.param.u64 %address, [word];
    mov.u32 %turns, 0;
again:
    nanosleep.u32 2000;
    ld.relaxed.sys.global.u32 %value, [%address];
    setp.ne.u32 %go_on, %value, 0;
    @%go_on bra done;
    add.u32 %turns, %turns, 1;
    setp.lt.u32 %go_on, %turns, 10000000;
    @%go_on bra again;
done:
    ret;
}
\0";

impl Hold {
    /// Puts the kernel with `ctas` CTAs on `stream`, or on a stream of its own, of the current context.
    pub fn start(ctas: u32, stream: Option<sys::CUstream>) -> Hold {
        const SHARED: u32 = 200 << 10;
        let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut word, mut at) = (std::ptr::null_mut(), 0u64);
        let mut own = std::ptr::null_mut();
        // SAFETY: writes the locals; the kernel reads the word, which lives until it has ended.
        unsafe {
            driver(sys::cuModuleLoadData(&mut module, HOLD.as_ptr().cast()));
            driver(sys::cuModuleGetFunction(
                &mut function,
                module,
                c"hold".as_ptr(),
            ));
            driver(sys::cuFuncSetAttribute(
                function,
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                SHARED as i32,
            ));
            driver(sys::cuMemHostAlloc(
                &mut word,
                4,
                sys::CU_MEMHOSTALLOC_DEVICEMAP,
            ));
            word.cast::<u32>().write_volatile(0);
            driver(sys::cuMemHostGetDevicePointer_v2(&mut at, word, 0));
            let non_blocking = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            driver(sys::cuStreamCreate(&mut own, non_blocking));
            driver(sys::cuLaunchKernel(
                function,
                ctas,
                1,
                1,
                32,
                1,
                1,
                SHARED,
                stream.unwrap_or(own),
                [(&raw mut at).cast()].as_mut_ptr(),
                std::ptr::null_mut(),
            ));
        }
        Hold {
            stream: own,
            module,
            word: word.cast(),
        }
    }

    pub fn release(&self) {
        // SAFETY: the word lives.
        unsafe { self.word.write_volatile(1) };
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
        // SAFETY: made by `start`. Freeing waits for the kernel.
        unsafe {
            driver(sys::cuCtxSynchronize());
            driver(sys::cuMemFreeHost(self.word.cast()));
            driver(sys::cuModuleUnload(self.module));
            driver(sys::cuStreamDestroy_v2(self.stream));
        }
    }
}
