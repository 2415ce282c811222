//! The timeline as a picture. Each rank is a band, with its copy engine above its workers and its caller's streams.
//! Colour says whose rows they are.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Lane, Span, Timeline, Work};
use crate::error::{Error, Result};

const WIDTH: u32 = 1200;
const LEFT: i32 = 150;
const RIGHT: i32 = 24;
const TOP: i32 = 92;
const AXIS: i32 = 48;
const LANE: i32 = 26;
const LANE_GAP: i32 = 4;
/// If there are more workers than this, they are thin lines without names. A GPU has more than a hundred.
const NAMED_WORKERS: usize = 12;
const THIN_LANE: i32 = 2;
const BAND_GAP: i32 = 22;
const INK: RGBColor = RGBColor(38, 44, 52);
const FAINT: RGBColor = RGBColor(120, 128, 138);
const GROUND: RGBColor = RGBColor(243, 245, 247);
const WAITING: RGBColor = RGBColor(208, 213, 219);
/// Colours that colour-blind eyes can tell apart (Okabe and Ito). Ranks beyond the last colour begin again at the
/// first.
const RANKS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(190, 178, 40),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = std::result::Result<(), Box<dyn std::error::Error>>;

impl Timeline {
    /// Draws the timeline. Each rank is a band, with its copy engine above its workers.
    ///
    /// The colour of a chunk or tile says whose rows it holds. Grey says that a worker waited.
    ///
    /// # Errors
    /// [`Error::System`] if the file can't be written.
    pub fn write_svg(&self, path: impl AsRef<Path>, title: &str) -> Result<()> {
        let path = path.as_ref();
        let mut picture = String::new();
        let drawn = self.draw(&mut picture, title);
        drawn.map_err(|e| Error::System {
            rank: None,
            action: "draw a timeline".into(),
            reason: e.to_string(),
        })?;
        super::write(path, picture.as_bytes())
    }

    fn draw(&self, picture: &mut String, title: &str) -> Drawn {
        let bands: Vec<Band> = self
            .traces
            .iter()
            .map(|trace| Band::new(&trace.spans))
            .collect();
        let height: i32 = bands.iter().map(|band| band.height() + BAND_GAP).sum();
        let size = (WIDTH, (TOP + height + AXIS) as u32);
        let area = SVGBackend::with_string(picture, size).into_drawing_area();
        area.fill(&WHITE)?;
        let scale = Scale::new(self);

        text(&area, title, (LEFT, 20), 20, &INK, HPos::Left)?;
        self.legend(&area)?;
        let mut y = TOP;
        for (trace, band) in self.traces.iter().zip(&bands) {
            let middle = y + band.height() / 2;
            let name = format!("rank {}", trace.rank);
            text(
                &area,
                &name,
                (14, middle),
                16,
                &colour(trace.rank),
                HPos::Left,
            )?;
            for &lane in &band.lanes {
                let (height, gap) = band.size(lane);
                let name = match lane {
                    Lane::Copy => "copies".to_string(),
                    Lane::Caller(index) => format!("caller's stream {index}"),
                    Lane::Worker(index) if !band.thin => format!("worker {index}"),
                    // The first worker's lane stands for all.
                    Lane::Worker(_) if band.workers().next() == Some(lane) => {
                        format!("{} workers", band.workers().count())
                    }
                    Lane::Worker(_) => String::new(),
                };
                let named = (LEFT - 8, y + height.max(12) / 2);
                text(&area, &name, named, 12, &FAINT, HPos::Right)?;
                let ground = [(LEFT, y), (WIDTH as i32 - RIGHT, y + height)];
                area.draw(&Rectangle::new(ground, GROUND.filled()))?;
                for span in trace.spans.iter().filter(|span| span.lane == lane) {
                    bar(&area, &scale, span, y, height)?;
                }
                y += height + gap;
            }
            y += BAND_GAP;
        }
        scale.draw(&area, y)?;
        area.present()?;
        Ok(())
    }

    fn legend(&self, area: &Area) -> Drawn {
        let mut spans = self.traces.iter().flat_map(|trace| &trace.spans);
        let adds = spans.any(|span| matches!(span.work, Work::Add { .. }));
        let entries = self
            .traces
            .iter()
            .map(|trace| (colour(trace.rank), format!("rows of rank {}", trace.rank)))
            .take(RANKS.len())
            .chain([(WAITING, "waiting".to_string())])
            .chain(adds.then(|| (INK, "adding".to_string())));
        let mut x = LEFT;
        for (colour, label) in entries {
            area.draw(&Rectangle::new([(x, 46), (x + 14, 60)], colour.filled()))?;
            text(area, &label, (x + 20, 53), 13, &INK, HPos::Left)?;
            x += 34 + 7 * label.len() as i32;
        }
        let hint = "Colour: whose rows they are. Rows that are pushed, or made for another rank, have the receiver's colour.";
        text(area, hint, (LEFT, 76), 13, &FAINT, HPos::Left)
    }
}

