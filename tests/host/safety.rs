//! Safe code that asks for what is not there gets an error, and no memory is touched but what it was given.
//!
//! Each test has one rank, so that miri can run it.

use crate::support::errors::kind_of;
use gemmesh::error::Kind;
use gemmesh::pipelines::{AllGatherAndConsume, produce_and_reduce_scatter};
use gemmesh::{
    AllGatherMatmul, Group, Host, Matmul, MatmulReduceScatter, Matrix, Result, all_reduce, bf16,
};

/// Runs `rank` as the only one, with two workers.
fn alone(rank: impl Fn(Group<Host>) -> Result<()> + Sync) {
    let builder = Group::<Host>::builder().workers(2);
    builder.threads(1, rank).unwrap();
}

#[test]
fn rows_that_a_sharded_matrix_does_not_have_are_not_written() {
    alone(|group| {
        let (m, k) = (4, 6);
        let mut a = group.sharded::<u64>(m, k)?;
        // Offsets that overflow are among them.
        for first in [m + 1, 1 << 40, usize::MAX / k / 8 + 1, usize::MAX] {
            let refused = a.write(first, &vec![7; k]);
            assert!(
                matches!(kind_of(&refused), Some(Kind::Limit { .. })),
                "{refused:?}"
            );
        }
        for (first, count) in [(m, 1), (m - 1, k + 1), (0, m * k + 1), (0, 1 << 10)] {
            let refused = a.write(first, &vec![7; count]);
            assert!(
                matches!(kind_of(&refused), Some(Kind::Limit { .. })),
                "{refused:?}"
            );
        }
        // Memory has room for them, and the matrix does not use them.
        a.set_rows(&[2])?;
        let refused = a.write(2, &[7; 6]);
        assert!(
            matches!(kind_of(&refused), Some(Kind::Limit { .. })),
            "{refused:?}"
        );
        a.set_rows(&[m])?;
        assert_eq!(a.to_vec()?, vec![0; m * k]);
        a.write(m - 1, &[7; 6])?;
        a.write(m, &[])?;
        assert_eq!(a.to_vec()?[(m - 1) * k..], [7; 6]);
        Ok(())
    });
}

/// Small numbers, whose products bf16 holds exactly.
fn values(count: usize) -> Vec<bf16> {
    let value = |index| bf16::from_f32((index % 5) as f32 - 2.0);
    (0..count).map(value).collect()
}

/// `a[m, k] · b[n, k]ᵀ`
fn product(a: &[bf16], b: &[bf16], k: usize) -> Vec<bf16> {
    let dot = |x: &[bf16], y: &[bf16]| -> f32 {
        x.iter().zip(y).map(|(x, y)| x.to_f32() * y.to_f32()).sum()
    };
    let rows = a.chunks_exact(k);
    rows.flat_map(|x| b.chunks_exact(k).map(move |y| bf16::from_f32(dot(x, y))))
        .collect()
}

const M: usize = 5;
const N: usize = 6;
const K: usize = 7;

#[test]
fn parts_of_matrices_are_read_and_written_and_what_lies_around_them_is_not() {
    alone(|group| {
        let given = values((M + 2) * (K + 2));
        let whole = group.upload(&given, M + 2, K + 2)?;
        let a = whole.rows(1..M + 1)?.columns(2..K + 2)?;
        let rows = given.chunks_exact(K + 2).skip(1).take(M);
        let rows: Vec<bf16> = rows.flat_map(|row| row[2..].to_vec()).collect();
        let weights = [values(N * K), values(2 * N * K)[N * K..].to_vec()];
        let [b, c] = [0, 1].map(|which| group.upload(&weights[which], N, K));
        let (b, c) = (b?, c?);
        let mut out: Matrix<Host, bf16> = group.zeros(M + 1, 2 * N + 1)?;
        let [left, _, right] = out.view_mut().rows(1..M + 1)?.split_columns([N, 1, N])?;
        Matmul::new().run(a, [&b, &c], [left, right])?;
        let out = out.to_vec()?;
        assert_eq!(out[..2 * N + 1], [bf16::ZERO; 2 * N + 1]);
        let products = [0, 1].map(|which: usize| product(&rows, &weights[which], K));
        for (row, out) in out.chunks_exact(2 * N + 1).skip(1).enumerate() {
            assert_eq!(out[..N], products[0][row * N..][..N]);
            assert_eq!(out[N], bf16::ZERO);
            assert_eq!(out[N + 1..], products[1][row * N..][..N]);
        }
        Ok(())
    });
}

#[test]
fn what_ranks_share_is_multiplied_added_and_given_to_functions() {
    alone(|group| {
        let (rows, weight, bias) = (values(M * K), values(N * K), values(N));
        let mut a = group.sharded::<bf16>(M, K)?;
        a.shard_mut().copy_from_host(&rows)?;
        let b = group.upload(&weight, N, K)?;
        let bias_row = group.upload(&bias, 1, N)?;
        let mut out = group.zeros::<f32>(M, N)?;
        AllGatherMatmul::new()
            .bias(&bias_row)
            .run(&a, &b, &mut out)?;
        let expected = product(&rows, &weight, K);
        let biased = expected.iter().zip(bias.iter().cycle());
        let biased: Vec<f32> = biased.map(|(x, y)| x.to_f32() + y.to_f32()).collect();
        assert_eq!(out.to_vec()?, biased);

        let own = group.upload(&rows, M, K)?;
        let mut sums = group.zeros::<bf16>(M, N)?;
        MatmulReduceScatter::new().run(&own, &b, &mut sums)?;
        assert_eq!(sums.to_vec()?, expected);
        let mut all = group.sharded::<bf16>(M, N)?;
        all_reduce(&sums, &mut all)?;
        assert_eq!(all.to_vec()?, expected);

        let mut seen = Vec::new();
        AllGatherAndConsume::new().run(&a, |chunk| {
            seen.extend_from_slice(chunk.values());
            Ok(())
        })?;
        assert_eq!(seen, rows);
        let mut made = group.zeros::<f32>(M, N)?;
        produce_and_reduce_scatter(M, &mut made, |mut block| {
            let (first, pitch) = (block.rows().start, block.pitch());
            for (row, values) in block.values_mut().chunks_mut(pitch).enumerate() {
                values.fill((first + row) as f32);
            }
            Ok(())
        })?;
        let expected: Vec<f32> = (0..M * N).map(|index| (index / N) as f32).collect();
        assert_eq!(made.to_vec()?, expected);
        Ok(())
    });
}
