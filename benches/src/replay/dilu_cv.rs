//! Dilu, section 5.2 ("fast adaptivity"): an inference instance whose load comes in bursts, beside another instance or a trainer.
//!
//! A simulation in virtual time, on a device whose SMs are shared in proportion ([`SharedGpu`]). `GPT2`-large or
//! `RoBERTa`-large serves requests in bursts of a coefficient of variation (CV) of 1 to 6. Every policy sees the same arrivals, and
//! every process has at most 5 ms of work queued on the device, as under the hook.
//!
//! # Set-up
//! - **Pairs.** The paper's figures have the two models beside each other (its trace at CV 5 is of the pair GPT2, `RoBERTa`): the
//!   other one gets a Poisson load of the same mean. The pairs with a trainer, which always has work and can use 90 % of the SMs,
//!   are the harder question, and ours.
//! - **Load.** `counts` is what the published sender does: the requests of a second are drawn from a gamma distribution of mean
//!   `m` and variance `m CV^2`, rounded down and spaced evenly; a second without any takes no time. `gaps` draws the gaps between
//!   requests, as papers on serving mean a CV. The variance of counts over long times is the same; but 48 requests/s at CV 6
//!   are about 40 in one instant then, where the published sender never has two.
//! - **Batches.** The published server takes all that waits, so its batches grow in a burst; here up to `--max-batch`.
//! - **Execution times** are the published ones: those of an iteration of which a part of the time needs all SMs, and the rest only
//!   a few, fit the published profiles within 2 to 6 % over all SM shares (`Size`; with batches of two 10 %).
//! - **Shares.** 30 % to 60 % for both models (what the published search finds, and twice that), 30 % to 90 % for the trainer.
//!
//! | policy | |
//! |---|---|
//! | `exclusive` | a GPU each |
//! | `mps_r`, `mps_l` | partitions as large as the requests, as the limits |
//! | `mps` | no partitions |
//! | `split_X` | partitions of X % and the rest |
//! | `priority` | no partitions; the other one launches only while the first has no batch, which no scheduler of a period can do (TGS without having to find out) |
//! | `fast_tokens` | the multi-token scheduler over the partitions of `mps_l`: half of the time each, what one leaves to the other |
//! | `dilu` | the co-scaler as printed, tolerance 60 % as published, with `MaxTokens` so large that no process runs out, as published: 10 million blocks in 5 ms, where an A100 runs about 200,000 |
//! | `dilu_exact` | the same with `MaxTokens` as the device has: `--max-tokens` per cent of the SM time of a period |
//! | `ours_limited` | the co-scaler that learns what its owner's launching cycles are alone, tolerance 30 % (the default), tokens as `dilu_exact` |
//! | `ours` | the same with the whole device as the limit: a limit that binds is one that `dilu` does not have |
//!
//! A vertical scaler of the program's own (see [`super::main`]) is in the place of `ours`, under its name.
//!
//! # Why the paper's figure is met
//! The paper has a p95 of 1.09 times that of `exclusive` at CV 6, and 2.08 and 4.76 times that for `mps_l` and `mps_r`. It does not say
//! the mean rate; at 20 requests/s (of 10, 20, 30 and 40) both partitions come out within a tenth or two, and then `dilu` does, at 1.07.
//! Against what this replay had before, two things decide that: the neighbour is another inference instance (beside a trainer
//! `dilu` is at 3 times), and `MaxTokens` never binds (with exact tokens a request of 30 % does, and `dilu_exact` is at 5 times, as
//! `mps_r`). Bursts of seconds are needed for the partitions to match; that batches grow is the published server's way, and was
//! not measured alone.

use super::paired::{Compared, Run};
use super::{Report, in_parallel, joined, mean, row};
use crate::seeds::cpus;
use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use gshare_core::scale::{
    ServiceClass, TokenBalance, TokenUnit, VerticalAction, VerticalEvent, VerticalScaler,
};
use gshare_core::token::Share;
use gshare_core::{
    ClientId, Duration, Engine, GpuId, LeaseId, ModelId, Quota, QuotaRange, SmShare, Timestamp, TokenAction,
    TokenEvent,
};
use gshare_sched::scale::{DiluVertical, DiluVerticalConfig};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::Rng;
use gshare_sim::arrivals::Arrivals;
use gshare_sim::contended_gpu::{LaneEnd, LaneKernel, SharedGpu};
use gshare_sim::scenario::Own;
use std::collections::VecDeque;

