//! FluidFaaS, section 7: four applications in three variants on 16 A100-80 cut into MIG slices.
//!
//! A simulation in virtual time ([`gshare_sim::world`]) of two nodes with eight GPUs each, under the platform's pool of slices with
//! the router and the keepers of each policy. Weights are read-only and their copy in host memory stays, so an eviction takes no
//! time.
//! `applications.rs` says where times come from. Deadlines are 1.5 x the time of an application alone on "the minimum MIG
//! instances, as shown in Table 5" (section 6). Table 5 has two columns of them; `--slo parts` takes the one of FluidFaaS,
//! where each model is on the smallest slice that holds it, `--slo whole` the one of platforms without pipelines. By the
//! latter no medium application could be in time on the slices that Table 5 gives to its pipelines, because their models
//! take 1.8 to 2 times as long on 1g as on 2g; the paper's medium load is served by such pipelines. So the default is
//! `parts`. The load is given as a share of what the slices that run an application as a whole can do (`--load`); it is
//! the same requests for every policy.
//!
//! # Policies
//! Two things tell them apart: who keeps instances, and in which order requests wait. The **paper's order** is by slack; in
//! **our order** a request that cannot be in time any more waits for those that can, and a load has to pay.
//! - `monolithic` has no pipelines, no time sharing and exclusive keep-alive, as ESG is described;
//! - `static split` divides the slices that run applications as a whole among them once, for ever;
//! - `paper` is FluidFaaS as printed, `paper with its hand-offs` with the 10 to 40 ms that it measured;
//! - `ours`, and with `--ablate` ours with one mechanism switched off each.
//!
//! A router of the program's own (see [`super::main`]) goes with the keeper of `ours`, a keeper with its order.
//!
//! Names say when the order is not their own. The first table that compares takes ours beside the paper's keeper *on our
//! order*: what is left there is not the order of the queue.
//!
//! # Figures
//! Throughput is requests answered by the time the last was, so it hangs on when the last few
//! end: half a second is a thousandth of it. `while_sent_per_s` counts those answered by the time the last one came, up to
//! then; `in_time_per_s` only those within the deadline. GPU and MIG time are those of the whole run, for work that came
//! too late as well; so that who serves more is not blamed for it, they are also given for each request that was answered
//! within its deadline. Where fewer than 95 % are, the P95 is that of a request that was late anyway. Whoever serves as
//! much has as much waiting in all, whatever the order: the mean says how much, and a share `mean / w` of the requests is
//! late at least if none waits for more than `w`. So P99 and the longest are given as well.
//!
//! `queue_ms`, `load_ms`, `execution_ms` and `transfer_ms` add up to the mean (Figure 14), `pipelines_percent` is the
//! part of the answered requests that ran on more than one slice, `hit_app0` to `hit_app3` are the SLO hits of each
//! application in the order of Table 4 (Figure 9). With `--series` `gpus_held` and `gpus_active` are the GPUs of which a slice is
//! held, or works, at any time of a second (Figure 3a), `slices_held` and `slices_active` the slices (Figure 5), and
//! `active_` with the name of a profile those of one kind (Figure 3b).
//!
//! # Seeds and windows
//! `replay fluidfaas --help` says what a seed draws and what the tables that compare mean. The last few requests decide
//! about a thousandth of the throughput of a seed, so few seeds cannot tell whether who is level is ahead. A trace has its
//! own bursts: there each window of it (`--trace-from`) takes the place of a seed.

mod applications;
mod static_split;

