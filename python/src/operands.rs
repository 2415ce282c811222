//! The arguments of products: operands with their scales, and outputs.

use std::sync::{Arc, RwLockReadGuard};

use gemmesh::fp8::{Quantization, Scaling};
use gemmesh::raw::{
    AnyGroup, AnyOperand, AnyOutput, AnyOutputs, AnyShardedScales, AnyShards, BackendKind, Memory,
    RowOperand, Tensor,
};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use crate::callbacks::Keeper;
use crate::ending::Lent;
use crate::errors::{argument, exception, read_only, refused};
use crate::matrix::Matrix;
use crate::names::{self, Count, count};
use crate::sharded::Sharded;
use crate::streams::{self, CallStream, is_of_cupy};
use crate::tensors::{exchange_of, managed, memory_of, memory_of_managed};
use crate::waiting::enqueued_on;

/// An fp8 operand with its scales, which are f32. A value is its fp8 number times its scale.
///
/// `scaling` says how many values share a scale, and its shape:
/// "tensor": one for all, [1, 1].
/// "rows": one for each row, [1, M] for `a` and [1, N] for a weight.
/// "blocks": one for each 1 x 128 values of `a`, [M, ceil(K/128)], and for each 128 x 128 values of a weight,
/// [ceil(N/128), ceil(K/128)].
/// "transposed_blocks": those of `a`, [ceil(K/128), M].
/// The scales of a `Sharded` may be a `Sharded` too ("rows" or "blocks"), which is gathered with it.
/// `first_row`: the row of its first block at which a weight begins, a multiple of 16. Without it, row 0.
/// `first_column`: the column of their first block at which `a` and the weights begin, likewise. The scales of blocks are
/// then [M, ceil((first_column + K)/128)] and [ceil(N/128), ceil((first_column + K)/128)].
#[pyclass(frozen, module = "gemmesh")]
pub struct Scaled {
    /// The fp8 numbers.
    #[pyo3(get)]
    values: Py<PyAny>,
    /// Their scales.
    #[pyo3(get)]
    scales: Py<PyAny>,
    scaling: Scaling,
}

#[pymethods]
impl Scaled {
    #[new]
    #[pyo3(signature = (values, scales, scaling="tensor", *, first_row=None, first_column=None))]
    fn new(
        py: Python<'_>,
        values: Py<PyAny>,
        scales: Py<PyAny>,
        scaling: &str,
        first_row: Option<Count>,
        first_column: Option<Count>,
    ) -> PyResult<Scaled> {
        let refuse = |what: String| argument(py, None, "gemmesh.Scaled", &what);
        let sharded = scales.bind(py).is_instance_of::<Sharded>();
        let row = count("first_row", first_row).map_err(refuse)?.unwrap_or(0);
        let column = count("first_column", first_column).map_err(refuse)?;
        let first = [row, column.unwrap_or(0)];
        Ok(Scaled {
            scaling: names::scaling("scaling", scaling, first, sharded).map_err(refuse)?,
            values,
            scales,
        })
    }

    fn __repr__(&self) -> String {
        format!(
            "Scaled({}, {}, {:?})",
            self.values, self.scales, self.scaling
        )
    }
}

/// An output that is quantised to f8e4m3, and its scales, which are f32.
///
/// `scaling`: "tensor" quantises by the one scale that `scales` [1, 1] holds. "blocks" makes a scale for each 128
/// columns of a row, [M, ceil(N/128)], and "transposed_blocks" those in columns, [ceil(N/128), M]. With `power_of_two`,
/// scales that are made are rounded up to powers of two.
/// `first_column`: the column of its first block at which the output begins, a multiple of 16, for "blocks". The scales are
/// then [M, ceil((first_column + N)/128)].
#[pyclass(frozen, module = "gemmesh")]
pub struct Quantized {
    /// The fp8 numbers.
    #[pyo3(get)]
    pub values: Py<PyAny>,
    /// Their scales.
    #[pyo3(get)]
    pub scales: Py<PyAny>,
    pub quantization: Quantization,
    /// Its name.
    scaling: String,
}

#[pymethods]
impl Quantized {
    #[new]
    #[pyo3(signature = (values, scales, scaling="blocks", *, power_of_two=false, first_column=None))]
    fn new(
        py: Python<'_>,
        values: Py<PyAny>,
        scales: Py<PyAny>,
        scaling: &str,
        power_of_two: bool,
        first_column: Option<Count>,
    ) -> PyResult<Quantized> {
        let refuse = |what: String| argument(py, None, "gemmesh.Quantized", &what);
        let first = count("first_column", first_column).map_err(refuse)?;
        let quantization =
            names::quantization("scaling", scaling, power_of_two, first.unwrap_or(0));
        Ok(Quantized {
            quantization: quantization.map_err(refuse)?,
            scaling: scaling.into(),
            values,
            scales,
        })
    }

