//! What the daemon knows and decides, apart from sockets: instances, clients, shares and memory.
//!
//! # Problem
//! Processes come and go, several belong to one instance, and the token engine knows none of that: it knows clients.
//! This module turns what peers say into engine events, and the engine's orders into frames.
//!
//! # Terms
//! - **session**: one connection that has said Hello; one process.
//! - **instance**: the sessions of one run under one name; they share one spec.
//! - **client**: one session on one GPU; what the engine schedules.
//!
//! # Rules
//! 1. A name belongs to one run while any of its processes lives. Another run with that name is refused.
//! 2. The spec is the configuration's for that name; else what the first process of the run asked for, if the
//!    configuration lets unlisted clients in.
//! 3. `n` clients of one instance on one GPU get `1/n` of its request and limit each; what the division leaves goes
//!    to the first ones, one basis point each, so that the sum is exact. SMs are not divided: the area (time x SMs)
//!    is that of the instance either way. Example: limit 50 %, three clients: 16.67, 16.67, 16.66 %.
//! 4. Shrinking comes before growing: at no instant do the clients of an instance have more than its limit.
//! 5. A message that does not fit the state of its connection ends the connection, and that one only. What can cross
//!    on the wire (a return after a revoke) is counted and otherwise ignored.
//! 6. What a client had beyond its limit when it left is paid back before the next of its name gets a token ([`Debts`]).
//! 7. A device that is not served, or on which the spec cannot be met, is refused, and the connection goes on: the process
//!    may have others. Attaches are answered in their order, so the refusal is of the first that is not answered yet.
//!
//! # Invariants
//! Each client has a session and a place among its instance's; limits of an instance's clients add up to its limit;
//! the ledger agrees with the clients.
//!
//! # Cost
//! A token message costs one table look-up and the engine. Joining and leaving cost O(clients of the instance).

use crate::config::{Config, ConfigError, DeviceUuid};
use crate::debts::{Debts, scaled};
use crate::journal::{Journal, Note};
use crate::memory::{ClientAccount, Ledger};
use crate::metrics::{DropReason, Metrics};
use crate::peer::Peer;
use crate::scaling::{Resize, Scaling};
use crate::slots::Slots;
use crate::snapshot::{ClientSnapshot, DeviceSnapshot};
use gshare_core::scale::{ScaleState, ServiceClass};
use gshare_core::token::{ThrottleReason, TokenScheduler};
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, Duration, GpuId, Quota, QuotaRange, ResourceSpec, Share, Timestamp, TokenAction,
    TokenError, TokenEvent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Name of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// What the server shall do, in order.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Send a frame.
    Send(ConnId, ToClient),
    /// Close the connection once what was sent before is on its way.
    Drop(ConnId, DropReason),
}

#[derive(Debug)]
struct Session {
    peer: Peer,
    instance: u32,
    program: String,
    on_loss: OnDaemonLoss,
    /// Said by its process; the configuration's goes before it. Without either its share is fixed.
    class: Option<ServiceClass>,
    clients: Vec<ClientId>,
}

#[derive(Debug)]
struct Instance {
    name: String,
    run: u64,
    /// What its first process asked for, used where the configuration says nothing.
    asked: ResourceSpec,
    spec: ResourceSpec,
    sessions: u32,
    members: BTreeMap<GpuId, Vec<ClientId>>,
}

#[derive(Debug)]
struct Client {
    conn: ConnId,
    gpu: GpuId,
    instance: u32,
    quota: QuotaRange,
    account: ClientAccount,
    launches: u64,
    waited: Duration,
    /// GPU time used at two earlier times, a second or more apart, to tell the share of late.
    samples: [(Timestamp, Duration); 2],
    /// Since when it has its limit and might have had tokens, and GPU time used before.
    since: (Timestamp, Duration),
    /// The largest limit that it had in the window before the first.
    largest: (Timestamp, Quota),
    /// When the debts of its name are paid back: no token before.
    resumes: Timestamp,
    /// Since when it waits for that.
    waits: Option<Timestamp>,
}

#[derive(Debug)]
struct Device {
    uuid: DeviceUuid,
    memory: Bytes,
    /// Listed in the configuration: stays when its last client goes.
    listed: bool,
    clients: u32,
}

/// The node. See the [module](self).
pub(crate) struct Node {
    config: Config,
    engine: Box<dyn TokenScheduler>,
    journal: Journal,
    metrics: Arc<Metrics>,
    epoch: u64,
    sessions: BTreeMap<ConnId, Session>,
    instances: BTreeMap<u32, Instance>,
    names: BTreeMap<String, u32>,
    next_instance: u32,
    clients: Slots<Client>,
    devices: Vec<Option<Device>>,
    ledger: Ledger,
    scaling: Scaling,
    debts: Debts,
    /// The most overuse that is kept of one client.
    max_debt: Duration,
    /// Clients that wait until the debts of their name are paid back.
    waiting: BTreeSet<(Timestamp, ClientId)>,
    resizes: Vec<Resize>,
    actions: Vec<TokenAction>,
    now: Timestamp,
}

