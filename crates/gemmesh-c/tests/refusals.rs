//! What is wrong is a status and a sentence, never undefined behaviour.
#![allow(unsafe_code)]

mod support;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use gemmesh::bf16;
use gemmesh_c::collectives::*;
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::pipelines::*;
use gemmesh_c::product::*;
use gemmesh_c::sharded::*;
use gemmesh_c::status::*;
use gemmesh_c::types::*;
use support::*;

const BF16: gemmesh_dtype = gemmesh_dtype::GEMMESH_BF16;
const RANK: gemmesh_status = gemmesh_status::GEMMESH_ERROR_RANK;

unsafe extern "C" fn not_called(
    _: *const c_void,
    _: *mut c_void,
    _: usize,
    _: *mut c_void,
) -> c_int {
    std::process::abort()
}

#[test]
fn null_pointers_and_foreign_handles_are_told() {
    let mut stray = 0u64;
    let foreign: *mut gemmesh_group = (&raw mut stray).cast();
    // SAFETY: handles are looked up and never followed; the other pointers are null. So in all tests.
    unsafe {
        fails(
            gemmesh_barrier(null()),
            ARGUMENT,
            "gemmesh_barrier: the handle of group is null",
        );
        fails(gemmesh_barrier(foreign), ARGUMENT, "no handle of this kind");
        fails(
            gemmesh_group_free(foreign),
            ARGUMENT,
            "no handle of this kind",
        );
        let none = gemmesh_group_connect(0, 1, null(), null(), null_mut());
        fails(none, ARGUMENT, "the pointer of group is null");
        let mut group = null_mut();
        let none = gemmesh_group_connect(0, 1, null(), null(), &mut group);
        fails(none, ARGUMENT, "the pointer of address is null");
        let none = gemmesh_group_connect_with(0, 1, None, null_mut(), null(), &mut group);
        fails(none, ARGUMENT, "the pointer of gather is null");
        // There is no room for what 0 ranks would gather.
        let none =
            gemmesh_group_connect_with(0, 0, Some(not_called), null_mut(), null(), &mut group);
        fails(none, ARGUMENT, "the world size is 0");
        let latin = gemmesh_group_connect(0, 1, c"caf\xe9".as_ptr(), null(), &mut group);
        fails(latin, ARGUMENT, "must be UTF-8");
        ok(gemmesh_group_free(null_mut()));
        ok(gemmesh_matrix_free(null_mut()));
        ok(gemmesh_sharded_free(null_mut()));
        ok(gemmesh_prepared_free(null_mut()));
        assert!(group.is_null());
    }
}

#[test]
fn freed_handles_are_told_also_when_their_place_is_used_again() {
    ranks(1, |group, _| {
        let mut matrix = null_mut();
        let mut place = memory::<f32>(&mut [], 0, 0);
        let f32 = gemmesh_dtype::GEMMESH_F32 as u32;
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_matrix_zeros(group, f32, 2, 2, &mut matrix));
            ok(gemmesh_matrix_free(matrix));
            fails(
                gemmesh_matrix_free(matrix),
                ARGUMENT,
                "freed or never given",
            );
            let freed = matrix;
            ok(gemmesh_matrix_zeros(group, f32, 2, 2, &mut matrix));
            fails(
                gemmesh_matrix_memory(freed, &mut place),
                ARGUMENT,
                "freed or never given",
            );
            // A handle of a different kind.
            fails(
                gemmesh_all_gather(group, matrix.cast()),
                ARGUMENT,
                "a live sharded matrix",
            );
            ok(gemmesh_matrix_free(matrix));
        }
    });
}

#[test]
fn errors_of_joining_name_calls_and_options_of_the_header() {
    let mut group = null_mut();
    let hasty = gemmesh_group_options {
        arrival_timeout_ms: 100,
        ..default_options()
    };
    // SAFETY: as above.
    unsafe {
        let missing = gemmesh_group_connect(0, 2, address().as_ptr(), &hasty, &mut group);
        fails(
            missing,
            gemmesh_status::GEMMESH_ERROR_RENDEZVOUS,
            "or raise arrival_timeout_ms of gemmesh_group_options",
        );
        let none = gemmesh_group_connect(2, 2, address().as_ptr(), null(), &mut group);
        fails(none, ARGUMENT, "gemmesh_group_connect: ");
        let call = CStr::from_ptr(gemmesh_last_error_call());
        assert_eq!(call, c"gemmesh_group_connect");
    }
}

