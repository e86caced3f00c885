//! The accounts and leases of the policies that settle quotas by window: who has used what, who holds what, who waits.
//!
//! [`MultiToken`](super::MultiToken) and [`SlotScheduler`](super::SlotScheduler) differ in the client that they serve next, and
//! in nothing else: both keep one [`Ledger`]. It does steps 1 and 2 of an event (see [`multi_token`](super::multi_token)),
//! marks the GPUs on which a client may now be served ([`Gpu::dirty`]), and carries out a grant. The policy dispatches.
//!
//! # Invariants
//! - holders' SMs + free SMs = the whole;
//! - a client is at most one of: ready, paced, throttled; only waiting clients are any of these;
//! - every holder is in the table of release times.
//!
//! # Cost
//! O(log n) per event for n clients on the GPU, O(n log n) once a window and for what is reported late of the window before.
//! About 250 bytes per client.

use super::MultiTokenConfig;
use gshare_core::slots::NamedSlots;
use gshare_core::token::{ClientStatus, RevokeReason, ThrottleReason};
use gshare_core::{
    ClientId, ConfigError, Duration, GpuId, LeaseId, Quota, Share, SmShare, SpecError, TimeWentBack,
    Timestamp, TokenAction, TokenError, TokenEvent,
};
use std::collections::BTreeSet;

/// Accounts, leases and queues of all GPUs. See the [module](self).
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) config: MultiTokenConfig,
    pub(super) now: Timestamp,
    next_lease: u64,
    next_request: u64,
    pub(super) clients: NamedSlots<ClientId, Client>,
    pub(super) gpus: Vec<Gpu>,
    /// Whether lag is what clients occupy by the clock, and counts in the next window; or else what they are charged, in each.
    by_clock: bool,
}

/// A lease as the engine keeps it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lease {
    pub(super) id: LeaseId,
    /// Number of the window it belongs to.
    pub(super) window: u64,
    pub(super) budget: Duration,
    /// GPU time charged for it so far.
    pub(super) charged: Duration,
    pub(super) expires: Timestamp,
    /// When it was granted, not extended.
    pub(super) since: Timestamp,
    /// The part of its client's lag that was taken for it so far.
    occupied: Duration,
    /// SMs counted for it.
    pub(super) sm: u16,
}

impl Lease {
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        if self.window == window { self.budget.saturating_sub(self.charged) } else { Duration::ZERO }
    }

    /// Counts what was charged beyond what it has occupied as occupied, and answers how much that is.
    fn take_charged(&mut self) -> Duration {
        let beyond = self.charged.saturating_sub(self.occupied);
        self.occupied = self.occupied.saturating_add(beyond);
        beyond
    }

    /// GPU time that it will take beyond what it has occupied, if all of it is used.
    fn left_to_occupy(&self, window: u64) -> Duration {
        let whole = if self.window == window { self.budget.max(self.charged) } else { self.charged };
        whole.saturating_sub(self.occupied)
    }
}

/// A time that is less than 292 years, to be compared with others.
fn signed(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// How much of a window of this `length` a limit takes to pay `overuse` back; at most all of it.
fn paid_back(length: Duration, overuse: Duration, limit: Duration) -> Duration {
    length.scaled(overuse.min(limit).as_nanos(), limit.as_nanos())
}

/// Time beyond a `request` of which `used` was used, with a `lag` that is below zero by what was occupied beyond it. Hand-overs
/// cost those more who get many short tokens, so it is what was used; but a host that pauses pays for half of what it occupied.
fn beyond(used: Duration, request: Duration, lag: i64) -> Duration {
    used.saturating_sub(request).max(Duration::from_nanos(lag.min(0).unsigned_abs() / 2))
}

/// The window before this one, as far as it is known: what is charged late changes the overuse that it left.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    used: Duration,
    request: Duration,
    /// The largest that was in force.
    limit: Duration,
    /// Missed time of earlier windows that was carried into it.
    brought: Duration,
    /// Its lag at the end.
    lag: Duration,
    /// Overuse of its share that was forgiven, zero or less; `None` if nothing of this window counts as surplus.
    forgiven: Option<i64>,
}

