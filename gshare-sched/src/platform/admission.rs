//! Refusal of events before any change, if they are impossible in every regime or in the named regime. A pool refuses only
//! events that its own policies cannot serve.

use super::functions::FunctionState;
use super::{
    Bytes, DeviceSpec, FunctionId, FunctionSpec, GpuId, Platform, PlatformError, PlatformEvent, PoolError,
    Regime, TimeWentBack, Timestamp, Work,
};
use crate::pack::Demand;

/// Numbers of requests are below this; a pool gives its own requests, which no caller has, larger ones.
pub(super) const MOST_REQUESTS: u64 = 1 << 63;

/// The most devices of an instance.
const MOST_DEVICES: u32 = 64;

impl Platform {
    /// Refuses impossible events before any change.
    pub(super) fn check(&self, now: Timestamp, event: &PlatformEvent) -> Result<(), PlatformError> {
        TimeWentBack::check(now, self.cluster.now)?;
        match event {
            PlatformEvent::DeviceFound { gpu, spec } => {
                if self.cluster.devices.get(*gpu).is_some() {
                    return Err(PlatformError::DeviceExists { gpu: *gpu });
                }
                let regime = spec.effective_regime();
                self.pool_of(regime).ok_or(PlatformError::NoPool { regime })?;
                Ok(check_device(*gpu, spec)?)
            }
            PlatformEvent::DeviceLost { gpu } if self.cluster.devices.get(*gpu).is_none() => {
                Err(PlatformError::UnknownDevice { gpu: *gpu })
            }
            PlatformEvent::TenantLimited { tenant, limits } => {
                for (field, limit) in
                    [("max_requests", limits.max_requests), ("max_processes", limits.max_processes)]
                {
                    if limit == 0 {
                        return Err(PlatformError::ZeroLimit { tenant: *tenant, field });
                    }
                }
                Ok(())
            }
            PlatformEvent::FunctionDeployed { function, spec } => self.check_deployed(*function, spec),
            PlatformEvent::ProfileLearned { function, .. } => match self.known(*function)?.state {
                FunctionState::Profiling => Ok(()),
                _ => Err(PlatformError::NotProfiling { function: *function }),
            },
            PlatformEvent::BoundsChanged { function, min_instances, max_instances } => {
                self.known(*function)?;
                Self::check_bounds(*function, *min_instances, *max_instances)
            }
            PlatformEvent::NodesChanged { function, .. } | PlatformEvent::FunctionRemoved { function } => {
                self.known(*function).map(|_| ())
            }
            PlatformEvent::RequestArrived { request, function, .. } => {
                let next = self.cluster.next_request;
                if request.number() < next || request.number() >= MOST_REQUESTS {
                    return Err(PlatformError::RequestNumber { request: *request, next });
                }
                if self.known(*function)?.trains() {
                    return Err(PlatformError::NoRequests { function: *function });
                }
                Ok(())
            }
            PlatformEvent::RequestDone { request, .. } => {
                let of = self
                    .cluster
                    .requests
                    .get(request)
                    .ok_or(PlatformError::UnknownRequest { request: *request })?;
                match of.runs_on().is_some_and(|instance| self.cluster.instances.get(instance).is_some()) {
                    true => Ok(()),
                    false => Err(PlatformError::NotRunning { request: *request }),
                }
            }
            PlatformEvent::RequestCancelled { request } if !self.cluster.requests.contains_key(request) => {
                Err(PlatformError::UnknownRequest { request: *request })
            }
            PlatformEvent::Instance { instance, .. } if !self.cluster.instances.was_named(*instance) => {
                Err(PlatformError::UnknownInstance { instance: *instance })
            }
            _ => Ok(()),
        }
    }

    pub(super) const fn check_bounds(
        function: FunctionId,
        min_instances: u32,
        max_instances: u32,
    ) -> Result<(), PlatformError> {
        if max_instances == 0 || max_instances < min_instances {
            return Err(PlatformError::BadBounds { function, min_instances, max_instances });
        }
        Ok(())
    }

    pub(super) fn check_deployed(
        &self,
        function: FunctionId,
        spec: &FunctionSpec,
    ) -> Result<(), PlatformError> {
        if self.cluster.functions.contains_key(&function) {
            return Err(PlatformError::FunctionExists { function });
        }
        Self::check_bounds(function, spec.min_instances, spec.max_instances)?;
        self.pool_for(spec).map(|_| ())
    }
}

/// Refuses a device that no regime can share out.
fn check_device(gpu: GpuId, spec: &DeviceSpec) -> Result<(), PoolError> {
    let bad = |why| Err(spec.effective_regime().bad_device(gpu, why));
    match &spec.mig {
        Some(layout) if layout.slices().is_empty() => bad("mig has no slices: need one at least"),
        _ if spec.memory == Bytes::ZERO => bad("memory is 0: need more than 0"),
        _ => Ok(()),
    }
}

/// Refuses a function that its regime cannot serve.
pub(super) fn check_function(
    function: FunctionId,
    regime: Regime,
    spec: &FunctionSpec,
) -> Result<(), PoolError> {
    let unsuitable = |why: &str| Err(regime.unsuitable(function, why));
    if spec.memory == Bytes::ZERO {
        return unsuitable("memory is 0: need more than 0");
    }
    let spread = regime == Regime::Fractional && matches!(spec.work, Work::Inference { .. });
    let most = if spread { MOST_DEVICES } else { 1 };
    if !(1..=most).contains(&spec.devices) {
        let need = if spread { format!("1 to {most}") } else { "1".to_owned() };
        return unsuitable(&format!("devices is {}, need {need}", spec.devices));
    }
    if spec.nodes.is_some() && regime != Regime::Fractional {
        return unsuitable("nodes are given: need none, or fractional devices");
    }
    if spec.weights.is_some() && spec.devices > 1 {
        return unsuitable("weights are shared on one device, and devices is more: need 1");
    }
    match (regime, &spec.work) {
        (Regime::Fractional, Work::Training { workers, share }) => {
            if !(1..=MOST_DEVICES).contains(workers) {
                return unsuitable(&format!("workers is {workers}, need 1 to {MOST_DEVICES}"));
            }
            if spec.weights.is_some() && *workers > 1 {
                return unsuitable("weights are shared on one device, and workers is more: need 1");
            }
            Demand::from(share).validate().map_err(|error| regime.unsuitable(function, error))
        }
        (Regime::Sliced, Work::Pipeline { .. }) | (_, Work::Inference { profile: Some(_) }) => Ok(()),
        (_, Work::Training { .. }) => unsuitable("work is training: need fractional devices"),
        (_, Work::Pipeline { .. }) => unsuitable("work is a pipeline: need devices with MIG slices"),
        (_, Work::Inference { profile: None }) => unsuitable("it has no profile"),
    }
}
