//! The arguments of the last call of a kernel, which are kept while the matrices stay where they are.

use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::cuda::family::launch::{KernelArguments, Matrices};
use crate::backend::cuda::gpu::kernels::Instance;
use crate::error::Result;

/// They are thousands of bytes, so they are shared and not copied.
#[derive(Debug, Default)]
pub struct LastArguments(Mutex<Option<ArgumentsOfMatrices>>);

#[derive(Debug)]
struct ArgumentsOfMatrices {
    matrices: Box<Matrices>,
    arguments: Arc<dyn KernelArguments>,
}

impl LastArguments {
    /// The arguments for these matrices.
    pub fn get(
        &self,
        rank: usize,
        instance: &Instance,
        matrices: Matrices,
    ) -> Result<Arc<dyn KernelArguments>> {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = &*last
            && *last.matrices == matrices
        {
            return Ok(last.arguments.clone());
        }
        let Instance {
            family,
            dtypes,
            shape,
            ..
        } = instance;
        let arguments = family.arguments(rank, dtypes[0], shape, &matrices)?;
        *last = Some(ArgumentsOfMatrices {
            matrices: Box::new(matrices),
            arguments: Arc::clone(&arguments),
        });
        Ok(arguments)
    }
}
