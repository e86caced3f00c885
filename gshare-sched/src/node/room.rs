//! Room: clients stand in line for a device's memory, and others park for the first in line.
//!
//! # Problem
//! Programs need more memory together than their device has, and take turns: one computes while the memory of another is in host
//! memory. Somebody must decide which program leaves and for how long, or the programs spend their time with copies.
//!
//! # Terms
//! - **want**: an allocation that does not fit, or a parked client that must come back. **Line**: the wants of all clients, by arrival.
//! - **victim**: a client that parks for a want. **Residence**: the time for which a client stays after it has come.
//! - **firm** memory of an instance: its guaranteed memory, or its memory that cannot move, whichever is more.
//!
//! # Rules
//! 1. The first want of a device is met when its need is free. Otherwise the node recalls slack, and then orders victims. Later wants wait
//!    behind it, and an allocation that fits passes only if it takes no room that the victims make for the first want.
//! 2. Victims are parkable clients after their residence, with host memory left to their user. Instances beyond their guaranteed memory go
//!    before others, best effort before SLO-sensitive clients, clients without a token before holders, the longest idle first. No client
//!    goes if its memory is not needed.
//! 3. A residence is [`RESIDENCE`] times the client's last return, from the order to the report, and no return follows within it. After an
//!    allocation for which others have left, the copy of its bytes at the best bandwidth of returns so far counts as the return: others may
//!    have left late, after a long kernel. A want within its guaranteed memory does not wait for the residence of instances beyond theirs.
//! 4. An allocation waits a bounded time ([`PATIENCE`]). A want that all victims together could not meet is refused, or lets others pass if it is a
//!    return. Before that, processes have [`NEWS`] to tell that their new memory can move. A victim that fails or is silent counts no more,
//!    and others go in its place.
//! 5. Memory that cannot move never takes guaranteed memory of others: the firm memory of all instances fits into the device.
//!
//! # Invariants
//! A client has at most one want to return. Between two returns of a client lies its residence. A client in line for an allocation has an
//! entry in the queue of its reservations.
//!
//! # Cost
//! O(clients) per event while somebody waits, and one look otherwise.

use super::inquiry::{Inquiries, Purpose};
use super::park_orders::By;
use super::reservations::Reservation;
use super::{Client, MemoryBound, Node, NodeAction, TenantId};
use gshare_core::wire::Residence;
use gshare_core::{Bytes, ClientId, Duration, GpuId, ServiceClass, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// A residence in terms of the return before it: a client then copies for a fifth of its time at most.
const RESIDENCE: u64 = 8;
/// The shortest residence: ten tokens.
const SHORTEST: Duration = Duration::from_millis(100);
/// The longest residence, however long the return took.
const LONGEST: Duration = Duration::from_secs(30);
/// The longest wait of an allocation, a fifth less than its process waits by default. A process that can be parked waits for a minute.
const PATIENCE: Duration = Duration::from_millis(4_000);
const PARKABLE_PATIENCE: Duration = Duration::from_secs(45);
/// The time until another order to a client after its memory could not move.
const AGAIN: Duration = Duration::from_millis(1_000);
/// The time for a client to obey, apart from the copy: its process gives a move up after 3 s.
const SILENCE: Duration = Duration::from_millis(3_000);
/// The time until a process has told whether new memory can move: its helper looks once a second.
const NEWS: Duration = Duration::from_millis(2_000);
/// The slowest copy for which an order waits, in bytes per ms: 1 GiB/s.
const SLOWEST: u64 = (1 << 30) / 1_000;

/// The history of a client's moves.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moves {
    /// The time of its last way out, from the order to the report.
    left_in: Option<Duration>,
    /// End of the residence.
    pub(super) stays_until: Timestamp,
    /// Time of the order to come back, while the client is on its way.
    returns: Option<Timestamp>,
    /// No order to park before, because the last one failed.
    again: Timestamp,
    /// The last grant of memory.
    pub(super) granted: Timestamp,
    /// The last time with work, as far as the node knows.
    pub(super) active: Timestamp,
}

