//! Calls that wait: without the GIL, and so that Ctrl-C ends them.

use std::ffi::OsString;
use std::sync::Mutex;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

use gemmesh::error::{Kind, called_at};
use gemmesh::launch::Launch;
use gemmesh::raw::{AnyGroup, BackendKind, launch_while};
use gemmesh::{Error, Result};
use pyo3::prelude::*;

use crate::ending::attached;
use crate::errors::{exception, misuse};
use crate::streams::CallStream;

/// How often a call that waits looks for signals.
const GLANCE: Duration = Duration::from_millis(50);

/// Makes a call that only puts work on a stream on GPUs, and that waits on the host backend.
pub fn enqueued<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    match group.backend() {
        BackendKind::Cuda => made_here(py, group, call),
        BackendKind::Host => waited(py, group, call),
    }
}

/// As [`enqueued`], on a stream of the caller's, if there is one. `awaited`: the name of the call, if other ranks wait
/// for this one in it. They are told if it cannot be put on the stream.
pub fn enqueued_on<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    stream: Option<CallStream>,
    awaited: Option<&str>,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    match stream {
        Some(stream) => enqueued(py, group, || stream.run(group, awaited, call)),
        None => enqueued(py, group, call),
    }
}

/// As [`waited`], after what is on a stream of the caller's, if there is one. Other threads make calls meanwhile: a
/// stream that they put the group on waits for this one.
pub fn waited_behind<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    stream: Option<CallStream>,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    waited(py, group, || {
        if let Some(stream) = stream {
            stream.run(group, None, || Ok(()))?;
        }
        call()
    })
}

/// Makes a call that may wait for other ranks. If a signal's handler raises an exception meanwhile, as that of Ctrl-C
/// does, the group fails, and the exception is raised.
pub fn waited<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    match group.is_in_function() {
        // The group knows by its thread that a function makes the call, and refuses it.
        true => made_here(py, group, call),
        false => waited_in_function(py, group, call),
    }
}

/// As [`waited`], of a call that an operation's function may make.
pub fn waited_in_function<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    let rank = group.rank();
    if !is_main_thread() {
        // Python runs handlers of signals on the main thread only.
        return made_here(py, group, call);
    }
    let mut call = Some(call);
    let beside = py.detach(|| watched(group, &mut call));
    let (result, raised) = match (beside, call) {
        (Some(outcome), _) => outcome,
        // The system has no thread left. The call is made here, where no signal ends it.
        (None, Some(call)) => (py.detach(|| called_at(None, call)), None),
        (None, None) => (Err(panicked(rank, &"the call was lost")), None),
    };
    match raised {
        Some(error) => Err(error),
        None => result.map_err(|error| exception(py, &error, Some(rank))),
    }
}

/// Makes a call on this thread.
fn made_here<R: Send>(
    py: Python<'_>,
    group: &dyn AnyGroup,
    call: impl FnOnce() -> Result<R> + Send,
) -> PyResult<R> {
    let result = py.detach(|| called_at(None, call));
    result.map_err(|error| exception(py, &error, Some(group.rank())))
}

/// Makes a call on a thread of its own, and looks for signals meanwhile. Returns its result, and the exception of a
/// signal's handler; or nothing if no thread can be started, and leaves the call.
fn watched<R: Send>(
    group: &dyn AnyGroup,
    call: &mut Option<impl FnOnce() -> Result<R> + Send>,
) -> Option<(Result<R>, Option<PyErr>)> {
    let rank = group.rank();
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let work = move || {
            let lost = || Err(panicked(rank, &"the call was lost"));
            let result = call.take().map_or_else(lost, |call| called_at(None, call));
            drop(done);
            result
        };
        let worker = Builder::new().spawn_scoped(scope, work).ok()?;
        let mut raised = None;
        while is_done.recv_timeout(GLANCE) == Err(RecvTimeoutError::Timeout) {
            if raised.is_none()
                && let Some(Err(error)) = attached(|py| py.check_signals())
            {
                let words = error.to_string();
                group.fail(&format!("interrupted by {}", words.trim_end_matches(": ")));
                raised = Some(error);
            }
        }
        let result = worker.join();
        Some((
            result.unwrap_or_else(|panic| Err(panicked(rank, &*panic))),
            raised,
        ))
    })
}

/// Makes a call before there is a group. If a signal's handler raises an exception meanwhile, the call goes on without
/// the caller, and what it returns is dropped.
pub fn left_behind<R: Send + 'static>(
    py: Python<'_>,
    rank: Option<usize>,
    call: impl FnOnce() -> Result<R> + Send + 'static,
) -> PyResult<R> {
    let (send, receive) = channel();
    // Shared with the closure below, which must be Sync. No one else locks it.
    let receive = Mutex::new(receive);
    let work = move || {
        let _ = send.send(called_at(None, call));
    };
    if let Err(error) = Builder::new().spawn(work) {
        let kind = Kind::System {
            action: "start a thread that joins the ranks".into(),
            reason: error.to_string(),
        };
        let error = Error::of_kind(kind.clone());
        let error = rank.map_or(error, |rank| kind.on(rank));
        return Err(exception(py, &error, rank));
    }
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
pub fn launch(
    py: Python<'_>,
    world: usize,
    args: Option<Vec<String>>,
    inherit_stdin: bool,
) -> PyResult<()> {
    let mut launch = program(py, Launch::new(world), args)?;
    if inherit_stdin {
        launch = launch.inherit_stdin();
    }
    let mut raised = None;
    let mut goes_on = || match attached(|py| py.check_signals()) {
        None | Some(Ok(())) => true,
        Some(Err(error)) => {
            raised = Some(error);
            false
        }
    };
    let result = py.detach(|| called_at(None, || launch_while(launch, &mut goes_on)));
    match raised {
        Some(error) => Err(error),
        None => result.map_err(|error| exception(py, &error, None)),
    }
}

/// Tells `launch` how this program is started again, with `args` or with its own arguments.
fn program(py: Python<'_>, mut launch: Launch, args: Option<Vec<String>>) -> PyResult<Launch> {
    let program = py.import("gemmesh._program")?;
    if args.is_none() {
        require_script(py)?;
    }
    let started = program.call_method1("started", (args.is_none(),))?;
    let (name, own, path): (Option<OsString>, Option<Vec<OsString>>, Option<OsString>) =
        started.extract()?;
    if let Some(name) = name {
        launch = launch.name(name);
    }
    if let Some(path) = path {
        launch = launch.env("PYTHONPATH", path);
    }
    Ok(match (args, own) {
        (Some(args), _) => launch.args(args),
        (None, Some(own)) => launch.args(own),
        (None, None) => launch,
    })
}

/// Checks that the program can be started again. What Python reads from its standard input cannot.
fn require_script(py: Python<'_>) -> PyResult<()> {
    let argv: Vec<String> = py.import("sys")?.getattr("argv")?.extract()?;
    match argv.first().map_or("", String::as_str) {
        "" | "-" => Err(misuse(
            py,
            "gemmesh.launch: the program comes from standard input, which ranks cannot read again; put it into a file, \
             or give args",
        )),
        _ => Ok(()),
    }
}

fn panicked(rank: usize, panic: &dyn std::any::Any) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned());
    Kind::Internal {
        what: message.unwrap_or_else(|| "a call panicked".into()),
    }
    .on(rank)
}

/// True on the process's first thread, which is Python's main thread.
pub fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}
