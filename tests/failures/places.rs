//! The error of an argument names the line of the program that makes the call, on every rank that reads it.

use gemmesh::error::Kind;
use gemmesh::interop::dlpack::DLManagedTensor;
use gemmesh::pipelines::{
    AllGatherAndConsume, ProduceAndReduceScatter, all_gather_and_consume, produce_and_all_to_all,
    produce_and_reduce_scatter,
};
use gemmesh::trace::{Timeline, Trace};
use gemmesh::{
    AllGatherMatmul, Error, Group, Host, MatmulAllReduce, MatmulReduceScatter, Matrix,
    ShardedMatrix, all_gather, all_gather_matmul, all_reduce, all_to_all, bf16, broadcast,
    matmul_all_reduce, matmul_reduce_scatter, reduce_scatter,
};

type Done = Result<(), Error>;
type Wrong = fn(&Group<Host>) -> Done;

fn zeros(group: &Group<Host>, rows: usize, columns: usize) -> Matrix<Host, bf16> {
    group.zeros(rows, columns).expect("a matrix")
}

fn sharded(group: &Group<Host>, m: usize, k: usize) -> ShardedMatrix<Host, bf16> {
    group.sharded(m, k).expect("a sharded matrix")
}

/// A [4, 2] matrix whose rows are apart.
#[allow(unsafe_code)]
fn padded(group: &Group<Host>) -> Matrix<Host, bf16> {
    let tensor = zeros(group, 4, 4).into_dlpack();
    // SAFETY: the tensor is alive and used by no one else. It stays within its memory.
    let adopted = unsafe {
        *(*tensor).dl_tensor.shape.add(1) = 2;
        Matrix::from_dlpack(group, tensor)
    };
    adopted.expect("a part of a tensor")
}

/// Makes an f32 matrix of a tensor of bf16.
#[allow(unsafe_code)]
#[track_caller]
fn as_f32(group: &Group<Host>, tensor: *mut DLManagedTensor) -> Done {
    // SAFETY: the tensor is alive and used by no one else. It is lost when it is refused.
    unsafe { Matrix::<Host, f32>::from_dlpack(group, tensor) }.map(drop)
}

/// Each of (line, call) is refused. The error names a line of this file, from that line to the next call's.
#[track_caller]
fn check(calls: &[(u32, Wrong)]) {
    const LAST: u32 = 10;
    for (index, &(first, call)) in calls.iter().enumerate() {
        let next = calls.get(index + 1).map_or(first + LAST, |next| next.0);
        let told = Group::<Host>::builder().workers(1).threads(1, |group| {
            Ok::<_, Error>(call(&group).expect_err(&format!("line {first}")))
        });
        let told = told.unwrap().remove(0);
        let place = told.call().and_then(|call| call.place());
        let is_there = (first..next).any(|line| place == Some(&at(line)));
        assert!(is_there, "line {first}: {told}");
    }
}

fn at(line: u32) -> String {
    format!("{}:{line}", file!())
}

#[test]
fn refused_uses_of_memory_are_named_by_their_line() {
    check(&[
        (line!(), |g| {
            zeros(g, 2, 3).view().copy_to_host(&mut [bf16::ONE; 5])
        }),
        (line!(), |g| zeros(g, 2, 3).view().rows(1..3).map(drop)),
        (line!(), |g| zeros(g, 2, 3).view().columns(1..4).map(drop)),
        (line!(), |g| padded(g).as_slice().map(drop)),
        (line!(), |g| padded(g).as_mut_slice().map(drop)),
        (line!(), |g| sharded(g, 6, 4).write(7, &[])),
        (line!(), |g| as_f32(g, zeros(g, 2, 3).into_dlpack())),
        (line!(), |g| g.all_gather_bytes(&vec![0; 1 << 28]).map(drop)),
        (line!(), |g| {
            Err(g.refuse(
                "a library's call",
                sharded(g, 6, 4).set_rows(&[7]).unwrap_err(),
            ))
        }),
    ]);
}

#[test]
fn refused_operations_are_named_by_their_line() {
    check(&[
        (line!(), |g| {
            MatmulReduceScatter::new()
                .prepare(&zeros(g, 6, 4), 0)
                .map(drop)
        }),
        (line!(), |g| {
            MatmulAllReduce::new()
                .prepare(&zeros(g, 6, 4), &sharded(g, 7, 5))
                .map(drop)
        }),
        (line!(), |g| {
            AllGatherAndConsume::new()
                .chunks(0)
                .run_traced(&sharded(g, 6, 4), |_| Ok(()))
                .map(drop)
        }),
        (line!(), |g| {
            ProduceAndReduceScatter::new()
                .run_traced(7, &mut zeros(g, 6, 4), |_| Ok(()))
                .map(drop)
        }),
        (line!(), |g| {
            produce_and_all_to_all(&mut g.sharded_staged::<bf16>(6, 4, 2)?, |_| Ok(()))
        }),
    ]);
}

