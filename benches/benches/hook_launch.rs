//! The time that the hook adds to a launch, beside the bare call in the same run.
//!
//! The simulated driver's kernel `zero` costs nothing on the device, so a bare launch is little more than the call. The benchmark
//! starts a daemon with tokens for the whole run, to measure the path and not the waiting, and runs itself again under the hook.
//! There `dlsym` gives the wrappers; the bare functions come from the C library's own `dlsym`. A table has the additions beside
//! their aims: medians of batches that alternate, bare and hooked. `added` is by the clock. With more
//! threads than CPUs the clock counts the other threads' turns, so the addition `of a CPU` stands beside it.
//!
//! The rows `kernel`, `kernel_ex` and `graph` have one launch, by 1, 2 and 4 threads at once, each on a stream of its own.

use std::sync::Barrier;
use std::time::Duration;

mod hook_common;
use hook_common::{KINDS, Kind, SIMULATED, Setup, Time, Way, launches, run_hooked};

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

/// Median of `batches` batches of both ways in turn, by the clock and of a CPU, in ns per launch: bare and hooked.
fn medians(batches: usize, count: u64, measure: impl Fn(bool) -> Time) -> [[f64; 2]; 2] {
    let mut all = [const { [const { Vec::new() }; 2] }; 2];
    for _ in 0..batches {
        for (way, is_hooked) in [false, true].into_iter().enumerate() {
            let Time { wall, cpu } = measure(is_hooked);
            for (of_clock, time) in all.iter_mut().zip([wall, cpu]) {
                of_clock[way].push(time);
            }
        }
    }
    #[allow(clippy::cast_precision_loss)] // a duration of a benchmark
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_nanos() as f64 / count as f64
    };
    all.map(|ways| ways.map(median))
}

fn table_of_what_is_added(setup: &Setup, quick: bool) {
    let (batches, count) = if quick { (3, 1_000) } else { (101, 50_000) };
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cpus} CPUs");
    println!("{:<28} {:>10} {:>10} {:>10} {:>10} {:>10}", "ns", "bare", "hooked", "added", "of a CPU", "aim");
    for (name, kind) in KINDS {
        for threads in [1, 2, 4] {
            let way = |is_hooked| if is_hooked { setup.hooked } else { setup.bare };
            let measure = |is_hooked| by_threads(setup, way(is_hooked), kind, threads, count);
            let [[bare, hooked], [bare_cpu, hooked_cpu]] = medians(batches, count, measure);
            let (added, of_a_cpu, aim) =
                (hooked - bare, hooked_cpu - bare_cpu, if threads == 1 { 10 } else { 20 });
            let name = format!("{name}, {threads} threads");
            println!("{name:<28} {bare:>10.1} {hooked:>10.1} {added:>10.1} {of_a_cpu:>10.1} {aim:>10}");
        }
    }
}

fn main() {
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("hooked") {
        return table_of_what_is_added(&Setup::new("zero", 1), gshare_bench::runs_as_test());
    }
    // The hook's addition is measured on a call that itself takes next to nothing.
    run_hooked(SIMULATED, &[("GSHARE_SIM_CALL_NS", "0"), ("GSHARE_RUN", "1")]);
}
