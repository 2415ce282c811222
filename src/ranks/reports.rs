//! Reports by which launched ranks tell their launcher why their group has failed.
//!
//! A rank's exit does not say why the group failed, because one rank's failure ends the others, often before that rank
//! has ended. So each rank tells the launcher of its group's first failure, and only then acts on it. It sends one
//! datagram to an abstract socket whose name follows from the launch's address. Nothing is inherited, passed on or left
//! behind. If no one listens, nothing happens.
//!
//! A process may report if it knows the address. The address is drawn for the launch and stands in its ranks'
//! environment, which only their user can read. This holds in all namespaces, unlike what the system says of a
//! datagram's sender. No other process can have the socket's name before the launcher binds it, nor while the ranks
//! run, because they end with the launcher. Others can only fill the socket's queue, so that reports get lost. Then the
//! launcher judges by how the ranks end.
//!
//! In return the launcher shows which ranks have ended. It takes an abstract name for each, which follows from the
//! address too. So a rank in the rendezvous need not wait for one that will not come.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use serde::{Deserialize, Serialize};

use super::address::{self, Address};
use super::poll;
use super::secret::Secret;
use crate::error::{Error, Result};
use crate::json;

/// The longest report: an error.
const MAX_REPORT: usize = 16 << 10;
/// Room for what is added around the error.
const AROUND: usize = 256;
/// How long a rank tries to tell a launcher that does not listen, for example because it is stopped.
const PATIENCE: Duration = Duration::from_millis(200);
/// How many datagrams are read before the launcher looks at its ranks again, whoever sends them.
const READ: usize = 1024;

/// One rank's report on its group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureReport {
    pub rank: usize,
    /// The rank that reported the failure to the group. Both are ranks of the job.
    pub by: usize,
    /// The group's first failure. None withdraws earlier reports, because the rank has met the others again.
    pub error: Option<Error>,
}

/// The beginning of a report, which proves who sent it. It is not shown to anybody else.
#[derive(Clone, Debug)]
struct Token(Secret<[u8; Token::BYTES]>);

impl Token {
    const BYTES: usize = 32;

    /// The rest of `datagram`, if it begins with this token.
    fn open<'a>(&self, datagram: &'a [u8]) -> Option<&'a [u8]> {
        let (token, report) = datagram.split_first_chunk::<{ Token::BYTES }>()?;
        (Secret::new(*token) == self.0).then_some(report)
    }
}

/// The number of the process that has told its launcher something that still counts.
///
/// It is 0 if this process has not. It may be a parent's number after a fork.
static TOLD: AtomicU32 = AtomicU32::new(0);

/// A rank's end of the reports, for one group.
#[derive(Clone, Debug)]
pub struct ReportSender {
    rank: usize,
    launch: Address,
    name: SocketAddr,
    token: Token,
    once: Arc<Once>,
}

impl ReportSender {
    /// `launch` is the address that the launcher gave its ranks. Returns none if no launcher has drawn it, because then
    /// any process may listen in the launcher's place.
    pub fn new(rank: usize, launch: &Address) -> Option<ReportSender> {
        if !address::is_drawn(launch) {
            return None;
        }
        Some(ReportSender {
            rank,
            launch: launch.clone(),
            name: address::report_name(launch).ok()?,
            token: Token(address::report_token(launch)),
            once: Arc::new(Once::new()),
        })
    }

    /// For a different group of the same process.
    pub fn for_next_group(&self) -> ReportSender {
        ReportSender {
            once: Arc::new(Once::new()),
            ..self.clone()
        }
    }

    /// Tells the launcher why the group has failed, as rank `by` has reported it.
    ///
    /// It does so once, by any thread, and returns when it is done. If the launcher can't be told, it judges by how the
    /// ranks end.
    pub fn tell(&self, by: usize, error: &Error) {
        self.once.call_once(|| {
            TOLD.store(std::process::id(), Ordering::Relaxed);
            self.send(&FailureReport {
                rank: self.rank,
                by,
                error: Some(json::fitted(error.clone().first(), MAX_REPORT - AROUND)),
            });
        });
    }

