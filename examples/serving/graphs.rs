//! Decoding steps from CUDA graphs: one for each size that M is rounded up to.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DriverError, sys};
use gemmesh::error::Kind;
use gemmesh::{Cuda, Error, Group, Result};

use crate::CHECKED;
use crate::batching::Step;
use crate::model::Model;

const BUCKETS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// A stream that can be captured, for the group's operations.
pub fn stream(group: &Group<Cuda>) -> Result<Arc<CudaStream>> {
    let context = CudaContext::new(group.device_ordinal()).map_err(of_driver(group))?;
    let stream = context.new_stream().map_err(of_driver(group))?;
    group.use_cudarc_stream(&stream)?;
    Ok(stream)
}

/// Runs the steps, prefills by calls and decoding steps by replays.
///
/// Rows that are pulled, as when ranks share a GPU, cannot be captured. Then it returns no times.
pub fn run(
    group: &Group<Cuda>,
    stream: &Arc<CudaStream>,
    model: &mut Model<Cuda>,
    steps: &[Step],
) -> Result<Vec<Duration>> {
    let mut graphs = BTreeMap::new();
    let capacity = model.capacity();
    for bucket in BUCKETS.into_iter().filter(|&bucket| bucket <= capacity) {
        match capture(group, stream, model, bucket) {
            Err(error) if *error.kind() == Kind::Capturing => return Ok(Vec::new()),
            graph => graphs.insert(bucket, graph?),
        };
    }
    let mut times = Vec::with_capacity(steps.len());
    for (number, step) in steps.iter().enumerate() {
        let graph = graphs.range(step.tokens..).next().filter(|_| step.decodes);
        model.set_tokens(graph.map_or(step.tokens, |(&bucket, _)| bucket))?;
        model.write_tokens(number)?;
        group.barrier()?;
        let began = Instant::now();
        match graph {
            Some((_, graph)) => graph.launch().map_err(of_driver(group))?,
            None => model.run()?,
        }
        group.synchronize()?;
        times.push(began.elapsed());
        if number % CHECKED == 0 {
            model.check(number)?;
        }
    }
    // The graphs use the model's matrices, so they are dropped first.
    drop(graphs);
    Ok(times)
}

fn capture(
    group: &Group<Cuda>,
    stream: &Arc<CudaStream>,
    model: &mut Model<Cuda>,
    bucket: usize,
) -> Result<CudaGraph> {
    let of_driver = || of_driver(group);
    model.take_tokens(bucket, 0)?;
    // The first run allocates, which is not possible during a capture.
    model.run()?;
    group.synchronize()?;
    stream
        .begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)
        .map_err(of_driver())?;
    let captured = model.run();
    // The capture ends in any case. An error of the step comes first.
    let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
    captured?;
    let graph = graph.map_err(of_driver())?;
    graph.ok_or_else(|| {
        Kind::Message {
            reason: format!("nothing was captured of a step of {bucket} tokens"),
        }
        .on(group.rank())
    })
}

fn of_driver(group: &Group<Cuda>) -> impl FnOnce(DriverError) -> Error {
    let rank = group.rank();
    move |error| {
        Kind::Message {
            reason: error.to_string(),
        }
        .on(rank)
    }
}
