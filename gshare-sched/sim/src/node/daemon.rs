//! The daemon: a [`Node`] behind its connections, driven one event at a time, as the real process drives it from its sockets.

use super::audited::Audited;
use super::outside::Outside;
use super::{MAX_CLIENTS, Setup, node_plan};
use crate::story::Story;
use gshare_core::wire::{Residence, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ConnId, DeviceUuid, Duration, Engine as _, GpuId, ResourceSpec, RunId, Timestamp, TokenEvent,
};
use gshare_sched::node::{
    ClientConfig, DeviceConfig, Node, NodeAction, NodeConfig, NodeError, NodeEvent, Note, Peer,
};
use std::collections::{BTreeSet, VecDeque};

/// The user of all processes, and the user that sends garbage.
const USER: u32 = 1_000;
const STRANGER: u32 = 1_001;

#[derive(Debug)]
enum Inbound {
    Frame(ConnId, ToDaemon),
    End(ConnId),
}

/// The daemon of a node. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Daemon {
    node: Option<(Node, Audited)>,
    /// The node's deadline as of its last event. The simulation asks for it at each step, and most steps do not concern the daemon.
    deadline: Option<Timestamp>,
    pub(super) stopped: bool,
    epoch: u64,
    config: NodeConfig,
    /// Frames received while the daemon was stopped.
    backlog: VecDeque<Inbound>,
    /// The node's open connections.
    open: BTreeSet<ConnId>,
    /// Scheduler calls of all earlier epochs.
    calls: u64,
    /// Stale frames, and frames after which the node closed the connection.
    pub(super) refused: u64,
    impatient: bool,
}

/// The UUID of a device, derived from its place.
pub(super) fn uuid(gpu: usize) -> DeviceUuid {
    DeviceUuid::gpu([u8::try_from(gpu + 1).unwrap_or(u8::MAX); 16])
}

impl Daemon {
    pub(super) fn new(plan: &node_plan::NodePlan, names: &[(String, ResourceSpec)], setup: &Setup) -> Self {
        let mut config = NodeConfig::default();
        config.in_flight = plan.in_flight;
        config.max_clients = MAX_CLIENTS;
        config.devices = (0..)
            .zip(&plan.gpus)
            .map(|(gpu, device)| DeviceConfig { uuid: uuid(gpu), memory: Some(device.memory) })
            .collect();
        for (name, spec) in names.iter().filter(|_| plan.kinds.shares) {
            let mut entry = ClientConfig::default();
            // A name's request is reserved on its own device only, and the process knows this device.
            (entry.spec, entry.user) = (Some(*spec), Some(USER));
            entry.device = device_of(name);
            config.clients.insert(name.clone(), entry);
        }
        let mut daemon = Self { config, impatient: setup.impatient, ..Self::default() };
        daemon.begin(setup);
        daemon
    }

    fn begin(&mut self, setup: &Setup) {
        self.epoch += 1;
        let tokens = Audited::new((setup.tokens)(), setup.terms);
        let mut config = self.config.clone();
        config.predecessor = self.epoch > 1;
        let node = Node::new(config, self.epoch, Box::new(tokens.clone()), (setup.vertical)());
        self.node = node.ok().map(|node| (node, tokens));
        self.deadline = self.node.as_ref().and_then(|(node, _)| node.next_deadline());
    }

    /// Whether the daemon is alive and not stopped.
    pub(super) fn acts(&self) -> bool {
        self.node.is_some() && !self.stopped
    }

    pub(super) fn lives(&self) -> bool {
        self.node.is_some()
    }

    /// The first rule broken by the token scheduler, if any.
    pub(super) fn violation(&self) -> Option<Story> {
        self.node.as_ref().and_then(|(_, tokens)| tokens.violation())
    }

