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
//!
//! `--only TEXT` for the calls with this text in their names.
#![allow(unsafe_code, reason = "the driver's C functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::time::Duration;

mod hook_common;
use hook_common::{Alloc, Free, Kind, Setup, Way, launches, ok};

type OnHandle = unsafe extern "C" fn(*mut c_void) -> c_int;
type Two = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int;
type Copy = unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> c_int;
type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
type Find = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_uint) -> c_int;

/// One kind of call: its name, its bar in ns, and a batch of so many, which gives its CPU time.
struct Call {
    name: &'static str,
    bar: Option<f64>,
    batch: Box<dyn Fn(Way, u64) -> Duration>,
}

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
fn of_handle(name: &'static CStr, handle: usize, way: Way, count: u64) -> Duration {
    let handle = std::ptr::with_exposed_provenance_mut(handle);
    // SAFETY: the driver's function by its C signature, with a handle of this context.
    unsafe {
        let call: OnHandle = way.get(name);
        timed(count, || _ = call(handle))
    }
}

fn calls(setup: &'static Setup) -> Vec<Call> {
    let stream = setup.stream().expose_provenance();
    let on = move || std::ptr::with_exposed_provenance_mut::<c_void>(stream);
    let mut event = null_mut();
    // SAFETY: the driver's functions by their C signatures, here and in the batches below.
    let address = unsafe {
        ok(setup.hooked.get::<Create>(c"cuEventCreate")(&raw mut event, 0));
        ok(setup.hooked.get::<Two>(c"cuEventRecord")(event, on()));
        let mut address = 0;
        ok(setup.hooked.get::<Alloc>(c"cuMemAlloc_v2")(&raw mut address, 4096));
        address
    };
    let event = event.expose_provenance();
    let call = |name, bar, batch: Box<dyn Fn(Way, u64) -> Duration>| Call { name, bar, batch };
    vec![
        call("launch", Some(60.0), Box::new(move |way, n| launches(setup, way, Kind::Kernel, on(), n).cpu)),
        call(
            "graph launch",
            Some(60.0),
            Box::new(move |way, n| launches(setup, way, Kind::Graph, on(), n).cpu),
        ),
        call(
            "launch, synchronise",
            Some(58.0),
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let launch: hook_common::Kernel = way.get(c"cuLaunchKernel");
                let wait: OnHandle = way.get(c"cuStreamSynchronize");
                timed(n, || {
                    launch(setup.function, 1, 1, 1, 1, 1, 1, 0, on(), null_mut(), null_mut());
                    wait(on());
                })
            }),
        ),
        call(
            "copy",
            None,
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let (copy, bytes): (Copy, [u8; 64]) = (way.get(c"cuMemcpyHtoDAsync_v2"), [0; 64]);
                timed(n, || _ = copy(address, bytes.as_ptr().cast(), bytes.len(), on()))
            }),
        ),
        call(
            "stream synchronise",
            Some(20.0),
            Box::new(move |way, n| of_handle(c"cuStreamSynchronize", stream, way, n)),
        ),
        call("stream query", Some(20.0), Box::new(move |way, n| of_handle(c"cuStreamQuery", stream, way, n))),
        call(
            "event synchronise",
            Some(20.0),
            Box::new(move |way, n| of_handle(c"cuEventSynchronize", event, way, n)),
        ),
        call("event query", Some(20.0), Box::new(move |way, n| of_handle(c"cuEventQuery", event, way, n))),
        call(
            "event record",
            Some(20.0),
            // SAFETY: as above.
            Box::new(move |way, n| unsafe {
                let record: Two = way.get(c"cuEventRecord");
                timed(n, || _ = record(std::ptr::with_exposed_provenance_mut(event), on()))
            }),
        ),
        call(
            "stream create, destroy",
            Some(94.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (create, destroy): (Create, OnHandle) =
                    (way.get(c"cuStreamCreate"), way.get(c"cuStreamDestroy_v2"));
                let mut made = null_mut();
                timed(n, || {
                    create(&raw mut made, 1);
                    destroy(made);
                })
            }),
        ),
        call(
            "alloc, free",
            Some(870.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (alloc, free): (Alloc, Free) = (way.get(c"cuMemAlloc_v2"), way.get(c"cuMemFree_v2"));
                let mut address = 0;
                timed(n, || {
                    alloc(&raw mut address, 1 << 20);
                    free(address);
                })
            }),
        ),
        call(
            "memory info",
            Some(1_100.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (get, mut free, mut total): (Info, usize, usize) = (way.get(c"cuMemGetInfo_v2"), 0, 0);
                timed(n, || _ = get(&raw mut free, &raw mut total))
            }),
        ),
        call(
            "look-up by dlsym",
            Some(100.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                timed(n, || _ = std::hint::black_box(way.get::<*mut c_void>(c"cuLaunchKernel")))
            }),
        ),
        call(
            "cuGetProcAddress",
            Some(7_300.0),
            // SAFETY: as above.
            Box::new(|way, n| unsafe {
                let (find, mut found): (Find, *mut c_void) = (way.get(c"cuGetProcAddress_v2"), null_mut());
                timed(n, || _ = find(c"cuLaunchKernel".as_ptr(), &raw mut found, 12_080, 0, null_mut()))
            }),
        ),
    ]
}

#[allow(clippy::cast_precision_loss, reason = "a report")]
fn table(quick: bool, only: &str) {
    let setup: &'static Setup = Box::leak(Box::new(Setup::new("zero", 1)));
    let (batches, count) = if quick { (3, 100) } else { (61, 10_000) };
    println!("{:<24} {:>9} {:>9} {:>9} {:>9}", "ns", "bare", "hooked", "added", "bar");
    for Call { name, bar, batch } in calls(setup).iter().filter(|call| call.name.contains(only)) {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..batches {
            for (way, times) in [setup.bare, setup.hooked].into_iter().zip(&mut times) {
                times.push(batch(way, count).as_nanos() as f64 / count as f64);
            }
        }
        let [bare, hooked] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        let bar = bar.map_or("-".into(), |bar| format!("{bar:.0}"));
        println!("{name:<24} {bare:>9.1} {hooked:>9.1} {:>9.1} {bar:>9}", hooked - bare);
    }
}

fn main() {
    let argument = |name: &str| std::env::args().skip_while(|argument| argument != name).nth(1);
    let only = argument("--only").unwrap_or_default();
    if std::env::var("GSHARE_BENCH_ROLE").as_deref() == Ok("hooked") {
        return table(gshare_bench::runs_as_test(), &only);
    }
    hook_common::run_hooked("libstub_driver.so", &[]);
}
