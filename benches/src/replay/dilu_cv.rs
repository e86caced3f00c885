//! Dilu, section 5.3 ("fast adaptivity"): an inference instance whose load comes in bursts, beside a trainer.
//!
//! A simulation in virtual time, on a device whose SMs are shared in proportion ([`SharedGpu`]). `RoBERTa`-large serves
//! requests whose gaps are gamma distributed with a coefficient of variation of 1 to 6, in batches of up to four; a trainer
//! (BERT, able to use 90 % of the SMs) launches whenever it may. Times, requests and limits are the published ones: inference
//! 30 %:60 %, trainer 30 %:90 %. Every policy sees the same arrivals, and every process has at most 5 ms of work queued on the
//! device, as under the hook.
//!
//! | policy | |
//! |---|---|
//! | `exclusive` | no trainer; it has a second GPU |
//! | `mps_r` | partitions as large as the requests |
//! | `mps_l` | partitions as large as the limits |
//! | `fast_tokens` | the multi-token scheduler over the partitions of `mps_l`: half of the time each, what one leaves to the other |
//! | `dilu` | the co-scaler as printed, tolerance 60 % as published, tokens are SMs x microseconds |
//! | `ours` | the co-scaler that learns what its owner's launching cycles are alone, tolerance 30 % (the default) |
//! | `dilu_tight`, `ours_tight` | the same with the tolerance that this figure asks for (`--tight`) |

use super::{Report, row};
use anyhow::{Context, Result, ensure};
use gshare_core::scale::{ServiceClass, TokenBalance, TokenUnit, VerticalAction, VerticalEvent};
use gshare_core::token::Share;
use gshare_core::{
    BasisPoints, ClientId, Duration, Engine, GpuId, LeaseId, ModelId, Quota, QuotaRange, SmShare, Timestamp,
    TokenAction, TokenEvent,
};
use gshare_sched::scale::{DiluVertical, DiluVerticalConfig};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::scale::{LaneEnd, LaneKernel, SharedGpu};
use std::collections::VecDeque;

/// Flags.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of the arrivals; latencies of all of them are put together
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5")]
    seeds: Vec<u64>,
    /// Coefficients of variation of the gaps
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5,6")]
    cv: Vec<f64>,
    /// Requests per second on average; the published threshold for one such instance is 48
    #[arg(long, default_value_t = 48.0)]
    rate: f64,
    /// Simulated time per seed
    #[arg(long, default_value = "300s")]
    time: Duration,
    /// Tolerance of the `_tight` policies, in per cent of the shortest launching cycle
    #[arg(long, default_value_t = 5)]
    tight: u16,
    /// Latency that counts as a violation
    #[arg(long, default_value = "100ms")]
    slo: Duration,
}

/// `RoBERTa`-large on an A100: batch, execution time in us with all SMs, and the share in per cent from which on more do
/// not help. With less, the time grows in proportion: 4 requests take 34 ms (measured: 34) on 30 %, 102 (103) on 10 %.
const INFERENCE: [(u64, u64, u16); 3] = [(1, 20_000, 16), (2, 22_600, 25), (4, 26_200, 39)];
/// Kernels of one batch, and of one step of the trainer.
const KERNELS: u64 = 100;
const STEP_KERNELS: u64 = 200;
/// The trainer's kernels: time in us, and the SMs they can use in per cent.
const TRAINER: (u64, u16) = (500, 90);
/// What may be queued on the device per process.
const IN_FLIGHT: Duration = Duration::from_millis(5);
const INFER: usize = 0;
const TRAIN: usize = 1;
/// Tokens of a period: SMs in per cent x microseconds.
const MAX_TOKENS: u64 = 100 * 5_000;

fn percent(percent: u16) -> Result<Quota> {
    Quota::from_percent(percent).context("a share")
}

fn sm(percent: u16) -> Result<SmShare> {
    SmShare::from_percent(percent).context("a share")
}

fn client(lane: usize) -> ClientId {
    ClientId::new(if lane == INFER { 0 } else { 1 }, 0)
}

/// Who decides when a process may launch.
enum Gate {
    /// Nobody: partitions, or nothing, keep them apart.
    Open,
    Tokens(Box<Leases>),
    CoScaler(Box<Periods>),
}

/// Both processes as clients of the multi-token scheduler.
struct Leases {
    engine: MultiToken,
    actions: Vec<TokenAction>,
    held: [Option<Lease>; 2],
    asked: [bool; 2],
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    id: LeaseId,
    budget: Duration,
    expires: Timestamp,
    /// Predicted time of what was launched under it.
    launched: Duration,
}

