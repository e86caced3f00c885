//! The accounts and leases of the policies that settle quotas by window: who has used what, who holds what, who waits.
//!
//! [`MultiToken`](super::MultiToken) and [`SlotScheduler`](super::SlotScheduler) differ in whom they serve next, and in
//! nothing else: both keep one [`Ledger`]. It does steps 1 and 2 of an event (see [`multi_token`](super::multi_token)),
//! marks the GPUs on which somebody may now be served ([`Gpu::stirred`]), and carries out a grant. The policy dispatches.
//!
//! # Invariants
//! - holders' SMs + free SMs = the whole;
//! - a client is at most one of: ready, paced, throttled; only waiting clients are any of these;
//! - every holder is in the table of release times.
//!
//! # Cost
//! O(log n) per event for n clients on the GPU, O(n log n) once a window and for what is told late of the window before.
//! About 250 bytes per client.

use super::{ConfigError, MultiTokenConfig};
use gshare_core::token::{ClientStatus, RevokeReason, ThrottleReason};
use gshare_core::{
    ClientId, Duration, GpuId, LeaseId, Quota, Share, SmShare, SpecError, Timestamp, TokenAction, TokenError,
    TokenEvent,
};
use std::collections::BTreeSet;

/// Accounts, leases and queues of all GPUs. See the [module](self).
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) config: MultiTokenConfig,
    pub(super) now: Timestamp,
    next_lease: u64,
    next_request: u64,
    /// By slot: the client, and the generation it must be above once it has left.
    pub(super) slots: Vec<(Option<Client>, Option<u32>)>,
    pub(super) gpus: Vec<Gpu>,
    /// Whether what clients missed in a window counts in the next.
    compares: bool,
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
    /// SMs counted for it.
    pub(super) sm: u16,
}

impl Lease {
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        if self.window == window { self.budget.saturating_sub(self.charged) } else { Duration::ZERO }
    }
}

/// A time that is less than 292 years, to be compared with others.
fn signed(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// At most the length of a token ahead, or behind: what the last token of a window can leave.
fn bounded(ahead: i128, token: Duration) -> i64 {
    let most = i128::from(signed(token));
    i64::try_from(ahead.clamp(-most, most)).unwrap_or(0)
}

/// How much of a window of this `length` a limit takes to pay `overuse` back; at most all of it.
fn paid_back(length: Duration, overuse: Duration, limit: Duration) -> Duration {
    let part = u128::from(length.as_nanos()) * u128::from(overuse.min(limit).as_nanos());
    Duration::from_nanos(u64::try_from(part / u128::from(limit.as_nanos().max(1))).unwrap_or(u64::MAX))
}

/// How a client stands after a window of which something was lost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shortfall {
    /// How much more than its part it got in such windows, in ns; less: negative.
    ahead: i64,
    /// How long it may hold a token at a stretch, by the clock, where a good part was lost.
    pub(super) part: Option<Duration>,
}

/// What a client did in the window before this one, as far as it is known.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    used: Duration,
    request: Duration,
    /// The largest that was in force.
    limit: Duration,
    owed: Duration,
    ahead: i64,
    /// It held a token or waited for one at the end of a window that counts.
    wanted: bool,
}

impl Past {
    /// What is carried.
    fn overuse(&self) -> Duration {
        self.used.saturating_sub(self.limit.saturating_add(self.owed))
    }

    fn missed(&self) -> Duration {
        if !self.wanted {
            return Duration::ZERO;
        }
        self.request.saturating_add(self.owed).saturating_sub(self.used).min(self.request)
    }

    /// What it used that it had not requested.
    fn beyond(&self) -> Duration {
        self.used.saturating_sub(self.request.saturating_add(self.owed))
    }
}

/// Place of a ready client in the order of dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) met: bool,
    /// Unmet: time used, less what it is owed, and that by which it is ahead if it had a token in this window, in proportion to its
    /// request, less a part of the time it waits; most where it is not known yet. Met: time used beyond the request.
    pub(super) key: i64,
    pub(super) asked: u64,
    pub(super) slot: u32,
}

