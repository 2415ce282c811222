//! Exchanges of messages between all ranks, by way of the hosts' leaders and rank 0.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use super::{FOREVER, GRACE, Members, PeerWait};
use crate::call;
use crate::error::{Deadline, Error, Kind, MadeCall, Result};
use crate::json;
use crate::ranks::deadlines::{Clock, Deadlines};
use crate::ranks::pidfd;
use crate::ranks::tree::{Branch, Tree};
use crate::ranks::wire::{Channel, Frame, MAX_FRAME, WireError};
use crate::schedule::agreed::hash;
use crate::schedule::limits::limit;

/// Room for what is added around a rank's message.
const OVERHEAD: usize = 4096;

/// Messages by rank, and descriptors of ranks of this host.
type Collected = (Vec<Vec<u8>>, io::Result<Vec<OwnedFd>>);

/// The messages of all ranks, by rank.
pub struct Gathered {
    pub payloads: Vec<Vec<u8>>,
    /// One descriptor of each rank of this host, if ranks sent descriptors and the host's leader could receive them all.
    /// Otherwise none. An error if this rank could not receive them.
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
    #[track_caller]
    pub fn gather_messages(
        &self,
        call: &MadeCall,
        own: Result<(Vec<u8>, Option<OwnedFd>)>,
    ) -> Result<Gathered> {
        // What is added around a part is short.
        let fits = |(payload, _): &(Vec<u8>, _)| {
            self.require_length(call, payload.len().saturating_add(OVERHEAD))
        };
        let own = own.and_then(|own| fits(&own).map(|()| own));
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

    /// Shares a descriptor that each rank has made, and returns what `take` makes of them. `take` gets them by rank; those
    /// of other hosts' ranks do not come.
    ///
    /// If a rank could not do its part, all ranks get its error, and the group goes on.
    pub fn share<R>(
        &self,
        call: &MadeCall,
        own: Result<OwnedFd>,
        take: impl FnOnce(Vec<Option<OwnedFd>>) -> Result<R>,
    ) -> Result<R> {
        let gathered = self.gather_messages(call, own.map(|fd| (Vec::new(), Some(fd))))?;
        let near: Vec<usize> = self.ranks_of_host().collect();
        let taken = match gathered.fds {
            Ok(fds) if fds.len() == near.len() => take(self.by_rank(&near, fds)).map(Some),
            // The leader could not receive them all, and says so.
            Ok(_) => Ok(None),
            Err(error) => {
                let action = format!("receive {} descriptors", near.len());
                Err(Error::system(self.rank, action)(error))
            }
        };
        let outcome = taken.as_ref().map(|_| (Vec::new(), None));
        self.gather_messages(call, outcome.map_err(Error::clone))?;
        let leader = self.hosts.leader_of(self.rank);
        taken?.ok_or_else(|| self.garbage(leader, "a descriptor of each rank"))
    }

    /// The ranks of this rank's host.
    fn ranks_of_host(&self) -> impl Iterator<Item = usize> {
        self.hosts
            .ranks_of(self.hosts.host_of(self.rank), self.world)
    }

    /// What ranks of this host have sent, by rank.
    fn by_rank<T>(&self, near: &[usize], sent: Vec<T>) -> Vec<Option<T>> {
        let mut all: Vec<Option<T>> = (0..self.world).map(|_| None).collect();
        for (&rank, sent) in near.iter().zip(sent) {
            all[rank] = Some(sent);
        }
        all
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

    /// Sends `payload` to every rank, and a descriptor, if there is one, to every rank of this host. Returns what all sent.
    ///
    /// `payload` has been admitted ([`Members::admit`]).
    ///
    /// # Errors
    /// [`Kind::CallMismatch`] unless all ranks make the same `call`; the group's failure if a rank is lost or has
    /// left, or if a deadline has passed.
    #[track_caller]
    pub fn all_gather(
        &self,
        call: &MadeCall,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Gathered> {
        self.check()?;
        let tree = self.tree.lock().unwrap_or_else(PoisonError::into_inner);
        // The place that was given for all of a program's call, not one in this library.
        let place = call::place_of_outer();
        let placed = MadeCall {
            place: call::in_words(place),
            ..call.clone()
        };
        // Calls are compared before anything is sent, or with what comes from another host. So an exchange is complete
        // only if all ranks made it.
        let post = |number| self.shared.post_messages(number, call, place);
        let number = self.next_call(&|| placed.in_words(), post)?;
        let key = match self.hosts.count() {
            1 => Vec::new(),
            _ => [number, hash(call.to_lines().as_bytes())]
                .map(u64::to_le_bytes)
                .concat(),
        };
        let messages = MessageCall {
            words: placed.in_words(),
            number,
            key,
            clock: Clock::start(),
        };
        let (bytes, fds) = self.exchange(&tree, &messages, payload, fd)?;
        let parts = split(&bytes, self.world);
        let parts = parts.ok_or_else(|| self.garbage(0, "a list of messages"))?;
        let payloads = parts.into_iter().map(|part| self.copied(part));
        Ok(Gathered {
            payloads: payloads.collect::<Result<_>>()?,
            fds,
        })
    }

    /// The most bytes that a rank may send in an exchange. All ranks' messages then fit in a frame.
    fn longest(&self) -> usize {
        MAX_FRAME / self.world - OVERHEAD
    }

    /// The most bytes that come from the other end of a connection. Those of all children together fit in a frame.
    fn longest_from(&self, branch: &Branch) -> usize {
        // A length is in front of each part, and a host's parts have a key.
        const ADDED: usize = 2 * size_of::<u64>();
        match branch.rank < self.rank {
            // The parent, which passes on what all ranks have sent.
            true => MAX_FRAME,
            false => branch.ranks.len() * (self.longest() + ADDED) + 2 * ADDED,
        }
    }

    /// Refuses a message of this rank that is too long, before the call gets its number. So the group goes on.
    #[track_caller]
    pub fn admit(&self, call: &MadeCall, bytes: usize) -> Result<()> {
        self.check()?;
        let fits = self.require_length(call, bytes);
        fits.inspect_err(|error| self.refuse(error))
    }

    #[track_caller]
    fn require_length(&self, call: &MadeCall, bytes: usize) -> Result<()> {
        let fits = limit("the number of bytes", bytes, 0, self.longest());
        let fits = fits.map_err(Error::of(self.rank, &call.name));
        fits.map_err(|error| self.named(error))
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

    /// Sends this rank's message on its way, and returns all ranks' messages, joined, with this host's descriptors.
    fn exchange(
        &self,
        tree: &Tree,
        messages: &MessageCall,
        payload: &[u8],
        fd: Option<BorrowedFd>,
    ) -> Result<Frame> {
        let Some(parent) = &tree.parent else {
            let (parts, fds) = self.collect(tree, messages, payload)?;
            let all = self.joined(&parts)?;
            return self.hand_out(tree, messages, all, fd, fds);
        };
        if tree.children.is_empty() && self.hosts.share(self.rank, parent.rank) {
            self.send(tree, messages, parent, payload, fd.as_slice())?;
            return self.receive(tree, messages, parent);
        }
        // The leader of a host that is not rank 0's.
        let (mut parts, fds) = self.collect(tree, messages, payload)?;
        let own = self.ranks_of_host();
        let own = own.map(|rank| std::mem::take(&mut parts[rank]));
        let own: Vec<Vec<u8>> = [messages.key.clone()].into_iter().chain(own).collect();
        self.send(tree, messages, parent, &self.joined(&own)?, &[])?;
        let (all, _) = self.receive(tree, messages, parent)?;
        self.hand_out(tree, messages, all, fd, fds)
    }

    /// Receives what comes from this rank's children. Returns it by rank, with this rank's own message, and the
    /// descriptors of the host's other ranks.
    fn collect(&self, tree: &Tree, messages: &MessageCall, payload: &[u8]) -> Result<Collected> {
        let mut parts = vec![Vec::new(); self.world];
        parts[self.rank] = self.copied(payload)?;
        let mut fds = Ok(Vec::new());
        for child in &tree.children {
            let (part, sent) = self.receive(tree, messages, child)?;
            if self.hosts.share(self.rank, child.rank) {
                parts[child.rank] = part;
                fds = fds.and_then(|mut fds: Vec<OwnedFd>| {
                    fds.extend(sent?);
                    Ok(fds)
                });
                continue;
            }
            let its = split(&part, 1 + child.ranks.len());
            let its = its.ok_or_else(|| self.garbage(child.rank, "its host's messages"))?;
            if its[0] != messages.key {
                return Err(self.await_differing_call(messages, child.rank));
            }
            for (&rank, message) in child.ranks.iter().zip(&its[1..]) {
                parts[rank] = self.copied(message)?;
            }
        }
        Ok((parts, fds))
    }

    /// Sends all ranks' messages to this rank's children, and returns them. Its host's ranks get the host's descriptors,
    /// of which `fds` are those of the other ranks.
    fn hand_out(
        &self,
        tree: &Tree,
        messages: &MessageCall,
        all: Vec<u8>,
        own: Option<BorrowedFd>,
        fds: io::Result<Vec<OwnedFd>>,
    ) -> Result<Frame> {
        // A rank gets all descriptors or none, so that it takes none for a different rank's.
        let others = fds.as_ref().map_or(&[][..], |fds| fds);
        // The leader is its host's first rank.
        let own = own.filter(|_| fds.is_ok());
        let sent: Vec<BorrowedFd> = own
            .into_iter()
            .chain(others.iter().map(AsFd::as_fd))
            .collect();
        for child in &tree.children {
            let is_near = self.hosts.share(self.rank, child.rank);
            let fds = if is_near { &sent[..] } else { &[] };
            self.send(tree, messages, child, &all, fds)?;
        }
        let own = own.map(|fd| fd.try_clone_to_owned()).transpose();
        let fds = fds.and_then(|fds| Ok(own?.into_iter().chain(fds).collect()));
        Ok((all, fds))
    }

    /// Waits until the mirror says which call differs. `rank` leads a host that has made a different one.
    fn await_differing_call(&self, messages: &MessageCall, rank: usize) -> Error {
        let waiting = PeerWait {
            clock: &messages.clock,
            grace: GRACE,
            is_for_a_peer: false,
            rank,
            call: &|| Some(messages.number),
            what: &|| messages.awaited(self.shared.job_rank(rank)),
        };
        loop {
            if let Err(error) = self.pause(&waiting) {
                return error;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn send(
        &self,
        tree: &Tree,
        messages: &MessageCall,
        to: &Branch,
        payload: &[u8],
        fds: &[BorrowedFd],
    ) -> Result<()> {
        let sent = self.channel(tree, to, messages).send(payload, fds);
        sent.map_err(|error| self.wire_failure(to.rank, messages, error))
    }

    fn receive(&self, tree: &Tree, messages: &MessageCall, from: &Branch) -> Result<Frame> {
        let longest = self.longest_from(from);
        let received = self.channel(tree, from, messages).receive(longest);
        received.map_err(|error| self.wire_failure(from.rank, messages, error))
    }

    fn channel<'a>(
        &'a self,
        tree: &'a Tree,
        branch: &'a Branch,
        messages: &'a MessageCall,
    ) -> Channel<'a, impl Fn() -> Result<(), Error>> {
        let rank = branch.rank;
        Channel {
            stream: &branch.connection,
            // The check has the deadlines.
            deadline: Instant::now() + FOREVER,
            check: move || {
                let late = self.shared.first_late(messages.number);
                // A rank that passes messages on may wait for another. Unless it shows that, it is given time to say so.
                let is_silent =
                    || tree.passes_on(rank) && !self.shared.is_waiting(rank, &self.deadlines);
                let grace = if late.is_none() && is_silent() {
                    GRACE
                } else {
                    Duration::ZERO
                };
                let (silent, rank) = self.silent_or_late(late, rank);
                let has_come = self.shared.has_begun(rank, messages.number);
                let what = || match silent.filter(|_| has_come) {
                    Some(leader) => messages.held_back(self.shared.job_rank(leader)),
                    None => messages.awaited(self.shared.job_rank(rank)),
                };
                self.pause(&PeerWait {
                    clock: &messages.clock,
                    grace,
                    is_for_a_peer: true,
                    rank,
                    call: &|| Some(messages.number),
                    what: &what,
                })
            },
        }
    }

    /// The leader that passes nothing on, if there is one, and the rank that is to blame for a wait for `rank`. The news of
    /// a `late` rank may be what is late.
    fn silent_or_late(&self, late: Option<usize>, rank: usize) -> (Option<usize>, usize) {
        let silent = late.and_then(|late| self.shared.silent_leader(late));
        (silent, silent.or(late).unwrap_or(rank))
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
            WireError::Closed if self.is_known_to_have_left(rank) => {
                self.left(rank, Some(messages.number), call.clone())
            }
            WireError::Closed => Kind::RankLost {
                noticed_by: self.rank,
            }
            .on(rank),
            WireError::Garbage(reason) => Kind::Message { reason }.on(rank),
            WireError::Io(error) => {
                let peer = self.shared.job_rank(rank);
                Error::system(self.rank, format!("talk to rank {peer} in {call}"))(error)
            }
        })
    }

    /// True if `rank`, whose connection has ended, has left in order. What is known of a rank of another host comes by a
    /// connection of its own, so it may come a little later.
    fn is_known_to_have_left(&self, rank: usize) -> bool {
        let is_near = self.hosts.share(self.rank, rank);
        let deadline = Instant::now() + if is_near { Duration::ZERO } else { GRACE };
        let is_over = || self.shared.has_left(rank) || self.shared.reporter().is_some();
        while !is_over() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.shared.has_left(rank)
    }

    fn garbage(&self, rank: usize, expected: &str) -> Error {
        self.fail(
            Kind::Message {
                reason: format!("not {expected}"),
            }
            .on(rank),
        )
    }
}

/// A call in which all ranks send something to all.
struct MessageCall {
    /// The call, in words, with its place.
    words: String,
    number: u64,
    /// If there are several hosts, the same for all ranks that make the same call: its number, and the hash of its words.
    key: Vec<u8>,
    clock: Clock,
}

impl MessageCall {
    /// The call, and what `rank`, a rank of the job, has not done in it.
    fn awaited(&self, rank: usize) -> String {
        let what = if self.clock.has_begun() {
            "has not sent its part"
        } else {
            "has not come"
        };
        format!("{}: rank {rank} {what}", self.words)
    }

    /// The call, if `rank` has come but does not pass on which ranks of other hosts have.
    fn held_back(&self, rank: usize) -> String {
        format!(
            "{}: rank {rank} passes on nothing of other hosts",
            self.words
        )
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

/// `count` parts that were joined. None if the bytes are something else.
fn split(mut bytes: &[u8], count: usize) -> Option<Vec<&[u8]>> {
    let mut parts = Vec::with_capacity(count);
    for _ in 0..count {
        let (length, rest) = bytes.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let (part, rest) = rest.split_at_checked(length)?;
        parts.push(part);
        bytes = rest;
    }
    bytes.is_empty().then_some(parts)
}

/// Splits what a rank sends in an exchange into its result and its bytes.
fn outcome(bytes: &[u8]) -> Option<(Result<()>, &[u8])> {
    match split(bytes, 2)?[..] {
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
        assert_eq!(split(&join(&parts), 3).unwrap(), parts);
        for (bytes, count) in [
            (join(&parts), 2),
            (join(&parts), 4),
            (vec![1, 2, 3], 1),
            (u64::MAX.to_le_bytes().to_vec(), 1),
        ] {
            assert_eq!(split(&bytes, count), None);
        }
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
    use crate::schedule::layout::MAX_WORLD;

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
            for count in 1..=MAX_WORLD {
                let messages = split(&frame, count).unwrap_or_default();
                let bytes: usize = messages.iter().map(|message| 8 + message.len()).sum();
                assert!(bytes == 0 || bytes == frame.len());
                for message in messages {
                    if let Some((Err(error), _)) = outcome(message) {
                        let _ = (error.to_string(), error.cause());
                    }
                }
            }
        }
    }

    /// Messages of an exchange that all complete, and of one that a rank can't complete.
    pub fn seeds() -> Vec<Vec<u8>> {
        let died = Kind::RankLost { noticed_by: 1 }.on(2);
        let cause = Box::new(died.clone());
        let outcomes = [Ok(()), Err(died), Err(cause.again())];
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
