//! Arguments that one rank alone is refused: the others do not wait for it.

use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use gemmesh::error::Kind;
use gemmesh::products::WeightLayout;
use gemmesh::{
    AllGatherMatmul, Error, Group, Host, Matmul, MatmulReduceScatter, all_gather_matmul, bf16,
};

use crate::support::errors::parts_of;
use crate::support::patience::{again_if_busy, agreed};
use crate::support::tested;
use crate::{Arguments, MakeCall, TIMEOUT, noticed};

/// Longer than the others wait for a rank that was refused its call.
const REFUSED: Duration = Duration::from_millis(1000);

/// Rank 1 of 3 makes `refused`, and neither leaves nor calls again, while the others make `call`. All get `expected`.
#[track_caller]
fn refuse(expected: Error, call: MakeCall, refused: MakeCall) {
    // A rank that comes later than the others give to the refused one finds that the group has failed.
    again_if_busy(|| {
        let over = Barrier::new(3);
        Group::<Host>::builder()
            .timeout(TIMEOUT)
            .arrival_timeout(TIMEOUT)
            .workers(1)
            .threads(3, |group| -> Result<(), Error> {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                let begin = Instant::now();
                let result = match group.rank() {
                    1 => refused(&group, &mut arguments),
                    _ => call(&group, &mut arguments),
                };
                let took = begin.elapsed();
                over.wait();
                assert_eq!(result, Err(expected.clone()));
                assert!(took < noticed(), "{took:?}");
                let later = group.barrier().unwrap_err();
                assert!(later.has_ended_group(), "{later}");
                assert_eq!(later.cause(), expected);
                Ok(())
            })
            .unwrap();
    });
}

fn shape(call: &str, argument: &str, expected: [usize; 2], found: [usize; 2]) -> Error {
    Kind::Shape {
        argument: argument.into(),
        expected: expected.into(),
        found: found.into(),
    }
    .on(1)
    .in_call(call.into())
}

#[test]
fn a_wrong_weight_on_one_rank_is_named_to_all() {
    let expected = shape("all_gather_matmul", "b [N, K]", [5, 4], [5, 3]);
    assert_eq!(
        expected.to_string(),
        "rank 1: all_gather_matmul: b [N, K] is [5, 3] and must be [5, 4]"
    );
    refuse(
        expected,
        |_, arguments| arguments.run(),
        |group, arguments| {
            let b = group.zeros::<bf16>(5, 3)?;
            all_gather_matmul(&arguments.a, &b, &mut arguments.out)
        },
    );
}

/// Checks that a result is this rank's error of an argument of `call`, and says `what`.
#[track_caller]
fn assert_refused(group: &Group<Host>, call: &str, result: Result<(), Error>, what: &str) {
    let error = result.unwrap_err();
    let refused = error.call().expect("an argument is wrong");
    assert_eq!(refused.name(), call);
    let expected = format!("rank {}: {refused}: {what}", group.rank());
    assert_eq!(error.to_string(), expected);
}

/// Gives each product a transposed weight, which has N and K in each other's places, and one that fits neither way.
fn give_weights_in_the_other_layout(group: &Group<Host>) -> Result<(), Error> {
    let (m, n, k) = (6, 5, 4);
    let sharded = group.sharded::<bf16>(m, k)?;
    let (a, mut out) = (group.zeros::<bf16>(m, k)?, group.zeros::<bf16>(m, n)?);
    let mut sums = group.sharded::<bf16>(m, n)?;
    let hint = |layout| format!("pass [{layout}], or set weight_layout(WeightLayout::");
    let transposed = [
        (
            WeightLayout::Nk,
            [k, n],
            "b [N, K] is [4, 5] and must be [5, 4]",
            hint("N, K") + "Kn)",
        ),
        (
            WeightLayout::Kn,
            [n, k],
            "b [K, N] is [5, 4] and must be [4, 5]",
            hint("K, N") + "Nk)",
        ),
    ];
    for (layout, [rows, columns], what, remedy) in transposed {
        let said = |call: &str, result, what: &str| assert_refused(group, call, result, what);
        let b = group.zeros::<bf16>(rows, columns)?;
        let wrong = group.zeros::<bf16>(7, 8)?;
        let neither = match layout {
            WeightLayout::Nk => "b [N, K] is [7, 8] and must be [7, 4]",
            WeightLayout::Kn => "b [K, N] is [7, 8] and must be [4, 8]",
        };
        let turned = format!("{what}; it looks transposed: {remedy}");
        for (b, what) in [(&b, turned.as_str()), (&wrong, neither)] {
            let gathered = AllGatherMatmul::new().weight_layout(layout);
            said(
                "all_gather_matmul",
                gathered.run(&sharded, b, &mut out),
                what,
            );
            let several = gathered.run(&sharded, [b, b], [&mut out]);
            let first = what.replacen(']', "] (weight 1 of 2)", 1);
            said("all_gather_matmul", several, &first);
            let alone = Matmul::new().weight_layout(layout);
            said("matmul", alone.run(&a, b, &mut out), what);
            let scattered = MatmulReduceScatter::new().weight_layout(layout);
            said(
                "matmul_reduce_scatter",
                scattered.run(&a, b, &mut out),
                what,
            );
            said(
                "matmul_reduce_scatter",
                scattered.run_into(&a, b, &mut sums),
                what,
            );
        }
    }
    Ok(())
}

