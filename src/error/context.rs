//! An error's context: its rank, its call and its group.

use std::fmt;
use std::io;
use std::panic::Location;

use serde::{Deserialize, Serialize};

use super::words::of_ranks;
use super::{Class, Kind};
use crate::call::Call;
use crate::resources::{self, Bytes};

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong: its [`Kind`], and the rank, the call and the group that it is of.
///
/// Ranks are numbered from 0 to W - 1. In an error of a part of a job or of a group that has a name, they have the
/// numbers of the job, which `Display` says. If one rank fails or makes a mistake in a collective call, all ranks get the
/// same error. It names the rank at fault, and the group has failed.
///
/// An argument that only this rank can judge is at first an error on this rank alone, for example a [`Kind::Shape`].
/// Nothing has been done, and the rank may make the call with a different argument. If it does not, the ranks that wait
/// for it in that call get its error half a second later, or at once if it leaves. The group has then failed.
///
/// An error of an argument also names the call's place in the program's source, on other ranks too:
/// `rank 1: all_gather_matmul at src/block.rs:31: b [N, K] is [5, 3] and must be [5, 4]`.
///
/// `Debug` prints the same sentence as `Display`, because a program prints it whose `main` returns a [`Result`].
///
/// ```
/// use gemmesh::error::Kind;
/// use gemmesh::{Error, Group, Host};
///
/// Group::<Host>::threads(4, |world| {
///     let pair = world.split(world.rank() / 2, 0)?;
///     if world.rank() == 3 {
///         pair.fail("no more data");
///     }
///     if let Err(error) = pair.barrier() {
///         // Rank 1 of its pair.
///         assert_eq!(error.rank(), Some(3));
///         assert!(matches!(error.kind(), Kind::ProgramFailed { .. }));
///     }
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<_, Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Error(Box<Context>);

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Context {
    kind: Kind,
    rank: Option<usize>,
    call: Option<Call>,
    group: Option<OfGroup>,
    has_ended_group: bool,
}

/// The group of an error, if it has a name or if its ranks have other numbers than those of the job.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OfGroup {
    name: String,
    /// By rank of the group: which rank of the job it is. Without a launcher, the job is the group that was split.
    job_ranks: Vec<usize>,
}

/// What is asked of an error.
impl Error {
    /// What has failed.
    pub fn kind(&self) -> &Kind {
        &self.0.kind
    }

    /// The rank that has failed or is at fault. `None` if no rank is, if several are, or if there are no ranks yet.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// All ranks at fault, as far as the error names them.
    pub fn at_fault(&self) -> Vec<usize> {
        let mut kind = self.0.kind.clone();
        // The rank that finds its address taken is not at fault.
        let own = self
            .0
            .rank
            .filter(|_| !matches!(kind, Kind::AddressTaken { .. }));
        let [others, _] = kind.ranks();
        own.into_iter()
            .chain(others.into_iter().map(|rank| *rank))
            .collect()
    }

    /// The call that was refused, if an argument is wrong.
    pub fn call(&self) -> Option<&Call> {
        self.0.call.as_ref()
    }

    /// The name of the group, if it has one, or if it is a part of a job or of a different group.
    pub fn group(&self) -> Option<&str> {
        self.0.group.as_ref().map(|group| &*group.name)
    }

    /// The failure itself, without saying that it happened earlier, nor in which group it happened. Its ranks keep their
    /// numbers.
    pub fn cause(&self) -> Error {
        let mut error = self.clone().first();
        error.0.group = None;
        error
    }

    /// True if this failure has ended the group before the call that returns it.
    pub fn has_ended_group(&self) -> bool {
        self.0.has_ended_group
    }

    /// The number that this error has for a rank of its group: that in the job.
    pub fn job_rank(&self, rank: usize) -> usize {
        let group = self.0.group.as_ref();
        group
            .and_then(|group| group.job_ranks.get(rank))
            .copied()
            .unwrap_or(rank)
    }

    /// What the failure is to `rank`, one of the group that gets the error.
    ///
    /// What another rank was refused, or what has ended the group before, is a failure of that rank to all others.
    pub fn class_on(&self, rank: usize) -> Class {
        let (own, at_fault) = (self.job_rank(rank), self.at_fault());
        match self.kind().class() {
            Class::Argument | Class::Misuse
                if self.has_ended_group() || !(at_fault.is_empty() || at_fault.contains(&own)) =>
            {
                Class::Rank
            }
            class => class,
        }
    }
}

