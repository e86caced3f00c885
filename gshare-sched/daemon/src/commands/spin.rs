//! The demo's program: an ordinary client of the driver API that launches kernels for ever and never synchronises; or, as
//! an inference program does, for each line that it reads.
//!
//! It knows nothing of gshare; it loads `libcuda.so.1` as any program does.
#![allow(unsafe_code, reason = "foreign functions of the driver")]

use super::cuda::{Driver, call};
use std::ffi::{c_char, c_int, c_uint, c_void};

/// Launch kernels of one millisecond for ever: the demo's program.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Memory to allocate before.
    #[arg(long, value_name = "BYTES", default_value = "0")]
    memory: gshare_core::Bytes,
    /// Serve instead: write a line, then answer each line read with one, after so many kernels and a wait for them.
    #[arg(long, value_name = "KERNELS")]
    answer: Option<u32>,
}

/// Name of the hidden subcommand.
pub(crate) const NAME: &str = "spin";

/// A kernel whose every thread looks at the clock until a millisecond has passed. The simulated driver takes the time from
/// the name.
const PTX: &str = "
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
\0";

/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const SMS: c_int = 16;

type Handle = *mut c_void;

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    // The demo may be killed; its programs must not go on.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    let driver = Driver::load()?;
    driver.init()?;
    let (mut device, mut sms) = (0, 0);
    let (mut context, mut module, mut function): (Handle, Handle, Handle) =
        (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    call!(driver, b"cuDeviceGet\0", (*mut c_int, c_int), &raw mut device, 0);
    call!(driver, b"cuDeviceGetAttribute\0", (*mut c_int, c_int, c_int), &raw mut sms, SMS, device);
    call!(driver, b"cuDevicePrimaryCtxRetain\0", (*mut Handle, c_int), &raw mut context, device);
    call!(driver, b"cuCtxSetCurrent\0", (Handle), context);
    call!(driver, b"cuModuleLoadData\0", (*mut Handle, *const c_void), &raw mut module, PTX.as_ptr().cast());
    let name = c"spin_1000us";
    call!(
        driver,
        b"cuModuleGetFunction\0",
        (*mut Handle, Handle, *const c_char),
        &raw mut function,
        module,
        name.as_ptr()
    );
    if options.memory.get() > 0 {
        let mut pointer = 0u64;
        let bytes = usize::try_from(options.memory.get())?;
        call!(driver, b"cuMemAlloc_v2\0", (*mut u64, usize), &raw mut pointer, bytes);
    }
    // One block per SM.
    let grid = c_uint::try_from(sms)?;
    let none = std::ptr::null_mut::<Handle>();
    let launch = || -> anyhow::Result<()> {
        call!(
            driver,
            b"cuLaunchKernel\0",
            (
                Handle,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                Handle,
                *mut Handle,
                *mut Handle
            ),
            function,
            grid,
            1,
            1,
            1024,
            1,
            1,
            0,
            std::ptr::null_mut(),
            none,
            none
        );
        Ok(())
    };
    let Some(kernels) = options.answer else {
        loop {
            launch()?;
        }
    };
    let synchronize = || -> anyhow::Result<()> {
        call!(driver, b"cuCtxSynchronize\0", (),);
        Ok(())
    };
    launch()?;
    synchronize()?;
    println!("ready");
    for line in std::io::stdin().lines() {
        line?;
        for _ in 0..kernels {
            launch()?;
        }
        synchronize()?;
        println!("done");
    }
    Ok(())
}
