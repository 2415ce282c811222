//! Messages between hosts: the threads of a rank that send rows to other hosts and receive rows from them.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::copies::{copy_part, delay};
use super::matrices::BoundMatrices;
use super::recorder::Recorder;
use super::scratch::WorkerScratch;
use super::tile::add_rows;
use crate::backend::transport::{HostTransport, MAX_MESSAGE, Message};
use crate::backend::work::work_of;
use crate::error::{Error, Kind, Result};
use crate::profile::nvtx::range;
use crate::profile::span::{Lane, Work};
use crate::protocol::epoch::Epoch;
use crate::protocol::flag::{Awaited, Flag};
use crate::ranks::members::Members;
use crate::schedule::drive::{self, Produced};
use crate::schedule::{Extent, Move, Reduction, Schedule, Transfer};

/// The most bytes of a message's rows.
pub const MAX_ROWS: usize = MAX_MESSAGE - KEY;

/// What follows the rows of a message: the key of the sender's call.
const KEY: usize = size_of::<u64>();

/// How many messages a rank has under way at once, each way. While one is copied, the transport moves the next ones.
const UNDER_WAY: usize = 4;

/// Messages' memory that is not in use.
#[derive(Debug, Default)]
pub struct Spares(Mutex<Vec<Vec<u8>>>);

impl Spares {
    /// Memory for a message of `bytes` bytes of `rank`.
    fn take(&self, rank: usize, bytes: usize) -> Result<Vec<u8>> {
        let mut memory = self.lock().pop().unwrap_or_default();
        let refused = Error::out_of_memory(rank, bytes);
        let missing = bytes.saturating_sub(memory.len());
        if memory.try_reserve_exact(missing).is_err() {
            return Err(refused(rustix::io::Errno::NOMEM.into()));
        }
        memory.resize(bytes, 0);
        Ok(memory)
    }

    /// Keeps the memory of a message, unless it was a long one.
    fn put(&self, memory: Vec<u8>) {
        const MOST: usize = 8 << 20;
        if memory.len() <= MOST {
            self.lock().push(memory);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The transfers of a call between this host and others: a message each.
pub struct CallMessages<'a, 's> {
    pub members: &'a Members,
    pub transport: &'a HostTransport,
    pub spares: &'a Spares,
    pub schedule: &'a Schedule,
    pub matrices: &'a BoundMatrices<'a>,
    pub epoch: Epoch,
    /// The chunk flags of this rank's arrivals.
    pub chunk: &'a [Flag],
    pub produced: &'a [Produced],
    /// The memory of a worker. Where this thread adds, there is no product, and workers take their memory when all addends
    /// have come.
    pub scratch: &'a Mutex<WorkerScratch>,
    pub recorder: &'a Recorder<'s>,
}

/// A transfer whose message is under way, and when that was begun.
struct Sending<'a> {
    transfer: &'a Transfer,
    message: Box<dyn Message>,
    begin: u64,
}

impl<'a> CallMessages<'a, '_> {
    /// Sends all messages. Returns when the transport has taken them.
    pub fn send(&self) -> Result<()> {
        let mut sending = VecDeque::<Sending>::new();
        let mut free = self.recorder.begin();
        let send = |transfer: &'a Transfer| {
            if sending.len() == UNDER_WAY
                && let Some(oldest) = sending.pop_front()
            {
                free = self.finish_sending(oldest, free)?;
            }
            sending.push_back(self.begin_to_send(transfer)?);
            Ok(())
        };
        let (schedule, epoch, members) = (self.schedule, self.epoch, self.members);
        let (chunk, produced) = (self.chunk, self.produced);
        let add = |sum: &Reduction| self.add(sum);
        drive::send(schedule, epoch, chunk, produced, members, add, send)?;
        for one in sending {
            free = self.finish_sending(one, free)?;
        }
        Ok(())
    }

    /// Adds up addends of this host, which have all come.
    fn add(&self, sum: &Reduction) {
        let begin = self.recorder.begin();
        let scratch = self.scratch.lock();
        let mut scratch = scratch.unwrap_or_else(PoisonError::into_inner);
        // SAFETY: `drive::send` has acquired the flags of the addends, and the count of this rank's own if its caller
        // makes it. This thread alone touches the rows of the sum.
        unsafe { add_rows(&mut scratch, sum, 0..sum.rows, self.matrices) };
        let work = || Work::Add { rows: 0..sum.rows };
        self.recorder.end(begin, Lane::Network, work);
    }

