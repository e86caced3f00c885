//! Questions of threads and frames of the daemon about memory.

use gshare_core::wire::{ToClient, ToDaemon};
use gshare_core::{Bytes, ClientId};

use super::Meter;
use crate::device::Attachment;
use crate::memory_questions::{self, Deferred, Shortage};
use crate::{Action, Actions, Ground, Ticket};

impl<G: Ground> Meter<G> {
    pub(super) fn heard_of_memory(&mut self, message: &ToClient, actions: &mut Actions) {
        match *message {
            ToClient::MemoryGrant { client, bytes } => {
                let Some(index) = self.devices.iter().position(|device| device.client() == Some(client))
                else {
                    return;
                };
                let device = &mut self.devices[index];
                device.ground.memory().grant(bytes);
                if let Some(Shortage { bytes, ticket, .. }) = device.questions.shortages.pop_front() {
                    self.reserve(index, bytes, ticket, actions);
                }
            }
            ToClient::MemoryDeny { client, .. } => {
                let Some(index) = self.devices.iter().position(|device| device.client() == Some(client))
                else {
                    return;
                };
                let device = &mut self.devices[index];
                let Some(shortage) = device.questions.shortages.pop_front() else { return };
                let Shortage { bytes, missing, ticket } = shortage;
                // Another thread may have freed memory meanwhile.
                match device.ground.memory().reserve(bytes) {
                    Ok(()) => actions.push(Action::Answer { ticket, granted: true }),
                    Err(less) if less < missing => self.reserve(index, bytes, ticket, actions),
                    Err(_) => actions.push(Action::Answer { ticket, granted: false }),
                }
            }
            ToClient::MemoryPart { client, bytes } => {
                if let Some(device) = self.of_client(client) {
                    device.ground.memory().set_part(bytes);
                }
            }
            ToClient::MemoryAsk { client, round, recall } => {
                if let Some(device) = self.of_client(client) {
                    let memory = device.ground.memory();
                    let surplus = if recall == 0 { Bytes::ZERO } else { memory.recall() };
                    let used = Bytes(memory.used());
                    if surplus > Bytes::ZERO {
                        actions.push(Action::Say(ToDaemon::MemoryRelease { client, bytes: surplus }));
                    }
                    actions.push(Action::Say(ToDaemon::MemoryUsed { client, round, used }));
                }
            }
            ToClient::MemoryMember { client, pid, used } => {
                if let Some(device) = self.of_client(client) {
                    device.questions.members.push((pid, used.0));
                }
            }
            ToClient::MemoryView { client } => {
                if let Some(device) = self.of_client(client) {
                    let mut members = core::mem::take(&mut device.questions.members);
                    let others = members.extract_if(.., |(pid, _)| *pid == 0).last();
                    let memory = device.ground.memory();
                    memory.set_kept(others.map(|(_, kept)| kept));
                    memory.set_siblings(members);
                    if let Some(ticket) = device.questions.views.pop_front() {
                        actions.push(Action::Answer { ticket, granted: true });
                    }
                }
            }
            _ => {}
        }
    }

    pub(super) fn serve_deferred(&mut self, index: usize, actions: &mut Actions) {
        for later in core::mem::take(&mut self.devices[index].questions.deferred) {
            self.serve(index, later, actions);
        }
    }

    pub(super) fn serve(&mut self, index: usize, later: Deferred, actions: &mut Actions) {
        match later {
            Deferred::Reserve { bytes, ticket } => self.reserve(index, bytes, ticket, actions),
            Deferred::View { ticket } => self.view(index, ticket, actions),
            Deferred::Release { bytes } => self.release(index, bytes, actions),
        }
    }

    /// Denies questions about memory that have waited long enough for a daemon.
    pub(super) fn fail_memory(&mut self, now: u64, actions: &mut Actions) {
        let outage = self.link.outage();
        for device in &mut self.devices {
            if device.memory_fails_at(outage, self.settings.daemon_wait).is_none_or(|fails_at| now < fails_at)
            {
                continue;
            }
            let refused = matches!(device.attachment, Attachment::Refused { .. });
            for later in core::mem::take(&mut device.questions.deferred) {
                match later {
                    Deferred::Reserve { ticket, .. } => {
                        actions.push(Action::Answer { ticket, granted: false });
                        // The daemon's reason for refusing has been told.
                        if !refused && !core::mem::replace(&mut self.told_of_memory, true) {
                            actions.push(Action::Tell(memory_questions::no_part(
                                device.spec,
                                self.settings.daemon_wait,
                            )));
                        }
                    }
                    Deferred::View { ticket } => actions.push(Action::Answer { ticket, granted: false }),
                    Deferred::Release { .. } => {}
                }
            }
        }
    }

    /// Asks the daemon for the memory use of the instance's other processes.
    pub(super) fn view(&mut self, index: usize, ticket: Ticket, actions: &mut Actions) {
        let (up, device) = (self.link.is_up(), &mut self.devices[index]);
        match device.client() {
            Some(client) if up => {
                device.questions.views.push_back(ticket);
                actions.push(Action::Say(ToDaemon::MemoryQuery { client }));
            }
            _ if device.ground.memory().awaits_part() => {
                device.questions.deferred.push(Deferred::View { ticket });
            }
            _ => actions.push(Action::Answer { ticket, granted: false }),
        }
    }

    /// Takes memory for a waiting thread, and asks the daemon for the missing amount.
    pub(super) fn reserve(&mut self, index: usize, bytes: u64, ticket: Ticket, actions: &mut Actions) {
        let (up, device) = (self.link.is_up(), &mut self.devices[index]);
        if device.asked {
            return device.questions.deferred.push(Deferred::Reserve { bytes, ticket });
        }
        let memory = device.ground.memory();
        let Err(missing) = memory.reserve(bytes) else {
            return actions.push(Action::Answer { ticket, granted: true });
        };
        match device.attachment {
            Attachment::Served(client) if up && device.spec.memory().is_some() => {
                actions.push(Action::Say(memory_questions::reserve(client, memory, missing)));
                device.questions.shortages.push_back(Shortage { bytes, missing, ticket });
            }
            _ if memory.awaits_part() => device.questions.deferred.push(Deferred::Reserve { bytes, ticket }),
            _ => {
                let granted = memory_questions::reserve_alone(memory, bytes);
                actions.push(Action::Answer { ticket, granted });
            }
        }
    }

    pub(super) fn release(&mut self, index: usize, bytes: Bytes, actions: &mut Actions) {
        let (up, device) = (self.link.is_up(), &mut self.devices[index]);
        if device.asked {
            device.questions.deferred.push(Deferred::Release { bytes });
        } else if up && let Some(client) = device.client() {
            actions.push(Action::Say(ToDaemon::MemoryRelease { client, bytes }));
        }
    }

    /// Gives granted memory beyond a new limit back to the daemon. `None`: all memory is stated again, on a new connection.
    pub(super) fn give_back(
        &mut self,
        client: ClientId,
        surplus: Option<Bytes>,
        now: u64,
        actions: &mut Actions,
    ) {
        match surplus {
            Some(Bytes::ZERO) => {}
            Some(bytes) => actions.push(Action::Say(ToDaemon::MemoryRelease { client, bytes })),
            None => self.disconnect(now, true, actions),
        }
    }
}
