//! The products of a decoding step, back to back from one CUDA graph, beside cuBLASLt's.

use std::path::Path;

use gemmesh::products::PreparedMatmul;
use gemmesh::views::MatrixView;
use gemmesh::{Activation, Cuda, DType, Group, Matmul, Matrix, Result, bf16};
use rayon::prelude::*;
use serde_json::json;

use super::clock::{self, Graph, Timer};
use super::memory::{Place, Scratch};
use super::peers::{Problem, Product};
use super::{CublasLt, Rc};
use crate::common::{self, Check, Factors, Failure, random, rows_within, sample_rows};
use crate::forms::{Number, compare, in_blocks};
use crate::{PRODUCTS, append, commit, sweep, unix_time};

/// A model: its width, the columns of Q, K and V together, and the width of its MLP.
type Model = (&'static str, [usize; 3]);
const MODELS: [Model; 2] = [
    ("Llama 3 8B", [4096, 6144, 14336]),
    ("Llama 3 70B", [8192, 10240, 28672]),
];
/// GPUs that a layer is split over.
const PARTS: [usize; 4] = [1, 2, 4, 8];
const ROWS: [usize; 4] = [1, 8, 16, 64];
/// Layers in a row, each with weights of its own.
const LAYERS: usize = 2;
/// The title and the key of each variant.
const VARIANTS: [(&str, &str); 3] = [
    ("cuBLASLt", "cublaslt_us"),
    ("gemmesh", "gemmesh_us"),
    ("gemmesh, constant weights", "constant_weights_us"),
];

/// The extents of a layer's part on one GPU.
#[derive(Clone, Copy)]
struct Extents {
    width: usize,
    qkv: usize,
    /// Columns of attention's output.
    attention: usize,
    mlp: usize,
}

impl Extents {
    fn new([width, qkv, mlp]: [usize; 3], parts: usize) -> Extents {
        Extents {
            width,
            qkv: qkv / parts,
            attention: width / parts,
            mlp: mlp / parts,
        }
    }

    /// N and K of QKV, attention's output, gate and up together, and down.
    fn weights(&self) -> [[usize; 2]; 4] {
        [
            [self.qkv, self.width],
            [self.width, self.attention],
            [2 * self.mlp, self.width],
            [self.width, self.mlp],
        ]
    }

    /// Bytes of a layer's weights.
    fn bytes(&self) -> usize {
        let elements = self.weights().into_iter().map(|[n, k]| n * k);
        elements.sum::<usize>() * size_of::<bf16>()
    }
}

/// A layer's weights, as [`Extents::weights`].
type Layer = [Matrix<Cuda, bf16>; 4];

/// The elements of a layer's weight. The numbers are such that those of an output are about as large as the input's.
fn weight(layer: usize, number: usize, [n, k]: [usize; 2]) -> Vec<bf16> {
    let mut values: Vec<bf16> = random(n * k, (1 + 4 * layer + number) as u64);
    let scale = (k as f32).sqrt().recip();
    let scaled = values.par_iter_mut();
    scaled.for_each(|value| *value = bf16::from_f32(value.to_f32() * scale));
    values
}

/// The layers' matrices of `m` rows.
struct Rows {
    /// The input of each layer, and the output of the last.
    layers: Vec<Matrix<Cuda, bf16>>,
    /// The first columns stand for attention's output.
    qkv: Matrix<Cuda, bf16>,
    mixed: Matrix<Cuda, bf16>,
    gated: Matrix<Cuda, bf16>,
    /// cuBLASLt's products of gate and up, side by side.
    gate_and_up: Scratch,
}

impl Rows {
    fn new(group: &Group<Cuda>, m: usize, extents: Extents) -> Result<Rows> {
        let empty = |n: usize| group.zeros(m, n);
        let input = group.upload(&random(m * extents.width, 99), m, extents.width)?;
        let outputs = (0..LAYERS).map(|_| empty(extents.width));
        Ok(Rows {
            layers: [Ok(input)]
                .into_iter()
                .chain(outputs)
                .collect::<Result<_>>()?,
            qkv: empty(extents.qkv)?,
            mixed: empty(extents.width)?,
            gated: empty(extents.mlp)?,
            gate_and_up: Scratch::new(m * 2 * extents.mlp * size_of::<bf16>())?,
        })
    }

    /// Overwrites all but the input.
    fn poison(&mut self) -> Result<()> {
        let own = [&mut self.qkv, &mut self.mixed, &mut self.gated];
        for matrix in self.layers[1..].iter_mut().chain(own) {
            let [m, n] = matrix.shape();
            matrix.copy_from_host(&vec![bf16::NAN; m * n])?;
        }
        Ok(())
    }
}

/// A layer's products, prepared.
struct Prepared {
    products: [PreparedMatmul<'static, Cuda, bf16>; 4],
    extents: Extents,
}

impl Prepared {
    fn new(
        group: &Group<Cuda>,
        m: usize,
        extents: Extents,
        constant_weights: bool,
    ) -> Result<Prepared> {
        let product = || match constant_weights {
            true => Matmul::new().constant_weights(),
            false => Matmul::new(),
        };
        let [qkv, out, [_, width], down] = extents.weights();
        let plain = |[n, k]: [usize; 2]| product().prepare((group, [m, k]), n);
        let gated = product().gated().activation(Activation::Silu);
        let widths = [extents.mlp; 2];
        Ok(Prepared {
            products: [
                plain(qkv)?,
                plain(out)?,
                gated.prepare((group, [m, width]), widths)?,
                plain(down)?,
            ],
            extents,
        })
    }

    /// Enqueues all layers.
    fn run(&self, layers: &[Layer], rows: &mut Rows) -> Result<()> {
        let [qkv, out, gated, down] = &self.products;
        for (number, weights) in layers.iter().enumerate() {
            let (inputs, outputs) = rows.layers.split_at_mut(number + 1);
            let gate_and_up = halves(&weights[2], self.extents.mlp)?;
            qkv.run(&inputs[number], &weights[0], &mut rows.qkv)?;
            let attention = rows.qkv.columns(0..self.extents.attention)?;
            out.run(attention, &weights[1], &mut rows.mixed)?;
            let gate_and_up: gemmesh::products::Weights<_, _> = gate_and_up.into_iter().collect();
            gated.run(&rows.mixed, gate_and_up, &mut rows.gated)?;
            down.run(&rows.gated, &weights[3], &mut outputs[0])?;
        }
        Ok(())
    }

    /// Compares all products of the last layer with float64.
    fn check(&self, rows: &Rows) -> Result<Check> {
        let last = LAYERS - 1;
        let mut check = Check::default();
        let input = rows.layers[last].to_vec()?;
        let qkv = rows.qkv.to_vec()?;
        let heads = qkv.chunks_exact(self.extents.qkv);
        let attention: Vec<bf16> = heads
            .flat_map(|row| &row[..self.extents.attention])
            .copied()
            .collect();
        let (mixed, gated) = (rows.mixed.to_vec()?, rows.gated.to_vec()?);
        let output = rows.layers[last + 1].to_vec()?;
        let m = input.len() / self.extents.width;
        let products = [
            (input, &qkv),
            (attention, &mixed),
            (mixed.clone(), &gated),
            (gated.clone(), &output),
        ];
        for (number, (a, out)) in products.iter().enumerate() {
            let [n, k] = self.extents.weights()[number];
            let b = weight(last, number, [n, k]);
            let chosen = sample_rows(m, rows_within(PRODUCTS, n, k), 7);
            let factors = [Factors::new(a, &b, k)];
            let sums = (k as f64).sqrt() * 2f64.powi(-23);
            let exact = in_blocks(&factors, &chosen, n, |exact| Number {
                exact: exact.value,
                off: sums * exact.magnitude,
            });
            let (exact, n) = match number {
                2 => (gate(&exact, n), n / 2),
                _ => (exact, n),
            };
            compare(&mut check, &exact, out, &chosen, n);
        }
        Ok(check)
    }
}

/// The two weights that lie one after the other, each of `n` rows.
fn halves(weight: &Matrix<Cuda, bf16>, n: usize) -> Result<[MatrixView<'_, Cuda, bf16>; 2]> {
    Ok([weight.rows(0..n)?, weight.rows(n..2 * n)?])
}

/// `silu(gate) * up` of rows whose first halves are gate's.
fn gate(products: &[Number], n: usize) -> Vec<Number> {
    let rows = products.chunks_exact(n);
    let row = |row: &[Number]| -> Vec<Number> {
        let (gate, up) = row.split_at(n / 2);
        let both = gate.iter().zip(up);
        both.map(|(gate, up)| gate.activated(Activation::Silu, false).times(*up))
            .collect()
    };
    rows.flat_map(row).collect()
}

/// The same products by cuBLASLt, each by its fastest algorithm. Gate and up are one product without an activation.
/// Down takes the first half of it.
fn cublaslt(
    library: &Rc<CublasLt>,
    timer: &Timer,
    layers: &[Layer],
    rows: &Rows,
    extents: Extents,
) -> Result<Vec<Product>> {
    let [m, _] = rows.mixed.shape();
    let gate_and_up = Place {
        ptr: rows.gate_and_up.ptr(),
        pitch: 2 * extents.mlp,
        dtype: DType::Bf16,
    };
    let mut products: Vec<Product> = Vec::new();
    for (number, weights) in layers.iter().enumerate() {
        let [input, output] = [number, number + 1].map(|layer| Place::of(&rows.layers[layer]));
        let [qkv, mixed] = [&rows.qkv, &rows.mixed].map(Place::of);
        let places = [
            [input, qkv],
            [qkv, mixed],
            [mixed, gate_and_up],
            [gate_and_up, output],
        ];
        for (index, [a, out]) in places.into_iter().enumerate() {
            let ([n, k], b) = (extents.weights()[index], Place::of(&weights[index]));
            let mut product = Product::new(library, &Problem::new(a, b, out, [m, n, k]))?;
            match number {
                0 => product.tune(timer)?,
                _ => product.chosen = products[index].chosen,
            }
            products.push(product);
        }
    }
    Ok(products)
}

/// The median times of [`VARIANTS`] for `m` rows, each from a graph, with cold caches.
fn time(
    group: &Group<Cuda>,
    (timer, library): (&Timer, &Rc<CublasLt>),
    layers: &[Layer],
    m: usize,
    extents: Extents,
    [warmup, iters]: [usize; 2],
) -> Result<[f64; VARIANTS.len()], Failure> {
    let mut rows = Rows::new(group, m, extents)?;
    let products = cublaslt(library, timer, layers, &rows, extents)?;
    let run_all = || products.iter().try_for_each(|one| one.run(timer.stream));
    let mut graphs = vec![Graph::capture(timer.stream, run_all)?];
    for constant_weights in [false, true] {
        let prepared = Prepared::new(group, m, extents, constant_weights)?;
        // This makes the kernels' tables, which no capture can.
        prepared.run(layers, &mut rows)?;
        group.synchronize()?;
        rows.poison()?;
        let graph = Graph::capture(timer.stream, || prepared.run(layers, &mut rows))?;
        graph.launch(timer.stream)?;
        timer.time(|| Ok(()))?;
        let check = prepared.check(&rows)?;
        if !check.ok() {
            return Err(Failure::Wrong(check));
        }
        graphs.push(graph);
    }
    let mut samples = Vec::new();
    for round in 0..warmup + iters {
        let mut times = [0.0; VARIANTS.len()];
        for (time, graph) in times.iter_mut().zip(&graphs) {
            *time = timer.time(|| graph.launch(timer.stream))?;
        }
        if round >= warmup {
            samples.push(times);
        }
    }
    Ok(common::medians(&common::slowest(group, &samples)?))
}

/// Prints what is timed, and the titles of the table.
fn print_head(group: &Group<Cuda>, iters: usize) {
    println!(
        "The products of {LAYERS} layers from a graph, {}, microseconds: medians of {iters} rounds.\n",
        group.device_name()
    );
    let titles = VARIANTS.map(|(title, _)| title).join(" | ");
    println!(
        "| | GPUs | MB | M | {titles} | / cuBLASLt | |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    );
}

/// Times the layers of all models, and prints how many microseconds they take. Collective.
pub fn run(group: &Group<Cuda>, rounds: [usize; 2], json: Option<&Path>) -> Result<(), Failure> {
    clock::bind(group)?;
    let (timer, library) = (Timer::new(group)?, Rc::new(CublasLt::new()?));
    if group.rank() == 0 {
        print_head(group, rounds[1]);
    }
    let mut ratios = [const { Vec::new() }; 2];
    for (model, extents) in MODELS {
        for parts in PARTS {
            let extents = Extents::new(extents, parts);
            let upload = |layer: usize, number: usize| -> Result<_> {
                let [n, k] = extents.weights()[number];
                group.upload(&weight(layer, number, [n, k]), n, k)
            };
            let layer = |layer: usize| -> Result<Layer> {
                let one = |number| upload(layer, number);
                Ok([one(0)?, one(1)?, one(2)?, one(3)?])
            };
            let layers: Vec<Layer> = (0..LAYERS).map(layer).collect::<Result<_>>()?;
            for m in ROWS {
                let times = time(group, (&timer, &library), &layers, m, extents, rounds)
                    .map_err(|failure| failure.of(format!("{model} by {parts}, M = {m}")))?;
                let of = [times[1] / times[0], times[2] / times[0]];
                ratios
                    .iter_mut()
                    .zip(of)
                    .for_each(|(all, ratio)| all.push(ratio));
                if group.rank() > 0 {
                    continue;
                }
                let megabytes = LAYERS * extents.bytes() / 1_000_000;
                let [theirs, own, constant] = times;
                println!(
                    "| {model} | {parts} | {megabytes} | {m} | {theirs:.1} | {own:.1} | {constant:.1} | {:.3} | {:.3} |",
                    of[0], of[1]
                );
                if let Some(path) = json {
                    let mut line = json!({
                        "op": "decoding", "backend": "cuda", "model": model, "parts": parts, "m": m, "dtype": "bf16",
                        "layers": LAYERS, "ok": true, "commit": commit(), "iters": rounds[1], "unix_time": unix_time(),
                        "gpu": group.device_name(),
                    });
                    let fields = VARIANTS.iter().zip(times);
                    fields.for_each(|(&(_, key), time)| line[key] = json!(time));
                    append(path, &line.to_string())?;
                }
            }
        }
    }
    if group.rank() == 0 {
        for ((title, _), ratios) in VARIANTS[1..].iter().zip(&ratios) {
            let mean = sweep::geometric_mean(ratios).unwrap_or(f64::NAN);
            let worst = sweep::percentile(ratios, 1.0).unwrap_or(f64::NAN);
            println!("\n{title} / cuBLASLt: geometric mean {mean:.3}, worst {worst:.3}");
        }
    }
    Ok(())
}
