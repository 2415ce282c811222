//! What a group is called, and which ranks of the job its ranks are.

use serde::{Deserialize, Serialize};

use super::env::Described;
use crate::error::{Error, Kind, Result};
use crate::schedule::limits::limit;

/// A longer name would leave no room in reports of failures.
const MAX_NAME: usize = 100;

/// A process as its launcher counts it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRank {
    rank: usize,
    world: usize,
    /// Tells the job from others.
    job: String,
}

impl JobRank {
    pub fn of(described: &Described) -> JobRank {
        JobRank {
            rank: described.rank,
            world: described.world,
            job: super::address::shown(&described.address),
        }
    }
}

/// What a rank says of itself when its group opens.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Arrival {
    /// The name that it gives the group.
    pub name: Option<String>,
    /// None if no launcher has started the process.
    pub job: Option<JobRank>,
}

/// A group's name, and which ranks of the job its ranks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Naming {
    /// None if no one has named the group and it is no part of a job.
    pub name: Option<String>,
    /// By rank. Without a launcher, the job is the group from which this one was split.
    pub job_ranks: Vec<usize>,
    /// False if some of its processes are of no job or of another one, so that `job_ranks` says nothing to a launcher.
    pub is_of_one_job: bool,
}

impl Naming {
    /// Of a group whose ranks are the job.
    pub fn of_job(name: Option<String>, world: usize) -> Naming {
        Naming {
            name,
            job_ranks: (0..world).collect(),
            is_of_one_job: true,
        }
    }

    /// An error of the group as others read it: with the group's name, and which ranks of the job its ranks are.
    pub fn named(&self, error: Error) -> Error {
        match &self.name {
            // If it knows its group, it has come through a call that has named it, or it is of a part of the group.
            Some(name) => error.in_group(name, &self.job_ranks),
            None => error,
        }
    }

    /// Of a group whose ranks have met. `other` is its name if it has none and is a part of a job.
    ///
    /// # Errors
    /// [`Kind::Mismatch`] unless all ranks give the same name.
    pub fn agreed(arrivals: &[Arrival], other: impl FnOnce() -> String) -> Result<Naming> {
        let names = arrivals.iter().map(|arrival| &arrival.name).enumerate();
        let name = agree(names)?;
        let whole = Naming::of_job(name, arrivals.len());
        let jobs = arrivals.iter().map(|arrival| arrival.job.as_ref());
        let jobs = jobs.collect::<Option<Vec<_>>>();
        let jobs = jobs.filter(|jobs| jobs.iter().all(|other| other.job == jobs[0].job));
        let Some(jobs) = jobs else {
            return Ok(Naming {
                is_of_one_job: false,
                ..whole
            });
        };
        let job_ranks: Vec<usize> = jobs.iter().map(|job| job.rank).collect();
        let is_part = jobs[0].world != job_ranks.len() || job_ranks != whole.job_ranks;
        Ok(Naming {
            name: whole.name.or_else(|| is_part.then(other)),
            job_ranks,
            is_of_one_job: true,
        })
    }
}

/// The name that all `ranks` give their group.
///
/// # Errors
/// [`Kind::Mismatch`] names the first rank that gives a different name than the first.
pub fn agree<'a>(
    ranks: impl IntoIterator<Item = (usize, &'a Option<String>)>,
) -> Result<Option<String>> {
    let mut ranks = ranks.into_iter();
    let Some((other, expected)) = ranks.next() else {
        return Ok(None);
    };
    let words = |name: &Option<String>| name.as_ref().map_or("none".into(), |n| format!("{n:?}"));
    match ranks.find(|(_, name)| *name != expected) {
        None => Ok(expected.clone()),
        Some((rank, name)) => Err(Kind::Mismatch {
            what: "group name".into(),
            theirs: words(name),
            other,
            expected: words(expected),
        }
        .on(rank)),
    }
}

/// Refuses a name that is too long. `rank`: the rank, if there is one yet.
#[track_caller]
pub fn check(rank: Option<usize>, name: Option<&str>) -> Result<()> {
    let bytes = name.map_or(1, str::len);
    let fits = limit("the number of bytes of the name", bytes, 1, MAX_NAME);
    fits.map_err(Error::of(rank, "Builder::name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(job_ranks: &[usize], world: usize) -> Vec<Arrival> {
        let arrival = |&rank| Arrival {
            name: None,
            job: Some(JobRank {
                rank,
                world,
                job: "a".into(),
            }),
        };
        job_ranks.iter().map(arrival).collect()
    }

    fn agreed(arrivals: &[Arrival]) -> Naming {
        Naming::agreed(arrivals, || "address".into()).unwrap()
    }

    fn named(arrivals: &[Arrival]) -> (Option<String>, Vec<usize>) {
        let naming = agreed(arrivals);
        (naming.name, naming.job_ranks)
    }

    #[test]
    fn a_part_of_a_job_is_named_and_knows_its_ranks() {
        let part = |ranks: &[usize]| (Some("address".into()), ranks.to_vec());
        assert_eq!(named(&arrivals(&[2, 3], 4)), part(&[2, 3]));
        assert_eq!(named(&arrivals(&[0, 1], 4)), part(&[0, 1]));
        assert_eq!(named(&arrivals(&[1, 0], 2)), part(&[1, 0]));
        assert_eq!(named(&arrivals(&[0, 1], 2)), (None, vec![0, 1]));
    }

    #[test]
    fn processes_of_no_job_or_of_several_are_counted_by_their_group() {
        let mut strangers = arrivals(&[2, 3], 4);
        strangers[1].job = None;
        assert_eq!(named(&strangers), (None, vec![0, 1]));
        assert!(!agreed(&strangers).is_of_one_job);
        let mut others = arrivals(&[2, 3], 4);
        others[1].job.as_mut().unwrap().job = "b".into();
        assert_eq!(named(&others), (None, vec![0, 1]));
        assert!(!agreed(&others).is_of_one_job && agreed(&arrivals(&[2, 3], 4)).is_of_one_job);
    }

    #[test]
    fn a_name_that_differs_is_a_mismatch() {
        let mut ranks = arrivals(&[0, 1, 2], 3);
        ranks
            .iter_mut()
            .for_each(|rank| rank.name = Some("x".into()));
        assert_eq!(named(&ranks), (Some("x".into()), vec![0, 1, 2]));
        ranks[2].name = None;
        let error = Naming::agreed(&ranks, String::new).unwrap_err();
        let expected = "rank 2 has group name none and rank 0 has \"x\"; ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
