//! The node: admission of processes, and their shares of the node's devices.
//!
//! # Problem
//! Processes come and go, several belong to one instance, and none of them can be trusted to keep the books of GPU time and memory. The
//! token scheduler divides time, but knows only its clients. The node decides the rest: admission, names, the division of a share among
//! processes, payment for overuse, and memory. The daemon, a simulation and the replay of a journal run this one engine and decide alike.
//!
//! # Terms
//! - **session**: one connection with an accepted Hello; one process. **Instance**: the sessions of one run under one name, with one spec.
//! - **client**: one session on one device, under the id known to its process.
//! - **tenant**: one instance on one device, with one or several clients, its **members**; a client of the token scheduler.
//! - **listed name**: a name with a share in the configuration.
//! - **overuse**: GPU time beyond a limit. **Debt**: overuse of a departed tenant.
//! - **slack**: memory granted to a client but not in use. **Recall**: a question that makes a client release its slack.
//! - **note**: information for observers (journal, metrics, log). No decision depends on a note.
//!
//! # Rules
//! 1. **Names.** A name belongs to one run of one user while any of its processes lives. A process joins by the run's random number and by
//!    its user, as the kernel states. The configuration may reserve a name for a user, and may list the name's share. Without a listed
//!    share, the first process of the run chooses one, if the configuration lets unlisted names in.
//! 2. **Admission.** <a id="admission"></a> A device admits an instance if its request for time can be met beside the requests already
//!    there (`time_admission.rs`). An unlisted instance must also fit beside the requests of all listed names, present or not, and so takes
//!    nothing from them. A listed name may reserve its request on one device only.
//! 3. **Scheduling.** A process with the whole device as its request launches without tokens only while it is alone there. When a neighbour
//!    attaches, the node states the request as 99.99 %, and the process takes tokens.
//! 4. **Time.** A tenant has one account with the token scheduler, with the whole share of its instance; its members hold the token in
//!    turns (`turns.rs`). An idle member takes nothing from the others, and at no instant do the members together have more than the limit.
//! 5. **Without a daemon** each of `n` members keeps to `1/n` of request and limit (`shares.rs`).
//! 6. **Overuse** stays with the scheduler while a member is there. A member back from a lost connection states its totals, and the node
//!    charges its use beyond the permission it had. After the last member, overuse is a debt of its user, name and device: the next tenant
//!    of the name gets no token before the debt is paid, at the rate of the limit, and within 100 s (`debts.rs`).
//! 7. **Devices.** A device's memory comes from the configuration, else from the driver ([`NodeEvent::DeviceFound`]), else from its first
//!    client; [`DeviceView::source`] names the source. The node refuses a process with more allocated memory than the device has, and
//!    bounds the devices of a user known from clients only (`sessions.rs`).
//! 8. **Memory** is reserved before it is allocated (`memory_account.rs`), and a reservation that does not fit is tried once more after a
//!    recall (`reservations.rs`). A wait for the answers of other processes is bounded (`inquiry.rs`).
//! 9. **Restart.** After a restart a process states its part of the memory limit, and gets no more than the part while siblings may still
//!    return from a predecessor ([`NodeConfig::predecessor`], `reservations.rs`).
//! 10. **Vertical scaling** moves limits between the clients of a device with a class, and keeps their requests (`co_scaling.rs`).
//! 11. **Parking.** A client's movable memory goes to host memory by order, and comes back when a thread misses it. Meanwhile the client
//!     gets no token (`park_orders.rs`). Where memory does not suffice, the node orders which client leaves, and when it may return (`room.rs`).
//! 12. **Refusals.** A refused process launches nothing, unless the configuration lets it run within the limits it would have had. The
//!     node refuses a device that is not served or cannot meet the spec, and keeps the connection for other devices. Attaches are answered
//!     in order. A message out of its connection's state ends that connection only. Messages that may cross on the wire (a return after a
//!     revoke) are counted and otherwise ignored.
//!
//! # Invariants
//! Each client has a session and a place among its tenant's members. The parts of a tenant's members add up to its limit, and the memory
//! accounts agree with the clients. A waiting member has asked the scheduler, or waits for a debt. Requests on a device beyond the whole
//! all have slots, or the operator listed them. A refused event changes nothing, nor does an event noted as [`Note::NoEffect`]. Equal
//! events at equal times give equal actions: the node has no clock and no randomness, and the caller gives the number of the run.
//!
//! # Cost
//! A token message costs two table look-ups, the token scheduler's work and O(members of the tenant). Joining and leaving cost O(clients of
//! the node).
//!
//! # Example
//! ```
//! use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
//! use gshare_core::{Bytes, ClientId, ConnId, DeviceUuid, Duration, Engine, ResourceSpec, RunId, Timestamp, UseState};
//! use gshare_sched::node::{Node, NodeAction, NodeConfig, NodeEvent, Peer, vertical_scaler};
//! use gshare_sched::token::{MultiToken, MultiTokenConfig};
//!
//! let config = NodeConfig::default();
//! let tokens = Box::new(MultiToken::new(MultiTokenConfig::default())?);
//! let mut node = Node::new(config, 1, tokens, vertical_scaler())?;
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
//! let asks = ToDaemon::use_of_time(ClientId::new(0, 0), 0, Duration::ZERO, UseState::Wants);
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
mod debts;
mod event;
mod inquiry;
mod memory_account;
mod node_config;
mod park_orders;
mod printable;
mod refusal;
mod reservations;
mod room;
mod sessions;
mod shares;
mod time_admission;
mod tokens;
mod turns;
mod usage;
mod views;

