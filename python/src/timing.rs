//! Rust's own calls, for a comparison of host times in one process (feature `timing`).

use std::time::Instant;

use gemmesh::products::{Prepared, PreparedReduceScatter};
use gemmesh::{
    AllGatherMatmul, Cuda, Error, MatmulReduceScatter, Matrix, ShardedMatrix, all_gather_matmul,
    bf16, matmul_reduce_scatter,
};
use pyo3::prelude::*;

use crate::errors::exception;

/// A group of its own, and the arguments of all_gather_matmul and matmul_reduce_scatter, [m, k] x [n, k] of bf16.
#[pyclass(unsendable, module = "gemmesh._native")]
pub struct RustCalls {
    group: gemmesh::Group<Cuda>,
    a: ShardedMatrix<Cuda, bf16>,
    b: Matrix<Cuda, bf16>,
    out: Matrix<Cuda, bf16>,
    gather: Prepared<'static, Cuda, bf16>,
    addends: Matrix<Cuda, bf16>,
    sums: Matrix<Cuda, bf16>,
    scatter: PreparedReduceScatter<'static, Cuda, bf16>,
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
            let addends = group.zeros(m, k)?;
            Ok(RustCalls {
                b: group.zeros(n, k)?,
                out: group.zeros(m, n)?,
                gather: AllGatherMatmul::new().prepare(&a, n)?,
                sums: group.zeros(group.even_rows(m)[rank], n)?,
                scatter: MatmulReduceScatter::new().prepare(&addends, n)?,
                addends,
                a,
                group,
            })
        };
        make().map_err(|error: Error| exception(py, &error, Some(rank)))
    }

    /// Makes so many calls of an operation when the device is idle and all ranks are there. Returns the nanoseconds of
    /// each.
    fn flight(
        &mut self,
        py: Python<'_>,
        operation: &str,
        prepared: bool,
        calls: usize,
    ) -> PyResult<Vec<u64>> {
        let is_gather = operation == "all_gather_matmul";
        let mut fly = || {
            self.group.synchronize()?;
            self.group.barrier()?;
            let calls = (0..calls).map(|_| {
                let begin = Instant::now();
                match (is_gather, prepared) {
                    (true, true) => self.gather.run(&self.a, &self.b, &mut self.out)?,
                    (true, false) => all_gather_matmul(&self.a, &self.b, &mut self.out)?,
                    (false, true) => self.scatter.run(&self.addends, &self.b, &mut self.sums)?,
                    (false, false) => {
                        matmul_reduce_scatter(&self.addends, &self.b, &mut self.sums)?
                    }
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
