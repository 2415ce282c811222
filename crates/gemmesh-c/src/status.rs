//! Status codes, and the error of the last call that failed.

use std::ffi::c_char;
use std::ptr;

use crate::failure::last;

/// What a call returns: GEMMESH_OK, or what kind of failure it was.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum gemmesh_status {
    /// Done.
    GEMMESH_OK = 0,
    /// An argument does not fit, or asks for something that is not supported. Nothing has been done.
    GEMMESH_ERROR_ARGUMENT = 1,
    /// The call may not be made here or now. Nothing has been done.
    GEMMESH_ERROR_MISUSE = 2,
    /// The environment does not say who this rank is.
    GEMMESH_ERROR_ENVIRONMENT = 3,
    /// The ranks did not find one another, or do not fit together.
    GEMMESH_ERROR_RENDEZVOUS = 4,
    /// The ranks made different calls.
    GEMMESH_ERROR_CALL_MISMATCH = 5,
    /// There is no memory.
    GEMMESH_ERROR_OUT_OF_MEMORY = 6,
    /// A rank died, left, was refused a call that others made, or its program or callback failed.
    GEMMESH_ERROR_RANK = 7,
    /// A deadline has passed.
    GEMMESH_ERROR_TIMEOUT = 8,
    /// A GPU or its driver lacks something or failed.
    GEMMESH_ERROR_DEVICE = 9,
    /// The operating system refused something.
    GEMMESH_ERROR_SYSTEM = 10,
    /// A bug of this library.
    GEMMESH_ERROR_INTERNAL = 11,
}

/// The version of the library, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn gemmesh_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// The whole sentence of the last call on this thread that failed. It names the rank at fault. Empty if none has
/// failed. It is valid until the next call on this thread fails, or the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn gemmesh_last_error() -> *const c_char {
    last(c"".as_ptr(), |told| told.sentence.as_ptr())
}

/// The first rank at fault of the last call on this thread that failed, or -1 if no rank is.
#[unsafe(no_mangle)]
pub extern "C" fn gemmesh_last_error_rank() -> i64 {
    last(-1, |told| told.rank)
}

/// The name of the last call on this thread that failed, or NULL if none has failed. It is valid as long as the
/// sentence. It may be the name of another rank's call.
#[unsafe(no_mangle)]
pub extern "C" fn gemmesh_last_error_call() -> *const c_char {
    last(ptr::null(), |told| told.call.as_ptr())
}
