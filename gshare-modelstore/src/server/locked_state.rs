//! The state behind the lock: the engine, the names of its models, and the memory of its arenas.

mod figures;
mod shared;

pub(super) use shared::Shared;

use super::ServerConfig;
use super::conn::Conn;
use super::names::Names;
use crate::arena_fill::{Origin, Source};
use crate::backend::{ArenaMemory, ModelBackend};
use crate::bounds::{Booked, Bounds, Exceeded, Ledger, Resource};
use crate::frame::{Answer, Code};
use crate::manifest::Layout;
use crate::store::{
    Access, ContentHash, LoadFrom, MemoryTier, ModelStore, RefuseReason, StoreAction, StoreError, StoreEvent,
    StoreLimits,
};
use gshare_core::slots::Slots;
use gshare_core::{
    ArenaId, Bytes, ClientId, Duration, Engine as _, GroupId, ModelId, TenantId, TicketId, Timestamp,
};
use rustix::fd::OwnedFd;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A model behind a number of the engine.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) name: String,
    pub(super) source: Option<Arc<Source>>,
    access: Access,
    owner: u32,
    _booked: Vec<Booked>,
}

/// Most descriptors of an arena: its file, the writer's, the readers', and the manifest's if that is a separate file.
/// During a load, two descriptors of its source replace the writer's and the manifest's.
const ARENA_DESCRIPTORS: u64 = 4;

/// Memory of an arena.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) memory: Arc<dyn ArenaMemory>,
    pub(super) layout: Arc<Layout>,
    /// The prepared answer, once the arena is loaded.
    pub(super) complete: Option<Arc<Served>>,
    _booked: Arc<Booked>,
}

/// The answer to a get of an arena, the same for all requests except for their number.
#[derive(Debug)]
pub(super) struct Served {
    arena: ArenaId,
    pub(super) frame: Vec<u8>,
    pub(super) files: Vec<Arc<OwnedFd>>,
    manifest_bytes: u64,
    content: ContentHash,
}

/// A request that the engine knows.
#[derive(Debug, Clone)]
pub(super) struct Open {
    pub(super) conn: Arc<Conn>,
    pub(super) request: u32,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    Get,
    /// Gets progress, and gives the load's reference back at the end.
    PutFile(ModelId),
    /// The layout of the arena.
    PutBegin(Arc<Layout>),
    Commit,
    Plain,
    /// No client waits for this request.
    Silent,
}

/// Work for after the release of the lock.
#[derive(Debug)]
pub(super) enum After {
    Send {
        conn: Arc<Conn>,
        request: u32,
        answer: Answer,
        descriptors: Vec<Arc<OwnedFd>>,
    },
    Serve {
        conn: Arc<Conn>,
        request: u32,
        served: Arc<Served>,
    },
    Load(Load),
    Seal {
        arena: ArenaId,
        held: Held,
    },
    /// Takes time, since the kernel frees the pages.
    Free {
        arena: ArenaId,
        held: Held,
    },
}

/// A load to carry out.
#[derive(Debug)]
pub(super) struct Load {
    arena: ArenaId,
    backend: Arc<dyn ModelBackend>,
    memory: Arc<dyn ArenaMemory>,
    origin: Origin,
    /// The backend of the source tier, if it must do the copy: only a GPU's backend can read GPU memory.
    out: Option<Arc<dyn ModelBackend>>,
    /// The requests that get progress.
    told: Vec<(Arc<Conn>, u32)>,
}

#[derive(Debug, Default)]
pub(super) struct Counts {
    gets: u64,
    loads: u64,
    demotions: u64,
    load_failures: u64,
    evictions: u64,
    refusals: u64,
}

#[derive(Debug)]
pub(super) struct Core {
    pub(super) engine: Box<dyn ModelStore>,
    config: ServerConfig,
    started: Instant,
    pub(super) names: Names,
    pub(super) models: BTreeMap<ModelId, Known>,
    next_model: u32,
    pub(super) arenas: BTreeMap<ArenaId, Held>,
    pub(super) conns: Slots<ClientId, Arc<Conn>>,
    /// Ended connections with answers that the client can still read.
    gone: Vec<Arc<Conn>>,
    tickets: BTreeMap<TicketId, Open>,
    next_ticket: u64,
    tenants: BTreeSet<u32>,
    counts: Counts,
    actions: Vec<StoreAction>,
    pub(super) after: Vec<After>,
    backends: [Option<Arc<dyn ModelBackend>>; 2],
    pub(super) ledger: Ledger,
}

