//! Products that have been planned.

use super::arguments::CallArguments;
use super::group::{AnyBackend, AnyGroup};
use super::product::{Outputs, Prepared, ProductCall, ProductKind, refused};
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::ops::gather_product::PlannedGather;
use crate::ops::own_product::PlannedProduct;
use crate::ops::partial_sums::PlannedSums;
use crate::ops::product::RawOutputs;
use crate::ops::sum_product::PlannedAllReduce;
use crate::profile::span::Span;
use crate::schedule::Config;
use crate::trace::Trace;

/// A planned product with the group whose calls it makes.
pub(super) struct BoundProduct<B: Backend, P>(pub Group<B>, pub ProductKind, pub P);

/// A product that has been planned, as it takes arguments.
pub(super) trait Planned<B: Backend>: Send + Sync {
    fn run(
        &self,
        arguments: &CallArguments<'_, '_, B>,
        refuse: &dyn Fn(Error) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()>;
    fn explain(&self) -> String;
    fn config(&self) -> Config;
}

impl<B: AnyBackend, P: Planned<B>> BoundProduct<B, P> {
    /// # Safety
    /// As the calls of [`AnyGroup`].
    unsafe fn call(&self, call: &ProductCall, trace: Option<&mut Vec<Span>>) -> Result<()> {
        let BoundProduct(group, kind, planned) = self;
        let refuse = |refusal| refused(group, *kind, refusal);
        planned.run(&CallArguments { group, call }, &refuse, trace)
    }
}

impl<B: AnyBackend, P: Planned<B>> Prepared for BoundProduct<B, P> {
    unsafe fn run(&self, call: &ProductCall) -> Result<()> {
        // SAFETY: as this function's.
        unsafe { self.call(call, None) }
    }

    unsafe fn run_traced(&self, call: &ProductCall) -> Result<Trace> {
        let mut spans = Vec::new();
        // SAFETY: as this function's.
        unsafe { self.call(call, Some(&mut spans))? };
        Ok(Trace::new(AnyGroup::rank(&self.0), spans))
    }

    fn explain(&self) -> String {
        self.2.explain()
    }

    fn config(&self) -> Config {
        self.2.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedProduct<B> {
    fn run(
        &self,
        arguments: &CallArguments<'_, '_, B>,
        refuse: &dyn Fn(Error) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        if trace.is_some() {
            let what = "a product of one rank has no trace";
            return Err(refuse(Error::unsupported(what)));
        }
        let a = arguments.own().map_err(refuse)?;
        let addends = arguments.addends().map_err(refuse)?;
        arguments.with_product(refuse, |product| self.run(&addends, &a, product))
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedGather<B> {
    fn run(
        &self,
        arguments: &CallArguments<'_, '_, B>,
        refuse: &dyn Fn(Error) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let a = arguments.sharded().map_err(refuse)?;
        let addends = arguments.addends().map_err(refuse)?;
        arguments.with_product(refuse, |product| self.run(&addends, &a, product, trace))
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedSums<B> {
    fn run(
        &self,
        arguments: &CallArguments<'_, '_, B>,
        refuse: &dyn Fn(Error) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = arguments.operands().map_err(refuse)?;
        match arguments.call.outputs {
            Outputs::Own(_) => {
                let mut outputs = RawOutputs::new();
                arguments.outputs(&mut outputs).map_err(refuse)?;
                self.scatter(&operands, &mut outputs, trace)
            }
            Outputs::Sharded(_) => {
                let out = arguments.sums().map_err(refuse)?;
                self.scatter_into(&operands, out, trace)
            }
        }
    }

    fn explain(&self) -> String {
        self.explain().to_string()
    }

    fn config(&self) -> Config {
        self.config()
    }
}

impl<B: AnyBackend> Planned<B> for PlannedAllReduce<B> {
    fn run(
        &self,
        arguments: &CallArguments<'_, '_, B>,
        refuse: &dyn Fn(Error) -> Error,
        trace: Option<&mut Vec<Span>>,
    ) -> Result<()> {
        let operands = arguments.operands().map_err(refuse)?;
        let out = arguments.sums().map_err(refuse)?;
        self.run(&operands, out, trace)
    }

    fn explain(&self) -> String {
        self.sums.explain().to_string()
    }

    fn config(&self) -> Config {
        self.sums.config()
    }
}
