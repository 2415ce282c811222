//! Operations on streams of the caller's.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use gemmesh::error::Kind;
use gemmesh::tuning::Route;
use gemmesh::{Error, Matmul, bf16};

use crate::support::gpu::*;
use crate::test_name;

/// The device has fewer queues than a process may have streams. A push waits for a kernel that is put on the caller's
/// stream after it: were they in one queue, both would wait for ever.
#[test]
fn pushes_do_not_share_a_queue_with_any_stream_of_the_callers() {
    const STREAMS: usize = 12;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 264)?;
        let all = priorities().flat_map(|priority| [priority; STREAMS]);
        let streams: Vec<_> = all.map(stream).collect();
        for (number, &stream) in streams.iter().enumerate() {
            // SAFETY: the stream is destroyed after the group has ended.
            unsafe { group.set_stream(stream.cast())? };
            arguments.fill(&group, 1 + number % 7)?;
            arguments.verify_by(&group, Route::Push)?;
        }
        drop(arguments);
        drop(group);
        for &stream in &streams {
            // SAFETY: no one uses the stream any more.
            unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        }
        Ok(format!("{} streams", streams.len()))
    }));
}

/// A product of `rows`, which are copied before it. Its output is copied to `result` behind it. Only the stream orders
/// these.
///
/// # Safety
/// `rows` has the elements of the own rows and `result` those of the output, and both live until the stream has been
/// waited for.
unsafe fn run_between_copies(
    arguments: &mut Arguments,
    rows: &[bf16],
    result: &mut [bf16],
    stream: sys::CUstream,
) -> Result<(), Error> {
    let ([_, k], [m, n]) = (arguments.a.shape(), arguments.out.shape());
    let (out, pitch) = arguments.out.as_device_ptr();
    assert_eq!(pitch, n * 2);
    let to = arguments.a.as_device_ptr() + (arguments.a.rows().start * k * 2) as u64;
    // SAFETY: the ranges are those of the own rows and of the output; the rest is the caller's promise.
    unsafe {
        driver(sys::cuMemcpyHtoDAsync_v2(
            to,
            rows.as_ptr().cast(),
            size_of_val(rows),
            stream,
        ));
        driver(sys::cuMemsetD8Async(out, 0xff, m * n * 2, stream));
    }
    arguments.run()?;
    // SAFETY: as above.
    unsafe {
        driver(sys::cuMemcpyDtoHAsync_v2(
            result.as_mut_ptr().cast(),
            out,
            m * n * 2,
            stream,
        ));
    }
    Ok(())
}

#[test]
fn operations_on_a_stream_of_the_callers_keep_its_order() {
    const ROUNDS: usize = 20;
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let [m, n, k] = [301, 72, 16];
        let mut arguments = Arguments::new(&group, m, n, k)?;
        let stream = stream(0);
        // SAFETY: the stream is destroyed after the group has ended.
        unsafe { group.set_stream(stream.cast())? };
        assert_eq!(group.stream(), stream.cast());
        let own = arguments.a.rows();
        let rows: Vec<Vec<bf16>> = (0..ROUNDS)
            .map(|round| {
                let value = bf16::from_f32((1 + round % 5 + rank.rank) as f32);
                vec![value; own.len() * k]
            })
            .collect();
        let mut results = vec![vec![bf16::ZERO; m * n]; ROUNDS];
        for (rows, result) in rows.iter().zip(&mut results) {
            // SAFETY: the vectors have as many elements, and live until the stream has been waited for.
            unsafe { run_between_copies(&mut arguments, rows, result, stream)? };
        }
        // SAFETY: the stream lives.
        unsafe { driver(sys::cuStreamSynchronize(stream)) };
        group.synchronize()?;
        for (round, result) in results.iter().enumerate() {
            for owner in 0..rank.world {
                let expected = bf16::from_f32(((1 + round % 5 + owner) * k) as f32);
                let rows = arguments.a.rows_of(owner);
                let found = &result[rows.start * n..rows.end * n];
                assert!(
                    found.iter().all(|&x| x == expected),
                    "round {round}, rows of rank {owner}"
                );
            }
        }
        drop(arguments);
        drop(group);
        // SAFETY: no one uses the stream any more.
        unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        Ok("in order".into())
    }));
}

