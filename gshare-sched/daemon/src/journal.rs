//! The journal: each event of the node, written down before the daemon sends the resulting frames.
//!
//! # Problem
//! An operator asks afterwards why a client waited, so each wait, denial and refusal has a line of its own. The node is pure: a
//! [`Replay`] of its configuration and its timed events reproduces every other decision. History must survive a clock that is set
//! back, a client that sends nonsense, a tool that truncates the file and a full disk, and none of these may end the daemon.
//!
//! # Format
//! JSON lines in files `<run>-<segment>.jsonl` of one directory. Frames are the hexadecimal digits of their wire encoding.
//!
//! ```text
//! {"journal":3,"epoch":1763634000,"segment":0,"engine":{…},"node":{…}}      first line of a segment
//! {"now_ns":17,"event":{"event":"received",…,"frame":"0203…"},"outcome":9}  an event, and the digest of the node's actions
//! {"now_ns":17,"actions":[{"action":"send",…}]}                             all actions, if they are recorded
//! {"now_ns":17,"omitted":120}                                               number of unwritten events without effect
//! {"now_ns":17,"why":{"name":"alice","reason":"limit",…}}                   a wait that begins or ends, a denial, a refusal
//! ```
//! A refused event has `"refused":true` in place of an outcome. Version 1 had the events of the token engine only.
//!
//! # Rules
//! 1. At its start, the daemon takes as its `run` the largest run in the directory plus one. No clock takes part, so new files
//!    always sort after the old files, and the names tell which files are the oldest and can be deleted.
//! 2. A replay does not need events that were refused or had no effect. Each of them uses up a credit: the journal starts with
//!    `CREDIT` credits, its maximum, and earns one per `CREDIT` other events. Without a credit, events are counted instead of
//!    written. Example: 100,000 stale reports in a row leave 64 event lines and one line with `"omitted":99936`.
//! 3. A failed write (a full disk) stops the journal, not the daemon. The first event after `RETRY` opens a new segment, and `lost`
//!    in its header counts the events missing before it. Writes to a removed or replaced file succeed, so the journal looks the
//!    name up every `LOOK`; if the file is gone, the events since the last look count as lost.
//! 4. A line is shorter than `LONGEST_LINE` bytes, and a reader refuses a longer line before it has read all of it. No daemon
//!    gives a file a run of `RUNS` or more, so such files are left alone.
//!
//! # Guarantee
//! The kernel has the lines of an event before the first resulting frame is sent. From then on they survive the daemon's death by
//! any signal, since the page cache belongs to the kernel. They do **not** survive a kernel crash or a power loss before writeback:
//! nothing calls `fsync`. A death during a write leaves a line without its newline, and readers stop there. Files are opened for
//! appending, so after a truncation by another process the next line is at the new end.
//!
//! # Cost
//! An event takes some 200 bytes, and all events of one received frame take one `write`. After a full segment the journal opens
//! the next and deletes the oldest files beyond `keep_files`.

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

/// Credits at the start, and accepted events per further credit. Each event without effect, or refused event, costs a credit.
const CREDIT: u32 = 64;
/// Pause between a failed write and the next attempt.
const RETRY: Duration = Duration::from_millis(5_000);
/// Period of the check for the journal file's name.
const LOOK: Duration = Duration::from_millis(1_000);
/// Bound on a line's bytes. A header names each client of the configuration, and an event is one frame.
const LONGEST_LINE: u64 = 16 << 20;
/// Bound on a daemon's run number. A daemon that starts a thousand times a second reaches it after a million years.
const RUNS: u64 = 1 << 55;

/// First line of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format: [`VERSION`].
    pub journal: u32,
    /// Number of the daemon's run.
    pub epoch: u64,
    /// Number of this file within the run, from 0. A run without a file 0 has lost its beginning.
    pub segment: u32,
    /// Events missing between the previous file and this file because a write failed.
    #[serde(default)]
    pub lost: u64,
    /// Configuration of the token engine, so that a replay can build the same engine; null for the host's own engine.
    pub engine: serde_json::Value,
    /// Configuration of the node when the run began.
    #[serde(default)]
    pub node: serde_json::Value,
}

/// Version of the format that this program writes and reads.
pub const VERSION: u32 = 3;

/// One line of a journal file. The parts missing in the line are `None`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Line {
    /// Time of the event, in ns of the daemon's clock.
    #[serde(default)]
    pub now_ns: Option<u64>,
    /// The event, for [`Line::event`] to parse.
    #[serde(default, rename = "event")]
    raw: Option<serde_json::Value>,
    /// Digest of the node's actions on the event; `None` if the event was refused or the daemon died over it.
    #[serde(default)]
    pub outcome: Option<u64>,
    /// Whether the node refused the event.
    #[serde(default)]
    pub refused: bool,
    /// The node's actions on an event, serialised.
    #[serde(default)]
    pub actions: Option<Vec<serde_json::Value>>,
    /// Events without effect left out since the last line of this kind.
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
    /// Present in a header: events missing before this file.
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
    /// The event; `None` if the line has no event.
    ///
    /// # Errors
    /// The event is unknown to this version.
    pub fn event(&self) -> Result<Option<NodeEvent>, serde_json::Error> {
        self.raw.as_ref().map(NodeEvent::deserialize).transpose()
    }

    /// The token engine's events and orders among the recorded actions, in their order.
    pub fn tokens(&self) -> impl Iterator<Item = TokenStep> + '_ {
        let step = |action| TokenStep::deserialize(action).ok();
        self.actions.iter().flatten().filter_map(step)
    }
}

