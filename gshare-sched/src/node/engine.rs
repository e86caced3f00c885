//! What the daemon knows and decides, apart from sockets: instances, clients, shares and memory.
//!
//! # Problem
//! Processes come and go, several belong to one instance, and the token engine knows none of that: it knows clients.
//! This module turns what peers say into engine events, and the engine's orders into frames.
//!
//! # Terms
//! - **session**: one connection that has said Hello; one process.
//! - **instance**: the sessions of one run under one name; they share one spec.
//! - **client**: one session on one GPU; what a hook knows itself by.
//! - **tenant**: one instance on one GPU, with one or several clients, its members; what the engine schedules.
//!
//! # Rules
//! 1. A name belongs to one run of one user while any of its processes lives. Another run with that name is refused, and
//!    so is another user, whatever number its run has. The configuration may reserve a name for a user.
//! 2. The spec is the configuration's for that name; else what the first process of the run asked for, if the
//!    configuration lets unlisted clients in.
//! 3. A tenant has one account in the engine, with the whole share of its instance; its members hold its token in turns
//!    ([`Turns`]). So a member that does not launch takes nothing from the others, and at no instant have they more
//!    than the limit together. The co-scaler and the debts of a name know tenants too.
//! 4. For the time when this daemon is away each of `n` members is given `1/n` of request and limit; what the division
//!    leaves goes to the first ones, one basis point each, so that the sum is exact. Shrinking parts are sent before
//!    growing ones. Example: limit 50 %, three clients: 16.67, 16.67, 16.66 %.
//! 5. A reservation of memory that does not fit is tried once more after the slack of others was called back: of the
//!    instance's other processes if its limit is in the way, of all clients of the device if that is full. A view of the
//!    instance's memory is told from what its processes say they use at that time. Both wait for the answers of
//!    others, and so does the answer to the operator's question ([`Inquiries`]).
//! 6. A process that was served by a daemon before says which part of the limit it keeps to. Until its siblings may be
//!    expected back ([`SETTLE`]), each process of its tenant is given no more than its part.
//! 7. A message that does not fit the state of its connection ends the connection, and that one only. What can cross
//!    on the wire (a return after a revoke) is counted and otherwise ignored.
//! 8. What a tenant had beyond its limit when it left is paid back before the next of its name gets a token ([`Debts`]).
//! 9. A device that is not served, or on which the spec cannot be met, is refused, and the connection goes on: the process
//!    may have others. Attaches are answered in their order, so the refusal is of the first that is not answered yet.
//!
//! # Invariants
//! Each client has a session and a place among its tenant's; parts of a tenant's members add up to its limit, and GPU
//! time charged to them to what the engine charged the tenant; the ledger agrees with the clients.
//!
//! # Cost
//! A token message costs two table look-ups and the engine, and O(members of the tenant). Joining and leaving cost
//! O(members).

use crate::config::{Config, ConfigError, DeviceUuid};
use crate::debts::{Debts, scaled};
use crate::inquiry::{Inquiries, Over, Purpose};
use crate::journal::{Journal, Note};
use crate::memory::{self, ClientAccount, Ledger};
use crate::metrics::{DropReason, Metrics};
use crate::names::{is_printable, printable};
use crate::peer::Peer;
use crate::scaling::{Resize, Scaling};
use crate::slots::Slots;
use crate::snapshot::{ClientSnapshot, DeviceSnapshot};
use crate::turns::Turns;
use gshare_core::scale::{ScaleState, ServiceClass};
use gshare_core::token::{ThrottleReason, TokenScheduler};
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, Duration, GpuId, LeaseId, Quota, QuotaRange, ResourceSpec, Share, Timestamp,
    TokenAction, TokenError, TokenEvent,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Name of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// How long processes of one run may take to come back one after the other: their longest delay between two attempts to
/// connect is 0.4 s.
const SETTLE: Duration = Duration::from_millis(1_000);

/// What the server shall do, in order.
#[derive(Debug)]
pub(crate) enum Effect {
    /// Send a frame.
    Send(ConnId, ToClient),
    /// Close the connection once what was sent before is on its way.
    Drop(ConnId, DropReason),
    /// The round of questions with this number is over, which [`Node::ask_for_use`] began.
    Stated(u32),
}

#[derive(Debug)]
struct Session {
    peer: Peer,
    instance: u32,
    program: String,
    /// What the process calls itself in its own PID namespace.
    own_pid: u32,
    on_loss: OnDaemonLoss,
    /// Said by its process; the configuration's goes before it. Without either its share is fixed.
    class: Option<ServiceClass>,
    clients: Vec<ClientId>,
}

#[derive(Debug)]
struct Instance {
    name: String,
    run: RunId,
    /// User of its first process, and so of all.
    uid: u32,
    /// What its first process asked for, used where the configuration says nothing.
    asked: ResourceSpec,
    spec: ResourceSpec,
    sessions: u32,
    tenants: BTreeMap<GpuId, TenantId>,
}

/// Name of a tenant: a client of the engine. A newtype, since hooks know clients by ids of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TenantId(ClientId);

/// One instance on one GPU.
#[derive(Debug)]
struct Tenant {
    gpu: GpuId,
    instance: u32,
    turns: Turns,
    /// What its first member said of itself.
    class: Option<ServiceClass>,
    /// Since when it has its limit and might have had tokens, and GPU time used before.
    since: (Timestamp, Duration),
    /// The largest limit that it had in the window before the first.
    largest: (Timestamp, Quota),
    /// When the debts of its name are paid back: no token before.
    resumes: Timestamp,
    /// Until then siblings of its first members may come back from another daemon, and hold their parts of the memory.
    settles: Option<Timestamp>,
}

