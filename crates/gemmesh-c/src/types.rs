//! The enumerations and structs of the header.

use std::ffi::{c_char, c_int, c_void};

use crate::numbers::*;
use crate::sharded::gemmesh_sharded;

/// Where a group's matrices are and its operations run.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_backend {
    /// In the process's memory, on its cores.
    GEMMESH_HOST = 0,
    /// On an NVIDIA GPU, if the library was built for it. Addresses are those of the device (CUdeviceptr).
    GEMMESH_CUDA = 1,
}

/// What the bits of results may depend on.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_numerics {
    /// As GEMMESH_NUMERICS_FAST; for a part of a group, as that group.
    GEMMESH_NUMERICS_DEFAULT = 0,
    /// On all that affects speed.
    GEMMESH_NUMERICS_FAST = 1,
    /// On K, the type of the elements and the device only. A row has the same bits in every batch.
    GEMMESH_NUMERICS_INVARIANT = 2,
}

/// The type of elements.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_dtype {
    /// No type is given.
    GEMMESH_NO_DTYPE = 0,
    /// bfloat16: 8 bits of exponent, 7 of fraction.
    GEMMESH_BF16 = 1,
    /// IEEE 754 binary16.
    GEMMESH_F16 = 2,
    /// IEEE 754 binary32.
    GEMMESH_F32 = 3,
    /// fp8 with 4 bits of exponent and 3 of fraction, up to 448, without infinity.
    GEMMESH_F8E4M3 = 4,
    /// fp8 with 5 bits of exponent and 2 of fraction, up to 57344.
    GEMMESH_F8E5M2 = 5,
    /// A byte.
    GEMMESH_U8 = 6,
    /// 16 bits.
    GEMMESH_U16 = 7,
    /// 32 bits.
    GEMMESH_U32 = 8,
    /// 64 bits.
    GEMMESH_U64 = 9,
}

/// Which product. W is the number of ranks.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_product_kind {
    /// out [M, N] = a [M, K] * weight [N, K]^T, on this rank alone.
    GEMMESH_MATMUL = 0,
    /// The same, where a is sharded: its rows are gathered while they are multiplied. Afterwards a holds all rows on
    /// every rank. N may differ between ranks. Collective.
    GEMMESH_ALL_GATHER_MATMUL = 1,
    /// Each rank has a part of K. Each rank gets its rows of the sum of all ranks' products: out is [own rows, N], or a
    /// sharded matrix [M, N], of which this rank's rows are written. Collective.
    GEMMESH_MATMUL_REDUCE_SCATTER = 2,
    /// Each rank has a part of K. Every rank gets the whole sum, in a sharded matrix [M, N]. Collective.
    GEMMESH_MATMUL_ALL_REDUCE = 3,
}

/// What is applied to a product, or to a sum of products, after the bias and before the residual.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_activation {
    /// x
    GEMMESH_IDENTITY = 0,
    /// max(x, 0)
    GEMMESH_RELU = 1,
    /// x * Phi(x), with the distribution function of the standard normal distribution.
    GEMMESH_GELU = 2,
    /// The tanh approximation of GELU.
    GEMMESH_GELU_TANH = 3,
    /// x / (1 + exp(-x)), also called swish.
    GEMMESH_SILU = 4,
}

/// How weights are stored.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_weight_layout {
    /// [N, K], as PyTorch's linear layers store it.
    GEMMESH_WEIGHTS_NK = 0,
    /// [K, N].
    GEMMESH_WEIGHTS_KN = 1,
}

/// Who moves rows between ranks.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_route {
    /// The library chooses.
    GEMMESH_ROUTE_DEFAULT = 0,
    /// The copy engine of the rank that needs them.
    GEMMESH_ROUTE_PULL = 1,
    /// The copy engine of the rank that owns them.
    GEMMESH_ROUTE_PUSH = 2,
    /// A kernel of the rank that owns them.
    GEMMESH_ROUTE_STORE = 3,
}

/// How products of fp8 are summed on GPUs.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_accumulation {
    /// Every 128 of K are summed separately. These sums are then added in f32.
    GEMMESH_ACCUMULATION_PROMOTED = 0,
    /// Tensor cores may sum all of K, with about 13 bits. It takes less time, and the error grows with K.
    GEMMESH_ACCUMULATION_FAST = 1,
}

/// Which values of an operand of fp8 share a scale. A value is its fp8 number times its scale. Scales are f32.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_scaling_kind {
    /// There are no scales.
    GEMMESH_SCALING_NONE = 0,
    /// All: [1, 1].
    GEMMESH_SCALING_TENSOR = 1,
    /// Those of a row: [1, M] for a, [1, N] for a weight.
    GEMMESH_SCALING_ROWS = 2,
    /// Those of a block. A block of a is 1 x 128: [M, ceil((first_column + K)/128)]. A block of a weight is 128 x 128:
    /// [ceil((first_row + N)/128), ceil((first_column + K)/128)].
    GEMMESH_SCALING_BLOCKS = 3,
    /// Blocks of a, with the scales of a row in a column: [ceil(K/128), M].
    GEMMESH_SCALING_TRANSPOSED_BLOCKS = 4,
    /// Those of a row of a sharded a. The scales are sharded with it: [M, gemmesh_scale_columns()].
    GEMMESH_SCALING_SHARDED_ROWS = 5,
    /// Blocks of a sharded a. The scales are sharded with it: [M, gemmesh_scale_columns()].
    GEMMESH_SCALING_SHARDED_BLOCKS = 6,
}