impl Moves {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { active: now, ..Self::default() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    Allocation(Reservation),
    Return,
}

#[derive(Debug, Clone, Copy)]
struct Waiter {
    client: ClientId,
    gpu: GpuId,
    want: Want,
    since: Timestamp,
    /// Whether clients were asked for slack since the last change, and the open round of questions.
    recalled: bool,
    round: Option<u32>,
    /// Since when enough memory is on its way out.
    gathers: Option<Timestamp>,
    /// Time of the order to come back into room that is there.
    called: Option<Timestamp>,
}

/// The wants of all clients. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: Vec<Waiter>,
    /// The best bandwidth of returns to a device so far, in bytes per ms.
    bandwidth: BTreeMap<GpuId, u64>,
    /// The time at which the line may move without another event.
    deadline: Option<Timestamp>,
}

impl Line {
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.deadline
    }

    /// Whether an allocation of the client is in line.
    pub(super) fn allocates(&self, client: ClientId) -> bool {
        self.of(client).any(|waiter| waiter.want != Want::Return)
    }

    /// The start of the wait for a return.
    pub(super) fn returns_since(&self, client: ClientId) -> Option<Timestamp> {
        self.of(client).find(|waiter| waiter.want == Want::Return).map(|waiter| waiter.since)
    }

    fn of(&self, client: ClientId) -> impl Iterator<Item = &Waiter> {
        self.waiters.iter().filter(move |waiter| waiter.client == client)
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        self.waiters.retain(|waiter| waiter.client != client);
    }

    /// Asserts the invariants of the line.
    pub(super) fn check(&self, is_there: impl Fn(ClientId) -> bool, inquiries: &Inquiries) {
        for waiter in &self.waiters {
            assert!(is_there(waiter.client), "a client in line is there");
            let alike = |other: &&Waiter| (other.want == Want::Return) == (waiter.want == Want::Return);
            assert_eq!(self.of(waiter.client).filter(alike).count(), 1, "it has one want of a kind");
            let queues = waiter.want == Want::Return || inquiries.holds(waiter.client);
            assert!(queues, "an allocation in line keeps later ones behind it");
        }
    }

    /// Learns from a return.
    fn measure(&mut self, gpu: GpuId, bytes: Bytes, took: Duration) {
        let bandwidth = bytes.0.saturating_mul(1_000_000) / took.as_nanos().max(1);
        let best = self.bandwidth.entry(gpu).or_default();
        *best = bandwidth.max(*best);
    }

    /// The time to copy these bytes; nothing before the first return.
    fn copy_of(&self, gpu: GpuId, bytes: Bytes) -> Duration {
        let bandwidth = self.bandwidth.get(&gpu).copied().filter(|bandwidth| *bandwidth > 0);
        bandwidth.map_or(Duration::ZERO, |of| Duration::from_nanos(bytes.0.saturating_mul(1_000_000) / of))
    }

    /// The client does not wait for its return any more.
    pub(super) fn returned(&mut self, client: ClientId) {
        self.waiters.retain(|waiter| waiter.client != client || waiter.want != Want::Return);
    }

    /// The room made for a client's return is the client's own memory now.
    pub(super) fn taken(&mut self, client: ClientId) {
        self.waiters.retain(|waiter| waiter.client != client || waiter.called.is_none());
    }

    fn join(&mut self, now: Timestamp, client: ClientId, gpu: GpuId, want: Want) {
        let (recalled, round, gathers, called) = (want != Want::Return, None, None, None);
        self.waiters.push(Waiter { client, gpu, want, since: now, recalled, round, gathers, called });
    }
}

/// The outcome of a look at a want.
enum Look {
    /// It has left the line, or the node has just ordered its return.
    Over,
    /// It waits, with all behind it, until the time or the next event.
    Waits(Option<Timestamp>),
    /// It waits, and those behind it go first.
    Passes(Option<Timestamp>),
}

