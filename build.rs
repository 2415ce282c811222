//! With feature `cuda`, compiles the kernels in cuda/ with nvcc to cubins that the crate embeds, several for each family
//! and its element types.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::thread;

use kernels::{FAMILIES, Family, Shape, Variant};

// The library uses the rest of it.
#[allow(dead_code)]
#[path = "cuda/kernels.rs"]
mod kernels;

/// The first release whose assembler knows all that the kernels use.
const OLDEST: (u32, u32) = (12, 4);
/// If one of these is set, the crate is checked, documented or tested without nvcc, and the program can't use GPUs.
const NO_KERNELS: [&str; 2] = ["GEMMESH_NO_KERNELS", "DOCS_RS"];

/// The most shapes of a cubin. nvcc compiles cubins beside one another, on as many cores as there are.
const SHAPES_OF_A_CUBIN: usize = 16;

/// The source of one cubin.
struct Unit {
    /// The cubin's name, without its ending.
    name: String,
    source: PathBuf,
    /// The architecture that it is compiled for.
    arch: &'static str,
}

fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    for name in ["NVCC", "CUDA_HOME", "PATH"].iter().chain(&NO_KERNELS) {
        println!("cargo:rerun-if-env-changed={name}");
    }
    // Every file that the kernels include is in this folder, and so is their list.
    println!("cargo:rerun-if-changed=cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run cargo")?);
    let units = units(&out)?;
    // For bug reports.
    let release = out.join("nvcc.txt");
    if NO_KERNELS.iter().any(|name| env::var_os(name).is_some()) {
        write(&release, b"")?;
        let empty = |unit: &Unit| write(&out.join(format!("{}.cubin", unit.name)), b"");
        return units.iter().try_for_each(empty);
    }
    let (nvcc, (major, minor)) = find().and_then(new_enough).map_err(|reason| {
        format!("{reason}; to check the crate without kernels, set GEMMESH_NO_KERNELS=1")
    })?;
    write(&release, format!("{major}.{minor}").as_bytes())?;
    let queue = Mutex::new(units.iter());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || std::iter::from_fn(next).try_for_each(|unit| compile(&nvcc, unit, &out));
    thread::scope(|scope| {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..cores.min(units.len()))
            .map(|_| scope.spawn(work))
            .collect();
        let mut ends = workers.into_iter().map(|worker| worker.join());
        let panicked = |_| Err("a thread that runs nvcc has panicked".into());
        ends.try_for_each(|end| end.unwrap_or_else(panicked))
    })
}

/// Writes the sources of the families, and cubins.rs, which embeds their cubins. Returns the units, with those first
/// that take the longest.
fn units(out: &Path) -> Result<Vec<Unit>, String> {
    let mut units = Vec::new();
    let mut cubins = String::from("[\n");
    for (index, family) in FAMILIES.iter().enumerate() {
        family
            .check()
            .map_err(|reason| format!("cuda/kernels.rs: {reason}"))?;
        let parts = family.shapes.len().div_ceil(SHAPES_OF_A_CUBIN);
        for (elements, part) in family
            .elements
            .iter()
            .flat_map(|elements| (0..parts).map(move |part| (elements, part)))
        {
            let name = format!("{}_{elements}_{part}", family.name);
            let [a, b] = dtypes(elements);
            let _ = writeln!(
                cubins,
                "Cubin {{ family: &FAMILIES[{index}], elements: \"{elements}\", \
                 dtypes: [DType::{a}, DType::{b}], part: {part}, parts: {parts}, \
                 image: include_bytes!(\"{name}.cubin\") }},"
            );
            let source = out.join(format!("{name}.cu"));
            // Like shapes stand together, so that each part has some of each kind.
            let shapes = family.shapes.iter().skip(part).step_by(parts);
            write(&source, source_of(family, elements, shapes).as_bytes())?;
            units.push(Unit {
                name,
                source,
                arch: family.arch,
            });
        }
    }
    write(&out.join("cubins.rs"), (cubins + "]\n").as_bytes())?;
    for source in [
        "protocol/align",
        "protocol/count",
        "collective/store",
        "collective/reduce",
        "collective/quantize",
    ] {
        let (_, name) = source.split_once('/').unwrap_or(("", source));
        units.push(Unit {
            name: name.into(),
            source: format!("cuda/{source}.cu").into(),
            arch: FAMILIES[0].arch,
        });
    }
    Ok(units)
}

