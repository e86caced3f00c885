//! Units: shares in basis points, memory in bytes, time in integer nanoseconds.
//!
//! # Problem
//! A ledger in floating point drifts: `0.1 + 0.2` is not `0.3`, a GPU is never quite empty again after its last tenant,
//! and two machines disagree about the order of two clients. All decisions therefore rest on integers. Each integer carries its
//! unit in its type, and a program parses it once, at its edge.
//!
//! | type | unit | bound |
//! |---|---|---|
//! | [`BasisPoints`] | 1/10 000 of a whole | 0 ..= 10 000 |
//! | [`Quota`] | share of GPU **time** in a window | a [`BasisPoints`] |
//! | [`SmShare`] | share of a GPU's SMs (**space**) | a [`BasisPoints`] |
//! | [`Bytes`] | bytes of memory | `u64` |
//! | [`Timestamp`] | nanoseconds since an epoch of the host's choice | `u64`, about 584 years |
//! | [`Duration`] | nanoseconds | `u64` |
//!
//! # Text forms
//! A share is written as a fraction (`"0.3"`), a percentage (`"30%"`) or, for SMs, a bare percentage (`"24"`, as in
//! `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` and FaSTPod's `sm_partition`). A fraction has at most four decimals, since the parser
//! refuses a value between two basis points and never rounds.

use core::fmt;
use core::ops::{Add, AddAssign, SubAssign};
use core::str::FromStr;

/// Why a text is not the expected quantity. The message names the text, the quantity and its bounds.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ParseUnitError {
    /// The text is not a number of the expected form.
    #[error("`{text}` is not a {expected}")]
    Malformed { text: String, expected: &'static str },
    /// The number is outside the bounds of the unit.
    #[error("`{text}` is out of range: {bounds}")]
    OutOfRange { text: String, bounds: &'static str },
}

fn malformed(text: &str, expected: &'static str) -> ParseUnitError {
    ParseUnitError::Malformed { text: text.to_owned(), expected }
}

fn out_of_range(text: &str, bounds: &'static str) -> ParseUnitError {
    ParseUnitError::OutOfRange { text: text.to_owned(), bounds }
}

/// Parses a non-negative decimal into `units` per whole, exactly. `None` for a malformed, too large or inexact text.
fn parse_decimal(text: &str, units: u64) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if !digits(whole) || !digits(fraction) || (whole.is_empty() && fraction.is_empty()) {
        return None;
    }
    let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().ok()? };
    let mut value = whole.checked_mul(units)?;
    let mut scale = units;
    for digit in fraction.bytes() {
        let digit = u64::from(digit - b'0');
        if !scale.is_multiple_of(10) {
            if digit == 0 {
                continue;
            }
            return None;
        }
        scale /= 10;
        value = value.checked_add(digit.checked_mul(scale)?)?;
    }
    Some(value)
}

/// A share of a whole in 1/10 000, from 0 to 10 000 inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(extend("maximum" = 10_000)))]
#[cfg_attr(feature = "serde", serde(try_from = "u16", into = "u16"))]
pub struct BasisPoints(u16);

impl BasisPoints {
    /// No part at all.
    pub const ZERO: Self = Self(0);
    /// The whole: 10 000 basis points.
    pub const WHOLE: Self = Self(10_000);

    /// `points` basis points, or `None` above 10 000.
    pub const fn new(points: u16) -> Option<Self> {
        if points <= Self::WHOLE.0 { Some(Self(points)) } else { None }
    }

    /// `percent` per cent, or `None` above 100.
    pub const fn from_percent(percent: u16) -> Option<Self> {
        if percent <= 100 { Some(Self(percent * 100)) } else { None }
    }

    /// The number of basis points.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Whether the share is zero.
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// The sum, at most the whole.
    #[must_use]
    pub fn saturating_add(self, other: Self) -> Self {
        Self((self.0 + other.0).min(Self::WHOLE.0))
    }

    /// `percent` per cent, or the whole above 100.
    pub const fn percent(percent: u16) -> Self {
        match Self::from_percent(percent) {
            Some(points) => points,
            None => Self::WHOLE,
        }
    }

