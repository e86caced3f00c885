//! The platform with a host in virtual time.

use gshare_core::mig::GpuModel;
use gshare_core::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Life, Part, PlatformAction, PlatformEvent, Regime, Rejection,
    StopCause, Work,
};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::request::{NodeId, RequestId, TenantId, TenantLimits};
use gshare_core::scale::InstanceId;
use gshare_core::{
    BasisPoints, Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, Quota, SmShare, Timestamp,
};
use gshare_sched::platform::{
    FractionalConfig, FractionalPolicies, FractionalPool, Platform, PlatformConfig, PlatformError,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const MS: fn(u64) -> Duration = Duration::from_millis;

fn gib(n: u64) -> Bytes {
    Bytes::from_gib(n)
}

/// Instances on a quarter, a half and all of the SMs.
fn profile() -> ProfileTable {
    let point = |percent, rate, p50, p95| {
        let sm = SmShare::from_percent(percent).unwrap();
        ProfilePoint::measured(sm, Quota::WHOLE, 1, rate, MS(p50), MS(p95)).unwrap()
    };
    ProfileTable::grid(vec![point(25, 50.0, 20, 22), point(50, 90.0, 11, 13), point(100, 120.0, 8, 9)])
        .unwrap()
}

fn inference(memory: u64) -> FunctionSpec {
    FunctionSpec::new(Work::Inference { profile: Some(profile()) }, gib(memory))
        .with_slo(MS(100))
        .with_instances(0, 4)
        .with_loads(MS(3_000), MS(500))
}

#[derive(Debug, Clone, Copy)]
enum Later {
    Arrive(FunctionId),
    Report(InstanceId, InstanceReport),
    Done(RequestId, InstanceId),
    Wake,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Answered(Duration),
    Rejected(Rejection),
}

struct Instance {
    function: FunctionId,
    parts: Vec<Part>,
    life: Life,
    has: BTreeSet<RequestId>,
}

/// Carries out what the platform orders, and checks that it can be.
struct Host {
    platform: Platform,
    now: Timestamp,
    later: BTreeMap<(Timestamp, u64), Later>,
    counter: u64,
    instances: BTreeMap<InstanceId, Instance>,
    memory: BTreeMap<GpuId, Bytes>,
    requests: BTreeMap<RequestId, (FunctionId, Timestamp)>,
    ends: BTreeMap<RequestId, (FunctionId, End)>,
    orders: Vec<PlatformAction>,
    /// How long a request takes.
    takes: Duration,
}

impl Host {
    fn new(platform: Platform) -> Self {
        Self {
            platform,
            now: Timestamp::ZERO,
            later: BTreeMap::new(),
            counter: 0,
            instances: BTreeMap::new(),
            memory: BTreeMap::new(),
            requests: BTreeMap::new(),
            ends: BTreeMap::new(),
            orders: Vec::new(),
            takes: MS(10),
        }
    }

    fn with(devices: &[u64]) -> Self {
        let mut host = Self::new(Platform::fractional().unwrap());
        for (gpu, &memory) in (0..).zip(devices) {
            host.find(gpu, DeviceSpec::new(NodeId(gpu / 2), gib(memory)));
        }
        host
    }

    fn find(&mut self, gpu: u32, spec: DeviceSpec) {
        self.memory.insert(GpuId(gpu), spec.memory);
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId(gpu), spec }).unwrap();
    }

    fn lose(&mut self, gpu: u32) {
        self.memory.remove(&GpuId(gpu));
        let lost = |of: &Instance| !of.parts.is_empty() && of.parts.iter().all(|part| part.gpu == GpuId(gpu));
        self.instances.retain(|_, of| !lost(of));
        for of in self.instances.values_mut() {
            of.parts.retain(|part| part.gpu != GpuId(gpu));
        }
        self.tell(PlatformEvent::DeviceLost { gpu: GpuId(gpu) }).unwrap();
    }

    fn deploy(&mut self, function: u32, spec: FunctionSpec) {
        let function = FunctionId(function);
        self.tell(PlatformEvent::FunctionDeployed { function, spec: Box::new(spec) }).unwrap();
    }

    fn after(&mut self, time: Duration, later: Later) {
        self.counter += 1;
        self.later.insert((self.now + time, self.counter), later);
    }

    /// Requests of a function, one each `every`, from now on.
    fn load(&mut self, function: u32, every: Duration, count: u64) {
        for n in 0..count {
            self.after(every.saturating_mul(n), Later::Arrive(FunctionId(function)));
        }
    }

    fn arrive(&mut self, function: FunctionId, deadline: Option<Timestamp>) -> RequestId {
        let request = RequestId(self.requests.len() as u64 + self.ends.len() as u64);
        self.requests.insert(request, (function, self.now));
        self.tell(PlatformEvent::RequestArrived { request, function, deadline }).unwrap();
        request
    }

    fn tell(&mut self, event: PlatformEvent) -> Result<(), PlatformError> {
        let mut orders = Vec::new();
        let told = self.platform.handle(self.now, event, &mut orders);
        if told.is_err() {
            assert!(orders.is_empty(), "orders beside an error");
            return told;
        }
        for order in orders {
            self.obey(&order);
            self.orders.push(order);
        }
        self.platform.invariants();
        self.check_books();
        told
    }

    fn check_books(&self) {
        let mut used: BTreeMap<GpuId, (u64, u64)> = BTreeMap::new();
        for part in self.instances.values().flat_map(|of| &of.parts) {
            let of = used.entry(part.gpu).or_default();
            of.0 += part.share.memory().map_or(0, Bytes::get);
            of.1 += u64::from(part.share.time().request().get()) * u64::from(part.share.sm().get());
        }
        for (gpu, (memory, area)) in used {
            assert!(memory <= self.memory[&gpu].get(), "{gpu} holds {memory} bytes");
            assert!(area <= 100_000_000, "{gpu} is guaranteed to {area}");
        }
    }

    fn obey(&mut self, order: &PlatformAction) {
        match order.clone() {
            PlatformAction::Start { instance, function, parts, takes, parked, .. } => {
                assert!(!parked, "this pool starts nothing parked");
                let of = Instance { function, parts, life: Life::Starting, has: BTreeSet::new() };
                assert!(self.instances.insert(instance, of).is_none(), "{instance} twice");
                self.after(takes, Later::Report(instance, InstanceReport::Ready));
            }
            PlatformAction::Park { instance } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert!(of.has.is_empty() && of.life == Life::Ready, "{instance} cannot be parked");
                of.life = Life::Parked;
                self.after(MS(300), Later::Report(instance, InstanceReport::Parked));
            }
            PlatformAction::Unpark { instance, parts, takes } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert!(of.life == Life::Parked && of.parts.is_empty(), "{instance} is not parked");
                of.parts = parts;
                self.after(takes, Later::Report(instance, InstanceReport::Unparked));
            }
            PlatformAction::Drain { instance } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert_eq!(of.life, Life::Ready, "{instance} cannot drain");
                of.life = Life::Draining;
            }
            PlatformAction::Stop { instance, cause } => {
                let of = self.instances.get_mut(&instance).unwrap();
                let hard =
                    matches!(cause, StopCause::TimedOut | StopCause::DrainTimedOut | StopCause::PartLost);
                assert!(of.has.is_empty() || hard, "{instance} is stopped with requests: {cause:?}");
                assert_ne!(of.life, Life::Stopped, "{instance} is stopped twice");
                of.life = Life::Stopped;
                self.after(MS(50), Later::Report(instance, InstanceReport::Gone));
            }
            PlatformAction::Dispatch { request, instance } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert_eq!((of.function, of.life), (self.requests[&request].0, Life::Ready), "{request}");
                assert!(of.has.insert(request));
                let takes = self.takes;
                self.after(takes, Later::Done(request, instance));
            }
            PlatformAction::Reject { request, reason } => {
                let (function, _) = self.requests.remove(&request).unwrap();
                self.ends.insert(request, (function, End::Rejected(reason)));
            }
            PlatformAction::Profile { .. } | PlatformAction::Fetch { .. } | PlatformAction::Forget { .. } => {
            }
        }
    }

    fn happen(&mut self, later: Later) {
        match later {
            Later::Arrive(function) => {
                self.arrive(function, None);
            }
            Later::Report(instance, report) => {
                let Some(of) = self.instances.get_mut(&instance) else { return };
                match report {
                    InstanceReport::Ready if of.life == Life::Starting => of.life = Life::Ready,
                    InstanceReport::Unparked if of.life == Life::Parked => of.life = Life::Ready,
                    InstanceReport::Parked if of.life == Life::Parked => of.parts.clear(),
                    InstanceReport::Gone | InstanceReport::Refused | InstanceReport::Completed => {
                        self.instances.remove(&instance);
                    }
                    // A stop crossed it.
                    _ => return,
                }
                self.tell(PlatformEvent::Instance { instance, report }).unwrap();
            }
            Later::Done(request, instance) => {
                let Some(of) = self.instances.get_mut(&instance) else { return };
                if of.has.remove(&request) {
                    let (function, arrived) = self.requests.remove(&request).unwrap();
                    let took = self.now.saturating_since(arrived);
                    self.ends.insert(request, (function, End::Answered(took)));
                    self.tell(PlatformEvent::RequestDone { request, took: self.takes }).unwrap();
                }
            }
            Later::Wake => self.tell(PlatformEvent::DeadlineReached).unwrap(),
        }
    }

    fn run_until(&mut self, end: Timestamp) {
        loop {
            let due = self.platform.next_deadline().filter(|due| *due <= end);
            let next = self.later.first_key_value().map(|(key, _)| *key).filter(|(at, _)| *at <= end);
            match (due, next) {
                (None, None) => break,
                (Some(due), next) if next.is_none_or(|(at, _)| due < at) => {
                    self.now = self.now.max(due);
                    self.happen(Later::Wake);
                }
                (_, Some(key)) => {
                    let later = self.later.remove(&key).unwrap();
                    self.now = self.now.max(key.0);
                    self.happen(later);
                }
                _ => break,
            }
        }
        self.now = end;
    }

    fn run(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    fn count(&self, matches: impl Fn(&PlatformAction) -> bool) -> usize {
        self.orders.iter().filter(|order| matches(order)).count()
    }

    fn answered(&self, function: u32) -> Vec<Duration> {
        let of = self.ends.values().filter(|(of, _)| *of == FunctionId(function));
        of.filter_map(|(_, end)| if let End::Answered(took) = end { Some(*took) } else { None }).collect()
    }

    fn rejected(&self) -> Vec<Rejection> {
        let end = |(_, end): &(FunctionId, End)| if let End::Rejected(why) = end { Some(*why) } else { None };
        self.ends.values().filter_map(end).collect()
    }
}