/// Flags of the scenario.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seeds of the arrivals; latencies of all of them are put together
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5")]
    seeds: Vec<u64>,
    /// Coefficients of variation
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4,5,6")]
    cv: Vec<f64>,
    /// Pairs of the instance looked at and its neighbour
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Pair::ALL)]
    pairs: Vec<Pair>,
    /// How the bursts are drawn
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Bursts::Counts, Bursts::Gaps])]
    loads: Vec<Bursts>,
    /// Policies; all without it
    #[arg(long, value_delimiter = ',')]
    policies: Vec<String>,
    /// Requests per second on average, of each model. The paper does not say; at 20 its partitions come out
    #[arg(long, default_value_t = 20.0)]
    rate: f64,
    /// Simulated time per seed
    #[arg(long, default_value = "120s")]
    time: Duration,
    /// The largest batch; a power of two, at most 32
    #[arg(long, default_value_t = 32)]
    max_batch: u64,
    /// Tokens of a period, in per cent of what the device can do in it; with several, everything runs with each
    #[arg(long, value_delimiter = ',', default_value = "100", value_name = "PERCENT")]
    max_tokens: Vec<u64>,
    /// Static partitions of the first instance, in per cent; the other one has the rest
    #[arg(long, value_delimiter = ',', default_value = "30,40,50,60,70,80,90")]
    splits: Vec<u16>,
    /// Highest latency of a split that counts as good enough, in per cent of the one alone
    #[arg(long, default_value_t = 115)]
    within: u16,
    /// Latency that counts as a violation
    #[arg(long, default_value = "100ms")]
    slo: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Pair {
    Gpt2Roberta,
    RobertaGpt2,
    Gpt2Trainer,
    RobertaTrainer,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bursts {
    /// Gamma distributed counts per second
    Counts,
    /// Gamma distributed gaps
    Gaps,
}

impl Pair {
    const ALL: [Self; 4] = [Self::Gpt2Roberta, Self::RobertaGpt2, Self::Gpt2Trainer, Self::RobertaTrainer];

    /// The models of the first and of the other one; none is a trainer.
    const fn models(self) -> (&'static Model, Option<&'static Model>) {
        match self {
            Self::Gpt2Roberta => (&GPT2, Some(&ROBERTA)),
            Self::RobertaGpt2 => (&ROBERTA, Some(&GPT2)),
            Self::Gpt2Trainer => (&GPT2, None),
            Self::RobertaTrainer => (&ROBERTA, None),
        }
    }
}

/// An iteration of one batch size: `wide` per cent of its `micros` need all SMs, the rest `width` per cent of them. On a share
/// `s` it takes `micros x (wide / s + (1 - wide) x max(1, width / s))`.
#[derive(Debug)]
struct Size {
    batch: u64,
    micros: u64,
    wide: u64,
    width: u16,
}

const fn size(batch: u64, micros: u64, wide: u64, width: u16) -> Size {
    Size { batch, micros, wide, width }
}

/// A model on an A100, smallest batch first.
#[derive(Debug)]
struct Model([Size; 6]);

const ROBERTA: Model = Model([
    size(1, 20_800, 0, 15),
    size(2, 22_600, 0, 27),
    size(4, 25_400, 10, 36),
    size(8, 33_000, 15, 57),
    size(16, 56_200, 45, 47),
    size(32, 107_100, 50, 47),
]);
const GPT2: Model = Model([
    size(1, 29_400, 0, 13),
    size(2, 31_800, 5, 16),
    size(4, 32_900, 25, 15),
    size(8, 49_500, 35, 17),
    size(16, 85_900, 35, 31),
    size(32, 163_300, 40, 27),
]);
/// An iteration is this number of layers, each of a kernel that needs all SMs, if any does, and three that do not.
const LAYERS: u64 = 24;
const KERNELS: u64 = 4 * LAYERS;
/// The trainer's kernels: time in us, and the SMs they can use in per cent.
const TRAINER: (u64, u16) = (500, 90);
/// What may be queued on the device per process.
const IN_FLIGHT: Duration = Duration::from_millis(5);
/// The one whose latency is looked at, and who is beside it.
const FIRST: usize = 0;
const OTHER: usize = 1;
/// The figures that are compared, and whether less is better.
const FIGURES: [(&str, bool); 2] = [("p95_over_exclusive", true), ("trainer_percent", false)];
/// Tokens of a period: SMs in per cent x microseconds.
const MAX_TOKENS: u64 = 100 * 5_000;

impl Size {
    fn kernel(&self, number: u64) -> Option<LaneKernel> {
        let wide = self.wide > 0 && number.is_multiple_of(4);
        let (part, among) = match wide {
            true => (self.wide, LAYERS),
            false if self.wide > 0 => (100 - self.wide, 3 * LAYERS),
            false => (100, KERNELS),
        };
        let duration = Duration::from_nanos(self.micros * 1_000 * part / 100 / among);
        let width = SmShare::from_percent(if wide { 100 } else { self.width })?;
        Some(LaneKernel { tag: 0, duration, width })
    }
}

fn percent(percent: u16) -> Result<Quota> {
    Quota::from_percent(percent).context("a share")
}

fn sm(percent: u16) -> Result<SmShare> {
    SmShare::from_percent(percent).context("a share")
}

fn client(lane: usize) -> ClientId {
    ClientId::new(if lane == FIRST { 0 } else { 1 }, 0)
}

/// Who decides when a process may launch.
enum Gate {
    /// No gate: partitions, or nothing, keep them apart.
    Open,
    /// The other one launches while the first has no batch.
    Priority,
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
    engine: Box<dyn VerticalScaler>,
    actions: Vec<VerticalAction>,
    issued: [u64; 2],
    balance: [TokenBalance; 2],
    /// Launched since the last report, and the largest of it.
    used: [(u64, u64); 2],
}

/// A batch that is being computed.
struct Batch {
    arrived: Vec<Timestamp>,
    size: &'static Size,
    launched: u64,
    done: u64,
    first_launch: Timestamp,
}

/// The work of a process.
enum Work<'a> {
    Nothing,
    Trains { kernels: u64 },
    Serves(Box<Server<'a>>),
}

struct Server<'a> {
    model: &'static Model,
    max_batch: u64,
    arrivals: &'a [Timestamp],
    waiting: VecDeque<Timestamp>,
    batch: Option<Batch>,
    latencies: Vec<Duration>,
}

