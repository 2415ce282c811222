//! cuda/abi.h, as bindgen reads it; tests/abi.rs fails when the two differ.
#![allow(dead_code)]
pub const GEMMESH_STORE_ROWS: u32 = 16;
pub const GEMMESH_MAX_WEIGHTS: u32 = 4;
pub const GEMMESH_IDENTITY: u32 = 0;
pub const GEMMESH_RELU: u32 = 1;
pub const GEMMESH_GELU: u32 = 2;
pub const GEMMESH_GELU_TANH: u32 = 3;
pub const GEMMESH_SILU: u32 = 4;
pub const GEMMESH_STORED_OUTPUT: u32 = 0;
pub const GEMMESH_STORED_F16: u32 = 1;
pub const GEMMESH_STORED_E4M3: u32 = 2;
pub const GEMMESH_STORED_F32: u32 = 3;
pub const GEMMESH_MAX_WORLD: u32 = 64;
pub const GEMMESH_MAX_FLAGS: u32 = 4096;
pub const GEMMESH_REFRESH: u32 = 268435456;
pub const GEMMESH_GIVEN_UP: u32 = 1;
pub const GEMMESH_GROUP_FAILED: u32 = 2;
pub const GEMMESH_READY: u32 = 4294967295;
pub const GEMMESH_LOW_LATENCY: u32 = 4294967294;
pub const GEMMESH_FAULT_NONE: u32 = 0;
pub const GEMMESH_FAULT_CLAIMED: u32 = 1;
pub const GEMMESH_FAULT_RECORDED: u32 = 2;
pub const GEMMESH_COLLECTIVE_THREADS: u32 = 512;
pub const GEMMESH_MAX_TARGETS: u32 = 8;
pub const GEMMESH_LOW_LATENCY_BYTES: u32 = 8388608;
pub const GEMMESH_SCALE_BLOCK: u32 = 128;
pub const GEMMESH_UNTOLD: u32 = 4294967295;
pub const GEMMESH_COPIED: u32 = 4294967294;
pub const GEMMESH_PARTIAL: u32 = 0;
pub const GEMMESH_ADDED: u32 = 1;
pub const GEMMESH_FINISHED: u32 = 2;
pub const GEMMESH_REDUCE_THREADS: u32 = 256;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshTile {
    pub m: u32,
    pub n: u32,
    pub block: u32,
    pub flag_begin: u16,
    pub flag_end: u16,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshTile"][::core::mem::size_of::<GemmeshTile>() - 16usize];
    ["Alignment of GemmeshTile"][::core::mem::align_of::<GemmeshTile>() - 4usize];
    ["Offset of field: GemmeshTile::m"][::core::mem::offset_of!(GemmeshTile, m) - 0usize];
    ["Offset of field: GemmeshTile::n"][::core::mem::offset_of!(GemmeshTile, n) - 4usize];
    ["Offset of field: GemmeshTile::block"][::core::mem::offset_of!(GemmeshTile, block) - 8usize];
    ["Offset of field: GemmeshTile::flag_begin"]
        [::core::mem::offset_of!(GemmeshTile, flag_begin) - 12usize];
    ["Offset of field: GemmeshTile::flag_end"]
        [::core::mem::offset_of!(GemmeshTile, flag_end) - 14usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshSlice {
    pub begin: u32,
    pub end: u32,
    pub place: u32,
    pub number: u16,
    pub count: u16,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshSlice"][::core::mem::size_of::<GemmeshSlice>() - 16usize];
    ["Alignment of GemmeshSlice"][::core::mem::align_of::<GemmeshSlice>() - 4usize];
    ["Offset of field: GemmeshSlice::begin"][::core::mem::offset_of!(GemmeshSlice, begin) - 0usize];
    ["Offset of field: GemmeshSlice::end"][::core::mem::offset_of!(GemmeshSlice, end) - 4usize];
    ["Offset of field: GemmeshSlice::place"][::core::mem::offset_of!(GemmeshSlice, place) - 8usize];
    ["Offset of field: GemmeshSlice::number"]
        [::core::mem::offset_of!(GemmeshSlice, number) - 12usize];
    ["Offset of field: GemmeshSlice::count"]
        [::core::mem::offset_of!(GemmeshSlice, count) - 14usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshFault {
    pub state: u32,
    pub flag: u32,
    pub expected: u32,
    pub seen: u32,
    pub waited_ns: u64,
    pub peer: u32,
    pub pushed: u32,
    pub operation: u32,
    pub recording: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshFault"][::core::mem::size_of::<GemmeshFault>() - 40usize];
    ["Alignment of GemmeshFault"][::core::mem::align_of::<GemmeshFault>() - 8usize];
    ["Offset of field: GemmeshFault::state"][::core::mem::offset_of!(GemmeshFault, state) - 0usize];
    ["Offset of field: GemmeshFault::flag"][::core::mem::offset_of!(GemmeshFault, flag) - 4usize];
    ["Offset of field: GemmeshFault::expected"]
        [::core::mem::offset_of!(GemmeshFault, expected) - 8usize];
    ["Offset of field: GemmeshFault::seen"][::core::mem::offset_of!(GemmeshFault, seen) - 12usize];
    ["Offset of field: GemmeshFault::waited_ns"]
        [::core::mem::offset_of!(GemmeshFault, waited_ns) - 16usize];
    ["Offset of field: GemmeshFault::peer"][::core::mem::offset_of!(GemmeshFault, peer) - 24usize];
    ["Offset of field: GemmeshFault::pushed"]
        [::core::mem::offset_of!(GemmeshFault, pushed) - 28usize];
    ["Offset of field: GemmeshFault::operation"]
        [::core::mem::offset_of!(GemmeshFault, operation) - 32usize];
    ["Offset of field: GemmeshFault::recording"]
        [::core::mem::offset_of!(GemmeshFault, recording) - 36usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshMailbox {
    pub ready: [u32; 64usize],
    pub chunk: [u32; 4096usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshMailbox"][::core::mem::size_of::<GemmeshMailbox>() - 16640usize];
    ["Alignment of GemmeshMailbox"][::core::mem::align_of::<GemmeshMailbox>() - 4usize];
    ["Offset of field: GemmeshMailbox::ready"]
        [::core::mem::offset_of!(GemmeshMailbox, ready) - 0usize];
    ["Offset of field: GemmeshMailbox::chunk"]
        [::core::mem::offset_of!(GemmeshMailbox, chunk) - 256usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshPushEpoch {
    pub epoch: u32,
    pub entered: u32,
    pub taken: u32,
    pub left: u32,
    pub current: u32,
    pub permit: u32,
    pub low_latency: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshPushEpoch"][::core::mem::size_of::<GemmeshPushEpoch>() - 32usize];
    ["Alignment of GemmeshPushEpoch"][::core::mem::align_of::<GemmeshPushEpoch>() - 4usize];
    ["Offset of field: GemmeshPushEpoch::epoch"]
        [::core::mem::offset_of!(GemmeshPushEpoch, epoch) - 0usize];
    ["Offset of field: GemmeshPushEpoch::entered"]
        [::core::mem::offset_of!(GemmeshPushEpoch, entered) - 4usize];
    ["Offset of field: GemmeshPushEpoch::taken"]
        [::core::mem::offset_of!(GemmeshPushEpoch, taken) - 8usize];
    ["Offset of field: GemmeshPushEpoch::left"]
        [::core::mem::offset_of!(GemmeshPushEpoch, left) - 12usize];
    ["Offset of field: GemmeshPushEpoch::current"]
        [::core::mem::offset_of!(GemmeshPushEpoch, current) - 16usize];
    ["Offset of field: GemmeshPushEpoch::permit"]
        [::core::mem::offset_of!(GemmeshPushEpoch, permit) - 20usize];
    ["Offset of field: GemmeshPushEpoch::low_latency"]
        [::core::mem::offset_of!(GemmeshPushEpoch, low_latency) - 24usize];
    ["Offset of field: GemmeshPushEpoch::reserved"]
        [::core::mem::offset_of!(GemmeshPushEpoch, reserved) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshCopyTask {
    pub offset: u64,
    pub bytes: u32,
    pub peer: u32,
    pub flag: u32,
    pub beside_bytes: u32,
    pub beside_offset: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshCopyTask"][::core::mem::size_of::<GemmeshCopyTask>() - 32usize];
    ["Alignment of GemmeshCopyTask"][::core::mem::align_of::<GemmeshCopyTask>() - 8usize];
    ["Offset of field: GemmeshCopyTask::offset"]
        [::core::mem::offset_of!(GemmeshCopyTask, offset) - 0usize];
    ["Offset of field: GemmeshCopyTask::bytes"]
        [::core::mem::offset_of!(GemmeshCopyTask, bytes) - 8usize];
    ["Offset of field: GemmeshCopyTask::peer"]
        [::core::mem::offset_of!(GemmeshCopyTask, peer) - 12usize];
    ["Offset of field: GemmeshCopyTask::flag"]
        [::core::mem::offset_of!(GemmeshCopyTask, flag) - 16usize];
    ["Offset of field: GemmeshCopyTask::beside_bytes"]
        [::core::mem::offset_of!(GemmeshCopyTask, beside_bytes) - 20usize];
    ["Offset of field: GemmeshCopyTask::beside_offset"]
        [::core::mem::offset_of!(GemmeshCopyTask, beside_offset) - 24usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshSend {
    pub from_row: u32,
    pub to_row: u32,
    pub column: u32,
    pub width: u32,
    pub rows: u32,
    pub peer: u32,
    pub flag: u32,
    pub area_row: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshSend"][::core::mem::size_of::<GemmeshSend>() - 32usize];
    ["Alignment of GemmeshSend"][::core::mem::align_of::<GemmeshSend>() - 4usize];
    ["Offset of field: GemmeshSend::from_row"]
        [::core::mem::offset_of!(GemmeshSend, from_row) - 0usize];
    ["Offset of field: GemmeshSend::to_row"][::core::mem::offset_of!(GemmeshSend, to_row) - 4usize];
    ["Offset of field: GemmeshSend::column"][::core::mem::offset_of!(GemmeshSend, column) - 8usize];
    ["Offset of field: GemmeshSend::width"][::core::mem::offset_of!(GemmeshSend, width) - 12usize];
    ["Offset of field: GemmeshSend::rows"][::core::mem::offset_of!(GemmeshSend, rows) - 16usize];
    ["Offset of field: GemmeshSend::peer"][::core::mem::offset_of!(GemmeshSend, peer) - 20usize];
    ["Offset of field: GemmeshSend::flag"][::core::mem::offset_of!(GemmeshSend, flag) - 24usize];
    ["Offset of field: GemmeshSend::area_row"]
        [::core::mem::offset_of!(GemmeshSend, area_row) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshSends {
    pub sends: *const GemmeshSend,
    pub from: *const ::core::ffi::c_void,
    pub from_pitch: u64,
    pub to_pitch: u64,
    pub count: u32,
    pub flags: u32,
    pub pieces: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshSends"][::core::mem::size_of::<GemmeshSends>() - 48usize];
    ["Alignment of GemmeshSends"][::core::mem::align_of::<GemmeshSends>() - 8usize];
    ["Offset of field: GemmeshSends::sends"][::core::mem::offset_of!(GemmeshSends, sends) - 0usize];
    ["Offset of field: GemmeshSends::from"][::core::mem::offset_of!(GemmeshSends, from) - 8usize];
    ["Offset of field: GemmeshSends::from_pitch"]
        [::core::mem::offset_of!(GemmeshSends, from_pitch) - 16usize];
    ["Offset of field: GemmeshSends::to_pitch"]
        [::core::mem::offset_of!(GemmeshSends, to_pitch) - 24usize];
    ["Offset of field: GemmeshSends::count"]
        [::core::mem::offset_of!(GemmeshSends, count) - 32usize];
    ["Offset of field: GemmeshSends::flags"]
        [::core::mem::offset_of!(GemmeshSends, flags) - 36usize];
    ["Offset of field: GemmeshSends::pieces"]
        [::core::mem::offset_of!(GemmeshSends, pieces) - 40usize];
    ["Offset of field: GemmeshSends::reserved"]
        [::core::mem::offset_of!(GemmeshSends, reserved) - 44usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshPeers {
    pub push_epoch: *mut GemmeshPushEpoch,
    pub tasks: *const GemmeshCopyTask,
    pub started: *mut u32,
    pub completed: *mut u32,
    pub task_count: u32,
    pub copies: u32,
    pub rank: u32,
    pub world: u32,
    pub mailboxes: [*mut GemmeshMailbox; 64usize],
    pub rows: [*mut ::core::ffi::c_void; 64usize],
    pub beside: [*mut ::core::ffi::c_void; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshPeers"][::core::mem::size_of::<GemmeshPeers>() - 1584usize];
    ["Alignment of GemmeshPeers"][::core::mem::align_of::<GemmeshPeers>() - 8usize];
    ["Offset of field: GemmeshPeers::push_epoch"]
        [::core::mem::offset_of!(GemmeshPeers, push_epoch) - 0usize];
    ["Offset of field: GemmeshPeers::tasks"][::core::mem::offset_of!(GemmeshPeers, tasks) - 8usize];
    ["Offset of field: GemmeshPeers::started"]
        [::core::mem::offset_of!(GemmeshPeers, started) - 16usize];
    ["Offset of field: GemmeshPeers::completed"]
        [::core::mem::offset_of!(GemmeshPeers, completed) - 24usize];
    ["Offset of field: GemmeshPeers::task_count"]
        [::core::mem::offset_of!(GemmeshPeers, task_count) - 32usize];
    ["Offset of field: GemmeshPeers::copies"]
        [::core::mem::offset_of!(GemmeshPeers, copies) - 36usize];
    ["Offset of field: GemmeshPeers::rank"][::core::mem::offset_of!(GemmeshPeers, rank) - 40usize];
    ["Offset of field: GemmeshPeers::world"]
        [::core::mem::offset_of!(GemmeshPeers, world) - 44usize];
    ["Offset of field: GemmeshPeers::mailboxes"]
        [::core::mem::offset_of!(GemmeshPeers, mailboxes) - 48usize];
    ["Offset of field: GemmeshPeers::rows"][::core::mem::offset_of!(GemmeshPeers, rows) - 560usize];
    ["Offset of field: GemmeshPeers::beside"]
        [::core::mem::offset_of!(GemmeshPeers, beside) - 1072usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshTraceEvent {
    pub wait_begin: u64,
    pub wait_end: u64,
    pub load_begin: u64,
    pub math_begin: u64,
    pub math_end: u64,
    pub done: u64,
    pub sm: u32,
    pub tile: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshTraceEvent"][::core::mem::size_of::<GemmeshTraceEvent>() - 56usize];
    ["Alignment of GemmeshTraceEvent"][::core::mem::align_of::<GemmeshTraceEvent>() - 8usize];
    ["Offset of field: GemmeshTraceEvent::wait_begin"]
        [::core::mem::offset_of!(GemmeshTraceEvent, wait_begin) - 0usize];
    ["Offset of field: GemmeshTraceEvent::wait_end"]
        [::core::mem::offset_of!(GemmeshTraceEvent, wait_end) - 8usize];
    ["Offset of field: GemmeshTraceEvent::load_begin"]
        [::core::mem::offset_of!(GemmeshTraceEvent, load_begin) - 16usize];
    ["Offset of field: GemmeshTraceEvent::math_begin"]
        [::core::mem::offset_of!(GemmeshTraceEvent, math_begin) - 24usize];
    ["Offset of field: GemmeshTraceEvent::math_end"]
        [::core::mem::offset_of!(GemmeshTraceEvent, math_end) - 32usize];
    ["Offset of field: GemmeshTraceEvent::done"]
        [::core::mem::offset_of!(GemmeshTraceEvent, done) - 40usize];
    ["Offset of field: GemmeshTraceEvent::sm"]
        [::core::mem::offset_of!(GemmeshTraceEvent, sm) - 48usize];
    ["Offset of field: GemmeshTraceEvent::tile"]
        [::core::mem::offset_of!(GemmeshTraceEvent, tile) - 52usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshLowLatency {
    pub areas: [*mut ::core::ffi::c_void; 8usize],
    pub begin: [u32; 8usize],
    pub end: [u32; 8usize],
    pub share: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshLowLatency"][::core::mem::size_of::<GemmeshLowLatency>() - 136usize];
    ["Alignment of GemmeshLowLatency"][::core::mem::align_of::<GemmeshLowLatency>() - 8usize];
    ["Offset of field: GemmeshLowLatency::areas"]
        [::core::mem::offset_of!(GemmeshLowLatency, areas) - 0usize];
    ["Offset of field: GemmeshLowLatency::begin"]
        [::core::mem::offset_of!(GemmeshLowLatency, begin) - 64usize];
    ["Offset of field: GemmeshLowLatency::end"]
        [::core::mem::offset_of!(GemmeshLowLatency, end) - 96usize];
    ["Offset of field: GemmeshLowLatency::share"]
        [::core::mem::offset_of!(GemmeshLowLatency, share) - 128usize];
    ["Offset of field: GemmeshLowLatency::reserved"]
        [::core::mem::offset_of!(GemmeshLowLatency, reserved) - 132usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshOutputScales {
    pub scales: *mut f32,
    pub row: u32,
    pub block: u32,
    pub power_of_two: u32,
    pub first_column: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshOutputScales"][::core::mem::size_of::<GemmeshOutputScales>() - 24usize];
    ["Alignment of GemmeshOutputScales"][::core::mem::align_of::<GemmeshOutputScales>() - 8usize];
    ["Offset of field: GemmeshOutputScales::scales"]
        [::core::mem::offset_of!(GemmeshOutputScales, scales) - 0usize];
    ["Offset of field: GemmeshOutputScales::row"]
        [::core::mem::offset_of!(GemmeshOutputScales, row) - 8usize];
    ["Offset of field: GemmeshOutputScales::block"]
        [::core::mem::offset_of!(GemmeshOutputScales, block) - 12usize];
    ["Offset of field: GemmeshOutputScales::power_of_two"]
        [::core::mem::offset_of!(GemmeshOutputScales, power_of_two) - 16usize];
    ["Offset of field: GemmeshOutputScales::first_column"]
        [::core::mem::offset_of!(GemmeshOutputScales, first_column) - 20usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshOutput {
    pub bias: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub out_pitch: u64,
    pub residual: *const ::core::ffi::c_void,
    pub residual_pitch: u64,
    pub scales: *const f32,
    pub n: u32,
    pub scale_row: u32,
    pub scale_first: u32,
    pub reserved: u32,
    pub quantized: GemmeshOutputScales,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshOutput"][::core::mem::size_of::<GemmeshOutput>() - 88usize];
    ["Alignment of GemmeshOutput"][::core::mem::align_of::<GemmeshOutput>() - 8usize];
    ["Offset of field: GemmeshOutput::bias"][::core::mem::offset_of!(GemmeshOutput, bias) - 0usize];
    ["Offset of field: GemmeshOutput::out"][::core::mem::offset_of!(GemmeshOutput, out) - 8usize];
    ["Offset of field: GemmeshOutput::out_pitch"]
        [::core::mem::offset_of!(GemmeshOutput, out_pitch) - 16usize];
    ["Offset of field: GemmeshOutput::residual"]
        [::core::mem::offset_of!(GemmeshOutput, residual) - 24usize];
    ["Offset of field: GemmeshOutput::residual_pitch"]
        [::core::mem::offset_of!(GemmeshOutput, residual_pitch) - 32usize];
    ["Offset of field: GemmeshOutput::scales"]
        [::core::mem::offset_of!(GemmeshOutput, scales) - 40usize];
    ["Offset of field: GemmeshOutput::n"][::core::mem::offset_of!(GemmeshOutput, n) - 48usize];
    ["Offset of field: GemmeshOutput::scale_row"]
        [::core::mem::offset_of!(GemmeshOutput, scale_row) - 52usize];
    ["Offset of field: GemmeshOutput::scale_first"]
        [::core::mem::offset_of!(GemmeshOutput, scale_first) - 56usize];
    ["Offset of field: GemmeshOutput::reserved"]
        [::core::mem::offset_of!(GemmeshOutput, reserved) - 60usize];
    ["Offset of field: GemmeshOutput::quantized"]
        [::core::mem::offset_of!(GemmeshOutput, quantized) - 64usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshScales {
    pub a: *const f32,
    pub a_row: u32,
    pub a_block: u32,
    pub first_column: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshScales"][::core::mem::size_of::<GemmeshScales>() - 24usize];
    ["Alignment of GemmeshScales"][::core::mem::align_of::<GemmeshScales>() - 8usize];
    ["Offset of field: GemmeshScales::a"][::core::mem::offset_of!(GemmeshScales, a) - 0usize];
    ["Offset of field: GemmeshScales::a_row"]
        [::core::mem::offset_of!(GemmeshScales, a_row) - 8usize];
    ["Offset of field: GemmeshScales::a_block"]
        [::core::mem::offset_of!(GemmeshScales, a_block) - 12usize];
    ["Offset of field: GemmeshScales::first_column"]
        [::core::mem::offset_of!(GemmeshScales, first_column) - 16usize];
    ["Offset of field: GemmeshScales::reserved"]
        [::core::mem::offset_of!(GemmeshScales, reserved) - 20usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshParams {
    pub tiles: *const GemmeshTile,
    pub flags: *const u32,
    pub sources: *const u32,
    pub abort: *mut u32,
    pub fault: *mut GemmeshFault,
    pub trace: *mut GemmeshTraceEvent,
    pub slices: *const GemmeshSlice,
    pub partials: *mut f32,
    pub arrived: *mut u32,
    pub deadline_ns: u64,
    pub tile_count: u32,
    pub epoch: u32,
    pub m: u32,
    pub k: u32,
    pub deferred_flag: u32,
    pub deferred_step: u32,
    pub activation: u32,
    pub is_gated: u32,
    pub is_f32: u32,
    pub stored_type: u32,
    pub b_is_kn: u32,
    pub recording: u32,
    pub tile_rows: u32,
    pub row_flags: u32,
    pub is_fast: u32,
    pub constant_weights: u32,
    pub outputs: [GemmeshOutput; 4usize],
    pub scales: GemmeshScales,
    pub peers: GemmeshPeers,
    pub low_latency: GemmeshLowLatency,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshParams"][::core::mem::size_of::<GemmeshParams>() - 2240usize];
    ["Alignment of GemmeshParams"][::core::mem::align_of::<GemmeshParams>() - 8usize];
    ["Offset of field: GemmeshParams::tiles"]
        [::core::mem::offset_of!(GemmeshParams, tiles) - 0usize];
    ["Offset of field: GemmeshParams::flags"]
        [::core::mem::offset_of!(GemmeshParams, flags) - 8usize];
    ["Offset of field: GemmeshParams::sources"]
        [::core::mem::offset_of!(GemmeshParams, sources) - 16usize];
    ["Offset of field: GemmeshParams::abort"]
        [::core::mem::offset_of!(GemmeshParams, abort) - 24usize];
    ["Offset of field: GemmeshParams::fault"]
        [::core::mem::offset_of!(GemmeshParams, fault) - 32usize];
    ["Offset of field: GemmeshParams::trace"]
        [::core::mem::offset_of!(GemmeshParams, trace) - 40usize];
    ["Offset of field: GemmeshParams::slices"]
        [::core::mem::offset_of!(GemmeshParams, slices) - 48usize];
    ["Offset of field: GemmeshParams::partials"]
        [::core::mem::offset_of!(GemmeshParams, partials) - 56usize];
    ["Offset of field: GemmeshParams::arrived"]
        [::core::mem::offset_of!(GemmeshParams, arrived) - 64usize];
    ["Offset of field: GemmeshParams::deadline_ns"]
        [::core::mem::offset_of!(GemmeshParams, deadline_ns) - 72usize];
    ["Offset of field: GemmeshParams::tile_count"]
        [::core::mem::offset_of!(GemmeshParams, tile_count) - 80usize];
    ["Offset of field: GemmeshParams::epoch"]
        [::core::mem::offset_of!(GemmeshParams, epoch) - 84usize];
    ["Offset of field: GemmeshParams::m"][::core::mem::offset_of!(GemmeshParams, m) - 88usize];
    ["Offset of field: GemmeshParams::k"][::core::mem::offset_of!(GemmeshParams, k) - 92usize];
    ["Offset of field: GemmeshParams::deferred_flag"]
        [::core::mem::offset_of!(GemmeshParams, deferred_flag) - 96usize];
    ["Offset of field: GemmeshParams::deferred_step"]
        [::core::mem::offset_of!(GemmeshParams, deferred_step) - 100usize];
    ["Offset of field: GemmeshParams::activation"]
        [::core::mem::offset_of!(GemmeshParams, activation) - 104usize];
    ["Offset of field: GemmeshParams::is_gated"]
        [::core::mem::offset_of!(GemmeshParams, is_gated) - 108usize];
    ["Offset of field: GemmeshParams::is_f32"]
        [::core::mem::offset_of!(GemmeshParams, is_f32) - 112usize];
    ["Offset of field: GemmeshParams::stored_type"]
        [::core::mem::offset_of!(GemmeshParams, stored_type) - 116usize];
    ["Offset of field: GemmeshParams::b_is_kn"]
        [::core::mem::offset_of!(GemmeshParams, b_is_kn) - 120usize];
    ["Offset of field: GemmeshParams::recording"]
        [::core::mem::offset_of!(GemmeshParams, recording) - 124usize];
    ["Offset of field: GemmeshParams::tile_rows"]
        [::core::mem::offset_of!(GemmeshParams, tile_rows) - 128usize];
    ["Offset of field: GemmeshParams::row_flags"]
        [::core::mem::offset_of!(GemmeshParams, row_flags) - 132usize];
    ["Offset of field: GemmeshParams::is_fast"]
        [::core::mem::offset_of!(GemmeshParams, is_fast) - 136usize];
    ["Offset of field: GemmeshParams::constant_weights"]
        [::core::mem::offset_of!(GemmeshParams, constant_weights) - 140usize];
    ["Offset of field: GemmeshParams::outputs"]
        [::core::mem::offset_of!(GemmeshParams, outputs) - 144usize];
    ["Offset of field: GemmeshParams::scales"]
        [::core::mem::offset_of!(GemmeshParams, scales) - 496usize];
    ["Offset of field: GemmeshParams::peers"]
        [::core::mem::offset_of!(GemmeshParams, peers) - 520usize];
    ["Offset of field: GemmeshParams::low_latency"]
        [::core::mem::offset_of!(GemmeshParams, low_latency) - 2104usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshStore {
    pub map: u32,
    pub row: u32,
    pub to: u32,
    pub flag: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshStore"][::core::mem::size_of::<GemmeshStore>() - 16usize];
    ["Alignment of GemmeshStore"][::core::mem::align_of::<GemmeshStore>() - 4usize];
    ["Offset of field: GemmeshStore::map"][::core::mem::offset_of!(GemmeshStore, map) - 0usize];
    ["Offset of field: GemmeshStore::row"][::core::mem::offset_of!(GemmeshStore, row) - 4usize];
    ["Offset of field: GemmeshStore::to"][::core::mem::offset_of!(GemmeshStore, to) - 8usize];
    ["Offset of field: GemmeshStore::flag"][::core::mem::offset_of!(GemmeshStore, flag) - 12usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshBlock {
    pub row: u32,
    pub rows: u32,
    pub addend: u32,
    pub addend_step: u32,
    pub addends: u16,
    pub before: u16,
    pub store_begin: u32,
    pub stores: u16,
    pub sum: u16,
    pub reports: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshBlock"][::core::mem::size_of::<GemmeshBlock>() - 32usize];
    ["Alignment of GemmeshBlock"][::core::mem::align_of::<GemmeshBlock>() - 4usize];
    ["Offset of field: GemmeshBlock::row"][::core::mem::offset_of!(GemmeshBlock, row) - 0usize];
    ["Offset of field: GemmeshBlock::rows"][::core::mem::offset_of!(GemmeshBlock, rows) - 4usize];
    ["Offset of field: GemmeshBlock::addend"]
        [::core::mem::offset_of!(GemmeshBlock, addend) - 8usize];
    ["Offset of field: GemmeshBlock::addend_step"]
        [::core::mem::offset_of!(GemmeshBlock, addend_step) - 12usize];
    ["Offset of field: GemmeshBlock::addends"]
        [::core::mem::offset_of!(GemmeshBlock, addends) - 16usize];
    ["Offset of field: GemmeshBlock::before"]
        [::core::mem::offset_of!(GemmeshBlock, before) - 18usize];
    ["Offset of field: GemmeshBlock::store_begin"]
        [::core::mem::offset_of!(GemmeshBlock, store_begin) - 20usize];
    ["Offset of field: GemmeshBlock::stores"]
        [::core::mem::offset_of!(GemmeshBlock, stores) - 24usize];
    ["Offset of field: GemmeshBlock::sum"][::core::mem::offset_of!(GemmeshBlock, sum) - 26usize];
    ["Offset of field: GemmeshBlock::reports"]
        [::core::mem::offset_of!(GemmeshBlock, reports) - 28usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshSums {
    pub blocks: *const GemmeshBlock,
    pub stores: *const GemmeshStore,
    pub reports: *mut u32,
    pub stored: *mut u32,
    pub flag_begin: u32,
    pub flag_end: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshSums"][::core::mem::size_of::<GemmeshSums>() - 40usize];
    ["Alignment of GemmeshSums"][::core::mem::align_of::<GemmeshSums>() - 8usize];
    ["Offset of field: GemmeshSums::blocks"][::core::mem::offset_of!(GemmeshSums, blocks) - 0usize];
    ["Offset of field: GemmeshSums::stores"][::core::mem::offset_of!(GemmeshSums, stores) - 8usize];
    ["Offset of field: GemmeshSums::reports"]
        [::core::mem::offset_of!(GemmeshSums, reports) - 16usize];
    ["Offset of field: GemmeshSums::stored"]
        [::core::mem::offset_of!(GemmeshSums, stored) - 24usize];
    ["Offset of field: GemmeshSums::flag_begin"]
        [::core::mem::offset_of!(GemmeshSums, flag_begin) - 32usize];
    ["Offset of field: GemmeshSums::flag_end"]
        [::core::mem::offset_of!(GemmeshSums, flag_end) - 36usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshReduction {
    pub addends: [*const ::core::ffi::c_void; 64usize],
    pub addend_pitches: [u64; 64usize],
    pub bias: *const ::core::ffi::c_void,
    pub out: *mut ::core::ffi::c_void,
    pub out_pitch: u64,
    pub residual: *const ::core::ffi::c_void,
    pub residual_pitch: u64,
    pub count: u32,
    pub rows: u32,
    pub n: u32,
    pub activation: u32,
    pub stored_type: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshReduction"][::core::mem::size_of::<GemmeshReduction>() - 1088usize];
    ["Alignment of GemmeshReduction"][::core::mem::align_of::<GemmeshReduction>() - 8usize];
    ["Offset of field: GemmeshReduction::addends"]
        [::core::mem::offset_of!(GemmeshReduction, addends) - 0usize];
    ["Offset of field: GemmeshReduction::addend_pitches"]
        [::core::mem::offset_of!(GemmeshReduction, addend_pitches) - 512usize];
    ["Offset of field: GemmeshReduction::bias"]
        [::core::mem::offset_of!(GemmeshReduction, bias) - 1024usize];
    ["Offset of field: GemmeshReduction::out"]
        [::core::mem::offset_of!(GemmeshReduction, out) - 1032usize];
    ["Offset of field: GemmeshReduction::out_pitch"]
        [::core::mem::offset_of!(GemmeshReduction, out_pitch) - 1040usize];
    ["Offset of field: GemmeshReduction::residual"]
        [::core::mem::offset_of!(GemmeshReduction, residual) - 1048usize];
    ["Offset of field: GemmeshReduction::residual_pitch"]
        [::core::mem::offset_of!(GemmeshReduction, residual_pitch) - 1056usize];
    ["Offset of field: GemmeshReduction::count"]
        [::core::mem::offset_of!(GemmeshReduction, count) - 1064usize];
    ["Offset of field: GemmeshReduction::rows"]
        [::core::mem::offset_of!(GemmeshReduction, rows) - 1068usize];
    ["Offset of field: GemmeshReduction::n"]
        [::core::mem::offset_of!(GemmeshReduction, n) - 1072usize];
    ["Offset of field: GemmeshReduction::activation"]
        [::core::mem::offset_of!(GemmeshReduction, activation) - 1076usize];
    ["Offset of field: GemmeshReduction::stored_type"]
        [::core::mem::offset_of!(GemmeshReduction, stored_type) - 1080usize];
    ["Offset of field: GemmeshReduction::reserved"]
        [::core::mem::offset_of!(GemmeshReduction, reserved) - 1084usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshQuantization {
    pub from: *const ::core::ffi::c_void,
    pub from_pitch: u64,
    pub to: *mut ::core::ffi::c_void,
    pub to_pitch: u64,
    pub scales: GemmeshOutputScales,
    pub rows: u32,
    pub columns: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshQuantization"][::core::mem::size_of::<GemmeshQuantization>() - 64usize];
    ["Alignment of GemmeshQuantization"][::core::mem::align_of::<GemmeshQuantization>() - 8usize];
    ["Offset of field: GemmeshQuantization::from"]
        [::core::mem::offset_of!(GemmeshQuantization, from) - 0usize];
    ["Offset of field: GemmeshQuantization::from_pitch"]
        [::core::mem::offset_of!(GemmeshQuantization, from_pitch) - 8usize];
    ["Offset of field: GemmeshQuantization::to"]
        [::core::mem::offset_of!(GemmeshQuantization, to) - 16usize];
    ["Offset of field: GemmeshQuantization::to_pitch"]
        [::core::mem::offset_of!(GemmeshQuantization, to_pitch) - 24usize];
    ["Offset of field: GemmeshQuantization::scales"]
        [::core::mem::offset_of!(GemmeshQuantization, scales) - 32usize];
    ["Offset of field: GemmeshQuantization::rows"]
        [::core::mem::offset_of!(GemmeshQuantization, rows) - 56usize];
    ["Offset of field: GemmeshQuantization::columns"]
        [::core::mem::offset_of!(GemmeshQuantization, columns) - 60usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct GemmeshAlignment {
    pub words: [*mut u32; 64usize],
    pub abort: *const u32,
    pub deadline_ns: u64,
    pub count: u32,
    pub rank: u32,
    pub world: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of GemmeshAlignment"][::core::mem::size_of::<GemmeshAlignment>() - 544usize];
    ["Alignment of GemmeshAlignment"][::core::mem::align_of::<GemmeshAlignment>() - 8usize];
    ["Offset of field: GemmeshAlignment::words"]
        [::core::mem::offset_of!(GemmeshAlignment, words) - 0usize];
    ["Offset of field: GemmeshAlignment::abort"]
        [::core::mem::offset_of!(GemmeshAlignment, abort) - 512usize];
    ["Offset of field: GemmeshAlignment::deadline_ns"]
        [::core::mem::offset_of!(GemmeshAlignment, deadline_ns) - 520usize];
    ["Offset of field: GemmeshAlignment::count"]
        [::core::mem::offset_of!(GemmeshAlignment, count) - 528usize];
    ["Offset of field: GemmeshAlignment::rank"]
        [::core::mem::offset_of!(GemmeshAlignment, rank) - 532usize];
    ["Offset of field: GemmeshAlignment::world"]
        [::core::mem::offset_of!(GemmeshAlignment, world) - 536usize];
    ["Offset of field: GemmeshAlignment::reserved"]
        [::core::mem::offset_of!(GemmeshAlignment, reserved) - 540usize];
};
