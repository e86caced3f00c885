//! The launching thread of a process: its kernels, and their admission.

use super::{AFTER_FAILURE, Life, NEW_FUNCTION, POLL, Process, QUEUE, Thread};
use crate::node::outside::Outside;
use crate::node::stream::Admitted;
use crate::node::worker::{Done, Tasks};
use crate::virtual_gpu::{Kernel, VirtualGpu};
use gshare_core::{Duration, Timestamp};
use gshare_meter::alone::{self, PROBE_WAIT};
use gshare_meter::cost::Row;
use gshare_meter::run::{Ending, Verdict};
use std::sync::Arc;

/// The decision about a launch.
enum Admission {
    Go(Admitted),
    Wait,
    Fail,
}

impl Process {
    /// Takes a turn of the launching thread.
    pub(in crate::node) fn thread(
        &mut self,
        now: Timestamp,
        turn: u64,
        gpu: &mut VirtualGpu,
        outside: &mut Outside,
    ) {
        if turn != self.turn || !self.acts() {
            return;
        }
        loop {
            match self.thread {
                Thread::Attaching | Thread::Over => return,
                Thread::Kernel { number, .. } if self.stream.completed <= number => return,
                Thread::Kernel { began, .. } => {
                    self.stream.synchronised(self.syncs, began);
                    self.thread = Thread::Ready;
                }
                Thread::Full if self.in_flight() >= QUEUE => return,
                Thread::Full | Thread::Resting | Thread::Unemployed => self.thread = Thread::Ready,
                Thread::Ready | Thread::Credit { .. } | Thread::Measurement { .. } => {}
            }
            if self.thread == Thread::Ready {
                if self.tasks.as_ref().is_some_and(Tasks::is_empty) {
                    self.thread = Thread::Unemployed;
                    return;
                }
                if self.program.silences && now >= self.silent_at {
                    let (shortest, longest) = (Duration::from_millis(1), Duration::from_millis(300));
                    let until = now.saturating_add(self.rng.duration(shortest, longest));
                    self.silent_at = until.saturating_add(self.rng.duration(shortest, longest));
                    self.thread = Thread::Resting;
                    return self.call_thread(until, outside);
                }
                if self.in_flight() >= QUEUE {
                    self.thread = Thread::Full;
                    return;
                }
            }
            match self.admit(now, outside) {
                Admission::Go(admitted) => {
                    self.launch(now, admitted, gpu, outside);
                    if matches!(self.thread, Thread::Kernel { .. }) {
                        return;
                    }
                }
                Admission::Wait => {
                    let at = now.saturating_add(POLL);
                    return self.call_thread(at, outside);
                }
                Admission::Fail => {
                    outside.book.stops_waiting(now, self.who.number);
                    self.thread = Thread::Resting;
                    self.counted = false;
                    return self.call_thread(now.saturating_add(AFTER_FAILURE), outside);
                }
            }
        }
    }

    /// Wakes a worker for a new task.
    pub(in crate::node) fn has_work(&mut self, now: Timestamp, outside: &mut Outside) {
        if self.thread == Thread::Unemployed {
            self.call_thread(now, outside);
        }
    }

    pub(super) fn in_flight(&self) -> u64 {
        self.stream.launched - self.stream.completed
    }

    /// The next kernel of the program, drawn once for all attempts to launch it.
    fn next_kernel(&mut self) -> (u64, Duration) {
        let (program, rng, launches) = (&self.program, &mut self.rng, self.launches);
        if let Some(tasks) = &self.tasks {
            return (0, tasks.next_kernel());
        }
        let stretched = &mut self.stretched;
        *self.next.get_or_insert_with(|| {
            let function = rng.below(program.functions.max(1));
            let (low, high) = program.kernel;
            // Each function has its own length, and its launches lie around this length.
            let span = high.saturating_sub(low).as_nanos() / program.functions.max(1);
            let length = low.as_nanos() + function * span + span / 2;
            let off = length * program.spread_percent / 100;
            let length = Duration::from_nanos(rng.between(length - off, length + off).max(1_000));
            match stretched.take() {
                Some((length, true)) => (NEW_FUNCTION + launches, length),
                Some((length, false)) => (function, length),
                None => (function, length),
            }
        })
    }

    /// Gives this length to the next kernel not drawn yet; `strange` means its function was never launched before.
    pub(in crate::node) fn stretch(&mut self, length: Duration, strange: bool) {
        self.stretched = Some((length, strange));
    }

