//! The rules of the platform, each over one function in every regime.

use crate::support::{MS, gib, inference};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuShare, InstanceId, NodeId, RequestId, Timestamp,
};
use gshare_sched::mig::GpuModel;
use gshare_sched::pipeline::Goal;
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, MigLayout, Platform, PlatformAction, PlatformConfig,
    PlatformEvent, PlatformSettings, Regime, Rejection, StopCause, Work,
};
use gshare_sim::conformance::chain;
use std::collections::BTreeMap;

const REGIMES: [Regime; 3] = [Regime::Fractional, Regime::Sliced, Regime::Whole];
const FUNCTION: FunctionId = FunctionId::new(0);

/// A host that carries nothing out unless the test says so.
struct Idle {
    platform: Platform,
    now: Timestamp,
    orders: Vec<(Timestamp, PlatformAction)>,
    requests: u64,
}

fn device(regime: Regime) -> DeviceSpec {
    let spec = DeviceSpec::new(NodeId::new(0), gib(80)).with_regime(regime);
    match regime {
        Regime::Sliced => spec.with_mig(MigLayout::named("A100-80", &["4g.40gb"]).unwrap()),
        _ => spec,
    }
}

fn function(regime: Regime, memory: u64) -> FunctionSpec {
    let spec = match regime {
        Regime::Sliced => {
            let (dag, goal) = (Box::new(chain(&[20, 20], memory).unwrap()), Box::new(Goal::default()));
            FunctionSpec::new(Work::Pipeline { dag, goal }, Bytes::from_gib(memory))
        }
        _ => inference(memory),
    };
    // Long enough that no policy rejects a request for it.
    spec.with_regime(regime).with_slo(Duration::from_secs(600)).with_instances(0, 1)
}

impl Idle {
    /// A host of one device with one function.
    fn new(config: PlatformConfig, regime: Regime) -> Self {
        let mut host = Self::of(config, function(regime, 2));
        host.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(0), spec: device(regime) });
        host
    }

    /// A host of one function, without a device.
    fn of(config: PlatformConfig, spec: FunctionSpec) -> Self {
        let settings = PlatformSettings { platform: config, ..PlatformSettings::default() };
        let platform = settings.build().unwrap();
        let mut host = Self { platform, now: Timestamp::ZERO, orders: Vec::new(), requests: 0 };
        host.tell(PlatformEvent::FunctionDeployed { function: FUNCTION, spec: Box::new(spec) });
        host
    }

    fn tell(&mut self, event: PlatformEvent) {
        let orders = self.platform.orders(self.now, event).unwrap();
        self.platform.invariants();
        self.orders.extend(orders.into_iter().map(|order| (self.now, order)));
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport) {
        self.tell(PlatformEvent::Instance { instance, report });
    }

    fn arrive(&mut self, deadline: Option<Timestamp>) -> RequestId {
        let request = RequestId::new(self.requests);
        self.requests += 1;
        self.tell(PlatformEvent::RequestArrived { request, function: FUNCTION, deadline });
        request
    }

    /// Lets time pass, with every deadline of the platform in it.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.platform.next_deadline().filter(|due| *due <= end) {
            self.now = self.now.max(due);
            self.tell(PlatformEvent::DeadlineReached);
        }
        self.now = end;
    }

    /// Carries out each start and unpark of the last orders that wait for it, until a request is dispatched.
    fn dispatched(&mut self, from: usize) -> Option<(RequestId, InstanceId)> {
        let mut at = from;
        while let Some((_, order)) = self.orders.get(at).cloned() {
            at += 1;
            match order {
                PlatformAction::Start { instance, .. } => self.report(instance, InstanceReport::Ready),
                PlatformAction::Unpark { instance, .. } => self.report(instance, InstanceReport::Unparked),
                PlatformAction::Dispatch { request, instance } => return Some((request, instance)),
                _ => {}
            }
        }
        None
    }

    fn last_started(&self) -> InstanceId {
        let start = |(_, order): &(Timestamp, PlatformAction)| match order {
            PlatformAction::Start { instance, .. } => Some(*instance),
            _ => None,
        };
        self.orders.iter().rev().find_map(start).expect("an instance")
    }

    fn stops(&self) -> Vec<(InstanceId, StopCause)> {
        let stop = |(_, order): &(Timestamp, PlatformAction)| match order {
            PlatformAction::Stop { instance, cause } => Some((*instance, *cause)),
            _ => None,
        };
        self.orders.iter().filter_map(stop).collect()
    }

    /// The number of rejections by reason, with the time of the last one.
    fn rejected(&self) -> BTreeMap<Rejection, (usize, Timestamp)> {
        let mut all = BTreeMap::new();
        for (at, order) in &self.orders {
            if let PlatformAction::Reject { reason, .. } = order {
                let (count, last) = all.entry(*reason).or_insert((0, *at));
                (*count, *last) = (*count + 1, *at);
            }
        }
        all
    }
}

