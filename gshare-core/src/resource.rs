//! Resource specs: the guarantee of a client, and its limit.
//!
//! A spec has the four figures of a FaSTPod (FaST-GShare, Figure 4): an SM partition in per cent, a guaranteed and a maximal
//! share of GPU time, and GPU memory. The constructor of a [`ResourceSpec`] checks all of them.

use crate::units::{Bytes, ParseUnitError, Quota, SmShare};
use core::fmt;
use core::str::FromStr;

/// Why a resource spec was refused. The message names the field and its bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum SpecError {
    /// The guaranteed share of time is larger than the maximal share.
    #[error("quota request {request} is larger than quota limit {limit}: need request <= limit")]
    RequestAboveLimit { request: Quota, limit: Quota },
    /// The time limit is 0, so the client could never run.
    #[error("quota limit is 0: need more than 0 and at most 100%")]
    ZeroLimit,
    /// The SM share is 0, so the client could occupy no SM.
    #[error("SM partition is 0: need more than 0 and at most 100 per cent")]
    ZeroSm,
    /// The guaranteed share of the SMs is larger than the maximal share.
    #[error("SM limit {limit} is smaller than SM request {request}: need request <= limit")]
    SmLimitBelowRequest { request: SmShare, limit: SmShare },
    /// The memory is 0, so the client could allocate nothing.
    #[error("GPU memory is 0 bytes: need more, or leave it out for no limit")]
    ZeroMemory,
    /// The client is only observed, and yet has a limit.
    #[error(
        "an observed client has a limit of memory or of SMs: need none, or a client that is not observed"
    )]
    ObservedWithLimit,
    /// The guaranteed memory is larger than the most.
    #[error("guaranteed GPU memory {guaranteed} is larger than the most, {most}: need guaranteed <= most")]
    GuaranteedAboveMost { guaranteed: Bytes, most: Bytes },
    /// The spec asks for more memory than the device's total.
    #[error("GPU memory {asked} is larger than the device's {device}")]
    MemoryAboveDevice { asked: Bytes, device: Bytes },
    /// The text of a field is not the expected quantity.
    #[error("{field}: {cause}")]
    Field { field: &'static str, cause: ParseUnitError },
    /// A part of a memory range is not a size.
    #[error(transparent)]
    Memory(ParseUnitError),
    /// The key is not an annotation of FaSTPod.
    #[error("unknown annotation `{key}`: expected sm_partition, quota_limit, quota_request or gpu_mem")]
    UnknownAnnotation { key: String },
    /// An annotation is given twice.
    #[error("annotation `{field}` is given twice")]
    Twice { field: &'static str },
}

/// A guaranteed and a maximal share of GPU time in a window: `request <= limit`, `limit > 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawQuotaRange", into = "RawQuotaRange"))]
pub struct QuotaRange {
    request: Quota,
    limit: Quota,
}

impl QuotaRange {
    /// The whole time while no other client wants it, without a guarantee.
    pub const BEST_EFFORT: Self = Self { request: Quota::ZERO, limit: Quota::WHOLE };

    /// All of the time, with a full guarantee.
    pub const WHOLE: Self = Self { request: Quota::WHOLE, limit: Quota::WHOLE };

    /// A checked pair of request and limit.
    pub const fn new(request: Quota, limit: Quota) -> Result<Self, SpecError> {
        if limit.is_zero() {
            return Err(SpecError::ZeroLimit);
        }
        if request.get() > limit.get() {
            return Err(SpecError::RequestAboveLimit { request, limit });
        }
        Ok(Self { request, limit })
    }

    /// The guaranteed share.
    pub const fn request(self) -> Quota {
        self.request
    }

    /// The greatest share.
    pub const fn limit(self) -> Quota {
        self.limit
    }
}

#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawQuotaRange {
    request: Quota,
    limit: Quota,
}

#[cfg(feature = "serde")]
impl TryFrom<RawQuotaRange> for QuotaRange {
    type Error = SpecError;
    fn try_from(raw: RawQuotaRange) -> Result<Self, SpecError> {
        Self::new(raw.request, raw.limit)
    }
}

#[cfg(feature = "serde")]
impl From<QuotaRange> for RawQuotaRange {
    fn from(range: QuotaRange) -> Self {
        Self { request: range.request, limit: range.limit }
    }
}

/// `0.3:0.8` (request:limit), or one share for both.
impl FromStr for QuotaRange {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let (request, limit) = text.split_once(':').unwrap_or((text, text));
        let parse = |text: &str, field| text.parse().map_err(|cause| SpecError::Field { field, cause });
        Self::new(parse(request, "quota request")?, parse(limit, "quota limit")?)
    }
}

