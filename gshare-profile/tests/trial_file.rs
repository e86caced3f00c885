//! The store: stored trials survive, come back unchanged, and no other data passes for them. Feature `store`.
#![cfg(feature = "store")]

mod common;

use common::simulated_gpu;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{BasisPoints, Bytes, Duration, Quota, SmShare};
use gshare_profile::meter::Utilisation;
use gshare_profile::planner::{Grid, Trial};
use gshare_profile::record::{Record, Sink, run};
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
    let path = dir.path().join("profiles.jsonl");
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
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(&dir.path().join("one"), "function", "context").unwrap();
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
    busy.measured.as_mut().unwrap().throughput.high = f64::INFINITY;
    let kept = both.1;
    assert_eq!(store.records().unwrap(), kept);
    let mut other = Store::open(&dir.path().join("other"), "function", "context").unwrap();
    other.keep(&busy).unwrap();
    assert_eq!(other.records().unwrap(), [busy]);
}

/// A kill in the middle of a line, at every byte of it.
#[test]
fn half_a_trial_counts_for_nothing_and_the_next_takes_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profiles.jsonl");
    let mut store = Store::open(&path, "function", "context").unwrap();
    let trial = |batch| {
        let setting = gshare_core::profile::Setting { batch, sm: SmShare::WHOLE, quota: Quota::WHOLE };
        Record { trial: Trial::failed(setting, "hung".into()), measured: None }
    };
    store.keep(&trial(1)).unwrap();
    let whole = std::fs::read(&path).unwrap();
    store.keep(&trial(2)).unwrap();
    let both = std::fs::read(&path).unwrap();
    for length in whole.len()..both.len() {
        std::fs::write(&path, &both[..length]).unwrap();
        let mut store = Store::open(&path, "function", "context").unwrap();
        assert_eq!(store.records().unwrap(), [trial(1)], "{length} bytes");
        store.keep(&trial(2)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), both);
    }
}

#[test]
fn two_runs_that_share_a_file_see_each_others_trials() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profiles.jsonl");
    let open = || Store::open(&path, "function", "context").unwrap();
    let (mut one, mut other) = (open(), open());
    let setting = gshare_core::profile::Setting { batch: 1, sm: SmShare::WHOLE, quota: Quota::WHOLE };
    let record = Record { trial: Trial::failed(setting, "hung".into()), measured: None };
    one.keep(&record).unwrap();
    assert_eq!(other.records().unwrap(), *std::slice::from_ref(&record));
    assert!(other.keep(&record).unwrap_err().to_string().contains("was tried before"));
}

#[test]
fn what_is_no_store_of_ours_is_refused_and_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("other");
    for text in ["this is a text", "this is a text\n", "{\"pro\": 1}\n", "[", "SQLite format 3\0"] {
        std::fs::write(&path, text).unwrap();
        assert!(matches!(Store::open(&path, "a", "b"), Err(StoreError::Line { line: 1, .. })), "{text}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }
    assert!(matches!(Store::open(&dir.path().join("no/such/folder"), "a", "b"), Err(StoreError::Io(_))));

    let path = dir.path().join("ours");
    let mut gpu = simulated_gpu(table(), Duration::from_millis(10), BasisPoints::ZERO, 3);
    for (name, context) in [("resnet", "resnet.py at 1 call"), ("bert", "bert.py")] {
        let mut store = Store::open(&path, name, context).unwrap();
        let mut journal = store.journal().unwrap();
        let mut first = Killed(&mut store, 1);
        assert!(run(&grid(), &mut gpu, &TrialConfig::default(), &mut journal, &mut first).is_err());
        assert_eq!(store.records().unwrap().len(), 1, "of its own profile");
    }
    let error = Store::open(&path, "resnet", "bert.py").unwrap_err().to_string();
    assert_eq!(
        error,
        "profile `resnet` is of something else: stored `resnet.py at 1 call`, now `bert.py`; choose another name"
    );
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, says) in [
        ("\"sm_basis_points\":2500", "\"sm_basis_points\":10001", "line 1"),
        ("\"throughput_milli_rps\":", "\"throughput_milli_rps\":0,\"was\":", "unknown field"),
    ] {
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let error = Store::open(&path, "bert", "bert.py").unwrap_err().to_string();
        assert!(error.contains("profile store, line 1: ") && error.contains(says), "{error}");
    }
}
