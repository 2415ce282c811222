//! Mistakes in calls, and the whole sentence that tells of each.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::pipelines::{
    AllGatherAndConsume, ProduceAndAllToAll, ProduceAndReduceScatter, all_gather_and_consume,
    produce_and_reduce_scatter,
};
use gemmesh::products::{WeightLayout, Weights};
use gemmesh::{
    AllGatherMatmul, Config, DType, Error, Group, Host, Matmul, MatmulAllReduce,
    MatmulReduceScatter, Matrix, ShardedMatrix, all_gather_matmul, all_reduce, all_to_all, bf16,
    broadcast, launch, matmul, matmul_all_reduce, matmul_reduce_scatter, reduce_scatter,
};

use crate::support::tested;

type Done = Result<(), Error>;
/// What is done wrong, a rank that does it, and what it is told.
type Mistake = (&'static str, fn(&Group<Host>) -> Done, &'static str);

/// Each mistake is made by all of `world` ranks, in a group of its own. The table has what the last rank is told,
/// without the place of the call.
#[track_caller]
fn check(world: usize, mistakes: &[Mistake]) {
    let told = mistakes.iter().map(|(mistake, make, _)| {
        let told = Group::<Host>::builder().workers(1).threads(world, |group| {
            let error = make(&group).expect_err(mistake);
            Ok::<_, Error>(error)
        });
        let mut told = told.unwrap_or_else(|error| panic!("{mistake}: {error}"));
        told.pop().expect("a rank")
    });
    let told: Vec<Error> = told.collect();
    compare(
        mistakes
            .iter()
            .zip(told)
            .map(|(&(mistake, _, expected), told)| (mistake, told, expected)),
    );
}

/// Of (mistake, told, expected).
#[track_caller]
fn compare(all: impl Iterator<Item = (&'static str, Error, &'static str)>) {
    let mut wrong = 0;
    for (mistake, told, expected) in all {
        println!("{mistake} -> {told}");
        if without_place(mistake, &told) != expected {
            println!("    expected: {expected}");
            wrong += 1;
        }
    }
    assert_eq!(wrong, 0, "sentences are not as expected");
}

/// The error's sentence without the place of the call, if it has a call. The place must lie in this file, between the
/// line that names the mistake and that of the sentence.
#[track_caller]
fn without_place(mistake: &str, error: &Error) -> String {
    const FILE: &str = concat!(file!(), ":");
    let sentence = tested::without_place(error, FILE);
    let Some(call) = error.call() else {
        return sentence;
    };
    let line = call.place().and_then(|place| place.strip_prefix(FILE));
    let line: Option<usize> = line.and_then(|line| line.parse().ok());
    let named = format!("\"{mistake}\",");
    let lines = include_str!("messages.rs").lines().map(str::trim);
    let after = lines.enumerate().skip_while(|(_, text)| *text != named);
    // The compiler counts from 1.
    let mut texts = after.filter(|(_, text)| text.starts_with('"'));
    let [begin, end] = [0; 2].map(|_| texts.next().map_or(0, |(index, _)| index + 1));
    assert!(
        line.is_some_and(|line| (begin..end).contains(&line)),
        "{mistake}, from line {begin} to {end}: {error}"
    );
    sentence
}

fn zeros(group: &Group<Host>, rows: usize, columns: usize) -> Matrix<Host, bf16> {
    group.zeros(rows, columns).expect("a matrix")
}

fn sharded(group: &Group<Host>, m: usize, k: usize) -> ShardedMatrix<Host, bf16> {
    group.sharded(m, k).expect("a sharded matrix")
}

fn range(start: usize, end: usize) -> Range<usize> {
    Range { start, end }
}

/// A group of this process alone.
fn other() -> Group<Host> {
    static OTHERS: AtomicUsize = AtomicUsize::new(0);
    let number = OTHERS.fetch_add(1, Ordering::Relaxed);
    let address = format!("messages {} {number}", std::process::id());
    let builder = Group::<Host>::builder().workers(1);
    builder.connect(0, 1, &address).expect("a group")
}

fn staged(group: &Group<Host>) -> ShardedMatrix<Host, bf16> {
    group.sharded_staged(6, 4, 2).expect("a staged matrix")
}

/// A [4, 3], b [5, 3] and out [4, 5].
fn operands(group: &Group<Host>) -> [Matrix<Host, bf16>; 3] {
    [(4, 3), (5, 3), (4, 5)].map(|(rows, columns)| zeros(group, rows, columns))
}

/// A product of [`operands`] that is told how it is cut up, with a mistake.
#[track_caller]
fn configured(group: &Group<Host>, mistake: fn(&mut Config)) -> Done {
    let product = || Matmul::<Host, bf16>::new();
    let mut config = product().prepare((group, [4, 3]), 5)?.config();
    mistake(&mut config);
    product()
        .config(config)
        .prepare((group, [4, 3]), 5)
        .map(drop)
}

/// A product of [`operands`] with weights of these shapes.
#[track_caller]
fn with_weights<'a>(
    product: Matmul<'a, Host, bf16>,
    group: &Group<Host>,
    shapes: &[[usize; 2]],
    outputs: usize,
) -> Done {
    let [a, _, _] = operands(group);
    let weights: Vec<_> = shapes.iter().map(|&[n, k]| zeros(group, n, k)).collect();
    let mut outs: Vec<_> = (0..outputs).map(|_| zeros(group, 4, 5)).collect();
    let weights: Weights<Host, bf16> = weights.iter().map(Matrix::view).collect();
    let outs: gemmesh::products::Outputs<Host, bf16> =
        outs.iter_mut().map(Matrix::view_mut).collect();
    product.run(&a, weights, outs)
}