#[test]
fn a_function_without_instances_is_given_one_and_loses_it_when_nobody_calls() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2));
    host.run(MS(5_000));
    assert!(host.orders.is_empty(), "nobody called: {:?}", host.orders);
    host.load(0, MS(100), 20);
    host.run(MS(10_000));
    assert_eq!(host.answered(0).len(), 20);
    assert_eq!(host.answered(0)[0], MS(3_010), "a load from disk, and its own time");
    host.run(Duration::from_secs(200));
    assert!(host.instances.is_empty(), "it is kept for ever");
    host.load(0, MS(1), 1);
    host.run(MS(2_000));
    assert_eq!(host.answered(0).last(), Some(&MS(510)), "its weights were in host memory");
}

#[test]
fn load_beyond_one_instance_starts_more_and_each_request_is_answered_once() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(2));
    host.takes = MS(18);
    host.load(0, MS(8), 2_500);
    host.run(MS(30_000));
    assert_eq!(host.answered(0).len(), 2_500, "{:?}", host.rejected());
    assert!(host.count(|order| matches!(order, PlatformAction::Start { .. })) > 1);
    let stats = host.platform.function(FunctionId(0)).unwrap().stats;
    assert_eq!((stats.arrived, stats.answered, stats.rejected), (2_500, 2_500, 0));
    assert!(stats.within_slo > 1_000, "{stats:?}");
}