/// 100 requests, a queue of 8, and an instance that never starts: each request ends after 5 s at the latest.
#[test]
fn requests_wait_in_a_bounded_number_and_for_a_bounded_time() {
    for regime in REGIMES {
        let config = PlatformConfig::default().with_max_waiting(8).with_max_wait(MS(5_000));
        let mut host = Idle::new(config, regime);
        (0..100).for_each(|_| {
            host.arrive(None);
        });
        let start = |order: &(Timestamp, PlatformAction)| matches!(order.1, PlatformAction::Start { .. });
        assert!(host.orders.iter().any(start), "{regime}");
        let full = (92, Timestamp::ZERO);
        assert_eq!(host.rejected(), BTreeMap::from([(Rejection::QueueFull, full)]), "{regime}");
        assert_eq!(host.platform.waiting(FUNCTION), 8, "{regime}");
        host.run(Duration::from_secs(3_600));
        let late = (8, Timestamp::from_millis(5_000));
        let all = BTreeMap::from([(Rejection::QueueFull, full), (Rejection::WaitedTooLong, late)]);
        assert_eq!(host.rejected(), all, "{regime}");
        assert_eq!(host.platform.waiting(FUNCTION), 0, "{regime}");
    }
}

#[test]
fn a_request_ends_at_its_deadline_and_its_number_does_not_return() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default(), regime);
        let deadline = Timestamp::from_millis(2_000);
        host.arrive(Some(deadline));
        host.run(MS(1_900));
        assert_eq!(host.rejected(), BTreeMap::new(), "{regime}");
        host.run(MS(100));
        // A policy may see before that an answer in time is impossible.
        let ends = host.rejected();
        let early = ends.get(&Rejection::WouldBeLate).is_some_and(|(_, at)| *at < deadline);
        assert!(
            early || ends == BTreeMap::from([(Rejection::DeadlineMissed, (1, deadline))]),
            "{regime}: {ends:?}"
        );
        let old =
            PlatformEvent::RequestArrived { request: RequestId::new(0), function: FUNCTION, deadline: None };
        let refused = host.platform.orders(host.now, old).unwrap_err().to_string();
        assert!(refused.starts_with("request0 is not new"), "{regime}: {refused}");
        let again = host.arrive(None);
        let sent = host.dispatched(0);
        assert_eq!(sent.map(|(request, _)| request), Some(again), "{regime}");
        let past = host.now;
        host.arrive(Some(past));
        assert_eq!(
            host.rejected().get(&Rejection::DeadlineMissed).map(|(_, at)| *at),
            Some(past),
            "{regime}"
        );
    }
}

/// Each instance dies with the request that it was given.
#[test]
fn a_request_is_dispatched_no_more_often_than_it_may() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default().with_max_attempts(2), regime);
        let request = host.arrive(None);
        let mut attempts = 0;
        let mut from = 0;
        while let Some((given, instance)) = host.dispatched(from) {
            assert_eq!(given, request, "{regime}");
            attempts += 1;
            from = host.orders.len();
            host.report(instance, InstanceReport::Gone);
            host.run(Duration::from_secs(15));
        }
        assert_eq!(attempts, 2, "{regime}");
        let ends: Vec<Rejection> = host.rejected().into_keys().collect();
        assert_eq!(ends, [Rejection::AttemptsExhausted], "{regime}");
        assert_eq!(host.platform.waiting(FUNCTION), 0, "{regime}");
    }
}