#[test]
fn a_weight_in_the_other_layout_is_told_of_with_the_shape_and_the_remedy() {
    let ranks = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .workers(1);
    ranks
        .threads(2, |group| give_weights_in_the_other_layout(&group))
        .unwrap();
}

#[test]
fn a_wrong_output_on_one_rank_is_named_to_all() {
    refuse(
        shape("all_gather_matmul", "out [M, N]", [6, 5], [5, 6]),
        |_, arguments| arguments.run(),
        |group, arguments| {
            let mut out = group.zeros::<bf16>(5, 6)?;
            all_gather_matmul(&arguments.a, &arguments.b, &mut out)
        },
    );
}

#[test]
fn a_wrong_bias_on_one_rank_is_named_to_all() {
    refuse(
        shape("all_gather_matmul", "bias [1, N]", [1, 5], [1, 4]),
        |_, arguments| arguments.run(),
        |group, arguments| {
            let bias = group.zeros::<bf16>(1, 4)?;
            let biased = AllGatherMatmul::new().bias(&bias);
            biased.run(&arguments.a, &arguments.b, &mut arguments.out)
        },
    );
}

#[test]
fn a_wrong_matrix_on_one_rank_is_named_to_all() {
    refuse(
        shape("gather", "a [M, K] of a prepared call", [6, 4], [6, 3]),
        |group, arguments| {
            group.sharded::<bf16>(6, 3)?;
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&arguments.a)
        },
        |group, arguments| {
            let other = group.sharded::<bf16>(6, 3)?;
            let prepared = AllGatherMatmul::new().prepare(&arguments.a, 5)?;
            prepared.gather(&other)
        },
    );
}

#[test]
fn a_wrong_split_of_a_sharded_matrix_on_one_rank_is_named_to_all() {
    refuse(
        Error::unsuitable(
            "the number of ranks of the list of rows",
            "3, that of the group",
            "2",
        )
        .on(1)
        .in_call("Group::sharded_rows".into()),
        |group, _| group.sharded::<bf16>(6, 3).map(drop),
        |group, _| group.sharded_rows::<bf16>(&[3, 3], 3).map(drop),
    );
}

#[test]
fn a_configuration_that_cannot_be_on_one_rank_is_named_to_all() {
    let expected = Kind::Limit {
        what: "Config::tile.n".into(),
        value: 0,
        min: 1,
        max: i32::MAX as usize,
    }
    .on(1)
    .in_call("all_gather_matmul".into());
    refuse(
        expected,
        |_, arguments| arguments.run(),
        |_, arguments| {
            let prepared = AllGatherMatmul::<_, bf16>::new().prepare(&arguments.a, 5)?;
            let mut config = prepared.config();
            config.tile.n = 0;
            let product = AllGatherMatmul::new().config(config);
            product.run(&arguments.a, &arguments.b, &mut arguments.out)
        },
    );
}

#[test]
fn a_rank_that_is_refused_what_it_prepares_and_takes_its_time_has_done_no_harm() {
    Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .threads(3, |group| -> Result<(), Error> {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            if group.rank() == 1 {
                let bias = group.zeros::<bf16>(1, 4)?;
                let biased = AllGatherMatmul::new().bias(&bias);
                assert!(biased.prepare(&arguments.a, 5).is_err());
                std::thread::sleep(2 * REFUSED);
            }
            arguments.verify(&group)
        })
        .unwrap();
}