use super::paired::{Compared, Run};
use super::{Report, in_parallel, joined, row};
use crate::seeds::cpus;
use anyhow::{Context, Result, anyhow, bail};
use applications::{APPLICATIONS, VARIANTS, Variant, application, slo, whole};
use clap::builder::ArgPredicate;
use gshare_core::mig::{GpuModel, MigProfile};
use gshare_core::pipeline::routing::Router;
use gshare_core::pipeline::{Goal, HandOff, RankMode};
use gshare_core::platform::{DeviceSpec, FunctionSpec, MigLayout, Work};
use gshare_core::{Bytes, Duration, GpuId, NodeId, Timestamp};
use gshare_sched::pipeline::{
    Choice, EvictionPolicy, KeepAlive, Keeper, KeeperConfig, Late, LeastFragmentation, PartitionConfig,
    Partitioner, RouterConfig, SlackRouter,
};
use gshare_sched::platform::{Platform, PlatformConfig, SlicedConfig, SlicedPool};
use gshare_sim::Make;
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::load_trace::{FunctionCounts, read_azure_counts};
use gshare_sim::scenario::{MakeKeeper, Own};
use gshare_sim::world::{self, Ended, Function, Outcome, Plan, Record};
use serde_json::{Map, Value};
use static_split::StaticSplit;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of bursts, arrivals and branches [default: 1 to 10; with a trace 1]
    #[arg(long, value_delimiter = ',', default_values_t = 1..=10, hide_default_value = true,
        default_value_if("trace", ArgPredicate::IsPresent, "1"))]
    seeds: Vec<u64>,
    /// Calls per minute as a CSV shaped like the Azure Functions 2019 trace; the busiest functions drive the
    /// applications [default: generated]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Minutes of the trace at which windows begin; a minute of it is six seconds here [default: one window after the
    /// other, through the whole trace]
    #[arg(long, value_name = "MINUTE", value_delimiter = ',', requires = "trace")]
    trace_from: Vec<usize>,
    /// Length of the arrivals
    #[arg(long, default_value = "600s")]
    length: Duration,
    /// Time at the beginning with a quarter of the load, whose requests are not counted
    #[arg(long, default_value = "60s")]
    warm_up: Duration,
    /// Mean load, as a share of what the slices that run an application as a whole can do
    #[arg(long, value_delimiter = ',', default_value = "0.5,1")]
    load: Vec<f64>,
    /// Column of Table 5 whose slices set the deadlines: 1.5 times the time on them
    #[arg(long, value_enum, default_value_t = SloOf::Parts)]
    slo: SloOf,
    /// In our order: how many times what its function is behind a late request waits, in percent [default: the router's]
    #[arg(long, value_name = "PERCENT")]
    late_stretch: Option<u32>,
    /// Cuts of the GPUs (Table 7): p1, p2, hybrid
    #[arg(long, value_delimiter = ',', default_value = "p1,p2,hybrid")]
    partition: Vec<String>,
    /// Variants of the applications (Table 5): light, medium, heavy
    #[arg(long, value_delimiter = ',', default_value = "light,medium,heavy")]
    workload: Vec<String>,
    /// Also run ours with one mechanism switched off each
    #[arg(long)]
    ablate: bool,
    /// Only these policies [default: all]
    #[arg(long, value_delimiter = ',')]
    policy: Vec<String>,
    /// Also print GPUs and slices held and at work in every second, of the first run of each policy
    #[arg(long)]
    series: bool,
}

/// The slices that a deadline is reckoned on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SloOf {
    /// The smallest that holds the whole.
    Whole,
    /// For each model the smallest that holds it.
    Parts,
}

/// Table 7: the slices of the eight GPUs of a node.
fn partition(name: &str) -> Result<Vec<Vec<&'static str>>> {
    let (p1, p2) = (vec!["4g.40gb", "2g.20gb", "1g.10gb"], vec!["3g.40gb", "2g.20gb", "2g.20gb"]);
    Ok(match name {
        "p1" => vec![p1; 8],
        "p2" => vec![p2; 8],
        "hybrid" => {
            let twos = vec!["2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb"];
            let large = vec!["3g.40gb", "4g.40gb"];
            let mut gpus = vec![vec!["1g.10gb"; 7], twos.clone(), twos];
            gpus.extend(vec![large; 4]);
            gpus.push(p1);
            gpus
        }
        other => bail!("partition `{other}`: need p1, p2 or hybrid"),
    })
}

/// The GPUs of all nodes.
fn devices(model: &GpuModel, cuts: &[Vec<&str>]) -> Result<Vec<DeviceSpec>> {
    let device = |(node, names): (u32, &Vec<&str>)| -> Result<DeviceSpec> {
        let layout = MigLayout::named(&model.name, names).context("an illegal cut")?;
        Ok(DeviceSpec::new(NodeId::new(node), Bytes::from_gib(80)).with_mig(layout))
    };
    (0..NODES).flat_map(|node| cuts.iter().map(move |names| (node, names))).map(device).collect()
}

/// Calls per second of each application over time: shares of a mean, bin by bin.
struct Shape {
    bin: Duration,
    shares: Vec<Vec<f64>>,
}

impl Shape {
    /// With a mean of 1.
    fn new(bin: Duration, bins: Vec<Vec<f64>>) -> Self {
        let scaled = |bins: Vec<f64>| {
            let mean = bins.iter().sum::<f64>() / bins.len() as f64;
            bins.into_iter().map(|bin| bin / mean.max(1e-9)).collect::<Vec<f64>>()
        };
        Self { bin, shares: bins.into_iter().map(scaled).collect() }
    }

    fn bins(args: &Args, bin: Duration) -> Result<usize> {
        Ok(usize::try_from(args.length.as_nanos() / bin.as_nanos())?.max(1))
    }

    /// About the variability of the trace's aggregate (CV 0.4 by the minute), with bursts of three times the mean.
    fn generated(args: &Args, rng: &mut Rng) -> Result<Self> {
        let bin = Duration::from_secs(20);
        let bins = Self::bins(args, bin)?;
        let draw = |rng: &mut Rng| {
            let level = 0.4 + rng.below(1_000) as f64 / 1_000.0;
            if rng.percent(8) { level * 3.0 } else { level }
        };
        Ok(Self::new(bin, (0..APPLICATIONS.len()).map(|_| (0..bins).map(|_| draw(rng)).collect()).collect()))
    }

