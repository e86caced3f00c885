//! Ports at which a process and its children listen, for the message about a program that ignores `$PORT`.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time before the first look at a new program; the pause then doubles with each look.
const FIRST: Duration = Duration::from_secs(2);
/// The longest pause between two looks.
const LONGEST: Duration = Duration::from_secs(60);

/// Looks at a process from time to time.
#[derive(Debug)]
pub struct Looks {
    last: Instant,
    pause: Duration,
    seen: Vec<u16>,
}

impl Default for Looks {
    fn default() -> Self {
        Self { last: Instant::now(), pause: FIRST, seen: Vec::new() }
    }
}

impl Looks {
    /// The ports at which the process listens in place of `port`, if they have changed.
    pub fn at(&mut self, pid: u32, port: u16) -> Option<Vec<u16>> {
        if self.last.elapsed() < self.pause {
            return None;
        }
        (self.last, self.pause) = (Instant::now(), (self.pause * 2).min(LONGEST));
        let ports = ports(pid);
        let news = !ports.is_empty() && !ports.contains(&port) && ports != self.seen;
        news.then(|| {
            self.seen.clone_from(&ports);
            ports
        })
    }
}

/// The message about a program that listens at these ports and not at `$PORT`.
pub fn elsewhere(ports: &[u16], port: u16) -> String {
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    format!(
        "listens at port {}, not at $PORT, which is {port}: a function serves HTTP on 127.0.0.1:$PORT",
        ports.join(", ")
    )
}

/// TCP ports at which a process or a descendant listens, sorted.
pub fn ports(pid: u32) -> Vec<u16> {
    let sockets: BTreeSet<String> = family(pid).into_iter().flat_map(sockets).collect();
    let mut ports = BTreeSet::new();
    for file in ["tcp", "tcp6"] {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{file}")).unwrap_or_default();
        for line in table.lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // The fields are local address, state and inode; state 0A is LISTEN.
            let (Some(local), Some(&"0A"), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9))
            else {
                continue;
            };
            let port = local.rsplit(':').next().and_then(|port| u16::from_str_radix(port, 16).ok());
            ports.extend(port.filter(|_| sockets.contains(*inode)));
        }
    }
    ports.into_iter().collect()
}

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
        assert!(ports(std::process::id()).contains(&port));
        let mut other = std::process::Command::new("/bin/sleep").arg("1000").spawn().unwrap();
        // Between fork and exec the child still holds the sockets of this process.
        while std::fs::read_to_string(format!("/proc/{}/comm", other.id()))
            .is_ok_and(|name| name != "sleep\n")
        {
            std::thread::yield_now();
        }
        assert_eq!(ports(other.id()), [0_u16; 0]);
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(elsewhere(&[8000], 43211).starts_with("listens at port 8000, not at $PORT, which is 43211"));
    }
}
