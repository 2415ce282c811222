//! Data that goes into shards and out of them without the host, on GPUs.

use gemmesh::Cuda;

use crate::support::gpu::*;

crate::support::shared::shards_tests!(Cuda, gpu());
