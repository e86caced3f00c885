//! The memory of an instance with processes that keep to the rules of the wire, and a daemon that may be killed at any frame.

use super::super::*;
use super::node_of;
use proptest::prelude::*;
use std::collections::VecDeque;

const LIMIT: u64 = 1_000;

/// The memory side of a process.
#[derive(Debug)]
struct Holder {
    conn: ConnId,
    client: Option<ClientId>,
    /// Bytes granted and not given back, and the program's use of them.
    held: u64,
    used: u64,
    /// The process's part of the memory without a daemon, as it was told.
    part: Option<u64>,
    /// Per waiting allocation: the bytes requested by the program, the bytes missing at the question to the daemon, and the bytes granted
    /// to all processes at that time, with whether no process was stopped.
    asks: VecDeque<(u64, u64, (u64, bool))>,
    /// Whether the process is stopped, and answers no questions.
    stopped: bool,
    questions: Vec<(u32, u8)>,
    siblings: Vec<(u32, u64)>,
    views: Vec<u64>,
}

struct Bench {
    node: Node,
    now: Timestamp,
    holders: Vec<Option<Holder>>,
    granted: u64,
    denied: u64,
    /// Frames to processes; the frame being handled is first.
    under_way: VecDeque<(ConnId, ToClient)>,
}

fn node() -> Node {
    node_of(NodeConfig::default())
}

fn frames(actions: Vec<NodeAction>) -> Vec<(ConnId, ToClient)> {
    let frame = |action| match action {
        NodeAction::Send { conn, frame } => Some((conn, frame)),
        NodeAction::Note(_) => None,
        _ => panic!("{action:?}"),
    };
    actions.into_iter().filter_map(frame).collect()
}

impl Bench {
    fn new() -> Self {
        let (now, holders) = (Timestamp::from_millis(1_000), Vec::new());
        let config = NodeConfig { predecessor: false, ..NodeConfig::default() };
        let node = node_of(config);
        Self { node, now, holders, granted: 0, denied: 0, under_way: VecDeque::new() }
    }

    fn sum(&self, of: impl Fn(&Holder) -> u64) -> u64 {
        self.holders.iter().flatten().map(of).sum()
    }

    /// If the daemon is killed now, each process may grow to its part.
    fn check(&self) {
        let most = self.sum(|holder| holder.held.max(holder.part.unwrap_or(holder.held)));
        assert!(most <= LIMIT, "{most} of {LIMIT}: {:?}", self.holders);
    }

    fn is_quiet(&self) -> bool {
        self.holders.iter().flatten().all(|holder| !holder.stopped)
    }

    fn say(&mut self, index: usize, message: ToDaemon) {
        let Some(holder) = &self.holders[index] else { return };
        let (conn, peer) = (holder.conn, Peer { pid: 7, uid: 0 });
        let out = self.node.orders(self.now, NodeEvent::Received { conn, peer, frame: message }).unwrap();
        self.hear(out);
    }

    /// Delivers frames in the order of sending, with the frames an earlier frame leads to.
    fn hear(&mut self, actions: Vec<NodeAction>) {
        let first = self.under_way.is_empty();
        self.under_way.extend(frames(actions));
        while let Some((conn, message)) = self.under_way.front().filter(|_| first) {
            self.hear_one(conn.slot() as usize, message.clone());
            self.under_way.pop_front();
            self.check();
        }
    }

