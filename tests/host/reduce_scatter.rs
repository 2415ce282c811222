//! Partial sums go to who owns the rows, and are added in the order of the ranks.

use std::ops::Range;

use crate::support::numbers::rng;
use crate::support::shared::reduce_scatter;
use crate::support::tested::Tested;
use crate::test_name;
use gemmesh::error::Kind;
use gemmesh::schedule::plan::matrices::{OUT, PARTIALS};
use gemmesh::schedule::plan::partials::{Partials, is_one_shot};
use gemmesh::schedule::plan::plan;
use gemmesh::schedule::{Addend, Layout, Operation, Problem, Schedule, Sum, Tile, Transfer};
use gemmesh::trace::Work;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, DType, Error, Group, Host, MatmulReduceScatter, bf16, f16};
use proptest::prelude::*;
use rand::RngExt;

/// Ways to cut a reduce-scatter up, by all of which the sums of K are made alike.
fn reduce_scatter_configs() -> Vec<Option<Config>> {
    // By low tiles few rows are made at once, and exchanged.
    let shapes = [(40, 32), (24, 48), (64, 16)];
    let chunks = [(1, 1), (2, 3), (3, 2)];
    let configs = shapes.into_iter().zip(chunks);
    let configs = configs.map(|((m, n), (count, last))| {
        let tile = TileShape::new(m, n, 64).with_group_m(2);
        let chunking = Chunking::new(count).with_last(last);
        Config::new(tile, chunking, Route::Push)
    });
    let both = configs.flat_map(|config| [config, config.with_product_first(true)]);
    both.map(Some).collect()
}

fn cases() -> [reduce_scatter::Case; 4] {
    let case = |rows: &[usize], n, k, more, bias, workers| reduce_scatter::Case {
        rows: rows.to_vec(),
        n,
        k,
        more,
        bias,
        cancels: more == 0,
        workers,
        seed: (n * 1009 + k) as u64,
    };
    [
        case(&[50, 50, 50], 64, 96, 0, false, 1),
        case(&[70, 0, 33], 41, 130, 7, true, 2),
        case(&[0, 0, 90], 5, 33, 64, true, 1),
        case(&[1, 1, 1], 1, 1, 0, false, 1),
    ]
}

const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];

#[test]
fn partials_are_added_in_the_order_of_the_ranks_whatever_comes_first() {
    reduce_scatter::partials_are_added_in_the_order_of_the_ranks::<Host>(
        test_name!(),
        3,
        &cases(),
        &reduce_scatter_configs(),
        &ROUTES,
    );
}

#[test]
fn partials_of_8_ranks_are_added_in_the_order_of_the_ranks() {
    let case = reduce_scatter::Case {
        rows: vec![9, 0, 17, 1, 33, 8, 8, 20],
        n: 24,
        k: 40,
        cancels: true,
        workers: 1,
        seed: 8,
        ..Default::default()
    };
    let configs = reduce_scatter_configs();
    let (cases, routes) = (&[case], &ROUTES);
    reduce_scatter::partials_are_added_in_the_order_of_the_ranks::<Host>(
        test_name!(),
        8,
        cases,
        &configs,
        routes,
    );
}

#[test]
fn an_all_reduce_gives_all_ranks_the_bits_of_the_sum_in_their_order() {
    // Of few rows, which are exchanged, and of long ones, which are not.
    let long = cases().map(|case| reduce_scatter::Case {
        n: (1 << 18) / case.rows.iter().sum::<usize>() + case.n,
        k: case.k.min(16),
        ..case
    });
    let [first, second, ..] = long;
    let cases = [&cases()[..], &[first, second]].concat();
    reduce_scatter::all_ranks_get_the_same_bits::<Host>(
        test_name!(),
        3,
        &cases,
        &reduce_scatter_configs(),
        &ROUTES,
    );
}

