//! When a function that takes several requests at once gets its next batch.
//!
//! # Rule
//! An instance works on one batch at a time, of at most its point's size. While it works, requests gather in the function's queue.
//! For an instance that is idle:
//! 1. a full batch goes at once;
//! 2. a request alone goes at once: nobody else waits, so the device would idle for nothing;
//! 3. more than one, but no full batch, wait for the next request, which is expected one mean gap after the last arrival. They wait
//!    no longer than that, no longer than a batch takes, and not beyond the slack of the oldest (its SLO, less the time of a batch and
//!    a quarter). A function without an SLO has no slack.
//!
//! So batches are full under load, and a lone request is never late for the sake of others.

use gshare_core::{Duration, RequestId, Timestamp};
use std::collections::BTreeSet;

/// Arrivals of a function: the last one, and the mean gap between them, which forgets an eighth with each.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrivals {
    last: Option<Timestamp>,
    gap: Option<Duration>,
}

impl Arrivals {
    pub(super) fn came(&mut self, now: Timestamp) {
        if let Some(last) = self.last.replace(now) {
            let gap = now.saturating_since(last).as_nanos();
            let mean = self.gap.map_or(gap, |mean| mean.as_nanos() - mean.as_nanos() / 8 + gap / 8);
            self.gap = Some(Duration::from_nanos(mean));
        }
    }

    /// The time at which the next request is expected.
    fn next(&self) -> Option<Timestamp> {
        self.last.zip(self.gap).map(|(last, gap)| last.saturating_add(gap))
    }
}

/// What an idle instance gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Batch {
    /// This many of the waiting requests, now.
    Now(usize),
    /// Nothing before this time, or before another request comes.
    Gathers(Timestamp),
}

/// The rule of this module, for an idle instance that takes `size` requests at once in the time `takes`.
pub(super) fn next(
    now: Timestamp,
    waiting: &BTreeSet<(Timestamp, RequestId)>,
    (size, takes): (usize, Duration),
    slo: Option<Duration>,
    arrivals: &Arrivals,
) -> Batch {
    let all = Batch::Now(waiting.len().min(size));
    let (Some(slo), Some(expected)) = (slo, arrivals.next()) else { return all };
    let Some((oldest, _)) = waiting.first().filter(|_| (2..size).contains(&waiting.len())) else {
        return all;
    };
    let slack = slo.saturating_sub(takes.saturating_add(Duration::from_nanos(takes.as_nanos() / 4)));
    let most = now.saturating_add(takes).min(oldest.saturating_add(slack));
    if now < expected && expected < most { Batch::Gathers(expected) } else { all }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_millis(ms)
    }

    /// Requests arrived at these times; the batch of an instance that takes 8 in 20 ms, for an SLO of 100 ms.
    fn batch(now: u64, came: &[u64], slo: Option<u64>) -> Batch {
        let (mut arrivals, mut waiting) = (Arrivals::default(), BTreeSet::new());
        for (number, came) in (0..).zip(came) {
            arrivals.came(at(*came));
            waiting.insert((at(*came), RequestId::new(number)));
        }
        next(at(now), &waiting, (8, ms(20)), slo.map(ms), &arrivals)
    }

    #[test]
    fn a_full_batch_and_a_request_alone_go_at_once() {
        assert_eq!(batch(0, &[0], Some(100)), Batch::Now(1));
        assert_eq!(batch(9, &[1, 2, 3, 4, 5, 6, 7, 8, 9], Some(100)), Batch::Now(8));
    }

    #[test]
    fn some_wait_while_the_next_one_is_expected_soon_and_within_the_oldest_ones_slack() {
        assert_eq!(batch(10, &[0, 10], Some(100)), Batch::Gathers(at(20)), "a gap after the last");
        assert_eq!(batch(20, &[0, 10], Some(100)), Batch::Now(2), "it did not come");
        assert_eq!(
            batch(25, &[0, 25], Some(200)),
            Batch::Now(2),
            "the next one is further away than a batch takes"
        );
        assert_eq!(
            batch(65, &[0, 15, 30, 45, 60], Some(100)),
            Batch::Now(5),
            "expected at 75 ms, where the slack ends"
        );
        assert_eq!(batch(10, &[0, 10], None), Batch::Now(2), "no SLO, no slack");
        assert_eq!(batch(10, &[0, 10], Some(20)), Batch::Now(2), "a batch takes all of the SLO");
    }
}
