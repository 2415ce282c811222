//! Ranges that name a thread's work for NVIDIA's profilers (feature `nvtx`). Without the feature they do nothing.

/// A range, which ends when it is dropped, on the thread that began it.
#[must_use]
pub struct Range {
    #[cfg(feature = "nvtx")]
    _range: nvtx::LocalRange,
}

/// Begins a range. It has no domain of its own, because NVTX keeps each name of a domain for ever, and most of these
/// names are used once.
#[cfg(feature = "nvtx")]
pub fn range(name: impl FnOnce() -> String) -> Range {
    // Names hold no NUL.
    let name = std::ffi::CString::new(name()).unwrap_or_default();
    Range {
        _range: nvtx::LocalRange::new(name),
    }
}

/// Does nothing.
#[cfg(not(feature = "nvtx"))]
#[inline(always)]
pub fn range(_: impl FnOnce() -> String) -> Range {
    Range {}
}

#[cfg(test)]
mod tests {
    use super::range;
    use crate::element::DType;
    use crate::schedule::plan::plan;
    use crate::schedule::{Chunking, Config, Layout, Operation, Problem, Route, TileShape};

    fn problem(operation: Operation) -> Problem {
        let layout = Layout::new(&[5, 3], 16).unwrap();
        Problem::new(operation, DType::Bf16, layout, 12)
    }

    const CONFIG: Config = Config::new(TileShape::new(4, 8, 8), Chunking::new(1), Route::Pull);

    #[test]
    fn operations_are_named_by_what_they_multiply() {
        let name = |operation, rank, config| {
            let schedule = plan(&problem(operation), rank, config).unwrap();
            schedule.name()
        };
        let product = name(Operation::ALL_GATHER_MATMUL, 1, CONFIG);
        assert_eq!(product, "all_gather_matmul 8x12x16 bf16");
        let alone = name(Operation::MULTIPLY, 0, CONFIG);
        assert_eq!(alone, "matmul 8x12x16 bf16");
        let pushed = CONFIG.with_route(Route::Push);
        let sums = name(Operation::MATMUL_REDUCE_SCATTER, 0, pushed);
        assert_eq!(sums, "matmul_reduce_scatter 8x12x16 bf16");
        let gather = name(Operation::ALL_GATHER, 0, CONFIG);
        let named = "all_gather M = 8, K = 16, bf16, rows of each rank = [5, 3]";
        assert_eq!(gather, named);
    }

    #[test]
    fn transfers_are_named_by_who_moves_what() {
        let moves = |route| {
            let config = CONFIG.with_route(route);
            let plan = plan(&problem(Operation::ALL_GATHER_MATMUL), 1, config).unwrap();
            plan.moves().map(|moved| moved.name()).collect::<Vec<_>>()
        };
        assert_eq!(moves(Route::Pull), ["pull rows 0..5 from rank 0"]);
        assert_eq!(moves(Route::Push), ["push rows 5..8 to rank 0"]);
        assert!(
            moves(Route::Store)
                .iter()
                .all(|name| name.starts_with("store rows "))
        );
    }

    #[test]
    fn ranges_nest_and_end() {
        let outer = range(|| "outer".into());
        drop(range(|| "with a \0 in it".into()));
        drop(outer);
    }
}
