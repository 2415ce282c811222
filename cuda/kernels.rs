//! The lists of kernels, which build.rs and the library read. build.rs compiles the kernels, and the library loads them.

use std::fmt::{Debug, Display};

#[path = "sm90/kernels.rs"]
pub mod sm90;

/// Those that are compiled. Each has its folder here, and its [`family`](../src/backend/cuda/family/mod.rs) in the library.
#[allow(dead_code)] // by build.rs alone
pub static COMPILED: [&dyn KernelList; 1] = [&sm90::Sm90];

/// A family's kernels, whose sources are in cuda/NAME: one architecture's way to multiply.
///
/// The folder also has family.cuh, which says how the shared kernels (cuda/protocol, cuda/collective) do what not all
/// architectures can.
pub trait KernelList: Debug + Send + Sync {
    fn name(&self) -> &'static str;
    /// The architecture that nvcc compiles them for.
    fn arch(&self) -> &'static str;
    /// Threads of a CTA.
    fn threads(&self) -> u32;
    /// Empty if the family has no kernels.
    fn types(&self) -> &'static [OperandTypes];
    /// Whether there is such a kernel of the shape.
    fn has_variant(&self, shape: &Shape, variant: Variant) -> bool;
    /// The dynamic shared memory that a shape's kernels are launched with.
    fn shared_bytes(&self, shape: &Shape) -> u32;
    /// The source of the kernels of these shapes for these types of `a` and `b`.
    fn source(&self, elements: &str, shapes: &[&Shape]) -> String;
    /// Checks that there can be kernels of these shapes.
    ///
    /// # Errors
    /// The first shape that cannot be, and why.
    fn check(&self, shapes: &[Shape]) -> Result<(), String>;
}

/// Kernels for some types of `a` and `b`.
#[derive(Clone, Copy, Debug)]
pub struct OperandTypes {
    /// The types, by their names in the kernels' source. If `a` and `b` differ, the name has both.
    pub elements: &'static [&'static str],
    /// There are kernels of each of these.
    pub shapes: &'static [Shape],
}

/// What is particular to one kernel of a family. It has several variants: see [`variants`].
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Rows of a CTA's tile.
    pub tile_m: u32,
    /// Columns of a CTA's tile.
    pub tile_n: u32,
    /// Columns of `a` and `b` that a stage holds.
    pub tile_k: u32,
    /// Depth of the ring of loads.
    pub stages: u32,
    /// CTAs, along M, that share each load of `b`.
    pub cluster_m: u32,
    /// CTAs, along N, that share each load of `a`.
    pub cluster_n: u32,
    /// CTAs that share a tile, each with a part of K.
    pub split: u32,
}

/// What a kernel can do beside the product. Code that a call does not use costs it microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// All forms of a product of this rank's output.
    Forms,
    /// Only products of weights [N, K], of the element type or, if operands are fp8, quantised. Its arguments are those of
    /// `Forms`.
    Plain,
    /// As `Plain`, of rows that are there, without peers, slices of K and a trace, and not quantised.
    Alone,
    /// Its rows are few partial sums, which go through low-latency areas. Its arguments are those of `Forms`.
    LowLatency,
    /// Its rows go to several places, and partials are added to some. It has other arguments.
    Sums,
}

/// All that there may be.
const VARIANTS: [Variant; 5] = [
    Variant::Forms,
    Variant::Plain,
    Variant::Alone,
    Variant::LowLatency,
    Variant::Sums,
];

impl Shape {
    /// CTAs of a cluster.
    pub fn ctas(&self) -> u32 {
        self.cluster_m * self.cluster_n * self.split
    }
}

/// The variants of a shape's kernel.
pub fn variants(of: &(impl KernelList + ?Sized), shape: &Shape) -> impl Iterator<Item = Variant> {
    VARIANTS
        .into_iter()
        .filter(|variant| of.has_variant(shape, *variant))
}

/// The kernel's symbol.
pub fn symbol(elements: impl Display, shape: &Shape, variant: Variant) -> String {
    let Shape {
        tile_m,
        tile_n,
        tile_k,
        stages,
        cluster_m,
        cluster_n,
        split,
    } = shape;
    let variant = match variant {
        Variant::Forms => "",
        Variant::Plain => "_plain",
        Variant::Alone => "_alone",
        Variant::LowLatency => "_low_latency",
        Variant::Sums => "_sums",
    };
    let cluster = format!("{cluster_m}x{cluster_n}");
    format!("matmul_{elements}_{tile_m}x{tile_n}x{tile_k}_s{stages}_c{cluster}_k{split}{variant}")
}
