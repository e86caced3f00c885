//! The share of an instance on its device, in one type.
//!
//! # Problem
//! The papers write a share in three ways: FaST-GShare as a quota of time (request and limit) on a partition of SMs, Dilu
//! as SMs (request and limit) for all of the time, and FluidFaaS as a slice. A limit in the packer's form limits nothing if the
//! vertical scaler does not know it. A [`GpuShare`] therefore holds all three forms, and each engine derives its own form from it.
//!
//! # Example
//! ```
//! use gshare_core::share::GpuShare;
//! use gshare_core::{QuotaRange, SmShare};
//! let percent = |n| SmShare::from_percent(n).unwrap();
//! // Dilu places SMs with a request and a limit, for all of the time.
//! let share = GpuShare::new(QuotaRange::WHOLE, percent(30), percent(60), None)?;
//! // Its vertical scaler counts tokens: the same request and limit, as parts of the whole GPU.
//! assert_eq!(share.tokens().to_string(), "30%:60%");
//! # Ok::<(), gshare_core::SpecError>(())
//! ```

use crate::resource::{QuotaRange, ResourceSpec, SpecError};
use crate::units::{Bytes, Quota, SmShare};
use core::fmt;

/// A share of one device: GPU time and SMs, each with a guarantee and a limit, and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawGpuShare", into = "RawGpuShare"))]
pub struct GpuShare {
    time: QuotaRange,
    sm: SmShare,
    sm_limit: SmShare,
    memory: Option<Bytes>,
}

impl GpuShare {
    /// All of a device: every SM, all of the time, any memory.
    pub const WHOLE: Self =
        Self { time: QuotaRange::WHOLE, sm: SmShare::WHOLE, sm_limit: SmShare::WHOLE, memory: None };

    /// The same time and memory with every SM, for a device without SM partitions.
    #[must_use]
    pub const fn on_all_sms(self) -> Self {
        Self { sm: SmShare::WHOLE, sm_limit: SmShare::WHOLE, ..self }
    }

    /// A checked share. A `memory` of `None` means no limit below the device's memory.
    ///
    /// # Errors
    /// [`SpecError::ZeroSm`], [`SpecError::SmLimitBelowRequest`], [`SpecError::ZeroMemory`].
    pub fn new(
        time: QuotaRange,
        sm: SmShare,
        sm_limit: SmShare,
        memory: Option<Bytes>,
    ) -> Result<Self, SpecError> {
        if sm.is_zero() {
            return Err(SpecError::ZeroSm);
        }
        if sm_limit < sm {
            return Err(SpecError::SmLimitBelowRequest { request: sm, limit: sm_limit });
        }
        if memory == Some(Bytes::ZERO) {
            return Err(SpecError::ZeroMemory);
        }
        Ok(Self { time, sm, sm_limit, memory })
    }

    /// The guaranteed and the greatest share of GPU time.
    pub const fn time(&self) -> QuotaRange {
        self.time
    }

    /// The guaranteed share of the SMs during kernels of the instance.
    pub const fn sm(&self) -> SmShare {
        self.sm
    }

    /// The largest share of the SMs for the instance's kernels.
    pub const fn sm_limit(&self) -> SmShare {
        self.sm_limit
    }

    /// The most GPU memory of the instance in bytes; `None` means no limit below the device's memory.
    pub const fn memory(&self) -> Option<Bytes> {
        self.memory
    }

    /// The guaranteed and the greatest part of the whole device: time x SMs, rounded up to a basis point. A vertical scaler counts
    /// these parts as tokens (Dilu, section 3.4.1).
    pub fn tokens(&self) -> QuotaRange {
        let part = |time: Quota, sm: SmShare| {
            let product = u32::from(time.get()) * u32::from(sm.get());
            u16::try_from(product.div_ceil(10_000)).ok().and_then(Quota::new).unwrap_or(Quota::WHOLE)
        };
        let request = part(self.time.request(), self.sm);
        let limit = part(self.time.limit(), self.sm_limit).max(request);
        // Neither the limit of a range nor an SM limit is 0, so the product is a valid range.
        QuotaRange::new(request, limit).unwrap_or(QuotaRange::BEST_EFFORT)
    }