/// Most open requests of a client; one more ends its connection.
const MAX_WAITING: u32 = 64;

/// Events for the engine, with an explanation for each `LoadFailed`.
type Events = VecDeque<(StoreEvent, Option<(Code, String)>)>;

fn since(started: Instant) -> Timestamp {
    Timestamp::from_nanos(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

/// The refusal for an exceeded bound.
pub(super) fn refusal(exceeded: Exceeded) -> (Code, String) {
    (Code::from(&exceeded), exceeded.to_string())
}

impl Core {
    pub(super) fn new(
        engine: Box<dyn ModelStore>,
        config: ServerConfig,
        backends: [Option<Arc<dyn ModelBackend>>; 2],
        bounds: Bounds,
    ) -> Self {
        Self {
            engine,
            config,
            started: Instant::now(),
            names: Names::default(),
            models: BTreeMap::new(),
            next_model: 0,
            arenas: BTreeMap::new(),
            conns: Slots::default(),
            gone: Vec::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            tenants: BTreeSet::new(),
            counts: Counts::default(),
            actions: Vec::new(),
            after: Vec::new(),
            backends,
            ledger: Ledger::new(bounds),
        }
    }

    pub(super) fn now(&self) -> Timestamp {
        since(self.started)
    }

    /// A number for a new model of this name.
    pub(super) fn name(
        &mut self,
        name: &str,
        source: Option<Arc<Source>>,
        access: Access,
        owner: u32,
        booked: Vec<Booked>,
    ) -> ModelId {
        while self.models.contains_key(&ModelId::new(self.next_model)) {
            self.next_model = self.next_model.wrapping_add(1);
        }
        let model = ModelId::new(self.next_model);
        self.next_model = self.next_model.wrapping_add(1);
        self.names.insert(owner, name, model);
        self.models.insert(model, Known { name: name.to_owned(), source, access, owner, _booked: booked });
        model
    }

    /// The model that a client means by a name.
    pub(super) fn named(&self, conn: &Conn, name: &str) -> Option<ModelId> {
        let is_operator = |uid| self.ledger.read(|bounds| bounds.is_operator(uid));
        self.names.resolve(conn.uid, name, is_operator, |model| self.engine.may_read(conn.client, model))
    }

    pub(super) fn unname(&mut self, model: ModelId) {
        if let Some(known) = self.models.remove(&model) {
            self.names.remove(known.owner, &known.name);
        }
    }

    /// The limits of a uid. Without a limit of bytes, a tenant may have half of all memory, so that another can have as
    /// much.
    fn limits_of(&self, uid: u32) -> StoreLimits {
        let mut limits = self.config.limits.get(&uid).copied().unwrap_or(self.config.default_limits);
        let operator = self.ledger.read(|bounds| bounds.is_operator(uid));
        if limits.bytes == StoreLimits::default().bytes && !operator {
            let [gpu, host] = MemoryTier::ALL.map(|tier| self.engine.capacity(tier).0);
            limits.bytes = Bytes(gpu.saturating_add(host) / 2);
        }
        limits
    }

    /// Registers a client that has just connected.
    pub(super) fn join(
        &mut self,
        conn: impl FnOnce(ClientId) -> Arc<Conn>,
        uid: u32,
        gid: u32,
    ) -> Result<Arc<Conn>, StoreError> {
        if self.tenants.insert(uid) {
            let limits = self.limits_of(uid);
            self.tell(StoreEvent::TenantLimited { tenant: TenantId::new(uid), limits }, None)?;
        }
        let limit = self.config.store.max_clients;
        let client = self.conns.next(limit).ok_or(StoreError::TooManyClients { limit })?;
        let admin = self.ledger.read(|bounds| bounds.is_operator(uid));
        let (tenant, group) = (TenantId::new(uid), GroupId::new(gid));
        self.tell(StoreEvent::ClientJoined { client, tenant, group, admin }, None)?;
        let conn = conn(client);
        self.conns.insert(conn.clone());
        Ok(conn)
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        let Some(conn) = self.conns.remove(client) else { return };
        // Hang up first, so that no further answer is sent that would need counting.
        conn.hang_up();
        if !conn.settle() {
            self.gone.push(conn);
        }
        self.tickets.retain(|_, open| open.conn.client != client);
        let _ = self.tell(StoreEvent::ClientLeft { client }, None);
    }

    /// Forgets ended connections after their clients have read or dropped all answers.
    pub(super) fn sweep(&mut self) {
        self.gone.retain(|conn| !conn.settle());
    }

    /// Answers a request that the engine refused because the arena is gone or the name is invalid.
    fn misused(&mut self, ticket: TicketId, error: &StoreError) {
        if let Some(open) = self.close(ticket) {
            self.refuse(&open, Code::BadRequest, error.to_string());
        }
    }

    /// Passes a request on to the engine under a new ticket, and refuses it if the engine does.
    pub(super) fn ask(&mut self, open: Open, event: impl FnOnce(TicketId) -> StoreEvent) {
        let ticket = self.ticket(open);
        if let Err(error) = self.tell(event(ticket), None) {
            self.misused(ticket, &error);
        }
    }

    /// Expected time of a load.
    pub(super) fn reload_time(&self, bytes: Bytes) -> Duration {
        Duration::to_move(bytes, self.config.disk_rate.0)
    }

    /// Asks the engine for a model. The caller serves a model in memory at once, after the release of the lock; any other
    /// request gets a ticket.
    pub(super) fn get(
        &mut self,
        conn: &Arc<Conn>,
        request: u32,
        model: ModelId,
        tier: MemoryTier,
        timeout: Duration,
    ) -> Option<Arc<Served>> {
        let (now, client) = (self.now(), conn.client);
        let ticket = TicketId::new(self.next_ticket);
        self.next_ticket += 1;
        self.counts.gets += 1;
        let deadline = now.saturating_add(timeout);
        let mut actions = std::mem::take(&mut self.actions);
        let asked = StoreEvent::Asked { client, ticket, model, tier, deadline };
        let told = self.engine.handle(now, asked, &mut actions);
        let served = match (&told, &actions[..]) {
            (Ok(()), &[StoreAction::Serve { arena, .. }]) => {
                self.arenas.get(&arena).and_then(|held| held.complete.clone())
            }
            _ => None,
        };
        if served.is_some() {
            actions.clear();
            self.actions = actions;
            return served;
        }
        self.open(ticket, Open { conn: conn.clone(), request, kind: Kind::Get });
        let mut events = Events::new();
        for action in actions.drain(..) {
            self.carry_out(action, None, &mut events);
        }
        self.actions = actions;
        self.follow(now, events);
        if let Err(error) = told {
            self.misused(ticket, &error);
        }
        None
    }

    fn ticket(&mut self, open: Open) -> TicketId {
        let ticket = TicketId::new(self.next_ticket);
        self.next_ticket += 1;
        self.open(ticket, open);
        ticket
    }

    fn open(&mut self, ticket: TicketId, open: Open) {
        let waiting = open.conn.waiting.fetch_add(1, Ordering::Relaxed);
        if waiting >= MAX_WAITING {
            open.conn.hang_up();
        }
        self.tickets.insert(ticket, open);
    }

    fn close(&mut self, ticket: TicketId) -> Option<Open> {
        let open = self.tickets.remove(&ticket)?;
        open.conn.waiting.fetch_sub(1, Ordering::Relaxed);
        Some(open)
    }

    /// Passes an event on to the engine, and carries out the quick part of its orders. `why` explains a `LoadFailed`.
    pub(super) fn tell(&mut self, event: StoreEvent, why: Option<&(Code, String)>) -> Result<(), StoreError> {
        let now = self.now();
        let mut events = Events::new();
        let result = self.tell_one(now, event, why, &mut events);
        self.follow(now, events);
        result
    }

    fn follow(&mut self, now: Timestamp, mut events: Events) {
        while let Some((event, why)) = events.pop_front() {
            // The engine caused this event, so it accepts it, unless the arena is gone by now.
            let _ = self.tell_one(now, event, why.as_ref(), &mut events);
        }
    }

    fn tell_one(
        &mut self,
        now: Timestamp,
        event: StoreEvent,
        why: Option<&(Code, String)>,
        events: &mut Events,
    ) -> Result<(), StoreError> {
        if let StoreEvent::Asked { .. } = event {
            self.counts.gets += 1;
        }
        let mut actions = std::mem::take(&mut self.actions);
        let told = self.engine.handle(now, event, &mut actions);
        for action in actions.drain(..) {
            self.carry_out(action, why, events);
        }
        self.actions = actions;
        told
    }

    fn carry_out(&mut self, action: StoreAction, why: Option<&(Code, String)>, events: &mut Events) {
        match action {
            StoreAction::Load { arena, model, tier, from } => {
                match from {
                    LoadFrom::Gpu(_) => self.counts.demotions += 1,
                    _ => self.counts.loads += 1,
                }
                if let Err(why) = self.begin_load(arena, model, tier, from) {
                    events.push_back((StoreEvent::LoadFailed { arena }, Some(why)));
                }
            }
            StoreAction::Write { ticket, arena, tier, .. } => {
                let Some(open) = self.close(ticket) else { return };
                let Kind::PutBegin(layout) = &open.kind else { return };
                let layout = layout.clone();
                let booked = match self.ledger.take(open.conn.uid, Resource::Descriptors, ARENA_DESCRIPTORS) {
                    Ok(booked) => Arc::new(booked),
                    Err(exceeded) => {
                        self.refuse(&open, Code::from(&exceeded), exceeded.to_string());
                        let client = open.conn.client;
                        return events.push_back((StoreEvent::PutAborted { client, arena }, None));
                    }
                };
                let prepared = self
                    .backend(tier)
                    .and_then(|backend| backend.create(layout.arena_bytes))
                    .and_then(|memory| {
                        let (manifest, _) = layout.manifest(&vec![[0; 32]; layout.places.len()]);
                        let file = crate::backend::sealed("gshare-manifest", &manifest)?;
                        let arena = memory.writable()?;
                        Ok((memory, vec![Arc::new(file), arena], manifest.len() as u64))
                    });
                match prepared {
                    Ok((memory, descriptors, manifest_bytes)) => {
                        let answer = Answer::Writable {
                            arena: arena.into(),
                            bytes: layout.arena_bytes,
                            manifest_bytes,
                        };
                        self.arenas.insert(arena, Held { memory, layout, complete: None, _booked: booked });
                        self.send(&open, answer, descriptors);
                    }
                    Err(error) => {
                        self.refuse(&open, Code::Io, error.to_string());
                        events.push_back((StoreEvent::PutAborted { client: open.conn.client, arena }, None));
                    }
                }
            }
            StoreAction::Seal { arena } => {
                if let Some(held) = self.arenas.get(&arena).cloned() {
                    self.after.push(After::Seal { arena, held });
                }
            }
            StoreAction::Serve { ticket, client, arena, model } => {
                let Some(open) = self.close(ticket) else { return };
                if let Kind::PutFile(_) = open.kind {
                    events.push_back((StoreEvent::Released { client, arena }, None));
                    self.stored(&open, arena);
                    return;
                }
                match self.arenas.get(&arena).and_then(|held| held.complete.clone()) {
                    Some(served) => {
                        let (conn, request) = (open.conn, open.request);
                        self.after.push(After::Serve { conn, request, served });
                    }
                    // The engine serves only loaded arenas, so this never happens; no client would hold the arena then.
                    None => {
                        events.push_back((StoreEvent::Released { client, arena }, None));
                        self.refuse(&open, Code::LoadFailed, format!("{model} has no memory"));
                    }
                }
            }
            StoreAction::Stored { ticket, arena, .. } => {
                if let Some(open) = self.close(ticket) {
                    self.stored(&open, arena);
                }
            }
            StoreAction::Done { ticket, .. } => {
                if let Some(open) = self.close(ticket) {
                    self.send(&open, Answer::Done, Vec::new());
                }
            }
            StoreAction::Evict { arena } => {
                self.counts.evictions += 1;
                match self.arenas.remove(&arena) {
                    Some(held) => self.after.push(After::Free { arena, held }),
                    None => events.push_back((StoreEvent::Evicted { arena }, None)),
                }
            }
            StoreAction::Forgotten { model } => self.unname(model),
            StoreAction::Refuse { ticket, reason, .. } => {
                let Some(open) = self.close(ticket) else { return };
                let (code, text) = match why {
                    Some((code, text)) if reason == RefuseReason::LoadFailed => (*code, text.clone()),
                    _ => (Code::from(reason), reason.to_string()),
                };
                self.refuse(&open, code, text);
                if let Kind::PutFile(model) = open.kind {
                    // The put gave the model its name, so the name goes with it.
                    let client = open.conn.client;
                    let ticket = self.ticket(Open { kind: Kind::Silent, ..open });
                    events.push_back((StoreEvent::EvictAsked { client, ticket, model, forget: true }, None));
                }
            }
        }
    }

    fn begin_load(
        &mut self,
        arena: ArenaId,
        model: ModelId,
        tier: MemoryTier,
        from: LoadFrom,
    ) -> Result<(), (Code, String)> {
        let origin = match from {
            LoadFrom::Host(arena) | LoadFrom::Gpu(arena) => self
                .arenas
                .get(&arena)
                .map(|held| Origin::Arena { layout: held.layout.clone(), memory: held.memory.clone() }),
            _ => self.models.get(&model).and_then(|known| known.source.clone()).map(Origin::File),
        };
        let origin =
            origin.ok_or_else(|| (Code::NotResident, "there is nothing to load it from".to_owned()))?;
        let layout = origin.layout().clone();
        let io = |error: io::Error| (Code::Io, error.to_string());
        let backend_of = |tier| self.backend(tier).map_err(io);
        let backend = backend_of(tier)?;
        let out = match from {
            LoadFrom::Gpu(_) => Some(backend_of(MemoryTier::Gpu)?),
            _ => None,
        };
        let owner = self.models.get(&model).map_or(u32::MAX, |known| known.owner);
        let booked = self.ledger.take(owner, Resource::Descriptors, ARENA_DESCRIPTORS).map_err(refusal)?;
        let memory = backend.create(layout.arena_bytes).map_err(io)?;
        let held = Held { memory: memory.clone(), layout, complete: None, _booked: Arc::new(booked) };
        self.arenas.insert(arena, held);
        let told = self.tickets.values().filter(|open| matches!(open.kind, Kind::PutFile(of) if of == model));
        let told = told.map(|open| (open.conn.clone(), open.request)).collect();
        self.after.push(After::Load(Load { arena, backend, memory, origin, out, told }));
        Ok(())
    }

    fn backend(&self, tier: MemoryTier) -> io::Result<Arc<dyn ModelBackend>> {
        self.backends[tier as usize].clone().ok_or_else(|| io::Error::other("the store has no such tier"))
    }

    fn stored(&mut self, open: &Open, arena: ArenaId) {
        let held = self.arenas.get(&arena);
        let Some((bytes, content)) =
            held.and_then(|held| Some((held.layout.arena_bytes, held.complete.as_ref()?.content)))
        else {
            return self.refuse(open, Code::LoadFailed, "it has no memory".into());
        };
        self.send(open, Answer::Stored { content, bytes }, Vec::new());
    }

    fn send(&mut self, open: &Open, answer: Answer, descriptors: Vec<Arc<OwnedFd>>) {
        if !matches!(open.kind, Kind::Silent) {
            let (conn, request) = (open.conn.clone(), open.request);
            self.after.push(After::Send { conn, request, answer, descriptors });
        }
    }

    pub(super) fn refuse(&mut self, open: &Open, code: Code, text: String) {
        self.counts.refusals += 1;
        self.send(open, Answer::Refused { code, text }, Vec::new());
    }
}
