//! Blocks of as many rows as the ranks count for each pair.

use gemmesh::elements::Value;
use gemmesh::error::Kind;
use gemmesh::pipelines::{ProduceAndAllToAll, produce_and_all_to_all};
use gemmesh::{Error, Group, all_to_all_with_counts, bf16};
use rand::RngExt;

use crate::support::errors::parts_of;
use crate::support::numbers::rng;
use crate::support::shared::collectives::{Produces, bytes, random, with_delays};
use crate::support::tested::{
    all_done, assert_call_mismatch, connect, poisoned, ranks, same_error,
};

/// The rows of each output, which are more than a rank gets.
const M: usize = 500;

/// The rows that each rank sends each, by sender and then by receiver.
struct Pairs {
    world: usize,
    rows: Vec<usize>,
}

impl Pairs {
    /// Most differ. Some pairs exchange nothing, and with some seeds a rank, all ranks, or all pairs but one.
    fn random(seed: u64, world: usize) -> Pairs {
        let mut random = rng(seed);
        let most = M / world;
        let row = |index: usize| {
            let (from, to, one) = (index / world, index % world, seed as usize % world);
            let is_left_out = match seed % 8 {
                5 => from == one || to == one,
                6 => true,
                7 => (from, to) != (one, (one + 1) % world),
                _ => random.random_range(0..3) == 0,
            };
            let rows = [1, 7, 40, most][random.random_range(0..4)];
            if is_left_out { 0 } else { rows.min(most) }
        };
        let rows = (0..world * world).map(row).collect();
        Pairs { world, rows }
    }

    fn between(&self, from: usize, to: usize) -> usize {
        self.rows[from * self.world + to]
    }

    /// The rows of `from` for the ranks before `to`.
    fn before(&self, from: usize, to: usize) -> usize {
        (0..to).map(|to| self.between(from, to)).sum()
    }

    fn sent(&self, from: usize) -> usize {
        self.before(from, self.world)
    }

    /// What comes to `to`, if each rank sends these rows of `n` elements, and `poison` behind it.
    fn received<T: Value>(&self, sent: &[Vec<T>], to: usize, n: usize, poison: T) -> Vec<T> {
        let mut all = Vec::new();
        for (from, sent) in sent.iter().enumerate() {
            let first = self.before(from, to);
            let end = first + self.between(from, to);
            all.extend_from_slice(&sent[first * n..end * n]);
        }
        all.resize(M * n, poison);
        all
    }
}

/// Exchanges random blocks, with and without a function that makes them. Collective.
pub fn step<B: Produces, T: Value>(group: &Group<B>, seed: u64) -> Result<(), Error> {
    let (rank, world) = (group.rank(), group.world_size());
    let n = 16 * (1 + seed as usize % 3);
    let pairs = Pairs::random(seed, world);
    let counts = &pairs.rows;
    let sent = |rank: usize| random::<T>(seed * 8 + rank as u64, pairs.sent(rank) * n);
    let sent: Vec<Vec<T>> = (0..world).map(sent).collect();
    let poison: T = random(99, 1)[0];
    let expected = pairs.received(&sent, rank, n, poison);
    let source = group.upload(&sent[rank], pairs.sent(rank), n)?;
    let mut out = group.sharded::<T>(M, n)?;

    out.write(0, &vec![poison; M * n])?;
    all_to_all_with_counts(&source, &mut out, counts)?;
    assert_eq!(bytes(&out.to_vec()?), bytes(&expected), "seed {seed}");

    out.write(0, &vec![poison; M * n])?;
    let mut made = vec![0; world];
    let chunks = 1 + seed as usize % 4;
    let options = ProduceAndAllToAll::new().counts(counts).chunks(chunks);
    options.run(&mut out, |mut block| {
        let (owner, rows) = (block.owner(), block.rows());
        assert_eq!(rows.start, made[owner], "seed {seed}");
        made[owner] = rows.end;
        let first = pairs.before(rank, owner) + rows.start;
        B::put(&mut block, &source, &sent[rank], first);
        Ok(())
    })?;
    assert_eq!(bytes(&out.to_vec()?), bytes(&expected), "seed {seed}");
    let own: Vec<usize> = (0..world).map(|to| pairs.between(rank, to)).collect();
    assert_eq!(made, own, "seed {seed}");
    Ok(())
}