    /// The difference, at least zero.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// This share of `duration`, rounded down to a nanosecond.
    pub const fn of(self, duration: Duration) -> Duration {
        // u64 x 10_000 fits in u128, and the quotient is at most `duration`.
        #[expect(clippy::cast_possible_truncation, reason = "the quotient is at most the u64 it came from")]
        Duration::from_nanos((duration.0 as u128 * self.0 as u128 / 10_000) as u64)
    }

    /// The share as a fraction, for reports only.
    pub fn as_fraction(self) -> f64 {
        f64::from(self.0) / 10_000.0
    }

    fn parse_fraction(text: &str) -> Option<u64> {
        match text.strip_suffix('%') {
            Some(percent) => parse_decimal(percent.trim_end(), 100),
            None => parse_decimal(text, 10_000),
        }
    }
}

impl TryFrom<u16> for BasisPoints {
    type Error = ParseUnitError;
    fn try_from(points: u16) -> Result<Self, ParseUnitError> {
        Self::new(points).ok_or_else(|| out_of_range(&points.to_string(), "0 to 10000 basis points"))
    }
}

impl From<BasisPoints> for u16 {
    fn from(points: BasisPoints) -> u16 {
        points.0
    }
}

/// Per cent, without trailing zeros: `30%`, `12.5%`.
impl fmt::Display for BasisPoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, part) = (self.0 / 100, self.0 % 100);
        match (part, part % 10) {
            (0, _) => write!(f, "{whole}%"),
            (_, 0) => write!(f, "{whole}.{}%", part / 10),
            _ => write!(f, "{whole}.{part:02}%"),
        }
    }
}

macro_rules! share {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $name(BasisPoints);

        impl $name {
            /// No part at all.
            pub const ZERO: Self = Self(BasisPoints::ZERO);
            /// The whole.
            pub const WHOLE: Self = Self(BasisPoints::WHOLE);

            /// `points` basis points, or `None` above 10 000.
            pub const fn new(points: u16) -> Option<Self> {
                match BasisPoints::new(points) {
                    Some(points) => Some(Self(points)),
                    None => None,
                }
            }

            /// `percent` per cent, or `None` above 100.
            pub const fn from_percent(percent: u16) -> Option<Self> {
                match BasisPoints::from_percent(percent) {
                    Some(points) => Some(Self(points)),
                    None => None,
                }
            }

            /// The number of basis points, 0 to 10 000.
            pub const fn get(self) -> u16 {
                self.0.get()
            }

            /// The share without its role.
            pub const fn basis_points(self) -> BasisPoints {
                self.0
            }

            /// Whether the share is zero.
            pub const fn is_zero(self) -> bool {
                self.0.is_zero()
            }

            /// The share as a fraction, for reports only.
            pub fn as_fraction(self) -> f64 {
                self.0.as_fraction()
            }
        }

        impl From<BasisPoints> for $name {
            fn from(points: BasisPoints) -> Self {
                Self(points)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

share! {
    /// A share of GPU time in a window (FaST-GShare, section 3.3.2: `quota_request`, `quota_limit`).
    Quota
}

share! {
    /// A share of a GPU's SMs (FaST-GShare, section 3.3.1: `sm_partition`; the MPS active thread percentage).
    SmShare
}

impl Quota {
    /// This share of a window, rounded down to a nanosecond.
    pub const fn of(self, window: Duration) -> Duration {
        self.0.of(window)
    }
}

/// `"0.3"` or `"30%"`.
impl FromStr for Quota {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let points = BasisPoints::parse_fraction(text.trim())
            .ok_or_else(|| malformed(text, "share of time such as `0.3` or `30%` (at most 4 decimals)"))?;
        let points = u16::try_from(points).ok().and_then(Self::new);
        points.ok_or_else(|| {
            out_of_range(text, "a share of time is at most 1.0; per cent need their sign, such as `50%`")
        })
    }
}

/// `"24"` or `"24%"`: per cent, as in MPS and FaSTPod. A number below 1 needs its `%`, since `"0.5"` could also mean half of the
/// SMs, like half of the time in a [`Quota`].
impl FromStr for SmShare {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let trimmed = text.trim();
        let percent = trimmed.strip_suffix('%');
        let expected = "per cent of the SMs such as `24` or `12.5%` (at most 2 decimals)";
        let fraction = BasisPoints::parse_fraction(trimmed).filter(|_| percent.is_none());
        if matches!(fraction, Some(1..10_000)) {
            let bound = "SMs are in per cent: need such as `50` for half of them, or a `%` for less than one per cent";
            return Err(out_of_range(text, bound));
        }
        let percent = percent.unwrap_or(trimmed).trim_end();
        let points = parse_decimal(percent, 100).ok_or_else(|| malformed(text, expected))?;
        let points = u16::try_from(points).ok().and_then(Self::new);
        points.ok_or_else(|| out_of_range(text, "a share of the SMs is at most 100 per cent"))
    }
}

/// A quantity in one `u64`, with the arithmetic common to all quantities.
macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident($inner:vis u64)) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        pub struct $name($inner u64);

        impl $name {
            /// A quantity of zero.
            pub const ZERO: Self = Self(0);

            /// Whether the quantity is zero.
            pub const fn is_zero(self) -> bool {
                self.0 == 0
            }

            /// The sum; saturates.
            #[must_use]
            pub const fn saturating_add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }

            /// The difference, at least zero.
            #[must_use]
            pub const fn saturating_sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }

            /// `n` times as much; saturates.
            #[must_use]
            pub const fn saturating_mul(self, n: u64) -> Self {
                Self(self.0.saturating_mul(n))
            }
        }

        impl core::ops::Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0 + other.0)
            }
        }

        impl core::ops::Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self {
                Self(self.0 - other.0)
            }
        }

        impl core::iter::Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                // Peers state some of the summed figures.
                iter.fold(Self::ZERO, |sum, next| Self(sum.0.saturating_add(next.0)))
            }
        }
    };
}

