//! Groups over MPI: run under `mpirun -n 6`, or alone as a group of one. With the argument `single`, MPI allows one thread.

mod ends;
mod hosts;
#[path = "../support/mod.rs"]
#[macro_use]
mod support;

use gemmesh::{Group, Host, all_gather_matmul, bf16};
use mpi::Threading;
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::Communicator;

fn main() {
    // A rank that panics would wait in MPI_Finalize for the others, which wait for it.
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        std::process::exit(1);
    }));
    let threading = match std::env::args().any(|argument| argument == "single") {
        true => Threading::Single,
        false => Threading::Multiple,
    };
    ends::mpi_has_not_begun();
    let (universe, provided) = mpi::initialize_with_threading(threading).unwrap();
    let world = universe.world();
    let passed = if provided == Threading::Multiple {
        multiply(&Group::<Host>::builder().from_mpi().unwrap(), &world);
        // The even and the odd ranks, each as a group of their own.
        let half = world.split_by_color(Color::with_value(world.rank() % 2));
        if let Some(half) = half {
            let group = Group::<Host>::builder().from_communicator(&half);
            multiply(&group.unwrap(), &half);
        }
        2 + hosts::test(&world)
    } else {
        hosts::several_need_threads(&world);
        1
    };
    let (rank, ranks) = (world.rank(), world.size());
    let passed = passed + ends::test(universe, provided);
    if rank == 0 {
        println!("test result: ok. {passed} passed; 0 failed; {ranks} ranks");
    }
}

fn multiply(group: &Group<Host>, communicator: &SimpleCommunicator) {
    assert_eq!(group.rank(), communicator.rank() as usize);
    assert_eq!(group.world_size(), communicator.size() as usize);
    let world = group.world_size();
    let (m, n, k) = (5 * world + 1, 3, 4);
    let mut a = group.sharded::<bf16>(m, k).unwrap();
    let rows: Vec<bf16> = a
        .rows()
        .flat_map(|row| [bf16::from_f32(row as f32); 4])
        .collect();
    a.shard_mut().copy_from_host(&rows).unwrap();
    let b = group.upload(&vec![bf16::ONE; n * k], n, k).unwrap();
    let mut out = group.upload(&vec![bf16::NAN; m * n], m, n).unwrap();
    all_gather_matmul(&a, &b, &mut out).unwrap();
    let out = out.to_vec().unwrap();
    for (row, values) in out.chunks(n).enumerate() {
        assert_eq!(values, [bf16::from_f32(4.0 * row as f32); 3], "row {row}");
    }
}
