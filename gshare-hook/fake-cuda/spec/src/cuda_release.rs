//! Releases of CUDA, and the driver shipped with each.

use std::fmt;
use std::str::FromStr;

/// Release as `1000 * major + 10 * minor`, and the Linux driver shipped with its toolkit; from the table "CUDA Toolkit and Corresponding
/// Driver Versions" of the toolkit's release notes.
const DRIVERS: [(u32, &str); 24] = [
    (11_000, "450.51.06"),
    (11_010, "455.32.00"),
    (11_020, "460.32.03"),
    (11_030, "465.19.01"),
    (11_040, "470.82.01"),
    (11_050, "495.29.05"),
    (11_060, "510.47.03"),
    (11_070, "515.65.01"),
    (11_080, "520.61.05"),
    (12_000, "525.85.12"),
    (12_010, "530.30.02"),
    (12_020, "535.104.05"),
    (12_030, "545.23.08"),
    (12_040, "550.54.15"),
    (12_050, "555.42.06"),
    (12_060, "560.35.05"),
    (12_070, "565.57.01"),
    (12_080, "570.124.06"),
    (12_090, "575.57.08"),
    (13_000, "580.159.04"),
    (13_010, "590.48.01"),
    (13_020, "595.58.03"),
    (13_030, "610.43.02"),
    (13_040, "615.71.09"),
];

/// A CUDA release with a known driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaRelease(u32);

impl CudaRelease {
    /// 13.2: the release for which current wheels of PyTorch are built.
    pub const DEFAULT: Self = Self(13_020);

    /// The number in the form of `cuDriverGetVersion`: 13020 for 13.2.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Version of the driver, such as `595.58.03`.
    pub fn driver(self) -> &'static str {
        DRIVERS.iter().find(|(release, _)| *release == self.0).map_or("", |(_, driver)| driver)
    }
}

impl Default for CudaRelease {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl fmt::Display for CudaRelease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// The text names no CUDA release with a known driver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("driver {0:?}: the CUDA releases known here are 11.0 to 11.8, 12.0 to 12.9 and 13.0 to 13.4")]
pub struct CudaReleaseError(
    /// The refused text.
    pub String,
);

impl FromStr for CudaRelease {
    type Err = CudaReleaseError;

    /// Reads `12.8` or `12080`.
    fn from_str(text: &str) -> Result<Self, CudaReleaseError> {
        let number = match text.split_once('.') {
            Some((major, minor)) => match (major.parse::<u32>(), minor.parse::<u32>()) {
                (Ok(major @ 0..100), Ok(minor @ 0..100)) => Some(major * 1000 + minor * 10),
                _ => None,
            },
            None => text.parse().ok(),
        };
        let known = number.filter(|number| DRIVERS.iter().any(|(release, _)| release == number));
        known.map(Self).ok_or_else(|| CudaReleaseError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_is_read_in_both_spellings_and_knows_its_driver() {
        for (text, number, driver) in
            [("12.2", 12_020, "535.104.05"), ("12080", 12_080, "570.124.06"), ("13.2", 13_020, "595.58.03")]
        {
            let release: CudaRelease = text.parse().unwrap();
            assert_eq!((release.number(), release.driver()), (number, driver));
            assert_eq!(release.to_string().parse(), Ok(release));
        }
        for bad in ["", "12", "12.8.1", "10.2", "13.9", "13.-1", "99990", "12.65536000", "a.b", "+13.2 "] {
            assert_eq!(bad.parse::<CudaRelease>(), Err(CudaReleaseError(bad.to_owned())));
        }
        assert_eq!(CudaRelease::DEFAULT.to_string(), "13.2");
    }

    #[test]
    fn newer_releases_have_newer_drivers_with_numeric_parts() {
        let parts = |driver: &str| driver.split('.').map(|n| n.parse().unwrap()).collect::<Vec<u32>>();
        for pair in DRIVERS.windows(2) {
            assert!(pair[0].0 < pair[1].0 && parts(pair[0].1) < parts(pair[1].1), "{pair:?}");
        }
    }
}
