//! What the planners of partial sums share: pieces, their transfers, sums and tiles of one rank.

use std::ops::Range;

use smallvec::smallvec;

use crate::call::of_configuration;
use crate::error::Result;
use crate::route::Route;
use crate::schedule::config::{Chunking, Config, TileShape};
use crate::schedule::layout::{MAX_EXTENT, chunk_rows};
use crate::schedule::limits::{limit, require};
use crate::schedule::plan::matrices::{
    self, A, A_SCALES, B, B_SCALES, BIAS, OUT, PARTIALS, RESIDUAL,
};
use crate::schedule::plan::partials::{
    Incoming, Partials, Piece, by_owners, is_one_shot, is_stored_by_tiles,
};
use crate::schedule::plan::tile_order::{TileRow, ring};
use crate::schedule::{
    Addend, Agreed, Bias, DTypes, MAX_FLAGS, MatrixSpec, Move, OutputBlock, Parts, Problem,
    Product, Reduction, Region, Residual, ScaleMatrix, Sum, Tile, Transfer, Weight,
};

/// A planner of partial sums for one rank.
pub(super) struct SumPlan<'a> {
    pub(super) problem: &'a Problem,
    pub(super) rank: usize,
    pub(super) config: Config,
    pub(super) partials: Partials,
    pub(super) sums: SumOwners,
    /// True if all rows are made before any partial is moved.
    pub(super) one_shot: bool,
}

/// Which ranks get the sums of a rank's rows, and who makes them.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum SumOwners {
    /// Only this rank, which makes them.
    Own,
    /// All ranks. This rank makes them and sends them on.
    All,
    /// All ranks. Each makes them.
    Everywhere,
}

