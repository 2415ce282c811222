//! What ranks are told, word for word.

use std::time::Duration;

use gemmesh::error::Kind;
use gemmesh::{Error, Group, Host};

use crate::support::patience::{agreed, stretched};
use crate::support::tested;
use crate::{Arguments, MakeCall, TIMEOUT, short};

/// The sentence of a rank that waits in a call of this program.
#[track_caller]
fn told(error: &Error) -> String {
    let sentence = error.to_string();
    let words = tested::without_places(&sentence, file!());
    assert_ne!(words, sentence, "it has no place");
    words
}

#[test]
fn a_rank_that_does_not_come_is_told_of_by_the_call_the_rank_and_what_it_has_not_done() {
    let calls: [(MakeCall, &str); 2] = [
        (
            |_, arguments| arguments.run(),
            "all_gather_matmul(M = 6, K = 4, bf16, the 1st sharded matrix of the group): rank 0 has not begun it; \
             see whether it is stopped, slow, or making other calls, or raise Builder::arrival_timeout",
        ),
        (
            |group, _| group.barrier(),
            "barrier(): rank 0 has not come; \
             see whether it is stopped, slow, or making other calls, or raise Builder::arrival_timeout",
        ),
    ];
    for (call, what) in calls {
        let given_up = std::sync::Barrier::new(2);
        let result = Group::<Host>::builder()
            .arrival_timeout(short())
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
        let Kind::Timeout { waited_ms, .. } = error.kind() else {
            panic!("{error}")
        };
        let expected = format!("rank 0 kept rank 1 waiting for {waited_ms} ms in {what}");
        assert_eq!(told(&error), expected);
    }
}

#[test]
fn a_rank_that_holds_up_an_exchange_by_way_of_rank_0_is_told_of_at_the_deadline() {
    let given_up = std::sync::Barrier::new(3);
    let short = short();
    let result = Group::<Host>::builder()
        .arrival_timeout(short)
        .threads(3, |group| {
            let result = match group.rank() {
                0 => {
                    // So that rank 1's time is over first.
                    std::thread::sleep(short / 2);
                    group.barrier()
                }
                1 => group.barrier(),
                _ => Ok(()),
            };
            given_up.wait();
            result
        });
    let error = result.unwrap_err();
    let Kind::Timeout { waited_ms, .. } = error.kind() else {
        panic!("{error}")
    };
    assert_eq!(
        told(&error),
        format!(
            "rank 2 kept rank 1 waiting for {waited_ms} ms in barrier(): rank 2 has not come; \
             see whether it is stopped, slow, or making other calls, or raise Builder::arrival_timeout"
        )
    );
}

#[test]
fn an_exchange_does_not_exceed_its_deadline() {
    let deadline = agreed(Duration::from_millis(100));
    let exceeded = |late: usize| {
        let [begin, given_up] = [(); 2].map(|()| std::sync::Barrier::new(3));
        let builder = Group::<Host>::builder()
            .arrival_timeout(deadline)
            .workers(1);
        let result = builder.threads(3, |group| {
            begin.wait();
            let result = match group.rank() == late {
                true => Ok(Vec::new()),
                false => group.all_gather_bytes(b"word"),
            };
            given_up.wait();
            result
        });
        let error = result.unwrap_err();
        let (Some(rank), Kind::Timeout { waited_ms, .. }) = (error.rank(), error.kind()) else {
            panic!("{error}")
        };
        assert_eq!(rank, late, "{error}");
        Duration::from_millis(*waited_ms) - deadline
    };
    for late in 0..3 {
        // A busy machine may hold the waiting rank up, but not each time.
        let is_in_time = (0..20).any(|_| exceeded(late) < stretched(Duration::from_millis(200)));
        assert!(is_in_time, "rank {late} is late");
    }
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
        assert!(
            matches!(
                (error.rank(), error.kind()),
                (Some(0), Kind::RankLeft { .. })
            ),
            "{error}"
        );
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
        assert!(expected.into_iter().any(|e| e == told(&error)), "{error}");
    }
}
