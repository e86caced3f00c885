//! The mutual slow-down of programs on a fractional device.

use gshare_core::{Duration, QuotaRange, SmShare};

/// All of a limit, or the pace in the profile with it.
pub(super) const FULL: u64 = 1_000_000;

/// The time until a program that begins to work has the device, beside a busy program with the other SMs: the daemon recalls the other
/// program's token, and the other program's launched work, up to the daemon's bound, ends first. A hand-over takes a quarter more.
pub(super) const TURN: Duration = Duration::from_micros(6_250);

/// The whole device, in basis points.
const WHOLE: u64 = 10_000;

/// The shares of a device in use by its running programs together, each share being time x SMs in basis points. Sums keep the cost
/// of a device with hundreds of programs at the cost of a device with two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct InUse {
    /// The sum of the guaranteed shares.
    request: u64,
    /// The sum of the extras up to the limits.
    extra: u64,
    /// The part of `extra` for SLO-sensitive programs.
    sensitive: u64,
}

/// The share and class of a program on a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Use {
    pub(super) share: QuotaRange,
    /// The SMs of its kernels, in basis points.
    pub(super) sm: SmShare,
    pub(super) sensitive: bool,
}

impl Use {
    /// Whether kernels of both programs run at a time; otherwise the two programs take turns.
    pub(super) fn fits_beside(self, other: Self) -> bool {
        self.sm.get() + other.sm.get() <= SmShare::WHOLE.get()
    }

    fn request(self) -> u64 {
        self.share.request().get().into()
    }

    fn extra(self) -> u64 {
        u64::from(self.share.limit().get()) - self.request()
    }
}

impl InUse {
    /// Adds a program that begins to run.
    pub(super) fn add(&mut self, one: Use) {
        self.request += one.request();
        self.extra += one.extra();
        self.sensitive += if one.sensitive { one.extra() } else { 0 };
    }

    /// Removes a program that rests.
    pub(super) fn remove(&mut self, one: Use) {
        self.request -= one.request();
        self.extra -= one.extra();
        self.sensitive -= if one.sensitive { one.extra() } else { 0 };
    }

    /// The part of its limit for a running program, in millionths: from a thousandth to all of it.
    ///
    /// While the limits of the running programs fit the device, each program has its limit. Beyond this each keeps its request. The rest
    /// goes to SLO-sensitive programs first and then to the others, in both cases up to their limits and in proportion to `limit -
    /// request`. A [vertical scaler](gshare_sched::scale::VerticalScaler) arrives at the same division for an owner that needs its limit;
    /// programs without a class share like tokens.
    ///
    /// Two programs with 20 %:80 % and 40 %:60 % ask for 140 % of a device, and their requests leave 40 %. Without classes the
    /// first program gets 3/4 of the rest, and both have 50 % of the device: 625,000 and 833,333 millionths of their limits. If the
    /// second is SLO-sensitive it has all of its limit, and the first has the remaining 40 %.
    pub(super) fn part(self, one: Use) -> u64 {
        let (request, extra) = (one.request(), one.extra());
        let limit = (request + extra).max(1);
        if self.request + self.extra <= WHOLE {
            return FULL;
        }
        let part = if self.request >= WHOLE {
            // Not even the requests fit; a program without a request still gets a crumb, or it would never end.
            request * WHOLE * FULL / (self.request * limit)
        } else {
            let spare = WHOLE - self.request;
            let (spare, rivals) = match one.sensitive {
                true => (spare, self.sensitive),
                false => (spare.saturating_sub(self.sensitive), self.extra - self.sensitive),
            };
            (request * rivals.max(1) + extra * spare.min(rivals)) * FULL / (rivals.max(1) * limit)
        };
        part.clamp(FULL / 1_000, FULL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gshare_core::Quota;
    use proptest::prelude::*;

    fn used(request: u16, limit: u16, sensitive: bool) -> Use {
        let share = QuotaRange::new(Quota::new(request).unwrap(), Quota::new(limit).unwrap()).unwrap();
        Use { share, sm: SmShare::WHOLE, sensitive }
    }

    fn sum(all: &[Use]) -> InUse {
        let mut sum = InUse::default();
        all.iter().for_each(|one| sum.add(*one));
        sum
    }

    #[test]
    fn the_worked_example_holds() {
        for (sensitive, parts) in [(false, [625_000, 833_333]), (true, [500_000, FULL])] {
            let all = [used(2_000, 8_000, false), used(4_000, 6_000, sensitive)];
            assert_eq!(all.map(|one| sum(&all).part(one)), parts);
            assert_eq!(sum(&all[..1]).part(all[0]), FULL);
        }
    }

    #[test]
    fn a_turn_is_the_work_in_flight_and_a_quarter() {
        let bound = gshare_sched::node::NodeConfig::default().in_flight;
        assert_eq!(TURN, Duration::from_nanos(bound.as_nanos() * 5 / 4));
    }

    proptest! {
        /// No program has less than its request while the requests fit, all together have no more than the device, and
        /// SLO-sensitive programs reach their limits before others exceed their requests.
        #[test]
        fn requests_are_met_and_the_device_is_not_exceeded(
            drawn in prop::collection::vec((0u16..3_000, 1u16..7_000, any::<bool>()), 1..6)
        ) {
            let all: Vec<_> = drawn.iter().map(|&(request, extra, class)| used(request, request + extra, class)).collect();
            let mut in_use = sum(&all);
            let requests: u64 = all.iter().map(|one| one.request()).sum();
            prop_assume!(requests < WHOLE);
            let got = |one: &Use| in_use.part(*one) * (one.request() + one.extra());
            // Rounding loses a millionth of a limit, and the least part of a limit is a thousandth.
            prop_assert!(all.iter().all(|one| got(one) + 10_000 >= one.request() * FULL));
            let total: u64 = all.iter().map(got).sum();
            prop_assert!(total <= WHOLE * FULL + 10_000_000 * all.len() as u64, "{total}");
            let short = |one: &&Use| one.sensitive && in_use.part(**one) < FULL;
            let beyond = |one: &Use| !one.sensitive && got(one) > one.request() * FULL + 10_000_000;
            prop_assert!(!(all.iter().any(|one| short(&one)) && all.iter().any(beyond)));
            all.iter().for_each(|one| in_use.remove(*one));
            prop_assert_eq!(in_use, InUse::default());
        }
    }
}
