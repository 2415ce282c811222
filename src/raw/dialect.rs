//! Errors in other languages: their sentences name the calls and the options that those languages have.

use crate::{DType, Error};

/// A language that calls this library by [`raw`](crate::raw).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The package `gemmesh`.
    Python,
    /// The header `gemmesh.h`.
    C,
}

/// Names in Rust, in Python and in C. A name comes before its beginnings.
const NAMES: [[&str; 3]; 34] = [
    [
        ".weight_layout(WeightLayout::Kn)",
        "it with weight_layout=\"kn\"",
        "it with weight_layout GEMMESH_WEIGHTS_KN",
    ],
    [
        ".weight_layout(WeightLayout::Nk)",
        "it with weight_layout=\"nk\"",
        "it with weight_layout GEMMESH_WEIGHTS_NK",
    ],
    [
        "(WeightLayout::Nk)",
        "(weight_layout=\"nk\")",
        "(GEMMESH_WEIGHTS_NK)",
    ],
    [
        "use views of them (ShardedMatrix::view, ShardedMatrix::blocks_of)",
        "use copy_from to write them, and whole to read them",
        "use parts of the whole (gemmesh_sharded_whole, gemmesh_sharded_blocks_of)",
    ],
    ["Route::Pull", "\"pull\"", "GEMMESH_ROUTE_PULL"],
    ["Route::Push", "\"push\"", "GEMMESH_ROUTE_PUSH"],
    ["Route::Store", "\"store\"", "GEMMESH_ROUTE_STORE"],
    [
        "Config::route",
        "route of Group.prepare",
        "route of gemmesh_product",
    ],
    ["Config::", "the configuration's ", "the configuration's "],
    ["Scales::", "", ""],
    [
        "Builder::timeout",
        "the option timeout",
        "timeout_ms of gemmesh_group_options",
    ],
    [
        "Builder::arrival_timeout",
        "the option arrival_timeout",
        "arrival_timeout_ms of gemmesh_group_options",
    ],
    [
        "Builder::host_timeout",
        "the option host_timeout",
        "host_timeout_ms of gemmesh_group_options",
    ],
    [
        "Builder::device",
        "the option device",
        "device of gemmesh_group_options",
    ],
    [
        "Builder::name",
        "the option name",
        "name of gemmesh_group_options",
    ],
    ["Builder::", "the option ", "the option "],
    [
        "where gemmesh::launch::is_rank() is true, call",
        "where gemmesh.is_rank() is true, call",
        "call",
    ],
    [
        ", srun or gemmesh::launch",
        ", srun or gemmesh.launch",
        " or srun",
    ],
    [
        "gemmesh::launch, torchrun",
        "gemmesh.launch, torchrun",
        "torchrun",
    ],
    [
        "gemmesh::launch",
        "gemmesh.launch",
        "the library's launcher",
    ],
    [
        "Group::connect_with",
        "Group.from_callback",
        "gemmesh_group_connect_with",
    ],
    [
        "Group::set_stream",
        "Group.set_stream",
        "gemmesh_group_set_stream",
    ],
    ["Group::zeros", "Group.zeros", "gemmesh_matrix_zeros"],
    [
        "Group::sharded_rows",
        "Group.sharded",
        "gemmesh_sharded_new_by_rank",
    ],
    [
        "Group::sharded_with_capacity",
        "Group.sharded",
        "gemmesh_sharded_new_with_capacity",
    ],
    [
        "Group::sharded_staged",
        "Group.sharded",
        "gemmesh_sharded_new_staged",
    ],
    ["Group::sharded", "Group.sharded", "gemmesh_sharded_new"],
    ["Group::", "Group.", "gemmesh_group_"],
    [
        "ShardedMatrix::shard",
        "Sharded.shard",
        "gemmesh_sharded_own_rows",
    ],
    ["ShardedMatrix::", "Sharded.", "gemmesh_sharded_"],
    [
        "Matrix::copy_from_host",
        "Matrix.frombytes",
        "gemmesh_copy_from_host",
    ],
    [
        "Matrix::copy_to_host",
        "Matrix.tobytes",
        "gemmesh_copy_to_host",
    ],
    ["Matrix::copy_from", "Matrix.copy_from", "gemmesh_copy"],
    ["Matrix::", "Matrix.", "gemmesh_matrix_"],
];

