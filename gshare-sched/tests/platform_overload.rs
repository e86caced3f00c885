//! The order in which fractional devices serve the requests of an overloaded function.

use crate::support::{Host, MS, gib, inference};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, Engine, FunctionId, GpuId, NodeId, Quota, RequestId, SmShare, Timestamp};
use gshare_sched::platform::{
    DeviceSpec, FractionalConfig, FractionalPolicies, FractionalPool, FunctionSpec, InstanceReport, Platform,
    PlatformAction, PlatformConfig, PlatformEvent, Rejection, Work,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const FUNCTION: FunctionId = FunctionId::new(0);
/// Requests answered by an instance in a second, by the profile of the function.
const RATE: u64 = 50;

/// A platform with one function of this many ready instances, and a host which knows its waiting requests.
struct Line {
    platform: Platform,
    config: PlatformConfig,
    max_wait: Duration,
    slo: Duration,
    instances: u64,
    now: Timestamp,
    /// Waiting requests, by arrival.
    waiting: BTreeSet<(Timestamp, RequestId)>,
    /// Requests answered at this time.
    served: BTreeMap<(Timestamp, RequestId), Duration>,
    late: usize,
    in_time: usize,
}

impl Line {
    fn new(config: &PlatformConfig, max_wait: Duration, slo: Duration, instances: u32) -> Self {
        let pool =
            FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast().unwrap()).unwrap();
        let bounds = config.clone().with_max_wait(max_wait);
        let mut platform = Platform::new(bounds, vec![pool.into()]).unwrap();
        let now = Timestamp::ZERO;
        for gpu in 0..instances {
            let spec = DeviceSpec::new(NodeId::new(0), gib(16));
            platform.orders(now, PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec }).unwrap();
        }
        let (whole, time) = (SmShare::WHOLE, MS(1_000 / RATE));
        let point = ProfilePoint::measured(whole, Quota::WHOLE, 1, RATE as f64, time, time).unwrap();
        let work = Work::Inference { profile: Some(ProfileTable::grid(vec![point]).unwrap()) };
        let spec = FunctionSpec::new(work, Bytes::from_gib(1)).with_slo(slo);
        let spec = Box::new(spec.with_instances(instances, instances));
        let deployed = PlatformEvent::FunctionDeployed { function: FUNCTION, spec };
        for order in platform.orders(now, deployed).unwrap() {
            let PlatformAction::Start { instance, .. } = order else { panic!("{order:?}") };
            let ready = PlatformEvent::Instance { instance, report: InstanceReport::Ready };
            platform.orders(now, ready).unwrap();
        }
        Self {
            platform,
            config: config.clone(),
            max_wait,
            slo,
            instances: instances.into(),
            now,
            waiting: BTreeSet::new(),
            served: BTreeMap::new(),
            late: 0,
            in_time: 0,
        }
    }

    /// Tells the platform, and checks each of its choices. Requests that are dispatched now take `takes`.
    fn tell(&mut self, event: PlatformEvent, takes: Duration) {
        let orders = self.platform.orders(self.now, event).unwrap();
        let mut behind = None;
        for order in orders {
            match order {
                PlatformAction::Reject { request, reason } => {
                    let of = *self.waiting.iter().find(|(_, id)| *id == request).unwrap();
                    assert_eq!(reason, Rejection::WaitedTooLong);
                    assert!(self.now.saturating_since(of.0) >= self.max_wait, "{request} early");
                    self.waiting.remove(&of);
                }
                PlatformAction::Dispatch { request, .. } => {
                    let queue = self.waiting.len() as u64;
                    let whole = MS(1_000).saturating_mul(queue).as_nanos() / (RATE * self.instances);
                    let behind = *behind.get_or_insert(Duration::from_nanos(whole));
                    self.check(request, behind);
                    let of = *self.waiting.iter().find(|(_, id)| *id == request).unwrap();
                    self.waiting.remove(&of);
                    let done = self.now + takes;
                    self.served.insert((done, request), takes);
                    let late = done.saturating_since(of.0) > self.slo;
                    *(if late { &mut self.late } else { &mut self.in_time }) += 1;
                }
                _ => {}
            }
        }
        self.platform.invariants();
        let oldest = self.waiting.first().map_or(Duration::ZERO, |of| self.now.saturating_since(of.0));
        assert!(oldest <= self.max_wait, "one waits for {oldest}");
    }

    /// The bound that the documentation gives: a later request goes first only while the oldest is late, by no more than the stated bound,
    /// and only if it can itself be in time.
    fn check(&self, request: RequestId, behind: Duration) {
        let done = self.now + MS(1_000 / RATE);
        let age = |of: &(Timestamp, RequestId)| done.saturating_since(of.0);
        let oldest = self.waiting.first().unwrap();
        let stretched = behind.as_nanos() * u64::from(self.config.late_stretch_percent) / 100;
        let bound = self.config.late_wait.map(|wait| wait.max(Duration::from_nanos(stretched)));
        let waits = bound.is_some_and(|bound| age(oldest) > self.slo && age(oldest) < self.slo + bound);
        let in_time = self.waiting.iter().find(|of| age(of) <= self.slo);
        let right = if waits { in_time.unwrap_or(oldest) } else { oldest };
        assert_eq!(request, right.1, "{behind} behind, the oldest of {oldest:?}, now {}", self.now);
    }

    /// Lets time pass up to `end`, with all events due in it.
    fn run_until(&mut self, end: Timestamp, takes: Duration) {
        loop {
            let answer = self.served.first_key_value().map(|(&key, &took)| (key, took));
            let due = self.platform.next_deadline();
            let next = answer.map(|((at, _), _)| at).into_iter().chain(due).min();
            let Some(next) = next.filter(|at| *at <= end) else { break };
            self.now = self.now.max(next);
            match answer.filter(|((at, _), _)| due.is_none_or(|due| *at < due)) {
                Some((key, took)) => {
                    self.served.remove(&key);
                    self.tell(PlatformEvent::RequestDone { request: key.1, took }, takes);
                }
                None => self.tell(PlatformEvent::DeadlineReached, takes),
            }
        }
        self.now = end;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    /// For any arrivals and times of service the order is the documented one, and no request waits longer than its bound.
    #[test]
    fn a_late_request_is_passed_over_only_within_its_bound(
        late_wait in prop::option::weighted(0.9, 0u64..800),
        stretch in 0u32..400,
        max_wait in 500u64..8_000,
        slo in 40u64..300,
        instances in 1u32..4,
        steps in prop::collection::vec((0u64..25, 1u64..40), 1..300),
    ) {
        let config = PlatformConfig::default()
            .with_late_wait(late_wait.map(MS))
            .with_late_stretch_percent(stretch);
        let mut line = Line::new(&config, MS(max_wait), MS(slo), instances);
        for (number, (pause, takes)) in steps.into_iter().enumerate() {
            line.run_until(line.now + MS(pause), MS(takes));
            let (request, arrived) = (RequestId::new(number as u64), line.now);
            line.waiting.insert((arrived, request));
            line.tell(PlatformEvent::RequestArrived { request, function: FUNCTION, deadline: None }, MS(takes));
        }
        line.run_until(line.now + MS(20_000), MS(20));
        prop_assert!(line.waiting.is_empty() && line.served.is_empty());
    }
}

