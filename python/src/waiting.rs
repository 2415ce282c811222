//! Calls that wait: without the GIL, and so that Ctrl-C ends them.

use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use gemmesh::error::called_at;
use gemmesh::launch::Launch;
use gemmesh::raw::{AnyGroup, BackendKind};
use gemmesh::{Error, Result};
use pyo3::prelude::*;

use crate::errors::exception;

/// How often a call that waits looks for signals.
const GLANCE: Duration = Duration::from_millis(50);

/// Makes a call that only puts work on a stream on GPUs, and that waits on the host backend.
pub fn enqueued<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    match group.backend() {
        BackendKind::Cuda => {
            let result = py.detach(|| called_at(None, call));
            result.map_err(|error| exception(py, &error, Some(group.rank())))
        }
        BackendKind::Host => waited(py, group, call),
    }
}

/// Makes a call that may wait for other ranks. If a signal's handler raises an exception meanwhile, as that of Ctrl-C
/// does, the group fails, and the exception is raised.
pub fn waited<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    let rank = group.rank();
    if !is_main_thread() {
        // Python runs handlers of signals on the main thread only.
        let result = py.detach(|| called_at(None, call));
        return result.map_err(|error| exception(py, &error, Some(rank)));
    }
    let (result, raised) = py.detach(|| {
        std::thread::scope(|scope| {
            let (done, is_done) = channel::<()>();
            let worker = scope.spawn(move || {
                let result = called_at(None, call);
                drop(done);
                result
            });
            let mut raised = None;
            while is_done.recv_timeout(GLANCE) == Err(RecvTimeoutError::Timeout) {
                if raised.is_none()
                    && let Err(error) = Python::attach(|py| py.check_signals())
                {
                    group.fail(&format!("interrupted by {error}"));
                    raised = Some(error);
                }
            }
            (
                worker
                    .join()
                    .unwrap_or_else(|panic| Err(panicked(rank, &*panic))),
                raised,
            )
        })
    });
    match raised {
        Some(error) => Err(error),
        None => result.map_err(|error| exception(py, &error, Some(rank))),
    }
}

/// Makes a call before there is a group. If a signal's handler raises an exception meanwhile, the call goes on without
/// the caller, and what it returns is dropped.
pub fn left_behind<R: Send + 'static>(
    py: Python<'_>,
    rank: Option<usize>,
    call: impl FnOnce() -> Result<R> + Send + 'static,
) -> PyResult<R> {
    let (send, receive) = channel();
    // Shared with the closure below, which must be Sync. Nobody else locks it.
    let receive = Mutex::new(receive);
    std::thread::spawn(move || {
        let _ = send.send(called_at(None, call));
    });
    loop {
        let received = py.detach(|| match receive.lock() {
            Ok(receive) => receive.recv_timeout(GLANCE),
            Err(_) => Err(RecvTimeoutError::Disconnected),
        });
        match received {
            Ok(result) => return result.map_err(|error| exception(py, &error, rank)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => {
                let error = panicked(rank.unwrap_or(0), &"the call's thread has panicked");
                return Err(exception(py, &error, rank));
            }
        }
    }
}

/// Runs this program as `world` ranks. If a signal's handler raises an exception meanwhile, the ranks have 1.5 seconds
/// to end, and the exception is raised.
pub fn launch(py: Python<'_>, world: usize, args: Option<Vec<String>>) -> PyResult<()> {
    let mut launch = Launch::new(world);
    if let Some(args) = args {
        launch = launch.args(args);
    }
    let mut raised = None;
    let mut goes_on = || match Python::attach(|py| py.check_signals()) {
        Ok(()) => true,
        Err(error) => {
            raised = Some(error);
            false
        }
    };
    let result = py.detach(|| called_at(None, || launch.run_while(Some(&mut goes_on))));
    match raised {
        Some(error) => Err(error),
        None => result.map_err(|error| exception(py, &error, None)),
    }
}

fn panicked(rank: usize, panic: &dyn std::any::Any) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    Error::Internal {
        rank,
        what: message.unwrap_or_else(|| "a call panicked".into()),
    }
}

/// True on the process's first thread, which is Python's main thread.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}
