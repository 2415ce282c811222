//! Configurations that were measured to be the fastest: a table that the library carries, and one that a user may name.
//!
//! A line is one winner of `all_gather_matmul --tune`, as JSON; empty lines and those that begin with # are skipped.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::protocol::{Config, Problem};

/// The table that the library carries.
const SHIPPED: &str = include_str!("tuned.jsonl");
/// The environment variable that names another, whose lines come before the library's.
pub const VARIABLE: &str = "GEMMESH_TUNED";

/// A configuration that was the fastest for a problem.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub config: Config,
    /// For this very problem, and not only for one like it.
    pub exact: bool,
}

/// The lines for this rank's GPU and world size.
#[derive(Debug)]
pub struct Table(Vec<Winner>);

/// A line of a table: what was the fastest for a problem.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Winner {
    /// The driver's name of the GPU.
    pub gpu: String,
    /// How many ranks.
    pub world: usize,
    /// Rows of the gathered matrix.
    pub m: usize,
    /// Columns of the output on each rank.
    pub n: usize,
    /// Columns of the gathered matrix.
    pub k: usize,
    /// What was the fastest.
    pub config: Config,
    /// Its median time in microseconds, for readers.
    pub us: f64,
}

impl Winner {
    fn shape(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }
}

impl Table {
    /// Reads the tables.
    ///
    /// # Errors
    /// [`Error::System`] if the user's can't be read, or a line of it makes no sense.
    pub fn load(rank: usize, gpu: &str, world: usize) -> Result<Table> {
        let mut lines = Vec::new();
        if let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) {
            let action = format!("read {} ({VARIABLE})", path.display());
            let text = fs::read_to_string(&path).map_err(Error::system(rank, &action))?;
            parse(&text, gpu, world, &mut lines).map_err(|reason| Error::System {
                rank: Some(rank),
                action,
                reason,
            })?;
        }
        // A test sees to it that it can be read.
        let _ = parse(SHIPPED, gpu, world, &mut lines);
        Ok(Table(lines))
    }

    /// What was the fastest for this problem; or, if it was not measured, for the one most like it that was. None if
    /// they differ in an extent by more than a factor of 1.5.
    pub fn find(&self, problem: &Problem) -> Option<Measured> {
        const MOST: f64 = 1.5;
        let wanted = [problem.m(), problem.n(), problem.k()];
        let distance = |line: &Winner| {
            let ratios = line.shape().into_iter().zip(wanted);
            let ratios = ratios.map(|(have, want)| (have as f64 / want as f64).ln().abs());
            let worst = ratios.clone().fold(0.0, f64::max);
            (worst <= MOST.ln()).then(|| ratios.sum::<f64>())
        };
        let near = self
            .0
            .iter()
            .filter_map(|line| Some((distance(line)?, line)));
        // The first of equals: a user's line before the library's.
        let (_, line) = near.min_by(|(x, _), (y, _)| x.total_cmp(y))?;
        Some(Measured {
            config: line.config,
            exact: line.shape() == wanted,
        })
    }
}

fn parse(text: &str, gpu: &str, world: usize, lines: &mut Vec<Winner>) -> Result<(), String> {
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let winner: Winner = serde_json::from_str(line).map_err(|error| {
            let number = index + 1;
            format!("line {number} is not one that --tune writes ({error}): {line}")
        })?;
        if (winner.gpu.as_str(), winner.world) == (gpu, world) {
            lines.push(winner);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"gpu":"GPU","world":4,"m":4096,"n":1792,"k":4096,"config":{"tile_m":128,"tile_n":224,"tile_k":64,"stages":4,"cluster":2,"split_k":1,"group_m":8,"chunks":2,"last_chunks":2,"cut_last":true,"transport":"Push"},"us":101.5}"#;

    fn table(text: &str, gpu: &str, world: usize) -> Result<Table, String> {
        let mut lines = Vec::new();
        parse(text, gpu, world, &mut lines).map(|()| Table(lines))
    }

    fn find(table: &Table, m: usize, n: usize, k: usize) -> Option<(usize, bool)> {
        let problem = Problem::balanced(m, n, k, 0, 4).unwrap();
        let found = table.find(&problem)?;
        Some((found.config.chunks, found.exact))
    }

    #[test]
    fn the_shipped_table_can_be_read() {
        table(SHIPPED, "", 0).unwrap();
    }

    #[test]
    fn a_problem_finds_its_own_line_or_the_one_most_like_it() {
        let other = LINE
            .replace(r#""m":4096"#, r#""m":5000"#)
            .replace(r#""chunks":2"#, r#""chunks":3"#);
        let table = table(&format!("# head\n\n{LINE}\n{other}\n"), "GPU", 4).unwrap();
        assert_eq!(find(&table, 4096, 1792, 4096), Some((2, true)));
        assert_eq!(find(&table, 4096, 2048, 4096), Some((2, false)));
        assert_eq!(find(&table, 4900, 1792, 4096), Some((3, false)));
        assert_eq!(find(&table, 4096, 1792, 8192), None);
        assert_eq!(find(&table, 1024, 1792, 4096), None);
    }

    #[test]
    fn lines_of_other_gpus_and_world_sizes_are_not_used() {
        for (gpu, world) in [("another", 4), ("GPU", 8)] {
            let table = table(LINE, gpu, world).unwrap();
            assert_eq!(find(&table, 4096, 1792, 4096), None);
        }
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        for wrong in [
            LINE.replace("Push", "Throw"),
            LINE.replace("224", "\"wide\""),
            LINE.replace(r#""world":4,"#, ""),
            "nonsense".into(),
        ] {
            let error = table(&format!("{LINE}\n{wrong}"), "GPU", 4).unwrap_err();
            assert!(
                error.contains("line 2") && error.contains(&wrong),
                "{error}"
            );
        }
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! A table of winners that somebody has written, and the plan of what is found in it.
    use super::*;
    use crate::protocol::Plan;

    const GPU: &str = "NVIDIA H200";

    /// A table.
    pub fn parse(data: &[u8]) {
        let text = String::from_utf8_lossy(data);
        let mut lines = Vec::new();
        if let Err(reason) = super::parse(&text, GPU, 2, &mut lines) {
            assert!(reason.contains("line "));
        }
        let table = Table(lines);
        for (m, n, k) in [(64, 64, 64), (300, 40, 24)] {
            let Ok(problem) = Problem::balanced(m, n, k, 1, 2) else {
                continue;
            };
            if let Some(found) = table.find(&problem) {
                let _ = Plan::new(problem, found.config);
            }
        }
    }

    /// Lines of the library's own table, for small problems too; and these with each number out of bounds.
    pub fn seeds() -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let _ = super::parse(SHIPPED, GPU, 2, &mut lines);
        lines.truncate(4);
        let mut seeds = Vec::new();
        for mut line in lines {
            seeds.push(serde_json::to_vec(&line).unwrap_or_default());
            (line.m, line.n, line.k) = (64, 64, 64);
            seeds.push(serde_json::to_vec(&line).unwrap_or_default());
            let Ok(config) = serde_json::to_value(line.config) else {
                continue;
            };
            for (name, _) in config.as_object().into_iter().flatten() {
                for number in [0, 1, u64::MAX] {
                    let mut wrong = serde_json::json!(&line);
                    wrong["config"][name] = number.into();
                    seeds.push(wrong.to_string().into_bytes());
                }
            }
        }
        seeds
    }
}