#[test]
fn sizes_and_numbers_are_checked() {
    let mut group = null_mut();
    let with = |options: gemmesh_group_options, group| {
        // SAFETY: as above.
        unsafe { gemmesh_group_connect(0, 1, address().as_ptr(), &options, group) }
    };
    let sizeless = gemmesh_group_options {
        struct_size: 0,
        ..default_options()
    };
    fails(
        with(sizeless, &mut group),
        ARGUMENT,
        &format!(
            "struct_size of the options is 0 and must be {}, which gemmesh_group_options_default() sets",
            size_of::<gemmesh_group_options>()
        ),
    );
    let unknown = gemmesh_group_options {
        backend: 7,
        ..default_options()
    };
    fails(
        with(unknown, &mut group),
        ARGUMENT,
        "the gemmesh_backend of the options is 7",
    );
    let cuda = gemmesh_group_options {
        backend: gemmesh_backend::GEMMESH_CUDA as u32,
        ..default_options()
    };
    if !cfg!(feature = "cuda") {
        fails(
            with(cuda, &mut group),
            ARGUMENT,
            "rank 0: gemmesh_group_connect: this build of the library has the host backend only; ask",
        );
    }
    ranks(1, |group, _| {
        let product = product(gemmesh_product_kind::GEMMESH_MATMUL, BF16);
        let supported = |product: &gemmesh_product, words| {
            // SAFETY: as above.
            let status = unsafe { gemmesh_supported(group, product, 2, 2, null(), 0, &2, 1) };
            fails(status, ARGUMENT, words);
        };
        let changed = |change: fn(&mut gemmesh_product)| {
            let mut product = product;
            change(&mut product);
            product
        };
        supported(
            &changed(|p| p.struct_size -= 1),
            "struct_size of the product",
        );
        supported(
            &changed(|p| p.kind = 99),
            "the gemmesh_product_kind of the product is 99",
        );
        supported(&changed(|p| p.dtype = 0), "the gemmesh_dtype of a is 0");
        supported(&changed(|p| p.dtype = 3), "bf16, f16, f8e4m3 or f8e5m2");
        supported(
            &changed(|p| p.activation = 5),
            "the gemmesh_activation of the product is 5",
        );
        supported(
            &changed(|p| p.weight_layout = 2),
            "the gemmesh_weight_layout",
        );
        supported(&changed(|p| p.accumulation = 2), "the gemmesh_accumulation");
        supported(
            &changed(|p| p.scaling.kind = 8),
            "the gemmesh_scaling_kind of a is 8",
        );
        supported(
            &changed(|p| p.quantization.kind = 4),
            "the gemmesh_quantization_kind",
        );
        supported(
            &changed(|p| p.scaling.first_column = 16),
            "(first_row, first_column) of a is GEMMESH_SCALING_NONE and must be GEMMESH_SCALING_BLOCKS",
        );
        supported(
            &changed(|p| p.quantization.first_column = 16),
            "(first_column) of out is GEMMESH_QUANTIZATION_NONE and must be GEMMESH_QUANTIZATION_BLOCKS",
        );
        supported(
            &changed(|p| (p.quantization.kind, p.quantization.first_column) = (3, 16)),
            "of out is GEMMESH_QUANTIZATION_TRANSPOSED_BLOCKS and must be GEMMESH_QUANTIZATION_BLOCKS",
        );
        supported(
            &changed(|p| p.weight_scaling_count = 1),
            "the pointer of weight_scaling is null",
        );
    });
}

