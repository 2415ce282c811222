//! Every error's sentence, looked at once.

use super::*;

/// Defines `examples` and, by a match that names every variant of them, that there is one of each.
macro_rules! examples {
    ($($variant:ident { $($field:ident $(: $value:expr)?),* $(,)? })*) => {
        pub(crate) fn examples() -> Vec<Error> {
            vec![$(Error::$variant { $($field $(: $value)?),* }),*]
        }

        #[allow(unreachable_patterns)]
        fn _has_an_example(error: &Error) {
            match error {
                $(Error::$variant { .. } => (),)*
            }
        }
    };
}

fn call() -> Call {
    Call::new("all_gather_matmul".into(), Some("src/block.rs:31".into()))
}

fn reason() -> String {
    "Cannot allocate memory (os error 12)".into()
}

fn address() -> String {
    "job".into()
}

fn in_group(job_ranks: Vec<usize>) -> Error {
    let error = Box::new(Error::Capturing { rank: 1 });
    let group = "tp 1".into();
    Error::InGroup {
        group,
        job_ranks,
        error,
    }
}

examples! {
    Limit { rank: Some(3), call: call(), what: "N".into(), value: 0, min: 1, max: 9 }
    Limit { rank: None, call: call(), what: "the world size".into(), value: 0, min: 1, max: usize::MAX }
    Unsupported { rank: 3, call: call(), what: "operands must be bf16 or f16".into() }
    Refused { rank: 3, call: call(), what: "activation is \"swish\" and must be one of \"relu\", \"silu\"".into() }
    Shape { rank: 3, call: call(), argument: "b [N, K]".into(), expected: vec![4, 6], found: vec![4, 5] }
    Shape { rank: 3, call: call(), argument: "b [N, K]".into(), expected: vec![4, 6], found: vec![6, 4] }
    Count {
        rank: 3,
        call: call(),
        whole: "a [1, 1] matrix".into(),
        unit: "element".into(),
        expected: 1,
        part: "the slice".into(),
        found: 2,
    }
    DType { rank: 3, call: call(), argument: "out".into(), expected: DType::Bf16, found: DType::F32 }
    DType { rank: 3, call: call(), argument: "out".into(), expected: DType::F32, found: DType::Bf16 }
    DType { rank: 3, call: call(), argument: "b".into(), expected: DType::Bf16, found: DType::F16 }
    DType { rank: 3, call: call(), argument: "b".into(), expected: DType::F8E4M3, found: DType::F8E5M2 }
    Unsuitable {
        rank: 3,
        call: call(),
        what: "the device of a tensor".into(),
        expected: "the CPU".into(),
        found: "CUDA device 0".into(),
    }
    ForeignArgument { rank: 3, call: call(), argument: "b".into(), expected: None, found: None }
    ForeignArgument { rank: 3, call: call(), argument: "b".into(), expected: None, found: Some("tp 1".into()) }
    ForeignArgument { rank: 3, call: call(), argument: "b".into(), expected: Some("tp 1".into()), found: None }
    ForeignArgument {
        rank: 3,
        call: call(),
        argument: "b".into(),
        expected: Some("tp 1".into()),
        found: Some("dp 0".into()),
    }
    ForeignArgument {
        rank: 3,
        call: call(),
        argument: "b".into(),
        expected: Some("tp 1".into()),
        found: Some("tp 1".into()),
    }
    Environment { launcher: "torchrun".into(), missing: "WORLD_SIZE".into() }
    EnvironmentValue { name: "RANK".into(), value: "x".into(), reason: "it must be a number".into() }
    RanksMissing { ranks: vec![3], address: address(), waited_ms: 500, reason: None }
    RanksMissing { ranks: vec![3, 5], address: address(), waited_ms: 500, reason: None }
    RanksMissing { ranks: vec![0], address: address(), waited_ms: 500, reason: Some("10.0.0.1:7: refused".into()) }
    RankNeverJoined { rank: 3 }
    AddressTaken { rank: 3, address: address(), holder: "process 7 of user 1000".into(), waited_ms: 500 }
    UnknownUser { ranks: vec![3], rank: 0, address: address(), reason: reason() }
    KeyRefused { rank: 3, address: address() }
    DuplicateRank { rank: 3, pids: [7, 8] }
    Mismatch { rank: 3, what: "world size".into(), theirs: "4".into(), other: 0, expected: "8".into(), call: None }
    Mismatch {
        rank: 3,
        what: "group name".into(),
        theirs: "\"b\"".into(),
        other: 0,
        expected: "\"a\"".into(),
        call: Some(call()),
    }
    CallMismatch {
        rank: 3,
        theirs: MadeCall::named("barrier").into(),
        other: 0,
        expected: MadeCall::new("all_gather", ["M = 6".into()]).into(),
        call: 2,
        refused: None,
    }
    CallMismatch {
        rank: 3,
        theirs: MadeCall::new("all_gather", ["M = 8".into()]).into(),
        other: 0,
        expected: MadeCall::new("all_gather", ["M = 6".into()]).into(),
        call: 11,
        refused: Some(Box::new(Error::Limit {
            rank: None,
            call: call(),
            what: "N".into(),
            value: 0,
            min: 1,
            max: 9,
        })),
    }
    OutOfMemory { rank: 3, bytes: 4096, reason: reason() }
    RankLost { rank: 3, noticed_by: 0 }
    HostLost { rank: 3, noticed_by: 0, silent_ms: 1250 }
    RankPanicked { rank: 3, message: Some("no more data (src/main.rs:12)".into()) }
    RankPanicked { rank: 3, message: None }
    ProgramFailed { rank: 3, reason: "no more data".into() }
    Callback { rank: 3, call: "all_gather_and_consume".into(), reason: "no more data".into() }
    CallInCallback { rank: 3 }
    Forked { rank: 3, process: 7, child: 8 }
    Busy { rank: 3, call: "all_gather".into(), waited_ms: 500 }
    RankLeft { rank: 3, waiting: 0, what: "barrier()".into() }
    Timeout { rank: 3, waiting: 0, what: "barrier()".into(), waited_ms: 500, deadline: Deadline::Arrival }
    Timeout { rank: 3, waiting: 0, what: "barrier()".into(), waited_ms: 500, deadline: Deadline::Call }
    Poisoned { cause: Box::new(Error::Capturing { rank: 3 }) }
    Poisoned { cause: Box::new(in_group(vec![2, 3])) }
    InGroup { group: "tp 1".into(), job_ranks: vec![0, 1], error: Box::new(Error::Capturing { rank: 1 }) }
    InGroup { group: "tp 1".into(), job_ranks: vec![2, 3], error: Box::new(Error::Capturing { rank: 1 }) }
    RankFailed { rank: 3, status: "exit status: 1".into(), cause: None, killed: vec![] }
    RankFailed { rank: 3, status: "exit status: 0".into(), cause: None, killed: vec![1] }
    RankFailed { rank: 3, status: "exit status: 1".into(), cause: Some(Box::new(Error::Capturing { rank: 0 })), killed: vec![1, 2] }
    AlreadyRank { launcher: "torchrun".into() }
    Message { rank: 3, reason: "it ends early".into() }
    Internal { rank: 3, what: "nobody makes block 7".into() }
    Unaligned { rank: 3, call: call(), what: "K".into(), value: 12, multiple: 8 }
    NeedsProcesses { rank: 3 }
    SharedGpu { ranks: [3, 5], visible: 8 }
    NoGpu { rank: 3, reason: "CUDA_VISIBLE_DEVICES is empty".into() }
    DriverTooOld { rank: 3, function: "cuStreamWriteValue32".into() }
    NoNccl { rank: 3, reason: "libnccl.so.2 cannot be loaded".into() }
    BuiltWithoutKernels { rank: 3 }
    UnsupportedGpu { rank: 3, name: "NVIDIA A100".into(), capability: "8.0".into() }
    NoPeerAccess { rank: 3, peer: 5, reason: "peer access is not supported".into() }
    PeerMemory { rank: 3, peer: 5 }
    NoKernel { rank: 3, asked: "tile 1 x 2 x 3".into(), known: "tile 128 x 128 x 64".into() }
    NoRoute { rank: 3, operation: "all_gather".into(), asked: Route::Push, instead: Route::Pull }
    QueuedTogether { rank: 3, what: "Route::Pull".into(), cause: "CUDA_DEVICE_MAX_CONNECTIONS = 1".into() }
    Capturing { rank: 3 }
    Cuda { rank: 3, call: "cuMemCreate".into(), reason: "CUDA_ERROR_OUT_OF_MEMORY".into() }
    System { rank: Some(3), action: "open a socket".into(), reason: reason() }
    System { rank: None, action: "open a socket".into(), reason: reason() }
}

