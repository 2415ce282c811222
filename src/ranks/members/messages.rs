//! Exchanges of messages between all ranks, by way of rank 0.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::{FOREVER, GRACE, Members, PeerWait};
use crate::error::{Call, Deadline, Error, MadeCall, Result, call};
use crate::json;
use crate::ranks::deadlines::{Clock, Deadlines};
use crate::ranks::pidfd;
use crate::ranks::wire::{Channel, Connection, Frame, MAX_FRAME, WireError};

/// Room for what is added around a rank's message.
const OVERHEAD: usize = 4096;

/// The messages of all ranks, by rank.
pub struct Gathered {
    pub payloads: Vec<Vec<u8>>,
    /// One descriptor of each rank, if ranks sent descriptors and rank 0 could receive them all. Otherwise none. An
    /// error if this rank could not receive them.
    pub fds: io::Result<Vec<OwnedFd>>,
}

impl Members {
    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&MadeCall::named("barrier"), &[], None)
            .map(drop)
    }

    /// Exchanges a message, and perhaps a descriptor, that each rank has made.
    ///
    /// A rank that could not make its part sends the reason. Then all ranks get its error, and the group goes on.
    pub fn gather_messages(
        &self,
        call: &MadeCall,
        own: Result<(Vec<u8>, Option<OwnedFd>)>,
    ) -> Result<Gathered> {
        let outcome = json::of_outcome(&own.as_ref().map(|_| ()).map_err(Error::clone));
        let (payload, fd) = own.unwrap_or_default();
        let fd = fd.as_ref().map(AsFd::as_fd);
        let mut gathered = self.all_gather(call, &join(&[outcome, payload]), fd)?;
        for (rank, bytes) in gathered.payloads.iter_mut().enumerate() {
            let parts = self::outcome(bytes).ok_or_else(|| self.garbage(rank, "an outcome"))?;
            let (outcome, payload) = parts;
            outcome.map_err(|error| self.named(error))?;
            *bytes = payload.to_vec();
        }
        Ok(gathered)
    }

    /// Shares a descriptor that each rank has made, and returns what `take` makes of all ranks' descriptors, by rank.
    ///
    /// If a rank could not do its part, all ranks get its error, and the group goes on.
    pub fn share<R>(
        &self,
        call: &MadeCall,
        own: Result<OwnedFd>,
        take: impl FnOnce(Vec<OwnedFd>) -> Result<R>,
    ) -> Result<R> {
        let gathered = self.gather_messages(call, own.map(|fd| (Vec::new(), Some(fd))))?;
        let taken = match gathered.fds {
            Ok(fds) if fds.len() == self.world => take(fds).map(Some),
            // Rank 0 could not receive them all, and says so.
            Ok(_) => Ok(None),
            Err(error) => {
                let action = format!("receive {} descriptors", self.world);
                Err(Error::system(self.rank, action)(error))
            }
        };
        let outcome = taken.as_ref().map(|_| (Vec::new(), None));
        self.gather_messages(call, outcome.map_err(Error::clone))?;
        taken?.ok_or_else(|| self.garbage(0, "a descriptor of each rank"))
    }

    /// Tells the other ranks why this rank has no memory to share with them, in the place of its part in their first
    /// exchange.
    pub fn decline(stream: &UnixStream, deadlines: &Deadlines, error: &Error) {
        let outcome = json::of_outcome::<()>(&Err(error.clone()));
        let channel = Channel {
            stream,
            deadline: Instant::now() + deadlines.rendezvous() + GRACE,
            check: || pidfd::check(stream),
        };
        let mut told = channel.send(&join(&[outcome, Vec::new()]), &[]);
        // This waits until rank 0 has told all and closes the connection. Rank 0 would take this rank for dead if it
        // left earlier.
        while told.is_ok() {
            told = channel.receive(MAX_FRAME).map(drop);
        }
    }

    /// Sends `payload`, and a descriptor if there is one, to every rank, and returns what all sent.
    ///
    /// # Errors
    /// [`Error::CallMismatch`] unless all ranks make the same `call`; the group's failure if a rank is lost or has
    /// left, or if a deadline has passed.
    #[track_caller]
    pub fn all_gather(
        &self,
        call: &MadeCall,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Gathered> {
        self.check()?;
        let longest = MAX_FRAME / self.world - OVERHEAD;
        if payload.len() > longest {
            return Err(self.fail(Error::Limit {
                rank: Some(self.rank),
                call: Call::here(&call.name),
                what: "the number of bytes".into(),
                value: payload.len(),
                min: 0,
                max: longest,
            }));
        }
        let connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // The place that was given for all of a program's call, not one in this library.
        let place = call::place_of_outer();
        let placed = MadeCall {
            place: call::in_words(place),
            ..call.clone()
        };
        // Calls are compared before anything is sent. So an exchange is complete only if all ranks made it.
        let post = |number| self.shared.post_messages(number, call, place);
        let number = self.next_call(&|| placed.in_words(), post)?;
        let messages = MessageCall {
            words: placed.in_words(),
            number,
            clock: Clock::start(),
        };
        let (bytes, fds) = if self.rank == 0 {
            self.collect(&connections, &messages, payload, fd)?
        } else {
            let channel = self.channel(0, &connections[0], &messages);
            channel
                .send(payload, fd.as_slice())
                .map_err(|e| self.wire_failure(0, &messages, e))?;
            channel
                .receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(0, &messages, e))?
        };
        let parts = split(&bytes).filter(|parts| parts.len() == self.world);
        let parts = parts.ok_or_else(|| self.garbage(0, "a list of messages"))?;
        let payloads = parts.into_iter().map(|part| self.copied(part));
        Ok(Gathered {
            payloads: payloads.collect::<Result<_>>()?,
            fds,
        })
    }

    /// Memory for a message. A failed allocation of a vector would end the process. Other ranks wait for the message,
    /// so it is the group's failure instead.
    fn room(&self, bytes: usize) -> Result<Vec<u8>> {
        let mut room = Vec::new();
        let refused = Error::out_of_memory(self.rank, bytes);
        match room.try_reserve_exact(bytes) {
            Ok(()) => Ok(room),
            Err(_) => Err(self.fail(refused(rustix::io::Errno::NOMEM.into()))),
        }
    }

    fn copied(&self, message: &[u8]) -> Result<Vec<u8>> {
        let mut copy = self.room(message.len())?;
        copy.extend_from_slice(message);
        Ok(copy)
    }

    /// As [`join`].
    fn joined(&self, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
        let lengths = parts.iter().map(|part| size_of::<u64>() + part.len());
        let mut all = self.room(lengths.sum())?;
        join_into(&mut all, parts);
        Ok(all)
    }

    /// Rank 0's part: receives every rank's message, then sends all of them to all.
    fn collect(
        &self,
        connections: &[Arc<Connection>],
        messages: &MessageCall,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Frame> {
        let mut parts = vec![self.copied(payload)?];
        let mut fds = Ok(Vec::new());
        for (index, connection) in connections.iter().enumerate() {
            let (part, sent) = self
                .channel(index + 1, connection, messages)
                .receive(MAX_FRAME)
                .map_err(|e| self.wire_failure(index + 1, messages, e))?;
            parts.push(part);
            fds = fds.and_then(|mut fds: Vec<OwnedFd>| {
                fds.extend(sent?);
                Ok(fds)
            });
        }
        let all = self.joined(&parts)?;
        // A rank gets all descriptors or none, so that it takes none for a different rank's.
        let others = fds.as_ref().map_or(&[][..], |fds| fds);
        let own = fd.filter(|_| fds.is_ok());
        let sent: Vec<BorrowedFd> = own
            .into_iter()
            .chain(others.iter().map(AsFd::as_fd))
            .collect();
        for (index, connection) in connections.iter().enumerate() {
            self.channel(index + 1, connection, messages)
                .send(&all, &sent)
                .map_err(|e| self.wire_failure(index + 1, messages, e))?;
        }
        let own = own.map(|fd| fd.try_clone_to_owned()).transpose();
        let fds = fds.and_then(|fds| Ok(own?.into_iter().chain(fds).collect()));
        Ok((all, fds))
    }

    /// The connection to `rank`.
    fn channel<'a>(
        &'a self,
        rank: usize,
        stream: &'a UnixStream,
        messages: &'a MessageCall,
    ) -> Channel<'a, impl Fn() -> Result<(), Error>> {
        Channel {
            stream,
            // The check has the deadlines.
            deadline: Instant::now() + FOREVER,
            check: move || {
                let late = self.shared.first_late(messages.number);
                // Rank 0 may wait for another. Unless it shows that, it is given time to say so.
                let is_silent = || rank == 0 && !self.shared.is_waiting(0, &self.deadlines);
                let grace = match late.is_none() && is_silent() {
                    true => GRACE,
                    false => Duration::ZERO,
                };
                let rank = late.unwrap_or(rank);
                self.pause(&PeerWait {
                    clock: &messages.clock,
                    grace,
                    is_for_a_peer: true,
                    rank,
                    call: &|| Some(messages.number),
                    what: &|| messages.awaited(self.shared.job_rank(rank)),
                })
            },
        }
    }

    fn wire_failure(&self, rank: usize, messages: &MessageCall, error: WireError<Error>) -> Error {
        let call = &messages.words;
        self.fail(match error {
            WireError::Stopped(error) => error,
            WireError::Late => {
                let what = messages.awaited(self.shared.job_rank(rank));
                let waited = messages.clock.waited();
                let passed = (Deadline::Call, FOREVER);
                self.shared.timed_out(passed, rank, waited, what)
            }
            WireError::Closed if self.shared.has_left(rank) => {
                self.left(rank, Some(messages.number), call.clone())
            }
            WireError::Closed => Error::RankLost {
                rank,
                noticed_by: self.rank,
            },
            WireError::Garbage(reason) => Error::Message { rank, reason },
            WireError::Io(error) => {
                let peer = self.shared.job_rank(rank);
                Error::system(self.rank, format!("talk to rank {peer} in {call}"))(error)
            }
        })
    }

    fn garbage(&self, rank: usize, expected: &str) -> Error {
        self.fail(Error::Message {
            rank,
            reason: format!("not {expected}"),
        })
    }
}

