//! A prepared operation that is repeated, and the short call, allocate nothing.
#![allow(unsafe_code)] // A global allocator.

#[path = "support/patience.rs"]
#[allow(dead_code)]
mod patience;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

use gemmesh::schedule::Schedule;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    AllGatherMatmul, Config, Error, Group, Host, MatmulAllReduce, MatmulReduceScatter, Matrix,
    ShardedMatrix, all_gather_matmul, bf16,
};
use patience::stretched;

/// What one thread has allocated while it was watched.
#[derive(Default)]
struct Counter {
    thread: AtomicUsize,
    count: AtomicU64,
    largest: AtomicUsize,
    /// Bytes taken and not given back.
    live: AtomicI64,
}

const MAX_THREADS: usize = 512;
static COUNTERS: [Counter; MAX_THREADS] = [const {
    Counter {
        thread: AtomicUsize::new(0),
        count: AtomicU64::new(0),
        largest: AtomicUsize::new(0),
        live: AtomicI64::new(0),
    }
}; MAX_THREADS];
static THREADS: AtomicUsize = AtomicUsize::new(0);
static WATCHING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// 1 + the index of this thread's counter.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

fn mine() -> &'static Counter {
    let index = MINE.get().checked_sub(1).unwrap_or_else(|| {
        let index = THREADS.fetch_add(1, Ordering::Relaxed);
        MINE.set(index + 1);
        let thread = rustix::thread::gettid().as_raw_nonzero().get() as usize;
        COUNTERS[index % MAX_THREADS]
            .thread
            .store(thread, Ordering::Relaxed);
        index
    });
    &COUNTERS[index % MAX_THREADS]
}

struct Watch;

#[global_allocator]
static WATCH: Watch = Watch;

fn taken(bytes: usize) {
    if WATCHING.load(Ordering::Relaxed) {
        let mine = mine();
        mine.count.fetch_add(1, Ordering::Relaxed);
        mine.largest.fetch_max(bytes, Ordering::Relaxed);
        mine.live.fetch_add(bytes as i64, Ordering::Relaxed);
    }
}

fn given(bytes: usize) {
    if WATCHING.load(Ordering::Relaxed) {
        mine().live.fetch_sub(bytes as i64, Ordering::Relaxed);
    }
}

// SAFETY: everything is the system allocator's; the counting touches atomics and a thread-local that needs neither
// allocation nor destruction.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        taken(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        given(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        given(layout.size());
        taken(size);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// What the threads whose names begin with `name` have allocated.
#[derive(Debug, Default)]
struct Seen {
    threads: usize,
    count: u64,
    largest: usize,
    live: i64,
}

fn seen(name: &str) -> Seen {
    let mut seen = Seen::default();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let comm = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        if !comm.starts_with(name) {
            continue;
        }
        seen.threads += 1;
        let thread: usize = task.file_name().to_string_lossy().parse().unwrap();
        for counter in &COUNTERS {
            if counter.thread.load(Ordering::Relaxed) == thread {
                seen.count += counter.count.load(Ordering::Relaxed);
                seen.largest = seen.largest.max(counter.largest.load(Ordering::Relaxed));
                seen.live += counter.live.load(Ordering::Relaxed);
            }
        }
    }
    seen
}

fn forget() {
    for counter in &COUNTERS {
        counter.count.store(0, Ordering::Relaxed);
        counter.largest.store(0, Ordering::Relaxed);
        counter.live.store(0, Ordering::Relaxed);
    }
}

/// Allocations of this thread during `f`.
fn allocations_of(f: impl FnOnce()) -> u64 {
    let before = mine().count.load(Ordering::Relaxed);
    f();
    mine().count.load(Ordering::Relaxed) - before
}

const WORLD: usize = 3;
const REPEATS: u64 = 100;
const ROWS: [usize; WORLD] = [45, 0, 70];
const N: usize = 100;
const K: usize = 900;
const CONFIG: Config = Config::new(
    TileShape::new(32, 48, 400).with_group_m(2),
    Chunking::new(3).with_cut_last(true),
    Route::Pull,
);

/// How many products one operation asks the `gemm` crate for. For each, gemm takes a vector of flags, one a panel of
/// the rows that it thinks the machine's caches hold, and gives it back before it returns; that is the only thing that
/// is allocated in an operation, and not ours to avoid.
fn products(schedule: &Schedule) -> u64 {
    let tile_k = schedule.product().unwrap().config.tile.k;
    (schedule.tiles().len() * K.div_ceil(tile_k)) as u64
}

/// Four times what an L3 cache of 105 MiB makes of it, and far less than any operand of a product.
const FLAGS: usize = 16 << 10;

/// One rank's matrices.
struct Rank {
    a: ShardedMatrix<Host, bf16>,
    b: Matrix<Host, bf16>,
    bias: Matrix<Host, bf16>,
    out: Matrix<Host, bf16>,
    /// This rank's part of K, for all rows,
    part: Matrix<Host, bf16>,
    /// its rows of a sum,
    own: Matrix<Host, bf16>,
    /// and all of them.
    all: ShardedMatrix<Host, bf16>,
}

