//! Whether a policy of whole devices keeps its promises. It runs under the platform's pool of whole devices, in a
//! [`world`](crate::world) of up to six GPUs of two kinds and twelve functions of two tenants, with its faults and its book.

use super::in_world::{repeated, text};
use super::story::Log;
use crate::arrivals::{ArrivalError, Arrivals};
use crate::rng::Rng;
use crate::story::Story;
use crate::world::{Fault, Function, Outcome, Plan};
use core::ops::Range;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{BasisPoints, Bytes, Duration, GpuKind, NodeId, Quota, SmShare, TenantId};
use gshare_sched::platform::{
    DeviceSpec, FunctionSpec, Platform, PlatformConfig, Regime, TenantLimits, WholeConfig, WholePolicy,
    WholePool, Work,
};

/// Runs the suite over the policies of `make`, which must be equal. Returns counts of all runs.
///
/// # Errors
/// The first broken claim.
pub fn whole_policy(make: &dyn Fn() -> Box<dyn WholePolicy>, seeds: Range<u64>) -> Result<Outcome, Story> {
    let mut sum = Outcome::default();
    for seed in seeds {
        let platform = |log: &Log| {
            let pool = WholePool::new(WholeConfig::default()).map_err(text)?.with_policy(make());
            let platform = Platform::new(config(), vec![pool.into()]).map_err(text)?;
            Ok(log.watch(Box::new(platform)))
        };
        sum.add(&repeated(seed, plan(seed).map_err(text), platform)?);
    }
    Ok(sum)
}

/// The longest wait of a request: long enough for a policy that loads a model for every request.
const PATIENCE: Duration = Duration::from_secs(600);

fn config() -> PlatformConfig {
    PlatformConfig::default().with_max_wait(PATIENCE)
}

fn plan(seed: u64) -> Result<Plan, Box<dyn core::error::Error>> {
    let mut rng = Rng::new(seed);
    // Without faults, the load is light and no caller gives up, so every request must be served.
    let calm = rng.percent(40);
    let memory = [Bytes::from_gib(rng.between(5, 12)), Bytes::from_gib(rng.between(5, 12))];
    let mut devices = Vec::new();
    for index in 0..rng.between(1, 6) {
        let second = rng.percent(30);
        let node = NodeId::new(u32::try_from(index / 2)?);
        let mut device = DeviceSpec::new(node, memory[usize::from(second)]).with_regime(Regime::Whole);
        device.kind = GpuKind::new(second.into());
        devices.push(device);
    }
    let mut functions = Vec::new();
    for index in 0..rng.between(1, 12) {
        let infer = Duration::from_millis(rng.between(20, 800));
        let rate = 0.5 / infer.as_secs_f64();
        let point = ProfilePoint::measured(SmShare::WHOLE, Quota::WHOLE, 1, rate, infer, infer)?;
        let work = Work::Inference { profile: Some(ProfileTable::sparse(vec![point])?) };
        let (disk, host) = (rng.between(500, 5_000), rng.between(50, 500));
        let most = u32::try_from(rng.between(1, devices.len() as u64))?;
        let mut spec = FunctionSpec::new(work, Bytes::from_mib(rng.between(200, 5_000)))
            .with_loads(Duration::from_millis(disk), Duration::from_millis(host))
            .with_instances(0, most);
        spec.tenant = TenantId::new(u32::try_from(rng.below(3))?);
        let mut function = Function::new(format!("f{index}"), spec)
            .with_arrivals(arrivals(if calm { 10 } else { 120 }, &mut rng)?);
        function.patience = (!calm && rng.percent(80)).then(|| Duration::from_millis(rng.between(1, 60_000)));
        functions.push(function);
    }
    let mut plan = Plan::new(devices, functions, Duration::from_secs(60));
    (plan.bounds, plan.settle) = (Some(config()), PATIENCE.saturating_mul(2));
    if calm {
        return Ok(plan);
    }
    if rng.percent(40) {
        for tenant in 0..2 {
            let mut limits = TenantLimits::default();
            limits.memory = BasisPoints::from_percent(60).unwrap_or_default();
            plan.tenants.push((TenantId::new(tenant), limits));
        }
    }
    for fault in Fault::ALL {
        let every = Duration::from_secs(rng.between(2, 40));
        if rng.percent(30) {
            plan.faults.every.insert(fault, every);
        }
    }
    Ok(plan)
}

fn arrivals(most: u64, rng: &mut Rng) -> Result<Arrivals, ArrivalError> {
    let per_minute = f64::from(u32::try_from(rng.between(1, most)).unwrap_or(1));
    if rng.percent(50) {
        Arrivals::poisson(per_minute / 60.0)
    } else {
        Arrivals::gamma(per_minute / 60.0, 3.0)
    }
}