/// Three functions of 9 GiB on two devices of 16 GiB: the memory of one is lent to another while nobody calls it.
#[test]
fn a_function_that_finds_no_memory_is_served_when_another_has_been_parked() {
    let mut host = Host::with(&[16, 16]);
    for function in 0..3 {
        host.deploy(function, inference(9));
        host.load(function, MS(4_000), 10);
    }
    host.run(Duration::from_secs(60));
    for function in 0..3 {
        assert_eq!(host.answered(function).len(), 10, "fn{function}");
        let slowest = host.answered(function).into_iter().max().unwrap();
        // Two loads, of the one before it and its own, and in between a rest and a park.
        assert!(slowest <= MS(6_510), "fn{function} waited {slowest}");
    }
    assert!(host.count(|order| matches!(order, PlatformAction::Park { .. })) > 0);
    assert!(host.count(|order| matches!(order, PlatformAction::Unpark { .. })) > 0);
}

#[test]
fn without_parking_it_waits_for_as_long_as_a_request_may() {
    let config = FractionalConfig::default().without_parking().with_max_wait(MS(5_000));
    let pool = FractionalPool::new(config, FractionalPolicies::fast().unwrap()).unwrap();
    let mut host = Host::new(Platform::new(PlatformConfig::default(), vec![Box::new(pool)]).unwrap());
    host.find(0, DeviceSpec::new(NodeId(0), gib(16)));
    host.deploy(0, inference(9));
    host.deploy(1, inference(9));
    host.load(0, MS(100), 300);
    host.load(1, MS(100), 1);
    host.run(Duration::from_secs(20));
    assert_eq!(host.rejected(), [Rejection::WaitedTooLong]);
    assert!(host.platform.function(FunctionId(1)).unwrap().stats.unmet > 0, "and it is told");
}