impl Node {
    /// Puts a denied reservation in line, unless no victim can help.
    pub(super) fn allocate_in_line(
        &mut self,
        now: Timestamp,
        reservation: Reservation,
        free: Bytes,
        out: &mut Vec<NodeAction>,
    ) {
        let Reservation { client, bytes, .. } = reservation;
        let entry = self.clients.get(client).expect("a client that asks is there");
        let tenant = self.tenant_at(entry.tenant);
        let (gpu, account) = (tenant.gpu, (tenant.gpu, tenant.instance));
        if self.ledger.tenant_free(account) < bytes {
            return self.deny(reservation, MemoryBound::Instance, free, out);
        }
        if self.unguaranteed(client) < bytes {
            return self.deny(reservation, MemoryBound::Guaranteed, free, out);
        }
        self.inquiries.hold(client);
        self.line.join(now, client, gpu, Want::Allocation(reservation));
    }

    /// Puts a client in line for its return.
    pub(super) fn return_in_line(&mut self, now: Timestamp, client: ClientId) {
        let entry = self.clients.get(client).expect("a client that returns is there");
        let gpu = self.tenant_at(entry.tenant).gpu;
        if self.line.returns_since(client).is_none() {
            self.line.join(now, client, gpu, Want::Return);
        }
    }

    /// The most for a reservation of the client beside guaranteed memory and the room made for others.
    pub(super) fn grantable(&self, client: ClientId) -> Bytes {
        let Some(entry) = self.clients.get(client) else { return Bytes::ZERO };
        let gpu = self.tenant_at(entry.tenant).gpu;
        let spare = match self.line.waiters.is_empty() {
            true => Bytes(u64::MAX),
            false => self.spare(gpu, client),
        };
        spare.min(self.unguaranteed(client))
    }

    /// The free memory of a device less the room made for clients other than this one.
    fn spare(&self, gpu: GpuId, client: ClientId) -> Bytes {
        let free = self.ledger.device_limit(gpu).saturating_sub(self.ledger.device_held(gpu));
        let kept = |waiter: &&Waiter| waiter.gpu == gpu && waiter.client != client;
        let kept =
            self.line.waiters.iter().filter(kept).map(|waiter| match (waiter.called, waiter.gathers) {
                (Some(_), _) => self.need(waiter),
                (None, Some(_)) => self.need(waiter).saturating_sub(self.leaving(gpu, None)),
                (None, None) => Bytes::ZERO,
            });
        kept.fold(free, Bytes::saturating_sub)
    }

    fn need(&self, waiter: &Waiter) -> Bytes {
        match waiter.want {
            Want::Allocation(reservation) => reservation.bytes,
            Want::Return => {
                let parking = self.clients.get(waiter.client).and_then(|entry| entry.parking);
                parking.map_or(Bytes::ZERO, |parking| parking.bytes)
            }
        }
    }

    fn clients_on(&self, gpu: GpuId) -> impl Iterator<Item = (ClientId, &Client)> {
        self.clients.iter().filter(move |(_, entry)| self.is_on(entry, gpu))
    }

    /// Memory that is about to leave a device by order, and in good time; `of` one instance, or of all.
    fn leaving(&self, gpu: GpuId, of: Option<TenantId>) -> Bytes {
        let leaves = |entry: &Client| match entry.obeys_by() {
            Some(by) if self.now < by => entry.movable(),
            _ => Bytes::ZERO,
        };
        let among = self.clients_on(gpu).filter(|(_, entry)| of.is_none_or(|of| entry.tenant == of));
        among.map(|(_, entry)| leaves(entry)).fold(Bytes::ZERO, Bytes::saturating_add)
    }

