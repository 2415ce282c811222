//! C's descriptions as gemmesh's, and back.

use std::ffi::{CStr, c_char};

use gemmesh::raw::Memory;

use crate::failure::{Failure, Result};
use crate::numbers;
use crate::types::*;

/// What a pointer points to.
///
/// # Safety
/// The pointer is null or points to a value, which stays as it is for the borrow's life.
pub(crate) unsafe fn given<'a, T>(argument: &str, pointer: *const T) -> Result<&'a T> {
    // SAFETY: as this function's.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::null(argument))
}

/// The values that a pointer and a count describe. The pointer counts only if there are any.
///
/// # Safety
/// As [`given`], for `count` values.
pub(crate) unsafe fn slice<'a, T>(
    argument: &str,
    first: *const T,
    count: usize,
) -> Result<&'a [T]> {
    check_slice(argument, first, count)?;
    match count {
        0 => Ok(&[]),
        // SAFETY: as this function's; there are no more bytes than memory can hold.
        _ => Ok(unsafe { std::slice::from_raw_parts(first, count) }),
    }
}

/// As [`slice`], of at most `most` values. More are refused before the first is read.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn slice_of_few<'a, T>(
    argument: &str,
    first: *const T,
    count: usize,
    most: usize,
) -> Result<&'a [T]> {
    if count > most {
        let expected = format!("at most {most}");
        return Err(Failure::unsuitable(argument, "the count", expected, count));
    }
    // SAFETY: as this function's.
    unsafe { slice(argument, first, count) }
}

/// A number for each of `world` ranks. Another count is refused before the first number is read.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn by_rank<'a>(
    argument: &str,
    first: *const usize,
    count: usize,
    world: usize,
) -> Result<&'a [usize]> {
    check_by_rank(argument, count, world)?;
    // SAFETY: as this function's.
    unsafe { slice(argument, first, count) }
}

/// The counts of pairs of ranks. None if they are NULL. The call refuses another number of them before it reads the first.
///
/// # Safety
/// As [`slice`].
pub(crate) unsafe fn by_pair<'a>(
    counts: *const usize,
    pair_count: usize,
) -> Result<Option<&'a [usize]>> {
    if counts.is_null() {
        return Ok(None);
    }
    // SAFETY: as this function's.
    unsafe { slice("counts", counts, pair_count).map(Some) }
}

/// Checks that there is a value for each of `world` ranks.
pub(crate) fn check_by_rank(argument: &str, count: usize, world: usize) -> Result<()> {
    if count == world {
        return Ok(());
    }
    let expected = format!("{world}, the number of ranks");
    Err(Failure::unsuitable(argument, "the count", expected, count))
}

/// Values to be written, as [`slice`].
///
/// # Safety
/// As [`given`], for `count` values that no one else uses and that have been written once.
pub(crate) unsafe fn slice_mut<'a, T>(
    argument: &str,
    first: *mut T,
    count: usize,
) -> Result<&'a mut [T]> {
    check_slice(argument, first, count)?;
    match count {
        0 => Ok(&mut []),
        // SAFETY: as this function's; there are no more bytes than memory can hold.
        _ => Ok(unsafe { std::slice::from_raw_parts_mut(first, count) }),
    }
}

fn check_slice<T>(argument: &str, first: *const T, count: usize) -> Result<()> {
    if count > 0 && first.is_null() {
        return Err(Failure::null(argument));
    }
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => Err(Failure::unsuitable(
            argument,
            "the count",
            "one that fits into memory",
            count,
        )),
    }
}

/// Writes a result.
///
/// # Safety
/// The pointer is null or that of memory for a value.
pub(crate) unsafe fn put<T>(argument: &str, to: *mut T, value: T) -> Result<()> {
    check_out(argument, to)?;
    // SAFETY: as this function's, and it is not null. A value that it held needs no drop, as all of C's.
    unsafe { to.write(value) };
    Ok(())
}

/// Checks that a result can be written, before there is one.
pub(crate) fn check_out<T>(argument: &str, to: *mut T) -> Result<()> {
    if to.is_null() {
        Err(Failure::null(argument))
    } else {
        Ok(())
    }
}

/// A string of C, which must be UTF-8.
///
/// # Safety
/// The pointer is null or points to a string that ends with a zero, and stays as it is for the borrow's life.
pub(crate) unsafe fn words<'a>(argument: &str, pointer: *const c_char) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: as this function's.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str()
        .map_err(|_| Failure::unsuitable(argument, "the text", "UTF-8", text.to_string_lossy()))
}

/// A struct that begins with its size.
pub(crate) trait SizeFirst {
    /// The header's function that makes one.
    const DEFAULT: &'static str;
}

macro_rules! size_first {
    ($($type:ident),*) => {$(
        impl SizeFirst for $type {
            const DEFAULT: &'static str = concat!(stringify!($type), "_default");
        }
        const _: () = assert!(std::mem::offset_of!($type, struct_size) == 0);
    )*};
}
size_first!(gemmesh_group_options, gemmesh_product, gemmesh_product_call);

/// A struct that begins with its size. There is one size so far. A later version adds fields at the end, and takes the
/// defaults of those that a smaller struct does not have.
///
/// # Safety
/// The pointer is null or points to at least as many bytes as the struct says, and to its size in any case.
pub(crate) unsafe fn sized<'a, T: SizeFirst>(argument: &str, pointer: *const T) -> Result<&'a T> {
    if pointer.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: as this function's. The size comes first.
    let size = unsafe { pointer.cast::<usize>().read() };
    if size != size_of::<T>() {
        let expected = format!("{}, which {}() sets", size_of::<T>(), T::DEFAULT);
        return Err(Failure::unsuitable(argument, "struct_size", expected, size));
    }
    // SAFETY: as this function's, and the struct has its size.
    Ok(unsafe { &*pointer })
}

/// A matrix.
pub(crate) fn memory_of(argument: &str, memory: &gemmesh_memory) -> Result<Memory> {
    let dtype = numbers::dtype(argument, memory.dtype)?;
    let width = memory.columns.saturating_mul(dtype.bytes());
    Ok(Memory {
        address: memory.address as u64,
        dtype,
        shape: [memory.rows, memory.columns],
        pitch: match memory.pitch {
            0 => width,
            pitch => pitch,
        },
    })
}

/// A matrix that must be given.
///
/// # Safety
/// As [`given`].
pub(crate) unsafe fn memory(argument: &str, pointer: *const gemmesh_memory) -> Result<Memory> {
    // SAFETY: as this function's.
    memory_of(argument, unsafe { given(argument, pointer)? })
}

/// A matrix that may be given.
///
/// # Safety
/// As [`given`].
// Inlined, because the pointer is usually null.
#[inline(always)]
pub(crate) unsafe fn memory_if_given(
    argument: &str,
    pointer: *const gemmesh_memory,
) -> Result<Option<Memory>> {
    // SAFETY: as this function's.
    let memory = unsafe { pointer.as_ref() };
    memory.map(|memory| memory_of(argument, memory)).transpose()
}

/// A matrix, as C describes it.
pub(crate) fn described(memory: Memory) -> gemmesh_memory {
    gemmesh_memory {
        address: memory.address as *mut _,
        dtype: numbers::of_dtype(memory.dtype),
        rows: memory.shape[0],
        columns: memory.shape[1],
        pitch: memory.pitch,
    }
}

impl From<std::ops::Range<usize>> for gemmesh_range {
    fn from(rows: std::ops::Range<usize>) -> gemmesh_range {
        gemmesh_range {
            first: rows.start,
            count: rows.len(),
        }
    }
}
