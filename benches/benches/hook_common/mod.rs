//! The common parts of the hook's benchmarks: the driver's C functions, a context with a kernel, the two libraries, and the
//! simulated device's own account of all events.
#![allow(unsafe_code, reason = "the driver's C functions")]
#![allow(dead_code, unreachable_pub, unused_imports, reason = "each benchmark uses its part")]

use gshare_core::{QuotaRange, ResourceSpec, SmShare};
use gshare_cuda_abi::signature;
use gshare_cuda_abi::types::{CUresult, sys};
use object::{Object, ObjectSymbol};
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

pub type Dlsym = unsafe extern "C" fn(*mut c_void, *const libc::c_char) -> *mut c_void;

/// One way to the driver's functions.
#[derive(Clone, Copy)]
pub struct Way {
    pub name: &'static str,
    driver: *mut c_void,
    dlsym: Dlsym,
}

// SAFETY: a handle of the loader's and a function.
unsafe impl Send for Way {}
// SAFETY: as above.
unsafe impl Sync for Way {}

impl Way {
    /// The address of a function by its exported name.
    pub fn address(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a loaded library and a C string.
        let found = unsafe { (self.dlsym)(self.driver, name.as_ptr()) };
        assert!(!found.is_null(), "{name:?}");
        found
    }
}

/// The driver's function of this name, on a [`Way`].
macro_rules! driver {
    ($way:expr, $name:ident) => {{
        let name =
            CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()).expect("a C string");
        #[allow(unused_unsafe, reason = "a caller may stand in an unsafe block")]
        // SAFETY: the driver's function of this name has this signature.
        let function = unsafe {
            std::mem::transmute::<*mut c_void, gshare_cuda_abi::signature::$name>($way.address(name))
        };
        function
    }};
}
pub(crate) use driver;

/// Both ways, and a context with a kernel that costs nothing.
pub struct Setup {
    pub bare: Way,
    pub hooked: Way,
    context: sys::CUcontext,
    pub function: sys::CUfunction,
    pub graph: sys::CUgraphExec,
}

// SAFETY: handles of the driver's, which any thread may use.
unsafe impl Sync for Setup {}

pub fn ok(result: CUresult) {
    assert!(result.is_ok(), "the driver refused: {result:?}");
}

/// A function by the symbol table in the library's own file. The hook answers each look-up of the loader, so that even `dlvsym` for
/// the C library's `dlsym` gives the hook's.
///
/// # Safety
/// `library` must be a handle of `dlopen`.
unsafe fn symbol_of(library: *mut c_void, name: &CStr) -> *mut c_void {
    /// The beginning of glibc's `link_map`, which a handle of `dlopen` points to.
    #[repr(C)]
    struct LinkMap {
        address: usize,
        path: *const libc::c_char,
    }
    // SAFETY: as the caller promises; the library stays loaded.
    let (map, path) = unsafe {
        let map = &*library.cast::<LinkMap>();
        (map, CStr::from_ptr(map.path))
    };
    let bytes = std::fs::read(path.to_str().expect("a path in UTF-8")).expect("the library's file");
    let file = object::File::parse(&*bytes).expect("an ELF library");
    let mut symbols = file.dynamic_symbols();
    let found = symbols.find(|symbol| symbol.is_definition() && symbol.name_bytes() == Ok(name.to_bytes()));
    let offset = found.expect("the library defines it").address();
    (map.address + usize::try_from(offset).expect("an address of this machine")) as *mut c_void
}

