//! What every function of the header does before and after its work.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use gemmesh::error::called_at;
use gemmesh::raw::{AnyGroup, unsuitable};

use crate::failure::{Failure, Result, Told, Unsuitable};
use crate::group::{GROUPS, gemmesh_group};
use crate::status::gemmesh_status;

/// Runs function `call` of the header. A panic is a status too, and errors name no line of this crate.
pub(crate) fn guarded(call: &'static str, f: impl FnOnce() -> Result<()>) -> gemmesh_status {
    match catch_unwind(AssertUnwindSafe(|| called_at(None, f))) {
        Ok(Ok(())) => gemmesh_status::GEMMESH_OK,
        Ok(Err(failure)) => failure.told(call).keep(),
        Err(payload) => Told::panic(call, &*payload).keep(),
    }
}

/// Who learns that an argument does not fit.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Call {
    /// This rank: others do not wait for the call.
    Own,
    /// The ranks that wait for the call.
    Collective,
}

/// Runs function `call` of a group.
pub(crate) fn in_group(
    call: &'static str,
    kind: Call,
    group: *const gemmesh_group,
    f: impl FnOnce(&dyn AnyGroup) -> Result<()>,
) -> gemmesh_status {
    guarded(call, || {
        let group = GROUPS.get("group", group)?;
        with(call, kind, &group.group, f)
    })
}

/// Runs a call of a group. If it panics, the group fails, because its ranks may wait for the call.
pub(crate) fn with(
    call: &'static str,
    kind: Call,
    group: &Arc<dyn AnyGroup>,
    f: impl FnOnce(&dyn AnyGroup) -> Result<()>,
) -> Result<()> {
    match catch_unwind(AssertUnwindSafe(|| f(&**group))) {
        Ok(Err(Failure::Unsuitable(found))) => Err(refused(call, kind, &**group, &found).into()),
        Ok(Err(Failure::Gemmesh(error))) => Err(Failure::OfGroup(error, group.rank())),
        Ok(result) => result,
        Err(payload) => {
            let told = Told::panic(call, &*payload);
            group.fail(&told.sentence.to_string_lossy());
            std::panic::resume_unwind(payload)
        }
    }
}

/// The error of an argument that only this library sees.
fn refused(
    call: &'static str,
    kind: Call,
    group: &dyn AnyGroup,
    found: &Unsuitable,
) -> gemmesh::Error {
    let words = [found.what, &found.expected, &found.found];
    match kind {
        Call::Own => unsuitable(group, call, &found.argument, words),
        Call::Collective => group.refuse(call, &found.argument, words),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::gemmesh_last_error;

    #[test]
    fn a_panic_is_a_status_and_a_sentence() {
        let status = guarded("gemmesh_planted", || panic!("planted {}", 7));
        assert_eq!(status, gemmesh_status::GEMMESH_ERROR_INTERNAL);
        // SAFETY: a string of this thread, on which no call fails meanwhile.
        let sentence = unsafe { std::ffi::CStr::from_ptr(gemmesh_last_error()) };
        assert_eq!(sentence, c"gemmesh_planted: panicked: planted 7");
    }
}
