//! Random runs of the indexed request scheduler beside the literal one. Shared by the property test, the committed
//! regressions and the fuzz target.
#![allow(dead_code, reason = "each user takes what it needs")]

#[path = "request_literal.rs"]
mod literal;

use gshare_core::{Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    LocalityScheduler, ModelProfile, Policy, RequestAction, RequestEvent, RequestScheduler, SchedulerConfig,
};
use literal::Literal;
use std::collections::BTreeMap;

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
    Lose {
        gpu: u32,
    },
    Join {
        gpu: u32,
    },
    Pin {
        model: u32,
        gpu: u32,
        pinned: bool,
    },
    Drop {
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
    /// An impossible event: refused, and nothing changes.
    Wrong {
        which: u8,
    },
}

/// Whether there is one; load and run in ms.
pub(crate) type Profile = (bool, u64, u64);

#[derive(Debug, Clone)]
pub(crate) struct Cluster {
    /// `None`: load balancing.
    pub(crate) limit: Option<u32>,
    pub(crate) skip_age: u64,
    /// Kind of each GPU.
    pub(crate) gpus: Vec<u8>,
    pub(crate) memory: [u64; 2],
    /// Size, and profiles by kind.
    pub(crate) models: Vec<(u64, [Profile; 2])>,
}

pub(crate) struct Pair {
    engine: LocalityScheduler,
    literal: Literal,
    now: Timestamp,
    open: Vec<RequestAction>,
    /// The most copies of models with a limit.
    limits: BTreeMap<ModelId, u32>,
    cluster: Cluster,
}

impl Pair {
    pub(crate) fn new(cluster: Cluster) -> Self {
        let skip_age = Duration::from_millis(cluster.skip_age);
        let mut config = SchedulerConfig::paper(match cluster.limit {
            None => Policy::LoadBalance,
            Some(0) => Policy::Lalb,
            Some(skip_limit) => Policy::LalbO3 { skip_limit },
        });
        config.skip_age = skip_age;
        config.learn = false;
        let engine = LocalityScheduler::new(config).unwrap();
        let literal = Literal::new(cluster.limit, skip_age, config.max_loads);
        let mut pair = Self {
            engine,
            literal,
            now: Timestamp::ZERO,
            open: Vec::new(),
            limits: BTreeMap::new(),
            cluster,
        };
        for (model, (size, profiles)) in (0..).zip(pair.cluster.models.clone()) {
            let model = ModelId::new(model);
            pair.send(RequestEvent::ModelAdded { model, memory: Bytes::from_gib(size) });
            for (kind, (profiled, load, infer)) in (0..).zip(profiles) {
                let load = Duration::from_millis(load);
                let infer = Duration::from_millis(infer);
                let profile = ModelProfile { load_disk: load, load_host: load, infer };
                if profiled {
                    pair.send(RequestEvent::ModelProfiled { model, kind: GpuKind::new(kind), profile });
                }
            }
        }
        for (gpu, _) in (0..).zip(pair.cluster.gpus.clone()) {
            pair.join(gpu);
        }
        pair
    }

    fn join(&mut self, gpu: u32) {
        let kind = self.cluster.gpus[gpu as usize];
        let memory = Bytes::from_gib(self.cluster.memory[usize::from(kind)]);
        self.send(RequestEvent::GpuJoined {
            gpu: GpuId::new(gpu),
            kind: GpuKind::new(kind),
            node: NodeId::new(0),
            memory,
        });
    }

    fn send(&mut self, event: RequestEvent) {
        let actions = self.engine.orders(self.now, event).unwrap();
        let mut expected = Vec::new();
        self.literal.handle(self.now, event, &mut expected);
        assert_eq!(actions, expected, "after {event:?} at {}", self.now);
        let order = |action: &RequestAction| !matches!(action, RequestAction::Reject { .. });
        for action in actions.into_iter().filter(order) {
            if let RequestAction::Load { model, .. } = action {
                let most = self.limits.get(&model).map_or(usize::MAX, |copies| *copies as usize);
                let copies = self.engine.copies(model);
                assert!(copies <= most, "{model} is loaded although it has {copies} copies of {most}");
            }
            self.open.push(action);
        }
    }

    /// Sends invalid events to the engine alone: the two still agree afterwards.
    fn refused(&mut self, which: u8, id: u64) {
        let (nobody, gpu, model) = (RequestId::new(u64::MAX), GpuId::new(9), ModelId::new(9));
        let took = Duration::from_millis(1);
        let event = match which % 8 {
            0 => RequestEvent::Completed { gpu: GpuId::new(0), request: nobody, took },
            1 => RequestEvent::Loaded { gpu, model: ModelId::new(0), took },
            2 => RequestEvent::Evicted { gpu, model: ModelId::new(0) },
            3 => RequestEvent::Arrived { request: nobody, model, tenant: TenantId::new(0), deadline: None },
            4 => RequestEvent::Cancelled { request: nobody },
            5 => RequestEvent::GpuLost { gpu },
            6 => RequestEvent::ModelAdded { model: ModelId::new(0), memory: Bytes::ZERO },
            _ => RequestEvent::NotResident { gpu: GpuId::new(0), request: RequestId::new(id) },
        };
        let mut actions = Vec::new();
        self.engine.handle(self.now, event, &mut actions).unwrap_err();
        assert_eq!(actions, []);
    }

