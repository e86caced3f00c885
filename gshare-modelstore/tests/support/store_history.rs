//! Random histories of a store of models, with a book beside it of the orders and the answers alone.
//!
//! # What is checked
//! After each event, over any [`ModelStore`]:
//! - a client's references are its `Serve`s less its releases, and no referenced model is evicted;
//! - only a loaded model, or a written and sealed one, is served, and only to a client with permission to read it;
//! - a model is loaded into a tier once at a time; memory that was ordered and not freed is never more than the tier;
//! - no tenant's charge grows beyond its limits;
//! - a request is answered once, and not after its deadline; a refused event changes nothing.
//!
//! An operation is a small value: its meaning follows from the book, so any list of operations is a possible history.

use gshare_core::{ArenaId, Bytes, ClientId, Duration, GroupId, ModelId, TenantId, TicketId, Timestamp};
use gshare_modelstore::store::{
    Access, ArenaState, ContentHash, LoadFrom, MemoryTier, ModelStore, StoreAction, StoreEvent, StoreLimits,
};
use std::collections::BTreeMap;

/// One operation. Names count modulo the world's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, arbitrary::Arbitrary, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[allow(missing_docs, reason = "the fields are those of the events")]
pub enum StoreOp {
    /// Time passes; deadlines may be missed on the way.
    Wait { millis: u16 },
    /// The next deadline comes.
    Deadline,
    /// A client joins, if its slot is free.
    Join { slot: u8, tenant: u8, group: u8 },
    /// A client leaves, with all it holds.
    Leave { slot: u8 },
    /// A tenant's limits change. 0 is no limit.
    Limit { tenant: u8, units: u8, models: u8, interval_ms: u8 },
    /// A model with a source is made known.
    Add { model: u8, owner: u8, access: u8, units: u8, reload_ms: u16 },
    /// A client asks for a model.
    Ask { slot: u8, model: u8, gpu: bool, patience_ms: u16 },
    /// A client begins to write a model.
    Put { slot: u8, model: u8, gpu: bool, units: u8, access: u8 },
    /// A writer is done, or gives up.
    Written { which: u8, abort: bool },
    /// One of the open orders was carried out, with this content, or failed.
    Answer { which: u8, content: u8, fails: bool },
    /// A client gives one of its references back.
    Release { slot: u8, which: u8 },
    /// A model is pinned or unpinned.
    Pin { slot: u8, model: u8, pinned: bool },
    /// A model is to be evicted.
    Evict { slot: u8, model: u8, forget: bool },
    /// A call that must be refused.
    Nonsense { slot: u8, kind: u8 },
}

/// How large a world of operations is.
#[derive(Debug, Clone, Copy)]
pub struct StoreWorld {
    /// Slots of clients.
    pub clients: u8,
    /// Names of models.
    pub models: u8,
    /// Number of tenants.
    pub tenants: u8,
    /// Bytes of one unit of size.
    pub unit: Bytes,
}

/// Plays operations against a store and keeps the book.
#[derive(Debug)]
pub struct StoreDriver<S> {
    world: StoreWorld,
    store: S,
    now: Timestamp,
    /// Present clients by slot, and how often the slot was used.
    clients: BTreeMap<u32, ClientId>,
    generations: BTreeMap<u32, u32>,
    references: BTreeMap<(ClientId, ArenaId), u64>,
    /// Open requests: their owner, and their deadline, if any.
    tickets: BTreeMap<TicketId, (ClientId, Option<Timestamp>)>,
    next_ticket: u64,
    /// Memory that was ordered and not freed.
    memory: BTreeMap<ArenaId, Held>,
    limits: BTreeMap<TenantId, StoreLimits>,
    charges: BTreeMap<TenantId, (u64, u64)>,
    seen: BTreeMap<String, u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Loading,
    Written(ClientId),
    Sealing,
    Committed,
    Evicting,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    stage: Stage,
    model: ModelId,
    tier: MemoryTier,
    bytes: u64,
    source: Option<ArenaId>,
}

impl<S: ModelStore> StoreDriver<S> {
    /// Around an empty store.
    pub const fn new(world: StoreWorld, store: S) -> Self {
        Self {
            world,
            store,
            now: Timestamp::ZERO,
            clients: BTreeMap::new(),
            generations: BTreeMap::new(),
            references: BTreeMap::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            memory: BTreeMap::new(),
            limits: BTreeMap::new(),
            charges: BTreeMap::new(),
            seen: BTreeMap::new(),
        }
    }

