//! The system's limits on this process and on the control groups that it is in.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

/// A number of bytes in words, such as "24.7 GB (24671920128 bytes)". Below 10 kB it is only the number.
#[derive(Clone, Copy, Debug)]
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Bytes(bytes) = *self;
        let noun = if bytes == 1 { "byte" } else { "bytes" };
        if bytes < 10_000 {
            return write!(f, "{bytes} {noun}");
        }
        let (mut value, mut unit) = (bytes as f64 / 1e3, "kB");
        for larger in ["MB", "GB", "TB", "PB", "EB"] {
            // Numbers from here on would be rounded to 1000.0.
            if value >= 999.95 {
                (value, unit) = (value / 1e3, larger);
            }
        }
        write!(f, "{value:.1} {unit} ({bytes} {noun})")
    }
}

/// True if this process, or the machine, has no descriptors or no memory left to open anything at the moment.
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    let refused = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    Errno::from_io_error(error).is_some_and(|errno| refused.contains(&errno))
}

/// A limit of this process: the resource, the names that the system and `ulimit` have for it, and its value in words.
struct Limit(Resource, &'static str, &'static str, fn(u64) -> String);

const OPEN_FILES: Limit = Limit(
    Resource::Nofile,
    "open files",
    "RLIMIT_NOFILE, ulimit -n",
    count,
);
const FILE_SIZE: Limit = Limit(
    Resource::Fsize,
    "the size of a file, as which shared memory counts,",
    "RLIMIT_FSIZE, ulimit -f",
    size,
);
const ADDRESS_SPACE: Limit = Limit(Resource::As, "address space", "RLIMIT_AS, ulimit -v", size);
const DATA: Limit = Limit(Resource::Data, "data", "RLIMIT_DATA, ulimit -d", size);
const LOCKED: Limit = Limit(
    Resource::Memlock,
    "locked memory",
    "RLIMIT_MEMLOCK, ulimit -l",
    size,
);
const PROCESSES: Limit = Limit(
    Resource::Nproc,
    "threads of this user",
    "RLIMIT_NPROC, ulimit -u",
    count,
);

fn count(value: u64) -> String {
    value.to_string()
}

fn size(value: u64) -> String {
    Bytes(value).to_string()
}

impl Limit {
    /// How much is allowed. None if there is no limit.
    fn value(&self) -> Option<u64> {
        getrlimit(self.0).current
    }

    /// The limit in words, if there is one.
    fn words(&self) -> Option<String> {
        let Limit(_, what, names, in_words) = self;
        let value = in_words(self.value()?);
        Some(format!("; the limit on {what} is {value} ({names})"))
    }
}

/// The system's words for `error`, with the limits that may have caused it.
pub fn explain(error: &io::Error) -> String {
    let limits: &[Limit] = match Errno::from_io_error(error) {
        // Descriptors in messages that are not received yet count too.
        Some(Errno::MFILE | Errno::TOOMANYREFS) => &[OPEN_FILES],
        Some(Errno::NOMEM) => &[ADDRESS_SPACE, DATA],
        Some(Errno::FBIG) => &[FILE_SIZE],
        _ => &[],
    };
    named(error, limits)
}

/// The system's words if another process can open no more files, with its limit if process `pid` shows it.
pub fn explain_open_files(pid: Option<u32>) -> String {
    let Limit(_, what, names, _) = OPEN_FILES;
    let limits = pid.map(|pid| fs::read_to_string(format!("/proc/{pid}/limits")));
    let limits = limits.and_then(io::Result::ok).unwrap_or_default();
    let mut lines = limits.lines();
    let limit = lines.find_map(|line| line.strip_prefix("Max open files"));
    let limit = limit.and_then(|values| values.split_whitespace().next());
    let limit = limit.map_or_else(String::new, |value| format!(" is {value}"));
    let error = io::Error::from(Errno::MFILE);
    format!("{error}; the limit on {what}{limit} ({names})")
}

/// [`explain`], if a thread or a process could not be started.
pub fn explain_start(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::AGAIN) => {
            let most = threads_of_control_group();
            let most = most.map(|most| format!("; that of its control group is {most} (pids.max)"));
            named(error, &[PROCESSES, ADDRESS_SPACE]) + &most.unwrap_or_default()
        }
        _ => explain(error),
    }
}

/// [`explain`], if memory could not be mapped.
pub fn explain_memory(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        // A process that locks all memory that it maps gets this error.
        Some(Errno::AGAIN) => named(error, &[LOCKED]),
        _ => explain(error),
    }
}

fn named(error: &io::Error, limits: &[Limit]) -> String {
    let words = limits.iter().filter_map(Limit::words);
    words.fold(error.to_string(), |all, limit| all + &limit)
}

