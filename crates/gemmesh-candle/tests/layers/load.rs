//! Layers whose weights are read from a file of safetensors.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Module, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::{
    Backend, Shard, ShardedSafeTensors, ShardedVarBuilder, VarBuilderArgs,
};
use gemmesh_candle::{
    ColumnParallelLinear, GatedParallelLinear, Group, Hints, Host, QkvParallelLinear,
    RowParallelLinear, TensorParallel, gemmesh_error,
};

use crate::exact::{CAPACITY, DTYPES, Exact, Failure, Result, each, random};
use crate::support::sentence;

const MODEL: usize = 24;
const HIDDEN: usize = 32;
const HEAD: usize = 8;
const HEADS: [usize; 2] = [8, 2];
const LAYERS: [(&str, usize, usize); 6] = [
    ("q_proj", HEADS[0] * HEAD, MODEL),
    ("k_proj", HEADS[1] * HEAD, MODEL),
    ("v_proj", HEADS[1] * HEAD, MODEL),
    ("gate_proj", HIDDEN, MODEL),
    ("up_proj", HIDDEN, MODEL),
    ("down_proj", MODEL, HIDDEN),
];

#[test]
fn layers_read_from_a_file_equal_candles_linear() -> Result<(), Failure> {
    for (dtype, u) in DTYPES {
        let tensors = tensors(dtype)?;
        let file = File::new(&tensors)?;
        each(|ranks| Model::new(ranks, file.sharded(dtype)?, true)?.check(ranks, &tensors, u))?;
    }
    Ok(())
}

#[test]
fn a_plain_var_builder_gives_the_same_layers() -> Result<(), Failure> {
    let (dtype, u) = DTYPES[0];
    let tensors = tensors(dtype)?;
    each(|ranks| {
        let vb = VarBuilder::from_tensors(tensors.clone(), dtype, &Device::Cpu);
        Model::new(ranks, vb.pp("model"), true)?.check(ranks, &tensors, u)
    })
}

#[test]
fn a_file_of_f32_is_read_as_the_type_that_the_var_builder_has() -> Result<(), Failure> {
    let (dtype, u) = DTYPES[0];
    let tensors = tensors(dtype)?;
    let file = File::new(&map(&tensors, |_, tensor| tensor.to_dtype(DType::F32))?)?;
    each(|ranks| Model::new(ranks, file.sharded(dtype)?, true)?.check(ranks, &tensors, u))
}

#[test]
fn a_layer_without_bias_reads_none() -> Result<(), Failure> {
    let (dtype, u) = DTYPES[0];
    let mut tensors = tensors(dtype)?;
    tensors.retain(|name, _| name.ends_with("weight"));
    let file = File::new(&tensors)?;
    each(|ranks| Model::new(ranks, file.sharded(dtype)?, false)?.check(ranks, &tensors, u))
}

/// In each rank's file all that belongs to other ranks is NaN.
#[test]
fn a_rank_uses_no_other_ranks_part_of_the_file() -> Result<(), Failure> {
    let (dtype, u) = DTYPES[0];
    let tensors = tensors(dtype)?;
    each(|ranks| {
        let [queries, keys] = ranks.heads(HEADS[0], HEADS[1])?;
        let rows = |heads: &Range<usize>| heads.start * HEAD..heads.end * HEAD;
        let part = HIDDEN / ranks.world_size();
        let hidden = part * ranks.rank()..part * (ranks.rank() + 1);
        let poisoned = map(&tensors, |name, tensor| {
            let (own, dim) = match name {
                "model.down_proj.bias" => (0..MODEL, 0),
                "model.down_proj.weight" => (hidden.clone(), 1),
                _ if name.contains("q_proj") => (rows(&queries), 0),
                _ if name.contains("k_proj") || name.contains("v_proj") => (rows(&keys), 0),
                _ => (hidden.clone(), 0),
            };
            poisoned(tensor, dim, own)
        })?;
        let file = File::new(&poisoned)?;
        Model::new(ranks, file.sharded(dtype)?, true)?.check(ranks, &tensors, u)
    })
}

