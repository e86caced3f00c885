//! Dilu, table 3: cold starts, SLO violations and GPU time of an inference function whose load comes in bursts, periods or
//! now and then.
//!
//! A simulation in virtual time. Requests come as the published sender sends them: in each second the trace's rate times
//! `scale`, rounded down, evenly spaced. Instances of `RoBERTa`-large serve batches of up to four from queues of their own; a request
//! goes to the shortest queue of a ready instance, or waits until one is ready. Execution times are the published ones at the
//! request (30 % of the SMs) and at the limit (60 %), a cold start takes 21.68 s. The others' scalers take an instance for 48
//! requests/s, the published threshold: less than half of what it can do, so that batches need not be full. At `scale` 20 the ratio of load to
//! threshold is that at which the published scaler gives the paper's counts of cold starts.
//!
//! GPU time is SM share times seconds, of starting instances too; what an instance runs beyond its request counts. A request
//! that took longer than the SLO is a violation; none is refused.
//!
//! | policy | starts | takes away | runs at |
//! |---|---|---|---|
//! | `eager` | as many as the last second's load needs | as soon as they are not needed | its request |
//! | `keep_alive` | the same | once not needed for 60 s | its request |
//! | `paper` | by the lazy scaler | by the lazy scaler | its limit while requests queue |
//! | `ours` | by the peak scaler: as `paper` does, but only what peaks need when all run at their limits (151 requests/s) | as `paper` | its limit while requests queue |
//!
//! On equal terms: each of them with the queue order of `ours`, and each with its rating too:
//!
//! | suffix | means |
//! |---|---|
//! | `_in_order` (of `ours`) | the published order, that of arrival |
//! | `_late` | the order of `ours` |
//! | `_late_rated` | that, and an instance is taken for what `ours` takes it for at a peak: 93 % of what it does as it runs, so 109 requests/s at its request and 140 at its limit, and not for the published 48 |
//!
//! A scaler of the program's own (see [`super::main`]) is in the place of `paper_late_rated`'s, and is told the ratings at request and
//! limit.
//!
//! `ours` with the published rating too is `paper_late`: it starts what the lazy scaler starts, unless an instance can do more.
//!
//! The limit is there when requests queue because the co-scaler takes it from best-effort neighbours; the first batch of a
//! burst still runs at the request.
//!
//! `ours` serves as the router does by default ([`Late::Last`]): what cannot be answered within the SLO any more waits behind all that
//! can. The others serve in the order of arrival, as published, and then most of what is late in a burst is not late for want of an
//! instance: a burst of 170 requests/s before one that does 151 makes a queue in which all wait for more than the SLO, and
//! long after the burst. Served so that the late ones wait, 151 are in time and 19 late. What of `ours` is still late is nearly only
//! that: what bursts bring beyond what the ready instances do, before another is ready. `fluid_percent` says how much that is:
//! what would be late if requests were a fluid, served by the same ready instances, all of them at their limits (where the policy
//! has limits) at all times. No order of serving has less.
//!
//! Below the runs stands how `ours` compares with each of the others, trace by trace and seed by seed: difference, standard error and
//! verdict for starts, late requests and GPU time.

use super::paired::{Compared, Run};
use super::{Report, in_parallel, joined, mean, row};
use crate::seeds::cpus;
use anyhow::{Context, Result, ensure};
use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::scale::{FunctionScale, HorizontalAction, HorizontalEvent, HorizontalScaler};
use gshare_core::{Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::pipeline::Late;
use gshare_sched::scale::{LazyHorizontal, LazyHorizontalConfig, PeakHorizontal, PeakHorizontalConfig};
use gshare_sim::Make;
use gshare_sim::load_trace::read_rates;
use gshare_sim::scenario::Own;
use gshare_sim::{EventQueue, Rng};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, VecDeque};
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
const TIMES: [(usize, u64, u64); 3] = [(1, 20_700, 20_600), (2, 22_500, 21_300), (4, 34_200, 26_500)];
const REQUEST: f64 = 0.3;
const LIMIT: f64 = 0.6;
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

/// A row: its name, who starts instances, the order of serving, and whether an instance is taken for what ours is at a peak.
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
const FUNCTION: FunctionId = FunctionId::new(0);
/// How long `keep_alive` keeps what is not needed.
const KEEP_ALIVE: Duration = Duration::from_secs(60);

