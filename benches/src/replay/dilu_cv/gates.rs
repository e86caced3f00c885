//! The policies: partitions of the device, and the gate that every launch passes.

use anyhow::{Context, Result, bail};
use gshare_core::token::Share;
use gshare_core::{
    ClientId, Duration, Engine, GpuId, LeaseId, ModelId, Quota, QuotaRange, ServiceClass, SmShare, Timestamp,
    TokenAction, TokenEvent,
};
use gshare_sched::scale::{
    DiluVertical, DiluVerticalConfig, TokenBalance, TokenUnit, VerticalAction, VerticalEvent, VerticalScaler,
};
use gshare_sched::token::{MultiToken, MultiTokenConfig};
use gshare_sim::contended_gpu::LaneKernel;
use gshare_sim::scenario::Own;

/// Tokens of a period: SMs in per cent x microseconds.
const MAX_TOKENS: u64 = 100 * 5_000;

/// Decides when a process may launch. Open unless said otherwise: partitions, or nothing, keep processes apart.
pub(super) trait Gate {
    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }

    /// The gate's deadline has come.
    fn deadline(&mut self, _now: Timestamp) -> Result<()> {
        Ok(())
    }

    /// Tells whether the kernel may be launched now; if so it is paid for. `alone`: no process with priority has work.
    fn admits(&mut self, _now: Timestamp, _lane: usize, _kernel: &LaneKernel, _alone: bool) -> Result<bool> {
        Ok(true)
    }

    /// The last kernel of a batch was launched.
    fn finished(
        &mut self,
        _now: Timestamp,
        _lane: usize,
        _first_launch: Timestamp,
        _batch: usize,
    ) -> Result<()> {
        Ok(())
    }

    /// Gives a token back that is used up, has run out, or is not needed; asks for one that is.
    fn settle(&mut self, _now: Timestamp, _lane: usize, _queued: Duration, _more: bool) -> Result<()> {
        Ok(())
    }
}

/// The gate of policies that let every launch in.
pub(super) struct Open;

impl Gate for Open {}

/// The gate by which the second process launches only while the first has no batch.
struct Priority;

impl Gate for Priority {
    fn admits(&mut self, _: Timestamp, _: usize, _: &LaneKernel, alone: bool) -> Result<bool> {
        Ok(alone)
    }
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
    lanes: [Tokens; 2],
}

/// Tokens of a process: in each period, left of this one, and what was launched since the last report, with the largest of it.
#[derive(Default)]
struct Tokens {
    issued: u64,
    balance: TokenBalance,
    used: u64,
    largest: u64,
}

fn percent(percent: u16) -> Result<Quota> {
    Quota::from_percent(percent).context("a share")
}

fn sm(percent: u16) -> Result<SmShare> {
    SmShare::from_percent(percent).context("a share")
}

fn client(lane: usize) -> ClientId {
    ClientId::new(u32::from(lane > 0), 0)
}

/// A policy by its name: the gate, and the partitions of both.
pub(super) fn policy(
    name: &str,
    max_tokens: u64,
    trains: bool,
    own: &Own,
) -> Result<(Box<dyn Gate>, [SmShare; 2])> {
    let (most, whole) = (if trains { 90 } else { 60 }, [SmShare::WHOLE; 2]);
    let limits = [sm(60)?, sm(most)?];
    let printed = ServiceClass::slo_sensitive(60).context("tolerance")?;
    let learning = |learn| -> Result<Box<dyn VerticalScaler>> {
        let mut config = DiluVerticalConfig::default();
        config.unit = TokenUnit::Blocks;
        config.learn = learn;
        Ok(Box::new(DiluVertical::new(config)?))
    };
    let scaled = |max_tokens, class, engine, limits: [u16; 2]| -> Result<(Box<dyn Gate>, [SmShare; 2])> {
        let beside = if trains { ServiceClass::BestEffort } else { class };
        let periods = Periods::new(engine, max_tokens, [(class, limits[0]), (beside, limits[1])])?;
        Ok((Box::new(periods), whole))
    };
    let tokens = MAX_TOKENS * max_tokens / 100;
    let (sensitive, any) = (ServiceClass::SLO_SENSITIVE, [100, if trains { 90 } else { 100 }]);
    if let Some((_, make)) = own.verticals().find(|(own, _)| *own == name) {
        return scaled(tokens, sensitive, make(), any);
    }
    Ok(match name {
        "mps_r" => (Box::new(Open), [sm(30)?, sm(30)?]),
        "mps_l" => (Box::new(Open), limits),
        "exclusive" | "mps" => (Box::new(Open), whole),
        "priority" => (Box::new(Priority), whole),
        "fast_tokens" => (Box::new(Leases::new(limits)?), limits),
        "dilu" => scaled(MAX_TOKENS * 50, printed, learning(false)?, [60, most])?,
        "dilu_exact" => scaled(tokens, printed, learning(false)?, [60, most])?,
        "ours_limited" => scaled(tokens, sensitive, learning(true)?, [60, most])?,
        "ours" => scaled(tokens, sensitive, learning(true)?, any)?,
        _ => match name.strip_prefix("split_").map(str::parse::<u16>) {
            Some(Ok(part @ 1..=99)) => (Box::new(Open), [sm(part)?, sm(100 - part)?]),
            _ => bail!("--policies: no policy {name}"),
        },
    })
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
}