impl<'a> Server<'a> {
    fn new(model: &'static Model, max_batch: u64, arrivals: &'a [Timestamp]) -> Self {
        Self { model, max_batch, arrivals, waiting: VecDeque::new(), batch: None, latencies: Vec::new() }
    }

    fn is_done(&self) -> bool {
        self.arrivals.is_empty() && self.waiting.is_empty() && self.batch.is_none()
    }

    /// Takes as many of the waiting requests as make a batch, if none is being computed.
    fn arrive(&mut self, now: Timestamp) {
        let come = self.arrivals.partition_point(|at| *at <= now);
        let (come, rest) = self.arrivals.split_at(come);
        self.waiting.extend(come);
        self.arrivals = rest;
        if self.batch.is_some() {
            return;
        }
        let fits = |size: &&Size| size.batch <= self.max_batch && size.batch <= self.waiting.len() as u64;
        let Some(size) = self.model.0.iter().rev().find(fits) else { return };
        let count = usize::try_from(size.batch).unwrap_or(1);
        let arrived = self.waiting.drain(..count).collect();
        self.batch = Some(Batch { arrived, size, launched: 0, done: 0, first_launch: now });
    }
}

struct Node<'a> {
    now: Timestamp,
    gpu: SharedGpu,
    gate: Gate,
    partitions: [SmShare; 2],
    work: [Work<'a>; 2],
}

