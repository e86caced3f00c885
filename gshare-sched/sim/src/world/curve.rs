//! The pace of a program with a part of its limit.

use super::slow_down::FULL;
use gshare_core::profile::{ProfilePoint, ProfileTable};

/// The pace of a program by its part of its limit, both in millionths. The curve has straight pieces through the measured points.
/// Below the least point it falls to zero in proportion, and without any point it is proportional throughout.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Curve(Vec<(u64, u64)>);

impl Curve {
    /// The curve of batches of one size at a limit, in basis points of SMs and of time.
    ///
    /// A program below its limit loses SMs first, down to its guaranteed SMs (`least_sm`), so the points are measurements with the
    /// limit's quota and fewer SMs. Then it loses time, in proportion: a measurement with less quota was made alone, without waits
    /// for the turns of others.
    pub(super) fn new(profile: &ProfileTable, batch: u32, (sm, quota): (u16, u16), least_sm: u16) -> Self {
        let alike = |point: &&ProfilePoint| point.batch == batch && point.quota.get() == quota;
        let points = || profile.points().iter().filter(alike);
        let Some(full) = points().find(|point| point.sm.get() == sm) else { return Self::default() };
        let mut curve: Vec<_> = points()
            .filter(|point| (least_sm..=sm).contains(&point.sm.get()))
            .map(|point| {
                let pace = full.p50.as_nanos().saturating_mul(FULL) / point.p50.as_nanos().max(1);
                (u64::from(point.sm.get()) * FULL / u64::from(sm).max(1), pace.clamp(1, FULL))
            })
            .collect();
        curve.sort_unstable();
        // Measured times are noisy, and more of a device never makes a program slower.
        let mut best = 0;
        for (_, pace) in &mut curve {
            best = best.max(*pace);
            *pace = best;
        }
        Self(curve)
    }

    /// The pace with this part of the limit; the whole limit gives the full pace.
    pub(super) fn pace(&self, part: u64) -> u64 {
        if part >= FULL {
            return FULL;
        }
        let above = self.0.partition_point(|(at, _)| *at <= part);
        let (from, slow) = above.checked_sub(1).map_or((0, 0), |below| self.0[below]);
        let (to, fast) = self.0.get(above).copied().unwrap_or((FULL, FULL));
        (slow + (part - from) * (fast - slow) / (to - from).max(1)).clamp(1, FULL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::{Duration, Quota, SmShare};
    use proptest::prelude::*;

    fn point(sm: u16, micros: u64) -> ProfilePoint {
        let (sm, time) = (SmShare::from_percent(sm).unwrap(), Duration::from_micros(micros));
        ProfilePoint::measured(sm, Quota::WHOLE, 1, 1.0, time, time).unwrap()
    }

    /// RoBERTa-large of Dilu's measurements: half of its SMs cost it 23 % of its pace.
    #[test]
    fn fewer_sms_cost_what_was_measured_and_less_than_was_measured_goes_in_proportion() {
        let profile = ProfileTable::sparse(vec![point(30, 34_229), point(60, 26_481)]).unwrap();
        let curve = Curve::new(&profile, 1, (6_000, 10_000), 3_000);
        let paces = [FULL, 750_000, 500_000, 250_000, 0].map(|part| curve.pace(part));
        assert_eq!(paces, [FULL, 886_821, 773_642, 386_821, 1]);
        assert_eq!(Curve::default().pace(500_000), 500_000, "nothing was measured");
        let guaranteed = Curve::new(&profile, 1, (6_000, 10_000), 6_000);
        assert_eq!(guaranteed.pace(500_000), 500_000, "all its SMs are guaranteed: it loses time");
    }

    proptest! {
        #[test]
        fn more_is_never_slower(times in prop::collection::vec(1u64..1_000, 1..10), parts in (0..=FULL, 0..=FULL)) {
            let points = (1u16..).zip(&times).map(|(index, time)| point(index * 10, *time)).collect();
            let most = u16::try_from(times.len()).unwrap() * 1_000;
            let curve = Curve::new(&ProfileTable::sparse(points).unwrap(), 1, (most, 10_000), 1);
            let (less, more) = (parts.0.min(parts.1), parts.0.max(parts.1));
            prop_assert!(curve.pace(less) <= curve.pace(more));
            prop_assert_eq!(curve.pace(FULL), FULL);
        }
    }
}
