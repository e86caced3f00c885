//! Ports at which a process and its children listen, for the message about a program that ignores `$PORT`; and signs of work of a
//! program that does not listen yet. A program that loads a model uses the CPU or a GPU, waits for a disk or has a TCP connection; the host
//! waits no longer for a program that does none of these.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time before the first look at a new program; the pause then doubles with each look.
const FIRST: Duration = Duration::from_secs(2);
/// The longest pause between two looks.
const LONGEST: Duration = Duration::from_secs(60);

/// A program that does no work for this long will probably not listen.
pub const IDLE: gshare_core::Duration = gshare_core::Duration::from_secs(10);
/// CPU time in 5 s that is not work yet: one tick of the kernel's clock. Servers that wait look around this often.
const TICK_PER: Duration = Duration::from_secs(5);

/// Looks at a process from time to time.
#[derive(Debug)]
pub struct Looks {
    last: Instant,
    pause: Duration,
    seen: Option<Vec<u16>>,
    /// Last sign of work. None: its work is not seen.
    worked: Option<Instant>,
    /// Time of CPUs and GPUs at the last look.
    before: (u64, u64),
    patience: Duration,
    idle: bool,
}

#[cfg(test)]
impl Looks {
    /// Makes the next look due now.
    pub(crate) fn due(mut self) -> Self {
        self.pause = Duration::ZERO;
        self
    }
}

/// A program at one look.
#[derive(Debug, Default)]
struct Signs {
    /// TCP ports at which it listens, sorted.
    ports: Vec<u16>,
    /// Whether it runs, waits for a disk, or has a TCP connection.
    busy: bool,
    /// CPU time in ticks of the kernel's clock.
    ticks: u64,
    /// GPU time in ns.
    gpu_ns: u64,
}

impl Looks {
    /// Looks at a new process, which is idle after `patience` without work, if its work is `seen`.
    pub fn new(seen: bool, patience: gshare_core::Duration) -> Self {
        let now = Instant::now();
        let worked = seen.then_some(now);
        Self {
            last: now,
            pause: FIRST,
            seen: None,
            worked,
            before: (0, 0),
            patience: patience.into(),
            idle: false,
        }
    }

    /// The ports at which the process listens in place of `port`, if they have changed; an empty list for an idle process that
    /// listens nowhere. `gpu_ns` gives its GPU time so far.
    pub fn at(&mut self, pid: u32, port: u16, gpu_ns: impl FnOnce() -> u64) -> Option<Vec<u16>> {
        if self.last.elapsed() < self.pause {
            return None;
        }
        self.pause = (self.pause * 2).min(LONGEST);
        self.found(Instant::now(), Signs { gpu_ns: gpu_ns(), ..signs(pid) }, port)
    }

    /// Whether the process does not work, as of the last look.
    pub fn idle(&self) -> bool {
        self.idle
    }

    fn found(&mut self, now: Instant, signs: Signs, port: u16) -> Option<Vec<u16>> {
        if let Some(worked) = &mut self.worked {
            let allowed = now.saturating_duration_since(self.last).as_secs() / TICK_PER.as_secs() + 1;
            let (ticks, gpu_ns) = core::mem::replace(&mut self.before, (signs.ticks, signs.gpu_ns));
            if signs.busy || signs.ticks.abs_diff(ticks) > allowed || signs.gpu_ns != gpu_ns {
                *worked = now;
            }
            self.idle = now.saturating_duration_since(*worked) >= self.patience;
        }
        self.last = now;
        let wrong = if signs.ports.is_empty() { self.idle } else { !signs.ports.contains(&port) };
        let news = wrong && self.seen.as_ref() != Some(&signs.ports);
        news.then(|| self.seen.insert(signs.ports).clone())
    }
}

/// The message about a program that listens at these ports and not at `$PORT`.
pub fn elsewhere(ports: &[u16], port: u16) -> String {
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    let what = match ports.is_empty() {
        true => "does nothing, and listens at no port".to_owned(),
        false => format!("listens at port {}", ports.join(", ")),
    };
    format!("{what}, not at $PORT, which is {port}: a function serves HTTP on 127.0.0.1:$PORT")
}

