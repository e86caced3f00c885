//! `gshare lab profile`: measures a program at each setting of a strategy, under the setting's share.

use super::host::Host;
use super::run::{self as under_hook, Prepared};
use super::sim::{Kind, Simulate};
use super::{Where, print_json, private};
use anyhow::{Context as _, ensure};
use gshare_core::profile::{ProfilePoint, ProfileTable, Setting};
use gshare_core::{BasisPoints, Duration, Quota, QuotaRange, SmShare};
use gshare_fake_cuda_spec::Spec;
use gshare_profile::executor::Executor;
use gshare_profile::line_program::{Process, Protocol};
use gshare_profile::load::Load;
use gshare_profile::meter::{NvmlMeter, Utilisation};
use gshare_profile::planner::{EfficacySearch, Grid, Journal, Outcome, Planner, Step, TrainingSearch};
use gshare_profile::record::{Record, Sink, run as run_strategy};
use gshare_profile::trial::TrialConfig;
use gshare_profile::trial_file::Store;
use gshare_runner::libraries::{HOOK, SIMULATOR, SimulatorDir};
use gshared::enforce::Partition;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Measure a program at many shares and batch sizes, and choose among them.
///
/// The program loads, writes a line, and then answers each line of its input with a line. With --steps it works by itself
/// and writes a line per step. Its batch size is in `GSHARE_BATCH`. Each trial is stored in --store at its end: after a
/// kill, the same command resumes with the next trial.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab profile --max-exec 40ms --output resnet.json -- python3 serve.py    the best share and batch size
  gshare lab profile --strategy training --steps -- python3 train.py             the least share of a trainer
  gshare lab profile --strategy grid --batch 1,8 -- python3 serve.py             all shares, with two batch sizes
  gshare lab profile --again resnet                  a function of `gshare up`: the host measures it anew")]
pub(crate) struct Options {
    /// Search strategy.
    #[arg(long, value_enum, default_value_t = Strategy::Inference)]
    strategy: Strategy,
    /// inference: longest allowed p95 of a batch.
    #[arg(long, value_name = "TIME", default_value = "50ms")]
    max_exec: Duration,
    /// training: the batch size. grid: one or more batch sizes.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    batch: Vec<u32>,
    /// grid: shares of the SMs in per cent.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "6,12,24,50,60,80,100")]
    sms: Vec<u16>,
    /// grid: shares of the time in per cent.
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_value = "20,40,60,80,100")]
    quotas: Vec<u16>,
    /// Load: closed:N, even:RATE, poisson:RATE (calls per second) or trace:FILE (arrivals in seconds, one per line).
    #[arg(long, value_name = "LOAD", default_value = "closed:1")]
    load: String,
    /// Seed of a Poisson load.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest measurement of one setting.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    time: Duration,
    /// Longest warm-up of one setting.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    warmup: Duration,
    /// Largest difference between two windows of calls in the steady state, in per cent. Raise it on a busy machine.
    #[arg(long, value_name = "PERCENT", default_value_t = 5)]
    steady: u16,
    /// Time limit for a call; a longer call ends the trial.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    answer_timeout: Duration,
    /// The program works by itself and writes a line per step, as a trainer does.
    #[arg(long)]
    steps: bool,
    /// Name of the profile in the store [default: the program].
    #[arg(long)]
    name: Option<String>,
    /// The store of trials. Stored trials with this name are not repeated.
    #[arg(long, value_name = "FILE", default_value = "gshare-profile.jsonl")]
    store: PathBuf,
    /// Write the measured points to this file, as a profile for the scalers.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Print one JSON object: shares in basis points, times in ns, throughputs in thousandths of a request per second.
    #[arg(long)]
    json: bool,
    /// Have the host of `gshare up` measure this function again, while it keeps serving.
    #[arg(long, value_name = "FUNCTION", conflicts_with = "command")]
    again: Option<String>,
    #[command(flatten)]
    host: Host,
    #[command(flatten)]
    simulate: Simulate,
    #[command(flatten)]
    place: Where,
    /// The program and its arguments.
    #[arg(required_unless_present = "again", trailing_var_arg = true, value_name = "CMD")]
    command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Strategy {
    /// Every SM share x quota (FaST-GShare).
    Grid,
    /// SM share and batch size of an inference function (Dilu).
    #[value(alias = "hybrid")]
    Inference,
    /// Request and limit of a training function (Dilu).
    Training,
}

