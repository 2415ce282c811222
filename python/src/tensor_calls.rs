//! Planned products of tensors, found by the tensors' descriptions and run without Python.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use gemmesh::interop::dlpack::DLTensor;
use gemmesh::raw::{AnyGroup, AnyOperand, AnyOutput, AnyOutputs, Memory, ProductCall, RowOperand};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::errors::misuse;
use crate::group::Group;
use crate::matrix::{Freed, rows_of};
use crate::operands::{Reader, listed};
use crate::prepared::Prepared;
use crate::sharded::Sharded;
use crate::streams::CallStream;
use crate::tensors::{Exchange, exchange_of, memory_of};
use crate::waiting::enqueued_on;

/// How many products are kept. If there are more, all are forgotten, and the next call of each adds it again.
const MAX_CALLS: usize = 1024;

/// Planned products of PyTorch's tensors, by the devices, types, extents and strides of their operands.
///
/// A matrix is freed without the GIL, for which other threads may then wait with a lock of these. So nothing is dropped
/// while a lock is held.
#[pyclass(frozen, module = "gemmesh._native")]
pub struct TensorCalls {
    group: Freed<Arc<dyn AnyGroup>>,
    planned: RwLock<HashMap<Vec<i64>, Arc<Planned>>>,
    /// Matrices whose own rows are tensors, by the rows' address.
    lent: RwLock<HashMap<u64, Py<Sharded>>>,
}

/// A planned product.
struct Planned {
    prepared: Py<Prepared>,
    /// Where rows are gathered that lie elsewhere. None for a sum.
    rows: Option<Py<Sharded>>,
    /// True if the weights are [N, K] in memory. As tensors they are [K, N].
    transposed: bool,
    /// Makes an output.
    new: Py<PyAny>,
    /// Its arguments, for each output.
    outputs: Vec<(Py<PyTuple>, Py<PyDict>)>,
}

#[pymethods]
impl TensorCalls {
    #[new]
    fn new(py: Python<'_>, group: &Group) -> PyResult<TensorCalls> {
        Ok(TensorCalls {
            group: Freed::new(group.get(py)?),
            planned: RwLock::default(),
            lent: RwLock::default(),
        })
    }

    /// Lets the own rows of a matrix be gathered where they lie.
    fn lend(&self, address: u64, matrix: Py<Sharded>) {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        let before = lent.insert(address, matrix);
        drop(lent);
        drop(before);
    }

    /// Forgets a matrix.
    fn take_back(&self, address: u64) {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        let before = lent.remove(&address);
        drop(lent);
        drop(before);
    }

    /// Keeps a product of tensors like `a` and `b`. `new(*args, **options)` makes an output, for each of `outputs`.
    #[pyo3(signature = (a, b, prepared, *, rows, transposed, new, outputs))]
    #[allow(clippy::too_many_arguments)]
    fn add(
        &self,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        prepared: Py<Prepared>,
        rows: Option<Py<Sharded>>,
        transposed: bool,
        new: Py<PyAny>,
        outputs: Vec<(Py<PyTuple>, Py<PyDict>)>,
    ) -> PyResult<()> {
        let Some(tensors) = Tensors::of(a, b) else {
            return Ok(());
        };
        let is_matrix = |tensor: &DLTensor| tensor.ndim == 2 && !tensor.strides.is_null();
        if transposed && !tensors.weights.iter().all(is_matrix) {
            return Ok(());
        }
        let planned = Planned {
            prepared,
            rows,
            transposed,
            new,
            outputs,
        };
        let key = tensors.key();
        let mut all = self.planned.write().unwrap_or_else(PoisonError::into_inner);
        let forgotten = if all.len() >= MAX_CALLS {
            std::mem::take(&mut *all)
        } else {
            HashMap::new()
        };
        let before = all.insert(key, Arc::new(planned));
        drop(all);
        drop((forgotten, before));
        Ok(())
    }

    /// Forgets all products.
    fn clear(&self) {
        let mut all = self.planned.write().unwrap_or_else(PoisonError::into_inner);
        let forgotten = std::mem::take(&mut *all);
        drop(all);
        drop(forgotten);
    }

