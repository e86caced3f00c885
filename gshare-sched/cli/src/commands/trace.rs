//! `gshare trace`: what a hooked process waits for, from the ring that it writes.
//!
//! The ring is memory of the process that a descriptor leads to: it is looked for among those, by its first bytes. Nothing is
//! asked of the process, which may be stopped; and nothing of the daemon.

use super::{out, print_json};
use anyhow::Context as _;
use gshare_core::Duration;
use gshare_core::wait_ring::{Category, MAGIC, Record, RingError, Snapshot, WORDS};
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

/// Show what a hooked process waits for: why launches waited, which memory was denied, what the daemon said.
///
/// Times count from when the process first used a device. Nothing has to be switched on: waits, denials and the connection
/// to the daemon are traced in every metered process, except where `GSHARE_TRACE=none` was set for it;
/// `GSHARE_TRACE=gate,link,memory` adds each allocation. Only the owner of a process (and root) may read its trace.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare trace 4711               the last 40 events of process 4711: the last line says what it waits for
  gshare trace 4711 --follow      these, and what happens from now on
  gshare trace 4711 --last 5 --json
  GSHARE_TRACE_RING=/tmp/ring.%p gshare run -- ./program; gshare trace --file /tmp/ring.4711
                                  the ring stays when the process has ended or crashed")]
pub(crate) struct Options {
    /// The process.
    #[arg(value_name = "PID", required_unless_present = "file")]
    pid: Option<u32>,
    /// A ring that `GSHARE_TRACE_RING` has named, instead of a process.
    #[arg(long, value_name = "PATH", conflicts_with = "pid")]
    file: Option<PathBuf>,
    /// Show the last N events.
    #[arg(long, value_name = "N", default_value_t = 40)]
    last: usize,
    /// Go on with what happens, until the process ends.
    #[arg(long)]
    follow: bool,
    /// Print one JSON object; with --follow one for each event.
    #[arg(long)]
    json: bool,
}

/// Why there is no trace of a process.
#[derive(Debug, thiserror::Error)]
enum TraceError {
    #[error("no process {0}")]
    NoProcess(u32),
    #[error("process {pid} belongs to another user (uid {uid}): only its owner and root may read its trace")]
    OtherUser { pid: u32, uid: u32 },
    #[error("process {0} is not hooked: start it with `gshare run -- CMD`")]
    NotHooked(u32),
    #[error(
        "process {0} is hooked and writes no trace: it has not used a device yet, stands aside (GSHARE_DISABLE, or no \
         limit and no daemon), was started with GSHARE_TRACE=none, or has closed its descriptors"
    )]
    NoRing(u32),
    #[error("process {pid}: {error}")]
    Ring { pid: u32, error: RingError },
    #[error("process {pid}: {error}")]
    Io { pid: u32, error: std::io::Error },
}

/// How long between two looks at a ring that is followed.
const LOOK: std::time::Duration = std::time::Duration::from_millis(100);

/// A ring, open.
struct Ring {
    file: File,
    first: Snapshot,
}

fn bytes(file: &File) -> std::io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt as _;
    let mut bytes = vec![0; WORDS * 8 + 1];
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64)? {
            0 => break,
            more => length += more,
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

fn open(path: &Path) -> anyhow::Result<Ring> {
    let name = || path.display().to_string();
    let file = File::open(path).with_context(name)?;
    let first = Snapshot::read(&bytes(&file).with_context(name)?).with_context(name)?;
    Ok(Ring { file, first })
}

/// The number that a process has in its own namespace, and whether that is a process at all.
fn own_number(pid: u32) -> Result<(u32, u32), TraceError> {
    let status = match std::fs::read_to_string(format!("/proc/{pid}/status")) {
        Ok(status) => status,
        Err(error) if error.kind() == ErrorKind::NotFound => return Err(TraceError::NoProcess(pid)),
        Err(error) => return Err(TraceError::Io { pid, error }),
    };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    let own = field("NSpid:").split_whitespace().last().and_then(|text| text.parse().ok());
    let uid = field("Uid:").split_whitespace().next().and_then(|text| text.parse().ok());
    Ok((own.unwrap_or(pid), uid.unwrap_or(0)))
}

/// Looks among the descriptors of a process. Those of its parents may be there, too: the ring is the one with its number.
fn find(pid: u32) -> Result<Ring, TraceError> {
    let (own, uid) = own_number(pid)?;
    let refused = |error: std::io::Error| match error.kind() {
        ErrorKind::PermissionDenied => TraceError::OtherUser { pid, uid },
        ErrorKind::NotFound => TraceError::NoProcess(pid),
        _ => TraceError::Io { pid, error },
    };
    let (mut found, mut unreadable) = (None::<Ring>, None);
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).map_err(refused)? {
        let Ok(entry) = entry else { continue };
        let Some(file) = ring_behind(&entry.path()) else { continue };
        let read = bytes(&file).map_err(|error| TraceError::Io { pid, error })?;
        match Snapshot::read(&read) {
            Ok(first) if first.process == own => {
                if found.as_ref().is_none_or(|ring| ring.first.begun_ns < first.begun_ns) {
                    found = Some(Ring { file, first });
                }
            }
            Ok(_of_a_parent) => {}
            Err(error) => unreadable = Some(TraceError::Ring { pid, error }),
        }
    }
    let maps = || std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    found.ok_or_else(|| match unreadable {
        Some(error) => error,
        None if maps().contains("libgshare_hook") => TraceError::NoRing(pid),
        None => TraceError::NotHooked(pid),
    })
}

