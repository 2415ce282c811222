//! Every operation, by the functions of the header.
#![allow(unsafe_code)]

mod support;

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};

use gemmesh::{F8E4M3, bf16};
use gemmesh_c::collectives::*;
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::pipelines::*;
use gemmesh_c::product::*;
use gemmesh_c::sharded::*;
use gemmesh_c::types::*;
use support::*;

const BF16: gemmesh_dtype = gemmesh_dtype::GEMMESH_BF16;
const F8: gemmesh_dtype = gemmesh_dtype::GEMMESH_F8E4M3;

/// Values whose sums bf16 holds exactly.
fn of(row: usize, column: usize) -> bf16 {
    bf16::from_f32(((row + column) % 3) as f32)
}

/// Σ of(i, k) * of(j, k)
fn exact(i: usize, j: usize, k: usize) -> f32 {
    (0..k).map(|c| of(i, c).to_f32() * of(j, c).to_f32()).sum()
}

fn matrix(rows: usize, columns: usize) -> Vec<bf16> {
    let at = |index| of(index / columns, index % columns);
    (0..rows * columns).map(at).collect()
}

#[test]
fn gathered_products_add_bias_and_residual_and_activate() {
    const M: usize = 6;
    const N: usize = 4;
    const K: usize = 16;
    ranks(2, |group, _| {
        let x = sharded::<bf16>(group, M, K);
        fill(group, x, of);
        let (mut w, mut y) = (matrix(N, K), vec![bf16::ZERO; M * N]);
        let mut bias = vec![bf16::from_f32(-10.0); N];
        let mut residual = vec![bf16::ONE; M * N];
        let (bias, residual) = (memory(&mut bias, 1, N), memory(&mut residual, M, N));
        let a = sharded_operand(x);
        let (weight, out) = (operand(memory(&mut w, N, K)), output(memory(&mut y, M, N)));
        let call = gemmesh_product_call {
            sharded_a: &a,
            weights: &weight,
            weight_count: 1,
            outputs: &out,
            output_count: 1,
            bias: &bias,
            residual: &residual,
            ..call()
        };
        let product = gemmesh_product {
            activation: gemmesh_activation::GEMMESH_RELU as u32,
            constant_weights: 1,
            route: gemmesh_route::GEMMESH_ROUTE_PUSH as u32,
            ..product(gemmesh_product_kind::GEMMESH_ALL_GATHER_MATMUL, BF16)
        };
        let (mut prepared, mut lines) = (null_mut(), null());
        // SAFETY: pointers to live values, in all tests.
        unsafe {
            ok(gemmesh_supported(group, &product, M, K, null(), 0, &N, 1));
            ok(gemmesh_run(group, &product, &call));
            ok(gemmesh_synchronize(group));
            ok(gemmesh_prepare(
                group,
                &product,
                0,
                0,
                x,
                &N,
                1,
                &mut prepared,
            ));
            ok(gemmesh_prepared_explain(prepared, &mut lines));
            let lines = CStr::from_ptr(lines).to_str().unwrap();
            assert!(lines.contains("is computed in tiles"), "{lines}");
            assert!(lines.contains("Route::Push"), "{lines}");
        }
        let expected = |i, j| (exact(i, j, K) - 10.0).max(0.0) + 1.0;
        for repeat in 0..2 {
            for (index, y) in y.iter_mut().enumerate() {
                assert_eq!(
                    y.to_f32(),
                    expected(index / N, index % N),
                    "{repeat}: {index}"
                );
            }
            // SAFETY: as above.
            unsafe {
                ok(gemmesh_prepared_run(prepared, &call));
                ok(gemmesh_synchronize(group));
            }
        }
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_prepared_free(prepared));
            ok(gemmesh_sharded_free(x));
        }
    });
}