pub use co_scaling::vertical_scaler;
pub use debts::MAX_WAIT;
pub use event::{MemoryBound, NodeAction, NodeError, NodeEvent, Note, Peer, TokenFault};
pub use gshare_core::DeviceUuid;
pub use node_config::{ClientConfig, DeviceConfig, NodeConfig, max_gpus};
pub use park_orders::{ParkRefusal, Parking};
pub use printable::{is_printable, printable};
pub use refusal::{Percent, Refusal};
pub use usage::Usage;
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
use room::{Line, Moves};
use std::collections::{BTreeMap, BTreeSet};
use tokens::Tokens;
use turns::Turns;
use usage::Comparison;

/// The time for processes of one run to come back one after the other; their longest delay between two attempts to connect is 0.4 s.
pub const SETTLE: Duration = Duration::from_millis(1_000);

#[derive(Debug)]
struct Session {
    peer: Peer,
    instance: u32,
    program: String,
    /// Number of the process in its own PID namespace.
    own_pid: u32,
    on_loss: OnDaemonLoss,
    /// The class stated by the process; a class in the configuration goes before it. Without either the share is fixed.
    class: Option<ServiceClass>,
    clients: Vec<ClientId>,
}

/// The mark that tells runs of one name apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    /// The number from the starter of the run, common to all its processes.
    Number(RunId),
    /// A process without a number, which is a run of its own.
    Process { pid: i32, start: u64 },
}

#[derive(Debug)]
struct Instance {
    name: String,
    run: Run,
    /// The user of the first process, and so of all processes.
    uid: u32,
    /// The request of the first process, in force where the configuration lists no share.
    asked: ResourceSpec,
    spec: ResourceSpec,
    /// Whether its memory is held in host memory: it runs nothing, and its request for time is free for others.
    away: bool,
    sessions: u32,
    tenants: BTreeMap<GpuId, TenantId>,
}

/// The id of a tenant, as a client of the token scheduler. The newtype keeps it apart from the client ids known to processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TenantId(ClientId);

