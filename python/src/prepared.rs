//! Products: calls that are planned when they are made, and calls that have been prepared.

use std::cell::OnceCell;
use std::sync::Arc;

use gemmesh::DType;
use gemmesh::fp8::{Quantization, Scaling};
use gemmesh::products::WeightLayout;
use gemmesh::raw::{
    self, AnyGroup, AnyOperand, AnyProduct, AnyShards, Memory, PreparedFor, ProductCall,
    ProductKind, RowOperand,
};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::errors::misuse;
use crate::matrix::{Freed, Kept, Matrix};
use crate::names;
use crate::operands::{HeldOutputs, HeldRows, Reader, is_list};
use crate::trace::Trace;
use crate::waiting::waited;

/// The objects that a product gets from Python.
pub struct Given<'a, 'py> {
    pub a: &'a Bound<'py, PyAny>,
    pub b: &'a Bound<'py, PyAny>,
    pub out: Option<&'a Bound<'py, PyAny>>,
    pub bias: Option<&'a Bound<'py, PyAny>>,
    pub residual: Option<&'a Bound<'py, PyAny>>,
}

/// The rows of a product.
enum GivenRows<'a> {
    Own(AnyOperand),
    Sharded(HeldRows<'a>),
}

impl<'a> GivenRows<'a> {
    fn new(
        reader: &mut Reader,
        kind: ProductKind,
        a: &'a Bound<'_, PyAny>,
    ) -> PyResult<GivenRows<'a>> {
        Ok(if kind.gathers() {
            GivenRows::Sharded(HeldRows::new(reader, a)?)
        } else {
            GivenRows::Own(reader.operand(a, "a")?)
        })
    }

    fn dtype(&self) -> DType {
        match self {
            GivenRows::Own(operand) => operand.values.dtype,
            GivenRows::Sharded(rows) => rows.shards.dtype(),
        }
    }

    /// [M, K]
    fn shape(&self) -> [usize; 2] {
        match self {
            GivenRows::Own(operand) => operand.values.shape,
            GivenRows::Sharded(rows) => rows.shards.shape(),
        }
    }

    fn operand(&self) -> RowOperand<'_> {
        match self {
            GivenRows::Own(operand) => RowOperand::Own(*operand),
            GivenRows::Sharded(rows) => rows.operand(),
        }
    }

    fn scaling(&self) -> Scaling {
        match self.operand() {
            RowOperand::Own(operand) => scaling_of(&operand),
            RowOperand::Sharded(_, None) => Scaling::None,
            RowOperand::Sharded(_, Some(raw::AnyShardedScales::Own(_, scaling)))
            | RowOperand::Sharded(_, Some(raw::AnyShardedScales::Sharded(_, scaling))) => scaling,
        }
    }
}

fn scaling_of(operand: &AnyOperand) -> Scaling {
    operand.scales.map_or(Scaling::None, |(_, scaling)| scaling)
}

/// N of a weight.
fn n_of(weight: &AnyOperand, layout: WeightLayout) -> usize {
    let [rows, columns] = weight.values.shape;
    match layout {
        WeightLayout::Nk => rows,
        WeightLayout::Kn => columns,
    }
}

/// The arguments of a product, read from Python's objects.
struct Arguments<'a> {
    rows: GivenRows<'a>,
    weights: Vec<AnyOperand>,
    outputs: HeldOutputs<'a>,
    bias: Option<Memory>,
    residual: Option<Memory>,
}

impl<'a> Arguments<'a> {
    /// Reads them. Without outputs, new ones are made and put into `made`.
    fn new<'py>(
        reader: &mut Reader,
        group: &Arc<dyn AnyGroup>,
        product: &AnyProduct,
        given: &Given<'a, 'py>,
        made: &'a OnceCell<Bound<'py, PyAny>>,
    ) -> PyResult<Arguments<'a>> {
        let py = given.a.py();
        let rows = GivenRows::new(reader, product.kind, given.a)?;
        let weights = reader.weights(given.b)?;
        let out = match given.out {
            Some(out) => out,
            None => {
                let several = (&weights[..], is_list(given.b));
                let new = new_outputs(py, group, product, &rows, several)?;
                made.get_or_init(|| new)
            }
        };
        Ok(Arguments {
            outputs: HeldOutputs::new(reader, out)?,
            bias: reader.optional(given.bias, "bias")?,
            residual: reader.optional(given.residual, "residual")?,
            rows,
            weights,
        })
    }

    fn call(&self) -> ProductCall<'_> {
        ProductCall {
            a: self.rows.operand(),
            weights: &self.weights,
            outputs: self.outputs.outputs(),
            bias: self.bias,
            residual: self.residual,
        }
    }
}

