//! NCCL's all-reduce as an operation of candle's, as in candle's example llama_multiprocess.

use std::rc::Rc;

use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::nccl::{Comm, Id, ReduceOp};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, Device, Error, Layout, Result, Shape, Tensor,
};
use gemmesh::bf16;
use gemmesh_candle::TensorParallel;

/// Adds up over all ranks, on candle's stream.
pub fn all_reduce(
    ranks: &TensorParallel,
    device: &Device,
) -> Result<impl Fn(Tensor) -> Result<Tensor>> {
    let failed = |error| Error::msg(format!("NCCL: {error:?}"));
    // Rank 0 names the communicator.
    let bytes = match ranks.rank() {
        0 => Id::new()
            .map_err(failed)?
            .internal()
            .map(|byte| byte as u8)
            .to_vec(),
        _ => Vec::new(),
    };
    let all = ranks.all_gather_bytes(&bytes)?;
    let mut internal = [0; 128];
    internal
        .iter_mut()
        .zip(&all[0])
        .for_each(|(to, from)| *to = *from as _);
    let stream = device.as_cuda_device()?.cuda_stream();
    let (rank, world) = (ranks.rank(), ranks.world_size());
    let communicator =
        Comm::from_rank(stream, rank, world, Id::uninit(internal)).map_err(failed)?;
    let operation = AllReduce(Rc::new(communicator));
    Ok(move |x: Tensor| x.apply_op1_no_bwd(&operation))
}

struct AllReduce(Rc<Comm>);

impl CustomOp1 for AllReduce {
    fn name(&self) -> &'static str {
        "all-reduce"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        candle_core::bail!("NCCL has no tensors of the CPU")
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let device = storage.device().clone();
        let from = storage.as_cuda_slice::<bf16>()?;
        if layout.contiguous_offsets() != Some((0, from.len())) {
            candle_core::bail!("the partial sums are not contiguous");
        }
        let count = layout.shape().elem_count();
        // SAFETY: NCCL writes all of it.
        #[allow(unsafe_code)]
        let mut to = unsafe { device.alloc::<bf16>(count)? };
        let reduced = self.0.all_reduce(from, &mut to, &ReduceOp::Sum);
        reduced.map_err(|error| Error::msg(format!("NCCL: {error:?}")))?;
        Ok((
            CudaStorage::wrap_cuda_slice(to, device),
            layout.shape().clone(),
        ))
    }
}
