//! How long a function stays warm after its last request.
//!
//! # Problem
//! Ten minutes for all functions (FluidFaaS, section 5.3) keep an hourly function warm in vain, and lose a function with requests
//! every eleven minutes. The gaps between a function's requests predict the next request.
//!
//! # Algorithm
//! A cold start counts as much as `break_even` of residency. Time since the last request is cut into bins, in quarters of an octave
//! from a second on. Being warm throughout a bin costs the waiting time within the bin, and saves a cold start for each gap that ends
//! there:
//! ```text
//! warm in a bin   <=>   gaps in it * break_even  >  sum over those of (gap - begin of the bin) + longer gaps * its width
//! ```
//! Bins are independent, so this choice has the least total over the function's past. The answer is a list of [`Stay`]s: a function
//! with a request every half hour is dropped at once, and fetched again just before. Fetching is worth a tenth of a cold start, so
//! stays separated by less are joined. A function with few gaps of its own also uses all functions' gaps, scaled to `PRIOR` gaps. A bin
//! of few gaps says little about just its own range: each gap counts half there, and a quarter in the bin to either side. Old gaps
//! fade: the histogram is halved when it holds `MEMORY` of them.
//!
//! # Example
//! Nine gaps of 1 minute and one of 60, break-even 20 minutes: the bins about 1 minute save 9 * 20 and cost less than 10 * 1.3; the
//! bins between cost their width and save nothing. Half of the hour's gap is in the bin from 60 to 68 minutes, which saves 20 / 2 and
//! costs at most 0.1 + 2.1. A quarter is in the next bin, up to 85 minutes: 20 / 4 against 2.1. The bin before costs 6.4 or more. The
//! function is therefore warm for a minute, then cold, and warm again before the hour.
//!
//! # Cost
//! O(bins) = 80 additions for a gap; 1.3 KB for a function.

use gshare_core::Duration;

/// How long functions stay warm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(tag = "policy", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum KeepAlive {
    /// The same time for all functions. The paper has 10 minutes.
    Fixed {
        /// How long.
        #[cfg_attr(feature = "serde", serde(rename = "keep_ns"))]
        keep: Duration,
    },
    /// A time computed from the function's gaps.
    Adaptive {
        /// Residency that one cold start is worth; more than 0.
        #[cfg_attr(feature = "serde", serde(rename = "break_even_ns"))]
        break_even: Duration,
        /// The longest time to keep a function warm.
        #[cfg_attr(feature = "serde", serde(rename = "longest_ns"))]
        longest: Duration,
    },
}

impl KeepAlive {
    /// The paper's ten minutes.
    pub const PAPER: Self = Self::Fixed { keep: Duration::from_secs(600) };

    /// The time before any gap is known.
    pub const fn initial(&self) -> Duration {
        match *self {
            Self::Fixed { keep } => keep,
            Self::Adaptive { break_even, longest } => {
                if break_even.as_nanos() < longest.as_nanos() {
                    break_even
                } else {
                    longest
                }
            }
        }
    }
}

impl Default for KeepAlive {
    /// Adaptive: a cold start is worth 20 minutes of residency, and no function waits warm for longer than a day.
    fn default() -> Self {
        Self::Adaptive { break_even: Duration::from_secs(1_200), longest: Duration::from_secs(24 * 3_600) }
    }
}

/// A stretch of time since the last request in which a function is warm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stay {
    /// Begin, after the last request.
    pub from: Duration,
    /// End, after the last request.
    pub to: Duration,
}

const BINS: usize = 80;
/// Weight of all functions' gaps, in gaps of the function's own.
const PRIOR: u64 = 4;
/// A histogram with this many gaps is halved.
const MEMORY: u64 = 512;

/// The gaps between requests, of one function or of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gaps {
    /// Number of gaps in each bin.
    counts: [u32; BINS],
    /// Sum of the gaps in each bin, in ms.
    sums: [u64; BINS],
    total: u64,
}

impl Default for Gaps {
    fn default() -> Self {
        Self { counts: [0; BINS], sums: [0; BINS], total: 0 }
    }
}

/// Quarter octaves above a second: 0 is up to a second.
fn bin(gap: Duration) -> usize {
    let millis = gap.as_nanos() / 1_000_000;
    if millis <= 1_000 {
        return 0;
    }
    let octave = (millis / 1_000).max(1).ilog2();
    // Linear within the octave, in quarters.
    let quarter = (millis * 4 / (1_000u64 << octave)).saturating_sub(4);
    (1 + 4 * octave as usize + usize::try_from(quarter).unwrap_or(3)).min(BINS - 1)
}

