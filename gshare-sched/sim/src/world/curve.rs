//! How fast a program is with a part of what it may take at most.

use super::device::FULL;
use gshare_core::profile::{ProfilePoint, ProfileTable};

/// The pace of a program by the part of its limit that it has, both in millionths. Pieces of straight lines through measured
/// points; from the least of them to nothing it goes in proportion, as it does throughout where nothing was measured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Curve(Vec<(u64, u64)>);

impl Curve {
    /// The curve of batches of one size at a limit, in basis points of SMs and of time.
    ///
    /// A program that has less than its limit loses SMs first, down to those that are guaranteed to it (`least_sm`), and then
    /// time. So the points are those of the limit's quota with fewer SMs, and those of the fewest SMs with less quota.
    pub(super) fn new(profile: &ProfileTable, batch: u32, (sm, quota): (u16, u16), least_sm: u16) -> Self {
        let of = |point: &&ProfilePoint| point.batch == batch;
        let at = |point: &ProfilePoint| (point.sm.get(), point.quota.get());
        let points = || profile.points().iter().filter(of);
        let Some(full) = points().find(|point| at(point) == (sm, quota)).map(|point| point.p50) else {
            return Self::default();
        };
        let narrowed = || points().map(at).filter(|one| one.1 == quota && (least_sm..=sm).contains(&one.0));
        let narrowest = narrowed().map(|one| one.0).min().unwrap_or(sm);
        let area = |(sm, quota): (u16, u16)| u64::from(sm) * u64::from(quota);
        let on_path = |&(of_sm, of_quota): &(u16, u16)| {
            of_quota == quota && (narrowest..=sm).contains(&of_sm) || of_sm == narrowest && of_quota <= quota
        };
        let mut curve: Vec<_> = points()
            .filter(|point| on_path(&at(point)))
            .map(|point| {
                let pace = full.as_nanos().saturating_mul(FULL) / point.p50.as_nanos().max(1);
                (area(at(point)) * FULL / area((sm, quota)).max(1), pace.clamp(1, FULL))
            })
            .collect();
        curve.sort_unstable();
        // Measured times are noisy: more of a device never makes a program slower.
        let mut best = 0;
        for (_, pace) in &mut curve {
            best = best.max(*pace);
            *pace = best;
        }
        Self(curve)
    }

    /// The pace with this part of the limit; all of it is the full pace.
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

    fn point(sm: u16, quota: u16, micros: u64) -> ProfilePoint {
        let sm = SmShare::from_percent(sm).unwrap();
        let time = Duration::from_micros(micros);
        ProfilePoint::measured(sm, Quota::from_percent(quota).unwrap(), 1, 1.0, time, time).unwrap()
    }

    /// RoBERTa-large of Dilu's measurements: half of its SMs cost it 23 % of its pace.
    #[test]
    fn fewer_sms_cost_what_was_measured_and_less_than_was_measured_goes_in_proportion() {
        let profile = ProfileTable::sparse(vec![point(30, 100, 34_229), point(60, 100, 26_481)]).unwrap();
        let curve = Curve::new(&profile, 1, (6_000, 10_000), 3_000);
        let paces = [FULL, 750_000, 500_000, 250_000, 0].map(|part| curve.pace(part));
        assert_eq!(paces, [FULL, 886_821, 773_642, 386_821, 1]);
        assert_eq!(Curve::default().pace(500_000), 500_000, "nothing was measured");
        let guaranteed = Curve::new(&profile, 1, (6_000, 10_000), 6_000);
        assert_eq!(guaranteed.pace(500_000), 500_000, "all its SMs are guaranteed: it loses time");
    }

    #[test]
    fn after_its_sms_a_program_loses_time() {
        let all = [(20, 40, 50), (20, 80, 30), (40, 40, 26), (40, 80, 20)];
        let profile =
            ProfileTable::sparse(all.map(|(sm, quota, time)| point(sm, quota, time)).to_vec()).unwrap();
        let curve = Curve::new(&profile, 1, (4_000, 8_000), 2_000);
        assert_eq!([500_000, 250_000].map(|part| curve.pace(part)), [666_666, 400_000]);
    }

    proptest! {
        #[test]
        fn more_is_never_slower(times in prop::collection::vec(1u64..1_000, 1..10), parts in (0..=FULL, 0..=FULL)) {
            let points = (1u16..).zip(&times).map(|(index, time)| point(index * 10, 100, *time)).collect();
            let most = u16::try_from(times.len()).unwrap() * 1_000;
            let curve = Curve::new(&ProfileTable::sparse(points).unwrap(), 1, (most, 10_000), 1);
            let (less, more) = (parts.0.min(parts.1), parts.0.max(parts.1));
            prop_assert!(curve.pace(less) <= curve.pace(more));
            prop_assert_eq!(curve.pace(FULL), FULL);
        }
    }
}
