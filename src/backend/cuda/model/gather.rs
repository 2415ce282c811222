//! Predicts gathers: when rows arrive, and how long a product takes that begins with the rows that are there.

use super::fitted::gather as fitted;
use super::search::Search;
use super::tiles::Tiles;
use crate::backend::cuda::family::rates::{Link, Rates};
use crate::explanation::Prediction;
use crate::schedule::plan::tile_order;
use crate::schedule::{Chunking, Config, Numerics, Problem, Route};

/// Rows that arrive together.
#[derive(Clone, Copy)]
struct ArrivalGroup {
    rows: usize,
    ready: f64,
    /// When the rest of their columns is there, if they come in two parts.
    late: f64,
}

/// The rows of rank 0, then its arrivals, in their order.
fn groups(rates: &Rates, problem: &Problem, config: &Config) -> Vec<ArrivalGroup> {
    let layout = &problem.layout;
    let link = rates.link(config.route);
    let row = (layout.k() * problem.dtypes.operands.bytes()) as f64;
    let mut groups = vec![ArrivalGroup {
        rows: layout.rows_of(0).len(),
        ready: 0.0,
        late: 0.0,
    }];
    let mut clock = link.start;
    for source in 1..layout.world() {
        let is_last = source + 1 == layout.world();
        let count = match (config.route, is_last) {
            (Route::Store, _) => 1,
            (_, true) => config.chunking.last,
            (_, false) => config.chunking.count,
        };
        let rows = layout.rows_of(source).len();
        for chunk in 0..count {
            let rows = rows * (chunk + 1) / count - rows * chunk / count;
            let time = rows as f64 * row / link.bytes;
            let cut = config
                .cut(layout.k())
                .filter(|_| is_last && chunk + 1 == count);
            let first = cut.map_or(1.0, |column| column as f64 / layout.k() as f64);
            let ready = clock + link.chunk + first * time;
            clock = match cut {
                Some(_) => ready + link.chunk + (1.0 - first) * time,
                None => ready,
            };
            let late = if cut.is_some() { clock } else { 0.0 };
            groups.push(ArrivalGroup { rows, ready, late });
        }
    }
    groups
}

/// Slots that are free from a time on.
#[derive(Clone, Copy)]
struct FreeSlots {
    count: usize,
    at: f64,
}

impl FreeSlots {
    /// Both together, free at their mean time.
    fn and(self, other: FreeSlots) -> FreeSlots {
        let count = self.count + other.count;
        let at = self.count as f64 * self.at + other.count as f64 * other.at;
        FreeSlots {
            count,
            at: at / count.max(1) as f64,
        }
    }
}

/// All slots. Each is free at one of two times, because some are a tile ahead of the others.
struct Waves {
    early: FreeSlots,
    later: FreeSlots,
    /// When the last tile so far is made.
    end: f64,
}

impl Waves {
    fn new(slots: usize) -> Waves {
        let free = |count| FreeSlots { count, at: 0.0 };
        Waves {
            early: free(slots),
            later: free(0),
            end: 0.0,
        }
    }

    /// Makes `count` tiles, whose rows are there at `ready`.
    fn take(&mut self, tiles: &Tiles, count: usize, full_wave: f64, ready: f64) {
        let Waves { early, later, end } = self;
        let (full, rest) = (count / tiles.slots, count % tiles.slots);
        for slots in [&mut *early, &mut *later] {
            slots.at = slots.at.max(ready) + full as f64 * full_wave;
        }
        if full > 0 {
            *end = end.max(if later.count > 0 { later.at } else { early.at });
        }
        let wave = match full {
            0 => tiles.wave(rest),
            _ => full_wave,
        };
        let of = |count, at| FreeSlots { count, at };
        let (free, busy) = match rest.checked_sub(early.count) {
            None => {
                let left = of(early.count - rest, early.at).and(*later);
                (left, of(rest, early.at + wave))
            }
            Some(more) => {
                let first = of(early.count, early.at + wave);
                let second = of(more, later.at + wave);
                *end = end.max(if more > 0 { second.at } else { 0.0 });
                (of(later.count - more, later.at), first.and(second))
            }
        };
        if busy.count > 0 {
            *end = end.max(busy.at);
        }
        (*early, *later) = if free.count > 0 && (busy.count == 0 || free.at <= busy.at) {
            (free, busy)
        } else {
            (busy, free)
        };
    }
}

/// The time of a product whose rows are gathered meanwhile, as rank 0 sees it.
pub fn gathered(rates: &Rates, problem: &Problem, config: &Config) -> f64 {
    let tiles = Tiles::of(rates, problem, config);
    gathered_by(&tiles, problem, config, &groups(rates, problem, config))
}

