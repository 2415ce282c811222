//! Configurations and operations in tables of tuned configurations.

use serde::{Deserialize, Serialize};

use crate::schedule::{Chunking, Config, Route, TileShape};

#[derive(Serialize, Deserialize)]
#[serde(remote = "Config")]
pub struct ConfigJson {
    #[serde(with = "TileShapeJson")]
    tile: TileShape,
    #[serde(with = "ChunkingJson")]
    chunking: Chunking,
    route: Route,
    // Older tables have none.
    #[serde(default)]
    product_first: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_ctas: Option<usize>,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "TileShape")]
struct TileShapeJson {
    m: usize,
    n: usize,
    k: usize,
    stages: usize,
    // Older tables have only this number, as `cluster`.
    #[serde(alias = "cluster")]
    cluster_m: usize,
    #[serde(default = "one")]
    cluster_n: usize,
    split_k: usize,
    // Older tables have no `k_slices`.
    #[serde(default = "one")]
    k_slices: usize,
    group_m: usize,
}

fn one() -> usize {
    1
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Chunking")]
struct ChunkingJson {
    count: usize,
    last: usize,
    cut_last: bool,
}

/// An operation, by name.
pub mod operation {
    use serde::de::{Deserialize, Deserializer, Error};
    use serde::ser::Serializer;

    use crate::schedule::Operation;

    pub fn serialize<S: Serializer>(
        operation: &Operation,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(operation.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Operation, D::Error> {
        let name = String::deserialize(deserializer)?;
        let named = Operation::named(&name);
        named.ok_or_else(|| D::Error::custom(format_args!("no operation is called {name}")))
    }
}
