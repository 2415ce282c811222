//! Operations that call a function of the program, chunk by chunk or block by block.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_void};

use gemmesh::pipelines::{
    AllGatherAndConsume, CallbackResult, ProduceAndAllToAll, ProduceAndReduceScatter,
};
use gemmesh::raw::{AnyRows, RowsFor};

use crate::calls::{Call, guarded, in_group};
use crate::convert::{by_pair, by_rank, described, memory, words};
use crate::failure::{Failure, Result};
use crate::group::gemmesh_group;
use crate::sharded::{gemmesh_sharded, shards};
use crate::status::gemmesh_status;
use crate::types::*;

thread_local! {
    /// What the callback that runs on this thread says of its failure.
    static REASON: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Says why the callback that runs on this thread is about to return an error. The words are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_set_reason(reason: *const c_char) -> gemmesh_status {
    guarded("gemmesh_set_reason", || {
        // SAFETY: as the crate says.
        let reason = unsafe { words("reason", reason)? };
        REASON.replace(Some(reason.into()));
        Ok(())
    })
}

/// The result of a callback that has returned this number.
pub(crate) fn outcome(returned: c_int) -> CallbackResult {
    let reason = REASON.take();
    match returned {
        0 => Ok(()),
        code => Err(reason
            .unwrap_or_else(|| format!("it returned {code}"))
            .into()),
    }
}

/// A function of C, and what it is called with.
struct Callback {
    function: unsafe extern "C" fn(*const gemmesh_rows, *mut c_void) -> c_int,
    context: *mut c_void,
}

impl Callback {
    fn new(argument: &str, function: gemmesh_on_rows, context: *mut c_void) -> Result<Callback> {
        Ok(Callback {
            function: function.ok_or_else(|| Failure::null(argument))?,
            context,
        })
    }

    fn call(&self, rows: gemmesh_rows) -> CallbackResult {
        // SAFETY: a function of the caller, which gets what the header says.
        outcome(unsafe { (self.function)(&rows, self.context) })
    }

    fn consume(&self, chunk: AnyRows) -> CallbackResult {
        self.call(gemmesh_rows {
            rows: chunk.rows.into(),
            rank: chunk.source,
            memory: described(chunk.memory),
            stream: chunk.stream as *mut c_void,
        })
    }

    fn produce(&self, block: RowsFor) -> CallbackResult {
        self.call(gemmesh_rows {
            rows: block.rows.into(),
            rank: block.owner,
            memory: described(block.memory),
            stream: block.stream as *mut c_void,
        })
    }
}

/// Gathers the rows of `a`, and calls `consume` for each chunk of rows that arrives, first for this rank's own. On the
/// host the rows have arrived when it is called. On GPUs it puts its work on the chunk's stream.
///
/// Each other rank's rows are cut into `chunks` chunks, from 1 to 64, and gathered in `stages` stages. 0: the default.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_all_gather_and_consume(
    group: *const gemmesh_group,
    a: *const gemmesh_sharded,
    chunks: usize,
    stages: usize,
    consume: gemmesh_on_rows,
    context: *mut c_void,
) -> gemmesh_status {
    in_group(
        "gemmesh_all_gather_and_consume",
        Call::Collective,
        group,
        |group| {
            let callback = Callback::new("consume", consume, context)?;
            let mut options = AllGatherAndConsume::new();
            if chunks != 0 {
                options = options.chunks(chunks);
            }
            if stages != 0 {
                options = options.stages(stages);
            }
            let a = shards("a", a)?;
            Ok(group.all_gather_and_consume(options, &a, &mut |rows| callback.consume(rows))?)
        },
    )
}

/// Adds the rows [m, N] that `produce` makes on all ranks. Each rank gets its rows of the sum in `out`. `produce` is
/// called block by block, last for this rank's own rows, and a block is sent while the next is made. On the host it
/// writes the block's memory before it returns. On GPUs it puts its work on the block's stream.
///
/// `rows` is NULL if the rows are split evenly, or says how many each rank gets, `row_count` numbers, m in all. The
/// rows of each other rank are made in at most `chunks` blocks, from 1 to 64, the same on every rank. 0: the default.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_produce_and_reduce_scatter(
    group: *const gemmesh_group,
    m: usize,
    rows: *const usize,
    row_count: usize,
    out: *const gemmesh_memory,
    chunks: usize,
    produce: gemmesh_on_rows,
    context: *mut c_void,
) -> gemmesh_status {
    const CALL: &str = "gemmesh_produce_and_reduce_scatter";
    in_group(CALL, Call::Collective, group, |group| {
        let callback = Callback::new("produce", produce, context)?;
        let mut options = ProduceAndReduceScatter::new();
        if chunks != 0 {
            options = options.chunks(chunks);
        }
        if !rows.is_null() {
            // SAFETY: as the crate says.
            options =
                options.rows(unsafe { by_rank("rows", rows, row_count, group.world_size())? });
        }
        let mut produce = |rows: RowsFor| callback.produce(rows);
        // SAFETY: as the crate and the header's gemmesh_memory say.
        unsafe {
            Ok(group.produce_and_reduce_scatter(options, m, memory("out", out)?, &mut produce)?)
        }
    })
}

/// Sends the rows that `produce` makes for each rank to that rank. Block s of `out` gets what rank s has made for this
/// rank. `counts` is as of gemmesh_all_to_all, and `produce` is called as by gemmesh_produce_and_reduce_scatter.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gemmesh_produce_and_all_to_all(
    group: *const gemmesh_group,
    out: *const gemmesh_sharded,
    counts: *const usize,
    pair_count: usize,
    chunks: usize,
    produce: gemmesh_on_rows,
    context: *mut c_void,
) -> gemmesh_status {
    const CALL: &str = "gemmesh_produce_and_all_to_all";
    in_group(CALL, Call::Collective, group, |group| {
        let callback = Callback::new("produce", produce, context)?;
        let mut options = ProduceAndAllToAll::new();
        if chunks != 0 {
            options = options.chunks(chunks);
        }
        // SAFETY: as the crate says.
        if let Some(counts) = unsafe { by_pair(counts, pair_count)? } {
            options = options.counts(counts);
        }
        let out = shards("out", out)?;
        Ok(group.produce_and_all_to_all(options, &out, &mut |rows| callback.produce(rows))?)
    })
}
