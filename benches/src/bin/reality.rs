//! `reality`: the same functions and load in `World` and as real processes on the simulated driver, and how far the two are apart.
//!
//! A scenario is deployed to a host that this program starts. The host measures the functions, and `World` is given the measured
//! points, the time of a call without GPU work, and the time in which a program starts. Then both get the same Poisson arrivals
//! with rates that change in steps, so that instances are started under load and some requests are late. Processes, HTTP, the hook
//! and the daemon are real on one side, and on the other nothing is. One run differs from the next, since a decision the other way
//! changes all later decisions. With `--seeds` the difference is the mean over the seeds, with its standard error.
//!
//! With `--gpu` the processes run on the first GPU of this machine, and `World` has one device as well; scenarios on MIG slices are
//! left out. The program's kernels take the same time on any GPU, as they look at its clock.
//!
//! The last scenario is partition P1 of FluidFaaS (Table 7) on two GPUs: pipelines of three components under bursts. Their
//! times on slices are given, not measured: a kernel of the program takes the less the more SMs its slice has.

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use gshare_core::profile::ProfileTable;
use gshare_core::{Bytes, Duration, GpuShare, NodeId, Quota, QuotaRange, SmShare, Timestamp};
use gshare_sched::pipeline::Goal;
use gshare_sched::platform::{DeviceSpec, FunctionSpec, MigLayout, PlatformSettings, Work};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::world::{self, Depth, Function, Plan};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// Compares `World` with real processes on the simulated driver.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The directory with `gshare-openfaas` and `gpu_function`, such as target/release.
    programs: PathBuf,
    /// Seconds of load for each scenario.
    #[arg(long, default_value_t = 30)]
    seconds: u64,
    /// The seed of the arrivals, or the first of several.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds each scenario is run with.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    seeds: u64,
    /// Run the processes on the first GPU of this machine, and `World` with one device; leaves out scenarios on MIG slices.
    #[arg(long)]
    gpu: bool,
    /// GPUs of each scenario, in place of its own number.
    #[arg(long, value_name = "N", conflicts_with = "gpu", value_parser = clap::value_parser!(u8).range(1..=16))]
    gpus: Option<u8>,
    /// Share GPUs by time alone, as it is done on a GPU without MPS.
    #[arg(long)]
    by_time: bool,
    /// Only the scenarios with this text in their names.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Print one JSON object for each function and depth, and one for each depth and scenario with the differences
    /// (`[mean, standard error]`).
    #[arg(long)]
    json: bool,
}

impl Options {
    fn gpus(&self, scenario: &Scenario) -> usize {
        if self.gpu { 1 } else { self.gpus.map_or(scenario.gpus, usize::from) }
    }
}

/// A function: kernels of 2 ms in a request (of each component, in a pipeline), requests per second in one step after the other,
/// over and over, and the SLO in ms.
struct Served {
    name: &'static str,
    kernels: u32,
    rates: &'static [f64],
    slo_ms: u64,
}

/// A scenario: its GPUs, the MIG slices of each, its functions, and whether a trainer runs beside them. Functions on slices are
/// pipelines.
struct Scenario {
    name: &'static str,
    gpus: usize,
    slices: &'static [&'static str],
    functions: &'static [Served],
    trainer: bool,
}

/// Components of a pipeline.
const COMPONENTS: [&str; 3] = ["first", "second", "third"];
/// Memory of a component: three fit no slice of 10 GB at once.
const COMPONENT: Bytes = Bytes::from_gib(4);
/// Length of a step of the load in s.
const STEP: u64 = 10;

