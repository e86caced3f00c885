//! FaST's multi-token scheduler, literally: slow, and plain enough to be read as its definition.
//!
//! # Problem
//! The engine keeps ranks in ordered sets, release times beside them, and ledgers that are updated in place. Whether all
//! that says the same as the algorithm (FaST-GShare, section 3.3.2, with its gaps closed) is what this model is for. It
//! keeps what happened and derives everything else from it again, whenever it is asked: who is ready is a filter, the
//! order is a sort, what a client has used is a sum over all its leases since it joined.
//!
//! # Algorithm
//! A window of a GPU is `[origin + k * W, origin + (k + 1) * W)`; the origin is when the GPU got its first client, anew
//! whenever it had none. On every event at `now`:
//! 1. per GPU, in order of time: revoke each lease at `expires + grace`, charging its budget;
//! 2. do what the event says;
//! 3. on each GPU where a lease was revoked, a window ended, or the event's client is: dispatch.
//!
//! The account of a client in window `w`: `used(w) = carried(w) + charges to w` and `carried(w + 1) = max(0, used(w) - l * W -
//! owed(w))`, with the largest limit in force in `w`. A lease is charged to its own window; what is only known when that window is
//! two or more past is charged to the present one, if it is more than was charged before.
//!
//! Who held a token or waited for one at the end of `w` **missed** `r * W + owed(w) - used(w)` of it, at least nothing and at most
//! `r * W`, with the request in force at its end. What the clients of the GPU carry of `w` comes back to them: it is **owed** to
//! them in `w + 1`, to each in proportion to what it missed, and no more than that. The rest of what they missed is **lost**.
//!
//! Where something is lost, what they were to have, `r * W - missed(w) + owed(w + 1)`, and what each was ahead in `w`, of all
//! of them together, are divided in proportion to the requests; how far one is **ahead** in `w + 1` is what it has more than its
//! part of that, at most a whole token either way. Where more than a quarter of their requests is lost, each also has a **part**
//! of `w + 1` by the clock: `W * r / sum of r`, at least `r * W` and a quarter of a token.
//!
//! Nobody misses anything of a window in which clients of the GPU came, left or changed, nor of one after which another ended
//! without an event.
//!
//! Its spare time is `7/8` of that of the window before, rounded down, plus `max(0, used(w) - r * W - owed(w))`, and zero when
//! clients of the GPU came, left or changed in that window.
//!
//! The rules of dispatch stand in `Literal::dispatch`, in the order in which the words for them come.
//!
//! # Cost
//! Everything is quadratic or worse. It serves tests.
//!
//! [`Lockstep`] runs any scheduler beside it and compares each answer.

use core::fmt;
use gshare_core::token::{ClientStatus, RevokeReason, ThrottleReason};
use gshare_core::{
    ClientId, Duration, Engine, GpuId, LeaseId, Share, SmShare, SpecError, Timestamp, TokenAction,
    TokenError, TokenEvent, TokenScheduler,
};

/// Settings of the scheduler, with the meaning that they have for the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a test that leaves one out should not build")]
pub struct LiteralConfig {
    /// Length of the window.
    pub window: Duration,
    /// The longest token.
    pub max_token: Duration,
    /// The shortest token that is given ahead of a reservation.
    pub min_token: Duration,
    /// Time beyond its budget after which a token expires.
    pub slack: Duration,
    /// Time after its expiry at which a token is revoked.
    pub grace: Duration,
    /// The most overuse that is carried.
    pub max_debt: Duration,
    /// How many ready clients behind a reservation are looked at.
    pub backfill_depth: u32,
    /// Number of client slots.
    pub max_clients: u32,
    /// Number of GPUs.
    pub max_gpus: u32,
}

/// The literal scheduler. See the [module](self).
#[derive(Debug, Clone)]
pub struct Literal {
    config: LiteralConfig,
    now: Timestamp,
    clients: Vec<Client>,
    /// Every client that ever was.
    known: Vec<ClientId>,
    /// Origin of the windows of every GPU that has clients.
    origins: Vec<(GpuId, Timestamp)>,
    /// GPUs and windows in which clients came, left or changed.
    reshuffled: Vec<(GpuId, u64)>,
    /// GPUs and their windows at whose start the limits of the clients left time over.
    loose: Vec<(GpuId, u64)>,
    leases: u64,
    requests: u64,
}