#[test]
fn a_rank_that_leaves_when_it_is_refused_a_call_is_named_with_the_reason() {
    let calls: [MakeCall; 2] = [|_, arguments| arguments.run(), |group, _| group.barrier()];
    for call in calls {
        let begin = Instant::now();
        let error = Group::<Host>::builder()
            .timeout(TIMEOUT)
            .arrival_timeout(TIMEOUT)
            .threads(3, |group| {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                if group.rank() != 1 {
                    let result = call(&group, &mut arguments);
                    let expected = shape("all_gather_matmul", "b [N, K]", [5, 4], [5, 3]);
                    assert_eq!(result.unwrap_err().cause(), expected);
                    return Ok(());
                }
                let b = group.zeros::<bf16>(5, 3)?;
                all_gather_matmul(&arguments.a, &b, &mut arguments.out)
            });
        assert!(matches!(
            parts_of(&error),
            Some((Some(1), Kind::Shape { .. }))
        ));
        assert!(begin.elapsed() < noticed());
    }
}

#[test]
fn a_rank_that_corrects_its_call_in_time_has_done_no_harm() {
    /// Less than the others wait.
    const IN_TIME: Duration = Duration::from_millis(450);
    // A busy machine may hold rank 1 up for longer, but not each time.
    let result = (0..20).find_map(|_| match correct() {
        (Err(_), longest) if longest > IN_TIME => None,
        (result, _) => Some(result),
    });
    assert_eq!(result, Some(Ok(())));
}

/// Rank 1 of 3 corrects its call three times. Returns the result, and how long that took it at the most.
fn correct() -> (Result<(), Error>, Duration) {
    let longest = Mutex::new(Duration::ZERO);
    let done = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .threads(3, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            for _ in 0..3 {
                let begin = Instant::now();
                if group.rank() == 1 {
                    let b = group.zeros::<bf16>(5, 3)?;
                    all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
                    std::thread::sleep(Duration::from_millis(50));
                }
                let verified = arguments.verify(&group);
                if group.rank() == 1 {
                    let mut longest = longest.lock().unwrap();
                    *longest = begin.elapsed().max(*longest);
                }
                verified?;
            }
            // Longer ago than a refusal stands, but of a call that was made.
            if group.rank() == 1 {
                std::thread::sleep(REFUSED);
            }
            arguments.verify(&group)?;
            group.barrier()
        });
    (done.map(drop), longest.into_inner().unwrap())
}

#[test]
fn ranks_that_are_all_refused_a_call_try_again_as_late_as_they_like() {
    Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .threads(3, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            let b = group.zeros::<bf16>(5, 3)?;
            let turn = group.rank() as u32;
            for tries in 1..3 {
                for _ in 0..tries {
                    all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
                }
                std::thread::sleep(turn * REFUSED * 3 / 4);
                arguments.verify(&group)?;
            }
            group.barrier()
        })
        .unwrap();
}