pub(crate) use quantity;

quantity! {
    /// A number of bytes.
    Bytes(pub u64)
}

/// Upper-case suffixes are decimal, as in Kubernetes; lower-case suffixes are binary, as in Docker.
const BYTE_SUFFIXES: [(&str, u64); 24] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("kb", 1 << 10),
    ("mb", 1 << 20),
    ("gb", 1 << 30),
    ("tb", 1 << 40),
    ("k", 1 << 10),
    ("m", 1 << 20),
    ("g", 1 << 30),
    ("t", 1 << 40),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

impl Bytes {
    /// `n` MiB; saturates.
    pub const fn from_mib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 20))
    }

    /// `n` GiB; saturates.
    pub const fn from_gib(n: u64) -> Self {
        Self(n.saturating_mul(1 << 30))
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The sum, or `None` past `u64`.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, or `None` below zero.
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }
}

/// `"1073741824"`, `"1GiB"`, `"256 MiB"`, `"1.5GB"`; in the form of Kubernetes `"4Gi"` (2^30) and `"4G"` (10^9); in the form of
/// Docker `"4g"` and `"4gb"` (2^30).
impl FromStr for Bytes {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let trimmed = text.trim();
        let (number, unit) = BYTE_SUFFIXES
            .iter()
            .find_map(|(suffix, unit)| trimmed.strip_suffix(suffix).map(|number| (number, *unit)))
            .unwrap_or((trimmed.strip_suffix('B').unwrap_or(trimmed), 1));
        let number = number.trim_end();
        let expected = "number of bytes such as `1073741824`, `256MiB` or `1.5GB`";
        let digits = number.bytes().all(|b| b.is_ascii_digit() || b == b'.') && !number.is_empty();
        if !digits || number.matches('.').count() > 1 || number == "." {
            return Err(malformed(text, expected));
        }
        // Binary units are not multiples of powers of ten, so the fraction is multiplied in u128 and rounded down.
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let too_large = || out_of_range(text, "at most 2^64 - 1 bytes");
        let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| too_large())? };
        let mut bytes = u128::from(whole) * u128::from(unit);
        if !fraction.is_empty() {
            if fraction.len() > 9 {
                return Err(malformed(text, expected));
            }
            let scale = 10u128.pow(u32::try_from(fraction.len()).unwrap_or(9));
            let part: u128 = fraction.parse().map_err(|_| malformed(text, expected))?;
            bytes += part * u128::from(unit) / scale;
        }
        u64::try_from(bytes).map(Self).map_err(|_| too_large())
    }
}

