//! A product whose blocks go to several places, with partials that are added: what its kernel is told of them.

use std::ops::Range;

use super::abi::{GEMMESH_PRODUCT, GEMMESH_STORE_ROWS, GemmeshBlock};
use super::kernel::storing_warps;
use crate::error::Result;
use crate::schedule::layout::limit;
use crate::schedule::partials::STORED_ROWS;
use crate::schedule::{Addend, Block, Product, Route, Schedule};

/// Where the rows of all blocks go: what is added up to one matrix, what others are sent to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Places {
    /// The number of the matrix of sums, and its rows that are written.
    pub out: Option<(usize, Range<usize>)>,
    /// The number of the matrix of partials: those that are stored, and those that are added.
    pub partials: Option<usize>,
    /// What is added to every sum.
    pub bias: Option<usize>,
}

impl Places {
    /// Of a product that has such blocks; none if all its rows go to one place as they are, and nobody waits for them.
    pub fn of(schedule: &Schedule) -> Option<Places> {
        let product = schedule.product()?;
        let adds = |block: &Block| !block.sum.addends.is_empty();
        let is_sent = schedule.moves().any(|moved| moved.produced.is_some());
        if !is_sent && !product.blocks.iter().any(adds) {
            return None;
        }
        let mut places = Places {
            out: None,
            partials: None,
            bias: None,
        };
        for Block { rows, sum } in &product.blocks {
            if sum.addends.is_empty() {
                places.partials = Some(sum.out);
                continue;
            }
            let end = sum.first + rows.len();
            let (_, written) = places.out.get_or_insert((sum.out, sum.first..end));
            *written = written.start.min(sum.first)..written.end.max(end);
            places.bias = sum.bias;
            for addend in &sum.addends {
                if let Addend::Rows { matrix, .. } = *addend {
                    places.partials = Some(matrix);
                }
            }
        }
        Some(places)
    }

    /// Refuses what the kernel has no room for.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit): no operation needs it.
    pub fn check(&self, schedule: &Schedule, product: &Product) -> Result<()> {
        let others = |what: &str, count: usize| limit(what, count, 0, 0);
        let Places {
            out,
            partials,
            bias,
        } = self;
        let out = out.as_ref().map(|(number, _)| *number);
        for Block { rows, sum } in &product.blocks {
            limit("rows of a block on GPUs", rows.len(), 1, product.m)?;
            let (matrix, bias) = match sum.addends.is_empty() {
                true => (*partials, None),
                false => (out, *bias),
            };
            let elsewhere = usize::from(matrix != Some(sum.out));
            others("other matrices that a kernel stores to", elsewhere)?;
            others("other biases", usize::from(bias != sum.bias))?;
            for addend in &sum.addends {
                if let Addend::Rows { matrix, .. } = *addend {
                    let elsewhere = usize::from(*partials != Some(matrix));
                    others("other matrices that a kernel adds", elsewhere)?;
                }
            }
        }
        // The copy stream takes the word of a block back when it turns to the next.
        let mut blocks: Vec<_> = schedule.moves().map(|moved| moved.produced).collect();
        blocks.dedup();
        let turns = blocks.len();
        blocks.sort_unstable();
        blocks.dedup();
        others(
            "transfers of a block apart from one another",
            turns - blocks.len(),
        )?;
        for moved in schedule.moves() {
            others("flags to wait for on GPUs", moved.after.len())?;
            let early = moved.route != Route::Push || moved.produced.is_none();
            others(
                "transfers that do not wait for a block on GPUs",
                early.into(),
            )?;
        }
        Ok(())
    }
}

/// The kernel's tables: blocks, and what is added to them.
pub fn tables(schedule: &Schedule, places: &Places) -> (Vec<GemmeshBlock>, Vec<u32>) {
    let Some(product) = schedule.product() else {
        return (Vec::new(), Vec::new());
    };
    let mut tiles = vec![0u32; product.blocks.len()];
    for tile in schedule.tiles() {
        tiles[tile.block as usize] += 1;
    }
    let mut is_sent = vec![false; product.blocks.len()];
    for block in schedule.moves().filter_map(|moved| moved.produced) {
        is_sent[block] = true;
    }
    let first = places.out.as_ref().map_or(0, |(_, rows)| rows.start);
    let mut addends = Vec::new();
    let blocks = product.blocks.iter().enumerate();
    let blocks = blocks.map(|(number, Block { rows, sum })| {
        let begin = addends.len() as u32;
        addends.extend(sum.addends.iter().map(|addend| match *addend {
            Addend::Product => GEMMESH_PRODUCT,
            Addend::Rows { first, .. } => first as u32,
        }));
        let out = match sum.addends.is_empty() {
            true => sum.first,
            false => sum.first - first,
        };
        GemmeshBlock {
            row: rows.start as u32,
            rows: rows.len() as u32,
            out: out as u32,
            addend_begin: begin,
            addend_end: addends.len() as u32,
            reports: match is_sent[number] {
                true => tiles[number] * storing_warps(&product.config),
                false => 0,
            },
            reserved: [0; 2],
        }
    });
    (blocks.collect(), addends)
}

const _: () = assert!(STORED_ROWS == GEMMESH_STORE_ROWS as usize);

// SAFETY: plain words without padding, for which any bits are valid.
unsafe impl bytemuck::Zeroable for GemmeshBlock {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for GemmeshBlock {}
