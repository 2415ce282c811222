//! Which schedules the kernels support, and where the rows of their products go.

use super::block_table::Places;
use super::low_latency::LowLatencyRows;
use super::sends;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::{Error, Result};
use crate::schedule::limits::{limit, require};
use crate::schedule::plan::matrices::BESIDE;
use crate::schedule::{Move, OutputBlock, Product, Route, Schedule, Transfer};

/// Where the rows of a product go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// All to one matrix.
    One,
    /// To several places. At some of them, partials from other ranks are added.
    Places(Places),
    /// As partials to low-latency areas. Their sums go to one matrix.
    LowLatency(LowLatencyRows),
}

/// Checks that the kernels support this schedule. Returns where the rows of its product go.
///
/// # Errors
/// [`Kind::Unsupported`] if the kernels cannot do it; it and [`Kind::Limit`] for schedules that no operation needs.
pub fn check(schedule: &Schedule) -> Result<Destination> {
    let is_quantised = schedule.quantizes();
    if is_quantised {
        check_quantised(schedule)?;
    }
    check_routes(schedule)?;
    let turns = schedule.turns().count();
    limit("turns of an operation over the network", turns, 0, TURNS)?;
    if turns > 0 {
        // If a queue were full, the driver would wait without a deadline.
        let what = "commands of an operation over the network, which has fewer with fewer stages and chunks,";
        limit(what, commands(schedule), 1, COMMANDS)?;
    }
    if !is_quantised {
        check_sums(schedule)?;
    }
    let Some(product) = schedule.product() else {
        sends::check(schedule)?;
        return Ok(Destination::One);
    };
    if schedule.is_idle() {
        return Ok(Destination::One);
    }
    if let Some(low_latency) = LowLatencyRows::of(schedule) {
        return Ok(Destination::LowLatency(low_latency));
    }
    if let Some(places) = Places::of(schedule) {
        places.check(schedule, product)?;
        return Ok(Destination::Places(places));
    }
    let outputs = product.outputs();
    limit(
        "blocks of a product on GPUs",
        product.blocks.len(),
        outputs,
        outputs,
    )?;
    for (number, OutputBlock { rows, weight, .. }) in product.blocks.iter().enumerate() {
        limit("rows of a block on GPUs", rows.len(), product.m, product.m)?;
        limit("the weight of a block on GPUs", *weight, number, number)?;
    }
    for moved in schedule.moves() {
        check_after(schedule, moved)?;
        if moved.route == Route::Store {
            check_stored(schedule, product, moved)?;
        }
    }
    Ok(Destination::One)
}

/// A kernel waits either for flags of pulls or for flags of pushes. Those of what comes over the network are with the
/// latter.
fn check_routes(schedule: &Schedule) -> Result<()> {
    let routes = schedule.routes().iter();
    let within = routes.filter(|&&route| route != Route::Net);
    limit("routes of an operation on GPUs", within.count(), 0, 1)?;
    let what = "Config::route of a product over several hosts on GPUs must not be Route::Store";
    let is_pushed = schedule.product().is_none() || !schedule.uses(Route::Store);
    require(what, is_pushed || !schedule.uses(Route::Net))
}

/// Checks that a transfer waits for no flag, apart from rows that it passes on from another host.
pub(super) fn check_after(schedule: &Schedule, moved: &Transfer) -> Result<()> {
    let mut received = schedule.received();
    let is_passed_on = received.any(|come| moved.after == (come.flag..come.flag + 1));
    let what = "transfers must wait for no flags on GPUs";
    require(what, moved.after.is_empty() || is_passed_on)
}

/// Checks rows that a product's kernel stores: those of the matrix that it multiplies, and of a second one.
fn check_stored(schedule: &Schedule, product: &Product, moved: &Transfer) -> Result<()> {
    limit("regions that a kernel stores", moved.regions.len(), 1, 2)?;
    for (Move { from: region, to }, matrix) in moved.regions.iter().zip([product.a, BESIDE]) {
        let what = "a kernel must store rows to the same place of the other rank's memory";
        require(what, region == to)?;
        let what = "a kernel must store the matrix that it multiplies, and one beside it";
        require(what, region.matrix == matrix)?;
        limit("rows that a kernel stores", region.rows.len(), 1, product.m)?;
        let spec = &schedule.matrices()[region.matrix];
        let bytes = spec.extent_of(region, spec.row_bytes()).contiguous();
        let bytes = bytes.unwrap_or(usize::MAX);
        limit("bytes of a piece that a kernel stores", bytes, 1, 1 << 31)?;
    }
    Ok(())
}