    /// How often each order, and each reason of a refusal, was given.
    pub const fn seen(&self) -> &BTreeMap<String, u64> {
        &self.seen
    }

    /// Plays one operation.
    ///
    /// # Errors
    /// When the store breaks a promise: which one.
    pub fn apply(&mut self, op: StoreOp) -> Result<(), String> {
        let slot = |slot: u8| u32::from(slot % self.world.clients);
        let model = |model: u8| ModelId::new(u32::from(model % self.world.models));
        let tenant = |tenant: u8| TenantId::new(u32::from(tenant % self.world.tenants));
        let bytes = |units: u8| Bytes(self.world.unit.0 * u64::from(units % 12 + 1));
        let access = |access: u8| [Access::Private, Access::Group, Access::Public][usize::from(access % 3)];
        let tier = |gpu: bool| if gpu { MemoryTier::Gpu } else { MemoryTier::Host };
        let here = |name: u8| self.clients.get(&slot(name)).copied();
        let event = match op {
            StoreOp::Wait { millis } => {
                self.now = self.now + Duration::from_millis(u64::from(millis));
                return Ok(());
            }
            StoreOp::Deadline => {
                let Some(at) = self.store.next_deadline() else { return Ok(()) };
                self.now = self.now.max(at);
                StoreEvent::DeadlineReached
            }
            StoreOp::Join { slot: at, tenant: whose, group } => {
                if here(at).is_some() {
                    return Ok(());
                }
                let at = slot(at);
                let generation = *self.generations.get(&at).unwrap_or(&0);
                let client = ClientId::new(at, generation);
                let (tenant, group) = (tenant(whose), GroupId::new(u32::from(group % 3)));
                self.clients.insert(at, client);
                self.generations.insert(at, generation + 1);
                StoreEvent::ClientJoined { client, tenant, group, admin: whose == 255 }
            }
            StoreOp::Leave { slot: at } => {
                let Some(client) = self.clients.remove(&slot(at)) else { return Ok(()) };
                self.references.retain(|&(holder, _), _| holder != client);
                StoreEvent::ClientLeft { client }
            }
            StoreOp::Limit { tenant: whose, units, models, interval_ms } => {
                let mut limits = StoreLimits::default();
                if units > 0 {
                    limits.bytes = Bytes(self.world.unit.0 * u64::from(units));
                }
                if models > 0 {
                    limits.models = u32::from(models % 8);
                }
                limits.load_interval = Duration::from_millis(u64::from(interval_ms));
                limits.load_burst = 1 + u32::from(models % 3);
                self.limits.insert(tenant(whose), limits);
                StoreEvent::TenantLimited { tenant: tenant(whose), limits }
            }
            StoreOp::Add { model: name, owner, access: to, units, reload_ms } => StoreEvent::ModelAdded {
                model: model(name),
                owner: tenant(owner),
                group: GroupId::new(u32::from(owner % 3)),
                access: access(to),
                bytes: bytes(units),
                reload: Duration::from_millis(u64::from(reload_ms)),
            },
            StoreOp::Ask { slot: at, model: name, gpu, patience_ms } => {
                let Some(client) = here(at) else { return Ok(()) };
                let deadline = self.now + Duration::from_millis(u64::from(patience_ms));
                let (model, tier) = (model(name), tier(gpu));
                let ticket = self.ticket(client, Some(deadline));
                StoreEvent::Asked { client, ticket, model, tier, deadline }
            }
            StoreOp::Put { slot: at, model: name, gpu, units, access: to } => {
                let Some(client) = here(at) else { return Ok(()) };
                let (model, tier, bytes, access) = (model(name), tier(gpu), bytes(units), access(to));
                let ticket = self.ticket(client, None);
                StoreEvent::PutBegun { client, ticket, model, tier, bytes, access }
            }
            StoreOp::Written { which, abort } => {
                let writes = self.memory.iter().filter_map(|(&arena, held)| match held.stage {
                    Stage::Written(client) => Some((arena, client)),
                    _ => None,
                });
                let Some((arena, client)) = pick(&writes.collect::<Vec<_>>(), which) else { return Ok(()) };
                if abort {
                    StoreEvent::PutAborted { client, arena }
                } else {
                    let ticket = self.ticket(client, None);
                    StoreEvent::PutCommitted { client, ticket, arena }
                }
            }
            StoreOp::Answer { which, content, fails } => {
                let open = |(&arena, held): (&ArenaId, &Held)| {
                    matches!(held.stage, Stage::Loading | Stage::Sealing | Stage::Evicting)
                        .then_some((arena, held.stage))
                };
                let Some((arena, stage)) =
                    pick(&self.memory.iter().filter_map(open).collect::<Vec<_>>(), which)
                else {
                    return Ok(());
                };
                match stage {
                    Stage::Evicting => StoreEvent::Evicted { arena },
                    _ if fails => StoreEvent::LoadFailed { arena },
                    _ => StoreEvent::Loaded { arena, content: ContentHash([content % 6; 32]) },
                }
            }
            StoreOp::Release { slot: at, which } => {
                let Some(client) = here(at) else { return Ok(()) };
                let held = self.references.keys().filter(|&&(holder, _)| holder == client);
                let Some((_, arena)) = pick(&held.copied().collect::<Vec<_>>(), which) else { return Ok(()) };
                if let Some(count) = self.references.get_mut(&(client, arena)) {
                    *count -= 1;
                }
                self.references.retain(|_, count| *count > 0);
                StoreEvent::Released { client, arena }
            }
            StoreOp::Pin { slot: at, model: name, pinned } => {
                let Some(client) = here(at) else { return Ok(()) };
                let model = model(name);
                let ticket = self.ticket(client, None);
                StoreEvent::PinAsked { client, ticket, model, pinned }
            }
            StoreOp::Evict { slot: at, model: name, forget } => {
                let Some(client) = here(at) else { return Ok(()) };
                let model = model(name);
                let ticket = self.ticket(client, None);
                StoreEvent::EvictAsked { client, ticket, model, forget }
            }
            StoreOp::Nonsense { slot: at, kind } => return self.nonsense(slot(at), kind),
        };
        self.tell(event)
    }

