//! Data that goes into shards and out of them, on the host.

use gemmesh::error::Kind;
use gemmesh::{Error, Group, Host, all_gather, bf16};

use crate::support::numbers::{bits, normal};

crate::support::shared::shards_tests!(Host, Some(()));

#[test]
fn own_rows_are_slices() {
    const K: usize = 3;
    let gathered = Group::<Host>::threads(3, |group| {
        let mut x = group.sharded::<u32>(7, K)?;
        let first = (x.rows().start * K) as u32;
        for (value, number) in x.shard_slice_mut()?.iter_mut().zip(first..) {
            *value = number;
        }
        all_gather(&x)?;
        let own = x.rows().start * K..x.rows().end * K;
        let all = x.to_vec()?;
        assert_eq!(x.shard_slice()?, &all[own]);
        Ok::<_, Error>(all)
    });
    let all: Vec<u32> = (0..7 * K as u32).collect();
    assert_eq!(gathered, Ok(vec![all; 3]));
}

#[test]
fn slices_are_refused_where_there_are_none_and_in_a_failed_group() {
    let done = Group::<Host>::threads(1, |group| {
        let mut staged = group.sharded_staged::<f32>(4, 1, 2)?;
        let refused = staged.shard_slice_mut().unwrap_err();
        assert!(
            matches!(refused.kind(), Kind::Unsupported { .. }),
            "{refused}"
        );
        let mut matrix = group.upload(&[1.0f32, 2.0], 2, 1)?;
        matrix.set_rows(1)?;
        assert_eq!(matrix.as_slice()?, [1.0]);
        matrix.set_rows(0)?;
        assert!(matrix.as_mut_slice()?.is_empty());
        group.fail("no more");
        assert!((matrix.as_slice()).is_err_and(|error| error.has_ended_group()));
        Ok::<_, Error>(())
    });
    assert_eq!(done, Ok(vec![()]));
}

/// A thread reads the matrix while another gathers into it. Either reads whole gathers only.
#[test]
fn a_matrix_is_read_while_a_different_thread_gathers() {
    const M: usize = 4;
    const K: usize = 512;
    const GATHERS: usize = 30;
    let done = Group::<Host>::threads(2, |group| {
        let mut x = group.sharded::<bf16>(M, K)?;
        let values = normal::<bf16>(11, M * K);
        let own = x.rows().start * K..x.rows().end * K;
        x.shard_mut().copy_from_host(&values[own])?;
        all_gather(&x)?;
        std::thread::scope(|scope| {
            let gathers = scope.spawn(|| (0..GATHERS).try_for_each(|_| all_gather(&x)));
            for _ in 0..GATHERS {
                assert_eq!(bits(&x.to_vec()?), bits(&values));
            }
            gathers.join().unwrap()
        })
    });
    assert_eq!(done, Ok(vec![(); 2]));
}
