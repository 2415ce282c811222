//! How an operation is cut up, and why.

use std::fmt::{Debug, Display, Formatter, Result};

use crate::error::Counted;
use crate::route::Route;
use crate::schedule::operation::RowResult;
use crate::schedule::plan::partials::sends_all_partials;
use crate::schedule::{Config, Problem};

/// How an operation is cut up, and its predicted time. `Display` says it in sentences, a line each.
///
/// ```
/// use gemmesh::{Group, Host, Matmul, Result, bf16};
///
/// fn rank(group: Group<Host>) -> Result<()> {
///     let product = Matmul::<Host, bf16>::new().prepare((&group, [128, 64]), 32)?;
///     println!("{}", product.explain());
///     Ok(())
/// }
///
/// Group::threads(1, rank)?;
/// # Ok::<_, gemmesh::Error>(())
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Explanation {
    /// The configuration that was chosen.
    pub config: Config,
    /// The predicted times of the parts, and last that of the whole. On GPUs the model that chooses configurations
    /// makes them, if it knows the operation. On the host backend there are none, because it has one configuration for
    /// all shapes.
    pub predicted: Vec<Prediction>,
    moved: Moved,
    several_hosts: bool,
}

/// What an operation moves between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    /// Nothing, because one rank has all rows.
    Nothing,
    /// The rows of `a`.
    Rows,
    /// Partial sums.
    Sums,
    /// All partial sums of all rows, which are few, over several hosts.
    AllSums,
}

impl Debug for Explanation {
    fn fmt(&self, f: &mut Formatter) -> Result {
        write!(f, "Explanation({:?}", self.config)?;
        match self.micros() {
            Some(micros) => write!(f, ", {micros:.1} µs expected)"),
            None => f.write_str(")"),
        }
    }
}

/// A predicted time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Prediction {
    /// What it is the time of, such as "until the operation is complete".
    pub what: &'static str,
    /// From the beginning of the operation, in microseconds on the device.
    pub micros: f64,
}

impl Explanation {
    /// `several_hosts`: whether the group's ranks run on several hosts.
    pub(crate) fn new(
        problem: &Problem,
        several_hosts: bool,
        config: Config,
        predicted: Vec<Prediction>,
    ) -> Explanation {
        let moved = match (problem.layout.world(), problem.operation.result) {
            (1, _) => Moved::Nothing,
            _ if sends_all_partials(problem) => Moved::AllSums,
            (_, RowResult::SumOfOwnRows | RowResult::SumOfAllRows) => Moved::Sums,
            (_, RowResult::Kept | RowResult::Blocks) => Moved::Rows,
        };
        Explanation {
            config,
            predicted,
            moved,
            several_hosts,
        }
    }

    /// The predicted time of the whole operation, in microseconds on the device, if it is known.
    pub fn micros(&self) -> Option<f64> {
        self.predicted.last().map(|whole| whole.micros)
    }

    fn write_tiles(&self, f: &mut Formatter<'_>) -> Result {
        let tile = &self.config.tile;
        f.write_str("The output is computed in tiles of ")?;
        let (rows, columns) = (Counted(tile.m, "row"), Counted(tile.n, "column"));
        write!(f, "{rows} and {columns}, ")?;
        write!(f, "which read {} of K in a step", Counted(tile.k, "column"))?;
        if tile.stages > 1 {
            write!(f, ", with {} pipeline stages", tile.stages)?;
        }
        f.write_str(".")?;
        if tile.cluster_m > 1 {
            let count = tile.cluster_m;
            write!(
                f,
                "\n{count} tiles, one above the other, share what they load of the weight."
            )?;
        }
        if tile.cluster_n > 1 {
            let count = tile.cluster_n;
            write!(
                f,
                "\n{count} tiles, side by side, share what they load of the rows."
            )?;
        }
        if tile.split_k > 1 {
            let count = tile.split_k;
            write!(
                f,
                "\nEach tile is the work of {count} thread blocks, which divide K."
            )?;
        }
        if tile.k_slices > 1 {
            let count = tile.k_slices;
            write!(
                f,
                "\nK is multiplied in {count} slices, whose products are added afterwards."
            )?;
        }
        if tile.group_m > 1 {
            let count = tile.group_m;
            write!(
                f,
                "\nThe tiles of {count} tile rows are taken together, column by column."
            )?;
        }
        if let Some(most) = self.config.max_ctas {
            write!(
                f,
                "\nA kernel has at most {}.",
                Counted(most, "thread block")
            )?;
        }
        Ok(())
    }

