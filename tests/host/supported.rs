//! What is supported, before there is a matrix: the same answers as those of the calls.

use std::sync::atomic::{AtomicUsize, Ordering};

use gemmesh::elements::{AddendOf, Element, OutputOf, WeightOf};
use gemmesh::fp8::{
    Accumulation, Quantization, Quantize, Quantized, Scales, Scaling, ShardedScales, WeightScaling,
};
use gemmesh::products::{Operand, Outputs, RowSplit, WeightLayout};
use gemmesh::tuning::{Chunking, Numerics, Route, TileShape};
use gemmesh::{
    Activation, AllGatherMatmul, Config, DType, Error, F8E4M3, F8E5M2, Group, Host, Matmul,
    MatmulAllReduce, MatmulReduceScatter, Matrix, Result, ShardedMatrix, bf16, f16,
};
use proptest::prelude::*;
use proptest::sample::select;

/// A call, which may be one that is refused.
#[derive(Clone, Debug)]
struct Case {
    operation: Operation,
    types: Types,
    /// By rank.
    rows: Vec<usize>,
    /// Whether `rows` are those of an even split, and are not given one by one.
    even: bool,
    k: usize,
    widths: Vec<usize>,
    gated: bool,
    layout: WeightLayout,
    a_scaling: Scaling,
    /// One for all weights, or one for each of two.
    b_scaling: Vec<Scaling>,
    accumulation: Accumulation,
    quantization: Option<Rule>,
    /// Columns of a bias beyond those of the output.
    bias: Option<usize>,
    config: Option<Config>,
    stages: Option<usize>,
    /// Whether the matrix itself is staged.
    staged_matrix: bool,
    numerics: Numerics,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Matmul,
    Gather,
    Scatter,
    AllReduce,
    Quantize,
}

/// The types of `a`, the weights and the outputs.
#[derive(Clone, Copy, Debug)]
enum Types {
    Bf16,
    Bf16ToF32,
    F16,
    E4M3,
    E4M3ByE5M2ToF16,
    E5M2ToF32,
    E4M3ToE4M3,
}

/// How an output is quantised, and whether the scale is a power of two.
#[derive(Clone, Copy, Debug)]
enum Rule {
    Blocks(bool),
    Transposed(bool),
    Given(bool),
}

impl Rule {
    fn quantization(self) -> Quantization {
        let (quantization, power) = match self {
            Rule::Blocks(power) => (Quantization::blocks(), power),
            Rule::Transposed(power) => (Quantization::transposed_blocks(), power),
            Rule::Given(power) => (Quantization::tensor(), power),
        };
        match power {
            true => quantization.power_of_two(),
            false => quantization,
        }
    }

    /// Scales of an output [m, n].
    fn scales(self, group: &Group<Host>, [m, n]: [usize; 2]) -> Result<Matrix<Host, f32>> {
        let blocks = n.div_ceil(128);
        let [rows, columns] = match self {
            Rule::Blocks(_) => [m, blocks],
            Rule::Transposed(_) => [blocks, m],
            Rule::Given(_) => [1, 1],
        };
        group.zeros(rows, columns)
    }

    fn by(self, scales: &mut Matrix<Host, f32>) -> Quantized<'_, Host> {
        let (quantized, power) = match self {
            Rule::Blocks(power) => (Quantized::blocks(scales), power),
            Rule::Transposed(power) => (Quantized::transposed_blocks(scales), power),
            Rule::Given(power) => (Quantized::tensor(&*scales), power),
        };
        match power {
            true => quantized.power_of_two(),
            false => quantized,
        }
    }
}

