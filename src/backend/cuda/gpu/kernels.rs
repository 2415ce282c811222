//! The kernels, and the search for the one that a configuration needs.

use std::ffi::CString;
use std::sync::Arc;

use crate::backend::cuda::driver::{Device, Function, Module};
use crate::element::DType;
use crate::error::{Error, Kind, Result};
use crate::schedule::{Config, Form, Product, Scaling, TileShape, WeightLayout};

// build.rs uses the rest of it.
#[allow(dead_code)]
#[path = "../../../../cuda/kernels.rs"]
mod list;

pub use list::{CONSUMER_WARPS, Shape, Variant};
use list::{FAMILIES, Family};

/// Some of a family's kernels for the types of `a` and `b`, which nvcc compiles in build.rs.
struct Cubin {
    family: &'static Family,
    /// The types' name in the kernels' names.
    elements: &'static str,
    dtypes: [DType; 2],
    /// Its number among those of the family and the types, and how many these are.
    part: usize,
    parts: usize,
    /// Empty if build.rs was told to build without kernels.
    image: &'static [u8],
}

impl Cubin {
    fn shapes(&self) -> impl Iterator<Item = &'static Shape> + use<> {
        self.family
            .shapes
            .iter()
            .skip(self.part)
            .step_by(self.parts)
    }
}

static CUBINS: &[Cubin] = &include!(concat!(env!("OUT_DIR"), "/cubins.rs"));
static ALIGN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/align.cubin"));
static COUNT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/count.cubin"));
static STORE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/store.cubin"));
static REDUCE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/reduce.cubin"));
static QUANTIZE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/quantize.cubin"));

/// One kernel: the types of `a` and `b`, a tile shape, and a variant of it.
#[derive(Clone, Debug)]
pub struct Instance {
    pub function: Function,
    /// Its variants for plain products, if it is one of all forms.
    pub plain: Option<Plain>,
    pub dtypes: [DType; 2],
    pub family: &'static Family,
    pub shape: &'static Shape,
    /// How many hardware clusters the device holds at a time.
    pub resident: usize,
    pub shared_bytes: u32,
    pub variant: Variant,
}

/// The variants of a kernel for plain products.
#[derive(Clone, Copy, Debug)]
pub struct Plain {
    /// Of any rows.
    pub any: Function,
    /// As [`Variant::Alone`] says.
    pub alone: Function,
}

impl Instance {
    fn load(
        module: &Module,
        cubin: &Cubin,
        shape: &'static Shape,
        variant: Variant,
    ) -> Result<Instance> {
        let &Cubin {
            family,
            elements,
            dtypes,
            ..
        } = cubin;
        let shared_bytes = family.shared_bytes(shape);
        let function = |variant| {
            let name = CString::new(family.kernel(elements, shape, variant)).unwrap_or_default();
            module.function(&name, shared_bytes)
        };
        let plain = match variant {
            Variant::Forms => Some(Plain {
                any: function(Variant::Plain)?,
                alone: function(Variant::Alone)?,
            }),
            _ => None,
        };
        let function = function(variant)?;
        let ctas = shape.ctas();
        let resident = module.resident_clusters(function, ctas, family.threads, shared_bytes)?;
        Ok(Instance {
            function,
            plain,
            dtypes,
            family,
            shape,
            resident,
            shared_bytes,
            variant,
        })
    }

    /// Whether it has the shape that `config` asks for.
    fn is_asked(&self, config: &Config) -> bool {
        // Most kernels differ in these two extents.
        let extents = (self.shape.tile_m as usize, self.shape.tile_n as usize);
        extents == (config.tile.m, config.tile.n) && configured(self.shape, config) == *config
    }

    /// CTAs of a cluster.
    pub fn ctas(&self) -> usize {
        self.shape.ctas() as usize
    }
}

/// All kernels.
#[derive(Debug)]
pub struct Kernels {
    instances: Vec<Instance>,
    /// The kernel that ends on all ranks at the same time.
    pub align: Function,
    /// The kernel that counts replays.
    pub count: Function,
    /// By dtype.
    reduce: [(DType, Function); 3],
    quantize: [(DType, Function); 3],
    collective: [(DType, Function); 3],
    _modules: Vec<Module>,
}

