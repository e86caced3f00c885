//! The accounts of the token scheduler: how much each client has used, which clients hold a token, which wait.
//!
//! The [`Ledger`] does steps 1 and 2 of an event (see [`multi_token`](super::multi_token)), marks the GPUs on which a client may now
//! be served ([`Gpu::dirty`]), and carries out a grant. The dispatch decides which client is next.
//!
//! # Totals
//! A client's `charged` total follows its `used` total: `charged = max(charged, used)`. Time that a token allows counts for the window of
//! the token, and time beyond that for the window in which it is heard. A token that is taken back charges its client up to the total
//! that it allowed.
//!
//! # Invariants
//! - `used <= charged`;
//! - the SMs of all holders and the free SMs add up to the whole;
//! - a client is at most one of ready, paced and throttled; only waiting clients are any of these;
//! - every holder is in the table of release times.
//!
//! # Cost
//! O(log n) per event for n clients on the GPU, O(n log n) once a window. About 250 bytes per client.

use super::{MOST_SLOTS, MultiTokenConfig};
use gshare_core::slots::NamedSlots;
use gshare_core::token::{ClientStatus, ThrottleReason};
use gshare_core::{
    ClientId, ConfigError, Duration, GpuId, Quota, Share, SmShare, SpecError, TimeWentBack, Timestamp,
    TokenAction, TokenError, TokenEvent, UseState,
};
use std::collections::BTreeSet;

/// Accounts and queues of all GPUs. See the [module](self).
#[derive(Debug)]
pub(super) struct Ledger {
    pub(super) config: MultiTokenConfig,
    pub(super) now: Timestamp,
    next_request: u64,
    pub(super) clients: NamedSlots<ClientId, Client>,
    pub(super) gpus: Vec<Gpu>,
}

/// A token that a client holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Token {
    /// Number of the window that it belongs to.
    pub(super) window: u64,
    /// The total at which it begins: the charge of its client, or the total that a token of an earlier window allowed, which may be in
    /// use still.
    base: Duration,
    /// The total that its client had said when it was granted.
    heard: Duration,
    /// The total that it allows.
    allowed: Duration,
    pub(super) until: Timestamp,
    /// When it was granted, extensions aside.
    since: Timestamp,
    /// The part of its client's lag that was taken for it so far.
    occupied: Duration,
    /// SMs counted for it.
    pub(super) sm: u16,
}

/// How long a token is waited for: `grace` beyond its end, and for work of `max_debt` at most.
#[derive(Debug, Clone, Copy)]
struct Patience {
    grace: Duration,
    max_debt: Duration,
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

/// A window that has ended, for one client.
#[derive(Debug, Clone, Copy)]
struct Past {
    used: Duration,
    request: Duration,
    /// Missed time of earlier windows that was carried into it.
    brought: Duration,
    /// The part of its limit that was not used, and of those of windows after it in which nothing happened.
    left: Duration,
}

/// The window before this one: use of a token of that window is heard in this one.
#[derive(Debug, Clone, Copy, Default)]
struct Last {
    /// The part of its request that was not used; no bound where nothing counts as surplus.
    unused: Duration,
    /// The part of its request and of missed time of earlier windows that was not used.
    missed: Duration,
    /// The lag that was kept.
    lag: Duration,
    /// The part of its limit that was not used: use beyond that is overuse.
    left: Duration,
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
    /// GPU time that it is short of its share, in ns; below zero: beyond it.
    lag: i64,
    /// The lag of earlier windows that its limit of this one was raised by.
    brought: Duration,
    /// The client came or its share changed in this window: it may lack a part of a whole one.
    fresh: bool,
    /// Time beyond its request that no other client claimed, fading.
    pub(super) surplus: Duration,
    /// The last window, as far as it is known.
    last: Last,
    /// GPU time since it joined: as it said, and as it was charged.
    heard: Duration,
    charged: Duration,
    /// Time by the clock that its last token occupied beyond its charge.
    idled: Duration,
    /// Serial number and time of the request that this token answered.
    answered: (u64, Timestamp),
    pub(super) holds: Option<Token>,
    /// Serial number and time of the request that has not been answered by a grant.
    pub(super) asked: Option<(u64, Timestamp)>,
    pub(super) filed: Filed,
    /// Whether it was notified that it is throttled.
    pub(super) notified: bool,
}

impl Client {
    /// GPU time that was charged under a token.
    fn spent(&self, token: &Token) -> Duration {
        self.charged.saturating_sub(token.base)
    }

