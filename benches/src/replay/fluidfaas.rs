//! FluidFaaS, section 7: four applications in three variants on 16 A100-80 cut into MIG slices.
//!
//! A simulation in virtual time (`gshare_sim::fluid`) of two nodes with eight GPUs each, around our router and keepers.
//! The paper prints no profiles: the times here are round numbers for models of these kinds, with speed-ups by slice as
//! measured on A100s for batches of 1, 8 and 32, and memory such that the paper's Table 5 holds. Deadlines are 1.5 x the
//! time on the smallest slice that runs the whole (section 6). The load is given as a share of what the slices that run an
//! application as a whole can do (`--load`); it is the same requests for every policy.
//!
//! Policies: `monolithic` has no pipelines, no time sharing and exclusive keep-alive, as ESG is described; `paper` is
//! FluidFaaS as printed; `ours`. Then ours with one mechanism switched off each. `--ablate` adds those, `--partition` and
//! `--workload` pick some. Throughput is requests answered by the time the last was, so it hangs on when the last few
//! end: half a second is a thousandth of it. `while_sent_per_s` counts those answered by the time the last one came, up to
//! then; `in_time_per_s` only those within the deadline. GPU and MIG time are those of the whole run, for work that came
//! too late as well; so that who serves more is not blamed for it, they are also given for each request that was answered
//! within its deadline. Where fewer than 95 % are, the P95 is that of a request that was late anyway. Whoever serves as
//! much has as much waiting in all, whatever the order: the mean says how much, and a share `mean / w` of the requests is
//! late at least if none waits for more than `w`. So P99 and the longest are given as well.
//!
//! Seeds: what they draw, and what the second table says, is in `replay fluidfaas --help`. The last few requests decide
//! about a thousandth of the throughput of a seed, so few seeds cannot tell whether who is level is ahead. A trace has its
//! own bursts and runs with one seed, unless more are given.

use super::paired::{Compared, Run};
use super::{Report, in_parallel, row};
use anyhow::{Context, Result, bail};
use clap::builder::ArgPredicate;
use gshare_core::dag::{Component, Dag};
use gshare_core::mig::{GpuModel, SliceAt};
use gshare_core::pipeline::{Goal, HandOff, Node, NodeGpu, RankMode};
use gshare_core::{BasisPoints, Bytes, Duration, GpuId, Timestamp};
use gshare_sched::pipeline::{
    Choice, EvictionPolicy, KeepAlive, Keeper, KeeperConfig, Late, LeastFragmentation, PartitionConfig,
    Partitioner, RouterConfig, SlackRouter,
};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::fluid::{End, Load, Outcome, Scenario, simulate};
use gshare_sim::trace::read_azure_counts;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Flags.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of bursts, arrivals and branches [default: 1 to 20; with a trace 1]
    #[arg(long, value_delimiter = ',', default_values_t = 1..=20, hide_default_value = true,
        default_value_if("trace", ArgPredicate::IsPresent, "1"))]
    seeds: Vec<u64>,
    /// Calls per minute as a CSV shaped like the Azure Functions 2019 trace; the busiest functions drive the
    /// applications [default: generated]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Length of the arrivals
    #[arg(long, default_value = "600s")]
    length: Duration,
    /// Time at the beginning with a quarter of the load, whose requests are not counted
    #[arg(long, default_value = "60s")]
    warm_up: Duration,
    /// Mean load, as a share of what the slices that run an application as a whole can do
    #[arg(long, value_delimiter = ',', default_value = "0.5,1")]
    load: Vec<f64>,
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
}

/// Times in ms of one request alone on `1g.10gb`, batch 1.
const SUPER_RESOLUTION: (&str, u64) = ("super_resolution", 60);
const SEGMENTATION: (&str, u64) = ("segmentation", 55);
const CLASSIFICATION: (&str, u64) = ("classification", 15);
const DEBLUR: (&str, u64) = ("deblur", 40);
const DEPTH: (&str, u64) = ("depth", 35);
const BACKGROUND: (&str, u64) = ("background", 30);

