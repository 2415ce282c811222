//! Outputs have no memory in common with what a call reads or writes otherwise. Two matrices of one memory are made as
//! another library's tensors.

use std::ffi::c_void;

use gemmesh::elements::Value;
use gemmesh::error::Kind;
use gemmesh::fp8::{Quantized, quantize};
use gemmesh::interop::dlpack::{DLDataType, DLDevice, DLManagedTensor, DLTensor};
use gemmesh::products::{Outputs, Weights};
use gemmesh::{
    Error, F8E4M3, Group, Host, Matmul, MatmulReduceScatter, Matrix, Result, all_gather_matmul,
    all_reduce, all_to_all, bf16, matmul, reduce_scatter,
};

/// A tensor, with its extents.
struct Foreign {
    tensor: DLManagedTensor,
    shape: [i64; 2],
    strides: [i64; 2],
}

unsafe extern "C" fn give_back(tensor: *mut DLManagedTensor) {
    // SAFETY: as `Memory::matrix` made it.
    drop(unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Foreign>()) });
}

/// Memory that outlives its matrices.
struct Memory(Vec<u64>);

impl Memory {
    fn new(bytes: usize) -> Memory {
        Memory(vec![0; bytes.div_ceil(8)])
    }

    /// Rows of `columns` of `T`, `pitch` elements apart, from element `first` on. Several may share memory.
    fn matrix<T: Value>(
        &self,
        group: &Group<Host>,
        first: usize,
        [rows, columns]: [usize; 2],
        pitch: usize,
    ) -> Result<Matrix<Host, T>> {
        let last = first + rows.saturating_sub(1) * pitch + columns;
        assert!(last * size_of::<T>() <= size_of_val(&self.0[..]));
        let code = match T::DTYPE.to_string().as_str() {
            "bf16" => 4,
            "f8e4m3" => 10,
            "f32" => 2,
            other => panic!("no code of {other}"),
        };
        let foreign = Box::into_raw(Box::new(Foreign {
            tensor: DLManagedTensor {
                dl_tensor: DLTensor {
                    data: self.0.as_ptr().cast_mut().cast(),
                    device: DLDevice {
                        device_type: 1,
                        device_id: 0,
                    },
                    ndim: 2,
                    dtype: DLDataType {
                        code,
                        bits: 8 * size_of::<T>() as u8,
                        lanes: 1,
                    },
                    shape: std::ptr::null_mut(),
                    strides: std::ptr::null_mut(),
                    byte_offset: (first * size_of::<T>()) as u64,
                },
                manager_ctx: std::ptr::null_mut(),
                deleter: Some(give_back),
            },
            shape: [rows as i64, columns as i64],
            strides: [pitch as i64, 1],
        }));
        // SAFETY: a box of which no one else knows. Calls of overlapping matrices are refused, and others write only
        // what no one else uses.
        unsafe {
            (*foreign).tensor.dl_tensor.shape = (&raw mut (*foreign).shape).cast();
            (*foreign).tensor.dl_tensor.strides = (&raw mut (*foreign).strides).cast();
            (*foreign).tensor.manager_ctx = foreign.cast::<c_void>();
            Matrix::from_dlpack(group, &raw mut (*foreign).tensor)
        }
    }
}

/// Checks that a call is refused because of two arguments.
#[track_caller]
fn refused(result: Result<()>, argument: &str, other: &str) {
    let expected =
        format!("the memory of {argument} is partly that of {other} and must be apart from it");
    let error = result.expect_err(&expected);
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
    assert!(error.to_string().ends_with(&expected), "{error}");
}

const N: usize = 8;

#[test]
fn an_output_of_a_product_lies_apart_from_each_operand() -> Result<()> {
    Group::<Host>::threads(1, |group| {
        let memory = Memory::new(16 * N * N);
        let square = |first| memory.matrix::<bf16>(&group, first, [N, N], N);
        let (a, b) = (square(0)?, square(N * N)?);
        for shift in [0, 1, N, N * N - 1] {
            refused(matmul(&a, &b, &mut square(shift)?), "out", "a");
            let later = N * N + shift + usize::from(shift == 0);
            refused(matmul(&a, &b, &mut square(later)?), "out", "b");
        }
        let mut out = square(2 * N * N)?;
        let bias = memory.matrix::<bf16>(&group, 2 * N * N + 3, [1, N], N)?;
        refused(
            Matmul::new().bias(&bias).run(&a, &b, &mut out),
            "out",
            "bias",
        );
        let residual = square(2 * N * N + 1)?;
        let shifted = Matmul::new().residual(&residual).run(&a, &b, &mut out);
        refused(shifted, "out", "residual");
        // The prepared call looks at the memory of each run.
        let prepared = Matmul::new().prepare((&group, [N, N]), N)?;
        prepared.run(&a, &b, &mut out)?;
        refused(prepared.run(&a, &b, &mut square(7)?), "out", "a");
        // What is refused is not begun, and the group goes on.
        matmul(&a, &b, &mut out)
    })?;
    Ok(())
}