#[test]
fn products_of_one_rank_gate_and_take_weights_of_both_layouts() {
    const M: usize = 3;
    const N: usize = 4;
    const K: usize = 8;
    ranks(1, |group, _| {
        let (mut a, mut y) = (matrix(M, K), vec![bf16::ZERO; M * N]);
        let transposed = |index| of(index % N, index / N);
        let mut gate: Vec<_> = (0..N * K).map(transposed).collect();
        let mut up = vec![bf16::ONE; K * N];
        let weights = [
            operand(memory(&mut gate, K, N)),
            operand(memory(&mut up, K, N)),
        ];
        let (rows, out) = (operand(memory(&mut a, M, K)), output(memory(&mut y, M, N)));
        let product = gemmesh_product {
            gated: 1,
            weight_layout: gemmesh_weight_layout::GEMMESH_WEIGHTS_KN as u32,
            ..product(gemmesh_product_kind::GEMMESH_MATMUL, BF16)
        };
        let call = gemmesh_product_call {
            a: &rows,
            weights: weights.as_ptr(),
            weight_count: 2,
            outputs: &out,
            output_count: 1,
            ..call()
        };
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_run(group, &product, &call));
            ok(gemmesh_synchronize(group));
        }
        for (index, y) in y.iter().enumerate() {
            let (i, j) = (index / N, index % N);
            let sum: f32 = (0..K).map(|c| of(i, c).to_f32()).sum();
            assert_eq!(*y, bf16::from_f32(exact(i, j, K) * sum));
        }
    });
}

#[test]
fn sums_over_ranks_go_to_own_rows_and_to_sharded_matrices() {
    const M: usize = 6;
    const N: usize = 4;
    const K: usize = 8;
    ranks(2, |group, rank| {
        let (mut a, mut w) = (matrix(M, K), matrix(N, K));
        let (rows, weight) = (operand(memory(&mut a, M, K)), operand(memory(&mut w, N, K)));
        // Rank 0 gets two rows of the sum.
        let split = [2, 4];
        let own = split[rank];
        let mut y = vec![0.0f32; own * N];
        let out = output(memory(&mut y, own, N));
        let (sum, next) = (sharded::<bf16>(group, M, N), sharded::<bf16>(group, M, N));
        let to_own = gemmesh_product_call {
            a: &rows,
            weights: &weight,
            weight_count: 1,
            outputs: &out,
            output_count: 1,
            ..call()
        };
        let to = |sharded_output| gemmesh_product_call {
            outputs: null(),
            output_count: 0,
            sharded_output,
            ..to_own
        };
        let scatter = product(gemmesh_product_kind::GEMMESH_MATMUL_REDUCE_SCATTER, BF16);
        let uneven = gemmesh_product {
            rows: split.as_ptr(),
            row_count: 2,
            ..scatter
        };
        let reduce = product(gemmesh_product_kind::GEMMESH_MATMUL_ALL_REDUCE, BF16);
        let mut prepared = null_mut();
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_run(group, &uneven, &to_own));
            ok(gemmesh_run(group, &scatter, &to(next)));
            ok(gemmesh_all_gather(group, next));
            ok(gemmesh_prepare(
                group,
                &reduce,
                M,
                K,
                sum,
                &N,
                1,
                &mut prepared,
            ));
            ok(gemmesh_prepared_run(prepared, &to(sum)));
            ok(gemmesh_synchronize(group));
            ok(gemmesh_prepared_free(prepared));
        }
        let first = rank * split[0];
        for (index, y) in y.iter().enumerate() {
            assert_eq!(*y, 2.0 * exact(first + index / N, index % N, K));
        }
        for matrix in [sum, next] {
            for (index, y) in all_of::<bf16>(group, matrix).iter().enumerate() {
                assert_eq!(y.to_f32(), 2.0 * exact(index / N, index % N, K));
            }
            // SAFETY: as above.
            ok(unsafe { gemmesh_sharded_free(matrix) });
        }
    });
}

