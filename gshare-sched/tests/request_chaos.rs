//! The request scheduler on whole devices where everything goes wrong.

use gshare_core::{Bytes, Duration, Engine, GpuId, GpuKind, ModelId, NodeId, RequestId, TenantId, Timestamp};
use gshare_sched::request::{
    CachePolicy, LocalityScheduler, ModelProfile, Policy, RequestAction, RequestEvent, SchedulerConfig, Tier,
};
use gshare_sim::Rng;
use gshare_sim::conformance::request_scheduler;

/// A configuration for a seed: every policy, every cache, and options in every mixture.
fn config(seed: u64) -> SchedulerConfig {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let skip_limit = u32::try_from(rng.below(30)).unwrap_or(0);
    let policies = [
        Policy::LoadBalance,
        Policy::Lalb,
        Policy::LalbO3 { skip_limit },
        Policy::EvictCostAware { skip_limit },
    ];
    let caches = [CachePolicy::Lru, CachePolicy::Gdsf, CachePolicy::CostAware];
    let mut config = SchedulerConfig::paper(*rng.pick(&policies).expect("not empty"));
    config.cache = *rng.pick(&caches).expect("not empty");
    config.skip_age = Duration::from_millis(rng.between(500, 60_000));
    config.max_loads = u8::try_from(rng.between(1, 5)).unwrap_or(3);
    if rng.percent(30) {
        config.host_memory = Bytes::from_gib(rng.between(1, 16));
    }
    config
}

/// Every request is served once or rejected once, in time, with any faults; the suite checks the rest at each step.
#[test]
fn every_request_ends_once_whatever_goes_wrong() {
    let (mut answered, mut rejected) = (0, 0);
    for seed in 0..60 {
        let make = || -> Box<dyn gshare_sched::request::RequestScheduler> {
            Box::new(LocalityScheduler::new(config(seed)).expect("the settings are valid"))
        };
        let outcome = request_scheduler(&make, seed..seed + 1).unwrap_or_else(|story| panic!("{story}"));
        answered += outcome.functions.iter().map(|one| one.answered).sum::<u64>();
        rejected += outcome.functions.iter().flat_map(|one| one.rejected.values()).sum::<u64>();
    }
    assert!(answered > 5_000 && answered > rejected, "{answered} answered, {rejected} rejected");
}

/// Seed 72: a model that was reported as dropped was loaded again while its old copy was still on its way out, which would
/// have taken the new one with it.
#[test]
fn a_load_waits_for_the_eviction_of_the_same_model_seed_72() {
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
