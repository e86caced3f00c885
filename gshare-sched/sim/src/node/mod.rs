//! A whole node in virtual time: hooked processes, messages, a daemon around any scheduler, and GPUs.
//!
//! # Problem
//! A scheduler may keep its contract to the letter and the node still share badly: messages take time, kernels run over,
//! what a hook believes differs from what the daemon believes, processes die in between. So everything around the
//! scheduler is simulated, up to the device, and what is checked in the end is what the device saw.
//!
//! # Parts
//! ```text
//! hook (gate and ledger of gshare-core) ──message──▶ daemon (the scheduler under audit)
//!    │ launch         ▲ completion                      │ order
//!    ▼                │                                 ▼
//! VirtualGpu ─────────┘                          message ──▶ hook
//! ```
//! - A hook launches while its [`LaunchGate`](gshare_core::gate::LaunchGate) has credit, asks for more ahead of the end,
//!   gives its token back when it is used up and drained, expired, or idle. Kernels run over; costs may be mispredicted.
//! - Messages take time, one way and the other, and do not overtake each other. So a grant may cross a return.
//! - Processes come, leave, are killed, hang, fall silent; shares change.
//!
//! # What is checked
//! Every call, by the [checkers](crate::token::check) that always hold; and the [shares](ShareReport) that the device
//! saw, to one point over any ten windows. Everything follows from one seed; two runs of a seed have the same log hash.

mod hook;
mod plan;
mod shares;

pub use plan::{Behaviours, CLIENTS, GPUS, GpuPlan, NodePlan, Plan, Shape};
pub use shares::{DELIVERED_PERCENT, ERROR_MAX, Errors, SPAN, ShareReport, divide};

use crate::event_queue::EventQueue;
use crate::gpu::{Completion, Kernel, VirtualGpu};
use crate::rng::Rng;
use crate::token::account::Windows;
use crate::token::drive::Driver;
use crate::token::{Terms, Violation, check};
use core::fmt;
use gshare_core::{
    ClientId, Duration, GpuId, LeaseId, Timestamp, TokenAction, TokenError, TokenEvent, TokenScheduler,
};
use hook::{Hook, Launch, Mood, Say};
use shares::Shares;
use std::collections::BTreeMap;

/// What a run of a seed showed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReport {
    /// The seed.
    pub seed: u64,
    /// Clients that were there at one time or another.
    pub clients: u64,
    /// Calls of the scheduler.
    pub calls: u64,
    /// Messages that the scheduler refused, as it may when they cross its orders.
    pub refused: u64,
    /// Kernels that ran.
    pub kernels: u64,
    /// The same for two runs that were the same.
    pub log_hash: u64,
    /// The shares.
    pub shares: ShareReport,
}

/// A seed that shows something wrong.
#[derive(Clone)]
pub struct NodeFailure {
    /// The seed.
    pub seed: u64,
    /// What its run was like.
    pub plan: String,
    /// What was wrong.
    pub violation: Violation,
}

impl fmt::Display for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node, seed {}: {}{}", self.seed, self.violation, self.plan)
    }
}

/// As `Display`, so that `unwrap` in a test prints the picture as a picture.
impl fmt::Debug for NodeFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for NodeFailure {}

/// Runs the node of a seed around a scheduler that has no clients yet, and room for [`CLIENTS`] slots and [`GPUS`].
pub fn run(seed: u64, scheduler: Box<dyn TokenScheduler>, terms: Terms) -> Result<NodeReport, NodeFailure> {
    run_within(seed, scheduler, terms, ERROR_MAX)
}

/// As [`run`], with another bound of the error of a share, in basis points.
pub fn run_within(
    seed: u64,
    scheduler: Box<dyn TokenScheduler>,
    terms: Terms,
    error_max: u64,
) -> Result<NodeReport, NodeFailure> {
    let mut rng = Rng::new(seed);
    let plan = NodePlan::draw(&mut rng);
    let mut node = VirtualNode::new(plan, scheduler, terms, error_max, rng);
    let result = node.run();
    let shares =
        result.map_err(|violation| NodeFailure { seed, plan: format!("{:#?}\n", node.plan), violation })?;
    Ok(NodeReport {
        seed,
        clients: node.joined,
        calls: node.driver.audit().calls(),
        refused: node.refused,
        kernels: node.kernels,
        log_hash: node.driver.audit().log_hash(),
        shares,
    })
}