/// Planned for [6, 4] and N = 5.
fn gather(g: &Group<Host>) -> gemmesh::products::Prepared<'static, Host, bf16> {
    AllGatherMatmul::new()
        .prepare(&sharded(g, 6, 4), 5)
        .expect("a plan")
}

fn scatter(g: &Group<Host>) -> gemmesh::products::PreparedReduceScatter<'static, Host, bf16> {
    MatmulReduceScatter::new()
        .prepare(&zeros(g, 6, 4), 5)
        .expect("a plan")
}

fn reduce(g: &Group<Host>) -> gemmesh::products::PreparedAllReduce<'static, Host, bf16> {
    MatmulAllReduce::new()
        .prepare(&zeros(g, 6, 4), &sharded(g, 6, 5))
        .expect("a plan")
}

fn weight(g: &Group<Host>) -> Matrix<Host, bf16> {
    zeros(g, 5, 4)
}

#[test]
fn refused_prepared_calls_are_named_by_their_line() {
    check(&[
        (line!(), |g| {
            gather(g).run(&sharded(g, 7, 4), &weight(g), &mut zeros(g, 6, 5))
        }),
        (line!(), |g| {
            gather(g)
                .run_traced(&sharded(g, 6, 4), &weight(g), &mut zeros(g, 7, 5))
                .map(drop)
        }),
        (line!(), |g| gather(g).gather(&sharded(g, 7, 4))),
        (line!(), |g| {
            gather(g).matmul(&sharded(g, 7, 4), &weight(g), &mut zeros(g, 6, 5))
        }),
        (line!(), |g| {
            gather(g)
                .run_in_sequence_traced(&sharded(g, 7, 4), &weight(g), &mut zeros(g, 6, 5))
                .map(drop)
        }),
        (line!(), |g| {
            gather(g)
                .run_in_sequence_traced(&sharded(g, 6, 4), &weight(g), &mut zeros(g, 7, 5))
                .map(drop)
        }),
        (line!(), |g| {
            scatter(g).run(&zeros(g, 7, 4), &weight(g), &mut zeros(g, 6, 5))
        }),
        (line!(), |g| {
            scatter(g)
                .run_traced(&zeros(g, 7, 4), &weight(g), &mut zeros(g, 6, 5))
                .map(drop)
        }),
        (line!(), |g| {
            scatter(g).run_into(&zeros(g, 6, 4), &weight(g), &mut sharded(g, 7, 5))
        }),
        (line!(), |g| {
            scatter(g)
                .run_into_traced(&zeros(g, 6, 4), &weight(g), &mut sharded(g, 7, 5))
                .map(drop)
        }),
        (line!(), |g| {
            scatter(g).multiply_partials(&zeros(g, 7, 4), &weight(g))
        }),
        (line!(), |g| scatter(g).sum_partials(&mut zeros(g, 7, 5))),
        (line!(), |g| {
            reduce(g).run(&zeros(g, 7, 4), &weight(g), &mut sharded(g, 6, 5))
        }),
        (line!(), |g| {
            reduce(g)
                .run_traced(&zeros(g, 6, 4), &weight(g), &mut sharded(g, 7, 5))
                .map(drop)
        }),
        (line!(), |g| {
            reduce(g).multiply_partials(&zeros(g, 7, 4), &weight(g))
        }),
        (line!(), |g| reduce(g).sum_partials(&mut sharded(g, 7, 5))),
    ]);
}

#[test]
fn a_rank_that_waits_reads_the_line_of_the_others_call() {
    let line = line!() + 6;
    let told = Group::<Host>::threads(2, |group| {
        let a = sharded(&group, 6, 4);
        let told = match group.rank() {
            0 => all_gather(&a),
            // It leaves.
            _ => all_gather_matmul(&a, &zeros(&group, 5, 3), &mut zeros(&group, 6, 5)),
        };
        Ok::<_, Error>(told.unwrap_err())
    });
    for (rank, error) in told.unwrap().iter().enumerate() {
        let place = error.call().and_then(|call| call.place());
        assert_eq!(place, Some(&*at(line)), "rank {rank}: {error}");
    }
}

/// What two ranks have made together: [6, 4] and [6, 5].
struct Made {
    a: ShardedMatrix<Host, bf16>,
    sums: ShardedMatrix<Host, bf16>,
}

/// A collective call, and the line before it.
type Waits = (u32, fn(&Group<Host>, &mut Made) -> Done);