    fn write_moves(&self, f: &mut Formatter<'_>) -> Result {
        let route = &self.config.route;
        let what = match (self.moved, route) {
            (Moved::Nothing, _) => {
                return f.write_str("\nNothing is moved, because one rank has all rows.");
            }
            (Moved::Rows, Route::Pull) => "Each rank copies the other ranks' rows to itself",
            (Moved::Rows, Route::Push) => "Each rank copies its rows to the other ranks",
            (Moved::Rows, Route::Store) => "Each rank's kernel stores its rows at the other ranks",
            (Moved::AllSums, _) => {
                return f.write_str(
                    "\nWhen a rank's product is complete, it sends its partial sums of all rows to all ranks, over the \
                     network too (Route::Push, Route::Net). Each rank adds up all rows.",
                );
            }
            (Moved::Sums, Route::Pull) if self.several_hosts => {
                f.write_str(
                    "\nWhen a rank's product is complete, it copies partial sums to the ranks that add them \
                     (Route::Push).",
                )?;
                return self.write_hosts(f);
            }
            (Moved::Sums, Route::Pull) => {
                "Each rank copies the partial sums that it adds to itself"
            }
            (Moved::Sums, Route::Push) => {
                "Each rank copies partial sums to the ranks that add them"
            }
            (Moved::Sums, Route::Store) if self.config.stores_behind() => {
                return f.write_str(
                    "\nWhen a rank's product is complete, a second kernel stores its partial sums at the ranks that add \
                     them (Route::Store).",
                );
            }
            (Moved::Sums, Route::Store) => {
                "Each rank's kernel stores partial sums at the ranks that add them"
            }
            (_, Route::Net) => "Rows go over a network",
        };
        write!(f, "\n{what} (Route::{route:?})")?;
        // Kernels cut the rows that they store much finer, whatever the configuration says.
        if (self.moved, *route) == (Moved::Rows, Route::Store) {
            f.write_str(".")?;
            return self.write_hosts(f);
        }
        self.write_chunks(f)?;
        self.write_hosts(f)
    }

    fn write_chunks(&self, f: &mut Formatter<'_>) -> Result {
        let chunking = &self.config.chunking;
        write!(f, ", in {}", Counted(chunking.count, "chunk"))?;
        if chunking.last != chunking.count {
            let last = Counted(chunking.last, "chunk");
            let of = match self.moved {
                Moved::Sums => "the rows that are sent last",
                _ => "the rank whose rows come last",
            };
            write!(f, ", or {last} for {of}")?;
        }
        f.write_str(".")?;
        if chunking.cut_last {
            f.write_str("\nThe very last chunk comes in two parts, cut along K.")?;
        }
        Ok(())
    }

    fn write_hosts(&self, f: &mut Formatter<'_>) -> Result {
        match self.moved {
            Moved::Rows if self.several_hosts => f.write_str(
                "\nRows of another host come over the network (Route::Net) to one rank of this host, which passes them on.",
            ),
            Moved::Sums if self.several_hosts => f.write_str(
                "\nPartial sums for another host are added within this host, and their sum goes over the network \
                 (Route::Net).",
            ),
            _ => Ok(()),
        }
    }
}