impl Past {
    fn overuse(&self) -> Duration {
        self.used.saturating_sub(self.limit.saturating_add(self.brought))
    }

    /// GPU time of this window that counts as surplus.
    fn surplus(&self) -> Duration {
        self.forgiven.map_or(Duration::ZERO, |forgiven| beyond(self.used, self.request, forgiven))
    }

    /// The part of its lag by which it missed its request.
    fn missed(&self) -> Duration {
        self.request.saturating_add(self.brought).saturating_sub(self.used).min(self.lag)
    }
}

/// Place of a ready client in the order of dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) ineligible: bool,
    /// Eligible: minus its lag in proportion to its request, less a part of the time that it waits. Ineligible: time beyond its
    /// request in proportion to its limit.
    pub(super) key: i64,
    pub(super) asked: u64,
    pub(super) slot: u32,
}

/// A whole request, and a whole window, in the order of dispatch.
const WHOLE: i64 = 1 << 16;
/// The time that a client waits counts as lag by this divisor, up to `AGED` windows. Whole kernels divide windows into equal
/// parts but for microseconds: the longer wait decides then.
const AGING: i64 = 12;
const AGED: u64 = 4;

/// Where a client is filed. Only one that waits is filed anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filed {
    Nowhere,
    Ready(Rank),
    /// Ready from then on.
    Paced(Timestamp),
    Throttled,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) id: ClientId,
    pub(super) gpu: usize,
    pub(super) share: Share,
    pub(super) request: Duration,
    pub(super) limit: Duration,
    /// The largest limit in force in this window.
    pub(super) largest: Duration,
    pub(super) used: Duration,
    /// The overuse that was brought into this window.
    carried: Duration,
    past: Past,
    /// GPU time that it is short of its share, in ns; below zero: beyond it.
    lag: i64,
    /// The lag of earlier windows that its limit of this one was raised by.
    brought: Duration,
    /// The client came or its share changed in this window: it may lack a part of a whole one.
    fresh: bool,
    /// Time beyond its request that no other client claimed, fading.
    pub(super) surplus: Duration,
    pub(super) total: Duration,
    /// Serial number and time of the request that this token answered.
    answered: (u64, Timestamp),
    pub(super) holds: Option<Lease>,
    /// The lease before the one it holds, until it is settled.
    pub(super) unsettled: Option<Lease>,
    /// Serial number and time of the request that has not been answered by a grant.
    pub(super) asked: Option<(u64, Timestamp)>,
    pub(super) filed: Filed,
    /// Whether it was notified that it is throttled.
    pub(super) notified: bool,
}