/// In the largest binary unit not above the value, with one decimal at most: `256 MiB`, `1.5 GiB`, `17 B`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (name, shift) in units {
            if self.0 >> shift != 0 {
                let (whole, rest) = (self.0 >> shift, self.0 & ((1 << shift) - 1));
                let tenth = (u128::from(rest) * 10) >> shift;
                return if tenth == 0 {
                    write!(f, "{whole} {name}")
                } else {
                    write!(f, "{whole}.{tenth} {name}")
                };
            }
        }
        write!(f, "{} B", self.0)
    }
}

/// A point in time: nanoseconds since an epoch of the host's choice (the node runtime uses `CLOCK_MONOTONIC`).
///
/// The type reads no clock. An engine uses only differences of timestamps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Timestamp(u64);

impl Timestamp {
    /// The epoch.
    pub const ZERO: Self = Self(0);
    /// The end of time.
    pub const MAX: Self = Self(u64::MAX);

    /// The point `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// The point `millis` milliseconds after the epoch; saturates.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this timestamp; zero when `earlier` is later.
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration(self.0.saturating_sub(earlier.0))
    }

    /// The time `duration` later, at most the end of time.
    #[must_use]
    pub const fn saturating_add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration.0))
    }

    /// The time `duration` earlier, at least the epoch.
    #[must_use]
    pub const fn saturating_sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(duration.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0 + duration.0)
    }
}

/// Seconds with nine decimals: `12.000000340s`.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}s", self.0 / 1_000_000_000, self.0 % 1_000_000_000)
    }
}

quantity! {
    /// A length of time in nanoseconds.
    ///
    /// One integer instead of a [`core::time::Duration`], since ledgers add millions of durations and the wire and the journal
    /// carry each as one integer.
    Duration(u64)
}

impl Duration {
    /// The longest time.
    pub const MAX: Self = Self(u64::MAX);

