//! Lines of benches/results.

use gemmesh::Config;
use gemmesh::schedule::Operation;
use gemmesh::tuning::{Chunking, Route, TileShape};
use serde_json::Value;

/// What was measured of an operation.
#[derive(Debug)]
pub struct Measured {
    pub operation: Operation,
    pub world: usize,
    /// M, N and K.
    pub shape: [usize; 3],
    pub config: Config,
    /// In microseconds.
    pub micros: f64,
    /// That of its collective alone, if the line has it.
    pub alone: Option<f64>,
}

/// The lines of a file.
pub fn read(file: &str) -> Vec<Measured> {
    let path = format!(
        "{}/../../benches/results/{file}.json",
        env!("CARGO_MANIFEST_DIR")
    );
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines();
    lines
        .map(|line| of_line(&serde_json::from_str(line).unwrap()))
        .collect()
}

fn of_line(line: &Value) -> Measured {
    let number = |value: &Value| value.as_u64().unwrap() as usize;
    let of = |key: &str| number(&line[key]);
    let words = |key: &str| line[key].as_str().unwrap();
    // Products of one GPU have a list of widths, here of one.
    let n = line.get("n").unwrap_or_else(|| &line["widths"][0]);
    let micros = line.get("fused_us").unwrap_or_else(|| &line["plain_us"]);
    Measured {
        operation: match words("op") {
            "Matmul" => Operation::MATMUL,
            name => Operation::named(name).unwrap(),
        },
        world: of("world"),
        shape: [of("m"), number(n), of("k")],
        config: config(words("config")),
        micros: micros.as_f64().unwrap(),
        alone: ["gather_us", "reduce_scatter_us", "all_reduce_us"]
            .into_iter()
            .find_map(|key| line[key].as_f64()),
    }
}

/// Reads a configuration as its `Debug` wrote it, in this commit or in earlier ones.
fn config(text: &str) -> Config {
    let after = |names: &[&str]| names.iter().find_map(|name| number_after(text, name));
    let or_1 = |names: &[&str]| after(names).unwrap_or(1);
    let shape = text.split_once("TileShape(").map(|(_, shape)| shape);
    let extent = |index: usize, names: &[&str]| match shape {
        Some(shape) => {
            let extents = shape.split([',', ')']).next().unwrap();
            extents.split('x').nth(index).unwrap().parse().unwrap()
        }
        None => after(names).unwrap(),
    };
    let tile = TileShape::new(
        extent(0, &["tile_m", "{ m"]),
        extent(1, &["tile_n", ", n"]),
        extent(2, &["tile_k", ", k"]),
    )
    .with_stages(or_1(&["stages"]))
    .with_cluster(or_1(&["cluster_m", "cluster:"]), or_1(&["cluster_n"]))
    .with_split_k(or_1(&["split_k"]))
    .with_k_slices(or_1(&["k_slices"]))
    .with_group_m(or_1(&["group_m"]));
    let is_cut = text.contains("cut_last)") || text.contains("cut_last: true");
    let chunking = Chunking::new(or_1(&["Chunking(", "count", " chunks"]))
        .with_last(after(&["last_chunks", "last ", " last:"]).unwrap())
        .with_cut_last(is_cut);
    let routes = [Route::Pull, Route::Push, Route::Store];
    let route = routes
        .into_iter()
        .find(|route| text.contains(&format!("{route:?}")));
    Config::new(tile, chunking, route.unwrap())
        .with_product_first(text.contains("behind the product"))
}

/// The number that stands after a name.
fn number_after(text: &str, name: &str) -> Option<usize> {
    let (_, rest) = text.split_once(name)?;
    let rest = rest.trim_start_matches([':', ' ']);
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}
