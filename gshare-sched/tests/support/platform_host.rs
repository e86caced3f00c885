//! A host of the platform in virtual time, which checks its orders; and any bytes as a history of it. Shared by the tests, the committed
//! regressions and the fuzz target.
#![allow(dead_code, reason = "each of those uses a part of it")]

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, InstanceId, ModelId, NodeId, Quota, RequestId,
    SmShare, TenantId, Timestamp,
};
use gshare_sched::platform::TenantLimits;
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Life, Part, Platform, PlatformAction, PlatformError,
    PlatformEvent, Regime, Rejection, StopCause, Weights, Work,
};
use std::collections::{BTreeMap, BTreeSet};

pub(crate) const MS: fn(u64) -> Duration = Duration::from_millis;

pub(crate) fn gib(n: u64) -> Bytes {
    Bytes::from_gib(n)
}

/// Instances on a quarter, a half and all of the SMs.
pub(crate) fn profile() -> ProfileTable {
    let point = |percent, rate, p50, p95| {
        let sm = SmShare::from_percent(percent).unwrap();
        ProfilePoint::measured(sm, Quota::WHOLE, 1, rate, MS(p50), MS(p95)).unwrap()
    };
    ProfileTable::grid(vec![point(25, 50.0, 20, 22), point(50, 90.0, 11, 13), point(100, 120.0, 8, 9)])
        .unwrap()
}

pub(crate) fn inference(memory: u64) -> FunctionSpec {
    FunctionSpec::new(Work::Inference { profile: Some(profile()) }, gib(memory))
        .with_slo(MS(100))
        .with_instances(0, 4)
        .with_loads(MS(3_000), MS(500))
}

