//! Groups over MPI: run under `mpirun -n 4`, or alone as a group of one.

use gemmesh::{Error, Group, Host, all_gather_matmul, bf16};
use mpi::topology::{Color, SimpleCommunicator};
use mpi::traits::Communicator;

fn main() -> Result<(), Error> {
    let universe = mpi::initialize().ok_or_else(|| Error::Environment {
        launcher: "MPI".into(),
        missing: "an MPI that can be initialised".into(),
    })?;
    let world = universe.world();
    multiply(&Group::<Host>::builder().from_mpi()?, &world);

    // The even and the odd ranks, each as a group of their own.
    let half = world.split_by_color(Color::with_value(world.rank() % 2));
    if let Some(half) = half {
        multiply(&Group::<Host>::builder().from_communicator(&half)?, &half);
    }
    if world.rank() == 0 {
        println!(
            "test result: ok. 2 passed; 0 failed; {} ranks",
            world.size()
        );
    }
    Ok(())
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
