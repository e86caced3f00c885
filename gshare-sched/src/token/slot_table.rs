//! A packing kept as a schedule: guaranteed time by slot, the rest of the window by missing quota.
//!
//! # Problem
//! A packer puts several clients on a GPU whose quotas add up to more than the window, because their SMs fit beside each
//! other. Whether each then gets its quota depends on which clients run side by side, and a queue finds that out only by luck:
//! by missing quota (FaST-GShare, section 3.3.3) the quotas of a GPU packed to the brim are met on less than half of such
//! GPUs. But the packing itself says which client runs when. [`SlotScheduler`] honours it.
//!
//! # Terms
//! Those of [`multi_token`](super::multi_token), and
//! - **slot**: the part of every window in which a client's SMs are kept for it, as long as its request; it may wrap
//!   round the window's end, and is then two **stretches** of each window;
//! - **table**: the slots of a GPU ([`SlotTable`]): at no instant do their SMs add up to more than the whole;
//! - **claim**: a stretch, from now on, of a client that is unmet and holds a token or waits for one; at most as long as
//!   what it misses and what is left of its token (which is used before or after the stretch begins: the engine does not
//!   know yet). A client that is idle, or has had its request earlier in the window, claims nothing;
//! - **horizon** of a client: the first instant from now on at which its SMs, the tokens that others hold then and the
//!   claims of others would together be more than the whole; the end of the window where there is none. A holder counts
//!   once, with what it holds.
//!
//! # Algorithm
//! Accounts, windows and leases are those of the multi-token scheduler, steps 1 and 2. Then, on a GPU on which something
//! changed or a claim begins:
//!
//! 1. **Table.** When the clients of the GPU or their shares have changed, the next window gets another table (a GPU
//!    without one gets it at once). Clients to which the host gave an offset ([`TokenEvent::SlotAssigned`]) get that slot,
//!    the others the first place that is left. Where no offset was given, the table is looked for
//!    ([`SlotTable::arrange`]). If none is found, the GPU is oversold: its slots follow each other, in proportion to the
//!    requests, in nine tenths of the window.
//! 2. **Slots.** A client that waits, is unmet and in its slot gets a token for what it misses, to the end of the stretch.
//! 3. **Spare time.** The others that wait follow in the order of the multi-token scheduler (unmet before met, the least
//!    served first), skipping any that does not fit; but a client that holds a token already gets no more of it while
//!    one before it is skipped. A token is as long as there, but ends `slack` before the horizon
//!    (its last kernels may complete), and is not given below `min_token`. If thereby no client would hold a token,
//!    the first that has a horizon ahead gets one up to it.
//!
//! No token expires after its client's horizon. A client that leaves or changes its share gives up its slot at once.
//!
//! ## Example
//! `W` = 100 ms; quota x SMs in per cent: a = 20 x 24, b = 20 x 80, c = 40 x 6, d = 60 x 100; all always want more. The
//! quotas add up to 140 % of a window. Packed: d 0-60 ms, a 60-80 ms, b 80-100 ms, c 60-100 ms. At 0 all ask. d is in its
//! slot and gets 60 ms; no other fits beside it. At 60 a gets 20 ms and c 40 ms; b (80 % of the SMs, 70 % are free) waits.
//! At 80 a returns its token and b gets 20 ms. In each window all four quotas are met. The paper's queue starts c, the
//! one that misses second most, and so keeps d from the whole GPU: it serves .70, .65, .82 and .88 of them.
//!
//! # Invariants
//! Those of the ledger (holders never have more SMs than there are), and
//! - at no instant do the SMs of a table's slots add up to more than the whole; a client has one slot at most;
//! - stretches lie inside the window and have a client.
//!
//! From these: a client that is there for a whole window, whose slot is as long as its request, and that keeps the GPU busy
//! whenever it holds a token gets its request in that window **for any sum of the others' requests**, as long as
//! they give their tokens back when they expire. Proof: at the begin of its stretch no client but those whose slots
//! cover it holds a token (their horizons ended there), so its SMs are free, and no other is let in before it is done.
//! One that gives its token back late delays those after it by as much, `grace` at most.
//!
//! # Cost
//! O(n^2) per dispatch for n clients that want something on a GPU (some microseconds for 16); finding a table O(n^3),
//! once after a change, for up to 64 clients.
//!
//! # Differences from the paper
//! FaST-GShare packs rectangles of quota and SMs (section 3.4.2) but its dispatcher never looks at where they lie. Here
//! the packing is the schedule. Its queue with a stop at the first misfit is left to the spare time, with skipping.

