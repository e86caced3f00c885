//! A horizontal scaler on a clock, with one function: for tests of scalers, also in the replays.
#![allow(dead_code, reason = "each program uses a part of it")]

use gshare_core::profile::{ProfilePoint, ProfileTable, RequestRate};
use gshare_core::{Duration, FunctionId, InstanceId, Quota, SmShare, Timestamp};
use gshare_sched::scale::{
    FunctionScale, HorizontalAction, HorizontalError, HorizontalEvent, HorizontalScaler,
};

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

/// A scaler on a clock of ticks. Instances become ready at once unless told otherwise.
pub(crate) struct Bench<S> {
    pub(crate) scaler: S,
    pub(crate) now: Timestamp,
    pub(crate) ready_at_once: bool,
    /// Instances that serve, with their throughput.
    pub(crate) serving: Vec<(InstanceId, RequestRate)>,
}

impl<S: HorizontalScaler> Bench<S> {
    pub(crate) fn new(scaler: S, spec: FunctionScale) -> Self {
        let mut bench =
            Self { scaler, now: Timestamp::from_millis(1_000), ready_at_once: true, serving: Vec::new() };
        bench.handle(HorizontalEvent::FunctionAdded { function: F, spec });
        bench
    }

    pub(crate) fn try_handle(
        &mut self,
        event: HorizontalEvent,
    ) -> Result<Vec<HorizontalAction>, HorizontalError> {
        let actions = self.scaler.orders(self.now, event)?;
        for action in &actions {
            match *action {
                HorizontalAction::Start { instance, point, .. } if self.ready_at_once => {
                    self.scaler.handle(
                        self.now,
                        HorizontalEvent::InstanceReady { instance },
                        &mut Vec::new(),
                    )?;
                    self.serving.push((instance, point.throughput));
                }
                HorizontalAction::Drain { instance } | HorizontalAction::Stop { instance, .. } => {
                    self.serving.retain(|(id, _)| *id != instance);
                }
                _ => {}
            }
        }
        Ok(actions)
    }

    pub(crate) fn handle(&mut self, event: HorizontalEvent) -> Vec<HorizontalAction> {
        self.try_handle(event).unwrap()
    }

    /// One tick passes with this load.
    pub(crate) fn load(&mut self, rate: u64) -> Vec<HorizontalAction> {
        self.now = self.now.saturating_add(Duration::from_secs(1));
        self.handle(HorizontalEvent::LoadReported { function: F, rate: rps(rate) })
    }

    pub(crate) fn loads(&mut self, count: usize, rate: u64) -> Vec<HorizontalAction> {
        (0..count).flat_map(|_| self.load(rate)).collect()
    }

    pub(crate) fn deployed(&self) -> u32 {
        let counts = self.scaler.instances(F).unwrap();
        counts.starting + counts.ready
    }

    pub(crate) fn capacity(&self) -> RequestRate {
        self.serving.iter().fold(RequestRate::ZERO, |sum, (_, rate)| sum.saturating_add(*rate))
    }
}

pub(crate) fn starts(actions: &[HorizontalAction]) -> Vec<ProfilePoint> {
    let start = |action: &HorizontalAction| match *action {
        HorizontalAction::Start { point, .. } => Some(point),
        _ => None,
    };
    actions.iter().filter_map(start).collect()
}

pub(crate) fn rates(actions: &[HorizontalAction]) -> Vec<RequestRate> {
    starts(actions).iter().map(|point| point.throughput).collect()
}

pub(crate) fn drains(actions: &[HorizontalAction]) -> Vec<InstanceId> {
    let drain = |action: &HorizontalAction| match *action {
        HorizontalAction::Drain { instance } => Some(instance),
        _ => None,
    };
    actions.iter().filter_map(drain).collect()
}
