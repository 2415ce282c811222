//! Matrices in memory of the caller's.

use gemmesh::error::Kind;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    Config, Cuda, Error, Group, Matmul, MatmulReduceScatter, Matrix, f16, matmul, reduce_scatter,
};

use crate::support::errors::kind_of;
use crate::support::gpu::*;
use crate::support::numbers::{Reference, bits, nan, normal};
use crate::test_name;

#[test]
fn matrices_in_memory_of_the_callers_work_and_nothing_beside_them_is_written() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let case = Case {
            rows: vec![130, 71],
            n: 203,
            k: 72,
            bias: true,
            config: None,
            seed: 5,
            ..Case::default()
        };
        let a_values = case.a::<f16>();
        let (b_values, bias_values) = case.b::<f16>(rank.rank);
        let bias_values = bias_values.unwrap();
        let (b_pitch, out_pitch) = (case.k * 2 + 48, (case.n * 2).next_multiple_of(16) + 80);
        let b_memory = Foreign::new(case.n * b_pitch);
        let out_memory = Foreign::new(case.m() * out_pitch);
        let mut placed = Placed::new(&group, &case, &a_values, &b_values, Some(&bias_values))?;
        // SAFETY: the memory is as large as the matrices, which are dropped before it.
        let mut b = unsafe { matrix_in(&group, &b_memory, [case.n, case.k], b_pitch)? };
        // SAFETY: likewise.
        let mut out = unsafe { matrix_in(&group, &out_memory, [case.m(), case.n], out_pitch)? };
        assert_eq!(b.as_device_ptr(), (b_memory.ptr, b_pitch));
        assert_eq!(out.shape(), [case.m(), case.n]);
        b.copy_from_host(&b_values)?;
        for shape in 0..SHAPES.len() {
            out.copy_from_host(&vec![nan(); case.m() * case.n])?;
            placed.a.poison(nan())?;
            let operation = Placed::operation(&placed.bias, Some(config(shape, 2, 2)));
            operation.run(&placed.a, &b, &mut out)?;
            let reference = Reference::new(&a_values, &b_values, Some(&bias_values), case.k);
            if let Err(what) = reference.check(&out.to_vec()?) {
                panic!("rank {}, kernel {shape}: {what}", rank.rank);
            }
            // What is documented: zeros up to the next multiple of eight elements.
            let written = (case.n * 2).next_multiple_of(16);
            let what = format!("kernel {shape}");
            assert_untouched_beside(&out_memory, out_pitch, written, &what);
            assert_untouched_beside(&b_memory, b_pitch, case.k * 2, &what);
        }
        pointers_that_do_not_fit_are_refused(&group, b_memory.ptr)?;
        drop((b, out, placed));
        Ok("right".into())
    }));
}

/// # Safety
/// The memory has room for the matrix, and outlives it.
unsafe fn matrix_in(
    group: &Group<Cuda>,
    memory: &Foreign,
    [rows, columns]: [usize; 2],
    pitch: usize,
) -> Result<Matrix<Cuda, f16>, Error> {
    // SAFETY: as the caller promises.
    unsafe { Matrix::from_device_ptr(group, memory.ptr, rows, columns, pitch) }
}

/// That nothing was written from byte `written` of each row on.
#[track_caller]
fn assert_untouched_beside(memory: &Foreign, pitch: usize, written: usize, what: &str) {
    for (row, bytes) in memory.read().chunks(pitch).enumerate() {
        assert!(
            bytes[written..].iter().all(|&byte| byte == 0x5a),
            "{what}, row {row}: written beyond the padding"
        );
    }
}

/// `begin` is where memory begins that has room for two rows.
fn pointers_that_do_not_fit_are_refused(group: &Group<Cuda>, begin: u64) -> Result<(), Error> {
    let refused = |ptr: u64, columns: usize, pitch: usize| {
        // SAFETY: within the memory if it were made, and never used.
        unsafe { Matrix::<Cuda, f16>::from_device_ptr(group, ptr, 2, columns, pitch) }.unwrap_err()
    };
    for (ptr, pitch) in [(begin + 2, 160), (begin, 152)] {
        let error = refused(ptr, 8, pitch);
        assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
        let place = error.call().and_then(|call| call.place());
        let is_here = place.is_some_and(|place| place.starts_with(concat!(file!(), ":")));
        assert!(is_here, "{error}");
    }
    // No rows lie nowhere.
    for ptr in [0, 2] {
        // SAFETY: it is no memory.
        let none = unsafe { Matrix::<Cuda, f16>::from_device_ptr(group, ptr, 0, 8, 16)? };
        assert_eq!(none.to_vec()?, []);
    }
    let error = refused(begin, 81, 160);
    assert!(
        matches!(error.kind(), Kind::Limit { min: 162, .. }),
        "{error}"
    );
    Ok(())
}

