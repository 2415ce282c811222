//! Memory for the tables of programs, allocated at the beginning.
//!
//! A new shape allocates nothing, unless its tables are large. Its tables are uploaded on the stream that needs them,
//! in order with the stream's other work.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::reclaim::{Deferred, Mark, Reclaimer};
use crate::backend::contract::KEPT_PROGRAMS;
use crate::backend::cuda::driver::{Device, DeviceMemory, DevicePtr, Pinned, is_fork};
use crate::error::Result;

/// Slots of one size.
struct SizeClass {
    /// Bytes of a slot.
    bytes: usize,
    count: usize,
}

/// The classes of slots, by size.
///
/// Larger tables, and tables for which no slot is free, get memory of their own. No slots are added later, because
/// page-locked memory can't be allocated while a kernel waits for another rank.
const CLASSES: [SizeClass; 3] = [
    // For tables of 200 tiles, as for the few rows of a decoding step. A prepared gather has three programs, so about
    // 150 of them have room with the programs that a group keeps. If these slots are taken, larger ones are used.
    SizeClass {
        bytes: 4 << 10,
        count: KEPT_PROGRAMS + 448,
    },
    // For tables of 900 tiles, as for a prompt: a slot for each program that a group keeps.
    SizeClass {
        bytes: 16 << 10,
        count: KEPT_PROGRAMS,
    },
    // For tables of 1,800 tiles. If more programs have so many tiles, each new one allocates, which takes less time
    // than its product.
    SizeClass {
        bytes: 32 << 10,
        count: 96,
    },
];

/// The offset at which the slots of a class begin.
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

/// Page-locked memory that the host writes and the device copies, laid out as the slots.
#[derive(Clone, Copy, Debug)]
struct StagedTables(#[allow(dead_code)] [u8; BYTES]);

// SAFETY: plain bytes.
unsafe impl bytemuck::Zeroable for StagedTables {}

/// The slots of one group.
#[derive(Debug)]
pub struct Tables {
    memory: Deferred<(DeviceMemory, Pinned<StagedTables>)>,
    device: Arc<Device>,
    reclaimer: Arc<Reclaimer>,
    /// By class: the free slots, the longest free first.
    free: [Mutex<VecDeque<Free>>; CLASSES.len()],
}

/// A slot that no program has.
#[derive(Debug)]
struct Free {
    index: usize,
    /// The device may use the slot until it has passed this mark.
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

    /// Memory with these tables in it, and the address of each, for work that is put on the main stream from now on.
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

    /// Uploads tables to a slot. `parts`: the tables with their offsets. `length`: the bytes of all.
    fn hold_in<'a>(
        &self,
        slot: Slot,
        parts: impl Iterator<Item = (usize, &'a [u8])>,
        length: usize,
    ) -> Result<HeldTables> {
        let (_, staging) = &*self.memory;
        let _bound = self.device.bind()?;
        // SAFETY: the slot is this program's, and long enough. The device no longer uses it, except for the upload of a
        // program that never ran. That upload may now read the new bytes, but it stands in front of the upload that
        // brings them.
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
            // The streams pass marks in order, so a passed mark tells that all marks before it are passed.
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
    /// Returns the slot, free after the latest mark.
    ///
    /// Nothing uses it after that mark, because a mark follows every operation, and programs that graphs run are kept
    /// as long as the group. The upload of a program that never ran may come later, but it is on the same stream as the
    /// next program's upload.
    fn drop(&mut self) {
        if is_fork() {
            return;
        }
        let mut free = self.tables.lock(self.class);
        // Read under the lock, so that marks stand in their order.
        let after = self.tables.reclaimer.latest();
        let index = self.index;
        free.push_back(Free { index, after });
    }
}
