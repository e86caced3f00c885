//! The accounts of the token scheduler: each client's use, the token holders and the waiting clients.
//!
//! The [`Ledger`] does steps 1 and 2 of an event (see [`multi_token`](super::multi_token)), marks the GPUs on which a client may now
//! be served ([`Gpu::dirty`]), and carries out a grant. The dispatch picks the next client.
//!
//! # Totals
//! Each report sets `heard` to the client's total, and `charged = max(charged, heard)` follows. Time within a token's allowance counts
//! for the token's window, and time beyond the allowance counts for the window of the report. A client is charged up to a token's
//! `allowed` total when the ledger takes the token back.
//!
//! # Invariants
//! - `heard <= charged`;
//! - the SMs of all holders and the free SMs add up to the whole;
//! - a client is at most one of ready, paced and throttled, and only a waiting client is any of these;
//! - every holder is in the table of release times.
//!
//! # Cost
//! An event costs O(log n) for n clients on the GPU, and the end of a window costs O(n log n). A client takes about 250 bytes.

use super::client::{Client, Filed, Last, Past, Patience, Rank, Token, signed};
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

#[derive(Debug, Default)]
pub(super) struct Gpu {
    /// Clients on this GPU, by slot.
    pub(super) clients: Vec<u32>,
    pub(super) window: u64,
    pub(super) window_end: Timestamp,
    /// Length of a window.
    pub(super) length: Duration,
    /// Whether the requests add up to more than the whole, so each client is kept in a slot of the window. Lag then follows the charge and
    /// counts in its window only; otherwise lag follows the occupied clock time.
    pub(super) by_slots: bool,
    /// The longest time for which a recent token kept the GPU.
    longest: Duration,
    /// The time for which the clients are filed.
    pub(super) now: Timestamp,
    /// Whether the limits of its clients left time over when this window began.
    pub(super) undersubscribed: bool,
    pub(super) free: u16,
    pub(super) ready: BTreeSet<Rank>,
    /// Clients waiting until a part of their carried overuse is paid back: the time and the slot.
    paced: BTreeSet<(Timestamp, u32)>,
    pub(super) throttled: u32,
    /// The latest time at which each holder's SMs come back, and the holder's slot.
    pub(super) releases: BTreeSet<(Timestamp, u32)>,
    /// Something changed since the last dispatch.
    pub(super) dirty: bool,
    /// Clients joined, left or changed shares in this window, so surplus says nothing about the present clients.
    pub(super) reshuffled: bool,
    /// Number of such changes so far.
    pub(super) shuffles: u64,
}

impl Gpu {
    fn new(length: Duration) -> Self {
        Self { free: SmShare::WHOLE.get(), length, ..Self::default() }
    }

    /// Start of this window.
    pub(super) fn start(&self) -> Timestamp {
        self.window_end.saturating_sub(self.length)
    }

