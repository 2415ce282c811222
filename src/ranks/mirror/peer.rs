//! The connection to another leader, and what is kept of it.
//!
//! Whoever has the key may send whatever it likes. So a look reads a limited number of bytes, and the rest waits in the
//! system, which lets the other end send no more. What is kept to be sent has a bound too: the calls that ranks may be
//! ahead of others, a refusal a rank, and what a rank says when it leaves.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{self, SendFlags};

use super::record::Record;
use super::{BEAT, HostLink};
use crate::ranks::acknowledged::Acknowledged;
use crate::ranks::wire::Connection;

/// So many bytes that have not been sent are many.
pub const CROWDED: usize = 64 << 10;
/// The most bytes that a look reads.
pub const READ: usize = 64 << 10;

/// The connection to another leader.
pub struct PeerLeader {
    pub rank: usize,
    pub stream: Connection,
    /// What has not been sent.
    pub out: Vec<u8>,
    /// By rank: its latest refusal, if it has to wait because too much has not been sent.
    held: BTreeMap<usize, Record>,
    /// What has come. The first `taken` bytes are records that were taken.
    input: Vec<u8>,
    taken: usize,
    /// True if the last look has not read all that has come.
    has_more: bool,
    /// The latest calls that were sent and received.
    last_sent: Option<Record>,
    last_received: Option<Record>,
    /// When the peer was last told that this leader runs.
    beat: Option<Instant>,
    pub acknowledged: Acknowledged,
    /// Why it has ended, if it has.
    pub end: Option<End>,
}

/// Why a peer has ended.
#[derive(Debug, PartialEq)]
pub enum End {
    Closed,
    CutOff,
    Garbage(String),
}

impl PeerLeader {
    pub fn new(link: HostLink) -> PeerLeader {
        PeerLeader {
            rank: link.rank,
            stream: link.mirror,
            out: Vec::new(),
            held: BTreeMap::new(),
            input: Vec::new(),
            taken: 0,
            has_more: false,
            last_sent: None,
            last_received: None,
            beat: None,
            acknowledged: Acknowledged::new(),
            end: None,
        }
    }

    pub fn event(&self) -> PollFd<'_> {
        let out = if self.out.is_empty() {
            PollFlags::empty()
        } else {
            PollFlags::OUT
        };
        PollFd::new(&*self.stream, PollFlags::IN | out)
    }

    /// True if it has ended, and all that has come was taken.
    pub fn is_over(&self) -> bool {
        match self.end {
            None => false,
            Some(End::Garbage(_)) => true,
            Some(End::Closed | End::CutOff) => !self.has_more,
        }
    }

    /// Adds a record to what will be sent. If the other end takes nothing, it gets no waits that go on, and of
    /// each rank's refusals only of the latest.
    pub fn queue(&mut self, record: &Record) {
        let is_crowded = self.out.len() >= CROWDED;
        match record {
            _ if record.is_minor() && is_crowded => {}
            Record::Refusal { rank, .. } if is_crowded => {
                self.held.insert(*rank, record.clone());
            }
            Record::Refusal { rank, .. } => {
                self.held.remove(rank);
                record.encode(&mut self.out);
            }
            // What a rank says when it leaves is the last that it says.
            Record::Left { rank, .. } => {
                let held = self.held.remove(rank);
                held.iter().for_each(|held| held.encode(&mut self.out));
                record.encode(&mut self.out);
            }
            Record::Post { rank, .. } => self.queue_call(*rank, record),
            _ => record.encode(&mut self.out),
        }
    }

    fn queue_call(&mut self, rank: usize, call: &Record) {
        let before = self.last_sent.as_ref();
        if before.is_some_and(|before| call.is_again(before)) {
            return Record::Again { rank }.encode(&mut self.out);
        }
        call.encode(&mut self.out);
        self.last_sent = Some(call.clone());
    }

    /// Sends what can be sent, and now and then that this leader, `own`, runs.
    pub fn flush(&mut self, own: usize) {
        if self.out.len() < CROWDED {
            let held = std::mem::take(&mut self.held);
            held.values().for_each(|held| held.encode(&mut self.out));
        }
        if self.beat.is_none_or(|beat| beat.elapsed() >= BEAT) {
            self.beat = Some(Instant::now());
            self.queue(&Record::Beat { leader: own });
        }
        let mut sent = 0;
        while sent < self.out.len() {
            match net::send(&*self.stream, &self.out[sent..], SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // What has come is still to be taken.
                Err(_) => {
                    self.end.get_or_insert(End::Closed);
                    break;
                }
            }
        }
        self.out.drain(..sent);
    }

    /// Reads what has come, at most [`READ`] bytes.
    pub fn receive(&mut self) {
        let mut piece = [0; 4096];
        let most = self.input.len() + READ;
        self.has_more = false;
        loop {
            if self.input.len() >= most {
                self.has_more = true;
                break;
            }
            match (&*self.stream).read(&mut piece) {
                Ok(0) => {
                    self.end.get_or_insert(End::Closed);
                    break;
                }
                Ok(count) => self.input.extend(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.end.get_or_insert(End::Closed);
                    break;
                }
            }
        }
    }

    /// Takes the next record off what has come, if one has come whole.
    pub fn next_record(&mut self) -> Option<Record> {
        let mut rest = &self.input[self.taken..];
        match Record::take(&mut rest) {
            Ok(Some(record)) => {
                self.taken = self.input.len() - rest.len();
                self.whole(record)
            }
            Ok(None) => {
                self.input.drain(..self.taken);
                self.taken = 0;
                None
            }
            Err(reason) => {
                self.end = Some(End::Garbage(reason));
                None
            }
        }
    }

    /// The record, as a call if it says that a call was made again.
    fn whole(&mut self, record: Record) -> Option<Record> {
        match record {
            Record::Post { .. } => self.last_received = Some(record.clone()),
            Record::Again { rank } => {
                let again = self
                    .last_received
                    .as_ref()
                    .and_then(|call| call.again_by(rank));
                if again.is_none() {
                    self.end = Some(End::Garbage("no call before this one".into()));
                }
                return again;
            }
            _ => {}
        }
        Some(record)
    }

    /// The bytes of what is kept, in both directions.
    #[cfg(any(test, fuzzing))]
    pub fn kept(&self) -> usize {
        let mut held = Vec::new();
        self.held
            .values()
            .for_each(|record| record.encode(&mut held));
        self.input.capacity() + self.out.capacity() + held.len()
    }

    /// Ends if the other system has acknowledged nothing for `longest`.
    pub fn listen_for_silence(&mut self, longest: Duration) {
        self.acknowledged.look(&self.stream);
        if self.acknowledged.silence() > longest {
            self.end = Some(End::CutOff);
        }
    }

    /// True if the other system did not acknowledge this one's beats any more, before the connection ended. If frames are
    /// lost in one direction, the first of both ends that sees it closes the connection.
    ///
    /// Time in which this thread did not run says nothing: what was acknowledged then was not seen.
    pub fn was_silent(&self) -> bool {
        self.acknowledged.silence() >= 2 * BEAT
    }
}