    fn __repr__(&self) -> String {
        let (values, scales) = (&self.values, &self.scales);
        format!("Quantized({values}, {scales}, {:?})", self.scaling)
    }
}

/// Reads the arguments of one call, and keeps what must live until the call is complete.
pub struct Reader<'a> {
    pub group: &'a dyn AnyGroup,
    pub call: &'static str,
    /// True if other ranks wait for this one in the call.
    is_collective: bool,
    /// The stream of the call, once a tensor has been read.
    stream: Option<CallStream>,
    /// True if that is the current stream of a tensor's library.
    is_current: bool,
    kept: Vec<Lent>,
    /// Tensors of libraries without a current stream, which are made ready for `stream` until `is_current`.
    without_stream: Vec<(Py<PyAny>, String, Memory)>,
    /// What lists hold. Another thread may change the lists.
    listed: Vec<Py<PyAny>>,
}

impl<'a> Reader<'a> {
    /// Of a call that all ranks make.
    pub fn collective(group: &'a dyn AnyGroup, call: &'static str) -> Reader<'a> {
        Reader {
            group,
            call,
            is_collective: true,
            stream: None,
            is_current: false,
            kept: Vec::new(),
            without_stream: Vec::new(),
            listed: Vec::new(),
        }
    }

    /// Of a call that this rank makes alone.
    pub fn alone(group: &'a dyn AnyGroup, call: &'static str) -> Reader<'a> {
        Reader {
            is_collective: false,
            ..Reader::collective(group, call)
        }
    }

    /// On this stream, whatever others there are.
    pub fn on(self, stream: CallStream) -> Reader<'a> {
        Reader {
            stream: Some(stream),
            ..self
        }
    }

    /// The error of an argument, of which the other ranks are told if they wait for this one in the call.
    pub fn told(&self, error: PyErr) -> PyErr {
        if self.is_collective {
            let words = error.to_string();
            let known = format!("{}: ", self.call);
            let what = words
                .split_once(&known)
                .map_or(&words[..], |(_, what)| what);
            // This rank's program gets the error that there is.
            drop(self.group.refuse_because(self.call, what));
        }
        error
    }

    /// A sharded matrix with its layout held, which is the only argument that is read.
    pub fn shards<'o>(
        &self,
        object: &'o Bound<'_, PyAny>,
        name: &str,
    ) -> PyResult<RwLockReadGuard<'o, AnyShards>> {
        held(self, object, name).map_err(|error| self.told(error))
    }

    /// The memory of a matrix or of another library's tensor that the call reads.
    pub fn memory(&mut self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
        self.memory_for(object, name, false)
    }

    /// The memory of a matrix or of another library's tensor that the call writes.
    pub fn written(&mut self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Memory> {
        self.memory_for(object, name, true)
    }

    fn memory_for(
        &mut self,
        object: &Bound<'_, PyAny>,
        name: &str,
        writes: bool,
    ) -> PyResult<Memory> {
        if let Ok(matrix) = object.cast_exact::<Matrix>() {
            let kept = &matrix.get().0;
            return if writes {
                kept.written(object.py(), self.call, name)
            } else {
                Ok(kept.memory)
            };
        }
        if object.is_instance_of::<Sharded>() {
            let what = format!(
                "{name} is a Sharded and must be a matrix of this rank's own, such as its shard or its whole"
            );
            return Err(self.refused(object.py(), &what));
        }
        let py = object.py();
        if let Some(exchange) = exchange_of(object)
            && let Some(tensor) = exchange.tensor(object)?
        {
            let stream = exchange.stream_for(py, self.group)?;
            self.goes_on(py, name, stream.map(CallStream::lasting))?;
            return memory_of(py, &tensor, self.group, self.call, name);
        }
        self.lent(object, name, writes)
    }

    /// The memory of a tensor of a library that has to keep it until the call is complete.
    fn lent(&mut self, object: &Bound<'_, PyAny>, name: &str, writes: bool) -> PyResult<Memory> {
        let py = object.py();
        let is_on_gpu = self.group.backend() == BackendKind::Cuda;
        if is_on_gpu && is_of_cupy(object) {
            let stream = streams::of_cupy(py, self.group)?;
            self.goes_on(py, name, stream)?;
        } else if is_on_gpu {
            self.stream = self.stream(py)?;
        }
        let (memory, is_read_only) = self.made_ready(object, name)?;
        if writes && is_read_only {
            return Err(read_only(py, self.group, self.call, name));
        }
        if is_on_gpu && !self.is_current {
            let tensor = (object.clone().unbind(), name.into(), memory);
            self.without_stream.push(tensor);
        }
        Ok(memory)
    }

    /// Tells a tensor's library the stream of the call, so that it has the memory ready there. Returns the memory, and
    /// whether it is read-only.
    fn made_ready(&mut self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<(Memory, bool)> {
        let stream = self.stream.as_ref().map(|stream| stream.raw);
        let stream = stream.unwrap_or_else(|| self.group.stream());
        let tensor = managed(object, self.group, (self.call, name), stream)?;
        let is_read_only = tensor.tensor().is_some_and(Tensor::is_read_only);
        let memory = memory_of_managed(object.py(), &tensor, self.group, self.call, name)?;
        self.kept.push(tensor);
        Ok((memory, is_read_only))
    }

    /// Puts the call on the stream of the library of the argument `name`. All libraries that have one must have one.
    fn goes_on(&mut self, py: Python<'_>, name: &str, stream: Option<CallStream>) -> PyResult<()> {
        let Some(stream) = stream else { return Ok(()) };
        stream.require_one(py, self.group, self.call)?;
        let other = self.stream.take().filter(|other| !other.is(&stream));
        if let (Some(other), true) = (&other, self.is_current) {
            let what = format!(
                "the library of {name} has the current stream {:#x}, and the arguments before are used on {:#x}; make \
                 one stream current in both libraries, such as by torch.cuda.ExternalStream or cupy.cuda.ExternalStream",
                stream.raw, other.raw
            );
            return Err(self.refused(py, &what));
        }
        self.stream = Some(stream);
        self.is_current = true;
        for (object, name, memory) in std::mem::take(&mut self.without_stream) {
            let (found, _) = self.made_ready(object.bind(py), &name)?;
            if found != memory {
                let what = format!("the library of {name} gives other memory each time; copy it");
                return Err(self.refused(py, &what));
            }
        }
        Ok(())
    }

    /// The stream of the call. None if the group stays where it is.
    pub fn stream(&self, py: Python<'_>) -> PyResult<Option<CallStream>> {
        if self.stream.is_some() {
            return Ok(self.stream.clone());
        }
        streams::of_call(py, self.group, self.call)
    }

    /// Makes the call, on its stream.
    pub fn enqueued<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce() -> gemmesh::Result<R> + Send,
    ) -> PyResult<R> {
        let stream = self.stream(py).map_err(|error| self.told(error))?;
        let awaited = self.is_collective.then_some(self.call);
        enqueued_on(py, self.group, stream, awaited, call)
    }

    pub fn optional(
        &mut self,
        object: Option<&Bound<'_, PyAny>>,
        name: &str,
    ) -> PyResult<Option<Memory>> {
        object.map(|object| self.memory(object, name)).transpose()
    }

    /// An operand of this rank's own, with its scales if it has any.
    pub fn operand(&mut self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<AnyOperand> {
        let Ok(scaled) = object.cast_exact::<Scaled>() else {
            return Ok(AnyOperand {
                values: self.memory(object, name)?,
                scales: None,
            });
        };
        let (py, scaled) = (object.py(), scaled.get());
        let scales = self.memory(scaled.scales.bind(py), &format!("the scales of {name}"))?;
        Ok(AnyOperand {
            values: self.memory(scaled.values.bind(py), name)?,
            scales: Some((scales, scaled.scaling)),
        })
    }

    /// One weight, or a list or tuple of several.
    pub fn weights(&mut self, object: &Bound<'_, PyAny>) -> PyResult<Vec<AnyOperand>> {
        let weights = self.listed(object);
        weights.iter().map(|one| self.operand(one, "b")).collect()
    }

    /// The objects of a list or a tuple, which live as long as the reader, or the one that is none.
    fn listed<'py>(&mut self, object: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
        let objects = listed(object);
        if is_list(object) {
            self.listed
                .extend(objects.iter().map(|one| one.clone().unbind()));
        }
        objects
    }

    /// One output, or a list or tuple of several.
    pub fn outputs(&mut self, object: &Bound<'_, PyAny>) -> PyResult<Vec<AnyOutput>> {
        let outputs = self.listed(object);
        let outputs = outputs.iter().map(|one| {
            let Ok(quantized) = one.cast_exact::<Quantized>() else {
                return Ok(AnyOutput {
                    values: self.written(one, "out")?,
                    scales: None,
                });
            };
            let (py, quantized) = (one.py(), quantized.get());
            let scales = self.written(quantized.scales.bind(py), "the scales of out")?;
            Ok(AnyOutput {
                values: self.written(quantized.values.bind(py), "out")?,
                scales: Some((scales, quantized.quantization)),
            })
        });
        outputs.collect()
    }

    /// The error of an argument. `what` is wrong.
    pub fn refused(&self, py: Python<'_>, what: &str) -> PyErr {
        refused(py, self.group, self.call, what)
    }

    /// As [`Reader::refused`], of which the other ranks are told if they wait for this one in the call.
    pub fn refuse(&self, py: Python<'_>, what: &str) -> PyErr {
        if self.is_collective {
            let error = self.group.refuse_because(self.call, what);
            exception(py, &error, Some(self.group.rank()))
        } else {
            self.refused(py, what)
        }
    }

    /// Keeps the tensors until the operations so far are complete.
    pub fn keep(self) {
        for tensor in self.kept {
            tensor.keep(self.group);
        }
    }
}

