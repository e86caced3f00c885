//! The journal: every event of the node, written down before the frames that it leads to are sent.
//!
//! # Problem
//! Afterwards an operator asks why a client waited: each wait, denial and refusal has a line of its own. The node is pure, so its
//! configuration, its events and their times say all else: replaying them gives every decision again ([`Replay`]). But history must not be lost to a clock
//! that is set back, to a client that sends nonsense, to a tool that truncates the file, or to a full disk; and none of
//! these may end the daemon.
//!
//! # Format
//! JSON lines in files `<run>-<segment>.jsonl` of one directory.
//!
//! ```text
//! {"journal":3,"epoch":1763634000,"segment":0,"engine":{…},"node":{…}}      first line of a segment
//! {"now_ns":17,"event":{"event":"received",…,"frame":"0203…"},"outcome":9}  an event, and the digest of what was done
//! {"now_ns":17,"actions":[{"action":"send",…}]}                             all that was done, if it is recorded
//! {"now_ns":17,"omitted":120}                                               events without effect that were not written
//! {"now_ns":17,"why":{"name":"alice","reason":"limit",…}}                    a wait that begins or ends, a denial, a refusal
//! ```
//! Frames are the hexadecimal digits of their wire encoding. An event that the node refused has `"refused":true` in place
//! of an outcome. Version 1 had the events of the token engine only.
//!
//! # Rules
//! 1. `run` is one more than the largest run in the directory when the daemon starts. No clock takes part, so a new
//!    file always sorts after the old ones, and the oldest can be deleted by their names.
//! 2. A replay does not need an event that the node refused or that had no effect. Such events use up a credit: `CREDIT`
//!    at first, one more per `CREDIT` other events. Beyond that they are counted, not written. Example: of 100,000 stale
//!    reports in a row the journal has 64 and one line that says `"omitted":99936`.
//! 3. After a failed write (a full disk) the journal stops, and the daemon goes on. `RETRY` later the next event
//!    opens a new segment, whose header says in `lost` how many events are missing before it. A file that is removed or replaced
//!    takes every write without an error, so the name is looked up every `LOOK`; events since the last look count as lost.
//! 4. A line has at most `LONGEST_LINE` bytes; a reader refuses a longer one before it has the memory for it. Files with a run of
//!    `RUNS` and more are no daemon's, and are left alone.
//!
//! # Guarantee
//! The lines of an event are handed to the kernel before the first frame that the event leads to is sent. From then on
//! they survive the death of the daemon by any signal, since the page cache belongs to the kernel. They do **not**
//! survive a crash of the kernel or a loss of power before the kernel has written the pages back; nothing calls
//! `fsync`. A death in the middle of a write leaves a line without its newline, and readers stop there. Files are
//! opened for appending: after a truncation by another process the next line is at the new end.
//!
//! # Cost
//! Some 200 bytes per event, and one `write` for all events of one received frame. When a segment is full the
//! next one is opened and the oldest beyond `keep_files` are deleted.

mod replay;

pub use replay::{Replay, ReplayError, Replayed};

use crate::config::JournalConfig;
use crate::why::Finding;
use gshare_core::{Bytes, Duration, Timestamp, TokenAction, TokenEvent};
use gshare_sched::node::{NodeAction, NodeEvent, Note};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Refused events that are written without an accepted one, and accepted events that allow one refused event more.
const CREDIT: u32 = 64;
/// Time between two attempts to write again after a failure.
const RETRY: Duration = Duration::from_millis(5_000);
/// Time between two looks for the file that is written.
const LOOK: Duration = Duration::from_millis(1_000);
/// The longest line that is read. A header names each client of the configuration, an event is one frame.
const LONGEST_LINE: u64 = 16 << 20;
/// Numbers of runs from which on files are no daemon's: one that starts a thousand times a second has a million years.
const RUNS: u64 = 1 << 55;

