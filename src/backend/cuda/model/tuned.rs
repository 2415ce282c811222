//! Configurations that were measured to be the fastest: the library's table, and one that a user may name.
//!
//! A line is one winner of the benchmark's `--tune`, as JSON; empty lines and those that begin with # are skipped.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::backend::cuda::family::{Family, Variant};
use crate::backend::cuda::gpu::kernels::configs;
use crate::element::DType;
use crate::error::{Error, Kind, Result};
use crate::json::config::{self, ConfigJson};
use crate::schedule::plan::partial_sums;
use crate::schedule::{Config, Form, Operation, Problem, Route};

/// The table that the library carries.
const SHIPPED: &str = include_str!("tuned.jsonl");
/// The environment variable that names a further table, or is [`NONE`]. That table's lines come before the library's.
pub const VARIABLE: &str = "GEMMESH_TUNED";
/// The value for no table at all, not even the library's.
const NONE: &str = "none";

/// The configurations that were measured to be the fastest for a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Measured {
    /// For the most similar problem, by the extents that all ranks have alike. So ranks agree on who moves the rows and
    /// how these are cut.
    pub alike: Config,
    /// For this very problem, if it was measured and its configuration agrees with `alike`.
    pub exact: Option<Config>,
}

/// Whether ranks may use the two in one operation. Each rank may choose on its own how it pulls rows.
pub fn agree(one: &Config, other: &Config) -> bool {
    one.route == other.route && (one.route != Route::Push || one.chunking == other.chunking)
}

/// The extents of a problem that all ranks have alike. If rows are gathered, N may differ between ranks; if partials
/// are added, K may.
fn alike(operation: Operation, [m, n, k]: [usize; 3]) -> [usize; 2] {
    if operation.sends_product() {
        [m, n]
    } else {
        [m, k]
    }
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
    /// By its name.
    #[serde(with = "config::operation")]
    pub operation: Operation,
    /// Of the elements.
    pub dtype: DType,
    /// Rows of all ranks.
    pub m: usize,
    /// Columns of the output on each rank.
    pub n: usize,
    /// What each rank sums over.
    pub k: usize,
    /// What was the fastest.
    #[serde(with = "ConfigJson")]
    pub config: Config,
    /// Its median time in microseconds, for readers.
    pub us: f64,
}

impl Winner {
    fn shape(&self) -> [usize; 3] {
        [self.m, self.n, self.k]
    }

    /// Whether it was measured for the problem's operation and element size. Elements of one size take the same time.
    fn is_for(&self, problem: &Problem) -> bool {
        self.operation == problem.operation && self.dtype.bytes() == problem.dtypes.operands.bytes()
    }
}

impl Table {
    /// Reads the tables that the environment asks for.
    ///
    /// # Errors
    /// [`Kind::System`] if the user's table can't be read, or has an invalid line.
    pub fn load(
        rank: usize,
        family: &'static dyn Family,
        gpu: &str,
        world: usize,
    ) -> Result<Table> {
        Table::read(std::env::var_os(VARIABLE), rank, family, gpu, world)
    }

    /// The same, with the variable's value.
    fn read(
        value: Option<OsString>,
        rank: usize,
        family: &'static dyn Family,
        gpu: &str,
        world: usize,
    ) -> Result<Table> {
        let mut lines = Vec::new();
        if value.as_ref().is_some_and(|value| value == NONE) {
            return Ok(Table(lines));
        }
        if let Some(path) = value.map(PathBuf::from) {
            let action = format!("read {} ({VARIABLE})", path.display());
            let text = fs::read_to_string(&path).map_err(Error::system(rank, &action))?;
            let parsed = parse(&text, gpu, world, &mut lines);
            let parsed = parsed.and_then(|()| has_kernels(family, &lines));
            parsed.map_err(|reason| Kind::System { action, reason }.on(rank))?;
        }
        // A test checks that it can be read.
        let _ = parse(SHIPPED, gpu, world, &mut lines);
        Ok(Table(lines))
    }