#[test]
fn a_busy_instance_makes_way_for_one_that_has_waited_long_and_comes_back() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(9));
    host.deploy(1, inference(9));
    host.load(0, MS(12), 2_000);
    host.run(MS(5_000));
    host.load(1, MS(1), 3);
    host.run(MS(6_000));
    assert_eq!(host.answered(1).len(), 3, "{:?}", host.rejected());
    host.run(Duration::from_secs(40));
    assert_eq!(host.answered(0).len(), 2_000, "{:?}", host.rejected());
}

#[test]
fn a_lost_device_ends_its_instances_and_their_requests_go_elsewhere() {
    let mut host = Host::with(&[16, 16]);
    host.deploy(0, inference(2).with_instances(1, 2));
    host.load(0, MS(50), 200);
    host.run(MS(4_500));
    let on = host.instances.values().next().unwrap().parts[0].gpu;
    host.lose(on.0);
    host.run(Duration::from_secs(20));
    assert_eq!(host.answered(0).len(), 200, "{:?}", host.rejected());
    host.find(on.0, DeviceSpec::new(NodeId(0), gib(16)));
    host.run(Duration::from_secs(1));
}

#[test]
fn training_is_a_gang_that_starts_together_starts_again_together_and_completes() {
    let mut host = Host::with(&[16, 16, 16]);
    let share = GpuShare::new(
        gshare_core::QuotaRange::new(Quota::from_percent(40).unwrap(), Quota::WHOLE).unwrap(),
        SmShare::WHOLE,
        SmShare::WHOLE,
        Some(gib(8)),
    )
    .unwrap();
    host.deploy(
        7,
        FunctionSpec::new(Work::Training { workers: 3, share }, gib(8)).with_loads(MS(2_000), MS(900)),
    );
    host.run(MS(3_000));
    let (&first, of) = host.instances.first_key_value().unwrap();
    let devices: BTreeSet<GpuId> = of.parts.iter().map(|part| part.gpu).collect();
    assert_eq!((of.life, devices.len(), of.parts[0].share), (Life::Ready, 3, share));
    host.lose(2);
    host.run(MS(3_000));
    assert!(host.instances.is_empty(), "two of three workers are no gang");
    host.find(2, DeviceSpec::new(NodeId(1), gib(16)));
    host.run(MS(4_000));
    let (&second, of) = host.instances.first_key_value().unwrap();
    assert!(second > first && of.life == Life::Ready);
    host.after(MS(10), Later::Report(second, InstanceReport::Completed));
    host.run(Duration::from_secs(60));
    assert!(host.instances.is_empty(), "it was done");
    let error = host.tell(PlatformEvent::RequestArrived {
        request: RequestId(9),
        function: FunctionId(7),
        deadline: None,
    });
    assert_eq!(error.unwrap_err().to_string(), "fn7 trains and answers no requests");
}

#[test]
fn a_function_without_a_profile_is_profiled_first_and_its_requests_wait() {
    let mut host = Host::with(&[16]);
    let function = FunctionId(0);
    let mut spec = inference(2);
    spec.work = Work::Inference { profile: None };
    host.deploy(0, spec);
    assert_eq!(host.orders, [PlatformAction::Profile { function }]);
    let early = host.arrive(function, None);
    let late = host.arrive(function, Some(host.now + MS(700)));
    host.run(MS(1_000));
    assert_eq!(host.ends[&late].1, End::Rejected(Rejection::DeadlineMissed));
    host.tell(PlatformEvent::ProfileLearned { function, profile: profile() }).unwrap();
    host.run(MS(4_000));
    assert_eq!(host.ends[&early].1, End::Answered(MS(4_010)));
    let again = host.tell(PlatformEvent::ProfileLearned { function, profile: profile() });
    assert_eq!(again, Err(PlatformError::NotProfiling { function }));
}

