//! What a layer can't take is refused with gemmesh's errors, on every rank.

mod support;

use std::fmt::Write;

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Module, Storage, Tensor};
use gemmesh::bf16;
use gemmesh::error::Kind;
use gemmesh_candle::{
    ColumnParallelLinear, GatedParallelLinear, Group, Host, QkvParallelLinear, RowParallelLinear,
    TensorParallel, gemmesh_error,
};

use support::sentence;

type Result<T, E = candle_core::Error> = std::result::Result<T, E>;
type Failure = Box<dyn std::error::Error + Send + Sync>;

const TOKENS: usize = 6;
const N: usize = 16;
const K: usize = 8;

#[test]
fn errors_print_a_sentence_at_once_and_a_rank_and_its_layers_a_line() -> Result<(), Failure> {
    /// The texts that are written.
    struct Texts(Vec<String>);

    impl std::fmt::Write for Texts {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            self.0.push(text.into());
            Ok(())
        }
    }

    one(|ranks| {
        let weight = Tensor::ones((N, K), DType::F64, &Device::Cpu)?;
        let error = ColumnParallelLinear::new(ranks, weight, None).unwrap_err();
        let place = format!("{}:{}", file!(), line!() - 1);
        let said = format!(
            "rank 0: a parallel layer at {place}: the dtype of weight is F64 and must be BF16, F16 or F8E4M3"
        );
        let mut texts = Texts(Vec::new());
        write!(texts, "{error:?}")?;
        assert!(texts.0.contains(&said), "{:?}", texts.0);

        let bias = Tensor::zeros(N, DType::BF16, &Device::Cpu)?;
        let column = ColumnParallelLinear::new(ranks, ones(N, K)?, Some(bias))?;
        let qkv = QkvParallelLinear::new(ranks, [ones(N, K)?, ones(K, K)?, ones(K, K)?], None)?;
        let gated = GatedParallelLinear::new(ranks, [ones(N, K)?, ones(N, K)?], None)?;
        let row = RowParallelLinear::new(ranks, ones(N, K)?, None)?;
        let lines = [
            (
                format!("{ranks:?}"),
                "TensorParallel { rank: 0, world_size: 1, capacity: 6 }",
            ),
            (
                format!("{column:?}"),
                "ColumnParallelLinear(Parameters { weights: [[16, 8]], bias: Some([1, 16]) })",
            ),
            (
                format!("{qkv:?}"),
                "QkvParallelLinear(Parameters { weights: [[16, 8], [8, 8], [8, 8]], bias: None })",
            ),
            (
                format!("{gated:?}"),
                "GatedParallelLinear(Parameters { weights: [[16, 8], [16, 8]], bias: None })",
            ),
            (
                format!("{row:?}"),
                "RowParallelLinear(Parameters { weights: [[16, 8]], bias: None })",
            ),
        ];
        for (found, line) in lines {
            assert_eq!(found, line);
        }
        Ok(())
    })
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_device_that_is_not_the_groups() -> Result<(), Failure> {
    Group::<Host>::threads(1, |group| {
        let error = TensorParallel::new(group, &Device::Cuda(candle_core::CudaDevice), TOKENS);
        assert_says(
            error.unwrap_err(),
            "rank 0: TensorParallel::new: the device of the tensors is CUDA and must be the CPU, as the group's \
             backend is Host",
        );
        Ok(())
    })
    .map(drop)
}

#[test]
fn a_dtype_that_there_are_no_products_of() -> Result<(), Failure> {
    one(|ranks| {
        let weight = Tensor::ones((N, K), DType::F64, &Device::Cpu)?;
        let said =
            "rank 0: a parallel layer: the dtype of weight is F64 and must be BF16, F16 or F8E4M3";
        assert_says(
            ColumnParallelLinear::new(ranks, weight.clone(), None).unwrap_err(),
            said,
        );
        assert_says(
            RowParallelLinear::new(ranks, weight, None).unwrap_err(),
            said,
        );
        let x = Tensor::ones((TOKENS, K), DType::F32, &Device::Cpu)?;
        let said = "rank 0: a collective: the dtype of x is F32 and must be BF16 or F16";
        assert_says(ranks.all_gather(&x).unwrap_err(), said);
        Ok(())
    })
}

