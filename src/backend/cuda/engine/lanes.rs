//! Transfers between hosts: each lane's stream sends and receives, turn by turn.

use std::mem::offset_of;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::announce::delay;
use super::collective;
use super::context::{EnqueueContext, ProgramCall};
use super::copies::Make;
use super::push;
use super::stamps::Stamps;
use crate::backend::cuda::abi::GemmeshPushEpoch;
use crate::backend::cuda::driver::{DevicePtr, Stream, StreamMemOp};
use crate::backend::cuda::gpu::streams::LANES;
use crate::backend::cuda::program::GpuProgram;
use crate::backend::cuda::program::operands::CallMatrix;
use crate::backend::cuda::shared::lanes::{DeviceMessage, EXPLAINED, Lanes};
use crate::backend::cuda::shared::words::Signals;
use crate::backend::work::work_of;
use crate::error::{Error, Kind, Result};
use crate::profile::span::{Lane, Work};
use crate::protocol::flag::Awaited;
use crate::schedule::{Extent, HostSum, Move, Schedule, Transfer, Turn};

/// Whose flags say that chunks have come.
#[derive(Clone, Copy)]
pub enum ChunkFlags<'a> {
    /// Those of streams.
    Streams(Signals<'a>),
    /// Those in the mailbox, for which a kernel waits. The kernel counts the epochs itself.
    Mailbox,
}

/// Makes the lanes wait for what is on the main stream now.
pub fn fork(at: &EnqueueContext, schedule: &Schedule) -> Result<()> {
    if schedule.turns().next().is_none() {
        return Ok(());
    }
    let streams = at.gpu.streams();
    streams.begun.record(at.main)?;
    let mut lanes = streams.lanes.iter();
    lanes.try_for_each(|lane| lane.wait_until(&streams.begun))
}

/// Makes the main stream wait for the lanes.
pub fn join(at: &EnqueueContext, schedule: &Schedule) -> Result<()> {
    if schedule.turns().next().is_none() {
        return Ok(());
    }
    let streams = at.gpu.streams();
    let mut lanes = streams.lanes.iter();
    lanes.try_for_each(|lane| at.main.wait_for(lane, &streams.carried))
}

/// Puts all of this rank's transfers between hosts on the lanes, and after a chunk's arrival its flag. If a kernel
/// waits for the flags, chunks are passed on from here, by the copy stream.
///
/// The kernel may run already. It leaves the transports' kernels multiprocessors.
pub fn enqueue<'a, 'm>(
    at: &'a EnqueueContext<'a>,
    program: &'a GpuProgram,
    call: &'a ProgramCall<'_>,
    flags: ChunkFlags<'a>,
    make: Option<&'a mut Make<'m>>,
) -> Result<Stamps> {
    let schedule = &program.schedule;
    let mut turns = CallTurns {
        at,
        program,
        schedule,
        call,
        flags,
        make,
        stamps: Stamps::new(&at.gpu.device, call.trace.is_some()),
        stored: Default::default(),
        is_permitted: [false; LANES],
    };
    if let Some(lanes) = &at.shared.lanes {
        for turn in schedule.turns() {
            turns.enqueue(lanes, &turn)?;
        }
        turns.reset_blocks()?;
    }
    Ok(turns.stamps)
}

/// Addresses at whose multiples a transport moves bytes fast.
const ALIGNMENT: usize = 256;

type DeviceMessages = SmallVec<[DeviceMessage; 2]>;
type Gaps = SmallVec<[RowsWithGaps; 2]>;

/// Rows with gaps between them, which a transport moves without the gaps.
struct RowsWithGaps {
    /// Where they stand without gaps.
    packed: DevicePtr,
    /// Their first byte.
    place: DevicePtr,
    extent: Extent,
}

impl RowsWithGaps {
    fn pack(&self, stream: &Stream) -> Result<()> {
        let Extent {
            width, pitch, rows, ..
        } = self.extent;
        // SAFETY: the staging memory has room for them, and lives until the stream has passed. All messages that use it
        // are on this stream, or this stream waits for them.
        unsafe { stream.copy_rows((self.packed, width), (self.place, pitch), width, rows) }
    }

    fn unpack(&self, stream: &Stream) -> Result<()> {
        let Extent {
            width, pitch, rows, ..
        } = self.extent;
        // SAFETY: as in `pack`.
        unsafe { stream.copy_rows((self.place, pitch), (self.packed, width), width, rows) }
    }
}

