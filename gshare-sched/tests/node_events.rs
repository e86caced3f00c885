//! Random events, valid and not, from random connections.

use crate::support;
use gshare_core::reason::Obstacle;
use gshare_core::wire::{OnDaemonLoss, Residence, ToClient, ToDaemon};
use gshare_core::{
    Bytes, ClientId, ConnId, DeviceUuid, Duration, Engine as _, ResourceSpec, RunId, ServiceClass, SmShare,
    Timestamp, TokenAction, UseState,
};
use gshare_sched::node::{ClientConfig, Node, NodeAction, NodeConfig, NodeEvent, Note, Peer};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// One step; numbers choose among the present clients.
#[derive(Debug, Clone)]
enum Step {
    /// On a new connection unless `again`.
    Hello {
        conn: u32,
        again: bool,
        name: u8,
        run: u64,
        uid: u32,
        spec: u8,
    },
    Attach {
        conn: u32,
        device: u8,
        allocated: u64,
        part: Option<u64>,
        used: u64,
    },
    /// From a present client if `own`, else from an invalid client or another connection's.
    Client {
        conn: u32,
        own: bool,
        frame: u8,
        kind: u8,
        amount: u64,
    },
    Class {
        conn: u32,
        best_effort: bool,
    },
    Close {
        conn: u32,
    },
    Reload {
        which: u8,
    },
    Ask {
        question: u32,
    },
    Pass {
        us: u64,
    },
    Deadline,
    Back {
        us: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let conn = 0u32..6;
    prop_oneof![
        5 => (conn.clone(), prop::bool::weighted(0.1), 0u8..16, 0u64..16, 0u32..16, 0u8..6).prop_map(
            |(conn, again, name, run, uid, spec)| Step::Hello { conn, again, name, run, uid, spec }
        ),
        5 => (conn.clone(), 0u8..2, 0u64..20, prop::option::of(0u64..20), 0u64..600_000)
            .prop_map(|(conn, device, allocated, part, used)| Step::Attach { conn, device, allocated, part, used }),
        30 => (conn.clone(), prop::bool::weighted(0.98), 0u8..10, any::<u8>(), 0u64..60_000)
            .prop_map(|(conn, own, frame, kind, amount)| Step::Client { conn, own, frame, kind, amount }),
        2 => (conn.clone(), any::<bool>()).prop_map(|(conn, best_effort)| Step::Class { conn, best_effort }),
        1 => conn.prop_map(|conn| Step::Close { conn }),
        1 => (0u8..8).prop_map(|which| Step::Reload { which }),
        1 => (0u32..9).prop_map(|question| Step::Ask { question }),
        8 => (1u64..20_000).prop_map(|us| Step::Pass { us }),
        1 => (1u64..2_000_000).prop_map(|us| Step::Pass { us }),
        6 => Just(Step::Deadline),
        1 => (1u64..1_000).prop_map(|us| Step::Back { us }),
    ]
}

fn spec(which: u8) -> ResourceSpec {
    let (quota, sm, memory) = [
        ("0.3:0.8", 100, Some(20)),
        ("0.5", 50, None),
        ("0:1", 100, Some(30)),
        ("1:1", 100, None),
        ("0.1", 30, Some(2_000)),
        ("0.0002", 100, None),
    ][usize::from(which)];
    ResourceSpec::new(quota.parse().unwrap(), SmShare::from_percent(sm).unwrap(), memory.map(Bytes)).unwrap()
}

fn config(which: u8) -> NodeConfig {
    let mut config = NodeConfig::default();
    config.max_clients = 8;
    if which & 1 != 0 {
        let mut entry = ClientConfig::default();
        (entry.spec, entry.class) = (Some(spec(0)), Some(ServiceClass::SLO_SENSITIVE));
        config.clients.insert("n1".into(), entry);
    }
    if which == 3 {
        config.allow_unlisted = false;
        config.memory_headroom = Bytes(10);
        let mut entry = ClientConfig::default();
        (entry.spec, entry.user) = (Some(spec(2)), Some(1));
        config.clients.insert("n2".into(), entry);
    }
    config
}

/// The state of a node, but for the time of the last event.
fn state(node: &Node, now: Timestamp) -> String {
    let text = format!("{node:?}");
    let cut = text.rfind(", now: ").expect("the last field");
    let tenants: Vec<_> = node.tenants().collect();
    let clients: Vec<_> = node.clients(now).collect();
    format!("{} {tenants:?} {clients:?}", &text[..cut])
}

#[derive(Default)]
struct World {
    now: u64,
    /// A client's last turn and allowed total, whether it holds a token, and its largest reported total.
    told: BTreeMap<ClientId, (u32, Duration, bool)>,
    said: BTreeMap<ClientId, Duration>,
    rounds: u32,
    /// Slots of admitted connections.
    sessions: BTreeSet<u32>,
    /// Connections dropped by the node and not closed yet.
    dropped: Vec<ConnId>,
}

impl World {
    fn event(&mut self, node: &Node, step: &Step) -> Option<NodeEvent> {
        let received = |conn: u32, uid: u32, frame| {
            let peer = Peer { pid: i32::try_from(conn).unwrap() + 1, uid };
            NodeEvent::Received { conn: ConnId::new(conn, 0), peer, frame }
        };
        Some(match *step {
            Step::Hello { conn, again, name, run, uid, spec: which } => {
                let free = (0..6).find(|conn| !self.sessions.contains(conn)).filter(|_| !again);
                let (conn, uid) = (free.unwrap_or(conn), uid / 15);
                let run = if run == 0 { 1 } else { u128::from(name % 3) + 2 };
                let run = RunId::new(run);
                let name = match name {
                    14 => "bad\u{1b}".to_owned(),
                    15 => String::new(),
                    _ => format!("n{}", name % 3),
                };
                let (program, on_loss) = ("test".to_owned(), OnDaemonLoss::Open);
                let spec = spec(which);
                received(
                    conn,
                    uid,
                    ToDaemon::Hello { pid_start: 0, pid: 0, run, name, program, spec, on_loss },
                )
            }
            Step::Attach { conn, device, allocated, part, used } => {
                let (device, device_memory) = (DeviceUuid::gpu([device; 16]), Bytes(100));
                let (allocated, part) = (Bytes(allocated.saturating_sub(15) * 30), part.map(Bytes));
                let known: Vec<u32> = self.sessions.iter().copied().collect();
                let conn = known.get(conn as usize % known.len().max(1)).copied().unwrap_or(conn);
                let used = Duration::from_micros(used.saturating_sub(500_000));
                let allowed = Duration::from_micros(10_000);
                let ordinal = 0;
                received(
                    conn,
                    0,
                    ToDaemon::Attach { ordinal, device, device_memory, allocated, part, used, allowed },
                )
            }
            Step::Client { conn, own, frame, kind, amount } => {
                let views: Vec<_> = node.clients(Timestamp::from_nanos(self.now)).collect();
                let view = views.get(conn as usize % views.len().max(1)).filter(|_| own);
                let conn = view.map_or(conn, |view| u32::try_from(view.pid - 1).unwrap());
                let client = view.map_or(ClientId::new(conn, 0), |view| view.client);
                received(conn, 0, self.frame(client, frame, kind, amount))
            }
            Step::Class { conn, best_effort } => {
                let class = if best_effort { ServiceClass::BestEffort } else { ServiceClass::SLO_SENSITIVE };
                let conn = self.sessions.last().copied().unwrap_or(conn);
                received(conn, 0, ToDaemon::Class { class })
            }
            Step::Close { conn } => NodeEvent::Closed { conn: ConnId::new(conn, 0) },
            Step::Reload { which } => NodeEvent::Reloaded { config: Box::new(config(which)) },
            Step::Ask { question } if question % 3 > 0 => NodeEvent::ParkAsked {
                name: format!("n{}", question % 4),
                uid: question % 2,
                on: question % 3 == 1,
                holds: question % 5 == 0,
            },
            Step::Ask { question } => NodeEvent::UseAsked { question },
            Step::Deadline => {
                let due = node.next_deadline()?;
                self.now = self.now.max(due.as_nanos());
                NodeEvent::DeadlineReached
            }
            Step::Pass { us } => {
                self.now += us * 1_000;
                return None;
            }
            Step::Back { .. } => NodeEvent::DeadlineReached,
        })
    }

