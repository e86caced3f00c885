//! The request scheduler in a cluster where everything goes wrong.

#[path = "support/request_chaos.rs"]
mod chaos;

use gshare_core::{Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    LocalityScheduler, ModelProfile, RequestAction, RequestEvent, SchedulerConfig, Tier,
};
use gshare_sim::request_cluster::Fate;

/// Every request is served once or rejected once, with any faults; `simulate` checks the rest at each step.
#[test]
fn every_request_ends_once_whatever_goes_wrong() {
    let (mut served, mut rejected) = (0, 0);
    for seed in 0..60 {
        let outcome = chaos::run(seed).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        assert_eq!(outcome.fates.len(), 200);
        for fate in &outcome.fates {
            match fate {
                Fate::Served { .. } => served += 1,
                Fate::Rejected { .. } => rejected += 1,
            }
        }
    }
    assert!(served > rejected, "{served} served, {rejected} rejected");
}

#[test]
fn a_chaotic_run_replays_exactly() {
    let run = || format!("{:?}", chaos::run(7).unwrap());
    assert_eq!(run(), run());
}

/// Seed 72: a model that was reported as dropped was loaded again while its old copy was still on its way out, which would
/// have taken the new one with it.
#[test]
fn a_load_waits_for_the_eviction_of_the_same_model_seed_72() {
    chaos::run(72).unwrap();
    let mut scheduler = LocalityScheduler::new(SchedulerConfig::default()).unwrap();
    let (gpu, model, now) = (GpuId::new(0), ModelId::new(0), Timestamp::ZERO);
    let mut tell = |event| scheduler.orders(now, event).unwrap();
    let took = Duration::from_secs(1);
    let profile = ModelProfile { load_disk: took, load_host: took, infer: took };
    let arrived = |request| RequestEvent::Arrived {
        request: RequestId::new(request),
        model,
        tenant: TenantId::new(0),
        deadline: None,
    };
    tell(RequestEvent::GpuJoined {
        gpu,
        kind: GpuKind::new(0),
        node: NodeId::new(0),
        memory: Bytes::from_gib(8),
    });
    tell(RequestEvent::ModelAdded { model, memory: Bytes::from_gib(2) });
    tell(RequestEvent::ModelProfiled { model, kind: GpuKind::new(0), profile });
    tell(arrived(1));
    tell(RequestEvent::Loaded { gpu, model, took });
    tell(RequestEvent::Completed { gpu, request: RequestId::new(1), took });
    let evict = RequestAction::Evict { gpu, model };
    assert_eq!(tell(RequestEvent::Dropped { gpu, model }), [evict]);
    assert_eq!(tell(arrived(2)), [], "there is room, but the old copy is not gone");
    let load = RequestAction::Load { gpu, model, from: Tier::Disk, keep_on_host: false };
    assert_eq!(tell(RequestEvent::Evicted { gpu, model }), [load]);
}
