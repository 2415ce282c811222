//! Operations by the thousand, across the wrap of the epoch and the refresh of the flags.

use std::time::Duration;

use gemmesh::{Cuda, Error, Group};

use crate::support::gpu::*;
use crate::support::processes::{Rank, Setting};
use crate::test_name;

/// `count` operations in turn on matrices of the given shapes [m, n, k]: in its first three quarters a thousand at
/// a time without waiting, then a hundred; other rows each time, and the results compared.
fn soak(
    rank: &Rank,
    address: &str,
    first_epoch: u32,
    shapes: &[[usize; 3]],
    count: usize,
) -> Result<(), Error> {
    let builder = Group::<Cuda>::builder().timeout(TIMEOUT);
    let group = builder
        .first_epoch(first_epoch)
        .connect(rank.rank, rank.world, address)?;
    let mut items = Vec::new();
    for &[m, n, k] in shapes {
        items.push(Arguments::new(&group, m, n, k)?);
    }
    let (mut done, mut base) = (0, 1);
    while done < count {
        let burst = if done < count * 3 / 4 { 1000 } else { 100 };
        let burst = burst.min(count - done);
        base = base % 11 + 1;
        for item in &mut items {
            item.fill(&group, base)?;
        }
        for number in 0..burst {
            let index = (done + number) % items.len();
            // Each way follows each other.
            match (done + number) / items.len() % 10 {
                0 | 1 => items[index].run()?,
                way @ (2 | 3 | 8) => items[index].run_by(ROUTES[way % 3])?,
                way => items[index].run_by(ROUTES[way / 2 % 3])?,
            }
        }
        done += burst;
        group.synchronize()?;
        for item in items.iter().take(burst) {
            item.check(rank.world)?;
        }
    }
    Ok(())
}

const TINY: [usize; 3] = [16, 16, 8];

#[test]
fn twenty_thousand_operations_in_a_row_are_right_on_1_rank() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let _context = Context::retain(rank.rank);
        soak(rank, &rank.address, 1, &[TINY], 20_000)?;
        let mixed = [TINY, [200, 72, 16]];
        let address = format!("{}-mixed", rank.address);
        soak(rank, &address, u32::MAX - 4_000, &mixed, 20_000)?;
        Ok("right".into())
    }));
}

#[test]
fn twenty_thousand_operations_in_a_row_are_right_on_2_ranks() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(400),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let _context = Context::retain(rank.rank);
        let count = operations(2, 20_000, 2_000);
        soak(rank, &rank.address, 1, &[TINY], count)?;
        Ok(format!("{count} operations"))
    }));
}

#[test]
fn twenty_thousand_operations_on_two_matrices_in_turn_are_right_on_2_ranks() {
    let Some(_leave) = gpu() else { return };
    let setting = Setting {
        deadline: Duration::from_secs(400),
        ..Setting::default()
    };
    all_done(ranks_with(test_name!(), 2, &setting, |rank| {
        let _context = Context::retain(rank.rank);
        let count = operations(2, 20_000, 2_000);
        let first = u32::MAX - count as u32 / 5;
        soak(rank, &rank.address, first, &[TINY, [301, 72, 16]], count)?;
        Ok(format!("{count} operations across the wrap of the epoch"))
    }));
}

#[test]
fn operations_across_the_refresh_of_the_flags_are_right() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        for multiple in [0u32, 7, 8] {
            // Half of the operations push, and have numbers of their own: both kinds come across.
            let first = (multiple << 28).wrapping_sub(70);
            let address = format!("{}-{multiple}", rank.address);
            let shapes = [TINY, [301, 72, 264]];
            soak(rank, &address, first, &shapes, 300)?;
        }
        // The operation that refreshes is the first, and waits for its rows as any other.
        for seed in 0..5 {
            gemmesh::testing::delay_chunks(Some(seed));
            let address = format!("{}-first-{seed}", rank.address);
            soak(rank, &address, 3 << 28, &[[301, 72, 264]], 1)?;
        }
        Ok("right".into())
    }));
}
