//! Tensors of other libraries: what they say is checked, their memory is used as it lies, and given back once.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::errors::kind_of;
use gemmesh::error::Kind;
use gemmesh::interop::dlpack::{DLDataType, DLDevice, DLManagedTensor, DLTensor};
use gemmesh::{Error, Group, Host, Matmul, Matrix, Result, bf16};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const BF16: DLDataType = DLDataType {
    code: 4,
    bits: 16,
    lanes: 1,
};

const F32: DLDataType = DLDataType {
    code: 2,
    bits: 32,
    lanes: 1,
};

/// A tensor of another library's, which counts how often it is given back.
struct Foreign<'a> {
    tensor: DLManagedTensor,
    values: Vec<bf16>,
    shape: [i64; 2],
    strides: [i64; 2],
    given_back: &'a AtomicUsize,
}

unsafe extern "C" fn give_back(tensor: *mut DLManagedTensor) {
    // SAFETY: as `foreign` made it.
    let foreign = unsafe { Box::from_raw((*tensor).manager_ctx.cast::<Foreign>()) };
    foreign.given_back.fetch_add(1, Ordering::Relaxed);
}

/// Rows of `columns` of `values`, `pitch` elements apart, from element `first` on.
fn foreign(
    values: &[bf16],
    first: usize,
    [rows, columns]: [usize; 2],
    pitch: usize,
    given_back: &AtomicUsize,
) -> *mut DLManagedTensor {
    let foreign = Box::into_raw(Box::new(Foreign {
        tensor: DLManagedTensor {
            dl_tensor: DLTensor {
                data: std::ptr::null_mut(),
                device: DLDevice {
                    device_type: 1,
                    device_id: 0,
                },
                ndim: 2,
                dtype: BF16,
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 2 * first as u64,
            },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(give_back),
        },
        values: values.into(),
        shape: [rows as i64, columns as i64],
        strides: [pitch as i64, 1],
        given_back,
    }));
    // SAFETY: a box of which no one else knows.
    unsafe {
        (*foreign).tensor.dl_tensor.data = (*foreign).values.as_mut_ptr().cast();
        (*foreign).tensor.dl_tensor.shape = (&raw mut (*foreign).shape).cast();
        (*foreign).tensor.dl_tensor.strides = (&raw mut (*foreign).strides).cast();
        (*foreign).tensor.manager_ctx = foreign.cast::<c_void>();
        &raw mut (*foreign).tensor
    }
}

fn random(count: usize) -> Vec<bf16> {
    let mut rng = SmallRng::seed_from_u64(7);
    let value = |_| bf16::from_f32(rng.random_range(-1.0..1.0));
    (0..count).map(value).collect()
}

