//! Trials in one SQLite file, so that a run that was killed goes on where it was.
//!
//! One file holds any number of **profiles**, each a name with a **context**: what was profiled, and how (the command, the
//! device, the load). Trials of another context are of no use, so a name with another context is refused. A trial is one row
//! in a transaction of its own, on disk before [`Sink::keep`] returns; its setting is unique in its profile, so that none is
//! ever there twice, even when two runs share a file.
//!
//! Shares are in basis points, times in ns, throughputs in thousandths of a request per second.

use crate::meter::Utilisation;
use crate::planner::{Journal, JournalError, Measurement, Outcome, Trial};
use crate::run::{Record, Sink};
use crate::stats::{Confidence, Interval};
use crate::trial::Measured;
use gshare_core::profile::{ProfileError, ProfilePoint, RequestRate, Setting};
use gshare_core::{Bytes, Duration, Quota, SmShare};
use rusqlite::{Connection, OptionalExtension as _, Row, params};
use std::path::Path;

/// Marks the file as ours: "gshP".
const APPLICATION: i64 = 0x6773_6850;
const VERSION: i64 = 2;

/// Columns that version 2 has beyond version 1.
const UTILISATION: [&str; 4] =
    ["busy_percent REAL", "sm_percent REAL", "occupancy_percent REAL", "memory_bytes INTEGER"];

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// SQLite said no: no such folder, no SQLite file, no room, another process for too long.
    #[error("profile store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A SQLite file of another program, or of a later version of this one.
    #[error("not a profile store of version {VERSION}: application {application:#x}, version {version}")]
    Foreign {
        /// Its application id.
        application: i64,
        /// Its version.
        version: i64,
    },
    /// The profile is there, of something else.
    #[error("profile `{name}` is of something else: stored `{stored}`, now `{given}`; choose another name")]
    OtherContext {
        /// Its name.
        name: String,
        /// The context in the file.
        stored: String,
        /// The context given.
        given: String,
    },
    /// A row that cannot be: the file was changed from outside.
    #[error("profile `{name}`, trial {number}: {what}")]
    Row {
        /// The profile.
        name: String,
        /// Which trial.
        number: i64,
        /// The fault that was found in it.
        what: String,
    },
    /// Two trials of one setting: the file was changed from outside.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// One profile in a file. See the [module](self).
#[derive(Debug)]
pub struct Store {
    file: Connection,
    name: String,
}

impl Store {
    /// Opens a file, made if need be, at a profile, made if need be.
    pub fn open(path: &Path, name: &str, context: &str) -> Result<Self, StoreError> {
        let file = Connection::open(path)?;
        file.busy_timeout(core::time::Duration::from_secs(5))?;
        let pragma = |key: &str| file.pragma_query_value(None, key, |row| row.get::<_, i64>(0));
        let (application, version, tables) = (pragma("application_id")?, pragma("user_version")?, {
            file.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get::<_, i64>(0))?
        });
        let ours = application == APPLICATION && (1..=VERSION).contains(&version);
        if !ours && (application, version, tables) != (0, 0, 0) {
            return Err(StoreError::Foreign { application, version });
        }
        // Full: on disk, not only with the kernel, when a trial is said to be kept.
        // One transaction makes it ours: a kill leaves an empty file or a whole one.
        file.execute_batch(&format!(
            "PRAGMA synchronous = FULL;
             PRAGMA foreign_keys = ON;
             BEGIN IMMEDIATE;
             CREATE TABLE IF NOT EXISTS profile (name TEXT PRIMARY KEY, context TEXT NOT NULL) STRICT;
             CREATE TABLE IF NOT EXISTS trial (
                 number INTEGER PRIMARY KEY AUTOINCREMENT,
                 profile TEXT NOT NULL REFERENCES profile (name),
                 batch INTEGER NOT NULL, sm INTEGER NOT NULL, quota INTEGER NOT NULL,
                 failed TEXT,
                 throughput_milli INTEGER, p50_ns INTEGER, p95_ns INTEGER, p99_ns INTEGER,
                 p95_with_wait_ns INTEGER, load_ns INTEGER,
                 low REAL, mean REAL, high REAL, confidence_percent INTEGER,
                 calls INTEGER, warmup_calls INTEGER,
                 UNIQUE (profile, batch, sm, quota)
             ) STRICT;
             PRAGMA application_id = {APPLICATION};"
        ))?;
        // A file of version 1 is made one of version 2.
        let of_version_1 = "SELECT count(*) = 0 FROM pragma_table_info('trial') WHERE name = ?1";
        for column in UTILISATION {
            let name = column.split(' ').next().unwrap_or(column);
            if file.query_row(of_version_1, [name], |row| row.get(0))? {
                file.execute_batch(&format!("ALTER TABLE trial ADD COLUMN {column}"))?;
            }
        }
        file.execute_batch(&format!("PRAGMA user_version = {VERSION}; COMMIT;"))?;
        file.execute(
            "INSERT OR IGNORE INTO profile (name, context) VALUES (?1, ?2)",
            params![name, context],
        )?;
        let of_name = "SELECT context FROM profile WHERE name = ?1";
        let stored: Option<String> = file.query_row(of_name, [name], |row| row.get(0)).optional()?;
        match stored {
            Some(stored) if stored != context => {
                let (name, given) = (name.to_owned(), context.to_owned());
                Err(StoreError::OtherContext { name, stored, given })
            }
            _ => Ok(Self { file, name: name.to_owned() }),
        }
    }

    /// The profile's trials in the order in which they were kept.
    pub fn records(&self) -> Result<Vec<Record>, StoreError> {
        let mut query = self.file.prepare("SELECT * FROM trial WHERE profile = ?1 ORDER BY number")?;
        let mut rows = query.query([&self.name])?;
        let mut records = Vec::new();
        while let Some(row) = rows.next()? {
            let bad = |what: String| StoreError::Row {
                name: self.name.clone(),
                number: row.get("number").unwrap_or(-1),
                what,
            };
            records.push(record(row)?.map_err(bad)?);
        }
        Ok(records)
    }

    /// The same, as a planner reads them.
    pub fn journal(&self) -> Result<Journal, StoreError> {
        let trials: Vec<Trial> = self.records()?.into_iter().map(|record| record.trial).collect();
        Ok(Journal::try_from(trials)?)
    }
}

