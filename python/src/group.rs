//! Groups: who the ranks are, and what they do together.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use gemmesh::DType;
use gemmesh::error::called_at;
use gemmesh::pipelines::{AllGatherAndConsume, ProduceAndAllToAll, ProduceAndReduceScatter};
use gemmesh::products::RowSplit;
use gemmesh::raw::{
    self, AnyGroup, AnyProduct, AnyShards, BackendKind, Joining, ProductKind, Split, join,
};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::callbacks::{Function, require_callable};
use crate::ending::{attached, called};
use crate::errors::{exception, misuse, of_outer};
use crate::matrix::{Freed, Kept, Matrix};
use crate::names::{self, Count, Said, count, counts, pairs};
use crate::operands::{Reader, keeper_of};
use crate::options::{self, Asked, kind_of};
use crate::prepared::{self, Given, Prepared, reader_of};
use crate::sharded::Sharded;
use crate::streams::{self, CallStream};
use crate::trace::Trace;
use crate::waiting::{enqueued, enqueued_on, left_behind, waited};

/// This rank's membership of a group of ranks that multiply together.
///
/// `from_env` joins the ranks of a launcher (torchrun, mpirun, srun, gemmesh.launch), `connect` the processes that give
/// the same address, `from_callback` those that can gather bytes, and `from_store` those of a PyTorch store.
///
/// All ranks make the same collective calls in the same order. A group is a context manager: at its end the group is
/// closed, and if an exception ends it, the other ranks get the exception's words.
#[pyclass(frozen, module = "gemmesh", weakref)]
pub struct Group(RwLock<Option<Freed<Arc<dyn AnyGroup>>>>);

impl Group {
    fn of(group: Arc<dyn AnyGroup>) -> Group {
        Group(RwLock::new(Some(Freed::new(group))))
    }

    /// The group, unless it is closed.
    pub fn get(&self, py: Python<'_>) -> PyResult<Arc<dyn AnyGroup>> {
        let group = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match &*group {
            Some(group) => Ok(Arc::clone(group)),
            None => Err(misuse(py, "the group is closed")),
        }
    }

    /// Joins a group by `call`, whose ranks can gather bytes by the function `gather`.
    fn gathering(
        py: Python<'_>,
        call: &str,
        gather: Py<PyAny>,
        (rank, world): (usize, usize),
        (backend, options): (&str, Option<&Bound<'_, PyDict>>),
    ) -> PyResult<Group> {
        let (backend, options) = options::of_new_group(py, call, Some(rank), backend, options)?;
        let raised = Arc::new(std::sync::Mutex::new(None));
        let noted = raised.clone();
        let joined = left_behind(py, Some(rank), move || {
            let mut gather = move |mine: &[u8; gemmesh::GATHERED_BYTES]| {
                let gathered = attached(|py| {
                    let mine = PyTuple::new(py, [PyBytes::new(py, mine)]);
                    let gathered = mine.and_then(|mine| called(gather.bind(py), &mine));
                    let gathered = gathered.and_then(|all| all.extract::<Vec<Vec<u8>>>());
                    gathered.map_err(|error| {
                        let words = error.to_string();
                        *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                        words.into()
                    })
                });
                gathered.unwrap_or_else(|| Err("the interpreter ends".into()))
            };
            let gather = &mut gather;
            join(
                backend,
                options,
                Joining::Gather {
                    rank,
                    world,
                    gather,
                },
            )
        });
        joined.map(Group::of).inspect_err(|error| {
            let raised = raised.lock().unwrap_or_else(PoisonError::into_inner).take();
            if raised.is_some() {
                error.set_cause(py, raised);
            }
        })
    }

    /// Makes a product that is planned when it is called.
    fn product(
        &self,
        py: Python<'_>,
        kind: ProductKind,
        asked: Asked<'_, '_>,
        given: &Given<'_, '_>,
    ) -> PyResult<Py<PyAny>> {
        let group = self.get(py)?;
        let refuse = |what: String| reader_of(&*group, kind).refuse(py, &what);
        let product = asked.product(kind).map_err(refuse)?;
        prepared::run(py, &group, product, given)
    }
}

/// Joining, closing, waiting.
#[pymethods]
impl Group {
    /// Joins the group that this process's launcher describes in the environment: torchrun, mpirun, srun,
    /// gemmesh.launch.
    ///
    /// backend: "cuda" (NVIDIA GPUs, a process and a GPU for each rank) or "host" (any machine).
    /// Options: timeout, arrival_timeout and host_timeout (seconds), workers (threads of a rank on the host), device (the GPU's
    /// ordinal), max_ctas, numerics ("fast" or "invariant"), name.
    #[staticmethod]
    #[pyo3(signature = (*, backend="cuda", **options))]
    fn from_env(
        py: Python<'_>,
        backend: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        let (backend, options) =
            options::of_new_group(py, "Group.from_env", None, backend, options)?;
        let group = left_behind(py, None, move || join(backend, options, Joining::Env))?;
        Ok(Group::of(group))
    }

