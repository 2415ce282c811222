//! The driver's functions that this library calls, by the names that the driver's library exports.

use cudarc::driver::sys;
use libloading::Library;

use crate::error::{Error, Kind, Result};

/// Every function of the driver that this folder calls, besides [`EVENT_ELAPSED_TIME`]. A test compares the list with
/// the calls.
const CALLED: [&str; 60] = [
    "cuCtxGetCurrent",
    "cuCtxGetId",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDeviceCanAccessPeer",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchHostFunc",
    "cuLaunchKernelEx",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAllocFromPoolAsync",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeAsync",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemPoolCreate",
    "cuMemPoolTrimTo",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD32Async",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuOccupancyMaxActiveClusters",
    "cuStreamBatchMemOp_v2",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamGetPriority",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
    "cuThreadExchangeStreamCaptureMode",
];

/// cudarc binds one name for it up to CUDA 12.9 and a different one from 12.8 on. Every driver exports this one.
const EVENT_ELAPSED_TIME: &str = "cuEventElapsedTime";
type EventElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// The driver's library, which has all that this library calls.
#[derive(Debug)]
pub struct Symbols {
    pub event_elapsed_time: EventElapsedTime,
    /// Keeps the function loaded.
    _library: Library,
}

impl Symbols {
    /// Looks up every function, because cudarc would panic at the first call of a missing one.
    ///
    /// # Errors
    /// [`Kind::Device`] names the first that is missing.
    pub fn find(rank: usize, library: Library) -> Result<Symbols> {
        require(rank, |name| {
            // SAFETY: the address is not used.
            unsafe { library.get::<*const ()>(name) }.is_ok()
        })?;
        // SAFETY: cuda.h declares it with this type, in all versions.
        let found = unsafe { library.get::<EventElapsedTime>(EVENT_ELAPSED_TIME) };
        let event_elapsed_time = *found.map_err(|_| too_old(rank, EVENT_ELAPSED_TIME))?;
        Ok(Symbols {
            event_elapsed_time,
            _library: library,
        })
    }
}

/// Fails unless the driver has all that this library calls.
fn require(rank: usize, has: impl Fn(&str) -> bool) -> Result<()> {
    match CALLED.into_iter().find(|name| !has(name)) {
        Some(name) => Err(too_old(rank, name)),
        None => Ok(()),
    }
}

fn too_old(rank: usize, name: &str) -> Error {
    let what = format!(
        "the CUDA driver has no {name}; install a newer driver, one for CUDA 12.4 at least"
    );
    Kind::Device { what }.on(rank)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// The names that begin with `cu` and a capital, and are called or passed on as functions.
    fn calls(source: &str) -> BTreeSet<String> {
        let mut found = BTreeSet::new();
        let code = source.lines().map(|line| match line.split_once("//") {
            Some((code, _)) => code,
            None => line,
        });
        for line in code {
            for (at, _) in line.match_indices("cu") {
                let (before, after) = line.split_at(at);
                let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
                if before.ends_with(part)
                    || !after[2..].starts_with(|c: char| c.is_ascii_uppercase())
                {
                    continue;
                }
                let length = after.find(|c| !part(c)).unwrap_or(after.len());
                if before.ends_with("sys::") || after[length..].starts_with('(') {
                    found.insert(after[..length].into());
                }
            }
        }
        found
    }

    #[test]
    fn every_function_of_the_driver_that_is_called_is_looked_up_first() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/backend/cuda/driver");
        let mut called = BTreeSet::new();
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if !path.ends_with("symbols.rs") {
                called.extend(calls(&fs::read_to_string(path).unwrap()));
            }
        }
        let listed: BTreeSet<String> = CALLED.map(String::from).into();
        assert_eq!(called, listed, "compare symbols.rs with the calls");
    }

    #[test]
    fn calls_are_found_in_source_text() {
        let source = "
            // cuInComment(1)
            cuda!(rank, cuInit(0))?; check(rank, \"cuMemAlloc\", result);
            let name = text(sys::cuGetErrorName);
                cuMemsetD8_v2(ptr)
            focuSed(1); cut(2); cuda(3);";
        let found = calls(source);
        let expected = ["cuGetErrorName", "cuInit", "cuMemsetD8_v2"];
        assert!(found.iter().eq(&expected), "{found:?}");
    }

    #[test]
    fn a_driver_without_a_function_is_a_typed_error_that_names_it() {
        assert_eq!(require(3, |_| true), Ok(()));
        for missing in CALLED {
            let error = require(3, |name| name != missing).unwrap_err();
            assert_eq!(error, too_old(3, missing));
            let words = error.to_string();
            assert!(
                words.contains("rank 3") && words.contains(missing),
                "{words}"
            );
            assert!(words.contains("install a newer driver"), "{words}");
        }
    }

    #[test]
    fn a_library_that_is_not_the_driver_is_refused_and_does_not_panic() {
        // SAFETY: the C library has been initialised long ago.
        let libc = unsafe { Library::new("libc.so.6") }.unwrap();
        let error = Symbols::find(1, libc).unwrap_err();
        assert_eq!(error, too_old(1, CALLED[0]));
    }
}
