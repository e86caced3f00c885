//! Memory of several processes of one run: one limit, and one view of it in each of them.

use crate::common::{Process, within};
use crate::hooked;
use gshare_core::Bytes;
use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};

const MIB: u64 = 1 << 20;
const LIMIT: u64 = 256 * MIB;

/// The program, built in the test's own folder.
fn program(dir: &Path) -> PathBuf {
    let program = dir.join("family");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/family.c");
    let done = Command::new("gcc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .args([&program, &source])
        .arg("-ldl")
        .output()
        .expect("gcc runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    program
}

struct Member {
    process: hooked::Spinner,
    answers: Lines<BufReader<ChildStdout>>,
}

/// Memory as a member sees it, in bytes.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    free: u64,
    total: u64,
    /// Process and bytes, in order of the processes.
    processes: Vec<(i32, u64)>,
}

impl Member {
    fn start(spinners: &hooked::Spinners, program: &Path) -> Self {
        let mut member = Self::begin(spinners, program);
        member.is_ready();
        member
    }

    /// One that has yet to look at its memory.
    fn begin(spinners: &hooked::Spinners, program: &Path) -> Self {
        let environment = [("GSHARE_MEM", "256MiB"), ("GSHARE_QUOTA", "0.5")];
        let mut process = spinners.program(program, "family", 7, &environment);
        let answers = BufReader::new(process.0.stdout.take().unwrap()).lines();
        Self { process, answers }
    }

    fn is_ready(&mut self) {
        assert_eq!(self.answers.next().unwrap().unwrap(), "ready");
    }

    fn tell(&mut self, order: &str) -> String {
        writeln!(self.process.0.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.answers.next().unwrap().unwrap()
    }

    fn allocate(&mut self, bytes: u64) -> String {
        self.tell(&format!("alloc {bytes}"))
    }

    /// Bytes of blocks of a MiB that it got until there was no more.
    fn fill(&mut self) -> u64 {
        self.tell(&format!("fill {MIB}")).parse::<u64>().unwrap() * MIB
    }

    fn view(&mut self) -> Seen {
        let line = self.tell("view");
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields[at].parse::<u64>().unwrap();
        let (free, total) = (number(0), number(1));
        let nvml = [total, free, total - free];
        assert_eq!((number(2), [3, 4, 5].map(number), [6, 7, 8].map(number)), (total, nvml, nvml), "{line}");
        let process = |field: &&str| {
            let (pid, used) = field.split_once(':').unwrap();
            (pid.parse().unwrap(), used.parse().unwrap())
        };
        let mut processes: Vec<(i32, u64)> = fields[9..].iter().map(process).collect();
        assert_eq!(processes[0].0, self.process.pid(), "itself first");
        processes.sort_unstable();
        Seen { free, total, processes }
    }
}

/// The daemon's view, by process.
fn status(daemon: &Process) -> Vec<(i32, u64)> {
    let clients = daemon.snapshot().clients.into_iter();
    let mut all: Vec<_> = clients.map(|client| (client.pid, client.memory_bytes.0)).collect();
    all.sort_unstable();
    all
}

#[test]
fn one_and_three_processes_of_a_run_see_the_same_to_the_byte() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    let daemon = Process::start(dir.path(), "");
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let mut family = vec![Member::start(&spinners, &program)];
    assert_eq!(family[0].allocate(100 * MIB), "ok");
    let alone = family[0].view();
    assert_eq!((alone.free, alone.total, &alone.processes), (156 * MIB, LIMIT, &status(&daemon)));
    family.push(Member::start(&spinners, &program));
    family.push(Member::start(&spinners, &program));
    assert_eq!(
        (family[1].allocate(30 * MIB), family[2].allocate(7 * MIB + 4_096)),
        ("ok".into(), "ok".into())
    );
    let used = 137 * MIB + 4_096;
    for member in &mut family {
        let seen = member.view();
        assert_eq!((seen.free, seen.total, seen.processes), (LIMIT - used, LIMIT, status(&daemon)));
    }
    assert_eq!(status(&daemon).iter().map(|(_, bytes)| bytes).sum::<u64>(), used);
    // All of it can be had, though each of the others was granted more than it uses.
    let free = family[1].view().free;
    assert_eq!((family[1].allocate(free), family[2].allocate(1)), ("ok".into(), "oom".into()));
    assert_eq!(family.iter_mut().map(|member| member.view().free).collect::<Vec<_>>(), [0, 0, 0]);
    assert_eq!(family[1].tell("free"), "ok");
    drop(family.remove(0));
    within(|| (status(&daemon).len() == 2).then_some(()));
    assert_eq!(family[0].view().free, LIMIT - 7 * MIB - 4_096, "its death frees its memory");
    assert_eq!(spinners.said(), "");
}

/// Each takes all that it gets: while the daemon is there, after it was killed, and beside the next one, to which they come
/// back one after the other.
#[test]
fn a_run_has_no_more_than_its_limit_whether_the_daemon_is_there_or_not() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path());
    let mut daemon = Process::start(dir.path(), "");
    let spinners = hooked::Spinners::new(dir.path(), &daemon.socket());
    let mut family: Vec<_> = (0..4).map(|_| Member::start(&spinners, &program)).collect();
    let mut got: u64 = 0;
    for member in &mut family {
        assert_eq!(member.allocate(10 * MIB), "ok");
        got += 10 * MIB;
    }
    daemon.signal(rustix::process::Signal::KILL);
    drop(daemon);
    let parts: Vec<u64> = family.iter_mut().map(Member::fill).collect();
    got += parts.iter().sum::<u64>();
    eprintln!(
        "without a daemon four processes of 10 MiB each got {parts:?} bytes more: {got} of {LIMIT} in all"
    );
    assert!(got <= LIMIT && parts.iter().all(|part| *part >= 8 * MIB), "{parts:?}");
    for _ in 0..2 {
        daemon = Process::start(dir.path(), "");
        for member in &mut family {
            got += member.fill();
            assert!(got <= LIMIT, "{got}");
        }
        within(|| (status(&daemon).len() == 4).then_some(()));
        got += family[0].fill();
        assert_eq!((got, status(&daemon).iter().map(|(_, bytes)| bytes).sum::<u64>()), (LIMIT, LIMIT));
        assert!(daemon.snapshot().devices.iter().all(|device| device.held_bytes == Bytes(LIMIT)));
        daemon.signal(rustix::process::Signal::KILL);
        drop(daemon);
        assert_eq!(family.iter_mut().map(Member::fill).sum::<u64>(), 0);
    }
    // One that comes meanwhile waits for the daemon's word, and then gets the memory left by its siblings.
    assert_eq!(family[0].tell("free"), "ok");
    let mut late = Member::begin(&spinners, &program);
    within(|| spinners.truth().try_gpu_time(&late.process));
    daemon = Process::start(dir.path(), "");
    late.is_ready();
    within(|| (status(&daemon).len() == 5).then_some(()));
    let (left, filled) = (late.view().free, late.fill());
    assert!(filled >= 8 * MIB && (left - filled) < MIB, "{filled} of {left}");
    assert_eq!(status(&daemon).iter().map(|(_, bytes)| bytes).sum::<u64>(), LIMIT - left + filled);
    assert_eq!(spinners.said(), "");
}
