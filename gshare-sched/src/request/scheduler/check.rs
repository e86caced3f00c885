//! Events that cannot be carried out are refused here, before anything is changed.

use super::{LocalityScheduler, MAX_GPUS, MAX_KINDS, MAX_MODELS, Phase};
use crate::request::cache::{CopyState, ModelCopy};
use crate::request::queue::Place;
use crate::request::{ModelProfile, RequestError, RequestEvent};
use gshare_core::{Bytes, Duration, TimeWentBack, Timestamp};

impl LocalityScheduler {
    /// Refuses what cannot be done, before anything is changed.
    pub(super) fn check(&self, now: Timestamp, event: &RequestEvent) -> Result<(), RequestError> {
        TimeWentBack::check(now, self.now)?;
        let below = |field, value: u32, limit: u32| match value < limit {
            true => Ok(()),
            false => Err(RequestError::OutOfRange { field, value: value.into(), limit: limit.into() }),
        };
        match *event {
            RequestEvent::GpuJoined { gpu, kind, memory, .. } => {
                below("gpu", gpu.number(), MAX_GPUS)?;
                below("kind", kind.number().into(), MAX_KINDS.into())?;
                if self.live_gpu(gpu).is_ok() {
                    return Err(RequestError::GpuExists { gpu });
                }
                match self.kinds.get(usize::from(kind.number())) {
                    Some(&Some(expected)) if expected != memory.0 => {
                        Err(RequestError::KindDiffers { gpu, kind, memory, expected: Bytes(expected) })
                    }
                    _ => Ok(()),
                }
            }
            RequestEvent::GpuLost { gpu } => self.live_gpu(gpu).map(|_| ()),
            RequestEvent::ModelAdded { model, memory } => {
                below("model", model.number(), MAX_MODELS)?;
                let fixed = self.known_model(model).ok().filter(|known| known.asked);
                if memory == Bytes::ZERO || fixed.is_some_and(|known| known.bytes != memory.0) {
                    return Err(RequestError::BadModelMemory { model, memory });
                }
                Ok(())
            }
            RequestEvent::ModelProfiled { model, kind, profile } => {
                self.known_model(model)?;
                below("kind", kind.number().into(), MAX_KINDS.into())?;
                let hour = Duration::from_secs(3600);
                let ModelProfile { load_disk, load_host, infer } = profile;
                if infer.is_zero() || infer > hour || load_disk > hour || load_host > hour {
                    return Err(RequestError::BadProfile { model, kind });
                }
                Ok(())
            }
            RequestEvent::ModelPinned { model, gpu, .. } => {
                self.known_model(model)?;
                self.live_gpu(gpu).map(|_| ())
            }
            RequestEvent::ModelLimited { model, copies } => {
                self.known_model(model)?;
                if copies == 0 { Err(RequestError::NoCopies { model }) } else { Ok(()) }
            }
            RequestEvent::Arrived { request, model, .. } => {
                if self.queue.find(request).is_some() {
                    return Err(RequestError::DuplicateRequest { request });
                }
                self.known_model(model).map(|_| ())
            }
            RequestEvent::Cancelled { request } => match self.queue.find(request) {
                None => Err(RequestError::UnknownRequest { request }),
                Some(slot) if self.queue.get(slot).place == Place::Placed => {
                    Err(RequestError::AlreadyPlaced { request })
                }
                Some(_) => Ok(()),
            },
            RequestEvent::Evicted { gpu, model } => {
                let evicting =
                    |copy: &ModelCopy| copy.model == model.number() && copy.state == CopyState::Evicting;
                match self.live_gpu(gpu)?.copies.iter().any(evicting) {
                    true => Ok(()),
                    false => Err(RequestError::NotOrdered { gpu, what: "evict", model }),
                }
            }
            RequestEvent::Loaded { gpu, model, .. } | RequestEvent::LoadFailed { gpu, model } => {
                match self.live_gpu(gpu)?.phase {
                    Phase::Loading { model: loading, .. } if loading == model.number() => Ok(()),
                    _ => Err(RequestError::NotOrdered { gpu, what: "load", model }),
                }
            }
            RequestEvent::Dropped { gpu, model } => {
                self.live_gpu(gpu)?;
                self.known_model(model).map(|_| ())
            }
            RequestEvent::NotResident { gpu, request } | RequestEvent::Completed { gpu, request, .. } => {
                let on = self.live_gpu(gpu)?;
                let slot = self.queue.find(request).ok_or(RequestError::UnknownRequest { request })?;
                match on.phase == Phase::Running && on.running.contains(&slot) {
                    true => Ok(()),
                    false => Err(RequestError::NotRunning { request, gpu }),
                }
            }
            _ => Ok(()),
        }
    }
}
