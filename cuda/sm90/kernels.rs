//! The kernels of family sm90, and their limits.

use super::{KernelList, OperandTypes, Shape, Variant, symbol, variants};

/// The family of GPUs of compute capability 9.0.
#[derive(Debug)]
pub struct Sm90;

static TYPES: [OperandTypes; 3] = [
    OperandTypes {
        elements: &["bf16", "f16"],
        shapes: &HALF,
    },
    OperandTypes {
        elements: &["e4m3"],
        shapes: &FP8,
    },
    OperandTypes {
        elements: &["e4m3_e5m2", "e5m2_e4m3"],
        shapes: &MIXED_FP8,
    },
];

/// Shapes have about as many stages as shared memory holds beside the boxes. Wide tiles move the fewest bytes for a
/// product. In long products they do so in pairs, which share loads. Which width or height is best depends on how evenly
/// a problem's tiles fill the multiprocessors, so there are many of each. Tiles of any height but 64 and 128 swap the
/// operands (swap_ab). Narrow ones are for small problems, and for finer steps while rows arrive. Tiles of 64 rows and
/// fewer are for few rows, where the speed of reading `b` counts. They come in many widths too, because that speed needs
/// as many tiles as there are multiprocessors, or twice as many, and models' weights have few widths. The low ones have
/// deep rings, and a CTA that shares K has little to send.
#[rustfmt::skip]
const HALF: [Shape; 62] = [
    //    tile_m   tile_n   stages   cluster_m   cluster_n   split
    shape(   128,     256,       4,          2,          1,       1),
    shape(   128,     224,       4,          2,          1,       1),
    shape(   128,     192,       4,          2,          1,       1),
    shape(   128,     160,       5,          2,          1,       1),
    shape(   128,     128,       6,          2,          1,       1),
    shape(   112,     128,       7,          2,          1,       1),
    shape(   144,     128,       6,          2,          1,       1),
    shape(    64,      64,      12,          2,          2,       1),
    shape(    88,     128,       7,          4,          1,       1),
    shape(   128,     256,       4,          1,          1,       1),
    shape(   128,     208,       5,          1,          1,       1),
    shape(   128,     192,       4,          1,          1,       1),
    shape(   128,     160,       5,          1,          1,       1),
    shape(   128,     128,       6,          1,          1,       1),
    shape(   128,     112,       7,          1,          1,       1),
    shape(   128,      96,       7,          1,          1,       1),
    shape(   128,      80,       8,          1,          1,       1),
    shape(   128,      64,       8,          1,          1,       1),
    shape(    64,     256,       5,          1,          1,       1),
    shape(    64,     224,       5,          1,          1,       1),
    shape(    64,     160,       7,          1,          1,       1),
    shape(    64,     128,       8,          1,          1,       1),
    shape(    64,     112,       9,          1,          1,       1),
    shape(    64,      96,      10,          1,          1,       1),
    shape(    64,      80,      11,          1,          1,       1),
    shape(    64,      64,      12,          1,          1,       1),
    shape(    16,     128,      11,          1,          1,       1),
    shape(    32,     128,      10,          1,          1,       1),
    shape(    48,     128,       9,          1,          1,       1),
    shape(    16,      64,      20,          1,          1,       1),
    shape(    32,      64,      16,          1,          1,       1),
    shape(    48,      64,      15,          1,          1,       1),
    shape(    80,     128,       8,          1,          1,       1),
    shape(    96,     128,       7,          1,          1,       1),
    shape(   112,     128,       7,          1,          1,       1),
    shape(   144,     128,       6,          1,          1,       1),
    shape(   208,     128,       5,          1,          1,       1),
    shape(   240,     128,       4,          1,          1,       1),
    shape(    80,      64,      11,          1,          1,       1),
    shape(    96,      64,      10,          1,          1,       1),
    shape(   144,      64,       8,          1,          1,       1),
    shape(   176,      64,       7,          1,          1,       1),
    shape(   104,     128,       7,          1,          1,       1),
    shape(   136,     128,       6,          1,          1,       1),
    shape(   152,     128,       6,          1,          1,       1),
    shape(   168,     128,       5,          1,          1,       1),
    shape(    72,      64,      12,          1,          1,       1),
    shape(   136,      64,       8,          1,          1,       1),
    shape(   152,      64,       7,          1,          1,       1),
    shape(   128,     176,       5,          1,          1,       1),
    shape(   128,     128,       5,          1,          1,       2),
    shape(   128,      64,       7,          1,          1,       4),
    shape(    64,     128,       8,          1,          1,       2),
    shape(    64,     128,       7,          1,          1,       4),
    shape(    64,     256,       4,          1,          1,       2),
    shape(    16,     128,      11,          1,          1,       2),
    shape(    16,     128,      11,          1,          1,       4),
    shape(    16,     128,      11,          1,          1,       8),
    shape(    32,     128,      10,          1,          1,       2),
    shape(    32,     128,       9,          1,          1,       4),
    shape(    32,     128,       9,          1,          1,       8),
    shape(    48,     128,       8,          1,          1,       8),
];