/// Who reads the arguments of a product.
pub fn reader_of<'a>(group: &'a dyn AnyGroup, kind: ProductKind) -> Reader<'a> {
    match kind {
        ProductKind::Matmul => Reader::alone(group, kind.name()),
        _ => Reader::collective(group, kind.name()),
    }
}

/// Makes a product of arguments that are read from Python's objects, and returns its outputs: those that were given, or
/// new ones.
fn make(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    product: &AnyProduct,
    given: &Given<'_, '_>,
    run: impl FnOnce(DType, &ProductCall) -> gemmesh::Result<()> + Send,
) -> PyResult<Py<PyAny>> {
    let mut reader = reader_of(&**group, product.kind);
    let made = OnceCell::new();
    let arguments = Arguments::new(&mut reader, group, product, given, &made);
    let arguments = arguments.map_err(|error| reader.told(error))?;
    let (dtype, call) = (arguments.rows.dtype(), arguments.call());
    reader.enqueued(py, || run(dtype, &call))?;
    reader.keep();
    let out = given.out.or(made.get());
    Ok(out.map_or_else(|| py.None(), |out| out.clone().unbind()))
}

/// Makes a product that is planned now, unless the group has its plan.
pub fn run(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    mut product: AnyProduct,
    given: &Given<'_, '_>,
) -> PyResult<Py<PyAny>> {
    let of = product.clone();
    make(py, group, &of, given, move |dtype, call| {
        product.dtype = dtype;
        // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
        unsafe { group.run(&product, call) }
    })
}

/// New outputs for a product of rows [m, k]: a matrix, or a list of one for each weight if the weights are a list.
fn new_outputs<'py>(
    py: Python<'py>,
    group: &Arc<dyn AnyGroup>,
    product: &AnyProduct,
    rows: &GivenRows<'_>,
    (weights, is_list): (&[AnyOperand], bool),
) -> PyResult<Bound<'py, PyAny>> {
    if product.kind == ProductKind::MatmulAllReduce {
        let reader = reader_of(&**group, product.kind);
        return Err(reader.refused(py, "out must be given, a gemmesh.Sharded [M, N]"));
    }
    let ([m, _], operands) = (rows.shape(), rows.dtype());
    let half = if operands.is_half() {
        operands
    } else {
        DType::Bf16
    };
    let dtype = product.output_dtype.unwrap_or(half);
    let rows = match (product.kind, &product.rows) {
        (ProductKind::MatmulReduceScatter, Some(rows)) => rows.get(group.rank()).copied(),
        (ProductKind::MatmulReduceScatter, None) => Some(group.even_rows(m)[group.rank()]),
        _ => Some(m),
    };
    let new = |weight: &AnyOperand| -> PyResult<Bound<'py, PyAny>> {
        let shape = [rows.unwrap_or(0), n_of(weight, product.weight_layout)];
        let matrix = Matrix(Kept::zeros(py, group, dtype, shape)?);
        Ok(Bound::new(py, matrix)?.into_any())
    };
    match weights {
        [first, ..] if product.gated || !is_list => new(first),
        all => {
            let outputs = all.iter().map(new).collect::<PyResult<Vec<_>>>()?;
            Ok(PyList::new(py, outputs)?.into_any())
        }
    }
}

/// Plans calls with arguments like these.
pub fn prepare(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    mut product: AnyProduct,
    given: &Given<'_, '_>,
) -> PyResult<Prepared> {
    let mut reader = Reader::alone(&**group, product.kind.name());
    let rows = GivenRows::new(&mut reader, product.kind, given.a)?;
    let weights = reader.weights(given.b)?;
    product.dtype = rows.dtype();
    product.weight_dtype = weights.first().map(|weight| weight.values.dtype);
    product.scaling = (rows.scaling(), weights.iter().map(scaling_of).collect());
    let out = given
        .out
        .map(|out| HeldOutputs::new(&mut reader, out))
        .transpose()?;
    match &out {
        Some(HeldOutputs::Own(outputs)) => {
            let first = outputs.first();
            product.output_dtype = first.map(|out| out.values.dtype);
            product.quantization = first.and_then(|out| out.scales.map(|(_, how)| how));
        }
        Some(HeldOutputs::Sharded(shards)) => product.output_dtype = Some(shards.dtype()),
        None => {}
    }
    let widths: Vec<_> = weights
        .iter()
        .map(|weight| n_of(weight, product.weight_layout))
        .collect();
    let shape = rows.shape();
    let planned_for = match (&rows, &out) {
        (GivenRows::Sharded(rows), _) => PreparedFor::Sharded(&rows.shards),
        (_, Some(HeldOutputs::Sharded(out))) if product.kind == ProductKind::MatmulAllReduce => {
            PreparedFor::OwnInto(shape, out)
        }
        _ => PreparedFor::Own(shape),
    };
    let planned = waited(py, &**group, || {
        group.prepare(&product, planned_for, &widths)
    })?;
    Ok(Prepared {
        planned: Freed::new(planned),
        group: Freed::new(group.clone()),
        product,
    })
}

