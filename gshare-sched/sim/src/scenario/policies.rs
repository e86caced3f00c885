//! The platform that a scenario's policies make.

use super::{PackerName, PipelineName, RequestName, ScalerName, Scenario};
use gshare_sched::pipeline::{KeeperConfig, RouterConfig};
use gshare_sched::place::DiluConfig;
use gshare_sched::platform::{PackerSettings, Platform, PlatformSettings, ScalerSettings};
use gshare_sched::request::{Policy, SchedulerConfig};
use gshare_sched::scale::{LazyHorizontalConfig, PeakHorizontalConfig};

impl Scenario {
    /// A platform with the policies of this scenario.
    ///
    /// # Errors
    /// A sentence of the engine that refused its settings.
    pub fn platform(&self) -> Result<Platform, String> {
        self.settings().build().map_err(|error| error.to_string())
    }

    /// The settings that the names of the policies stand for.
    pub fn settings(&self) -> PlatformSettings {
        let mut settings = PlatformSettings::default();
        match self.policies.scaler {
            ScalerName::Heuristic => {}
            ScalerName::Lazy => {
                settings.fractional.scaler = ScalerSettings::Lazy(LazyHorizontalConfig::default());
            }
            ScalerName::Peaks => {
                settings.fractional.scaler = ScalerSettings::Peaks(PeakHorizontalConfig::default());
            }
        }
        if self.policies.packer == PackerName::Dilu {
            settings.fractional.packer = PackerSettings::Dilu(DiluConfig::default());
            // Dilu gives an instance twice its request while others leave it (section 3.2).
            settings.fractional.pool = settings.fractional.pool.with_sm_limit_factor(2);
        }
        if self.policies.router == PipelineName::Paper {
            settings.sliced.router = RouterConfig::paper();
        }
        if self.policies.keeper == PipelineName::Paper {
            settings.sliced.keeper = KeeperConfig::paper();
        }
        settings.whole = match self.policies.request {
            RequestName::Lalb => SchedulerConfig::paper(Policy::Lalb),
            RequestName::Lalbo3 => SchedulerConfig::default(),
            RequestName::Ours => SchedulerConfig::evict_cost_aware(),
        };
        if let Some(memory) = self.policies.host_memory {
            settings.fractional.pool.host_memory = memory.0;
            settings.whole.host_memory = memory.0;
        }
        settings
    }
}
