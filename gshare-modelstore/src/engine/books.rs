//! The books, and the steps that change them together.

use crate::store::{
    Access, ArenaState, ArenaView, ContentHash, LoadFrom, MemoryTier, StoreAction, StoreLimits,
};
use gshare_core::slots::Slots;
use gshare_core::{ArenaId, Bytes, ClientId, Duration, GroupId, ModelId, TenantId, TicketId, Timestamp};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Weight of one request, so that several halvings of it are exact.
const ONE_USE: u64 = 1 << 16;
/// Upper bound of the rate; further requests do not count.
const MAX_RATE: u64 = 1 << 40;

#[derive(Debug)]
pub(super) struct Client {
    pub(super) tenant: TenantId,
    pub(super) group: GroupId,
    pub(super) admin: bool,
    pub(super) refs: BTreeMap<ArenaId, u64>,
    pub(super) tickets: BTreeSet<TicketId>,
    pub(super) writes: BTreeSet<ArenaId>,
}

#[derive(Debug, Default)]
pub(super) struct Tenant {
    pub(super) limits: StoreLimits,
    pub(super) bytes: u64,
    pub(super) arenas: u32,
    /// Time of the next load if all loads came at the limit's pace.
    pub(super) next_load: Timestamp,
}

#[derive(Debug)]
pub(super) struct Model {
    pub(super) owner: TenantId,
    pub(super) group: GroupId,
    pub(super) access: Access,
    pub(super) bytes: Bytes,
    /// Time to load the model from its source on disk, if it has one.
    pub(super) source: Option<Duration>,
    pub(super) content: Option<ContentHash>,
    pub(super) pinned: bool,
    pub(super) arenas: [Option<ArenaId>; 2],
    rate: u64,
    /// Number of half-lives since time 0, at the last use.
    epoch: u64,
    pub(super) last_used: Timestamp,
}

impl Model {
    pub(super) const fn new(
        owner: TenantId,
        group: GroupId,
        access: Access,
        bytes: Bytes,
        source: Option<Duration>,
    ) -> Self {
        let (content, pinned, arenas) = (None, false, [None; 2]);
        let (rate, epoch, last_used) = (0, 0, Timestamp::ZERO);
        Self { owner, group, access, bytes, source, content, pinned, arenas, rate, epoch, last_used }
    }

    pub(super) fn rate(&self, now: Timestamp, half_life: Duration) -> u64 {
        let halvings = (now.as_nanos() / half_life.as_nanos()).saturating_sub(self.epoch);
        u32::try_from(halvings).ok().and_then(|by| self.rate.checked_shr(by)).unwrap_or(0)
    }

    pub(super) fn use_once(&mut self, now: Timestamp, half_life: Duration) {
        self.rate = (self.rate(now, half_life) + ONE_USE).min(MAX_RATE);
        self.epoch = now.as_nanos() / half_life.as_nanos();
        self.last_used = now;
    }
}

/// The origin of an arena's content.
#[derive(Debug, Clone, Copy)]
pub(super) enum Origin {
    Loaded {
        from: LoadFrom,
    },
    /// `due` until the writer is done.
    Written {
        by: Option<ClientId>,
        due: Option<Timestamp>,
    },
}

#[derive(Debug)]
pub(super) struct Arena {
    pub(super) tier: MemoryTier,
    pub(super) bytes: u64,
    pub(super) state: ArenaState,
    pub(super) origin: Origin,
    pub(super) content: Option<ContentHash>,
    pub(super) names: BTreeSet<ModelId>,
    pub(super) charged: TenantId,
    pub(super) references: u64,
    /// Loads to the GPU that copy from this arena.
    pub(super) copies: u32,
    pub(super) waiting: VecDeque<TicketId>,
}

impl Arena {
    pub(super) fn is_held(&self) -> bool {
        self.references > 0 || self.copies > 0
    }

    /// Whether a client is still writing it.
    pub(super) const fn is_being_written(&self) -> bool {
        matches!(self.origin, Origin::Written { due: Some(_), .. })
    }

    pub(super) fn view(&self, arena: ArenaId) -> ArenaView {
        let mut view = ArenaView::new(arena, self.tier, Bytes(self.bytes), self.state, self.charged);
        view.references = self.references;
        view.names = u32::try_from(self.names.len()).unwrap_or(u32::MAX);
        view
    }
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Wants {
    Reference(ModelId),
    Write,
    Commit,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Ticket {
    pub(super) client: ClientId,
    pub(super) wants: Wants,
    pub(super) arena: Option<ArenaId>,
    pub(super) due: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    Ticket(TicketId),
    Write(ArenaId),
}

#[derive(Debug, Default)]
pub(super) struct TierUse {
    pub(super) promised: u64,
    pub(super) physical: u64,
    /// Arenas without memory, in the order of their promises.
    pub(super) empty: VecDeque<ArenaId>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) now: Timestamp,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) tenants: BTreeMap<TenantId, Tenant>,
    pub(super) models: BTreeMap<ModelId, Model>,
    pub(super) arenas: Slots<ArenaId, Arena>,
    /// Committed arenas.
    pub(super) by_content: BTreeMap<(ContentHash, MemoryTier), ArenaId>,
    pub(super) tickets: BTreeMap<TicketId, Ticket>,
    pub(super) deadlines: BTreeSet<(Timestamp, Due)>,
    pub(super) tiers: [TierUse; 2],
}