const SCENARIOS: [Scenario; 4] = [
    Scenario {
        name: "one function",
        gpus: 1,
        slices: &[],
        functions: &[Served { name: "resnet", kernels: 5, rates: &[10.0, 60.0, 20.0], slo_ms: 100 }],
        trainer: false,
    },
    Scenario {
        name: "three functions",
        gpus: 2,
        slices: &[],
        functions: &[
            Served { name: "resnet", kernels: 5, rates: &[10.0, 45.0, 10.0], slo_ms: 100 },
            Served { name: "bert", kernels: 10, rates: &[4.0, 4.0, 15.0], slo_ms: 200 },
            Served { name: "ocr", kernels: 20, rates: &[3.0, 1.0, 6.0], slo_ms: 400 },
        ],
        trainer: false,
    },
    Scenario {
        name: "beside a trainer",
        gpus: 1,
        slices: &[],
        functions: &[Served { name: "resnet", kernels: 5, rates: &[10.0, 40.0, 10.0], slo_ms: 120 }],
        trainer: true,
    },
    Scenario {
        name: "P1 of FluidFaaS",
        gpus: 2,
        slices: &["4g.40gb", "2g.20gb", "1g.10gb"],
        functions: &[
            Served { name: "images", kernels: 20, rates: &[20.0, 1.0, 1.0, 10.0], slo_ms: 360 },
            Served { name: "depth", kernels: 24, rates: &[12.0, 1.0, 8.0, 1.0], slo_ms: 430 },
            Served { name: "background", kernels: 16, rates: &[24.0, 20.0, 1.0, 1.0], slo_ms: 290 },
            Served { name: "expanded", kernels: 30, rates: &[9.0, 1.0, 1.0, 6.0], slo_ms: 540 },
        ],
        trainer: false,
    },
];

/// The figures of a function after a run.
#[derive(Debug, Clone, Copy)]
struct Seen {
    requests: u64,
    attainment: f64,
    mean_ms: f64,
    /// Device time that a request takes, in ms, not weighted by its share of the SMs; 0 on slices.
    gpu_ms: f64,
    /// Requests that went through several stages, and instances that replaced another instance.
    pipelined: u64,
    migrated: u64,
}

/// The graph of a pipeline with these kernels for each component: less on a slice with more SMs.
fn dag(served: &Served) -> Value {
    const SLICES: [(&str, u64); 4] = [("1g.10gb", 14), ("2g.20gb", 28), ("3g.40gb", 42), ("4g.40gb", 56)];
    let component = |name: &str| {
        let on = |(slice, sms): (&str, u64)| {
            let time = u64::from(served.kernels) * (2_000_000 * 14 / sms);
            json!({"slice": slice, "time_ns": time, "memory_bytes": COMPONENT.get()})
        };
        json!({"name": name, "profiles": SLICES.map(on)})
    };
    let edge = |pair: &[&str]| json!({"from": pair[0], "to": pair[1], "bytes": 4 << 20});
    let edges: Vec<_> = COMPONENTS.windows(2).map(edge).collect();
    json!({"name": served.name, "components": COMPONENTS.map(component), "edges": edges})
}

/// Both sides know how long the program takes to start: it starts again when it comes back to a slice, and has next to no weights.
/// Use is measured in windows of a second instead of ten, so that the load of two minutes has as many as twenty minutes would.
fn settings(options: &Options, start: Duration) -> PlatformSettings {
    let mut settings = PlatformSettings::default();
    settings.fractional.pool.sm_partitions = !options.by_time;
    settings.sliced.keeper.window = Duration::from_secs(1);
    let load = &mut settings.sliced.keeper.load;
    load.start = Duration::ZERO;
    load.host_bytes_per_second =
        COMPONENTS.len() as u64 * COMPONENT.get() * 1_000_000 / (start.as_nanos() / 1_000).max(1);
    load.storage_bytes_per_second = 1 << 40;
    settings
}

/// How long starting and measuring may take.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(180);