    /// Withdraws the reports of this process on earlier groups.
    pub fn withdraw(&self) {
        if TOLD.swap(0, Ordering::Relaxed) == std::process::id() {
            self.send(&FailureReport {
                rank: self.rank,
                by: self.rank,
                error: None,
            });
        }
    }

    /// True if the process that was launched as `rank` has ended. False if that can't be known.
    pub fn has_ended(&self, rank: usize) -> bool {
        let reach = || -> std::io::Result<()> {
            let name = address::end_name(&self.launch, rank)?;
            UnixDatagram::unbound()?.connect_addr(&name)
        };
        reach().is_ok()
    }

    fn send(&self, report: &FailureReport) {
        let send = || -> std::io::Result<()> {
            let bytes = [self.token.0.reveal().to_vec(), serde_json::to_vec(report)?].concat();
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?;
            socket.connect_addr(&self.name)?;
            let deadline = Instant::now() + PATIENCE;
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                match socket.send(&bytes) {
                    // The launcher's queue is short.
                    Err(full) if full.kind() == std::io::ErrorKind::WouldBlock => {
                        if left.is_zero() {
                            return Err(full);
                        }
                        poll::poll(&mut [PollFd::new(&socket, PollFlags::OUT)], left)?;
                    }
                    sent => return sent.map(drop),
                }
            }
        };
        // Without a launcher that listens there is no one to tell.
        let _ = send();
    }
}

/// The launcher's end of the reports.
#[derive(Debug)]
pub struct ReportReceiver {
    launch: Address,
    socket: UnixDatagram,
    /// Sockets whose names say which ranks have ended.
    ends: Vec<UnixDatagram>,
    token: Token,
    world: usize,
    /// At most one report from each rank, in the order in which they came.
    reports: Vec<FailureReport>,
}

impl ReportReceiver {
    pub fn new(launch: &Address, world: usize) -> Result<ReportReceiver> {
        let open = || -> std::io::Result<UnixDatagram> {
            let socket = UnixDatagram::bind_addr(&address::report_name(launch)?)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        Ok(ReportReceiver {
            launch: launch.clone(),
            ends: Vec::new(),
            socket: open().map_err(Error::system(None, "listen to the ranks"))?,
            token: Token(address::report_token(launch)),
            world,
            reports: Vec::new(),
        })
    }

    /// The reports of the ranks.
    pub fn reports(&self) -> &[FailureReport] {
        &self.reports
    }

    /// Shows the other ranks that the process of `rank` has ended. If it can't, they wait for it in a rendezvous until
    /// the deadline.
    pub fn show_end(&mut self, rank: usize) {
        let name = address::end_name(&self.launch, rank);
        let shown = name.and_then(|name| UnixDatagram::bind_addr(&name));
        self.ends.extend(shown);
    }

    /// Reads reports without waiting. Any process can send a datagram. One that is no rank's report is dropped.
    pub fn read(&mut self) {
        // A longer datagram is cut, and then is no valid report.
        let mut bytes = vec![0; MAX_REPORT];
        for _ in 0..READ {
            match self.socket.recv(&mut bytes) {
                Ok(length) => self.file(&bytes[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // Nothing more.
                Err(_) => return,
            }
        }
    }

    fn file(&mut self, datagram: &[u8]) {
        let Some(report) = self.token.open(datagram) else {
            return;
        };
        let Ok(report) = serde_json::from_slice::<FailureReport>(report) else {
            return;
        };
        if report.rank.max(report.by) >= self.world {
            return;
        }
        let known = self.reports.iter().any(|other| other.rank == report.rank);
        if report.error.is_none() {
            self.reports.retain(|other| other.rank != report.rank);
        } else if !known {
            self.reports.push(report);
        }
    }
}

impl AsFd for ReportReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::ranks::memfd::{Mapping, memfd};
    use crate::ranks::naming::Naming;
    use std::sync::atomic::AtomicBool;

    use crate::ranks::address::{draw, report_token};
    use crate::ranks::shared_state::SharedState;

    fn lost(rank: usize) -> Error {
        Kind::RankLost { noticed_by: 0 }.on(rank)
    }

    fn told(receiver: &mut ReportReceiver) -> Vec<(usize, usize)> {
        receiver.read();
        let reports = receiver.reports().iter();
        reports
            .map(|report| (report.rank, report.error.as_ref().unwrap().at_fault()[0]))
            .collect()
    }

    #[test]
    fn a_rank_tells_of_a_group_once_and_of_the_next_anew() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 3).unwrap();
        let first = ReportSender::new(2, &launch).unwrap();
        first.withdraw();
        assert_eq!(told(&mut receiver), []);
        first.tell(0, &lost(1));
        first.clone().tell(0, &lost(0));
        assert_eq!(told(&mut receiver), [(2, 1)]);
        // A second try failed too. The first failure remains the cause.
        ReportSender::new(2, &launch).unwrap().tell(2, &lost(0));
        assert_eq!(told(&mut receiver), [(2, 1)]);
        let second = ReportSender::new(2, &launch).unwrap();
        second.withdraw();
        assert_eq!(told(&mut receiver), []);
        second.tell(0, &lost(0));
        assert_eq!(told(&mut receiver), [(2, 0)]);
    }

