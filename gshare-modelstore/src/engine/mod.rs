//! The store's decisions: the models in memory, the clients that may map them, and the victims of eviction.
//!
//! # Problem
//! Clients of several tenants ask for models by name. Each must be loaded once for any number of clients, stay while a
//! client holds it, keep within its owner's limits, and leave when a model of more value needs its place. Sizes are bytes,
//! times nanoseconds, shares basis points.
//!
//! # Terms
//! The terms of [`crate::store`], and:
//! - **promised**: bytes of all arenas except evicting ones; decisions use this sum;
//! - **physical**: bytes of all arenas with memory; never more than the tier;
//! - **value** of an arena: `sum over its models (rate x reload time) / bytes`, where the rate of a model is the number of
//!   requests for it, halved at every multiple of the half-life;
//! - **replaceable**: each model of the arena can be loaded again, from its source or (on a GPU) from host memory.
//!
//! # Algorithm
//! *Asked.* If the model is in the tier, it is served; if it is being loaded, the request waits. If the tier has its
//! content under another name, that arena gets the new name as well. Otherwise the model is loaded: from host memory if the
//! tier is the GPU and host memory has it, else from disk. Later requests wait for the same load.
//!
//! *Room.* For `b` more bytes: first, unreferenced arenas of the owner are evicted until its limits hold. Then, if the
//! promised bytes with `b` exceed the high watermark, arenas of least value are evicted until it is at most the low
//! watermark, or none is left to evict. If it still exceeds the tier, the request is refused and nothing is evicted. An
//! arena can be evicted if it is committed, unreferenced, not pinned, not the source of a copy, and replaceable. Arenas
//! start in the order of their promises, each as soon as its bytes are physically free.
//!
//! *Demotion.* If host memory has none of the models of an arena that must leave the GPU, the arena is first copied there.
//! The copy needs room below the host tier's high watermark, without an eviction, and within the owner's limits. The arena
//! counts as evicting from then on, and its memory is free after the copy, even a failed one. Its charge moves with it.
//!
//! *Loaded.* If the tier already has an arena with the same content, the new arena is evicted and its models move to the
//! old arena. So the same content under two names is stored once, charged to the first tenant.
//!
//! Example: a tier of 16 GiB, watermarks 95 % and 85 %. A (6 GiB, 10 requests, 2 s) is worth 3.3 per GiB, B (6 GiB, 4
//! requests, 6 s) 4.0. C of 6 GiB is asked for: 18 GiB would be more than 15.2. A is evicted (12 GiB <= 13.6), and C is
//! loaded once A's memory is free. Had clients held A and B, C would be refused.
//!
//! # Invariants
//! - physical <= tier, promised <= tier, and both equal the sums over their arenas;
//! - a tenant's bytes and models are the sums over the arenas charged to it;
//! - references by client and by arena agree; an uncommitted arena has none;
//! - a name has at most one arena per tier, a content at most one committed arena per tier;
//! - a writer belongs to an uncommitted arena.
//!
//! # Cost
//! A served request: O(log n). A request that needs room: O(a log a) in the arenas of the store. Memory: O(models,
//! arenas and references).
//!
//! # Differences
//! FaST-GShare (section 3.5) stores single tensors, without eviction, limits or access; here the unit is a model, and a
//! tensor by itself is a model of one tensor. The module is in this crate because the server is its user and
//! gshare-modelstore depends on gshare-core alone; it is as pure as the engines of gshare-sched.

#![forbid(unsafe_code)]

mod books;
mod room;

use crate::store::{
    Access, ArenaState, ArenaView, ContentHash, LoadFrom, MemoryTier, ModelStore, RefuseReason, StoreAction,
    StoreError, StoreEvent, StoreLimits,
};
use books::{Arena, Due, Model, Origin, State, Ticket, Wants};
use gshare_core::{
    ArenaId, BasisPoints, Bytes, ClientId, ConfigError, Duration, Engine, ModelId, TenantId, TicketId,
    TimeWentBack, Timestamp,
};

