//! The program `world`: runs a scenario of the platform in virtual time, its seeds on all CPUs, and prints the outcome of its
//! functions. Stops at the first seed that breaks a promise and prints its story, with the command that runs it again.
//!
//! A program with policies of its own is the same, and a scenario or `--set policies.packer=NAME` calls them by name:
//! ```no_run
//! use gshare_sched::pack::{MaxRects, MaxRectsConfig};
//! use gshare_sim::scenario::Own;
//! fn main() -> anyhow::Result<()> {
//!     gshare_bench::world::main(&Own::default().with_packer("mine", || Box::new(MaxRects::new(MaxRectsConfig::default()))))
//! }
//! ```

use crate::cases::{self, CaseRun};
use crate::first_come::FirstCome;
use crate::peaks::PeakHorizontal;
use crate::replay::aligned;
use crate::replay::progress::Progress;
use crate::seeds::{cpus, in_order};
use anyhow::{Context, Result};
use clap::Parser;
use gshare_sim::scenario::{Case, Own, Scenario, Span};
use gshare_sim::world::{self, Depth, FunctionOutcome, Outcome, Plan};
use serde_json::{Map, Value, json};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Runs a scenario of the platform in virtual time.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// The scenario, a TOML file: see the documentation of `gshare_sim::scenario`.
    scenario: PathBuf,
    /// How many seeds.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first seed; by default the scenario's.
    #[arg(long)]
    from: Option<u64>,
    /// How long load and faults come, instead of the scenario's length: `90s`, `10m`.
    #[arg(long)]
    time: Option<Span>,
    /// How closely devices are simulated, instead of the scenario's depth: `requests`, or `kernels` (the daemon's node and the hook's
    /// meter decide about each kernel on fractional devices).
    #[arg(long)]
    depth: Option<Depth>,
    /// Another value for a key of the scenario: `policies.scaler=lazy`, `function.0.slo=20ms`. May be given several times.
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// Run only this case of a scenario with axes: an option of each axis, with slashes between them.
    #[arg(long)]
    case: Option<String>,
    /// Print, of the first seed, the kernels that each instance ran in each interval of this length: `1s`. Comma-separated values with
    /// the columns' names first; only at the depth of kernels.
    #[arg(long, value_name = "TIME", conflicts_with = "json")]
    series: Option<Span>,
    /// Print one JSON object: {"scenario", "seeds", "from", "events", "speed", "functions": [...], "actions": {...},
    /// "faults": {...}, "kernels"}; of a scenario with axes {"cases": [...], "compared": [...], "paper": {...}}.
    #[arg(long)]
    json: bool,
    /// How many of its last events and orders a failing seed prints.
    #[arg(long, default_value_t = 60)]
    story: usize,
    /// Fail if some kind of order was never carried out in any of the seeds.
    #[arg(long)]
    all_actions: bool,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}` is not KEY=VALUE"))?;
    Ok((key.trim().to_owned(), value.trim().to_owned()))
}

impl Options {
    /// The command that runs one seed again.
    fn again(&self, seed: u64, case: &str) -> String {
        let program = std::env::args().next().unwrap_or_default();
        let program = program.rsplit('/').next().unwrap_or("world");
        let mut command = format!("{program} {} --seeds 1 --from {seed}", self.scenario.display());
        if !case.is_empty() {
            command.push_str(&format!(" --case '{case}'"));
        }
        if let Some(time) = &self.time {
            command.push_str(&format!(" --time {}", time.0));
        }
        if let Some(depth) = self.depth {
            command.push_str(&format!(" --depth {}", format!("{depth:?}").to_lowercase()));
        }
        for (key, value) in &self.set {
            command.push_str(&format!(" --set '{key}={value}'"));
        }
        command
    }
}

/// A program's own policies, and those that our scenarios compare with ours.
pub fn with_baselines(own: &Own) -> Own {
    let own = own.clone().with_router("first_come", || Box::new(FirstCome::default()));
    own.with_scaler("peaks", || Box::new(PeakHorizontal::default()))
}

/// Reads the command line and carries it out; ends the program with 1 at a seed that breaks a promise.
///
/// # Errors
/// A scenario that cannot be read or is refused, with field and bound; with `--all-actions` orders that were never carried out.
pub fn main(own: &Own) -> Result<()> {
    let options = Options::parse();
    let name = || options.scenario.display().to_string();
    let mut cases = Scenario::cases(&options.scenario, &options.set).with_context(name)?;
    if let Some(wanted) = &options.case {
        cases.retain(|case| case.name() == *wanted);
        anyhow::ensure!(!cases.is_empty(), "--case {wanted}: {} has no such case", name());
    }
    let (mut runs, mut all, started) = (Vec::new(), Outcome::default(), Instant::now());
    let progress = Progress::new(usize::try_from(options.seeds)?.saturating_mul(cases.len()));
    for mut case in cases {
        case.scenario.own = with_baselines(own);
        let run = run(&options, case, &progress)?;
        all.add(&run.total);
        runs.push(run);
    }
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("{} cases of {} seeds in {seconds:.1} s", runs.len(), options.seeds);
    if options.series.is_some() {
        print!("{}", cases::series(&runs));
    } else if runs.iter().any(|run| run.case.options.is_empty()) {
        print(&options, options.from.unwrap_or(runs[0].case.scenario.seed), &all, seconds);
        if !options.json {
            print!("{}", cases::paper(&runs));
        }
    } else if options.json {
        println!("{}", cases::json(&runs));
    } else {
        print!("{}", cases::text(&runs));
    }
    let never = all.never_carried_out();
    anyhow::ensure!(!options.all_actions || never.is_empty(), "never carried out: {}", never.join(", "));
    Ok(())
}

/// Runs all seeds of a case; ends the program at the first that breaks a promise.
fn run(options: &Options, case: Case, progress: &Progress) -> Result<CaseRun> {
    let first = options.from.unwrap_or(case.scenario.seed);
    let end = first.checked_add(options.seeds).context("--from and --seeds are too large")?;
    let (scenario, name) = (case.scenario.clone(), case.name());
    let of_seed = |seed: u64| -> Result<(Scenario, Plan)> {
        let scenario = scenario.drawn(seed)?;
        let mut plan = scenario.plan().with_context(|| name.clone())?;
        if let Some(time) = &options.time {
            plan.length = time.positive("--time")?;
        }
        plan.depth = options.depth.unwrap_or(plan.depth);
        plan.story = options.story;
        if let Some(every) = &options.series {
            plan.sample = Some(every.positive("--series")?);
            anyhow::ensure!(
                plan.depth == Depth::Kernels,
                "--series counts kernels: it needs --depth kernels"
            );
        }
        Ok((scenario, plan))
    };
    let (_, plan) = of_seed(first)?;
    if plan.depth == Depth::Kernels {
        eprintln!("driven on fractional devices: {}", gshare_sim::node::driven().join(", "));
    }
    let run_one = |seed: u64| -> Result<Outcome> {
        let (scenario, plan) = of_seed(seed)?;
        Ok(world::run(&plan, seed, || scenario.platform())?)
    };
    let mut run = CaseRun::new(case, plan.length);
    let take = |seed: u64, result: Result<Outcome, _>| match result {
        Ok(outcome) => {
            run.take(&outcome);
            progress.done();
            ControlFlow::Continue(())
        }
        Err(failure) => ControlFlow::Break((seed, failure)),
    };
    let stopped = in_order(cpus(), first..end, run_one, take);
    if let ControlFlow::Break((seed, failure)) = stopped {
        eprintln!("\n{failure}\nagain: {}", options.again(seed, &name));
        std::process::exit(1);
    }
    Ok(run)
}

fn print(options: &Options, first: u64, total: &Outcome, seconds: f64) {
    #[expect(clippy::cast_precision_loss, reason = "a report")]
    let rate = total.events as f64 / seconds.max(1e-9);
    let faults: Map<String, Value> =
        total.faults.iter().map(|(fault, count)| (fault.to_string(), json!(count))).collect();
    if options.json {
        let functions: Vec<_> = total.functions.iter().map(figures).collect();
        let report = json!({
            "scenario": options.scenario, "seeds": options.seeds, "from": first, "events": total.events,
            "speed": rate, "functions": functions, "actions": total.actions, "faults": faults,
            "kernels": total.kernels,
        });
        println!("{report}");
        return;
    }
    print!("{}", table(&total.functions));
    let list = |name: &str, counts: &mut dyn Iterator<Item = (String, String)>| {
        let counts: Vec<_> = counts.map(|(name, count)| format!("{name} {count}")).collect();
        println!("{name}: {}", counts.join(", "));
    };
    list("orders", &mut total.actions.iter().map(|(name, count)| ((*name).to_owned(), count.to_string())));
    list("faults", &mut faults.iter().map(|(name, count)| (name.clone(), count.to_string())));
    list("deaths", &mut total.deaths.iter().map(|(life, count)| (life.to_string(), count.to_string())));
    if total.kernels > 0 {
        println!("{} kernels ran on fractional devices", total.kernels);
    }
    println!(
        "{} events of {} simulated in {seconds:.1} s: {rate:.0} events/s; log {:016x}",
        total.events, total.time, total.hash
    );
}

/// Columns of the table, and how the numbers of each are printed.
const COLUMNS: [&str; 14] = [
    "function",
    "requests",
    "answered",
    "slo_ms",
    "slo_percent",
    "mean_ms",
    "p50_ms",
    "p99_ms",
    "starts",
    "cold_starts",
    "completed",
    "gpu_held_s",
    "gpu_used_s",
    "rejected",
];

/// The figures of a function; times in ms, GPU time in s.
fn figures(of: &FunctionOutcome) -> Map<String, Value> {
    let ms = |time: gshare_core::Duration| json!(time.as_secs_f64() * 1e3);
    let rejected: Vec<_> = of.rejected.iter().map(|(reason, count)| format!("{reason:?} {count}")).collect();
    let values = [
        of.name.clone().into(),
        of.requests.into(),
        of.answered.into(),
        of.slo.map_or(Value::Null, ms),
        of.attainment().map_or(Value::Null, |share| json!(share * 100.0)),
        ms(of.mean()),
        ms(of.percentile(50)),
        ms(of.percentile(99)),
        of.starts.into(),
        of.cold_starts.into(),
        of.completed.into(),
        json!(of.held.as_secs_f64()),
        json!(of.used.as_secs_f64()),
        rejected.join(", ").into(),
    ];
    COLUMNS.iter().map(|name| (*name).to_owned()).zip(values).collect()
}

fn table(functions: &[FunctionOutcome]) -> String {
    let cell = |row: &Map<String, Value>, name: &str| match &row[name] {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => format!("{:.1}", number.as_f64().unwrap_or_default()),
        other => other.to_string(),
    };
    let mut lines = vec![COLUMNS.map(str::to_owned).to_vec()];
    lines.extend(functions.iter().map(figures).map(|row| COLUMNS.map(|name| cell(&row, name)).to_vec()));
    aligned("", &lines)
}