/// K = 192 of each of two ranks, of which the second begins with column 64 of a block.
#[test]
fn parts_of_k_that_begin_inside_a_block_are_summed_up() {
    const M: usize = 4;
    const N: usize = 16;
    const K: usize = 192;
    ranks(2, |group, rank| {
        let first_column = rank * K % 128;
        let how = gemmesh_quantization {
            kind: gemmesh_quantization_kind::GEMMESH_QUANTIZATION_BLOCKS as u32,
            power_of_two: 0,
            first_column,
        };
        let scaling = gemmesh_scaling {
            kind: gemmesh_scaling_kind::GEMMESH_SCALING_BLOCKS as u32,
            first_row: 0,
            first_column,
        };
        let mut raw = vec![bf16::from_f32(3.0); M * K];
        let raw = memory(&mut raw, M, K);
        let (mut a, mut of_a) = (vec![F8E4M3::from_f32(0.0); M * K], vec![0.0f32; M * 2]);
        let (a, of_a) = (memory(&mut a, M, K), memory(&mut of_a, M, 2));
        let (mut w, mut of_w) = (vec![F8E4M3::from_f32(2.0); N * K], [0.25f32, 0.5]);
        let (w, of_w) = (memory(&mut w, N, K), memory(&mut of_w, 1, 2));
        let scaled = |values, scales| gemmesh_operand {
            scales,
            scaling,
            ..operand(values)
        };
        let (rows, weight) = (scaled(a, &of_a as *const _), scaled(w, &of_w as *const _));
        let sums = sharded::<bf16>(group, M, N);
        let call = gemmesh_product_call {
            a: &rows,
            weights: &weight,
            weight_count: 1,
            sharded_output: sums,
            ..call()
        };
        let asked = product(gemmesh_product_kind::GEMMESH_MATMUL_ALL_REDUCE, F8);
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_quantize(group, &raw, &a, &of_a, &how));
            ok(gemmesh_run(group, &asked, &call));
            ok(gemmesh_synchronize(group));
        }
        // The first rank has blocks of 128 and 64 columns, and the second of 64 and 128.
        let expected = 6.0 * (0.25 * 128.0 + 0.5 * 64.0 + 0.25 * 64.0 + 0.5 * 128.0);
        let found = all_of::<bf16>(group, sums);
        assert!(found.iter().all(|x| x.to_f32() == expected), "{found:?}");
        // SAFETY: as above.
        ok(unsafe { gemmesh_sharded_free(sums) });
    });
}

#[test]
fn fp8_is_made_gathered_with_its_scales_and_quantised_again() {
    const M: usize = 4;
    const N: usize = 16;
    const K: usize = 256;
    const BLOCKS: gemmesh_quantization = gemmesh_quantization {
        kind: gemmesh_quantization_kind::GEMMESH_QUANTIZATION_BLOCKS as u32,
        power_of_two: 0,
        first_column: 0,
    };
    ranks(2, |group, _| {
        let own = M / 2;
        let of_a = gemmesh_scaling {
            kind: gemmesh_scaling_kind::GEMMESH_SCALING_SHARDED_BLOCKS as u32,
            first_row: 0,
            first_column: 0,
        };
        let mut columns = 0;
        // SAFETY: as above.
        ok(unsafe { gemmesh_scale_columns(group, &of_a, K, &mut columns) });
        assert_eq!(columns, K / 128);
        let (x, scales) = (
            sharded::<F8E4M3>(group, M, K),
            sharded::<f32>(group, M, columns),
        );
        let mut raw = vec![bf16::from_f32(3.0); own * K];
        let raw = memory(&mut raw, own, K);
        let (mut x_rows, mut scale_rows) = (raw, raw);
        let mut w = vec![F8E4M3::from_f32(2.0); N * K];
        let mut of_w = vec![0.25f32; columns];
        let of_w = memory(&mut of_w, 1, columns);
        let (mut y, mut of_y) = (vec![F8E4M3::from_f32(0.0); M * N], vec![0.0f32; M]);
        let of_y = memory(&mut of_y, M, 1);
        let weight = gemmesh_operand {
            scales: &of_w,
            scaling: gemmesh_scaling {
                kind: gemmesh_scaling_kind::GEMMESH_SCALING_BLOCKS as u32,
                first_row: 0,
                first_column: 0,
            },
            ..operand(memory(&mut w, N, K))
        };
        let a = gemmesh_sharded_operand {
            sharded_scales: scales,
            scaling: of_a,
            ..sharded_operand(x)
        };
        let out = gemmesh_output {
            scales: &of_y,
            quantization: BLOCKS,
            ..output(memory(&mut y, M, N))
        };
        let call = gemmesh_product_call {
            sharded_a: &a,
            weights: &weight,
            weight_count: 1,
            outputs: &out,
            output_count: 1,
            ..call()
        };
        let asked = product(gemmesh_product_kind::GEMMESH_ALL_GATHER_MATMUL, F8);
        let prepared_for = gemmesh_product {
            scaling: a.scaling,
            weight_scaling: &weight.scaling,
            weight_scaling_count: 1,
            quantization: BLOCKS,
            ..asked
        };
        let mut prepared = null_mut();
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_sharded_own_rows(x, &mut x_rows));
            ok(gemmesh_sharded_own_rows(scales, &mut scale_rows));
            ok(gemmesh_quantize(group, &raw, &x_rows, &scale_rows, &BLOCKS));
            ok(gemmesh_run(group, &asked, &call));
            ok(gemmesh_prepare(
                group,
                &prepared_for,
                0,
                0,
                x,
                &N,
                1,
                &mut prepared,
            ));
            ok(gemmesh_prepared_run(prepared, &call));
            ok(gemmesh_synchronize(group));
            ok(gemmesh_prepared_free(prepared));
            let of_y = std::slice::from_raw_parts(of_y.address.cast::<f32>(), M);
            for (index, y) in y.iter().enumerate() {
                let found = y.to_f32() * of_y[index / N];
                let exact = 3.0 * 0.5 * K as f32;
                assert!(
                    (found - exact).abs() <= exact / 16.0,
                    "{found}, not {exact}"
                );
            }
            ok(gemmesh_sharded_free(x));
            ok(gemmesh_sharded_free(scales));
        }
    });
}

