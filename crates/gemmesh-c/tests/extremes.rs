//! Numbers that no machine has, in every argument of the header that is a number: a status, never a panic or a crash. A
//! count is checked before what it counts is read.
#![allow(unsafe_code)]

mod support;

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use gemmesh::bf16;
use gemmesh_c::collectives::*;
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::pipelines::*;
use gemmesh_c::product::*;
use gemmesh_c::sharded::*;
use gemmesh_c::status::gemmesh_status;
use gemmesh_c::types::*;
use support::*;

const BF16: gemmesh_dtype = gemmesh_dtype::GEMMESH_BF16;

const EXTREMES: [usize; 11] = [
    0,
    1,
    5,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 62) + 1,
    1 << 63,
    (1 << 63) + 16,
    usize::MAX - 15,
    usize::MAX,
];

/// Numbers of which no memory is allocated.
fn without_memory() -> impl Iterator<Item = usize> {
    EXTREMES
        .into_iter()
        .filter(|&number| number != (1 << 31) - 1)
}

/// Checks that a call ends with a status that says something of an argument, or is right.
#[track_caller]
fn told(status: gemmesh_status) -> bool {
    let allowed = [
        OK,
        ARGUMENT,
        gemmesh_status::GEMMESH_ERROR_OUT_OF_MEMORY,
        gemmesh_status::GEMMESH_ERROR_MISUSE,
    ];
    assert!(allowed.contains(&status), "{status:?}: {}", sentence());
    status == OK
}

unsafe extern "C" fn accept(_: *const gemmesh_rows, _: *mut c_void) -> c_int {
    0
}

/// The only weight of a product, before a page that cannot be read.
struct LastOfPage {
    pages: *mut c_void,
    weight: *const gemmesh_operand,
}

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        length: usize,
        protection: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn mprotect(at: *mut c_void, length: usize, protection: c_int) -> c_int;
    fn munmap(at: *mut c_void, length: usize) -> c_int;
}

const PAGE: usize = 4096;

impl LastOfPage {
    fn new(weight: gemmesh_operand) -> LastOfPage {
        const READ_WRITE: c_int = 3;
        const PRIVATE_ANONYMOUS: c_int = 0x22;
        // SAFETY: a new mapping of two pages, of which the first is written.
        unsafe {
            let pages = mmap(null_mut(), 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0);
            assert_ne!(pages.addr(), usize::MAX);
            assert_eq!(mprotect(pages.byte_add(PAGE), PAGE, 0), 0);
            let last = pages.byte_add(PAGE - size_of::<gemmesh_operand>());
            last.cast::<gemmesh_operand>().write_unaligned(weight);
            LastOfPage {
                pages,
                weight: last.cast(),
            }
        }
    }
}

impl Drop for LastOfPage {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's.
        unsafe { munmap(self.pages, 2 * PAGE) };
    }
}

#[test]
fn counts_are_checked_before_what_they_count_is_read() {
    ranks(1, |group, _| {
        let (mut a, mut b) = ([bf16::ONE; 8], [bf16::ONE; 12]);
        let mut y = [bf16::ZERO; 6];
        let a = operand(memory(&mut a, 2, 4));
        let out = output(memory(&mut y, 2, 3));
        let only = LastOfPage::new(operand(memory(&mut b, 3, 4)));
        assert!(only.weight.is_aligned());
        let product = product(gemmesh_product_kind::GEMMESH_MATMUL, BF16);
        for count in EXTREMES.into_iter().filter(|&count| count > 4) {
            let given = gemmesh_product_call {
                a: &a,
                weights: only.weight,
                weight_count: count,
                outputs: &out,
                output_count: 1,
                ..call()
            };
            // SAFETY: pointers to live values. As many as the count says must not be read.
            let status = unsafe { gemmesh_run(group, &product, &given) };
            fails(status, ARGUMENT, "the count of weights");
            let outputs = gemmesh_product_call {
                weight_count: 1,
                output_count: count,
                ..given
            };
            // SAFETY: as above.
            let status = unsafe { gemmesh_run(group, &product, &outputs) };
            fails(status, ARGUMENT, "the count of outputs");
        }
        let last_usize = only.weight.wrapping_add(1).cast::<usize>().wrapping_sub(1);
        let mut matrix = null_mut();
        for count in EXTREMES.into_iter().filter(|&count| count > 4) {
            // SAFETY: as above.
            unsafe {
                let (kind, bf16) = (&product, BF16 as u32);
                let status = gemmesh_supported(group, kind, 2, 4, null(), 0, last_usize, count);
                fails(status, ARGUMENT, "the count of widths");
                let status = gemmesh_supported(group, kind, 2, 4, last_usize, count, &3, 1);
                fails(status, ARGUMENT, "the count of rows");
                let status =
                    gemmesh_sharded_new_by_rank(group, bf16, last_usize, count, 8, &mut matrix);
                fails(status, ARGUMENT, "the count of rows");
                let scaled = gemmesh_product {
                    weight_scaling: last_usize.cast(),
                    weight_scaling_count: count,
                    ..product
                };
                let status = gemmesh_supported(group, &scaled, 2, 4, null(), 0, &3, 1);
                fails(status, ARGUMENT, "the count of weight_scaling");
            }
        }
    });
}