#[test]
fn sums_of_matrices_in_memory_of_the_callers_are_right_and_nothing_beside_them_is_written() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let rows = [130, 71];
        let [m, n, k] = [201, 203, 72 + 8 * rank.rank];
        let seed = 1 + rank.rank as u64;
        let (a_values, b_values) = (normal::<f16>(seed, m * k), normal::<f16>(!seed, n * k));
        let (in_pitch, out_pitch) = (k * 2 + 48, (n * 2).next_multiple_of(16) + 80);
        let [a_memory, b_memory] = [m, n].map(|rows| Foreign::new(rows * in_pitch));
        let own = rows[rank.rank];
        let out_memory = Foreign::new(own * out_pitch);
        let view = |memory: &Foreign, rows, columns, pitch| {
            // SAFETY: the memory is as large as the matrix, which is dropped before it.
            unsafe { matrix_in(&group, memory, [rows, columns], pitch) }
        };
        let mut a = view(&a_memory, m, k, in_pitch)?;
        let mut b = view(&b_memory, n, k, in_pitch)?;
        let mut out = view(&out_memory, own, n, out_pitch)?;
        a.copy_from_host(&a_values)?;
        b.copy_from_host(&b_values)?;
        let tile = TileShape::new(128, 128, 64)
            .with_stages(6)
            .with_cluster(2, 1);
        let config = |route| Config::new(tile, Chunking::new(1), route);
        let (plain_a, plain_b) = (
            group.upload(&a_values, m, k)?,
            group.upload(&b_values, n, k)?,
        );
        let mut plain = group.zeros::<f16>(own, n)?;
        let operation = MatmulReduceScatter::new().rows(&rows);
        let operation = operation.config(config(Route::Pull));
        operation.run(&plain_a, &plain_b, &mut plain)?;
        let expected = plain.to_vec()?;
        for route in [Route::Pull, Route::Push] {
            out.copy_from_host(&vec![nan(); own * n])?;
            let operation = MatmulReduceScatter::new().rows(&rows).config(config(route));
            operation.run(&a, &b, &mut out)?;
            assert!(bits(&out.to_vec()?) == bits(&expected), "{route:?}");
            let written = (n * 2).next_multiple_of(16);
            assert_untouched_beside(&out_memory, out_pitch, written, &format!("{route:?}"));
        }
        drop((a, b, out));
        Ok("right".into())
    }));
}

#[test]
fn outputs_lie_apart_from_operands_and_may_be_the_residual() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        // Kernels of few rows, of few tiles whose K is cut, and of many tiles.
        for [m, n, k] in [[2, 208, 4096], [130, 264, 8192], [384, 1032, 512]] {
            let memory = Foreign::new(2 * m * n + 4096);
            let square = |first: usize| {
                let place = memory.ptr + 2 * first as u64;
                // SAFETY: the memory is as large as the matrices, which are dropped before it.
                unsafe { Matrix::<Cuda, f16>::from_device_ptr(&group, place, m, n, 2 * n) }
            };
            let (a_values, b_values) = (normal::<f16>(1, m * k), normal::<f16>(2, n * k));
            let (a, b) = (
                group.upload(&a_values, m, k)?,
                group.upload(&b_values, n, k)?,
            );
            let added = normal::<f16>(3, m * n);
            let (mut expected, residual) = (group.zeros::<f16>(m, n)?, group.upload(&added, m, n)?);
            Matmul::new()
                .residual(&residual)
                .run(&a, &b, &mut expected)?;
            let (mut out, same, shifted) = (square(0)?, square(0)?, square(8)?);
            for _ in 0..20 {
                out.copy_from_host(&added)?;
                Matmul::new().residual(&same).run(&a, &b, &mut out)?;
                assert!(
                    bits(&out.to_vec()?) == bits(&expected.to_vec()?),
                    "{m} {n} {k}"
                );
            }
            let of_shifted = Matmul::new().residual(&shifted);
            for refused in [
                of_shifted.run(&a, &b, &mut out),
                matmul(&shifted, &group.zeros::<f16>(n, n)?, &mut out),
                reduce_scatter(&shifted, out.view_mut().rows(0..m / 2)?),
            ] {
                assert!(
                    matches!(kind_of(&refused), Some(Kind::Unsuitable { .. })),
                    "{refused:?}"
                );
            }
            // A sum whose residual is the output.
            let own = m / 2;
            let part = |first: usize| {
                let place = memory.ptr + 2 * first as u64;
                // SAFETY: as above.
                unsafe { Matrix::<Cuda, f16>::from_device_ptr(&group, place, own, n, 2 * n) }
            };
            let mut expected = group.zeros::<f16>(own, n)?;
            let residual = group.upload(&added[..own * n], own, n)?;
            let scatter = MatmulReduceScatter::new();
            scatter.residual(&residual).run(&a, &b, &mut expected)?;
            let (mut out, same) = (part(0)?, part(0)?);
            for _ in 0..20 {
                out.copy_from_host(&added[..own * n])?;
                MatmulReduceScatter::new()
                    .residual(&same)
                    .run(&a, &b, &mut out)?;
                assert!(
                    bits(&out.to_vec()?) == bits(&expected.to_vec()?),
                    "{m} {n} {k}"
                );
            }
            group.synchronize()?;
        }
        Ok("right".into())
    }));
}
