//! Loom runs the shipped protocol in the orders that threads and memory may take, on rows that are cells: a missing
//! ordering or wait is a race that it reports, and a stale row is a wrong value.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom --no-default-features --test loom`
#![cfg(loom)]
#![allow(unsafe_code)]

#[path = "support/planners.rs"]
mod planners;

use std::convert::Infallible;
use std::sync::atomic::{AtomicI32, Ordering};

use gemmesh::fp8::Scaling;
use gemmesh::protocol::board::{Note, Post, Report};
use gemmesh::protocol::epoch::Epoch;
use gemmesh::protocol::flag::Awaited;
use gemmesh::protocol::flag::Flag;
use gemmesh::protocol::flag::FlagBlock;
use gemmesh::protocol::flag::Wait;
use gemmesh::protocol::primitive::AtomicUsize;
use gemmesh::protocol::seat::{Line, Seat, Seating, Visit};
use gemmesh::protocol::waits::{Blame, PartWait, blame};
use gemmesh::schedule::drive::{self, CopyThread, Produced};
use gemmesh::schedule::plan::matrices::{A, MATRICES, PARTIALS};
use gemmesh::schedule::plan::plan;
use gemmesh::schedule::{
    Addend, DTypes, Form, Hosts, Layout, Operation, OutputBlock, Problem, Reduction, Schedule,
    Transfer,
};
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{Config, DType};
use loom::cell::UnsafeCell;
use loom::model::Builder;
use loom::sync::Arc;
use loom::sync::mpsc::{Receiver, Sender, channel};
use loom::thread::{self, JoinHandle};
use planners::Asked;

/// Three operations across the wrap.
const EPOCHS: [Epoch; 3] = [
    Epoch::from_raw(u32::MAX - 1),
    Epoch::from_raw(u32::MAX),
    Epoch::from_raw(0),
];

/// One row of a rank's memory.
struct Row(UnsafeCell<u32>);

// SAFETY: loom reports every pair of accesses that the protocol does not order.
unsafe impl Sync for Row {}

impl Row {
    fn read(&self) -> u32 {
        // SAFETY: as above.
        self.0.with(|value| unsafe { *value })
    }

    fn write(&self, to: u32) {
        // SAFETY: as above.
        self.0.with_mut(|value| unsafe { *value = to });
    }
}

/// A rank's symmetric memory.
struct Rank {
    ready: Vec<Flag>,
    done: Vec<Flag>,
    chunk: Vec<Flag>,
    /// By number of the matrix.
    rows: Vec<Vec<Row>>,
}

/// An operation of all ranks.
struct Plans {
    /// By rank: its schedules where rows are pulled, and where they are pushed.
    schedules: Vec<[Schedule; 2]>,
    /// By rank: the rows that it owns.
    owned: Vec<Vec<usize>>,
    /// How many matrices are moved.
    matrices: usize,
}

/// A group, and its schedules.
struct World {
    ranks: Vec<Rank>,
    plans: std::sync::Arc<Plans>,
    /// Whether operations are recorded: epochs are those of their values, and flags are graph words.
    in_graph: bool,
    /// How many more looks at flags may fail before no new orders are explored. Not loom's: it orders nothing.
    patience: AtomicI32,
}

impl World {
    /// For recorded operations.
    fn in_graph(plans: &std::sync::Arc<Plans>, patience: i32) -> World {
        let world = World::new(plans, Epoch::OPEN, patience);
        World {
            in_graph: true,
            ..world
        }
    }

    fn new(plans: &std::sync::Arc<Plans>, first: Epoch, patience: i32) -> World {
        let world = plans.schedules.len();
        let flags = |count| (0..count).map(|_| Flag::new(first.previous())).collect();
        let rank = |schedules: &[Schedule; 2]| Rank {
            ready: flags(world),
            done: flags(world),
            chunk: flags(schedules[0].arrivals().len()),
            rows: schedules[0].matrices()[..plans.matrices]
                .iter()
                .map(|matrix| (0..matrix.rows).map(|_| Row(UnsafeCell::new(0))).collect())
                .collect(),
        };
        World {
            ranks: plans.schedules.iter().map(rank).collect(),
            plans: plans.clone(),
            in_graph: false,
            patience: AtomicI32::new(patience),
        }
    }

