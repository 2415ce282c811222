//! Memory for the tables of programs, in slots that are used again and again, so that a new shape hardly ever allocates. Tables go to the
//! device in their turn, on the stream that needs them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Device, DevicePtr, Memory, Pinned};
use super::reclaim::{Deferred, Mark, Reclaimer};
use crate::error::Result;

/// Bytes of a slot, by class: for the tables of 200 tiles, as of the few rows of a decoding step, and for those of 1,800. Larger tables get
/// memory of their own.
const CLASSES: [usize; 2] = [4 << 10, 32 << 10];

/// Bytes that are allocated at once: where more programs live than ever before, there are 256 or 32 slots more. They stay until the
/// group goes.
const SLAB: usize = 1 << 20;

/// What the host writes and the device copies: as the slots lie.
#[derive(Clone, Copy, Debug)]
struct Staging(#[allow(dead_code)] [u8; SLAB]);

// SAFETY: plain bytes.
unsafe impl bytemuck::Zeroable for Staging {}

/// Slots of one class, which live as long as one that a program has, or the group.
type Slab = Arc<Deferred<(Memory, Pinned<Staging>)>>;

/// The slots of one group.
#[derive(Debug)]
pub struct Tables {
    device: Arc<Device>,
    reclaimer: Arc<Reclaimer>,
    /// By class; longest free first.
    free: [Mutex<VecDeque<Free>>; CLASSES.len()],
}

/// A slot that no program has.
#[derive(Debug)]
struct Free {
    place: Place,
    /// The device may use it until it has passed this.
    after: Option<Arc<Mark>>,
}

/// Where a slot is.
#[derive(Clone, Debug)]
struct Place {
    slab: Slab,
    /// Bytes from the beginning.
    offset: usize,
}

/// The tables of one program.
#[derive(Debug)]
pub enum Held {
    Slot(Slot),
    Own(Deferred<Memory>),
}

/// A slot that a program has.
#[derive(Debug)]
pub struct Slot {
    tables: Arc<Tables>,
    class: usize,
    place: Place,
}

impl Tables {
    pub fn new(device: &Arc<Device>, reclaimer: &Arc<Reclaimer>) -> Result<Arc<Tables>> {
        let tables = Tables {
            device: device.clone(),
            reclaimer: reclaimer.clone(),
            free: Default::default(),
        };
        for (class, free) in tables.free.iter().enumerate() {
            tables.add_slab(class, &mut lock(free))?;
        }
        Ok(Arc::new(tables))
    }

    /// Slots that nobody has used.
    fn add_slab(&self, class: usize, free: &mut VecDeque<Free>) -> Result<()> {
        let memory = Memory::zeroed(&self.device, SLAB)?;
        let staging = Pinned::zeroed(&self.device)?;
        let slab: Slab = Arc::new(Deferred::new((memory, staging), &self.reclaimer));
        // In front of those that the device may still use.
        for offset in (0..SLAB).step_by(CLASSES[class]).rev() {
            let place = Place {
                slab: slab.clone(),
                offset,
            };
            free.push_front(Free { place, after: None });
        }
        Ok(())
    }

    /// Memory with these tables in it, for what is put on the main stream from now on; and where each of them lies.
    pub fn hold<const N: usize>(
        self: &Arc<Tables>,
        tables: [&[u8]; N],
    ) -> Result<(Held, [DevicePtr; N])> {
        let mut length = 0usize;
        let offsets = tables.map(|table| {
            let offset = length.next_multiple_of(16);
            length = offset + table.len();
            offset
        });
        let parts = || offsets.into_iter().zip(tables);
        let held = match CLASSES.iter().position(|&bytes| length <= bytes) {
            Some(class) => self.hold_in(self.take(class)?, parts(), length)?,
            None => {
                let mut bytes = vec![0; length];
                parts().for_each(|(at, table)| bytes[at..at + table.len()].copy_from_slice(table));
                let memory = Memory::holding(&self.device, &bytes)?;
                Held::Own(Deferred::new(memory, &self.reclaimer))
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
    ) -> Result<Held> {
        let Place { slab, offset } = &slot.place;
        let (_, staging) = &***slab;
        let _bound = self.device.bind()?;
        // SAFETY: the slot is this program's, and long enough. What the device did with it has ended; but for the copy of a
        // program that never ran, which may now read the new bytes, in front of the copy that brings them.
        unsafe {
            let from = staging.as_ptr().cast::<u8>().add(*offset);
            for (offset, table) in parts {
                from.add(offset)
                    .copy_from_nonoverlapping(table.as_ptr(), table.len());
            }
            self.reclaimer.main().upload(slot.ptr(), from, length)?;
        }
        Ok(Held::Slot(slot))
    }

    /// A slot that the device does not use any more.
    fn take(self: &Arc<Tables>, class: usize) -> Result<Slot> {
        let mut free = lock(&self.free[class]);
        if free.front().is_some_and(|free| free.after.is_some()) {
            // The streams pass marks in order: what is asked of one is known of those before it.
            let is_passed = |at: &usize| free[*at].after.as_ref().is_none_or(|m| m.is_passed());
            let passed = [free.len() / 2, 0].into_iter().find(is_passed);
            let passed = passed.map_or(0, |at| at + 1);
            free.range_mut(..passed).for_each(|free| free.after = None);
        }
        loop {
            match free.pop_front() {
                Some(Free { place, after: None }) => {
                    return Ok(Slot {
                        tables: self.clone(),
                        class,
                        place,
                    });
                }
                used => used.into_iter().for_each(|used| free.push_front(used)),
            }
            self.add_slab(class, &mut free)?;
        }
    }
}

/// Each change is one call, so a panic has not left it half-changed.
fn lock(free: &Mutex<VecDeque<Free>>) -> MutexGuard<'_, VecDeque<Free>> {
    free.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Held {
    fn ptr(&self) -> DevicePtr {
        match self {
            Held::Slot(slot) => slot.ptr(),
            Held::Own(memory) => memory.ptr(),
        }
    }
}

impl Slot {
    fn ptr(&self) -> DevicePtr {
        let Place { slab, offset } = &self.place;
        let (memory, _) = &***slab;
        memory.ptr() + *offset as u64
    }
}

impl Drop for Slot {
    /// Every operation is followed by a mark, and what graphs run is kept as long as the group: behind the latest mark, nothing
    /// uses the slot. A copy of a program that never ran may come later; it is on the same stream as the next one's.
    fn drop(&mut self) {
        let mut free = lock(&self.tables.free[self.class]);
        // Read while nobody else can push, so that marks stand in their order.
        let after = self.tables.reclaimer.latest();
        let place = self.place.clone();
        free.push_back(Free { place, after });
    }
}
