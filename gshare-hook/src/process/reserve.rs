//! Memory of a device: it is reserved, given back and looked at, and the daemon is asked for facts unknown to this process.

use core::sync::atomic::Ordering;
use std::time::Duration as StdDuration;

use crate::device::Device;
use crate::device::blocks::GRANULE;
use crate::launch::control::{CONTROL, State};
use crate::process::question::{Answer, Request};
use crate::process::runtime::Runtime;
use crate::sys::clock;

/// Longest wait of an allocation in a process that can be parked: the daemon may first have other processes parked, and says no before.
const ROOM_WAIT: StdDuration = StdDuration::from_secs(60);
/// Longest wait of a look at memory for the use of the instance's other processes. The daemon waits less than this for their answers.
const VIEW_WAIT: StdDuration = StdDuration::from_millis(500);

impl Runtime {
    /// Longest wait of an allocation for the daemon's answer.
    fn answer_wait(&self) -> StdDuration {
        self.config.daemon_wait.get().into()
    }

    /// Takes bytes from a device's account, asking the daemon if need be, or returns `false` when out of memory.
    pub(crate) fn reserve(&self, device: &'static Device, bytes: u64) -> bool {
        let most = if self.blocks().is_some() { ROOM_WAIT } else { self.answer_wait() };
        self.reserve_within(device, bytes, most.max(self.answer_wait()))
    }

    /// [`reserve`](Self::reserve), with another longest wait for the answer to the question.
    fn reserve_within(&self, device: &'static Device, bytes: u64, most: StdDuration) -> bool {
        if self.reserve_at_once(device, bytes) {
            return true;
        }
        let kept_waiting = || is_turned_away(device) && !is_shut(device);
        if kept_waiting() {
            device.wait_while(self.answer_wait(), kept_waiting);
        }
        if is_shut(device) || is_turned_away(device) {
            return false;
        }
        // The helper thread takes the bytes for this thread as soon as they are granted, so another thread cannot be faster.
        let answer = Answer::default();
        self.ask(Request::Memory(device, bytes, answer.clone()));
        if answer.wait(most) != Some(true) {
            return false;
        }
        if is_shut(device) || is_turned_away(device) {
            self.release(device.ordinal, bytes);
            return false;
        }
        true
    }

    /// Has others park for memory that the account has granted and the driver lacks, until `found` says that a new attempt has met it. The
    /// daemon does not count the memory of contexts and code, so the process reserves more and more, until the daemon has to make room. Then
    /// it gives that memory back. Nothing happens in a process that cannot be parked.
    pub(crate) fn find_room(&self, device: &'static Device, mut found: impl FnMut() -> bool) {
        if self.blocks().is_none() || device.memory.limit().is_none() {
            return;
        }
        let since = clock::now_ns();
        let left = || ROOM_WAIT.checked_sub(StdDuration::from_nanos(clock::now_ns().saturating_sub(since)));
        let (mut held, mut more, mut grows) = (0, GRANULE, true);
        while let Some(most) = left().filter(|_| more >= GRANULE) {
            // The daemon refuses more than others can leave, and may still have less.
            let granted = self.reserve_within(device, more, most);
            if granted {
                held += more;
                if found() {
                    break;
                }
            }
            grows &= granted;
            more = if grows { more * 2 } else { more / 2 };
        }
        self.release(device.ordinal, held);
    }

    /// Takes bytes that this process may take without asking. As for launches, a shut device gives no byte.
    pub(crate) fn reserve_at_once(&self, device: &Device, bytes: u64) -> bool {
        !is_shut(device) && !is_turned_away(device) && device.memory.reserve(bytes).is_ok()
    }

    /// Free and total memory of a device as the program shall see them, from the driver's figures. Where the instance has other
    /// processes, each look asks the daemon for their use, so the figures are exact. Others park for a process that can be parked itself, so
    /// their memory counts as free unless they keep it.
    pub(crate) fn view(&self, device: &'static Device, free: u64, total: u64) -> (u64, u64) {
        let served = self.look_at_siblings(device);
        let turns = served && self.takes_turns(device);
        let free = if turns { device.memory.free_in_turns(free, total) } else { free };
        let (free, total) = device.memory.view(free, total);
        let free = if served { free } else { free.min(device.memory.free_alone()) };
        // Memory in host memory comes back before the program needs it.
        (free.saturating_sub(self.away()), total)
    }

    /// Bytes of the process in host memory.
    pub(crate) fn away(&self) -> u64 {
        self.blocks().map_or(0, |blocks| blocks.bytes().1)
    }

    /// Whether other processes park for this one.
    fn takes_turns(&self, device: &Device) -> bool {
        self.blocks().is_some() && device.memory.limit().is_some()
    }

    /// Updates the use of the other processes that count, or returns `false` if there is no daemon.
    pub(crate) fn look_at_siblings(&self, device: &'static Device) -> bool {
        if device.memory.limit().is_none()
            || device.memory.is_alone() && !self.takes_turns(device)
            || CONTROL.state() != State::Active as u32
        {
            return true;
        }
        let answer = Answer::default();
        self.ask(Request::View(device, answer.clone()));
        let at_most = if device.memory.awaits_part() { self.answer_wait() } else { VIEW_WAIT };
        answer.wait(at_most) != Some(false)
    }

    /// Gives bytes back to a device's account.
    pub(crate) fn release(&self, ordinal: i32, bytes: u64) {
        if let Some(device) = self.metering.devices.get(ordinal)
            && bytes > 0
            && let Some(surplus) = device.memory.release(bytes)
        {
            self.ask(Request::Release(device, surplus));
        }
    }
}

/// Whether the process is refused on this device, or as a whole.
fn is_shut(device: &Device) -> bool {
    device.shut.load(Ordering::Acquire) || CONTROL.state() == State::Shut as u32
}

/// Whether the daemon refuses the process for now.
fn is_turned_away(device: &Device) -> bool {
    device.turned_away.load(Ordering::Acquire)
}
