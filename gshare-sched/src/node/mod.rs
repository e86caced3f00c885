//! The node: who may connect, what each process gets of the node's devices, and who has to wait for what.
//!
//! # Problem
//! Processes come and go, several belong to one instance, they hold GPU time and memory, and none of them can be trusted
//! to keep the books. The token scheduler divides time, but it knows only clients. A node decides everything else:
//! which processes are let in, under which name and share, how an instance's share is divided among its processes, who
//! pays back overuse, who may reserve memory. All of that is one engine, so that the daemon, a simulation and the replay
//! of a journal run the same decisions.
//!
//! # Terms
//! - **session**: one connection with an accepted Hello; one process.
//! - **instance**: the sessions of one run under one name; they share one spec.
//! - **client**: one session on one device; what a process knows itself by.
//! - **tenant**: one instance on one device, with one or several clients, its members; what the token scheduler knows.
//! - **listed name**: a name with a share in the configuration.
//! - **overuse**: GPU time beyond a limit. **Debt**: overuse of a tenant that has left.
//! - **slack**: memory that is granted and not used. **Recall**: the question that makes a client release its slack.
//! - **note**: what observers (journal, metrics, log) may want to know. No decision depends on one.
//!
//! # Rules
//! 1. **Names.** A name belongs to one run of one user while any of its processes lives. A process joins it by the number of
//!    the run, which is random, and as its user, which the kernel names. The configuration may reserve a name for a user.
//!    The share is the configuration's for that name, else what the first process of the run asked for, if the
//!    configuration lets unlisted names in.
//! 2. **Admission.** <a id="admission"></a> An instance is admitted to a device if its request for time can be met beside
//!    those of the instances that are there; an unlisted one also beside the requests of all listed names, there or not.
//!    So unlisted clients take nothing from listed ones. A listed name may name the one device on which its request is
//!    reserved. Requests can be met if they add up to at most the whole, or if a slot of every window is found for each, so
//!    that the SMs of the slots fit side by side at every instant. A request of 0 is always admitted. Example: `a` is
//!    listed with 30 %; unlisted requests of 99 % and 71 % are refused, one of 70 % is admitted, then one of 0 only.
//! 3. **Everybody is scheduled.** A process whose request is the whole device launches without tokens only while it is
//!    alone there. When a neighbour attaches, its request is stated as 99.99 %, and with that it takes tokens.
//! 4. **Time.** A tenant has one account with the token scheduler, with the whole share of its instance; its members hold
//!    its token in turns (`turns.rs`). So a member that does not launch takes nothing from the others, and at no instant
//!    have they more than the limit together.
//! 5. **Without a daemon** each of `n` members keeps to `1/n` of request and limit; what the division leaves goes to the
//!    first ones, one basis point each, so that the sum is exact. Parts that shrink are sent before parts that grow.
//!    Example: limit 50 %, three members: 16.67, 16.67, 16.66 %.
//! 6. **Overuse** of a tenant is the scheduler's while a member is there. A member that comes back after the end of its connection
//!    states its totals again: its use beyond the permission that it had is charged then. The use of a tenant beyond its limit, when its
//!    last member left, is a debt of its user, name and device: the next tenant of that name has no token before the debt is paid back,
//!    at the rate of the limit, and within 100 s (`debts.rs`).
//! 7. **Devices.** A device's memory is what the configuration says, else what the driver says ([`NodeEvent::DeviceFound`]). Where
//!    both are silent it is what the first client says, and [`DeviceView::source`] shows that. No process is believed that it
//!    holds more than there is. A user may have brought three devices of which only clients tell for each that is still
//!    free of [`max_gpus`], so that UUIDs that do not exist keep no other user from a device.
//! 8. **Memory** is reserved before it is allocated (`memory_account.rs`). A reservation that does not fit is tried once
//!    more after a recall: of the instance's other processes if its limit is in the way, of all clients of the device if
//!    that is full. A reservation, the view of an instance's memory and the operator's question wait for the answers of
//!    others for a bounded time (`inquiry.rs`).
//! 9. **After a restart** a process says which part of the memory limit it keeps to; one that no daemon has served has none,
//!    unless it is the only process of its run. Where a daemon was before ([`NodeConfig::predecessor`]), and until all siblings may be expected back ([`SETTLE`] after this node let its
//!    first process in, or after the first of the tenant came back), each process of the tenant is given no more than its part.
//! 10. **Vertical scaling** moves limits between those clients of a device that said their class (`co_scaling.rs`). A
//!     request is kept.
//! 11. **Refusals.** A process that is refused launches nothing, unless the configuration lets such processes run within
//!     the limits that they would have had. A device that is not served, or on which the spec cannot be met, is refused, and the connection goes
//!     on: the process may have others. Attaches are answered in their order. A message that does not fit the state of its
//!     connection ends the connection, and that one only. What can cross on the wire (a return after a revoke) is counted
//!     and otherwise ignored.
//!
//! # Invariants
//! Each client has a session and a place among its tenant's members; parts of a tenant's members add up to its limit;
//! the memory accounts agree with the clients; a member that waits has asked the scheduler, or waits for a debt; while
//! requests on a device add up to more than the whole, slots for all of them exist or the operator listed them. An event
//! that is refused, and one that is noted as [`Note::NoEffect`], changes nothing. Equal events at equal times give equal
//! actions: there is no clock and no randomness in here; the number of the run is given.
//!
//! # Cost
//! A token message costs two table look-ups and the token scheduler, and O(members of the tenant). Joining and leaving
//! cost O(clients of the node).
//!
//! # Example
//! ```
//! use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
//! use gshare_core::{Bytes, ClientId, ConnId, DeviceUuid, Duration, Engine, ResourceSpec, RunId, Timestamp, UseState};
//! use gshare_sched::node::{Node, NodeAction, NodeConfig, NodeEvent, Peer, vertical_scaler};
//! use gshare_sched::token::{MultiToken, MultiTokenConfig};
//!
//! let config = NodeConfig::default();
//! let scaler = vertical_scaler(config.max_clients)?;
//! let tokens = Box::new(MultiToken::new(MultiTokenConfig::default())?);
//! let mut node = Node::new(config, 1, tokens, scaler)?;
//! let (conn, peer) = (ConnId::new(0, 0), Peer { pid: 77, uid: 1000 });
//! let hello = ToDaemon::Hello {
//!     pid_start: 0,
//!     pid: 77,
//!     run: RunId::new(0x9f3a_11c5_7d20_8be4),
//!     name: "alice".into(),
//!     program: "python3".into(),
//!     spec: ResourceSpec::UNLIMITED.with_quota("0.3:0.8".parse()?),
//!     on_loss: OnDaemonLoss::Open,
//! };
//! let (memory, device) = (Bytes::from_gib(16), DeviceUuid::gpu([7; 16]));
//! let attach = ToDaemon::Attach {
//!     ordinal: 0,
//!     device,
//!     device_memory: memory,
//!     allocated: Bytes::ZERO,
//!     part: None,
//!     used: Duration::ZERO,
//!     allowed: Duration::ZERO,
//! };
//! let asks = ToDaemon::Use {
//!     client: ClientId::new(0, 0),
//!     turn: 0,
//!     used: Duration::ZERO,
//!     state: UseState::Wants,
//!     launches: 0,
//!     waited: Duration::ZERO,
//! };
//! let mut actions = Vec::new();
//! for frame in [hello, attach, asks] {
//!     node.handle(Timestamp::from_millis(1), NodeEvent::Received { conn, peer, frame }, &mut actions)?;
//! }
//! let frames: Vec<_> = actions
//!     .iter()
//!     .filter_map(|action| match action {
//!         NodeAction::Send { frame, .. } => Some(frame.label()),
//!         _ => None,
//!     })
//!     .collect();
//! assert_eq!(frames, ["Welcome", "Attached", "Allow"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod co_scaling;
mod config;
mod debts;
mod event;
mod inquiry;
mod memory_account;
mod printable;
mod refusal;
mod reservations;
mod sessions;
mod shares;
mod time_admission;
mod tokens;
mod turns;
mod views;

