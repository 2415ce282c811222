//! A group is as good after ten thousand operations as after one, and a group that has gone leaves nothing.

mod support;

use std::collections::HashMap;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gemmesh::elements::Half;
use gemmesh::error::Kind;
use gemmesh::tuning::{Chunking, Route, TileShape};
use gemmesh::{
    AllGatherMatmul, Config, Error, Group, Host, Matrix, ShardedMatrix, all_gather_matmul, bf16,
    f16,
};
use rand::RngExt;
use rand::rngs::StdRng;
use support::numbers::{Reference, bits, nan, normal, rng};
use support::patience::{agreed, stretched};

/// What this process holds of the system, as far as it is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holdings {
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Holdings {
    fn now() -> Holdings {
        let mappings = fs::read_to_string("/proc/self/maps").unwrap();
        let names = fs::read_dir("/proc/self/task").unwrap().flatten();
        Holdings {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: mappings.matches("memfd:gemmesh").count(),
            // A thread that ends between the two looks is not ours to count.
            threads: names
                .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok())
                .filter(|name| name.starts_with("gemmesh"))
                .count(),
        }
    }

    /// Looks until it is as expected: workers end on their own after their group has gone, and a thread has no name
    /// before it has run.
    #[track_caller]
    fn until(as_expected: impl Fn(&Holdings) -> bool) -> Holdings {
        let begin = Instant::now();
        loop {
            let now = Holdings::now();
            if as_expected(&now) {
                return now;
            }
            assert!(
                begin.elapsed() < stretched(Duration::from_secs(20)),
                "{now:?} remain"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A test's turn: holdings are the whole process's.
struct Alone {
    before: Holdings,
    _turn: MutexGuard<'static, ()>,
}

impl Alone {
    /// Waits for the turn, and for what the test before has left to end.
    #[track_caller]
    fn now() -> Alone {
        static TURN: Mutex<()> = Mutex::new(());
        Alone {
            _turn: TURN.lock().unwrap_or_else(PoisonError::into_inner),
            before: Holdings::until(|now| (now.mappings, now.threads) == (0, 0)),
        }
    }

    /// Panics unless nothing is held that was not held before.
    #[track_caller]
    fn assert_nothing_is_left(self) {
        Holdings::until(|now| *now == self.before);
    }
}

const WORLD: usize = 3;
const WORKERS: usize = 2;
/// Stores are pushes here.
const ROUTES: [Route; 3] = [Route::Pull, Route::Push, Route::Store];
/// How many different contents a matrix has in turn, so that rows of an earlier operation are wrong ones.
const VERSIONS: usize = 3;

/// A sharded matrix, what it is multiplied with, and what came out before.
struct Item<T: Half> {
    seed: u64,
    a: ShardedMatrix<Host, T>,
    contents: Vec<Vec<T>>,
    weights: Vec<Weight<T>>,
    config: Option<Config>,
    /// Which contents are gathered on this rank, if any.
    gathered: Option<usize>,
}

struct Weight<T: Half> {
    values: Vec<T>,
    b: Matrix<Host, T>,
    out: Matrix<Host, T>,
    /// By version: what has been compared with the reference. Every later product has the same bits.
    known: HashMap<usize, Vec<T>>,
}

impl<T: Half> Weight<T> {
    /// Compares the product of `contents` with what is known under `key`, or else with the reference.
    fn compare(&mut self, key: usize, contents: &[T], seed: u64) -> Result<(), Error> {
        let out = self.out.to_vec()?;
        match self.known.get(&key) {
            Some(known) => assert_eq!(bits(&out), bits(known), "seed {seed}"),
            None => {
                let [_, k] = self.b.shape();
                let reference = Reference::new(contents, &self.values, None, k);
                reference.check(&out).unwrap();
                self.known.insert(key, out);
            }
        }
        Ok(())
    }
}

impl<T: Half> Item<T> {
    fn new(group: &Group<Host>, seed: u64) -> Result<Item<T>, Error> {
        // The same on every rank.
        let mut random = rng(seed);
        let k = random.random_range(1..30);
        let mut rows: Vec<usize> = (0..WORLD).map(|_| random.random_range(0..12)).collect();
        rows[random.random_range(0..WORLD)] += 1;
        let m: usize = rows.iter().sum();
        let config = random.random_bool(0.7).then(|| {
            Config::new(
                TileShape::new(
                    random.random_range(1..9),
                    random.random_range(1..9),
                    random.random_range(1..32),
                )
                .with_group_m(random.random_range(1..4)),
                Chunking::new(random.random_range(1..6)).with_cut_last(random.random()),
                ROUTES[random.random_range(0..ROUTES.len())],
            )
        });
        let weights = [random.random_range(1..12), random.random_range(1..12)];
        let weights = weights.into_iter().map(|n| {
            let values = normal(seed ^ (n * 31 + group.rank()) as u64, n * k);
            Ok(Weight {
                b: group.upload(&values, n, k)?,
                out: group.zeros(m, n)?,
                values,
                known: HashMap::new(),
            })
        });
        Ok(Item {
            seed,
            a: group.sharded_rows(&rows, k)?,
            contents: (0..VERSIONS)
                .map(|version| normal(seed * 100 + version as u64, m * k))
                .collect(),
            weights: weights.collect::<Result<_, Error>>()?,
            config,
            gathered: None,
        })
    }

    /// One operation, chosen by `random`, which goes the same way on every rank.
    fn operate(&mut self, random: &mut StdRng) -> Result<(), Error> {
        let kind = random.random_range(0..6);
        let version = random.random_range(0..VERSIONS);
        let Item {
            a,
            contents,
            weights,
            gathered,
            ..
        } = self;
        let weight = &mut weights[random.random_range(0..2)];
        let [m, k] = a.shape();
        let [_, n] = weight.out.shape();
        let operation = match self.config {
            Some(config) => AllGatherMatmul::new().config(config),
            None => AllGatherMatmul::new(),
        };
        let prepared = operation.prepare(&*a, n)?;
        let local = kind == 0 && gathered.is_some();
        if !local {
            let own = a.rows();
            let rows = &contents[version][own.start * k..own.end * k];
            a.shard_mut().copy_from_host(rows)?;
            a.poison(nan())?;
            *gathered = Some(version);
        }
        weight.out.copy_from_host(&vec![nan(); m * n])?;
        match kind {
            _ if local => prepared.matmul(&*a, &weight.b, &mut weight.out)?,
            0 | 1 => prepared.gather(&*a)?,
            2 => all_gather_matmul(a, &weight.b, &mut weight.out)?,
            3 => operation.run(&*a, &weight.b, &mut weight.out)?,
            _ => prepared.run(&*a, &weight.b, &mut weight.out)?,
        }
        let version = gathered.unwrap_or(version);
        assert_eq!(
            bits(&a.to_vec()?),
            bits(&contents[version]),
            "seed {}",
            self.seed
        );
        if !local && kind < 2 {
            return Ok(());
        }
        // The short call cuts up K differently, so its bits may differ from the others'.
        let key = if kind == 2 {
            VERSIONS + version
        } else {
            version
        };
        weight.compare(key, &contents[version], self.seed)
    }
}

/// Does `count` random operations, the first of which has number `first_epoch`.
#[track_caller]
fn soak(first_epoch: u32, count: usize) {
    let alone = Alone::now();
    let steady = Mutex::new(None);
    Group::<Host>::builder()
        .first_epoch(first_epoch)
        .workers(WORKERS)
        .timeout(agreed(Duration::from_secs(20)))
        .threads(WORLD, |group| {
            let mut random = rng(first_epoch.into());
            let mut wide: Vec<Item<bf16>> = (0..4)
                .map(|seed| Item::new(&group, seed))
                .collect::<Result<_, Error>>()?;
            let mut narrow: Vec<Item<f16>> = (10..13)
                .map(|seed| Item::new(&group, seed))
                .collect::<Result<_, Error>>()?;
            for number in 0..count {
                if number == count / 10 || number == count - 1 {
                    group.barrier()?;
                    if group.rank() == 0 {
                        // Of each rank a watcher, a copier and the workers.
                        let now = Holdings::until(|now| now.threads == WORLD * (2 + WORKERS));
                        let mut steady = steady.lock().unwrap();
                        assert_eq!(*steady.get_or_insert(now), now);
                    }
                    group.barrier()?;
                }
                match random.random_range(0..wide.len() + narrow.len()) {
                    index if index < wide.len() => wide[index].operate(&mut random)?,
                    index => narrow[index - wide.len()].operate(&mut random)?,
                }
                if random.random_bool(0.01) {
                    // Matrices also come and go.
                    let index = random.random_range(0..narrow.len());
                    narrow[index] = Item::new(&group, random.random_range(100..200))?;
                }
                if random.random_bool(0.01) {
                    group.barrier()?;
                }
            }
            let unused = wide.iter().flat_map(|item| &item.weights);
            let unused = unused.filter(|weight| weight.known.is_empty()).count();
            assert_eq!(unused, 0, "a product was never made");
            Ok::<(), Error>(())
        })
        .unwrap();
    alone.assert_nothing_is_left();
}

#[test]
fn ten_thousand_random_operations_across_the_wrap_of_the_epoch_are_right_and_leak_nothing() {
    soak(u32::MAX - 5_000, 10_000);
}

#[test]
fn random_operations_across_the_refresh_of_the_flags_are_right_and_leak_nothing() {
    soak((7 << 28) - 500, 1_000);
    soak((8 << 28) - 500, 1_000);
}

#[test]
fn the_operation_that_refreshes_the_flags_waits_for_its_rows_as_any_other() {
    let alone = Alone::now();
    for seed in 0..20 {
        gemmesh::testing::delay_chunks(Some(seed));
        Group::<Host>::builder()
            .first_epoch(3 << 28)
            .threads(WORLD, |group| {
                let mut item = Item::<bf16>::new(&group, seed)?;
                item.operate(&mut rng(seed))
            })
            .unwrap();
    }
    gemmesh::testing::delay_chunks(None);
    alone.assert_nothing_is_left();
}

#[test]
fn groups_that_have_gone_leave_no_descriptor_mapping_or_thread() {
    let alone = Alone::now();
    for number in 0..100 {
        let threads =
            |group: Group<Host>| Item::<bf16>::new(&group, number)?.operate(&mut rng(number));
        Group::<Host>::threads(WORLD, threads).unwrap();
    }
    for number in 0..100 {
        let address = format!("soak-{}-{number}", std::process::id());
        let rank = |rank| {
            let group = Group::<Host>::connect(rank, WORLD, &address)?;
            Item::<f16>::new(&group, number)?.operate(&mut rng(number))
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..WORLD).map(|r| scope.spawn(move || rank(r))).collect();
            for thread in ranks {
                thread.join().unwrap().unwrap();
            }
        });
    }
    alone.assert_nothing_is_left();
}

#[test]
fn groups_that_have_failed_leave_no_descriptor_mapping_or_thread() {
    let alone = Alone::now();
    for number in 0..50 {
        let error = Group::<Host>::threads(WORLD, |group| {
            let mut item = Item::<bf16>::new(&group, number)?;
            if group.rank() == 1 {
                group.sharded::<f16>(4, 4).map(drop)
            } else if number % 2 == 0 {
                group.sharded::<bf16>(4, 4).map(drop)
            } else {
                // Leaves while rank 1 waits.
                item.gathered = None;
                Ok(())
            }
        })
        .unwrap_err();
        match number % 2 {
            0 => assert!(matches!(error.kind(), Kind::CallMismatch { .. }), "{error}"),
            _ => assert!(matches!(error.kind(), Kind::RankLeft { .. }), "{error}"),
        }
    }
    alone.assert_nothing_is_left();
}