impl State {
    pub(super) fn join(&mut self, client: ClientId, tenant: TenantId, group: GroupId, admin: bool) {
        let (refs, tickets, writes) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        self.clients.insert(client, Client { tenant, group, admin, refs, tickets, writes });
    }

    pub(super) fn tenant(&mut self, tenant: TenantId) -> &mut Tenant {
        self.tenants.entry(tenant).or_default()
    }

    pub(super) fn tenant_of(&self, client: ClientId) -> TenantId {
        self.clients.get(&client).map_or(TenantId::new(u32::MAX), |client| client.tenant)
    }

    /// Whether the client may pin and evict the model.
    pub(super) fn rules(&self, client: ClientId, model: &Model) -> bool {
        self.clients.get(&client).is_some_and(|client| client.admin || client.tenant == model.owner)
    }

    pub(super) fn committed(&self, model: ModelId, tier: MemoryTier) -> Option<ArenaId> {
        let arena = self.models.get(&model)?.arenas[tier as usize]?;
        (self.arenas.get(arena)?.state == ArenaState::Committed).then_some(arena)
    }

    /// Adds an empty arena at the end of the queue for memory.
    pub(super) fn promise(
        &mut self,
        models: &[ModelId],
        tier: MemoryTier,
        bytes: Bytes,
        charged: TenantId,
        origin: Origin,
    ) -> ArenaId {
        if let Origin::Loaded { from: LoadFrom::Host(source) } = origin
            && let Some(source) = self.arenas.get_mut(source)
        {
            source.copies += 1;
        }
        let new = Arena {
            tier,
            bytes: bytes.0,
            state: ArenaState::Empty,
            origin,
            content: None,
            names: BTreeSet::new(),
            charged,
            references: 0,
            copies: 0,
            waiting: VecDeque::new(),
        };
        let arena = self.arenas.insert(new);
        models.iter().for_each(|&model| self.link(model, arena));
        self.tiers[tier as usize].promised += bytes.0;
        self.tiers[tier as usize].empty.push_back(arena);
        let tenant = self.tenant(charged);
        (tenant.bytes, tenant.arenas) = (tenant.bytes + bytes.0, tenant.arenas + 1);
        arena
    }

    /// Makes the arena hold the model in its tier.
    pub(super) fn link(&mut self, model: ModelId, arena: ArenaId) {
        let (Some(found), Some(to)) = (self.models.get_mut(&model), self.arenas.get_mut(arena)) else {
            return;
        };
        let before = found.arenas[to.tier as usize].replace(arena);
        to.names.insert(model);
        if let Some(before) = before
            && before != arena
            && let Some(before) = self.arenas.get_mut(before)
        {
            before.names.remove(&model);
        }
    }

    /// Unlinks the arena from the model, and forgets the model if nothing else is left of it.
    pub(super) fn unlink(&mut self, model: ModelId, arena: ArenaId, actions: &mut Vec<StoreAction>) {
        let (Some(found), Some(from)) = (self.models.get_mut(&model), self.arenas.get_mut(arena)) else {
            return;
        };
        found.arenas[from.tier as usize] = None;
        from.names.remove(&model);
        self.forget(model, actions);
    }

    /// Forgets a model without any arena or source.
    pub(super) fn forget(&mut self, model: ModelId, actions: &mut Vec<StoreAction>) {
        if self.models.get(&model).is_some_and(|found| found.source.is_none() && found.arenas == [None; 2]) {
            self.models.remove(&model);
            actions.push(StoreAction::Forgotten { model });
        }
    }

    /// Evicts an arena from the GPU by a copy to host memory. The caller has made sure of room there.
    pub(super) fn demote(&mut self, arena: ArenaId, actions: &mut Vec<StoreAction>) {
        let Some(found) = self.arenas.get(arena) else { return };
        let (bytes, charged) = (Bytes(found.bytes), found.charged);
        let names: Vec<ModelId> = found.names.iter().copied().collect();
        let origin = Origin::Loaded { from: LoadFrom::Gpu(arena) };
        // The copy comes first, so that the model always has an arena.
        self.promise(&names, MemoryTier::Host, bytes, charged, origin);
        self.depart(arena, false, actions);
    }

    /// Evicts an arena. An arena without memory is gone at once.
    pub(super) fn retire(&mut self, arena: ArenaId, actions: &mut Vec<StoreAction>) {
        self.depart(arena, true, actions);
    }

