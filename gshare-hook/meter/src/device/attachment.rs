//! The party that lets launches in: the daemon, the process itself by its own clock, or none.
//!
//! The host of the meter ([`Meter`](crate::Meter)) knows the connection and says what has become of it; this file says what a device
//! does about it: which spec it takes, whether launches run free, wait or fail, and whether a permission of the party before ends.

use gshare_core::wire::{DaemonWait, ToDaemon};
use gshare_core::{Bytes, ClientId, Duration, Quota, ResourceSpec, SmShare, Timestamp};

use super::local_share::LocalShare;
use super::{Device, Ground, Turn};
use crate::link::Outage;
use crate::{Action, Actions};

/// Bound of the GPU time in flight before the daemon has named one.
pub(super) const IN_FLIGHT: Duration = Duration::from_millis(4);
/// Window of the local clock before the daemon has named one.
pub(super) const LOCAL_WINDOW: Duration = Duration::from_millis(100);

/// The party that lets launches in.
#[derive(Debug)]
pub(crate) enum Attachment {
    /// No party yet: no daemon has answered, and none has been given up.
    Asking,
    /// The daemon, under this name.
    Served(ClientId),
    /// No party: the daemon refuses the process or the device. Launches that wait for another answer fail at `fails_at` (ns).
    Refused { fails_at: u64 },
    /// The process itself, by its own clock.
    Local(LocalClock),
}

/// A share that the process keeps by itself.
#[derive(Debug)]
pub(crate) struct LocalClock {
    pub(super) share: LocalShare,
    /// When the next window begins, in ns.
    pub(super) window_end: u64,
}

impl<G: Ground> Device<G> {
    /// The frame that asks the daemon to serve the device.
    pub(crate) fn attach(&mut self) -> ToDaemon {
        let memory = self.ground.memory();
        let (total, allocated, part) = (Bytes(memory.total()), memory.restate(), memory.part());
        self.questions.stated = allocated;
        self.asked = true;
        self.used_stated = self.used();
        ToDaemon::Attach {
            ordinal: self.ordinal.0,
            device: self.uuid,
            device_memory: total,
            allocated: Bytes(allocated),
            part,
            used: self.used_stated,
            allowed: self.credit.allowed(),
        }
    }

    /// The daemon serves the device: launches may go on.
    pub(crate) fn served(
        &mut self,
        client: ClientId,
        window: Duration,
        in_flight: Duration,
        actions: &mut Actions,
    ) {
        self.attachment = Attachment::Served(client);
        (self.asked, self.unserved) = (false, None);
        self.window = if window.is_zero() { LOCAL_WINDOW } else { window };
        self.bound = if in_flight.is_zero() { IN_FLIGHT } else { in_flight };
        // A permission of the local clock ends here, and the daemon has charged what was stated.
        self.stop_launches();
        self.credit.charged(self.used_stated);
        (self.turn, self.turns_over) = (Turn::Idle, 0);
        self.set_shut(false, actions);
        actions.push(Action::Wake(self.ordinal));
    }

    /// The process keeps a share by its own clock from now on.
    pub(crate) fn go_local(&mut self, spec: ResourceSpec, now: u64, actions: &mut Actions) {
        if matches!(self.attachment, Attachment::Local(_)) && self.spec == spec {
            // A new clock would begin with a whole window's budget.
            return self.answer_attach(false, actions);
        }
        self.end_permission();
        let limit = spec.quota().limit();
        let share = LocalShare::new(Timestamp::from_nanos(now), limit, self.window, self.credit.allowed());
        self.adopt(spec, actions);
        self.attachment = Attachment::Local(LocalClock { share, window_end: 0 });
        // A process that never had a daemon has only the environment's word: no time limit means none.
        self.set_free_running(limit == Quota::WHOLE, actions);
        self.set_shut(false, actions);
        actions.push(Action::Wake(self.ordinal));
        self.answer_attach(false, actions);
    }

