//! Rust's own calls, for a comparison of host times in one process (feature `timing`).

use std::time::Instant;

use gemmesh::{
    AllGatherMatmul, Cuda, Error, Matrix, Prepared, ShardedMatrix, all_gather_matmul, bf16,
};
use pyo3::prelude::*;

use crate::errors::exception;

/// A group of its own, and the arguments of an all_gather_matmul [m, k] x [n, k] of bf16.
#[pyclass(unsendable, module = "gemmesh._native")]
pub struct RustCalls {
    group: gemmesh::Group<Cuda>,
    a: ShardedMatrix<Cuda, bf16>,
    b: Matrix<Cuda, bf16>,
    out: Matrix<Cuda, bf16>,
    prepared: Prepared<'static, Cuda, bf16>,
}

#[pymethods]
impl RustCalls {
    #[new]
    fn new(
        py: Python<'_>,
        rank: usize,
        world: usize,
        address: &str,
        shape: [usize; 3],
    ) -> PyResult<RustCalls> {
        let [m, n, k] = shape;
        let make = || {
            let group = gemmesh::Group::<Cuda>::connect(rank, world, address)?;
            let a = group.sharded::<bf16>(m, k)?;
            Ok(RustCalls {
                b: group.zeros(n, k)?,
                out: group.zeros(m, n)?,
                prepared: AllGatherMatmul::new().prepare(&a, n)?,
                a,
                group,
            })
        };
        make().map_err(|error: Error| exception(py, &error, Some(rank)))
    }

    /// Makes so many calls when the device is idle and all ranks are there. Returns the nanoseconds of each.
    fn flight(&mut self, py: Python<'_>, prepared: bool, calls: usize) -> PyResult<Vec<u64>> {
        let mut fly = || {
            self.group.synchronize()?;
            self.group.barrier()?;
            let calls = (0..calls).map(|_| {
                let begin = Instant::now();
                match prepared {
                    true => self.prepared.run(&self.a, &self.b, &mut self.out)?,
                    false => all_gather_matmul(&self.a, &self.b, &mut self.out)?,
                }
                Ok(begin.elapsed().as_nanos() as u64)
            });
            let times = calls.collect::<gemmesh::Result<_>>()?;
            self.group.synchronize()?;
            Ok(times)
        };
        fly().map_err(|error: Error| exception(py, &error, Some(self.group.rank())))
    }
}
