//! What a rank knows of the failures of groups that were split from one another.
//!
//! A rank whose part of a group has failed often leaves its other groups too. The ranks that wait for it there have to
//! read which rank of the part is at fault, not that this one has left.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;

/// One rank's view of a group and of all groups that were split from it, directly or not.
#[derive(Debug, Default)]
pub struct Family(Mutex<Option<Failure>>);

/// A group's failure.
#[derive(Debug)]
struct Failure {
    /// As the program gets it.
    got: Error,
    /// With a group, so that every group of the family reads it alike.
    named: Error,
}

impl Family {
    /// Notes the failure of one of the groups, which this rank's program has got. Of several, the first is kept.
    /// `named` is the failure with its group.
    pub fn note(&self, got: &Error, named: Error) {
        self.failure().get_or_insert_with(|| Failure {
            got: got.clone(),
            named,
        });
    }

    /// Notes that this rank goes on.
    pub fn forget(&self) {
        *self.failure() = None;
    }

    /// The failure that this rank has got, with its group, unless the rank went on after it.
    pub fn latest(&self) -> Option<Error> {
        Some(self.failure().as_ref()?.named.clone())
    }

    /// The failure, if a program's error in these words tells of it.
    pub fn told_by(&self, words: &str) -> Option<Error> {
        let failure = self.failure();
        let Failure { got, named } = failure.as_ref()?;
        let again = Error::Poisoned {
            cause: Box::new(got.clone()),
        };
        let tells = [got, &again].map(|error| words.contains(&error.to_string()));
        tells.contains(&true).then(|| named.clone())
    }

    fn failure(&self) -> MutexGuard<'_, Option<Failure>> {
        // Each change is one assignment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_tells_of_a_failure_is_known_by_its_words() {
        let family = Family::default();
        let got = Error::Capturing { rank: 1 };
        let named = Error::InGroup {
            group: "pair 1".into(),
            job_ranks: vec![2, 3],
            error: Box::new(got.clone()),
        };
        assert_eq!(family.told_by(&got.to_string()), None);
        family.note(&got, named.clone());
        family.note(&Error::Capturing { rank: 2 }, got.clone());
        let again = Error::Poisoned {
            cause: Box::new(got.clone()),
        };
        for words in [got.to_string(), format!("step 7: {again}")] {
            assert_eq!(family.told_by(&words), Some(named.clone()), "{words}");
        }
        assert_eq!(family.told_by("no such file"), None);
        assert_eq!(family.latest(), Some(named));
        family.forget();
        assert_eq!(family.latest(), None);
    }
}