/// A whole request, and a whole window, in the order of dispatch.
const WHOLE: i64 = 1 << 16;
/// This part of the time that a client waits, up to so many windows, counts as if it had had so much less. Whole kernels divide
/// windows into equal parts but for microseconds, and those are no reason to keep who waits longer waiting.
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
    /// What others overran of the window before, as far as it is this client's: on top of request and limit.
    owed: Duration,
    /// Used beyond the request in earlier windows, fading.
    pub(super) spare: Duration,
    /// What the last window left for this one.
    pub(super) shortfall: Option<Shortfall>,
    pub(super) total: Duration,
    /// The window in which it was last given a token.
    granted: Option<u64>,
    /// Serial number and time of the request that this token answered.
    answered: (u64, Timestamp),
    pub(super) holds: Option<Lease>,
    /// The lease before the one it holds, until it is settled.
    pub(super) unsettled: Option<Lease>,
    /// Serial number and time of the request that has not been answered by a grant.
    pub(super) asked: Option<(u64, Timestamp)>,
    pub(super) filed: Filed,
    /// Whether it was told that it is throttled.
    pub(super) told: bool,
}

impl Client {
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        self.holds.map_or(Duration::ZERO, |lease| lease.outstanding(window))
    }

    /// What was charged for what it holds and cannot have run yet: a kernel is charged when it is launched.
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

    /// At the end of `windows` windows in which nothing happened after the first; only one that `counts` leaves more than
    /// overuse.
    fn end_windows(&mut self, windows: u64, counts: bool) {
        self.past = Past {
            used: self.used,
            request: self.request,
            limit: self.largest,
            owed: self.owed,
            ahead: self.ahead(),
            wanted: counts && (self.asked.is_some() || self.holds.is_some()),
        };
        for _ in 0..windows.min(FORGOTTEN) {
            let faded = Duration::from_nanos(self.spare.as_nanos().div_ceil(8));
            self.spare = self.spare - faded + self.used.saturating_sub(self.entitled());
            self.used = self.used.saturating_sub(self.largest.saturating_add(self.owed));
            self.largest = self.limit;
            self.owed = Duration::ZERO;
        }
        if windows > FORGOTTEN {
            self.spare = Duration::ZERO;
            self.used = self.used.saturating_sub(self.limit.saturating_mul(windows - FORGOTTEN));
        }
        self.carried = self.used;
    }

    fn ahead(&self) -> i64 {
        self.shortfall.map_or(0, |shortfall| shortfall.ahead)
    }

    /// What it is to get of this window before anyone gets more than that.
    const fn entitled(&self) -> Duration {
        self.request.saturating_add(self.owed)
    }

    pub(super) fn miss(&self, window: u64) -> Duration {
        self.entitled().saturating_sub(self.committed(window))
    }

    /// What it may be given of its miss at once where others wait. It is not cut for what is `least`.
    pub(super) fn due(&self, window: u64, least: Duration) -> Duration {
        let miss = self.miss(window);
        match self.shortfall {
            Some(Shortfall { part: None, ahead }) if ahead > signed(least) => {
                let less = miss.saturating_sub(Duration::from_nanos(ahead.unsigned_abs()));
                less.max(Duration::from_nanos(miss.as_nanos().div_ceil(2)))
            }
            _ => miss,
        }
    }

    pub(super) fn remain(&self, window: u64) -> Duration {
        self.limit.saturating_add(self.owed).saturating_sub(self.committed(window))
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
        if gpu.loose {
            let resumes = gpu.start().saturating_add(paid_back(length, self.carried, self.largest));
            if gpu.now < resumes {
                return Filed::Paced(resumes);
            }
        }
        let committed = self.committed(window);
        let met = committed >= self.entitled();
        let key = if met {
            signed((committed - self.entitled()).saturating_add(self.spare))
        } else if self.holds.is_some_and(|lease| lease.window != window) {
            i64::MAX
        } else {
            // It may have been cut to nothing while it is owed something.
            let request = signed(self.request).max(1);
            // Who is ahead gets less, but no later.
            let ahead = if self.granted == Some(window) { self.ahead() } else { 0 };
            let got = signed(committed) - signed(self.owed) + ahead;
            let waited = signed(window_end.saturating_since(since).min(length.saturating_mul(AGED)));
            // An hour and five windows in ns at most, times 65,536: fits.
            got * WHOLE / request - waited * (WHOLE / AGING) / signed(length)
        };
        Filed::Ready(Rank { met, key, asked, slot: self.id.slot() })
    }
}

#[derive(Debug, Default)]
pub(super) struct Gpu {
    /// Clients on this GPU, by slot.
    pub(super) clients: Vec<u32>,
    pub(super) window: u64,
    pub(super) window_end: Timestamp,
    /// Of a window.
    pub(super) length: Duration,
    /// As far as its clients are filed.
    now: Timestamp,
    /// Whether the limits of its clients left time over when this window began.
    loose: bool,
    pub(super) free: u16,
    pub(super) ready: BTreeSet<Rank>,
    /// Who waits until part of what it carries is paid back: until when, and its slot.
    paced: BTreeSet<(Timestamp, u32)>,
    pub(super) throttled: u32,
    /// When each holder's SMs come back at the latest, and its slot.
    pub(super) releases: BTreeSet<(Timestamp, u32)>,
    /// Something changed since the last dispatch.
    pub(super) stirred: bool,
    /// Clients came, left or changed in this window: spare time says nothing about those that are there now.
    pub(super) reshuffled: bool,
}

