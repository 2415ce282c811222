//! Families of kernels: what is particular to one architecture stands behind [`Family`].
//!
//! A family has a folder here, with its launch and its cost, and one of the same name in cuda/, with its kernels, their
//! list and their limits. The rest of the backend asks the family of the GPU, and names none.

pub mod launch;
pub mod rates;
#[cfg(test)]
mod sm80;
mod sm90;

use std::sync::Arc;

use rates::Rates;
#[cfg(any(test, feature = "unstable-tools"))]
pub use sm90::cost::H100;
pub use sm90::cost::H200;

use crate::backend::cuda::family::launch::{KernelArguments, Matrices};
use crate::element::DType;
use crate::error::Result;
use crate::schedule::{Config, Problem, Scaling, TileShape, WeightLayout};

// build.rs uses the rest of it.
#[allow(dead_code)]
#[path = "../../../../cuda/kernels.rs"]
mod list;

pub use list::{KernelList, Shape, Variant, symbol, variants};

/// The families. The first one's rates are those of files that name no family.
pub static FAMILIES: &[&dyn Family] = &[
    &list::sm90::Sm90,
    #[cfg(test)]
    &sm80::Sm80,
];

/// A family of kernels, for GPUs of one compute capability.
pub trait Family: KernelList {
    fn capability(&self) -> (i32, i32);

    /// Its GPUs, in words.
    fn gpus(&self) -> &'static str;

    /// The library's rates of the GPU with this name.
    fn rates(&self, gpu: &str) -> Rates;

    /// The tile shape that is best if there are many tiles, of operands of 16 bits.
    fn widest(&self) -> TileShape;

    /// Warps of a CTA that store.
    fn storing_warps(&self) -> u32;

    /// Whether kernels of a shape can compute products of this form.
    fn fits(&self, shape: &Shape, gated: bool, layout: WeightLayout) -> bool;

    /// Whether the configuration's kernel adds partials to blocks of its rows.
    fn adds_partials(&self, config: &Config) -> bool;

    /// Whether slices of K of such a product can be added.
    fn adds_slices(&self, config: &Config, gated: bool) -> bool;

    /// Whether the configuration's kernel can sum up fp8 without promotion.
    fn can_be_fast(&self, config: &Config) -> bool;

    /// Whether the configuration's kernel quantises its results. If not, they are quantised after it.
    fn quantizes(&self, config: &Config, gated: bool, scaling: Scaling) -> bool;

    /// The arguments of a kernel for these matrices. `dtype`: the type of `a`. `b` has as many bytes.
    ///
    /// # Errors
    /// [`Kind::Unsupported`](crate::error::Kind::Unsupported) if the family has no kernels; what the driver refuses.
    fn arguments(
        &self,
        rank: usize,
        dtype: DType,
        shape: &Shape,
        matrices: &Matrices,
    ) -> Result<Arc<dyn KernelArguments>>;

    /// Microseconds that the products of a tile's step through K take.
    fn step(&self, rates: &Rates, arithmetic: Arithmetic, tile: &TileShape) -> f64;

    /// Microseconds that a tile takes, apart from its products, for each of its columns of 128 rows.
    fn column(&self, rates: &Rates, config: &Config) -> f64;

    /// Whether an entry is stored while the next one is multiplied. Products are plain, as most are.
    fn stores_by_turns(&self, config: &Config, variant: Variant) -> bool;
}

impl PartialEq for dyn Family {
    fn eq(&self, other: &dyn Family) -> bool {
        self.name() == other.name()
    }
}

/// The family with this name.
pub fn named(name: &str) -> Option<&'static dyn Family> {
    FAMILIES
        .iter()
        .copied()
        .find(|family| family.name() == name)
}

/// The family whose kernels run on a GPU with this name and compute capability.
///
/// # Errors
/// Why there are no kernels, in words.
pub fn of_gpu(gpu: &str, capability: (i32, i32)) -> Result<&'static dyn Family, String> {
    let is_made = |family: &&'static dyn Family| !family.types().is_empty();
    let mut families = FAMILIES.iter().copied();
    let found = families.find(|family| family.capability() == capability);
    let why = match found {
        Some(family) if is_made(&family) => return Ok(family),
        Some(family) => format!("family {} has none", family.name()),
        None => {
            let all = FAMILIES.iter().copied().filter(is_made);
            let all: Vec<&str> = all.map(|family| family.gpus()).collect();
            format!("they need {}", all.join(" or "))
        }
    };
    let (major, minor) = capability;
    Err(format!(
        "there are no kernels for {gpu:?} (compute capability {major}.{minor}); {why}"
    ))
}

/// How elements are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arithmetic {
    /// Elements of 16 bits.
    Half,
    /// fp8, whose sums are promoted.
    Promoted,
    /// fp8, whose blocks have scales.
    Scaled,
    /// fp8, whose sums are not promoted.
    Fast,
}

impl Arithmetic {
    /// How the kernel of a configuration multiplies.
    pub fn of(family: &dyn Family, problem: &Problem, config: &Config) -> Arithmetic {
        match problem.dtypes.operands.is_fp8() {
            false => Arithmetic::Half,
            true if problem.form.a_scaling.has_blocks() => Arithmetic::Scaled,
            true if problem.form.is_fast() && family.can_be_fast(config) => Arithmetic::Fast,
            true => Arithmetic::Promoted,
        }
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Arithmetic::Half => 2,
            Arithmetic::Promoted | Arithmetic::Scaled | Arithmetic::Fast => 1,
        }
    }
}