    fn admit(&mut self, now: Timestamp, outside: &mut Outside) -> Admission {
        if self.device_lost || self.shut {
            return Admission::Fail;
        }
        if !self.finds_weights(now, outside) {
            return Admission::Wait;
        }
        if let Thread::Credit { since, row, cost, alone } = self.thread {
            if !self.ground.gate.try_spend(Duration::from_nanos(cost)) {
                return Admission::Wait;
            }
            self.waited = self.waited.saturating_add(now.saturating_since(since));
            outside.book.stops_waiting(now, self.who.number);
            self.thread = Thread::Ready;
            return Admission::Go(match alone {
                true => self.stream.paid_alone(row, cost),
                false => self.stream.paid(now, &self.ground.costs, row, cost),
            });
        }
        let (function, _) = self.next_kernel();
        if !core::mem::replace(&mut self.counted, true) {
            self.launches += 1;
        }
        let ground = Arc::clone(&self.ground);
        let (row, known) = ground.costs.find(function, 0);
        let Some(cost) = known else { return self.admit_unknown(now, row, outside) };
        self.thread = Thread::Ready;
        if let Some(admitted) = self.stream.admit(now, (&ground.gate, &ground.costs), row, cost) {
            return Admission::Go(admitted);
        }
        self.wait_for_credit(now, (row, cost, false), outside)
    }

    /// Admits a launch of unknown cost, measured alone, and only one at a time.
    fn admit_unknown(&mut self, now: Timestamp, row: Row, outside: &mut Outside) -> Admission {
        if alone::awaits_measurement(&self.ground.gate, &self.ground.costs, row) {
            let since = if let Thread::Measurement { since } = self.thread {
                since
            } else {
                self.stream.wait(now, self.measures_all);
                self.thread = Thread::Measurement { since: now };
                self.ring(now, outside);
                now
            };
            if now.saturating_since(since) < PROBE_WAIT {
                return Admission::Wait;
            }
        }
        let cost = alone::probe(&self.ground.costs, row);
        self.thread = Thread::Ready;
        if self.ground.gate.try_spend(Duration::from_nanos(cost)) {
            return Admission::Go(self.stream.paid_alone(row, cost));
        }
        self.wait_for_credit(now, (row, cost, true), outside)
    }

    fn wait_for_credit(
        &mut self,
        now: Timestamp,
        (row, cost, alone): (Row, u64, bool),
        outside: &mut Outside,
    ) -> Admission {
        self.stream.wait(now, self.measures_all);
        self.thread = Thread::Credit { since: now, row, cost, alone };
        outside.book.waits(now, self.who.number);
        self.ring(now, outside);
        Admission::Wait
    }

    fn launch(&mut self, now: Timestamp, admitted: Admitted, gpu: &mut VirtualGpu, outside: &mut Outside) {
        let (function, duration) = self.next_kernel();
        (self.next, self.counted) = (None, false);
        let number = self.stream.launched;
        if admitted.verdict == Verdict::Alone && self.ground.costs.known(admitted.row).is_none() {
            outside.book.launched_unknown(now, self.who.number);
        }
        // Without a limit, the process does not take turns.
        outside.book.accounts.disturbed |= self.ground.gate.is_unlimited();
        self.stream.launch(now, &self.ground.costs, admitted, self.measures_all);
        let sm = self.who.spec.sm();
        outside.book.launched(now, self.who.number, duration, function >= NEW_FUNCTION);
        outside.log.mix(&[now.as_nanos(), self.who.number as u64, duration.as_nanos()]);
        gpu.launch(now, Kernel { client: self.queue(), tag: number, duration, sm });
        let waits = self.tasks.as_mut().map_or(self.program.synchronises, Tasks::launched);
        if waits {
            self.syncs += 1;
            self.stream.end(now, Ending::Synchronising, self.measures_all);
            self.thread = Thread::Kernel { number, began: now };
        }
    }

    /// Handles the end of a kernel of this process.
    pub(in crate::node) fn completed(&mut self, now: Timestamp, outside: &mut Outside) {
        self.stream.complete(now);
        if let Some(task) = self.tasks.as_mut().and_then(Tasks::ended) {
            outside.done.push(Done { worker: self.who.number, task, at: now });
        }
        if self.stopped || self.life != Life::Runs {
            return;
        }
        let (low, high) = self.program.pause;
        match self.thread {
            Thread::Kernel { number, .. } if self.stream.completed == number + 1 => {
                let pause = self.rng.duration(low, high);
                self.call_thread(now.saturating_add(pause), outside);
            }
            Thread::Full => self.call_thread(now, outside),
            _ => {}
        }
    }
}