/// The bytes of the shortest half that goes by a lane of its own. A shorter one takes little longer with the other.
const HALF: usize = 64 << 10;

/// The two halves of messages, if `are_alone` and they are long. Otherwise the second half is empty. Both ranks of the
/// messages cut them alike.
fn halves(messages: &[DeviceMessage], are_alone: bool) -> [DeviceMessages; 2] {
    let bytes: usize = messages.iter().map(|message| message.bytes).sum();
    let mut halves = [DeviceMessages::new(), DeviceMessages::new()];
    let mut left = if are_alone && bytes >= 2 * HALF {
        (bytes / 2).next_multiple_of(ALIGNMENT)
    } else {
        bytes
    };
    for &DeviceMessage { peer, place, bytes } in messages {
        let first = bytes.min(left);
        left -= first;
        let parts = [(place, first), (place + first as u64, bytes - first)];
        for (half, (place, bytes)) in halves.iter_mut().zip(parts) {
            if bytes > 0 {
                half.push(DeviceMessage { peer, place, bytes });
            }
        }
    }
    halves
}

/// The transfers of a call between this host and others, turn by turn.
struct CallTurns<'a, 'm, 'c> {
    at: &'a EnqueueContext<'a>,
    program: &'a GpuProgram,
    schedule: &'a Schedule,
    call: &'a ProgramCall<'c>,
    flags: ChunkFlags<'a>,
    /// Makes the rows, if a producer does.
    make: Option<&'a mut Make<'m>>,
    stamps: Stamps,
    /// By lane: the words of the kernel's blocks that it has waited for. Each must be reset.
    stored: [Vec<DevicePtr>; LANES],
    /// By lane: whether it waits for the kernel's permit.
    is_permitted: [bool; LANES],
}

