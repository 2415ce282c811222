//! Configurations that were measured to be the fastest: a table that the library carries, and one that a user may name.
//!
//! A line is one winner of `all_gather_matmul --tune`, tab-separated; empty lines and those that begin with # are skipped.

use std::fs;
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::protocol::{Config, Problem, Transport};

/// The table that the library carries.
const SHIPPED: &str = include_str!("tuned.tsv");
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
pub struct Table(Vec<Line>);

#[derive(Debug)]
struct Line {
    shape: [usize; 3],
    config: Config,
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
        let distance = |line: &Line| {
            let ratios = line.shape.iter().zip(wanted);
            let ratios = ratios.map(|(&have, want)| (have as f64 / want as f64).ln().abs());
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
            exact: line.shape == wanted,
        })
    }
}

fn parse(text: &str, gpu: &str, world: usize, lines: &mut Vec<Line>) -> Result<(), String> {
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || format!("line {} is not one that --tune writes: {line}", index + 1);
        let fields: Vec<&str> = line.split('\t').collect();
        let [name, of, numbers @ .., transport, _us] = &fields[..] else {
            return Err(wrong());
        };
        let numbers: Vec<usize> = numbers
            .iter()
            .map(|number| number.parse().map_err(|_| wrong()))
            .collect::<Result<_, _>>()?;
        let &[
            m,
            n,
            k,
            tile_m,
            tile_n,
            tile_k,
            stages,
            cluster,
            group_m,
            chunks,
        ] = &numbers[..]
        else {
            return Err(wrong());
        };
        let transport = [Transport::Pull, Transport::Push, Transport::Store]
            .into_iter()
            .find(|t| format!("{t:?}") == *transport)
            .ok_or_else(wrong)?;
        if *name != gpu || of.parse() != Ok(world) {
            continue;
        }
        lines.push(Line {
            shape: [m, n, k],
            config: Config {
                tile_m,
                tile_n,
                tile_k,
                stages,
                cluster,
                group_m,
                chunks,
                transport,
            },
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "GPU\t4\t4096\t1792\t4096\t128\t224\t64\t4\t2\t8\t2\tPush\t101.5";

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
            .replace("4096\t1792", "5000\t1792")
            .replace("8\t2\tP", "8\t3\tP");
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
            LINE.replace("224", "wide"),
            LINE.replace("GPU\t4\t", "GPU\t"),
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