#[test]
fn descriptions_of_memory_are_checked() {
    ranks(1, |group, _| {
        let mut values = [bf16::ONE; 64];
        let right = memory(&mut values, 8, 8);
        let mut other = [bf16::ONE; 64];
        let other = memory(&mut other, 8, 8);
        let product = product(gemmesh_product_kind::GEMMESH_MATMUL, BF16);
        let mut refused = 0;
        for number in EXTREMES {
            for field in 0..4 {
                let mut wrong = right;
                match field {
                    0 => wrong.rows = number,
                    1 => wrong.columns = number,
                    2 => wrong.pitch = number,
                    _ => wrong.address = std::ptr::without_provenance_mut(number),
                }
                // Wrong numbers that memory could have cannot be told from right ones.
                let is_possible = match field {
                    2 => number == 0 || number == 1 << 31 || number == 1 << 32,
                    3 => number != 0 && number < usize::MAX - 15,
                    _ => false,
                };
                if is_possible {
                    continue;
                }
                // Fewer rows and columns are a part of the memory.
                let is_part = wrong.rows <= 8 && wrong.columns <= 8 && field < 2;
                let (weight, out) = (operand(other), output(other));
                let wrong_a = operand(wrong);
                let given = gemmesh_product_call {
                    a: &wrong_a,
                    weights: &weight,
                    weight_count: 1,
                    outputs: &out,
                    output_count: 1,
                    ..call()
                };
                // SAFETY: pointers to live values; what is larger than memory is refused.
                unsafe {
                    if !is_part {
                        refused += usize::from(!told(gemmesh_copy(group, &wrong, &other)));
                        refused +=
                            usize::from(!told(gemmesh_reduce_scatter(group, &wrong, &other)));
                    }
                    let bytes = other.address.cast();
                    refused +=
                        usize::from(!told(gemmesh_copy_from_host(group, &wrong, bytes, 128)));
                    refused += usize::from(!told(gemmesh_copy_to_host(group, &wrong, bytes, 128)));
                    refused += usize::from(!told(gemmesh_run(group, &product, &given)));
                }
            }
        }
        assert!(refused > 100, "{refused}");
    });
}