#[test]
fn random_problems_cut_up_at_random_give_the_bits_of_the_plain_sum() {
    for seed in 0..90 {
        let mut rng = rng(seed);
        let world = rng.random_range(1..=5);
        let mut rows: Vec<usize> = (0..world)
            .map(|_| match rng.random_range(0..4) {
                0 => 0,
                _ => rng.random_range(1..40),
            })
            .collect();
        rows[rng.random_range(0..world)] += 1;
        // Some are so wide that they are not exchanged.
        let wide = rng.random_range(0..10) == 0;
        let case = reduce_scatter::Case {
            n: rng.random_range(1..70) + if wide { 15_000 } else { 0 },
            k: rng.random_range(1..if wide { 4 } else { 150 }),
            more: rng.random_range(0..if wide { 2 } else { 40 }),
            bias: rng.random_bool(0.5),
            workers: rng.random_range(1..=3),
            rows,
            seed,
            ..Default::default()
        };
        let config = rng.random_bool(0.8).then(|| {
            let tile = [50, 50, 170].map(|most| rng.random_range(1..most));
            let tile = TileShape::new(tile[0], tile[1], tile[2]);
            let chunking = Chunking::new(rng.random_range(1..5)).with_last(rng.random_range(1..5));
            Config::new(tile, chunking, ROUTES[seed as usize % 3])
        });
        let address = format!("random-{}-{seed}", std::process::id());
        let verified = Group::<Host>::builder()
            .workers(case.workers)
            .timeout(Host::TIMEOUT)
            .threads(world, |group| match seed % 2 {
                0 => reduce_scatter::verify::<Host, bf16>(&group, &address, &case, config),
                _ => reduce_scatter::verify::<Host, f16>(&group, &address, &case, config),
            });
        verified.unwrap();
    }
}

#[test]
fn the_bits_of_a_reduce_scatter_do_not_depend_on_the_split() {
    let splits = [[40, 40, 40], [120, 0, 0], [0, 1, 119], [37, 50, 33]];
    let shape = [40, 72];
    reduce_scatter::bits_do_not_depend_on_the_split::<Host>(test_name!(), &splits, shape, None);
}

#[test]
fn nor_do_they_where_tiles_are_deeper_than_the_host_multiplies_at_once() {
    let splits = [[40, 40, 40], [120, 0, 0], [0, 1, 119], [37, 50, 33]];
    let tile = TileShape::new(128, 64, 1024);
    let config = Config::new(tile, Chunking::new(1), Route::Push);
    let shape = [64, 600];
    let config = Some(config);
    reduce_scatter::bits_do_not_depend_on_the_split::<Host>(test_name!(), &splits, shape, config);
}

#[test]
fn the_output_of_a_reduce_scatter_may_be_the_own_rows_of_a_sharded_matrix() {
    reduce_scatter::the_output_may_be_the_own_rows_of_a_sharded_matrix::<Host>(
        test_name!(),
        &[None],
    );
}

#[test]
fn a_prepared_reduce_scatter_or_all_reduce_gives_the_bits_of_the_plain_one() {
    let config = reduce_scatter_configs()[1];
    let pulled = config.map(|config| config.with_route(Route::Pull));
    let configs = [None, config, pulled];
    reduce_scatter::a_prepared_call_gives_the_bits_of_the_plain_one::<Host>(test_name!(), &configs);
}

#[test]
fn another_split_in_a_reduce_scatter_is_a_mismatch() {
    reduce_scatter::other_rows_are_a_mismatch::<Host>(test_name!(), [6, 3]);
}

#[test]
fn a_rank_killed_while_the_others_wait_for_its_partials_is_named_at_once() {
    reduce_scatter::kill_while_the_others_wait::<Host>(test_name!(), 1, None);
}

