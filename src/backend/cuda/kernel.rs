//! The kernels, and which one suits a problem.

use std::ffi::CString;
use std::sync::Arc;

use super::abi::{GEMMESH_BF16, GEMMESH_TILE_K, GemmeshInstance};
use super::driver::{Device, Function, Module};
use super::tuned::{Measured, agree};
use crate::element::DType;
use crate::error::{Error, Result};
use crate::schedule::{Config, Description, Transport};

/// The cubin that build.rs has nvcc make of cuda/; empty if it was told to do without.
static CUBIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/all_gather_matmul.cubin"));

/// One kernel: an element type, a tile shape, and whether it keeps a trace.
#[derive(Clone, Debug)]
pub struct Instance {
    pub function: Function,
    pub dtype: DType,
    pub tile_m: usize,
    pub tile_n: usize,
    pub stages: usize,
    /// CTAs that share each load of `b`; one entry of the table is this many tiles tall.
    pub cluster: usize,
    /// CTAs that share a tile.
    pub split_k: usize,
    /// Clusters, as the hardware sees them, that the device holds at a time.
    pub resident: usize,
    pub threads: u32,
    pub shared_bytes: u32,
    pub trace: bool,
}

impl Instance {
    /// CTAs of a cluster.
    pub fn ctas(&self) -> usize {
        self.cluster * self.split_k
    }
}

/// The kernels of the module.
#[derive(Debug)]
pub struct Kernels {
    instances: Vec<Instance>,
    /// Ends on all ranks at the same time.
    pub align: Function,
    _module: Module,
}

impl Kernels {
    /// Loads every kernel, so that none is loaded at its first launch.
    ///
    /// # Errors
    /// [`Error::BuiltWithoutKernels`]; [`Error::Cuda`] if the driver refuses.
    pub fn load(device: &Arc<Device>) -> Result<Kernels> {
        let cubin = embedded(device.rank, CUBIN)?;
        let module = Module::load(device, cubin, c"gemmesh_instances")?;
        let instances = module
            .list()
            .chunks_exact(size_of::<GemmeshInstance>())
            .map(|entry| {
                // SAFETY: the module's array holds structs of this layout, which abi.h and abi.rs agree on;
                // any bytes are valid for it.
                let entry = unsafe { entry.as_ptr().cast::<GemmeshInstance>().read_unaligned() };
                let name: Vec<u8> = entry
                    .name
                    .iter()
                    .map(|&c| c as u8)
                    .take_while(|&c| c != 0)
                    .collect();
                let name = CString::new(name).unwrap_or_default();
                let function = module.function(&name, entry.shared_bytes)?;
                Ok(Instance {
                    function,
                    resident: module.resident_clusters(
                        function,
                        entry.cluster * entry.split,
                        entry.threads,
                        entry.shared_bytes,
                    )?,
                    dtype: if entry.element == GEMMESH_BF16 {
                        DType::Bf16
                    } else {
                        DType::F16
                    },
                    tile_m: entry.tile_m as usize,
                    tile_n: entry.tile_n as usize,
                    stages: entry.stages as usize,
                    cluster: entry.cluster as usize,
                    split_k: entry.split as usize,
                    threads: entry.threads,
                    shared_bytes: entry.shared_bytes,
                    trace: entry.trace != 0,
                })
            })
            .collect::<Result<_>>()?;
        Ok(Kernels {
            align: module.function(c"gemmesh_align", 0)?,
            instances,
            _module: module,
        })
    }