    #[test]
    fn a_rank_tells_of_a_failure_that_another_reported_before_it_learns_of_it() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 2).unwrap();
        let memory = memfd(SharedState::BYTES).unwrap();
        let shared_state = |rank| {
            let memory = Mapping::shared(&memory, SharedState::BYTES).unwrap();
            SharedState::new(memory, rank, 2)
        };
        let silent = shared_state(0);
        let rank = shared_state(1).with_launcher(ReportSender::new(1, &launch));
        rank.set_naming(Naming::of_job(None, 2));
        assert_eq!(rank.fault(), None);
        silent.fail(lost(1));
        assert_eq!(told(&mut receiver), []);
        assert_eq!(rank.fault(), Some(lost(1)));
        assert_eq!(told(&mut receiver), [(1, 1)]);
    }

    #[test]
    fn a_rank_tells_nothing_of_a_group_with_processes_of_no_job() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 2).unwrap();
        let memory = Mapping::shared(memfd(SharedState::BYTES).unwrap(), SharedState::BYTES);
        let state = SharedState::new(memory.unwrap(), 0, 2);
        let state = state.with_launcher(ReportSender::new(0, &launch));
        state.set_naming(Naming {
            is_of_one_job: false,
            ..Naming::of_job(None, 2)
        });
        state.fail(lost(1));
        assert_eq!(told(&mut receiver), []);
    }

    #[test]
    fn a_rank_learns_which_ranks_have_ended() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 3).unwrap();
        let rank = ReportSender::new(0, &launch).unwrap();
        assert!(!rank.has_ended(1));
        receiver.show_end(1);
        assert!(rank.has_ended(1) && !rank.has_ended(2));
    }

    #[test]
    fn what_is_no_letter_of_a_rank_is_dropped() {
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 2).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        sender
            .connect_addr(&receiver.socket.local_addr().unwrap())
            .unwrap();
        let foreign = FailureReport {
            rank: 7,
            by: 0,
            error: Some(lost(1)),
        };
        let long = FailureReport {
            rank: 1,
            by: 0,
            error: Some(
                Kind::Message {
                    reason: "x".repeat(MAX_REPORT),
                }
                .on(0),
            ),
        };
        let token = report_token(&launch);
        for bytes in [
            vec![],
            b"{\"rank\":".to_vec(),
            vec![0xff; 100],
            serde_json::to_vec(&foreign).unwrap(),
            serde_json::to_vec(&long).unwrap(),
        ] {
            sender
                .send(&[token.reveal(), bytes.as_slice()].concat())
                .unwrap();
            receiver.read();
        }
        // A report of a process that does not know the address.
        let well_formed = FailureReport { rank: 1, ..foreign };
        let well_formed = serde_json::to_vec(&well_formed).unwrap();
        let another = report_token(&Address::of("another"));
        for token in [&[][..], &token.reveal()[1..], another.reveal()] {
            sender.send(&[token, &well_formed].concat()).unwrap();
        }
        ReportSender::new(1, &launch).unwrap().tell(0, &lost(0));
        assert_eq!(told(&mut receiver), [(1, 0)]);
    }

    #[test]
    fn a_flood_of_datagrams_keeps_the_launcher_from_nothing() {
        const FLOOD: Duration = Duration::from_secs(20);
        let launch = draw().unwrap();
        let mut receiver = ReportReceiver::new(&launch, 2).unwrap();
        let name = receiver.socket.local_addr().unwrap();
        let over = AtomicBool::new(false);
        let begin = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let sender = UnixDatagram::unbound().unwrap();
                    sender.connect_addr(&name).unwrap();
                    while !over.load(Ordering::Relaxed) && begin.elapsed() < FLOOD {
                        sender.send(b"noise").unwrap();
                    }
                });
            }
            // After each read the launcher looks at its ranks and at the time.
            (0..3).for_each(|_| receiver.read());
            assert!(begin.elapsed() < FLOOD);
            over.store(true, Ordering::Relaxed);
            // This makes room, so that no sender waits.
            receiver.read();
        });
    }

    #[test]
    fn a_launcher_that_is_gone_or_does_not_listen_holds_no_rank_up() {
        let launch = draw().unwrap();
        // A busy machine may hold this thread up, but not each time.
        let is_quick = (0..20).any(|_| {
            let begin = Instant::now();
            ReportSender::new(0, &launch).unwrap().tell(0, &lost(1));
            begin.elapsed() < PATIENCE
        });
        assert!(is_quick, "nobody is there");
        let mut receiver = ReportReceiver::new(&launch, 2).unwrap();
        let sender = UnixDatagram::unbound().unwrap();
        sender
            .connect_addr(&receiver.socket.local_addr().unwrap())
            .unwrap();
        sender.set_nonblocking(true).unwrap();
        while sender.send(b"noise").is_ok() {}
        let begin = Instant::now();
        ReportSender::new(0, &launch).unwrap().tell(0, &lost(1));
        assert!((PATIENCE..100 * PATIENCE).contains(&begin.elapsed()));
        assert_eq!(told(&mut receiver), []);
    }
}

#[cfg(fuzzing)]
pub mod fuzzing {
    //! The datagrams that come to a launcher's socket.
    use super::*;

    thread_local! {
        static INBOX: std::cell::RefCell<ReportReceiver> = {
            let receiver = ReportReceiver::new(&Address::of(&format!("fuzz-{}", std::process::id())), 4);
            receiver.expect("an receiver").into()
        };
    }

    /// A report, from a process that knows the address.
    pub fn parse(data: &[u8]) {
        INBOX.with_borrow_mut(|receiver| {
            receiver.file(data);
            let datagram = [&receiver.token.0.reveal()[..], data].concat();
            receiver.file(&datagram);
            assert!(receiver.reports().len() <= 4);
        });
    }

    /// Reports as ranks write them.
    pub fn seeds() -> Vec<Vec<u8>> {
        let left = crate::error::Kind::RankLeft {
            waiting: 0,
            what: "barrier()".into(),
        }
        .on(1);
        let report = |error| FailureReport {
            rank: 0,
            by: 2,
            error,
        };
        let reports = [report(Some(left)), report(None)];
        let bytes = reports.map(|report| serde_json::to_vec(&report).unwrap_or_default());
        bytes.into()
    }
}
