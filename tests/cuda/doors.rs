//! Memory, streams and events of other libraries': cudarc's safe types, and DLPack's tensors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys::CUresult;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use gemmesh::error::Kind;
use gemmesh::interop::dlpack::DLManagedTensor;
use gemmesh::interop::{CudarcMatrix, CudarcMatrixMut};
use gemmesh::{AllGatherMatmul, Error, Group, Matmul, Matrix, Result, bf16};

use crate::support::errors::kind_of;
use crate::support::gpu::*;
use crate::support::numbers::{Reference, nan, normal};
use crate::support::processes::Rank;
use crate::test_name;

const M: usize = 72;
const N: usize = 40;
const K: usize = 136;

/// What cudarc answers, as an error of a rank.
fn of_cudarc<T>(result: std::result::Result<T, cudarc::driver::DriverError>) -> Result<T> {
    result.map_err(|error| {
        Kind::Message {
            reason: error.to_string(),
        }
        .on(0)
    })
}

/// The error of a call of this file, which names its place.
#[track_caller]
fn refused<T>(result: Result<T>) -> Error {
    let error = result.err().expect("it should be refused");
    let place = error.call().and_then(|call| call.place());
    let is_here = place.is_some_and(|place| place.starts_with(concat!(file!(), ":")));
    assert!(is_here, "{error}");
    error
}

fn context(group: &Group<gemmesh::Cuda>) -> Result<Arc<CudaContext>> {
    of_cudarc(CudaContext::new(group.device_ordinal()))
}

/// A group whose operations go to a stream of cudarc's, that stream, and another one.
fn on_cudarc_stream(rank: &Rank) -> Result<(Group<gemmesh::Cuda>, [Arc<CudaStream>; 2])> {
    let group = connect(rank, TIMEOUT)?;
    let context = context(&group)?;
    let stream = of_cudarc(context.new_stream())?;
    let other = of_cudarc(context.new_stream())?;
    group.use_cudarc_stream(&stream)?;
    Ok((group, [stream, other]))
}

fn upload(stream: &Arc<CudaStream>, values: &[bf16]) -> Result<CudaSlice<bf16>> {
    of_cudarc(stream.clone_htod(values))
}

#[test]
fn matrices_in_memory_of_cudarcs_are_operands() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let (group, [stream, other]) = on_cudarc_stream(rank)?;
        let all: Vec<bf16> = normal(1, M * K);
        let weight: Vec<bf16> = normal(2 + rank.rank as u64, N * K);
        let mut a = group.sharded::<bf16>(M, K)?;
        let own = a.rows();
        a.shard_mut()
            .copy_from_host(&all[own.start * K..own.end * K])?;
        // Behind a first row that is not the matrix's.
        let b = upload(&stream, &[&vec![nan(); K], weight.as_slice()].concat())?;
        let mut out = upload(&stream, &vec![nan(); M * N])?;
        let mut alone = upload(&stream, &vec![nan(); N * N])?;
        {
            let view = b.slice(K..);
            let b = CudarcMatrix::new(&group, &view, N, K)?;
            let mut out = CudarcMatrixMut::new(&group, &mut out, M, N)?;
            AllGatherMatmul::new().run(&a, &b, &mut out)?;
            let mut alone = CudarcMatrixMut::new(&group, &mut alone, N, N)?;
            Matmul::new().run(&b, &b, &mut alone)?;
        }
        let found = [&out, &alone].map(|memory| of_cudarc(other.clone_dtoh(memory)));
        let [out, alone] = found.map(|values| values.unwrap());
        group.synchronize()?;
        Reference::new(&all, &weight, None, K).check(&out).unwrap();
        let reference = Reference::new(&weight, &weight, None, K);
        reference.check(&alone).unwrap();
        Ok("verified".into())
    }));
}