/// The types that outputs and weights have.
const OUTPUTS_AND_WEIGHTS: [DType; 5] = [
    DType::Bf16,
    DType::F16,
    DType::F32,
    DType::F8E4M3,
    DType::F8E5M2,
];

impl Dialect {
    /// The sentence of an error in this language. What the user's program has said stays as it is.
    pub fn sentence(self, error: &Error) -> String {
        let sentence = error.to_string();
        // It stands at the end.
        let said = match error.cause() {
            Error::ProgramFailed { reason, .. } | Error::Callback { reason, .. } => reason,
            Error::RankPanicked {
                message: Some(message),
                ..
            } => message,
            Error::Refused { what, .. } => what,
            _ => "",
        };
        match sentence.strip_suffix(said) {
            Some(own) => self.of(own) + said,
            None => self.of(&sentence),
        }
    }

    /// Words of this library in this language.
    pub fn of(self, sentence: &str) -> String {
        let place = match self {
            Dialect::Python => 1,
            Dialect::C => 2,
        };
        let named = NAMES.iter().fold(sentence.to_owned(), |words, names| {
            words.replace(names[0], names[place])
        });
        OUTPUTS_AND_WEIGHTS.iter().fold(named, |words, dtype| {
            let [output, weight] = match self {
                Dialect::Python => [format!("dtype=\"{dtype}\""), format!("a b of {dtype}")],
                Dialect::C => {
                    let name = format!("GEMMESH_{}", dtype.to_string().to_uppercase());
                    [
                        format!("output_dtype {name}"),
                        format!("weight_dtype {name}"),
                    ]
                }
            };
            words
                .replace(&format!("output_dtype(DType::{dtype:?})"), &output)
                .replace(&format!("weight_dtype(DType::{dtype:?})"), &weight)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Dialect, Error};
    use crate::error::sentences::examples;

    #[test]
    fn no_name_of_rust_is_left_in_another_language() {
        for error in examples() {
            for dialect in [Dialect::Python, Dialect::C] {
                let sentence = dialect.sentence(&error);
                println!("{dialect:?}: {sentence}");
                assert!(!sentence.contains("::"), "{sentence}");
            }
        }
    }

    #[test]
    fn what_a_program_says_is_not_translated() {
        let reason = "Model::Config::load: Eigen::Matrix::rows".to_owned();
        let error = Error::Callback {
            rank: 1,
            call: "Group::connect_with".into(),
            reason: reason.clone(),
        };
        let failed = "the function that was given to gemmesh_group_connect_with failed";
        assert_eq!(
            Dialect::C.sentence(&error),
            format!("rank 1: {failed}: {reason}")
        );
    }

    #[test]
    fn names_are_those_of_the_language() {
        let sentence = "raise Builder::arrival_timeout, or give its rank to Group::connect";
        assert_eq!(
            Dialect::Python.of(sentence),
            "raise the option arrival_timeout, or give its rank to Group.connect"
        );
        assert_eq!(
            Dialect::C.of(sentence),
            "raise arrival_timeout_ms of gemmesh_group_options, or give its rank to gemmesh_group_connect"
        );
        let sentence = "prepare it with output_dtype(DType::F32)";
        assert_eq!(
            Dialect::Python.of(sentence),
            "prepare it with dtype=\"f32\""
        );
        assert_eq!(
            Dialect::C.of(sentence),
            "prepare it with output_dtype GEMMESH_F32"
        );
    }
}
