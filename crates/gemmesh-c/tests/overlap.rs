//! Outputs that share memory with other arguments are refused, by every function of the header that has outputs.
#![allow(unsafe_code)]

mod support;

use std::ptr::null;

use gemmesh::{F8E4M3, bf16};
use gemmesh_c::collectives::*;
use gemmesh_c::group::*;
use gemmesh_c::matrix::*;
use gemmesh_c::product::*;
use gemmesh_c::sharded::*;
use gemmesh_c::status::gemmesh_status;
use gemmesh_c::types::*;
use support::*;

const BF16: gemmesh_dtype = gemmesh_dtype::GEMMESH_BF16;
const N: usize = 8;

/// Memory, of which matrices are parts that may overlap.
struct Arena(Vec<bf16>);

impl Arena {
    fn new() -> Arena {
        Arena(vec![bf16::ONE; 16 * N * N])
    }

    /// Rows of N columns from element `first` on.
    fn rows(&self, first: usize, rows: usize) -> gemmesh_memory {
        assert!(first + rows * N <= self.0.len());
        gemmesh_memory {
            address: self.0[first..].as_ptr().cast_mut().cast(),
            dtype: BF16 as u32,
            rows,
            columns: N,
            pitch: 0,
        }
    }
}

#[track_caller]
fn refused(status: gemmesh_status, argument: &str, other: &str) {
    let words =
        format!("the memory of {argument} is partly that of {other} and must be apart from it");
    fails(status, ARGUMENT, &words);
}

/// The arguments of a product of this rank's own rows.
#[derive(Clone, Copy)]
struct Given {
    a: gemmesh_memory,
    b: gemmesh_memory,
    out: gemmesh_memory,
    bias: Option<gemmesh_memory>,
    residual: Option<gemmesh_memory>,
}

impl Given {
    /// Runs the product.
    fn run(&self, group: *mut gemmesh_group, kind: gemmesh_product_kind) -> gemmesh_status {
        let (a, weight, out) = (operand(self.a), operand(self.b), output(self.out));
        let pointer = |memory: &Option<gemmesh_memory>| memory.as_ref().map_or(null(), |m| m as _);
        let call = gemmesh_product_call {
            a: &a,
            weights: &weight,
            weight_count: 1,
            outputs: &out,
            output_count: 1,
            bias: pointer(&self.bias),
            residual: pointer(&self.residual),
            ..call()
        };
        let product = product(kind, BF16);
        // SAFETY: pointers to live values; matrices that overlap are refused.
        unsafe { gemmesh_run(group, &product, &call) }
    }
}

#[test]
fn outputs_of_products_lie_apart_from_operands_and_may_be_the_residual() {
    ranks(2, |group, _| {
        let arena = Arena::new();
        for (kind, rows) in [
            (gemmesh_product_kind::GEMMESH_MATMUL, N),
            (gemmesh_product_kind::GEMMESH_MATMUL_REDUCE_SCATTER, N / 2),
        ] {
            let given = Given {
                a: arena.rows(8 * N * N, N),
                b: arena.rows(9 * N * N, N),
                out: arena.rows(4 * N * N, rows),
                bias: None,
                residual: None,
            };
            for shift in [0, 1, N, rows * N - 1] {
                let shifted = arena.rows(4 * N * N + shift, N);
                let run = |given: Given| given.run(group, kind);
                refused(
                    run(Given {
                        a: shifted,
                        ..given
                    }),
                    "out",
                    "a",
                );
                refused(
                    run(Given {
                        b: shifted,
                        ..given
                    }),
                    "out",
                    "b",
                );
                let bias = Some(arena.rows(4 * N * N + shift, 1));
                refused(run(Given { bias, ..given }), "out", "bias");
                let residual = Some(arena.rows(4 * N * N + shift, rows));
                match shift {
                    0 => ok(run(Given { residual, ..given })),
                    _ => refused(run(Given { residual, ..given }), "out", "residual"),
                }
            }
            ok(given.run(group, kind));
        }
    });
}