#[test]
fn mistakes_with_matrices_are_told_in_whole_sentences() {
    check(1, MATRICES);
}

const MATRICES: &[Mistake] = &[
    (
        "upload a value too few",
        |g| g.upload(&[bf16::ONE; 5], 2, 3).map(drop),
        "rank 0: Group::upload: the number of elements of the slice is 5 and must be 6, that of a [2, 3] matrix",
    ),
    (
        "upload without columns",
        |g| g.upload::<bf16>(&[], 2, 0).map(drop),
        "rank 0: Group::upload: the number of columns is 0; it must be from 1 to 2147483647",
    ),
    (
        "zeros of too many rows",
        |g| g.zeros::<bf16>(1 << 31, 1).map(drop),
        "rank 0: Group::zeros: the number of rows is 2147483648; it must be from 0 to 2147483647",
    ),
    (
        "zeros of too many columns",
        |g| g.zeros::<bf16>(1, 1 << 31).map(drop),
        "rank 0: Group::zeros: the number of columns is 2147483648; it must be from 1 to 2147483647",
    ),
    (
        "sharded without K",
        |g| g.sharded::<bf16>(6, 0).map(drop),
        "rank 0: Group::sharded: K is 0; it must be from 1 to 2147483647",
    ),
    (
        "sharded of too many rows",
        |g| g.sharded::<bf16>(1 << 31, 4).map(drop),
        "rank 0: Group::sharded: M is 2147483648; it must be from 0 to 2147483647",
    ),
    (
        "sharded_rows of a rank too many",
        |g| g.sharded_rows::<bf16>(&[3, 3], 4).map(drop),
        "rank 0: Group::sharded_rows: the number of ranks of the list of rows is 2 and must be 1, that of the group",
    ),
    (
        "sharded_staged without stages",
        |g| g.sharded_staged::<bf16>(6, 4, 0).map(drop),
        "rank 0: Group::sharded_staged: the number of stages is 0; it must be from 1 to 64",
    ),
    (
        "sharded_staged of 65 stages",
        |g| g.sharded_staged::<bf16>(6, 4, 65).map(drop),
        "rank 0: Group::sharded_staged: the number of stages is 65; it must be from 1 to 64",
    ),
    (
        "sharded_with_capacity for too many rows",
        |g| g.sharded_with_capacity::<bf16>(1 << 31, 4).map(drop),
        "rank 0: Group::sharded_with_capacity: the capacity is 2147483648; it must be from 0 to 2147483647",
    ),
    (
        "set_rows above the matrix",
        |g| zeros(g, 2, 3).set_rows(3),
        "rank 0: Matrix::set_rows: the number of rows is 3; it must be from 0 to 2",
    ),
    (
        "set_rows above the capacity",
        |g| sharded(g, 6, 4).set_rows(&[7]),
        "rank 0: ShardedMatrix::set_rows: M is 7; it must be from 0 to 6",
    ),
    (
        "set_rows of a rank too many",
        |g| sharded(g, 6, 4).set_rows(&[1, 1]),
        "rank 0: ShardedMatrix::set_rows: the number of ranks of the list of rows is 2 and must be 1, that of the \
         group",
    ),
    (
        "copy_from_host a value too many",
        |g| zeros(g, 2, 3).copy_from_host(&[bf16::ONE; 7]),
        "rank 0: Matrix::copy_from_host: the number of elements of the slice is 7 and must be 6, that of a [2, 3] \
         matrix",
    ),
    (
        "copy_to_host a value too few",
        |g| zeros(g, 2, 3).copy_to_host(&mut [bf16::ONE; 5]),
        "rank 0: Matrix::copy_to_host: the number of elements of the slice is 5 and must be 6, that of a [2, 3] matrix",
    ),
    (
        "copy_to_host of a sharded matrix, a value too few",
        |g| sharded(g, 2, 3).copy_to_host(&mut [bf16::ONE; 5]),
        "rank 0: ShardedMatrix::copy_to_host: the number of elements of the slice is 5 and must be 6, that of a [2, \
         3] matrix",
    ),
    (
        "copy_from_host to a shard, a value too few",
        |g| sharded(g, 2, 3).shard_mut().copy_from_host(&[bf16::ONE; 5]),
        "rank 0: ShardMut::copy_from_host: the number of elements of the slice is 5 and must be 6, that of this rank's part, [2, 3] of the [2, 3] matrix",
    ),
];

#[test]
fn mistakes_with_views_are_told_in_whole_sentences() {
    check(1, VIEWS);
}

