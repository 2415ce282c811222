//! The operations.

pub(crate) mod all_gather_and_consume;
mod all_gather_matmul;
mod bare;
pub(crate) mod call;
mod callback;
pub(crate) mod collectives;
mod matmul;
mod matmul_all_reduce;
mod matmul_reduce_scatter;
mod operands;
pub(crate) mod overlap;
pub(crate) mod planned_product;
pub(crate) mod produce;
pub(crate) mod product;
mod product_builder;
mod product_form;
pub(crate) mod product_operands;
mod product_parts;
pub(crate) mod quantize;
pub(crate) mod quantized;
mod row_split;
pub(crate) mod scales;

pub use all_gather_and_consume::{AllGatherAndConsume, Chunk, all_gather_and_consume};
pub use all_gather_matmul::{AllGatherMatmul, all_gather_matmul};
pub use bare::run_schedule;
pub use callback::CallbackResult;
pub use collectives::{
    all_gather, all_reduce, all_to_all, all_to_all_with_counts, broadcast, reduce_scatter,
};
pub use matmul::{Matmul, PreparedMatmul, matmul};
pub use matmul_all_reduce::{MatmulAllReduce, PreparedAllReduce, matmul_all_reduce};
pub use matmul_reduce_scatter::{
    MatmulReduceScatter, PreparedReduceScatter, matmul_reduce_scatter,
};
pub use operands::{AddendView, Outputs, WeightScaling, WeightWidths, Weights};
pub use produce::{
    Block, ProduceAndAllToAll, ProduceAndReduceScatter, produce_and_all_to_all,
    produce_and_reduce_scatter,
};
pub use product_builder::{Prepared, ProductBuilder};
pub use product_form::{
    GatherProduct, LocalProduct, OfAllRanks, OutputLike, OwnOutputs, OwnRows, OwnRowsLike,
    ProductForm, ReduceProduct, ScatterProduct, SeveralWeights, SharedOutput,
};
pub use quantize::{PreparedQuantize, Quantize, quantize};
pub use quantized::{Quantized, QuantizedOutput};
pub use row_split::RowSplit;
pub use scales::{Operand, Scales, ShardedOperand, ShardedScales};
