//! LALBO3 for real: model processes under `gshared`'s GPU manager on simulated GPUs, beside the simulation of the same load.
//!
//! Four GPUs, twelve models of Table I (GPU-enabled FaaS), 2,000 requests at the paper's rate per GPU. Times are a tenth
//! and sizes a 64th of the paper's, so that it ends within two minutes or so. Everything but the GPU is real: processes are
//! started, hooked, allocate, copy, launch kernels and are killed; the simulated driver lets kernels and copies take their time.
//!
//! First every model is profiled through the manager, as the paper does (section IV-A): loaded on each GPU, run, evicted; one
//! GPU loads at a time while the others run, as it mostly is later. The simulation then gets these profiles and the same
//! arrivals, and knows nothing else of the run. So the difference is what the simulator leaves out: processes that wait for
//! a CPU, sockets, and the hook and its daemon.
//!
//! On a busy machine costs change between profiling and the run. So there is a second simulation, `simulated_afterwards`, with
//! the mean costs of the run itself: what is left is the difference in decisions and queueing.

use anyhow::{Context, Result, anyhow, ensure};
use gshare_core::{Bytes, Duration, GpuId, ModelId, NodeId, RequestId, Timestamp};
use gshare_runner::manager::{
    GpuManager, GpuSpec, Hook, ManagerConfig, Program, Report as Told, Serving, Submission,
};
use gshare_sched::request::{
    LocalityScheduler, ModelProfile, Policy, RequestAction, RequestEvent, RequestScheduler, SchedulerConfig,
    Tier,
};
use gshare_sim::Rng;
use gshared::{Clock as _, Config, Daemon, MonotonicClock};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use super::lalb::{Scenario, arrivals, round, zipf};
use super::whole_devices::{Arrival, Cluster, Notes, noted, percentile};
use super::{Report, mean, row};

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of GPUs
    #[arg(long, default_value_t = 4)]
    gpus: u32,
    /// Number of models, spread evenly over Table I
    #[arg(long, default_value_t = 12)]
    models: u32,
    /// Number of requests
    #[arg(long, default_value_t = 2_000)]
    requests: usize,
    /// Times are the paper's divided by this
    #[arg(long, default_value_t = 10)]
    time_scale: u64,
    /// Sizes are the paper's divided by this
    #[arg(long, default_value_t = 64)]
    size_scale: u64,
    /// Memory of each GPU for models before that, MiB
    #[arg(long, default_value_t = 7200)]
    memory: u64,
    /// Exponent of the Zipf distribution of popularity
    #[arg(long, default_value_t = 0.5)]
    skew: f64,
    /// Draws the arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Do not build the command, the hook and the simulated driver: they lie beside this program
    #[arg(long)]
    built: bool,
    /// Without the hook and its daemon
    #[arg(long)]
    bare: bool,
}

/// What is measured, in seconds of the run.
struct Found {
    latencies: Vec<f64>,
    misses: u64,
    requests: u64,
    makespan: f64,
}

impl Found {
    fn new(latencies: Vec<f64>, makespan: f64, notes: &Notes) -> Self {
        let stats = notes.stats;
        Self { latencies, misses: stats.misses, requests: stats.hits + stats.misses, makespan }
    }
}

