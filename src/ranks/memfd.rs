//! Anonymous memory, private to a process or shared by descriptor. It has no name, so a killed process leaves nothing
//! behind.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::resources::{Bytes, require_available, require_file_size};

/// The smallest page size of any machine.
const PAGE: usize = 4096;

/// Zeroed, page-aligned memory, which is unmapped on drop. This type only hands out the pointer. Its holder decides who
/// may use the bytes, and when.
#[derive(Debug)]
pub struct Mapping {
    begin: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is an address range that belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access yields only a raw pointer.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of this process, reserved in full.
    pub fn private(bytes: usize) -> io::Result<Mapping> {
        require_available(bytes)?;
        let mapping = Mapping::promised(bytes)?;
        // The pages are taken now, so that the next allocation sees that they are gone. Otherwise the kernel would end
        // a process that writes to a page that it cannot get.
        // SAFETY: the range is this mapping's, and its bytes do not change.
        let taken = unsafe {
            rustix::mm::madvise(
                mapping.as_ptr().cast(),
                mapping.bytes,
                Advice::LinuxPopulateWrite,
            )
        };
        match taken {
            // Linux before 5.14 does not have this call.
            Err(Errno::INVAL) => mapping.touch(),
            taken => taken?,
        }
        Ok(mapping)
    }

    /// Writes to each page, so that it is there. No one else knows the mapping yet.
    fn touch(&self) {
        for offset in (0..self.bytes).step_by(PAGE) {
            // SAFETY: the address lies within the mapping, which no one else knows yet.
            unsafe { self.as_ptr().add(offset).write_volatile(0) };
        }
    }

    /// Private memory whose pages are only allocated when they are touched.
    fn promised(bytes: usize) -> io::Result<Mapping> {
        let bytes = bytes.max(1);
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let begin = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        Mapping::new(begin.cast(), bytes)
    }

    /// Maps `bytes` bytes of a descriptor that [`memfd`] made with that size. Other processes that map it share it.
    pub fn shared(fd: impl AsFd, bytes: usize) -> io::Result<Mapping> {
        let bytes = bytes.max(1);
        require_sealed(&fd, bytes)?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing; the file is as long as the
        // mapping and sealed at that length, so no access can fault.
        let begin = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        Mapping::new(begin.cast(), bytes)
    }

    fn new(begin: *mut u8, bytes: usize) -> io::Result<Mapping> {
        let begin = NonNull::new(begin).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Mapping { begin, bytes })
    }

    /// The address of the first byte, which begins a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.begin.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value, whose owner holds no reference into it any more.
        // The call fails only for ranges that are not mapped.
        let _ = unsafe { rustix::mm::munmap(self.begin.as_ptr().cast(), self.bytes) };
    }
}

/// The seals that fix the size of shared memory.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Checks that a descriptor, perhaps from a different process, is one that [`memfd`] makes.
///
/// Reading memory that has been cut short would end this process.
fn require_sealed(fd: &impl AsFd, bytes: usize) -> io::Result<()> {
    let size = rustix::fs::fstat(fd)?.st_size as u64;
    if size != bytes as u64 {
        let (holds, needs) = (Bytes(size), Bytes(bytes as u64));
        let reason = format!("the shared memory holds {holds}, not {needs}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    // The call also fails for a descriptor that is not memory.
    let seals = rustix::fs::fcntl_get_seals(fd).unwrap_or(SealFlags::empty());
    if !seals.contains(SEALS) {
        let reason = "the shared memory is not sealed at its size";
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    Ok(())
}

/// Zeroed anonymous shared memory, reserved in full and sealed at its size.
pub(crate) fn memfd(bytes: usize) -> io::Result<OwnedFd> {
    require_available(bytes)?;
    let bytes = bytes.max(1) as u64;
    require_file_size(bytes)?;
    let fd = rustix::fs::memfd_create("gemmesh", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    // Without this, a missing page would end the process by SIGBUS when it is touched.
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_refused_not_promised() {
        assert_eq!(
            memfd(1 << 50).unwrap_err().kind(),
            io::ErrorKind::OutOfMemory
        );
        assert_eq!(
            Mapping::private(1 << 50).unwrap_err().kind(),
            io::ErrorKind::OutOfMemory
        );
    }

    /// For each page of a mapping, true if it is there.
    fn pages(mapping: &Mapping) -> Vec<bool> {
        let mut pages = vec![0; mapping.bytes.div_ceil(PAGE)];
        let begin = mapping.as_ptr().cast();
        // SAFETY: the mapping has that many bytes, and there is a byte for each of its pages.
        let asked = unsafe { libc::mincore(begin, mapping.bytes, pages.as_mut_ptr()) };
        assert_eq!(asked, 0);
        pages.iter().map(|page| page & 1 == 1).collect()
    }

    #[test]
    fn memory_that_was_given_is_taken_and_not_promised() {
        let mapping = Mapping::private(16 * PAGE + 1).unwrap();
        assert_eq!(pages(&mapping), [true; 17]);
    }

    #[test]
    fn where_the_kernel_does_not_take_memory_at_once_it_is_taken_page_by_page() {
        let mapping = Mapping::promised(16 * PAGE + 1).unwrap();
        assert_eq!(pages(&mapping), [false; 17]);
        mapping.touch();
        assert_eq!(pages(&mapping), [true; 17]);
    }

    #[test]
    fn two_mappings_of_one_descriptor_are_one_memory_of_fixed_size() {
        let fd = memfd(4096).unwrap();
        let (one, two) = (
            Mapping::shared(&fd, 4096).unwrap(),
            Mapping::shared(&fd, 4096).unwrap(),
        );
        // SAFETY: both mappings hold 4096 bytes, and no other thread knows them.
        let seen = unsafe {
            one.as_ptr().add(4095).write(7);
            two.as_ptr().add(4095).read()
        };
        assert_eq!(seen, 7);
        assert!(rustix::fs::ftruncate(&fd, 1).is_err(), "sealed");
        assert!(Mapping::shared(&fd, 4097).is_err(), "too long");
        assert!(Mapping::shared(&fd, 4095).is_err(), "too short");
    }

    #[test]
    fn what_another_process_could_cut_short_is_not_mapped() {
        let made = |flags| rustix::fs::memfd_create("test", flags).unwrap();
        let unsealed = made(MemfdFlags::ALLOW_SEALING);
        let partly = made(MemfdFlags::ALLOW_SEALING);
        let open = made(MemfdFlags::empty());
        let regular = std::fs::File::open("/proc/self/exe").unwrap();
        let length = regular.metadata().unwrap().len() as usize;
        for fd in [&unsealed, &partly, &open] {
            rustix::fs::ftruncate(fd, 4096).unwrap();
        }
        rustix::fs::fcntl_add_seals(&partly, SealFlags::SHRINK | SealFlags::SEAL).unwrap();
        for fd in [unsealed, partly, open] {
            let error = Mapping::shared(&fd, 4096).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        }
        assert!(Mapping::shared(&regular, length).is_err(), "a file");
    }
}