#[test]
fn tensors_of_another_dtype_than_the_weights() -> Result<(), Failure> {
    one(|ranks| {
        let half = |rows, columns| Tensor::ones((rows, columns), DType::F16, &Device::Cpu);
        let said = "a parallel layer: the dtype of weight [N, K] is F16 and must be BF16, as of the weight";
        let mixed = GatedParallelLinear::new(ranks, [ones(N, K)?, half(N, K)?], None);
        assert_says(mixed.unwrap_err(), said);
        let bias = Tensor::ones(N, DType::F32, &Device::Cpu)?;
        let biased = ColumnParallelLinear::new(ranks, ones(N, K)?, Some(bias));
        assert_says(
            biased.unwrap_err(),
            "a parallel layer: the dtype of bias [N] is F32 and must be BF16, as of the weight",
        );
        let layer = ColumnParallelLinear::new(ranks, ones(N, K)?, None)?;
        assert_says(
            layer.forward(&half(TOKENS, K)?).unwrap_err(),
            "all_gather_matmul: the dtype of x [tokens of this rank, K] is F16 and must be BF16, as of the weight",
        );
        let layer = RowParallelLinear::new(ranks, ones(N, K)?, None)?;
        assert_says(
            layer
                .forward_residual(&ones(TOKENS, K)?, &half(TOKENS, N)?)
                .unwrap_err(),
            "matmul_reduce_scatter: the dtype of residual [tokens of this rank, N] is F16 and must be BF16, as of \
             the weight",
        );
        Ok(())
    })
}

#[test]
fn rows_that_do_not_lie_one_after_the_other() -> Result<(), Failure> {
    one(|ranks| {
        let said = "[8, 1], or [more, 1], in elements; Tensor::contiguous makes a copy that is";
        let transposed = ones(K, N)?.t()?;
        assert_says(
            ColumnParallelLinear::new(ranks, transposed, None).unwrap_err(),
            said,
        );
        let column = ColumnParallelLinear::new(ranks, ones(N, K)?, None)?;
        let row = RowParallelLinear::new(ranks, ones(N, K)?, None)?;
        let transposed = ones(K, TOKENS)?.t()?;
        let repeated = ones(1, K)?.broadcast_as((TOKENS, K))?;
        for x in [transposed, repeated] {
            assert_says(column.forward(&x).unwrap_err(), said);
            assert_says(column.forward_replicated(&x).unwrap_err(), said);
            assert_says(row.forward(&x).unwrap_err(), said);
            assert_says(row.forward_replicated(&x, None).unwrap_err(), said);
            assert_says(ranks.all_gather(&x).unwrap_err(), said);
            column.forward(&x.contiguous()?)?;
        }
        Ok(())
    })
}

#[test]
fn shapes_that_do_not_fit() -> Result<(), Failure> {
    one(|ranks| {
        let column = ColumnParallelLinear::new(ranks, ones(N, K)?, None)?;
        for x in [
            ones(TOKENS, N)?,
            ones(TOKENS - 1, K)?,
            ones(1, K)?.squeeze(0)?,
            ones(2 * TOKENS, K)?.reshape((2, TOKENS, K))?,
        ] {
            let said = format!(
                "all_gather_matmul: x [tokens of this rank, K] is {:?} and must be [6, 8]",
                x.dims()
            );
            assert_says(column.forward(&x).unwrap_err(), &said);
        }
        let row = RowParallelLinear::new(ranks, ones(N, K)?, None)?;
        let residual = ones(TOKENS, K)?;
        assert_says(
            row.forward_residual(&ones(TOKENS, K)?, &residual)
                .unwrap_err(),
            "matmul_reduce_scatter: residual [tokens of this rank, N] is [6, 8] and must be [6, 16]",
        );
        let weights = [ones(N, K)?, ones(N, N)?, ones(N, K)?];
        assert_says(
            QkvParallelLinear::new(ranks, weights, None).unwrap_err(),
            "a parallel layer: weight [N, K] is [16, 16] and must be [16, 8]",
        );
        let flat = ones(1, K)?.squeeze(0)?;
        assert_says(
            RowParallelLinear::new(ranks, flat, None).unwrap_err(),
            "a parallel layer: the number of dimensions of a weight [N, K] is 1 and must be 2",
        );
        assert_says(
            ranks.set_tokens(7).unwrap_err(),
            "TensorParallel::set_tokens: the number of tokens is 7; it must be from 0 to 6",
        );
        Ok(())
    })
}

#[test]
fn the_place_of_a_call_is_the_programs_line_or_none_behind_a_trait_object() -> Result<(), Failure> {
    one(|ranks| {
        let column = ColumnParallelLinear::new(ranks, ones(N, K)?, None)?;
        let x = ones(TOKENS - 1, K)?;
        let refused = |made: Result<Tensor>, line: Option<u32>| {
            let error = made.unwrap_err();
            let error = gemmesh_error(&error).expect("an error of gemmesh's");
            let place = error.call().expect("an argument is wrong").place();
            let line = line.map(|line| format!("{}:{line}", file!()));
            assert_eq!(place, line.as_deref(), "{error}");
        };
        refused(column.forward(&x), Some(line!()));
        refused(ranks.all_gather(&x), Some(line!()));
        let any: &dyn Module = &column;
        refused(any.forward(&x), None);
        Ok(())
    })
}

