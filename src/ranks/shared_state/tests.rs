//! What ranks see of one another through the block.

use super::*;
use crate::error::{Deadline, Error, Kind, MadeCall, Result};
use crate::protocol::flag::Awaited;
use crate::ranks::call::PostedCall;
use crate::ranks::deadlines::Deadlines;
use crate::ranks::memfd::memfd;
use crate::ranks::mirror::record::Record;
use crate::schedule::Agreed;

fn ranks(world: usize) -> Vec<SharedState> {
    let fd = memfd(SharedState::BYTES).unwrap();
    (0..world)
        .map(|rank| {
            SharedState::new(
                Mapping::shared(&fd, SharedState::BYTES).unwrap(),
                rank,
                world,
            )
        })
        .collect()
}

/// A call as ranks must agree on it.
fn product(k: usize) -> Agreed {
    let arguments = ["M = 4096", &format!("K = {k}"), "bf16"];
    Agreed::new("all_gather_matmul", arguments)
}

#[test]
fn the_first_failure_is_everybodys() {
    let ranks = ranks(3);
    assert_eq!(ranks[2].fault(), None);
    let first = Kind::RankLost { noticed_by: 1 }.on(0);
    let second = Kind::RankLost { noticed_by: 2 }.on(1);
    assert_eq!(ranks[1].fail(first.clone()), first);
    assert_eq!(ranks[2].fail(second), first);
    assert_eq!(ranks[0].fault(), Some(first));
}

#[test]
fn a_failure_too_long_for_the_block_is_shortened_not_lost() {
    let ranks = ranks(2);
    ranks[0].fail(
        Kind::OutOfMemory {
            bytes: 1,
            reason: "ü".repeat(FAULT_BYTES),
        }
        .on(0),
    );
    let seen = ranks[1].fault().unwrap().to_string();
    assert!(seen.contains("has no memory for 1 byte:"), "{seen}");
}

#[test]
fn a_rank_that_leaves_says_why_if_it_knows() {
    let ranks = ranks(4);
    let got = Kind::Capturing.on(0);
    ranks[0].note_got(Some(&got));
    let other = Kind::ProgramFailed {
        function_of: None,
        reason: "no such file".into(),
    }
    .on(0);
    assert_eq!(ranks[0].program_failed(got.to_string()), got);
    assert_eq!(ranks[0].program_failed("no such file".into()), other);
    ranks[0].leave_with_what_it_got();
    ranks[1].note_got(Some(&got));
    ranks[1].note_got(None);
    ranks[1].leave_with_what_it_got();
    ranks[2].let_go();
    assert!(
        (0..4)
            .map(|rank| ranks[3].has_left(rank))
            .eq([true, true, true, false])
    );
    assert_eq!(ranks[3].why_left(0, None), Some(got));
    assert_eq!(ranks[3].why_left(1, None), None);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| ranks[3].why_left(2, None));
        ranks[2].end(Some(other.clone()));
        assert_eq!(asked.join().unwrap(), Some(other));
    });
}

#[test]
fn a_rank_that_hands_its_group_on_has_not_left_when_its_function_ends() {
    let ranks = ranks(2);
    ranks[0].end(None);
    assert!(!ranks[1].has_left(0));
    ranks[0].let_go();
    assert!(ranks[1].has_left(0));
    // A busy machine may hold this thread up, but not each time.
    let is_quick = (0..20).any(|_| {
        let begin = Instant::now();
        assert_eq!(ranks[1].why_left(0, None), None);
        begin.elapsed() < FAREWELL
    });
    assert!(is_quick, "it has nothing more to say");
    // But a failed rank makes no more calls, whoever has the group.
    let reason = Kind::Capturing.on(1);
    ranks[1].end(Some(reason.clone()));
    assert_eq!(ranks[0].fault(), Some(reason));
}

#[test]
fn the_rank_that_waits_for_nobody_is_to_blame() {
    let fresh = Duration::from_secs(60);
    let ranks = ranks(4);
    assert_eq!(ranks[0].culprit(1, fresh), 1);
    ranks[1].note_wait(2, String::new);
    ranks[2].note_wait(3, String::new);
    assert_eq!(ranks[0].culprit(1, fresh), 3);
    std::thread::sleep(Duration::from_millis(3));
    let stopped = ranks[0].culprit(1, Duration::ZERO);
    assert_eq!(stopped, 1, "it has not looked for its flag since");
    ranks[3].note_wait(1, String::new);
    assert_eq!(ranks[0].culprit(1, fresh), 1, "a circle");
}

