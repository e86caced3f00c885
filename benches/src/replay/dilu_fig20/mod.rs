//! Dilu, figure 20: thousands of instances placed on 40 GB GPUs; how many GPUs are in use at the peak.
//!
//! Input: an event file (one dict literal per line: `Time`, `Action` start or delete, `Instance` with `service_name`,
//! `type`, `gpu_num`, `sm_requests`, `sm_limits`, `memory` in GB per GPU), or events drawn from the published
//! distributions.
//!
//! Mode `paper` follows the rules of the published simulation, its floating-point sums, its loosened limits of split models and its
//! nodes of four GPUs included. The published simulation leaves ties to the order of a hashed set. Here the lowest number is taken. Mode `ours` is [`DiluPacker`]: integer sums,
//! gamma exact, any node. `ours_same_node` keeps the published rule of one node for the workers of a job and the parts of a model,
//! so it is on equal terms with `paper_dilu`.
//! Large models are placed by the replay's own rules around each packer: by its choice or the worst fit, or split.
//! `placing_ms` is for all placements and releases of the stream together. A packer of the program's own (see [`super::main`])
//! takes the place of `ours`, under its name.

mod instance_events;
mod published_rules;

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, PackError, Packer, Placed, Placement, Workload};
use gshare_sched::place::{DiluConfig, DiluPacker};
use gshare_sim::scenario::Own;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Report, joined, row};
use instance_events::{Event, Job, Kind, draw, read};
use published_rules::{PaperGpu, Rules, mean_free, paper};

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
    /// Most limits on a GPU, in basis points of its SMs; with several, Dilu's and ours run under each
    #[arg(long, value_delimiter = ',', default_value = "15000", value_name = "BASIS_POINTS")]
    gamma: Vec<u32>,
    /// Also print the GPUs in use in each second in which something starts or ends
    #[arg(long)]
    series: bool,
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
    /// A large model goes to the open GPU with the most free memory, as published.
    WorstFit,
    /// As the published simulation does: all on one node.
    SameNode,
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
    let scenario: Scenario = toml::from_str(include_str!("../../../scenarios/dilu/fig20.toml"))?;
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
        let mut push = |policy: &str, gamma: Option<&u32>, outcome: &Outcome| {
            let mut about = row(&[("policy", policy.into())]);
            about.extend(seed.map(|seed| ("seed".to_owned(), seed.into())));
            let gamma = gamma.filter(|_| args.gamma.len() > 1);
            about.extend(gamma.map(|gamma| ("gamma_bp".to_owned(), (*gamma).into())));
            let mut line = outcome.row(starts);
            line.extend(about.clone());
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
                    let outcome = paper(events, rules, f64::from(*gamma) / 1e4)?;
                    let gamma = Some(gamma).filter(|_| rules == Rules::Dilu);
                    push(rules.name(), gamma, &outcome);
                }
            }
        }
        if args.mode != Mode::Paper {
            for (name, rule) in [
                ("ours_worst_fit", Rule::WorstFit),
                ("ours", Rule::AnyNode),
                ("ours_same_node", Rule::SameNode),
            ] {
                for gamma in &args.gamma {
                    let mut packer = DiluPacker::new(DiluConfig::default().with_gamma_bp(*gamma))?;
                    push(name, Some(gamma), &packed(events, &mut packer, rule, *gamma)?);
                }
            }
        }
        for (name, make) in own.packers() {
            push(name, None, &packed(events, &mut *make(), Rule::AnyNode, args.gamma[0])?);
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
            ("placing_ms", (self.spent.as_secs_f64() * 1e3).into()),
        ])
    }
}

/// A packer on the same events.
fn packed<P: Packer + ?Sized>(events: &[Event], pool: &mut P, rule: Rule, gamma: u32) -> Result<Outcome> {
    let mut nodes = (rule == Rule::SameNode).then(|| Nodes::new(gamma));
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
                (Some(nodes), kind) => nodes.place(pool, &demand, kind, job.gpus, &mut out)?,
                (None, Kind::Training) => pool.place_gang(&vec![demand; job.gpus], &mut out)?,
                (None, Kind::LargeModel) => place_large(pool, &demand, rule, &|_| true, &mut out)?,
                (None, _) => out.push(pool.place(&demand)?),
            }
            outcome.spent += start.elapsed();
            places.insert(&job.name, out.iter().map(|placed| placed.placement.id).collect());
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

