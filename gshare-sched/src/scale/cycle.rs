//! The shortest kernel launching cycle of late, per model and batch size.
//!
//! A KLC is informative only beside an undisturbed KLC of the same work. So minima are kept apart by model and by **bucket** of
//! the batch size (sizes of the same power of two, rounded up). They also age: only the last [`KEPT`] cycles of at most
//! [`MAX_AGE`] count, so a minimum from a cold or lucky run is forgotten.

use gshare_core::{Duration, ModelId, Timestamp};

/// Cycles kept per model and bucket.
const KEPT: usize = 20;

/// Greatest age of a cycle.
const MAX_AGE: Duration = Duration::from_secs(30);

/// Pairs of model and bucket per client; the pair unused for longest makes room. Serving one model at all batch sizes up to
/// 32,768 takes 16.
const MAX_KINDS: usize = 16;

#[derive(Debug)]
struct Kind {
    model: ModelId,
    bucket: u32,
    used: Timestamp,
    /// A ring of each cycle's end and its length in microseconds.
    cycles: Vec<(Timestamp, u64)>,
    next: usize,
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
    /// Whether the others should step back for such a cycle: at first, and every [`MAX_AGE`] until a clean one ends.
    pub(super) asks: bool,
}

/// The cycles of one client.
#[derive(Debug, Default)]
pub(super) struct Cycles {
    kinds: Vec<Kind>,
}

impl Cycles {
    pub(super) fn clear(&mut self) {
        self.kinds.clear();
    }

    /// Takes in a cycle of `micros` (more than 0) and answers `T_current / T_min` in basis points: at least 10 000.
    pub(super) fn ratio(&mut self, now: Timestamp, model: ModelId, batch: u32, micros: u64) -> u64 {
        let kind = self.kind(now, model, batch);
        kind.keep(now, micros);
        let recent = kind.cycles.iter().filter(|(at, _)| now.saturating_since(*at) <= MAX_AGE);
        over(micros, recent.map(|(_, micros)| *micros).min().unwrap_or(micros))
    }

    /// Judges a cycle where neighbours lengthen cycles: only a `clean` cycle, or one shorter than all before, becomes a minimum,
    /// and minima do not age. With `may_ask` the others can be asked to step back now.
    pub(super) fn judge(
        &mut self,
        now: Timestamp,
        model: ModelId,
        batch: u32,
        micros: u64,
        clean: bool,
        may_ask: bool,
    ) -> Judged {
        let kind = self.kind(now, model, batch);
        let known = kind.cycles.iter().map(|(_, micros)| *micros).min();
        if clean || known.is_none_or(|known| micros < known) {
            kind.keep(now, micros);
        }
        kind.sure |= clean;
        let asks =
            may_ask && !kind.sure && kind.asked.is_none_or(|asked| now.saturating_since(asked) >= MAX_AGE);
        if asks {
            kind.asked = Some(now);
        }
        Judged { ratio: known.map(|known| over(micros, known)), sure: kind.sure, asks }
    }

    /// The record of a model at a batch size.
    fn kind(&mut self, now: Timestamp, model: ModelId, batch: u32) -> &mut Kind {
        let bucket = batch.checked_next_power_of_two().map_or(32, u32::trailing_zeros);
        let found = self.kinds.iter().position(|kind| kind.model == model && kind.bucket == bucket);
        let index = found.unwrap_or_else(|| {
            if self.kinds.len() == MAX_KINDS {
                let oldest = self.kinds.iter().enumerate().min_by_key(|(_, kind)| kind.used);
                let oldest = oldest.map_or(0, |(index, _)| index);
                self.kinds.remove(oldest);
            }
            let (cycles, next) = (Vec::new(), 0);
            self.kinds.push(Kind { model, bucket, used: now, cycles, next, sure: false, asked: None });
            self.kinds.len() - 1
        });
        let kind = &mut self.kinds[index];
        kind.used = now;
        kind
    }
}

impl Kind {
    fn keep(&mut self, now: Timestamp, micros: u64) {
        if self.cycles.len() < KEPT {
            self.cycles.push((now, micros));
        } else {
            self.cycles[self.next] = (now, micros);
            self.next = (self.next + 1) % KEPT;
        }
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

    const MODEL: ModelId = ModelId::new(0);
    const fn at(secs: u64) -> Timestamp {
        Timestamp::from_millis(secs * 1_000)
    }

    #[test]
    fn a_minimum_is_forgotten_after_twenty_cycles() {
        let mut cycles = Cycles::default();
        assert_eq!(cycles.ratio(at(0), MODEL, 1, 100), 10_000, "the first is its own minimum");
        for _ in 0..19 {
            assert_eq!(cycles.ratio(at(0), MODEL, 1, 200), 20_000);
        }
        assert_eq!(cycles.ratio(at(0), MODEL, 1, 200), 10_000);
    }

    #[test]
    fn a_minimum_is_forgotten_after_thirty_seconds() {
        let mut cycles = Cycles::default();
        cycles.ratio(at(0), MODEL, 1, 100);
        assert_eq!(cycles.ratio(at(30), MODEL, 1, 200), 20_000);
        assert_eq!(cycles.ratio(at(31), MODEL, 1, 200), 10_000);
    }

    #[test]
    fn models_and_batch_sizes_have_minima_of_their_own() {
        let mut cycles = Cycles::default();
        cycles.ratio(at(0), MODEL, 1, 100);
        assert_eq!(cycles.ratio(at(0), MODEL, 8, 500), 10_000);
        assert_eq!(cycles.ratio(at(0), MODEL, 5, 1_000), 20_000, "5 to 8 are one bucket");
        assert_eq!(cycles.ratio(at(0), MODEL, 9, 1_000), 10_000);
        assert_eq!(cycles.ratio(at(0), ModelId::new(1), 1, 900), 10_000);
        assert_eq!(cycles.ratio(at(0), MODEL, u32::MAX, 7), 10_000);
    }

    #[test]
    fn beside_neighbours_a_shorter_cycle_or_a_clean_one_becomes_the_minimum() {
        let mut cycles = Cycles::default();
        let mut judge = |secs, micros, clean| cycles.judge(at(secs), MODEL, 1, micros, clean, true);
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

    #[test]
    fn a_client_with_ever_new_models_takes_bounded_memory() {
        let mut cycles = Cycles::default();
        for model in 0..1_000 {
            cycles.ratio(at(u64::from(model)), ModelId::new(model), 1, 100);
        }
        assert_eq!(cycles.kinds.len(), MAX_KINDS);
        assert_eq!(cycles.ratio(at(1_000), ModelId::new(999), 1, 200), 20_000, "the newest is kept");
    }
}