pub use co_scaling::vertical_scaler;
pub use config::{ClientConfig, DeviceConfig, NodeConfig, max_gpus};
pub use debts::MAX_WAIT;
pub use event::{MemoryBound, NodeAction, NodeError, NodeEvent, Note, Peer, TokenFault};
pub use gshare_core::DeviceUuid;
pub use printable::{is_printable, printable};
pub use refusal::{Percent, Refusal};
pub use views::{ClientView, DeviceView, FactSource, TenantView};

use crate::scale::VerticalScaler;
use co_scaling::{Resize, Scaling};
use debts::Debts;
use gshare_core::reason::{LONG_WAIT, Wait};
use gshare_core::slots::Slots;
use gshare_core::token::TokenScheduler;
use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConfigError, ConnId, Duration, Engine, GpuId, Quota, QuotaRange, ResourceSpec, RunId,
    ServiceClass, TimeWentBack, Timestamp, TokenAction, TokenEvent, UseState,
};
use inquiry::Inquiries;
use memory_account::{ClientAccount, Ledger};
use reservations::Reservation;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use turns::Turns;

/// How long processes of one run may take to come back one after the other: their longest delay between two attempts to
/// connect is 0.4 s.
pub const SETTLE: Duration = Duration::from_millis(1_000);

#[derive(Debug)]
struct Session {
    peer: Peer,
    instance: u32,
    program: String,
    /// Number of the process in its own PID namespace.
    own_pid: u32,
    on_loss: OnDaemonLoss,
    /// Said by its process; the configuration's goes before it. Without either its share is fixed.
    class: Option<ServiceClass>,
    clients: Vec<ClientId>,
}