#[derive(Debug, Clone)]
struct Client {
    id: ClientId,
    gpu: GpuId,
    share: Share,
    /// Limits and requests since it joined, each with the window in which it began to hold.
    limits: Vec<(u64, Duration)>,
    requests: Vec<(u64, Duration)>,
    /// What it was and is owed, by window.
    owed: Vec<(u64, Duration)>,
    /// What was charged: to which window, how much.
    charges: Vec<(u64, Duration)>,
    /// What each of its leases was charged.
    leases: Vec<(LeaseId, Duration)>,
    /// Time used beyond the request in windows that have ended, fading; and the first window that is not in it yet.
    spare: Duration,
    spare_until: u64,
    /// Whether it held a token or waited for one at the end of the last window, and that window counts.
    wanted: bool,
    /// How far it is ahead in this window and in the last, in ns.
    ahead: i64,
    was_ahead: i64,
    /// Its part of the present window by the clock.
    part: Option<Duration>,
    /// The window in which it was last given a token.
    granted: Option<u64>,
    /// Number and time of the request that this token answered.
    answered: (u64, Timestamp),
    held: Option<Lease>,
    unsettled: Option<Lease>,
    /// Number and time of the request that waits.
    asked: Option<(u64, Timestamp)>,
    /// Whether it was told that it is throttled, since it is.
    told: bool,
}

#[derive(Debug, Clone, Copy)]
struct Lease {
    id: LeaseId,
    window: u64,
    budget: Duration,
    expires: Timestamp,
    /// When it was granted, not extended.
    since: Timestamp,
    sm: u16,
    /// What was charged for it, and where in `charges` its own window's part is.
    charged: Duration,
    entry: usize,
}

