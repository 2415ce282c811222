//! Where bits may depend on K alone, an element has the bits that its row and its column give, in every product.

use std::fmt::Debug;
use std::ops::Range;

use gemmesh::elements::{AddendOf, Element, Float, OutputOf, WeightOf};
use gemmesh::products::WeightLayout;
use gemmesh::tuning::Numerics;
use gemmesh::{
    Activation, AllGatherMatmul, Error, F8E4M3, Group, Matmul, Matrix, bf16, f16,
    matmul_all_reduce, matmul_reduce_scatter,
};

use crate::support::numbers::normal;
use crate::support::tested::{Tested, all_done, ranks};

/// Rows and columns of the product that has all elements. Sixteen of its columns follow the host's last whole tile; of the part 0..257 one does.
const WHOLE: [usize; 2] = [37, 272];
/// Rows of parts of it.
const ROWS: [Range<usize>; 4] = [0..37, 0..1, 36..37, 3..20];
/// Columns of parts of it.
const COLUMNS: [Range<usize>; 9] = [
    0..1,
    271..272,
    0..257,
    5..7,
    30..47,
    16..32,
    8..16,
    0..272,
    256..272,
];

/// The operands of the whole product, and the product.
struct Whole<T, O> {
    k: usize,
    a: Vec<T>,
    /// [N, K]
    b: Vec<T>,
    up: Vec<T>,
    product: Vec<O>,
    gated: Vec<O>,
}

fn on<B: Tested, T: Element>(
    group: &Group<B>,
    values: &[T],
    columns: usize,
) -> Result<Matrix<B, T>, Error> {
    group.upload(values, values.len() / columns, columns)
}

/// The second half of each row becomes `sign` times the first.
///
/// So a sum over K takes away what it has added. Rounding errors are left, which another order of summing changes.
fn mirrored<T: Element>(mut values: Vec<T>, k: usize, sign: f32) -> Vec<T> {
    for row in values.chunks_mut(k) {
        let (first, second) = row.split_at_mut(k / 2);
        for (to, from) in second.iter_mut().zip(first) {
            *to = T::from_f32(sign * from.to_f32());
        }
    }
    values
}

impl<T, O> Whole<T, O>
where
    T: Element + WeightOf<T>,
    O: OutputOf<T> + AddendOf<T> + Float + Debug,
{
    fn new<B: Tested>(group: &Group<B>, k: usize, seed: u64) -> Result<Self, Error> {
        let [m, n] = WHOLE;
        let a = mirrored(normal::<T>(seed, m * k), k, 1.0);
        let b = mirrored(normal::<T>(seed + 1, n * k), k, -1.0);
        let up = normal::<T>(seed + 2, n * k);
        let mut out = group.zeros::<O>(m, n)?;
        let (of_a, of_b, of_up) = (on(group, &a, k)?, on(group, &b, k)?, on(group, &up, k)?);
        Matmul::new().run(&of_a, &of_b, &mut out)?;
        let product = out.to_vec()?;
        gated().run(&of_a, [&of_b, &of_up], &mut out)?;
        Ok(Whole {
            k,
            a,
            b,
            up,
            product,
            gated: out.to_vec()?,
        })
    }

    fn a(&self, rows: &Range<usize>) -> &[T] {
        &self.a[rows.start * self.k..rows.end * self.k]
    }

    fn b(&self, columns: &Range<usize>) -> &[T] {
        &self.b[columns.start * self.k..columns.end * self.k]
    }

    /// By one rank alone: one weight, a gate, several weights of the first half, the second and both.
    fn check_alone<B: Tested>(&self, group: &Group<B>, part: &Part) -> Result<(), Error> {
        let Part { rows, columns } = part;
        let (m, n, k) = (rows.len(), columns.len(), self.k);
        let a = on(group, self.a(rows), k)?;
        let b = on(group, self.b(columns), k)?;
        let up = on(group, &self.up[columns.start * k..columns.end * k], k)?;
        let mut out = group.zeros::<O>(m, n)?;
        Matmul::new().run(&a, &b, &mut out)?;
        part.check("matmul", &self.product, &out.to_vec()?);
        gated().run(&a, [&b, &up], &mut out)?;
        part.check("gated", &self.gated, &out.to_vec()?);
        let half = (n / 2).next_multiple_of(if T::DTYPE.bytes() == 1 { 16 } else { 1 });
        if (1..n).contains(&half) {
            let (mut first, mut second) = (group.zeros::<O>(m, half)?, group.zeros(m, n - half)?);
            let weights = [b.rows(0..half)?, b.rows(half..n)?, b.view()];
            let operation = Matmul::new();
            operation.run(&a, weights, [&mut first, &mut second, &mut out])?;
            let [left, right] = part.halves(half);
            left.check("the first of several", &self.product, &first.to_vec()?);
            right.check("the second of several", &self.product, &second.to_vec()?);
            part.check("the third of several", &self.product, &out.to_vec()?);
        }
        Ok(())
    }

    /// A weight [K, N].
    fn check_turned<B: Tested>(&self, group: &Group<B>, part: &Part) -> Result<(), Error> {
        let Part { rows, columns } = part;
        let k = self.k;
        let b = self.b(columns);
        let turned = (0..k).flat_map(|step| b.iter().skip(step).step_by(k).copied());
        let turned = turned.collect::<Vec<T>>();
        let a = on(group, self.a(rows), k)?;
        let b = on(group, &turned, columns.len())?;
        let mut out = group.zeros::<O>(rows.len(), columns.len())?;
        let operation = Matmul::new().weight_layout(WeightLayout::Kn);
        operation.run(&a, &b, &mut out)?;
        part.check("a weight [K, N]", &self.product, &out.to_vec()?);
        Ok(())
    }

    /// Rows of all ranks.
    fn check_gathered<B: Tested>(&self, group: &Group<B>, part: &Part) -> Result<(), Error> {
        let Part { rows, columns } = part;
        let k = self.k;
        let mut a = group.sharded::<T>(rows.len(), k)?;
        let own = a.rows();
        let values = self.a(rows);
        a.shard_mut()
            .copy_from_host(&values[own.start * k..own.end * k])?;
        let b = on(group, self.b(columns), k)?;
        let mut out = group.zeros::<O>(rows.len(), columns.len())?;
        AllGatherMatmul::new().run(&a, &b, &mut out)?;
        part.check("all_gather_matmul", &self.product, &out.to_vec()?);
        Ok(())
    }
}

