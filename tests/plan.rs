//! What every schedule of an all-gather promises, over shapes that are awkward; and that the drivers do what a schedule
//! says.

#[path = "support/planners.rs"]
mod planners;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::ops::Range;

use gemmesh::Config;
use gemmesh::DType;
use gemmesh::Error;
use gemmesh::error::{Class, Kind};
use gemmesh::products::MAX_WEIGHTS;
use gemmesh::protocol::epoch::Epoch;
use gemmesh::protocol::flag::Awaited;
use gemmesh::protocol::flag::Flag;
use gemmesh::protocol::flag::FlagBlock;
use gemmesh::protocol::flag::Wait;
use gemmesh::protocol::primitive::AtomicUsize;
use gemmesh::schedule::drive::{self, CopyEngine, CopyThread};
use gemmesh::schedule::plan;
use gemmesh::schedule::plan::matrices::{B, BIAS, MATRICES, OUT};
use gemmesh::schedule::{
    Addend, Layout, MatrixSpec, Operation, Parts, Problem, Product, Reduction, RowOrder, Schedule,
    Sum, Tile, Transfer, Weight,
};
use gemmesh::schedule::{CUT_COLUMNS, MAX_CHUNKS, MAX_CLUSTER, MAX_SLICES};
use gemmesh::schedule::{MAX_EXTENT, MAX_WORLD, balanced_rows};
use gemmesh::tuning::{Chunking, Route, TileShape};
use proptest::prelude::*;
use proptest::sample::select;

/// A problem and a configuration, as they are given.
#[derive(Clone, Debug)]
struct Case {
    rows: Vec<usize>,
    n: usize,
    k: usize,
    rank: usize,
    config: Config,
}

impl Case {
    fn plan(&self) -> Schedule {
        plan(&self.rows, self.n, self.k, self.rank, self.config).unwrap()
    }

    /// As it would be if rows went by `route`.
    fn by(&self, route: Route) -> Schedule {
        let config = self.config.with_route(route);
        plan(&self.rows, self.n, self.k, self.rank, config).unwrap()
    }

    fn m(&self) -> usize {
        self.rows.iter().sum()
    }

    /// The rows that `rank` owns.
    fn rows_of(&self, rank: usize) -> Range<usize> {
        let begin = self.rows[..rank].iter().sum();
        begin..begin + self.rows[rank]
    }

    fn own(&self) -> Range<usize> {
        self.rows_of(self.rank)
    }
}

/// The schedule of a rank that gathers and multiplies.
fn plan(
    rows: &[usize],
    n: usize,
    k: usize,
    rank: usize,
    config: Config,
) -> gemmesh::Result<Schedule> {
    let layout = Layout::new(rows, k)?;
    let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, n);
    plan::plan(&problem, rank, config)
}

fn product(schedule: &Schedule) -> &Product {
    schedule.product().unwrap()
}

/// The rows of a transfer, which has one region.
fn rows_of(transfer: &Transfer) -> Range<usize> {
    assert_eq!(transfer.regions.len(), 1);
    transfer.regions[0].to.rows.clone()
}

/// And its columns.
fn columns_of(transfer: &Transfer) -> Range<usize> {
    transfer.regions[0].to.columns.clone()
}

/// The other ranks, around the ring.
fn ring(case: &Case) -> Vec<usize> {
    let world = case.rows.len();
    (1..world).map(|step| (case.rank + step) % world).collect()
}

/// What comes from `source`.
fn arrivals_from(schedule: &Schedule, source: usize) -> Vec<&Transfer> {
    let arrivals = schedule.arrivals().iter();
    arrivals
        .filter(|arrival| arrival.source == source)
        .collect()
}

/// 1, primes, multiples of a tile and their neighbours, anything.
fn extent(tile: usize, most: usize) -> impl Strategy<Value = usize> {
    prop_oneof![
        1 => Just(1),
        2 => select(vec![2, 3, 5, 7, 13, 31, 61, 127, 251, 509]),
        4 => (1..=6usize, 0..=2usize).prop_map(move |(tiles, off)| tiles * tile + off - 1),
        2 => 1..=most,
    ]
    .prop_map(move |extent| extent.clamp(1, most))
}

/// The rows of each rank: balanced, also fewer rows than ranks, or as uneven as can be; or none at all.
fn rows(tile_m: usize) -> impl Strategy<Value = Vec<usize>> {
    let extent = prop_oneof![1 => Just(0), 15 => extent(tile_m, 600)];
    let balanced = (extent, 1..=MAX_WORLD).prop_map(|(m, w)| balanced_rows(m, w));
    let shard = prop_oneof![
        Just(0),
        Just(1),
        Just(tile_m - 1),
        Just(tile_m),
        Just(tile_m + 1),
        0..=90usize
    ];
    let uneven = prop::collection::vec(shard, 1..=MAX_WORLD);
    prop_oneof![balanced, uneven]
}

fn case() -> impl Strategy<Value = Case> {
    let tile = || select(vec![1usize, 2, 3, 7, 8, 16, 37, 64, 128]);
    let group_m = prop_oneof![
        4 => 1..=9usize,
        1 => select(vec![64, 1000, MAX_EXTENT]),
    ];
    let chunks = || prop_oneof![1..=8usize, 1..=MAX_CHUNKS];
    let routes = vec![Route::Pull, Route::Push, Route::Store];
    let moved = (chunks(), chunks(), any::<bool>(), select(routes));
    let cluster = (1..=2usize, 1..=2usize);
    (tile(), tile(), cluster, group_m, moved)
        .prop_flat_map(|(tile_m, tile_n, cluster, group_m, moved)| {
            let (chunks, last_chunks, cut_last, route) = moved;
            let config = Config::new(
                TileShape::new(tile_m, tile_n, 5)
                    .with_cluster(cluster.0, cluster.1)
                    .with_group_m(group_m),
                Chunking::new(chunks)
                    .with_last(last_chunks)
                    .with_cut_last(cut_last),
                route,
            );
            (
                rows(tile_m * cluster.0),
                extent(tile_n, 5 * tile_n),
                select(vec![1, 64, 65, 128, 129, 1000]),
                Just(config),
                any::<usize>(),
            )
        })
        .prop_map(|(rows, n, k, config, rank)| Case {
            rank: rank % rows.len(),
            rows,
            n,
            k,
            config,
        })
}