/// One instance on one device.
#[derive(Debug)]
struct Tenant {
    gpu: GpuId,
    instance: u32,
    turns: Turns,
    /// The class stated by the first member.
    class: Option<ServiceClass>,
    /// The time since when the tenant has its limit and may have had tokens, and the GPU time used before.
    since: (Timestamp, Duration),
    /// A time, and the largest limit of the tenant within the window before it.
    largest: (Timestamp, Quota),
    /// The end of the debts of its name; the tenant gets no token before.
    resumes: Timestamp,
    /// Until then, siblings of the first members may return from another daemon, and still hold their parts of the memory.
    settles: Option<Timestamp>,
}

#[derive(Debug)]
struct Client {
    conn: ConnId,
    tenant: TenantId,
    /// The client's part of the instance's share, for the time without a daemon.
    part: QuotaRange,
    /// Whether the process was told it is alone on the device.
    alone: bool,
    account: ClientAccount,
    /// The most memory for the client without a daemon, as its process was told.
    memory_part: Bytes,
    /// Whether this node told the process its part; a part from an earlier daemon may be out of date.
    part_told: bool,
    /// Memory in use, by the last report of the process.
    memory: Option<Bytes>,
    usage: Usage,
    /// The busy time in past comparisons with the device's time.
    counted: Duration,
    /// The reason for a long wait of a launch, as its process states it, and the start of the wait.
    long_wait: Option<(Wait, Timestamp)>,
    /// The memory that can go to host memory, if the process said so.
    parking: Option<Parking>,
    moves: Moves,
    /// GPU time used at two earlier times, a second or more apart, from which views measure the recent share.
    samples: [(Timestamp, Duration); 2],
}

#[derive(Debug, Clone)]
struct Device {
    uuid: DeviceUuid,
    memory: Bytes,
    /// The source of the figure for the memory.
    source: FactSource,
    /// Whether the configuration lists the device, which then stays after its last client.
    listed: bool,
    clients: u32,
    comparison: Comparison,
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
    /// The driver's devices and their memory.
    facts: BTreeMap<DeviceUuid, (DeviceUuid, Bytes)>,
    ledger: Ledger,
    inquiries: Inquiries,
    line: Line,
    scaling: Scaling,
    debts: Debts,
    /// Tenants in line until the debts of their names are paid.
    waiting: BTreeSet<(Timestamp, TenantId)>,
    /// A buffer, empty between events, as is `orders`.
    resizes: Vec<Resize>,
    orders: Vec<TokenAction>,
    /// The admission time of the first process with possible siblings from another daemon.
    begun: Option<Timestamp>,
    now: Timestamp,
}

impl Node {
    /// A node without clients. Processes learn `epoch`, the number of this run, and register again when it is new. Neither scheduler may
    /// have seen an event yet.
    ///
    /// # Errors
    /// A field of the configuration is out of its bounds.
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
            Some(Device {
                uuid: device.uuid,
                memory,
                source,
                listed: true,
                clients: 0,
                comparison: Comparison::default(),
            })
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
            line: Line::default(),
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