const VIEWS: &[Mistake] = &[
    (
        "copy_from a matrix of a different shape",
        |g| zeros(g, 2, 3).view_mut().copy_from(&zeros(g, 2, 4)),
        "rank 0: MatrixViewMut::copy_from: the view to copy [rows, columns] is [2, 4] and must be [2, 3]",
    ),
    (
        "copy_from a matrix of a different group",
        |g| zeros(g, 2, 3).view_mut().copy_from(&zeros(&other(), 2, 3)),
        "rank 0: MatrixViewMut::copy_from: the group of the view to copy is a different group and must be that of \
         this call; make all arguments \
         with one group",
    ),
    (
        "copy_from to a shard, a matrix of a different shape",
        |g| sharded(g, 2, 3).shard_mut().copy_from(&zeros(g, 1, 3)),
        "rank 0: ShardMut::copy_from: the view to copy [rows of this rank, K] is [1, 3] and must be [2, 3]",
    ),
    (
        "rows beyond the matrix",
        |g| zeros(g, 2, 3).rows(1..3).map(drop),
        "rank 0: Matrix::rows: the end of the rows, which begin at 1, is 3; it must be from 1 to 2",
    ),
    (
        "rows that end before they begin",
        |g| zeros(g, 2, 3).rows(range(2, 1)).map(drop),
        "rank 0: Matrix::rows: the end of the rows, which begin at 2, is 1; it must be 2",
    ),
    (
        "columns beyond the matrix",
        |g| zeros(g, 2, 3).columns(1..4).map(drop),
        "rank 0: Matrix::columns: the end of the columns, which begin at 1, is 4; it must be from 2 to 3",
    ),
    (
        "no columns",
        |g| zeros(g, 2, 3).columns(0..0).map(drop),
        "rank 0: Matrix::columns: the end of the columns is 0; it must be from 1 to 3",
    ),
    (
        "columns that end before they begin",
        |g| zeros(g, 2, 3).columns(range(2, 1)).map(drop),
        "rank 0: Matrix::columns: the end of the columns, which begin at 2, is 1; it must be 3",
    ),
    (
        "columns that end before they begin, of a wide matrix",
        |g| zeros(g, 2, 16).columns(range(9, 4)).map(drop),
        "rank 0: Matrix::columns: the end of the columns, which begin at 9, is 4; it must be from 10 to 16",
    ),
    (
        "no columns in the middle",
        |g| zeros(g, 2, 3).columns(1..1).map(drop),
        "rank 0: Matrix::columns: the end of the columns, which begin at 1, is 1; it must be from 2 to 3",
    ),
    (
        "columns that begin beyond the matrix",
        |g| zeros(g, 2, 3).columns(3..4).map(drop),
        "rank 0: Matrix::columns: the first column is 3; it must be from 0 to 2",
    ),
    (
        "rows that begin beyond the matrix",
        |g| zeros(g, 2, 3).rows(3..4).map(drop),
        "rank 0: Matrix::rows: the first row is 3; it must be from 0 to 2",
    ),
    (
        "columns of an output that end before they begin",
        |g| zeros(g, 2, 16).view_mut().columns(range(9, 4)).map(drop),
        "rank 0: MatrixViewMut::columns: the end of the columns, which begin at 9, is 4; it must be from 10 \
         to 16",
    ),
    (
        "rows of an output beyond it",
        |g| zeros(g, 2, 3).view_mut().rows(1..3).map(drop),
        "rank 0: MatrixViewMut::rows: the end of the rows, which begin at 1, is 3; it must be from 1 to 2",
    ),
    (
        "columns of an output beyond it",
        |g| zeros(g, 2, 3).view_mut().columns(1..4).map(drop),
        "rank 0: MatrixViewMut::columns: the end of the columns, which begin at 1, is 4; it must be from 2 \
         to 3",
    ),
    (
        "split_columns into too few",
        |g| zeros(g, 2, 3).view_mut().split_columns([1, 1]).map(drop),
        "rank 0: MatrixViewMut::split_columns: the number of columns of a split into [1, 1] is 2 and must be 3, that of the view",
    ),
    (
        "split_columns into none",
        |g| zeros(g, 2, 3).view_mut().split_columns([3, 0]).map(drop),
        "rank 0: MatrixViewMut::split_columns: a width is 0; it must be from 1 to 3",
    ),
    (
        "shard of a staged matrix",
        |g| staged(g).shard().map(drop),
        "rank 0: ShardedMatrix::shard: own rows must be one block to be viewed as one, but \
         they are 2 blocks, of 2 stages; use views of them (ShardedMatrix::view, ShardedMatrix::blocks_of)",
    ),
    (
        "shard_slice of a staged matrix",
        |g| staged(g).shard_slice().map(drop),
        "rank 0: ShardedMatrix::shard_slice: own rows must be one block to be viewed as one, \
         but they are 2 blocks, of 2 stages; use views of them (ShardedMatrix::view, \
         ShardedMatrix::blocks_of)",
    ),
    (
        "shard_slice_mut of a staged matrix",
        |g| staged(g).shard_slice_mut().map(drop),
        "rank 0: ShardedMatrix::shard_slice_mut: own rows must be one block to be viewed as \
         one, but they are 2 blocks, of 2 stages; use views of them (ShardedMatrix::view, \
         ShardedMatrix::blocks_of)",
    ),
    (
        "view_mut of a shard of a staged matrix",
        |g| staged(g).shard_mut().view_mut().map(drop),
        "rank 0: ShardMut::view_mut: own rows must be one block to be viewed as one, but they \
         are 2 blocks, of 2 stages; use views of them (ShardedMatrix::view, ShardedMatrix::blocks_of)",
    ),
];

#[test]
fn mistakes_with_a_product_of_one_rank_are_told_in_whole_sentences() {
    check(1, PRODUCTS_OF_ONE_RANK);
}