/// A call in which all ranks send something to all.
struct MessageCall {
    /// The call, in words, with its place.
    words: String,
    number: u64,
    clock: Clock,
}

impl MessageCall {
    /// The call, and what `rank`, a rank of the job, has not done in it.
    fn awaited(&self, rank: usize) -> String {
        let what = match self.clock.has_begun() {
            true => "has not sent its part",
            false => "has not come",
        };
        format!("{}: rank {rank} {what}", self.words)
    }
}

/// Joins parts, each after its length.
fn join(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    join_into(&mut bytes, parts);
    bytes
}

fn join_into(bytes: &mut Vec<u8>, parts: &[Vec<u8>]) {
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(part);
    }
}

fn split(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let (part, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        parts.push(part);
        bytes = rest;
    }
    Some(parts)
}

/// Splits what a rank sends in an exchange into its result and its bytes.
fn outcome(bytes: &[u8]) -> Option<(Result<()>, &[u8])> {
    match split(bytes)?[..] {
        [outcome, payload] => Some((json::outcome(outcome).ok()?, payload)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_split_as_they_were_joined_and_nonsense_is_not() {
        let parts = [vec![], vec![1, 2, 3], vec![0; 300]];
        assert_eq!(split(&join(&parts)).unwrap(), parts);
        assert_eq!(split(&[1, 2, 3]), None);
        assert_eq!(split(&u64::MAX.to_le_bytes()), None);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! Frames, and the messages of ranks in them.
    use std::convert::Infallible;
    use std::io::Write;
    use std::net::Shutdown;

    use super::*;
    use crate::ranks::wire;

    /// The first byte says how long a frame may be. The rest is what the other end of a connection sends.
    pub fn parse(data: &[u8]) {
        let Some((limit, sent)) = data.split_first() else {
            return;
        };
        let Ok((other, stream)) = wire::pair() else {
            return;
        };
        // Bytes that do not fit in the socket's buffer are not sent.
        let _ = (&*other).write(sent);
        let _ = other.shutdown(Shutdown::Write);
        let channel = Channel {
            stream: &stream,
            deadline: Instant::now() + Duration::from_secs(1),
            check: || Ok::<(), Infallible>(()),
        };
        let limit = MAX_FRAME >> (limit % 32);
        while let Ok((frame, _)) = channel.receive(limit) {
            assert!(frame.len() <= limit);
            let messages = split(&frame).unwrap_or_default();
            let bytes: usize = messages.iter().map(|message| 8 + message.len()).sum();
            assert!(bytes == 0 || bytes == frame.len());
            for message in messages {
                if let Some((Err(error), _)) = outcome(message) {
                    let _ = (error.to_string(), error.cause());
                }
            }
        }
    }

    /// Messages of an exchange that all complete, and of one that a rank can't complete.
    pub fn seeds() -> Vec<Vec<u8>> {
        let died = Error::RankLost {
            rank: 2,
            noticed_by: 1,
        };
        let cause = Box::new(died.clone());
        let outcomes = [Ok(()), Err(died), Err(Error::Poisoned { cause })];
        let message =
            |outcome: &Result<()>| join(&[json::of_outcome(outcome), b"payload".to_vec()]);
        let messages = outcomes.each_ref().map(message);
        let frames = [messages[0].clone(), messages[2].clone(), join(&messages)];
        let frames = frames.into_iter().map(|frame| sent(&frame));
        // Headers of frames that never come.
        let huge = [vec![0, 0, 0, 0, 16], sent(&u64::MAX.to_le_bytes())];
        frames.chain(huge).collect()
    }

    /// A frame as [`Channel::send`] sends it, after the byte for the longest limit.
    fn sent(frame: &[u8]) -> Vec<u8> {
        [&[0], &(frame.len() as u32).to_le_bytes()[..], frame].concat()
    }
}
