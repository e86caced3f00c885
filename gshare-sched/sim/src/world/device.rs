//! How programs that share a fractional device slow each other down.

use gshare_core::QuotaRange;

/// The pace of a program that goes as fast as its profile says.
pub const FULL: u64 = 1_000_000;

/// The shares that the programs which run on a device at a moment have of it together, each share being time
/// x SMs in basis points.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct InUse {
    /// Sum of what is guaranteed to them.
    pub request: u64,
    /// Sum of the most that each may take.
    pub limit: u64,
}

/// Contention on one device. A model of it sees sums only, so that a device with hundreds of programs costs no more than one
/// with two.
pub trait DeviceModel: core::fmt::Debug {
    /// The pace of a program with this share beside all that run (itself included), in millionths of its profiled pace: 1 to
    /// [`FULL`].
    fn pace(&self, in_use: InUse, share: QuotaRange) -> u64;
}

/// Proportional slow-down: while the limits of what runs fit the device, each program goes at its profiled pace. Beyond that
/// each keeps its request, and what requests leave over is divided in proportion to `limit - request`.
///
/// A device whose programs have 20 %:80 % and 40 %:60 % is asked for 140 %. Their requests leave 40 %, of which the first
/// gets 3/4: both have 50 % of the device, which is 625,000 and 833,333 millionths of their pace.
///
/// The profile is that of the limit (a function that may take 80 % was measured with 80 %), and interference by caches and
/// memory bandwidth is left out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Proportional;

impl DeviceModel for Proportional {
    fn pace(&self, in_use: InUse, share: QuotaRange) -> u64 {
        const WHOLE: u64 = 10_000;
        if in_use.limit <= WHOLE {
            return FULL;
        }
        let (request, limit) = (u64::from(share.request().get()), u64::from(share.limit().get()).max(1));
        let pace = if in_use.request >= WHOLE {
            // Not even the requests fit; a program without one still gets a crumb, or it would never end.
            request * WHOLE * FULL / (in_use.request * limit)
        } else {
            let (spare, extra) = (WHOLE - in_use.request, in_use.limit - in_use.request);
            (request * extra + (limit - request) * spare) * FULL / (extra * limit)
        };
        pace.clamp(FULL / 1_000, FULL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::Quota;
    use proptest::prelude::*;

    fn range(request: u16, limit: u16) -> QuotaRange {
        QuotaRange::new(Quota::new(request).unwrap(), Quota::new(limit).unwrap()).unwrap()
    }

    fn sum(shares: &[QuotaRange]) -> InUse {
        shares.iter().fold(InUse::default(), |sum, share| InUse {
            request: sum.request + u64::from(share.request().get()),
            limit: sum.limit + u64::from(share.limit().get()),
        })
    }

    #[test]
    fn the_worked_example_holds() {
        let shares = [range(2_000, 8_000), range(4_000, 6_000)];
        let pace = |index: usize| Proportional.pace(sum(&shares), shares[index]);
        assert_eq!([pace(0), pace(1)], [625_000, 833_333]);
        assert_eq!(Proportional.pace(sum(&shares[..1]), shares[0]), FULL);
    }

    proptest! {
        /// No program has less than its request while the requests fit, and all together have no more than the device.
        #[test]
        fn requests_are_met_and_the_device_is_not_exceeded(
            drawn in prop::collection::vec((0u16..3_000, 1u16..7_000), 1..6)
        ) {
            let shares: Vec<_> = drawn.iter().map(|&(request, extra)| range(request, request + extra)).collect();
            let in_use = sum(&shares);
            prop_assume!(in_use.request < 10_000);
            let mut total = 0;
            for &share in &shares {
                let got = Proportional.pace(in_use, share) * u64::from(share.limit().get());
                // A millionth of a limit is lost by rounding.
                prop_assert!(got + 10_000 >= u64::from(share.request().get()) * FULL);
                total += got;
            }
            let floor = 10 * 10_000 * shares.len() as u64;
            prop_assert!(total <= in_use.limit.min(10_000) * FULL + floor * 100, "{total}");
        }
    }
}
