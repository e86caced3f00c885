//! The store's rules, word by word: lists that are searched and sums that are added up again for each event.
//!
//! Nothing is indexed and nothing is cached, so that it is slow and easy to compare with the essay of the engine.
#![allow(
    unreachable_pub,
    clippy::cast_possible_truncation,
    reason = "shared by a test and a fuzz target; small numbers"
)]

use gshare_core::{ArenaId, Bytes, ClientId, Engine, GroupId, ModelId, TenantId, TicketId, Timestamp};
use gshare_modelstore::engine::StoreConfig;
use gshare_modelstore::store::{
    Access, ArenaState, ArenaView, ContentHash, LoadFrom, MemoryTier, ModelStore, RefuseReason, StoreAction,
    StoreError, StoreEvent, StoreLimits,
};
use std::cmp::Ordering;

#[derive(Debug, Clone)]
struct Model {
    name: ModelId,
    owner: TenantId,
    group: GroupId,
    access: Access,
    bytes: u64,
    reload_ns: Option<u64>,
    content: Option<ContentHash>,
    pinned: bool,
    uses: Vec<Timestamp>,
}

#[derive(Debug, Clone)]
struct Arena {
    name: ArenaId,
    tier: MemoryTier,
    bytes: u64,
    state: ArenaState,
    names: Vec<ModelId>,
    from: Option<LoadFrom>,
    /// The writer, and until when it may write.
    writer: Option<(ClientId, Timestamp)>,
    content: Option<ContentHash>,
    charged: TenantId,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Wants {
    Reference(ModelId),
    Write,
    Commit,
}

#[derive(Debug, Clone)]
struct Ticket {
    name: TicketId,
    client: ClientId,
    wants: Wants,
    arena: ArenaId,
    due: Option<Timestamp>,
}

#[derive(Debug, Default)]
pub struct Literal {
    config: StoreConfig,
    now: Timestamp,
    clients: Vec<(ClientId, TenantId, GroupId, bool)>,
    limits: Vec<(TenantId, StoreLimits)>,
    next_load: Vec<(TenantId, Timestamp)>,
    models: Vec<Model>,
    /// In the order in which they were promised memory.
    arenas: Vec<Arena>,
    /// One entry per reference.
    references: Vec<(ClientId, ArenaId)>,
    /// In the order in which they came.
    tickets: Vec<Ticket>,
    /// How often each slot was used.
    slots: Vec<u32>,
}

impl Literal {
    pub fn new(config: StoreConfig) -> Self {
        Self { config, ..Self::default() }
    }

    fn model(&self, name: ModelId) -> Option<&Model> {
        self.models.iter().find(|model| model.name == name)
    }

    fn find(&self, name: ArenaId) -> Option<&Arena> {
        self.arenas.iter().find(|arena| arena.name == name)
    }

    fn find_mut(&mut self, name: ArenaId) -> &mut Arena {
        self.arenas.iter_mut().find(|arena| arena.name == name).unwrap()
    }

    fn in_tier(&self, model: ModelId, tier: MemoryTier) -> Option<&Arena> {
        self.arenas.iter().find(|arena| arena.tier == tier && arena.names.contains(&model))
    }

    fn client(&self, name: ClientId) -> Option<(TenantId, GroupId, bool)> {
        self.clients
            .iter()
            .find(|client| client.0 == name)
            .map(|&(_, tenant, group, admin)| (tenant, group, admin))
    }

    fn limits(&self, tenant: TenantId) -> StoreLimits {
        self.limits
            .iter()
            .rev()
            .find(|(whose, _)| *whose == tenant)
            .map(|(_, limits)| *limits)
            .unwrap_or_default()
    }

    fn next_load(&self, tenant: TenantId) -> Timestamp {
        let last = self.next_load.iter().rev().find(|(whose, _)| *whose == tenant);
        last.map_or(Timestamp::ZERO, |&(_, at)| at)
    }

    fn promised(&self, tier: MemoryTier) -> u64 {
        let here =
            self.arenas.iter().filter(|arena| arena.tier == tier && arena.state != ArenaState::Evicting);
        here.map(|arena| arena.bytes).sum()
    }

    fn physical(&self, tier: MemoryTier) -> u64 {
        let here = self.arenas.iter().filter(|arena| arena.tier == tier && arena.state != ArenaState::Empty);
        here.map(|arena| arena.bytes).sum()
    }