    /// Refuses an impossible event before any change.
    fn check(&self, now: Timestamp, event: &NodeEvent) -> Result<(), NodeError> {
        TimeWentBack::check(now, self.now)?;
        let unknown = |conn: ConnId, frame| match self.sessions.contains_key(&conn) {
            true => Ok(()),
            false => Err(NodeError::UnknownConnection { conn, frame }),
        };
        match event {
            NodeEvent::Received { frame: ToDaemon::Hello { .. }, .. }
            | NodeEvent::UseAsked { .. }
            | NodeEvent::ParkAsked { .. }
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
            ToDaemon::Use { client, turn, used, state, launches, waited, memory, byte_seconds } => {
                let stated = Usage { busy: used, launches, waited, byte_seconds, ..Usage::default() };
                self.heard_use(now, client, (turn, state), (stated, memory), out);
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
                    entry.memory = Some(used);
                }
                let over = self.inquiries.answered(round, client);
                self.rounds_over(now, over, out);
            }
            ToDaemon::MemoryQuery { client } => self.view(now, client, out),
            ToDaemon::Waiting { client, reason } => self.waits_long(now, client, reason, out),
            ToDaemon::Parking { client, residence, bytes, obstacle } => {
                self.heard_parking(now, client, (residence, bytes, obstacle), out);
            }
            // A kind of message without a use in this version.
            _ => violation(conn, "sent a message of a kind that has no use here", out),
        }
    }

    /// Notes the start or the end of a long wait of a launch. No decision depends on it.
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
            // A process tells its first reason only after the launch has waited for a while.
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

    /// Does the work due at or before `now`, except the token scheduler's: the scheduler catches up by itself.
    fn catch_up(&mut self, now: Timestamp, out: &mut Vec<NodeAction>) {
        self.pay_back(now, out);
        self.scale(now, out);
        let over = self.inquiries.due(now);
        self.rounds_over(now, over, out);
        self.make_room(now, out);
    }

    fn tenant(&self, TenantId(id): TenantId) -> Option<&Tenant> {
        self.tenants.get(id)
    }

    fn tenant_mut(&mut self, TenantId(id): TenantId) -> Option<&mut Tenant> {
        self.tenants.get_mut(id)
    }

    /// The tenant of a client or of a token order, which is always there.
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
    /// An invariant does not hold.
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
        self.line.check(|client| self.clients.get(client).is_some(), &self.inquiries);
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
        self.now = now;
        let from = actions.len();
        let tokens_due = self.tokens.0.next_deadline().is_some_and(|due| due <= now);
        // The line is looked at after each event, also after an event without an effect of its own.
        let line_due = self.line.next_deadline().is_some_and(|due| due <= now);
        let late = tokens_due || line_due || self.own_deadline().is_some_and(|due| due < now);
        if tokens_due {
            // The client's message must not count for a turn already over.
            self.token(now, TokenEvent::DeadlineReached, actions);
        }
        if late {
            self.catch_up(now, actions);
        }
        match event {
            NodeEvent::Received { conn, peer, frame } => self.received(now, conn, peer, frame, actions),
            NodeEvent::Closed { conn } => self.closed(now, conn, actions),
            NodeEvent::Reloaded { config } => self.reload(now, *config, actions),
            NodeEvent::DeviceFound { uuid, memory } => self.device_found(uuid, memory, actions),
            NodeEvent::UseAsked { question } => self.ask_for_use(now, question, actions),
            NodeEvent::ParkAsked { name, uid, on, holds } => {
                self.park_asked(now, (&name, uid, on.then_some(holds)), actions);
            }
            NodeEvent::DeadlineReached => self.deadline(now, actions),
        }
        self.make_room(now, actions);
        if late {
            // The event may have had no effect of its own, but the overdue work has.
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

/// The client named by a frame.
fn client_of(frame: &ToDaemon) -> Option<ClientId> {
    match *frame {
        ToDaemon::Detach { client }
        | ToDaemon::Use { client, .. }
        | ToDaemon::Iteration { client, .. }
        | ToDaemon::MemoryReserve { client, .. }
        | ToDaemon::MemoryRelease { client, .. }
        | ToDaemon::MemoryUsed { client, .. }
        | ToDaemon::MemoryQuery { client }
        | ToDaemon::Waiting { client, .. }
        | ToDaemon::Parking { client, .. } => Some(client),
        _ => None,
    }
}

fn note(note: Note, out: &mut Vec<NodeAction>) {
    out.push(NodeAction::Note(note));
}

/// Ends a connection for a breach of the protocol. The node takes the process's holdings back when the host reports the end.
fn violation(conn: ConnId, what: &'static str, out: &mut Vec<NodeAction>) {
    note(Note::Violation { conn, what }, out);
    note(Note::NoEffect, out);
    out.push(NodeAction::Drop { conn, reason: RefusalCode::Protocol });
}

#[cfg(test)]
mod tests;
