//! The accounts and leases of the policies that settle quotas by window: who has used what, who holds what, who waits.
//!
//! [`MultiToken`](super::MultiToken) and [`SlotScheduler`](super::SlotScheduler) differ in whom they serve next, and in
//! nothing else: both keep one [`Ledger`]. It does steps 1 and 2 of an event (see [`multi_token`](super::multi_token)),
//! marks the GPUs on which somebody may now be served ([`Gpu::stirred`]), and carries out a grant. The policy dispatches.
//!
//! # Invariants
//! - holders' SMs + free SMs = the whole;
//! - a client is at most one of: ready, throttled; only waiting clients are either;
//! - every holder is in the table of release times.
//!
//! # Cost
//! O(log n) per event for n clients on the GPU, O(n log n) once a window. About 200 bytes per client.

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
    /// Whether clients are compared at the end of a window that was too short for them.
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

/// How a client stands after a window that gave its clients less than they requested.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shortfall {
    /// How much more than its part it got in such windows, in ns; less: negative.
    ahead: i64,
    /// How long it may hold a token at a stretch, by the clock, where the window was short.
    pub(super) part: Option<Duration>,
}

/// Place of a ready client in the order of dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) met: bool,
    /// Unmet: time used in units of the request's share, and that by which it is ahead; least of all where nothing was
    /// had yet. Met: time used beyond the request.
    pub(super) key: i64,
    pub(super) asked: u64,
    pub(super) slot: u32,
}

