//! Timelines as a picture. Each rank is a band, with its copy engine above its workers and its caller's streams. Colour
//! says whose rows they are.

use std::fmt;
use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{Lane, Span, Timeline, Trace, Work};
use crate::error::{Error, Kind, Result};
use crate::one_line::beginning;

const WIDTH: i32 = 1200;
const LEFT: i32 = 150;
const RIGHT: i32 = 40;
const TITLE: i32 = 46;
const NOTE: i32 = 21;
const LEGEND: i32 = 36;
const HEADING: i32 = 30;
const AXIS: i32 = 44;
const LANE: i32 = 20;
const LANE_GAP: i32 = 3;
/// If there are more workers than this, they are thin lines without names. A GPU has more than a hundred.
const NAMED_WORKERS: usize = 12;
const THIN_LANE: i32 = 2;
const BAND_GAP: i32 = 11;
const INK: RGBColor = RGBColor(38, 44, 52);
const FAINT: RGBColor = RGBColor(100, 108, 118);
const GROUND: RGBColor = RGBColor(243, 245, 247);
const GRID: RGBColor = RGBColor(226, 230, 234);
const WAITING: RGBColor = RGBColor(196, 202, 209);
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
    /// Draws the timeline, as a [`Picture`] of one.
    ///
    /// # Errors
    /// [`Kind::System`] if the file can't be written.
    pub fn write_svg(&self, path: impl AsRef<Path>, title: &str) -> Result<()> {
        Picture::new(title).timeline("", self).write_svg(path)
    }
}

/// A picture of timelines, one below the other, on one time axis. All begin at its left end.
///
/// Each rank is a band, with its copy engine above its workers. The colour of a chunk or tile says whose rows it holds.
/// Grey says that a worker waited. A line marks the end of each timeline.
///
/// ```no_run
/// # fn draw(fused: gemmesh::trace::Timeline, alone: gemmesh::trace::Timeline) -> gemmesh::Result<()> {
/// use gemmesh::trace::Picture;
///
/// Picture::new("two ways to multiply")
///     .note("four ranks, 4096 × 4096 × 4096")
///     .timeline("fused", &fused)
///     .timeline("first the gather, then the product", &alone)
///     .write_svg("both.svg")
/// # }
/// ```
#[derive(Clone)]
#[must_use = "nothing is drawn before `write_svg`"]
pub struct Picture<'a> {
    title: String,
    notes: Vec<String>,
    /// Each with what stands above it.
    timelines: Vec<(String, &'a Timeline)>,
}

impl fmt::Debug for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (title, timelines) = (beginning(&self.title), self.timelines.len());
        write!(f, "Picture({title}, {timelines} timelines)")
    }
}

impl<'a> Picture<'a> {
    /// An empty picture.
    pub fn new(title: impl Into<String>) -> Picture<'a> {
        Picture {
            title: title.into(),
            notes: Vec::new(),
            timelines: Vec::new(),
        }
    }

    /// Adds a line below the title.
    pub fn note(mut self, line: impl Into<String>) -> Picture<'a> {
        self.notes.push(line.into());
        self
    }

    /// Adds a timeline below the others, with a heading. Its duration follows the heading. Without a heading
    /// neither is.
    pub fn timeline(mut self, heading: impl Into<String>, timeline: &'a Timeline) -> Picture<'a> {
        self.timelines.push((heading.into(), timeline));
        self
    }

    /// Draws it.
    ///
    /// # Errors
    /// [`Kind::System`] if the file can't be written.
    pub fn write_svg(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut picture = String::new();
        let drawn = self.draw(&mut picture);
        drawn.map_err(|e| {
            Error::of_kind(Kind::System {
                action: "draw a timeline".into(),
                reason: e.to_string(),
            })
        })?;
        super::write(path, picture.as_bytes())
    }

    fn draw(&self, picture: &mut String) -> Drawn {
        let timelines = self.timelines.iter();
        let panels: Vec<Panel> = timelines
            .map(|(heading, timeline)| Panel::new(heading, timeline))
            .collect();
        let top = TITLE + NOTE * (self.notes.len() as i32 + 1) + LEGEND;
        let height: i32 = panels.iter().map(Panel::height).sum();
        let size = (WIDTH as u32, (top + height + AXIS) as u32);
        let area = SVGBackend::with_string(picture, size).into_drawing_area();
        area.fill(&WHITE)?;
        let longest = panels.iter().map(|panel| panel.nanos).max();
        let scale = Scale {
            nanos: longest.unwrap_or(0).max(1),
        };

        text(&area, &self.title, (LEFT, 26), 21, &INK, HPos::Left)?;
        let mut y = TITLE + NOTE / 2;
        for note in self.notes.iter().map(String::as_str).chain([self.hint()]) {
            text(&area, note, (LEFT, y), 14, &FAINT, HPos::Left)?;
            y += NOTE;
        }
        self.legend(&area, y + 2)?;
        scale.draw(&area, top, top + height)?;
        let mut y = top;
        for panel in &panels {
            panel.draw(&area, &scale, y)?;
            y += panel.height();
        }
        area.present()?;
        Ok(())
    }

    fn traces(&self) -> impl Iterator<Item = &Trace> {
        self.timelines.iter().flat_map(|(_, all)| &all.traces)
    }

    fn has(&self, kind: impl Fn(&Work) -> bool) -> bool {
        let mut spans = self.traces().flat_map(|trace| &trace.spans);
        spans.any(|span| kind(&span.work))
    }

    fn hint(&self) -> &'static str {
        match self.has(|work| matches!(work, Work::Push { .. } | Work::Call { .. })) {
            true => {
                "Colour: whose rows they are. Rows that are pushed, or made for another rank, have the receiver's colour."
            }
            false => "Colour: whose rows are copied or multiplied.",
        }
    }

    fn legend(&self, area: &Area, y: i32) -> Drawn {
        let mut ranks: Vec<usize> = self.traces().map(|trace| trace.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let adds = self.has(|work| matches!(work, Work::Add { .. }));
        let entries = ranks
            .into_iter()
            .map(|rank| (colour(rank), format!("rank {rank}")))
            .take(RANKS.len())
            .chain([(WAITING, "waiting".to_string())])
            .chain(adds.then(|| (INK, "adding".to_string())));
        let mut x = LEFT;
        for (colour, label) in entries {
            area.draw(&Rectangle::new(
                [(x, y - 7), (x + 14, y + 7)],
                colour.filled(),
            ))?;
            text(area, &label, (x + 20, y), 14, &INK, HPos::Left)?;
            x += 38 + 7 * label.len() as i32;
        }
        Ok(())
    }
}

