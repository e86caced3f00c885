//! A request scheduler on whole devices: under the pool of a [`Platform`] in the simulated [`world`], and the events that it was
//! told.

use anyhow::{Result, anyhow, ensure};
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, NodeId, Quota, SmShare, Timestamp};
use gshare_sched::Wrapped;
use gshare_sched::platform::{DeviceSpec, FunctionSpec, Platform, Regime, WholePool, Work};
use gshare_sched::request::{ModelProfile, RequestEvent, RequestScheduler, RequestStats};
use gshare_sim::arrivals::Arrivals;
use gshare_sim::world::{self, Function, Plan};
use parking_lot::Mutex;
use std::sync::Arc;

/// A request, named by its number in the list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    pub(super) at: Timestamp,
    /// The model's number in the list of models.
    pub(super) model: u32,
}

/// Whole devices, the models that they load, and their requests in order.
pub(super) struct Cluster {
    /// Node and memory of each.
    pub(super) devices: Vec<(NodeId, Bytes)>,
    pub(super) models: Vec<(Bytes, ModelProfile)>,
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
    /// Runs it under a new scheduler until all requests are answered.
    pub(super) fn run(
        &self,
        seed: u64,
        scheduler: impl Fn() -> Result<Box<dyn RequestScheduler>>,
    ) -> Result<Answered> {
        let notes = Arc::<Mutex<Notes>>::default();
        let plan = self.plan()?;
        let make = || {
            let scheduler = noted(scheduler()?, &notes);
            Ok(Platform::new(super::without_bounds(), vec![WholePool::new(Box::new(scheduler)).into()])?)
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
        let answer = |(_, event): &&(_, _)| matches!(event, RequestEvent::Completed { .. });
        let end = notes.told.iter().rfind(answer).map_or(Timestamp::ZERO, |(at, _)| *at);
        Ok(Answered { latencies, end, running, notes })
    }

    fn plan(&self) -> Result<Plan> {
        let device = |&(node, memory)| DeviceSpec::new(node, memory).with_regime(Regime::Whole);
        let devices: Vec<DeviceSpec> = self.devices.iter().map(device).collect();
        let copies = u32::try_from(devices.len())?;
        let mut functions = Vec::new();
        for (number, &(memory, ModelProfile { load_disk, load_host, infer })) in (0..).zip(&self.models) {
            // Half of the device's throughput: the figure is kept to a thousandth, and must not promise a shorter time than
            // `infer`.
            let throughput = 0.5 / infer.as_secs_f64();
            let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, throughput, infer, infer)?;
            let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point])?) };
            let spec = FunctionSpec::new(work, memory);
            let spec = spec.with_loads(load_disk, load_host).with_instances(0, copies);
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

/// The events that a scheduler was told, and its counters after them. In a world all models are evicted at the end.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) told: Vec<(Timestamp, RequestEvent)>,
    pub(super) stats: RequestStats,
}

impl Notes {
    /// The average number of GPUs that held the first model or loaded it, up to a time.
    pub(super) fn copies_of_first(&self, end: Timestamp) -> f64 {
        let held = self.told.iter().map(|&(at, event)| match event {
            RequestEvent::Loaded { model, took, .. } if model.index() == 0 => {
                end.saturating_since(at).as_secs_f64() + took.as_secs_f64()
            }
            RequestEvent::Evicted { model, .. } if model.index() == 0 => {
                -end.saturating_since(at).as_secs_f64()
            }
            _ => 0.0,
        });
        held.sum::<f64>() / end.saturating_since(Timestamp::ZERO).as_secs_f64()
    }
}

/// The scheduler, of which notes are taken.
pub(super) fn noted(
    scheduler: Box<dyn RequestScheduler>,
    notes: &Arc<Mutex<Notes>>,
) -> Wrapped<dyn RequestScheduler> {
    let notes = Arc::clone(notes);
    Wrapped::new(scheduler, move |scheduler, now, event, actions| {
        // There may be a copy on every GPU, and a scheduler need not know of limits.
        if matches!(event, RequestEvent::ModelLimited { .. }) {
            return Ok(());
        }
        scheduler.handle(now, event, actions)?;
        let mut notes = notes.lock();
        notes.told.push((now, event));
        notes.stats = scheduler.stats();
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{GpuId, ModelId};

    #[test]
    fn copies_of_the_first_model_count_from_their_load_to_their_eviction() {
        let (gpu, took) = (GpuId::new(0), Duration::from_secs(1));
        let loaded = |model| RequestEvent::Loaded { gpu, model: ModelId::new(model), took };
        let evicted = |model| RequestEvent::Evicted { gpu, model: ModelId::new(model) };
        let told = [(1, loaded(0)), (2, loaded(1)), (3, evicted(0)), (5, loaded(0)), (9, evicted(0))];
        let told = told.map(|(second, event)| (Timestamp::from_millis(second * 1_000), event)).to_vec();
        let notes = Notes { told, stats: RequestStats::default() };
        // The model is held in the first three and the last four of eight seconds; later events do not count.
        let average = notes.copies_of_first(Timestamp::from_millis(8_000));
        assert!((average - 7.0 / 8.0).abs() < 1e-9, "{average}");
    }

    /// One device, and two models of which one fits: the second load waits for the eviction of the first.
    #[test]
    fn loads_evictions_and_runs_take_their_time() {
        use gshare_sched::request::{LocalityScheduler, SchedulerConfig};
        let millis = Duration::from_millis;
        let profile = ModelProfile { load_disk: millis(300), load_host: millis(300), infer: millis(20) };
        let arrival = |at, model| Arrival { at: Timestamp::from_millis(at), model };
        let cluster = Cluster {
            devices: vec![(NodeId::new(0), Bytes::from_gib(8))],
            models: vec![(Bytes::from_gib(5), profile); 2],
            eviction: millis(7),
            arrivals: vec![arrival(0, 0), arrival(1_000, 0), arrival(2_000, 1)],
        };
        let make = || Ok(Box::new(LocalityScheduler::new(SchedulerConfig::default())?) as Box<_>);
        let answered = cluster.run(1, make).unwrap();
        assert_eq!(answered.latencies, [0.02, 0.32, 0.327]);
        assert_eq!((answered.end, answered.running), (Timestamp::from_millis(2_327), millis(60)));
        let stats = answered.notes.stats;
        assert_eq!((stats.hits, stats.misses), (1, 2));
    }
}
