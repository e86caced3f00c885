//! A node in virtual time, and frames of processes without a meter.

use gshare_core::wire::{OnDaemonLoss, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, DeviceUuid, Duration, Engine as _, ResourceSpec, RunId, SmShare, Timestamp,
    UseState,
};
use gshare_sched::node::{Node, NodeAction, NodeConfig, NodeEvent, Note, Peer, max_gpus, vertical_scaler};
use gshare_sched::token::{MultiToken, MultiTokenConfig};

/// A node with the multi-token scheduler.
pub(crate) fn node(config: NodeConfig) -> Node {
    let mut tokens = MultiTokenConfig::default();
    (tokens.grace, tokens.max_clients) = (Duration::from_millis(50), config.max_clients);
    tokens.max_gpus = max_gpus(config.max_clients);
    let scaler = vertical_scaler();
    Node::new(config, 1, Box::new(MultiToken::new(tokens).unwrap()), scaler).unwrap()
}

/// `request:limit` and SM per cent.
pub(crate) fn spec(quota: &str, sm: u16) -> ResourceSpec {
    ResourceSpec::new(quota.parse().unwrap(), SmShare::from_percent(sm).unwrap(), None).unwrap()
}

/// The device of all processes.
pub(crate) const DEVICE: [u8; 16] = [7; 16];

/// The first frame about [`DEVICE`].
pub(crate) fn attach_frame() -> ToDaemon {
    attach_with(DeviceUuid::gpu(DEVICE), (Bytes::from_gib(16), Bytes::ZERO, None))
}

/// The first frame about a device with this `memory`: its size, its allocated bytes, and the part of the process.
pub(crate) fn attach_with(
    device: DeviceUuid,
    (device_memory, allocated, part): (Bytes, Bytes, Option<Bytes>),
) -> ToDaemon {
    let (used, allowed) = (Duration::ZERO, Duration::ZERO);
    ToDaemon::Attach { ordinal: 0, device, device_memory, allocated, part, used, allowed }
}

/// A node, its clock, its messages and its notes.
pub(crate) struct Bench {
    pub node: Node,
    pub now: Timestamp,
    pub sent: Vec<(ConnId, ToClient)>,
    pub notes: Vec<Note>,
}

impl Bench {
    pub(crate) fn new(config: NodeConfig) -> Self {
        Self { node: node(config), now: Timestamp::from_millis(1_000), sent: Vec::new(), notes: Vec::new() }
    }

    /// Has the node handle an event. Ends of connections are reported back at once.
    pub(crate) fn tell(&mut self, event: NodeEvent) {
        let actions = self.node.orders(self.now, event).unwrap();
        for action in actions {
            match action {
                NodeAction::Send { conn, frame } => self.sent.push((conn, frame)),
                NodeAction::Note(note) => self.notes.push(note),
                NodeAction::Drop { conn, .. } => {
                    let _ = self.node.handle(self.now, NodeEvent::Closed { conn }, &mut Vec::new());
                }
                _ => {}
            }
        }
    }

    pub(crate) fn say(&mut self, conn: ConnId, frame: ToDaemon) {
        let peer = Peer { pid: 100 + i32::try_from(conn.slot()).unwrap(), uid: 1000 };
        self.tell(NodeEvent::Received { conn, peer, frame });
    }

    pub(crate) fn hello(&mut self, slot: u32, name: &str, spec: ResourceSpec) -> ConnId {
        let conn = ConnId::new(slot, 0);
        let (on_loss, program) = (OnDaemonLoss::Open, "test".to_owned());
        let (run, name) = (RunId::new(u128::from(slot) + 1), name.to_owned());
        self.say(conn, ToDaemon::Hello { pid_start: 0, pid: 0, run, name, program, spec, on_loss });
        conn
    }

    /// Attaches, and returns the client and its share, or the text of the refusal.
    pub(crate) fn attach(&mut self, conn: ConnId) -> Result<(ClientId, ResourceSpec), String> {
        self.attach_to(conn, DEVICE)
    }

    pub(crate) fn attach_to(
        &mut self,
        conn: ConnId,
        device: [u8; 16],
    ) -> Result<(ClientId, ResourceSpec), String> {
        let from = self.sent.len();
        self.say(conn, attach_with(DeviceUuid::gpu(device), (Bytes::from_gib(16), Bytes::ZERO, None)));
        let answer = self.sent[from..].iter().find_map(|(to, frame)| match frame {
            ToClient::Attached { client, spec, .. } if *to == conn => Some(Ok((*client, *spec))),
            ToClient::Refused { text, .. } if *to == conn => Some(Err(text.clone())),
            _ => None,
        });
        answer.expect("an answer")
    }

    /// An admitted and attached process.
    pub(crate) fn start(&mut self, slot: u32, name: &str, spec: ResourceSpec) -> (ConnId, ClientId) {
        let conn = self.hello(slot, name, spec);
        (conn, self.attach(conn).unwrap().0)
    }

    /// The client asks for its first token.
    pub(crate) fn ask(&mut self, conn: ConnId, client: ClientId) {
        self.say(conn, ToDaemon::use_of_time(client, 0, Duration::ZERO, UseState::Wants));
    }

    /// The last total allowed to a client.
    pub(crate) fn allowed(&self, client: ClientId) -> Option<Duration> {
        self.sent.iter().rev().find_map(|(_, frame)| match frame {
            ToClient::Allow { client: to, allowed, .. } if *to == client => Some(*allowed),
            _ => None,
        })
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        let end = self.now.saturating_add(time);
        while let Some(due) = self.node.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.tell(NodeEvent::DeadlineReached);
        }
        self.now = end;
    }
}