#[test]
fn one_of_them_that_gives_up_is_named_with_the_reason_at_the_deadline() {
    let short = agreed(Duration::from_millis(800));
    let (are_refused, over) = (Barrier::new(3), Barrier::new(3));
    Group::<Host>::builder()
        .arrival_timeout(short)
        .threads(3, |group| -> Result<(), Error> {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            let b = group.zeros::<bf16>(5, 3)?;
            let refused = all_gather_matmul(&arguments.a, &b, &mut arguments.out);
            // A rank that is refused later than half of the deadline may still try again at it.
            are_refused.wait();
            let begin = Instant::now();
            let tried_again = (group.rank() != 1).then(|| (arguments.run(), begin.elapsed()));
            over.wait();
            refused.unwrap_err();
            if let Some((result, took)) = tried_again {
                let expected = shape("all_gather_matmul", "b [N, K]", [5, 4], [5, 3]);
                assert_eq!(result.unwrap_err().cause(), expected);
                assert!(took > short / 2, "{took:?}");
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_rank_that_makes_another_call_when_it_is_refused_one_is_named_with_that() {
    let error = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .threads(2, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            if group.rank() == 0 {
                return arguments.run();
            }
            let b = group.zeros::<bf16>(5, 3)?;
            all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
            group.barrier()
        });
    assert!(matches!(
        parts_of(&error),
        Some((Some(1), Kind::CallMismatch { .. }))
    ));
}

/// Rank `refused` of two ignores that a call was refused and makes `other`. Returns what the ranks are told.
fn ignore(refused: usize, other: fn(&Group<Host>) -> Result<(), Error>) -> Vec<Error> {
    let is_refused = Barrier::new(2);
    let builder = Group::<Host>::builder().timeout(TIMEOUT).workers(1);
    let told = builder.threads(2, |group| {
        let mut arguments = Arguments::new(&group, 6, 5, 4)?;
        let told = if group.rank() == refused {
            let b = group.zeros::<bf16>(5, 3)?;
            all_gather_matmul(&arguments.a, &b, &mut arguments.out).unwrap_err();
            is_refused.wait();
            other(&group)
        } else {
            is_refused.wait();
            arguments.run()
        };
        Ok::<_, Error>(told.unwrap_err())
    });
    told.unwrap()
}

#[test]
fn a_refused_call_is_told_of_if_its_rank_ignores_that_and_makes_another_call() {
    type Other = fn(&Group<Host>) -> Result<(), Error>;
    let others: [(&str, Other); 2] = [
        ("barrier", |group| group.barrier()),
        // It withdraws the refusal first.
        ("sharded", |group| group.sharded::<bf16>(6, 4).map(drop)),
    ];
    let all = [0, 1]
        .into_iter()
        .flat_map(|rank| others.map(|other| (rank, other)));
    for (refused, (name, other)) in all {
        for error in ignore(refused, other) {
            let words = tested::without_places(&error.to_string(), file!());
            println!("{words}");
            let right = 1 - refused;
            let expected = format!(
                "rank {refused} called {name} while rank {right} called all_gather_matmul, after it was refused a call \
                 (rank {refused}: all_gather_matmul: b [N, K] is [5, 3] and must be [5, 4]); all ranks must"
            );
            assert!(words.starts_with(&expected), "{words}");
        }
    }
}

#[test]
fn a_refusal_is_the_reason_also_where_the_timeout_is_short() {
    let (is_refused, is_over) = (Barrier::new(2), Barrier::new(2));
    let error = Group::<Host>::builder()
        .arrival_timeout(agreed(Duration::from_millis(800)))
        .threads(2, |group| {
            let mut arguments = Arguments::new(&group, 6, 5, 4)?;
            let result = match group.rank() {
                0 => {
                    is_refused.wait();
                    arguments.run()
                }
                _ => {
                    let b = group.zeros::<bf16>(5, 3)?;
                    let result = all_gather_matmul(&arguments.a, &b, &mut arguments.out);
                    is_refused.wait();
                    result
                }
            };
            is_over.wait();
            result
        });
    assert!(matches!(
        parts_of(&error),
        Some((Some(1), Kind::Shape { .. }))
    ));
}

/// More than each of three ranks may send.
fn too_many_bytes() -> Vec<u8> {
    vec![0; (256 << 20) / 3]
}

fn too_long() -> Error {
    let most = (256 << 20) / 3 - 4096;
    Kind::Limit {
        what: "the number of bytes".into(),
        value: too_many_bytes().len(),
        min: 0,
        max: most,
    }
    .on(1)
    .in_call("all_gather_bytes".into())
}

#[test]
fn too_many_bytes_on_one_rank_are_named_to_all() {
    refuse(
        too_long(),
        |group, _| group.all_gather_bytes(&[1]).map(drop),
        |group, _| group.all_gather_bytes(&too_many_bytes()).map(drop),
    );
}

#[test]
fn a_rank_that_was_refused_too_many_bytes_may_send_fewer() {
    let told = Group::<Host>::builder()
        .timeout(TIMEOUT)
        .arrival_timeout(TIMEOUT)
        .threads(3, |group| {
            if group.rank() == 1 {
                let refused = group.all_gather_bytes(&too_many_bytes());
                assert_eq!(refused, Err(too_long()));
            }
            let sent = group.all_gather_bytes(&[group.rank() as u8])?;
            group.barrier()?;
            Ok::<_, Error>(sent)
        });
    assert_eq!(told, Ok(vec![vec![vec![0], vec![1], vec![2]]; 3]));
}
