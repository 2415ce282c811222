//! Data that goes into shards and out of them without the host.

use gemmesh::error::Kind;
use gemmesh::{
    AllGatherMatmul, Error, Group, Matmul, MatmulReduceScatter, Matrix, Result, ShardedMatrix,
    all_gather, all_gather_matmul, all_reduce, all_to_all, bf16, reduce_scatter,
};

use crate::support::errors::kind_of;
use crate::support::numbers::{Reference, bits, nan, normal};
use crate::support::processes::Rank;
use crate::support::tested::{Tested, all_done, connect, ranks};

const M: usize = 50;
const N: usize = 24;
const K: usize = 72;
const WORLD: usize = 2;
/// More steps than operations overlap.
const STEPS: u64 = 6;

fn done<B: Tested>(test: &str, part: impl Fn(&Group<B>) -> Result<()>) {
    all_done(ranks::<B>(test, WORLD, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        part(&group)?;
        group.synchronize()?;
        Ok("right".into())
    }));
}

/// Row-major values of some rows.
fn of_rows<T: Copy>(values: &[T], rows: std::ops::Range<usize>, columns: usize) -> Vec<T> {
    values[rows.start * columns..rows.end * columns].to_vec()
}

/// A product writes the rows that the next gather sends, over and over.
pub fn a_product_writes_own_rows<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        let (identity, w) = (identity(group)?, normal::<bf16>(7, N * K));
        let weight = group.upload(&w, N, K)?;
        let mut outs = Vec::new();
        for step in 0..STEPS {
            let values = normal::<bf16>(step, M * K);
            let h = group.upload(&of_rows(&values, own.clone(), K), own.len(), K)?;
            Matmul::new().run(&h, &identity, x.shard_mut().view_mut()?)?;
            let mut out = group.upload::<bf16>(&vec![nan(); M * N], M, N)?;
            all_gather_matmul(&x, &weight, &mut out)?;
            outs.push((values, out));
        }
        for (values, out) in outs {
            let reference = Reference::new(&values, &w, None, K);
            reference.check(&out.to_vec()?).unwrap();
        }
        Ok(())
    });
}

fn identity<B: Tested>(group: &Group<B>) -> Result<Matrix<B, bf16>> {
    let mut values = vec![bf16::ZERO; K * K];
    (0..K).for_each(|i| values[i * K + i] = bf16::ONE);
    group.upload(&values, K, K)
}

/// A matrix of this rank is copied into own rows, over and over, while peers may still read the rows before.
pub fn own_rows_are_copied_in_order<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        let w = normal::<bf16>(8, N * K);
        let weight = group.upload(&w, N, K)?;
        let mut outs = Vec::new();
        for step in 0..STEPS {
            let values = normal::<bf16>(20 + step, M * K);
            let rows = group.upload(&of_rows(&values, own.clone(), K), own.len(), K)?;
            x.shard_mut().copy_from(&rows)?;
            // Its memory is freed when the copy has been made.
            drop(rows);
            let mut out = group.upload::<bf16>(&vec![nan(); M * N], M, N)?;
            AllGatherMatmul::new().run(&x, &weight, &mut out)?;
            outs.push((values, out));
        }
        for (values, out) in outs {
            let reference = Reference::new(&values, &w, None, K);
            reference.check(&out.to_vec()?).unwrap();
        }
        Ok(())
    });
}

/// A layer adds its sums to the shard that it began with.
pub fn a_residual_is_the_shard<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let values = normal::<bf16>(3, M * K);
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        x.shard_mut()
            .copy_from_host(&of_rows(&values, own.clone(), K))?;
        let mut next = group.sharded::<bf16>(M, K)?;
        // Ones times zero is nothing, so that the sum is the residual.
        let h = group.upload(&vec![bf16::ONE; M * N], M, N)?;
        let zeros = group.zeros::<bf16>(K, N)?;
        MatmulReduceScatter::new()
            .residual(x.shard()?)
            .run_into(&h, &zeros, &mut next)?;
        // The other way round, and in a view of the own rows.
        let sums = MatmulReduceScatter::new().residual(next.shard()?);
        sums.run(&h, &zeros, x.shard_mut().view_mut()?)?;
        all_gather(&x)?;
        assert_eq!(bits(&x.to_vec()?), bits(&values));
        let mut rows = group.zeros::<bf16>(own.len(), K)?;
        rows.view_mut().copy_from(next.shard()?)?;
        assert_eq!(bits(&rows.to_vec()?), bits(&of_rows(&values, own, K)));
        Ok(())
    });
}

/// What was gathered is an operand of this rank's own products, whole and in parts, while the next gather follows.
pub fn gathered_rows_are_operands<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        let w = normal::<bf16>(9, N * K);
        let weight = group.upload(&w, N, K)?;
        let mut outs = Vec::new();
        for step in 0..STEPS {
            let values = normal::<bf16>(40 + step, M * K);
            let rows = group.upload(&of_rows(&values, own.clone(), K), own.len(), K)?;
            x.shard_mut().copy_from(&rows)?;
            all_gather(&x)?;
            let mut out = group.upload::<bf16>(&vec![nan(); M * N], M, N)?;
            let (above, below) = (0..M / 2, M / 2..M);
            let out_below = out.view_mut().rows(below.clone())?;
            Matmul::new().run(x.view().rows(below)?, &weight, out_below)?;
            let out_above = out.view_mut().rows(above.clone())?;
            Matmul::new().run(x.view().rows(above)?, &weight, out_above)?;
            outs.push((values, out));
        }
        for (values, out) in outs {
            let reference = Reference::new(&values, &w, None, K);
            reference.check(&out.to_vec()?).unwrap();
        }
        Ok(())
    });
}

