//! Sharing out a whole number in proportion to weights, with each part at most its cap.

/// A claim to a part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Want {
    /// The largest part of use.
    pub(super) cap: u64,
    /// A weight of 0 gets nothing.
    pub(super) weight: u64,
    pub(super) part: u64,
}

impl Want {
    pub(super) const fn new(cap: u64, weight: u64) -> Self {
        Self { cap, weight, part: 0 }
    }
}

/// Sets each part to `min(cap, level * weight)` for the level at which the parts add up to `rest`, or to the caps if their sum is
/// smaller. The result is exact: the units left by rounding go to the wants at which the running sum crosses a whole number. So the
/// parts add up to `rest` to the unit, and each is less than one unit from its real value.
///
/// `rest` and each cap are at most 2^40, each weight at most 2^56, and there are at most 2^20 wants, so no product exceeds
/// `u128`. A call makes at most one pass per want at its cap, in practice two or three.
pub(super) fn apportion(mut rest: u64, wants: &mut [Want]) {
    let mut total: u128 = 0;
    for want in wants.iter_mut() {
        want.part = 0;
        if want.cap > 0 {
            total += u128::from(want.weight);
        }
    }
    let open = |want: &Want| want.cap > 0 && want.weight > 0 && want.part == 0;
    // A want with a cap below its proportion gets its cap, which leaves more for the others.
    while rest > 0 && total > 0 {
        let (rest_now, total_now) = (u128::from(rest), total);
        for want in wants.iter_mut().filter(|want| open(want)) {
            if u128::from(want.cap) * total_now <= rest_now * u128::from(want.weight) {
                want.part = want.cap;
                rest -= want.cap;
                total -= u128::from(want.weight);
            }
        }
        if total == total_now {
            break;
        }
    }
    let (mut weights, mut given) = (0u128, 0);
    for want in wants.iter_mut().filter(|want| open(want)) {
        weights += u128::from(want.weight);
        // The quotient is at most `rest`.
        let upto = u64::try_from(u128::from(rest) * weights / total.max(1)).unwrap_or(rest);
        want.part = upto - given;
        given = upto;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parts(rest: u64, wants: &[(u64, u64)]) -> Vec<u64> {
        let mut wants: Vec<_> = wants.iter().map(|&(cap, weight)| Want::new(cap, weight)).collect();
        apportion(rest, &mut wants);
        wants.iter().map(|want| want.part).collect()
    }

    #[test]
    fn what_one_cannot_use_goes_to_the_others_in_proportion() {
        assert_eq!(parts(100, &[(10, 1), (100, 1), (100, 2)]), [10, 30, 60]);
        assert_eq!(parts(1000, &[(10, 1), (20, 5)]), [10, 20], "no more than the caps");
        assert_eq!(parts(10, &[(10, 1), (10, 1), (10, 1)]), [3, 3, 4], "to the unit");
        assert_eq!(parts(10, &[(10, 0), (3, 1), (0, 9)]), [0, 3, 0]);
        assert_eq!(parts(0, &[(10, 1)]), [0]);
    }

    proptest! {
        /// The oracle finds the level by bisection over real numbers: slow, and free of order and rounding.
        #[test]
        fn parts_are_the_water_level_to_the_unit(
            rest in 0u64..10_000,
            wants in prop::collection::vec((0u64..3_000, 0u64..50), 0..12),
        ) {
            let found = parts(rest, &wants);
            let usable: u64 = wants.iter().filter(|want| want.1 > 0).map(|want| want.0).sum();
            prop_assert_eq!(found.iter().sum::<u64>(), rest.min(usable));
            let at = |level: f64| wants.iter().map(move |&(cap, weight)| (cap as f64).min(level * weight as f64));
            let (mut low, mut high) = (0.0, 3_000.0);
            for _ in 0..80 {
                let middle = (low + high) / 2.0;
                if at(middle).sum::<f64>() <= rest as f64 { low = middle } else { high = middle }
            }
            for ((part, real), (cap, _)) in found.iter().zip(at(low)).zip(&wants) {
                prop_assert!(part <= cap);
                prop_assert!((*part as f64 - real).abs() < 1.0 + 1e-6, "{part} for {real}");
            }
        }
    }
}