const PRODUCTS_OF_ONE_RANK: &[Mistake] = &[
    (
        "matmul, wrong K",
        |g| {
            let [a, _, mut out] = operands(g);
            matmul(&a, &zeros(g, 5, 2), &mut out)
        },
        "rank 0: matmul: b [N, K] is [5, 2] and must be [5, 3]",
    ),
    (
        "matmul, wrong N",
        |g| {
            let [a, b, _] = operands(g);
            matmul(&a, &b, &mut zeros(g, 4, 6))
        },
        "rank 0: matmul: out [M, N] is [4, 6] and must be [4, 5]",
    ),
    (
        "matmul, wrong M",
        |g| {
            let [a, b, _] = operands(g);
            matmul(&a, &b, &mut zeros(g, 3, 5))
        },
        "rank 0: matmul: out [M, N] is [3, 5] and must be [4, 5]",
    ),
    (
        "matmul, foreign weight",
        |g| {
            let [a, _, mut out] = operands(g);
            matmul(&a, &zeros(&other(), 5, 3), &mut out)
        },
        "rank 0: matmul: the group of b is a different group and must be that of this call; make all arguments with \
         one group",
    ),
    (
        "matmul, foreign output",
        |g| {
            let [a, b, _] = operands(g);
            matmul(&a, &b, &mut zeros(&other(), 4, 5))
        },
        "rank 0: matmul: the group of out is a different group and must be that of this call; make all arguments \
         with one group",
    ),
    (
        "weight of the other layout, wrong K",
        |g| {
            with_weights(
                Matmul::new().weight_layout(WeightLayout::Kn),
                g,
                &[[2, 5]],
                1,
            )
        },
        "rank 0: matmul: b [K, N] is [2, 5] and must be [3, 5]",
    ),
    (
        "no weight",
        |g| with_weights(Matmul::new(), g, &[], 1),
        "rank 0: matmul: the number of weights of a product is 0; it must be from 1 to 4",
    ),
    (
        "no output",
        |g| with_weights(Matmul::new(), g, &[[5, 3]], 0),
        "rank 0: matmul: the number of outputs of this call is 0 and must be 1, that of a product with 1 weight",
    ),
    (
        "two outputs of one weight",
        |g| with_weights(Matmul::new(), g, &[[5, 3]], 2),
        "rank 0: matmul: the number of outputs of this call is 2 and must be 1, that of a product with 1 weight",
    ),
    (
        "one output of two weights",
        |g| with_weights(Matmul::new(), g, &[[5, 3]; 2], 1),
        "rank 0: matmul: the number of outputs of this call is 1 and must be 2, that of a product with 2 weights",
    ),
    (
        "five weights",
        |g| with_weights(Matmul::new(), g, &[[5, 3]; 5], 5),
        "rank 0: matmul: the number of weights of a product is 5; it must be from 1 to 4",
    ),
    (
        "gated with one weight",
        |g| with_weights(Matmul::new().gated(), g, &[[5, 3]], 1),
        "rank 0: matmul: the number of weights of this call is 1 and must be 2, that of a gated product",
    ),
    (
        "gated with three weights",
        |g| with_weights(Matmul::new().gated(), g, &[[5, 3]; 3], 1),
        "rank 0: matmul: the number of weights of this call is 3 and must be 2, that of a gated product",
    ),
    (
        "gated with two outputs",
        |g| with_weights(Matmul::new().gated(), g, &[[5, 3]; 2], 2),
        "rank 0: matmul: the number of outputs of this call is 2 and must be 1, that of a gated product",
    ),
    (
        "gated with a different N of up",
        |g| with_weights(Matmul::new().gated(), g, &[[5, 3], [6, 3]], 1),
        "rank 0: matmul: b [N, K] (weight 2 of 2) is [6, 3] and must be [5, 3]",
    ),
    (
        "gated, prepared for a different N of up",
        |g| {
            Matmul::<Host, bf16>::new()
                .gated()
                .prepare((g, [4, 3]), [5, 6])
                .map(drop)
        },
        "rank 0: matmul: N of up, the second weight of a gated product, is 6; it must be 5",
    ),
    (
        "bias of a wrong width",
        |g| with_weights(Matmul::new().bias(&zeros(g, 1, 4)), g, &[[5, 3]], 1),
        "rank 0: matmul: bias [1, N] is [1, 4] and must be [1, 5]",
    ),
    (
        "bias of a wrong width of a gated product",
        |g| {
            with_weights(
                Matmul::new().gated().bias(&zeros(g, 1, 5)),
                g,
                &[[5, 3]; 2],
                1,
            )
        },
        "rank 0: matmul: bias [1, 2 N] is [1, 5] and must be [1, 10]",
    ),
    (
        "bias of a different group",
        |g| with_weights(Matmul::new().bias(&zeros(&other(), 1, 5)), g, &[[5, 3]], 1),
        "rank 0: matmul: the group of bias is a different group and must be that of this call; make all arguments \
         with one group",
    ),
    (
        "residual of a wrong shape",
        |g| with_weights(Matmul::new().residual(&zeros(g, 3, 5)), g, &[[5, 3]], 1),
        "rank 0: matmul: residual [M, N] is [3, 5] and must be [4, 5]",
    ),
    (
        "residual of two outputs",
        |g| with_weights(Matmul::new().residual(&zeros(g, 4, 5)), g, &[[5, 3]; 2], 2),
        "rank 0: matmul: the number of outputs of a product with a residual is 2; it must be 1",
    ),
    (
        "prepare for too many rows",
        |g| {
            Matmul::<Host, bf16>::new()
                .prepare((g, [1 << 31, 3]), 5)
                .map(drop)
        },
        "rank 0: matmul: M is 2147483648; it must be from 0 to 2147483647",
    ),
    (
        "prepare without K",
        |g| {
            Matmul::<Host, bf16>::new()
                .prepare((g, [4, 0]), 5)
                .map(drop)
        },
        "rank 0: matmul: K is 0; it must be from 1 to 2147483647",
    ),
    (
        "prepare without N",
        |g| {
            Matmul::<Host, bf16>::new()
                .prepare((g, [4, 3]), 0)
                .map(drop)
        },
        "rank 0: matmul: N is 0; it must be from 1 to 2147483647",
    ),
    (
        "prepare for no weight",
        |g| {
            Matmul::<Host, bf16>::new()
                .prepare((g, [4, 3]), [])
                .map(drop)
        },
        "rank 0: matmul: the number of weights of a product is 0; it must be from 1 to 4",
    ),
    (
        "prepared for other rows",
        |g| {
            let [_, b, mut out] = operands(g);
            Matmul::new()
                .prepare((g, [4, 3]), 5)?
                .run(&zeros(g, 3, 3), &b, &mut out)
        },
        "rank 0: matmul: a [M, K] of a prepared call is [3, 3] and must be [4, 3]",
    ),
    (
        "prepared in a different group",
        |g| {
            let [a, b, mut out] = operands(&other());
            Matmul::new().prepare((g, [4, 3]), 5)?.run(&a, &b, &mut out)
        },
        "rank 0: matmul: the group of a is a different group and must be that of this call; make all arguments with \
         one group",
    ),
    (
        "f32 output of a plan for bf16",
        |g| {
            let [a, b, _] = operands(g);
            let mut out = g.zeros::<f32>(4, 5)?;
            Matmul::new().prepare((g, [4, 3]), 5)?.run(&a, &b, &mut out)
        },
        "rank 0: matmul: the dtype of out is f32 and must be bf16, for which this call was prepared; prepare it with \
         output_dtype(DType::F32)",
    ),
    (
        "bf16 output of a plan for f32",
        |g| {
            let [a, b, mut out] = operands(g);
            Matmul::new()
                .output_dtype(DType::F32)
                .prepare((g, [4, 3]), 5)?
                .run(&a, &b, &mut out)
        },
        "rank 0: matmul: the dtype of out is bf16 and must be f32, for which this call was prepared; prepare it with \
         output_dtype(DType::Bf16)",
    ),
];

