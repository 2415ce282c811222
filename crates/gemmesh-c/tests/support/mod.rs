//! Ranks as threads, which use the functions of the header.
#![allow(dead_code, unsafe_code)] // Each test uses some.

use std::ffi::{CStr, CString};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use gemmesh::bf16;
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::sharded::*;
use gemmesh_c::status::*;
use gemmesh_c::types::*;

pub const OK: gemmesh_status = gemmesh_status::GEMMESH_OK;
pub const ARGUMENT: gemmesh_status = gemmesh_status::GEMMESH_ERROR_ARGUMENT;

/// The sentence of this thread's last error.
pub fn sentence() -> String {
    // SAFETY: a string of this thread, on which no call fails meanwhile.
    let text = unsafe { CStr::from_ptr(gemmesh_last_error()) };
    text.to_str().expect("UTF-8").into()
}

#[track_caller]
pub fn ok(status: gemmesh_status) {
    assert_eq!(status, OK, "{}", sentence());
}

/// Checks that a call fails, with a sentence that has these words.
#[track_caller]
pub fn fails(status: gemmesh_status, expected: gemmesh_status, words: &str) {
    let sentence = sentence();
    assert_eq!(status, expected, "{sentence}");
    assert!(sentence.contains(words), "{sentence:?} has no {words:?}");
}

pub fn default_options() -> gemmesh_group_options {
    gemmesh_group_options {
        struct_size: size_of::<gemmesh_group_options>(),
        backend: gemmesh_backend::GEMMESH_HOST as u32,
        numerics: 0,
        timeout_ms: 0,
        arrival_timeout_ms: 0,
        host_timeout_ms: 0,
        workers: 1,
        device: -1,
        max_ctas: 0,
        name: null(),
    }
}

/// An address of this test's own.
pub fn address() -> CString {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    CString::new(format!("gemmesh-c-{}-{number}", std::process::id())).expect("no zero")
}

/// Runs ranks as threads. Each gets its group and its rank.
pub fn ranks(world: usize, rank: impl Fn(*mut gemmesh_group, usize) + Sync) {
    let address = address();
    std::thread::scope(|scope| {
        for number in 0..world {
            let (address, rank) = (&address, &rank);
            scope.spawn(move || {
                let mut group = null_mut();
                let options = default_options();
                // SAFETY: pointers to live values, as everywhere in these tests.
                unsafe {
                    let address = address.as_ptr();
                    ok(gemmesh_group_connect(
                        number, world, address, &options, &mut group,
                    ));
                    rank(group, number);
                    ok(gemmesh_group_free(group));
                }
            });
        }
    });
}

/// Types that matrices have.
pub trait Number: Copy {
    const DTYPE: gemmesh_dtype;
}

impl Number for bf16 {
    const DTYPE: gemmesh_dtype = gemmesh_dtype::GEMMESH_BF16;
}

impl Number for f32 {
    const DTYPE: gemmesh_dtype = gemmesh_dtype::GEMMESH_F32;
}

impl Number for u32 {
    const DTYPE: gemmesh_dtype = gemmesh_dtype::GEMMESH_U32;
}

impl Number for gemmesh::F8E4M3 {
    const DTYPE: gemmesh_dtype = gemmesh_dtype::GEMMESH_F8E4M3;
}

/// Describes a matrix in this process.
pub fn memory<T: Number>(values: &mut [T], rows: usize, columns: usize) -> gemmesh_memory {
    assert_eq!(values.len(), rows * columns);
    gemmesh_memory {
        address: values.as_mut_ptr().cast(),
        dtype: T::DTYPE as u32,
        rows,
        columns,
        pitch: 0,
    }
}

pub const UNSCALED: gemmesh_scaling = gemmesh_scaling {
    kind: 0,
    first_row: 0,
    first_column: 0,
};
pub const UNQUANTIZED: gemmesh_quantization = gemmesh_quantization {
    kind: 0,
    power_of_two: 0,
    first_column: 0,
};