/// Memory of the library's own, of which cudarc knows no events.
#[test]
fn events_of_cudarc_order_the_group_and_other_streams() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let context = context(&group)?;
        let other = of_cudarc(context.new_stream())?;
        let as_slice = |(ptr, _): (u64, usize), count| {
            // SAFETY: memory of a matrix whose rows follow one another. It is leaked before the matrix goes, and events
            // order who uses it.
            unsafe { other.upgrade_device_ptr::<bf16>(ptr, count) }
        };
        let b = group.zeros::<bf16>(N, K)?;
        for seed in 0..8 {
            let weight: Vec<bf16> = normal(seed, N * K);
            let mut memory = as_slice(b.as_device_ptr(), N * K);
            of_cudarc(other.memcpy_htod(&weight, &mut memory))?;
            memory.leak();
            group.wait_for_cudarc_event(&of_cudarc(other.record_event(None))?)?;

            let mut out = group.upload::<bf16>(&vec![nan(); N * N], N, N)?;
            Matmul::new().run(&b, &b, &mut out)?;

            let event = of_cudarc(context.new_event(None))?;
            group.record_cudarc_event(&event)?;
            of_cudarc(other.wait(&event))?;
            let memory = as_slice(out.as_device_ptr(), N * N);
            let found: Vec<bf16> = of_cudarc(other.clone_dtoh(&memory))?;
            of_cudarc(other.synchronize())?;
            memory.leak();
            let reference = Reference::new(&weight, &weight, None, K);
            reference.check(&found).unwrap();
        }
        Ok("verified".into())
    }));
}

/// Kernels and copies of cudarc write what is gathered and read what was, also on a stream of their own, and no host
/// waits.
#[test]
fn shards_are_memory_of_cudarcs() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let (group, [stream, other]) = on_cudarc_stream(rank)?;
        let weight: Vec<bf16> = normal(2, N * K);
        let b = group.upload(&weight, N, K)?;
        let mut x = group.sharded::<bf16>(M, K)?;
        let own = x.rows();
        let mut outs = Vec::new();
        for step in 0..6 {
            let all: Vec<bf16> = normal(10 + step, M * K);
            let used = if step % 2 == 0 { &stream } else { &other };
            let rows = upload(used, &all[own.start * K..own.end * K])?;
            let mut shard = x.shard_mut().view_mut()?;
            let copied = shard.with_cudarc(&stream, |mut to| used.memcpy_dtod(&rows, &mut to))?;
            of_cudarc(copied)?;
            let mut out = group.upload::<bf16>(&vec![nan(); M * N], M, N)?;
            AllGatherMatmul::new().run(&x, &b, &mut out)?;
            let gathered = x.view().with_cudarc(&stream, |all| used.clone_dtoh(&all))?;
            outs.push((all, of_cudarc(gathered)?, out));
        }
        of_cudarc(other.synchronize())?;
        for (all, gathered, out) in outs {
            assert_eq!(gathered, all);
            let reference = Reference::new(&all, &weight, None, K);
            reference.check(&out.to_vec()?).unwrap();
        }
        let refused = refused(x.view().with_cudarc(&other, |_| ()));
        assert!(
            matches!(refused.kind(), Kind::Unsuitable { .. }),
            "{refused}"
        );
        let padded = x.view().columns(0..8)?.with_cudarc(&stream, |_| ());
        assert!(
            matches!(kind_of(&padded), Some(Kind::Unsupported { .. })),
            "{padded:?}"
        );
        Ok("verified".into())
    }));
}

#[test]
fn what_of_cudarc_does_not_fit_is_refused() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let (group, [stream, other]) = on_cudarc_stream(rank)?;
        let own = upload(&stream, &normal(1, 16 * 16))?;
        let others = upload(&other, &normal(1, 16 * 16))?;
        memory_that_does_not_fit_is_refused(&group, &own, &others);
        a_stream_of_each_thread_is_refused(&group, &own);
        another_stream_has_to_wait_for_matrices(&group, &own, &other)?;
        CudarcMatrix::new(&group, &others, 16, 16)?;
        what_is_another_gpus_is_refused(&group)?;
        Ok("refused".into())
    }));
}

/// `own` is ordered by the group's stream, and `others` by another.
fn memory_that_does_not_fit_is_refused(
    group: &Group<gemmesh::Cuda>,
    own: &CudaSlice<bf16>,
    others: &CudaSlice<bf16>,
) {
    let error = refused(CudarcMatrix::new(group, others, 16, 16));
    assert!(
        matches!(error.kind(), Kind::Unsuitable { what, .. } if what.starts_with("the stream")),
        "{error}"
    );
    let error = refused(CudarcMatrix::new(group, own, 16, 15));
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
    let part = own.slice(1..241);
    let error = refused(CudarcMatrix::new(group, &part, 15, 16));
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
    let part = own.slice(..240);
    let error = refused(CudarcMatrix::new(group, &part, 20, 12));
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
    let error = refused(CudarcMatrix::new(group, own, 0, 16));
    assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
    let error = refused(CudarcMatrix::new(group, own, 16, 0));
    assert!(matches!(error.kind(), Kind::Limit { .. }), "{error}");
}

