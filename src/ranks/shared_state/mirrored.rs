//! What one host's block tells the other hosts, and what it takes from them.
//!
//! Each word has one writer: its rank, or on other hosts the mirror. So a mirror needs no lock.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::refusals::WITHDRAWN;
use super::{GIVEN, GONE, LEFT, POSTS, SharedState, now_ms};
use crate::error::Error;
use crate::json;
use crate::ranks::call::MESSAGES;
use crate::ranks::mirror::record::Record;

/// A wait is told again this often while it goes on.
const WAITS: Duration = Duration::from_millis(50);

/// What the other hosts know of this one.
#[derive(Debug)]
pub struct Known {
    ranks: Vec<KnownRank>,
    /// True if they know this host's first failure or, if this is rank 0's host, the group's.
    failure: bool,
}

#[derive(Debug)]
struct KnownRank {
    rank: usize,
    /// The number of its latest call.
    call: u64,
    /// The version of its latest refusal.
    refusal: u64,
    /// Its latest waits in the group and in parts of it, and when they were told.
    waits: [u64; 2],
    told: Option<Instant>,
    left: bool,
    gone: bool,
}

impl Known {
    /// Nothing of the host of `state`.
    pub fn new(state: &SharedState) -> Known {
        let own = state.hosts.host_of(state.rank);
        let ranks = state.hosts.ranks_of(own, state.world);
        let ranks = ranks.map(|rank| KnownRank {
            rank,
            call: 0,
            refusal: 0,
            waits: [0; 2],
            told: None,
            left: false,
            gone: false,
        });
        Known {
            ranks: ranks.collect(),
            failure: false,
        }
    }
}

impl SharedState {
    /// Tells what has happened on this host since the last time.
    ///
    /// A rank that has left did all else before. So whether it has is read first and told last.
    pub fn tell_news(&self, known: &mut Known, mut tell: impl FnMut(Record)) {
        let levels = known.ranks.iter().map(|known| self.level(known.rank));
        let levels: Vec<[bool; 2]> = levels.collect();
        for known in &mut known.ranks {
            self.tell_refusal(known, &mut tell);
            self.tell_calls(known, &mut tell);
            self.tell_wait(known, &mut tell);
        }
        if !known.failure {
            known.failure = self.tell_failure(&mut tell);
        }
        for (known, level) in known.ranks.iter_mut().zip(levels) {
            self.tell_left(known, level, &mut tell);
        }
    }

    /// Whether a rank has left, and whether it has nothing more to say.
    fn level(&self, rank: usize) -> [bool; 2] {
        let left = &self.block().left[rank];
        let is_gone = left.reached(GONE);
        [is_gone || left.reached(LEFT), is_gone]
    }

    fn tell_refusal(&self, known: &mut KnownRank, tell: &mut impl FnMut(Record)) {
        let rank = known.rank;
        let refusal = self.block().refusals[rank].read_unless(known.refusal);
        let Some((version, number, bytes)) = refusal else {
            return;
        };
        known.refusal = version;
        if let Some((noted, note)) = bytes.split_first_chunk::<8>() {
            let noted = Some(u64::from_le_bytes(*noted)).filter(|&noted| noted != WITHDRAWN);
            tell(Record::Refusal {
                rank,
                number,
                age: noted.map(|noted| now_ms().saturating_sub(noted)),
                note: note.to_vec(),
            });
        }
    }

    fn tell_calls(&self, known: &mut KnownRank, tell: &mut impl FnMut(Record)) {
        let rank = known.rank;
        // The rank does not post into this slot again before it sees that the call was told.
        while let Some(words) = self.slot(rank, known.call + 1).read(known.call + 1) {
            known.call += 1;
            let number = known.call;
            let lines = (words[0] == MESSAGES)
                .then(|| self.block().message_calls[rank].read(number))
                .flatten();
            tell(Record::Post {
                rank,
                number,
                words: Box::new(words),
                lines,
            });
            // Release: the words were read before.
            self.block().mirrored[rank].store(number, Ordering::Release);
        }
    }

    fn tell_wait(&self, known: &mut KnownRank, tell: &mut impl FnMut(Record)) {
        let rank = known.rank;
        let (wait, part) = (&self.block().waits[rank], &self.block().part_waits[rank]);
        let words = [wait.word(), part.wait().word()];
        let is_recent = known.told.is_some_and(|told| told.elapsed() < WAITS);
        if words == known.waits || is_recent {
            return;
        }
        known.told = Some(Instant::now());
        let before = std::mem::replace(&mut known.waits, words);
        let age = |word| now_ms().saturating_sub(word >> 8);
        let [wait, in_part] = words;
        if wait != before[0] {
            let (peer, age) = (wait as u8, age(wait));
            tell(Record::Wait { rank, peer, age });
        }
        if let (Some(other), true) = ((in_part as u8).checked_sub(1), in_part != before[1]) {
            tell(Record::PartWait {
                rank,
                peer: other,
                age: age(in_part),
                call: part.call(other.into()).unwrap_or_default(),
            });
        }
    }