/// True if `error` says that memory is missing, and not a descriptor.
pub fn is_memory(error: &io::Error) -> bool {
    let refused = [Errno::NOMEM, Errno::AGAIN, Errno::NOSPC, Errno::FBIG];
    error.kind() == io::ErrorKind::OutOfMemory
        || Errno::from_io_error(error).is_some_and(|errno| refused.contains(&errno))
}

/// Fails if the file is longer than this process may write. The system would end the process by SIGXFSZ.
pub fn require_file_size(bytes: u64) -> io::Result<()> {
    match FILE_SIZE.value() {
        Some(most) if bytes > most => Err(Errno::FBIG.into()),
        _ => Ok(()),
    }
}

/// A limited amount of memory that several ranks may share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// The kernel's id. Ranks of different machines share no memory.
    machine: String,
    /// On a machine, the same for all ranks that share the memory, wherever they see it from.
    id: (u64, u64),
    available: u64,
    /// Where the memory is available, in words.
    place: String,
}

/// The limits on this process's memory, outermost last.
pub fn rooms() -> Vec<Room> {
    // Under Miri, parsing so much text takes minutes.
    if cfg!(miri) {
        return Vec::new();
    }
    let machine = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_bytes(&text, "MemAvailable"));
    let machine = machine.map(|available| Room {
        machine: kernel(),
        id: (0, 0),
        available,
        place: "on this machine".into(),
    });
    let groups = control_groups("memory").into_iter();
    groups
        .filter_map(|directory| room_of(&directory))
        .chain(machine)
        .collect()
}

/// The running kernel's id. Kernels that do not say it count as one.
fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// How long a look at the limits holds.
const MOMENT: Duration = Duration::from_millis(10);
/// The most that it grants. No more is granted wrongly if others take memory in that time, or if this process enters a
/// control group that has less.
pub const SMALL: u64 = 1 << 20;

/// A look at the limits that has found enough memory. It reads twenty files or more, which takes longer than to make a
/// small matrix.
#[derive(Debug)]
struct Look {
    at: Instant,
    /// The bytes that it still grants.
    left: u64,
}

impl Look {
    /// A look that has found `rooms`. Of these `bytes` are asked for.
    fn new(rooms: &[Room], bytes: usize) -> Look {
        let rooms = rooms.iter().map(|room| room.available);
        let spare = rooms.map(|available| available.saturating_sub(bytes as u64));
        Look {
            at: Instant::now(),
            left: spare.fold(SMALL, u64::min),
        }
    }

    /// Asks for `bytes` more. False if a new look has to tell.
    fn grants(&mut self, bytes: usize) -> bool {
        match self.left.checked_sub(bytes as u64) {
            Some(left) if self.at.elapsed() < MOMENT => {
                self.left = left;
                true
            }
            _ => false,
        }
    }
}

/// Checks that there is enough memory. Linux promises more memory than there is, and ends processes when they use it.
///
/// The last look at the limits may say that there is. Only a new one says that there is not, because memory may have
/// been given back.
pub fn require_available(bytes: usize) -> io::Result<()> {
    static LAST: Mutex<Option<Look>> = Mutex::new(None);
    // No one waits for the lock: in the child of a fork it may be locked for ever.
    if let Ok(Some(last)) = LAST.try_lock().as_deref_mut()
        && last.grants(bytes)
    {
        return Ok(());
    }
    let rooms = [rooms()];
    if let Some((_, words)) = lacking(&rooms, bytes) {
        return Err(io::Error::new(io::ErrorKind::OutOfMemory, words));
    }
    if let Ok(mut last) = LAST.try_lock() {
        *last = Some(Look::new(&rooms[0], bytes));
    }
    Ok(())
}

/// A rank that lacks memory if every rank takes `bytes`, and why.
pub fn lacking(ranks: &[Vec<Room>], bytes: usize) -> Option<(usize, String)> {
    let rooms = ranks.iter().enumerate();
    let mut rooms = rooms.flat_map(|(rank, rooms)| rooms.iter().map(move |room| (rank, room)));
    rooms.find_map(|(rank, room)| {
        let is_same = |other: &&Room| (&other.machine, other.id) == (&room.machine, room.id);
        let sharers = ranks.iter().flatten().filter(is_same);
        // The ranks have looked at different moments.
        let (count, available) = sharers.fold((0, 0), |(count, most), other| {
            (count + 1, most.max(other.available))
        });
        let needed = (bytes as u64).saturating_mul(count);
        let place = &room.place;
        (needed > available).then(|| {
            let words = format!(
                "{} are available {place}, where {} are needed in all",
                Bytes(available),
                Bytes(needed)
            );
            (rank, words)
        })
    })
}

