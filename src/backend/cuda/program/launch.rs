//! One launch of a product's kernel: its arguments and its trace.

use std::ffi::c_void;
use std::sync::Arc;

use smallvec::SmallVec;

use super::operands::{self, Operands};
use super::params::{self, CallNumbers};
use super::product::ProductKernel;
use super::quantized::QuantizedBehind;
use crate::backend::cuda::abi::{
    GEMMESH_IDENTITY, GEMMESH_STORED_E4M3, GEMMESH_STORED_OUTPUT, GemmeshOutput, GemmeshParams,
    GemmeshQuantization, GemmeshTraceEvent,
};
use crate::backend::cuda::driver::{DeviceMemory, Function};
use crate::backend::cuda::family::launch::KernelArguments;
use crate::backend::cuda::gpu::Gpu;
use crate::backend::cuda::gpu::reclaim::Deferred;
use crate::error::Result;
use crate::profile::span::{Lane, Span, Work};
use crate::schedule::{MAX_WEIGHTS, Product, Schedule};

/// One launch of a product's kernel, with its arguments.
pub struct ProductLaunch<'p> {
    pub kernel: &'p ProductKernel,
    schedule: &'p Schedule,
    arguments: Arc<dyn KernelArguments>,
    params: GemmeshParams,
    trace: Option<Deferred<DeviceMemory>>,
    /// What is quantised after the kernel.
    quantized: SmallVec<[GemmeshQuantization; MAX_WEIGHTS]>,
}

impl<'p> ProductLaunch<'p> {
    /// The launch that a call of `kernel` needs.
    pub fn new(
        gpu: &Gpu,
        kernel: &'p ProductKernel,
        schedule: &'p Schedule,
        product: &'p Product,
        run: CallNumbers,
        operands: &Operands,
        traced: bool,
    ) -> Result<ProductLaunch<'p>> {
        let results = kernel.quantized.map(|of| of.of_product(product, operands));
        let quantized = match kernel.quantized.zip(results.as_ref()) {
            Some((of, results)) => of.told(product, results, operands)?,
            None => SmallVec::new(),
        };
        let operands = results.as_ref().unwrap_or(operands);
        let matrices = operands::matrices(
            schedule,
            product,
            kernel.places.as_ref(),
            kernel.low_latency.is_some(),
            kernel.stored,
            operands,
        )?;
        let (world, a) = (schedule.world(), product.a);
        let mut params = params::of_call(&kernel.params, world, run, operands, a);
        let finished = kernel.finished(schedule, product);
        operands::finish(&mut params.outputs, &finished, product, schedule, operands);
        operands::scale(&mut params, product, operands);
        let events = kernel.entry_count(schedule) * kernel.instance.ctas();
        let trace = if traced {
            Some(gpu.scratch(events * size_of::<GemmeshTraceEvent>())?)
        } else {
            None
        };
        params.trace = trace.as_ref().map_or(0, |trace| trace.ptr()) as *mut GemmeshTraceEvent;
        Ok(ProductLaunch {
            arguments: kernel
                .arguments
                .get(operands.rank, &kernel.instance, matrices)?,
            kernel,
            schedule,
            params,
            trace,
            quantized,
        })
    }

    /// How many CTAs it has.
    pub fn grid(&self) -> u32 {
        (self.kernel.clusters * self.kernel.instance.ctas()) as u32
    }

    /// The kernel's variant: a plain one, if this call asks for no other form.
    pub fn function(&self) -> Function {
        let instance = &self.kernel.instance;
        match instance.plain.filter(|_| self.is_plain()) {
            Some(plain) if self.is_alone() => plain.alone,
            Some(plain) => plain.any,
            None => instance.function,
        }
    }

    /// Whether the kernel waits for no rows and no peers, has no slices of K, is not traced, and does not quantise.
    fn is_alone(&self) -> bool {
        let params = &self.params;
        !self.kernel.awaits_rows
            && params.stored_type == GEMMESH_STORED_OUTPUT
            && params.peers.push_epoch.is_null()
            && params.slices.is_null()
            && params.trace.is_null()
    }

    fn is_plain(&self) -> bool {
        let params = &self.params;
        let adds_nothing =
            |output: &GemmeshOutput| output.bias.is_null() && output.residual.is_null();
        params.activation == GEMMESH_IDENTITY
            && [params.is_gated, params.is_f32, params.b_is_kn] == [0; 3]
            && [GEMMESH_STORED_OUTPUT, GEMMESH_STORED_E4M3].contains(&params.stored_type)
            && params.outputs.iter().all(adds_nothing)
    }

    /// The kernel's arguments, in order.
    pub fn arguments(&self) -> SmallVec<[*mut c_void; 6]> {
        let sums = self.kernel.sums.as_ref().map(|sums| &sums.0);
        self.arguments.all(&self.params, sums)
    }

    /// What the results are quantised by, with its parameters for each output. It is launched after this kernel.
    pub fn quantized(&self) -> impl Iterator<Item = (QuantizedBehind, GemmeshQuantization)> {
        let behind = self.kernel.quantized.into_iter();
        behind.flat_map(|of| self.quantized.iter().map(move |told| (of, *told)))
    }

    /// Adds the spans that the kernel noted. The kernel must have ended.
    pub fn spans(&self, spans: &mut Vec<Span>) -> Result<()> {
        let Some(trace) = &self.trace else {
            return Ok(());
        };
        let of_entry = self.kernel.instance.ctas();
        let count = self.kernel.entry_count(self.schedule) * of_entry;
        let mut bytes = vec![0u8; count * size_of::<GemmeshTraceEvent>()];
        let length = bytes.len();
        trace.region().read_rows(0, length, length, &mut bytes)?;
        let events = bytes.chunks_exact(size_of::<GemmeshTraceEvent>());
        for (index, event) in events.enumerate() {
            // SAFETY: the kernel wrote events of this layout; any bytes are valid for it.
            let event = unsafe { event.as_ptr().cast::<GemmeshTraceEvent>().read_unaligned() };
            self.add_spans(index / of_entry, &event, spans);
        }
        // Times are counted from the first span, because GPUs' clocks differ by fractions of a millisecond and the
        // ranks began together.
        let origin = spans.iter().map(|span| span.begin).min().unwrap_or(0);
        for span in spans.iter_mut() {
            span.begin -= origin;
            span.end -= origin;
        }
        Ok(())
    }

    /// Adds the spans of one entry of the table.
    fn add_spans(&self, entry: usize, event: &GemmeshTraceEvent, spans: &mut Vec<Span>) {
        let tile = self.kernel.tile_of(self.schedule, entry);
        let lane = Lane::Worker(event.sm as usize);
        if !tile.flags().is_empty() {
            spans.push(Span {
                lane,
                work: Work::Wait {
                    source: self.schedule.source_of_tile(tile),
                },
                begin: event.wait_begin,
                end: event.wait_end,
            });
        }
        spans.push(Span {
            lane,
            work: Work::Tile {
                source: self.schedule.owner_of_tile(tile),
                m: tile.m,
                n: tile.n,
            },
            begin: event.load_begin,
            end: event.done,
        });
    }
}
