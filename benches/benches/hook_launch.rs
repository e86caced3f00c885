//! The time that the hook adds to a launch, to an allocation and to a program's start, beside the bare call
//! in the same run.
//!
//! The simulated driver's kernel `zero` costs nothing on the device, so a bare launch is little more than the call. The benchmark
//! starts a daemon with tokens for the whole run, to measure the path and not the waiting, and runs itself again under the hook.
//! There `dlsym` gives the wrappers; the bare functions come from the C library's own `dlsym`. A table has the additions beside
//! their aims: medians of batches that alternate, bare and hooked. `added` is by the clock. With more
//! threads than CPUs the clock counts the other threads' turns, so the addition `of a CPU` stands beside it.
//!
//! | row | what |
//! |---|---|
//! | `kernel`, `kernel_ex`, `graph` | one launch, by 1, 2 and 4 threads at once, each on a stream of its own |
//! | `alloc_free` | a pair of `cuMemAlloc` and `cuMemFree` of 1 MiB, with 0 and 10,000 live allocations |
//! | `start_up` | a program from its start to after its first launch |
#![allow(unsafe_code, reason = "the driver's C functions")]

use std::process::Command;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

mod hook_common;
use hook_common::{Alloc, Free, KINDS, Kind, Setup, Time, Way, build, launches, occupy, ok, release};

/// The same by several threads at once; gives the mean of their times.
fn by_threads(setup: &Setup, way: Way, kind: Kind, threads: u32, count: u64) -> Time {
    let barrier = Barrier::new(threads as usize);
    let work = || {
        let stream = setup.stream();
        launches(setup, way, kind, stream, 200);
        barrier.wait();
        let time = launches(setup, way, kind, stream, count);
        setup.destroy(stream);
        time
    };
    let times: Vec<Time> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().map(|thread| thread.join().expect("no launch fails")).collect()
    });
    let mean = |part: fn(&Time) -> Duration| times.iter().map(part).sum::<Duration>() / threads;
    Time { wall: mean(|time| time.wall), cpu: mean(|time| time.cpu) }
}

/// `count` pairs of an allocation and its free.
fn pairs(way: Way, count: u64) -> Duration {
    let mut address = 0;
    // SAFETY: the driver's functions by their C signatures.
    unsafe {
        let (alloc, free): (Alloc, Free) = (way.get(c"cuMemAlloc_v2"), way.get(c"cuMemFree_v2"));
        let start = Instant::now();
        for _ in 0..count {
            ok(alloc(&raw mut address, 1 << 20));
            ok(free(address));
        }
        start.elapsed()
    }
}

/// From the start of a program to its end after one launch.
fn start_up(hook: Option<&str>) -> Duration {
    let mut command = Command::new(std::env::current_exe().expect("a benchmark has a path"));
    command.env("GSHARE_BENCH_ROLE", "first_launch").env_remove("LD_PRELOAD");
    if let Some(hook) = hook {
        command.env("LD_PRELOAD", hook);
    }
    let start = Instant::now();
    assert!(command.status().expect("this program starts").success());
    start.elapsed()
}

/// Medians of `batches` batches of both ways in turn, in ns per unit.
fn medians<const N: usize>(
    batches: usize,
    units: u64,
    mut measure: impl FnMut(bool, u64) -> [Duration; N],
) -> [(f64, f64); N] {
    let mut all = vec![[[0.0; N]; 2]; batches];
    for pair in &mut all {
        for (is_hooked, times) in [false, true].into_iter().zip(pair) {
            #[allow(clippy::cast_precision_loss)] // a duration of a benchmark
            let per_unit = |time: Duration| time.as_nanos() as f64 / units as f64;
            *times = measure(is_hooked, units).map(per_unit);
        }
    }
    core::array::from_fn(|which| {
        let median = |way: usize| {
            let mut times: Vec<f64> = all.iter().map(|pair| pair[way][which]).collect();
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        (median(0), median(1))
    })
}

fn table_of_what_is_added(setup: &Setup, hook: &str, quick: bool) {
    let way = |is_hooked: bool| if is_hooked { setup.hooked } else { setup.bare };
    let line = |name: String, (bare, hooked): (f64, f64), cpu: Option<(f64, f64)>, aim: u32| {
        let cpu = cpu.map_or("-".into(), |(bare, hooked)| format!("{:.1}", hooked - bare));
        println!("{name:<28} {bare:>10.1} {hooked:>10.1} {:>10.1} {cpu:>10} {aim:>10}", hooked - bare);
    };
    let (batches, count) = if quick { (3, 1_000) } else { (101, 50_000) };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpus} CPUs");
    println!("{:<28} {:>10} {:>10} {:>10} {:>10} {:>10}", "ns", "bare", "hooked", "added", "of a CPU", "aim");
    for (name, kind) in KINDS {
        for threads in [1, 2, 4] {
            let measure = |hooked, count| {
                let time = by_threads(setup, way(hooked), kind, threads, count);
                [time.wall, time.cpu]
            };
            let aim = if threads == 1 { 10 } else { 20 };
            let [wall, cpu] = medians(batches, count, measure);
            line(format!("{name}, {threads} threads"), wall, Some(cpu), aim);
        }
    }
    for live in [0, 10_000] {
        let kept = occupy(setup, live, 4096);
        let measure = |hooked, count| [pairs(way(hooked), count)];
        let [wall] = medians(batches, count / 10, measure);
        line(format!("alloc and free, {live} live"), wall, None, 500);
        release(setup, kept);
    }
    let measure = |hooked, _| [start_up(Some(hook).filter(|_| hooked))];
    let [wall] = medians(if quick { 3 } else { 41 }, 1, measure);
    line("start to first launch".into(), wall, None, 2_000_000);
}

fn main() {
    let quick = gshare_bench::runs_as_test();
    match std::env::var("GSHARE_BENCH_ROLE").as_deref() {
        Ok("first_launch") => {
            let setup = Setup::new("zero", 1);
            launches(&setup, setup.hooked, Kind::Kernel, null_mut(), 1);
        }
        Ok("hooked") => {
            let hook = std::env::var("LD_PRELOAD").expect("the hook is preloaded");
            // A child of this process is bare unless it says otherwise.
            let setup = Setup::new("zero", 1);
            table_of_what_is_added(&setup, &hook, quick);
        }
        _ => {
            let place = tempfile::tempdir().expect("a temporary directory");
            let (hook, driver) = build(place.path());
            let socket = place.path().join("gshare.sock");
            let mut config = gshared::Config::at(&socket);
            let long = gshare_core::Duration::from_secs(10);
            config.window = long;
            config.token = long;
            config.in_flight = long;
            let running =
                gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs");
            let status = Command::new(std::env::current_exe().expect("a benchmark has a path"))
                .args(std::env::args_os().skip(1))
                .env("GSHARE_BENCH_ROLE", "hooked")
                .env("LD_PRELOAD", hook)
                .env("LD_LIBRARY_PATH", driver)
                .env("GSHARE_SIM_DEVICE", place.path().join("device"))
                // The hook's addition is measured on a call that itself takes next to nothing.
                .env("GSHARE_SIM_CALL_NS", "0")
                .env("GSHARE_SOCKET", &socket)
                .env("GSHARE_NAME", "bench")
                .env("GSHARE_RUN", "1")
                .env("GSHARE_MEM", "8GiB")
                .status()
                .expect("this program starts");
            running.stop().expect("the daemon stops");
            assert!(status.success());
        }
    }
}
