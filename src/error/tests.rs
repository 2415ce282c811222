//! Every error's sentence, looked at once.

use std::fmt;

use super::*;

/// An error of each kind, and of each form that its sentence has.
pub(crate) fn examples() -> Vec<Error> {
    let of_arguments = arguments()
        .into_iter()
        .map(|kind| kind.on(3).in_call(call()));
    let named = |name: &str, job_ranks: &[usize]| Kind::Capturing.on(1).in_group(name, job_ranks);
    let others = [
        Error::of_kind(Kind::Limit {
            what: "the world size".into(),
            value: 0,
            min: 1,
            max: usize::MAX,
        })
        .in_call(call()),
        Error::of_kind(Kind::System {
            action: "open a socket".into(),
            reason: reason(),
        }),
        Error::of_kind(Kind::Misuse {
            what: "this process is a rank".into(),
        }),
        Kind::Mismatch {
            what: "group name".into(),
            theirs: "\"b\"".into(),
            other: 0,
            expected: "\"a\"".into(),
        }
        .on(3)
        .with_call(call()),
        Kind::Capturing.on(3).again(),
        named("tp 1", &[0, 1]),
        named("tp 1", &[2, 3]),
        named("tp 1", &[2, 3]).again(),
    ];
    let of_no_rank = of_no_rank().into_iter().map(Error::of_kind);
    let of_ranks = [of_calls(), of_meetings(), of_ends(), of_machines()].into_iter();
    let of_ranks = of_ranks.flatten().map(|kind| kind.on(3));
    of_arguments
        .chain(of_no_rank)
        .chain(of_ranks)
        .chain(others)
        .collect()
}

fn call() -> Call {
    Call::new("Group::zeros".into(), Some("src/block.rs:31".into()))
}

fn reason() -> String {
    "Cannot allocate memory (os error 12)".into()
}

fn arguments() -> Vec<Kind> {
    let shape = |found: &[usize]| Kind::Shape {
        argument: "b [N, K]".into(),
        expected: vec![4, 6],
        found: found.into(),
    };
    let unsuitable =
        |what: &str, expected: &str, found: &str, remedy: Option<&str>| Kind::Unsuitable {
            what: what.into(),
            expected: expected.into(),
            found: found.into(),
            remedy: remedy.map(Into::into),
        };
    vec![
        Kind::Limit {
            what: "N".into(),
            value: 0,
            min: 1,
            max: 9,
        },
        shape(&[4, 5]),
        shape(&[6, 4]),
        unsuitable("the device of a tensor", "the CPU", "CUDA device 0", None),
        unsuitable(
            "the dtype of out",
            "f32, for which this call was prepared",
            "bf16",
            Some("prepare it with output_dtype(DType::Bf16)"),
        ),
        Kind::Unsupported {
            what: "operands must be bf16 or f16".into(),
        },
    ]
}

fn of_no_rank() -> Vec<Kind> {
    let missing = |ranks: &[usize], reason: Option<&str>| Kind::RanksMissing {
        ranks: ranks.into(),
        address: "job".into(),
        waited_ms: 500,
        reason: reason.map(Into::into),
    };
    vec![
        Kind::Environment {
            launcher: "torchrun".into(),
            missing: "WORLD_SIZE".into(),
        },
        Kind::EnvironmentValue {
            name: "RANK".into(),
            value: "x".into(),
            reason: "it must be a number".into(),
        },
        missing(&[3], None),
        missing(&[3, 5], None),
        missing(&[0], Some("10.0.0.1:7: refused")),
        Kind::SharedGpu {
            ranks: [3, 5],
            visible: 8,
        },
    ]
}

/// Of a rank and its calls.
fn of_calls() -> Vec<Kind> {
    let timeout = |deadline| Kind::Timeout {
        waiting: 0,
        what: "barrier()".into(),
        waited_ms: 500,
        deadline,
    };
    let calls = |theirs, number, refused| Kind::CallMismatch {
        theirs,
        other: 0,
        expected: MadeCall::new("all_gather", ["M = 6".into()]),
        number,
        refused,
    };
    let gathers = MadeCall::new("all_gather", ["M = 8".into()]);
    let refused = arguments().remove(0).on(3).in_call(call());
    vec![
        Kind::Misuse {
            what: "a function makes another call of the same group; return from it first".into(),
        },
        Kind::Busy {
            call: "all_gather".into(),
            waited_ms: 500,
        },
        Kind::Capturing,
        calls(MadeCall::named("barrier"), 2, None),
        calls(gathers, 11, Some(refused)),
        timeout(Deadline::Call),
        timeout(Deadline::Arrival),
    ]
}