    /// The most for a reservation of memory that cannot move: the device less the firm memory of other instances. Unbounded for a client
    /// that can be parked, and where no other instance has a guarantee.
    fn unguaranteed(&self, client: ClientId) -> Bytes {
        let Some(entry) = self.clients.get(client) else { return Bytes::ZERO };
        let (own, gpu) = (entry.tenant, self.tenant_at(entry.tenant).gpu);
        let guarantees = |of: &Client| of.tenant != own && self.guaranteed(of.tenant) > Some(Bytes::ZERO);
        if entry.parking.is_some() || !self.clients_on(gpu).any(|(_, of)| guarantees(of)) {
            return Bytes(u64::MAX);
        }
        let left = self.ledger.device_limit(gpu).saturating_sub(self.firm(gpu, Some(own)));
        let held =
            self.members_of(own).map(|entry| entry.account.held()).fold(Bytes::ZERO, Bytes::saturating_add);
        left.saturating_sub(held)
    }

    /// The firm memory of all instances on a device, `but` one.
    pub(super) fn firm(&self, gpu: GpuId, but: Option<TenantId>) -> Bytes {
        let mut firm = BTreeMap::new();
        for (_, entry) in self.clients_on(gpu).filter(|(_, entry)| Some(entry.tenant) != but) {
            let guaranteed = || self.guaranteed(entry.tenant).unwrap_or(Bytes::ZERO);
            let (_, stays) = firm.entry(entry.tenant).or_insert_with(|| (guaranteed(), Bytes::ZERO));
            if !entry.has_news(self.now) {
                *stays = stays.saturating_add(entry.account.held().saturating_sub(entry.movable()));
            }
        }
        let firm = firm.into_values().map(|(guaranteed, stays): (Bytes, Bytes)| guaranteed.max(stays));
        firm.fold(Bytes::ZERO, Bytes::saturating_add)
    }

    fn guaranteed(&self, tenant: TenantId) -> Option<Bytes> {
        self.spec_of(tenant)?.guaranteed()
    }

    /// Whether an instance with `more` memory is beyond its guaranteed memory.
    fn is_beyond(&self, id: TenantId, more: Bytes) -> bool {
        let tenant = self.tenant_at(id);
        let held = self.ledger.tenant_held((tenant.gpu, tenant.instance));
        held.saturating_add(more) > self.guaranteed(id).unwrap_or(Bytes::ZERO)
    }

    /// Lets the line move as far as it can.
    pub(super) fn make_room(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        self.line.deadline = None;
        let devices: BTreeSet<GpuId> = self.line.waiters.iter().map(|waiter| waiter.gpu).collect();
        for gpu in devices {
            while self.serve_first(now, gpu, out) {}
        }
    }

    /// Whether a want was met or refused, so that the line has to be looked at again.
    fn serve_first(&mut self, now: Timestamp, gpu: GpuId, out: &mut Vec<NodeAction>) -> bool {
        for at in 0..self.line.waiters.len() {
            if self.line.waiters[at].gpu != gpu {
                continue;
            }
            let (next, waits) = match self.look_at(now, at, out) {
                Look::Over => return true,
                Look::Waits(next) => (next, true),
                Look::Passes(next) => (next, false),
            };
            self.line.deadline = [self.line.deadline, next].into_iter().flatten().min();
            if waits {
                return false;
            }
        }
        false
    }

    fn look_at(&mut self, now: Timestamp, at: usize, out: &mut Vec<NodeAction>) -> Look {
        let waiter = self.line.waiters[at];
        let Waiter { client, gpu, want, .. } = waiter;
        let entry = self.clients.get(client).expect("a client in line is there");
        let mut until = None;
        match want {
            Want::Return => {
                if let Some(called) = waiter.called {
                    let by = called.saturating_add(SILENCE);
                    if by > now {
                        return Look::Passes(Some(by));
                    }
                    self.line.waiters.remove(at);
                    return Look::Over;
                }
                let residence = entry.parking.map(|parking| parking.residence);
                let unaccounted = self.memory_limit(entry.tenant).is_none();
                if unaccounted || residence == Some(Residence::Resident) {
                    return self.call(now, at, out);
                }
                if residence == Some(Residence::Parking) {
                    return Look::Passes(None);
                }
                if entry.moves.stays_until > now {
                    return Look::Passes(Some(entry.moves.stays_until));
                }
                let account = (gpu, self.tenant_at(entry.tenant).instance);
                if self.need(&waiter) <= self.spare(gpu, client).min(self.ledger.tenant_free(account)) {
                    return self.call(now, at, out);
                }
            }
            Want::Allocation(reservation) => {
                let patience = if entry.parking.is_some() { PARKABLE_PATIENCE } else { PATIENCE };
                let last = waiter.since.saturating_add(patience);
                let most = if last > now { self.grantable(client) } else { self.unguaranteed(client) };
                match self.grant(now, reservation, most, out) {
                    Ok(()) => {
                        if let Some(since) = waiter.gathers {
                            let took = now.saturating_since(since);
                            self.settles_in(now, client, took.min(self.line.copy_of(gpu, reservation.bytes)));
                        }
                        self.allocated(now, client, out);
                        return Look::Over;
                    }
                    Err(free) if last <= now => {
                        self.deny(reservation, MemoryBound::Residents, free, out);
                        self.allocated(now, client, out);
                        return Look::Over;
                    }
                    Err(_) => until = Some(last),
                }
            }
        }
        self.find_victims(now, at, until, out)
    }

