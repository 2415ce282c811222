//! Symmetric matrices that a model's layers share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gemmesh::{Backend, F8E4M3, ShardedMatrix, bf16, f16};

/// The pool of each type.
pub struct Pools<B: Backend> {
    pub bf16: Pool<B, bf16>,
    pub f16: Pool<B, f16>,
    pub f8e4m3: Pool<B, F8E4M3>,
    /// Scales.
    pub f32: Pool<B, f32>,
}

/// Symmetric matrices by their number of columns.
pub type Pool<B, T> = Mutex<HashMap<usize, Symmetric<B, T>>>;

/// A symmetric matrix with a row for each token of the capacity.
pub type Symmetric<B, T> = Arc<Mutex<ShardedMatrix<B, T>>>;

/// A panic while it was held has not left it half-changed: each change is one call.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