    /// Windows of the trace's busiest functions. A minute of it is six seconds here: ten minutes show a hundred.
    fn windows(args: &Args, path: &Path) -> Result<Vec<Self>> {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let mut functions = read_azure_counts(std::io::BufReader::new(file))?;
        functions.sort_by_key(|one| std::cmp::Reverse(one.counts.iter().map(|&n| u64::from(n)).sum::<u64>()));
        functions.truncate(APPLICATIONS.len());
        let minutes = functions.first().map_or(0, |one| one.counts.len());
        let bin = Duration::from_secs(6);
        let bins = Self::bins(args, bin)?;
        if functions.len() < APPLICATIONS.len() || minutes < bins {
            let (has, path) = (functions.len(), path.display());
            bail!("{path}: has {has} functions of {minutes} minutes, need {} of {bins}", APPLICATIONS.len());
        }
        let every: Vec<usize> = (0..=minutes - bins).step_by(bins).collect();
        let from = if args.trace_from.is_empty() { every } else { args.trace_from.clone() };
        if let Some(late) = from.iter().find(|&&from| from > minutes - bins) {
            bail!("--trace-from {late}: need at most {}, for {bins} of {minutes} minutes", minutes - bins);
        }
        let window = |from: usize| {
            let of =
                |one: &FunctionCounts| one.counts[from..from + bins].iter().map(|&n| f64::from(n)).collect();
            Self::new(bin, functions.iter().map(of).collect())
        };
        Ok(from.into_iter().map(window).collect())
    }
}

/// The source of one run: a seed, and on a trace a window of it.
struct Draw {
    seed: u64,
    window: Option<Shape>,
}

fn draws(args: &Args) -> Result<Vec<Draw>> {
    let mut draws = Vec::new();
    for &seed in &args.seeds {
        match &args.trace {
            None => draws.push(Draw { seed, window: None }),
            Some(path) => {
                let windows = Shape::windows(args, path)?;
                draws.extend(windows.into_iter().map(|window| Draw { seed, window: Some(window) }));
            }
        }
    }
    Ok(draws)
}

/// The policy that keeps instances.
enum Keeping<'a> {
    Keeper(KeeperConfig),
    Own(&'a MakeKeeper),
    Static,
}

/// The policy that orders requests.
enum Routing<'a> {
    Slack(RouterConfig),
    Own(&'a Make<dyn Router>),
}

/// A policy of the table.
struct Policy<'a> {
    name: &'a str,
    keeping: Keeping<'a>,
    router: Routing<'a>,
    rank: RankMode,
    hand_off: HandOff,
}

fn policies(ablate: bool, our_order: &RouterConfig) -> Vec<Policy<'_>> {
    let policy = |name, keeper, router, rank| Policy {
        name,
        keeping: Keeping::Keeper(keeper),
        router: Routing::Slack(router),
        rank,
        hand_off: HandOff::default(),
    };
    let split = |name, router| Policy {
        keeping: Keeping::Static,
        ..policy(name, KeeperConfig::default(), router, RankMode::PaperCv)
    };
    let (cv, bottleneck) = (RankMode::PaperCv, RankMode::Bottleneck);
    let (theirs, our_order) = (RouterConfig::paper, || our_order.clone());
    // Section 7.3: 10 to 40 ms for a hand-off. Fresh shared memory and its page faults, for both sides: 2.5 GB/s.
    let slow = HandOff { fixed: Duration::from_millis(3), bytes_per_second: 2_500_000_000 };
    let mut all = vec![
        policy("monolithic", KeeperConfig::monolithic(), theirs(), cv),
        policy("monolithic on our order", KeeperConfig::monolithic(), our_order(), cv),
        split("static split on paper's order", theirs()),
        split("static split on our order", our_order()),
        Policy { hand_off: slow, ..policy("paper with its hand-offs", KeeperConfig::paper(), theirs(), cv) },
        policy("paper", KeeperConfig::paper(), theirs(), cv),
        policy("paper on our order", KeeperConfig::paper(), our_order(), cv),
        policy("ours on paper's order", KeeperConfig::default(), theirs(), bottleneck),
        policy("ours", KeeperConfig::default(), our_order(), bottleneck),
    ];
    if ablate {
        let ours = |name, change: &dyn Fn(&mut KeeperConfig)| {
            let mut keeper = KeeperConfig::default();
            change(&mut keeper);
            policy(name, keeper, our_order(), bottleneck)
        };
        all.push(ours("ours - pipelines", &|c| c.pipelines = false));
        all.push(ours("ours - time sharing", &|c| c.time_sharing = false));
        all.push(ours("ours - migration", &|c| c.migration = false));
        all.push(ours("ours - reclaim", &|c| (c.reclaim, c.demote_pipelines) = (false, false)));
        all.push(ours("ours - start when short", &|c| c.hot_on_shortage = false));
        all.push(ours("ours + per slice", &|c| c.choice = Choice::PerSlice));
        all.push(ours("ours + even waits", &|c| c.even_out = true));
        all.push(ours("ours - two thresholds", &|c| {
            (c.hot_below, c.cool_windows) = (c.hot_above, 1);
        }));
        all.push(ours("ours - eviction by cost", &|c| c.eviction = EvictionPolicy::Lru));
        all.push(ours("ours - adaptive keep-alive", &|c| c.keep_alive = KeepAlive::PAPER));
        let base = |name, router, rank| policy(name, KeeperConfig::default(), router, rank);
        all.push(base("ours - late last", our_order().with_late(Late::InOrder), bottleneck));
        let mut patient = our_order();
        patient.late_wait = None;
        all.push(base("ours - overdue first", patient, bottleneck));
        let mut eager = our_order();
        eager.stay_loads = 0;
        all.push(base("ours - loads that pay", eager, bottleneck));
        all.push(base("ours + admission", our_order().with_late(Late::Reject), bottleneck));
        all.push(base("ours - bottleneck rank", our_order(), cv));
    }
    all
}

