//! Dilu, figure 20: thousands of instances placed on 40 GB GPUs; how many GPUs are in use at the peak.
//!
//! Input: an event file (one dict literal per line: `Time`, `Action` start or delete, `Instance` with `service_name`,
//! `type`, `gpu_num`, `sm_requests`, `sm_limits`, `memory` in GB per GPU), or events drawn from the published
//! distributions.
//!
//! Mode `paper` follows the rules of the published simulation, its floating-point sums, its loosened limits of split models and its
//! nodes of four GPUs included. The published simulation leaves ties to the order of a hashed set. Here the lowest number is taken,
//! and `least_`, `median_` and `most_of_any_order` are figures over other orders. Mode `ours` is [`DiluPacker`]: integer sums,
//! gamma exact, any node. `ours_same_node` keeps the published rule of one node for the workers of a job and the parts of a model,
//! so it is on equal terms with `paper_dilu`. `ours_repacking` also carries out a repacking plan before it opens a GPU.
//! `placing_ms` is for all placements and releases of the stream together. A packer of the program's own (see [`super::main`])
//! takes the place of `ours`, under its name.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, Packer, PackerExt, Placed, Placement, Workload};
use gshare_sched::place::{DiluConfig, DiluPacker};
use gshare_sim::scenario::Own;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Report, joined, row};
use crate::mixes::SplitMix64;

const MEMORY_GB: f64 = 40.0;
const NODES: usize = 1_000;
const GPUS_PER_NODE: usize = 4;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Event file; without one, events are drawn from the published distributions
    #[arg(long)]
    instances: Option<PathBuf>,
    /// Instances to draw
    #[arg(long, default_value_t = 3_200)]
    count: usize,
    /// First seed of the draw
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// Other orders of GPUs of the same score to try
    #[arg(long, default_value_t = 20)]
    tie_orders: u64,
    /// Most limits on a GPU, in basis points of its SMs; with several, Dilu's and ours run under each
    #[arg(long, value_delimiter = ',', default_value = "15000", value_name = "BASIS_POINTS")]
    gamma: Vec<u32>,
    /// Also print the GPUs in use in each second in which something starts or ends
    #[arg(long)]
    series: bool,
    /// Also with a repacking plan before a GPU is opened; takes minutes at 3,200 instances
    #[arg(long)]
    repacking: bool,
    /// Source of the rules
    #[arg(long, value_enum, default_value_t = Mode::Both)]
    mode: Mode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// The published simulation's, with its baselines
    Paper,
    /// Our placement alone
    Ours,
    /// Both placements
    Both,
}

/// The GPUs on which ours may put the workers of a job and the parts of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    AnyNode,
    /// As the published simulation does: all on one node.
    SameNode,
    /// Any node, and placements are moved.
    Repacking,
}

#[derive(Debug, Clone, PartialEq)]
struct Job {
    name: String,
    kind: Workload,
    gpus: usize,
    request: f64,
    limit: f64,
    memory_gb: f64,
}

#[derive(Debug, Clone)]
struct Event {
    second: i64,
    start: bool,
    job: Job,
}

#[derive(Debug, Deserialize)]
struct Scenario {
    paper: Vec<Map<String, Value>>,
}

