//! A model process that stands for a real one: it loads as many bytes and computes as long, by the driver API alone.
#![allow(unsafe_code, reason = "foreign functions of the driver")]

use super::cuda::{Driver, call};
use gshare_core::{Bytes, Duration};
use gshared::manager::frame::{FromModel, ModelPort, ToModel};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::time::Instant;

/// A model process for the GPU manager, with a model of any size and speed: for trials, and for tests of schedulers.
///
/// It allocates its memory, copies as many bytes to it, and then answers each request after kernels of the given time, with
/// the input as its output. Its standard input is the manager's socket.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Bytes to load.
    #[arg(long, value_name = "BYTES")]
    memory: Bytes,
    /// GPU time of one request.
    #[arg(long, value_name = "TIME")]
    infer: Duration,
    /// GPU time of one kernel.
    #[arg(long, value_name = "TIME", default_value = "5ms")]
    kernel: Duration,
    /// Time of each further request of a batch, in per cent of the first one's.
    #[arg(long, value_name = "PERCENT", default_value_t = 100)]
    batch_marginal: u64,
    /// Say that loading failed.
    #[arg(long, hide = true)]
    fail: bool,
    /// Load for ever.
    #[arg(long, hide = true)]
    hang: bool,
}

/// Name of the subcommand.
pub(crate) const NAME: &str = "model";

/// A kernel whose every thread looks at the clock until as many ns have passed as it was told. The simulated driver
/// takes the time from the argument.
const PTX: &str = "
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_ns(.param .u64 duration)
{
    .reg .u64 %t<5>;
    .reg .pred %p;
    ld.param.u64 %t4, [duration];
    mov.u64 %t1, %globaltimer;
again:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, %t4;
    @%p bra again;
    ret;
}
\0";

/// Bytes copied at a time.
const CHUNK: usize = 4 << 20;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const SMS: c_int = 16;

type Handle = *mut c_void;

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut port = ModelPort::from_stdin()?;
    if options.hang {
        std::thread::sleep(std::time::Duration::MAX);
    }
    let loaded = if options.fail { Err(anyhow::anyhow!("--fail")) } else { Model::load(options) };
    let model = match loaded {
        Ok(model) => model,
        Err(error) => {
            port.send(&FromModel::Failed { reason: format!("{error:#}") })?;
            return Err(error);
        }
    };
    port.send(&FromModel::Ready { memory: options.memory })?;
    let mut batch = Vec::new();
    while let Some(frame) = port.receive()? {
        let ToModel::Run { request, more, input } = frame else {
            anyhow::bail!("a frame of a later version");
        };
        batch.push((request, input));
        if more > 0 {
            continue;
        }
        let start = Instant::now();
        let further = u64::try_from(batch.len())? - 1;
        let infer = options.infer.as_nanos();
        model.run(Duration::from_nanos(infer + infer / 100 * options.batch_marginal * further))?;
        let took = Duration::from_nanos(u64::try_from(start.elapsed().as_nanos())?);
        for (request, output) in batch.drain(..) {
            port.send(&FromModel::Done { request, took, output })?;
        }
    }
    Ok(())
}

struct Model {
    driver: Driver,
    function: Handle,
    sms: c_uint,
    kernel: Duration,
}

impl Model {
    fn load(options: &Options) -> anyhow::Result<Self> {
        anyhow::ensure!(!options.kernel.is_zero(), "--kernel is 0: need more than 0");
        let driver = Driver::load()?;
        driver.init()?;
        let (mut device, mut sms) = (0, 0);
        let (mut context, mut module, mut function): (Handle, Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        call!(driver, b"cuDeviceGet\0", (*mut c_int, c_int), &raw mut device, 0);
        call!(driver, b"cuDeviceGetAttribute\0", (*mut c_int, c_int, c_int), &raw mut sms, SMS, device);
        call!(driver, b"cuDevicePrimaryCtxRetain\0", (*mut Handle, c_int), &raw mut context, device);
        call!(driver, b"cuCtxSetCurrent\0", (Handle), context);
        call!(
            driver,
            b"cuModuleLoadData\0",
            (*mut Handle, *const c_void),
            &raw mut module,
            PTX.as_ptr().cast()
        );
        let name = c"spin_ns";
        call!(
            driver,
            b"cuModuleGetFunction\0",
            (*mut Handle, Handle, *const c_char),
            &raw mut function,
            module,
            name.as_ptr()
        );
        let bytes = usize::try_from(options.memory.get())?;
        let mut weights = 0u64;
        if bytes > 0 {
            call!(driver, b"cuMemAlloc_v2\0", (*mut u64, usize), &raw mut weights, bytes);
        }
        let chunk = vec![0x5au8; CHUNK.min(bytes)];
        for at in (0..bytes).step_by(CHUNK) {
            let length = CHUNK.min(bytes - at);
            let to = weights + at as u64;
            let from = chunk.as_ptr().cast::<c_void>();
            call!(driver, b"cuMemcpyHtoD_v2\0", (u64, *const c_void, usize), to, from, length);
        }
        Ok(Self { driver, function, sms: c_uint::try_from(sms)?, kernel: options.kernel })
    }

    /// Runs kernels one after the other, and waits for the last.
    fn run(&self, time: Duration) -> anyhow::Result<()> {
        let driver = &self.driver;
        let mut left = time.as_nanos();
        while left > 0 {
            let mut now = left.min(self.kernel.as_nanos());
            left -= now;
            let mut arguments = [(&raw mut now).cast::<c_void>()];
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
                self.function,
                self.sms,
                1,
                1,
                1024,
                1,
                1,
                0,
                std::ptr::null_mut(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut()
            );
        }
        call!(driver, b"cuCtxSynchronize\0", (),);
        Ok(())
    }
}
