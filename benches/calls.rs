//! Times what a call takes on the host, of rows that are known and of rows that are new, as in a serving loop; and of one
//! shape, prepared and not, for comparison with the packages in other languages.
//!
//! ```sh
//! cargo bench --features cuda --bench calls
//! ```

use std::time::Instant;

use gemmesh::testing::KEPT_PROGRAMS;
use gemmesh::{AllGatherMatmul, Cuda, Group, Result, all_gather_matmul, bf16, launch};

const CAPACITY: usize = 8192;
const N: usize = 1792;
const K: usize = 4096;
/// Calls in a row. The device's queues hold them.
const FLIGHT: usize = 8;
/// As many calls as programs are kept, and then as many that are timed.
const CALLS: usize = 2 * KEPT_PROGRAMS;

fn main() -> Result<()> {
    if !launch::is_rank() {
        println!(
            "The host's time of all_gather_matmul of M = 1 .. and N = {N}, K = {K}, in µs, two ranks:"
        );
        println!(
            "known rows, new rows, and what these take more; medians of {KEPT_PROGRAMS} calls"
        );
        return launch::launch(2);
    }
    let group = Group::<Cuda>::from_env()?;
    one_shape(&group)?;
    // Few rows as in decoding, in every split.
    let few = (1..=64).flat_map(|m| (0..=m).map(move |first| [first, m - first]));
    let few: Vec<[usize; 2]> = few.collect();
    let spread = |step: usize| few[step * 7919 % few.len()];
    measure(&group, "up to 64 rows", spread)?;
    measure(&group, "up to 8192 rows", |step| {
        let m = 1 + step * 7919 % CAPACITY;
        [step % (m + 1), m - step % (m + 1)]
    })
}

/// Prints the medians of calls of one shape.
fn one_shape(group: &Group<Cuda>) -> Result<()> {
    const M: usize = 128;
    let a = group.sharded::<bf16>(M, K)?;
    let b = group.zeros::<bf16>(N, K)?;
    let mut out = group.zeros::<bf16>(M, N)?;
    let prepared = AllGatherMatmul::new().prepare(&a, N)?;
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..CALLS / FLIGHT {
        for (kind, times) in times.iter_mut().enumerate() {
            group.synchronize()?;
            group.barrier()?;
            for _ in 0..FLIGHT {
                let begin = Instant::now();
                match kind {
                    0 => prepared.run(&a, &b, &mut out)?,
                    _ => all_gather_matmul(&a, &b, &mut out)?,
                }
                times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    group.synchronize()?;
    if group.rank() == 0 {
        let [prepared, planned] = times.map(|times| median(&times[CALLS - KEPT_PROGRAMS..]));
        println!("M = {M}: prepared {prepared:.2}, not prepared {planned:.2}");
    }
    Ok(())
}

/// Prints the medians for the rows that `rows` gives by the number of a call, each once.
fn measure(group: &Group<Cuda>, name: &str, rows: impl Fn(usize) -> [usize; 2]) -> Result<()> {
    let mut a = group.sharded_with_capacity::<bf16>(CAPACITY, K)?;
    let b = group.zeros::<bf16>(N, K)?;
    let mut out = group.zeros::<bf16>(CAPACITY, N)?;
    let mut times = [Vec::new(), Vec::new()];
    for flight in 0..CALLS / FLIGHT {
        // Each flight is made twice: its rows are new, then known.
        for times in &mut times {
            // The device's queues are empty, and the ranks begin together.
            group.synchronize()?;
            group.barrier()?;
            for call in flight * FLIGHT..(flight + 1) * FLIGHT {
                let rows = rows(call);
                let begin = Instant::now();
                a.set_rows(&rows)?;
                out.set_rows(rows[0] + rows[1])?;
                all_gather_matmul(&a, &b, &mut out)?;
                times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    group.synchronize()?;
    let [new, known] = times.map(|times| median(&times[CALLS - KEPT_PROGRAMS..]));
    println!("{name}: {known:.1}, {new:.1}, {:.1}", new - known);
    Ok(())
}

fn median(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