    /// Makes the product of `a` and the weights `b`, and returns its outputs. Returns None, and does nothing, if no
    /// product of such tensors is kept or the memory of one does not suit.
    fn run<'py>(
        &self,
        a: &Bound<'py, PyAny>,
        b: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyList>>> {
        let Some(tensors) = Tensors::of(a, b) else {
            return Ok(None);
        };
        let key = tensors.key();
        let planned = {
            let all = self.planned.read().unwrap_or_else(PoisonError::into_inner);
            all.get(&key).cloned()
        };
        let Some(planned) = planned else {
            return Ok(None);
        };
        let (py, group) = (a.py(), &**self.group);
        let Ok(operands) = planned.operands(py, group, &tensors) else {
            return Ok(None);
        };
        let lent = self.lent_of(py, operands.0.values);
        planned.run(py, group, &tensors, operands, lent).map(Some)
    }
}

impl TensorCalls {
    /// The matrix whose own rows these are.
    fn lent_of(&self, py: Python<'_>, rows: Memory) -> Option<Py<Sharded>> {
        let matrix = {
            let lent = self.lent.read().unwrap_or_else(PoisonError::into_inner);
            lent.get(&rows.address)?.clone_ref(py)
        };
        let own = matrix.get().own_memory(py)?;
        (own == rows).then_some(matrix)
    }
}

/// The tensor of an object, with its library's table of functions. None if the library has no table, or cannot describe
/// the tensor.
fn described(object: &Bound<'_, PyAny>) -> Option<(&'static Exchange, DLTensor)> {
    let exchange = exchange_of(object)?;
    let tensor = exchange.tensor(object).ok().flatten()?;
    Some((exchange, tensor))
}

/// The operands of a call, as their library describes them.
struct Tensors<'py> {
    exchange: &'static Exchange,
    a: DLTensor,
    weights: Vec<DLTensor>,
    /// Another thread may change the list that they come from.
    _weights: Vec<Bound<'py, PyAny>>,
}

impl<'py> Tensors<'py> {
    /// None if one of them has no description.
    fn of(a: &Bound<'py, PyAny>, b: &Bound<'py, PyAny>) -> Option<Tensors<'py>> {
        let (exchange, a) = described(a)?;
        let objects = listed(b);
        let weights = objects.iter().map(|one| Some(described(one)?.1));
        Some(Tensors {
            exchange,
            a,
            weights: weights.collect::<Option<_>>()?,
            _weights: objects,
        })
    }

    /// The stream of the call.
    fn stream(
        &self,
        py: Python<'_>,
        group: &dyn AnyGroup,
        call: &'static str,
    ) -> PyResult<Option<CallStream>> {
        match self.exchange.stream_for(py, group)? {
            Some(stream) => Ok(Some(CallStream::lasting(stream))),
            None => Reader::alone(group, call).stream(py),
        }
    }

    /// What two lists of tensors must share to have one plan.
    fn key(&self) -> Vec<i64> {
        let mut key = Vec::with_capacity(16 * (1 + self.weights.len()));
        for tensor in [&self.a].into_iter().chain(&self.weights) {
            let DLTensor { device, dtype, .. } = tensor;
            let bits = i64::from(dtype.bits) << 16 | i64::from(dtype.lanes);
            key.extend([
                i64::from(device.device_type) << 32 | i64::from(device.device_id),
                i64::from(dtype.code) << 32 | bits,
                i64::from(tensor.ndim),
            ]);
            let dimensions = usize::try_from(tensor.ndim).unwrap_or(0);
            for list in [tensor.shape, tensor.strides] {
                key.push(i64::from(list.is_null()));
                if !list.is_null() {
                    // SAFETY: the library describes a tensor of so many dimensions, whose object lives.
                    key.extend(unsafe { std::slice::from_raw_parts(list, dimensions) });
                }
            }
        }
        key
    }
}

