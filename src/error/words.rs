//! Parts of the sentences of errors.

use std::fmt;

use super::{Call, Error};
use crate::element::DType;

/// What a number must be, from the least to the most.
pub struct Bounds(pub usize, pub usize);

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Bounds(min, max) if min == max => write!(f, "{min}"),
            Bounds(min, usize::MAX) => write!(f, "at least {min}"),
            Bounds(min, max) => write!(f, "from {min} to {max}"),
        }
    }
}

/// What to do about ranks that differ, with the call in which they do, if there is one.
pub struct Alike<'a>(pub Option<&'a Call>);

impl fmt::Display for Alike<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            // Only names of groups are compared in a call.
            Some(call) => {
                write!(f, " in {call}; ")?;
                f.write_str(
                    "ranks that give the same color must give the same name (Builder::name)",
                )
            }
            None => f.write_str("; start all ranks alike"),
        }
    }
}

/// What to do about a matrix that has rows for columns.
pub struct Transposed<'a>(pub &'a str, pub &'a [usize], pub &'a [usize]);

impl fmt::Display for Transposed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Transposed(argument, expected, found) = self;
        if expected.len() != 2 || expected == found || !expected.iter().eq(found.iter().rev()) {
            return Ok(());
        }
        let [this, other] = match argument {
            // More words may follow, such as which weight it is.
            b if b.starts_with("b [N, K]") => ["[N, K]", "Kn"],
            b if b.starts_with("b [K, N]") => ["[K, N]", "Nk"],
            _ => return Ok(()),
        };
        write!(f, "; it looks transposed: pass {this}, ")?;
        write!(f, "or call .weight_layout(WeightLayout::{other})")
    }
}

/// A number with its noun.
pub struct Counted<'a>(pub usize, pub &'a str);

impl fmt::Display for Counted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Counted(1, unit) => write!(f, "1 {unit}"),
            Counted(count, unit) => write!(f, "{count} {unit}s"),
        }
    }
}

/// How a call is prepared for an argument's type.
pub struct Prepare<'a>(pub &'a str, pub DType, pub DType);

impl fmt::Display for Prepare<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Prepare(argument, expected, found) = *self;
        // More words may follow, such as which output it is.
        let option = match argument {
            _ if argument.starts_with("out") => "output_dtype",
            _ if argument.starts_with('b') && expected.is_fp8() && found.is_fp8() => "weight_dtype",
            _ => return write!(f, "give it {expected}"),
        };
        write!(f, "prepare it with {option}(DType::{found:?})")
    }
}

/// The group of an argument that belongs to a different one than the call: its name, and that of the call's group.
pub struct DifferentGroup<'a>(pub Option<&'a str>, pub Option<&'a str>);

impl fmt::Display for DifferentGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            DifferentGroup(None, None) => f.write_str("a different group"),
            // For example the end of a different rank, which is a thread.
            DifferentGroup(Some(found), Some(expected)) if found == expected => {
                write!(f, "a different group of the same name, {found:?}")
            }
            DifferentGroup(found, expected) => {
                let [found, expected] = [found, expected].map(MaybeNamed);
                write!(f, "{found}, but this call is of {expected}")
            }
        }
    }
}

struct MaybeNamed<'a>(Option<&'a str>);

impl fmt::Display for MaybeNamed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "group {name:?}"),
            None => f.write_str("a group without a name"),
        }
    }
}

/// The multiples beside a number, if it is an extent. Those of an address say nothing.
pub struct Nearest(pub usize, pub usize);

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let &Nearest(value, multiple) = self;
        if value > i32::MAX as usize || multiple == 0 {
            return Ok(());
        }
        let (below, above) = (
            value / multiple * multiple,
            value.next_multiple_of(multiple),
        );
        write!(f, "; the nearest are {below} and {above}")
    }
}

pub struct Because<'a>(pub &'a Option<Box<Error>>);

impl fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(cause) => write!(
                f,
                " ({} failed: {})",
                GroupOf(cause, "its group"),
                WithinGroup(cause)
            ),
            None => Ok(()),
        }
    }
}

/// The group of an error, with its ranks unless the job numbers them alike. If the error does not name it, these words.
pub struct GroupOf<'a>(pub &'a Error, pub &'static str);

impl fmt::Display for GroupOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Error::InGroup {
            group, job_ranks, ..
        } = self.0
        else {
            return f.write_str(self.1);
        };
        write!(f, "group {group:?}")?;
        match job_ranks.iter().copied().eq(0..job_ranks.len()) {
            true => Ok(()),
            false => write!(f, " of the job's {}", Listed(job_ranks)),
        }
    }
}

/// An error without its group.
pub struct WithinGroup<'a>(pub &'a Error);

impl fmt::Display for WithinGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Error::InGroup { error, .. } => error.fmt(f),
            error => error.fmt(f),
        }
    }
}

/// A list of ranks, as words.
pub struct Listed<'a>(pub &'a [usize]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let is_range = self.0.windows(2).all(|pair| pair[1] == pair[0] + 1);
        match *self.0 {
            [rank] => write!(f, "rank {rank}"),
            [first, .., last] if is_range && self.0.len() > 2 => {
                write!(f, "ranks {first} to {last}")
            }
            [ref ranks @ .., last] => {
                let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
                write!(f, "ranks {} and {last}", ranks.join(", "))
            }
            [] => f.write_str("no rank"),
        }
    }
}

/// How a launched rank's process ended.
pub struct Ended<'a>(pub &'a str);

impl fmt::Display for Ended<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // A rank that leaves early has not failed by itself.
        let verb = match self.0 {
            "exit status: 0" => "ended",
            _ => "failed",
        };
        write!(f, "{verb}: {}", self.0)
    }
}

/// The ranks that a launcher killed because another failed.
pub struct Killed<'a>(pub &'a [usize]);

impl fmt::Display for Killed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        let killed = Listed(self.0);
        write!(
            f,
            "; the launcher killed {killed}, which still ran 1.5 seconds after the failure"
        )
    }
}

/// A program's words, which may have several lines.
pub struct OneLine<'a>(pub &'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let lines = self
            .0
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty());
        for (number, line) in lines.enumerate() {
            let before = if number == 0 { "" } else { "; " };
            write!(f, "{before}{line}")?;
        }
        Ok(())
    }
}

pub struct Panic<'a>(pub &'a Option<String>);

impl fmt::Display for Panic<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(message) => write!(f, ": {}", OneLine(message)),
            None => f.write_str("; see that rank's own output"),
        }
    }
}

pub struct Ranks<'a>(pub &'a [usize], pub &'static str, pub &'static str);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Ranks(ranks, has, have) = self;
        let verb = if ranks.len() == 1 { has } else { have };
        write!(f, "{} {verb}", Listed(ranks))
    }
}

/// Words in brackets, if there are any.
pub struct InBrackets<'a>(pub &'a Option<Box<str>>);

impl fmt::Display for InBrackets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let InBrackets(words) = self;
        words
            .as_ref()
            .map_or(Ok(()), |words| write!(f, " ({words})"))
    }
}

pub struct Who<'a>(pub &'a Option<usize>);

impl fmt::Display for Who<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.map_or(Ok(()), |rank| write!(f, "rank {rank}: "))
    }
}