    fn ticket(&mut self, client: ClientId, deadline: Option<Timestamp>) -> TicketId {
        let ticket = TicketId::new(self.next_ticket);
        self.next_ticket += 1;
        self.tickets.insert(ticket, (client, deadline));
        ticket
    }

    /// Tells the engine an event that must be refused, and change nothing.
    fn nonsense(&mut self, slot: u32, kind: u8) -> Result<(), String> {
        let gone = ClientId::new(slot, self.generations.get(&slot).copied().unwrap_or(0) + 1);
        let client = self.clients.get(&slot).copied().unwrap_or(gone);
        let arena = ArenaId::new(u32::from(kind), 1 << 30);
        let ticket = TicketId::new(u64::MAX);
        let event = match kind % 7 {
            0 => StoreEvent::Released { client, arena },
            1 => StoreEvent::Evicted { arena },
            2 => StoreEvent::Loaded { arena, content: ContentHash([0; 32]) },
            3 => StoreEvent::PutCommitted { client, ticket, arena },
            4 => StoreEvent::ClientLeft { client: gone },
            5 => StoreEvent::ModelAdded {
                model: ModelId::new(u32::MAX),
                owner: TenantId::new(0),
                group: GroupId::new(0),
                access: Access::Public,
                bytes: Bytes::ZERO,
                reload: Duration::ZERO,
            },
            _ => StoreEvent::TenantLimited {
                tenant: TenantId::new(0),
                limits: {
                    let mut limits = StoreLimits::default();
                    limits.load_burst = 0;
                    limits
                },
            },
        };
        let before = self.store.arenas();
        let mut actions = Vec::new();
        match self.store.handle(self.now, event, &mut actions) {
            Ok(()) => Err(format!("{event:?} was accepted")),
            Err(_) if !actions.is_empty() => Err(format!("{event:?} was refused, with orders {actions:?}")),
            Err(_) if self.store.arenas() != before => {
                Err(format!("{event:?} was refused, and changed something"))
            }
            Err(_) => Ok(()),
        }
    }