    fn depart(&mut self, arena: ArenaId, now: bool, actions: &mut Vec<StoreAction>) {
        let Some(found) = self.arenas.get_mut(arena) else { return };
        let (tier, bytes, charged, before) = (found.tier, found.bytes, found.charged, found.state);
        found.state = ArenaState::Evicting;
        let names: Vec<ModelId> = found.names.iter().copied().collect();
        if let Origin::Written { by: Some(client), due: Some(_) } = found.origin {
            self.end_of_write(client, arena);
        }
        if let Some(content) = self.arenas.get(arena).and_then(|found| found.content) {
            self.by_content.remove(&(content, tier));
        }
        self.tiers[tier as usize].promised -= bytes;
        let tenant = self.tenant(charged);
        (tenant.bytes, tenant.arenas) = (tenant.bytes - bytes, tenant.arenas - 1);
        if before == ArenaState::Empty {
            self.tiers[tier as usize].empty.retain(|&empty| empty != arena);
        } else if now {
            actions.push(StoreAction::Evict { arena });
        }
        self.release_source(arena, actions);
        names.into_iter().for_each(|model| self.unlink(model, arena, actions));
        if before == ArenaState::Empty {
            self.arenas.remove(arena);
        }
    }

    /// Removes an arena after its memory was freed.
    pub(super) fn freed(&mut self, arena: ArenaId) -> Option<MemoryTier> {
        let Arena { tier, bytes, .. } = self.arenas.remove(arena)?;
        self.tiers[tier as usize].physical -= bytes;
        Some(tier)
    }

    /// Notes that no client writes the arena any more.
    pub(super) fn end_of_write(&mut self, client: ClientId, arena: ArenaId) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.writes.remove(&arena);
        }
        if let Some(Arena { origin: Origin::Written { by, due }, .. }) = self.arenas.get_mut(arena) {
            *by = None;
            if let Some(due) = due.take() {
                self.deadlines.remove(&(due, Due::Write(arena)));
            }
        }
    }

    /// Ends an arena's need for the arena that it is copied from.
    pub(super) fn release_source(&mut self, arena: ArenaId, actions: &mut Vec<StoreAction>) {
        let Some(Arena { origin: Origin::Loaded { from }, .. }) = self.arenas.get_mut(arena) else { return };
        match std::mem::replace(from, LoadFrom::Disk) {
            LoadFrom::Host(source) => {
                if let Some(source) = self.arenas.get_mut(source) {
                    source.copies -= 1;
                }
            }
            LoadFrom::Gpu(source) => actions.push(StoreAction::Evict { arena: source }),
            _ => {}
        }
    }

    pub(super) fn wait(&mut self, name: TicketId, mut ticket: Ticket, arena: ArenaId) {
        ticket.arena = Some(arena);
        if let Some(due) = ticket.due {
            self.deadlines.insert((due, Due::Ticket(name)));
        }
        if let Some(client) = self.clients.get_mut(&ticket.client) {
            client.tickets.insert(name);
        }
        if let Some(arena) = self.arenas.get_mut(arena) {
            arena.waiting.push_back(name);
        }
        self.tickets.insert(name, ticket);
    }

    /// Forgets a ticket; the caller answers it.
    pub(super) fn close(&mut self, name: TicketId) -> Option<Ticket> {
        let ticket = self.tickets.remove(&name)?;
        if let Some(due) = ticket.due {
            self.deadlines.remove(&(due, Due::Ticket(name)));
        }
        if let Some(client) = self.clients.get_mut(&ticket.client) {
            client.tickets.remove(&name);
        }
        Some(ticket)
    }

    pub(super) fn serve(
        &mut self,
        ticket: TicketId,
        client: ClientId,
        arena: ArenaId,
        model: ModelId,
        actions: &mut Vec<StoreAction>,
    ) {
        let (Some(holder), Some(held)) = (self.clients.get_mut(&client), self.arenas.get_mut(arena)) else {
            return;
        };
        *holder.refs.entry(arena).or_insert(0) += 1;
        held.references += 1;
        actions.push(StoreAction::Serve { ticket, client, arena, model });
    }

    /// Takes one reference away. Returns the tier if it was the last.
    pub(super) fn release(&mut self, client: ClientId, arena: ArenaId) -> Option<MemoryTier> {
        let holder = self.clients.get_mut(&client)?;
        let count = holder.refs.get_mut(&arena)?;
        *count -= 1;
        if *count == 0 {
            holder.refs.remove(&arena);
        }
        let held = self.arenas.get_mut(arena)?;
        held.references -= 1;
        (held.references == 0).then_some(held.tier)
    }

    pub(super) fn charge_load(&mut self, now: Timestamp, tenant: TenantId) {
        let tenant = self.tenant(tenant);
        tenant.next_load = tenant.next_load.max(now).saturating_add(tenant.limits.load_interval);
    }
}