impl Client {
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        self.holds.map_or(Duration::ZERO, |lease| lease.outstanding(window))
    }

    /// GPU time charged for its lease that cannot have run yet: a kernel is charged when it is launched.
    pub(super) fn running(&self, now: Timestamp) -> Duration {
        self.holds
            .map_or(Duration::ZERO, |lease| lease.charged.saturating_sub(now.saturating_since(lease.since)))
    }

    /// How long what it holds still runs at least.
    pub(super) fn left(&self, window: u64, now: Timestamp) -> Duration {
        self.outstanding(window).max(self.running(now))
    }

    pub(super) fn committed(&self, window: u64) -> Duration {
        self.used.saturating_add(self.outstanding(window))
    }

    /// Takes what its lease has occupied by `now` off its lag.
    fn occupy(&mut self, now: Timestamp) {
        let Some(lease) = &mut self.holds else { return };
        let more = now.saturating_since(lease.since).saturating_sub(lease.occupied);
        lease.occupied = lease.occupied.saturating_add(more);
        self.lag = self.lag.saturating_sub(signed(more));
    }

    /// Its lag once all is used that it holds.
    fn lag_then(&self, gpu: &Gpu) -> i64 {
        if gpu.by_clock {
            self.lag.saturating_sub(self.holds.map_or(0, |lease| signed(lease.left_to_occupy(gpu.window))))
        } else {
            signed(self.request).saturating_sub(signed(self.committed(gpu.window)))
        }
    }

    fn wants(&self) -> bool {
        self.asked.is_some() || self.holds.is_some()
    }

    /// Minus the overuse that it carries, as far as the GPU time of that is over: at most this lag goes with it. Zero or less,
    /// or no bound at all.
    fn debt(&self) -> i64 {
        let running = self.holds.map_or(Duration::ZERO, |lease| lease.charged.saturating_sub(lease.occupied));
        match self.carried.saturating_sub(running) {
            Duration::ZERO => i64::MAX,
            debt => -signed(debt),
        }
    }

    /// The lag that it may keep at the end of a window. A client that wanted nothing, or came in that window, has missed nothing.
    fn carried_lag(&self) -> i64 {
        let most = if self.wants() && !self.fresh { signed(self.request) } else { 0 };
        self.lag.min(most).min(self.debt())
    }

    /// Keeps `lag` of what its lag was at the end of the last one.
    fn begin_window(&mut self, lag: i64) {
        self.past.forgiven = Some(self.lag.min(0).saturating_sub(lag.min(0)));
        self.surplus = self.surplus.saturating_add(self.past.surplus());
        self.past.lag = Duration::from_nanos(u64::try_from(lag).unwrap_or(0));
        self.brought = self.past.missed();
        self.lag = lag.saturating_add(signed(self.request));
        self.fresh = false;
    }

    /// Lag that may be made up for at once, where others wait.
    pub(super) fn miss(&self, gpu: &Gpu) -> Duration {
        Duration::from_nanos(u64::try_from(self.lag_then(gpu)).unwrap_or(0))
    }

    /// At the end of `windows` windows in which nothing happened after the first.
    fn end_windows(&mut self, windows: u64) {
        let (used, request, limit) = (self.used, self.request, self.largest);
        self.past = Past { used, request, limit, brought: self.brought, lag: Duration::ZERO, forgiven: None };
        self.brought = Duration::ZERO;
        self.used = self.past.overuse().saturating_sub(self.limit.saturating_mul(windows - 1));
        self.largest = self.limit;
        self.carried = self.used;
        for _ in 0..windows.min(FORGOTTEN) {
            self.surplus -= Duration::from_nanos(self.surplus.as_nanos().div_ceil(8));
        }
        if windows > FORGOTTEN {
            self.surplus = Duration::ZERO;
        }
    }

    pub(super) fn remain(&self, window: u64) -> Duration {
        self.limit.saturating_add(self.brought).saturating_sub(self.committed(window))
    }

    /// The SMs of its next token: those of the lease that is extended, or else of its share.
    pub(super) fn token_sm(&self, window: u64) -> u16 {
        let extended = self.holds.filter(|lease| lease.window == window);
        extended.map_or(self.share.sm.get(), |lease| lease.sm)
    }

    /// Where the client belongs now.
    fn file(&self, gpu: &Gpu) -> Filed {
        let &Gpu { window, window_end, length, .. } = gpu;
        let Some((asked, since)) = self.asked else { return Filed::Nowhere };
        if self.remain(window).is_zero() {
            return Filed::Throttled;
        }
        if gpu.undersubscribed {
            let resumes = gpu.start().saturating_add(paid_back(length, self.carried, self.largest));
            if gpu.now < resumes {
                return Filed::Paced(resumes);
            }
        }
        let lag = self.lag_then(gpu);
        let ineligible = lag <= 0;
        let key = if ineligible {
            let beyond = self.surplus.saturating_add(beyond(self.committed(window), self.request, lag));
            signed(beyond).saturating_mul(WHOLE) / signed(self.limit).max(1)
        } else if self.holds.is_some_and(|lease| lease.window != window) {
            // A kernel under a lease of an earlier window may not be charged yet.
            i64::MAX
        } else {
            let request = signed(self.request).max(1);
            let waited = signed(window_end.saturating_since(since).min(length.saturating_mul(AGED)));
            // An hour and five windows in ns at most, times 65,536: fits.
            -(lag.saturating_mul(WHOLE) / request) - waited * (WHOLE / AGING) / signed(length)
        };
        Filed::Ready(Rank { ineligible, key, asked, slot: self.id.slot() })
    }
}