/// First line of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format: [`VERSION`].
    pub journal: u32,
    /// Number of the daemon's run.
    pub epoch: u64,
    /// Number of this file within the run, from 0. A run that has no file 0 lost its beginning.
    pub segment: u32,
    /// Events between the last file and this one that are missing because they could not be written.
    #[serde(default)]
    pub lost: u64,
    /// Configuration of the token engine, to build the same one for a replay; null for one of the host's own.
    pub engine: serde_json::Value,
    /// Configuration of the node when the run began.
    #[serde(default)]
    pub node: serde_json::Value,
}

/// Version of the format that is written and read here.
pub const VERSION: u32 = 3;

/// One line, as it is read back. A part that the line does not have is `None`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Line {
    /// Time of the event, in ns of the daemon's clock.
    #[serde(default)]
    pub now_ns: Option<u64>,
    /// The event; [`Line::event`] reads it.
    #[serde(default, rename = "event")]
    raw: Option<serde_json::Value>,
    /// Digest of what the node did about the event; `None` if it was refused or the daemon died over it.
    #[serde(default)]
    pub outcome: Option<u64>,
    /// Whether the node refused the event.
    #[serde(default)]
    pub refused: bool,
    /// The actions that an event led to, serialised.
    #[serde(default)]
    pub actions: Option<Vec<serde_json::Value>>,
    /// Events without effect that were not written since the last line of this kind.
    #[serde(default)]
    pub omitted: Option<u64>,
    /// A wait that begins or ends, a denial or a refusal.
    #[serde(default)]
    pub why: Option<Finding>,
    /// Present in a header: version of the format.
    #[serde(default)]
    pub journal: Option<u32>,
    /// Present in a header.
    #[serde(default)]
    pub epoch: Option<u64>,
    /// Present in a header.
    #[serde(default)]
    pub segment: Option<u32>,
    /// Present in a header: events missing before it.
    #[serde(default)]
    pub lost: u64,
    /// Present in a header.
    #[serde(default)]
    pub engine: Option<serde_json::Value>,
    /// Present in a header.
    #[serde(default)]
    pub node: Option<serde_json::Value>,
}

impl Line {
    /// The event; `None` if the line has none.
    ///
    /// # Errors
    /// An event that this version does not know.
    pub fn event(&self) -> Result<Option<NodeEvent>, serde_json::Error> {
        self.raw.as_ref().map(NodeEvent::deserialize).transpose()
    }

    /// The token engine's events and orders among recorded actions, in their order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenStep> + '_ {
        let step = |action| TokenStep::deserialize(action).ok();
        self.actions.iter().flatten().filter_map(step)
    }
}

/// An event that the token engine has taken, or an order of it; among recorded actions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(tag = "note", rename_all = "snake_case")]
pub enum TokenStep {
    /// The event.
    TokenEvent {
        /// The event.
        token: TokenEvent,
    },
    /// The order.
    TokenOrder {
        /// The order, as the token scheduler gave it.
        order: TokenAction,
    },
}

/// A digest of what a node did about an event: of frames, ends of connections and answers, in their order, with FNV-1a.
pub fn digest(actions: &[NodeAction]) -> u64 {
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut bytes = Vec::new();
    for action in actions {
        bytes.clear();
        match action {
            NodeAction::Send { conn, frame } => {
                bytes.extend_from_slice(&u64::from(*conn).to_le_bytes());
                frame.encode(0, &mut bytes);
            }
            NodeAction::Drop { conn, reason } => {
                bytes.extend_from_slice(&u64::from(*conn).to_le_bytes());
                bytes.push(reason.code());
            }
            NodeAction::UseKnown { question } => bytes.extend_from_slice(&question.to_le_bytes()),
            _ => {}
        }
        for byte in &bytes {
            digest = (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    digest
}

#[derive(Serialize)]
struct EventLine<'a> {
    now_ns: Timestamp,
    event: &'a NodeEvent,
}

#[derive(Serialize)]
struct ActionsLine<'a> {
    now_ns: Timestamp,
    actions: &'a [NodeAction],
}

#[derive(Serialize)]
struct FindingLine<'a> {
    now_ns: Timestamp,
    why: &'a Finding,
}

