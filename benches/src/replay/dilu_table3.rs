//! Dilu, table 3: cold starts, SLO violations and GPU time of an inference function under bursty, periodic or sporadic load.
//!
//! The module simulates the platform's pool of shared devices ([`gshare_sched::platform::FractionalPool`]) in virtual time
//! ([`gshare_sim::world`]). Requests come as the published sender sends them: in each second the trace's rate times `scale`,
//! rounded down, evenly spaced. Instances of `RoBERTa`-large, each on a device of its own, serve up to four requests at once; other
//! requests wait in one queue. Execution times are the published times at the request (30 % of the SMs) and at the limit (60 %), by
//! the number of requests in the instance. A cold start takes 21.68 s. The scalers of the other policies rate an instance at 48
//! requests/s, the published threshold: less than half of its throughput, so that batches need not be full. With the ratio of load
//! to threshold at `scale` 20, the published scaler gives the paper's counts of cold starts.
//!
//! GPU time is SM share times seconds. The time of starting instances counts, and so does an instance's use beyond its request. A
//! request is a violation if it took longer than the SLO, or if it is one of the few still waiting half a second after the load.
//!
//! | policy | starts | takes away | runs at |
//! |---|---|---|---|
//! | `eager` | as many as the last second's load needs | as soon as they are not needed | its request |
//! | `keep_alive` | the same | once not needed for 60 s | its request |
//! | `paper` | by the lazy scaler | by the lazy scaler | its limit while it has four |
//! | `ours` | by the peak scaler: as `paper` does, but only what peaks need when all run at their limits (151 requests/s) | as `paper` | its limit while it has four |
//!
//! On equal terms: each of them with the queue order of `ours`, and each with its rating too:
//!
//! | suffix | means |
//! |---|---|
//! | `_in_order` (of `ours`) | the published order, that of arrival |
//! | `_late` | the order of `ours` |
//! | `_late_rated` | that, and an instance is taken for what `ours` takes it for at a peak: 93 % of what it does as it runs, so 109 requests/s at its request and 140 at its limit, and not for the published 48 |
//!
//! A scaler of the program's own (see [`super::main`]) replaces the scaler of `paper_late_rated`. It is told an instance's
//! throughput at request and limit.
//!
//! `ours` with the published rating too is `paper_late`: it starts the same instances as the lazy scaler, unless an instance can do
//! more.
//!
//! Instances have their limits while requests queue, because the co-scaler takes SMs from best-effort neighbours. The first three
//! requests of a burst still run at the request.
//!
//! `ours` serves as the router does by default ([`Late::Last`]): a request with no chance to meet the SLO waits behind all
//! requests that can. The other policies serve in the order of arrival, as published. Most of their late requests in a burst are
//! then not late for want of an instance. A burst of 170 requests/s before an instance that does 151 makes a queue in which all
//! requests wait for more than the SLO, long after the burst too. With the late requests served last, 151 are in time and 19
//! late. The remaining late requests of `ours` are nearly only the excess of bursts over the ready instances' throughput, before
//! another instance is ready. `fluid_percent` gives the size of this excess: the late part of the load if requests were a fluid,
//! served by the same ready instances, all of them at their limits (where the policy has limits) at all times. No order of
//! serving has less.
//!
//! The report ends with `ours` beside each of the other policies, trace by trace and seed by seed: difference, standard error and
//! verdict for starts, late requests and GPU time.

use super::paired::{Compared, Run};
use super::{Report, in_parallel, joined, mean, row};
use crate::peaks::{PEAK_SHARE, PeakHorizontal};
use crate::seeds::cpus;
use anyhow::{Context, Result, anyhow, ensure};
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{BasisPoints, Bytes, Duration, NodeId, Quota, SmShare, Timestamp};
use gshare_sched::pack::{MaxRects, MaxRectsConfig};
use gshare_sched::pipeline::Late;
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, Platform, PlatformConfig,
    Work,
};
use gshare_sched::scale::{
    HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, LazyHorizontal, LazyHorizontalConfig,
    Told,
};
use gshare_sim::arrivals::Arrivals;
use gshare_sim::load_trace::read_rates;
use gshare_sim::scenario::Own;
use gshare_sim::world::{self, Change, Function, Limits, Plan};
use gshare_sim::{Make, Rng};
use serde_json::{Map, Value};
use std::collections::VecDeque;
use std::path::PathBuf;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A trace: one rate per line and second; more than one may be given. Without any, three are generated
    #[arg(long)]
    trace: Vec<PathBuf>,
    /// Requests per second for a rate of 1
    #[arg(long, default_value_t = 20.0)]
    scale: f64,
    /// Time an instance takes to become ready
    #[arg(long, default_value = "21680ms")]
    cold_start: Duration,
    /// Latency that counts as a violation
    #[arg(long, default_value = "100ms")]
    slo: Duration,
    /// Seeds of the generated traces
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5,6,7,8,9,10")]
    seeds: Vec<u64>,
    /// Also print load and instances of every second
    #[arg(long)]
    series: bool,
}

