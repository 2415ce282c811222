//! How rows get from one rank to another.

use serde::{Deserialize, Serialize};

/// Who moves rows from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Route {
    /// The copy engine of the rank that receives the rows.
    ///
    /// On GPUs this is the only route that does not need kernels of other ranks to run at the same time. An
    /// all_gather_matmul that pulls can't be captured in a graph.
    Pull,
    /// The copy engine of the rank that sends the rows.
    ///
    /// Kernels of all ranks must be able to run at the same time. The documentation of `Cuda` says what follows for
    /// other kernels on the same GPUs. When an operation fails, a rank may write to its peers before they are ready.
    /// Then the gathered rows of earlier operations may be lost too.
    Push,
    /// The kernel of the rank that sends the rows.
    ///
    /// Idle warps store gathered rows. Partial sums are stored by the warps that computed them, or by a second kernel
    /// ([`Config::product_first`](crate::Config::product_first)). This route is for shards so small that the start of a
    /// copy engine counts. The rules for other kernels are those of
    /// [`Route::Push`]. The host backend treats this route as [`Route::Push`].
    Store,
    /// A network, from one host to another. The rank that sends the rows and the rank that receives them both take part.
    ///
    /// It is how rows go from host to host, whatever the configuration says. A configuration can't choose it.
    Net,
}