/// Shapes, scales and forms that go together more often than not, and those that do not.
fn cases() -> impl Strategy<Value = Case> {
    use Scaling::{Blocks, Rows, Tensor, TransposedBlocks};
    let from = Scaling::blocks_from;
    let from_0 = Scaling::BlocksFrom { row: 0, column: 0 };
    let operations = [
        Operation::Matmul,
        Operation::Gather,
        Operation::Scatter,
        Operation::AllReduce,
        Operation::Quantize,
    ];
    let types = [
        Types::Bf16,
        Types::Bf16ToF32,
        Types::F16,
        Types::E4M3,
        Types::E4M3ByE5M2ToF16,
        Types::E5M2ToF32,
        Types::E4M3ToE4M3,
    ];
    // At least one row: scales that lie in a column of none are no matrix.
    let rows = (1..20usize, prop::collection::vec(0..20usize, 0..3))
        .prop_map(|(last, rows)| [rows, vec![last]].concat());
    let extents = || prop_oneof![8 => select(vec![16usize, 48, 128, 144, 272]), 1 => 1..300usize];
    let widths = prop_oneof![
        4 => extents().prop_map(|n| vec![n]),
        2 => extents().prop_map(|n| vec![n, n]),
        1 => prop::collection::vec(extents(), 2..=5),
    ];
    let scalings = prop_oneof![
        4 => Just((Scaling::None, vec![Scaling::None])),
        2 => Just((Blocks, vec![Blocks])),
        1 => Just((Rows, vec![Tensor])),
        1 => Just((from(0, 96), vec![from(0, 96)])),
        1 => Just((from_0, vec![from_0])),
        3 => (
            select(vec![
                Scaling::None,
                Tensor,
                Rows,
                Blocks,
                TransposedBlocks,
                from(16, 0),
                from(0, 16),
                from(0, 200),
                Scaling::ShardedRows,
                Scaling::ShardedBlocks,
            ]),
            prop::collection::vec(
                select(vec![
                    Tensor,
                    Rows,
                    Blocks,
                    from(64, 0),
                    from(8, 0),
                    from(128, 0),
                    from(0, 16),
                    from(64, 16),
                    TransposedBlocks,
                ]),
                1..=2,
            ),
        ),
    ];
    let rules = prop_oneof![
        any::<bool>().prop_map(Rule::Blocks),
        any::<bool>().prop_map(Rule::Transposed),
        any::<bool>().prop_map(Rule::Given),
    ];
    let quantization = prop_oneof![4 => Just(None), 1 => rules.prop_map(Some)];
    let bias = prop_oneof![4 => Just(None), 2 => Just(Some(0)), 1 => Just(Some(1))];
    let config = prop_oneof![2 => Just(None), 3 => configs().prop_map(Some)];
    let stages = prop_oneof![6 => Just(None), 2 => (1..5usize).prop_map(Some), 1 => select(vec![Some(0), Some(65)])];
    let numerics = select(vec![Numerics::Fast, Numerics::Fast, Numerics::Invariant]);
    let accumulation = select(vec![Accumulation::Promoted, Accumulation::Fast]);
    let kn = prop_oneof![4 => Just(WeightLayout::Nk), 1 => Just(WeightLayout::Kn)];
    let form = (
        widths,
        prop::bool::weighted(0.25),
        kn,
        scalings,
        accumulation,
        quantization,
        bias,
    );
    let who = (
        select(operations.to_vec()),
        select(types.to_vec()),
        rows,
        any::<bool>(),
        extents(),
    );
    let how = (config, stages, prop::bool::weighted(0.2), numerics);
    (who, form, how).prop_map(|(who, form, how)| {
        let (operation, types, rows, even, k) = who;
        let (widths, gated, layout, (a_scaling, b_scaling), accumulation, quantization, bias) =
            form;
        let (config, stages, staged_matrix, numerics) = how;
        let rows = match even {
            true => even_rows(rows.iter().sum(), rows.len()),
            false => rows,
        };
        Case {
            operation,
            types,
            rows,
            even,
            k,
            widths,
            gated,
            layout,
            a_scaling,
            b_scaling,
            accumulation,
            quantization,
            bias,
            config,
            stages,
            staged_matrix,
            numerics,
        }
    })
}

