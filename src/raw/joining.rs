//! How a rank joins a group of any backend.

use std::sync::Arc;
use std::time::Duration;

use super::group::{AnyBackend, AnyGroup};
#[cfg(feature = "cuda")]
use crate::backend::Cuda;
use crate::backend::{Backend, Host};
#[cfg(not(feature = "cuda"))]
use crate::error::Error;
#[cfg(doc)]
use crate::error::Kind;
use crate::error::Result;
use crate::group::{Builder, GATHERED_BYTES, Group};
use crate::schedule::Numerics;

/// Which backend a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    /// [`Host`](crate::Host).
    Host,
    /// `Cuda`.
    Cuda,
}

/// Options of a group: those of [`Builder`].
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// [`Builder::timeout`].
    pub timeout: Option<Duration>,
    /// [`Builder::arrival_timeout`].
    pub arrival_timeout: Option<Duration>,
    /// [`Builder::host_timeout`].
    pub host_timeout: Option<Duration>,
    /// [`Builder::workers`].
    pub workers: Option<usize>,
    /// [`Builder::device`].
    pub device: Option<usize>,
    /// [`Builder::max_ctas`].
    pub max_ctas: Option<usize>,
    /// [`Builder::numerics`].
    pub numerics: Option<Numerics>,
    /// [`Builder::name`].
    pub name: Option<String>,
}

impl Options {
    pub(super) fn builder<B: Backend>(self) -> Builder<B> {
        let mut builder = Group::builder();
        macro_rules! set {
            ($($option:ident),*) => {$(
                if let Some(value) = self.$option {
                    builder = builder.$option(value);
                }
            )*};
        }
        set!(
            timeout,
            arrival_timeout,
            host_timeout,
            workers,
            device,
            max_ctas,
            numerics,
            name
        );
        builder
    }
}

/// A function that sends this rank's bytes to all ranks, and returns those of all ranks, by rank.
pub type Gather<'a> =
    dyn FnMut(&[u8; GATHERED_BYTES]) -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error>> + 'a;

/// How ranks find one another.
pub enum Joining<'a> {
    /// As their launcher says: [`Group::from_env`].
    Env,
    /// At an address: [`Group::connect`].
    Address {
        /// This rank.
        rank: usize,
        /// The number of ranks.
        world: usize,
        /// HOST:PORT of rank 0, or a path on one host.
        address: &'a str,
    },
    /// By a function that gathers bytes: [`Builder::connect_with`].
    Gather {
        /// This rank.
        rank: usize,
        /// The number of ranks.
        world: usize,
        /// Gathers bytes of all ranks.
        gather: &'a mut Gather<'a>,
    },
}

/// Joins a group. Collective.
///
/// # Errors
/// As the functions that [`Joining`] names; [`Kind::Unsupported`] if the library has no such backend.
pub fn join(backend: BackendKind, options: Options, joining: Joining) -> Result<Arc<dyn AnyGroup>> {
    match backend {
        BackendKind::Host => join_as::<Host>(options, joining),
        #[cfg(feature = "cuda")]
        BackendKind::Cuda => join_as::<Cuda>(options, joining),
        #[cfg(not(feature = "cuda"))]
        BackendKind::Cuda => {
            let (rank, call) = match joining {
                Joining::Env => {
                    let described = crate::launch::rank_environment()?;
                    (described.map_or(0, |rank| rank.rank), "Group::from_env")
                }
                Joining::Address { rank, .. } => (rank, "Group::connect"),
                Joining::Gather { rank, .. } => (rank, "Group::connect_with"),
            };
            let what = "this build of the library has the host backend only; ask for that backend, or build the library \
                        with CUDA";
            Err(Error::unsupported(what).on(rank).in_call(call.into()))
        }
    }
}

fn join_as<B: AnyBackend>(options: Options, joining: Joining) -> Result<Arc<dyn AnyGroup>> {
    let builder = options.builder::<B>();
    let group = match joining {
        Joining::Env => builder.from_env(),
        Joining::Address {
            rank,
            world,
            address,
        } => builder.connect(rank, world, address),
        Joining::Gather {
            rank,
            world,
            gather,
        } => builder.connect_with(rank, world, gather),
    }?;
    Ok(Arc::new(group))
}