    /// The number of uses, halved at each multiple of the half-life.
    fn rate(&self, model: &Model, now: Timestamp) -> u64 {
        let epoch = |at: Timestamp| at.as_nanos() / self.config.half_life.as_nanos();
        let (mut rate, mut at) = (0u64, 0);
        for &used in &model.uses {
            while at < epoch(used) && rate > 0 {
                rate /= 2;
                at += 1;
            }
            at = epoch(used);
            rate = (rate + 65_536).min(1 << 40);
        }
        while at < epoch(now) && rate > 0 {
            rate /= 2;
            at += 1;
        }
        rate
    }

    /// Whether the arena may go, and then the product of rate and reload time, summed over its models.
    fn worth(&self, arena: &Arena, now: Timestamp) -> Option<u128> {
        let held = self.references.iter().any(|&(_, held)| held == arena.name);
        let copied = self.arenas.iter().any(|other| other.from == Some(LoadFrom::Host(arena.name)));
        if arena.state != ArenaState::Committed || held || copied {
            return None;
        }
        let mut sum = 0;
        for &name in &arena.names {
            let model = self.model(name)?;
            if model.pinned {
                return None;
            }
            let host = self.in_tier(name, MemoryTier::Host);
            let in_host = host.is_some_and(|arena| arena.state == ArenaState::Committed);
            let ms = if arena.tier == MemoryTier::Gpu && in_host {
                model.bytes.div_ceil(self.config.host_to_gpu.0 / 1_000).min(u64::from(u32::MAX))
            } else {
                model.reload_ns?.div_ceil(1_000_000).clamp(1, u64::from(u32::MAX))
            };
            sum += u128::from(self.rate(model, now)) * u128::from(ms);
        }
        Some(sum.min(1 << 79))
    }

    fn last_used(&self, arena: &Arena) -> Timestamp {
        let uses = arena.names.iter().filter_map(|&name| self.model(name)?.uses.last().copied());
        uses.max().unwrap_or(Timestamp::ZERO)
    }

    fn victims(&self, now: Timestamp, keep: Option<ArenaId>) -> Vec<Arena> {
        let may_go = |arena: &&Arena| Some(arena.name) != keep && self.worth(arena, now).is_some();
        let mut victims: Vec<Arena> = self.arenas.iter().filter(may_go).cloned().collect();
        victims.sort_by(|a, b| {
            let of = |arena: &Arena, other: &Arena| self.worth(arena, now).unwrap() * u128::from(other.bytes);
            let by_value = of(a, b).cmp(&of(b, a));
            let by_use = self.last_used(a).cmp(&self.last_used(b));
            [by_value, by_use, a.name.cmp(&b.name)].into_iter().find(|o| *o != Ordering::Equal).unwrap()
        });
        victims
    }

    fn room(
        &self,
        now: Timestamp,
        tier: MemoryTier,
        bytes: u64,
        owner: TenantId,
        tenant: TenantId,
        keep: Option<ArenaId>,
    ) -> Result<Vec<ArenaId>, RefuseReason> {
        let capacity = self.capacity(tier).0;
        if bytes > capacity {
            return Err(RefuseReason::ModelTooLarge);
        }
        let limits = self.limits(tenant);
        let ahead = limits.load_interval.as_nanos() * u64::from(limits.load_burst - 1);
        if self.next_load(tenant).as_nanos() > now.as_nanos() + ahead {
            return Err(RefuseReason::TenantLoads);
        }
        let victims = self.victims(now, keep);
        let mut going: Vec<ArenaId> = Vec::new();
        let limits = self.limits(owner);
        let stays = |going: &[ArenaId], arena: &&Arena| {
            arena.state != ArenaState::Evicting && !going.contains(&arena.name)
        };
        let charged = |going: &[ArenaId]| -> (u128, u32) {
            let mine = || self.arenas.iter().filter(|arena| arena.charged == owner && stays(going, arena));
            (mine().map(|arena| u128::from(arena.bytes)).sum(), mine().count() as u32)
        };
        let bytes_fit =
            |going: &[ArenaId]| charged(going).0 + u128::from(bytes) <= u128::from(limits.bytes.0);
        let count_fits = |going: &[ArenaId]| charged(going).1 < limits.models;
        for victim in victims.iter().filter(|arena| arena.charged == owner) {
            if !bytes_fit(&going) || !count_fits(&going) {
                going.push(victim.name);
            }
        }
        if !bytes_fit(&going) {
            return Err(RefuseReason::TenantBytes);
        }
        if !count_fits(&going) {
            return Err(RefuseReason::TenantModels);
        }
        let promised = |going: &[ArenaId]| -> u64 {
            let here = self.arenas.iter().filter(|arena| arena.tier == tier && stays(going, arena));
            here.map(|arena| arena.bytes).sum::<u64>() + bytes
        };
        if promised(&going) > capacity * u64::from(self.config.high.get()) / 10_000 {
            for victim in victims.iter().filter(|arena| arena.tier == tier) {
                let low = capacity * u64::from(self.config.low.get()) / 10_000;
                if !going.contains(&victim.name) && promised(&going) > low {
                    going.push(victim.name);
                }
            }
        }
        if promised(&going) > capacity { Err(RefuseReason::StoreFull) } else { Ok(going) }
    }

