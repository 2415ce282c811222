//! With feature `cuda`: compiles the kernels in cuda/ with nvcc to a cubin that the crate embeds.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The first release whose assembler knows all that the kernels use.
const OLDEST: (u32, u32) = (12, 4);
const KERNEL: &str = "cuda/hopper/all_gather_matmul.cu";
/// Who sets one of these checks, documents or tests the crate without nvcc, and gets a program that can't use GPUs.
const NO_KERNELS: [&str; 2] = ["GEMMESH_NO_KERNELS", "DOCS_RS"];

fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            println!("cargo::error={reason}");
            ExitCode::FAILURE
        }
    }
}

fn compile() -> Result<(), String> {
    for name in ["NVCC", "CUDA_HOME", "PATH"].iter().chain(&NO_KERNELS) {
        println!("cargo:rerun-if-env-changed={name}");
    }
    // Every file that the kernel includes is in this folder.
    println!("cargo:rerun-if-changed=cuda");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set: run cargo")?);
    let cubin = out.join("all_gather_matmul.cubin");
    if NO_KERNELS.iter().any(|name| env::var_os(name).is_some()) {
        return fs::write(&cubin, []).map_err(|e| format!("cannot write {}: {e}", cubin.display()));
    }
    let nvcc = find().and_then(new_enough).map_err(|reason| {
        format!("{reason}; to check the crate without kernels, set GEMMESH_NO_KERNELS=1")
    })?;
    let output = Command::new(&nvcc)
        .args(["-std=c++17", "-O3", "-cubin", "-Xptxas", "-v"])
        .arg("-gencode=arch=compute_90a,code=sm_90a")
        .arg("-o")
        .arg(&cubin)
        .arg(KERNEL)
        .output()
        .map_err(|e| format!("cannot run {}: {e}", nvcc.display()))?;
    let report = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprintln!("{report}");
        let first = report
            .lines()
            .find(|l| l.contains("error"))
            .unwrap_or("no message");
        return Err(format!("nvcc cannot compile {KERNEL}: {first}"));
    }
    // Kept for whoever wants to see registers and spills.
    let kept = out.join("ptxas.txt");
    fs::write(&kept, report.as_bytes()).map_err(|e| format!("cannot write {}: {e}", kept.display()))
}

/// NVCC, else CUDA_HOME's, else the first on PATH.
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

fn new_enough(nvcc: PathBuf) -> Result<PathBuf, String> {
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
    Ok(nvcc)
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
