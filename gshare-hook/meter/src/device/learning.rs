//! Corrects the predicted cost of a function by measurements.
//!
//! # Problem
//! A measured interval is an upper bound of the time of its launches: the stream may have run dry in between, another process's
//! turn may have ended or begun beside it, and other streams may have worked at the same time. If every interval were believed, a
//! process would pay for others. If none were, a kernel that becomes longer would be undercharged for ever.
//!
//! # Algorithm
//! A sample is the interval divided by its number of launches. Where launch calls may have kept the device waiting, any cost between
//! the sample with and without these calls explains it. A sample below the known cost is believed at once. A sample above it is
//! believed
//! - at once, if the device worked all the while ([`Work`]) and the interval cannot hold other work's time;
//! - when [`SUSPECTS`](crate::cost::SUSPECTS) in a row agree, if the device worked all the while but another turn's time may be in
//!   the interval ([`Suspicion`]); when four times as many agree, if the work ran in another process's turn, after a wait of its
//!   stream;
//! - never, if the stream may have run dry. The excess is summed, and once it passes a bound, the next launch of the row is
//!   measured alone. The bound doubles while such measurements only confirm the known cost, so they stay rare.
//!
//! A short launch is measured alone once after its cost became known, since its samples may be the time of the launch call.

use std::collections::{BTreeMap, BTreeSet};

use super::turn::REMAINDER;
use crate::cost::{CostTable, Row, Suspicion, surely};
use crate::segment::{Measured, SHORT_NS, Segment, Work};

/// Tolerance, in ns, beyond a quarter of a known cost, within which a launch measured alone confirms it.
const LEAST: u64 = 1_000;
/// Unexplained time of segments after which a launch is measured alone, in ns: at first, and after many confirmations.
const UNPROVEN: u64 = 1_000_000;
const MOST_UNPROVEN: u64 = 16_000_000;

/// Knowledge about the samples of one device's rows, beside their costs.
#[derive(Debug)]
pub(crate) struct Learning {
    /// Rows with last samples above their cost, which may have been too long.
    suspicions: BTreeMap<Row, Suspicion>,
    /// Rows with a launch that was measured alone because of a doubt.
    proven: BTreeSet<Row>,
    /// The time by which segments exceeded their charge since a launch was last measured alone, and its bound, in ns.
    unproven: u64,
    bound: u64,
}

/// The circumstances of one measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) work: Work,
    /// The part of the work's time not taken by other segments, in ns.
    pub(crate) room: u64,
    /// Whether the interval may hold part of another process's turn.
    pub(crate) shared: bool,
    /// Whether the work ran [behind a wait](Segment::behind_wait) and in another process's turn, if that process had work.
    pub(crate) outside: bool,
    /// Whether several threads launch, so the interval may hold launches of other threads.
    pub(crate) crowded: bool,
}

impl Learning {
    pub(crate) fn new() -> Self {
        Self { suspicions: BTreeMap::new(), proven: BTreeSet::new(), unproven: 0, bound: UNPROVEN }
    }

    /// Takes one measurement of launches of `row`.
    pub(crate) fn take(&mut self, costs: &CostTable, segment: &Segment, row: Row, sample: Sample) {
        self.learn(costs, segment, row, sample);
        self.doubt_unproven(costs, segment, row, sample);
    }

    fn learn(&mut self, costs: &CostTable, segment: &Segment, row: Row, sample: Sample) {
        let Sample { work: Work { length, most, whole }, room, shared, outside, crowded } = sample;
        let launches = u64::from(segment.launches.max(1));
        let each = length / launches;
        let Some(known) = costs.known(row) else {
            self.suspicions.insert(row, Suspicion::of_first(shared || !whole));
            self.proven.remove(&row);
            return costs.learn(row, each);
        };
        let held = segment.of == Measured::Held;
        let asked = matches!(segment.of, Measured::Alone | Measured::Held) && costs.is_doubted(row);
        // Where calls may have kept the device waiting, any cost between the two lengths explains the interval. A short launch that
        // is measured alone without a hold is on a stream that cannot be kept waiting: nothing better will come.
        let each = if asked { each } else { known.clamp(each, most / launches) };
        if asked || held {
            self.proven.insert(row);
        }
        if asked {
            costs.not_measured(row);
            let confirmed = !whole || each <= known + known / 4 + LEAST;
            self.bound = if confirmed { (2 * self.bound).min(MOST_UNPROVEN) } else { UNPROVEN };
        }
        // With several streams that are never empty, launches of others lie between these.
        let mingled = crowded && segment.of == Measured::Run && whole && self.proven.contains(&row);
        if asked && !shared && (whole || each <= known) || held && each <= known {
            self.suspicions.remove(&row);
            costs.set(row, each);
            costs.learn(row, each);
        } else if each > known && whole && shared && !mingled {
            match self.suspicions.entry(row).or_default().add(surely(each, REMAINDER), outside) {
                Some(proven) => costs.set(row, proven.max(known)),
                // The doubt stays, so the measurements that must agree follow each other.
                None if asked && held => costs.doubt(row),
                None => {}
            }
        } else if each > known && (!whole || mingled) {
            // The stream may have run dry in between, or the kernel has become longer: now and then a measurement decides.
            self.unproven += room.saturating_sub(known * launches);
            if self.unproven > self.bound {
                self.unproven = 0;
                costs.doubt(row);
            }
        } else {
            match self.suspicions.remove(&row) {
                Some(Suspicion { cost_itself: true, .. }) if each < known => costs.set(row, each),
                _ => costs.learn(row, each),
            }
        }
    }

    /// Doubts the cost of a short launch, which may be the time of its call, until one launch was measured alone to find out.
    fn doubt_unproven(&self, costs: &CostTable, segment: &Segment, row: Row, sample: Sample) {
        let short = costs.known(row).is_some_and(|cost| cost <= SHORT_NS);
        let of_calls = !sample.work.whole || segment.launches == 1 || sample.crowded;
        if short && of_calls && !self.proven.contains(&row) && !costs.is_doubted(row) {
            costs.doubt(row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A launch measured alone either confirms the known cost, and the next doubt comes later, or it does not.
    #[test]
    fn only_a_measurement_close_to_the_known_cost_confirms_it() {
        for (measured, bound) in [(100_000, 2 * UNPROVEN), (125_000, 2 * UNPROVEN), (127_000, UNPROVEN)] {
            let (mut learning, costs) = (Learning::new(), CostTable::new());
            let (row, _) = costs.find(1, 0);
            costs.learn(row, 100_000);
            costs.doubt(row);
            let segment = Segment::of_one(row, 100_000, Measured::Alone, 0);
            let work = Work { length: measured, most: measured, whole: true };
            learning.take(
                &costs,
                &segment,
                row,
                Sample { work, room: 0, shared: false, outside: false, crowded: false },
            );
            assert_eq!(learning.bound, bound, "{measured} ns");
        }
    }
}
