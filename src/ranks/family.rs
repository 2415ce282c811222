//! What a rank knows of the failures of groups that were split from one another.
//!
//! A rank whose part of a group has failed often leaves its other groups too. The ranks that wait for it there have to
//! read which rank of the part is at fault, not that this one has left.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::shared_state::NotedWords;
use crate::error::Error;

/// How many of the latest errors are known by their words.
const KNOWN: usize = 16;

/// One rank's view of a group and of all groups that were split from it, directly or not.
#[derive(Debug, Default)]
pub struct GroupFamily {
    errors: Mutex<Errors>,
    /// Of its waits, which the ranks of the whole group read.
    pub noted_words: NotedWords,
}

#[derive(Debug, Default)]
struct Errors {
    /// The failure of one of the groups, unless the program went on after it.
    failure: Option<GotError>,
    /// The latest errors, also if the program went on.
    latest: VecDeque<GotError>,
}

/// An error that the program has got from one of the groups.
#[derive(Clone, Debug, PartialEq)]
pub struct GotError {
    /// As the program got it.
    pub got: Error,
    /// With its group, so that every group of the family reads it alike.
    pub named: Error,
}

impl GotError {
    /// Its words, those of the call that failed and those of later calls.
    fn words(&self) -> [String; 2] {
        let again = self.got.clone().again();
        [&self.got, &again].map(Error::to_string)
    }

    /// True if a program's error in these words is this one or tells of it.
    fn is_told_by(&self, words: &str) -> bool {
        self.words().iter().any(|own| words.contains(own))
    }
}

impl GroupFamily {
    /// Notes an error that the program has got, and that may be passed on.
    pub fn note(&self, error: GotError) {
        let latest = &mut self.errors().latest;
        if !latest.contains(&error) {
            latest.truncate(KNOWN - 1);
            latest.push_front(error);
        }
    }

    /// Notes the failure of one of the groups, which the program has got. Of several, the first is kept.
    pub fn note_failure(&self, failure: GotError) {
        self.note(failure.clone());
        self.errors().failure.get_or_insert(failure);
    }

    /// Notes that this rank goes on.
    pub fn forget(&self) {
        self.errors().failure = None;
    }

    /// The failure that this rank has got, with its group, unless the rank went on after it.
    pub fn latest_failure(&self) -> Option<Error> {
        Some(self.errors().failure.as_ref()?.named.clone())
    }

    /// The error that the program's words pass on: a failure or, in the program's words too, an error for which `rank`
    /// of the job is not to blame. If the words are an error's own, it is that error.
    pub fn told_by(&self, words: &str, rank: usize) -> Option<GotError> {
        let errors = self.errors();
        let failure = errors.failure.iter();
        let failure = failure.filter(|failure| failure.is_told_by(words));
        let known = errors.latest.iter().filter(|error| {
            let blames = || error.named.at_fault().contains(&rank);
            error.words().iter().any(|own| own == words) || !blames() && error.is_told_by(words)
        });
        failure.chain(known).next().cloned()
    }

    fn errors(&self) -> MutexGuard<'_, Errors> {
        // Each change is one assignment.
        self.errors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn in_pair(error: Error) -> GotError {
        let named = error.clone().of_group("pair 1", &[2, 3]);
        GotError { got: error, named }
    }

    #[test]
    fn a_program_that_tells_of_a_failure_is_known_by_its_words() {
        let family = GroupFamily::default();
        let failure = in_pair(Kind::Capturing.on(3));
        let got = &failure.got;
        assert_eq!(family.told_by(&got.to_string(), 3), None);
        family.note_failure(failure.clone());
        family.note_failure(in_pair(Kind::Capturing.on(2)));
        let again = got.clone().again();
        for words in [got.to_string(), format!("step 7: {again}")] {
            assert_eq!(family.told_by(&words, 3), Some(failure.clone()), "{words}");
        }
        assert_eq!(family.told_by("no such file", 3), None);
        assert_eq!(family.latest_failure(), Some(failure.named));
        family.forget();
        assert_eq!(family.latest_failure(), None);
    }

    #[test]
    fn the_latest_errors_are_known_by_their_words_also_if_the_rank_went_on() {
        let family = GroupFamily::default();
        let errors = (0..2 * KNOWN).map(|rank| in_pair(Kind::Capturing.on(rank)));
        let errors: Vec<GotError> = errors.collect();
        for error in &errors {
            family.note(error.clone());
            family.forget();
        }
        let (old, new) = (&errors[KNOWN - 1], &errors[KNOWN]);
        assert_eq!(family.told_by(&old.got.to_string(), 0), None);
        assert_eq!(family.told_by(&new.got.to_string(), 0), Some(new.clone()));
        let words = format!("step 7: {}", new.got);
        assert_eq!(family.told_by(&words, 0), Some(new.clone()));
        assert_eq!(family.told_by(&words, KNOWN), None, "its own, in its words");
    }
}