impl Kernels {
    /// Loads every kernel now. Loading one at its first launch might have to wait for a kernel that waits for a peer.
    ///
    /// # Errors
    /// [`Kind::Device`], and if the driver refuses.
    pub fn load(device: &Arc<Device>) -> Result<Kernels> {
        let module = |image| Module::load(device, embedded(device.rank, image)?);
        let (align, count) = (module(ALIGN)?, module(COUNT)?);
        let (collective, reduce, quantize) = (module(STORE)?, module(REDUCE)?, module(QUANTIZE)?);
        let mut kernels = Kernels {
            instances: Vec::new(),
            align: align.function(c"gemmesh_align", 0)?,
            count: count.function(c"gemmesh_count", 0)?,
            reduce: [
                (DType::Bf16, reduce.function(c"gemmesh_reduce_bf16", 0)?),
                (DType::F16, reduce.function(c"gemmesh_reduce_f16", 0)?),
                (DType::F32, reduce.function(c"gemmesh_reduce_f32", 0)?),
            ],
            quantize: [
                (DType::Bf16, quantize.function(c"gemmesh_quantize_bf16", 0)?),
                (DType::F16, quantize.function(c"gemmesh_quantize_f16", 0)?),
                (DType::F32, quantize.function(c"gemmesh_quantize_f32", 0)?),
            ],
            collective: [
                (
                    DType::Bf16,
                    collective.function(c"gemmesh_collective_bf16", 0)?,
                ),
                (
                    DType::F16,
                    collective.function(c"gemmesh_collective_f16", 0)?,
                ),
                (
                    DType::F32,
                    collective.function(c"gemmesh_collective_f32", 0)?,
                ),
            ],
            _modules: vec![align, count, collective, reduce, quantize],
        };
        for cubin in CUBINS {
            let module = module(cubin.image)?;
            for shape in cubin.shapes() {
                let variants = cubin.family.variants(shape);
                let with_instances =
                    |variant: &Variant| !matches!(variant, Variant::Plain | Variant::Alone);
                for variant in variants.filter(with_instances) {
                    let instance = Instance::load(&module, cubin, shape, variant)?;
                    kernels.instances.push(instance);
                }
            }
            kernels._modules.push(module);
        }
        Ok(kernels)
    }

    /// The kernel that adds rows of `dtype`. Every float has one.
    pub fn reduce(&self, dtype: DType) -> Option<Function> {
        of_dtype(&self.reduce, dtype)
    }

    /// The kernel that makes fp8 and scales of rows of `dtype`. Every float has one.
    pub fn quantize(&self, dtype: DType) -> Option<Function> {
        of_dtype(&self.quantize, dtype)
    }

    /// The kernel that moves rows, and adds rows of `dtype` if it is a float.
    pub fn collective(&self, dtype: DType) -> Function {
        let mut kernels = self.collective.iter();
        let of = kernels.find(|(of, _)| *of == dtype);
        of.unwrap_or(&self.collective[0]).1
    }

    /// Checks that there are kernels that multiply operands of these types.
    ///
    /// # Errors
    /// `Kind::Unsupported` names the types that can be multiplied.
    pub fn check_dtypes(&self, dtypes: [DType; 2]) -> Result<()> {
        if self.instances.iter().any(|i| i.dtypes == dtypes) {
            return Ok(());
        }
        let words = |[a, b]: [DType; 2]| format!("{a} and {b}");
        let mut known: Vec<String> = self.instances.iter().map(|i| words(i.dtypes)).collect();
        known.sort_unstable();
        known.dedup();
        let (asked, known) = (words(dtypes), known.join(", or "));
        let what = format!("operands on this GPU must be {known}, not {asked}");
        Err(Error::unsupported(what))
    }

    /// The kernel that `config` asks for.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] names the kernels that exist.
    pub fn find(
        &self,
        rank: usize,
        dtypes: [DType; 2],
        config: &Config,
        variant: Variant,
    ) -> Result<&Instance> {
        let same = |i: &&Instance| (i.dtypes, i.variant) == (dtypes, variant);
        let with_shape = |i: &Instance| configured(i.shape, config);
        let known = self.instances.iter().filter(same);
        let found = known.clone().find(|i| i.is_asked(config));
        found.ok_or_else(|| {
            let known: Vec<String> = known.map(|i| words(&with_shape(i))).collect();
            no_kernel(rank, words(config), &known)
        })
    }