impl Setup {
    /// With a kernel of this name and a graph of `nodes` of them.
    pub fn new(kernel: &str, nodes: usize) -> Self {
        // SAFETY: C strings; libraries are loaded and functions called by their C signatures throughout.
        unsafe {
            let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW);
            assert!(!driver.is_null(), "the simulated driver is on LD_LIBRARY_PATH");
            let c_library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_NOW);
            let own = symbol_of(c_library, c"dlsym");
            let bare = Way { name: "bare", driver, dlsym: std::mem::transmute::<*mut c_void, Dlsym>(own) };
            let hooked = Way { name: "hooked", driver, dlsym: libc::dlsym };
            ok(driver!(hooked, cuInit)(0));
            let mut context = null_mut();
            ok(driver!(hooked, cuDevicePrimaryCtxRetain)(&raw mut context, 0));
            ok(driver!(hooked, cuCtxSetCurrent)(context));
            let text = format!(
                ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry {kernel}()\n{{\nret;\n}}\n"
            );
            let text = CString::new(text).expect("no zero byte");
            let kernel = CString::new(kernel).expect("no zero byte");
            let (mut module, mut function) = (null_mut(), null_mut());
            ok(driver!(hooked, cuModuleLoadData)(&raw mut module, text.as_ptr().cast()));
            ok(driver!(hooked, cuModuleGetFunction)(&raw mut function, module, kernel.as_ptr()));
            let graph = graph(&hooked, function, nodes);
            Self { bare, hooked, context, function, graph }
        }
    }

    /// Makes the context current and a stream of the calling thread's own.
    pub fn stream(&self) -> sys::CUstream {
        let mut stream = null_mut();
        // SAFETY: the driver's functions by their C signatures.
        unsafe {
            ok(driver!(self.hooked, cuCtxSetCurrent)(self.context));
            ok(driver!(self.hooked, cuStreamCreate)(&raw mut stream, 1));
        }
        stream
    }

    pub fn destroy(&self, stream: sys::CUstream) {
        // SAFETY: a stream of this context.
        ok(unsafe { driver!(self.hooked, cuStreamDestroy_v2)(stream) });
    }
}

/// An executable graph of kernels, one after the other.
///
/// # Safety
/// The context of `function` must be current.
unsafe fn graph(way: &Way, function: sys::CUfunction, nodes: usize) -> sys::CUgraphExec {
    let (mut graph, mut node, mut exec) = (null_mut(), null_mut(), null_mut());
    // SAFETY: integers and pointers that may be null; the driver's functions by their C signatures.
    unsafe {
        let mut kernel: sys::CUDA_KERNEL_NODE_PARAMS_v2 = std::mem::zeroed();
        kernel.func = function;
        (kernel.gridDimX, kernel.gridDimY, kernel.gridDimZ) = (1, 1, 1);
        (kernel.blockDimX, kernel.blockDimY, kernel.blockDimZ) = (1, 1, 1);
        ok(driver!(way, cuGraphCreate)(&raw mut graph, 0));
        let add = driver!(way, cuGraphAddKernelNode_v2);
        for already in 0..nodes {
            let before = node;
            ok(add(&raw mut node, graph, &raw const before, already.min(1), &raw const kernel));
        }
        ok(driver!(way, cuGraphInstantiateWithFlags)(&raw mut exec, graph, 0));
    }
    exec
}

/// A kind of launch.
#[derive(Clone, Copy)]
pub enum Kind {
    Kernel,
    KernelEx,
    Graph,
}

pub const KINDS: [(&str, Kind); 3] =
    [("kernel", Kind::Kernel), ("kernel_ex", Kind::KernelEx), ("graph", Kind::Graph)];

/// Time that work took a thread: by the clock, and of a CPU. With more threads than CPUs the first counts the others, too.
#[derive(Clone, Copy, Debug, Default)]
pub struct Time {
    pub wall: Duration,
    pub cpu: Duration,
}

struct Watch(Instant, Duration);

impl Watch {
    fn start() -> Self {
        Self(Instant::now(), cpu_time())
    }

    fn time(&self) -> Time {
        let cpu = cpu_time() - self.1;
        Time { wall: self.0.elapsed(), cpu }
    }
}

/// CPU time of the calling thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).expect("CPU time is not negative")
}

/// A driver function that launches, looked up once: to look it up costs more than a launch.
#[derive(Clone, Copy)]
enum Launch {
    Kernel(signature::cuLaunchKernel),
    KernelEx(signature::cuLaunchKernelEx),
    Graph(signature::cuGraphLaunch),
}

impl Launch {
    fn of(way: Way, kind: Kind) -> Self {
        match kind {
            Kind::Kernel => Self::Kernel(driver!(way, cuLaunchKernel)),
            Kind::KernelEx => Self::KernelEx(driver!(way, cuLaunchKernelEx)),
            Kind::Graph => Self::Graph(driver!(way, cuGraphLaunch)),
        }
    }