    /// The kernel that `config` asks for.
    ///
    /// # Errors
    /// [`Error::NoKernel`] names those there are.
    pub fn find(
        &self,
        rank: usize,
        dtype: DType,
        config: &Config,
        trace: bool,
    ) -> Result<&Instance> {
        let matches =
            |i: &&Instance| (i.dtype, i.trace) == (dtype, trace) && config_of(i, config) == *config;
        self.instances.iter().find(matches).ok_or_else(|| {
            let known: Vec<String> = self
                .instances
                .iter()
                .filter(|i| i.dtype == dtype && i.trace == trace)
                .map(|i| {
                    format!(
                        "{}x{}x{GEMMESH_TILE_K} with {} stages, cluster {} and K split by {}",
                        i.tile_m, i.tile_n, i.stages, i.cluster, i.split_k
                    )
                })
                .collect();
            Error::NoKernel {
                rank,
                asked: format!(
                    "{}x{}x{} with {} stages, cluster {} and K split by {}",
                    config.tile_m,
                    config.tile_n,
                    config.tile_k,
                    config.stages,
                    config.cluster,
                    config.split_k
                ),
                known: known.join("; "),
            }
        })
    }

    /// An instance of each shape: all dtypes have the same, and so have the instances that trace.
    fn shapes(&self) -> impl Iterator<Item = &Instance> {
        let plain = |i: &&Instance| i.dtype == DType::Bf16 && !i.trace;
        self.instances.iter().filter(plain)
    }

    /// `base` with each of the shapes.
    pub fn configs(&self, base: &Config) -> impl Iterator<Item = Config> {
        self.shapes().map(|instance| config_of(instance, base))
    }

    /// The configuration that should be fastest for a problem: the one that was measured to be, if it was; else the tile
    /// shape of the lowest cost, and what moves the rows as for the most similar problem that was measured. Ranks whose
    /// problems differ in N get configurations that agree.
    pub fn default_config(
        &self,
        multiprocessors: usize,
        asked: &Description,
        measured: Option<Measured>,
    ) -> Config {
        let configs = |base: &Config| -> Vec<Config> { self.configs(base).collect() };
        choose(configs, multiprocessors, asked, measured)
    }
}

/// The cubin, if there is one in this program.
fn embedded(rank: usize, cubin: &[u8]) -> Result<&[u8]> {
    if cubin.is_empty() {
        return Err(Error::BuiltWithoutKernels { rank });
    }
    Ok(cubin)
}

/// As [`Kernels::default_config`]. `configs`: a configuration with each of the tile shapes there are.
fn choose(
    configs: impl Fn(&Config) -> Vec<Config>,
    multiprocessors: usize,
    asked: &Description,
    measured: Option<Measured>,
) -> Config {
    if let Some(exact) = measured.and_then(|measured| measured.exact) {
        return exact;
    }
    let base = measured.map_or(
        Config {
            tile_m: 128,
            tile_n: 256,
            tile_k: GEMMESH_TILE_K as usize,
            stages: 4,
            cluster: 2,
            split_k: 1,
            group_m: 8,
            chunks: 1,
            last_chunks: 1,
            cut_last: false,
            transport: Transport::Pull,
        },
        |measured| measured.alike,
    );
    let cost = |c: &Config| {
        // Rounds that the busiest cluster makes, times what a round takes: as long as the tile is wide, shared by
        // those who split it, and longer for the less that narrow tiles and lone CTAs use each byte they load.
        let entries = asked.layout.m().div_ceil(c.entry_rows()) * asked.n.div_ceil(c.tile_n);
        let rounds = entries.div_ceil(multiprocessors / (c.cluster * c.split_k));
        (rounds * c.tile_n) as f64 / (c.split_k as f64 * efficiency(c))
    };
    let configs = configs(&base).into_iter();
    configs
        .filter(|config| agree(config, &base))
        .min_by(|x, y| cost(x).total_cmp(&cost(y)))
        .unwrap_or(base)
}

/// `base` with the instance's shape.
fn config_of(instance: &Instance, base: &Config) -> Config {
    Config {
        tile_m: instance.tile_m,
        tile_n: instance.tile_n,
        tile_k: GEMMESH_TILE_K as usize,
        stages: instance.stages,
        cluster: instance.cluster,
        split_k: instance.split_k,
        ..*base
    }
}