fn signed(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

/// At most this much ahead, or behind.
fn within(most: Duration, ahead: i128) -> i64 {
    let most = i128::from(signed(most));
    i64::try_from(ahead.clamp(-most, most)).unwrap_or(0)
}

/// Windows without an event after which spare time is forgotten altogether.
const FORGOTTEN: u64 = 320;

/// Where a client stands in the order of dispatch: least first.
type Rank = (bool, i64, u64, u32);

impl Literal {
    /// A scheduler without clients.
    pub const fn new(config: LiteralConfig) -> Self {
        Self {
            config,
            now: Timestamp::ZERO,
            clients: Vec::new(),
            known: Vec::new(),
            origins: Vec::new(),
            reshuffled: Vec::new(),
            loose: Vec::new(),
            leases: 0,
            requests: 0,
        }
    }

    fn position(&self, client: ClientId) -> Option<usize> {
        self.clients.iter().position(|entry| entry.id == client)
    }

    fn window_at(&self, gpu: GpuId, now: Timestamp) -> u64 {
        let origin = self.origins.iter().find(|(known, _)| *known == gpu).map_or(now, |(_, origin)| *origin);
        now.saturating_since(origin).as_nanos() / self.config.window.as_nanos()
    }

    fn window(&self, gpu: GpuId) -> u64 {
        self.window_at(gpu, self.now)
    }

    fn window_end(&self, gpu: GpuId) -> Timestamp {
        let origin =
            self.origins.iter().find(|(known, _)| *known == gpu).map_or(self.now, |(_, origin)| *origin);
        origin.saturating_add(self.config.window.saturating_mul(self.window(gpu) + 1))
    }

    fn release_time(&self, lease: &Lease) -> Timestamp {
        lease.expires.saturating_add(self.config.grace)
    }

    fn free(&self, gpu: GpuId) -> u16 {
        let held: u16 =
            self.clients.iter().filter(|c| c.gpu == gpu).filter_map(|c| c.held).map(|lease| lease.sm).sum();
        SmShare::WHOLE.get() - held
    }

    /// Used in the present window, overuse carried into it included.
    fn used(&self, client: &Client) -> Duration {
        self.used_in(client, self.window(client.gpu))
    }

    /// Used in a window, as far as it is known now, overuse carried into it included.
    fn used_in(&self, client: &Client, last: u64) -> Duration {
        let mut used = Duration::ZERO;
        for window in client.limits[0].0..=last {
            if window > client.limits[0].0 {
                let limit = client.limit_in(window - 1).saturating_add(client.owed_in(window - 1));
                used = used.saturating_sub(limit).min(self.config.max_debt);
            }
            used = used.saturating_add(self.charged(client, window));
        }
        used
    }

    fn outstanding(&self, client: &Client) -> Duration {
        match client.held {
            Some(lease) if lease.window == self.window(client.gpu) => {
                lease.budget.saturating_sub(lease.charged)
            }
            _ => Duration::ZERO,
        }
    }

    /// What was charged for what a client holds and cannot have run since it was granted.
    fn running(&self, client: &Client) -> Duration {
        let running = |lease: Lease| lease.charged.saturating_sub(self.now.saturating_since(lease.since));
        client.held.map_or(Duration::ZERO, running)
    }

    /// How long what a client holds still runs at least.
    fn left(&self, client: &Client) -> Duration {
        self.outstanding(client).max(self.running(client))
    }

    fn committed(&self, client: &Client) -> Duration {
        self.used(client).saturating_add(self.outstanding(client))
    }

    fn request(&self, client: &Client) -> Duration {
        client.share.quota.request().of(self.config.window)
    }

    fn owed(&self, client: &Client) -> Duration {
        client.owed_in(self.window(client.gpu))
    }

    fn limit(&self, client: &Client) -> Duration {
        client.share.quota.limit().of(self.config.window)
    }

    fn miss(&self, client: &Client) -> Duration {
        self.request(client).saturating_add(self.owed(client)).saturating_sub(self.committed(client))
    }

    fn remain(&self, client: &Client) -> Duration {
        self.limit(client).saturating_add(self.owed(client)).saturating_sub(self.committed(client))
    }

    fn is_throttled(&self, client: &Client) -> bool {
        client.asked.is_some() && self.remain(client).is_zero()
    }

    /// When a client that waits may be served at the earliest, if that is later than now and nothing else forbids it: where the
    /// limits left time over, once its limit has paid back what it carries, at its pace.
    fn paced(&self, client: &Client) -> Option<Timestamp> {
        let window = self.window(client.gpu);
        if client.asked.is_none() || self.is_throttled(client) || !self.loose.contains(&(client.gpu, window))
        {
            return None;
        }
        let carried = self.used(client).saturating_sub(self.charged(client, window));
        let start = self.window_end(client.gpu).saturating_sub(self.config.window);
        let resumes = start.saturating_add(self.pace(carried, client.limit_in(window)));
        (self.now < resumes).then_some(resumes)
    }

    /// The part of a window in which a limit pays overuse back; at most the whole.
    fn pace(&self, overuse: Duration, limit: Duration) -> Duration {
        let part = u128::from(self.config.window.as_nanos()) * u128::from(overuse.min(limit).as_nanos());
        Duration::from_nanos(u64::try_from(part / u128::from(limit.as_nanos().max(1))).unwrap_or(u64::MAX))
    }

    /// What was charged to a window.
    fn charged(&self, client: &Client, window: u64) -> Duration {
        client.charges.iter().filter(|charge| charge.0 == window).map(|charge| charge.1).sum()
    }

    /// What a client carries of the last window, and what it missed of it.
    fn last_window(&self, client: &Client) -> (Duration, Duration) {
        let Some(last) = self.window(client.gpu).checked_sub(1) else { return Default::default() };
        let (used, owed) = (self.used_in(client, last), client.owed_in(last));
        let request = client.request_in(last);
        let missed = request.saturating_add(owed).saturating_sub(used).min(request);
        let carried = used.saturating_sub(client.limit_in(last).saturating_add(owed));
        (carried, if client.wanted { missed } else { Duration::ZERO })
    }

    /// What the last window of a GPU leaves for this one: who is owed what, how far ahead each is, and their parts.
    fn look_back(&mut self, gpu: GpuId) {
        let LiteralConfig { window: length, max_token, .. } = self.config;
        let window = self.window(gpu);
        let here: Vec<usize> = (0..self.clients.len()).filter(|&at| self.clients[at].gpu == gpu).collect();
        let last: Vec<(Duration, Duration)> =
            here.iter().map(|&at| self.last_window(&self.clients[at])).collect();
        let carried: i128 = last.iter().map(|last| i128::from(signed(last.0))).sum();
        let missed: i128 = last.iter().map(|last| i128::from(signed(last.1))).sum();
        let wanted = |at: &&usize| self.clients[**at].wanted;
        let request = |client: &Client| {
            i128::from(signed(window.checked_sub(1).map_or(Duration::ZERO, |last| client.request_in(last))))
        };
        let requests: i128 = here.iter().filter(wanted).map(|&at| request(&self.clients[at])).sum();
        let ahead: i128 = here.iter().filter(wanted).map(|&at| i128::from(self.clients[at].was_ahead)).sum();
        let lost = (missed - carried).max(0);
        for (&at, &(_, own)) in here.iter().zip(&last) {
            let client = &mut self.clients[at];
            let own = i128::from(signed(own));
            let owed = if own > 0 { own * missed.min(carried) / missed } else { 0 };
            client.owed.retain(|(known, _)| *known != window);
            client.owed.push((window, Duration::from_nanos(u64::try_from(owed).unwrap_or(0))));
            (client.ahead, client.part) = (0, None);
            if !client.wanted || lost == 0 {
                continue;
            }
            let request = request(client);
            let has = request - own + owed + i128::from(client.was_ahead);
            client.ahead = within(max_token, has - request * (requests - lost + ahead) / requests);
            if lost * 4 > requests {
                let length = i128::from(signed(length));
                let part = request * length / requests.min(length);
                let least = max_token.as_nanos().div_ceil(4);
                client.part = Some(Duration::from_nanos(u64::try_from(part).unwrap_or(u64::MAX).max(least)));
            }
        }
    }

    /// The order of dispatch: unmet before met; the unmet by what they got, less what they are owed, and more by what those are
    /// ahead who have had a token in this window, in 65,536ths of their requests, less a twelfth of the part of a window (of four
    /// at most) that they will have waited at its end; last who holds a lease of another window; met by what they got beyond it in
    /// this window and before; then who has waited longest, then the lower slot. `None` for who is not ready.
    fn rank(&self, client: &Client) -> Option<Rank> {
        let (number, since) = client.asked.filter(|_| !self.is_throttled(client))?;
        if self.paced(client).is_some() {
            return None;
        }
        let (committed, request) = (self.committed(client), self.request(client));
        let entitled = request.saturating_add(self.owed(client));
        let met = committed >= entitled;
        let not_known_yet = client.held.is_some_and(|lease| lease.window != self.window(client.gpu));
        let served = client.granted == Some(self.window(client.gpu));
        let key = match met {
            true => signed((committed - entitled).saturating_add(client.spare)),
            false if not_known_yet => i64::MAX,
            false => {
                let got = signed(committed) - signed(self.owed(client));
                let request = signed(request).max(1);
                let counted = got + if served { client.ahead } else { 0 };
                let length = signed(self.config.window);
                let waited = signed(self.window_end(client.gpu).saturating_since(since)).min(4 * length);
                counted * 65_536 / request - waited * (65_536 / 12) / length
            }
        };
        Some((met, key, number, client.id.slot()))
    }

    /// Step 1 on one GPU; gives whether anything happened.
    fn catch_up(&mut self, gpu: GpuId, until: Timestamp, actions: &mut Vec<TokenAction>) -> bool {
        let window_before = self.window_at(gpu, self.now);
        let here = self.clients.iter().filter(|client| client.gpu == gpu);
        let resumed = here.filter_map(|client| self.paced(client)).any(|resumes| resumes <= until);
        let mut revoked = false;
        loop {
            let due = self.clients.iter().enumerate().filter(|(_, client)| client.gpu == gpu);
            let due = due.filter_map(|(at, client)| {
                Some((self.release_time(client.held.as_ref()?), client.id.slot(), at))
            });
            let Some((release, _, at)) = due.min().filter(|(release, _, _)| *release <= until) else { break };
            self.now = self.now.max(release);
            self.end_windows(gpu);
            let Some(lease) = self.clients[at].held else { break };
            let client = self.clients[at].id;
            actions.push(TokenAction::Revoke { client, lease: lease.id, reason: RevokeReason::Expired });
            self.settle(at, lease.id, lease.budget.max(lease.charged));
            self.clients[at].unsettled = self.clients[at].held.take();
            revoked = true;
        }
        self.now = until;
        self.end_windows(gpu);
        revoked || resumed || self.window_at(gpu, until) != window_before
    }

    /// Brings the spare time of a GPU's clients up to date: at the end of each window an eighth of it, rounded up, is
    /// forgotten, and what was used beyond the request in that window is added. When clients came, left or changed since
    /// the end of a window before, and after many windows without an event, it is forgotten altogether.
    fn end_windows(&mut self, gpu: GpuId) {
        let window = self.window(gpu);
        // Only a window that has ended sees what happened in it.
        let reshuffled = self.reshuffled.iter().any(|(known, at)| *known == gpu && *at < window);
        self.reshuffled.retain(|(known, at)| *known != gpu || *at >= window);
        let until =
            self.clients.iter().filter(|client| client.gpu == gpu).map(|client| client.spare_until).min();
        let windows = until.map_or(0, |until| window - until);
        for at in 0..self.clients.len() {
            let client = &self.clients[at];
            if client.gpu != gpu {
                continue;
            }
            let mut spare = client.spare;
            for ended in client.spare_until..window {
                let beyond = self.beyond(client, ended);
                let faded = Duration::from_nanos(spare.as_nanos().div_ceil(8));
                spare = spare.saturating_sub(faded).saturating_add(beyond);
            }
            if window > client.spare_until && reshuffled || window - client.spare_until > FORGOTTEN {
                spare = Duration::ZERO;
            }
            let client = &mut self.clients[at];
            (client.spare, client.spare_until) = (spare, window);
            if windows > 0 {
                client.was_ahead = client.ahead;
                client.wanted =
                    windows == 1 && !reshuffled && (client.asked.is_some() || client.held.is_some());
            }
        }
        if windows > 0 {
            self.look_back(gpu);
            let here = self.clients.iter().filter(|client| client.gpu == gpu);
            let limits: u32 = here.map(|client| u32::from(client.share.quota.limit().get())).sum();
            self.loose.retain(|(known, _)| *known != gpu);
            if limits < 10_000 {
                self.loose.push((gpu, window));
            }
        }
        self.review();
    }

    /// What a client used of a window that it had not requested.
    fn beyond(&self, client: &Client, window: u64) -> Duration {
        let entitled = client.request_in(window).saturating_add(client.owed_in(window));
        self.used_in(client, window).saturating_sub(entitled)
    }

    /// Charges `used` for a lease in all.
    fn settle(&mut self, at: usize, lease: LeaseId, used: Duration) {
        let window = self.window(self.clients[at].gpu);
        let client = &mut self.clients[at];
        let Some(lease) = client.held.iter_mut().chain(&mut client.unsettled).find(|known| known.id == lease)
        else {
            return;
        };
        let before = core::mem::replace(&mut lease.charged, used);
        client.leases.retain(|(id, _)| *id != lease.id);
        client.leases.push((lease.id, used));
        let lease = *lease;
        let known = self.beyond(&self.clients[at], lease.window);
        if lease.window + 1 < window {
            self.clients[at].charges.push((window, used.saturating_sub(before)));
        } else {
            self.clients[at].charges[lease.entry].1 = used;
        }
        if lease.window + 1 == window {
            // It came too late for the end of its window.
            let after = self.beyond(&self.clients[at], lease.window);
            let client = &mut self.clients[at];
            client.spare = client.spare.saturating_add(after).saturating_sub(known);
            let gpu = client.gpu;
            self.look_back(gpu);
        }
        self.review();
    }

    /// Whoever is not throttled any more is told again the next time.
    fn review(&mut self) {
        for at in 0..self.clients.len() {
            let throttled = self.is_throttled(&self.clients[at]);
            self.clients[at].told &= throttled;
        }
    }

    /// Tells the client of the event, once, when what it has used is its limit: not while it holds a lease that may leave
    /// it time.
    fn tell(&mut self, at: usize, actions: &mut Vec<TokenAction>) {
        self.review();
        let client = &self.clients[at];
        let (used, limit, owed) = (self.used(client), self.limit(client), self.owed(client));
        if !self.is_throttled(client) || client.told || used < limit.saturating_add(owed) {
            return;
        }
        let largest = client.limit_in(self.window(client.gpu));
        let carried = used.saturating_sub(largest.saturating_add(owed));
        let more = carried.as_nanos() / limit.as_nanos().max(1);
        let until = self.window_end(client.gpu).saturating_add(self.config.window.saturating_mul(more));
        actions.push(TokenAction::Throttle {
            client: client.id,
            until,
            reason: ThrottleReason::LimitReached,
        });
        self.clients[at].told = true;
    }

    /// Step 3.
    fn dispatch(&mut self, gpu: GpuId, actions: &mut Vec<TokenAction>) {
        let Self { config, now, .. } = *self;
        let (window, window_end) = (self.window(gpu), self.window_end(gpu));
        let left_in_window = window_end.saturating_since(now);
        let mut ready = self.ready(gpu);
        let count = ready.len() as u64;
        let mut reservation: Option<(Timestamp, u16)> = None;
        let mut behind = 0;
        while let Some(at) = (!ready.is_empty()).then(|| ready.remove(0)) {
            let client = &self.clients[at];
            if reservation.is_some() {
                behind += 1;
                if behind > config.backfill_depth {
                    break;
                }
            }

            // SMs: those of the lease that is extended, or of the share; a holder has its own already.
            let extended = client.held.filter(|lease| lease.window == window);
            let sm = extended.map_or(client.share.sm.get(), |lease| lease.sm);
            let needed = sm.saturating_sub(client.held.map_or(0, |lease| lease.sm));
            let free = self.free(gpu);

            // Budget: within token and limit, and in the window after what runs; while others are ready, no more than the
            // miss, or a turn; without a part by the clock, the miss less what it is ahead, if more than a quarter of a
            // token, but half of it.
            let rest = left_in_window.saturating_sub(self.running(client));
            let mut budget = config.max_token.min(self.remain(client)).min(rest);
            if count > 1 {
                let miss = self.miss(client);
                let least = Duration::from_nanos(config.max_token.as_nanos().div_ceil(4));
                let turn = Duration::from_nanos(left_in_window.as_nanos() / count).max(least);
                let ahead = Duration::from_nanos(u64::try_from(client.ahead).unwrap_or(0));
                let half = Duration::from_nanos(miss.as_nanos().div_ceil(2));
                let whole = client.part.is_some() || ahead <= least;
                let due = if whole { miss } else { miss.saturating_sub(ahead).max(half) };
                budget = budget.min(if miss.is_zero() { turn } else { due });
            }

            // Room: the first that does not fit is promised room; who comes behind must not take it away.
            match reservation {
                _ if needed > free => {
                    reservation = reservation.or_else(|| Some(self.reserve(gpu, client.id, needed)));
                    continue;
                }
                None => {}
                Some((at, beside)) if sm <= beside => reservation = Some((at, beside - sm)),
                Some((at, _)) => {
                    let left = self.left(client);
                    let overhead = left.saturating_add(config.slack).saturating_add(config.grace);
                    budget = budget.min(at.saturating_since(now).saturating_sub(overhead));
                    if budget < config.min_token {
                        continue;
                    }
                }
            }
            if budget.is_zero() {
                // What runs lasts until the window ends.
                continue;
            }

            self.grant(at, budget, actions);
            if self.free(gpu) > free {
                // It gave SMs back with the lease that was replaced: who did not fit may fit now.
                (ready, reservation, behind) = (self.ready(gpu), None, 0);
            }
        }
    }

    /// The ready clients of a GPU in the order of dispatch.
    fn ready(&self, gpu: GpuId) -> Vec<usize> {
        let here = (0..self.clients.len()).filter(|&at| self.clients[at].gpu == gpu);
        let mut ranks: Vec<(Rank, usize)> =
            here.filter_map(|at| Some((self.rank(&self.clients[at])?, at))).collect();
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, at)| at).collect()
    }

    /// When there is room for `needed` SMs at the latest, and how many more are free then.
    fn reserve(&self, gpu: GpuId, head: ClientId, needed: u16) -> (Timestamp, u16) {
        let others = self.clients.iter().filter(|client| client.gpu == gpu && client.id != head);
        let mut releases: Vec<(Timestamp, u32, u16)> = others
            .filter_map(|client| Some((self.release_time(&client.held?), client.id.slot(), client.held?.sm)))
            .collect();
        releases.sort_unstable();
        let mut free = self.free(gpu);
        for (release, _, sm) in releases {
            free += sm;
            if free >= needed {
                return (release, free - needed);
            }
        }
        (self.now, 0)
    }

    fn grant(&mut self, at: usize, budget: Duration, actions: &mut Vec<TokenAction>) {
        let gpu = self.clients[at].gpu;
        let (window, window_end) = (self.window(gpu), self.window_end(gpu));
        let left = self.left(&self.clients[at]);
        let runs = left.saturating_add(budget).saturating_add(self.config.slack);
        let client = &mut self.clients[at];
        // By the clock, it lasts no longer than the part of a window that was too short for all.
        let runs = client.part.map_or(runs, |part| runs.min(part));
        let expires = self.now.saturating_add(runs).min(window_end);
        let lease = match client.held {
            Some(held) if held.window == window => Lease {
                budget: held.budget.max(held.charged).saturating_add(budget),
                expires: expires.max(held.expires),
                ..held
            },
            replaced => {
                client.unsettled = replaced.or(client.unsettled);
                self.leases += 1;
                client.charges.push((window, Duration::ZERO));
                let entry = client.charges.len() - 1;
                let (id, sm) = (LeaseId(self.leases), client.share.sm.get());
                let (since, charged) = (self.now, Duration::ZERO);
                Lease { id, window, budget, expires, since, sm, charged, entry }
            }
        };
        client.held = Some(lease);
        client.granted = Some(window);
        client.answered = client.asked.take().unwrap_or((0, self.now));
        let Lease { id, budget, expires, .. } = lease;
        actions.push(TokenAction::Grant { client: client.id, lease: id, budget, expires });
        self.review();
    }

    /// Why an event must be refused.
    fn refuse(&self, now: Timestamp, event: &TokenEvent) -> Option<TokenError> {
        if now < self.now {
            return Some(TokenError::TimeWentBack { now, last: self.now });
        }
        let bad_share = |client, share: &Share| {
            share.sm.is_zero().then_some(TokenError::BadShare { client, source: SpecError::ZeroSm })
        };
        let unknown =
            |client| self.position(client).is_none().then_some(TokenError::UnknownClient { client });
        match *event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                let LiteralConfig { max_clients, max_gpus, .. } = self.config;
                let slot_is_taken = self.clients.iter().any(|entry| entry.id.slot() == client.slot());
                let was_used_later = self
                    .known
                    .iter()
                    .any(|known| known.slot() == client.slot() && known.generation() >= client.generation());
                bad_share(client, &share)
                    .or((client.slot() >= max_clients)
                        .then_some(TokenError::TooManyClients { client, limit: max_clients }))
                    .or((gpu.0 >= max_gpus).then_some(TokenError::UnknownGpu { gpu, limit: max_gpus }))
                    .or((slot_is_taken || was_used_later).then_some(TokenError::ClientExists { client }))
            }
            TokenEvent::ShareChanged { client, share } => {
                unknown(client).or_else(|| bad_share(client, &share))
            }
            TokenEvent::ClientLeft { client } | TokenEvent::TokenRequested { client } => unknown(client),
            TokenEvent::TokenReturned { client, lease, used, .. }
            | TokenEvent::UsageReported { client, lease, used } => {
                let Some(at) = self.position(client) else { return unknown(client) };
                let entry = &self.clients[at];
                match (entry.held, entry.unsettled) {
                    (Some(held), _) if held.id == lease => {
                        let reported = held.charged;
                        (used < reported).then_some(TokenError::UsageShrank { client, used, reported })
                    }
                    (_, Some(earlier)) if earlier.id == lease => None,
                    _ => Some(TokenError::StaleLease { client, lease }),
                }
            }
            _ => None,
        }
    }

    /// Step 2; gives the client's place, while it has one.
    fn take(&mut self, event: TokenEvent) -> Option<usize> {
        match event {
            TokenEvent::ClientJoined { client, gpu, share } => {
                if self.clients.iter().all(|entry| entry.gpu != gpu) {
                    self.origins.retain(|(known, _)| *known != gpu);
                    self.origins.push((gpu, self.now));
                }
                let limits = vec![(self.window(gpu), share.quota.limit().of(self.config.window))];
                let requests = vec![(self.window(gpu), share.quota.request().of(self.config.window))];
                let (charges, leases, held, unsettled, asked, told) =
                    (Vec::new(), Vec::new(), None, None, None, false);
                let (spare, spare_until) = (Duration::ZERO, limits[0].0);
                let entry = Client {
                    id: client,
                    gpu,
                    share,
                    limits,
                    requests,
                    owed: Vec::new(),
                    charges,
                    leases,
                    spare,
                    spare_until,
                    wanted: false,
                    ahead: 0,
                    was_ahead: 0,
                    part: None,
                    granted: None,
                    answered: (0, Timestamp::ZERO),
                    held,
                    unsettled,
                    asked,
                    told,
                };
                self.known.push(client);
                self.reshuffled.retain(|(known, _)| *known != gpu || entry.limits[0].0 > 0);
                self.reshuffled.push((gpu, entry.limits[0].0));
                self.clients.push(entry);
                None
            }
            TokenEvent::ClientLeft { client } => {
                let gpu = self.clients[self.position(client)?].gpu;
                self.reshuffled.push((gpu, self.window(gpu)));
                self.clients.retain(|entry| entry.id != client);
                None
            }
            TokenEvent::ShareChanged { client, share } => {
                let at = self.position(client)?;
                let window = self.window(self.clients[at].gpu);
                self.clients[at].share = share;
                self.clients[at].limits.push((window, share.quota.limit().of(self.config.window)));
                self.clients[at].requests.push((window, share.quota.request().of(self.config.window)));
                self.reshuffled.push((self.clients[at].gpu, window));
                Some(at)
            }
            TokenEvent::TokenRequested { client } => {
                self.requests += 1;
                let at = self.position(client)?;
                self.clients[at].asked = self.clients[at].asked.or(Some((self.requests, self.now)));
                Some(at)
            }
            TokenEvent::TokenReturned { client, lease, used, again } => {
                let at = self.position(client)?;
                self.settle(at, lease, used);
                let entry = &mut self.clients[at];
                if entry.held.take_if(|held| held.id == lease).is_some()
                    || entry.unsettled.is_some_and(|earlier| earlier.id == lease)
                {
                    entry.unsettled = None;
                }
                if again {
                    self.take(TokenEvent::TokenRequested { client });
                    // What could not be used did not answer its request.
                    let entry = &mut self.clients[at];
                    if used.is_zero() && entry.asked == Some((self.requests, self.now)) {
                        entry.asked = Some(entry.answered);
                    }
                }
                Some(at)
            }
            TokenEvent::UsageReported { client, lease, used } => {
                let at = self.position(client)?;
                self.settle(at, lease, used);
                Some(at)
            }
            _ => None,
        }
    }
}