#[test]
fn a_trace_says_for_whom_tiles_are_made_what_is_sent_and_what_is_added() {
    let rows = [40, 0, 50];
    let config = |route| Config::new(TileShape::new(16, 16, 8), Chunking::new(2), route);
    let traced = Group::<Host>::builder().workers(1).threads(3, |group| {
        let a = group.zeros::<bf16>(90, 8)?;
        let b = group.zeros::<bf16>(24, 8)?;
        let rank = group.rank();
        let mut out = group.zeros::<bf16>(rows[rank], 24)?;
        for route in [Route::Push, Route::Pull] {
            let operation = MatmulReduceScatter::new().rows(&rows).config(config(route));
            let prepared = operation.prepare(&a, 24)?;
            let spans = prepared.run_traced(&a, &b, &mut out)?.spans;
            let count = |of: &dyn Fn(&Work) -> bool| {
                let spans = spans.iter().filter(|span| of(&span.work));
                spans.count()
            };
            let tiles_of = |owner: usize| rows[owner].div_ceil(16) * 24usize.div_ceil(16);
            for owner in 0..3 {
                let tiles =
                    count(&|work| matches!(work, Work::Tile { source, .. } if *source == owner));
                let sent = count(&|work| matches!(work, Work::Push { to, .. } if *to == owner));
                let pulled =
                    count(&|work| matches!(work, Work::Pull { source, .. } if *source == owner));
                let is_peer = usize::from(owner != rank);
                let has_rows = |rank: usize| 2 * usize::from(rows[rank] > 0);
                if route == Route::Push {
                    assert_eq!(tiles, tiles_of(owner));
                    assert_eq!((sent, pulled), (is_peer * has_rows(owner), 0));
                } else {
                    assert_eq!((sent, pulled), (0, is_peer * has_rows(rank)));
                }
            }
            let added = count(&|work| matches!(work, Work::Add { .. }));
            assert_eq!(added, usize::from(route == Route::Pull && rows[rank] > 0));
        }
        Ok::<_, Error>(())
    });
    traced.unwrap();
}

// Schedules.

#[derive(Clone, Debug)]
struct Asked {
    rows: Vec<usize>,
    n: usize,
    config: Config,
}

impl Asked {
    fn schedules(&self) -> Vec<Schedule> {
        let problem = self.description();
        let plan = |rank| plan(&problem, rank, self.config).unwrap();
        (0..self.rows.len()).map(plan).collect()
    }

    fn description(&self) -> Problem {
        let layout = Layout::new(&self.rows, 3).unwrap();
        Problem::new(
            Operation::MATMUL_REDUCE_SCATTER,
            DType::Bf16,
            layout,
            self.n,
        )
    }

    /// All ranks are to have all sums, of rows so long that they are not exchanged.
    fn all(&self) -> Problem {
        Problem {
            operation: Operation::MATMUL_ALL_REDUCE,
            n: (1 << 20) / self.rows.iter().sum::<usize>() + self.n,
            ..self.description()
        }
    }

    fn partials(&self) -> Partials {
        Partials::of(&self.description(), &self.config)
    }
}

fn any_asked(route: &'static [Route]) -> impl Strategy<Value = Asked> {
    let rows = prop::collection::vec(0usize..40, 1..6)
        .prop_filter("rows", |rows| rows.iter().sum::<usize>() > 0);
    // No low tiles, by which few rows are exchanged.
    let tile = (1usize..8, 1usize..9, (1usize..4, 1usize..3), 1usize..4);
    let chunks = (1usize..5, 1usize..5);
    let route = prop::sample::select(route);
    (rows, 1usize..30, tile, chunks, route).prop_map(|(rows, n, tile, chunks, route)| {
        let (m, tile_n, cluster, group) = tile;
        let tile = TileShape::new(m, tile_n, 8)
            .with_cluster(cluster.0, cluster.1)
            .with_group_m(group);
        let chunking = Chunking::new(chunks.0).with_last(chunks.1);
        Asked {
            rows,
            n,
            config: Config::new(tile, chunking, route),
        }
    })
}

/// Whether all ranks come to the end where each has one worker, which takes tiles as they stand, and a copy engine that
/// does one transfer after the other.
fn all_end(schedules: &[Schedule]) -> bool {
    let flags = |schedule: &Schedule| vec![false; schedule.arrivals().len()];
    let mut arrived: Vec<Vec<bool>> = schedules.iter().map(flags).collect();
    let mut done = vec![(0, 0); schedules.len()];
    loop {
        let before = done.clone();
        for (rank, schedule) in schedules.iter().enumerate() {
            let (tiles, moves) = &mut done[rank];
            let left = &schedule.tiles()[*tiles..];
            let ready = |tile: &&Tile| tile.flags().all(|flag| arrived[rank][flag]);
            *tiles += left.iter().take_while(ready).count();
            let left = &schedule.tiles()[*tiles..];
            for moved in schedule.moves().skip(*moves) {
                let block = moved.produced.unwrap();
                if left.iter().any(|tile| tile.block as usize == block) {
                    break;
                }
                arrived[moved.to][moved.flag] = true;
                *moves += 1;
            }
        }
        if done == before {
            let mut ends = schedules.iter().zip(&done);
            return ends.all(|(schedule, &(tiles, moves))| {
                (tiles, moves) == (schedule.tiles().len(), schedule.moves().count())
            }) && arrived.iter().flatten().all(|&arrived| arrived);
        }
    }
}