/// Batch, and its execution time in us at the request and at the limit.
const TIMES: [(u32, u64, u64); 3] = [(1, 20_700, 20_600), (2, 22_500, 21_300), (4, 34_200, 26_500)];
const REQUEST_PERCENT: u16 = 30;
const LIMIT_PERCENT: u16 = 60;
/// The published rating of an instance, in requests per second.
const THRESHOLD: f64 = 48.0;

/// The scaler that starts instances.
#[derive(Clone, Copy)]
enum Starts<'a> {
    Eager,
    KeepAlive,
    Lazily,
    ForPeaks,
    Own(&'a Make<dyn HorizontalScaler>),
}

/// A row: its name, the scaler that starts instances, the order of serving, and whether an instance is rated as `ours` rates it at
/// a peak.
type Policy<'a> = (&'a str, Starts<'a>, Late, bool);

/// `ours` is the last.
const POLICIES: [Policy<'_>; 11] = [
    ("eager", Starts::Eager, Late::InOrder, false),
    ("eager_late", Starts::Eager, Late::Last, false),
    ("eager_late_rated", Starts::Eager, Late::Last, true),
    ("keep_alive", Starts::KeepAlive, Late::InOrder, false),
    ("keep_alive_late", Starts::KeepAlive, Late::Last, false),
    ("keep_alive_late_rated", Starts::KeepAlive, Late::Last, true),
    ("paper", Starts::Lazily, Late::InOrder, false),
    ("paper_late", Starts::Lazily, Late::Last, false),
    ("paper_late_rated", Starts::Lazily, Late::Last, true),
    ("ours_in_order", Starts::ForPeaks, Late::InOrder, false),
    ("ours", Starts::ForPeaks, Late::Last, false),
];
/// The figures that are compared; less is better.
const FIGURES: [(&str, bool); 3] =
    [("cold_starts", true), ("violations_percent", true), ("gpu_seconds", true)];
/// How long `keep_alive` keeps instances without need, in reports.
const KEEP_ALIVE: usize = 60;

/// Requests per second that an instance does with full batches.
fn does(at_limit: bool) -> f64 {
    let (batch, request, limit) = TIMES[TIMES.len() - 1];
    f64::from(batch) * 1e6 / if at_limit { limit } else { request } as f64
}

/// Rounded down, at least 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
const fn whole(number: f64) -> u64 {
    number as u64
}

/// A scaler that rates an instance apart from its throughput, and remembers load for a while. It is told the highest of the last
/// `counted` reports, multiplied by `factor`.
fn told(scaler: Box<dyn HorizontalScaler>, factor: f64, counted: usize) -> Box<dyn HorizontalScaler> {
    let mut last = VecDeque::new();
    Box::new(Told::new(scaler, move |_, load| {
        last.push_back(load);
        if last.len() > counted {
            last.pop_front();
        }
        let highest = last.iter().max().map_or(0, |rate: &RequestRate| rate.as_milli());
        RequestRate::from_milli(whole((highest as f64 * factor).round()))
    }))
}

impl Starts<'_> {
    /// Whether its instances have limits above their requests.
    const fn vertical(self) -> bool {
        !matches!(self, Self::Eager | Self::KeepAlive)
    }

    fn scaler(self, rated: bool) -> Result<Box<dyn HorizontalScaler>> {
        let share = PEAK_SHARE.as_fraction();
        let taken_for = if rated { share * does(self.vertical()) } else { THRESHOLD };
        let told = |scaler, counted| told(scaler, does(false) / taken_for, counted);
        let eager = || -> Result<Box<dyn HorizontalScaler>> {
            let none = BasisPoints::ZERO;
            let config = HeuristicHorizontalConfig::default().with_predict_reports(1).with_headroom(none);
            let config = config.with_late_share(none).with_dead_band(none).with_down_cooldown(Duration::ZERO);
            let config = config.with_early_reports(false);
            Ok(Box::new(HeuristicHorizontal::new(config)?))
        };
        Ok(match self {
            Starts::Eager => told(eager()?, 1),
            Starts::KeepAlive => told(eager()?, KEEP_ALIVE),
            Starts::Lazily => told(Box::new(LazyHorizontal::new(LazyHorizontalConfig::default())?), 1),
            Starts::ForPeaks => Box::new(PeakHorizontal::default()),
            Starts::Own(make) => make(),
        })
    }
}