pub fn operand(values: gemmesh_memory) -> gemmesh_operand {
    gemmesh_operand {
        values,
        scales: null(),
        scaling: UNSCALED,
    }
}

pub fn output(values: gemmesh_memory) -> gemmesh_output {
    gemmesh_output {
        values,
        scales: null(),
        quantization: UNQUANTIZED,
    }
}

pub fn sharded_operand(values: *const gemmesh_sharded) -> gemmesh_sharded_operand {
    gemmesh_sharded_operand {
        values,
        own_scales: null(),
        sharded_scales: null(),
        scaling: UNSCALED,
    }
}

pub fn product(kind: gemmesh_product_kind, dtype: gemmesh_dtype) -> gemmesh_product {
    gemmesh_product {
        struct_size: size_of::<gemmesh_product>(),
        kind: kind as u32,
        dtype: dtype as u32,
        activation: 0,
        weight_layout: 0,
        accumulation: 0,
        gated: 0,
        constant_weights: 0,
        stages: 0,
        rows: null(),
        row_count: 0,
        weight_dtype: 0,
        output_dtype: 0,
        scaling: UNSCALED,
        weight_scaling: null(),
        weight_scaling_count: 0,
        quantization: UNQUANTIZED,
        route: 0,
    }
}

pub fn call() -> gemmesh_product_call {
    gemmesh_product_call {
        struct_size: size_of::<gemmesh_product_call>(),
        a: null(),
        sharded_a: null(),
        weights: null(),
        weight_count: 0,
        outputs: null(),
        output_count: 0,
        sharded_output: null(),
        bias: null(),
        residual: null(),
    }
}

/// A sharded matrix [m, k], split evenly.
pub fn sharded<T: Number>(group: *mut gemmesh_group, m: usize, k: usize) -> *mut gemmesh_sharded {
    let mut matrix = null_mut();
    // SAFETY: pointers to live values.
    ok(unsafe { gemmesh_sharded_new(group, T::DTYPE as u32, m, k, &mut matrix) });
    matrix
}

/// Writes this rank's own rows, each value by its row in the matrix and its column.
pub fn fill<T: Number>(
    group: *mut gemmesh_group,
    matrix: *mut gemmesh_sharded,
    value: impl Fn(usize, usize) -> T,
) {
    let (mut rank, mut rows) = (0, gemmesh_range::default());
    let mut own = memory::<T>(&mut [], 0, 0);
    // SAFETY: pointers to live values.
    unsafe {
        ok(gemmesh_group_rank(group, &mut rank));
        ok(gemmesh_sharded_rows_of(matrix, rank, &mut rows));
        ok(gemmesh_sharded_own_rows(matrix, &mut own));
    }
    let all = rows.first..rows.first + rows.count;
    let values: Vec<T> = all
        .flat_map(|row| (0..own.columns).map(move |column| (row, column)))
        .map(|(row, column)| value(row, column))
        .collect();
    // SAFETY: pointers to live values.
    ok(unsafe {
        gemmesh_copy_from_host(
            group,
            &own,
            values.as_ptr().cast(),
            size_of_val(&values[..]),
        )
    });
}

/// All rows of a sharded matrix, as this rank has them.
pub fn all_of<T: Number + Default>(
    group: *mut gemmesh_group,
    matrix: *mut gemmesh_sharded,
) -> Vec<T> {
    let mut whole = memory::<T>(&mut [], 0, 0);
    // SAFETY: pointers to live values.
    ok(unsafe { gemmesh_sharded_whole(matrix, &mut whole) });
    let mut values = vec![T::default(); whole.rows * whole.columns];
    let bytes = size_of_val(&values[..]);
    // SAFETY: pointers to live values.
    ok(unsafe { gemmesh_copy_to_host(group, &whole, values.as_mut_ptr().cast(), bytes) });
    values
}