/// For operands of 8 bits, whose sums are promoted: each consumer has a second set of accumulators. So few tiles are taken
/// by turns, and those with swap_ab are low. A ring has as many bytes as one of 16 bits, and twice as much of K.
#[rustfmt::skip]
const FP8: [Shape; 40] = [
    //    tile_m   tile_n   stages   cluster_m   cluster_n   split
    fp8(    128,     256,       4,          2,          1,       1),
    fp8(    128,     224,       4,          2,          1,       1),
    fp8(    128,     192,       4,          2,          1,       1),
    fp8(    128,     160,       5,          2,          1,       1),
    fp8(    128,     128,       6,          2,          1,       1),
    fp8(     64,     128,       8,          2,          1,       1),
    fp8(     64,      64,      12,          2,          2,       1),
    fp8(    128,     176,       5,          2,          1,       1),
    fp8(    128,     208,       4,          2,          1,       1),
    fp8(    128,     256,       4,          1,          1,       1),
    fp8(    128,     224,       4,          1,          1,       1),
    fp8(    128,     192,       4,          1,          1,       1),
    fp8(    128,     160,       5,          1,          1,       1),
    fp8(    128,     128,       6,          1,          1,       1),
    fp8(    128,      96,       7,          1,          1,       1),
    fp8(    128,      64,       8,          1,          1,       1),
    fp8(     64,     256,       5,          1,          1,       1),
    fp8(     64,     128,       8,          1,          1,       1),
    fp8(     64,      96,      10,          1,          1,       1),
    fp8(     64,      64,      12,          1,          1,       1),
    fp8(     16,     128,      11,          1,          1,       1),
    fp8(     32,     128,      10,          1,          1,       1),
    fp8(     48,     128,       9,          1,          1,       1),
    fp8(     16,      64,      20,          1,          1,       1),
    fp8(     32,      64,      16,          1,          1,       1),
    fp8(     48,      64,      14,          1,          1,       1),
    fp8(     80,     128,       7,          1,          1,       1),
    fp8(     96,     128,       7,          1,          1,       1),
    fp8(     80,      64,      11,          1,          1,       1),
    fp8(     96,      64,      10,          1,          1,       1),
    fp8(    128,     144,       6,          1,          1,       1),
    fp8(     72,      64,      12,          1,          1,       1),
    fp8(    128,     128,       5,          1,          1,       2),
    fp8(     64,     128,       7,          1,          1,       4),
    fp8(     16,     128,      11,          1,          1,       4),
    fp8(     16,     128,      11,          1,          1,       8),
    fp8(     32,     128,       9,          1,          1,       4),
    fp8(     32,     128,       9,          1,          1,       8),
    fp8(     48,     128,       8,          1,          1,       8),
    fp8(    128,      64,       7,          1,          1,       2),
];

/// For gradients, whose elements are of e5m2.
#[rustfmt::skip]
const MIXED_FP8: [Shape; 6] = [
    //    tile_m   tile_n   stages   cluster_m   cluster_n   split
    fp8(     128,     256,       4,          2,          1,       1),
    fp8(     128,     128,       6,          1,          1,       1),
    fp8(      64,     128,       8,          1,          1,       1),
    fp8(      16,     128,      11,          1,          1,       1),
    fp8(     128,     128,       5,          1,          1,       2),
    fp8(      16,     128,      11,          1,          1,       4),
];

/// A shape for elements of 16 bits.
const fn shape(
    tile_m: u32,
    tile_n: u32,
    stages: u32,
    cluster_m: u32,
    cluster_n: u32,
    split: u32,
) -> Shape {
    Shape {
        tile_m,
        tile_n,
        tile_k: STAGE_ROW / 2,
        stages,
        cluster_m,
        cluster_n,
        split,
    }
}