    /// Launches `count` times; the calling thread has the context.
    #[inline]
    fn repeat(self, setup: &Setup, stream: sys::CUstream, count: u64) {
        let (f, nothing) = (setup.function, null_mut());
        // SAFETY: the driver's functions by their C signatures, with handles of this context.
        unsafe {
            match self {
                Self::Kernel(launch) => {
                    for _ in 0..count {
                        _ = launch(f, 1, 1, 1, 1, 1, 1, 0, stream, nothing, nothing);
                    }
                }
                Self::KernelEx(launch) => {
                    let mut config: sys::CUlaunchConfig = std::mem::zeroed();
                    (config.gridDimX, config.gridDimY, config.gridDimZ) = (1, 1, 1);
                    (config.blockDimX, config.blockDimY, config.blockDimZ) = (1, 1, 1);
                    config.hStream = stream;
                    for _ in 0..count {
                        _ = launch(&raw const config, f, nothing, nothing);
                    }
                }
                Self::Graph(launch) => {
                    for _ in 0..count {
                        _ = launch(setup.graph, stream);
                    }
                }
            }
        }
    }
}

/// `count` launches on one stream; gives the time they took.
pub fn launches(setup: &Setup, way: Way, kind: Kind, stream: sys::CUstream, count: u64) -> Time {
    let launch = Launch::of(way, kind);
    let watch = Watch::start();
    launch.repeat(setup, stream, count);
    watch.time()
}

/// Waits for the device.
pub fn synchronise(setup: &Setup) {
    // SAFETY: the context is current.
    ok(unsafe { driver!(setup.hooked, cuCtxSynchronize)() });
}

/// The step of a program that follows each launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Launch,
    Synchronise,
    /// Synchronises, and then sleeps for this time.
    Pause(Duration),
}

/// Launches until the process that started this one is gone.
pub fn launch_forever(setup: &Setup, kind: Kind, stream: sys::CUstream, then: Then) -> ! {
    let parent = std::os::unix::process::parent_id();
    let launch = Launch::of(setup.hooked, kind);
    let wait = driver!(setup.hooked, cuCtxSynchronize);
    while std::os::unix::process::parent_id() == parent {
        launch.repeat(setup, stream, 1);
        if then != Then::Launch {
            // SAFETY: as above.
            ok(unsafe { wait() });
        }
        if let Then::Pause(pause) = then {
            std::thread::sleep(pause);
        }
    }
    std::process::exit(0)
}

/// Launches kernels and counts them until it is told to stop.
pub fn launch_and_count(setup: &Setup, stream: sys::CUstream, count: &AtomicU64, stop: &AtomicBool) {
    let launch = Launch::of(setup.hooked, Kind::Kernel);
    while !stop.load(Relaxed) {
        launch.repeat(setup, stream, 20);
        count.fetch_add(20, Relaxed);
    }
}

/// The library of the simulated driver.
pub const SIMULATED: &str = "libfake_cuda.so";

/// The hook and a directory with a driver's library; cargo builds both beside the benchmark, which depends on them.
pub fn build(place: &Path, library: &str) -> (PathBuf, PathBuf) {
    let exe = std::env::current_exe().expect("a benchmark has a path");
    let deps = exe.parent().expect("a benchmark lies in a folder");
    let driver = place.join("driver");
    std::fs::create_dir(&driver).expect("a temporary directory is writable");
    std::os::unix::fs::symlink(deps.join(library), driver.join("libcuda.so.1"))
        .expect("a temporary directory is writable");
    (deps.join("libgshare_hook.so"), driver)
}

/// Starts this benchmark again in another role, on the simulated device at `place`.
pub fn role(role: &str, place: &Path, driver: &Path, hook: Option<&Path>) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a benchmark has a path"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("GSHARE_") {
            command.env_remove(name);
        }
    }
    command
        .env("GSHARE_BENCH_ROLE", role)
        .env("LD_LIBRARY_PATH", driver)
        .env("GSHARE_SIM_DEVICE", place.join("device"))
        .env_remove("LD_PRELOAD")
        .env_remove("CUDA_VISIBLE_DEVICES");
    if let Some(hook) = hook {
        command.env("LD_PRELOAD", hook).env("GSHARE_SOCKET", place.join("gshare.sock"));
    }
    command
}