/// Table 4. The last is the one with a branch: super resolution for half of the images.
const APPLICATIONS: [(&str, &[(&str, u64)]); 4] = [
    ("image_classification", &[SUPER_RESOLUTION, SEGMENTATION, CLASSIFICATION]),
    ("depth_recognition", &[DEBLUR, SUPER_RESOLUTION, DEPTH]),
    ("background_elimination", &[SUPER_RESOLUTION, DEBLUR, BACKGROUND]),
    ("expanded_classification", &[DEBLUR, SUPER_RESOLUTION, BACKGROUND, SEGMENTATION, CLASSIFICATION]),
];

/// A variant: batch, time of it over that of one request (in tenths), speed-up of 2g, 3g, 4g and 7g over 1g in tenths,
/// memory of a component, bytes between two.
struct Variant {
    name: &'static str,
    batch: u32,
    time: u64,
    speed: [u64; 4],
    memory: Bytes,
    bytes: Bytes,
    applications: usize,
}

const VARIANTS: [Variant; 3] = [
    Variant {
        name: "light",
        batch: 1,
        time: 10,
        speed: [12, 13, 13, 14],
        memory: Bytes::from_mib(2_200),
        bytes: Bytes::from_mib(4),
        applications: 4,
    },
    Variant {
        name: "medium",
        batch: 8,
        time: 50,
        speed: [18, 25, 30, 42],
        memory: Bytes::from_gib(5),
        bytes: Bytes::from_mib(16),
        applications: 4,
    },
    // The large variant of the expanded classification fits no slice as a whole: left out, as in the paper.
    Variant {
        name: "heavy",
        batch: 32,
        time: 170,
        speed: [19, 28, 36, 56],
        memory: Bytes::from_gib(11),
        bytes: Bytes::from_mib(48),
        applications: 3,
    },
];

const SLICES: [&str; 5] = ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"];