    /// The spec for the node, without the SM limit, since a hook has no means to enforce it.
    ///
    /// # Errors
    /// None for a share from [`GpuShare::new`].
    pub fn spec(&self) -> Result<ResourceSpec, SpecError> {
        ResourceSpec::new(self.time, self.sm, self.memory)
    }
}

/// The SM partition of the spec becomes both the guarantee and the limit.
impl From<ResourceSpec> for GpuShare {
    fn from(spec: ResourceSpec) -> Self {
        Self { time: spec.quota(), sm: spec.sm(), sm_limit: spec.sm(), memory: spec.memory() }
    }
}

/// `30%:80% of time, 12%:24% of SMs, 2 GiB`.
impl fmt::Display for GpuShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of time, {}:{} of SMs", self.time, self.sm, self.sm_limit)?;
        match self.memory {
            Some(memory) => write!(f, ", {memory}"),
            None => Ok(()),
        }
    }
}

#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawGpuShare {
    time: QuotaRange,
    #[serde(rename = "sm_bp")]
    sm: SmShare,
    #[serde(rename = "sm_limit_bp", default, skip_serializing_if = "Option::is_none")]
    sm_limit: Option<SmShare>,
    #[serde(rename = "memory_bytes", default, skip_serializing_if = "Option::is_none")]
    memory: Option<Bytes>,
}

#[cfg(feature = "serde")]
impl TryFrom<RawGpuShare> for GpuShare {
    type Error = SpecError;
    fn try_from(raw: RawGpuShare) -> Result<Self, SpecError> {
        Self::new(raw.time, raw.sm, raw.sm_limit.unwrap_or(raw.sm), raw.memory)
    }
}

#[cfg(feature = "serde")]
impl From<GpuShare> for RawGpuShare {
    fn from(share: GpuShare) -> Self {
        let sm_limit = Some(share.sm_limit).filter(|limit| *limit != share.sm);
        Self { time: share.time, sm: share.sm, sm_limit, memory: share.memory }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(request: u16, limit: u16) -> QuotaRange {
        let of = |percent| Quota::from_percent(percent).unwrap();
        QuotaRange::new(of(request), of(limit)).unwrap()
    }

    fn sm(percent: u16) -> SmShare {
        SmShare::from_percent(percent).unwrap()
    }

    #[test]
    fn a_share_that_cannot_be_is_refused_with_field_and_bound() {
        let text = |sm_request, sm_limit, memory| {
            GpuShare::new(range(10, 20), sm_request, sm_limit, memory).unwrap_err().to_string()
        };
        assert!(text(SmShare::from_percent(0).unwrap(), sm(10), None).starts_with("SM partition is 0"));
        assert_eq!(
            text(sm(20), sm(10), None),
            "SM limit 10% is smaller than SM request 20%: need request <= limit"
        );
        assert!(text(sm(1), sm(1), Some(Bytes::ZERO)).contains("0 bytes"));
    }

    #[test]
    fn the_limit_that_was_placed_is_the_limit_in_tokens() {
        let share = GpuShare::new(range(50, 100), sm(30), sm(60), Some(Bytes(7))).unwrap();
        assert_eq!(share.tokens(), range(15, 60));
    }

    #[test]
    fn a_spec_makes_a_share_and_a_share_the_same_spec() {
        let spec = ResourceSpec::new(range(30, 80), sm(12), Some(Bytes::from_gib(1))).unwrap();
        assert_eq!(GpuShare::from(spec).spec(), Ok(spec));
        assert_eq!(GpuShare::from(spec).to_string(), "30%:80% of time, 12%:12% of SMs, 1 GiB");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn what_is_written_is_read() {
        let share = GpuShare::new(range(30, 80), sm(12), sm(24), Some(Bytes(5))).unwrap();
        let text = serde_json::to_string(&share).unwrap();
        assert!(text.contains(r#""sm_bp":1200,"sm_limit_bp":2400,"memory_bytes":5"#), "{text}");
        assert_eq!(serde_json::from_str::<GpuShare>(&text).unwrap(), share);
        assert!(serde_json::from_str::<GpuShare>(&text.replace("1200", "2500")).is_err());
    }
}