impl SumPlan<'_> {
    pub(super) fn new(
        problem: &Problem,
        rank: usize,
        config: Config,
        sums: SumOwners,
    ) -> Result<SumPlan<'_>> {
        limit("rank", rank, 0, problem.layout.world() - 1)?;
        config.check()?;
        limit("N", problem.n, 1, MAX_EXTENT)?;
        // A gated product is not a sum of gated products over parts of K.
        limit(
            "the number of weights of a sum over ranks",
            problem.form.weight_count(),
            1,
            1,
        )?;
        let is_plain = problem.form.quantization.is_none();
        require("sums over ranks must not be quantised", is_plain)?;
        let entries = problem.layout.m().div_ceil(config.entry_rows()) + problem.layout.world();
        let tiles = entries.saturating_mul(problem.n.div_ceil(config.entry_columns()));
        limit("the number of tiles of the output", tiles, 1, 1 << 28)?;
        let partials = match sums {
            SumOwners::Own | SumOwners::All => Partials::of(problem, &config),
            SumOwners::Everywhere => Partials::one_shot(problem, &config),
        };
        limit(
            "the number of rows of all partials",
            partials.rows(),
            0,
            MAX_EXTENT,
        )?;
        // This counts for the rank that gets the most transfers, so that all ranks agree.
        let Chunking { count, last, .. } = config.chunking;
        let each = match sums {
            SumOwners::Own => count.max(last),
            // Panels of partials, of which the last is in parts, and panels of sums.
            SumOwners::All => (count - 1 + last) + count,
            SumOwners::Everywhere => count,
        };
        let flags = (problem.layout.world() - 1) * each;
        let what =
            "the number of transfers to a rank, of the chunks that Config::chunking asks for,";
        limit(what, flags, 0, MAX_FLAGS)?;
        let one_shot = match sums {
            SumOwners::Own => by_owners(problem, &config),
            SumOwners::All => false,
            SumOwners::Everywhere => true,
        };
        Ok(SumPlan {
            problem,
            rank,
            config,
            partials,
            sums,
            one_shot,
        })
    }

    /// The pieces that each rank makes.
    pub(super) fn all_pieces(&self) -> Vec<Vec<Piece>> {
        let ranks = 0..self.problem.layout.world();
        ranks.map(|rank| self.pieces(rank)).collect()
    }

    /// The pieces that a rank makes, in this order.
    ///
    /// It makes the peers' rows panel by panel. It makes its own rows of a panel after the peers' rows of the next
    /// panel, because by then the peers' partials of its own rows have usually come.
    ///
    /// If sums stay with the owners, all rows are one panel, and the configuration says how peers' rows are cut. Those
    /// of the last peer are cut more finely, because when they are made, only moving them is left to do.
    pub(super) fn pieces(&self, rank: usize) -> Vec<Piece> {
        let layout = &self.problem.layout;
        let world = layout.world();
        let height = self.config.entry_rows();
        let Chunking { count, last, .. } = self.config.chunking;
        let (panels, count) = match self.sums {
            SumOwners::All => (count, 1),
            SumOwners::Own | SumOwners::Everywhere => (1, count),
        };
        let panels_of = |owner| chunk_rows_of_block(layout.rows_of(owner), panels, height);
        let rows_of = |owner, panel| panels_of(owner).nth(panel).unwrap_or(0..0);
        let last_peer = (rank + world - 1) % world;
        let last_panel = panels_of(last_peer).count();
        let mut pieces = Vec::new();
        for panel in 0..=panels {
            for owner in ring(rank, world).filter(|_| panel < panels) {
                let is_last = (owner, panel + 1) == (last_peer, last_panel);
                let count = if is_last { last } else { count };
                let parts = chunk_rows_of_block(rows_of(owner, panel), count, height);
                pieces.extend(parts.map(|rows| Piece { owner, rows }));
            }
            let own = panel.checked_sub(1).map(|before| rows_of(rank, before));
            if let Some(rows) = own.filter(|rows| !rows.is_empty()) {
                pieces.push(Piece { owner: rank, rows });
            }
        }
        pieces
    }

    /// The transfer of a piece: of a partial to its owner, or of sums to a peer.
    pub(super) fn transfer(
        &self,
        from: usize,
        to: usize,
        piece: &Piece,
        flag: usize,
        produced: Option<usize>,
    ) -> Transfer {
        let Piece { owner, rows } = piece;
        let region = |first: usize| self.partial(first..first + rows.len());
        let moved = if *owner == to {
            let before = rows.start - self.problem.layout.rows_of(to).start;
            Move {
                from: region(self.partials.own(to, rows.start)),
                to: region(self.partials.slot(from, to) + before),
            }
        } else {
            Move::in_place(Region {
                matrix: OUT,
                rows: rows.clone(),
                columns: 0..self.problem.n,
            })
        };
        Transfer {
            produced,
            ..Transfer::of_own([from, to], moved, self.config.route, flag)
        }
    }

    /// The region of these rows of partials, with their padding.
    pub(super) fn partial(&self, rows: Range<usize>) -> Region {
        Region {
            matrix: PARTIALS,
            rows,
            columns: 0..self.partials.columns(),
        }
    }

    /// The sum that stores partials as they are, from row `first` of the buffer on.
    pub(super) fn own_partials(&self, first: usize) -> Sum {
        Sum::plain(PARTIALS, first)
    }

    /// The transfers in which `to` pulls pieces from `from`.
    pub(super) fn pulls_of(
        &self,
        made: &[Vec<Piece>],
        incoming: &Incoming,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = Transfer> {
        let pieces = made[from].iter().enumerate();
        let pieces = pieces.filter(move |(_, piece)| piece.owner == to);
        pieces.map(move |(number, piece)| {
            self.transfer(from, to, piece, incoming.flag(from, number), None)
        })
    }

    /// The transfers in which this rank pulls.
    pub(super) fn pulls(&self, made: &[Vec<Piece>]) -> Vec<Transfer> {
        let peers = ring(self.rank, self.problem.layout.world());
        let incoming = Incoming::of(made, self.rank);
        let pulls = peers.flat_map(|from| self.pulls_of(made, &incoming, from, self.rank));
        pulls.collect()
    }

    /// Appends the tile rows of a block. `flags` says which flags these rows of the product wait for.
    pub(super) fn tile_rows(
        &self,
        block: usize,
        rows: &Range<usize>,
        flags: impl Fn(&Range<usize>) -> Range<usize>,
        all: &mut Vec<TileRow>,
    ) {
        let height = self.config.entry_rows();
        let mut ready = all.last().map_or(0, |row| row.ready + 1);
        let mut last = None;
        for m in 0..rows.len().div_ceil(height) {
            let begin = rows.start + m * height;
            let flags = flags(&(begin..(begin + height).min(rows.end)));
            // Rows that have not come yet would hold up the tiles after them. So tile rows that wait for other rows are
            // walked separately.
            if last
                .replace(flags.end)
                .is_some_and(|last| last != flags.end)
            {
                ready += 1;
            }
            let first = Tile::new(block, m, 0, flags);
            all.push(TileRow { first, ready });
        }
    }

    /// The sum of all partials of this rank's rows from `first` on, in the order of the ranks. `own` says where its own
    /// are.
    pub(super) fn sum(&self, first: usize, own: impl Fn(usize) -> Addend) -> Sum {
        let addend = |from: usize| {
            if from == self.rank {
                own(from)
            } else {
                Addend::Rows {
                    matrix: PARTIALS,
                    first: self.partials.slot(from, self.rank) + first,
                }
            }
        };
        Sum {
            addends: (0..self.problem.layout.world()).map(addend).collect(),
            ..self.finished(self.place() + first)
        }
    }

    /// The first of this rank's own rows in OUT.
    pub(super) fn place(&self) -> usize {
        match self.sums {
            SumOwners::Own => 0,
            SumOwners::All | SumOwners::Everywhere => self.problem.layout.rows_of(self.rank).start,
        }
    }

    /// A sum that is stored from row `first` of OUT on, with its bias, activation and residual.
    pub(super) fn finished(&self, first: usize) -> Sum {
        Sum {
            bias: Some(Bias {
                matrix: BIAS,
                first: 0,
            }),
            activation: self.problem.form.activation,
            residual: Some(Residual {
                matrix: RESIDUAL,
                first,
            }),
            ..Sum::plain(OUT, first)
        }
    }

    pub(super) fn product(&self, a: usize, blocks: Vec<OutputBlock>) -> Product {
        let form = &self.problem.form;
        Product {
            a,
            a_scales: ScaleMatrix::new(A_SCALES, form.a_scaling),
            weights: smallvec![Weight {
                b: B,
                n: self.problem.n,
                scales: ScaleMatrix::new(B_SCALES, form.scaling_of_weight(0)),
            }],
            weight_layout: form.weights,
            constant_weights: form.constant_weights,
            accumulation: form.accumulation,
            gated: false,
            m: self.problem.layout.m(),
            k: self.problem.layout.k(),
            config: self.config,
            deferred: None,
            blocks,
        }
    }

    pub(super) fn parts(
        &self,
        collective: bool,
        arrivals: Vec<Transfer>,
        departures: Vec<Transfer>,
        product: Option<(Product, Vec<Tile>)>,
        reduction: Option<Reduction>,
    ) -> Parts {
        let (product, tiles) = product.unzip();
        Parts {
            rank: self.rank,
            world: self.problem.layout.world(),
            agreed: collective.then(|| self.agree()),
            matrices: self.matrices(product.as_ref()),
            arrivals,
            departures,
            product,
            tiles: tiles.unwrap_or_default(),
            requests: Vec::new(),
            host_sums: Vec::new(),
            reduction,
            one_shot: collective && self.one_shot && is_stored_by_tiles(&self.config),
        }
    }

    fn matrices(&self, product: Option<&Product>) -> Vec<MatrixSpec> {
        let Problem {
            dtypes,
            layout,
            form,
            n,
            ..
        } = self.problem;
        let DTypes {
            operands,
            weights,
            partials,
            output,
        } = *dtypes;
        let rows = match self.sums {
            SumOwners::Own => layout.rows_of(self.rank).len(),
            SumOwners::All | SumOwners::Everywhere => layout.m(),
        };
        let room = &self.partials;
        let mut matrices = matrices::unused(operands);
        matrices[A] = MatrixSpec::new(operands, layout.m(), layout.k());
        matrices[B] = form.weights.spec(weights, *n, layout.k());
        matrices[BIAS] = MatrixSpec::new(partials, 1, *n);
        matrices[RESIDUAL] = MatrixSpec::new(partials, rows, *n);
        matrices[PARTIALS] = MatrixSpec::new(partials, room.rows(), room.columns());
        matrices[OUT] = MatrixSpec::new(output, rows, *n);
        if let Some(product) = product {
            matrices::specify_scales(&mut matrices, product);
        }
        matrices
    }

    /// What the ranks must agree on. K may differ between ranks.
    fn agree(&self) -> Agreed {
        let Problem {
            layout,
            hosts,
            n,
            dtypes,
            ..
        } = self.problem;
        let mut arguments = self.problem.agreed(format!("N = {n}"));
        arguments.extend(self.problem.form.agreed());
        arguments.extend(dtypes.agreed());
        if let Some(cuts) = Cuts::of(&self.config, self.one_shot) {
            arguments.extend(cuts.agreed());
        }
        arguments.extend(hosts.agreed(layout.world()));
        arguments.extend(layout.agreed());
        Agreed::new(self.problem.operation.name(), arguments)
    }
}

