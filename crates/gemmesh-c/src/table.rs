//! Handles. They are numbers, in the shape of pointers that point nowhere, so that those that were freed or never given
//! are told from live ones.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::failure::{Failure, Result};

const _: () = assert!(size_of::<usize>() == 8, "a handle has 64 bits");

/// The entries of a table: a handle's low bits are the place of one.
const INDEX_BITS: u32 = 24;
/// How often a place is used anew before a handle of it may come again.
const GENERATION_BITS: u32 = 32;

/// The live handles of one kind, each with what it stands for.
pub(crate) struct Table<T: ?Sized> {
    kind: &'static str,
    /// The top byte of the handles, which differs between kinds. Pointers to memory have none.
    mark: u8,
    entries: RwLock<Entries<T>>,
}

struct Entries<T: ?Sized> {
    all: Vec<Entry<T>>,
    free: Vec<usize>,
}

struct Entry<T: ?Sized> {
    generation: u32,
    value: Option<Arc<T>>,
}

impl<T: ?Sized> Table<T> {
    pub const fn new(kind: &'static str, mark: u8) -> Table<T> {
        Table {
            kind,
            mark,
            entries: RwLock::new(Entries {
                all: Vec::new(),
                free: Vec::new(),
            }),
        }
    }

    /// Whoever panics here has not begun to change a table.
    fn read(&self) -> RwLockReadGuard<'_, Entries<T>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Entries<T>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle of a new entry.
    pub fn insert<H>(&self, value: Arc<T>) -> Result<*mut H> {
        let mut entries = self.write();
        let index = match entries.free.pop() {
            Some(index) => index,
            None if entries.all.len() < 1 << INDEX_BITS => {
                entries.all.push(Entry {
                    generation: 0,
                    value: None,
                });
                entries.all.len() - 1
            }
            None => {
                let what = format!("there are {} handles; free some", entries.all.len());
                return Err(Failure::Misuse(what));
            }
        };
        let entry = &mut entries.all[index];
        entry.value = Some(value);
        let high = usize::from(self.mark) << (INDEX_BITS + GENERATION_BITS);
        let handle = high | (entry.generation as usize) << INDEX_BITS | index;
        Ok(std::ptr::without_provenance_mut(handle))
    }

    /// What a handle stands for.
    pub fn get<H>(&self, argument: &str, handle: *const H) -> Result<Arc<T>> {
        let entries = self.read();
        let entry = self.place(handle.addr()).and_then(|(index, generation)| {
            let entry = entries.all.get(index)?;
            (entry.generation == generation).then_some(entry)?;
            entry.value.clone()
        });
        entry.ok_or_else(|| self.unknown(argument, handle.addr()))
    }

    /// Changes what a handle stands for. `None` if a call uses it.
    pub fn change<H, R>(
        &self,
        argument: &str,
        handle: *const H,
        change: impl FnOnce(&mut T) -> R,
    ) -> Result<Option<R>> {
        let mut entries = self.write();
        let entry = self.entry(&mut entries, handle.addr());
        match entry.and_then(|entry| entry.value.as_mut()) {
            Some(value) => Ok(Arc::get_mut(value).map(change)),
            None => Err(self.unknown(argument, handle.addr())),
        }
    }

    /// Takes a handle's entry out. The handle is none from now on.
    pub fn take<H>(&self, argument: &str, handle: *const H) -> Result<Arc<T>> {
        let mut entries = self.write();
        let entry = self.entry(&mut entries, handle.addr());
        let taken = entry.and_then(|entry| {
            entry.generation = entry.generation.wrapping_add(1);
            entry.value.take()
        });
        let (index, _) = self.place(handle.addr()).unwrap_or_default();
        match taken {
            Some(value) => {
                entries.free.push(index);
                Ok(value)
            }
            None => Err(self.unknown(argument, handle.addr())),
        }
    }

    /// The live entry of a handle.
    fn entry<'e>(&self, entries: &'e mut Entries<T>, handle: usize) -> Option<&'e mut Entry<T>> {
        let (index, generation) = self.place(handle)?;
        let entry = entries.all.get_mut(index)?;
        (entry.generation == generation && entry.value.is_some()).then_some(entry)
    }

    /// The place and the generation that a handle names, if it is of this kind.
    fn place(&self, handle: usize) -> Option<(usize, u32)> {
        let mark = (handle >> (INDEX_BITS + GENERATION_BITS)) as u8;
        let generation = (handle >> INDEX_BITS) as u32;
        (mark == self.mark).then_some((handle & ((1 << INDEX_BITS) - 1), generation))
    }

    #[cold]
    fn unknown(&self, argument: &str, handle: usize) -> Failure {
        let found = match (handle, self.place(handle)) {
            (0, _) => "null".into(),
            (_, Some(_)) => format!("{handle:#x}, which was freed or never given"),
            (_, None) => format!("{handle:#x}, which is no handle of this kind"),
        };
        Failure::unsuitable(
            argument,
            "the handle",
            format!("a live {}", self.kind),
            found,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NUMBERS: Table<u32> = Table::new("number", 0x7a);

    fn sentence(failure: Failure) -> String {
        failure.told("f").sentence.into_string().unwrap()
    }

    #[test]
    fn a_freed_handle_stays_unknown_when_its_place_is_used_again() {
        let first: *mut u8 = NUMBERS.insert(Arc::new(1)).unwrap();
        assert_eq!(*NUMBERS.get("n", first).ok().unwrap(), 1);
        assert_eq!(*NUMBERS.take("n", first).ok().unwrap(), 1);
        let second: *mut u8 = NUMBERS.insert(Arc::new(2)).unwrap();
        assert_ne!(first, second);
        let error = sentence(NUMBERS.get("n", first).err().unwrap());
        assert!(error.contains("freed or never given"), "{error}");
        assert!(NUMBERS.take("n", first).is_err());
        let foreign = std::ptr::from_ref(&NUMBERS);
        let error = sentence(NUMBERS.get("n", foreign).err().unwrap());
        assert!(error.contains("no handle of this kind"), "{error}");
        let held = NUMBERS.get("n", second).ok().unwrap();
        assert!(NUMBERS.change("n", second, |_| ()).ok().unwrap().is_none());
        drop(held);
        assert!(
            NUMBERS
                .change("n", second, |n| *n = 3)
                .ok()
                .unwrap()
                .is_some()
        );
        assert_eq!(*NUMBERS.take("n", second).ok().unwrap(), 3);
    }
}
