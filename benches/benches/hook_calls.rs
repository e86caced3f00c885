//! The time that the hook adds to each intercepted call, beside the bare call in the same run.
//!
//! The driver is `benches/stub-driver`: its calls take next to nothing, so the addition stands out. A daemon gives tokens for the
//! whole run. Batches of bare and hooked calls take turns. The figures are medians of the CPU time of a batch, since the clock also
//! counts the turns of other programs.
//!
//! | column | what |
//! |---|---|
//! | `bare`, `hooked` | CPU time of one call, in ns |
//! | `added` | the difference of the medians |
//! | `bar` | the most that it should be, where there is a bar |
//! | `park adds` | what parking adds to this, in a process that can be parked (`GSHARE_PARK=1`) and is not |
//! | `bar` | the most that it should be; `missed` behind a line says that it is more |
//!
//! Processes without and with parking take turns too, and the figure of parking is the median over its turns.
//!
//! `--only TEXT` for the calls with this text in their names.
#![allow(unsafe_code, reason = "the driver's C functions")]

use gshare_cuda_abi::types::CUresult;
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::time::Duration;

mod hook_common;
use hook_common::{Kind, Setup, Way, driver, launches, ok};

/// One kind of call: its name, its bar in ns, and a batch of so many, which gives its CPU time.
struct Call {
    name: &'static str,
    bar: Option<f64>,
    batch: Box<dyn Fn(Way, u64) -> Duration>,
}

/// The most that parking may add to a call: so many ns, or until the call takes so many times as long.
enum Bar {
    Ns(f64),
    Times(f64),
}

const PARKING: [(&str, Bar); 3] =
    [("launch", Bar::Ns(1.0)), ("alloc, free", Bar::Ns(100.0)), (LARGE, Bar::Times(1.5))];
const LARGE: &str = "alloc, free 1 GiB";

/// CPU time of the calling thread for `count` calls.
fn timed(count: u64, mut call: impl FnMut()) -> Duration {
    let now = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::try_from(time).expect("CPU time is not negative")
    };
    let began = now();
    (0..count).for_each(|_| call());
    now() - began
}

/// Calls of a function that takes one handle.
fn of_handle<H: Copy>(call: unsafe extern "C" fn(H) -> CUresult, handle: H, count: u64) -> Duration {
    // SAFETY: the driver's function, with a handle of this context.
    timed(count, || _ = unsafe { call(handle) })
}

/// Pairs of an allocation of so many bytes and its end.
fn allocations(way: Way, count: u64, bytes: usize) -> Duration {
    let (alloc, free) = (driver!(way, cuMemAlloc_v2), driver!(way, cuMemFree_v2));
    let mut address = 0;
    // SAFETY: the driver's functions, with memory of this context.
    timed(count, || unsafe {
        ok(alloc(&raw mut address, bytes));
        ok(free(address));
    })
}

