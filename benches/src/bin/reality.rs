//! `reality`: the same functions and load in `World` and as real processes on the simulated driver, and how far the two are apart.
//!
//! A scenario is deployed to a host that this program starts; the host measures the functions, and `World` is given the points
//! that it measured. Then both get Poisson arrivals of the same rates. Processes, HTTP, the hook and the daemon are real on one
//! side, and on the other nothing is.

use anyhow::{Context as _, Result, bail, ensure};
use clap::Parser;
use gshare_core::platform::{DeviceSpec, FunctionSpec, Work};
use gshare_core::profile::ProfileTable;
use gshare_core::request::NodeId;
use gshare_core::{Bytes, Duration, GpuShare, Quota, QuotaRange, SmShare};
use gshare_sched::platform::PlatformSettings;
use gshare_sim::Rng;
use gshare_sim::world::{self, Depth, Function, Load, Plan};
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
    /// The seed of the arrivals.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print one JSON object for each function and depth.
    #[arg(long)]
    json: bool,
}

/// A function: kernels of 2 ms in a request, requests per second, and the SLO in ms.
struct Served {
    name: &'static str,
    kernels: u32,
    rate: f64,
    slo_ms: u64,
}

/// A scenario: its GPUs, its functions, and whether a trainer runs beside them.
struct Scenario {
    name: &'static str,
    gpus: usize,
    functions: &'static [Served],
    trainer: bool,
}

const SCENARIOS: [Scenario; 3] = [
    Scenario {
        name: "one function",
        gpus: 1,
        functions: &[Served { name: "resnet", kernels: 5, rate: 20.0, slo_ms: 150 }],
        trainer: false,
    },
    Scenario {
        name: "three functions",
        gpus: 2,
        functions: &[
            Served { name: "resnet", kernels: 5, rate: 25.0, slo_ms: 150 },
            Served { name: "bert", kernels: 10, rate: 8.0, slo_ms: 300 },
            Served { name: "ocr", kernels: 20, rate: 3.0, slo_ms: 800 },
        ],
        trainer: false,
    },
    Scenario {
        name: "beside a trainer",
        gpus: 1,
        functions: &[Served { name: "resnet", kernels: 5, rate: 15.0, slo_ms: 200 }],
        trainer: true,
    },
];

/// The figures of a function after a run.
#[derive(Debug, Clone, Copy)]
struct Seen {
    requests: u64,
    attainment: f64,
    mean_ms: f64,
    /// Device time that a request takes, in ms, not weighted by its share of the SMs.
    gpu_ms: f64,
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
    fn start(programs: &Path, gpus: usize, state: &Path) -> Result<Self> {
        let program = programs.join("gshare-openfaas");
        let mut child = Command::new(&program)
            .args(["--listen", "127.0.0.1:0", &format!("--sim=v100,devices={gpus}"), "--state"])
            .arg(state)
            .stdout(Stdio::piped())
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

/// Times of a Poisson process in s.
fn times(rate: f64, seconds: u64, seed: u64) -> Vec<f64> {
    let (mut random, mut due) = (Rng::new(seed), 0.0_f64);
    let mut next = || {
        let uniform: f64 = (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        due -= (1.0 - uniform).ln() / rate;
        Some(due).filter(|due| *due < seconds as f64)
    };
    std::iter::from_fn(&mut next).collect()
}

/// The same times for `World`: so many in each tenth of a second, after some seconds in which the first instance starts.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "tenths of some seconds")]
fn counts(times: &[f64], seconds: u64) -> Load {
    const BINS: usize = 10;
    let mut counts = vec![0; (LEAD + usize::try_from(seconds).unwrap_or(0)) * BINS];
    for time in times {
        let bin = LEAD * BINS + (time * BINS as f64) as usize;
        if let Some(count) = counts.get_mut(bin) {
            *count += 1;
        }
    }
    Load::Counts { bin: Duration::from_millis(1_000 / BINS as u64), counts }
}

/// Seconds before the load, in `World`.
const LEAD: usize = 3;

/// Latencies of requests that are sent at these times, in ms.
fn load(url: &str, name: &str, times: &[f64]) -> Vec<f64> {
    let (address, begun) = (format!("{url}/function/{name}"), Instant::now());
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for due in times {
            let at = std::time::Duration::from_secs_f64(*due);
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

/// Runs a scenario on a host with real processes: figures of each function, and its state after the load.
fn real(options: &Options, scenario: &Scenario) -> Result<Vec<(Seen, Value)>> {
    let dir = tempfile::tempdir()?;
    let programs = options.programs.canonicalize()?;
    let host = Host::start(&programs, scenario.gpus, dir.path())?;
    for served in scenario.functions {
        let annotations = json!({"gshare/slo": format!("{}ms", served.slo_ms), "gshare/load": "400ms"});
        host.deploy(&programs, served.name, &annotations, &json!({"KERNELS": served.kernels.to_string()}))?;
    }
    let mut names: Vec<&str> = scenario.functions.iter().map(|served| served.name).collect();
    if scenario.trainer {
        let annotations = json!({"gshare/workload": "training", "fastgshare/gpu_mem": "1GiB"});
        host.deploy(&programs, "trainer", &annotations, &json!({"STEPS": "1000000"}))?;
        names.push("trainer");
    }
    host.wait(&names)?;
    let before: Vec<Value> =
        scenario.functions.iter().map(|of| host.function(of.name)).collect::<Result<_>>()?;
    let latencies: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let begin = |served: &'static Served| {
            let url = host.url.as_str();
            let times = times(served.rate, options.seconds, options.seed);
            scope.spawn(move || load(url, served.name, &times))
        };
        let threads: Vec<_> = scenario.functions.iter().map(begin).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_default()).collect()
    });
    // The host learns within two seconds what was used last.
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
        seen.push((Seen { requests, attainment, mean_ms, gpu_ms: gpu_s * 1e3 / answered }, after));
    }
    Ok(seen)
}