    fn blocks(&self) -> Vec<FlagBlock<'_>> {
        self.ranks
            .iter()
            .map(|rank| FlagBlock {
                ready: &rank.ready,
                done: &rank.done,
                chunk: &rank.chunk,
            })
            .collect()
    }

    /// Overwrites the rows that `rank` owns, in each matrix.
    fn write(&self, rank: usize, epoch: Epoch) {
        for (matrix, rows) in self.ranks[rank].rows.iter().enumerate() {
            for &row in &self.plans.owned[rank] {
                rows[row].write(value(matrix, row, epoch));
            }
        }
    }

    /// The same, and says so.
    fn announce(&self, rank: usize, epoch: Epoch) {
        self.write(rank, epoch);
        drive::announce(rank, epoch, &self.blocks());
    }

    fn plan(&self, rank: usize, way: Way) -> &Schedule {
        &self.plans.schedules[rank][way as usize]
    }

    fn complete(&self, rank: usize, epoch: Epoch, way: Way) {
        let (plan, blocks) = (self.plan(rank, way), self.blocks());
        let Ok(()) = match self.in_graph {
            true => drive::complete_in_graph(plan, &blocks, self),
            false => drive::complete(plan, epoch, &blocks, self),
        };
    }

    fn transfer(&self, rank: usize, epoch: Epoch, way: Way, produced: &[Produced]) {
        let mut engine = CopyThread {
            rank,
            blocks: &self.blocks(),
            produced,
            waiter: self,
            copy: |transfer: &Transfer| {
                let (from, to) = (&self.ranks[transfer.from], &self.ranks[transfer.to]);
                for moved in &transfer.regions {
                    let rows = moved.from.rows.clone().zip(moved.to.rows.clone());
                    for (read, written) in rows {
                        let value = from.rows[moved.from.matrix][read].read();
                        to.rows[moved.to.matrix][written].write(value);
                    }
                }
            },
        };
        let plan = self.plan(rank, way);
        let Ok(()) = match self.in_graph {
            true => drive::transfer_in_graph(plan, plan.moves(), &mut engine),
            false => drive::transfer(plan, plan.moves(), epoch, &mut engine),
        };
    }

    /// Takes rows from a network, each after the one before.
    fn receive(&self, rank: usize, epoch: Epoch, network: &Receiver<u32>) {
        let Rank { chunk, rows, .. } = &self.ranks[rank];
        let receive = |transfer: &Transfer| {
            let to = &transfer.regions[0].to;
            for row in to.rows.clone() {
                rows[to.matrix][row].write(network.recv().unwrap());
            }
            Ok::<(), Infallible>(())
        };
        let Ok(()) = drive::receive(self.plan(rank, Way::Push), epoch, chunk, receive);
    }

    /// Takes tiles and looks at their rows. Returns how many it has taken.
    fn multiply(&self, rank: usize, epoch: Epoch, next: &AtomicUsize) -> usize {
        let Rank { chunk, rows, .. } = &self.ranks[rank];
        let plan = self.plan(rank, Way::Pull);
        let mut count = 0;
        let Ok(()) = drive::multiply(plan, epoch, chunk, next, &[], self, |_, tile| {
            for row in plan.product().unwrap().rows(tile) {
                for (matrix, rows) in rows.iter().enumerate() {
                    let found = rows[row].read();
                    assert_eq!(found, value(matrix, row, epoch), "row {row}, {epoch:?}");
                }
            }
            count += 1;
        });
        count
    }

    /// Looks at rows as they come.
    fn consume(&self, rank: usize, epoch: Epoch, way: Way) {
        let Rank { chunk, rows, .. } = &self.ranks[rank];
        let look = |arrival: Option<&Transfer>| {
            for moved in arrival.iter().flat_map(|arrival| &arrival.regions) {
                for row in moved.to.rows.clone() {
                    let found = rows[moved.to.matrix][row].read();
                    let expected = value(moved.to.matrix, row, epoch);
                    assert_eq!(found, expected, "row {row}, {epoch:?}");
                }
            }
            Ok(())
        };
        let Ok(()) = drive::consume(self.plan(rank, way), Epoch::OPEN, chunk, self, look);
    }

    /// Makes the partials of the peers' rows, and looks at those that are added to the own.
    fn multiply_and_add(
        &self,
        rank: usize,
        epoch: Epoch,
        produced: &[Produced],
        next: &AtomicUsize,
    ) {
        let Rank { chunk, rows, .. } = &self.ranks[rank];
        let plan = self.plan(rank, Way::Push);
        let product = plan.product().unwrap();
        let Ok(()) = drive::multiply(plan, epoch, chunk, next, produced, self, |_, tile| {
            let OutputBlock {
                rows: block, sum, ..
            } = product.block(tile);
            for row in product.rows(tile) {
                let offset = row - block.start;
                if sum.out == PARTIALS {
                    rows[sum.out][sum.first + offset].write(value(rank, row, epoch));
                }
                for (from, addend) in sum.addends.iter().enumerate() {
                    if let Addend::Rows { matrix, first } = addend {
                        let found = rows[*matrix][first + offset].read();
                        assert_eq!(found, value(from, row, epoch), "row {row}, {epoch:?}");
                    }
                }
            }
        });
    }

    /// Looks at all that is added up at the end.
    fn add(&self, rank: usize, epoch: Epoch, produced: &[Produced]) {
        let Rank { chunk, rows, .. } = &self.ranks[rank];
        let plan = self.plan(rank, Way::Push);
        let reduction = plan.reduction().unwrap();
        let Ok(()) = drive::wait_addends(plan, epoch, chunk, produced, self);
        for (from, addend) in reduction.sum.addends.iter().enumerate() {
            let Addend::Rows { matrix, first } = *addend else {
                unreachable!("{addend:?}")
            };
            for row in 0..reduction.rows {
                let found = rows[matrix][first + row].read();
                assert_eq!(found, value(from, row, epoch), "row {row}, {epoch:?}");
            }
        }
    }

    /// The life of the copy thread of `rank`, which is told to begin and tells that it has ended.
    fn copy(&self, rank: usize, begin: &Receiver<Epoch>, ended: &Sender<()>, ways: &[Way]) {
        for way in ways {
            let epoch = begin.recv().unwrap();
            self.transfer(rank, epoch, *way, &[]);
            ended.send(()).unwrap();
        }
    }

    /// One operation of `rank`, as the host backend does it.
    fn operate(
        &self,
        rank: usize,
        epoch: Epoch,
        way: Way,
        begin: &Sender<Epoch>,
        ended: &Receiver<()>,
    ) {
        if self.in_graph {
            self.write(rank, epoch);
            drive::announce_in_graph(self.plan(rank, way), &self.blocks());
            begin.send(epoch).unwrap();
            self.consume(rank, epoch, way);
        } else {
            self.announce(rank, epoch);
            begin.send(epoch).unwrap();
            let tiles = self.multiply(rank, epoch, &AtomicUsize::new(0));
            assert_eq!(tiles, self.plan(rank, way).tiles().len());
        }
        ended.recv().unwrap();
        self.complete(rank, epoch, way);
    }
}