    /// Joins, as `rank`, the group of `world` ranks on this host that give the same `address`, which is any text.
    ///
    /// Ranks on the host backend may be threads. Backend and options are those of `from_env`.
    #[staticmethod]
    #[pyo3(signature = (rank, world, address, *, backend="cuda", **options))]
    fn connect(
        py: Python<'_>,
        rank: Count,
        world: Count,
        address: String,
        backend: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        const CALL: &str = "Group.connect";
        let (rank, world) = options::place(py, CALL, rank, world)?;
        let (backend, options) = options::of_new_group(py, CALL, Some(rank), backend, options)?;
        let group = left_behind(py, Some(rank), move || {
            let address = &address;
            join(
                backend,
                options,
                Joining::Address {
                    rank,
                    world,
                    address,
                },
            )
        })?;
        Ok(Group::of(group))
    }

    /// Joins, as `rank`, a group of `world` ranks that can send one another bytes.
    ///
    /// `gather(mine: bytes) -> list[bytes]` sends this rank's bytes to all ranks and returns those of all ranks, by
    /// rank. It is called once, as mpi4py's `comm.allgather`. Backend and options are those of `from_env`.
    #[staticmethod]
    #[pyo3(signature = (gather, rank, world, *, backend="cuda", **options))]
    fn from_callback(
        py: Python<'_>,
        gather: Py<PyAny>,
        rank: Count,
        world: Count,
        backend: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        const CALL: &str = "Group.from_callback";
        let place = options::place(py, CALL, rank, world)?;
        Group::gathering(py, CALL, gather, place, (backend, options))
    }

    /// Joins, as `rank`, a group of `world` ranks that share a `torch.distributed.Store`.
    ///
    /// A job may make several groups with one store: all ranks make them in the same order. Backend and options are
    /// those of `from_env`.
    #[staticmethod]
    #[pyo3(signature = (store, rank, world, *, backend="cuda", **options))]
    fn from_store(
        py: Python<'_>,
        store: &Bound<'_, PyAny>,
        rank: Count,
        world: Count,
        backend: &str,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        const CALL: &str = "Group.from_store";
        let (rank, world) = options::place(py, CALL, rank, world)?;
        let gather = py.import("gemmesh._store")?.getattr("gather_by")?;
        let gather = gather.call1((store, rank, world))?.unbind();
        let joined = Group::gathering(py, CALL, gather, (rank, world), (backend, options));
        joined.map_err(|error| of_outer(py, error, "Group.from_callback", CALL))
    }

    /// Splits the group: ranks that give the same `color` become a group of their own, in the order of their keys, and of
    /// their ranks in this group where keys are equal or not given. Collective. Options that are not given are those of
    /// this group.
    #[pyo3(signature = (color, key=None, **options))]
    fn split(
        &self,
        py: Python<'_>,
        color: Count,
        key: Option<Count>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "Group.split");
        let refuse = |what: String| reader.refuse(py, &what);
        let color = color.of("color").map_err(refuse)?;
        let key = count("key", key).map_err(refuse)?.unwrap_or(0);
        let options = options::of_group(options, refuse)?;
        let part = waited(py, &*group, || group.split(options, color, key))?;
        Ok(Group::of(part))
    }

    /// Ends this rank's part in the group, when its operations are complete. Matrices and prepared calls keep it alive.
    fn close(&self, py: Python<'_>) {
        let group = self
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        py.detach(|| drop(group));
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// Closes the group. If an exception ends the block, the other ranks get its words first.
    fn __exit__(
        &self,
        py: Python<'_>,
        class: Option<&Bound<'_, PyAny>>,
        error: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        if class.is_some()
            && let Ok(group) = self.get(py)
        {
            let error = error.map(|error| PyErr::from_value(error.clone()));
            let words = error.map_or_else(|| "an exception".into(), |error| error.to_string());
            py.detach(|| group.fail(&words));
        }
        self.close(py);
        Ok(())
    }

    /// This rank's number, from 0 to world_size - 1.
    #[getter]
    fn rank(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.rank())
    }