/// In each call, rank 0 waits for rank 1, which has left.
fn wait_in_vain(call: fn(&Group<Host>, &mut Made) -> Done) -> Error {
    let told = Group::<Host>::builder().workers(1).threads(2, |group| {
        let mut made = Made {
            a: group.sharded(6, 4)?,
            sums: group.sharded(6, 5)?,
        };
        let told = (group.rank() == 0).then(|| call(&group, &mut made));
        Ok::<_, Error>(told.map(|told| told.expect_err("a rank that has left")))
    });
    told.unwrap().swap_remove(0).expect("rank 0's error")
}

#[track_caller]
fn check_waits(calls: &[Waits]) {
    const LAST: u32 = 10;
    for (index, &(first, call)) in calls.iter().enumerate() {
        let next = calls.get(index + 1).map_or(first + LAST, |next| next.0);
        let told = wait_in_vain(call);
        let Kind::RankLeft { what, .. } = told.kind() else {
            panic!("line {first}: {told}");
        };
        let call = what.split(": rank ").next().unwrap_or_default();
        let is_there = (first..next).any(|line| call.ends_with(&format!(" at {}", at(line))));
        assert!(is_there, "line {first}: {told}");
    }
}

#[test]
fn a_rank_that_waits_in_vain_says_the_line_of_its_exchange() {
    check_waits(&[
        (line!(), |g, _| g.barrier()),
        (line!(), |g, _| g.all_gather_bytes(b"word").map(drop)),
        (line!(), |g, _| g.sharded::<bf16>(6, 4).map(drop)),
        (line!(), |g, _| g.sharded_rows::<bf16>(&[1, 2], 4).map(drop)),
        (line!(), |g, _| g.sharded_staged::<bf16>(6, 4, 2).map(drop)),
        (line!(), |g, _| {
            g.sharded_with_capacity::<bf16>(6, 4).map(drop)
        }),
        (line!(), |g, _| g.split(0, 0).map(drop)),
        (line!(), |g, _| {
            Group::builder().name("part").split(g, 0, 0).map(drop)
        }),
        (line!(), |g, _| {
            let (rank, spans) = (g.rank(), Vec::new());
            Timeline::collect(g, &Trace { rank, spans }).map(drop)
        }),
    ]);
}

#[test]
fn a_rank_that_waits_in_vain_says_the_line_of_its_collective() {
    check_waits(&[
        (line!(), |_, made| all_gather(&made.a)),
        (line!(), |_, made| broadcast(&mut made.a, 1)),
        (line!(), |g, _| {
            reduce_scatter(&zeros(g, 6, 4), &mut zeros(g, 3, 4))
        }),
        (line!(), |g, made| all_reduce(&zeros(g, 6, 4), &mut made.a)),
        (line!(), |g, made| all_to_all(&zeros(g, 6, 4), &mut made.a)),
        (line!(), |_, made| {
            all_gather_and_consume(&made.a, |_| Ok(()))
        }),
        (line!(), |_, made| {
            let traced = AllGatherAndConsume::new().run_traced(&made.a, |_| Ok(()));
            traced.map(drop)
        }),
        (line!(), |g, _| {
            produce_and_reduce_scatter(6, &mut zeros(g, 3, 4), |_| Ok(()))
        }),
        (line!(), |_, made| {
            produce_and_all_to_all(&mut made.a, |_| Ok(()))
        }),
    ]);
}

#[test]
fn a_rank_that_waits_in_vain_says_the_line_of_its_product() {
    check_waits(&[
        (line!(), |g, made| {
            all_gather_matmul(&made.a, &weight(g), &mut zeros(g, 6, 5))
        }),
        (line!(), |g, made| {
            let prepared = AllGatherMatmul::new().prepare(&made.a, 5)?;
            prepared.run(&made.a, &weight(g), &mut zeros(g, 6, 5))
        }),
        (line!(), |_, made| {
            let prepared = AllGatherMatmul::<_, bf16>::new().prepare(&made.a, 5)?;
            prepared.gather(&made.a)
        }),
        (line!(), |g, _| {
            matmul_reduce_scatter(&zeros(g, 6, 4), &weight(g), &mut zeros(g, 3, 5))
        }),
        (line!(), |g, _| {
            scatter(g).run(&zeros(g, 6, 4), &weight(g), &mut zeros(g, 3, 5))
        }),
        (line!(), |g, made| {
            scatter(g).run_into(&zeros(g, 6, 4), &weight(g), &mut made.sums)
        }),
        (line!(), |g, made| {
            matmul_all_reduce(&zeros(g, 6, 4), &weight(g), &mut made.sums)
        }),
        (line!(), |g, made| {
            let prepared = MatmulAllReduce::new().prepare(&zeros(g, 6, 4), &made.sums)?;
            prepared.run(&zeros(g, 6, 4), &weight(g), &mut made.sums)
        }),
    ]);
}