use super::MultiTokenConfig;
use super::ledger::{Filed, Ledger, Rank};
use crate::pack::{Slot, SlotTable};
use gshare_core::token::ClientStatus;
use gshare_core::{
    ClientId, ConfigError, Duration, Engine, GpuId, Quota, SmShare, Timestamp, TokenAction, TokenError,
    TokenEvent, TokenScheduler,
};

/// Tokens by slot. See the [module](self).
///
/// ```
/// use gshare_core::{ClientId, Engine, GpuId, Quota, Share, SmShare, Timestamp, TokenAction, TokenEvent};
/// use gshare_sched::token::{MultiTokenConfig, SlotScheduler};
///
/// let mut engine = SlotScheduler::new(MultiTokenConfig::default())?;
/// let mut actions = Vec::new();
/// let share = Share { quota: "0.6:0.6".parse()?, sm: SmShare::WHOLE };
/// let (client, now) = (ClientId::new(0, 0), Timestamp::ZERO);
/// engine.handle(now, TokenEvent::ClientJoined { client, gpu: GpuId::new(0), share }, &mut actions)?;
/// let offset = Quota::from_percent(40).ok_or("at most 100 %")?;
/// engine.handle(now, TokenEvent::SlotAssigned { client, offset }, &mut actions)?;
/// engine.handle(now, TokenEvent::TokenRequested { client }, &mut actions)?;
/// // No other client is here: it may start before its slot.
/// assert!(matches!(actions[..], [TokenAction::Grant { .. }]));
/// assert_eq!(engine.table(GpuId::new(0)).ok_or("clients")?.slots()[0].offset, offset);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct SlotScheduler {
    ledger: Ledger,
    /// By client slot: the offset that the host gave.
    offsets: Vec<Option<Quota>>,
    /// By GPU.
    schedules: Vec<Schedule>,
    queue: Vec<Rank>,
    claims: Vec<Claim>,
}

/// The table of a GPU in force, and the same in ns of the window.
#[derive(Debug, Default)]
struct Schedule {
    table: SlotTable<ClientId>,
    /// By begin.
    stretches: Vec<Stretch>,
    /// The window for which it was looked for.
    window: u64,
    /// Clients or shares have changed since.
    stale: bool,
    /// When the next claim of a client that waits begins.
    next_claim: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Since the begin of the window.
    begin: Duration,
    end: Duration,
    client: u32,
}

/// The result of an attempt to serve a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Not,
    Yes,
    /// The client gave SMs back with the lease that was replaced.
    AndMadeRoom,
}

/// SMs that a client holds, or that are kept for it.
#[derive(Debug, Clone, Copy)]
struct Claim {
    client: u32,
    sm: u16,
    from: Timestamp,
    until: Timestamp,
}

impl SlotScheduler {
    /// A scheduler without clients. `backfill_depth` has no meaning here.
    ///
    /// # Errors
    /// [`ConfigError`] names the field and its bound.
    pub fn new(config: MultiTokenConfig) -> Result<Self, ConfigError> {
        let ledger = Ledger::new(config, false)?;
        let (offsets, schedules) = (Vec::new(), Vec::new());
        Ok(Self { ledger, offsets, schedules, queue: Vec::new(), claims: Vec::new() })
    }