/// The mark that tells runs of one name apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// The number that a starter gave to all processes of the run.
    Number(RunId),
    /// A process without a number is a run of its own.
    Process { pid: i32, start: u64 },
}

#[derive(Debug)]
struct Instance {
    name: String,
    run: Run,
    /// User of its first process, and so of all.
    uid: u32,
    /// The share that its first process asked for, used where the configuration says nothing.
    asked: ResourceSpec,
    spec: ResourceSpec,
    sessions: u32,
    tenants: BTreeMap<GpuId, TenantId>,
}

/// Name of a tenant: a client of the token scheduler. A newtype, since processes know clients by ids of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TenantId(ClientId);

/// One instance on one device.
#[derive(Debug)]
struct Tenant {
    gpu: GpuId,
    instance: u32,
    turns: Turns,
    /// Said by its first member.
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
    /// Its part of the instance's share, for the time without a daemon.
    part: QuotaRange,
    /// Whether its process knows itself to be the only one on the device.
    alone: bool,
    account: ClientAccount,
    /// The most memory that it may hold without a daemon, as its process knows.
    memory_part: Bytes,
    /// Memory in use, as its process said last.
    used: Option<Bytes>,
    launches: u64,
    waited: Duration,
    /// Why a launch of its process waits long, as the process says, and since when.
    long_wait: Option<(Wait, Timestamp)>,
    /// GPU time used at two earlier times, a second or more apart: the share in between is the one measured last.
    samples: [(Timestamp, Duration); 2],
}

#[derive(Debug, Clone)]
struct Device {
    uuid: DeviceUuid,
    memory: Bytes,
    /// The source of the figure for the memory.
    source: FactSource,
    /// In the configuration: stays when its last client goes.
    listed: bool,
    clients: u32,
}

/// The token scheduler, which may have no text form.
struct Tokens(Box<dyn TokenScheduler>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").field("next_deadline", &self.0.next_deadline()).finish()
    }
}

/// The node. See the [module](self).
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    tokens: Tokens,
    epoch: u64,
    sessions: BTreeMap<ConnId, Session>,
    instances: BTreeMap<u32, Instance>,
    names: BTreeMap<String, u32>,
    next_instance: u32,
    clients: Slots<ClientId, Client>,
    tenants: Slots<ClientId, Tenant>,
    devices: Vec<Option<Device>>,
    /// Devices that the driver knows, and their memory.
    facts: BTreeMap<DeviceUuid, (DeviceUuid, Bytes)>,
    ledger: Ledger,
    inquiries: Inquiries,
    scaling: Scaling,
    debts: Debts,
    /// Tenants that wait until the debts of their name are paid back.
    waiting: BTreeSet<(Timestamp, TenantId)>,
    /// Buffers, empty between events.
    resizes: Vec<Resize>,
    orders: Vec<TokenAction>,
    /// When the first process was let in that may have siblings from another daemon.
    begun: Option<Timestamp>,
    now: Timestamp,
}

