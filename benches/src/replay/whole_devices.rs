//! Whole devices: the pool of a [`Platform`] in the simulated [`world`], its orders and the answers to them.

use anyhow::{Result, anyhow, ensure};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, Engine, FunctionId, InstanceId, NodeId, Quota, SmShare, Timestamp};
use gshare_sched::Wrapped;
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Platform, PlatformAction, PlatformEvent, Regime, WholePool,
    Work,
};
use gshare_sim::arrivals::Arrivals;
use gshare_sim::world::{self, Function, Plan};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A request, named by its number in the list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) at: Timestamp,
    /// The model's number in the list of models.
    pub(super) model: u32,
}

/// Times of a model on each device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    pub(super) load: Duration,
    pub(super) infer: Duration,
}

/// Whole devices, the models that they load, and their requests in order.
pub(super) struct Cluster {
    /// Node and memory of each.
    pub(super) devices: Vec<(NodeId, Bytes)>,
    pub(super) models: Vec<(Bytes, Times)>,
    pub(super) eviction: Duration,
    pub(super) arrivals: Vec<Arrival>,
}

/// The outcome of a run in which all requests were answered.
pub(super) struct Answered {
    /// Seconds from arrival to answer, shortest first.
    pub(super) latencies: Vec<f64>,
    /// When the last of them was answered.
    pub(super) end: Timestamp,
    /// GPU time that requests ran.
    pub(super) running: Duration,
    pub(super) notes: Notes,
}

impl Cluster {
    /// Runs it in a new pool until all requests are answered.
    pub(super) fn run(&self, seed: u64, pool: impl Fn() -> Result<WholePool>) -> Result<Answered> {
        let notes = Arc::<Mutex<Notes>>::default();
        let plan = self.plan()?;
        let make = || {
            let platform = Box::new(Platform::new(super::without_bounds(), vec![pool()?.into()])?);
            let notes = Arc::clone(&notes);
            // A failed run is repeated.
            *notes.lock() = Notes::default();
            Ok(Wrapped::new(platform, move |platform, now, event, actions| {
                let mut notes = notes.lock();
                notes.told(now, &event);
                let before = actions.len();
                platform.handle(now, event, actions)?;
                actions[before..].iter().for_each(|action| notes.ordered(now, action));
                Ok(())
            }))
        };
        let make = || make().map_err(|error: anyhow::Error| error.to_string());
        let outcome = world::run(&plan, seed, make).map_err(|broken| anyhow!("{broken}"))?;
        for function in &outcome.functions {
            let (name, rejected) = (&function.name, &function.rejected);
            ensure!(rejected.is_empty(), "seed {seed}: requests for {name} were rejected: {rejected:?}");
        }
        let all = outcome.functions.iter().flat_map(|function| &function.latencies);
        let mut latencies: Vec<f64> = all.map(|latency| latency.as_secs_f64()).collect();
        latencies.sort_by(f64::total_cmp);
        let running = outcome.functions.iter().map(|function| function.used);
        let running = running.fold(Duration::ZERO, Duration::saturating_add);
        let notes = core::mem::take(&mut *notes.lock());
        Ok(Answered { latencies, end: notes.end, running, notes })
    }

    fn plan(&self) -> Result<Plan> {
        let device = |&(node, memory)| DeviceSpec::new(node, memory).with_regime(Regime::Whole);
        let devices: Vec<DeviceSpec> = self.devices.iter().map(device).collect();
        let copies = u32::try_from(devices.len())?;
        let mut functions = Vec::new();
        for (number, &(memory, Times { load, infer })) in (0..).zip(&self.models) {
            // Half of the device's throughput: the figure is kept to a thousandth, and must not promise a shorter time than
            // `infer`.
            let throughput = 0.5 / infer.as_secs_f64();
            let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, throughput, infer, infer)?;
            let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point])?) };
            let spec = FunctionSpec::new(work, memory);
            let spec = spec.with_loads(load, load).with_instances(0, copies);
            let calls = self.arrivals.iter().filter(|arrival| arrival.model == number);
            let arrivals = Arrivals::times(calls.map(|arrival| arrival.at).collect())?;
            functions.push(Function::new(format!("model{number}"), spec).with_arrivals(arrivals));
        }
        let last = self.arrivals.last().map_or(Timestamp::ZERO, |arrival| arrival.at);
        let length = last.saturating_since(Timestamp::ZERO) + Duration::from_nanos(1);
        let mut plan = Plan::new(devices, functions, length);
        (plan.jitter, plan.stop) = (0, (self.eviction, self.eviction));
        // However long a slow policy works on the arrived requests.
        plan.settle = Duration::from_secs(365 * 86_400);
        Ok(plan)
    }
}

/// The value in a sorted slice that this many thousandths of the values do not exceed.
pub(super) fn percentile(sorted: &[f64], thousandths: usize) -> f64 {
    sorted[(sorted.len() * thousandths / 1000).min(sorted.len() - 1)]
}