#[test]
fn a_residual_may_be_the_output() -> Result<()> {
    Group::<Host>::threads(2, |group| {
        let memory = Memory::new(16 * N * N);
        let square = |first| memory.matrix::<bf16>(&group, first, [N, N], N);
        let ones = vec![bf16::ONE; N * N];
        let (a, b) = (group.upload(&ones, N, N)?, group.upload(&ones, N, N)?);
        let (mut out, residual) = (square(0)?, square(0)?);
        out.copy_from_host(&ones)?;
        Matmul::new().residual(&residual).run(&a, &b, &mut out)?;
        assert!(out.to_vec()?.iter().all(|x| x.to_f32() == 9.0));
        let half = |first| memory.matrix::<bf16>(&group, first, [N / 2, N], N);
        let (mut out, residual) = (half(0)?, half(0)?);
        MatmulReduceScatter::new()
            .residual(&residual)
            .run(&a, &b, &mut out)?;
        assert!(out.to_vec()?.iter().all(|x| x.to_f32() == 25.0));
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn outputs_of_one_call_lie_apart_and_may_be_columns_of_one_matrix() -> Result<()> {
    Group::<Host>::threads(1, |group| {
        let memory = Memory::new(16 * N * N);
        let part = |first| memory.matrix::<bf16>(&group, first, [N, N], 3 * N);
        let ones = vec![bf16::ONE; N * N];
        let (a, b) = (group.upload(&ones, N, N)?, group.upload(&ones, N, N)?);
        let run = |second: usize| {
            let (mut q, mut k, mut v) = (part(0)?, part(second)?, part(2 * N)?);
            let weights = Weights::from([b.view(), b.view(), b.view()]);
            let outputs = Outputs::from([q.view_mut(), k.view_mut(), v.view_mut()]);
            Matmul::new().run(&a, weights, outputs)
        };
        run(N)?;
        let whole = memory.matrix::<bf16>(&group, 0, [N, 3 * N], 3 * N)?;
        assert!(whole.to_vec()?.iter().all(|x| x.to_f32() == N as f32));
        let names = ["out (output 1 of 3)", "out (output 2 of 3)"];
        refused(run(N - 1), names[0], names[1]);
        refused(run(N + 1), names[1], "out (output 3 of 3)");
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn scales_lie_apart_from_numbers() -> Result<()> {
    Group::<Host>::threads(1, |group| {
        let memory = Memory::new(4096);
        let x = memory.matrix::<bf16>(&group, 0, [4, 128], 128)?;
        let numbers = |first| memory.matrix::<F8E4M3>(&group, first, [4, 128], 128);
        let scales = |first| memory.matrix::<f32>(&group, first, [4, 1], 1);
        let run = |mut out: Matrix<Host, F8E4M3>, mut scales: Matrix<Host, f32>| {
            quantize(&x, &mut out, &mut scales)
        };
        run(numbers(1024)?, scales(384)?)?;
        refused(run(numbers(0)?, scales(384)?), "out", "x");
        refused(run(numbers(1024)?, scales(0)?), "scales of out", "x");
        refused(run(numbers(1024)?, scales(256)?), "out", "scales of out");
        // A scale that is given may be an operand.
        let one = memory.matrix::<f32>(&group, 0, [1, 1], 1)?;
        quantize(&x, &mut numbers(1024)?, Quantized::tensor(&one))
    })?;
    Ok(())
}

#[test]
fn collectives_have_their_output_apart_from_their_input() -> Result<()> {
    let refusals = Group::<Host>::threads(2, |group| {
        let memory = Memory::new(16 * N * N);
        let of = |first, rows| memory.matrix::<bf16>(&group, first, [rows, N], N);
        // Both ranks refuse, so none waits.
        refused(reduce_scatter(&of(0, N)?, &mut of(N, N / 2)?), "out", "a");
        reduce_scatter(&of(0, N)?, &mut of(N * N, N / 2)?)?;
        let mut sums = group.sharded::<bf16>(N, N)?;
        all_reduce(&of(0, N)?, &mut sums)?;
        all_to_all(&of(0, N)?, &mut sums)?;
        all_gather_matmul(&sums, &of(0, N)?, &mut of(N * N, N)?)?;
        Ok::<_, Error>(())
    });
    refusals.map(drop)
}

#[test]
fn copies_do_not_overlap() -> Result<()> {
    Group::<Host>::threads(1, |group| {
        let memory = Memory::new(16 * N * N);
        let square = |first| memory.matrix::<bf16>(&group, first, [N, N], N);
        let copy = |from, to| square(to)?.view_mut().copy_from(&square(from)?);
        copy(0, N * N)?;
        copy(0, 0)?;
        refused(copy(0, 1), "the target", "the source");
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn a_copy_of_a_matrix_onto_itself_reports_the_failure_of_its_group() -> Result<()> {
    let result = Group::<Host>::threads(1, |group| {
        let memory = Memory::new(2 * N * N);
        let square = || memory.matrix::<bf16>(&group, 0, [N, N], N);
        let (from, mut to) = (square()?, square()?);
        to.view_mut().copy_from(&from)?;
        let failure = group.fail("no more work");
        let error = to.view_mut().copy_from(&from).expect_err("a failed group");
        assert!(
            matches!(error.kind(), Kind::ProgramFailed { .. }),
            "{error}"
        );
        Err::<(), _>(failure)
    });
    let error = result.expect_err("a failed group");
    assert!(
        matches!(
            (error.rank(), error.kind()),
            (Some(0), Kind::ProgramFailed { .. })
        ),
        "{error}"
    );
    Ok(())
}
