//! The demo's program: an ordinary client of the driver API that launches kernels for ever and never synchronises.
//!
//! The program knows nothing of gshare; it loads `libcuda.so.1` as any program does. The command carries it because the hook
//! meters processes that are started under it, and the demo has no other program that is certain to be there.

use super::cuda::Kernel;
use std::ffi::CStr;

/// Name of the hidden subcommand.
pub(crate) const NAME: &str = "spin";

/// A kernel whose every thread looks at the clock until a millisecond has passed. The simulated driver takes the time from
/// the name.
const PTX: &CStr = c"
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_1000us()
{
    .reg .u64 %t<4>;
    .reg .pred %p;
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, 1000000;
    @%p bra again;
    ret;
}
";

/// Kernels of one millisecond that fill device 0.
#[derive(Debug)]
pub struct Spin {
    kernel: Kernel,
    /// One block per SM.
    grid: u32,
}

impl Spin {
    /// Loads the driver and the kernel, and asks the kernel to end this process with its parent: what started it may be
    /// killed, and its programs must not go on.
    ///
    /// # Errors
    /// When there is no driver or no device.
    pub fn load() -> anyhow::Result<Self> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        let kernel = Kernel::load(PTX, c"spin_1000us")?;
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

    /// The kernel, for what else its context is to do.
    pub const fn kernel(&self) -> &Kernel {
        &self.kernel
    }
}

pub(crate) fn run() -> anyhow::Result<()> {
    let spin = Spin::load()?;
    loop {
        spin.launch()?;
    }
}