/// Runs the figure.
///
/// # Errors
/// When the event file does not parse, or a job fits nowhere.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    let scenario: Scenario = toml::from_str(include_str!("../../scenarios/dilu/fig20.toml"))?;
    let inputs: Vec<(Option<u64>, Vec<Event>)> = match &args.instances {
        Some(path) => vec![(None, read(path)?)],
        None => {
            (args.seed..args.seed + args.seeds).map(|seed| (Some(seed), draw(seed, args.count))).collect()
        }
    };
    let mut report = Report::new("dilu-fig20", inputs.iter().filter_map(|(seed, _)| *seed).collect());
    report.paper = scenario.paper;
    ensure!(!args.gamma.is_empty(), "--gamma: need at least one");
    for (seed, events) in &inputs {
        let starts = events.iter().filter(|event| event.start).count();
        let mut push = |policy: &str, gamma: Option<&u32>, outcome: &Outcome, orders: &[usize]| {
            let mut about = row(&[("policy", policy.into())]);
            about.extend(seed.map(|seed| ("seed".to_owned(), seed.into())));
            let gamma = gamma.filter(|_| args.gamma.len() > 1);
            about.extend(gamma.map(|gamma| ("gamma_bp".to_owned(), (*gamma).into())));
            let mut line = outcome.row(starts);
            line.extend(about.clone());
            if policy.starts_with("paper") {
                line.insert("least_of_any_order".into(), orders.first().copied().into());
                line.insert("median_of_any_order".into(), orders.get(orders.len() / 2).copied().into());
                line.insert("most_of_any_order".into(), orders.last().copied().into());
            }
            report.rows.push(line);
            for (second, gpus) in outcome.series.iter().filter(|_| args.series) {
                let second = second - outcome.series[0].0;
                let at = row(&[("second", second.into()), ("gpus", (*gpus).into())]);
                report.rows.push(joined(&about, &at));
            }
        };
        if args.mode != Mode::Ours {
            for rules in Rules::ALL {
                // The others have no limits to add up.
                let gammas = if rules == Rules::Dilu { &args.gamma[..] } else { &args.gamma[..1] };
                for gamma in gammas {
                    let paper = |ties| paper(events, rules, f64::from(*gamma) / 1e4, ties);
                    let orders = (0..args.tie_orders).map(|order| Ok(paper(Ties::Shuffled(order))?.peak));
                    let mut orders = orders.collect::<Result<Vec<_>>>()?;
                    orders.sort_unstable();
                    let gamma = Some(gamma).filter(|_| rules == Rules::Dilu);
                    push(rules.name(), gamma, &paper(Ties::Lowest)?, &orders);
                }
            }
        }
        if args.mode != Mode::Paper {
            let ours = DiluConfig::default();
            let best_fit = ours.with_large_models_worst_fit(false);
            for (name, config, rule) in [
                ("ours_worst_fit", ours, Rule::AnyNode),
                ("ours", best_fit, Rule::AnyNode),
                ("ours_same_node", best_fit, Rule::SameNode),
                ("ours_repacking", best_fit, Rule::Repacking),
            ] {
                for gamma in args.gamma.iter().filter(|_| rule != Rule::Repacking || args.repacking) {
                    push(name, Some(gamma), &self::ours(events, config.with_gamma_bp(*gamma), rule)?, &[]);
                }
            }
        }
        for (name, make) in own.packers() {
            push(name, None, &packed(events, &mut *make(), None, |_| Ok(0))?, &[]);
        }
        report.rows.push(row(&[
            ("policy", "bound".into()),
            ("instances", starts.into()),
            ("peak_gpus", bound(events).into()),
        ]));
    }
    Ok(report)
}

#[derive(Debug, Default)]
struct Outcome {
    peak: usize,
    /// Mean over the GPUs in use, at the peak.
    sm_free: f64,
    memory_free: f64,
    moves: usize,
    spent: Duration,
    /// The GPUs in use after the events of each second that had any.
    series: Vec<(i64, usize)>,
}

impl Outcome {
    fn observe(&mut self, second: i64, gpus: usize, fragmentation: impl FnOnce() -> (f64, f64)) {
        match self.series.last_mut() {
            Some((then, last)) if *then == second => *last = gpus,
            _ => self.series.push((second, gpus)),
        }
        if gpus > self.peak {
            self.peak = gpus;
            (self.sm_free, self.memory_free) = fragmentation();
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "a report")]
    fn row(&self, instances: usize) -> Map<String, Value> {
        let seconds: f64 =
            self.series.windows(2).map(|pair| (pair[1].0 - pair[0].0) as f64 * pair[0].1 as f64).sum();
        row(&[
            ("instances", instances.into()),
            ("peak_gpus", self.peak.into()),
            ("gpu_minutes", (seconds / 60.0).round().into()),
            ("sm_fragmentation", self.sm_free.into()),
            ("memory_fragmentation", self.memory_free.into()),
            ("moves", self.moves.into()),
            ("placing_ms", (self.spent.as_secs_f64() * 1e3).into()),
        ])
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    Exclusive,
    InflessLimit,
    InflessRequest,
    Dilu,
}

impl Rules {
    const ALL: [Self; 4] = [Self::Exclusive, Self::InflessLimit, Self::InflessRequest, Self::Dilu];

    fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "paper_exclusive",
            Self::InflessLimit => "paper_infless_l",
            Self::InflessRequest => "paper_infless_r",
            Self::Dilu => "paper_dilu",
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct PaperGpu {
    request: f64,
    limit: f64,
    memory: f64,
    jobs: usize,
}

impl PaperGpu {
    fn holds(&self, request: f64, limit: f64, memory: f64, gamma: f64) -> bool {
        self.request + request <= 1.0 && self.limit + limit <= gamma && self.memory + memory <= MEMORY_GB
    }
}

/// The order in which a hashed set gives GPUs, and so which of several with the same score is taken.
#[derive(Debug, Clone, Copy)]
enum Ties {
    /// The lowest number first.
    Lowest,
    /// Any order that there is: one per seed.
    Shuffled(u64),
}

impl Ties {
    fn rank(self, gpu: usize) -> u64 {
        match self {
            Self::Lowest => gpu as u64,
            Self::Shuffled(seed) => SplitMix64::new(seed << 32 | gpu as u64).next_u64(),
        }
    }
}

/// The published rules, on floating-point sums that are never set back to zero.
fn paper(events: &[Event], rules: Rules, gamma: f64, ties: Ties) -> Result<Outcome> {
    let mut gpus = vec![PaperGpu::default(); NODES * GPUS_PER_NODE];
    let mut idle: Vec<usize> = (0..gpus.len()).collect();
    idle.sort_by_key(|gpu| ties.rank(*gpu));
    let mut active: Vec<usize> = Vec::new();
    // Per job: the GPU, and the charge subtracted when the job ends.
    let mut places: BTreeMap<&str, Vec<(usize, PaperGpu)>> = BTreeMap::new();
    let mut outcome = Outcome::default();
    let (alpha, beta) = if rules == Rules::Dilu { (0.6, 0.4) } else { (1.0, 0.0) };
    for event in events {
        let job = &event.job;
        let start = Instant::now();
        let (request, limit) = match rules {
            Rules::InflessLimit => (job.limit, 0.0),
            Rules::InflessRequest => (job.request, 0.0),
            Rules::Exclusive | Rules::Dilu => (job.request, job.limit),
        };
        let memory = job.memory_gb;
        if event.start {
            let charge = PaperGpu { request, limit, memory, jobs: 1 };
            let chosen: Vec<(usize, PaperGpu, PaperGpu)> = match job.kind {
                _ if rules == Rules::Exclusive => {
                    idle.iter().take(job.gpus).map(|gpu| (*gpu, charge, charge)).collect()
                }
                Workload::Training => paper_training(&gpus, &active, &idle, job.gpus, charge, gamma),
                kind => {
                    let mut best: Option<(f64, usize)> = None;
                    for gpu in &active {
                        let state = &gpus[*gpu];
                        if state.holds(request, limit, memory, gamma) {
                            let score = alpha * (1.0 - (state.request + request))
                                + beta * (1.0 - (state.memory + memory) / MEMORY_GB);
                            if best.is_none_or(|best| score < best.0) {
                                best = Some((score, *gpu));
                            }
                        }
                    }
                    let split = || match kind {
                        Workload::LargeModel if rules == Rules::Dilu => {
                            paper_split(&gpus, &active, charge, gamma)
                        }
                        _ => None,
                    };
                    match best {
                        Some((_, gpu)) => vec![(gpu, charge, charge)],
                        None => split().unwrap_or_else(|| {
                            idle.iter().take(1).map(|gpu| (*gpu, charge, charge)).collect()
                        }),
                    }
                }
            };
            if chosen.is_empty() {
                bail!("{} fits nowhere", job.name);
            }
            for (gpu, add, subtract) in chosen {
                if gpus[gpu].jobs == 0 {
                    idle.retain(|other| *other != gpu);
                    let place = active.partition_point(|other| ties.rank(*other) < ties.rank(gpu));
                    active.insert(place, gpu);
                }
                let state = &mut gpus[gpu];
                state.request += add.request;
                state.limit += add.limit;
                state.memory += add.memory;
                state.jobs += 1;
                places.entry(&job.name).or_default().push((gpu, subtract));
            }
        } else {
            for (gpu, charge) in places.remove(job.name.as_str()).unwrap_or_default() {
                let state = &mut gpus[gpu];
                state.request -= charge.request;
                state.limit -= charge.limit;
                state.memory -= charge.memory;
                state.jobs -= 1;
                if state.jobs == 0 {
                    active.retain(|other| *other != gpu);
                    let place = idle.partition_point(|other| ties.rank(*other) < ties.rank(gpu));
                    idle.insert(place, gpu);
                }
            }
        }
        outcome.spent += start.elapsed();
        outcome.observe(event.second, active.len(), || mean_free(active.iter().map(|gpu| &gpus[*gpu])));
    }
    Ok(outcome)
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn mean_free<'a>(gpus: impl Iterator<Item = &'a PaperGpu>) -> (f64, f64) {
    let (mut sm, mut memory, mut count) = (0.0, 0.0, 0usize);
    for gpu in gpus {
        sm += 1.0 - gpu.request;
        memory += 1.0 - gpu.memory / MEMORY_GB;
        count += 1;
    }
    (sm / count.max(1) as f64, memory / count.max(1) as f64)
}

/// The GPUs that fit, by node: nodes and GPUs in the order in which they come.
fn by_node(active: &[usize], fits: impl Fn(usize) -> bool) -> Vec<(usize, Vec<usize>)> {
    let mut nodes: Vec<(usize, Vec<usize>)> = Vec::new();
    for &gpu in active.iter().filter(|gpu| fits(**gpu)) {
        let node = gpu / GPUS_PER_NODE;
        match nodes.iter_mut().find(|(known, _)| *known == node) {
            Some((_, list)) => list.push(gpu),
            None => nodes.push((node, vec![gpu])),
        }
    }
    nodes
}

/// The first node with enough fitting active GPUs; else the first node where active and idle GPUs together suffice.
fn paper_training(
    gpus: &[PaperGpu],
    active: &[usize],
    idle: &[usize],
    count: usize,
    charge: PaperGpu,
    gamma: f64,
) -> Vec<(usize, PaperGpu, PaperGpu)> {
    let nodes = by_node(active, |gpu| gpus[gpu].holds(charge.request, charge.limit, charge.memory, gamma));
    let enough = nodes.iter().find(|(_, list)| list.len() >= count);
    let chosen: Vec<usize> = match enough {
        Some((_, list)) => list[..count].to_vec(),
        None => (0..NODES)
            .find_map(|node| {
                let mut list = nodes
                    .iter()
                    .find(|(known, _)| *known == node)
                    .map(|(_, list)| list.clone())
                    .unwrap_or_default();
                list.extend(idle.iter().filter(|gpu| *gpu / GPUS_PER_NODE == node));
                list.truncate(count);
                (list.len() == count).then_some(list)
            })
            .unwrap_or_default(),
    };
    chosen.into_iter().map(|gpu| (gpu, charge, charge)).collect()
}

/// The first node with enough memory on its active GPUs with SM room together; the fullest GPU first. The request is charged as
/// the limit, but the release gives the limit back.
fn paper_split(
    gpus: &[PaperGpu],
    active: &[usize],
    charge: PaperGpu,
    gamma: f64,
) -> Option<Vec<(usize, PaperGpu, PaperGpu)>> {
    for (_, mut list) in by_node(active, |gpu| gpus[gpu].holds(charge.request, charge.limit, 0.0, gamma)) {
        let free: f64 = list.iter().map(|gpu| MEMORY_GB - gpus[*gpu].memory).sum();
        if free < charge.memory {
            continue;
        }
        list.sort_by(|a, b| gpus[*b].memory.total_cmp(&gpus[*a].memory));
        let mut left = charge.memory;
        let mut parts = Vec::new();
        for gpu in list {
            if left <= 0.0 {
                break;
            }
            let memory = left.min(MEMORY_GB - gpus[gpu].memory);
            left -= memory;
            let subtract = PaperGpu { memory, ..charge };
            parts.push((gpu, PaperGpu { limit: charge.request, ..subtract }, subtract));
        }
        return Some(parts);
    }
    None
}

/// A packer on the same events. Parts of a job are on one node where `nodes` is given; `repack` moves placements when a GPU beyond
/// all before is opened, and says how many.
fn packed<P: Packer + ?Sized>(
    events: &[Event],
    pool: &mut P,
    mut nodes: Option<Nodes>,
    mut repack: impl FnMut(&mut P) -> Result<usize>,
) -> Result<Outcome> {
    for gpu in 0..u32::try_from(NODES * GPUS_PER_NODE)? {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(40)))?;
    }
    let mut places: BTreeMap<&str, Vec<PlacementId>> = BTreeMap::new();
    let mut outcome = Outcome::default();
    let mut out = Vec::new();
    for event in events {
        let job = &event.job;
        if event.start {
            let demand = demand(job)?;
            out.clear();
            let start = Instant::now();
            match (&mut nodes, job.kind) {
                (Some(nodes), _) => nodes.place(pool, &demand, job.gpus, &mut out)?,
                (None, Workload::Training) => pool.place_gang(&vec![demand; job.gpus], &mut out)?,
                (None, Workload::LargeModel) => pool.place_split(&demand, &|_| true, &mut out)?,
                (None, _) => out.push(pool.place(&demand)?),
            }
            outcome.spent += start.elapsed();
            places.insert(&job.name, out.iter().map(|placed| placed.placement.id).collect());
            if open(pool) > outcome.peak {
                let start = Instant::now();
                outcome.moves += repack(pool)?;
                outcome.spent += start.elapsed();
            }
        } else {
            let ids = places.remove(job.name.as_str()).unwrap_or_default();
            let start = Instant::now();
            for id in ids {
                let released = pool.release(id)?;
                if let Some(nodes) = &mut nodes {
                    nodes.change(&released, false);
                }
            }
            outcome.spent += start.elapsed();
        }
        outcome.observe(event.second, open(pool), || {
            let mut used = BTreeMap::<GpuId, PaperGpu>::new();
            pool.placements(&mut |placement| {
                let used = used.entry(placement.gpu).or_default();
                used.request += placement.demand.sm.as_fraction();
                used.memory += gib(placement.demand.memory);
            });
            mean_free(used.values())
        });
    }
    Ok(outcome)
}