/// How an output becomes fp8.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_quantization_kind {
    /// It does not, or it is rounded without a scale.
    GEMMESH_QUANTIZATION_NONE = 0,
    /// By one scale, [1, 1], that the caller gives.
    GEMMESH_QUANTIZATION_TENSOR = 1,
    /// By a scale for each 128 columns of a row, which the call makes: [M, ceil(N/128)].
    GEMMESH_QUANTIZATION_BLOCKS = 2,
    /// The same, with the scales of a row in a column: [ceil(N/128), M].
    GEMMESH_QUANTIZATION_TRANSPOSED_BLOCKS = 3,
}

/// A row-major matrix in this rank's memory. It describes memory and owns none. The memory stays valid until the calls
/// that get it are complete (gemmesh_synchronize), and no one else writes it meanwhile.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_memory {
    /// The first element. On the CUDA backend an address of the device.
    pub address: *mut c_void,
    /// The type of the elements.
    pub dtype: DtypeNumber,
    /// The number of rows.
    pub rows: usize,
    /// The number of columns.
    pub columns: usize,
    /// Bytes from row to row, a multiple of gemmesh_group_row_alignment. 0: the rows lie one after the other.
    pub pitch: usize,
}

/// Consecutive rows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct gemmesh_range {
    /// The first row.
    pub first: usize,
    /// The number of rows.
    pub count: usize,
}

/// Options of a group. gemmesh_group_options_default() returns the default ones.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_group_options {
    /// sizeof(gemmesh_group_options)
    pub struct_size: usize,
    /// Where the group's matrices are. Ignored by gemmesh_group_split, whose part has its group's.
    pub backend: BackendNumber,
    /// What the bits of results may depend on.
    pub numerics: NumericsNumber,
    /// How long a rank waits in a call that all ranks have begun, in milliseconds. 0: 30 seconds.
    pub timeout_ms: u64,
    /// How long a rank waits for ranks that have not come to a call, in milliseconds. 0: as long as they live, and ten
    /// minutes until all have joined.
    pub arrival_timeout_ms: u64,
    /// How long the system of another host may acknowledge nothing before the host is lost, in milliseconds. 0: 1250.
    /// Less than 500 is taken for 500.
    pub host_timeout_ms: u64,
    /// Threads that work for this rank on the host backend. 0: this rank's part of the cores.
    pub workers: usize,
    /// The GPU, as CUDA numbers it in this process. Negative: the ranks take the visible GPUs in turn.
    pub device: i64,
    /// How many CTAs a product's kernel has at most. 0: as many as the GPU takes.
    pub max_ctas: usize,
    /// The group's name in errors, or NULL. All ranks give the same.
    pub name: *const c_char,
}

/// How an operand is scaled.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_scaling {
    /// Which values share a scale.
    pub kind: ScalingKindNumber,
    /// Of the blocks of a weight: the weight's first row within its first block, a multiple of 16 below 128.
    pub first_row: usize,
    /// Of GEMMESH_SCALING_BLOCKS: the first column within its first block, a multiple of 16 below 128. It is the same for
    /// a and all weights.
    pub first_column: usize,
}

/// How an output is quantised.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_quantization {
    /// By which scales.
    pub kind: QuantizationKindNumber,
    /// Not 0: scales that are made are rounded up to powers of two.
    pub power_of_two: c_int,
    /// Of GEMMESH_QUANTIZATION_BLOCKS: the first column within its first block, a multiple of 16 below 128. The scales are
    /// then [M, ceil((first_column + N)/128)].
    pub first_column: usize,
}

/// An operand in this rank's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_operand {
    /// The values.
    pub values: gemmesh_memory,
    /// Their scales, or NULL if there are none.
    pub scales: *const gemmesh_memory,
    /// How the scales belong to the values.
    pub scaling: gemmesh_scaling,
}

/// A sharded operand. At most one of the two kinds of scales is given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_sharded_operand {
    /// The values.
    pub values: *const gemmesh_sharded,
    /// Scales that this rank has for all rows, or NULL.
    pub own_scales: *const gemmesh_memory,
    /// Scales that are gathered with the rows, or NULL.
    pub sharded_scales: *const gemmesh_sharded,
    /// How the scales belong to the values.
    pub scaling: gemmesh_scaling,
}

/// An output in this rank's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_output {
    /// The values.
    pub values: gemmesh_memory,
    /// The scales of a quantised output, or NULL.
    pub scales: *const gemmesh_memory,
    /// How the output is quantised, if it has scales.
    pub quantization: gemmesh_quantization,
}