#[derive(Debug, Default)]
pub(super) struct Gpu {
    /// Clients on this GPU, by slot.
    pub(super) clients: Vec<u32>,
    pub(super) window: u64,
    pub(super) window_end: Timestamp,
    /// Length of a window.
    pub(super) length: Duration,
    /// See the ledger's.
    by_clock: bool,
    /// As far as its clients are filed.
    now: Timestamp,
    /// Whether the limits of its clients left time over when this window began.
    undersubscribed: bool,
    pub(super) free: u16,
    pub(super) ready: BTreeSet<Rank>,
    /// Clients that wait until part of what they carry is paid back: until when, and the slot.
    paced: BTreeSet<(Timestamp, u32)>,
    pub(super) throttled: u32,
    /// When each holder's SMs come back at the latest, and its slot.
    pub(super) releases: BTreeSet<(Timestamp, u32)>,
    /// Something changed since the last dispatch.
    pub(super) dirty: bool,
    /// Clients came, left or changed in this window: their surplus says nothing about those that are there now.
    pub(super) reshuffled: bool,
}

impl Gpu {
    fn new(length: Duration, by_clock: bool) -> Self {
        Self { free: SmShare::WHOLE.get(), length, by_clock, ..Self::default() }
    }

    /// Start of this window.
    fn start(&self) -> Timestamp {
        self.window_end.saturating_sub(self.length)
    }

    /// Moves a client to where it belongs now.
    fn refile(&mut self, client: &mut Client) {
        let filed = client.file(self);
        if filed == client.filed {
            return;
        }
        match client.filed {
            Filed::Ready(rank) => {
                self.ready.remove(&rank);
            }
            Filed::Paced(until) => {
                self.paced.remove(&(until, client.id.slot()));
            }
            Filed::Throttled => self.throttled -= 1,
            Filed::Nowhere => {}
        }
        match filed {
            Filed::Ready(rank) => {
                self.ready.insert(rank);
            }
            Filed::Paced(until) => {
                self.paced.insert((until, client.id.slot()));
            }
            Filed::Throttled => self.throttled += 1,
            Filed::Nowhere => {}
        }
        client.notified &= filed == Filed::Throttled;
        client.filed = filed;
    }
}

/// Windows without any event after which surplus time is forgotten altogether: it bounds the work of catching up, and of
/// ten seconds used beyond the request nothing is left by then.
const FORGOTTEN: u64 = 320;

impl Ledger {
    /// No clients. `by_clock`: see the field.
    pub(super) fn new(config: MultiTokenConfig, by_clock: bool) -> Result<Self, ConfigError> {
        config.validate()?;
        let (clients, gpus) = (NamedSlots::default(), Vec::new());
        Ok(Self { config, now: Timestamp::ZERO, next_lease: 0, next_request: 0, clients, gpus, by_clock })
    }