impl Planned {
    /// The rows and the weights.
    fn operands(
        &self,
        py: Python<'_>,
        group: &dyn AnyGroup,
        tensors: &Tensors,
    ) -> PyResult<(AnyOperand, Vec<AnyOperand>)> {
        let operand = |values| AnyOperand {
            values,
            scales: None,
        };
        let rows = memory_of(py, &tensors.a, group, self.name(), "a")?;
        let weights = tensors.weights.iter();
        let weights = weights.map(|one| self.weight(py, one, group).map(operand));
        Ok((operand(rows), weights.collect::<PyResult<_>>()?))
    }

    /// The name of the call.
    fn name(&self) -> &'static str {
        self.prepared.get().name()
    }

    /// Runs the product, and returns its outputs. The ranks that wait for this one are told of an error.
    fn run<'py>(
        &self,
        py: Python<'py>,
        group: &dyn AnyGroup,
        tensors: &Tensors,
        (rows, weights): (AnyOperand, Vec<AnyOperand>),
        lent: Option<Py<Sharded>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let told = |error: PyErr| {
            group.refuse_because(self.name(), &error.to_string());
            error
        };
        let awaited = Some(self.name());
        let stream = tensors.stream(py, group, self.name()).map_err(told)?;
        let (made, outputs) = self.outputs(py, group).map_err(told)?;
        let run = |a| {
            let call = ProductCall {
                a,
                weights: &weights,
                outputs: AnyOutputs::Own(&outputs),
                bias: None,
                residual: None,
            };
            // SAFETY: the tensors keep their memory until their library's stream, on which the group is, has come to
            // the call's end. Sharded matrices are held.
            unsafe { self.prepared.get().planned().run(&call) }
        };
        let Some(matrix) = &self.rows else {
            enqueued_on(py, group, stream, awaited, || run(RowOperand::Own(rows)))?;
            return Ok(made);
        };
        if let Some(lent) = lent {
            let shards = lent.get().read(py).map_err(told)?;
            enqueued_on(py, group, stream, awaited, || {
                run(RowOperand::Sharded(&shards, None))
            })?;
            return Ok(made);
        }
        let split = matrix.get().split_evenly(py, rows.values.shape[0]);
        let shards = split.and_then(|()| matrix.get().read(py)).map_err(told)?;
        let place = rows_of(shards.whole(), shards.rows_of(group.rank()));
        enqueued_on(py, group, stream, awaited, || {
            // SAFETY: as above. The group orders the copy and the product.
            let copied = unsafe { group.copy(rows.values, place) };
            copied.map_err(|error| group.refuse_for(self.name(), error))?;
            run(RowOperand::Sharded(&shards, None))
        })?;
        Ok(made)
    }

    /// A weight's memory, [N, K] or [K, N].
    fn weight(&self, py: Python<'_>, tensor: &DLTensor, group: &dyn AnyGroup) -> PyResult<Memory> {
        if !self.transposed {
            return memory_of(py, tensor, group, self.name(), "b");
        }
        // SAFETY: the library describes a tensor of two dimensions with strides. `add` has checked that of the plan's
        // tensors, and the key says the same of these.
        let [mut shape, mut strides] =
            unsafe { [tensor.shape, tensor.strides].map(|list| [list.add(1).read(), list.read()]) };
        let transposed = DLTensor {
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            ..*tensor
        };
        memory_of(py, &transposed, group, self.name(), "b")
    }

    /// New outputs.
    fn outputs<'py>(
        &self,
        py: Python<'py>,
        group: &dyn AnyGroup,
    ) -> PyResult<(Bound<'py, PyList>, Vec<AnyOutput>)> {
        let (made, mut outputs) = (PyList::empty(py), Vec::with_capacity(self.outputs.len()));
        for (args, options) in &self.outputs {
            let out = self
                .new
                .bind(py)
                .call(args.bind(py), Some(options.bind(py)))?;
            let Some((_, tensor)) = described(&out) else {
                return Err(misuse(py, "an output is a tensor that cannot be described"));
            };
            outputs.push(AnyOutput {
                values: memory_of(py, &tensor, group, self.name(), "out")?,
                scales: None,
            });
            made.append(out)?;
        }
        Ok((made, outputs))
    }
}