    fn trim(&mut self, tier: MemoryTier, actions: &mut Vec<StoreAction>) {
        let part = |share: gshare_core::BasisPoints| self.capacity(tier).0 * u64::from(share.get()) / 10_000;
        let (high, low) = (part(self.config.high), part(self.config.low));
        if self.promised(tier) <= high {
            return;
        }
        for victim in self.victims(self.now, None) {
            if victim.tier == tier && self.promised(tier) > low {
                self.make_go(victim.name, tier, None, actions);
            }
        }
    }

    /// Sends an arena away for room, from the GPU by way of a copy in host memory where that can be.
    fn make_go(
        &mut self,
        name: ArenaId,
        tier: MemoryTier,
        coming: Option<(TenantId, u64)>,
        actions: &mut Vec<StoreAction>,
    ) {
        let arena = self.find(name).unwrap().clone();
        let mine = || {
            self.arenas
                .iter()
                .filter(|other| other.charged == arena.charged && other.state != ArenaState::Evicting)
        };
        let more = coming.filter(|&(tenant, _)| tenant == arena.charged);
        let bytes = mine().map(|other| u128::from(other.bytes)).sum::<u128>()
            + more.map_or(0, |(_, b)| u128::from(b));
        let count = mine().count() as u32 + u32::from(more.is_some());
        let limits = self.limits(arena.charged);
        let high = self.capacity(MemoryTier::Host).0 * u64::from(self.config.high.get()) / 10_000;
        let in_host = |&model: &ModelId| self.in_tier(model, MemoryTier::Host).is_some();
        let demote = self.config.demote
            && tier == MemoryTier::Gpu
            && arena.tier == MemoryTier::Gpu
            && !arena.names.iter().any(in_host)
            && self.promised(MemoryTier::Host) + arena.bytes <= high
            && bytes <= u128::from(limits.bytes.0)
            && count <= limits.models;
        if !demote {
            return self.retire(name, actions);
        }
        let mut names = arena.names.clone();
        names.sort();
        let from = Some(LoadFrom::Gpu(name));
        let copy = self.promise(names[0], MemoryTier::Host, arena.bytes, arena.charged, from, None);
        self.find_mut(copy).names = names;
        let gone = self.find_mut(name);
        (gone.state, gone.content) = (ArenaState::Evicting, None);
        gone.names.clear();
        self.start(MemoryTier::Host, actions);
    }

    fn retire(&mut self, name: ArenaId, actions: &mut Vec<StoreAction>) {
        let arena = self.find_mut(name);
        let before = arena.clone();
        (arena.state, arena.from, arena.writer, arena.content) = (ArenaState::Evicting, None, None, None);
        arena.names.clear();
        if before.state == ArenaState::Empty {
            self.arenas.retain(|arena| arena.name != name);
        } else {
            actions.push(StoreAction::Evict { arena: name });
        }
        if let Some(LoadFrom::Gpu(arena)) = before.from {
            actions.push(StoreAction::Evict { arena });
        }
        let mut names = before.names;
        names.sort();
        names.into_iter().for_each(|model| self.forget(model, actions));
    }

    fn forget(&mut self, model: ModelId, actions: &mut Vec<StoreAction>) {
        let somewhere = self.arenas.iter().any(|arena| arena.names.contains(&model));
        if !somewhere && self.model(model).is_some_and(|model| model.reload_ns.is_none()) {
            self.models.retain(|known| known.name != model);
            actions.push(StoreAction::Forgotten { model });
        }
    }