fn gathered_by(tiles: &Tiles, problem: &Problem, config: &Config, groups: &[ArrivalGroup]) -> f64 {
    let layout = &problem.layout;
    if layout.world() == 1 {
        return tiles.cold();
    }
    let around = tiles.start + tiles.rates.link(config.route).around;
    if tile_order::reads_once(
        config,
        [layout.m(), problem.form.multiplied(problem.n), layout.k()],
    ) {
        let ready = groups.iter().map(|group| group.ready).fold(0.0, f64::max);
        return around + ready + tiles.all();
    }
    let full_wave = tiles.wave(tiles.slots.min(tiles.entries));
    let mut waves = Waves::new(tiles.slots);
    let (mut rows, mut taken) = (0, 0);
    for group in groups {
        rows += group.rows;
        // A tile row that two groups share waits for the second.
        let reached = if rows == layout.m() {
            tiles.entries
        } else {
            rows / tiles.rows * tiles.columns
        };
        let count = reached - taken;
        taken = reached;
        if count == 0 {
            continue;
        }
        waves.take(tiles, count, full_wave, group.ready);
        if group.late > 0.0 {
            let rest = 1.0 - config.cut(layout.k()).unwrap_or(0) as f64 / layout.k() as f64;
            waves.end = waves.end.max(group.late + rest * full_wave);
        }
    }
    around + waves.end + tiles.joined()
}

/// Predicts an operation that gathers rows, or multiplies those of one rank.
pub fn predict(rates: &Rates, problem: &Problem, config: &Config) -> Vec<Prediction> {
    let arrived = groups(rates, problem, config).into_iter();
    let arrived = arrived
        .map(|group| group.ready.max(group.late))
        .fold(0.0, f64::max);
    let parts = [
        (
            "of the product alone",
            Tiles::of(rates, problem, config).cold(),
        ),
        ("until the last rows have come", rates.start + arrived),
        (
            "until the operation is complete",
            gathered(rates, problem, config),
        ),
    ];
    // With one rank, no rows arrive.
    let count = if problem.layout.world() == 1 { 1 } else { 3 };
    let parts = parts.into_iter().take(count);
    parts
        .map(|(what, micros)| Prediction { what, micros })
        .collect()
}

/// How rows should be moved.
///
/// This depends only on what all ranks have alike, so not on N. N counts if the product takes longer than the gather,
/// but then it matters little how rows are moved.
fn moved(rates: &Rates, problem: &Problem, pushes: bool) -> (Route, Chunking) {
    let world = problem.layout.world();
    let row = (problem.layout.k() * problem.dtypes.operands.bytes()) as f64;
    let bytes = problem.layout.m() as f64 * row;
    let shard = bytes / world as f64;
    let Link { start, chunk, .. } = rates.push;
    let copies_begin = start + world as f64 * chunk;
    let stored_instead = if row <= fitted::SHORT_ROW && world == 2 {
        fitted::STORED_INSTEAD_IF_SHORT
    } else {
        fitted::STORED_INSTEAD
    };
    match pushes {
        false => (Route::Pull, Chunking::new(1)),
        true if (bytes - shard) / stored_instead <= copies_begin => {
            (Route::Store, Chunking::new(1))
        }
        true => {
            let count = if shard > fitted::LARGE_SHARD { 2 } else { 1 };
            (Route::Push, Chunking::new(count).with_cut_last(true))
        }
    }
}

/// Chooses the configuration of a gather and its product. Ranks whose N differ get configurations that agree.
///
/// `pushes`: whether rows may be pushed or stored. `near`: the fastest configuration of the most similar problem, if
/// one was measured. Rows are moved as in `near`.
pub fn choose(
    rates: &Rates,
    problem: &Problem,
    numerics: Numerics,
    pushes: bool,
    near: Option<Config>,
) -> Config {
    let (route, chunking) = match near {
        Some(near) => (near.route, near.chunking),
        None => moved(rates, problem, pushes),
    };
    let base = Config::new(rates.family.widest(), chunking, route);
    let groups = groups(rates, problem, &base);
    let search = Search::new(rates, problem, numerics, base);
    let least = search.least(|tiles, config, least| {
        // Many configurations are slower even with all rows there.
        if tiles.alone() < least {
            gathered_by(tiles, problem, config, &groups)
        } else {
            f64::INFINITY
        }
    });
    least.config
}

#[cfg(test)]
mod tests {
    use super::super::testing::config;
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::backend::cuda::program::support;
    use crate::backend::cuda::tuned::agree;
    use crate::element::DType;
    use crate::schedule::plan::plan;
    use crate::schedule::{Layout, Operation};