#[test]
fn what_a_gather_brings_is_an_output() {
    ranks(2, |group, rank| {
        let arena = Arena::new();
        let x = sharded::<bf16>(group, 2 * N, N);
        fill(group, x, |_, _| bf16::ONE);
        let mut whole = arena.rows(0, 1);
        // SAFETY: pointers to live values; matrices that overlap are refused.
        unsafe {
            ok(gemmesh_sharded_whole(x, &mut whole));
            let a = sharded_operand(x);
            let product = product(gemmesh_product_kind::GEMMESH_ALL_GATHER_MATMUL, BF16);
            let run = |b: gemmesh_memory, out: gemmesh_memory| {
                let (weight, out) = (operand(b), output(out));
                let call = gemmesh_product_call {
                    sharded_a: &a,
                    weights: &weight,
                    weight_count: 1,
                    outputs: &out,
                    output_count: 1,
                    ..call()
                };
                gemmesh_run(group, &product, &call)
            };
            let (b, out) = (arena.rows(0, N), arena.rows(4 * N * N, 2 * N));
            refused(run(b, whole), "out", "a");
            refused(run(arena.rows(5 * N * N, N), out), "out", "b");
            let own = |rank: usize| gemmesh_memory {
                address: whole.address.byte_add(rank * N * N * 2),
                rows: N,
                ..whole
            };
            ok(run(own(rank), out));
            refused(
                run(own(1 - rank), out),
                "b",
                "the rows of a that are gathered",
            );
            ok(run(b, out));
            ok(gemmesh_sharded_free(x));
        }
    });
}

#[test]
fn collectives_and_copies_have_their_output_apart_from_their_input() {
    ranks(2, |group, _| {
        let arena = Arena::new();
        let a = arena.rows(0, N);
        let sums = sharded::<bf16>(group, N, N);
        let mut whole = a;
        // SAFETY: as above.
        unsafe {
            ok(gemmesh_sharded_whole(sums, &mut whole));
            for first in [0, 1, N * N - 1] {
                refused(
                    gemmesh_reduce_scatter(group, &a, &arena.rows(first, N / 2)),
                    "out",
                    "a",
                );
            }
            refused(gemmesh_all_reduce(group, &whole, sums), "out", "a");
            refused(
                gemmesh_all_to_all(group, &whole, sums, null(), 0),
                "out",
                "a",
            );
            ok(gemmesh_all_reduce(group, &a, sums));
            ok(gemmesh_all_to_all(group, &a, sums, null(), 0));
            ok(gemmesh_reduce_scatter(group, &a, &arena.rows(N * N, N / 2)));

            refused(
                gemmesh_copy(group, &a, &arena.rows(1, N)),
                "the target",
                "the source",
            );
            ok(gemmesh_copy(group, &a, &a));
            ok(gemmesh_copy(group, &a, &arena.rows(N * N, N)));
            let (bytes, inside) = (2 * N * N, arena.rows(N, 1).address);
            let to = gemmesh_copy_from_host(group, &a, inside, bytes);
            refused(to, "the buffer", "the matrix");
            let from = gemmesh_copy_to_host(group, &a, inside, bytes);
            refused(from, "the buffer", "the matrix");
            ok(gemmesh_sharded_free(sums));
        }
    });
}

#[test]
fn numbers_and_scales_of_fp8_lie_apart() {
    ranks(1, |group, _| {
        let memory = vec![0u64; 512];
        let part = |dtype: gemmesh_dtype, first: usize, rows, columns| gemmesh_memory {
            address: memory.as_ptr().cast_mut().wrapping_byte_add(first).cast(),
            dtype: dtype as u32,
            rows,
            columns,
            pitch: 0,
        };
        let f32 = gemmesh_dtype::GEMMESH_F32;
        let x = part(BF16, 0, 4, 128);
        let numbers = |first| part(F8E4M3::DTYPE, first, 4, 128);
        let quantize = |out, scales: gemmesh_memory, kind: gemmesh_quantization_kind| {
            let how = gemmesh_quantization {
                kind: kind as u32,
                power_of_two: 0,
                first_column: 0,
            };
            // SAFETY: as above.
            unsafe { gemmesh_quantize(group, &x, &out, &scales, &how) }
        };
        let blocks = gemmesh_quantization_kind::GEMMESH_QUANTIZATION_BLOCKS;
        let scales = |first| part(f32, first, 4, 1);
        ok(quantize(numbers(1024), scales(2048), blocks));
        refused(quantize(numbers(1023), scales(2048), blocks), "out", "x");
        refused(
            quantize(numbers(1024), scales(1020), blocks),
            "out",
            "scales of out",
        );
        refused(
            quantize(numbers(1024), scales(1000), blocks),
            "scales of out",
            "x",
        );
        // A scale that is given is only read.
        let tensor = gemmesh_quantization_kind::GEMMESH_QUANTIZATION_TENSOR;
        ok(quantize(numbers(1024), part(f32, 0, 1, 1), tensor));
        refused(
            quantize(numbers(1024), part(f32, 1100, 1, 1), tensor),
            "out",
            "scales of out",
        );
    });
}