struct Host {
    child: Child,
    url: String,
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Host {
    fn start(options: &Options, scenario: &Scenario, state: &Path, start: Duration) -> Result<Self> {
        let program = options.programs.canonicalize()?.join("gshare-openfaas");
        let sim = match scenario.slices {
            _ if options.gpu => None,
            [] => Some(format!("--sim=v100,devices={}", options.gpus(scenario))),
            slices => Some(format!("--sim=a100,devices={},mig={}", options.gpus(scenario), slices.join("+"))),
        };
        let file = state.join("settings.json");
        std::fs::write(&file, serde_json::to_string(&settings(options, start))?)?;
        let mut child = Command::new(&program)
            .args(["--listen", "127.0.0.1:0", "--settings"])
            .arg(file)
            .args(sim)
            .arg("--state")
            .arg(state)
            .stdout(Stdio::piped())
            .envs(options.gpu.then_some(("CUDA_VISIBLE_DEVICES", "0")))
            .spawn()
            .with_context(|| program.display().to_string())?;
        let mut line = String::new();
        let output = child.stdout.take().context("its output")?;
        BufReader::new(output).read_line(&mut line)?;
        let url = line.split(' ').nth(1).filter(|url| url.starts_with("http")).map(str::to_owned);
        let mut host = Self { child, url: String::new() };
        host.url = url.with_context(|| format!("the host says `{line}`"))?;
        Ok(host)
    }

    fn deploy(&self, programs: &Path, name: &str, annotations: &Value, variables: &Value) -> Result<()> {
        let body = json!({"service": name, "image": "gpu_function", "envProcess": programs.join("gpu_function"),
            "annotations": annotations, "envVars": variables});
        ureq::post(&format!("{}/system/functions", self.url))
            .send(body.to_string())
            .with_context(|| name.to_owned())?;
        Ok(())
    }

    fn functions(&self) -> Result<Vec<Value>> {
        let text = ureq::get(&format!("{}/system/state", self.url)).call()?.body_mut().read_to_string()?;
        let state: Value = serde_json::from_str(&text)?;
        Ok(state["functions"].as_array().cloned().unwrap_or_default())
    }

    fn function(&self, name: &str) -> Result<Value> {
        let found = self.functions()?.into_iter().find(|of| of["name"] == name);
        found.with_context(|| format!("{name} is not deployed"))
    }

    fn wait(&self, names: &[&str]) -> Result<()> {
        let begun = Instant::now();
        loop {
            let all = self.functions()?;
            let ready = |name: &&str| {
                let serves = ["serving", "training"].map(Value::from);
                all.iter().any(|of| of["name"] == **name && serves.contains(&of["state"]))
            };
            if names.iter().all(ready) {
                return Ok(());
            }
            ensure!(begun.elapsed() < PATIENCE, "not all of {names:?} are ready in time: {all:?}");
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    }
}

/// Times of a Poisson process with a rate that changes with each step.
fn times(rates: &[f64], seconds: u64, seed: u64) -> Result<Vec<Timestamp>> {
    let steps = usize::try_from(seconds.div_ceil(STEP))?;
    let rates = rates.iter().copied().cycle().take(steps).collect();
    let end = Timestamp::ZERO + Duration::from_secs(seconds);
    Ok(Arrivals::rates(Duration::from_secs(STEP), rates)?.until(end, &mut Rng::new(seed)))
}

/// The time before the load, in `World`, in which the first instance starts.
const LEAD: Duration = Duration::from_secs(3);

/// Latencies of requests that are sent at these times, in ms.
fn load(url: &str, name: &str, times: &[Timestamp]) -> Vec<f64> {
    let (address, begun) = (format!("{url}/function/{name}"), Instant::now());
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for due in times {
            let at = std::time::Duration::from_nanos(due.as_nanos());
            std::thread::sleep(at.saturating_sub(begun.elapsed()));
            let address = &address;
            threads.push(scope.spawn(move || {
                let answered = ureq::get(address).call().is_ok();
                answered.then(|| begun.elapsed().saturating_sub(at).as_secs_f64() * 1e3)
            }));
        }
        threads.into_iter().filter_map(|thread| thread.join().ok().flatten()).collect()
    })
}