#[test]
fn the_owner_of_a_stream_is_kept_until_another_stream_takes_over() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        let (owners, streams) = ([Arc::new(0), Arc::new(1)], [stream(0), stream(0)]);
        for (owner, &stream) in owners.iter().zip(&streams) {
            // SAFETY: the streams are destroyed after the group has ended.
            unsafe { group.set_stream_of(stream.cast(), owner.clone())? };
            arguments.verify_by(&group, Route::Push)?;
        }
        group.synchronize()?;
        let held = || owners.each_ref().map(Arc::strong_count);
        assert_eq!(held(), [1, 2]);
        drop(arguments);
        drop(group);
        assert_eq!(held(), [1, 1]);
        for &stream in &streams {
            // SAFETY: no one uses the stream any more.
            unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        }
        Ok(String::new())
    }));
}

#[test]
fn no_other_stream_takes_over_from_one_that_is_held() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let mut arguments = Arguments::new(&group, 301, 72, 16)?;
        let streams = [stream(0), stream(0)];
        // SAFETY: the streams are destroyed after the group has ended.
        let hold = |stream| unsafe { group.hold_stream_of(stream, Arc::new(())) };
        let [first, second] = streams.map(|stream| stream.cast());
        let guards = [hold(first)?, hold(first)?];
        assert_eq!(group.stream(), first);
        for guard in guards {
            let error = hold(second).unwrap_err();
            assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
            assert_eq!(group.stream(), first);
            drop(guard);
        }
        let guard = hold(second)?;
        assert_eq!(group.stream(), second);
        arguments.verify_by(&group, Route::Push)?;
        drop((guard, arguments, group));
        for stream in streams {
            // SAFETY: no one uses the stream any more.
            unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        }
        Ok(String::new())
    }));
}

/// What the program has put on the group's stream comes before a copy to or from the host, as it does before operations.
#[test]
fn copies_of_the_host_come_after_the_callers_work_on_the_stream() {
    const LATE: Duration = Duration::from_millis(100);
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let stream = stream(0);
        let mut matrix = group.zeros::<bf16>(64, 64)?;
        let mut rows = group.sharded::<bf16>(64, 64)?;
        let address = rows.as_device_ptr();
        let fill = |ptr: u64, byte: u8| {
            pause(stream, LATE);
            // SAFETY: each matrix has as many bytes, without padding, and lives until the stream has passed.
            unsafe { driver(sys::cuMemsetD8Async(ptr, byte, 64 * 64 * 2, stream)) };
        };
        let value = |byte: u8| bf16::from_bits(u16::from_le_bytes([byte; 2]));
        // SAFETY: the stream is destroyed after the group has ended.
        unsafe { group.set_stream(stream.cast())? };
        let ones = vec![bf16::ONE; 64 * 64];
        for byte in [0x40, 0x41] {
            fill(matrix.as_device_ptr().0, byte);
            assert!(matrix.to_vec()?.iter().all(|&x| x == value(byte)));
            fill(address, byte);
            assert!(rows.to_vec()?.iter().all(|&x| x == value(byte)));
            fill(matrix.as_device_ptr().0, byte);
            matrix.copy_from_host(&ones)?;
            fill(address, byte);
            rows.write(0, &ones)?;
            // SAFETY: the stream lives.
            unsafe { driver(sys::cuStreamSynchronize(stream)) };
            assert_eq!(matrix.to_vec()?, ones);
            assert_eq!(rows.to_vec()?, ones);
        }
        drop((matrix, rows, group));
        // SAFETY: no one uses the stream any more.
        unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        Ok(String::new())
    }));
}

/// No rank is late because of it, so the timeout does not count.
#[test]
fn copies_of_the_host_wait_for_work_of_the_callers_that_takes_longer_than_the_timeout() {
    // The library adds two seconds to the timeout.
    const LONG: Duration = Duration::from_secs(2 * (2 + SHORT.as_secs() + 1));
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let (_context, group) = connect_short(rank)?;
        let mut matrix = group.zeros::<bf16>(64, 64)?;
        let rows = group.sharded::<bf16>(64, 64)?;
        let stream: sys::CUstream = group.stream().cast();
        let value = bf16::from_bits(0x4040);
        let fill = |ptr: u64| {
            pause(stream, LONG);
            // SAFETY: each matrix has as many bytes, without padding, and lives until the stream has passed.
            unsafe { driver(sys::cuMemsetD8Async(ptr, 0x40, 64 * 64 * 2, stream)) };
        };
        fill(matrix.as_device_ptr().0);
        assert!(matrix.to_vec()?.iter().all(|&x| x == value));
        fill(rows.as_device_ptr());
        assert!(rows.to_vec()?.iter().all(|&x| x == value));
        fill(matrix.as_device_ptr().0);
        let ones = vec![bf16::ONE; 64 * 64];
        matrix.copy_from_host(&ones)?;
        assert_eq!(matrix.to_vec()?, ones);
        Ok(String::new())
    }));
}