impl Client {
    /// The largest limit in force in a window.
    fn limit_in(&self, window: u64) -> Duration {
        let at_its_start = self.limits.iter().rev().find(|(from, _)| *from < window);
        let in_it = self.limits.iter().filter(|(from, _)| *from == window);
        at_its_start.into_iter().chain(in_it).map(|(_, limit)| *limit).max().unwrap_or(Duration::ZERO)
    }

    /// The request in force at the end of a window.
    fn request_in(&self, window: u64) -> Duration {
        let until_then = self.requests.iter().rev().find(|(from, _)| *from <= window);
        until_then.map_or(Duration::ZERO, |(_, request)| *request)
    }

    fn owed_in(&self, window: u64) -> Duration {
        let owed = self.owed.iter().find(|(known, _)| *known == window);
        owed.map_or(Duration::ZERO, |(_, owed)| *owed)
    }
}

impl Engine for Literal {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        if let Some(error) = self.refuse(now, &event) {
            return Err(error);
        }
        let before = self.now;
        let mut concerned: Vec<GpuId> = Vec::new();
        for gpu in (0..self.config.max_gpus).map(GpuId) {
            self.now = before;
            if self.catch_up(gpu, now, actions) {
                concerned.push(gpu);
            }
        }
        self.now = now;
        let gpu_of = |clients: &[Client], client| {
            clients.iter().find(|entry| entry.id == client).map(|entry| entry.gpu)
        };
        concerned.extend(match event {
            TokenEvent::ShareChanged { client, .. }
            | TokenEvent::ClientLeft { client }
            | TokenEvent::TokenRequested { client }
            | TokenEvent::TokenReturned { client, .. }
            | TokenEvent::UsageReported { client, .. } => gpu_of(&self.clients, client),
            _ => None,
        });
        if let Some(at) = self.take(event) {
            self.tell(at, actions);
        }
        concerned.sort_unstable();
        concerned.dedup();
        for gpu in concerned {
            if self.clients.iter().any(|client| client.gpu == gpu) {
                self.dispatch(gpu, actions);
            }
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let releases =
            self.clients.iter().filter_map(|client| client.held).map(|lease| self.release_time(&lease));
        let ends = self
            .clients
            .iter()
            .filter(|client| client.asked.is_some())
            .map(|client| self.window_end(client.gpu));
        releases.chain(ends).chain(self.clients.iter().filter_map(|client| self.paced(client))).min()
    }
}