/// Checks that no rows are added and then quantised.
fn check_quantised(schedule: &Schedule) -> Result<()> {
    let added = schedule.reduction().map_or(0, |of| of.sum.addends.len());
    limit("what is added and quantised on GPUs", added, 0, 1)
}

/// Checks the types in which sums over ranks are stored. Those that are sent on have the type of their addends.
fn check_sums(schedule: &Schedule) -> Result<()> {
    let blocks = schedule.product().map(|product| &product.blocks[..]);
    let of_blocks = blocks.unwrap_or_default().iter().map(|block| &block.sum);
    let reduced = schedule.reductions().map(|reduction| &reduction.sum);
    for sum in of_blocks
        .chain(reduced)
        .filter(|sum| !sum.addends.is_empty())
    {
        let stored = schedule.matrices()[sum.out].dtype;
        let dtype = sum.dtype(schedule.matrices());
        let moves = schedule.moves().chain(schedule.sent());
        let mut regions = moves.flat_map(|moved| &moved.regions);
        let is_sent = regions.any(|region| region.from.matrix == sum.out);
        if is_sent && stored != dtype {
            let what = format!("sums over all ranks of {stored} on GPUs: use {dtype}");
            return Err(Error::unsupported(what));
        }
    }
    Ok(())
}

/// The commands that a queue of the device holds.
pub const COMMANDS: usize = 1024;

/// The most turns of an operation over the network. NCCL puts some commands on a lane at each.
pub const TURNS: usize = 128;

/// The most commands that an operation puts on one stream. Stores by kernels need none.
pub fn commands(schedule: &Schedule) -> usize {
    let passed_on = schedule.moves().filter(|moved| !moved.after.is_empty());
    // A host's sum: waits for the addends, and the kernel that adds.
    let of_sums = schedule.host_sums().iter().map(|sum| sum.flags.len() + 1);
    // A turn: a wait for its block, NCCL's kernel, its count, the flag, and the word's reset.
    let alone = schedule
        .turns()
        .filter(|turn| turn.sends_alone || turn.receives_alone);
    // At a message of which each lane has a half, its own lane tells the other, and waits for it.
    let of_turns = 5 * schedule.turns().count() + 2 * alone.count();
    commands_before(schedule) + 3 * passed_on.count() + of_turns + of_sums.sum::<usize>()
}