/// The `index`-th of `n` even parts of a quota; `None` when there is not a basis point for each.
fn part(quota: QuotaRange, n: usize, index: usize) -> Option<QuotaRange> {
    let n = u16::try_from(n).ok()?;
    let index = u16::try_from(index).ok()?;
    let part = |whole: Quota| Quota::new(whole.get() / n + u16::from(index < whole.get() % n));
    QuotaRange::new(part(quota.request())?, part(quota.limit())?).ok()
}

impl Node {
    pub(crate) fn new(
        config: Config,
        engine: Box<dyn TokenScheduler>,
        journal: Journal,
        metrics: Arc<Metrics>,
        epoch: u64,
        scaling: Scaling,
    ) -> Self {
        let mut node = Self {
            engine,
            journal,
            metrics,
            epoch,
            sessions: BTreeMap::new(),
            instances: BTreeMap::new(),
            names: BTreeMap::new(),
            next_instance: 0,
            clients: Slots::default(),
            devices: Vec::new(),
            ledger: Ledger::default(),
            scaling,
            debts: Debts::default(),
            max_debt: config.tokens.engine(config.max_clients).max_debt,
            waiting: BTreeSet::new(),
            resizes: Vec::new(),
            actions: Vec::new(),
            now: Timestamp::ZERO,
            config,
        };
        for device in node.config.devices.clone() {
            let memory = device.memory.unwrap_or(Bytes::ZERO);
            node.devices.push(Some(Device { uuid: device.uuid, memory, listed: true, clients: 0 }));
            node.limit_device(node.devices.len() - 1);
        }
        node
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Whether any device has several clients.
    pub(crate) fn is_shared(&self) -> bool {
        let mut seen = BTreeSet::new();
        self.clients.iter().any(|(_, _, client)| !seen.insert(client.gpu))
    }

    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let resumes = self.waiting.first().map(|(resumes, _)| *resumes);
        [self.engine.next_deadline(), self.scaling.next_deadline(), resumes].into_iter().flatten().min()
    }

