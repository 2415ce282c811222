//! The baselines, through cudarc: cuBLASLt for products, NCCL for communication.

use std::ffi::c_void;
use std::rc::Rc;

use cudarc::cublaslt::{result as lt, sys as lt_sys};
use cudarc::driver::sys as driver_sys;
use cudarc::nccl::{result as nccl, sys as nccl_sys};
use gemmesh::{Cuda, DType, Group, Result};

use super::clock::Timer;
use super::memory::{Place, Scratch, refused};
use super::scales::Scale;
use crate::common;
use crate::common::scales::ScaleValues;

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

/// A product for cuBLASLt: out[M, N] = a[M, K] · b[N, K]ᵀ, row-major. For cuBLASLt, which is column-major, it is out' =
/// b' · a'. The memory holds matrices of this shape, and lives as long as this value.
#[derive(Clone)]
pub struct Problem {
    pub a: Place,
    pub b: Place,
    pub out: Place,
    pub shape: [usize; 3],
    scales: Rc<[Option<Scale>; 2]>,
}

impl Problem {
    pub fn new(a: Place, b: Place, out: Place, shape: [usize; 3]) -> Problem {
        Problem {
            a,
            b,
            out,
            shape,
            scales: Rc::new([None, None]),
        }
    }

    /// Scales `a` and `b`.
    pub fn scaled(self, [of_a, of_b]: [Option<&ScaleValues>; 2]) -> Result<Problem> {
        let scales = Rc::new([Scale::of_rows(of_a)?, Scale::of_weight(of_b)?]);
        Ok(Problem { scales, ..self })
    }
}

/// How cuBLASLt adds up products of fp8.
#[derive(Clone, Copy, PartialEq)]
pub enum Accumulation {
    /// Sums are promoted to f32 now and then, as gemmesh's are.
    Promoted,
    Fast,
}

/// One product by cuBLASLt.
pub struct Product {
    cublaslt: Rc<CublasLt>,
    handles: Handles,
    algorithms: Vec<lt_sys::cublasLtMatmulAlgo_t>,
    /// The algorithm that runs.
    pub chosen: usize,
    problem: Problem,
}

impl Product {
    /// A product that cuBLASLt can do.
    pub fn new(cublaslt: &Rc<CublasLt>, problem: &Problem) -> Result<Product> {
        let found = Product::find(cublaslt, problem, Accumulation::Promoted)?;
        found.ok_or_else(|| refused(SET_UP)(format_args!("it knows no algorithm")))
    }

    /// None if cuBLASLt refuses the product.
    pub fn find(
        cublaslt: &Rc<CublasLt>,
        problem: &Problem,
        accumulation: Accumulation,
    ) -> Result<Option<Product>> {
        let [m, ..] = problem.shape;
        let [of_a, _] = &*problem.scales;
        if of_a.as_ref().is_some_and(|scale| !scale.fits(m)) {
            return Ok(None);
        }
        let Some(handles) = Handles::new(problem, accumulation)? else {
            return Ok(None);
        };
        let algorithms = algorithms(cublaslt, &handles)?;
        Ok((!algorithms.is_empty()).then(|| Product {
            cublaslt: cublaslt.clone(),
            handles,
            algorithms,
            chosen: 0,
            problem: problem.clone(),
        }))
    }

    /// The product by the fastest of its algorithms that run. None if none does. Collective.
    pub fn tuned(mut self, timer: &Timer) -> Result<Option<Product>> {
        let mut running = Vec::new();
        for chosen in 0..self.algorithms.len() {
            self.chosen = chosen;
            if self.enqueue(timer.stream).is_ok() {
                running.push(self.algorithms[chosen]);
            }
        }
        if running.is_empty() {
            return Ok(None);
        }
        self.algorithms = running;
        self.tune(timer)?;
        Ok(Some(self))
    }

    pub fn run(&self, stream: driver_sys::CUstream) -> Result<()> {
        self.enqueue(stream)
            .map_err(refused("multiply with cuBLASLt"))
    }