    /// A report for the client's last turn, the next or an earlier one, with a growing total which shrinks once in a while.
    fn time(&mut self, client: ClientId, kind: u8, amount: u64) -> ToDaemon {
        let told = self.told.entry(client).or_default();
        let (turn, allowed, holds) = *told;
        let said = self.said.entry(client).or_default();
        let used = match kind % 32 {
            0 => said.saturating_sub(Duration::from_micros(amount)),
            1..4 => allowed.max(*said),
            4..12 => said.saturating_add(Duration::from_micros(10 * amount)),
            _ => said.saturating_add(Duration::from_micros(amount / 8)),
        };
        *said = used.max(*said);
        let ends = holds && kind % 32 > 16;
        let turn = match kind / 32 {
            0 => turn.saturating_sub(1),
            1 if kind % 32 == 31 => turn + 2,
            _ => turn + u32::from(ends),
        };
        if ends && turn > told.0 {
            *told = (turn, allowed, false);
        }
        let state = match kind % 4 {
            0 if !ends => UseState::Holds,
            1 if !ends => UseState::Extends,
            2 => UseState::Idle,
            _ => UseState::Wants,
        };
        ToDaemon::Use {
            client,
            turn,
            used,
            state,
            launches: amount,
            waited: used,
            memory: Bytes(amount),
            byte_seconds: amount,
        }
    }