    /// No launch is let in, and those that wait fail from `fails_at` on, unless the daemon thinks better of it.
    pub(crate) fn refuse(&mut self, fails_at: u64, actions: &mut Actions) {
        self.end_permission();
        let before = if let Attachment::Refused { fails_at } = self.attachment { fails_at } else { u64::MAX };
        self.attachment = Attachment::Refused { fails_at: fails_at.min(before) };
        self.set_free_running(false, actions);
        self.answer_attach(false, actions);
    }

    /// The connection is gone: what was requested will not be granted.
    pub(crate) fn lost(&mut self) {
        self.asked = false;
        if matches!(self.attachment, Attachment::Served(_)) {
            self.end_permission();
            self.attachment = Attachment::Asking;
        }
    }

    /// The daemon refuses the process: no launch is let in until it is decided what becomes of the process. `runs`: as under this
    /// spec before.
    pub(crate) fn turn_away(&mut self, runs: Option<ResourceSpec>) {
        self.asked = false;
        let goes_on = matches!(self.attachment, Attachment::Local(_)) && runs == Some(self.spec);
        if !goes_on {
            self.end_permission();
            self.attachment = Attachment::Asking;
        }
    }

    /// The process runs unserved, within limits that no other process shares: all of the memory limit is its part.
    pub(crate) fn own_memory(&self, spec: ResourceSpec) {
        if let Some(limit) = spec.memory() {
            self.ground.memory().set_part(limit);
        }
    }

    /// When questions are answered that wait for a daemon's word on the memory that the process may have; `None`: none wait.
    pub(crate) fn memory_fails_at(&self, outage: Option<Outage>, daemon_wait: DaemonWait) -> Option<u64> {
        let waits = !self.asked && !self.questions.deferred.is_empty() && self.ground.memory().awaits_part();
        waits.then(|| match self.attachment {
            Attachment::Refused { fails_at } => fails_at,
            _ => outage.map_or(0, |outage| outage.closed_at(daemon_wait)),
        })
    }

    fn end_permission(&mut self) {
        self.stop_launches();
        self.turn = Turn::Idle;
    }

    /// No launch is let in, and other processes may be on the device at any time.
    pub(super) fn stop_launches(&mut self) {
        self.line.turn_began = u64::MAX;
        self.credit.stop(self.ground.gate());
    }

    pub(crate) fn answer_attach(&mut self, granted: bool, actions: &mut Actions) {
        if let Some(ticket) = self.attach_ticket.take() {
            actions.push(Action::Answer { ticket, granted });
        }
    }

    /// Without a daemon launches wait, under the last spec known.
    pub(crate) fn wait_closed(&mut self, actions: &mut Actions) {
        self.adopt(self.spec, actions);
        self.set_free_running(false, actions);
        self.answer_attach(false, actions);
    }

    /// Launches fail.
    pub(crate) fn fail_launches(&mut self, actions: &mut Actions) {
        if !self.switches.shut {
            self.set_shut(true, actions);
            actions.push(Action::Wake(self.ordinal));
        }
        self.answer_attach(false, actions);
    }

    /// Takes a spec: from the daemon, or the last one known. Gives the granted memory that is to be returned; `None` if what
    /// is in use must be stated again, since the daemon was not told of it while there was no limit.
    pub(crate) fn adopt(&mut self, spec: ResourceSpec, actions: &mut Actions) -> Option<Bytes> {
        let whole = spec.quota().request() == Quota::WHOLE && spec.sm() == SmShare::WHOLE;
        self.set_free_running(whole, actions);
        self.spec = spec;
        self.questions.adopt(self.ground.memory(), spec.memory(), self.attach_ticket.is_some())
    }

    pub(super) fn set_free_running(&mut self, on: bool, actions: &mut Actions) {
        if core::mem::replace(&mut self.switches.free_running, on) != on {
            actions.push(Action::FreeRunning { device: self.ordinal, on });
        }
    }

    pub(super) fn set_shut(&mut self, on: bool, actions: &mut Actions) {
        if core::mem::replace(&mut self.switches.shut, on) != on {
            actions.push(Action::Shut { device: self.ordinal, on });
        }
    }
}