/// A product that has been planned by `Group.prepare`. Call it with arguments like those it was planned for.
///
/// `prepared(a, b, out, bias=None, residual=None)` returns `out`. Calls need no planning and allocate nothing.
#[pyclass(frozen, module = "gemmesh")]
pub struct Prepared {
    planned: Freed<Box<dyn raw::AnyPrepared>>,
    group: Freed<Arc<dyn AnyGroup>>,
    product: AnyProduct,
}

impl Prepared {
    /// The product.
    pub fn planned(&self) -> &dyn raw::AnyPrepared {
        &**self.planned
    }

    /// The name of the call.
    pub fn name(&self) -> &'static str {
        self.product.kind.name()
    }
}

#[pymethods]
impl Prepared {
    #[pyo3(signature = (a, b, out=None, *, bias=None, residual=None))]
    fn __call__(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: Option<&Bound<'_, PyAny>>,
        bias: Option<&Bound<'_, PyAny>>,
        residual: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let given = Given {
            a,
            b,
            out,
            bias,
            residual,
        };
        make(py, &self.group, &self.product, &given, |_, call| {
            // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
            unsafe { self.planned.run(call) }
        })
    }

    /// As a call, and returns a trace of this rank's work. Either all ranks trace a call or none does.
    #[pyo3(signature = (a, b, out, *, bias=None, residual=None))]
    fn traced(
        &self,
        py: Python<'_>,
        a: &Bound<'_, PyAny>,
        b: &Bound<'_, PyAny>,
        out: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        residual: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Trace> {
        let given = Given {
            a,
            b,
            out: Some(out),
            bias,
            residual,
        };
        let mut traced = None;
        make(py, &self.group, &self.product, &given, |_, call| {
            // SAFETY: the objects keep their memory during the call, which is complete when it returns.
            traced = Some(unsafe { self.planned.run_traced(call)? });
            Ok(())
        })?;
        traced
            .map(Trace)
            .ok_or_else(|| misuse(py, "the call has no trace"))
    }

    /// Who moves rows: "pull", "push" or "store". A gather that pulls cannot be captured in a CUDA graph.
    #[getter]
    fn route(&self) -> &'static str {
        names::of_route(self.planned.route())
    }

    /// How the product is cut up, and how long that is expected to take, in words.
    fn explain(&self) -> String {
        self.planned.explain()
    }

    fn __repr__(&self) -> String {
        format!(
            "Prepared({}, {})",
            self.product.kind.name(),
            self.product.dtype
        )
    }
}

/// Quantises `x` to `out`, which is a [`Quantized`](crate::operands::Quantized).
pub fn quantize(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    x: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let mut reader = Reader::alone(&**group, "quantize");
    let x = reader.memory(x, "x")?;
    let outputs = reader.outputs(out)?;
    let quantized: Option<(Memory, (Memory, Quantization))> = match outputs[..] {
        [
            raw::AnyOutput {
                values,
                scales: Some(scales),
            },
        ] => Some((values, scales)),
        _ => None,
    };
    let Some((values, scales)) = quantized else {
        return Err(reader.refused(py, "out must be a gemmesh.Quantized"));
    };
    // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
    reader.enqueued(py, || unsafe { group.quantize(x, values, scales) })?;
    reader.keep();
    Ok(())
}

/// A collective of a matrix of this rank's own into a sharded one, which `begin` begins.
pub fn into_sharded(
    py: Python<'_>,
    mut reader: Reader<'_>,
    a: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    begin: impl FnOnce(Memory, &AnyShards) -> gemmesh::Result<()> + Send,
) -> PyResult<()> {
    let memory = reader.memory(a, "a").map_err(|error| reader.told(error))?;
    let shards = reader.shards(out, "out")?;
    reader.enqueued(py, || begin(memory, &shards))?;
    reader.keep();
    Ok(())
}