/// By row: the positions of the pulls that bring it.
fn pulls_by_row(case: &Case, plan: &Schedule) -> Vec<Vec<usize>> {
    let mut by_row = vec![Vec::new(); case.m()];
    for (position, pull) in plan.arrivals().iter().enumerate() {
        for row in rows_of(pull) {
            by_row[row].push(position);
        }
    }
    by_row
}

/// 0 for a tile that is ready at once, else 1 + the position of the last pull that it waits for.
fn ready(plan: &Schedule, tile: &Tile) -> usize {
    let position = |flag| plan.arrivals().iter().position(|pull| pull.flag == flag);
    tile.flags()
        .map(|flag| position(flag).unwrap() + 1)
        .max()
        .unwrap_or(0)
}

/// [`ready`] of each entry of the table.
fn ready_order(plan: &Schedule) -> Vec<usize> {
    let mut by_row = std::collections::HashMap::new();
    plan.tiles()
        .iter()
        .map(|tile| *by_row.entry(tile.m).or_insert_with(|| ready(plan, tile)))
        .collect()
}

/// Rows of one entry of the table: a cluster's tiles stand one above the other, and side by side.
fn entry_rows(case: &Case) -> usize {
    case.config.tile.m * case.config.tile.cluster_m
}

fn entry_columns(case: &Case) -> usize {
    case.config.tile.n * case.config.tile.cluster_n
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_table_is_a_permutation_of_all_tiles(case in case()) {
        let plan = case.plan();
        let tiles: Vec<_> = plan.tiles().iter().map(|tile| (tile.m, tile.n)).collect();
        let distinct: BTreeSet<_> = tiles.iter().copied().collect();
        let rows = case.m().div_ceil(entry_rows(&case)) as u32;
        let columns = case.n.div_ceil(entry_columns(&case)) as u32;
        prop_assert_eq!(tiles.len(), rows as usize * columns as usize);
        prop_assert_eq!(distinct.len(), tiles.len());
        prop_assert!(distinct.iter().all(|&(m, n)| m < rows && n < columns));
    }

    #[test]
    fn tiles_cover_the_output_once(case in case()) {
        let plan = case.plan();
        let tile_n = entry_columns(&case);
        let tile_m = entry_rows(&case);
        let mut area = 0;
        for tile in plan.tiles() {
            let (rows, columns) = (product(&plan).rows(tile), product(&plan).columns(tile));
            prop_assert_eq!(rows.start, tile.m as usize * tile_m);
            prop_assert_eq!(columns.start, tile.n as usize * tile_n);
            prop_assert!(rows.end <= case.m() && rows.len() <= tile_m);
            prop_assert!(columns.end <= case.n && columns.len() <= tile_n);
            area += rows.len() * columns.len();
        }
        prop_assert_eq!(area, case.m() * case.n);
    }

    #[test]
    fn own_tiles_come_first_and_wait_for_nothing(case in case()) {
        let plan = case.plan();
        let own = case.own();
        let is_own = |tile: &Tile| product(&plan).rows(tile).all(|row| own.contains(&row));
        let count = plan.tiles().iter().filter(|tile| is_own(tile)).count();
        for (index, tile) in plan.tiles().iter().enumerate() {
            prop_assert_eq!(is_own(tile), index < count);
            prop_assert_eq!(tile.flags().is_empty(), index < count);
        }
    }

    #[test]
    fn of_few_rows_that_are_stored_a_column_has_all_its_tiles_before_the_next_if_b_is_large(m in 1..600usize, large in any::<bool>()) {
        let config = Config::new(TileShape::new(64, 128, 64).with_group_m(8), Chunking::new(1), Route::Store);
        let n = if large { 16_384 } else { 256 };
        let plan = plan(&balanced_rows(m, 3), 1024, n, 1, config).unwrap();
        let by_columns = plan.tiles().is_sorted_by_key(|tile| tile.n);
        prop_assert_eq!(by_columns, m <= 64 || (large && m <= 8 * 64));
    }

    #[test]
    fn each_flag_is_written_by_exactly_one_pull(case in case()) {
        let plan = case.plan();
        let mut flags: Vec<_> = plan.arrivals().iter().map(|pull| pull.flag).collect();
        flags.sort_unstable();
        prop_assert_eq!(flags, (0..plan.arrivals().len()).collect::<Vec<_>>());
        for pull in plan.arrivals() {
            prop_assert_eq!(plan.sources()[pull.flag], pull.source);
        }
        let written = 0..plan.arrivals().len();
        let awaited = plan.tiles().iter().flat_map(Tile::flags);
        prop_assert!(awaited.into_iter().all(|flag| written.contains(&flag)));
    }

    #[test]
    fn every_remote_row_is_pulled_once_from_its_owner_and_no_own_row_is(case in case()) {
        let plan = case.plan();
        let by_row = pulls_by_row(&case, &plan);
        for source in 0..case.rows.len() {
            for row in case.rows_of(source) {
                let pulls = by_row[row].iter().map(|&position| &plan.arrivals()[position]);
                let mut columns = 0;
                for pull in pulls {
                    prop_assert_eq!((pull.source, columns_of(pull).start), (source, columns));
                    prop_assert_eq!((pull.from, pull.to), (source, case.rank));
                    columns = columns_of(pull).end;
                }
                let expected = if source == case.rank { 0 } else { case.k };
                prop_assert_eq!(columns, expected, "row {}", row);
            }
        }
    }

    #[test]
    fn the_last_chunk_of_all_and_no_other_is_cut_along_k_if_that_is_asked_for(case in case()) {
        let plan = case.plan();
        let source = (case.rank + case.rows.len() - 1) % case.rows.len();
        let cut = case.config.chunking.cut_last
            && case.config.route != Route::Store
            && case.k > 2 * CUT_COLUMNS
            && source != case.rank
            && !case.rows_of(source).is_empty();
        prop_assert_eq!(product(&plan).deferred.is_some(), cut);
        if case.config.route == Route::Store {
            return Ok(());
        }
        let (parts, whole): (Vec<_>, Vec<_>) =
            plan.arrivals().iter().partition(|pull| columns_of(pull).len() < case.k);
        prop_assert!(whole.iter().all(|pull| columns_of(pull) == (0..case.k)));
        let Some(late) = product(&plan).deferred else {
            prop_assert!(parts.is_empty());
            return Ok(());
        };
        prop_assert!(late.column.is_multiple_of(CUT_COLUMNS));
        let last = &plan.arrivals()[plan.arrivals().len() - 2..];
        prop_assert_eq!(parts, last.iter().collect::<Vec<_>>());
        prop_assert_eq!(rows_of(&last[0]), rows_of(&last[1]));
        prop_assert_eq!(rows_of(&last[0]).end, case.rows_of(source).end);
        prop_assert_eq!((last[1].flag, columns_of(&last[1]).start), (late.flag, late.column));
        prop_assert_eq!(last[0].flag + 1, late.flag);
    }

    #[test]
    fn a_tile_waits_for_every_chunk_that_overlaps_it_and_for_no_other(case in case()) {
        let plan = case.plan();
        let by_row = pulls_by_row(&case, &plan);
        for tile in plan.tiles() {
            let overlapping: BTreeSet<_> = product(&plan)
                .rows(tile)
                .flat_map(|row| &by_row[row])
                .map(|&position| plan.arrivals()[position].flag)
                .collect();
            prop_assert_eq!(tile.flags().collect::<BTreeSet<_>>(), overlapping, "{:?}", tile);
        }
    }

    #[test]
    fn tiles_stand_in_the_order_in_which_their_last_pull_is_made(case in case()) {
        let plan = case.plan();
        prop_assert!(ready_order(&plan).is_sorted());
    }

    #[test]
    fn grouping_is_kept_inside_what_becomes_ready_together(case in case()) {
        let plan = case.plan();
        let ready = ready_order(&plan);
        let grouped = |tile: &Tile| (tile.m as usize / case.config.tile.group_m, tile.n, tile.m);
        for (pair, ready) in plan.tiles().windows(2).zip(ready.windows(2)) {
            prop_assert!(
                ready[0] != ready[1] || grouped(&pair[0]) < grouped(&pair[1]),
                "{:?} before {:?}", pair[0], pair[1]
            );
        }
    }

    #[test]
    fn rows_come_in_ring_order_and_a_sources_from_the_first_on(case in case()) {
        let plan = case.plan();
        let by_source: Vec<Transfer> = ring(&case)
            .into_iter()
            .flat_map(|source| arrivals_from(&plan, source))
            .cloned()
            .collect();
        prop_assert_eq!(plan.arrivals(), by_source);
        prop_assert!(arrivals_from(&plan, case.rank).is_empty());
        for source in 0..case.rows.len() {
            let next = |p: &[&Transfer]| match columns_of(p[1]).start {
                0 => rows_of(p[0]).end == rows_of(p[1]).start,
                column => rows_of(p[0]) == rows_of(p[1]) && columns_of(p[0]).end == column,
            };
            prop_assert!(arrivals_from(&plan, source).windows(2).all(next));
        }
    }

    #[test]
    fn a_shard_is_copied_in_few_even_chunks_whatever_the_tiles(case in case(), tile_m in 1..300usize) {
        let case = Case { config: case.config.with_route(Route::Push), ..case };
        let plan = case.plan();
        for (source, &rows) in case.rows.iter().enumerate() {
            let chunks = if (source + 1) % case.rows.len() == case.rank {
                case.config.chunking.last
            } else {
                case.config.chunking.count
            };
            let copies: Vec<_> =
                arrivals_from(&plan, source).into_iter().filter(|copy| columns_of(copy).start == 0).collect();
            prop_assert!(copies.len() <= chunks);
            for copy in &copies {
                prop_assert!(!rows_of(copy).is_empty());
                prop_assert!(rows_of(copy).len() <= rows.div_ceil(chunks) * 9 / 8 + 1);
            }
            let boundary = match rows / chunks {
                0..16 => 1,
                16..64 => 2,
                64..1024 => 8,
                _ => 128,
            };
            prop_assert!(copies.iter().skip(1).all(|copy| rows_of(copy).start.is_multiple_of(boundary)));
        }
        let mut other = case.clone();
        other.config.tile.m = tile_m;
        let other = other.plan();
        prop_assert_eq!(other.arrivals(), plan.arrivals());
    }

    #[test]
    fn what_is_stored_comes_in_many_pieces_that_lie_in_one_place(case in case()) {
        let plan = case.by(Route::Store);
        let most = (64 / (case.rows.len() - 1).max(1)).max(1);
        for source in ring(&case) {
            let pieces = arrivals_from(&plan, source);
            prop_assert!(pieces.len() <= most);
            let rows = case.rows[source];
            let bytes = 2 * rows * case.k;
            prop_assert!(pieces.len() == most || bytes.div_ceil(pieces.len().max(1)) < 128 << 10, "{} pieces", pieces.len());
            for piece in pieces {
                let (rows, columns) = (rows_of(piece), columns_of(piece));
                prop_assert!(!rows.is_empty() && !columns.is_empty());
                prop_assert!(columns == (0..case.k) || rows.len() == 1);
                prop_assert!(columns.start.is_multiple_of(CUT_COLUMNS));
                prop_assert!(columns.len() == case.k || columns.len() >= 448);
            }
        }
    }

    #[test]
    fn what_a_rank_pulls_is_what_the_others_push_to_it(case in case()) {
        let plan = case.by(Route::Pull);
        prop_assert_eq!(plan.moves().cloned().collect::<Vec<_>>(), plan.arrivals());
        for source in ring(&case) {
            let owner = Case { rank: source, ..case.clone() }.by(Route::Push);
            // The ring comes to the ranks before this one first: they need its rows first.
            let world = case.rows.len();
            let mut peers: Vec<_> = owner.moves().map(|push| push.to).collect();
            peers.dedup();
            let steps: Vec<_> = peers.iter().map(|peer| (source + world - peer) % world).collect();
            prop_assert!(steps.is_sorted_by(|near, far| near < far), "{:?}", steps);
            let pushed: Vec<Transfer> =
                owner.moves().filter(|push| push.to == case.rank).cloned().collect();
            let pulled: Vec<Transfer> = arrivals_from(&plan, source)
                .into_iter()
                .map(|pull| Transfer { route: Route::Push, ..pull.clone() })
                .collect();
            prop_assert_eq!(pushed, pulled);
        }
    }

    #[test]
    fn who_pulls_from_a_rank_is_waited_for_and_nobody_else(case in case()) {
        let rows = case.rows[case.rank] > 0;
        let others: Vec<usize> = (0..case.rows.len()).filter(|&r| rows && r != case.rank).collect();
        let pulled = case.by(Route::Pull);
        prop_assert_eq!(pulled.movers(), others);
        prop_assert!(case.by(Route::Push).movers().is_empty());
        prop_assert!(case.plan().awaits_all(), "every row is some tile's");
    }

    #[test]
    fn a_rank_alone_goes_by_the_route_that_is_asked_for(m in 1..300usize, route in 0..3usize) {
        let route = [Route::Pull, Route::Push, Route::Store][route];
        let alone = plan(&[m], 4, 1, 0, CONFIG.with_route(route)).unwrap();
        prop_assert_eq!(alone.is_pushed(), route != Route::Pull);
        prop_assert!(alone.moves().next().is_none() && alone.awaits_all());
    }

    #[test]
    fn ranks_agree_on_rows_and_where_these_are_pushed_on_how_they_are_cut(case in case()) {
        let digest = |case: &Case| case.plan().agreed().unwrap().digest();
        let with = |change: fn(&mut Case)| {
            let mut other = case.clone();
            change(&mut other);
            digest(&other)
        };
        let same = digest(&case);
        prop_assert_eq!(with(|case| case.n += 1), same);
        prop_assert_eq!(with(|case| case.rank = 0), same);
        prop_assert_ne!(with(|case| case.k += 64), same);
        prop_assert_ne!(with(|case| case.rows[0] += 1), same);
        if case.rows[1..].iter().any(|&count| count > 0) {
            let split = with(|case| {
                let last = case.rows.iter().rposition(|&count| count > 0).unwrap();
                case.rows[last] -= 1;
                case.rows[0] += 1;
            });
            prop_assert_ne!(split, same, "as many rows, of other ranks");
        }
        let pulled = case.config.route == Route::Pull;
        let copied = case.config.route == Route::Push;
        prop_assert_eq!(with(|case| case.config.chunking.count = case.config.chunking.count % 64 + 1) != same, copied);
        prop_assert_eq!(with(|case| case.config.tile.m += 1), same);
        let other = case.by(if pulled { Route::Push } else { Route::Pull });
        prop_assert_ne!(other.agreed().unwrap().digest(), same);
    }

    #[test]
    fn what_is_done_in_part_is_a_part_of_the_whole(case in case()) {
        let layout = Layout::new(&case.rows, case.k).unwrap();
        let run = |operation| {
            let problem = Problem::new(operation, DType::Bf16, layout.clone(), case.n);
            plan::plan(&problem, case.rank, case.config).unwrap()
        };
        let places = |schedule: &Schedule| -> BTreeSet<(u32, u32)> {
            schedule.tiles().iter().map(|tile| (tile.m, tile.n)).collect()
        };
        let whole = case.plan();
        let gather = run(Operation::GATHER);
        let pulled = case.by(Route::Pull);
        prop_assert_eq!(gather.arrivals(), pulled.arrivals());
        prop_assert!(gather.tiles().is_empty() && gather.handshake());
        prop_assert_eq!(gather.awaits_all(), gather.arrivals().is_empty());
        let multiply = run(Operation::MULTIPLY);
        prop_assert_eq!(places(&multiply), places(&whole));
        prop_assert!(multiply.tiles().iter().all(|tile| tile.flags().is_empty()));
        prop_assert!(multiply.moves().next().is_none() && multiply.agreed().is_none());
        let copy = run(Operation::COPY);
        prop_assert!(!copy.handshake() && copy.movers().is_empty() && copy.awaits_all());
        for source in ring(&case) {
            let moved: Vec<_> = arrivals_from(&copy, source).into_iter().map(rows_of).collect();
            let shard = case.rows_of(source);
            prop_assert!(moved == [shard.clone()] || moved.is_empty() && shard.is_empty());
        }
    }

    #[test]
    fn a_balanced_split_differs_by_at_most_one_row(m in 1..10_000usize, world in 1..=MAX_WORLD) {
        let rows = balanced_rows(m, world);
        prop_assert_eq!(rows.len(), world);
        prop_assert_eq!(rows.iter().sum::<usize>(), m);
        prop_assert!(rows.is_sorted_by(|longer, shorter| longer >= shorter));
        prop_assert!(rows[0] - rows[world - 1] <= 1);
        let layout = Layout::balanced(m, 9, world).unwrap();
        prop_assert_eq!(&layout, &Layout::new(&rows, 9).unwrap());
        prop_assert_eq!((layout.m(), layout.k(), layout.world()), (m, 9, world));
        prop_assert_eq!(layout.rows_of(world - 1), m - rows[world - 1]..m);
        prop_assert_eq!(layout.rows(), rows);
    }

    #[test]
    fn a_gather_waits_pulls_and_signals_in_the_order_of_the_plan(
        case in case(),
        epoch in any::<u32>(),
    ) {
        let plan = case.by(Route::Pull);
        let epoch = Epoch::from_raw(epoch);
        let mut log = Log::default();
        let Ok(()) = drive::transfer(&plan, plan.moves(), epoch, &mut log);
        let mut expected = Vec::new();
        for source in ring(&case) {
            let arrivals = arrivals_from(&plan, source);
            if arrivals.is_empty() {
                continue;
            }
            expected.push(Step::WaitReady(source, epoch));
            for pull in arrivals {
                expected.push(Step::Copy(pull.clone()));
                expected.push(Step::SignalChunk(pull.flag, epoch));
            }
            expected.push(Step::SignalDone(source, epoch));
        }
        prop_assert_eq!(log.0, expected);
    }

    #[test]
    fn a_tile_is_multiplied_once_and_after_all_its_flags(case in case(), epoch in any::<u32>()) {
        let plan = case.plan();
        let epoch = Epoch::from_raw(epoch);
        let flags = flags(plan.arrivals().len(), epoch.previous());
        let waits = Waits::default();
        let mut tiles = Vec::new();
        let next = AtomicUsize::new(0);
        let Ok(()) = drive::multiply(&plan, epoch, &flags, &next, &[], &waits, |index, tile| {
            tiles.push((index, *tile, waits.0.take()));
        });
        prop_assert_eq!(tiles.len(), plan.tiles().len());
        for (position, (index, tile, waited)) in tiles.into_iter().enumerate() {
            prop_assert_eq!((index, tile), (position, plan.tiles()[position]));
            let expected: Vec<_> = tile
                .flags()
                .map(|flag| {
                    let source = plan.sources()[flag];
                    let pulled = case.config.route == Route::Pull;
                    (&raw const flags[flag], epoch, Awaited::Chunk { source, flag, pulled })
                })
                .collect();
            prop_assert_eq!(waited, expected);
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Step {
    WaitReady(usize, Epoch),
    WaitChunk(usize, Epoch),
    WaitProduced(usize, Epoch),
    Copy(Transfer),
    SignalChunk(usize, Epoch),
    SignalDone(usize, Epoch),
}

/// A copy engine that writes down what it is told.
#[derive(Default)]
struct Log(Vec<Step>);

impl CopyEngine for Log {
    type Error = Infallible;

    fn wait_ready(&mut self, source: usize, epoch: Epoch) -> Result<(), Infallible> {
        self.0.push(Step::WaitReady(source, epoch));
        Ok(())
    }

    fn wait_chunk(&mut self, flag: usize, epoch: Epoch, _: Awaited) -> Result<(), Infallible> {
        self.0.push(Step::WaitChunk(flag, epoch));
        Ok(())
    }

    fn wait_produced(&mut self, block: usize, epoch: Epoch) -> Result<(), Infallible> {
        self.0.push(Step::WaitProduced(block, epoch));
        Ok(())
    }

    fn copy(&mut self, transfer: &Transfer) -> Result<(), Infallible> {
        self.0.push(Step::Copy(transfer.clone()));
        Ok(())
    }

    fn signal_chunk(&mut self, transfer: &Transfer, epoch: Epoch) -> Result<(), Infallible> {
        self.0.push(Step::SignalChunk(transfer.flag, epoch));
        Ok(())
    }

    fn signal_done(&mut self, source: usize, epoch: Epoch) -> Result<(), Infallible> {
        self.0.push(Step::SignalDone(source, epoch));
        Ok(())
    }
}

/// Waits for nothing, and writes down for what it should have waited.
#[derive(Default)]
struct Waits(RefCell<Vec<(*const Flag, Epoch, Awaited)>>);

impl Wait for Waits {
    type Error = Infallible;

    fn wait(&self, flag: &Flag, epoch: Epoch, awaited: Awaited) -> Result<(), Infallible> {
        self.0.borrow_mut().push((flag, epoch, awaited));
        Ok(())
    }
}

fn flags(count: usize, epoch: Epoch) -> Vec<Flag> {
    (0..count).map(|_| Flag::new(epoch)).collect()
}

/// The flags of `world` ranks, ready and done and chunk, that hold `epoch`.
fn blocks(world: usize, chunks: usize, epoch: Epoch) -> Vec<[Vec<Flag>; 3]> {
    (0..world)
        .map(|_| [world, world, chunks].map(|count| flags(count, epoch)))
        .collect()
}

fn borrowed(blocks: &[[Vec<Flag>; 3]]) -> Vec<FlagBlock<'_>> {
    blocks
        .iter()
        .map(|[ready, done, chunk]| FlagBlock { ready, done, chunk })
        .collect()
}

fn values(flags: &[Flag]) -> Vec<u32> {
    flags.iter().map(Flag::peek).collect()
}

const CONFIG: Config = Config::new(
    TileShape::new(2, 3, 1).with_group_m(2),
    Chunking::new(2),
    Route::Pull,
);

#[test]
fn a_rank_announces_its_rows_to_every_peer_and_waits_for_each_to_have_pulled_them() {
    let blocks = blocks(4, 0, Epoch::from_raw(u32::MAX - 1));
    let borrowed = borrowed(&blocks);
    drive::announce(2, Epoch::from_raw(0), &borrowed);
    for (peer, [ready, done, _]) in blocks.iter().enumerate() {
        let announced = if peer == 2 { u32::MAX - 1 } else { 0 };
        assert_eq!(values(ready)[2], announced);
        // Epoch 0 refreshes: what not every operation writes is brought to the epoch before.
        let refreshed = if peer == 2 { u32::MAX } else { u32::MAX - 1 };
        assert_eq!(values(done), [refreshed; 4]);
    }
    let waits = Waits::default();
    let plan = plan(&[1; 4], 4, 1, 2, CONFIG).unwrap();
    let Ok(()) = drive::complete(&plan, Epoch::from_raw(0), &borrowed, &waits);
    let done = |peer| {
        let flag: *const Flag = &blocks[2][1][peer];
        (flag, Epoch::from_raw(0), Awaited::Done { peer })
    };
    assert_eq!(waits.0.take(), [done(0), done(1), done(3)]);
}

#[test]
fn an_operation_waits_at_its_end_for_what_no_tile_awaits() {
    let asked = planners::Asked {
        world: 3,
        block: 2,
        k: 4,
        n: 5,
    };
    let epoch = Epoch::FIRST;
    for route in [Route::Pull, Route::Push] {
        let plan = planners::with_scales(asked, true, 1, CONFIG.with_route(route));
        let blocks = blocks(3, plan.arrivals().len(), epoch.previous());
        let waits = Waits::default();
        let Ok(()) = drive::complete(&plan, epoch, &borrowed(&blocks), &waits);
        let awaited: Vec<_> = waits.0.take().iter().map(|wait| wait.0).collect();
        for flag in &blocks[1][2] {
            let flag: *const Flag = flag;
            assert!(awaited.contains(&flag), "{route:?}: not awaited");
        }
    }
}

#[test]
fn a_copy_thread_waits_for_its_source_and_signals_its_own_chunks_and_its_sources_done() {
    let plan = plan(&[2, 1, 3], 4, 1, 1, CONFIG).unwrap();
    let before = Epoch::FIRST.previous();
    let blocks = blocks(3, plan.arrivals().len(), before);
    let waits = Waits::default();
    let mut copied = Vec::new();
    let mut engine = CopyThread {
        rank: 1,
        blocks: &borrowed(&blocks),
        produced: &[],
        waiter: &waits,
        copy: |pull: &Transfer| {
            let arrived = values(&blocks[1][2]);
            assert_eq!(arrived[pull.flag], before.raw(), "signalled too early");
            copied.push(pull.clone());
        },
    };
    let Ok(()) = drive::transfer(&plan, plan.moves(), Epoch::FIRST, &mut engine);
    assert_eq!(copied, plan.arrivals());
    let ready = |source| {
        let flag: *const Flag = &blocks[1][0][source];
        (flag, Epoch::FIRST, Awaited::Ready { source })
    };
    assert_eq!(waits.0.take(), [ready(2), ready(0)]);
    for (rank, [ready, done, chunk]) in blocks.iter().enumerate() {
        assert_eq!(values(ready), [0; 3]);
        assert_eq!(values(done), if rank == 1 { [0, 0, 0] } else { [0, 1, 0] });
        let arrived = u32::from(rank == 1);
        assert_eq!(values(chunk), vec![arrived; plan.arrivals().len()]);
    }
}

#[test]
fn a_push_waits_for_its_peer_and_signals_the_peers_chunk_after_its_rows() {
    let config = CONFIG.with_route(Route::Push);
    let plan = plan(&[2, 3, 1], 4, 1, 1, config).unwrap();
    let before = Epoch::FIRST.previous();
    let blocks = blocks(3, 4, before);
    let waits = Waits::default();
    let mut pushed = Vec::new();
    let mut engine = CopyThread {
        rank: 1,
        blocks: &borrowed(&blocks),
        produced: &[],
        waiter: &waits,
        copy: |push: &Transfer| {
            let arrived = values(&blocks[push.to][2]);
            assert_eq!(arrived[push.flag], before.raw(), "signalled too early");
            pushed.push(push.clone());
        },
    };
    let Ok(()) = drive::transfer(&plan, plan.moves(), Epoch::FIRST, &mut engine);
    assert_eq!(pushed, plan.moves().cloned().collect::<Vec<_>>());
    assert_eq!(
        pushed.iter().map(|push| push.to).collect::<Vec<_>>(),
        [0, 0, 2, 2]
    );
    let ready = |peer: usize| {
        let flag: *const Flag = &blocks[1][0][peer];
        (flag, Epoch::FIRST, Awaited::Ready { source: peer })
    };
    assert_eq!(waits.0.take(), [ready(0), ready(2)]);
    // Rank 0 numbers rank 1's chunks first, rank 2 after those of rank 0.
    let arrived = [[1, 1, 0, 0], [0; 4], [0, 0, 1, 1]];
    for (rank, [ready, done, chunk]) in blocks.iter().enumerate() {
        assert_eq!((values(ready), values(done)), (vec![0; 3], vec![0; 3]));
        assert_eq!(values(chunk), arrived[rank], "rank {rank}");
    }
}

#[test]
fn a_flag_that_no_plan_used_for_half_the_epochs_is_not_taken_for_arrived() {
    // A plan with one chunk flag; the second flag is written in the first operation only. So is what a peer writes that
    // pulls.
    let plan = plan(&[1, 1], 1, 1, 0, CONFIG).unwrap();
    assert_eq!(plan.arrivals().len(), 1);
    let first = Epoch::from_raw(u32::MAX - 5);
    let blocks = blocks(2, 2, first.previous());
    blocks[0][2][1].signal(first);
    blocks[0][1][1].signal(first);
    let waits = Waits::default();
    let mut engine = CopyThread {
        rank: 0,
        blocks: &borrowed(&blocks),
        produced: &[],
        waiter: &waits,
        copy: |_: &Transfer| {},
    };
    // Of 2³³ operations those are run that can change the idle flag, and their neighbours.
    let step = u64::from(Epoch::REFRESH);
    for refresh in (0..1 << 33).step_by(step as usize) {
        for operation in refresh..refresh + 2 {
            let epoch = Epoch::from_raw(operation as u32);
            drive::announce(0, epoch, &borrowed(&blocks));
            let Ok(()) = drive::transfer(&plan, plan.moves(), epoch, &mut engine);
            let next = epoch.next();
            assert!(blocks[0][2][0].reached(epoch));
            assert!(!blocks[0][2][0].reached(next));
            assert!(!blocks[0][2][1].reached(next), "operation {operation}");
            assert!(!blocks[0][1][1].reached(next), "operation {operation}");
        }
        let before_the_next = Epoch::from_raw((refresh + step - 1) as u32);
        assert!(!blocks[0][2][1].reached(before_the_next));
        assert!(!blocks[0][1][1].reached(before_the_next));
    }
}

#[test]
fn a_peer_hears_that_its_rows_were_pulled_after_the_last_of_them() {
    let problem = planners::Asked {
        world: 3,
        block: 1,
        k: 1,
        n: 0,
    };
    let plan = planners::staged(problem, 2, 0, CONFIG);
    let mut log = Log::default();
    let Ok(()) = drive::transfer(&plan, plan.moves(), Epoch::FIRST, &mut log);
    let sources = |step: &Step| match step {
        Step::Copy(pull) => Some(pull.from),
        _ => None,
    };
    let copied: Vec<usize> = log.0.iter().filter_map(sources).collect();
    assert_eq!(copied, [1, 2, 1, 2], "stage by stage");
    for peer in [1, 2] {
        let done = Step::SignalDone(peer, Epoch::FIRST);
        let said: Vec<usize> = (0..log.0.len())
            .filter(|&step| log.0[step] == done)
            .collect();
        let last = log.0.iter().rposition(|step| sources(step) == Some(peer));
        assert!(said.len() == 1 && Some(said[0]) > last, "{:?}", log.0);
    }
}

/// A change that makes parts of a schedule wrong.
type Change = fn(&mut Parts);

const WRONG_MATRICES: [Change; 5] = [
    |parts| parts.matrices.clear(),
    |parts| parts.matrices[0].rows -= 1,
    |parts| parts.matrices[B].dtype = DType::F16,
    |parts| parts.matrices[BIAS].dtype = DType::F32,
    |parts| parts.matrices[OUT].dtype = DType::F16,
];

const WRONG_TRANSFERS: [Change; 8] = [
    |parts| parts.arrivals[0].flag = 2,
    |parts| parts.arrivals[0].flag = parts.arrivals[1].flag,
    |parts| parts.arrivals[0].from = 2,
    |parts| parts.arrivals[0].to = 1,
    |parts| parts.arrivals[0].regions[0].to.matrix = MATRICES,
    |parts| parts.arrivals[0].regions[0].to.rows.end = 6,
    |parts| parts.arrivals[0].regions[0].to.columns.end = 2,
    |parts| {
        let mut departure = parts.arrivals[0].clone();
        (departure.route, departure.produced) = (Route::Push, Some(1));
        parts.departures.push(departure);
    },
];

const WRONG_TILES: [Change; 4] = [
    |parts| parts.tiles[0] = Tile::new(0, 3, 0, 0..0),
    |parts| parts.tiles[0] = Tile::new(0, 0, 0, 0..3),
    |parts| parts.tiles[0] = Tile::new(0, 0, 0, 0..1 << 16),
    |parts| parts.tiles[0] = Tile::new(1, 0, 0, 0..0),
];

const WRONG_PRODUCTS: [Change; 10] = [
    |parts| parts.product = None,
    |parts| product_of(parts).config.tile.n = 0,
    |parts| product_of(parts).blocks.clear(),
    |parts| product_of(parts).blocks[0].rows.end = 6,
    |parts| product_of(parts).blocks[0].weight = 1,
    |parts| product_of(parts).gated = true,
    |parts| product_of(parts).weights.clear(),
    |parts| product_of(parts).weights[0].n += 1,
    |parts| {
        let weights = &mut product_of(parts).weights;
        weights.extend([weights[0]; MAX_WEIGHTS]);
    },
    |parts| {
        let product = product_of(parts);
        let weight = product.weights[0];
        let n = weight.n + 1;
        product.weights.push(Weight { n, ..weight });
        product.gated = true;
    },
];

const WRONG_SUMS: [Change; 8] = [
    |parts| sum_of(parts).first = 1,
    |parts| sum_of(parts).out = MATRICES,
    |parts| sum_of(parts).addends = vec![Addend::Product; 2],
    |parts| {
        let rows = Addend::Rows {
            matrix: OUT,
            first: 1,
        };
        sum_of(parts).addends = vec![Addend::Product, rows];
    },
    |parts| sum_of(parts).bias.as_mut().unwrap().first = 1,
    |parts| sum_of(parts).residual.as_mut().unwrap().first = 1,
    |parts| {
        let mut sum = sum_of(parts).clone();
        sum.addends = vec![Addend::Product];
        let n = parts.matrices[OUT].columns;
        parts.reduction = Some(Reduction { rows: 1, n, sum });
    },
    |parts| {
        let mut sum = sum_of(parts).clone();
        sum.addends = vec![Addend::Rows {
            matrix: OUT,
            first: 0,
        }];
        let MatrixSpec { rows, columns, .. } = parts.matrices[OUT];
        parts.reduction = Some(Reduction {
            rows: rows + 1,
            n: columns,
            sum,
        });
    },
];

fn product_of(parts: &mut Parts) -> &mut Product {
    parts.product.as_mut().unwrap()
}

/// The sum of the first block.
fn sum_of(parts: &mut Parts) -> &mut Sum {
    &mut product_of(parts).blocks[0].sum
}

/// The parts of a schedule that is right.
fn right_parts() -> Parts {
    let schedule = plan(&[2, 3], 4, 1, 0, CONFIG).unwrap();
    Parts {
        rank: schedule.rank(),
        world: schedule.world(),
        agreed: schedule.agreed().cloned(),
        matrices: schedule.matrices().to_vec(),
        arrivals: schedule.arrivals().to_vec(),
        departures: Vec::new(),
        product: schedule.product().cloned(),
        tiles: schedule.tiles().to_vec(),
        requests: Vec::new(),
        host_sums: Vec::new(),
        reduction: None,
        one_shot: false,
    }
}

#[test]
fn what_lies_outside_of_what_it_is_a_part_of_is_refused() {
    assert!(Schedule::new(right_parts()).is_ok());
    let changes: [(&str, &[Change]); 5] = [
        ("matrices", &WRONG_MATRICES),
        ("transfers", &WRONG_TRANSFERS),
        ("tiles", &WRONG_TILES),
        ("products", &WRONG_PRODUCTS),
        ("sums", &WRONG_SUMS),
    ];
    for (what, changes) in changes {
        for (index, change) in changes.iter().enumerate() {
            let mut wrong = right_parts();
            change(&mut wrong);
            let refused = Schedule::new(wrong).err();
            let class = refused.map(|error| error.kind().class());
            assert_eq!(class, Some(Class::Argument), "change {index} of {what}");
        }
    }
}

#[test]
fn what_is_outside_the_limits_is_named() {
    assert_problems_have_limits();
    assert_fields_have_limits();
    assert_fields_have_limits_together();

    let huge = balanced_rows(MAX_EXTENT, 2);
    let tiles = MAX_EXTENT.div_ceil(2) * MAX_EXTENT.div_ceil(3);
    let error = plan(&huge, MAX_EXTENT, 1, 0, CONFIG).unwrap_err();
    assert_limit(
        error,
        "the number of tiles of the output",
        tiles,
        0,
        1 << 28,
    );
}

fn assert_problems_have_limits() {
    let problem = |rows: &[usize], n, k, rank| plan(rows, n, k, rank, CONFIG).unwrap_err();
    let large = MAX_EXTENT + 1;
    assert_limit(problem(&[], 1, 1, 0), "world size", 0, 1, MAX_WORLD);
    assert_limit(problem(&[1; 65], 1, 1, 0), "world size", 65, 1, MAX_WORLD);
    assert_limit(problem(&[1; 4], 1, 1, 4), "rank", 4, 0, 3);
    assert_limit(
        problem(&[1, MAX_EXTENT], 1, 1, 0),
        "M",
        large,
        0,
        MAX_EXTENT,
    );
    let overflow = problem(&[usize::MAX, 2], 1, 1, 0);
    assert_limit(overflow, "M", usize::MAX, 0, MAX_EXTENT);
    assert_limit(problem(&[1], 0, 1, 0), "N", 0, 1, MAX_EXTENT);
    assert_limit(problem(&[1], large, 1, 0), "N", large, 1, MAX_EXTENT);
    assert_limit(problem(&[1], 1, 0, 0), "K", 0, 1, MAX_EXTENT);
    assert_limit(problem(&[1], 1, large, 0), "K", large, 1, MAX_EXTENT);

    let balanced = |m, world| Layout::balanced(m, 1, world).unwrap_err();
    assert_limit(balanced(1, 0), "world size", 0, 1, MAX_WORLD);
    assert_limit(balanced(1, 65), "world size", 65, 1, MAX_WORLD);
}

/// Each field of a configuration alone.
fn assert_fields_have_limits() {
    type Field = (&'static str, fn(&mut Config) -> &mut usize, usize);
    let fields: [Field; 11] = [
        ("Config::tile.m", |c| &mut c.tile.m, MAX_EXTENT),
        ("Config::tile.n", |c| &mut c.tile.n, MAX_EXTENT),
        ("Config::tile.k", |c| &mut c.tile.k, MAX_EXTENT),
        ("Config::tile.stages", |c| &mut c.tile.stages, MAX_EXTENT),
        (
            "Config::tile.cluster_m",
            |c| &mut c.tile.cluster_m,
            MAX_CLUSTER,
        ),
        (
            "Config::tile.cluster_n",
            |c| &mut c.tile.cluster_n,
            MAX_CLUSTER,
        ),
        ("Config::tile.group_m", |c| &mut c.tile.group_m, MAX_EXTENT),
        ("Config::tile.split_k", |c| &mut c.tile.split_k, MAX_CLUSTER),
        (
            "Config::tile.k_slices",
            |c| &mut c.tile.k_slices,
            MAX_SLICES,
        ),
        (
            "Config::chunking.count",
            |c| &mut c.chunking.count,
            MAX_CHUNKS,
        ),
        (
            "Config::chunking.last",
            |c| &mut c.chunking.last,
            MAX_CHUNKS,
        ),
    ];
    for (name, field, max) in fields {
        let plan = |value| {
            let mut config = CONFIG;
            *field(&mut config) = value;
            plan(&[3; 3], 9, 9, 0, config)
        };
        for value in [0, max + 1, usize::MAX] {
            assert_limit(plan(value).unwrap_err(), name, value, 1, max);
        }
        assert!(plan(1).is_ok() && plan(max).is_ok(), "{name}");
    }
}

/// Fields of which each is within its limits.
fn assert_fields_have_limits_together() {
    let mut config = CONFIG;
    config.tile = TileShape::new(MAX_EXTENT, 3, 1).with_cluster(2, 1);
    let error = plan(&[3; 3], 9, 9, 0, config).unwrap_err();
    let rows = "Config::tile.m · tile.cluster_m";
    assert_limit(error, rows, 2 * MAX_EXTENT, 1, MAX_EXTENT);

    config.tile = TileShape::new(3, MAX_EXTENT, 1).with_cluster(1, 2);
    let error = plan(&[3; 3], 9, 9, 0, config).unwrap_err();
    let columns = "Config::tile.n · tile.cluster_n";
    assert_limit(error, columns, 2 * MAX_EXTENT, 1, MAX_EXTENT);

    let error = plan(&[3; 3], 9, 9, 0, CONFIG.with_max_ctas(0)).unwrap_err();
    assert_limit(error, "Config::max_ctas", 0, 1, MAX_EXTENT);

    config.tile = TileShape::new(2, 3, 1).with_split_k(2).with_k_slices(2);
    let error = plan(&[3; 3], 9, 9, 0, config).unwrap_err();
    let parts = "Config::tile.split_k, where k_slices is above 1,";
    assert_limit(error, parts, 2, 1, 1);
}

#[track_caller]
fn assert_limit(error: Error, what: &str, value: usize, min: usize, max: usize) {
    let what = what.into();
    let limit = Kind::Limit {
        what,
        value,
        min,
        max,
    };
    assert_eq!(error.kind(), &limit);
}

/// Rows that are owned in blocks come stage by stage, each once, under flags that are numbered by their places.
#[test]
fn staged_rows_come_stage_by_stage() {
    let routes = [Route::Pull, Route::Push, Route::Store];
    for rows in [
        &[40, 0, 17][..],
        &[7, 8],
        &[1, 1, 1, 1],
        &[300, 299, 301],
        &[0, 0, 5],
    ] {
        for (stages, order) in [1, 2, 3, 8, 64]
            .into_iter()
            .flat_map(|stages| [RowOrder::ByRank, RowOrder::ByStage].map(|order| (stages, order)))
        {
            let layout = Layout::new(rows, 64)
                .unwrap()
                .staged(stages, order)
                .unwrap();
            let operation = Operation::ALL_GATHER_MATMUL;
            let problem = Problem::new(operation, DType::Bf16, layout.clone(), 12);
            for (route, chunks) in routes.into_iter().flat_map(|r| [1, 4].map(|c| (r, c))) {
                let tile = TileShape::new(16, 8, 8);
                let chunking = Chunking::new(chunks).with_cut_last(true);
                let config = Config::new(tile, chunking, route);
                for rank in 0..rows.len() {
                    let plan = |problem: &Problem| plan::plan(problem, rank, config).unwrap();
                    let schedule = plan(&problem);
                    staged_schedule_is_right(&layout, &schedule, rank);
                    let flat = Layout::new(rows, 64).unwrap();
                    if stages == 1 {
                        let same = plan(&Problem {
                            layout: flat,
                            ..problem.clone()
                        });
                        assert_eq!(schedule.arrivals(), same.arrivals());
                        assert_eq!(schedule.tiles(), same.tiles());
                    }
                }
            }
        }
    }
}

fn staged_schedule_is_right(layout: &Layout, schedule: &Schedule, rank: usize) {
    let stage_of = |source: usize, rows: &Range<usize>| {
        let is_in = |stage: &usize| {
            let block = layout.block(source, *stage);
            block.start <= rows.start && rows.end <= block.end
        };
        (0..layout.stages())
            .find(is_in)
            .expect("a chunk is of one block")
    };
    // By place: who brings it, and under which flag.
    let mut seen = vec![0; layout.m() * layout.k()];
    let mut before = 0;
    let mut by_flag = vec![0; schedule.arrivals().len()];
    for arrival in schedule.arrivals() {
        let to = &arrival.regions[0].to;
        assert_eq!(*to, arrival.regions[0].from);
        let stage = stage_of(arrival.source, &to.rows);
        assert!(before <= stage, "stage {stage} after {before}");
        before = stage;
        by_flag[arrival.flag] = to.rows.start;
        for row in to.rows.clone() {
            to.columns
                .clone()
                .for_each(|column| seen[row * layout.k() + column] += 1);
        }
    }
    assert!(by_flag.is_sorted(), "flags are numbered by place");
    for owner in 0..layout.world() {
        for row in layout.blocks_of(owner).flatten() {
            let times = &seen[row * layout.k()..(row + 1) * layout.k()];
            let expected = usize::from(owner != rank);
            assert!(times.iter().all(|&count| count == expected), "row {row}");
        }
    }
    let all: BTreeSet<usize> = (0..layout.world())
        .flat_map(|owner| layout.blocks_of(owner).flatten())
        .collect();
    assert_eq!(all.len(), layout.m());
    let product = schedule.product().expect("it multiplies");
    for tile in schedule.tiles() {
        let rows = product.rows(tile);
        for arrival in schedule.arrivals() {
            let to = &arrival.regions[0].to.rows;
            let overlaps = to.start < rows.end && rows.start < to.end;
            assert!(
                !overlaps || tile.flags().contains(&arrival.flag),
                "{tile:?}"
            );
        }
    }
}