/// Of ranks that meet.
fn of_meetings() -> Vec<Kind> {
    vec![
        Kind::NeverJoined,
        Kind::AddressTaken {
            address: "job".into(),
            holder: "process 7 of user 1000".into(),
            waited_ms: 500,
        },
        Kind::KeyRefused {
            address: "10.0.0.1:7".into(),
        },
        Kind::DuplicateRank { pids: [7, 8] },
        Kind::Mismatch {
            what: "world size".into(),
            theirs: "4".into(),
            other: 0,
            expected: "8".into(),
        },
    ]
}

/// Of ranks that have ended.
fn of_ends() -> Vec<Kind> {
    let failed = |status: &str, cause, killed: &[usize]| Kind::RankFailed {
        status: status.into(),
        cause,
        killed: killed.into(),
    };
    let program = |function_of: Option<&str>| Kind::ProgramFailed {
        function_of: function_of.map(Into::into),
        reason: "no more data".into(),
    };
    vec![
        Kind::RankLost { noticed_by: 0 },
        Kind::HostLost {
            noticed_by: 0,
            silent_ms: 1250,
        },
        Kind::RankPanicked { message: None },
        Kind::RankPanicked {
            message: Some("no more data (src/main.rs:12)".into()),
        },
        program(None),
        program(Some("all_gather_and_consume")),
        Kind::RankLeft {
            waiting: 0,
            what: "barrier()".into(),
        },
        failed("exit status: 1", None, &[]),
        failed("exit status: 0", None, &[1]),
        failed("exit status: 1", Some(Kind::Capturing.on(0)), &[1, 2]),
    ]
}

/// Of what a rank's machine lacks or refuses, and of messages that cannot be.
fn of_machines() -> Vec<Kind> {
    vec![
        Kind::OutOfMemory {
            bytes: 4096,
            reason: reason(),
        },
        Kind::Device {
            what: "no GPU is found: CUDA_VISIBLE_DEVICES is empty".into(),
        },
        Kind::PeerMemory {
            peer: 5,
            reason: Some("peer access is not supported".into()),
        },
        Kind::PeerMemory {
            peer: 5,
            reason: None,
        },
        Kind::System {
            action: "open a socket".into(),
            reason: reason(),
        },
        Kind::Message {
            reason: "it ends early".into(),
        },
        Kind::Internal {
            what: "no one makes block 7".into(),
        },
    ]
}

/// Whether `sentence` says "rank N", or N after "ranks".
fn names(sentence: &str, rank: usize) -> bool {
    let number = rank.to_string();
    let listed = sentence.split("ranks ").skip(1);
    let numbers = listed.flat_map(|list| list.split(|c: char| !c.is_ascii_digit()));
    sentence.contains(&format!("rank {rank}")) || numbers.into_iter().any(|n| n == number)
}

#[test]
fn every_kind_has_an_example() {
    let name = |kind: &Kind| {
        let words = format!("{kind:?}");
        words
            .split(|c: char| !c.is_alphabetic())
            .next()
            .map(String::from)
    };
    let shown: std::collections::BTreeSet<_> =
        examples().iter().map(|error| name(error.kind())).collect();
    let source = include_str!("kind.rs");
    let (source, _) = source
        .split_once("/// A deadline of a group")
        .expect("kinds come first");
    for kind in source.lines().filter_map(|line| line.strip_prefix("    ")) {
        let kind = kind.trim_end_matches(|end: char| !end.is_alphabetic());
        if kind.starts_with(char::is_uppercase) && kind.chars().all(char::is_alphabetic) {
            assert!(shown.contains(&Some(kind.into())), "{kind} has no example");
        }
    }
}