    /// Orders a client back into room that is there.
    fn call(&mut self, now: Timestamp, at: usize, out: &mut Vec<NodeAction>) -> Look {
        let waiter = &mut self.line.waiters[at];
        let client = waiter.client;
        (waiter.called, waiter.gathers) = (Some(now), None);
        // The client may have reserved its memory already, in an attempt to return without an order. The room is for this reservation, so it
        // goes to the front of the line.
        self.line.waiters.sort_by_key(|other| other.client != client || other.want == Want::Return);
        self.clients.get_mut(client).expect("a client in line is there").moves.returns = Some(now);
        self.order_park(now, client, None, out);
        Look::Over
    }

    /// An allocation is answered: it leaves the line, and the client's next reservation follows.
    fn allocated(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<NodeAction>) {
        self.line.waiters.retain(|waiter| waiter.client != client || waiter.want == Want::Return);
        self.reserve_queued(now, client, out);
    }

    /// Asks for slack, then orders victims, if they suffice.
    fn find_victims(
        &mut self,
        now: Timestamp,
        at: usize,
        until: Option<Timestamp>,
        out: &mut Vec<NodeAction>,
    ) -> Look {
        let waiter = self.line.waiters[at];
        let Waiter { client, gpu, want, .. } = waiter;
        let entry = self.clients.get(client).expect("a client in line is there");
        let (own, need) = (entry.tenant, self.need(&waiter));
        let within = !self.is_beyond(own, need);
        let earliest =
            |times: &mut dyn Iterator<Item = Timestamp>| times.chain(until).filter(|time| *time > now).min();
        // Where the limit of the instance is in the way, only its other processes can help.
        let free = self.ledger.tenant_free((gpu, self.tenant_at(own).instance));
        let of = (free < need).then_some(own);
        let spare = of.map_or_else(|| self.spare(gpu, client), |_| free);
        let there = spare.saturating_add(self.leaving(gpu, of));
        let since = waiter.gathers.unwrap_or(now);
        self.line.waiters[at].gathers = (need <= there).then_some(since);
        if need <= there {
            let mut obeyed = self.clients_on(gpu).filter_map(|(_, entry)| entry.obeys_by());
            return Look::Waits(earliest(&mut obeyed));
        }
        if waiter.round.is_some_and(|round| self.inquiries.is_open(round)) {
            return Look::Waits(until);
        }
        if !waiter.recalled {
            let holders = self.clients_on(gpu).filter(|(_, entry)| self.memory_limit(entry.tenant).is_some());
            let holders = holders.map(|(id, _)| id).collect();
            self.line.waiters[at].recalled = true;
            let round = self.inquire(now, Purpose::Room, holders, out);
            self.line.waiters[at].round = round;
            if round.is_some() {
                return Look::Waits(until);
            }
        }
        let (victims, budget) = self.victims(client, of);
        let reach = victims.iter().map(|victim| victim.bytes).fold(there, Bytes::saturating_add);
        // Others may soon tell that their new memory can move, or be back and become victims.
        let soon = |(id, entry): (ClientId, &Client)| {
            let known = entry.moves.granted.saturating_add(NEWS);
            let returns = entry.moves.returns.map(|since| since.saturating_add(SILENCE));
            let news = entry.has_news(now).then_some(known).into_iter().chain(returns).max()?;
            let bytes = entry.account.held().max(entry.parking?.bytes).saturating_sub(entry.movable());
            let counts = id != client && news > now && of.is_none_or(|of| entry.tenant == of);
            counts.then_some((news, bytes))
        };
        let soon: Vec<(Timestamp, Bytes)> = self.clients_on(gpu).filter_map(soon).collect();
        let hope = soon.iter().map(|(_, bytes)| *bytes).fold(reach, Bytes::saturating_add);
        if reach < need && hope >= need {
            let mut news = soon.iter().map(|(news, _)| *news);
            return Look::Waits(earliest(&mut news));
        }
        if reach < need {
            let Want::Allocation(reservation) = want else { return Look::Passes(None) };
            let of = budget.map_or(MemoryBound::Device, |uid| MemoryBound::ParkMemory { uid });
            self.deny(reservation, of, self.spare(gpu, client), out);
            self.allocated(now, client, out);
            return Look::Over;
        }
        let may_go =
            |victim: &&Victim| victim.again <= now && (victim.stays_until <= now || within && victim.beyond);
        let mut chosen = Vec::new();
        let mut sum = there;
        for victim in victims.iter().filter(may_go) {
            if sum < need {
                sum = sum.saturating_add(victim.bytes);
                chosen.push(*victim);
            }
        }
        if sum < need {
            let mut times = victims.iter().flat_map(|victim| [victim.again, victim.stays_until]);
            return Look::Waits(earliest(&mut times));
        }
        for at in (0..chosen.len()).rev() {
            if sum.saturating_sub(chosen[at].bytes) >= need {
                sum = sum.saturating_sub(chosen[at].bytes);
                chosen.remove(at);
            }
        }
        self.line.waiters[at].gathers = Some(since);
        for victim in chosen {
            self.order_park(now, victim.client, Some(By::For(client)), out);
        }
        let mut obeyed = self.clients_on(gpu).filter_map(|(_, entry)| entry.obeys_by());
        Look::Waits(earliest(&mut obeyed))
    }

