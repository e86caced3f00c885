//! The party that lets launches in: the daemon, the process itself by its own clock, or none.
//!
//! [`Meter`](crate::Meter) knows the connection and reports its changes. This file decides the consequences for a device: its spec,
//! whether launches run free, wait or fail, and whether the previous party's permission ends.

use gshare_core::wire::{DaemonWait, ToDaemon};
use gshare_core::{Bytes, ClientId, Duration, Quota, ResourceSpec, Timestamp};

use super::local_share::LocalShare;
use super::{Device, Ground, Turn};
use crate::link::Outage;
use crate::{Action, Actions};

/// Bound of the GPU time in flight until the daemon names one.
pub(super) const IN_FLIGHT: Duration = Duration::from_millis(4);
/// Window of the local clock until the daemon names one.
pub(super) const LOCAL_WINDOW: Duration = Duration::from_millis(100);

/// The party that lets launches in.
#[derive(Debug)]
pub(crate) enum Attachment {
    /// No party yet: no daemon has answered, and none has been given up.
    Asking,
    /// The daemon, under this name.
    Served(ClientId),
    /// No party: the daemon refuses the process or the device. Launches wait for another answer until `fails_at` (ns), and then
    /// fail.
    Refused { fails_at: u64 },
    /// The process itself, by its own clock.
    Local(LocalClock),
}

/// A share kept by the process itself.
#[derive(Debug)]
pub(crate) struct LocalClock {
    pub(super) share: LocalShare,
    /// Start of the next window, in ns.
    pub(super) window_end: u64,
}

impl<G: Ground> Device<G> {
    /// The frame that asks the daemon to serve the device.
    pub(crate) fn attach(&mut self) -> ToDaemon {
        let memory = self.ground.memory();
        let (total, allocated, part) = (Bytes(memory.total()), memory.restate(), memory.part());
        self.questions.stated = allocated;
        self.asked = true;
        self.parking.restate();
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

    /// The daemon serves the device, so launches may go on.
    pub(crate) fn served(
        &mut self,
        client: ClientId,
        window: Duration,
        in_flight: Duration,
        now: u64,
        actions: &mut Actions,
    ) {
        self.attachment = Attachment::Served(client);
        (self.asked, self.unserved) = (false, None);
        self.window = if window.is_zero() { LOCAL_WINDOW } else { window };
        self.bound = if in_flight.is_zero() { IN_FLIGHT } else { in_flight };
        if !(self.credit.is_unlimited() && self.is_unlimited()) {
            // The local clock's permission ends here, and the daemon has charged the stated use.
            self.stop_launches();
            self.credit.charged(self.used_stated);
        }
        (self.turn, self.turns_over) = (Turn::Idle, 0);
        self.set_shut(false, actions);
        self.begin(now, actions);
    }

    /// Lets launches in at once where no limit holds; else they wait for a permission.
    fn begin(&mut self, now: u64, actions: &mut Actions) {
        if self.is_unlimited() {
            self.decide_freely(now, actions);
        }
        actions.push(Action::Wake(self.ordinal));
    }

    /// The process keeps a share by its own clock from now on.
    pub(crate) fn go_local(&mut self, spec: ResourceSpec, now: u64, actions: &mut Actions) {
        if matches!(self.attachment, Attachment::Local(_)) && self.spec == spec {
            // A new clock would begin with a whole window's budget.
            return self.answer_attach(false, actions);
        }
        let limit = spec.quota().limit();
        if !(self.credit.is_unlimited() && limit == Quota::WHOLE) {
            self.end_permission();
        }
        let share = LocalShare::new(Timestamp::from_nanos(now), limit, self.window, self.credit.allowed());
        self.adopt(spec);
        self.attachment = Attachment::Local(LocalClock { share, window_end: 0 });
        self.set_shut(false, actions);
        self.begin(now, actions);
        self.answer_attach(false, actions);
    }

    /// Stops launches. Waiting launches fail from `fails_at` on, unless the daemon's answer changes.
    pub(crate) fn refuse(&mut self, fails_at: u64, actions: &mut Actions) {
        self.end_permission();
        let before = if let Attachment::Refused { fails_at } = self.attachment { fails_at } else { u64::MAX };
        self.attachment = Attachment::Refused { fails_at: fails_at.min(before) };
        self.answer_attach(false, actions);
    }

    /// The connection is gone, and open requests will not be granted.
    pub(crate) fn lost(&mut self, now: u64, actions: &mut Actions) {
        self.asked = false;
        if matches!(self.attachment, Attachment::Served(_)) {
            if self.spec.is_observed() {
                return self.go_local(self.spec, now, actions);
            }
            self.end_permission();
            self.attachment = Attachment::Asking;
        }
    }

    /// The daemon refuses the process, so launches stop until the process's treatment is decided. `runs`: the limits within which
    /// it may run, which change nothing if it already runs within them.
    pub(crate) fn turn_away(&mut self, runs: Option<ResourceSpec>) {
        self.asked = false;
        let goes_on = matches!(self.attachment, Attachment::Local(_)) && runs == Some(self.spec);
        if !goes_on {
            self.end_permission();
            self.attachment = Attachment::Asking;
        }
    }

    /// The process runs unserved, within limits not shared with other processes, so its part is the whole memory limit.
    pub(crate) fn own_memory(&self, spec: ResourceSpec) {
        if let Some(limit) = spec.memory() {
            self.ground.memory().set_part(limit);
        }
    }

    /// The time at which to answer questions that wait for a daemon to state the process's part of the memory; `None` without such
    /// questions.
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

    /// Stops launches; other processes may be on the device at any time.
    pub(super) fn stop_launches(&mut self) {
        self.timeline.turn_began = u64::MAX;
        self.credit.stop(self.ground.gate());
    }

    pub(crate) fn answer_attach(&mut self, granted: bool, actions: &mut Actions) {
        if let Some(ticket) = self.attach_ticket.take() {
            actions.push(Action::Answer { ticket, granted });
        }
    }

    /// Without a daemon, launches wait under the last known spec.
    pub(crate) fn wait_closed(&mut self, actions: &mut Actions) {
        self.adopt(self.spec);
        self.answer_attach(false, actions);
    }

    /// Makes launches fail.
    pub(crate) fn fail_launches(&mut self, actions: &mut Actions) {
        if !self.switches.shut {
            self.set_shut(true, actions);
            actions.push(Action::Wake(self.ordinal));
        }
        self.answer_attach(false, actions);
    }

    /// Takes a spec, either the daemon's or the last known. Returns the granted memory to give back, or `None` if the memory in use
    /// must be stated again, because the daemon was not told of it while there was no limit.
    pub(crate) fn adopt(&mut self, spec: ResourceSpec) -> Option<Bytes> {
        self.spec = spec;
        self.questions.adopt(self.ground.memory(), spec.memory(), self.attach_ticket.is_some())
    }

    pub(super) fn set_shut(&mut self, on: bool, actions: &mut Actions) {
        if core::mem::replace(&mut self.switches.shut, on) != on {
            actions.push(Action::Shut { device: self.ordinal, on });
        }
    }
}