/// The instance of a request dies after the request's deadline.
#[test]
fn a_request_does_not_wait_again_after_its_deadline() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default(), regime);
        host.arrive(Some(Timestamp::from_millis(2_000)));
        let (_, instance) = host.dispatched(0).unwrap();
        host.run(MS(3_000));
        assert_eq!(host.rejected(), BTreeMap::new(), "{regime}: it runs");
        host.report(instance, InstanceReport::Gone);
        let ends: Vec<Rejection> = host.rejected().into_keys().collect();
        assert_eq!(ends, [Rejection::DeadlineMissed], "{regime}");
    }
}

#[test]
fn the_requests_of_a_removed_function_end_with_its_instances() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default(), regime);
        host.arrive(None);
        let (_, instance) = host.dispatched(0).unwrap();
        (0..5).for_each(|_| {
            host.arrive(None);
        });
        host.tell(PlatformEvent::FunctionRemoved { function: FUNCTION });
        let removed = |host: &Idle| host.rejected().get(&Rejection::Removed).map_or(0, |(count, _)| *count);
        assert_eq!(removed(&host), 5, "{regime}");
        host.report(instance, InstanceReport::Gone);
        assert_eq!(removed(&host), 6, "{regime}");
        assert!(host.platform.function(FUNCTION).is_none(), "{regime}");
    }
}

/// The host never answers a start; then it answers none of a parked instance's return.
#[test]
fn an_instance_that_does_not_start_or_return_in_time_is_stopped_and_its_requests_find_another() {
    for regime in REGIMES {
        let config = PlatformConfig::default().with_start_timeout(MS(30_000)).with_park_timeout(MS(20_000));
        let mut host = Idle::new(config, regime);
        let request = host.arrive(None);
        let first = host.last_started();
        host.run(MS(29_999));
        assert_eq!(host.stops(), [], "{regime}");
        host.run(MS(1));
        assert_eq!(host.stops(), [(first, StopCause::TimedOut)], "{regime}");
        let from = host.orders.len();
        // The order crossed the report.
        host.report(first, InstanceReport::Ready);
        assert_eq!(host.orders.len(), from, "{regime}");
        host.report(first, InstanceReport::Gone);
        host.run(MS(2_000));
        let second = host.last_started();
        assert_ne!(second, first, "{regime}");
        if regime == Regime::Sliced {
            host.report(second, InstanceReport::Ready);
            host.run(MS(20_000));
            assert_eq!(host.stops()[1..], [(second, StopCause::TimedOut)]);
            host.report(second, InstanceReport::Gone);
            host.run(MS(2_000));
        }
        let sent = host.dispatched(from);
        assert_eq!(sent, Some((request, host.last_started())), "{regime}");
        assert_eq!(host.rejected(), BTreeMap::new(), "{regime}");
    }
}

#[test]
fn a_start_that_is_expected_to_take_long_has_twice_that_time() {
    let mut host = Idle::new(PlatformConfig::default(), Regime::Fractional);
    let slow = function(Regime::Fractional, 2).with_loads(Duration::from_secs(100), Duration::from_secs(100));
    let slow = Box::new(slow.with_instances(1, 1));
    host.tell(PlatformEvent::FunctionDeployed { function: FunctionId::new(1), spec: slow });
    host.run(MS(199_999));
    assert_eq!(host.stops(), []);
    host.run(MS(1));
    assert_eq!(host.stops(), [(host.last_started(), StopCause::TimedOut)]);
}

/// A request of a removed function never ends.
#[test]
fn an_instance_of_a_removed_function_is_stopped_when_it_does_not_drain_in_time() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default().with_drain_timeout(MS(10_000)), regime);
        host.arrive(None);
        let (_, instance) = host.dispatched(0).unwrap();
        host.tell(PlatformEvent::FunctionRemoved { function: FUNCTION });
        host.run(MS(9_999));
        assert_eq!(host.stops(), [], "{regime}");
        host.run(MS(1));
        assert_eq!(host.stops(), [(instance, StopCause::DrainTimedOut)], "{regime}");
        host.run(Duration::from_secs(600));
        assert_eq!(host.stops().len(), 1, "{regime}: it is stopped once");
        host.report(instance, InstanceReport::Gone);
        let ends: Vec<Rejection> = host.rejected().into_keys().collect();
        assert_eq!(ends, [Rejection::Removed], "{regime}");
        assert!(host.platform.function(FUNCTION).is_none(), "{regime}");
    }
}

