//! Profiles: the measured throughput and latency of a function at each point of (SM share, quota, batch).
//!
//! # Problem
//! Throughput is not proportional to SMs or to time (FaST-GShare, Figure 8; Dilu, Figure 7), so scaling and placement
//! rest on measured points. A wrong point makes every later choice wrong without a trace: a throughput of 0 becomes a divisor,
//! NaN compares false with everything and wins or loses each search by accident, and a hole in the grid hides the
//! optimum. The constructors of a [`ProfileTable`] therefore check every point.
//!
//! # Terms
//! - **point**: one combination of SM share, quota and batch size, with its measurement;
//! - **throughput**: completed requests (not batches) per second in the steady state, as a [`RequestRate`];
//! - **area**: SM share x quota, the part of a GPU under a point;
//! - **efficacy**: throughput per area. FaST-GShare calls it RPR (section 3.4.1); with a quota of 100 % it is Dilu's
//!   throughput efficacy TE (section 3.2). Compared as integers, by cross multiplication;
//! - **grid**: every batch size x every SM share x every quota of the table; a **hole** is a missing point of the grid.
//!
//! # Example
//! ```
//! use gshare_core::profile::{ProfilePoint, ProfileTable};
//! use gshare_core::{Duration, Quota, SmShare};
//! let sm = |percent| SmShare::from_percent(percent).unwrap();
//! let ms = Duration::from_millis;
//! let table = ProfileTable::grid(vec![
//!     ProfilePoint::measured(sm(12), Quota::WHOLE, 1, 68.64, ms(15), ms(19))?,
//!     ProfilePoint::measured(sm(24), Quota::WHOLE, 1, 73.43, ms(14), ms(17))?,
//! ])?;
//! // 68.64 requests/s on 12 % of the SMs are more per area than 73.43 on 24 %.
//! let best = table.most_effective(|point| point.p95 <= ms(20)).unwrap();
//! assert_eq!(best.sm, sm(12));
//! assert!(ProfilePoint::measured(sm(12), Quota::WHOLE, 1, f64::NAN, ms(15), ms(19)).is_err());
//! # Ok::<(), gshare_core::profile::ProfileError>(())
//! ```
use crate::units::{Duration, Quota, SmShare, quantity};
use core::cmp::Ordering;
use core::fmt;
use std::collections::{BTreeMap, BTreeSet};

quantity! {
    /// Requests per second in thousandths, since decisions rest on integers.
    RequestRate(u64)
}

impl RequestRate {
    /// `n` thousandths of a request per second.
    pub const fn from_milli(n: u64) -> Self {
        Self(n)
    }

    /// `n` requests per second; saturates.
    pub const fn per_second(n: u64) -> Self {
        Self(n.saturating_mul(1_000))
    }

    /// Thousandths of a request per second.
    pub const fn as_milli(self) -> u64 {
        self.0
    }

    /// Requests per second, for reports only.
    #[expect(clippy::cast_precision_loss, reason = "reports")]
    pub fn as_f64(self) -> f64 {
        self.0 as f64 / 1e3
    }
}

/// `73.43/s`.
impl fmt::Display for RequestRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}/s", self.0 / 1_000, self.0 % 1_000)
    }
}

/// The place of a point: batch size, SM share and quota, compared in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Setting {
    /// Requests per batch; more than 0.
    pub batch: u32,
    /// Share of the SMs; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "sm_basis_points"))]
    pub sm: SmShare,
    /// Share of GPU time; more than 0.
    #[cfg_attr(feature = "serde", serde(rename = "quota_basis_points"))]
    pub quota: Quota,
}

impl Setting {
    /// SM share x quota in 1/10 000 of 1/10 000 of a GPU; a whole GPU has 100 000 000.
    pub const fn area(self) -> u64 {
        self.sm.get() as u64 * self.quota.get() as u64
    }
}

/// `batch 4, 30% of the SMs, 100% of the time`.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}, {} of the SMs, {} of the time", self.batch, self.sm, self.quota)
    }
}

