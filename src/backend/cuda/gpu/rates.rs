//! Rates of a device, from which the model predicts times.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::schedule::Route;

/// Rates of a device per microsecond, and times in microseconds. All ranks use those of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Multiprocessors that a kernel can have.
    pub multiprocessors: usize,
    /// From the launch to the first product, and from the last product to the kernel's end.
    pub start: f64,
    /// What `start` grows by, for each doubling of the CTAs of a cluster.
    pub cluster: f64,
    /// Operations of one multiprocessor, two a product.
    pub operations: f64,
    /// What each step through K takes, apart from its operations.
    pub step: f64,
    /// Operations of one multiprocessor on fp8, with those that promote sums.
    #[serde(default = "default::promoted")]
    pub promoted: f64,
    /// The same, if blocks have scales.
    #[serde(default = "default::scaled")]
    pub scaled: f64,
    /// What each step through K of fp8 takes, apart from these.
    #[serde(default = "default::promoted_step")]
    pub promoted_step: f64,
    /// Bytes that one multiprocessor loads.
    pub loaded: f64,
    /// Bytes that all multiprocessors load through the L2 cache.
    pub cached: f64,
    /// How many single CTAs' loads of the same bytes count once. They lie on one GPC, and load at about the same time.
    pub merged: f64,
    /// Steps through K in which single CTAs drift apart, so that few of their loads still count once.
    pub drift: f64,
    /// Bytes that come from device memory.
    pub read: f64,
    /// What a tile takes, apart from its products, for each of its columns of 128 rows.
    pub column: f64,
    /// The same for a tile of swapped operands, which is stored differently.
    #[serde(alias = "exchanged_column")]
    pub swap_ab_column: f64,
    /// What CTAs that share K take to wait for one another.
    pub join: f64,
    /// What CTAs that share K take to add 128 rows of 256 columns.
    pub split: f64,
    /// What a slice of K takes to be counted.
    pub slice_join: f64,
    /// Bytes of a slice's partial sums that one multiprocessor stores or loads.
    pub summed: f64,
    /// Bytes of partial sums that all multiprocessors store or load.
    pub summed_cached: f64,
    /// Rows that copy engines of their receivers move.
    pub pull: Link,
    /// Rows that copy engines of their owners move.
    pub push: Link,
    /// Rows that kernels of their owners store.
    pub store: Link,
}

/// Rates that older files lack.
mod default {
    use super::H200;

    pub fn promoted() -> f64 {
        H200.promoted
    }

    pub fn scaled() -> f64 {
        H200.scaled
    }

    pub fn promoted_step() -> f64 {
        H200.promoted_step
    }
}

/// The times and the rate of a route.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Time before the first tile and behind the last one.
    pub around: f64,
    /// Time until the first byte moves, while own tiles are made.
    pub start: f64,
    /// Bytes in a microsecond.
    pub bytes: f64,
    /// Time between two chunks, with the flag.
    pub chunk: f64,
}

/// One number of [`Rates`].
#[derive(Debug)]
pub struct Field<'a> {
    pub name: &'static str,
    pub quantity: Quantity,
    pub value: &'a mut f64,
}

impl<'a> Field<'a> {
    fn new(name: &'static str, quantity: Quantity, value: &'a mut f64) -> Field<'a> {
        Field {
            name,
            quantity,
            value,
        }
    }
}