/// Who moves rows in an operation.
#[derive(Clone, Copy)]
enum Way {
    Pull,
    Push,
}

/// Two threads that wait can give way to each other for ever, in ever new orders. After as many failed looks as
/// its patience an order goes on in the fair way, to its end, and no orders that begin alike are explored.
impl Wait for World {
    type Error = Infallible;

    fn wait(&self, flag: &Flag, epoch: Epoch, _: Awaited) -> Result<(), Infallible> {
        while !flag.reached(epoch) {
            if self.patience.fetch_sub(1, Ordering::Relaxed) == 0 {
                loom::skip_branch();
            }
            thread::yield_now();
        }
        Ok(())
    }
}

/// What a row holds in an operation.
fn value(matrix: usize, row: usize, epoch: Epoch) -> u32 {
    let place = 10 * matrix + row + 1;
    epoch.raw().wrapping_mul(100).wrapping_add(place as u32)
}

/// The plans of all ranks, for tiles of two rows.
fn plans(rows: &[usize], chunks: usize) -> std::sync::Arc<Plans> {
    let config = |route| Config::new(TILE, Chunking::new(chunks), route);
    let layout = Layout::new(rows, 1).unwrap();
    let problem = Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, 1);
    let plan = |rank, route| plan(&problem, rank, config(route)).unwrap();
    let owned = |rank| problem.layout.rows_of(rank).collect();
    std::sync::Arc::new(Plans {
        schedules: both_ways(rows.len(), plan),
        owned: (0..rows.len()).map(owned).collect(),
        matrices: 1,
    })
}

/// Of two rows.
const TILE: TileShape = TileShape::new(2, 1, 1);

/// A chunk a shard.
fn by(route: Route) -> Config {
    Config::new(TILE, Chunking::new(1), route)
}

/// The schedules of `world` ranks, pulled and pushed, as `plan` makes them.
fn both_ways(world: usize, plan: impl Fn(usize, Route) -> Schedule) -> Vec<[Schedule; 2]> {
    (0..world)
        .map(|rank| [Route::Pull, Route::Push].map(|route| plan(rank, route)))
        .collect()
}

/// What a thread will run. Loom's objects can't be dropped by a thread that never began, when a race has been found.
struct Pending<F>(Option<F>);

impl<F> Drop for Pending<F> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(self.0.take());
        }
    }
}

fn spawn<T: 'static>(run: impl FnOnce() -> T + 'static) -> JoinHandle<T> {
    let mut pending = Pending(Some(run));
    thread::spawn(move || {
        let run = pending.0.take().unwrap();
        run()
    })
}

/// Runs `model` in every order with at most so many preemptions; without a number, with any.
fn explore(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.max_branches = 10_000;
    builder.preemption_bound = preemptions;
    let orders = std::sync::Arc::new(AtomicI32::new(0));
    let counted = orders.clone();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        model();
    });
    println!("{} orders", orders.load(Ordering::Relaxed));
}

/// Two ranks, two chunks a shard, three epochs. The orders are explored from the operation `explored` on.
fn two_ranks(ways: [Way; 3], explored: usize, patience: i32) {
    // The middle of three tiles straddles the shards: on each rank it needs a chunk and own rows.
    let plans = plans(&[3, 3], 2);
    let arrivals = |plans: &[Schedule; 2]| plans[0].arrivals().len();
    assert!(plans.schedules.iter().all(|plans| arrivals(plans) == 2));
    two_ranks_of(plans, ways, explored, patience);
}