    fn hear_one(&mut self, index: usize, message: ToClient) {
        let used = self.sum(|holder| holder.used);
        let quiet = self.is_quiet();
        let settled = self
            .node
            .tenants
            .iter()
            .all(|(.., tenant)| tenant.settles.is_none_or(|settles| settles <= self.now));
        let others_ask = |(other, holder): (usize, &Option<Holder>)| {
            other != index && holder.as_ref().is_some_and(|holder| !holder.asks.is_empty())
        };
        let contended = self.holders.iter().enumerate().any(others_ask);
        let granted = self.granted;
        let Some(holder) = self.holders.get_mut(index).and_then(Option::as_mut) else { return };
        match message {
            ToClient::Attached { client, .. } => {
                holder.client = Some(client);
            }
            ToClient::MemoryPart { bytes, .. } => holder.part = Some(bytes.0),
            ToClient::MemoryGrant { bytes, .. } => {
                holder.held += bytes.0;
                let (asked, ..) = holder.asks.pop_front().expect("asked");
                // Its slack may have been called back for a sibling meanwhile, so the process asks for the rest.
                if holder.held - holder.used < asked {
                    return self.allocate(index, asked);
                }
                holder.used += asked;
                self.granted += 1;
            }
            ToClient::MemoryDeny { .. } => {
                let (asked, missing, before) = holder.asks.pop_front().expect("asked");
                // The holder may have freed some meanwhile.
                if asked.saturating_sub(holder.held - holder.used) < missing {
                    return self.allocate(index, asked);
                }
                self.denied += 1;
                // Another process with a question at the same time may take the rest.
                let alone = before == (granted, true) && !contended;
                assert!(
                    used + asked > LIMIT || !quiet || !settled || !alone,
                    "spurious: {used} used, {asked} asked"
                );
            }
            ToClient::MemoryAsk { round, recall, .. } => {
                holder.questions.push((round, recall));
                self.answer(index);
            }
            ToClient::MemoryMember { pid, used, .. } => holder.siblings.push((pid, used.0)),
            ToClient::MemoryView { .. } => {
                let others = core::mem::take(&mut holder.siblings).iter().map(|(_, used)| used).sum::<u64>();
                holder.views.push(others + holder.used);
            }
            ToClient::Refused { text, .. } => panic!("{text}"),
            _ => {}
        }
    }

    fn answer(&mut self, index: usize) {
        let Some(holder) = self.holders[index].as_mut().filter(|holder| !holder.stopped) else { return };
        let Some(client) = holder.client else { return };
        for (round, recall) in core::mem::take(&mut holder.questions) {
            let Some(holder) = &mut self.holders[index] else { return };
            let (used, slack) = (Bytes(holder.used), holder.held - holder.used);
            if recall != 0 && slack > 0 {
                holder.held = holder.used;
                self.say(index, ToDaemon::MemoryRelease { client, bytes: Bytes(slack) });
            }
            self.say(index, ToDaemon::MemoryUsed { client, round, used });
        }
    }

    fn hello(&mut self, conn: ConnId, pid: u32, name: &str) {
        let quota = "0.5".parse().unwrap();
        let spec = ResourceSpec::new(quota, gshare_core::SmShare::WHOLE, Some(Bytes(LIMIT))).unwrap();
        let (run, name, program) = (RunId::new(1), name.to_owned(), "test".to_owned());
        let frame =
            ToDaemon::Hello { pid_start: 0, pid, run, name, program, spec, on_loss: OnDaemonLoss::Open };
        let (peer, mut out) = (Peer { pid: 7, uid: 0 }, Vec::new());
        self.node.handle(self.now, NodeEvent::Received { conn, peer, frame }, &mut out).unwrap();
        self.hear(out);
    }

    fn start(&mut self) {
        let index = self.holders.len();
        let conn = ConnId::new(u32::try_from(index).unwrap(), 0);
        self.holders.push(Some(Holder {
            conn,
            client: None,
            held: 0,
            used: 0,
            part: None,
            asks: VecDeque::new(),
            stopped: false,
            questions: Vec::new(),
            siblings: Vec::new(),
            views: Vec::new(),
        }));
        self.attach(index);
    }

    fn attach(&mut self, index: usize) {
        let Some(holder) = &mut self.holders[index] else { return };
        holder.held = holder.used;
        let (allocated, part) = (Bytes(holder.used), holder.part.map(Bytes));
        let conn = holder.conn;
        self.hello(conn, u32::try_from(index).unwrap(), "instance");
        let (device, device_memory) = (DeviceUuid::gpu([1; 16]), Bytes::from_gib(16));
        self.say(
            index,
            ToDaemon::Attach {
                ordinal: 0,
                device,
                device_memory,
                allocated,
                part,
                used: Duration::ZERO,
                allowed: Duration::ZERO,
            },
        );
    }