    fn tell(&mut self, event: StoreEvent) -> Result<(), String> {
        let mut actions = Vec::new();
        let before = self.store.arenas();
        match self.store.handle(self.now, event, &mut actions) {
            Ok(()) => {}
            // The one event that two rules may refuse here: a name that is in use, and a write that is too late.
            Err(_) if actions.is_empty() && self.store.arenas() == before => {
                let harmless = matches!(
                    event,
                    StoreEvent::ModelAdded { .. }
                        | StoreEvent::PutCommitted { .. }
                        | StoreEvent::PutAborted { .. }
                );
                if let StoreEvent::PutCommitted { ticket, .. } = event {
                    self.tickets.remove(&ticket);
                }
                return if harmless { Ok(()) } else { Err(format!("{event:?} was refused")) };
            }
            Err(error) => return Err(format!("{event:?}: {error}, yet something changed")),
        }
        match event {
            StoreEvent::Loaded { arena, .. } => self.advance(arena, Stage::Committed),
            StoreEvent::PutCommitted { arena, .. } => self.advance(arena, Stage::Sealing),
            StoreEvent::Evicted { arena } => {
                self.memory.remove(&arena);
            }
            _ => {}
        }
        for action in &actions {
            *self.seen.entry(kind(action)).or_insert(0) += 1;
            self.ordered(*action).map_err(|wrong| format!("after {event:?}, {action:?}: {wrong}"))?;
        }
        // Deadlines come before the event: answers due by then are still given.
        if let StoreEvent::ClientLeft { client } = event {
            self.tickets.retain(|_, &mut (whose, _)| whose != client);
        }
        self.look().map_err(|wrong| format!("after {event:?}: {wrong}"))
    }

    fn advance(&mut self, arena: ArenaId, stage: Stage) {
        if let Some(held) = self.memory.get_mut(&arena) {
            held.stage = stage;
            held.source = None;
        }
    }

    fn answered(&mut self, ticket: TicketId, client: ClientId) -> Result<(), String> {
        match self.tickets.remove(&ticket) {
            Some((whose, _)) if whose == client => Ok(()),
            Some((whose, _)) => Err(format!("{ticket} is {whose}'s")),
            None => Err(format!("{ticket} is not open")),
        }
    }

    fn ordered(&mut self, action: StoreAction) -> Result<(), String> {
        match action {
            StoreAction::Load { arena, model, tier, from } => {
                let source = match from {
                    LoadFrom::Host(source) | LoadFrom::Gpu(source) => {
                        if !self.memory.get(&source).is_some_and(|held| held.stage == Stage::Committed) {
                            return Err(format!("{source} is not there to copy from"));
                        }
                        Some(source)
                    }
                    _ => None,
                };
                self.take(arena, Stage::Loading, model, tier, source)
            }
            StoreAction::Write { ticket, client, arena, model, tier } => {
                self.answered(ticket, client)?;
                self.take(arena, Stage::Written(client), model, tier, None)
            }
            StoreAction::Seal { arena } => match self.memory.get(&arena) {
                Some(held) if held.stage == Stage::Sealing => Ok(()),
                _ => Err("no client finished writing it".into()),
            },
            StoreAction::Serve { ticket, client, arena, model } => {
                self.answered(ticket, client)?;
                if !self.memory.get(&arena).is_some_and(|held| held.stage == Stage::Committed) {
                    return Err("it is not complete".into());
                }
                if !self.store.may_read(client, model) {
                    return Err("the client may not read it".into());
                }
                *self.references.entry((client, arena)).or_insert(0) += 1;
                Ok(())
            }
            StoreAction::Stored { ticket, client, arena, .. } => {
                self.answered(ticket, client)?;
                match self.memory.get(&arena) {
                    Some(held) if held.stage == Stage::Committed => Ok(()),
                    _ => Err("it is not complete".into()),
                }
            }
            StoreAction::Evict { arena } => {
                if self.references.keys().any(|&(_, held)| held == arena) {
                    return Err("it is referenced".into());
                }
                if self.memory.values().any(|held| held.source == Some(arena)) {
                    return Err("it is being copied from".into());
                }
                match self.memory.get_mut(&arena) {
                    Some(held) if held.stage != Stage::Evicting => {
                        (held.stage, held.source) = (Stage::Evicting, None);
                        Ok(())
                    }
                    _ => Err("it is not there".into()),
                }
            }
            StoreAction::Done { ticket, client } | StoreAction::Refuse { ticket, client, .. } => {
                self.answered(ticket, client)
            }
            _ => Ok(()),
        }
    }