#[derive(Debug, Default)]
struct Outcome {
    cold_starts: u64,
    requests: usize,
    violations: usize,
    gpu_seconds: f64,
    /// Requests that would be late if they were a fluid.
    late: f64,
    /// Load and instances of every second.
    series: Vec<(u64, usize)>,
}

/// Batches of at least so many requests, at the request and at the limit.
fn profile(least: u32) -> Result<ProfileTable> {
    let mut points = Vec::new();
    for (batch, request, limit) in TIMES.into_iter().filter(|(batch, ..)| *batch >= least) {
        for (percent, micros) in [(REQUEST_PERCENT, request), (LIMIT_PERCENT, limit)] {
            let exec = Duration::from_micros(micros);
            let sm = SmShare::from_percent(percent).context("share")?;
            let throughput = f64::from(batch) / exec.as_secs_f64();
            points.push(ProfilePoint::measured(sm, Quota::WHOLE, batch, throughput, exec, exec)?);
        }
    }
    Ok(ProfileTable::sparse(points)?)
}

fn platform((_, starts, late, rated): Policy<'_>) -> Result<Platform> {
    let packer = Box::new(MaxRects::new(MaxRectsConfig::default()));
    let policies = FractionalPolicies { scaler: starts.scaler(rated)?, packer };
    let config = FractionalConfig::default().with_sm_limit_factor(if starts.vertical() { 2 } else { 1 });
    let pool = FractionalPool::new(config, policies)?;
    let mut bounds = PlatformConfig::default();
    if late == Late::InOrder {
        bounds.late_wait = None;
    }
    Ok(Platform::new(bounds, vec![pool.into()])?)
}

/// One policy under requests of so many in each second.
fn simulate(policy: Policy<'_>, args: &Args, counts: &[u64]) -> Result<Outcome> {
    let second = |number: usize| Timestamp::from_millis(1_000 * number as u64);
    let spread = |(number, &count): (usize, &u64)| {
        (0..count).map(move |n| second(number) + Duration::from_nanos(1_000_000_000 * n / count))
    };
    let came: Vec<Timestamp> = counts.iter().enumerate().flat_map(spread).collect();
    // An instance has the memory of a device.
    let (memory, most) = (Bytes::from_gib(16), 64);
    let devices = vec![DeviceSpec::new(NodeId::new(0), memory); most as usize];
    // Scalers know full batches.
    let work = Work::Inference { profile: Some(profile(TIMES[TIMES.len() - 1].0)?) };
    let mut spec = FunctionSpec::new(work, memory)
        .with_time_limit(Quota::WHOLE)
        .with_instances(1, most)
        .with_slo(args.slo);
    // The first instance finds the weights on the disk and is there at once; then they are in the node's memory.
    (spec.load_disk, spec.load_host) = (Duration::ZERO, args.cold_start);
    let mut function = Function::new("roberta-large", spec).with_arrivals(Arrivals::times(came)?);
    (function.learned, function.limits) = (Some(profile(1)?), Limits::WhileFull);
    let length = Duration::from_millis(1_000 * counts.len() as u64 + 500);
    let mut plan = Plan::new(devices, vec![function], length);
    (plan.jitter, plan.record, plan.changes) = (0, true, vec![(length, 0, Change::Removed)]);
    let make = || platform(policy).map_err(|error| error.to_string());
    let outcome = world::run(&plan, 0, make).map_err(|failure| anyhow!("{failure}"))?;
    let (of, record) = (&outcome.functions[0], outcome.record.unwrap_or_default());
    let held: Vec<_> = record.held.values().flatten().copied().collect();
    let ready = |&(from, to): &(Timestamp, Timestamp)| {
        let cold = if from == Timestamp::ZERO { Duration::ZERO } else { args.cold_start };
        (from + cold, to)
    };
    let ready: Vec<_> = held.iter().map(ready).collect();
    let late = record.ends.iter().filter(|end| end.is_late(args.slo));
    let instances = |number: usize| record.holding(second(number + 1));
    Ok(Outcome {
        cold_starts: of.starts,
        requests: record.ends.len(),
        violations: late.count(),
        gpu_seconds: of.held.as_secs_f64() + of.beyond.as_secs_f64(),
        late: late_of_fluid(counts, &ready, does(policy.1.vertical()), args.slo),
        series: (0..).zip(counts).map(|(number, count)| (*count, instances(number))).collect(),
    })
}

