//! Parts of the sentences of errors.

use std::fmt;

use super::{Error, InGroup};

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
        write!(f, "or set weight_layout(WeightLayout::{other})")
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

/// What to do, if it is said.
pub struct Remedy<'a>(pub &'a Option<String>);

impl fmt::Display for Remedy<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Remedy(what) = self;
        what.as_ref().map_or(Ok(()), |what| write!(f, "; {what}"))
    }
}

/// Why a rank can't use a peer's memory.
pub struct OfPeer<'a>(pub usize, pub &'a Option<String>);

impl fmt::Display for OfPeer<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let OfPeer(peer, reason) = self;
        match reason {
            Some(reason) => write!(
                f,
                "the memory of rank {peer}'s GPU cannot be mapped ({reason}); the GPUs must be peers, see nvidia-smi topo -p2p r"
            ),
            None => write!(
                f,
                "this GPU and that of rank {peer} do not read what they write to each other; do not trust results between these GPUs"
            ),
        }
    }
}

/// What has failed of a program: all of it, or a function that it gave to this call.
pub struct FailedIn<'a>(pub &'a Option<String>);

impl fmt::Display for FailedIn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(call) => write!(f, "failed in the function that it gave to {call}"),
            None => f.write_str("failed in its own program"),
        }
    }
}

/// What a rank was refused before it made a different call instead.
pub struct Refused<'a>(pub &'a Option<Error>);

impl fmt::Display for Refused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(error) => write!(f, ", after it was refused a call ({error})"),
            None => Ok(()),
        }
    }
}

/// The group's failure behind that of a rank's process.
pub struct Because<'a>(pub &'a Option<Error>);

impl fmt::Display for Because<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.0 {
            Some(cause) => match &cause.0.group {
                Some(group) => write!(f, " ({group} failed: {})", InGroup(cause)),
                None => write!(f, " (its group failed: {cause})"),
            },
            None => Ok(()),
        }
    }
}

/// The ranks of the job that are a group's, unless the job numbers them alike.
pub struct OfRanks<'a>(pub &'a [usize]);

impl fmt::Display for OfRanks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if self.0.iter().copied().eq(0..self.0.len()) {
            Ok(())
        } else {
            write!(f, " of the job's {}", Listed(self.0))
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

/// Ranks, as the subject of a sentence in the perfect tense.
pub struct Have<'a>(pub &'a [usize]);

impl fmt::Display for Have<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let verb = if self.0.len() == 1 { "has" } else { "have" };
        write!(f, "{} {verb}", Listed(self.0))
    }
}

/// Words in brackets, if there are any.
pub struct InBrackets<'a>(pub &'a Option<String>);

impl fmt::Display for InBrackets<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let InBrackets(words) = self;
        words
            .as_ref()
            .map_or(Ok(()), |words| write!(f, " ({words})"))
    }
}