impl Rank {
    /// Collective.
    fn new(group: &Group<Host>) -> Result<Rank, Error> {
        Ok(Rank {
            a: group.sharded_rows(&ROWS, K)?,
            b: group.upload(&vec![bf16::ONE; N * K], N, K)?,
            bias: group.zeros(1, N)?,
            out: group.zeros(ROWS.iter().sum(), N)?,
            part: group.zeros(ROWS.iter().sum(), K)?,
            own: group.zeros(ROWS[group.rank()], N)?,
            all: group.sharded_rows(&ROWS, N)?,
        })
    }
}

/// The workers of an earlier group end on their own.
#[track_caller]
fn wait_for_workers_to_end() {
    let begin = std::time::Instant::now();
    while seen("gemmesh").threads > 0 {
        assert!(
            begin.elapsed() < stretched(std::time::Duration::from_secs(20)),
            "they don't"
        );
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Repeats `call` on every rank and looks at what was allocated on which thread. `prepare` makes what `call` is given,
/// and says how many products it takes.
#[track_caller]
fn assert_allocates_nothing<P>(
    prepare: impl Fn(&Rank) -> Result<(P, u64), Error> + Sync,
    call: impl Fn(&P, &mut Rank) -> Result<(), Error> + Sync,
) {
    wait_for_workers_to_end();
    let together = Barrier::new(WORLD);
    let found = Group::<Host>::builder()
        .workers(1)
        .threads(WORLD, |group| {
            let mut rank = Rank::new(&group)?;
            let (prepared, products) = prepare(&rank)?;
            for _ in 0..3 {
                call(&prepared, &mut rank)?;
            }
            together.wait();
            if group.rank() == 0 {
                forget();
                WATCHING.store(true, Ordering::Relaxed);
            }
            together.wait();
            let by_caller = allocations_of(|| {
                for _ in 0..REPEATS {
                    call(&prepared, &mut rank).unwrap();
                }
            });
            together.wait();
            if group.rank() == 0 {
                WATCHING.store(false, Ordering::Relaxed);
            }
            together.wait();
            let me = group.rank();
            let found = Found {
                by_caller,
                products,
                copier: seen(&format!("gemmesh-copy-{me}")),
                worker: seen(&format!("gemmesh-work-{me}")),
            };
            together.wait();
            Ok::<_, Error>(found)
        })
        .unwrap();
    // Only here: a rank that panicked above would leave the others waiting.
    for of_rank in found {
        of_rank.assert_only_flags();
    }
}

/// What was allocated on one rank, by thread.
struct Found {
    by_caller: u64,
    products: u64,
    copier: Seen,
    worker: Seen,
}

impl Found {
    #[track_caller]
    fn assert_only_flags(&self) {
        let Found {
            by_caller,
            products,
            copier,
            worker,
        } = self;
        assert_eq!(*by_caller, 0, "the calling thread");
        assert_eq!((copier.threads, copier.count), (1, 0), "{copier:?}");
        assert_eq!(worker.threads, 1);
        assert!(worker.count <= REPEATS * products, "{worker:?}");
        assert!(worker.largest <= FLAGS, "{worker:?}");
        assert_eq!(worker.live, 0, "{worker:?}");
    }
}

/// One test, because the counters are the whole process's.
#[test]
fn repeated_operations_allocate_nothing() {
    // The allocator counts at all.
    WATCHING.store(true, Ordering::Relaxed);
    let counted = allocations_of(|| drop(std::hint::black_box(vec![1u8; 100])));
    WATCHING.store(false, Ordering::Relaxed);
    assert_eq!(counted, 1);

    // The short call.
    assert_allocates_nothing(
        |rank| {
            let prepared = AllGatherMatmul::new().prepare(&rank.a, N)?;
            Ok(((), products(prepared.schedule())))
        },
        |(), rank| all_gather_matmul(&rank.a, &rank.b, &mut rank.out),
    );
    // The builder, with everything.
    assert_allocates_nothing(
        |rank| {
            let operation = AllGatherMatmul::new().config(CONFIG).bias(&rank.bias);
            let prepared = operation.prepare(&rank.a, N)?;
            Ok(((), products(prepared.schedule())))
        },
        |(), rank| {
            let operation = AllGatherMatmul::new().config(CONFIG).bias(&rank.bias);
            operation.run(&rank.a, &rank.b, &mut rank.out)
        },
    );
    // Sums that have been prepared.
    assert_allocates_nothing(
        |rank| {
            let prepared = MatmulReduceScatter::new()
                .rows(&ROWS)
                .prepare(&rank.part, N)?;
            let products = products(prepared.schedule());
            Ok((prepared, products))
        },
        |prepared, rank| prepared.run(&rank.part, &rank.b, &mut rank.own),
    );
    assert_allocates_nothing(
        |rank| {
            let prepared = MatmulAllReduce::new().prepare(&rank.part, &rank.all)?;
            let products = products(prepared.schedule());
            Ok((prepared, products))
        },
        |prepared, rank| prepared.run(&rank.part, &rank.b, &mut rank.all),
    );
}
