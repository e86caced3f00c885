//! The demo's program: an ordinary client of the driver API. It launches kernels for ever and never synchronises.
//!
//! The program knows nothing of gshare; it loads `libcuda.so.1` as any program does. The command carries the program because the hook
//! meters child processes, and the demo can count on no other program.

use super::cuda::Kernel;
use std::ffi::CString;

/// Name of the hidden subcommand.
pub(crate) const NAME: &str = "spin";

/// A kernel that spins on the clock for `ms` milliseconds in every thread. The simulated driver takes the time from the
/// name.
fn ptx(ms: u32) -> String {
    format!(
        "
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_{ms}ms()
{{
    .reg .u64 %t<4>;
    .reg .pred %p;
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, {ms}000000;
    @%p bra again;
    ret;
}}
"
    )
}

/// Kernels of one length, each of which fills device 0.
#[derive(Debug)]
pub struct Spin {
    kernel: Kernel,
    /// One block per SM.
    grid: u32,
}

impl Spin {
    /// Loads the driver and a kernel of `ms` milliseconds, and asks the operating system to end this process with its
    /// parent: the parent may be killed, and its programs must not go on.
    ///
    /// # Errors
    /// When there is no driver or no device.
    pub fn load(ms: u32) -> anyhow::Result<Self> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        let (ptx, name) = (CString::new(ptx(ms))?, CString::new(format!("spin_{ms}ms"))?);
        let kernel = Kernel::load(&ptx, &name)?;
        let grid = kernel.sms()?;
        Ok(Self { kernel, grid })
    }

    /// Launches one kernel.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self) -> anyhow::Result<()> {
        self.kernel.launch(self.grid, 1024, None)
    }

    /// The kernel, for further use of its context.
    pub const fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

pub(crate) fn run() -> anyhow::Result<()> {
    let spin = Spin::load(1)?;
    loop {
        spin.launch()?;
    }
}
