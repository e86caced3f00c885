//! The node in virtual time, with processes that keep to the rules of the wire.

use super::super::shares::part;
use super::super::*;
use super::node_of;
use gshare_core::SmShare;
use proptest::prelude::*;

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

const WINDOW: Duration = Duration::from_millis(100);

fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

fn spec(quota: &str) -> ResourceSpec {
    ResourceSpec::new(quota.parse().unwrap(), SmShare::WHOLE, None).unwrap()
}

/// A token as its process knows it.
#[derive(Debug, Clone, Copy)]
struct Token {
    allowed: Duration,
    until: Timestamp,
}

/// A process with one device. While it is busy it launches kernels of one length, one after the other.
#[derive(Debug)]
struct Process {
    conn: ConnId,
    instance: usize,
    client: ClientId,
    kernel: Duration,
    busy: bool,
    asked: bool,
    /// The number of finished turns.
    turn: u32,
    token: Option<Token>,
    /// The end of the running kernel.
    ends: Option<Timestamp>,
    /// GPU time really used.
    ran: Duration,
    /// The last part the process was told.
    part: QuotaRange,
}

/// A node, its processes, and an independent account: each kernel with its instance and its end.
struct Bench {
    node: Node,
    now: Timestamp,
    processes: Vec<Option<Process>>,
    ran: Vec<(Timestamp, usize, Duration)>,
    specs: Vec<ResourceSpec>,
}

impl Bench {
    fn new(quotas: &[&str]) -> Self {
        let node = node_of(NodeConfig::default());
        let specs = quotas.iter().map(|quota| spec(quota)).collect();
        Self { node, now: Timestamp::from_millis(1_000), processes: Vec::new(), ran: Vec::new(), specs }
    }

    fn say(&mut self, index: usize, message: ToDaemon) {
        let Some(process) = &self.processes[index] else { return };
        let (conn, peer) = (process.conn, Peer { pid: 7, uid: 0 });
        let out = self.node.orders(self.now, NodeEvent::Received { conn, peer, frame: message }).unwrap();
        self.hear(out);
    }

    fn hear(&mut self, actions: Vec<NodeAction>) {
        for action in actions {
            let (conn, message) = match action {
                NodeAction::Send { conn, frame } => (conn, frame),
                NodeAction::Note(_) => continue,
                _ => panic!("{action:?}"),
            };
            let Some(Some(process)) = self.processes.get_mut(conn.slot() as usize) else { continue };
            match message {
                ToClient::Attached { client, spec, .. } => {
                    (process.client, process.part) = (client, spec.quota());
                }
                ToClient::ShareChanged { client, spec } => {
                    assert_eq!(client, process.client);
                    process.part = spec.quota();
                }
                ToClient::Allow { client, turn, allowed, until } => {
                    assert_eq!(client, process.client, "members know themselves by their own names");
                    if turn != process.turn {
                        continue;
                    }
                    process.asked = false;
                    if until > self.now {
                        process.token = Some(Token { allowed, until });
                        if process.ends.is_none() {
                            process.ends = Some(self.now.saturating_add(process.kernel));
                        }
                        continue;
                    }
                    process.turn += 1;
                    process.token = None;
                    let index = conn.slot() as usize;
                    if process.ends.is_none() {
                        self.asks(index);
                    }
                }
                ToClient::Refused { text, .. } => panic!("{text}"),
                _ => {}
            }
        }
    }

    fn start(&mut self, instance: usize, kernel: Duration, busy: bool) -> usize {
        let index = self.processes.len();
        let conn = ConnId::new(u32::try_from(index).unwrap(), 0);
        self.processes.push(Some(Process {
            conn,
            instance,
            client: ClientId::new(u32::MAX, 0),
            kernel,
            busy: false,
            asked: false,
            turn: 0,
            token: None,
            ends: None,
            ran: Duration::ZERO,
            part: QuotaRange::BEST_EFFORT,
        }));
        self.say(
            index,
            ToDaemon::Hello {
                pid_start: 0,
                pid: 0,
                run: RunId::new(1 + instance as u128),
                name: format!("instance{instance}"),
                program: "test".into(),
                spec: self.specs[instance],
                on_loss: OnDaemonLoss::Open,
            },
        );
        let (device, device_memory) = (DeviceUuid::gpu([1; 16]), Bytes::from_gib(16));
        self.say(
            index,
            ToDaemon::Attach {
                ordinal: 0,
                device,
                device_memory,
                allocated: Bytes::ZERO,
                part: None,
                used: Duration::ZERO,
                allowed: Duration::ZERO,
            },
        );
        self.set_busy(index, busy);
        index
    }

