//! The meter: one process and its daemon.
//!
//! A daemon may *refuse* the process or a device ([`ToClient::Refused`]). Launches then wait for [`Settings::daemon_wait`] if
//! another attempt may succeed, and fail afterwards. Where the operator lets such processes run, the daemon says so and states the
//! limits ([`ToClient::Unserved`]), which are kept as without a daemon. A device unmanaged by the daemon is used within the
//! process's own limits.

mod reservations;

use gshare_core::wire::{OnDaemonLoss, RefusalCode, ToClient, ToDaemon};
use gshare_core::{ClientId, ResourceSpec, ServiceClass, Timestamp};

use crate::device::{Around, Attachment, Device};
use crate::link::{Jitter, Link, Outage, RECONNECT, REFUSED};
use crate::{Action, Actions, Ground, MeterAction, MeterEvent, Ordinal, Settings, Ticket};

/// The longest time a process waits at its end until all its use is reported, in ns.
const LEAVE_WAIT: u64 = 100_000_000;

/// Refusals after which the delay is its longest. A refusal that makes further attempts useless counts as this number of refusals.
const LONG_REFUSAL: u32 = 6;

/// The daemon's answer to the process as a whole.
#[derive(Clone, Copy, Debug)]
enum Standing {
    /// No refusal is known.
    Served,
    /// The daemon refuses the process. Launches wait for another answer until `fails_at` (ns), and then fail.
    Refused { fails_at: u64 },
    /// The daemon refuses the process, but lets it run under these limits.
    Unserved(ResourceSpec),
}

/// The wait of a process about to end, until `by` (ns).
#[derive(Clone, Copy, Debug)]
struct Leaving {
    ticket: Ticket,
    by: u64,
}

/// The decisions of one process. See the [crate](crate).
#[derive(Debug)]
pub struct Meter<G> {
    settings: Settings,
    now: Timestamp,
    link: Link,
    jitter: Jitter,
    standing: Standing,
    /// Refusals in a row.
    refusals: u32,
    /// Whether a line about a refusal was printed, and a line about memory not granted by any daemon.
    told: bool,
    told_of_memory: bool,
    /// The time since which a thread waits for the daemon, in ns.
    waits_since: Option<u64>,
    devices: Vec<Device<G>>,
    syncing: Moving,
    launching: Moving,
    /// The number of threads waiting for a device, the number of waiting calls so far, and whether several threads launch.
    waiters: usize,
    syncs: u64,
    crowded: bool,
    /// The process's class by the daemon's configuration.
    class: Option<ServiceClass>,
    /// The frame that proves the process's user to a daemon.
    ticket: Option<ToDaemon>,
    leaving: Option<Leaving>,
}

impl<G: Ground> Meter<G> {
    /// The meter of a process that has just begun to use a device. It asks for a connection at the first event.
    pub fn new(now: Timestamp, settings: Settings) -> Self {
        let jitter = Jitter::new(settings.seed);
        Self {
            settings,
            now,
            link: Link::Down { retry_at: 0, outage: Outage::new(now.as_nanos()) },
            jitter,
            standing: Standing::Served,
            refusals: 0,
            told: false,
            told_of_memory: false,
            waits_since: None,
            devices: Vec::new(),
            syncing: Moving::default(),
            launching: Moving::default(),
            waiters: 0,
            syncs: 0,
            crowded: false,
            class: None,
            ticket: None,
            leaving: None,
        }
    }

    /// Takes one event, and appends the host's orders to `actions`.
    ///
    /// # Panics
    /// If `now` lies before the last event's time, or if the event names an unknown device or segment.
    pub fn handle(&mut self, now: Timestamp, event: MeterEvent<G>, actions: &mut Vec<MeterAction>) {
        assert!(now >= self.now, "time went back: now {now}, last event at {}", self.now);
        let measurement = matches!(
            event,
            MeterEvent::Recorded { .. }
                | MeterEvent::WaitOver { .. }
                | MeterEvent::Completed { .. }
                | MeterEvent::MeasurementLost { .. }
                | MeterEvent::ThreadsSeen { .. }
        );
        self.now = now;
        self.take(now.as_nanos(), event, actions);
        if !measurement {
            self.advance(now.as_nanos(), actions);
        }
    }

    /// Whether the daemon refuses the process on this device, so that launches and allocations there must not happen.
    pub fn refuses(&self, device: Ordinal) -> bool {
        self.devices.iter().filter(|known| known.ordinal == device).any(|known| match known.attachment {
            Attachment::Refused { .. } => true,
            Attachment::Asking => matches!(self.standing, Standing::Refused { .. }),
            _ => false,
        })
    }

