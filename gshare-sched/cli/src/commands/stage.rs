//! The program of a pipeline's stage for tests and demonstrations, and a host for one, both hidden.
//!
//! For each request the stage copies it to device memory, runs a kernel, copies it back, and appends its number.

use super::cuda::Kernel;
use anyhow::Context as _;
use gshare_core::BasisPoints;
use gshare_runner::pipeline::{FfsFunction, Graph, Run, Stage};
use std::ffi::CStr;
use std::io::{BufRead as _, Write as _};
use std::path::PathBuf;

/// Be a stage of a pipeline.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Do without a device.
    #[arg(long)]
    no_device: bool,
    /// Be the function of four components, in whichever mode.
    #[arg(long)]
    graph: bool,
}

/// Run a pipeline: each line in is a request, each line out an answer.
#[derive(Debug, clap::Args)]
pub(crate) struct HostOptions {
    /// The assignment.
    assignment: PathBuf,
}

/// Names of the hidden subcommands.
pub(crate) const NAME: &str = "stage";
pub(crate) const HOST_NAME: &str = "pipeline-host";

/// A kernel that does nothing for a while; the simulated driver takes the time from the name.
const PTX: &CStr = c"
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_20us()
{
    ret;
}
";

/// A context on the stage's slice, a kernel, and room for one request.
struct Device {
    kernel: Kernel,
    memory: u64,
    room: usize,
}

impl Device {
    fn open() -> anyhow::Result<Self> {
        Ok(Self { kernel: Kernel::load(PTX, c"spin_20us")?, memory: 0, room: 0 })
    }

    /// There and back through device memory.
    fn run(&mut self, input: &[u8], output: &mut [u8]) -> anyhow::Result<()> {
        let (kernel, bytes) = (&self.kernel, input.len());
        if self.room < bytes {
            kernel.free(self.memory)?;
            (self.memory, self.room) = (0, 0);
            self.memory = kernel.allocate(bytes)?;
            self.room = bytes;
        }
        kernel.upload(self.memory, input)?;
        kernel.launch(1, 64, None)?;
        kernel.synchronize()?;
        kernel.download(self.memory, output)
    }
}

/// One whose time goes with its blocks and the slice's SMs.
const SIZED: &CStr = c"
.version 7.0
.target sm_52
.address_size 64
.visible .entry layers()
{
    ret;
}
";

/// A component: so much memory for its weights, so many blocks a call; what it reads, with its letter behind it.
fn layers(letter: u8, mib: usize, blocks: u32) -> impl FnOnce() -> Result<Run, String> {
    move || {
        let load = || -> anyhow::Result<Kernel> {
            let kernel = Kernel::load(SIZED, c"layers")?;
            kernel.allocate(mib << 20)?;
            Ok(kernel)
        };
        let kernel = load().map_err(|error| format!("{error:#}"))?;
        let run: Run = Box::new(move |inputs: &[&[u8]]| {
            let call = || kernel.launch(blocks, 1_024, None).and_then(|()| kernel.synchronize());
            call().map_err(|error| format!("{error:#}"))?;
            Ok([inputs.concat(), vec![letter]].concat())
        });
        Ok(run)
    }
}

/// `r -> d, e -> m`; `e` is a branch that half of the requests take, and needs 12 GiB.
fn graph() -> Graph {
    let half = BasisPoints::from_percent(50).unwrap_or(BasisPoints::WHOLE);
    Graph::new("scene")
        .component("resize", &[], layers(b'r', 64, 1))
        .component("detect", &["resize"], layers(b'd', 512, 35_000))
        .component("depth", &["resize"], layers(b'e', 12 << 10, 1))
        .for_share(half)
        .component("merge", &["detect", "depth"], layers(b'm', 64, 1))
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if options.graph {
        return Ok(graph().serve()?);
    }
    let stage = Stage::from_env()?;
    let mut device = if options.no_device { None } else { Some(Device::open()?) };
    let number = u8::try_from(stage.index())?;
    stage.run(|input, output| {
        let length = input.len() + 1;
        let out = output.get_mut(..length).ok_or("the answer is larger than a slot")?;
        match (number, input) {
            (1, [b'd', b'i', b'e', ..]) => std::process::abort(),
            (2, [b'f', b'a', b'i', b'l', ..]) => return Err("asked to".to_owned()),
            _ => {}
        }
        match &mut device {
            Some(device) if !input.is_empty() => {
                device.run(input, &mut out[..input.len()]).map_err(|error| error.to_string())?;
            }
            _ => out[..input.len()].copy_from_slice(input),
        }
        out[length - 1] = b'0' + number;
        Ok(length)
    })?;
    Ok(())
}

pub(crate) fn host(options: &HostOptions) -> anyhow::Result<()> {
    let function = FfsFunction::start(&options.assignment)?;
    while function.stages().iter().any(|stage| stage.pid.is_none()) {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mut output = std::io::stdout().lock();
    let pids: Vec<u32> = function.stages().iter().filter_map(|stage| stage.pid).collect();
    writeln!(output, "{}", serde_json::to_string(&pids)?)?;
    for line in std::io::stdin().lock().lines() {
        let answer = function.submit(line.context("standard input")?.as_bytes(), None)?.wait();
        match answer {
            Ok(answer) => writeln!(output, "{}", String::from_utf8_lossy(&answer))?,
            Err(error) => writeln!(output, "error: {error}")?,
        }
        output.flush()?;
    }
    function.stop();
    Ok(())
}