    /// Calls of the token schedulers of all epochs.
    pub(super) fn calls(&self) -> u64 {
        self.calls + self.node.as_ref().map_or(0, |(_, tokens)| tokens.calls())
    }

    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.deadline.filter(|_| !self.stopped)
    }

    /// Handles a frame from a process, or keeps the frame for later while the daemon is stopped.
    pub(super) fn receives(&mut self, now: Timestamp, conn: ConnId, frame: ToDaemon, outside: &mut Outside) {
        if self.stopped {
            return self.backlog.push_back(Inbound::Frame(conn, frame));
        }
        if outside.conn(conn).is_none_or(|entry| !entry.served) || self.node.is_none() {
            return;
        }
        self.open.insert(conn);
        let process = outside.conn(conn).map(|entry| entry.process).filter(|process| *process != usize::MAX);
        let pid =
            process.and_then(|process| i32::try_from(process).ok()).map_or(99_999, |process| process + 1);
        let uid = if process.is_some() { USER } else { STRANGER };
        let peer = Peer { pid, uid };
        let is_back = matches!(frame, ToDaemon::Parking { residence: Residence::Resident, .. });
        self.handle(now, NodeEvent::Received { conn, peer, frame }, outside);
        if is_back && self.impatient {
            let named =
                self.node.as_ref().and_then(|(node, _)| node.clients(now).find(|view| view.pid == pid));
            if let Some(view) = named {
                self.handle(
                    now,
                    NodeEvent::ParkAsked { name: view.name, uid: 0, on: true, holds: false },
                    outside,
                );
            }
        }
    }

    /// Handles the end of a connection closed by its process.
    pub(super) fn sees_end(&mut self, now: Timestamp, conn: ConnId, outside: &mut Outside) {
        if self.stopped {
            return self.backlog.push_back(Inbound::End(conn));
        }
        if self.open.remove(&conn) {
            self.handle(now, NodeEvent::Closed { conn }, outside);
        }
        outside.cut(now, conn);
    }

    /// Handles a deadline of the node.
    pub(super) fn deadline(&mut self, now: Timestamp, outside: &mut Outside) {
        self.handle(now, NodeEvent::DeadlineReached, outside);
    }

    fn handle(&mut self, now: Timestamp, event: NodeEvent, outside: &mut Outside) {
        self.tell(now, event, outside);
        self.deadline = self.node.as_ref().and_then(|(node, _)| node.next_deadline());
    }

    fn tell(&mut self, now: Timestamp, event: NodeEvent, outside: &mut Outside) {
        if let NodeEvent::Closed { conn } = event {
            self.compare(now, conn, outside);
        }
        let Some((node, _)) = &mut self.node else { return };
        let mut actions = Vec::new();
        let accounted = Accounted::of(&event);
        match node.handle(now, event, &mut actions) {
            Ok(()) => {}
            Err(NodeError::UnknownConnection { conn, .. }) => {
                self.refused += 1;
                self.open.remove(&conn);
                return outside.cut(now, conn);
            }
            Err(error) => return outside.book.fail(now, "node", || error.to_string()),
        }
        match accounted {
            Accounted::Use { conn, turn, used } => outside.book.accounts.heard(conn, turn, used),
            Accounted::Attach { conn, stated } => self.joined(now, conn, stated, &actions, outside),
            Accounted::End { conn } => left(now, conn, &actions, outside),
            Accounted::Nothing => {}
        }
        for action in actions {
            self.carry_out(now, action, outside);
        }
        self.note_windows(outside);
    }

    /// Compares the daemon's account of a connected process with the book's.
    fn compare(&self, now: Timestamp, conn: ConnId, outside: &mut Outside) {
        let Some((node, _)) = &self.node else { return };
        let Some((client, tenant)) = outside.book.accounts.client(conn) else { return };
        let client = node.clients(now).find(|view| view.client == client).map(|view| view.total_used);
        let tenant = node.tenants().find(|view| view.status.client == tenant);
        let reading = client.zip(tenant.map(|view| view.status.total_used));
        let checked = outside.book.accounts.compare(conn, reading);
        outside.book.checked(now, "account", checked);
    }

    /// Compares the accounts of all connected processes.
    pub(super) fn compare_all(&self, now: Timestamp, outside: &mut Outside) {
        let open: Vec<ConnId> = outside.book.accounts.open().collect();
        open.into_iter().for_each(|conn| self.compare(now, conn, outside));
    }

    fn joined(
        &self,
        now: Timestamp,
        conn: ConnId,
        stated: (Duration, Duration),
        actions: &[NodeAction],
        outside: &mut Outside,
    ) {
        let ids = actions.iter().find_map(|action| match action {
            NodeAction::Note(Note::Admitted { client, tenant, .. }) => Some((*client, *tenant)),
            _ => None,
        });
        let process = outside.conn(conn).map(|entry| entry.process).filter(|process| *process != usize::MAX);
        if let Some((ids, process)) = ids.zip(process) {
            let checked = outside.book.accounts.joins(now, (conn, process), ids, stated);
            outside.book.checked(now, "account", checked);
        }
    }

    fn carry_out(&mut self, now: Timestamp, action: NodeAction, outside: &mut Outside) {
        match action {
            NodeAction::Send { conn, frame } => {
                if let ToClient::Allow { allowed, until, .. } = frame {
                    outside.book.accounts.allows(now, conn, allowed, until);
                }
                outside.tell(now, conn, frame);
            }
            NodeAction::Drop { conn, reason } => {
                self.refused += 1;
                outside.log.line(now, || format!("daemon drops {conn}: {reason:?}"));
                outside.cut(now, conn);
                if self.open.remove(&conn) {
                    self.compare(now, conn, outside);
                    let Some((node, _)) = &mut self.node else { return };
                    let mut actions = Vec::new();
                    // The node does not know a connection after a refused Hello.
                    let _ = node.handle(now, NodeEvent::Closed { conn }, &mut actions);
                    left(now, conn, &actions, outside);
                    for action in actions {
                        self.carry_out(now, action, outside);
                    }
                }
            }
            NodeAction::Note(Note::DebtWait { client, until, owed, .. }) => {
                outside.log.line(now, || format!("{client} waits until {until} for a debt of {owed}"));
                self.excuse_debt(now, until, client, outside);
            }
            NodeAction::Note(Note::Violation { conn, what }) => {
                outside.log.line(now, || format!("{conn} breaks the protocol: {what}"));
                if outside.conn(conn).is_some_and(|entry| entry.process != usize::MAX) {
                    outside
                        .book
                        .fail(now, "protocol", || format!("{conn}, of a hook, breaks the protocol: {what}"));
                }
            }
            NodeAction::Note(Note::Refused { conn, name, refusal }) => {
                outside.log.line(now, || format!("{conn} ({name}) is refused: {refusal}"));
            }
            NodeAction::Note(Note::TokenRefused { .. }) => self.refused += 1,
            _ => {}
        }
    }

    /// Excuses a wait for the repayment of a debt, since the node announced its end.
    fn excuse_debt(
        &self,
        now: Timestamp,
        until: Timestamp,
        client: gshare_core::ClientId,
        outside: &mut Outside,
    ) {
        let Some((node, _)) = &self.node else { return };
        let found = node.clients(now).into_iter().find(|view| view.client == client);
        let process = found.and_then(|view| usize::try_from(view.pid - 1).ok());
        if let Some(process) = process.filter(|process| *process < outside.book.processes()) {
            outside.book.excuse_instance(process, now, until.saturating_since(now));
        }
    }

    fn note_windows(&self, outside: &mut Outside) {
        let Some((_, tokens)) = &self.node else { return };
        for (gpu, number) in (0..self.config.devices.len()).zip(0..) {
            outside.book.windows(gpu, tokens.windows(GpuId::new(number)));
        }
    }

    // ---- faults ---------------------------------------------------------------------------------------------------------

    /// Kills the daemon, which ends all its connections.
    pub(super) fn die(&mut self, now: Timestamp, outside: &mut Outside) {
        self.calls = self.calls();
        (self.node, self.deadline, self.stopped) = (None, None, false);
        outside.book.accounts.daemon_dies();
        self.backlog.clear();
        self.open.clear();
        outside.listening = false;
        for index in 0..outside.conns.len() {
            let conn = ConnId::new(u32::try_from(index).unwrap_or(u32::MAX), 0);
            outside.cut(now, conn);
        }
    }

    /// Starts the daemon again with another epoch.
    pub(super) fn start(&mut self, setup: &Setup, outside: &mut Outside) {
        self.begin(setup);
        outside.listening = true;
    }

    /// Continues the daemon after a stop; frames received meanwhile come first.
    pub(super) fn continues(&mut self, now: Timestamp, outside: &mut Outside) {
        self.stopped = false;
        while let Some(inbound) = self.backlog.pop_front() {
            match inbound {
                Inbound::Frame(conn, frame) => self.receives(now, conn, frame, outside),
                Inbound::End(conn) => self.sees_end(now, conn, outside),
            }
        }
    }

    /// Loads the configuration again with another share for a name, and returns whether the share is in force.
    pub(super) fn reload(
        &mut self,
        now: Timestamp,
        name: &str,
        spec: ResourceSpec,
        outside: &mut Outside,
    ) -> bool {
        let mut config = self.config.clone();
        let Some(entry) = config.clients.get_mut(name) else { return false };
        entry.spec = Some(spec);
        self.config = config.clone();
        if self.acts() {
            self.handle(now, NodeEvent::Reloaded { config: Box::new(config) }, outside);
        }
        true
    }

    /// Offers the node a time before its last event, and returns whether the node refused this time without any change.
    pub(super) fn refuses_earlier(&mut self, now: Timestamp, by: Duration, outside: &mut Outside) -> bool {
        if !self.acts() {
            return true;
        }
        self.deadline(now, outside);
        let Some((node, _)) = &mut self.node else { return true };
        let (deadline, mut actions) = (node.next_deadline(), Vec::new());
        let refused = node.handle(now.saturating_sub(by), NodeEvent::DeadlineReached, &mut actions);
        matches!(refused, Err(NodeError::TimeWentBack { .. }))
            && actions.is_empty()
            && node.next_deadline() == deadline
    }
}

