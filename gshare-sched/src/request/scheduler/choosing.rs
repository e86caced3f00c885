//! The choice for a waiting request whose model is not on the idle GPU at hand: by [`Policy`].

use super::{LocalityScheduler, Room};
use crate::request::Policy;

/// What becomes of the request.
pub(super) enum Choice {
    /// It runs at once on this idle GPU, which has its model.
    Run(u32),
    /// It joins the local queue of this busy GPU, which has its model.
    Queue(u32),
    /// Its model is loaded on this GPU.
    Load(u32, Room),
    /// It keeps its place in the queue until the next GPU is idle.
    Wait,
}

/// A load of the request's model on an idle GPU, with its costs in ns.
struct Load {
    gpu: u32,
    /// None where no room can be made: pinned models and models in use stay, and a model at its limit of copies gets none.
    room: Option<Room>,
    /// Time to load the model and run the request.
    takes: u64,
}

impl Load {
    /// The loading time that its evictions are expected to cost other requests.
    fn worth(&self) -> u64 {
        self.room.as_ref().map_or(0, |room| room.worth)
    }

    fn price(&self) -> u64 {
        if self.room.is_some() { self.takes.saturating_add(self.worth()) } else { u64::MAX }
    }
}

impl LocalityScheduler {
    /// Whether an idle GPU first looks for waiting requests for its own models. If not, requests are placed in order of arrival.
    pub(super) fn seeks_copies(&self) -> bool {
        self.config.policy != Policy::LoadBalance
    }

    fn load_on(&self, gpu: u32, slot: u32) -> Load {
        let room = self.room(gpu, slot);
        Load { gpu, room, takes: self.load_cost(gpu, self.queue.get(slot).model) }
    }

    /// The choice with this idle GPU at hand.
    pub(super) fn choose(&self, gpu: u32, slot: u32) -> Choice {
        let (model, policy) = (self.queue.get(slot).model, self.config.policy);
        if self.seeks_copies()
            && let Some(copy) = self.idle_copy(model)
        {
            return Choice::Run(copy);
        }
        let mut load = self.load_on(gpu, slot);
        let mut cost = load.takes;
        if let Policy::EvictCostAware { .. } = policy {
            // Of each kind that can serve the model, the idle GPUs with the fewest dispatches.
            for other in self.idle_candidates(model).filter(|other| *other != gpu) {
                let elsewhere = self.load_on(other, slot);
                if elsewhere.price() < load.price() {
                    load = elsewhere;
                }
            }
            cost = load.takes.saturating_add(load.worth());
        }
        // A request waits for a copy if that is shorter than a load (GPU-enabled FaaS, Algorithm 2).
        if self.seeks_copies()
            && let Some((_, copy)) = self.busy_copy(model).filter(|(done_in, _)| *done_in < cost)
        {
            return Choice::Queue(copy);
        }
        match load.room {
            Some(room) => Choice::Load(load.gpu, room),
            // A GPU that has a copy may never be idle: others fill its local queue.
            None if self.m(model).is_full() => match (self.idle_copy(model), self.busy_copy(model)) {
                (Some(copy), _) => Choice::Run(copy),
                (None, Some((_, copy))) => Choice::Queue(copy),
                (None, None) => Choice::Wait,
            },
            None => Choice::Wait,
        }
    }
}