/// Requests that would be late if they were a fluid, which instances that are `ready` serve at `each` requests per second. A
/// request is late if it waits for longer than the SLO.
fn late_of_fluid(counts: &[u64], ready: &[(Timestamp, Timestamp)], each: f64, slo: Duration) -> f64 {
    let seconds = (0..=counts.len() as u64).map(|second| Timestamp::from_millis(1_000 * second));
    let mut moments: Vec<_> = ready.iter().flat_map(|span| [span.0, span.1]).chain(seconds).collect();
    moments.sort_unstable();
    let (mut waiting, mut late) = (0.0, 0.0);
    for pair in moments.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let second = usize::try_from(from.as_nanos() / 1_000_000_000).unwrap_or(usize::MAX);
        let rate = counts.get(second).copied().unwrap_or(0) as f64;
        let serve = ready.iter().filter(|span| span.0 <= from && to <= span.1).count() as f64 * each;
        let left = (waiting + (rate - serve) * to.saturating_since(from).as_secs_f64()).max(0.0);
        waiting = left.min(serve * slo.as_secs_f64());
        late += left - waiting;
    }
    late
}

/// A made-up trace of ten minutes, with the shape its name says.
fn generated(shape: &str, seed: u64) -> Vec<f64> {
    let mut rng = Rng::new(seed);
    let mut unit = move || rng.below(1 << 30) as f64 / f64::from(1 << 30);
    let mut level = 3.0;
    let mut burst = 0;
    let at = |second: u32| match shape {
        // A walk, and now and then some seconds of twice as much.
        "bursty" => {
            level = (level + unit() - 0.5f64).clamp(1.0, 7.0);
            burst = if unit() < 0.02 { 3 + whole(unit() * 9.0) } else { burst - burst.min(1) };
            level * if burst > 0 { 2.0 } else { 1.0 }
        }
        "periodic" => 3.0 * (1.0 + (f64::from(second) * std::f64::consts::TAU / 150.0).sin()) + unit(),
        _ if unit() < 0.67 => 0.0,
        _ => unit() * 0.9,
    };
    (0..600).map(at).collect()
}

/// The figures of one run, or the means of several.
fn figures(outcomes: &[Outcome]) -> Map<String, Value> {
    let mean = |of: &dyn Fn(&Outcome) -> f64| mean(outcomes.iter().map(of));
    let percent = |part: f64, one: &Outcome| part / one.requests.max(1) as f64 * 100.0;
    row(&[
        ("cold_starts", mean(&|one| one.cold_starts as f64).into()),
        ("requests", mean(&|one| one.requests as f64).into()),
        ("violations_percent", mean(&|one| percent(one.violations as f64, one)).into()),
        ("fluid_percent", mean(&|one| percent(one.late, one)).into()),
        ("gpu_seconds", mean(&|one| one.gpu_seconds).into()),
    ])
}

/// Load and instances of every second.
fn series(about: &Map<String, Value>, outcome: &Outcome) -> Vec<Map<String, Value>> {
    let line = |(second, (load, instances)): (usize, &(u64, usize))| {
        let seconds = [
            ("second", second.into()),
            ("requests", (*load).into()),
            ("instances_held", (*instances).into()),
        ];
        joined(about, &row(&seconds))
    };
    outcome.series.iter().enumerate().map(line).collect()
}