    /// The slots in force on a GPU: what is guaranteed there. A slot that is shorter than its client's request says that
    /// the GPU is oversold.
    pub fn table(&self, gpu: GpuId) -> Option<&SlotTable<ClientId>> {
        self.schedules.get(gpu.index()).map(|schedule| &schedule.table)
    }

    /// Updates the tables for an event that the ledger has taken.
    fn note(&mut self, event: TokenEvent) {
        let Some(client) = subject(&event) else { return };
        if let TokenEvent::ClientJoined { gpu, .. } = event {
            self.schedules.resize_with(self.schedules.len().max(gpu.index() + 1), Schedule::default);
        }
        if self.offsets.len() <= client.index() {
            self.offsets.resize(client.index() + 1, None);
        }
        match event {
            TokenEvent::SlotAssigned { offset, .. } => self.offsets[client.index()] = Some(offset),
            TokenEvent::ClientJoined { .. } | TokenEvent::ClientLeft { .. } => {
                self.offsets[client.index()] = None;
            }
            _ => {}
        }
        let gives_up = !matches!(event, TokenEvent::SlotAssigned { .. });
        let gpu = match event {
            TokenEvent::ClientJoined { gpu, .. } => Some(gpu.index()),
            _ => self.schedules.iter().position(|schedule| schedule.knows(client)),
        };
        // One that has no slot yet may be on any GPU: look at the ledger.
        let gpu = gpu.or_else(|| self.ledger.get(client).ok().map(|known| known.gpu));
        let Some(schedule) = gpu.and_then(|gpu| self.schedules.get_mut(gpu)) else { return };
        schedule.stale = true;
        if gives_up && schedule.table.remove(client) {
            schedule.stretches.retain(|stretch| stretch.client != client.slot());
        }
    }

    /// Step 1: a table for this window, if there is none or it is out of date.
    fn refresh(&mut self, index: usize) {
        let window = self.ledger.gpus[index].window;
        let schedule = &self.schedules[index];
        if !schedule.stale || (schedule.window == window && !schedule.stretches.is_empty()) {
            return;
        }
        let mut fixed = SlotTable::default();
        let mut rest = Vec::new();
        for &slot in &self.ledger.gpus[index].clients {
            let Some(client) = self.ledger.clients.at(slot) else { continue };
            let (length, sm) = (client.share.quota.request(), client.share.sm);
            let offset = self.offsets.get(slot as usize).copied().flatten();
            let taken = offset.is_some_and(|offset| fixed.add(Slot { owner: client.id, offset, length, sm }));
            if !taken && !length.is_zero() {
                rest.push((client.id, length, sm));
            }
        }
        rest.sort_unstable_by_key(|&(id, length, sm)| {
            (core::cmp::Reverse(u32::from(length.get()) * u32::from(sm.get())), id)
        });
        let table = if fixed.slots().is_empty() {
            SlotTable::arrange(&rest).unwrap_or_else(|| in_proportion(&rest))
        } else {
            for (id, length, sm) in rest {
                fixed.add_anywhere(id, length, sm);
            }
            fixed
        };
        let length = self.ledger.config.window;
        let schedule = &mut self.schedules[index];
        schedule.stretches.clear();
        for slot in table.slots() {
            let client = slot.owner.slot();
            let end = u64::from(slot.offset.get()) + u64::from(slot.length.get());
            let whole = u64::from(Quota::WHOLE.get());
            let at = |points: u64| Duration::from_nanos(length.as_nanos() * points / whole);
            let begin = at(u64::from(slot.offset.get()));
            schedule.stretches.push(Stretch { begin, end: at(end.min(whole)), client });
            if end > whole {
                schedule.stretches.push(Stretch { begin: Duration::ZERO, end: at(end - whole), client });
            }
        }
        schedule.stretches.retain(|stretch| stretch.begin < stretch.end);
        schedule.stretches.sort_unstable_by_key(|stretch| (stretch.begin, stretch.client));
        (schedule.table, schedule.window, schedule.stale) = (table, window, false);
    }