/// One timeline of a picture.
struct Panel<'a> {
    heading: &'a str,
    bands: Vec<Band<'a>>,
    /// When it begins, on its own clock.
    origin: u64,
    /// How long it lasts.
    nanos: u64,
}

impl<'a> Panel<'a> {
    fn new(heading: &'a str, timeline: &'a Timeline) -> Panel<'a> {
        Panel {
            heading,
            bands: timeline.traces.iter().map(Band::new).collect(),
            origin: timeline.origin(),
            nanos: timeline.duration().as_nanos() as u64,
        }
    }

    fn heading_height(&self) -> i32 {
        if self.heading.is_empty() { 0 } else { HEADING }
    }

    fn height(&self) -> i32 {
        let bands = self.bands.iter().map(|band| band.height() + BAND_GAP);
        self.heading_height() + bands.sum::<i32>()
    }

    fn draw(&self, area: &Area, scale: &Scale, top: i32) -> Drawn {
        let mut y = top + self.heading_height();
        for band in &self.bands {
            band.draw(area, scale, self.origin, y)?;
            y += band.height() + BAND_GAP;
        }
        if self.heading.is_empty() {
            return Ok(());
        }
        let middle = top + HEADING / 2 - 2;
        text(area, self.heading, (LEFT, middle), 16, &INK, HPos::Left)?;
        let end = scale.x(self.nanos);
        let line = [(end, top + HEADING - 8), (end, y - BAND_GAP + 4)];
        area.draw(&PathElement::new(line, INK.stroke_width(2)))?;
        let took = scale.label(self.nanos as f64, 1);
        text(area, &took, (end, middle), 16, &INK, HPos::Center)
    }
}

/// The lanes of one rank, from the top.
struct Band<'a> {
    trace: &'a Trace,
    lanes: Vec<Lane>,
    /// True if there are too many workers for names.
    thin: bool,
}

