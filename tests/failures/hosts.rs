//! Ranks of several hosts, as torchrun starts them. The hosts are one machine, or network namespaces of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gemmesh::error::{Deadline, Kind};
use gemmesh::{Error, Group, Host, bf16};
use rustix::process::{Resource, Signal};

use crate::limits::{Limited, limit_for};
use crate::support::forks::{end, fork};
use crate::support::patience::{again_if_busy, agreed, stretched};
use crate::support::ports::free_port;
use crate::support::processes::{
    Outcome, Processes, Rank, Setting, is_rank, start_with, this_program,
};
use crate::support::products::Arguments;
use crate::support::tested::{all_done, assert_call_mismatch, poisoned, same_error};
use crate::{PROMPT, SHORT, TIMEOUT, short, test_name};

/// Survivors know within this, on a machine as busy as it may be: twice what docs/hosts.md says.
const NOTICED: Duration = Duration::from_secs(4);
const KEY: &str = "a key that nobody guesses";

/// A job of several hosts.
struct Job {
    /// The hosts, of so many ranks each.
    hosts: usize,
    places: usize,
    port: u16,
}

impl Job {
    /// A job at a port of its own.
    fn new(hosts: usize, places: usize) -> Job {
        Job {
            hosts,
            places,
            port: free_port(),
        }
    }

    fn world(&self) -> usize {
        self.hosts * self.places
    }

    /// The variables that torchrun sets for a rank, and the user for all.
    fn variables(&self, rank: usize) -> Vec<(&'static str, String)> {
        let [world, places, port] = [self.world(), self.places, self.port.into()];
        [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("LOCAL_RANK", (rank % places).to_string()),
            ("LOCAL_WORLD_SIZE", places.to_string()),
            ("MASTER_ADDR", "localhost".into()),
            ("MASTER_PORT", "1".into()),
            ("TORCHELASTIC_RUN_ID", format!("job {port}")),
            ("GEMMESH_PORT", port.to_string()),
            ("GEMMESH_KEY", KEY.into()),
        ]
        .into()
    }

