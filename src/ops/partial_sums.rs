//! What products have in common whose K is spread over the ranks.

use std::sync::Arc;

use super::{require_same_group, require_shape};
use crate::backend::Backend;
use crate::backend::sealed::Bound;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::matrix::Matrix;
use crate::schedule::layout::{MAX_EXTENT, limit};
use crate::schedule::reduce_scatter::{self, ALL_NAME, MATRICES, NAME};
use crate::schedule::{Config, Description, Layout, Planner};

/// A product and a sum over all ranks, with what varies.
#[derive(Debug)]
pub struct PartialSums<'a, B: Backend, T: Element> {
    pub bias: Option<&'a Matrix<B, T>>,
    pub config: Option<Config>,
}

/// Who gets which sums.
#[derive(Clone, Copy, Debug)]
pub enum Which {
    /// Each rank those of its rows.
    Own,
    /// All ranks all of them, in this matrix that they share.
    All(u32),
}

impl Which {
    /// The name of the call.
    pub fn name(self) -> &'static str {
        match self {
            Which::Own => NAME,
            Which::All(_) => ALL_NAME,
        }
    }

    fn planner(self) -> Planner {
        match self {
            Which::Own => reduce_scatter::reduce_scatter,
            Which::All(_) => reduce_scatter::all_reduce,
        }
    }
}

impl<B: Backend, T: Element> PartialSums<'_, B, T> {
    /// No bias, and the backend's configuration.
    pub fn new() -> Self {
        PartialSums {
            bias: None,
            config: None,
        }
    }

    /// What it takes.
    pub fn programs(
        &self,
        which: Which,
        a: &Matrix<B, T>,
        b: &Matrix<B, T>,
        layout: &Layout,
    ) -> Result<Programs<B>> {
        let group = a.group();
        let [n, k] = b.shape();
        let describe = |operation| Description {
            operation,
            dtype: T::DTYPE,
            layout: layout.clone(),
            n,
        };
        let programs = || -> Result<_> {
            limit("N", n, 1, MAX_EXTENT)?;
            require_same_group("b", b.group(), group)?;
            require_shape(group.rank(), "b [N, K]", [n, layout.k()], [n, k])?;
            if let Some(bias) = self.bias {
                require_same_group("bias", bias.group(), group)?;
                require_shape(group.rank(), "bias [1, N]", [1, n], bias.shape())?;
            }
            let sum = group.program(which.planner(), describe(which.name()), self.config)?;
            let multiply = match B::schedule(&sum).product() {
                Some(_) => None,
                None => {
                    let asked = describe(MULTIPLY);
                    Some(group.program(reduce_scatter::multiply, asked, self.config)?)
                }
            };
            Ok(Programs { multiply, sum })
        };
        programs().map_err(|error| group.refuse(which.name(), error))
    }

    /// Does it, into an output that has been checked.
    pub fn run(
        &self,
        which: Which,
        programs: &Programs<B>,
        a: &Matrix<B, T>,
        b: &Matrix<B, T>,
        out: Bound<B>,
    ) -> Result<()> {
        let group = a.group();
        let Programs { multiply, sum } = programs;
        let partials = group.partials(B::schedule(sum), reduce_scatter::PARTIALS)?;
        let mut matrices = [const { Bound::Nothing }; MATRICES];
        matrices[reduce_scatter::A] = Bound::Input(a.memory());
        matrices[reduce_scatter::B] = Bound::Input(b.memory());
        matrices[reduce_scatter::OUT] = out;
        matrices[reduce_scatter::PARTIALS] = Bound::Symmetric(partials.as_ref());
        if let Some(bias) = self.bias {
            matrices[reduce_scatter::BIAS] = Bound::Input(bias.memory());
        }
        let shared = match which {
            Which::Own => None,
            Which::All(id) => Some(id),
        };
        let shared = shared.as_slice();
        super::run(group, multiply.as_ref(), sum, &matrices, shared, None)
    }
}

/// What a sum takes.
pub struct Programs<B: Backend> {
    /// Where partials are pulled, they are made before.
    pub multiply: Option<Arc<B::Program>>,
    /// The sum; with the product, where partials are pushed or stored.
    sum: Arc<B::Program>,
}

/// The part of the call that a rank does by itself.
const MULTIPLY: &str = "matmul of partials";

/// `m` rows, of which rank r gets `rows[r]`, of a product over `k`.
pub fn split<B: Backend>(group: &Group<B>, rows: &[usize], [m, k]: [usize; 2]) -> Result<Layout> {
    let shape = |argument: &str, expected: usize, found: usize| {
        if expected == found {
            return Ok(());
        }
        Err(Error::Shape {
            rank: group.rank(),
            argument: argument.into(),
            expected: vec![expected],
            found: vec![found],
        })
    };
    shape("rows [world size]", group.world_size(), rows.len())?;
    let layout = Layout::new(rows, k)?;
    shape("the rows of all ranks [M]", m, layout.m())?;
    Ok(layout)
}