#[derive(Serialize)]
struct Summary<'a, A> {
    name: &'a str,
    context: &'a str,
    trials: usize,
    /// Number of trials in this run.
    measured_now: usize,
    answer: A,
    /// Utilisation of the GPU, if NVML reports it.
    utilisation: Vec<Seen>,
}

#[derive(Serialize)]
struct Seen {
    #[serde(flatten)]
    setting: Setting,
    #[serde(flatten)]
    seen: Utilisation,
}

impl Seen {
    fn of(record: &Record) -> Option<Self> {
        Some(Self { setting: record.trial.setting, seen: record.measured?.utilisation? })
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if let Some(name) = &options.again {
        options.host.post(&format!("/system/profile/{name}"))?;
        println!("{name} is measured again: `gshare ps` shows how far that is");
        return Ok(());
    }
    let percent = |percent: u16, of: &str| {
        SmShare::from_percent(percent).with_context(|| format!("--{of} {percent}: need at most 100"))
    };
    let one_batch = || {
        ensure!(options.batch.len() == 1, "--batch: need one value for this strategy");
        Ok(options.batch[0])
    };
    match options.strategy {
        Strategy::Grid => {
            let sms = options.sms.iter().map(|&sm| percent(sm, "sms")).collect::<Result<_, _>>()?;
            let quotas =
                options.quotas.iter().map(|&quota| Ok(percent(quota, "quotas")?.basis_points().into()));
            let quotas = quotas.collect::<anyhow::Result<Vec<Quota>>>()?;
            let grid = Grid::new(sms, quotas, options.batch.clone())?;
            let total = Some(grid.len());
            drive(options, &grid, total, |outcome| {
                let best = outcome.table.most_effective(|_| true).copied();
                best.map_or_else(Vec::new, |best| vec![format!("Most effective: {}", shown(&best))])
            })
        }
        Strategy::Inference => {
            let search = EfficacySearch::new(options.max_exec)?;
            drive(options, &search, None, |choice| {
                let limit = choice.limit;
                vec![format!("Chosen: {}; at most {limit} of the SMs", shown(&choice.point))]
            })
        }
        Strategy::Training => {
            let search = TrainingSearch::new(one_batch()?)?;
            drive(options, &search, None, |choice| {
                let (request, limit, alone) = (choice.request, choice.limit, choice.exclusive);
                vec![format!("Request {request}, limit {limit} of the SMs; {alone} with all of them")]
            })
        }
    }
}

fn shown(point: &ProfilePoint) -> String {
    format!("{}: {}, p95 {}", point.setting(), point.throughput, point.p95)
}

/// Runs a strategy with the options, and prints its findings.
fn drive<P>(
    options: &Options,
    planner: &P,
    total: Option<usize>,
    found: impl Fn(&P::Answer) -> Vec<String>,
) -> anyhow::Result<()>
where
    P: Planner<Answer: Serialize>,
{
    let config = trial_config(options)?;
    let program = options.command.first().and_then(|program| Path::new(program).file_name());
    let program = || program.unwrap_or_default().to_string_lossy().into_owned();
    let name = options.name.clone().unwrap_or_else(program);
    let context = context(options);
    let store = Store::open(&options.store, &name, &context)
        .with_context(|| format!("--store {}", options.store.display()))?;
    let mut journal = store.journal()?;
    let before = journal.trials().len();
    let bar = bar(total);
    bar.set_position(before as u64);
    bar.reset_eta();
    let mut keeper = Keeper { store, bar };
    // Without a setting left to measure, no program starts.
    let answer = match planner.next(&journal) {
        Ok(Step::Done(answer)) => Ok(answer),
        _ => {
            let mut executor = executor(options)?;
            run_strategy(planner, executor.as_mut(), &config, &mut journal, &mut keeper)
        }
    };
    keeper.bar.finish_and_clear();
    let records = keeper.store.records()?;
    let lines = match &answer {
        Ok(answer) => found(answer),
        Err(error) => vec![format!("No answer: {error}")],
    };
    let points = points(&journal);
    // Without points there is no profile to write, only a reason to print.
    if let Some(path) = options.output.as_ref().filter(|_| !points.is_empty()) {
        let table = ProfileTable::grid(points.clone()).or_else(|_| ProfileTable::sparse(points))?;
        let text = serde_json::to_string_pretty(&table)?;
        std::fs::write(path, text).with_context(|| format!("--output {}", path.display()))?;
    }
    let answer = answer?;
    let trials = journal.trials().len();
    if options.json {
        let measured_now = trials - before;
        let (name, context) = (name.as_str(), context.as_str());
        let utilisation = records.iter().filter_map(Seen::of).collect();
        return print_json(&Summary { name, context, trials, measured_now, answer, utilisation });
    }
    for record in &records {
        println!("{}", line(record));
    }
    println!("{trials} trials, {before} of them from before");
    for line in lines {
        println!("{line}");
    }
    Ok(())
}

fn points(journal: &Journal) -> Vec<ProfilePoint> {
    let of = |outcome: &Outcome| match outcome {
        Outcome::Measured(found) => Some(found.point),
        _ => None,
    };
    journal.trials().iter().filter_map(|trial| of(&trial.outcome)).collect()
}

fn line(record: &Record) -> String {
    let at = record.trial.setting;
    match (&record.trial.outcome, record.measured) {
        (Outcome::Measured(found), Some(measured)) => {
            let (low, high) = (measured.throughput.low, measured.throughput.high);
            let point = &found.point;
            let seen = measured.utilisation.unwrap_or_default();
            let percent = |what: &str, value: Option<f64>| {
                value.map_or_else(String::new, |value| format!(", {what} {value:.1}%"))
            };
            format!(
                "{at}: {} ({low:.2} to {high:.2}), p50 {}, p95 {}, p99 {}{}{}{}",
                point.throughput,
                point.p50,
                point.p95,
                measured.p99,
                percent("GPU busy", seen.busy_percent),
                percent("SMs", seen.sm_percent),
                percent("occupancy", seen.occupancy_percent),
            )
        }
        (Outcome::Failed { reason }, _) => format!("{at}: failed: {reason}"),
        _ => format!("{at}: measured"),
    }
}

/// The context of these trials; a stored profile is of use only if its context is the same.
fn context(options: &Options) -> String {
    let words: Vec<_> = options.command.iter().map(|word| word.to_string_lossy()).collect();
    let what = words.join(" ");
    let device = match (&options.simulate.sim, options.simulate.kind()) {
        (Some(spec), _) if *spec != Spec::default() => format!(" on a simulated {spec}"),
        (_, Ok(Kind::Simulated)) => " on a simulated device".to_owned(),
        _ => String::new(),
    };
    format!("{what}{device}, load {}{}", options.load, if options.steps { ", steps" } else { "" })
}

fn trial_config(options: &Options) -> anyhow::Result<TrialConfig> {
    let mut config = TrialConfig::default();
    config.load =
        parse_load(&options.load, options.seed).with_context(|| format!("--load {}", options.load))?;
    (config.max_time, config.max_warmup) = (options.time, options.warmup);
    config.answer_timeout = options.answer_timeout;
    config.steady_tolerance =
        BasisPoints::from_percent(options.steady).context("--steady: need at most 100")?;
    config.check()?;
    Ok(config)
}

fn parse_load(text: &str, seed: u64) -> anyhow::Result<Load> {
    let (kind, value) =
        text.split_once(':').context("need closed:N, even:RATE, poisson:RATE or trace:FILE")?;
    let load = match kind {
        "closed" => Load::Closed { in_flight: value.parse()? },
        "even" => Load::Even { rate: value.parse()? },
        "poisson" => Load::Poisson { rate: value.parse()?, seed },
        "trace" => {
            let text = std::fs::read_to_string(value)?;
            let time = |(number, line): (usize, &str)| {
                let seconds: f64 = line.trim().parse().with_context(|| format!("line {}", number + 1))?;
                let time = std::time::Duration::try_from_secs_f64(seconds);
                Ok(Duration::from(time.with_context(|| format!("line {}", number + 1))?))
            };
            let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            Load::Trace { times: lines.map(time).collect::<anyhow::Result<_>>()? }
        }
        _ => anyhow::bail!("need closed, even, poisson or trace before the colon"),
    };
    load.check()?;
    Ok(load)
}

fn executor(options: &Options) -> anyhow::Result<Box<dyn Executor>> {
    let hook = HOOK.find()?;
    let simulated = options.simulate.announce("lab profile")?.is_simulated();
    // The node's daemon comes first: a private daemon beside it would hand out the same GPU a second time.
    let (socket, held) = under_hook::socket(&options.place, simulated)?;
    // Without an enforced partition, every setting would be measured with all SMs.
    let partitioned = Partition::of_node(simulated).name().is_some();
    let (simulate, command, place) =
        (options.simulate.clone(), options.command.clone(), options.place.clone());
    let mut number = 0;
    // The directory of the simulated driver must outlive its program, until the next program starts.
    let mut kept: Option<SimulatorDir> = None;
    let make = move |at: Setting| {
        let _until_the_last_trial = &held;
        number += 1;
        if at.sm != SmShare::WHOLE && !partitioned {
            return Err(format!("{} of the SMs needs MPS, and it does not run (gshare doctor)", at.sm));
        }
        let quota = QuotaRange::new(at.quota, at.quota).map_err(|error| error.to_string())?;
        let options = under_hook::Options {
            simulate: simulate.clone(),
            quota: Some(quota),
            sm: Some(at.sm),
            // Not the last trial's name: its process may still be exiting.
            name: Some(format!("profile-{}-{number}", std::process::id())),
            place: place.clone(),
            command: command.clone(),
            ..under_hook::Options::default()
        };
        let prepared = under_hook::prepare(&options, &hook, &socket).map_err(|error| format!("{error:#}"))?;
        let Prepared { command, simulator, hello } = prepared;
        // A refused program, or a program without this trial's share, has nothing to measure.
        match private::ask(&socket, &hello) {
            Ok(None) => {}
            Ok(Some(notice)) => return Err(notice),
            Err(error) => return Err(format!("{error:#}")),
        }
        drop(core::mem::replace(&mut kept, simulator));
        Ok(command)
    };
    let protocol = if options.steps { Protocol::Steps } else { Protocol::Requests };
    let process = Process::new(protocol, make);
    Ok(match nvml(options)? {
        Some(nvml) => Box::new(process.with_meter(nvml)),
        None => Box::new(process),
    })
}

/// NVML of the program's first device; the simulated driver is an NVML as well. None for a MIG slice, since NVML reports the
/// work of all slices on its GPU.
fn nvml(options: &Options) -> anyhow::Result<Option<NvmlMeter>> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let first = visible.split(',').next().map(str::trim).filter(|first| !first.is_empty()).unwrap_or("0");
    if first.starts_with("MIG-") {
        return Ok(None);
    }
    let library = match &options.simulate.sim {
        Some(_) => SIMULATOR.find()?,
        None => PathBuf::from("libnvidia-ml.so.1"),
    };
    Ok(Some(NvmlMeter::new(&library, first)))
}

