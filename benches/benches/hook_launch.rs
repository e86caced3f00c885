//! What the hook adds to a launch, to an allocation and to a program's start, beside the bare call in the same run.
//!
//! The simulated driver's kernel `zero` costs nothing on the device, so that a bare launch is little more than the call.
//! The benchmark starts a daemon whose tokens last for the whole run (what is measured is the path, not the waiting) and
//! runs itself again under the hook. There `dlsym` gives the wrappers; the bare functions come from the C library's own
//! `dlsym`. After criterion's figures a table says what is added: medians of batches that alternate, bare and hooked.
//!
//! | row | what |
//! |---|---|
//! | `kernel`, `kernel_ex`, `graph` | one launch, by 1, 2 and 4 threads at once, each on a stream of its own |
//! | `alloc_free` | a pair of `cuMemAlloc` and `cuMemFree` of 1 MiB, with 0 and 10,000 live allocations |
//! | `start_up` | a program from its start to after its first launch |
#![allow(unsafe_code, reason = "the driver's C functions")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use criterion::Criterion;

type Kernel = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    c_uint,
    *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> c_int;
type KernelEx =
    unsafe extern "C" fn(*const LaunchConfig, *mut c_void, *mut *mut c_void, *mut *mut c_void) -> c_int;
type Two = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type Free = unsafe extern "C" fn(u64) -> c_int;
type Dlsym = unsafe extern "C" fn(*mut c_void, *const libc::c_char) -> *mut c_void;

/// The driver's `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *mut c_void,
    attributes: *mut c_void,
    count: c_uint,
}

/// The driver's `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
struct KernelNode {
    function: *mut c_void,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    pointers: [*mut c_void; 4],
}

/// One way to the driver's functions.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    driver: *mut c_void,
    dlsym: Dlsym,
}

// SAFETY: a handle of the loader's and a function.
unsafe impl Send for Way {}
// SAFETY: as above.
unsafe impl Sync for Way {}

impl Way {
    /// A function by its exported name.
    ///
    /// # Safety
    /// `F` must be the C signature of that function.
    unsafe fn get<F: Copy>(&self, name: &CStr) -> F {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: a loaded library and a C string.
        let found = unsafe { (self.dlsym)(self.driver, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        // SAFETY: as the caller promises.
        unsafe { std::mem::transmute_copy(&found) }
    }
}

/// Both ways, and a context with a kernel that costs nothing.
struct Setup {
    bare: Way,
    hooked: Way,
    context: *mut c_void,
    function: *mut c_void,
    graph: *mut c_void,
}

// SAFETY: handles of the driver's, which any thread may use.
unsafe impl Sync for Setup {}

fn ok(result: c_int) {
    assert_eq!(result, 0, "the driver refused");
}

impl Setup {
    fn new() -> Self {
        // SAFETY: C strings; libraries are loaded and functions called by their C signatures throughout.
        unsafe {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!driver.is_null(), "the simulated driver is on LD_LIBRARY_PATH");
            let c_library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW);
            let own = [c"GLIBC_2.34", c"GLIBC_2.2.5"]
                .map(|version| libc::dlvsym(c_library, c"dlsym".as_ptr(), version.as_ptr()))
                .into_iter()
                .find(|found| !found.is_null())
                .expect("the C library has a dlsym");
            let bare = Way { name: "bare", driver, dlsym: std::mem::transmute::<*mut c_void, Dlsym>(own) };
            let hooked = Way { name: "hooked", driver, dlsym: libc::dlsym };
            ok(hooked.get::<unsafe extern "C" fn(c_uint) -> c_int>(c"cuInit")(0));
            let mut context = null_mut();
            let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
                hooked.get(c"cuDevicePrimaryCtxRetain");
            ok(retain(&raw mut context, 0));
            ok(hooked.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(c"cuCtxSetCurrent")(context));
            let text = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry zero()\n{\nret;\n}\n";
            let (mut module, mut function) = (null_mut(), null_mut());
            let load: unsafe extern "C" fn(*mut *mut c_void, *const libc::c_char) -> c_int =
                hooked.get(c"cuModuleLoadData");
            ok(load(&raw mut module, text.as_ptr()));
            let find: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const libc::c_char) -> c_int =
                hooked.get(c"cuModuleGetFunction");
            ok(find(&raw mut function, module, c"zero".as_ptr()));
            let graph = graph(&hooked, function);
            Self { bare, hooked, context, function, graph }
        }
    }

    /// Makes the context current and a stream of the calling thread's own.
    fn stream(&self) -> *mut c_void {
        let mut stream = null_mut();
        // SAFETY: the driver's functions by their C signatures.
        unsafe {
            ok(self.hooked.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(c"cuCtxSetCurrent")(
                self.context,
            ));
            let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int =
                self.hooked.get(c"cuStreamCreate");
            ok(create(&raw mut stream, 1));
        }
        stream
    }

    fn destroy(&self, stream: *mut c_void) {
        // SAFETY: the driver's function by its C signature.
        unsafe {
            ok(self.hooked.get::<unsafe extern "C" fn(*mut c_void) -> c_int>(c"cuStreamDestroy_v2")(stream));
        }
    }
}

