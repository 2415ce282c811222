//! How rows come from one rank to another.

/// Who moves the rows of another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// The copy engine of the rank that needs them. On GPUs the only one that needs no kernel of another rank to run;
    /// an all_gather_matmul can't be captured in a graph.
    Pull,
    /// The copy engine of the rank that owns them. Kernels of all ranks must be able to run at the same time: the
    /// documentation of `Cuda` says what that asks of other kernels on the same GPUs. When an operation fails, a rank
    /// may write to its peers before they are ready: the gathered rows of operations before may be lost too.
    Push,
    /// The kernel of the rank that owns them, by stores of warps that have nothing else to do, or of partial sums by
    /// those that made them: meant for shards so small that a copy engine's start counts. Kernels as for
    /// [`Route::Push`], which it is on the host backend.
    Store,
}
