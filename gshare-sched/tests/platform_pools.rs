//! A pool of shared devices keeps the minimums of its functions.

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, InstanceId, NodeId, Quota, QuotaRange, RequestId,
    SmShare, Timestamp,
};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport, Platform,
    PlatformAction, PlatformConfig, PlatformEvent, RegimePool, Work,
};
use gshare_sched::scale::{LazyHorizontal, LazyHorizontalConfig};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn fractional() -> FractionalPool {
    FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast().unwrap()).unwrap()
}

/// A platform of one pool, with bounds that no request and no instance of these trials meets.
fn alone(pool: impl Into<RegimePool>) -> Platform {
    let hour = Duration::from_secs(3_600);
    let bounds = PlatformConfig::default().with_max_wait(hour).with_start_timeout(hour);
    let bounds = bounds.with_park_timeout(hour).with_drain_timeout(hour);
    Platform::new(bounds, vec![pool.into()]).unwrap()
}

/// A host of a fractional pool without requests, which answers as the test says.
struct Minimums {
    platform: Platform,
    now: Timestamp,
    /// Starting or ready instances, and the device of each.
    instances: BTreeMap<InstanceId, (FunctionId, GpuId)>,
}

impl Minimums {
    /// Devices of 16 GiB, and functions of this memory in GiB and minimum; each instance may have a twentieth of the SMs.
    fn new(devices: u32, functions: &[(u64, u32)]) -> Self {
        let bounds: Vec<_> = functions.iter().map(|&(gib, minimum)| (gib, (minimum, minimum))).collect();
        Self::of(fractional(), devices, &bounds)
    }

    /// The same around a pool, with a minimum and a maximum of instances.
    fn of(pool: FractionalPool, devices: u32, functions: &[(u64, (u32, u32))]) -> Self {
        let (platform, instances) = (alone(pool), BTreeMap::new());
        let mut host = Self { platform, now: Timestamp::ZERO, instances };
        (0..devices).for_each(|gpu| host.join(gpu));
        let (sm, time) = (SmShare::from_percent(5).unwrap(), Duration::from_millis(20));
        let point = ProfilePoint::measured(sm, Quota::WHOLE, 1, 50.0, time, time).unwrap();
        for (function, &(gib, (least, most))) in (0..).zip(functions) {
            let profile = Some(ProfileTable::sparse(vec![point]).unwrap());
            let spec = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(gib));
            let spec = Box::new(spec.with_instances(least, most));
            host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(function), spec });
        }
        host
    }

    fn tell(&mut self, event: PlatformEvent) {
        let orders = self.platform.orders(self.now, event).unwrap();
        self.platform.invariants();
        for order in orders {
            if let PlatformAction::Start { instance, function, parts, .. } = order {
                self.instances.insert(instance, (function, parts[0].gpu));
            }
        }
    }

    /// How often a lack of devices for function 0 was counted.
    fn unmet(&self) -> u64 {
        self.platform.function(FunctionId::new(0)).unwrap().stats.unmet
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport) {
        if report != InstanceReport::Ready {
            self.instances.remove(&instance);
        }
        self.tell(PlatformEvent::Instance { instance, report });
    }

    /// All starting instances are ready.
    fn settle(&mut self) {
        for instance in self.instances.keys().copied().collect::<Vec<_>>() {
            self.report(instance, InstanceReport::Ready);
        }
    }

    fn join(&mut self, gpu: u32) {
        let spec = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
        self.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec });
    }

    fn lose(&mut self, gpu: u32) {
        self.instances.retain(|_, (_, on)| *on != GpuId::new(gpu));
        self.tell(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) });
    }

    /// Carries out the actions of the pool's deadlines until then.
    fn wait(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.platform.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.tell(PlatformEvent::DeadlineReached);
        }
        self.now = end;
    }

    fn count(&self, function: u32) -> usize {
        self.instances.values().filter(|(of, _)| *of == FunctionId::new(function)).count()
    }
}

#[test]
fn what_a_lost_device_takes_of_a_minimum_is_started_when_there_is_room_again() {
    let mut host = Minimums::new(2, &[(9, 2)]);
    host.settle();
    assert_eq!((host.count(0), host.unmet()), (2, 0));
    host.lose(1);
    assert_eq!((host.count(0), host.unmet()), (1, 1), "the other device has 7 GiB");
    host.wait(Duration::from_secs(3));
    host.join(1);
    assert_eq!(host.count(0), 2, "in the same event");
}

#[test]
fn a_start_of_a_minimum_that_the_host_refused_is_ordered_again_after_ten_seconds() {
    let mut host = Minimums::new(2, &[(9, 2)]);
    let first = *host.instances.keys().next().unwrap();
    host.report(first, InstanceReport::Refused);
    host.settle();
    host.wait(Duration::from_millis(9_999));
    // Neither a device nor a loss hastens it.
    host.join(2);
    assert_eq!(host.count(0), 1);
    host.wait(Duration::from_millis(1));
    assert_eq!(host.count(0), 2);
}