/// Median time of calls without GPU work, sent as the calls of the load are: the time of the client, HTTP and the host alone.
fn overhead(url: &str, name: &str) -> Result<Duration> {
    const RATE: &[f64] = &[20.0];
    const SECONDS: u64 = 5;
    let name = format!("{name}/echo");
    // The first call may have to wait for an instance.
    load(url, &name, &[Timestamp::ZERO]);
    let mut latencies = load(url, &name, &times(RATE, SECONDS, 0)?);
    latencies.sort_unstable_by(f64::total_cmp);
    let median =
        latencies.get(latencies.len() / 2).with_context(|| format!("{name}: nothing was answered"))?;
    Ok(Duration::from(std::time::Duration::from_secs_f64(median / 1e3)))
}

/// Median time by which a call takes longer if the program has to be started for it.
fn start(options: &Options) -> Result<Duration> {
    const STARTS: usize = 5;
    let (dir, scenario) = (tempfile::tempdir()?, &SCENARIOS[0]);
    let programs = options.programs.canonicalize()?;
    let host = Host::start(options, scenario, dir.path(), Duration::from_millis(400))?;
    let share = json!({"fastgshare/gpu_mem": "1GiB", "fastgshare/gpu_quota_request": "0.5", "fastgshare/gpu_sm_partition": "50"});
    host.deploy(&programs, "cold", &share, &json!({}))?;
    let address = format!("{}/function/cold", host.url);
    let call = || -> Result<Duration> {
        let begun = Instant::now();
        ureq::get(&address).call().with_context(|| address.clone())?;
        Ok(Duration::from_nanos(u64::try_from(begun.elapsed().as_nanos())?))
    };
    let mut times = Vec::new();
    for _ in 0..STARTS {
        ureq::post(&format!("{}/system/scale-function/cold", host.url)).send(r#"{"replicas":0}"#)?;
        let begun = Instant::now();
        while host.function("cold")?["instances"].as_array().is_none_or(|all| !all.is_empty()) {
            ensure!(begun.elapsed() < PATIENCE, "an instance does not end");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let cold = call()?;
        times.push(cold.saturating_sub(call()?));
    }
    times.sort_unstable();
    Ok(times[STARTS / 2])
}

/// Figures of each function on a host with real processes, its state after the load, and the time of a call without a GPU.
struct Real {
    functions: Vec<(Seen, Value)>,
    overhead: Duration,
}

/// Runs a scenario on a host with real processes.
fn real(options: &Options, scenario: &Scenario, start: Duration, seed: u64) -> Result<Real> {
    let dir = tempfile::tempdir()?;
    let programs = options.programs.canonicalize()?;
    let host = Host::start(options, scenario, dir.path(), start)?;
    for served in scenario.functions {
        let load = format!("{}us", start.as_nanos() / 1_000);
        let mut annotations = json!({"gshare/slo": format!("{}ms", served.slo_ms), "gshare/load": load});
        let mut variables = json!({"KERNELS": served.kernels.to_string()});
        if !scenario.slices.is_empty() {
            let file = dir.path().join(format!("{}.json", served.name));
            std::fs::write(&file, dag(served).to_string())?;
            annotations["gshare/workload"] = "pipeline".into();
            annotations["gshare/dag"] = file.to_string_lossy().into();
            variables["KERNEL_SMS"] = "14".into();
        }
        host.deploy(&programs, served.name, &annotations, &variables)?;
    }
    let mut names: Vec<&str> = scenario.functions.iter().map(|served| served.name).collect();
    if !scenario.slices.is_empty() {
        // A pipeline starts with its first request.
        names.clear();
    }
    host.wait(&names)?;
    if scenario.trainer {
        // Beside a trainer the points would hold the waits for its turns.
        let annotations = json!({"gshare/workload": "training", "fastgshare/gpu_mem": "1GiB"});
        host.deploy(&programs, "trainer", &annotations, &json!({"STEPS": "1000000"}))?;
        host.wait(&["trainer"])?;
    }
    let overhead = overhead(&host.url, scenario.functions[0].name)?;
    let before: Vec<Value> =
        scenario.functions.iter().map(|of| host.function(of.name)).collect::<Result<_>>()?;
    let latencies: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let begin = |served: &'static Served| {
            let url = host.url.as_str();
            let times = times(served.rates, options.seconds, seed)?;
            Ok(scope.spawn(move || load(url, served.name, &times)))
        };
        let threads: Vec<_> = scenario.functions.iter().map(begin).collect::<Result<_>>()?;
        Ok::<_, anyhow::Error>(threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect())
    })?;
    // The host learns within two seconds of the last use.
    std::thread::sleep(std::time::Duration::from_secs(3));
    let mut seen = Vec::new();
    for ((served, before), latencies) in scenario.functions.iter().zip(before).zip(&latencies) {
        let after = host.function(served.name)?;
        let more = |key: &str| after[key].as_f64().unwrap_or(0.0) - before[key].as_f64().unwrap_or(0.0);
        let (answered, gpu_s) = (more("answered"), more("gpu_seconds"));
        if latencies.is_empty() || answered < 1.0 {
            bail!("{}: nothing was answered", served.name);
        }
        let mean_ms = latencies.iter().sum::<f64>() / latencies.len() as f64;
        let requests = latencies.len() as u64;
        let attainment = more("within_slo") / answered;
        let gpu_ms = if scenario.slices.is_empty() { gpu_s * 1e3 / answered } else { 0.0 };
        let count = |key: &str| after[key].as_u64().unwrap_or(0);
        let (pipelined, migrated) = (count("pipelined"), count("migrated"));
        seen.push((Seen { requests, attainment, mean_ms, gpu_ms, pipelined, migrated }, after));
    }
    Ok(Real { functions: seen, overhead })
}