/// As [`two_ranks`], of any operation.
fn two_ranks_of(plans: std::sync::Arc<Plans>, ways: [Way; 3], explored: usize, patience: i32) {
    let world = move || World::new(&plans, EPOCHS[0], i32::MAX);
    two_ranks_in(world, ways, explored, patience);
}

/// As [`two_ranks`], of any world.
fn two_ranks_in(
    world: impl Fn() -> World + Send + Sync + 'static,
    ways: [Way; 3],
    explored: usize,
    patience: i32,
) {
    explore(Some(1), move || {
        loom::stop_exploring();
        let world = Arc::new(world());
        let rank = |rank: usize| {
            let ((begin, begun), (end, ended)) = (channel(), channel());
            let copied = world.clone();
            let copier = spawn(move || copied.copy(rank, &begun, &end, &ways));
            let world = world.clone();
            move || {
                for (index, epoch) in EPOCHS.into_iter().enumerate() {
                    if (rank, index) == (0, explored) {
                        world.patience.store(patience, Ordering::Relaxed);
                        loom::explore();
                    }
                    world.operate(rank, epoch, ways[index], &begin, &ended);
                }
                copier.join().unwrap();
            }
        };
        let (rank_0, rank_1) = (rank(0), rank(1));
        let rank_1 = spawn(rank_1);
        rank_0();
        rank_1.join().unwrap();
    });
}

#[test]
fn two_ranks_see_each_others_rows_in_the_first_operation() {
    two_ranks([Way::Pull; 3], 0, 6);
}

#[test]
fn two_ranks_see_each_others_new_rows_in_the_next_operation() {
    two_ranks([Way::Pull; 3], 1, 6);
}

#[test]
fn two_ranks_see_each_others_new_rows_across_the_wrap() {
    two_ranks([Way::Pull; 3], 2, 7);
}

#[test]
fn pushed_rows_are_seen_and_not_overwritten_under_tiles() {
    two_ranks([Way::Push; 3], 1, 6);
}

#[test]
fn rows_may_be_pushed_after_pulls_and_pulled_after_pushes() {
    two_ranks([Way::Pull, Way::Push, Way::Pull], 1, 6);
}

#[test]
fn rows_that_a_rank_owns_in_two_blocks_are_seen_and_not_overwritten() {
    const ASKED: Asked = Asked {
        world: 2,
        block: 1,
        k: 1,
        n: 1,
    };
    for way in [Way::Pull, Way::Push] {
        let plan = |rank, route| planners::staged(ASKED, 2, rank, by(route));
        let plans = Plans {
            schedules: both_ways(2, plan),
            owned: vec![vec![0, 2], vec![1, 3]],
            matrices: 1,
        };
        two_ranks_of(plans.into(), [way; 3], 1, 6);
    }
}

/// The library's gather of rows of fp8, whose blocks have scales.
fn scaled_gather(world: usize, rank: usize, route: Route) -> Schedule {
    const BLOCK: usize = 128;
    let layout = Layout::balanced(2 * world, BLOCK, world).unwrap();
    let operands = [DType::F8E4M3; 2];
    let problem = Problem {
        dtypes: DTypes::of_product(operands, DType::Bf16, None).unwrap(),
        beside: Some((DType::F32, 1)),
        form: Form {
            a_scaling: Scaling::ShardedBlocks,
            b_scaling: [Scaling::Blocks].into_iter().collect(),
            ..Form::default()
        },
        ..Problem::new(Operation::ALL_GATHER_MATMUL, DType::F8E4M3, layout, 16)
    };
    let tile = TileShape::new(2, 16, BLOCK);
    let config = Config::new(tile, Chunking::new(1), route);
    plan(&problem, rank, config).unwrap()
}

#[test]
fn a_matrix_and_its_scales_are_seen_under_one_flag() {
    for way in [Way::Pull, Way::Push] {
        let plan = |rank, route| scaled_gather(2, rank, route);
        let plans = Plans {
            schedules: both_ways(2, plan),
            owned: vec![vec![0, 1], vec![2, 3]],
            matrices: 2,
        };
        two_ranks_of(plans.into(), [way; 3], 1, 6);
    }
}

#[test]
fn graph_words_of_replays_are_closed_before_they_are_opened_again() {
    const ASKED: Asked = Asked {
        world: 2,
        block: 2,
        k: 1,
        n: 0,
    };
    let plan = |rank, route| planners::with_scales(ASKED, true, rank, by(route));
    let plans = std::sync::Arc::new(Plans {
        schedules: both_ways(2, plan),
        owned: vec![vec![0, 1], vec![2, 3]],
        matrices: 2,
    });
    for ways in [
        [Way::Pull; 3],
        [Way::Push; 3],
        [Way::Pull, Way::Push, Way::Pull],
    ] {
        let plans = plans.clone();
        let world = move || World::in_graph(&plans, i32::MAX);
        two_ranks_in(world, ways, 1, 6);
    }
}