/// The work on the stream ends after the copy has.
#[test]
fn a_failure_of_the_group_ends_a_copy_that_waits_for_work_of_the_callers() {
    static IS_OVER: AtomicBool = AtomicBool::new(false);
    unsafe extern "C" fn wait_until_it_is_over(_: *mut c_void) {
        // It ends also if the test fails.
        let begin = Instant::now();
        while !IS_OVER.load(Ordering::Relaxed) && begin.elapsed() < 3 * TIMEOUT {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let steps = host_group(rank)?;
        let matrix = group.zeros::<bf16>(64, 64)?;
        if rank.rank == 1 {
            steps.barrier()?;
            let _failure = group.fail("no more work");
            steps.barrier()?;
            return Ok("failed".into());
        }
        let (stream, no_data) = (group.stream().cast(), std::ptr::null_mut());
        // SAFETY: the function makes no CUDA call.
        unsafe {
            driver(sys::cuLaunchHostFunc(
                stream,
                Some(wait_until_it_is_over),
                no_data,
            ));
        }
        steps.barrier()?;
        let error = matrix.to_vec().unwrap_err();
        IS_OVER.store(true, Ordering::Relaxed);
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(1), Kind::ProgramFailed { .. })
            ),
            "{error}"
        );
        steps.barrier()?;
        Ok("told".into())
    }));
}

/// A stream that takes over waits for the one before, and so for what the program has put there late.
#[test]
fn a_stream_that_takes_over_comes_after_the_callers_work_on_the_one_before() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 2, |rank| {
        let _context = Context::retain(rank.rank);
        let group = connect(rank, TIMEOUT)?;
        let streams = [stream(0), stream(0)];
        let mut a = group.zeros::<bf16>(64, 64)?;
        let (mut b, mut out) = (group.zeros::<bf16>(64, 64)?, group.zeros::<bf16>(64, 64)?);
        b.copy_from_host(&[bf16::ONE; 64 * 64])?;
        for (round, &stream) in streams.iter().cycle().take(6).enumerate() {
            a.copy_from_host(&[bf16::ZERO; 64 * 64])?;
            let before: sys::CUstream = group.stream().cast();
            pause(before, Duration::from_millis(50));
            // Twos and threes, in turns.
            let word = [0x4000_4000, 0x4040_4040][round % 2];
            // SAFETY: the matrix has as many words, and lives until the stream has passed.
            unsafe {
                let ptr = a.as_device_ptr().0;
                driver(sys::cuMemsetD32Async(ptr, word, 64 * 32, before));
                group.set_stream(stream.cast())?;
            }
            Matmul::new().run(&a, &b, &mut out)?;
            let expected = bf16::from_f32([128.0, 192.0][round % 2]);
            assert!(out.to_vec()?.iter().all(|&x| x == expected), "{round}");
        }
        drop((a, b, out, group));
        for stream in streams {
            // SAFETY: no one uses the stream any more.
            unsafe { driver(sys::cuStreamDestroy_v2(stream)) };
        }
        Ok(String::new())
    }));
}

/// Its order is that of one thread, and the library's threads would have others.
#[test]
fn the_default_stream_of_each_thread_is_refused() {
    let Some(_leave) = gpu() else { return };
    all_done(ranks(test_name!(), 1, |rank| {
        let group = connect(rank, TIMEOUT)?;
        let before = group.stream();
        // SAFETY: it is a handle of a stream that always lives.
        let error = unsafe { group.set_stream(std::ptr::without_provenance_mut(2)) }.unwrap_err();
        assert!(matches!(error.kind(), Kind::Unsuitable { .. }), "{error}");
        assert!(
            error.to_string().contains("CU_STREAM_PER_THREAD"),
            "{error}"
        );
        assert_eq!(group.stream(), before);
        Ok(String::new())
    }));
}
