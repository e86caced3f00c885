//! Requests of the program's threads to the helper thread, and the wait for the answer.

use std::sync::Arc;
use std::time::Duration as StdDuration;

use gshare_core::reason::Obstacle;
use gshare_core::{Bytes, DeviceUuid};

use crate::device::Device;
use crate::launch::line::LOOK_NS;
use crate::sys::lock::{Lock, Signal};

/// A request to the helper thread.
#[derive(Debug)]
pub(crate) enum Request {
    /// Attach this device.
    Attach(&'static Device, DeviceUuid, Answer),
    /// Reserve memory, all or nothing.
    Memory(&'static Device, u64, Answer),
    /// Ask for the memory of the instance's other processes.
    View(&'static Device, Answer),
    /// Give memory back.
    Release(&'static Device, Bytes),
    /// A move of the device's memory has ended.
    Moved(&'static Device, Result<(), Obstacle>),
    /// Report the use of a process about to end.
    Leave(Answer),
}

/// The state of a question.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Outcome {
    #[default]
    Pending,
    Given(bool),
    /// The asking thread no longer waits.
    Abandoned,
}

/// The place where an answer arrives, which is `true` for yes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer(Arc<(Lock<Outcome>, Signal)>);

impl Answer {
    /// Returns `false` if the answer is too late and no thread waits.
    pub(crate) fn give(&self, answer: bool) -> bool {
        let mut outcome = self.0.0.lock();
        let waits = *outcome == Outcome::Pending;
        if waits {
            *outcome = Outcome::Given(answer);
        }
        drop(outcome);
        self.0.1.notify();
        waits
    }

    /// Whether the answer was given.
    pub(crate) fn is_given(&self) -> bool {
        matches!(*self.0.0.lock(), Outcome::Given(_))
    }

    /// Waits for an answer while the process is awake. The wait goes in steps, and a process that was stopped for a while loses
    /// only one step.
    pub(crate) fn wait(&self, at_most: StdDuration) -> Option<bool> {
        let answer = (0..at_most.as_nanos() / u128::from(LOOK_NS)).find_map(|_| self.step());
        answer.or_else(|| {
            let mut outcome = self.0.0.lock();
            match *outcome {
                Outcome::Given(answer) => Some(answer),
                _ => {
                    *outcome = Outcome::Abandoned;
                    None
                }
            }
        })
    }

    fn step(&self) -> Option<bool> {
        let at_most = StdDuration::from_nanos(LOOK_NS);
        let outcome = self.0.1.wait_while(self.0.0.lock(), at_most, |outcome| *outcome == Outcome::Pending);
        if let Outcome::Given(answer) = *outcome { Some(answer) } else { None }
    }
}