/// The lanes of one rank, from the top.
struct Band {
    lanes: Vec<Lane>,
    /// True if there are too many workers for names.
    thin: bool,
}

impl Band {
    fn new(spans: &[Span]) -> Band {
        let mut lanes: Vec<Lane> = spans.iter().map(|span| span.lane).collect();
        lanes.sort();
        lanes.dedup();
        let mut band = Band { lanes, thin: false };
        band.thin = band.workers().count() > NAMED_WORKERS;
        band
    }

    fn workers(&self) -> impl Iterator<Item = Lane> {
        let lanes = self.lanes.iter().copied();
        lanes.filter(|lane| matches!(lane, Lane::Worker(_)))
    }

    /// A lane's height and the gap below it.
    fn size(&self, lane: Lane) -> (i32, i32) {
        match lane {
            Lane::Worker(_) if self.thin => (THIN_LANE, 0),
            _ => (LANE, LANE_GAP),
        }
    }

    fn height(&self) -> i32 {
        let sizes = self.lanes.iter().map(|&lane| self.size(lane));
        sizes.map(|(height, gap)| height + gap).sum()
    }
}

fn colour(rank: usize) -> RGBColor {
    RANKS[rank % RANKS.len()]
}

fn bar(area: &Area, scale: &Scale, span: &Span, y: i32, height: i32) -> Drawn {
    let (fill, inset) = match span.work {
        Work::Pull { source: rank, .. } | Work::Push { to: rank, .. } => (colour(rank), height / 4),
        Work::Tile { source: rank, .. } | Work::Call { rank } => (colour(rank), 0),
        Work::Wait { .. } => (WAITING, height / 3),
        Work::Add { .. } => (INK, 0),
    };
    let (begin, end) = (scale.x(span.begin), scale.x(span.end));
    if matches!(span.work, Work::Wait { .. }) && end - begin < 2 {
        return Ok(());
    }
    let corners = [(begin, y + inset), (end.max(begin + 1), y + height - inset)];
    area.draw(&Rectangle::new(corners, fill.filled()))?;
    if end - begin >= 4 && height == LANE {
        // A light edge tells neighbours apart.
        let edge = [(begin, y + inset), (begin, y + height - inset)];
        area.draw(&PathElement::new(edge, WHITE.mix(0.8)))?;
    }
    Ok(())
}

fn text(area: &Area, words: &str, at: (i32, i32), size: i32, ink: &RGBColor, side: HPos) -> Drawn {
    let style = ("sans-serif", size)
        .into_text_style(area)
        .color(ink)
        .pos(Pos::new(side, VPos::Center));
    area.draw_text(words, &style, at)?;
    Ok(())
}

/// From nanoseconds to pixels.
struct Scale {
    origin: u64,
    nanos: u64,
}

impl Scale {
    fn new(timeline: &Timeline) -> Scale {
        let ends = timeline.traces.iter().flat_map(|trace| &trace.spans);
        let end = ends.map(|span| span.end).max().unwrap_or(1);
        let origin = timeline.origin();
        Scale {
            origin,
            nanos: end.saturating_sub(origin).max(1),
        }
    }

    fn x(&self, time: u64) -> i32 {
        let width = f64::from(WIDTH as i32 - LEFT - RIGHT);
        let share = time.saturating_sub(self.origin) as f64 / self.nanos as f64;
        LEFT + (share * width).round() as i32
    }

    fn draw(&self, area: &Area, y: i32) -> Drawn {
        // About eight ticks, at 1, 2 or 5 times a power of ten.
        let rough = self.nanos as f64 / 8.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|&step| step >= rough)
            .unwrap_or(rough);
        let (unit, name) = if self.nanos >= 2_000_000 {
            (1e6, "ms")
        } else {
            (1e3, "µs")
        };
        let line = [(LEFT, y), (WIDTH as i32 - RIGHT, y)];
        area.draw(&PathElement::new(line, FAINT))?;
        let mut tick = 0.0;
        while tick <= self.nanos as f64 {
            let x = self.x(self.origin + tick as u64);
            area.draw(&PathElement::new([(x, y), (x, y + 5)], FAINT))?;
            let decimals = usize::from(step / unit < 1.0);
            let label = format!("{:.decimals$} {name}", tick / unit);
            text(area, &label, (x, y + 16), 12, &FAINT, HPos::Center)?;
            tick += step;
        }
        Ok(())
    }
}