#[test]
fn mistakes_with_configurations_are_told_in_whole_sentences() {
    check(1, CONFIGURATIONS);
}

const CONFIGURATIONS: &[Mistake] = &[
    (
        "tile.m of 0",
        |g| configured(g, |c| c.tile.m = 0),
        "rank 0: matmul: Config::tile.m is 0; it must be from 1 to 2147483647",
    ),
    (
        "tile.n of 0",
        |g| configured(g, |c| c.tile.n = 0),
        "rank 0: matmul: Config::tile.n is 0; it must be from 1 to 2147483647",
    ),
    (
        "tile.k of 0",
        |g| configured(g, |c| c.tile.k = 0),
        "rank 0: matmul: Config::tile.k is 0; it must be from 1 to 2147483647",
    ),
    (
        "tile.stages of 0",
        |g| configured(g, |c| c.tile.stages = 0),
        "rank 0: matmul: Config::tile.stages is 0; it must be from 1 to 2147483647",
    ),
    (
        "tile.cluster_m of 17",
        |g| configured(g, |c| c.tile.cluster_m = 17),
        "rank 0: matmul: Config::tile.cluster_m is 17; it must be from 1 to 16",
    ),
    (
        "tile.split_k of 17",
        |g| configured(g, |c| c.tile.split_k = 17),
        "rank 0: matmul: Config::tile.split_k is 17; it must be from 1 to 16",
    ),
    (
        "tile.k_slices of 65",
        |g| configured(g, |c| c.tile.k_slices = 65),
        "rank 0: matmul: Config::tile.k_slices is 65; it must be from 1 to 64",
    ),
    (
        "split_k and k_slices",
        |g| configured(g, |c| (c.tile.split_k, c.tile.k_slices) = (2, 2)),
        "rank 0: matmul: Config::tile.split_k, where k_slices is above 1, is 2; it must be 1",
    ),
    (
        "tile.group_m of 0",
        |g| configured(g, |c| c.tile.group_m = 0),
        "rank 0: matmul: Config::tile.group_m is 0; it must be from 1 to 2147483647",
    ),
    (
        "no chunks",
        |g| configured(g, |c| c.chunking.count = 0),
        "rank 0: matmul: Config::chunking.count is 0; it must be from 1 to 64",
    ),
    (
        "65 last chunks",
        |g| configured(g, |c| c.chunking.last = 65),
        "rank 0: matmul: Config::chunking.last is 65; it must be from 1 to 64",
    ),
    (
        "no stages of a gather",
        |g| {
            AllGatherMatmul::new()
                .stages(0)
                .prepare(&sharded(g, 6, 4), 5)
                .map(drop)
        },
        "rank 0: all_gather_matmul: the number of stages is 0; it must be from 1 to 64",
    ),
    (
        "65 stages of a gather",
        |g| {
            AllGatherMatmul::new()
                .stages(65)
                .prepare(&sharded(g, 6, 4), 5)
                .map(drop)
        },
        "rank 0: all_gather_matmul: the number of stages is 65; it must be from 1 to 64",
    ),
    (
        "other stages than the matrix has",
        |g| {
            AllGatherMatmul::new()
                .stages(3)
                .prepare(&staged(g), 5)
                .map(drop)
        },
        "rank 0: all_gather_matmul: the number of stages of a gather of a staged matrix is 3; it must be 2",
    ),
    (
        "no chunks to consume",
        |g| {
            AllGatherAndConsume::new()
                .chunks(0)
                .run(&sharded(g, 6, 4), |_| Ok(()))
        },
        "rank 0: all_gather_and_consume: the number of chunks of a shard is 0; it must be from 1 to 64",
    ),
    (
        "65 chunks to produce",
        |g| {
            ProduceAndReduceScatter::new()
                .chunks(65)
                .run(6, &mut zeros(g, 6, 4), |_| Ok(()))
        },
        "rank 0: produce_and_reduce_scatter: the number of chunks of a rank's rows is 65; it must be from 1 \
         to 64",
    ),
    (
        "no chunks to exchange",
        |g| {
            ProduceAndAllToAll::new()
                .chunks(0)
                .run(&mut sharded(g, 6, 4), |_| Ok(()))
        },
        "rank 0: produce_and_all_to_all: the number of chunks of a rank's rows is 0; it must be from 1 to 64",
    ),
];

