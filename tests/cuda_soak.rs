//! Two ranks that do for minutes whatever programs do: products of random shapes by every route, in two groups at once,
//! of owned matrices and views, made and dropped in between; a failure each round, and new groups after it. Every
//! result is checked, and nothing grows.
//!
//! `GEMMESH_SOAK_SECONDS` says how long; twenty if it is not given. As tests/cuda/main.rs.
#![allow(unsafe_code)]

#[path = "cuda_soak/graphs.rs"]
mod graphs;
mod support;

use std::fs;
use std::time::{Duration, Instant};

use gemmesh::elements::Half;
use gemmesh::{AllGatherMatmul, Cuda, Error, Group, Host, Matrix, bf16, f16};
use rand::RngExt;
use rand::rngs::StdRng;
use support::gpu::*;
use support::numbers::{Reference, bits, nan, rng};
use support::processes::{Rank, Setting};

/// What may not grow.
#[derive(Clone, Copy, Debug)]
struct Holdings {
    descriptors: usize,
    threads: usize,
    resident_mib: usize,
    /// Of the GPU, by all ranks that share it.
    used_mib: usize,
}

impl Holdings {
    fn now(context: &Context, total: usize) -> Holdings {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let number = |name: &str| -> usize {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let text = line.unwrap().trim_start_matches(':').trim();
            text.trim_end_matches(" kB").parse().unwrap()
        };
        Holdings {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            threads: number("Threads"),
            resident_mib: number("VmRSS") >> 10,
            used_mib: total.saturating_sub(context.free_bytes()) >> 20,
        }
    }

    /// The driver allocates in steps of its own, and so does the allocator of the host.
    fn assert_no_more_than(&self, before: &Holdings) {
        assert!(
            self.descriptors <= before.descriptors
                && self.threads <= before.threads
                && self.resident_mib <= before.resident_mib + 64
                && self.used_mib <= before.used_mib + 32,
            "{before:?} became {self:?}"
        );
    }
}

/// One product in memory of the caller's, some of whose rows and columns the matrices are.
fn verify_views<T: Half>(group: &Group<Cuda>, case: &Case) -> Result<(), String> {
    let words = |error: Error| error.to_string();
    let (a, (b, bias)) = (case.a::<T>(), case.b::<T>(group.rank()));
    let (m, n, k) = (case.m(), b.len() / case.k, case.k);
    let placed = Placed::new(group, case, &a, &b, bias.as_deref()).map_err(words)?;
    let pitch = |columns: usize| (columns * 2).next_multiple_of(16) + 48;
    let memory = [
        Foreign::new((n + 7) * pitch(k)),
        Foreign::new((m + 7) * pitch(n)),
    ];
    let view = |memory: &Foreign, rows: usize, columns: usize| {
        let ptr = memory.ptr + (3 * pitch(columns) + 16) as u64;
        // SAFETY: within the memory, which outlives the views: the result is read before it goes.
        unsafe { Matrix::<Cuda, T>::from_device_ptr(group, ptr, rows, columns, pitch(columns)) }
    };
    view(&memory[0], n, k)
        .and_then(|mut b_view| b_view.copy_from_host(&b))
        .map_err(words)?;
    let mut out = view(&memory[1], m, n).map_err(words)?;
    out.copy_from_host(&vec![nan(); m * n]).map_err(words)?;
    let operation: AllGatherMatmul<Cuda, T> = Placed::operation(&placed.bias, case.config);
    operation
        .run(&placed.a, &view(&memory[0], n, k).map_err(words)?, &mut out)
        .map_err(words)?;
    Reference::new(&a, &b, bias.as_deref(), k).check(&out.to_vec().map_err(words)?)?;
    Ok(())
}

/// Several products that run one after the other, whose matrices are dropped before any of them has ended but the
/// outputs, which must have the bits that the first one had.
fn verify_in_flight<T: Half>(group: &Group<Cuda>, case: &Case) -> Result<(), String> {
    let words = |error: Error| error.to_string();
    let (a, (b, bias)) = (case.a::<T>(), case.b::<T>(group.rank()));
    let mut outs = Vec::new();
    for _ in 0..4 {
        let mut placed = Placed::new(group, case, &a, &b, bias.as_deref()).map_err(words)?;
        placed.fused(case.config).map_err(words)?;
        outs.push(placed.out);
    }
    let first = outs[0].to_vec().map_err(words)?;
    Reference::new(&a, &b, bias.as_deref(), case.k).check(&first)?;
    for out in &outs[1..] {
        if bits(&out.to_vec().map_err(words)?) != bits(&first) {
            return Err("the same product has other bits".into());
        }
    }
    Ok(())
}

