//! One chaotic run of the request scheduler: GPUs lost and back, loads that fail, processes that die, nodes with late reports.

use gshare_core::{BasisPoints, Bytes, Duration, Engine, GpuId, TenantId, Timestamp};
use gshare_sched::request::{
    CachePolicy, GpuRecord, LocalityScheduler, Policy, RequestEvent, RequestScheduler, SchedulerConfig,
};
use gshare_sim::Rng;
use gshare_sim::request_cluster::{Fate, Outcome, chaos, simulate};
use std::collections::BTreeMap;

/// The longest patience of a caller.
pub(crate) const BOUND: Duration = Duration::from_secs(20);

/// A configuration for a seed: every policy, every cache, and options in every mixture.
pub(crate) fn config(seed: u64) -> SchedulerConfig {
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
    config.max_batch = u16::try_from(rng.between(1, 4)).unwrap_or(1);
    config.batch_marginal = BasisPoints::from_percent(50).expect("below 100");
    config.max_loads = u8::try_from(rng.between(1, 5)).unwrap_or(3);
    if rng.percent(30) {
        config.host_memory = Bytes::from_gib(rng.between(1, 16));
    }
    config
}

/// Runs a seed.
///
/// # Errors
/// The promise that was broken.
pub(crate) fn run(seed: u64) -> Result<Outcome, String> {
    let config = config(seed);
    let mut scheduler = LocalityScheduler::new(config).map_err(|error| error.to_string())?;
    let mut rng = Rng::new(seed ^ 0xcafe);
    if rng.percent(40) {
        for tenant in 0..2 {
            let memory = BasisPoints::from_percent(60).expect("below 100");
            let event = RequestEvent::TenantLimited { tenant: TenantId::new(tenant), memory };
            scheduler.handle(Timestamp::ZERO, event, &mut Vec::new()).map_err(|error| error.to_string())?;
        }
    }
    let mut work = chaos(seed);
    for arrival in &mut work.arrivals {
        let patience = arrival.at.saturating_add(BOUND);
        arrival.deadline = Some(arrival.deadline.map_or(patience, |deadline| deadline.min(patience)));
    }
    // Until when each GPU's last report counts, and the report if it has not been read yet.
    let mut reports: BTreeMap<GpuId, (Timestamp, Option<GpuRecord>)> = BTreeMap::new();
    let late = rng.below(60);
    let names: Vec<GpuId> = (0u32..).zip(&work.gpus).map(|(gpu, _)| GpuId::new(gpu)).collect();
    let mut watch = |now: Timestamp, scheduler: &dyn RequestScheduler, truth: &[(GpuId, GpuRecord)]| {
        // The scheduler catches up with reports of a second ago, or of earlier where reports are late.
        let mut events = Vec::new();
        for &gpu in names.iter().filter(|_| now >= Timestamp::from_millis(1_500)) {
            let Some(believed) = scheduler.gpu(gpu) else { continue };
            match reports.get_mut(&gpu).filter(|(until, _)| now < *until) {
                None => events.push(RequestEvent::GpuLost { gpu }),
                Some((_, unread)) => {
                    let Some(report) = unread.take() else { continue };
                    let missing = believed.models.into_iter().filter(|model| !report.models.contains(model));
                    events.extend(missing.map(|model| RequestEvent::Dropped { gpu, model }));
                }
            }
        }
        for (gpu, record) in truth {
            if !rng.percent(late) {
                let until = now.saturating_add(Duration::from_millis(4_500));
                reports.insert(*gpu, (until, Some(record.clone())));
            }
        }
        events
    };
    let outcome = simulate(&mut scheduler, &work, seed, Some(&mut watch))?;
    for (index, fate) in outcome.fates.iter().enumerate() {
        let waited = match *fate {
            Fate::Served { waited, .. } => waited,
            Fate::Rejected { after, .. } => after,
        };
        // No request is given to a GPU after the bound. A request given before it may fail there, and be tried again: an eviction, a load
        // and a run each time. Few processes die more than three times in a row.
        let attempt = Duration::from_secs(20);
        if waited > BOUND.saturating_add(attempt.saturating_mul(u64::from(config.max_loads) + 3)) {
            return Err(format!("request{index} waited for {waited}"));
        }
    }
    Ok(outcome)
}