/// The same in `World`, with what the host has measured.
fn simulated(options: &Options, scenario: &Scenario, measured: &[Value], depth: Depth) -> Result<Vec<Seen>> {
    let devices = vec![DeviceSpec::new(NodeId(0), Bytes(17_066_885_120)); scenario.gpus];
    let mut functions = Vec::new();
    let mut parts = Vec::new();
    for (served, state) in scenario.functions.iter().zip(measured) {
        let profile: ProfileTable =
            serde_json::from_value(state["profile"].clone()).context("the measured points")?;
        let memory = Bytes(state["memory_bytes"].as_u64().context("the measured memory")?);
        let load = Duration::from_millis(400);
        let spec = FunctionSpec::new(Work::Inference { profile: Some(profile) }, memory)
            .with_slo(Duration::from_millis(served.slo_ms))
            .with_instances(1, 20)
            .with_loads(load, load);
        let mut function = Function::new(served.name, spec);
        function.load = counts(&times(served.rate, options.seconds, options.seed), options.seconds);
        functions.push(function);
        let sm = state["instances"][0]["parts"][0]["share"]["sm_bp"].as_f64();
        parts.push(sm.context("an instance with a share")? / 1e4);
    }
    if scenario.trainer {
        let time = QuotaRange::new(Quota::from_percent(10).context("10 %")?, Quota::WHOLE)?;
        let share = GpuShare::new(time, SmShare::WHOLE, SmShare::WHOLE, Some(Bytes::from_gib(1)))?;
        let spec = FunctionSpec::new(Work::Training { workers: 1, share }, Bytes::from_gib(1));
        let mut trainer = Function::new("trainer", spec);
        trainer.train = Duration::from_secs(3_600);
        functions.push(trainer);
    }
    let mut plan = Plan::new(devices, functions, Duration::from_secs(options.seconds + LEAD as u64));
    plan.depth = depth;
    let make = || PlatformSettings::default().build().map_err(|error| error.to_string());
    let outcome = world::run(&plan, options.seed, make).map_err(|failure| anyhow::anyhow!("{failure}"))?;
    let seen = scenario.functions.iter().zip(&outcome.functions).zip(parts).map(|((_, of), sm)| {
        let mean =
            of.latencies.iter().map(|latency| latency.as_secs_f64()).sum::<f64>() / of.answered.max(1) as f64;
        Seen {
            requests: of.requests,
            attainment: of.attainment().unwrap_or(1.0),
            mean_ms: mean * 1e3,
            gpu_ms: of.used.as_secs_f64() * 1e3 / sm / of.answered.max(1) as f64,
        }
    });
    Ok(seen.collect())
}

fn main() -> Result<()> {
    let options = Options::parse();
    if !options.json {
        println!(
            "simulated driver; {} s a scenario; latencies from the time that a request is due",
            options.seconds
        );
        println!(
            "{:<18} {:<8} {:<9} {:>8} {:>9} {:>9} {:>9}",
            "scenario", "function", "where", "requests", "within", "mean ms", "GPU ms"
        );
    }
    for scenario in &SCENARIOS {
        let real = real(&options, scenario).with_context(|| scenario.name)?;
        let measured: Vec<Value> = real.iter().map(|(_, state)| state.clone()).collect();
        let mut rows: Vec<(&str, Vec<Seen>)> = vec![("real", real.iter().map(|(seen, _)| *seen).collect())];
        for (name, depth) in [("requests", Depth::Requests), ("kernels", Depth::Kernels)] {
            rows.push((name, simulated(&options, scenario, &measured, depth)?));
        }
        for (index, served) in scenario.functions.iter().enumerate() {
            for (place, seen) in &rows {
                let of = seen[index];
                if options.json {
                    let line = json!({"scenario": scenario.name, "function": served.name, "where": place,
                        "requests": of.requests, "within_slo": of.attainment, "mean_ms": of.mean_ms, "gpu_ms": of.gpu_ms});
                    println!("{line}");
                } else {
                    println!(
                        "{:<18} {:<8} {place:<9} {:>8} {:>8.1}% {:>9.1} {:>9.2}",
                        scenario.name,
                        served.name,
                        of.requests,
                        of.attainment * 100.0,
                        of.mean_ms,
                        of.gpu_ms
                    );
                }
            }
        }
    }
    Ok(())
}
