//! Threads waiting for credit, first come, first served.

use core::sync::atomic::Ordering;
use std::time::Duration as StdDuration;

use gshare_core::Duration;

use crate::device::Device;
use crate::launch::control::{CONTROL, Metering, State};
use crate::launch::failure::{Why, cannot_meter};
use crate::launch::segments::end_to_wait;
use crate::launch::thread_record::ThreadRecord;
use crate::sys::clock;

/// Longest wait in a line that does not move. Then the thread stops waiting for the threads ahead.
const LINE_STUCK: StdDuration = StdDuration::from_secs(2);
/// Longest sleep of a thread before it looks again.
const LOOK: StdDuration = StdDuration::from_millis(10);
/// The sleep in a signal handler, where nothing can wake the thread.
const LOOK_IN_HANDLER: StdDuration = StdDuration::from_micros(200);

/// A helper thread is gone if it has not looped for this time in ns, while another thread of the process was awake.
const GONE_NS: u64 = 5_000_000_000;
/// The most of the time between two looks that counts as awake, in ns, because the process may have been stopped for the rest.
pub(crate) const LOOK_NS: u64 = 20_000_000;

/// The end of a launch's wait for credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    /// The launch's cost is spent.
    Paid,
    /// Launches are no longer metered, so nothing is spent.
    Unmetered,
    /// The launch must fail.
    Failed,
}

/// A waiting thread's watch on the helper thread. By the clock alone, a process that was stopped for a while (a signal, a frozen
/// container) would take its helper thread for gone when it goes on.
#[derive(Debug)]
struct Watch {
    beat: u64,
    looked: u64,
    awake: u64,
}

impl Watch {
    fn new(metering: &Metering, now: u64) -> Self {
        Self { beat: metering.beat.load(Ordering::Relaxed), looked: now, awake: 0 }
    }

    /// Looks again, some milliseconds after the last look, and returns whether the helper thread is gone.
    fn sees_it_gone(&mut self, metering: &Metering, now: u64) -> bool {
        let beat = metering.beat.load(Ordering::Relaxed);
        self.awake += now.saturating_sub(self.looked).min(LOOK_NS);
        self.looked = now;
        if beat != self.beat {
            (self.beat, self.awake) = (beat, 0);
        }
        self.awake > GONE_NS
    }
}

/// Why a wait ends, or none.
enum Found {
    Ended(Passed),
    HelperGone,
    Nothing,
}

fn look(metering: &Metering, device: &Device, watch: &mut Watch, now: u64) -> Found {
    let state = CONTROL.state();
    if device.shut.load(Ordering::Acquire) || state == State::Shut as u32 {
        Found::Ended(Passed::Failed)
    } else if state != State::Active as u32 {
        // Metering was switched off during the wait, so nothing would ever let credit in.
        Found::Ended(Passed::Unmetered)
    } else if watch.sees_it_gone(metering, now) {
        Found::HelperGone
    } else {
        Found::Nothing
    }
}

/// Waits in line for credit, then spends.
#[cold]
pub(crate) fn wait_for_credit(
    metering: &Metering,
    device: &Device,
    thread: &ThreadRecord,
    cost: u64,
) -> Passed {
    let began = clock::now_ns();
    // A signal handler launches while its thread waits. The thread may hold the line's lock, and its own place in line does not
    // move before the handler returns.
    if thread.waits.swap(true, Ordering::Relaxed) {
        return wait_in_handler(metering, device, cost, began);
    }
    end_to_wait(thread);
    device.waiting.fetch_add(1, Ordering::AcqRel);
    metering.bell.ring();
    let mut line = device.line.lock();
    let ticket = line.next;
    line.next += 1;
    let (mut seen, mut stuck_since) = (line.serving, began);
    let mut watch = Watch::new(metering, began);
    let found = loop {
        let now = clock::now_ns();
        if line.serving != seen {
            (seen, stuck_since) = (line.serving, now);
        }
        let front = line.serving >= ticket || u128::from(now - stuck_since) > LINE_STUCK.as_nanos();
        match look(metering, device, &mut watch, now) {
            Found::Nothing if front && device.gate.try_spend(Duration::from_nanos(cost)) => {
                break Found::Ended(Passed::Paid);
            }
            Found::Nothing => line = device.moved.wait(line, LOOK),
            found => break found,
        }
    };
    line.serving = line.serving.max(ticket + 1);
    drop(line);
    thread.waits.store(false, Ordering::Relaxed);
    device.waiting.fetch_sub(1, Ordering::AcqRel);
    device.waited_ns.fetch_add(clock::now_ns() - began, Ordering::Relaxed);
    device.moved.notify();
    passes(metering, &found)
}

/// Waits for credit without a lock and outside of the line.
fn wait_in_handler(metering: &Metering, device: &Device, cost: u64, began: u64) -> Passed {
    let mut watch = Watch::new(metering, began);
    loop {
        match look(metering, device, &mut watch, clock::now_ns()) {
            Found::Nothing if device.gate.try_spend(Duration::from_nanos(cost)) => {
                return Passed::Paid;
            }
            Found::Nothing => std::thread::sleep(LOOK_IN_HANDLER),
            found => return passes(metering, &found),
        }
    }
}

/// Waits while `is_closed` holds, and returns `false` if calls fail meanwhile. A signal handler may wait as well, so there is no lock.
pub(crate) fn wait_for_return(metering: &Metering, is_closed: impl Fn() -> bool) -> bool {
    let Some(device) = metering.devices.iter().next() else { return true };
    let mut watch = Watch::new(metering, clock::now_ns());
    while is_closed() {
        match look(metering, device, &mut watch, clock::now_ns()) {
            Found::Nothing => std::thread::sleep(LOOK_IN_HANDLER),
            Found::Ended(_) | Found::HelperGone => return false,
        }
    }
    true
}

fn passes(metering: &Metering, found: &Found) -> Passed {
    match found {
        Found::Ended(passed) => *passed,
        Found::HelperGone if cannot_meter(metering.on_failure, Why::Helper) => Passed::Unmetered,
        Found::HelperGone | Found::Nothing => Passed::Failed,
    }
}
