//! Programs that ask for values (`GSHARE_SIM_COMPUTE=1`), and kernels without any.
//!
//! A kernel writes nothing. The Python package `gshare_sim` makes the values of PyTorch's operators itself, over the device's bytes, and
//! launches a kernel of the operator's name for its time. Every other kernel leaves its output as it was, which the program would take for
//! values. So the driver says the kernel's name: in a process with that package the launch fails, and as a library may not look at this
//! error, so do copies to the host until the package has seen that the program did; elsewhere (CuPy, JAX, Numba) the first copy to the host
//! warns. Kernels named for their time (`states_time`) and PyTorch's `_sleep` have no output.

use std::ffi::{c_int, c_void};

use super::module::Function;
use super::*;

/// Whether a kernel of this name has no output. PyTorch's `_sleep` is `at::cuda::…::spin_kernel`.
pub(crate) fn only_takes_time(kernel: &str) -> bool {
    gshare_fake_cuda_spec::states_time(kernel)
        || kernel.starts_with("_ZN2at4cuda") && kernel.contains("spin_kernel")
}

/// What the program knows of kernels without values.
#[derive(Default)]
pub(crate) struct Values {
    mode: AtomicU32,
    /// The first of them that ran, until a copy to the host has told its name.
    empty: Mutex<Option<String>>,
    /// The last of them that was refused.
    last: Mutex<String>,
    /// Who knows of a refusal: a thread, or `UNKNOWN`; 0 without a refusal.
    refused: AtomicU32,
    /// Where the runtime library lies that keeps the errors of its threads for `gshare_sim`.
    runtime: AtomicUsize,
}

/// No thread's last error tells whether the program has looked at the refusal.
const UNKNOWN: u32 = u32::MAX;

fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()
}

/// The start of the library with this address; 0 for none.
fn library_of(address: *const c_void) -> usize {
    // SAFETY: only looks the address up.
    unsafe {
        let mut found: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address, &raw mut found) == 0 { 0 } else { found.dli_fbase as usize }
    }
}

/// The process's, from its start: it may say that it makes its values before `cuInit`.
pub(crate) static VALUES: LazyLock<Values> = LazyLock::new(Values::of_environment);

const WARN: u32 = 1;
const REFUSE: u32 = 2;
const TOLD: u32 = 3;

impl Values {
    /// The mode that `GSHARE_SIM_COMPUTE` asks for.
    fn of_environment() -> Self {
        let asked = std::env::var_os("GSHARE_SIM_COMPUTE").is_some_and(|text| text == "1");
        Self { mode: AtomicU32::new(if asked { WARN } else { 0 }), ..Self::default() }
    }

    /// Whether the environment asks for values.
    pub(crate) fn asked(&self) -> bool {
        self.mode.load(Relaxed) != 0
    }

    /// Who knows of the error of this call: the calling thread, if the runtime library makes the call.
    fn witness(&self) -> u32 {
        const MOST: c_int = 64;
        let mut frames = [null_mut(); MOST as usize];
        // SAFETY: as many places.
        let count = unsafe { libc::backtrace(frames.as_mut_ptr(), MOST) };
        let runtime = self.runtime.load(Relaxed);
        let called =
            runtime != 0 && frames[..count as usize].iter().any(|&frame| library_of(frame) == runtime);
        if called { this_thread() } else { UNKNOWN }
    }

    /// Whether the program itself writes to device memory.
    pub(crate) fn by_program(&self) -> bool {
        self.mode.load(Relaxed) == REFUSE
    }

    /// A kernel is about to be queued, or to become a node of a graph.
    pub(crate) fn launch(&self, kernel: &Function) -> Answer {
        let mode = self.mode.load(Relaxed);
        if mode == 0 || mode == TOLD || kernel.complete {
            return Ok(());
        }
        let kernel = kernel.name.to_string_lossy();
        if mode == REFUSE {
            eprintln!(
                "gshare simulated CUDA driver: kernel `{kernel}` refused: it has no values here; only PyTorch's own operators compute on \
                 a simulated GPU (gshare run --sim --compute)"
            );
            *lock(&self.last) = kernel.into_owned();
            let witness = self.witness();
            // Two refusals have two witnesses.
            let known = self.refused.compare_exchange(0, witness, AcqRel, Acquire);
            if known.is_err_and(|other| other != witness) {
                self.refused.store(UNKNOWN, Release);
            }
            return Err(NOT_SUPPORTED);
        }
        lock(&self.empty).get_or_insert_with(|| kernel.into_owned());
        Ok(())
    }

    /// The program copies from the device to the host.
    pub(crate) fn read_back(&self) -> Answer {
        let mode = self.mode.load(Relaxed);
        if mode == 0 || mode == TOLD {
            return Ok(());
        }
        if self.refused.load(Acquire) != 0 {
            // The copy's error tells the program of the refusal.
            self.refused.store(self.witness(), Release);
            return Err(NOT_SUPPORTED);
        }
        // Of a process that makes its values: a kernel from the time before it said so.
        if let Some(kernel) = lock(&self.empty).take() {
            let _ = self.mode.compare_exchange(WARN, TOLD, Relaxed, Relaxed);
            eprintln!(
                "gshare simulated CUDA driver: warning: the program reads device memory after kernel `{kernel}`, which computed nothing: \
                 values may be wrong; only PyTorch's operators, and Triton by its interpreter, compute on a simulated GPU"
            );
        }
        Ok(())
    }
}

/// For `gshare_sim`: from now on the process makes its values itself, and kernels without values fail. The program knows of those that
/// have. `runtime` is an address in the library whose last error the package can look at. 0, or a `CUresult`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gshare_sim_compute(runtime: *const c_void) -> c_int {
    let begun = guard(|| {
        refuse_if(!VALUES.asked(), NOT_SUPPORTED)?;
        VALUES.runtime.store(library_of(runtime), Relaxed);
        VALUES.mode.store(REFUSE, Relaxed);
        VALUES.refused.store(0, Release);
        Ok(())
    });
    begun.0.cast_signed()
}

/// For `gshare_sim`: writes the name of the kernel that was refused last, without a zero at its end, and gives its length.
///
/// # Safety
/// `to` has `room` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gshare_sim_compute_refused(to: *mut u8, room: usize) -> usize {
    let name = lock(&VALUES.last);
    let len = name.len().min(room);
    // SAFETY: by the contract.
    unsafe { to.copy_from_nonoverlapping(name.as_ptr(), len) };
    len
}

/// For `gshare_sim`: an operator of a graph has failed. As after a fault on a GPU, every further call fails.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gshare_sim_compute_failed() {
    lock(&CONTEXTS).values().for_each(|context| context.fault());
}

/// For `gshare_sim`: 0 where an operator may touch memory at once, since all that was queued has; 1 while host functions are pending that
/// may still change it; 2 while the stream captures; 3 after a kernel was refused, and 4 if the last error of the calling thread
/// tells whether the program knows; below 0 without a driver or stream.
///
/// # Safety
/// `stream` is a stream's handle.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn gshare_sim_compute_state(stream: sys::CUstream) -> c_int {
    let mut state = -1;
    let _ = guard(|| {
        // SAFETY: by the contract.
        let captures = unsafe { StreamArg(Flavor::Legacy, stream).find()? }.capturing.load(Acquire);
        let driver = driver()?;
        state = match (VALUES.refused.load(Acquire), captures) {
            (0, true) => 2,
            (0, false) => (driver.hosts_pending.load(Acquire) > 0).into(),
            (thread, _) if thread == this_thread() => 4,
            _ => 3,
        };
        Ok(())
    });
    state
}
