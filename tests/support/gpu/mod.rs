//! What the tests of the CUDA backend share: leave to use GPUs, and ranks that have one.

mod driver;
mod hold;
mod kernels;

use std::fmt::Display;
use std::ops::Range;
use std::sync::{OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use gemmesh::tuning::Numerics;
use gemmesh::{Config, Cuda, Error, Group, ShardedMatrix, bf16};

pub use driver::*;
pub use hold::Hold;
pub use kernels::*;

pub use super::products::{Case, Placed, ROUTES};
pub use super::tested::{
    Tested, all_done, assert_timeout_names, host_group, poisoned, ranks_with, same_error,
};

use super::processes::{Processes, Rank, is_rank};
use super::{products, tested};

pub type Arguments = products::Arguments<Cuda>;

pub const TIMEOUT: Duration = Cuda::TIMEOUT;
pub const SHORT: Duration = Cuda::SHORT;
pub const NOTICED: Duration = Cuda::NOTICED;
pub const DEADLINE: Duration = Cuda::DEADLINE;

impl Tested for Cuda {
    const TIMEOUT: Duration = Duration::from_secs(20);
    const PROMPT: Duration = Self::TIMEOUT;
    const SHORT: Duration = Duration::from_millis(1500);
    const SLACK: Duration = Duration::from_secs(2);
    const AWAY: Duration = Duration::from_millis(3500);
    // By the GPU's clock or the host's, whichever gave up.
    const WAITED: Range<Duration> = Duration::ZERO..Self::DEADLINE;
    const NOTICED: Duration = Duration::from_secs(2);
    // A process gives back its GPU first.
    const ENDED: Duration = Duration::from_secs(90);
    const DEADLINE: Duration = Duration::from_secs(90);
    const LATE: Duration = Duration::from_millis(400);
    const SMALL: [usize; 3] = [300, 24, 16];
    const LARGER: [usize; 3] = [301, 300, 264];

    fn leave() -> Option<impl Sized> {
        gpu()
    }

    fn leave_alone() -> Option<impl Sized> {
        gpu_alone()
    }

    type Kept = Context;

    fn keep(rank: &Rank) -> Context {
        Context::retain(rank.rank)
    }

    fn config(_: &ShardedMatrix<Cuda, bf16>, _: usize) -> Result<Config, Error> {
        // Of a kernel of single CTAs, so that it runs wherever CTAs are limited.
        let single = SHAPES.iter().position(|config| config.tile.ctas() == 1);
        Ok(config(single.unwrap_or(0), 2, 2))
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
        let builder = Group::<Cuda>::builder().timeout(Duration::from_secs(5));
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

/// With fewer GPUs than ranks each operation waits for time slices, unless `GEMMESH_LONG` is 1.
pub fn operations(world: usize, full: usize, shared: usize) -> usize {
    let long = std::env::var("GEMMESH_LONG").as_deref() == Ok("1");
    if long || devices() >= world {
        full
    } else {
        shared
    }
}

// Ranks.

pub fn ranks(
    test: &str,
    world: usize,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    tested::ranks::<Cuda>(test, world, part)
}

/// A group of all ranks. The GPU's primary context is current from now on.
pub fn connect(rank: &Rank, timeout: Duration) -> Result<Group<Cuda>, Error> {
    tested::connect(rank, timeout)
}

/// A group whose sums of K depend on nothing but K.
pub fn invariant(rank: &Rank) -> Result<Group<Cuda>, Error> {
    let builder = Group::<Cuda>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .numerics(Numerics::Invariant);
    let group = builder.connect(rank.rank, rank.world, &rank.address)?;
    std::mem::forget(Cuda::keep(rank));
    Ok(group)
}

/// Another group of the same ranks, with this timeout for late ranks too, by a name that no other of theirs has.
pub fn another_group(
    rank: &Rank,
    name: impl Display,
    timeout: Duration,
) -> Result<Group<Cuda>, Error> {
    let address = format!("{}-{name}", rank.address);
    let builder = Group::<Cuda>::builder()
        .timeout(timeout)
        .arrival_timeout(timeout);
    builder.connect(rank.rank, rank.world, &address)
}

/// The same ranks at an address of their own, for a group beside that of [`host_group`].
pub fn beside_the_host(rank: &Rank) -> Rank {
    Rank {
        address: format!("{}-cuda", rank.address),
        ..*rank
    }
}

/// A group whose timeout is shorter than the start of CUDA may take.
pub fn connect_short(rank: &Rank) -> Result<(Context, Group<Cuda>), Error> {
    tested::connect_short(rank)
}