/// Those that stand in front of its kernel. What waits for the network follows.
pub fn commands_before(schedule: &Schedule) -> usize {
    let copied = || {
        let moves = schedule.moves().filter(|moved| moved.after.is_empty());
        moves.filter(|moved| moved.route != Route::Store)
    };
    let copies: usize = copied().map(|moved| moved.regions.len()).sum();
    // The stream waits for a block's word when it comes to the block, and resets the word.
    let mut last = None;
    let is_next = |moved: &&Transfer| {
        moved.produced.is_some() && std::mem::replace(&mut last, moved.produced) != moved.produced
    };
    let blocks = copied().filter(is_next).count();
    copies + copied().count() + 2 * blocks + 3 * schedule.world() + 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::error::Kind;
    use crate::schedule::Operation;
    use crate::schedule::plan::plan;
    use crate::schedule::{Chunking, Config, DTypes, Hosts, Layout, Problem, RowOrder, TileShape};

    fn problem(operation: Operation, rows: &[usize]) -> Problem {
        let layout = Layout::new(rows, 8).unwrap();
        Problem::new(operation, DType::Bf16, layout, 12)
    }

    const CONFIG: Config = Config::new(TileShape::new(4, 8, 8), Chunking::new(2), Route::Pull);

    #[test]
    fn all_schedules_of_partial_sums_run_on_gpus() {
        for rows in [&[5, 3][..], &[8, 0], &[0, 8], &[8], &[3, 0, 40], &[4; 8]] {
            for rank in 0..rows.len() {
                let multiply = plan(&problem(Operation::MULTIPLY_PARTIALS, rows), rank, CONFIG);
                assert_eq!(check(&multiply.unwrap()), Ok(Destination::One));
                for operation in Operation::SUMS {
                    let problem = problem(operation, rows);
                    let plan = |route| plan(&problem, rank, CONFIG.with_route(route)).unwrap();
                    assert_eq!(check(&plan(Route::Pull)), Ok(Destination::One));
                    for route in [Route::Push, Route::Store] {
                        assert!(matches!(check(&plan(route)), Ok(Destination::Places(_))));
                    }
                }
            }
        }
    }

    #[test]
    fn all_schedules_over_hosts_run_on_gpus() {
        const OPERATIONS: [Operation; 9] = [
            Operation::ALL_GATHER_MATMUL,
            Operation::MATMUL_REDUCE_SCATTER,
            Operation::MATMUL_ALL_REDUCE,
            Operation::ALL_GATHER,
            Operation::REDUCE_SCATTER,
            Operation::PRODUCE_AND_REDUCE_SCATTER,
            Operation::ALL_REDUCE,
            Operation::BROADCAST,
            Operation::ALL_TO_ALL,
        ];
        for (hosts, rows) in [
            ("ab", &[5, 3][..]),
            ("ab", &[0, 8]),
            ("aabb", &[300, 0, 1, 40]),
            ("abba", &[4; 4]),
            ("abcabc", &[4; 6]),
            ("aaabbbccc", &[64; 9]),
        ] {
            let names: Vec<char> = hosts.chars().collect();
            // Few and many bytes.
            let many = (1 << 19) / rows.iter().sum::<usize>() + 1;
            for (operation, n) in OPERATIONS.iter().flat_map(|&of| [(of, 12), (of, many)]) {
                let problem = Problem {
                    hosts: Hosts::of(&names).unwrap(),
                    n,
                    ..problem(operation, rows)
                };
                let config = CONFIG.with_route(Route::Push);
                for rank in 0..rows.len() {
                    let schedule = plan(&problem, rank, config).unwrap();
                    let checked = check(&schedule);
                    assert!(checked.is_ok(), "{hosts} {operation} {rank}: {checked:?}");
                    let is_sum = Operation::SUMS.contains(&operation);
                    let has_places = matches!(checked, Ok(Destination::Places(_)));
                    let is_made_first = operation == Operation::MATMUL_ALL_REDUCE && n == 12;
                    let is_sent_on = is_sum && !is_made_first;
                    assert_eq!(has_places, is_sent_on, "{hosts} {operation} {rank}");
                    if is_sum {
                        let pulled = plan(&problem, rank, config.with_route(Route::Pull)).unwrap();
                        let checked = check(&pulled);
                        assert!(checked.is_ok(), "{hosts} {operation} {rank}: {checked:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_queues_have_room_for_long_shards_over_hosts() {
        let operations = [
            (Operation::ALL_GATHER_MATMUL, 1 << 13),
            (Operation::ALL_GATHER, 0),
            (Operation::MATMUL_REDUCE_SCATTER, 1 << 13),
            (Operation::MATMUL_ALL_REDUCE, 1 << 13),
            (Operation::REDUCE_SCATTER, 1 << 13),
            (Operation::ALL_REDUCE, 1 << 13),
            (Operation::PRODUCE_AND_REDUCE_SCATTER, 1 << 13),
        ];
        for (hosts, places) in [(2, 2), (2, 8), (4, 8), (8, 8)] {
            let world = hosts * places;
            let names: Vec<usize> = (0..world).map(|rank| rank / places).collect();
            for (operation, n) in operations {
                let k = if operation.sends_product() {
                    1024
                } else {
                    1 << 13
                };
                // 256 MiB a rank.
                let layout = Layout::new(&vec![1 << 14; world], k).unwrap();
                let problem = Problem {
                    hosts: Hosts::of(&names).unwrap(),
                    ..Problem::new(operation, DType::Bf16, layout, n)
                };
                let tile = TileShape::new(256, 256, 64);
                for chunks in [1, 2] {
                    let config = Config::new(tile, Chunking::new(chunks), Route::Push);
                    let schedule = plan(&problem, 1, config).unwrap();
                    let (checked, counted) = (check(&schedule), commands(&schedule));
                    let has_room = checked.is_ok() && counted <= COMMANDS;
                    assert!(
                        has_room,
                        "{hosts} {places} {operation}: {checked:?} {counted}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_a_queue_has_no_room_for_is_refused() {
        let names: Vec<usize> = (0..16).map(|rank| rank / 8).collect();
        let layout = Layout::new(&[1 << 14; 16], 1 << 13).unwrap();
        for (stages, is_refused) in [(8, false), (64, true)] {
            let layout = layout.clone().staged(stages, RowOrder::ByRank).unwrap();
            let problem = Problem {
                hosts: Hosts::of(&names).unwrap(),
                ..Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, 1 << 13)
            };
            let config = Config::new(TileShape::new(256, 256, 64), Chunking::new(1), Route::Push);
            let checked = check(&plan(&problem, 3, config).unwrap());
            assert_eq!(checked.is_err(), is_refused, "{stages} {checked:?}");
        }
    }

    #[test]
    fn all_schedules_of_no_rows_run_on_gpus() {
        for operation in [
            Operation::MATMUL_REDUCE_SCATTER,
            Operation::MATMUL_ALL_REDUCE,
            Operation::MULTIPLY_PARTIALS,
            Operation::ALL_GATHER_MATMUL,
        ] {
            let problem = problem(operation, &[0; 9]);
            for route in [Route::Pull, Route::Push, Route::Store] {
                let schedule = plan(&problem, 3, CONFIG.with_route(route)).unwrap();
                assert!(schedule.is_idle() && !schedule.is_pushed());
                assert_eq!(check(&schedule), Ok(Destination::One));
            }
        }
    }

    #[test]
    fn partials_are_stored_to_seven_peers_at_the_most() {
        for operation in Operation::SUMS {
            let problem = problem(operation, &[4; 9]);
            let plan = |route| plan(&problem, 2, CONFIG.with_route(route)).unwrap();
            assert!(matches!(
                check(&plan(Route::Push)),
                Ok(Destination::Places(_))
            ));
            let error = check(&plan(Route::Store)).unwrap_err();
            assert!(matches!(error.kind(), Kind::Unsupported { .. }), "{error}");
            let words = error.to_string();
            assert!(
                words.contains(operation.name()) && words.contains("Route::Push"),
                "{words}"
            );
        }
    }

    /// What `push::enqueue` puts on the copy stream: a wait for the permit, a wait for each block, two copies a
    /// transfer, and each word's reset.
    fn enqueued(schedule: &Schedule) -> usize {
        let mut last = None;
        let mut count = 2;
        for moved in schedule.moves() {
            count += 2 * usize::from(last != moved.produced) + 2;
            last = moved.produced;
        }
        count
    }

    #[test]
    fn what_a_kernel_stores_takes_no_room_in_the_devices_queues() {
        for operation in [
            Operation::MATMUL_REDUCE_SCATTER,
            Operation::MATMUL_ALL_REDUCE,
            Operation::ALL_GATHER_MATMUL,
        ] {
            let problem = problem(operation, &[40; 2]);
            let schedule = plan(&problem, 0, CONFIG.with_route(Route::Store)).unwrap();
            assert!(schedule.moves().next().is_some());
            assert_eq!(commands(&schedule), 3 * 2 + 4);
        }
    }

    #[test]
    fn the_commands_of_sums_on_eight_ranks_are_all_counted_and_leave_room_for_others() {
        let problem = |operation| Problem {
            n: 16_384,
            ..problem(operation, &[1024; 8])
        };
        for (count, last) in [(1, 1), (1, 4), (2, 2), (4, 8), (8, 8)] {
            let chunking = Chunking::new(count).with_last(last);
            let config = Config::new(TileShape::new(128, 256, 64), chunking, Route::Push);
            for operation in Operation::SUMS {
                let schedule = plan(&problem(operation), 3, config).unwrap();
                let counted = commands(&schedule);
                assert!(enqueued(&schedule) <= counted && counted <= COMMANDS);
                if (count, last) == (1, 4) {
                    assert!(10 * counted <= COMMANDS, "{counted} commands");
                }
            }
        }
    }

    #[test]
    fn sums_of_fp8_that_are_sent_on_have_the_type_of_their_addends() {
        let stored = |operation, output| {
            // Fewer bytes would be added everywhere, and not sent on.
            let mut problem = Problem {
                n: 8192,
                ..problem(operation, &[300; 2])
            };
            problem.layout = Layout::new(&[300; 2], 16).unwrap();
            problem.dtypes = DTypes::of_product([DType::F8E4M3; 2], output, None).unwrap();
            let mut config = CONFIG;
            config.tile = TileShape::new(128, 256, 8);
            let schedule = |route| plan(&problem, 0, config.with_route(route)).unwrap();
            [Route::Pull, Route::Push, Route::Store].map(|route| check(&schedule(route)).is_ok())
        };
        for operation in Operation::SUMS {
            assert_eq!(stored(operation, DType::Bf16), [true; 3], "{operation}");
        }
        for dtype in [DType::F32, DType::F16, DType::F8E4M3] {
            assert_eq!(
                stored(Operation::MATMUL_REDUCE_SCATTER, dtype),
                [true; 3],
                "{dtype}"
            );
        }
        // Pulled partials are added everywhere.
        let pulled_only = [true, false, false];
        assert_eq!(
            stored(Operation::MATMUL_ALL_REDUCE, DType::F8E4M3),
            pulled_only
        );
    }
}