/// What happens next.
#[derive(Debug, Clone, Copy)]
enum Event {
    /// A process starts: which GPU, which of its plans.
    Starts { gpu: usize, index: usize, slot: u32 },
    /// A message of a hook reaches the daemon.
    Said { client: ClientId, say: Say },
    /// The daemon sees that a process is gone.
    Gone { client: ClientId },
    /// An order of the daemon reaches a hook.
    Told { client: ClientId, order: TokenAction },
    /// A kernel ends somewhere on a GPU.
    Ends { gpu: usize },
    /// A hook learns that its oldest kernel has ended.
    Seen { client: ClientId, measured: Duration },
    /// A hook looks at its lease.
    Wakes { client: ClientId },
    /// A hook that fell silent has been so for a while.
    Idle { client: ClientId },
    /// A process falls silent, or wakes up.
    Turns { client: ClientId },
    /// Something happens to some process.
    Strikes { what: Strike },
}

#[derive(Debug, Clone, Copy)]
enum Strike {
    Leave,
    Kill,
    Hang,
    Change,
}

struct VirtualNode {
    plan: NodePlan,
    terms: Terms,
    rng: Rng,
    queue: EventQueue<Event>,
    driver: Driver,
    gpus: Vec<VirtualGpu>,
    /// When each GPU is looked at next.
    looks: Vec<Option<Timestamp>>,
    hooks: BTreeMap<ClientId, Hook>,
    /// Windows of every client that ever was, for kernels that outlive it.
    windows: BTreeMap<ClientId, Windows>,
    shares: Shares,
    joined: u64,
    refused: u64,
    kernels: u64,
}

/// A silent hook gives its token back after this.
const IDLE: Duration = Duration::from_micros(300);

impl VirtualNode {
    fn new(
        plan: NodePlan,
        scheduler: Box<dyn TokenScheduler>,
        terms: Terms,
        error_max: u64,
        rng: Rng,
    ) -> Self {
        let gpus = plan.gpus.len();
        Self {
            plan,
            terms,
            rng,
            queue: EventQueue::new(),
            driver: Driver::new(scheduler, terms, check::always()),
            gpus: vec![VirtualGpu::new(); gpus],
            looks: vec![None; gpus],
            hooks: BTreeMap::new(),
            windows: BTreeMap::new(),
            shares: Shares::new(error_max),
            joined: 0,
            refused: 0,
            kernels: 0,
        }
    }

    fn run(&mut self) -> Result<ShareReport, Violation> {
        let end = Timestamp::ZERO.saturating_add(self.terms.window.saturating_mul(self.plan.windows));
        self.schedule_starts(end);
        self.schedule_strikes(end);
        loop {
            let deadline = self.driver.scheduler().next_deadline();
            let next = self.queue.next_at().into_iter().chain(deadline).min();
            let Some(now) = next.filter(|&next| next <= end) else { break };
            match self.queue.next_at() == Some(now) {
                true => {
                    if let Some((now, event)) = self.queue.pop() {
                        self.happens(now, event)?;
                    }
                }
                false => {
                    self.driver.must(now, TokenEvent::DeadlineReached)?;
                    self.carry_out(now);
                }
            }
        }
        self.shares.compare(end).map_err(|message| self.driver.audit().violation("shares", end, message))
    }

    fn schedule_starts(&mut self, end: Timestamp) {
        let mut slot = 0;
        for gpu in 0..self.plan.gpus.len() {
            for index in 0..self.plan.gpus[gpu].clients.len() {
                let late = self.plan.behaviours.joins && self.rng.percent(30);
                let latest = if late { end.as_nanos() / 2 } else { 2_000_000 };
                let at = Timestamp::from_nanos(self.rng.below(latest));
                self.queue.schedule(at, Event::Starts { gpu, index, slot });
                slot += 1;
            }
        }
    }

    fn schedule_strikes(&mut self, end: Timestamp) {
        let Behaviours { leaves, kills, hangs, share_changes, .. } = self.plan.behaviours;
        let strikes = [
            (leaves, Strike::Leave),
            (kills, Strike::Kill),
            (hangs, Strike::Hang),
            (share_changes, Strike::Change),
        ];
        for (_, what) in strikes.into_iter().filter(|(on, _)| *on) {
            for _ in 0..self.rng.between(1, 4) {
                let at = Timestamp::from_nanos(self.rng.below(end.as_nanos()));
                self.queue.schedule(at, Event::Strikes { what });
            }
        }
    }

    fn happens(&mut self, now: Timestamp, event: Event) -> Result<(), Violation> {
        match event {
            Event::Starts { gpu, index, slot } => self.start(now, gpu, index, slot)?,
            Event::Said { client, say } => self.said(now, client, say)?,
            Event::Gone { client } => {
                self.driver.must(now, TokenEvent::ClientLeft { client })?;
                self.carry_out(now);
            }
            Event::Told { client, order } => self.told(now, client, order),
            Event::Ends { gpu } => {
                self.looks[gpu] = None;
                self.look(now, gpu);
            }
            Event::Seen { client, measured } => {
                if let Some(hook) = self.hooks.get_mut(&client) {
                    hook.completed(measured);
                }
                self.pump(now, client);
            }
            Event::Wakes { client } => self.pump(now, client),
            Event::Idle { client } => self.idle(now, client),
            Event::Turns { client } => self.turn(now, client),
            Event::Strikes { what } => self.strike(now, what)?,
        }
        Ok(())
    }