/// A product of 2 × 4 rows and a weight of so many columns.
fn multiply(
    group: *mut gemmesh_group,
    columns: usize,
    change: impl Fn(&mut gemmesh_product_call),
) -> gemmesh_status {
    let (mut a, mut b) = ([bf16::ONE; 8], vec![bf16::ONE; 3 * columns]);
    let mut y = [bf16::ZERO; 6];
    let a = operand(memory(&mut a, 2, 4));
    let b = operand(memory(&mut b, 3, columns));
    let out = output(memory(&mut y, 2, 3));
    let mut call = gemmesh_product_call {
        a: &a,
        weights: &b,
        weight_count: 1,
        outputs: &out,
        output_count: 1,
        ..call()
    };
    change(&mut call);
    let product = product(gemmesh_product_kind::GEMMESH_MATMUL, BF16);
    // SAFETY: as above.
    unsafe {
        let status = gemmesh_run(group, &product, &call);
        ok(gemmesh_synchronize(group));
        status
    }
}

#[test]
fn shapes_types_and_scales_that_do_not_fit_are_told() {
    ranks(1, |group, _| {
        ok(multiply(group, 4, |_| ()));
        let refused = |status, words| fails(status, ARGUMENT, words);
        refused(
            multiply(group, 5, |_| ()),
            "b [N, K] is [3, 5] and must be [3, 4]",
        );
        refused(
            multiply(group, 4, |call| call.a = null()),
            "the pointer of a is null",
        );
        refused(
            multiply(group, 4, |call| call.weights = null()),
            "the pointer of weights",
        );
        refused(
            multiply(group, 4, |call| call.struct_size = 8),
            "struct_size of the call is 8",
        );
        let many = |call: &mut gemmesh_product_call| call.weight_count = usize::MAX;
        refused(multiply(group, 4, many), "must be at most 4");
        let own = sharded_operand(null());
        let twice = |call: &mut gemmesh_product_call| call.sharded_a = &own;
        refused(multiply(group, 4, twice), "a and sharded_a");
        let mut values = [bf16::ONE; 8];
        let mut scaled = operand(memory(&mut values, 2, 4));
        scaled.scaling.kind = gemmesh_scaling_kind::GEMMESH_SCALING_TENSOR as u32;
        let alone = |call: &mut gemmesh_product_call| call.a = &scaled;
        refused(multiply(group, 4, alone), "without scales");
        let mut unknown = memory(&mut values, 2, 4);
        unknown.dtype = 77;
        let of_a = operand(unknown);
        let untyped = |call: &mut gemmesh_product_call| call.a = &of_a;
        refused(multiply(group, 4, untyped), "the gemmesh_dtype of a is 77");
        // SAFETY: as above.
        unsafe {
            assert_eq!(CStr::from_ptr(gemmesh_last_error_call()), c"gemmesh_run");
            assert_eq!(gemmesh_last_error_rank(), 0);
            let few = gemmesh_copy_from_host(group, &of_a.values, values.as_ptr().cast(), 3);
            refused(few, "the gemmesh_dtype of to is 77");
            let right = memory(&mut values, 2, 4);
            let few = gemmesh_copy_from_host(group, &right, values.as_ptr().cast(), 3);
            refused(few, "is 3 and must be 16");
        }
    });
}

unsafe extern "C" fn refuse(_: *const gemmesh_rows, _: *mut c_void) -> c_int {
    // SAFETY: a string.
    unsafe { gemmesh_set_reason(c"no more data".as_ptr()) };
    1
}

unsafe extern "C" fn accept(_: *const gemmesh_rows, _: *mut c_void) -> c_int {
    0
}

#[test]
fn a_callback_that_fails_ends_the_call_on_every_rank() {
    ranks(2, |group, rank| {
        let rows = sharded::<f32>(group, 4, 1);
        let consume: gemmesh_on_rows = match rank {
            1 => Some(refuse),
            _ => Some(accept),
        };
        // SAFETY: as above.
        unsafe {
            let first = gemmesh_all_gather_and_consume(group, rows, 0, 0, consume, null_mut());
            // Rank 0 may have got its rows before rank 1's function failed.
            if rank == 1 || first != OK {
                fails(first, RANK, "no more data");
            }
            fails(gemmesh_barrier(group), RANK, "no more data");
            assert_eq!(gemmesh_last_error_rank(), 1);
            fails(gemmesh_check(group), RANK, "has failed");
            ok(gemmesh_sharded_free(rows));
        }
    });
}

