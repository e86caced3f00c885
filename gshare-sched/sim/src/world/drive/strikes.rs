//! The faults as they strike: lost devices and nodes, dead instances, cancelled requests.

use super::{Happening, World};
use crate::world::faults::Fault;
use crate::world::simulated::{Body, Phase};
use gshare_core::{Engine, GpuId, InstanceId, NodeId, RequestId, Timestamp};
use gshare_sched::platform::{InstanceReport, PlatformAction, PlatformEvent};

impl<E> World<'_, E>
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    pub(super) fn schedule_fault(&mut self, fault: Fault) {
        let Some(after) = self.plan.faults.next(fault, &mut self.chances) else { return };
        let at = self.now.saturating_add(after);
        if at.saturating_since(Timestamp::ZERO) < self.plan.length {
            self.queue.schedule(at, Happening::Goes(fault));
        }
    }

    pub(super) fn goes(&mut self, fault: Fault) -> Result<(), String> {
        let happened = match fault {
            Fault::DeviceLost => {
                let there = self.devices(|_| true);
                match self.chances.pick(&there).copied() {
                    Some(gpu) => self.lose(&[gpu])?,
                    None => false,
                }
            }
            Fault::NodeLost => {
                let there = self.devices(|_| true);
                match self.chances.pick(&there).map(|gpu| self.floor.devices[gpu.index()].spec.node) {
                    Some(node) => {
                        let all = self.devices(|other| other == node);
                        self.lose(&all)?;
                        let parked = self.bodies.iter().filter(|(_, body)| body.node == Some(node));
                        let parked: Vec<_> = parked
                            .filter(|(_, body)| body.phase != Phase::Ended)
                            .map(|(id, _)| *id)
                            .collect();
                        for id in parked {
                            self.die(id)?;
                        }
                        true
                    }
                    None => false,
                }
            }
            Fault::InstanceDies => {
                // The draw takes a state first and then an instance in it, since few instances are parked, and more work than
                // start.
                let state = |body: &Body| (body.phase, body.jobs.is_empty());
                let mut states: Vec<_> =
                    self.bodies.values().filter(|body| body.phase != Phase::Ended).map(state).collect();
                states.sort_unstable();
                states.dedup();
                let drawn = self.chances.pick(&states).copied();
                let alike: Vec<InstanceId> = self
                    .bodies
                    .iter()
                    .filter(|(_, body)| Some(state(body)) == drawn)
                    .map(|(id, _)| *id)
                    .collect();
                match self.chances.pick(&alike).copied() {
                    Some(id) => {
                        self.die(id)?;
                        true
                    }
                    None => false,
                }
            }
            Fault::StartRefused
            | Fault::LoadSlow
            | Fault::ReportLate
            | Fault::OrderHangs
            | Fault::DrainHangs => {
                self.armed[fault as usize] = true;
                true
            }
            Fault::ClientCancels => {
                // The request is one of the last, since earlier requests have ended.
                let back = self.chances.below(self.requests.min(64));
                let request = RequestId::new(self.requests.saturating_sub(1 + back));
                let open = self.book.is_open(request);
                if open {
                    self.tell(PlatformEvent::RequestCancelled { request })?;
                }
                open
            }
        };
        *self.outcome.faults.entry(fault).or_insert(0) += u64::from(happened);
        Ok(())
    }

    fn die(&mut self, id: InstanceId) -> Result<(), String> {
        if !self.kill(id) {
            return Ok(());
        }
        if let Some(life) = self.book.life(id) {
            *self.outcome.deaths.entry(life).or_insert(0) += 1;
        }
        self.note(|| format!("{id} dies"));
        self.report(id, InstanceReport::Gone)
    }

    fn devices(&self, of: impl Fn(NodeId) -> bool) -> Vec<GpuId> {
        let devices = (0..).map(GpuId::new).zip(&self.floor.devices);
        devices.filter(|(_, device)| device.there && of(device.spec.node)).map(|(gpu, _)| gpu).collect()
    }

    /// Loses devices at one moment, and plans their joint return.
    fn lose(&mut self, gpus: &[GpuId]) -> Result<bool, String> {
        let (least, most) = self.plan.faults.back;
        let back = self.now + self.chances.duration(least, most);
        for &gpu in gpus {
            self.floor.devices[gpu.index()].there = false;
        }
        let on = |body: &Body| {
            body.phase != Phase::Ended && body.parts.iter().any(|part| gpus.contains(&part.gpu))
        };
        let lost: Vec<InstanceId> =
            self.bodies.iter().filter(|(_, body)| on(body)).map(|(id, _)| *id).collect();
        for &id in &lost {
            self.kill(id);
        }
        for &gpu in gpus {
            self.tell(PlatformEvent::DeviceLost { gpu })?;
            self.queue.schedule(back, Happening::Returns(gpu));
        }
        self.bodies.retain(|id, _| self.book.has_instance(*id));
        Ok(true)
    }

    pub(super) fn found(&mut self, gpu: GpuId) -> Result<(), String> {
        let device = &mut self.floor.devices[gpu.index()];
        device.there = true;
        let spec = device.spec.clone();
        self.tell(PlatformEvent::DeviceFound { gpu, spec })
    }
}
