//! The platform of a scenario's policies.

use super::error::ScenarioError;
use super::{
    PackerName, PipelineName, QueueName, RequestName, RouterName, ScalerName, Scenario, VerticalName,
};
use crate::world::Function;
use gshare_core::{BasisPoints, GpuShare, Quota, QuotaRange, SmShare};
use gshare_sched::pipeline::{KeepAlive, KeeperConfig, RouterConfig};
use gshare_sched::place::DiluConfig;
use gshare_sched::platform::{PackerSettings, Platform, PlatformSettings, ScalerSettings, WholeConfig, Work};
use gshare_sched::scale::LazyHorizontalConfig;

impl Scenario {
    /// A platform with the policies of this scenario.
    ///
    /// # Errors
    /// The sentence of the engine that refused its settings.
    pub fn platform(&self) -> Result<Platform, String> {
        let own = self.own.make(&self.policies).map_err(|error| error.to_string())?;
        self.settings().build_with(own).map_err(|error| error.to_string())
    }

    /// The settings for the names of the policies; the default for a program's own policy.
    pub fn settings(&self) -> PlatformSettings {
        let mut settings = PlatformSettings::default();
        match self.policies.scaler {
            ScalerName::Heuristic | ScalerName::Own(_) => {}
            ScalerName::Lazy => {
                settings.fractional.scaler = ScalerSettings::Lazy(LazyHorizontalConfig::default());
            }
        }
        if let (Some(headroom), ScalerSettings::Heuristic(config)) =
            (self.policies.headroom, &mut settings.fractional.scaler)
        {
            config.headroom = headroom.0.basis_points();
        }
        if self.policies.packer == PackerName::Dilu {
            let config = DiluConfig::default().with_affinity(self.policies.affinity);
            settings.fractional.packer = PackerSettings::Dilu(config);
            if self.policies.vertical != VerticalName::Ours(false) {
                // Dilu gives an instance twice its request while others leave it (section 3.2).
                settings.fractional.pool = settings.fractional.pool.with_sm_limit_factor(2);
            }
        }
        match self.policies.router {
            RouterName::Ours | RouterName::Own(_) => {}
            RouterName::Paper => settings.sliced.router = RouterConfig::paper(),
        }
        if self.policies.keeper == PipelineName::Paper {
            settings.sliced.keeper = KeeperConfig::paper();
        }
        if let Some(keep) = &self.policies.keep_alive {
            let keep_alive = KeepAlive::Fixed { keep: keep.0 };
            (settings.fractional.pool.keep_alive, settings.sliced.keeper.keep_alive) =
                (keep_alive, keep_alive);
        }
        settings.whole = match &self.policies.request {
            RequestName::Lalb => WholeConfig::paper(0),
            RequestName::Lalbo3 => WholeConfig::paper(25),
            RequestName::Ours | RequestName::LoadBalance | RequestName::Own(_) => WholeConfig::default(),
        };
        if self.policies.queue == QueueName::Arrival {
            settings.platform.late_wait = None;
        }
        settings.fractional.pool.sm_partitions = self.policies.sm_partitions;
        if let Some(memory) = self.policies.host_memory {
            settings.fractional.pool.host_memory = memory.0;
            settings.whole.host_memory = memory.0;
        }
        settings
    }
}

/// Makes the requests of a function its limits.
///
/// # Errors
/// A training job without a request of time would get nothing.
pub(super) fn without_vertical(function: &mut Function) -> Result<(), ScenarioError> {
    // An instance has at least the quota of its point.
    function.spec.time_limit = Quota::new(1);
    if let Work::Training { share, .. } = &mut function.spec.work {
        let request = share.time().request();
        let refused = |error: gshare_core::SpecError| {
            let field = format!("function `{}`: share, without policies.vertical", function.name);
            ScenarioError::field(&field, &share.to_string(), &error.to_string())
        };
        let time = QuotaRange::new(request, request).map_err(refused)?;
        // Training is as fast as its part of a device: at its request it does less than at its limit.
        let area = |time: Quota, sm: SmShare| u64::from(time.get()) * u64::from(sm.get());
        let (least, most) = (area(request, share.sm()), area(share.time().limit(), share.sm_limit()));
        let speed = u64::from(function.speed.get()) * least / most.max(1);
        function.speed = u16::try_from(speed).ok().and_then(BasisPoints::new).unwrap_or(function.speed);
        *share = GpuShare::new(time, share.sm(), share.sm(), share.memory()).map_err(refused)?;
    }
    Ok(())
}
