use gemmesh::schedule::Operation;
use gemmesh::tools::H200;
use gemmesh::tuning::Chunking;

use super::*;

const PRODUCTS: [Operation; 3] = [
    Operation::ALL_GATHER_MATMUL,
    Operation::MATMUL_REDUCE_SCATTER,
    Operation::MATMUL_ALL_REDUCE,
];
const COLLECTIVES: [Operation; 3] = [
    Operation::ALL_GATHER,
    Operation::REDUCE_SCATTER,
    Operation::ALL_REDUCE,
];

/// 400 Gb/s a GPU.
const NETWORK: SimulatedNetwork = SimulatedNetwork {
    bytes: 50e3,
    latency: 10.0,
};

fn played(operation: Operation, shape: [usize; 3], extents: [usize; 2]) -> Played {
    play_operation(operation, shape, extents, &NETWORK).unwrap()
}

/// How many tiles each rank made.
fn tiles(played: &Played) -> Vec<usize> {
    let made = |span: &&Span| matches!(span.work, Work::Tile { .. });
    let traces = played.timeline.traces.iter();
    traces
        .map(|trace| trace.spans.iter().filter(made).count())
        .collect()
}

#[test]
fn a_network_as_fast_as_a_product_is_hidden_and_a_slower_one_takes_its_time() {
    // 405B, 8192 rows, two hosts of eight: each rank's rail brings 16 MiB.
    let layers = [
        (Operation::ALL_GATHER_MATMUL, [8192, 53_248 / 16, 16_384], 1),
        (
            Operation::MATMUL_REDUCE_SCATTER,
            [8192, 16_384, 53_248 / 16],
            1,
        ),
        (Operation::MATMUL_ALL_REDUCE, [8192, 16_384, 53_248 / 16], 2),
    ];
    for (operation, shape, times) in layers {
        let fast = played(operation, shape, [2, 8]);
        let slow = SimulatedNetwork {
            bytes: NETWORK.bytes / 10.0,
            ..NETWORK
        };
        let slow = play_operation(operation, shape, [2, 8], &slow).unwrap();
        let wire = f64::from(times * (16 << 20)) / 5e3;
        assert!(slow.micros > wire, "{operation} {}", slow.micros);
        assert!(
            slow.micros < wire + fast.micros,
            "{operation} {}",
            slow.micros
        );
    }
    let fast = played(
        Operation::ALL_GATHER_MATMUL,
        [8192, 53_248 / 16, 16_384],
        [2, 8],
    );
    assert!(fast.micros < 1.2 * fast.alone, "{fast:?}");
}

#[test]
fn all_rows_come_and_all_tiles_are_made_on_every_rank_of_64() {
    for operation in PRODUCTS {
        let played = played(operation, [4096, 128, 1024], [8, 8]);
        assert!(played.micros.is_finite(), "{operation}");
        let counts = tiles(&played);
        assert_eq!(counts.len(), 64);
        assert!(counts[0] > 0 && counts.iter().all(|count| *count == counts[0]));
    }
}

#[test]
fn rows_that_ranks_lack_or_share_unevenly_are_played_too() {
    for operation in PRODUCTS.into_iter().chain(COLLECTIVES) {
        for m in [1, 3, 700, 5001] {
            for extents in [[1, 1], [1, 3], [3, 1], [2, 3]] {
                let played = played(operation, [m, 512, 640], extents);
                assert!(played.micros.is_finite(), "{operation} {m} {extents:?}");
                assert_eq!(played.alone > 0.0, PRODUCTS.contains(&operation));
                assert!(played.micros > 0.9 * played.alone);
            }
        }
    }
}

#[test]
fn one_of_ranks_that_do_the_same_takes_as_long_as_all() {
    for operation in PRODUCTS.into_iter().chain([Operation::ALL_GATHER]) {
        for [hosts, places] in [[1, 4], [2, 4], [4, 2], [5, 3]] {
            let world = hosts * places;
            let problem = problem_of(operation, [world * 512, 1024, 2048], [hosts, places]);
            let problem = problem.unwrap();
            let base = Config::new(H200.family.widest(), Chunking::new(2), Route::Push);
            let network = &NETWORK;
            let machine = machine_of(&problem, base, network);
            let schedules = (0..world).map(|rank| plan(&problem, rank, base).unwrap());
            let schedules: Vec<Schedule> = schedules.collect();
            let one = ranks::play_one(&machine, &schedules[0], [hosts, places]).end;
            for all in ranks::play_all(&machine, &schedules) {
                assert!(
                    (all.end - one).abs() < 1e-6,
                    "{operation} {hosts} {places}: {} {one}",
                    all.end
                );
            }
        }
    }
}

#[test]
fn up_to_1024_ranks_are_played_if_they_have_equally_many_rows() {
    for operation in PRODUCTS.into_iter().chain([Operation::ALL_GATHER]) {
        let played = played(operation, [8192, 128, 1024], [128, 8]);
        assert_eq!(played.timeline.traces.len(), 1);
        assert!(played.micros > played.alone && played.micros.is_finite());
        let refused = |m, extents| play_operation(operation, [m, 128, 1024], extents, &NETWORK);
        assert!(refused(8191, [128, 8]).is_err());
        assert!(refused(1025, [1, 1025]).is_err());
        assert!(refused(64, [0, 8]).is_err());
    }
    // A kernel adds 64 addends at the most: those of the own host, and one of each other host.
    let added =
        |m, extents| play_operation(Operation::REDUCE_SCATTER, [m, 0, 1024], extents, &NETWORK);
    assert!(added(7296, [57, 8]).is_ok() && added(7424, [58, 8]).is_err());
    assert!(play_operation(Operation::MATMUL, [8, 8, 8], [1, 1], &NETWORK).is_err());
}

#[test]
fn sums_that_are_copied_take_as_long_as_the_model_says() {
    for &operation in &PRODUCTS[1..] {
        for (shape, world) in [
            ([8192, 8192, 3584], 2),
            ([4096, 4096, 1792], 2),
            ([8192, 8192, 1792], 4),
        ] {
            let problem = problem_of(operation, shape, [1, world]).unwrap();
            let config = Config::new(H200.family.widest(), Chunking::new(2), Route::Push);
            let played = play_configured(&problem, config, &NETWORK).unwrap();
            let of_model = by_model(&problem, config, played.alone).unwrap();
            let off = played.micros / of_model.micros - 1.0;
            assert!(off.abs() < 0.01, "{operation} {shape:?} {world}: {off}");
        }
    }
}