    /// The fastest configurations for the most similar problem, and for this very one.
    ///
    /// Similar problems are near in M and K or, for partial sums, in M and N. None if every problem differs in one of
    /// these by more than a factor of 1.5.
    pub fn find(&self, problem: &Problem) -> Option<Measured> {
        const MOST: f64 = 1.5;
        let wanted = [problem.layout.m(), problem.n, problem.layout.k()];
        let distance = |line: &Winner| {
            let [have, want] = [line.shape(), wanted].map(|shape| alike(problem.operation, shape));
            let ratios = have.into_iter().zip(want);
            let ratios = ratios.map(|(have, want)| have.max(want) as f64 / have.min(want) as f64);
            let worst = ratios.clone().fold(1.0, f64::max);
            (worst <= MOST).then(|| ratios.product::<f64>())
        };
        let lines = || self.0.iter().filter(|line| line.is_for(problem));
        let near = lines().filter_map(|line| Some((distance(line)?, line)));
        // The first of equals: a user's line before the library's.
        let (_, nearest) = near.min_by(|(x, _), (y, _)| x.total_cmp(y))?;
        let alike = nearest.config;
        let agrees = |config: &Config| {
            if problem.operation.sends_product() {
                partial_sums::agree(problem, config, &alike)
            } else {
                agree(config, &alike)
            }
        };
        let mut exact = lines().filter(|line| line.shape() == wanted);
        Some(Measured {
            alike,
            exact: exact
                .find(|line| agrees(&line.config))
                .map(|line| line.config),
        })
    }
}

/// Checks that the library still has the kernels that were the fastest.
fn has_kernels(family: &'static dyn Family, lines: &[Winner]) -> Result<(), String> {
    let is_there = |line: &Winner| {
        let mut configs = configs(
            family,
            line.config,
            Variant::Forms,
            [line.dtype; 2],
            &Form::default(),
        );
        configs.any(|config| config == line.config)
    };
    match lines.iter().find(|line| !is_there(line)) {
        Some(Winner {
            m, n, k, config, ..
        }) => Err(format!(
            "the library has no such kernel any more: {m}x{n}x{k}, {config:?}; tune again"
        )),
        None => Ok(()),
    }
}

