//! Calls that differ: whose does is named to every rank.

use std::time::Instant;

use gemmesh::{Error, Group, bf16, f16};

use crate::support::patience::stretched;
use crate::support::tested::{Tested, assert_call_mismatch, connect, poisoned, ranks, same_error};

/// A call of a rank.
type Call<B> = fn(&Group<B>) -> Result<(), Error>;

/// Of three ranks, `odd` makes `its` call and the others `others`: both as it is made and in words.
#[track_caller]
pub fn differ<B: Tested>(test: &str, odd: usize, its: (Call<B>, &str), others: (Call<B>, &str)) {
    let ranks = ranks::<B>(test, 3, |rank| {
        let group = connect::<B>(rank, B::TIMEOUT)?;
        group.barrier()?;
        let (call, _) = if rank.rank == odd { its } else { others };
        let begin = Instant::now();
        let result = call(&group);
        let took = begin.elapsed();
        assert!(took < B::before_timeout(B::NOTICED), "{took:?}");
        poisoned(&group, result)
    });
    assert_call_mismatch(&same_error(&ranks.outcomes()), odd, its.1, others.1);
}

#[track_caller]
pub fn another_shape<B: Tested>(test: &str) {
    differ::<B>(
        test,
        1,
        (
            |group| group.sharded::<bf16>(9, 8).map(drop),
            "sharded(M = 9, K = 8, bf16)",
        ),
        (
            |group| group.sharded::<bf16>(6, 8).map(drop),
            "sharded(M = 6, K = 8, bf16)",
        ),
    );
}

#[track_caller]
pub fn another_type<B: Tested>(test: &str) {
    differ::<B>(
        test,
        0,
        (
            |group| group.sharded::<f16>(6, 8).map(drop),
            "sharded(M = 6, K = 8, f16)",
        ),
        (
            |group| group.sharded::<bf16>(6, 8).map(drop),
            "sharded(M = 6, K = 8, bf16)",
        ),
    );
}

#[track_caller]
pub fn barrier_for_a_matrix<B: Tested>(test: &str) {
    differ::<B>(
        test,
        1,
        (Group::barrier, "barrier()"),
        (
            |group| group.sharded::<bf16>(6, 8).map(drop),
            "sharded(M = 6, K = 8, bf16)",
        ),
    );
}

/// Exchanges that differ.
#[macro_export]
macro_rules! exchanges_that_differ {
    ($backend:ty: $($test:ident = $part:ident,)+) => {
        $(
            #[test]
            fn $test() {
                if let Some(_leave) = <$backend as $crate::support::tested::Tested>::leave() {
                    $crate::support::shared::mismatches::$part::<$backend>($crate::test_name!());
                }
            }
        )+
    };
    ($backend:ty) => {
        $crate::exchanges_that_differ!($backend:
            a_sharded_matrix_of_another_shape_on_one_rank_is_named = another_shape,
            a_sharded_matrix_of_another_type_on_one_rank_is_named = another_type,
            a_rank_at_a_barrier_while_the_others_allocate_is_named = barrier_for_a_matrix,
        );
    };
}