fn application(index: usize, variant: &Variant) -> Result<Dag> {
    let (name, models) = APPLICATIONS[index];
    let mut dag = Dag::builder(name);
    for &(model, ms) in models {
        let mut component = Component::new(model);
        for (slice, speed) in SLICES.iter().zip([10].into_iter().chain(variant.speed)) {
            let time = Duration::from_micros(ms * 1_000 * variant.time / speed);
            component = component.with_profile(*slice, variant.batch, time, variant.memory);
        }
        if name == "expanded_classification" && model == SUPER_RESOLUTION.0 {
            component = component.with_runs(BasisPoints::from_percent(50).context("share")?);
        }
        dag = dag.component(component);
    }
    for pair in models.windows(2) {
        dag = dag.edge(pair[0].0, pair[1].0, variant.bytes);
    }
    if name == "expanded_classification" {
        dag = dag.edge(DEBLUR.0, BACKGROUND.0, variant.bytes);
    }
    Ok(dag.build()?)
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

fn node(model: &GpuModel, cuts: &[Vec<&str>]) -> Result<Node> {
    let gpu = |(number, names): (u32, &Vec<&str>)| -> Result<NodeGpu> {
        let profiles = names.iter().map(|name| model.profile(name)).collect::<Result<Vec<_>, _>>()?;
        let free: Vec<SliceAt> = model.arrange(&profiles).context("an illegal cut")?;
        Ok(NodeGpu { gpu: GpuId(number), free, busy: Vec::new() })
    };
    let gpus = (0u32..).zip(cuts).map(gpu).collect::<Result<Vec<_>>>()?;
    Ok(Node::new(model.clone(), gpus)?)
}

/// Time of the whole on a slice, every branch taken; none where it does not fit.
fn whole(dag: &Dag, model: &GpuModel, slice: &str, variant: &Variant) -> Option<Duration> {
    let profile = model.get(model.profile(slice).ok()?)?;
    let on = |component: &Component| component.profile(slice, variant.batch).cloned();
    let all: Vec<_> = dag.components().iter().filter_map(on).collect();
    let memory = all.iter().map(|one| one.memory.get()).sum::<u64>() + Goal::default().runtime_memory.get();
    let time = all.iter().map(|one| one.time.as_nanos()).sum();
    (all.len() == dag.len() && memory <= profile.memory.get()).then(|| Duration::from_nanos(time))
}

/// Calls per second of each application over time: shares of a mean, bin by bin.
struct Shape {
    bin: Duration,
    shares: Vec<Vec<f64>>,
}

fn shape(args: &Args, rng: &mut Rng) -> Result<Shape> {
    let scaled = |bins: Vec<f64>| {
        let mean = bins.iter().sum::<f64>() / bins.len() as f64;
        bins.into_iter().map(|bin| bin / mean.max(1e-9)).collect::<Vec<f64>>()
    };
    if let Some(path) = &args.trace {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let mut functions = read_azure_counts(std::io::BufReader::new(file))?;
        functions.sort_by_key(|one| std::cmp::Reverse(one.counts.iter().map(|&n| u64::from(n)).sum::<u64>()));
        // A minute of the trace is six seconds here: a length of ten minutes shows a hundred of them.
        let bin = Duration::from_secs(6);
        let bins = usize::try_from(args.length.as_nanos() / bin.as_nanos())?.max(1);
        let take = |one: &gshare_sim::trace::FunctionCounts| {
            scaled(one.counts.iter().cycle().take(bins).map(|&n| f64::from(n)).collect())
        };
        let shares: Vec<_> = functions.iter().take(APPLICATIONS.len()).map(take).collect();
        if shares.len() < APPLICATIONS.len() {
            bail!("{}: need {} functions", path.display(), APPLICATIONS.len());
        }
        return Ok(Shape { bin, shares });
    }
    let bin = Duration::from_secs(20);
    let bins = usize::try_from(args.length.as_nanos() / bin.as_nanos())?.max(1);
    // About the variability of the trace's aggregate (CV 0.4 by the minute), with bursts of three times the mean.
    let draw = |rng: &mut Rng| {
        let level = 0.4 + rng.below(1_000) as f64 / 1_000.0;
        if rng.percent(8) { level * 3.0 } else { level }
    };
    let shares = (0..APPLICATIONS.len()).map(|_| scaled((0..bins).map(|_| draw(rng)).collect())).collect();
    Ok(Shape { bin, shares })
}

/// A policy of the table.
struct Policy {
    name: &'static str,
    keeper: KeeperConfig,
    router: RouterConfig,
    rank: RankMode,
    hand_off: HandOff,
}

fn policies(ablate: bool) -> Vec<Policy> {
    let policy =
        |name, keeper, router, rank| Policy { name, keeper, router, rank, hand_off: HandOff::default() };
    let (cv, bottleneck) = (RankMode::PaperCv, RankMode::Bottleneck);
    // Section 7.3: 10 to 40 ms for a hand-off. Fresh shared memory and its page faults, for both sides: 2.5 GB/s.
    let slow = HandOff { fixed: Duration::from_millis(3), bytes_per_second: 2_500_000_000 };
    let mut all = vec![
        policy("monolithic", KeeperConfig::monolithic(), RouterConfig::paper(), cv),
        Policy {
            hand_off: slow,
            ..policy("paper, its hand-offs", KeeperConfig::paper(), RouterConfig::paper(), cv)
        },
        policy("paper", KeeperConfig::paper(), RouterConfig::paper(), cv),
        policy("ours", KeeperConfig::default(), RouterConfig::default(), bottleneck),
    ];
    if ablate {
        let ours = |name, change: &dyn Fn(&mut KeeperConfig)| {
            let mut keeper = KeeperConfig::default();
            change(&mut keeper);
            policy(name, keeper, RouterConfig::default(), bottleneck)
        };
        all.push(ours("ours - pipelines", &|c| c.pipelines = false));
        all.push(ours("ours - time sharing", &|c| c.time_sharing = false));
        all.push(ours("ours - migration", &|c| c.migration = false));
        all.push(ours("ours - reclaim", &|c| (c.reclaim, c.demote_pipelines) = (false, false)));
        all.push(ours("ours - start when short", &|c| c.hot_on_shortage = false));
        all.push(ours("ours - per slice", &|c| c.choice = Choice::Ranked));
        all.push(ours("ours - fastest of those alike", &|c| c.alike_percent = 0));
        all.push(ours("ours - two thresholds", &|c| {
            (c.hot_below, c.cool_windows) = (c.hot_above, 1);
        }));
        all.push(ours("ours - eviction by cost", &|c| c.eviction = EvictionPolicy::Lru));
        all.push(ours("ours - adaptive keep-alive", &|c| c.keep_alive = KeepAlive::PAPER));
        let base = |name, router, rank| policy(name, KeeperConfig::default(), router, rank);
        all.push(base("ours - late last", RouterConfig::default().with_late(Late::InOrder), bottleneck));
        let mut patient = RouterConfig::default();
        patient.late_wait = None;
        all.push(base("ours - overdue first", patient, bottleneck));
        let mut eager = RouterConfig::default();
        eager.stay_loads = 0;
        all.push(base("ours - loads that pay", eager, bottleneck));
        all.push(base("ours + admission", RouterConfig::default().with_late(Late::Reject), bottleneck));
        all.push(base("ours - bottleneck rank", RouterConfig::default(), cv));
    }
    all
}

/// What one run showed.
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
}

