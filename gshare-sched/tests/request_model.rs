//! The indexed request scheduler against the literal, O(queue) one: the same decisions on random cases.

#[path = "support/request_literal.rs"]
mod literal;

use gshare_core::request::{
    GpuKind, ModelProfile, NodeId, RequestAction, RequestEvent, RequestId, RequestScheduler, TenantId,
};
use gshare_core::{Bytes, Duration, Engine, GpuId, ModelId, Timestamp};
use gshare_sched::request::{LocalityScheduler, Policy, SchedulerConfig};
use literal::Literal;
use proptest::prelude::*;

/// One step of a random run; what it does depends on what is going on.
#[derive(Debug, Clone)]
enum Step {
    Arrive {
        model: u32,
    },
    /// Answers one of the orders that are open, well or badly.
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
    Wait {
        millis: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0u32..6).prop_map(|model| Step::Arrive { model }),
        10 => (any::<prop::sample::Index>(), 0u8..12)
            .prop_map(|(which, luck)| Step::Answer { which: which.index(1 << 16), badly: luck == 0 }),
        1 => (0u32..4).prop_map(|gpu| Step::Lose { gpu }),
        1 => (0u32..4).prop_map(|gpu| Step::Join { gpu }),
        1 => (0u32..6, 0u32..4, any::<bool>()).prop_map(|(model, gpu, pinned)| Step::Pin { model, gpu, pinned }),
        1 => (0u32..6, 0u32..4).prop_map(|(model, gpu)| Step::Drop { model, gpu }),
        4 => (0u64..3_000).prop_map(|millis| Step::Wait { millis }),
    ]
}

/// Whether there is one; load and run in ms.
type Profile = (bool, u64, u64);

#[derive(Debug, Clone)]
struct Cluster {
    /// `None`: load balancing.
    limit: Option<u32>,
    skip_age: u64,
    /// Kind of each GPU.
    gpus: Vec<u8>,
    memory: [u64; 2],
    /// Size, and profiles by kind.
    models: Vec<(u64, [Profile; 2])>,
}

fn cluster() -> impl Strategy<Value = Cluster> {
    let profile = || (prop::bool::weighted(0.8), 100u64..4_000, 100u64..1_500);
    (
        prop_oneof![1 => Just(None), 4 => (0u32..5).prop_map(Some)],
        prop_oneof![Just(u64::MAX / 2_000_000), 500u64..5_000],
        prop::collection::vec(0u8..2, 1..5),
        [3u64..9, 3u64..9],
        prop::collection::vec((1u64..6, [profile(), profile()]), 6),
    )
        .prop_map(|(limit, skip_age, gpus, memory, models)| Cluster {
            limit,
            skip_age,
            gpus,
            memory,
            models,
        })
}

struct Pair {
    engine: LocalityScheduler,
    literal: Literal,
    now: Timestamp,
    open: Vec<RequestAction>,
    cluster: Cluster,
}

impl Pair {
    fn new(cluster: Cluster) -> Self {
        let skip_age = Duration::from_millis(cluster.skip_age);
        let mut config = SchedulerConfig::paper(match cluster.limit {
            None => Policy::LoadBalance,
            Some(0) => Policy::Lalb,
            Some(skip_limit) => Policy::LalbO3 { skip_limit },
        });
        config.skip_age = skip_age;
        config.learn = false;
        let engine = LocalityScheduler::new(config).unwrap();
        let literal = Literal::new(cluster.limit, skip_age, config.max_attempts);
        let mut pair = Self { engine, literal, now: Timestamp::ZERO, open: Vec::new(), cluster };
        for (model, (size, profiles)) in (0..).zip(pair.cluster.models.clone()) {
            let model = ModelId(model);
            pair.send(RequestEvent::ModelAdded { model, memory: Bytes::from_gib(size) });
            for (kind, (profiled, load, infer)) in (0..).zip(profiles) {
                let load = Duration::from_millis(load);
                let infer = Duration::from_millis(infer);
                let profile = ModelProfile { load_disk: load, load_host: load, infer };
                if profiled {
                    pair.send(RequestEvent::ModelProfiled { model, kind: GpuKind(kind), profile });
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
        self.send(RequestEvent::GpuJoined { gpu: GpuId(gpu), kind: GpuKind(kind), node: NodeId(0), memory });
    }

    fn send(&mut self, event: RequestEvent) {
        let mut actions = Vec::new();
        self.engine.handle(self.now, event, &mut actions).unwrap();
        let mut expected = Vec::new();
        self.literal.handle(self.now, event, &mut expected);
        assert_eq!(actions, expected, "after {event:?} at {}", self.now);
        let order = |action: &RequestAction| !matches!(action, RequestAction::Reject { .. });
        self.open.extend(actions.into_iter().filter(order));
    }

    fn here(&self, gpu: u32) -> bool {
        self.engine.gpu(GpuId(gpu)).is_some()
    }

    fn take(&mut self, step: &Step, id: u64) {
        match *step {
            Step::Arrive { model } => self.send(RequestEvent::Arrived {
                request: RequestId(id),
                model: ModelId(model),
                tenant: TenantId(0),
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
                        | RequestAction::Dispatch { gpu: on, .. } if on.0 == gpu)
                });
                self.send(RequestEvent::GpuLost { gpu: GpuId(gpu) });
            }
            Step::Join { gpu } if (gpu as usize) < self.cluster.gpus.len() && !self.here(gpu) => {
                self.join(gpu);
            }
            Step::Pin { model, gpu, pinned } if self.here(gpu) => {
                self.send(RequestEvent::ModelPinned { model: ModelId(model), gpu: GpuId(gpu), pinned });
            }
            Step::Drop { model, gpu } if self.here(gpu) => {
                self.send(RequestEvent::Dropped { gpu: GpuId(gpu), model: ModelId(model) });
            }
            Step::Wait { millis } => self.now = self.now + Duration::from_millis(millis),
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Algorithms 1 and 2 with their gaps closed, decided from indices, decide what the literal ones decide.
    #[test]
    fn the_indexed_scheduler_decides_as_the_literal_one(
        cluster in cluster(), steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut pair = Pair::new(cluster);
        for (id, step) in (0..).zip(&steps) {
            pair.take(step, id);
        }
    }
}
