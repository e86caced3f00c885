//! Programs that ask for values (`GSHARE_SIM_COMPUTE=1`), and kernels without any.
//!
//! A kernel writes nothing. The Python package `gshare_sim` makes the values of PyTorch's operators itself, over the device's bytes, and
//! launches a kernel of the operator's name for its time. Every other kernel leaves its output as it was, which the program would take for
//! values. So the driver says the kernel's name: in a process with that package the launch fails, and as a library may not look at this
//! error, so do copies to the host until the package has seen that the program did; elsewhere (CuPy, JAX, Numba) the first copy to the host
//! warns. Kernels named for their time (`Profile::named`) and PyTorch's `_sleep` have no output.

use std::ffi::{CStr, c_int};

use super::*;

/// How the names of kernels begin whose values the program makes itself: operators and collectives. NCCL's own begin with `nccl`, without
/// the underscore.
const OPERATORS: [&str; 2] = ["aten_", "nccl_"];
/// How the names of kernels begin that have time and no output.
const ONLY_TIME: [&str; 3] = ["spin_", "zero", "use_"];

/// Whether nothing is missing after a kernel of this name. PyTorch's `_sleep` is `at::cuda::…::spin_kernel`.
fn is_complete(kernel: &str) -> bool {
    OPERATORS.iter().chain(&ONLY_TIME).any(|name| kernel.starts_with(name))
        || kernel.starts_with("_ZN2at4cuda") && kernel.contains("spin_kernel")
}

/// The first kernel without values, until a copy to the host has told its name.
#[derive(Default)]
pub(crate) struct Values {
    mode: AtomicU32,
    empty: Mutex<Option<String>>,
    refused: AtomicBool,
}

const WARN: u32 = 1;
const REFUSE: u32 = 2;
const TOLD: u32 = 3;

impl Values {
    /// What the environment asks for.
    pub(crate) fn of_environment() -> Self {
        let asked = std::env::var_os("GSHARE_SIM_COMPUTE").is_some_and(|text| text == "1");
        Self { mode: AtomicU32::new(if asked { WARN } else { 0 }), ..Self::default() }
    }

    /// Whether the program itself writes to device memory.
    pub(crate) fn by_program(&self) -> bool {
        self.mode.load(Relaxed) == REFUSE
    }

    /// A kernel is about to be queued, or to become a node of a graph.
    pub(crate) fn launch(&self, kernel: &CStr) -> Answer {
        let mode = self.mode.load(Relaxed);
        if mode == 0 || mode == TOLD {
            return Ok(());
        }
        let kernel = kernel.to_string_lossy();
        if is_complete(&kernel) {
            return Ok(());
        }
        if mode == REFUSE {
            eprintln!(
                "gshare simulated CUDA driver: kernel `{kernel}` refused: it has no values here; only PyTorch's own operators compute on \
                 a simulated GPU (gshare run --sim --compute)"
            );
            self.refused.store(true, Release);
            return Err(NOT_SUPPORTED);
        }
        lock(&self.empty).get_or_insert_with(|| kernel.into_owned());
        Ok(())
    }

    /// The program copies from the device to the host.
    pub(crate) fn read_back(&self) -> Answer {
        if self.mode.load(Relaxed) != WARN {
            return refuse_if(self.refused.load(Acquire), NOT_SUPPORTED);
        }
        let Some(kernel) = lock(&self.empty).take() else { return Ok(()) };
        if self.mode.swap(TOLD, Relaxed) == WARN {
            eprintln!(
                "gshare simulated CUDA driver: warning: the program reads device memory after kernel `{kernel}`, which computed nothing: \
                 values may be wrong; only PyTorch's operators, and Triton by its interpreter, compute on a simulated GPU"
            );
        }
        Ok(())
    }
}

/// For `gshare_sim`: from now on the process makes its values itself, and kernels without values fail. The program knows of those that
/// have. 0, or a `CUresult`.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gshare_sim_compute() -> c_int {
    let begun = guard(|| {
        let values = &driver()?.values;
        values.mode.store(REFUSE, Relaxed);
        values.refused.store(false, Release);
        Ok(())
    });
    begun.0.cast_signed()
}

/// For `gshare_sim`: 0 where an operator may touch memory at once, since all that was queued has; 1 while host functions are pending that
/// may still change it; 2 while the stream captures; 3 after a kernel was refused; below 0 without a driver or stream.
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
        state = match (driver.values.refused.load(Acquire), captures) {
            (true, _) => 3,
            (_, true) => 2,
            _ => (driver.hosts_pending.load(Acquire) > 0).into(),
        };
        Ok(())
    });
    state
}