#[test]
fn mistakes_with_products_of_all_ranks_are_told_in_whole_sentences() {
    check(2, PRODUCTS_OF_ALL_RANKS);
}

const PRODUCTS_OF_ALL_RANKS: &[Mistake] = &[
    (
        "all_gather_matmul, wrong K",
        |g| all_gather_matmul(&sharded(g, 6, 4), &zeros(g, 5, 3), &mut zeros(g, 6, 5)),
        "rank 1: all_gather_matmul: b [N, K] is [5, 3] and must be [5, 4]",
    ),
    (
        "all_gather_matmul, an output of own rows",
        |g| all_gather_matmul(&sharded(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 3, 5)),
        "rank 1: all_gather_matmul: out [M, N] is [3, 5] and must be [6, 5]",
    ),
    (
        "all_gather_matmul, foreign weight",
        |g| {
            all_gather_matmul(
                &sharded(g, 6, 4),
                &zeros(&other(), 5, 4),
                &mut zeros(g, 6, 5),
            )
        },
        "rank 1: all_gather_matmul: the group of b is a different group and must be that of this call; make all \
         arguments with one group",
    ),
    (
        "AllGatherMatmul, bias of a wrong width",
        |g| {
            let bias = zeros(g, 1, 4);
            let product = AllGatherMatmul::new().bias(&bias);
            product.run(&sharded(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 6, 5))
        },
        "rank 1: all_gather_matmul: bias [1, N] is [1, 4] and must be [1, 5]",
    ),
    (
        "AllGatherMatmul, gated with one weight",
        |g| {
            let product = AllGatherMatmul::new().gated();
            product.run(&sharded(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 6, 5))
        },
        "rank 1: all_gather_matmul: the number of weights of this call is 1 and must be 2, that of a gated product",
    ),
    (
        "AllGatherMatmul, prepared for other rows",
        |g| {
            let prepared = AllGatherMatmul::new().prepare(&sharded(g, 6, 4), 5)?;
            prepared.run(&sharded(g, 8, 4), &zeros(g, 5, 4), &mut zeros(g, 8, 5))
        },
        "rank 1: all_gather_matmul: a [M, K] of a prepared call is [8, 4] and must be [6, 4]",
    ),
    (
        "AllGatherMatmul, prepared for other rows of each rank",
        |g| {
            let prepared = AllGatherMatmul::new().prepare(&sharded(g, 6, 4), 5)?;
            let a = g.sharded_rows::<bf16>(&[2, 4], 4)?;
            prepared.run(&a, &zeros(g, 5, 4), &mut zeros(g, 6, 5))
        },
        "rank 1: all_gather_matmul: a (rows of each rank) of a prepared call is [2, 4] and must be [3, 3]",
    ),
    (
        "AllGatherMatmul, f32 output of a plan for bf16",
        |g| {
            let prepared = AllGatherMatmul::new().prepare(&sharded(g, 6, 4), 5)?;
            prepared.run(
                &sharded(g, 6, 4),
                &zeros(g, 5, 4),
                &mut g.zeros::<f32>(6, 5)?,
            )
        },
        "rank 1: all_gather_matmul: the dtype of out is f32 and must be bf16, for which this call was prepared; \
         prepare it with \
         output_dtype(DType::F32)",
    ),
    (
        "matmul_reduce_scatter, wrong K",
        |g| matmul_reduce_scatter(&zeros(g, 6, 4), &zeros(g, 5, 3), &mut zeros(g, 3, 5)),
        "rank 1: matmul_reduce_scatter: b [N, K] is [5, 3] and must be [5, 4]",
    ),
    (
        "matmul_reduce_scatter, an output of all rows",
        |g| matmul_reduce_scatter(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 6, 5)),
        "rank 1: matmul_reduce_scatter: out [rows of this rank, N] is [6, 5] and must be [3, 5]",
    ),
    (
        "matmul_reduce_scatter, foreign output",
        |g| matmul_reduce_scatter(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut zeros(&other(), 3, 5)),
        "rank 1: matmul_reduce_scatter: the group of out is a different group and must be that of this call; make \
         all arguments with one group",
    ),
    (
        "MatmulReduceScatter, rows of one rank",
        |g| {
            let product = MatmulReduceScatter::new().rows(&[6]);
            product.run(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 3, 5))
        },
        "rank 1: matmul_reduce_scatter: the number of ranks of the list of rows is 1 and must be 2, that of the group",
    ),
    (
        "MatmulReduceScatter, rows of a different M",
        |g| {
            let product = MatmulReduceScatter::new().rows(&[3, 4]);
            product.run(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 3, 5))
        },
        "rank 1: matmul_reduce_scatter: the number of rows of a split into [3, 4] is 7 and must be 6, that of the product",
    ),
    (
        "MatmulReduceScatter, residual of all rows",
        |g| {
            let residual = zeros(g, 6, 5);
            let product = MatmulReduceScatter::new().residual(&residual);
            product.run(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut zeros(g, 3, 5))
        },
        "rank 1: matmul_reduce_scatter: residual [rows of this rank, N] is [6, 5] and must be [3, 5]",
    ),
    (
        "MatmulReduceScatter, prepared for other rows",
        |g| {
            let prepared = MatmulReduceScatter::new().prepare(&zeros(g, 6, 4), 5)?;
            prepared.run(&zeros(g, 8, 4), &zeros(g, 5, 4), &mut zeros(g, 4, 5))
        },
        "rank 1: matmul_reduce_scatter: a [M, K] of a prepared call is [8, 4] and must be [6, 4]",
    ),
    (
        "MatmulReduceScatter, into a matrix of a different N",
        |g| {
            let mut out = sharded(g, 6, 4);
            MatmulReduceScatter::new().run_into(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut out)
        },
        "rank 1: matmul_reduce_scatter: out [M, N] is [6, 4] and must be [6, 5]",
    ),
    (
        "MatmulReduceScatter, into a staged matrix",
        |g| MatmulReduceScatter::new().run_into(&zeros(g, 6, 4), &zeros(g, 4, 4), &mut staged(g)),
        "rank 1: matmul_reduce_scatter: the number of stages of out is 2; it must be 1",
    ),
    (
        "matmul_all_reduce, wrong K",
        |g| matmul_all_reduce(&zeros(g, 6, 4), &zeros(g, 5, 3), &mut sharded(g, 6, 5)),
        "rank 1: matmul_all_reduce: b [N, K] is [5, 3] and must be [5, 4]",
    ),
    (
        "matmul_all_reduce, wrong M",
        |g| matmul_all_reduce(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut sharded(g, 7, 5)),
        "rank 1: matmul_all_reduce: out [M, N] is [7, 5] and must be [6, 5]",
    ),
    (
        "MatmulAllReduce, prepared for other rows",
        |g| {
            let prepared = MatmulAllReduce::new().prepare(&zeros(g, 6, 4), &sharded(g, 6, 5))?;
            prepared.run(&zeros(g, 8, 4), &zeros(g, 5, 4), &mut sharded(g, 8, 5))
        },
        "rank 1: matmul_all_reduce: a [M, K] of a prepared call is [8, 4] and must be [6, 4]",
    ),
    (
        "MatmulAllReduce, bias of a wrong width",
        |g| {
            let bias = zeros(g, 1, 4);
            let product = MatmulAllReduce::new().bias(&bias);
            product.run(&zeros(g, 6, 4), &zeros(g, 5, 4), &mut sharded(g, 6, 5))
        },
        "rank 1: matmul_all_reduce: bias [1, N] is [1, 4] and must be [1, 5]",
    ),
];