fn figures(outcome: &Outcome, slos: &[Duration], from: Timestamp) -> Figures {
    let (mut latencies, mut in_time, mut sent, mut while_sent) = (Vec::new(), 0u64, 0u64, 0u64);
    let came = |end: &End| match *end {
        End::Served { arrived, .. } | End::Rejected { arrived, .. } => arrived,
    };
    let last = outcome.ends.iter().map(came).max().unwrap_or(from);
    for end in &outcome.ends {
        let arrived = came(end);
        if arrived < from {
            continue;
        }
        sent += 1;
        if let End::Served { function, arrived, at } = *end {
            let latency = at.saturating_since(arrived);
            in_time += u64::from(latency <= slos[function.index()]);
            while_sent += u64::from(at <= last);
            latencies.push(latency);
        }
    }
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
        seconds: outcome.finished.saturating_since(from).as_secs_f64(),
        served_while_sent: while_sent as f64,
        seconds_sent: last.saturating_since(from).as_secs_f64(),
        p95_ms: percentile(95),
        p99_ms: percentile(99),
        max_ms: percentile(100),
        mean_ms,
        gpu_s: outcome.gpu_time.as_secs_f64(),
        mig_s: outcome.slice_time.as_secs_f64(),
        held_s: outcome.held_slice_time.as_secs_f64(),
    }
}

/// Figures in which ours is compared with paper mode, and whether less is better.
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
    cuts: Vec<Vec<&'static str>>,
    node: Node,
    load: f64,
}

