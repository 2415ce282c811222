//! Memory for the tables of programs, there from the beginning: a new shape allocates nothing, unless its tables are
//! large, and these go to the device in their turn, on the stream that needs them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::reclaim::{Deferred, Mark, Reclaimer};
use crate::backend::contract::KEPT_PROGRAMS;
use crate::backend::cuda::driver::{Device, DeviceMemory, DevicePtr, Pinned, is_fork};
use crate::error::Result;

/// Slots of one size.
struct Class {
    /// Bytes of a slot.
    bytes: usize,
    count: usize,
}

/// By size. Tables that are larger, or for which no slot is free, get memory of their own. No slots are added later:
/// page-locked memory can't be had while a kernel waits for another rank.
const CLASSES: [Class; 3] = [
    // The tables of 200 tiles, as of the few rows of a decoding step. A gather that is prepared has three programs, so
    // there is room for some 150 beside those that a group keeps. Where these are taken, those that are larger are.
    Class {
        bytes: 4 << 10,
        count: KEPT_PROGRAMS + 448,
    },
    // Those of 900, as of a prompt: for the programs that a group keeps.
    Class {
        bytes: 16 << 10,
        count: KEPT_PROGRAMS,
    },
    // Those of 1,800. Where more programs than this have so many tiles, each new one allocates: that takes less time
    // than its product.
    Class {
        bytes: 32 << 10,
        count: 96,
    },
];

/// Where the slots of a class begin.
const fn begin(class: usize) -> usize {
    let mut begin = 0;
    let mut before = 0;
    while before < class {
        begin += CLASSES[before].bytes * CLASSES[before].count;
        before += 1;
    }
    begin
}

const BYTES: usize = begin(CLASSES.len());

/// What the host writes and the device copies: as the slots lie.
#[derive(Clone, Copy, Debug)]
struct Staging(#[allow(dead_code)] [u8; BYTES]);

// SAFETY: plain bytes.
unsafe impl bytemuck::Zeroable for Staging {}

/// The slots of one group.
#[derive(Debug)]
pub struct Tables {
    memory: Deferred<(DeviceMemory, Pinned<Staging>)>,
    device: Arc<Device>,
    reclaimer: Arc<Reclaimer>,
    /// By class; longest free first.
    free: [Mutex<VecDeque<Free>>; CLASSES.len()],
}

/// A slot that no program has.
#[derive(Debug)]
struct Free {
    index: usize,
    /// The device may use it until it has passed this.
    after: Option<Arc<Mark>>,
}

/// The tables of one program.
#[derive(Debug)]
pub enum HeldTables {
    Slot(Slot),
    Own(Deferred<DeviceMemory>),
}

/// A slot that a program has.
#[derive(Debug)]
pub struct Slot {
    tables: Arc<Tables>,
    class: usize,
    index: usize,
}

impl Tables {
    pub fn new(device: &Arc<Device>, reclaimer: &Arc<Reclaimer>) -> Result<Arc<Tables>> {
        let memory = DeviceMemory::zeroed(device, BYTES)?;
        let staging = Pinned::zeroed(device)?;
        let free = |index| Free { index, after: None };
        Ok(Arc::new(Tables {
            memory: Deferred::new((memory, staging), reclaimer),
            device: device.clone(),
            reclaimer: reclaimer.clone(),
            free: CLASSES.map(|class| Mutex::new((0..class.count).map(free).collect())),
        }))
    }

    /// Memory with these tables in it, for what is put on the main stream from now on; and where each of them lies.
    pub fn hold<const N: usize>(
        self: &Arc<Tables>,
        tables: [&[u8]; N],
    ) -> Result<(HeldTables, [DevicePtr; N])> {
        let mut length = 0usize;
        let offsets = tables.map(|table| {
            let offset = length.next_multiple_of(16);
            length = offset + table.len();
            offset
        });
        let parts = || offsets.into_iter().zip(tables);
        let fitting = (0..CLASSES.len()).filter(|&class| length <= CLASSES[class].bytes);
        let held = match fitting.filter_map(|class| self.take(class)).next() {
            Some(slot) => self.hold_in(slot, parts(), length)?,
            None => {
                let mut bytes = vec![0; length];
                parts().for_each(|(at, table)| bytes[at..at + table.len()].copy_from_slice(table));
                let memory = DeviceMemory::holding(&self.device, &bytes)?;
                HeldTables::Own(Deferred::new(memory, &self.reclaimer))
            }
        };
        let places = offsets.map(|offset| held.ptr() + offset as u64);
        Ok((held, places))
    }

    /// The slot with these tables, each with its offset, of `length` bytes in all.
    fn hold_in<'a>(
        &self,
        slot: Slot,
        parts: impl Iterator<Item = (usize, &'a [u8])>,
        length: usize,
    ) -> Result<HeldTables> {
        let (_, staging) = &*self.memory;
        let _bound = self.device.bind()?;
        // SAFETY: the slot is this program's, and long enough. What the device did with it has ended; but for the copy
        // of a program that never ran, which may now read the new bytes, in front of the copy that brings them.
        unsafe {
            let from = staging.as_ptr().cast::<u8>().add(slot.offset());
            for (offset, table) in parts {
                from.add(offset)
                    .copy_from_nonoverlapping(table.as_ptr(), table.len());
            }
            self.reclaimer
                .streams
                .main()
                .upload(slot.ptr(), from, length)?;
        }
        Ok(HeldTables::Slot(slot))
    }

    /// A slot that the device does not use any more.
    fn take(self: &Arc<Tables>, class: usize) -> Option<Slot> {
        let mut free = self.lock(class);
        if free.front()?.after.is_some() {
            // The streams pass marks in order: what is asked of one is known of those before it.
            let is_passed = |at: &usize| free[*at].after.as_ref().is_none_or(|m| m.is_passed());
            let passed = [free.len() / 2, 0].into_iter().find(is_passed)?;
            free.range_mut(..=passed).for_each(|free| free.after = None);
        }
        let Free { index, .. } = free.pop_front()?;
        Some(Slot {
            tables: self.clone(),
            class,
            index,
        })
    }

    fn lock(&self, class: usize) -> MutexGuard<'_, VecDeque<Free>> {
        // Each change is one call.
        let free = &self.free[class];
        free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldTables {
    fn ptr(&self) -> DevicePtr {
        match self {
            HeldTables::Slot(slot) => slot.ptr(),
            HeldTables::Own(memory) => memory.ptr(),
        }
    }
}

impl Slot {
    fn offset(&self) -> usize {
        begin(self.class) + self.index * CLASSES[self.class].bytes
    }

    fn ptr(&self) -> DevicePtr {
        let (memory, _) = &*self.tables.memory;
        memory.ptr() + self.offset() as u64
    }
}

impl Drop for Slot {
    /// Every operation is followed by a mark, and what graphs run is kept as long as the group: behind the latest mark,
    /// nothing uses the slot. A copy of a program that never ran may come later; it is on the same stream as the next
    /// one's.
    fn drop(&mut self) {
        if is_fork() {
            return;
        }
        let mut free = self.tables.lock(self.class);
        // Read while nobody else can push, so that marks stand in their order.
        let after = self.tables.reclaimer.latest();
        let index = self.index;
        free.push_back(Free { index, after });
    }
}
