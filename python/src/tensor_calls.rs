//! Products of tensors that have been planned. They are found by what the tensors are, and made without Python between
//! the call and its group.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use gemmesh::dlpack::DLTensor;
use gemmesh::raw::{AnyGroup, Memory, Operand, Output, Outputs, ProductCall, RowOperand};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::group::Group;
use crate::matrix::{Freed, rows_of};
use crate::operands::listed;
use crate::prepared::Prepared;
use crate::sharded::Sharded;
use crate::tensors::{Exchange, exchange_of, given};
use crate::waiting::enqueued;

/// How many calls are kept. When there are more, they are planned anew.
const MAX_CALLS: usize = 1024;
/// The name of arguments in messages.
const CALL: &str = "TensorCalls";

/// Products of PyTorch's tensors that have been planned, by devices, types, extents and strides of their operands.
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
    /// Makes an output, with the arguments of each.
    new: Py<PyAny>,
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
        lent.insert(address, matrix);
    }

    /// Forgets a matrix.
    fn take_back(&self, address: u64) {
        let mut lent = self.lent.write().unwrap_or_else(PoisonError::into_inner);
        lent.remove(&address);
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
        let mut all = self.planned.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_CALLS {
            all.clear();
        }
        all.insert(tensors.key(), Arc::new(planned));
        Ok(())
    }

    /// Forgets all products.
    fn clear(&self) {
        let mut all = self.planned.write().unwrap_or_else(PoisonError::into_inner);
        all.clear();
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
        let planned = {
            let all = self.planned.read().unwrap_or_else(PoisonError::into_inner);
            all.get(&tensors.key()).cloned()
        };
        let Some(planned) = planned else {
            return Ok(None);
        };
        let py = a.py();
        let Ok(operands) = planned.operands(py, &**self.group, &tensors) else {
            return Ok(None);
        };
        tensors
            .exchange
            .follow(py, tensors.a.device, &**self.group)?;
        let lent = self.lent_of(py, operands.0.values);
        planned.run(py, &self.group, operands, lent).map(Some)
    }
}

impl TensorCalls {
    /// The matrix whose own rows these are.
    fn lent_of(&self, py: Python<'_>, rows: Memory) -> Option<Py<Sharded>> {
        let lent = self.lent.read().unwrap_or_else(PoisonError::into_inner);
        let matrix = lent.get(&rows.address)?;
        let own = matrix.get().own_memory(py)?;
        (own == rows).then(|| matrix.clone_ref(py))
    }
}

/// The operands of a call, as their library describes them.
struct Tensors {
    exchange: &'static Exchange,
    a: DLTensor,
    weights: Vec<DLTensor>,
}

impl Tensors {
    /// None if the library has no table of functions, or cannot describe a tensor.
    fn of(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> Option<Tensors> {
        let described = |object: &Bound<'_, PyAny>| {
            let exchange = exchange_of(object)?;
            let tensor = exchange.tensor(object).ok().flatten()?;
            Some((exchange, tensor))
        };
        let (exchange, a) = described(a)?;
        let weights = listed(b);
        let weights = weights.iter().map(|one| Some(described(one)?.1));
        Some(Tensors {
            exchange,
            a,
            weights: weights.collect::<Option<_>>()?,
        })
    }

    /// What tensors have in common that one plan serves.
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
    ) -> PyResult<(Operand, Vec<Operand>)> {
        let operand = |values| Operand {
            values,
            scales: None,
        };
        let exchange = tensors.exchange;
        let rows = exchange.memory(py, &tensors.a, group, [CALL, "a"])?;
        let weights = tensors.weights.iter();
        let weights = weights.map(|one| self.weight(py, exchange, one, group).map(operand));
        Ok((operand(rows), weights.collect::<PyResult<_>>()?))
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        group: &Arc<dyn AnyGroup>,
        (rows, weights): (Operand, Vec<Operand>),
        lent: Option<Py<Sharded>>,
    ) -> PyResult<Bound<'py, PyList>> {
        let (made, outputs) = self.outputs(py, &**group)?;
        let run = |a| {
            let call = ProductCall {
                a,
                weights: &weights,
                outputs: Outputs::Own(&outputs),
                bias: None,
                residual: None,
            };
            // SAFETY: the tensors keep their memory until their library's stream, on which the group is, has come to
            // the call's end. Sharded matrices are held.
            unsafe { self.prepared.get().planned().run(&call) }
        };
        let Some(matrix) = &self.rows else {
            enqueued(py, &**group, || run(RowOperand::Own(rows)))?;
            return Ok(made);
        };
        if let Some(lent) = lent {
            let shards = lent.get().read(py)?;
            enqueued(py, &**group, || run(RowOperand::Sharded(&shards, None)))?;
            return Ok(made);
        }
        matrix.get().split_evenly(py, rows.values.shape[0])?;
        let shards = matrix.get().read(py)?;
        let place = rows_of(shards.whole(), shards.rows_of(group.rank()));
        enqueued(py, &**group, || {
            // SAFETY: as above. The group orders the copy and the product.
            unsafe { group.copy(rows.values, place)? };
            run(RowOperand::Sharded(&shards, None))
        })?;
        Ok(made)
    }

    /// A weight's memory, [N, K] or [K, N].
    fn weight(
        &self,
        py: Python<'_>,
        exchange: &Exchange,
        tensor: &DLTensor,
        group: &dyn AnyGroup,
    ) -> PyResult<Memory> {
        if !self.transposed {
            return exchange.memory(py, tensor, group, [CALL, "b"]);
        }
        // SAFETY: the library describes a tensor, which has two dimensions and strides, as that of the plan.
        let [mut shape, mut strides] =
            unsafe { [tensor.shape, tensor.strides].map(|list| [list.add(1).read(), list.read()]) };
        let transposed = DLTensor {
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            ..*tensor
        };
        exchange.memory(py, &transposed, group, [CALL, "b"])
    }

    /// New outputs.
    fn outputs<'py>(
        &self,
        py: Python<'py>,
        group: &dyn AnyGroup,
    ) -> PyResult<(Bound<'py, PyList>, Vec<Output>)> {
        let (made, mut outputs) = (PyList::empty(py), Vec::with_capacity(self.outputs.len()));
        for (args, options) in &self.outputs {
            let out = self
                .new
                .bind(py)
                .call(args.bind(py), Some(options.bind(py)))?;
            outputs.push(Output {
                values: given(&out, group, CALL, "out", true)?.memory,
                scales: None,
            });
            made.append(out)?;
        }
        Ok((made, outputs))
    }
}