fn configs() -> impl Strategy<Value = Config> {
    let extent = || prop_oneof![8 => select(vec![16usize, 64, 128, 192]), 1 => select(vec![0usize, 1 << 40])];
    let factor = || prop_oneof![8 => Just(1usize), 2 => select(vec![2usize, 4]), 1 => select(vec![0usize, 100])];
    let tile = ([extent(), extent(), extent()], factor(), factor(), factor());
    let routes = select(vec![Route::Pull, Route::Push, Route::Store]);
    let chunking = (
        select(vec![0usize, 1, 2, 3, 64, 65]),
        1..4usize,
        any::<bool>(),
    );
    (tile, chunking, routes, any::<bool>()).prop_map(|(tile, chunking, route, first)| {
        let ([m, n, k], cluster, split_k, k_slices) = tile;
        let shape = TileShape::new(m, n, k)
            .with_cluster(cluster, 1)
            .with_split_k(split_k)
            .with_k_slices(k_slices);
        let (count, last, cut) = chunking;
        let chunking = Chunking::new(count).with_last(last).with_cut_last(cut);
        Config::new(shape, chunking, route).with_product_first(first)
    })
}

fn even_rows(m: usize, world: usize) -> Vec<usize> {
    let row = |rank| m / world + usize::from(rank < m % world);
    (0..world).map(row).collect()
}

impl Case {
    fn m(&self) -> usize {
        self.rows.iter().sum()
    }

    /// The product's N, in all.
    fn n(&self) -> usize {
        match self.gated {
            true => self.widths[0],
            false => self.widths.iter().sum(),
        }
    }

    fn split(&self) -> RowSplit {
        match self.even {
            true => [self.m(), self.k].into(),
            false => (&self.rows, self.k).into(),
        }
    }

    fn b_scaling(&self) -> WeightScaling {
        match self.b_scaling[..] {
            [first, second] => [first, second].into(),
            _ => self.b_scaling[0].into(),
        }
    }

    fn scaling_of_weight(&self, number: usize) -> Scaling {
        match self.b_scaling.len() {
            1 => self.b_scaling[0],
            _ => self.b_scaling[number.min(1)],
        }
    }

    /// Whether gate and up have one N. Weights that do not are refused by their shapes, which a question lacks.
    fn has_matrices(&self) -> bool {
        let alike = self.widths.iter().all(|&n| n == self.widths[0]);
        let scaled = self.b_scaling.len() == 1 || self.b_scaling.len() == self.widths.len();
        (!self.gated || alike && self.widths.len() > 1) && scaled
    }

    fn bias<T: Element, V: AddendOf<T>>(
        &self,
        group: &Group<Host>,
    ) -> Result<Option<Matrix<Host, V>>> {
        let columns = self.n() * (1 + usize::from(self.gated));
        let bias = self.bias.map(|more| group.zeros(1, columns + more));
        bias.transpose()
    }
}

/// Scales of an operand [rows, k], whose blocks are of so many rows. None if the values have none.
struct Scaled {
    scaling: Scaling,
    scales: Option<Matrix<Host, f32>>,
}

impl Scaled {
    fn new(
        group: &Group<Host>,
        scaling: Scaling,
        [rows, k]: [usize; 2],
        block: usize,
    ) -> Result<Scaled> {
        let [first, first_column] = place(scaling);
        let blocks = (first_column + k).div_ceil(128);
        let shape = match scaling {
            Scaling::Tensor => Some([1, 1]),
            Scaling::Rows => Some([1, rows]),
            Scaling::Blocks | Scaling::BlocksFrom { .. } => {
                Some([(first + rows).div_ceil(block), blocks])
            }
            Scaling::TransposedBlocks => Some([blocks, rows]),
            _ => None,
        };
        let scales = shape.map(|[rows, columns]| group.zeros(rows, columns));
        Ok(Scaled {
            scaling,
            scales: scales.transpose()?,
        })
    }

