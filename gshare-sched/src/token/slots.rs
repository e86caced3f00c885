//! A packing kept as a schedule: guaranteed time by slot, the rest of the window by missed time.
//!
//! # Problem
//! Requests on a GPU may add up to more than the window, because the SMs of several clients fit beside each other. Whether each client
//! then gets its request depends on which clients run side by side. A queue finds a fitting combination by luck: by missed time alone
//! (FaST-GShare, section 3.3.3) fewer than half of the GPUs packed to the brim meet all requests. The
//! [`MultiToken`](super::MultiToken) scheduler therefore keeps a slot of every window for each client of such a GPU.
//!
//! # Terms
//! - **slot**: the part of every window in which a client's SMs are kept for it, as long as its request. A slot may wrap round the
//!   window's end, and is then two **stretches** of each window.
//! - **claim**: a stretch, from now on, of an unmet client that holds a token or waits for a token.
//! - **horizon** of a client: the first instant at which its SMs, the tokens of others and the claims of others need more than the whole.
//!
//! # Algorithm
//! 1. **Table.** When clients or shares have changed, the next window gets a new [`SlotTable`]. If none can be found, the GPU is
//!    oversold: its slots follow each other, in proportion to the requests, in nine tenths of the window.
//! 2. **Slots.** A client waiting in its slot with a part of its request unmet gets a token up to the end of the stretch.
//! 3. **Spare time.** The other clients follow in the order of the multi-token scheduler, except clients without room. A token ends
//!    `slack` before its client's horizon. If no client would hold a token, the first client with a horizon ahead gets one up to it.
//!
//! Example, `W` = 100 ms, quota x SMs in per cent: a = 20 x 24, b = 20 x 80, c = 40 x 6, d = 60 x 100. Packed: d 0-60 ms, a 60-80 ms,
//! b 80-100 ms, c 60-100 ms. In each window all four requests are met, though they add up to 140 %.
//!
//! # Invariants
//! At no instant do the SMs of a table's slots add up to more than the whole; stretches lie inside the window. On a GPU that is not
//! oversold, a client present for a whole window therefore gets its request, **for any sum of the others' requests**. The client must
//! keep the GPU busy under its tokens, and the others must give their tokens back in time.
//!
//! # Cost
//! A dispatch costs O(n^2) for n waiting or holding clients on a GPU, at most [`MOST_SLOTS`]. Finding a table costs O(n^3), once after
//! a change.

use super::client::{Filed, Rank};
use super::ledger::Ledger;
use crate::pack::{Slot, SlotTable};
use gshare_core::{ClientId, Duration, Quota, Share, SmShare, Timestamp, TokenAction};

/// The slots of all GPUs with requests beyond the whole. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// Indexed by GPU.
    schedules: Vec<Schedule>,
    queue: Vec<Rank>,
    /// Sorted by client.
    claims: Vec<Claim>,
    /// The SMs of all claims from each change on, sorted by time; and the changes behind that count.
    loads: Vec<(Timestamp, u32)>,
    changes: Vec<(Timestamp, i32)>,
}

/// The most clients with requests for which a GPU keeps slots, since a dispatch compares each of them with each. Requests of more clients
/// may not exceed the whole in sum; if an operator lists such requests, missed time decides.
pub(crate) const MOST_SLOTS: usize = 64;

/// A GPU's table in force, and its slots in ns of the window.
#[derive(Debug, Default)]
struct Schedule {
    table: SlotTable<ClientId>,
    /// Sorted by begin, and by client.
    stretches: Vec<Stretch>,
    by_client: Vec<Stretch>,
    /// The window in which the table was found; `shuffles` and `owners` record the GPU's changes and clients at the time.
    window: u64,
    shuffles: u64,
    owners: Vec<(ClientId, Share)>,
    /// When the next claim of a waiting client begins.
    next_claim: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy)]
struct Stretch {
    /// Time since the begin of the window.
    begin: Duration,
    end: Duration,
    client: u32,
}

/// The result of an attempt to serve a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Not,
    Yes,
    /// The client got a token, and the replaced token gave SMs back.
    AndMadeRoom,
}