/// One instance answers 50 requests a second, and 100 come, for one minute. With a fixed bound all waiting requests are overdue once the
/// queue is longer than the bound.
#[test]
fn overload_that_lasts_does_not_make_everything_late() {
    let in_time = |stretch| {
        let config = PlatformConfig::default().with_late_stretch_percent(stretch);
        let pool =
            FractionalPool::new(FractionalConfig::default(), FractionalPolicies::fast().unwrap()).unwrap();
        let mut host = Host::new(Platform::new(config, vec![pool.into()]).unwrap());
        host.find(0, DeviceSpec::new(NodeId::new(0), gib(16)));
        host.deploy(0, inference(2).with_instances(1, 1));
        host.takes = MS(20);
        host.run(MS(4_000));
        host.load(0, MS(10), 6_000);
        host.run(MS(130_000));
        let slowest = host.answered(0).into_iter().max().unwrap();
        assert!(slowest <= MS(60_020), "none waits for longer than it may: {slowest}");
        let stats = host.platform.function(FUNCTION).unwrap().stats;
        assert_eq!(stats.answered + stats.rejected, 6_000, "each ends once");
        stats.within_slo
    };
    let (fixed, stretched) = (in_time(0), in_time(200));
    assert!(fixed < 1_500 && stretched > 2_500, "{fixed} and {stretched} of 6000 in time");
}