pub(crate) fn weights(model: u32, memory: u64) -> Option<Weights> {
    Some(Weights { model: ModelId::new(model), bytes: gib(memory) })
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Later {
    Arrive(FunctionId),
    Report(InstanceId, InstanceReport),
    Done(RequestId, InstanceId),
    Wake,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Answered(Duration),
    Rejected(Rejection),
}

pub(crate) struct Instance {
    pub(crate) function: FunctionId,
    pub(crate) parts: Vec<Part>,
    /// The devices of the instance's parts, or the devices from which it was parked.
    pub(crate) home: BTreeSet<GpuId>,
    pub(crate) life: Life,
    pub(crate) has: BTreeSet<RequestId>,
}

/// Carries out the platform's orders, and checks that each is possible.
pub(crate) struct Host {
    pub(crate) platform: Platform,
    pub(crate) now: Timestamp,
    pub(crate) later: BTreeMap<(Timestamp, u64), Later>,
    pub(crate) counter: u64,
    pub(crate) instances: BTreeMap<InstanceId, Instance>,
    pub(crate) memory: BTreeMap<GpuId, Bytes>,
    pub(crate) requests: BTreeMap<RequestId, (FunctionId, Timestamp)>,
    pub(crate) ends: BTreeMap<RequestId, (FunctionId, End)>,
    pub(crate) orders: Vec<PlatformAction>,
    /// How long a request takes.
    pub(crate) takes: Duration,
    /// How many times as long as its specification says a load takes.
    pub(crate) slower: u64,
    /// How long a parked instance takes to come back to its devices, where processes live on; elsewhere it loads.
    pub(crate) copies: Option<Duration>,
    /// The instances that came back to other devices.
    pub(crate) moved: Vec<InstanceId>,
}

impl Host {
    pub(crate) fn new(platform: Platform) -> Self {
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
            slower: 1,
            copies: None,
            moved: Vec::new(),
        }
    }

    pub(crate) fn with(devices: &[u64]) -> Self {
        let mut host = Self::new(Platform::fractional().unwrap());
        for (gpu, &memory) in (0..).zip(devices) {
            host.find(gpu, DeviceSpec::new(NodeId::new(gpu / 2), gib(memory)));
        }
        host
    }

    pub(crate) fn find(&mut self, gpu: u32, spec: DeviceSpec) {
        self.memory.insert(GpuId::new(gpu), spec.memory);
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec }).unwrap();
    }

    pub(crate) fn lose(&mut self, gpu: u32) {
        self.memory.remove(&GpuId::new(gpu));
        self.instances.retain(|_, of| !of.home.contains(&GpuId::new(gpu)));
        self.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) }).unwrap();
    }

    pub(crate) fn deploy(&mut self, function: u32, spec: FunctionSpec) {
        let function = FunctionId::new(function);
        self.tell(PlatformEvent::FunctionDeployed { function, spec: Box::new(spec) }).unwrap();
    }

    pub(crate) fn after(&mut self, time: Duration, later: Later) {
        self.counter += 1;
        self.later.insert((self.now + time, self.counter), later);
    }

    /// Requests of a function, one each `every`, from now on.
    pub(crate) fn load(&mut self, function: u32, every: Duration, count: u64) {
        for n in 0..count {
            self.after(every.saturating_mul(n), Later::Arrive(FunctionId::new(function)));
        }
    }

    pub(crate) fn arrive(&mut self, function: FunctionId, deadline: Option<Timestamp>) -> RequestId {
        let request = RequestId::new(self.requests.len() as u64 + self.ends.len() as u64);
        self.requests.insert(request, (function, self.now));
        self.tell(PlatformEvent::RequestArrived { request, function, deadline }).unwrap();
        request
    }

    pub(crate) fn tell(&mut self, event: PlatformEvent) -> Result<(), PlatformError> {
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
        let mut shared = BTreeSet::new();
        let parts = self.instances.values().flat_map(|of| of.parts.iter().map(|part| (of.function, part)));
        for (function, part) in parts {
            let of = used.entry(part.gpu).or_default();
            let spec = self.platform.function(function).map(|of| of.spec);
            let spec = spec.filter(|spec| self.platform.regime_for(spec) == Regime::Fractional);
            let weights = spec.and_then(|spec| spec.weights);
            if let Some(weights) = weights.filter(|weights| shared.insert((part.gpu, weights.model))) {
                of.0 += weights.bytes.get();
            }
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
                let home: BTreeSet<GpuId> = parts.iter().map(|part| part.gpu).collect();
                assert_eq!(home.len(), parts.len(), "{instance} has two parts on a device");
                let of = Instance { function, parts, home, life: Life::Starting, has: BTreeSet::new() };
                assert!(self.instances.insert(instance, of).is_none(), "{instance} twice");
                let takes = takes.saturating_mul(self.slower);
                self.after(takes, Later::Report(instance, InstanceReport::Ready));
            }
            PlatformAction::Park { instance, keeps } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert!(of.has.is_empty() && of.life == Life::Ready, "{instance} cannot be parked");
                of.life = Life::Parked;
                let lives = keeps && self.copies.is_some();
                let report = if lives { InstanceReport::Parked } else { InstanceReport::Unloaded };
                self.after(MS(300), Later::Report(instance, report));
            }
            PlatformAction::Unpark { instance, parts, takes } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert!(of.life == Life::Parked && of.parts.is_empty(), "{instance} is not parked");
                let home: BTreeSet<GpuId> = parts.iter().map(|part| part.gpu).collect();
                let moves = core::mem::replace(&mut of.home, home.clone()) != home;
                of.parts = parts;
                self.moved.extend(moves.then_some(instance));
                let loads = takes.saturating_mul(self.slower);
                let takes = self.copies.filter(|_| !moves).unwrap_or(loads);
                self.after(takes, Later::Report(instance, InstanceReport::Unparked));
            }
            PlatformAction::Drain { instance } => {
                let of = self.instances.get_mut(&instance).unwrap();
                assert_eq!(of.life, Life::Ready, "{instance} cannot drain");
                of.life = Life::Draining;
            }
            PlatformAction::Stop { instance, cause } => {
                let of = self.instances.get_mut(&instance).unwrap();
                let hard = matches!(cause, StopCause::TimedOut | StopCause::DrainTimedOut);
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

    pub(crate) fn happen(&mut self, later: Later) {
        match later {
            Later::Arrive(function) => {
                self.arrive(function, None);
            }
            Later::Report(instance, report) => {
                let Some(of) = self.instances.get_mut(&instance) else { return };
                match report {
                    InstanceReport::Ready if of.life == Life::Starting => of.life = Life::Ready,
                    InstanceReport::Unparked if of.life == Life::Parked => of.life = Life::Ready,
                    InstanceReport::Parked | InstanceReport::Unloaded if of.life == Life::Parked => {
                        of.parts.clear();
                    }
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

    pub(crate) fn run_until(&mut self, end: Timestamp) {
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

    pub(crate) fn run(&mut self, time: Duration) {
        self.run_until(self.now + time);
    }

    pub(crate) fn count(&self, matches: impl Fn(&PlatformAction) -> bool) -> usize {
        self.orders.iter().filter(|order| matches(order)).count()
    }

    pub(crate) fn answered(&self, function: u32) -> Vec<Duration> {
        let of = self.ends.values().filter(|(of, _)| *of == FunctionId::new(function));
        of.filter_map(|(_, end)| if let End::Answered(took) = end { Some(*took) } else { None }).collect()
    }

    pub(crate) fn rejected(&self) -> Vec<Rejection> {
        let end = |(_, end): &(FunctionId, End)| if let End::Rejected(why) = end { Some(*why) } else { None };
        self.ends.values().filter_map(end).collect()
    }
}

/// The functions of a history: a small one whose instances share weights, two which do not fit beside each other, a function spread over
/// two devices, and a training job.
fn spec(function: u32) -> FunctionSpec {
    match function {
        4 => FunctionSpec::new(Work::Training { workers: 2, share: GpuShare::WHOLE }, gib(4)),
        3 => inference(24).with_devices(2).with_instances(1, 2),
        0 => inference(2).with_weights(weights(0, 3)).with_instances(0, 3),
        _ => inference(9).with_instances(0, 1 + function),
    }
}

/// Runs a history of three bytes for each thing that happens: what, of which, and how long until the next. In any history
/// each request ends once, nothing is oversold, and at the end no request waits and nothing is left.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let mut host = Host::with(&[16, 16, 16]);
    let device = |gpu| DeviceSpec::new(NodeId::new(gpu / 2), gib(16));
    let mut deployed = BTreeSet::new();
    // Longer histories find nothing new, and take long.
    for &[what, which, pause] in bytes.as_chunks::<3>().0.iter().take(100) {
        let which = u32::from(which);
        let (function, gpu, nth) = (which % 5, which % 3, which as usize % 8);
        let is_up = host.memory.contains_key(&GpuId::new(gpu));
        let name = FunctionId::new(function);
        match what % 24 {
            0..12 if function < 4 && deployed.contains(&function) => {
                for _ in 0..if what % 24 < 9 { 1 } else { 40 } {
                    host.arrive(name, (which % 7 == 0).then(|| host.now + MS(u64::from(which) * 10)));
                }
            }
            // A leader before this host may have left an instance, which may fit no more.
            13 if deployed.contains(&function) => {
                let point = host.platform.function(name).and_then(|view| match &view.spec.work {
                    Work::Inference { profile } => profile.as_ref()?.points().first().copied(),
                    _ => None,
                });
                let (quota, sm) = point.map_or((Quota::WHOLE, SmShare::WHOLE), |at| (at.quota, at.sm));
                let before = host.count(|order| matches!(order, PlatformAction::Start { .. }));
                let told = host.tell(PlatformEvent::InstanceFound {
                    function: name,
                    gpu: GpuId::new(gpu),
                    quota,
                    sm,
                });
                let after = host.count(|order| matches!(order, PlatformAction::Start { .. }));
                assert!(told.is_ok() || before == after, "a refused event changes nothing");
            }
            12 => {
                if let Some(&id) = host.instances.keys().nth(nth) {
                    host.happen(Later::Report(id, InstanceReport::Gone));
                }
            }
            14 => {
                let mut starting = host.instances.iter().filter(|(_, of)| of.life == Life::Starting);
                if let Some(id) = starting.nth(nth).map(|(id, _)| *id) {
                    host.happen(Later::Report(id, InstanceReport::Refused));
                }
            }
            15 if is_up => host.lose(gpu),
            16 | 17 if !is_up => host.find(gpu, device(gpu)),
            18 => {
                if let Some(&request) = host.requests.keys().nth(nth) {
                    host.tell(PlatformEvent::RequestCancelled { request }).unwrap();
                }
            }
            19 if deployed.remove(&function) => {
                host.tell(PlatformEvent::FunctionRemoved { function: name }).unwrap();
            }
            20 if deployed.contains(&function) => {
                let (min_instances, max_instances) = (which / 5 % 3, 1 + which / 5 % 4);
                let event = PlatformEvent::BoundsChanged { function: name, min_instances, max_instances };
                let refused = host.tell(event).is_err();
                assert_eq!(refused, max_instances < min_instances);
            }
            21 => {
                let mut limits = TenantLimits::default();
                (limits.max_requests, limits.max_waiting) = (1 + which % 9, which);
                host.tell(PlatformEvent::TenantLimited { tenant: TenantId::new(0), limits }).unwrap();
            }
            22.. if host.platform.function(name).is_none() => {
                host.deploy(function, spec(function));
                deployed.insert(function);
            }
            _ => {}
        }
        host.run(MS(u64::from(pause) * 12));
    }
    for gpu in (0..3).filter(|gpu| !host.memory.contains_key(&GpuId::new(*gpu))).collect::<Vec<_>>() {
        host.find(gpu, device(gpu));
    }
    host.run(Duration::from_secs(200));
    assert!(host.requests.is_empty(), "{:?} wait for ever", host.requests);
    for function in deployed {
        host.tell(PlatformEvent::FunctionRemoved { function: FunctionId::new(function) }).unwrap();
    }
    host.run(Duration::from_secs(10));
    assert!(host.instances.is_empty(), "instances of no function");
    assert!((0..5).all(|function| host.platform.function(FunctionId::new(function)).is_none()));
}
