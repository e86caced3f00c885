//! How many threads are at something at the same time.

/// How many of some counters have moved within a sampling interval.
#[derive(Debug, Default)]
pub(crate) struct Moving {
    counts: Vec<u64>,
    since: u64,
    before: usize,
}

impl Moving {
    /// Length of a sampling interval, in ns.
    const INTERVAL: u64 = 50_000_000;

    /// Takes the counters as they are now; gives the larger number of those that have moved in this interval or the one before.
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