/// The GPUs with a placement.
fn open<P: Packer + ?Sized>(pool: &P) -> usize {
    let mut open = 0;
    pool.gpus(&mut |gpu| open += usize::from(gpu.placements > 0));
    open
}

/// [`DiluPacker`] on the same events.
fn ours(events: &[Event], config: DiluConfig, rule: Rule) -> Result<Outcome> {
    let nodes = (rule == Rule::SameNode).then(|| Nodes::new(config));
    packed(events, &mut DiluPacker::new(config)?, nodes, |pool| {
        let plan = if rule == Rule::Repacking { pool.plan_repack(64) } else { return Ok(0) };
        pool.apply(&plan)?;
        Ok(plan.moves())
    })
}

/// The used part of each GPU, by node.
struct Nodes {
    most: Used,
    gpus: Vec<Used>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Used {
    request: u32,
    limit: u32,
    memory: u64,
    placements: u32,
}

impl Nodes {
    fn new(config: DiluConfig) -> Self {
        let memory = Bytes::from_gib(40).get();
        let most = Used { request: config.omega_bp.into(), limit: config.gamma_bp, memory, placements: 0 };
        Self { most, gpus: vec![Used::default(); NODES * GPUS_PER_NODE] }
    }

    fn change(&mut self, placement: &Placement, placed: bool) {
        let Some(used) = self.gpus.get_mut(placement.gpu.index()) else { return };
        let Demand { sm, memory, .. } = placement.demand;
        let (request, limit) = (u32::from(sm.get()), u32::from(placement.demand.limit().get()));
        if placed {
            used.request += request;
            used.limit += limit;
            used.memory += memory.get();
            used.placements += 1;
        } else {
            used.request -= request;
            used.limit -= limit;
            used.memory -= memory.get();
            used.placements -= 1;
        }
    }

