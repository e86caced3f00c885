//! A function's DAG, measured in virtual time: results, components which do not run on a slice, and refused input.

use gshare_core::dag::Profile;
use gshare_core::profile::Setting;
use gshare_core::{BasisPoints, Bytes, Duration, Timestamp};
use gshare_profile::dag_profile::{DagRunError, Point, Shape, ShapeComponent, ShapeEdge, profile};
use gshare_profile::executor::{Begin, ExecError, Executor, Ready, Reply, Virtual};
use gshare_profile::trial::TrialConfig;

/// A component that takes the time of `runs` and an amount of memory.
struct Weighed<E> {
    runs: E,
    memory: Bytes,
}

impl<E: Executor> Executor for Weighed<E> {
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError> {
        self.runs.start(setting, within)
    }
    fn now(&self) -> Timestamp {
        self.runs.now()
    }
    fn submit(&mut self) -> Result<(), ExecError> {
        self.runs.submit()
    }
    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError> {
        self.runs.wait(until)
    }
    fn stop(&mut self) {
        self.runs.stop();
    }
    fn memory(&mut self) -> Result<Bytes, ExecError> {
        Ok(self.memory)
    }
}

fn shape(names: &[&str], edges: &[(&str, &str)]) -> Shape {
    let component = |name: &&str| ShapeComponent { name: (*name).to_owned(), runs: BasisPoints::WHOLE };
    let edge = |&(from, to): &(&str, &str)| ShapeEdge {
        from: from.to_owned(),
        to: to.to_owned(),
        bytes: Bytes::from_mib(6),
    };
    let (components, edges) = (names.iter().map(component).collect(), edges.iter().map(edge).collect());
    Shape { name: "f".to_owned(), components, edges }
}

/// `a` takes 40 ms and 3 GiB, `b` 20 ms and 12 GiB; on twice the slice half the time. 1g has 9 GiB, 2g has 19.
fn run(
    shape: &Shape,
    slices: &[&str],
) -> (Result<gshare_profile::dag_profile::DagProfile, DagRunError>, Vec<String>) {
    run_with(shape, slices, &[1])
}

fn run_with(
    shape: &Shape,
    slices: &[&str],
    batches: &[u32],
) -> (Result<gshare_profile::dag_profile::DagProfile, DagRunError>, Vec<String>) {
    let slices: Vec<String> = slices.iter().map(|&name| name.to_owned()).collect();
    let mut make = |point: &Point| {
        let (ms, gib) = if point.component == "a" { (40, 3) } else { (20, 12) };
        let (speed, room) = if point.slice == "1g.10gb" { (1, 9) } else { (2, 19) };
        let ms = ms * u64::from(point.batch);
        let begin = move |_| match gib <= room {
            true => Begin::Ready(Duration::from_secs(1)),
            false => Begin::Refused("out of memory".to_owned()),
        };
        let runs = Virtual::new(begin, move |_, _| Reply::After(Duration::from_millis(ms / speed)));
        Ok(Weighed { runs, memory: Bytes::from_gib(gib) })
    };
    let mut lines = Vec::new();
    let mut told = |point: &Point, found: Result<&Profile, &str>| {
        let found = found.map(|profile| profile.time.to_string());
        lines.push(format!("{} {} {found:?}", point.component, point.slice));
    };
    let result = profile(shape, &slices, batches, &TrialConfig::default(), &mut make, &mut told);
    (result, lines)
}

/// FluidFaaS, section 5.2.1: every node of the FFS DAG carries the memory and the speed of its component on each size.
#[test]
fn every_component_is_measured_on_every_slice_and_a_slice_that_is_too_small_is_a_hole() {
    let (found, lines) = run(&shape(&["a", "b"], &[("a", "b")]), &["1g.10gb", "2g.20gb"]);
    let found = found.unwrap();
    let at = |component: usize, slice: &str| {
        let found = found.dag.components()[component].profile(slice, 1);
        found.map(|profile| (profile.time.as_nanos() / 1_000_000, profile.memory))
    };
    assert_eq!(at(0, "1g.10gb"), Some((40, Bytes::from_gib(3))));
    assert_eq!(at(0, "2g.20gb"), Some((20, Bytes::from_gib(3))));
    assert_eq!((at(1, "1g.10gb"), at(1, "2g.20gb")), (None, Some((10, Bytes::from_gib(12)))));
    assert_eq!(found.dag.edges()[0].bytes, Bytes::from_mib(6));
    let hole = &found.holes[0];
    assert_eq!(
        (found.holes.len(), hole.point.component.as_str(), hole.point.slice.as_str()),
        (1, "b", "1g.10gb")
    );
    assert!(hole.reason.contains("out of memory"), "{hole:?}");
    assert_eq!(lines.len(), 4, "{lines:?}");
}

#[test]
fn every_batch_size_has_a_profile_of_its_own() {
    let (found, lines) = run_with(&shape(&["a"], &[]), &["1g.10gb", "2g.20gb"], &[1, 8]);
    let dag = found.unwrap().dag;
    let at = |slice: &str, batch: u32| {
        dag.components()[0].profile(slice, batch).map(|profile| profile.time.as_nanos() / 1_000_000)
    };
    assert_eq!([at("1g.10gb", 1), at("1g.10gb", 8)], [Some(40), Some(320)]);
    assert_eq!([at("2g.20gb", 1), at("2g.20gb", 8), at("2g.20gb", 4)], [Some(20), Some(160), None]);
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert_eq!(run_with(&shape(&["a"], &[]), &["1g.10gb"], &[]).0.unwrap_err(), DagRunError::NoBatches);
}

#[test]
fn what_is_no_dag_is_refused_before_anything_is_measured_and_what_runs_nowhere_by_name() {
    let (cycle, lines) = run(&shape(&["a", "b"], &[("a", "b"), ("b", "a")]), &["1g.10gb"]);
    assert_eq!(cycle.unwrap_err().to_string(), "cycle: a -> b -> a");
    let (hole, _) = run(&shape(&["a"], &[("a", "c")]), &["1g.10gb"]);
    assert!(hole.unwrap_err().to_string().contains("there is no component `c`"));
    assert_eq!(run(&shape(&["a"], &[]), &[]).0.unwrap_err(), DagRunError::NoSlices);
    assert!(lines.is_empty(), "{lines:?}");
    let (nowhere, _) = run(&shape(&["a", "b"], &[]), &["1g.10gb"]);
    let error = nowhere.unwrap_err().to_string();
    assert_eq!(
        error,
        "component `b` runs on none of the slices; on 1g.10gb: cannot run at this setting: out of memory"
    );
}