const NODES: u32 = 2;

/// The figures of one run.
#[derive(Debug, Default, Clone, Copy)]
struct Figures {
    sent: f64,
    in_time: f64,
    served: f64,
    seconds: f64,
    served_while_sent: f64,
    seconds_sent: f64,
    p95_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    mean_ms: f64,
    gpu_s: f64,
    mig_s: f64,
    held_s: f64,
    starts: f64,
    /// Sums over what was answered: waiting, loads, execution, transfer in ms, and how many ran on several slices.
    spent_ms: [f64; 4],
    pipelines: f64,
    /// By application: counted, and in time.
    by_application: [[f64; 2]; APPLICATIONS.len()],
}

/// The time that spans take together, up to `end`.
fn covered<'a>(spans: impl Iterator<Item = &'a (Timestamp, Timestamp)>, end: Timestamp) -> Duration {
    let mut spans: Vec<_> = spans.map(|&(from, to)| (from, to.min(end))).collect();
    spans.sort_unstable();
    let mut upto = Timestamp::ZERO;
    let new = |(from, to): (Timestamp, Timestamp)| {
        let time = to.saturating_since(from.max(upto));
        upto = upto.max(to);
        time
    };
    spans.into_iter().map(new).sum()
}

fn figures(outcome: &Outcome, model: &GpuModel, slos: &[Duration], from: Timestamp) -> Figures {
    let empty = Record::default();
    let record = outcome.record.as_ref().unwrap_or(&empty);
    let (mut latencies, mut in_time, mut sent, mut while_sent) = (Vec::new(), 0u64, 0u64, 0u64);
    let (mut spent_ms, mut pipelines, mut by_application) = ([0.0; 4], 0u64, [[0.0; 2]; APPLICATIONS.len()]);
    let last = record.ends.iter().map(|end| end.arrived).max().unwrap_or(from);
    let finished = record.finished();
    for &Ended { function, arrived, at, spent, .. } in record.ends.iter().filter(|end| end.arrived >= from) {
        sent += 1;
        by_application[function.index()][0] += 1.0;
        if let Some(spent) = spent {
            let latency = at.saturating_since(arrived);
            let hit = latency <= slos[function.index()];
            in_time += u64::from(hit);
            by_application[function.index()][1] += f64::from(u8::from(hit));
            let parts = [spent.queue, spent.load, spent.execution, spent.transfer];
            for (sum, part) in spent_ms.iter_mut().zip(parts) {
                *sum += part.as_secs_f64() * 1e3;
            }
            pipelines += u64::from(spent.slices > 1);
            while_sent += u64::from(at <= last);
            latencies.push(latency);
        }
    }
    let gpus: BTreeSet<GpuId> = record.worked.keys().map(|(gpu, _)| *gpu).collect();
    let of =
        |gpu: GpuId| record.worked.iter().filter(move |((of, _), _)| *of == gpu).flat_map(|(_, spans)| spans);
    let gpu_time: Duration = gpus.into_iter().map(|gpu| covered(of(gpu), finished)).sum();
    let worked = record.worked.values().flatten();
    let slice_time: Duration = worked.map(|&(from, to)| to.saturating_since(from)).sum();
    let held = record.held.iter().map(|((_, slice), spans)| {
        let compute = slice.and_then(|slice| model.get(slice.profile)).map_or(0, |one| one.compute_slices);
        covered(spans.iter(), finished).saturating_mul(compute.into())
    });
    latencies.sort_unstable();
    let mean_ms =
        latencies.iter().map(|one| one.as_secs_f64()).sum::<f64>() * 1e3 / latencies.len().max(1) as f64;
    let percentile = |percent: usize| {
        let at = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        latencies.get(at).map_or(0.0, |latency| latency.as_secs_f64() * 1e3)
    };
    Figures {
        sent: sent as f64,
        in_time: in_time as f64,
        served: latencies.len() as f64,
        seconds: finished.saturating_since(from).as_secs_f64(),
        served_while_sent: while_sent as f64,
        seconds_sent: last.saturating_since(from).as_secs_f64(),
        p95_ms: percentile(95),
        p99_ms: percentile(99),
        max_ms: percentile(100),
        mean_ms,
        gpu_s: gpu_time.as_secs_f64(),
        mig_s: slice_time.as_secs_f64(),
        held_s: held.sum::<Duration>().as_secs_f64(),
        starts: outcome.actions.get("start").map_or(0.0, |&n| n as f64),
        spent_ms,
        pipelines: pipelines as f64,
        by_application,
    }
}

/// Rows of seconds.
type Series = Vec<Map<String, Value>>;

