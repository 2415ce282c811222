//! What ranks are told, word for word.

use std::time::Duration;

use gemmesh::{AllGatherMatmul, Error, Group, Host, bf16};

use crate::{Arguments, MakeCall, SHORT, TIMEOUT};

#[test]
fn a_rank_that_does_not_come_is_told_of_by_the_call_the_rank_and_what_it_has_not_done() {
    let calls: [(MakeCall, &str); 2] = [
        (
            |_, arguments| arguments.run(),
            "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group): rank 0 has not begun it; \
             see whether rank 0 is stopped, slow, or making other calls, or raise Builder::arrival_timeout",
        ),
        (
            |group, _| group.barrier(),
            "barrier(): rank 0 has not come; \
             see whether rank 0 is stopped, slow, or making other calls, or raise Builder::arrival_timeout",
        ),
    ];
    for (call, what) in calls {
        let given_up = std::sync::Barrier::new(2);
        let result = Group::<Host>::builder()
            .arrival_timeout(SHORT)
            .workers(1)
            .threads(2, |group| {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                arguments.verify(&group)?;
                let result = match group.rank() {
                    0 => {
                        given_up.wait();
                        Ok(())
                    }
                    _ => call(&group, &mut arguments),
                };
                if group.rank() == 1 {
                    given_up.wait();
                }
                result
            });
        let error = result.unwrap_err();
        let Error::Timeout { waited_ms, .. } = error else {
            panic!("{error}")
        };
        let expected = format!("rank 1 gave up after {waited_ms} ms in {what}");
        assert_eq!(error.to_string(), expected);
    }
}

#[test]
fn a_rank_that_holds_up_the_one_that_is_waited_for_is_told_of() {
    let given_up = std::sync::Barrier::new(3);
    let result = Group::<Host>::builder()
        .arrival_timeout(2 * SHORT)
        .threads(3, |group| {
            let result = match group.rank() {
                0 => {
                    // So that rank 1's time is over first, though it waits half a second longer for an intermediary.
                    std::thread::sleep(Duration::from_millis(1250));
                    group.barrier()
                }
                1 => group.barrier(),
                _ => Ok(()),
            };
            given_up.wait();
            result
        });
    let error = result.unwrap_err();
    let Error::Timeout { waited_ms, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(
        error.to_string(),
        format!(
            "rank 1 gave up after {waited_ms} ms in barrier(): rank 0 has not come, held up by rank 2; \
             see whether rank 2 is stopped, slow, or making other calls, or raise Builder::arrival_timeout"
        )
    );
}

#[test]
fn a_rank_that_left_is_told_of_by_the_call_the_rank_and_what_it_has_not_done() {
    let calls: [(MakeCall, &str); 2] = [
        (
            |_, arguments| arguments.run(),
            "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group): rank 0 has not begun it",
        ),
        (|group, _| group.barrier(), "barrier()"),
    ];
    for (call, what) in calls {
        let result = Group::<Host>::builder()
            .timeout(TIMEOUT)
            .workers(1)
            .threads(2, |group| {
                let mut arguments = Arguments::new(&group, 6, 5, 4)?;
                arguments.verify(&group)?;
                match group.rank() {
                    0 => Ok(()),
                    _ => call(&group, &mut arguments),
                }
            });
        let error = result.unwrap_err();
        assert!(matches!(error, Error::RankLeft { rank: 0, .. }), "{error}");
        // A worker that waits for the rows may be the one to see it.
        let rows = "rank 0 has rows that have not come to rank 1";
        let rows = what
            .split_once(": ")
            .map(|(call, _)| format!("{call}: {rows}"));
        let expected = [Some(what.to_string()), rows]
            .into_iter()
            .flatten()
            .map(|what| {
                format!(
                    "rank 0 left the group while rank 1 waited in {what}; \
                 see that rank's own output, and whether all ranks make the same calls"
                )
            });
        assert!(
            expected.into_iter().any(|e| e == error.to_string()),
            "{error}"
        );
    }
}

#[test]
fn what_is_not_supported_is_told_of_by_what_must_hold_instead() {
    let refused = Group::<Host>::threads(1, |group| {
        let a = group.sharded::<bf16>(6, 4)?;
        let mut config = AllGatherMatmul::new().prepare(&a, 5)?.config();
        config.tile = config.tile.with_stream_k(true);
        AllGatherMatmul::new().config(config).prepare(&a, 5)?;
        Ok::<(), Error>(())
    });
    let place = format!("{}:{}", file!(), line!() - 3);
    assert_eq!(
        refused.unwrap_err().to_string(),
        format!(
            "rank 0: all_gather_matmul at {place}: not supported: Config::tile.stream_k must be false unless \
             Numerics::StreamK is asked for"
        )
    );
}