#[derive(Serialize)]
struct OmittedLine {
    now_ns: Timestamp,
    omitted: u64,
}

/// The daemon's journal. Errors stop the journal, not the daemon.
#[derive(Debug)]
pub(crate) struct Journal {
    /// `None`: no journal is wanted.
    config: Option<JournalConfig>,
    /// Header of the next segment.
    header: Header,
    /// Number of this run's files, once the directory could be read.
    run: Option<u64>,
    segment: Option<Segment>,
    /// Why nothing is written, and when to try again.
    failure: Option<(String, Timestamp)>,
    /// Lines that the kernel does not have yet, and how many events they are.
    buffer: Vec<u8>,
    buffered: u64,
    /// Where in the buffer the last event begins, and whether its line is not finished.
    last: usize,
    open: bool,
    /// Refused events that may still be written, and accepted ones towards the next.
    credit: u32,
    accepted: u32,
    omitted: u64,
    /// Events lost since the daemon started.
    lost: u64,
}

#[derive(Debug)]
struct Segment {
    file: File,
    path: PathBuf,
    length: u64,
    /// When its name is looked up next, and events that were written since it was last.
    look_at: Timestamp,
    unseen: u64,
}

impl Journal {
    /// No journal: nothing is written, nothing is lost.
    pub(crate) fn off() -> Self {
        Self::new(None, 0, serde_json::Value::Null, serde_json::Value::Null)
    }

    /// Begins the journal of one run of the daemon. If that fails, [`failure`](Self::failure) says why.
    pub(crate) fn create(
        config: &JournalConfig,
        epoch: u64,
        engine: serde_json::Value,
        node: serde_json::Value,
    ) -> Self {
        let mut journal = Self::new(Some(config.clone()), epoch, engine, node);
        journal.open(Timestamp::ZERO);
        journal
    }

    fn new(
        config: Option<JournalConfig>,
        epoch: u64,
        engine: serde_json::Value,
        node: serde_json::Value,
    ) -> Self {
        Self {
            config,
            header: Header { journal: VERSION, epoch, segment: 0, lost: 0, engine, node },
            run: None,
            segment: None,
            failure: None,
            buffer: Vec::new(),
            buffered: 0,
            last: 0,
            open: false,
            credit: CREDIT,
            accepted: 0,
            omitted: 0,
            lost: 0,
        }
    }

    /// An event that the node is about to be given. Its line is finished with what comes of it.
    pub(crate) fn event(&mut self, now: Timestamp, event: &NodeEvent) {
        if self.config.is_none() {
            return;
        }
        if self.failure.as_ref().is_some_and(|(_, retry)| now >= *retry) {
            self.open(now);
        }
        if self.segment.is_none() {
            self.lose(1);
            return;
        }
        self.last = self.buffer.len();
        self.buffered += 1;
        self.line(&EventLine { now_ns: now, event });
        // The brace and the newline.
        self.buffer.truncate(self.buffer.len().saturating_sub(2));
        self.open = true;
    }

    /// The node has refused the last event.
    pub(crate) fn refused(&mut self, now: Timestamp) {
        self.without_effect(now, ",\"refused\":true");
    }

    /// An event that a replay does not need.
    fn without_effect(&mut self, now: Timestamp, end: &str) {
        if self.segment.is_none() {
            return;
        }
        if self.credit == 0 {
            self.buffer.truncate(self.last);
            self.open = false;
            self.buffered = self.buffered.saturating_sub(1);
            self.omitted += 1;
            return;
        }
        self.credit -= 1;
        self.close_line(end);
        self.write_omitted(now);
    }

    /// The node has handled the last event, with these actions.
    pub(crate) fn handled(&mut self, now: Timestamp, actions: &[NodeAction]) {
        if self.segment.is_none() {
            return;
        }
        let outcome = format!(",\"outcome\":{}", digest(actions));
        if actions.contains(&NodeAction::Note(Note::NoEffect)) {
            self.without_effect(now, &outcome);
            return;
        }
        self.accepted += 1;
        if self.accepted >= CREDIT {
            (self.accepted, self.credit) = (0, CREDIT.min(self.credit + 1));
        }
        self.close_line(&outcome);
        if self.config.as_ref().is_some_and(|config| config.actions) {
            self.line(&ActionsLine { now_ns: now, actions });
        }
    }

