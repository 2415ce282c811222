//! The words and numbers by which Python says types, options and sizes. What is wrong with one is a sentence without the
//! call and the rank, which the caller knows.

use gemmesh::fp8::{Accumulation, Quantization, Scaling};
use gemmesh::products::WeightLayout;
use gemmesh::tuning::{Numerics, Route};
use gemmesh::{Activation, DType};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

/// What an argument says, or what is wrong with it.
pub type Said<T> = Result<T, String>;

/// A number of rows, columns, ranks or other things. Whether it fits is seen when the call reads it, so that the error
/// can name the argument.
pub struct Count(Said<usize>);

impl<'py> FromPyObject<'_, 'py> for Count {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Count> {
        match object.extract::<usize>() {
            Ok(count) => Ok(Count(Ok(count))),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let number = object.call_method0("__index__")?;
                Ok(Count(Err(number.str()?.to_string())))
            }
            Err(error) => Err(error),
        }
    }
}

impl Count {
    /// The number of the argument `name`.
    pub fn of(self, name: &str) -> Said<usize> {
        let Count(count) = self;
        count.map_err(|digits| {
            if digits.starts_with('-') {
                format!("{name} is {digits} and must not be negative")
            } else {
                format!("{name} is {digits}, which is too large")
            }
        })
    }
}

/// The number of an argument that need not be given.
pub fn count(name: &str, given: Option<Count>) -> Said<Option<usize>> {
    given.map(|count| count.of(name)).transpose()
}

/// The numbers of an argument that need not be given.
pub fn counts(name: &str, given: Option<Vec<Count>>) -> Said<Option<Vec<usize>>> {
    let all = |counts: Vec<Count>| counts.into_iter().map(|count| count.of(name)).collect();
    given.map(all).transpose()
}

/// The numbers of all pairs of ranks, row by row, of an argument that need not be given.
pub fn pairs(name: &str, given: Option<Vec<Vec<Count>>>, world: usize) -> Said<Option<Vec<usize>>> {
    let Some(rows) = given else { return Ok(None) };
    let lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
    if lengths != vec![world; world] {
        return Err(format!(
            "{name} has rows of {lengths:?} numbers and must have {world} rows of {world}"
        ));
    }
    counts(name, Some(rows.into_iter().flatten().collect()))
}

/// One of several words.
pub fn one_of<T: Copy>(option: &str, word: &str, known: &[(&str, T)]) -> Said<T> {
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = known.iter().map(|(name, _)| format!("{name:?}")).collect();
        let names = names.join(", ");
        format!("{option} is {word:?} and must be one of {names}")
    })
}

const DTYPES: [(&str, DType); 17] = [
    ("bf16", DType::Bf16),
    ("f16", DType::F16),
    ("f32", DType::F32),
    ("f8e4m3", DType::F8E4M3),
    ("f8e5m2", DType::F8E5M2),
    ("u8", DType::U8),
    ("u16", DType::U16),
    ("u32", DType::U32),
    ("u64", DType::U64),
    // The names of NumPy, ml_dtypes and PyTorch.
    ("bfloat16", DType::Bf16),
    ("float16", DType::F16),
    ("float32", DType::F32),
    ("float8_e4m3fn", DType::F8E4M3),
    ("float8_e5m2", DType::F8E5M2),
    ("uint8", DType::U8),
    ("uint16", DType::U16),
    ("uint32", DType::U32),
];

/// The type that a text names, or that `str` of a NumPy or PyTorch dtype does.
pub fn dtype(option: &str, given: &Bound<'_, PyAny>) -> Said<DType> {
    let words = given
        .str()
        .map_err(|error| format!("{option} has no name: {error}"))?;
    let words = words.to_string_lossy();
    // str(torch.bfloat16) is "torch.bfloat16", and str(numpy.float16) is "<class 'numpy.float16'>".
    let word = words.rsplit('.').next().unwrap_or(&words);
    let word = word.trim_end_matches("'>");
    match word {
        "uint64" => Ok(DType::U64),
        _ => one_of(option, word, &DTYPES),
    }
}

pub fn activation(word: Option<&str>) -> Said<Activation> {
    let known = [
        ("relu", Activation::Relu),
        ("gelu", Activation::Gelu),
        ("gelu_tanh", Activation::GeluTanh),
        ("silu", Activation::Silu),
    ];
    word.map_or(Ok(Activation::Identity), |word| {
        one_of("activation", word, &known)
    })
}

pub fn weight_layout(word: &str) -> Said<WeightLayout> {
    let known = [("nk", WeightLayout::Nk), ("kn", WeightLayout::Kn)];
    one_of("weight_layout", word, &known)
}

pub fn accumulation(word: &str) -> Said<Accumulation> {
    let known = [
        ("promoted", Accumulation::Promoted),
        ("fast", Accumulation::Fast),
    ];
    one_of("accumulation", word, &known)
}

const ROUTES: [(&str, Route); 3] = [
    ("pull", Route::Pull),
    ("push", Route::Push),
    ("store", Route::Store),
];

pub fn route(word: &str) -> Said<Route> {
    one_of("route", word, &ROUTES)
}

/// The word for a route.
pub fn of_route(route: Route) -> &'static str {
    let found = ROUTES.iter().find(|(_, known)| *known == route);
    found.map_or("another", |(word, _)| word)
}

pub fn numerics(word: &str) -> Said<Numerics> {
    let known = [("fast", Numerics::Fast), ("invariant", Numerics::Invariant)];
    one_of("numerics", word, &known)
}

/// How values share scales. `sharded`: the scales are a sharded matrix. `first`: the row and the column of the first block
/// at which the values begin.
pub fn scaling(option: &str, word: &str, first: [usize; 2], sharded: bool) -> Said<Scaling> {
    let known = if sharded {
        &[
            ("rows", Scaling::ShardedRows),
            ("blocks", Scaling::ShardedBlocks),
        ][..]
    } else {
        &[
            ("tensor", Scaling::Tensor),
            ("rows", Scaling::Rows),
            ("blocks", Scaling::Blocks),
            ("transposed_blocks", Scaling::TransposedBlocks),
        ][..]
    };
    match (one_of(option, word, known)?, first) {
        (Scaling::Blocks, [row, column]) => Ok(Scaling::blocks_from(row, column)),
        (scaling, [0, 0]) => Ok(scaling),
        (_, [0, _]) => {
            Err("first_column is for scales of \"blocks\" in a rank's own memory".into())
        }
        _ => Err("first_row is for the scales of a weight's blocks".into()),
    }
}

pub fn quantization(
    option: &str,
    word: &str,
    power_of_two: bool,
    first_column: usize,
) -> Said<Quantization> {
    let known = [
        ("tensor", Quantization::tensor()),
        ("blocks", Quantization::blocks()),
        ("transposed_blocks", Quantization::transposed_blocks()),
    ];
    let quantization = match (one_of(option, word, &known)?, first_column) {
        (quantization, 0) => quantization,
        (quantization, first) => quantization.first_column(first),
    };
    Ok(if power_of_two {
        quantization.power_of_two()
    } else {
        quantization
    })
}
