//! The shortest kernel launching cycle, per batch size.
//!
//! A KLC is informative only beside an undisturbed KLC of the same work. So minima are kept apart by **bucket** of the batch size (sizes of
//! the same power of two, rounded up). Neighbours lengthen cycles, so only a clean cycle, or one shorter than all before, becomes a
//! minimum. The last [`KEPT`] of them count, so a minimum from a lucky run is forgotten; they do not age.

use gshare_core::{Duration, Timestamp};
use std::collections::{BTreeMap, VecDeque};

/// Cycles kept per bucket.
const KEPT: usize = 20;

/// The others are asked to step back again after this time.
const ASKS_AGAIN: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
struct Bucket {
    /// The lengths of cycles in microseconds, the oldest first.
    cycles: VecDeque<u64>,
    /// Whether a cycle without a neighbour at work is known.
    sure: bool,
    /// The last time the others were asked to step back for such a cycle.
    asked: Option<Timestamp>,
}

/// Judgement of a cycle that ran beside neighbours.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    /// `T_current / T_min` in basis points; none for the first of its kind.
    pub(super) ratio: Option<u64>,
    /// Whether `T_min` comes from a cycle with no neighbour at work.
    pub(super) sure: bool,
    /// Whether the others should step back for such a cycle: at first, and every [`ASKS_AGAIN`] until a clean one ends.
    pub(super) asks: bool,
}

/// The cycles of one client, by the power of two of their batch sizes.
#[derive(Debug, Default)]
pub(super) struct Cycles(BTreeMap<u32, Bucket>);

impl Cycles {
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Judges a cycle of `micros` (more than 0). With `may_ask` the others can be asked to step back now.
    pub(super) fn judge(
        &mut self,
        now: Timestamp,
        batch: u32,
        micros: u64,
        clean: bool,
        may_ask: bool,
    ) -> Judged {
        let power = batch.checked_next_power_of_two().map_or(32, u32::trailing_zeros);
        let Bucket { cycles, sure, asked } = self.0.entry(power).or_default();
        let known = cycles.iter().copied().min();
        if clean || known.is_none_or(|known| micros < known) {
            if cycles.len() == KEPT {
                cycles.pop_front();
            }
            cycles.push_back(micros);
        }
        *sure |= clean;
        let asks = may_ask && !*sure && asked.is_none_or(|asked| now.saturating_since(asked) >= ASKS_AGAIN);
        if asks {
            *asked = Some(now);
        }
        Judged { ratio: known.map(|known| over(micros, known)), sure: *sure, asks }
    }
}

/// `micros / shortest` in basis points, at least 10 000.
fn over(micros: u64, shortest: u64) -> u64 {
    let ratio = u128::from(micros) * 10_000 / u128::from(shortest.clamp(1, micros.max(1)));
    u64::try_from(ratio).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(secs: u64) -> Timestamp {
        Timestamp::from_millis(secs * 1_000)
    }

    #[test]
    fn a_minimum_is_forgotten_after_twenty_clean_cycles() {
        let mut cycles = Cycles::default();
        let mut ratio = |batch, micros| cycles.judge(at(0), batch, micros, true, false).ratio;
        assert_eq!(ratio(1, 100), None, "the first of its kind");
        for _ in 0..20 {
            assert_eq!(ratio(1, 200), Some(20_000));
        }
        assert_eq!(ratio(1, 200), Some(10_000));
        assert_eq!(ratio(2, 300), None, "another batch size");
        assert_eq!((ratio(3, 700), ratio(4, 700)), (None, Some(10_000)), "the same power of two");
        assert_eq!(ratio(u32::MAX, 7), None);
    }

    #[test]
    fn beside_neighbours_a_shorter_cycle_or_a_clean_one_becomes_the_minimum() {
        let mut cycles = Cycles::default();
        let mut judge = |secs, micros, clean| cycles.judge(at(secs), 1, micros, clean, true);
        let first = judge(0, 200, false);
        assert_eq!((first.ratio, first.sure, first.asks), (None, false, true));
        assert_eq!(judge(1, 100, false).ratio, Some(10_000), "no neighbour makes a cycle shorter");
        let later = judge(29, 150, false);
        assert_eq!((later.ratio, later.asks), (Some(15_000), false), "asked once in 30 s");
        assert!(judge(30, 150, false).asks);
        let clean = judge(90, 110, true);
        assert_eq!((clean.ratio, clean.sure, clean.asks), (Some(11_000), true, false));
        assert_eq!(judge(10_000, 150, false).ratio, Some(15_000), "it does not age");
    }
}