/// GPUs and slices that are held and at work in each second.
fn series(outcome: &Outcome, model: &GpuModel) -> Series {
    let empty = Record::default();
    let record = outcome.record.as_ref().unwrap_or(&empty);
    let second = |at: Timestamp| usize::try_from(at.as_nanos() / 1_000_000_000).unwrap_or(usize::MAX);
    let seconds = second(record.finished()) + 1;
    let mut counts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (what, spans) in [("held", &record.held), ("active", &record.worked)] {
        let mut gpus = BTreeSet::new();
        for ((gpu, slice), spans) in spans {
            let within = |&(from, to): &(Timestamp, Timestamp)| second(from)..=second(to).min(seconds - 1);
            for at in spans.iter().flat_map(within).collect::<BTreeSet<_>>() {
                let mut count =
                    |name: String| counts.entry(name).or_insert_with(|| vec![0; seconds])[at] += 1;
                count(format!("slices_{what}"));
                if let (Some(profile), "active") = (slice.and_then(|slice| model.get(slice.profile)), what) {
                    count(format!("active_{}", profile.name));
                }
                if gpus.insert((at, *gpu)) {
                    count(format!("gpus_{what}"));
                }
            }
        }
    }
    let row = |at: usize| {
        let counts = counts.iter().map(|(name, counts)| (name.clone(), counts[at].into()));
        counts.chain([("second".to_owned(), at.into())]).collect()
    };
    (0..seconds).map(row).collect()
}

/// Pairs of policies that are compared. The second and the third show what the order of the queue does.
const PAIRS: [(&str, &str); 5] = [
    ("ours", "paper on our order"),
    ("ours", "paper"),
    ("ours on paper's order", "paper"),
    ("ours", "monolithic on our order"),
    ("ours", "static split on our order"),
];

/// Figures in which they are compared, and whether less is better.
const COMPARED: [(&str, bool); 6] = [
    ("slo_hit_percent", false),
    ("throughput_per_s", false),
    ("p95_ms", true),
    ("mean_ms", true),
    ("gpu_ms_per_in_time", true),
    ("mig_ms_per_in_time", true),
];

/// A workload on a cut at a load.
struct Cell<'a> {
    variant: &'static Variant,
    partition: &'a str,
    model: &'a GpuModel,
    devices: Vec<DeviceSpec>,
    load: f64,
}

impl Cell<'_> {
    fn all<'a>(args: &'a Args, model: &'a GpuModel) -> Result<Vec<Cell<'a>>> {
        let mut cells = Vec::new();
        for workload in &args.workload {
            let variant = VARIANTS.iter().find(|one| one.name == workload);
            let variant =
                variant.with_context(|| format!("workload `{workload}`: need light, medium or heavy"))?;
            for name in &args.partition {
                let devices = devices(model, &partition(name)?)?;
                let cell = |&load| Cell { variant, partition: name, model, devices: devices.clone(), load };
                cells.extend(args.load.iter().map(cell));
            }
        }
        Ok(cells)
    }

    fn input(&self) -> Map<String, Value> {
        row(&[
            ("workload", self.variant.name.into()),
            ("partition", self.partition.into()),
            ("load", self.load.into()),
        ])
    }

    /// A policy on the requests of a seed: its figures and, if wanted, what it does over time.
    fn run(
        &self,
        args: &Args,
        policy: &Policy<'_>,
        draw: &Draw,
        over_time: bool,
    ) -> Result<(Figures, Series)> {
        let (plan, slos) = self.plan(args, policy, draw)?;
        let make = || self.platform(policy, &plan).map_err(|error| error.to_string());
        let outcome =
            world::run(&plan, draw.seed, make).map_err(|failure| anyhow!("{}: {failure}", policy.name))?;
        let series = if over_time { series(&outcome, self.model) } else { Vec::new() };
        Ok((figures(&outcome, self.model, &slos, Timestamp::ZERO + args.warm_up), series))
    }

    /// A platform of sliced devices alone, with the router and the keepers of the policy.
    fn platform(&self, policy: &Policy<'_>, plan: &Plan) -> Result<Platform> {
        let keeper: gshare_sched::platform::MakeKeeper = match &policy.keeping {
            Keeping::Keeper(config) => {
                let partitioner = Partitioner::new(PartitionConfig::default().with_rank(policy.rank))?;
                let config = config.clone();
                Arc::new(move |node| {
                    let partitioner = Box::new(partitioner.clone());
                    Ok(Box::new(Keeper::new(
                        config.clone(),
                        node,
                        partitioner,
                        Box::new(LeastFragmentation),
                    )?))
                })
            }
            Keeping::Own(make) => {
                let make = MakeKeeper::clone(make);
                Arc::new(move |node| Ok(make(node)))
            }
            Keeping::Static => {
                let split =
                    StaticSplit::new(plan, self.model, self.variant, KeeperConfig::default().load.start)?;
                Arc::new(move |node| Ok(Box::new(split.of(node))))
            }
        };
        let router: Box<dyn Router> = match &policy.router {
            Routing::Slack(config) => Box::new(SlackRouter::new(config.clone())?),
            Routing::Own(make) => make(),
        };
        let pool = SlicedPool::with_config(SlicedConfig::default())?.with_router(router).with_keepers(keeper);
        Ok(Platform::new(PlatformConfig::default(), vec![Box::new(pool)])?)
    }

    /// The run of a seed and its deadlines: the same requests for every policy.
    fn plan(&self, args: &Args, policy: &Policy<'_>, draw: &Draw) -> Result<(Plan, Vec<Duration>)> {
        let mut rng = Rng::new(draw.seed);
        let generated;
        let shape = match &draw.window {
            Some(window) => window,
            None => {
                generated = Shape::generated(args, &mut rng)?;
                &generated
            }
        };
        let (variant, model) = (self.variant, self.model);
        let layouts = || self.devices.iter().filter_map(|device| device.mig.as_ref());
        let slices = || layouts().flat_map(|layout| layout.slices()).filter_map(|at| model.get(at.profile));
        let (mut functions, mut slos) = (Vec::new(), Vec::new());
        for (index, (name, _)) in APPLICATIONS.iter().enumerate().take(variant.applications) {
            let dag = application(index, variant)?;
            let slo = slo(&dag, model, variant, args.slo)?;
            // The rate of all slices that run it as a whole, divided among the applications.
            let per_slice = |slice: &MigProfile| {
                whole(&dag, model, &slice.name, variant).map_or(0.0, |time| 1.0 / time.as_secs_f64())
            };
            let capacity = slices().map(per_slice).sum::<f64>() / variant.applications as f64;
            let quiet = usize::try_from(args.warm_up.as_nanos().div_ceil(shape.bin.as_nanos()))?;
            let rate =
                |(bin, share): (usize, &f64)| self.load * capacity * if bin < quiet { 0.25 } else { *share };
            let rates = shape.shares[index].iter().enumerate().map(rate).collect();
            let goal = Box::new(Goal::default().with_batch(variant.batch).with_hand_off(policy.hand_off));
            let memory = Bytes(variant.memory.get() * dag.len() as u64);
            let work = Work::Pipeline { dag: Box::new(dag), goal };
            let mut spec = FunctionSpec::new(work, memory).with_slo(slo);
            spec.max_instances = u32::MAX;
            functions.push(Function::new(*name, spec).with_arrivals(Arrivals::rates(shape.bin, rates)?));
            slos.push(slo);
        }
        let mut plan = Plan::new(self.devices.clone(), functions, args.length);
        (plan.jitter, plan.record, plan.link) = (0, true, u64::MAX);
        // A policy that is slower than the load works on it long after it has ended.
        plan.settle = args.length.saturating_mul(4);
        Ok((plan, slos))
    }
}