    /// The clients that could park for a client, in the order in which they go, as far as their users' host memory reaches. The second is
    /// the user of a client that is left out for want of host memory.
    fn victims(&self, client: ClientId, of: Option<TenantId>) -> (Vec<Victim>, Option<u32>) {
        let gpu = self.tenant_at(self.clients.get(client).expect("a client in line is there").tenant).gpu;
        let mut victims: Vec<Victim> = self
            .clients_on(gpu)
            .filter(|(id, entry)| {
                *id != client && entry.can_leave() && of.is_none_or(|of| entry.tenant == of)
            })
            .map(|(id, entry)| Victim {
                client: id,
                bytes: entry.movable(),
                beyond: self.is_beyond(entry.tenant, Bytes::ZERO),
                stays_until: entry.moves.stays_until,
                again: entry.moves.again,
            })
            .collect();
        victims.sort_by_key(|victim| {
            let entry = self.clients.get(victim.client).expect("a client that was just found");
            let tenant = self.tenant_at(entry.tenant);
            let class = match self.class_of(tenant) {
                Some(ServiceClass::BestEffort) => 0,
                None => 1,
                Some(_) => 2,
            };
            let holds = tenant.turns.holds(victim.client);
            (!victim.beyond, class, holds, entry.moves.active, victim.bytes, victim.client)
        });
        let (mut budgets, mut spent) = (BTreeMap::new(), None);
        victims.retain(|victim| {
            let entry = self.clients.get(victim.client).expect("a client that was just found");
            let Some(session) = self.sessions.get(&entry.conn) else { return false };
            let uid = session.peer.uid;
            let left = budgets
                .entry(uid)
                .or_insert_with(|| self.config.park_memory.saturating_sub(self.parked_of(uid)));
            let bytes = entry.parking.map_or(Bytes::ZERO, |parking| parking.bytes);
            let fits = bytes <= *left;
            if fits {
                *left = left.saturating_sub(bytes);
            } else {
                spent = Some(uid);
            }
            fits
        });
        (victims, spent)
    }