    /// GPU time that its token of this window still allows.
    pub(super) fn outstanding(&self, window: u64) -> Duration {
        let token = self.holds.filter(|token| token.window == window);
        token.map_or(Duration::ZERO, |token| token.allowed.saturating_sub(self.charged.max(token.base)))
    }

    /// GPU time charged for its token that cannot have run yet: a kernel is charged when it is launched.
    pub(super) fn running(&self, now: Timestamp) -> Duration {
        self.holds.map_or(Duration::ZERO, |token| {
            self.spent(&token).saturating_sub(now.saturating_since(token.since))
        })
    }

    /// How long its token still keeps the GPU at least.
    pub(super) fn left(&self, window: u64, now: Timestamp) -> Duration {
        self.outstanding(window).max(self.running(now))
    }

    pub(super) fn committed(&self, window: u64) -> Duration {
        self.used.saturating_add(self.outstanding(window))
    }

    /// When its token is taken back, if it is not given back: work that is known to run is waited for, up to a bound.
    fn release_at(&self, token: &Token, patience: Patience) -> Timestamp {
        let runs = self.spent(token).min(patience.max_debt);
        token.until.max(token.since.saturating_add(runs)).saturating_add(patience.grace)
    }

    /// How long a token has kept the GPU, as far as it is known.
    fn lasted(&self, token: &Token) -> Duration {
        token.occupied.max(self.spent(token))
    }

    /// Takes the time that its token has occupied by `now` off its lag.
    fn occupy(&mut self, now: Timestamp) {
        let Some(token) = &mut self.holds else { return };
        let more = now.saturating_since(token.since).saturating_sub(token.occupied);
        token.occupied = token.occupied.saturating_add(more);
        self.lag = self.lag.saturating_sub(signed(more));
    }

    /// Ends a token: GPU time charged beyond the time that it occupied comes off the lag as well.
    fn settle(&mut self, token: Token) {
        let charged = self.spent(&token);
        self.lag = self.lag.saturating_sub(signed(charged.saturating_sub(token.occupied)));
        self.idled = token.occupied.saturating_sub(charged);
    }

    /// Its lag once all is used that it holds.
    fn lag_then(&self, gpu: &Gpu) -> i64 {
        if gpu.by_slots {
            return signed(self.request).saturating_sub(signed(self.committed(gpu.window)));
        }
        let left = self.holds.map_or(Duration::ZERO, |token| {
            let most =
                if token.window == gpu.window { token.allowed.max(self.charged) } else { self.charged };
            (most.saturating_sub(token.base)).saturating_sub(token.occupied)
        });
        self.lag.saturating_sub(signed(left))
    }

    fn wants(&self) -> bool {
        self.asked.is_some() || self.holds.is_some()
    }

    /// Minus the overuse that it carries, as far as the GPU time of that is over: at most this lag goes with it. Zero or less,
    /// or no bound at all.
    fn debt(&self) -> i64 {
        let running =
            self.holds.map_or(Duration::ZERO, |token| self.spent(&token).saturating_sub(token.occupied));
        match self.carried.saturating_sub(running) {
            Duration::ZERO => i64::MAX,
            debt => -signed(debt),
        }
    }

    /// The lag that it may keep at the end of a window, while tokens of its GPU last up to `longest`. A client that wanted nothing, or
    /// came in that window, has missed nothing.
    fn carried_lag(&self, longest: Duration, length: Duration) -> i64 {
        let windows = 1 + longest.as_nanos().div_ceil(length.as_nanos());
        let most = if self.wants() && !self.fresh { signed(self.request.saturating_mul(windows)) } else { 0 };
        self.lag.min(most).min(self.debt())
    }