fn verify(group: &Group<Cuda>, case: &Case, kind: u32, is_f16: bool) -> Result<(), String> {
    match (kind, is_f16) {
        (0, false) => verify_views::<bf16>(group, case),
        (0, true) => verify_views::<f16>(group, case),
        (1, false) => verify_in_flight::<bf16>(group, case),
        (1, true) => verify_in_flight::<f16>(group, case),
        (_, false) => case.verify::<_, bf16>(group).map(drop),
        (_, true) => case.verify::<_, f16>(group).map(drop),
    }
}

/// What one rank does.
struct Program<'a> {
    rank: &'a Rank,
    /// To keep step.
    steps: Group<Host>,
    /// The same on every rank.
    random: StdRng,
    checked: usize,
}

impl Program<'_> {
    fn open(&self, round: u32, name: &str) -> Result<Group<Cuda>, Error> {
        self.steps.barrier()?;
        another_group(self.rank, format!("{round}-{name}"), SHORT)
    }

    /// Random products, in either group.
    fn multiply_for(
        &mut self,
        length: Duration,
        round: u32,
        groups: &[Group<Cuda>],
    ) -> Result<(), Error> {
        let begin = Instant::now();
        loop {
            let go_on = [u8::from(begin.elapsed() < length)];
            if self.steps.all_gather_bytes(&go_on)?[0] == [0] {
                return Ok(());
            }
            for _ in 0..20 {
                let random = &mut self.random;
                let case = random_case(random, self.rank.world, self.checked);
                let group = &groups[random.random_range(0..groups.len())];
                let (kind, is_f16) = (random.random_range(0..4), random.random_bool(0.5));
                if let Err(what) = verify(group, &case, kind, is_f16) {
                    panic!(
                        "rank {}, round {round}, {kind}: {what}\n{case:?}",
                        self.rank.rank
                    );
                }
                self.checked += 1;
            }
        }
    }

    /// One rank does not call what the other does; in the other group all goes on.
    fn fail_in_the_first(&self, round: u32, groups: &[Group<Cuda>]) -> Result<Arguments, Error> {
        let culprit = round as usize % self.rank.world;
        let mut arguments = Arguments::new(&groups[0], 301, 72, 264)?;
        let route = ROUTES[round as usize % ROUTES.len()];
        arguments.verify_by(&groups[0], route)?;
        self.steps.barrier()?;
        if self.rank.rank == culprit {
            self.steps.barrier()?;
        }
        let result = arguments.verify_by(&groups[0], route);
        if self.rank.rank != culprit {
            self.steps.barrier()?;
        }
        assert_timeout_names(&poisoned(&groups[0], result).unwrap_err(), culprit);
        Arguments::new(&groups[1], 301, 72, 264)?.verify(&groups[1])?;
        Ok(arguments)
    }
}

/// How long a test lasts.
fn length() -> Duration {
    let seconds = std::env::var("GEMMESH_SOAK_SECONDS").ok();
    Duration::from_secs(seconds.map_or(20, |text| text.parse().expect("a number of seconds")))
}

#[test]
fn two_ranks_do_whatever_programs_do_and_nothing_grows() {
    let Some(_leave) = gpu_alone() else { return };
    let length = length();
    let rounds = length.as_secs().div_ceil(60).max(3) as u32;
    let setting = Setting {
        deadline: length + DEADLINE,
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let context = Context::retain(rank.rank);
        let mut program = Program {
            rank,
            steps: host_group(rank)?,
            random: rng(2026),
            checked: 0,
        };
        let total = context.free_bytes();
        let mut before = None;
        for round in 0..=rounds {
            let groups = [
                program.open(round, "first")?,
                program.open(round, "second")?,
            ];
            // The first round is for what stays for good.
            let length = if round == 0 {
                length / rounds / 4
            } else {
                length / rounds
            };
            program.multiply_for(length, round, &groups)?;
            let arguments = program.fail_in_the_first(round, &groups)?;
            drop((arguments, groups));
            program.steps.barrier()?;
            // Threads end by themselves.
            std::thread::sleep(Duration::from_millis(500));
            let now = Holdings::now(&context, total);
            println!("round {round}: {} checked, {now:?}", program.checked);
            program.steps.barrier()?;
            match &before {
                // Two rounds, so that each rank has been the culprit.
                None if round == 0 => {}
                None => before = Some(now),
                Some(before) => now.assert_no_more_than(before),
            }
        }
        Ok(format!("{} products", program.checked))
    }));
}