#[test]
fn a_weight_that_ranks_cannot_share_evenly() -> Result<(), Failure> {
    Group::<Host>::threads(3, |group| {
        let ranks = TensorParallel::new(group, &Device::Cpu, TOKENS)?;
        let error = ColumnParallelLinear::from_whole(&ranks, &ones(N, K)?, None).unwrap_err();
        assert_says(
            error,
            "dimension 0 of a weight that 3 ranks share evenly is [16] and must be [18]",
        );
        Ok::<_, Failure>(())
    })
    .map(drop)
}

#[test]
fn heads_that_ranks_cannot_share_whole() -> Result<(), Failure> {
    const HEAD: usize = 8;
    Group::<Host>::threads(4, |group| {
        let ranks = TensorParallel::new(group, &Device::Cpu, TOKENS)?;
        let refused = |[heads, kv_heads]: [usize; 2], rows: [usize; 2], said: &str| {
            let [q, kv] = rows.map(|rows| ones(rows, K));
            let (q, kv) = (q?, kv?);
            let heads = [heads, kv_heads];
            let made = QkvParallelLinear::from_whole(&ranks, heads, [&q, &kv, &kv], None);
            assert_says(made.unwrap_err(), said);
            Ok::<_, Failure>(())
        };
        let rows = |heads: usize, kv_heads: usize| [heads * HEAD, kv_heads * HEAD];
        refused(
            [6, 2],
            rows(6, 2),
            "query heads that 4 ranks share evenly is [6] and must be [8]",
        )?;
        for kv_heads in [3, 6] {
            let said = format!(
                "heads of keys and values that 4 ranks share evenly, or of which as many ranks have each is \
                 [{kv_heads}]"
            );
            refused([12, kv_heads], rows(12, kv_heads), &said)?;
        }
        refused([8, 0], rows(8, 1), "heads of keys and values that 4 ranks share")?;
        let said = "query heads that 8 heads of keys and values share evenly is [4] and must be [8]";
        refused([4, 8], rows(4, 8), said)?;
        let said = "dimension 0 of a weight of 2 heads is [17] and must be [18]";
        refused([8, 2], [64, 17], said)
    })
    .map(drop)
}

#[test]
fn ranks_that_wait_for_a_refused_call_get_its_error() -> Result<(), Failure> {
    Group::<Host>::threads(2, |group| {
        let rank = group.rank();
        let ranks = TensorParallel::new(group, &Device::Cpu, TOKENS)?;
        let layer = ColumnParallelLinear::new(&ranks, ones(N, K)?, None)?;
        // Rank 1 has another number of tokens than it should, and does not try again while the other waits.
        let rows = if rank == 1 { 2 } else { TOKENS / 2 };
        let begin = std::time::Instant::now();
        let error = layer.forward(&ones(rows, K)?).unwrap_err();
        let own = gemmesh_error(&error)
            .expect("an error of gemmesh's")
            .cause()
            .clone();
        assert!(
            matches!((own.rank(), own.kind()), (Some(1), Kind::Shape { found, .. }) if found == &[2, 8]),
            "{own}"
        );
        assert!(begin.elapsed().as_secs() < 20, "waited for the deadline");
        if rank == 1 {
            std::thread::sleep(std::time::Duration::from_secs(2));
        }
        Ok::<_, Failure>(())
    })
    .map(drop)
}

/// Makes a layer of a whole weight, whose rows and columns ranks share.
type Make = fn(&TensorParallel, &Tensor) -> Result<()>;

const MAKE: [Make; 4] = [
    |ranks, whole| ColumnParallelLinear::from_whole(ranks, whole, None).map(drop),
    |ranks, whole| RowParallelLinear::from_whole(ranks, &whole.t()?, None).map(drop),
    |ranks, whole| GatedParallelLinear::from_whole(ranks, [whole; 2], None).map(drop),
    |ranks, whole| QkvParallelLinear::from_whole(ranks, [2, 2], [whole; 3], None).map(drop),
];

