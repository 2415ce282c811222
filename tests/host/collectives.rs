//! Rows that ranks exchange and add up, on the host.

use gemmesh::Host;

crate::support::shared::collectives_tests!(Host, Some(()));
