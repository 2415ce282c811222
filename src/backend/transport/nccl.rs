//! NCCL as a transport of GPUs' memory: communicators, and messages between two ranks of one.
//!
//! Opening and closing a communicator, and the first message between two ranks, wait for other ranks. Further messages
//! are only put on a stream. (A communicator that does not block starts a thread for each of them, which takes 100 µs
//! instead of 14.)
#![allow(unsafe_code)]

#[cfg(feature = "unstable-tools")]
pub mod library;

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::offset_of;
use std::sync::Arc;

use cudarc::nccl::sys;
use libloading::Library;

use super::Transport;
use super::device::{DeviceBytes, DeviceTransport, Opener};
use crate::backend::cuda::driver::{Device, is_fork};
use crate::error::{Error, Kind, Result};
use crate::ranks::members::{Members, opening};

/// The library's name.
pub const NAME: &str = "NCCL";
/// The library's file.
const LIBRARY: &str = "libnccl.so.2";
/// The oldest version that can be used: 2.18.
const OLDEST: c_int = 21_800;
/// Bytes of a communicator's id.
const ID_BYTES: usize = 128;
/// A communicator's id, by which its ranks find one another.
type CommunicatorId = [u8; ID_BYTES];

/// NCCL's results are numbers here, because a newer library may know more of them than the bindings.
type Status = c_int;
const SUCCESS: Status = sys::ncclResult_t::ncclSuccess as Status;

/// Declares NCCL's functions, and loads them by their names.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// The functions that this file calls. nccl.h declares them with these types since 2.18.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Returns the name of a function that the library lacks instead.
            fn find(library: &Library) -> std::result::Result<Functions, &'static str> {
                Ok(Functions {
                    // SAFETY: nccl.h declares it with this type.
                    $($field: *unsafe { library.get($name) }.map_err(|_| $name)?,)*
                })
            }
        }
    };
}

functions! {
    get_unique_id = "ncclGetUniqueId": fn(*mut sys::ncclUniqueId) -> Status;
    init = "ncclCommInitRankConfig":
        fn(*mut sys::ncclComm_t, c_int, sys::ncclUniqueId, c_int, *mut sys::ncclConfig_t) -> Status;
    async_error = "ncclCommGetAsyncError": fn(sys::ncclComm_t, *mut Status) -> Status;
    destroy = "ncclCommDestroy": fn(sys::ncclComm_t) -> Status;
    abort = "ncclCommAbort": fn(sys::ncclComm_t) -> Status;
    error_string = "ncclGetErrorString": fn(Status) -> *const c_char;
    last_error = "ncclGetLastError": fn(sys::ncclComm_t) -> *const c_char;
    group_start = "ncclGroupStart": fn() -> Status;
    group_end = "ncclGroupEnd": fn() -> Status;
    send = "ncclSend":
        fn(*const c_void, usize, c_int, c_int, sys::ncclComm_t, *mut c_void) -> Status;
    receive = "ncclRecv":
        fn(*mut c_void, usize, c_int, c_int, sys::ncclComm_t, *mut c_void) -> Status;
}

/// The library, loaded.
struct Nccl {
    functions: Functions,
    version: c_int,
    /// Keeps the functions loaded.
    #[cfg_attr(not(feature = "unstable-tools"), allow(dead_code))]
    library: Library,
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "NCCL {}", in_words(self.version))
    }
}

/// As NVIDIA writes a version.
fn in_words(version: c_int) -> String {
    let (major, minor, patch) = (version / 10_000, version / 100 % 100, version % 100);
    format!("{major}.{minor}.{patch}")
}

impl Nccl {
    /// # Errors
    /// [`Kind::Device`] if it is not installed, or is too old.
    fn load(rank: usize) -> Result<Arc<Nccl>> {
        let none = |reason: String| {
            let what = format!(
                "there is no network to the GPUs of other hosts: {reason}; install NCCL 2.18 or newer (libnccl.so.2)"
            );
            Kind::Device { what }.on(rank)
        };
        // SAFETY: loading NCCL runs its initialisers, which any program that uses it does.
        let library = unsafe { Library::new(LIBRARY) };
        let library = library.map_err(|error| {
            // The loader's own words name the file that is missing.
            let reason = error.source().unwrap_or(&error);
            none(format!("{LIBRARY} cannot be loaded ({reason})"))
        })?;
        let version = version(&library).map_err(none)?;
        let lacks = |name: &str| {
            none(format!(
                "{LIBRARY} is {} and has no {name}",
                in_words(version)
            ))
        };
        if version < OLDEST {
            return Err(none(format!("{LIBRARY} is {}", in_words(version))));
        }
        Ok(Arc::new(Nccl {
            functions: Functions::find(&library).map_err(lacks)?,
            version,
            library,
        }))
    }