    fn here(&self, gpu: u32) -> bool {
        self.engine.gpu(GpuId::new(gpu)).is_some()
    }

    pub(crate) fn take(&mut self, step: &Step, id: u64) {
        match *step {
            Step::Arrive { model } => self.send(RequestEvent::Arrived {
                request: RequestId::new(id),
                model: ModelId::new(model),
                tenant: TenantId::new(0),
                deadline: None,
            }),
            Step::Answer { which, badly } if !self.open.is_empty() => {
                let took = Duration::from_millis(1);
                let event = match self.open.remove(which % self.open.len()) {
                    RequestAction::Evict { gpu, model } => RequestEvent::Evicted { gpu, model },
                    RequestAction::Load { gpu, model, .. } if badly => {
                        RequestEvent::LoadFailed { gpu, model }
                    }
                    RequestAction::Load { gpu, model, .. } => RequestEvent::Loaded { gpu, model, took },
                    RequestAction::Dispatch { gpu, request, .. } if badly => {
                        RequestEvent::NotResident { gpu, request }
                    }
                    RequestAction::Dispatch { gpu, request, .. } => {
                        RequestEvent::Completed { gpu, request, took }
                    }
                    other => unreachable!("{other:?}"),
                };
                self.send(event);
            }
            Step::Lose { gpu } if self.here(gpu) => {
                self.open.retain(|action| {
                    !matches!(*action, RequestAction::Evict { gpu: on, .. }
                        | RequestAction::Load { gpu: on, .. }
                        | RequestAction::Dispatch { gpu: on, .. } if on.number() == gpu)
                });
                self.send(RequestEvent::GpuLost { gpu: GpuId::new(gpu) });
            }
            Step::Join { gpu } if (gpu as usize) < self.cluster.gpus.len() && !self.here(gpu) => {
                self.join(gpu);
            }
            Step::Pin { model, gpu, pinned } if self.here(gpu) => {
                self.send(RequestEvent::ModelPinned {
                    model: ModelId::new(model),
                    gpu: GpuId::new(gpu),
                    pinned,
                });
            }
            Step::Drop { model, gpu } if self.here(gpu) => {
                self.send(RequestEvent::Dropped { gpu: GpuId::new(gpu), model: ModelId::new(model) });
            }
            Step::Limit { model, copies } => {
                self.limits.insert(ModelId::new(model), copies);
                self.send(RequestEvent::ModelLimited { model: ModelId::new(model), copies });
            }
            Step::Wrong { which } => self.refused(which, id),
            Step::Wait { millis } => self.now = self.now + Duration::from_millis(millis),
            _ => {}
        }
    }
}

/// Reads a cluster and a run from any bytes. Times are multiples of 100 ms, so that many of them are equal.
pub(crate) fn decode(bytes: &[u8]) -> Option<(Cluster, Vec<Step>)> {
    let (head, rest) = bytes.split_at_checked(4)?;
    let (models, steps) = rest.split_at_checked(30)?;
    let gpus = (0..1 + head[2] % 4).map(|gpu| head[2] >> (4 + gpu) & 1).collect();
    let profile = |load: u8, infer: u8| {
        (!load.is_multiple_of(8), 100 * (1 + u64::from(load) % 40), 100 * (1 + u64::from(infer) % 15))
    };
    let models = models.as_chunks::<5>().0.iter();
    let cluster = Cluster {
        limit: (head[0] % 6).checked_sub(1).map(u32::from),
        skip_age: if head[1].is_multiple_of(2) {
            u64::MAX / 2_000_000
        } else {
            500 + u64::from(head[1]) * 20
        },
        gpus,
        memory: [3 + u64::from(head[3] % 6), 3 + u64::from(head[3] / 6 % 6)],
        models: models
            .map(|&[size, a, b, c, d]| (1 + u64::from(size % 5), [profile(a, b), profile(c, d)]))
            .collect(),
    };
    let steps = steps.as_chunks::<3>().0.iter().map(|&[what, a, b]| {
        let (model, gpu) = (u32::from(a % 6), u32::from(b % 4));
        match what % 32 {
            0..8 => Step::Arrive { model },
            8..20 => Step::Answer { which: a.into(), badly: b.is_multiple_of(12) },
            20 => Step::Lose { gpu },
            21 => Step::Join { gpu },
            22 => Step::Pin { model, gpu, pinned: what > 127 },
            23 => Step::Drop { model, gpu },
            24 => Step::Wrong { which: a },
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
