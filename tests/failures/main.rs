//! Whatever goes wrong on one rank, every rank is told what it was and who: in time, and nothing is left behind.
//! With real processes and real signals.

#[path = "../support/mod.rs"]
mod support;

mod ends;
mod extremes;
mod forks;
mod groups;
mod hosts;
mod late;
mod launcher;
mod limits;
mod memory;
mod messages;
mod mismatches;
mod places;
mod reasons;
mod refusals;
mod rendezvous;
mod strangers;
mod words;

use std::time::Duration;

use gemmesh::{Error, Host};
use support::patience::stretched;
use support::processes::Outcome;
use support::products;
use support::tested::{self, Tested};

type Arguments = products::Arguments<Host>;
type MakeCall = tested::MakeCall<Host>;

const TIMEOUT: Duration = Host::TIMEOUT;
const PROMPT: Duration = Host::PROMPT;
const SHORT: Duration = Host::SHORT;
const NOTICED: Duration = Host::NOTICED;

/// [`SHORT`] on a busy machine. A test that runs ranks as threads asks once.
fn short() -> Duration {
    Host::short()
}

/// Survivors know within this, on a machine as busy as it may be.
fn noticed() -> Duration {
    Host::before_timeout(NOTICED)
}

/// The one error that all ranks have, none of which waited for its timeout.
#[track_caller]
fn same_error(outcomes: &[Outcome]) -> Error {
    for outcome in outcomes {
        let took = outcome.at - outcome.begun;
        assert!(
            took < stretched(PROMPT),
            "rank {} after {took:?}",
            outcome.rank
        );
    }
    tested::same_error(outcomes)
}
