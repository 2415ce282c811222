//! The operations, and the parts of operations that have planners of their own.

use std::fmt;

/// What a call does. It determines the planner.
///
/// An operation is a point of a small space: where its rows come from, what makes the result of them, and what becomes
/// of that. Planners, models and explanations ask these, and no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Operation {
    name: &'static str,
    /// Where the rows come from.
    pub rows: RowSource,
    /// What makes the result of the rows.
    pub work: RowWork,
    /// What becomes of the result.
    pub result: RowResult,
    /// How much of the operation it is.
    pub part: OperationPart,
}

/// Where the rows of an operation come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowSource {
    /// Each rank has its rows.
    Own,
    /// All ranks get the rows of each.
    Gathered,
    /// All ranks get the rows of one: the rank that has rows in the layout.
    Root,
}

/// What makes the result of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowWork {
    /// The rows are the result.
    Nothing,
    /// A product with weights.
    Product,
    /// A function of the caller, which consumes gathered rows or makes the rank's own.
    Caller,
    /// Quantisation.
    Quantization,
}

/// What becomes of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RowResult {
    /// It stays on the rank.
    Kept,
    /// It is an addend. Each rank gets its own rows of the sum over the ranks.
    SumOfOwnRows,
    /// It is an addend. Each rank gets all rows of the sum over the ranks.
    SumOfAllRows,
    /// It has a block of rows for each rank.
    Blocks,
}

impl RowResult {
    /// True if ranks send it to each other.
    pub fn is_sent(self) -> bool {
        match self {
            RowResult::Kept => false,
            RowResult::SumOfOwnRows | RowResult::SumOfAllRows | RowResult::Blocks => true,
        }
    }

    /// True if all ranks get what becomes of a row. Otherwise only one rank does.
    pub fn is_for_all(self) -> bool {
        match self {
            RowResult::SumOfAllRows => true,
            RowResult::Kept | RowResult::SumOfOwnRows | RowResult::Blocks => false,
        }
    }
}

/// How much of an operation is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperationPart {
    /// All of it. If the result is a sum of all rows, each rank may get its own rows only. Then a gather follows.
    Whole,
    /// The work alone, of rows that are there. The other ranks take no part.
    Work,
    /// The copies alone, without synchronisation.
    Copies,
    /// The gather alone: that of the rows, or that of the sums which follows.
    Gather,
}