    fn problem(m: usize, n: usize, k: usize, world: usize) -> Problem {
        let layout = Layout::balanced(m, k, world).unwrap();
        Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, n)
    }

    /// M, N, K, the route, the chunks, whether the last is cut, the shape, and the microseconds that two H200s took.
    type MeasuredGather = ([usize; 3], Route, usize, bool, [usize; 4], f64);

    #[rustfmt::skip]
    const GATHERS: [MeasuredGather; 33] = [
        ([2048, 512, 28672], Route::Pull, 1, false, [64, 256, 1, 2], 264.9),
        ([13129, 768, 1600], Route::Pull, 1, false, [128, 128, 2, 1], 110.5),
        ([11406, 8384, 1536], Route::Pull, 1, false, [128, 192, 2, 1], 414.0),
        ([9778, 1664, 768], Route::Pull, 1, false, [128, 128, 2, 1], 69.9),
        ([7347, 8768, 1536], Route::Pull, 1, false, [128, 256, 2, 1], 291.0),
        ([388, 768, 2240], Route::Push, 1, false, [128, 64, 1, 4], 30.8),
        ([1565, 480, 512], Route::Push, 1, false, [128, 64, 1, 1], 29.4),
        ([349, 256, 576], Route::Push, 1, false, [128, 64, 1, 1], 28.5),
        ([570, 4864, 640], Route::Push, 1, false, [128, 256, 1, 1], 31.1),
        ([5102, 1664, 3072], Route::Push, 1, false, [128, 192, 2, 1], 112.7),
        ([161, 768, 3904], Route::Push, 1, true, [128, 64, 1, 4], 32.0),
        ([786, 7808, 6144], Route::Push, 1, true, [128, 256, 1, 1], 136.8),
        ([4096, 1792, 4096], Route::Push, 1, true, [128, 224, 2, 1], 86.6),
        ([13129, 768, 1600], Route::Push, 1, true, [128, 256, 1, 1], 105.8),
        ([1064, 1328, 576], Route::Push, 1, true, [64, 256, 1, 1], 28.3),
        ([512, 3584, 8192], Route::Push, 2, false, [128, 128, 2, 1], 85.2),
        ([2961, 1024, 21504], Route::Push, 2, false, [128, 224, 2, 1], 370.4),
        ([3413, 2960, 1792], Route::Push, 2, false, [128, 224, 2, 1], 65.3),
        ([9188, 6528, 17920], Route::Push, 2, false, [128, 128, 2, 1], 3073.0),
        ([9778, 1664, 768], Route::Push, 2, false, [128, 128, 2, 1], 64.0),
        ([13540, 1792, 11776], Route::Push, 2, true, [128, 256, 2, 1], 793.2),
        ([5951, 7336, 14080], Route::Push, 2, true, [128, 224, 2, 1], 1788.7),
        ([8518, 512, 1024], Route::Push, 2, true, [64, 256, 1, 1], 56.2),
        ([2961, 1024, 21504], Route::Push, 2, true, [128, 208, 1, 1], 323.3),
        ([355, 3248, 4096], Route::Push, 2, true, [64, 256, 1, 1], 45.7),
        ([1924, 304, 1280], Route::Store, 1, false, [128, 64, 1, 1], 23.8),
        ([32, 24064, 5696], Route::Store, 1, false, [64, 128, 1, 2], 89.9),
        ([143, 384, 1024], Route::Store, 1, false, [64, 128, 1, 4], 15.2),
        ([24, 20992, 4480], Route::Store, 1, false, [64, 256, 1, 1], 76.7),
        ([26, 24400, 20096], Route::Store, 1, false, [64, 256, 1, 1], 293.6),
        ([26, 24400, 20096], Route::Store, 1, false, [32, 128, 1, 2], 248.2),
        ([31, 17464, 16192], Route::Store, 1, false, [64, 224, 1, 1], 188.3),
        ([8518, 512, 1024], Route::Store, 1, false, [128, 128, 2, 1], 51.9),
    ];

    #[test]
    fn products_whose_rows_arrive_meanwhile_are_predicted_within_a_fifth() {
        for (shape, route, count, cut, tile, measured) in GATHERS {
            let [m, n, k] = shape;
            let config = config(tile, route, Chunking::new(count).with_cut_last(cut));
            let time = gathered(&H200, &problem(m, n, k, 2), &config);
            let off = measured / time - 1.0;
            assert!(
                off.abs() < 0.2,
                "{shape:?} {config:?}: {time} µs, not {measured}"
            );
        }
    }

    fn chosen(m: usize, n: usize, k: usize, world: usize) -> Config {
        choose(&H200, &problem(m, n, k, world), Numerics::Fast, true, None)
    }

    #[test]
    fn few_rows_are_stored_and_read_by_low_tiles_and_many_copied() {
        for (m, n, k, rows) in [
            (1, 3584, 8192, 16),
            (16, 1792, 4096, 16),
            (30, 4096, 4096, 32),
            (64, 8192, 3584, 64),
        ] {
            let Config { tile, route, .. } = chosen(m, n, k, 2);
            assert_eq!((tile.m, route), (rows, Route::Store), "{m}x{n}x{k}");
        }
        for (m, n, k) in [(4096, 1792, 4096), (8192, 3584, 8192), (16_384, 512, 8192)] {
            let Config {
                tile,
                route,
                chunking,
                ..
            } = chosen(m, n, k, 2);
            assert!(tile.m > 64 && route == Route::Push, "{m}x{n}x{k}");
            assert!(chunking.cut_last);
        }
        assert_eq!(chosen(16_384, 512, 8192, 2).chunking.count, 2);
    }

    #[test]
    fn of_short_rows_more_bytes_are_stored_than_of_long_ones() {
        let route = |m, k| chosen(m, 768, k, 2).route;
        for (short, long) in [((4400, 1408), (1512, 4096)), ((4600, 2000), (2300, 4000))] {
            assert_eq!(route(short.0, short.1), Route::Store, "{short:?}");
            assert_eq!(route(long.0, long.1), Route::Push, "{long:?}");
        }
        // Copies bring many short rows, and those of more ranks.
        assert_eq!(route(16384, 2048), Route::Push);
        assert_eq!(chosen(8800, 768, 1408, 4).route, Route::Push);
    }

    #[test]
    fn where_owners_may_not_move_rows_these_are_pulled() {
        let of = |pushes| {
            choose(
                &H200,
                &problem(64, 1792, 4096, 2),
                Numerics::Fast,
                pushes,
                None,
            )
        };
        assert_eq!(of(false).route, Route::Pull);
        assert_ne!(of(true).route, Route::Pull);
    }

    #[test]
    fn ranks_whose_n_differ_agree_and_each_has_tiles_of_its_own() {
        for world in 1..=8 {
            for (m, k) in [
                (1, 512),
                (64, 4096),
                (700, 8192),
                (8192, 1024),
                (16_384, 28_672),
            ] {
                let all = [1, 64, 700, 1792, 3584, 20_000].map(|n| chosen(m, n, k, world));
                assert!(
                    all.iter().all(|config| agree(config, &all[0])),
                    "{m} {k} {world}"
                );
            }
        }
        let near = Some(config([128, 224, 2, 1], Route::Push, Chunking::new(3)));
        let with = |n| {
            choose(
                &H200,
                &problem(1024, n, 4096, 4),
                Numerics::Fast,
                true,
                near,
            )
        };
        assert_eq!(
            (with(128).route, with(128).chunking),
            (Route::Push, Chunking::new(3))
        );
        assert_ne!(with(128).tile, with(20_000).tile);
    }

    #[test]
    fn where_bits_depend_on_k_alone_it_is_cut_for_no_shape() {
        for m in [1, 16, 128, 1000, 8192] {
            for n in [64, 512, 1792, 20_000] {
                let problem = problem(m, n, 4096, 4);
                let config = choose(&H200, &problem, Numerics::Invariant, true, None);
                assert_eq!([config.tile.split_k, config.tile.k_slices], [1, 1]);
            }
        }
    }

    #[test]
    fn what_is_chosen_can_be_planned_for_any_rows() {
        for rows in [&[1][..], &[0, 1], &[5, 0, 700], &[4096; 8], &[1; 64]] {
            let layout = Layout::new(rows, 512).unwrap();
            let problem = Problem {
                layout,
                ..problem(1, 300, 512, 1)
            };
            let config = choose(&H200, &problem, Numerics::Fast, true, None);
            for rank in 0..rows.len() {
                let schedule = plan(&problem, rank, config).unwrap();
                support::check(&schedule).unwrap();
            }
        }
    }
    #[test]
    fn a_choice_takes_a_few_microseconds() {
        use rustix::time::{ClockId, clock_gettime};

        const CHOICES: usize = 1000;
        // What this thread computes, however busy the machine is.
        let micros = || {
            let time = clock_gettime(ClockId::ThreadCPUTime);
            time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
        };
        let begin = micros();
        for m in 1..=CHOICES {
            std::hint::black_box(chosen(m, 3584, 8192, 8));
        }
        let each = (micros() - begin) / CHOICES as f64;
        println!("{each:.1} µs");
        // About 25 in an optimised build, and 35 here.
        assert!(each < 200.0, "{each:.1} µs");
    }
}