/// Keeps trials in the store and shows the running trial.
struct Keeper {
    store: Store,
    bar: ProgressBar,
}

fn bar(total: Option<usize>) -> ProgressBar {
    let bar = total.map_or_else(ProgressBar::no_length, |total| ProgressBar::new(total as u64));
    let template = match total {
        Some(_) => "{bar:30} {pos}/{len}, {eta} left: {msg}",
        None => "{spinner} trial {pos} after {elapsed}: {msg}",
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    bar
}

impl Sink for Keeper {
    fn began(&mut self, setting: Setting) {
        self.bar.set_message(setting.to_string());
        // The bar is drawn only on a terminal.
        if self.bar.is_hidden() {
            let done = told(self.bar.position(), self.bar.length(), self.bar.eta());
            eprintln!("gshare: {done}; measures {setting}");
        }
    }

    fn keep(&mut self, record: &Record) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.store.keep(record)?;
        self.bar.inc(1);
        Ok(())
    }
}

/// The progress line without a terminal. Before its end, a search does not know its number of trials.
fn told(done: u64, all: Option<u64>, left: std::time::Duration) -> String {
    match all {
        Some(all) => format!("{done} of {all} trials, about {:.0} s left", left.as_secs_f64()),
        None => format!("{done} trials"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_an_estimate_where_the_number_of_trials_is_known() {
        let left = std::time::Duration::from_millis(12_600);
        assert_eq!(told(3, Some(12), left), "3 of 12 trials, about 13 s left");
        assert_eq!(told(3, None, left), "3 trials");
    }

    #[test]
    fn loads_read_as_they_are_described_and_bad_ones_are_refused() {
        assert_eq!(parse_load("closed:4", 1).unwrap(), Load::Closed { in_flight: 4 });
        assert_eq!(parse_load("poisson:2.5", 7).unwrap(), Load::Poisson { rate: 2.5, seed: 7 });
        for bad in
            ["", "closed", "closed:0", "even:-1", "even:NaN", "poisson:x", "trace:/no/such/file", "idle:3"]
        {
            assert!(parse_load(bad, 1).is_err(), "{bad}");
        }
    }
}