impl Gpu {
    fn new(length: Duration) -> Self {
        Self { free: SmShare::WHOLE.get(), length, ..Self::default() }
    }

    /// Of this window.
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
        client.told &= filed == Filed::Throttled;
        client.filed = filed;
    }
}

/// Windows without any event after which spare time is forgotten altogether: it bounds the work of catching up, and of
/// ten seconds used beyond the request nothing is left by then.
const FORGOTTEN: u64 = 320;

impl Ledger {
    /// No clients. `compares`: keeps account of who is ahead of whom, which a fixed schedule has no use for.
    pub(super) fn new(config: MultiTokenConfig, compares: bool) -> Result<Self, ConfigError> {
        config.validate()?;
        let (slots, gpus) = (Vec::new(), Vec::new());
        Ok(Self { config, now: Timestamp::ZERO, next_lease: 0, next_request: 0, slots, gpus, compares })
    }

    /// Steps 1 and 2 of an event. What it stirred is then to be dispatched.
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
                    known.request = share.quota.request().of(window);
                    known.limit = share.quota.limit().of(window);
                    known.largest = known.largest.max(known.limit);
                    gpu.refile(known);
                    (gpu.stirred, gpu.reshuffled) = (true, true);
                }
                self.tell(client.slot(), actions);
            }
            TokenEvent::ClientLeft { client } => {
                if let Some((_, gpu)) = self.pair(client.slot()) {
                    (gpu.stirred, gpu.reshuffled) = (true, true);
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
                    gpu.stirred = true;
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
                    gpu.stirred = true;
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
        let gpu = GpuId(u32::try_from(known.gpu).ok()?);
        let mut status = ClientStatus::joined(client, gpu, known.share);
        status.window_used = known.used;
        status.total_used = known.total;
        status.holds = known.holds.map(|lease| lease.id);
        status.waiting_since = known.asked.map(|(_, since)| since);
        Some(status)
    }

    pub(super) fn get(&self, id: ClientId) -> Result<&Client, TokenError> {
        match self.slots.get(id.index()) {
            Some((Some(client), _)) if client.id == id => Ok(client),
            _ => Err(TokenError::UnknownClient { client: id }),
        }
    }

    /// Refuses what cannot be done, before anything is changed.
    fn check(&self, now: Timestamp, event: &TokenEvent) -> Result<(), TokenError> {
        if now < self.now {
            return Err(TokenError::TimeWentBack { now, last: self.now });
        }
        let share_is_sound = |client, share: &Share| match share.sm {
            SmShare::ZERO => Err(TokenError::BadShare { client, source: SpecError::ZeroSm }),
            _ => Ok(()),
        };
        match *event {
            TokenEvent::ClientJoined { client, gpu, ref share } => {
                share_is_sound(client, share)?;
                if client.slot() >= self.config.max_clients {
                    return Err(TokenError::TooManyClients { client, limit: self.config.max_clients });
                }
                if gpu.0 >= self.config.max_gpus {
                    return Err(TokenError::UnknownGpu { gpu, limit: self.config.max_gpus });
                }
                match self.slots.get(client.index()) {
                    Some((Some(_), _)) => Err(TokenError::ClientExists { client }),
                    Some((None, Some(last))) if client.generation() <= *last => {
                        Err(TokenError::ClientExists { client })
                    }
                    _ => Ok(()),
                }
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
        let client = self.slots.get_mut(slot as usize)?.0.as_mut()?;
        let gpu = self.gpus.get_mut(client.gpu)?;
        Some((client, gpu))
    }

    /// Step 1: everything that happened by itself until `now`, in the order of time.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<TokenAction>) {
        self.now = now;
        for index in 0..self.gpus.len() {
            self.gpus[index].now = now;
            while let Some(&(release, slot)) = self.gpus[index].releases.first() {
                if release > now {
                    break;
                }
                self.roll(index, release);
                self.expire(slot, actions);
            }
            self.roll(index, now);
            while let Some(&(_, slot)) = self.gpus[index].paced.first().filter(|paced| paced.0 <= now) {
                let Some((client, gpu)) = self.pair(slot) else { break };
                gpu.stirred = true;
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
        gpu.stirred = true;
        let reshuffled = core::mem::take(&mut gpu.reshuffled);
        let clients = core::mem::take(&mut gpu.clients);
        let counts = windows == 1 && !reshuffled;
        let limits = clients.iter().filter_map(|&slot| self.slots[slot as usize].0.as_ref());
        let limits: u32 = limits.map(|client| u32::from(client.share.quota.limit().get())).sum();
        self.gpus[index].loose = self.compares && limits < u32::from(Quota::WHOLE.get());
        for &slot in &clients {
            if let Some((client, gpu)) = self.pair(slot) {
                client.end_windows(windows, counts);
                if reshuffled {
                    client.spare = Duration::ZERO;
                }
                gpu.refile(client);
            }
        }
        self.gpus[index].clients = clients;
        self.look_back(index);
    }

    /// What the window before leaves for this one, as far as it is known: who is owed how much, who is ahead of his part, and
    /// how long that part is.
    fn look_back(&mut self, index: usize) {
        if !self.compares {
            return;
        }
        let clients = core::mem::take(&mut self.gpus[index].clients);
        let (mut overuse, mut missed, mut ahead, mut requests) = (0_i128, 0_i128, 0_i128, 0_i128);
        for &slot in &clients {
            let Some((client, _)) = self.pair(slot) else { continue };
            overuse += i128::from(signed(client.past.overuse()));
            if client.past.wanted {
                missed += i128::from(signed(client.past.missed()));
                ahead += i128::from(client.past.ahead);
                requests += i128::from(signed(client.past.request));
            }
        }
        let lost = (missed - overuse).max(0);
        let (got, returned) = (requests - lost, missed - lost);
        let (window, token) = (self.config.window, self.config.max_token);
        for &slot in &clients {
            let Some((client, gpu)) = self.pair(slot) else { continue };
            let past = client.past;
            let own = i128::from(signed(past.missed()));
            let owed = if own > 0 { own * returned / missed } else { 0 };
            client.owed = Duration::from_nanos(u64::try_from(owed).unwrap_or(0));
            client.shortfall = (past.wanted && lost > 0).then(|| {
                let request = i128::from(signed(past.request));
                let part = request * (got + ahead) / requests;
                let has = request - own + owed + i128::from(past.ahead);
                let length = i128::from(signed(window));
                let clock = request * length / requests.min(length);
                let least = token.as_nanos().div_ceil(4);
                let clock = Duration::from_nanos(u64::try_from(clock).unwrap_or(u64::MAX).max(least));
                let part_by_clock = (lost * 4 > requests).then_some(clock);
                Shortfall { ahead: bounded(has - part, token), part: part_by_clock }
            });
            gpu.refile(client);
        }
        self.gpus[index].clients = clients;
    }

    /// Takes a token back that was neither returned nor replaced in time.
    fn expire(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let Some((client, gpu)) = self.pair(slot) else { return };
        let Some(lease) = client.holds else { return };
        gpu.stirred = true;
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
        let mut late = false;
        let Some((client, gpu)) = self.pair(slot) else { return };
        let record = match (&mut client.holds, &mut client.unsettled) {
            (Some(held), _) if held.id == lease => held,
            (_, Some(earlier)) if earlier.id == lease => earlier,
            _ => return,
        };
        // A revoked lease was charged in full: its late return may also give time back.
        let (more, less) = (used.saturating_sub(record.charged), record.charged.saturating_sub(used));
        record.charged = used;
        let shift =
            |time: Duration, more: Duration, less: Duration| time.saturating_add(more).saturating_sub(less);
        client.total = shift(client.total, more, less);
        if record.window + 1 == gpu.window {
            // What was used in the window before this one matters only for what it left.
            let known = client.past;
            client.past.used = shift(known.used, more, less);
            let past = client.past;
            client.used = shift(client.used, past.overuse(), known.overuse());
            client.carried = shift(client.carried, past.overuse(), known.overuse());
            client.spare = shift(client.spare, past.beyond(), known.beyond());
            late = (past.overuse(), past.missed()) != (known.overuse(), known.missed());
        } else if record.window == gpu.window {
            client.used = shift(client.used, more, less);
        } else {
            // Too late for its window: what is owed is owed, but time given back there is none of this window's.
            client.used = client.used.saturating_add(more);
        }
        client.used = client.used.min(client.limit.saturating_add(max_debt));
        gpu.refile(client);
        let index = client.gpu;
        if late {
            self.look_back(index);
        }
    }

    /// Ends what the client holds: its SMs are free. The lease may still be settled late.
    fn release(&mut self, slot: u32) {
        let grace = self.config.grace;
        let Some((client, gpu)) = self.pair(slot) else { return };
        let Some(lease) = client.holds.take() else { return };
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
        client.asked.get_or_insert(if unused { client.answered } else { (number, now) });
        gpu.stirred = true;
        gpu.refile(client);
    }

    /// Tells a throttled client once, when it is certain: not while a lease that it holds may leave it time.
    fn tell(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let window = self.config.window;
        let Some((client, gpu)) = self.pair(slot) else { return };
        if client.filed != Filed::Throttled
            || client.told
            || client.used < client.limit.saturating_add(client.owed)
        {
            return;
        }
        client.told = true;
        // Each window pays back its limit; time is left once what is carried is below it.
        let carried = client.used.saturating_sub(client.largest.saturating_add(client.owed));
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
            self.gpus.push(Gpu::new(self.config.window));
        }
        let home = &mut self.gpus[gpu.index()];
        if home.clients.is_empty() {
            // Nobody has an account that the old windows matter to.
            home.window_end = now.saturating_add(self.config.window);
        }
        home.clients.push(id.slot());
        home.reshuffled = true;
        while self.slots.len() <= id.index() {
            self.slots.push((None, None));
        }
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
            owed: Duration::ZERO,
            spare: Duration::ZERO,
            shortfall: None,
            total: Duration::ZERO,
            granted: None,
            answered: (0, Timestamp::ZERO),
            holds: None,
            unsettled: None,
            asked: None,
            filed: Filed::Nowhere,
            told: false,
        };
        self.slots[id.index()] = (Some(client), Some(id.generation()));
    }

    fn leave(&mut self, slot: u32) {
        let Some((client, gpu)) = self.pair(slot) else { return };
        client.asked = None;
        gpu.refile(client);
        gpu.clients.retain(|&other| other != slot);
        self.release(slot);
        self.slots[slot as usize].0 = None;
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
        let id = LeaseId(self.next_lease + 1);
        let Some((client, gpu)) = self.pair(slot) else { return };
        let left = client.left(gpu.window, now);
        let expires = now.saturating_add(left.saturating_add(budget).saturating_add(slack)).min(until);
        let lease = match client.holds {
            Some(held) if held.window == gpu.window => {
                // What was overused is used: the new time comes on top of it.
                let budget = held.budget.max(held.charged).saturating_add(budget);
                Lease { budget, expires: expires.max(held.expires), ..held }
            }
            _ => Lease { id, window: gpu.window, budget, charged: Duration::ZERO, expires, since: now, sm },
        };
        if let Some(held) = client.holds.replace(lease) {
            gpu.free += held.sm;
            gpu.releases.remove(&(held.expires.saturating_add(grace), slot));
            if held.id != lease.id {
                client.unsettled = Some(held);
            }
        }
        gpu.free -= lease.sm;
        gpu.releases.insert((lease.expires.saturating_add(grace), slot));
        client.granted = Some(gpu.window);
        client.answered = client.asked.take().unwrap_or((0, now));
        gpu.refile(client);
        actions.push(TokenAction::Grant {
            client: client.id,
            lease: lease.id,
            budget: lease.budget,
            expires: lease.expires,
        });
        self.next_lease = self.next_lease.max(lease.id.0);
    }

    /// Checks what the module's essay promises.
    pub(super) fn invariants(&self) {
        for (index, gpu) in self.gpus.iter().enumerate() {
            let mut held = 0;
            let (mut ready, mut paced, mut throttled, mut holders) = (0, 0, 0, 0);
            for &slot in &gpu.clients {
                let client = self.slots[slot as usize].0.as_ref().expect("listed clients exist");
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
            let clients = gpu.clients.iter().filter_map(|&slot| self.slots[slot as usize].0.as_ref());
            let (owed, overuse) =
                clients.fold((Duration::ZERO, Duration::ZERO), |(owed, overuse), client| {
                    (owed.saturating_add(client.owed), overuse.saturating_add(client.past.overuse()))
                });
            assert!(owed <= overuse || gpu.reshuffled, "{owed} owed of {overuse} overused on {index}");
            assert_eq!(held + u32::from(gpu.free), u32::from(SmShare::WHOLE.get()), "SMs of {index}");
            assert_eq!((ready, throttled, holders), (gpu.ready.len(), gpu.throttled, gpu.releases.len()));
            assert_eq!(paced, gpu.paced.len());
        }
    }
}
