//! The report, as people read it.

use std::fmt::Write as _;
use std::io::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};

use super::report::{
    Backend, Finding, GpuSection, HostGroup, Machine, Measured, Product, Report, Severity, Speed,
};

/// Adds a line to a text, which never fails.
macro_rules! line {
    ($text:expr) => { $text.push('\n') };
    ($text:expr, $($words:tt)*) => {{
        let _ = writeln!($text, $($words)*);
    }};
}

/// Prints a text. It is no failure if nobody reads it.
pub fn out(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// Prints a text on stderr, beside the report.
pub fn err(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

pub fn json(report: &Report) -> String {
    let text = serde_json::to_string_pretty(report);
    text.unwrap_or_else(|error| format!("the report can't be written as JSON: {error}")) + "\n"
}

pub fn text(report: &Report) -> String {
    let mut text = String::new();
    let backend = match report.backend {
        Backend::Host => "host",
        Backend::Cuda => "cuda",
    };
    line!(
        text,
        "gemmesh {}: does backend {backend} work here?",
        report.gemmesh
    );
    line!(text, "\nMachine");
    machine(&mut text, &report.machine);
    if let Some(launcher) = &report.launcher {
        let (rank, world, name) = (launcher.rank, launcher.world_size, launcher.name);
        line!(text, "rank {rank} of {world}, started by {name}");
    }
    if !report.variables.is_empty() {
        line!(text, "\nEnvironment");
        let rows = report.variables.iter();
        let rows = rows.map(|v| [v.name.clone(), v.value.clone(), v.effect.into()]);
        table(&mut text, None, rows);
    }
    line!(text, "\nHost backend");
    match &report.host {
        Some(group) => host(&mut text, group),
        None => line!(text, "it does not work: see below"),
    }
    line!(text, "\nGPUs");
    gpus(&mut text, &report.cuda);
    line!(text, "\nFindings");
    report
        .findings
        .iter()
        .for_each(|finding| line!(text, "{}", self::finding(finding)));
    text
}

/// A finding, and below it what to do.
pub fn finding(finding: &Finding) -> String {
    let severity = match finding.severity {
        Severity::Ok => "ok",
        Severity::Note => "note",
        Severity::Problem => "PROBLEM",
    };
    let mut text = format!("{severity:8}{}: {}", finding.about, finding.what);
    if let Some(advice) = &finding.advice {
        let _ = write!(text, "\n{:10}{advice}", "");
    }
    text
}

fn table<const N: usize>(
    text: &mut String,
    header: Option<[&str; N]>,
    rows: impl Iterator<Item = [String; N]>,
) {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    if let Some(header) = header {
        table.set_header(header);
    }
    table.add_rows(rows);
    line!(text, "{}", table.trim_fmt());
}

fn machine(text: &mut String, machine: &Machine) {
    let gib = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        None => "unknown".into(),
    };
    let limit = |limit: Option<u64>| limit.map_or("unlimited".into(), |limit| limit.to_string());
    line!(
        text,
        "{}, {} cores, {} of memory, {} available",
        machine.os,
        machine.cores,
        gib(machine.memory_bytes),
        gib(machine.available_memory_bytes)
    );
    line!(
        text,
        "memfd {}; open files {}; bytes of addresses {}; /dev/shm, of NCCL only, {} free",
        if machine.memfd { "works" } else { "fails" },
        limit(machine.open_files),
        limit(machine.address_space_bytes),
        gib(machine.dev_shm_free_bytes)
    );
}

fn latency(speed: &Speed) -> String {
    format!("{:.1}", speed.latency_us)
}

fn rate(speed: &Speed) -> String {
    format!("{:.1}", speed.gb_per_s)
}

fn host(text: &mut String, group: &HostGroup) {
    let HostGroup {
        ranks,
        product: Product { elements, .. },
        copies,
    } = group;
    line!(
        text,
        "{ranks} ranks as threads: all {elements} elements of a product agree with float64 to within bf16's rounding"
    );
    line!(
        text,
        "a gather of 16 bytes a rank takes {} µs; of {} MiB a rank, {} GB/s come to each",
        latency(copies),
        copies.bytes >> 20,
        rate(copies)
    );
}

fn gpus(text: &mut String, section: &GpuSection) {
    if !section.compiled {
        return line!(text, "this program was built without feature cuda");
    }
    line!(
        text,
        "{}; {}",
        match section.nvcc {
            Some(release) => format!("kernels compiled by nvcc {release}"),
            None => "no kernels".into(),
        },
        match &section.driver {
            Some(version) => format!("the driver supports CUDA {version}"),
            None => "no driver".into(),
        }
    );
    if section.gpus.is_empty() {
        return;
    }
    devices(text, section);
    if !section.links.is_empty() {
        links(text, section);
    }
    if !section.pairs.is_empty() {
        pairs(text, section);
    }
}

/// A line for each GPU.
fn devices(text: &mut String, section: &GpuSection) {
    let header = [
        "GPU",
        "name",
        "capability",
        "SMs",
        "GiB free",
        "of",
        "PCI",
        "ECC",
        "verified",
        "UUID",
    ];
    let gib = |bytes: usize| format!("{:.1}", bytes as f64 / (1u64 << 30) as f64);
    let rows = section.gpus.iter().map(|gpu| {
        let verified = gpu.product.as_ref();
        [
            gpu.ordinal.to_string(),
            gpu.name.clone(),
            gpu.capability.clone(),
            gpu.multiprocessors.to_string(),
            gib(gpu.free_memory_bytes),
            gib(gpu.memory_bytes),
            gpu.pci.clone(),
            if gpu.ecc { "yes" } else { "no" }.into(),
            verified.map_or("-".into(), |product| product.elements.to_string()),
            gpu.uuid.clone(),
        ]
    });
    table(text, Some(header), rows);
}

/// Which GPUs can reach one another.
fn links(text: &mut String, section: &GpuSection) {
    line!(
        text,
        "\nPeer access, row to column: the link's rank of performance (lower is faster), + with native atomics, - for none"
    );
    square(text, section, |from, to| {
        let mut links = section.links.iter();
        let link = links.find(|link| (link.from, link.to) == (from, to))?;
        let atomics = if link.native_atomics { "+" } else { "" };
        link.access
            .then(|| format!("{}{atomics}", link.performance_rank))
    });
}

/// The speed of each pair of GPUs.
fn pairs(text: &mut String, section: &GpuSection) {
    type Cell = fn(&Measured) -> Option<String>;
    let measured: [(&str, Cell); 4] = [
        (
            "GB/s to each of two GPUs at once, by copy engines (64 MiB a rank)",
            |measured| Some(rate(&measured.copies)),
        ),
        (
            "µs of a gather of 16 bytes a rank, by copy engines",
            |measured| Some(latency(&measured.copies)),
        ),
        (
            "GB/s to each of two GPUs at once, by stores of kernels (16 MiB a rank)",
            |measured| measured.stores.as_ref().map(rate),
        ),
        (
            "µs of a gather of 16 bytes a rank, by stores of kernels",
            |measured| measured.stores.as_ref().map(latency),
        ),
    ];
    for (words, of) in measured {
        line!(text, "\n{words}");
        square(text, section, |x, y| {
            let gpus = [x.min(y), x.max(y)];
            let pair = section.pairs.iter().find(|pair| pair.gpus == gpus)?;
            of(pair.measured.as_ref()?)
        });
    }
}

/// A table with an entry for each pair of GPUs.
fn square(
    text: &mut String,
    section: &GpuSection,
    between: impl Fn(usize, usize) -> Option<String>,
) {
    let gpus = || section.gpus.iter().map(|gpu| gpu.ordinal);
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(std::iter::once(String::new()).chain(gpus().map(|gpu| gpu.to_string())));
    for row in gpus() {
        let cell = |column| match row == column {
            true => String::new(),
            false => between(row, column).unwrap_or("-".into()),
        };
        table.add_row(std::iter::once(row.to_string()).chain(gpus().map(cell)));
    }
    line!(text, "{}", table.trim_fmt());
}