    /// A new communicator's id. This process serves the ranks that ask for it.
    fn new_id(&self, rank: usize) -> Result<CommunicatorId> {
        let mut id = sys::ncclUniqueId {
            internal: [0; ID_BYTES],
        };
        // SAFETY: writes the local.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check(rank, "find an address for NCCL", None, status)?;
        Ok(id.internal.map(|byte| byte as u8))
    }

    /// Makes an error of a status.
    fn check(
        &self,
        rank: usize,
        action: &str,
        communicator: Option<sys::ncclComm_t>,
        status: Status,
    ) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let words = |words: *const c_char| match words.is_null() {
            true => String::new(),
            // SAFETY: NCCL's words end with a zero, and live as long as it is loaded or until the next error.
            false => unsafe { CStr::from_ptr(words) }
                .to_string_lossy()
                .trim()
                .into(),
        };
        // SAFETY: plain calls; the communicator lives.
        let (kind, last) = unsafe {
            let kind = words((self.functions.error_string)(status));
            let last = communicator.map(|of| words((self.functions.last_error)(of)));
            (kind, last.filter(|last| !last.is_empty()))
        };
        Err(Kind::System {
            action: action.into(),
            reason: last.map_or_else(|| kind.clone(), |last| format!("{kind}: {last}")),
        }
        .on(rank))
    }
}

/// The library's version, as nccl.h counts it.
fn version(library: &Library) -> std::result::Result<c_int, String> {
    const NAME: &str = "ncclGetVersion";
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> Status;
    // SAFETY: nccl.h declares it with this type, in all versions.
    let get = unsafe { library.get::<GetVersion>(NAME) };
    let get = get.map_err(|_| format!("{LIBRARY} has no {NAME}"))?;
    let mut version = 0;
    // SAFETY: writes the local.
    match unsafe { get(&mut version) } {
        SUCCESS => Ok(version),
        status => Err(format!("{LIBRARY} does not tell its version ({status})")),
    }
}

/// What opens `count` communicators of all ranks. `most_ctas`: of each kernel of one. Collective.
///
/// # Errors
/// [`Kind::Device`] of the first rank that has no NCCL; what NCCL says; the group's failure.
pub fn openers(members: &Members, count: usize, most_ctas: usize) -> Result<Vec<Opener>> {
    let nccl = Nccl::load(members.rank);
    let ids = agree(members, &nccl, count)?;
    let (nccl, ends) = (nccl?, (members.rank, members.world));
    let opener = |id: CommunicatorId| -> Opener {
        let nccl = nccl.clone();
        Box::new(move |device: &Arc<Device>| {
            let communicator = Communicator::open(&nccl, device, &id, ends, most_ctas)?;
            Ok(Box::new(communicator) as Box<DeviceTransport>)
        })
    };
    Ok(ids.into_iter().map(opener).collect())
}

/// Makes the communicators' ids on rank 0, for all ranks. Collective.
fn agree(members: &Members, nccl: &Result<Arc<Nccl>>, count: usize) -> Result<Vec<CommunicatorId>> {
    let own = nccl.as_ref().map_err(Error::clone).and_then(|nccl| {
        let count = if members.rank == 0 { count } else { 0 };
        let ids = (0..count).map(|_| nccl.new_id(members.rank));
        ids.collect::<Result<Vec<_>>>()
    });
    let own = own.map(|ids| (ids.concat(), None));
    let gathered = members.gather_messages(&opening(), own)?;
    let (ids, rest) = gathered.payloads[0].as_chunks::<ID_BYTES>();
    if ids.len() == count && rest.is_empty() {
        Ok(ids.to_vec())
    } else {
        Err(members.fail(
            Kind::Message {
                reason: format!("{} bytes of ids of NCCL", gathered.payloads[0].len()),
            }
            .on(0),
        ))
    }
}

/// A rank's end of a communicator. It must be aborted or destroyed; otherwise it lives as long as the process.
#[derive(Debug)]
struct Communicator {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    communicator: sys::ncclComm_t,
}