#[test]
fn ranks_read_each_element_once_but_for_what_they_share() -> Result<(), Failure> {
    let dtype = DType::BF16;
    let tensors = tensors(dtype)?;
    let file = File::new(&tensors)?;
    let world = 4;
    let read = Group::<Host>::threads(world, |group| {
        let ranks = &TensorParallel::new(group, &Device::Cpu, CAPACITY)?;
        let read = Arc::new(AtomicUsize::new(0));
        let counted = Counted {
            file: file.sharded(dtype)?,
            read: read.clone(),
        };
        let vb = VarBuilderArgs::new_with_args(counted, dtype, &Device::Cpu);
        Model::new(ranks, vb, true)?;
        Ok::<_, Failure>(read.load(Ordering::Relaxed))
    })?;
    let all: usize = tensors.values().map(Tensor::elem_count).sum();
    // Two ranks have the same heads of keys and values, all ranks the bias of `down`, and two layers `up`.
    let shared = 2 * HEADS[1] * HEAD * (MODEL + 1) + (world - 1) * MODEL;
    let twice = HIDDEN * (MODEL + 1);
    assert_eq!(read.iter().sum::<usize>(), all + shared + twice);
    Ok(())
}

#[test]
fn errors_name_the_tensor_its_shape_in_the_file_and_the_rank() -> Result<(), Failure> {
    wrong_file(|ranks, file| {
        let vb = |name: &str| Ok::<_, Failure>(file.sharded(DType::BF16)?.pp(name));
        let tensors = VarBuilder::from_tensors(file.tensors.clone(), DType::BF16, &Device::Cpu);
        let plain = tensors.pp("model");

        let said = "loading a weight: model.up.weight in the file is [18, 8] and must be [16, 8]";
        let made = ColumnParallelLinear::load(ranks, 8, 16, false, vb("up")?);
        assert_says(ranks, made, said)?;
        let made = ColumnParallelLinear::load(ranks, 8, 16, false, plain.pp("up"));
        assert_says(ranks, made, said)?;
        let made = GatedParallelLinear::load(ranks, 8, 16, false, [vb("up")?, vb("up")?]);
        assert_says(ranks, made, said)?;
        let qkv = [vb("up")?, vb("up")?, vb("up")?];
        let made = QkvParallelLinear::load(ranks, 8, [4, 4], 4, false, qkv);
        assert_says(ranks, made, said)?;
        let said = "loading a weight: model.up.weight in the file is [18, 8] and must be [18, 16]";
        let made = RowParallelLinear::load(ranks, 16, 18, false, vb("up")?);
        assert_says(ranks, made, said)?;

        let said = "loading a weight: model.norm.weight in the file is [8] and must be [8, 8]";
        let made = RowParallelLinear::load(ranks, 8, 8, false, vb("norm")?);
        assert_says(ranks, made, said)?;
        let made = ColumnParallelLinear::load(ranks, 8, 8, false, vb("norm")?);
        assert_says(ranks, made, said)?;

        let said = "loading a weight: model.up.bias in the file is [16] and must be [18]";
        let made = RowParallelLinear::load(ranks, 8, 18, true, vb("up")?);
        assert_says(ranks, made, said)
    })
}

#[test]
fn errors_name_a_tensor_that_is_missing_and_one_that_cannot_be_a_weight() -> Result<(), Failure> {
    wrong_file(|ranks, file| {
        let down = file.sharded(DType::BF16)?.pp("down");
        let made = RowParallelLinear::load(ranks, 8, 8, false, down);
        let said = "cannot read model.down.weight: cannot find tensor model.down.weight";
        assert_says(ranks, made, said)?;

        let up = file.sharded(DType::F32)?.pp("up");
        let made = ColumnParallelLinear::load(ranks, 8, 18, false, up);
        let said = match ranks.world_size() {
            1 => "a parallel layer: the dtype of weight is F32 and must be BF16, F16 or F8E4M3",
            _ => {
                "TensorParallel::shard: dimension 0 of model.up.weight that 4 ranks share evenly is [18] and must be \
                 [20]"
            }
        };
        assert_says(ranks, made, said)
    })
}