    fn frame(&mut self, client: ClientId, frame: u8, kind: u8, amount: u64) -> ToDaemon {
        let bytes = Bytes(amount % 40);
        match frame {
            0..4 | 9 => self.time(client, kind, amount),
            4 => ToDaemon::MemoryReserve { client, bytes, wish: Bytes(amount % 90) },
            5 => ToDaemon::MemoryRelease {
                client,
                bytes: Bytes(if amount.is_multiple_of(29) { amount } else { 0 }),
            },
            6 => ToDaemon::MemoryUsed { client, round: self.rounds, used: bytes },
            7 => match amount % 9 {
                0 => ToDaemon::Detach { client },
                _ => ToDaemon::MemoryQuery { client },
            },
            8 if kind.is_multiple_of(2) => {
                let places = [
                    Residence::Resident,
                    Residence::Parking,
                    Residence::Parked,
                    Residence::Missed,
                    Residence::Returning,
                ];
                let residence = places[usize::from(kind / 2 % 5)];
                let bytes = Bytes(if amount.is_multiple_of(31) { u64::MAX } else { amount });
                let obstacle = amount.is_multiple_of(3).then_some(Obstacle::Work);
                ToDaemon::Parking { client, residence, bytes, obstacle }
            }
            _ => {
                let (first_launch, last_launch) =
                    (Timestamp::from_nanos(self.now - amount), Timestamp::from_nanos(self.now));
                let launches = u32::try_from(amount % 3).unwrap();
                ToDaemon::Iteration { client, first_launch, last_launch, launches }
            }
        }
    }