/// The platform's orders and the host's answers.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Requests answered, and instances started for them.
    pub(super) answered: u64,
    pub(super) misses: u64,
    /// Misses although another device had the model or loaded it.
    pub(super) false_misses: u64,
    /// The last answer.
    end: Timestamp,
    /// The instances that are neither stopped nor gone, with their functions.
    staying: BTreeMap<InstanceId, FunctionId>,
    /// The starts of instances of the first model, and their ends.
    first: BTreeMap<InstanceId, (Timestamp, Option<Timestamp>)>,
}

impl Notes {
    /// The average number of devices that held the first model or loaded it, up to a time.
    pub(super) fn copies_of_first(&self, end: Timestamp) -> f64 {
        let held = |(from, to): &(Timestamp, Option<Timestamp>)| {
            to.unwrap_or(end).min(end).saturating_since(*from).as_secs_f64()
        };
        self.first.values().map(held).sum::<f64>() / end.saturating_since(Timestamp::ZERO).as_secs_f64()
    }

    fn told(&mut self, now: Timestamp, event: &PlatformEvent) {
        match *event {
            PlatformEvent::RequestDone { .. } => (self.answered, self.end) = (self.answered + 1, now),
            PlatformEvent::Instance { instance, report: InstanceReport::Gone } => {
                self.staying.remove(&instance);
                if let Some((_, to)) = self.first.get_mut(&instance) {
                    *to = Some(now);
                }
            }
            _ => {}
        }
    }

    fn ordered(&mut self, now: Timestamp, action: &PlatformAction) {
        match *action {
            PlatformAction::Start { instance, function, .. } => {
                self.misses += 1;
                self.false_misses += u64::from(self.staying.values().any(|other| *other == function));
                self.staying.insert(instance, function);
                if function.number() == 0 {
                    self.first.insert(instance, (now, None));
                }
            }
            PlatformAction::Stop { instance, .. } => {
                self.staying.remove(&instance);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::GpuId;
    use gshare_core::share::GpuShare;
    use gshare_sched::platform::{Part, StopCause, WholeConfig};

    #[test]
    fn copies_of_the_first_model_count_from_their_start_to_their_end() {
        let (mut notes, second) = (Notes::default(), |second: u64| Timestamp::from_millis(second * 1_000));
        let start = |instance, function| {
            let part = Part {
                gpu: GpuId::new(0),
                share: GpuShare::WHOLE,
                slice: None,
                stage: 0,
                components: gshare_core::dag::ComponentSet::EMPTY,
            };
            let (instance, function) = (InstanceId::new(instance), FunctionId::new(function));
            let (from, takes) = (gshare_sched::Tier::Disk, Duration::ZERO);
            PlatformAction::Start { instance, function, parts: vec![part], from, takes, parked: false }
        };
        let gone = |instance| PlatformEvent::Instance {
            instance: InstanceId::new(instance),
            report: InstanceReport::Gone,
        };
        notes.ordered(second(0), &start(0, 0));
        notes.ordered(second(1), &start(1, 1));
        notes.ordered(second(2), &start(2, 0));
        notes.told(second(3), &gone(0));
        let (instance, cause) = (InstanceId::new(2), StopCause::Evicted);
        notes.ordered(second(4), &PlatformAction::Stop { instance, cause });
        notes.ordered(second(4), &start(3, 0));
        notes.told(second(5), &gone(2));
        // Three seconds of the first, three of the second, and four of the last until the eighth second.
        let average = notes.copies_of_first(second(8));
        assert!((average - 10.0 / 8.0).abs() < 1e-9, "{average}");
        assert_eq!((notes.misses, notes.false_misses), (4, 1), "the last replaces a stopped copy");
    }

    /// One device, and two models of which one fits: the second load waits for the eviction of the first.
    #[test]
    fn loads_evictions_and_runs_take_their_time() {
        let millis = Duration::from_millis;
        let times = Times { load: millis(300), infer: millis(20) };
        let arrival = |at, model| Arrival { at: Timestamp::from_millis(at), model };
        let cluster = Cluster {
            devices: vec![(NodeId::new(0), Bytes::from_gib(8))],
            models: vec![(Bytes::from_gib(5), times); 2],
            eviction: millis(7),
            arrivals: vec![arrival(0, 0), arrival(1_000, 0), arrival(2_000, 1)],
        };
        let answered = cluster.run(1, || Ok(WholePool::new(WholeConfig::paper(25))?)).unwrap();
        assert_eq!(answered.latencies, [0.02, 0.32, 0.327]);
        assert_eq!((answered.end, answered.running), (Timestamp::from_millis(2_327), millis(60)));
        assert_eq!((answered.notes.answered, answered.notes.misses), (3, 2));
    }
}