/// The rows of the product that a transfer is of.
fn sent(transfer: &Transfer, partials: &Partials) -> Range<usize> {
    let [moved] = &transfer.regions[..] else {
        panic!("{transfer:?}");
    };
    assert_eq!(moved.from.columns, 0..partials.columns());
    assert_eq!(moved.to.columns, moved.from.columns);
    let Range { start, end } = moved.from.rows;
    let first = partials.own(transfer.to, 0);
    start - first..end - first
}

/// None if the rank owns no rows.
fn sum_of_own_rows(schedule: &Schedule) -> Option<&Sum> {
    match (schedule.reduction(), schedule.product()) {
        (Some(reduction), None) => Some(&reduction.sum),
        (None, Some(product)) => {
            let mut sums = product.blocks.iter().map(|block| &block.sum);
            sums.find(|sum| sum.out == OUT)
        }
        (None, None) => None,
        both => panic!("{both:?}"),
    }
}

/// The tiles whose sums are this row of the output.
fn tiles_that_finish(schedule: &Schedule, row: usize) -> impl Iterator<Item = &Tile> {
    let product = schedule.product();
    schedule.tiles().iter().filter(move |tile| {
        product.is_some_and(|product| {
            product.block(tile).sum.out == OUT && product.rows(tile).contains(&row)
        })
    })
}

