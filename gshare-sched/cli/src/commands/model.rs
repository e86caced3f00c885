//! A model process that stands for a real one: it loads as many bytes and computes as long, by the driver API alone.

use super::cuda::Kernel;
use gshare_core::{Bytes, Duration};
use gshare_runner::manager::frame::{FromModel, ModelPort, ToModel};
use std::ffi::{CStr, c_uint};
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
const PTX: &CStr = c"
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
";

/// Bytes copied at a time.
const CHUNK: usize = 4 << 20;
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
    kernel: Kernel,
    sms: c_uint,
    /// GPU time of one kernel.
    each: Duration,
}

impl Model {
    fn load(options: &Options) -> anyhow::Result<Self> {
        anyhow::ensure!(!options.kernel.is_zero(), "--kernel is 0: need more than 0");
        let kernel = Kernel::load(PTX, c"spin_ns")?;
        let bytes = usize::try_from(options.memory.get())?;
        let weights = kernel.allocate(bytes)?;
        let chunk = vec![0x5au8; CHUNK.min(bytes)];
        for at in (0..bytes).step_by(CHUNK) {
            kernel.upload(weights + at as u64, &chunk[..CHUNK.min(bytes - at)])?;
        }
        Ok(Self { sms: kernel.sms()?, kernel, each: options.kernel })
    }

    /// Runs kernels one after the other, and waits for the last.
    fn run(&self, time: Duration) -> anyhow::Result<()> {
        let mut left = time.as_nanos();
        while left > 0 {
            let now = left.min(self.each.as_nanos());
            left -= now;
            self.kernel.launch(self.sms, 1024, Some(now))?;
        }
        self.kernel.synchronize()
    }
}