    /// The time of the host's next look, even if nothing happens.
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let link = match self.link {
            Link::Down { retry_at, .. } => retry_at,
            Link::Greeting { by, .. } => by,
            Link::Up { probe: Some(by), .. } => by,
            Link::Up { heard, probe: None } => self
                .waits_since
                .map_or(u64::MAX, |since| since.max(heard) + self.settings.daemon_wait.silence_ns() + 1),
            Link::Connecting { .. } | Link::Closing { .. } => u64::MAX,
        };
        let outage = self.link.outage();
        let of_device = |device: &Device<G>| match device.attachment {
            Attachment::Refused { fails_at } if fails_at > self.now.as_nanos() => {
                device.look_at.min(fails_at)
            }
            Attachment::Asking if self.settings.on_loss == OnDaemonLoss::Closed => {
                let fails_at = outage.map_or(0, |outage| outage.closed_at(self.settings.daemon_wait) + 1);
                if fails_at > self.now.as_nanos() { device.look_at.min(fails_at) } else { device.look_at }
            }
            _ => device.look_at,
        };
        let devices = self.devices.iter().map(of_device).min().unwrap_or(u64::MAX);
        let memory = self
            .devices
            .iter()
            .filter_map(|device| device.memory_fails_at(outage, self.settings.daemon_wait))
            .min();
        let leaving = self.leaving.map_or(u64::MAX, |leaving| leaving.by);
        let next = link.min(devices).min(leaving).min(memory.unwrap_or(u64::MAX));
        (next != u64::MAX).then(|| Timestamp::from_nanos(next))
    }

    fn take(&mut self, now: u64, event: MeterEvent<G>, actions: &mut Actions) {
        match event {
            MeterEvent::Connected => self.connected(now, actions),
            MeterEvent::ConnectFailed => self.connect_failed(now),
            MeterEvent::Lost => self.lost(now, actions),
            MeterEvent::Heard(message) => self.heard(message, now, actions),
            MeterEvent::ProbeAnswered => {
                if let Link::Up { heard, probe } = &mut self.link
                    && probe.take().is_some()
                {
                    *heard = now;
                }
            }
            MeterEvent::ProbeFailed => {
                if matches!(self.link, Link::Up { probe: Some(_), .. }) {
                    self.disconnect(now, false, actions);
                }
            }
            MeterEvent::DeviceFound { device, uuid, ground, ticket } => {
                let is_known = self.devices.iter().any(|known| known.ordinal == device);
                assert!(!is_known, "device {} was found before", device.0);
                let mut found = Device::new(device, uuid, ground, self.settings.spec);
                found.attach_ticket = Some(ticket);
                if self.link.is_up() {
                    actions.push(Action::Say(found.attach()));
                }
                self.devices.push(found);
            }
            MeterEvent::MemoryAsked { device, bytes, ticket } => {
                let index = self.index(device);
                self.reserve(index, bytes, ticket, actions);
            }
            MeterEvent::MemoryFreed { device, bytes } => {
                let index = self.index(device);
                self.release(index, bytes, actions);
            }
            MeterEvent::ViewAsked { device, ticket } => {
                let index = self.index(device);
                self.view(index, ticket, actions);
            }
            MeterEvent::ThreadsSeen { launched, synced } => {
                self.crowded = self.launching.look(now, &launched) > 1;
                self.waiters = self.syncing.look(now, &synced);
                self.syncs = synced.iter().sum();
            }
            MeterEvent::Recorded { device, id, segment } => {
                let index = self.index(device);
                self.devices[index].timeline.record(id, segment);
            }
            // The last report has charged the measurements that were under way.
            MeterEvent::WaitOver { device, id }
            | MeterEvent::Completed { device, id, .. }
            | MeterEvent::MeasurementLost { device, id }
                if self.devices[self.index(device)].has_charged(id) => {}
            MeterEvent::WaitOver { device, id } => {
                let index = self.index(device);
                self.devices[index].timeline.wait_over(id);
            }
            MeterEvent::Completed { device, id, start, end } => {
                let index = self.index(device);
                let interval = (start.as_nanos(), end.as_nanos());
                self.devices[index].completed(id, interval, self.crowded, now, actions);
            }
            MeterEvent::MeasurementLost { device, id } => {
                let index = self.index(device);
                self.devices[index].measurement_lost(id, now);
            }
            MeterEvent::Looked { device, facts } => {
                let index = self.index(device);
                let around = self.around();
                self.devices[index].looked(now, &facts, around, actions);
            }
            MeterEvent::Moved { device, result } => {
                let index = self.index(device);
                self.devices[index].moved(result, self.settings.daemon_wait, now, actions);
            }
            MeterEvent::DeadlineReached => {}
            MeterEvent::Leaving { ticket } => {
                if let Some(before) = self.leaving.replace(Leaving { ticket, by: now + LEAVE_WAIT }) {
                    actions.push(Action::Answer { ticket: before.ticket, granted: false });
                }
                for device in &mut self.devices {
                    (device.leaving, device.look_at) = (true, now);
                }
            }
        }
    }

    /// Acts on deadlines and on the consequences of the last event.
    fn advance(&mut self, now: u64, actions: &mut Actions) {
        match self.link {
            Link::Down { retry_at, outage } if now >= retry_at => {
                self.link = Link::Connecting { outage };
                actions.push(Action::Connect);
            }
            Link::Greeting { by, .. } if now >= by => self.disconnect(now, false, actions),
            Link::Up { .. } => self.watch(now, actions),
            _ => {}
        }
        self.settle(now, actions);
        self.fail_memory(now, actions);
        if let Some(leaving) = self.leaving {
            let settled = !self.link.is_up() || self.devices.iter().all(Device::is_settled);
            if settled || now >= leaving.by {
                for device in &mut self.devices {
                    device.leave(now, actions);
                }
                self.leaving = None;
                actions.push(Action::Answer { ticket: leaving.ticket, granted: true });
            }
        }
    }

    fn index(&self, device: Ordinal) -> usize {
        let found = self.devices.iter().position(|known| known.ordinal == device);
        found.unwrap_or_else(|| panic!("device {} was not found before", device.0))
    }

    fn of_client(&mut self, client: ClientId) -> Option<&mut Device<G>> {
        self.devices.iter_mut().find(|device| device.client() == Some(client))
    }

    fn around(&self) -> Around {
        let class = self.class.or(self.settings.class);
        Around {
            waiters: self.waiters,
            syncs: self.syncs,
            slo_sensitive: class.is_some_and(ServiceClass::is_slo_sensitive),
        }
    }

    // ---- link ---------------------------------------------------------------------------------------------------------

    fn connected(&mut self, now: u64, actions: &mut Actions) {
        let Link::Connecting { outage } = self.link else { return };
        // If the daemon has refused at the door and closed, perhaps before these frames, its answer is heard next.
        actions.extend(self.ticket.clone().map(Action::Say));
        actions.push(Action::Say(self.settings.hello.clone()));
        if let Some(class) = self.settings.class {
            actions.push(Action::Say(ToDaemon::Class { class }));
        }
        self.link = Link::Greeting { by: now + self.settings.daemon_wait.greeting_ns(), outage };
    }

    fn connect_failed(&mut self, now: u64) {
        let Link::Connecting { outage } = self.link else { return };
        self.back_off(now, outage);
    }

    /// Schedules the next attempt, and doubles the delay for the attempt after it.
    fn back_off(&mut self, now: u64, outage: Outage) {
        let delay = self.jitter.around(outage.delay);
        let next = (outage.delay * 2).min(RECONNECT.1.max(outage.delay));
        self.link = Link::Down { retry_at: now + delay, outage: Outage { delay: next, ..outage } };
    }

    /// Has the host end the connection. `at_once`: the next connection is made without a delay.
    fn disconnect(&mut self, now: u64, at_once: bool, actions: &mut Actions) {
        let outage = self.link.outage().unwrap_or(Outage::new(now));
        self.link = Link::Closing { outage, at_once };
        actions.push(Action::Disconnect);
    }

    /// The connection is gone, and open questions will not be answered.
    fn lost(&mut self, now: u64, actions: &mut Actions) {
        let (mut outage, at_once) = match self.link {
            Link::Up { .. } => (Outage::new(now), false),
            Link::Greeting { outage, .. } => (outage, false),
            Link::Closing { outage, at_once } => (outage, at_once),
            Link::Down { .. } | Link::Connecting { .. } => return,
        };
        (self.class, self.waits_since) = (None, None);
        let mut deferred = Vec::new();
        for (index, device) in self.devices.iter_mut().enumerate() {
            device.unserved.take_if(|code| !is_final(*code));
            deferred.extend(device.questions.deferred.drain(..).map(|later| (index, later)));
            device.questions.lost(device.ground.memory(), actions);
            device.lost(now, actions);
        }
        if self.refusals > 0 {
            outage.delay = RECONNECT.1.saturating_mul(1 << (self.refusals - 1).min(16)).min(REFUSED);
        }
        self.back_off(now, outage);
        if at_once && let Link::Down { retry_at, .. } = &mut self.link {
            *retry_at = now;
        }
        for (index, later) in deferred {
            self.serve(index, later, actions);
        }
    }

    /// Probes the daemon if it says nothing while a thread waits for it.
    fn watch(&mut self, now: u64, actions: &mut Actions) {
        let Link::Up { heard, probe } = self.link else { return };
        if let Some(by) = probe {
            if now >= by {
                self.disconnect(now, false, actions);
            }
            return;
        }
        let waits = |device: &Device<G>| {
            device.asked
                || !device.questions.shortages.is_empty()
                || device.awaits_time() && device.waiting > 0
        };
        if !self.devices.iter().any(waits) {
            self.waits_since = None;
            return;
        }
        let since = *self.waits_since.get_or_insert(now);
        if now.saturating_sub(since.max(heard)) > self.settings.daemon_wait.silence_ns() {
            self.link = Link::Up { heard, probe: Some(now + self.settings.daemon_wait.greeting_ns()) };
            actions.push(Action::Probe(self.settings.hello.clone()));
        }
    }

    /// Decides about launches on devices without a serving daemon.
    fn settle(&mut self, now: u64, actions: &mut Actions) {
        let down = if let Link::Down { outage, .. } = self.link { Some(outage) } else { None };
        for device in &mut self.devices {
            if let Standing::Unserved(spec) = self.standing {
                device.own_memory(spec);
            }
            match device.attachment {
                Attachment::Served(_) | Attachment::Local(_) => {}
                Attachment::Refused { fails_at } => {
                    if now >= fails_at {
                        device.fail_launches(actions);
                    }
                }
                Attachment::Asking => match (self.standing, down) {
                    (Standing::Refused { fails_at }, _) => device.refuse(fails_at, actions),
                    (Standing::Unserved(spec), _) => device.go_local(spec, now, actions),
                    (Standing::Served, None) if self.settings.spec.is_observed() => {
                        device.go_local(device.spec, now, actions);
                    }
                    (Standing::Served, None) => {}
                    (Standing::Served, Some(outage)) => match self.settings.on_loss {
                        OnDaemonLoss::Open => device.go_local(device.spec, now, actions),
                        OnDaemonLoss::Closed if now > outage.closed_at(self.settings.daemon_wait) => {
                            device.fail_launches(actions);
                        }
                        OnDaemonLoss::Closed => device.wait_closed(actions),
                    },
                },
            }
        }
    }

    // ---- frames -------------------------------------------------------------------------------------------------------

    fn heard(&mut self, message: ToClient, now: u64, actions: &mut Actions) {
        match &mut self.link {
            Link::Up { heard, probe } => (*heard, *probe) = (now, None),
            // The daemon's last part may be smaller, since the difference has been given to another process.
            Link::Closing { .. } if matches!(message, ToClient::MemoryPart { .. }) => {}
            Link::Greeting { .. }
                if matches!(
                    message,
                    ToClient::Welcome { .. } | ToClient::Refused { .. } | ToClient::Unserved { .. }
                ) => {}
            _ => return,
        }
        match message {
            // A second welcome would have the devices attached twice.
            ToClient::Welcome { .. } if self.link.is_up() => {}
            ToClient::Welcome { .. } => self.welcomed(now, actions),
            ToClient::Refused { code, text } => self.turned_away(code, &text, None, now, actions),
            ToClient::Unserved { code, text, spec } => {
                let limits = spec.unwrap_or(self.settings.spec);
                self.turned_away(code, &text, Some(limits), now, actions);
            }
            ToClient::Class { class } => self.class = Some(class),
            ToClient::Ticket { uid, ticket } => self.ticket = Some(ToDaemon::Resume { uid, ticket }),
            ToClient::Attached { ordinal, client, spec, window, in_flight, .. } => {
                // An unasked answer would begin another count of turns.
                let of = |device: &Device<G>| device.asked && device.ordinal == Ordinal(ordinal);
                let Some(index) = self.devices.iter().position(of) else { return };
                let device = &mut self.devices[index];
                let surplus = device.adopt(spec);
                device.served(client, window, in_flight, now, actions);
                device.answer_attach(true, actions);
                self.refusals = 0;
                self.serve_deferred(index, actions);
                self.give_back(client, surplus, now, actions);
            }
            ToClient::Allow { client, turn, allowed, until } => {
                if let Some(device) = self.of_client(client) {
                    device.allowed(client, (turn, allowed, until.as_nanos()), now, actions);
                }
            }
            ToClient::ShareChanged { client, spec } => {
                if let Some(device) = self.of_client(client) {
                    let surplus = device.adopt(spec);
                    self.give_back(client, surplus, now, actions);
                }
            }
            // A throttled request stays in the daemon's wait queue, and is granted without another question.
            ToClient::Throttle { client, until, .. } => {
                if let Some(device) = self.of_client(client) {
                    device.throttled_until = until.as_nanos();
                }
            }
            ToClient::Park { client, on } => {
                if let Some(device) = self.of_client(client) {
                    device.park(on != 0, now);
                }
            }
            message => self.heard_of_memory(&message, actions),
        }
    }

    fn welcomed(&mut self, now: u64, actions: &mut Actions) {
        self.link = Link::Up { heard: now, probe: None };
        self.standing = Standing::Served;
        for device in self.devices.iter_mut().filter(|device| device.unserved.is_none()) {
            if matches!(device.attachment, Attachment::Refused { .. }) {
                device.attachment = Attachment::Asking;
            }
            actions.push(Action::Say(device.attach()));
        }
    }

    /// The daemon refuses a device or the process. `runs`: the limits within which it may run all the same.
    fn turned_away(
        &mut self,
        code: RefusalCode,
        text: &str,
        runs: Option<ResourceSpec>,
        now: u64,
        actions: &mut Actions,
    ) {
        let up = self.link.is_up();
        let fails_at = if is_final(code) { now } else { now + self.settings.daemon_wait.get().as_nanos() };
        if !is_final(code) {
            self.refusals = self.refusals.saturating_add(1);
        }
        // Attachments are answered in order.
        if up
            && is_of_a_device(code)
            && let Some(index) = self.devices.iter().position(|device| device.asked)
        {
            let device = &mut self.devices[index];
            (device.asked, device.unserved) = (false, Some(code));
            // The daemon does not share out an unmanaged device.
            let unmanaged = (code == RefusalCode::UnknownDevice).then_some(self.settings.spec);
            let what = format!("device {}", device.ordinal.0);
            match runs.or(unmanaged) {
                Some(spec) => {
                    device.go_local(spec, now, actions);
                    device.own_memory(spec);
                }
                None => device.refuse(fails_at, actions),
            }
            if is_final(code) || !core::mem::replace(&mut self.told, true) {
                actions.push(Action::Tell(line(&what, text, code, runs.or(unmanaged).is_some())));
            }
            return self.serve_deferred(index, actions);
        }
        if !core::mem::replace(&mut self.told, true) {
            actions.push(Action::Tell(line("this process", text, code, runs.is_some())));
        }
        self.standing = match (runs, self.standing) {
            (Some(spec), _) => Standing::Unserved(spec),
            (None, Standing::Refused { fails_at: before }) => {
                Standing::Refused { fails_at: fails_at.min(before) }
            }
            (None, _) => Standing::Refused { fails_at },
        };
        if self.refusals == 0 {
            self.refusals = LONG_REFUSAL;
        }
        for device in &mut self.devices {
            if device.unserved.is_none_or(|code| !is_final(code)) {
                device.turn_away(runs);
            }
        }
        self.disconnect(now, false, actions);
    }
}