/// Runs every policy on every partition, workload and load.
///
/// # Errors
/// Flags or a trace that cannot be; a policy that broke the simulation's book.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    run_on(cpus(), args, own)
}

fn run_on(threads: usize, args: &Args, own: &Own) -> Result<Report> {
    let mut report = Report::new("fluidfaas", args.seeds.clone());
    let model = GpuModel::find("A100-80")?;
    let cells = Cell::all(args, &model)?;
    let mut our_order = RouterConfig::default();
    our_order.late_stretch_percent = args.late_stretch.unwrap_or(our_order.late_stretch_percent);
    let mut policies = policies(args.ablate, &our_order);
    let beside = |name, keeping, router| {
        let (rank, hand_off) = (RankMode::Bottleneck, HandOff::default());
        Policy { name, keeping, router, rank, hand_off }
    };
    let ours = || Keeping::Keeper(KeeperConfig::default());
    policies.extend(own.routers().map(|(name, make)| beside(name, ours(), Routing::Own(make))));
    let keepers = own.keepers().map(|(name, make)| (name, Keeping::Own(make)));
    policies.extend(keepers.map(|(name, make)| beside(name, make, Routing::Slack(our_order.clone()))));
    let names: Vec<_> = policies.iter().map(|one| one.name).collect();
    if let Some(unknown) = args.policy.iter().find(|name| !names.contains(&name.as_str())) {
        bail!("--policy {unknown}: need one of: {}", names.join("; "));
    }
    policies.retain(|one| args.policy.is_empty() || args.policy.iter().any(|name| name == one.name));
    let draws = draws(args)?;
    if policies.is_empty() || draws.is_empty() {
        bail!("need a seed, and a policy out of: {}", names.join("; "));
    }
    let runs = in_parallel(threads, cells.len() * policies.len() * draws.len(), |number| {
        let policy = &policies[number / draws.len() % policies.len()];
        let draw = number % draws.len();
        let over_time = args.series && draw == 0;
        cells[number / draws.len() / policies.len()].run(args, policy, &draws[draw], over_time)
    })?;
    let mut compared = PAIRS.map(|(ours, with)| Compared::new(with, &COMPARED).of(ours));
    for (cell, runs) in cells.iter().zip(runs.chunks(policies.len() * draws.len())) {
        let of = |runs: &[(Figures, Series)]| {
            let figures: Vec<Figures> = runs.iter().map(|(figures, _)| *figures).collect();
            Run { together: measures(&figures), by_seed: figures.chunks(1).map(measures).collect() }
        };
        let all: Vec<Run> = runs.chunks(draws.len()).map(of).collect();
        let find = |name| policies.iter().position(|one| one.name == name).map(|at| &all[at]);
        for (compared, (ours, with)) in compared.iter_mut().zip(PAIRS) {
            if let (Some(ours), Some(with)) = (find(ours), find(with)) {
                compared.push(cell.input(), with, ours);
            }
        }
        let in_time = |run: &Run| run.together.get("in_time_per_s").and_then(Value::as_f64).unwrap_or(0.0);
        for ((policy, run), runs) in policies.iter().zip(&all).zip(runs.chunks(draws.len())) {
            let about = joined(&row(&[("policy", policy.name.into())]), &cell.input());
            let mut row = joined(&about, &run.together);
            if let Some(ours) = find("ours") {
                // The share that is left without a mechanism shows what it adds.
                row.insert("in_time_over_ours".to_owned(), (in_time(run) / in_time(ours)).into());
            }
            report.rows.push(row);
            report.rows.extend(runs[0].1.iter().map(|second| joined(&about, second)));
        }
    }
    report.compared.extend(compared.into_iter().filter(|one| !one.cells.is_empty()));
    for (workload, throughput, hit) in
        [("light", "+0 %", "alike"), ("medium", "+25 %", "+90 %"), ("heavy", "+75 %", "+61 %")]
    {
        report.paper.push(row(&[
            ("policy", "FluidFaaS over ESG".into()),
            ("workload", workload.into()),
            ("partition", "p1".into()),
            ("throughput_per_s", throughput.into()),
            ("slo_hit_percent", hit.into()),
        ]));
    }
    for (partition, throughput) in [("p2", "+78 %"), ("hybrid", "+70 %")] {
        report.paper.push(row(&[
            ("policy", "FluidFaaS over ESG".into()),
            ("workload", "heavy".into()),
            ("partition", partition.into()),
            ("throughput_per_s", throughput.into()),
        ]));
    }
    Ok(report)
}