    /// Keeps `lag` of the lag that it had at the end of the window that is `past`.
    fn begin_window(&mut self, past: Past, lag: i64, counts: bool, window: u64) {
        let forgiven = self.lag.min(0).saturating_sub(lag.min(0));
        self.surplus = match counts {
            true => self.surplus.saturating_add(beyond(past.used, past.request, forgiven)),
            false => Duration::ZERO,
        };
        self.last = Last {
            unused: if counts { past.request.saturating_sub(past.used) } else { Duration::MAX },
            missed: past.request.saturating_add(past.brought).saturating_sub(past.used),
            lag: Duration::from_nanos(u64::try_from(lag).unwrap_or(0)),
            // A token that is older than that window has the limits of all windows since.
            left: match self.holds {
                Some(token) if token.window + 1 < window => self.last.left.saturating_add(past.left),
                _ => past.left,
            },
        };
        self.brought = self.last.missed.min(self.last.lag);
        self.lag = lag.saturating_add(signed(self.request));
        self.fresh = false;
    }

    /// Lag that may be made up for at once, where others wait.
    pub(super) fn miss(&self, gpu: &Gpu) -> Duration {
        Duration::from_nanos(u64::try_from(self.lag_then(gpu)).unwrap_or(0))
    }

    /// So much more was used of a token of the last window.
    fn heard_late(&mut self, used: Duration) {
        self.surplus = self.surplus.saturating_add(used.saturating_sub(self.last.unused));
        self.last.unused = self.last.unused.saturating_sub(used);
        self.last.missed = self.last.missed.saturating_sub(used);
        self.brought = self.brought.min(self.last.missed);
        let over = used.saturating_sub(self.last.left);
        self.last.left = self.last.left.saturating_sub(used);
        self.used = self.used.saturating_add(over);
        self.carried = self.carried.saturating_add(over);
    }

    /// At the end of `windows` windows in which nothing happened after the first; gives the first.
    fn end_windows(&mut self, windows: u64) -> Past {
        let most =
            self.largest.saturating_add(self.brought).saturating_add(self.limit.saturating_mul(windows - 1));
        let (used, request, brought) = (self.used, self.request, self.brought);
        let past = Past { used, request, brought, left: most.saturating_sub(used) };
        self.brought = Duration::ZERO;
        self.used = used.saturating_sub(most);
        self.largest = self.limit;
        self.carried = self.used;
        for _ in 0..windows.min(FORGOTTEN) {
            self.surplus -= Duration::from_nanos(self.surplus.as_nanos().div_ceil(8));
        }
        if windows > FORGOTTEN {
            self.surplus = Duration::ZERO;
        }
        past
    }

    pub(super) fn remain(&self, window: u64) -> Duration {
        self.limit.saturating_add(self.brought).saturating_sub(self.committed(window))
    }

    /// The SMs of its next token: those of the token that is extended, or else of its share.
    pub(super) fn token_sm(&self, window: u64) -> u16 {
        let extended = self.holds.filter(|token| token.window == window);
        extended.map_or(self.share.sm.get(), |token| token.sm)
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
        } else if self.holds.is_some_and(|token| token.window != window) {
            // A kernel under a token of an earlier window may not be charged yet.
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
    /// Whether its requests add up to more than the whole, so that each of its few clients has a slot of the window. Lag is then what was charged,
    /// and counts in its window only; otherwise it is what was occupied by the clock.
    pub(super) by_slots: bool,
    /// The longest that a token lasted lately.
    longest: Duration,
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
    /// How often that was so.
    pub(super) shuffles: u64,
}

impl Gpu {
    fn new(length: Duration) -> Self {
        Self { free: SmShare::WHOLE.get(), length, ..Self::default() }
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
    /// No clients.
    pub(super) fn new(config: MultiTokenConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let (clients, gpus) = (NamedSlots::default(), Vec::new());
        Ok(Self { config, now: Timestamp::ZERO, next_request: 0, clients, gpus })
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
                let (known, gpu) = self.pair(client.slot());
                known.share = share;
                let request = share.quota.request().of(window);
                known.lag = known.lag.saturating_add(signed(request)).saturating_sub(signed(known.request));
                (known.request, known.fresh) = (request, true);
                known.limit = share.quota.limit().of(window);
                known.largest = known.largest.max(known.limit);
                gpu.refile(known);
                let gpu = known.gpu;
                self.reshuffle(gpu);
                self.tell(client.slot(), actions);
            }
            TokenEvent::ClientLeft { client } => self.leave(client.slot()),
            TokenEvent::Used { client, used, state } => {
                self.charge(client.slot(), used);
                self.obey(client.slot(), state);
                self.tell(client.slot(), actions);
            }
            // A deadline has been dealt with by catching up.
            _ => {}
        }
        Ok(())
    }

