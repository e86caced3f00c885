//! `gshare build-dag`: runs a function once in `BUILD_DAG` mode, and measures each of its components on each slice.
//!
//! The function's program is started with a folder in `GSHARE_FFS_BUILD`, its batch size in `GSHARE_BATCH`, and its slice in
//! `CUDA_VISIBLE_DEVICES`:
//! 1. **Shape**: the program runs all components once, keeps their values in the folder, and writes `shape.json` there ([`Shape`]).
//!    The file `example` in the folder holds the request, if the user gave a request.
//! 2. **Component**: with a name in `GSHARE_FFS_COMPONENT` the program loads the named component and writes a line. Then it answers each
//!    line of its input with a line, after one call on the kept values ([`gshare_profile::line_program`]).

use super::cuda::Truth;
use super::{print_json, read_file};
use anyhow::{Context as _, ensure};
use gshare_core::dag::{Dag, Profile};
use gshare_core::profile::Setting;
use gshare_core::{BasisPoints, Bytes, Duration, Timestamp};
use gshare_profile::dag_profile::{Hole, Point, Shape, Weighs, profile};
use gshare_profile::executor::{ExecError, Executor, Ready};
use gshare_profile::line_program::{Process, Protocol, wait_within};
use gshare_profile::trial::TrialConfig;
use gshare_runner::Scratch;
use gshare_runner::libraries::{SIMULATOR, SimulatorDir, prepend};
use gshare_sched::mig::{GpuModel, MigProfile};
use gshared::nvml::Nvml;
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The largest shape to read.
const MAX_SHAPE: u64 = 16 << 20;
/// Environment of the function's program: the folder of its shape.
const ENV_BUILD: &str = "GSHARE_FFS_BUILD";
/// With [`ENV_BUILD`]: the measured component.
const ENV_COMPONENT: &str = "GSHARE_FFS_COMPONENT";

/// Build the DAG of a pipeline's function and measure its components on slices.
///
/// The function is a program with both entry points of FluidFaaS, Figure 7, such as a program of the Python package
/// `gshare_ffs`. It runs once as a whole and reports its components and the bytes between them; then each component runs
/// alone on each slice. `gshare partition` reads the written file, and so does `gshare up` for a deployment with
/// `gshare/dag`. A component gets no profile for a slice on which it fails.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare build-dag --slices 1g.10gb=MIG-4f2c,2g.20gb=MIG-91be --output dag.json -- python3 pipeline.py
  gshare build-dag --sim --slices 1g.10gb,2g.20gb --output dag.json -- ./pipeline
  gshare partition --free 1g.10gb,2g.20gb dag.json")]