/// The function as it is deployed in `World`, with the points that the host measured; and the part of the SMs that an instance has,
/// 0 to 1, on a device that is shared out.
fn spec(
    scenario: &Scenario,
    served: &Served,
    state: &Value,
    start: Duration,
) -> Result<(FunctionSpec, Option<f64>)> {
    let mut memory = Bytes(state["memory_bytes"].as_u64().context("the measured memory")?);
    let (work, sm) = if scenario.slices.is_empty() {
        let profile: ProfileTable =
            serde_json::from_value(state["profile"].clone()).context("the measured points")?;
        let sm = state["instances"][0]["parts"][0]["share"]["sm_bp"].as_f64();
        (Work::Inference { profile: Some(profile) }, Some(sm.context("an instance with a share")? / 1e4))
    } else {
        let goal = Goal::default().with_runtime_memory(Bytes::from_mib(256));
        let dag = serde_json::from_value(dag(served))?;
        // The program's weights, which are moved when it makes room.
        memory = Bytes::from_mib(64);
        (Work::Pipeline { dag: Box::new(dag), goal: Box::new(goal) }, None)
    };
    let spec = FunctionSpec::new(work, memory).with_slo(Duration::from_millis(served.slo_ms));
    Ok((spec.with_instances(1, 20).with_loads(start, start), sm))
}