    /// Steps 1 to 3. See the [module](self).
    fn dispatch(&mut self, index: usize, actions: &mut Vec<TokenAction>) {
        self.refresh(index);
        self.claim(index);
        // A grant may give SMs back with the lease that it replaces: then those who did not fit may fit now.
        while self.serve_slots(index, actions) || self.serve_spare(index, actions) {}
        let now = self.ledger.now;
        let waits = |claim: &&Claim| claim.from > now && self.filed(claim.client) != Filed::Nowhere;
        self.schedules[index].next_claim = self.claims.iter().filter(waits).map(|claim| claim.from).min();
    }

    /// Step 2: the clients that wait and are in their slots. Answers whether to go through them again.
    fn serve_slots(&mut self, index: usize, actions: &mut Vec<TokenAction>) -> bool {
        let now = self.ledger.now;
        let since = self.since_begin(index);
        for position in 0..self.schedules[index].stretches.len() {
            let stretch = self.schedules[index].stretches[position];
            if stretch.begin <= since && since < stretch.end {
                let end = now.saturating_add(stretch.end - since);
                // Others whose slot it is may wait for one that is late, as this one did: no reason to hold back.
                let until = self.horizon(index, stretch.client).max(end);
                let miss = self.miss(index, stretch.client);
                if self.serve(index, stretch.client, miss, (end, until), actions) == Served::AndMadeRoom {
                    return true;
                }
            }
        }
        false
    }

    /// Step 3: the others, in the spare time. Answers whether to go through them again.
    fn serve_spare(&mut self, index: usize, actions: &mut Vec<TokenAction>) -> bool {
        let gpu = &self.ledger.gpus[index];
        let (now, window_end) = (self.ledger.now, gpu.window_end);
        let config = &self.ledger.config;
        let (most, slack, least) = (config.max_token, config.slack, config.min_token);
        let ready = gpu.ready.len() as u64;
        let mut queue = core::mem::take(&mut self.queue);
        queue.clear();
        queue.extend(gpu.ready.iter().copied());
        let (mut again, mut passed_over) = (false, false);
        for rank in &queue {
            // A client that holds a token and asks for more does not go before one that waits for its SMs.
            let needed = self.needed(index, rank.slot);
            if needed > self.ledger.gpus[index].free || (needed == 0 && passed_over) {
                passed_over = true;
                continue;
            }
            let mut budget = most;
            if ready > 1 {
                let fair = Duration::from_nanos(window_end.saturating_since(now).as_nanos() / ready);
                let quarter = Duration::from_nanos(most.as_nanos().div_ceil(4));
                budget =
                    budget.min(if rank.ineligible { fair.max(quarter) } else { self.miss(index, rank.slot) });
            }
            let horizon = self.horizon(index, rank.slot);
            let end = if horizon < window_end { horizon.saturating_sub(slack) } else { horizon };
            let enough = end.saturating_since(self.runs_until(index, rank.slot)) >= least;
            if enough || horizon == window_end {
                again = self.serve(index, rank.slot, budget, (end, horizon), actions) == Served::AndMadeRoom;
            }
            if again {
                break;
            }
        }
        // Between two claims that are close to each other no client may be let in by the rule; but a GPU is not left idle.
        if self.ledger.gpus[index].releases.is_empty() {
            for rank in &queue {
                let horizon = self.horizon(index, rank.slot);
                if self.serve(index, rank.slot, most, (horizon, horizon), actions) != Served::Not {
                    break;
                }
            }
        }
        self.queue = queue;
        again
    }