    /// `nanos` nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// `nanos` nanoseconds from a wide product or quotient; saturates.
    pub fn from_wide_nanos(nanos: u128) -> Self {
        Self(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The time to move `bytes` at `bytes_per_second`, rounded down; a rate of 0 counts as 1.
    pub fn to_move(bytes: Bytes, bytes_per_second: u64) -> Self {
        Self::from_wide_nanos(u128::from(bytes.0) * 1_000_000_000 / u128::from(bytes_per_second.max(1)))
    }

    /// The time multiplied by `by / of`, rounded down; saturates, and an `of` of 0 counts as 1.
    #[must_use]
    pub fn scaled(self, by: u64, of: u64) -> Self {
        Self::from_wide_nanos(u128::from(self.0) * u128::from(by) / u128::from(of.max(1)))
    }

    /// `micros` microseconds; saturates.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1_000))
    }

    /// `millis` milliseconds; saturates.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// `secs` seconds; saturates.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// The time in nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Seconds, for reports only.
    #[expect(clippy::cast_precision_loss, reason = "reports")]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

impl AddAssign for Duration {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl SubAssign for Duration {
    fn sub_assign(&mut self, other: Self) {
        self.0 -= other.0;
    }
}

impl From<Duration> for core::time::Duration {
    fn from(duration: Duration) -> Self {
        Self::from_nanos(duration.0)
    }
}

/// Saturates at [`Duration::MAX`] (584 years).
impl From<core::time::Duration> for Duration {
    fn from(duration: core::time::Duration) -> Self {
        Self::from_wide_nanos(duration.as_nanos())
    }
}

/// `"5ms"`, `"100us"`, `"1.5s"`, `"250ns"`, `"10min"`, `"2h"`.
impl FromStr for Duration {
    type Err = ParseUnitError;
    fn from_str(text: &str) -> Result<Self, ParseUnitError> {
        let trimmed = text.trim();
        const S: u64 = 1_000_000_000;
        let units =
            [("ns", 1), ("us", 1_000), ("ms", 1_000_000), ("s", S), ("min", 60 * S), ("h", 3_600 * S)];
        let expected = "length of time with its unit such as `5ms`, `100us` or `1.5s`";
        let (number, unit) = units
            .iter()
            .find_map(|(suffix, unit)| trimmed.strip_suffix(suffix).map(|number| (number, *unit)))
            .ok_or_else(|| malformed(text, expected))?;
        parse_decimal(number.trim_end(), unit).map(Self).ok_or_else(|| malformed(text, expected))
    }
}

/// In the largest unit not above the value, with three decimals at most: `5ms`, `1.250s`, `800ns`.
impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, unit) in [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000)] {
            if self.0 >= unit {
                let (whole, part) = (self.0 / unit, self.0 % unit * 1000 / unit);
                return if part == 0 {
                    write!(f, "{whole}{name}")
                } else {
                    write!(f, "{whole}.{part:03}{name}")
                };
            }
        }
        write!(f, "{}ns", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_share_is_read_as_it_is_written() {
        for points in 0..=10_000 {
            let (quota, sm) = (Quota::new(points).unwrap(), SmShare::new(points).unwrap());
            assert_eq!(quota.to_string().parse(), Ok(quota));
            assert_eq!(sm.to_string().parse(), Ok(sm));
        }
    }

    #[test]
    fn shares_parse_exactly_or_not_at_all() {
        assert_eq!("0.3".parse::<Quota>().unwrap().get(), 3_000);
        assert_eq!("30%".parse::<Quota>().unwrap().get(), 3_000);
        assert_eq!("1".parse::<Quota>().unwrap(), Quota::WHOLE);
        assert_eq!("0.1234".parse::<Quota>().unwrap().get(), 1_234);
        assert_eq!("0.12340".parse::<Quota>().unwrap().get(), 1_234);
        assert!("0.12345".parse::<Quota>().is_err(), "not representable, so refused");
        assert_eq!("24".parse::<SmShare>().unwrap().get(), 2_400);
        assert_eq!("12.5%".parse::<SmShare>().unwrap().get(), 1_250);
        assert_eq!("0.5%".parse::<SmShare>().unwrap().get(), 50);
        let half = "0.5".parse::<SmShare>().unwrap_err().to_string();
        assert!(half.contains("`0.5` is out of range: SMs are in per cent: need such as `50`"), "{half}");
        for bad in ["", ".", "-1", "+1", "NaN", "inf", "1e-1", "0x1", "1.0.0", "18446744073709551616", "1.1"]
        {
            assert!(bad.parse::<Quota>().is_err(), "{bad}");
        }
        assert!("101".parse::<SmShare>().is_err());
        assert_eq!(
            "2".parse::<Quota>().unwrap_err().to_string(),
            "`2` is out of range: a share of time is at most 1.0; per cent need their sign, such as `50%`"
        );
    }

    #[test]
    fn bytes_parse_units_and_refuse_overflow() {
        assert_eq!("1073741824".parse::<Bytes>().unwrap(), Bytes::from_gib(1));
        assert_eq!("1GiB".parse::<Bytes>().unwrap(), Bytes::from_gib(1));
        assert_eq!("1.5 GiB".parse::<Bytes>().unwrap(), Bytes::from_mib(1536));
        assert_eq!("1.5GB".parse::<Bytes>().unwrap(), Bytes(1_500_000_000));
        assert_eq!("512Mi".parse::<Bytes>().unwrap(), Bytes::from_mib(512));
        for docker in ["4g", "4gb", "4Gi", "4096m", "4194304k"] {
            assert_eq!(docker.parse(), Ok(Bytes::from_gib(4)), "{docker}");
        }
        for kubernetes in ["4G", "4GB", "4000M", "0.004T"] {
            assert_eq!(kubernetes.parse(), Ok(Bytes(4_000_000_000)), "{kubernetes}");
        }
        for bad in ["", "GiB", "-1", "1XB", "1.2.3MB", "17179869184GiB", "18446744073709551616"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn quantities_print_readably() {
        assert_eq!(Quota::new(1_250).unwrap().to_string(), "12.5%");
        assert_eq!(SmShare::new(1_205).unwrap().to_string(), "12.05%");
        assert_eq!(Bytes::from_mib(1536).to_string(), "1.5 GiB");
        assert_eq!(Bytes(17).to_string(), "17 B");
        assert_eq!(Duration::from_micros(1_250).to_string(), "1.250ms");
        assert_eq!("1.5s".parse::<Duration>().unwrap(), Duration::from_millis(1_500));
        assert_eq!(Timestamp::from_nanos(12_000_000_340).to_string(), "12.000000340s");
    }

    #[test]
    fn a_share_of_a_window_keeps_within_it() {
        let third = Quota::new(3_333).unwrap();
        assert_eq!(third.of(Duration::from_nanos(10)), Duration::from_nanos(3));
        assert_eq!(Quota::WHOLE.of(Duration::MAX), Duration::MAX);
    }
}
