//! A backend as the tests see it that are the same for each: its limits, its groups, and the errors of these.

use std::ops::Range;
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::{Backend, Config, Error, Group, Host, ShardedMatrix, bf16};

use super::errors::parts;
use super::patience::{agreed, stretched};
use super::processes::{Outcome, Processes, Rank, Setting, start_with};
use super::products::Arguments;

pub trait Tested: Backend {
    /// Of groups in which no one is waited for in vain. It does not pass on a busy machine either.
    const TIMEOUT: Duration;
    /// Whoever is not waited for in vain is there long before this.
    const PROMPT: Duration;
    /// Of groups in which somebody is.
    const SHORT: Duration;
    /// What "at that timeout" means.
    const SLACK: Duration;
    /// How long a rank stays away that the others give up at that timeout.
    const AWAY: Duration;
    /// What a rank that gives up at that timeout says that it has waited.
    const WAITED: Range<Duration>;
    /// Survivors know within this after a rank has died, or has left, or has made another call: long before a timeout.
    const NOTICED: Duration;
    /// Their processes have ended within this.
    const ENDED: Duration;
    /// Of the processes of one test.
    const DEADLINE: Duration;

    /// [`Tested::SHORT`] on a busy machine, the same for all ranks. A test that runs ranks as threads asks once.
    fn short() -> Duration {
        agreed(Self::SHORT)
    }

    /// [`Tested::AWAY`] on a busy machine.
    fn away() -> Duration {
        agreed(Self::AWAY)
    }

    /// [`Tested::SHORT`] and [`Tested::SLACK`] on a busy machine.
    fn short_and_slack() -> Duration {
        stretched(Self::SHORT + Self::SLACK)
    }

    /// `time` on a busy machine, but always before [`Tested::TIMEOUT`]. What takes as long as that has waited for it.
    fn before_timeout(time: Duration) -> Duration {
        stretched(time).min(Self::TIMEOUT * 9 / 10)
    }

    /// How late a rank is whom the others notice that they wait for.
    const LATE: Duration;
    /// [M, N, K] of a product that takes no time.
    const SMALL: [usize; 3];
    /// [M, N, K] of a product amid which something can happen.
    const LARGER: [usize; 3];

    /// Leave to test the backend, beside other tests; none if it is not there.
    fn leave() -> Option<impl Sized>;
    /// As [`Tested::leave`], beside no other test that would change how long something takes.
    fn leave_alone() -> Option<impl Sized>;

    /// What a rank keeps while groups come and go, because it takes longer to make than [`Tested::SHORT`].
    type Kept;
    fn keep(rank: &Rank) -> Self::Kept;

    /// A way to cut up a small product with a weight of N rows.
    fn config(a: &ShardedMatrix<Self, bf16>, n: usize) -> Result<Config, Error>;
}

impl Tested for Host {
    // What .ci/mutants breaks fails by this, in tests that have the machine almost to themselves.
    const TIMEOUT: Duration = match option_env!("GEMMESH_TEST_MUTANTS") {
        Some(_) => Duration::from_secs(20),
        None => Duration::from_secs(60),
    };
    const PROMPT: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(1000);
    // A rank that pulls waits half a second longer than the rank that it waits for.
    const AWAY: Duration = Duration::from_millis(2500);
    const SLACK: Duration = Duration::from_secs(10);
    const WAITED: Range<Duration> = Self::SHORT..Duration::from_secs(11);
    const NOTICED: Duration = Duration::from_secs(10);
    const ENDED: Duration = Duration::from_secs(10);
    const DEADLINE: Duration = Duration::from_secs(60);
    const LATE: Duration = Duration::from_millis(200);
    const SMALL: [usize; 3] = [9, 5, 3];
    const LARGER: [usize; 3] = [100, 50, 30];

    fn leave() -> Option<impl Sized> {
        Some(())
    }

    fn leave_alone() -> Option<impl Sized> {
        Some(())
    }

    type Kept = ();

    fn keep(_: &Rank) {}

    fn config(a: &ShardedMatrix<Host, bf16>, n: usize) -> Result<Config, Error> {
        let prepared = gemmesh::AllGatherMatmul::new().prepare(a, n)?;
        Ok(prepared.config())
    }
}

// Ranks.

/// The ranks of one group.
pub fn ranks<B: Tested>(
    test: &str,
    world: usize,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    let setting = Setting {
        deadline: B::DEADLINE,
        ..Setting::default()
    };
    ranks_with(test, world, &setting, part)
}

pub fn ranks_with(
    test: &str,
    world: usize,
    setting: &Setting,
    part: impl FnOnce(&Rank) -> Result<String, Error>,
) -> Processes {
    let places: Vec<_> = (0..world).map(|rank| (rank, world)).collect();
    start_with(test, &places, setting, part)
}

