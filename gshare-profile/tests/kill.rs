//! A profile run that is killed with SIGKILL, again and again, and started again: it goes on where it was, and no trial is
//! lost or doubled. Features `process` and `store`.
#![cfg(all(feature = "process", feature = "store"))]

use gshare_core::{BasisPoints, Duration, Quota, SmShare};
use gshare_profile::line_program::{Process, Protocol};
use gshare_profile::planner::Grid;
use gshare_profile::record::run;
use gshare_profile::trial::TrialConfig;
use gshare_profile::trial_file::Store;
use std::path::Path;
use std::process::Command;

/// Where the run that is to be killed keeps its files; set in that process only.
const FOLDER: &str = "GSHARE_TEST_KILL_FOLDER";

fn grid() -> Grid {
    let sms = [20, 40, 60, 80, 100].map(|percent| SmShare::from_percent(percent).unwrap()).to_vec();
    Grid::new(sms, vec![Quota::WHOLE], vec![1, 2]).unwrap()
}

/// The run: every trial notes its start in a file, then answers at once, sixty times, however long that takes.
fn profile(folder: &Path) {
    let mut store = Store::open(&folder.join("store"), "function", "a shell").unwrap();
    let mut journal = store.journal().unwrap();
    let starts = folder.join("starts");
    let mut process = Process::new(Protocol::Requests, move |at| {
        let mut command = Command::new("sh");
        let script = r#"echo "$1" >> "$0"; echo ready; while read line; do echo done; done"#;
        command.args(["-c", script]).arg(&starts).arg(at.to_string());
        Ok(command)
    });
    let mut config = TrialConfig::default();
    (config.steady_tolerance, config.precision) = (BasisPoints::WHOLE, BasisPoints::WHOLE);
    (config.max_warmup, config.max_time) = (Duration::from_secs(60), Duration::from_secs(60));
    run(&grid(), &mut process, &config, &mut journal, &mut store).unwrap();
}

#[test]
fn a_run_that_is_killed_goes_on_where_it_was() {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return profile(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let me = std::env::current_exe().unwrap();
    let (mut kills, mut kept, mut wait) = (0, Vec::new(), 0);
    loop {
        let mut command = Command::new(&me);
        command.args(["--exact", "a_run_that_is_killed_goes_on_where_it_was"]);
        command.env(FOLDER, folder.path()).stdout(std::process::Stdio::null());
        let mut child = command.spawn().unwrap();
        let begin = std::time::Instant::now();
        let ended = loop {
            match child.try_wait().unwrap() {
                Some(status) => break Some(status),
                None if begin.elapsed().as_millis() > wait => break None,
                None => std::thread::sleep(std::time::Duration::from_millis(5)),
            }
        };
        if ended.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
            kills += 1;
            // First at once, and each time a little later: in the middle of different things, and on a slow machine it
            // still ends.
            wait = (wait + 45) * 21 / 20;
        }
        let store = Store::open(&folder.path().join("store"), "function", "a shell").unwrap();
        let trials = store.journal().unwrap().trials().to_vec();
        assert!(trials.starts_with(&kept), "what was kept stays as it was");
        kept = trials;
        if let Some(status) = ended {
            assert!(status.success());
            break;
        }
        assert!(kills < 200, "it never gets to its end");
    }
    assert!(kills >= 1, "it was not killed once");
    assert_eq!(kept.len(), grid().len());
    // Started again: once per trial, and once more for each that a kill interrupted.
    let starts = std::fs::read_to_string(folder.path().join("starts")).unwrap();
    let starts = starts.lines().count();
    assert!((10..=10 + kills).contains(&starts), "{starts} starts for 10 trials and {kills} kills");
    eprintln!("{kills} kills, {starts} starts, {} trials kept", kept.len());
}