/// Own rows of a staged matrix lie in several places.
pub fn staged_shards_are_copied_block_by_block<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let values = normal::<bf16>(5, 12 * K);
        let mut x = group.sharded_staged::<bf16>(12, K, 3)?;
        let own = x.rows();
        let rows = group.upload(&of_rows(&values, own.clone(), K), own.len(), K)?;
        x.shard_mut().copy_from(&rows)?;
        let found = x.to_vec()?;
        let blocks = x.blocks_of(group.rank());
        assert_eq!(blocks.len(), 3);
        let found = blocks.into_iter().flat_map(|rows| of_rows(&found, rows, K));
        let found: Vec<bf16> = found.collect();
        assert_eq!(bits(&found), bits(&of_rows(&values, own, K)));
        let several = "own rows must be one block";
        for refused in [x.shard().err(), x.shard_mut().view_mut().err()] {
            let words = refused.unwrap().to_string();
            assert!(words.contains(several), "{words}");
        }
        Ok(())
    });
}

/// Collectives take parts of matrices, and give sums into them.
pub fn parts_of_matrices_are_moved_by_collectives<B: Tested>(test: &str) {
    done::<B>(test, |group| {
        let (rank, columns) = (group.rank(), 8..8 + N);
        let width = 48;
        let [mine, others] = [rank, 1 - rank].map(|of| {
            let values = normal::<f32>(60 + of as u64, 2 * M * width);
            let part = values.chunks(width).flat_map(|row| &row[columns.clone()]);
            (part.copied().collect::<Vec<f32>>(), values)
        });
        let large = group.upload(&mine.1, 2 * M, width)?;
        let a = large.columns(columns.clone())?;
        let sum: Vec<f32> = match rank {
            0 => mine.0.iter().zip(&others.0).map(|(a, b)| a + b).collect(),
            _ => others.0.iter().zip(&mine.0).map(|(a, b)| a + b).collect(),
        };
        let own = rank * M..(rank + 1) * M;

        let mut out = group.upload(&vec![-1.0; M * width], M, width)?;
        reduce_scatter(a, out.view_mut().columns(columns.clone())?)?;
        let found = out.to_vec()?;
        let part = found.chunks(width).flat_map(|row| &row[columns.clone()]);
        let part: Vec<f32> = part.copied().collect();
        assert_eq!(part, of_rows(&sum, own.clone(), N));
        let beside = |row: &[f32]| row[..8].iter().chain(&row[8 + N..]).all(|&x| x == -1.0);
        assert!(found.chunks(width).all(beside), "written beside the part");

        let mut all = group.sharded::<f32>(2 * M, N)?;
        all_reduce(a, &mut all)?;
        assert_eq!(all.to_vec()?, sum);

        all_to_all(a, &mut all)?;
        let mut moved = [&mine.0, &others.0].map(|part| of_rows(part, own.clone(), N));
        if rank == 1 {
            moved.reverse();
        }
        assert_eq!(all.to_vec()?, moved.concat());

        // Sums go into own rows of a sharded matrix, and come from its rows.
        let mut next = group.sharded::<f32>(2 * M, N)?;
        reduce_scatter(a, next.shard_mut().view_mut()?)?;
        all_gather(&next)?;
        assert_eq!(next.to_vec()?, sum);
        reduce_scatter(next.view(), all.shard_mut().view_mut()?)?;
        let twice: Vec<f32> = sum.iter().map(|x| x + x).collect();
        let mut rows = group.zeros::<f32>(M, N)?;
        rows.view_mut().copy_from(all.shard()?)?;
        assert_eq!(rows.to_vec()?, of_rows(&twice, own, N));
        Ok(())
    });
}

/// Copies that do not fit are refused, and nothing is written.
pub fn copies_that_do_not_fit_are_refused<B: Tested>(test: &str) {
    all_done(ranks::<B>(test, 1, |rank: &Rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let elsewhere = Rank {
            address: format!("{}-elsewhere", rank.address),
            ..*rank
        };
        let other = connect::<B>(&elsewhere, B::TIMEOUT)?;
        let mut x = group.upload(&[1.0f32; 16], 2, 8)?;
        let mut shards = group.sharded::<f32>(2, 8)?;
        let taller = group.zeros::<f32>(3, 8)?;
        let foreign = other.zeros::<f32>(2, 8)?;
        let refused = [
            x.view_mut().copy_from(&taller),
            shards.shard_mut().copy_from(&taller),
        ];
        for refused in refused {
            assert!(
                matches!(kind_of(&refused), Some(Kind::Shape { .. })),
                "{refused:?}"
            );
        }
        let refused = [
            x.view_mut().copy_from(&foreign),
            shards.shard_mut().copy_from(&foreign),
        ];
        for refused in refused {
            let is_foreign = matches!(kind_of(&refused), Some(Kind::Unsuitable { .. }));
            assert!(is_foreign, "{refused:?}");
        }
        assert_eq!(x.to_vec()?, [1.0; 16]);
        // Without rows there is nothing to do.
        empty(&group)?;
        Ok("refused".into())
    }));
}

fn empty<B: Tested>(group: &Group<B>) -> Result<()> {
    let mut nothing: ShardedMatrix<B, f32> = group.sharded(0, 8)?;
    let none = group.zeros::<f32>(0, 8)?;
    nothing.shard_mut().copy_from(&none)?;
    assert_eq!(nothing.view().shape(), [0, 8]);
    assert_eq!(nothing.shard()?.shape(), [0, 8]);
    assert_eq!(nothing.shard_mut().view_mut()?.shape(), [0, 8]);
    nothing.shard_mut().view_mut()?.copy_from(&none)
}