#[test]
fn a_tenant_has_as_many_requests_at_work_and_as_much_gpu_time_as_it_may() {
    let mut host = Host::with(&[16]);
    let tenant = TenantId(3);
    host.deploy(0, inference(2).with_tenant(tenant).with_instances(1, 1));
    host.run(MS(4_000));
    let mut limits = TenantLimits::default();
    (limits.max_processes, limits.max_waiting) = (2, 3);
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    let requests: Vec<RequestId> = (0..5).map(|_| host.arrive(FunctionId(0), None)).collect();
    assert_eq!(host.count(|order| matches!(order, PlatformAction::Dispatch { .. })), 1);
    assert_eq!(host.platform.waiting(FunctionId(0)), 3);
    assert_eq!(host.ends[&requests[4]].1, End::Rejected(Rejection::TenantQueueFull));
    host.run(MS(1_000));
    assert_eq!(host.answered(0).len(), 4);
    assert_eq!(host.platform.waiting(FunctionId(0)), 0);

    // 1 % of 60 s is 600 ms of the device; each request takes 10 ms of a quarter of it.
    let mut limits = TenantLimits::default();
    limits.gpu_time = BasisPoints::from_percent(1).unwrap();
    host.tell(PlatformEvent::TenantLimited { tenant, limits }).unwrap();
    host.load(0, MS(21), 1_000);
    host.run(MS(21_500));
    let answered = host.answered(0).len();
    assert!((236..=245).contains(&answered), "{answered} of 1,000 were let in in this window");
}

#[test]
fn a_removed_function_answers_what_it_has_and_its_name_is_free_when_all_of_it_is_gone() {
    let mut host = Host::with(&[16]);
    host.deploy(0, inference(2));
    host.load(0, MS(1), 5);
    host.run(MS(3_005));
    let function = FunctionId(0);
    host.tell(PlatformEvent::FunctionRemoved { function }).unwrap();
    let spec = Box::new(inference(2));
    let error = host.tell(PlatformEvent::FunctionDeployed { function, spec: spec.clone() });
    assert_eq!(error, Err(PlatformError::FunctionExists { function }));
    host.run(MS(1_000));
    assert_eq!(host.answered(0).len() + host.rejected().len(), 5);
    assert!(host.instances.is_empty());
    host.tell(PlatformEvent::FunctionDeployed { function, spec }).unwrap();
}

#[test]
fn bad_input_is_refused_by_field_and_bound_and_changes_nothing() {
    let mut host = Host::with(&[16]);
    let text = |host: &mut Host, event| host.tell(event).unwrap_err().to_string();
    let deploy = |function, spec| PlatformEvent::FunctionDeployed { function, spec: Box::new(spec) };
    let spec = inference(2).with_instances(3, 2);
    assert_eq!(
        text(&mut host, deploy(FunctionId(0), spec)),
        "fn0: max_instances is 2, need at least min_instances (3) and 1"
    );
    let fast = inference(2).with_slo(MS(4));
    assert!(
        text(&mut host, deploy(FunctionId(0), fast)).contains("the best is 9"),
        "the least that was measured"
    );
    let sliced = inference(2).with_regime(Regime::Sliced);
    assert!(text(&mut host, deploy(FunctionId(0), sliced)).contains("no pool of sliced devices"));
    let layout =
        gshare_core::platform::MigLayout::new(GpuModel::find("A100-80").unwrap(), Vec::new()).unwrap();
    let spec = DeviceSpec::new(NodeId(0), gib(80)).with_mig(layout);
    assert!(text(&mut host, PlatformEvent::DeviceFound { gpu: GpuId(8), spec }).contains("sliced"));
    let spec = DeviceSpec::new(NodeId(0), Bytes::ZERO);
    assert!(text(&mut host, PlatformEvent::DeviceFound { gpu: GpuId(8), spec }).contains("memory is 0"));
    let lost = PlatformEvent::DeviceLost { gpu: GpuId(9) };
    assert_eq!(text(&mut host, lost), "unknown gpu9");
    let report = InstanceReport::Ready;
    let unknown = PlatformEvent::Instance { instance: InstanceId(0), report };
    assert_eq!(text(&mut host, unknown), "unknown instance0");
    let mut limits = TenantLimits::default();
    limits.max_processes = 0;
    let limited = PlatformEvent::TenantLimited { tenant: TenantId(1), limits };
    assert_eq!(text(&mut host, limited), "max_processes of tenant1 is 0: need more than 0");
    host.now = Timestamp::from_millis(5);
    host.tell(PlatformEvent::DeadlineReached).unwrap();
    host.now = Timestamp::from_millis(4);
    assert!(text(&mut host, PlatformEvent::DeadlineReached).starts_with("time went back"));
    assert!(host.orders.is_empty());
}

