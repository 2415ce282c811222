//! Products: calls that are planned when they are made, and calls that have been prepared.

use std::sync::Arc;

use gemmesh::raw::{
    self, AnyGroup, Memory, Operand, PreparedFor, Product, ProductCall, ProductKind, RowOperand,
};
use gemmesh::{DType, Quantization, Scaling, WeightLayout};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::matrix::{Freed, Kept, Matrix};
use crate::operands::{HeldOutputs, HeldRows, Reader, held, is_list};
use crate::trace::Trace;
use crate::waiting::{enqueued, waited};

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
    Own(Operand),
    Sharded(HeldRows<'a>),
}

impl<'a> GivenRows<'a> {
    fn new(
        reader: &mut Reader,
        kind: ProductKind,
        a: &'a Bound<'_, PyAny>,
    ) -> PyResult<GivenRows<'a>> {
        Ok(match kind.gathers() {
            true => GivenRows::Sharded(HeldRows::new(reader, a)?),
            false => GivenRows::Own(reader.operand(a, "a")?),
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
            RowOperand::Sharded(_, Some(raw::ShardedScales::Own(_, scaling)))
            | RowOperand::Sharded(_, Some(raw::ShardedScales::Sharded(_, scaling))) => scaling,
        }
    }
}

fn scaling_of(operand: &Operand) -> Scaling {
    operand.scales.map_or(Scaling::None, |(_, scaling)| scaling)
}

/// N of a weight.
fn n_of(weight: &Operand, layout: WeightLayout) -> usize {
    let [rows, columns] = weight.values.shape;
    match layout {
        WeightLayout::Nk => rows,
        WeightLayout::Kn => columns,
    }
}

/// How a product is made.
pub enum How<'a> {
    /// It is planned, unless the group has its plan.
    Planned,
    /// It has been prepared.
    Prepared(&'a dyn raw::Prepared),
}

/// Makes a product, and returns its outputs: those that were given, or new ones.
pub fn run(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    mut product: Product,
    how: How,
    given: &Given<'_, '_>,
) -> PyResult<Py<PyAny>> {
    let mut reader = Reader::new(&**group, product.kind.name());
    let rows = GivenRows::new(&mut reader, product.kind, given.a)?;
    product.dtype = rows.dtype();
    let weights = reader.weights(given.b)?;
    let made;
    let out = match given.out {
        Some(out) => out,
        None => {
            let weights = (&weights[..], is_list(given.b));
            made = new_outputs(py, group, &product, rows.shape(), weights)?;
            &made
        }
    };
    let outputs = HeldOutputs::new(&mut reader, out)?;
    let call = ProductCall {
        a: rows.operand(),
        weights: &weights,
        outputs: outputs.outputs(),
        bias: reader.optional(given.bias, "bias")?,
        residual: reader.optional(given.residual, "residual")?,
    };
    // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
    enqueued(py, &**group, || unsafe {
        match how {
            How::Planned => group.run(&product, &call),
            How::Prepared(prepared) => prepared.run(&call),
        }
    })?;
    reader.keep();
    Ok(out.clone().unbind())
}

/// New outputs for a product of rows [m, k]: a matrix, or a list of one for each weight if the weights are a list.
fn new_outputs<'py>(
    py: Python<'py>,
    group: &Arc<dyn AnyGroup>,
    product: &Product,
    [m, _]: [usize; 2],
    (weights, is_list): (&[Operand], bool),
) -> PyResult<Bound<'py, PyAny>> {
    if product.kind == ProductKind::MatmulAllReduce {
        let reader = Reader::new(&**group, product.kind.name());
        return Err(reader.refused("out must be given, a gemmesh.Sharded [M, N]", py));
    }
    let half = if product.dtype.is_half() {
        product.dtype
    } else {
        DType::Bf16
    };
    let dtype = product.output_dtype.unwrap_or(half);
    let rows = match (product.kind, &product.rows) {
        (ProductKind::MatmulReduceScatter, Some(rows)) => rows.get(group.rank()).copied(),
        (ProductKind::MatmulReduceScatter, None) => Some(group.even_rows(m)[group.rank()]),
        _ => Some(m),
    };
    let new = |weight: &Operand| -> PyResult<Bound<'py, PyAny>> {
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
    mut product: Product,
    given: &Given<'_, '_>,
) -> PyResult<Prepared> {
    let mut reader = Reader::new(&**group, product.kind.name());
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
    planned: Freed<Box<dyn raw::Prepared>>,
    group: Freed<Arc<dyn AnyGroup>>,
    product: Product,
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
        let how = How::Prepared(&**self.planned);
        run(py, &self.group, self.product.clone(), how, &given)
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
        let group: &dyn AnyGroup = &**self.group;
        let mut reader = Reader::new(group, self.product.kind.name());
        let rows = GivenRows::new(&mut reader, self.product.kind, a)?;
        let weights = reader.weights(b)?;
        let outputs = HeldOutputs::new(&mut reader, out)?;
        let call = ProductCall {
            a: rows.operand(),
            weights: &weights,
            outputs: outputs.outputs(),
            bias: reader.optional(bias, "bias")?,
            residual: reader.optional(residual, "residual")?,
        };
        // SAFETY: the objects keep their memory during the call, which is complete when it returns.
        let trace = waited(py, group, || unsafe { self.planned.run_traced(&call) })?;
        Ok(Trace(trace))
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
    let mut reader = Reader::new(&**group, "quantize");
    let x = reader.memory(x, "x")?;
    let outputs = reader.outputs(out)?;
    let quantized: Option<(Memory, (Memory, Quantization))> = match outputs[..] {
        [
            raw::Output {
                values,
                scales: Some(scales),
            },
        ] => Some((values, scales)),
        _ => None,
    };
    let Some((values, scales)) = quantized else {
        return Err(reader.refused("out must be a gemmesh.Quantized", py));
    };
    // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
    enqueued(py, &**group, || unsafe {
        group.quantize(x, values, scales)
    })?;
    reader.keep();
    Ok(())
}

/// A collective of a matrix of this rank's own into a sharded one.
pub fn into_sharded(
    py: Python<'_>,
    group: &Arc<dyn AnyGroup>,
    call: &'static str,
    a: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let mut reader = Reader::new(&**group, call);
    let memory = reader.memory(a, "a")?;
    let shards = held(&reader, out, "out")?;
    // SAFETY: the objects keep their memory during the call, and the reader until it is complete.
    enqueued(py, &**group, || unsafe {
        match call {
            "all_reduce" => group.all_reduce(memory, &shards),
            _ => group.all_to_all(memory, &shards),
        }
    })?;
    reader.keep();
    Ok(())
}