    /// A client's residence begins, and its last move took `price`.
    fn settles_in(&mut self, now: Timestamp, client: ClientId, price: Duration) {
        let moves = &mut self.clients.get_mut(client).expect("a client that was just heard").moves;
        let until = now.saturating_add(price.saturating_mul(RESIDENCE).clamp(SHORTEST, LONGEST));
        moves.stays_until = moves.stays_until.max(until);
    }

    /// A client has stated another place of its memory.
    pub(super) fn has_moved(&mut self, now: Timestamp, client: ClientId, before: Residence) {
        let entry = self.clients.get_mut(client).expect("a client that was just heard");
        let Some(parking) = entry.parking else { return };
        let tenant = entry.tenant;
        match (before, parking.residence) {
            (Residence::Resident | Residence::Parking, Residence::Resident) => {
                if parking.obstacle.is_some() {
                    entry.moves.again = now.saturating_add(AGAIN);
                }
                self.line.returned(client);
            }
            (_, Residence::Resident) => {
                let took =
                    entry.moves.returns.take().map_or(Duration::ZERO, |since| now.saturating_since(since));
                // A process that was stopped on its way pays no more than twice its way out.
                let most = entry.moves.left_in.map_or(took, |left_in| left_in.saturating_mul(2));
                if !took.is_zero() {
                    let gpu = self.tenant_at(tenant).gpu;
                    self.line.measure(gpu, parking.bytes, took);
                }
                self.settles_in(now, client, took.min(most));
                self.line.returned(client);
            }
            (Residence::Resident | Residence::Parking, Residence::Parked | Residence::Missed) => {
                entry.moves.left_in = parking.ordered_at.map(|at| now.saturating_since(at));
                let gpu = self.tenant_at(tenant).gpu;
                // The client keeps some slack of its moved memory.
                for waiter in self.line.waiters.iter_mut().filter(|waiter| waiter.gpu == gpu) {
                    waiter.recalled = false;
                }
            }
            _ => {}
        }
    }
}

/// A client that could park.
#[derive(Debug, Clone, Copy)]
struct Victim {
    client: ClientId,
    bytes: Bytes,
    /// Whether its instance is beyond its guaranteed memory.
    beyond: bool,
    stays_until: Timestamp,
    again: Timestamp,
}

impl Client {
    /// Reserved memory that leaves the device when the client parks.
    fn movable(&self) -> Bytes {
        let here =
            |parking: &super::Parking| matches!(parking.residence, Residence::Resident | Residence::Parking);
        self.parking.filter(here).map_or(Bytes::ZERO, |parking| parking.bytes.min(self.account.held()))
    }

    /// Whether the process may soon tell that memory can move which the node counts among the rest.
    fn has_news(&self, now: Timestamp) -> bool {
        let granted = self.account.held() > Bytes::ZERO && self.moves.granted > Timestamp::ZERO;
        granted && self.parking.is_some() && self.moves.granted.saturating_add(NEWS) > now
    }

    /// Whether the client can be ordered to park, apart from its residence.
    fn can_leave(&self) -> bool {
        let resident =
            |parking: &super::Parking| !parking.ordered && parking.residence == Residence::Resident;
        self.parking.as_ref().is_some_and(resident) && self.movable() > Bytes::ZERO
    }

    /// The time by which a client under order has left; `None` for others.
    fn obeys_by(&self) -> Option<Timestamp> {
        let parking = self.parking.filter(|parking| parking.ordered && self.movable() > Bytes::ZERO)?;
        let copy = Duration::from_millis(parking.bytes.0 / SLOWEST);
        Some(parking.ordered_at?.saturating_add(SILENCE).saturating_add(copy))
    }
}