/// True if an argument is several.
pub fn is_list(object: &Bound<'_, PyAny>) -> bool {
    object.is_instance_of::<PyList>() || object.is_instance_of::<PyTuple>()
}

/// The objects of a list or a tuple, or the one that is none.
pub fn listed<'py>(object: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().collect();
    }
    match object.cast::<PyTuple>() {
        Ok(tuple) => tuple.iter().collect(),
        Err(_) => vec![object.clone()],
    }
}

/// Rows that are sharded, with their layout held.
pub struct HeldRows<'a> {
    pub shards: RwLockReadGuard<'a, AnyShards>,
    scales: Option<HeldScales<'a>>,
}

enum HeldScales<'a> {
    Own(Memory, Scaling),
    Sharded(RwLockReadGuard<'a, AnyShards>, Scaling),
}

impl<'a> HeldRows<'a> {
    /// The rows of a `Sharded`, or of a `Scaled` of one.
    pub fn new<'py>(reader: &mut Reader, object: &'a Bound<'py, PyAny>) -> PyResult<HeldRows<'a>> {
        let py = object.py();
        let (values, scaled) = match object.cast_exact::<Scaled>() {
            Ok(scaled) => (scaled.get().values.bind(py), Some(scaled.get())),
            Err(_) => (object, None),
        };
        let shards = held(reader, values, "a")?;
        let scales = match scaled {
            None => None,
            Some(Scaled {
                scales, scaling, ..
            }) => {
                let scales = scales.bind(py);
                Some(if scales.is_instance_of::<Sharded>() {
                    HeldScales::Sharded(held(reader, scales, "the scales of a")?, *scaling)
                } else {
                    HeldScales::Own(reader.memory(scales, "the scales of a")?, *scaling)
                })
            }
        };
        Ok(HeldRows { shards, scales })
    }

