//! The operations, and the parts of them that are planned by themselves.

use std::fmt;

/// What a call does: its planner follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Gathers the rows of `a` while it multiplies them.
    AllGatherMatmul,
    /// A product of one rank's own. Its layout has one rank, whichever that is in its group.
    Matmul,
    /// Multiplies parts of K, and gives each rank its rows of the sum.
    MatmulReduceScatter,
    /// Multiplies parts of K, and gives each rank all rows of the sum.
    MatmulAllReduce,
    /// Gathers rows: pulled, or stored by their owners.
    AllGather,
    /// Gathers rows, which are pulled and given to a function of the caller's.
    AllGatherAndConsume,
    /// Gives all ranks the rows of one.
    Broadcast,
    /// Gives each rank its rows of the sum of all ranks' rows.
    ReduceScatter,
    /// Gives each rank all rows of that sum. Of many rows each rank gets its own, and [`Operation::GatherOfAllReduce`]
    /// follows.
    AllReduce,
    /// Each rank sends each other a block of rows.
    AllToAll,
    /// As [`Operation::ReduceScatter`], of rows that a function of the caller's makes.
    ProduceAndReduceScatter,
    /// As [`Operation::AllToAll`], of rows that a function of the caller's makes.
    ProduceAndAllToAll,

    /// The gather of [`Operation::AllGatherMatmul`] alone: rows are pulled.
    Gather,
    /// The product of [`Operation::AllGatherMatmul`] alone, of rows that are there. The other ranks take no part.
    Multiply,
    /// The copies of [`Operation::AllGatherMatmul`] alone, with no word to anyone.
    Copy,
    /// The product of sums over ranks alone: partials stay here. The other ranks take no part.
    MultiplyPartials,
    /// The copies of [`Operation::MatmulReduceScatter`] alone, with no word to anyone.
    CopyPartials,
    /// The copies of [`Operation::MatmulAllReduce`] alone, with no word to anyone.
    CopyPartialsAndSums,
    /// What follows [`Operation::MatmulAllReduce`] where partials are pulled: the rows of the sum are.
    GatherOfMatmulAllReduce,
    /// What follows [`Operation::AllReduce`] where each rank has its rows of the sum: they are pulled, or stored.
    GatherOfAllReduce,
}

impl Operation {
    /// All of them. Where two have one name, the whole operation stands before the part.
    const ALL: [Operation; 20] = [
        Operation::AllGatherMatmul,
        Operation::Matmul,
        Operation::MatmulReduceScatter,
        Operation::MatmulAllReduce,
        Operation::AllGather,
        Operation::AllGatherAndConsume,
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

    /// The name of the call, as users read it and as ranks compare it.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::AllGatherMatmul => "all_gather_matmul",
            Operation::Matmul | Operation::Multiply => "matmul",
            Operation::MatmulReduceScatter => "matmul_reduce_scatter",
            Operation::MatmulAllReduce => "matmul_all_reduce",
            Operation::AllGather => "all_gather",
            Operation::AllGatherAndConsume => "all_gather_and_consume",
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

    /// Whether it makes partial sums and moves them.
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
