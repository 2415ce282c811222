//! The kernels, and the search for the one that a configuration needs.

use std::ffi::CString;
use std::sync::Arc;

use crate::backend::cuda::driver::{Device, Function, Module};
use crate::backend::cuda::family::{Family, Shape, Variant, symbol, variants};
use crate::element::DType;
use crate::error::{Error, Kind, Result};
use crate::schedule::{Config, Form, Product, WeightLayout};

/// Some of a family's kernels for the types of `a` and `b`, which nvcc compiles in build.rs.
struct Cubin {
    /// The family's name.
    family: &'static str,
    /// The number of its types among those of the family.
    list: usize,
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
    /// Its shapes among those of `family`, whose it is.
    fn shapes(&self, family: &dyn Family) -> impl Iterator<Item = &'static Shape> + use<> {
        let shapes = family.types()[self.list].shapes.iter();
        shapes.skip(self.part).step_by(self.parts)
    }
}

static CUBINS: &[Cubin] = &include!(concat!(env!("OUT_DIR"), "/cubins.rs"));
/// The kernels that families share: the family for which each is compiled, its name, and its cubin.
static SHARED_CUBINS: &[(&str, &str, &[u8])] =
    &include!(concat!(env!("OUT_DIR"), "/shared_cubins.rs"));

/// One kernel: the types of `a` and `b`, a tile shape, and a variant of it.
#[derive(Clone, Debug)]
pub struct Instance {
    pub function: Function,
    /// Its variants for plain products, if it is one of all forms.
    pub plain: Option<Plain>,
    pub dtypes: [DType; 2],
    pub family: &'static dyn Family,
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
        family: &'static dyn Family,
        cubin: &Cubin,
        shape: &'static Shape,
        variant: Variant,
    ) -> Result<Instance> {
        let &Cubin {
            elements, dtypes, ..
        } = cubin;
        let shared_bytes = family.shared_bytes(shape);
        let function = |variant| {
            let name = CString::new(symbol(elements, shape, variant)).unwrap_or_default();
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
        let resident = module.resident_clusters(function, ctas, family.threads(), shared_bytes)?;
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
    pub family: &'static dyn Family,
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
    /// Loads every kernel of the family now. Loading one at its first launch might have to wait for a kernel that waits
    /// for a peer.
    ///
    /// # Errors
    /// [`Kind::Device`], and if the driver refuses.
    pub fn load(device: &Arc<Device>, family: &'static dyn Family) -> Result<Kernels> {
        let load = |image| Module::load(device, embedded(device.rank, image)?);
        let shared = |kernel| load(shared_cubin(family, kernel));
        let (align, count) = (shared("align")?, shared("count")?);
        let (collective, reduce, quantize) =
            (shared("store")?, shared("reduce")?, shared("quantize")?);
        let mut kernels = Kernels {
            family,
            instances: Vec::new(),
            align: align.function(c"gemmesh_align", 0)?,
            count: count.function(c"gemmesh_count", 0)?,
            reduce: of_each_dtype(&reduce, "reduce")?,
            quantize: of_each_dtype(&quantize, "quantize")?,
            collective: of_each_dtype(&collective, "collective")?,
            _modules: vec![align, count, collective, reduce, quantize],
        };
        for cubin in CUBINS.iter().filter(|cubin| cubin.family == family.name()) {
            let module = load(cubin.image)?;
            for shape in cubin.shapes(family) {
                let with_instances =
                    |variant: &Variant| !matches!(variant, Variant::Plain | Variant::Alone);
                for variant in variants(family, shape).filter(with_instances) {
                    let instance = Instance::load(&module, family, cubin, shape, variant)?;
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
        let can = |i: &Instance| self.family.fits(i.shape, gated, layout);
        let mut of = self.instances.iter().filter(|i| i.is_asked(config));
        let apart = config.tile.k_slices > 1 && !self.family.adds_slices(config, gated);
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

/// The cubin of a kernel that families share. It is empty if there is none.
fn shared_cubin(family: &dyn Family, kernel: &str) -> &'static [u8] {
    let mut cubins = SHARED_CUBINS.iter();
    let found = cubins.find(|(of, name, _)| (*of, *name) == (family.name(), kernel));
    found.map_or(&[], |(.., image)| image)
}

/// The kernels gemmesh_NAME_DTYPE of a module.
fn of_each_dtype(module: &Module, name: &str) -> Result<[(DType, Function); 3]> {
    let function = |dtype: &str| {
        let symbol = CString::new(format!("gemmesh_{name}_{dtype}")).unwrap_or_default();
        module.function(&symbol, 0)
    };
    Ok([
        (DType::Bf16, function("bf16")?),
        (DType::F16, function("f16")?),
        (DType::F32, function("f32")?),
    ])
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

/// `base` with each of the family's shapes that supports `form` and has such a kernel for these types of `a` and `b`.
pub fn configs(
    family: &'static dyn Family,
    base: Config,
    variant: Variant,
    dtypes: [DType; 2],
    form: &Form,
) -> impl Iterator<Item = Config> + use<> {
    let (gated, layout) = (form.gated, form.weights);
    let has = move |shape: &&Shape| {
        family.has_variant(shape, variant) && family.fits(shape, gated, layout)
    };
    let configured = move |shape| configured(shape, &base);
    shapes(family, dtypes).filter(has).map(configured)
}

/// Every shape of the family for these types of `a` and `b`.
fn shapes(family: &dyn Family, dtypes: [DType; 2]) -> impl Iterator<Item = &'static Shape> + use<> {
    let mut cubins = CUBINS.iter();
    let of_types = cubins.find(|cubin| (cubin.family, cubin.dtypes) == (family.name(), dtypes));
    let shapes = of_types.map(|cubin| family.types()[cubin.list].shapes);
    shapes.unwrap_or_default().iter()
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::backend::cuda::family::{FAMILIES, named};

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
        let (name, elements, part) = (cubin.family, cubin.elements, cubin.part);
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
            let family = named(cubin.family).unwrap();
            let elements = cubin.elements;
            let all = |shape| {
                let variants = variants(family, shape);
                variants.map(move |variant| symbol(elements, shape, variant))
            };
            let loaded: Vec<String> = cubin.shapes(family).flat_map(all).collect();
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
    fn every_pair_of_types_that_products_multiply_has_kernels() {
        let all = [DType::Bf16, DType::F16, DType::F8E4M3, DType::F8E5M2];
        for a in all {
            for b in all {
                let has_kernels = shapes(FAMILIES[0], [a, b]).next().is_some();
                assert_eq!(has_kernels, a.is_multiplied_by(b), "{a} {b}");
            }
        }
    }
}