gshare_core::config! {
    /// Bounds on the memory of a store, and thresholds for eviction.
    #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct StoreConfig {
        /// Memory for models on the GPU. Default 0: no such tier.
        #[serde(rename = "gpu_bytes")]
        pub gpu: Bytes = Bytes::ZERO, with_gpu;
        /// Memory for models in host memory. Default 4 GiB.
        #[serde(rename = "host_bytes")]
        pub host: Bytes = Bytes::from_gib(4), with_host;
        /// Share of a tier above which room is made. Default 95 %: one more small model fits without an eviction.
        #[serde(rename = "high_bp")]
        pub high: BasisPoints = BasisPoints::percent(95), with_high;
        /// Share of a tier down to which room is made. Default 85 %: one eviction serves several loads.
        #[serde(rename = "low_bp")]
        pub low: BasisPoints = BasisPoints::percent(85), with_low;
        /// Time after which a request counts half. Default 10 min, in the order of a platform's keep-alive times.
        #[serde(rename = "half_life_ns")]
        pub half_life: Duration = Duration::from_secs(600), with_half_life;
        /// Bytes per second from host memory to the GPU, to compare reload times. Default 10 GB: half of PCIe 4.0 x16.
        #[serde(rename = "host_to_gpu_bytes_per_s")]
        pub host_to_gpu: Bytes = Bytes(10_000_000_000), with_host_to_gpu;
        /// Whether models that leave the GPU are copied to host memory, if there is room without another eviction. Default
        /// yes: a reload from there is faster than from disk.
        pub demote: bool = true, with_demote;
        /// Time limit of a writer, including its wait for room. Default 10 min.
        #[serde(rename = "write_timeout_ns")]
        pub write_timeout: Duration = Duration::from_secs(600), with_write_timeout;
        /// Most clients at once. Default 4,096.
        pub max_clients: u32 = 4_096, with_max_clients;
        /// Most models known at once. Default 65,536.
        pub max_models: u32 = 65_536, with_max_models;
    }
}

/// Largest model and largest tier: products of value and size fit 128 bits.
pub(crate) const MAX_BYTES: Bytes = Bytes(1 << 48);

/// The policy of this crate: see the [module](self).
#[derive(Debug)]
pub struct Store {
    config: StoreConfig,
    state: State,
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// A field that is out of its bounds.
    pub fn new(config: StoreConfig) -> Result<Self, ConfigError> {
        gshare_core::check_fields!(config {
            gpu, host in ..=MAX_BYTES, "need at most 256 TiB";
            low in ..=config.high, "need at most `high`";
            half_life, write_timeout in Duration::from_nanos(1).., "need more than 0";
            host_to_gpu in Bytes(1_000).., "need at least 1 kB per second";
            max_clients, max_models in 1.., "need at least 1";
        })?;
        Ok(Self { config, state: State::default() })
    }