/// The figures of several seeds together.
fn measures(runs: &[Figures]) -> Map<String, Value> {
    let sum = |of: fn(&Figures) -> f64| runs.iter().map(of).sum::<f64>();
    let mean = |of| sum(of) / runs.len().max(1) as f64;
    let (in_time, seconds) = (sum(|one| one.in_time), sum(|one| one.seconds));
    let served = sum(|one| one.served).max(1.0);
    let mut measures = row(&[
        ("slo_hit_percent", (100.0 * in_time / sum(|one| one.sent).max(1.0)).into()),
        ("throughput_per_s", (sum(|one| one.served) / seconds).into()),
        ("while_sent_per_s", (sum(|one| one.served_while_sent) / sum(|one| one.seconds_sent)).into()),
        ("in_time_per_s", (in_time / seconds).into()),
        ("p95_ms", mean(|one| one.p95_ms).into()),
        ("p99_ms", mean(|one| one.p99_ms).into()),
        ("max_ms", mean(|one| one.max_ms).into()),
        ("mean_ms", mean(|one| one.mean_ms).into()),
        ("gpu_time_s", mean(|one| one.gpu_s).into()),
        ("mig_time_s", mean(|one| one.mig_s).into()),
        ("starts", mean(|one| one.starts).into()),
        ("held_slice_s", mean(|one| one.held_s).into()),
        ("gpu_ms_per_in_time", (1e3 * sum(|one| one.gpu_s) / in_time.max(1.0)).into()),
        ("mig_ms_per_in_time", (1e3 * sum(|one| one.mig_s) / in_time.max(1.0)).into()),
        ("pipelines_percent", (100.0 * sum(|one| one.pipelines) / served).into()),
    ]);
    for (number, name) in ["queue_ms", "load_ms", "execution_ms", "transfer_ms"].into_iter().enumerate() {
        let sum = runs.iter().map(|one| one.spent_ms[number]).sum::<f64>();
        measures.insert(name.to_owned(), (sum / served).into());
    }
    for number in 0..APPLICATIONS.len() {
        let of = |what: usize| runs.iter().map(|one| one.by_application[number][what]).sum::<f64>();
        if of(0) > 0.0 {
            measures.insert(format!("hit_app{number}"), (100.0 * of(1) / of(0)).into());
        }
    }
    measures
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use gshare_core::pipeline::Node;
    use gshare_core::pipeline::instances::InstanceKeeper;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(flags: &str) -> Args {
        Cli::parse_from(["fluidfaas"].into_iter().chain(flags.split_whitespace())).args
    }

    #[test]
    fn a_policy_that_is_not_known_is_refused_beside_one_that_is() {
        let error = run_on(1, &parsed("--policy ours,theirs"), &Own::default()).unwrap_err().to_string();
        assert!(error.starts_with("--policy theirs: need one of: monolithic; "), "{error}");
    }

    #[test]
    fn a_trace_is_one_run_unless_told_otherwise() {
        assert_eq!(parsed("").seeds, (1..=10).collect::<Vec<u64>>());
        assert_eq!(parsed("--trace calls.csv").seeds, [1]);
        assert_eq!(parsed("--trace calls.csv --seeds 4,5").seeds, [4, 5]);
    }

    /// A trace of four functions and 30 minutes, and windows of ten.
    #[test]
    fn windows_of_a_trace_lie_within_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("calls.csv");
        let minutes: Vec<String> = (1..=30).map(|minute| minute.to_string()).collect();
        let mut text = format!("HashFunction,{}\n", minutes.join(","));
        for name in ["a", "b", "c", "d"] {
            text.push_str(&format!("{name},{}\n", minutes.join(",")));
        }
        std::fs::write(&path, text).unwrap();
        let draws = |flags: &str| {
            draws(&parsed(&format!("--trace {} --length 60s {flags}", path.display())))
                .map(|all| all.into_iter().filter_map(|one| one.window).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        let all = draws("").unwrap();
        assert_eq!(all.len(), 3);
        assert!((all[0].shares[0].iter().sum::<f64>() - 10.0).abs() < 1e-9, "a mean of 1");
        assert!((all[2].shares[3][9] - 30.0 / 25.5).abs() < 1e-9);
        assert_eq!(draws("--trace-from 3,20 --seeds 1,2").unwrap().len(), 4);
        assert_eq!(
            draws("--trace-from 21").err().unwrap(),
            "--trace-from 21: need at most 20, for 10 of 30 minutes"
        );
    }

    #[test]
    fn a_router_of_the_programs_own_goes_with_our_keeper_and_a_keeper_with_our_order() {
        let flags = "--seeds 1 --length 60s --warm-up 20s --workload medium --partition p1 --load 1 --policy ours,router,keeper";
        let keeper = |node: &Node| -> Box<dyn InstanceKeeper> {
            let rank = PartitionConfig::default().with_rank(RankMode::Bottleneck);
            let partitioner = Box::new(Partitioner::new(rank).unwrap());
            let assigner = Box::new(LeastFragmentation);
            Box::new(Keeper::new(KeeperConfig::default(), node, partitioner, assigner).unwrap())
        };
        let own = Own::default()
            .with_router("router", || Box::new(SlackRouter::new(RouterConfig::default()).unwrap()))
            .with_keeper("keeper", keeper);
        let rows = run_on(1, &parsed(flags), &own).unwrap().rows;
        let [ours, router, keeper] = &rows[..] else { panic!("{rows:?}") };
        for (row, name) in [(router, "router"), (keeper, "keeper")] {
            assert!(row["policy"] == name && row["mean_ms"] == ours["mean_ms"], "{rows:?}");
            assert_eq!(row["in_time_over_ours"], 1.0);
        }
    }

    #[test]
    fn slices_over_time_are_held_while_they_work() {
        let flags =
            "--seeds 1,2 --length 60s --warm-up 20s --workload medium --partition p1 --load 1 --policy ours";
        let rows = run_on(1, &parsed(&format!("{flags} --series")), &Own::default()).unwrap().rows;
        assert_eq!(rows[1]["second"], 0);
        let of = |row: &Map<String, Value>, key: &str| row.get(key).and_then(Value::as_u64).unwrap_or(0);
        for row in &rows[1..] {
            let kinds = row.iter().filter(|(key, _)| key.starts_with("active_"));
            let active = of(row, "slices_active");
            assert_eq!(kinds.map(|(key, _)| of(row, key)).sum::<u64>(), active, "{row:?}");
            assert!(active <= of(row, "slices_held") && of(row, "slices_held") <= 48, "{row:?}");
            assert!(of(row, "gpus_active") <= of(row, "gpus_held").min(active), "{row:?}");
        }
        assert!(rows.iter().any(|row| of(row, "slices_active") > 10));
    }

    /// Parts of a latency add up, and hits of applications to the hits of all.
    #[test]
    fn breakdowns_add_up() {
        let args = parsed("--seeds 1 --length 60s --warm-up 20s --workload medium --partition p1 --load 1");
        for row in run_on(2, &args, &Own::default()).unwrap().rows {
            let of = |name: &str| row[name].as_f64().unwrap();
            let parts = ["queue_ms", "load_ms", "execution_ms", "transfer_ms"].map(of);
            assert!((parts.iter().sum::<f64>() - of("mean_ms")).abs() < 1e-3, "{row:?}");
            assert_eq!(of("transfer_ms") > 0.0, of("pipelines_percent") > 0.0, "{row:?}");
            let apps = (0..4).map(|number| of(&format!("hit_app{number}")));
            let (least, most) =
                apps.fold((100.0, 0.0), |(least, most), hit: f64| (hit.min(least), hit.max(most)));
            assert!((least..=most).contains(&of("slo_hit_percent")), "{row:?}");
        }
    }

    #[test]
    fn threads_change_nothing() {
        let args = parsed(
            "--seeds 1,2,3 --length 60s --warm-up 20s --workload heavy,medium --partition p2 --policy paper,ours",
        );
        let printed =
            |threads| serde_json::to_string(&run_on(threads, &args, &Own::default()).unwrap()).unwrap();
        let alone = printed(1);
        assert_eq!(alone, printed(3));
        let report: Value = serde_json::from_str(&alone).unwrap();
        assert_eq!(report["rows"].as_array().unwrap().len(), 8);
        assert_eq!(report["compared"][0]["cells"][3]["load"], 1.0);
        assert_eq!(report["compared"][0]["cells"][3]["workload"], "medium");
    }
}
