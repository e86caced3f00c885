//! Whether policies of requests and places on MIG slices keep the promises of [`Route`] and [`Place`]. Both run under the platform's
//! pool of slices, in a [`world`](crate::world) of two nodes and up to five functions, with its faults and its book.

use super::in_world::{repeated, text};
use super::story::Log;
use crate::arrivals::{ArrivalError, Arrivals};
use crate::rng::Rng;
use crate::story::Story;
use crate::world::{Fault, Function, Outcome, Plan};
use core::ops::Range;
use gshare_core::dag::{Component, Dag, DagError};
use gshare_core::{Bytes, Duration, FunctionId, InstanceId, NodeId, RequestId, Timestamp};
use gshare_sched::pipeline::{AssignedSlice, Change, Goal, KeeperConfig, Offers, Place, Route};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, MigLayout, Platform, PlatformConfig, SlicedConfig, SlicedPool, Work,
};
use std::sync::Arc;

/// Runs the suite over pairs of `router` and `place`, under these settings of instances. Returns counts of all runs.
///
/// # Errors
/// The first broken claim.
pub fn slices(
    router: impl Fn() -> Box<dyn Route>,
    place: &Arc<dyn Place>,
    keeper: &KeeperConfig,
    seeds: Range<u64>,
) -> Result<Outcome, Story> {
    let mut sum = Outcome::default();
    for seed in seeds {
        let platform = |log: &Log| {
            let pool =
                SlicedPool::with_config(SlicedConfig::default().with_keeper(keeper.clone())).map_err(text)?;
            let pool =
                pool.with_router(Box::new(Watched(router(), log.clone()))).with_place(Arc::clone(place));
            Platform::new(PlatformConfig::default(), vec![pool.into()]).map_err(text)
        };
        sum.add(&repeated(seed, plan(seed).map_err(text), platform)?);
    }
    Ok(sum)
}

/// Notes each answer of a router.
struct Watched(Box<dyn Route>, Log);

impl Route for Watched {
    fn note(&mut self, now: Timestamp, offers: &Offers, change: Change) {
        self.1.note(&now, &format!("{change:?}"));
        self.0.note(now, offers, change);
    }

    fn next(&mut self, now: Timestamp, offers: &Offers, instance: InstanceId) -> Option<RequestId> {
        let next = self.0.next(now, offers, instance);
        self.1.note(&now, &format!("next for {instance}: {next:?}"));
        next
    }

    fn next_on(
        &mut self,
        now: Timestamp,
        offers: &Offers,
        slice: AssignedSlice,
    ) -> Option<(InstanceId, RequestId)> {
        let next = self.0.next_on(now, offers, slice);
        self.1.note(&now, &format!("next on {slice:?}: {next:?}"));
        next
    }

    fn late(&mut self, now: Timestamp, offers: &Offers) -> Option<RequestId> {
        self.0.late(now, offers)
    }

    fn is_short(&self, now: Timestamp, offers: &Offers, function: FunctionId) -> bool {
        self.0.is_short(now, offers, function)
    }

    fn waiting(&self, function: FunctionId) -> usize {
        self.0.waiting(function)
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        self.0.next_deadline()
    }

    fn invariants(&self, offers: &Offers) {
        self.0.invariants(offers);
    }
}

/// Two nodes of two GPUs, up to five functions with calls for a minute, and in some seeds faults.
fn plan(seed: u64) -> Result<Plan, Box<dyn core::error::Error>> {
    let mut rng = Rng::new(seed);
    let mut devices = Vec::new();
    for node in [0, 0, 1, 1] {
        let cuts: [&[&str]; 2] = [&["4g.40gb", "2g.20gb", "1g.10gb"], &["3g.40gb", "2g.20gb", "2g.20gb"]];
        let layout = MigLayout::named("A100-80", cuts[devices.len() % 2])?;
        devices.push(DeviceSpec::new(NodeId::new(node), Bytes::from_gib(80)).with_mig(layout));
    }
    let mut functions = Vec::new();
    for index in 0..rng.between(1, 5) {
        let times: Vec<u64> = (0..rng.between(1, 4)).map(|_| rng.between(5, 60)).collect();
        let slo = Duration::from_millis(times.iter().sum::<u64>() * rng.between(15, 60) / 10 + 5);
        let dag = Box::new(chain(&times, rng.between(1, 9))?);
        let memory = Bytes::from_gib(rng.between(1, 20));
        let work = Work::Pipeline { dag, goal: Box::new(Goal::default()) };
        let mut spec = FunctionSpec::new(work, memory).with_slo(slo);
        spec.max_instances = u32::MAX;
        functions.push(Function::new(format!("f{index}"), spec).with_arrivals(arrivals(&mut rng)?));
    }
    let mut plan = Plan::new(devices, functions, Duration::from_secs(60));
    // The time lies beyond the longest keep-alive, which is ten minutes.
    plan.settle = Duration::from_secs(1_400);
    let faults =
        [Fault::InstanceDies, Fault::DeviceLost, Fault::StartRefused, Fault::LoadSlow, Fault::ReportLate];
    for fault in faults {
        let every = Duration::from_secs(rng.between(3, 40));
        if rng.percent(30) {
            plan.faults.every.insert(fault, every);
        }
    }
    Ok(plan)
}

fn arrivals(rng: &mut Rng) -> Result<Arrivals, ArrivalError> {
    let rate = |per_second: u64| f64::from(u32::try_from(per_second).unwrap_or(1));
    match rng.below(3) {
        0 => Arrivals::poisson(rate(rng.between(1, 10))),
        1 => Arrivals::gamma(rate(rng.between(1, 10)), 3.0),
        _ => {
            let on = Duration::from_secs(rng.between(5, 20));
            Arrivals::on_off(on, Duration::from_secs(20), rate(rng.between(5, 20)))
        }
    }
}

/// A chain of components with these times in ms on 1g.10gb of an A100-80, less on larger slices, and `gib` GiB each.
///
/// # Errors
/// When these components are no DAG: no components, or too many.
pub fn chain(times: &[u64], gib: u64) -> Result<Dag, DagError> {
    let mut dag = Dag::builder("chain");
    for (index, &ms) in times.iter().enumerate() {
        let mut component = Component::new(format!("c{index}"));
        for (slice, speed) in [("1g.10gb", 10), ("2g.20gb", 15), ("3g.40gb", 18), ("4g.40gb", 20)] {
            let time = Duration::from_micros(ms * 10_000 / speed);
            component = component.with_profile(slice, 1, time, Bytes::from_gib(gib));
        }
        dag = dag.component(component);
        if index > 0 {
            dag = dag.edge(format!("c{}", index - 1), format!("c{index}"), Bytes::from_mib(1));
        }
    }
    dag.build()
}