/// An event taken by the token engine, or an order of the engine, among the recorded actions.
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
        /// The order of the token scheduler.
        order: TokenAction,
    },
}

/// FNV-1a digest of a node's actions on an event: frames, ends of connections and answers, in their order.
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
    /// `None` if no journal is configured.
    config: Option<JournalConfig>,
    /// Header of the next segment.
    header: Header,
    /// The run in the names of this journal's files, once the directory could be read.
    run: Option<u64>,
    segment: Option<Segment>,
    /// The error that stopped the journal, and the time of the next attempt.
    failure: Option<(String, Timestamp)>,
    /// Lines for the next `write`, and their number of events.
    buffer: Vec<u8>,
    buffered: u64,
    /// Start of the last event in the buffer, and whether its line still lacks its end.
    last: usize,
    open: bool,
    /// Events without effect that may still be written, and accepted events counted towards the next credit.
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
    /// Time of the next look at the file's name, and the events written since the last look.
    look_at: Timestamp,
    unseen: u64,
}

impl Journal {
    /// A journal that writes no event and counts no event as lost.
    pub(crate) fn off() -> Self {
        Self::new(None, 0, serde_json::Value::Null, serde_json::Value::Null)
    }

    /// Begins the journal of one run of the daemon. If the start fails, [`failure`](Self::failure) has the error.
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

    /// Begins the line of an event before the node handles it. [`handled`](Self::handled) or [`refused`](Self::refused) ends the line.
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
        // Cuts off the closing brace and the newline.
        self.buffer.truncate(self.buffer.len().saturating_sub(2));
        self.open = true;
    }

    /// Ends the line of the last event, which the node has refused.
    pub(crate) fn refused(&mut self, now: Timestamp) {
        self.without_effect(now, ",\"refused\":true");
    }

    /// Ends the line of an event without effect, or counts the event if no credit is left: a replay does not need it.
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

    /// Ends the line of the last event, which the node has handled with these actions.
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

    /// Adds a wait that begins or ends, a denial or a refusal, after the causing event.
    pub(crate) fn finding(&mut self, now: Timestamp, why: &Finding) {
        self.line(&FindingLine { now_ns: now, why });
    }

    /// Ends the line of an event, if it is open.
    fn close_line(&mut self, end: &str) {
        if std::mem::take(&mut self.open) {
            self.buffer.extend_from_slice(end.as_bytes());
            self.buffer.extend_from_slice(b"}\n");
        }
    }

    /// Events lost to failed writes since the daemon started.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    /// The error that keeps a configured journal from being written at present.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.as_ref().map(|(why, _)| why.as_str())
    }

    /// Hands all buffered lines to the kernel.
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

    /// Writes the last lines before the daemon stops.
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
            // Writing to a Vec cannot fail, and these types always serialise.
            let _ = serde_json::to_writer(&mut self.buffer, line);
            self.buffer.push(b'\n');
        }
    }

    fn lose(&mut self, events: u64) {
        self.lost += events;
        self.header.lost += events;
        if self.header.lost > 0 {
            // After a loss, no segment counts as the beginning of a run.
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
        // Another daemon may have taken the next name meanwhile, so the retry takes a new run.
        (self.segment, self.run) = (None, None);
    }
}

/// The drop writes the buffered lines, so after a panic the journal has the causing event.
impl Drop for Journal {
    fn drop(&mut self) {
        self.flush(Timestamp::ZERO);
    }
}

/// Keeps the newest `keep_files` files and `live`. Files of old runs count too, so restarts cannot fill the disk.
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
        // The file holds names and processes of tenants, so only the daemon's user may read it.
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        let mut segment = Self { file, path, length: 0, look_at: now.saturating_add(LOOK), unseen: 0 };
        let mut line = serde_json::to_vec(header)?;
        line.push(b'\n');
        if let Err(error) = segment.append(&line) {
            // Otherwise each attempt on a full disk would leave an empty file.
            let _ = fs::remove_file(&segment.path);
            return Err(error);
        }
        Ok(segment)
    }

    /// Writes the lines of some events. An error comes with the number of earlier events lost with the file.
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

    /// Whether the segment's name still leads to its open file.
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

/// The largest run in a directory plus one.
fn next_run(dir: &Path) -> io::Result<u64> {
    let mut last = 0;
    for entry in fs::read_dir(dir)? {
        if let Some((run, _)) = entry?.file_name().to_str().and_then(number_of) {
            last = last.max(run);
        }
    }
    Ok(last + 1)
}

/// The journal files of a directory, oldest first. Files with other names are left out.
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

/// The run and the segment in a file's name.
fn number_of(name: &str) -> Option<(u64, u32)> {
    let (run, segment) = name.strip_suffix(".jsonl")?.split_once('-')?;
    let number = (run.parse().ok()?, segment.parse().ok()?);
    (number.0 < RUNS && file_name(number.0, number.1) == name).then_some(number)
}

/// Reads a journal file up to its end, or up to the line cut short by the daemon's death.
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
