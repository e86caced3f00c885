//! The journal: every event of the token engine, written down before it is acted on.
//!
//! # Problem
//! Afterwards one wants to know why a client waited. The engine is pure, so its events and their times are the whole
//! answer: replaying them gives every decision again. But a `write` per event would cost as much as the event.
//!
//! # Format
//! JSON lines in files `<epoch>-<segment>.jsonl` of one directory; the epoch numbers the run of the daemon.
//!
//! ```text
//! {"journal":1,"epoch":1763634000,"segment":0,"engine":{…}}          first line of a segment
//! {"now_ns":17,"event":{"event":"client_joined",…}}                  an event, before the engine sees it
//! {"now_ns":17,"actions":[{"action":"grant",…}]}                     its orders, if they are recorded
//! {"now_ns":17,"note":{"client":0,"name":"alice","pid":77}}          for people
//! ```
//! A reader passes over the lines it does not need, so a journal is also input for `gshare engine token`.
//!
//! # Guarantee
//! The file is mapped, and a line is in the mapping before the event is handled. From then on it survives the death
//! of the daemon by any signal: the page cache belongs to the kernel. It does **not** survive a crash of the kernel
//! or a loss of power before the kernel has written the pages back; nothing calls `fsync`. A kill in the middle of a
//! line leaves a line without its newline, and zero bytes up to the end of the last chunk: readers stop there.
//!
//! # Cost
//! About a hundred bytes and no system call per event; once per [`CHUNK`] the next chunk is allocated and mapped. One
//! chunk is mapped at a time, so the journal adds 1 MiB to the daemon at most. When a segment is full the next one is
//! begun and the oldest beyond `keep_files` is deleted. Blocks are allocated before they are mapped, so a full disk is
//! an error here and not a signal; the journal then stops, the daemon goes on, and both say so.
#![allow(unsafe_code, reason = "a file mapping is the way to write without a system call")]

use crate::config::{JournalConfig, TokenPolicy};
use gshare_core::{Timestamp, TokenAction, TokenEvent};
use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes mapped at a time.
pub const CHUNK: u64 = 1 << 20;

/// First line of a segment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// Version of the format: 1.
    pub journal: u32,
    /// Number of the daemon's run.
    pub epoch: u64,
    /// Number of this file within the run, from 0.
    pub segment: u32,
    /// Policy of the engine.
    #[serde(default)]
    pub policy: TokenPolicy,
    /// Configuration of the engine, to build the same one for a replay; null for one of the host's own.
    pub engine: serde_json::Value,
}

/// Who a client is, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The client.
    pub client: gshare_core::ClientId,
    /// Name of its instance.
    pub name: String,
    /// Its process.
    pub pid: i32,
}

/// One line, as it is read back. What a line does not have is `None`.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Line {
    /// When.
    #[serde(default)]
    pub now_ns: Option<u64>,
    /// The event.
    #[serde(default)]
    pub event: Option<TokenEvent>,
    /// The orders that the event led to.
    #[serde(default)]
    pub actions: Option<Vec<TokenAction>>,
    /// Who a client is.
    #[serde(default)]
    pub note: Option<Note>,
    /// Present in a header.
    #[serde(default)]
    pub journal: Option<u32>,
    /// Present in a header.
    #[serde(default)]
    pub epoch: Option<u64>,
    /// Present in a header.
    #[serde(default)]
    pub segment: Option<u32>,
    /// Present in a header.
    #[serde(default)]
    pub policy: TokenPolicy,
    /// Present in a header.
    #[serde(default)]
    pub engine: Option<serde_json::Value>,
}

#[derive(Serialize)]
struct EventLine<'a> {
    now_ns: Timestamp,
    event: &'a TokenEvent,
}

#[derive(Serialize)]
struct ActionsLine<'a> {
    now_ns: Timestamp,
    actions: &'a [TokenAction],
}

#[derive(Serialize)]
struct NoteLine<'a> {
    now_ns: Timestamp,
    note: &'a Note,
}

/// Where the daemon writes its events. Errors stop the journal, not the daemon.
#[derive(Debug)]
pub(crate) struct Journal {
    target: Option<Target>,
    scratch: Vec<u8>,
    actions: bool,
    /// Lines that were not written since the journal stopped.
    lost: u64,
}

#[derive(Debug)]
struct Target {
    dir: PathBuf,
    header: Header,
    max_file: u64,
    keep_files: usize,
    segment: Segment,
}

#[derive(Debug)]
struct Segment {
    file: File,
    map: MmapMut,
    /// Where in the file the mapping begins.
    base: u64,
    /// Where in the mapping the next byte goes.
    at: usize,
}

impl Journal {
    /// No journal: nothing is written, nothing is lost.
    pub(crate) fn off() -> Self {
        Self { target: None, scratch: Vec::new(), actions: false, lost: 0 }
    }