/// Requests end at once where no device so far could hold the function, and wait while there is no device, or while it is away.
#[test]
fn what_can_never_fit_is_told_from_what_does_not_fit_now() {
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default(), regime);
        let gpu = GpuId::new(0);
        host.arrive(None);
        host.tell(PlatformEvent::DeviceLost { gpu });
        host.arrive(None);
        assert_eq!(host.rejected(), BTreeMap::new(), "{regime}: the device may return");
        assert!(!host.platform.function(FUNCTION).unwrap().never_fits, "{regime}");
        let mut host = Idle::of(PlatformConfig::default(), function(regime, 81));
        host.arrive(None);
        assert_eq!(host.rejected(), BTreeMap::new(), "{regime}: a device may come");
        assert!(!host.platform.function(FUNCTION).unwrap().never_fits, "{regime}");
        host.tell(PlatformEvent::DeviceFound { gpu, spec: device(regime) });
        host.arrive(None);
        assert_eq!(
            host.rejected(),
            BTreeMap::from([(Rejection::NeverFits, (2, Timestamp::ZERO))]),
            "{regime}"
        );
        let view = host.platform.function(FUNCTION).unwrap();
        assert!(view.never_fits && view.stats.unmet > 0, "{regime}");
    }
}

/// Two workers need two devices.
#[test]
fn a_training_job_of_more_workers_than_devices_never_fits() {
    let mut host = Idle::new(PlatformConfig::default(), Regime::Fractional);
    let job = FunctionId::new(1);
    let work = Work::Training { workers: 2, share: GpuShare::WHOLE };
    let spec = Box::new(FunctionSpec::new(work, gib(2)));
    host.tell(PlatformEvent::FunctionDeployed { function: job, spec });
    assert!(host.platform.function(job).unwrap().never_fits);
    host.tell(PlatformEvent::DeviceFound { gpu: GpuId::new(1), spec: device(Regime::Fractional) });
    assert!(!host.platform.function(job).unwrap().never_fits);
    assert!(
        host.orders
            .iter()
            .any(|(_, order)| matches!(order, PlatformAction::Start { function, .. } if *function == job))
    );
}

#[test]
fn what_a_regime_cannot_do_is_refused_by_field_and_bound() {
    let training = |workers| Work::Training { workers, share: GpuShare::WHOLE };
    for regime in REGIMES {
        let mut host = Idle::new(PlatformConfig::default(), regime);
        let found = |spec: DeviceSpec| PlatformEvent::DeviceFound {
            gpu: GpuId::new(1),
            spec: spec.with_regime(regime),
        };
        let deployed =
            |spec| PlatformEvent::FunctionDeployed { function: FunctionId::new(1), spec: Box::new(spec) };
        let plain = function(regime, 2);
        let mut empty = plain.clone();
        empty.memory = Bytes::ZERO;
        let none = MigLayout::new(GpuModel::find("A100-80").unwrap(), Vec::new()).unwrap();
        let node = NodeId::new(0);
        let mut refused = vec![
            (deployed(empty), "memory is 0: need more than 0"),
            (deployed(plain.clone().with_devices(0)), "devices is 0, need 1"),
        ];
        match regime {
            Regime::Sliced => {
                let bare = found(DeviceSpec::new(node, gib(80)).with_mig(none));
                refused.push((bare, "mig has no slices: need one at least"));
            }
            _ => refused.extend([
                (found(DeviceSpec::new(node, Bytes::ZERO)), "memory is 0: need more than 0"),
                (deployed(function(Regime::Sliced, 2).with_regime(regime)), "need devices with MIG slices"),
            ]),
        }
        let (training, says) = match regime {
            Regime::Fractional => (training(65), "workers is 65, need 1 to 64"),
            _ => (training(2), "work is training: need fractional devices"),
        };
        refused.push((deployed(FunctionSpec::new(training, gib(1)).with_regime(regime)), says));
        for (event, says) in refused {
            let error = host.platform.orders(host.now, event.clone()).unwrap_err().to_string();
            assert!(error.contains(says), "{regime}, {event:?}: {error}");
        }
    }
}