/// Whether `sentence` says "rank N", or N after "ranks".
fn names(sentence: &str, rank: usize) -> bool {
    let number = rank.to_string();
    let listed = sentence.split("ranks ").skip(1);
    let numbers = listed.flat_map(|list| list.split(|c: char| !c.is_ascii_digit()));
    sentence.contains(&format!("rank {rank}")) || numbers.into_iter().any(|n| n == number)
}

#[test]
fn every_sentence_is_one_line_that_names_its_rank_in_words() {
    for error in examples() {
        let sentence = error.to_string();
        println!("{sentence}");
        for rank in error.at_fault() {
            assert!(names(&sentence, rank), "without rank {rank}: {sentence}");
        }
        for residue in ["\n", "Some(", "None", "[\"", "ranks [", " { ", "  ", "; ;"] {
            assert!(!sentence.contains(residue), "{residue:?}: {sentence}");
        }
        assert!(!sentence.ends_with([':', ';', ' ', '.']), "{sentence}");
    }
}

#[test]
fn in_a_part_of_a_job_every_sentence_names_ranks_of_the_job_only() {
    let job_ranks: Vec<usize> = (0..8).map(|rank| 50 + rank).collect();
    for error in examples() {
        if matches!(error, Error::InGroup { .. }) || matches!(error.first(), Error::InGroup { .. })
        {
            continue;
        }
        let (plain, blamed) = (error.to_string(), error.at_fault());
        let in_group = Error::InGroup {
            group: "tp 1".into(),
            job_ranks: job_ranks.clone(),
            error: Box::new(error.of_job(&job_ranks)),
        };
        let sentence = in_group.to_string();
        // Every number behind "rank" is one of the job.
        let behind = |sentence: &str| {
            let numbers = sentence.split("rank ").skip(1).map(|rest| {
                let digits = rest.chars().take_while(char::is_ascii_digit);
                digits.collect::<String>()
            });
            numbers
                .filter_map(|digits| digits.parse().ok())
                .collect::<Vec<usize>>()
        };
        let expected = behind(&plain).into_iter().map(|rank| job_ranks[rank]);
        assert!(behind(&sentence).into_iter().eq(expected), "{sentence}");
        for rank in blamed {
            assert!(names(&sentence, job_ranks[rank]), "{sentence}");
        }
    }
}