    fn give_up(&mut self, name: ArenaId, reason: RefuseReason, actions: &mut Vec<StoreAction>) {
        let tier = self.find(name).unwrap().tier;
        self.abandon(name, reason, actions);
        self.start(tier, actions);
    }

    fn abandon(&mut self, name: ArenaId, reason: RefuseReason, actions: &mut Vec<StoreAction>) {
        for ticket in self.tickets.iter().filter(|ticket| ticket.arena == name) {
            actions.push(StoreAction::Refuse { ticket: ticket.name, client: ticket.client, reason });
        }
        self.tickets.retain(|ticket| ticket.arena != name);
        self.retire(name, actions);
    }

    fn promise(
        &mut self,
        model: ModelId,
        tier: MemoryTier,
        bytes: u64,
        charged: TenantId,
        from: Option<LoadFrom>,
        writer: Option<(ClientId, Timestamp)>,
    ) -> ArenaId {
        let in_use = |slot: usize| self.arenas.iter().any(|arena| arena.name.index() == slot);
        let slot = (0..).find(|&slot| !in_use(slot)).unwrap();
        if slot == self.slots.len() {
            self.slots.push(0);
        }
        let name = ArenaId::new(slot as u32, self.slots[slot]);
        self.slots[slot] += 1;
        let state = ArenaState::Empty;
        self.arenas.push(Arena {
            name,
            tier,
            bytes,
            state,
            names: vec![model],
            from,
            writer,
            content: None,
            charged,
        });
        name
    }

    fn start(&mut self, tier: MemoryTier, actions: &mut Vec<StoreAction>) {
        loop {
            let first =
                self.arenas.iter().find(|arena| arena.tier == tier && arena.state == ArenaState::Empty);
            let Some(Arena { name, bytes, names, from, writer, .. }) = first.cloned() else { return };
            if self.physical(tier) + bytes > self.capacity(tier).0 {
                return;
            }
            self.find_mut(name).state = ArenaState::Loading;
            let (arena, model) = (name, names[0]);
            if let Some(from) = from {
                actions.push(StoreAction::Load { arena, model, tier, from });
            } else {
                let (client, _) = writer.unwrap();
                let begun = |ticket: &Ticket| ticket.arena == arena && ticket.wants == Wants::Write;
                let at = self.tickets.iter().position(begun).unwrap();
                let ticket = self.tickets.remove(at).name;
                actions.push(StoreAction::Write { ticket, client, arena, model, tier });
            }
        }
    }

    fn serve(&mut self, ticket: &Ticket, arena: ArenaId, model: ModelId, actions: &mut Vec<StoreAction>) {
        self.references.push((ticket.client, arena));
        actions.push(StoreAction::Serve { ticket: ticket.name, client: ticket.client, arena, model });
    }

    fn asked(
        &mut self,
        now: Timestamp,
        mut ticket: Ticket,
        model: ModelId,
        tier: MemoryTier,
    ) -> Result<Vec<StoreAction>, RefuseReason> {
        let mut actions = Vec::new();
        if self.model(model).is_none() {
            return Err(RefuseReason::UnknownModel);
        }
        if !self.may_read(ticket.client, model) {
            return Err(RefuseReason::NotAllowed);
        }
        self.models.iter_mut().find(|known| known.name == model).unwrap().uses.push(now);
        let known = self.model(model).unwrap().clone();
        if self.in_tier(model, tier).is_none()
            && known.content.is_some()
            && let Some(same) =
                self.arenas.iter_mut().find(|arena| arena.tier == tier && arena.content == known.content)
        {
            same.names.push(model);
        }
        if let Some(arena) = self.in_tier(model, tier) {
            let (name, state) = (arena.name, arena.state);
            if state == ArenaState::Committed {
                self.serve(&ticket, name, model, &mut actions);
            } else if ticket.due <= Some(now) {
                return Err(RefuseReason::TimedOut);
            } else {
                ticket.arena = name;
                self.tickets.push(ticket);
            }
            return Ok(actions);
        }
        let host = (tier == MemoryTier::Gpu).then(|| self.in_tier(model, MemoryTier::Host)).flatten();
        let host = host.filter(|arena| arena.state == ArenaState::Committed).map(|arena| arena.name);
        let from = match (host, known.reload_ns) {
            (Some(arena), _) => LoadFrom::Host(arena),
            (None, Some(_)) => LoadFrom::Disk,
            (None, None) => return Err(RefuseReason::NotResident),
        };
        if ticket.due <= Some(now) {
            return Err(RefuseReason::TimedOut);
        }
        let (tenant, ..) = self.client(ticket.client).unwrap();
        let victims = self.room(now, tier, known.bytes, known.owner, tenant, host)?;
        self.caused(now, tenant);
        let coming = Some((known.owner, known.bytes));
        victims.into_iter().for_each(|victim| self.make_go(victim, tier, coming, &mut actions));
        ticket.arena = self.promise(model, tier, known.bytes, known.owner, Some(from), None);
        self.tickets.push(ticket);
        self.start(tier, &mut actions);
        Ok(actions)
    }

