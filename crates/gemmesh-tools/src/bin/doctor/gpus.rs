//! The GPUs: what the driver says of them, whether each works alone and with the others, and how fast they are.
#![allow(unsafe_code)] // Calls of the driver that write a number.

use std::time::Duration;

use cudarc::driver::{CudaContext, DriverError, result, sys};
use gemmesh::error::Class;
use gemmesh::tools::has_kernels;
use gemmesh::tuning::Route;
use gemmesh::{AllGatherMatmul, Builder, Cuda, Group, bf16};
use serde::{Deserialize, Serialize};
use sys::CUdevice_P2PAttribute_enum as p2p;
use sys::CUdevice_attribute_enum as attribute;

use super::common::Failure;
use super::measure::{self, Way};
use super::report::{Backend, Finding, Gpu, GpuSection, Link, Measured, Pair, Product};
use super::step::Step;

/// The priorities that the library uses: the lowest, that of copies, and that of the stream that releases waits.
const PRIORITIES: i32 = 3;

/// What the driver says.
#[derive(Serialize, Deserialize)]
pub struct Inspection {
    driver: String,
    gpus: Vec<Gpu>,
    links: Vec<Link>,
    /// Questions that the driver did not answer.
    failures: Vec<String>,
}

/// Inspects and measures the GPUs that this process sees.
pub fn look(backend: Backend, timeout: Duration, findings: &mut Vec<Finding>) -> GpuSection {
    let mut section = GpuSection {
        compiled: true,
        nvcc: Cuda::nvcc_release(),
        ..GpuSection::default()
    };
    if section.nvcc.is_none() {
        let what = "this program has no GPU kernels: GEMMESH_NO_KERNELS was set when it was built";
        let advice = "Build it with nvcc 12.4 or later, and without that variable.";
        findings.push(Finding::of_gpus(backend, what, advice));
    }
    let inspection = match Step::Gpus.run::<Inspection>(timeout) {
        Ok(inspection) => inspection,
        Err(error) => {
            let advice = "Install NVIDIA's driver, for CUDA 12.4 at least, and see that nvidia-smi lists the GPUs; in a container, start it \
                          with access to GPUs.";
            findings.push(Finding::of_gpus(backend, error, advice));
            return section;
        }
    };
    for what in inspection.failures {
        let advice = "See whether nvidia-smi shows it in order, and not in exclusive use by another process. Leave it out with \
                      CUDA_VISIBLE_DEVICES.";
        findings.push(Finding::of_gpus(backend, what, advice));
    }
    if inspection.gpus.is_empty() {
        let advice = "See whether CUDA_VISIBLE_DEVICES hides them; in a container, start it with access to GPUs.";
        findings.push(Finding::of_gpus(
            backend,
            "the driver shows no GPU that works",
            advice,
        ));
    }
    section.driver = Some(inspection.driver);
    section.gpus = inspection.gpus;
    section.links = inspection.links;
    section
        .gpus
        .iter()
        .for_each(|gpu| judge(gpu, backend, findings));
    for link in section.links.iter().filter(|link| !link.access) {
        let what = format!("GPU {} can't map the memory of GPU {}", link.from, link.to);
        let advice = "Compare nvidia-smi topo -p2p r. Virtual machines and PCIe access control (ACS) prevent it. Leave one of the two out \
                      with CUDA_VISIBLE_DEVICES.";
        findings.push(Finding::of_gpus(backend, what, advice));
    }
    if backend == Backend::Cuda && section.nvcc.is_some() {
        measure(&mut section, timeout, findings);
    } else if !section.gpus.is_empty() {
        let what = format!("{} GPUs are not measured", section.gpus.len());
        let advice = "Ask for --backend cuda, in a build with kernels.";
        findings.push(Finding::note("GPUs", what, advice));
    }
    section
}

/// Adds the findings on one GPU.
fn judge(gpu: &Gpu, backend: Backend, findings: &mut Vec<Finding>) {
    let Gpu {
        ordinal,
        name,
        capability,
        stream_priorities,
        ..
    } = gpu;
    if !gpu.has_kernels {
        let what = format!("GPU {ordinal}, {name}, has compute capability {capability}");
        let advice = "The kernels need 9.0 (H100, H200). Leave it out with CUDA_VISIBLE_DEVICES.";
        findings.push(Finding::of_gpus(backend, what, advice));
    }
    if gpu.mig {
        let what = format!("GPU {ordinal} is a part of a GPU (MIG), which has no peers");
        let advice = "Turn MIG off for groups of several GPUs.";
        findings.push(Finding::note("GPUs", what, advice));
    }
    if *stream_priorities < PRIORITIES {
        let what =
            format!("GPU {ordinal} has {stream_priorities} stream priorities: rows are pulled");
        let advice = "MPS and virtual GPUs take them away; stop MPS for pushes and stores.";
        findings.push(Finding::note("GPUs", what, advice));
    }
}