/// An event that concerns the account of a process.
enum Accounted {
    Use { conn: ConnId, turn: u32, used: Duration },
    Attach { conn: ConnId, stated: (Duration, Duration) },
    End { conn: ConnId },
    Nothing,
}

impl Accounted {
    fn of(event: &NodeEvent) -> Self {
        match *event {
            NodeEvent::Received { conn, frame: ToDaemon::Use { turn, used, .. }, .. } => {
                Self::Use { conn, turn, used }
            }
            NodeEvent::Received { conn, frame: ToDaemon::Attach { used, allowed, .. }, .. } => {
                Self::Attach { conn, stated: (used, allowed) }
            }
            NodeEvent::Closed { conn } => Self::End { conn },
            _ => Self::Nothing,
        }
    }
}

/// A process has left: the scheduler has heard the last total of its instance.
fn left(now: Timestamp, conn: ConnId, actions: &[NodeAction], outside: &mut Outside) {
    let Some((_, tenant)) = outside.book.accounts.client(conn) else { return };
    let total = actions.iter().find_map(|action| match action {
        NodeAction::Note(Note::TokenEvent { token: TokenEvent::Used { client, used, .. } }) => {
            (*client == tenant).then_some(*used)
        }
        _ => None,
    });
    let checked = outside.book.accounts.leaves(conn, total);
    outside.book.checked(now, "account", checked);
}