/// Both processes as clients of the co-scaler.
struct Periods {
    engine: DiluVertical,
    actions: Vec<VerticalAction>,
    issued: [u64; 2],
    balance: [TokenBalance; 2],
    /// Launched since the last report, and the largest of it.
    used: [(u64, u64); 2],
}

/// A batch that is being computed.
struct Batch {
    arrived: Vec<Timestamp>,
    size: u64,
    launched: u64,
    done: u64,
    first_launch: Option<Timestamp>,
}

struct Node {
    now: Timestamp,
    gpu: SharedGpu,
    gate: Gate,
    partitions: [SmShare; 2],
    trains: bool,
    waiting: VecDeque<Timestamp>,
    batch: Option<Batch>,
    latencies: Vec<Duration>,
    steps: u64,
}

impl Node {
    fn new(gate: Gate, partitions: [SmShare; 2], trains: bool) -> Self {
        Self {
            now: Timestamp::ZERO,
            gpu: SharedGpu::new(2),
            gate,
            partitions,
            trains,
            waiting: VecDeque::new(),
            batch: None,
            latencies: Vec::new(),
            steps: 0,
        }
    }

    /// The next kernel of a process, if it has one to launch.
    fn next_kernel(&self, lane: usize) -> Option<LaneKernel> {
        let (micros, width) = if lane == TRAIN {
            self.trains.then_some(TRAINER)?
        } else {
            let batch = self.batch.as_ref().filter(|batch| batch.launched < KERNELS)?;
            let (_, micros, width) = INFERENCE.iter().find(|(size, ..)| *size == batch.size)?;
            (micros / KERNELS, *width)
        };
        let width = SmShare::from_percent(width)?;
        let kernel = LaneKernel { tag: 0, duration: Duration::from_micros(micros), width };
        Some(kernel.within(self.partitions[lane]))
    }

    /// Takes up to four waiting requests, if none are being computed.
    fn next_batch(&mut self) {
        if self.batch.is_some() || self.waiting.is_empty() {
            return;
        }
        let sizes = INFERENCE.iter().map(|(size, ..)| *size);
        let size = sizes.filter(|size| *size <= self.waiting.len() as u64).max().unwrap_or(1);
        let count = usize::try_from(size).unwrap_or(1);
        let arrived = self.waiting.drain(..count).collect();
        self.batch = Some(Batch { arrived, size, launched: 0, done: 0, first_launch: None });
    }