    /// A wait that begins or ends, a denial or a refusal, after the event that led to it.
    pub(crate) fn finding(&mut self, now: Timestamp, why: &Finding) {
        self.line(&FindingLine { now_ns: now, why });
    }

    /// Finishes the line of an event.
    fn close_line(&mut self, end: &str) {
        if std::mem::take(&mut self.open) {
            self.buffer.extend_from_slice(end.as_bytes());
            self.buffer.extend_from_slice(b"}\n");
        }
    }

    /// Events lost since the daemon started, because they could not be written.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// Why nothing is written at present although a journal is wanted.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_ref().map(|(why, _)| why.as_str())
    }

    /// Hands all lines so far to the kernel.
    pub(crate) fn flush(&mut self, now: Timestamp) {
        if self.buffer.is_empty() {
            return;
        }
        self.close_line("");
        let max_file = self.config.as_ref().map_or(0, |config| config.max_file.0);
        let full = |segment: &Segment| segment.length + self.buffer.len() as u64 > max_file;
        if self.segment.as_ref().is_some_and(full) {
            self.open(now);
        }
        let written = self.segment.as_mut().map(|segment| segment.write(now, &self.buffer, self.buffered));
        if let Some(Err((error, lost))) = written {
            self.lose(lost);
            self.fail(now, &error);
        }
        if self.segment.is_none() {
            self.lose(self.buffered);
        }
        self.buffer.clear();
        (self.buffered, self.last) = (0, 0);
    }

    /// The daemon stops.
    pub(crate) fn finish(&mut self, now: Timestamp) {
        self.write_omitted(now);
        self.flush(now);
    }

    fn write_omitted(&mut self, now: Timestamp) {
        if self.omitted > 0 && self.segment.is_some() {
            self.line(&OmittedLine { now_ns: now, omitted: self.omitted });
            self.omitted = 0;
        }
    }

    fn line(&mut self, line: &impl Serialize) {
        if self.segment.is_some() {
            // Writing to a Vec cannot fail, nor do these types fail to serialise.
            let _ = serde_json::to_writer(&mut self.buffer, line);
            self.buffer.push(b'\n');
        }
    }

    fn lose(&mut self, events: u64) {
        self.lost += events;
        self.header.lost += events;
        if self.header.lost > 0 {
            // After a loss no segment counts as a run's beginning.
            self.header.segment = self.header.segment.max(1);
        }
    }

    /// Opens the next segment.
    fn open(&mut self, now: Timestamp) {
        self.segment = None;
        let Some(config) = &self.config else { return };
        let opened = fs::create_dir_all(&config.dir).and_then(|()| {
            let run = self.run.map_or_else(|| next_run(&config.dir), Ok)?;
            let segment = Segment::create(now, &config.dir, run, &self.header)?;
            delete_old(config, &segment.path);
            Ok((run, segment))
        });
        match opened {
            Err(error) => self.fail(now, &error),
            Ok((run, segment)) => {
                if self.failure.take().is_some() {
                    tracing::info!(file = %segment.path.display(), lost = self.lost, "the journal is written again");
                }
                (self.run, self.segment) = (Some(run), Some(segment));
                self.header.segment += 1;
                self.header.lost = 0;
            }
        }
    }

    fn fail(&mut self, now: Timestamp, error: &io::Error) {
        let dir = self.config.as_ref().map(|config| config.dir.display().to_string()).unwrap_or_default();
        if self.failure.is_none() {
            tracing::error!(%error, dir, retry = %RETRY, "the journal cannot be written: events are lost");
        }
        self.failure = Some((format!("{dir}: {error}"), now.saturating_add(RETRY)));
        // Another daemon's file may have the next name.
        (self.segment, self.run) = (None, None);
    }
}

/// After a panic the event that caused it is in the journal.
impl Drop for Journal {
    fn drop(&mut self) {
        self.flush(Timestamp::ZERO);
    }
}

