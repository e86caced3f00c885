//! Each test runs in a process of its own with a device of its own and the library under the driver's name. There it looks functions up by
//! name and calls them with the table's signatures, as a C program would.
#![allow(unsafe_code, dead_code, unreachable_pub)] // a C client; each test file uses its part

use std::ffi::{CString, c_void};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

pub use gshare_cuda_abi::signature;
pub use gshare_cuda_abi::types::*;

pub const OK: CUresult = CUresult::CUDA_SUCCESS;

/// Runs `body` in a fresh process: `profile` and further environment for it.
pub fn isolated(test: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var("SIM_TEST").is_ok_and(|t| t == test) {
        body();
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let status = command(dir.path(), test, env).status().unwrap();
    assert!(status.success(), "{test} in its own process: {status}");
}

/// The command that runs this test executable's `test` with the device in `dir`.
pub fn command(dir: &Path, test: &str, env: &[(&str, &str)]) -> Command {
    let lib = dir.join("lib");
    if !lib.exists() {
        fake_cuda::install_into(&lib).unwrap();
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("SIM_TEST", test).env("SIM_TEST_DIR", dir);
    sim_env(&mut command, dir);
    command.envs(env.iter().copied());
    command
}

/// Sets the variables that a client of the simulated device needs.
pub fn sim_env(command: &mut Command, dir: &Path) {
    command.env("LD_LIBRARY_PATH", dir.join("lib")).env("GSHARE_SIM_DEVICE", dir.join("device"));
    command.env("GSHARE_SIM_PROFILE", "tiny").stdin(Stdio::null());
    command.env_remove("CUDA_VISIBLE_DEVICES").env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
}

/// The directory of the isolated test that runs.
pub fn dir() -> std::path::PathBuf {
    std::env::var_os("SIM_TEST_DIR").unwrap().into()
}

/// Address of a name in the driver library.
pub fn symbol(name: &str) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        // SAFETY: loads the library; its initialisers are std's.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    assert_ne!(library, 0, "libcuda.so.1 is not found");
    let name = CString::new(name).unwrap();
    // SAFETY: a valid handle and name.
    let address = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!address.is_null(), "{name:?} is not exported");
    address
}

/// Calls a driver function.
#[macro_export]
macro_rules! cu {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the symbol has this signature by the table; arguments are the test's.
        #[allow(unused_unsafe)]
        unsafe {
            let f: $crate::common::signature::$name = std::mem::transmute($crate::common::symbol(stringify!($name)));
            f($($arg),*)
        }
    }};
}

/// Calls a driver function that must succeed.
#[macro_export]
macro_rules! ok {
    ($name:ident($($arg:expr),* $(,)?)) => {
        assert_eq!($crate::cu!($name($($arg),*)), $crate::common::OK, stringify!($name))
    };
}

/// Calls a driver function with an out-pointer as its first argument; returns the result.
#[macro_export]
macro_rules! get {
    ($name:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: all results asked for this way are integers or pointers.
        #[allow(unused_unsafe)]
        let mut out = unsafe { std::mem::zeroed() };
        assert_eq!($crate::cu!($name(&raw mut out, $($arg),*)), $crate::common::OK, stringify!($name));
        out
    }};
}

/// Initialises, and makes the primary context of device 0 current.
pub fn start() -> sys::CUcontext {
    ok!(cuInit(0));
    let context: sys::CUcontext = get!(cuDevicePrimaryCtxRetain(0));
    ok!(cuCtxSetCurrent(context));
    context
}

/// A kernel by name.
pub fn kernel(name: &str) -> sys::CUfunction {
    let ptx = CString::new(format!(".version 7.0\n.visible .entry {name}()\n{{ret;}}\n")).unwrap();
    let module: sys::CUmodule = get!(cuModuleLoadData(ptx.as_ptr().cast()));
    let name = CString::new(name).unwrap();
    get!(cuModuleGetFunction(module, name.as_ptr()))
}

/// Launches one block of one thread.
pub fn launch(f: sys::CUfunction, stream: sys::CUstream) -> CUresult {
    let none = std::ptr::null_mut();
    cu!(cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, none, none))
}

/// The ground truth of this test's device.
pub fn truth() -> fake_cuda::sim::Truth {
    fake_cuda::sim::SimDevice::open(&dir().join("device"), &fake_cuda::Spec::default()).unwrap().truth()
}

/// The calling process's part of the device's truth on GPU 0.
pub fn mine() -> fake_cuda::sim::ProcessTruth {
    let pid = std::process::id();
    truth().processes.into_iter().find(|p| p.pid == pid && p.live).unwrap()
}