    fn hear(&mut self, actions: &[NodeAction]) {
        for action in actions {
            match action {
                NodeAction::Send { frame: ToClient::Allow { client, turn, allowed, until }, .. } => {
                    let stopped = until.as_nanos() <= self.now;
                    self.told.insert(*client, (*turn + u32::from(stopped), *allowed, !stopped));
                }
                NodeAction::Send { conn, frame: ToClient::Welcome { .. } } => {
                    self.sessions.insert(conn.slot());
                }
                NodeAction::Send { frame: ToClient::MemoryAsk { round, .. }, .. } => self.rounds = *round,
                NodeAction::Drop { conn, .. } => self.dropped.push(*conn),
                _ => {}
            }
        }
    }
}

/// Runs the steps. Returns the events for a journal, and the resulting actions.
fn run(steps: &[Step]) -> Result<Vec<(Timestamp, NodeEvent, Vec<NodeAction>)>, TestCaseError> {
    let mut node = support::node(config(1));
    let mut world = World { now: 1_000_000_000, ..World::default() };
    let mut kept = Vec::new();
    let mut queue: Vec<(Timestamp, NodeEvent)> = Vec::new();
    for step in steps {
        if let Some(event) = world.event(&node, step) {
            let back = if let Step::Back { us } = step { us * 1_000 } else { 0 };
            queue.push((Timestamp::from_nanos(world.now - back), event));
        }
        while let Some((now, event)) = queue.pop() {
            let (before, marker) = (state(&node, now), vec![NodeAction::UseKnown { question: 99 }]);
            let mut actions = marker.clone();
            let handled = node.handle(now, event.clone(), &mut actions);
            // Also in builds without the library's own debug assertions.
            node.invariants();
            if handled.is_err() {
                prop_assert_eq!(&actions, &marker, "{:?}", event);
            }
            if let NodeEvent::Closed { conn } = &event {
                world.sessions.remove(&conn.slot());
            }
            let no_effect = actions.contains(&NodeAction::Note(Note::NoEffect));
            if handled.is_err() || no_effect {
                prop_assert_eq!(state(&node, now), before, "{:?} {:?}", event, actions);
            } else {
                kept.push((now, event, actions[1..].to_vec()));
            }
            world.hear(&actions);
            queue.extend(world.dropped.drain(..).map(|conn| (now, NodeEvent::Closed { conn })));
        }
    }
    Ok(kept)
}

/// The steps reach the subject of the test: a refused step proves little.
#[test]
fn random_steps_reach_every_kind_of_decision() {
    use proptest::strategy::ValueTree as _;
    use proptest::test_runner::TestRunner;
    let mut runner = TestRunner::deterministic();
    let strategy = prop::collection::vec(step(), 150);
    let mut seen = BTreeMap::<&str, u32>::new();
    for _ in 0..100 {
        let steps = strategy.new_tree(&mut runner).unwrap().current();
        for (_, _, actions) in run(&steps).unwrap() {
            for action in actions {
                *seen.entry(label(&action)).or_default() += 1;
            }
        }
    }
    let wanted = [
        "Welcome",
        "Attached",
        "ShareChanged",
        "Allow",
        "stop",
        "Throttle",
        "MemoryGrant",
        "MemoryDeny",
        "MemoryPart",
        "MemoryAsk",
        "MemoryMember",
        "MemoryView",
        "Class",
        "known",
        "debt wait",
        "debt kept",
        "throttled",
        "denied",
        "left",
    ];
    for kind in wanted {
        assert!(seen.contains_key(kind), "{kind}: {seen:?}");
    }
}

fn label(action: &NodeAction) -> &'static str {
    match action {
        NodeAction::Send { frame, .. } => frame.label(),
        NodeAction::UseKnown { .. } => "known",
        NodeAction::Note(Note::DebtWait { .. }) => "debt wait",
        NodeAction::Note(Note::DebtKept { .. }) => "debt kept",
        NodeAction::Note(Note::Throttled { .. }) => "throttled",
        NodeAction::Note(Note::TokenOrder { order: TokenAction::Stop { .. } }) => "stop",
        NodeAction::Note(Note::MemoryDenied { .. }) => "denied",
        NodeAction::Note(Note::Left { .. }) => "left",
        _ => "other",
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A refused event, and one without effect, changes nothing; the rest of the journal gives the same actions again.
    #[test]
    fn what_is_refused_changes_nothing_and_the_rest_replays(steps in prop::collection::vec(step(), 1..150)) {
        let kept = run(&steps)?;
        let mut node = support::node(config(1));
        for (now, event, actions) in kept {
            let mut again = Vec::new();
            prop_assert!(node.handle(now, event.clone(), &mut again).is_ok());
            prop_assert_eq!(again, actions, "{:?}", event);
        }
    }
}