    /// Checks that the kernel of a product's configuration can compute the product.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] names the kernels that can.
    pub fn check_product(&self, rank: usize, product: &Product, variant: Variant) -> Result<()> {
        let (config, gated, layout) = (&product.config, product.gated, product.weight_layout);
        let with_shape = |i: &Instance| configured(i.shape, config);
        let can = |i: &Instance| multiplies(i.shape, gated, layout);
        let mut of = self.instances.iter().filter(|i| i.is_asked(config));
        // With swap_ab, the two halves of a gated tile would be added separately.
        let sliced = config.tile.k_slices > 1;
        let apart = gated && sliced && swaps_ab(config);
        if of.all(can) && !apart {
            return Ok(());
        }
        let form = match (gated, layout) {
            (true, WeightLayout::Nk) => "with a gate",
            (true, WeightLayout::Kn) => "with a gate, of weights [K, N]",
            (false, _) => "of weights [K, N]",
        };
        let slices = if apart { ", in slices of K" } else { "" };
        let known = self
            .instances
            .iter()
            .filter(|i| can(i) && i.variant == variant);
        let mut known: Vec<String> = known.map(|i| words(&with_shape(i))).collect();
        // Each kernel exists for each dtype.
        known.sort_unstable();
        known.dedup();
        let asked = format!("{} for a product {form}{slices}", words(config));
        Err(no_kernel(rank, asked, &known))
    }
}

fn no_kernel(rank: usize, asked: String, known: &[String]) -> Error {
    let known = known.join("; ");
    let what = format!("there is no kernel {asked}; choose one of {known}");
    Kind::Unsupported { what }.on(rank)
}

fn of_dtype(kernels: &[(DType, Function)], dtype: DType) -> Option<Function> {
    let mut kernels = kernels.iter();
    kernels
        .find(|(of, _)| *of == dtype)
        .map(|(_, kernel)| *kernel)
}

fn words(config: &Config) -> String {
    let tile = &config.tile;
    format!(
        "{}x{}x{} with {} stages, cluster {}x{} and K split by {}",
        tile.m, tile.n, tile.k, tile.stages, tile.cluster_m, tile.cluster_n, tile.split_k
    )
}

/// Warps that store rows of one entry of the table.
pub fn storing_warps(config: &Config) -> u32 {
    list::CONSUMER_WARPS * config.tile.cluster_m as u32
}

/// Whether the configuration's kernel swaps the operands.
pub fn swaps_ab(config: &Config) -> bool {
    list::swaps_ab(config.tile.m as u32)
}

/// Whether the consumers of the configuration's kernel take tiles by turns. Products are plain, as most are.
pub fn is_pingpong(config: &Config, variant: Variant) -> bool {
    let tile = &config.tile;
    let shape = [tile.m, tile.n, tile.k].map(|extent| extent as u32);
    let variant = match variant {
        Variant::Forms => Variant::Plain,
        other => other,
    };
    list::is_pingpong(shape, tile.split_k as u32, variant)
}

/// Whether the configuration's kernel can sum up fp8 without promotion.
pub fn can_be_fast(config: &Config) -> bool {
    config.tile.n <= list::FAST_COLUMNS as usize
}

/// Whether the configuration's kernel quantises its results. If not, they are quantised behind it.
pub fn quantizes(config: &Config, gated: bool, scaling: Scaling) -> bool {
    let tile = &config.tile;
    let shape = [tile.m, tile.n, tile.k].map(|extent| extent as u32);
    let is_whole = tile.k_slices == 1 || !swaps_ab(config);
    match scaling.has_blocks() {
        // Tiles begin where the output does, and so must blocks.
        true if scaling.first_column() > 0 => false,
        true => is_whole && list::quantizes(shape, tile.split_k as u32, gated),
        false => list::promotes(shape[2]),
    }
}

/// Every shape for these types of `a` and `b`, with its family.
fn shapes(dtypes: [DType; 2]) -> impl Iterator<Item = (&'static Family, &'static Shape)> {
    let mut cubins = CUBINS.iter();
    let family = cubins
        .find(|cubin| cubin.dtypes == dtypes)
        .map(|cubin| cubin.family);
    let of = |family: &'static Family| family.shapes.iter().map(move |shape| (family, shape));
    family.into_iter().flat_map(of)
}