// SAFETY: a communicator may be used by any thread, one at a time.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Opens this rank's end. Waits for all ranks. `most_ctas`: of each of its kernels.
    fn open(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        id: &CommunicatorId,
        (rank, world): (usize, usize),
        most_ctas: usize,
    ) -> Result<Communicator> {
        let _bound = device.bind()?;
        let mut config = config(most_ctas);
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as c_char),
        };
        let (rank, world) = (rank as c_int, world as c_int);
        let mut communicator = std::ptr::null_mut();
        let init = nccl.functions.init;
        // SAFETY: writes the local; the configuration is read as far as it says that it reaches.
        let status = unsafe { init(&mut communicator, world, id, rank, &mut config) };
        nccl.check(device.rank, "open a communicator of NCCL", None, status)?;
        Ok(Communicator {
            nccl: nccl.clone(),
            device: device.clone(),
            communicator,
        })
    }

    fn check(&self, status: Status) -> Result<()> {
        const ACTION: &str = "send and receive by NCCL";
        let rank = self.device.rank;
        self.nccl
            .check(rank, ACTION, Some(self.communicator), status)
    }

    fn end(&self, by: unsafe extern "C" fn(sys::ncclComm_t) -> Status) {
        // A fork has none of NCCL's threads.
        if is_fork() {
            return;
        }
        if let Ok(_bound) = self.device.bind() {
            // SAFETY: it lives, and is not used after this. If the call fails, nothing is left to do.
            let _ = unsafe { by(self.communicator) };
        }
    }
}

/// NCCL's name of a byte.
const BYTE: c_int = sys::ncclDataType_t::ncclUint8 as c_int;

/// A message is begun within `together`, which binds the device.
impl Transport<DeviceBytes> for Communicator {
    fn send(&self, [_, peer]: [usize; 2], from: DeviceBytes) -> Result<()> {
        let (first, peer) = (from.place as *const c_void, peer as c_int);
        let send = self.nccl.functions.send;
        // SAFETY: as `DeviceBytes::new`; the communicator lives.
        self.check(unsafe {
            send(
                first,
                from.bytes,
                BYTE,
                peer,
                self.communicator,
                from.stream,
            )
        })
    }

    fn receive(&self, [peer, _]: [usize; 2], to: DeviceBytes) -> Result<()> {
        let (first, peer) = (to.place as *mut c_void, peer as c_int);
        let receive = self.nccl.functions.receive;
        // SAFETY: as `DeviceBytes::new`; the communicator lives.
        self.check(unsafe { receive(first, to.bytes, BYTE, peer, self.communicator, to.stream) })
    }

    fn together(&self, begin: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let functions = &self.nccl.functions;
        let _bound = self.device.bind()?;
        // SAFETY: a plain call.
        self.check(unsafe { (functions.group_start)() })?;
        let begun = begin();
        // A group that was begun is ended.
        // SAFETY: a plain call. What the messages need is there, by `DeviceBytes::new`.
        let ended = unsafe { (functions.group_end)() };
        begun.and_then(|()| self.check(ended))
    }

    fn require_alive(&self) -> Result<()> {
        let mut state = SUCCESS;
        // SAFETY: writes the local; the communicator lives.
        let status = unsafe { (self.nccl.functions.async_error)(self.communicator, &mut state) };
        self.check(status)?;
        self.check(state)
    }

    fn close(self: Box<Self>) {
        self.end(self.nccl.functions.destroy);
    }

    /// Takes half a second.
    fn abort(self: Box<Self>) {
        self.end(self.nccl.functions.abort);
    }
}

/// The configuration of a communicator.
///
/// It is as long as NCCL 2.18 knows it. Newer versions take the defaults for what they have beyond.
fn config(most_ctas: usize) -> sys::ncclConfig_t {
    const MAGIC: c_uint = 0xcafe_beef;
    const UNDEFINED: c_int = c_int::MIN;
    // SAFETY: plain numbers and pointers, for which zero is valid.
    let mut config: sys::ncclConfig_t = unsafe { std::mem::zeroed() };
    config.size = offset_of!(sys::ncclConfig_t, trafficClass);
    config.magic = MAGIC;
    config.version = OLDEST as c_uint;
    config.blocking = 1;
    config.cgaClusterSize = UNDEFINED;
    config.minCTAs = 1;
    config.maxCTAs = most_ctas as c_int;
    config.splitShare = UNDEFINED;
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_written_as_nvidia_writes_them() {
        assert_eq!(in_words(22_809), "2.28.9");
        assert_eq!(in_words(OLDEST), "2.18.0");
    }

    #[test]
    fn a_library_without_nccl_is_told_from_an_old_one() {
        // SAFETY: every program has loaded it.
        let libc = unsafe { Library::new("libc.so.6") }.unwrap();
        let told = version(&libc).unwrap_err();
        assert!(told.contains("ncclGetVersion"), "{told}");
        assert_eq!(Functions::find(&libc).err(), Some("ncclGetUniqueId"));
    }
}
