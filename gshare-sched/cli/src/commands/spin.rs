//! The demo's program: an ordinary client of the driver API. It launches kernels for ever and never synchronises.
//!
//! The program knows nothing of gshare; it loads the driver as any program does. The command carries the program because the hook
//! meters child processes, and the demo can count on no other program.
#![allow(unsafe_code, reason = "a kernel launch is unsafe in any CUDA API")]

use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, LaunchConfig, result};
use cudarc::nvrtc::Ptx;
use gshare_fake_cuda_spec::spin_ptx;
use std::sync::Arc;

/// Name of the hidden subcommand.
pub(crate) const NAME: &str = "spin";

/// Kernels of one length, each of which fills device 0.
#[derive(Debug)]
pub struct Spin {
    stream: Arc<CudaStream>,
    kernel: CudaFunction,
    config: LaunchConfig,
}

impl Spin {
    /// Loads the driver and a kernel of `ms` milliseconds, and asks the operating system to end this process with its
    /// parent: the parent may be killed, and its programs must not go on.
    ///
    /// # Errors
    /// When there is no driver or no device.
    pub fn load(ms: u32) -> anyhow::Result<Self> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        super::cuda::Driver::load()?;
        let context = CudaContext::new(0)?;
        let name = format!("spin_{ms}ms");
        let kernel = context.load_module(Ptx::from_src(spin_ptx(&name, ms * 1_000)))?.load_function(&name)?;
        let sms = context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let config =
            LaunchConfig { grid_dim: (sms.try_into()?, 1, 1), block_dim: (1024, 1, 1), shared_mem_bytes: 0 };
        Ok(Self { stream: context.default_stream(), kernel, config })
    }

    /// Launches one kernel.
    ///
    /// # Errors
    /// The driver's.
    pub fn launch(&self) -> anyhow::Result<()> {
        // SAFETY: the kernel takes no arguments and touches no memory.
        unsafe { self.stream.launch_builder(&self.kernel).launch(self.config) }?;
        Ok(())
    }

    /// Takes device memory until the process ends.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(&self, bytes: usize) -> anyhow::Result<()> {
        if bytes > 0 {
            // SAFETY: nothing uses the memory.
            unsafe { result::malloc_sync(bytes) }?;
        }
        Ok(())
    }

    /// Waits for all launches.
    ///
    /// # Errors
    /// The driver's.
    pub fn synchronize(&self) -> anyhow::Result<()> {
        Ok(self.stream.context().synchronize()?)
    }
}

pub(crate) fn run() -> anyhow::Result<()> {
    let spin = Spin::load(1)?;
    loop {
        spin.launch()?;
    }
}
