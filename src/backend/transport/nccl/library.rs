//! The NCCL library that a process finds, for the doctor.

use std::ffi::{CStr, OsStr, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::{Nccl, in_words};
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;

/// The NCCL library that a process finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NcclLibrary {
    /// Its version, such as "2.28.9".
    pub version: String,
    /// Its file. None if the loader does not say.
    pub path: Option<PathBuf>,
    /// True if it has `ncclPutSignal`, which this library does not use.
    pub has_put_signal: bool,
}

impl NcclLibrary {
    /// Loads NCCL to describe it.
    ///
    /// # Errors
    /// [`Kind::Device`] if it is not installed, or is too old.
    pub fn find(rank: usize) -> Result<NcclLibrary> {
        let nccl = Nccl::load(rank)?;
        // SAFETY: the function is not called.
        let put_signal = unsafe { nccl.library.get::<unsafe extern "C" fn()>("ncclPutSignal") };
        Ok(NcclLibrary {
            version: in_words(nccl.version),
            path: file_of(nccl.functions.send as *const c_void),
            has_put_signal: put_signal.is_ok(),
        })
    }
}

/// The file from which a function was loaded.
fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: writes the local, all of it if a file has the function. The name lives as long as the file is loaded.
    let name = unsafe {
        let found = libc::dladdr(function, info.as_mut_ptr()) != 0;
        let name = found.then(|| info.assume_init().dli_fname)?;
        (!name.is_null()).then(|| CStr::from_ptr(name))?
    };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_function_is_found() {
        let file = file_of(libc::dladdr as *const c_void).unwrap();
        assert!(file.to_str().unwrap().contains("libc"), "{file:?}");
        assert_eq!(file_of(std::ptr::null()), None);
    }
}