proptest! {
    #[test]
    fn each_element_is_made_once_and_goes_where_it_belongs(problem in any_asked(&[Route::Push, Route::Store])) {
        let (schedules, partials) = (problem.schedules(), problem.partials());
        let layout = problem.description().layout;
        for (rank, schedule) in schedules.iter().enumerate() {
            let product = schedule.product().unwrap();
            let mut made = vec![0; layout.m() * problem.n];
            for tile in schedule.tiles() {
                for row in product.rows(tile) {
                    product.columns(tile).for_each(|column| made[row * problem.n + column] += 1);
                }
                // Peers' blocks wait for nothing, so no rank waits for another in a circle.
                let own = product.block(tile).sum.out == OUT;
                prop_assert!(own || tile.flags().is_empty());
            }
            prop_assert!(made.iter().all(|&times| times == 1));
            let mine = layout.rows_of(rank);
            for block in &product.blocks {
                let own = block.sum.out == OUT;
                prop_assert_eq!(own, mine.contains(&block.rows.start));
                prop_assert_eq!(block.sum.bias.is_some(), own);
                let owner = (0..layout.world()).find(|&r| layout.rows_of(r).contains(&block.rows.start));
                let first = if own { 0 } else { partials.own(owner.unwrap(), block.rows.start) };
                prop_assert_eq!(block.sum.first, first);
            }
            // GPUs store 16 rows at a time: those after the last of a rank's are no one's.
            for owner in 0..layout.world() {
                let end = partials.own(owner, layout.rows_of(owner).end) + 15;
                let addends = product.blocks.iter().flat_map(|block| &block.sum.addends);
                for addend in addends {
                    let Addend::Rows { first, .. } = addend else { continue };
                    prop_assert!(end <= *first);
                }
                let mut next = owner + 1..layout.world();
                let is_before = next.all(|next| end <= partials.own(next, layout.rows_of(next).start));
                prop_assert!(is_before);
            }
            // Own tiles last.
            let is_own = |block: u32| product.blocks[block as usize].sum.out == OUT;
            prop_assert!(schedule.tiles().is_sorted_by_key(|tile| is_own(tile.block)));
        }
    }

    #[test]
    fn what_a_rank_sends_is_what_its_owner_adds(problem in any_asked(&[Route::Pull, Route::Push, Route::Store])) {
        let (schedules, partials) = (problem.schedules(), problem.partials());
        let layout = problem.description().layout;
        for (rank, schedule) in schedules.iter().enumerate() {
            let mine = layout.rows_of(rank);
            // By row of the slots: who writes it, under which flag.
            let mut slots = vec![None; partials.rows()];
            for transfer in schedule.arrivals() {
                let rows = sent(transfer, &partials);
                prop_assert!(mine.start <= rows.start && rows.end <= mine.end && !rows.is_empty());
                let sender = &schedules[transfer.from];
                let departs = |other: &&Transfer| (other.to, other.flag) == (rank, transfer.flag);
                if problem.config.route != Route::Pull {
                    let departure = sender.moves().find(departs);
                    prop_assert_eq!(departure, Some(transfer));
                    // It waits for the block that makes it.
                    let block = &sender.product().unwrap().blocks[transfer.produced.unwrap()];
                    prop_assert_eq!(&block.rows, &rows);
                    prop_assert_eq!(block.sum.first, transfer.regions[0].from.rows.start);
                }
                for (slot, row) in transfer.regions[0].to.rows.clone().zip(rows) {
                    let before = slots[slot].replace((transfer.from, row, transfer.flag));
                    prop_assert_eq!(before, None);
                }
            }
            let Some(sum) = sum_of_own_rows(schedule) else { continue };
            prop_assert!(!mine.is_empty());
            prop_assert_eq!(sum.addends.len(), layout.world());
            for (from, addend) in sum.addends.iter().enumerate() {
                match *addend {
                    Addend::Product => prop_assert_eq!(from, rank),
                    Addend::Rows { matrix, first } if from == rank => {
                        prop_assert_eq!((matrix, first), (PARTIALS, partials.own(rank, mine.start)));
                    }
                    Addend::Rows { matrix, first } => {
                        prop_assert_eq!(matrix, PARTIALS);
                        for row in mine.clone() {
                            let (sender, of, flag) = slots[first + row - mine.start].unwrap();
                            prop_assert_eq!((sender, of), (from, row));
                            // Whoever adds it has waited for it.
                            for tile in tiles_that_finish(schedule, row) {
                                prop_assert!(tile.flags().contains(&flag));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_of_own_rows_stand_in_the_order_in_which_what_they_add_comes(problem in any_asked(&[Route::Push, Route::Store])) {
        for schedule in problem.schedules() {
            for pair in schedule.tiles().windows(2).filter(|pair| pair[0].block == pair[1].block) {
                prop_assert!(pair[0].flags().end <= pair[1].flags().end);
            }
        }
    }

    #[test]
    fn no_rank_waits_in_a_circle(problem in any_asked(&[Route::Push, Route::Store])) {
        prop_assert!(all_end(&problem.schedules()));
        let plan = |rank| plan(&problem.all(), rank, problem.config).unwrap();
        let schedules: Vec<Schedule> = (0..problem.rows.len()).map(plan).collect();
        prop_assert!(all_end(&schedules));
    }

    #[test]
    fn few_rows_are_exchanged_once_and_added_by_every_rank(problem in any_asked(&[Route::Pull, Route::Push, Route::Store])) {
        let description = Problem { operation: Operation::MATMUL_ALL_REDUCE, ..problem.description() };
        prop_assert!(problem.rows.len() == 1 || is_one_shot(&description, &problem.config));
        let plan = |rank| plan(&description, rank, problem.config).unwrap();
        let schedules: Vec<Schedule> = (0..problem.rows.len()).map(plan).collect();
        let (m, world) = (description.layout.m(), problem.rows.len());
        let partials = Partials::one_shot(&description, &problem.config);
        for (rank, schedule) in schedules.iter().enumerate().filter(|_| world > 1) {
            // By row of the slots: who writes it, and of which row it is.
            let mut slots = vec![None; partials.rows()];
            for transfer in schedule.arrivals() {
                let sender = &schedules[transfer.from];
                if problem.config.route != Route::Pull {
                    let departs = |other: &&Transfer| (other.to, other.flag) == (rank, transfer.flag);
                    prop_assert_eq!(sender.moves().find(departs), Some(transfer));
                    let block = &sender.product().unwrap().blocks[transfer.produced.unwrap()];
                    let first = transfer.regions[0].from.rows.start;
                    prop_assert_eq!((block.sum.out, block.sum.first), (PARTIALS, first));
                    prop_assert_eq!(block.rows.start, first);
                }
                let [moved] = &transfer.regions[..] else { panic!("{transfer:?}") };
                for (to, from) in moved.to.rows.clone().zip(moved.from.rows.clone()) {
                    prop_assert_eq!(slots[to].replace((transfer.from, from)), None);
                }
            }
            let reduction = schedule.reduction().unwrap();
            prop_assert_eq!((reduction.rows, reduction.n, reduction.sum.first), (m, problem.n, 0));
            prop_assert_eq!(reduction.sum.addends.len(), world);
            for (from, addend) in reduction.sum.addends.iter().enumerate() {
                let &Addend::Rows { matrix: PARTIALS, first } = addend else { panic!("{addend:?}") };
                if from == rank {
                    prop_assert_eq!(first, 0);
                    continue;
                }
                for row in 0..m {
                    prop_assert_eq!(slots[first + row], Some((from, row)));
                }
            }
        }
    }

    #[test]
    fn partials_of_few_rows_are_made_at_once_and_go_to_the_owners(
        problem in any_asked(&[Route::Store]),
        high in 1usize..3,
    ) {
        let m: usize = problem.rows.iter().sum();
        let tile = TileShape::new(64 / high, problem.config.tile.n, 8).with_cluster(high, 1);
        let config = Config::new(tile, problem.config.chunking, Route::Store);
        let description = problem.description();
        let world = problem.rows.len();
        prop_assert_eq!(is_one_shot(&description, &config), world > 1);
        prop_assert!(!is_one_shot(&description, &config.with_route(Route::Push)));
        let plan = |rank| plan(&description, rank, config).unwrap();
        let schedules: Vec<Schedule> = (0..world).map(plan).collect();
        prop_assert!(all_end(&schedules));
        let partials = Partials::of(&description, &config);
        for (rank, schedule) in schedules.iter().enumerate().filter(|_| world > 1) {
            let product = schedule.product().unwrap();
            prop_assert_eq!((product.blocks.len(), product.blocks[0].rows.clone()), (1, 0..m));
            prop_assert_eq!(schedule.tiles().len(), m.div_ceil(64) * problem.n.div_ceil(tile.n));
            let mine = description.layout.rows_of(rank);
            // By rank: the first row of what it has made of this rank's rows.
            let mut firsts = vec![None; world];
            firsts[rank] = Some(partials.own(0, mine.start));
            for transfer in schedule.arrivals() {
                let departs = |other: &&Transfer| (other.to, other.flag) == (rank, transfer.flag);
                prop_assert_eq!(schedules[transfer.from].moves().find(departs), Some(transfer));
                let [moved] = &transfer.regions[..] else { panic!("{transfer:?}") };
                let made = partials.own(0, mine.start)..partials.own(0, mine.end);
                prop_assert_eq!(&moved.from.rows, &made);
                prop_assert_eq!(firsts[transfer.from].replace(moved.to.rows.start), None);
            }
            let Some(reduction) = schedule.reduction() else {
                prop_assert!(mine.is_empty() && schedule.arrivals().is_empty());
                continue;
            };
            prop_assert_eq!((reduction.rows, reduction.n, reduction.sum.first), (mine.len(), problem.n, 0));
            let addend = |first: Option<usize>| Addend::Rows { matrix: PARTIALS, first: first.unwrap() };
            let addends: Vec<_> = firsts.into_iter().map(addend).collect();
            prop_assert_eq!(&reduction.sum.addends, &addends);
        }
    }

    #[test]
    fn what_is_stored_behind_the_product_goes_once_to_whom_adds_it(problem in any_asked(&[Route::Store])) {
        let config = problem.config.with_product_first(true);
        let few = Problem { operation: Operation::MATMUL_ALL_REDUCE, ..problem.description() };
        for description in [problem.description(), few, problem.all()] {
            let plan = |rank| plan(&description, rank, config).unwrap();
            let schedules: Vec<Schedule> = (0..problem.rows.len()).map(plan).collect();
            let layout = &description.layout;
            let is_for_all = description.operation == Operation::MATMUL_ALL_REDUCE;
            let one_shot = is_one_shot(&description, &config);
            let partials = match is_for_all && one_shot {
                true => Partials::one_shot(&description, &config),
                false => Partials::of(&description, &config),
            };
            for (rank, schedule) in schedules.iter().enumerate() {
                prop_assert!(schedule.product().is_none());
                let mine = if is_for_all && one_shot { 0..layout.m() } else { layout.rows_of(rank) };
                // By row of the slots: who writes it, of which row it is, and how many columns have come so far.
                let mut slots = vec![(None, 0); partials.rows()];
                for transfer in schedule.arrivals() {
                    let departs = |other: &&Transfer| (other.to, other.flag) == (rank, transfer.flag);
                    prop_assert_eq!(schedules[transfer.from].moves().find(departs), Some(transfer));
                    prop_assert!(transfer.flag < schedule.arrivals().len());
                    let [moved] = &transfer.regions[..] else { panic!("{transfer:?}") };
                    for (to, from) in moved.to.rows.clone().zip(moved.from.rows.clone()) {
                        let (made, columns) = &mut slots[to];
                        let this = (transfer.from, from);
                        prop_assert_eq!((*made.get_or_insert(this), *columns), (this, moved.to.columns.start));
                        *columns = moved.to.columns.end;
                    }
                }
                let Some(reduction) = schedule.reduction() else {
                    prop_assert!(mine.is_empty());
                    continue;
                };
                let first = if is_for_all { mine.start } else { 0 };
                prop_assert_eq!((reduction.rows, reduction.sum.first), (mine.len(), first));
                for (from, addend) in reduction.sum.addends.iter().enumerate() {
                    let &Addend::Rows { matrix: PARTIALS, first } = addend else { panic!("{addend:?}") };
                    for row in 0..mine.len() {
                        let whole = (Some((from, mine.start + row)), partials.columns());
                        match from == rank {
                            true => prop_assert_eq!(first, mine.start),
                            false => prop_assert_eq!(slots[first + row], whole),
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn each_rank_gets_each_sum_from_its_owner_once(problem in any_asked(&[Route::Push, Route::Store])) {
        let description = problem.all();
        let plan = |rank| plan(&description, rank, problem.config).unwrap();
        let schedules: Vec<Schedule> = (0..problem.rows.len()).map(plan).collect();
        let layout = &description.layout;
        for (rank, schedule) in schedules.iter().enumerate() {
            let mine = layout.rows_of(rank);
            let mut got = vec![false; layout.m()];
            got[mine].fill(true);
            let is_sum = |transfer: &&Transfer| transfer.regions[0].to.matrix == OUT;
            for transfer in schedule.arrivals().iter().filter(is_sum) {
                let sender = &schedules[transfer.from];
                let departs = |other: &&Transfer| (other.to, other.flag) == (rank, transfer.flag);
                prop_assert_eq!(sender.moves().find(departs), Some(transfer));
                let moved = &transfer.regions[0];
                prop_assert_eq!(&moved.from, &moved.to);
                // Sent when it is made, to the rows where it was made.
                let block = &sender.product().unwrap().blocks[transfer.produced.unwrap()];
                prop_assert_eq!(&block.rows, &moved.from.rows);
                prop_assert_eq!((block.sum.out, block.sum.first), (OUT, block.rows.start));
                for row in moved.to.rows.clone() {
                    prop_assert!(!std::mem::replace(&mut got[row], true));
                    prop_assert!(layout.rows_of(transfer.from).contains(&row));
                }
            }
            prop_assert!(got.iter().all(|&got| got));
            prop_assert_eq!(schedule.awaits_all(), problem.rows.len() == 1 || !schedule.arrivals().iter().any(|transfer| is_sum(&transfer)));
        }
    }

    #[test]
    fn what_is_copied_is_what_a_sum_moves(problem in any_asked(&[Route::Pull, Route::Push, Route::Store])) {
        let pulled = problem.config.with_route(Route::Pull);
        let description = problem.description();
        let partials = Partials::of(&description, &pulled);
        // By row: who made it, where it lies there, and where it goes here.
        let moved = |schedule: &Schedule| -> Vec<(usize, usize, usize)> {
            let rows = |transfer: &Transfer| {
                let [region] = &transfer.regions[..] else {
                    panic!("{transfer:?}");
                };
                let rows = region.from.rows.clone().zip(region.to.rows.clone());
                let from = transfer.from;
                rows.map(move |(source, target)| (from, source, target))
            };
            schedule.arrivals().iter().flat_map(rows).collect()
        };
        for rank in 0..problem.rows.len() {
            let sum = plan(&description, rank, pulled).unwrap();
            let copy = |operation| {
                let description = Problem { operation, ..description.clone() };
                plan(&description, rank, problem.config).unwrap()
            };
            let all = copy(Operation::COPY_PARTIALS_AND_SUMS);
            let copy = copy(Operation::COPY_PARTIALS);
            prop_assert_eq!(moved(&copy), moved(&sum));
            for schedule in [&copy, &all] {
                prop_assert!(!schedule.handshake() && schedule.tiles().is_empty());
                prop_assert!(schedule.moves().all(|moved| moved.route == Route::Pull));
                prop_assert_eq!(schedule.moves().count(), schedule.arrivals().len());
            }
            let (first, second): (Vec<_>, Vec<_>) = all
                .arrivals()
                .iter()
                .partition(|transfer| transfer.regions[0].to.matrix == PARTIALS);
            for transfer in &first {
                prop_assert!(!sent(transfer, &partials).is_empty());
            }
            prop_assert_eq!(first.len(), copy.arrivals().len());
            // Of each other rank that has rows, all of them, in their places.
            let mine = description.layout.rows_of(rank);
            let mut got = vec![false; description.layout.m()];
            got[mine].fill(true);
            for transfer in second {
                let region = &transfer.regions[0];
                prop_assert_eq!(&region.from, &region.to);
                prop_assert_eq!(&region.to.rows, &description.layout.rows_of(transfer.from));
                got[region.to.rows.clone()].fill(true);
            }
            prop_assert!(got.iter().all(|&got| got));
        }
    }

    #[test]
    fn ranks_agree_but_for_their_parts_of_k(problem in any_asked(&[Route::Pull, Route::Push])) {
        let schedules = problem.schedules();
        let other = Problem {
            layout: Layout::new(&problem.rows, 9).unwrap(),
            ..problem.description()
        };
        let other = plan(&other, 0, problem.config).unwrap();
        prop_assert_eq!(other.agreed(), schedules[0].agreed());
        prop_assert!(schedules.iter().all(|schedule| schedule.agreed() == other.agreed()));
        let wider = Problem { n: problem.n + 1, ..problem.description() };
        let wider = plan(&wider, 0, problem.config).unwrap();
        prop_assert_ne!(wider.agreed(), other.agreed());
    }
}

#[test]
fn more_chunks_than_a_rank_has_flags_for_are_refused_on_every_rank_by_the_name_of_the_field() {
    let mut rows = vec![1; 63];
    rows.push(0);
    let problem = Asked {
        rows,
        n: 1,
        config: Config::new(TileShape::new(1, 1, 1), Chunking::new(33), Route::Push),
    };
    let description = problem.description();
    for rank in 0..64 {
        assert!(plan(&description, rank, problem.config).is_ok());
        let all = Problem {
            operation: Operation::MATMUL_ALL_REDUCE,
            ..problem.description()
        };
        let refused = plan(&all, rank, problem.config).unwrap_err();
        assert!(
            matches!(
                refused.kind(),
                Kind::Limit {
                    value: 6174,
                    max: 4096,
                    ..
                }
            ),
            "{refused:?}"
        );
        assert!(
            format!("{refused:?}").contains("Config::chunking"),
            "{refused:?}"
        );
    }
}

crate::support::shared::reduce_scatter_tests!(Host, Some(()));
