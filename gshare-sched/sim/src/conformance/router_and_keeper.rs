//! Whether a router of requests and a keeper of instances on MIG slices keep the promises of [`Router`] and [`InstanceKeeper`].
//! Both run under the platform's pool of slices, in a [`world`](crate::world) of two nodes and up to five functions, with its
//! faults and its book.

use super::in_world::{repeated, text};
use super::story::Log;
use crate::arrivals::{ArrivalError, Arrivals};
use crate::rng::Rng;
use crate::story::Story;
use crate::world::{Fault, Function, Outcome, Plan};
use core::ops::Range;
use gshare_core::dag::{Component, Dag, DagError};
use gshare_core::{Bytes, Duration, NodeId};
use gshare_sched::pipeline::{Goal, InstanceKeeper, Node, Router};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, MigLayout, Platform, PlatformConfig, SlicedConfig, SlicedPool, Work,
};
use std::sync::Arc;

/// Runs the suite over the pairs of `router` and `keeper`. A keeper gets its node with the first, free GPU, and hears of the other
/// GPUs later. Returns counts of all runs.
///
/// # Errors
/// The first broken claim.
pub fn router_and_keeper(
    router: impl Fn() -> Box<dyn Router>,
    keeper: impl Fn(&Node) -> Box<dyn InstanceKeeper> + Send + Sync + 'static,
    seeds: Range<u64>,
) -> Result<Outcome, Story> {
    let (keeper, mut sum) = (Arc::new(keeper), Outcome::default());
    for seed in seeds {
        let platform = |log: &Log| {
            let pool = SlicedPool::with_config(SlicedConfig::default()).map_err(text)?;
            let router = Box::new(log.watch(router(), true));
            let (keeper, log) = (Arc::clone(&keeper), log.clone());
            let watched = move |node: &Node| -> Result<Box<dyn InstanceKeeper>, _> {
                Ok(Box::new(log.watch(keeper(node), true)))
            };
            let pool = pool.with_router(router).with_keepers(Arc::new(watched));
            Platform::new(PlatformConfig::default(), vec![pool.into()]).map_err(text)
        };
        sum.add(&repeated(seed, plan(seed).map_err(text), platform)?);
    }
    Ok(sum)
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