#[test]
fn collectives_move_and_add_rows() {
    ranks(2, |group, rank| {
        let numbers = sharded::<u32>(group, 4, 1);
        fill(group, numbers, |row, _| row as u32 + 1);
        let mut whole = memory::<u32>(&mut [], 0, 0);
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_all_gather(group, numbers));
            assert_eq!(all_of::<u32>(group, numbers), [1, 2, 3, 4]);
            ok(gemmesh_sharded_whole(numbers, &mut whole));
            let mut own: Vec<u32> = (0..4).map(|n| 10 * rank as u32 + n).collect();
            let own = memory(&mut own, 4, 1);
            ok(gemmesh_copy(group, &own, &whole));
            ok(gemmesh_broadcast(group, numbers, 1));
            assert_eq!(all_of::<u32>(group, numbers), [10, 11, 12, 13]);
            ok(gemmesh_all_to_all(group, &own, numbers, null(), 0));
            let expected = [[0, 1, 10, 11], [2, 3, 12, 13]];
            assert_eq!(all_of::<u32>(group, numbers), expected[rank]);
            let counts = [3, 1, 1, 3usize];
            ok(gemmesh_all_to_all(group, &own, numbers, counts.as_ptr(), 4));
            let expected = [[0, 1, 2, 10], [3, 11, 12, 13]];
            assert_eq!(all_of::<u32>(group, numbers), expected[rank]);
            let (sum, mut mine) = (sharded::<f32>(group, 4, 1), [0.0f32; 2]);
            let mut addends = [1.0f32, 2.0, 3.0, 4.0];
            let addends = memory(&mut addends, 4, 1);
            ok(gemmesh_all_reduce(group, &addends, sum));
            assert_eq!(all_of::<f32>(group, sum), [2.0, 4.0, 6.0, 8.0]);
            ok(gemmesh_reduce_scatter(
                group,
                &addends,
                &memory(&mut mine, 2, 1),
            ));
            ok(gemmesh_synchronize(group));
            assert_eq!(mine, [[2.0, 4.0], [6.0, 8.0]][rank]);
            ok(gemmesh_sharded_free(numbers));
            ok(gemmesh_sharded_free(sum));
        }
    });
}

/// Adds up what it gets.
unsafe extern "C" fn consume(rows: *const gemmesh_rows, context: *mut c_void) -> c_int {
    // SAFETY: rows of f32 in one piece, and the sum of the test.
    unsafe {
        let memory = (*rows).memory;
        assert_eq!(memory.rows, (*rows).rows.count);
        let values = std::slice::from_raw_parts(memory.address.cast::<f32>(), memory.rows);
        *context.cast::<f32>() += values.iter().sum::<f32>();
    }
    0
}

