//! Moves of processes' memory: the times between them, and the waits for memory in host memory.

use super::NodeBook;
use gshare_core::{Duration, Timestamp};

/// A residence in terms of the return before it, and the shortest residence, as the node promises them.
const RESIDENCE: u64 = 8;
const SHORTEST_RESIDENCE: Duration = Duration::from_millis(100);
/// The part of a move that is no copy: a turn's end, a recall of slack and frames; and the frames of a return.
const MOVE: Duration = Duration::from_millis(260);
const FRAMES: Duration = Duration::from_micros(500);
/// The longest delay before another attempt of a process to come back by itself, and a look.
const TRY_AGAIN: Duration = Duration::from_millis(1_700);
/// The time until a process is ordered again whose move failed, and its next move.
const MOVE_AGAIN: Duration = Duration::from_millis(1_500);

impl NodeBook {
    /// A process hears an order to park.
    pub(in crate::node) fn must_go(&mut self, now: Timestamp, process: usize) {
        self.processes[process].away.get_or_insert(now);
    }

    /// A thread waits for memory in host memory.
    pub(in crate::node) fn misses(&mut self, now: Timestamp, process: usize) {
        self.processes[process].misses.get_or_insert(now);
    }

    /// A move has failed, so the node orders another victim, or this one later.
    pub(in crate::node) fn move_failed(&mut self, now: Timestamp, process: usize) {
        let gpu = self.instances[self.processes[process].instance].gpu;
        self.excuse(gpu, now, MOVE_AGAIN);
    }

    /// A return has failed for want of room.
    pub(in crate::node) fn return_failed(&mut self, process: usize) {
        self.processes[process].tries_again = true;
    }

    /// A process on the device obeys no order for `lasts`.
    pub(in crate::node) fn keeps_memory(&mut self, gpu: usize, from: Timestamp, lasts: Duration) {
        if self.gpus[gpu].copies.1 > 0 {
            self.excuse(gpu, from, lasts.saturating_add(MOVE));
        }
    }

    /// The memory of a process is on the device: it has come back after a copy, or has stayed.
    pub(in crate::node) fn is_here(&mut self, now: Timestamp, process: usize, copy: Option<Duration>) {
        let window = self.window;
        let entry = &mut self.processes[process];
        let number = entry.instance;
        let (away, misses) = (entry.away.take(), entry.misses.take());
        let before = copy.and_then(|copy| entry.returned.replace((now, copy)));
        if let Some(from) = away {
            self.instances[number].parked.push((from, now.saturating_add(window)));
        }
        self.figures.returns += u64::from(copy.is_some());
        if let Some((at, copy)) = before
            && now.saturating_since(at) < copy.saturating_mul(RESIDENCE)
        {
            self.fail(now, "parking", || {
                format!("process {process} is back from {at} again, after a copy of {copy}")
            });
        }
        if let Some(since) = misses {
            self.judge_miss(now, process, since);
        }
        self.processes[process].tries_again = false;
    }

    /// The longest allowed wait for parked memory.
    pub(super) fn away_bound(&self, process: usize) -> Duration {
        let gpu = &self.gpus[self.instances[self.processes[process].instance].gpu];
        let (copy, count) = gpu.copies;
        let residence = copy.saturating_add(FRAMES).saturating_mul(2 * RESIDENCE).max(SHORTEST_RESIDENCE);
        let turn = residence.saturating_add(copy.saturating_mul(4)).saturating_add(MOVE);
        let again = if self.processes[process].tries_again { TRY_AGAIN } else { Duration::ZERO };
        turn.saturating_mul(count).saturating_add(again)
    }

    pub(super) fn judge_miss(&mut self, now: Timestamp, process: usize, since: Timestamp) {
        let (waited, bound) = (self.counted(now, process, since, &[]), self.away_bound(process));
        let percent = waited.as_nanos() * 100 / bound.as_nanos().max(1);
        self.figures.worst_away_percent = self.figures.worst_away_percent.max(percent);
        if waited > bound {
            self.fail(now, "parking", || {
                format!("process {process} misses its memory since {since}, {waited} of which count: more than {bound}")
            });
        }
    }
}