pub(crate) struct Options {
    /// Slice profiles to measure on: NAME=DEVICE, where DEVICE is the value of `CUDA_VISIBLE_DEVICES` (the UUID of a MIG
    /// device). With --sim only NAME.
    #[arg(long, value_name = "SLICE", value_delimiter = ',', required = true)]
    slices: Vec<String>,
    /// GPU model of these profiles.
    #[arg(long, value_name = "MODEL", default_value = "A100-80")]
    gpu: String,
    /// Measure on MIG devices of a simulated GPU, with the SMs and memory of the model's table and the kernel costs of this
    /// profile file [default: typical costs].
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "")]
    sim: Option<String>,
    /// Requests per call; with several numbers, each is measured. The function reads the number from `GSHARE_BATCH`. The
    /// bytes between components belong to the largest number.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    batch: Vec<u32>,
    /// A request to run, for a function without an example of its own.
    #[arg(long, value_name = "FILE")]
    example: Option<PathBuf>,
    /// Longest measurement of one component on one slice.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    time: Duration,
    /// Longest warm-up of one component on one slice.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    warmup: Duration,
    /// Largest difference between two windows of calls in the steady state, in per cent. Raise it on a busy machine.
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    steady: u16,
    /// Time limit for the load, for the first run, and for each call.
    #[arg(long, value_name = "TIME", default_value = "120s")]
    patience: Duration,
    /// Write the DAG to this file [default: standard output].
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object: {"device": "simulated"|"real", "gpu", "batches", "dag", "holes": [{"point": {"component",
    /// "slice", "batch"}, "reason"}]}.
    #[arg(long)]
    json: bool,
    /// The function's program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// A slice to measure on.
#[derive(Debug, Clone)]
struct Slice {
    name: String,
    memory: Bytes,
    device: String,
}

#[derive(Serialize)]
struct Summary<'a> {
    device: &'static str,
    gpu: &'a str,
    batches: &'a [u32],
    dag: &'a Dag,
    holes: &'a [Hole],
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let model = GpuModel::find(&options.gpu)?;
    let slices = options
        .slices
        .iter()
        .map(|text| slice(&model, text, options.sim.is_some()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for (place, slice) in slices.iter().enumerate() {
        ensure!(
            slices[..place].iter().all(|other| other.name != slice.name),
            "--slices: {} twice",
            slice.name
        );
    }
    for (place, batch) in options.batch.iter().enumerate() {
        ensure!(!options.batch[..place].contains(batch), "--batch: {batch} twice");
    }
    let config = trial_config(options)?;
    let folder = Scratch::new("build-dag")?;
    if let Some(example) = &options.example {
        std::fs::copy(example, folder.path().join("example"))
            .with_context(|| format!("--example {}", example.display()))?;
    }
    let place = Place::new(options, &model, &slices, folder.path())?;
    let largest = slices.iter().max_by_key(|slice| slice.memory).context("--slices: none")?;
    let shape = shape(options, &place, largest, folder.path())?;
    let mut make = |point: &Point| {
        let slice = slices.iter().find(|slice| slice.name == point.slice);
        let slice = slice.ok_or_else(|| ExecError::Unavailable(point.slice.clone()))?;
        let (mut command, component) =
            (place.command(options, slice, folder.path()), point.component.clone());
        command.env(ENV_COMPONENT, component);
        let mut command = Some(command);
        let again = || "it was started before".to_owned();
        let runs = Process::new(Protocol::Requests, move |_| command.take().ok_or_else(again));
        let scale = place.scale(slice).map_err(|error| ExecError::Unavailable(format!("{error:#}")))?;
        Ok(Weighed { runs, scale, most: 0, running: false, broken: None })
    };
    let mut told = |point: &Point, found: Result<&Profile, &str>| {
        let Point { component, slice, batch, .. } = point;
        match found {
            Ok(found) => eprintln!("{component} on {slice}, batch {batch}: {}, {}", found.time, found.memory),
            Err(reason) => eprintln!("{component} on {slice}, batch {batch}: no profile: {reason}"),
        }
    };
    let names: Vec<String> = slices.iter().map(|slice| slice.name.clone()).collect();
    let found = profile(&shape, &names, &options.batch, &config, &mut make, &mut told)?;
    if let Some(path) = &options.output {
        let text = serde_json::to_string_pretty(&found.dag)?;
        std::fs::write(path, text).with_context(|| format!("--output {}", path.display()))?;
    }
    if options.json {
        let device = if options.sim.is_some() { "simulated" } else { "real" };
        let (gpu, batches) = (options.gpu.as_str(), options.batch.as_slice());
        return print_json(&Summary { device, gpu, batches, dag: &found.dag, holes: &found.holes });
    }
    if options.output.is_none() {
        print_json(&found.dag)?;
    }
    Ok(())
}

fn slice(model: &GpuModel, text: &str, simulated: bool) -> anyhow::Result<Slice> {
    let (name, device) = match (text.split_once('='), simulated) {
        (Some((name, device)), false) => (name, device.to_owned()),
        (None, true) => (text, "0".to_owned()),
        (Some(_), true) => anyhow::bail!("--slices {text}: a simulated slice has no device, need NAME"),
        (None, false) => anyhow::bail!("--slices {text}: need NAME=DEVICE, or --sim"),
    };
    let found = model.get(model.profile(name)?).with_context(|| format!("--slices {text}"))?;
    Ok(Slice { name: name.to_owned(), memory: found.memory, device })
}

fn trial_config(options: &Options) -> anyhow::Result<TrialConfig> {
    let mut config = TrialConfig::default();
    (config.max_time, config.max_warmup) = (options.time, options.warmup);
    (config.start_timeout, config.answer_timeout) = (options.patience, options.patience);
    config.steady_tolerance =
        BasisPoints::from_percent(options.steady).context("--steady: need at most 100")?;
    config.check()?;
    Ok(config)
}

/// Runs the function on a slice for its shape.
fn shape(options: &Options, place: &Place, slice: &Slice, folder: &Path) -> anyhow::Result<Shape> {
    let program = options.command[0].to_string_lossy();
    let mut command = place.command(options, slice, folder);
    let largest = options.batch.iter().max().context("--batch: none")?;
    command.env("GSHARE_BATCH", largest.to_string());
    // Standard output is for the DAG, so the program's output is dropped.
    command.env_remove(ENV_COMPONENT).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().with_context(|| program.clone().into_owned())?;
    let Some(status) = wait_within(&mut child, options.patience)? else {
        child.kill()?;
        child.wait()?;
        anyhow::bail!("{program} did not tell its shape within {}", options.patience);
    };
    ensure!(status.success(), "{program} in BUILD_DAG mode: {status}");
    let path = folder.join("shape.json");
    ensure!(path.exists(), "{program} ended and told no shape: is it a function with a BUILD_DAG mode?");
    let shape: Shape = read_file(&path, MAX_SHAPE).with_context(|| format!("the shape of {program}"))?;
    shape.check().with_context(|| format!("the shape of {program}"))?;
    Ok(shape)
}

/// The place of components: MIG devices, or for each slice a simulated GPU cut into it.
enum Place {
    Real(Nvml),
    Simulated { driver: SimulatorDir, library: PathBuf, folder: PathBuf },
}

impl Place {
    fn new(options: &Options, model: &GpuModel, slices: &[Slice], folder: &Path) -> anyhow::Result<Self> {
        let Some(costs) = &options.sim else {
            return Ok(Self::Real(Nvml::load().context(
                "no GPU on this machine. To measure on simulated slices, add --sim: gshare build-dag --sim …",
            )?));
        };
        eprintln!("gshare: simulated slices of {}", model.name);
        let whole_gpu =
            model.ids().filter_map(|id| model.get(id)).max_by_key(|profile| profile.memory_slices);
        let whole_gpu = whole_gpu.context("a model without profiles")?;
        let whole: toml::Table = match costs.as_str() {
            "" => toml::from_str(TYPICAL)?,
            path => {
                let text = std::fs::read_to_string(path).with_context(|| format!("--sim={path}"))?;
                toml::from_str(&text).with_context(|| format!("--sim={path}"))?
            }
        };
        for slice in slices {
            let found = model.get(model.profile(&slice.name)?).context("a profile of the model")?;
            let part = gpu_with(&whole, whole_gpu, found)?;
            std::fs::write(folder.join(format!("{}.toml", slice.name)), toml::to_string(&part)?)?;
        }
        let driver = SimulatorDir::new()?;
        Ok(Self::Simulated { driver, library: SIMULATOR.find()?, folder: folder.to_owned() })
    }

    /// The function's program on a slice.
    fn command(&self, options: &Options, slice: &Slice, folder: &Path) -> Command {
        let mut command = Command::new(&options.command[0]);
        command.args(&options.command[1..]).env(ENV_BUILD, folder).env("CUDA_VISIBLE_DEVICES", &slice.device);
        if let Self::Simulated { driver, folder, .. } = self {
            command
                .env("LD_LIBRARY_PATH", prepend("LD_LIBRARY_PATH", driver.path()))
                .env_remove("GSHARE_SIM_GPUS")
                .env("GSHARE_SIM_MIG", &slice.name)
                .env("GSHARE_SIM_DEVICE", device_file(folder, slice))
                .env("GSHARE_SIM_PROFILE", folder.join(format!("{}.toml", slice.name)));
        }
        command
    }

    fn scale(&self, slice: &Slice) -> anyhow::Result<Scale<'_>> {
        Ok(match self {
            Self::Real(nvml) => {
                let before = nvml.memory(&slice.device)?.1.0;
                Scale::Real { nvml, device: slice.device.clone(), before }
            }
            Self::Simulated { library, folder, .. } => {
                let device = device_file(folder, slice);
                Scale::Simulated { truth: Truth::load(library, &device)?, device }
            }
        })
    }
}

fn device_file(folder: &Path, slice: &Slice) -> PathBuf {
    folder.join(format!("{}.device", slice.name))
}

/// A whole GPU of the simulated driver, with an A100's costs.
const TYPICAL: &str = r#"
device_name = "GPU"
compute_capability = [8, 0]
threads_per_sm = 2048
blocks_per_sm = 32
shared_memory_per_sm_bytes = 167936
l2_bytes = 41943040
clock_khz = 1410000
memory_clock_khz = 1593000
memory_bus_bits = 5120
host_bandwidth = 24000000000
device_bandwidth = 1700000000000
copy_fixed_ns = 1500
context_bytes = 432013312
cost = { fixed_ns = 2200, ns_per_wave = 4000 }
"#;

/// A GPU to cut into the slice, as large as its largest profile `whole`. The simulated driver gives a MIG device its own SMs and
/// memory, and the bandwidth within the device in proportion to its memory slices.
fn gpu_with(gpu: &toml::Table, whole: &MigProfile, slice: &MigProfile) -> anyhow::Result<toml::Table> {
    let sms = |profile: &MigProfile| {
        profile.sms.map(i64::from).with_context(|| {
            format!("{}: its number of SMs is not known; choose another --gpu to simulate", profile.name)
        })
    };
    let bandwidth = gpu.get("device_bandwidth").and_then(toml::Value::as_integer);
    let bandwidth = bandwidth.context("device_bandwidth: need a number")?;
    let memory = i64::try_from(slice.memory.get())?;
    let mut gpu = gpu.clone();
    gpu.remove("cut");
    for (key, value) in [
        ("gpus", 1),
        ("sms", sms(whole)?),
        ("memory_bytes", i64::try_from(whole.memory.get())?),
        (
            "device_bandwidth",
            (bandwidth / i64::from(whole.memory_slices) * i64::from(slice.memory_slices)).max(1),
        ),
    ] {
        gpu.insert(key.to_owned(), value.into());
    }
    let mut mig = toml::Table::new();
    mig.insert("name".to_owned(), slice.name.as_ref().into());
    mig.insert("sms".to_owned(), sms(slice)?.into());
    mig.insert("memory_bytes".to_owned(), memory.into());
    gpu.insert("mig".to_owned(), toml::Value::Array(vec![mig.into()]));
    Ok(gpu)
}

/// Measures a function's use of memory.
enum Scale<'a> {
    Real { nvml: &'a Nvml, device: String, before: u64 },
    Simulated { truth: Truth, device: PathBuf },
}

impl Scale<'_> {
    fn used(&self) -> anyhow::Result<u64> {
        match self {
            // The context is included: NVML does not separate it.
            Self::Real { nvml, device, before } => Ok(nvml.memory(device)?.1.0.saturating_sub(*before)),
            // A function without a driver call has made no device.
            Self::Simulated { device, .. } if !device.exists() => Ok(0),
            Self::Simulated { truth, .. } => Ok(truth.read()?.memory()),
        }
    }
}

/// A component's process, weighed when it is ready and before it ends.
struct Weighed<'a> {
    runs: Process,
    scale: Scale<'a>,
    most: u64,
    running: bool,
    broken: Option<String>,
}

impl Weighed<'_> {
    fn look(&mut self) {
        match self.scale.used() {
            Ok(used) => self.most = self.most.max(used),
            Err(error) => self.broken = Some(format!("{error:#}")),
        }
    }
}

impl Executor for Weighed<'_> {
    fn start(&mut self, setting: Setting, within: Duration) -> Result<Ready, ExecError> {
        let ready = self.runs.start(setting, within)?;
        self.running = true;
        self.look();
        Ok(ready)
    }

    fn now(&self) -> Timestamp {
        self.runs.now()
    }

    fn submit(&mut self) -> Result<(), ExecError> {
        self.runs.submit()
    }

    fn wait(&mut self, until: Timestamp) -> Result<Option<Timestamp>, ExecError> {
        self.runs.wait(until)
    }

    fn stop(&mut self) {
        if core::mem::take(&mut self.running) {
            self.look();
        }
        self.runs.stop();
    }
}

impl Weighs for Weighed<'_> {
    fn memory(&mut self) -> Result<Bytes, ExecError> {
        match self.broken.take() {
            Some(what) => Err(ExecError::Unavailable(format!("its memory cannot be seen: {what}"))),
            None => Ok(Bytes(self.most)),
        }
    }
}