#[test]
fn mistakes_with_collectives_are_told_in_whole_sentences() {
    check(2, COLLECTIVES);
}

const COLLECTIVES: &[Mistake] = &[
    (
        "broadcast from no rank",
        |g| broadcast(&mut sharded(g, 6, 4), 2),
        "rank 1: broadcast: the root is 2; it must be from 0 to 1",
    ),
    (
        "reduce_scatter, an output of all rows",
        |g| reduce_scatter(&zeros(g, 6, 4), &mut zeros(g, 6, 4)),
        "rank 1: reduce_scatter: out [rows of this rank, N] is [6, 4] and must be [3, 4]",
    ),
    (
        "reduce_scatter, foreign output",
        |g| reduce_scatter(&zeros(g, 6, 4), &mut zeros(&other(), 3, 4)),
        "rank 1: reduce_scatter: the group of out is a different group and must be that of this call; make all \
         arguments with one group",
    ),
    (
        "all_reduce, wrong N",
        |g| all_reduce(&zeros(g, 6, 3), &mut sharded(g, 6, 4)),
        "rank 1: all_reduce: out [M, N] is [6, 4] and must be [6, 3]",
    ),
    (
        "all_reduce to a staged matrix",
        |g| all_reduce(&zeros(g, 6, 4), &mut staged(g)),
        "rank 1: all_reduce: the number of stages of out is 2; it must be 1",
    ),
    (
        "all_reduce, foreign matrix",
        |g| all_reduce(&zeros(g, 6, 4), &mut sharded(&other(), 6, 4)),
        "rank 1: all_reduce: the group of out is a different group and must be that of this call; make all arguments \
         with one group",
    ),
    (
        "all_to_all, rows of one rank",
        |g| all_to_all(&zeros(g, 3, 4), &mut sharded(g, 6, 4)),
        "rank 1: all_to_all: a [W · rows of this rank, N] is [3, 4] and must be [6, 4]",
    ),
    (
        "all_to_all to a staged matrix",
        |g| all_to_all(&zeros(g, 6, 4), &mut staged(g)),
        "rank 1: all_to_all: the number of stages of out is 2; it must be 1",
    ),
    (
        "produce_and_reduce_scatter, an output of all rows",
        |g| produce_and_reduce_scatter(6, &mut zeros(g, 6, 4), |_| Ok(())),
        "rank 1: produce_and_reduce_scatter: out [rows of this rank, N] is [6, 4] and must be [3, 4]",
    ),
    (
        "ProduceAndReduceScatter, into a matrix of other rows",
        |g| {
            let sum = ProduceAndReduceScatter::new().rows(&[2, 4]);
            sum.run_into(&mut sharded(g, 6, 4), |_| Ok(()))
        },
        "rank 1: produce_and_reduce_scatter: out (rows of each rank) is [3, 3] and must be [2, 4]",
    ),
    (
        "AllGatherAndConsume, other rows beside",
        |g| {
            let beside = g.sharded_rows::<u32>(&[2, 4], 1)?;
            AllGatherAndConsume::new().run_with(&sharded(g, 6, 4), &beside, |_, _| Ok(()))
        },
        "rank 1: all_gather_and_consume: beside (rows of each rank) is [2, 4] and must be [3, 3]",
    ),
];