    /// Begins the journal of one run of the daemon.
    pub(crate) fn create(
        config: &JournalConfig,
        epoch: u64,
        policy: TokenPolicy,
        engine: serde_json::Value,
    ) -> io::Result<Self> {
        fs::create_dir_all(&config.dir)?;
        let header = Header { journal: 1, epoch, segment: 0, policy, engine };
        let segment = Segment::create(&config.dir, &header)?;
        let target = Target {
            dir: config.dir.clone(),
            header,
            max_file: config.max_file.0,
            keep_files: config.keep_files,
            segment,
        };
        target.delete_old();
        Ok(Self { target: Some(target), scratch: Vec::with_capacity(256), actions: config.actions, lost: 0 })
    }

    pub(crate) fn event(&mut self, now: Timestamp, event: &TokenEvent) {
        self.line(&EventLine { now_ns: now, event });
    }

    pub(crate) fn actions(&mut self, now: Timestamp, actions: &[TokenAction]) {
        if self.actions {
            self.line(&ActionsLine { now_ns: now, actions });
        }
    }

    pub(crate) fn note(&mut self, now: Timestamp, note: &Note) {
        self.line(&NoteLine { now_ns: now, note });
    }

    /// Lines lost since the journal stopped; 0 while it is well, or was never wanted.
    pub(crate) fn lost(&self) -> u64 {
        self.lost
    }

    fn line(&mut self, line: &impl Serialize) {
        let Some(target) = &mut self.target else {
            self.lost += u64::from(self.lost > 0);
            return;
        };
        self.scratch.clear();
        let written =
            serde_json::to_writer(&mut self.scratch, line).map_err(io::Error::from).and_then(|()| {
                self.scratch.push(b'\n');
                target.append(&self.scratch)
            });
        if let Err(error) = written {
            tracing::error!(%error, dir = %target.dir.display(), "the journal stops here");
            self.target = None;
            self.lost = 1;
        }
    }

    /// Cuts the file to its length. What is not finished stays readable too.
    pub(crate) fn finish(&mut self) {
        if let Some(target) = self.target.take() {
            target.segment.finish();
        }
    }
}

impl Target {
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let length = self.segment.base + self.segment.at as u64;
        if length + line.len() as u64 > self.max_file {
            self.header.segment += 1;
            let next = Segment::create(&self.dir, &self.header)?;
            std::mem::replace(&mut self.segment, next).finish();
            self.delete_old();
        }
        self.segment.append(line)
    }

    /// Keeps the newest files. Old runs count too, so that restarts cannot fill the disk.
    fn delete_old(&self) {
        let mut files = segments(&self.dir).unwrap_or_default();
        files.truncate(files.len().saturating_sub(self.keep_files));
        for file in files {
            if let Err(error) = fs::remove_file(&file) {
                tracing::warn!(%error, file = %file.display(), "cannot delete an old journal file");
            }
        }
    }
}

impl Segment {
    fn create(dir: &Path, header: &Header) -> io::Result<Self> {
        let path = dir.join(file_name(header.epoch, header.segment));
        // Names and processes of tenants are in it: for the daemon's user only.
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        let map = map_chunk(&file, 0)?;
        let mut segment = Self { file, map, base: 0, at: 0 };
        let mut line = serde_json::to_vec(header)?;
        line.push(b'\n');
        segment.append(&line)?;
        Ok(segment)
    }

    fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            let mut room = &mut self.map[self.at..];
            let written = room.write(bytes)?;
            self.at += written;
            bytes = &bytes[written..];
            if bytes.is_empty() {
                return Ok(());
            }
            self.base += CHUNK;
            self.at = 0;
            self.map = map_chunk(&self.file, self.base)?;
        }
    }

    fn finish(self) {
        let length = self.base + self.at as u64;
        drop(self.map);
        if let Err(error) = self.file.set_len(length) {
            tracing::warn!(%error, "cannot cut a journal file to its length");
        }
    }
}

fn map_chunk(file: &File, base: u64) -> io::Result<MmapMut> {
    // Allocated, not only extended: a page without a block behind it would be a SIGBUS on a full disk.
    match rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::empty(), base, CHUNK)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            file.write_all_at(&vec![0; usize::try_from(CHUNK).unwrap_or(0)], base)?;
        }
        other => other?,
    }
    let mut options = MmapOptions::new();
    options.offset(base).len(usize::try_from(CHUNK).map_err(io::Error::other)?);
    // SAFETY: the daemon made this file for itself alone (mode 0600, named by its epoch) and nothing of it is read
    // through the mapping, so that others' changes cannot break a reference's promise.
    let map = unsafe { options.map_mut(file)? };
    // Faults all pages in now rather than one in every forty events; where that is not supported, it is later.
    let _ = map.advise(memmap2::Advice::PopulateWrite);
    Ok(map)
}

/// The journal files of a directory, oldest first. What has another name than a daemon gives is none.
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

fn file_name(epoch: u64, segment: u32) -> String {
    format!("{epoch:020}-{segment:06}.jsonl")
}

