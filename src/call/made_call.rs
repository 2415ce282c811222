//! Collective calls as ranks compare them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Begins a line of a call that says what its configuration is, which most programs leave to the library.
const CONFIGURATION: char = ' ';

/// A line of a call in lines that says `what` its configuration is.
pub(crate) fn of_configuration(what: impl fmt::Display) -> String {
    format!("{CONFIGURATION}{what}")
}

/// A collective call as a rank made it: what is called, and all that must be the same on every rank.
///
/// `Display` prints `name(argument, argument)`. Calls are equal also if their places differ.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MadeCall {
    /// What is called.
    pub name: String,
    /// What all ranks must give alike, such as "M = 4096" or "bf16".
    pub arguments: Vec<String>,
    /// What the configuration says and all ranks must have alike, such as "Route::Push".
    pub configuration: Vec<String>,
    /// The file and the line of the call, such as `src/block.rs:31`. `None` if it is not known.
    pub place: Option<String>,
}

impl MadeCall {
    /// A call without arguments.
    pub(crate) fn named(name: &str) -> MadeCall {
        MadeCall::new(name, [])
    }

    pub(crate) fn new(
        name: impl Into<String>,
        arguments: impl IntoIterator<Item = String>,
    ) -> MadeCall {
        MadeCall {
            name: name.into(),
            arguments: arguments.into_iter().collect(),
            configuration: Vec::new(),
            place: None,
        }
    }

    /// The call in lines: its name, and then its arguments and its configuration.
    pub(crate) fn to_lines(&self) -> String {
        let configuration = self.configuration.iter().map(of_configuration);
        let all = [self.name.clone()].into_iter();
        let all = all
            .chain(self.arguments.iter().cloned())
            .chain(configuration);
        all.collect::<Vec<_>>().join("\n")
    }

    /// Reads what [`MadeCall::to_lines`] has written.
    pub(crate) fn from_lines(lines: &str) -> MadeCall {
        let mut lines = lines.lines();
        let mut call = MadeCall::named(lines.next().unwrap_or_default());
        for line in lines {
            match line.strip_prefix(CONFIGURATION) {
                Some(configuration) => call.configuration.push(configuration.into()),
                None => call.arguments.push(line.into()),
            }
        }
        call
    }

    /// What ranks must give alike.
    fn agreed(&self) -> impl Iterator<Item = &String> {
        self.arguments.iter().chain(&self.configuration)
    }

    /// The call with its place.
    pub(crate) fn in_words(&self) -> String {
        format!("{self}{}", self.at())
    }

    /// The place as the end of a sentence's part.
    fn at(&self) -> At<'_> {
        At(self.place.as_deref())
    }
}

impl PartialEq for MadeCall {
    fn eq(&self, other: &MadeCall) -> bool {
        self.name == other.name && self.agreed().eq(other.agreed())
    }
}

impl Eq for MadeCall {}

impl fmt::Display for MadeCall {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.name)?;
        // What has no function's name, such as the opening of a group, has no parentheses either.
        if self.arguments.is_empty() && self.name.contains(' ') {
            return Ok(());
        }
        write!(f, "({})", self.arguments.join(", "))
    }
}

/// Where a call is, if that is known.
pub(super) struct At<'a>(pub Option<&'a str>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        self.0.map_or(Ok(()), |place| write!(f, " at {place}"))
    }
}

/// How a rank's call differs from that of another rank, after "rank 3 ".
pub(crate) struct Difference<'a>(pub &'a MadeCall, pub usize, pub &'a MadeCall);

impl fmt::Display for Difference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let &Difference(theirs, other, expected) = self;
        let [name, others] = [&theirs.name, &expected.name];
        let [here, there] = [theirs.at(), expected.at()];
        if name != others {
            return write!(
                f,
                "called {name}{here} while rank {other} called {others}{there}"
            );
        }
        write!(f, "called {name}{here} ")?;
        let (these, those) = (only(theirs, expected), only(expected, theirs));
        match (these.is_empty(), those.is_empty()) {
            (false, false) => write!(f, "with {these}, and rank {other}{there} with {those}"),
            (false, true) => write!(f, "with {these}, and rank {other}{there} without"),
            (true, false) => write!(f, "without {those}, and rank {other}{there} with that"),
            // The calls of other ranks are cut to the room that there is.
            (true, true) => {
                write!(
                    f,
                    "and rank {other}{there} did with arguments that differ where they are too long to show"
                )
            }
        }
    }
}