/// The measured throughput and latencies at one setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[non_exhaustive]
#[allow(missing_docs, reason = "a field that is named for its content has no doc")]
pub struct ProfilePoint {
    #[cfg_attr(feature = "serde", serde(rename = "sm_basis_points"))]
    pub sm: SmShare,
    /// Share of GPU time.
    #[cfg_attr(feature = "serde", serde(rename = "quota_basis_points"))]
    pub quota: Quota,
    /// Requests per batch.
    pub batch: u32,
    /// Completed requests per second in the steady state, in thousandths.
    #[cfg_attr(feature = "serde", serde(rename = "throughput_milli_rps"))]
    pub throughput: RequestRate,
    /// Median time of one batch from its launch to its result, without queueing, in ns.
    #[cfg_attr(feature = "serde", serde(rename = "p50_ns"))]
    pub p50: Duration,
    /// 95th percentile of the time of one batch, in ns; not below the median.
    #[cfg_attr(feature = "serde", serde(rename = "p95_ns"))]
    pub p95: Duration,
}

impl ProfilePoint {
    /// A point from a measurement, with `throughput` in requests per second, rounded to a thousandth.
    pub fn measured(
        sm: SmShare,
        quota: Quota,
        batch: u32,
        throughput: f64,
        p50: Duration,
        p95: Duration,
    ) -> Result<Self, ProfileError> {
        let setting = Setting { batch, sm, quota };
        let milli = (throughput * 1e3).round();
        // Above 2^53 a float no longer holds every integer, and no GPU answers so many requests.
        if !milli.is_finite() || !(0.0..9.007_199_254_740_992e15).contains(&milli) {
            return Err(ProfileError::NotANumber {
                setting,
                field: "throughput",
                value: throughput.to_string(),
            });
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 2^53")]
        let throughput = RequestRate::from_milli(milli as u64);
        let point = Self { sm, quota, batch, throughput, p50, p95 };
        point.check()?;
        Ok(point)
    }

    /// The place of the point.
    pub const fn setting(&self) -> Setting {
        Setting { batch: self.batch, sm: self.sm, quota: self.quota }
    }

    /// SM share x quota; see [`Setting::area`].
    pub const fn area(&self) -> u64 {
        self.setting().area()
    }

    /// Compares two points by throughput per area, without rounding.
    pub fn cmp_efficacy(&self, other: &Self) -> Ordering {
        let cross = |rate: RequestRate, area: u64| u128::from(rate.as_milli()) * u128::from(area);
        cross(self.throughput, other.area()).cmp(&cross(other.throughput, self.area()))
    }

    fn check(&self) -> Result<(), ProfileError> {
        let setting = self.setting();
        let zero = |field| Err(ProfileError::Zero { setting, field });
        match () {
            () if self.sm.is_zero() => zero("SM share"),
            () if self.quota.is_zero() => zero("quota"),
            () if self.batch == 0 => zero("batch"),
            () if self.throughput.is_zero() => zero("throughput"),
            () if self.p50.is_zero() => zero("p50"),
            () if self.p95 < self.p50 => {
                Err(ProfileError::Percentiles { setting, p50: self.p50, p95: self.p95 })
            }
            () => Ok(()),
        }
    }
}

/// Why a profile was refused. The message names the point and the field.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ProfileError {
    /// The profile has no points.
    #[error("profile has no points")]
    Empty,
    /// A field of a point is 0 but must be more.
    #[error("profile point ({setting}): {field} is 0, need more")]
    Zero { setting: Setting, field: &'static str },
    /// A field of a point is NaN, infinite, negative or too large.
    #[error("profile point ({setting}): {field} is {value}, need a finite number above 0")]
    NotANumber { setting: Setting, field: &'static str, value: String },
    /// The 95th percentile of a point is below its median.
    #[error("profile point ({setting}): p95 {p95} is below p50 {p50}")]
    Percentiles { setting: Setting, p50: Duration, p95: Duration },
    /// Two points have the same setting.
    #[error("profile has two points at ({setting})")]
    Duplicate { setting: Setting },
    /// The grid has no point at this setting.
    #[error("profile has no point at ({setting}), but others with each of its values")]
    Hole { setting: Setting },
}

/// Checked points in the order of their [`Setting`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(try_from = "RawProfileTable", into = "RawProfileTable"))]
pub struct ProfileTable {
    points: Vec<ProfilePoint>,
}

impl ProfileTable {
    /// A table over a whole grid; [`ProfileError::Hole`] names the first missing setting.
    pub fn grid(points: Vec<ProfilePoint>) -> Result<Self, ProfileError> {
        let table = Self::sparse(points)?;
        let batches: BTreeSet<_> = table.points.iter().map(|point| point.batch).collect();
        let sms: BTreeSet<_> = table.points.iter().map(|point| point.sm).collect();
        let quotas: BTreeSet<_> = table.points.iter().map(|point| point.quota).collect();
        let mut found = table.points.iter().map(ProfilePoint::setting);
        for &batch in &batches {
            for &sm in &sms {
                for &quota in &quotas {
                    // Both walks are in the same order and have no duplicates: the first difference is a hole.
                    let setting = Setting { batch, sm, quota };
                    if found.next() != Some(setting) {
                        return Err(ProfileError::Hole { setting });
                    }
                }
            }
        }
        Ok(table)
    }

    /// A table of chosen points with possible holes, such as the points of a search.
    pub fn sparse(mut points: Vec<ProfilePoint>) -> Result<Self, ProfileError> {
        if points.is_empty() {
            return Err(ProfileError::Empty);
        }
        points.sort_by_key(ProfilePoint::setting);
        for point in &points {
            point.check()?;
        }
        match points.windows(2).find(|pair| pair[0].setting() == pair[1].setting()) {
            Some(pair) => Err(ProfileError::Duplicate { setting: pair[0].setting() }),
            None => Ok(Self { points }),
        }
    }

    /// The table for a device without SM partitions, where every process runs on all SMs. Of all points with one batch and quota the
    /// table keeps the point with the most SMs, since more SMs serve no fewer requests, and states it as a point at all SMs.
    #[must_use]
    pub fn on_all_sms(&self) -> Self {
        // Points come with the fewest SMs first, so a later point replaces an earlier point.
        let widened = self.points.iter().map(|point| ((point.batch, point.quota), *point));
        let most: BTreeMap<_, ProfilePoint> = widened.collect();
        Self {
            points: most.into_values().map(|point| ProfilePoint { sm: SmShare::WHOLE, ..point }).collect(),
        }
    }

    /// The points in the order of their setting; at least one point.
    pub fn points(&self) -> &[ProfilePoint] {
        &self.points
    }

    /// The point at a setting; `None` for a hole.
    pub fn at(&self, setting: Setting) -> Option<&ProfilePoint> {
        let index = self.points.binary_search_by_key(&setting, ProfilePoint::setting).ok()?;
        self.points.get(index)
    }

    /// The allowed point with the highest efficacy; ties go to the smallest area, then to the first setting.
    pub fn most_effective(&self, allowed: impl Fn(&ProfilePoint) -> bool) -> Option<&ProfilePoint> {
        self.points.iter().filter(|point| allowed(point)).min_by(|a, b| {
            b.cmp_efficacy(a).then(a.area().cmp(&b.area())).then(a.setting().cmp(&b.setting()))
        })
    }
}

// The serialised table; `sparse` allows holes.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
struct RawProfileTable {
    #[serde(default)]
    sparse: bool,
    points: Vec<ProfilePoint>,
}

#[cfg(feature = "serde")]
impl TryFrom<RawProfileTable> for ProfileTable {
    type Error = ProfileError;
    fn try_from(raw: RawProfileTable) -> Result<Self, ProfileError> {
        if raw.sparse { Self::sparse(raw.points) } else { Self::grid(raw.points) }
    }
}

#[cfg(feature = "serde")]
impl From<ProfileTable> for RawProfileTable {
    fn from(table: ProfileTable) -> Self {
        Self { sparse: ProfileTable::grid(table.points.clone()).is_err(), points: table.points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(sm: u16, quota: u16, batch: u32, throughput: f64) -> Result<ProfilePoint, ProfileError> {
        let (sm, quota) = (SmShare::from_percent(sm).unwrap(), Quota::from_percent(quota).unwrap());
        let (p50, p95) = (Duration::from_millis(10), Duration::from_millis(12));
        ProfilePoint::measured(sm, quota, batch, throughput, p50, p95)
    }

    #[test]
    fn a_throughput_that_is_no_number_is_refused_by_name() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e300] {
            let error = point(10, 100, 1, bad).unwrap_err();
            assert!(matches!(error, ProfileError::NotANumber { field: "throughput", .. }), "{error}");
        }
        assert_eq!(
            point(10, 100, 4, f64::NAN).unwrap_err().to_string(),
            "profile point (batch 4, 10% of the SMs, 100% of the time): throughput is NaN, need a finite number above 0"
        );
    }

    #[test]
    fn a_zero_is_refused_by_name() {
        let field = |error| match error {
            ProfileError::Zero { field, .. } => field,
            other => panic!("{other}"),
        };
        assert_eq!(field(point(10, 100, 1, 0.0).unwrap_err()), "throughput");
        assert_eq!(field(point(10, 100, 1, 0.0004).unwrap_err()), "throughput", "0 once rounded");
        assert_eq!(field(point(0, 100, 1, 1.0).unwrap_err()), "SM share");
        assert_eq!(field(point(10, 0, 1, 1.0).unwrap_err()), "quota");
        assert_eq!(field(point(10, 100, 0, 1.0).unwrap_err()), "batch");
        let ms = Duration::from_millis;
        let whole = (SmShare::WHOLE, Quota::WHOLE);
        let error = ProfilePoint::measured(whole.0, whole.1, 1, 1.0, Duration::ZERO, ms(1)).unwrap_err();
        assert_eq!(field(error), "p50");
        let error = ProfilePoint::measured(whole.0, whole.1, 1, 1.0, ms(2), ms(1)).unwrap_err();
        assert!(matches!(error, ProfileError::Percentiles { .. }));
    }

    #[test]
    fn a_hole_and_a_duplicate_are_refused_by_place() {
        let at = |sm, batch| point(sm, 100, batch, 1.0).unwrap();
        let hole = ProfileTable::grid(vec![at(10, 1), at(20, 1), at(10, 2)]).unwrap_err();
        assert_eq!(hole, ProfileError::Hole { setting: at(20, 2).setting() });
        assert!(ProfileTable::sparse(vec![at(10, 1), at(20, 1), at(10, 2)]).is_ok(), "meant to have holes");
        let twice = ProfileTable::sparse(vec![at(10, 1), at(20, 1), at(10, 1)]).unwrap_err();
        assert_eq!(twice, ProfileError::Duplicate { setting: at(10, 1).setting() });
        assert_eq!(ProfileTable::grid(vec![]).unwrap_err(), ProfileError::Empty);
    }

    /// FaST-GShare, section 3.4.1: RPR = T / (S x Q).
    #[test]
    fn efficacy_is_throughput_per_area() {
        let table = ProfileTable::grid(vec![
            point(6, 20, 1, 13.50).unwrap(),
            point(6, 100, 1, 49.85).unwrap(),
            point(12, 20, 1, 18.27).unwrap(),
            point(12, 100, 1, 68.64).unwrap(),
        ])
        .unwrap();
        let best = table.most_effective(|_| true).unwrap();
        assert_eq!((best.sm.get(), best.quota.get()), (600, 2_000));
        let best = table.most_effective(|point| point.throughput > RequestRate::per_second(20)).unwrap();
        assert_eq!((best.sm.get(), best.quota.get()), (600, 10_000));
        assert!(table.most_effective(|_| false).is_none());
    }

    #[cfg(feature = "serde")]
    #[test]
    fn a_table_is_checked_when_it_is_read() {
        let table = ProfileTable::grid(vec![point(10, 100, 1, 3.5).unwrap()]).unwrap();
        let text = serde_json::to_string(&table).unwrap();
        assert!(text.contains("\"throughput_milli_rps\":3500"), "{text}");
        assert_eq!(serde_json::from_str::<ProfileTable>(&text).unwrap(), table);
        let broken = text.replace("3500", "0");
        assert!(
            serde_json::from_str::<ProfileTable>(&broken)
                .unwrap_err()
                .to_string()
                .contains("throughput is 0")
        );
    }
}