    fn set_busy(&mut self, index: usize, busy: bool) {
        let Some(process) = &mut self.processes[index] else { return };
        process.busy = busy;
        if busy && process.token.is_none() && !process.asked && process.ends.is_none() {
            self.asks(index);
        }
    }

    /// The process states its total, and its wait for a token or its rest.
    fn asks(&mut self, index: usize) {
        let Some(process) = &mut self.processes[index] else { return };
        process.asked = process.busy;
        let state = if process.busy { UseState::Wants } else { UseState::Idle };
        self.uses(index, state);
    }

    fn uses(&mut self, index: usize, state: UseState) {
        let Some(process) = &self.processes[index] else { return };
        let (client, turn, used) = (process.client, process.turn, process.ran);
        self.say(index, ToDaemon::use_of_time(client, turn, used, state));
    }

    fn kill(&mut self, index: usize) {
        if let Some(process) = self.processes[index].take() {
            let out = self.node.orders(self.now, NodeEvent::Closed { conn: process.conn }).unwrap();
            self.hear(out);
        }
    }

    /// A kernel of this process ends now.
    fn completed(&mut self, index: usize) {
        let now = self.now;
        let Some(process) = &mut self.processes[index] else { return };
        let kernel = process.kernel;
        process.ends = None;
        process.ran = process.ran.saturating_add(kernel);
        self.ran.push((now, process.instance, kernel));
        let Some(token) = process.token else { return self.asks(index) };
        if !process.busy || process.ran >= token.allowed || now >= token.until {
            process.token = None;
            process.turn += 1;
            return self.asks(index);
        }
        process.ends = Some(now.saturating_add(kernel));
        if !process.asked && token.allowed.saturating_sub(process.ran) <= us(2_000) {
            process.asked = true;
            self.uses(index, UseState::Extends);
        }
    }

    fn run_until(&mut self, end: Timestamp) {
        loop {
            let ends = |(index, process): (usize, &Option<Process>)| Some((process.as_ref()?.ends?, index));
            let next = self.processes.iter().enumerate().filter_map(ends).min();
            let due = self.node.next_deadline();
            match (next, due) {
                (Some((at, index)), due) if at <= end && due.is_none_or(|due| at <= due) => {
                    self.now = at;
                    self.completed(index);
                }
                (_, Some(due)) if due <= end => {
                    self.now = self.now.max(due);
                    let out = self.node.orders(self.now, NodeEvent::DeadlineReached).unwrap();
                    self.hear(out);
                }
                _ => break,
            }
        }
        self.now = end;
    }

    fn run_for(&mut self, ms: u64) {
        self.run_until(self.now.saturating_add(Duration::from_millis(ms)));
    }

    fn ran(&self, index: usize) -> Duration {
        self.processes[index].as_ref().unwrap().ran
    }

    /// The most by which an instance passed its limit over any stretch of time, beyond the tolerance of a limit by windows: two windows
    /// cut by the stretch, and for each of them one kernel past stopping.
    fn excess(&self, instance: usize, longest: Duration) -> Duration {
        let limit = self.specs[instance].quota().limit();
        let allowed = limit.of(WINDOW).saturating_add(longest).saturating_mul(2);
        // Time counts in ten thousandths of a nanosecond, so the limit's part of it is exact. A stretch from `i` to `j` passes the
        // limit by the excess after `j` less the excess before `i`, and of the latter only the least needs to be kept.
        let share = |time: Timestamp| i128::from(limit.get()) * i128::from(time.as_nanos());
        let mut sum = 0;
        let mut least = i128::MAX;
        let mut worst = 0;
        for (time, _, kernel) in self.ran.iter().filter(|(_, of, _)| *of == instance) {
            least = least.min(sum - share(*time));
            sum += 10_000 * i128::from(kernel.as_nanos());
            worst = worst.max(sum - share(*time) - least);
        }
        let worst = u64::try_from((worst + 9_999) / 10_000).unwrap();
        Duration::from_nanos(worst).saturating_sub(allowed)
    }

