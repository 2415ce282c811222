//! Random weights that any rank can make its part of: a row depends on the weight's name and the row's number alone.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use gemmesh::bf16;

/// What a weight is of.
#[derive(Clone, Copy)]
pub enum Name {
    Embedding,
    Head,
    FinalNorm,
    Norm(usize, usize),
    Query(usize),
    Key(usize),
    Value(usize),
    Output(usize),
    Gate(usize),
    Up(usize),
    Down(usize),
}

impl Name {
    fn seed(self) -> u64 {
        let (kind, layer) = match self {
            Name::Embedding => (0, 0),
            Name::Head => (1, 0),
            Name::FinalNorm => (2, 0),
            Name::Norm(layer, number) => (3 + number, layer),
            Name::Query(layer) => (5, layer),
            Name::Key(layer) => (6, layer),
            Name::Value(layer) => (7, layer),
            Name::Output(layer) => (8, layer),
            Name::Gate(layer) => (9, layer),
            Name::Up(layer) => (10, layer),
            Name::Down(layer) => (11, layer),
        };
        (kind as u64) << 32 | layer as u64
    }
}

/// Some rows and columns of a weight of so many columns, [rows, columns] in bf16: uniform, so that their mean square is
/// `scale`².
pub fn part(
    name: Name,
    rows: Range<usize>,
    columns: Range<usize>,
    all_columns: usize,
    scale: f64,
    device: &Device,
) -> Result<Tensor> {
    let width = columns.len();
    let mut values = vec![bf16::ZERO; rows.len() * width];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let each = rows.len().div_ceil(threads).max(1);
    std::thread::scope(|scope| {
        for (number, block) in values.chunks_mut(each * width).enumerate() {
            let (first, columns) = (rows.start + number * each, columns.clone());
            scope.spawn(move || {
                for (row, values) in block.chunks_mut(width).enumerate() {
                    let whole = random(name.seed(), first + row, all_columns, scale);
                    let some = whole.skip(columns.start);
                    values
                        .iter_mut()
                        .zip(some)
                        .for_each(|(to, from)| *to = from);
                }
            });
        }
    });
    Tensor::from_vec(values, (rows.len(), width), device)
}

/// Around 1, [size].
pub fn norm(name: Name, size: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let around = part(name, 0..1, 0..size, size, 0.25, device)?.squeeze(0)?;
    (around.to_dtype(DType::F32)? + 1.0)?
        .to_dtype(DType::BF16)?
        .to_dtype(dtype)
}

/// The elements of a row.
fn random(seed: u64, row: usize, count: usize, scale: f64) -> impl Iterator<Item = bf16> {
    let mut state = scatter(scatter(seed) ^ row as u64);
    let step = scale as f32 * 3f32.sqrt() / (1 << 15) as f32;
    let four = move |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = scatter(state);
        (0..4).map(move |part| bf16::from_f32((bits >> (16 * part)) as u16 as i16 as f32 * step))
    };
    (0..count.div_ceil(4)).flat_map(four).take(count)
}

/// SplitMix64's finaliser.
fn scatter(seed: u64) -> u64 {
    let x = (seed ^ seed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}