    /// The configuration.
    pub const fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// The checks that do not depend on the effects of deadlines before `now`.
    fn check(&self, now: Timestamp, event: &StoreEvent) -> Result<(), StoreError> {
        TimeWentBack::check(now, self.state.now)?;
        let state = &self.state;
        let client_is_here = |client: ClientId| match state.clients.contains_key(&client) {
            true => Ok(()),
            false => Err(StoreError::UnknownClient { client }),
        };
        let ticket_is_free = |ticket: TicketId| match state.tickets.get(&ticket) {
            Some(old) if old.due.is_none_or(|due| due > now) => Err(StoreError::DuplicateTicket { ticket }),
            _ => Ok(()),
        };
        let size = |model, bytes: Bytes| match bytes == Bytes::ZERO || bytes > MAX_BYTES {
            true => Err(StoreError::BadBytes { model, bytes }),
            false => Ok(()),
        };
        let writes = |client: ClientId, arena: ArenaId| match state.arenas.get(arena) {
            None => Err(StoreError::WrongState { arena, expected: "being written" }),
            Some(found) => match &found.origin {
                Origin::Written { by, due: Some(due) } if *by == Some(client) => {
                    if *due <= now || found.state != ArenaState::Loading {
                        return Err(StoreError::WrongState { arena, expected: "being written" });
                    }
                    Ok(())
                }
                _ => Err(StoreError::NotHeld { client, arena }),
            },
        };
        match *event {
            StoreEvent::ClientJoined { client, .. } => {
                if state.clients.contains_key(&client) {
                    return Err(StoreError::ClientExists { client });
                }
                if state.clients.len() >= self.config.max_clients as usize {
                    return Err(StoreError::TooManyClients { limit: self.config.max_clients });
                }
                Ok(())
            }
            StoreEvent::ClientLeft { client } => client_is_here(client),
            StoreEvent::TenantLimited { tenant, limits } if limits.load_burst == 0 => {
                Err(StoreError::BadLimits { tenant })
            }
            StoreEvent::ModelAdded { model, bytes, .. } => {
                if state.models.contains_key(&model) {
                    return Err(StoreError::ModelExists { model });
                }
                if state.models.len() >= self.config.max_models as usize {
                    return Err(StoreError::TooManyModels { limit: self.config.max_models });
                }
                size(model, bytes)
            }
            StoreEvent::PutBegun { client, ticket, model, bytes, .. } => {
                client_is_here(client)?;
                ticket_is_free(ticket)?;
                size(model, bytes)
            }
            StoreEvent::PutCommitted { client, ticket, arena } => {
                client_is_here(client)?;
                ticket_is_free(ticket)?;
                writes(client, arena)
            }
            StoreEvent::PutAborted { client, arena } => {
                client_is_here(client)?;
                writes(client, arena)
            }
            StoreEvent::Asked { client, ticket, .. }
            | StoreEvent::PinAsked { client, ticket, .. }
            | StoreEvent::EvictAsked { client, ticket, .. } => {
                client_is_here(client)?;
                ticket_is_free(ticket)
            }
            StoreEvent::Released { client, arena } => match state.clients.get(&client) {
                None => Err(StoreError::UnknownClient { client }),
                Some(found) if !found.refs.contains_key(&arena) => Err(StoreError::NotHeld { client, arena }),
                Some(_) => Ok(()),
            },
            StoreEvent::Loaded { arena, .. } | StoreEvent::LoadFailed { arena } => {
                match state.arenas.get(arena) {
                    Some(found) if found.state == ArenaState::Loading && !found.is_being_written() => Ok(()),
                    _ => Err(StoreError::WrongState { arena, expected: "being loaded or sealed" }),
                }
            }
            StoreEvent::Evicted { arena } => match state.arenas.get(arena) {
                Some(found) if found.state == ArenaState::Evicting => Ok(()),
                _ => Err(StoreError::WrongState { arena, expected: "being evicted" }),
            },
            _ => Ok(()),
        }
    }

    fn asked(&mut self, ask: Ask, actions: &mut Vec<StoreAction>) {
        let Ask { now, client, ticket, model, tier, deadline } = ask;
        let refuse = |reason| StoreAction::Refuse { ticket, client, reason };
        let half_life = self.config.half_life;
        if !self.state.models.contains_key(&model) {
            return actions.push(refuse(RefuseReason::UnknownModel));
        }
        if !self.may_read(client, model) {
            return actions.push(refuse(RefuseReason::NotAllowed));
        }
        let Some(found) = self.state.models.get_mut(&model) else { return };
        found.use_once(now, half_life);
        let (bytes, owner, content, source) = (found.bytes, found.owner, found.content, found.source);
        let there = found.arenas[tier as usize].or_else(|| {
            let shared = *self.state.by_content.get(&(content?, tier))?;
            self.state.link(model, shared);
            Some(shared)
        });
        let waiting = Ticket { client, wants: Wants::Reference(model), arena: None, due: Some(deadline) };
        if let Some(arena) = there {
            if self.state.arenas.get(arena).is_some_and(|arena| arena.state == ArenaState::Committed) {
                self.state.serve(ticket, client, arena, model, actions);
            } else if deadline <= now {
                actions.push(refuse(RefuseReason::TimedOut));
            } else {
                self.state.wait(ticket, waiting, arena);
            }
            return;
        }
        let host = match tier {
            MemoryTier::Gpu => self.state.committed(model, MemoryTier::Host),
            _ => None,
        };
        let from = match (host, source) {
            (Some(arena), _) => LoadFrom::Host(arena),
            (None, Some(_)) => LoadFrom::Disk,
            (None, None) => return actions.push(refuse(RefuseReason::NotResident)),
        };
        if deadline <= now {
            return actions.push(refuse(RefuseReason::TimedOut));
        }
        let tenant = self.state.tenant_of(client);
        match self.room(now, tier, bytes, owner, tenant, host) {
            Err(reason) => actions.push(refuse(reason)),
            Ok(victims) => {
                self.state.charge_load(now, tenant);
                let coming = Some((owner, bytes));
                victims.into_iter().for_each(|victim| self.make_go(victim, tier, coming, actions));
                let arena = self.state.promise(&[model], tier, bytes, owner, Origin::Loaded { from });
                self.state.wait(ticket, waiting, arena);
                self.start(tier, actions);
            }
        }
    }

