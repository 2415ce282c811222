//! Rates of a device, from which the model predicts times.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Family;
use crate::error::{Error, Kind, Result};
use crate::schedule::Route;

/// Rates of a device per microsecond, and times in microseconds. All ranks use those of rank 0.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// The family of its kernels.
    #[serde(default = "default::family", with = "by_name")]
    pub family: &'static dyn Family,
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
    use super::super::{FAMILIES, Family, H200};

    pub fn family() -> &'static dyn Family {
        FAMILIES[0]
    }

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

/// A family as its name.
mod by_name {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use super::super::{Family, named};

    pub fn serialize<S: Serializer>(
        family: &&'static dyn Family,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(family.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<&'static dyn Family, D::Error> {
        let name = String::deserialize(from)?;
        named(&name)
            .ok_or_else(|| de::Error::custom(format!("there is no family {name:?} of kernels")))
    }
}

/// The times and the rate of a route.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Time before the first tile and after the last one.
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

/// More than any GPU has.
const MOST_MULTIPROCESSORS: usize = 4096;

/// The environment variable that names a file with the rates of a device: a [`Rates`] as JSON.
pub const VARIABLE: &str = "GEMMESH_RATES";

impl Rates {
    /// Reads the rates from the file that the environment names. Without one, takes the family's rates for this GPU.
    ///
    /// # Errors
    /// [`Kind::System`] if the file can't be read, or its rates are invalid.
    pub fn load(rank: usize, family: &'static dyn Family, gpu: &str) -> Result<Rates> {
        let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) else {
            return Ok(family.rates(gpu));
        };
        let action = format!("read {} ({VARIABLE})", path.display());
        let text = fs::read_to_string(&path).map_err(Error::system(rank, &action))?;
        let parsed: Result<Rates, String> = serde_json::from_str(&text).map_err(|e| e.to_string());
        let checked = parsed.and_then(|rates| rates.check().map(|()| rates));
        let rates = checked.map_err(|reason| Kind::System { action, reason }.on(rank))?;
        Ok(Rates { family, ..rates })
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

    /// All rates, without the family and the number of multiprocessors.
    pub fn fields(&mut self) -> Vec<Field<'_>> {
        use Quantity::{Rate, Time};
        let Rates {
            family: _,
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
    use super::super::{H100, H200};
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