impl Gate for Leases {
    fn next_deadline(&self) -> Option<Timestamp> {
        self.engine.next_deadline()
    }

    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        self.tell(now, TokenEvent::DeadlineReached)
    }

    fn admits(&mut self, now: Timestamp, lane: usize, kernel: &LaneKernel, _: bool) -> Result<bool> {
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
                        return self.admits(now, lane, kernel, false);
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
    /// Each process with its class and the limit of its quota in per cent.
    fn new(
        engine: Box<dyn VerticalScaler>,
        max_tokens: u64,
        processes: [(ServiceClass, u16); 2],
    ) -> Result<Self> {
        let mut periods = Self { engine, actions: Vec::new(), lanes: Default::default() };
        let gpu = GpuId::new(0);
        let mut tell = |event| periods.engine.handle(Timestamp::ZERO, event, &mut periods.actions);
        tell(VerticalEvent::Calibrated { gpu, max_tokens })?;
        for (lane, (class, limit)) in processes.into_iter().enumerate() {
            let quota = QuotaRange::new(percent(30)?, percent(limit)?)?;
            tell(VerticalEvent::ClientJoined { client: client(lane), gpu, quota, class })?;
        }
        Ok(periods)
    }
}

impl Gate for Periods {
    fn next_deadline(&self) -> Option<Timestamp> {
        self.engine.next_deadline()
    }

    /// A period ends: reports, new tokens.
    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        for (lane, of) in self.lanes.iter_mut().enumerate() {
            let (tokens, largest_kernel) = (std::mem::take(&mut of.used), std::mem::take(&mut of.largest));
            if tokens > 0 {
                let report = VerticalEvent::UsageReported { client: client(lane), tokens, largest_kernel };
                self.engine.handle(now, report, &mut self.actions)?;
            }
        }
        self.engine.handle(now, VerticalEvent::DeadlineReached, &mut self.actions)?;
        for action in self.actions.drain(..) {
            if let VerticalAction::Issue { client, tokens } = action {
                self.lanes[client.index()].issued = tokens;
            }
        }
        for of in &mut self.lanes {
            of.balance.refill(of.issued);
        }
        Ok(())
    }

    fn admits(&mut self, _: Timestamp, lane: usize, kernel: &LaneKernel, _: bool) -> Result<bool> {
        let cost = kernel.duration.as_nanos() / 1_000 * u64::from(kernel.width.get()) / 100;
        let of = &mut self.lanes[lane];
        let may = of.balance.spend(cost);
        if may {
            (of.used, of.largest) = (of.used + cost, of.largest.max(cost));
        } else {
            // A client that waits is not at rest.
            of.used = of.used.max(1);
        }
        Ok(may)
    }

    fn finished(&mut self, now: Timestamp, lane: usize, first_launch: Timestamp, batch: usize) -> Result<()> {
        let (client, batch, model) = (client(lane), u32::try_from(batch)?, ModelId::new(0));
        let event = VerticalEvent::IterationFinished { client, model, batch, first_launch, last_launch: now };
        Ok(self.engine.handle(now, event, &mut self.actions)?)
    }
}