/// Tries each GPU alone, and each pair of GPUs that work.
fn measure(section: &mut GpuSection, timeout: Duration, findings: &mut Vec<Finding>) {
    for gpu in section.gpus.iter_mut().filter(|gpu| gpu.has_kernels) {
        match (Step::Alone { gpu: gpu.ordinal }).run(timeout) {
            Ok(product) => gpu.product = Some(product),
            Err(error) => {
                let what = format!("GPU {}: {error}", gpu.ordinal);
                let advice = "The message says what to change. Until then leave this GPU out with CUDA_VISIBLE_DEVICES.";
                findings.push(Finding::problem("GPUs", what, advice));
            }
        }
    }
    let gpus = section.gpus.iter().filter(|gpu| gpu.product.is_some());
    let working: Vec<usize> = gpus.map(|gpu| gpu.ordinal).collect();
    for (at, &first) in working.iter().enumerate() {
        for &second in &working[at + 1..] {
            let gpus = [first, second];
            let measured = measure_pair(&section.links, gpus, timeout, findings);
            section.pairs.push(Pair { gpus, measured });
        }
    }
    note_slow_pairs(&section.pairs, findings);
    match working.len() {
        0 => (),
        1 => findings.push(Finding::ok(
            "GPUs",
            "one GPU works; there is no other to measure it with",
        )),
        count => {
            let pairs = section.pairs.iter();
            let pairs = pairs.filter(|pair| pair.measured.is_some()).count();
            let all = section.pairs.len();
            let what =
                format!("{count} GPUs work by themselves, and {pairs} of {all} pairs together");
            findings.push(Finding::ok("GPUs", what));
        }
    }
}

/// Tries two GPUs that can map each other's memory.
fn measure_pair(
    links: &[Link],
    [first, second]: [usize; 2],
    timeout: Duration,
    findings: &mut Vec<Finding>,
) -> Option<Measured> {
    let gpus = [first, second];
    let mut between = links
        .iter()
        .filter(|link| gpus.contains(&link.from) && gpus.contains(&link.to));
    if !between.all(|link| link.access) {
        // A finding says so already.
        return None;
    }
    match (Step::Pair { first, second }).run(timeout) {
        Ok(measured) => Some(measured),
        Err(error) => {
            let what = format!("GPUs {first} and {second}: {error}");
            let advice = "Keep the two out of one group until this is mended. Compare nvidia-smi topo -m, and the system's log (dmesg).";
            findings.push(Finding::problem("GPUs", what, advice));
            None
        }
    }
}

/// Names the pairs that copy less than half as fast as the best pair.
fn note_slow_pairs(pairs: &[Pair], findings: &mut Vec<Finding>) {
    let rates = pairs
        .iter()
        .filter_map(|pair| Some((pair.gpus, pair.measured.as_ref()?.copies.gb_per_s)));
    let best = rates.clone().map(|(_, rate)| rate).fold(0.0, f64::max);
    for ([one, other], rate) in rates.filter(|&(_, rate)| rate < best / 2.0) {
        let what = format!("GPUs {one} and {other} copy {rate:.1} GB/s, others {best:.1}");
        let advice = "A group is as fast as its slowest link. Compare nvidia-smi topo -m.";
        findings.push(Finding::note("GPUs", what, advice));
    }
}

/// Asks the driver.
///
/// # Errors
/// There is no driver, or it does not start.
pub fn inspect() -> Result<Inspection, String> {
    // SAFETY: loading the driver runs its initialisers, which any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver (libcuda.so.1) is not installed".into());
    }
    let fails = |error| format!("the CUDA driver does not start: {}", words(error));
    result::init().map_err(fails)?;
    let mut version = 0;
    // SAFETY: writes the local.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(fails)?;
    let count = result::device::get_count().map_err(fails)?;
    let mut inspection = Inspection {
        driver: format!("{}.{}", version / 1000, version % 1000 / 10),
        gpus: Vec::new(),
        links: Vec::new(),
        failures: Vec::new(),
    };
    for ordinal in 0..count as usize {
        match inspect_gpu(ordinal) {
            Ok(gpu) => inspection.gpus.push(gpu),
            Err(error) => {
                let what = format!("GPU {ordinal} does not answer: {}", words(error));
                inspection.failures.push(what);
            }
        }
    }
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            match inspect_link(from, to) {
                Ok(link) => inspection.links.push(link),
                Err(error) => {
                    let what = format!(
                        "the link from GPU {from} to GPU {to} is unknown: {}",
                        words(error)
                    );
                    inspection.failures.push(what);
                }
            }
        }
    }
    Ok(inspection)
}