    fn put(&mut self, put: Put, actions: &mut Vec<StoreAction>) {
        let Put { now, client, ticket, model, tier, bytes, access } = put;
        let refuse = |reason| StoreAction::Refuse { ticket, client, reason };
        if self.state.models.contains_key(&model) {
            return actions.push(refuse(RefuseReason::NameTaken));
        }
        if self.state.models.len() >= self.config.max_models as usize {
            return actions.push(refuse(RefuseReason::TooManyModels));
        }
        let tenant = self.state.tenant_of(client);
        let victims = match self.room(now, tier, bytes, tenant, tenant, None) {
            Err(reason) => return actions.push(refuse(reason)),
            Ok(victims) => victims,
        };
        self.state.charge_load(now, tenant);
        let coming = Some((tenant, bytes));
        victims.into_iter().for_each(|victim| self.make_go(victim, tier, coming, actions));
        let group = self.state.clients.get(&client).map(|found| found.group);
        let mut new =
            Model::new(tenant, group.unwrap_or(gshare_core::GroupId::new(u32::MAX)), access, bytes, None);
        new.use_once(now, self.config.half_life);
        self.state.models.insert(model, new);
        let due = now.saturating_add(self.config.write_timeout);
        let origin = Origin::Written { by: Some(client), due: Some(due) };
        let arena = self.state.promise(&[model], tier, bytes, tenant, origin);
        self.state.deadlines.insert((due, Due::Write(arena)));
        let begun = Ticket { client, wants: Wants::Write, arena: None, due: None };
        self.state.wait(ticket, begun, arena);
        if let Some(found) = self.state.clients.get_mut(&client) {
            found.writes.insert(arena);
        }
        self.start(tier, actions);
    }

    fn commit(&mut self, client: ClientId, ticket: TicketId, arena: ArenaId, actions: &mut Vec<StoreAction>) {
        self.state.end_of_write(client, arena);
        let Some(found) = self.state.arenas.get_mut(arena) else { return };
        found.origin = Origin::Written { by: Some(client), due: None };
        let sealing = Ticket { client, wants: Wants::Commit, arena: None, due: None };
        self.state.wait(ticket, sealing, arena);
        actions.push(StoreAction::Seal { arena });
    }

    fn loaded(&mut self, arena: ArenaId, content: ContentHash, actions: &mut Vec<StoreAction>) {
        let Some(found) = self.state.arenas.get_mut(arena) else { return };
        let (tier, waiting) = (found.tier, core::mem::take(&mut found.waiting));
        let names: Vec<ModelId> = found.names.iter().copied().collect();
        self.state.release_source(arena, actions);
        for &model in &names {
            if let Some(model) = self.state.models.get_mut(&model) {
                model.content = Some(content);
            }
        }
        let place = match self.state.by_content.get(&(content, tier)) {
            Some(&same) => {
                // The names move first, so that each always has an arena.
                names.iter().for_each(|&model| self.state.link(model, same));
                self.state.retire(arena, actions);
                same
            }
            None => {
                self.state.by_content.insert((content, tier), arena);
                if let Some(found) = self.state.arenas.get_mut(arena) {
                    (found.state, found.content) = (ArenaState::Committed, Some(content));
                }
                arena
            }
        };
        for ticket in waiting {
            let Some(Ticket { client, wants, .. }) = self.state.close(ticket) else { continue };
            match wants {
                Wants::Reference(model) => self.state.serve(ticket, client, place, model, actions),
                Wants::Commit | Wants::Write => {
                    let Some(&model) = names.first() else { continue };
                    actions.push(StoreAction::Stored { ticket, client, arena: place, model });
                }
            }
        }
        self.trim(tier, actions);
        self.start(tier, actions);
    }

    /// Gives up an uncommitted arena, and refuses all tickets that wait for it.
    fn give_up(&mut self, arena: ArenaId, reason: RefuseReason, actions: &mut Vec<StoreAction>) {
        if let Some(tier) = self.abandon(arena, reason, actions) {
            self.start(tier, actions);
        }
    }

    /// As [`Self::give_up`], but starts no other arena. Returns the arena's tier.
    fn abandon(
        &mut self,
        arena: ArenaId,
        reason: RefuseReason,
        actions: &mut Vec<StoreAction>,
    ) -> Option<MemoryTier> {
        let found = self.state.arenas.get_mut(arena)?;
        let tier = found.tier;
        for ticket in core::mem::take(&mut found.waiting) {
            if let Some(Ticket { client, .. }) = self.state.close(ticket) {
                actions.push(StoreAction::Refuse { ticket, client, reason });
            }
        }
        self.state.retire(arena, actions);
        Some(tier)
    }