/// `30%:80%`.
impl fmt::Display for QuotaRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.request, self.limit)
    }
}

/// GPU memory of an instance: a limit (`6GiB`), or a guaranteed part and the most (`6GiB:14GiB`; `6GiB:` with the device as the most).
///
/// A range lets the instance in by its guaranteed part. It may use the rest as long as others leave room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryRange {
    guaranteed: Option<Bytes>,
    most: Option<Bytes>,
}

impl MemoryRange {
    /// No guaranteed part, and the device as the most: the programs that work have the memory.
    pub const IN_TURNS: Self = Self { guaranteed: Some(Bytes::ZERO), most: None };

    /// A limit without a guaranteed part.
    pub const fn limit(most: Bytes) -> Result<Self, SpecError> {
        if most.0 == 0 { Err(SpecError::ZeroMemory) } else { Ok(Self { guaranteed: None, most: Some(most) }) }
    }

    /// A guaranteed part and the most; `None` is all memory of the device.
    pub const fn new(guaranteed: Bytes, most: Option<Bytes>) -> Result<Self, SpecError> {
        match most {
            Some(Bytes(0)) => Err(SpecError::ZeroMemory),
            Some(most) if guaranteed.0 > most.0 => Err(SpecError::GuaranteedAboveMost { guaranteed, most }),
            _ => Ok(Self { guaranteed: Some(guaranteed), most }),
        }
    }

    /// The most; `None` is all memory of the device.
    pub const fn most(self) -> Option<Bytes> {
        self.most
    }
}

/// The exact numbers of bytes, as settings have them.
impl fmt::Display for MemoryRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(guaranteed) = self.guaranteed {
            write!(f, "{}:", guaranteed.0)?;
        }
        self.most.map_or(Ok(()), |most| write!(f, "{}", most.0))
    }
}

impl FromStr for MemoryRange {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let parse = |text: &str| text.parse().map_err(SpecError::Memory);
        match text.split_once(':') {
            None => Self::limit(parse(text)?),
            Some((guaranteed, "")) => Self::new(parse(guaranteed)?, None),
            Some((guaranteed, most)) => Self::new(parse(guaranteed)?, Some(parse(most)?)),
        }
    }
}

/// The request and the limit of a client on one GPU: time, SMs and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawResourceSpec", into = "RawResourceSpec"))]
pub struct ResourceSpec {
    quota: QuotaRange,
    sm: SmShare,
    memory: Option<Bytes>,
    guaranteed: Option<Bytes>,
    observed: bool,
}

impl ResourceSpec {
    /// All of a GPU while no other client wants it, without guarantees or limits.
    pub const UNLIMITED: Self = Self {
        quota: QuotaRange::BEST_EFFORT,
        sm: SmShare::WHOLE,
        memory: None,
        guaranteed: None,
        observed: false,
    };

    /// No limits and no turns: the client's launches never wait, and its use is measured all the same.
    pub const OBSERVED: Self = Self { observed: true, ..Self::UNLIMITED };

    /// A checked spec. A `memory` of `None` means no limit below the device's memory.
    pub const fn new(quota: QuotaRange, sm: SmShare, memory: Option<Bytes>) -> Result<Self, SpecError> {
        if sm.is_zero() {
            return Err(SpecError::ZeroSm);
        }
        if let Some(Bytes(0)) = memory {
            return Err(SpecError::ZeroMemory);
        }
        Ok(Self { quota, sm, memory, guaranteed: None, observed: false })
    }

    /// The same spec with other memory.
    #[must_use]
    pub const fn with_memory(self, MemoryRange { guaranteed, most }: MemoryRange) -> Self {
        Self { memory: most, guaranteed, ..self }
    }

    /// Share of GPU time.
    pub const fn quota(&self) -> QuotaRange {
        self.quota
    }

    /// Share of the SMs.
    pub const fn sm(&self) -> SmShare {
        self.sm
    }

    /// The limit of GPU memory; `None` means no limit below the device's memory.
    pub const fn memory(&self) -> Option<Bytes> {
        self.memory
    }

    /// The guaranteed part of the memory; `None` without a [`MemoryRange`].
    pub const fn guaranteed(&self) -> Option<Bytes> {
        self.guaranteed
    }

    /// The memory as it was asked for; `None` without a limit or a guaranteed part.
    pub fn memory_range(&self) -> Option<MemoryRange> {
        let (guaranteed, most) = (self.guaranteed, self.memory);
        (guaranteed.is_some() || most.is_some()).then_some(MemoryRange { guaranteed, most })
    }