    /// Starts all ranks, with other values of some variables.
    fn start_with(
        &self,
        test: &str,
        others: &dyn Fn(usize) -> Vec<(&'static str, String)>,
        part: impl FnOnce(&Rank) -> Result<String, Error>,
    ) -> Processes {
        let places: Vec<_> = (0..self.world()).map(|rank| (rank, self.world())).collect();
        let variables = |rank| [self.variables(rank), others(rank)].concat();
        let setting = Setting {
            variables: &variables,
            ..Setting::default()
        };
        start_with(test, &places, &setting, part)
    }

    fn start(&self, test: &str, part: impl FnOnce(&Rank) -> Result<String, Error>) -> Processes {
        self.start_with(test, &|_| Vec::new(), part)
    }
}

fn join(timeout: Duration) -> Result<Group<Host>, Error> {
    let builder = Group::builder().workers(1).timeout(timeout);
    builder.arrival_timeout(timeout).from_env()
}

/// A call that must fail does.
fn fails(rank: &Rank, group: &Group<Host>) -> Result<String, Error> {
    let result = group.barrier();
    rank.say("failed");
    poisoned(group, result)
}

#[track_caller]
fn meet(test: &str, hosts: usize, places: usize) {
    all_done(Job::new(hosts, places).start(test, |rank| {
        let group = join(TIMEOUT)?;
        assert_eq!((group.rank(), group.world_size()), (rank.rank, rank.world));
        for length in [0, 1, 70_000] {
            let own = vec![rank.rank as u8; length];
            let all = group.all_gather_bytes(&own)?;
            for (sender, bytes) in all.iter().enumerate() {
                assert_eq!(*bytes, vec![sender as u8; length]);
            }
        }
        // A part of one host is a group as any other.
        let part = group.split(rank.rank / places, 0)?;
        Arguments::small(&part)?.verify(&part)?;
        let a = group.sharded::<bf16>(2 * rank.world, 4)?;
        let error = gemmesh::all_gather(&a).unwrap_err().to_string();
        assert!(error.contains("Builder::from_mpi"), "{error}");
        Ok("met".into())
    }));
}

#[test]
fn ranks_of_two_hosts_meet_and_exchange_messages() {
    meet(test_name!(), 2, 3);
}

#[test]
fn ranks_that_are_alone_on_their_hosts_meet() {
    meet(test_name!(), 4, 1);
}

/// All ranks but `victim` have heard of its end in time.
#[track_caller]
fn assert_lost(ranks: Processes, world: usize, victim: usize, since: Instant) -> Vec<Outcome> {
    for place in (0..world).filter(|&place| place != victim) {
        let heard = ranks.heard(place, "failed");
        let took = heard.saturating_duration_since(since);
        assert!(took < stretched(NOTICED), "rank {place} took {took:?}");
    }
    let outcomes = ranks.outcomes();
    for outcome in outcomes.iter().filter(|outcome| outcome.rank != victim) {
        let error = outcome.error();
        assert!(
            matches!((error.rank(), error.kind()), (Some(rank), Kind::RankLost { .. }) if rank == victim),
            "{error}"
        );
    }
    outcomes
}

/// Says that this rank is here, and fails when the others have lost `victim`. That rank waits until it is told.
fn fails_but(victim: usize, rank: &Rank, group: &Group<Host>) -> Result<String, Error> {
    rank.say("here");
    if rank.rank == victim {
        rank.hear();
    }
    fails(rank, group)
}

#[track_caller]
fn kill(test: &str, victim: usize) {
    let job = Job::new(3, 2);
    let ranks = job.start(test, |rank| {
        let group = join(TIMEOUT)?;
        group.barrier()?;
        fails_but(victim, rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(victim, Signal::KILL);
    let outcomes = assert_lost(ranks, job.world(), victim, killed);
    outcomes[victim].assert_killed();
}

#[test]
fn a_killed_rank_of_another_host_is_named_on_all_hosts() {
    kill(test_name!(), 3);
}

#[test]
fn a_killed_leader_is_named_on_all_hosts() {
    kill(test_name!(), 2);
}

#[test]
fn a_killed_rank_0_is_named_on_all_hosts() {
    kill(test_name!(), 0);
}

#[test]
fn a_killed_rank_of_the_first_host_is_named_on_all_hosts() {
    kill(test_name!(), 1);
}

#[test]
fn a_leader_that_is_killed_between_calls_is_named_on_all_hosts() {
    let (victim, job) = (2, Job::new(3, 1));
    let ranks = job.start(test_name!(), |rank| {
        let group = join(TIMEOUT)?;
        group.barrier()?;
        rank.say("here");
        while group.check().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        fails(rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(victim, Signal::KILL);
    assert_lost(ranks, job.world(), victim, killed);
}

/// A child that has a copy of all of a killed leader's sockets lives on.
#[test]
fn a_killed_leader_is_named_while_a_child_of_it_lives() {
    let (victim, lives) = (2, Duration::from_secs(6));
    let job = Job::new(3, 1);
    let ranks = job.start(test_name!(), |rank| {
        let group = join(TIMEOUT)?;
        group.barrier()?;
        if rank.rank == victim && fork().is_none() {
            std::thread::sleep(lives);
            end(true);
        }
        fails_but(victim, rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(200));
    let killed = ranks.signal(victim, Signal::KILL);
    assert_lost(ranks, job.world(), victim, killed);
}

/// A stopped process is as one that is slow: its system answers for it.
#[track_caller]
fn stop(test: &str, victim: usize) {
    let mut ranks = Job::new(2, 2).start(test, |rank| {
        let patient = join(TIMEOUT)?;
        patient.barrier()?;
        let group = join_again(&patient)?;
        group.barrier()?;
        fails_but(victim, rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(300));
    let stopped = ranks.signal(victim, Signal::STOP);
    for place in (0..4).filter(|&place| place != victim) {
        let took = ranks.heard(place, "failed") - stopped;
        assert!(took > SHORT / 2, "rank {place} took {took:?}");
        assert!(took < 5 * short(), "rank {place} took {took:?}");
    }
    ranks.signal(victim, Signal::CONT);
    ranks.tell(victim);
    for outcome in ranks.outcomes() {
        let (Some(rank), Kind::Timeout { deadline, .. }) =
            (outcome.error().rank(), outcome.error().kind())
        else {
            panic!("{}", outcome.error());
        };
        assert_eq!((rank, *deadline), (victim, Deadline::Arrival));
    }
}

/// As [`stop`], before the others make the call. So nothing that they do comes by the stopped rank, if it leads its host.
#[track_caller]
fn stop_early(test: &str, victim: usize) {
    let job = Job::new(3, 2);
    let others: Vec<usize> = (0..job.world()).filter(|&rank| rank != victim).collect();
    let mut ranks = job.start(test, |rank| {
        let patient = join(TIMEOUT)?;
        patient.barrier()?;
        let group = join_again(&patient)?;
        group.barrier()?;
        rank.say("here");
        rank.hear();
        fails(rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(300));
    ranks.signal(victim, Signal::STOP);
    for &place in &others {
        ranks.tell(place);
    }
    for &place in &others {
        ranks.heard(place, "failed");
    }
    ranks.signal(victim, Signal::CONT);
    ranks.tell(victim);
    let outcomes = ranks.outcomes();
    for place in others {
        let error = outcomes[place].error();
        let (Some(rank), Kind::Timeout { deadline, .. }) = (error.rank(), error.kind()) else {
            panic!("rank {place}: {error}");
        };
        assert_eq!(
            (rank, *deadline),
            (victim, Deadline::Arrival),
            "rank {place}: {error}"
        );
        assert!(
            !error.to_string().contains("rank 0 has not come") || victim == 0,
            "{error}"
        );
    }
}

#[test]
fn a_leader_that_was_stopped_before_the_call_is_named_by_its_own_host_too() {
    stop_early(test_name!(), 2);
}

#[test]
fn a_rank_that_was_stopped_before_the_call_is_named_by_all_hosts() {
    stop_early(test_name!(), 5);
}

#[test]
fn a_rank_0_that_was_stopped_before_the_call_is_named_by_all_hosts() {
    stop_early(test_name!(), 0);
}

/// A group of short deadlines of the same ranks.
fn join_again(_patient: &Group<Host>) -> Result<Group<Host>, Error> {
    join(2 * short())
}

#[test]
fn a_stopped_leader_is_named_at_the_deadline() {
    stop(test_name!(), 2);
}

#[test]
fn a_stopped_rank_of_another_host_is_named_at_the_deadline() {
    stop(test_name!(), 3);
}

#[test]
fn a_stopped_rank_0_is_named_at_the_deadline() {
    stop(test_name!(), 0);
}

#[test]
fn a_call_that_differs_on_another_host_is_named() {
    let ranks = Job::new(2, 2).start(test_name!(), |rank| {
        let group = join(TIMEOUT)?;
        let result = match rank.rank {
            3 => group.all_gather_bytes(&[]).map(drop),
            _ => group.barrier(),
        };
        poisoned(&group, result)
    });
    let outcomes = ranks.outcomes();
    assert_call_mismatch(&same_error(&outcomes), 3, "all_gather_bytes()", "barrier()");
}

#[test]
fn ranks_that_are_missing_on_any_hosts_are_named_on_all_hosts() {
    again_if_busy(|| {
        let away = [1, 3, 5];
        let mut ranks = Job::new(3, 2).start(test_name!(), |rank| {
            rank.come_together();
            if away.contains(&rank.rank) {
                return Ok("away".into());
            }
            join(short()).map(|_| "met".into())
        });
        ranks.let_all_go();
        let outcomes = ranks.outcomes();
        for outcome in outcomes.iter().filter(|one| !away.contains(&one.rank)) {
            let Kind::RanksMissing { ranks, .. } = outcome.error().kind() else {
                panic!("{}", outcome.error());
            };
            assert_eq!(ranks[..], away, "rank {}", outcome.rank);
        }
    });
}

/// Its host's ranks begin when the others have waited for a while. Only they learn which host is missing.
#[test]
fn ranks_that_a_late_rank_0_misses_are_named_on_all_hosts() {
    again_if_busy(|| {
        let mut ranks = Job::new(3, 2).start(test_name!(), |rank| {
            rank.come_together();
            match rank.rank / 2 {
                0 => std::thread::sleep(Duration::from_secs(3)),
                1 => {}
                _ => return Ok("away".into()),
            }
            join(agreed(Duration::from_secs(7))).map(|_| "met".into())
        });
        ranks.let_all_go();
        for outcome in &ranks.outcomes()[..4] {
            let Kind::RanksMissing { ranks, .. } = outcome.error().kind() else {
                panic!("rank {}: {}", outcome.rank, outcome.error());
            };
            assert_eq!(ranks[..], [4], "rank {}", outcome.rank);
        }
    });
}

#[track_caller]
fn miss_a_host(test: &str, away: usize) {
    again_if_busy(|| {
        let mut ranks = Job::new(2, 2).start(test, |rank| {
            rank.come_together();
            if rank.rank / 2 == away {
                return Ok("away".into());
            }
            join(short()).map(|_| "met".into())
        });
        ranks.let_all_go();
        let outcomes = ranks.outcomes();
        for outcome in outcomes.iter().filter(|outcome| outcome.rank / 2 != away) {
            let Kind::RanksMissing { ranks, .. } = outcome.error().kind() else {
                panic!("{}", outcome.error());
            };
            assert_eq!(ranks[..], [2 * away]);
        }
    });
}

#[test]
fn a_host_that_does_not_come_is_named_by_its_lowest_rank() {
    miss_a_host(test_name!(), 1);
}

#[test]
fn the_first_host_is_named_if_it_does_not_come() {
    miss_a_host(test_name!(), 0);
}

#[test]
fn a_rank_with_another_key_is_turned_away_before_the_deadline() {
    again_if_busy(|| {
        let others = |rank| match rank {
            2 => vec![("GEMMESH_KEY", "another key, of an earlier job".into())],
            _ => Vec::new(),
        };
        let mut ranks = Job::new(3, 1).start_with(test_name!(), &others, |rank| {
            rank.come_together();
            let begin = Instant::now();
            let patience = if rank.rank == 2 { TIMEOUT } else { 8 * short() };
            let joined = join(patience);
            assert!(rank.rank != 2 || begin.elapsed() < stretched(PROMPT) / 2);
            joined.map(|_| "met".into())
        });
        ranks.let_all_go();
        for outcome in ranks.outcomes() {
            let error = outcome.error();
            match (outcome.rank, error.kind()) {
                (2, Kind::KeyRefused { .. }) => assert_eq!(error.rank(), Some(2)),
                (0 | 1, Kind::RanksMissing { ranks, .. }) => assert_eq!(ranks[..], [2]),
                (rank, _) => panic!("rank {rank}: {error}"),
            }
        }
    });
}

#[test]
fn a_name_without_an_address_is_told_before_the_deadline() {
    let others = |rank| match rank {
        0 => Vec::new(),
        _ => vec![("MASTER_ADDR", "no-such-host.invalid".into())],
    };
    let mut ranks = Job::new(2, 1).start_with(test_name!(), &others, |rank| {
        rank.come_together();
        let patience = if rank.rank == 1 { TIMEOUT } else { short() };
        join(patience).map(|_| "met".into())
    });
    ranks.let_all_go();
    let outcomes = ranks.outcomes();
    let error = outcomes[1].error().to_string();
    assert!(error.contains("no-such-host.invalid"), "{error}");
    assert!(error.contains("MASTER_ADDR"), "{error}");
}

#[test]
fn a_port_that_is_taken_is_told() {
    let job = Job::new(2, 2);
    let _taken = TcpListener::bind(("0.0.0.0", job.port)).unwrap();
    let mut ranks = job.start(test_name!(), |rank| {
        rank.come_together();
        join(2 * short()).map(|_| "met".into())
    });
    ranks.let_all_go();
    for outcome in ranks.outcomes().iter().filter(|outcome| outcome.rank < 2) {
        let error = outcome.error().to_string();
        assert!(error.contains("GEMMESH_PORT"), "{error}");
        assert!(error.contains("in use"), "{error}");
    }
}

/// A leader can say why it fails though it can't accept a connection.
#[track_caller]
fn assert_limit_is_named(test: &str, job: &Job, limited: usize, more: u64) {
    again_if_busy(|| {
        let ranks = job.start(test, |rank| {
            let limit = limit_for(more);
            let limited = (rank.rank == limited).then(|| Limited::to(Resource::Nofile, limit));
            let joined = join(TIMEOUT);
            drop(limited);
            joined.map(|_| "met".into())
        });
        for outcome in ranks.outcomes() {
            let error = outcome.error().to_string();
            assert!(error.contains(&format!("rank {limited}")), "{error}");
            assert!(error.contains("RLIMIT_NOFILE"), "{error}");
        }
    });
}

#[test]
fn a_leader_with_one_descriptor_tells_all_hosts_of_its_limit() {
    assert_limit_is_named(test_name!(), &Job::new(2, 2), 2, 1);
}

#[test]
fn a_rank_of_another_host_with_one_descriptor_tells_all_hosts_of_its_limit() {
    assert_limit_is_named(test_name!(), &Job::new(2, 2), 3, 1);
}

/// Its listeners take all of its descriptors.
#[test]
fn rank_0_that_can_accept_no_host_tells_it_of_its_limit() {
    assert_limit_is_named(test_name!(), &Job::new(3, 1), 0, 3);
}

/// Ranks that wait for long say for whom, and rank 0's host hears of a key that differs.
#[test]
fn hosts_that_wait_say_for_whom() {
    let others = |rank| match rank {
        3 => vec![("GEMMESH_KEY", "another key, of an earlier job".into())],
        _ => Vec::new(),
    };
    let patience = agreed(Duration::from_secs(11));
    let mut ranks = Job::new(4, 1).start_with(test_name!(), &others, |rank| {
        rank.come_together();
        match rank.rank {
            2 => Ok("away".into()),
            // The key of rank 3 is refused before it has waited for long.
            _ => join(patience).map(|_| "met".into()),
        }
    });
    ranks.let_all_go();
    let outcomes = ranks.outcomes();
    let [text, reason] = [&outcomes[0].text, &outcomes[1].error().to_string()];
    let waited = "gemmesh: rank 0 has waited for 10 s at ";
    assert_eq!(text.matches(waited).count(), 1, "{text}");
    assert!(text.contains(" for ranks 2 and 3"), "{text}");
    let key = "rank 0 has turned away a process at 127.0.0.1:";
    assert_eq!(
        text.matches(&format!("gemmesh: {key}")).count(),
        1,
        "{text}"
    );
    assert!(reason.contains("ranks 2 and 3 have not come"), "{reason}");
    assert!(reason.contains(key), "{reason}");
}

#[test]
fn a_leader_that_waits_for_rank_0_says_where_and_why() {
    let job = Job::new(2, 2);
    let patience = agreed(Duration::from_secs(11));
    let ranks = job.start(test_name!(), |rank| match rank.rank {
        0 | 1 => Ok("away".into()),
        _ => join(patience).map(|_| "met".into()),
    });
    let outcomes = ranks.outcomes();
    let (text, error) = (&outcomes[2].text, outcomes[2].error().to_string());
    let place = format!("localhost:{}", job.port);
    let waited = format!("gemmesh: rank 2 has tried for 10 s to reach rank 0 at {place} (");
    assert_eq!(text.matches(&waited).count(), 1, "{text}");
    assert!(text.contains("Connection refused"), "{text}");
    assert!(error.contains("Connection refused"), "{error}");
}

/// Whoever does not have the key gets no byte, and delays no one.
#[test]
fn strangers_at_the_port_get_nothing_and_delay_nobody() {
    let job = Job::new(2, 2);
    let port = job.port;
    let mut ranks = job.start(test_name!(), |rank| {
        if rank.rank == 3 {
            rank.hear();
        }
        let group = join(TIMEOUT)?;
        group.barrier()?;
        Ok("met".into())
    });
    let begin = Instant::now();
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(begin.elapsed() < stretched(PROMPT), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let mut silent: Vec<TcpStream> = (0..300).map(|_| connect()).collect();
    let sayings = [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"gemmesh\x01",
        &[0; 4096],
        &[b"gemmesh\x01".as_slice(), &[7; 104]].concat(),
    ];
    for saying in sayings {
        let mut stream = connect();
        // It may have been turned away before it has said all.
        let _ = stream.write_all(saying);
        silent.push(stream);
    }
    ranks.tell(3);
    let told = Instant::now();
    all_done(ranks);
    assert!(told.elapsed() < stretched(NOTICED), "{:?}", told.elapsed());
    for mut stream in silent {
        stream
            .set_read_timeout(Some(Duration::from_secs(5)))
            .unwrap();
        let mut byte = [0];
        assert!(
            !matches!(stream.read(&mut byte), Ok(1)),
            "a stranger was answered"
        );
    }
}

/// Two network namespaces of this machine, with a cable between them. They are gone when this is dropped.
struct Machines {
    names: [String; 2],
}

impl Machines {
    /// None, said in a line, where they are not permitted. A rank of the test makes none.
    fn new() -> Option<Machines> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let (own, made) = (std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let names = ["a", "b"].map(|end| format!("gemmesh-{own}-{made}-{end}"));
        let machines = Machines { names };
        if is_rank() {
            return Some(machines);
        }
        let [a, b] = &machines.names;
        let lines = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("-n {a} link add cable type veth peer name cable netns {b}"),
            format!("-n {a} address add {}/24 dev cable", Self::ADDRESSES[0]),
            format!("-n {b} address add {}/24 dev cable", Self::ADDRESSES[1]),
            format!(
                "-n {a} address add {}/64 dev cable nodad",
                Self::ADDRESSES_6[0]
            ),
            format!(
                "-n {b} address add {}/64 dev cable nodad",
                Self::ADDRESSES_6[1]
            ),
            format!("-n {a} link set cable up"),
            format!("-n {b} link set cable up"),
        ];
        for line in lines {
            if !ip(&line) {
                println!("not tested: ip {line} is not permitted here");
                return None;
            }
        }
        Some(machines)
    }

    const ADDRESSES: [&str; 2] = ["10.213.7.1", "10.213.7.2"];
    const ADDRESSES_6: [&str; 2] = ["fd13:7::1", "fd13:7::2"];

    fn command(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]);
        command.arg(this_program());
        command
    }

    /// Unplugs the cable, which tells neither end.
    fn cut(&self) -> Instant {
        assert!(ip(&format!("-n {} link set cable down", self.names[0])));
        Instant::now()
    }

    /// Loses what `host` sends, which tells neither end: its frames go to a device that is not there.
    fn cut_one_way(&self, host: usize) -> Instant {
        let (name, other) = (&self.names[host], 1 - host);
        for address in [Self::ADDRESSES[other], Self::ADDRESSES_6[other]] {
            let to = "lladdr 02:00:00:00:00:01 dev cable nud permanent";
            assert!(ip(&format!("-n {name} neighbour replace {address} {to}")));
        }
        Instant::now()
    }

    fn remove(&self) {
        for name in &self.names {
            ip(&format!("netns delete {name}"));
        }
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        if !is_rank() {
            self.remove();
        }
    }
}

fn ip(line: &str) -> bool {
    let output = Command::new("ip").args(line.split(' ')).output();
    output.is_ok_and(|output| output.status.success())
}

/// All ranks hear in time that the other machine does not answer, when it is cut off by `cut`.
#[track_caller]
fn cut(
    test: &str,
    variables: &dyn Fn(usize) -> Vec<(&'static str, String)>,
    cut: impl Fn(&Machines) -> Instant,
    join: fn(&Rank) -> Result<Group<Host>, Error>,
    fails: fn(&Rank, &Group<Host>) -> Result<String, Error>,
) -> Vec<Duration> {
    let Some(machines) = Machines::new() else {
        return Vec::new();
    };
    let command = |rank: usize| machines.command(rank / 2);
    let setting = Setting {
        variables,
        command: &command,
        ..Setting::default()
    };
    let places: Vec<_> = (0..4).map(|rank| (rank, 4)).collect();
    let ranks = start_with(test, &places, &setting, |rank| {
        let group = join(rank)?;
        group.barrier()?;
        rank.say("here");
        fails(rank, &group)
    });
    ranks.all_heard("here");
    std::thread::sleep(Duration::from_millis(600));
    let cut = cut(&machines);
    let took = |place| ranks.heard(place, "failed").saturating_duration_since(cut);
    let took: Vec<Duration> = (0..4).map(took).collect();
    println!("{took:?}");
    for outcome in ranks.outcomes() {
        let (Some(rank), Kind::HostLost { .. }) = (outcome.error().rank(), outcome.error().kind())
        else {
            panic!("{}", outcome.error());
        };
        let lost = if outcome.rank < 2 { 2 } else { 0 };
        assert_eq!(rank, lost, "rank {}", outcome.rank);
    }
    took
}

#[track_caller]
fn assert_in_time(took: &[Duration]) {
    assert!(
        took.iter().all(|took| *took < stretched(NOTICED)),
        "{took:?}"
    );
}

/// The variables of a job on two machines.
fn over_machines(rank: usize) -> Vec<(&'static str, String)> {
    let job = Job {
        hosts: 2,
        places: 2,
        port: 29555,
    };
    let master = ("MASTER_ADDR", Machines::ADDRESSES_6[0].to_string());
    [job.variables(rank), vec![master]].concat()
}

/// Rank 3 stays away, so that all others wait in the call.
fn fails_without_rank_3(rank: &Rank, group: &Group<Host>) -> Result<String, Error> {
    while rank.rank == 3 && group.check().is_ok() {
        std::thread::sleep(Duration::from_millis(5));
    }
    fails(rank, group)
}

/// All ranks name the other machine in time, when it is cut off by `cut_off` while they wait in a call.
#[track_caller]
fn is_named_in_time(test: &str, cut_off: impl Fn(&Machines) -> Instant) {
    let join = |_: &Rank| join(TIMEOUT);
    let took = cut(test, &over_machines, cut_off, join, fails_without_rank_3);
    assert_in_time(&took);
}

#[test]
fn a_machine_that_is_cut_off_in_a_call_is_named() {
    is_named_in_time(test_name!(), Machines::cut);
}

/// Each machine names the other, also the one to which everything still comes.
#[test]
fn machines_name_each_other_if_what_the_first_sends_is_lost() {
    is_named_in_time(test_name!(), |machines| machines.cut_one_way(0));
}

#[test]
fn machines_name_each_other_if_what_the_second_sends_is_lost() {
    is_named_in_time(test_name!(), |machines| machines.cut_one_way(1));
}

#[test]
fn a_silent_machine_has_the_time_that_it_is_given() {
    const PATIENCE: Duration = Duration::from_secs(4);
    let join = |_: &Rank| {
        let builder = Group::builder().workers(1).timeout(TIMEOUT);
        builder.host_timeout(PATIENCE).from_env()
    };
    let test = test_name!();
    let begin_to_cut = |machines: &Machines| {
        let begin = Instant::now();
        machines.cut();
        begin
    };
    let took = cut(
        test,
        &over_machines,
        begin_to_cut,
        join,
        fails_without_rank_3,
    );
    // What was acknowledged last may have been sent a little earlier.
    let least = PATIENCE - Duration::from_millis(500);
    assert!(took.iter().all(|took| *took > least), "{took:?}");
}

/// Machines are told apart by themselves, and rank 0's addresses are found.
#[test]
fn an_idle_machine_that_is_cut_off_is_named() {
    let join = |rank: &Rank| {
        let folder = std::env::temp_dir().join(&rank.address);
        let builder = Group::builder().workers(1).timeout(TIMEOUT);
        let builder = builder.arrival_timeout(TIMEOUT);
        builder.connect_with(rank.rank, rank.world, |mine| {
            std::fs::create_dir_all(&folder)?;
            let (draft, own) = (format!("draft {}", rank.rank), rank.rank.to_string());
            std::fs::write(folder.join(&draft), mine)?;
            std::fs::rename(folder.join(&draft), folder.join(own))?;
            let read = |other: usize| loop {
                match std::fs::read(folder.join(other.to_string())) {
                    Ok(bytes) => return bytes,
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            Ok((0..rank.world).map(read).collect())
        })
    };
    let fails = |rank: &Rank, group: &Group<Host>| {
        if rank.rank == 0 {
            let folder = std::env::temp_dir().join(&rank.address);
            std::fs::remove_dir_all(folder).unwrap();
        }
        while group.check().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
        fails(rank, group)
    };
    let took = cut(test_name!(), &|_| Vec::new(), Machines::cut, join, fails);
    assert_in_time(&took);
}
