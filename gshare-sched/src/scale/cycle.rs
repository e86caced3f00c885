//! The shortest kernel launching cycle of late, per model and batch size.
//!
//! A KLC says something only beside the KLC of the same work when nobody was in the way. So minima are kept apart by
//! model and by **bucket** of the batch size (sizes of the same power of two, rounded up), and they age: only the last
//! [`KEPT`] cycles of at most [`MAX_AGE`] count, so a minimum from a cold or lucky run is forgotten.

use gshare_core::{Duration, ModelId, Timestamp};

/// Cycles that are remembered per model and bucket.
const KEPT: usize = 20;

/// For how long.
const MAX_AGE: Duration = Duration::from_secs(30);

/// Pairs of model and bucket per client; the one unused for longest makes room. Serving one model at all batch sizes up
/// to 32,768 takes 16.
const MAX_KINDS: usize = 16;

#[derive(Debug)]
struct Kind {
    model: ModelId,
    bucket: u32,
    used: Timestamp,
    /// A ring: when each cycle ended, and its length in microseconds.
    cycles: Vec<(Timestamp, u64)>,
    next: usize,
}

/// The cycles of one client.
#[derive(Debug, Default)]
pub(super) struct Cycles {
    kinds: Vec<Kind>,
}

impl Cycles {
    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        self.kinds.clear();
    }

    /// Takes a cycle of `micros` (more than 0) in and answers `T_current / T_min` in basis points: at least 10 000.
    pub(super) fn ratio(&mut self, now: Timestamp, model: ModelId, batch: u32, micros: u64) -> u64 {
        self.judge(now, model, batch, micros, true).unwrap_or(10_000)
    }

    /// The same, but only a cycle that `counts` may become a minimum. `None`: there is nothing to compare it with.
    pub(super) fn judge(
        &mut self,
        now: Timestamp,
        model: ModelId,
        batch: u32,
        micros: u64,
        counts: bool,
    ) -> Option<u64> {
        let bucket = batch.checked_next_power_of_two().map_or(32, u32::trailing_zeros);
        let found = self.kinds.iter().position(|kind| kind.model == model && kind.bucket == bucket);
        let index = found.unwrap_or_else(|| {
            if self.kinds.len() == MAX_KINDS {
                let oldest = self.kinds.iter().enumerate().min_by_key(|(_, kind)| kind.used);
                let oldest = oldest.map_or(0, |(index, _)| index);
                self.kinds.remove(oldest);
            }
            self.kinds.push(Kind { model, bucket, used: now, cycles: Vec::new(), next: 0 });
            self.kinds.len() - 1
        });
        let kind = &mut self.kinds[index];
        kind.used = now;
        if counts {
            if kind.cycles.len() < KEPT {
                kind.cycles.push((now, micros));
            } else {
                kind.cycles[kind.next] = (now, micros);
                kind.next = (kind.next + 1) % KEPT;
            }
        }
        let recent = kind.cycles.iter().filter(|(at, _)| now.saturating_since(*at) <= MAX_AGE);
        let shortest = recent.map(|(_, micros)| *micros).min()?.min(micros);
        let ratio = u128::from(micros) * 10_000 / u128::from(shortest.max(1));
        Some(u64::try_from(ratio).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelId = ModelId(0);
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
        assert_eq!(cycles.ratio(at(0), ModelId(1), 1, 900), 10_000);
        assert_eq!(cycles.ratio(at(0), MODEL, u32::MAX, 7), 10_000);
    }

    #[test]
    fn a_client_with_ever_new_models_takes_bounded_memory() {
        let mut cycles = Cycles::default();
        for model in 0..1_000 {
            cycles.ratio(at(u64::from(model)), ModelId(model), 1, 100);
        }
        assert_eq!(cycles.kinds.len(), MAX_KINDS);
        assert_eq!(cycles.ratio(at(1_000), ModelId(999), 1, 200), 20_000, "the newest is kept");
    }
}