    fn caused(&mut self, now: Timestamp, tenant: TenantId) {
        let at = self.next_load(tenant).max(now).saturating_add(self.limits(tenant).load_interval);
        self.next_load.push((tenant, at));
    }

    fn deadlines(&mut self, now: Timestamp, actions: &mut Vec<StoreAction>) {
        loop {
            let tickets =
                self.tickets.iter().filter_map(|ticket| Some((ticket.due?, 0, Some(ticket.name), None)));
            let writes =
                self.arenas.iter().filter_map(|arena| Some((arena.writer?.1, 1, None, Some(arena.name))));
            let Some(first) = tickets.chain(writes).min() else { return };
            match first {
                (at, ..) if at > now => return,
                (_, _, Some(name), _) => {
                    let at = self.tickets.iter().position(|ticket| ticket.name == name).unwrap();
                    let client = self.tickets.remove(at).client;
                    actions.push(StoreAction::Refuse {
                        ticket: name,
                        client,
                        reason: RefuseReason::TimedOut,
                    });
                }
                (_, _, _, Some(arena)) => self.give_up(arena, RefuseReason::TimedOut, actions),
                _ => unreachable!(),
            }
        }
    }

    /// Plays an event that the engine accepted.
    pub fn play(&mut self, now: Timestamp, event: StoreEvent) -> Vec<StoreAction> {
        let mut actions = Vec::new();
        self.now = now;
        self.deadlines(now, &mut actions);
        let later = ArenaId::new(u32::MAX, u32::MAX);
        match event {
            StoreEvent::ClientJoined { client, tenant, group, admin } => {
                self.clients.push((client, tenant, group, admin));
            }
            StoreEvent::ClientLeft { client } => {
                self.clients.retain(|present| present.0 != client);
                self.references.retain(|reference| reference.0 != client);
                self.tickets.retain(|ticket| ticket.client != client);
                let written = |arena: &&Arena| arena.writer.is_some_and(|(writer, _)| writer == client);
                let mut writes: Vec<ArenaId> =
                    self.arenas.iter().filter(written).map(|arena| arena.name).collect();
                writes.sort();
                for arena in writes {
                    self.abandon(arena, RefuseReason::LoadFailed, &mut actions);
                }
                for tier in MemoryTier::ALL {
                    self.trim(tier, &mut actions);
                    self.start(tier, &mut actions);
                }
            }
            StoreEvent::TenantLimited { tenant, limits } => self.limits.push((tenant, limits)),
            StoreEvent::ModelAdded { model, owner, group, access, bytes, reload } => {
                self.add(model, owner, group, access, bytes, Some(reload.as_nanos()));
            }
            StoreEvent::Asked { client, ticket, model, tier, deadline } => {
                let asking = Ticket {
                    name: ticket,
                    client,
                    wants: Wants::Reference(model),
                    arena: later,
                    due: Some(deadline),
                };
                match self.asked(now, asking, model, tier) {
                    Ok(more) => actions.extend(more),
                    Err(reason) => actions.push(StoreAction::Refuse { ticket, client, reason }),
                }
            }
            StoreEvent::PutBegun { client, ticket, model, tier, bytes, access } => {
                let (tenant, group, _) = self.client(client).unwrap();
                let room = if self.model(model).is_some() {
                    Err(RefuseReason::NameTaken)
                } else if self.models.len() >= self.config.max_models as usize {
                    Err(RefuseReason::TooManyModels)
                } else {
                    self.room(now, tier, bytes.0, tenant, tenant, None)
                };
                match room {
                    Err(reason) => actions.push(StoreAction::Refuse { ticket, client, reason }),
                    Ok(victims) => {
                        self.caused(now, tenant);
                        let coming = Some((tenant, bytes.0));
                        victims
                            .into_iter()
                            .for_each(|victim| self.make_go(victim, tier, coming, &mut actions));
                        self.add(model, tenant, group, access, bytes, None);
                        self.models.last_mut().unwrap().uses.push(now);
                        let writer = Some((client, now.saturating_add(self.config.write_timeout)));
                        let arena = self.promise(model, tier, bytes.0, tenant, None, writer);
                        self.tickets.push(Ticket {
                            name: ticket,
                            client,
                            wants: Wants::Write,
                            arena,
                            due: None,
                        });
                        self.start(tier, &mut actions);
                    }
                }
            }
            StoreEvent::PutCommitted { client, ticket, arena } => {
                self.find_mut(arena).writer = None;
                self.tickets.push(Ticket { name: ticket, client, wants: Wants::Commit, arena, due: None });
                actions.push(StoreAction::Seal { arena });
            }
            StoreEvent::PutAborted { arena, .. } | StoreEvent::LoadFailed { arena } => {
                self.give_up(arena, RefuseReason::LoadFailed, &mut actions);
            }
            StoreEvent::Loaded { arena, content } => {
                let Arena { tier, mut names, from, .. } = self.find(arena).unwrap().clone();
                names.sort();
                let model = names[0];
                for known in self.models.iter_mut().filter(|known| names.contains(&known.name)) {
                    known.content = Some(content);
                }
                self.find_mut(arena).from = None;
                if let Some(LoadFrom::Gpu(arena)) = from {
                    actions.push(StoreAction::Evict { arena });
                }
                let same = |other: &&mut Arena| other.tier == tier && other.content == Some(content);
                let place = if let Some(same) = self.arenas.iter_mut().find(same) {
                    same.names.extend(&names);
                    let place = same.name;
                    self.find_mut(arena).names.clear();
                    self.retire(arena, &mut actions);
                    place
                } else {
                    let found = self.find_mut(arena);
                    (found.state, found.content) = (ArenaState::Committed, Some(content));
                    arena
                };
                let (waiting, rest) = self.tickets.drain(..).partition(|ticket| ticket.arena == arena);
                self.tickets = rest;
                let waiting: Vec<Ticket> = waiting;
                for ticket in &waiting {
                    if let Wants::Reference(model) = ticket.wants {
                        self.serve(ticket, place, model, &mut actions);
                    } else {
                        let Ticket { name: ticket, client, .. } = *ticket;
                        actions.push(StoreAction::Stored { ticket, client, arena: place, model });
                    }
                }
                self.trim(tier, &mut actions);
                self.start(tier, &mut actions);
            }
            StoreEvent::Released { client, arena } => {
                let at = self.references.iter().position(|held| *held == (client, arena)).unwrap();
                self.references.remove(at);
                if !self.references.iter().any(|&(_, held)| held == arena) {
                    let tier = self.find(arena).unwrap().tier;
                    self.trim(tier, &mut actions);
                    self.start(tier, &mut actions);
                }
            }
            StoreEvent::PinAsked { client, ticket, model, pinned } => {
                let refused = self.refused(client, model);
                if refused.is_none() {
                    self.models.iter_mut().find(|known| known.name == model).unwrap().pinned = pinned;
                }
                actions.push(answer(ticket, client, refused));
                MemoryTier::ALL.into_iter().for_each(|tier| self.trim(tier, &mut actions));
            }
            StoreEvent::EvictAsked { client, ticket, model, forget } => {
                let refused = self.refused(client, model).or_else(|| {
                    let here: Vec<&Arena> =
                        self.arenas.iter().filter(|arena| arena.names.contains(&model)).collect();
                    let held = |arena: &Arena| {
                        self.references.iter().any(|&(_, held)| held == arena.name)
                            || self.arenas.iter().any(|other| other.from == Some(LoadFrom::Host(arena.name)))
                    };
                    let busy = |arena: &&Arena| {
                        arena.state != ArenaState::Committed || (arena.names.len() == 1 && held(arena))
                    };
                    let pinned = self.model(model).unwrap().pinned;
                    (pinned || here.iter().any(busy)).then_some(RefuseReason::InUse)
                });
                if refused.is_none() {
                    if forget {
                        self.models.iter_mut().find(|known| known.name == model).unwrap().reload_ns = None;
                    }
                    for tier in MemoryTier::ALL {
                        let Some(arena) = self.in_tier(model, tier).cloned() else { continue };
                        if arena.names.len() == 1 {
                            self.retire(arena.name, &mut actions);
                        } else {
                            self.find_mut(arena.name).names.retain(|name| *name != model);
                            self.forget(model, &mut actions);
                        }
                    }
                    self.forget(model, &mut actions);
                }
                actions.push(answer(ticket, client, refused));
            }
            StoreEvent::Evicted { arena } => {
                let tier = self.find(arena).unwrap().tier;
                self.arenas.retain(|gone| gone.name != arena);
                self.start(tier, &mut actions);
            }
            _ => {}
        }
        actions
    }

