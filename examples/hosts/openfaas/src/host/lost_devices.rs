//! Loss and return of devices, and the consequences for their instances and requests.

use super::{Host, Turn};
use crate::api::ApiError;
use gshare_core::{FunctionId, GpuId, InstanceId, Timestamp};
use gshare_sched::platform::{DeviceSpec, PlatformEvent};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// The reason that users see while a device is lost.
fn said(gpu: GpuId, why: &str) -> String {
    format!("GPU {} is lost: {why}", gpu.number())
}

impl Host {
    /// A device is there for the first time. `name` is for users.
    ///
    /// # Errors
    /// 400 with the platform's refusal.
    pub fn find_device(
        &mut self,
        now: Timestamp,
        gpu: GpuId,
        name: String,
        spec: DeviceSpec,
    ) -> Result<(), ApiError> {
        self.tell(now, PlatformEvent::DeviceFound { gpu, spec })?;
        self.names.insert(gpu, name);
        Ok(())
    }

    /// All devices seen so far, lost ones included, with their names.
    pub fn devices(&self) -> impl Iterator<Item = (GpuId, &str, &DeviceSpec)> {
        let name = |gpu| self.names.get(gpu).map_or("", String::as_str);
        self.devices.iter().map(move |(gpu, spec)| (*gpu, name(gpu), spec))
    }

    /// A device seen so far.
    pub fn device(&self, gpu: GpuId) -> Option<&DeviceSpec> {
        self.devices.get(&gpu)
    }

    /// The reason for the loss of a device; none while it works.
    pub fn why_lost(&self, gpu: GpuId) -> Option<&str> {
        self.lost.get(&gpu).map(String::as_str)
    }

    /// Takes down the instances on a lost device and tells the platform, which places new ones elsewhere. Has no effect if the
    /// loss is known already.
    pub fn lose_device(&mut self, now: Timestamp, gpu: GpuId, why: &str) {
        if self.lost.contains_key(&gpu) {
            return;
        }
        self.last = self.last.max(now);
        self.lost.insert(gpu, why.to_owned());
        let said = said(gpu, why);
        self.decided(said.clone());
        // Accepted requests must end before the platform hears of the loss, or it would dispatch them again.
        for instance in self.on_device(gpu) {
            self.break_off(instance, &said);
        }
        self.settle();
        let mut functions = BTreeSet::new();
        for instance in self.on_device(gpu) {
            functions.extend(self.take_down(instance, &said));
        }
        self.inform(self.last, PlatformEvent::DeviceLost { gpu });
        for function in functions {
            self.forget_if_gone(function);
        }
    }

    /// Reports a device as found again. Has no effect unless it was lost.
    pub fn device_back(&mut self, now: Timestamp, gpu: GpuId, spec: &DeviceSpec) {
        let Some(why) = self.lost.remove(&gpu) else { return };
        self.last = self.last.max(now);
        self.decided(format!("GPU {} is back", gpu.number()));
        let said = said(gpu, &why);
        for of in self.versions.values_mut().filter(|of| of.problem.as_ref() == Some(&said)) {
            of.problem = None;
        }
        self.inform(now, PlatformEvent::DeviceFound { gpu, spec: spec.clone() });
    }

    /// Instances with a part on this device, parked ones included.
    fn on_device(&self, gpu: GpuId) -> Vec<InstanceId> {
        let there = self.instances.iter().filter(|(_, of)| of.parts.iter().any(|part| part.gpu == gpu));
        there.map(|(id, _)| *id).collect()
    }

    /// Fails the requests that an instance has accepted, and blocks new ones.
    fn break_off(&mut self, instance: InstanceId, why: &str) {
        let Some(known) = self.instances.get_mut(&instance) else { return };
        known.ends = true;
        for request in known.requests.clone() {
            let Some(of) = self.requests.get(&request).filter(|of| of.reached) else { continue };
            // A client that has left needs no answer.
            let _ = of.turn.send(Turn::DeviceLost(why.to_owned()));
            let took = self.last.saturating_since(of.since);
            self.requests.remove(&request);
            known.requests.remove(&request);
            self.events.push_back(PlatformEvent::RequestDone { request, took });
        }
    }

    /// Kills an instance without a report to the platform. Returns its function.
    fn take_down(&mut self, instance: InstanceId, why: &str) -> Option<FunctionId> {
        let mut known = self.instances.remove(&instance)?;
        if let Some(stop) = &known.stop {
            stop.store(true, Ordering::Release);
        }
        for (index, place) in known.processes.iter_mut().enumerate() {
            if let Some(process) = place.process.take() {
                process.kill();
                self.leaving.insert((instance, index), process);
            }
        }
        for request in core::mem::take(&mut known.requests) {
            if let Some(of) = self.requests.get_mut(&request) {
                of.on = None;
            }
        }
        Self::settle_time(&mut self.versions, &mut known);
        let function = known.function;
        let measures = self.versions.get(&function).and_then(|of| of.measures);
        if let Some(of) = self.versions.get_mut(&measures.unwrap_or(function)) {
            of.problem = Some(why.to_owned());
        }
        Some(function)
    }
}
