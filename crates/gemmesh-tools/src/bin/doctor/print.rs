//! The report, as people read it.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use comfy_table::presets::NOTHING;
use comfy_table::{ContentArrangement, Table};

use super::report::{
    Backend, Finding, GpuSection, HostGroup, HostReport, Machine, Measured, Peer, Product, Report,
    Severity, Speed, Via,
};

/// Adds a line to a text, which never fails.
macro_rules! line {
    ($text:expr) => { $text.push('\n') };
    ($text:expr, $($words:tt)*) => {{
        let _ = writeln!($text, $($words)*);
    }};
}

/// Prints a text. It is no failure if its reader has gone.
pub fn out(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
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
    line!(text, "\nHosts and network");
    hosts(&mut text, &report.hosts);
    if !report.peers.is_empty() {
        peers(&mut text, &report.peers);
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

/// The hosts, their network devices, and what carries rows between them.
fn hosts(text: &mut String, hosts: &[HostReport]) {
    let rows = hosts.iter().map(|host| {
        let nccl = host.nccl.as_ref();
        [
            host.name.clone(),
            ranks(&host.ranks),
            nccl.map_or("none".into(), |nccl| nccl.version.clone()),
            nccl.and_then(|nccl| nccl.path.clone()).unwrap_or_default(),
        ]
    });
    table(text, Some(["host", "ranks", "NCCL", "file"]), rows);
    interfaces(text, hosts);
    rdma_ports(text, hosts);
    nccl(text, hosts);
}

/// Ranks in words. Those of a host are mostly neighbours.
fn ranks(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|one, next| one + 1 == *next);
    let words = runs.map(|run| match run {
        [first, .., last] => format!("{first} to {last}"),
        run => run[0].to_string(),
    });
    match words.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => "-".into(),
        words => words,
    }
}

fn interfaces(text: &mut String, hosts: &[HostReport]) {
    let row = |host: &HostReport| {
        let name = host.name.clone();
        let interfaces = host.interfaces.iter().map(move |interface| {
            [
                name.clone(),
                interface.name.clone(),
                if interface.up { "up" } else { "down" }.into(),
                gbit(interface.mbit_per_s),
                if interface.is_virtual {
                    "virtual"
                } else {
                    "hardware"
                }
                .into(),
                interface.rdma.join(", "),
            ]
        });
        interfaces.collect::<Vec<_>>()
    };
    let header = ["host", "interface", "state", "Gb/s", "kind", "RDMA"];
    optional_table(text, header, hosts.iter().flat_map(row).collect());
}

fn rdma_ports(text: &mut String, hosts: &[HostReport]) {
    let row = |host: &HostReport| {
        let name = host.name.clone();
        let ports = host.rdma_ports.iter().map(move |port| {
            [
                name.clone(),
                format!("{}:{}", port.device, port.port),
                port.state.clone(),
                gbit(port.mbit_per_s),
                port.link_layer.clone().unwrap_or_default(),
            ]
        });
        ports.collect::<Vec<_>>()
    };
    let header = ["host", "RDMA port", "state", "Gb/s", "link layer"];
    optional_table(text, header, hosts.iter().flat_map(row).collect());
}

/// A table that is left out if it has no rows.
fn optional_table<const N: usize>(text: &mut String, header: [&str; N], rows: Vec<[String; N]>) {
    if !rows.is_empty() {
        line!(text);
        table(text, Some(header), rows.into_iter());
    }
}

fn gbit(mbit_per_s: Option<u64>) -> String {
    mbit_per_s.map_or("?".into(), |mbit| (mbit as f64 / 1e3).to_string())
}

/// What of NCCL carries rows, and which hosts lack it.
fn nccl(text: &mut String, hosts: &[HostReport]) {
    line!(text);
    for host in hosts {
        if let Some(reason) = &host.no_nccl {
            line!(text, "no NCCL on {}: {reason}", host.name);
        }
    }
    let mut found = hosts.iter().filter_map(|host| host.nccl.as_ref());
    let Some(first) = found.clone().next() else {
        return;
    };
    let put_signal = match found.find(|nccl| !nccl.has_put_signal) {
        Some(nccl) => format!("NCCL {} has no put/signal", nccl.version),
        None => format!(
            "gemmesh does not use put/signal of NCCL {} yet",
            first.version
        ),
    };
    line!(
        text,
        "rows go between hosts by NCCL's grouped send and receive; {put_signal}"
    );
    line!(
        text,
        "NCCL_DEBUG=INFO makes NCCL say which network and plugin it takes"
    );
}

/// The route from each rank to each other rank.
fn peers(text: &mut String, peers: &[Peer]) {
    line!(
        text,
        "\nRoute of rows from rank (row) to rank (column), with GB/s as measured"
    );
    line!(
        text,
        "pull, push, store: within a host; the rate is that of copy engines as two GPUs copy at once"
    );
    if peers.iter().any(|peer| peer.via == Via::Network) {
        line!(
            text,
            "net: the network along a rail; the rate is that of all rails at once"
        );
    }
    if peers.iter().any(|peer| matches!(peer.via, Via::Rank(_))) {
        line!(
            text,
            "by 3: rank 3 gets the rows over the network, and passes them on"
        );
    }
    let ranks: Vec<usize> = (0..=peers.iter().map(|peer| peer.from).max().unwrap_or(0)).collect();
    square(text, &ranks, |from, to| {
        let peer = peers
            .iter()
            .find(|peer| (peer.from, peer.to) == (from, to))?;
        Some(route(peer))
    });
}

fn route(peer: &Peer) -> String {
    let via = match peer.via {
        Via::Pull => "pull".into(),
        Via::Push => "push".into(),
        Via::Store => "store".into(),
        Via::Network => "net".into(),
        Via::Rank(rank) => format!("by {rank}"),
    };
    match peer.gb_per_s {
        Some(rate) => format!("{via} {rate:.1}"),
        None => via,
    }
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
    square(text, &ordinals(section), |from, to| {
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
        square(text, &ordinals(section), |x, y| {
            let gpus = [x.min(y), x.max(y)];
            let pair = section.pairs.iter().find(|pair| pair.gpus == gpus)?;
            of(pair.measured.as_ref()?)
        });
    }
}

/// The numbers of the GPUs.
fn ordinals(section: &GpuSection) -> Vec<usize> {
    section.gpus.iter().map(|gpu| gpu.ordinal).collect()
}

/// A table with an entry for each pair of these numbers.
fn square(text: &mut String, numbers: &[usize], between: impl Fn(usize, usize) -> Option<String>) {
    let numbers = || numbers.iter().copied();
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(
        std::iter::once(String::new()).chain(numbers().map(|number| number.to_string())),
    );
    for row in numbers() {
        let cell = |column| match row == column {
            true => String::new(),
            false => between(row, column).unwrap_or("-".into()),
        };
        table.add_row(std::iter::once(row.to_string()).chain(numbers().map(cell)));
    }
    line!(text, "{}", table.trim_fmt());
}
