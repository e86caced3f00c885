//! A platform by settings alone: policies by name, for commands, scenarios and hosts with a configuration file.

use super::{
    FractionalConfig, FractionalPolicies, FractionalPool, Platform, PlatformConfig, PlatformError,
    SlicedConfig, SlicedPool, WholeConfig, WholePolicy, WholePool,
};
use crate::pack::{MaxRects, MaxRectsConfig, Packer};
use crate::pipeline::{Place, Route};
use crate::place::{DiluConfig, DiluPacker};
use crate::scale::{
    HeuristicHorizontal, HeuristicHorizontalConfig, HorizontalScaler, LazyHorizontal, LazyHorizontalConfig,
};
use std::sync::Arc;

/// The policy that starts and stops instances on fractional devices.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum ScalerSettings {
    /// By profile (FaST-GShare, Algorithm 1).
    Heuristic(HeuristicHorizontalConfig),
    /// Once load has stayed (Dilu, section 3.4.2).
    Lazy(LazyHorizontalConfig),
}

impl Default for ScalerSettings {
    fn default() -> Self {
        Self::Heuristic(HeuristicHorizontalConfig::default())
    }
}

/// The policy that places instances on fractional devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum PackerSettings {
    /// Rectangles of time and SMs (FaST-GShare, section 3.4.2).
    MaxRects(MaxRectsConfig),
    /// Sums of requests, limits and memory (Dilu, section 3.3).
    Dilu(DiluConfig),
}

impl Default for PackerSettings {
    fn default() -> Self {
        Self::MaxRects(MaxRectsConfig::default())
    }
}

/// Settings of the fractional pool with its policies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct FractionalSettings {
    /// Settings of the pool itself.
    pub pool: FractionalConfig,
    /// The policy that starts and stops instances.
    pub scaler: ScalerSettings,
    /// The policy that places instances.
    pub packer: PackerSettings,
}

/// The host's own policies in place of the policies named by settings.
#[derive(Default)]
pub struct OwnPolicies {
    /// Starts and stops instances on fractional devices, instead of [`FractionalSettings::scaler`].
    pub scaler: Option<Box<dyn HorizontalScaler>>,
    /// Places instances on fractional devices, instead of [`FractionalSettings::packer`].
    pub packer: Option<Box<dyn Packer>>,
    /// Chooses the next request for an instance on MIG slices, instead of [`SlicedConfig::router`].
    pub router: Option<Box<dyn Route>>,
    /// Cuts functions and chooses their MIG slices, instead of the partitioner by bottleneck.
    pub place: Option<Arc<dyn Place>>,
    /// Gives requests to whole devices, instead of the policy by [`PlatformSettings::whole`].
    pub requests: Option<Box<dyn WholePolicy>>,
}

impl core::fmt::Debug for OwnPolicies {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("OwnPolicies")
            .field("scaler", &self.scaler.is_some())
            .field("packer", &self.packer.is_some())
            .field("router", &self.router.is_some())
            .field("place", &self.place.is_some())
            .field("requests", &self.requests.is_some())
            .finish()
    }
}

impl FractionalSettings {
    fn build(&self, own: OwnPolicies) -> Result<FractionalPool, PlatformError> {
        let scaler: Box<dyn HorizontalScaler> = match (own.scaler, &self.scaler) {
            (Some(own), _) => own,
            (None, ScalerSettings::Heuristic(config)) => Box::new(HeuristicHorizontal::new(config.clone())?),
            (None, ScalerSettings::Lazy(config)) => Box::new(LazyHorizontal::new(config.clone())?),
        };
        let packer: Box<dyn Packer> = match (own.packer, self.packer) {
            (Some(own), _) => own,
            (None, PackerSettings::MaxRects(config)) => Box::new(MaxRects::new(config)),
            (None, PackerSettings::Dilu(config)) => Box::new(
                DiluPacker::new(config).map_err(|error| PlatformError::Policy { why: error.to_string() })?,
            ),
        };
        Ok(FractionalPool::new(self.pool.clone(), FractionalPolicies { scaler, packer })?)
    }
}

/// Settings of a platform with one pool of each regime.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default, deny_unknown_fields))]
pub struct PlatformSettings {
    /// Settings of the platform itself.
    pub platform: PlatformConfig,
    /// Settings for devices with shared time and SMs.
    pub fractional: FractionalSettings,
    /// Settings for devices with MIG slices.
    pub sliced: SlicedConfig,
    /// Settings for devices that serve one request at a time.
    pub whole: WholeConfig,
}

impl PlatformSettings {
    /// The platform with these settings, without devices and functions.
    ///
    /// # Errors
    /// [`PlatformError`] names the field and its bound.
    pub fn build(&self) -> Result<Platform, PlatformError> {
        self.build_with(OwnPolicies::default())
    }

    /// The same platform with the host's own policies.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_with(&self, mut own: OwnPolicies) -> Result<Platform, PlatformError> {
        let mut sliced = SlicedPool::with_config(self.sliced.clone())
            .map_err(|error| PlatformError::Policy { why: error.to_string() })?;
        if let Some(router) = own.router.take() {
            sliced = sliced.with_router(router);
        }
        if let Some(place) = own.place.take() {
            sliced = sliced.with_place(place);
        }
        let mut whole = WholePool::new(self.whole)?;
        if let Some(policy) = own.requests.take() {
            whole = whole.with_policy(policy);
        }
        let pools = vec![self.fractional.build(own)?.into(), sliced.into(), whole.into()];
        Platform::new(self.platform.clone(), pools)
    }
}