    /// Whether an open GPU has room.
    fn holds(&self, used: &Used, request: u32, limit: u32, memory: u64) -> bool {
        used.placements > 0
            && used.request + request <= self.most.request
            && used.limit + limit <= self.most.limit
            && used.memory + memory <= self.most.memory
    }

    /// A job's workers go to different GPUs of one node: a node where open GPUs suffice, else the node where the fewest are opened.
    /// A large model that fits no open GPU goes to the GPUs of the first node that hold it together.
    fn place<P: Packer + ?Sized>(
        &mut self,
        pool: &mut P,
        demand: &Demand,
        workers: usize,
        out: &mut Vec<Placed>,
    ) -> Result<()> {
        let node = |gpu: GpuId| gpu.index() / GPUS_PER_NODE;
        let (request, limit, memory) =
            (u32::from(demand.sm.get()), u32::from(demand.limit().get()), demand.memory.get());
        match demand.workload {
            Workload::Training => {
                let open = |gpus: &[Used]| {
                    let open = gpus.iter().filter(|used| self.holds(used, request, limit, memory)).count();
                    let all = open + gpus.iter().filter(|used| used.placements == 0).count();
                    if all < workers { None } else { Some(open.min(workers)) }
                };
                let open: Vec<Option<usize>> = self.gpus.chunks(GPUS_PER_NODE).map(open).collect();
                let most = open.iter().copied().max().flatten();
                let first = open.iter().position(|open| *open == most).filter(|_| most.is_some());
                let first = first.context("no node has that many GPUs")?;
                let fits =
                    |other: usize| if most == Some(workers) { open[other] == most } else { other == first };
                let allowed = |taken: &[Placed], gpu: GpuId| match taken.first() {
                    None => fits(node(gpu)),
                    Some(first) => {
                        node(gpu) == node(first.placement.gpu)
                            && taken.iter().all(|placed| placed.placement.gpu != gpu)
                    }
                };
                pool.place_set(&vec![*demand; workers], &allowed, out)?;
            }
            Workload::LargeModel => {
                let single = self.gpus.iter().any(|used| self.holds(used, request, limit, memory));
                let together = |gpus: &[Used]| {
                    let parts = gpus.iter().filter(|used| self.holds(used, request, request, 0));
                    parts.map(|used| self.most.memory - used.memory).sum::<u64>() >= memory
                };
                match self.gpus.chunks(GPUS_PER_NODE).position(together).filter(|_| !single) {
                    Some(split) => pool.place_split(demand, &|gpu| node(gpu) == split, out)?,
                    None => out.push(pool.place(demand)?),
                }
            }
            _ => out.push(pool.place(demand)?),
        }
        for placed in out.iter() {
            self.change(&placed.placement, true);
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn gib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / (1u64 << 30) as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "shares and gigabytes are small")]
fn demand(job: &Job) -> Result<Demand> {
    let share = |part: f64| SmShare::new((part.min(1.0) * 10_000.0).round() as u16).context("a share");
    Ok(Demand::new(Quota::WHOLE, share(job.request)?)
        .with_sm_limit(share(job.limit.max(job.request))?)
        .with_memory(Bytes::from_gib(job.memory_gb.round() as u64))
        .with_workload(job.kind))
}

/// GPUs that the requests and the memory of the jobs alone need at the worst moment.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a report"
)]
fn bound(events: &[Event]) -> usize {
    let (mut request, mut memory, mut worst) = (0.0f64, 0.0f64, 0.0f64);
    for event in events {
        let sign = if event.start { 1.0 } else { -1.0 };
        request += sign * event.job.request * event.job.gpus as f64;
        memory += sign * event.job.memory_gb * event.job.gpus as f64;
        worst = worst.max(request).max(memory / MEMORY_GB);
    }
    (worst - 1e-6).ceil() as usize
}