/// A shape for elements of 8 bits.
const fn fp8(
    tile_m: u32,
    tile_n: u32,
    stages: u32,
    cluster_m: u32,
    cluster_n: u32,
    split: u32,
) -> Shape {
    Shape {
        tile_k: STAGE_ROW,
        ..shape(tile_m, tile_n, stages, cluster_m, cluster_n, split)
    }
}

/// Bytes of shared memory that a CTA may have.
const SHARED_LIMIT: u32 = 232_448;
/// The barriers' share: of each stage, and of all others, with what stands beside them.
const STAGE_BARRIER_BYTES: u32 = 16;
const BARRIER_BYTES: u32 = 44;
/// What a warp stores at a time: 16 rows of 64 columns.
const BOX_COLUMNS: u32 = 64;
const BOX_BYTES: u32 = 16 * BOX_COLUMNS * 2;
/// Columns of a box of `b` that is given as [K, N].
pub const KN_COLUMNS: u32 = 64;
/// Those that multiply and store, of a CTA.
pub const CONSUMER_WARPS: u32 = 8;
/// Two warpgroups of them.
const CONSUMERS: u32 = 2;
/// The height of the instructions.
const BAND_ROWS: u32 = 64;
/// Bytes of a row of a stage.
const STAGE_ROW: u32 = 128;
/// Wider tiles have no registers for both ways to sum up fp8, so they always promote sums.
pub const FAST_COLUMNS: u32 = 176;
/// Columns of a row that have one scale, if outputs are quantised.
const QUANTIZED_COLUMNS: u32 = 128;
/// Rows of `b` that have one scale in a stage.
const SCALE_ROWS: u32 = 16;
/// The alignment of what shared memory holds.
const ALIGNMENT: u32 = 1024;

/// Whether rows of `b` are the instructions' rows, so that tiles may be of such a height.
pub fn swaps_ab(tile_m: u32) -> bool {
    ![BAND_ROWS, 2 * BAND_ROWS].contains(&tile_m)
}

/// Whether the consumers take tiles by turns, each alone (pingpong). Then one stores while the other multiplies. Else
/// they share each tile. It needs registers for a whole tile's accumulators. CTAs that share K meet after each tile,
/// and partial sums are moved between the products of two tiles, so these gain nothing by it. If sums are promoted, the
/// tensor cores would wait for that where consumers take turns, so only few rows gain.
pub fn is_pingpong(tile: [u32; 3], split: u32, variant: Variant) -> bool {
    let [tile_m, tile_n, tile_k] = tile;
    let most = match variant {
        Variant::LowLatency | Variant::Sums => 0,
        _ if promotes(tile_k) => 64 * 96,
        Variant::Forms => 128 * 128,
        Variant::Plain | Variant::Alone => 128 * 176,
    };
    split == 1 && tile_m * tile_n <= most
}

/// Whether a product's kernel can make scales of its outputs: each warp has whole blocks of columns or, with swap_ab, the
/// warps of a tile have one together. Then K must not be in slices, because each warp finishes its part apart.
pub fn quantizes(tile: [u32; 3], split: u32, gated: bool) -> bool {
    let [tile_m, tile_n, tile_k] = tile;
    let has_blocks = if swaps_ab(tile_m) {
        tile_n == QUANTIZED_COLUMNS && split == 1 && !gated
    } else {
        let halves = u32::from(is_side_by_side(tile, split)) + u32::from(gated);
        (tile_n >> halves).is_multiple_of(QUANTIZED_COLUMNS)
    };
    promotes(tile_k) && has_blocks
}

/// Whether both consumers of a product have half of a tile's columns each, because it has only one band.
fn is_side_by_side(tile: [u32; 3], split: u32) -> bool {
    tile[0] == BAND_ROWS && !is_pingpong(tile, split, Variant::Forms)
}

/// Whether a step through K is one of elements of 8 bits, whose sums are promoted and scaled.
pub fn promotes(tile_k: u32) -> bool {
    tile_k == STAGE_ROW
}

/// Rows and columns of a tile, and columns of a step through K.
fn tile_of(shape: &Shape) -> [u32; 3] {
    [shape.tile_m, shape.tile_n, shape.tile_k]
}

/// Whether both consumers can have a half of each tile: its rows, or whole boxes of its columns.
fn is_shared(shape: &Shape) -> bool {
    if shape.tile_m == BAND_ROWS {
        shape.tile_n.is_multiple_of(2 * BOX_COLUMNS)
    } else {
        shape.tile_m == 2 * BAND_ROWS || shape.tile_n >= 2 * BOX_COLUMNS
    }
}