/// Makes rows of the numbers of their places, 100 more for each rank that gets them.
unsafe extern "C" fn produce(rows: *const gemmesh_rows, _: *mut c_void) -> c_int {
    // SAFETY: rows of f32, with a pitch.
    unsafe {
        let rows = &*rows;
        for index in 0..rows.rows.count {
            let to = rows.memory.address.byte_add(index * rows.memory.pitch);
            let value = rows.rows.first + index + 100 * rows.rank;
            to.cast::<f32>().write(value as f32);
        }
    }
    0
}

#[test]
fn callbacks_get_rows_and_make_them() {
    ranks(2, |group, rank| {
        let rows = sharded::<f32>(group, 6, 1);
        fill(group, rows, |row, _| row as f32);
        let (mut sum, mut out) = (0.0f32, [0.0f32; 3]);
        // SAFETY: as above.
        unsafe {
            let context = (&raw mut sum).cast();
            ok(gemmesh_all_gather_and_consume(
                group,
                rows,
                2,
                1,
                Some(consume),
                context,
            ));
            assert_eq!(sum, 15.0);
            let to = memory(&mut out, 3, 1);
            let produce = Some(produce as _);
            let rows_of = [3usize, 3];
            let rows_of = if rank == 0 { null() } else { rows_of.as_ptr() };
            ok(gemmesh_produce_and_reduce_scatter(
                group,
                6,
                rows_of,
                2,
                &to,
                0,
                produce,
                null_mut(),
            ));
            ok(gemmesh_synchronize(group));
            let first = (3 * rank + 100 * rank) as f32;
            assert_eq!(out, [0.0, 1.0, 2.0].map(|n| 2.0 * (first + n)));
            let exchange = |counts: &[usize]| {
                let first = if counts.is_empty() {
                    null()
                } else {
                    counts.as_ptr()
                };
                let exchange = gemmesh_produce_and_all_to_all;
                let count = counts.len();
                ok(exchange(group, rows, first, count, 1, produce, null_mut()));
                ok(gemmesh_synchronize(group));
            };
            exchange(&[]);
            let blocks = [0.0, 1.0, 2.0, 0.0, 1.0, 2.0].map(|n| n + 100.0 * rank as f32);
            assert_eq!(all_of::<f32>(group, rows), blocks);
            exchange(&[1, 0, 3, 2]);
            let expected = match rank {
                0 => [0.0, 0.0, 1.0, 2.0, 1.0, 2.0],
                _ => [100.0, 101.0, 102.0, 100.0, 101.0, 102.0],
            };
            assert_eq!(all_of::<f32>(group, rows), expected);
            ok(gemmesh_sharded_free(rows));
        }
    });
}

#[test]
fn groups_split_gather_bytes_and_outlive_their_handles() {
    ranks(3, |group, rank| {
        let (mut part, mut found, mut name) = (null_mut(), 0, null());
        let (mut all, mut times) = ([0u8; 6], [1u64; 3]);
        let mine = [rank as u8, 7];
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_all_gather_bytes(
                group,
                mine.as_ptr().cast(),
                all.as_mut_ptr().cast(),
                2,
            ));
            assert_eq!(all, [0, 7, 1, 7, 2, 7]);
            ok(gemmesh_wait_times(group, times.as_mut_ptr(), 3));
            assert_eq!(times[rank], 0);
            let options = gemmesh_group_options {
                name: c"pair".as_ptr(),
                ..default_options()
            };
            ok(gemmesh_group_split(
                group,
                rank / 2,
                rank,
                &options,
                &mut part,
            ));
            ok(gemmesh_group_world_size(part, &mut found));
            assert_eq!(found, [2, 2, 1][rank]);
            ok(gemmesh_group_name(part, &mut name));
            assert!(CStr::from_ptr(name).to_str().unwrap().contains("pair"));
            let mut backend = gemmesh_backend::GEMMESH_CUDA;
            ok(gemmesh_group_backend(part, &mut backend));
            assert_eq!(backend, gemmesh_backend::GEMMESH_HOST);
            let mut stream = (&raw mut found).cast();
            ok(gemmesh_group_stream(part, &mut stream));
            assert!(stream.is_null());
            ok(gemmesh_group_set_stream(part, null_mut()));
            ok(gemmesh_record_event(part, null_mut()));
            ok(gemmesh_wait_for_event(part, null_mut()));
            let mut matrix = null_mut();
            let mut place = memory::<f32>(&mut [], 0, 0);
            ok(gemmesh_matrix_zeros(
                part,
                gemmesh_dtype::GEMMESH_F32 as u32,
                2,
                3,
                &mut matrix,
            ));
            ok(gemmesh_barrier(part));
            ok(gemmesh_group_free(part));
            ok(gemmesh_matrix_memory(matrix, &mut place));
            assert_eq!([place.rows, place.columns, place.pitch], [2, 3, 12]);
            assert_eq!(place.address.cast::<f32>().read(), 0.0);
            ok(gemmesh_matrix_free(matrix));
            ok(gemmesh_check(group));
        }
    });
}