    fn evict_asked(
        &mut self,
        client: ClientId,
        model: ModelId,
        forget: bool,
        actions: &mut Vec<StoreAction>,
    ) -> Option<RefuseReason> {
        let Some(found) = self.state.models.get(&model) else { return Some(RefuseReason::UnknownModel) };
        if !self.state.rules(client, found) {
            return Some(RefuseReason::NotAllowed);
        }
        let arenas: Vec<ArenaId> = found.arenas.iter().flatten().copied().collect();
        let busy = |arena: &Arena| {
            arena.state != ArenaState::Committed || (arena.names.len() == 1 && arena.is_held())
        };
        let is_busy = |&arena| self.state.arenas.get(arena).is_some_and(busy);
        if found.pinned || arenas.iter().any(is_busy) {
            return Some(RefuseReason::InUse);
        }
        if forget && let Some(found) = self.state.models.get_mut(&model) {
            found.source = None;
        }
        for arena in arenas {
            if self.state.arenas.get(arena).is_some_and(|arena| arena.names.len() == 1) {
                self.state.retire(arena, actions);
            } else {
                self.state.unlink(model, arena, actions);
            }
        }
        self.state.forget(model, actions);
        None
    }

    fn pin_asked(&mut self, client: ClientId, model: ModelId, pinned: bool) -> Option<RefuseReason> {
        let Some(found) = self.state.models.get(&model) else { return Some(RefuseReason::UnknownModel) };
        if !self.state.rules(client, found) {
            return Some(RefuseReason::NotAllowed);
        }
        if let Some(found) = self.state.models.get_mut(&model) {
            found.pinned = pinned;
        }
        None
    }

    fn left(&mut self, client: ClientId, actions: &mut Vec<StoreAction>) {
        let Some(found) = self.state.clients.remove(&client) else { return };
        for (arena, count) in found.refs {
            if let Some(arena) = self.state.arenas.get_mut(arena) {
                arena.references -= count;
            }
        }
        for ticket in found.tickets {
            if let Some(Ticket { arena: Some(arena), .. }) = self.state.close(ticket)
                && let Some(arena) = self.state.arenas.get_mut(arena)
            {
                arena.waiting.retain(|&waiting| waiting != ticket);
            }
        }
        for arena in found.writes {
            // Readers may wait for a model that will not be written, so refuse them. None of its writes may start
            // meanwhile.
            self.abandon(arena, RefuseReason::LoadFailed, actions);
        }
        for tier in MemoryTier::ALL {
            self.trim(tier, actions);
            self.start(tier, actions);
        }
    }