/// Runs `check` on one rank, and on each of four, with a file whose weights fit few layers.
fn wrong_file(
    check: impl Fn(&TensorParallel, &File) -> Result<(), Failure> + Sync,
) -> Result<(), Failure> {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::BF16, &Device::Cpu);
    let tensors = [
        ("model.up.weight", zeros(&[18, 8])?),
        ("model.up.bias", zeros(&[16])?),
        ("model.norm.weight", zeros(&[8])?),
    ];
    let file = File::new(&tensors.map(|(name, tensor)| (name.into(), tensor)).into())?;
    for world in [1, 4] {
        Group::<Host>::threads(world, |group| {
            check(&TensorParallel::new(group, &Device::Cpu, CAPACITY)?, &file)
        })?;
    }
    Ok(())
}

/// Checks what this rank is told of a layer that cannot be made.
#[track_caller]
fn assert_says<L>(ranks: &TensorParallel, made: Result<L>, said: &str) -> Result<(), Failure> {
    let error = made.err().expect("a layer that cannot be made");
    let rank = ranks.rank();
    assert_eq!(sentence(&error), format!("rank {rank}: {said}"));
    Ok(ranks.barrier()?)
}

#[test]
fn ranks_that_wait_hear_of_one_that_cannot_read_its_part() -> Result<(), Failure> {
    let dtype = DType::BF16;
    let both = std::sync::Barrier::new(2);
    Group::<Host>::threads(2, |group| {
        let rank = group.rank();
        let ranks = &TensorParallel::new(group, &Device::Cpu, CAPACITY)?;
        let tensors = match rank {
            0 => HashMap::from([(
                "weight".into(),
                Tensor::zeros((16, 8), dtype, &Device::Cpu)?,
            )]),
            _ => HashMap::new(),
        };
        let vb = VarBuilder::from_tensors(tensors, dtype, &Device::Cpu);
        let made = ColumnParallelLinear::load(ranks, 8, 16, false, vb);
        // Rank 1 lives, and does not try again.
        both.wait();
        let error = made.unwrap_err();
        let error = gemmesh_error(&error)
            .expect("an error of gemmesh's")
            .cause();
        let said = "rank 1: cannot read weight: cannot find tensor weight";
        assert_eq!(error.to_string(), said);
        Ok::<_, Failure>(())
    })
    .map(drop)
}

