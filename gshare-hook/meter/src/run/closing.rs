//! The end of a run's segment: when its measurement is worth two events, and what the measured time will prove.

use super::{MIXED, Open, Run, Taken};
use crate::{Measured, Segment};

/// A shorter segment is not worth ending at every synchronising call, in ns.
pub const WORTHWHILE_NS: u64 = 100_000;
/// GPU time, in ns, between two synchronising calls that end a segment, or [`UNMEASURED`] calls, while such calls wait about as
/// long as predicted: two events take microseconds. Only [`UNMEASURED_IN_DOUBT`] calls lie between them while the wait may be due
/// to the host. None do while calls wait longer still, since a kernel has become longer.
const MEASURED_EVERY_NS: u64 = 1_000_000;
/// The most synchronising calls between two calls that end a segment.
const UNMEASURED: u8 = 127;
/// The most such calls while their wait may be due to the host.
pub(super) const UNMEASURED_IN_DOUBT: u8 = 7;

/// Why a segment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The segment has reached its full size, or its stream is about to wait.
    Full,
    /// The thread will wait for credit.
    Waiting,
    /// The thread will synchronise with the device.
    Synchronising,
    /// Another stream needs its place.
    Taken,
}

/// A closed run: the host measures its segment, or settles it as predicted.
#[derive(Debug)]
pub struct Closed<M> {
    /// The first event of the segment, if one was recorded.
    pub mark: Option<M>,
    count: u32,
    taken: Taken,
    short: bool,
    behind_wait: bool,
}

impl<M> Closed<M> {
    /// The charge, in ns, if the run is settled as predicted.
    pub fn predicted(&self) -> u64 {
        self.taken.predicted + self.taken.carried
    }

    /// Whether an event after it would be the end of a segment.
    pub fn is_measurable(&self) -> bool {
        self.mark.is_some() && self.count > 0
    }
}

impl<M> Run<M> {
    /// Takes all open launches out; returns `None` if there are none. A segment with a mark is to be [measured](Self::measured), or
    /// settled as predicted if its end cannot be recorded. Launches without a mark are settled as predicted, too.
    pub fn close(&mut self, open: &Open, why: Ending, measures_all: bool) -> Option<Closed<M>> {
        self.awaited = open.total();
        if self.awaited == 0 && self.count == 0 && self.mark.is_none() {
            return None;
        }
        let (count, taken) = (core::mem::take(&mut self.count), open.take());
        let (mark, behind_wait) = (self.mark.take(), self.behind_wait);
        // The wait is over after most such calls. If it goes on, its later launches keep the token.
        self.behind_wait &= why != Ending::Synchronising;
        if mark.is_none() {
            self.skip = if measures_all { 0 } else { self.skip.saturating_sub(1) };
        }
        // Where no segment is to begin yet, the next launches may take the fast path.
        if self.skip == 0 || why != Ending::Synchronising {
            self.limit = 0;
        }
        // Programs with a synchronising call after every few short launches are measured only now and then.
        let worth = taken.predicted + taken.presumed >= WORTHWHILE_NS || measures_all;
        Some(Closed { mark, count, taken, short: why == Ending::Synchronising && !worth, behind_wait })
    }

    /// Whether the stream cannot have run dry in the segment: all launches were queued before the device could have finished the
    /// first launch, or even begun it. `behind`: the device has not passed the mark.
    pub fn is_dense(&self, closed: &Closed<M>, now: u64, behind: bool) -> bool {
        let queued = now.saturating_sub(self.opened) < self.first.saturating_add(self.lead.into());
        closed.taken.presumed == 0 && (queued || behind)
    }

    /// The end of the segment was recorded at `now`, and its measurement is under way. `behind` is as for
    /// [`is_dense`](Self::is_dense), before the end was recorded.
    pub fn measured(&mut self, closed: &Closed<M>, (dense, behind): (bool, bool), now: u64) -> Segment {
        let record = u64::from(self.record);
        self.skip_short(closed);
        let Taken { predicted, presumed, carried } = closed.taken;
        Segment {
            predicted,
            carried,
            presumed,
            launches: closed.count,
            row: (self.mixed == 0).then_some(self.row),
            dense,
            span: if behind { 0 } else { now.saturating_sub(self.opened) + record },
            gap: self.lead.into(),
            record,
            of: Measured::Run,
            opened: self.opened,
            behind_wait: closed.behind_wait,
        }
    }

    /// An event after the segment would hold up other streams, so its launches are to be measured alone.
    pub fn barred(&mut self, closed: &Closed<M>) {
        (self.mixed, self.begun) = (MIXED, self.begun | 3);
        self.skip_short(closed);
    }

    fn skip_short(&mut self, closed: &Closed<M>) {
        (self.skip, self.idle_skip) = if closed.short { (self.unmeasured, true) } else { (0, false) };
    }

    /// Charged cost of the open launches when the run was last closed, in ns.
    pub fn awaited(&self) -> u64 {
        self.awaited
    }

    /// At most `most` synchronising calls in a row go unmeasured from now on.
    pub fn skip_at_most(&mut self, most: u8) {
        (self.skip, self.unmeasured) = (self.skip.min(most), most);
    }
}

/// Whether to time a synchronising call, given the thread's number of such calls including this one.
pub fn is_timed(syncs: u64) -> bool {
    syncs.is_multiple_of(4)
}

/// The number of consecutive synchronising calls that need no measurement, given how long a call has waited (both times in ns). A
/// thread that sleeps in the call takes some tens of microseconds to come back from it.
pub fn unmeasured(predicted: u64, waited: u64) -> u8 {
    match waited {
        _ if waited <= 2 * predicted + 20_000 => u8::try_from(MEASURED_EVERY_NS / predicted.max(1))
            .map_or(UNMEASURED, |calls| calls.min(UNMEASURED)),
        _ if waited <= 8 * predicted + 200_000 => UNMEASURED_IN_DOUBT,
        _ => 0,
    }
}