    /// The charges per process, as status shows them, add up to the engine's charge for their instance.
    fn charges_agree(&self) {
        for (id, tenant) in self.node.tenants.iter() {
            let status = self.node.tokens.0.client(id).unwrap();
            let members: Duration = tenant
                .turns
                .members()
                .map(|id| tenant.turns.of(id).0)
                .fold(Duration::ZERO, |sum, used| sum.saturating_add(used));
            assert!(members <= status.total_used, "those that have left were charged too");
            if tenant.turns.members().len() == self.processes.iter().flatten().count() {
                assert_eq!(members, status.total_used);
            }
        }
    }
}

#[test]
fn siblings_that_only_hold_a_context_cost_nothing() {
    for quota in ["0.4", "0.2:0.8", "0.5:1"] {
        let ran = |siblings: usize| {
            let mut bench = Bench::new(&[quota, "0.3:1"]);
            let worker = bench.start(0, us(500), true);
            bench.start(1, us(700), true);
            for _ in 0..siblings {
                bench.start(0, us(500), false);
            }
            bench.run_for(10_000);
            bench.ran(worker)
        };
        let alone = ran(0);
        assert!(alone >= us(1_900_000), "{alone} with {quota}");
        assert_eq!((ran(1), ran(3)), (alone, alone), "{quota}");
    }
}

#[test]
fn busy_siblings_share_the_limit_of_their_instance_evenly() {
    for kernels in [[500, 500, 500], [100, 1_000, 4_000]] {
        let mut bench = Bench::new(&["0.6"]);
        let processes = kernels.map(|kernel| bench.start(0, us(kernel), true));
        bench.run_for(10_000);
        let ran = processes.map(|index| bench.ran(index).as_nanos() / 1_000_000);
        assert!(ran.iter().all(|ms| (1_960..=2_040).contains(ms)), "{ran:?} ms of 2000 each");
        assert!(bench.excess(0, us(4_000)).is_zero());
        bench.charges_agree();
        bench.specs = vec![spec("0.4")];
        assert!(bench.excess(0, us(4_000)) > Duration::ZERO, "the account sees what passes a limit");
    }
}

/// The wait is a token, slack and grace, as in the module of the turns, and twice as much with an extension on its way.
#[test]
fn a_sibling_that_wakes_up_gets_the_next_token() {
    for offset in 0..60 {
        let mut bench = Bench::new(&["0.5:1"]);
        bench.start(0, us(400), true);
        let sleeper = bench.start(0, us(400), false);
        bench.run_for(1_000);
        bench.run_until(bench.now.saturating_add(us(offset * 1_700)));
        bench.set_busy(sleeper, true);
        bench.run_for(2 * (10 + 2 + 5));
        assert!(bench.ran(sleeper) > Duration::ZERO, "offset {offset}");
        let before = bench.ran(sleeper);
        bench.run_for(2_000);
        let ran = bench.ran(sleeper).saturating_sub(before).as_nanos() / 1_000_000;
        assert!((960..=1_040).contains(&ran), "{ran} ms of 1000: idle time was not saved up");
    }
}

#[test]
fn a_holder_that_dies_leaves_its_token_to_a_sibling_at_once() {
    let mut bench = Bench::new(&["0.5"]);
    let victim = bench.start(0, us(500), true);
    let heir = bench.start(0, us(500), true);
    bench.run_for(3);
    assert!(bench.processes[victim].as_ref().unwrap().token.is_some());
    bench.kill(victim);
    assert!(bench.processes[heir].as_ref().unwrap().token.is_some());
    assert_eq!(bench.processes[heir].as_ref().unwrap().part, "0.5".parse().unwrap());
}