/// Keeps the newest files and `live`. Old runs count too, so that restarts cannot fill the disk.
fn delete_old(config: &JournalConfig, live: &Path) {
    let mut files = segments(&config.dir).unwrap_or_default();
    files.truncate(files.len().saturating_sub(config.keep_files));
    for file in files.iter().filter(|file| *file != live) {
        if let Err(error) = fs::remove_file(file) {
            tracing::warn!(%error, file = %file.display(), "cannot delete an old journal file");
        }
    }
}

impl Segment {
    fn create(now: Timestamp, dir: &Path, run: u64, header: &Header) -> io::Result<Self> {
        let path = dir.join(file_name(run, header.segment));
        // Names and processes of tenants are in it: for the daemon's user only.
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        let mut segment = Self { file, path, length: 0, look_at: now.saturating_add(LOOK), unseen: 0 };
        let mut line = serde_json::to_vec(header)?;
        line.push(b'\n');
        if let Err(error) = segment.append(&line) {
            // On a full disk each attempt would leave an empty file.
            let _ = fs::remove_file(&segment.path);
            return Err(error);
        }
        Ok(segment)
    }

    /// Writes lines of some events; an error says how many events before these are lost with it.
    fn write(&mut self, now: Timestamp, bytes: &[u8], events: u64) -> Result<(), (io::Error, u64)> {
        if now >= self.look_at {
            if !self.is_there() {
                let what =
                    format!("{}: the file was removed or replaced while it was written", self.path.display());
                return Err((io::Error::new(io::ErrorKind::NotFound, what), self.unseen));
            }
            (self.look_at, self.unseen) = (now.saturating_add(LOOK), 0);
        }
        self.append(bytes).map_err(|error| (error, 0))?;
        self.unseen += events;
        Ok(())
    }

    /// Whether its name still leads to the file that is written.
    fn is_there(&self) -> bool {
        let of = |file: fs::Metadata| (file.dev(), file.ino());
        let (named, own) = (fs::metadata(&self.path).map(of), self.file.metadata().map(of));
        named.is_ok_and(|named| own.is_ok_and(|own| own == named))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }
}

/// One more than the largest run in a directory.
fn next_run(dir: &Path) -> io::Result<u64> {
    let mut last = 0;
    for entry in fs::read_dir(dir)? {
        if let Some((run, _)) = entry?.file_name().to_str().and_then(number_of) {
            last = last.max(run);
        }
    }
    Ok(last + 1)
}

/// The journal files of a directory, oldest first. Files with names that no daemon gives are not among them.
pub fn segments(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if let Some(number) = entry.file_name().to_str().and_then(number_of) {
            files.push((number, entry.path()));
        }
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

fn file_name(run: u64, segment: u32) -> String {
    format!("{run:020}-{segment:06}.jsonl")
}

/// Run and segment of a file by its name.
fn number_of(name: &str) -> Option<(u64, u32)> {
    let (run, segment) = name.strip_suffix(".jsonl")?.split_once('-')?;
    let number = (run.parse().ok()?, segment.parse().ok()?);
    (number.0 < RUNS && file_name(number.0, number.1) == name).then_some(number)
}

/// Reads a journal file up to its end, or to the line that the daemon's death cut short.
pub fn read(path: &Path) -> io::Result<impl Iterator<Item = io::Result<Line>>> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut text = Vec::new();
    Ok(std::iter::from_fn(move || {
        text.clear();
        match reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut text) {
            Err(error) => Some(Err(error)),
            Ok(_) if text.len() as u64 == LONGEST_LINE => {
                let what = format!("a line of {} and more, which no daemon writes", Bytes(LONGEST_LINE));
                Some(Err(io::Error::new(io::ErrorKind::InvalidData, what)))
            }
            Ok(_) if text.last() != Some(&b'\n') || text.first() == Some(&0) => None,
            Ok(_) => Some(serde_json::from_slice(&text).map_err(io::Error::from)),
        }
    }))
}

#[cfg(test)]
mod tests;