    pub fn operand(&self) -> RowOperand<'_> {
        let scales = self.scales.as_ref().map(|scales| match scales {
            HeldScales::Own(memory, scaling) => AnyShardedScales::Own(*memory, *scaling),
            HeldScales::Sharded(shards, scaling) => AnyShardedScales::Sharded(shards, *scaling),
        });
        RowOperand::Sharded(&self.shards, scales)
    }
}

/// A sharded matrix with its layout held.
fn held<'a>(
    reader: &Reader,
    object: &'a Bound<'_, PyAny>,
    name: &str,
) -> PyResult<RwLockReadGuard<'a, AnyShards>> {
    let py = object.py();
    match object.cast_exact::<Sharded>() {
        Ok(sharded) => sharded.get().read(py),
        Err(_) => {
            let class = object.get_type().qualname()?;
            let what = format!("{name} is a {class} and must be a gemmesh.Sharded (Group.sharded)");
            Err(reader.refused(py, &what))
        }
    }
}

/// What keeps the memory of a sharded matrix. Of another object, nothing.
pub fn keeper_of(object: &Bound<'_, PyAny>) -> Keeper {
    match object.cast_exact::<Sharded>() {
        Ok(sharded) => sharded.get().keeper(),
        Err(_) => Arc::new(()),
    }
}

/// Where a product goes: matrices of this rank's own, or a sharded matrix.
pub enum HeldOutputs<'a> {
    Own(Vec<AnyOutput>),
    Sharded(RwLockReadGuard<'a, AnyShards>),
}

impl<'a> HeldOutputs<'a> {
    pub fn new(reader: &mut Reader, object: &'a Bound<'_, PyAny>) -> PyResult<HeldOutputs<'a>> {
        Ok(if object.is_instance_of::<Sharded>() {
            HeldOutputs::Sharded(held(reader, object, "out")?)
        } else {
            HeldOutputs::Own(reader.outputs(object)?)
        })
    }

    pub fn outputs(&self) -> AnyOutputs<'_> {
        match self {
            HeldOutputs::Own(outputs) => AnyOutputs::Own(outputs),
            HeldOutputs::Sharded(shards) => AnyOutputs::Sharded(shards),
        }
    }
}
