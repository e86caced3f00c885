//! A horizontal scaler on a clock, with one function: for tests of scalers, also in the replays.
#![allow(dead_code, reason = "each program uses a part of it")]

use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::scale::{Fleet, FunctionScale, HorizontalOrder, HorizontalScaler, LoadReport};

pub(crate) const F: FunctionId = FunctionId::new(0);

pub(crate) fn point(sm: u16, quota: u16, throughput: f64, p95_millis: u64) -> ProfilePoint {
    let (sm, quota) = (SmShare::from_percent(sm).unwrap(), Quota::from_percent(quota).unwrap());
    let p95 = Duration::from_millis(p95_millis);
    ProfilePoint::measured(sm, quota, 1, throughput, p95, p95).unwrap()
}

pub(crate) fn rps(rate: u64) -> RequestRate {
    RequestRate::per_second(rate)
}

pub(crate) fn spec(points: Vec<ProfilePoint>, min_instances: u32, max_instances: u32) -> FunctionScale {
    let profile = ProfileTable::sparse(points).unwrap();
    FunctionScale { profile, max_p95: None, min_instances, max_instances }
}

/// One point of 50 requests/s.
pub(crate) fn simple(min_instances: u32, max_instances: u32) -> FunctionScale {
    spec(vec![point(30, 100, 50.0, 20)], min_instances, max_instances)
}

/// A change of the fleet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Change {
    Start(InstanceId, ProfilePoint),
    Drain(InstanceId),
    Stop(InstanceId),
    Unmet(RequestRate),
}

/// A scaler on a clock of ticks, with a host that has room for each start. Instances become ready at once unless told otherwise.
pub(crate) struct Bench<S> {
    pub(crate) scaler: S,
    pub(crate) fleet: Fleet,
    pub(crate) now: Timestamp,
    pub(crate) ready_at_once: bool,
    given: u64,
}

impl<S: HorizontalScaler> Bench<S> {
    pub(crate) fn new(scaler: S, spec: FunctionScale) -> Self {
        let fleet = Fleet::new(F, spec).unwrap();
        let mut bench =
            Self { scaler, fleet, now: Timestamp::from_millis(1_000), ready_at_once: true, given: 0 };
        bench.keep_minimum();
        bench
    }

    /// Starts missing instances, as a host does.
    pub(crate) fn keep_minimum(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        while self.fleet.lacks() {
            let Some((point, _)) = self.fleet.startable(self.now).next() else { break };
            changes.push(self.start(point));
        }
        changes
    }

    fn start(&mut self, point: usize) -> Change {
        let instance = InstanceId::new(self.given);
        self.given += 1;
        self.fleet.started(self.now, instance, point);
        if self.ready_at_once {
            self.fleet.ready(self.now, instance);
        }
        Change::Start(instance, self.fleet.spec().profile.points()[point])
    }

    pub(crate) fn remove(&mut self, instance: InstanceId) -> Change {
        match self.fleet.remove(instance).unwrap() {
            true => Change::Drain(instance),
            false => Change::Stop(instance),
        }
    }

    /// A start finds no room.
    pub(crate) fn refused(&mut self, number: u64) {
        let instance = InstanceId::new(number);
        let point = self.fleet.starts_at(instance).unwrap();
        self.fleet.refuse(point, self.now.saturating_add(self.scaler.config().retry_after));
        self.fleet.remove(instance);
    }

    /// Reports this load now, and carries out the orders.
    pub(crate) fn report(&mut self, rate: RequestRate) -> Vec<Change> {
        let (mut changes, mut orders) = (self.keep_minimum(), Vec::new());
        let report = LoadReport { now: self.now, function: F, fleet: &self.fleet, load: rate };
        self.scaler.decide(report, &mut orders);
        for order in orders {
            changes.push(match order {
                HorizontalOrder::Start(point) => self.start(point),
                HorizontalOrder::Remove(instance) => self.remove(instance),
                HorizontalOrder::Unmet(rate) => Change::Unmet(rate),
            });
        }
        changes
    }

    /// One tick passes with this load.
    pub(crate) fn load(&mut self, rate: u64) -> Vec<Change> {
        self.now = self.now.saturating_add(Duration::from_secs(1));
        self.report(rps(rate))
    }

    pub(crate) fn loads(&mut self, count: usize, rate: u64) -> Vec<Change> {
        (0..count).flat_map(|_| self.load(rate)).collect()
    }

    pub(crate) fn deployed(&self) -> u32 {
        self.fleet.deployed()
    }
}

pub(crate) fn starts(changes: &[Change]) -> Vec<ProfilePoint> {
    let start = |change: &Change| match *change {
        Change::Start(_, point) => Some(point),
        _ => None,
    };
    changes.iter().filter_map(start).collect()
}

pub(crate) fn rates(changes: &[Change]) -> Vec<RequestRate> {
    starts(changes).iter().map(|point| point.throughput).collect()
}

pub(crate) fn drains(changes: &[Change]) -> Vec<InstanceId> {
    let drain = |change: &Change| match *change {
        Change::Drain(instance) => Some(instance),
        _ => None,
    };
    changes.iter().filter_map(drain).collect()
}