fn barrier() -> MadeCall {
    MadeCall::named("barrier")
}

/// The call of this name that [`operation`] makes of `K = 64`.
fn as_posted(name: &str) -> MadeCall {
    let arguments = [
        "M = 4096",
        "K = 64",
        "bf16",
        "the 3rd sharded matrix of the group",
    ];
    MadeCall::new(name, arguments.map(String::from))
}

fn operation(agreed: &Agreed) -> PostedCall<'_> {
    PostedCall {
        agreed,
        matrices: &[2],
        traced: false,
        biased: false,
        residual: false,
        place: None,
    }
}

fn post(shared_state: &SharedState, number: u64, agreed: &Agreed) -> Result<()> {
    shared_state.post_operation(number, Epoch::FIRST, operation(agreed))
}

#[track_caller]
fn assert_blamed(result: Result<()>, blamed: usize, right: usize) {
    let error = result.unwrap_err();
    let Kind::CallMismatch { other, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!((error.rank(), *other), (Some(blamed), right));
}

#[test]
fn the_rank_that_calls_something_else_is_named() {
    let other = Agreed::new("gather", ["M = 4096", "K = 64", "bf16"]);
    let ranks = ranks(3);
    post(&ranks[2], 1, &product(64)).unwrap();
    post(&ranks[0], 1, &product(64)).unwrap();
    assert_eq!(
        post(&ranks[1], 1, &other),
        Err(Kind::CallMismatch {
            theirs: as_posted("gather"),
            other: 0,
            expected: as_posted("all_gather_matmul"),
            number: 1,
            refused: None
        }
        .on(1))
    );
}

#[test]
fn traced_calls_biased_ones_and_those_of_other_matrices_differ_and_a_long_text_is_cut() {
    let ranks = ranks(2);
    let long = Agreed::new("all_gather_matmul", ["rows"; 100]);
    let call = operation(&long);
    ranks[0].post_operation(1, Epoch::FIRST, call).unwrap();
    let traced = PostedCall {
        traced: true,
        ..call
    };
    let biased = PostedCall {
        biased: true,
        ..call
    };
    let residual = PostedCall {
        residual: true,
        ..call
    };
    let other = PostedCall {
        matrices: &[0, 7],
        ..call
    };
    for (differs, word) in [
        (traced, "a trace)"),
        (biased, "a bias)"),
        (residual, "a residual)"),
        (
            other,
            "the 1st sharded matrix of the group, the 8th sharded matrix of the group)",
        ),
    ] {
        assert!(differs.in_words().contains(word), "{differs:?}");
        assert!(differs.in_words().contains("rows, rows"), "{differs:?}");
        assert!(differs.in_words().contains('…'), "{differs:?}");
        assert_blamed(ranks[1].post_operation(1, Epoch::FIRST, differs), 1, 0);
    }
    // Only the end differs, for which the post has no room.
    let longer = Agreed::new("all_gather_matmul", ["rows"; 101]);
    assert_blamed(post(&ranks[1], 1, &longer), 1, 0);
}

#[test]
fn the_odd_one_is_named_also_when_it_came_first_and_in_a_tie_the_lowest_is_right() {
    let other = product(32);
    let ranks = ranks(3);
    post(&ranks[1], 1, &other).unwrap();
    // Rank 2 has not called.
    assert_blamed(post(&ranks[0], 1, &product(64)), 1, 0);
    assert_blamed(post(&ranks[2], 1, &other), 0, 1);
}

#[test]
fn exchanges_and_operations_are_one_sequence() {
    let ranks = ranks(2);
    ranks[0].post_messages(1, &barrier(), None).unwrap();
    ranks[1].post_messages(1, &barrier(), None).unwrap();
    ranks[1].note_made();
    post(&ranks[0], 2, &product(64)).unwrap();
    assert_eq!(
        ranks[1].post_messages(2, &barrier(), None),
        Err(Kind::CallMismatch {
            theirs: barrier(),
            other: 0,
            expected: as_posted("all_gather_matmul"),
            number: 2,
            refused: None
        }
        .on(1))
    );
    ranks[0].post_messages(3, &barrier(), None).unwrap();
    assert_blamed(
        ranks[1].post_messages(3, &MadeCall::named("another"), None),
        1,
        0,
    );
}

#[test]
fn a_rank_cannot_overwrite_what_a_slower_one_still_needs() {
    let ranks = ranks(2);
    for number in 1..=POSTS {
        assert_eq!(ranks[0].may_post(number), Ok(()));
        post(&ranks[0], number, &product(64)).unwrap();
    }
    assert_eq!(ranks[0].may_post(POSTS + 1), Err(1));
    post(&ranks[1], 1, &product(64)).unwrap();
    let too_early = ranks[0].may_post(POSTS + 1);
    assert_eq!(too_early, Err(1), "the slot after it is needed");
    for number in 2..=POSTS {
        post(&ranks[1], number, &product(64)).unwrap();
        assert_eq!(ranks[0].may_post(POSTS + 1), Ok(()));
    }
    // A rank that is ahead is no reason to wait.
    for number in POSTS + 1..2 * POSTS {
        assert_eq!(ranks[1].may_post(number), Ok(()));
        post(&ranks[1], number, &product(64)).unwrap();
        assert_eq!(ranks[0].may_post(POSTS + 1), Ok(()));
    }
    assert_eq!(ranks[1].may_post(2 * POSTS), Err(0));
}

#[test]
fn a_refusal_stands_until_its_rank_makes_the_call() {
    const WAITED: Duration = Duration::from_secs(1);
    // A rank has half of this to make its call after all. That is longer than a busy machine delays this test.
    const TIMEOUT: Duration = Duration::from_secs(1);
    let ranks = ranks(2);
    let error = |value| {
        Kind::Limit {
            what: "N".into(),
            value,
            min: 1,
            max: 9,
        }
        .on(1)
        .in_call("matmul".into())
    };
    post(&ranks[1], 1, &product(64)).unwrap();
    ranks[1].note_refusal(2, &error(10));
    ranks[1].note_refusal(2, &error(11));
    assert_eq!(ranks[0].refusal(1, 2), Some(error(11)));
    assert_eq!(ranks[0].refusal(1, 1), None);
    assert_eq!(ranks[0].refusal(1, 3), None);
    assert_eq!(ranks[0].refusal(0, 2), None);

    let deadlines = Deadlines::new(Duration::ZERO, Some(TIMEOUT));
    let standing = |number, waited| ranks[0].standing_refusal(|| Some(number), waited, &deadlines);
    assert_eq!(standing(2, WAITED), None, "it was refused only now");
    std::thread::sleep(TIMEOUT);
    assert_eq!(standing(2, WAITED), Some(error(11)));
    assert_eq!(standing(2, TIMEOUT / 4), None, "nobody has waited long");
    assert_eq!(standing(1, WAITED), None);

    post(&ranks[1], 2, &product(64)).unwrap();
    assert_eq!(ranks[0].refusal(1, 2), None);
    assert_eq!(standing(2, WAITED), None);
}

#[test]
fn what_all_were_refused_counts_for_nobody_who_tries_again() {
    const TIMEOUT: Duration = Duration::from_millis(20);
    const WAITED: Duration = Duration::from_millis(15);
    let ranks = ranks(2);
    let error = Kind::Capturing.on(1);
    let refuse = |rank: usize, number| ranks[rank].note_refusal(number, &error);
    let standing = |number, waited| {
        std::thread::sleep(TIMEOUT);
        let deadlines = Deadlines::new(Duration::ZERO, Some(TIMEOUT));
        ranks[0].standing_refusal(|| Some(number), waited, &deadlines)
    };
    (0..2).for_each(|rank| refuse(rank, 1));
    assert_eq!(standing(1, WAITED), None);
    assert_eq!(standing(1, TIMEOUT), Some(error.clone()), "it did not come");
    // The other rank has tried again, and was refused again.
    refuse(1, 1);
    assert_eq!(standing(1, WAITED), Some(error.clone()));
    refuse(0, 1);
    assert_eq!(standing(1, WAITED), None);
    // The next call has a new count, and the note about this call stays.
    refuse(0, 2);
    assert_eq!(standing(1, WAITED), None);
    refuse(1, 2);
    refuse(1, 2);
    assert_eq!(standing(2, WAITED), Some(error.clone()));
}

#[test]
fn a_refusal_is_withdrawn_when_its_rank_prepares_the_call() {
    const WAITED: Duration = Duration::from_secs(1);
    let ranks = ranks(2);
    let error = Kind::Capturing.on(1);
    let deadlines = Deadlines::new(Duration::ZERO, Some(Duration::ZERO));
    let standing = || ranks[0].standing_refusal(|| Some(1), WAITED, &deadlines);
    ranks[1].note_refusal(1, &error);
    assert_eq!(standing(), Some(error.clone()));
    ranks[1].withdraw_refusal(1);
    assert_eq!(ranks[0].refusal(1, 1), None);
    assert_eq!(standing(), None);
    ranks[1].note_refusal(1, &error);
    assert_eq!(standing(), Some(error));
}

#[test]
fn a_wait_is_described_by_the_call_the_peer_and_what_that_has_not_done() {
    let ranks = ranks(2);
    let epoch = Epoch::from_raw(u32::MAX);
    ranks[1].post_messages(1, &barrier(), None).unwrap();
    let product = product(64);
    ranks[1]
        .post_operation(2, epoch, operation(&product))
        .unwrap();
    ranks[1].post_messages(3, &barrier(), None).unwrap();
    let says = |awaited, what: &str| {
        let call = "all_gather_matmul(M = 4096, K = 64, bf16, the 3rd sharded matrix of the group)";
        let expected = format!("{call}: rank 0 {what}");
        assert_eq!(ranks[1].describe(epoch, awaited), expected);
    };
    let (source, peer) = (0, 0);
    says(Awaited::Ready { source }, "has not begun it");
    let come = "has rows that have not come to rank 1";
    let (flag, pulled) = (3, false);
    says(
        Awaited::Chunk {
            source,
            flag,
            pulled,
        },
        come,
    );
    says(Awaited::LowLatency { source }, come);
    let moved = "has not moved all that it takes from rank 1, or brings it";
    says(Awaited::Done { peer }, moved);
    assert_eq!(ranks[1].call_of(epoch.next()), "an operation");
}

/// Ranks of two hosts, of two ranks each, with their blocks.
fn ranks_of_two_hosts() -> Vec<SharedState> {
    let hosts = Hosts::of(&[0, 0, 1, 1]).unwrap();
    let blocks = [0, 1].map(|_| memfd(SharedState::BYTES).unwrap());
    let rank = |rank| {
        let block = &blocks[hosts.host_of(rank)];
        let memory = Mapping::shared(block, SharedState::BYTES).unwrap();
        SharedState::new(memory, rank, 4).on_hosts(hosts.clone())
    };
    (0..4).map(rank).collect()
}

/// Tells the host of one rank what is new on the other's. Returns the number of a call that differs.
fn mirror(from: &SharedState, known: &mut Known, to: &SharedState) -> Option<u64> {
    let mut differing = None;
    from.tell_news(known, |record| {
        differing = differing.or(to.take_news(&record));
    });
    differing
}

#[test]
fn what_a_rank_writes_is_seen_on_the_other_host() {
    let ranks = ranks_of_two_hosts();
    let mut known = Known::new(&ranks[2]);
    let call = MadeCall::named("barrier");
    assert_eq!(ranks[3].post_messages(1, &call, None), Ok(()));
    ranks[3].note_refusal(2, &Kind::Capturing.on(3));
    ranks[2].note_wait(1, String::new);
    assert!(!ranks[0].has_begun(3, 1) && ranks[0].was_refused(3, 2).is_none());
    assert_eq!(mirror(&ranks[2], &mut known, &ranks[0]), None);
    assert!(ranks[0].has_begun(3, 1) && !ranks[0].has_begun(2, 1));
    let refused = Some(Kind::Capturing.on(3));
    assert_eq!(ranks[0].refusal(3, 2), refused);
    assert_eq!(ranks[0].culprit(2, LONG), 1);
    // A withdrawal is news too.
    ranks[3].withdraw_refusal(2);
    mirror(&ranks[2], &mut known, &ranks[0]);
    assert_eq!(ranks[0].refusal(3, 2), None);
    ranks[3].note_got(refused.as_ref());
    ranks[3].leave_with_what_it_got();
    assert!(!ranks[1].has_left(3));
    mirror(&ranks[2], &mut known, &ranks[0]);
    assert!(ranks[1].is_gone(3) && !ranks[1].has_left(2));
    assert_eq!(ranks[1].why_left(3, None), refused);
    // Nothing is told twice.
    ranks[2].tell_news(&mut known, |record| {
        assert!(record.is_minor(), "{record:?}")
    });
}

#[test]
fn calls_that_differ_between_hosts_are_seen_when_they_are_mirrored() {
    let ranks = ranks_of_two_hosts();
    let mut known = Known::new(&ranks[2]);
    for (rank, name) in [
        (0, "barrier"),
        (1, "barrier"),
        (2, "all_gather_bytes"),
        (3, "barrier"),
    ] {
        let call = MadeCall::named(name);
        let posted = ranks[rank].post_messages(1, &call, None);
        assert_eq!(posted.is_err(), rank == 3, "of one host");
    }
    assert_eq!(mirror(&ranks[2], &mut known, &ranks[0]), Some(1));
    ranks[0].report_odd_one(1);
    let error = ranks[1].fault().expect("a mismatch");
    let Kind::CallMismatch { theirs, .. } = error.kind() else {
        panic!("{error}");
    };
    assert_eq!(error.rank(), Some(2));
    assert_eq!(theirs.to_string(), "all_gather_bytes()");
}

#[test]
fn a_call_is_not_overwritten_before_it_is_mirrored() {
    let ranks = ranks_of_two_hosts();
    let mut known = Known::new(&ranks[0]);
    let call = MadeCall::named("barrier");
    for number in 1..=POSTS {
        for rank in &ranks {
            assert_eq!(rank.post_messages(number, &call, None), Ok(()));
        }
    }
    // All ranks have begun the calls that rank 1 needs, but no one has told the other host.
    let mut others = Known::new(&ranks[2]);
    mirror(&ranks[2], &mut others, &ranks[0]);
    assert_eq!(ranks[1].may_post(POSTS + 1), Err(0));
    mirror(&ranks[0], &mut known, &ranks[2]);
    assert_eq!(ranks[1].may_post(POSTS + 1), Ok(()));
    assert!(ranks[3].has_begun(1, POSTS));
}

#[test]
fn rank_0_s_host_says_which_failure_is_the_first() {
    // A busy machine may hold this thread up for longer than a rank waits for the verdict, but not each time.
    let is_in_time = (0..20).any(|_| {
        let begin = Instant::now();
        let told = failures_of_two_hosts();
        let in_time = begin.elapsed() < VERDICT;
        let first = Some(lost(1));
        let expected = [None, first.clone(), first.clone(), first];
        assert!(!in_time || told == expected, "{told:?}");
        in_time
    });
    assert!(is_in_time);
}

fn lost(rank: usize) -> Error {
    Kind::RankLost { noticed_by: rank }.on(rank)
}

/// Rank 2 fails, and then rank 1 of the first host. Returns what rank 2 knows before the hosts hear of each other, what
/// ranks 1 and 2 get, and what rank 3 knows at the end.
fn failures_of_two_hosts() -> [Option<Error>; 4] {
    let ranks = ranks_of_two_hosts();
    let mut known = [Known::new(&ranks[0]), Known::new(&ranks[2])];
    let [of_first, of_second] = &mut known;
    let [before, near, far] = std::thread::scope(|scope| {
        let far = scope.spawn(|| ranks[2].fail(lost(2)));
        let begin = Instant::now();
        while ranks[2].block().proposal.reporter().is_none() {
            assert!(begin.elapsed() < 20 * VERDICT, "nothing is proposed");
            std::thread::yield_now();
        }
        let before = ranks[2].fault();
        let near = ranks[1].fail(lost(1));
        mirror(&ranks[2], of_second, &ranks[0]);
        mirror(&ranks[0], of_first, &ranks[2]);
        [before, Some(near), Some(far.join().unwrap())]
    });
    [before, near, far, ranks[3].fault()]
}

#[test]
fn a_host_that_hears_nothing_of_rank_0_s_decides_alone() {
    let ranks = ranks_of_two_hosts();
    let lost = Kind::RankLost { noticed_by: 2 }.on(0);
    assert_eq!(ranks[3].fail(lost.clone()), lost);
    assert_eq!(ranks[2].fault(), Some(lost));
    assert_eq!(ranks[0].fault(), None);
}

/// A wait that was noted in the same test is fresh, however busy the machine is.
const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_leader_that_passes_nothing_on_is_to_blame_for_ranks_of_other_hosts() {
    let ranks = ranks_of_two_hosts();
    // Nothing is known of the leaders yet.
    assert_eq!(ranks[3].culprit(0, FRESH), 0);
    let run = || {
        ranks[2].note_running(2);
        ranks[0].note_running(2);
    };
    run();
    await_silence(&ranks[3], 0, 2);
    assert_eq!(ranks[3].culprit(1, FRESH), 2);
    // Nor is anything known of its host, on the other one.
    await_silence(&ranks[1], 3, 2);
    assert_eq!(ranks[1].culprit(3, FRESH), 2);
    // It says nothing of ranks of one host, nor blames itself.
    assert_eq!(ranks[1].culprit(0, FRESH), 0);
    assert_eq!(ranks[3].culprit(2, FRESH), 2);
    assert_eq!(ranks[2].silent_leader(0), None);
    // A leader that waits is not stopped. A busy machine may hold this thread up, but not each time.
    let is_in_time = (0..20).any(|_| {
        let begin = Instant::now();
        ranks[2].note_wait(0, String::new);
        let told = (ranks[3].silent_leader(0), ranks[3].culprit(0, LONG));
        let in_time = begin.elapsed() < FRESH;
        assert!(!in_time || told == (None, 0), "{told:?}");
        in_time
    });
    assert!(is_in_time);
    run();
    assert_eq!(ranks[1].culprit(3, FRESH), 3);
}

/// Looks as a rank does that waits for `peer`, until it sees that `leader` is silent.
fn await_silence(rank: &SharedState, peer: usize, leader: usize) {
    let begin = Instant::now();
    while rank.silent_leader(peer) != Some(leader) {
        assert!(begin.elapsed() < Duration::from_secs(60), "it is not seen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_leader_is_not_silent_because_a_rank_stood_still() {
    let ranks = ranks_of_two_hosts();
    ranks[2].note_running(2);
    ranks[3].note_wait(0, String::new);
    // The whole machine, with the leader.
    std::thread::sleep(Duration::from_millis(800));
    ranks[3].note_wait(0, String::new);
    let passed = (Deadline::Arrival, LONG);
    let error = ranks[3].timed_out(passed, 0, LONG, "barrier()".into());
    assert_eq!(error.at_fault(), [0]);
}

/// Rank r of a part of `ranks` of a group, for each of them.
fn split(group: &[Arc<SharedState>], ranks: &[usize], name: &str) -> Vec<Arc<SharedState>> {
    let fd = memfd(SharedState::BYTES).unwrap();
    let part = |(rank, &of_whole): (usize, &usize)| {
        let memory = Mapping::shared(&fd, SharedState::BYTES).unwrap();
        let part = SharedState::new(memory, rank, ranks.len());
        let part = part.split_from(&group[of_whole], ranks);
        let jobs = group[of_whole].naming();
        let job_ranks = ranks
            .iter()
            .map(|&rank| jobs.map_or(rank, |jobs| jobs.job_ranks[rank]));
        part.set_naming(Naming {
            name: Some(name.into()),
            job_ranks: job_ranks.collect(),
            is_of_one_job: true,
        });
        Arc::new(part)
    };
    ranks.iter().enumerate().map(part).collect()
}

/// The error of a wait for `rank` that was in vain.
fn error(of: &SharedState, rank: usize) -> Error {
    let error = of.blame_for(Deadline::Arrival, rank, LONG, LONG, "barrier()".into());
    of.named(error)
}

#[test]
fn waits_are_followed_through_all_groups_of_a_family() {
    let world: Vec<Arc<SharedState>> = ranks(6).into_iter().map(Arc::new).collect();
    let upper = split(&world, &[2, 3, 4, 5], "upper");
    let tensor = split(&upper, &[1, 2], "tensor");
    let data = split(&world, &[0, 3], "data");
    // Ranks 0 and 3 of the job wait for the next one, each in another group. Rank 4 waits for none.
    data[0].note_wait(1, || "all_gather()".into());
    tensor[0].note_wait(1, || "barrier(): rank 4 has not come".into());
    let holds =
        "held up by rank 4, for which rank 3 waits in group \"tensor\" in barrier(): rank 4";
    // In the whole group, in a part that rank 4 is in, and in one that it is not in.
    for (of, waits_for, waiting) in [(&world[1], 3, 1), (&upper[0], 1, 2), (&data[0], 1, 0)] {
        let error = error(of, waits_for);
        let Kind::Timeout { waiting: by, .. } = error.kind() else {
            panic!("{error}");
        };
        assert_eq!((error.rank(), *by), (Some(4), waiting), "{error}");
        assert!(error.to_string().contains(holds), "{error}");
    }
    let of_data = error(&data[0], 1).to_string();
    assert!(of_data.starts_with("group \"data\""), "{of_data}");
    // Rank 4 waits in the whole group too.
    world[4].note_wait(5, String::new);
    let at_fault = error(&data[0], 1).at_fault();
    assert_eq!(at_fault, [5]);
    assert_eq!(error(&tensor[0], 1).at_fault(), [5]);
    // A busy machine may hold this thread up, but not each time.
    let deadlines = Deadlines::new(LONG, None);
    let is_waiting = (0..20).any(|_| {
        world[4].note_wait(5, String::new);
        world[0].is_waiting(4, &deadlines)
    });
    assert!(is_waiting && !world[0].is_waiting(5, &deadlines));
}

#[test]
fn a_rank_whose_threads_wait_in_two_parts_is_held_up_in_each_by_its_wait_there() {
    let world: Vec<Arc<SharedState>> = ranks(5).into_iter().map(Arc::new).collect();
    let first = split(&world, &[0, 1, 2], "first");
    let second = split(&world, &[4, 1, 3], "second");
    for _ in 0..2 {
        first[1].note_wait(2, || "all_gather()".into());
        assert_eq!(error(&first[0], 1).at_fault(), [2]);
        second[1].note_wait(2, || "barrier()".into());
        assert_eq!(error(&first[0], 1).at_fault(), [2]);
        assert_eq!(error(&second[0], 1).at_fault(), [3]);
        first[1].note_wait(2, || "all_gather()".into());
        assert_eq!(error(&second[0], 1).at_fault(), [3]);
    }
}

#[test]
fn what_a_rank_waits_for_in_a_part_is_told_to_other_hosts() {
    let ranks: Vec<Arc<SharedState>> = ranks_of_two_hosts().into_iter().map(Arc::new).collect();
    let part = split(&ranks, &[2, 3], "pair");
    let mut known = Known::new(&ranks[2]);
    part[0].note_wait(1, || "barrier(): rank 3 has not come".into());
    assert_eq!(ranks[0].culprit(2, LONG), 2);
    mirror(&ranks[2], &mut known, &ranks[0]);
    let its = |call: &str| {
        let error = error(&ranks[0], 2);
        assert_eq!(error.at_fault(), [3]);
        assert!(error.to_string().contains(call), "{error}");
    };
    its("group \"pair\" in barrier()");
    // News of the wait without its words take none of them away.
    ranks[0].take_news(&Record::PartWait {
        rank: 2,
        peer: 3,
        age: 0,
        call: Vec::new(),
    });
    its("group \"pair\" in barrier()");
}

#[test]
fn a_wait_in_a_part_whose_words_are_those_of_another_thread_s_is_told_without_them() {
    let ranks: Vec<Arc<SharedState>> = ranks_of_two_hosts().into_iter().map(Arc::new).collect();
    let note = &ranks[2].block().part_waits[2];
    note.note(1, now_ms(), Some(b"group \"other\" in all_gather()"));
    note.note(3, now_ms(), None);
    mirror(&ranks[2], &mut Known::new(&ranks[2]), &ranks[0]);
    let error = error(&ranks[0], 2);
    assert_eq!(error.at_fault(), [3]);
    let end = "barrier(), held up by rank 3";
    assert!(error.to_string().contains(end), "{error}");
    assert!(!error.to_string().contains("waits in"), "{error}");
}
