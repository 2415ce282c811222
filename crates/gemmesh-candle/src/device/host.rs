//! Tensors of the CPU: gemmesh's host backend has memory of its own, so they are copied in and out.

use std::borrow::Cow;
use std::fmt;

use candle_core::{Device as CandleDevice, Storage, Tensor};
use gemmesh::raw;
use gemmesh::{Group, Host, Matrix, Result, ShardedMatrix};

use super::{Input, Rows, Tensors, Value, other_device};
use crate::failure::Failure;

/// There is one.
pub struct Cpu;

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("the CPU")
    }
}

impl Tensors for Host {
    type Place = Cpu;
    type Reading<'a> = ();
    type Output<T: Value> = Matrix<Host, T>;
    type Memory<T: Value> = ();
    type Order = ();

    fn place_of(group: &Group<Host>, device: &CandleDevice) -> Result<Cpu> {
        match device {
            CandleDevice::Cpu => Ok(Cpu),
            other => Err(other_device(
                group.rank(),
                other,
                "the CPU, as the group's backend is Host",
            )),
        }
    }

    fn enter(_group: &Group<Host>, _place: &Cpu) -> Result<()> {
        Ok(())
    }

    fn check_columns<T: Value>(_group: &Group<Host>, _columns: usize) -> Result<()> {
        Ok(())
    }

    fn holds<T: Value>(_place: &Cpu, storage: &Storage) -> bool {
        matches!(storage, Storage::Cpu(_))
    }

    fn length<T: Value>(storage: &Storage) -> usize {
        match storage {
            Storage::Cpu(storage) => storage.as_slice::<T>().map_or(0, <[T]>::len),
            _ => 0,
        }
    }

    fn input<'a, T: Value>(
        group: &Group<Host>,
        _place: &'a Cpu,
        rows: &Rows<'a>,
    ) -> Result<Input<'a, Host, T>, Failure> {
        let values = values::<T>(group, rows)?;
        let matrix = group.upload(&values, rows.rows, rows.columns)?;
        Ok(Input {
            matrix,
            _reading: (),
        })
    }

    fn output<T: Value>(
        group: &Group<Host>,
        _place: &Cpu,
        [rows, columns]: [usize; 2],
    ) -> Result<Matrix<Host, T>, Failure> {
        Ok(group.zeros(rows, columns)?)
    }

    fn matrix<T: Value>(output: &mut Matrix<Host, T>) -> &mut Matrix<Host, T> {
        output
    }

    fn finish<T: Value>(_place: &Cpu, output: Matrix<Host, T>) -> Result<Tensor, Failure> {
        tensor(output.to_vec()?, output.shape())
    }

    fn put<T: Value>(
        group: &Group<Host>,
        _place: &Cpu,
        rows: &Rows<'_>,
        to: &mut ShardedMatrix<Host, T>,
    ) -> Result<(), Failure> {
        let values = values::<T>(group, rows)?;
        Ok(to.shard_mut().copy_from_host(&values)?)
    }

    fn allocate<T: Value>(_place: &Cpu, _shape: [usize; 2]) -> Result<(), Failure> {
        Ok(())
    }

    fn take<T: Value>(
        _place: &Cpu,
        from: &mut ShardedMatrix<Host, T>,
        (): (),
    ) -> Result<Tensor, Failure> {
        let shape = from.shape();
        tensor(from.to_vec()?, shape)
    }
}

/// The elements, row by row.
fn values<'a, T: Value>(group: &Group<Host>, rows: &Rows<'a>) -> Result<Cow<'a, [T]>, Failure> {
    let Storage::Cpu(storage) = rows.storage else {
        unreachable!("the storage has been checked");
    };
    if rows.rows == 0 || rows.columns == 0 {
        // They may begin anywhere, also after what there is.
        return Ok(Cow::Borrowed(&[]));
    }
    let all = &storage.as_slice::<T>()?[rows.offset..];
    if rows.pitch == rows.columns {
        return Ok(Cow::Borrowed(&all[..rows.rows * rows.columns]));
    }
    let mut packed = raw::zeros_of_host::<_, T>(group, rows.rows * rows.columns)?;
    // The last row ends before the next would begin.
    let from = all.chunks(rows.pitch);
    for (to, from) in packed.chunks_exact_mut(rows.columns).zip(from) {
        to.copy_from_slice(&from[..rows.columns]);
    }
    Ok(Cow::Owned(packed))
}

fn tensor<T: Value>(values: Vec<T>, [rows, columns]: [usize; 2]) -> Result<Tensor, Failure> {
    Ok(Tensor::from_vec(
        values,
        (rows, columns),
        &CandleDevice::Cpu,
    )?)
}