    /// Tells the group's first failure, or the one of this host. Returns true if there is one.
    fn tell_failure(&self, tell: &mut impl FnMut(Record)) -> bool {
        let report = if self.is_apart() {
            &self.block().proposal
        } else {
            &self.block().fault
        };
        let Some(rank) = report.reporter() else {
            return false;
        };
        let failure = json::of_error(&self.read_failure(report, rank));
        tell(if self.is_apart() {
            Record::Proposal { rank, failure }
        } else {
            Record::Fault { rank, failure }
        });
        true
    }

    fn tell_left(
        &self,
        known: &mut KnownRank,
        [has_left, is_gone]: [bool; 2],
        tell: &mut impl FnMut(Record),
    ) {
        if has_left == known.left && is_gone == known.gone {
            return;
        }
        (known.left, known.gone) = (has_left, is_gone);
        let rank = known.rank;
        tell(Record::Left {
            rank,
            is_gone,
            reason: self.block().reasons[rank].read(GIVEN),
        });
    }

    /// Writes what a rank of another host has written there. Returns the number of the call, if it is one that differs
    /// from a rank's call of that number.
    ///
    /// The caller has checked that the record's rank is one of another host. None of its words is written by others.
    pub fn take_news(&self, record: &Record) -> Option<u64> {
        let block = self.block();
        match record {
            // Whoever hears a call again makes it whole.
            Record::Again { .. } => {}
            Record::Beat { leader } => self.note_running(*leader),
            Record::Post {
                rank,
                number,
                words,
                lines,
            } => {
                if let Some(lines) = lines {
                    block.message_calls[*rank].write(*number, lines);
                }
                let others = (0..self.world).filter(|other| other != rank);
                let others = others.map(|other| (other, self.slot(other, *number)));
                let differing = self.slot(*rank, *number).post(*number, **words, others);
                return differing.map(|_| *number);
            }
            Record::Refusal {
                rank,
                number,
                age,
                note,
            } => {
                let noted = age.map_or(WITHDRAWN, |age| now_ms().saturating_sub(age));
                let bytes = [&noted.to_le_bytes(), &note[..]].concat();
                block.refusals[*rank].write(*number, &bytes);
            }
            Record::Wait { rank, peer, age } => {
                let word = now_ms().saturating_sub(*age) << 8 | u64::from(*peer);
                block.waits[*rank].note_word(word);
            }
            Record::PartWait {
                rank,
                peer,
                age,
                call,
            } => {
                let looked = now_ms().saturating_sub(*age);
                let call = (!call.is_empty()).then_some(&call[..]);
                block.part_waits[*rank].note((*peer).into(), looked, call);
            }
            Record::Proposal { rank, failure } | Record::Fault { rank, failure } => {
                block.fault.write(*rank, failure);
            }
            Record::Left {
                rank,
                is_gone,
                reason,
            } => {
                if let Some(reason) = reason {
                    block.reasons[*rank].write(GIVEN, reason);
                }
                block.left[*rank].signal(if *is_gone { GONE } else { LEFT });
            }
        }
        None
    }

    /// True if `rank`, of another host, may have made its call `number`: it is its next one, and no rank elsewhere is so
    /// far behind that it still needs the slot ([`SharedState::may_post`]). What this host knows of the other hosts has
    /// come here before the call, because all of it goes through rank 0.
    pub fn may_be_next(&self, rank: usize, number: u64) -> bool {
        let Some(before) = number.checked_sub(1) else {
            return false;
        };
        let is_next = self.has_begun(rank, before) && !self.has_begun(rank, number);
        let needed = SharedState::needed_for(number);
        let mut others = (0..self.world).filter(|&other| !self.hosts.share(rank, other));
        is_next && (number <= POSTS || others.all(|other| self.has_begun(other, needed)))
    }

    /// True if `rank` is known to have left or, if `is_gone`, to have nothing more to say.
    pub fn is_known_to_leave(&self, rank: usize, is_gone: bool) -> bool {
        let [has_left, has_gone] = self.level(rank);
        if is_gone { has_gone } else { has_left }
    }

    /// Notes that a rank of another host has left, because its host's leader has.
    pub fn note_left(&self, rank: usize) {
        if !self.has_left(rank) {
            self.block().left[rank].signal(GONE);
        }
    }

    /// True if `rank` has left, and has nothing more to say.
    pub fn is_gone(&self, rank: usize) -> bool {
        self.block().left[rank].reached(GONE)
    }

    /// Names the rank whose call `number` differs, as a mirror sees it.
    pub fn report_odd_one(&self, number: u64) {
        self.report(self.name_odd_one(number), self.is_apart());
    }

    /// As [`SharedState::fail`], on a thread that must not wait for rank 0's host. If `is_proposal`, rank 0's host says
    /// which failure is the first; a host that has lost it decides alone.
    pub fn report(&self, error: Error, is_proposal: bool) {
        let error = json::fitted(self.named(error), super::FAULT_BYTES);
        let bytes = json::of_error(&error);
        let report = if is_proposal {
            &self.block().proposal
        } else {
            &self.block().fault
        };
        report.write(self.rank, &bytes);
    }
}
