//! The number of threads with the same kind of activity at the same time.

/// Counts the counters that have moved within a sampling interval.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    counts: Vec<u64>,
    since: u64,
    before: usize,
}

impl Moving {
    /// Length of a sampling interval, in ns.
    const INTERVAL: u64 = 50_000_000;

    /// Takes the present counters, and returns the number of counters moved in this interval or in the previous one, whichever is
    /// larger.
    pub(crate) fn look(&mut self, now: u64, counts: &[u64]) -> usize {
        let moved =
            counts.iter().enumerate().filter(|&(at, count)| self.counts.get(at) != Some(count)).count();
        let most = moved.max(self.before);
        if now.saturating_sub(self.since) > Self::INTERVAL {
            counts.clone_into(&mut self.counts);
            (self.since, self.before) = (now, moved);
        }
        most
    }
}