impl<'a> Band<'a> {
    fn new(trace: &'a Trace) -> Band<'a> {
        let mut lanes: Vec<Lane> = trace.spans.iter().map(|span| span.lane).collect();
        lanes.sort();
        lanes.dedup();
        let mut band = Band {
            trace,
            lanes,
            thin: false,
        };
        band.thin = band.workers().count() > NAMED_WORKERS;
        band
    }

    /// Draws it from `y` down. The clock of its spans begins at `origin`.
    fn draw(&self, area: &Area, scale: &Scale, origin: u64, mut y: i32) -> Drawn {
        let Trace { rank, spans } = self.trace;
        let middle = (14, y + (self.height() - LANE_GAP) / 2);
        let name = format!("rank {rank}");
        text(area, &name, middle, 16, &colour(*rank), HPos::Left)?;
        for &lane in &self.lanes {
            let (height, gap) = self.size(lane);
            let named = (LEFT - 8, y + height.max(12) / 2);
            text(area, &self.name(lane), named, 13, &FAINT, HPos::Right)?;
            let ground = [(LEFT, y), (WIDTH - RIGHT, y + height)];
            area.draw(&Rectangle::new(ground, GROUND.mix(0.75).filled()))?;
            for span in spans.iter().filter(|span| span.lane == lane) {
                bar(area, scale, origin, span, y, height)?;
            }
            y += height + gap;
        }
        Ok(())
    }

    fn name(&self, lane: Lane) -> String {
        match lane {
            Lane::Copy => "copies".to_string(),
            Lane::Network => "network".to_string(),
            Lane::Caller(index) => format!("caller's stream {index}"),
            Lane::Worker(_) if self.workers().count() == 1 => "worker".to_string(),
            Lane::Worker(index) if !self.thin => format!("worker {index}"),
            // The first worker's lane stands for all.
            Lane::Worker(_) if self.workers().next() == Some(lane) => {
                format!("{} workers", self.workers().count())
            }
            Lane::Worker(_) => String::new(),
        }
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

fn bar(area: &Area, scale: &Scale, origin: u64, span: &Span, y: i32, height: i32) -> Drawn {
    let (fill, inset) = match span.work {
        Work::Pull { source: rank, .. } | Work::Push { to: rank, .. } => (colour(rank), height / 4),
        Work::Tile { source: rank, .. } | Work::Call { rank } => (colour(rank), 0),
        Work::Wait { .. } => (WAITING, height / 3),
        Work::Add { .. } => (INK, 0),
    };
    let x = |time: u64| scale.x(time.saturating_sub(origin));
    let (begin, end) = (x(span.begin), x(span.end));
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
    nanos: u64,
}

impl Scale {
    fn x(&self, time: u64) -> i32 {
        let width = f64::from(WIDTH - LEFT - RIGHT);
        LEFT + (time as f64 / self.nanos as f64 * width).round() as i32
    }

    /// A time, with this number of decimals.
    fn label(&self, nanos: f64, decimals: usize) -> String {
        if self.nanos >= 2_000_000 {
            format!("{:.decimals$} ms", nanos / 1e6)
        } else {
            format!("{:.decimals$} µs", nanos / 1e3)
        }
    }

    /// The axis at `bottom`, with a line from `top` at each tick.
    fn draw(&self, area: &Area, top: i32, bottom: i32) -> Drawn {
        // About eight ticks, at 1, 2 or 5 times a power of ten.
        let rough = self.nanos as f64 / 8.0;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0]
            .map(|factor| factor * power)
            .into_iter()
            .find(|&step| step >= rough)
            .unwrap_or(rough);
        let unit = if self.nanos >= 2_000_000 { 1e6 } else { 1e3 };
        let decimals = usize::from(step < unit);
        let mut tick = 0.0;
        while tick <= self.nanos as f64 {
            let x = self.x(tick as u64);
            area.draw(&PathElement::new([(x, top), (x, bottom)], GRID))?;
            area.draw(&PathElement::new([(x, bottom), (x, bottom + 5)], FAINT))?;
            let label = self.label(tick, decimals);
            text(area, &label, (x, bottom + 17), 13, &FAINT, HPos::Center)?;
            tick += step;
        }
        let line = [(LEFT, bottom), (WIDTH - RIGHT, bottom)];
        area.draw(&PathElement::new(line, FAINT))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A timeline of one rank that multiplies from `begin` to `end`, in microseconds.
    fn timeline(begin: u64, end: u64) -> Timeline {
        let span = Span {
            lane: Lane::Worker(0),
            work: Work::Tile {
                source: 0,
                m: 0,
                n: 0,
            },
            begin: begin * 1000,
            end: end * 1000,
        };
        let (rank, spans) = (0, vec![span]);
        Timeline {
            traces: vec![Trace { rank, spans }],
        }
    }

    #[test]
    fn timelines_of_a_picture_begin_together_on_one_axis_and_say_how_long_they_are() {
        let (one, other) = (timeline(500, 600), timeline(900, 1100));
        let mut drawn = String::new();
        let picture = Picture::new("a title").note("a note");
        let picture = picture.timeline("one", &one).timeline("other", &other);
        picture.draw(&mut drawn).unwrap();
        for words in ["a title", "a note", "one", "other", "100.0 µs", "200.0 µs"] {
            assert!(drawn.contains(&format!("\n{words}\n")), "{words}: {drawn}");
        }
        let tile = format!("height=\"{LANE}\" opacity=\"1\" fill=\"#0072B2\"");
        let tiles = drawn.lines().filter(|line| line.contains(&tile));
        let width = WIDTH - LEFT - RIGHT;
        let whole = format!("x=\"{LEFT}\"");
        let expected = [width / 2, width].map(|width| format!("width=\"{width}\""));
        for (tile, width) in tiles.zip(expected) {
            assert!(tile.contains(&whole) && tile.contains(&width), "{tile}");
        }
        assert_eq!(drawn.matches(&tile).count(), 2, "{drawn}");
    }

    #[test]
    fn a_picture_of_nothing_can_be_drawn() {
        let nothing = Timeline { traces: Vec::new() };
        let mut drawn = String::new();
        let picture = Picture::new("nothing").timeline("", &nothing);
        picture.draw(&mut drawn).unwrap();
        assert!(drawn.contains("nothing"));
    }
}