impl Display for Explanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        self.write_tiles(f)?;
        self.write_moves(f)?;
        if self.predicted.is_empty() {
            return f.write_str("\nNo time prediction.");
        }
        for Prediction { what, micros } in &self.predicted {
            write!(f, "\nExpected time {what}: {micros:.1} µs.")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Chunking, Hosts, Layout, Operation, TileShape};

    fn explained(moved: Moved, tile: TileShape, chunking: Chunking, route: Route) -> String {
        let explanation = Explanation {
            config: Config::new(tile, chunking, route),
            predicted: Vec::new(),
            moved,
            several_hosts: false,
        };
        explanation.to_string()
    }

    #[test]
    fn sums_over_hosts_that_follow_their_product_are_explained_as_such() {
        let explained = |columns| {
            let problem = Problem {
                hosts: Hosts::of(&["a", "b", "a", "b"]).unwrap(),
                ..Problem::new(
                    Operation::MATMUL_ALL_REDUCE,
                    DType::Bf16,
                    Layout::new(&[2; 4], 64).unwrap(),
                    columns,
                )
            };
            let config = Config::new(TileShape::new(8, 8, 8), Chunking::new(1), Route::Pull);
            Explanation::new(&problem, true, config, Vec::new()).to_string()
        };
        let (few, many) = (explained(64), explained(1 << 16));
        assert!(
            few.contains("sends its partial sums of all rows to all ranks"),
            "{few}"
        );
        assert!(
            many.contains("it copies partial sums to the ranks that add them"),
            "{many}"
        );
        assert!(
            many.contains("Partial sums for another host are added within"),
            "{many}"
        );
    }

    #[test]
    fn it_says_what_goes_over_the_network() {
        let of = |moved| Explanation {
            config: Config::new(TileShape::new(8, 8, 8), Chunking::new(1), Route::Push),
            predicted: Vec::new(),
            moved,
            several_hosts: true,
        };
        for (moved, expected) in [
            (Moved::Rows, "Rows of another host come over the network"),
            (Moved::Sums, "Partial sums for another host are added"),
            (
                Moved::AllSums,
                "When a rank's product is complete, it sends",
            ),
        ] {
            let words = of(moved).to_string();
            assert!(
                words.lines().any(|line| line.starts_with(expected)),
                "{words}"
            );
        }
    }

    #[test]
    fn a_product_is_explained_in_sentences() {
        let tile = TileShape::new(128, 256, 64);
        let words = explained(Moved::Nothing, tile, Chunking::new(4), Route::Pull);
        let expected = "\
            The output is computed in tiles of 128 rows and 256 columns, which read 64 columns of K in a step.\n\
            Nothing is moved, because one rank has all rows.\n\
            No time prediction.";
        assert_eq!(words, expected);
    }

    #[test]
    fn every_option_of_a_tile_has_a_sentence() {
        let tile = TileShape::new(1, 1, 1).with_stages(4).with_cluster(2, 1);
        let tile = tile.with_split_k(3).with_k_slices(5).with_group_m(8);
        let explanation = Explanation {
            config: Config::new(tile, Chunking::new(1), Route::Pull).with_max_ctas(64),
            predicted: Vec::new(),
            moved: Moved::Nothing,
            several_hosts: false,
        };
        let expected = "\
            The output is computed in tiles of 1 row and 1 column, which read 1 column of K in a step, with 4 \
            pipeline stages.\n\
            2 tiles, one above the other, share what they load of the weight.\n\
            Each tile is the work of 3 thread blocks, which divide K.\n\
            K is multiplied in 5 slices, whose products are added afterwards.\n\
            The tiles of 8 tile rows are taken together, column by column.\n\
            A kernel has at most 64 thread blocks.\n\
            Nothing is moved, because one rank has all rows.\n\
            No time prediction.";
        assert_eq!(explanation.to_string(), expected);
    }

    #[test]
    fn it_says_who_moves_what_in_how_many_chunks() {
        let says = |moved, chunking, route| {
            let words = explained(moved, TileShape::new(8, 8, 8), chunking, route);
            let lines: Vec<&str> = words.lines().collect();
            lines[1..lines.len() - 1].join(" ")
        };
        let (one, four) = (Chunking::new(1), Chunking::new(4));
        let uneven = Chunking::new(1).with_last(4).with_cut_last(true);
        for (moved, chunking, route, expected) in [
            (
                Moved::Rows,
                one,
                Route::Pull,
                "Each rank copies the other ranks' rows to itself (Route::Pull), in 1 chunk.",
            ),
            (
                Moved::Rows,
                uneven,
                Route::Push,
                "Each rank copies its rows to the other ranks (Route::Push), in 1 chunk, or 4 chunks for the rank whose \
                 rows come last. The very last chunk comes in two parts, cut along K.",
            ),
            (
                Moved::Rows,
                four,
                Route::Store,
                "Each rank's kernel stores its rows at the other ranks (Route::Store).",
            ),
            (
                Moved::Sums,
                four,
                Route::Pull,
                "Each rank copies the partial sums that it adds to itself (Route::Pull), in 4 chunks.",
            ),
            (
                Moved::Sums,
                four.with_last(1),
                Route::Push,
                "Each rank copies partial sums to the ranks that add them (Route::Push), in 4 chunks, or 1 chunk for the \
                 rows that are sent last.",
            ),
            (
                Moved::Sums,
                one,
                Route::Store,
                "Each rank's kernel stores partial sums at the ranks that add them (Route::Store), in 1 chunk.",
            ),
        ] {
            assert_eq!(says(moved, chunking, route), expected);
        }
    }

    #[test]
    fn each_predicted_time_has_a_line_and_the_last_is_of_the_whole() {
        let prediction = |what, micros| Prediction { what, micros };
        let explanation = Explanation {
            config: Config::new(TileShape::new(8, 8, 8), Chunking::new(1), Route::Pull),
            predicted: vec![
                prediction("until the last rows have come", 12.34),
                prediction("until the operation is complete", 20.0),
            ],
            moved: Moved::Rows,
            several_hosts: false,
        };
        let words = explanation.to_string();
        let lines: Vec<&str> = words.lines().skip(2).collect();
        let expected = [
            "Expected time until the last rows have come: 12.3 µs.",
            "Expected time until the operation is complete: 20.0 µs.",
        ];
        assert_eq!(lines, expected);
        assert_eq!(explanation.micros(), Some(20.0));
    }
}