impl Node {
    /// A node without clients. `epoch` is the number of this run, which processes are told: a new one makes them register
    /// again. Neither scheduler may have seen an event yet.
    ///
    /// # Errors
    /// A field of the configuration that is out of its bounds.
    pub fn new(
        config: NodeConfig,
        epoch: u64,
        tokens: Box<dyn TokenScheduler>,
        scaler: Box<dyn VerticalScaler>,
    ) -> Result<Self, ConfigError> {
        config.check()?;
        let device = |device: &DeviceConfig| {
            let source = if device.memory.is_some() { FactSource::Configuration } else { FactSource::Client };
            let memory = device.memory.unwrap_or(Bytes::ZERO);
            Some(Device { uuid: device.uuid, memory, source, listed: true, clients: 0 })
        };
        let mut node = Self {
            devices: config.devices.iter().map(device).collect(),
            tokens: Tokens(tokens),
            epoch,
            sessions: BTreeMap::new(),
            instances: BTreeMap::new(),
            names: BTreeMap::new(),
            next_instance: 0,
            clients: Slots::default(),
            tenants: Slots::default(),
            facts: BTreeMap::new(),
            ledger: Ledger::default(),
            inquiries: Inquiries::default(),
            scaling: Scaling::new(scaler),
            debts: Debts::default(),
            waiting: BTreeSet::new(),
            resizes: Vec::new(),
            orders: Vec::new(),
            begun: None,
            now: Timestamp::ZERO,
            config,
        };
        for index in 0..node.devices.len() {
            node.limit_device(index);
        }
        Ok(node)
    }

    /// The configuration in force.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// Refuses what cannot be done, before anything is changed.
    fn check(&self, now: Timestamp, event: &NodeEvent) -> Result<(), NodeError> {
        TimeWentBack::check(now, self.now)?;
        let unknown = |conn: ConnId, frame| match self.sessions.contains_key(&conn) {
            true => Ok(()),
            false => Err(NodeError::UnknownConnection { conn, frame }),
        };
        match event {
            NodeEvent::Received { frame: ToDaemon::Hello { .. }, .. }
            | NodeEvent::UseAsked { .. }
            | NodeEvent::DeviceFound { .. }
            | NodeEvent::DeadlineReached => Ok(()),
            NodeEvent::Received { conn, frame, .. } => unknown(*conn, frame.label()),
            NodeEvent::Closed { conn } => unknown(*conn, "Closed"),
            NodeEvent::Reloaded { config } => self.check_reload(config).map_err(NodeError::Config),
        }
    }

    fn received(
        &mut self,
        now: Timestamp,
        conn: ConnId,
        peer: Peer,
        frame: ToDaemon,
        out: &mut Vec<NodeAction>,
    ) {
        if let Some(client) = client_of(&frame)
            && !self.owns(conn, client)
        {
            return violation(conn, "speaks for a client that is not its own", out);
        }
        match frame {
            ToDaemon::Hello { .. } => self.hello(conn, peer, frame, out),
            ToDaemon::Class { class } => self.class(conn, class, out),
            ToDaemon::Attach { .. } => self.attach(now, conn, &frame, out),
            ToDaemon::Detach { client } => self.detach(now, conn, client, out),
            ToDaemon::Use { client, turn, used, state, launches, waited } => {
                self.heard_use(now, client, (turn, used, state), (launches, waited), out);
            }
            ToDaemon::Iteration { client, first_launch, last_launch, launches } => {
                let tenant = self.clients.get(client).map(|entry| entry.tenant.0);
                let believed = tenant.is_some_and(|tenant| {
                    self.scaling.iteration(now, tenant, first_launch, last_launch, launches)
                });
                if !believed {
                    note(Note::NoEffect, out);
                }
            }
            ToDaemon::MemoryReserve { client, bytes, wish } => {
                match self.inquiries.queue(client, bytes, wish) {
                    None => self.reserve(now, Reservation { client, bytes, wish, recalled: false }, out),
                    Some(true) => {}
                    Some(false) => violation(conn, "has too many reservations under way", out),
                }
            }
            ToDaemon::MemoryRelease { client, bytes } => self.release(conn, client, bytes, out),
            ToDaemon::MemoryUsed { client, round, used } => {
                if let Some(entry) = self.clients.get_mut(client) {
                    entry.used = Some(used);
                }
                let over = self.inquiries.answered(round, client);
                self.rounds_over(now, over, out);
            }
            ToDaemon::MemoryQuery { client } => self.view(now, client, out),
            ToDaemon::Waiting { client, reason } => self.waits_long(now, client, reason, out),
            // A kind that this version has no use for.
            _ => violation(conn, "sent a message of a kind that has no use here", out),
        }
    }