    /// Does what a client says of itself.
    fn obey(&mut self, slot: u32, state: UseState) {
        let (client, gpu) = self.pair(slot);
        gpu.dirty = true;
        let unused = client.holds.is_some_and(|token| token.heard == client.heard);
        match state {
            UseState::Idle => {
                client.asked = None;
                self.release(slot);
            }
            UseState::Wants => self.release(slot),
            // The token answered the question, or stands for it.
            UseState::Holds if client.holds.is_some() => client.asked = None,
            UseState::Holds | UseState::Extends => {}
        }
        match state {
            UseState::Wants | UseState::Extends => self.ask(slot, unused && state == UseState::Wants),
            UseState::Idle | UseState::Holds => {
                let (client, gpu) = self.pair(slot);
                gpu.refile(client);
            }
        }
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
        status.total_used = known.charged;
        status.holds = known.holds.map(|token| token.until);
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
            TokenEvent::ClientLeft { client } => self.get(client).map(|_| ()),
            TokenEvent::Used { client, used, .. } => {
                let reported = self.get(client)?.heard;
                if used < reported {
                    return Err(TokenError::UsageShrank { client, used, reported });
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The client in a slot, with its GPU.
    fn pair(&mut self, slot: u32) -> (&mut Client, &mut Gpu) {
        let client = self.clients.at_mut(slot).expect("a listed slot has a client");
        let gpu = &mut self.gpus[client.gpu];
        (client, gpu)
    }

    fn patience(&self) -> Patience {
        Patience { grace: self.config.grace, max_debt: self.config.max_debt }
    }

    /// Clients came to a GPU, left it or changed their shares.
    fn reshuffle(&mut self, index: usize) {
        let requests = self.gpus[index].clients.iter().filter_map(|&slot| self.clients.at(slot));
        let requests = requests.map(|client| u32::from(client.share.quota.request().get()));
        let (sum, count) =
            requests.fold((0, 0), |(sum, count), request| (sum + request, count + usize::from(request > 0)));
        let gpu = &mut self.gpus[index];
        (gpu.dirty, gpu.reshuffled, gpu.shuffles) = (true, true, gpu.shuffles + 1);
        let by_slots = sum > u32::from(Quota::WHOLE.get()) && count <= MOST_SLOTS;
        if core::mem::replace(&mut gpu.by_slots, by_slots) != by_slots {
            for slot in gpu.clients.clone() {
                let (client, gpu) = self.pair(slot);
                gpu.refile(client);
            }
        }
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
                // The token ends then, however late that is looked at.
                self.now = release.max(before);
                self.expire(slot, actions);
            }
            self.now = now;
            self.roll(index, now);
            while let Some(&(_, slot)) = self.gpus[index].paced.first().filter(|paced| paced.0 <= now) {
                let (client, gpu) = self.pair(slot);
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
        let gpu = &mut self.gpus[index];
        gpu.undersubscribed = !gpu.by_slots && limits < u32::from(Quota::WHOLE.get());
        gpu.longest -= Duration::from_nanos(gpu.longest.as_nanos().div_ceil(16));
        let end = gpu.start();
        let pasts: Vec<Past> = clients
            .iter()
            .map(|&slot| {
                let (client, gpu) = self.pair(slot);
                client.occupy(end);
                let lasted = client.holds.map_or(Duration::ZERO, |token| client.lasted(&token));
                gpu.longest = gpu.longest.max(lasted);
                client.end_windows(windows)
            })
            .collect();
        self.carry_lags(index, &clients, &pasts, (windows == 1, !reshuffled));
        for &slot in &clients {
            let (client, gpu) = self.pair(slot);
            gpu.refile(client);
        }
        self.gpus[index].clients = clients;
    }

    /// Decides which part of their lags the clients of a GPU keep beyond the end of a window: none unless it was a single one, and no
    /// surplus where clients came or left.
    fn carry_lags(&mut self, index: usize, clients: &[u32], pasts: &[Past], (single, settled): (bool, bool)) {
        let (mut behind, mut ahead, mut requests) = (0_i128, 0_i128, 0_i128);
        let (longest, length, by_slots) =
            (self.gpus[index].longest, self.gpus[index].length, self.gpus[index].by_slots);
        for &slot in clients {
            let (client, _) = self.pair(slot);
            let lag = if single && !by_slots { client.carried_lag(longest, length) } else { 0 };
            client.lag = lag;
            behind += i128::from(lag.max(0));
            ahead += i128::from(lag.min(0).unsigned_abs());
            if client.wants() {
                requests += i128::from(signed(client.request));
            }
        }
        for (&slot, past) in clients.iter().zip(pasts) {
            let (client, gpu) = self.pair(slot);
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
            client.begin_window(*past, lag, single && settled, gpu.window);
        }
    }

    /// Takes a token back that was neither given back nor replaced in time: its client is charged all that it allowed.
    fn expire(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let (client, gpu) = self.pair(slot);
        gpu.dirty = true;
        let token = client.holds.expect("a client in the table of release times holds a token");
        actions.push(TokenAction::Stop { client: client.id });
        self.charge_to(slot, token.allowed);
        self.release(slot);
    }

    /// Step 2: the client has used this much in all.
    fn charge(&mut self, slot: u32, used: Duration) {
        self.pair(slot).0.heard = used;
        self.charge_to(slot, used);
    }

    /// Charges a client up to this total, unless it was charged as much before.
    fn charge_to(&mut self, slot: u32, total: Duration) {
        let (now, patience) = (self.now, self.patience());
        let (client, gpu) = self.pair(slot);
        let more = total.saturating_sub(client.charged);
        let before = client.holds.map(|token| client.release_at(&token, patience));
        // The time of a token counts for its window, and time beyond it for the window in which it is heard.
        let of_earlier =
            client.holds.map(|token| if token.window == gpu.window { token.base } else { token.allowed });
        let earlier = of_earlier.map_or(Duration::ZERO, |upto| upto.saturating_sub(client.charged).min(more));
        client.charged = client.charged.saturating_add(more);
        client.used =
            client.used.saturating_add(more - earlier).min(client.limit.saturating_add(patience.max_debt));
        client.heard_late(earlier);
        match client.holds.zip(before) {
            Some((token, before)) => {
                gpu.releases.remove(&(before, slot));
                gpu.releases.insert((client.release_at(&token, patience), slot));
            }
            // Of its last token, which has occupied the GPU for a time that is off its lag already.
            None => {
                let covered = more.min(client.idled);
                client.idled -= covered;
                client.lag = client.lag.saturating_sub(signed(more - covered));
            }
        }
        client.lag = client.lag.max(-signed(patience.max_debt));
        client.occupy(now);
        gpu.refile(client);
    }

    /// Ends the token of a client, if it holds one: its SMs are free.
    fn release(&mut self, slot: u32) {
        let (now, patience) = (self.now, self.patience());
        let (client, gpu) = self.pair(slot);
        client.occupy(now);
        if let Some(token) = client.holds.take() {
            gpu.longest = gpu.longest.max(client.lasted(&token));
            gpu.free += token.sm;
            let listed = gpu.releases.remove(&(client.release_at(&token, patience), slot));
            assert!(listed, "{} holds a token and is in the table of release times", client.id);
            client.settle(token);
            gpu.refile(client);
        }
    }

    /// A client waits from now on, if it does not yet; `unused`: for what it could not use, in its old place.
    fn ask(&mut self, slot: u32, unused: bool) {
        self.next_request += 1;
        let (number, now) = (self.next_request, self.now);
        let (client, gpu) = self.pair(slot);
        client.occupy(now);
        client.asked.get_or_insert(if unused { client.answered } else { (number, now) });
        gpu.dirty = true;
        gpu.refile(client);
    }

    /// Tells a throttled client once, when it is certain: not while a token that it holds may leave it time.
    fn tell(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let window = self.config.window;
        let (client, gpu) = self.pair(slot);
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
            self.gpus.push(Gpu::new(self.config.window));
        }
        let home = &mut self.gpus[gpu.index()];
        if home.clients.is_empty() {
            // No client has an account that the old windows matter to.
            home.window_end = now.saturating_add(self.config.window);
        }
        home.clients.push(id.slot());
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
            lag: signed(share.quota.request().of(window)),
            brought: Duration::ZERO,
            fresh: true,
            surplus: Duration::ZERO,
            last: Last::default(),
            heard: Duration::ZERO,
            charged: Duration::ZERO,
            idled: Duration::ZERO,
            answered: (0, Timestamp::ZERO),
            holds: None,
            asked: None,
            filed: Filed::Nowhere,
            notified: false,
        };
        self.clients.insert(id, client);
        self.reshuffle(gpu.index());
    }

    fn leave(&mut self, slot: u32) {
        let (client, gpu) = self.pair(slot);
        client.asked = None;
        gpu.refile(client);
        gpu.clients.retain(|&other| other != slot);
        let index = client.gpu;
        self.release(slot);
        self.clients.remove(slot);
        self.reshuffle(index);
    }

    /// Gives a token of `budget`, or extends the one that is held; it ends at `until`, which is at most the end of the window, at the
    /// latest. A token of an earlier window makes place for a new one.
    pub(super) fn grant(
        &mut self,
        slot: u32,
        budget: Duration,
        sm: u16,
        until: Timestamp,
        actions: &mut Vec<TokenAction>,
    ) {
        let (now, slack, patience) = (self.now, self.config.slack, self.patience());
        let (client, gpu) = self.pair(slot);
        client.occupy(now);
        let left = client.left(gpu.window, now);
        let until = now.saturating_add(left.saturating_add(budget).saturating_add(slack)).min(until);
        let token = match client.holds {
            Some(held) if held.window == gpu.window => {
                // Overuse counts as used: the new time comes on top of it.
                let allowed = held.allowed.max(client.charged).saturating_add(budget);
                Token { allowed, until: until.max(held.until), ..held }
            }
            replaced => {
                let base = replaced.map_or(Duration::ZERO, |token| token.allowed).max(client.charged);
                Token {
                    window: gpu.window,
                    base,
                    heard: client.heard,
                    allowed: base.saturating_add(budget),
                    until,
                    since: now,
                    occupied: Duration::ZERO,
                    sm,
                }
            }
        };
        if let Some(held) = client.holds.take() {
            gpu.free += held.sm;
            gpu.releases.remove(&(client.release_at(&held, patience), slot));
            if held.window != token.window {
                client.settle(held);
            }
        }
        gpu.free -= token.sm;
        gpu.releases.insert((client.release_at(&token, patience), slot));
        client.holds = Some(token);
        client.answered = client.asked.take().unwrap_or((0, now));
        gpu.refile(client);
        actions.push(TokenAction::Allow { client: client.id, allowed: token.allowed, until: token.until });
    }

    /// Checks what the module's essay promises.
    pub(super) fn invariants(&self) {
        for (index, gpu) in self.gpus.iter().enumerate() {
            let mut held = 0;
            let (mut ready, mut paced, mut throttled, mut holders) = (0, 0, 0, 0);
            for &slot in &gpu.clients {
                let client = self.clients.at(slot).expect("listed clients exist");
                assert_eq!(client.gpu, index);
                assert!(client.heard <= client.charged);
                if let Some(token) = client.holds {
                    held += u32::from(token.sm);
                    holders += 1;
                    assert!(gpu.releases.contains(&(client.release_at(&token, self.patience()), slot)));
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
