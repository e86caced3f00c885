//! A device: its regime, its memory and its MIG slices.

use crate::mig::{GpuModel, MigError, SliceAt};
use gshare_core::{Bytes, GpuKind, NodeId};

/// The way in which functions share a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum Regime {
    /// Instances hold shares of time and SMs side by side (FaST-GShare, Dilu).
    Fractional,
    /// Instances own MIG slices, or take turns on a slice (FluidFaaS).
    Sliced,
    /// One request at a time has the device, and models are cached in its memory (GPU-enabled FaaS).
    Whole,
}

gshare_core::display_as!(Regime { Fractional => "fractional", Sliced => "sliced", Whole => "whole" });

/// The MIG slices of a GPU for use by functions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawMigLayout", into = "RawMigLayout"))]
pub struct MigLayout {
    model: GpuModel,
    slices: Vec<SliceAt>,
}

impl MigLayout {
    /// Slices at their places on a GPU of a model.
    ///
    /// # Errors
    /// [`MigError`]: slices that overlap or are not in the model.
    pub fn new(model: GpuModel, slices: Vec<SliceAt>) -> Result<Self, MigError> {
        model.validate(&slices)?;
        Ok(Self { model, slices })
    }

    /// Slices by the names of their profiles, arranged as the driver can.
    ///
    /// # Errors
    /// [`MigError`]: an unknown model or profile, or slices that fit no arrangement.
    pub fn named(model: &str, names: &[&str]) -> Result<Self, MigError> {
        let model = GpuModel::find(model)?;
        let profiles = names.iter().map(|name| model.profile(name)).collect::<Result<Vec<_>, _>>()?;
        let Some(mut slices) = model.arrange(&profiles) else {
            return Err(MigError::NoArrangement { model: model.name.to_string(), names: names.join(",") });
        };
        slices.sort_unstable();
        Ok(Self { model, slices })
    }

    /// The table of profiles of the GPU's model.
    pub const fn model(&self) -> &GpuModel {
        &self.model
    }

    /// The slices, by place.
    pub fn slices(&self) -> &[SliceAt] {
        &self.slices
    }
}

#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawMigLayout {
    model: String,
    slices: Vec<String>,
}

#[cfg(feature = "serde")]
impl TryFrom<RawMigLayout> for MigLayout {
    type Error = MigError;
    fn try_from(raw: RawMigLayout) -> Result<Self, MigError> {
        let names: Vec<&str> = raw.slices.iter().map(String::as_str).collect();
        Self::named(&raw.model, &names)
    }
}

#[cfg(feature = "serde")]
impl From<MigLayout> for RawMigLayout {
    fn from(layout: MigLayout) -> Self {
        let name = |slice: &SliceAt| layout.model.get(slice.profile).map(|profile| profile.name.to_string());
        let slices = layout.slices.iter().filter_map(name).collect();
        Self { model: layout.model.name.to_string(), slices }
    }
}

/// A device for use by functions.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub struct DeviceSpec {
    /// The machine with the device; devices of one node share its host memory.
    pub node: NodeId,
    /// Devices of equal speed and memory have the same kind.
    pub kind: GpuKind,
    /// The device's memory in bytes; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "memory_bytes"))]
    pub memory: Bytes,
    /// The requested regime. By default a device with MIG slices is sliced, and any other device fractional.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub regime: Option<Regime>,
    /// The device's MIG slices, if it has any.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub mig: Option<Box<MigLayout>>,
}

gshare_core::with_fields!(DeviceSpec { with_kind(kind: GpuKind), with_regime(regime: Regime => Some) });

impl DeviceSpec {
    /// A GPU of kind 0 without MIG slices, shared as the platform chooses.
    pub const fn new(node: NodeId, memory: Bytes) -> Self {
        Self { node, kind: GpuKind::new(0), memory, regime: None, mig: None }
    }

    /// The same device with these MIG slices.
    #[must_use]
    pub fn with_mig(self, layout: MigLayout) -> Self {
        Self { mig: Some(Box::new(layout)), ..self }
    }

    /// The regime in which the device is used.
    pub fn effective_regime(&self) -> Regime {
        match (self.regime, &self.mig) {
            (_, Some(_)) => Regime::Sliced,
            (Some(Regime::Whole), None) => Regime::Whole,
            _ => Regime::Fractional,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_in_the_regime_that_its_slices_and_its_owner_say() {
        let gpu = DeviceSpec::new(NodeId::new(0), Bytes::from_gib(80));
        assert_eq!(gpu.effective_regime(), Regime::Fractional);
        assert_eq!(gpu.clone().with_regime(Regime::Whole).effective_regime(), Regime::Whole);
        let layout = MigLayout::named("A100-80", &["4g.40gb", "3g.40gb"]).unwrap();
        assert_eq!(layout.slices().len(), 2);
        assert_eq!(gpu.with_mig(layout).effective_regime(), Regime::Sliced);
        let error = MigLayout::named("A100-80", &["7g.80gb", "1g.10gb"]).unwrap_err().to_string();
        assert!(error.contains("1g.10gb") || error.contains("7g.80gb"), "{error}");
    }
}
