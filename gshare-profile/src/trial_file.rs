//! Trials in one file of JSON lines, from which a killed run continues.
//!
//! One file holds any number of **profiles**, each a name with a **context**: the profiled function, and how it was run (the command, the
//! device, the load). Trials of another context are of no use, so a name with another context is refused. A trial is one line, on disk
//! before [`Sink::keep`] returns. Two runs may share a file, which is locked while it is read or written; a setting is unique in its
//! profile. A kill can leave a line without its end. This line counts for nothing, and the next trial takes its place.

use crate::planner::{Journal, JournalError, Trial};
use crate::record::{Record, Sink};
use gshare_core::profile::{ProfileError, ProfileTable};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::Path;

/// Each line begins so. The end of another program's file is not taken for half a trial.
const BEGIN: &[u8] = b"{\"profile\":";

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The file cannot be opened, read or written.
    #[error("profile store: {0}")]
    Io(#[from] io::Error),
    /// A line is no trial: the file is of another program, or was changed from outside.
    #[error("profile store, line {line}: {what}")]
    Line {
        /// Which line, from 1.
        line: usize,
        /// The fault in the line.
        what: String,
    },
    /// The profile exists with another context.
    #[error("profile `{name}` is of something else: stored `{stored}`, now `{given}`; choose another name")]
    OtherContext {
        /// Its name.
        name: String,
        /// The context in the file.
        stored: String,
        /// The context given.
        given: String,
    },
    /// Two trials of one setting.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// One profile in a file. See the [module](self).
#[derive(Debug)]
pub struct Store {
    file: File,
    name: String,
    context: String,
}

/// A line of the file. Its first field is [`BEGIN`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    profile: String,
    context: String,
    record: Record,
}

impl Store {
    /// Opens a file, made if need be, at a profile.
    pub fn open(path: &Path, name: &str, context: &str) -> Result<Self, StoreError> {
        let file = File::options().read(true).append(true).create(true).open(path)?;
        let store = Self { file, name: name.to_owned(), context: context.to_owned() };
        store.records()?;
        Ok(store)
    }

    /// The profile's trials in the order in which they were kept.
    pub fn records(&self) -> Result<Vec<Record>, StoreError> {
        self.file.lock_shared()?;
        let read = self.read();
        self.file.unlock()?;
        Ok(read?.0)
    }

    /// The same, as a planner reads them.
    pub fn journal(&self) -> Result<Journal, StoreError> {
        journal(&self.records()?)
    }

    /// The profile's trials, and the length of the complete lines.
    fn read(&self) -> Result<(Vec<Record>, usize), StoreError> {
        let (mut file, mut text) = (&self.file, Vec::new());
        file.rewind()?;
        file.read_to_end(&mut text)?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let mut records = Vec::new();
        for (number, line) in text[..whole].split_inclusive(|&byte| byte == b'\n').enumerate() {
            let bad = |what: String| StoreError::Line { line: number + 1, what };
            let Line { profile, context, record } =
                serde_json::from_slice(line).map_err(|error| bad(error.to_string()))?;
            check(&record).map_err(|error| bad(error.to_string()))?;
            if profile != self.name {
                continue;
            }
            if context != self.context {
                let (name, given) = (profile, self.context.clone());
                return Err(StoreError::OtherContext { name, stored: context, given });
            }
            records.push(record);
        }
        let rest = &text[whole..];
        if !BEGIN.iter().zip(rest).all(|(ours, theirs)| ours == theirs) {
            let line = text[..whole].iter().filter(|&&byte| byte == b'\n').count() + 1;
            return Err(StoreError::Line {
                line,
                what: "neither a trial nor the beginning of one".to_owned(),
            });
        }
        Ok((records, whole))
    }

    fn append(&mut self, record: &Record) -> Result<(), StoreError> {
        let (records, whole) = self.read()?;
        journal(&records)?.add(record.trial.clone())?;
        let (profile, context) = (self.name.clone(), self.context.clone());
        let line = Line { profile, context, record: record.clone() };
        let mut line = serde_json::to_vec(&line).map_err(io::Error::from)?;
        line.push(b'\n');
        self.file.set_len(whole as u64)?;
        self.file.write_all(&line)?;
        Ok(self.file.sync_all()?)
    }
}

fn journal(records: &[Record]) -> Result<Journal, StoreError> {
    let trials: Vec<Trial> = records.iter().map(|record| record.trial.clone()).collect();
    Ok(Journal::try_from(trials)?)
}

/// A point of a file is held to the bounds of a measured one.
fn check(record: &Record) -> Result<(), ProfileError> {
    record
        .measured
        .map_or(Ok(()), |measured| ProfileTable::sparse(vec![measured.measurement.point]).map(drop))
}

impl Sink for Store {
    fn keep(&mut self, record: &Record) -> Result<(), Box<dyn core::error::Error + Send + Sync>> {
        self.file.lock()?;
        let kept = self.append(record);
        self.file.unlock()?;
        Ok(kept?)
    }
}
