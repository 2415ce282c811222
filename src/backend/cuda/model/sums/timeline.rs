//! Plays the pieces of partial sums through: when each is made, sent, and arrives.

use std::ops::Range;

use super::{KernelModel, Model, fitted};
use crate::backend::cuda::model::clocks::Clocks;
use crate::schedule::Route;
use crate::schedule::plan::partials::Piece;

/// Microseconds from the first product until all pieces are made and sent, each to this number of ranks.
pub fn of(model: &Model, sent: &[(Piece, usize)]) -> f64 {
    let mut timeline = SendTimeline {
        model,
        arrivals: Vec::new(),
        clocks: Clocks::new(model.kernel.slots),
        wire: 0.0,
        complete: 0.0,
    };
    for (piece, to) in sent {
        timeline.add(piece, *to);
    }
    timeline.complete
}

/// Pieces that are made and sent, one after the other.
struct SendTimeline<'a> {
    model: &'a Model<'a>,
    /// Rows of other owners, counted from their owner's first, and when they arrive there. The others' partials of this
    /// rank's rows arrive here at the same times.
    arrivals: Vec<(Range<usize>, f64)>,
    clocks: Clocks,
    /// When the wire is free.
    wire: f64,
    /// When all so far is made and sent.
    complete: f64,
}

impl SendTimeline<'_> {
    /// Makes a piece, and sends it to `to` ranks.
    fn add(&mut self, piece: &Piece, to: usize) {
        let model = self.model;
        let rows = model.within(piece);
        let adds = piece.owner == 0 && model.problem.layout.world() > 1;
        let made = self.make(&rows, to, adds);
        self.complete = self.complete.max(made);
        if to == 0 {
            return;
        }
        match model.config.route {
            Route::Store => self.wire += fitted::STORE_FLAG,
            _ => {
                let begin = (self.wire + fitted::COPY_NEXT).max(made + fitted::COPY_START);
                let copied = model.bytes(rows.len(), to) / fitted::COPY_BYTES;
                self.wire = begin + (copied + fitted::COPY_FLAG * to as f64);
            }
        }
        self.complete = self.complete.max(self.wire);
        if piece.owner != 0 {
            self.arrivals.push((rows, self.wire));
        }
    }

    /// When the last tile of these rows is made. `adds`: whether tiles wait for partials from others, to add them.
    fn make(&mut self, rows: &Range<usize>, to: usize, adds: bool) -> f64 {
        let SendTimeline {
            model,
            arrivals,
            clocks,
            wire,
            ..
        } = self;
        let &KernelModel {
            slots,
            columns,
            of_tile,
            stores,
            ..
        } = model.kernel;
        arrivals.sort_by_key(|(of, _)| of.start);
        let awaited = arrivals.iter();
        let mut awaited = awaited
            .filter(|(of, _)| adds && rows.start < of.end)
            .peekable();
        let tiles = rows.len().div_ceil(model.config.entry_rows()) * columns;
        let moved = model.bytes(rows.len(), to) / tiles.max(1) as f64;
        // The number of the first tile with some of these rows.
        let first_of = |of: &Range<usize>| {
            let before = (of.start + 1).saturating_sub(rows.start);
            (before * tiles).div_ceil(rows.len()).saturating_sub(1)
        };
        let is_stored = model.config.route == Route::Store && to > 0;
        let (mut latest, mut made, mut taken) = (0.0f64, 0.0f64, 0);
        while taken < tiles {
            while let Some((_, at)) = awaited.next_if(|(of, _)| first_of(of) <= taken) {
                latest = latest.max(*at);
            }
            let end = awaited.peek().map_or(tiles, |(of, _)| first_of(of));
            clocks.take(end.min(tiles) - taken, |count, mut clock| {
                clock += of_tile;
                if adds {
                    clock = clock.max(latest) + fitted::ADD;
                }
                made = made.max(clock);
                if is_stored {
                    *wire = wire.max(clock) + count as f64 * moved / stores.bytes;
                    // Stores hold up the next tile of this cluster, and those of all clusters that store at the same
                    // time.
                    clock += fitted::STORE_HINDERS * moved * slots as f64 / stores.bytes;
                }
                clock
            });
            taken = end.min(tiles);
        }
        made
    }
}