/// An executable graph of one kernel.
///
/// # Safety
/// The context of `function` must be current.
unsafe fn graph(way: &Way, function: *mut c_void) -> *mut c_void {
    let (mut graph, mut node, mut exec) = (null_mut(), null_mut(), null_mut());
    let kernel =
        KernelNode { function, grid: [1, 1, 1], block: [1, 1, 1], shared: 0, pointers: [null_mut(); 4] };
    type AddNode = unsafe extern "C" fn(
        *mut *mut c_void,
        *mut c_void,
        *const *mut c_void,
        usize,
        *const KernelNode,
    ) -> c_int;
    // SAFETY: the driver's functions by their C signatures.
    unsafe {
        let create: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int = way.get(c"cuGraphCreate");
        ok(create(&raw mut graph, 0));
        let add: AddNode = way.get(c"cuGraphAddKernelNode_v2");
        ok(add(&raw mut node, graph, null_mut(), 0, &raw const kernel));
        let instantiate: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, u64) -> c_int =
            way.get(c"cuGraphInstantiateWithFlags");
        ok(instantiate(&raw mut exec, graph, 0));
    }
    exec
}

/// A kind of launch.
#[derive(Clone, Copy)]
enum Kind {
    Kernel,
    KernelEx,
    Graph,
}

const KINDS: [(&str, Kind); 3] =
    [("kernel", Kind::Kernel), ("kernel_ex", Kind::KernelEx), ("graph", Kind::Graph)];

/// `count` launches on one stream; gives the time they took.
fn launches(setup: &Setup, way: Way, kind: Kind, stream: *mut c_void, count: u64) -> Duration {
    let f = setup.function;
    let nothing = null_mut();
    // SAFETY: the driver's functions by their C signatures, in a thread with the context.
    unsafe {
        match kind {
            Kind::Kernel => {
                let launch: Kernel = way.get(c"cuLaunchKernel");
                let start = Instant::now();
                for _ in 0..count {
                    launch(f, 1, 1, 1, 1, 1, 1, 0, stream, nothing, nothing);
                }
                start.elapsed()
            }
            Kind::KernelEx => {
                let launch: KernelEx = way.get(c"cuLaunchKernelEx");
                let config = LaunchConfig {
                    grid: [1, 1, 1],
                    block: [1, 1, 1],
                    shared: 0,
                    stream,
                    attributes: null_mut(),
                    count: 0,
                };
                let start = Instant::now();
                for _ in 0..count {
                    launch(&raw const config, f, nothing, nothing);
                }
                start.elapsed()
            }
            Kind::Graph => {
                let launch: Two = way.get(c"cuGraphLaunch");
                let start = Instant::now();
                for _ in 0..count {
                    launch(setup.graph, stream);
                }
                start.elapsed()
            }
        }
    }
}

/// The same by several threads at once; gives the mean of their times.
fn by_threads(setup: &Setup, way: Way, kind: Kind, threads: u32, count: u64) -> Duration {
    let barrier = Barrier::new(threads as usize);
    let work = || {
        let stream = setup.stream();
        launches(setup, way, kind, stream, 200);
        barrier.wait();
        let time = launches(setup, way, kind, stream, count);
        setup.destroy(stream);
        time
    };
    let total: Duration = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().map(|thread| thread.join().expect("no launch fails")).sum()
    });
    total / threads
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

/// Allocations that stay, made through the hook.
fn occupy(setup: &Setup, count: usize) -> Vec<u64> {
    // SAFETY: the driver's function by its C signature.
    let alloc: Alloc = unsafe { setup.hooked.get(c"cuMemAlloc_v2") };
    let take = |_| {
        let mut address = 0;
        // SAFETY: as above.
        ok(unsafe { alloc(&raw mut address, 4096) });
        address
    };
    (0..count).map(take).collect()
}