    /// Gives a client that waits a token of up to `budget` that can be used up by `end` and expires at `until` at the
    /// latest, if its SMs are free.
    fn serve(
        &mut self,
        index: usize,
        slot: u32,
        budget: Duration,
        (end, until): (Timestamp, Timestamp),
        actions: &mut Vec<TokenAction>,
    ) -> Served {
        let gpu = &self.ledger.gpus[index];
        let (window, free) = (gpu.window, gpu.free);
        let Some(client) = self.ledger.clients.at(slot) else { return Served::Not };
        let sm = client.token_sm(window);
        let time = end.saturating_since(self.runs_until(index, slot));
        let budget = budget.min(client.remain(window)).min(time);
        if !matches!(client.filed, Filed::Ready(_)) || self.needed(index, slot) > free || budget.is_zero() {
            return Served::Not;
        }
        self.ledger.grant(slot, budget, sm, until, actions);
        self.claim(index);
        if self.ledger.gpus[index].free > free { Served::AndMadeRoom } else { Served::Yes }
    }

    /// The SMs that a token would take beyond those that it replaces.
    fn needed(&self, index: usize, slot: u32) -> u16 {
        let Some(client) = self.ledger.clients.at(slot) else { return 0 };
        let held = client.holds.map_or(0, |lease| lease.sm);
        client.token_sm(self.ledger.gpus[index].window).saturating_sub(held)
    }

    /// Until when a client runs on what it has of this window's lease; now, without one.
    fn runs_until(&self, index: usize, slot: u32) -> Timestamp {
        let now = self.ledger.now;
        let window = self.ledger.gpus[index].window;
        let Some(client) = self.ledger.clients.at(slot) else { return now };
        now.saturating_add(client.outstanding(window))
    }

    fn miss(&self, index: usize, slot: u32) -> Duration {
        let client = self.ledger.clients.at(slot);
        client.map_or(Duration::ZERO, |client| client.miss(&self.ledger.gpus[index]))
    }

    fn filed(&self, slot: u32) -> Filed {
        self.ledger.clients.at(slot).map_or(Filed::Nowhere, |client| client.filed)
    }

    fn since_begin(&self, index: usize) -> Duration {
        let left = self.ledger.gpus[index].window_end.saturating_since(self.ledger.now);
        self.ledger.config.window.saturating_sub(left)
    }

    /// Lists what is held and claimed on a GPU, by client.
    fn claim(&mut self, index: usize) {
        let mut claims = core::mem::take(&mut self.claims);
        claims.clear();
        let (gpu, now) = (&self.ledger.gpus[index], self.ledger.now);
        let since = self.since_begin(index);
        for &slot in &gpu.clients {
            let Some(client) = self.ledger.clients.at(slot) else { continue };
            let waits = matches!(client.filed, Filed::Ready(_));
            let sm = client.holds.map_or(client.share.sm.get(), |lease| lease.sm);
            if let Some(lease) = client.holds {
                // One that has expired and was not returned is in the way still, for an unknown time.
                let until = lease.expires.max(now.saturating_add(Duration::from_nanos(1)));
                claims.push(Claim { client: slot, sm, from: now, until });
            }
            if !waits && client.holds.is_none() {
                continue;
            }
            // A holder's usage is known late: it may be about to use all of what it has, or to ask for what it misses.
            let has = client.outstanding(gpu.window);
            let miss = client.miss(gpu);
            let mut needs = if miss.is_zero() { miss } else { miss.saturating_add(has) };
            for stretch in &self.schedules[index].stretches {
                if stretch.client != slot || stretch.end <= since || needs.is_zero() {
                    continue;
                }
                let begin = stretch.begin.max(since);
                let length = needs.min(stretch.end - begin);
                needs -= length;
                let from = now.saturating_add(begin - since);
                claims.push(Claim { client: slot, sm, from, until: from.saturating_add(length) });
            }
        }
        self.claims = claims;
    }