#[test]
fn rows_that_another_rank_passes_on_are_seen() {
    const ASKED: Asked = Asked {
        world: 3,
        block: 1,
        k: 1,
        n: 1,
    };
    let plan = |rank, route| planners::relayed(ASKED, rank, by(route));
    let plans = std::sync::Arc::new(Plans {
        schedules: both_ways(3, plan),
        owned: vec![vec![0], vec![1], vec![2]],
        matrices: 1,
    });
    explore(Some(2), move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 3));
        (0..3).for_each(|rank| world.announce(rank, epoch));
        let copier = |rank| {
            let world = world.clone();
            spawn(move || world.transfer(rank, epoch, Way::Push, &[]))
        };
        let copiers = [copier(0), copier(1), copier(2)];
        assert_eq!(world.multiply(2, epoch, &AtomicUsize::new(0)), 2);
        for copier in copiers {
            copier.join().unwrap();
        }
    });
}

/// Rank 0 receives rows of rank 2 over a network and passes them on to rank 1. A worker of rank 1 reads them.
#[test]
fn rows_that_come_over_a_network_are_passed_on_and_seen() {
    let layout = Layout::new(&[1; 4], 1).unwrap();
    let problem = Problem {
        hosts: Hosts::of(&["a", "a", "b", "b"]).unwrap(),
        ..Problem::new(Operation::ALL_GATHER_MATMUL, DType::Bf16, layout, 1)
    };
    let plan = |rank, route| plan(&problem, rank, by(route)).unwrap();
    let plans = std::sync::Arc::new(Plans {
        schedules: both_ways(4, plan),
        owned: (0..4).map(|rank| vec![rank]).collect(),
        matrices: 1,
    });
    explore(Some(2), move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 3));
        (0..4).for_each(|rank| world.announce(rank, epoch));
        // The values of rows that are on the network, by receiver.
        let (networks, received): (Vec<_>, Vec<_>) = (0..2).map(|_| channel()).unzip();
        for sender in [2, 3] {
            for transfer in world.plan(sender, Way::Push).sent() {
                for row in transfer.regions[0].from.rows.clone() {
                    let value = world.ranks[sender].rows[0][row].read();
                    networks[transfer.to].send(value).unwrap();
                }
            }
        }
        let mut threads = vec![spawn({
            let world = world.clone();
            move || world.transfer(0, epoch, Way::Push, &[])
        })];
        for (rank, received) in received.into_iter().enumerate() {
            let world = world.clone();
            threads.push(spawn(move || world.receive(rank, epoch, &received)));
        }
        assert_eq!(world.multiply(1, epoch, &AtomicUsize::new(0)), 2);
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// The plans of all ranks that add up partials, for tiles of two rows.
fn sums(operation: Operation, rows: &[usize], chunks: usize) -> std::sync::Arc<Plans> {
    sums_over(Hosts::default(), operation, rows, chunks)
}

/// As [`sums`], over hosts.
fn sums_over(
    hosts: Hosts,
    operation: Operation,
    rows: &[usize],
    chunks: usize,
) -> std::sync::Arc<Plans> {
    let layout = Layout::new(rows, 1).unwrap();
    let problem = Problem {
        hosts,
        ..Problem::new(operation, DType::Bf16, layout, 1)
    };
    let config = Config::new(TILE, Chunking::new(chunks), Route::Push);
    let plan = |rank, _| plan(&problem, rank, config).unwrap();
    std::sync::Arc::new(Plans {
        schedules: both_ways(rows.len(), plan),
        owned: vec![Vec::new(); rows.len()],
        matrices: MATRICES,
    })
}

/// Made ready for an operation.
fn produced(world: &World, rank: usize, epoch: Epoch) -> Vec<Produced> {
    let mut produced = Produced::of(world.plan(rank, Way::Push));
    produced.iter_mut().for_each(|block| block.begin(epoch));
    produced
}