#[test]
fn ranks_that_make_a_layer_hear_of_one_that_cannot_share_its_weight() {
    std::thread::scope(|scope| {
        for make in MAKE {
            scope.spawn(move || {
                let both = std::sync::Barrier::new(2);
                let ranks = Group::<Host>::builder().timeout(std::time::Duration::from_secs(20));
                let told = ranks.threads(2, |group| {
                    let rank = group.rank();
                    let ranks = TensorParallel::new(group, &Device::Cpu, TOKENS)?;
                    // Rank 1 alone has read another weight. It lives, and does not try again.
                    let made = make(&ranks, &ones(N + rank, K)?);
                    both.wait();
                    let error = made.unwrap_err();
                    let error = gemmesh_error(&error).expect("an error of gemmesh's");
                    assert!(
                        matches!((error.rank(), error.kind()), (Some(1), Kind::Shape { found, .. }) if found == &[N + 1]),
                        "rank {rank}: {error}"
                    );
                    Ok::<_, Failure>(())
                });
                told.unwrap();
            });
        }
    });
}

/// Calls a function while a tensor is locked.
struct Amid<F>(F);

impl<F: Fn()> InplaceOp1 for Amid<F> {
    fn name(&self) -> &'static str {
        "amid"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        (self.0)();
        Ok(())
    }
}

#[test]
fn a_call_that_cannot_be_made_waits_for_no_tensor() {
    let (ended, end) = std::sync::mpsc::channel();
    let calls = move |group: Group<Host>| -> Result<(), Failure> {
        let ranks = &TensorParallel::new(group.clone(), &Device::Cpu, TOKENS)?;
        let x = &ones(TOKENS, K)?;
        let column = ColumnParallelLinear::new(ranks, ones(N, K)?, None)?;
        let row = RowParallelLinear::new(ranks, ones(N, K)?, None)?;
        group.fail("planted");
        let calls: [&dyn Fn() -> Result<()>; 8] = [
            &|| ranks.all_gather(x).map(drop),
            &|| ranks.all_reduce(x).map(drop),
            &|| column.forward(x).map(drop),
            &|| column.forward_replicated(x).map(drop),
            &|| row.forward(x).map(drop),
            &|| row.forward_replicated(x, None).map(drop),
            &|| ColumnParallelLinear::new(ranks, x.clone(), None).map(drop),
            &|| RowParallelLinear::from_whole(ranks, x, None).map(drop),
        ];
        x.inplace_op1(&Amid(|| {
            for call in calls {
                assert_says(call().unwrap_err(), "planted");
            }
        }))?;
        Ok(())
    };
    // It outlives the test if it waits.
    std::thread::spawn(move || ended.send(Group::<Host>::threads(1, calls).map(drop)));
    let ended = end.recv_timeout(std::time::Duration::from_secs(20));
    ended.expect("no call waits").unwrap();
}

#[test]
fn a_bias_that_is_not_as_long_as_its_weight() -> Result<(), Failure> {
    one(|ranks| {
        let zeros = |n: usize| Tensor::zeros(n, DType::BF16, &Device::Cpu);
        let biases = [zeros(N / 2)?, zeros(N * 3 / 2)?, zeros(N)?];
        let weights = [ones(N, K)?, ones(N, K)?, ones(N, K)?];
        assert_says(
            QkvParallelLinear::new(ranks, weights, Some(biases)).unwrap_err(),
            "a parallel layer: bias [N] is [8] and must be [16]",
        );
        let biases = [zeros(N + 8)?, zeros(N - 8)?];
        assert_says(
            GatedParallelLinear::new(ranks, [ones(N, K)?, ones(N, K)?], Some(biases)).unwrap_err(),
            "a parallel layer: bias [N] is [24] and must be [16]",
        );
        Ok(())
    })
}

#[test]
fn a_tensor_that_its_storage_does_not_hold() -> Result<(), Failure> {
    one(|ranks| {
        let storage = CpuStorage::BF16(vec![bf16::ONE; TOKENS * K - 1]);
        let x = Tensor::from_storage(
            Storage::Cpu(storage),
            (TOKENS, K),
            BackpropOp::none(),
            false,
        );
        assert_says(
            ranks.all_gather(&x).unwrap_err(),
            "all_gather: the storage of x [tokens of this rank, N] is 47 elements and must be 48 elements at least",
        );
        Ok(())
    })
}

/// Runs `f` as the only rank.
fn one(f: impl Fn(&TensorParallel) -> Result<(), Failure> + Sync) -> Result<(), Failure> {
    Group::<Host>::threads(1, |group| {
        f(&TensorParallel::new(group, &Device::Cpu, TOKENS)?)
    })
    .map(drop)
}

fn ones(rows: usize, columns: usize) -> Result<Tensor> {
    Tensor::ones((rows, columns), DType::BF16, &Device::Cpu)
}

/// An error of gemmesh's, in so many words, apart from the place of the call.
#[track_caller]
fn assert_says(error: candle_core::Error, words: &str) {
    let sentence = sentence(&error);
    assert!(sentence.contains(words), "{sentence}\nshould say: {words}");
}
