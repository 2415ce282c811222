//! The parameters of every kernel that may wait for peers. Most are set once, when the program is made.

use std::ffi::c_void;
use std::time::Duration;

use super::low_latency;
use super::operands::Operands;
use super::tables::ProgramTables;
use crate::backend::cuda::abi::{
    GEMMESH_GELU, GEMMESH_GELU_TANH, GEMMESH_IDENTITY, GEMMESH_RELU, GEMMESH_SILU,
    GEMMESH_STORED_OUTPUT, GemmeshCopyTask, GemmeshFault, GemmeshMailbox, GemmeshOutput,
    GemmeshOutputScales, GemmeshParams, GemmeshPeers, GemmeshPushEpoch, GemmeshScales,
};
use crate::backend::cuda::shared::Shared;
use crate::protocol::epoch::Epoch;
use crate::ranks::members::Members;
use crate::schedule::layout::MAX_WORLD;
use crate::schedule::plan::matrices::BESIDE;
use crate::schedule::{Activation, MAX_WEIGHTS, Schedule};

/// Kernel parameters that are the same at each call.
#[derive(Debug)]
pub struct Fixed<T>(pub T);

// SAFETY: they hold addresses of the device, which the host never dereferences.
unsafe impl<T> Send for Fixed<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Fixed<T> {}

/// The numbers of a call.
#[derive(Clone, Copy, Debug)]
pub struct CallNumbers {
    /// The epoch of its operation.
    pub epoch: Epoch,
    /// The number of its recording, if it is captured. It then runs whenever its graph is launched.
    pub recording: Option<u32>,
}

/// The parameters of a kernel of `schedule` that depend neither on a product nor on a call. `completes`: whether the
/// operation is complete when the kernel has ended.
pub fn fixed(
    shared: &Shared,
    members: &Members,
    schedule: &Schedule,
    tables: &ProgramTables,
    completes: bool,
) -> GemmeshParams {
    let (control, monitor) = (&shared.control, &shared.monitor);
    let flags = match schedule.is_pushed() {
        true => control.pushed(members.rank, 0),
        // Their address does not depend on the epoch.
        false => control.flags(Epoch::FIRST).chunk(members.rank, 0),
    };
    GemmeshParams {
        tiles: std::ptr::null(),
        flags: flags as *const u32,
        sources: tables.sources as *const u32,
        abort: control.abort() as *mut u32,
        fault: monitor.fault() as *mut GemmeshFault,
        trace: std::ptr::null_mut(),
        slices: std::ptr::null(),
        partials: std::ptr::null_mut(),
        arrived: std::ptr::null_mut(),
        deadline_ns: nanoseconds(members.deadlines.call()),
        tile_count: 0,
        epoch: 0,
        m: 0,
        k: 0,
        deferred_flag: u32::MAX,
        deferred_step: u32::MAX,
        activation: GEMMESH_IDENTITY,
        is_gated: 0,
        is_f32: 0,
        stored_type: GEMMESH_STORED_OUTPUT,
        b_is_kn: 0,
        recording: 0,
        tile_rows: 0,
        row_flags: 0,
        is_fast: 0,
        constant_weights: 0,
        outputs: [NO_OUTPUT; MAX_WEIGHTS],
        scales: GemmeshScales {
            a: std::ptr::null(),
            a_row: 0,
            a_block: 0,
            first_column: 0,
            reserved: 0,
        },
        peers: peers(shared, members, schedule, tables, completes),
        low_latency: low_latency::NONE,
    }
}

/// A kernel's parameters about its peers.
fn peers(
    shared: &Shared,
    members: &Members,
    schedule: &Schedule,
    tables: &ProgramTables,
    completes: bool,
) -> GemmeshPeers {
    let (control, monitor) = (&shared.control, &shared.monitor);
    let copies = schedule.awaits_permit();
    let mut mailboxes = [std::ptr::null_mut(); MAX_WORLD];
    let near = |peer: &usize| members.hosts.share(*peer, members.rank);
    for peer in (0..members.world).filter(near) {
        let mailbox = &mut mailboxes[peer];
        *mailbox = control.mailbox(peer) as *mut GemmeshMailbox;
    }
    let push_epoch = if schedule.is_pushed() {
        control.push_epoch()
    } else {
        0
    };
    GemmeshPeers {
        push_epoch: push_epoch as *mut GemmeshPushEpoch,
        tasks: tables.tasks as *const GemmeshCopyTask,
        // The kernel itself notes its start, because from then on it waits for peers. If copies push, their stream
        // notes that the kernel should run.
        started: if copies { 0 } else { monitor.started() } as *mut u32,
        // Work after the kernel is a part of the operation.
        completed: if completes { monitor.completed() } else { 0 } as *mut u32,
        task_count: tables.task_count,
        copies: copies.into(),
        rank: members.rank as u32,
        world: members.world as u32,
        mailboxes,
        rows: [std::ptr::null_mut(); MAX_WORLD],
        beside: [std::ptr::null_mut(); MAX_WORLD],
    }
}

/// The parameters of one call. `stored`: the number of the matrix that the kernel stores to, if it stores rows.
pub fn of_call(
    fixed: &Fixed<GemmeshParams>,
    world: usize,
    run: CallNumbers,
    operands: &Operands,
    stored: usize,
) -> GemmeshParams {
    let mut params = fixed.0;
    params.epoch = run.epoch.raw();
    match run.recording {
        Some(recording) => {
            params.recording = recording;
            // The monitor does not count replays by these words.
            params.peers.started = std::ptr::null_mut();
            params.peers.completed = std::ptr::null_mut();
        }
        // A kernel cannot see whether all ranks have begun the call. The monitor can, and writes the abort word.
        None => params.deadline_ns = u64::MAX,
    }
    let peers = &mut params.peers;
    for (to, number) in [(&mut peers.rows, stored), (&mut peers.beside, BESIDE)] {
        for (peer, rows) in to.iter_mut().enumerate().take(world) {
            *rows = operands.of_rank(number, peer).unwrap_or(0) as *mut c_void;
        }
    }
    params
}

/// A time as kernels count it.
pub fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos().min(u64::MAX.into()) as u64
}

/// The kernels' number of an activation.
pub fn function(activation: Activation) -> u32 {
    match activation {
        Activation::Identity => GEMMESH_IDENTITY,
        Activation::Relu => GEMMESH_RELU,
        Activation::Gelu => GEMMESH_GELU,
        Activation::GeluTanh => GEMMESH_GELU_TANH,
        Activation::Silu => GEMMESH_SILU,
    }
}

/// An unused weight slot.
const NO_OUTPUT: GemmeshOutput = GemmeshOutput {
    bias: std::ptr::null(),
    out: std::ptr::null_mut(),
    out_pitch: 0,
    residual: std::ptr::null(),
    residual_pitch: 0,
    scales: std::ptr::null(),
    n: 0,
    scale_row: 0,
    scale_first: 0,
    reserved: 0,
    quantized: GemmeshOutputScales {
        scales: std::ptr::null_mut(),
        row: 0,
        block: 0,
        power_of_two: 0,
        first_column: 0,
    },
};