/// Two ranks with a tile for each other in so many operations; the orders are explored from the last one on.
fn two_ranks_add(epochs: &'static [Epoch], patience: i32) {
    let plans = sums(Operation::MATMUL_REDUCE_SCATTER, &[2, 2], 1);
    explore(Some(1), move || {
        loom::stop_exploring();
        let world = Arc::new(World::new(&plans, epochs[0], i32::MAX));
        let rank = |rank: usize| {
            let ((begin, begun), (end, ended)) = (channel(), channel());
            let copied = world.clone();
            let copier = spawn(move || {
                for _ in epochs {
                    let (epoch, produced): (_, std::sync::Arc<Vec<Produced>>) =
                        begun.recv().unwrap();
                    copied.transfer(rank, epoch, Way::Push, &produced);
                    drop(produced);
                    end.send(()).unwrap();
                }
            });
            let world = world.clone();
            move || {
                for (index, &epoch) in epochs.iter().enumerate() {
                    if (rank, index + 1) == (0, epochs.len()) {
                        world.patience.store(patience, Ordering::Relaxed);
                        loom::explore();
                    }
                    let produced = std::sync::Arc::new(produced(&world, rank, epoch));
                    world.announce(rank, epoch);
                    begin.send((epoch, produced.clone())).unwrap();
                    world.multiply_and_add(rank, epoch, &produced, &AtomicUsize::new(0));
                    ended.recv().unwrap();
                    world.complete(rank, epoch, Way::Push);
                }
                copier.join().unwrap();
            }
        };
        let (rank_0, rank_1) = (rank(0), rank(1));
        let rank_1 = spawn(rank_1);
        rank_0();
        rank_1.join().unwrap();
    });
}

#[test]
fn partials_are_there_when_they_are_added() {
    two_ranks_add(&EPOCHS[..1], 6);
}

#[test]
fn slots_are_not_overwritten_before_they_have_been_added() {
    two_ranks_add(&EPOCHS[1..], 6);
}

#[test]
fn a_block_is_sent_when_all_workers_have_made_their_tiles_of_it() {
    let plans = sums(Operation::MATMUL_REDUCE_SCATTER, &[0, 4], 1);
    explore(Some(2), move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 4));
        (0..2).for_each(|rank| world.announce(rank, epoch));
        let produced = std::sync::Arc::new(produced(&world, 0, epoch));
        let next = std::sync::Arc::new(AtomicUsize::new(0));
        let copied = (world.clone(), produced.clone());
        let copier = spawn(move || copied.0.transfer(0, epoch, Way::Push, &copied.1));
        let other = (world.clone(), produced.clone(), next.clone());
        let other = spawn(move || other.0.multiply_and_add(0, epoch, &other.1, &other.2));
        world.multiply_and_add(0, epoch, &produced, &next);
        other.join().unwrap();
        copier.join().unwrap();
        let slot = &world.plan(1, Way::Push).arrivals()[0].regions[0].to;
        for (row, place) in slot.rows.clone().enumerate() {
            let found = world.ranks[1].rows[slot.matrix][place].read();
            // The acquire of whoever reads them stands for that of its tiles.
            assert!(world.ranks[1].chunk[0].reached(epoch));
            assert_eq!(found, value(0, row, epoch));
        }
    });
}

#[test]
fn a_block_goes_over_a_network_when_all_workers_have_made_their_tiles_of_it() {
    let hosts = Hosts::of(&["a", "b"]).unwrap();
    let plans = sums_over(hosts, Operation::MATMUL_REDUCE_SCATTER, &[0, 4], 1);
    explore(Some(2), move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 4));
        let produced = std::sync::Arc::new(produced(&world, 0, epoch));
        let next = std::sync::Arc::new(AtomicUsize::new(0));
        let (network, received) = channel();
        let sent = (world.clone(), produced.clone());
        let sender = spawn(move || {
            let send = |transfer: &Transfer| {
                let from = &transfer.regions[0].from;
                for row in from.rows.clone() {
                    let row = &sent.0.ranks[0].rows[from.matrix][row];
                    network.send(row.read()).unwrap();
                }
                Ok(())
            };
            let plan = sent.0.plan(0, Way::Push);
            // Sums of products are blocks.
            let add = |_: &Reduction| unreachable!("nothing is added without a product");
            let Ok(()) = drive::send(plan, epoch, &[], &sent.1, &*sent.0, add, send);
        });
        let other = (world.clone(), produced.clone(), next.clone());
        let other = spawn(move || other.0.multiply_and_add(0, epoch, &other.1, &other.2));
        world.multiply_and_add(0, epoch, &produced, &next);
        other.join().unwrap();
        sender.join().unwrap();
        // A worker of rank 1 looks at what it adds.
        world.receive(1, epoch, &received);
        world.multiply_and_add(1, epoch, &[], &AtomicUsize::new(0));
    });
}