/// A shrinking total is a fault of its process: the connection ends, and the charge stays.
#[test]
fn a_total_that_shrinks_ends_the_connection_and_stays_charged() {
    let mut bench = Bench::new(&["0.5"]);
    let index = bench.start(0, us(500), true);
    bench.run_for(20);
    let process = bench.processes[index].as_ref().unwrap();
    let (conn, client, turn) = (process.conn, process.client, process.turn);
    let charged = bench.node.tenants().next().unwrap().status.total_used;
    assert!(charged > Duration::ZERO);
    let (used, state) = (us(1), UseState::Holds);
    let frame = ToDaemon::use_of_time(client, turn, used, state);
    let event = NodeEvent::Received { conn, peer: Peer { pid: 7, uid: 0 }, frame };
    let actions = bench.node.orders(bench.now, event).unwrap();
    assert!(actions.contains(&NodeAction::Drop { conn, reason: RefusalCode::Protocol }), "{actions:?}");
    assert_eq!(bench.node.tenants().next().unwrap().status.total_used, charged);
}

/// A kernel of 400 ms outlasts its connection, and the use beyond the permission is charged after the return.
#[test]
fn a_process_that_comes_back_owes_its_overuse() {
    for (used, owed) in
        [(us(400_000), us(390_000)), (us(10_000), Duration::ZERO), (us(3_000), Duration::ZERO)]
    {
        let mut bench = Bench::new(&["0.1"]);
        let index = bench.start(0, us(500), false);
        let conn = bench.processes[index].as_ref().unwrap().conn;
        let peer = Peer { pid: 7, uid: 0 };
        bench.node.orders(bench.now, NodeEvent::Closed { conn }).unwrap();
        let spec = bench.specs[0];
        let hello = ToDaemon::Hello {
            pid_start: 0,
            pid: 0,
            run: RunId::new(1),
            name: "instance0".into(),
            program: "test".into(),
            spec,
            on_loss: OnDaemonLoss::Open,
        };
        let attach = ToDaemon::Attach {
            ordinal: 0,
            device: DeviceUuid::gpu([1; 16]),
            device_memory: Bytes::from_gib(16),
            allocated: Bytes::ZERO,
            part: None,
            used,
            allowed: us(10_000),
        };
        for frame in [hello, attach] {
            bench.node.orders(bench.now, NodeEvent::Received { conn, peer, frame }).unwrap();
        }
        let status = bench.node.tenants().next().unwrap().status;
        assert_eq!((status.total_used, status.window_used), (owed, owed));
    }
}

/// Gives the tenant of a client, by its place among all clients, another class.
fn class(bench: &mut Bench, index: usize, class: ServiceClass) {
    let tenant = bench.node.clients.iter().nth(index).unwrap().1.tenant;
    bench.node.tenant_at_mut(tenant).class = Some(class);
    bench.node.classify(bench.now, tenant, &mut Vec::new());
}

/// The co-scaler works on the instance, so its limit holds for all processes together.
#[test]
fn a_scaled_limit_holds_for_all_processes_of_the_instance() {
    let mut bench = Bench::new(&["0.1:1", "0.6:1"]);
    // Half of the SMs each: they run side by side, so the owner's part limits the other.
    let half =
        |quota: &str| ResourceSpec::new(quota.parse().unwrap(), SmShare::from_percent(50).unwrap(), None);
    bench.specs = vec![half("0.1:1").unwrap(), half("0.6:1").unwrap()];
    bench.start(0, us(500), true);
    class(&mut bench, 0, ServiceClass::BestEffort);
    let twin = bench.start(0, us(500), true);
    let owner = bench.start(1, us(500), false);
    class(&mut bench, 2, ServiceClass::SLO_SENSITIVE);
    bench.run_for(1_000);
    let before = (bench.ran(0), bench.ran(twin));
    bench.run_for(4_000);
    let ran = [bench.ran(0).saturating_sub(before.0), bench.ran(twin).saturating_sub(before.1)];
    let ran = ran.map(|ran| ran.as_nanos() / 1_000_000);
    assert!(ran.iter().all(|ms| (760..=840).contains(ms)), "{ran:?}: half of 40 % of 4 s each");
    let shown: Vec<_> = bench.node.clients(bench.now).collect();
    let scaled = Quota::from_percent(40);
    assert_eq!(shown.iter().filter(|client| client.scaled_limit == scaled).count(), 2, "{shown:?}");
    assert!(bench.ran(owner).is_zero());
}

