//! How partial sums are made and moved where nothing was measured: of all kernels, routes and parts, those by which a small model
//! is done first.
//!
//! The model knows waves of tiles, when each part of a block has been made and has arrived, and that what waits for it ends later.
//! What ranks must agree on it must find the same on every rank, and K may differ between ranks: so that goes by a K that suits N, and only
//! the rest by the rank's own. It sees the operation as rank 0 does.

use std::ops::Range;

use super::rates::Rates;
use super::tiles::Tiles;
use crate::backend::cuda::kernel::{WIDEST, configs};
use crate::backend::cuda::landing::can_exchange;
use crate::explanation::Prediction;
use crate::schedule::partials::Piece;
use crate::schedule::reduce_scatter::{ALL_NAME, LOW_ROWS, agree, is_exchanged, pieces};
use crate::schedule::{Chunking, Config, Description, Form, Numerics, Route};

/// Microseconds, and what happens in one. Measured on two H200s; benches/NOTES.md has the traces.
mod rate {
    /// What adding to a tile takes.
    pub const ADD: f64 = 1.2;
    /// From the end of a block's last tile until an idle copy engine moves its first byte.
    pub const COPY_START: f64 = 12.0;
    /// From the end of one copy to the beginning of the next.
    pub const COPY_NEXT: f64 = 1.0;
    /// Bytes that the copy engine moves to a peer while kernels run.
    pub const COPIED: f64 = 300e3;
    /// What a copied flag takes.
    pub const COPY_FLAG: f64 = 5.0;
    /// What a kernel's start and end take.
    pub const KERNEL: f64 = 10.0;
    /// The same of a kernel with copies beside it.
    pub const COPIES: f64 = 13.0;
    /// What another kernel takes behind it that adds up what has been exchanged.
    pub const REDUCED: f64 = 4.5;
    /// Bytes that kernels store to a peer.
    pub const STORED: f64 = 330e3;
    /// The share of the time of stores in which nothing is multiplied, for loads wait behind them.
    pub const STORE_HINDERS: f64 = 0.6;
    /// What the flag behind stores takes.
    pub const STORE_FLAG: f64 = 4.0;
    /// What the start and the end of a kernel take that exchanges partials in landing areas, and a word's way.
    pub const LANDED: f64 = 15.0;
}

/// What an operation takes, cut up like that; that is not known if partials are pulled.
pub fn predict(rates: &Rates, asked: &Description, config: &Config) -> Vec<Prediction> {
    let alone = Prediction {
        what: "matmul alone",
        micros: Tiles::of(rates, asked, config).alone(),
    };
    let whole = || Prediction {
        what: "fused",
        micros: Model::new(rates, asked, asked.layout.k(), config).time(),
    };
    match config.route {
        Route::Pull => Vec::new(),
        _ => vec![alone, whole()],
    }
}

/// As good as any where nothing is exchanged.
const WHOLE: Config = Config::new(WIDEST, Chunking::new(1), Route::Push);

/// The configuration that should be the fastest. Ranks whose K differ get configurations that agree.
pub fn choose(rates: &Rates, asked: &Description, numerics: Numerics) -> Config {
    let alike = for_any_depth(rates, asked, numerics);
    let of_own_depth = |config| {
        let model = Model::new(rates, asked, asked.layout.k(), &config);
        (model.time(), config)
    };
    let candidates = configs(alike, true, &asked.form);
    let candidates = candidates
        .filter(|config| agree(asked, config, &alike) && config.check_numerics(numerics).is_ok());
    let timed = candidates.map(of_own_depth);
    let best = timed.min_by(|(one, _), (other, _)| one.total_cmp(other));
    best.map_or(alike, |(_, config)| config)
}

/// What the ranks agree on, which does not depend on K: the route, the pieces, and of partials that are exchanged the tiles.
fn for_any_depth(rates: &Rates, asked: &Description, numerics: Numerics) -> Config {
    let is_for_all = asked.operation == ALL_NAME;
    let cuts: &[(Route, usize, usize)] = match is_for_all {
        true if is_exchanged(asked, &WHOLE) => &[(Route::Store, 1, 1)],
        false => &[
            (Route::Store, 1, 1),
            (Route::Store, 1, 2),
            (Route::Push, 1, 1),
            (Route::Push, 1, 2),
        ],
        // More panels by copies take longer than the model says: benches/NOTES.md.
        true => &[
            (Route::Store, 1, 1),
            (Route::Store, 2, 1),
            (Route::Store, 4, 1),
            (Route::Store, 8, 1),
            (Route::Push, 1, 1),
            (Route::Push, 2, 1),
            (Route::Push, 4, 1),
        ],
    };
    let candidates = cuts.iter().flat_map(|&(route, count, last)| {
        let chunking = Chunking::new(count).with_last(last);
        let base = Config::new(WIDEST, chunking, route);
        // Nor on how a rank's weight lies.
        configs(base, true, &Form::default())
    });
    let depth = (asked.n / 2).clamp(4096, 8192);
    // So few rows are made in one tile, and exchanged as fast as can be: where only some kernels can, by one of these.
    let has_few_rows = asked.layout.m() <= LOW_ROWS;
    let mut best = ((true, f64::INFINITY), WHOLE);
    for config in candidates {
        let model = Model::new(rates, asked, depth, &config);
        let is_slow = has_few_rows && !model.lands();
        // Most are slower without any exchange.
        let least = (is_slow, model.of_tiles());
        if config.check_numerics(numerics).is_err() || least >= best.0 {
            continue;
        }
        let time = (is_slow, model.time());
        if time < best.0 {
            best = (time, config);
        }
    }
    best.1
}

