//! The policies: partitions of the device, and the gate that every launch passes.

use anyhow::{Context, Result, bail};
use gshare_core::token::Share;
use gshare_core::{
    ClientId, Duration, Engine, GpuId, ModelId, Quota, QuotaRange, ServiceClass, SmShare, Timestamp,
    TokenAction, TokenEvent, UseState,
};
use gshare_sched::scale::{
    DiluVertical, DiluVerticalConfig, TokenBalance, VerticalAction, VerticalEvent, VerticalScaler,
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

    /// Gives a token back if it is used up, has run out, or is not needed; asks for a token if one is needed.
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
struct Shared {
    engine: MultiToken,
    actions: Vec<TokenAction>,
    /// The total that each may launch, and until when.
    allowed: [Option<(Duration, Timestamp)>; 2],
    asked: [bool; 2],
    /// Predicted time of all launches.
    launched: [Duration; 2],
}

/// Both processes as clients of the co-scaler.
struct Periods {
    engine: Box<dyn VerticalScaler>,
    actions: Vec<VerticalAction>,
    lanes: [Tokens; 2],
}

/// Tokens of a process: issued in each period, left of this period, and launched since the last report, with the largest launch.
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
        "fast_tokens" => (Box::new(Shared::new(limits)?), limits),
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

impl Shared {
    fn new(partitions: [SmShare; 2]) -> Result<Self> {
        let engine = MultiToken::new(MultiTokenConfig::default())?;
        let (allowed, asked, launched) = ([None; 2], [false; 2], [Duration::ZERO; 2]);
        let mut shared = Self { engine, actions: Vec::new(), allowed, asked, launched };
        for (lane, sm) in partitions.into_iter().enumerate() {
            let share = Share { quota: QuotaRange::new(percent(50)?, percent(100)?)?, sm };
            let joined = TokenEvent::ClientJoined { client: client(lane), gpu: GpuId::new(0), share };
            shared.tell(Timestamp::ZERO, joined)?;
        }
        Ok(shared)
    }

    fn tell(&mut self, now: Timestamp, event: TokenEvent) -> Result<()> {
        self.engine.handle(now, event, &mut self.actions)?;
        for action in self.actions.drain(..) {
            match action {
                TokenAction::Allow { client, allowed, until } => {
                    self.allowed[client.index()] = Some((allowed, until));
                    self.asked[client.index()] = false;
                }
                TokenAction::Stop { client } => self.allowed[client.index()] = None,
                _ => {}
            }
        }
        Ok(())
    }
}

impl Gate for Shared {
    fn next_deadline(&self) -> Option<Timestamp> {
        self.engine.next_deadline()
    }

    fn deadline(&mut self, now: Timestamp) -> Result<()> {
        self.tell(now, TokenEvent::DeadlineReached)
    }

    fn admits(&mut self, now: Timestamp, lane: usize, kernel: &LaneKernel, _: bool) -> Result<bool> {
        match self.allowed[lane] {
            Some((allowed, until)) if self.launched[lane] < allowed && now < until => {
                self.launched[lane] = self.launched[lane].saturating_add(kernel.duration);
                Ok(true)
            }
            Some(_) => Ok(false),
            None => {
                if !self.asked[lane] {
                    self.says(now, lane, true)?;
                    if self.allowed[lane].is_some() {
                        return self.admits(now, lane, kernel, false);
                    }
                }
                Ok(false)
            }
        }
    }

    fn settle(&mut self, now: Timestamp, lane: usize, queued: Duration, more: bool) -> Result<()> {
        let Some((allowed, until)) = self.allowed[lane] else { return Ok(()) };
        let over = self.launched[lane] >= allowed || now >= until || !more;
        if over && queued.is_zero() {
            self.allowed[lane] = None;
            self.says(now, lane, more)?;
        }
        Ok(())
    }
}

impl Shared {
    /// A process holds no token, and wants one or not.
    fn says(&mut self, now: Timestamp, lane: usize, wants: bool) -> Result<()> {
        self.asked[lane] = wants;
        let state = if wants { UseState::Wants } else { UseState::Idle };
        self.tell(now, TokenEvent::Used { client: client(lane), used: self.launched[lane], state })
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