/// One thing that happens in the random test.
#[derive(Debug, Clone, Copy)]
enum Op {
    Request(u32),
    Burst(u32),
    Die(usize),
    Refuse(usize),
    Lose(u32),
    Find(u32),
    Cancel(usize),
    Remove(u32),
    Deploy(u32),
}

fn ops() -> impl Strategy<Value = Vec<(Op, u64)>> {
    let op = prop_oneof![
        12 => (0u32..4).prop_map(Op::Request),
        3 => (0u32..4).prop_map(Op::Burst),
        2 => (0usize..8).prop_map(Op::Die),
        1 => (0usize..8).prop_map(Op::Refuse),
        1 => (0u32..3).prop_map(Op::Lose),
        2 => (0u32..3).prop_map(Op::Find),
        1 => (0usize..8).prop_map(Op::Cancel),
        1 => (0u32..5).prop_map(Op::Remove),
        2 => (0u32..5).prop_map(Op::Deploy),
    ];
    prop::collection::vec((op, 0u64..3_000), 1..80)
}

fn random_spec(function: u32) -> FunctionSpec {
    match function {
        4 => FunctionSpec::new(Work::Training { workers: 2, share: GpuShare::WHOLE }, gib(4)),
        _ => inference([2, 9, 9, 12][function as usize]).with_instances(function / 3, 1 + function),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever happens, each request ends once, nothing is oversold, and at the end nobody waits.
    #[test]
    fn requests_end_once_and_devices_are_never_oversold(ops in ops()) {
        let mut host = Host::with(&[16, 16, 16]);
        let mut deployed = BTreeSet::new();
        for (op, pause) in ops {
            let nth = |host: &Host, n: usize, life: Life| {
                let of = host.instances.iter().filter(|(_, of)| of.life == life).map(|(id, _)| *id);
                of.cycle().nth(n)
            };
            match op {
                Op::Request(f) | Op::Burst(f) if deployed.contains(&f) => {
                    for _ in 0..if matches!(op, Op::Burst(_)) { 40 } else { 1 } {
                        host.arrive(FunctionId(f), None);
                    }
                }
                Op::Die(n) => {
                    if let Some(id) = host.instances.keys().copied().nth(n) {
                        host.after(MS(0), Later::Report(id, InstanceReport::Gone));
                    }
                }
                Op::Refuse(n) => {
                    if let Some(id) = nth(&host, n, Life::Starting).filter(|_| !host.instances.is_empty()) {
                        host.after(MS(0), Later::Report(id, InstanceReport::Refused));
                    }
                }
                Op::Lose(gpu) if host.memory.contains_key(&GpuId(gpu)) => host.lose(gpu),
                Op::Find(gpu) if !host.memory.contains_key(&GpuId(gpu)) => {
                    host.find(gpu, DeviceSpec::new(NodeId(gpu / 2), gib(16)));
                }
                Op::Cancel(n) => {
                    if let Some(&request) = host.requests.keys().nth(n) {
                        host.tell(PlatformEvent::RequestCancelled { request }).unwrap();
                    }
                }
                Op::Remove(f) if deployed.remove(&f) => {
                    host.tell(PlatformEvent::FunctionRemoved { function: FunctionId(f) }).unwrap();
                }
                Op::Deploy(f) if host.platform.function(FunctionId(f)).is_none() => {
                    host.deploy(f, random_spec(f));
                    deployed.insert(f);
                }
                _ => {}
            }
            host.run(MS(pause));
        }
        for gpu in 0..3 {
            if !host.memory.contains_key(&GpuId(gpu)) {
                host.find(gpu, DeviceSpec::new(NodeId(gpu / 2), gib(16)));
            }
        }
        host.run(Duration::from_secs(200));
        prop_assert!(host.requests.is_empty(), "{:?} wait for ever", host.requests);
        for function in deployed {
            host.tell(PlatformEvent::FunctionRemoved { function: FunctionId(function) }).unwrap();
        }
        host.run(Duration::from_secs(10));
        prop_assert!(host.instances.is_empty(), "instances of no function");
        for function in 0..5 {
            prop_assert!(host.platform.function(FunctionId(function)).is_none());
        }
    }
}
