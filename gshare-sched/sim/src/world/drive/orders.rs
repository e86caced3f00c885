//! The execution of the platform's orders.

use super::{Happening, World};
use crate::world::faults::Fault;
use crate::world::simulated::{Body, Phase};
use gshare_core::{Duration, Engine, InstanceId};
use gshare_sched::platform::{Part, PlatformAction, PlatformEvent};
use std::collections::BTreeSet;

impl<E> World<'_, E>
where
    E: Engine<Event = PlatformEvent, Action = PlatformAction>,
{
    pub(super) fn obey(&mut self, action: &PlatformAction) {
        match action {
            PlatformAction::Profile { function } => {
                let takes = self.chances.duration(Duration::from_secs(5), Duration::from_secs(20));
                self.queue.schedule(self.now + takes, Happening::Profiled(function.index()));
            }
            PlatformAction::Start { instance, function, parts, takes, parked, .. } => {
                self.starts(*instance, function.index(), parts, *takes, *parked);
            }
            PlatformAction::Park { instance, keeps } => {
                let (least, most) = self.plan.stop;
                let Some(body) = self.bodies.get_mut(instance) else { return };
                body.lives = *keeps;
                let takes = match keeps {
                    true => self.plan.copy_time(body.function),
                    false => self.chances.duration(least, most),
                };
                self.moves(*instance, Phase::Up, Phase::Leaving, takes, None);
            }
            PlatformAction::Unpark { instance, parts, takes } => {
                let Some(body) = self.bodies.get(instance) else { return };
                let devices = |parts: &[Part]| parts.iter().map(|part| part.gpu).collect::<BTreeSet<_>>();
                let copies = body.lives && devices(&body.parts) == devices(parts);
                let takes = if copies { self.plan.copy_time(body.function) } else { *takes };
                let takes = self.slowed(takes);
                self.moves(*instance, Phase::Away, Phase::Returning, takes, Some(parts));
            }
            PlatformAction::Drain { instance } => {
                if let Some(body) = self.bodies.get_mut(instance).filter(|body| !body.jobs.is_empty()) {
                    body.hangs = core::mem::take(&mut self.armed[Fault::DrainHangs as usize]);
                }
            }
            PlatformAction::Reject { .. } | PlatformAction::Fetch { .. } | PlatformAction::Forget { .. } => {}
            PlatformAction::Stop { instance, .. } => self.stops(*instance),
            PlatformAction::Dispatch { request, instance } => {
                // The platform may not know yet that the instance is gone. It will hear it, and dispatch the request again.
                let Some(body) = self.bodies.get_mut(instance).filter(|body| body.phase == Phase::Up) else {
                    return;
                };
                let index = body.function;
                let function = &self.plan.functions[index];
                let (seed, jitter) = (self.seed, self.plan.jitter.min(100));
                let batch = self.batches.get(instance).copied();
                let of = (*request, batch);
                let took = self.floor.serve(self.now, *instance, body, function, of, (seed, jitter));
                self.used[index] += took.used;
                self.beyond[index] += took.beyond;
                self.schedule_ends();
            }
        }
    }

    /// Adds jitter to a time.
    fn vary(&mut self, time: Duration) -> Duration {
        let jitter = self.plan.jitter.min(99);
        let percent = self.chances.between(100 - jitter, 100 + jitter);
        Duration::from_nanos((time.as_nanos() / 100).saturating_mul(percent).max(1))
    }

    fn slowed(&mut self, time: Duration) -> Duration {
        let slow = core::mem::take(&mut self.armed[Fault::LoadSlow as usize]);
        if slow { time.saturating_mul(self.chances.between(3, 8)) } else { time }
    }

    fn starts(&mut self, id: InstanceId, function: usize, parts: &[Part], takes: Duration, parked: bool) {
        let mut body = Body::new(function);
        self.floor.lay(self.now, &mut body, &self.plan.functions[function], parts);
        body.phase = if parked { Phase::StartsParked } else { Phase::Loading };
        let refused = core::mem::take(&mut self.armed[Fault::StartRefused as usize]);
        if refused {
            body.phase = Phase::Ended;
            let after = self.chances.duration(Duration::from_millis(1), Duration::from_secs(2));
            self.queue.schedule(self.now + after, Happening::Refuses(id));
        } else {
            let takes = self.slowed(takes);
            let takes = self.vary(takes);
            if !core::mem::take(&mut self.armed[Fault::OrderHangs as usize]) {
                self.queue.schedule(self.now + takes, Happening::Carried(id, body.epoch));
            }
        }
        self.bodies.insert(id, body);
    }

    /// Begins to park or to unpark an instance.
    fn moves(&mut self, id: InstanceId, from: Phase, to: Phase, takes: Duration, parts: Option<&[Part]>) {
        let takes = self.vary(takes);
        let Some(body) = self.bodies.get_mut(&id).filter(|body| body.phase == from) else { return };
        match parts {
            Some(parts) => self.floor.lay(self.now, body, &self.plan.functions[body.function], parts),
            None => self.used[body.function] += self.floor.down(self.now, body, false),
        }
        body.phase = to;
        body.epoch += 1;
        body.unparked = parts.map(|_| (self.now, self.now + takes));
        if !core::mem::take(&mut self.armed[Fault::OrderHangs as usize]) {
            self.queue.schedule(self.now + takes, Happening::Carried(id, body.epoch));
        }
    }

    fn stops(&mut self, id: InstanceId) {
        if !self.kill(id) {
            return;
        }
        let (least, most) = self.plan.stop;
        let takes = self.chances.duration(least, most);
        let Some(body) = self.bodies.get(&id) else { return };
        self.queue.schedule(self.now + takes, Happening::Carried(id, body.epoch));
    }
}
