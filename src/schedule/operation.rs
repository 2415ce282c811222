//! The operations, and the parts of operations that have planners of their own.

use std::fmt;

/// What a call does. It determines the planner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Gathers the rows of `a` while it multiplies them.
    AllGatherMatmul,
    /// A product on one rank. Its layout has one rank, whichever rank of its group that is.
    Matmul,
    /// Multiplies each rank's part of K, and gives each rank its own rows of the sum.
    MatmulReduceScatter,
    /// Multiplies each rank's part of K, and gives each rank all rows of the sum.
    MatmulAllReduce,
    /// Gathers rows, which each rank pulls or their owners store.
    AllGather,
    /// Gathers rows, which each rank pulls and gives to a function of the caller.
    AllGatherAndConsume,
    /// Quantises rows on one rank, as [`Operation::Matmul`] multiplies on one.
    Quantize,
    /// Gives all ranks the rows of one rank.
    Broadcast,
    /// Gives each rank its rows of the sum of all ranks' rows.
    ReduceScatter,
    /// Gives each rank all rows of the sum of all ranks' rows. If there are many rows, each rank gets its own rows
    /// only, and [`Operation::GatherOfAllReduce`] follows.
    AllReduce,
    /// Each rank sends a block of rows to each other rank.
    AllToAll,
    /// As [`Operation::ReduceScatter`], of rows that a function of the caller makes.
    ProduceAndReduceScatter,
    /// As [`Operation::AllToAll`], of rows that a function of the caller makes.
    ProduceAndAllToAll,

    /// The gather of [`Operation::AllGatherMatmul`] alone. Each rank pulls the rows.
    Gather,
    /// The product of [`Operation::AllGatherMatmul`] alone, of rows that are gathered already. The other ranks take no
    /// part.
    Multiply,
    /// The copies of [`Operation::AllGatherMatmul`] alone, without synchronisation.
    Copy,
    /// The product of sums over ranks alone. Its partials stay on this rank. The other ranks take no part.
    MultiplyPartials,
    /// The copies of [`Operation::MatmulReduceScatter`] alone, without synchronisation.
    CopyPartials,
    /// The copies of [`Operation::MatmulAllReduce`] alone, without synchronisation.
    CopyPartialsAndSums,
    /// The gather that follows [`Operation::MatmulAllReduce`] if each rank has its own rows of the sum, which are pulled
    /// or stored.
    GatherOfMatmulAllReduce,
    /// The gather that follows [`Operation::AllReduce`] if each rank has its own rows of the sum, which are pulled or
    /// stored.
    GatherOfAllReduce,
}

impl Operation {
    /// All operations, in the order of their declaration. Of two with one name, the whole operation stands before the
    /// part.
    const ALL: [Operation; 21] = [
        Operation::AllGatherMatmul,
        Operation::Matmul,
        Operation::MatmulReduceScatter,
        Operation::MatmulAllReduce,
        Operation::AllGather,
        Operation::AllGatherAndConsume,
        Operation::Quantize,
        Operation::Broadcast,
        Operation::ReduceScatter,
        Operation::AllReduce,
        Operation::AllToAll,
        Operation::ProduceAndReduceScatter,
        Operation::ProduceAndAllToAll,
        Operation::Gather,
        Operation::Multiply,
        Operation::Copy,
        Operation::MultiplyPartials,
        Operation::CopyPartials,
        Operation::CopyPartialsAndSums,
        Operation::GatherOfMatmulAllReduce,
        Operation::GatherOfAllReduce,
    ];

    /// The name of the call that users read and ranks compare.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::AllGatherMatmul => "all_gather_matmul",
            Operation::Matmul | Operation::Multiply => "matmul",
            Operation::MatmulReduceScatter => "matmul_reduce_scatter",
            Operation::MatmulAllReduce => "matmul_all_reduce",
            Operation::AllGather => "all_gather",
            Operation::AllGatherAndConsume => "all_gather_and_consume",
            Operation::Quantize => "quantize",
            Operation::Broadcast => "broadcast",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllReduce => "all_reduce",
            Operation::AllToAll => "all_to_all",
            Operation::ProduceAndReduceScatter => "produce_and_reduce_scatter",
            Operation::ProduceAndAllToAll => "produce_and_all_to_all",
            Operation::Gather => "gather",
            Operation::Copy => "copy",
            Operation::MultiplyPartials => "matmul of partials",
            Operation::CopyPartials => "copy of partials",
            Operation::CopyPartialsAndSums => "copy of partials and sums",
            Operation::GatherOfMatmulAllReduce => "gather of matmul_all_reduce",
            Operation::GatherOfAllReduce => "gather of all_reduce",
        }
    }

    /// The operation of this name.
    pub fn named(name: &str) -> Option<Operation> {
        let mut all = Operation::ALL.into_iter();
        all.find(|operation| operation.name() == name)
    }

    /// True if the operation of this name ends a call that has begun with a different operation.
    pub fn ends_another(name: &str) -> bool {
        let last = [
            Operation::GatherOfMatmulAllReduce,
            Operation::GatherOfAllReduce,
        ];
        last.iter().any(|operation| operation.name() == name)
    }

    /// True if it can be done by ranks of several hosts. Copies without synchronisation cannot.
    pub const fn spans_hosts(self) -> bool {
        !matches!(
            self,
            Operation::Copy | Operation::CopyPartials | Operation::CopyPartialsAndSums
        )
    }

    /// True if it makes partial sums and moves them.
    pub const fn is_sum(self) -> bool {
        matches!(
            self,
            Operation::MatmulReduceScatter | Operation::MatmulAllReduce
        )
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::Operation;

    #[test]
    fn an_operation_is_found_by_its_name() {
        for (number, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, number);
            let expected = match operation {
                Operation::Multiply => Operation::Matmul,
                operation => operation,
            };
            assert_eq!(Operation::named(operation.name()), Some(expected));
        }
        assert_eq!(Operation::named("another"), None);
    }
}