/// How errors are made. Neither the rank nor the call need be known yet.
///
/// Libraries that are built on this one refuse arguments with these: [`Group::refuse`](crate::Group::refuse).
impl Error {
    pub(crate) fn new(kind: Kind, rank: Option<usize>) -> Error {
        Error(Box::new(Context {
            kind,
            rank,
            call: None,
            group: None,
            has_ended_group: false,
        }))
    }

    /// An error of no rank.
    // `From<Kind>` would make `?` ambiguous in closures of users.
    pub fn of_kind(kind: Kind) -> Error {
        Error::new(kind, None)
    }

    /// `argument` must be a matrix, or a vector, of a different shape.
    pub(crate) fn shape(argument: &str, expected: &[usize], found: &[usize]) -> Error {
        Error::of_kind(Kind::Shape {
            argument: argument.into(),
            expected: expected.into(),
            found: found.into(),
        })
    }

    /// `what`, a property of an argument, must be different.
    pub fn unsuitable(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Error {
        Error::of_kind(Kind::Unsuitable {
            what: what.into(),
            expected: expected.into(),
            found: found.into(),
            remedy: None,
        })
    }

    /// A number or an address must be a multiple on this backend.
    pub fn unaligned(what: impl Into<String>, value: usize, multiple: usize) -> Error {
        let expected = format!("a multiple of {multiple} on this backend");
        // The multiples next to an address say nothing.
        let is_extent = value <= i32::MAX as usize && multiple > 0;
        let nearest = || {
            let below = value / multiple * multiple;
            format!("the nearest are {below} and {}", below + multiple)
        };
        Error::of_kind(Kind::Unsuitable {
            what: what.into(),
            expected,
            found: value.to_string(),
            remedy: is_extent.then(nearest),
        })
    }

    /// Something is not supported. `what` says what must hold instead.
    pub fn unsupported(what: impl Into<String>) -> Error {
        Error::of_kind(Kind::Unsupported { what: what.into() })
    }

    /// For `map_err`: the operating system refused `action`.
    pub(crate) fn system(
        rank: impl Into<Option<usize>>,
        action: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Error {
        let (rank, action) = (rank.into(), action.into());
        move |error| {
            let reason = resources::explain(&error);
            Error::new(Kind::System { action, reason }, rank)
        }
    }

    /// For `map_err`: `what`, a thread or a process, could not be started.
    pub(crate) fn not_started(
        rank: usize,
        what: impl Into<String>,
    ) -> impl FnOnce(io::Error) -> Error {
        let action = format!("start {}", what.into());
        move |error| {
            let reason = resources::explain_start(&error);
            Kind::System { action, reason }.on(rank)
        }
    }

    /// For `map_err`: `bytes` bytes of memory, or a descriptor for them, could not be allocated.
    pub(crate) fn out_of_memory(
        rank: impl Into<Option<usize>>,
        bytes: usize,
    ) -> impl FnOnce(io::Error) -> Error {
        let rank = rank.into();
        move |error| {
            if resources::is_memory(&error) {
                let reason = resources::explain_memory(&error);
                Error::new(Kind::OutOfMemory { bytes, reason }, rank)
            } else {
                Error::system(rank, format!("share {} of memory", Bytes(bytes as u64)))(error)
            }
        }
    }
}

/// What is known later: the rank, the call, the group.
impl Error {
    /// For `map_err`: the error of `rank` in `call`, at the place from which the calling function is called. What the
    /// error knows already stays.
    #[track_caller]
    pub(crate) fn of(rank: impl Into<Option<usize>>, call: &str) -> impl Fn(Error) -> Error + Copy {
        let (rank, place) = (rank.into(), Location::caller());
        move |error| error.filled(rank, call, place)
    }

    fn filled(
        mut self,
        rank: Option<usize>,
        call: &str,
        place: &'static Location<'static>,
    ) -> Error {
        let parts = &mut *self.0;
        if parts.kind.class() == Class::Argument && parts.call.is_none() {
            parts.call = Some(Call::at(call, place));
        }
        if parts.rank.is_none() && parts.kind.ranks()[0].is_empty() {
            parts.rank = rank;
        }
        self
    }

    /// The error of `rank`.
    pub fn on(mut self, rank: usize) -> Error {
        self.0.rank = Some(rank);
        self
    }

    /// The error of `call`, if it is one of an argument.
    pub fn in_call(self, call: Call) -> Error {
        match self.kind().class() {
            Class::Argument => self.with_call(call),
            _ => self,
        }
    }

    pub(crate) fn with_call(mut self, call: Call) -> Error {
        self.0.call = Some(call);
        self
    }

    /// For `map_err`: names the argument's place if it is one of several. `unit` is the name of one.
    pub(crate) fn one_of(unit: &str, number: usize, count: usize) -> impl FnOnce(Error) -> Error {
        let place = move || format!(" ({unit} {} of {count})", number + 1);
        move |mut error: Error| {
            if let Kind::Shape { argument: what, .. } | Kind::Unsuitable { what, .. } =
                &mut error.0.kind
                && count > 1
            {
                what.push_str(&place());
            }
            error
        }
    }

    /// The error of a group of this name, whose ranks are these of the job. One that knows its group stays as it is.
    pub(crate) fn in_group(mut self, name: &str, job_ranks: &[usize]) -> Error {
        if self.0.group.is_none() {
            let renumber =
                |rank: &mut usize| *rank = job_ranks.get(*rank).copied().unwrap_or(*rank);
            self.ranks().into_iter().for_each(renumber);
        }
        self.of_group(name, job_ranks)
    }

    /// As [`Error::in_group`], of an error that has the ranks of the job already.
    pub(crate) fn of_group(mut self, name: &str, job_ranks: &[usize]) -> Error {
        self.0.group.get_or_insert_with(|| OfGroup {
            name: name.into(),
            job_ranks: job_ranks.into(),
        });
        self
    }

    /// The error of later calls of the group.
    pub(crate) fn again(mut self) -> Error {
        self.0.has_ended_group = true;
        self
    }

    /// The error of the call in which it happened.
    pub(crate) fn first(mut self) -> Error {
        self.0.has_ended_group = false;
        self
    }

    pub(crate) fn kind_mut(&mut self) -> &mut Kind {
        &mut self.0.kind
    }

    /// The failure of the error's group, as the cause of something else.
    pub(super) fn as_cause(&self) -> String {
        match &self.0.group {
            Some(group) => format!("({group} failed: {})", InGroup(self)),
            None => format!("(its group failed: {self})"),
        }
    }

    /// All ranks that the error names.
    pub(super) fn ranks(&mut self) -> Vec<&mut usize> {
        let Context { kind, rank, .. } = &mut *self.0;
        rank.iter_mut()
            .chain(kind.ranks().into_iter().flatten())
            .collect()
    }
}

/// Of an error, its group and whether it has ended it, and then the rest.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match (&self.0.group, self.0.has_ended_group) {
            (None, false) => {}
            (Some(group), false) => write!(f, "{group}: ")?,
            (Some(group), true) => write!(f, "{group} has failed: ")?,
            (None, true) => f.write_str("the group has failed: ")?,
        }
        InGroup(self).fmt(f)
    }
}

/// A group, with its ranks unless the job numbers them alike.
impl fmt::Display for OfGroup {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "group {:?}{}", self.name, of_ranks(&self.job_ranks))
    }
}

/// An error as its group says it.
struct InGroup<'a>(&'a Error);

impl fmt::Display for InGroup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Context {
            kind, rank, call, ..
        } = &*self.0.0;
        match (rank, call) {
            (Some(rank), None) if kind.is_said_of_rank() => return write!(f, "rank {rank} {kind}"),
            (Some(rank), Some(call)) if kind.is_said_of_rank() => {
                return write!(f, "rank {rank}, in {call}, {kind}");
            }
            (Some(rank), _) => write!(f, "rank {rank}: ")?,
            (None, _) => {}
        }
        if let Some(call) = call {
            write!(f, "{call}: ")?;
        }
        kind.fmt(f)
    }
}

/// Written at once, so that the lines of several ranks do not mix.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.to_string())
    }
}

impl std::error::Error for Error {}
