//! The report, as people read it.

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};

use super::report::{
    Backend, Finding, GpuSection, HostGroup, Machine, Product, Report, Severity, Speed,
};

pub fn json(report: &Report) {
    match serde_json::to_string_pretty(report) {
        Ok(text) => println!("{text}"),
        Err(error) => eprintln!("error: the report can't be written as JSON: {error}"),
    }
}

/// For a rank whose report nobody waits for.
pub fn to_stderr(finding: &Finding) {
    if finding.severity == Severity::Problem {
        eprintln!("{}: {}", finding.about, finding.what);
    }
}

pub fn text(report: &Report) {
    let backend = match report.backend {
        Backend::Host => "host",
        Backend::Cuda => "cuda",
    };
    println!(
        "gemmesh {}: does backend {backend} work here?",
        report.gemmesh
    );
    heading("Machine");
    machine(&report.machine);
    if let Some(launcher) = &report.launcher {
        let name = launcher.name;
        println!(
            "rank {} of {}, started by {name}",
            launcher.rank, launcher.world_size
        );
    }
    if !report.variables.is_empty() {
        heading("Environment");
        let rows = report.variables.iter();
        table(
            None,
            rows.map(|v| [v.name.clone(), v.value.clone(), v.effect.into()]),
        );
    }
    heading("Host backend");
    match &report.host {
        Some(group) => host(group),
        None => println!("it does not work: see below"),
    }
    heading("GPUs");
    gpus(&report.cuda);
    heading("Findings");
    for finding in &report.findings {
        let severity = match finding.severity {
            Severity::Ok => "ok",
            Severity::Note => "note",
            Severity::Problem => "PROBLEM",
        };
        println!("{severity:8}{}: {}", finding.about, finding.what);
        if let Some(advice) = &finding.advice {
            println!("{:8}  {advice}", "");
        }
    }
}

fn heading(name: &str) {
    println!("\n{name}");
}

fn table<const N: usize>(header: Option<[&str; N]>, rows: impl Iterator<Item = [String; N]>) {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    if let Some(header) = header {
        table.set_header(header);
    }
    rows.for_each(|row| {
        table.add_row(row);
    });
    println!("{table}");
}

fn machine(machine: &Machine) {
    let gib = |bytes: Option<u64>| match bytes {
        Some(bytes) => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
        None => "unknown".into(),
    };
    let limit = |limit: Option<u64>| limit.map_or("unlimited".into(), |limit| limit.to_string());
    println!(
        "{}, {} cores, {} of memory, {} available",
        machine.os,
        machine.cores,
        gib(machine.memory_bytes),
        gib(machine.available_memory_bytes)
    );
    println!(
        "memfd {}; open files {}; addresses {}; /dev/shm (of NCCL only) {} free",
        if machine.memfd { "works" } else { "fails" },
        limit(machine.open_files),
        limit(machine.address_space_bytes),
        gib(machine.dev_shm_free_bytes)
    );
}

fn verified(product: &Product) -> String {
    format!(
        "{} elements verified against float64, off by {:.2} of what rounding allows",
        product.elements, product.worst
    )
}

fn latency(speed: &Speed) -> String {
    format!("{:.1}", speed.latency_us)
}

fn rate(speed: &Speed) -> String {
    format!("{:.1}", speed.gb_per_s)
}

fn host(group: &HostGroup) {
    let HostGroup {
        ranks,
        product,
        copies,
    } = group;
    println!("{ranks} ranks as threads: {}", verified(product));
    println!(
        "a gather of 16 bytes a rank takes {} µs; of {} MiB a rank, {} GB/s come to each",
        latency(copies),
        copies.bytes >> 20,
        rate(copies)
    );
}

fn gpus(section: &GpuSection) {
    if !section.compiled {
        return println!("this program was built without feature cuda");
    }
    let none = || "none".to_string();
    println!(
        "kernels compiled by nvcc {}; the driver supports CUDA {}",
        section.nvcc.map_or_else(none, str::to_string),
        section.driver.clone().unwrap_or_else(none)
    );
    if section.gpus.is_empty() {
        return;
    }
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
    let yes = |is: bool| if is { "yes" } else { "no" }.to_string();
    let rows = section.gpus.iter().map(|gpu| {
        [
            gpu.ordinal.to_string(),
            gpu.name.clone(),
            gpu.capability.clone(),
            gpu.multiprocessors.to_string(),
            gib(gpu.free_memory_bytes),
            gib(gpu.memory_bytes),
            gpu.pci.clone(),
            yes(gpu.ecc),
            gpu.product
                .as_ref()
                .map_or("-".into(), |product| product.elements.to_string()),
            gpu.uuid.clone(),
        ]
    });
    table(Some(header), rows);
    if section.links.is_empty() {
        return;
    }
    println!(
        "\nPeer access, row to column: the link's rank of performance (lower is faster), + with native atomics, - for none"
    );
    let count = section.gpus.len();
    matrix(count, |from, to| {
        let link = section
            .links
            .iter()
            .find(|link| (link.from, link.to) == (from, to));
        match link {
            Some(link) if link.access => {
                format!(
                    "{}{}",
                    link.performance_rank,
                    if link.native_atomics { "+" } else { "" }
                )
            }
            Some(_) => "-".into(),
            None => String::new(),
        }
    });
    let pair = |x: usize, y: usize| {
        let gpus = [x.min(y), x.max(y)];
        let pair = section.pairs.iter().find(|pair| pair.gpus == gpus)?;
        pair.measured.as_ref()
    };
    let measured = |words: &str, of: &dyn Fn(usize, usize) -> Option<String>| {
        println!("\n{words}");
        matrix(count, |x, y| {
            of(x, y).unwrap_or_else(|| if x == y { "" } else { "-" }.into())
        });
    };
    if section.pairs.is_empty() {
        return;
    }
    measured(
        "GB/s to each of two GPUs at once, by copy engines (64 MiB a rank)",
        &|x, y| Some(rate(&pair(x, y)?.copies)),
    );
    measured(
        "µs of a gather of 16 bytes a rank, by copy engines",
        &|x, y| Some(latency(&pair(x, y)?.copies)),
    );
    measured("GB/s by stores of kernels (16 MiB a rank)", &|x, y| {
        Some(rate(pair(x, y)?.stores.as_ref()?))
    });
    measured(
        "µs of a gather of 16 bytes a rank, by stores of kernels",
        &|x, y| Some(latency(pair(x, y)?.stores.as_ref()?)),
    );
}

/// A square of GPUs.
fn matrix(count: usize, cell: impl Fn(usize, usize) -> String) {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(std::iter::once(String::new()).chain((0..count).map(|gpu| gpu.to_string())));
    for row in 0..count {
        table.add_row(
            std::iter::once(row.to_string()).chain((0..count).map(|column| cell(row, column))),
        );
    }
    println!("{table}");
}