    fn begin_to_send(&self, transfer: &'a Transfer) -> Result<Sending<'a>> {
        let _range = range(|| format!("gemmesh {}", transfer.name()));
        let begin = self.recorder.begin();
        delay(transfer.to, transfer.flag, self.epoch);
        let mut bytes = self.memory_for(transfer)?;
        for (place, region, packed) in self.regions(transfer) {
            // SAFETY: the matrix holds the region, and `bytes` what it is packed to. The rows were final when the operation
            // began, or `drive::send` has acquired the count of their block, or this thread has added them up.
            unsafe { copy_part(place, &region, bytes.as_mut_ptr(), &packed) };
        }
        let key = self.members.key_of_operation().to_le_bytes();
        if let Some(end) = bytes.last_chunk_mut() {
            *end = key;
        }
        let message = self.transport.send([transfer.from, transfer.to], bytes);
        Ok(Sending {
            transfer,
            message: message.map_err(|error| self.members.fail(error))?,
            begin,
        })
    }

    /// `free`: since when the transport has had no earlier message of this rank. Returns from when on it has none.
    fn finish_sending(&self, sending: Sending, free: u64) -> Result<u64> {
        let Sending {
            transfer,
            message,
            begin,
        } = sending;
        let bytes = self.finish(message, Awaited::Taken { peer: transfer.to })?;
        self.spares.put(bytes);
        let work = || work_of(transfer, self.members.rank);
        self.recorder.end(begin.max(free), Lane::Network, work);
        Ok(self.recorder.begin())
    }

    /// Receives all messages.
    pub fn receive(&self) -> Result<()> {
        let mut ahead = self.schedule.received();
        let mut begun = VecDeque::new();
        let receive = |transfer: &'a Transfer| {
            while begun.len() < UNDER_WAY
                && let Some(next) = ahead.next()
            {
                begun.push_back(self.begin_to_receive(next)?);
            }
            let next = begun.pop_front().ok_or_else(|| {
                self.members.fail(
                    Kind::Internal {
                        what: "a message was not begun".into(),
                    }
                    .on(self.members.rank),
                )
            });
            self.finish_receiving(transfer, next?)
        };
        drive::receive(self.schedule, self.epoch, self.chunk, receive)
    }

    fn begin_to_receive(&self, transfer: &Transfer) -> Result<Box<dyn Message>> {
        let bytes = self.memory_for(transfer)?;
        let message = self.transport.receive([transfer.from, transfer.to], bytes);
        message.map_err(|error| self.members.fail(error))
    }

    fn finish_receiving(&self, transfer: &Transfer, message: Box<dyn Message>) -> Result<()> {
        let awaited = Awaited::Chunk {
            source: transfer.from,
            flag: transfer.flag,
            pulled: false,
        };
        let bytes = self.finish(message, awaited)?;
        if !self.is_of_this_call(transfer, &bytes) {
            return Err(self.members.await_mismatch(transfer.from, self.epoch));
        }
        for (place, region, packed) in self.regions(transfer) {
            // SAFETY: the matrix holds the region, and `bytes` what it was packed to. No one reads the rows before their
            // flag, which `drive::receive` writes afterwards. Those who read them in the operation before have ended
            // it: this rank's threads.
            unsafe { copy_part(bytes.as_ptr(), &packed, place, &region) };
        }
        self.spares.put(bytes);
        Ok(())
    }

    /// True if the rank that has sent these bytes makes this rank's call.
    fn is_of_this_call(&self, transfer: &Transfer, bytes: &[u8]) -> bool {
        bytes.len() == self.length_of(transfer)
            && bytes.last_chunk() == Some(&self.members.key_of_operation().to_le_bytes())
    }

    /// Waits for a message, and returns its bytes.
    fn finish(&self, mut message: Box<dyn Message>, awaited: Awaited) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let has_ended = || {
            // The library refuses a message of a different call that is longer.
            let taken = message.take_if_ended();
            let taken = taken.map_err(|error| self.members.fail_if_unexplained(error))?;
            let has_ended = taken.is_some();
            if let Some(taken) = taken {
                bytes = taken;
            }
            Ok(has_ended)
        };
        self.members.wait_until(has_ended, self.epoch, awaited)?;
        Ok(bytes)
    }

    fn memory_for(&self, transfer: &Transfer) -> Result<Vec<u8>> {
        let bytes = self.length_of(transfer);
        let memory = self.spares.take(self.members.rank, bytes);
        memory.map_err(|error| self.members.fail(error))
    }

    /// How many bytes a transfer's message has.
    fn length_of(&self, transfer: &Transfer) -> usize {
        let last = self.regions(transfer).last();
        let rows = last.map_or(0, |(.., packed)| packed.offset + packed.rows * packed.width);
        rows + KEY
    }

    /// The regions of a transfer in this rank's memory, and where its message has them, one after the other.
    fn regions(&self, transfer: &Transfer) -> impl Iterator<Item = (*mut u8, Extent, Extent)> {
        let rank = self.members.rank;
        let own = transfer
            .regions
            .iter()
            .filter_map(move |Move { from, to }| {
                let region = if transfer.from == rank { from } else { to };
                self.matrices.region(region, rank)
            });
        own.scan(0, |offset, (place, region)| {
            let packed = Extent {
                offset: *offset,
                pitch: region.width,
                ..region
            };
            *offset += region.rows * region.width;
            Some((place, region, packed))
        })
    }
}