/// A group of all ranks, with this timeout for late ranks too. What a rank keeps is there from now on.
pub fn connect<B: Tested>(rank: &Rank, timeout: Duration) -> Result<Group<B>, Error> {
    let builder = Group::<B>::builder()
        .timeout(timeout)
        .arrival_timeout(timeout);
    let group = builder.connect(rank.rank, rank.world, &rank.address)?;
    std::mem::forget(B::keep(rank));
    Ok(group)
}

/// A group in which somebody is waited for in vain.
pub fn connect_short<B: Tested>(rank: &Rank) -> Result<(B::Kept, Group<B>), Error> {
    let kept = B::keep(rank);
    host_group(rank)?.barrier()?;
    Ok((kept, connect(rank, B::short())?))
}

/// The same ranks on the host, to keep step.
pub fn host_group(rank: &Rank) -> Result<Group<Host>, Error> {
    let address = format!("{}-host", rank.address);
    let deadline = agreed(Duration::from_secs(90));
    let builder = Group::<Host>::builder()
        .arrival_timeout(deadline)
        .workers(1);
    builder.connect(rank.rank, rank.world, &address)
}

/// A call as a rank makes it.
pub type MakeCall<B> = fn(&Group<B>, &mut Arguments<B>) -> Result<(), Error>;

// Results and errors.

/// All must have done well.
#[track_caller]
pub fn all_done(ranks: Processes) {
    let outcomes = ranks.outcomes();
    for outcome in &outcomes {
        println!("rank {}: {:?}", outcome.rank, outcome.ending);
    }
    for outcome in &outcomes {
        outcome.value();
    }
}

/// The one error that all ranks have.
#[track_caller]
pub fn same_error(outcomes: &[Outcome]) -> Error {
    let error = outcomes[0].error().cause();
    for outcome in outcomes {
        assert_eq!(outcome.error().cause(), error, "rank {}", outcome.rank);
    }
    error
}

#[track_caller]
pub fn assert_call_mismatch(error: &Error, odd: usize, its: &str, others: &str) {
    match parts(error) {
        (
            Some(rank),
            Kind::CallMismatch {
                theirs, expected, ..
            },
        ) => {
            assert_eq!((rank, theirs.to_string().as_str()), (odd, its));
            assert_eq!(expected.to_string(), others);
        }
        other => panic!("{other:?}"),
    }
}

/// Makes sure that the group does nothing after `result`'s error but repeat it, and returns it.
#[track_caller]
pub fn poisoned<B: Backend>(group: &Group<B>, result: Result<(), Error>) -> Result<String, Error> {
    let error = result.expect_err("an operation that cannot have worked");
    let later = [
        group.barrier().err(),
        group.sharded::<bf16>(4, 8).err(),
        group.synchronize().err(),
    ];
    for later in later {
        let later = later.expect("the group has failed");
        assert!(later.has_ended_group(), "{later}");
        assert_eq!(later.cause(), error.cause());
    }
    Err(error.cause())
}

#[track_caller]
pub fn assert_timeout_names(error: &Error, culprit: usize) {
    match parts(error) {
        (Some(rank), Kind::Timeout { .. }) => assert_eq!(rank, culprit, "{error}"),
        other => panic!("{other:?}"),
    }
    assert_plain(error);
}

/// That an error says what a user knows of: no flags, and no operation without its name.
#[track_caller]
pub fn assert_plain(error: &Error) {
    let words = error.to_string();
    for unknown in ["flag", "epoch", "an operation"] {
        assert!(!words.contains(unknown), "{words}");
    }
}

/// A test for each route, whose `$part` is given the test's name. `$leave` says whether the backend is there.
#[macro_export]
macro_rules! each_route {
    ($leave:path, $part:path: $($test:ident by $route:ident,)+) => {
        $(
            #[test]
            fn $test() {
                if let Some(_leave) = $leave() {
                    $part($crate::test_name!(), gemmesh::tuning::Route::$route);
                }
            }
        )+
    };
}

/// Operations until one fails.
pub fn until_failure<B: Tested>(
    group: &Group<B>,
    mut step: impl FnMut() -> Result<(), Error>,
) -> Result<String, Error> {
    let begin = Instant::now();
    loop {
        let result = step().and_then(|()| group.synchronize());
        if result.is_err() {
            return poisoned(group, result);
        }
        assert!(begin.elapsed() < stretched(2 * B::PROMPT));
    }
}

/// An error's sentence without the places of calls, which are lines of `file`.
pub fn without_places(words: &str, file: &str) -> String {
    let place = format!(" at {file}:");
    let mut parts = words.split(&place);
    let first = parts.next().unwrap_or_default().to_string();
    let parts = parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit()));
    parts.fold(first, |all, part| all + part)
}

/// The error's sentence without the place of the call, if it has a call. The place must begin with `place`.
#[track_caller]
pub fn without_place(error: &Error, place: &str) -> String {
    let sentence = error.to_string();
    let Some(call) = error.call() else {
        return sentence;
    };
    let found = call.place().unwrap_or("nowhere");
    assert!(found.starts_with(place), "{sentence}");
    sentence.replacen(&format!(" at {found}"), "", 1)
}