fn gated<'a, B: Tested, T: Element>() -> Matmul<'a, B, T> {
    Matmul::new().gated().activation(Activation::Silu)
}

/// The sums over the ranks, of which each has a [`Whole`] of its own. `whole`: their sum.
fn check_sums<B, T, O>(
    group: &Group<B>,
    part: &Part,
    own: &Whole<T, O>,
    whole: &[O],
) -> Result<(), Error>
where
    B: Tested,
    T: Element + WeightOf<T>,
    O: OutputOf<T> + AddendOf<T> + Float + Debug,
{
    let Part { rows, columns } = part;
    let (m, n) = (rows.len(), columns.len());
    let a = on(group, own.a(rows), own.k)?;
    let b = on(group, own.b(columns), own.k)?;
    let mut all = group.sharded::<O>(m, n)?;
    matmul_all_reduce(&a, &b, &mut all)?;
    part.check("matmul_all_reduce", whole, &all.to_vec()?);
    let mine = all.rows();
    let mut out = group.zeros::<O>(mine.len(), n)?;
    matmul_reduce_scatter(&a, &b, &mut out)?;
    let of_mine = Part {
        rows: rows.start + mine.start..rows.start + mine.end,
        columns: columns.clone(),
    };
    of_mine.check("matmul_reduce_scatter", whole, &out.to_vec()?);
    Ok(())
}

/// A part of the product.
struct Part {
    rows: Range<usize>,
    columns: Range<usize>,
}

impl Part {
    fn all() -> impl Iterator<Item = Part> {
        ROWS.into_iter().flat_map(|rows| {
            COLUMNS.map(|columns| Part {
                rows: rows.clone(),
                columns,
            })
        })
    }

    fn halves(&self, first: usize) -> [Part; 2] {
        let Range { start, end } = self.columns;
        [start..start + first, start + first..end].map(|columns| Part {
            rows: self.rows.clone(),
            columns,
        })
    }

    fn is_multiple_of(&self, columns: usize) -> bool {
        self.columns.len().is_multiple_of(columns)
    }

    #[track_caller]
    fn check<O: Float + Debug>(&self, what: &str, whole: &[O], found: &[O]) {
        let [_, n] = WHOLE;
        let Part { rows, columns } = self;
        let expected = rows
            .clone()
            .flat_map(|row| &whole[row * n..][columns.clone()]);
        let bits = |value: &O| value.to_f32().to_bits();
        let is_same = expected.map(bits).eq(found.iter().map(bits));
        assert!(is_same, "{what}: rows {rows:?}, columns {columns:?}");
    }
}

/// All operations on the ranks of a group. `multiple`: N of which weights [N, K] are multiplied, and N of what lies in
/// rows of N elements.
fn check_all<B, T, O>(
    group: &Group<B>,
    k: usize,
    [multiple, multiple_of_rows]: [usize; 2],
) -> Result<(), Error>
where
    B: Tested,
    T: Element + WeightOf<T>,
    O: OutputOf<T> + AddendOf<T> + Float + Debug,
{
    let wholes = (0..group.world_size()).map(|rank| Whole::new(group, k, 10 * rank as u64 + 1));
    let wholes = wholes.collect::<Result<Vec<Whole<T, O>>, Error>>()?;
    let sum = |index: usize| {
        let addends = wholes.iter().map(|whole| whole.product[index].to_f32());
        O::from_f32(addends.reduce(|sum, addend| sum + addend).unwrap_or(0.0))
    };
    let sums: Vec<O> = (0..wholes[0].product.len()).map(sum).collect();
    let own = &wholes[group.rank()];
    for part in Part::all().filter(|part| part.is_multiple_of(multiple)) {
        own.check_alone(group, &part)?;
        wholes[0].check_gathered(group, &part)?;
        if part.is_multiple_of(multiple_of_rows) {
            check_sums(group, &part, own, &sums)?;
            if T::DTYPE.bytes() > 1 {
                own.check_turned(group, &part)?;
            }
        }
    }
    Ok(())
}

/// Every operation, each type of rows, K of one step and of several.
#[track_caller]
pub fn an_element_has_the_bits_that_it_has_in_any_product<B: Tested>(test: &str, world: usize) {
    all_done(ranks::<B>(test, world, |rank| {
        let builder = Group::<B>::builder().timeout(B::TIMEOUT).workers(1);
        let builder = builder.numerics(Numerics::Invariant);
        let group = builder.connect(rank.rank, rank.world, &rank.address)?;
        let (multiple_of_k, of_rows) = match B::NAME {
            "cuda" => (8, 8),
            _ => (1, 1),
        };
        for k in [1, 2, 3, 200, 577, 1030] {
            let k = usize::next_multiple_of(k, multiple_of_k);
            check_all::<B, f16, f16>(&group, k, [1, of_rows])?;
            check_all::<B, bf16, bf16>(&group, k, [1, of_rows])?;
        }
        for k in [16, 208, 592] {
            check_all::<B, F8E4M3, bf16>(&group, k, [16, 16])?;
        }
        Ok("the same bits".into())
    }));
}