    /// The number of ranks.
    #[getter]
    fn world_size(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(self.get(py)?.world_size())
    }

    /// The group's name, or None.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<Option<String>> {
        Ok(self.get(py)?.name().map(String::from))
    }

    /// "cuda" or "host".
    #[getter]
    fn backend(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.get(py)?.backend() {
            BackendKind::Host => "host",
            BackendKind::Cuda => "cuda",
        })
    }

    /// DLPack's type and number of this rank's device: (1, 0) on the host, (2, ordinal) on a GPU.
    #[getter]
    fn device(&self, py: Python<'_>) -> PyResult<(i32, i32)> {
        let device = self.get(py)?.device();
        Ok((device.device_type, device.device_id))
    }

    /// The stream of this rank's next operation if it gets no tensors, a CUstream as a number. 0 on the host, and for the
    /// legacy default stream.
    #[getter]
    fn stream(&self, py: Python<'_>) -> PyResult<usize> {
        let group = self.get(py)?;
        let stream = streams::of_own(py, &*group)?;
        Ok(stream.map_or_else(|| group.stream(), |stream| stream.raw))
    }

    /// Puts later operations on `stream`, a CUstream as a number, instead of the current stream of PyTorch or CuPy. It
    /// must live until a different one is set or the group has ended. Does nothing on the host.
    ///
    /// Operations on tensors of PyTorch or CuPy are still put on the current stream of the library.
    fn set_stream(&self, py: Python<'_>, stream: Count) -> PyResult<()> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::alone(&*group, "Group.set_stream").refuse(py, &what);
        let stream = stream.of("stream").map_err(refuse)?;
        // SAFETY: the caller keeps the stream.
        enqueued(py, &*group, || unsafe { group.set_stream(stream) })
    }

    /// Waits until this rank's operations are complete.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.get(py)?;
        waited(py, &*group, || group.synchronize())
    }

    /// Waits until every rank has called it. Collective.
    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.get(py)?;
        waited(py, &*group, || group.barrier())
    }

    /// Sends `data` to every rank, and returns what each rank sent, by rank. Collective; for small messages.
    fn all_gather_bytes<'py>(
        &self,
        py: Python<'py>,
        data: &[u8],
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let group = self.get(py)?;
        let all = waited(py, &*group, || group.all_gather_bytes(data))?;
        Ok(all.iter().map(|bytes| PyBytes::new(py, bytes)).collect())
    }

    /// Seconds for which this rank has waited for each other rank in operations, by rank.
    fn wait_times(&self, py: Python<'_>) -> PyResult<Vec<f64>> {
        let times = self.get(py)?.wait_times();
        Ok(times.iter().map(Duration::as_secs_f64).collect())
    }

    /// Raises the group's failure, if it has failed. Waits for nothing.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.get(py)?;
        called_at(None, || group.check()).map_err(|error| exception(py, &error, Some(group.rank())))
    }

    /// Ends the group on every rank, because this rank's program cannot go on. All ranks get `reason`.
    fn fail(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let group = self.get(py)?;
        py.detach(|| group.fail(reason));
        Ok(())
    }

    /// Puts the group on a stream, after what is on the stream before, for an operation that is made of this group's calls
    /// and of other work on that stream. A stream that was set by hand stays the one of calls without tensors. If other
    /// ranks wait for this one in the operation, `awaited` names it.
    #[pyo3(signature = (stream, awaited=None))]
    fn _put_on(&self, py: Python<'_>, stream: usize, awaited: Option<&str>) -> PyResult<()> {
        let group = self.get(py)?;
        let stream = CallStream::lasting(stream);
        enqueued_on(py, &*group, Some(stream), awaited, || Ok(()))
    }

    /// As `all_gather`, on a stream on GPUs, whatever was set by hand, for an operation that is made of this call and
    /// of other work on that stream.
    fn _all_gather_on(&self, py: Python<'_>, a: &Bound<'_, PyAny>, stream: usize) -> PyResult<()> {
        let group = self.get(py)?;
        let mut reader = Reader::collective(&*group, "all_gather");
        if group.backend() == BackendKind::Cuda {
            reader = reader.on(CallStream::lasting(stream));
        }
        let shards = reader.shards(a, "a")?;
        reader.enqueued(py, || group.all_gather(&shards))
    }

    /// Raises an ArgumentError of an operation that is made of this group's calls, and tells the ranks that wait for this
    /// one in it. `what` is wrong.
    fn _refuse(&self, py: Python<'_>, call: &str, what: &str) -> PyResult<()> {
        let group = self.get(py)?;
        Err(exception(
            py,
            &group.refuse_because(call, what),
            Some(group.rank()),
        ))
    }

    /// Writes what all ranks did in a traced call to `path`: as a picture if it ends in .svg, else for Perfetto.
    /// Collective.
    #[pyo3(signature = (trace, path, title=""))]
    fn write_timeline(
        &self,
        py: Python<'_>,
        trace: &Trace,
        path: std::path::PathBuf,
        title: &str,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let timeline = waited(py, &*group, || group.collect(&trace.0))?;
        if group.rank() != 0 {
            return Ok(());
        }
        let written = if path.extension().is_some_and(|ending| ending == "svg") {
            timeline.write_svg(&path, title)
        } else {
            timeline.write_chrome(&path)
        };
        written.map_err(|error| exception(py, &error, Some(0)))
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        match self.get(py) {
            Ok(group) => format!("Group(rank {} of {})", group.rank(), group.world_size()),
            Err(_) => "Group(closed)".into(),
        }
    }
}