/// Declares each operation: its name, and its point. Two operations may have one name, but not one point.
macro_rules! operations {
    ($($(#[$doc:meta])* $constant:ident $name:literal $rows:ident $work:ident $result:ident $part:ident;)*) => {
        impl Operation {
            $(
                $(#[$doc])*
                pub const $constant: Operation = Operation {
                    name: $name,
                    rows: RowSource::$rows,
                    work: RowWork::$work,
                    result: RowResult::$result,
                    part: OperationPart::$part,
                };
            )*

            /// All operations, in the order of their declaration.
            const ALL: &[Operation] = &[$(Operation::$constant),*];
        }
    };
}

// Of two with one name, the whole operation stands before the part.
operations! {
    /// Gathers the rows of `a` while it multiplies them.
    ALL_GATHER_MATMUL "all_gather_matmul" Gathered Product Kept Whole;
    /// A product on one rank. Its layout has one rank, whichever rank of its group that is.
    MATMUL "matmul" Own Product Kept Whole;
    /// Multiplies each rank's part of K, and gives each rank its own rows of the sum.
    MATMUL_REDUCE_SCATTER "matmul_reduce_scatter" Own Product SumOfOwnRows Whole;
    /// Multiplies each rank's part of K, and gives each rank all rows of the sum.
    MATMUL_ALL_REDUCE "matmul_all_reduce" Own Product SumOfAllRows Whole;
    /// Gathers rows, which each rank pulls or their owners store.
    ALL_GATHER "all_gather" Gathered Nothing Kept Whole;
    /// Gathers rows, which each rank pulls and gives to a function of the caller.
    ALL_GATHER_AND_CONSUME "all_gather_and_consume" Gathered Caller Kept Whole;
    /// Quantises rows on one rank, as [`Operation::MATMUL`] multiplies on one.
    QUANTIZE "quantize" Own Quantization Kept Whole;
    /// Gives all ranks the rows of one rank.
    BROADCAST "broadcast" Root Nothing Kept Whole;
    /// Gives each rank its rows of the sum of all ranks' rows.
    REDUCE_SCATTER "reduce_scatter" Own Nothing SumOfOwnRows Whole;
    /// Gives each rank all rows of the sum of all ranks' rows. If there are many rows, each rank gets its own rows
    /// only, and [`Operation::GATHER_OF_ALL_REDUCE`] follows.
    ALL_REDUCE "all_reduce" Own Nothing SumOfAllRows Whole;
    /// Each rank sends a block of rows to each other rank.
    ALL_TO_ALL "all_to_all" Own Nothing Blocks Whole;
    /// As [`Operation::REDUCE_SCATTER`], of rows that a function of the caller makes.
    PRODUCE_AND_REDUCE_SCATTER "produce_and_reduce_scatter" Own Caller SumOfOwnRows Whole;
    /// As [`Operation::ALL_TO_ALL`], of rows that a function of the caller makes.
    PRODUCE_AND_ALL_TO_ALL "produce_and_all_to_all" Own Caller Blocks Whole;

    /// The gather of [`Operation::ALL_GATHER_MATMUL`] alone. Each rank pulls the rows.
    GATHER "gather" Gathered Product Kept Gather;
    /// The product of [`Operation::ALL_GATHER_MATMUL`] alone, of rows that are gathered already. The other ranks take no
    /// part.
    MULTIPLY "matmul" Gathered Product Kept Work;
    /// The copies of [`Operation::ALL_GATHER_MATMUL`] alone, without synchronisation.
    COPY "copy" Gathered Product Kept Copies;
    /// The product of sums over ranks alone, of all rows or of own rows. Its partials stay on this rank. The other ranks
    /// take no part.
    MULTIPLY_PARTIALS "matmul of partials" Own Product SumOfOwnRows Work;
    /// The copies of [`Operation::MATMUL_REDUCE_SCATTER`] alone, without synchronisation.
    COPY_PARTIALS "copy of partials" Own Product SumOfOwnRows Copies;
    /// The copies of [`Operation::MATMUL_ALL_REDUCE`] alone, without synchronisation.
    COPY_PARTIALS_AND_SUMS "copy of partials and sums" Own Product SumOfAllRows Copies;
    /// The gather that follows [`Operation::MATMUL_ALL_REDUCE`] if each rank has its own rows of the sum, which are pulled
    /// or stored.
    GATHER_OF_MATMUL_ALL_REDUCE "gather of matmul_all_reduce" Own Product SumOfAllRows Gather;
    /// The gather that follows [`Operation::ALL_REDUCE`] if each rank has its own rows of the sum, which are pulled or
    /// stored.
    GATHER_OF_ALL_REDUCE "gather of all_reduce" Own Nothing SumOfAllRows Gather;
}

impl Operation {
    /// The name of the call that users read and ranks compare.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// The operation of this name.
    pub fn named(name: &str) -> Option<Operation> {
        let mut all = Operation::ALL.iter().copied();
        all.find(|operation| operation.name == name)
    }

    /// True if the operation of this name ends a call that has begun with a different operation.
    pub fn ends_another(name: &str) -> bool {
        let mut all = Operation::ALL.iter();
        all.any(|operation| operation.gathers_sums() && operation.name == name)
    }

    fn gathers_sums(self) -> bool {
        matches!(self.part, OperationPart::Gather) && self.result.is_for_all()
    }

    /// True if it has a product.
    pub fn multiplies(self) -> bool {
        match self.part {
            OperationPart::Whole | OperationPart::Work => matches!(self.work, RowWork::Product),
            OperationPart::Copies | OperationPart::Gather => false,
        }
    }

    /// True if it has a product whose result ranks send to each other.
    pub fn sends_product(self) -> bool {
        let is_whole = matches!(self.part, OperationPart::Whole);
        is_whole && self.multiplies() && self.result.is_sent()
    }

    /// True if a rank does it alone.
    pub fn is_alone(self) -> bool {
        matches!((self.rows, self.result), (RowSource::Own, RowResult::Kept))
    }
}

#[cfg(test)]
impl Operation {
    /// The sums of products.
    pub const SUMS: [Operation; 2] = [
        Operation::MATMUL_REDUCE_SCATTER,
        Operation::MATMUL_ALL_REDUCE,
    ];

    /// The products of several ranks.
    pub const PRODUCTS: [Operation; 3] = [
        Operation::ALL_GATHER_MATMUL,
        Operation::MATMUL_REDUCE_SCATTER,
        Operation::MATMUL_ALL_REDUCE,
    ];
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::{Operation, OperationPart};

    #[test]
    fn an_operation_is_found_by_its_name() {
        for &operation in Operation::ALL {
            let expected = match operation {
                Operation::MULTIPLY => Operation::MATMUL,
                operation => operation,
            };
            assert_eq!(Operation::named(operation.name()), Some(expected));
        }
        assert_eq!(Operation::named("another"), None);
    }

    #[test]
    fn no_two_operations_are_one_point() {
        for (number, one) in Operation::ALL.iter().enumerate() {
            for other in &Operation::ALL[..number] {
                let other = Operation {
                    name: one.name,
                    ..*other
                };
                assert_ne!(*one, other);
            }
        }
    }

    #[test]
    fn a_part_is_of_a_whole_operation() {
        for &operation in Operation::ALL {
            let whole = |of: &&Operation| {
                let axes = |of: &Operation| (of.rows, of.work, of.result);
                of.part == OperationPart::Whole && axes(of) == axes(&operation)
            };
            assert_eq!(Operation::ALL.iter().filter(whole).count(), 1);
        }
    }

    #[test]
    fn gathers_of_sums_end_other_operations() {
        let names = Operation::ALL.iter().map(|operation| operation.name());
        let ends: Vec<_> = names.filter(|name| Operation::ends_another(name)).collect();
        assert_eq!(
            ends,
            ["gather of matmul_all_reduce", "gather of all_reduce"]
        );
    }

    fn those(which: impl Fn(Operation) -> bool) -> Vec<Operation> {
        let all = Operation::ALL.iter().copied();
        all.filter(|&operation| which(operation)).collect()
    }

    #[test]
    fn products_are_sent_where_sums_are_made_of_them() {
        let multiply = [
            Operation::ALL_GATHER_MATMUL,
            Operation::MATMUL,
            Operation::MATMUL_REDUCE_SCATTER,
            Operation::MATMUL_ALL_REDUCE,
            Operation::MULTIPLY,
            Operation::MULTIPLY_PARTIALS,
        ];
        assert_eq!(those(Operation::multiplies), multiply);
        assert_eq!(those(Operation::sends_product), Operation::SUMS);
    }

    #[test]
    fn all_ranks_take_part_in_what_is_gathered_or_sent() {
        let alone = [Operation::MATMUL, Operation::QUANTIZE];
        assert_eq!(those(Operation::is_alone), alone);
    }
}