/// The same in `World`.
fn simulated(
    options: &Options,
    scenario: &Scenario,
    real: &Real,
    (start, seed): (Duration, u64),
    depth: Depth,
) -> Result<Vec<Seen>> {
    let device = match scenario.slices {
        [] => DeviceSpec::new(NodeId::new(0), Bytes(17_066_885_120)),
        slices => {
            let layout = MigLayout::named("A100-80", slices)?;
            DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80)).with_mig(layout)
        }
    };
    let devices = vec![device; options.gpus(scenario)];
    let mut functions = Vec::new();
    let mut parts = Vec::new();
    for (served, (_, state)) in scenario.functions.iter().zip(&real.functions) {
        let (spec, sm) = spec(scenario, served, state, start)?;
        let mut function = Function::new(served.name, spec);
        function.host = real.overhead;
        let times = times(served.rates, options.seconds, seed)?;
        let function =
            function.with_arrivals(Arrivals::times(times.into_iter().map(|at| at + LEAD).collect())?);
        functions.push(function);
        parts.push(sm);
    }
    if scenario.trainer {
        let time = QuotaRange::new(Quota::from_percent(10).context("10 %")?, Quota::WHOLE)?;
        let share = GpuShare::new(time, SmShare::WHOLE, SmShare::WHOLE, Some(Bytes::from_gib(1)))?;
        let spec = FunctionSpec::new(Work::Training { workers: 1, share }, Bytes::from_gib(1));
        let mut trainer = Function::new("trainer", spec);
        trainer.train = Duration::from_secs(3_600);
        functions.push(trainer);
    }
    let mut plan = Plan::new(devices, functions, LEAD + Duration::from_secs(options.seconds));
    plan.depth = depth;
    let make = || settings(options, start).build().map_err(|error| error.to_string());
    let outcome = world::run(&plan, seed, make).map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let seen = scenario.functions.iter().zip(&outcome.functions).zip(parts).map(|((_, of), sm)| {
        let mean =
            of.latencies.iter().map(|latency| latency.as_secs_f64()).sum::<f64>() / of.answered.max(1) as f64;
        Seen {
            requests: of.requests,
            attainment: of.attainment().unwrap_or(1.0),
            mean_ms: mean * 1e3,
            gpu_ms: sm.map_or(0.0, |sm| of.used.as_secs_f64() * 1e3 / sm / of.answered.max(1) as f64),
            pipelined: of.pipelined,
            migrated: of.migrated,
        }
    });
    Ok(seen.collect())
}

fn main() -> Result<()> {
    let options = Options::parse();
    let start = start(&options)?;
    if !options.json {
        println!(
            "{}; {} s a scenario; a program starts in {start}; latencies from the time that a request is due",
            if options.gpu { "a GPU" } else { "simulated driver" },
            options.seconds
        );
        println!(
            "{:<18} {:<10} {:<9} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "scenario",
            "function",
            "where",
            "requests",
            "within",
            "mean ms",
            "GPU ms",
            "pipelined",
            "migrated"
        );
    }
    let wanted = |scenario: &&Scenario| {
        let named = options.only.as_deref().is_none_or(|only| scenario.name.contains(only));
        named && (!options.gpu || scenario.slices.is_empty())
    };
    for scenario in SCENARIOS.iter().filter(wanted) {
        // Kernels are simulated on shares of a device alone.
        let depths: &[_] = match scenario.slices {
            [] => &[("requests", Depth::Requests), ("kernels", Depth::Kernels)],
            _ => &[("requests", Depth::Requests)],
        };
        // For each seed and place, all functions: the real functions first.
        let mut runs: Vec<Vec<Vec<Seen>>> = Vec::new();
        for seed in options.seed..options.seed.saturating_add(options.seeds) {
            let real = real(&options, scenario, start, seed).with_context(|| scenario.name)?;
            let mut places = vec![real.functions.iter().map(|(seen, _)| *seen).collect()];
            for (_, depth) in depths {
                places.push(simulated(&options, scenario, &real, (start, seed), *depth)?);
            }
            runs.push(places);
        }
        let names = ["real"].into_iter().chain(depths.iter().map(|(name, _)| *name));
        let functions = scenario.functions.len();
        for (index, served) in scenario.functions.iter().enumerate() {
            for (place, name) in names.clone().enumerate() {
                let all: Vec<Seen> = runs.iter().map(|run| run[place][index]).collect();
                print(&options, (scenario.name, served.name, name), sum(&all));
            }
        }
        for (place, name) in names.enumerate() {
            let of = |run: &Vec<Vec<Seen>>| (sum(&run[0]), sum(&run[place]));
            let pairs: Vec<(Seen, Seen)> = runs.iter().map(of).collect();
            if functions > 1 {
                let all: Vec<Seen> = pairs.iter().map(|pair| pair.1).collect();
                print(&options, (scenario.name, "all", name), sum(&all));
            }
            if place > 0 {
                apart(&options, (scenario.name, name), &pairs);
            }
        }
    }
    Ok(())
}