#[test]
fn a_part_of_a_tensor_is_an_operand_and_given_back_once() -> Result<()> {
    let ([m, n, k], pitch, first) = ([5, 3, 7], 11, 2);
    let values = random(m * pitch + first);
    let given_back = AtomicUsize::new(0);
    Group::<Host>::threads(1, |group| {
        let weight = random(n * k);
        let tensor = foreign(&values, first, [m, k], pitch, &given_back);
        // SAFETY: no one else uses the tensor.
        let a = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
        let rows: Vec<bf16> = (0..m)
            .flat_map(|row| values[first + row * pitch..][..k].to_vec())
            .collect();
        assert_eq!(a.to_vec()?, rows);
        let b = group.upload(&weight, n, k)?;
        let mut out = group.zeros::<f32>(m, n)?;
        Matmul::new().run(&a, &b, &mut out)?;
        for (index, found) in out.to_vec()?.into_iter().enumerate() {
            let products = (0..k).map(|step| {
                rows[index / n * k + step].to_f64() * weight[index % n * k + step].to_f64()
            });
            let exact: f64 = products.sum();
            assert!((f64::from(found) - exact).abs() < 1e-5, "{found} {exact}");
        }
        assert_eq!(given_back.load(Ordering::Relaxed), 0);
        drop(a);
        assert_eq!(given_back.load(Ordering::Relaxed), 1);
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn rows_of_a_tensor_that_is_not_packed_are_added_and_moved() -> Result<()> {
    for world in [1, 2, 3] {
        Group::<Host>::threads(world, |group| {
            let ([m, n], pitch, first) = ([2 * world, 3], 5, 1);
            // Small integers: sums are exact, whatever their order.
            let value = |rank: usize, row: usize, column: usize| {
                bf16::from_f32((1 + rank + 3 * row + 2 * column) as f32)
            };
            let rows = |of: &dyn Fn(usize, usize) -> bf16, rows: std::ops::Range<usize>| {
                let rows = rows.flat_map(|row| (0..n).map(move |column| (row, column)));
                rows.map(|(row, column)| of(row, column))
                    .collect::<Vec<_>>()
            };
            let mut values = vec![bf16::NAN; first + m * pitch];
            for row in 0..m {
                let place = first + row * pitch;
                let own = rows(
                    &|row, column| value(group.rank(), row, column),
                    row..row + 1,
                );
                values[place..place + n].copy_from_slice(&own);
            }
            let given_back = AtomicUsize::new(0);
            let tensor = foreign(&values, first, [m, n], pitch, &given_back);
            // SAFETY: no one else uses the tensor.
            let a = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
            let own = 2 * group.rank()..2 * group.rank() + 2;
            let sum = |row: usize, column: usize| {
                let addends = (0..world).map(|rank| value(rank, row, column).to_f32());
                bf16::from_f32(addends.sum())
            };

            let mut out = group.zeros::<bf16>(2, n)?;
            gemmesh::reduce_scatter(&a, &mut out)?;
            assert_eq!(out.to_vec()?, rows(&sum, own.clone()));
            let mut all = group.sharded::<bf16>(m, n)?;
            gemmesh::all_reduce(&a, &mut all)?;
            assert_eq!(all.to_vec()?, rows(&sum, 0..m));
            let mut blocks = group.sharded::<bf16>(m, n)?;
            gemmesh::all_to_all(&a, &mut blocks)?;
            let sent = |row: usize, column: usize| value(row / 2, own.start + row % 2, column);
            assert_eq!(blocks.to_vec()?, rows(&sent, 0..m));
            Ok::<_, Error>(())
        })?;
    }
    Ok(())
}

#[test]
fn a_tensor_may_be_an_output() -> Result<()> {
    let given_back = AtomicUsize::new(0);
    let poison = bf16::from_f32(77.0);
    Group::<Host>::threads(1, |group| {
        let (m, n, k, pitch) = (4, 3, 8, 5);
        let [a, b] = [m, n].map(|rows| group.upload(&random(rows * k), rows, k));
        let (a, b) = (a?, b?);
        let tensor = foreign(&vec![poison; m * pitch], 1, [m, n], pitch, &given_back);
        // SAFETY: no one else uses the tensor.
        let mut out = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
        Matmul::new().run(&a, &b, &mut out)?;
        let mut expected = group.zeros::<bf16>(m, n)?;
        Matmul::new().run(&a, &b, &mut expected)?;
        assert_eq!(out.to_vec()?, expected.to_vec()?);
        // What lies between the rows is as it was.
        // SAFETY: the tensor lives as long as the matrix.
        let memory = unsafe {
            let foreign = (*tensor).manager_ctx.cast::<Foreign>();
            (*foreign).values.clone()
        };
        for (index, value) in memory.into_iter().enumerate() {
            let column = index % pitch;
            let is_output = (1..=n).contains(&column);
            assert_eq!(value == poison, !is_output, "element {index}");
        }
        Ok::<_, Error>(())
    })?;
    assert_eq!(given_back.load(Ordering::Relaxed), 1);
    Ok(())
}

#[test]
fn a_matrix_goes_out_and_comes_back() -> Result<()> {
    Group::<Host>::threads(1, |group| {
        let values = random(6 * 4);
        let tensor = group.upload(&values, 6, 4)?.into_dlpack();
        // SAFETY: the tensor lives until it is given back.
        let given = unsafe { (*tensor).dl_tensor };
        // SAFETY: it has two dimensions.
        let pair = |of: *const i64| unsafe { [*of, *of.add(1)] };
        assert_eq!((given.dtype, given.ndim), (BF16, 2));
        assert_eq!((given.device.device_type, given.device.device_id), (1, 0));
        assert_eq!((pair(given.shape), pair(given.strides)), ([6, 4], [4, 1]));
        // SAFETY: no one else uses the tensor.
        let back = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
        assert_eq!(back.to_vec()?, values);
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn tensors_that_do_not_fit_are_refused_and_stay_the_callers() -> Result<()> {
    type Change = fn(&mut Foreign);
    let changes: [(&str, Change); 8] = [
        ("the device is GPU 3", |t| {
            t.tensor.dl_tensor.device = DLDevice {
                device_type: 2,
                device_id: 3,
            };
        }),
        ("the dtype of a DLPack tensor is f16", |t| {
            t.tensor.dl_tensor.dtype.code = 2;
        }),
        ("i16", |t| t.tensor.dl_tensor.dtype.code = 0),
        ("the number of dimensions", |t| t.tensor.dl_tensor.ndim = 3),
        ("the distance of a row's elements", |t| t.strides = [1, 4]),
        ("the distance of rows", |t| t.strides = [3, 1]),
        ("the distance of rows", |t| t.strides = [-4, 1]),
        ("the address of the tensor", |t| {
            t.tensor.dl_tensor.byte_offset = 1;
        }),
    ];
    let given_back = AtomicUsize::new(0);
    Group::<Host>::threads(1, |group| {
        for (what, change) in changes {
            let tensor = foreign(&random(16), 0, [4, 4], 4, &given_back);
            // SAFETY: as `foreign` made it.
            unsafe { change(&mut *(*tensor).manager_ctx.cast::<Foreign>()) };
            // SAFETY: no one else uses the tensor.
            let error = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor) };
            let error = error.expect_err(what).to_string();
            let words: Vec<&str> = what.split(" is ").collect();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
            assert_eq!(given_back.load(Ordering::Relaxed), 0, "{what}");
            // SAFETY: the tensor is still the caller's.
            unsafe { give_back(tensor) };
            given_back.store(0, Ordering::Relaxed);
        }
        for shape in [[4, 0], [-1, 4], [4, -1]] {
            let tensor = foreign(&random(16), 0, [4, 4], 4, &given_back);
            // SAFETY: as `foreign` made it.
            unsafe { (*(*tensor).manager_ctx.cast::<Foreign>()).shape = shape };
            // SAFETY: no one else uses the tensor.
            let error = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor) };
            assert!(
                matches!(kind_of(&error), Some(Kind::Limit { .. })),
                "{error:?}"
            );
            // SAFETY: the tensor is still the caller's.
            unsafe { give_back(tensor) };
        }
        Ok::<_, Error>(())
    })?;
    Ok(())
}

#[test]
fn of_a_tensor_without_elements_strides_say_nothing() -> Result<()> {
    let given_back = AtomicUsize::new(0);
    Group::<Host>::threads(1, |group| {
        for (shape, strides) in [
            ([0, 4], [-3, 7]),
            ([1, 0], [5, -2]),
            ([3, 0], [-1, 0]),
            ([3, 0], [i64::MAX, i64::MAX]),
        ] {
            let tensor = foreign(&[], 0, [0, 0], 0, &given_back);
            // SAFETY: as `foreign` made it.
            unsafe {
                let foreign = &mut *(*tensor).manager_ctx.cast::<Foreign>();
                (foreign.shape, foreign.strides) = (shape, strides);
                foreign.tensor.dl_tensor.data = std::ptr::null_mut();
                foreign.tensor.dl_tensor.dtype = F32;
            }
            // SAFETY: no one else uses the tensor.
            let a = unsafe { Matrix::<Host, f32>::from_dlpack(&group, tensor)? };
            assert_eq!(a.shape(), shape.map(|extent| extent as usize));
            assert_eq!(a.to_vec()?, [0f32; 0]);
            let last = a.shape()[0];
            let part = a.rows(last.saturating_sub(1)..last)?;
            assert_eq!(part.to_vec()?, [0f32; 0]);
        }
        Ok::<_, Error>(())
    })?;
    assert_eq!(given_back.load(Ordering::Relaxed), 4);
    Ok(())
}

#[test]
fn a_tensor_of_no_rows_is_one_wherever_it_lies() -> Result<()> {
    let given_back = AtomicUsize::new(0);
    Group::<Host>::threads(1, |group| {
        let b = group.upload(&random(3 * 4), 3, 4)?;
        for data in [
            std::ptr::null_mut::<c_void>(),
            std::ptr::without_provenance_mut(3),
        ] {
            let tensor = foreign(&[], 0, [0, 4], 0, &given_back);
            // SAFETY: as `foreign` made it.
            unsafe { (*tensor).dl_tensor.data = data };
            // SAFETY: no one else uses the tensor.
            let mut a = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
            a.copy_from_host(&[])?;
            assert_eq!((a.shape(), a.to_vec()?.len()), ([0, 4], 0));
            let part = a.columns(1..3)?;
            assert_eq!(part.shape(), [0, 2]);
            let mut out = group.zeros::<bf16>(0, 3)?;
            Matmul::new().run(&a, &b, &mut out)?;
            let tensor = out.into_dlpack();
            // SAFETY: no one else uses the tensor.
            let back = unsafe { Matrix::<Host, bf16>::from_dlpack(&group, tensor)? };
            assert_eq!(back.shape(), [0, 3]);
        }
        Ok::<_, Error>(())
    })?;
    assert_eq!(given_back.load(Ordering::Relaxed), 2);
    Ok(())
}
