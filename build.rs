//! With feature `cuda`, compiles the kernels in cuda/ with nvcc to cubins that the crate embeds, several for each family
//! and its element types.

use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::thread;

use kernels::{COMPILED, KernelList, OperandTypes, Shape};

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
    /// Its architecture is what it is compiled for.
    family: &'static dyn KernelList,
}

/// The kernels that all families share, each with the folder of its source.
const SHARED: [(&str, &str); 5] = [
    ("protocol", "align"),
    ("protocol", "count"),
    ("collective", "store"),
    ("collective", "reduce"),
    ("collective", "quantize"),
];

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

/// Writes the sources of the families, and cubins.rs and shared_cubins.rs, which embed their cubins. Returns the units,
/// with those first that take the longest.
fn units(out: &Path) -> Result<Vec<Unit>, String> {
    let (mut cubins, mut shared_cubins) = (String::from("[\n"), String::from("[\n"));
    let (mut units, mut shared) = (Vec::new(), Vec::new());
    for family in COMPILED {
        for (list, types) in family.types().iter().enumerate() {
            family
                .check(types.shapes)
                .map_err(|reason| format!("cuda/{}/kernels.rs: {reason}", family.name()))?;
            for elements in types.elements {
                units.extend(write_sources(
                    out,
                    family,
                    (list, types),
                    elements,
                    &mut cubins,
                )?);
            }
        }
        for (folder, kernel) in SHARED {
            let name = format!("{kernel}_{}", family.name());
            let _ = writeln!(
                shared_cubins,
                "(\"{}\", \"{kernel}\", include_bytes!(\"{name}.cubin\")),",
                family.name()
            );
            shared.push(Unit {
                name,
                source: format!("cuda/{folder}/{kernel}.cu").into(),
                family,
            });
        }
    }
    write(&out.join("cubins.rs"), (cubins + "]\n").as_bytes())?;
    write(
        &out.join("shared_cubins.rs"),
        (shared_cubins + "]\n").as_bytes(),
    )?;
    units.extend(shared);
    Ok(units)
}

/// Writes the sources of a family's kernels for some types, with this number in its list, and a line of `cubins` for
/// each.
fn write_sources(
    out: &Path,
    family: &'static dyn KernelList,
    (list, types): (usize, &'static OperandTypes),
    elements: &str,
    cubins: &mut String,
) -> Result<Vec<Unit>, String> {
    let parts = types.shapes.len().div_ceil(SHAPES_OF_A_CUBIN);
    let [a, b] = dtypes(elements);
    let write_part = |part| {
        let family_name = family.name();
        let name = format!("{family_name}_{elements}_{part}");
        let _ = writeln!(
            cubins,
            "Cubin {{ family: \"{family_name}\", list: {list}, elements: \"{elements}\", \
             dtypes: [DType::{a}, DType::{b}], part: {part}, parts: {parts}, \
             image: include_bytes!(\"{name}.cubin\") }},"
        );
        let source = out.join(format!("{name}.cu"));
        // Like shapes stand together, so that each part has some of each kind.
        let shapes: Vec<&Shape> = types.shapes.iter().skip(part).step_by(parts).collect();
        write(&source, family.source(elements, &shapes).as_bytes())?;
        Ok(Unit {
            name,
            source,
            family,
        })
    };
    (0..parts).map(write_part).collect()
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

fn compile(nvcc: &Path, unit: &Unit, out: &Path) -> Result<(), String> {
    let Unit {
        name,
        source,
        family,
    } = unit;
    let arch = family.arch();
    let output = Command::new(nvcc)
        .args(["-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", "-I."])
        // Its family.cuh.
        .arg(format!("-Icuda/{}", family.name()))
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