/// Runs it.
///
/// # Errors
/// When what it needs cannot be built, a request is rejected, or the simulator finds a broken promise.
pub fn run(args: &Args) -> Result<Report> {
    ensure!(args.time_scale > 0 && args.size_scale > 0, "a scale is 0: need at least 1");
    ensure!((1..=16).contains(&args.gpus), "--gpus is {}: need 1 to 16", args.gpus);
    let scenario = Scenario::of_the_paper()?;
    let stage = Stage::new(args, &scenario)?;
    let profiled = stage.profile()?;
    let rate = scenario.per_minute * u64::from(args.gpus) / u64::from(scenario.gpus);
    let minutes = args.requests.div_ceil(usize::try_from(rate)?);
    let shares = zipf(usize::try_from(args.models)?, args.skew, minutes);
    let mut load = arrivals(&shares, rate, &mut Rng::new(args.seed));
    load.truncate(args.requests);
    for arrival in &mut load {
        arrival.at = Timestamp::from_nanos(arrival.at.as_nanos() / args.time_scale);
    }
    let (measured, observed) = stage.measure(&load, &profiled)?;
    let simulated = stage.simulate(&load, &profiled, args.seed)?;
    let afterwards = stage.simulate(&load, &observed, args.seed)?;
    let mut report = Report::new("lalb-real", vec![args.seed]);
    let figures = |found: &Found| {
        let at = |share| percentile(&found.latencies, share);
        #[expect(clippy::cast_precision_loss, reason = "reports")]
        let miss = 100.0 * found.misses as f64 / found.requests as f64;
        [
            ("mean_ms", 1e3 * mean(found.latencies.iter().copied())),
            ("p50_ms", 1e3 * at(500)),
            ("p90_ms", 1e3 * at(900)),
            ("p99_ms", 1e3 * at(990)),
            ("max_ms", 1e3 * at(1000)),
            ("miss_pct", miss),
            ("makespan_s", found.makespan),
        ]
    };
    let (real, model, after) = (figures(&measured), figures(&simulated), figures(&afterwards));
    let mut add = |name: &str, figures: &[(&str, f64)]| {
        let mut pairs = vec![("policy", Value::from(name)), ("requests", load.len().into())];
        pairs.extend(figures.iter().map(|(key, value)| (*key, round(*value))));
        report.rows.push(row(&pairs));
    };
    add("measured", &real);
    add("simulated", &model);
    add("simulated_afterwards", &after);
    let apart = |model: &[(&'static str, f64)]| -> Vec<(&'static str, f64)> {
        let pairs = real.iter().zip(model).filter(|((name, _), _)| *name != "miss_pct");
        pairs.map(|(real, model)| (real.0, 100.0 * (real.1 / model.1 - 1.0))).collect()
    };
    add("measured_over_simulated_pct", &apart(&model));
    add("measured_over_afterwards_pct", &apart(&after));
    for (name, costs) in [("profiled", &profiled), ("observed", &observed)] {
        let of = |get: fn(&ModelProfile) -> Duration| {
            round(1e3 * mean(costs.models.iter().map(|profile| get(profile).as_secs_f64())))
        };
        report.rows.push(row(&[
            ("policy", name.into()),
            ("load_ms", of(|profile| profile.load_disk)),
            ("infer_ms", of(|profile| profile.infer)),
            ("evict_ms", round(1e3 * costs.eviction.as_secs_f64())),
            ("load_average", round(load_average())),
        ]));
    }
    Ok(report)
}

/// Processes that wait for a CPU: what is measured here is only as good as the machine is quiet.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// Loading and running times in seconds by model.
struct Costs {
    loads: Vec<Vec<f64>>,
    runs: Vec<Vec<f64>>,
}

impl Costs {
    fn new(models: u32) -> Self {
        let empty = vec![Vec::new(); models as usize];
        Self { loads: empty.clone(), runs: empty }
    }

    /// Means; of a model without loads or runs what was known before.
    fn means(&self, before: &Profiled) -> Profiled {
        let all = self.loads.iter().zip(&self.runs).zip(&before.models);
        let models = all.map(|((loads, runs), before)| {
            let of = |times: &[f64], before: Duration| match times.is_empty() {
                true => before,
                false => duration(mean(times.iter().copied())),
            };
            let load = of(loads, before.load_disk);
            ModelProfile { load_disk: load, load_host: load, infer: of(runs, before.infer) }
        });
        Profiled { models: models.collect(), eviction: before.eviction }
    }

    /// Notes what was told of a model: of the one that a request was for, where it ran.
    fn note(&mut self, event: RequestEvent, model: impl Fn(RequestId) -> Option<ModelId>) {
        match event {
            RequestEvent::Loaded { model, took, .. } => self.loads[model.index()].push(took.as_secs_f64()),
            RequestEvent::Completed { request, took, .. } => {
                if let Some(model) = model(request) {
                    self.runs[model.index()].push(took.as_secs_f64());
                }
            }
            _ => {}
        }
    }
}

/// What each model costs as the manager sees it.
struct Profiled {
    models: Vec<ModelProfile>,
    eviction: Duration,
}

struct Stage<'a> {
    args: &'a Args,
    scenario: &'a Scenario,
    config: ManagerConfig,
    fixture: PathBuf,
    _daemon: Option<gshared::Running>,
    _dir: tempfile::TempDir,
}