/// Runs this benchmark again under the hook, on a driver's library, beside a daemon that gives tokens for the whole run: the path is
/// measured, and not the waiting.
pub fn run_hooked(library: &str, variables: &[(&str, &str)]) {
    let status = hooked(library, variables, |mut command| command.status().expect("this program starts"));
    assert!(status.success());
}

/// As `run_hooked`; gives the output.
pub fn output_of_hooked(library: &str, variables: &[(&str, &str)]) -> String {
    let run = |mut command: Command| command.stderr(Stdio::inherit()).output().expect("this program starts");
    let output = hooked(library, variables, run);
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("output in UTF-8")
}

fn hooked<T>(library: &str, variables: &[(&str, &str)], run: impl FnOnce(Command) -> T) -> T {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (hook, driver) = build(place.path(), library);
    let mut config = gshared::Config::at(place.path().join("gshare.sock"));
    let long = gshare_core::Duration::from_secs(10);
    (config.window, config.token, config.in_flight) = (long, long, long);
    let running = gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs");
    let mut command = role("hooked", place.path(), &driver, Some(&hook));
    command.args(std::env::args_os().skip(1)).envs([("GSHARE_NAME", "bench"), ("GSHARE_MEM", "8GiB")]);
    command.envs(variables.iter().copied());
    let done = run(command);
    running.stop().expect("the daemon stops");
    done
}

/// Programs under way; they end with this.
pub struct Programs(pub Vec<Child>);

impl Programs {
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(Child::id).collect()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A daemon at `place`, with shares of time (`0.3:0.8`) for these names.
pub fn daemon(place: &Path, shares: impl IntoIterator<Item = (String, String)>) -> gshared::Running {
    let mut config = gshared::Config::at(place.join("gshare.sock"));
    for (name, quota) in shares {
        let quota: QuotaRange = quota.parse().expect("a share");
        let spec = ResourceSpec::new(quota, SmShare::WHOLE, None).expect("a spec");
        config.clients.entry(name).or_default().spec = Some(spec);
    }
    gshared::Daemon::new(config).and_then(gshared::Daemon::spawn).expect("the daemon runs")
}

/// The names of the bars that were missed.
pub fn missed(bars: &[(bool, &'static str)]) -> Vec<&'static str> {
    bars.iter().filter_map(|&(beyond, what)| beyond.then_some(what)).collect()
}

/// The simulated device's own account, read through its library.
pub struct Truth {
    look: Look,
    device: CString,
    watched: Vec<Watched>,
}

type Look = unsafe extern "C" fn(*const libc::c_char, *mut Watched, usize) -> i64;

/// The simulated driver's `Watched`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Watched {
    pid: u32,
    slot: u32,
    busy_ns: u64,
}

impl Truth {
    pub fn of(place: &Path, driver: &Path) -> Self {
        let path = |path: &Path| CString::new(path.to_str().expect("a UTF-8 path")).expect("no zero byte");
        let library = path(&driver.join("libcuda.so.1"));
        // SAFETY: a library of this project, and its function by its C signature.
        let look = unsafe {
            let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW);
            assert!(!library.is_null(), "the simulated driver was built");
            let found = libc::dlsym(library, c"gshare_sim_watch".as_ptr());
            assert!(!found.is_null(), "the simulated driver tells the truth");
            std::mem::transmute::<*mut c_void, Look>(found)
        };
        Self { look, device: path(&place.join("device")), watched: Vec::new() }
    }

    /// The instant on `CLOCK_MONOTONIC`, and for how long a kernel of each of these processes has run by then, both in ns.
    pub fn now(&mut self, pids: &[u32]) -> (u64, Vec<u64>) {
        if !self.watched.iter().map(|watched| watched.pid).eq(pids.iter().copied()) {
            self.watched = pids.iter().map(|&pid| Watched { pid, slot: 0, busy_ns: 0 }).collect();
        }
        // SAFETY: a C string, and an array with its length.
        let now = unsafe { (self.look)(self.device.as_ptr(), self.watched.as_mut_ptr(), self.watched.len()) };
        let now = u64::try_from(now).expect("the device can be read");
        (now, self.watched.iter().map(|watched| watched.busy_ns).collect())
    }
}