/// The number of threads with the same kind of activity at the same time: it counts the counters that have moved within a sampling
/// interval.
#[derive(Debug, Default)]
struct Moving {
    counts: Vec<u64>,
    since: u64,
    before: usize,
}

impl Moving {
    /// Length of a sampling interval, in ns.
    const INTERVAL: u64 = 50_000_000;

    /// Takes the present counters, and returns the number of counters moved in this interval or in the previous one, whichever is
    /// larger.
    fn look(&mut self, now: u64, counts: &[u64]) -> usize {
        let moved =
            counts.iter().enumerate().filter(|&(at, count)| self.counts.get(at) != Some(count)).count();
        let most = moved.max(self.before);
        if now.saturating_sub(self.since) > Self::INTERVAL {
            counts.clone_into(&mut self.counts);
            (self.since, self.before) = (now, moved);
        }
        most
    }
}

/// Whether a refusal may answer the attachment of a device.
fn is_of_a_device(code: RefusalCode) -> bool {
    matches!(code, RefusalCode::UnknownDevice | RefusalCode::BadSpec | RefusalCode::Full)
}

/// Whether another attempt would be in vain.
fn is_final(code: RefusalCode) -> bool {
    matches!(code, RefusalCode::UnknownDevice | RefusalCode::BadSpec | RefusalCode::NotAllowed)
}

fn line(what: &str, text: &str, code: RefusalCode, runs: bool) -> String {
    let then = if runs { "it runs within its own limits" } else { "its launches fail" };
    format!("the daemon refused {what}: {text} ({code:?}); {then}")
}