/// `base` with each shape that supports `form` and has such a kernel for these types of `a` and `b`.
pub fn configs(
    base: Config,
    variant: Variant,
    dtypes: [DType; 2],
    form: &Form,
) -> impl Iterator<Item = Config> + use<> {
    let (gated, layout) = (form.gated, form.weights);
    let has = move |(family, shape): &(&Family, &Shape)| {
        let mut variants = family.variants(shape);
        variants.any(|of| of == variant) && multiplies(shape, gated, layout)
    };
    let configured = move |(_, shape)| configured(shape, &base);
    shapes(dtypes).filter(has).map(configured)
}

/// Whether kernels of a shape can compute products of this form.
fn multiplies(shape: &Shape, gated: bool, layout: WeightLayout) -> bool {
    let lies = layout == WeightLayout::Nk || shape.takes_kn();
    // Each block of 64 columns must belong to one weight.
    let apart = !(gated && layout == WeightLayout::Kn) || shape.gate_rows().is_multiple_of(64);
    lies && apart && (!gated || shape.is_gated())
}

/// `base` with a shape.
fn configured(shape: &Shape, base: &Config) -> Config {
    let mut config = *base;
    let tile = &mut config.tile;
    tile.m = shape.tile_m as usize;
    tile.n = shape.tile_n as usize;
    tile.k = shape.tile_k as usize;
    tile.stages = shape.stages as usize;
    tile.cluster_m = shape.cluster_m as usize;
    tile.cluster_n = shape.cluster_n as usize;
    tile.split_k = shape.split as usize;
    // CTAs share K in only one way.
    if shape.split > 1 {
        tile.k_slices = 1;
    }
    config
}

const WITHOUT_KERNELS: &str = "this program was built without GPU kernels, as GEMMESH_NO_KERNELS was set; build it with \
                               nvcc and without that variable";