/// Matrices.
#[pymethods]
impl Group {
    /// Allocates a matrix [rows, columns] of zeros. dtype: a name such as "bf16", or a dtype of NumPy or PyTorch.
    fn zeros(
        &self,
        py: Python<'_>,
        rows: Count,
        columns: Count,
        dtype: &Bound<'_, PyAny>,
    ) -> PyResult<Matrix> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::alone(&*group, "Group.zeros").refuse(py, &what);
        let dtype = names::dtype("dtype", dtype).map_err(refuse)?;
        let shape = [
            rows.of("rows").map_err(refuse)?,
            columns.of("columns").map_err(refuse)?,
        ];
        Kept::zeros(py, &group, dtype, shape).map(Matrix)
    }

    /// Makes a matrix of another library's tensor, without a copy. The tensor lives as long as the matrix, and longer
    /// while operations use it. Calls are faster with it than with the tensor.
    fn matrix(&self, py: Python<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<Matrix> {
        Kept::adopted(tensor, &self.get(py)?).map(Matrix)
    }

    /// Allocates a sharded matrix [m, k], whose rows are split evenly over the ranks, or as `rows` says. Collective.
    ///
    /// rows: the rows of each rank, instead of m. capacity=True: m is the most rows that `set_rows` may give.
    /// stages: each rank's rows lie in so many blocks, for a gather in stages.
    #[pyo3(signature = (m, k, dtype, *, rows=None, capacity=false, stages=None))]
    #[allow(clippy::too_many_arguments)]
    fn sharded(
        &self,
        py: Python<'_>,
        m: Option<Count>,
        k: Count,
        dtype: &Bound<'_, PyAny>,
        rows: Option<Vec<Count>>,
        capacity: bool,
        stages: Option<Count>,
    ) -> PyResult<Sharded> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::collective(&*group, "Group.sharded").refuse(py, &what);
        let dtype = names::dtype("dtype", dtype).map_err(refuse)?;
        let (m, k) = (count("m", m).map_err(refuse)?, k.of("k").map_err(refuse)?);
        let rows = counts("rows", rows).map_err(refuse)?;
        let stages = count("stages", stages).map_err(refuse)?;
        let split = match (m, &rows, capacity, stages) {
            (Some(m), None, false, None) => Split::Even(m),
            (Some(m), None, true, None) => Split::Capacity(m),
            (Some(m), None, false, Some(stages)) => Split::Staged(m, stages),
            (None, Some(rows), false, None) => Split::ByRank(rows),
            _ => {
                let what =
                    "give m, or rows with m=None; and of capacity and stages one at most, with m";
                return Err(refuse(what.into()));
            }
        };
        let shards = waited(py, &*group, || group.sharded(dtype, split, k))?;
        Ok(Sharded::new(shards, group))
    }

    /// How many of `m` rows each rank owns if they are split evenly.
    fn even_rows(&self, py: Python<'_>, m: Count) -> PyResult<Vec<usize>> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::alone(&*group, "Group.even_rows").refuse(py, &what);
        Ok(group.even_rows(m.of("m").map_err(refuse)?))
    }
}