fn parse(text: &str, gpu: &str, world: usize, lines: &mut Vec<Winner>) -> Result<(), String> {
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let refused = |error: &dyn std::fmt::Display| {
            let number = index + 1;
            format!("line {number} is not one that --tune writes ({error}): {line}")
        };
        let winner: Winner = serde_json::from_str(line).map_err(|error| refused(&error))?;
        let checked = winner.config.check();
        checked.map_err(|error| refused(&error.in_call("the configuration".into())))?;
        if (winner.gpu.as_str(), winner.world) == (gpu, world) {
            lines.push(winner);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::family::H200;
    use crate::schedule::{Layout, TileShape};

    const LINE: &str = r#"{"gpu":"GPU","world":4,"operation":"all_gather_matmul","dtype":"Bf16","m":4096,"n":1792,"k":4096,"config":{"tile":{"m":128,"n":224,"k":64,"stages":4,"cluster":2,"split_k":1,"group_m":8},"chunking":{"count":2,"last":2,"cut_last":true},"route":"Push"},"us":101.5}"#;

    fn table(text: &str, gpu: &str, world: usize) -> Result<Table, String> {
        let mut lines = Vec::new();
        parse(text, gpu, world, &mut lines).map(|()| Table(lines))
    }

    /// The chunks of the most similar line, and the width of this problem's own tiles.
    fn find(table: &Table, m: usize, n: usize, k: usize) -> Option<(usize, Option<usize>)> {
        find_for(table, Operation::ALL_GATHER_MATMUL, DType::F16, [m, n, k])
    }

    fn find_for(
        table: &Table,
        operation: Operation,
        dtype: DType,
        [m, n, k]: [usize; 3],
    ) -> Option<(usize, Option<usize>)> {
        let layout = Layout::balanced(m, k, 4).unwrap();
        let found = table.find(&Problem::new(operation, dtype, layout, n))?;
        Some((
            found.alike.chunking.count,
            found.exact.map(|config| config.tile.n),
        ))
    }

    fn line(m: usize, n: usize, chunks: usize, tile_n: usize) -> String {
        LINE.replace(r#""m":4096"#, &format!(r#""m":{m}"#))
            .replace(r#""n":1792"#, &format!(r#""n":{n}"#))
            .replace(r#""count":2"#, &format!(r#""count":{chunks}"#))
            .replace(r#""n":224"#, &format!(r#""n":{tile_n}"#))
    }

    #[test]
    fn the_shipped_table_can_be_read_and_its_kernels_are_there() {
        table(SHIPPED, "", 0).unwrap();
        let lines = SHIPPED.lines().filter(|line| line.starts_with('{'));
        let lines: Vec<Winner> = lines
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert!(lines.len() > 10);
        assert_eq!(has_kernels(H200.family, &lines), Ok(()));
    }

    #[test]
    fn a_line_of_a_kernel_that_is_gone_is_refused_and_the_error_names_it() {
        let of = |line: &str| has_kernels(H200.family, &table(line, "GPU", 4).unwrap().0);
        assert_eq!(of(LINE), Ok(()));
        let error = of(&line(4096, 1792, 2, 48)).unwrap_err();
        assert!(
            error.contains("4096x1792x4096") && error.contains("128x48x64"),
            "{error}"
        );
    }

    #[test]
    fn the_variable_names_a_table_or_says_that_there_is_none() {
        let read = |value: Option<&str>| {
            Table::read(value.map(Into::into), 1, H200.family, "NVIDIA H200", 2)
        };
        let lines = |value| read(value).unwrap().0.len();
        assert!(lines(None) > 0);
        assert_eq!(lines(Some("none")), 0);
        let error = read(Some("/nowhere/table")).unwrap_err();
        assert_eq!(error.rank(), Some(1));
        let Kind::System { action, .. } = error.kind() else {
            panic!("{error}");
        };
        assert!(action.contains("/nowhere/table"), "{error}");
    }

    #[test]
    fn a_problem_finds_its_own_line_or_the_one_most_like_it() {
        let other = line(5000, 1792, 3, 192);
        let table = table(&format!("# head\n\n{LINE}\n{other}\n"), "GPU", 4).unwrap();
        assert_eq!(find(&table, 4096, 1792, 4096), Some((2, Some(224))));
        assert_eq!(find(&table, 4900, 1792, 4096), Some((3, None)));
        assert_eq!(find(&table, 4096, 1792, 8192), None);
        assert_eq!(find(&table, 1024, 1792, 4096), None);
    }

    #[test]
    fn ranks_whose_n_differ_find_what_they_must_agree_on_in_one_line() {
        let lines = [
            // Like a problem of M = 4500 in N, not in M and K.
            line(5000, 512, 5, 64),
            line(4096, 1792, 2, 224),
            line(4096, 2048, 2, 256),
            line(4096, 3584, 4, 192),
        ];
        let table = table(&lines.join("\n"), "GPU", 4).unwrap();
        for n in [1, 512, 100_000] {
            assert_eq!(find(&table, 4096, n, 4096), Some((2, None)), "{n}");
            assert_eq!(find(&table, 4400, n, 4096), Some((2, None)), "{n}");
        }
        assert_eq!(find(&table, 4096, 1792, 4096), Some((2, Some(224))));
        assert_eq!(find(&table, 4096, 2048, 4096), Some((2, Some(256))));
        let disagrees = find(&table, 4096, 3584, 4096);
        assert_eq!(disagrees, Some((2, None)), "it has other chunks");
    }

    #[test]
    fn ranks_whose_parts_of_k_differ_find_what_they_must_agree_on_in_one_line() {
        for operation in Operation::SUMS {
            let lines = [line(4096, 1792, 2, 224), line(4096, 512, 5, 64)];
            let lines = lines.map(|line| line.replace("all_gather_matmul", operation.name()));
            let table = table(&lines.join("\n"), "GPU", 4).unwrap();
            let find = |n, k| find_for(&table, operation, DType::Bf16, [4096, n, k]);
            for k in [1, 512, 100_000] {
                assert_eq!(find(1792, k), Some((2, None)), "{k}");
                assert_eq!(find(2000, k), Some((2, None)), "{k}");
                assert_eq!(find(512, k), Some((5, None)), "{k}");
                assert_eq!(find(8192, k), None, "{k}");
            }
            assert_eq!(find(1792, 4096), Some((2, Some(224))));
        }
    }

    #[test]
    fn what_is_pulled_needs_no_agreement_and_what_is_pushed_all_of_it() {
        let pushed = serde_json::from_str::<Winner>(LINE).unwrap().config;
        let differences: [fn(&mut Config); 3] = [
            |config| config.chunking.count = 3,
            |config| config.chunking.last = 3,
            |config| config.chunking.cut_last = false,
        ];
        for differ in differences {
            let mut other = pushed;
            differ(&mut other);
            assert!(!agree(&pushed, &other));
            // Only pushes by copies must agree on chunks. Each rank pulls on its own, and stored rows are cut by other
            // rules.
            for route in [Route::Pull, Route::Store] {
                assert!(agree(&pushed.with_route(route), &other.with_route(route)));
            }
        }
        assert!(!agree(&pushed, &pushed.with_route(Route::Pull)));
        let other_tiles = Config {
            tile: TileShape::new(64, 64, 64).with_split_k(2),
            ..pushed
        };
        assert!(agree(&pushed, &other_tiles));
    }

    #[test]
    fn lines_of_other_gpus_and_world_sizes_are_not_used() {
        for (gpu, world) in [("another", 4), ("GPU", 8)] {
            let table = table(LINE, gpu, world).unwrap();
            assert_eq!(find(&table, 4096, 1792, 4096), None);
        }
    }

    #[test]
    fn lines_of_other_operations_are_not_used() {
        let table = table(LINE, "GPU", 4).unwrap();
        let find = |operation| find_for(&table, operation, DType::Bf16, [4096, 1792, 4096]);
        assert_eq!(find(Operation::ALL_GATHER_MATMUL), Some((2, Some(224))));
        assert_eq!(find(Operation::MATMUL), None);
    }

    #[test]
    fn a_line_that_makes_no_sense_is_named() {
        for wrong in [
            LINE.replace("Push", "Throw"),
            LINE.replace("224", "\"wide\""),
            LINE.replace("224", "0"),
            LINE.replace("224", &usize::MAX.to_string()),
            LINE.replace(r#""world":4,"#, ""),
            LINE.replace("Bf16", "Int4"),
            LINE.replace("all_gather_matmul", "all_gather_multiply"),
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
    //! Tables of winners that somebody has written, and the schedules of what is found in them.
    use super::*;
    use crate::schedule::Layout;
    use crate::schedule::plan::plan;

    const GPU: &str = "NVIDIA H200";
    const OPERATIONS: [Operation; 3] = [
        Operation::ALL_GATHER_MATMUL,
        Operation::MATMUL_REDUCE_SCATTER,
        Operation::MATMUL_ALL_REDUCE,
    ];

    /// A table.
    pub fn parse(data: &[u8]) {
        let text = String::from_utf8_lossy(data);
        let mut lines = Vec::new();
        if let Err(reason) = super::parse(&text, GPU, 2, &mut lines) {
            assert!(reason.contains("line "));
        }
        let table = Table(lines);
        for operation in OPERATIONS {
            for (m, n, k) in [(64, 64, 64), (300, 40, 24)] {
                let Ok(layout) = Layout::balanced(m, k, 2) else {
                    continue;
                };
                let problem = Problem::new(operation, DType::Bf16, layout, n);
                if let Some(found) = table.find(&problem) {
                    for config in [Some(found.alike), found.exact].into_iter().flatten() {
                        let _ = plan(&problem, 1, config);
                    }
                }
            }
        }
    }

    /// Lines of the library's own table, the same for small problems, and these with each number out of bounds.
    pub fn seeds() -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let _ = super::parse(SHIPPED, GPU, 2, &mut lines);
        lines.truncate(4);
        let mut seeds = Vec::new();
        for mut line in lines {
            seeds.push(serde_json::to_vec(&line).unwrap_or_default());
            (line.m, line.n, line.k) = (64, 64, 64);
            for operation in OPERATIONS {
                line.operation = operation;
                seeds.push(serde_json::to_vec(&line).unwrap_or_default());
            }
            let right = serde_json::json!(&line);
            for part in ["tile", "chunking"] {
                let numbers = right["config"][part].as_object();
                for (name, _) in numbers.into_iter().flatten() {
                    for number in [0, 1, u64::MAX] {
                        let mut wrong = right.clone();
                        wrong["config"][part][name] = number.into();
                        seeds.push(wrong.to_string().into_bytes());
                    }
                }
            }
        }
        seeds
    }
}
