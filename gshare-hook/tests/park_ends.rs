//! Moves that end early: with the process, or without their daemon.

use std::path::{Path, PathBuf};
use std::time::Duration as StdDuration;

use crate::common::Run;
use crate::common::daemon::Manners;
use crate::park::{BIG, Bench, SMALL, limit};
use fake_cuda::sim::SimDevice;
use gshare_core::Duration;
use gshare_core::wire::Residence;

const PHASES: [Residence; 3] = [Residence::Parking, Residence::Parked, Residence::Returning];

/// Each phase of a move, from its order to its end, ends with the process.
#[test]
fn a_process_killed_in_any_phase_leaves_nothing() {
    for (delay, back) in [(0, false), (1, false), (3, false), (0, true), (2, true)] {
        let bench = Bench::new("hold", limit());
        if back {
            bench.parked();
        } else {
            bench.daemon().told_when("nothing is movable", |report| report.1 > 0);
        }
        bench.daemon().park(!back);
        std::thread::sleep(StdDuration::from_millis(delay));
        let pid = bench.truth().pid;
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        let device = bench.device.clone();
        let daemon = bench.daemon().told_in_all();
        assert_eq!(daemon.ended, 1);
        bench.finish();
        assert!(!Path::new(&device).exists() || left_on(&device) == 0);
    }
}

/// A copy of the program's memory over the link of this device takes `COPY`.
fn slow(folder: &Path) -> PathBuf {
    let profile = folder.join("slow.toml");
    std::fs::write(&profile, format!("base = \"tiny\"\nhost_bandwidth = {}\n", 5 * BIG / 2)).unwrap();
    profile
}

const COPY: StdDuration = StdDuration::from_millis(400);

fn manners() -> Manners {
    Manners { spec: limit(), token: Duration::from_millis(10), ..Manners::default() }
}

impl Bench {
    /// Orders the program into a phase, of which a quarter passes.
    fn comes_to(&self, phase: Residence) {
        self.daemon().told_when("nothing is movable", |report| report.1 > 0);
        self.daemon().park(true);
        if phase != Residence::Parking {
            self.daemon().told_when("not parked", |report| report.0 == Residence::Parked);
            self.daemon().park(phase == Residence::Parked);
        }
        self.daemon().told_when("not in this phase", |report| report.0 == phase);
        std::thread::sleep(COPY / 4);
        assert_eq!(self.daemon().told().parking.last().map(|report| report.0), Some(phase));
    }
}

#[test]
fn moves_take_the_time_of_the_link() {
    let place = tempfile::tempdir().unwrap();
    let bench = Bench::with("hold", manners(), |run| run.env("GSHARE_SIM_PROFILE", slow(place.path())));
    bench.daemon().told_when("nothing is movable", |report| report.1 > 0);
    for (on, place) in [(true, Residence::Parked), (false, Residence::Resident)] {
        let began = std::time::Instant::now();
        bench.daemon().park(on);
        bench
            .daemon()
            .told_when("not moved", |report| report.0 == place && (on || began.elapsed() > COPY / 4));
        assert!(began.elapsed() >= COPY, "{on}: {:?}", began.elapsed());
    }
    for name in ["go", "on", "end"] {
        bench.make(name);
    }
    assert!(bench.finish().stdout.contains("big: 0, equal"));
}

/// The daemon ends on the way to host memory, in it and on the way back. The program goes on within 15 s, the bound of `await_file`.
#[test]
fn without_its_daemon_a_process_comes_back_by_itself_from_each_phase() {
    for phase in PHASES {
        let place = tempfile::tempdir().unwrap();
        let mut bench =
            Bench::with("launch", manners(), |run| run.env("GSHARE_SIM_PROFILE", slow(place.path())));
        bench.comes_to(phase);
        bench.daemon = None;
        ["go", "on"].iter().for_each(|name| bench.make(name));
        bench.await_file("looked");
        assert_eq!(bench.on_device(), BIG + SMALL, "{phase:?}");
        bench.make("end");
        let done = bench.finish();
        assert!(done.stdout.contains("big: 0, equal"), "{phase:?}: {}{}", done.stdout, done.stderr);
    }
}

/// The process ends on the way to host memory, in it and on the way back.
#[test]
fn a_process_killed_during_a_copy_leaves_nothing_and_its_neighbour_everything() {
    for phase in PHASES {
        let place = tempfile::tempdir().unwrap();
        let with_slow = |run: Run| run.env("GSHARE_SIM_PROFILE", slow(place.path()));
        let bench = Bench::with("hold", manners(), with_slow);
        let pid = i32::try_from(bench.truth().pid).unwrap();
        let neighbour =
            Bench::with("hold", manners(), |run| with_slow(run).env("GSHARE_SIM_DEVICE", &bench.device));
        let device = SimDevice::open(&bench.device, &fake_cuda::Spec::default()).unwrap();
        neighbour.parked();
        bench.comes_to(phase);
        let pid = rustix::process::Pid::from_raw(pid).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        assert_eq!(bench.daemon().told_in_all().ended, 1);
        for name in ["go", "on", "end"] {
            neighbour.make(name);
        }
        let done = neighbour.finish();
        assert!(done.stdout.contains("big: 0, equal"), "{phase:?}: {}{}", done.stdout, done.stderr);
        bench.finish();
        assert_eq!(used_on(&device), 0, "{phase:?}");
    }
}

fn left_on(device: &Path) -> u64 {
    used_on(&SimDevice::open(device, &fake_cuda::Spec::default()).unwrap())
}

fn used_on(device: &SimDevice) -> u64 {
    device.truth().gpus.iter().map(|gpu| gpu.memory_used_bytes).sum()
}