    /// Handles the deadlines up to `now`.
    fn run_deadlines(&mut self, now: Timestamp, actions: &mut Vec<StoreAction>) {
        while let Some(&(at, due)) = self.state.deadlines.first()
            && at <= now
        {
            self.state.deadlines.pop_first();
            match due {
                Due::Ticket(ticket) => {
                    let Some(Ticket { client, arena, .. }) = self.state.close(ticket) else { continue };
                    if let Some(arena) = arena.and_then(|arena| self.state.arenas.get_mut(arena)) {
                        arena.waiting.retain(|&waiting| waiting != ticket);
                    }
                    actions.push(StoreAction::Refuse { ticket, client, reason: RefuseReason::TimedOut });
                }
                Due::Write(arena) => self.give_up(arena, RefuseReason::TimedOut, actions),
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Ask {
    now: Timestamp,
    client: ClientId,
    ticket: TicketId,
    model: ModelId,
    tier: MemoryTier,
    deadline: Timestamp,
}

#[derive(Clone, Copy)]
struct Put {
    now: Timestamp,
    client: ClientId,
    ticket: TicketId,
    model: ModelId,
    tier: MemoryTier,
    bytes: Bytes,
    access: Access,
}

impl Engine for Store {
    type Event = StoreEvent;
    type Action = StoreAction;
    type Error = StoreError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: StoreEvent,
        actions: &mut Vec<StoreAction>,
    ) -> Result<(), StoreError> {
        self.check(now, &event)?;
        self.state.now = now;
        self.run_deadlines(now, actions);
        match event {
            StoreEvent::ClientJoined { client, tenant, group, admin } => {
                self.state.join(client, tenant, group, admin);
            }
            StoreEvent::ClientLeft { client } => self.left(client, actions),
            StoreEvent::TenantLimited { tenant, limits } => self.state.tenant(tenant).limits = limits,
            StoreEvent::ModelAdded { model, owner, group, access, bytes, reload } => {
                self.state.models.insert(model, Model::new(owner, group, access, bytes, Some(reload)));
            }
            StoreEvent::Asked { client, ticket, model, tier, deadline } => {
                self.asked(Ask { now, client, ticket, model, tier, deadline }, actions);
            }
            StoreEvent::PutBegun { client, ticket, model, tier, bytes, access } => {
                self.put(Put { now, client, ticket, model, tier, bytes, access }, actions);
            }
            StoreEvent::PutCommitted { client, ticket, arena } => self.commit(client, ticket, arena, actions),
            StoreEvent::PutAborted { client, arena } => {
                self.state.end_of_write(client, arena);
                self.give_up(arena, RefuseReason::LoadFailed, actions);
            }
            StoreEvent::Loaded { arena, content } => self.loaded(arena, content, actions),
            StoreEvent::LoadFailed { arena } => self.give_up(arena, RefuseReason::LoadFailed, actions),
            StoreEvent::Released { client, arena } => {
                if let Some(tier) = self.state.release(client, arena) {
                    self.trim(tier, actions);
                    self.start(tier, actions);
                }
            }
            StoreEvent::PinAsked { client, ticket, model, pinned } => {
                let refused = self.pin_asked(client, model, pinned);
                actions.push(answer(client, ticket, refused));
                MemoryTier::ALL.into_iter().for_each(|tier| self.trim(tier, actions));
            }
            StoreEvent::EvictAsked { client, ticket, model, forget } => {
                let refused = self.evict_asked(client, model, forget, actions);
                actions.push(answer(client, ticket, refused));
            }
            StoreEvent::Evicted { arena } => {
                if let Some(tier) = self.state.freed(arena) {
                    self.start(tier, actions);
                }
            }
            _ => {}
        }
        if cfg!(debug_assertions) {
            self.invariants();
        }
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.state.deadlines.first().map(|&(at, _)| at)
    }
}

fn answer(client: ClientId, ticket: TicketId, refused: Option<RefuseReason>) -> StoreAction {
    match refused {
        None => StoreAction::Done { ticket, client },
        Some(reason) => StoreAction::Refuse { ticket, client, reason },
    }
}

impl ModelStore for Store {
    fn arena_of(&self, model: ModelId, tier: MemoryTier) -> Option<ArenaId> {
        self.state.models.get(&model)?.arenas[tier as usize]
    }

    fn arena(&self, arena: ArenaId) -> Option<ArenaView> {
        self.state.arenas.get(arena).map(|found| found.view(arena))
    }

    fn arenas(&self) -> Vec<ArenaView> {
        self.state.arenas.iter().map(|(arena, found)| found.view(arena)).collect()
    }

    fn may_read(&self, client: ClientId, model: ModelId) -> bool {
        let (Some(reader), Some(model)) = (self.state.clients.get(&client), self.state.models.get(&model))
        else {
            return false;
        };
        reader.admin
            || reader.tenant == model.owner
            || match model.access {
                Access::Public => true,
                Access::Group => reader.group == model.group,
                Access::Private => false,
            }
    }

    fn capacity(&self, tier: MemoryTier) -> Bytes {
        match tier {
            MemoryTier::Gpu => self.config.gpu,
            MemoryTier::Host => self.config.host,
        }
    }

    fn knows(&self, model: ModelId) -> bool {
        self.state.models.contains_key(&model)
    }

    fn content_of(&self, model: ModelId) -> Option<ContentHash> {
        self.state.models.get(&model)?.content
    }

    fn promised(&self, tier: MemoryTier) -> Bytes {
        Bytes(self.state.tiers[tier as usize].promised)
    }

    fn physical(&self, tier: MemoryTier) -> Bytes {
        Bytes(self.state.tiers[tier as usize].physical)
    }
}

impl Store {
    /// The limits of an owner, for reports.
    pub fn limits_of(&self, tenant: TenantId) -> StoreLimits {
        self.state.tenants.get(&tenant).map(|found| found.limits).unwrap_or_default()
    }
}