impl TokenScheduler for Literal {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        let entry = &self.clients[self.position(client)?];
        let mut status = ClientStatus::joined(client, entry.gpu, entry.share);
        status.window_used = self.used(entry);
        status.total_used = entry.leases.iter().map(|(_, used)| *used).sum();
        status.holds = entry.held.map(|lease| lease.id);
        status.waiting_since = entry.asked.map(|(_, since)| since);
        Some(status)
    }

    fn window(&self) -> Duration {
        self.config.window
    }
}

/// Runs a scheduler beside the [`Literal`] one and panics at the first difference: in the answer, the actions, the deadline
/// or the status of any client.
pub struct Lockstep {
    literal: Literal,
    other: Box<dyn TokenScheduler>,
    actions: Vec<TokenAction>,
}

impl Lockstep {
    /// Both without clients, and with equal settings.
    pub const fn new(literal: Literal, other: Box<dyn TokenScheduler>) -> Self {
        Self { literal, other, actions: Vec::new() }
    }
}

impl fmt::Debug for Lockstep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lockstep").field("literal", &self.literal).finish_non_exhaustive()
    }
}

impl Engine for Lockstep {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.actions.clear();
        let expected = self.literal.handle(now, event, &mut self.actions);
        let first = actions.len();
        let answer = self.other.handle(now, event, actions);
        let at = format!("after {event:?} at {now}");
        assert_eq!(answer, expected, "another answer than the model's (right) {at}");
        assert_eq!(actions[first..], self.actions, "other actions than the model's (right) {at}");
        let deadlines = (self.other.next_deadline(), self.literal.next_deadline());
        assert_eq!(deadlines.0, deadlines.1, "another deadline than the model's (right) {at}");
        for client in &self.literal.known {
            let states = (self.other.client(*client), self.literal.client(*client));
            assert_eq!(states.0, states.1, "another status of {client} than the model's (right) {at}");
        }
        answer
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.literal.next_deadline()
    }
}

impl TokenScheduler for Lockstep {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.literal.client(client)
    }

    fn window(&self) -> Duration {
        self.other.window()
    }
}
