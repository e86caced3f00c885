//! `gshare demo`: programs that never synchronise share one device by their promised shares.
//!
//! The demo starts three hooked processes with request:limit 20:20, 30:30 and 50:50 per cent. Then one leaves, and the others,
//! with a limit of 100 %, take its time. On the demo's own simulated device the shares come from the device's ground truth (time
//! with a kernel of the process running), and elsewhere from the hooks' event timing in the daemon's books.

use super::out::table;
use super::sim::{self, Kind, Simulate};
use super::{Form, Where, cuda, print_json, run as under_hook, spin};
use anyhow::Context as _;
use gshare_core::{QuotaRange, ResourceSpec, SmShare};
use gshare_runner::Scratch;
use gshare_runner::libraries::{HOOK, SIMULATOR, SimulatorDir};
use gshared::{Config, Daemon, Running};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// Show three programs that share one device, simulated if there is no GPU.
///
/// --json prints {"device": "simulated" or "real", "phases": [{"clients": [{"name", "request", "limit", "sm", "measured"}]}]},
/// with shares as fractions.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare demo               on this machine's GPU, or on a simulated one where there is none
  gshare demo --sim=h100    on a simulated H100")]
pub(crate) struct Options {
    #[command(flatten)]
    form: Form,
    #[command(flatten)]
    simulate: Simulate,
}

/// Measure shares as `gshare demo` does, for longer or shorter, or of one program under many caps.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab shares --seconds 60
  gshare lab shares --caps      one process capped at 10 to 90 %, and what it got")]
pub(crate) struct Measurement {
    #[command(flatten)]
    demo: Options,
    /// Seconds to measure in each phase [default: 10; with --caps 5].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
    /// One process capped at 10, 20, … 90 %, instead of three processes.
    #[arg(long)]
    caps: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    device: Kind,
    phases: Vec<Phase>,
}

#[derive(Debug, Serialize)]
struct Phase {
    clients: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    name: String,
    request: f64,
    limit: f64,
    sm: f64,
    measured: f64,
}

/// Time between a change and the measurement: hooks learn the kernel's cost, and debts are paid.
const SETTLE: Duration = Duration::from_secs(1);
/// Longest wait for a program's first kernel.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    show(options, false, 10)
}

pub(crate) fn measure(options: &Measurement) -> anyhow::Result<()> {
    let seconds = options.seconds.unwrap_or(if options.caps { 5 } else { 10 });
    show(&options.demo, options.caps, seconds)
}

fn show(options: &Options, is_capped: bool, seconds: u64) -> anyhow::Result<()> {
    let hook = HOOK.find()?;
    warn_of_load();
    let mut stage = Stage::new(hook, &options.simulate, seconds)?;
    let report = if is_capped { caps(&mut stage)? } else { shares(&mut stage)? };
    if options.form.json {
        return print_json(&report);
    }
    for (phase, title) in report.phases.iter().zip(titles(is_capped)) {
        let head = ["NAME", "REQUEST", "LIMIT", "SM", "MEASURED"].map(str::to_owned);
        let percent = |share: f64| format!("{:.1}%", share * 100.0);
        let row = |of: &Measured| {
            let [request, limit, sm, measured] = [of.request, of.limit, of.sm, of.measured].map(percent);
            [of.name.clone(), request, limit, sm, measured]
        };
        let rows: Vec<_> = [head].into_iter().chain(phase.clients.iter().map(row)).collect();
        print!("{title}\n{}", table(&rows));
    }
    println!("device: {}", report.device.name());
    Ok(())
}

/// Warns of a busy machine: while programs wait for a CPU, the device waits for them, and no scheduler can give them their
/// shares.
fn warn_of_load() {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = text.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    #[expect(clippy::cast_precision_loss, reason = "a number of CPUs")]
    if load > cpus as f64 {
        eprintln!(
            "gshare: the {cpus} CPUs of this machine are busy (load {load}): shares will come out lower"
        );
    }
}

fn titles(caps: bool) -> Vec<String> {
    if caps {
        (1..10).map(|tenth| format!("one process, capped at {tenth}0%")).collect()
    } else {
        vec!["three processes that never synchronise".into(), "carol has left, the limits are lifted".into()]
    }
}

fn shares(stage: &mut Stage) -> anyhow::Result<Report> {
    stage.promise(&[("alice", "0.2:0.2"), ("bob", "0.3:0.3"), ("carol", "0.5:0.5")])?;
    for name in ["alice", "bob", "carol"] {
        stage.start(name)?;
    }
    let first = stage.measure("three processes: 20, 30 and 50 %")?;
    stage.stop("carol")?;
    stage.promise(&[("alice", "0.2:1"), ("bob", "0.3:1")])?;
    let second = stage.measure("carol has left: limits of 100 %")?;
    Ok(Report { device: stage.kind, phases: vec![first, second] })
}

fn caps(stage: &mut Stage) -> anyhow::Result<Report> {
    let mut phases = Vec::new();
    for tenth in 1..10 {
        let cap = format!("0.{tenth}:0.{tenth}");
        stage.promise(&[("alice", &cap)])?;
        if tenth == 1 {
            stage.start("alice")?;
        }
        phases.push(stage.measure(&format!("one process: {tenth}0 %"))?);
    }
    Ok(Report { device: stage.kind, phases })
}

/// A daemon, a device and the programs on it.
struct Stage {
    // Programs end before their daemon, and the daemon before its directory.
    programs: BTreeMap<String, Program>,
    daemon: Running,
    promises: BTreeMap<String, ResourceSpec>,
    hook: PathBuf,
    kind: Kind,
    simulate: Simulate,
    /// The ground truth of the demo's own simulated device.
    truth: Option<cuda::Truth>,
    seconds: u64,
    dir: Scratch,
}