impl<'a> Stage<'a> {
    fn new(args: &'a Args, scenario: &'a Scenario) -> Result<Self> {
        let built = build(args.built, &["gshare-cli", "gshare-hook", "gshare-fake-cuda"])?;
        let dir = tempfile::Builder::new().prefix("gshare-lalb-").tempdir()?;
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            std::os::unix::fs::symlink(built.join("libfake_cuda.so"), dir.path().join(name))?;
        }
        // Copies take as long as the models' loading times want on average.
        let (bytes, millis) = scenario.model.iter().fold((0, 0), |(bytes, millis), model| {
            (bytes + (model.memory_mib << 20), millis + model.load_ms)
        });
        let bandwidth = bytes / args.size_scale * 1000 * args.time_scale / millis;
        // Room for contexts besides the models.
        let memory = (args.memory << 20) / args.size_scale + (32 << 20);
        let profile = format!(
            "device_name = 'Replay'\ngpus = {}\nsms = 16\nmemory_bytes = {memory}\ncompute_capability = [8, 0]\n\
             threads_per_sm = 2048\nblocks_per_sm = 16\nshared_memory_per_sm_bytes = 102400\nl2_bytes = 1048576\n\
             clock_khz = 1000000\nmemory_clock_khz = 1000000\nmemory_bus_bits = 128\nhost_bandwidth = {bandwidth}\n\
             device_bandwidth = 100000000000\ncopy_fixed_ns = 1500\ncontext_bytes = 1048576\n\
             [cost]\nfixed_ns = 1000\nns_per_wave = 10000\n",
            args.gpus
        );
        std::fs::write(dir.path().join("profile.toml"), profile)?;
        let mut config = ManagerConfig::default();
        config.environment = vec![
            ("LD_LIBRARY_PATH".into(), dir.path().into()),
            ("GSHARE_SIM_DEVICE".into(), dir.path().join("device").into()),
            ("GSHARE_SIM_PROFILE".into(), dir.path().join("profile.toml").into()),
        ];
        let mut daemon = None;
        if !args.bare {
            let socket = dir.path().join("gshare.sock");
            daemon = Some(Daemon::new(Config::at(&socket))?.spawn()?);
            config.hook = Some(Hook { preload: built.join("libgshare_hook.so"), socket });
        }
        Ok(Self { args, scenario, config, fixture: built.join("gshare-fixture"), _daemon: daemon, _dir: dir })
    }

    fn program(&self, model: u32, profile: ModelProfile) -> Program {
        let table = &self.scenario.model;
        let at = model as usize * table.len() / self.args.models as usize;
        let of = &table[at.min(table.len() - 1)];
        let memory = Bytes((of.memory_mib << 20) / self.args.size_scale);
        let infer = of.infer_ms * 1_000_000 / self.args.time_scale;
        let mut program = Program::new(&self.fixture, memory, profile);
        let arguments = ["model", "--memory", &memory.get().to_string(), "--infer", &format!("{infer}ns")];
        program.arguments = arguments.map(Into::into).into();
        program
    }

    fn gpu(&self, gpu: u32) -> GpuSpec {
        GpuSpec::new(gpu.to_string(), Bytes((self.args.memory << 20) / self.args.size_scale))
    }

    /// Loads, runs and evicts every model on every GPU; one GPU loads at a time.
    fn profile(&self) -> Result<Profiled> {
        const RUNS: u64 = 4;
        let unknown = ModelProfile {
            load_disk: Duration::from_secs(1),
            load_host: Duration::from_secs(1),
            infer: Duration::from_secs(1),
        };
        let mut manager = GpuManager::new(self.config.clone())?;
        for gpu in 0..self.args.gpus {
            manager.add_gpu(GpuId::new(gpu), self.gpu(gpu))?;
        }
        for model in 0..self.args.models {
            manager.add_model(ModelId::new(model), self.program(model, unknown))?;
        }
        let clock = MonotonicClock;
        let models = self.args.models;
        let mut costs = Costs::new(models);
        let mut evictions = Vec::new();
        // What each GPU is at: its model (GPUs begin with different ones), and when its eviction was ordered.
        let mut at = vec![(0, Timestamp::ZERO); self.args.gpus as usize];
        let order = |manager: &mut GpuManager, gpu: u32, step: u32| {
            let model = ModelId::new((step + gpu * models / self.args.gpus) % models);
            let (gpu, from) = (GpuId::new(gpu), Tier::Disk);
            manager.order(clock.now(), RequestAction::Load { gpu, model, from, keep_on_host: false })
        };
        let run = |manager: &mut GpuManager, gpu: GpuId, model: ModelId, request: u64| {
            let request = RequestId::new(request);
            manager.order(clock.now(), RequestAction::Dispatch { gpu, request, model, batch_more: 0 })
        };
        let model_of =
            |request: RequestId| u32::try_from(request.number() >> 8 & 0xff_ffff).ok().map(ModelId::new);
        let mut next: VecDeque<u32> = (0..self.args.gpus).collect();
        let mut loading = false;
        let mut left = self.args.gpus;
        let mut reports = Vec::new();
        while left > 0 {
            if let (false, Some(gpu)) = (loading, next.front().copied()) {
                order(&mut manager, gpu, at[gpu as usize].0)?;
                next.pop_front();
                loading = true;
            }
            manager.handle(clock.now(), &mut reports)?;
            if reports.is_empty() {
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
            for report in reports.drain(..) {
                let Told::Event(event) = report else { continue };
                // The first run finds everything cold; it counts like the others, as it does later.
                costs.note(event, model_of);
                match event {
                    RequestEvent::Loaded { gpu, model, .. } => {
                        loading = false;
                        let request = u64::from(gpu.number()) << 32 | u64::from(model.number()) << 8;
                        run(&mut manager, gpu, model, request)?;
                    }
                    RequestEvent::Completed { gpu, request, .. } => {
                        let model = model_of(request).context("no such model")?;
                        if request.number() & 0xff < RUNS - 1 {
                            run(&mut manager, gpu, model, request.number() + 1)?;
                        } else {
                            at[gpu.index()].1 = clock.now();
                            manager.order(clock.now(), RequestAction::Evict { gpu, model })?;
                        }
                    }
                    RequestEvent::Evicted { gpu, .. } => {
                        let (step, since) = &mut at[gpu.index()];
                        evictions.push(clock.now().saturating_since(*since).as_secs_f64());
                        *step += 1;
                        if *step == models {
                            left -= 1;
                        } else {
                            next.push_back(gpu.number());
                        }
                    }
                    RequestEvent::GpuJoined { .. }
                    | RequestEvent::ModelAdded { .. }
                    | RequestEvent::ModelProfiled { .. } => {}
                    other => return Err(anyhow!("while profiling: {other:?}")),
                }
            }
        }
        let before = Profiled { models: vec![unknown; models as usize], eviction: duration(mean(evictions)) };
        Ok(costs.means(&before))
    }

    fn scheduler(&self, profiled: &Profiled) -> Result<Box<dyn RequestScheduler>> {
        let mut config = SchedulerConfig::paper(Policy::LalbO3 { skip_limit: self.scenario.skip_limit });
        config.skip_age = Duration::from_nanos(config.skip_age.as_nanos() / self.args.time_scale);
        config.eviction = profiled.eviction;
        Ok(Box::new(LocalityScheduler::new(config)?))
    }

    /// What was measured, and what things cost meanwhile.
    fn measure(&self, load: &[Arrival], profiled: &Profiled) -> Result<(Found, Profiled)> {
        let notes = Arc::<Mutex<Notes>>::default();
        let scheduler = noted(self.scheduler(profiled)?, &notes);
        let serving = Serving::spawn(self.config.clone(), Box::new(scheduler))?;
        let handle = serving.handle();
        for gpu in 0..self.args.gpus {
            handle.add_gpu(GpuId::new(gpu), self.gpu(gpu))?;
        }
        for (model, profile) in (0..).zip(&profiled.models) {
            handle.add_model(ModelId::new(model), self.program(model, *profile))?;
        }
        let (sender, endings) = channel();
        let start = std::time::Instant::now();
        for (request, arrival) in (0..).zip(load) {
            let due = std::time::Duration::from_nanos(arrival.at.as_nanos());
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            let submission =
                Submission::new(RequestId::new(request), ModelId::new(arrival.model), Vec::new());
            handle.submit_to(submission, sender.clone())?;
        }
        drop(sender);
        let mut latencies = Vec::new();
        for (request, ending) in &endings {
            let answer = ending.with_context(|| format!("{request}"))?;
            latencies.push(answer.completed.saturating_since(answer.arrived).as_secs_f64());
        }
        let makespan = start.elapsed().as_secs_f64();
        ensure!(latencies.len() == load.len(), "{} of {} requests ended", latencies.len(), load.len());
        latencies.sort_by(f64::total_cmp);
        let notes = notes.lock();
        let mut costs = Costs::new(self.args.models);
        let model = |request: RequestId| {
            let arrival = load.get(usize::try_from(request.number()).ok()?)?;
            Some(ModelId::new(arrival.model))
        };
        notes.told.iter().for_each(|(_, event)| costs.note(*event, model));
        Ok((Found::new(latencies, makespan, &notes), costs.means(profiled)))
    }

    fn simulate(&self, load: &[Arrival], profiled: &Profiled, seed: u64) -> Result<Found> {
        let model = |(model, profile): (u32, &ModelProfile)| (self.program(model, *profile).memory, *profile);
        let cluster = Cluster {
            devices: (0..self.args.gpus).map(|gpu| (NodeId::new(0), self.gpu(gpu).memory)).collect(),
            models: (0..).zip(&profiled.models).map(model).collect(),
            eviction: profiled.eviction,
            arrivals: load.to_vec(),
        };
        let answered = cluster.run(seed, || self.scheduler(profiled))?;
        let makespan = answered.end.saturating_since(Timestamp::ZERO).as_secs_f64();
        Ok(Found::new(answered.latencies, makespan, &answered.notes))
    }
}

fn duration(seconds: f64) -> Duration {
    Duration::from_nanos(
        u64::try_from(std::time::Duration::from_secs_f64(seconds).as_nanos()).unwrap_or(u64::MAX),
    )
}

/// The directory of the model process, the hook and the simulated driver: this program's own, where cargo puts them.
pub(super) fn build(built: bool, packages: &[&str]) -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.parent().context("no directory")?;
    if built {
        return Ok(dir.to_owned());
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("no checkout")?;
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        // Not quiet: it may take minutes, or wait for another cargo, and says so on stderr.
        .arg("build")
        .args(packages.iter().flat_map(|package| ["--package", package]))
        // With the package's name before it, this is the feature of its dependency on itself, which tests have.
        .args(["--features", "fixtures"].iter().filter(|_| packages.contains(&"gshare-cli")))
        .args(["--profile", profile, "--target-dir"])
        .arg(dir.parent().context("no target directory")?)
        .current_dir(root)
        .stdout(std::process::Stdio::null())
        .status()
        .context("cargo")?;
    ensure!(status.success(), "cargo build: {status}");
    Ok(dir.to_owned())
}