/// Epoch and segment of a file by its name.
fn number_of(name: &str) -> Option<(u64, u32)> {
    let (epoch, segment) = name.strip_suffix(".jsonl")?.split_once('-')?;
    let number = (epoch.parse().ok()?, segment.parse().ok()?);
    (file_name(number.0, number.1) == name).then_some(number)
}

/// Reads a journal file up to its end, or to the line that the daemon's death cut short.
pub fn read(path: &Path) -> io::Result<impl Iterator<Item = io::Result<Line>>> {
    let mut reader = BufReader::new(File::open(path)?);
    let mut text = Vec::new();
    Ok(std::iter::from_fn(move || {
        text.clear();
        match reader.read_until(b'\n', &mut text) {
            Err(error) => Some(Err(error)),
            Ok(_) if text.last() != Some(&b'\n') || text.first() == Some(&0) => None,
            Ok(_) => Some(serde_json::from_slice(&text).map_err(io::Error::from)),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Bytes, ClientId};

    fn config(dir: &Path, max_file: u64, keep_files: usize) -> JournalConfig {
        JournalConfig { dir: dir.to_owned(), max_file: Bytes(max_file), keep_files, actions: true }
    }

    fn asked(n: u32) -> TokenEvent {
        TokenEvent::TokenRequested { client: ClientId::new(n, 0) }
    }

    #[test]
    fn what_was_written_is_there_without_a_finish_and_across_chunks() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::create(
            &config(dir.path(), 1 << 30, 4),
            7,
            TokenPolicy::default(),
            serde_json::json!({}),
        )
        .unwrap();
        let count = 30_000u32;
        for n in 0..count {
            journal.event(Timestamp::from_nanos(u64::from(n)), &asked(n));
        }
        // As a kill would leave it: no finish, no drop.
        std::mem::forget(journal);
        let files = segments(dir.path()).unwrap();
        assert!(fs::metadata(&files[0]).unwrap().len() > CHUNK);
        let lines: Vec<Line> = read(&files[0]).unwrap().map(Result::unwrap).collect();
        assert_eq!(lines[0].epoch, Some(7));
        let events: Vec<_> = lines.iter().filter_map(|line| line.event).collect();
        assert!(events.iter().copied().eq((0..count).map(asked)));
    }

    #[test]
    fn a_line_cut_short_ends_the_journal_quietly() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.jsonl");
        fs::write(&path, b"{\"now_ns\":1}\n{\"now_ns\":2}\n{\"now_n\0\0\0\0").unwrap();
        let times: Vec<_> = read(&path).unwrap().map(|line| line.unwrap().now_ns).collect();
        assert_eq!(times, [Some(1), Some(2)]);
    }

    #[test]
    fn a_full_segment_is_followed_by_the_next_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal =
            Journal::create(&config(dir.path(), 4096, 3), 7, TokenPolicy::default(), serde_json::json!({}))
                .unwrap();
        for n in 0..1000 {
            journal.event(Timestamp::from_nanos(u64::from(n)), &asked(n));
        }
        journal.finish();
        let files = segments(dir.path()).unwrap();
        assert_eq!(files.len(), 3);
        let numbers: Vec<_> =
            files.iter().map(|file| read(file).unwrap().next().unwrap().unwrap().segment.unwrap()).collect();
        assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
        assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= 4096), "cut to length");
        let last = read(&files[2]).unwrap().last().unwrap().unwrap();
        assert_eq!(last.event, Some(asked(999)));
    }

    #[test]
    fn only_files_of_its_own_are_deleted() {
        let dir = tempfile::tempdir().unwrap();
        let others =
            ["0.jsonl", "notes.jsonl", "1-000001.jsonl", "00000000000000000001-1.jsonl", "x-000001.jsonl"];
        for name in others {
            fs::write(dir.path().join(name), "mine").unwrap();
        }
        for epoch in 1..=4 {
            let config = config(dir.path(), 4096, 2);
            let journal = Journal::create(&config, epoch, TokenPolicy::default(), serde_json::json!({}));
            journal.unwrap().finish();
        }
        assert!(others.iter().all(|name| dir.path().join(name).exists()));
        let names = [3, 4].map(|epoch| dir.path().join(file_name(epoch, 0)));
        assert_eq!(segments(dir.path()).unwrap(), names);
        assert!(number_of(&file_name(7, 1_000_000)) > number_of(&file_name(7, 999_999)));
    }

    #[test]
    fn a_journal_that_cannot_be_written_counts_what_it_loses() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal =
            Journal::create(&config(dir.path(), 4096, 3), 7, TokenPolicy::default(), serde_json::json!({}))
                .unwrap();
        // A directory that is gone cannot take the next segment.
        fs::remove_dir_all(dir.path()).unwrap();
        for n in 0..1000 {
            journal.event(Timestamp::from_nanos(u64::from(n)), &asked(n));
        }
        assert!(journal.lost() > 900);
    }
}