    fn operand<'m, T: Element>(&'m self, values: &'m Matrix<Host, T>) -> Operand<'m, Host, T> {
        match self.scales() {
            Some(scales) => values.scaled(scales),
            None => values.into(),
        }
    }

    fn scales(&self) -> Option<Scales<'_, Host>> {
        let scales = self.scales.as_ref()?;
        Some(match self.scaling {
            Scaling::Tensor => Scales::tensor(scales),
            Scaling::Rows => Scales::rows(scales),
            Scaling::TransposedBlocks => Scales::transposed_blocks(scales),
            scaling => {
                let [row, column] = place(scaling);
                Scales::blocks(scales).first_row(row).first_column(column)
            }
        })
    }
}

/// The row and the column of its first block at which an operand begins.
fn place(scaling: Scaling) -> [usize; 2] {
    match scaling {
        Scaling::BlocksFrom { row, column } => [row, column],
        _ => [0, 0],
    }
}

/// Weights with their scales.
struct Layer<W: Element>(Vec<(Matrix<Host, W>, Scaled)>);

impl<W: Element> Layer<W> {
    fn new(case: &Case, group: &Group<Host>) -> Result<Self> {
        let weight = |(number, &n): (usize, &usize)| {
            let [rows, columns] = match case.layout {
                WeightLayout::Nk => [n, case.k],
                WeightLayout::Kn => [case.k, n],
            };
            let scaling = case.scaling_of_weight(number);
            let scaled = Scaled::new(group, scaling, [n, case.k], 128)?;
            Ok((group.zeros(rows, columns)?, scaled))
        };
        let weights = case.widths.iter().enumerate().map(weight);
        Ok(Layer(weights.collect::<Result<_>>()?))
    }

    fn weights<T: Element>(&self) -> gemmesh::products::Weights<'_, Host, T>
    where
        W: WeightOf<T>,
    {
        let operands = self.0.iter();
        operands
            .map(|(values, scaled)| scaled.operand(values))
            .collect()
    }
}

/// What a call has answered: nothing, or its error without the call's place.
fn answer<R>(result: Result<R>) -> String {
    let Err(error) = result else {
        return "Ok".into();
    };
    let place = error.call().and_then(gemmesh::error::Call::place);
    let place = place.map_or(String::new(), |place| format!(" at {place}"));
    let kind = std::mem::discriminant(error.kind());
    format!("{kind:?}: {}", error.to_string().replacen(&place, "", 1))
}

static YES: AtomicUsize = AtomicUsize::new(0);
static NO: AtomicUsize = AtomicUsize::new(0);
static RUN: AtomicUsize = AtomicUsize::new(0);

/// Compares a question's answer with a prepared call's, and with that of a call that is made. All ranks must have been
/// told yes, or a rank would wait for one that makes no call.
fn compare<R>(
    group: &Group<Host>,
    supported: Result<()>,
    prepared: Result<R>,
    run: Option<impl FnOnce() -> Result<()>>,
) -> Result<()> {
    let supported = answer(supported);
    assert_eq!(answer(prepared), supported, "prepared");
    match supported.as_str() {
        "Ok" => YES.fetch_add(1, Ordering::Relaxed),
        _ => NO.fetch_add(1, Ordering::Relaxed),
    };
    let all = group.all_gather_bytes(&[u8::from(supported == "Ok")])?;
    let are_alike = all.iter().all(|answer| answer == &all[0]);
    if let Some(run) = run.filter(|_| are_alike) {
        assert_eq!(answer(run()), supported, "run");
        RUN.fetch_add(1, Ordering::Relaxed);
    }
    group.barrier()
}

/// Compares the answers about a product whose output may have a type of its own.
fn product<T, W, O, V>(case: &Case, group: &Group<Host>) -> Result<()>
where
    T: Element,
    W: WeightOf<T>,
    O: OutputOf<T>,
    V: AddendOf<T> + OutputOf<T>,
{
    match case.operation {
        Operation::Matmul => matmul::<T, W, O, V>(case, group),
        Operation::Gather => gather::<T, W, O, V>(case, group),
        Operation::Scatter => scatter::<T, W, O, V>(case, group),
        _ => all_reduce::<T, W, V>(case, group),
    }
}

