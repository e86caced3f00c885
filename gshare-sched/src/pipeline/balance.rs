//! The balance of the stages of a pipeline.

use core::cmp::Ordering;
use gshare_core::Duration;

/// The balance of a pipeline's stages by their times; ordered by CV, then by fewer stages.
///
/// With the times `t` of `k` stages, `T = sum t` and `S = sum t²`:
/// ```text
/// mean = T/k      var = S/k - (T/k)²      CV² = var / mean² = k*S / T² - 1
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Balance {
    /// Number of stages.
    pub stages: u32,
    /// Sum of their times in ns.
    pub total: u64,
    /// Sum of the squares of their times in ns².
    pub squares: u128,
}

impl Balance {
    /// The balance of `stages` stages from the sum of their times and of the squares of their times; all three are above 0.
    pub const fn new(stages: u32, total: u64, squares: u128) -> Self {
        Self { stages, total, squares }
    }

    /// The balance of stages with these times.
    pub fn of(times: impl IntoIterator<Item = Duration>) -> Self {
        let mut balance = Self { stages: 0, total: 0, squares: 0 };
        for time in times {
            balance.stages += 1;
            balance.total += time.as_nanos();
            balance.squares += u128::from(time.as_nanos()).pow(2);
        }
        balance
    }

    /// The coefficient of variation, to show.
    #[expect(clippy::cast_precision_loss, reason = "to show")]
    pub fn cv(&self) -> f64 {
        // The variance times k² in integers: no cancellation near 0.
        let (k, total) = (u128::from(self.stages), u128::from(self.total));
        let spread = (k * self.squares).saturating_sub(total * total);
        (spread as f64).sqrt() / self.total.max(1) as f64
    }

    /// Compares the CVs alone, exactly.
    pub fn cmp_cv(&self, other: &Self) -> Ordering {
        let (a, b) = (u128::from(self.stages) * self.squares, u128::from(other.stages) * other.squares);
        if self.total == other.total {
            return a.cmp(&b);
        }
        let square = |total: u64| u128::from(total).pow(2);
        cmp_fractions((a, square(self.total)), (b, square(other.total)))
    }
}

impl Ord for Balance {
    fn cmp(&self, other: &Self) -> Ordering {
        self.cmp_cv(other)
            .then(self.stages.cmp(&other.stages))
            .then(self.total.cmp(&other.total))
            .then(self.squares.cmp(&other.squares))
    }
}

impl PartialOrd for Balance {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Compares two fractions without multiplying: by whole part, then by the reciprocals of the rest (Euclid). A denominator of 0
/// counts as infinity.
fn cmp_fractions((mut a, mut b): (u128, u128), (mut c, mut d): (u128, u128)) -> Ordering {
    let mut flipped = false;
    loop {
        let order = match (b == 0, d == 0) {
            (true, true) => return Ordering::Equal,
            (true, false) => Ordering::Greater,
            (false, true) => Ordering::Less,
            (false, false) => (a / b).cmp(&(c / d)),
        };
        if order != Ordering::Equal {
            return if flipped { order.reverse() } else { order };
        }
        // a/b = q + r/b: r/b and r'/d compare as d/r' and b/r do.
        (a, b, c, d) = (b, a % b, d, c % d);
        flipped = !flipped;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn balance(times: &[u64]) -> Balance {
        Balance::of(times.iter().map(|&ns| Duration::from_nanos(ns)))
    }

    #[test]
    fn cv_is_std_over_mean_and_compares_exactly() {
        assert!(balance(&[7, 7, 7]).cv() == 0.0 && balance(&[9]).cv() == 0.0);
        assert!((balance(&[1, 3]).cv() - 0.5).abs() < 1e-15);
        assert_eq!(balance(&[1, 3]).cmp_cv(&balance(&[1_000, 3_000])), Ordering::Equal, "CV has no unit");
        assert!(balance(&[1, 3]) > balance(&[2, 3]));
        assert!(balance(&[5]) < balance(&[5, 5]), "fewer stages first");
        // Two balances with CVs that are equal as doubles.
        let (near, far) = (balance(&[1 << 40, (1 << 40) + 1]), balance(&[1 << 40, (1 << 40) + 2]));
        assert_eq!(near.cmp_cv(&far), Ordering::Less);
        let hour = gshare_core::dag::MAX_TIME.as_nanos();
        let worst = balance(&[hour; 128]);
        assert_eq!(worst.cmp_cv(&balance(&[1])), Ordering::Equal, "the largest DAG stays within 128 bits");
    }

    #[test]
    fn fractions_compare_as_their_cross_products() {
        for (a, b, c, d) in (0..6u128.pow(4)).map(|n| (n % 6, n / 6 % 6, n / 36 % 6, n / 216)) {
            if b != 0 && d != 0 {
                assert_eq!(cmp_fractions((a, b), (c, d)), (a * d).cmp(&(c * b)), "{a}/{b} {c}/{d}");
            }
        }
        let max = u128::MAX;
        assert_eq!(cmp_fractions((max - 1, max), (max - 2, max - 1)), Ordering::Greater);
    }
}
