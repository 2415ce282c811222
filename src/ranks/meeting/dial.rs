//! A leader's side: it finds rank 0, and waits for the verdict.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::{self, Proof};
use super::lookup::{self, Lookup};
use super::reach::{Answered, Reach, Reached};
use super::{Meeting, MeetingPlace, VisitReport};
use crate::error::{Error, Kind, Result};
use crate::json;
use crate::protocol::seat::{Line, Visit};
use crate::ranks::identity::Identity;
use crate::ranks::mirror::HostLink;
use crate::ranks::notice::{self, LongWait};
use crate::ranks::rendezvous::{Hello, MAX_VERDICT};
use crate::ranks::wire::{self, Channel, Connection, WireError};
use crate::resources;

/// How long a leader waits for a verdict after the end of the connection for the mirror. If there is a verdict, it may be
/// late, because connections are not in step.
const LATE_VERDICT: Duration = Duration::from_secs(3);

/// Until when a leader does what.
#[derive(Clone, Copy)]
pub struct Limits {
    /// When it began to look for the other ranks.
    pub begin: Instant,
    /// It looks for rank 0 until then.
    pub reach: Instant,
    /// How long it waits for a verdict when rank 0 has answered.
    pub verdict: Duration,
}

/// Reports to rank 0 whether the ranks of this leader's host have come, and waits for the verdict. A good one is a link
/// to rank 0.
///
/// # Errors
/// The verdict, if it is one; [`Kind::KeyRefused`]; [`Kind::System`] if a name has no address;
/// [`Kind::RanksMissing`] if rank 0 has not come at the deadline.
pub fn report(
    identity: &Identity,
    meeting: &Meeting,
    hello: &Hello,
    version: u32,
    outcome: &Result<()>,
    limits: Limits,
) -> Result<HostLink> {
    let system = |action| Error::system(identity.rank, action);
    let drawn = handshake::nonce().map_err(system("draw a random number"))?;
    let caller = Caller {
        identity,
        meeting,
        hello,
        version,
        outcome,
        limits,
    };
    let mut visit = Visit {
        leader: u64::from_le_bytes(*drawn.first_chunk().unwrap_or(&[0; 8])),
        number: 0,
    };
    let mut lookup =
        Lookup::of(&meeting.place, lookup::resolve).map_err(system("look for rank 0"))?;
    let mut reach = Reach::new(&meeting.key, version, identity.rank);
    let mut wait = LongWait::since(Instant::now());
    loop {
        let reached = reach.reach(&mut lookup, limits.reach, |reach| {
            caller.tell_of_wait(&mut wait, reach);
            false
        });
        let answered = match reached {
            Reached::Answered(answered) => answered,
            Reached::Refused(address) => {
                let rank = identity.rank;
                let address = address.to_string();
                return Err(Kind::KeyRefused { address }.on(rank));
            }
            Reached::Nameless | Reached::Late | Reached::Stopped => {
                return Err(caller.not_reached(lookup, &reach));
            }
        };
        let address = answered.address;
        match caller.visit(answered, visit) {
            Ok(verdict) => return verdict,
            Err(Left(reason)) => reach.was_left(address, reason),
        }
        visit.number += 1;
    }
}

/// A leader that looks for rank 0.
struct Caller<'a> {
    identity: &'a Identity,
    meeting: &'a Meeting,
    hello: &'a Hello,
    version: u32,
    outcome: &'a Result<()>,
    limits: Limits,
}

/// Why a visit ended without a verdict.
struct Left(String);

/// The end of the connection for the mirror.
struct MirrorEnded;

impl From<WireError<MirrorEnded>> for Left {
    fn from(error: WireError<MirrorEnded>) -> Left {
        Left(match error {
            WireError::Late => "rank 0 has answered, and has given no verdict in time".into(),
            WireError::Closed | WireError::Stopped(MirrorEnded) => {
                "rank 0 ended the connection without a verdict".into()
            }
            WireError::Garbage(reason) => format!("rank 0 has sent no verdict, but {reason}"),
            WireError::Io(error) => resources::explain(&error),
        })
    }
}