    /// The spec as it holds on a device of this size: a range ends with the device.
    #[must_use]
    pub fn on_device(self, device: Bytes) -> Self {
        match self.guaranteed {
            Some(_) if device > Bytes::ZERO => {
                Self { memory: Some(self.memory.unwrap_or(device).min(device)), ..self }
            }
            _ => self,
        }
    }

    /// The same spec for a client that is only observed.
    ///
    /// # Errors
    /// The spec has a limit of memory or of SMs, which an observed client cannot have.
    pub const fn observed(self) -> Result<Self, SpecError> {
        if self.memory.is_some() || self.guaranteed.is_some() || self.sm.get() < SmShare::WHOLE.get() {
            return Err(SpecError::ObservedWithLimit);
        }
        Ok(Self { observed: true, ..self })
    }

    /// Whether the client is only observed ([`OBSERVED`](Self::OBSERVED)).
    pub const fn is_observed(&self) -> bool {
        self.observed
    }

    /// The same spec with another share of GPU time.
    #[must_use]
    pub const fn with_quota(self, quota: QuotaRange) -> Self {
        Self { quota, ..self }
    }

    /// Checks the guaranteed memory, or else the memory limit, against the memory of the device.
    pub fn check_fits(&self, device: Bytes) -> Result<(), SpecError> {
        match self.guaranteed.or(self.memory) {
            Some(asked) if asked > device => Err(SpecError::MemoryAboveDevice { asked, device }),
            _ => Ok(()),
        }
    }

    /// Reads FaSTPod annotations (FaST-GShare, Figure 4). The prefix before `/` and a leading `gpu_` do not matter, so
    /// `faasshare/sm_partition` and `fastgshare/gpu_sm_partition` are the same. A missing annotation means no
    /// limit; a limit alone guarantees nothing, and a request alone is also the limit.
    ///
    /// ```
    /// use gshare_core::{Bytes, ResourceSpec};
    /// let spec = ResourceSpec::from_annotations([
    ///     ("faasshare/sm_partition", "12"),
    ///     ("faasshare/quota_limit", "0.8"),
    ///     ("faasshare/quota_request", "0.3"),
    ///     ("faasshare/gpu_mem", "1073741824"),
    /// ])?;
    /// assert_eq!(spec.quota().to_string(), "30%:80%");
    /// assert_eq!(spec.memory(), Some(Bytes::from_gib(1)));
    /// # Ok::<(), gshare_core::SpecError>(())
    /// ```
    pub fn from_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Self, SpecError> {
        fn once<T>(slot: &mut Option<T>, field: &'static str, value: T) -> Result<(), SpecError> {
            if slot.replace(value).is_some() { Err(SpecError::Twice { field }) } else { Ok(()) }
        }
        fn set<T: FromStr<Err = ParseUnitError>>(
            slot: &mut Option<T>,
            field: &'static str,
            text: &str,
        ) -> Result<(), SpecError> {
            once(slot, field, text.parse().map_err(|cause| SpecError::Field { field, cause })?)
        }
        let (mut sm, mut request, mut limit) = (None, None, None);
        let mut memory: Option<MemoryRange> = None;
        for (key, value) in annotations {
            let name = key.rsplit_once('/').map_or(key, |(_, name)| name);
            match name.strip_prefix("gpu_").unwrap_or(name) {
                "sm_partition" => set(&mut sm, "sm_partition", value)?,
                "quota_request" => set(&mut request, "quota_request", value)?,
                "quota_limit" => set(&mut limit, "quota_limit", value)?,
                "mem" => once(&mut memory, "gpu_mem", in_field("gpu_mem", value.parse())?)?,
                _ => return Err(SpecError::UnknownAnnotation { key: key.to_owned() }),
            }
        }
        let quota =
            QuotaRange::new(request.unwrap_or(Quota::ZERO), limit.or(request).unwrap_or(Quota::WHOLE))?;
        let spec = Self::new(quota, sm.unwrap_or(SmShare::WHOLE), None)?;
        Ok(memory.map_or(spec, |memory| spec.with_memory(memory)))
    }
}

/// A range whose text belongs to this field.
fn in_field(field: &'static str, read: Result<MemoryRange, SpecError>) -> Result<MemoryRange, SpecError> {
    read.map_err(|error| match error {
        SpecError::Memory(cause) => SpecError::Field { field, cause },
        other => other,
    })
}

#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawResourceSpec {
    quota: QuotaRange,
    sm: SmShare,
    #[serde(default, rename = "memory_bytes", skip_serializing_if = "Option::is_none")]
    memory: Option<Bytes>,
    #[serde(default, rename = "guaranteed_bytes", skip_serializing_if = "Option::is_none")]
    guaranteed: Option<Bytes>,
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    observed: bool,
}