#[test]
fn sharded_matrices_say_who_owns_which_rows() {
    ranks(2, |group, rank| {
        let (mut matrix, mut staged) = (null_mut(), null_mut());
        let mut rows = [gemmesh_range::default(); 2];
        let (mut count, mut even) = (0, [0; 2]);
        let dtype = gemmesh_dtype::GEMMESH_F32 as u32;
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_sharded_new_with_capacity(
                group,
                dtype,
                8,
                2,
                &mut matrix,
            ));
            ok(gemmesh_group_even_rows(group, 3, even.as_mut_ptr(), 2));
            assert_eq!(even, [2, 1]);
            ok(gemmesh_sharded_set_rows(matrix, even.as_ptr(), 2));
            ok(gemmesh_sharded_rows_of(matrix, 1, &mut rows[0]));
            assert_eq!([rows[0].first, rows[0].count], [2, 1]);
            ok(gemmesh_sharded_capacity(matrix, &mut count));
            assert_eq!(count, 8);
            ok(gemmesh_sharded_free(matrix));
            ok(gemmesh_sharded_new_by_rank(
                group,
                dtype,
                even.as_ptr(),
                2,
                2,
                &mut matrix,
            ));
            fill(group, matrix, |row, _| row as f32);
            ok(gemmesh_all_gather(group, matrix));
            assert_eq!(all_of::<f32>(group, matrix), [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
            ok(gemmesh_sharded_free(matrix));
            ok(gemmesh_sharded_new_staged(
                group,
                dtype,
                8,
                2,
                2,
                &mut staged,
            ));
            ok(gemmesh_sharded_blocks_of(
                staged,
                rank,
                rows.as_mut_ptr(),
                2,
                &mut count,
            ));
            assert_eq!(count, 2);
            assert_eq!(rows.map(|rows| rows.first), [2 * rank, 4 + 2 * rank]);
            ok(gemmesh_sharded_free(staged));
        }
    });
}

/// Gathers by channels: a context has its rank's end of them.
unsafe extern "C" fn gather(
    mine: *const c_void,
    all: *mut c_void,
    bytes: usize,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the context is that of the test, and there is room for the bytes of two ranks.
    unsafe {
        let meeting = &*context.cast::<(std::sync::Barrier, std::sync::Mutex<Vec<u8>>)>();
        let mine = std::slice::from_raw_parts(mine.cast::<u8>(), bytes);
        if mine[0] != b' ' {
            *meeting.1.lock().unwrap() = mine.into();
        }
        meeting.0.wait();
        let first = meeting.1.lock().unwrap().clone();
        for rank in 0..2 {
            all.cast::<u8>()
                .add(rank * bytes)
                .copy_from(first.as_ptr(), bytes);
        }
    }
    0
}

#[test]
fn ranks_meet_by_a_callback_that_gathers() {
    let meeting = (
        std::sync::Barrier::new(2),
        std::sync::Mutex::new(Vec::<u8>::new()),
    );
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let meeting = &meeting;
            scope.spawn(move || {
                let mut group = null_mut();
                let context = std::ptr::from_ref(meeting).cast_mut().cast();
                // SAFETY: as above.
                unsafe {
                    let gather = Some(gather as _);
                    ok(gemmesh_group_connect_with(
                        rank,
                        2,
                        gather,
                        context,
                        null(),
                        &mut group,
                    ));
                    ok(gemmesh_barrier(group));
                    ok(gemmesh_group_free(group));
                }
            });
        }
    });
}