impl Sink for Store {
    fn keep(&mut self, record: &Record) -> Result<(), Box<dyn core::error::Error + Send + Sync>> {
        let at = record.trial.setting;
        let failed = match &record.trial.outcome {
            Outcome::Failed { reason } => Some(reason.as_str()),
            Outcome::Measured(_) => None,
        };
        let measured = record.measured.as_ref();
        let point = measured.map(|measured| measured.measurement.point);
        let time = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX);
        let of = |get: fn(&Measured) -> Duration| measured.map(|measured| time(get(measured)));
        let count = |get: fn(&Measured) -> u64| measured.map(|m| i64::try_from(get(m)).unwrap_or(i64::MAX));
        let seen = |get: fn(&Utilisation) -> Option<f64>| measured?.utilisation.as_ref().and_then(get);
        let memory = measured.and_then(|measured| measured.utilisation?.memory);
        let memory = memory.map(|bytes| i64::try_from(bytes.get()).unwrap_or(i64::MAX));
        let rate = |point: ProfilePoint| i64::try_from(point.throughput.as_milli()).unwrap_or(i64::MAX);
        self.file.execute(
            "INSERT INTO trial (profile, batch, sm, quota, failed, throughput_milli, p50_ns, p95_ns, p99_ns,
                 p95_with_wait_ns, load_ns, low, mean, high, confidence_percent, calls, warmup_calls,
                 busy_percent, sm_percent, occupancy_percent, memory_bytes)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21)",
            params![
                self.name,
                at.batch,
                at.sm.get(),
                at.quota.get(),
                failed,
                point.map(rate),
                point.map(|point| time(point.p50)),
                point.map(|point| time(point.p95)),
                of(|measured| measured.p99),
                of(|measured| measured.p95_with_wait),
                measured.and_then(|measured| measured.measurement.load).map(time),
                measured.map(|measured| measured.throughput.low),
                measured.map(|measured| measured.throughput.mean),
                measured.map(|measured| measured.throughput.high),
                measured.map(|measured| measured.confidence.percent()),
                count(|measured| measured.calls),
                count(|measured| measured.warmup_calls),
                seen(|seen| seen.busy_percent),
                seen(|seen| seen.sm_percent),
                seen(|seen| seen.occupancy_percent),
                memory,
            ],
        )?;
        Ok(())
    }
}

/// A row as a record; the inner error says what is wrong with its values.
fn record(row: &Row<'_>) -> rusqlite::Result<Result<Record, String>> {
    let share = |key: &str| Ok::<_, rusqlite::Error>((row.get::<_, u16>(key)?, key.to_owned()));
    let ((sm, sm_key), (quota, quota_key)) = (share("sm")?, share("quota")?);
    let (Some(sm), Some(quota)) = (SmShare::new(sm), Quota::new(quota)) else {
        return Ok(Err(format!("{sm_key} or {quota_key} is above 10000")));
    };
    let setting = Setting { batch: row.get("batch")?, sm, quota };
    if let Some(reason) = row.get::<_, Option<String>>("failed")? {
        return Ok(Ok(Record { trial: Trial::failed(setting, reason), measured: None }));
    }
    // A negative number reads as 0, which no field may be.
    let count = |key: &str| row.get::<_, i64>(key).map(|n| u64::try_from(n).unwrap_or(0));
    let time = |key: &str| count(key).map(Duration::from_nanos);
    let throughput = RequestRate::from_milli(count("throughput_milli")?);
    let (p50, p95) = (time("p50_ns")?, time("p95_ns")?);
    let point =
        ProfilePoint::measured(setting.sm, setting.quota, setting.batch, throughput.as_f64(), p50, p95);
    let point = match point {
        Ok(point) => point,
        Err(error) => return Ok(Err(ProfileError::to_string(&error))),
    };
    let confidence = match row.get("confidence_percent")? {
        95 => Confidence::P95,
        99 => Confidence::P99,
        other => return Ok(Err(format!("confidence_percent is {other}: need 95 or 99"))),
    };
    let load = row.get::<_, Option<i64>>("load_ns")?;
    let load = load.and_then(|load| u64::try_from(load).ok()).map(Duration::from_nanos);
    let measurement = Measurement { point, load };
    let memory = row.get::<_, Option<i64>>("memory_bytes")?;
    let seen = Utilisation {
        busy_percent: row.get("busy_percent")?,
        sm_percent: row.get("sm_percent")?,
        occupancy_percent: row.get("occupancy_percent")?,
        memory: memory.and_then(|bytes| u64::try_from(bytes).ok()).map(Bytes),
    };
    let measured = Measured {
        measurement,
        throughput: Interval { low: row.get("low")?, mean: row.get("mean")?, high: row.get("high")? },
        confidence,
        p99: time("p99_ns")?,
        p95_with_wait: time("p95_with_wait_ns")?,
        calls: count("calls")?,
        warmup_calls: count("warmup_calls")?,
        utilisation: Some(seen).filter(|seen| *seen != Utilisation::default()),
    };
    Ok(Ok(Record { trial: Trial::done(measurement), measured: Some(measured) }))
}