struct Program {
    child: Child,
    _simulator: Option<SimulatorDir>,
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stage {
    fn new(hook: PathBuf, simulate: &Simulate, seconds: u64) -> anyhow::Result<Self> {
        let dir = Scratch::new("demo")?;
        let daemon = Daemon::new(Config::at(dir.path().join("gshare.sock")))?.spawn()?;
        // The driver of programs without `--sim`, if there is a device.
        let found = cuda::Driver::load().and_then(|driver| driver.init().map(|()| sim::kind(&driver)));
        let (kind, own) = match (&simulate.sim, found) {
            (None, Ok(kind)) => (kind, None),
            (spec, _) => (Kind::Simulated, Some(spec.clone().unwrap_or_default())),
        };
        eprintln!("gshare: {} device", kind.name());
        let truth = match own {
            Some(_) => Some(cuda::Truth::load(&SIMULATOR.find()?, &dir.path().join("device"))?),
            None => None,
        };
        let simulate = Simulate { sim: own };
        Ok(Self {
            programs: BTreeMap::new(),
            daemon,
            promises: BTreeMap::new(),
            hook,
            kind,
            simulate,
            truth,
            seconds,
            dir,
        })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("gshare.sock")
    }

    /// Puts these shares in force, also for running programs.
    fn promise(&mut self, shares: &[(&str, &str)]) -> anyhow::Result<()> {
        let mut config = Config::at(self.socket());
        self.promises.clear();
        for (name, quota) in shares {
            let quota: QuotaRange = quota.parse()?;
            let spec = ResourceSpec::new(quota, SmShare::WHOLE, None)?;
            config.clients.entry((*name).to_owned()).or_default().spec = Some(spec);
            self.promises.insert((*name).to_owned(), spec);
        }
        Ok(self.daemon.handle().reload(config)?)
    }

    /// Starts a program and waits for its first kernel.
    fn start(&mut self, name: &str) -> anyhow::Result<()> {
        let program = std::env::current_exe()?;
        let options = under_hook::Options {
            simulate: self.simulate.clone(),
            name: Some(name.to_owned()),
            place: Where::at(self.socket()),
            command: vec![program.into(), spin::NAME.into()],
            ..under_hook::Options::default()
        };
        let mut prepared = under_hook::prepare(&options, &self.hook, &self.socket())?;
        if self.truth.is_some() {
            prepared.command.env("GSHARE_SIM_DEVICE", self.dir.path().join("device"));
        }
        let child = prepared.command.spawn().context("the demo's program")?;
        let mut program = Program { child, _simulator: prepared.simulator };
        let start = Instant::now();
        loop {
            let snapshot = self.daemon.handle().snapshot()?;
            let client = snapshot.clients.iter().find(|client| client.name == name);
            if client.is_some_and(|client| client.total_used_ns.as_nanos() > 0) {
                break;
            }
            if let Some(status) = program.child.try_wait()? {
                anyhow::bail!("{name} ended early: {status}");
            }
            anyhow::ensure!(start.elapsed() < PATIENCE, "{name} launches nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.programs.insert(name.to_owned(), program);
        Ok(())
    }

    fn stop(&mut self, name: &str) -> anyhow::Result<()> {
        self.programs.remove(name).with_context(|| format!("{name} does not run"))?;
        Ok(())
    }

    /// Lets the programs settle, then measures every program's share of the device's time.
    fn measure(&self, title: &str) -> anyhow::Result<Phase> {
        let bar = ProgressBar::new(self.seconds * 10);
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {percent:>3} %")?;
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(title.to_owned());
        std::thread::sleep(SETTLE);
        let before = self.used()?;
        let start = Instant::now();
        for tenth in 1..=self.seconds * 10 {
            let due = Duration::from_millis(100 * tenth);
            std::thread::sleep(due.saturating_sub(start.elapsed()));
            bar.set_position(tenth);
        }
        let after = self.used()?;
        bar.finish_and_clear();
        let mut clients = Vec::new();
        for name in self.programs.keys() {
            let missing = || format!("{name} has ended");
            let (from, to) =
                (before.get(name).with_context(missing)?, after.get(name).with_context(missing)?);
            let spec = self.promises.get(name).with_context(missing)?;
            #[expect(clippy::cast_precision_loss, reason = "a report")]
            let measured =
                to.used.saturating_sub(from.used) as f64 / to.at.saturating_sub(from.at).max(1) as f64;
            clients.push(Measured {
                name: name.clone(),
                request: spec.quota().request().as_fraction(),
                limit: spec.quota().limit().as_fraction(),
                sm: spec.sm().as_fraction(),
                measured: (measured * 1e4).round() / 1e4,
            });
        }
        Ok(Phase { clients })
    }

    /// GPU time used by each program, as seen from outside.
    fn used(&self) -> anyhow::Result<BTreeMap<String, Used>> {
        let mut used = BTreeMap::new();
        match &self.truth {
            Some(truth) => {
                let truth = truth.read()?;
                for (name, program) in &self.programs {
                    let busy = truth.busy_ns(program.child.id());
                    used.insert(name.clone(), Used { at: truth.time_ns, used: busy.unwrap_or(0) });
                }
            }
            None => {
                let snapshot = self.daemon.handle().snapshot()?;
                for client in snapshot.clients {
                    let (at, time) = (snapshot.now_ns.as_nanos(), client.total_used_ns.as_nanos());
                    used.entry(client.name).or_insert(Used { at, used: 0 }).used += time;
                }
            }
        }
        Ok(used)
    }
}

#[derive(Debug, Clone, Copy)]
struct Used {
    at: u64,
    used: u64,
}

impl Where {
    fn at(socket: impl AsRef<Path>) -> Self {
        Self { socket: Some(socket.as_ref().to_owned()) }
    }
}
