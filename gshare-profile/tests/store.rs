//! The store: what is kept survives, comes back as it was, and nothing else is taken for it. Feature `store`.
#![cfg(feature = "store")]

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{BasisPoints, Bytes, Duration, Quota, SmShare};
use gshare_profile::executor::simulated_gpu;
use gshare_profile::meter::Utilisation;
use gshare_profile::planner::{Grid, Trial};
use gshare_profile::run::{Record, Sink, run};
use gshare_profile::trial::TrialConfig;
use gshare_profile::trial_file::{Store, StoreError};

fn percent(percent: u16) -> (SmShare, Quota) {
    (SmShare::from_percent(percent).unwrap(), Quota::from_percent(percent).unwrap())
}

fn table() -> ProfileTable {
    let mut points = Vec::new();
    for sm in [25, 50, 100] {
        for quota in [50, 100] {
            let rate = f64::from(sm * quota) / 50.0;
            let exec = std::time::Duration::from_secs_f64(1.0 / rate).into();
            let ((sm, _), (_, quota)) = (percent(sm), percent(quota));
            points.push(ProfilePoint::measured(sm, quota, 1, rate, exec, exec).unwrap());
        }
    }
    ProfileTable::grid(points).unwrap()
}

fn grid() -> Grid {
    let sms = [25, 50, 100].map(|sm| percent(sm).0).to_vec();
    Grid::new(sms, [50, 100].map(|quota| percent(quota).1).to_vec(), vec![1]).unwrap()
}

/// Ends a run after some trials, as a kill does between two of them.
struct Killed<'a>(&'a mut Store, usize);

impl Sink for Killed<'_> {
    fn keep(&mut self, record: &Record) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.1 = self.1.checked_sub(1).ok_or("killed")?;
        self.0.keep(record)
    }
}

#[test]
fn a_run_goes_on_where_it_was_and_no_trial_is_lost_or_doubled() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profiles.sqlite");
    let noise = BasisPoints::from_percent(5).unwrap();
    let mut gpu = simulated_gpu(table(), Duration::from_millis(10), noise, 3);
    let config = TrialConfig::default();
    for round in 1..=6 {
        let mut store = Store::open(&path, "function", "context").unwrap();
        let mut journal = store.journal().unwrap();
        assert_eq!(journal.trials().len(), round - 1, "one more in each round");
        let _ = run(&grid(), &mut gpu, &config, &mut journal, &mut Killed(&mut store, 1));
    }
    let mut store = Store::open(&path, "function", "context").unwrap();
    let mut journal = store.journal().unwrap();
    let (before, records) = (journal.clone(), store.records().unwrap());
    let outcome = run(&grid(), &mut gpu, &config, &mut journal, &mut store).unwrap();
    assert_eq!((outcome.table.points().len(), &journal), (6, &before), "nothing was left to measure");
    assert!(records.iter().all(|record| record.measured.is_some_and(|measured| measured.calls >= 60)));
    assert!(store.keep(&records[0]).is_err(), "a setting is there once");
}

#[test]
fn records_come_back_as_they_were_kept() {
    let mut store = Store::open(std::path::Path::new(":memory:"), "function", "context").unwrap();
    struct Both<'a>(&'a mut Store, Vec<Record>);
    impl Sink for Both<'_> {
        fn keep(&mut self, record: &Record) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
            self.1.push(record.clone());
            self.0.keep(record)
        }
    }
    let mut gpu = simulated_gpu(table(), Duration::from_millis(10), BasisPoints::ZERO, 3);
    let mut journal = store.journal().unwrap();
    let mut both = Both(&mut store, Vec::new());
    run(&grid(), &mut gpu, &TrialConfig::default(), &mut journal, &mut both).unwrap();
    let setting = gshare_core::profile::Setting { batch: 9, sm: SmShare::WHOLE, quota: Quota::WHOLE };
    let failed = Record { trial: Trial::failed(setting, "out of 'memory'".into()), measured: None };
    both.keep(&failed).unwrap();
    let mut seen = Utilisation::default();
    (seen.busy_percent, seen.sm_percent, seen.memory) = (Some(81.5), Some(40.25), Some(Bytes::from_gib(3)));
    let mut busy = both.1[0].clone();
    busy.measured.as_mut().unwrap().utilisation = Some(seen);
    let kept = both.1;
    assert_eq!(store.records().unwrap(), kept);
    let mut other = Store::open(std::path::Path::new(":memory:"), "function", "context").unwrap();
    other.keep(&busy).unwrap();
    assert_eq!(other.records().unwrap(), [busy]);
}