/// Otherwise the requests on the device would exceed the whole for a period, and the engine would change to slots meanwhile.
#[test]
fn a_raised_request_makes_room_for_a_new_client_at_once() {
    let mut bench = Bench::new(&["0.1:1", "0.4:0.9", "0.5:1"]);
    bench.start(0, us(500), true);
    class(&mut bench, 0, ServiceClass::BestEffort);
    bench.start(1, us(500), true);
    class(&mut bench, 1, ServiceClass::SLO_SENSITIVE);
    bench.run_for(500);
    let requests = |bench: &Bench| -> Vec<u16> {
        bench.node.tenants().map(|tenant| tenant.status.share.quota.request().get()).collect()
    };
    assert!(requests(&bench)[1] > 4_000, "{:?}", requests(&bench));
    bench.start(2, us(500), true);
    assert_eq!(requests(&bench), [1_000, 4_000, 5_000]);
    bench.run_for(500);
    assert_eq!(requests(&bench), [1_000, 4_000, 5_000], "no time is left to raise it by");
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Start { instance: usize, kernel_us: u64, busy: bool },
    Busy { process: usize, busy: bool },
    Kill { process: usize },
    Run { us: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0usize..2, 50u64..30_000, any::<bool>())
            .prop_map(|(instance, kernel_us, busy)| Step::Start { instance, kernel_us, busy }),
        6 => (0usize..12, any::<bool>()).prop_map(|(process, busy)| Step::Busy { process, busy }),
        1 => (0usize..12).prop_map(|process| Step::Kill { process }),
        9 => (100u64..300_000).prop_map(|us| Step::Run { us }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Processes come, go, work and rest in any order, and the bench adds up the time really run.
    #[test]
    fn an_instance_never_exceeds_its_limit(
        steps in prop::collection::vec(step(), 1..60),
        limits in prop::array::uniform2(5u16..=50),
    ) {
        let quotas = limits.map(|limit| format!("0.05:{}", f64::from(limit) / 100.0));
        let mut bench = Bench::new(&quotas.each_ref().map(String::as_str));
        let mut killed = false;
        for step in steps {
            match step {
                Step::Start { instance, kernel_us, busy } if bench.processes.len() < 12 => {
                    bench.start(instance, us(kernel_us), busy);
                }
                Step::Busy { process, busy } if process < bench.processes.len() => bench.set_busy(process, busy),
                Step::Kill { process } if process < bench.processes.len() => {
                    killed = true;
                    bench.kill(process);
                }
                Step::Run { us: time } => bench.run_until(bench.now.saturating_add(us(time))),
                _ => {}
            }
            let mut parts = [0u32; 2];
            for process in bench.processes.iter().flatten() {
                parts[process.instance] += u32::from(process.part.limit().get());
            }
            for (part, limit) in parts.into_iter().zip(limits) {
                prop_assert!(part == 0 || part == u32::from(limit) * 100, "parts of {limit} %: {part}");
            }
        }
        for instance in 0..2 {
            // Two windows are cut. Beyond them each process may have one kernel under way, and a killed process did not state its use.
            let processes = bench.processes.len() as u64;
            let excess = bench.excess(instance, us(30_000));
            let unsaid = if killed { us(12_000).saturating_mul(processes) } else { Duration::ZERO };
            prop_assert!(excess <= unsaid, "instance {instance} of {limits:?}: {excess} too much");
        }
        if !killed {
            bench.charges_agree();
        }
    }
}