/// Products.
#[pymethods]
#[allow(clippy::too_many_arguments)] // Each is an option by name in Python.
impl Group {
    /// out[M, N] = act(a[M, K] @ b[N, K].T + bias) + residual, on this rank alone. Returns out.
    ///
    /// a, b, out, bias [N] and residual [M, N] are matrices, or tensors of other libraries. b may be a list of up to
    /// four weights, with a list of outputs. Without out, a new matrix is made, of type dtype if that is given.
    /// activation: "relu", "gelu", "gelu_tanh" or "silu". gated: b is [gate, up], and out is act(a gate.T) * (a up.T).
    /// weight_layout: "nk", or "kn" for weights [K, N]. fp8 operands have scales: see Scaled and Quantized.
    /// constant_weights: every kernel that wrote the weights has ended.
    #[pyo3(signature = (a, b, out=None, *, bias=None, residual=None, activation=None, gated=false, weight_layout="nk",
        accumulation="promoted", constant_weights=false, dtype=None))]
    fn matmul(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        residual: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        gated: bool,
        weight_layout: &str,
        accumulation: &str,
        constant_weights: bool,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let asked = Asked {
            activation,
            gated,
            weight_layout,
            accumulation,
            constant_weights,
            dtype,
            stages: None,
            rows: None,
            route: None,
        };
        let given = Given {
            a,
            b,
            out,
            bias,
            residual,
        };
        self.product(py, ProductKind::Matmul, asked, &given)
    }

    /// Gathers the rows of a from every rank and multiplies them as they arrive. Collective.
    /// out[M, N] = act(gather(a)[M, K] @ b[N, K].T + bias). Returns out.
    ///
    /// a is a Sharded [M, K], or a Scaled of one. N may differ between ranks. Afterwards a holds all rows. stages:
    /// gathers in so many stages. The other arguments are those of matmul.
    #[pyo3(signature = (a, b, out=None, *, bias=None, activation=None, gated=false, weight_layout="nk",
        accumulation="promoted", constant_weights=false, stages=None, dtype=None))]
    fn all_gather_matmul(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        gated: bool,
        weight_layout: &str,
        accumulation: &str,
        constant_weights: bool,
        stages: Option<Count>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let asked = Asked {
            activation,
            gated,
            weight_layout,
            accumulation,
            constant_weights,
            dtype,
            stages,
            rows: None,
            route: None,
        };
        let given = Given {
            a,
            b,
            out,
            bias,
            residual: None,
        };
        self.product(py, ProductKind::AllGatherMatmul, asked, &given)
    }

    /// Sums the products of all ranks; each rank gets its rows of the sum. Collective.
    /// out[rows of this rank, N] = act(sum over ranks of a[M, K] @ b[N, K].T + bias) + residual. Returns out.
    ///
    /// K is this rank's slice. out is a matrix, or a Sharded [M, N] of which this rank's own rows are written. rows:
    /// the rows that each rank gets, instead of an even split. The other arguments are those of matmul.
    #[pyo3(signature = (a, b, out=None, *, bias=None, residual=None, activation=None, weight_layout="nk",
        accumulation="promoted", constant_weights=false, rows=None, dtype=None))]
    fn matmul_reduce_scatter(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        residual: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        weight_layout: &str,
        accumulation: &str,
        constant_weights: bool,
        rows: Option<Vec<Count>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let asked = Asked {
            activation,
            gated: false,
            weight_layout,
            accumulation,
            constant_weights,
            dtype,
            stages: None,
            rows,
            route: None,
        };
        let given = Given {
            a,
            b,
            out,
            bias,
            residual,
        };
        self.product(py, ProductKind::MatmulReduceScatter, asked, &given)
    }

    /// Sums the products of all ranks; every rank gets the whole sum. Collective.
    /// out[M, N] = act(sum over ranks of a[M, K] @ b[N, K].T + bias) + residual. Returns out, a Sharded [M, N].
    #[pyo3(signature = (a, b, out, *, bias=None, residual=None, activation=None, weight_layout="nk",
        accumulation="promoted", constant_weights=false))]
    fn matmul_all_reduce(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        residual: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        weight_layout: &str,
        accumulation: &str,
        constant_weights: bool,
    ) -> PyResult<Py<PyAny>> {
        let asked = Asked {
            activation,
            gated: false,
            weight_layout,
            accumulation,
            constant_weights,
            dtype: None,
            stages: None,
            rows: None,
            route: None,
        };
        let given = Given {
            a,
            b,
            out: Some(out),
            bias,
            residual,
        };
        self.product(py, ProductKind::MatmulAllReduce, asked, &given)
    }

    /// Plans a product, so that calls need no planning and allocate nothing. Not collective.
    ///
    /// operation: "matmul", "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce". a, b and out are
    /// examples of the arguments that calls will have; the options are those of the operation. route: "pull", "push" or
    /// "store", instead of the library's choice. All ranks give the same.
    #[pyo3(signature = (operation, a, b, out=None, *, activation=None, gated=false, weight_layout="nk",
        accumulation="promoted", constant_weights=false, stages=None, rows=None, dtype=None, route=None))]
    fn prepare(
        &self,
        py: Python<'_>,
        operation: &str,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        gated: bool,
        weight_layout: &str,
        accumulation: &str,
        constant_weights: bool,
        stages: Option<Count>,
        rows: Option<Vec<Count>>,
        dtype: Option<&Bound<'_, PyAny>>,
        route: Option<&str>,
    ) -> PyResult<Prepared> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::alone(&*group, "Group.prepare").refuse(py, &what);
        let kind = kind_of(operation).map_err(refuse)?;
        let asked = Asked {
            activation,
            gated,
            weight_layout,
            accumulation,
            constant_weights,
            dtype,
            stages,
            rows,
            route,
        };
        let given = Given {
            a,
            b,
            out,
            bias: None,
            residual: None,
        };
        let product = asked.product(kind).map_err(refuse)?;
        prepared::prepare(py, &group, product, &given)
    }

    /// Raises an ArgumentError if this group cannot multiply rows [M, K] by weights of N = n. It needs no matrix,
    /// allocates nothing and does not block. n may be a list of several.
    ///
    /// dtype, weight_dtype and out_dtype are those of a, b and out; dtype is "bf16" by default. a_scaling and b_scaling
    /// are names as of Scaled, and first_row and first_column are as there; sharded_scales: those of a are sharded.
    /// quantization: a name as of Quantized.
    #[pyo3(signature = (operation, m, k, n, dtype=None, *, weight_dtype=None, out_dtype=None, activation=None,
        gated=false, weight_layout="nk", accumulation="promoted", stages=None, rows=None, a_scaling=None,
        b_scaling=None, first_row=None, first_column=None, sharded_scales=false, quantization=None))]
    fn check_support(
        &self,
        py: Python<'_>,
        operation: &str,
        m: Count,
        k: Count,
        n: &Bound<'_, PyAny>,
        dtype: Option<&Bound<'_, PyAny>>,
        weight_dtype: Option<&Bound<'_, PyAny>>,
        out_dtype: Option<&Bound<'_, PyAny>>,
        activation: Option<&str>,
        gated: bool,
        weight_layout: &str,
        accumulation: &str,
        stages: Option<Count>,
        rows: Option<Vec<Count>>,
        a_scaling: Option<&str>,
        b_scaling: Option<&str>,
        first_row: Option<Count>,
        first_column: Option<Count>,
        sharded_scales: bool,
        quantization: Option<&str>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let refuse = |what: String| Reader::alone(&*group, "Group.check_support").refuse(py, &what);
        let widths = match n.extract::<Count>() {
            Ok(n) => vec![n],
            Err(_) => n.extract::<Vec<Count>>()?,
        };
        let asked = Asked {
            activation,
            gated,
            weight_layout,
            accumulation,
            constant_weights: false,
            dtype: out_dtype,
            stages,
            rows,
            route: None,
        };
        let read = || -> Said<_> {
            let kind = kind_of(operation)?;
            let first_row = count("first_row", first_row)?.unwrap_or(0);
            let column = count("first_column", first_column)?.unwrap_or(0);
            let a = |word| names::scaling("a_scaling", word, [0, column], sharded_scales);
            let b = |word| names::scaling("b_scaling", word, [first_row, column], false);
            let (a, b) = (a_scaling.map(a), b_scaling.map(b));
            let quantization =
                quantization.map(|word| names::quantization("quantization", word, false, 0));
            let mut product = AnyProduct {
                dtype: dtype.map_or(Ok(DType::Bf16), |dtype| names::dtype("dtype", dtype))?,
                weight_dtype: weight_dtype
                    .map(|dtype| names::dtype("weight_dtype", dtype))
                    .transpose()?,
                scaling: (
                    a.transpose()?.unwrap_or_default(),
                    b.transpose()?.into_iter().collect(),
                ),
                quantization: quantization.transpose()?,
                ..asked.product(kind)?
            };
            let (m, k) = (m.of("m")?, k.of("k")?);
            let split = match &product.rows {
                Some(rows) => RowSplit::from((rows, k)),
                None => RowSplit::from([m, k]),
            };
            if kind != ProductKind::MatmulReduceScatter {
                product.rows = None;
            }
            let widths = widths.into_iter().map(|n| n.of("n"));
            Ok((product, split, widths.collect::<Said<Vec<_>>>()?))
        };
        let (product, split, widths) = read().map_err(refuse)?;
        waited(py, &*group, || group.supports(&product, &split, &widths))
    }

    /// Quantises x [M, N] of bf16, f16 or f32 to out, a Quantized, on this rank alone.
    fn quantize(
        &self,
        py: Python<'_>,
        x: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        prepared::quantize(py, &self.get(py)?, x, out)
    }
}