impl<'a> Node<'a> {
    fn new(gate: Gate, partitions: [SmShare; 2], work: [Work<'a>; 2]) -> Self {
        Self { now: Timestamp::ZERO, gpu: SharedGpu::new(2), gate, partitions, work }
    }

    /// The next kernel of a process, if it has one to launch.
    fn next_kernel(&self, lane: usize) -> Option<LaneKernel> {
        let kernel = match &self.work[lane] {
            Work::Nothing => return None,
            Work::Trains { .. } => {
                let (micros, width) = TRAINER;
                let width = SmShare::from_percent(width)?;
                LaneKernel { tag: 0, duration: Duration::from_micros(micros), width }
            }
            Work::Serves(server) => {
                let batch = server.batch.as_ref().filter(|batch| batch.launched < KERNELS)?;
                batch.size.kernel(batch.launched)?
            }
        };
        Some(kernel.within(self.partitions[lane]))
    }

    /// Launches all that may be launched now.
    fn pump(&mut self) -> Result<()> {
        for lane in [FIRST, OTHER] {
            if let Work::Serves(server) = &mut self.work[lane] {
                server.arrive(self.now);
            }
        }
        for lane in [FIRST, OTHER] {
            let alone =
                lane == FIRST || !matches!(&self.work[FIRST], Work::Serves(first) if first.batch.is_some());
            while self.gpu.queued(lane) < IN_FLIGHT
                && let Some(kernel) = self.next_kernel(lane)
                && self.gate.admits(self.now, lane, &kernel, alone)?
            {
                self.gpu.launch(self.now, lane, kernel);
                if let Work::Serves(server) = &mut self.work[lane]
                    && let Some(batch) = server.batch.as_mut()
                {
                    if batch.launched == 0 {
                        batch.first_launch = self.now;
                    }
                    batch.launched += 1;
                    if batch.launched == KERNELS {
                        self.gate.finished(self.now, lane, batch.first_launch, batch.size.batch)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn ended(&mut self, end: LaneEnd) {
        match &mut self.work[end.lane] {
            Work::Nothing => {}
            Work::Trains { kernels } => *kernels += 1,
            Work::Serves(server) => {
                let Some(batch) = server.batch.as_mut() else { return };
                batch.done += 1;
                if batch.done == KERNELS {
                    let took = batch.arrived.iter().map(|at| end.ended.saturating_since(*at));
                    server.latencies.extend(took);
                    server.batch = None;
                }
            }
        }
    }

    /// Runs until `until`, and on until all requests are answered; what a trainer does then does not count.
    fn run(&mut self, until: Timestamp) -> Result<()> {
        let (mut ended, mut trained) = (Vec::new(), None);
        self.pump()?;
        loop {
            if self.now >= until
                && let Work::Trains { kernels } = self.work[OTHER]
            {
                trained.get_or_insert(kernels);
            }
            let open = |work: &Work<'_>| matches!(work, Work::Serves(server) if !server.is_done());
            if self.now >= until && !self.work.iter().any(open) {
                if let Some(kernels) = trained {
                    self.work[OTHER] = Work::Trains { kernels };
                }
                return Ok(());
            }
            self.step(Some(until).filter(|until| *until > self.now), &mut ended)?;
        }
    }

    /// Goes to the next time at which something happens, or to `stop`.
    fn step(&mut self, stop: Option<Timestamp>, ended: &mut Vec<LaneEnd>) -> Result<()> {
        let arrivals = self.work.iter().filter_map(|work| match work {
            Work::Serves(server) => server.arrivals.first().copied(),
            _ => None,
        });
        let times = [self.gpu.next_end(), self.gate.next_deadline(), stop];
        let at = arrivals.chain(times.into_iter().flatten()).min().context("nothing would ever happen")?;
        self.now = self.now.max(at);
        self.gpu.advance(self.now, ended);
        for end in ended.drain(..) {
            self.ended(end);
        }
        for lane in [FIRST, OTHER] {
            if let Work::Serves(server) = &mut self.work[lane] {
                server.arrive(self.now);
            }
            let more = self.next_kernel(lane).is_some();
            self.gate.settle(self.now, lane, self.gpu.queued(lane), more)?;
        }
        self.gate.deadline(self.now)?;
        self.pump()
    }
}

impl Gate {
    fn next_deadline(&self) -> Option<Timestamp> {
        match self {
            Self::Open | Self::Priority => None,
            Self::Tokens(leases) => leases.engine.next_deadline(),
            Self::CoScaler(periods) => periods.engine.next_deadline(),
        }
    }

    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        match self {
            Self::Open | Self::Priority => Ok(()),
            Self::Tokens(leases) => {
                if leases.engine.next_deadline().is_some_and(|due| due <= now) {
                    leases.tell(now, TokenEvent::DeadlineReached)?;
                }
                Ok(())
            }
            Self::CoScaler(periods) => periods.deadline(now),
        }
    }

    /// Tells whether the kernel may be launched now; if so it is paid for. `alone`: no process with priority has work.
    fn admits(&mut self, now: Timestamp, lane: usize, kernel: &LaneKernel, alone: bool) -> Result<bool> {
        match self {
            Self::Open => Ok(true),
            Self::Priority => Ok(alone),
            Self::Tokens(leases) => leases.admits(now, lane, kernel),
            Self::CoScaler(periods) => {
                let cost = kernel.duration.as_nanos() / 1_000 * u64::from(kernel.width.get()) / 100;
                let may = periods.balance[lane].spend(cost);
                let (used, largest) = &mut periods.used[lane];
                if may {
                    (*used, *largest) = (*used + cost, cost.max(*largest));
                } else {
                    // A client that waits is not at rest.
                    *used = (*used).max(1);
                }
                Ok(may)
            }
        }
    }

    /// The last kernel of a batch was launched.
    fn finished(&mut self, now: Timestamp, lane: usize, first_launch: Timestamp, batch: u64) -> Result<()> {
        if let Self::CoScaler(periods) = self {
            let (client, batch) = (client(lane), u32::try_from(batch)?);
            let event = VerticalEvent::IterationFinished {
                client,
                model: ModelId::new(0),
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
            let joined = TokenEvent::ClientJoined { client: client(lane), gpu: GpuId::new(0), share };
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
    fn new(
        max_tokens: u64,
        class: ServiceClass,
        quotas: [QuotaRange; 2],
        trains: bool,
        engine: Box<dyn VerticalScaler>,
    ) -> Result<Self> {
        let mut periods = Self {
            engine,
            actions: Vec::new(),
            issued: [0; 2],
            balance: [TokenBalance::default(); 2],
            used: [(0, 0); 2],
        };
        let gpu = GpuId::new(0);
        periods.engine.handle(
            Timestamp::ZERO,
            VerticalEvent::Calibrated { gpu, max_tokens },
            &mut periods.actions,
        )?;
        for (lane, quota) in quotas.into_iter().enumerate() {
            let class = if lane == OTHER && trains { ServiceClass::BestEffort } else { class };
            let joined = VerticalEvent::ClientJoined { client: client(lane), gpu, quota, class };
            periods.engine.handle(Timestamp::ZERO, joined, &mut periods.actions)?;
        }
        Ok(periods)
    }

    /// A period ends: reports, new tokens.
    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        if self.engine.next_deadline().is_none_or(|due| due > now) {
            return Ok(());
        }
        for lane in [FIRST, OTHER] {
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
        for lane in [FIRST, OTHER] {
            self.balance[lane].refill(self.issued[lane]);
        }
        Ok(())
    }
}

/// Latencies of the first one, and what the other one did: its latencies, or kernels per second.
#[derive(Debug, Default)]
struct Outcome {
    latencies: Vec<Duration>,
    other: Vec<Duration>,
    trained: f64,
}

impl Outcome {
    /// All seeds together.
    fn together(outcomes: &[Self]) -> Self {
        let all = |of: fn(&Self) -> &Vec<Duration>| {
            let mut all: Vec<Duration> = outcomes.iter().flat_map(of).copied().collect();
            all.sort_unstable();
            all
        };
        let trained = mean(outcomes.iter().map(|one| one.trained));
        Self { latencies: all(|one| &one.latencies), other: all(|one| &one.other), trained }
    }

    fn take(&mut self, node: Node<'_>, time: Duration) {
        let [first, other] = node.work;
        if let Work::Serves(mut server) = first {
            self.latencies.append(&mut server.latencies);
        }
        match other {
            Work::Serves(mut server) => self.other.append(&mut server.latencies),
            Work::Trains { kernels } => self.trained += kernels as f64 / time.as_secs_f64(),
            Work::Nothing => {}
        }
    }
}

/// A policy by its name.
fn gate(policy: &str, max_tokens: u64, trains: bool, own: &Own) -> Result<(Gate, [SmShare; 2])> {
    let (most, whole) = (if trains { 90 } else { 60 }, [SmShare::WHOLE; 2]);
    let limits = [sm(60)?, sm(most)?];
    let printed = ServiceClass::slo_sensitive(60).context("tolerance")?;
    let learning = |learn| -> Result<Box<dyn VerticalScaler>> {
        let mut config = DiluVerticalConfig::default();
        config.unit = TokenUnit::Blocks;
        config.learn = learn;
        Ok(Box::new(DiluVertical::new(config)?))
    };
    let scaled = |max_tokens, class, engine, most: [u16; 2]| -> Result<_> {
        let quotas = [
            QuotaRange::new(percent(30)?, percent(most[0])?)?,
            QuotaRange::new(percent(30)?, percent(most[1])?)?,
        ];
        let periods = Periods::new(max_tokens, class, quotas, trains, engine)?;
        Ok((Gate::CoScaler(Box::new(periods)), whole))
    };
    let tokens = MAX_TOKENS * max_tokens / 100;
    let (sensitive, any) = (ServiceClass::SLO_SENSITIVE, [100, if trains { 90 } else { 100 }]);
    if let Some((_, make)) = own.verticals().find(|(name, _)| *name == policy) {
        return scaled(tokens, sensitive, make(), any);
    }
    Ok(match policy {
        "mps_r" => (Gate::Open, [sm(30)?, sm(30)?]),
        "mps_l" => (Gate::Open, limits),
        "mps" => (Gate::Open, whole),
        "priority" => (Gate::Priority, whole),
        "fast_tokens" => (Gate::Tokens(Box::new(Leases::new(limits)?)), limits),
        "dilu" => scaled(MAX_TOKENS * 50, printed, learning(false)?, [60, most])?,
        "dilu_exact" => scaled(tokens, printed, learning(false)?, [60, most])?,
        "ours_limited" => scaled(tokens, sensitive, learning(true)?, [60, most])?,
        "ours" => scaled(tokens, sensitive, learning(true)?, any)?,
        _ => match policy.strip_prefix("split_").map(str::parse::<u16>) {
            Some(Ok(part @ 1..=99)) => (Gate::Open, [sm(part)?, sm(100 - part)?]),
            _ => bail!("--policies: no policy {policy}"),
        },
    })
}

/// One seed: the loads of both.
type Loads = [Vec<Timestamp>; 2];

fn simulate(
    policy: &str,
    pair: Pair,
    args: &Args,
    tokens: u64,
    [load, others]: &Loads,
    own: &Own,
) -> Result<Outcome> {
    let (first, other) = pair.models();
    let serves = |model, load| Work::Serves(Box::new(Server::new(model, args.max_batch, load)));
    let beside = || other.map_or(Work::Trains { kernels: 0 }, |model| serves(model, others));
    let nodes = if policy == "exclusive" {
        let alone = |work| Node::new(Gate::Open, [SmShare::WHOLE; 2], work);
        vec![alone([serves(first, load), Work::Nothing]), alone([Work::Nothing, beside()])]
    } else {
        let (gate, partitions) = gate(policy, tokens, other.is_none(), own)?;
        vec![Node::new(gate, partitions, [serves(first, load), beside()])]
    };
    let mut outcome = Outcome::default();
    for mut node in nodes {
        node.run(Timestamp::ZERO.saturating_add(args.time))?;
        outcome.take(node, args.time);
    }
    outcome.latencies.sort_unstable();
    outcome.other.sort_unstable();
    Ok(outcome)
}

fn load(bursts: Bursts, rate: f64, cv: f64, seed: u64, time: Duration) -> Result<Vec<Timestamp>> {
    let (mut rng, mut load, end) = (Rng::new(seed), Vec::new(), Timestamp::ZERO.saturating_add(time));
    match bursts {
        Bursts::Gaps => {
            let (mut arrivals, mut last) = (Arrivals::gamma(rate, cv)?, Timestamp::ZERO);
            while let Some(next) = arrivals.next_after(last, &mut rng)
                && next < end
            {
                load.push(next);
                last = next;
            }
        }
        Bursts::Counts => {
            // A count is drawn like a gap of that many seconds.
            let mut counts = Arrivals::gamma(1.0 / rate, cv / rate.sqrt())?;
            let mut second = Timestamp::ZERO;
            while second < end
                && let Some(count) = counts.next_after(Timestamp::ZERO, &mut rng)
            {
                let count = count.as_nanos() / 1_000_000_000;
                let at = |n| second.saturating_add(Duration::from_nanos(1_000_000_000 * n / count.max(1)));
                load.extend((0..count).map(at));
                if count > 0 {
                    second = at(count);
                }
            }
        }
    }
    Ok(load)
}

/// In milliseconds.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).map_or(f64::NAN, |latency| latency.as_secs_f64() * 1e3)
}

fn mean_ms(latencies: &[Duration]) -> f64 {
    mean(latencies.iter().map(|latency| latency.as_secs_f64() * 1e3))
}

/// Runs every policy on every pair and load.
///
/// # Errors
/// When a flag is out of bounds.
pub fn run(args: &Args, own: &Own) -> Result<Report> {
    ensure!(!args.seeds.is_empty() && !args.cv.is_empty(), "--seeds and --cv need a value each");
    ensure!(args.time >= Duration::from_secs(1), "--time is {}: need at least 1s", args.time);
    ensure!(
        args.max_batch.is_power_of_two() && args.max_batch <= 32,
        "--max-batch is {}: need 1, 2, 4, 8, 16 or 32",
        args.max_batch
    );
    for tokens in &args.max_tokens {
        ensure!((1..=100_000).contains(tokens), "--max-tokens is {tokens}: need 1 to 100000 per cent");
    }
    ensure!(args.splits.iter().all(|part| (1..100).contains(part)), "--splits: need 1 to 99 per cent each");
    let mut report = Report::new("dilu-cv", args.seeds.clone());
    let splits: Vec<String> = args.splits.iter().map(|part| format!("split_{part}")).collect();
    let mut policies = vec!["exclusive", "mps_r", "mps_l", "mps"];
    policies.extend(splits.iter().map(String::as_str));
    policies.extend(["priority", "fast_tokens", "dilu", "dilu_exact", "ours_limited", "ours"]);
    policies.extend(own.verticals().map(|(name, _)| name));
    if !args.policies.is_empty() {
        policies = ["exclusive"].into_iter().chain(args.policies.iter().map(String::as_str)).collect();
    }
    let mut cells = Vec::new();
    for &pair in &args.pairs {
        for &bursts in &args.loads {
            let of = |&cv: &f64| args.max_tokens.iter().map(move |&tokens| (pair, bursts, cv, tokens));
            cells.extend(args.cv.iter().flat_map(of));
        }
    }
    let (of_cell, seeds) = (policies.len() * args.seeds.len(), args.seeds.len());
    let outcomes = in_parallel(cpus(), cells.len() * of_cell, |job| {
        let (pair, bursts, cv, tokens) = cells[job / of_cell];
        let (policy, seed) = (policies[job % of_cell / seeds], args.seeds[job % seeds]);
        let others = load(Bursts::Gaps, args.rate, 1.0, !seed, args.time)?;
        simulate(policy, pair, args, tokens, &[load(bursts, args.rate, cv, seed, args.time)?, others], own)
    })?;
    let mut splits = Compared::new("best_split", &FIGURES);
    let mut printed = Compared::new("dilu", &FIGURES[..1]);
    for (&(pair, bursts, cv, tokens), outcomes) in cells.iter().zip(outcomes.chunks(of_cell)) {
        let mut input =
            row(&[("pair", name(&pair).into()), ("load", name(&bursts).into()), ("cv", cv.into())]);
        if args.max_tokens.len() > 1 {
            input.insert("max_tokens_percent".into(), tokens.into());
        }
        let alone = &outcomes[..seeds];
        let mut runs = Vec::new();
        for (policy, outcomes) in policies.iter().zip(outcomes.chunks(seeds)) {
            let both = outcomes.iter().zip(alone);
            let by_seed = both.map(|(outcome, alone)| figures(outcome, alone, args.slo)).collect();
            let together = figures(&Outcome::together(outcomes), &Outcome::together(alone), args.slo);
            let about = joined(&row(&[("policy", (*policy).into())]), &input);
            report.rows.push(joined(&about, &together));
            runs.push((*policy, Run { together, by_seed }));
        }
        let find = |name: &str| runs.iter().find(|(policy, _)| *policy == name).map(|(_, run)| run);
        if let Some((ours, dilu)) = find("ours").zip(find("dilu")) {
            printed.push(input.clone(), dilu, ours);
        }
        if let Some((ours, (policy, split))) = find("ours").zip(best_split(&runs, args.within)) {
            let mut input = input;
            input.insert("split".into(), policy.into());
            splits.push(input, split, ours);
        }
    }
    report.compared.extend([splits, printed].into_iter().filter(|one| !one.cells.is_empty()));
    for (policy, pair, cv, ratio) in [
        ("dilu", Pair::Gpt2Roberta, "6", "1.09"),
        ("mps_l", Pair::Gpt2Roberta, "6", "2.27"),
        ("mps_r", Pair::Gpt2Roberta, "6", "5.19"),
        ("dilu", Pair::Gpt2Roberta, "1 to 6", "1.07 to 1.09"),
        ("dilu", Pair::RobertaGpt2, "1 to 6", "1.06 to 1.29"),
    ] {
        let pair = name(&pair);
        let figures = [("pair", pair.into()), ("cv", cv.into()), ("p95_over_exclusive", ratio.into())];
        report.paper.push(joined(&row(&[("policy", policy.into())]), &row(&figures)));
    }
    Ok(report)
}

/// The split with the most for the trainer whose p95 is within `within` per cent of the one alone.
fn best_split<'a>(runs: &'a [(&str, Run)], within: u16) -> Option<(&'a str, &'a Run)> {
    let figure = |run: &Run, name| run.together.get(name).and_then(serde_json::Value::as_f64);
    let good =
        |run: &Run| figure(run, "p95_over_exclusive").is_some_and(|p95| p95 * 100.0 <= f64::from(within));
    let splits = runs.iter().filter(|(policy, run)| policy.starts_with("split_") && good(run));
    let trained = splits.filter_map(|(policy, run)| Some((*policy, run, figure(run, "trainer_percent")?)));
    trained.max_by(|a, b| a.2.total_cmp(&b.2)).map(|(policy, run, _)| (policy, run))
}

fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn figures(outcome: &Outcome, alone: &Outcome, slo: Duration) -> serde_json::Map<String, serde_json::Value> {
    let late = outcome.latencies.iter().filter(|latency| **latency > slo).count() as f64;
    let ratio = |of: &dyn Fn(&Outcome) -> f64| of(outcome) / of(alone);
    let mut line = row(&[
        ("requests", outcome.latencies.len().into()),
        ("p95_ms", percentile(&outcome.latencies, 95).into()),
        ("p50_over_exclusive", ratio(&|one| percentile(&one.latencies, 50)).into()),
        ("p95_over_exclusive", ratio(&|one| percentile(&one.latencies, 95)).into()),
        ("mean_over_exclusive", ratio(&|one| mean_ms(&one.latencies)).into()),
        ("violations_percent", (late / outcome.latencies.len().max(1) as f64 * 100.0).into()),
    ]);
    if outcome.other.is_empty() {
        line.insert("trainer_percent".into(), (ratio(&|one| one.trained) * 100.0).into());
    } else {
        line.insert("other_p95_over_exclusive".into(), ratio(&|one| percentile(&one.other, 95)).into());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(more: &[&str]) -> Args {
        Cli::parse_from([""].iter().chain(more)).args
    }

    fn p95(policy: &str, pair: Pair, args: &Args) -> f64 {
        let other = load(Bursts::Gaps, args.rate, 1.0, !1, args.time).unwrap();
        let loads = [load(Bursts::Counts, args.rate, 6.0, 1, args.time).unwrap(), other];
        percentile(&simulate(policy, pair, args, 100, &loads, &Own::default()).unwrap().latencies, 95)
    }

    /// Dilu, section 5.2: static shares break under bursts; the co-scaler stays near the GPU of its own.
    #[test]
    fn beside_another_instance_the_order_is_the_papers() {
        let args = args(&["--time", "40s"]);
        let of = |policy| p95(policy, Pair::Gpt2Roberta, &args);
        let (exclusive, dilu, limits, requests) = (of("exclusive"), of("dilu"), of("mps_l"), of("mps_r"));
        assert!(
            exclusive <= dilu && dilu < limits && limits < requests,
            "{exclusive} {dilu} {limits} {requests}"
        );
    }

    #[test]
    fn tokens_that_never_run_out_do_not_protect_from_a_trainer_and_ours_do() {
        let args = args(&["--time", "40s"]);
        let alone = p95("exclusive", Pair::Gpt2Trainer, &args);
        let longer = |policy| p95(policy, Pair::Gpt2Trainer, &args) / alone - 1.0;
        let (dilu, ours) = (longer("dilu"), longer("ours"));
        assert!(dilu > 2.0 * ours && ours < 0.1, "{dilu} {ours}");
    }

    #[test]
    fn a_vertical_scaler_of_a_programs_own_has_rows_of_its_own() {
        let own = Own::default().with_vertical("mine", || {
            let mut config = DiluVerticalConfig::default();
            (config.unit, config.learn) = (TokenUnit::Blocks, true);
            Box::new(DiluVertical::new(config).unwrap())
        });
        let args = args(&[
            "--time",
            "5s",
            "--seeds",
            "1",
            "--cv",
            "2",
            "--pairs",
            "gpt2-trainer",
            "--loads",
            "counts",
        ]);
        let rows = run(&args, &own).unwrap().rows;
        let of = |policy: &str| {
            let mut row = rows.iter().find(|row| row["policy"] == policy).unwrap().clone();
            row.remove("policy");
            row
        };
        assert_eq!(of("mine"), of("ours"));
        assert_ne!(of("mine"), of("mps"));
    }

    #[test]
    fn an_iteration_on_a_share_takes_what_the_profile_says() {
        // RoBERTa, four requests on 30 % of the SMs: 34.2 ms were measured.
        let size = ROBERTA.0.iter().find(|size| size.batch == 4).unwrap();
        let on = |kernel: LaneKernel| kernel.within(sm(30).unwrap()).duration.as_secs_f64();
        let time: f64 = (0..KERNELS).map(|number| on(size.kernel(number).unwrap())).sum();
        assert!((0.032..0.037).contains(&time), "{time}");
    }

    #[test]
    fn every_request_is_answered_once_under_every_policy() {
        let args = args(&["--time", "5s"]);
        for bursts in [Bursts::Counts, Bursts::Gaps] {
            let other = load(Bursts::Gaps, args.rate, 1.0, !7, args.time).unwrap();
            let loads = [load(bursts, args.rate, 3.0, 7, args.time).unwrap(), other];
            for policy in [
                "exclusive",
                "mps_r",
                "mps",
                "split_40",
                "priority",
                "fast_tokens",
                "dilu_exact",
                "dilu",
                "ours",
            ] {
                for pair in Pair::ALL {
                    let outcome = simulate(policy, pair, &args, 100, &loads, &Own::default()).unwrap();
                    assert_eq!(outcome.latencies.len(), loads[0].len(), "{policy}");
                    let other = if pair.models().1.is_some() {
                        outcome.other.len() == loads[1].len()
                    } else {
                        outcome.trained > 0.0
                    };
                    assert!(other, "{policy}: the other one is not starved");
                }
            }
        }
    }
}