    /// A launch of the client waits long, or does so no more. Nothing is decided by it.
    fn waits_long(
        &mut self,
        now: Timestamp,
        client: ClientId,
        reason: Option<Wait>,
        out: &mut Vec<NodeAction>,
    ) {
        let entry = self.clients.get_mut(client).expect("a client that its connection owns");
        let before = entry.long_wait.map(|(reason, _)| reason);
        if reason != before {
            // The first reason is told when the launch has waited for a while.
            let waited = if before.is_none() { LONG_WAIT } else { Duration::ZERO };
            entry.long_wait = reason.map(|reason| (reason, now.saturating_sub(waited)));
            note(Note::Waiting { client, reason }, out);
        }
        note(Note::NoEffect, out);
    }

    /// Whether the connection may speak for the client.
    fn owns(&self, conn: ConnId, client: ClientId) -> bool {
        self.clients.get(client).is_some_and(|entry| entry.conn == conn)
    }

    /// Does what was to be done at times before `now`. The token scheduler does so itself.
    fn catch_up(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        self.pay_back(now, out);
        self.scale(now, out);
        let over = self.inquiries.due(now);
        self.rounds_over(now, over, out);
    }

    fn tenant(&self, TenantId(id): TenantId) -> Option<&Tenant> {
        self.tenants.get(id)
    }

    fn tenant_mut(&mut self, TenantId(id): TenantId) -> Option<&mut Tenant> {
        self.tenants.get_mut(id)
    }

    /// A tenant that is there: of a client, or of the token scheduler's.
    fn tenant_at(&self, TenantId(id): TenantId) -> &Tenant {
        self.tenants.get(id).expect("a tenant is there as long as a client of it")
    }

    fn tenant_at_mut(&mut self, TenantId(id): TenantId) -> &mut Tenant {
        self.tenants.get_mut(id).expect("a tenant is there as long as a client of it")
    }

    fn device(&self, gpu: GpuId) -> Option<&Device> {
        self.devices.get(gpu.index())?.as_ref()
    }

    fn send(&self, client: ClientId, frame: ToClient, out: &mut Vec<NodeAction>) {
        if let Some(entry) = self.clients.get(client) {
            out.push(NodeAction::Send { conn: entry.conn, frame });
        }
    }