/// Such a stream is another one on each thread.
fn a_stream_of_each_thread_is_refused(group: &Group<gemmesh::Cuda>, own: &CudaSlice<bf16>) {
    let each_threads = own.stream().context().per_thread_stream();
    let error = refused(group.use_cudarc_stream(&each_threads));
    assert!(
        matches!(error.kind(), Kind::Unsuitable { what, .. } if what.starts_with("the handle")),
        "{error}"
    );
}

/// While a matrix is in memory that the stream orders, no other stream takes over.
fn another_stream_has_to_wait_for_matrices(
    group: &Group<gemmesh::Cuda>,
    own: &CudaSlice<bf16>,
    other: &Arc<CudaStream>,
) -> Result<()> {
    let matrix = CudarcMatrix::new(group, own, 16, 16)?;
    let error = refused(group.use_cudarc_stream(other));
    assert!(
        matches!(error.kind(), Kind::Unsuitable { found, .. } if found == "1"),
        "{error}"
    );
    let handle = other.cu_stream().cast();
    // SAFETY: the stream is what is kept.
    let error = refused(unsafe { group.set_stream_of(handle, Arc::new(other.clone())) });
    assert!(
        matches!(error.kind(), Kind::Unsuitable { found, .. } if found == "1"),
        "{error}"
    );
    drop(matrix);
    group.use_cudarc_stream(other)
}

/// Streams, events and memory, where there is another GPU.
fn what_is_another_gpus_is_refused(group: &Group<gemmesh::Cuda>) -> Result<()> {
    let others = group.device_ordinal() + 1;
    if others < of_cudarc(CudaContext::device_count())? as usize {
        let foreign = of_cudarc(CudaContext::new(others))?;
        let stream = of_cudarc(foreign.new_stream())?;
        let event = of_cudarc(foreign.new_event(None))?;
        let mut memory = upload(&stream, &normal(1, 16 * 16))?;
        for error in [
            refused(group.use_cudarc_stream(&stream)),
            refused(group.record_cudarc_event(&event)),
            refused(CudarcMatrix::new(group, &memory, 16, 16)),
            refused(CudarcMatrixMut::new(group, &mut memory, 16, 16)),
        ] {
            let expected = matches!(error.kind(), Kind::Unsuitable { what, .. } if what.starts_with("the context"));
            assert!(expected, "{error}");
        }
    }
    Ok(())
}

#[test]
fn tensors_of_dlpack_go_out_and_come_back_on_gpus() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let values: Vec<bf16> = normal(1, N * K);
        let tensor = group.upload(&values, N, K)?.into_dlpack();
        // SAFETY: no one else uses the tensor.
        unsafe {
            let device = (*tensor).dl_tensor.device;
            let expected = (2, group.device_ordinal() as i32);
            assert_eq!((device.device_type, device.device_id), expected);
            (*tensor).dl_tensor.device.device_id += 1;
            let error = refused(Matrix::<gemmesh::Cuda, bf16>::from_dlpack(&group, tensor));
            assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
            (*tensor).dl_tensor.device.device_id -= 1;
        }
        // SAFETY: likewise.
        let b = unsafe { Matrix::<gemmesh::Cuda, bf16>::from_dlpack(&group, tensor)? };
        let mut out = group.upload::<bf16>(&vec![nan(); N * N], N, N)?;
        Matmul::new().run(&b, &b, &mut out)?;
        // Given back when the product has ended.
        drop(b);
        let reference = Reference::new(&values, &values, None, K);
        reference.check(&out.to_vec()?).unwrap();
        Ok("verified".into())
    }));
}

/// What [`call_and_count`] finds with a tensor.
struct Lender {
    group: Group<gemmesh::Cuda>,
    /// How often a tensor was given back, and how often the call failed that its library then made.
    counts: [AtomicUsize; 2],
}