/// SMs held by a client or kept for it.
#[derive(Debug, Clone, Copy)]
struct Claim {
    client: u32,
    sm: u16,
    from: Timestamp,
    until: Timestamp,
}

impl Schedule {
    fn stretches_of(&self, client: u32) -> impl Iterator<Item = &Stretch> {
        let first = self.by_client.partition_point(|stretch| stretch.client < client);
        self.by_client[first..].iter().take_while(move |stretch| stretch.client == client)
    }
}

impl Slots {
    /// Whether a claim on this GPU begins now.
    pub(super) fn is_due(&self, index: usize, now: Timestamp) -> bool {
        self.schedules.get(index).and_then(|schedule| schedule.next_claim).is_some_and(|begin| begin <= now)
    }

    /// When the next claim on any GPU begins.
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.schedules.iter().filter_map(|schedule| schedule.next_claim).min()
    }

    /// Drops the schedule of a GPU without need for slots.
    pub(super) fn forget(&mut self, index: usize) {
        if let Some(schedule) = self.schedules.get_mut(index) {
            *schedule = Schedule::default();
        }
    }

    /// Step 1: finds a table for this window, if the present table is missing or out of date. A client that left, or has another request or
    /// other SMs, gives up its slot at once.
    fn refresh(&mut self, ledger: &Ledger, index: usize) {
        let gpu = &ledger.gpus[index];
        self.schedules.resize_with(self.schedules.len().max(index + 1), Schedule::default);
        let schedule = &mut self.schedules[index];
        if schedule.shuffles == gpu.shuffles {
            return;
        }
        let slot_of = |share: &Share| (share.quota.request(), share.sm);
        let known = |(id, share): &(ClientId, Share)| {
            ledger.get(*id).is_ok_and(|now| slot_of(&now.share) == slot_of(share))
        };
        for (gone, _) in schedule.owners.extract_if(.., |owner| !known(owner)) {
            schedule.table.remove(gone);
            schedule.stretches.retain(|stretch| stretch.client != gone.slot());
            schedule.by_client.retain(|stretch| stretch.client != gone.slot());
        }
        if schedule.window == gpu.window && !schedule.stretches.is_empty() {
            return;
        }
        let owner = |&slot: &u32| (ledger.client(slot).id, ledger.client(slot).share);
        schedule.owners = gpu.clients.iter().map(owner).collect();
        let mut wants: Vec<_> =
            schedule.owners.iter().map(|(id, share)| (*id, share.quota.request(), share.sm)).collect();
        wants.retain(|(_, length, _)| !length.is_zero());
        wants.sort_unstable_by_key(|&(id, length, sm)| {
            (core::cmp::Reverse(u32::from(length.get()) * u32::from(sm.get())), id)
        });
        let table = SlotTable::arrange(&wants).unwrap_or_else(|| in_proportion(&wants));
        let length = ledger.config.window;
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
        schedule.by_client.clone_from(&schedule.stretches);
        schedule.by_client.sort_by_key(|stretch| stretch.client);
        (schedule.table, schedule.window, schedule.shuffles) = (table, gpu.window, gpu.shuffles);
    }

    /// Steps 1 to 3. See the [module](self).
    pub(super) fn dispatch(&mut self, ledger: &mut Ledger, index: usize, actions: &mut Vec<TokenAction>) {
        self.refresh(ledger, index);
        self.claim(ledger, index);
        // A grant may give SMs of the replaced token back, so clients without room before may fit now.
        while self.serve_slots(ledger, index, actions) || self.serve_spare(ledger, index, actions) {}
        let now = ledger.now;
        let waits = |claim: &&Claim| claim.from > now && ledger.client(claim.client).filed != Filed::Nowhere;
        self.schedules[index].next_claim = self.claims.iter().filter(waits).map(|claim| claim.from).min();
    }

    /// Step 2: serves the clients waiting in their slots. Answers whether to go through them again.
    fn serve_slots(&mut self, ledger: &mut Ledger, index: usize, actions: &mut Vec<TokenAction>) -> bool {
        let now = ledger.now;
        let since = Self::since_begin(ledger, index);
        for position in 0..self.schedules[index].stretches.len() {
            let stretch = self.schedules[index].stretches[position];
            if stretch.begin <= since && since < stretch.end {
                let end = now.saturating_add(stretch.end - since);
                // Another client with a slot now may wait for a late holder, as this client did: no reason to hold back.
                let until = self.horizon(ledger, index, stretch.client).max(end);
                let miss = ledger.client(stretch.client).miss(&ledger.gpus[index]);
                if self.serve(ledger, index, stretch.client, miss, (end, until), actions)
                    == Served::AndMadeRoom
                {
                    return true;
                }
            }
        }
        false
    }

    /// Step 3: serves the other clients in the spare time. Answers whether to go through them again.
    fn serve_spare(&mut self, ledger: &mut Ledger, index: usize, actions: &mut Vec<TokenAction>) -> bool {
        let gpu = &ledger.gpus[index];
        let (now, window, window_end) = (ledger.now, gpu.window, gpu.window_end);
        let config = &ledger.config;
        let (most, slack, least) = (config.max_token, config.slack, config.min_token);
        let ready = gpu.ready.len() as u64;
        let mut queue = core::mem::take(&mut self.queue);
        queue.clear();
        queue.extend(gpu.ready.iter().copied());
        let (mut again, mut passed_over) = (false, false);
        for rank in &queue {
            // A holder asking for more time does not go before a client waiting for its SMs.
            let client = ledger.client(rank.slot);
            let needed = client.needed_sm(window);
            if needed > ledger.gpus[index].free || (needed == 0 && passed_over) {
                passed_over = true;
                continue;
            }
            let mut budget = most;
            if ready > 1 {
                let fair = Duration::from_nanos(window_end.saturating_since(now).as_nanos() / ready);
                let quarter = Duration::from_nanos(most.as_nanos().div_ceil(4));
                budget = budget.min(if rank.ineligible {
                    fair.max(quarter)
                } else {
                    client.miss(&ledger.gpus[index])
                });
            }
            let horizon = self.horizon(ledger, index, rank.slot);
            let end = if horizon < window_end { horizon.saturating_sub(slack) } else { horizon };
            let enough = end.saturating_since(now).saturating_sub(client.left(window, now)) >= least;
            if enough || horizon == window_end {
                again = self.serve(ledger, index, rank.slot, budget, (end, horizon), actions)
                    == Served::AndMadeRoom;
            }
            if again {
                break;
            }
        }
        // Between two close claims the rule may let no client in, but a GPU is not left idle.
        if ledger.gpus[index].releases.is_empty() {
            for rank in &queue {
                let horizon = self.horizon(ledger, index, rank.slot);
                if self.serve(ledger, index, rank.slot, most, (horizon, horizon), actions) != Served::Not {
                    break;
                }
            }
        }
        self.queue = queue;
        again
    }

    /// Gives a waiting client a token of up to `budget`, if its SMs are free. The client can use the token up by `end`, and the token
    /// expires at `until` at the latest.
    fn serve(
        &mut self,
        ledger: &mut Ledger,
        index: usize,
        slot: u32,
        budget: Duration,
        (end, until): (Timestamp, Timestamp),
        actions: &mut Vec<TokenAction>,
    ) -> Served {
        let gpu = &ledger.gpus[index];
        let (window, free) = (gpu.window, gpu.free);
        let client = ledger.client(slot);
        let budget = client.budget(budget, end, window, ledger.now);
        if !matches!(client.filed, Filed::Ready(_)) || client.needed_sm(window) > free || budget.is_zero() {
            return Served::Not;
        }
        ledger.grant(slot, budget, until, actions);
        self.claim(ledger, index);
        if ledger.gpus[index].free > free { Served::AndMadeRoom } else { Served::Yes }
    }

    fn since_begin(ledger: &Ledger, index: usize) -> Duration {
        let left = ledger.gpus[index].window_end.saturating_since(ledger.now);
        ledger.config.window.saturating_sub(left)
    }

    /// Lists the held and claimed SMs of a GPU, by client.
    fn claim(&mut self, ledger: &Ledger, index: usize) {
        let mut claims = core::mem::take(&mut self.claims);
        claims.clear();
        let (gpu, now) = (&ledger.gpus[index], ledger.now);
        let since = Self::since_begin(ledger, index);
        for &slot in &gpu.clients {
            let client = ledger.client(slot);
            let waits = matches!(client.filed, Filed::Ready(_));
            let sm = client.holds.map_or(client.share.sm.get(), |token| token.sm);
            if let Some(token) = client.holds {
                // An expired and unreturned token is still in the way, for an unknown time.
                let until = token.until.max(now.saturating_add(Duration::from_nanos(1)));
                claims.push(Claim { client: slot, sm, from: now, until });
            }
            if !waits && client.holds.is_none() {
                continue;
            }
            // A holder's usage is known late: the holder may be about to use the rest of its token, or to ask for its missed time.
            let has = client.outstanding(gpu.window);
            let miss = client.miss(gpu);
            let mut needs = if miss.is_zero() { miss } else { miss.saturating_add(has) };
            for stretch in self.schedules[index].stretches_of(slot) {
                if stretch.end <= since || needs.is_zero() {
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
        self.count();
    }

    /// Counts the load at each begin of a claim. The claims of a client are in force once where they overlap.
    fn count(&mut self) {
        self.changes.clear();
        self.loads.clear();
        self.claims.sort_unstable_by_key(|claim| (claim.client, claim.from));
        for own in self.claims.chunk_by(|one, next| one.client == next.client) {
            let mut until = Timestamp::ZERO;
            for claim in own.iter().filter(|claim| claim.from < claim.until) {
                if claim.until > until {
                    self.changes.push((claim.from.max(until), i32::from(claim.sm)));
                    self.changes.push((claim.until, -i32::from(claim.sm)));
                    until = claim.until;
                }
            }
        }
        self.changes.sort_unstable();
        let mut load = 0_i32;
        for at in self.changes.chunk_by(|one, next| one.0 == next.0) {
            load += at.iter().map(|(_, change)| change).sum::<i32>();
            self.loads.push((at[0].0, load.unsigned_abs()));
        }
        assert_eq!(load, 0, "a claim that ends begins");
    }

    /// The first instant without room for a client beside the held and claimed SMs.
    fn horizon(&self, ledger: &Ledger, index: usize, slot: u32) -> Timestamp {
        let window_end = ledger.gpus[index].window_end;
        let client = ledger.client(slot);
        let own = u32::from(client.token_sm(ledger.gpus[index].window));
        let first = self.claims.partition_point(|claim| claim.client < slot);
        let claims = self.claims[first..].iter().take_while(|claim| claim.client == slot);
        let covers = |at: Timestamp| claims.clone().find(|claim| claim.from <= at && at < claim.until);
        let full = |&(at, load): &(Timestamp, u32)| {
            let of_others = load - covers(at).map_or(0, |claim| u32::from(claim.sm));
            own + of_others > u32::from(SmShare::WHOLE.get())
        };
        // The others' load grows only where a claim of theirs begins.
        let before = self.loads.partition_point(|(at, _)| *at < window_end);
        self.loads[..before].iter().find(|load| full(load)).map_or(window_end, |(at, _)| *at)
    }

    pub(super) fn invariants(&self, ledger: &Ledger) {
        for (index, schedule) in self.schedules.iter().enumerate() {
            for slot in schedule.table.slots() {
                let load: u32 = schedule
                    .table
                    .running(slot.offset.basis_points())
                    .map(|other| u32::from(other.sm.get()))
                    .sum();
                assert!(load <= u32::from(SmShare::WHOLE.get()), "the slots of gpu{index} oversell its SMs");
            }
            for stretch in &schedule.stretches {
                assert!(stretch.begin < stretch.end && stretch.end <= ledger.config.window);
                assert!(schedule.table.slots().iter().any(|slot| slot.owner.slot() == stretch.client));
            }
        }
    }
}

/// Slots one after another in nine tenths of the window, with lengths in proportion to the requests. The last tenth is for clients without
/// a part.
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
