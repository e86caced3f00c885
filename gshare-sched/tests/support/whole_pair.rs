//! Random runs of the pool of whole devices beside the literal algorithms. Shared by the property test, the committed regressions and
//! the fuzz target.
#![allow(dead_code, reason = "each user takes what it needs")]

#[path = "whole_literal.rs"]
mod literal;

use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{
    Bytes, Duration, Engine, FunctionId, GpuId, GpuKind, InstanceId, NodeId, Quota, RequestId, SmShare,
    Timestamp,
};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, InstanceReport, Platform, PlatformAction, PlatformConfig, PlatformEvent,
    Regime, WholeConfig, WholePool, Work,
};
use gshare_sim::scenario::LoadBalance;
use literal::{Event, Literal, Order};
use std::collections::{BTreeMap, BTreeSet};

/// One step of a random run; its effect depends on the present state.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Arrive {
        model: u32,
    },
    /// Answers an open order, well or badly.
    Answer {
        which: usize,
        badly: bool,
    },
    /// A GPU but the first.
    Lose {
        gpu: u32,
    },
    Join {
        gpu: u32,
    },
    /// An instance without a request dies.
    Die {
        model: u32,
        gpu: u32,
    },
    Limit {
        model: u32,
        copies: u32,
    },
    Wait {
        millis: u64,
    },
}

#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    /// `None`: load balancing.
    pub(crate) limit: Option<u32>,
    /// Kind of each GPU but the first, which has kind 0 and is never lost.
    pub(crate) gpus: Vec<u8>,
    /// GiB by kind.
    pub(crate) memory: [u64; 2],
    /// GiB, of which the first kind holds any; load and run in ms.
    pub(crate) models: Vec<(u64, u64, u64)>,
}

pub(crate) struct Pair {
    platform: Platform,
    literal: Literal,
    now: Timestamp,
    open: Vec<Order>,
    /// The GPU and the model of each instance, and the time of its start.
    instances: BTreeMap<InstanceId, (u32, u32, Timestamp)>,
    stopped: BTreeSet<InstanceId>,
    here: BTreeSet<u32>,
    cluster: Cluster,
}