/// The cubin, if there is one in this program.
fn embedded(rank: usize, cubin: &'static [u8]) -> Result<&'static [u8]> {
    if cubin.is_empty() {
        return Err(Kind::Device {
            what: WITHOUT_KERNELS.into(),
        }
        .on(rank));
    }
    Ok(cubin)
}

/// The tile shape that is best if there are many tiles, of operands of 16 bits.
pub const WIDEST: TileShape = TileShape::new(128, 256, 64)
    .with_stages(4)
    .with_cluster(2, 1)
    .with_group_m(8);

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::backend::cuda::abi::{GEMMESH_FAST_COLUMNS, GEMMESH_STAGE_ROW, GEMMESH_THREADS};

    #[test]
    fn a_program_that_was_built_without_kernels_says_so() {
        assert_eq!(embedded(2, b"cubin"), Ok(b"cubin".as_slice()));
        let error = embedded(2, &[]).unwrap_err();
        assert!(matches!(error.kind(), Kind::Device { .. }));
        let words = error.to_string();
        assert!(
            words.contains("rank 2") && words.contains("GEMMESH_NO_KERNELS"),
            "{words}"
        );
    }

    /// The kernels that build.rs wrote a line for, and the element types of these.
    fn compiled(cubin: &Cubin) -> Vec<(String, String)> {
        let (name, elements, part) = (cubin.family.name, cubin.elements, cubin.part);
        let source = format!("{name}_{elements}_{part}.cu");
        let source = fs::read_to_string(Path::new(env!("OUT_DIR")).join(source)).unwrap();
        let lines = source.lines();
        let kernels = lines.filter_map(|line| {
            let (head, arguments) = line.split_once('(')?;
            head.starts_with("GEMMESH_MATMUL").then_some(arguments)
        });
        let words = kernels.map(|line| {
            let words: Vec<&str> = line.split(", ").collect();
            (words[0].to_string(), words[3].replace("gemmesh::", ""))
        });
        words.collect()
    }

    #[test]
    fn the_kernels_that_are_loaded_are_those_that_are_compiled() {
        for cubin in CUBINS {
            let &Cubin {
                family, elements, ..
            } = cubin;
            assert_eq!(family.threads, GEMMESH_THREADS);
            assert_eq!(list::FAST_COLUMNS, GEMMESH_FAST_COLUMNS);
            let all = |shape| {
                let variants = family.variants(shape);
                variants.map(move |variant| family.kernel(elements, shape, variant))
            };
            let loaded: Vec<String> = cubin.shapes().flat_map(all).collect();
            let count = |is: fn(&&'static Shape) -> bool| cubin.shapes().filter(is).count();
            // Of tiles of 64 rows, those of other widths are for one consumer alone.
            let adding = count(|s| {
                let has_halves = s.tile_m == 128 || s.tile_m == 64 && s.tile_n % 128 == 0;
                has_halves && s.cluster_n == 1
            });
            let low = count(|s| s.tile_m <= 64 && s.ctas() == s.split && s.tile_n % 128 == 0);
            assert_eq!(loaded.len(), 3 * cubin.shapes().count() + adding + low);
            let expected = loaded
                .iter()
                .map(|name| (name.clone(), elements.to_string()));
            assert_eq!(compiled(cubin), expected.collect::<Vec<_>>());
            for name in loaded {
                // The section of the code. It is missing if the build had no nvcc.
                let section = format!(".text.{name}\0").into_bytes();
                let image = cubin.image;
                let has = image.windows(section.len()).any(|bytes| bytes == section);
                assert!(has || image.is_empty(), "{name}");
            }
        }
    }

    #[test]
    fn a_step_through_k_has_the_bytes_of_a_stage() {
        for cubin in CUBINS {
            for shape in cubin.shapes() {
                for dtype in cubin.dtypes {
                    assert_eq!(shape.tile_k * dtype.bytes() as u32, GEMMESH_STAGE_ROW);
                }
            }
        }
    }

    #[test]
    fn every_pair_of_types_that_products_multiply_has_kernels() {
        let all = [DType::Bf16, DType::F16, DType::F8E4M3, DType::F8E5M2];
        for a in all {
            for b in all {
                let has_kernels = shapes([a, b]).next().is_some();
                assert_eq!(has_kernels, a.is_multiplied_by(b), "{a} {b}");
            }
        }
    }

    #[test]
    fn a_shape_that_cannot_be_is_refused_and_the_error_says_why() {
        fn check(shapes: Vec<Shape>) -> Result<(), String> {
            let shapes = shapes.leak();
            let sm90 = FAMILIES[0];
            Family { shapes, ..sm90 }.check()
        }
        let refused = |change: fn(&mut Shape), why: &str| {
            let mut shape = FAMILIES[0].shapes[0];
            change(&mut shape);
            let error = check(vec![shape]).unwrap_err();
            // With the line that it is about.
            assert!(error.contains(&format!("{shape:?}")), "{error}");
            assert!(error.contains("sm90") && error.contains(why), "{error}");
        };
        refused(|s| s.tile_n = 250, "tile_n is a multiple of 16");
        refused(|s| s.tile_n = 272, "from 64 to 256");
        refused(|s| s.stages = 1, "2 stages or more");
        refused(|s| s.stages = 5, "no room in shared memory");
        refused(|s| s.cluster_m = 3, "cluster_m and cluster_n are 1, 2 or 4");
        refused(|s| s.split = 0, "split one of these or 8");
        refused(|s| s.tile_m = 96, "tile_m is 64 or 128");
        let odd = |s: &mut Shape| (s.tile_m, s.tile_n) = (84, 128);
        refused(odd, "a multiple of 8 up to 256");
        let flat_split =
            |s: &mut Shape| (s.tile_m, s.tile_n, s.cluster_m, s.split) = (64, 192, 1, 2);
        refused(flat_split, "tile_n of 64 rows is a multiple of 128");
        let narrow_split =
            |s: &mut Shape| (s.tile_m, s.tile_n, s.cluster_m, s.split) = (96, 64, 1, 2);
        refused(narrow_split, "64 where consumers take turns");
        refused(|s| s.split = 2, "a cluster or split is 1");
        let large = |s: &mut Shape| (s.cluster_m, s.cluster_n) = (4, 4);
        refused(large, "8 CTAs at the most");
        let narrow = |s: &mut Shape| (s.tile_n, s.cluster_m) = (80, 4);
        refused(narrow, "over cluster_n and cluster_m are multiples of 8");
        let twice = vec![FAMILIES[0].shapes[0]; 2];
        assert!(check(twice).unwrap_err().contains("twice"));
        assert!(FAMILIES.iter().all(|family| family.check().is_ok()));
    }
}