/// With and without a function that makes them. What lies after them in the output stays.
#[track_caller]
pub fn blocks_of_counts_reach_their_ranks<B: Produces>(test: &str, world: usize) {
    all_done(ranks::<B>(test, world, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        with_delays(|seed| match seed % 3 {
            0 => step::<B, u8>(&group, seed),
            1 => step::<B, bf16>(&group, seed),
            _ => step::<B, u64>(&group, seed),
        })
    }));
}

/// Counts that cannot be are refused by name before anything is done, and the group goes on.
#[track_caller]
pub fn counts_that_do_not_fit_are_refused<B: Produces>(test: &str) {
    all_done(ranks::<B>(test, 2, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let mut out = group.sharded::<bf16>(8, 8)?;
        let a = group.zeros::<bf16>(5, 8)?;
        let mut refused = |counts: &[usize]| {
            let plain = all_to_all_with_counts(&a, &mut out, counts).unwrap_err();
            let options = ProduceAndAllToAll::new().counts(counts);
            (plain, options.run(&mut out, |_| Ok(())).unwrap_err())
        };
        for few in [&[][..], &[5], &[5, 0, 0, 5, 0]] {
            let (plain, produced) = refused(few);
            for error in [plain, produced] {
                let words = error.to_string();
                let of_counts = "and must be 4, one for each pair of ranks";
                assert!(words.contains(of_counts), "{words}");
            }
        }
        for many in [[0, 5, 0, 4], [0, usize::MAX, 0, 5], [0, 9, 5, 0]] {
            let (plain, produced) = refused(&many);
            for error in [plain, produced] {
                let words = error.to_string();
                assert!(words.contains("the number of rows for rank 1"), "{words}");
                assert!(
                    matches!(error.kind(), Kind::Limit { max: 8, .. }),
                    "{words}"
                );
            }
        }
        let other = all_to_all_with_counts(&a, &mut out, &[4, 0, 0, 4]);
        match parts_of(&other) {
            Some((
                _,
                Kind::Shape {
                    expected, found, ..
                },
            )) => {
                assert_eq!((&expected[..], &found[..]), (&[4, 8][..], &[5, 8][..]));
            }
            other => panic!("{other:?}"),
        }
        all_to_all_with_counts(&a, &mut out, &[2, 3, 1, 4])?;
        produce_and_all_to_all(&mut out, |_| Ok(()))?;
        group.synchronize()?;
        Ok("refused".into())
    }));
}

/// Counts that one rank has different name that rank.
#[track_caller]
pub fn counts_that_differ_are_a_mismatch<B: Produces>(test: &str) {
    let ranks = ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        let a = group.zeros::<u8>(3, 16)?;
        let mut out = group.sharded::<u8>(9, 16)?;
        let mut counts = [1; 9];
        if rank.rank == 2 {
            counts[3..6].copy_from_slice(&[0, 1, 2]);
        }
        let result = all_to_all_with_counts(&a, &mut out, &counts);
        poisoned(&group, result.and_then(|()| group.synchronize()))
    });
    let error = same_error(&ranks.outcomes());
    let call = |of_rank_1: &str| {
        let ones = "sends [1, 1, 1]";
        let counts = format!("rank 0 {ones}, rank 1 sends {of_rank_1}, rank 2 {ones}");
        format!("all_to_all(M = 9, N = 16, u8, {counts}, the 1st sharded matrix of the group)")
    };
    assert_call_mismatch(&error, 2, &call("[0, 1, 2]"), &call("[1, 1, 1]"));
    let words = error.to_string();
    let differs = "with rank 1 sends [0, 1, 2], and rank 0";
    assert!(words.contains(differs), "{words}");
}