/// Where a client is filed. Only one that waits is filed anywhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filed {
    Nowhere,
    Ready(Rank),
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
    /// Used in the window before this one, and its limit then.
    pub(super) before: (Duration, Duration),
    /// Used beyond the request in earlier windows, fading.
    pub(super) spare: Duration,
    /// What the last window left for this one.
    pub(super) shortfall: Option<Shortfall>,
    pub(super) total: Duration,
    /// The window in which it was last given a token.
    granted: Option<u64>,
    /// What its last token took, if that was beyond its budget by more than a quarter of a token.
    pub(super) long: Option<Duration>,
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
    pub(super) fn committed(&self, window: u64) -> Duration {
        let outstanding = self.holds.map_or(Duration::ZERO, |lease| lease.outstanding(window));
        self.used.saturating_add(outstanding)
    }

    /// At the end of `windows` windows in which nothing happened after the first.
    fn end_windows(&mut self, windows: u64) {
        self.before = (self.used, self.largest);
        for _ in 0..windows.min(FORGOTTEN) {
            let faded = Duration::from_nanos(self.spare.as_nanos().div_ceil(8));
            self.spare = self.spare - faded + self.used.saturating_sub(self.request);
            self.used = self.used.saturating_sub(self.largest);
            self.largest = self.limit;
        }
        if windows > FORGOTTEN {
            self.spare = Duration::ZERO;
            self.used = self.used.saturating_sub(self.limit.saturating_mul(windows - FORGOTTEN));
        }
    }

    /// Holds a token, or waits for one.
    const fn wants(&self) -> bool {
        self.asked.is_some() || self.holds.is_some()
    }

    fn ahead(&self) -> i64 {
        self.shortfall.map_or(0, |shortfall| shortfall.ahead)
    }

    /// What counts of a window's time: no more than was requested.
    fn counts(&self) -> i64 {
        signed(self.used.min(self.request))
    }

    pub(super) fn miss(&self, window: u64) -> Duration {
        self.request.saturating_sub(self.committed(window))
    }

    /// Whether it comes first: it has had no token in this window, and carries next to no overuse.
    pub(super) fn has_had_nothing(&self, window: u64, committed: Duration) -> bool {
        self.granted != Some(window) && committed.saturating_mul(16) < self.request
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
        self.limit.saturating_sub(self.committed(window))
    }

    /// The SMs of its next token: those of the lease that is extended, or else of its share.
    pub(super) fn token_sm(&self, window: u64) -> u16 {
        let extended = self.holds.filter(|lease| lease.window == window);
        extended.map_or(self.share.sm.get(), |lease| lease.sm)
    }

    /// Where the client belongs now.
    fn file(&self, window: u64) -> Filed {
        let Some((asked, _)) = self.asked else { return Filed::Nowhere };
        if self.remain(window).is_zero() {
            return Filed::Throttled;
        }
        let committed = self.committed(window);
        let met = committed >= self.request;
        let key = if met {
            signed((committed - self.request).saturating_add(self.spare))
        } else if self.has_had_nothing(window, committed) {
            i64::MIN
        } else {
            // Unmet implies a request above 0. At most two windows in ns times 10_000: fits.
            (signed(committed) + self.ahead()) * i64::from(Quota::WHOLE.get())
                / i64::from(self.share.quota.request().get())
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
    pub(super) free: u16,
    /// Sum of the clients' requests.
    pub(super) requested: Duration,
    pub(super) ready: BTreeSet<Rank>,
    pub(super) throttled: u32,
    /// When each holder's SMs come back at the latest, and its slot.
    pub(super) releases: BTreeSet<(Timestamp, u32)>,
    /// Something changed since the last dispatch.
    pub(super) stirred: bool,
    /// Clients came, left or changed in this window: spare time says nothing about those that are there now.
    pub(super) reshuffled: bool,
}

impl Gpu {
    fn new() -> Self {
        Self { free: SmShare::WHOLE.get(), ..Self::default() }
    }

    /// Moves a client to where it belongs now.
    fn refile(&mut self, client: &mut Client) {
        let filed = client.file(self.window);
        if filed == client.filed {
            return;
        }
        match client.filed {
            Filed::Ready(rank) => {
                self.ready.remove(&rank);
            }
            Filed::Throttled => self.throttled -= 1,
            Filed::Nowhere => {}
        }
        match filed {
            Filed::Ready(rank) => {
                self.ready.insert(rank);
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
                    gpu.requested = gpu.requested.saturating_sub(known.request);
                    known.request = share.quota.request().of(window);
                    gpu.requested = gpu.requested.saturating_add(known.request);
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
                self.next_request += 1;
                let asked = (self.next_request, now);
                if let Some((known, gpu)) = self.pair(client.slot()) {
                    known.asked.get_or_insert(asked);
                    gpu.refile(known);
                    gpu.stirred = true;
                }
                self.tell(client.slot(), actions);
            }
            TokenEvent::TokenReturned { client, lease, used } => {
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
            release.into_iter().chain(roll).min()
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
            TokenEvent::TokenReturned { client, lease, used }
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
            while let Some(&(release, slot)) = self.gpus[index].releases.first() {
                if release > now {
                    break;
                }
                self.roll(index, release);
                self.expire(slot, actions);
            }
            self.roll(index, now);
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
        if self.compares {
            self.compare(&clients, windows == 1 && !reshuffled);
        }
        for &slot in &clients {
            if let Some((client, gpu)) = self.pair(slot) {
                client.end_windows(windows);
                if reshuffled {
                    client.spare = Duration::ZERO;
                }
                gpu.refile(client);
            }
        }
        self.gpus[index].clients = clients;
    }

    /// At the end of a window: how far each of its clients is ahead of its part, and how long that part is, if the window
    /// is one to `count`.
    fn compare(&mut self, clients: &[u32], count: bool) {
        let (mut got, mut ahead, mut requests) = (0, 0, 0);
        for &slot in clients {
            if let Some((client, _)) = self.pair(slot)
                && client.wants()
            {
                got += client.counts();
                ahead += client.ahead();
                requests += signed(client.request);
            }
        }
        let shortfall = count && i128::from(got) * 32 < i128::from(requests) * 31;
        let short = i128::from(got) * 4 < i128::from(requests) * 3;
        let (window, token) = (self.config.window, self.config.max_token);
        for &slot in clients {
            let Some((client, _)) = self.pair(slot) else { continue };
            client.shortfall = (shortfall && client.wants()).then(|| {
                let request = i128::from(signed(client.request));
                let part = request * i128::from(got + ahead) / i128::from(requests);
                let all = i128::from(client.counts() + client.ahead());
                let whole = u128::from(requests.unsigned_abs()).min(window.as_nanos().into());
                let clock = u128::from(client.request.as_nanos()) * u128::from(window.as_nanos()) / whole;
                let least = token.as_nanos().div_ceil(4);
                let clock = Duration::from_nanos(u64::try_from(clock).unwrap_or(u64::MAX).max(least));
                Shortfall { ahead: bounded(all - part, token), part: short.then_some(clock) }
            });
        }
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
        let (max_debt, token) = (self.config.max_debt, self.config.max_token);
        let Some((client, gpu)) = self.pair(slot) else { return };
        let record = match (&mut client.holds, &mut client.unsettled) {
            (Some(held), _) if held.id == lease => held,
            (_, Some(earlier)) if earlier.id == lease => earlier,
            _ => return,
        };
        // A revoked lease was charged in full: its late return may also give time back.
        let (more, less) = (used.saturating_sub(record.charged), record.charged.saturating_sub(used));
        record.charged = used;
        let longest = record.budget.saturating_add(Duration::from_nanos(token.as_nanos().div_ceil(4)));
        client.long = Some(used).filter(|&used| used > longest);
        let shift =
            |time: Duration, more: Duration, less: Duration| time.saturating_add(more).saturating_sub(less);
        client.total = shift(client.total, more, less);
        if record.window + 1 == gpu.window {
            // What was used in the window before this one matters only as far as it was beyond the limit then.
            let (before, limit) = client.before;
            let after = shift(before, more, less);
            client.before.0 = after;
            client.used = shift(client.used, after.saturating_sub(limit), before.saturating_sub(limit));
            let request = client.request;
            let counts = i128::from(signed(after.min(request)) - signed(before.min(request)));
            if let Some(shortfall) = &mut client.shortfall {
                shortfall.ahead = bounded(i128::from(shortfall.ahead) + counts, token);
            }
            client.spare = shift(client.spare, after.saturating_sub(request), before.saturating_sub(request));
        } else if record.window == gpu.window {
            client.used = shift(client.used, more, less);
        } else {
            // Too late for its window: what is owed is owed, but time given back there is none of this window's.
            client.used = client.used.saturating_add(more);
        }
        client.used = client.used.min(client.limit.saturating_add(max_debt));
        gpu.refile(client);
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

    /// Tells a throttled client once, when it is certain: not while a lease that it holds may leave it time.
    fn tell(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let window = self.config.window;
        let Some((client, gpu)) = self.pair(slot) else { return };
        if client.filed != Filed::Throttled || client.told || client.used < client.limit {
            return;
        }
        client.told = true;
        // Each window pays back its limit; time is left once what is carried is below it.
        let carried = client.used.saturating_sub(client.largest);
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
            self.gpus.push(Gpu::new());
        }
        let home = &mut self.gpus[gpu.index()];
        if home.clients.is_empty() {
            // Nobody has an account that the old windows matter to.
            home.window_end = now.saturating_add(self.config.window);
        }
        home.clients.push(id.slot());
        home.reshuffled = true;
        home.requested = home.requested.saturating_add(share.quota.request().of(self.config.window));
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
            before: Default::default(),
            spare: Duration::ZERO,
            shortfall: None,
            total: Duration::ZERO,
            granted: None,
            long: None,
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
        gpu.requested = gpu.requested.saturating_sub(client.request);
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
        let lease = match client.holds {
            Some(held) if held.window == gpu.window => {
                let runs = held.outstanding(gpu.window).saturating_add(budget).saturating_add(slack);
                let expires = now.saturating_add(runs).min(until).max(held.expires);
                // What was overused is used: the new time comes on top of it.
                Lease { budget: held.budget.max(held.charged).saturating_add(budget), expires, ..held }
            }
            _ => {
                let expires = now.saturating_add(budget.saturating_add(slack)).min(until);
                Lease { id, window: gpu.window, budget, charged: Duration::ZERO, expires, sm }
            }
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
        client.asked = None;
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
            let (mut ready, mut throttled, mut holders) = (0, 0, 0);
            for &slot in &gpu.clients {
                let client = self.slots[slot as usize].0.as_ref().expect("listed clients exist");
                assert_eq!(client.gpu, index);
                if let Some(lease) = client.holds {
                    held += u32::from(lease.sm);
                    holders += 1;
                    assert!(gpu.releases.contains(&(lease.expires.saturating_add(self.config.grace), slot)));
                }
                assert_eq!(client.filed, client.file(gpu.window), "{} is filed where it belongs", client.id);
                match client.filed {
                    Filed::Ready(rank) => {
                        ready += 1;
                        assert!(gpu.ready.contains(&rank));
                    }
                    Filed::Throttled => throttled += 1,
                    Filed::Nowhere => {}
                }
            }
            let requests =
                gpu.clients.iter().filter_map(|&slot| Some(self.slots[slot as usize].0.as_ref()?.request));
            assert_eq!(
                requests.fold(Duration::ZERO, Duration::saturating_add),
                gpu.requested,
                "requests of {index}"
            );
            assert_eq!(held + u32::from(gpu.free), u32::from(SmShare::WHOLE.get()), "SMs of {index}");
            assert_eq!((ready, throttled, holders), (gpu.ready.len(), gpu.throttled, gpu.releases.len()));
        }
    }
}