/// The variants of `DType` for the types of `a` and `b`.
fn dtypes(elements: &str) -> [&'static str; 2] {
    let of = |name| match name {
        "bf16" => "Bf16",
        "f16" => "F16",
        "e4m3" => "F8E4M3",
        _ => "F8E5M2",
    };
    let (a, b) = elements.split_once('_').unwrap_or((elements, elements));
    [of(a), of(b)]
}

/// The family's kernels of these shapes for the types of `a` and `b`.
fn source_of<'a>(
    family: &Family,
    elements: &str,
    shapes: impl Iterator<Item = &'a Shape>,
) -> String {
    let Family { name, threads, .. } = family;
    let mut source = format!(
        "#include \"cuda/{name}/matmul.cuh\"\n\
         static_assert(GEMMESH_THREADS == {threads}, \"cuda/kernels.rs says so\");\n"
    );
    for shape in shapes {
        for variant in family.variants(shape) {
            let head = match variant {
                Variant::Sums => "GEMMESH_MATMUL_SUMS",
                _ => "GEMMESH_MATMUL",
            };
            let _ = writeln!(
                source,
                "{head}({}, {}, {}, gemmesh::{elements}, {}, {}, {}, {}, {}, {}, {}, {}, gemmesh::Variant::k{variant:?})",
                family.kernel(elements, shape, variant),
                family.shared_bytes(shape),
                shape.ctas(),
                shape.tile_m,
                shape.tile_n,
                shape.stages,
                shape.cluster_m,
                shape.cluster_n,
                shape.split,
                shape.is_pingpong(variant),
                family.boxes(shape),
            );
        }
    }
    source
}

fn compile(nvcc: &Path, unit: &Unit, out: &Path) -> Result<(), String> {
    let Unit { name, source, arch } = unit;
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", "-I."])
        .arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"))
        .arg("-o")
        .arg(out.join(format!("{name}.cubin")))
        .arg(source)
        .output()
        .map_err(|e| format!("cannot run {}: {e}", nvcc.display()))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprintln!("{report}");
        let first = report
            .lines()
            .find(|line| ["error", "fatal"].iter().any(|word| line.contains(word)))
            .unwrap_or("no message");
        return Err(format!("nvcc cannot compile {}: {first}", source.display()));
    }
    // Kept, because it shows registers and spills.
    write(&out.join(format!("{name}.ptxas.txt")), report.as_bytes())
}

fn write(path: &Path, bytes: &[u8]) -> Result<(), String> {
    fs::write(path, bytes).map_err(|e| format!("cannot write {}: {e}", path.display()))
}

/// The nvcc that NVCC names, or else CUDA_HOME's, or else the first on PATH.
fn find() -> Result<PathBuf, String> {
    if let Some(nvcc) = env::var_os("NVCC") {
        return Ok(nvcc.into());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    home.into_iter()
        .chain(env::split_paths(&path))
        .map(|folder| folder.join("nvcc"))
        .find(|nvcc| nvcc.is_file())
        .ok_or_else(|| {
            "feature cuda needs nvcc: install the CUDA toolkit, or name nvcc in NVCC or its toolkit in CUDA_HOME".into()
        })
}

/// Checks that nvcc is new enough, and returns it with its release.
fn new_enough(nvcc: PathBuf) -> Result<(PathBuf, (u32, u32)), String> {
    let version = version(&nvcc)?;
    if version < OLDEST {
        return Err(format!(
            "{} is release {}.{}; feature cuda needs {}.{} or later",
            nvcc.display(),
            version.0,
            version.1,
            OLDEST.0,
            OLDEST.1
        ));
    }
    Ok((nvcc, version))
}

fn version(nvcc: &Path) -> Result<(u32, u32), String> {
    let output = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|e| format!("cannot run {}: {e}", nvcc.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let release = text.split("release ").nth(1).and_then(|rest| {
        let (major, rest) = rest.split_once('.')?;
        let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Some((major.parse().ok()?, minor.parse().ok()?))
    });
    release.ok_or_else(|| format!("{} --version says no release: {text}", nvcc.display()))
}
