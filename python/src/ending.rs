//! The end of the interpreter, after which nothing of this library calls into Python.
//!
//! Threads that Python does not wait for call into it: they run a program's functions, and give tensors back to libraries
//! that take the GIL for it. Once the interpreter ends, CPython before 3.14 ends a thread that asks for the GIL, amid
//! frames of Rust, and so the process. So these calls pass a **gate**. A hook of `atexit` waits a moment for tensors that
//! wait for operations, closes the gate, and waits for the calls that have passed it. What comes later is not called, and
//! a tensor is left to the process's end. A fork has a gate and a hook of its own.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use gemmesh::raw::{AnyGroup, BackendKind, Tensor};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// How long the hook waits for tensors that wait for operations, and then for calls that have passed the gate.
const LONGEST: Duration = Duration::from_millis(500);

static CLOSED: AtomicBool = AtomicBool::new(false);
/// Calls that have passed the gate and have not returned.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
/// Tensors that wait for operations to end.
static KEPT: AtomicUsize = AtomicUsize::new(0);
/// How many forks there are from the process that imported the package to this one.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// One of a count, as long as this value lives, in the process that made it.
struct One {
    count: &'static AtomicUsize,
    forks: usize,
}

impl One {
    fn of(count: &'static AtomicUsize) -> One {
        count.fetch_add(1, Ordering::SeqCst);
        One {
            count,
            forks: FORKS.load(Ordering::SeqCst),
        }
    }
}

impl Drop for One {
    fn drop(&mut self) {
        // A fork counts its own only.
        if self.forks == FORKS.load(Ordering::SeqCst) {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Makes a call into Python. Does nothing once the gate is closed.
pub fn through_the_gate<R>(call: impl FnOnce() -> R) -> Option<R> {
    // All in one order: either this thread sees the gate closed, or the hook sees the call.
    let _counted = One::of(&UNDER_WAY);
    if CLOSED.load(Ordering::SeqCst) {
        None
    } else {
        Some(call())
    }
}

/// Makes a call that needs the GIL, from a thread that does not hold it. Does nothing once the interpreter ends.
pub fn attached<R>(call: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    through_the_gate(|| Python::try_attach(call)).flatten()
}

/// Calls a function of the program's, from a thread that Python does not wait for.
///
/// If the interpreter ends meanwhile, CPython ends the thread within the function. The thread then stops here for ever,
/// and none of Rust's frames is unwound.
pub fn called<'py>(
    function: &Bound<'py, PyAny>,
    arguments: &Bound<'py, PyTuple>,
) -> PyResult<Bound<'py, PyAny>> {
    unsafe extern "C-unwind" {
        fn PyObject_CallObject(
            function: *mut ffi::PyObject,
            arguments: *mut ffi::PyObject,
        ) -> *mut ffi::PyObject;
    }
    struct Stopped;
    impl Drop for Stopped {
        fn drop(&mut self) {
            loop {
                std::thread::park();
            }
        }
    }
    let stopped = Stopped;
    // SAFETY: both objects live, and the GIL is held.
    let result = unsafe { PyObject_CallObject(function.as_ptr(), arguments.as_ptr()) };
    std::mem::forget(stopped);
    // SAFETY: the function returns a new reference, or null and an exception.
    unsafe { Bound::from_owned_ptr_or_err(function.py(), result) }
}

/// A tensor that another library has lent. It is given back when this value is dropped, on any thread.
pub struct Lent(Option<Tensor>);

impl Lent {
    pub fn new(tensor: Tensor) -> Lent {
        Lent(Some(tensor))
    }

    /// None if it has been given back.
    pub fn tensor(&self) -> Option<&Tensor> {
        self.0.as_ref()
    }

    /// Keeps it until the group's operations so far are complete.
    pub fn keep(self, group: &dyn AnyGroup) {
        match group.backend() {
            // They were complete when they returned.
            BackendKind::Host => drop(self),
            BackendKind::Cuda => {
                group.keep(Box::new((self, One::of(&KEPT))));
            }
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let tensor = self.0.take();
        if let Err(tensor) = given_back(tensor) {
            std::mem::forget(tensor);
        }
    }
}

/// Gives a tensor back, or returns it if the interpreter ends.
fn given_back(tensor: Option<Tensor>) -> Result<(), Option<Tensor>> {
    let mut tensor = Some(tensor);
    through_the_gate(|| drop(tensor.take()));
    tensor.map_or(Ok(()), Err)
}

/// Registers the hook, and what a fork does first.
pub fn register(py: Python<'_>) -> PyResult<()> {
    let hook = pyo3::types::PyCFunction::new_closure(py, None, None, |arguments, _| {
        arguments.py().detach(close);
    })?;
    py.import("atexit")?.call_method1("register", (hook,))?;
    let forget = pyo3::types::PyCFunction::new_closure(py, None, None, |_, _| forget_counts())?;
    let options = PyDict::new(py);
    options.set_item("after_in_child", forget)?;
    py.import("os")?
        .call_method("register_at_fork", (), Some(&options))?;
    Ok(())
}

/// A fork has neither the threads nor the operations that this process counted before.
fn forget_counts() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    UNDER_WAY.store(0, Ordering::SeqCst);
    KEPT.store(0, Ordering::SeqCst);
}

fn close() {
    wait_for(&KEPT);
    CLOSED.store(true, Ordering::SeqCst);
    wait_for(&UNDER_WAY);
}

/// Waits until a count is 0, or [`LONGEST`].
fn wait_for(count: &AtomicUsize) {
    let begin = Instant::now();
    while count.load(Ordering::SeqCst) > 0 && begin.elapsed() < LONGEST {
        std::thread::sleep(Duration::from_millis(1));
    }
}