#[derive(Debug)]
struct Client {
    conn: ConnId,
    tenant: TenantId,
    /// What it keeps to while this daemon is away: its part of the instance's share.
    part: QuotaRange,
    account: ClientAccount,
    /// The most memory it was told to hold without a daemon.
    memory_part: Bytes,
    /// Memory in use, as it last said.
    used: Option<Bytes>,
    launches: u64,
    waited: Duration,
    /// GPU time used at two earlier times, a second or more apart: the share in between is the one measured last.
    samples: [(Timestamp, Duration); 2],
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
    tenants: Slots<Tenant>,
    devices: Vec<Option<Device>>,
    ledger: Ledger,
    inquiries: Inquiries,
    scaling: Scaling,
    debts: Debts,
    /// The most overuse that is kept of one tenant.
    max_debt: Duration,
    /// Tenants that wait until the debts of their name are paid back.
    waiting: BTreeSet<(Timestamp, TenantId)>,
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
            tenants: Slots::default(),
            devices: Vec::new(),
            ledger: Ledger::default(),
            inquiries: Inquiries::default(),
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
        let gpu = |client: &Client| self.tenant(client.tenant).map(|tenant| tenant.gpu);
        self.clients.iter().any(|(_, _, client)| !seen.insert(gpu(client)))
    }

    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let resumes = self.waiting.first().map(|(resumes, _)| *resumes);
        let (tokens, scaling) = (self.engine.next_deadline(), self.scaling.next_deadline());
        [tokens, scaling, resumes, self.inquiries.next_deadline()].into_iter().flatten().min()
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
                    self.returned(now, client, lease, used, again != 0, out);
                    self.sample(now, client);
                }
            }
            ToDaemon::Usage { client, lease, used, launches, waited } => {
                if self.owns(conn, client, out) {
                    if let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) {
                        (entry.launches, entry.waited) = (launches, waited);
                    }
                    if let Some(TenantId(tenant)) = self.tenant_of_lease(client, lease) {
                        let event = TokenEvent::UsageReported { client: tenant, lease, used };
                        self.token(now, event, out);
                    }
                    self.sample(now, client);
                }
            }
            ToDaemon::MemoryReserve { client, bytes, wish } => {
                if self.owns(conn, client, out) {
                    match self.inquiries.queue(client, bytes, wish) {
                        None => self.reserve(now, client, bytes, wish, false, out),
                        Some(true) => {}
                        Some(false) => out.push(Effect::Drop(conn, DropReason::Protocol)),
                    }
                }
            }
            ToDaemon::MemoryUsed { client, round, used } => {
                if self.owns(conn, client, out) {
                    if let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) {
                        entry.used = Some(used);
                    }
                    let over = self.inquiries.answered(round, client);
                    self.rounds_over(now, over, out);
                }
            }
            ToDaemon::MemoryQuery { client } => {
                if self.owns(conn, client, out) {
                    self.view(now, client, out);
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
            ToDaemon::Hello { run, name, program, spec, on_loss, pid_start, pid } => {
                let program = printable(&program).into_owned();
                let run = match run {
                    0 => RunId::Process { pid: peer.pid, start: pid_start },
                    number => RunId::Number(number),
                };
                let name = match peer.pid {
                    _ if !name.is_empty() => name,
                    // In a PID namespace that is not ours to see.
                    0 => format!("{program}-c{}.{}", conn.slot, conn.generation),
                    pid => format!("{program}-{pid}"),
                };
                self.hello(conn, peer, Hello { run, name, program, spec, on_loss, own_pid: pid }, out);
            }
            ToDaemon::Attach { ordinal, device, device_memory, allocated, part } => {
                let uuid = DeviceUuid(device);
                match self.attach(now, conn, ordinal, uuid, device_memory, (allocated, part), out) {
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
                if self.owns(conn, client, out)
                    && let Some(entry) = self.clients.get(client.slot(), client.generation())
                {
                    self.scaling.iteration(now, entry.tenant.0, first_launch, last_launch, launches);
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
        while let Some(&(_, tenant)) = self.waiting.first().filter(|(resumes, _)| *resumes <= now) {
            self.waiting.pop_first();
            self.token(now, TokenEvent::TokenRequested { client: tenant.0 }, out);
        }
        self.scale(now, out);
        let over = self.inquiries.due(now);
        self.rounds_over(now, over, out);
    }

    fn tenant(&self, TenantId(id): TenantId) -> Option<&Tenant> {
        self.tenants.get(id.slot(), id.generation())
    }

    fn tenant_mut(&mut self, TenantId(id): TenantId) -> Option<&mut Tenant> {
        self.tenants.get_mut(id.slot(), id.generation())
    }

    /// A client wants a token. The engine is asked for its tenant, once the debts of the name are paid back.
    fn ask(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<Effect>) {
        let Some(&Client { conn, tenant: id, .. }) = self.clients.get(client.slot(), client.generation())
        else {
            return;
        };
        let Some(tenant) = self.tenant_mut(id) else { return };
        let waited = tenant.turns.of(client).1.is_some();
        let (asks, resumes) = (tenant.turns.ask(now, client), tenant.resumes);
        if now < resumes {
            self.waiting.insert((resumes, id));
            if !waited {
                self.metrics.throttles.inc();
                let (until, reason) = (resumes, ThrottleReason::LimitReached);
                out.push(Effect::Send(conn, ToClient::Throttle { client, until, reason }));
            }
        } else if asks {
            self.token(now, TokenEvent::TokenRequested { client: id.0 }, out);
        }
    }

    /// A client returns a lease of its tenant's, which may go to another member next.
    fn returned(
        &mut self,
        now: Timestamp,
        client: ClientId,
        lease: LeaseId,
        used: Duration,
        again: bool,
        out: &mut Vec<Effect>,
    ) {
        let taken = self.tenant_of_lease(client, lease).is_some_and(|id| {
            let turns = self.tenant_mut(id).map(|tenant| &mut tenant.turns);
            let wants = turns.is_some_and(|turns| turns.wants_again(now, client, lease, again));
            self.token(now, TokenEvent::TokenReturned { client: id.0, lease, used, again: wants }, out)
        });
        if again && !taken {
            // The return has crossed a revoke on the wire; the wish stands.
            self.ask(now, client, out);
        }
    }

    /// The tenant of a client that may settle this lease. Late messages and another member's lease are counted as stale.
    fn tenant_of_lease(&self, client: ClientId, lease: LeaseId) -> Option<TenantId> {
        let id = self.clients.get(client.slot(), client.generation())?.tenant;
        let owns = self.tenant(id)?.turns.owns(client, lease);
        if !owns {
            self.metrics.refused_event(token_error_label(&TokenError::StaleLease { client, lease }));
        }
        owns.then_some(id)
    }

    /// A period of the co-scaler may have ended: puts its shares in force. Hooks are not told: a share of theirs is what
    /// they keep should this daemon be lost.
    fn scale(&mut self, now: Timestamp, out: &mut Vec<Effect>) {
        let mut resizes = core::mem::take(&mut self.resizes);
        let used = |client| self.engine.client(client).map(|status| status.total_used);
        self.scaling.period(now, used, &mut resizes);
        for Resize { client, quota } in resizes.drain(..) {
            let Some(tenant) = self.tenant(TenantId(client)) else { continue };
            let Some(instance) = self.instances.get(&tenant.instance) else { continue };
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
            for (gpu, tenant) in &instance.tenants {
                let members = self.tenant(*tenant).map_or(1, |tenant| tenant.turns.members().len());
                let value = |key: &str, message: String| ConfigError::Value {
                    line: 0,
                    key: format!("client `{}`: {key}", instance.name),
                    message,
                };
                let memory = self.device(*gpu).map_or(Bytes::ZERO, |device| device.memory);
                if memory > Bytes::ZERO {
                    spec.check_fits(memory).map_err(|error| value("memory", error.to_string()))?;
                }
                if part(spec.quota(), members, members - 1).is_none() {
                    let message = format!("less than 0.01% for each of its {members} processes");
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
            let quota = spec.quota();
            let share = Share { quota, sm: spec.sm() };
            for (gpu, tenant) in instance.tenants.clone() {
                self.ledger.set_tenant((gpu, id), spec.memory());
                if changed {
                    self.token(now, TokenEvent::ShareChanged { client: tenant.0, share }, out);
                    self.scaling.quota_changed(now, tenant.0, quota);
                    self.divide(tenant, true, None, out);
                    self.divide_memory(now, tenant, None, out);
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
            let TenantId(tenant_id) = client.tenant;
            let tenant = self.tenant(client.tenant)?;
            let status = self.engine.client(tenant_id)?;
            let session = self.sessions.get(&client.conn)?;
            let instance = self.instances.get(&tenant.instance)?;
            let scale = self.scaling.client(tenant_id);
            let (total, waits) = tenant.turns.of(id);
            let (since, used) = client.samples[0];
            let elapsed = now.saturating_since(since).as_nanos();
            let late = total.as_nanos().saturating_sub(used.as_nanos());
            let quota = instance.spec.quota();
            #[expect(clippy::cast_precision_loss, reason = "a report")]
            let measured = if elapsed == 0 { 0.0 } else { late as f64 / elapsed as f64 };
            Some(ClientSnapshot {
                client: id,
                name: instance.name.clone(),
                pid: session.peer.pid,
                uid: session.peer.uid,
                program: session.program.clone(),
                gpu: tenant.gpu,
                quota_request: quota.request().as_fraction(),
                quota_limit: quota.limit().as_fraction(),
                sm: instance.spec.sm().as_fraction(),
                measured,
                total_used_ns: total,
                window_used_ns: status.window_used,
                holds_token: tenant.turns.holds(id),
                waiting_ns: waits.map(|since| now.saturating_since(since)),
                waited_ns: client.waited,
                launches: client.launches,
                memory_bytes: self.memory_of(client),
                memory_limit_bytes: instance.spec.memory(),
                on_daemon_loss: session.on_loss,
                class: scale.map(|scale| scale.class),
                scale_state: scale.and_then(|scale| match scale.state {
                    ScaleState::None => self.scaling.gpu(tenant.gpu),
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

    /// Why no journal is written although one is configured.
    pub(crate) fn journal_failure(&self) -> Option<&str> {
        self.journal.failure()
    }

    /// Writes down what was journalled so far; to be called before frames are sent.
    pub(crate) fn write_journal(&mut self) {
        self.journal.flush(self.now);
    }

    pub(crate) fn finish(&mut self) {
        self.journal.finish(self.now);
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
            self.journal.refused(now);
            tracing::debug!(%error, ?event, "the engine refused an event");
            return false;
        }
        self.journal.actions(now, &self.actions);
        self.metrics.observe(now, &event, &self.actions);
        if let Some((client, old)) = changes {
            self.limit_changed(now, TenantId(client), old);
        }
        self.orders(now, event, out);
        true
    }

    /// Turns what the engine has done into frames for members. In the engine's own order: what expired, the event, grants.
    fn orders(&mut self, now: Timestamp, event: TokenEvent, out: &mut Vec<Effect>) {
        let mut actions = core::mem::take(&mut self.actions);
        for action in &actions {
            let &TokenAction::Revoke { client: tenant, lease, reason } = action else { continue };
            self.metrics.revokes.inc();
            let turns = self.tenant_mut(TenantId(tenant)).map(|tenant| &mut tenant.turns);
            if let Some(client) = turns.and_then(|turns| turns.revoked(lease)) {
                self.send(client, ToClient::Revoke { client, lease, reason }, out);
            }
        }
        if let TokenEvent::TokenReturned { client, lease, used, .. }
        | TokenEvent::UsageReported { client, lease, used } = event
            && let Some(tenant) = self.tenant_mut(TenantId(client))
        {
            tenant.turns.charged(lease, used);
            if matches!(event, TokenEvent::TokenReturned { .. }) {
                tenant.turns.returned(lease);
            }
        }
        let mut more = Vec::new();
        for action in actions.drain(..) {
            match action {
                TokenAction::Grant { client: tenant, lease, budget, expires } => {
                    self.metrics.grants.inc();
                    let turns = self.tenant_mut(TenantId(tenant)).map(|tenant| &mut tenant.turns);
                    match turns.and_then(|turns| turns.granted(lease, budget)) {
                        Some(client) => {
                            self.send(client, ToClient::Grant { client, lease, budget, expires }, out);
                        }
                        None => {
                            let (used, again) = (Duration::ZERO, false);
                            more.push(TokenEvent::TokenReturned { client: tenant, lease, used, again });
                        }
                    }
                }
                TokenAction::Throttle { client: tenant, until, reason } => {
                    self.metrics.throttles.inc();
                    let turns = self.tenant(TenantId(tenant)).map(|tenant| &tenant.turns);
                    let waiting: Vec<_> = turns.into_iter().flat_map(Turns::in_line).collect();
                    for client in waiting {
                        self.send(client, ToClient::Throttle { client, until, reason }, out);
                    }
                }
                TokenAction::Revoke { client: tenant, .. } => {
                    more.push(TokenEvent::TokenRequested { client: tenant });
                }
                _ => {}
            }
        }
        self.actions = actions;
        for event in more {
            // Members that wait have not asked the engine while another one held the lease.
            let asks = |client| self.tenant(TenantId(client)).is_some_and(|tenant| tenant.turns.must_ask());
            if !matches!(event, TokenEvent::TokenRequested { client } if !asks(client)) {
                self.token(now, event, out);
            }
        }
    }

    fn send(&self, client: ClientId, frame: ToClient, out: &mut Vec<Effect>) {
        if let Some(entry) = self.clients.get(client.slot(), client.generation()) {
            out.push(Effect::Send(entry.conn, frame));
        }
    }

    /// From now on a tenant is measured by another limit than `old`, and pays back at its rate.
    fn limit_changed(&mut self, now: Timestamp, id: TenantId, old: Quota) {
        let window = self.engine.window();
        let Some(status) = self.engine.client(id.0) else { return };
        let Some(tenant) = self.tenant_mut(id) else { return };
        let limit = status.share.quota.limit();
        let before = if now < tenant.largest.0 { tenant.largest.1 } else { old };
        tenant.largest = (now.saturating_add(window), before.max(old).max(limit));
        tenant.since = (now, status.total_used);
        let resumed = tenant.resumes;
        if now < resumed {
            let resumes = now.saturating_add(scaled(resumed.saturating_since(now), old, limit));
            (tenant.resumes, tenant.since.0) = (resumes, resumes);
            if self.waiting.remove(&(resumed, id)) {
                self.waiting.insert((resumes, id));
            }
        }
    }

    /// What a tenant that is about to leave had beyond its limit, and the limit: what the engine carries; or, since it
    /// leaves nothing behind for windows to come, what it had faster than at the limit's rate.
    fn overuse(&mut self, now: Timestamp, id: TenantId, out: &mut Vec<Effect>) -> Option<(Duration, Quota)> {
        let &Tenant { since: (since, before), largest, .. } = self.tenant(id)?;
        let status = self.engine.client(id.0)?;
        let limit = status.share.quota.limit();
        if limit.is_zero() || limit == Quota::WHOLE {
            return None;
        }
        let most = if now < largest.0 { largest.1 } else { limit }.of(self.engine.window());
        if status.window_used > most {
            // The windows that have passed meanwhile paid back some.
            self.token(now, TokenEvent::DeadlineReached, out);
        }
        let status = self.engine.client(id.0)?;
        let fair = before.saturating_add(limit.of(now.saturating_since(since)));
        let owed = status.window_used.saturating_sub(most).max(status.total_used.saturating_sub(fair));
        (!owed.is_zero()).then_some((owed, limit))
    }

    fn sample(&mut self, now: Timestamp, id: ClientId) {
        let Some(client) = self.clients.get(id.slot(), id.generation()) else { return };
        let Some((used, _)) = self.tenant(client.tenant).map(|tenant| tenant.turns.of(id)) else { return };
        if let Some(client) = self.clients.get_mut(id.slot(), id.generation())
            && now.saturating_since(client.samples[1].0) >= Duration::from_millis(1000)
        {
            client.samples = [client.samples[1], (now, used)];
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
        if !is_printable(&hello.name) {
            let text = format!("name `{}` has characters that cannot be printed", printable(&hello.name));
            return refusal(RefusalCode::BadSpec, text).push(conn, out);
        }
        let id = match self.names.get(&hello.name) {
            Some(id) => {
                // The number of a run may be seen or computed by others, its user cannot be made up.
                let own = |instance: &&Instance| instance.run == hello.run && instance.uid == peer.uid;
                let instance = self.instances.get(id).filter(own);
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
                if let Some(owner) = self.config.owner(&hello.name).filter(|owner| *owner != peer.uid) {
                    let text = format!("name `{}` belongs to user {owner}, not {}", hello.name, peer.uid);
                    return refusal(RefusalCode::NotAllowed, text).push(conn, out);
                }
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
                    uid: peer.uid,
                    asked: hello.spec,
                    spec: listed.copied().unwrap_or(hello.spec),
                    sessions: 0,
                    tenants: BTreeMap::new(),
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
            own_pid: hello.own_pid,
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

    /// Has a tenant take part in scaling as its class says, or not at all.
    fn classify(&mut self, now: Timestamp, id: TenantId) {
        let Some(tenant) = self.tenant(id) else { return };
        let Some(instance) = self.instances.get(&tenant.instance) else { return };
        let Some(class) = self.config.class(&instance.name).or(tenant.class) else { return };
        if let Err(error) = self.scaling.join(now, id.0, tenant.gpu, instance.spec.quota(), class) {
            let (client, name) = (id.0, instance.name.as_str());
            tracing::warn!(%client, name, %class, %error, "takes no part in scaling: its share is fixed");
        }
    }

    /// Puts the classes of the configuration in force, where they are others than in `old`. All tenants that take part no
    /// more, or as something else, first give up what they had.
    fn reclassify(&mut self, now: Timestamp, old: &Config, out: &mut Vec<Effect>) {
        for (conn, session) in &self.sessions {
            let listed = self.listed_class(session.instance);
            let name = self.instances.get(&session.instance).map_or("", |instance| instance.name.as_str());
            if let Some(class) = listed
                && old.class(name) != listed
            {
                out.push(Effect::Send(*conn, ToClient::Class { class }));
            }
        }
        let mut changed = Vec::new();
        for (slot, generation, tenant) in self.tenants.iter() {
            let id = ClientId::new(slot, generation);
            let class = self.listed_class(tenant.instance).or(tenant.class);
            if self.scaling.client(id).map(|scale| scale.class) != class {
                changed.push((TenantId(id), tenant.instance));
            }
        }
        for (id, instance) in &changed {
            self.scaling.leave(now, id.0);
            let Some(spec) = self.instances.get(instance).map(|instance| instance.spec) else { continue };
            let share = Share { quota: spec.quota(), sm: spec.sm() };
            self.token(now, TokenEvent::ShareChanged { client: id.0, share }, out);
        }
        for (id, _) in changed {
            self.classify(now, id);
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
        (allocated, kept): (Bytes, Option<Bytes>),
        out: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let refuse = |code, text: String| Err(Refusal { code, text });
        let Some(session) = self.sessions.get(&conn) else {
            return refuse(RefusalCode::Protocol, "Attach before Hello".into());
        };
        let (instance_id, pid, class) = (session.instance, session.peer.pid, session.class);
        let clients = session.clients.clone();
        let Some(gpu) = self.find_device(uuid) else {
            return refuse(RefusalCode::UnknownDevice, format!("this daemon does not manage {uuid}"));
        };
        let of_gpu = |id: &ClientId| self.gpu_of(*id) == Some(gpu);
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
        if device_memory > Bytes::ZERO && allocated > device_memory {
            // Believed, it would leave nothing to anybody.
            let text = format!("{allocated} allocated is more than the device has: {device_memory}");
            return refuse(RefusalCode::BadSpec, text);
        }
        let tenant = instance.tenants.get(&gpu).copied();
        let present = tenant.and_then(|id| self.tenant(id)).map_or(0, |tenant| tenant.turns.members().len());
        let members = present + 1;
        let Some(part) = part(spec.quota(), members, members - 1) else {
            let text = format!("{} divided by {members} processes is less than 0.01%", spec.quota());
            return refuse(RefusalCode::BadSpec, text);
        };
        let Some((slot, generation)) = self.clients.next(self.config.max_clients) else {
            let text = format!("{} clients are served already (max_clients)", self.config.max_clients);
            return refuse(RefusalCode::Full, text);
        };
        let client = ClientId::new(slot, generation);
        let tenant = match tenant {
            Some(tenant) => tenant,
            None => self.open_tenant(now, instance_id, gpu, uuid, class, out)?,
        };
        // Others make room first, so that parts never add up to more than the limit.
        self.divide(tenant, false, Some(members), out);
        self.add_device(gpu, uuid, memory);
        self.ledger.set_tenant((gpu, instance_id), spec.memory());
        let account = self.ledger.open((gpu, instance_id), allocated);
        let samples = [(now, Duration::ZERO); 2];
        let memory_part = kept.map_or(account.held(), |kept| kept.min(spec.memory().unwrap_or(kept)));
        self.clients.insert(Client {
            conn,
            tenant,
            part,
            account,
            memory_part,
            used: None,
            launches: 0,
            waited: Duration::ZERO,
            samples,
        });
        if let Some(session) = self.sessions.get_mut(&conn) {
            session.clients.push(client);
        }
        if let Some(tenant) = self.tenant_mut(tenant) {
            tenant.turns.join(client);
        }
        // Names in the journal are those of the engine's clients.
        self.journal.note(now, &Note { client: tenant.0, name, pid });
        out.push(Effect::Send(
            conn,
            ToClient::Attached {
                ordinal,
                client,
                gpu,
                spec: spec.with_quota(part),
                window: self.engine.window(),
                in_flight: self.config.in_flight,
            },
        ));
        if kept.is_some() {
            self.expect_siblings(now, tenant);
        }
        self.divide_memory(now, tenant, None, out);
        Ok(())
    }

    /// An instance's first process on a GPU is there: the engine gets a client.
    fn open_tenant(
        &mut self,
        now: Timestamp,
        instance: u32,
        gpu: GpuId,
        uuid: DeviceUuid,
        class: Option<ServiceClass>,
        out: &mut Vec<Effect>,
    ) -> Result<TenantId, Refusal> {
        let full = |text: String| Refusal { code: RefusalCode::Full, text };
        let Some((slot, generation)) = self.tenants.next(self.config.max_clients) else {
            let text = format!("{} instances are served already (max_clients)", self.config.max_clients);
            return Err(full(text));
        };
        let Some(entry) = self.instances.get(&instance) else {
            return Err(full("no such instance".into()));
        };
        let (spec, name, uid) = (entry.spec, entry.name.clone(), entry.uid);
        let (id, share) = (ClientId::new(slot, generation), Share { quota: spec.quota(), sm: spec.sm() });
        if !self.token(now, TokenEvent::ClientJoined { client: id, gpu, share }, out) {
            return Err(full("the token engine takes no more clients or devices".into()));
        }
        let limit = spec.quota().limit();
        let resumes = now.saturating_add(self.debts.wait(now, &(uid, name, uuid), limit));
        self.tenants.insert(Tenant {
            gpu,
            instance,
            turns: Turns::default(),
            class,
            since: (resumes, Duration::ZERO),
            largest: (now, limit),
            resumes,
            settles: None,
        });
        if let Some(entry) = self.instances.get_mut(&instance) {
            entry.tenants.insert(gpu, TenantId(id));
        }
        self.classify(now, TenantId(id));
        Ok(TenantId(id))
    }

    fn leave(&mut self, now: Timestamp, id: ClientId, out: &mut Vec<Effect>) {
        let Some(tenant_id) = self.clients.get(id.slot(), id.generation()).map(|client| client.tenant) else {
            return;
        };
        let members = self.tenant(tenant_id).map_or(0, |tenant| tenant.turns.members().len());
        let overuse = if members == 1 { self.overuse(now, tenant_id, out) } else { None };
        let Some(client) = self.clients.remove(id.slot(), id.generation()) else { return };
        self.ledger.close(client.account);
        let over = self.inquiries.left(id);
        let Some(tenant) = self.tenant_mut(tenant_id) else { return };
        let (gpu, lease) = (tenant.gpu, tenant.turns.leave(id));
        if members == 1 {
            self.close_tenant(now, tenant_id, overuse, out);
        } else {
            if let Some((lease, used)) = lease {
                let again = tenant.turns.must_ask();
                self.token(now, TokenEvent::TokenReturned { client: tenant_id.0, lease, used, again }, out);
            }
            self.divide(tenant_id, false, None, out);
            self.divide_memory(now, tenant_id, None, out);
        }
        self.rounds_over(now, over, out);
        if let Some(Some(device)) = self.devices.get_mut(gpu.index()) {
            device.clients -= 1;
            if device.clients == 0 && !device.listed {
                // Learned from a client, so forgotten with the last: invented UUIDs cannot fill the table.
                self.devices[gpu.index()] = None;
            }
        }
    }

    /// A tenant's last process is gone. What it overused stays with its name.
    fn close_tenant(
        &mut self,
        now: Timestamp,
        id: TenantId,
        overuse: Option<(Duration, Quota)>,
        out: &mut Vec<Effect>,
    ) {
        let Some(tenant) = self.tenants.remove(id.0.slot(), id.0.generation()) else { return };
        self.waiting.remove(&(tenant.resumes, id));
        if let Some((owed, limit)) = overuse
            && let (Some(instance), Some(device)) =
                (self.instances.get(&tenant.instance), self.device(tenant.gpu))
        {
            let most = (self.max_debt, self.config.max_clients as usize);
            self.debts.add(now, (instance.uid, instance.name.clone(), device.uuid), owed, limit, most);
        }
        self.token(now, TokenEvent::ClientLeft { client: id.0 }, out);
        self.scaling.leave(now, id.0);
        self.ledger.forget((tenant.gpu, tenant.instance));
        if let Some(instance) = self.instances.get_mut(&tenant.instance) {
            instance.tenants.remove(&tenant.gpu);
        }
    }

    fn gpu_of(&self, client: ClientId) -> Option<GpuId> {
        let client = self.clients.get(client.slot(), client.generation())?;
        self.tenant(client.tenant).map(|tenant| tenant.gpu)
    }

    /// Grants a reservation, denies it, or begins to call slack back for it; `recalled`: that was done.
    fn reserve(
        &mut self,
        now: Timestamp,
        client: ClientId,
        bytes: Bytes,
        wish: Bytes,
        recalled: bool,
        out: &mut Vec<Effect>,
    ) {
        let Some(&Client { tenant, memory_part, .. }) = self.clients.get(client.slot(), client.generation())
        else {
            return;
        };
        let settles = self.tenant(tenant).and_then(|tenant| tenant.settles).filter(|settles| now < *settles);
        let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) else { return };
        let most = settles.map_or(Bytes(u64::MAX), |_| memory_part.saturating_sub(entry.account.held()));
        let given = if bytes > most {
            Err(most)
        } else {
            self.ledger.reserve(&mut entry.account, bytes, wish.min(most)).map_err(|denied| denied.free)
        };
        let passes = entry.account.held() > memory_part;
        match given {
            Ok(bytes) if passes => self.divide_memory(now, tenant, Some((client, bytes)), out),
            Ok(bytes) => self.send(client, ToClient::MemoryGrant { client, bytes }, out),
            Err(_) if settles.is_some() => {
                let purpose = Purpose::Reserve { client, bytes, wish, recalled };
                self.inquiries.begin(now, purpose, [], settles);
            }
            Err(free) => {
                let purpose = Purpose::Reserve { client, bytes, wish, recalled: true };
                let holders = if recalled { Vec::new() } else { self.holders(client, tenant, bytes) };
                if !self.inquire(now, purpose, holders, out) {
                    self.metrics.memory_denied.inc();
                    self.send(client, ToClient::MemoryDeny { client, free }, out);
                }
            }
        }
    }

    /// Clients that may have slack which would let a reservation of `bytes` fit.
    fn holders(&self, client: ClientId, tenant_id: TenantId, bytes: Bytes) -> Vec<ClientId> {
        let Some(tenant) = self.tenant(tenant_id) else { return Vec::new() };
        let own_limit = self.ledger.tenant_free((tenant.gpu, tenant.instance)) < bytes;
        let may_help = |entry: &Client| {
            self.memory_limit(entry.tenant).is_some()
                && if own_limit { entry.tenant == tenant_id } else { self.is_on(entry, tenant.gpu) }
        };
        let ids = self.clients.iter().filter(|(_, _, entry)| may_help(entry));
        ids.map(|(slot, generation, _)| ClientId::new(slot, generation)).filter(|id| *id != client).collect()
    }

    fn is_on(&self, client: &Client, gpu: GpuId) -> bool {
        self.tenant(client.tenant).is_some_and(|tenant| tenant.gpu == gpu)
    }

    /// The most that all members of a tenant may hold.
    fn memory_limit(&self, tenant: TenantId) -> Option<Bytes> {
        self.instances.get(&self.tenant(tenant)?.instance)?.spec.memory()
    }

    /// Asks clients how much memory they use, those that hold any; `false` if there is none to be waited for.
    fn inquire(
        &mut self,
        now: Timestamp,
        purpose: Purpose,
        clients: Vec<ClientId>,
        out: &mut Vec<Effect>,
    ) -> bool {
        let recall = u8::from(matches!(purpose, Purpose::Reserve { .. }));
        let holds = |id: &ClientId| {
            let entry = self.clients.get(id.slot(), id.generation());
            entry.is_some_and(|entry| entry.account.held() > Bytes::ZERO)
        };
        let holders = clients.into_iter().filter(holds);
        let Some((round, asked)) = self.inquiries.begin(now, purpose, holders, None) else { return false };
        for client in asked {
            self.send(client, ToClient::MemoryAsk { client, round, recall }, out);
        }
        true
    }

    /// Does what waited for rounds of questions.
    fn rounds_over(&mut self, now: Timestamp, over: impl IntoIterator<Item = Over>, out: &mut Vec<Effect>) {
        for Over { round, purpose } in over {
            match purpose {
                Purpose::Status => out.push(Effect::Stated(round)),
                Purpose::View { client } => self.send_view(client, out),
                Purpose::Reserve { client, bytes, wish, recalled } => {
                    self.reserve(now, client, bytes, wish, recalled, out);
                    while !self.inquiries.waits(client)
                        && let Some((bytes, wish)) = self.inquiries.next_queued(client)
                    {
                        self.reserve(now, client, bytes, wish, false, out);
                    }
                }
            }
        }
    }

    /// Begins to ask all clients with a limit how much memory they use. The number of the round is an effect when it is
    /// over; `None`: there is none to ask.
    pub(crate) fn ask_for_use(&mut self, now: Timestamp, out: &mut Vec<Effect>) -> Option<u32> {
        let limited = |(slot, generation, entry): (u32, u32, &Client)| {
            self.memory_limit(entry.tenant).map(|_| ClientId::new(slot, generation))
        };
        let clients = self.clients.iter().filter_map(limited).collect();
        let asked = self.inquire(now, Purpose::Status, clients, out);
        asked.then(|| self.inquiries.last())
    }

    /// A client wants to know what its siblings use.
    fn view(&mut self, now: Timestamp, client: ClientId, out: &mut Vec<Effect>) {
        let siblings = self.siblings(client);
        if !self.inquire(now, Purpose::View { client }, siblings, out) {
            self.send_view(client, out);
        }
    }

    fn siblings(&self, client: ClientId) -> Vec<ClientId> {
        let own = self.clients.get(client.slot(), client.generation());
        let tenant = own.and_then(|entry| self.tenant(entry.tenant));
        let members = tenant.into_iter().flat_map(|tenant| tenant.turns.members());
        members.filter(|member| *member != client).collect()
    }

    fn send_view(&self, client: ClientId, out: &mut Vec<Effect>) {
        for sibling in self.siblings(client) {
            let Some(entry) = self.clients.get(sibling.slot(), sibling.generation()) else { continue };
            let Some(session) = self.sessions.get(&entry.conn) else { continue };
            let frame = ToClient::MemoryMember { client, pid: session.own_pid, used: self.memory_of(entry) };
            self.send(client, frame, out);
        }
        self.send(client, ToClient::MemoryView { client }, out);
    }

    /// Memory that a client uses, as far as it said; else all that it holds.
    fn memory_of(&self, client: &Client) -> Bytes {
        let held = client.account.held();
        client.used.map_or(held, |used| used.min(held))
    }

    /// A process is back that was served before: its siblings may be under way, with what they hold.
    fn expect_siblings(&mut self, now: Timestamp, id: TenantId) {
        let Some(limit) = self.memory_limit(id) else { return };
        let parts: Bytes = self.members(id).map(|client| client.memory_part).sum();
        if let Some(tenant) = self.tenant_mut(id) {
            // Nothing is left for any process that is not here.
            let complete = parts >= limit;
            let settles = tenant.settles.unwrap_or(now.saturating_add(SETTLE));
            tenant.settles = Some(settles).filter(|_| !complete);
        }
    }

    fn members(&self, id: TenantId) -> impl Iterator<Item = &Client> {
        let members = self.tenant(id).into_iter().flat_map(|tenant| tenant.turns.members());
        members.filter_map(|member| self.clients.get(member.slot(), member.generation()))
    }

    /// Tells each member of a tenant what it may hold without a daemon: those first whose part shrinks, then what was
    /// granted, then the others.
    fn divide_memory(
        &mut self,
        now: Timestamp,
        id: TenantId,
        granted: Option<(ClientId, Bytes)>,
        out: &mut Vec<Effect>,
    ) {
        let settled =
            self.tenant(id).is_some_and(|tenant| tenant.settles.is_none_or(|settles| settles <= now));
        let limit = self.memory_limit(id).filter(|_| settled);
        let members: Vec<ClientId> =
            self.tenant(id).into_iter().flat_map(|tenant| tenant.turns.members()).collect();
        let held: Vec<Bytes> = self.members(id).map(|client| client.account.held()).collect();
        let parts = limit.map_or_else(Vec::new, |limit| memory::parts(limit, &held));
        for growing in [false, true] {
            if let Some((client, bytes)) = granted.filter(|_| growing) {
                self.send(client, ToClient::MemoryGrant { client, bytes }, out);
            }
            for (&client, &bytes) in members.iter().zip(&parts) {
                let Some(entry) = self.clients.get_mut(client.slot(), client.generation()) else { continue };
                if bytes != entry.memory_part && (bytes > entry.memory_part) == growing {
                    entry.memory_part = bytes;
                    self.send(client, ToClient::MemoryPart { client, bytes }, out);
                }
            }
        }
    }

    /// Tells each member of a tenant its part (as one of `of`, or of as many as there are), those first that lose. With
    /// `tell_all` also those whose part stays hear of the spec.
    fn divide(&mut self, id: TenantId, tell_all: bool, of: Option<usize>, out: &mut Vec<Effect>) {
        let Some(tenant) = self.tenant(id) else { return };
        let Some(spec) = self.instances.get(&tenant.instance).map(|entry| entry.spec) else { return };
        let members: Vec<ClientId> = tenant.turns.members().collect();
        let n = of.unwrap_or(members.len());
        for growing in [false, true] {
            for (index, id) in members.iter().enumerate() {
                let Some(quota) = part(spec.quota(), n, index) else { continue };
                let Some(client) = self.clients.get_mut(id.slot(), id.generation()) else { continue };
                if (quota.limit() > client.part.limit()) != growing || (quota == client.part && !tell_all) {
                    continue;
                }
                client.part = quota;
                let spec = spec.with_quota(quota);
                out.push(Effect::Send(client.conn, ToClient::ShareChanged { client: *id, spec }));
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
            let tenant = self.tenant(client.tenant).expect("and a tenant");
            assert!(tenant.turns.members().any(|member| member == id), "whose member it is");
        }
        for (slot, generation, tenant) in self.tenants.iter() {
            let (id, instance) = (ClientId::new(slot, generation), &self.instances[&tenant.instance]);
            assert_eq!(instance.tenants[&tenant.gpu].0, id, "a tenant has an instance");
            let entries =
                || tenant.turns.members().filter_map(|id| self.clients.get(id.slot(), id.generation()));
            let limits: u32 = entries().map(|client| u32::from(client.part.limit().get())).sum();
            assert_eq!(limits, u32::from(instance.spec.quota().limit().get()), "parts add up");
            let held: Bytes = entries().map(|client| client.account.held()).sum();
            assert_eq!(held, self.ledger.tenant_held((tenant.gpu, tenant.instance)), "so do accounts");
            let status = self.engine.client(id).expect("the engine knows every tenant");
            if tenant.turns.must_ask() && !self.waiting.contains(&(tenant.resumes, TenantId(id))) {
                assert!(status.waiting_since.is_some(), "who waits has asked");
            }
        }
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node").field("clients", &self.clients.len()).finish_non_exhaustive()
    }
}

/// What tells runs of one name apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RunId {
    /// The number that a starter gave to all processes of the run.
    Number(u64),
    /// A process that was given none is a run of its own.
    Process { pid: i32, start: u64 },
}

struct Hello {
    run: RunId,
    name: String,
    program: String,
    spec: ResourceSpec,
    on_loss: OnDaemonLoss,
    own_pid: u32,
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
#[path = "tests/memory.rs"]
mod memory_tests;
#[cfg(test)]
#[path = "tests/shares.rs"]
mod tests;