    fn allocate(&mut self, index: usize, bytes: u64) {
        let before = (self.granted, self.is_quiet());
        let Some(holder) = self.holders.get_mut(index).and_then(Option::as_mut) else { return };
        let Some(client) = holder.client.filter(|_| !holder.stopped) else { return };
        if holder.held - holder.used >= bytes && holder.asks.is_empty() {
            holder.used += bytes;
            return;
        }
        if !holder.asks.is_empty() {
            return;
        }
        let missing = bytes - (holder.held - holder.used);
        holder.asks.push_back((bytes, missing, before));
        let (bytes, wish) = (Bytes(missing), Bytes(missing + LIMIT / 16));
        self.say(index, ToDaemon::MemoryReserve { client, bytes, wish });
    }

    fn free(&mut self, index: usize, bytes: u64) {
        let Some(holder) = self.holders.get_mut(index).and_then(Option::as_mut) else { return };
        holder.used -= bytes.min(holder.used);
        let keep = LIMIT / 16;
        let slack = holder.held - holder.used;
        if let Some(client) = holder.client.filter(|_| slack > 2 * keep && holder.asks.is_empty()) {
            holder.held = holder.used + keep;
            self.say(index, ToDaemon::MemoryRelease { client, bytes: Bytes(slack - keep) });
        }
    }

    fn stop(&mut self, index: usize, stopped: bool) {
        if let Some(holder) = self.holders.get_mut(index).and_then(Option::as_mut) {
            holder.stopped = stopped;
            self.answer(index);
        }
    }

    fn kill(&mut self, index: usize) {
        if let Some(holder) = self.holders.get_mut(index).and_then(Option::take) {
            let out = self.node.orders(self.now, NodeEvent::Closed { conn: holder.conn }).unwrap();
            self.hear(out);
        }
    }

    fn pass(&mut self, ms: u64) {
        let end = self.now.saturating_add(Duration::from_millis(ms));
        while let Some(due) = self.node.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            let out = self.node.orders(self.now, NodeEvent::DeadlineReached).unwrap();
            self.hear(out);
        }
        self.now = end;
    }

    /// Kills the daemon; the processes grow to their parts, and return to the next daemon in some order.
    fn restart(&mut self, order: u64) {
        self.node = node();
        for holder in self.holders.iter_mut().flatten() {
            (holder.client, holder.stopped) = (None, false);
            holder.questions.clear();
            // The program takes its whole part, or half of it.
            let most = holder.part.unwrap_or(holder.held);
            holder.asks.clear();
            holder.used = holder.used.max(if order.is_multiple_of(3) { most } else { most / 2 });
            holder.held = holder.used;
        }
        self.check();
        let n = self.holders.len() as u64;
        for step in 0..n {
            let index = usize::try_from((order + step) % n).unwrap();
            self.attach(index);
            // An early process tries to take everything.
            self.allocate(index, LIMIT / 2);
            self.pass(order % 50);
        }
    }

    fn view(&mut self, index: usize) -> u64 {
        let client = self.holders[index].as_ref().unwrap().client.unwrap();
        self.say(index, ToDaemon::MemoryQuery { client });
        self.holders[index].as_mut().unwrap().views.pop().expect("an answer")
    }
}

#[test]
fn slack_of_an_idle_sibling_is_called_back_before_a_denial() {
    let mut bench = Bench::new();
    for _ in 0..4 {
        bench.start();
    }
    for index in 0..4 {
        bench.allocate(index, 100);
    }
    assert_eq!(bench.sum(|holder| holder.held), 4 * 162);
    bench.allocate(0, 600);
    assert_eq!((bench.denied, bench.sum(|holder| holder.used)), (0, LIMIT), "to the byte");
    bench.allocate(1, 1);
    assert_eq!(bench.denied, 1);
}