/// The memory that a control group's limit leaves, if it has a limit.
fn room_of(directory: &Path) -> Option<Room> {
    let number = |names: [&str; 2]| {
        let mut texts = names
            .iter()
            .map(|name| fs::read_to_string(directory.join(name)));
        // "max" is no limit.
        texts.find_map(|text| text.ok()?.trim().parse::<u64>().ok())
    };
    let limit = number(["memory.max", "memory.limit_in_bytes"])?;
    let used = number(["memory.current", "memory.usage_in_bytes"])?;
    let statistics = fs::read_to_string(directory.join("memory.stat")).ok()?;
    // The page cache of files gives way to other memory. Shared memory is not part of these counts. In version 1, only
    // the counts with `total_` include the groups within.
    let cached = |name: &str| {
        let total = stat(&statistics, &format!("total_{name}"));
        total.or_else(|| stat(&statistics, name)).unwrap_or(0)
    };
    let cached = cached("active_file") + cached("inactive_file");
    let metadata = fs::metadata(directory).ok()?;
    Some(Room {
        machine: kernel(),
        id: (metadata.dev(), metadata.ino()),
        available: limit.saturating_sub(used.saturating_sub(cached)),
        place: "to this process's control group".into(),
    })
}

/// The directories of this process's control group and of the groups around it, as far as the process sees them. These
/// groups may have limits of `controller`. A container's group is one of them.
fn control_groups(controller: &str) -> Vec<PathBuf> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    found(
        controller,
        &read("/proc/self/cgroup"),
        &read("/proc/self/mountinfo"),
    )
}

/// [`control_groups`], from the text of these files. A system may have both versions side by side.
fn found(controller: &str, groups: &str, mounts: &str) -> Vec<PathBuf> {
    let has = |list: &str| list.split(',').any(|name| name == controller);
    let mounts = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut kind = kind.split(' ');
        let (kind, options) = (kind.next()?, kind.nth(1)?);
        let mut groups = groups.lines().filter_map(|line| {
            let (_, line) = line.split_once(':')?;
            line.split_once(':')
        });
        let (_, group) = match kind {
            "cgroup2" => groups.find(|(controllers, _)| controllers.is_empty())?,
            "cgroup" if has(options) => groups.find(|(controllers, _)| has(controllers))?,
            _ => return None,
        };
        // In a container, the mount may begin at the container's own group, whose path is then the one on the host.
        let below = Path::new(group).strip_prefix(root);
        Some((
            PathBuf::from(point),
            below.unwrap_or(Path::new("")).to_owned(),
        ))
    });
    let directories = mounts.flat_map(|(point, below)| {
        let group = point.join(below);
        let around = group
            .ancestors()
            .take_while(|group| group.starts_with(&point));
        around.map(Path::to_owned).collect::<Vec<_>>()
    });
    directories.collect()
}

/// How many threads the strictest control group of this process allows.
fn threads_of_control_group() -> Option<u64> {
    let groups = control_groups("pids").into_iter();
    let most = groups.filter_map(|group| fs::read_to_string(group.join("pids.max")).ok());
    most.filter_map(|most| most.trim().parse().ok()).min()
}

/// Reads a number from a control group's statistics.
fn stat(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(key, _)| *key == name)?.1.parse().ok()
}