/// The longest gap of a bin, in ms.
fn edge(bin: usize) -> u64 {
    match bin {
        0 => 1_000,
        _ => {
            let (octave, quarter) = ((bin - 1) / 4, (bin - 1) as u64 % 4);
            (1_000u64 << octave) * (5 + quarter) / 4
        }
    }
}

/// Half of each gap stays in its bin, and a quarter goes to either neighbour; at the ends a missing neighbour's quarter stays
/// too.
fn smooth(bins: &[(u128, u128); BINS]) -> [(u128, u128); BINS] {
    std::array::from_fn(|bin| {
        let (count, sum) = bins[bin];
        let near = |other: usize| bins.get(other).map_or(count, |(count, _)| *count);
        let came = near(bin.wrapping_sub(1)) + near(bin + 1);
        // As if all moved gaps were in the middle of the bin.
        let begin = bin.checked_sub(1).map_or(0, edge);
        (2 * count + came, 2 * sum + came * u128::from(begin.midpoint(edge(bin))))
    })
}

impl Gaps {
    /// Counts one gap.
    pub fn add(&mut self, gap: Duration) {
        if self.total >= MEMORY {
            self.total = 0;
            for (count, sum) in self.counts.iter_mut().zip(&mut self.sums) {
                *sum = (*sum).checked_div(u64::from(*count)).unwrap_or(0) * u64::from(*count / 2);
                *count /= 2;
                self.total += u64::from(*count);
            }
        }
        let bin = bin(gap);
        self.counts[bin] += 1;
        self.sums[bin] += gap.as_nanos() / 1_000_000;
        self.total += 1;
    }

    /// Number of counted gaps.
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// The times at which a function with these gaps should be warm, among functions with the gaps `all`.
    pub fn stays(&self, all: &Self, policy: &KeepAlive) -> Vec<Stay> {
        let first = |to: Duration| {
            let stay = Stay { from: Duration::ZERO, to };
            if to.is_zero() { Vec::new() } else { vec![stay] }
        };
        let KeepAlive::Adaptive { break_even, longest } = *policy else { return first(policy.initial()) };
        if self.total == 0 && all.total == 0 {
            return first(policy.initial());
        }
        let fetch = Duration::from_nanos(break_even.as_nanos() / 10);
        let mut joined: Vec<Stay> = Vec::new();
        for stay in Self::paying(&smooth(&self.weights(all)), break_even, longest) {
            let before = joined.last().map_or(Duration::ZERO, |last| last.to);
            match (stay.from.saturating_sub(before) <= fetch, joined.last_mut()) {
                (true, Some(last)) => last.to = stay.to,
                (true, None) => joined.push(Stay { from: Duration::ZERO, to: stay.to }),
                (false, _) => joined.push(stay),
            }
        }
        joined
    }

    /// Number and sum of the gaps in each bin, own gaps and `all` together, in a common unit.
    fn weights(&self, all: &Self) -> [(u128, u128); BINS] {
        // All functions' gaps count as PRIOR gaps together, in units of 1/all.total.
        let scale = u128::from(all.total.max(1));
        let weigh = |bin: usize| {
            let own = (u128::from(self.counts[bin]), u128::from(self.sums[bin]));
            let others = (u128::from(all.counts[bin]), u128::from(all.sums[bin]));
            (own.0 * scale + others.0 * u128::from(PRIOR), own.1 * scale + others.1 * u128::from(PRIOR))
        };
        std::array::from_fn(weigh)
    }