/// A product. gemmesh_product_default() returns one with default options.
///
/// A result is activation(a * weight + bias) + residual in f32, rounded once.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_product {
    /// sizeof(gemmesh_product)
    pub struct_size: usize,
    /// Which product.
    pub kind: ProductKindNumber,
    /// The type of a: GEMMESH_BF16, GEMMESH_F16, GEMMESH_F8E4M3 or GEMMESH_F8E5M2.
    pub dtype: DtypeNumber,
    /// What is applied to the result.
    pub activation: ActivationNumber,
    /// How the weights are stored.
    pub weight_layout: WeightLayoutNumber,
    /// How products of fp8 are summed.
    pub accumulation: AccumulationNumber,
    /// Not 0: of two weights, activation(a * first) * (a * second) is the one output. The first is the gate.
    pub gated: c_int,
    /// Not 0: the weights do not change from call to call. GPUs then load them before the rank's earlier work is done.
    pub constant_weights: c_int,
    /// In how many stages GEMMESH_ALL_GATHER_MATMUL gathers. 0: one.
    pub stages: usize,
    /// How many rows of the sum each rank gets of GEMMESH_MATMUL_REDUCE_SCATTER, one number for each rank. NULL:
    /// evenly.
    pub rows: *const usize,
    /// How many numbers `rows` has.
    pub row_count: usize,
    /// For gemmesh_prepare and gemmesh_supported: the type of the weights. GEMMESH_NO_DTYPE: that of a, or
    /// GEMMESH_F8E4M3 if a is fp8.
    pub weight_dtype: DtypeNumber,
    /// For gemmesh_prepare and gemmesh_supported: the type of the outputs. GEMMESH_NO_DTYPE: GEMMESH_F8E4M3 if they are
    /// quantised, otherwise that of a, or GEMMESH_BF16 if a is fp8.
    pub output_dtype: DtypeNumber,
    /// For gemmesh_prepare and gemmesh_supported: how a is scaled.
    pub scaling: gemmesh_scaling,
    /// For gemmesh_prepare and gemmesh_supported: how the weights are scaled, one entry for each or one for all.
    pub weight_scaling: *const gemmesh_scaling,
    /// How many entries `weight_scaling` has.
    pub weight_scaling_count: usize,
    /// For gemmesh_prepare and gemmesh_supported: how the outputs are quantised.
    pub quantization: gemmesh_quantization,
    /// For gemmesh_prepare: who moves rows. All ranks give the same. A gather that pulls cannot be captured in a CUDA
    /// graph.
    pub route: RouteNumber,
}

/// The arguments of a product. gemmesh_product_call_default() returns one without arguments.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_product_call {
    /// sizeof(gemmesh_product_call)
    pub struct_size: usize,
    /// a, if it is this rank's own. Otherwise NULL.
    pub a: *const gemmesh_operand,
    /// a, if it is sharded. Otherwise NULL.
    pub sharded_a: *const gemmesh_sharded_operand,
    /// From one weight to four.
    pub weights: *const gemmesh_operand,
    /// How many weights there are.
    pub weight_count: usize,
    /// An output for each weight, or one if the product is gated. NULL if the output is sharded.
    pub outputs: *const gemmesh_output,
    /// How many outputs there are.
    pub output_count: usize,
    /// The sums, if they go to a sharded matrix. Otherwise NULL.
    pub sharded_output: *const gemmesh_sharded,
    /// [1, N], or NULL. Either all ranks give one or none does.
    pub bias: *const gemmesh_memory,
    /// Of the shape of the result, or NULL. Either all ranks give one or none does.
    pub residual: *const gemmesh_memory,
}

/// Rows that a callback gets.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct gemmesh_rows {
    /// Their numbers. Rows that have arrived are numbered in the matrix. Rows to be made are numbered among the rows of
    /// the sum or, for gemmesh_produce_and_all_to_all, among those for the rank.
    pub rows: gemmesh_range,
    /// The rank that owns rows that have arrived, or that gets rows to be made.
    pub rank: usize,
    /// Where they are, or have to be written.
    pub memory: gemmesh_memory,
    /// The CUstream for the work that reads or makes them. NULL on the host backend.
    pub stream: *mut c_void,
}

/// A function that sends this rank's `bytes` bytes to all ranks, and writes those of all ranks to `all`, by rank: as
/// MPI_Allgather. It returns 0 or an error. It must not throw.
pub type gemmesh_gather = Option<
    unsafe extern "C" fn(
        mine: *const c_void,
        all: *mut c_void,
        bytes: usize,
        context: *mut c_void,
    ) -> c_int,
>;

/// A function that gets rows or makes them. It returns 0, or an error, after which the group has failed: other ranks get
/// GEMMESH_ERROR_RANK from this call or their next one. It may say why by gemmesh_set_reason. It must not throw, nor call
/// a function of the same group.
pub type gemmesh_on_rows =
    Option<unsafe extern "C" fn(rows: *const gemmesh_rows, context: *mut c_void) -> c_int>;