    fn refused(&self, client: ClientId, model: ModelId) -> Option<RefuseReason> {
        let (tenant, _, admin) = self.client(client).unwrap();
        match self.model(model) {
            None => Some(RefuseReason::UnknownModel),
            Some(model) if model.owner != tenant && !admin => Some(RefuseReason::NotAllowed),
            Some(_) => None,
        }
    }

    fn add(
        &mut self,
        name: ModelId,
        owner: TenantId,
        group: GroupId,
        access: Access,
        bytes: Bytes,
        reload_ns: Option<u64>,
    ) {
        let (bytes, content, pinned, uses) = (bytes.0, None, false, Vec::new());
        self.models.push(Model { name, owner, group, access, bytes, reload_ns, content, pinned, uses });
    }

    fn capacity(&self, tier: MemoryTier) -> Bytes {
        if tier == MemoryTier::Gpu { self.config.gpu } else { self.config.host }
    }

    pub fn may_read(&self, client: ClientId, model: ModelId) -> bool {
        let (Some((tenant, group, admin)), Some(model)) = (self.client(client), self.model(model)) else {
            return false;
        };
        let in_group = model.access == Access::Group && model.group == group;
        admin || model.owner == tenant || model.access == Access::Public || in_group
    }

    fn views(&self) -> Vec<ArenaView> {
        let view = |arena: &Arena| {
            let mut view =
                ArenaView::new(arena.name, arena.tier, Bytes(arena.bytes), arena.state, arena.charged);
            view.references = self.references.iter().filter(|&&(_, held)| held == arena.name).count() as u64;
            view.names = arena.names.len() as u32;
            view
        };
        let mut views: Vec<ArenaView> = self.arenas.iter().map(view).collect();
        views.sort_by_key(|view| view.arena);
        views
    }
}

fn answer(ticket: TicketId, client: ClientId, refused: Option<RefuseReason>) -> StoreAction {
    match refused {
        None => StoreAction::Done { ticket, client },
        Some(reason) => StoreAction::Refuse { ticket, client, reason },
    }
}

/// A store and the literal one, told the same; they must say the same.
#[derive(Debug)]
pub struct Lockstep<S> {
    pub store: S,
    pub literal: Literal,
}

impl<S: ModelStore> Engine for Lockstep<S> {
    type Event = StoreEvent;
    type Action = StoreAction;
    type Error = StoreError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: StoreEvent,
        actions: &mut Vec<StoreAction>,
    ) -> Result<(), StoreError> {
        self.store.handle(now, event, actions)?;
        let expected = self.literal.play(now, event);
        assert_eq!(*actions, expected, "after {event:?} at {now}");
        assert_eq!(self.store.arenas(), self.literal.views(), "after {event:?} at {now}");
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.store.next_deadline()
    }
}

impl<S: ModelStore> ModelStore for Lockstep<S> {
    fn arena_of(&self, model: ModelId, tier: MemoryTier) -> Option<ArenaId> {
        self.store.arena_of(model, tier)
    }
    fn arena(&self, arena: ArenaId) -> Option<ArenaView> {
        self.store.arena(arena)
    }
    fn arenas(&self) -> Vec<ArenaView> {
        self.store.arenas()
    }
    fn may_read(&self, client: ClientId, model: ModelId) -> bool {
        let may = self.store.may_read(client, model);
        assert_eq!(may, self.literal.may_read(client, model));
        may
    }
    fn capacity(&self, tier: MemoryTier) -> Bytes {
        self.store.capacity(tier)
    }
    fn knows(&self, model: ModelId) -> bool {
        self.store.knows(model)
    }
    fn content_of(&self, model: ModelId) -> Option<ContentHash> {
        self.store.content_of(model)
    }
    fn promised(&self, tier: MemoryTier) -> Bytes {
        self.store.promised(tier)
    }
    fn physical(&self, tier: MemoryTier) -> Bytes {
        self.store.physical(tier)
    }
}
