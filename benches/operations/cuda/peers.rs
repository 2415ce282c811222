//! The baselines, through cudarc: cuBLASLt for products, NCCL for communication.

use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::sys as driver_sys;
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gemmesh::{Cuda, DType, Group, Half, Result};

use super::clock::Timer;
use super::memory::{Place, Scratch};
use super::refused;
use crate::common;

/// The action that [`refused`] names.
const SET_UP: &str = "set up cuBLASLt";
const WORKSPACE_BYTES: usize = 64 << 20;
/// The number of cuBLASLt's proposed algorithms that are tried. The fastest is its row.
const ALGORITHMS: usize = 16;

/// A handle of cuBLASLt, and the memory that its products work in, one after the other.
pub struct CublasLt {
    handle: lt_sys::cublasLtHandle_t,
    workspace: Scratch,
}

impl CublasLt {
    pub fn new() -> Result<CublasLt> {
        let workspace = Scratch::new(WORKSPACE_BYTES)?;
        let handle = lt::create_handle().map_err(refused(SET_UP))?;
        Ok(CublasLt { handle, workspace })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used again, because each product keeps it.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// One product by cuBLASLt: out[M, N] = a[M, K] · b[N, K]ᵀ, row-major. For cuBLASLt, which is column-major, it is out'
/// = b' · a'.
pub struct Product {
    cublaslt: Rc<CublasLt>,
    desc: lt_sys::cublasLtMatmulDesc_t,
    layouts: [lt_sys::cublasLtMatrixLayout_t; 3],
    pub algorithms: Vec<lt_sys::cublasLtMatmulAlgo_t>,
    /// The algorithm that runs.
    pub chosen: usize,
    a: *const c_void,
    b: *const c_void,
    out: *mut c_void,
}

impl Product {
    /// The memory holds matrices of this shape, and lives as long as this value.
    pub fn new<T: Half>(
        cublaslt: &Rc<CublasLt>,
        a: Place,
        b: Place,
        out: Place,
        [m, n, k]: [usize; 3],
    ) -> Result<Product> {
        let kind = match T::DTYPE {
            DType::F16 => lt_sys::cudaDataType::CUDA_R_16F,
            _ => lt_sys::cudaDataType::CUDA_R_16BF,
        };
        let desc = describe()?;
        let layout = |rows: usize, columns: usize, place: Place| {
            let (rows, columns) = (rows as u64, columns as u64);
            lt::create_matrix_layout(kind, rows, columns, place.pitch as i64)
                .map_err(refused(SET_UP))
        };
        let layouts = [layout(k, n, b)?, layout(k, m, a)?, layout(n, m, out)?];
        Ok(Product {
            cublaslt: cublaslt.clone(),
            desc,
            layouts,
            algorithms: algorithms(cublaslt, desc, layouts)?,
            chosen: 0,
            a: a.ptr as *const c_void,
            b: b.ptr as *const c_void,
            out: out.ptr as *mut c_void,
        })
    }

    pub fn run(&self, stream: driver_sys::CUstream) -> Result<()> {
        let (one, zero) = (1f32, 0f32);
        let [b, a, out] = self.layouts;
        // SAFETY: the matrices are as the layouts say, and live as long as the benchmark.
        let result = unsafe {
            lt::matmul(
                self.cublaslt.handle,
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
                self.cublaslt.workspace.ptr() as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        result.map_err(refused("multiply with cuBLASLt"))
    }

    /// Chooses the fastest algorithm by medians, because the best of a few runs is luck. Collective.
    pub fn tune(&mut self, timer: &Timer) -> Result<()> {
        /// Runs of each algorithm that count: as few for long products as take about this many microseconds together.
        const ROUNDS: [usize; 2] = [3, 7];
        const TOGETHER: f64 = 300e3;
        /// An algorithm that takes this many times as long when warm is not tried again.
        const HOPELESS: f64 = 1.5;
        let mut algorithms: Vec<usize> = (0..self.algorithms.len()).collect();
        // The first run loads the kernel.
        self.times(timer, &algorithms, 1)?;
        let warm = self.times(timer, &algorithms, 1)?;
        let fastest = warm.iter().copied().fold(f64::INFINITY, f64::min);
        algorithms.retain(|&algorithm| warm[algorithm] <= HOPELESS * fastest);
        let round: f64 = algorithms.iter().map(|&algorithm| warm[algorithm]).sum();
        let [least, most] = ROUNDS;
        let rounds = ((TOGETHER / round) as usize).clamp(least, most);
        let times = self.times(timer, &algorithms, rounds)?;
        let timed = algorithms.into_iter().zip(times);
        let best = timed.min_by(|(_, one), (_, other)| one.total_cmp(other));
        self.chosen = best.map_or(0, |(algorithm, _)| algorithm);
        Ok(())
    }

    /// The median time of each algorithm on the slowest rank. Algorithms run in turn. Collective.
    fn times(&mut self, timer: &Timer, algorithms: &[usize], rounds: usize) -> Result<Vec<f64>> {
        let mut samples = Vec::new();
        for _ in 0..rounds {
            for &algorithm in algorithms {
                self.chosen = algorithm;
                samples.push([timer.time(|| self.run(timer.stream))?]);
            }
        }
        let samples = common::slowest(&timer.group, &samples)?;
        let of = |place: usize| samples[place..].iter().step_by(algorithms.len());
        let median = |place| {
            let [median] = common::medians(&of(place).copied().collect::<Vec<_>>());
            median
        };
        Ok((0..algorithms.len()).map(median).collect())
    }
}

/// A product in f32 whose first operand is transposed.
fn describe() -> Result<lt_sys::cublasLtMatmulDesc_t> {
    let desc = lt::create_matmul_desc(
        lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        lt_sys::cudaDataType::CUDA_R_32F,
    )
    .map_err(refused(SET_UP))?;
    let transposed = 1i32;
    // SAFETY: the attribute has the type that it names.
    unsafe {
        lt::set_matmul_desc_attribute(
            desc,
            lt_sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
            (&raw const transposed).cast(),
            size_of::<i32>(),
        )
    }
    .map_err(refused(SET_UP))?;
    Ok(desc)
}

/// The algorithms that cuBLASLt proposes, the best first. There is at least one.
fn algorithms(
    cublaslt: &CublasLt,
    desc: lt_sys::cublasLtMatmulDesc_t,
    [b, a, out]: [lt_sys::cublasLtMatrixLayout_t; 3],
) -> Result<Vec<lt_sys::cublasLtMatmulAlgo_t>> {
    let workspace = WORKSPACE_BYTES;
    let preference = lt::create_matmul_pref().map_err(refused(SET_UP))?;
    let mut count = 0;
    // SAFETY: handles are used as they were made, the attribute has the type that it names, and any bits are a valid
    // result.
    let mut found = unsafe {
        lt::set_matmul_pref_attribute(
            preference,
            lt_sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            size_of::<usize>(),
        )
        .map_err(refused(SET_UP))?;
        let mut found: Vec<lt_sys::cublasLtMatmulHeuristicResult_t> =
            vec![std::mem::zeroed(); ALGORITHMS];
        let status = lt_sys::cublasLtMatmulAlgoGetHeuristic(
            cublaslt.handle,
            desc,
            b,
            a,
            out,
            out,
            preference,
            ALGORITHMS as i32,
            found.as_mut_ptr(),
            &mut count,
        );
        status.result().map_err(refused(SET_UP))?;
        lt::destroy_matmul_pref(preference).map_err(refused(SET_UP))?;
        found
    };
    found.truncate(count as usize);
    found.retain(|found| found.state == lt_sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    if found.is_empty() {
        return Err(refused(SET_UP)(format_args!("it knows no algorithm")));
    }
    Ok(found.iter().map(|found| found.algo).collect())
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used again.
        unsafe {
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
            let _ = lt::destroy_matmul_desc(self.desc);
        }
    }
}

/// A collective of NCCL, with parts that are equal on all ranks.
#[derive(Clone, Copy, PartialEq)]
pub enum Collective {
    Gather,
    ReduceScatter,
    AllReduce,
    AllToAll,
    /// From rank 0.
    Broadcast,
}

/// An operation of NCCL.
pub struct Communication {
    pub collective: Collective,
    pub dtype: DType,
    pub from: Scratch,
    pub to: Scratch,
    /// Elements of a rank's part, or of all rows if all ranks get the same.
    pub count: usize,
}

/// NCCL's view of the group.
pub struct Nccl {
    comm: nccl_sys::ncclComm_t,
    world: usize,
}

impl Nccl {
    pub fn new(group: &Group<Cuda>) -> Result<Nccl> {
        let what = "set up NCCL";
        let mut id = nccl_sys::ncclUniqueId { internal: [0; 128] };
        if group.rank() == 0 {
            id = nccl::get_uniqueid().map_err(refused(what))?;
        }
        let bytes = group.all_gather_bytes(&id.internal.map(|c| c as u8))?;
        for (to, from) in id.internal.iter_mut().zip(&bytes[0]) {
            *to = *from as std::ffi::c_char;
        }
        let mut comm = std::ptr::null_mut();
        let (rank, world) = (group.rank() as i32, group.world_size() as i32);
        // SAFETY: the call writes the local, and every rank makes the same call.
        unsafe { nccl::comm_init_rank(&mut comm, world, id, rank) }.map_err(refused(what))?;
        Ok(Nccl {
            comm,
            world: group.world_size(),
        })
    }

    pub fn run(&self, what: &Communication, stream: driver_sys::CUstream) -> Result<()> {
        let &Communication {
            collective, count, ..
        } = what;
        let dtype = match what.dtype {
            DType::F16 => nccl_sys::ncclDataType_t::ncclFloat16,
            _ => nccl_sys::ncclDataType_t::ncclBfloat16,
        };
        let sum = nccl_sys::ncclRedOp_t::ncclSum;
        let (from, to) = (
            what.from.ptr() as *const c_void,
            what.to.ptr() as *mut c_void,
        );
        let stream = stream.cast();
        // SAFETY: a buffer of a part holds `count` elements. A buffer of all parts holds that many for each rank.
        let result = unsafe {
            match collective {
                Collective::Gather => nccl::all_gather(from, to, count, dtype, self.comm, stream),
                Collective::ReduceScatter => {
                    nccl::reduce_scatter(from, to, count, dtype, sum, self.comm, stream)
                }
                Collective::AllReduce => {
                    nccl::all_reduce(from, to, count, dtype, sum, self.comm, stream)
                }
                Collective::Broadcast => {
                    nccl::broadcast(from, to, count, dtype, 0, self.comm, stream)
                }
                Collective::AllToAll => {
                    self.all_to_all([from, to.cast_const()], count, dtype, stream)
                }
            }
        };
        result.map(drop).map_err(refused("communicate with NCCL"))
    }

    /// # Safety
    /// Both hold `count` elements for each rank.
    unsafe fn all_to_all(
        &self,
        [from, to]: [*const c_void; 2],
        count: usize,
        dtype: nccl_sys::ncclDataType_t,
        stream: nccl_sys::cudaStream_t,
    ) -> std::result::Result<nccl::NcclStatus, nccl::NcclError> {
        // Of 16 bits.
        let bytes = 2 * count;
        nccl::group_start()?;
        for peer in 0..self.world {
            let (from, to) = (
                from.wrapping_byte_add(peer * bytes),
                to.wrapping_byte_add(peer * bytes),
            );
            let rank = peer as i32;
            // SAFETY: as this function's.
            unsafe {
                nccl::send(from, count, dtype, rank, self.comm, stream)?;
                nccl::recv(to.cast_mut(), count, dtype, rank, self.comm, stream)?;
            }
        }
        nccl::group_end()
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used again.
        let _ = unsafe { nccl::comm_destroy(self.comm) };
    }
}