#[test]
fn every_sentence_is_one_line_that_names_its_rank_and_its_call_in_words() {
    for error in examples() {
        let sentence = error.to_string();
        println!("{sentence}");
        for rank in error.at_fault() {
            assert!(names(&sentence, rank), "without rank {rank}: {sentence}");
        }
        if let Some(call) = error.call() {
            assert!(sentence.contains(&call.to_string()), "{sentence}");
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
        if error.group().is_some() {
            continue;
        }
        let (plain, blamed) = (error.to_string(), error.at_fault());
        let sentence = error.in_group("tp 1", &job_ranks).to_string();
        // Every number after "rank" is one of the job.
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

#[test]
fn debug_is_the_sentence_written_at_once() {
    /// Counts what is written to it.
    #[derive(Default)]
    struct Writes(Vec<String>);

    impl fmt::Write for Writes {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.push(text.into());
            Ok(())
        }
    }

    let error = Kind::DuplicateRank { pids: [7, 8] }.on(1);
    let sentence = error.to_string();
    let (mut short, mut long) = (Writes::default(), Writes::default());
    fmt::write(&mut short, format_args!("{error:?}")).unwrap();
    fmt::write(&mut long, format_args!("{error:#?}")).unwrap();
    assert_eq!([short.0, long.0], [[sentence.clone()], [sentence]]);
}

#[test]
fn an_error_of_an_argument_takes_its_rank_and_its_call_once() {
    let error = || Error::unsupported("operands must be bf16 or f16");
    let first = Error::of(1, "matmul")(error());
    assert_eq!(
        (first.rank(), first.call().unwrap().name()),
        (Some(1), "matmul")
    );
    let again = Error::of(2, "prepare")(first.clone());
    assert_eq!(again, first);
    // A failure of the system is not one of the call's arguments.
    let failed = Error::of(1, "matmul")(Error::of_kind(of_machines().remove(0)));
    assert_eq!((failed.rank(), failed.call()), (Some(1), None));
    let missing = Error::of(1, "matmul")(Error::of_kind(of_no_rank().remove(2)));
    assert_eq!(missing.at_fault(), [3]);
    let of_several = Error::one_of("weight", 1, 3)(Error::of_kind(arguments().remove(1)));
    assert!(
        of_several
            .to_string()
            .starts_with("b [N, K] (weight 2 of 3) is")
    );
}

#[test]
fn errors_of_a_group_name_it_and_ranks_of_the_job() {
    let in_group = |job_ranks: &[usize]| Kind::Capturing.on(1).in_group("tp 1", job_ranks);
    let of = |rank| Kind::Capturing.on(rank);
    let within = |job_ranks| in_group(job_ranks).to_string();
    assert_eq!(within(&[0, 1]), format!("group \"tp 1\": {}", of(1)));
    assert_eq!(
        within(&[4, 6]),
        format!("group \"tp 1\" of the job's ranks 4 and 6: {}", of(6))
    );
    let again = in_group(&[5, 3]).again();
    assert_eq!(
        again.to_string(),
        format!(
            "group \"tp 1\" of the job's ranks 5 and 3 has failed: {}",
            of(3)
        )
    );
    assert_eq!(
        (again.kind(), again.at_fault()),
        (&Kind::Capturing, vec![3])
    );
    assert_eq!(again.job_rank(0), 5);
    // What another rank was refused is that rank's failure to all others.
    assert_eq!(in_group(&[5, 3]).class_on(1), Class::Misuse);
    assert_eq!(in_group(&[5, 3]).class_on(0), Class::Rank);
    assert_eq!(again.class_on(1), Class::Rank);
}

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
    let reason = "Model::Config::load: Config::route, Eigen::Matrix::rows".to_owned();
    let error = Kind::ProgramFailed {
        function_of: Some("Group::connect_with".into()),
        reason: reason.clone(),
    };
    let failed = "rank 1 failed in the function that it gave to gemmesh_group_connect_with";
    assert_eq!(
        Dialect::C.sentence(&error.on(1)),
        format!("{failed}: {reason}")
    );
}

#[test]
fn names_are_those_of_the_language() {
    for (rust, python, c) in [
        (
            "raise Builder::arrival_timeout, or give its rank to Group::connect",
            "raise the option arrival_timeout, or give its rank to Group.connect",
            "raise arrival_timeout_ms of gemmesh_group_options, or give its rank to gemmesh_group_connect",
        ),
        (
            "prepare it with output_dtype(DType::F32)",
            "prepare it with dtype=\"f32\"",
            "prepare it with output_dtype GEMMESH_F32",
        ),
        (
            "set weight_layout(WeightLayout::Kn), Route::Push (Config::route)",
            "set weight_layout=\"kn\", \"push\" (route of Group.prepare)",
            "set weight_layout GEMMESH_WEIGHTS_KN, GEMMESH_ROUTE_PUSH (route of gemmesh_product)",
        ),
        (
            "std::fs::read, a::Config::route, Config::route::of",
            "std::fs::read, a::Config::route, Config::route::of",
            "std::fs::read, a::Config::route, Config::route::of",
        ),
    ] {
        assert_eq!(Dialect::Python.of(rust), python);
        assert_eq!(Dialect::C.of(rust), c);
    }
}