fn meminfo_bytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(field))?;
    let kib: u64 = line
        .trim_start_matches(':')
        .trim()
        .strip_suffix("kB")?
        .trim()
        .parse()
        .ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_bytes_have_a_unit_beside_the_exact_number() {
        let cases = [
            (0, "0 bytes"),
            (1, "1 byte"),
            (512, "512 bytes"),
            (9_999, "9999 bytes"),
            (10_000, "10.0 kB (10000 bytes)"),
            (999_949, "999.9 kB (999949 bytes)"),
            (999_950, "1.0 MB (999950 bytes)"),
            (24_671_920_128, "24.7 GB (24671920128 bytes)"),
            (u64::MAX, "18.4 EB (18446744073709551615 bytes)"),
        ];
        for (bytes, words) in cases {
            assert_eq!(Bytes(bytes).to_string(), words);
        }
    }

    #[test]
    fn meminfo_is_read_in_kib() {
        let text = "MemTotal:       100 kB\nMemAvailable:   24 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable"), Some(24 * 1024));
        assert_eq!(meminfo_bytes(text, "Missing"), None);
    }

    #[test]
    fn a_statistic_is_found_by_its_whole_name() {
        let text = "anon 1\ninactive_file 20\nactive_file 3\n";
        assert_eq!(stat(text, "active_file"), Some(3));
        assert_eq!(stat(text, "file"), None);
    }

    #[test]
    fn control_groups_are_found_wherever_they_are_mounted() {
        let paths = |groups, mounts| found("memory", groups, mounts);
        let expected = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        // Version 2, on a host.
        assert_eq!(
            paths(
                "0::/user.slice/job\n",
                "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
            ),
            expected(&[
                "/sys/fs/cgroup/user.slice/job",
                "/sys/fs/cgroup/user.slice",
                "/sys/fs/cgroup"
            ])
        );
        // Version 2, in a container with a namespace of its own.
        assert_eq!(
            paths(
                "0::/\n",
                "30 23 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
            ),
            expected(&["/sys/fs/cgroup"])
        );
        // Version 1, in a container that has the host's paths, next to version 2 without controllers.
        let mounts = "40 35 0:33 /docker/ab /sys/fs/cgroup/memory ro master:17 - cgroup cgroup rw,memory\n\
                      41 35 0:34 /docker/ab /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n\
                      42 35 0:35 / /sys/fs/cgroup/unified ro - cgroup2 cgroup2 rw\n";
        let groups =
            "9:name=systemd:/docker/ab\n4:memory:/docker/ab/step\n3:cpu,cpuacct:/docker/ab\n0::/\n";
        assert_eq!(
            paths(groups, mounts),
            expected(&[
                "/sys/fs/cgroup/memory/step",
                "/sys/fs/cgroup/memory",
                "/sys/fs/cgroup/unified"
            ])
        );
        assert_eq!(paths("", mounts), expected(&[]));
        assert_eq!(
            paths("nonsense\n4:memory\n", "nonsense - cgroup\n"),
            expected(&[])
        );
    }

    #[test]
    fn what_a_control_group_leaves_is_read_in_both_versions() {
        let directory = std::env::temp_dir().join(format!("groups-{}", std::process::id()));
        let versions = [
            (
                ["memory.max", "memory.current"],
                "active_file 10\ninactive_file 5\n",
            ),
            (
                ["memory.limit_in_bytes", "memory.usage_in_bytes"],
                "active_file 1\ntotal_active_file 10\ninactive_file 1\ntotal_inactive_file 5\n",
            ),
        ];
        for ([limit, used], statistics) in versions {
            fs::create_dir_all(&directory).unwrap();
            let write = |name: &str, text: &str| fs::write(directory.join(name), text).unwrap();
            write(used, "60\n");
            write("memory.stat", statistics);
            write(limit, "max\n");
            assert_eq!(room_of(&directory), None, "no limit");
            write(limit, "100\n");
            assert_eq!(room_of(&directory).unwrap().available, 55);
            fs::remove_dir_all(&directory).unwrap();
        }
    }

    fn room(id: u64, available: u64) -> Room {
        Room {
            machine: "one".into(),
            id: (1, id),
            available,
            place: format!("to {id}"),
        }
    }

    #[test]
    fn a_look_grants_what_it_has_found_for_a_moment() {
        let rooms = [room(7, 1000), room(0, 100)];
        // On a busy machine the moment may have passed before all is asked.
        let is_asked_in_time = (0..1000).any(|_| {
            let begin = Instant::now();
            let mut look = Look::new(&rooms, 40);
            let granted = [61, 50, 11, 10, 1, 0].map(|bytes| look.grants(bytes));
            let in_time = begin.elapsed() < MOMENT;
            assert!(!in_time || granted == [false, true, false, true, false, true]);
            in_time
        });
        assert!(is_asked_in_time);
        let mut look = Look::new(&rooms, 40);
        std::thread::sleep(MOMENT);
        assert!(!look.grants(0));
        assert_eq!(Look::new(&[], 1).left, SMALL);
        assert_eq!(Look::new(&[room(7, 2 * SMALL)], 1).left, SMALL);
    }

    #[test]
    fn ranks_share_a_machine_and_perhaps_a_control_group() {
        let shared = [
            vec![room(7, 100), room(0, 1000)],
            vec![room(7, 99), room(0, 1000)],
            vec![room(8, 60), room(0, 1000)],
        ];
        assert_eq!(lacking(&shared, 50), None);
        let (rank, words) = lacking(&shared, 51).unwrap();
        assert_eq!(rank, 0);
        assert_eq!(
            words,
            "100 bytes are available to 7, where 102 bytes are needed in all"
        );
        assert_eq!(lacking(&shared[1..], 61).unwrap().0, 1);
        assert!(lacking(&shared[2..], usize::MAX).is_some());
    }
}
