//! The demo's program: an ordinary client of the driver API that launches kernels for ever and never synchronises; or, as
//! an inference program does, for each line that it reads.
//!
//! It knows nothing of gshare; it loads `libcuda.so.1` as any program does.

use super::cuda::Kernel;
use std::ffi::CStr;

/// Launch kernels of one millisecond for ever: the demo's program.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory to allocate before.
    #[arg(long, value_name = "BYTES", default_value = "0")]
    memory: gshare_core::Bytes,
    /// Serve instead: write a line, then answer each line read with one, after so many kernels, or as many as the line says,
    /// and a wait for them.
    #[arg(long, value_name = "KERNELS")]
    answer: Option<u32>,
}

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

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    // The demo may be killed; its programs must not go on.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let kernel = Kernel::load(PTX, c"spin_1000us")?;
    kernel.allocate(usize::try_from(options.memory.get())?)?;
    // One block per SM.
    let grid = kernel.sms()?;
    let launch = || kernel.launch(grid, 1024, None);
    let Some(kernels) = options.answer else {
        loop {
            launch()?;
        }
    };
    launch()?;
    kernel.synchronize()?;
    println!("ready");
    for line in std::io::stdin().lines() {
        let kernels = line?.trim().parse().unwrap_or(kernels);
        for _ in 0..kernels {
            launch()?;
        }
        kernel.synchronize()?;
        println!("done");
    }
    Ok(())
}