/// The parts of a configuration that ranks must agree on.
#[derive(PartialEq)]
struct Cuts {
    /// Chunks, chunks of the last rows, and the rows of which pieces are multiples. None if partials are stored after
    /// the product, in parts that depend on the problem alone.
    pieces: Option<[usize; 3]>,
    route: Route,
    /// Columns of a tile, and tiles that are walked one above the other.
    ///
    /// Tiles that wait for the peers' tiles of the same place must come in the same order on all ranks.
    tiles: Option<[usize; 2]>,
}

impl Cuts {
    /// None if partials are pulled, because that is each rank's own choice. `one_shot` is true if all rows are made
    /// before any partial is moved.
    fn of(config: &Config, one_shot: bool) -> Option<Cuts> {
        let TileShape { n, group_m, .. } = config.tile;
        let &Config {
            chunking: Chunking { count, last, .. },
            route,
            ..
        } = config;
        (route != Route::Pull).then(|| Cuts {
            pieces: (!config.stores_behind()).then(|| [count, last, config.entry_rows()]),
            route,
            tiles: (one_shot && is_stored_by_tiles(config)).then_some([n, group_m]),
        })
    }
}

impl Cuts {
    /// In words that ranks compare.
    fn agreed(&self) -> Vec<String> {
        let &Cuts {
            pieces,
            route,
            tiles,
        } = self;
        let mut words = match pieces {
            Some([chunks, last, rows]) => vec![
                format!("chunks = {chunks}"),
                format!("chunks of the last rows = {last}"),
                format!("multiples of {rows} rows"),
            ],
            None => vec!["the product first".into()],
        };
        words.push(format!("Route::{route:?}"));
        if let Some([n, group_m]) = tiles {
            words.push(format!("tiles of {n} columns"));
            words.push(format!("{group_m} of them one above the other"));
        }
        words.into_iter().map(of_configuration).collect()
    }
}

/// True if ranks may use these two configurations in one operation.
pub fn agree(problem: &Problem, one: &Config, other: &Config) -> bool {
    let of = |config| Cuts::of(config, is_one_shot(problem, config));
    of(one) == of(other)
}

/// As [`chunk_rows`], at boundaries of tiles that are counted from the block's first row.
pub(super) fn chunk_rows_of_block(
    rows: Range<usize>,
    count: usize,
    entry_rows: usize,
) -> impl Iterator<Item = Range<usize>> {
    let parts = chunk_rows(0..rows.len(), count, entry_rows);
    parts.map(move |part| rows.start + part.start..rows.start + part.end)
}
