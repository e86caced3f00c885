//! Every scenario file is read, and each that is `world`'s is run for a short while.

use gshare_bench::cases::{self, CaseRun};
use gshare_bench::world::with_baselines;
use gshare_core::Duration;
use gshare_sim::scenario::{Case, Own, Scenario};
use gshare_sim::world::{self, Depth};
use std::path::{Path, PathBuf};

/// Inputs of replays that have a form of their own.
const REPLAYS: [&str; 3] = ["dilu/fig20.toml", "fast-gshare/fig11.toml", "lalb/paper.toml"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios")
}

fn files() -> Vec<PathBuf> {
    let list = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
    };
    let folders = list(&folder()).into_iter().filter(|path| path.is_dir());
    let mut files: Vec<_> = folders.flat_map(|folder| list(&folder)).collect();
    files.sort();
    files
}

fn short(path: &Path) -> Vec<Case> {
    let mut cases = Scenario::cases(path, &[("length".to_owned(), "1s".to_owned())])
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    cases.iter_mut().for_each(|case| case.scenario.own = with_baselines(&Own::default()));
    cases
}

#[test]
fn every_scenario_runs_in_all_its_cases() {
    let mut replays = 0;
    for path in files() {
        if REPLAYS.iter().any(|name| path.ends_with(name)) {
            toml::from_str::<toml::Table>(&std::fs::read_to_string(&path).unwrap()).unwrap();
            replays += 1;
            continue;
        }
        let mut runs = Vec::new();
        for case in short(&path) {
            let (name, plan) = (case.name(), case.scenario.plan().unwrap());
            let outcome = world::run(&plan, 0, || case.scenario.platform());
            let outcome = outcome.unwrap_or_else(|failure| panic!("{} {name}: {failure}", path.display()));
            let mut run = CaseRun::new(case, plan.length);
            run.take(&outcome);
            runs.push(run);
        }
        let printed = cases::text(&runs);
        assert!(runs.iter().all(|run| printed.contains(&run.case.name())), "{printed}");
        // Too few seeds for a verdict.
        assert!(printed.contains("no verdicts"), "{printed}");
        assert_eq!(cases::json(&runs)["compared"], serde_json::json!([]));
    }
    assert_eq!(replays, REPLAYS.len());
}

#[test]
fn kernels_over_time_add_up_to_those_that_ran() {
    let path = folder().join("dilu/fig17.toml");
    let set = [("length".to_owned(), "5s".to_owned()), ("settle".to_owned(), "1s".to_owned())];
    let case = Scenario::cases(&path, &set).unwrap().swap_remove(0);
    let mut plan = case.scenario.plan().unwrap();
    assert_eq!(plan.depth, Depth::Kernels);
    plan.sample = Some(Duration::from_millis(500));
    let outcome = world::run(&plan, 3, || case.scenario.platform()).unwrap();
    assert_eq!(outcome.series.iter().filter(|sample| sample.function == 1).count(), 10);
    let counted: u64 = outcome.series.iter().map(|sample| sample.kernels).sum();
    // A device runs no more than one whole kernel of a millisecond at a time; events after the last sample are not in it.
    assert!(counted > 2_000 && counted <= 5_500 && counted <= outcome.kernels, "{counted}");
    let mut run = CaseRun::new(case, plan.length);
    run.take(&outcome);
    let text = cases::series(&[run]);
    assert_eq!(text.lines().count(), outcome.series.len() + 1);
    assert!(text.contains("co_scaled,0.5,trainer,"), "{text}");
}

/// Ten seeds of two cases of which one must be slower: the verdict says so.
#[test]
fn verdicts_come_from_ten_seeds() {
    let path = folder().join("dilu/train-inference.toml");
    let set = [("length".to_owned(), "10s".to_owned()), ("settle".to_owned(), "20s".to_owned())];
    let mut runs = Vec::new();
    for case in Scenario::cases(&path, &set).unwrap() {
        if !["exclusive/poisson", "mps_r/poisson"].contains(&case.name().as_str()) {
            continue;
        }
        let plan = case.scenario.plan().unwrap();
        let scenario = case.scenario.clone();
        let mut run = CaseRun::new(case, plan.length);
        for seed in 0..10 {
            run.take(&world::run(&plan, seed, || scenario.platform()).unwrap());
        }
        runs.push(run);
    }
    let json = cases::json(&runs);
    // GPU time of one kind of work does not count for the other.
    let all = |figure: &str, function: &str| {
        let rows = json["cases"].as_array().unwrap().iter();
        let of = |name: &'static str| move |row: &&serde_json::Value| row["function"] == name;
        let mut rows = rows.filter(move |row| of("all")(row) || row["function"] == function);
        let (one, all) = (rows.next().unwrap(), rows.next().unwrap());
        assert!(one[figure].as_f64().unwrap() > 0.0 && one[figure] == all[figure], "{one} {all}");
    };
    all("rps_per_gpu", "roberta");
    all("trained_per_gpu", "trainer");
    let verdict = |function: &str, figure: &str| {
        let compared = json["compared"].as_array().unwrap().iter();
        let mut found = compared.filter(|one| one["function"] == function && one["figure"] == figure);
        found.next().unwrap()["difference"]["verdict"].clone()
    };
    assert_eq!(verdict("trainer", "trained_s"), "worse");
    assert_eq!(verdict("trainer", "gpu_held_s"), "better");
}
