//! The class of a client, with or without a latency to keep.

use crate::units::BasisPoints;
use core::fmt;

/// Whether a client has a latency to keep or takes the remaining time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
pub enum ServiceClass {
    /// The client has a latency to keep. Its neighbours give way when its KLC grows by more than `tolerance` over its shortest
    /// KLC so far. The paper calls this tolerance `eta_violation` and publishes 60 %, and 30 % for large language models.
    SloSensitive {
        /// Tolerated growth of the KLC; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "tolerance_basis_points"))]
        tolerance: BasisPoints,
    },
    /// The client takes the remaining time, but at least its floor: training and other batch work.
    BestEffort,
}

impl ServiceClass {
    /// SLO-sensitive with a tolerance of 30 %, the lower of the two published values.
    pub const SLO_SENSITIVE: Self = match BasisPoints::from_percent(30) {
        Some(tolerance) => Self::SloSensitive { tolerance },
        None => Self::BestEffort,
    };

    /// SLO-sensitive with a tolerance in whole per cent; `None` for 0 and above 100.
    pub const fn slo_sensitive(percent: u16) -> Option<Self> {
        match BasisPoints::from_percent(percent) {
            Some(tolerance) if !tolerance.is_zero() => Some(Self::SloSensitive { tolerance }),
            _ => None,
        }
    }

    /// Whether the client has a latency to keep.
    pub const fn is_slo_sensitive(self) -> bool {
        matches!(self, Self::SloSensitive { .. })
    }
}

/// `slo-sensitive:60` (the tolerance in per cent), `best-effort`.
impl fmt::Display for ServiceClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SloSensitive { tolerance } => write!(f, "slo-sensitive:{}", tolerance.get() / 100),
            Self::BestEffort => f.write_str("best-effort"),
        }
    }
}

/// In the form of `Display`; the tolerance may be left out.
impl core::str::FromStr for ServiceClass {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "`{text}` is neither best-effort nor slo-sensitive[:PERCENT] with a tolerance of 1 to 100"
            )
        };
        match text {
            "best-effort" => Ok(Self::BestEffort),
            "slo-sensitive" => Ok(Self::SLO_SENSITIVE),
            _ => {
                let percent = text.strip_prefix("slo-sensitive:").ok_or_else(bad)?;
                let percent = percent.strip_suffix('%').unwrap_or(percent);
                percent.parse().ok().and_then(Self::slo_sensitive).ok_or_else(bad)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_reads_as_it_is_written() {
        for text in ["slo-sensitive:60", "slo-sensitive:5", "best-effort"] {
            assert_eq!(text.parse::<ServiceClass>().unwrap().to_string(), text);
        }
        assert_eq!("slo-sensitive".parse(), Ok(ServiceClass::SLO_SENSITIVE));
        for bad in ["", "slo", "slo-sensitive:", "slo-sensitive:0", "slo-sensitive:101", "slo-sensitive:x"] {
            assert!(bad.parse::<ServiceClass>().unwrap_err().contains("1 to 100"), "{bad}");
        }
    }
}