/// Places a large model on an open GPU. If none has its memory, it is split over open GPUs with room for its request, those with the most
/// free memory first, and its request is charged on each, as its limit too (Dilu, section 3.3, and the published scheduler). With no way to
/// split it, it gets a new GPU.
fn place_large<P: Packer + ?Sized>(
    pool: &mut P,
    demand: &Demand,
    rule: Rule,
    allowed: &dyn Fn(GpuId) -> bool,
    out: &mut Vec<Placed>,
) -> Result<(), PackError> {
    let (mut is_open, mut by_memory) = (vec![false; NODES * GPUS_PER_NODE], Vec::new());
    pool.gpus(&mut |of| {
        is_open[of.gpu.index()] = of.placements > 0 && allowed(of.gpu);
        let area = u64::from(demand.quota.get()) * u64::from(demand.sm.get());
        let room = u64::from(of.spec.quota.get()) * u64::from(of.spec.sm.get()) - of.area_used;
        if is_open[of.gpu.index()] && area <= room {
            by_memory.push((Reverse(of.spec.memory.get() - of.memory_used.get()), of.gpu));
        }
    });
    by_memory.sort_unstable();
    let fits = by_memory.iter().filter(|(Reverse(free), _)| *free >= demand.memory.get());
    let single = match rule {
        Rule::WorstFit => {
            fits.map(|(_, one)| pool.place_where(demand, &|gpu| gpu == *one)).find(Result::is_ok)
        }
        _ => Some(pool.place_where(demand, &|gpu| is_open[gpu.index()])).filter(Result::is_ok),
    };
    if let Some(placed) = single {
        out.push(placed?);
        return Ok(());
    }
    let (mut left, from) = (demand.memory.get(), out.len());
    for (Reverse(free), one) in by_memory {
        let mut part = demand.with_memory(Bytes(free.min(left)));
        part.sm_limit = None;
        if part.memory.get() > 0
            && let Ok(placed) = pool.place_where(&part, &|gpu| gpu == one)
        {
            left -= part.memory.get();
            out.push(placed);
        }
    }
    if left > 0 {
        for part in out.drain(from..) {
            pool.release(part.placement.id)?;
        }
        out.push(pool.place_where(demand, allowed)?);
    }
    Ok(())
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
    fn new(gamma: u32) -> Self {
        let memory = Bytes::from_gib(40).get();
        let most = Used { request: 10_000, limit: gamma, memory, placements: 0 };
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
        kind: Kind,
        workers: usize,
        out: &mut Vec<Placed>,
    ) -> Result<()> {
        let node = |gpu: GpuId| gpu.index() / GPUS_PER_NODE;
        let (request, limit, memory) =
            (u32::from(demand.sm.get()), u32::from(demand.limit().get()), demand.memory.get());
        match kind {
            Kind::Training => {
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
            Kind::LargeModel => {
                let single = self.gpus.iter().any(|used| self.holds(used, request, limit, memory));
                let together = |gpus: &[Used]| {
                    let parts = gpus.iter().filter(|used| self.holds(used, request, request, 0));
                    parts.map(|used| self.most.memory - used.memory).sum::<u64>() >= memory
                };
                match self.gpus.chunks(GPUS_PER_NODE).position(together).filter(|_| !single) {
                    Some(split) => place_large(pool, demand, Rule::SameNode, &|gpu| node(gpu) == split, out)?,
                    None => out.push(pool.place(demand)?),
                }
            }
            Kind::Inference => out.push(pool.place(demand)?),
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
        .with_workload(if job.kind == Kind::Training { Workload::Training } else { Workload::Inference }))
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
        let flags = format!("dilu-fig20 --count 100 {flags}");
        run(&Cli::parse_from(flags.split_whitespace()).args, own).unwrap().rows
    }

    #[test]
    fn a_packer_of_a_programs_own_has_a_row_of_its_own() {
        let own = Own::default()
            .with_packer("mine", || Box::new(DiluPacker::new(DiluConfig::default()).unwrap()))
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
    fn a_large_model_is_split_only_where_no_gpu_has_the_memory() {
        let percent = |percent| SmShare::from_percent(percent).unwrap();
        let job = |sm, gib| Demand::new(Quota::WHOLE, percent(sm)).with_memory(Bytes::from_gib(gib));
        for rule in [Rule::AnyNode, Rule::WorstFit] {
            let mut pool = DiluPacker::new(DiluConfig::default()).unwrap();
            (0..2).for_each(|gpu| pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(40))).unwrap());
            let mut place = |demand: Demand| {
                let mut out = Vec::new();
                place_large(&mut pool, &demand, rule, &|_| true, &mut out)?;
                let part = |placed: &Placed| {
                    (placed.placement.gpu.number(), placed.placement.demand.memory.get() >> 30)
                };
                Ok::<_, PackError>(out.iter().map(part).collect::<Vec<_>>())
            };
            assert_eq!(place(job(30, 25)).unwrap(), [(0, 25)]);
            assert_eq!(place(job(70, 30).with_sm_limit(percent(70))).unwrap(), [(1, 30)]);
            assert_eq!(
                place(job(20, 22)).unwrap(),
                [(0, 15), (1, 7)],
                "most free memory first, the rest on the next"
            );
            assert!(place(job(40, 20)).is_err(), "no new GPU is left");
        }
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