/// Calls `run` with outputs of these shapes.
fn with_outputs<T: Element, O: OutputOf<T>>(
    case: &Case,
    group: &Group<Host>,
    rows: usize,
    run: impl FnOnce(Outputs<'_, Host, T>) -> Result<()>,
) -> Result<()> {
    let widths = match case.gated {
        true => &case.widths[..1],
        false => &case.widths[..],
    };
    let Some(rule) = case.quantization else {
        let outputs = widths.iter().map(|&n| group.zeros::<O>(rows, n));
        let mut outputs: Vec<Matrix<Host, O>> = outputs.collect::<Result<_>>()?;
        return run(outputs.iter_mut().map(Matrix::view_mut).collect());
    };
    let outputs = widths.iter().map(|&n| {
        let values = group.zeros::<F8E4M3>(rows, n)?;
        Ok((values, rule.scales(group, [rows, n])?))
    });
    let mut outputs: Vec<_> = outputs.collect::<Result<_>>()?;
    let quantized = outputs.iter_mut().map(|(values, scales)| {
        let scales = rule.by(scales);
        values.quantized(scales)
    });
    run(quantized.collect())
}

/// Gives a builder the options that all products have.
macro_rules! configured {
    ($builder:expr, $case:expr, $bias:expr, $weight:ty) => {{
        let case: &Case = $case;
        let mut product = $builder
            .activation(Activation::Relu)
            .weight_layout(case.layout)
            .accumulation(case.accumulation)
            .weight_dtype(<$weight as gemmesh::elements::Value>::DTYPE)
            .scaling(case.a_scaling, case.b_scaling());
        if let Some(bias) = $bias {
            product = product.bias(bias);
        }
        match case.config {
            Some(config) => product.config(config),
            None => product,
        }
    }};
}

fn matmul<T, W, O, V>(case: &Case, group: &Group<Host>) -> Result<()>
where
    T: Element,
    W: WeightOf<T>,
    O: OutputOf<T>,
    V: AddendOf<T>,
{
    let bias = case.bias::<T, V>(group)?;
    let mut product = configured!(Matmul::<Host, T>::new(), case, &bias, W);
    product = match case.quantization {
        Some(rule) => product.quantization(rule.quantization()),
        None => product.output_dtype(O::DTYPE),
    };
    if case.gated {
        product = product.gated();
    }
    let shape = [case.m(), case.k];
    let supported = product.supported(group, shape, &case.widths[..]);
    let prepared = product.prepare((group, shape), &case.widths[..]);
    let (a, layer) = (
        group.zeros::<T>(case.m(), case.k)?,
        Layer::<W>::new(case, group)?,
    );
    let scaled = Scaled::new(group, case.a_scaling, shape, 1)?;
    let run = || {
        with_outputs::<T, O>(case, group, case.m(), |outputs| {
            product.run(scaled.operand(&a), layer.weights(), outputs)
        })
    };
    let is_own = !case.a_scaling.is_sharded();
    let run = (case.has_matrices() && is_own).then_some(run);
    compare(group, supported, prepared, run)
}

/// The matrix of a gather, whose scales may be sharded with it.
fn sharded<T: gemmesh::elements::Value>(
    case: &Case,
    group: &Group<Host>,
    columns: usize,
) -> Result<ShardedMatrix<Host, T>> {
    match case.stages {
        Some(stages @ 1..=64) if case.staged_matrix && case.even => {
            group.sharded_staged(case.m(), columns, stages)
        }
        _ => group.sharded_rows(&case.rows, columns),
    }
}

fn gather<T, W, O, V>(case: &Case, group: &Group<Host>) -> Result<()>
where
    T: Element,
    W: WeightOf<T>,
    O: OutputOf<T>,
    V: AddendOf<T>,
{
    let bias = case.bias::<T, V>(group)?;
    let mut product = configured!(AllGatherMatmul::<Host, T>::new(), case, &bias, W);
    product = match case.quantization {
        Some(rule) => product.quantization(rule.quantization()),
        None => product.output_dtype(O::DTYPE),
    };
    if case.gated {
        product = product.gated();
    }
    if let Some(stages) = case.stages {
        product = product.stages(stages);
    }
    let a = sharded::<T>(case, group, case.k)?;
    let supported = product.supported(group, case.split(), &case.widths[..]);
    let prepared = product.prepare(&a, &case.widths[..]);
    let layer = Layer::<W>::new(case, group)?;
    let of_a = sharded::<f32>(case, group, case.k.div_ceil(128))?;
    let of_rows = sharded::<f32>(case, group, 1)?;
    let scaled = Scaled::new(group, case.a_scaling, [case.m(), case.k], 1)?;
    let operand = match (case.a_scaling, scaled.scales()) {
        (Scaling::ShardedBlocks, _) => a.scaled(ShardedScales::blocks(&of_a)),
        (Scaling::ShardedRows, _) => a.scaled(ShardedScales::rows(&of_rows)),
        (_, Some(scales)) => a.scaled(scales),
        (_, None) => (&a).into(),
    };
    let run = || {
        with_outputs::<T, O>(case, group, case.m(), |outputs| {
            product.run(operand, layer.weights(), outputs)
        })
    };
    let run = case.has_matrices().then_some(run);
    compare(group, supported, prepared, run)
}

fn scatter<T, W, O, V>(case: &Case, group: &Group<Host>) -> Result<()>
where
    T: Element,
    W: WeightOf<T>,
    O: OutputOf<T>,
    V: AddendOf<T>,
{
    let case = &only(case);
    let bias = case.bias::<T, V>(group)?;
    let builder = MatmulReduceScatter::<Host, T>::new().rows(&case.rows);
    let product = configured!(builder, case, &bias, W).output_dtype(O::DTYPE);
    let n = case.widths[0];
    let a = group.zeros::<T>(case.m(), case.k)?;
    let supported = product.supported(group, [case.m(), case.k], n);
    let prepared = product.prepare(&a, n);
    let layer = Layer::<W>::new(case, group)?;
    let scaled = Scaled::new(group, case.a_scaling, [case.m(), case.k], 1)?;
    let run = || {
        let rows = case.rows[group.rank()];
        with_outputs::<T, O>(case, group, rows, |outputs| {
            product.run(scaled.operand(&a), layer.weights(), outputs)
        })
    };
    let run = (!case.a_scaling.is_sharded()).then_some(run);
    compare(group, supported, prepared, run)
}

fn all_reduce<T, W, V>(case: &Case, group: &Group<Host>) -> Result<()>
where
    T: Element,
    W: WeightOf<T>,
    V: AddendOf<T>,
{
    let case = &only(case);
    let bias = case.bias::<T, V>(group)?;
    let product = configured!(MatmulAllReduce::<Host, T>::new(), case, &bias, W);
    let n = case.widths[0];
    let a = group.zeros::<T>(case.m(), case.k)?;
    let mut out = group.sharded_rows::<V>(&case.rows, n)?;
    let supported = product.supported(group, case.split(), n);
    let prepared = product.prepare(&a, &out);
    let layer = Layer::<W>::new(case, group)?;
    let scaled = Scaled::new(group, case.a_scaling, [case.m(), case.k], 1)?;
    let run = || product.run(scaled.operand(&a), layer.weights(), &mut out);
    let run = (!case.a_scaling.is_sharded()).then_some(run);
    compare(group, supported, prepared, run)
}

/// The case with one weight.
fn only(case: &Case) -> Case {
    Case {
        widths: vec![case.widths[0]],
        b_scaling: vec![case.b_scaling[0]],
        gated: false,
        quantization: None,
        ..case.clone()
    }
}

fn quantized(case: &Case, group: &Group<Host>) -> Result<()> {
    let rule = case.quantization.unwrap_or(Rule::Blocks(false));
    let operation = Quantize::<Host, bf16>::new().quantization(rule.quantization());
    let shape = [case.m(), case.k];
    let supported = operation.supported(group, shape);
    let prepared = operation.prepare(group, shape);
    let x = group.zeros::<bf16>(case.m(), case.k)?;
    let mut out = group.zeros::<F8E4M3>(case.m(), case.k)?;
    let mut scales = rule.scales(group, shape)?;
    let run = || operation.run(&x, &mut out, rule.by(&mut scales));
    compare(group, supported, prepared, Some(run))
}

fn check(case: &Case) -> Result<()> {
    let ranks = |group: Group<Host>| {
        let group = &group;
        if case.operation == Operation::Quantize {
            return quantized(case, group);
        }
        match case.types {
            Types::Bf16 => product::<bf16, bf16, bf16, bf16>(case, group),
            Types::Bf16ToF32 => product::<bf16, bf16, f32, bf16>(case, group),
            Types::F16 => product::<f16, f16, f16, f16>(case, group),
            Types::E4M3 => product::<F8E4M3, F8E4M3, bf16, bf16>(case, group),
            Types::E4M3ByE5M2ToF16 => product::<F8E4M3, F8E5M2, f16, bf16>(case, group),
            Types::E5M2ToF32 => product::<F8E5M2, F8E4M3, f32, bf16>(case, group),
            Types::E4M3ToE4M3 => product::<F8E4M3, F8E4M3, F8E4M3, bf16>(case, group),
        }
    };
    let builder = Group::<Host>::builder().numerics(case.numerics).workers(1);
    builder.threads(case.rows.len(), ranks).map(drop)
}

#[test]
fn what_is_supported_is_what_calls_do_and_what_is_not_is_their_error() {
    // PROPTEST_CASES asks for more.
    let mut config = ProptestConfig::default();
    config.cases = config.cases.max(400);
    config.failure_persistence = None;
    proptest!(config, |(case in cases())| {
        let done = check(&case);
        prop_assert!(done.is_ok(), "{}", done.unwrap_err());
    });
    let [yes, no, run] = [&YES, &NO, &RUN].map(|count| count.load(Ordering::Relaxed));
    println!("{yes} times yes, {no} times no, {run} runs");
    assert!(yes > 200 && no > 200 && run > 300);
}

#[test]
fn types_that_no_call_can_have_are_refused_as_when_a_call_is_prepared() -> Result<()> {
    use DType::{Bf16, F8E4M3, F8E5M2, F16, F32, U8};
    Group::<Host>::threads(1, |group| {
        for (weights, output) in [
            (Bf16, F16),
            (F8E4M3, Bf16),
            (Bf16, F8E4M3),
            (F8E5M2, F32),
            (U8, Bf16),
        ] {
            let product = Matmul::<Host, bf16>::new();
            let product = product.weight_dtype(weights).output_dtype(output);
            let supported = answer(product.supported(&group, [4, 32], 16));
            assert_ne!(supported, "Ok", "{weights} to {output}");
            assert_eq!(
                supported,
                answer(product.prepare((&group, [4, 32]), 16).map(drop))
            );
        }
        Ok::<_, Error>(())
    })
    .map(drop)
}

#[test]
fn an_answer_is_no_operation_and_a_no_is_no_failure() -> Result<()> {
    Group::<Host>::threads(2, |group| {
        let product = AllGatherMatmul::<Host, F8E4M3>::new();
        if group.rank() == 0 {
            // N of fp8 is a multiple of 16.
            product.supported(&group, [4, 32], 17).unwrap_err();
            product.supported(&group, (&[4], 32), 16).unwrap_err(); // of one rank
        }
        product.supported(&group, (&[3, 1], 32), 16)?;
        group.barrier()
    })
    .map(drop)
}