    /// Launches whatever may be launched now.
    fn pump(&mut self) -> Result<()> {
        self.next_batch();
        for lane in [INFER, TRAIN] {
            while self.gpu.queued(lane) < IN_FLIGHT
                && let Some(kernel) = self.next_kernel(lane)
                && self.gate.admits(self.now, lane, &kernel)?
            {
                self.gpu.launch(self.now, lane, kernel);
                if lane == INFER
                    && let Some(batch) = self.batch.as_mut()
                {
                    batch.launched += 1;
                    let first = *batch.first_launch.get_or_insert(self.now);
                    if batch.launched == KERNELS {
                        self.gate.finished(self.now, first, batch.size)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn ended(&mut self, end: LaneEnd) {
        if end.lane == TRAIN {
            self.steps += 1;
            return;
        }
        let Some(batch) = self.batch.as_mut() else { return };
        batch.done += 1;
        if batch.done == KERNELS {
            self.latencies.extend(batch.arrived.iter().map(|at| end.ended.saturating_since(*at)));
            self.batch = None;
        }
    }

    /// Runs until the requests that come before `until` are answered.
    fn run(&mut self, arrivals: &[Timestamp], until: Timestamp) -> Result<()> {
        let (mut next, mut ended) = (0, Vec::new());
        self.pump()?;
        // The load stops at `until`; what is in the queue then is still answered, but the trainer's count stops.
        let mut steps_by_then = None;
        loop {
            let arrival = arrivals.get(next).copied();
            let open = arrival.is_some() || self.batch.is_some() || !self.waiting.is_empty();
            if self.now >= until && steps_by_then.is_none() {
                steps_by_then = Some(self.steps);
            }
            if !open && self.now >= until {
                self.steps = steps_by_then.unwrap_or(self.steps);
                return Ok(());
            }
            let stop = (self.now < until).then_some(until);
            let times = [arrival, self.gpu.next_end(), self.gate.next_deadline(), stop];
            let at = times.into_iter().flatten().min().context("nothing would ever happen")?;
            self.now = self.now.max(at);
            self.gpu.advance(self.now, &mut ended);
            for end in ended.drain(..) {
                self.ended(end);
            }
            while arrivals.get(next).is_some_and(|arrival| *arrival <= self.now) {
                self.waiting.push_back(arrivals[next]);
                next += 1;
            }
            self.next_batch();
            for lane in [INFER, TRAIN] {
                let more = self.next_kernel(lane).is_some();
                self.gate.settle(self.now, lane, self.gpu.queued(lane), more)?;
            }
            self.gate.deadline(self.now)?;
            self.pump()?;
        }
    }
}

impl Gate {
    fn next_deadline(&self) -> Option<Timestamp> {
        match self {
            Self::Open => None,
            Self::Tokens(leases) => leases.engine.next_deadline(),
            Self::CoScaler(periods) => periods.engine.next_deadline(),
        }
    }

    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        match self {
            Self::Open => Ok(()),
            Self::Tokens(leases) => {
                if leases.engine.next_deadline().is_some_and(|due| due <= now) {
                    leases.tell(now, TokenEvent::DeadlineReached)?;
                }
                Ok(())
            }
            Self::CoScaler(periods) => periods.deadline(now),
        }
    }

    /// Whether the kernel may be launched now; if so it is paid for.
    fn admits(&mut self, now: Timestamp, lane: usize, kernel: &LaneKernel) -> Result<bool> {
        match self {
            Self::Open => Ok(true),
            Self::Tokens(leases) => leases.admits(now, lane, kernel),
            Self::CoScaler(periods) => {
                let cost = kernel.duration.as_nanos() / 1_000 * u64::from(kernel.width.get()) / 100;
                let may = periods.balance[lane].spend(cost);
                if may {
                    let (used, largest) = periods.used[lane];
                    periods.used[lane] = (used + cost, largest.max(cost));
                }
                Ok(may)
            }
        }
    }

    /// The last kernel of a batch was launched.
    fn finished(&mut self, now: Timestamp, first_launch: Timestamp, batch: u64) -> Result<()> {
        if let Self::CoScaler(periods) = self {
            let (client, batch) = (client(INFER), u32::try_from(batch)?);
            let event = VerticalEvent::IterationFinished {
                client,
                model: ModelId(0),
                batch,
                first_launch,
                last_launch: now,
            };
            periods.engine.handle(now, event, &mut periods.actions)?;
        }
        Ok(())
    }

    /// Gives a token back that is used up, has run out, or is not needed; asks for one that is.
    fn settle(&mut self, now: Timestamp, lane: usize, queued: Duration, more: bool) -> Result<()> {
        match self {
            Self::Tokens(leases) => leases.settle(now, lane, queued, more),
            _ => Ok(()),
        }
    }
}

impl Leases {
    fn new(partitions: [SmShare; 2]) -> Result<Self> {
        let engine = MultiToken::new(MultiTokenConfig::default())?;
        let mut leases = Self { engine, actions: Vec::new(), held: [None; 2], asked: [false; 2] };
        for (lane, sm) in partitions.into_iter().enumerate() {
            let share = Share { quota: QuotaRange::new(percent(50)?, percent(100)?)?, sm };
            let joined = TokenEvent::ClientJoined { client: client(lane), gpu: GpuId(0), share };
            leases.tell(Timestamp::ZERO, joined)?;
        }
        Ok(leases)
    }

    fn tell(&mut self, now: Timestamp, event: TokenEvent) -> Result<()> {
        self.engine.handle(now, event, &mut self.actions)?;
        for action in self.actions.drain(..) {
            match action {
                TokenAction::Grant { client, lease, budget, expires } => {
                    let lane = client.index();
                    let launched = match self.held[lane] {
                        Some(held) if held.id == lease => held.launched,
                        _ => Duration::ZERO,
                    };
                    self.held[lane] = Some(Lease { id: lease, budget, expires, launched });
                    self.asked[lane] = false;
                }
                TokenAction::Revoke { client, lease, .. } => {
                    self.held[client.index()].take_if(|held| held.id == lease);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn admits(&mut self, now: Timestamp, lane: usize, kernel: &LaneKernel) -> Result<bool> {
        match &mut self.held[lane] {
            Some(lease) if lease.launched < lease.budget && now < lease.expires => {
                lease.launched = lease.launched.saturating_add(kernel.duration);
                Ok(true)
            }
            Some(_) => Ok(false),
            None => {
                if !self.asked[lane] {
                    self.asked[lane] = true;
                    self.tell(now, TokenEvent::TokenRequested { client: client(lane) })?;
                    if self.held[lane].is_some() {
                        return self.admits(now, lane, kernel);
                    }
                }
                Ok(false)
            }
        }
    }

    fn settle(&mut self, now: Timestamp, lane: usize, queued: Duration, more: bool) -> Result<()> {
        let Some(lease) = self.held[lane] else { return Ok(()) };
        let over = lease.launched >= lease.budget || now >= lease.expires || !more;
        if over && queued.is_zero() {
            self.held[lane] = None;
            let (client, lease, used) = (client(lane), lease.id, lease.launched);
            let again = more && !self.asked[lane];
            self.asked[lane] |= more;
            self.tell(now, TokenEvent::TokenReturned { client, lease, used, again })?;
        }
        Ok(())
    }
}

impl Periods {
    fn new(class: ServiceClass, learn: bool) -> Result<Self> {
        let mut config = DiluVerticalConfig::default();
        config.unit = TokenUnit::Blocks;
        config.learn = learn;
        let engine = DiluVertical::new(config)?;
        let mut periods = Self {
            engine,
            actions: Vec::new(),
            issued: [0; 2],
            balance: [TokenBalance::default(); 2],
            used: [(0, 0); 2],
        };
        let (gpu, max_tokens) = (GpuId(0), MAX_TOKENS);
        let events = [
            VerticalEvent::Calibrated { gpu, max_tokens },
            VerticalEvent::ClientJoined {
                client: client(INFER),
                gpu,
                quota: QuotaRange::new(percent(30)?, percent(60)?)?,
                class,
            },
            VerticalEvent::ClientJoined {
                client: client(TRAIN),
                gpu,
                quota: QuotaRange::new(percent(30)?, percent(90)?)?,
                class: ServiceClass::BestEffort,
            },
        ];
        for event in events {
            periods.engine.handle(Timestamp::ZERO, event, &mut periods.actions)?;
        }
        Ok(periods)
    }

    /// A period ends: reports, new tokens.
    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        if self.engine.next_deadline().is_none_or(|due| due > now) {
            return Ok(());
        }
        for lane in [INFER, TRAIN] {
            let (tokens, largest_kernel) = std::mem::take(&mut self.used[lane]);
            if tokens > 0 {
                let report = VerticalEvent::UsageReported { client: client(lane), tokens, largest_kernel };
                self.engine.handle(now, report, &mut self.actions)?;
            }
        }
        self.engine.handle(now, VerticalEvent::DeadlineReached, &mut self.actions)?;
        for action in self.actions.drain(..) {
            if let VerticalAction::Issue { client, tokens } = action {
                self.issued[client.index()] = tokens;
            }
        }
        for lane in [INFER, TRAIN] {
            self.balance[lane].refill(self.issued[lane]);
        }
        Ok(())
    }
}

/// What a policy made of one load.
struct Outcome {
    latencies: Vec<Duration>,
    /// Kernels of the trainer per second.
    trained: f64,
}

fn node(policy: &str, tight: u16) -> Result<Node> {
    let (whole, limits) = ([SmShare::WHOLE; 2], [sm(60)?, sm(90)?]);
    let tight = BasisPoints::from_percent(tight).context("--tight: need at most 100")?;
    let printed = BasisPoints::from_percent(60).context("tolerance")?;
    Ok(match policy {
        "exclusive" => Node::new(Gate::Open, whole, false),
        "mps_r" => Node::new(Gate::Open, [sm(30)?, sm(30)?], true),
        "mps_l" => Node::new(Gate::Open, limits, true),
        "fast_tokens" => Node::new(Gate::Tokens(Box::new(Leases::new(limits)?)), limits, true),
        _ => {
            let class = match policy {
                "dilu" => ServiceClass::SloSensitive { tolerance: printed },
                "ours" => ServiceClass::SLO_SENSITIVE,
                _ => ServiceClass::SloSensitive { tolerance: tight },
            };
            let periods = Periods::new(class, policy.starts_with("ours"))?;
            Node::new(Gate::CoScaler(Box::new(periods)), whole, true)
        }
    })
}

const POLICIES: [&str; 8] =
    ["exclusive", "mps_r", "mps_l", "fast_tokens", "dilu", "dilu_tight", "ours", "ours_tight"];

fn simulate(policy: &str, tight: u16, loads: &[Vec<Timestamp>], time: Duration) -> Result<Outcome> {
    let mut outcome = Outcome { latencies: Vec::new(), trained: 0.0 };
    for load in loads {
        let mut node = node(policy, tight)?;
        node.run(load, Timestamp::ZERO.saturating_add(time))?;
        outcome.latencies.append(&mut node.latencies);
        outcome.trained += node.steps as f64 / time.as_secs_f64() / loads.len() as f64;
    }
    outcome.latencies.sort_unstable();
    Ok(outcome)
}

fn load(rate: f64, cv: f64, seed: u64, time: Duration) -> Result<Vec<Timestamp>> {
    let (mut arrivals, mut rng) = (Arrivals::gamma(rate, cv)?, Rng::new(seed));
    let (mut last, mut load) = (Timestamp::ZERO, Vec::new());
    while let Some(next) = arrivals.next_after(last, &mut rng)
        && next < Timestamp::ZERO.saturating_add(time)
    {
        load.push(next);
        last = next;
    }
    Ok(load)
}

fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e3)
}

/// Runs every policy at every coefficient of variation.
///
/// # Errors
/// When a flag is out of bounds.
pub fn run(args: &Args) -> Result<Report> {
    ensure!(!args.seeds.is_empty() && !args.cv.is_empty(), "--seeds and --cv need a value each");
    ensure!(args.time >= Duration::from_secs(1), "--time is {}: need at least 1s", args.time);
    let mut report = Report::new("dilu-cv", args.seeds.clone());
    // The trainer alone, on a GPU of its own.
    let alone = simulate("mps_l", args.tight, &[Vec::new()], Duration::from_secs(20))?.trained;
    for &cv in &args.cv {
        let loads: Vec<_> =
            args.seeds.iter().map(|&seed| load(args.rate, cv, seed, args.time)).collect::<Result<_>>()?;
        let mut exclusive = f64::NAN;
        for policy in POLICIES {
            let outcome = simulate(policy, args.tight, &loads, args.time)?;
            let p95 = percentile(&outcome.latencies, 95);
            if policy == "exclusive" {
                exclusive = p95;
            }
            let late = outcome.latencies.iter().filter(|latency| **latency > args.slo).count();
            let late = late as f64 / outcome.latencies.len().max(1) as f64 * 100.0;
            let trained = if policy == "exclusive" { 100.0 } else { outcome.trained / alone * 100.0 };
            report.rows.push(row(&[
                ("policy", policy.into()),
                ("cv", cv.into()),
                ("requests", outcome.latencies.len().into()),
                ("p50_ms", percentile(&outcome.latencies, 50).into()),
                ("p95_ms", p95.into()),
                ("p95_over_exclusive", (p95 / exclusive).into()),
                ("violations_percent", late.into()),
                ("trainer_percent", trained.into()),
                ("trainer_steps_per_second", (outcome.trained / STEP_KERNELS as f64).into()),
                ("gpus", (1 + u64::from(policy == "exclusive")).into()),
            ]));
        }
    }
    for (policy, ratio) in [("dilu", 1.09), ("mps_l", 1.09 * 2.08), ("mps_r", 1.09 * 4.76)] {
        let ratio = ("p95_over_exclusive", ratio.into());
        report.paper.push(row(&[("policy", policy.into()), ("cv", 6.0.into()), ratio]));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Dilu, section 5.3: static shares break under bursts or waste; the co-scaler stays near the GPU of its own.
    #[test]
    fn the_co_scaler_is_nearer_to_exclusive_than_static_shares_are() {
        let time = Duration::from_secs(60);
        let loads = vec![load(48.0, 6.0, 1, time).unwrap()];
        let p95 = |policy| percentile(&simulate(policy, 5, &loads, time).unwrap().latencies, 95);
        let (exclusive, tight) = (p95("exclusive"), p95("ours_tight"));
        assert!(exclusive <= tight && tight < p95("mps_l") && tight < p95("mps_r"), "{tight}");
    }

    #[test]
    fn every_request_is_answered_once_under_every_policy() {
        let time = Duration::from_secs(10);
        let loads = vec![load(48.0, 3.0, 7, time).unwrap()];
        for policy in POLICIES {
            let outcome = simulate(policy, 5, &loads, time).unwrap();
            assert_eq!(outcome.latencies.len(), loads[0].len(), "{policy}");
            assert!(policy == "exclusive" || outcome.trained > 0.0, "{policy}: the trainer is not starved");
        }
    }
}