unsafe extern "C" fn call_again(_: *const gemmesh_rows, context: *mut c_void) -> c_int {
    // SAFETY: the context is the group's handle.
    let status = unsafe { gemmesh_synchronize(context.cast()) };
    assert_eq!(status, gemmesh_status::GEMMESH_ERROR_MISUSE);
    0
}

unsafe extern "C" fn set_rows(_: *const gemmesh_rows, context: *mut c_void) -> c_int {
    // SAFETY: the context is the matrix's handle.
    let status = unsafe { gemmesh_sharded_set_rows(context.cast(), [1].as_ptr(), 1) };
    assert_eq!(status, gemmesh_status::GEMMESH_ERROR_MISUSE);
    0
}

#[test]
fn callbacks_that_use_their_call_are_refused() {
    ranks(1, |group, _| {
        let rows = sharded::<f32>(group, 4, 1);
        // SAFETY: as above.
        unsafe {
            let (again, set) = (Some(call_again as _), Some(set_rows as _));
            ok(gemmesh_all_gather_and_consume(
                group,
                rows,
                0,
                0,
                again,
                group.cast(),
            ));
            ok(gemmesh_all_gather_and_consume(
                group,
                rows,
                0,
                0,
                set,
                rows.cast(),
            ));
            let none = gemmesh_all_gather_and_consume(group, rows, 0, 0, None, null_mut());
            fails(none, ARGUMENT, "the pointer of consume is null");
            ok(gemmesh_sharded_free(rows));
        }
    });
}

#[test]
fn every_rank_learns_whose_program_has_failed() {
    ranks(2, |group, rank| {
        // SAFETY: as above.
        let status = unsafe {
            match rank {
                1 => gemmesh_fail(group, c"no such file: weights".as_ptr()),
                _ => gemmesh_barrier(group),
            }
        };
        fails(status, RANK, "no such file: weights");
        assert_eq!(gemmesh_last_error_rank(), 1);
    });
}

#[test]
fn ranks_that_wait_are_told_of_an_argument_that_only_the_header_has() {
    ranks(2, |group, rank| {
        let rows = sharded::<f32>(group, 4, 1);
        // SAFETY: as above.
        let status = unsafe {
            match rank {
                1 => gemmesh_all_gather(group, null()),
                _ => gemmesh_all_gather(group, rows),
            }
        };
        // Rank 0 has waited, so its group is over.
        let expected = if rank == 1 { ARGUMENT } else { RANK };
        fails(
            status,
            expected,
            "rank 1: gemmesh_all_gather: the handle of a is null",
        );
        if rank == 0 {
            // SAFETY: as above.
            fails(
                unsafe { gemmesh_barrier(group) },
                RANK,
                "the group has failed",
            );
        }
        // SAFETY: as above.
        ok(unsafe { gemmesh_sharded_free(rows) });
    });
}

#[test]
fn bytes_of_different_lengths_are_told_on_every_rank() {
    ranks(2, |group, rank| {
        let mut all = [0u8; 4];
        // SAFETY: as above; there is room for two bytes of each rank.
        let status = unsafe {
            let mine = [1u8, 2];
            gemmesh_all_gather_bytes(
                group,
                mine.as_ptr().cast(),
                all.as_mut_ptr().cast(),
                1 + rank,
            )
        };
        fails(status, ARGUMENT, "the number of bytes of mine");
        // SAFETY: as above.
        ok(unsafe { gemmesh_barrier(group) });
    });
}

#[test]
fn the_last_error_is_that_of_the_thread() {
    // SAFETY: as above.
    fails(
        unsafe { gemmesh_barrier(null()) },
        ARGUMENT,
        "gemmesh_barrier",
    );
    std::thread::spawn(|| {
        assert_eq!(sentence(), "");
        assert_eq!(gemmesh_last_error_rank(), -1);
        assert!(gemmesh_last_error_call().is_null());
    })
    .join()
    .expect("no error there");
    assert!(sentence().contains("gemmesh_barrier"));
}