#[test]
fn a_file_of_version_1_is_taken_over_with_its_trials() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("old.sqlite");
    let mut store = Store::open(&path, "function", "context").unwrap();
    let mut gpu = simulated_gpu(table(), Duration::from_millis(10), BasisPoints::ZERO, 3);
    let mut journal = store.journal().unwrap();
    run(&grid(), &mut gpu, &TrialConfig::default(), &mut journal, &mut store).unwrap();
    let before = store.records().unwrap();
    drop(store);
    let file = rusqlite::Connection::open(&path).unwrap();
    for column in ["busy_percent", "sm_percent", "occupancy_percent", "memory_bytes"] {
        file.execute_batch(&format!("ALTER TABLE trial DROP COLUMN {column}")).unwrap();
    }
    file.execute_batch("PRAGMA user_version = 1").unwrap();
    drop(file);
    for _ in 0..2 {
        assert_eq!(Store::open(&path, "function", "context").unwrap().records().unwrap(), before);
    }
    let file = rusqlite::Connection::open(&path).unwrap();
    file.execute_batch("PRAGMA user_version = 3").unwrap();
    assert!(matches!(Store::open(&path, "a", "b"), Err(StoreError::Foreign { version: 3, .. })));
}

#[test]
fn what_is_no_store_of_ours_is_refused_and_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other");
    std::fs::write(&path, "this is a text, and a long one, so that no one takes it for a database").unwrap();
    assert!(matches!(Store::open(&path, "a", "b"), Err(StoreError::Sqlite(_))));
    assert!(std::fs::read_to_string(&path).unwrap().starts_with("this is a text"));
    assert!(Store::open(&dir.path().join("no/such/folder"), "a", "b").is_err());

    let path = dir.path().join("foreign.sqlite");
    rusqlite::Connection::open(&path).unwrap().execute_batch("CREATE TABLE trial (number)").unwrap();
    assert!(matches!(Store::open(&path, "a", "b"), Err(StoreError::Foreign { application: 0, .. })));

    let path = dir.path().join("ours.sqlite");
    drop(Store::open(&path, "resnet", "resnet.py at 1 call").unwrap());
    drop(Store::open(&path, "bert", "bert.py").unwrap());
    let error = Store::open(&path, "resnet", "bert.py").unwrap_err().to_string();
    assert_eq!(
        error,
        "profile `resnet` is of something else: stored `resnet.py at 1 call`, now `bert.py`; choose another name"
    );
    let file = rusqlite::Connection::open(&path).unwrap();
    file.execute("INSERT INTO trial (profile, batch, sm, quota, throughput_milli, p50_ns, p95_ns) VALUES ('bert', 1, 10001, 1, 0, 0, 0)", []).unwrap();
    let error = Store::open(&path, "bert", "bert.py").unwrap().journal().unwrap_err().to_string();
    assert_eq!(error, "profile `bert`, trial 1: sm or quota is above 10000");
    file.execute("UPDATE trial SET sm = 10000", []).unwrap();
    let error = Store::open(&path, "bert", "bert.py").unwrap().journal().unwrap_err().to_string();
    assert!(error.contains("throughput is 0"), "{error}");
}