#[test]
fn a_host_s_sum_is_made_of_addends_that_have_come() {
    /// What stands in the place of the sum.
    const SUM: u32 = 7;
    let hosts = Hosts::of(&["a", "a", "b", "b"]).unwrap();
    // Rank 0 is the gateway to rank 2, and rank 1 its neighbour.
    let plans = sums_over(hosts, Operation::REDUCE_SCATTER, &[0, 0, 1, 0], 1);
    explore(Some(2), move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 4));
        for rank in 0..2 {
            world.ranks[rank].rows[A][0].write(value(rank, 0, epoch));
            drive::announce(rank, epoch, &world.blocks());
        }
        let other = world.clone();
        let neighbour = spawn(move || other.transfer(1, epoch, Way::Push, &[]));
        let Rank { chunk, rows, .. } = &world.ranks[0];
        let add = |Reduction { sum, .. }: &Reduction| {
            for (from, addend) in sum.addends.iter().enumerate() {
                let Addend::Rows { matrix, first } = *addend else {
                    unreachable!("{addend:?}")
                };
                assert_eq!(rows[matrix][first].read(), value(from, 0, epoch));
            }
            rows[sum.out][sum.first].write(SUM);
        };
        let mut sent = 0;
        let send = |transfer: &Transfer| {
            let from = &transfer.regions[0].from;
            assert_eq!(rows[from.matrix][from.rows.start].read(), SUM);
            sent += 1;
            Ok(())
        };
        let plan = world.plan(0, Way::Push);
        let Ok(()) = drive::send(plan, epoch, chunk, &[], &*world, add, send);
        neighbour.join().unwrap();
        assert_eq!(sent, 1);
    });
}

#[test]
fn all_partials_are_there_when_a_rank_adds_them_up_itself() {
    let plans = sums(Operation::MATMUL_ALL_REDUCE, &[2, 2], 1);
    explore(Some(2), move || {
        loom::stop_exploring();
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 4));
        (0..2).for_each(|rank| world.announce(rank, epoch));
        let of_rank_1 = std::sync::Arc::new(produced(&world, 1, epoch));
        world.multiply_and_add(1, epoch, &of_rank_1, &AtomicUsize::new(0));
        loom::explore();
        let sender = world.clone();
        let copier = spawn(move || sender.transfer(1, epoch, Way::Push, &of_rank_1));
        let produced = std::sync::Arc::new(produced(&world, 0, epoch));
        let next = std::sync::Arc::new(AtomicUsize::new(0));
        let work = {
            let (world, produced) = (world.clone(), produced.clone());
            move || {
                world.multiply_and_add(0, epoch, &produced, &next);
                world.add(0, epoch, &produced);
            }
        };
        let other = spawn(work.clone());
        work();
        other.join().unwrap();
        copier.join().unwrap();
    });
}

/// Rank 0 owns all rows, and overwrites them as soon as rank 1, which gathers and multiplies, has pulled them.
fn one_direction(epochs: &'static [Epoch], preemptions: Option<usize>, patience: i32) {
    let plans = plans(&[3, 0], 2);
    assert_eq!(plans.schedules[1][0].arrivals().len(), 2);
    explore(preemptions, move || {
        let world = Arc::new(World::new(&plans, epochs[0], patience));
        let ((begin, begun), (end, ended)) = (channel(), channel());
        let copied = world.clone();
        let copier = spawn(move || copied.copy(1, &begun, &end, &vec![Way::Pull; epochs.len()]));
        let multiplied = world.clone();
        let worker = spawn(move || {
            for &epoch in epochs {
                begin.send(epoch).unwrap();
                assert_eq!(multiplied.multiply(1, epoch, &AtomicUsize::new(0)), 2);
                ended.recv().unwrap();
            }
        });
        for &epoch in epochs {
            world.announce(0, epoch);
            world.complete(0, epoch, Way::Pull);
        }
        copier.join().unwrap();
        worker.join().unwrap();
    });
}

#[test]
fn rows_are_seen_in_every_order_of_one_operation() {
    one_direction(&EPOCHS[2..], None, 4);
}

#[test]
fn rows_are_not_overwritten_before_they_are_pulled() {
    one_direction(&EPOCHS, Some(2), 7);
}

#[test]
fn workers_share_the_tiles_and_wait_for_both_shards_of_a_tile() {
    // Rank 0 owns nothing; the middle of three tiles straddles the shards of ranks 1 and 2.
    let plans = plans(&[0, 3, 3], 1);
    assert_eq!(plans.schedules[0][0].tiles()[1].flags(), 0..2);
    explore(None, move || {
        let epoch = EPOCHS[1];
        let world = Arc::new(World::new(&plans, epoch, 2));
        let next = Arc::new(AtomicUsize::new(0));
        world.announce(1, epoch);
        world.announce(2, epoch);
        let copied = world.clone();
        let copier = spawn(move || copied.transfer(0, epoch, Way::Pull, &[]));
        let (shared, its_next) = (world.clone(), next.clone());
        let worker = spawn(move || shared.multiply(0, epoch, &its_next));
        let tiles = world.multiply(0, epoch, &next) + worker.join().unwrap();
        assert_eq!(tiles, 3);
        copier.join().unwrap();
    });
}