#[test]
fn shapes_counts_and_ranks_are_checked() {
    ranks(1, |group, _| {
        let bf16 = BF16 as u32;
        let x = sharded::<bf16>(group, 4, 8);
        let mut sums = [0f32; 16];
        let out = memory(&mut sums, 4, 4);
        for one in without_memory() {
            for other in without_memory() {
                // SAFETY: pointers to live values.
                unsafe {
                    let mut matrix = null_mut();
                    if told(gemmesh_matrix_zeros(group, bf16, one, other, &mut matrix)) {
                        ok(gemmesh_matrix_free(matrix));
                    }
                    let mut made = null_mut();
                    for status in [
                        gemmesh_sharded_new(group, bf16, one, other, &mut made),
                        gemmesh_sharded_new_with_capacity(group, bf16, one, other, &mut made),
                        gemmesh_sharded_new_by_rank(group, bf16, &one, 1, other, &mut made),
                        gemmesh_sharded_new_staged(group, bf16, one, 8, other, &mut made),
                    ] {
                        told(status);
                    }
                    told(gemmesh_sharded_free(made));
                    told(gemmesh_sharded_set_rows(x, &one, 1));
                    let mut matmul = product(gemmesh_product_kind::GEMMESH_MATMUL, BF16);
                    matmul.weight_layout = (one % 2) as u32;
                    told(gemmesh_supported(
                        group,
                        &matmul,
                        one,
                        other,
                        null(),
                        0,
                        &one,
                        1,
                    ));
                    let mut prepared = null_mut();
                    if told(gemmesh_prepare(
                        group,
                        &matmul,
                        one,
                        other,
                        null(),
                        &one,
                        1,
                        &mut prepared,
                    )) {
                        ok(gemmesh_prepared_free(prepared));
                    }
                    matmul.kind = gemmesh_product_kind::GEMMESH_ALL_GATHER_MATMUL as u32;
                    matmul.stages = other;
                    told(gemmesh_supported(group, &matmul, one, 8, &one, 1, &8, 1));
                    let produce = gemmesh_produce_and_reduce_scatter;
                    told(produce(
                        group,
                        one,
                        null(),
                        0,
                        &out,
                        other,
                        Some(accept),
                        null_mut(),
                    ));
                    told(produce(
                        group,
                        one,
                        &other,
                        1,
                        &out,
                        1,
                        Some(accept),
                        null_mut(),
                    ));
                }
            }
            // SAFETY: pointers to live values.
            unsafe {
                ok(gemmesh_sharded_set_rows(x, &4, 1));
                told(gemmesh_broadcast(group, x, one));
                let gather = gemmesh_all_gather_and_consume;
                told(gather(group, x, one, 1, Some(accept), null_mut()));
                told(gather(group, x, 1, one, Some(accept), null_mut()));
                let exchange = gemmesh_produce_and_all_to_all;
                let (none, accept) = (null(), Some(accept as _));
                told(exchange(group, x, none, 0, one, accept, null_mut()));
                told(exchange(group, x, &one, 1, 1, accept, null_mut()));
                let (mut range, mut count) = (gemmesh_range::default(), 0);
                ok(gemmesh_sharded_rows_of(x, one, &mut range));
                ok(gemmesh_sharded_blocks_of(x, one, &mut range, 1, &mut count));
                let (mut rows, mut columns) = ([0; 1], 0);
                ok(gemmesh_group_even_rows(group, one, rows.as_mut_ptr(), 1));
                told(gemmesh_group_even_rows(group, 4, rows.as_mut_ptr(), one));
                for kind in 0..8 {
                    let scaling = gemmesh_scaling {
                        kind,
                        first_row: one,
                        first_column: one,
                    };
                    told(gemmesh_scale_columns(group, &scaling, one, &mut columns));
                }
                let mut part = null_mut();
                ok(gemmesh_group_split(group, one, one, null(), &mut part));
                ok(gemmesh_group_free(part));
            }
        }
        // SAFETY: the handle is live.
        ok(unsafe { gemmesh_sharded_free(x) });
    });
}

#[test]
fn messages_that_are_too_long_are_refused() {
    for bytes in EXTREMES.into_iter().filter(|&bytes| bytes > 5) {
        ranks(1, |group, _| {
            let mut byte = [0u8; 8];
            let (mine, all) = (byte.as_ptr().cast(), byte.as_mut_ptr().cast());
            // SAFETY: pointers to live values; there are not as many bytes, so they must not be read.
            let status = unsafe { gemmesh_all_gather_bytes(group, mine, all, bytes) };
            assert_ne!(status, OK);
            assert_ne!(
                status,
                gemmesh_status::GEMMESH_ERROR_INTERNAL,
                "{}",
                sentence()
            );
        });
    }
}

unsafe extern "C" fn not_called(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
) -> c_int {
    std::process::abort()
}

#[test]
fn options_and_numbers_of_ranks_are_checked() {
    let mut refused = 0;
    let mut open = |rank: usize, world: usize, options: gemmesh_group_options| {
        let mut group = null_mut();
        // SAFETY: pointers to live values.
        unsafe {
            let at = address();
            match told(gemmesh_group_connect(
                rank,
                world,
                at.as_ptr(),
                &options,
                &mut group,
            )) {
                true => ok(gemmesh_group_free(group)),
                false => refused += 1,
            }
        }
    };
    for number in EXTREMES {
        let defaults = default_options();
        let time = number as u64;
        // A time so short may pass.
        if number == 0 || number > 5 {
            open(
                0,
                1,
                gemmesh_group_options {
                    timeout_ms: time,
                    ..defaults
                },
            );
            open(
                0,
                1,
                gemmesh_group_options {
                    arrival_timeout_ms: time,
                    ..defaults
                },
            );
            open(
                0,
                1,
                gemmesh_group_options {
                    host_timeout_ms: time,
                    ..defaults
                },
            );
        }
        open(
            0,
            1,
            gemmesh_group_options {
                workers: number,
                ..defaults
            },
        );
        open(
            0,
            1,
            gemmesh_group_options {
                max_ctas: number,
                ..defaults
            },
        );
        open(
            0,
            1,
            gemmesh_group_options {
                device: number as i64,
                ..defaults
            },
        );
        if number > 5 {
            open(number, 1, defaults);
            open(0, number, defaults);
            open(number, number, defaults);
            let mut group = null_mut();
            // SAFETY: as above; the function is not called.
            let status = unsafe {
                let gather = Some(not_called as _);
                gemmesh_group_connect_with(0, number, gather, null_mut(), null(), &mut group)
            };
            assert!(!told(status));
        }
    }
    assert!(refused > 30, "{refused}");
}