/// The file that a descriptor leads to, if it begins like a ring.
fn ring_behind(descriptor: &Path) -> Option<File> {
    // Only regular files: to open others may have effects.
    descriptor.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut file = File::open(descriptor).ok()?;
    let mut magic = [0; 8];
    file.read_exact(&mut magic).ok()?;
    (u64::from_ne_bytes(magic) == MAGIC).then_some(file)
}

#[derive(serde::Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    record: &'a Record,
    text: String,
}

#[derive(serde::Serialize)]
struct Report<'a> {
    process: u32,
    begun_ns: u64,
    traced: Vec<&'static str>,
    torn: u64,
    lost: u64,
    events: Vec<Line<'a>>,
}

fn line(record: &Record, begun_ns: u64) -> Line<'_> {
    Line { record, text: record.sentence(begun_ns) }
}

fn traced(snapshot: &Snapshot) -> Vec<&'static str> {
    let all = Category::ALL.iter().filter(|(_, category)| snapshot.traced & category.bit() != 0);
    all.map(|(word, _)| *word).collect()
}

/// A line for each event; false when nothing reads them any more.
fn print_events(records: &[Record], begun_ns: u64, json: bool) -> anyhow::Result<bool> {
    let mut text = String::new();
    for record in records {
        match json {
            true => text += &serde_json::to_string(&line(record, begun_ns))?,
            false => text += &record.sentence(begun_ns),
        }
        text.push('\n');
    }
    Ok(out::write(&mut std::io::stdout().lock(), text.as_bytes())?)
}

fn print_first(snapshot: &Snapshot, options: &Options) -> anyhow::Result<bool> {
    let records = &snapshot.records[snapshot.records.len().saturating_sub(options.last)..];
    let begun_ns = snapshot.begun_ns;
    if options.json && !options.follow {
        let events = records.iter().map(|record| line(record, begun_ns)).collect();
        let Snapshot { process, torn, lost, .. } = *snapshot;
        print_json(&Report { process, begun_ns, traced: traced(snapshot), torn, lost, events })?;
        return Ok(true);
    }
    if !options.json {
        let now = now_ns().saturating_sub(begun_ns);
        let words = traced(snapshot).join(", ");
        println!(
            "process {}, traced: {words}; {} events, {} overwritten, {} torn; now {:.3} s",
            snapshot.process,
            snapshot.records.len(),
            snapshot.lost,
            snapshot.torn,
            Duration::from_nanos(now).as_secs_f64()
        );
    }
    print_events(records, begun_ns, options.json)
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let ring = match (&options.file, options.pid) {
        (Some(file), _) => open(file)?,
        (None, Some(pid)) => find(pid)?,
        (None, None) => anyhow::bail!("need PID or --file"),
    };
    let mut read = print_first(&ring.first, options)?;
    let begun_ns = ring.first.begun_ns;
    let mut last = ring.first;
    let lives = || options.pid.is_none_or(|pid| Path::new(&format!("/proc/{pid}")).exists());
    while options.follow && read && lives() {
        std::thread::sleep(LOOK);
        last = last.newer(&bytes(&ring.file)?)?;
        read = print_events(&last.records, begun_ns, options.json)?;
        if last.lost > 0 && !options.json {
            println!("              {} events overwritten before they could be read", last.lost);
        }
    }
    Ok(())
}