/// Requests per second that a scaler takes an instance for: the published threshold, or what the peak scaler counts on of an
/// instance that runs at its request, or at its limit.
fn throughput(rated: bool, at_limit: bool) -> f64 {
    let (batch, request, limit) = TIMES[TIMES.len() - 1];
    let does = batch as f64 * 1e6 / if at_limit { limit } else { request } as f64;
    if rated { PeakHorizontalConfig::default().peak_share.as_fraction() * does } else { THRESHOLD }
}

/// Rounded down, at least 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
const fn whole(number: f64) -> u64 {
    number as u64
}

enum Scaler {
    Eager {
        /// Requests per second that an instance is taken for.
        each: f64,
        /// 0: takes away at once.
        keep_alive: Duration,
        /// When each number of instances, from 1 on, was last needed.
        needed: Vec<Timestamp>,
        next: u64,
    },
    Engine(Box<dyn HorizontalScaler>),
}

#[derive(Debug, Default)]
struct Instance {
    ready: bool,
    draining: bool,
    queue: VecDeque<Timestamp>,
    /// The batch that runs, and whether it found more waiting than it took.
    batch: Option<(Vec<Timestamp>, bool)>,
    /// When the last batch that left some waiting ended.
    pressed: Option<Timestamp>,
}

enum Event {
    Second(usize),
    Request,
    Ready(InstanceId),
    Done(InstanceId),
}

#[derive(Debug, Default)]
struct Outcome {
    cold_starts: u64,
    requests: u64,
    violations: u64,
    gpu_seconds: f64,
    /// Of a fluid.
    late: f64,
    series: Vec<(u64, usize)>,
}

struct World<'a> {
    args: &'a Args,
    queue: EventQueue<Event>,
    scaler: Scaler,
    vertical: bool,
    late: Late,
    instances: BTreeMap<InstanceId, Instance>,
    /// Requests that wait for an instance to be ready.
    waiting: VecDeque<Timestamp>,
    outcome: Outcome,
    came: u64,
    fluid: Fluid,
}

/// Requests as a fluid: what waits for longer than the SLO is late.
#[derive(Debug, Default)]
struct Fluid {
    at: Timestamp,
    /// Requests per second.
    rate: f64,
    waiting: f64,
}

impl Fluid {
    /// Flows until `now` at `capacity` requests per second; answers how many are late.
    fn flow(&mut self, now: Timestamp, capacity: f64, slo: Duration) -> f64 {
        let seconds = now.saturating_since(self.at).as_secs_f64();
        self.at = now;
        let waiting = (self.waiting + (self.rate - capacity) * seconds).max(0.0);
        self.waiting = waiting.min(capacity * slo.as_secs_f64());
        waiting - self.waiting
    }
}

fn point(percent: u16, throughput: f64, micros: u64) -> Result<ProfilePoint> {
    let exec = Duration::from_micros(micros);
    let sm = SmShare::from_percent(percent).context("share")?;
    Ok(ProfilePoint::measured(sm, Quota::WHOLE, 4, throughput, exec, exec)?)
}

/// Its first instance is started by the first event.
fn engine(mut scaler: Box<dyn HorizontalScaler>, points: Vec<ProfilePoint>, slo: Duration) -> Result<Scaler> {
    let profile = ProfileTable::sparse(points)?;
    // Half of the SLO, the rest is for queueing (Dilu, section 3.2).
    let max_p95 = Some(Duration::from_nanos(slo.as_nanos() / 2));
    let spec = FunctionScale { profile, max_p95, min_instances: 1, max_instances: 64 };
    let added = HorizontalEvent::FunctionAdded { function: FUNCTION, spec };
    scaler.handle(Timestamp::ZERO, added, &mut Vec::new())?;
    Ok(Scaler::Engine(scaler))
}

fn scaler(starts: Starts<'_>, rated: bool, slo: Duration) -> Result<Scaler> {
    let (batch, request, limit) = TIMES[TIMES.len() - 1];
    let eager = |keep_alive| {
        let each = throughput(rated, false);
        Ok(Scaler::Eager { each, keep_alive, needed: Vec::new(), next: 1 })
    };
    match starts {
        Starts::Eager => eager(Duration::ZERO),
        Starts::KeepAlive => eager(KEEP_ALIVE),
        Starts::Lazily => {
            let scaler = LazyHorizontal::new(LazyHorizontalConfig::default())?;
            engine(Box::new(scaler), vec![point(30, throughput(rated, true), request)?], slo)
        }
        Starts::Own(make) => {
            let at_limit = point(60, throughput(rated, true), limit)?;
            engine(make(), vec![point(30, throughput(rated, false), request)?, at_limit], slo)
        }
        Starts::ForPeaks => {
            // Rated as the others are: 117.1 requests/s, where the execution time says 117.0.
            let config = PeakHorizontalConfig::default();
            let at_request = THRESHOLD / config.rated_share.as_fraction();
            let at_limit = batch as f64 * 1e6 / limit as f64;
            let points = vec![point(30, at_request, request)?, point(60, at_limit, limit)?];
            engine(Box::new(PeakHorizontal::new(config)?), points, slo)
        }
    }
}