/// A deleter that calls the group.
unsafe extern "C" fn call_and_count(tensor: *mut DLManagedTensor) {
    // SAFETY: it lives until the test ends.
    let lender = unsafe { &*(*tensor).manager_ctx.cast::<Lender>() };
    let group = &lender.group;
    // SAFETY: it is the group's own stream.
    let held = unsafe { group.hold_stream_of(group.stream(), Arc::new(())) };
    lender.counts[1].fetch_add(usize::from(held.is_err()), Ordering::Relaxed);
    lender.counts[0].fetch_add(1, Ordering::Relaxed);
}

/// The library that gets its tensor back may call the group, or wait for a thread that does.
#[test]
fn tensors_are_given_back_by_calls_that_hold_no_turn_of_the_group() {
    const ROUNDS: usize = 20;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let lent = group.zeros::<bf16>(N, K)?.into_dlpack();
        let rows = group.sharded::<bf16>(N, K)?;
        let lender = Lender {
            group: group.clone(),
            counts: Default::default(),
        };
        let mut tensor = DLManagedTensor {
            // SAFETY: it lives until it is given back below.
            dl_tensor: unsafe { (*lent).dl_tensor },
            manager_ctx: (&raw const lender).cast_mut().cast(),
            deleter: Some(call_and_count),
        };
        for _ in 0..ROUNDS {
            // SAFETY: no one else uses the memory.
            let matrix =
                unsafe { Matrix::<gemmesh::Cuda, bf16>::from_dlpack(&group, &raw mut tensor)? };
            // It is in use when it is dropped, and then the copy waits.
            pause(group.stream().cast(), Duration::from_millis(5));
            drop(matrix);
            rows.to_vec()?;
        }
        let counts = || {
            lender
                .counts
                .each_ref()
                .map(|of| of.load(Ordering::Relaxed))
        };
        let begin = Instant::now();
        while counts()[0] < ROUNDS && begin.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(counts(), [ROUNDS, 0]);
        // SAFETY: once, and no one uses it.
        unsafe { (*lent).deleter.unwrap()(lent) };
        Ok("given back".into())
    }));
}

/// Tells the CPU's driver what to say of any event, and of any stream, instead of the truth. None on a GPU.
fn answers() -> Option<impl Fn(CUresult, CUresult)> {
    // SAFETY: the driver is loaded already.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.unwrap();
    type Answers = unsafe extern "C" fn(CUresult, CUresult);
    // SAFETY: it is what tests/cpu_driver/driver.cpp says.
    let answers = unsafe { driver.get::<Answers>(b"cpuDriverAnswers") };
    let answers = *answers.ok()?;
    // SAFETY: a plain call, of a library that stays.
    Some(move |events, streams| unsafe { answers(events, streams) })
}

#[test]
fn what_the_device_may_still_use_is_not_given_back() {
    static GIVEN_BACK: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn give_back(_: *mut DLManagedTensor) {
        GIVEN_BACK.fetch_add(1, Ordering::Relaxed);
    }
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let Some(answers) = answers() else {
            return Ok("not on a GPU, which says the truth".into());
        };
        let lent = group.zeros::<bf16>(N, K)?.into_dlpack();
        let mut tensor = DLManagedTensor {
            // SAFETY: it lives until it is given back below.
            dl_tensor: unsafe { (*lent).dl_tensor },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(give_back),
        };
        // SAFETY: no one else uses the memory.
        let mut matrix =
            || unsafe { Matrix::<gemmesh::Cuda, bf16>::from_dlpack(&group, &raw mut tensor) };
        let given_back = || GIVEN_BACK.load(Ordering::Relaxed);
        let truth = CUresult::CUDA_SUCCESS;

        let unknown = matrix()?;
        answers(CUresult::CUDA_ERROR_NOT_PERMITTED, truth);
        drop(unknown);
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(given_back(), 0, "nobody knows whether it is used");
        answers(truth, truth);
        let begin = Instant::now();
        while given_back() == 0 && begin.elapsed() < TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(given_back(), 1);

        let unused = matrix()?;
        let failed = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        answers(failed, failed);
        drop(unused);
        answers(truth, truth);
        assert_eq!(given_back(), 2, "a device that has failed uses nothing");
        // SAFETY: once, and no one uses it.
        unsafe { (*lent).deleter.unwrap()(lent) };
        Ok("kept".into())
    }));
}