#[test]
fn mistakes_with_functions_and_failed_groups_are_told_in_whole_sentences() {
    check(1, FUNCTIONS_AND_FAILED_GROUPS);
}

const FUNCTIONS_AND_FAILED_GROUPS: &[Mistake] = &[
    (
        "a function that fails",
        |g| all_gather_and_consume(&sharded(g, 6, 4), |_| Err("no more data".into())),
        "rank 0 failed in the function that it gave to all_gather_and_consume: no more data",
    ),
    (
        "a function that calls its group",
        |g| {
            let mut inner = None;
            all_gather_and_consume(&sharded(g, 6, 4), |_| {
                inner = g.barrier().err();
                Ok(())
            })?;
            Err(inner.expect("a refusal"))
        },
        "rank 0: a function that was given to a call of a group makes another call of the same group; return \
         from it first",
    ),
    (
        "a program that fails",
        |g| Err(g.fail("no more data")),
        "rank 0 failed in its own program: no more data",
    ),
    (
        "a program that fails without a reason",
        |g| Err(g.fail("")),
        "rank 0 failed in its own program: it gives no reason",
    ),
    (
        "a call after a failure",
        |g| {
            g.fail("no more data");
            g.barrier()
        },
        "the group has failed: rank 0 failed in its own program: no more data",
    ),
    (
        "split under an empty name",
        |g| Group::builder().name("").split(g, 0, 0).map(drop),
        "rank 0: Builder::name: the number of bytes of the name is 0; it must be from 1 to 100",
    ),
];

#[test]
fn mistakes_in_opening_a_group_are_told_in_whole_sentences() {
    let told = |&(mistake, open, expected): &Opening| {
        let error = open().expect_err(mistake);
        (mistake, error, expected)
    };
    compare(OPENINGS.iter().map(told));
}

/// What is done wrong, who does it, and what it is told.
type Opening = (&'static str, fn() -> Done, &'static str);

fn builder() -> gemmesh::Builder<Host> {
    Group::builder().workers(1)
}

#[track_caller]
fn alone(builder: gemmesh::Builder<Host>) -> Done {
    builder.threads(1, |_| Ok::<_, Error>(())).map(drop)
}

#[track_caller]
fn connect(rank: usize, world: usize) -> Done {
    let address = format!("messages {}", std::process::id());
    builder().connect(rank, world, &address).map(drop)
}

const OPENINGS: &[Opening] = &[
    (
        "threads without ranks",
        || builder().threads(0, |_| Ok::<_, Error>(())).map(drop),
        "Group::threads: the world size is 0; it must be from 1 to 64",
    ),
    (
        "threads of 65 ranks",
        || builder().threads(65, |_| Ok::<_, Error>(())).map(drop),
        "Group::threads: the world size is 65; it must be from 1 to 64",
    ),
    (
        "launch without ranks",
        || launch::launch(0),
        "launch: the number of ranks is 0; it must be from 1 to 64",
    ),
    (
        "connect without ranks",
        || connect(0, 0),
        "rank 0: Group::connect: the world size is 0; it must be from 1 to 64",
    ),
    (
        "connect as a rank too high",
        || connect(2, 2),
        "rank 2: Group::connect: the rank is 2; it must be from 0 to 1",
    ),
    (
        "an empty name",
        || alone(builder().name("")),
        "Builder::name: the number of bytes of the name is 0; it must be from 1 to 100",
    ),
    (
        "a name of 101 bytes",
        || alone(builder().name("x".repeat(101))),
        "Builder::name: the number of bytes of the name is 101; it must be from 1 to 100",
    ),
    (
        "no workers",
        || alone(builder().workers(0)),
        "rank 0: Builder::workers: the number of workers is 0; it must be from 1 to 1024",
    ),
    (
        "a link without bytes",
        || alone(builder().link(0)),
        "rank 0: Builder::link: the bytes per second of a link is 0; it must be at least 1",
    ),
];

#[test]
fn ranks_that_do_not_come_are_told_of_in_a_whole_sentence() {
    let address = format!("messages of a few {}", std::process::id());
    let builder = Group::<Host>::builder().arrival_timeout(Duration::from_millis(100));
    let error = builder.connect(0, 3, &address).expect_err("nobody else");
    let Kind::RanksMissing { waited_ms, .. } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!(
        error.to_string(),
        format!(
            "ranks 1 and 2 have not come to {address:?} within {waited_ms} ms; see whether they were started, and \
             with the same address, or raise Builder::arrival_timeout"
        )
    );
}