impl<'a> World<'a> {
    fn new((_, starts, late, rated): Policy<'_>, args: &'a Args) -> Result<Self> {
        let scaler = scaler(starts, rated, args.slo)?;
        let mut world = Self {
            args,
            queue: EventQueue::new(),
            vertical: matches!(scaler, Scaler::Engine(_)),
            scaler,
            late,
            instances: BTreeMap::new(),
            waiting: VecDeque::new(),
            outcome: Outcome::default(),
            came: 0,
            fluid: Fluid::default(),
        };
        // Every policy begins with one instance that is ready; its start counts.
        let first = InstanceId::new(0);
        world.outcome.cold_starts = 1;
        world.instances.insert(first, Instance { ready: true, ..Instance::default() });
        if let Scaler::Engine(scaler) = &mut world.scaler {
            let ready = HorizontalEvent::InstanceReady { instance: first };
            scaler.handle(Timestamp::ZERO, ready, &mut Vec::new())?;
        }
        Ok(world)
    }

    fn run(mut self, rates: &[f64]) -> Result<Outcome> {
        self.queue.schedule(Timestamp::ZERO, Event::Second(0));
        while let Some((now, event)) = self.queue.pop() {
            match event {
                Event::Second(second) => {
                    self.flow(now);
                    if second > 0 {
                        self.tick(now)?;
                    }
                    self.fluid.rate = 0.0;
                    if let Some(rate) = rates.get(second) {
                        self.send(now, whole(rate * self.args.scale));
                        self.queue.schedule(now + Duration::from_secs(1), Event::Second(second + 1));
                    }
                }
                Event::Request => {
                    self.came += 1;
                    self.outcome.requests += 1;
                    self.waiting.push_back(now);
                    self.route(now);
                }
                Event::Ready(id) => {
                    self.flow(now);
                    if let Some(instance) = self.instances.get_mut(&id) {
                        instance.ready = true;
                        if let Scaler::Engine(scaler) = &mut self.scaler {
                            let ready = HorizontalEvent::InstanceReady { instance: id };
                            scaler.handle(now, ready, &mut Vec::new())?;
                        }
                        self.route(now);
                    }
                }
                Event::Done(id) => self.done(now, id)?,
            }
        }
        Ok(self.outcome)
    }

    /// The requests of one second, as the published sender spaces them.
    fn send(&mut self, now: Timestamp, count: u64) {
        self.fluid.rate = count as f64;
        for n in 0..count {
            self.queue.schedule(now + Duration::from_nanos(1_000_000_000 * n / count), Event::Request);
        }
    }

    /// What the fluid does until the instances that are ready change.
    fn flow(&mut self, now: Timestamp) {
        let (batch, request, limit) = TIMES[TIMES.len() - 1];
        let each = batch as f64 * 1e6 / if self.vertical { limit } else { request } as f64;
        let ready = self.instances.values().filter(|one| one.ready && !one.draining).count();
        self.outcome.late += self.fluid.flow(now, ready as f64 * each, self.args.slo);
    }

    fn route(&mut self, now: Timestamp) {
        while !self.waiting.is_empty() {
            let ready = self.instances.iter_mut().filter(|(_, one)| one.ready && !one.draining);
            let shortest = ready.min_by_key(|(id, one)| (one.queue.len() + one.batch.iter().len() * 4, **id));
            let Some((&id, instance)) = shortest else { return };
            instance.queue.extend(self.waiting.pop_front());
            self.begin(now, id);
        }
    }

