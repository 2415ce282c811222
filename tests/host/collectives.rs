//! Rows that ranks exchange and add up, on the host.

use std::time::Duration;

use crate::support::shared::collectives::Produces;
use gemmesh::{Block, Host, Matrix, Value};

impl Produces for Host {
    fn put<T: Value>(block: &mut Block<Host, T>, _: &Matrix<Host, T>, values: &[T], first: usize) {
        let ([rows, n], pitch) = (block.shape(), block.pitch());
        let to = block.values_mut().chunks_mut(pitch);
        for (to, from) in to.zip(values[first * n..(first + rows) * n].chunks(n)) {
            to[..n].copy_from_slice(from);
        }
    }

    fn linger<T: Value>(_: &Block<Host, T>, time: Duration) {
        std::thread::sleep(time);
    }
}

crate::support::shared::collectives_tests!(Host, Some(()));
