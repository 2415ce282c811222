//! Parts of a group as groups of their own, on GPUs.

use gemmesh::Cuda;

use crate::support::gpu::*;

crate::support::shared::groups_tests!(Cuda, gpu());