/// How much of the arithmetic rate of the widest tile a tile shape reaches, measured on an H200 at full waves; of those that
/// share K, so that the fastest of few rows comes out.
fn efficiency(config: &Config) -> f64 {
    match (config.tile_n, config.cluster, config.split_k) {
        (256.., 2, _) => 1.0,
        (224.., 2, _) => 0.99,
        (208.., 2, _) => 0.98,
        (192.., 2, _) => 0.97,
        (128.., 2, _) => 0.9,
        (256.., _, _) => 0.95,
        (128.., _, 2) => 0.52,
        (128.., _, _) => 0.45,
        (_, _, 1 | 2) => 0.5,
        _ => 0.4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Layout;

    #[test]
    fn a_program_that_was_built_without_kernels_says_so() {
        assert_eq!(embedded(2, b"cubin"), Ok(b"cubin".as_slice()));
        let error = embedded(2, &[]).unwrap_err();
        assert_eq!(error, Error::BuiltWithoutKernels { rank: 2 });
        let words = error.to_string();
        assert!(
            words.contains("rank 2") && words.contains("GEMMESH_NO_KERNELS"),
            "{words}"
        );
    }

    /// Some of the shapes: rows and columns of a tile, and how many CTAs share what.
    fn configs(base: &Config) -> Vec<Config> {
        let shape = |tile_n, cluster, split_k| Config {
            tile_n,
            cluster,
            split_k,
            ..*base
        };
        let pairs = [256, 224, 208, 192, 128].map(|tile_n| shape(tile_n, 2, 1));
        let lone = [shape(64, 1, 2), shape(64, 1, 4), shape(128, 1, 2)];
        [&pairs[..], &lone].concat()
    }

    fn alike(transport: Transport, cluster: usize) -> Measured {
        Measured {
            alike: Config {
                tile_m: 128,
                tile_n: 128,
                tile_k: GEMMESH_TILE_K as usize,
                stages: 6,
                cluster,
                split_k: 1,
                group_m: 8,
                chunks: 2,
                last_chunks: 3,
                cut_last: true,
                transport,
            },
            exact: None,
        }
    }

    fn chosen(m: usize, n: usize, measured: Option<Measured>) -> Config {
        let asked = Description {
            operation: "all_gather_matmul",
            dtype: DType::Bf16,
            layout: Layout::balanced(m, 4096, 4).unwrap(),
            n,
        };
        choose(configs, 132, &asked, measured)
    }

    #[test]
    fn ranks_whose_n_differ_agree_and_each_has_tiles_of_its_own() {
        const N: [usize; 6] = [1, 64, 700, 1792, 3584, 20_000];
        for transport in [Transport::Pull, Transport::Push, Transport::Store] {
            for cluster in [1, 2] {
                for m in [64, 1024, 8192] {
                    let measured = alike(transport, cluster);
                    let found = N.map(|n| chosen(m, n, Some(measured)));
                    assert!(found.iter().all(|config| agree(config, &measured.alike)));
                }
            }
        }
        let tiles = |n| chosen(1024, n, Some(alike(Transport::Push, 2))).tile_n;
        assert_ne!(tiles(128), tiles(20_000));
    }

    #[test]
    fn what_was_measured_for_the_very_problem_is_taken_as_it_is() {
        let exact = Config {
            tile_n: 208,
            ..alike(Transport::Push, 2).alike
        };
        let measured = Measured {
            exact: Some(exact),
            ..alike(Transport::Push, 2)
        };
        assert_eq!(chosen(4096, 1792, Some(measured)), exact);
    }

    #[test]
    fn where_nothing_was_measured_rows_are_pulled_by_tiles_of_any_shape() {
        for (m, n) in [(16, 64), (8192, 1792)] {
            assert_eq!(chosen(m, n, None).transport, Transport::Pull);
        }
        assert_eq!(chosen(16, 64, None).cluster, 1);
        assert_eq!(chosen(8192, 1792, None).cluster, 2);
    }
}