/// Whether a gated product can use it; if it swaps operands, without slices of K. Not the narrowest of tiles with
/// many rows, half of which is no box of the stores. In fp8, 16 rows of `b` have one scale. With swap_ab, the CTA that
/// finishes gate's columns needs the warp of up's too.
pub fn is_gated(shape: &Shape) -> bool {
    let has_scales = !promotes(shape.tile_k) || gate_rows(shape).is_multiple_of(SCALE_ROWS);
    if swaps_ab(shape.tile_m) {
        shape.split <= CONSUMER_WARPS / 2
    } else {
        has_scales && (shape.tile_m == BAND_ROWS || shape.tile_n >= 2 * BOX_COLUMNS)
    }
}

/// Rows of gate, and then of up, that a gated tile has of `b` by turns.
pub fn gate_rows(shape: &Shape) -> u32 {
    match (
        swaps_ab(shape.tile_m),
        is_side_by_side(tile_of(shape), shape.split),
    ) {
        (true, _) => BAND_ROWS / 2,
        (_, true) => shape.tile_n / 4,
        (_, false) => shape.tile_n / 2,
    }
}

/// Rows of gate, and of up, that are loaded at a time: of the boxes of their maps.
pub fn gate_box(shape: &Shape) -> u32 {
    gate_rows(shape).min(shape.tile_n / shape.cluster_m)
}

/// Whether `b` may be given as [K, N]: then each CTA that shares loads has whole boxes of it. A gated product needs
/// besides that [`gate_rows`] is a multiple of 64.
pub fn takes_kn(shape: &Shape) -> bool {
    (shape.tile_n / shape.cluster_m).is_multiple_of(KN_COLUMNS)
}

/// Boxes that each consumer warp can use.
fn most_boxes(shape: &Shape) -> u32 {
    match (
        swaps_ab(shape.tile_m),
        is_side_by_side(tile_of(shape), shape.split),
    ) {
        // It lays out rows in one box, and stores them itself.
        (true, _) => 1,
        (_, true) => (shape.tile_n / CONSUMERS).div_ceil(BOX_COLUMNS),
        (_, false) => shape.tile_n.div_ceil(BOX_COLUMNS),
    }
}

/// Boxes that each consumer warp has to store through: as many as it can use and as the rest leaves room for.
fn boxes(shape: &Shape) -> u32 {
    let free = SHARED_LIMIT.saturating_sub(bytes_beside_boxes(shape));
    (free / (CONSUMER_WARPS * BOX_BYTES)).min(most_boxes(shape))
}

/// The stages, the scales of operands of 8 bits, what CTAs send one another, and the barriers.
fn bytes_beside_boxes(shape: &Shape) -> u32 {
    let ring = (shape.tile_m + shape.tile_n) * STAGE_ROW;
    let scales = if promotes(shape.tile_k) {
        (shape.tile_m + shape.tile_n / SCALE_ROWS) * size_of::<f32>() as u32
    } else {
        0
    };
    let stages = shape.stages * (ring + scales + STAGE_BARRIER_BYTES);
    stages + sum_bytes(shape) + BARRIER_BYTES
}

/// What the CTAs that share a tile send one another.
fn sum_bytes(shape: &Shape) -> u32 {
    (shape.split - 1) * shape.tile_m / shape.split * shape.tile_n * size_of::<f32>() as u32
}

