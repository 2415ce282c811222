//! What a call is asked for besides its matrices, read from Python's arguments.

use std::time::Duration;

use gemmesh::DType;
use gemmesh::raw::{AnyProduct, BackendKind, Options, ProductKind};
use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::argument;
use crate::names::{self, Count, Said, count, counts, one_of};

/// This rank's number and the number of ranks, as `call` gets them, by which the rank joins a group.
pub fn place(py: Python<'_>, call: &str, rank: Count, world: Count) -> PyResult<(usize, usize)> {
    let rank = rank
        .of("rank")
        .map_err(|what| argument(py, None, call, &what))?;
    let world = world
        .of("world")
        .map_err(|what| argument(py, Some(rank), call, &what))?;
    if rank >= world {
        let what = format!("rank is {rank} and must be below the number of ranks, {world}");
        return Err(argument(py, Some(rank), call, &what));
    }
    Ok((rank, world))
}

/// The backend and the options of a group that is joined by `call`, as `rank` if the call says it.
pub fn of_new_group(
    py: Python<'_>,
    call: &str,
    rank: Option<usize>,
    backend: &str,
    given: Option<&Bound<'_, PyDict>>,
) -> PyResult<(BackendKind, Options)> {
    let refuse = |what: String| argument(py, rank, call, &what);
    let known = [("cuda", BackendKind::Cuda), ("host", BackendKind::Host)];
    let backend = one_of("backend", backend, &known).map_err(refuse)?;
    Ok((backend, of_group(given, refuse)?))
}

/// Options of a group, by name. `refuse` makes the exception of a value that no group takes.
pub fn of_group(
    given: Option<&Bound<'_, PyDict>>,
    refuse: impl Fn(String) -> PyErr,
) -> PyResult<Options> {
    let mut options = Options::default();
    for (name, value) in given.into_iter().flat_map(|given| given.iter()) {
        let name: String = name.extract()?;
        match name.as_str() {
            "timeout" => {
                options.timeout = seconds(&name, typed(&name, &value)?).map_err(&refuse)?;
            }
            "arrival_timeout" => {
                options.arrival_timeout = seconds(&name, typed(&name, &value)?).map_err(&refuse)?;
            }
            "host_timeout" => {
                options.host_timeout = seconds(&name, typed(&name, &value)?).map_err(&refuse)?;
            }
            "workers" => options.workers = count(&name, typed(&name, &value)?).map_err(&refuse)?,
            "device" => options.device = count(&name, typed(&name, &value)?).map_err(&refuse)?,
            "max_ctas" => {
                options.max_ctas = count(&name, typed(&name, &value)?).map_err(&refuse)?
            }
            "numerics" => {
                let word: Option<String> = typed(&name, &value)?;
                let numerics = word.as_deref().map(names::numerics).transpose();
                options.numerics = numerics.map_err(&refuse)?;
            }
            "name" => options.name = typed(&name, &value)?,
            other => {
                return Err(PyTypeError::new_err(format!(
                    "{other:?} is no option of a group; there are timeout, arrival_timeout, host_timeout, workers, device, \
                     max_ctas, numerics and name"
                )));
            }
        }
    }
    Ok(options)
}

/// The value of an option. A value of another type is a TypeError that names the option, as those of arguments do.
fn typed<'py, T: FromPyObjectOwned<'py>>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<T> {
    value.extract().map_err(|error: T::Error| {
        let error: PyErr = error.into();
        PyTypeError::new_err(format!("argument '{name}': {}", error.value(value.py())))
    })
}

fn seconds(option: &str, seconds: Option<f64>) -> Said<Option<Duration>> {
    let duration = seconds.map(|seconds| {
        Duration::try_from_secs_f64(seconds).map_err(|_| {
            format!("{option} is {seconds:?} and must be a number of seconds, 0 or more")
        })
    });
    duration.transpose()
}

/// The kind of a product, by the name of its operation.
pub fn kind_of(operation: &str) -> Said<ProductKind> {
    let kinds = [
        ProductKind::Matmul,
        ProductKind::AllGatherMatmul,
        ProductKind::MatmulReduceScatter,
        ProductKind::MatmulAllReduce,
    ];
    one_of(
        "operation",
        operation,
        &kinds.map(|kind| (kind.name(), kind)),
    )
}

/// What a product does besides multiplying, by name.
pub struct Asked<'a, 'py> {
    pub activation: Option<&'a str>,
    pub gated: bool,
    pub weight_layout: &'a str,
    pub accumulation: &'a str,
    pub constant_weights: bool,
    pub dtype: Option<&'a Bound<'py, PyAny>>,
    pub stages: Option<Count>,
    pub rows: Option<Vec<Count>>,
    pub route: Option<&'a str>,
}

impl Asked<'_, '_> {
    /// The product. The type of its rows is that of the argument.
    pub fn product(self, kind: ProductKind) -> Said<AnyProduct> {
        Ok(AnyProduct {
            activation: names::activation(self.activation)?,
            gated: self.gated,
            weight_layout: names::weight_layout(self.weight_layout)?,
            accumulation: names::accumulation(self.accumulation)?,
            constant_weights: self.constant_weights,
            output_dtype: self
                .dtype
                .map(|dtype| names::dtype("the output's dtype", dtype))
                .transpose()?,
            stages: count("stages", self.stages)?,
            rows: counts("rows", self.rows)?,
            route: self.route.map(names::route).transpose()?,
            ..AnyProduct::new(kind, DType::Bf16)
        })
    }
}