    fn enqueue(&self, stream: driver_sys::CUstream) -> std::result::Result<(), lt::CublasError> {
        let (one, zero) = (1f32, 0f32);
        let Handles {
            desc,
            layouts: [b, a, c, out],
        } = self.handles;
        let Problem {
            a: of_a,
            b: of_b,
            out: of_out,
            ..
        } = &self.problem;
        // Nothing is added, so C is not read.
        // SAFETY: the matrices are as the layouts say, and live as long as the benchmark.
        unsafe {
            lt::matmul(
                self.cublaslt.handle,
                desc,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                of_b.ptr as *const c_void,
                b,
                of_a.ptr as *const c_void,
                a,
                match of_out.dtype.is_fp8() {
                    true => std::ptr::null(),
                    false => of_out.ptr as *const c_void,
                },
                c,
                of_out.ptr as *mut c_void,
                out,
                &self.algorithms[self.chosen],
                self.cublaslt.workspace.ptr() as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        }
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

fn kind_of(dtype: DType) -> lt_sys::cudaDataType {
    match dtype {
        DType::F8E4M3 => lt_sys::cudaDataType::CUDA_R_8F_E4M3,
        DType::F16 => lt_sys::cudaDataType::CUDA_R_16F,
        DType::F32 => lt_sys::cudaDataType::CUDA_R_32F,
        _ => lt_sys::cudaDataType::CUDA_R_16BF,
    }
}

/// cuBLASLt's descriptions of a product and of its matrices: b, a, C and out.
struct Handles {
    desc: lt_sys::cublasLtMatmulDesc_t,
    layouts: [lt_sys::cublasLtMatrixLayout_t; 4],
}

impl Handles {
    /// A product in f32 whose first operand is transposed. None if cuBLASLt does not know its scales.
    fn new(problem: &Problem, accumulation: Accumulation) -> Result<Option<Handles>> {
        let [m, n, k] = problem.shape;
        let desc = lt::create_matmul_desc(
            lt_sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            lt_sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(refused(SET_UP))?;
        let layout = |rows: usize, columns: usize, place: Place| {
            let (kind, pitch) = (kind_of(place.dtype), place.pitch as i64);
            lt::create_matrix_layout(kind, rows as u64, columns as u64, pitch)
                .map_err(refused(SET_UP))
        };
        // C has no type of 8 bits.
        let c = match problem.out.dtype {
            DType::F8E4M3 => DType::Bf16,
            other => other,
        };
        let c = Place {
            dtype: c,
            ..problem.out
        };
        let handles = Handles {
            desc,
            layouts: [
                layout(k, n, problem.b)?,
                layout(k, m, problem.a)?,
                layout(n, m, c)?,
                layout(n, m, problem.out)?,
            ],
        };
        use lt_sys::cublasLtMatmulDescAttributes_t as Attribute;
        let transposed = 1i32;
        handles
            .set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)
            .map_err(refused(SET_UP))?;
        let fast = i8::from(accumulation == Accumulation::Fast);
        let told = || {
            handles.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast)?;
            let [of_a, of_b] = &*problem.scales;
            if let Some(scale) = of_b {
                handles.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &scale.mode)?;
                handles.set(
                    Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                    &scale.ptr(),
                )?;
            }
            if let Some(scale) = of_a {
                handles.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &scale.mode)?;
                handles.set(
                    Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                    &scale.ptr(),
                )?;
            }
            Ok(())
        };
        let told: std::result::Result<(), lt::CublasError> = match problem.a.dtype.is_fp8() {
            true => told(),
            false => Ok(()),
        };
        match told {
            Ok(()) => Ok(Some(handles)),
            Err(error) if is_refusal(error) => Ok(None),
            Err(error) => Err(refused(SET_UP)(error)),
        }
    }

    fn set<V>(
        &self,
        attribute: lt_sys::cublasLtMatmulDescAttributes_t,
        value: &V,
    ) -> std::result::Result<(), lt::CublasError> {
        let value: *const V = value;
        // SAFETY: the description lives, and the attribute has the type that it names.
        unsafe { lt::set_matmul_desc_attribute(self.desc, attribute, value.cast(), size_of::<V>()) }
    }
}

impl Drop for Handles {
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

/// True if this says that the problem can't be solved, rather than that something failed.
fn is_refusal(lt::CublasError(status): lt::CublasError) -> bool {
    use lt_sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
    matches!(
        status,
        CUBLAS_STATUS_NOT_SUPPORTED | CUBLAS_STATUS_INVALID_VALUE
    )
}

/// The algorithms that cuBLASLt proposes, the best first. There are none if it refuses the product.
fn algorithms(cublaslt: &CublasLt, handles: &Handles) -> Result<Vec<lt_sys::cublasLtMatmulAlgo_t>> {
    let [b, a, c, out] = handles.layouts;
    let workspace = WORKSPACE_BYTES;
    let preference = lt::create_matmul_pref().map_err(refused(SET_UP))?;
    let mut count = 0;
    // SAFETY: handles are used as they were made, the attribute has the type that it names, and any bits are a valid
    // result.
    let (status, mut found) = unsafe {
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
            handles.desc,
            b,
            a,
            c,
            out,
            preference,
            ALGORITHMS as i32,
            found.as_mut_ptr(),
            &mut count,
        );
        lt::destroy_matmul_pref(preference).map_err(refused(SET_UP))?;
        (status, found)
    };
    match status.result() {
        Ok(()) => found.truncate(count as usize),
        Err(error) if is_refusal(error) => found.clear(),
        Err(error) => return Err(refused(SET_UP)(error)),
    }
    found.retain(|found| found.state == lt_sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
    Ok(found.iter().map(|found| found.algo).collect())
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
            DType::F8E4M3 => nccl_sys::ncclDataType_t::ncclUint8,
            DType::F16 => nccl_sys::ncclDataType_t::ncclFloat16,
            DType::F32 => nccl_sys::ncclDataType_t::ncclFloat32,
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