impl Caller<'_> {
    /// Visits rank 0, which has `answered`. Returns the verdict.
    fn visit(&self, answered: Answered, visit: Visit) -> Result<Result<HostLink>, Left> {
        // Rank 0 may have begun later than this rank, and it knows which ranks are missing.
        let until = Instant::now() + self.limits.verdict;
        let address = answered.address;
        let messages = self.prove(answered, visit, Line::Messages, until)?;
        // A leader whose ranks have not all come needs nothing but the verdict.
        let mirror = match self.outcome {
            Ok(()) => {
                // Rank 0 may have a verdict before.
                let mut reach = Reach::new(&self.meeting.key, self.version, self.identity.rank);
                let place = MeetingPlace::At(vec![address]);
                let mut lookup = Lookup::of(&place, lookup::resolve).map_err(WireError::Io)?;
                let is_heard = |_: &Reach| wire::has_something(&messages);
                match reach.reach(&mut lookup, until, is_heard) {
                    Reached::Answered(answered) => {
                        Some(self.prove(answered, visit, Line::Mirror, until)?)
                    }
                    Reached::Stopped => None,
                    Reached::Refused(_) | Reached::Nameless | Reached::Late => {
                        let failure = reach.failure_at(address).unwrap_or("no answer in time");
                        return Err(Left(format!("the second connection failed: {failure}")));
                    }
                }
            }
            Err(_) => None,
        };
        self.verdict(messages, mirror, until)
    }

    /// Proves that this leader has the key, and says what the connection is for.
    fn prove(
        &self,
        answered: Answered,
        visit: Visit,
        line: Line,
        until: Instant,
    ) -> Result<Connection, Left> {
        let report = serde_json::to_vec(&self.report(visit, line)).unwrap_or_default();
        let proof = Proof::encode(&answered.nonces, &report, &self.meeting.key);
        let channel = Channel {
            stream: &answered.stream,
            deadline: until,
            check: || Ok::<(), MirrorEnded>(()),
        };
        channel.send_raw(&proof)?;
        Ok(answered.stream)
    }

    fn report(&self, visit: Visit, line: Line) -> VisitReport {
        // JSON within JSON is longer.
        let shortened = |error| json::fitted(error, super::MAX_REPORT / 4);
        let outcome = self.outcome.clone().map_err(shortened);
        VisitReport {
            visit,
            line,
            hello: self.hello.clone(),
            ranks: self.identity.neighbours().collect(),
            outcome: String::from_utf8_lossy(&json::of_outcome(&outcome)).into_owned(),
        }
    }

    /// Waits for the verdict. A good one is for a leader with both connections.
    fn verdict(
        &self,
        messages: Connection,
        mirror: Option<Connection>,
        until: Instant,
    ) -> Result<Result<HostLink>, Left> {
        let since = Cell::new(None);
        let check = || {
            if !mirror
                .as_ref()
                .is_some_and(|mirror| wire::has_hung_up(mirror))
            {
                return Ok(());
            }
            let now = Instant::now();
            let since = since.replace(since.get().or(Some(now))).unwrap_or(now);
            if now - since < LATE_VERDICT {
                Ok(())
            } else {
                Err(MirrorEnded)
            }
        };
        let channel = Channel {
            stream: &messages,
            deadline: until,
            check,
        };
        let (verdict, _) = channel.receive(MAX_VERDICT)?;
        let unexpected = |reason| Kind::Message { reason }.on(0);
        let verdict = json::outcome::<()>(&verdict);
        let verdict = verdict.map_err(|error| unexpected(error.to_string()));
        Ok(verdict.and_then(|verdict| verdict).and_then(|()| {
            let reason = || unexpected("a good verdict before both connections".into());
            Ok(HostLink {
                rank: 0,
                mirror: mirror.ok_or_else(reason)?,
                messages: Arc::new(messages),
            })
        }))
    }

    /// Says once, after a long wait, that rank 0 is waited for.
    fn tell_of_wait(&self, wait: &mut LongWait, reach: &Reach) {
        if wait.is_to_be_told(Instant::now()) {
            let (rank, place) = (self.identity.rank, &self.meeting.place);
            let failures = reach.failures().map(|words| format!(" ({words})"));
            notice::say(format_args!(
                "rank {rank} has tried for {} s to reach rank 0 at {place}{}",
                notice::LONG.as_secs(),
                failures.unwrap_or_default()
            ));
        }
    }

    /// The error that rank 0 was not reached in time.
    fn not_reached(&self, lookup: Lookup, reach: &Reach) -> Error {
        match lookup.failure() {
            Some(error) => self.nameless(error),
            None => self.missing(reach.failures()),
        }
    }

    /// The error that rank 0 has not come, and how the latest tries to reach it failed.
    fn missing(&self, reason: Option<String>) -> Error {
        Error::of_kind(Kind::RanksMissing {
            ranks: vec![0],
            address: self.meeting.place.to_string(),
            waited_ms: self.limits.begin.elapsed().as_millis() as u64,
            reason,
        })
    }

    /// The error that the name of rank 0's host has no address.
    fn nameless(&self, error: io::Error) -> Error {
        let name = match &self.meeting.place {
            MeetingPlace::Named(name, _) => name.as_str(),
            MeetingPlace::Listening(_) | MeetingPlace::At(_) => "rank 0's host",
        };
        let action = format!("find the address of {name:?}, which MASTER_ADDR names");
        Error::system(self.identity.rank, action)(error)
    }
}