    /// Runs of bins in which being warm costs less than it saves.
    fn paying(bins: &[(u128, u128); BINS], break_even: Duration, longest: Duration) -> Vec<Stay> {
        let break_even = u128::from(break_even.as_nanos() / 1_000_000);
        let longest = longest.as_nanos() / 1_000_000;
        let mut above: u128 = bins.iter().map(|(count, _)| count).sum();
        let mut stays: Vec<Stay> = Vec::new();
        let mut begin = 0;
        for (bin, &(count, sum)) in bins.iter().enumerate() {
            above -= count;
            let end = edge(bin);
            if end > longest {
                break;
            }
            let waited = sum.saturating_sub(count * u128::from(begin)) + above * u128::from(end - begin);
            if count * break_even > waited {
                let (from, to) = (Duration::from_millis(begin), Duration::from_millis(end));
                match stays.last_mut() {
                    Some(last) if last.to == from => last.to = to,
                    _ => stays.push(Stay { from, to }),
                }
            }
            begin = end;
        }
        stays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_cover_their_gaps() {
        for millis in [0, 1, 999, 1_000, 1_001, 1_250, 1_251, 1_999, 2_000, 59_000, 600_000, 86_400_000] {
            let bin = bin(Duration::from_millis(millis));
            assert!(millis <= edge(bin), "{millis} in {bin} up to {}", edge(bin));
            assert!(bin == 0 || millis + 1 >= edge(bin - 1), "{millis} in {bin} from {}", edge(bin - 1));
        }
    }

    fn seconds(stays: &[Stay]) -> Vec<(u64, u64)> {
        let seconds = |time: Duration| time.as_nanos() / 1_000_000_000;
        stays.iter().map(|stay| (seconds(stay.from), seconds(stay.to))).collect()
    }

    fn gaps(of: &[(usize, u64)]) -> Gaps {
        let mut gaps = Gaps::default();
        for &(count, seconds) in of {
            (0..count).for_each(|_| gaps.add(Duration::from_secs(seconds)));
        }
        gaps
    }

    /// The example of the module.
    #[test]
    fn a_function_is_warm_when_its_gaps_say_that_it_pays() {
        let (break_even, longest) = (Duration::from_secs(1_200), Duration::from_secs(7_200));
        let policy = KeepAlive::Adaptive { break_even, longest };
        let none = Gaps::default();
        let stays = gaps(&[(9, 60), (1, 3_600)]).stays(&none, &policy);
        assert_eq!(seconds(&stays), [(0, 80), (3_584, 5_120)]);
        assert_eq!(gaps(&[(1, 7_000), (20, 7_300)]).stays(&none, &policy), [], "it never pays");
    }

    /// The chosen set of bins costs no more than any other.
    #[test]
    fn bins_that_pay_are_those_of_least_cost() {
        let (break_even, longest) = (Duration::from_secs(900), Duration::from_secs(14_400));
        let all = [(7, 11), (2, 45), (9, 130), (1, 700), (3, 2_500), (2, 9_000)];
        let stays = Gaps::paying(&gaps(&all).weights(&Gaps::default()), break_even, longest);
        let cost = |stays: &[Stay]| {
            let mut cost = 0;
            for &(count, gap) in &all {
                let gap = Duration::from_secs(gap).as_nanos();
                let hit = stays.iter().any(|stay| stay.from.as_nanos() < gap && gap <= stay.to.as_nanos());
                let warm = |stay: &Stay| gap.min(stay.to.as_nanos()).saturating_sub(stay.from.as_nanos());
                let waited = stays.iter().map(warm).sum::<u64>();
                cost += count as u64 * (waited + if hit { 0 } else { break_even.as_nanos() });
            }
            cost
        };
        let least = cost(&stays);
        for bin in 0..BINS {
            let (from, to) = (if bin == 0 { 0 } else { edge(bin - 1) }, edge(bin));
            let (from, to) = (Duration::from_millis(from), Duration::from_millis(to));
            let inside = stays.iter().any(|stay| stay.from <= from && to <= stay.to);
            let other: Vec<Stay> = if inside {
                let cut = |stay: &Stay| {
                    let before = Stay { from: stay.from, to: from.min(stay.to) };
                    [before, Stay { from: to.max(stay.from), to: stay.to }]
                };
                stays.iter().flat_map(cut).filter(|stay| stay.from < stay.to).collect()
            } else {
                stays.iter().copied().chain([Stay { from, to }]).collect()
            };
            assert!(cost(&other) >= least, "bin {bin}");
        }
    }

    #[test]
    fn smoothing_moves_gaps_and_loses_none() {
        let before = gaps(&[(8, 1), (5, 60), (4, 3_600)]).weights(&Gaps::default());
        let after = smooth(&before);
        let count = |bins: &[(u128, u128); BINS]| bins.iter().map(|(count, _)| count).sum::<u128>();
        assert_eq!(count(&after), 4 * count(&before));
        let at = bin(Duration::from_secs(3_600));
        assert_eq!(
            [after[at - 1].0, after[at].0, after[at + 1].0],
            [4, 8, 4],
            "a quarter, half, a quarter of 4"
        );
    }

    #[test]
    fn without_gaps_of_its_own_it_has_those_of_all() {
        let policy = KeepAlive::default();
        let all = gaps(&[(100, 30)]);
        assert_eq!(seconds(&Gaps::default().stays(&all, &policy)), [(0, 40)]);
        let keep = |stays: Vec<Stay>| stays[0].to;
        assert_eq!(keep(Gaps::default().stays(&Gaps::default(), &policy)), policy.initial());
        assert_eq!(keep(all.stays(&all, &KeepAlive::PAPER)), Duration::from_secs(600));
    }

    #[test]
    fn old_gaps_fade() {
        let gaps = gaps(&[(2_000, 2), (3_000, 500)]);
        assert!(gaps.total() <= MEMORY);
        let stays = gaps.stays(&Gaps::default(), &KeepAlive::default());
        assert!(stays.last().is_some_and(|stay| stay.to >= Duration::from_secs(500)), "{stays:?}");
    }
}