/// Prints how far all functions of a scenario are from the real functions: the mean of the seeds, and its standard error.
fn apart(options: &Options, (scenario, place): (&str, &str), pairs: &[(Seen, Seen)]) {
    let percent = |real: f64, other: f64| (real > 0.0).then(|| (other / real - 1.0) * 100.0);
    let of = |figure: &dyn Fn(&(Seen, Seen)) -> Option<f64>| -> Option<(f64, Option<f64>)> {
        let all: Vec<f64> = pairs.iter().map(figure).collect::<Option<_>>()?;
        let count = all.len() as f64;
        let mean = all.iter().sum::<f64>() / count;
        let squares = all.iter().map(|one| (one - mean).powi(2)).sum::<f64>();
        Some((mean, (all.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt())))
    };
    let within = of(&|(real, other)| Some((other.attainment - real.attainment) * 100.0));
    let latency = of(&|(real, other)| percent(real.mean_ms, other.mean_ms));
    let gpu = of(&|(real, other)| percent(real.gpu_ms, other.gpu_ms));
    if options.json {
        return println!(
            "{}",
            json!({"scenario": scenario, "where": place, "seeds": pairs.len(), "within_points": within,
            "mean_ms_percent": latency, "gpu_ms_percent": gpu})
        );
    }
    let text = |figure: Option<(f64, Option<f64>)>, unit: &str| match figure {
        None => "-".to_owned(),
        Some((mean, None)) => format!("{mean:+.1} {unit}"),
        Some((mean, Some(error))) => format!("{mean:+.1} +- {error:.1} {unit}"),
    };
    println!(
        "{scenario}, {place} beside real, {} seeds: within {}, mean latency {}, GPU time {}",
        pairs.len(),
        text(within, "points"),
        text(latency, "%"),
        text(gpu, "%")
    );
}

/// The figures of several functions, or runs, together.
fn sum(seen: &[Seen]) -> Seen {
    let requests = seen.iter().map(|of| of.requests).sum();
    let mean = |of: fn(&Seen) -> f64| {
        seen.iter().map(|one| of(one) * one.requests as f64).sum::<f64>() / requests as f64
    };
    Seen {
        requests,
        attainment: mean(|of| of.attainment),
        mean_ms: mean(|of| of.mean_ms),
        gpu_ms: mean(|of| of.gpu_ms),
        pipelined: seen.iter().map(|of| of.pipelined).sum(),
        migrated: seen.iter().map(|of| of.migrated).sum(),
    }
}

fn print(options: &Options, (scenario, function, place): (&str, &str, &str), of: Seen) {
    if options.json {
        let line = json!({"scenario": scenario, "function": function, "where": place, "requests": of.requests,
            "within_slo": of.attainment, "mean_ms": of.mean_ms, "gpu_ms": of.gpu_ms, "pipelined": of.pipelined,
            "migrated": of.migrated});
        return println!("{line}");
    }
    println!(
        "{scenario:<18} {function:<10} {place:<9} {:>8} {:>8.1}% {:>9.1} {:>9.2} {:>9} {:>9}",
        of.requests,
        of.attainment * 100.0,
        of.mean_ms,
        of.gpu_ms,
        of.pipelined,
        of.migrated
    );
}
