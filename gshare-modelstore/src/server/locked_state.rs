//! The state behind the lock: the engine, the names of its models, and the memory of its arenas.

use super::ServerConfig;
use super::conn::Conn;
use super::names::Names;
use crate::arena_fill::{self, Origin, Source};
use crate::backend::{ArenaMemory, ModelBackend};
use crate::bounds::{Booked, Bound, Bounds, Exceeded, Ledger, Resource, Whose};
use crate::frame::{Answer, Code};
use crate::manifest::Layout;
use crate::status::{self, ArenaStatus, ModelStatus, Status, TierStatus, Use};
use crate::store::{
    Access, ArenaState, ContentHash, LoadFrom, MemoryTier, ModelStore, RefuseReason, StoreAction, StoreError,
    StoreEvent, StoreLimits,
};
use gshare_core::slots::Slots;
use gshare_core::{
    ArenaId, Bytes, ClientId, Duration, Engine as _, GroupId, ModelId, TenantId, TicketId, Timestamp,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fd::OwnedFd;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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

/// Ends all writing to full memory, and adds its manifest.
fn sealed(
    arena: ArenaId,
    memory: &dyn ArenaMemory,
    layout: &Layout,
    hashes: &[[u8; 32]],
) -> io::Result<Served> {
    let (manifest, content) = layout.manifest(hashes);
    let behind = memory.append(&manifest)?;
    memory.seal()?;
    let apart = || crate::backend::sealed("gshare-manifest", &manifest).map(Arc::new);
    let apart = (!behind).then(apart).transpose()?;
    let (handle, file) = memory.export().ok_or_else(|| io::Error::other("it is not sealed"))?;
    let (bytes, manifest_bytes) = (layout.arena_bytes, manifest.len() as u64);
    let mut frame = Vec::new();
    Answer::Served { arena: arena.into(), bytes, manifest_bytes, content, handle }.encode(0, &mut frame);
    let files = apart.into_iter().chain(file).collect();
    Ok(Served { arena, frame, files, manifest_bytes, content })
}

/// Pause between looks at ended connections; an exceeded bound causes an additional look.
const SWEEP_EVERY: std::time::Duration = std::time::Duration::from_millis(200);

/// The core, and the threads that work on it.
#[derive(Debug)]
pub(super) struct Shared {
    core: Mutex<Core>,
    pub(super) ledger: Ledger,
    started: Instant,
    /// Signals that the engine's next deadline may have moved.
    deadline: Condvar,
    stopping: AtomicBool,
    pub(super) threads: usize,
    /// Shortest time between two reports of progress.
    progress_every: std::time::Duration,
}

impl Shared {
    pub(super) fn new(core: Core) -> Self {
        let threads = core.config.threads.max(1);
        let progress_every = std::time::Duration::from_millis(100);
        let (stopping, ledger) = (AtomicBool::new(false), core.ledger.clone());
        let started = core.started;
        Self {
            core: Mutex::new(core),
            ledger,
            started,
            deadline: Condvar::new(),
            stopping,
            threads,
            progress_every,
        }
    }

    pub(super) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(super) fn now(&self) -> Timestamp {
        since(self.started)
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }

    /// Works on the core under the lock, then does the resulting work without it.
    pub(super) fn with<T>(self: &Arc<Self>, work: impl FnOnce(&mut Core) -> T) -> T {
        let mut core = self.lock();
        let before = core.engine.next_deadline();
        let result = work(&mut core);
        if core.engine.next_deadline() != before {
            self.deadline.notify_one();
        }
        let after = std::mem::take(&mut core.after);
        drop(core);
        for after in after {
            match after {
                After::Send { conn, request, answer, descriptors } => {
                    let Answer::Writable { arena, manifest_bytes, .. } = answer else {
                        conn.answer(request, &answer);
                        continue;
                    };
                    if !self.deliver(&conn, request, &answer, &descriptors, manifest_bytes) {
                        self.undo(StoreEvent::PutAborted { client: conn.client, arena: arena.into() });
                    }
                }
                After::Serve { conn, request, served } => self.serve(&conn, request, &served),
                After::Load(load) => self.in_thread(load.arena, move |shared| shared.load(load)),
                After::Free { arena, held } => {
                    drop(held);
                    self.freed(arena);
                }
                After::Seal { arena, held } => self.in_thread(arena, move |shared| shared.seal(arena, held)),
            }
        }
        result
    }

    /// Reverts an action for a client that could not be told.
    fn undo(self: &Arc<Self>, event: StoreEvent) {
        self.with(|core| {
            // The engine refuses this only if the client or the arena is gone.
            let _ = core.tell(event, None);
        });
    }

    /// Answers a get with the prepared answer. Gives the reference back if it cannot be sent.
    pub(super) fn serve(self: &Arc<Self>, conn: &Conn, request: u32, served: &Served) {
        if !self.retried(conn, request, || conn.serve(&self.ledger, request, served)) {
            self.undo(StoreEvent::Released { client: conn.client, arena: served.arena });
        }
    }

    /// Sends an answer with descriptors, which account for memory until it is read. `false` if a bound refused it; the
    /// client then gets the refusal.
    pub(super) fn deliver(
        self: &Arc<Self>,
        conn: &Conn,
        request: u32,
        answer: &Answer,
        descriptors: &[Arc<OwnedFd>],
        memory: u64,
    ) -> bool {
        self.retried(conn, request, || conn.deliver(&self.ledger, request, answer, descriptors, memory))
    }

    /// Sends an answer. If a bound refuses it, tries again after a look at the answers read meanwhile.
    fn retried(&self, conn: &Conn, request: u32, send: impl Fn() -> Result<(), Exceeded>) -> bool {
        let Err(first) = send() else { return true };
        self.settle(conn.uid, &first);
        let Err(exceeded) = send() else { return true };
        self.lock().counts.refusals += 1;
        let (code, text) = refusal(exceeded);
        conn.answer(request, &Answer::Refused { code, text });
        false
    }

    /// Takes resources for a uid, if necessary after a look at the answers read meanwhile.
    pub(super) fn book(&self, uid: u32, resource: Resource, amount: u64) -> Result<Booked, Exceeded> {
        self.ledger.take(uid, resource, amount).or_else(|exceeded| {
            self.settle(uid, &exceeded);
            self.ledger.take(uid, resource, amount)
        })
    }

    /// Looks for answers that were read: by the uid at its bound, or by all uids if their common bound is exceeded.
    fn settle(&self, uid: u32, exceeded: &Exceeded) {
        let all = !matches!(exceeded, Exceeded::Held { whose: Whose::Uid, .. });
        let mut core = self.lock();
        core.sweep();
        let conns: Vec<Arc<Conn>> =
            core.conns.values().filter(|conn| all || conn.uid == uid).cloned().collect();
        drop(core);
        for conn in conns {
            conn.settle();
        }
    }

    fn freed(self: &Arc<Self>, arena: ArenaId) {
        self.with(|core| {
            // The engine expects only this event for the arena.
            let _ = core.tell(StoreEvent::Evicted { arena }, None);
        });
    }

    fn in_thread(self: &Arc<Self>, arena: ArenaId, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let shared = self.clone();
        let started = std::thread::Builder::new().name("store-load".into()).spawn(move || work(&shared));
        if let Err(error) = started {
            self.failed(arena, Code::Io, error.to_string());
        }
    }

    fn failed(self: &Arc<Self>, arena: ArenaId, code: Code, text: String) {
        self.with(|core| {
            core.counts.load_failures += 1;
            // The engine refuses this only if the arena is gone, and then no request waits for it.
            let _ = core.tell(StoreEvent::LoadFailed { arena }, Some(&(code, text)));
        });
    }

    fn load(self: &Arc<Self>, load: Load) {
        let Load { arena, backend, memory, origin, out, told } = load;
        let (total, last) = (origin.layout().tensor_bytes, AtomicU64::new(0));
        let started = Instant::now();
        let progress = |done| {
            let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let due =
                last.load(Ordering::Relaxed) + u64::try_from(self.progress_every.as_millis()).unwrap_or(0);
            let mine = now >= due && last.swap(now, Ordering::Relaxed) < due;
            if mine {
                let answer = Answer::Progress { done, total };
                told.iter().for_each(|(conn, request)| conn.progress(*request, &answer));
            }
        };
        let filled = match (&out, &origin) {
            (Some(gpu), Origin::Arena { layout, memory: from }) => {
                gpu.copy_out(from, layout, &*memory, self.threads)
            }
            _ => backend.fill(&*memory, &origin, self.threads, &progress),
        };
        let layout = origin.layout().clone();
        drop(origin);
        self.filled(arena, memory, &layout, filled);
    }

    /// Completes an arena or gives it up. Drops its own hold first, since the engine may free the memory at once.
    fn filled(
        self: &Arc<Self>,
        arena: ArenaId,
        memory: Arc<dyn ArenaMemory>,
        layout: &Layout,
        hashes: io::Result<Vec<[u8; 32]>>,
    ) {
        let sealed = hashes.and_then(|hashes| sealed(arena, &*memory, layout, &hashes));
        drop(memory);
        match sealed {
            Err(error) => self.failed(arena, Code::Io, error.to_string()),
            Ok(served) => self.with(|core| {
                let content = served.content;
                if let Some(held) = core.arenas.get_mut(&arena) {
                    held.complete = Some(Arc::new(served));
                }
                let _ = core.tell(StoreEvent::Loaded { arena, content }, None);
            }),
        }
    }

    /// Seals an arena that a client wrote: first it ends all writing, then it hashes the content.
    fn seal(self: &Arc<Self>, arena: ArenaId, held: Held) {
        let Held { memory, layout, .. } = held;
        if let Err(error) = memory.seal() {
            drop(memory);
            let (code, text) = match error.kind() {
                io::ErrorKind::ResourceBusy => {
                    (Code::StillMapped, "unmap it before the commit: it is mapped for writing".into())
                }
                _ => (Code::Io, error.to_string()),
            };
            return self.failed(arena, code, text);
        }
        let hashes = arena_fill::hash(&layout, &*memory, self.threads, &|_| {});
        self.filled(arena, memory, &layout, hashes);
    }

    /// Hashes a model again and compares. `None` if the model is not in memory, or the client may not read it.
    pub(super) fn verify(self: &Arc<Self>, conn: &Conn, name: &str) -> Option<io::Result<bool>> {
        let held = {
            let core = self.lock();
            let model = core.named(conn, name)?;
            let arena = MemoryTier::ALL.into_iter().find_map(|tier| core.engine.arena_of(model, tier));
            let readable = core.engine.may_read(conn.client, model);
            arena.filter(|_| readable).and_then(|arena| core.arenas.get(&arena).cloned())?
        };
        let content = held.complete?.content;
        let hashes = arena_fill::hash(&held.layout, &*held.memory, self.threads, &|_| {});
        Some(hashes.map(|hashes| held.layout.manifest(&hashes).1 == content))
    }

    /// Calls the engine at its deadlines until the store stops.
    pub(super) fn run_timer(self: &Arc<Self>) {
        let mut swept = Instant::now();
        while !self.stopping() {
            let mut core = self.lock();
            if swept.elapsed() >= SWEEP_EVERY {
                core.sweep();
                swept = Instant::now();
            }
            let wait = core.engine.next_deadline().map(|at| at.saturating_since(core.now()));
            if wait == Some(Duration::ZERO) {
                drop(core);
                self.with(|core| {
                    let _ = core.tell(StoreEvent::DeadlineReached, None);
                });
                continue;
            }
            // The wait ends when a deadline moves. The bound covers a path that moved one without a notification.
            let nanos = wait.map_or(1_000_000_000, |wait| wait.as_nanos().min(1_000_000_000));
            self.deadline.wait_for(&mut core, std::time::Duration::from_nanos(nanos));
        }
    }

    pub(super) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        let core = self.lock();
        core.conns.values().for_each(|conn| conn.hang_up());
        drop(core);
        self.deadline.notify_one();
    }

    /// Figures of the whole store.
    pub(super) fn stat(&self) -> serde_json::Value {
        let core = self.lock();
        let arenas = core.engine.arenas();
        let tier = |tier: MemoryTier| {
            let here = || arenas.iter().filter(|arena| arena.tier == tier);
            let sum = |of: &dyn Fn(ArenaState) -> bool| -> u64 {
                here().filter(|arena| of(arena.state)).map(|arena| arena.bytes.0).sum()
            };
            json!({
                "capacity_bytes": core.engine.capacity(tier).0,
                "promised_bytes": core.engine.promised(tier).0,
                "committed_bytes": sum(&|state| state == ArenaState::Committed),
                "arenas": here().count(),
                "references": here().map(|arena| arena.references).sum::<u64>(),
            })
        };
        let mut host = tier(MemoryTier::Host);
        let pinned = core.arenas.values().filter_map(|held| held.memory.pinned());
        host["pinned_bytes"] = json!(pinned.map(<[u8]>::len).sum::<usize>());
        let counts = &core.counts;
        json!({
            "clients": core.conns.len(),
            "models": core.models.len(),
            "gpu": tier(MemoryTier::Gpu),
            "host": host,
            "gets": counts.gets, "loads": counts.loads, "demotions": counts.demotions, "load_failures": counts.load_failures,
            "evictions": counts.evictions, "refusals": counts.refusals,
            "pid": std::process::id(),
        })
    }

    /// Arenas, models and clients, as far as the client may see them.
    pub(super) fn status(&self, conn: &Conn) -> Status {
        let core = self.lock();
        let arenas = core.engine.arenas();
        let tiers = MemoryTier::ALL.map(|tier| {
            let here =
                || arenas.iter().filter(|arena| arena.tier == tier && arena.state != ArenaState::Empty);
            let leaving = here().filter(|arena| arena.state == ArenaState::Evicting);
            let complete = here().filter_map(|arena| core.arenas.get(&arena.arena)?.complete.as_ref());
            TierStatus {
                tier,
                capacity_bytes: core.engine.capacity(tier).0,
                arena_bytes: core.engine.physical(tier).0,
                leaving_bytes: leaving.map(|arena| arena.bytes.0).sum(),
                manifest_bytes: complete.map(|served| served.manifest_bytes).sum(),
                arenas: here().count() as u64,
            }
        });
        let arena = |model, tier| {
            let view = core.engine.arena(core.engine.arena_of(model, tier)?)?;
            let bytes = if view.state == ArenaState::Empty { 0 } else { view.bytes.0 };
            Some(ArenaStatus { tier, arena: view.arena, bytes, references: view.references })
        };
        let mut readable = core.names.iter().filter(|&(.., model)| core.engine.may_read(conn.client, model));
        let models = (readable.by_ref().take(status::MAX_MODELS))
            .map(|(name, owner_uid, model)| ModelStatus {
                name: name.to_owned(),
                owner_uid,
                access: core.models.get(&model).map(|known| known.access).unwrap_or_default(),
                arenas: MemoryTier::ALL.into_iter().filter_map(|tier| arena(model, tier)).collect(),
            })
            .collect();
        let models_left_out = readable.count() as u64;
        let uses = core.ledger.read(|bounds| {
            let seen = bounds.uids().filter(|&uid| uid == conn.uid || bounds.is_operator(conn.uid));
            let of = |uid, resource: Resource| {
                let (held, Bound { total, per_uid }) =
                    (bounds.held(uid, resource), bounds.limits().of(resource));
                Use { uid, resource: resource.name().to_owned(), held, per_uid, total }
            };
            let each = seen.flat_map(|uid| Resource::ALL.map(|resource| of(uid, resource)));
            each.take(status::MAX_USES).collect()
        });
        Status { clients: core.conns.len() as u64, tiers: tiers.to_vec(), models, models_left_out, uses }
    }

    /// The models that a client may read.
    pub(super) fn list(&self, client: ClientId) -> serde_json::Value {
        let core = self.lock();
        let mut models = Vec::new();
        for (name, _, model) in core.names.iter().filter(|&(.., model)| core.engine.may_read(client, model)) {
            let Some(known) = core.models.get(&model) else { continue };
            let mut tiers = serde_json::Map::new();
            let mut layout =
                known.source.as_ref().map(|source| (source.layout.arena_bytes, source.layout.places.len()));
            for (tier, label) in [(MemoryTier::Gpu, "gpu"), (MemoryTier::Host, "host")] {
                let Some(arena) = core.engine.arena_of(model, tier) else { continue };
                let Some(view) = core.engine.arena(arena) else { continue };
                if let Some(held) = core.arenas.get(&arena) {
                    layout = Some((held.layout.arena_bytes, held.layout.places.len()));
                }
                let state = match view.state {
                    ArenaState::Empty => "empty",
                    ArenaState::Loading => "loading",
                    ArenaState::Committed => "committed",
                    _ => "evicting",
                };
                let shared = view.names;
                tiers.insert(
                    label.into(),
                    json!({"state": state, "references": view.references, "names": shared}),
                );
            }
            models.push(json!({
                "name": name,
                "owner_uid": known.owner,
                "access": known.access,
                "bytes": layout.map(|(bytes, _)| bytes),
                "tensors": layout.map(|(_, tensors)| tensors),
                "content": core.engine.content_of(model).map(|content| content.to_string()),
                "source": known.source.is_some(),
                "tiers": tiers,
            }));
        }
        json!({ "models": models })
    }
}