impl Pair {
    pub(crate) fn new(mut cluster: Cluster) -> Self {
        cluster.gpus.insert(0, 0);
        let day = Duration::from_secs(86_400);
        let bounds = PlatformConfig::default().with_max_wait(day).with_start_timeout(day);
        let bounds = bounds.with_drain_timeout(day).with_max_attempts(u8::MAX);
        let mut pool = WholePool::new(WholeConfig::paper(cluster.limit.unwrap_or(0))).unwrap();
        if cluster.limit.is_none() {
            pool = pool.with_policy(Box::new(LoadBalance));
        }
        let mut pair = Self {
            platform: Platform::new(bounds, vec![pool.into()]).unwrap(),
            literal: Literal::new(cluster.limit, Duration::from_secs(60), 3),
            now: Timestamp::ZERO,
            open: Vec::new(),
            instances: BTreeMap::new(),
            stopped: BTreeSet::new(),
            here: BTreeSet::new(),
            cluster,
        };
        for (model, (size, load, infer)) in (0..).zip(pair.cluster.models.clone()) {
            let bytes = Bytes::from_gib(size.min(pair.cluster.memory[0]));
            let [load, infer] = [load, infer].map(Duration::from_millis);
            let rate = 0.5 / infer.as_secs_f64();
            let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, rate, infer, infer).unwrap();
            let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point]).unwrap()) };
            let spec = FunctionSpec::new(work, bytes).with_loads(load, load).with_instances(0, u32::MAX);
            let (function, spec) = (FunctionId::new(model), Box::new(spec));
            let added = Event::ModelAdded { model, bytes: bytes.get(), load, infer };
            pair.send(PlatformEvent::FunctionDeployed { function, spec }, added);
        }
        for (gpu, _) in (0..).zip(pair.cluster.gpus.clone()) {
            pair.join(gpu);
        }
        pair
    }

    fn join(&mut self, gpu: u32) {
        let kind = self.cluster.gpus[gpu as usize];
        let memory = Bytes::from_gib(self.cluster.memory[usize::from(kind)]);
        let spec = DeviceSpec::new(NodeId::new(0), memory).with_kind(GpuKind::new(kind));
        let spec = spec.with_regime(Regime::Whole);
        self.here.insert(gpu);
        let joined = Event::GpuJoined { gpu, kind, memory: memory.get() };
        self.send(PlatformEvent::DeviceFound { gpu: GpuId::new(gpu), spec }, joined);
    }

    /// The order in the words of the literal algorithms.
    fn read(&mut self, action: &PlatformAction) -> Option<Order> {
        Some(match action {
            PlatformAction::Start { instance, function, parts, .. } => {
                let (gpu, model) = (parts[0].gpu.number(), function.number());
                self.instances.insert(*instance, (gpu, model, self.now));
                Order::Load { gpu, model }
            }
            PlatformAction::Stop { instance, .. } => {
                self.stopped.insert(*instance);
                let (gpu, model, _) = self.instances[instance];
                Order::Evict { gpu, model }
            }
            PlatformAction::Dispatch { request, instance } => {
                let (gpu, model, _) = self.instances[instance];
                Order::Run { gpu, request: request.number(), model }
            }
            PlatformAction::Reject { request, .. } => Order::Reject { request: request.number() },
            _ => return None,
        })
    }

    fn send(&mut self, event: PlatformEvent, literal: Event) {
        let actions = self.platform.orders(self.now, event).unwrap();
        self.platform.invariants();
        let orders: Vec<Order> = actions.iter().filter_map(|action| self.read(action)).collect();
        let mut expected = Vec::new();
        self.literal.handle(self.now, literal, &mut expected);
        assert_eq!(orders, expected, "after {literal:?} at {}", self.now);
        self.open.extend(orders.iter().filter(|order| !matches!(order, Order::Reject { .. })));
    }

    /// The instance on the GPU that is stopped, or is not.
    fn instance(&self, gpu: u32, model: u32, stopped: bool) -> Option<(InstanceId, Timestamp)> {
        let found = self.instances.iter().find(|(instance, (on, of, _))| {
            (*on, *of) == (gpu, model) && self.stopped.contains(instance) == stopped
        });
        found.map(|(instance, (_, _, since))| (*instance, *since))
    }

    fn report(&mut self, instance: InstanceId, report: InstanceReport, literal: Event) {
        if report == InstanceReport::Gone {
            self.instances.remove(&instance);
            self.stopped.remove(&instance);
        }
        self.send(PlatformEvent::Instance { instance, report }, literal);
    }

    pub(crate) fn take(&mut self, step: &Step, id: u64) {
        match *step {
            Step::Arrive { model } => {
                let (request, function) = (RequestId::new(id), FunctionId::new(model));
                let event = PlatformEvent::RequestArrived { request, function, deadline: None };
                self.send(event, Event::Arrived { request: id, model });
            }
            Step::Answer { which, badly } if !self.open.is_empty() => {
                match self.open.remove(which % self.open.len()) {
                    Order::Evict { gpu, model } => {
                        let (instance, _) = self.instance(gpu, model, true).unwrap();
                        self.report(instance, InstanceReport::Gone, Event::Evicted { gpu, model });
                    }
                    Order::Load { gpu, model } => {
                        let (instance, since) = self.instance(gpu, model, false).unwrap();
                        let took = self.now.saturating_since(since);
                        if badly {
                            self.report(instance, InstanceReport::Gone, Event::LoadFailed { gpu, model });
                        } else {
                            let loaded = Event::Loaded { gpu, model, took };
                            self.report(instance, InstanceReport::Ready, loaded);
                        }
                    }
                    Order::Run { gpu, model, .. } if badly => {
                        let (instance, _) = self.instance(gpu, model, false).unwrap();
                        self.report(instance, InstanceReport::Gone, Event::NotResident { gpu });
                    }
                    Order::Run { gpu, request, model } => {
                        let took = Duration::from_millis(self.cluster.models[model as usize].2);
                        let request = RequestId::new(request);
                        let done = PlatformEvent::RequestDone { request, took };
                        self.send(done, Event::Completed { gpu });
                    }
                    other @ Order::Reject { .. } => unreachable!("{other:?}"),
                }
            }
            Step::Lose { gpu } if gpu > 0 && self.here.remove(&gpu) => {
                self.open.retain(|order| {
                    !matches!(*order, Order::Evict { gpu: on, .. }
                        | Order::Load { gpu: on, .. }
                        | Order::Run { gpu: on, .. } if on == gpu)
                });
                self.instances.retain(|_, (on, _, _)| *on != gpu);
                self.send(PlatformEvent::DeviceLost { gpu: GpuId::new(gpu) }, Event::GpuLost { gpu });
            }
            Step::Join { gpu } if (gpu as usize) < self.cluster.gpus.len() && !self.here.contains(&gpu) => {
                self.join(gpu);
            }
            Step::Die { model, gpu } => {
                let works = |order: &Order| match *order {
                    Order::Load { gpu: on, model: of } | Order::Run { gpu: on, model: of, .. } => {
                        (on, of) == (gpu, model)
                    }
                    _ => false,
                };
                if let Some((instance, _)) = self.instance(gpu, model, false)
                    && !self.open.iter().any(works)
                {
                    self.report(instance, InstanceReport::Gone, Event::Died { gpu, model });
                }
            }
            Step::Limit { model, copies } => {
                let (function, limited) = (FunctionId::new(model), Event::ModelLimited { model, copies });
                let (min_instances, max_instances) = (0, copies);
                let event = PlatformEvent::BoundsChanged { function, min_instances, max_instances };
                self.send(event, limited);
            }
            Step::Wait { millis } => self.now = self.now + Duration::from_millis(millis),
            _ => {}
        }
    }
}