fn calls(setup: &'static Setup) -> Vec<Call> {
    let stream = setup.stream();
    let (mut event, mut address) = (null_mut(), 0);
    // SAFETY: the driver's functions with objects of this context, here and in the batches below.
    unsafe {
        ok(driver!(setup.hooked, cuEventCreate)(&raw mut event, 0));
        ok(driver!(setup.hooked, cuEventRecord)(event, stream));
        ok(driver!(setup.hooked, cuMemAlloc_v2)(&raw mut address, 4096));
    }
    let call = |name, bar, batch: Box<dyn Fn(Way, u64) -> Duration>| Call { name, bar, batch };
    vec![
        call("launch", Some(60.0), Box::new(move |way, n| launches(setup, way, Kind::Kernel, stream, n).cpu)),
        call(
            "graph launch",
            Some(60.0),
            Box::new(move |way, n| launches(setup, way, Kind::Graph, stream, n).cpu),
        ),
        call(
            "launch, synchronise",
            Some(58.0),
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let (launch, wait) = (driver!(way, cuLaunchKernel), driver!(way, cuStreamSynchronize));
                timed(n, || {
                    _ = launch(setup.function, 1, 1, 1, 1, 1, 1, 0, stream, null_mut(), null_mut());
                    _ = wait(stream);
                })
            }),
        ),
        call(
            "copy",
            None,
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let (copy, bytes) = (driver!(way, cuMemcpyHtoDAsync_v2), [0u8; 64]);
                timed(n, || _ = copy(address, bytes.as_ptr().cast(), bytes.len(), stream))
            }),
        ),
        call(
            "stream synchronise",
            Some(20.0),
            Box::new(move |way, n| of_handle(driver!(way, cuStreamSynchronize), stream, n)),
        ),
        call(
            "stream query",
            Some(20.0),
            Box::new(move |way, n| of_handle(driver!(way, cuStreamQuery), stream, n)),
        ),
        call(
            "event synchronise",
            Some(20.0),
            Box::new(move |way, n| of_handle(driver!(way, cuEventSynchronize), event, n)),
        ),
        call(
            "event query",
            Some(20.0),
            Box::new(move |way, n| of_handle(driver!(way, cuEventQuery), event, n)),
        ),
        call(
            "event record",
            Some(20.0),
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let record = driver!(way, cuEventRecord);
                timed(n, || _ = record(event, stream))
            }),
        ),
        call(
            "stream create, destroy",
            Some(94.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (create, destroy) = (driver!(way, cuStreamCreate), driver!(way, cuStreamDestroy_v2));
                let mut made = null_mut();
                timed(n, || {
                    _ = create(&raw mut made, 1);
                    _ = destroy(made);
                })
            }),
        ),
        call("alloc, free", Some(870.0), Box::new(|way, n| allocations(way, n, 1 << 20))),
        call(LARGE, None, Box::new(|way, n| allocations(way, n, 1 << 30))),
        call(
            "memory info",
            Some(1_100.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (get, mut free, mut total) = (driver!(way, cuMemGetInfo_v2), 0, 0);
                timed(n, || _ = get(&raw mut free, &raw mut total))
            }),
        ),
        call(
            "look-up by dlsym",
            Some(100.0),
            Box::new(|way, n| timed(n, || _ = std::hint::black_box(way.address(c"cuLaunchKernel")))),
        ),
        call(
            "cuGetProcAddress",
            Some(7_300.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (find, mut found) = (driver!(way, cuGetProcAddress_v2), null_mut());
                timed(n, || _ = find(c"cuLaunchKernel".as_ptr(), &raw mut found, 12_080, 0, null_mut()))
            }),
        ),
    ]
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures each call in this process, and prints its name, its bar, and its bare and its hooked time.
#[allow(clippy::cast_precision_loss, reason = "a report")]
fn measure(quick: bool, only: &str) {
    let setup: &'static Setup = Box::leak(Box::new(Setup::new("zero", 1)));
    let (batches, count) = if quick { (3, 100) } else { (13, 10_000) };
    for Call { name, bar, batch } in calls(setup).iter().filter(|call| call.name.contains(only)) {
        // The daemon is asked for so much memory each time.
        let count = if *name == LARGE { count / 10 } else { count };
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..batches {
            for (way, times) in [setup.bare, setup.hooked].into_iter().zip(&mut times) {
                times.push(batch(way, count).as_nanos() as f64 / count as f64);
            }
        }
        let [bare, hooked] = times.map(median);
        println!("{name}\t{}\t{bare}\t{hooked}", bar.map_or("-".into(), |bar| format!("{bar:.0}")));
    }
}

/// A call's name and bar, and its bare and hooked times in each turn: without parking, and with it.
struct Seen {
    name: String,
    bar: String,
    times: [Vec<[f64; 2]>; 2],
}

/// Runs processes without and with parking in turns.
fn turns(turns: usize) -> Vec<Seen> {
    let mut seen: Vec<Seen> = Vec::new();
    for _ in 0..turns {
        for (parks, value) in ["0", "1"].into_iter().enumerate() {
            let output = hook_common::output_of_hooked("libstub_driver.so", &[("GSHARE_PARK", value)]);
            for (row, line) in output.lines().enumerate() {
                let parts: Vec<&str> = line.split('\t').collect();
                let [name, bar, bare, hooked] = parts[..] else { panic!("not a line of a table: {line}") };
                if row == seen.len() {
                    seen.push(Seen { name: name.into(), bar: bar.into(), times: Default::default() });
                }
                seen[row].times[parks].push([bare, hooked].map(|time| time.parse().expect("a time")));
            }
        }
    }
    seen
}

fn table(seen: &[Seen]) {
    let head = ["bare", "hooked", "added", "bar", "park adds", "bar"].map(|word| format!("{word:>9}"));
    println!("{:<24} {}", "ns", head.join(" "));
    for Seen { name, bar, times: [without, with] } in seen {
        let added = |[bare, hooked]: &[f64; 2]| hooked - bare;
        let [bare, hooked] = [0, 1].map(|way| median(without.iter().map(|times| times[way]).collect()));
        let park =
            median(without.iter().zip(with).map(|(without, with)| added(with) - added(without)).collect());
        let most = PARKING.iter().find(|(of, _)| of == name).map(|(_, bar)| match bar {
            Bar::Ns(ns) => *ns,
            Bar::Times(times) => (times - 1.0) * hooked,
        });
        let of_park = most.map_or("-".into(), |most| format!("{most:.0}"));
        let missed = if most.is_some_and(|most| park > most) { " missed" } else { "" };
        println!(
            "{name:<24} {bare:>9.1} {hooked:>9.1} {:>9.1} {bar:>9} {park:>9.1} {of_park:>9}{missed}",
            median(without.iter().map(added).collect())
        );
    }
}

fn main() {
    let argument = |name: &str| std::env::args().skip_while(|argument| argument != name).nth(1);
    let (quick, only) = (gshare_bench::runs_as_test(), argument("--only").unwrap_or_default());
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("hooked") {
        return measure(quick, &only);
    }
    table(&turns(if quick { 1 } else { 7 }));
}
