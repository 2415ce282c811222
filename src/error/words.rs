//! Parts of the sentences of errors.

use std::fmt::{self, Display};

use super::Error;

/// What a number must be, from the least to the most.
pub fn bounds(min: usize, max: usize) -> String {
    match max {
        usize::MAX => format!("at least {min}"),
        _ if max == min => min.to_string(),
        _ => format!("from {min} to {max}"),
    }
}

/// What to do about a matrix that has rows for columns.
pub fn transposed(argument: &str, expected: &[usize], found: &[usize]) -> String {
    if expected.len() != 2 || expected == found || !expected.iter().eq(found.iter().rev()) {
        return String::new();
    }
    let [this, other] = match argument {
        // More words may follow, such as which weight it is.
        b if b.starts_with("b [N, K]") => ["[N, K]", "Kn"],
        b if b.starts_with("b [K, N]") => ["[K, N]", "Nk"],
        _ => return String::new(),
    };
    format!("; it looks transposed: pass {this}, or set weight_layout(WeightLayout::{other})")
}

/// `value` between these words, if there is one.
pub fn if_any(before: &str, value: &Option<impl Display>, after: &str) -> String {
    let words = |value| format!("{before}{value}{after}");
    value.as_ref().map_or_else(String::new, words)
}

/// Why a rank can't use a peer's memory.
pub fn of_peer(peer: usize, reason: &Option<String>) -> String {
    match reason {
        Some(reason) => format!(
            "the memory of rank {peer}'s GPU cannot be mapped ({reason}); the GPUs must be peers, see nvidia-smi topo -p2p r"
        ),
        None => format!(
            "this GPU and that of rank {peer} do not read what they write to each other; do not trust results between \
             these GPUs"
        ),
    }
}

/// What has failed of a program: all of it, or a function that it gave to `call`.
pub fn failed_in(call: &Option<String>) -> String {
    match call {
        Some(call) => format!("failed in the function that it gave to {call}"),
        None => "failed in its own program".into(),
    }
}

/// How a launched rank's process ended.
pub fn ended(status: &str) -> String {
    // A rank that leaves early has not failed by itself.
    let verb = match status {
        "exit status: 0" => "ended",
        _ => "failed",
    };
    format!("{verb}: {status}")
}

/// The group's failure that made a rank's process fail.
pub fn because(cause: &Option<Error>) -> String {
    let cause = cause.as_ref().map(|cause| format!(" {}", cause.as_cause()));
    cause.unwrap_or_default()
}

/// The ranks that a launcher killed because another failed.
pub fn also_killed(ranks: &[usize]) -> String {
    if ranks.is_empty() {
        return String::new();
    }
    format!(
        "; the launcher killed {}, which still ran 1.5 seconds after the failure",
        Listed(ranks)
    )
}

/// A program's words, which may have several lines, as one.
pub fn one_line(words: &str) -> String {
    let lines = words.lines().map(str::trim);
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// What a panic said, or where to find it.
pub fn panic(message: &Option<String>) -> String {
    match message {
        Some(message) => format!(": {}", one_line(message)),
        None => "; see that rank's own output".into(),
    }
}

/// Ranks, as the subject of a sentence in the perfect tense.
pub fn have(ranks: &[usize]) -> String {
    let verb = if ranks.len() == 1 { "has" } else { "have" };
    format!("{} {verb}", Listed(ranks))
}

/// The ranks of the job that are a group's, unless the job numbers them alike.
pub fn of_ranks(ranks: &[usize]) -> String {
    if ranks.iter().copied().eq(0..ranks.len()) {
        String::new()
    } else {
        format!(" of the job's {}", Listed(ranks))
    }
}

/// A number with its noun.
pub struct Counted<'a>(pub usize, pub &'a str);

impl Display for Counted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match *self {
            Counted(1, unit) => write!(f, "1 {unit}"),
            Counted(count, unit) => write!(f, "{count} {unit}s"),
        }
    }
}

/// A list of ranks, as words.
pub struct Listed<'a>(pub &'a [usize]);

impl Display for Listed<'_> {
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