/// Rank 0's view of the operation: what it makes, and to how many ranks each piece goes.
fn sent(asked: &Description, config: &Config) -> Option<Vec<(Piece, usize)>> {
    let world = asked.layout.world();
    if is_exchanged(asked, config) {
        let rows = 0..asked.layout.m();
        return Some(vec![(Piece { owner: 1, rows }, world - 1)]);
    }
    let pieces = pieces(asked, 0, *config).ok()?;
    let is_for_all = asked.operation == ALL_NAME;
    let to = |piece: &Piece| match piece.owner {
        0 if is_for_all => world - 1,
        0 => 0,
        _ => 1,
    };
    let pieces = pieces.into_iter().map(|piece| {
        let to = to(&piece);
        (piece, to)
    });
    Some(pieces.collect())
}

/// An operation, by one configuration.
struct Model<'a> {
    asked: &'a Description,
    config: &'a Config,
    /// Tiles that are made at the same time.
    slots: usize,
    columns: usize,
    /// What one takes.
    of_tile: f64,
}

impl Model<'_> {
    /// `depth`: what is summed over.
    fn new<'a>(
        rates: &Rates,
        asked: &'a Description,
        depth: usize,
        config: &'a Config,
    ) -> Model<'a> {
        let shape = [asked.layout.m(), asked.n, depth];
        let tiles = Tiles::new(rates, config, shape, asked.dtype.bytes());
        Model {
            asked,
            config,
            slots: tiles.slots,
            columns: tiles.columns,
            of_tile: tiles.wave(tiles.slots.min(tiles.entries)),
        }
    }

    /// Microseconds that all tiles take at least.
    fn of_tiles(&self) -> f64 {
        let tiles = self.asked.layout.m().div_ceil(self.config.entry_rows()) * self.columns;
        tiles.div_ceil(self.slots) as f64 * self.of_tile
    }

    /// Whether partials are exchanged in landing areas.
    fn lands(&self) -> bool {
        let Model { asked, config, .. } = *self;
        let shape = [asked.layout.m(), asked.n];
        is_exchanged(asked, config) && can_exchange(config, shape, asked.layout.world())
    }

    /// Microseconds from the first product until rank 0 has all it waits for. What it waits for from others comes when others get the
    /// same from it, for all ranks do the same.
    fn time(&self) -> f64 {
        let &Model {
            asked,
            config,
            slots,
            columns,
            of_tile,
        } = self;
        if self.lands() {
            // Each element is sent with as many bytes of tags, to one peer or to all.
            let [m, n, world] = [asked.layout.m(), asked.n, asked.layout.world()];
            let elements = match asked.operation {
                ALL_NAME => m * n * (world - 1),
                _ => m * n * (world - 1) / world,
            };
            let sent = (2 * elements * asked.dtype.bytes()) as f64;
            return self.of_tiles() + sent / rate::STORED + rate::LANDED;
        }
        let Some(sent) = sent(asked, config) else {
            return f64::INFINITY;
        };
        let route = config.route;
        let bytes = |rows: usize, to: usize| (rows * asked.n * asked.dtype.bytes() * to) as f64;
        // Rows of a piece, counted from its owner's first.
        let within = |piece: &Piece| {
            let first = asked
                .layout
                .rows_of(piece.owner)
                .start
                .min(piece.rows.start);
            piece.rows.start - first..piece.rows.end - first
        };
        // When others' rows, so counted, arrive there; and the others' of this rank here.
        let mut arrivals: Vec<(Range<usize>, f64)> = Vec::new();
        // Clusters take tiles in turn, each when it is done with the one before.
        let mut clocks = vec![0.0f64; slots];
        let mut taken = 0;
        let (mut wire, mut complete) = (0.0f64, 0.0f64);
        for (piece, to) in &sent {
            let rows = within(piece);
            let adds = piece.owner == 0 && asked.layout.world() > 1;
            arrivals.sort_by_key(|(of, _)| of.start);
            let mut awaited = arrivals
                .iter()
                .filter(|(of, _)| adds && rows.start < of.end)
                .peekable();
            let tiles = rows.len().div_ceil(config.entry_rows()) * columns;
            let moved = bytes(rows.len(), *to) / tiles.max(1) as f64;
            let (mut latest, mut made) = (0.0f64, 0.0f64);
            for tile in 1..=tiles {
                let reached = rows.start + rows.len() * tile / tiles;
                while let Some((_, at)) = awaited.next_if(|(of, _)| of.start < reached) {
                    latest = latest.max(*at);
                }
                let clock = &mut clocks[taken % slots];
                taken += 1;
                *clock += of_tile;
                if adds {
                    *clock = clock.max(latest) + rate::ADD;
                }
                made = made.max(*clock);
                if route == Route::Store && *to > 0 {
                    wire = wire.max(*clock) + moved / rate::STORED;
                    // The next tile is held up, as all are that are stored at the same time.
                    *clock += rate::STORE_HINDERS * moved * slots as f64 / rate::STORED;
                }
            }
            complete = complete.max(made);
            if *to == 0 {
                continue;
            }
            match route {
                Route::Store => wire += rate::STORE_FLAG,
                _ => {
                    wire = (wire + rate::COPY_NEXT).max(made + rate::COPY_START);
                    wire += bytes(rows.len(), *to) / rate::COPIED + rate::COPY_FLAG * *to as f64;
                }
            }
            complete = complete.max(wire);
            if piece.owner != 0 {
                arrivals.push((rows, wire));
            }
        }
        let around = match route {
            Route::Store if is_exchanged(asked, config) => rate::KERNEL + rate::REDUCED,
            Route::Store => rate::KERNEL,
            _ => rate::COPIES,
        };
        complete + around
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::H200;
    use super::super::testing::config;
    use super::*;
    use crate::backend::cuda::limits;
    use crate::backend::cuda::sums::TARGETS;
    use crate::element::DType;
    use crate::schedule::reduce_scatter::{NAME, all_reduce, reduce_scatter};
    use crate::schedule::{Layout, Planner};

    fn asked(operation: &'static str, rows: &[usize], n: usize, k: usize) -> Description {
        Description {
            beside: None,
            form: Default::default(),
            operation,
            dtype: DType::Bf16,
            layout: Layout::new(rows, k).unwrap(),
            n,
        }
    }

    fn chosen(operation: &'static str, m: usize, n: usize) -> Config {
        let asked = asked(operation, &[m / 2; 2], n, 64);
        choose(&H200, &asked, Numerics::Fast)
    }

    /// Operation, M, N, K, route, width of a tile, CTAs that share `b`, and K, chunks and those of the last; and the microseconds that
    /// two H200s took.
    type Point = (&'static str, [usize; 3], Route, [usize; 3], [usize; 2], f64);

    #[test]
    fn the_model_comes_within_a_seventh_of_what_was_measured() {
        use Route::{Push, Store};
        #[rustfmt::skip]
        const MEASURED: [Point; 24] = [
            (NAME, [256, 4096, 1792], Store, [64, 1, 2], [1, 1], 25.0),
            (NAME, [256, 8192, 3584], Store, [128, 1, 2], [1, 1], 53.0),
            (NAME, [512, 8192, 3584], Store, [128, 2, 1], [1, 1], 67.0),
            (NAME, [1024, 4096, 1792], Store, [128, 2, 1], [1, 1], 43.0),
            (NAME, [1024, 4096, 1792], Store, [256, 1, 1], [1, 1], 50.0),
            (NAME, [1024, 8192, 3584], Store, [256, 2, 1], [1, 1], 109.0),
            (NAME, [1024, 8192, 3584], Push, [256, 2, 1], [1, 1], 94.0),
            (NAME, [4096, 4096, 1792], Store, [256, 2, 1], [1, 8], 128.0),
            (NAME, [4096, 4096, 1792], Push, [256, 2, 1], [1, 2], 105.0),
            (NAME, [4096, 4096, 1792], Push, [256, 2, 1], [1, 3], 113.0),
            (NAME, [4096, 4096, 1792], Push, [256, 2, 1], [1, 4], 119.0),
            (NAME, [8192, 4096, 1792], Push, [256, 2, 1], [1, 2], 187.0),
            (NAME, [8192, 4096, 1792], Push, [256, 2, 1], [1, 4], 191.0),
            (NAME, [8192, 4096, 1792], Store, [256, 2, 1], [1, 8], 241.0),
            (NAME, [16384, 4096, 1792], Push, [256, 2, 1], [1, 4], 354.0),
            (NAME, [8192, 8192, 3584], Push, [224, 2, 1], [1, 2], 650.0),
            (NAME, [8192, 8192, 3584], Store, [256, 2, 1], [1, 8], 749.0),
            (ALL_NAME, [256, 4096, 1792], Store, [64, 1, 2], [1, 1], 31.0),
            (ALL_NAME, [512, 8192, 3584], Store, [128, 2, 1], [1, 1], 79.0),
            (ALL_NAME, [1024, 8192, 3584], Store, [256, 2, 1], [1, 1], 131.0),
            (ALL_NAME, [4096, 4096, 1792], Push, [256, 2, 1], [2, 1], 163.0),
            (ALL_NAME, [8192, 4096, 1792], Push, [256, 2, 1], [4, 1], 285.0),
            (ALL_NAME, [8192, 8192, 3584], Push, [256, 2, 1], [2, 1], 758.0),
            (ALL_NAME, [8192, 8192, 3584], Push, [256, 2, 1], [4, 1], 729.0),
        ];
        for (operation, [m, n, k], route, of_shape, [count, last], measured) in MEASURED {
            let asked = asked(operation, &[m / 2; 2], n, k);
            let chunking = Chunking::new(count).with_last(last);
            let [columns, cluster, split_k] = of_shape;
            let config = config([128, columns, cluster, split_k], route, chunking);
            let time = Model::new(&H200, &asked, k, &config).time();
            let off = measured / time - 1.0;
            assert!(
                off.abs() < 1.0 / 7.0,
                "{operation} {asked:?} {config:?}: {time} µs, not {measured}"
            );
        }
    }

    #[test]
    fn each_rank_splits_the_k_that_it_has() {
        for operation in [NAME, ALL_NAME] {
            let split = |k| {
                let asked = asked(operation, &[8; 2], 1024, k);
                choose(&H200, &asked, Numerics::Fast).tile.split_k
            };
            assert!(split(256) < split(12_800));
        }
    }

    #[test]
    fn few_rows_are_stored_many_copied_and_the_last_block_in_parts() {
        for operation in [NAME, ALL_NAME] {
            for (m, n) in [
                (2, 4096),
                (16, 8192),
                (256, 4096),
                (512, 8192),
                (1024, 4096),
            ] {
                assert_eq!(chosen(operation, m, n).route, Route::Store, "{m} {n}");
            }
            for (m, n) in [(8192, 4096), (8192, 8192), (16384, 16384)] {
                let Config {
                    route, chunking, ..
                } = chosen(operation, m, n);
                assert_eq!(route, Route::Push, "{m} {n}");
                assert!(chunking.count.max(chunking.last) > 1);
            }
        }
    }

    #[test]
    fn what_is_chosen_can_be_run_by_two_to_eight_ranks_on_each() {
        for world in 2..=TARGETS {
            for (m, n) in [
                (1, 8),
                (64, 4096),
                (700, 1000),
                (4096, 4096),
                (16_384, 8192),
            ] {
                let mut rows = vec![m; world];
                rows[world / 2] = 0;
                for (operation, planner) in
                    [(NAME, reduce_scatter as Planner), (ALL_NAME, all_reduce)]
                {
                    let asked = asked(operation, &rows, n, 64);
                    let config = choose(&H200, &asked, Numerics::Fast);
                    for rank in 0..world {
                        let schedule = planner(&asked, rank, config).unwrap();
                        limits::check(&schedule).unwrap();
                        assert!(limits::commands(&schedule) <= limits::COMMANDS, "{asked:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn ranks_whose_k_differ_agree_and_where_bits_depend_on_k_alone_nobody_cuts_it() {
        for operation in [NAME, ALL_NAME] {
            for m in [1, 64, 700, 5000] {
                for n in [8, 1000, 8192] {
                    let of = |k| asked(operation, &[m, 2 * m, 0], n, k);
                    for numerics in [Numerics::Fast, Numerics::Invariant] {
                        let [one, other] = [64, 9000].map(|k| choose(&H200, &of(k), numerics));
                        assert!(numerics == Numerics::Fast || one.tile.split_k == 1);
                        let agreed = |config: Config, k| {
                            let planner = if operation == NAME {
                                reduce_scatter
                            } else {
                                all_reduce
                            };
                            let schedule = planner(&of(k), 1, config).unwrap();
                            schedule.agreed().unwrap().details().to_string()
                        };
                        assert_eq!(agreed(one, 64), agreed(other, 9000));
                    }
                }
            }
        }
    }
}