impl Cell<'_> {
    fn all<'a>(args: &'a Args, model: &GpuModel) -> Result<Vec<Cell<'a>>> {
        let mut cells = Vec::new();
        for workload in &args.workload {
            let variant = VARIANTS.iter().find(|one| one.name == workload);
            let variant =
                variant.with_context(|| format!("workload `{workload}`: need light, medium or heavy"))?;
            for name in &args.partition {
                let cuts = partition(name)?;
                let node = node(model, &cuts)?;
                let cell =
                    |&load| Cell { variant, partition: name, cuts: cuts.clone(), node: node.clone(), load };
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

    /// A policy on the requests of a seed.
    fn run(&self, args: &Args, model: &GpuModel, policy: &Policy, seed: u64) -> Result<Figures> {
        let (scenario, slos) = scenario(args, model, &self.cuts, self.variant, self.load, policy, seed)?;
        let keeper = |_| -> Result<Keeper> {
            let partitioner = Partitioner::new(PartitionConfig::default().with_rank(policy.rank))?;
            let assigner = Box::new(LeastFragmentation);
            Ok(Keeper::new(policy.keeper.clone(), &self.node, Box::new(partitioner), assigner)?)
        };
        let keepers = (0..2).map(keeper).collect::<Result<Vec<_>>>()?;
        let router = SlackRouter::new(policy.router.clone())?;
        let outcome = simulate(&scenario, router, keepers)
            .map_err(|fault| anyhow::anyhow!("{}: seed {seed}: {fault}", policy.name))?;
        Ok(figures(&outcome, &slos, Timestamp::ZERO + args.warm_up))
    }
}

/// Runs every policy on every partition, workload and load.
///
/// # Errors
/// Flags or a trace that cannot be; a policy that broke the simulation's book.
pub fn run(args: &Args) -> Result<Report> {
    run_on(std::thread::available_parallelism()?.get(), args)
}

fn run_on(threads: usize, args: &Args) -> Result<Report> {
    let mut report = Report::new("fluidfaas", args.seeds.clone());
    let model = GpuModel::find("A100-80")?;
    let cells = Cell::all(args, &model)?;
    let mut policies = policies(args.ablate);
    let names: Vec<_> = policies.iter().map(|one| one.name).collect();
    policies.retain(|one| args.policy.is_empty() || args.policy.iter().any(|name| name == one.name));
    let seeds = args.seeds.len();
    if policies.is_empty() || seeds == 0 {
        bail!("need a seed, and a policy out of: {}", names.join("; "));
    }
    let runs = in_parallel(threads, cells.len() * policies.len() * seeds, |number| {
        let policy = &policies[number / seeds % policies.len()];
        cells[number / seeds / policies.len()].run(args, &model, policy, args.seeds[number % seeds])
    })?;
    let mut compared = Compared::new("paper", &COMPARED);
    for (cell, runs) in cells.iter().zip(runs.chunks(policies.len() * seeds)) {
        let of = |runs: &[Figures]| Run {
            together: measures(runs),
            by_seed: runs.chunks(1).map(measures).collect(),
        };
        let all: Vec<Run> = runs.chunks(seeds).map(of).collect();
        let find = |name| policies.iter().position(|one| one.name == name).map(|at| &all[at]);
        let (paper, ours) = (find("paper"), find("ours"));
        if let (Some(paper), Some(ours)) = (paper, ours) {
            compared.push(cell.input(), paper, ours);
        }
        let in_time = |run: &Run| run.together.get("in_time_per_s").and_then(Value::as_f64).unwrap_or(0.0);
        for (policy, run) in policies.iter().zip(&all) {
            let mut row = row(&[("policy", policy.name.into())]);
            row.extend(cell.input());
            row.extend(run.together.clone());
            if let Some(ours) = ours {
                // What a mechanism adds: how much less there is without it.
                row.insert("in_time_over_ours".to_owned(), (in_time(run) / in_time(ours)).into());
            }
            report.rows.push(row);
        }
    }
    report.compared.extend(Some(compared).filter(|one| !one.cells.is_empty()));
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

/// What runs of several seeds come to together.
fn measures(runs: &[Figures]) -> Map<String, Value> {
    let sum = |of: fn(&Figures) -> f64| runs.iter().map(of).sum::<f64>();
    let mean = |of| sum(of) / runs.len().max(1) as f64;
    let (in_time, seconds) = (sum(|one| one.in_time), sum(|one| one.seconds));
    row(&[
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
        ("held_slice_s", mean(|one| one.held_s).into()),
        ("gpu_ms_per_in_time", (1e3 * sum(|one| one.gpu_s) / in_time.max(1.0)).into()),
        ("mig_ms_per_in_time", (1e3 * sum(|one| one.mig_s) / in_time.max(1.0)).into()),
    ])
}

/// The requests of a seed: the same for every policy.
fn scenario(
    args: &Args,
    model: &GpuModel,
    cuts: &[Vec<&str>],
    variant: &Variant,
    load: f64,
    policy: &Policy,
    seed: u64,
) -> Result<(Scenario, Vec<Duration>)> {
    let mut rng = Rng::new(seed);
    let shape = shape(args, &mut rng)?;
    let (mut loads, mut slos) = (Vec::new(), Vec::new());
    for index in 0..variant.applications {
        let dag = application(index, variant)?;
        let alone = SLICES.iter().find_map(|slice| whole(&dag, model, slice, variant));
        let slo = Duration::from_nanos(alone.context("it fits no slice")?.as_nanos() * 3 / 2);
        // What the slices of both nodes that run it as a whole do, divided among the applications.
        let per_slice =
            |slice: &&str| whole(&dag, model, slice, variant).map_or(0.0, |t| 1.0 / t.as_secs_f64());
        let capacity = 2.0 * cuts.iter().flatten().map(per_slice).sum::<f64>() / variant.applications as f64;
        let quiet = usize::try_from(args.warm_up.as_nanos().div_ceil(shape.bin.as_nanos()))?;
        let rate = |(bin, share): (usize, &f64)| load * capacity * if bin < quiet { 0.25 } else { *share };
        let rates = shape.shares[index].iter().enumerate().map(rate).collect();
        let mut process = Arrivals::rates(shape.bin, rates)?;
        let (mut arrivals, mut last) = (Vec::new(), Timestamp::ZERO);
        while let Some(next) = process.next_after(last, &mut rng) {
            arrivals.push(next);
            last = next;
        }
        let goal = Goal::default().with_batch(variant.batch).with_slo(slo).with_hand_off(policy.hand_off);
        slos.push(slo);
        loads.push(Load { dag, goal, arrivals });
    }
    let (die_every, linger) = (None, Duration::ZERO);
    Ok((Scenario { model: model.clone(), loads, die_every, seed, linger }, slos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    /// FluidFaaS, Table 5: the smallest slice for each variant, as a whole and for its largest part.
    #[test]
    fn variants_need_the_slices_of_table_5() {
        let model = GpuModel::find("A100-80").unwrap();
        for (variant, smallest) in VARIANTS.iter().zip([
            ["1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb"],
            ["2g.20gb", "2g.20gb", "2g.20gb", "4g.40gb"],
            ["3g.40gb", "3g.40gb", "3g.40gb", ""],
        ]) {
            for (index, smallest) in smallest.into_iter().enumerate().take(variant.applications) {
                let dag = application(index, variant).unwrap();
                let fits = SLICES.iter().find(|slice| whole(&dag, &model, slice, variant).is_some()).unwrap();
                // 3g.40gb and 4g.40gb have the same memory.
                let expected = if smallest == "4g.40gb" { "3g.40gb" } else { smallest };
                assert_eq!(*fits, expected, "{} {}", variant.name, dag.name());
            }
            let one = variant.memory.get() + Goal::default().runtime_memory.get();
            let part = SLICES
                .iter()
                .find(|slice| model.get(model.profile(slice).unwrap()).unwrap().memory.get() >= one);
            assert_eq!(*part.unwrap(), if variant.name == "heavy" { "2g.20gb" } else { "1g.10gb" });
        }
    }
    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(flags: &str) -> Args {
        Cli::parse_from(["fluidfaas"].into_iter().chain(flags.split_whitespace())).args
    }

    #[test]
    fn a_trace_is_one_run_unless_told_otherwise() {
        assert_eq!(parsed("").seeds, (1..=20).collect::<Vec<u64>>());
        assert_eq!(parsed("--trace calls.csv").seeds, [1]);
        assert_eq!(parsed("--trace calls.csv --seeds 4,5").seeds, [4, 5]);
    }

    #[test]
    fn threads_change_nothing() {
        let args = parsed(
            "--seeds 1,2,3 --length 60s --warm-up 20s --workload heavy,medium --partition p2 --policy paper,ours",
        );
        let printed = |threads| serde_json::to_string(&run_on(threads, &args).unwrap()).unwrap();
        let alone = printed(1);
        assert_eq!(alone, printed(3));
        let report: Value = serde_json::from_str(&alone).unwrap();
        assert_eq!(report["rows"].as_array().unwrap().len(), 8);
        assert_eq!(report["compared"][0]["cells"][3]["load"], 1.0);
        assert_eq!(report["compared"][0]["cells"][3]["workload"], "medium");
    }
}
