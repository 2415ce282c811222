//! Backends: what a rank is, where symmetric memory lies, and who walks the plan.

#[cfg(feature = "cuda")]
mod cuda;
mod host;

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(feature = "cuda")]
pub use cuda::Cuda;
#[cfg(feature = "cuda")]
#[doc(hidden)]
pub use cuda::Winner;
#[cfg(all(fuzzing, feature = "cuda"))]
pub use cuda::{peer, winners};
pub use host::Host;

use crate::element::DType;
use crate::error::Result;
use crate::protocol::{Config, Epoch, Plan, Problem, Transport};
use crate::ranks::members::Members;
use crate::trace::span::Span;

/// What a backend is told when it is opened.
#[derive(Clone, Debug)]
pub struct Options {
    pub workers: Option<usize>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub device: Option<usize>,
    pub first_epoch: Epoch,
}

/// A way to run the protocol: [`Host`] on any machine, `Cuda` on NVIDIA GPUs (feature `cuda`).
///
/// Sealed: the protocol's safety rests on its implementations.
pub trait Backend: sealed::Backend {}

/// Which parts of an operation run, and whether tiles wait for their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Tiles run as their rows arrive.
    Fused,
    /// The rows are pulled; nothing is multiplied.
    Gather,
    /// All rows are there; tiles don't wait, nothing is pulled.
    Matmul,
    /// Both run at once with no order between them: what perfect overlap would take. The output is not
    /// to be used.
    Unordered,
    /// The rows are copied, with no word to anyone and no regard to what the others do: what the copies alone take.
    #[cfg(feature = "cuda")]
    Copies,
}

impl Part {
    pub fn gathers(self) -> bool {
        matches!(self, Part::Fused | Part::Gather | Part::Unordered)
    }

    /// Whether the plan has rows pushed by their owners instead of pulled.
    pub fn may_push(self, plan: &Plan) -> bool {
        self == Part::Fused && plan.config().transport != Transport::Pull
    }

    /// Whether this rank pushes its rows in an operation. What refreshes flags pulls whatever its plan says: no flag of
    /// pulls comes to look like the future because rows were pushed for too long.
    pub fn pushes(self, plan: &Plan, epoch: Epoch) -> bool {
        self.may_push(plan) && !epoch.refreshes()
    }

    pub fn multiplies(self) -> bool {
        matches!(self, Part::Fused | Part::Matmul | Part::Unordered)
    }
}

/// A number that depends on every bit of `seed` (SplitMix64's finaliser).
pub(crate) fn scatter(seed: u64) -> u64 {
    let x = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// 0: no delays.
static DELAY_SEED: AtomicU64 = AtomicU64::new(0);

/// Delays that tests put before the chunks of every rank of this process, to make them arrive in any order.
#[doc(hidden)]
pub fn delay_chunks(seed: Option<u64>) {
    DELAY_SEED.store(seed.map_or(0, |seed| seed | 1 << 63), Ordering::Relaxed);
}

/// None to half a millisecond, differently for every chunk of every operation; if a test wants delays.
fn chunk_delay(rank: usize, flag: usize, epoch: Epoch) -> Option<Duration> {
    let seed = DELAY_SEED.load(Ordering::Relaxed);
    let chunk = (rank as u64) << 48 ^ (flag as u64) << 32 ^ u64::from(epoch.raw());
    (seed != 0).then(|| Duration::from_micros(scatter(seed ^ chunk) % 500))
}

pub(crate) mod sealed {
    use super::*;

    /// What an operation works on. Shapes have been checked against the plan.
    pub struct Operands<'a, B: Backend> {
        pub dtype: DType,
        /// [M, K], symmetric.
        pub a: &'a B::Symmetric,
        /// [N, K]
        pub b: Option<&'a B::Buffer>,
        /// [N]
        pub bias: Option<&'a B::Buffer>,
        /// [M, N]
        pub out: Option<&'a mut B::Buffer>,
    }

    /// The backend's side of the library.
    pub trait Backend: Sized + Send + Sync + 'static {
        /// As in error messages and results.
        const NAME: &'static str;
        /// K must be a multiple of this.
        const K_MULTIPLE: usize;
        /// Memory that every rank of the group maps.
        type Symmetric: Send + Sync + Debug;
        /// Memory of this rank's own.
        type Buffer: Send + Sync + Debug;
        /// A plan, ready to run.
        type Program: Send + Sync + Debug;

        /// Collective. Allocates the flags and starts what runs operations.
        fn open(members: &Members, options: &Options) -> Result<Self>;
        /// The group ends: lets go of the peers' memory, then of its own when no peer maps it any more.
        fn close(&mut self, members: &Members);
        /// A good way to cut up a problem.
        fn default_config(&self, problem: &Problem) -> Config;
        /// Whether what is begun now is only recorded, to run later and often.
        fn is_recording(&self, members: &Members) -> Result<bool>;
        /// Makes a plan ready to run.
        fn prepare(&self, members: &Members, plan: Plan) -> Result<Self::Program>;
        /// The plan of a program.
        fn plan(program: &Self::Program) -> &Plan;

        /// Collective, as `call`. Zeroed memory of `bytes` bytes on each rank.
        fn symmetric(&self, members: &Members, call: &str, bytes: usize)
        -> Result<Self::Symmetric>;
        /// Zeroed memory for `rows` rows of `width` bytes.
        fn buffer(&self, members: &Members, rows: usize, width: usize) -> Result<Self::Buffer>;

        /// Copies into this rank's memory, from byte `offset` on. The caller has checked the range.
        fn write_symmetric(
            &self,
            to: &mut Self::Symmetric,
            offset: usize,
            from: &[u8],
        ) -> Result<()>;
        /// Copies from this rank's memory, from byte `offset` on. The caller has checked the range.
        fn read_symmetric(
            &self,
            from: &mut Self::Symmetric,
            offset: usize,
            to: &mut [u8],
        ) -> Result<()>;
        /// Copies all rows of a buffer.
        fn write(&self, to: &mut Self::Buffer, from: &[u8]) -> Result<()>;
        /// Copies all rows of a buffer.
        fn read(&self, from: &Self::Buffer, to: &mut [u8]) -> Result<()>;

        /// Runs `part` of operation `epoch`; what happened when goes into `trace`.
        fn run(
            &self,
            members: &Members,
            program: &Self::Program,
            part: Part,
            epoch: Epoch,
            operands: Operands<'_, Self>,
            trace: Option<&mut Vec<Span>>,
        ) -> Result<()>
        where
            Self: super::Backend;

        /// Returns when everything that was begun is complete.
        fn synchronize(&self, members: &Members) -> Result<()>;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_refreshes_flags_pulls() {
        for transport in [Transport::Pull, Transport::Push, Transport::Store] {
            let config = Config {
                tile_m: 1,
                tile_n: 1,
                tile_k: 1,
                stages: 1,
                cluster: 1,
                split_k: 1,
                group_m: 1,
                chunks: 1,
                last_chunks: 1,
                cut_last: false,
                transport,
            };
            let problem = Problem::balanced(4, 1, 1, 0, 2).unwrap();
            let plan = Plan::new(problem, config).unwrap();
            let pushes = |epoch| Part::Fused.pushes(&plan, Epoch::from_raw(epoch));
            assert_eq!(pushes(1), transport != Transport::Pull);
            assert!(!pushes(0) && !pushes(Epoch::REFRESH));
            assert!(!Part::Gather.pushes(&plan, Epoch::FIRST));
        }
    }
}