    /// Steps 1 and 2 of an event. The GPUs that it marks dirty are then to be dispatched.
    pub(super) fn account(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.check(now, &event)?;
        self.catch_up(now, actions);
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => self.join(now, client, gpu, share),
            TokenEvent::ShareChanged { client, share } => {
                let window = self.config.window;
                if let Some((known, gpu)) = self.pair(client.slot()) {
                    known.share = share;
                    let request = share.quota.request().of(window);
                    known.lag =
                        known.lag.saturating_add(signed(request)).saturating_sub(signed(known.request));
                    (known.request, known.fresh) = (request, true);
                    known.limit = share.quota.limit().of(window);
                    known.largest = known.largest.max(known.limit);
                    gpu.refile(known);
                    (gpu.dirty, gpu.reshuffled) = (true, true);
                }
                self.tell(client.slot(), actions);
            }
            TokenEvent::ClientLeft { client } => {
                if let Some((_, gpu)) = self.pair(client.slot()) {
                    (gpu.dirty, gpu.reshuffled) = (true, true);
                }
                self.leave(client.slot());
            }
            TokenEvent::TokenRequested { client } => {
                self.ask(client.slot(), false);
                self.tell(client.slot(), actions);
            }
            TokenEvent::TokenReturned { client, lease, used, again } => {
                self.settle(client.slot(), lease, used);
                if let Some((known, gpu)) = self.pair(client.slot()) {
                    gpu.dirty = true;
                    if known.holds.is_some_and(|held| held.id == lease) {
                        self.release(client.slot());
                    }
                }
                // Returned is returned: a second return of it is stale.
                if let Some((known, _)) = self.pair(client.slot())
                    && known.unsettled.is_some_and(|earlier| earlier.id == lease)
                {
                    known.unsettled = None;
                }
                if again {
                    self.ask(client.slot(), used.is_zero());
                }
                self.tell(client.slot(), actions);
            }
            TokenEvent::UsageReported { client, lease, used } => {
                self.settle(client.slot(), lease, used);
                if let Some((_, gpu)) = self.pair(client.slot()) {
                    gpu.dirty = true;
                }
                self.tell(client.slot(), actions);
            }
            // A deadline has been dealt with by catching up.
            _ => {}
        }
        Ok(())
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        let of_gpu = |gpu: &Gpu| {
            let release = gpu.releases.first().map(|&(release, _)| release);
            let roll = (gpu.throttled > 0 || !gpu.ready.is_empty()).then_some(gpu.window_end);
            let resumes = gpu.paced.first().map(|&(until, _)| until);
            release.into_iter().chain(roll).chain(resumes).min()
        };
        self.gpus.iter().filter_map(of_gpu).min()
    }

    pub(super) fn status(&self, client: ClientId) -> Option<ClientStatus> {
        let known = self.get(client).ok()?;
        let gpu = GpuId::new(u32::try_from(known.gpu).ok()?);
        let mut status = ClientStatus::joined(client, gpu, known.share);
        status.window_used = known.used;
        status.total_used = known.total;
        status.holds = known.holds.map(|lease| lease.id);
        status.waiting_since = known.asked.map(|(_, since)| since);
        Some(status)
    }

    pub(super) fn get(&self, id: ClientId) -> Result<&Client, TokenError> {
        self.clients.get(id).ok_or(TokenError::UnknownClient { client: id })
    }

    /// Refuses what cannot be done, before anything is changed.
    fn check(&self, now: Timestamp, event: &TokenEvent) -> Result<(), TokenError> {
        TimeWentBack::check(now, self.now)?;
        let share_is_sound = |client, share: &Share| match share.sm {
            SmShare::ZERO => Err(TokenError::BadShare { client, cause: SpecError::ZeroSm }),
            _ => Ok(()),
        };
        match *event {
            TokenEvent::ClientJoined { client, gpu, ref share } => {
                share_is_sound(client, share)?;
                if client.slot() >= self.config.max_clients {
                    return Err(TokenError::TooManyClients { client, limit: self.config.max_clients });
                }
                if gpu.number() >= self.config.max_gpus {
                    return Err(TokenError::UnknownGpu { gpu, limit: self.config.max_gpus });
                }
                if self.clients.takes(client) { Ok(()) } else { Err(TokenError::ClientExists { client }) }
            }
            TokenEvent::ShareChanged { client, ref share } => {
                self.get(client)?;
                share_is_sound(client, share)
            }
            TokenEvent::ClientLeft { client }
            | TokenEvent::TokenRequested { client }
            | TokenEvent::SlotAssigned { client, .. } => self.get(client).map(|_| ()),
            TokenEvent::TokenReturned { client, lease, used, .. }
            | TokenEvent::UsageReported { client, lease, used } => {
                let known = self.get(client)?;
                match (known.holds, known.unsettled) {
                    (Some(held), _) if held.id == lease => {
                        if used < held.charged {
                            return Err(TokenError::UsageShrank { client, used, reported: held.charged });
                        }
                        Ok(())
                    }
                    (_, Some(earlier)) if earlier.id == lease => Ok(()),
                    _ => Err(TokenError::StaleLease { client, lease }),
                }
            }
            _ => Ok(()),
        }
    }

    /// The client in a slot, with its GPU.
    fn pair(&mut self, slot: u32) -> Option<(&mut Client, &mut Gpu)> {
        let client = self.clients.at_mut(slot)?;
        let gpu = self.gpus.get_mut(client.gpu)?;
        Some((client, gpu))
    }

    /// Step 1: everything that happened by itself until `now`, in the order of time.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<TokenAction>) {
        let before = core::mem::replace(&mut self.now, now);
        for index in 0..self.gpus.len() {
            self.gpus[index].now = now;
            while let Some(&(release, slot)) = self.gpus[index].releases.first() {
                if release > now {
                    break;
                }
                self.roll(index, release);
                // The lease ends then, however late that is looked at.
                self.now = release.max(before);
                self.expire(slot, actions);
            }
            self.now = now;
            self.roll(index, now);
            while let Some(&(_, slot)) = self.gpus[index].paced.first().filter(|paced| paced.0 <= now) {
                let Some((client, gpu)) = self.pair(slot) else { break };
                gpu.dirty = true;
                gpu.refile(client);
            }
        }
    }

    /// Closes the windows of a GPU that end at or before `now`.
    fn roll(&mut self, index: usize, now: Timestamp) {
        let gpu = &mut self.gpus[index];
        if now < gpu.window_end {
            return;
        }
        let window = self.config.window;
        let windows = now.saturating_since(gpu.window_end).as_nanos() / window.as_nanos() + 1;
        gpu.window += windows;
        gpu.window_end = gpu.window_end.saturating_add(window.saturating_mul(windows));
        gpu.dirty = true;
        let reshuffled = core::mem::take(&mut gpu.reshuffled);
        let clients = core::mem::take(&mut gpu.clients);
        let limits = clients.iter().filter_map(|&slot| self.clients.at(slot));
        let limits: u32 = limits.map(|client| u32::from(client.share.quota.limit().get())).sum();
        self.gpus[index].undersubscribed = self.by_clock && limits < u32::from(Quota::WHOLE.get());
        let end = self.gpus[index].start();
        for &slot in &clients {
            if let Some((client, _)) = self.pair(slot) {
                client.occupy(end);
                client.end_windows(windows);
            }
        }
        self.carry_lags(&clients, windows == 1);
        for &slot in &clients {
            if let Some((client, gpu)) = self.pair(slot) {
                if reshuffled || windows > 1 {
                    (client.surplus, client.past.forgiven) = (Duration::ZERO, None);
                }
                gpu.refile(client);
            }
        }
        self.gpus[index].clients = clients;
    }

    /// Decides which part of their lags the clients of a GPU keep beyond the end of a window; none unless it `counts`.
    fn carry_lags(&mut self, clients: &[u32], counts: bool) {
        let (mut behind, mut ahead, mut requests) = (0_i128, 0_i128, 0_i128);
        for &slot in clients {
            let Some((client, gpu)) = self.pair(slot) else { continue };
            let kept = if counts && gpu.by_clock { client.carried_lag() } else { 0 };
            client.lag = kept;
            behind += i128::from(kept.max(0));
            ahead += i128::from(kept.min(0).unsigned_abs());
            if client.wants() {
                requests += i128::from(signed(client.request));
            }
        }
        for &slot in clients {
            let Some((client, _)) = self.pair(slot) else { continue };
            let lag = i128::from(client.lag);
            let lag = if behind > ahead && client.wants() {
                // The difference was lost to all of them alike.
                lag - (behind - ahead) * i128::from(signed(client.request)) / requests.max(1)
            } else if ahead > behind && lag < 0 {
                // The difference was taken from no client.
                lag * behind / ahead
            } else {
                lag
            };
            let lag = i64::try_from(lag).unwrap_or(0).min(client.debt());
            client.begin_window(lag);
        }
    }

    /// Takes a token back that was neither returned nor replaced in time.
    fn expire(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let Some((client, gpu)) = self.pair(slot) else { return };
        let Some(lease) = client.holds else { return };
        gpu.dirty = true;
        actions.push(TokenAction::Revoke {
            client: client.id,
            lease: lease.id,
            reason: RevokeReason::Expired,
        });
        self.settle(slot, lease.id, lease.budget.max(lease.charged));
        self.release(slot);
    }

    /// Step 2: counts `used` as the GPU time of a lease in all. It was checked to be held, or the one before.
    fn settle(&mut self, slot: u32, lease: LeaseId, used: Duration) {
        let max_debt = self.config.max_debt;
        let Some((client, gpu)) = self.pair(slot) else { return };
        let (record, is_held) = match (&mut client.holds, &mut client.unsettled) {
            (Some(held), _) if held.id == lease => (held, true),
            (_, Some(earlier)) if earlier.id == lease => (earlier, false),
            _ => return,
        };
        // A revoked lease was charged in full: its late return may also give time back.
        let (more, less) = (used.saturating_sub(record.charged), record.charged.saturating_sub(used));
        record.charged = used;
        if !is_held {
            client.lag = client.lag.saturating_sub(signed(record.take_charged()));
        }
        let shift =
            |time: Duration, more: Duration, less: Duration| time.saturating_add(more).saturating_sub(less);
        client.total = shift(client.total, more, less);
        if record.window + 1 == gpu.window {
            // The use of the window before this one matters only for what that window left.
            let known = client.past;
            client.past.used = shift(known.used, more, less);
            let past = client.past;
            client.used = shift(client.used, past.overuse(), known.overuse());
            client.carried = shift(client.carried, past.overuse(), known.overuse());
            client.brought = past.missed();
            client.surplus = shift(client.surplus, past.surplus(), known.surplus());
        } else if record.window == gpu.window {
            client.used = shift(client.used, more, less);
        } else {
            // Too late for its window: what is owed is owed, but time given back there is none of this window's.
            client.used = client.used.saturating_add(more);
        }
        client.used = client.used.min(client.limit.saturating_add(max_debt));
        client.lag = client.lag.max(-signed(max_debt));
        let now = self.now;
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.occupy(now);
        gpu.refile(client);
    }

    /// Ends what the client holds: its SMs are free. The lease may still be settled late.
    fn release(&mut self, slot: u32) {
        let (grace, now) = (self.config.grace, self.now);
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.occupy(now);
        let Some(mut lease) = client.holds.take() else { return };
        client.lag = client.lag.saturating_sub(signed(lease.take_charged()));
        gpu.free += lease.sm;
        gpu.releases.remove(&(lease.expires.saturating_add(grace), slot));
        client.unsettled = Some(lease);
        gpu.refile(client);
    }

    /// A client waits from now on, if it does not yet; `unused`: for what it could not use, in its old place.
    fn ask(&mut self, slot: u32, unused: bool) {
        self.next_request += 1;
        let (number, now) = (self.next_request, self.now);
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.occupy(now);
        client.asked.get_or_insert(if unused { client.answered } else { (number, now) });
        gpu.dirty = true;
        gpu.refile(client);
    }

    /// Tells a throttled client once, when it is certain: not while a lease that it holds may leave it time.
    fn tell(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let window = self.config.window;
        let Some((client, gpu)) = self.pair(slot) else { return };
        if client.filed != Filed::Throttled
            || client.notified
            || client.used < client.limit.saturating_add(client.brought)
        {
            return;
        }
        client.notified = true;
        // Each window pays back its limit; time is left once what is carried is below it.
        let carried = client.used.saturating_sub(client.largest.saturating_add(client.brought));
        let windows = carried.as_nanos() / client.limit.as_nanos().max(1);
        let until = gpu.window_end.saturating_add(window.saturating_mul(windows));
        actions.push(TokenAction::Throttle {
            client: client.id,
            until,
            reason: ThrottleReason::LimitReached,
        });
    }

    fn join(&mut self, now: Timestamp, id: ClientId, gpu: GpuId, share: Share) {
        while self.gpus.len() <= gpu.index() {
            self.gpus.push(Gpu::new(self.config.window, self.by_clock));
        }
        let home = &mut self.gpus[gpu.index()];
        if home.clients.is_empty() {
            // No client has an account that the old windows matter to.
            home.window_end = now.saturating_add(self.config.window);
        }
        home.clients.push(id.slot());
        home.reshuffled = true;
        let window = self.config.window;
        let client = Client {
            id,
            gpu: gpu.index(),
            share,
            request: share.quota.request().of(window),
            limit: share.quota.limit().of(window),
            largest: share.quota.limit().of(window),
            used: Duration::ZERO,
            carried: Duration::ZERO,
            past: Past::default(),
            lag: signed(share.quota.request().of(window)),
            brought: Duration::ZERO,
            fresh: true,
            surplus: Duration::ZERO,
            total: Duration::ZERO,
            answered: (0, Timestamp::ZERO),
            holds: None,
            unsettled: None,
            asked: None,
            filed: Filed::Nowhere,
            notified: false,
        };
        self.clients.insert(id, client);
    }

    fn leave(&mut self, slot: u32) {
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.asked = None;
        gpu.refile(client);
        gpu.clients.retain(|&other| other != slot);
        self.release(slot);
        self.clients.remove(slot);
    }

    /// Gives a token, extends the one that is held, or replaces one of the window before; it expires at `until`, which
    /// is at most the end of the window, at the latest.
    pub(super) fn grant(
        &mut self,
        slot: u32,
        budget: Duration,
        sm: u16,
        until: Timestamp,
        actions: &mut Vec<TokenAction>,
    ) {
        let (now, slack, grace) = (self.now, self.config.slack, self.config.grace);
        let id = LeaseId::new(self.next_lease + 1);
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.occupy(now);
        let left = client.left(gpu.window, now);
        let expires = now.saturating_add(left.saturating_add(budget).saturating_add(slack)).min(until);
        let lease = match client.holds {
            Some(held) if held.window == gpu.window => {
                // Overuse counts as used: the new time comes on top of it.
                let budget = held.budget.max(held.charged).saturating_add(budget);
                Lease { budget, expires: expires.max(held.expires), ..held }
            }
            _ => Lease {
                id,
                window: gpu.window,
                budget,
                charged: Duration::ZERO,
                expires,
                since: now,
                occupied: Duration::ZERO,
                sm,
            },
        };
        if let Some(mut held) = client.holds.replace(lease) {
            gpu.free += held.sm;
            gpu.releases.remove(&(held.expires.saturating_add(grace), slot));
            if held.id != lease.id {
                client.lag = client.lag.saturating_sub(signed(held.take_charged()));
                client.unsettled = Some(held);
            }
        }
        gpu.free -= lease.sm;
        gpu.releases.insert((lease.expires.saturating_add(grace), slot));
        client.answered = client.asked.take().unwrap_or((0, now));
        gpu.refile(client);
        actions.push(TokenAction::Grant {
            client: client.id,
            lease: lease.id,
            budget: lease.budget,
            expires: lease.expires,
        });
        self.next_lease = self.next_lease.max(lease.id.number());
    }

    /// Checks what the module's essay promises.
    pub(super) fn invariants(&self) {
        for (index, gpu) in self.gpus.iter().enumerate() {
            let mut held = 0;
            let (mut ready, mut paced, mut throttled, mut holders) = (0, 0, 0, 0);
            for &slot in &gpu.clients {
                let client = self.clients.at(slot).expect("listed clients exist");
                assert_eq!(client.gpu, index);
                if let Some(lease) = client.holds {
                    held += u32::from(lease.sm);
                    holders += 1;
                    assert!(gpu.releases.contains(&(lease.expires.saturating_add(self.config.grace), slot)));
                }
                assert_eq!(client.filed, client.file(gpu), "{} is filed where it belongs", client.id);
                match client.filed {
                    Filed::Ready(rank) => {
                        ready += 1;
                        assert!(gpu.ready.contains(&rank));
                    }
                    Filed::Paced(until) => {
                        paced += 1;
                        assert!(gpu.paced.contains(&(until, slot)) && until > gpu.now);
                    }
                    Filed::Throttled => throttled += 1,
                    Filed::Nowhere => {}
                }
            }
            assert_eq!(held + u32::from(gpu.free), u32::from(SmShare::WHOLE.get()), "SMs of {index}");
            assert_eq!((ready, throttled, holders), (gpu.ready.len(), gpu.throttled, gpu.releases.len()));
            assert_eq!(paced, gpu.paced.len());
        }
    }
}