/// Runs every policy on every trace.
///
/// # Errors
/// When a trace cannot be read: the line, and its fault.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    ensure!(args.scale.is_finite() && args.scale > 0.0, "--scale is {}: need more than 0", args.scale);
    let generates = args.trace.is_empty();
    let mut report = Report::new("dilu-table3", if generates { args.seeds.clone() } else { Vec::new() });
    let mut traces = Vec::new();
    for path in &args.trace {
        let file = || path.display().to_string();
        let open = std::fs::File::open(path).with_context(file)?;
        let rates = read_rates(std::io::BufReader::new(open)).with_context(file)?;
        ensure!(!rates.is_empty(), "{}: no rates", path.display());
        traces.push((path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), rates));
    }
    if generates {
        for shape in ["bursty", "periodic", "sporadic"] {
            let of = |seed: &u64| (shape.to_owned(), generated(shape, *seed));
            traces.extend(args.seeds.iter().map(of));
        }
    }
    let own = own.scalers().map(|(name, make)| (name, Starts::Own(make), Late::Last, true));
    let policies: Vec<Policy<'_>> = own.chain(POLICIES).collect();
    let outcomes = in_parallel(cpus(), policies.len() * traces.len(), |job| {
        let (policy, (_, rates)) = (policies[job / traces.len()], &traces[job % traces.len()]);
        let counts: Vec<u64> = rates.iter().map(|rate| whole(rate * args.scale)).collect();
        simulate(policy, args, &counts)
    })?;
    let kinds: Vec<&str> = traces.iter().map(|(name, _)| name.as_str()).collect();
    let (ours, mut runs) = (policies.len() - 1, Vec::new());
    for kind in kinds.chunk_by(|one, other| one == other) {
        let from = traces.iter().position(|(name, _)| name == kind[0]).unwrap_or(0);
        let mut of_kind = Vec::new();
        for ((name, ..), outcomes) in policies.iter().zip(outcomes.chunks(traces.len())) {
            let outcomes = &outcomes[from..from + kind.len()];
            let about = row(&[("policy", (*name).into()), ("trace", kind[0].into())]);
            let together = figures(outcomes);
            report.rows.push(joined(&about, &together));
            if args.series {
                report.rows.extend(outcomes.iter().flat_map(|outcome| series(&about, outcome)));
            }
            let by_seed = outcomes.chunks(1).map(figures).collect();
            of_kind.push(Run { together, by_seed });
        }
        runs.push((kind[0], of_kind));
    }
    for (other, (name, ..)) in policies[..ours].iter().enumerate() {
        let mut compared = Compared::new(*name, &FIGURES);
        for (trace, of_kind) in &runs {
            compared.push(row(&[("trace", (*trace).into())]), &of_kind[other], &of_kind[ours]);
        }
        report.compared.push(compared);
    }
    for (trace, policy, cold_starts, hundredths) in [
        ("bursty", "fast-gs+", 40, 1079),
        ("bursty", "infless+", 27, 628),
        ("bursty", "dilu", 7, 179),
        ("periodic", "fast-gs+", 41, 1925),
        ("periodic", "infless+", 27, 1109),
        ("periodic", "dilu", 11, 985),
        ("sporadic", "fast-gs+", 4, 757),
        ("sporadic", "infless+", 11, 517),
        ("sporadic", "dilu", 1, 233),
    ] {
        report.paper.push(row(&[
            ("policy", policy.into()),
            ("trace", trace.into()),
            ("cold_starts", cold_starts.into()),
            ("violations_percent", (f64::from(hundredths) / 100.0).into()),
        ]));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A burst of five seconds needs three instances at 48 requests/s: one policy keeps them for a minute, the other not.
    #[test]
    fn instances_are_kept_alive_for_a_minute_after_they_were_needed() {
        let args = Args {
            trace: Vec::new(),
            scale: 1.0,
            cold_start: Duration::from_secs(2),
            slo: Duration::from_millis(100),
            seeds: Vec::new(),
            series: false,
        };
        let counts: Vec<u64> = (0..90).map(|second| if second < 5 { 130 } else { 20 }).collect();
        let instances = |name: &str| {
            let policy = *POLICIES.iter().find(|(of, ..)| *of == name).unwrap();
            let series = simulate(policy, &args, &counts).unwrap().series;
            [4, 8, 60, 70].map(|second: usize| series[second].1)
        };
        assert_eq!(instances("eager"), [3, 1, 1, 1]);
        assert_eq!(instances("keep_alive"), [3, 3, 3, 1]);
    }

    #[test]
    fn of_a_fluid_is_late_what_waits_for_more_than_the_slo() {
        let at = Timestamp::from_millis;
        let late = |ready: &[_]| late_of_fluid(&[200, 0], ready, 150.0, Duration::from_millis(100));
        // 50 wait after a second, 15 of them for less than 100 ms.
        assert!((late(&[(at(0), at(2_000))]) - 35.0).abs() < 1e-9);
        assert!(late(&[(at(0), at(2_000)), (at(0), at(2_000))]).abs() < 1e-9);
        assert!((late(&[]) - 200.0).abs() < 1e-9);
    }
}