fn release(setup: &Setup, addresses: Vec<u64>) {
    // SAFETY: the driver's function by its C signature.
    let free: Free = unsafe { setup.hooked.get(c"cuMemFree_v2") };
    for address in addresses {
        // SAFETY: as above.
        ok(unsafe { free(address) });
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

fn criterion_figures(criterion: &mut Criterion, setup: &Setup, hook: &str) {
    let ways = [setup.bare, setup.hooked];
    for (name, kind) in KINDS {
        let mut group = criterion.benchmark_group(format!("hook_launch/{name}"));
        for threads in [1, 2, 4] {
            for way in ways {
                group.bench_function(format!("{threads}_threads/{}", way.name), |bencher| {
                    bencher.iter_custom(|count| by_threads(setup, way, kind, threads, count));
                });
            }
        }
        group.finish();
    }
    let mut group = criterion.benchmark_group("hook_launch/alloc_free");
    for live in [0, 10_000] {
        let kept = occupy(setup, live);
        for way in ways {
            group.bench_function(format!("{live}_live/{}", way.name), |bencher| {
                bencher.iter_custom(|count| pairs(way, count));
            });
        }
        release(setup, kept);
    }
    group.finish();
    let mut group = criterion.benchmark_group("hook_launch/start_up");
    group.sample_size(20);
    for (name, hook) in [("bare", None), ("hooked", Some(hook))] {
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|count| (0..count).map(|_| start_up(hook)).sum());
        });
    }
    group.finish();
}

/// Medians of `batches` batches of both ways in turn, in ns per unit.
fn medians(batches: usize, units: u64, mut measure: impl FnMut(bool, u64) -> Duration) -> (f64, f64) {
    let (mut bare, mut hooked) = (Vec::new(), Vec::new());
    for _ in 0..batches {
        #[allow(clippy::cast_precision_loss)] // a duration of a benchmark
        let mut per_unit = |is_hooked| measure(is_hooked, units).as_nanos() as f64 / units as f64;
        bare.push(per_unit(false));
        hooked.push(per_unit(true));
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    (median(bare), median(hooked))
}

fn table_of_what_is_added(setup: &Setup, hook: &str, quick: bool) {
    let way = |is_hooked: bool| if is_hooked { setup.hooked } else { setup.bare };
    let line = |name: String, (bare, hooked): (f64, f64)| {
        println!("{name:<28} {bare:>10.1} {hooked:>10.1} {:>10.1}", hooked - bare);
    };
    let (batches, count) = if quick { (3, 1_000) } else { (101, 50_000) };
    println!("{:<28} {:>10} {:>10} {:>10}", "ns", "bare", "hooked", "added");
    for (name, kind) in KINDS {
        for threads in [1, 2, 4] {
            let measure = |hooked, count| by_threads(setup, way(hooked), kind, threads, count);
            line(format!("{name}, {threads} threads"), medians(batches, count, measure));
        }
    }
    for live in [0, 10_000] {
        let kept = occupy(setup, live);
        let measure = |hooked, count| pairs(way(hooked), count);
        line(format!("alloc and free, {live} live"), medians(batches, count / 10, measure));
        release(setup, kept);
    }
    let measure = |hooked, _| start_up(Some(hook).filter(|_| hooked));
    line("start to first launch".into(), medians(if quick { 3 } else { 41 }, 1, measure));
}

/// Builds both libraries; gives the hook and a directory with the simulated driver.
fn build(place: &std::path::Path) -> (PathBuf, PathBuf) {
    let exe = std::env::current_exe().expect("a benchmark has a path");
    let target = exe.ancestors().nth(2).expect("target/PROFILE/deps/bench");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "-p", "gshare-hook", "-p", "gshare-fake-cuda"]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    if target.file_name().is_some_and(|name| name == "release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success());
    let driver = place.join("driver");
    std::fs::create_dir(&driver).expect("a temporary directory is writable");
    std::os::unix::fs::symlink(target.join("libfake_cuda.so"), driver.join("libcuda.so.1"))
        .expect("a temporary directory is writable");
    (target.join("libgshare_hook.so"), driver)
}

fn main() {
    let quick = std::env::args().any(|argument| argument == "--test");
    match std::env::var("GSHARE_BENCH_ROLE").as_deref() {
        Ok("first_launch") => {
            let setup = Setup::new();
            launches(&setup, setup.hooked, Kind::Kernel, null_mut(), 1);
        }
        Ok("hooked") => {
            let hook = std::env::var("LD_PRELOAD").expect("the hook is preloaded");
            // What this process starts is bare unless it says otherwise.
            let setup = Setup::new();
            let mut criterion = Criterion::default().configure_from_args();
            criterion_figures(&mut criterion, &setup, &hook);
            criterion.final_summary();
            table_of_what_is_added(&setup, &hook, quick);
        }
        _ => {
            let place = tempfile::tempdir().expect("a temporary directory");
            let (hook, driver) = build(place.path());
            let socket = place.path().join("gshare.sock");
            let mut config = gshared::Config::at(&socket);
            let long = gshare_core::Duration::from_secs(10);
            config.tokens.window = long;
            config.tokens.longest = long;
            config.in_flight = long;
            let running =
                gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs");
            let status = Command::new(std::env::current_exe().expect("a benchmark has a path"))
                .args(std::env::args_os().skip(1))
                .env("GSHARE_BENCH_ROLE", "hooked")
                .env("LD_PRELOAD", hook)
                .env("LD_LIBRARY_PATH", driver)
                .env("GSHARE_SIM_DEVICE", place.path().join("device"))
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