/// The driver's words for an error.
fn words(error: DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy());
    let text = error.error_string().map(|text| text.to_string_lossy());
    format!("{}: {}", name.unwrap_or_default(), text.unwrap_or_default())
}

fn inspect_gpu(ordinal: usize) -> Result<Gpu, DriverError> {
    let context = CudaContext::new(ordinal)?;
    let value = |of| context.attribute(of);
    let capability = context.compute_capability()?;
    let (free_memory_bytes, memory_bytes) = context.mem_get_info()?;
    let (least, greatest) = result::stream::get_priority_range()?;
    let name = context.name()?;
    let hex: String = context
        .uuid()?
        .bytes
        .iter()
        .map(|byte| format!("{:02x}", *byte as u8))
        .collect();
    Ok(Gpu {
        ordinal,
        capability: format!("{}.{}", capability.0, capability.1),
        has_kernels: has_kernels(&name, capability),
        multiprocessors: value(attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory_bytes,
        free_memory_bytes,
        uuid: format!(
            "GPU-{}-{}-{}-{}-{}",
            &hex[..8],
            &hex[8..12],
            &hex[12..16],
            &hex[16..20],
            &hex[20..]
        ),
        pci: format!(
            "{:08x}:{:02x}:{:02x}.0",
            value(attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
            value(attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
            value(attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
        ),
        ecc: value(attribute::CU_DEVICE_ATTRIBUTE_ECC_ENABLED)? != 0,
        // The driver's name of a part of a GPU has this in it.
        mig: name.contains(" MIG "),
        stream_priorities: least - greatest + 1,
        name,
        product: None,
    })
}

fn inspect_link(from: i32, to: i32) -> Result<Link, DriverError> {
    let (source, target) = (result::device::get(from)?, result::device::get(to)?);
    let mut access = 0;
    // SAFETY: writes the local.
    unsafe { sys::cuDeviceCanAccessPeer(&mut access, source, target) }.result()?;
    let value = |of| {
        let mut value = 0;
        // SAFETY: writes the local.
        unsafe { sys::cuDeviceGetP2PAttribute(&mut value, of, source, target) }.result()?;
        Ok::<_, DriverError>(value)
    };
    Ok(Link {
        from: from as usize,
        to: to as usize,
        access: access != 0,
        performance_rank: value(p2p::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        native_atomics: value(p2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
    })
}

fn builder(gpu: usize, wait: Duration) -> Builder<Cuda> {
    Group::builder()
        .device(gpu)
        .timeout(wait)
        .arrival_timeout(wait)
}

/// A group of one GPU.
pub fn alone(gpu: usize, wait: Duration) -> Result<Product, Failure> {
    let address = format!("gemmesh-doctor/{}", std::process::id());
    let group = builder(gpu, wait).connect(0, 1, &address)?;
    measure::product(&group)
}

/// A rank of a group of two GPUs.
pub fn pair(gpu: usize, wait: Duration) -> Result<Measured, Failure> {
    let group = builder(gpu, wait).from_env()?;
    group.check_peers()?;
    let product = measure::product(&group)?;
    let copies = measure::gather(&group, Way::Copies, 64 << 20)?;
    let no_stores = no_stores(&group)?;
    // The most bytes that the library stores.
    let stores = match no_stores {
        None => Some(measure::gather(&group, Way::Chosen, 16 << 20)?),
        Some(_) => None,
    };
    Ok(Measured {
        product,
        copies,
        stores,
        no_stores,
    })
}

/// Why kernels may not wait for one another, if they may not. Then nothing is pushed or stored.
fn no_stores(group: &Group<Cuda>) -> Result<Option<String>, Failure> {
    const N: usize = 128;
    let a = group.sharded::<bf16>(256, 256)?;
    let config = AllGatherMatmul::new().prepare(&a, N)?.config();
    let pushed = AllGatherMatmul::new().config(config.with_route(Route::Push));
    match pushed.prepare(&a, N) {
        Ok(_) => Ok(None),
        Err(error) if error.kind().class() == Class::Misuse => Ok(Some(error.to_string())),
        Err(error) => Err(error.into()),
    }
}