    /// Moves a client to its present place.
    fn refile(&mut self, client: &mut Client) {
        let filed = client.file(self);
        client.delayed = client.delays(self.now);
        let waits = matches!(filed, Filed::Ready(_)) && client.holds.is_none();
        client.delayed_since = waits.then_some(self.now);
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

impl Ledger {
    /// An empty ledger, or the error of a setting out of bounds.
    pub(super) fn new(config: MultiTokenConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let (clients, gpus) = (NamedSlots::default(), Vec::new());
        Ok(Self { config, now: Timestamp::ZERO, next_request: 0, clients, gpus })
    }

    /// Does steps 1 and 2 of an event. The caller then dispatches the GPUs marked dirty.
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
                let (known, gpu) = self.pair(client.slot());
                known.reshare(share, gpu.window_end.saturating_since(now), gpu.length);
                gpu.refile(known);
                let gpu = known.gpu;
                self.reshuffle(gpu);
                self.tell(client.slot(), actions);
            }
            TokenEvent::ClassChanged { client, class } => {
                let (known, gpu) = self.pair(client.slot());
                known.slo_sensitive = class.is_slo_sensitive();
                gpu.dirty = true;
                gpu.refile(known);
            }
            TokenEvent::ClientLeft { client } => self.leave(client.slot()),
            TokenEvent::Used { client, used, state } => {
                self.charge(client.slot(), used);
                self.obey(client.slot(), state);
                self.tell(client.slot(), actions);
            }
            // Catching up has already dealt with a deadline.
            _ => {}
        }
        Ok(())
    }

    /// Applies a client's reported state.
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
            // The held token answers the client's request.
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
        status.delayed = known.delays(self.now);
        Some(status)
    }

    pub(super) fn get(&self, id: ClientId) -> Result<&Client, TokenError> {
        self.clients.get(id).ok_or(TokenError::UnknownClient { client: id })
    }

    /// Refuses an impossible event before any state changes.
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
            TokenEvent::ClassChanged { client, .. } | TokenEvent::ClientLeft { client } => {
                self.get(client).map(|_| ())
            }
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

    /// The client in a slot of a queue or table.
    pub(super) fn client(&self, slot: u32) -> &Client {
        self.clients.at(slot).expect("a listed slot has a client")
    }

    fn patience(&self) -> Patience {
        Patience { grace: self.config.grace, max_debt: self.config.max_debt }
    }

    /// Accounts for clients that joined a GPU, left it or changed their shares.
    fn reshuffle(&mut self, index: usize) {
        let requests = self.gpus[index].clients.iter();
        let requests = requests.map(|&slot| u32::from(self.client(slot).share.quota.request().get()));
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

    /// Step 1: ends all tokens, windows and pauses due by `now`, in the order of time.
    fn catch_up(&mut self, now: Timestamp, actions: &mut Vec<TokenAction>) {
        let before = core::mem::replace(&mut self.now, now);
        for index in 0..self.gpus.len() {
            self.gpus[index].now = now;
            while let Some(&(release, slot)) = self.gpus[index].releases.first() {
                if release > now {
                    break;
                }
                self.roll(index, release);
                // The token ends at its release time, however late the host calls.
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
        let limit = |&slot: &u32| u32::from(self.client(slot).share.quota.limit().get());
        let limits: u32 = clients.iter().map(limit).sum();
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

    /// Decides which part of its lag each client of a GPU keeps beyond the end of a window. Clients keep no lag on a GPU by slots or after
    /// several windows at once. Their surplus ends after several windows at once, or where clients joined, left or changed shares.
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
                // No client gained the difference, so all clients bear it in proportion to their requests.
                lag - (behind - ahead) * i128::from(signed(client.request)) / requests.max(1)
            } else if ahead > behind && lag < 0 {
                // The difference cost no other client time, so it is forgiven.
                lag * behind / ahead
            } else {
                lag
            };
            let lag = i64::try_from(lag).unwrap_or(0).min(client.debt());
            client.begin_window(*past, lag, single && settled, gpu);
        }
    }

    /// Takes an overdue token back and charges its client up to the token's allowed total.
    fn expire(&mut self, slot: u32, actions: &mut Vec<TokenAction>) {
        let (client, gpu) = self.pair(slot);
        gpu.dirty = true;
        let token = client.holds.expect("a client in the table of release times holds a token");
        actions.push(TokenAction::Stop { client: client.id });
        self.charge_to(slot, token.allowed);
        self.release(slot);
    }

    /// Step 2: records a client's reported total and charges up to it.
    fn charge(&mut self, slot: u32, used: Duration) {
        self.pair(slot).0.heard = used;
        self.charge_to(slot, used);
    }

    /// Charges a client up to this total, unless its charge is as large already.
    fn charge_to(&mut self, slot: u32, total: Duration) {
        let (now, patience) = (self.now, self.patience());
        let (client, gpu) = self.pair(slot);
        let more = total.saturating_sub(client.charged);
        let before = client.holds.map(|token| client.release_at(&token, patience));
        // Time within a token's allowance counts for its window, and time beyond for the window of the report.
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
            // The charge belongs to the last token, and the token's occupied time is off the lag already.
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

    /// Ends a client's token, if any, and frees its SMs.
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

    /// Makes a client wait from now on, unless it waits already. After an `unused` token the client waits in its old place.
    fn ask(&mut self, slot: u32, unused: bool) {
        self.next_request += 1;
        let (number, now) = (self.next_request, self.now);
        let (client, gpu) = self.pair(slot);
        client.occupy(now);
        client.asked.get_or_insert(if unused { client.answered } else { (number, now) });
        gpu.dirty = true;
        gpu.refile(client);
    }

    /// Notifies a throttled client once throttling is certain; until then a held token may still leave it time.
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
        // Each window pays back one limit, and time is left once the carried overuse is below the limit.
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
            // The old windows matter to no client's account.
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
            slo_sensitive: false,
            heard: Duration::ZERO,
            charged: Duration::ZERO,
            idled: Duration::ZERO,
            answered: (0, Timestamp::ZERO),
            holds: None,
            asked: None,
            filed: Filed::Nowhere,
            delayed_since: None,
            delayed: Duration::ZERO,
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

    /// Grants a token of `budget`, or extends the held token. The token ends at `until` at the latest, and `until` is at most the end of
    /// the window. A new token replaces a token of an earlier window.
    pub(super) fn grant(
        &mut self,
        slot: u32,
        budget: Duration,
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
                // Overuse counts as used, and the budget comes on top of it.
                let allowed = held.allowed.max(client.charged).saturating_add(budget);
                Token { allowed, until: until.max(held.until), recalled: None, ..held }
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
                    sm: client.share.sm.get(),
                    recalled: None,
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

    /// A client's token, granted ahead of a reservation, ends in time for it.
    pub(super) fn ends_in_time(&mut self, slot: u32) {
        let token = self.pair(slot).0.holds.as_mut().expect("a client has its token");
        token.recalled = Some(token.allowed);
    }

    /// Asks other holders to give their tokens back early (see [`Client::recalled_at`]), as many as make room for the client of `rank`; none
    /// if all of them would make too little room.
    pub(super) fn recall(&mut self, index: usize, rank: Rank, needed: u16, actions: &mut Vec<TokenAction>) {
        let (now, least) = (self.now, self.config.min_token);
        let gpu = &self.gpus[index];
        let others = || {
            let others = gpu.releases.iter().filter(|&&(_, other)| other != rank.slot);
            others.map(|&(_, other)| self.client(other)).filter_map(|client| Some((client, client.holds?)))
        };
        let recalled = others().filter(|(_, token)| token.recalled.is_some());
        let mut room = gpu.free + recalled.map(|(_, token)| token.sm).sum::<u16>();
        // Mostly they are recalled already.
        if room >= needed {
            return;
        }
        let mut beyond = Vec::new();
        for (client, token) in others() {
            if let Some(end) = client.recalled_at(now, least, !rank.patient) {
                beyond.push((client.id, token.sm, end));
            }
        }
        let enough = beyond.iter().position(|(_, sm, _)| {
            let before = room;
            room += sm;
            before < needed && room >= needed
        });
        for (client, _, allowed) in beyond.into_iter().take(enough.map_or(0, |last| last + 1)) {
            let (known, _) = self.pair(client.slot());
            known.holds.as_mut().expect("a holder has a token").recalled = Some(allowed);
            actions.push(TokenAction::Recall { client, allowed });
        }
    }

    /// Checks the invariants of the module's essay.
    pub(super) fn invariants(&self) {
        for (index, gpu) in self.gpus.iter().enumerate() {
            let mut held = 0;
            let (mut ready, mut paced, mut throttled, mut holders) = (0, 0, 0, 0);
            for &slot in &gpu.clients {
                let client = self.client(slot);
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
