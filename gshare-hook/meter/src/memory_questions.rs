//! Questions about memory that wait for the daemon.

use std::collections::VecDeque;

use gshare_core::wire::{DaemonWait, ToDaemon};
use gshare_core::{Bytes, ResourceSpec};

use crate::memory_account::MemoryAccount;
use crate::{Action, Actions, Ticket};

/// A waiting reservation: its size, and the amount missing when the daemon was asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shortage {
    pub(crate) bytes: u64,
    pub(crate) missing: u64,
    pub(crate) ticket: Ticket,
}

/// A thread's question between Attach and its answer, or before a daemon has stated the process's part of the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Deferred {
    Reserve { bytes: u64, ticket: Ticket },
    View { ticket: Ticket },
    Release { bytes: Bytes },
}

/// The questions of one device.
#[derive(Debug, Default)]
pub(crate) struct Questions {
    /// Waiting reservations, in the order of the questions to the daemon.
    pub(crate) shortages: VecDeque<Shortage>,
    /// Waiting questions about the instance's other processes, and the part of the daemon's answer received so far.
    pub(crate) views: VecDeque<Ticket>,
    pub(crate) members: Vec<(u32, u64)>,
    pub(crate) deferred: Vec<Deferred>,
    /// The memory in use as the daemon knows it while there is no limit.
    pub(crate) stated: u64,
}

impl Questions {
    /// Takes another limit. `first`: the device has just been found. Returns the granted memory to give back, or `None` if the
    /// memory in use must be stated again, because the daemon was not told of it while there was no limit.
    pub(crate) fn adopt(
        &mut self,
        memory: &MemoryAccount,
        limit: Option<Bytes>,
        first: bool,
    ) -> Option<Bytes> {
        let before = memory.limit();
        if before == limit.map(|bytes| bytes.0) && !first {
            return Some(Bytes::ZERO);
        }
        let surplus = memory.limit_to(limit);
        match (before, limit) {
            (None, Some(_)) if memory.used() != self.stated => None,
            (None, _) => Some(Bytes::ZERO),
            (Some(_), Some(_)) => Some(surplus),
            (Some(_), None) => {
                self.stated = memory.used();
                Some(surplus)
            }
        }
    }

    /// Settles the questions after a lost connection: shortages are decided within the process's part, and views are answered
    /// without the other processes. A process without a stated part waits for the next daemon.
    pub(crate) fn lost(&mut self, memory: &MemoryAccount, actions: &mut Actions) {
        self.members.clear();
        if memory.awaits_part() {
            let shortages = self.shortages.drain(..);
            self.deferred
                .extend(shortages.map(|Shortage { bytes, ticket, .. }| Deferred::Reserve { bytes, ticket }));
            self.deferred.extend(self.views.drain(..).map(|ticket| Deferred::View { ticket }));
        }
        for Shortage { bytes, ticket, .. } in self.shortages.drain(..) {
            let granted = reserve_alone(memory, bytes);
            actions.push(Action::Answer { ticket, granted });
        }
        for ticket in self.views.drain(..) {
            actions.push(Action::Answer { ticket, granted: false });
        }
    }
}

/// Asks the daemon for the missing memory and some more, so that small reservations need no question.
pub(crate) fn reserve(client: gshare_core::ClientId, memory: &MemoryAccount, missing: u64) -> ToDaemon {
    let wish = Bytes(missing.saturating_add(memory.chunk()));
    ToDaemon::MemoryReserve { client, bytes: Bytes(missing), wish }
}

/// Reserves within the process's own part while no daemon can be asked. Returns whether the memory was there.
pub(crate) fn reserve_alone(memory: &MemoryAccount, bytes: u64) -> bool {
    let Err(missing) = memory.reserve(bytes) else { return true };
    if missing <= memory.within_part() {
        memory.grant(Bytes(missing));
    }
    memory.reserve(bytes).is_ok()
}

/// The line about an allocation that failed without a daemon.
pub(crate) fn no_part(spec: ResourceSpec, waited: DaemonWait) -> String {
    let limit = spec.memory().unwrap_or(Bytes::ZERO);
    format!(
        "out of memory: the processes of this run share a limit of {limit}, and no daemon has said within {waited} what this one may \
         have of it; its allocations fail until one does"
    )
}