    fn start(&mut self, now: Timestamp, gpu: usize, index: usize, slot: u32) -> Result<(), Violation> {
        if self.driver.book().in_slot(slot).is_some() {
            // The one before it is not seen to be gone yet.
            let later = now.saturating_add(Duration::from_millis(1));
            self.queue.schedule(later, Event::Starts { gpu, index, slot });
            return Ok(());
        }
        let client = ClientId::new(slot, self.driver.book().next_generation(slot));
        let home = GpuId(u32::try_from(gpu).unwrap_or(u32::MAX));
        let plan = self.plan.gpus[gpu].clients[index];
        self.driver.must(now, TokenEvent::ClientJoined { client, gpu: home, share: plan.share })?;
        self.carry_out(now);
        let Some(windows) = self.driver.book().windows(home) else { return Ok(()) };
        self.joined += 1;
        self.windows.insert(client, windows);
        self.shares.disturb(now, home);
        let mut hook = Hook::new(home, plan, self.plan.in_flight, self.rng.fork());
        if plan.pauses {
            let first = hook.rng.duration(Duration::from_millis(1), Duration::from_millis(200));
            self.queue.schedule(now.saturating_add(first), Event::Turns { client });
        } else {
            let shape = self.plan.gpus[gpu].shape;
            self.shares.begin(now, client, home, shape, plan.share, windows);
        }
        self.hooks.insert(client, hook);
        self.pump(now, client);
        Ok(())
    }

    /// A message has reached the daemon.
    fn said(&mut self, now: Timestamp, client: ClientId, say: Say) -> Result<(), Violation> {
        let event = match say {
            Say::Request => TokenEvent::TokenRequested { client },
            Say::Return { lease, used, again } => TokenEvent::TokenReturned { client, lease, used, again },
            Say::Report { lease, used } => TokenEvent::UsageReported { client, lease, used },
        };
        match self.driver.call(now, event)? {
            Ok(()) => self.carry_out(now),
            // It crossed an order: the lease was taken back and another given and taken back meanwhile.
            Err(TokenError::StaleLease { .. }) => {
                self.refused += 1;
                if let Say::Return { again: true, .. } = say {
                    self.driver.must(now, TokenEvent::TokenRequested { client })?;
                    self.carry_out(now);
                }
            }
            Err(error) => return Err(self.driver.wrong(format!("{event:?} was refused: {error}"))),
        }
        Ok(())
    }

    /// Sends the orders of the last call on their way.
    fn carry_out(&mut self, now: Timestamp) {
        for order in self.driver.actions().to_vec() {
            let (TokenAction::Grant { client, .. }
            | TokenAction::Revoke { client, .. }
            | TokenAction::Throttle { client, .. }) = order
            else {
                continue;
            };
            let arrives = now.saturating_add(self.rng.duration(self.plan.latency.0, self.plan.latency.1));
            if let Some(hook) = self.hooks.get_mut(&client) {
                hook.heard_until = hook.heard_until.max(arrives);
                self.queue.schedule(hook.heard_until, Event::Told { client, order });
            }
        }
    }

    /// An order has reached a hook.
    fn told(&mut self, now: Timestamp, client: ClientId, order: TokenAction) {
        let mut says = Vec::new();
        let Some(hook) = self.hooks.get_mut(&client) else { return };
        match order {
            TokenAction::Grant { lease, budget, expires, .. } => {
                if let Some(expires) = hook.granted(lease, budget, expires, &mut says) {
                    self.queue.schedule(expires, Event::Wakes { client });
                }
            }
            TokenAction::Revoke { lease, .. } => hook.revoked(lease, &mut says),
            _ => {}
        }
        self.send(now, client, says);
        self.pump(now, client);
    }

    /// Lets a hook do what it can, and sees to what follows.
    fn pump(&mut self, now: Timestamp, client: ClientId) {
        let (mut says, mut launches) = (Vec::new(), Vec::new());
        let Some(hook) = self.hooks.get_mut(&client) else { return };
        hook.pump(now, &mut says, &mut launches);
        if hook.is_idle() {
            self.queue.schedule(now.saturating_add(IDLE), Event::Idle { client });
        }
        let (gpu, sm) = (hook.gpu.index(), hook.plan.share.sm);
        self.send(now, client, says);
        if launches.is_empty() {
            return;
        }
        self.look(now, gpu);
        for Launch { lease: LeaseId(tag), duration } in launches {
            self.gpus[gpu].launch(now, Kernel { client, tag, duration, sm });
        }
        self.look(now, gpu);
    }