/// What `call` has and `other` has not, as a list in words.
fn only(call: &MadeCall, other: &MadeCall) -> String {
    let has = |what: &&String| !other.agreed().any(|others| others == *what);
    let differing: Vec<&str> = call.agreed().filter(has).map(String::as_str).collect();
    match differing.split_last() {
        Some((last, [])) => (*last).into(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}

/// A number that says which one of several it is.
pub(crate) struct Ordinal(pub u64);

impl fmt::Display for Ordinal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ending = match (self.0 % 10, self.0 % 100) {
            (_, 11..=13) => "th",
            (1, _) => "st",
            (2, _) => "nd",
            (3, _) => "rd",
            _ => "th",
        };
        write!(f, "{}{ending}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(arguments: &[&str]) -> MadeCall {
        let arguments = arguments.iter().map(|argument| argument.to_string());
        MadeCall::new("all_gather_matmul", arguments)
    }

    #[track_caller]
    fn assert_difference(theirs: &MadeCall, expected: &MadeCall, words: &str) {
        assert_eq!(Difference(theirs, 0, expected).to_string(), words);
    }

    #[test]
    fn calls_of_one_operation_differ_by_the_arguments_that_only_one_has() {
        let plain = product(&["M = 6", "K = 64", "bf16"]);
        let biased = product(&["M = 6", "K = 64", "bf16", "a bias"]);
        let words = "called all_gather_matmul with a bias, and rank 0 without";
        assert_difference(&biased, &plain, words);
        let words = "called all_gather_matmul without a bias, and rank 0 with that";
        assert_difference(&plain, &biased, words);
        let thin = product(&["M = 6", "K = 32", "bf16"]);
        let words = "called all_gather_matmul with K = 32, and rank 0 with K = 64";
        assert_difference(&thin, &plain, words);
        let other = product(&["M = 7", "K = 32", "f16"]);
        let words = "called all_gather_matmul with M = 7, K = 32 and f16, and rank 0 with M = 6, K = 64 and bf16";
        assert_difference(&other, &plain, words);
        let words = "called all_gather_matmul and rank 0 did with arguments that differ where they are too long to show";
        assert_difference(&plain, &plain, words);
    }

    #[test]
    fn what_only_the_configurations_say_is_told_if_it_differs() {
        let [mut theirs, mut expected] = [0; 2].map(|_| product(&["M = 6"]));
        theirs.configuration = vec!["chunks = 4".into(), "Route::Push".into()];
        expected.configuration = vec!["chunks = 4".into(), "Route::Store".into()];
        theirs.place = Some("src/block.rs:31".into());
        let words = "called all_gather_matmul at src/block.rs:31 with Route::Push, and rank 0 with Route::Store";
        assert_difference(&theirs, &expected, words);
    }

    #[test]
    fn calls_of_two_operations_differ_by_their_names() {
        let barrier = MadeCall::named("barrier");
        let words = "called barrier while rank 0 called all_gather_matmul";
        assert_difference(&barrier, &product(&["M = 6"]), words);
        let mut product = product(&["M = 6"]);
        product.place = Some("src/block.rs:31".into());
        assert_difference(&barrier, &product, &format!("{words} at src/block.rs:31"));
    }

    #[test]
    fn a_call_is_read_as_it_was_written() {
        let rows = product(&["rows of each rank = [3, 2]", "K = 4"]);
        let words = "all_gather_matmul(rows of each rank = [3, 2], K = 4)";
        assert_eq!(rows.to_string(), words);
        let mut pushed = rows.clone();
        pushed.configuration.push("Route::Push".into());
        assert_eq!(pushed.to_string(), words);
        for call in [rows, pushed, MadeCall::named("barrier")] {
            let read = MadeCall::from_lines(&call.to_lines());
            assert_eq!((&read, &read.configuration), (&call, &call.configuration));
        }
        let opening = MadeCall::named("the opening of the backend");
        assert_eq!(opening.to_string(), "the opening of the backend");
        assert_eq!(MadeCall::named("barrier").to_string(), "barrier()");
    }

    #[test]
    fn numbers_have_their_endings() {
        let words = [1, 2, 3, 4, 11, 12, 13, 21, 112, 607].map(|n| Ordinal(n).to_string());
        let expected = [
            "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "112th", "607th",
        ];
        assert_eq!(words, expected);
    }
}