/// A layer of each kind.
struct Model {
    qkv: QkvParallelLinear,
    gate_up: GatedParallelLinear,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Model {
    fn new<B: Backend<Hints: Hints>>(
        ranks: &TensorParallel,
        vb: VarBuilderArgs<B>,
        bias: bool,
    ) -> Result<Model> {
        let qkv = ["q_proj", "k_proj", "v_proj"].map(|name| vb.pp(name));
        let gate_up = ["gate_proj", "up_proj"].map(|name| vb.pp(name));
        let down = vb.pp("down_proj");
        Ok(Model {
            qkv: QkvParallelLinear::load(ranks, MODEL, HEADS, HEAD, bias, qkv)?,
            gate_up: GatedParallelLinear::load(ranks, MODEL, HIDDEN, bias, gate_up)?,
            up: ColumnParallelLinear::load(ranks, MODEL, HIDDEN, bias, vb.pp("up_proj"))?,
            down: RowParallelLinear::load(ranks, HIDDEN, MODEL, bias, down)?,
        })
    }

    /// Compares each layer's output with the whole linear layer's in f64.
    fn check(
        &self,
        ranks: &TensorParallel,
        tensors: &HashMap<String, Tensor>,
        u: f64,
    ) -> Result<(), Failure> {
        let m = 7;
        let own = ranks.set_tokens(m)?;
        let dtype = tensors["model.up_proj.weight"].dtype();
        let (x, h) = (
            random(91, (m, MODEL), dtype)?,
            random(92, (m, HIDDEN), dtype)?,
        );
        let own_x = x.narrow(0, own.start, own.len())?;
        let exact = |name: &str, x| {
            let weight = &tensors[&format!("model.{name}.weight")];
            let bias = tensors.get(&format!("model.{name}.bias"));
            Exact::new(x, weight, bias)
        };
        let heads = ranks.heads(HEADS[0], HEADS[1])?;
        let names = [("q_proj", 0), ("k_proj", 1), ("v_proj", 1)];
        for ((name, kind), found) in names.into_iter().zip(self.qkv.forward(&own_x)?) {
            let columns = heads[kind].start * HEAD..heads[kind].end * HEAD;
            exact(name, &x)?.of_columns(&columns)?.check(&found, u)?;
        }
        let [gate, up] = [exact("gate_proj", &x)?, exact("up_proj", &x)?];
        let [gate, up] = [gate.columns(ranks)?, up.columns(ranks)?];
        up.check(&self.up.forward(&own_x)?, u)?;
        gate.gated(&up)?.check(&self.gate_up.forward(&own_x)?, u)?;
        let down = exact("down_proj", &h)?;
        let down = down.partials(
            &h,
            &tensors["model.down_proj.weight"],
            ranks.world_size(),
            u,
        )?;
        let part = ranks.shard(&h, 1)?;
        down.rows(&own)?.check(&self.down.forward(&part)?, u)?;
        down.check(&self.down.forward_replicated(&part, None)?, u)?;
        Ok(())
    }
}

/// Random weights and biases of [`LAYERS`].
fn tensors(dtype: DType) -> Result<HashMap<String, Tensor>> {
    let mut tensors = HashMap::new();
    for (seed, (name, n, k)) in LAYERS.into_iter().enumerate() {
        let (weight, bias) = (
            random(2 * seed, (n, k), dtype)?,
            random(2 * seed + 1, n, dtype)?,
        );
        tensors.insert(format!("model.{name}.weight"), weight);
        tensors.insert(format!("model.{name}.bias"), bias);
    }
    Ok(tensors)
}

fn map(
    tensors: &HashMap<String, Tensor>,
    f: impl Fn(&str, &Tensor) -> Result<Tensor>,
) -> Result<HashMap<String, Tensor>> {
    let mapped = |(name, tensor): (&String, &Tensor)| Ok((name.clone(), f(name, tensor)?));
    tensors.iter().map(mapped).collect()
}

/// NaN outside `own` of a dimension.
fn poisoned(tensor: &Tensor, dim: usize, own: Range<usize>) -> Result<Tensor> {
    let nan = |range: Range<usize>| {
        let part = tensor.narrow(dim, range.start, range.len())?;
        part.zeros_like()? / 0.0
    };
    let part = tensor.narrow(dim, own.start, own.len())?;
    Tensor::cat(
        &[nan(0..own.start)?, part, nan(own.end..tensor.dim(dim)?)?],
        dim,
    )
}

/// A file that is removed in the end.
pub struct File {
    path: PathBuf,
    tensors: HashMap<String, Tensor>,
}

impl File {
    pub fn new(tensors: &HashMap<String, Tensor>) -> Result<File> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("candle-layers-{}-{number}.safetensors", std::process::id());
        let path = std::env::temp_dir().join(name);
        candle_core::safetensors::save(tensors, &path)?;
        Ok(File {
            path,
            tensors: tensors.clone(),
        })
    }

    pub fn sharded(&self, dtype: DType) -> Result<ShardedVarBuilder<'static>> {
        Ok(open(&self.path, dtype)?.pp("model"))
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[allow(unsafe_code)]
fn open(path: &Path, dtype: DType) -> Result<ShardedVarBuilder<'static>> {
    // SAFETY: nothing writes to the file. Its memory stays mapped after its name is removed.
    unsafe { ShardedSafeTensors::var_builder(&[path], dtype, &Device::Cpu) }
}

/// Counts the elements that are read.
struct Counted {
    file: ShardedVarBuilder<'static>,
    read: Arc<AtomicUsize>,
}

impl Backend for Counted {
    type Hints = Shard;

    fn get(
        &self,
        shape: Shape,
        name: &str,
        part: Shard,
        dtype: DType,
        _: &Device,
    ) -> Result<Tensor> {
        let tensor = self.file.get_with_hints_dtype(shape, name, part, dtype)?;
        self.read.fetch_add(tensor.elem_count(), Ordering::Relaxed);
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        self.file.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.file.contains_tensor(name)
    }
}