#[test]
fn each_process_is_told_what_all_use_to_the_byte() {
    let mut bench = Bench::new();
    for index in 0..3 {
        bench.start();
        bench.allocate(index, 101 + index as u64);
    }
    assert_eq!([0, 1, 2].map(|index| bench.view(index)), [306; 3]);
    bench.free(2, 3);
    assert_eq!([0, 1, 2].map(|index| bench.view(index)), [303; 3]);
    let out = bench.node.orders(bench.now, NodeEvent::UseAsked { question: 5 }).unwrap();
    let asked = frames(out);
    assert_eq!(asked.len(), 3);
    for (nth, (conn, frame)) in asked.into_iter().enumerate() {
        let ToClient::MemoryAsk { client, round, .. } = frame else { panic!("{frame:?}") };
        let used = Bytes(bench.holders[conn.slot() as usize].as_ref().unwrap().used);
        let mut out = Vec::new();
        let (peer, frame) = (Peer { pid: 7, uid: 0 }, ToDaemon::MemoryUsed { client, round, used });
        bench.node.handle(bench.now, NodeEvent::Received { conn, peer, frame }, &mut out).unwrap();
        let known = NodeAction::UseKnown { question: 5 };
        assert_eq!(out, if nth == 2 { vec![known] } else { vec![] }, "with the last answer");
    }
    let shown: Bytes = bench.node.clients(bench.now).map(|client| client.memory).sum();
    assert_eq!(shown, Bytes(303));
}

/// A stopped sibling delays the first answer by a bounded time, and no later answer.
#[test]
fn a_stopped_sibling_is_waited_for_once() {
    let mut bench = Bench::new();
    bench.start();
    bench.start();
    bench.allocate(0, 500);
    bench.stop(0, true);
    bench.allocate(1, 450);
    assert_eq!((bench.granted, bench.denied), (1, 0), "562 are held of the 1000");
    bench.pass(200);
    assert_eq!((bench.granted, bench.denied), (1, 1));
    bench.allocate(1, 450);
    assert_eq!(bench.denied, 2, "at once");
    bench.stop(0, false);
    bench.allocate(1, 450);
    assert_eq!(bench.granted, 2);
}

/// The next daemon meets the processes one after the other.
#[test]
fn a_process_that_is_back_first_waits_for_its_siblings() {
    let mut bench = Bench::new();
    bench.start();
    bench.start();
    bench.allocate(0, 300);
    bench.allocate(1, 300);
    bench.node = node();
    bench.attach(0);
    bench.allocate(0, 600);
    assert_eq!((bench.granted, bench.denied), (2, 0), "it waits");
    bench.pass(100);
    bench.attach(1);
    bench.pass(1_000);
    assert_eq!((bench.granted, bench.denied), (2, 1));
    assert_eq!(bench.sum(|holder| holder.used), 600);
    bench.allocate(0, 400);
    assert_eq!(bench.granted, 3);
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Start,
    Allocate { index: usize, bytes: u64 },
    Free { index: usize, bytes: u64 },
    Stop { index: usize, stopped: bool },
    View { index: usize },
    Kill { index: usize },
    Pass { ms: u64 },
    Restart { order: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Start),
        12 => (0usize..6, 1u64..400).prop_map(|(index, bytes)| Step::Allocate { index, bytes }),
        8 => (0usize..6, 1u64..400).prop_map(|(index, bytes)| Step::Free { index, bytes }),
        1 => (0usize..6, any::<bool>()).prop_map(|(index, stopped)| Step::Stop { index, stopped }),
        1 => (0usize..6).prop_map(|index| Step::View { index }),
        1 => (0usize..6).prop_map(|index| Step::Kill { index }),
        2 => (1u64..1_500).prop_map(|ms| Step::Pass { ms }),
        1 => (0u64..1_000).prop_map(|order| Step::Restart { order }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// [`Bench::check`] runs after each frame, where a daemon may be killed.
    #[test]
    fn an_instance_never_holds_more_than_its_limit_whenever_the_daemon_is_killed(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut bench = Bench::new();
        bench.start();
        for step in steps {
            match step {
                Step::Start if bench.holders.len() < 6 => bench.start(),
                Step::Allocate { index, bytes } => bench.allocate(index, bytes),
                Step::Free { index, bytes } => bench.free(index, bytes),
                Step::Stop { index, stopped } => bench.stop(index, stopped),
                Step::View { index } => {
                    if bench.is_quiet() && bench.holders.get(index).is_some_and(Option::is_some) {
                        let (seen, used) = (bench.view(index), bench.sum(|holder| holder.used));
                        prop_assert_eq!(seen, used);
                    }
                }
                Step::Kill { index } => bench.kill(index),
                Step::Pass { ms } => bench.pass(ms),
                Step::Restart { order } => bench.restart(order),
                Step::Start => {}
            }
            bench.check();
        }
    }
}