    fn send(&mut self, now: Timestamp, client: ClientId, says: Vec<Say>) {
        for say in says {
            let arrives = now.saturating_add(self.rng.duration(self.plan.latency.0, self.plan.latency.1));
            let Some(hook) = self.hooks.get_mut(&client) else { return };
            hook.said_until = hook.said_until.max(arrives);
            self.queue.schedule(hook.said_until, Event::Said { client, say });
        }
    }

    /// Brings a GPU up to date.
    fn look(&mut self, now: Timestamp, gpu: usize) {
        let mut completed = Vec::new();
        self.gpus[gpu].advance(now, &mut completed);
        for Completion { kernel, started, ended } in completed {
            self.kernels += 1;
            let client = kernel.client;
            if let Some(windows) = self.windows.get(&client) {
                self.shares.ran(client, *windows, started, ended);
            }
            let seen = ended.saturating_add(self.plan.observe);
            self.queue.schedule(seen, Event::Seen { client, measured: ended.saturating_since(started) });
        }
        if let Some(next) = self.gpus[gpu].next_completion()
            && self.looks[gpu].is_none_or(|look| next < look)
        {
            self.looks[gpu] = Some(next);
            self.queue.schedule(next, Event::Ends { gpu });
        }
    }

    fn idle(&mut self, now: Timestamp, client: ClientId) {
        let mut says = Vec::new();
        if let Some(hook) = self.hooks.get_mut(&client)
            && hook.is_idle()
        {
            hook.give_back(false, &mut says);
        }
        self.send(now, client, says);
    }

    fn turn(&mut self, now: Timestamp, client: ClientId) {
        let Some(hook) = self.hooks.get_mut(&client) else { return };
        hook.mood = match hook.mood {
            Mood::Busy => Mood::Silent,
            Mood::Silent => Mood::Busy,
            Mood::Hung => return,
        };
        let next = hook.rng.duration(Duration::from_millis(1), Duration::from_millis(300));
        self.queue.schedule(now.saturating_add(next), Event::Turns { client });
        self.pump(now, client);
    }

    fn strike(&mut self, now: Timestamp, what: Strike) -> Result<(), Violation> {
        let clients: Vec<ClientId> = self.hooks.keys().copied().collect();
        let Some(&client) = self.rng.pick(&clients) else { return Ok(()) };
        let Some(hook) = self.hooks.get_mut(&client) else { return Ok(()) };
        let home = hook.gpu;
        match what {
            Strike::Hang => {
                hook.mood = Mood::Hung;
                self.shares.end(now, client);
                self.shares.disturb(now, home);
            }
            Strike::Change => {
                let share = self.plan.gpus[home.index()].smaller_share(hook.plan.share, &mut self.rng);
                hook.plan.share = share;
                let measured = !hook.plan.pauses && hook.mood != Mood::Hung;
                self.driver.must(now, TokenEvent::ShareChanged { client, share })?;
                self.carry_out(now);
                self.shares.end(now, client);
                self.shares.disturb(now, home);
                if let Some(windows) = self.windows.get(&client).filter(|_| measured) {
                    let shape = self.plan.gpus[home.index()].shape;
                    self.shares.begin(now, client, home, shape, share, *windows);
                }
            }
            Strike::Leave | Strike::Kill => {
                let mut says = Vec::new();
                if matches!(what, Strike::Leave) && hook.mood != Mood::Hung {
                    hook.give_back(false, &mut says);
                }
                self.send(now, client, says);
                let Some(hook) = self.hooks.remove(&client) else { return Ok(()) };
                self.gpus[home.index()].drop_queue(client);
                self.shares.end(now, client);
                self.shares.disturb(now, home);
                let seen = now.saturating_add(self.plan.latency.1).max(hook.said_until);
                self.queue.schedule(seen, Event::Gone { client });
                self.restart(now, home, client);
            }
        }
        Ok(())
    }

    /// Half of those that are gone come again, in the same slot.
    fn restart(&mut self, now: Timestamp, home: GpuId, client: ClientId) {
        if !self.rng.percent(50) {
            return;
        }
        let before: usize = self.plan.gpus[..home.index()].iter().map(|gpu| gpu.clients.len()).sum();
        let index = client.index() - before;
        let at = now.saturating_add(self.rng.duration(Duration::ZERO, Duration::from_millis(500)));
        self.queue.schedule(at, Event::Starts { gpu: home.index(), index, slot: client.slot() });
    }
}