impl CallTurns<'_, '_, '_> {
    fn lane(&self, lane: usize) -> &Stream {
        &self.at.gpu.streams().lanes[lane]
    }

    fn enqueue(&mut self, lanes: &Lanes, turn: &Turn) -> Result<()> {
        let (at, lane) = (self.at, turn.number % LANES);
        let stream = &at.gpu.streams().lanes[lane];
        if let Some(sent) = turn.sent {
            self.await_block(lane, sent)?;
            self.add(lane, sent)?;
            delay(stream, sent.to, sent.flag, self.call.epoch)?;
        }
        let (sent, packed) = self.messages(lane, turn.sent)?;
        let (received, come) = self.messages(lane, turn.received)?;
        let before = self.stamps.now(stream)?;
        packed.iter().try_for_each(|gaps| gaps.pack(stream))?;
        self.exchange(lanes, lane, turn, [&sent, &received])?;
        come.iter().try_for_each(|gaps| gaps.unpack(stream))?;
        if let Some(moved) = turn.received.or(turn.sent) {
            let work = || work_of(moved, at.members.rank);
            self.stamps.add(Lane::Network, before, stream, work)?;
        }
        self.count(lanes, lane, turn.received)?;
        match (turn.received, self.flags) {
            (Some(received), ChunkFlags::Mailbox) => self.signal_kernel(lane, received),
            _ => Ok(()),
        }
    }

    /// Sends and receives the messages of a turn. If the other lane would have none at the same time, it has a half of a long
    /// one. The turn has ended on its own lane when both halves have.
    fn exchange(
        &self,
        lanes: &Lanes,
        lane: usize,
        turn: &Turn,
        [sent, received]: [&[DeviceMessage]; 2],
    ) -> Result<()> {
        let sent = halves(sent, turn.sends_alone);
        let received = halves(received, turn.receives_alone);
        let streams = self.at.gpu.streams();
        let own = &streams.lanes[lane];
        let exchange = |number: usize, half: usize| {
            let (to, from) = (&sent[half], &received[half]);
            // SAFETY: this rank's memory holds the regions. What is sent is final: the turn's lane has waited for the
            // main stream, and for its block if that is made during the operation, or has added it up itself, and the
            // other lane has waited for this lane. What is received is read after its flag alone, and the kernels of
            // earlier operations are in front of the lanes. The memory lives until the streams have passed.
            let exchanged = unsafe {
                lanes.exchange(self.at.members, number, &streams.lanes[number], to, from)
            };
            exchanged.map_err(|error| self.blame(error, turn))
        };
        if sent[1].is_empty() && received[1].is_empty() {
            return exchange(lane, 0);
        }
        const { assert!(LANES == 2) };
        let other = 1 - lane;
        streams.lanes[other].wait_for(own, &streams.halved)?;
        exchange(lane, 0)?;
        exchange(other, 1)?;
        own.wait_for(&streams.lanes[other], &streams.halved)
    }

    /// The error of a turn that a transport refuses with `error`. A rank that has died is named by whoever sees that, and a
    /// rank that has left by this rank.
    fn blame(&self, error: Error, turn: &Turn) -> Error {
        let members = self.at.members;
        let received = turn.received.map(|moved| {
            let awaited = self.schedule.awaited(moved.flag);
            (moved.from, awaited)
        });
        let sent = turn.sent.map(|moved| {
            let awaited = Awaited::Taken { peer: moved.to };
            (moved.to, awaited)
        });
        let has_left = || {
            let mut peers = [received, sent].into_iter().flatten();
            peers.find_map(|(peer, awaited)| members.has_left(peer, self.call.epoch, awaited))
        };
        let begin = Instant::now();
        while begin.elapsed() < EXPLAINED {
            if let Some(cause) = members.fault().or_else(has_left) {
                return cause;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        error
    }

    /// Makes a lane wait until the block of a transfer is made, if it has one.
    fn await_block(&mut self, lane: usize, sent: &Transfer) -> Result<()> {
        let Some(block) = sent.produced else {
            return Ok(());
        };
        if let Some(make) = &mut self.make {
            return make(block, &self.at.gpu.streams().lanes[lane]);
        }
        let word = self.at.shared.control.stored(block);
        self.stored[lane].push(word);
        // SAFETY: control blocks are unmapped when the streams have passed.
        unsafe { self.lane(lane).words(&[StreamMemOp::Wait(word, 1)]) }
    }

    /// Adds up what a transfer sends, if it is a sum of this host's addends, when they have come.
    fn add(&mut self, lane: usize, sent: &Transfer) -> Result<()> {
        let Some(number) = sent.added else {
            return Ok(());
        };
        let rank = self.at.members.rank;
        let stream = &self.at.gpu.streams().lanes[lane];
        let sum = self.schedule.host_sums().get(number);
        let (Some(HostSum { sum, flags }), Some(kernel), ChunkFlags::Streams(signals)) =
            (sum, self.program.host_sums(), self.flags)
        else {
            let what = format!("a program cannot add up sum {number} for another host");
            return Err(Kind::Internal { what }.on(rank));
        };
        let waits = flags.clone();
        let waits = waits.map(|flag| signals.wait(signals.chunk(rank, flag)));
        let words: SmallVec<[StreamMemOp; 8]> = waits.collect();
        // SAFETY: control blocks are unmapped when the streams have passed.
        unsafe { stream.words(&words)? };
        let before = self.stamps.now(stream)?;
        let rows = 0..sum.rows;
        let operands = &self.call.operands;
        collective::add(stream, self.schedule, (sum, kernel), rows.clone(), operands)?;
        let work = || Work::Add { rows };
        self.stamps.add(Lane::Network, before, stream, work)
    }

    /// This rank's side of a transfer: its messages, and the rows with gaps that they stand for.
    fn messages(&self, lane: usize, moved: Option<&Transfer>) -> Result<(DeviceMessages, Gaps)> {
        let (mut messages, mut gaps) = (DeviceMessages::new(), Gaps::new());
        let Some(moved) = moved else {
            return Ok((messages, gaps));
        };
        let is_sent = moved.from == self.at.members.rank;
        let peer = if is_sent { moved.to } else { moved.from };
        let mut room = self.program.staging.room(lane, is_sent);
        for Move { from, to } in &moved.regions {
            let region = if is_sent { from } else { to };
            let CallMatrix { ptr, pitch, .. } = self.call.operands.require(region.matrix)?;
            let extent = self.schedule.matrices()[region.matrix].extent_of(region, pitch);
            let mut place = ptr + extent.offset as u64;
            let bytes = extent.width * extent.rows;
            if extent.contiguous().is_none() {
                gaps.push(RowsWithGaps {
                    packed: room,
                    place,
                    extent,
                });
                place = room;
                room += bytes as u64;
            }
            messages.push(DeviceMessage { peer, place, bytes });
        }
        Ok((messages, gaps))
    }

    /// Counts a turn that has ended. Writes the flag of what has come, if streams wait for it.
    fn count(&self, lanes: &Lanes, lane: usize, received: Option<&Transfer>) -> Result<()> {
        let control = &self.at.shared.control;
        let count = StreamMemOp::Write(control.turns(lane), lanes.count_turn(lane));
        let mut words: SmallVec<[StreamMemOp; 2]> = SmallVec::from_slice(&[count]);
        if let (Some(received), ChunkFlags::Streams(signals)) = (received, self.flags) {
            let flag = signals.chunk(self.at.members.rank, received.flag);
            words.push(signals.signal(flag));
        }
        // SAFETY: control blocks are unmapped when the streams have passed.
        unsafe { self.lane(lane).words(&words) }
    }

    /// Tells the kernel that a chunk has come, and passes the chunk on to this rank's neighbours.
    fn signal_kernel(&mut self, lane: usize, received: &Transfer) -> Result<()> {
        let EnqueueContext {
            gpu,
            shared,
            members,
            ..
        } = *self.at;
        let streams = gpu.streams();
        let stream = &streams.lanes[lane];
        // The kernel has written its epoch when it gives the permit.
        if !std::mem::replace(&mut self.is_permitted[lane], true) {
            stream.wait_until(&streams.permitted)?;
        }
        let control = &shared.control;
        let epoch = control.push_epoch() + offset_of!(GemmeshPushEpoch, current) as u64;
        let flag = control.pushed(members.rank, received.flag);
        // SAFETY: both words are in this rank's control block, which is unmapped when the streams have passed. The flag
        // is written after the rows, because the transport's kernel stands in front of this copy.
        unsafe { stream.copy(flag, epoch, size_of::<u32>())? };
        let is_next = |moved: &&Transfer| moved.after.contains(&received.flag);
        let mut onward = self.schedule.moves().filter(is_next).peekable();
        if onward.peek().is_some() {
            streams.copies.wait_for(stream, &streams.received)?;
        }
        onward.try_for_each(|moved| {
            push::copy(self.at, &streams.copies, self.schedule, self.call, moved)
        })
    }

    /// Resets the words of blocks, because their values are the same in each operation. No one waits for this, and the
    /// next kernel that sets the words waits for the lanes.
    fn reset_blocks(&self) -> Result<()> {
        for (lane, words) in self.stored.iter().enumerate() {
            let resets: Vec<_> = words
                .iter()
                .map(|&word| StreamMemOp::Write(word, 0))
                .collect();
            // SAFETY: control blocks are unmapped when the streams have passed.
            unsafe { self.lane(lane).words(&resets)? };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(lengths: &[usize]) -> DeviceMessages {
        let mut next = 1 << 40;
        let message = |&bytes: &usize| {
            let place = next;
            next += bytes as u64;
            DeviceMessage {
                peer: 3,
                place,
                bytes,
            }
        };
        lengths.iter().map(message).collect()
    }

    fn places(messages: &[DeviceMessage]) -> Vec<(DevicePtr, usize)> {
        messages.iter().map(|m| (m.place, m.bytes)).collect()
    }

    #[test]
    fn the_halves_of_long_messages_are_all_of_them() {
        for lengths in [
            &[2 * HALF][..],
            &[2 * HALF + 2],
            &[3 * HALF, 2, 5 * HALF + 6],
            &[2, 2 * HALF - 2],
        ] {
            let all = messages(lengths);
            let halves = halves(&all, true);
            let [one, other] = halves
                .each_ref()
                .map(|half| half.iter().map(|m| m.bytes).sum::<usize>());
            assert_eq!(one + other, lengths.iter().sum::<usize>());
            assert!(
                one.abs_diff(other) <= 2 * ALIGNMENT && one.is_multiple_of(ALIGNMENT),
                "{lengths:?}"
            );
            // Those that follow one another in memory do so in the halves, too.
            let places = halves.concat();
            assert!(
                places
                    .windows(2)
                    .all(|pair| pair[0].place + pair[0].bytes as u64 == pair[1].place)
            );
            assert!(
                places
                    .iter()
                    .all(|message| message.bytes > 0 && message.peer == 3)
            );
        }
    }

    #[test]
    fn short_messages_and_those_beside_others_stay_whole() {
        for (lengths, are_alone) in [
            (&[2 * HALF - 1][..], true),
            (&[8 * HALF, 4], false),
            (&[], true),
        ] {
            let all = messages(lengths);
            let [one, other] = halves(&all, are_alone);
            assert_eq!(places(&one), places(&all));
            assert!(other.is_empty());
        }
    }
}
