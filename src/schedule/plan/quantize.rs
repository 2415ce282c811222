//! The planner of `quantize`: a sum of one addend, which is stored with its scales.

use crate::Result;
use crate::schedule::layout::MAX_EXTENT;
use crate::schedule::limits::limit;
use crate::schedule::plan::matrices::{self, A, OUT, OUT_SCALES};
use crate::schedule::{
    Activation, Addend, Config, DTypes, MatrixSpec, OutputScales, Parts, Problem, Reduction,
    Schedule, Sum,
};

/// Quantises the rows of a matrix. One rank does so alone.
///
/// # Errors
/// `Kind::Limit` if N is out of bounds. `Kind::Unsupported` if values of this type cannot be quantised.
pub(super) fn quantize(problem: &Problem, rank: usize, config: Config) -> Result<Schedule> {
    let (m, n) = (problem.layout.m(), problem.n);
    let DTypes {
        operands, output, ..
    } = problem.dtypes;
    config.check()?;
    limit("N", n, 1, MAX_EXTENT)?;
    let sum = Sum {
        out: OUT,
        first: 0,
        addends: vec![Addend::Rows {
            matrix: A,
            first: 0,
        }],
        bias: None,
        activation: Activation::Identity,
        residual: None,
        scales: OutputScales::new(OUT_SCALES, problem.form.quantization),
    };
    let mut matrices = matrices::unused(operands);
    matrices[A] = MatrixSpec::new(operands, m, n);
    matrices[OUT] = MatrixSpec::new(output, m, n);
    matrices::specify_output_scales(&mut matrices, &sum, n)?;
    Schedule::new(Parts {
        rank,
        world: problem.layout.world(),
        agreed: None,
        matrices,
        arrivals: Vec::new(),
        departures: Vec::new(),
        product: None,
        tiles: Vec::new(),
        requests: Vec::new(),
        host_sums: Vec::new(),
        reduction: (m > 0).then_some(Reduction { rows: m, n, sum }),
        one_shot: false,
    })
}