    /// Begins a batch, if the instance has requests and nothing runs.
    fn begin(&mut self, now: Timestamp, id: InstanceId) {
        let Some(instance) = self.instances.get_mut(&id) else { return };
        let here = instance.queue.len();
        let Some((size, request, limit)) = TIMES.into_iter().rev().find(|(size, ..)| *size <= here) else {
            return;
        };
        if instance.batch.is_some() {
            return;
        }
        let window = Duration::from_millis(500);
        let pressed = instance.pressed.is_some_and(|at| now.saturating_since(at) < window);
        let at_limit = self.vertical && pressed;
        let time = Duration::from_micros(if at_limit { limit } else { request });
        let waiting = &mut instance.queue;
        // Those that are late already came first.
        let late = match self.late {
            Late::InOrder => 0,
            _ => waiting.partition_point(|came| came.saturating_add(self.args.slo) < now + time),
        };
        let mut batch: Vec<_> = waiting.drain(late..here.min(late + size)).collect();
        batch.extend(waiting.drain(..size - batch.len()));
        instance.batch = Some((batch, here > size));
        if at_limit {
            self.outcome.gpu_seconds += (LIMIT - REQUEST) * time.as_secs_f64();
        }
        self.queue.schedule(now + time, Event::Done(id));
    }

    fn done(&mut self, now: Timestamp, id: InstanceId) -> Result<()> {
        let Some(instance) = self.instances.get_mut(&id) else { return Ok(()) };
        if let Some((batch, pressed)) = instance.batch.take() {
            if pressed {
                instance.pressed = Some(now);
            }
            let late = batch.iter().filter(|came| now.saturating_since(**came) > self.args.slo).count();
            self.outcome.violations += late as u64;
        }
        self.begin(now, id);
        self.retire(now, id)
    }

    /// An instance that drains and has nothing left is gone.
    fn retire(&mut self, now: Timestamp, id: InstanceId) -> Result<()> {
        let over = |one: &Instance| one.draining && one.queue.is_empty() && one.batch.is_none();
        if self.instances.get(&id).is_some_and(over) {
            self.instances.remove(&id);
            if let Scaler::Engine(scaler) = &mut self.scaler {
                let gone = HorizontalEvent::InstanceGone { instance: id };
                scaler.handle(now, gone, &mut Vec::new())?;
            }
        }
        Ok(())
    }

    /// A second is over: its load is looked at.
    fn tick(&mut self, now: Timestamp) -> Result<()> {
        self.outcome.gpu_seconds += self.instances.len() as f64 * REQUEST;
        self.outcome.series.push((self.came, self.instances.len()));
        let came = std::mem::take(&mut self.came);
        let here = self.instances.values().filter(|one| !one.draining).count();
        let (mut start, mut drain) = (Vec::new(), Vec::new());
        match &mut self.scaler {
            Scaler::Eager { each, keep_alive, needed, next } => {
                let need = whole((came as f64 / *each).ceil()).max(1);
                let need = usize::try_from(need).unwrap_or(usize::MAX);
                needed.resize(needed.len().max(need), now);
                needed[..need].fill(now);
                for _ in here..need {
                    start.push(InstanceId::new(*next));
                    *next += 1;
                }
                let kept = |place: usize| {
                    needed.get(place).is_some_and(|at| now.saturating_since(*at) < *keep_alive)
                };
                // The newest go first.
                let spare = (need..here).rev().take_while(|place| !kept(*place)).count();
                let open = self.instances.iter().rev().filter(|(_, one)| !one.draining);
                drain.extend(open.map(|(id, _)| *id).take(spare));
            }
            Scaler::Engine(scaler) => {
                let (mut orders, rate) = (Vec::new(), RequestRate::per_second(came));
                let report = HorizontalEvent::LoadReported { function: FUNCTION, rate };
                scaler.handle(now, report, &mut orders)?;
                for order in orders {
                    match order {
                        HorizontalAction::Start { instance, .. } => start.push(instance),
                        HorizontalAction::Drain { instance } | HorizontalAction::Stop { instance, .. } => {
                            drain.push(instance);
                        }
                        _ => {}
                    }
                }
            }
        }
        for id in start {
            self.outcome.cold_starts += 1;
            self.instances.insert(id, Instance::default());
            self.queue.schedule(now + self.args.cold_start, Event::Ready(id));
        }
        for id in drain {
            if let Some(instance) = self.instances.get_mut(&id) {
                instance.draining = true;
                if !instance.ready {
                    self.instances.remove(&id);
                }
            }
            self.retire(now, id)?;
        }
        Ok(())
    }
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
/// When a trace cannot be read: which line, and what is wrong with it.
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
        World::new(policy, args)?.run(rates)
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