impl Link {
    fn fields(&mut self, [around, start, bytes, chunk]: [&'static str; 4]) -> [Field<'_>; 4] {
        [
            Field::new(around, Quantity::Time, &mut self.around),
            Field::new(start, Quantity::Time, &mut self.start),
            Field::new(bytes, Quantity::Rate, &mut self.bytes),
            Field::new(chunk, Quantity::Time, &mut self.chunk),
        ]
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Quantity {
    /// Per microsecond, or a number of CTAs or steps: above 0.
    Rate,
    /// Microseconds: not below 0.
    Time,
}

/// Rates of an H200.
///
/// They are fitted to 306 shapes by all kernels, so that the kernel that is chosen is the fastest: what a kernel takes
/// where others are far faster counts little. The links are fitted to 74 shapes (benches/NOTES.md). Tests:
/// `products_are_predicted_within_a_fifth_and_most_within_seven_percent`,
/// `products_whose_rows_arrive_meanwhile_are_predicted_within_a_fifth`.
pub const H200: Rates = Rates {
    multiprocessors: 132,
    start: 4.52,
    cluster: 0.085,
    operations: 7.66e6,
    step: 0.060,
    promoted: 14.1e6,
    scaled: 12.1e6,
    promoted_step: 0.118,
    loaded: 122e3,
    cached: 8.67e6,
    merged: 10.4,
    drift: 232.0,
    read: 4.77e6,
    column: 0.0059,
    swap_ab_column: 0.0092,
    join: 0.26,
    split: 6.2,
    slice_join: 2.15,
    summed: 78e3,
    summed_cached: 4.05e6,
    pull: Link {
        around: 18.3,
        start: 0.0,
        bytes: 378e3,
        chunk: 5.2,
    },
    push: Link {
        around: 11.3,
        start: 3.9,
        bytes: 377e3,
        chunk: 4.2,
    },
    store: Link {
        around: 9.6,
        start: 0.0,
        bytes: 313e3,
        chunk: 0.0,
    },
};

/// Rates of an H100, fitted to the same 306 shapes. Its links were not measured, so they are the H200's.
pub const H100: Rates = Rates {
    start: 4.55,
    cluster: 0.21,
    step: 0.0727,
    loaded: 113e3,
    cached: 7.53e6,
    merged: 11.9,
    drift: 181.0,
    read: 3.05e6,
    column: 0.0042,
    swap_ab_column: 0.0073,
    join: 0.62,
    split: 5.87,
    slice_join: 2.63,
    summed: 87.6e3,
    summed_cached: 3.82e6,
    ..H200
};

/// More than any GPU has.
const MOST_MULTIPROCESSORS: usize = 4096;

/// The environment variable that names a file with the rates of a device: a [`Rates`] as JSON.
pub const VARIABLE: &str = "GEMMESH_RATES";

impl Rates {
    /// Reads the rates from the file that the environment names. Without one, takes the library's rates for this GPU.
    ///
    /// # Errors
    /// [`Kind::System`] if the file can't be read, or its rates are invalid.
    pub fn load(rank: usize, gpu: &str) -> Result<Rates> {
        let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
            return Ok(Rates::of(gpu));
        };
        let action = format!("read {} ({VARIABLE})", path.display());
        let text = fs::read_to_string(&path).map_err(Error::system(rank, &action))?;
        let parsed: Result<Rates, String> = serde_json::from_str(&text).map_err(|e| e.to_string());
        let checked = parsed.and_then(|rates| rates.check().map(|()| rates));
        checked.map_err(|reason| Kind::System { action, reason }.on(rank))
    }

    /// The library's rates. They were measured on an H100 and an H200, and are used for other Hopper GPUs too.
    pub fn of(gpu: &str) -> Rates {
        if gpu.contains("H100") { H100 } else { H200 }
    }

    /// Checks that the model can use the rates. The error says which rate is wrong, and why.
    pub fn check(&self) -> Result<(), String> {
        let count = self.multiprocessors;
        if !(1..=MOST_MULTIPROCESSORS).contains(&count) {
            return Err(format!(
                "multiprocessors is {count}: from 1 to {MOST_MULTIPROCESSORS} can be"
            ));
        }
        for Field {
            name,
            quantity,
            value,
        } in { *self }.fields()
        {
            match quantity {
                _ if !value.is_finite() => return Err(format!("{name} is {value}")),
                Quantity::Rate if *value <= 0.0 => {
                    return Err(format!("{name} is {value}: rates are above 0"));
                }
                Quantity::Time if *value < 0.0 => {
                    return Err(format!("{name} is {value}: no time is below 0"));
                }
                _ => (),
            }
        }
        Ok(())
    }

    /// All rates, without the number of multiprocessors.
    pub fn fields(&mut self) -> Vec<Field<'_>> {
        use Quantity::{Rate, Time};
        let Rates {
            multiprocessors: _,
            start,
            cluster,
            operations,
            step,
            promoted,
            scaled,
            promoted_step,
            loaded,
            cached,
            merged,
            drift,
            read,
            column,
            swap_ab_column,
            join,
            split,
            slice_join,
            summed,
            summed_cached,
            pull,
            push,
            store,
        } = self;
        let own = [
            Field::new("start", Time, start),
            Field::new("cluster", Time, cluster),
            Field::new("operations", Rate, operations),
            Field::new("step", Time, step),
            Field::new("promoted", Rate, promoted),
            Field::new("scaled", Rate, scaled),
            Field::new("promoted_step", Time, promoted_step),
            Field::new("loaded", Rate, loaded),
            Field::new("cached", Rate, cached),
            Field::new("merged", Rate, merged),
            Field::new("drift", Rate, drift),
            Field::new("read", Rate, read),
            Field::new("column", Time, column),
            Field::new("swap_ab_column", Time, swap_ab_column),
            Field::new("join", Time, join),
            Field::new("split", Time, split),
            Field::new("slice_join", Time, slice_join),
            Field::new("summed", Rate, summed),
            Field::new("summed_cached", Rate, summed_cached),
        ];
        let links = [
            pull.fields(["pull.around", "pull.start", "pull.bytes", "pull.chunk"]),
            push.fields(["push.around", "push.start", "push.bytes", "push.chunk"]),
            store.fields(["store.around", "store.start", "store.bytes", "store.chunk"]),
        ];
        own.into_iter().chain(links.into_iter().flatten()).collect()
    }

    /// The link of a route.
    pub fn link(&self, route: Route) -> &Link {
        match route {
            Route::Pull => &self.pull,
            Route::Push => &self.push,
            Route::Store => &self.store,
            // No configuration has this route.
            Route::Net => &self.push,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_which_nothing_can_be_reckoned_are_refused() {
        assert_eq!(H200.check(), Ok(()));
        assert_eq!(H100.check(), Ok(()));
        type Spoil = fn(&mut Rates);
        let refused: [(Spoil, &str); 6] = [
            (|rates| rates.multiprocessors = 0, "multiprocessors is 0"),
            (|rates| rates.read = 0.0, "read is 0"),
            (|rates| rates.cached = f64::NAN, "cached is NaN"),
            (|rates| rates.start = -1.0, "start is -1"),
            (
                |rates| rates.store.bytes = f64::INFINITY,
                "store.bytes is inf",
            ),
            (|rates| rates.pull.chunk = -2.0, "pull.chunk is -2"),
        ];
        for (spoil, reason) in refused {
            let mut rates = H200;
            spoil(&mut rates);
            let refusal = rates.check().unwrap_err();
            assert!(refusal.contains(reason), "{refusal}");
        }
        let text = serde_json::to_string(&H200).unwrap();
        assert_eq!(serde_json::from_str::<Rates>(&text).unwrap(), H200);
    }
}