/// An instance with a capacity of 50 requests a second gets 60. A scaler which counts reports gets one a second, regardless of the number
/// in wait.
#[test]
fn a_scaler_that_counts_reports_is_told_one_in_each_tick() {
    let scaler = LazyHorizontal::new(LazyHorizontalConfig::default()).unwrap();
    let policies = FractionalPolicies { scaler: Box::new(scaler), ..FractionalPolicies::fast().unwrap() };
    let pool = FractionalPool::new(FractionalConfig::default(), policies).unwrap();
    let mut host = Minimums::of(pool, 2, &[(9, (1, 2))]);
    host.settle();
    let mut started = Vec::new();
    for request in 0..1_500 {
        let (function, request) = (FunctionId::new(0), RequestId::new(request));
        host.tell(PlatformEvent::RequestArrived { request, function, deadline: None });
        host.wait(Duration::from_nanos(1_000_000_000 / 60));
        if host.count(0) > started.len() + 1 {
            started.push(host.now.saturating_since(Timestamp::ZERO).as_nanos() / 1_000_000_000);
        }
    }
    assert_eq!(started, [20], "seconds: with the twentieth report");
}

/// Twice the capacity of its only instance, for ten seconds.
#[test]
fn load_beyond_the_most_instances_is_no_lack_of_devices() {
    let mut host = Minimums::new(2, &[(9, 1)]);
    host.settle();
    for request in 0..1_000 {
        let (function, request) = (FunctionId::new(0), RequestId::new(request));
        host.tell(PlatformEvent::RequestArrived { request, function, deadline: None });
        host.wait(Duration::from_millis(10));
    }
    assert_eq!((host.count(0), host.unmet()), (1, 0));
}

/// Shares of the instances which a pool with one device starts of a function at once.
fn shares(sm_partitions: bool, spec: FunctionSpec) -> Vec<GpuShare> {
    let config = FractionalConfig::default().with_sm_partitions(sm_partitions);
    let mut platform = alone(FractionalPool::new(config, FractionalPolicies::fast().unwrap()).unwrap());
    let device = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(16));
    let joined = PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec: device };
    platform.orders(Timestamp::ZERO, joined).unwrap();
    let added = PlatformEvent::FunctionDeployed { function: FunctionId::new(0), spec: Box::new(spec) };
    let orders = platform.orders(Timestamp::ZERO, added).unwrap();
    let started = orders.into_iter().filter_map(|order| match order {
        PlatformAction::Start { parts, .. } => Some(parts[0].share),
        _ => None,
    });
    started.collect()
}

#[test]
fn without_sm_partitions_a_device_is_shared_by_time_alone() {
    let (sm, quota) = (SmShare::from_percent(25).unwrap(), Quota::from_percent(60).unwrap());
    let time = Duration::from_millis(20);
    let point = ProfilePoint::measured(sm, quota, 1, 50.0, time, time).unwrap();
    let profile = Some(ProfileTable::sparse(vec![point]).unwrap());
    let serves = FunctionSpec::new(Work::Inference { profile }, Bytes::from_gib(1)).with_instances(4, 4);
    let share = GpuShare::new(QuotaRange::new(quota, quota).unwrap(), sm, sm, None).unwrap();
    let trains = FunctionSpec::new(Work::Training { workers: 1, share }, Bytes::from_gib(1));
    let sms = |partitions, spec: &FunctionSpec| -> Vec<SmShare> {
        shares(partitions, spec.clone()).iter().map(GpuShare::sm).collect()
    };
    // Four quarters of the SMs fit side by side; 60 % of the time fits once.
    assert_eq!((sms(true, &serves), sms(false, &serves)), (vec![sm; 4], vec![SmShare::WHOLE]));
    assert_eq!((sms(true, &trains), sms(false, &trains)), (vec![sm], vec![SmShare::WHOLE]));
}

#[derive(Debug, Clone)]
enum Loss {
    Device(u32),
    Back(u32),
    Process(prop::sample::Index),
    Ready,
    Wait(u64),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// All instances of all functions fit on one device: while there is any, every minimum is there after each event.
    #[test]
    fn a_minimum_that_fits_is_there_after_each_loss(
        functions in prop::collection::vec((1u64..3, 1u32..4), 1..3),
        steps in prop::collection::vec(prop_oneof![
            3 => (0u32..3).prop_map(Loss::Device),
            3 => (0u32..3).prop_map(Loss::Back),
            4 => any::<prop::sample::Index>().prop_map(Loss::Process),
            2 => Just(Loss::Ready),
            2 => (0u64..20_000).prop_map(Loss::Wait),
        ], 1..60),
    ) {
        let mut host = Minimums::new(3, &functions);
        host.settle();
        let mut here = BTreeSet::from([0, 1, 2]);
        for step in steps {
            match step {
                Loss::Device(gpu) if here.remove(&gpu) => host.lose(gpu),
                Loss::Back(gpu) if here.insert(gpu) => host.join(gpu),
                Loss::Process(which) if !host.instances.is_empty() => {
                    let instances: Vec<InstanceId> = host.instances.keys().copied().collect();
                    let instance = *which.get(&instances);
                    // An instance which dies before it is ready is a failed start.
                    host.report(instance, InstanceReport::Ready);
                    host.report(instance, InstanceReport::Gone);
                }
                Loss::Ready => host.settle(),
                Loss::Wait(ms) => host.wait(Duration::from_millis(ms)),
                _ => {}
            }
            for (function, (_, least)) in (0..).zip(&functions).filter(|_| !here.is_empty()) {
                prop_assert_eq!(host.count(function), *least as usize, "fn{}, {:?}", function, here);
            }
        }
    }
}