#[test]
fn of_two_ranks_that_post_different_calls_one_sees_it_whole() {
    explore(None, || {
        let posts: Arc<[Post<2, 1>; 2]> = Arc::new([Post::new(), Post::new()]);
        let words = |rank: usize| [10 + rank as u64, 20 + rank as u64];
        let post = move |posts: &[Post<2, 1>; 2], rank: usize| {
            let other = 1 - rank;
            let seen = posts[rank].post(1, words(rank), [(other, &posts[other])]);
            if let Some(seen) = seen {
                assert_eq!(seen, (other, words(other)));
            }
            seen.is_some()
        };
        let theirs = posts.clone();
        let one = spawn(move || post(&theirs, 1));
        let zero = post(&posts, 0);
        assert!(one.join().unwrap() || zero, "both have missed it");
    });
}

#[test]
fn a_note_is_read_whole_while_the_next_is_written() {
    explore(None, || {
        let note: Arc<Note<2>> = Arc::new(Note::new());
        note.write(1, &[1; 2]);
        let written = note.clone();
        let writer = spawn(move || written.write(2, &[2; 2]));
        for number in [1, 2] {
            if let Some(bytes) = note.read(number) {
                assert_eq!(bytes, [number as u8; 2]);
            }
        }
        writer.join().unwrap();
        assert_eq!(note.read(1), None);
        assert_eq!(note.read(2), Some(vec![2; 2]));
    });
}

/// Waits across a family: rank 1 waits in a part for rank 2, and then for rank 3. Rank 0 waits for rank 1 in the whole
/// group. It blames none but these, and the call that it tells of is that of the wait which it has seen.
#[test]
fn waits_across_a_family_are_followed_with_their_calls() {
    explore(None, || {
        let noted: Arc<PartWait<1>> = Arc::new(PartWait::new());
        let waiting = noted.clone();
        let rank_1 = spawn(move || {
            for peer in [2, 3] {
                waiting.note(peer, 1, Some(&[peer as u8]));
                waiting.note(peer, 2, None);
            }
        });
        let found = || {
            let in_parts = |rank| (rank == 1).then(|| noted.wait().peer(2, 1)).flatten();
            let Blame {
                rank,
                waiting_in_part,
            } = blame(1, 0, |rank| [(rank == 0).then_some(1), in_parts(rank)]);
            let call = waiting_in_part.and_then(|_| noted.call(rank));
            (rank, waiting_in_part, call)
        };
        let (rank, waiting_in_part, call) = found();
        assert_eq!(waiting_in_part, (rank != 1).then_some(1));
        if let Some(call) = call {
            assert_eq!(call, [rank as u8]);
        } else {
            // The call of the first wait may be overwritten. That of the last one stays.
            assert!(rank == 1 || rank == 2, "rank {rank}, without a call");
        }
        rank_1.join().unwrap();
        assert_eq!(found(), (3, Some(1), Some(vec![3])));
    });
}

#[test]
fn of_two_reports_one_is_read_whole() {
    explore(None, || {
        let report: Arc<Report<2>> = Arc::new(Report::new());
        let write = |rank: usize| {
            let report = report.clone();
            spawn(move || report.write(rank, &[rank as u8 + 1; 2]))
        };
        let ranks = [write(0), write(1)];
        if let Some(bytes) = report.read() {
            assert_eq!(bytes, [report.reporter().unwrap() as u8 + 1; 2]);
        }
        let first = ranks.map(|rank| rank.join().unwrap());
        assert_ne!(first[0], first[1]);
        assert_eq!(report.reporter(), Some(first[1].into()));
    });
}

/// A connection that arrives at rank 0, as it says of itself.
type Arrival = (Visit, Line);

/// Connections of a leader arrive at rank 0 in any order. Those of the last visit get the seat.
fn meet(arrivals: &'static [Arrival], last: Visit) {
    explore(None, move || {
        let (arrive, arrived) = channel();
        let deliver = |&arrival: &'static Arrival| {
            let arrive = arrive.clone();
            spawn(move || arrive.send(arrival).unwrap())
        };
        let network: Vec<_> = arrivals.iter().map(deliver).collect();
        let mut seat = Seat::default();
        for _ in arrivals {
            let (visit, line) = arrived.recv().unwrap();
            let seating = seat.take(visit, line, (visit, line), |_| false);
            assert!(!matches!(seating, Seating::Rival(_)), "its own rival");
        }
        let both = (Some((last, Line::Messages)), Some((last, Line::Mirror)));
        assert_eq!(seat.into_connections(), both);
        network.into_iter().for_each(|one| one.join().unwrap());
    });
}

const FIRST: Visit = Visit {
    leader: 7,
    number: 1,
};
const SECOND: Visit = Visit {
    leader: 7,
    number: 2,
};

#[test]
fn two_connections_of_a_leader_arrive_in_either_order() {
    meet(&[(FIRST, Line::Messages), (FIRST, Line::Mirror)], FIRST);
}

#[test]
fn a_connection_that_is_late_until_the_next_visit_has_no_place_in_it() {
    let arrivals = &[
        (FIRST, Line::Messages),
        (FIRST, Line::Mirror),
        (SECOND, Line::Messages),
        (SECOND, Line::Mirror),
    ];
    meet(arrivals, SECOND);
}