    /// The first instant at which there is no room for a client beside what is held and claimed.
    fn horizon(&self, index: usize, slot: u32) -> Timestamp {
        let window_end = self.ledger.gpus[index].window_end;
        let Some(client) = self.ledger.clients.at(slot) else { return window_end };
        let own = u32::from(client.token_sm(self.ledger.gpus[index].window));
        let full = |at: Timestamp| {
            let (mut load, mut counted) = (own, slot);
            // The claims of a client follow each other: it counts once.
            for claim in self.claims.iter().filter(|claim| claim.client != slot) {
                if claim.client != counted && claim.from <= at && at < claim.until {
                    load += u32::from(claim.sm);
                    counted = claim.client;
                }
            }
            load > u32::from(SmShare::WHOLE.get())
        };
        let begins = self.claims.iter().filter(|claim| claim.client != slot).map(|claim| claim.from);
        begins.filter(|&at| at < window_end && full(at)).min().unwrap_or(window_end)
    }

    fn invariants(&self) {
        self.ledger.invariants();
        for (index, schedule) in self.schedules.iter().enumerate() {
            for slot in schedule.table.slots() {
                let load: u32 = schedule
                    .table
                    .running(slot.offset.basis_points())
                    .map(|other| u32::from(other.sm.get()))
                    .sum();
                assert!(load <= u32::from(SmShare::WHOLE.get()), "the slots of gpu{index} oversell its SMs");
                assert!(self.ledger.get(slot.owner).is_ok_and(|client| client.gpu == index));
            }
            for stretch in &schedule.stretches {
                assert!(stretch.begin < stretch.end && stretch.end <= self.ledger.config.window);
                assert!(schedule.table.slots().iter().any(|slot| slot.owner.slot() == stretch.client));
            }
        }
    }
}

impl Schedule {
    fn knows(&self, client: ClientId) -> bool {
        self.table.slots().iter().any(|slot| slot.owner == client)
    }
}

/// The client whose slot an event is about.
fn subject(event: &TokenEvent) -> Option<ClientId> {
    match *event {
        TokenEvent::ClientJoined { client, .. }
        | TokenEvent::ShareChanged { client, .. }
        | TokenEvent::ClientLeft { client }
        | TokenEvent::SlotAssigned { client, .. } => Some(client),
        _ => None,
    }
}

/// Slots after each other in nine tenths of the window, as long as the requests in proportion. The last tenth is for
/// those whose part is nothing.
fn in_proportion(wants: &[(ClientId, Quota, SmShare)]) -> SlotTable<ClientId> {
    let sum: u64 = wants.iter().map(|(_, length, _)| u64::from(length.get())).sum();
    let part = |before: u64| {
        u16::try_from(before * 9_000 / sum.max(1)).ok().and_then(Quota::new).unwrap_or(Quota::ZERO)
    };
    let mut table = SlotTable::default();
    let mut before = 0;
    for &(owner, length, sm) in wants {
        let offset = part(before);
        before += u64::from(length.get());
        let length = Quota::new(part(before).get() - offset.get()).unwrap_or(Quota::ZERO);
        table.add(Slot { owner, offset, length, sm });
    }
    table
}

impl Engine for SlotScheduler {
    type Event = TokenEvent;
    type Action = TokenAction;
    type Error = TokenError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: TokenEvent,
        actions: &mut Vec<TokenAction>,
    ) -> Result<(), TokenError> {
        self.ledger.account(now, event, actions)?;
        self.note(event);
        for index in 0..self.schedules.len() {
            let begins = self.schedules[index].next_claim.is_some_and(|begin| begin <= now);
            if core::mem::take(&mut self.ledger.gpus[index].dirty) || begins {
                self.dispatch(index, actions);
            }
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let claims = self.schedules.iter().filter_map(|schedule| schedule.next_claim);
        claims.chain(self.ledger.next_deadline()).min()
    }
}

impl TokenScheduler for SlotScheduler {
    fn client(&self, client: ClientId) -> Option<ClientStatus> {
        self.ledger.status(client)
    }

    fn window(&self) -> Duration {
        self.ledger.config.window
    }
}