#[cfg(feature = "serde")]
impl TryFrom<RawResourceSpec> for ResourceSpec {
    type Error = SpecError;
    fn try_from(raw: RawResourceSpec) -> Result<Self, SpecError> {
        let mut spec = Self::new(raw.quota, raw.sm, raw.memory)?;
        if let Some(guaranteed) = raw.guaranteed {
            spec = spec.with_memory(MemoryRange::new(guaranteed, raw.memory)?);
        }
        if raw.observed { spec.observed() } else { Ok(spec) }
    }
}

#[cfg(feature = "serde")]
impl From<ResourceSpec> for RawResourceSpec {
    fn from(spec: ResourceSpec) -> Self {
        let ResourceSpec { quota, sm, memory, guaranteed, observed } = spec;
        Self { quota, sm, memory, guaranteed, observed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_field_and_bound() {
        let text = |result: Result<ResourceSpec, SpecError>| result.unwrap_err().to_string();
        assert_eq!(
            text(ResourceSpec::from_annotations([("x/quota_request", "0.8"), ("x/quota_limit", "0.3")])),
            "quota request 80% is larger than quota limit 30%: need request <= limit"
        );
        assert!(
            text(ResourceSpec::from_annotations([("sm_partition", "0")])).starts_with("SM partition is 0")
        );
        assert!(text(ResourceSpec::from_annotations([("sm_partition", "101")])).contains("at most 100"));
        assert!(text(ResourceSpec::from_annotations([("gpu_mem", "-1")])).starts_with("gpu_mem"));
        assert!(
            text(ResourceSpec::from_annotations([("colour", "red")])).contains("unknown annotation `colour`")
        );
        assert!(
            text(ResourceSpec::from_annotations([("a/gpu_mem", "1"), ("b/gpu_mem", "1")])).contains("twice")
        );
        let big = ResourceSpec::from_annotations([("gpu_mem", "2GiB")]).unwrap();
        assert!(big.check_fits(Bytes::from_gib(1)).is_err());
    }

    #[test]
    fn memory_is_a_limit_or_a_range() {
        let read = |text: &str| {
            let range: MemoryRange = text.parse()?;
            assert_eq!(range.to_string().parse(), Ok(range));
            Ok(ResourceSpec::UNLIMITED.with_memory(range))
        };
        let figures = |text| read(text).map(|spec: ResourceSpec| (spec.guaranteed(), spec.memory()));
        let gib = Bytes::from_gib;
        assert_eq!(figures("6GiB"), Ok((None, Some(gib(6)))));
        assert_eq!(figures("6GiB:14GiB"), Ok((Some(gib(6)), Some(gib(14)))));
        assert_eq!(figures("0:"), Ok((Some(Bytes::ZERO), None)));
        let refused = |text| figures(text).map_err(|error: SpecError| error.to_string()).unwrap_err();
        assert_eq!(
            refused("7GiB:6GiB"),
            "guaranteed GPU memory 7 GiB is larger than the most, 6 GiB: need guaranteed <= most"
        );
        assert_eq!(
            (refused("0"), refused("0:0")),
            (SpecError::ZeroMemory.to_string(), SpecError::ZeroMemory.to_string())
        );
        assert!(refused(":6GiB").contains("is not a"), "{}", refused(":6GiB"));
        // The device bounds the most, and must have room for the guaranteed part.
        let spec = read("6GiB:14GiB").unwrap();
        assert_eq!((spec.on_device(gib(10)).memory(), spec.check_fits(gib(10))), (Some(gib(10)), Ok(())));
        assert!(spec.check_fits(gib(5)).is_err());
        assert_eq!(read("0:").unwrap().on_device(gib(10)).memory(), Some(gib(10)));
        assert_eq!(read("6GiB").unwrap().on_device(gib(10)).memory(), Some(gib(6)));
        assert!(read("0:").unwrap().observed().is_err());
    }

    #[test]
    fn a_range_reads_one_share_or_two() {
        assert_eq!("0.3:0.8".parse::<QuotaRange>().unwrap().to_string(), "30%:80%");
        assert_eq!("0.3".parse::<QuotaRange>().unwrap().to_string(), "30%:30%");
        assert!("0.8:0.3".parse::<QuotaRange>().is_err());
        assert!("0:0".parse::<QuotaRange>().is_err());
    }

    #[test]
    fn a_request_alone_is_its_own_limit_and_a_limit_alone_guarantees_nothing() {
        let of = |key| ResourceSpec::from_annotations([(key, "0.5")]).unwrap().quota().to_string();
        assert_eq!(of("quota_request"), "50%:50%");
        assert_eq!(of("quota_limit"), "0%:50%");
    }
}
