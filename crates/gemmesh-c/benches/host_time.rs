//! Times what a call of all_gather_matmul takes on the host, through Rust and through C, prepared and not. Both are
//! timed in one process, by turns, because a process's place among the cores changes all its times.
//!
//! ```sh
//! cargo bench -p gemmesh-c --features cuda --bench host_time
//! ```
#![allow(unsafe_code)]

// The helpers of the tests.
#[path = "../tests/support/mod.rs"]
#[allow(dead_code)]
mod support;

use std::ffi::CString;
use std::ptr::null_mut;
use std::time::Instant;

use gemmesh::{AllGatherMatmul, Cuda, Group, Result, all_gather_matmul, bf16, launch};
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::product::*;
use gemmesh_c::sharded::*;
use gemmesh_c::types::gemmesh_backend::GEMMESH_CUDA;
use gemmesh_c::types::gemmesh_dtype::GEMMESH_BF16;
use gemmesh_c::types::gemmesh_product_kind::GEMMESH_ALL_GATHER_MATMUL;
use gemmesh_c::types::*;
use support::{default_options, ok};

const M: usize = 128;
const N: usize = 1792;
const K: usize = 4096;
/// Calls in a row. The device's queues hold them.
const FLIGHT: usize = 8;
const FLIGHTS: usize = 256;
const NAMES: [&str; 4] = ["Rust, prepared", "Rust", "C, prepared", "C"];

fn main() -> Result<()> {
    if !launch::is_rank() {
        println!(
            "The host's time of all_gather_matmul of M = {M}, N = {N}, K = {K}, in µs, two ranks, medians:"
        );
        return launch::launch(2);
    }
    let group = Group::<Cuda>::from_env()?;
    let mut times: [Vec<f64>; 4] = Default::default();
    measure(&group, &mut times)?;
    if group.rank() == 0 {
        for (name, mut times) in NAMES.iter().zip(times) {
            // The first half warms up.
            let times = &mut times[FLIGHT * FLIGHTS / 2..];
            times.sort_by(f64::total_cmp);
            println!("{name}: {:.2}", times[times.len() / 2]);
        }
    }
    group.barrier()
}

/// Times flights of each kind of call, by turns.
fn measure(group: &Group<Cuda>, times: &mut [Vec<f64>; 4]) -> Result<()> {
    let a = group.sharded::<bf16>(M, K)?;
    let b = group.zeros::<bf16>(N, K)?;
    let mut out = group.zeros::<bf16>(M, N)?;
    let prepared = AllGatherMatmul::new().prepare(&a, N)?;
    let ours = C::new(group)?;
    for _ in 0..FLIGHTS {
        for (kind, times) in times.iter_mut().enumerate() {
            // The device's queues are empty, and the ranks begin together.
            group.synchronize()?;
            ours.synchronize();
            group.barrier()?;
            for _ in 0..FLIGHT {
                let begin = Instant::now();
                match kind {
                    0 => prepared.run(&a, &b, &mut out)?,
                    1 => all_gather_matmul(&a, &b, &mut out)?,
                    2 => ours.run_prepared(),
                    _ => ours.run(),
                }
                times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    group.synchronize()?;
    ours.free();
    Ok(())
}

/// The group and the matrices of the calls through C.
struct C {
    group: *mut gemmesh_group,
    sharded: *mut gemmesh_sharded,
    matrices: [*mut gemmesh_matrix; 2],
    memories: [gemmesh_memory; 2],
    prepared: *mut gemmesh_prepared,
}

impl C {
    fn new(of: &Group<Cuda>) -> Result<C> {
        let address = format!("host_time {}", std::process::id());
        let all = of.all_gather_bytes(address.as_bytes())?;
        let address = CString::new(all[0].clone()).expect("a text");
        let options = gemmesh_group_options {
            backend: GEMMESH_CUDA as u32,
            ..default_options()
        };
        let (mut group, mut sharded, mut prepared) = (null_mut(), null_mut(), null_mut());
        let mut matrices = [null_mut(); 2];
        let mut memories = [support::memory::<bf16>(&mut [], 0, 1); 2];
        let product = support::product(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
        // SAFETY: the pointers are those of values of this function.
        unsafe {
            let (rank, world) = (of.rank(), of.world_size());
            ok(gemmesh_group_connect(
                rank,
                world,
                address.as_ptr(),
                &options,
                &mut group,
            ));
            ok(gemmesh_sharded_new(
                group,
                GEMMESH_BF16 as u32,
                M,
                K,
                &mut sharded,
            ));
            for (index, [rows, columns]) in [[N, K], [M, N]].into_iter().enumerate() {
                let matrix = &mut matrices[index];
                ok(gemmesh_matrix_zeros(
                    group,
                    GEMMESH_BF16 as u32,
                    rows,
                    columns,
                    matrix,
                ));
                ok(gemmesh_matrix_memory(*matrix, &mut memories[index]));
            }
            ok(gemmesh_prepare(
                group,
                &product,
                M,
                K,
                sharded,
                &N,
                1,
                &mut prepared,
            ));
        }
        Ok(C {
            group,
            sharded,
            matrices,
            memories,
            prepared,
        })
    }

    fn synchronize(&self) {
        // SAFETY: the group lives.
        unsafe {
            ok(gemmesh_synchronize(self.group));
            ok(gemmesh_barrier(self.group));
        }
    }

    fn run_prepared(&self) {
        // SAFETY: the call's pointers live meanwhile.
        self.with_call(|call| unsafe { ok(gemmesh_prepared_run(self.prepared, call)) });
    }

    fn run(&self) {
        let product = support::product(GEMMESH_ALL_GATHER_MATMUL, GEMMESH_BF16);
        // SAFETY: the call's pointers live meanwhile.
        self.with_call(|call| unsafe { ok(gemmesh_run(self.group, &product, call)) });
    }

    fn with_call(&self, run: impl FnOnce(&gemmesh_product_call)) {
        let a = support::sharded_operand(self.sharded);
        let weight = support::operand(self.memories[0]);
        let output = support::output(self.memories[1]);
        run(&gemmesh_product_call {
            sharded_a: &a,
            weights: &weight,
            weight_count: 1,
            outputs: &output,
            output_count: 1,
            ..support::call()
        });
    }

    fn free(self) {
        // SAFETY: the handles are freed once.
        unsafe {
            ok(gemmesh_prepared_free(self.prepared));
            for matrix in self.matrices {
                ok(gemmesh_matrix_free(matrix));
            }
            ok(gemmesh_sharded_free(self.sharded));
            ok(gemmesh_group_free(self.group));
        }
    }
}
