//! Numbers from seeds, and products in float64 that results are compared with.

use gemmesh::bf16;

/// Uniform in `-scale..scale`.
pub fn random(seed: u64, count: usize, scale: f32) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values = (0..count).map(|_| bf16::from_f32(next() * scale));
    values.collect()
}

/// `a · bᵀ`, over `k`.
pub fn product(a: &[f64], b: &[f64], k: usize) -> Vec<f64> {
    let dot = |x: &[f64], y: &[f64]| x.iter().zip(y).map(|(x, y)| x * y).sum();
    let rows = a.chunks_exact(k);
    rows.flat_map(|row| b.chunks_exact(k).map(move |column| dot(row, column)))
        .collect()
}

pub fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}
