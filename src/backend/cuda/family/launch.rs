//! What a family's kernels are launched with.

use std::ffi::c_void;
use std::fmt::Debug;

use smallvec::SmallVec;

use crate::backend::cuda::abi::{GEMMESH_MAX_TARGETS, GemmeshParams, GemmeshSums};
use crate::backend::cuda::driver::DeviceMatrix;
use crate::element::DType;
use crate::schedule::{MAX_WEIGHTS, WeightLayout};

/// The most ranks whose memory a kernel stores tiles to, counted around the ring from this rank, which is included.
pub const TARGETS: usize = GEMMESH_MAX_TARGETS as usize;

/// The matrices that a product's kernel reads and writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrices {
    pub a: DeviceMatrix,
    pub weights: SmallVec<[DeviceMatrix; MAX_WEIGHTS]>,
    pub weight_layout: WeightLayout,
    pub gated: bool,
    /// By weight: where its tiles go or, for a kernel that adds partials, the addends.
    pub outputs: SmallVec<[DeviceMatrix; MAX_WEIGHTS]>,
    /// The type that results are stored in.
    pub stored: DType,
    /// Where the tiles of a kernel that adds partials go, in the kernel's numbering.
    pub targets: Option<[Option<DeviceMatrix>; 2 * TARGETS]>,
}

/// The arguments of a kernel that depend on the addresses of a call's matrices.
pub trait KernelArguments: Debug + Send + Sync {
    /// All arguments of the kernel, in order. `sums` are those of a kernel with block sums.
    fn all(&self, params: &GemmeshParams, sums: Option<&GemmeshSums>)
    -> SmallVec<[*mut c_void; 6]>;
}
