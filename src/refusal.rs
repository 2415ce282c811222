//! Why a call is refused, before its rank and its name are known.

use std::panic::Location;

use crate::element::DType;
use crate::error::{Call, Error};

/// A result of a check that knows neither the rank nor the call.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

/// Why a call is refused. With a rank and a call it is an [`Error`].
///
/// Schedules and checks return it. An [`Error`] cannot be made of it by `?`, so none reaches a caller without its rank
/// and its call.
// Its fields are those of the error's variants, which say what they are.
#[allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// For [`Error::Limit`].
    Limit {
        what: String,
        value: usize,
        min: usize,
        max: usize,
    },
    /// For [`Error::Unsupported`].
    Unsupported { what: String },
    /// For [`Error::Refused`].
    Refused { what: String },
    /// For [`Error::Shape`].
    Shape {
        argument: String,
        expected: Vec<usize>,
        found: Vec<usize>,
    },
    /// For [`Error::Count`].
    Count {
        whole: String,
        unit: String,
        expected: usize,
        part: String,
        found: usize,
    },
    /// For [`Error::DType`].
    DType {
        argument: String,
        expected: DType,
        found: DType,
    },
    /// For [`Error::Unsuitable`].
    Unsuitable {
        argument: String,
        what: String,
        expected: String,
        found: String,
    },
    /// For [`Error::ForeignArgument`].
    ForeignArgument {
        argument: String,
        expected: Option<Box<str>>,
        found: Option<Box<str>>,
    },
    /// For [`Error::Unaligned`].
    Unaligned {
        what: String,
        value: usize,
        multiple: usize,
    },
    /// An error that says everything itself.
    Failure(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Failure(error)
    }
}

impl Refusal {
    /// For `map_err`: the error of `rank` in `call`, at the place from which the calling function is called.
    #[track_caller]
    pub fn of(rank: impl Into<Option<usize>>, call: &str) -> impl Fn(Refusal) -> Error + Copy {
        let (rank, place) = (rank.into(), Location::caller());
        move |refusal| refusal.into_error(rank, Call::at(call, place))
    }

    /// For `map_err`: names the argument's place if it is one of several. `unit` is the name of one.
    pub fn one_of(unit: &str, number: usize, count: usize) -> impl FnOnce(Refusal) -> Refusal {
        let place = move || format!(" ({unit} {} of {count})", number + 1);
        move |mut refusal| {
            if let Refusal::Shape { argument, .. }
            | Refusal::DType { argument, .. }
            | Refusal::Unsuitable { argument, .. }
            | Refusal::ForeignArgument { argument, .. } = &mut refusal
                && count > 1
            {
                argument.push_str(&place());
            }
            refusal
        }
    }

    /// `rank` is unknown only where there are no ranks yet. Then only limits are checked.
    pub fn into_error(self, rank: Option<usize>, call: Call) -> Error {
        let known = rank.unwrap_or(0);
        /// The variants whose fields, with the rank and the call, are those of the error's variant.
        macro_rules! completed {
            ($($variant:ident { $($field:ident),* })*) => {
                match self {
                    $(Refusal::$variant { $($field),* } => Error::$variant { rank: known, call, $($field),* },)*
                    Refusal::Limit { what, value, min, max } => Error::Limit { rank, call, what, value, min, max },
                    Refusal::Unsuitable { argument, what, expected, found } => {
                        let what = format!("{what} of {argument}");
                        Error::Unsuitable { rank: known, call, what, expected, found }
                    }
                    Refusal::Failure(error) => error,
                }
            };
        }
        completed! {
            Unsupported { what }
            Refused { what }
            Shape { argument, expected, found }
            Count { whole, unit, expected, part, found }
            DType { argument, expected, found }
            ForeignArgument { argument, expected, found }
            Unaligned { what, value, multiple }
        }
    }
}

/// Checks the shape of `argument`, which names its extents too.
pub fn require_shape(argument: &str, expected: [usize; 2], found: [usize; 2]) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Refusal::Shape {
        argument: argument.into(),
        expected: expected.into(),
        found: found.into(),
    })
}

/// Checks that `part` has as many things as `whole`. `unit` is the name of one.
pub fn require_count(
    whole: &str,
    unit: &str,
    expected: usize,
    part: &str,
    found: usize,
) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Refusal::Count {
        whole: whole.into(),
        unit: unit.into(),
        expected,
        part: part.into(),
        found,
    })
}

/// Checks that `part` has an element for each of a matrix of this shape.
pub fn require_elements([rows, columns]: [usize; 2], part: &str, found: usize) -> Result<()> {
    // The text is made only for the refusal.
    if rows * columns == found {
        return Ok(());
    }
    let whole = format!("a [{rows}, {columns}] matrix");
    require_count(&whole, "element", rows * columns, part, found)
}