    /// Takes a message of a peer.
    pub(crate) fn received(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        peer: Peer,
        message: ToDaemon,
        out: &mut Vec<Effect>,
    ) {
        match message {
            ToDaemon::TokenRequest { client } => {
                if self.owns(conn, client, out) {
                    self.ask(now, client, out);
                }
            }
            ToDaemon::TokenReturn { client, lease, used, again } => {
                if self.owns(conn, client, out) {
                    let again = again != 0;
                    let returned = TokenEvent::TokenReturned { client, lease, used, again };
                    if !self.token(now, returned, out) && again {
                        // It crossed a revoke on the wire; the wish stands.
                        self.ask(now, client, out);
                    }
                    self.sample(now, client);
                }
            }
            ToDaemon::Usage { client, lease, used, launches, waited } => {
                if self.owns(conn, client, out) {
                    if let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) {
                        (entry.launches, entry.waited) = (launches, waited);
                    }
                    self.token(now, TokenEvent::UsageReported { client, lease, used }, out);
                    self.sample(now, client);
                }
            }
            ToDaemon::MemoryReserve { client, bytes, wish } => {
                if self.owns(conn, client, out) {
                    self.reserve(conn, client, bytes, wish, out);
                }
            }
            ToDaemon::MemoryRelease { client, bytes } => {
                if self.owns(conn, client, out) {
                    let entry = self.clients.get_mut(client.slot(), client.generation());
                    let fits = entry.is_some_and(|entry| self.ledger.release(&mut entry.account, bytes));
                    if !fits {
                        // Its account and ours differ. It re-states its own when it connects again.
                        tracing::warn!(%client, %bytes, "released more than it holds");
                        out.push(Effect::Drop(conn, DropReason::Protocol));
                    }
                }
            }
            ToDaemon::Hello { run, name, program, spec, on_loss, pid_start } => {
                let run = if run == 0 { u64::from(peer.pid.unsigned_abs()) << 32 ^ pid_start } else { run };
                let name = match peer.pid {
                    _ if !name.is_empty() => name,
                    // In a PID namespace that is not ours to see.
                    0 => format!("{program}-c{}.{}", conn.slot, conn.generation),
                    pid => format!("{program}-{pid}"),
                };
                self.hello(conn, peer, Hello { run, name, program, spec, on_loss }, out);
            }
            ToDaemon::Attach { ordinal, device, device_memory, allocated } => {
                let uuid = DeviceUuid(device);
                match self.attach(now, conn, ordinal, uuid, device_memory, allocated, out) {
                    Ok(()) => {}
                    // Of this device only: the process goes on with those that it may have.
                    Err(refusal)
                        if matches!(refusal.code, RefusalCode::UnknownDevice | RefusalCode::BadSpec) =>
                    {
                        refusal.tell(conn, out);
                    }
                    Err(refusal) => refusal.push(conn, out),
                }
            }
            ToDaemon::Detach { client } => {
                if self.owns(conn, client, out) {
                    if let Some(session) = self.sessions.get_mut(&conn) {
                        session.clients.retain(|other| *other != client);
                    }
                    self.leave(now, client, out);
                }
            }
            ToDaemon::Class { class } => match self.sessions.get_mut(&conn) {
                Some(session) if session.clients.is_empty() => session.class = Some(class),
                _ => {
                    let text = "Class comes after Hello and before the first Attach".to_owned();
                    Refusal { code: RefusalCode::Protocol, text }.push(conn, out);
                }
            },
            ToDaemon::Iteration { client, first_launch, last_launch, launches } => {
                if self.owns(conn, client, out) {
                    self.scaling.iteration(now, client, first_launch, last_launch, launches);
                }
            }
            // A kind that this version of the daemon has no use for.
            _ => out.push(Effect::Drop(conn, DropReason::Protocol)),
        }
        self.invariants();
    }

    /// A connection is gone, or its process is.
    pub(crate) fn closed(&mut self, now: Timestamp, conn: ConnId, out: &mut Vec<Effect>) {
        let Some(session) = self.sessions.remove(&conn) else { return };
        for client in session.clients {
            self.leave(now, client, out);
        }
        if let Some(instance) = self.instances.get_mut(&session.instance) {
            instance.sessions -= 1;
            if instance.sessions == 0 {
                self.names.remove(&instance.name);
                self.instances.remove(&session.instance);
            }
        }
        self.invariants();
    }

    /// The engine's deadline has come.
    pub(crate) fn deadline(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        if self.engine.next_deadline().is_some_and(|due| due <= now) {
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        while let Some(&(_, client)) = self.waiting.first().filter(|(resumes, _)| *resumes <= now) {
            self.waiting.pop_first();
            if let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) {
                entry.waits = None;
            }
            self.token(now, TokenEvent::TokenRequested { client }, out);
        }
        self.scale(now, out);
    }

    /// A client wants a token: the engine hears of it, once the debts of its name are paid back.
    fn ask(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<Effect>) {
        let entry = self.clients.get_mut(client.slot(), client.generation());
        let Some(entry) = entry.filter(|entry| now < entry.resumes) else {
            self.token(now, TokenEvent::TokenRequested { client }, out);
            return;
        };
        if entry.waits.is_none() {
            entry.waits = Some(now);
            self.waiting.insert((entry.resumes, client));
            self.metrics.throttles.inc();
            let (until, reason) = (entry.resumes, ThrottleReason::LimitReached);
            out.push(Effect::Send(entry.conn, ToClient::Throttle { client, until, reason }));
        }
    }

    /// A period of the co-scaler may have ended: puts its shares in force. Hooks are not told: a share of theirs is what
    /// they keep should this daemon be lost.
    fn scale(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        let mut resizes = core::mem::take(&mut self.resizes);
        let used = |client| self.engine.client(client).map(|status| status.total_used);
        self.scaling.period(now, used, &mut resizes);
        for Resize { client, quota } in resizes.drain(..) {
            let Some(entry) = self.clients.get(client.slot(), client.generation()) else { continue };
            let Some(instance) = self.instances.get(&entry.instance) else { continue };
            let share = Share { quota, sm: instance.spec.sm() };
            self.token(now, TokenEvent::ShareChanged { client, share }, out);
        }
        self.resizes = resizes;
    }

    /// Puts another configuration in force, or changes nothing.
    pub(crate) fn reload(
        &mut self,
        now: Timestamp,
        new: Config,
        out: &mut Vec<Effect>,
    ) -> Result<(), ConfigError> {
        self.config.check_live(&new)?;
        let specs: Vec<(u32, ResourceSpec)> = self
            .instances
            .iter()
            .map(|(id, instance)| (*id, new.client(&instance.name).copied().unwrap_or(instance.asked)))
            .collect();
        for (id, spec) in &specs {
            let Some(instance) = self.instances.get(id) else { continue };
            for (gpu, members) in &instance.members {
                let value = |key: &str, message: String| ConfigError::Value {
                    line: 0,
                    key: format!("client `{}`: {key}", instance.name),
                    message,
                };
                let memory = self.device(*gpu).map_or(Bytes::ZERO, |device| device.memory);
                if memory > Bytes::ZERO {
                    spec.check_fits(memory).map_err(|error| value("memory", error.to_string()))?;
                }
                if part(spec.quota(), members.len(), members.len() - 1).is_none() {
                    let message = format!("less than 0.01% for each of its {} processes", members.len());
                    return Err(value("quota", message));
                }
            }
        }
        let old = core::mem::replace(&mut self.config, new);
        for gpu in 0..self.devices.len() {
            self.limit_device(gpu);
        }
        for (id, spec) in specs {
            let Some(instance) = self.instances.get_mut(&id) else { continue };
            let changed = instance.spec != spec;
            instance.spec = spec;
            let gpus: Vec<GpuId> = instance.members.keys().copied().collect();
            for gpu in gpus {
                self.ledger.set_tenant((gpu, id), spec.memory());
                if changed {
                    self.divide(now, id, gpu, true, None, out);
                }
            }
        }
        self.reclassify(now, &old, out);
        self.invariants();
        Ok(())
    }

    /// What `gshare status` shows of devices and clients.
    pub(crate) fn snapshot(&self, now: Timestamp) -> (Vec<DeviceSnapshot>, Vec<ClientSnapshot>) {
        let devices = self.devices.iter().zip(0..).filter_map(|(device, number)| {
            let device = device.as_ref()?;
            Some(DeviceSnapshot {
                gpu: GpuId(number),
                uuid: device.uuid.to_string(),
                memory_bytes: device.memory,
                held_bytes: self.ledger.device_held(GpuId(number)),
                clients: device.clients,
            })
        });
        let clients = self.clients.iter().filter_map(|(slot, generation, client)| {
            let id = ClientId::new(slot, generation);
            let status = self.engine.client(id)?;
            let session = self.sessions.get(&client.conn)?;
            let instance = self.instances.get(&client.instance)?;
            let scale = self.scaling.client(id);
            let (since, used) = client.samples[0];
            let elapsed = now.saturating_since(since).as_nanos();
            let late = status.total_used.as_nanos().saturating_sub(used.as_nanos());
            #[expect(clippy::cast_precision_loss, reason = "a report")]
            let measured = if elapsed == 0 { 0.0 } else { late as f64 / elapsed as f64 };
            Some(ClientSnapshot {
                client: id,
                name: instance.name.clone(),
                pid: session.peer.pid,
                uid: session.peer.uid,
                program: session.program.clone(),
                gpu: client.gpu,
                quota_request: client.quota.request().as_fraction(),
                quota_limit: client.quota.limit().as_fraction(),
                sm: instance.spec.sm().as_fraction(),
                measured,
                total_used_ns: status.total_used,
                window_used_ns: status.window_used,
                holds_token: status.holds.is_some(),
                waiting_ns: status.waiting_since.or(client.waits).map(|since| now.saturating_since(since)),
                waited_ns: client.waited,
                launches: client.launches,
                memory_bytes: client.account.held(),
                memory_limit_bytes: instance.spec.memory(),
                on_daemon_loss: session.on_loss,
                class: scale.map(|scale| scale.class),
                scale_state: scale.and_then(|scale| match scale.state {
                    ScaleState::None => self.scaling.gpu(client.gpu),
                    own => Some(own),
                }),
                scaled_limit: scale.map(|_| status.share.quota.limit().as_fraction()),
            })
        });
        (devices.collect(), clients.collect())
    }

    pub(crate) fn session_count(&self) -> usize {
        self.sessions.len()
    }

    pub(crate) fn journal_lost(&self) -> u64 {
        self.journal.lost()
    }

    pub(crate) fn finish(&mut self) {
        self.journal.finish();
    }

    /// Journals an event, hands it to the engine, and turns its orders into frames.
    fn token(&mut self, now: Timestamp, event: TokenEvent, out: &mut Vec<Effect>) -> bool {
        // A clock of the host's own may stand still, but the engine is never told that time went back.
        let now = now.max(self.now);
        self.now = now;
        self.journal.event(now, &event);
        self.actions.clear();
        self.metrics.events.inc();
        let limit_of = |engine: &dyn TokenScheduler, client| {
            engine.client(client).map(|status| status.share.quota.limit())
        };
        let changes = match event {
            TokenEvent::ShareChanged { client, .. } => {
                limit_of(&*self.engine, client).map(|old| (client, old))
            }
            _ => None,
        };
        if let Err(error) = self.engine.handle(now, event, &mut self.actions) {
            // Nothing changed. A return or report that crossed a revoke on the wire ends here.
            self.metrics.refused_event(token_error_label(&error));
            tracing::debug!(%error, ?event, "the engine refused an event");
            return false;
        }
        self.journal.actions(now, &self.actions);
        if let Some((client, old)) = changes {
            self.limit_changed(now, client, old);
        }
        for action in &self.actions {
            let (client, frame) = match *action {
                TokenAction::Grant { client, lease, budget, expires } => {
                    self.metrics.grants.inc();
                    (client, ToClient::Grant { client, lease, budget, expires })
                }
                TokenAction::Revoke { client, lease, reason } => {
                    self.metrics.revokes.inc();
                    (client, ToClient::Revoke { client, lease, reason })
                }
                TokenAction::Throttle { client, until, reason } => {
                    self.metrics.throttles.inc();
                    (client, ToClient::Throttle { client, until, reason })
                }
                _ => continue,
            };
            if let Some(entry) = self.clients.get(client.slot(), client.generation()) {
                out.push(Effect::Send(entry.conn, frame));
            }
        }
        true
    }

    /// From now on a client is measured by another limit than `old`, and pays back at its rate.
    fn limit_changed(&mut self, now: Timestamp, id: ClientId, old: Quota) {
        let Some(status) = self.engine.client(id) else { return };
        let Some(client) = self.clients.get_mut(id.slot(), id.generation()) else { return };
        let limit = status.share.quota.limit();
        let before = if now < client.largest.0 { client.largest.1 } else { old };
        client.largest = (now.saturating_add(self.engine.window()), before.max(old).max(limit));
        client.since = (now, status.total_used);
        if now < client.resumes {
            let waits = self.waiting.remove(&(client.resumes, id));
            client.resumes = now.saturating_add(scaled(client.resumes.saturating_since(now), old, limit));
            client.since.0 = client.resumes;
            if waits {
                self.waiting.insert((client.resumes, id));
            }
        }
    }

    /// What a client that is about to leave had beyond its limit, and the limit: what the engine carries; or, since it
    /// leaves nothing behind for windows to come, what it had faster than at the limit's rate.
    fn overuse(&mut self, now: Timestamp, id: ClientId, out: &mut Vec<Effect>) -> Option<(Duration, Quota)> {
        let client = self.clients.get(id.slot(), id.generation())?;
        let (since, before) = client.since;
        let status = self.engine.client(id)?;
        let limit = status.share.quota.limit();
        if limit.is_zero() || limit == Quota::WHOLE {
            return None;
        }
        let most = if now < client.largest.0 { client.largest.1 } else { limit }.of(self.engine.window());
        if status.window_used > most {
            // The windows that have passed meanwhile paid back some.
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        let status = self.engine.client(id)?;
        let fair = before.saturating_add(limit.of(now.saturating_since(since)));
        let owed = status.window_used.saturating_sub(most).max(status.total_used.saturating_sub(fair));
        (!owed.is_zero()).then_some((owed, limit))
    }

    fn sample(&mut self, now: Timestamp, id: ClientId) {
        let Some(client) = self.clients.get_mut(id.slot(), id.generation()) else { return };
        if now.saturating_since(client.samples[1].0) >= Duration::from_millis(1000)
            && let Some(status) = self.engine.client(id)
        {
            client.samples = [client.samples[1], (now, status.total_used)];
        }
    }

    /// Whether the connection may speak for the client; if not, it ends.
    fn owns(&self, conn: ConnId, client: ClientId, out: &mut Vec<Effect>) -> bool {
        let owns =
            self.clients.get(client.slot(), client.generation()).is_some_and(|entry| entry.conn == conn);
        if !owns {
            tracing::warn!(?conn, %client, "speaks for a client that is not its own");
            out.push(Effect::Drop(conn, DropReason::Protocol));
        }
        owns
    }

    fn hello(&mut self, conn: ConnId, peer: Peer, hello: Hello, out: &mut Vec<Effect>) {
        let refusal = |code, text: String| Refusal { code, text };
        if self.sessions.contains_key(&conn) {
            return refusal(RefusalCode::Protocol, "Hello was said already".into()).push(conn, out);
        }
        let id = match self.names.get(&hello.name) {
            Some(id) => {
                let instance = self.instances.get(id).filter(|instance| instance.run == hello.run);
                if instance.is_none() {
                    let owner = self.sessions.values().find(|session| session.instance == *id);
                    let pid = owner.map_or(0, |session| session.peer.pid);
                    let text =
                        format!("name `{}` is in use by another run (pid {pid}); choose another", hello.name);
                    return refusal(RefusalCode::DuplicateName, text).push(conn, out);
                }
                *id
            }
            None => {
                let listed = self.config.client(&hello.name);
                if listed.is_none() && !self.config.allow_unlisted {
                    let text = format!(
                        "client `{}` is not in the configuration (allow_unlisted = false)",
                        hello.name
                    );
                    return refusal(RefusalCode::NotAllowed, text).push(conn, out);
                }
                let id = self.next_instance;
                self.next_instance += 1;
                let instance = Instance {
                    name: hello.name.clone(),
                    run: hello.run,
                    asked: hello.spec,
                    spec: listed.copied().unwrap_or(hello.spec),
                    sessions: 0,
                    members: BTreeMap::new(),
                };
                self.instances.insert(id, instance);
                self.names.insert(hello.name, id);
                id
            }
        };
        if let Some(instance) = self.instances.get_mut(&id) {
            instance.sessions += 1;
        }
        let session = Session {
            peer,
            instance: id,
            program: hello.program,
            on_loss: hello.on_loss,
            class: None,
            clients: Vec::new(),
        };
        self.sessions.insert(conn, session);
        out.push(Effect::Send(conn, ToClient::Welcome { epoch: self.epoch }));
        if let Some(class) = self.listed_class(id) {
            out.push(Effect::Send(conn, ToClient::Class { class }));
        }
    }

    /// The class that the configuration has for an instance.
    fn listed_class(&self, instance: u32) -> Option<ServiceClass> {
        self.instances.get(&instance).and_then(|instance| self.config.class(&instance.name))
    }

    /// Has a client take part in scaling as its class says, or not at all.
    fn classify(&mut self, now: Timestamp, client: ClientId, class: Option<ServiceClass>) {
        let (Some(class), Some(entry)) = (class, self.clients.get(client.slot(), client.generation())) else {
            return;
        };
        if let Err(error) = self.scaling.join(now, client, entry.gpu, entry.quota, class) {
            let name = self.instances.get(&entry.instance).map_or("", |instance| instance.name.as_str());
            tracing::warn!(%client, name, %class, %error, "takes no part in scaling: its share is fixed");
        }
    }

    /// Puts the classes of the configuration in force, where they are others than in `old`: first all those that take part
    /// no more, or as something else, give up what they had.
    fn reclassify(&mut self, now: Timestamp, old: &Config, out: &mut Vec<Effect>) {
        let mut changed = Vec::new();
        for (conn, session) in &self.sessions {
            let listed = self.listed_class(session.instance);
            let class = listed.or(session.class);
            let name = self.instances.get(&session.instance).map_or("", |instance| instance.name.as_str());
            if let Some(class) = listed
                && old.class(name) != listed
            {
                out.push(Effect::Send(*conn, ToClient::Class { class }));
            }
            let is = |client: &&ClientId| self.scaling.client(**client).map(|scale| scale.class) != class;
            changed.extend(session.clients.iter().filter(is).map(|client| (*client, class)));
        }
        for (client, _) in &changed {
            self.scaling.leave(now, *client);
            let Some(entry) = self.clients.get(client.slot(), client.generation()) else { continue };
            let Some(instance) = self.instances.get(&entry.instance) else { continue };
            let share = Share { quota: entry.quota, sm: instance.spec.sm() };
            self.token(now, TokenEvent::ShareChanged { client: *client, share }, out);
        }
        for (client, class) in changed {
            self.classify(now, client, class);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    fn attach(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        ordinal: u32,
        uuid: DeviceUuid,
        memory: Bytes,
        allocated: Bytes,
        out: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let refuse = |code, text: String| Err(Refusal { code, text });
        let Some(session) = self.sessions.get(&conn) else {
            return refuse(RefusalCode::Protocol, "Attach before Hello".into());
        };
        let (instance_id, pid) = (session.instance, session.peer.pid);
        let class = self.listed_class(instance_id).or(session.class);
        let clients = session.clients.clone();
        let Some(gpu) = self.find_device(uuid) else {
            return refuse(RefusalCode::UnknownDevice, format!("this daemon does not manage {uuid}"));
        };
        let of_gpu = |id: &ClientId| {
            self.clients.get(id.slot(), id.generation()).is_some_and(|client| client.gpu == gpu)
        };
        if self.device(gpu).is_some() && clients.iter().any(of_gpu) {
            return refuse(RefusalCode::Protocol, format!("{uuid} is attached already"));
        }
        let Some(instance) = self.instances.get(&instance_id) else {
            return refuse(RefusalCode::Protocol, "no such instance".into());
        };
        let (spec, name) = (instance.spec, instance.name.clone());
        let known = self.device(gpu).map_or(Bytes::ZERO, |device| device.memory);
        let device_memory = if known == Bytes::ZERO { memory } else { known };
        if device_memory > Bytes::ZERO
            && let Err(error) = spec.check_fits(device_memory)
        {
            return refuse(RefusalCode::BadSpec, error.to_string());
        }
        let members = instance.members.get(&gpu).map_or(0, Vec::len) + 1;
        let Some(quota) = part(spec.quota(), members, members - 1) else {
            let text = format!("{} divided by {members} processes is less than 0.01%", spec.quota());
            return refuse(RefusalCode::BadSpec, text);
        };
        let Some((slot, generation)) = self.clients.next(self.config.max_clients) else {
            let text = format!("{} clients are served already (max_clients)", self.config.max_clients);
            return refuse(RefusalCode::Full, text);
        };
        let client = ClientId::new(slot, generation);
        // Others make room first, so that the instance never has more than its limit.
        self.divide(now, instance_id, gpu, false, Some(members), out);
        let share = Share { quota, sm: spec.sm() };
        if !self.token(now, TokenEvent::ClientJoined { client, gpu, share }, out) {
            self.divide(now, instance_id, gpu, false, None, out);
            return refuse(RefusalCode::Full, "the token engine takes no more clients or devices".into());
        }
        self.add_device(gpu, uuid, memory);
        self.ledger.set_tenant((gpu, instance_id), spec.memory());
        let account = self.ledger.open((gpu, instance_id), allocated);
        let samples = [(now, Duration::ZERO); 2];
        let resumes = now.saturating_add(self.debts.wait(now, &(name, uuid), quota.limit()));
        self.clients.insert(Client {
            conn,
            gpu,
            instance: instance_id,
            quota,
            account,
            launches: 0,
            waited: Duration::ZERO,
            samples,
            since: (resumes, Duration::ZERO),
            largest: (now, quota.limit()),
            resumes,
            waits: None,
        });
        if let Some(session) = self.sessions.get_mut(&conn) {
            session.clients.push(client);
        }
        self.classify(now, client, class);
        if let Some(instance) = self.instances.get_mut(&instance_id) {
            instance.members.entry(gpu).or_default().push(client);
            self.journal.note(now, &Note { client, name: instance.name.clone(), pid });
        }
        out.push(Effect::Send(
            conn,
            ToClient::Attached {
                ordinal,
                client,
                gpu,
                spec: spec.with_quota(quota),
                window: self.engine.window(),
                in_flight: self.config.in_flight,
            },
        ));
        Ok(())
    }

    fn leave(&mut self, now: Timestamp, id: ClientId, out: &mut Vec<Effect>) {
        let overuse = self.overuse(now, id, out);
        let Some(client) = self.clients.remove(id.slot(), id.generation()) else { return };
        self.waiting.remove(&(client.resumes, id));
        if let Some((owed, limit)) = overuse
            && let (Some(instance), Some(device)) =
                (self.instances.get(&client.instance), self.device(client.gpu))
        {
            let most = (self.max_debt, self.config.max_clients as usize);
            self.debts.add(now, (instance.name.clone(), device.uuid), owed, limit, most);
        }
        self.token(now, TokenEvent::ClientLeft { client: id }, out);
        self.scaling.leave(now, id);
        self.ledger.close(client.account);
        let mut alone = true;
        if let Some(instance) = self.instances.get_mut(&client.instance)
            && let Some(members) = instance.members.get_mut(&client.gpu)
        {
            members.retain(|other| *other != id);
            alone = members.is_empty();
            if alone {
                instance.members.remove(&client.gpu);
            }
        }
        if alone {
            self.ledger.forget((client.gpu, client.instance));
        } else {
            self.divide(now, client.instance, client.gpu, false, None, out);
        }
        if let Some(Some(device)) = self.devices.get_mut(client.gpu.index()) {
            device.clients -= 1;
            if device.clients == 0 && !device.listed {
                // Learned from a client, so forgotten with the last: invented UUIDs cannot fill the table.
                self.devices[client.gpu.index()] = None;
            }
        }
    }

    fn reserve(&mut self, conn: ConnId, client: ClientId, bytes: Bytes, wish: Bytes, out: &mut Vec<Effect>) {
        let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) else { return };
        let answer = match self.ledger.reserve(&mut entry.account, bytes, wish) {
            Ok(bytes) => ToClient::MemoryGrant { client, bytes },
            Err(denied) => {
                self.metrics.memory_denied.inc();
                ToClient::MemoryDeny { client, free: denied.free }
            }
        };
        out.push(Effect::Send(conn, answer));
    }

    /// Gives each member of an instance on a GPU its part (as one of `of`, or of as many as there are), those who
    /// lose first. With `tell_all` also those whose share of time stays hear of the spec.
    fn divide(
        &mut self,
        now: Timestamp,
        instance: u32,
        gpu: GpuId,
        tell_all: bool,
        of: Option<usize>,
        out: &mut Vec<Effect>,
    ) {
        let Some(entry) = self.instances.get(&instance) else { return };
        let spec = entry.spec;
        let members = entry.members.get(&gpu).cloned().unwrap_or_default();
        let n = of.unwrap_or(members.len());
        for growing in [false, true] {
            for (index, id) in members.iter().enumerate() {
                let Some(quota) = part(spec.quota(), n, index) else { continue };
                let Some(client) = self.clients.get_mut(id.slot(), id.generation()) else { continue };
                if (quota.limit() > client.quota.limit()) != growing || (quota == client.quota && !tell_all) {
                    continue;
                }
                client.quota = quota;
                let conn = client.conn;
                let share = Share { quota, sm: spec.sm() };
                self.token(now, TokenEvent::ShareChanged { client: *id, share }, out);
                self.scaling.quota_changed(now, *id, quota);
                let spec = spec.with_quota(quota);
                out.push(Effect::Send(conn, ToClient::ShareChanged { client: *id, spec }));
            }
        }
    }

    fn device(&self, gpu: GpuId) -> Option<&Device> {
        self.devices.get(gpu.index())?.as_ref()
    }

    /// The number of a device: its own, or the lowest free one if any device may be used.
    fn find_device(&self, uuid: DeviceUuid) -> Option<GpuId> {
        let is = |device: &Option<Device>| device.as_ref().is_some_and(|device| device.uuid == uuid);
        let found = self.devices.iter().position(is);
        let free = || {
            let any = self.config.devices.is_empty();
            any.then(|| self.devices.iter().position(Option::is_none).unwrap_or(self.devices.len()))
        };
        found.or_else(free).and_then(|index| u32::try_from(index).ok()).map(GpuId)
    }

    fn add_device(&mut self, gpu: GpuId, uuid: DeviceUuid, memory: Bytes) {
        if gpu.index() >= self.devices.len() {
            self.devices.resize_with(gpu.index() + 1, || None);
        }
        let device =
            self.devices[gpu.index()].get_or_insert(Device { uuid, memory, listed: false, clients: 0 });
        if device.memory == Bytes::ZERO {
            device.memory = memory;
        }
        device.clients += 1;
        self.limit_device(gpu.index());
    }

    fn limit_device(&mut self, index: usize) {
        let Some(Some(device)) = self.devices.get(index) else { return };
        if device.memory > Bytes::ZERO
            && let Ok(number) = u32::try_from(index)
        {
            let limit = device.memory.saturating_sub(self.config.memory_headroom);
            self.ledger.set_device(GpuId(number), limit);
        }
    }

    fn invariants(&self) {
        if !cfg!(debug_assertions) || self.clients.len() > 64 {
            return;
        }
        for (slot, generation, client) in self.clients.iter() {
            let id = ClientId::new(slot, generation);
            assert!(self.sessions[&client.conn].clients.contains(&id), "a client has a session");
            assert!(self.instances[&client.instance].members[&client.gpu].contains(&id), "and an instance");
        }
        for (id, instance) in &self.instances {
            for (gpu, members) in &instance.members {
                let entries = members.iter().filter_map(|id| self.clients.get(id.slot(), id.generation()));
                let limits: u32 = entries.clone().map(|client| u32::from(client.quota.limit().get())).sum();
                assert_eq!(limits, u32::from(instance.spec.quota().limit().get()), "parts add up");
                let held: Bytes = entries.map(|client| client.account.held()).sum();
                assert_eq!(held, self.ledger.tenant_held((*gpu, *id)), "so do accounts");
            }
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("clients", &self.clients.len()).finish_non_exhaustive()
    }
}

struct Hello {
    run: u64,
    name: String,
    program: String,
    spec: ResourceSpec,
    on_loss: OnDaemonLoss,
}

struct Refusal {
    code: RefusalCode,
    text: String,
}

impl Refusal {
    /// Refuses the peer.
    fn push(self, conn: ConnId, out: &mut Vec<Effect>) {
        let reason = DropReason::from(self.code);
        self.tell(conn, out);
        out.push(Effect::Drop(conn, reason));
    }

    /// Refuses what it asked for, and nothing else.
    fn tell(self, conn: ConnId, out: &mut Vec<Effect>) {
        tracing::info!(code = ?self.code, text = %self.text, "refused");
        out.push(Effect::Send(conn, ToClient::Refused { code: self.code, text: self.text }));
    }
}

fn token_error_label(error: &TokenError) -> &'static str {
    match error {
        TokenError::StaleLease { .. } => "stale_lease",
        TokenError::UsageShrank { .. } => "usage_shrank",
        TokenError::UnknownClient { .. } => "unknown_client",
        TokenError::ClientExists { .. } => "client_exists",
        TokenError::TooManyClients { .. } => "too_many_clients",
        TokenError::UnknownGpu { .. } => "unknown_gpu",
        TokenError::BadShare { .. } => "bad_share",
        TokenError::TimeWentBack { .. } => "time_went_back",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_quota_add_up_to_it() {
        let quota: QuotaRange = "0.2:0.5".parse().unwrap();
        for n in 1..=40 {
            let parts: Vec<_> = (0..n).map(|index| part(quota, n, index).unwrap()).collect();
            assert_eq!(parts.iter().map(|part| u32::from(part.limit().get())).sum::<u32>(), 5_000);
            assert_eq!(parts.iter().map(|part| u32::from(part.request().get())).sum::<u32>(), 2_000);
        }
        let tiny: QuotaRange = "0.0002".parse().unwrap();
        assert!(part(tiny, 2, 1).is_some());
        assert!(part(tiny, 3, 2).is_none(), "not a basis point for each");
    }
}