    /// Checks the invariants in builds with debug assertions, for up to 64 clients.
    ///
    /// # Panics
    /// When one does not hold.
    pub fn invariants(&self) {
        if !cfg!(debug_assertions) || self.clients.len() > 64 {
            return;
        }
        for (id, client) in self.clients.iter() {
            assert!(self.sessions[&client.conn].clients.contains(&id), "a client has a session");
            let tenant = self.tenant(client.tenant).expect("and a tenant");
            assert!(tenant.turns.members().any(|member| member == id), "whose member it is");
        }
        for (id, tenant) in self.tenants.iter() {
            let instance = &self.instances[&tenant.instance];
            assert_eq!(instance.tenants[&tenant.gpu].0, id, "a tenant has an instance");
            let entries = || tenant.turns.members().filter_map(|id| self.clients.get(id));
            let limits: u32 = entries().map(|client| u32::from(client.part.limit().get())).sum();
            assert_eq!(limits, u32::from(instance.spec.quota().limit().get()), "parts add up");
            let held: Bytes = entries().map(|client| client.account.held()).sum();
            assert_eq!(held, self.ledger.tenant_held((tenant.gpu, tenant.instance)), "so do accounts");
            let status = self.tokens.0.client(id).expect("the scheduler knows every tenant");
            let waits = tenant.turns.state() == UseState::Wants;
            if waits && !self.waiting.contains(&(tenant.resumes, TenantId(id))) {
                assert!(status.waiting_since.is_some(), "a member that waits has asked");
            }
            assert_eq!(status.total_used, tenant.turns.total(), "members were charged what their tenant was");
        }
        for (device, number) in self.devices.iter().zip(0..) {
            let gpu = GpuId::new(number);
            let on = || self.clients.values().filter(|entry| self.is_on(entry, gpu));
            let Some(device) = device else { continue };
            assert_eq!(on().count(), device.clients as usize, "a device knows how many clients it has");
            let free_running = |entry: &Client| entry.alone && entry.part.request() == Quota::WHOLE;
            let mut unscheduled = on().filter(|entry| free_running(entry));
            assert!(
                unscheduled.next().is_none() || device.clients == 1,
                "all of a shared device are scheduled"
            );
        }
    }
}

impl Engine for Node {
    type Event = NodeEvent;
    type Action = NodeAction;
    type Error = NodeError;

    fn handle(
        &mut self,
        now: Timestamp,
        event: NodeEvent,
        actions: &mut Vec<NodeAction>,
    ) -> Result<(), NodeError> {
        self.check(now, &event)?;
        let from = actions.len();
        let tokens_due = self.tokens.0.next_deadline().is_some_and(|due| due <= now);
        let late = tokens_due || self.own_deadline().is_some_and(|due| due < now);
        if tokens_due {
            // What a client says now must not be taken for a turn that is over by now.
            self.token(now, TokenEvent::DeadlineReached, actions);
        }
        if late {
            self.catch_up(now, actions);
        }
        self.now = now;
        match event {
            NodeEvent::Received { conn, peer, frame } => self.received(now, conn, peer, frame, actions),
            NodeEvent::Closed { conn } => self.closed(now, conn, actions),
            NodeEvent::Reloaded { config } => self.reload(now, *config, actions),
            NodeEvent::DeviceFound { uuid, memory } => self.device_found(uuid, memory, actions),
            NodeEvent::UseAsked { question } => self.ask_for_use(now, question, actions),
            NodeEvent::DeadlineReached => self.deadline(now, actions),
        }
        if late {
            // The event may have had no effect of its own, but what was done before has.
            let mut nth = 0..;
            actions.retain(|action| nth.next() < Some(from) || *action != NodeAction::Note(Note::NoEffect));
        }
        self.invariants();
        Ok(())
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        [self.tokens.0.next_deadline(), self.own_deadline()].into_iter().flatten().min()
    }
}

/// The client that a frame speaks for.
fn client_of(frame: &ToDaemon) -> Option<ClientId> {
    match *frame {
        ToDaemon::Detach { client }
        | ToDaemon::Use { client, .. }
        | ToDaemon::Iteration { client, .. }
        | ToDaemon::MemoryReserve { client, .. }
        | ToDaemon::MemoryRelease { client, .. }
        | ToDaemon::MemoryUsed { client, .. }
        | ToDaemon::MemoryQuery { client }
        | ToDaemon::Waiting { client, .. } => Some(client),
        _ => None,
    }
}

fn note(note: Note, out: &mut Vec<NodeAction>) {
    out.push(NodeAction::Note(note));
}

/// Ends a connection that breaks the protocol. What its process holds is taken back when the host reports the end.
fn violation(conn: ConnId, what: &'static str, out: &mut Vec<NodeAction>) {
    note(Note::Violation { conn, what }, out);
    note(Note::NoEffect, out);
    out.push(NodeAction::Drop { conn, reason: RefusalCode::Protocol });
}

#[cfg(test)]
mod tests;