/// Reads a cluster and a run from any bytes. Times are multiples of 100 ms, so that many of them are equal.
pub(crate) fn decode(bytes: &[u8]) -> Option<(Cluster, Vec<Step>)> {
    let (head, rest) = bytes.split_at_checked(4)?;
    let (models, steps) = rest.split_at_checked(30)?;
    let gpus = (0..head[2] % 4).map(|gpu| head[2] >> (4 + gpu) & 1).collect();
    let models = models.as_chunks::<5>().0.iter();
    let cluster = Cluster {
        limit: (head[0] % 6).checked_sub(1).map(u32::from),
        gpus,
        memory: [3 + u64::from(head[3] % 6), 3 + u64::from(head[3] / 6 % 6)],
        models: models
            .map(|&[size, load, infer, ..]| {
                (1 + u64::from(size % 5), 100 * (1 + u64::from(load) % 40), 100 * (1 + u64::from(infer) % 15))
            })
            .collect(),
    };
    let steps = steps.as_chunks::<3>().0.iter().map(|&[what, a, b]| {
        let (model, gpu) = (u32::from(a % 6), u32::from(b % 4));
        match what % 32 {
            0..8 => Step::Arrive { model },
            8..20 => Step::Answer { which: a.into(), badly: b.is_multiple_of(12) },
            20 => Step::Lose { gpu },
            21 => Step::Join { gpu },
            22 | 23 => Step::Die { model, gpu },
            // Beyond the age at which requests are not overtaken any more.
            24 => Step::Wait { millis: 40_000 },
            25 => Step::Limit { model, copies: 1 + gpu % 3 },
            _ => Step::Wait { millis: 100 * u64::from(a % 30) },
        }
    });
    Some((cluster, steps.collect()))
}

/// Runs the history in the bytes; the model is quadratic in what happened, so a long run is cut.
pub(crate) fn run_bytes(bytes: &[u8]) {
    let Some((cluster, steps)) = decode(bytes) else { return };
    let mut pair = Pair::new(cluster);
    for (id, step) in (0..).zip(steps.iter().take(400)) {
        pair.take(step, id);
    }
}