/// The name of an instance, which contains its device.
pub(super) fn name_of(gpu: usize, instance: usize) -> String {
    format!("gpu{gpu}-{instance}")
}

fn device_of(name: &str) -> Option<DeviceUuid> {
    let number = name.strip_prefix("gpu")?.split_once('-')?.0.parse().ok()?;
    Some(uuid(number))
}

/// A frame that no hook would send now.
pub(super) fn garbage(kind: u8, number: u64) -> ToDaemon {
    use gshare_core::{ClientId, UseState};
    let client =
        ClientId::new(u32::try_from(number % 8).unwrap_or(0), u32::try_from(number / 8 % 2).unwrap_or(0));
    let (used, bytes) = (Duration::from_nanos(number), Bytes(number));
    let state = [UseState::Idle, UseState::Wants, UseState::Holds, UseState::Extends];
    match kind % 12 {
        0..3 => ToDaemon::Use {
            client,
            turn: u32::from(kind % 3),
            used,
            state: state[usize::from(kind / 12 % 4)],
            launches: number,
            waited: used,
            memory: bytes,
            byte_seconds: number,
        },
        3 => ToDaemon::MemoryReserve { client, bytes, wish: bytes },
        4 => ToDaemon::MemoryRelease { client, bytes },
        5 => ToDaemon::MemoryUsed { client, round: kind.into(), used: bytes },
        6 => ToDaemon::MemoryQuery { client },
        7 => ToDaemon::Detach { client },
        8 => ToDaemon::Class { class: gshare_core::ServiceClass::BestEffort },
        9 => ToDaemon::Attach {
            ordinal: kind.into(),
            device: DeviceUuid::gpu([0xAA; 16]),
            device_memory: bytes,
            allocated: bytes,
            part: Some(bytes),
            used,
            allowed: used,
        },
        10 => ToDaemon::Iteration {
            client,
            first_launch: Timestamp::from_nanos(number),
            last_launch: Timestamp::from_nanos(number / 2),
            launches: kind.into(),
        },
        _ => hello("stranger", number),
    }
}

/// The first message of a process.
pub(super) fn hello(name: &str, run: u64) -> ToDaemon {
    let run = RunId::new(run.into());
    ToDaemon::Hello {
        pid_start: 1,
        pid: 1,
        run,
        name: name.into(),
        program: "garbage".into(),
        spec: node_plan::spec(0, 10_000, 10_000, None),
        on_loss: gshare_core::wire::OnDaemonLoss::Open,
    }
}
