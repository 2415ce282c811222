//! The native half of the Python package `gemmesh`: Python's objects as [`gemmesh::raw`] takes them, and back.
#![allow(unsafe_code)]

mod callbacks;
mod ending;
mod errors;
mod group;
mod matrix;
mod names;
mod operands;
mod options;
mod prepared;
mod sharded;
mod streams;
mod tensor_calls;
mod tensors;
#[cfg(feature = "timing")]
mod timing;
mod trace;
mod waiting;

use pyo3::prelude::*;

use errors::argument;
use names::Count;

/// What the package `gemmesh` makes its public names of.
#[pymodule]
mod _native {
    #[pymodule_export]
    use super::group::Group;
    #[pymodule_export]
    use super::matrix::Matrix;
    #[pymodule_export]
    use super::operands::{Quantized, Scaled};
    #[pymodule_export]
    use super::prepared::Prepared;
    #[pymodule_export]
    use super::sharded::Sharded;
    #[pymodule_export]
    use super::tensor_calls::TensorCalls;
    #[pymodule_export]
    use super::trace::Trace;

    #[cfg(feature = "timing")]
    #[pymodule_export]
    use super::timing::RustCalls;

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::ending::register(module.py())
    }

    /// True if this build has the CUDA backend.
    #[pymodule_export]
    const HAS_CUDA: bool = cfg!(feature = "cuda");

    /// The version of the library.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    /// Runs this program once for each of `world` ranks, as processes, and waits for them.
    ///
    /// Each has this process's arguments, or `args`: what follows the interpreter on its command line. It joins the
    /// group by `Group.from_env`. What ranks print comes out here, each line after its rank. If a rank fails, the
    /// others have 1.5 seconds to end, and RankError names the rank. Ctrl-C gives all ranks as long. MisuseError if the
    /// program comes from standard input, where no rank could read it again. If all ranks have succeeded, but not all
    /// that they printed could be written, for example because a disk is full, HostError says what is missing.
    ///
    /// Ranks begin in the current folder. If the program has changed it with os.chdir, ranks still find the program and
    /// its modules where they were; other arguments that are relative paths are meant from the current folder.
    ///
    /// With `inherit_stdin=True` rank 0 reads this process's standard input. Otherwise no rank has input.
    #[pyfunction]
    #[pyo3(signature = (world, args=None, *, inherit_stdin=false))]
    fn launch(
        py: Python<'_>,
        world: Count,
        args: Option<Vec<String>>,
        inherit_stdin: bool,
    ) -> PyResult<()> {
        let refuse = |what: String| argument(py, None, "gemmesh.launch", &what);
        let world = world.of("world").map_err(refuse)?;
        super::waiting::launch(py, world, args, inherit_stdin)
    }

    /// True if a launcher has started this process as a rank.
    #[pyfunction]
    fn is_rank() -> bool {
        gemmesh::launch::is_rank()
    }

    /// The launcher that has started this process as a rank, the rank, and the number of ranks. None without a
    /// launcher.
    #[pyfunction]
    fn rank_environment(py: Python<'_>) -> PyResult<Option<(&'static str, usize, usize)>> {
        let described = gemmesh::launch::rank_environment();
        let described = described.map_err(|error| super::errors::exception(py, &error, None))?;
        Ok(described.map(|rank| (rank.launcher, rank.rank, rank.world_size)))
    }

    /// The release of nvcc that compiled the kernels, or None if there are none.
    #[pyfunction]
    fn nvcc_release() -> Option<&'static str> {
        #[cfg(feature = "cuda")]
        return gemmesh::Cuda::nvcc_release();
        #[cfg(not(feature = "cuda"))]
        None
    }
}