/// Collectives and pipelines.
#[pymethods]
impl Group {
    /// Gathers the rows of a, a Sharded, on every rank, in place. Collective.
    fn all_gather(&self, py: Python<'_>, a: &Bound<'_, PyAny>) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "all_gather");
        let shards = reader.shards(a, "a")?;
        reader.enqueued(py, || group.all_gather(&shards))
    }

    /// Copies the whole matrix of rank `root` to every rank, in place. Collective.
    fn broadcast(&self, py: Python<'_>, a: &Bound<'_, PyAny>, root: Count) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "broadcast");
        let root = root.of("root").map_err(|what| reader.refuse(py, &what))?;
        let shards = reader.shards(a, "a")?;
        reader.enqueued(py, || group.broadcast(&shards, root))
    }

    /// Sums the ranks' a [M, N]; each rank gets its rows of the sum in out [rows of this rank, N]. Collective.
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let mut reader = Reader::collective(&*group, "reduce_scatter");
        let both = reader
            .memory(a, "a")
            .and_then(|a| Ok((a, reader.written(out, "out")?)));
        let (a, out) = both.map_err(|error| reader.told(error))?;
        // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
        reader.enqueued(py, || unsafe { group.reduce_scatter(a, out) })?;
        reader.keep();
        Ok(())
    }

    /// Sums the ranks' a [M, N]; every rank gets the whole sum in out, a Sharded [M, N]. Collective.
    fn all_reduce(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "all_reduce");
        // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
        let begin = |a, out: &AnyShards| unsafe { group.all_reduce(a, out) };
        prepared::into_sharded(py, reader, a, out, begin)
    }

    /// Sends block p of each rank's a [W * rows, N] to rank p, where it becomes the sender's rows of out, a Sharded.
    /// Collective.
    ///
    /// With counts, W lists of W numbers that are the same on every rank, rank s sends counts[s][r] rows to rank r. The
    /// blocks follow one another in a, and in the first rows of out. Its other rows stay as they are.
    #[pyo3(signature = (a, out, *, counts=None))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        counts: Option<Vec<Vec<Count>>>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "all_to_all");
        let counts = pairs("counts", counts, group.world_size());
        let counts = counts.map_err(|what| reader.refuse(py, &what))?;
        // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
        let begin = |a, out: &AnyShards| unsafe { group.all_to_all(a, out, counts.as_deref()) };
        prepared::into_sharded(py, reader, a, out, begin)
    }

    /// Gathers the rows of a, a Sharded, and calls consume(chunk) for each chunk of rows as it arrives. Collective.
    ///
    /// On the host the rows are there. On GPUs the function puts its work on chunk.stream. It must not call the group.
    #[pyo3(signature = (a, consume, *, chunks=None, stages=None))]
    fn all_gather_and_consume(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        consume: &Bound<'_, PyAny>,
        chunks: Option<Count>,
        stages: Option<Count>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "all_gather_and_consume");
        let refuse = |what: String| reader.refuse(py, &what);
        let chunks = count("chunks", chunks).map_err(refuse)?;
        let stages = count("stages", stages).map_err(refuse)?;
        let shards = reader.shards(a, "a")?;
        let mut options = AllGatherAndConsume::new();
        if let Some(chunks) = chunks {
            options = options.chunks(chunks);
        }
        if let Some(stages) = stages {
            options = options.stages(stages);
        }
        require_callable(consume, "consume").map_err(refuse)?;
        let function = Function::new(consume, &group, keeper_of(a));
        let mut call = |rows: raw::AnyRows| {
            function.call(rows.rows, rows.source, (rows.memory, None), rows.stream)
        };
        let result = reader.enqueued(py, || {
            group.all_gather_and_consume(options, &shards, &mut call)
        });
        function.finish(py, result)
    }

    /// Calls produce(chunk) for blocks of the m rows of this rank's addend, and sums the ranks' rows: each rank gets
    /// its rows of the sum in out [rows of this rank, N]. Blocks are sent while others are made. Collective.
    #[pyo3(signature = (m, out, produce, *, rows=None, chunks=None))]
    fn produce_and_reduce_scatter(
        &self,
        py: Python<'_>,
        m: Count,
        out: &Bound<'_, PyAny>,
        produce: &Bound<'_, PyAny>,
        rows: Option<Vec<Count>>,
        chunks: Option<Count>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let mut reader = Reader::collective(&*group, "produce_and_reduce_scatter");
        let refuse = |what: String| reader.refuse(py, &what);
        let m = m.of("m").map_err(refuse)?;
        let rows = counts("rows", rows).map_err(refuse)?;
        let chunks = count("chunks", chunks).map_err(refuse)?;
        require_callable(produce, "produce").map_err(refuse)?;
        let memory = reader
            .written(out, "out")
            .map_err(|error| reader.told(error))?;
        let mut options = ProduceAndReduceScatter::new();
        if let Some(rows) = &rows {
            options = options.rows(rows);
        }
        if let Some(chunks) = chunks {
            options = options.chunks(chunks);
        }
        let function = Function::new(produce, &group, keeper_of(out));
        let mut call = |rows: raw::RowsFor| {
            let memory = (rows.memory, rows.keeper);
            function.call(rows.rows, rows.owner, memory, rows.stream)
        };
        // SAFETY: the object keeps its memory during the call, and the reader until it is complete.
        let result = reader.enqueued(py, || unsafe {
            group.produce_and_reduce_scatter(options, m, memory, &mut call)
        });
        function.finish(py, result)?;
        reader.keep();
        Ok(())
    }

    /// Calls produce(chunk) for blocks of the rows that each rank gets, and sends them: they become this rank's rows of
    /// out, a Sharded, on their rank. With counts, rank s makes counts[s][r] rows for rank r, as of all_to_all.
    /// Collective.
    #[pyo3(signature = (out, produce, *, counts=None, chunks=None))]
    fn produce_and_all_to_all(
        &self,
        py: Python<'_>,
        out: &Bound<'_, PyAny>,
        produce: &Bound<'_, PyAny>,
        counts: Option<Vec<Vec<Count>>>,
        chunks: Option<Count>,
    ) -> PyResult<()> {
        let group = self.get(py)?;
        let reader = Reader::collective(&*group, "produce_and_all_to_all");
        let refuse = |what: String| reader.refuse(py, &what);
        let counts = pairs("counts", counts, group.world_size()).map_err(refuse)?;
        let chunks = count("chunks", chunks).map_err(refuse)?;
        let shards = reader.shards(out, "out")?;
        let mut options = ProduceAndAllToAll::new();
        if let Some(counts) = &counts {
            options = options.counts(counts);
        }
        if let Some(chunks) = chunks {
            options = options.chunks(chunks);
        }
        require_callable(produce, "produce").map_err(refuse)?;
        let function = Function::new(produce, &group, keeper_of(out));
        let mut call = |rows: raw::RowsFor| {
            let memory = (rows.memory, rows.keeper);
            function.call(rows.rows, rows.owner, memory, rows.stream)
        };
        let result = reader.enqueued(py, || {
            group.produce_and_all_to_all(options, &shards, &mut call)
        });
        function.finish(py, result)
    }
}