/// Why there cannot be kernels of `shape`: what their source asserts, and what it takes for granted. `before`: the
/// shapes before it in the list. None if there can be.
fn refused(shape: &Shape, before: &[Shape]) -> Option<&'static str> {
    let alike = |other: &Shape| {
        let of = |s: &Shape| (s.tile_m, s.tile_n, s.stages);
        let key = |s: &Shape| (of(s), s.cluster_m, s.cluster_n, s.split);
        key(other) == key(shape)
    };
    let is_taken_whole = || is_pingpong(tile_of(shape), shape.split, Variant::Forms);
    let of_few = |ctas: u32| [1, 2, 4].contains(&ctas);
    // Small enough for the sums below.
    let refused = if !(64..=256).contains(&shape.tile_n) || !shape.tile_n.is_multiple_of(16) {
        "tile_n is a multiple of 16 from 64 to 256"
    } else if swaps_ab(shape.tile_m)
        && !((shape.tile_n == CONSUMERS * BAND_ROWS
            || shape.tile_n == BAND_ROWS && is_taken_whole())
            && (16..=256).contains(&shape.tile_m)
            && shape.tile_m.is_multiple_of(8))
    {
        "tile_m is 64 or 128, or a multiple of 8 up to 256 and tile_n 128, or 64 where consumers take turns"
    } else if shape.tile_m == BAND_ROWS && !(is_shared(shape) || is_taken_whole()) {
        "tile_n of 64 rows is a multiple of 128, unless consumers take turns"
    } else if !(2..=64).contains(&shape.stages) {
        "a product runs while the next stage is loaded: there are 2 stages or more, 64 at the most"
    } else if !(of_few(shape.cluster_m) && of_few(shape.cluster_n))
        || !(of_few(shape.split) || shape.split == 8)
    {
        "cluster_m and cluster_n are 1, 2 or 4, and split one of these or 8"
    } else if shape.cluster_m * shape.cluster_n > 1 && shape.split > 1 {
        "CTAs share loads or K, not both: a cluster or split is 1"
    } else if shape.ctas() > 8 {
        "a cluster has 8 CTAs at the most"
    } else if !(shape.tile_m / shape.cluster_n).is_multiple_of(8)
        || !(shape.tile_n / shape.cluster_m).is_multiple_of(8)
    {
        "tile_m and tile_n over cluster_n and cluster_m are multiples of 8"
    } else if boxes(shape) == 0 {
        "its stages leave no room in shared memory for the boxes of the stores"
    } else if before.iter().any(alike) {
        "it stands in the list twice"
    } else {
        return None;
    };
    Some(refused)
}

/// The line of the source that defines a kernel: a macro of matmul.cuh.
fn line(elements: &str, shape: &Shape, variant: Variant) -> String {
    let head = match variant {
        Variant::Sums => "GEMMESH_MATMUL_SUMS",
        _ => "GEMMESH_MATMUL",
    };
    format!(
        "{head}({}, {}, {}, gemmesh::{elements}, {}, {}, {}, {}, {}, {}, {}, {}, gemmesh::Variant::k{variant:?})",
        symbol(elements, shape, variant),
        Sm90.shared_bytes(shape),
        shape.ctas(),
        shape.tile_m,
        shape.tile_n,
        shape.stages,
        shape.cluster_m,
        shape.cluster_n,
        shape.split,
        is_pingpong(tile_of(shape), shape.split, variant),
        boxes(shape),
    )
}

impl KernelList for Sm90 {
    fn name(&self) -> &'static str {
        "sm90"
    }

    fn arch(&self) -> &'static str {
        "90a"
    }

    fn threads(&self) -> u32 {
        384
    }

    fn types(&self) -> &'static [OperandTypes] {
        &TYPES
    }

    /// Partials are not added by those that swap operands, and few rows fit one low tile. Both consumers have a half of
    /// each tile whose partials are moved. None of these has CTAs that share `a`.
    fn has_variant(&self, shape: &Shape, variant: Variant) -> bool {
        let is_shared = is_shared(shape) && shape.cluster_n == 1;
        let is_low = shape.tile_m * shape.cluster_m <= BAND_ROWS;
        match variant {
            Variant::Forms | Variant::Plain | Variant::Alone => true,
            Variant::LowLatency => is_low && is_shared,
            Variant::Sums => !swaps_ab(shape.tile_m) && is_shared,
        }
    }

    /// The kernel static_asserts the same size.
    fn shared_bytes(&self, shape: &Shape) -> u32 {
        let boxes = CONSUMER_WARPS * boxes(shape) * BOX_BYTES;
        (bytes_beside_boxes(shape) + boxes).next_multiple_of(ALIGNMENT)
    }

    fn source(&self, elements: &str, shapes: &[&Shape]) -> String {
        let threads = self.threads();
        let mut source = format!(
            "#include \"cuda/sm90/matmul.cuh\"\n\
             static_assert(GEMMESH_THREADS == {threads}, \"cuda/sm90/kernels.rs says so\");\n"
        );
        for shape in shapes {
            for variant in variants(self, shape) {
                source += &line(elements, shape, variant);
                source.push('\n');
            }
        }
        source
    }

    fn check(&self, shapes: &[Shape]) -> Result<(), String> {
        for (index, shape) in shapes.iter().enumerate() {
            if let Some(reason) = refused(shape, &shapes[..index]) {
                return Err(format!("family {}, {shape:?}: {reason}", self.name()));
            }
        }
        Ok(())
    }
}