/// The ports and the signs of work of a process and its descendants.
fn signs(pid: u32) -> Signs {
    let family = family(pid);
    let sockets: BTreeSet<String> = family.iter().copied().flat_map(sockets).collect();
    let (mut ports, mut signs) = (BTreeSet::new(), Signs::default());
    for file in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // The fields are local address, state and inode.
            let (Some(local), Some(state), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9))
            else {
                continue;
            };
            if !sockets.contains(*inode) {
                continue;
            }
            match *state {
                LISTEN => {
                    let port = local.rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
                    ports.extend(port);
                }
                state => signs.busy |= CONNECTED.contains(&state),
            }
        }
    }
    for process in family {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything. After it come the state as field 3, and CPU time as fields 14 to 17.
        let Some((_, rest)) = stat.rsplit_once(") ") else { continue };
        signs.busy |= rest.starts_with(['R', 'D']);
        let times = rest.split(' ').skip(11).take(4).filter_map(|time| time.parse::<u64>().ok());
        signs.ticks += times.sum::<u64>();
    }
    signs.ports = ports.into_iter().collect();
    signs
}

/// The kernel's numbers for the states of a socket: `LISTEN`; `ESTABLISHED` and `SYN_SENT`.
const LISTEN: &str = "0A";
const CONNECTED: [&str; 2] = ["01", "02"];

/// The process and its descendants.
fn family(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut next = 0;
    while let Some(&parent) = all.get(next) {
        next += 1;
        let tasks = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
        for task in tasks {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            all.extend(children.split_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
    }
    all
}

/// Inodes of the sockets that a process has open.
fn sockets(pid: u32) -> Vec<String> {
    let open = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"));
    let links =
        open.into_iter().flatten().flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let number = |link: std::path::PathBuf| {
        let text = link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some(text.to_owned())
    };
    links.filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_found_by_the_process_that_listens_there_and_not_by_another_one() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = signs(std::process::id());
        assert!(own.ports.contains(&port), "{own:?}");
        let (_client, _server) =
            (std::net::TcpStream::connect(("127.0.0.1", port)).unwrap(), listener.accept().unwrap());
        assert!(signs(std::process::id()).busy, "it has a connection");
        let mut other = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        // Between fork and exec the child still holds the sockets of this process.
        while std::fs::read_to_string(format!("/proc/{}/comm", other.id()))
            .is_ok_and(|name| name != "sleep\n")
        {
            std::thread::yield_now();
        }
        let found = signs(other.id());
        assert_eq!(found.ports, [0_u16; 0]);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(elsewhere(&[8000], 43211).starts_with("listens at port 8000, not at $PORT, which is 43211"));
    }

    /// Regression: the trials of a program that did nothing held a device for two minutes.
    #[test]
    fn a_program_that_does_nothing_is_told_apart_from_one_that_loads() {
        let begun = Instant::now();
        let at = |looks: &mut Looks, second, ticks, busy| {
            let signs = Signs { ports: Vec::new(), busy, ticks, gpu_ns: 0 };
            looks.found(begun + Duration::from_secs(second), signs, 80)
        };
        let mut sleeps = Looks::new(true, IDLE);
        assert_eq!(at(&mut sleeps, 2, 5, false), None, "it has just begun");
        assert_eq!(at(&mut sleeps, 6, 6, false), None);
        assert_eq!(at(&mut sleeps, 14, 7, false), Some(Vec::new()));
        assert!(sleeps.idle());
        assert!(
            elsewhere(&[], 80).starts_with("does nothing, and listens at no port, not at $PORT, which is 80")
        );
        let mut warms_up = Looks::new(true, IDLE);
        for second in [2, 6, 14, 30, 62] {
            let signs = Signs { ticks: 5, gpu_ns: second, ..Signs::default() };
            assert_eq!(warms_up.found(begun + Duration::from_secs(second), signs, 80), None);
        }
        assert!(!warms_up.idle(), "it waits for its own kernels");
        // A slow download, a disk, and a program with unseen work.
        let mut loads = [Looks::new(true, IDLE), Looks::new(true, IDLE), Looks::new(false, IDLE)];
        for second in [2, 6, 14, 30, 62] {
            assert_eq!(at(&mut loads[0], second, second, false), None);
            assert_eq!(at(&mut loads[1], second, 5, true), None);
            assert_eq!(at(&mut loads[2], second, 5, false), None);
        }
        assert!(loads.iter().all(|looks| !looks.idle()));
    }
}