fn read(path: &Path) -> Result<Vec<Event>> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let mut events = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        events.push(parse(line).with_context(|| format!("{}:{}", path.display(), number + 1))?);
    }
    Ok(events)
}

fn parse(line: &str) -> Result<Event> {
    // One dict literal; no value holds a quote, a comma (but the list) or a brace.
    let value = |key: &str| -> Result<&str> {
        let (_, rest) = line.split_once(&format!("'{key}': ")).with_context(|| format!("no {key}"))?;
        let end = match rest.as_bytes().first() {
            Some(b'\'') => rest[1..].find('\'').map(|end| end + 1),
            Some(b'[') => rest.find(']'),
            _ => rest.find([',', '}']),
        };
        Ok(rest[..end.with_context(|| format!("{key} does not end"))?].trim_matches(['\'', '[']))
    };
    let number = |key: &str| -> Result<f64> { Ok(value(key)?.parse()?) };
    let kind = match value("type")? {
        "inference" => Workload::Inference,
        "llm-inference" => Workload::LargeModel,
        "training" => Workload::Training,
        other => bail!("unknown type {other}"),
    };
    let memory = value("memory")?.split(',').next().context("memory of the first GPU")?.trim().parse()?;
    let start = match value("Action")? {
        "start" => true,
        "delete" => false,
        other => bail!("unknown action {other}"),
    };
    let job = Job {
        name: value("service_name")?.to_owned(),
        kind,
        gpus: value("gpu_num")?.parse()?,
        request: number("sm_requests")?,
        limit: number("sm_limits")?,
        memory_gb: memory,
    };
    Ok(Event { second: seconds(value("Time")?)?, start, job })
}