    fn take(
        &mut self,
        arena: ArenaId,
        stage: Stage,
        model: ModelId,
        tier: MemoryTier,
        source: Option<ArenaId>,
    ) -> Result<(), String> {
        let bytes = self.store.arena(arena).ok_or("no such arena")?.bytes.0;
        let loading = |held: &Held| !matches!(held.stage, Stage::Committed | Stage::Evicting);
        if self.memory.values().any(|held| held.model == model && held.tier == tier && loading(held)) {
            return Err("it is being loaded already".into());
        }
        if self.memory.insert(arena, Held { stage, model, tier, bytes, source }).is_some() {
            return Err("the arena has memory already".into());
        }
        let held: u64 = self.memory.values().filter(|held| held.tier == tier).map(|held| held.bytes).sum();
        if held > self.store.capacity(tier).0 {
            return Err(format!("{held} bytes are more than the tier"));
        }
        Ok(())
    }

    fn look(&mut self) -> Result<(), String> {
        let mut charges: BTreeMap<TenantId, (u64, u64)> = BTreeMap::new();
        for view in self.store.arenas() {
            let held: u64 = self
                .references
                .iter()
                .filter(|((_, arena), _)| *arena == view.arena)
                .map(|(_, count)| count)
                .sum();
            if held != view.references {
                return Err(format!("{}: {} references, {held} by the book", view.arena, view.references));
            }
            if view.state != ArenaState::Evicting {
                let (bytes, arenas) = charges.entry(view.charged).or_default();
                (*bytes, *arenas) = (*bytes + view.bytes.0, *arenas + 1);
            }
        }
        for (tenant, &(bytes, arenas)) in &charges {
            let limits = self.limits.get(tenant).copied().unwrap_or_default();
            let (bytes_before, arenas_before) = self.charges.get(tenant).copied().unwrap_or_default();
            if bytes > limits.bytes.0.max(bytes_before) {
                return Err(format!("{tenant} is charged {bytes} bytes of {}", limits.bytes));
            }
            if arenas > u64::from(limits.models).max(arenas_before) {
                return Err(format!("{tenant} is charged {arenas} arenas of {}", limits.models));
            }
        }
        self.charges = charges;
        let late = |(_, deadline): &&(ClientId, Option<Timestamp>)| deadline.is_some_and(|at| at <= self.now);
        match self.tickets.values().find(late) {
            Some((client, _)) => Err(format!("a request of {client} is past its deadline and not answered")),
            None => Ok(()),
        }
    }

    /// Everything that is open is answered, all clients leave, and nothing is left that cannot stay.
    ///
    /// # Errors
    /// When a request is never answered or an order never ends.
    pub fn settle(&mut self) -> Result<(), String> {
        for round in 0..10_000 {
            let open = |held: &Held| matches!(held.stage, Stage::Loading | Stage::Sealing | Stage::Evicting);
            if self.memory.values().any(open) {
                self.apply(StoreOp::Answer { which: 0, content: 0, fails: round % 3 == 0 })?;
            } else if self.memory.values().any(|held| matches!(held.stage, Stage::Written(_))) {
                self.apply(StoreOp::Written { which: 0, abort: false })?;
                self.apply(StoreOp::Deadline)?;
            } else if !self.tickets.is_empty() && self.store.next_deadline().is_some() {
                self.apply(StoreOp::Deadline)?;
            } else {
                break;
            }
        }
        if let Some((ticket, (client, _))) = self.tickets.first_key_value() {
            return Err(format!("{ticket} of {client} was never answered"));
        }
        for slot in 0..self.world.clients {
            self.apply(StoreOp::Leave { slot })?;
        }
        match self.store.arenas().iter().find(|arena| arena.references > 0) {
            Some(arena) => Err(format!("{} is referenced by no client that is here", arena.arena)),
            None => Ok(()),
        }
    }
}

fn kind(action: &StoreAction) -> String {
    match action {
        StoreAction::Refuse { reason, .. } => format!("{reason:?}"),
        StoreAction::Load { from: LoadFrom::Host(_), .. } => "LoadFromHost".into(),
        StoreAction::Load { from: LoadFrom::Gpu(_), .. } => "LoadFromGpu".into(),
        other => format!("{other:?}").split([' ', '{']).next().unwrap_or_default().to_owned(),
    }
}

fn pick<T: Copy>(from: &[T], which: u8) -> Option<T> {
    (!from.is_empty()).then(|| from[usize::from(which) % from.len()])
}