/// Seconds of `YYYY-MM-DD HH:MM:SS` since some midnight; only differences are used.
fn seconds(text: &str) -> Result<i64> {
    let numbers: Vec<i64> = text.split(['-', ' ', ':']).map(str::parse).collect::<Result<_, _>>()?;
    let [year, month, day, hour, minute, second] = numbers[..] else { bail!("not a time: {text}") };
    // Days of the civil calendar, with the year beginning in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day;
    Ok(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// The published distributions: 60 % inference, 20 % large models, 20 % training; one start a second, shuffled; 60 % of
/// the count, drawn among inference and large models, deleted after 1 to 3 minutes, 10 %, drawn among training, after 10 to 15.
fn draw(seed: u64, count: usize) -> Vec<Event> {
    let mut rng = SplitMix64::new(seed);
    let between = |rng: &mut SplitMix64, low: f64, high: f64| {
        // Two decimals, as the published files have.
        ((low + (high - low) * rng.unit()) * 100.0).round() / 100.0
    };
    let mut jobs: Vec<Job> = (0..count)
        .map(|index| {
            let name = format!("job-{index}");
            match index * 5 / count.max(1) {
                0..=2 => {
                    let request = between(&mut rng, 0.2, 0.4);
                    let limit = (request + 0.2f64).max(between(&mut rng, 0.3, 0.6));
                    let memory_gb = [3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0][rng.below(8)];
                    Job { name, kind: Workload::Inference, gpus: 1, request, limit, memory_gb }
                }
                3 => {
                    let request = between(&mut rng, 0.4, 0.6);
                    let limit = between(&mut rng, request + 0.2, 0.8);
                    let memory_gb = between(&mut rng, 20.0, 30.0).floor();
                    Job { name, kind: Workload::LargeModel, gpus: 1, request, limit, memory_gb }
                }
                _ => {
                    let request = between(&mut rng, 0.4, 0.8);
                    let limit = (request + 0.2f64).max(between(&mut rng, 0.6, 1.0));
                    let memory_gb = [25.0, 30.0, 35.0, 40.0][rng.below(4)];
                    Job {
                        name,
                        kind: Workload::Training,
                        gpus: [2, 4][rng.below(2)],
                        request,
                        limit,
                        memory_gb,
                    }
                }
            }
        })
        .collect();
    for index in (1..jobs.len()).rev() {
        jobs.swap(index, rng.below(index + 1));
    }
    let mut deleted = vec![false; jobs.len()];
    for (training, deletes) in [(false, count * 6 / 10), (true, count / 10)] {
        let of_kind = |index: &usize| (jobs[*index].kind == Workload::Training) == training;
        let mut indices: Vec<usize> = (0..jobs.len()).filter(of_kind).collect();
        for index in (1..indices.len()).rev() {
            indices.swap(index, rng.below(index + 1));
        }
        indices.iter().take(deletes).for_each(|index| deleted[*index] = true);
    }
    let mut events = Vec::new();
    for (index, job) in jobs.into_iter().enumerate() {
        let second = i64::try_from(index).unwrap_or(i64::MAX);
        if deleted[index] {
            // Whole minutes: 1 to 3, a trainer's 10 to 15.
            let (low, choices) = if job.kind == Workload::Training { (10, 6) } else { (1, 3) };
            let after = 60 * (low + i64::try_from(rng.below(choices)).unwrap_or(0));
            events.push(Event { second: second + after, start: false, job: job.clone() });
        }
        events.push(Event { second, start: true, job });
    }
    events.sort_by_key(|event| event.second);
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use gshare_sched::pack::{MaxRects, MaxRectsConfig};

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn rows(flags: &str) -> Vec<Map<String, Value>> {
        rows_with(flags, &Own::default())
    }

    fn rows_with(flags: &str, own: &Own) -> Vec<Map<String, Value>> {
        let flags = format!("dilu-fig20 --count 100 --tie-orders 2 {flags}");
        run(&Cli::parse_from(flags.split_whitespace()).args, own).unwrap().rows
    }

    #[test]
    fn a_packer_of_a_programs_own_has_a_row_of_its_own() {
        let best_fit = DiluConfig::default().with_large_models_worst_fit(false);
        let own = Own::default()
            .with_packer("mine", move || Box::new(DiluPacker::new(best_fit).unwrap()))
            .with_packer("rectangles", || Box::new(MaxRects::new(MaxRectsConfig::default())));
        let rows = rows_with("--mode ours", &own);
        let of = |policy: &str| {
            let mut row = rows.iter().find(|row| row["policy"] == policy).unwrap().clone();
            row.retain(|key, _| key != "policy" && key != "placing_ms");
            row
        };
        assert_eq!(of("mine"), of("ours"));
        assert_ne!(of("rectangles"), of("ours"));
    }

    #[test]
    fn several_gammas_give_what_each_gives_alone() {
        let peaks = |rows: &[Map<String, Value>], gamma: Option<u32>| -> Vec<_> {
            let of = rows.iter().filter(|row| row.get("gamma_bp") == gamma.map(Value::from).as_ref());
            of.map(|row| (row["policy"].clone(), row["peak_gpus"].clone())).collect()
        };
        let both = rows("--gamma 10000,15000");
        for gamma in [10_000, 15_000] {
            let alone = peaks(&rows(&format!("--gamma {gamma}")), None);
            let with_gamma = peaks(&both, Some(gamma));
            assert_eq!(with_gamma.len(), 4, "paper_dilu and three of ours");
            assert!(with_gamma.iter().all(|one| alone.contains(one)), "{with_gamma:?} {alone:?}");
        }
    }

    #[test]
    fn gpus_over_time_reach_the_peak() {
        let rows = rows("--mode ours --series");
        let of = |key: &str| {
            let ours = rows.iter().filter(|row| row["policy"] == "ours");
            ours.filter_map(|row| row.get(key).and_then(Value::as_u64)).collect::<Vec<_>>()
        };
        assert_eq!(of("gpus").into_iter().max(), of("peak_gpus").first().copied());
        assert!(of("second").windows(2).all(|pair| pair[0] < pair[1]) && of("second")[0] == 0);
    }
}
