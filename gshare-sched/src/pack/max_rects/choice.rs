//! The choice of a GPU, and of the place on it.

use super::{Gpu, MaxRects, Pod};
use crate::pack::geometry::Rect;
use crate::pack::index::Hole;
use crate::pack::rearrange::Arranger;
use crate::pack::{Demand, PackError, Rectangle};
use gshare_core::GpuId;

/// Most placements of a GPU that is re-arranged: the time of an attempt grows with their square.
const MOST_REARRANGED: usize = 18;

/// Where a demand would go.
#[derive(Debug, Clone, Copy)]
pub(super) enum Choice {
    /// To an open GPU with a hole.
    Hole(Hole),
    /// To an open GPU that has room only in another arrangement, which the arranger found.
    Rearranged(u32),
    /// To a GPU without placements.
    Empty(u32),
}

impl Choice {
    pub(super) const fn gpu(self) -> u32 {
        match self {
            Self::Hole(hole) => hole.gpu(),
            Self::Rearranged(gpu) | Self::Empty(gpu) => gpu,
        }
    }
}

impl MaxRects {
    /// Whether the GPU may take the demand as far as memory and groups go.
    fn accepts(&self, gpu: &Gpu, demand: &Demand) -> bool {
        demand.memory.get() <= gpu.facts.memory_free() && self.keeps_apart(gpu, demand)
    }

    #[inline]
    fn keeps_apart(&self, gpu: &Gpu, demand: &Demand) -> bool {
        demand.apart.is_none_or(|group| !self.has_group(gpu, group))
    }

    #[inline(never)]
    fn has_group(&self, gpu: &Gpu, group: u32) -> bool {
        self.pods.get_few(&gpu.pods).iter().any(|pod| self.apart(*pod) == Some(group))
    }

    pub(super) fn choose(
        &mut self,
        demand: &Demand,
        allowed: &impl Fn(GpuId) -> bool,
    ) -> Result<Choice, PackError> {
        demand.validate()?;
        if let Some(hole) = self.choose_hole(demand, allowed) {
            return Ok(Choice::Hole(hole));
        }
        self.choose_without_hole(demand, allowed)
    }

    /// The same when no open GPU has a hole. Apart, for most often one has.
    #[inline(never)]
    fn choose_without_hole(
        &mut self,
        demand: &Demand,
        allowed: &impl Fn(GpuId) -> bool,
    ) -> Result<Choice, PackError> {
        if self.config.rearrange_gpus > 0 {
            let mut arranger = self.arranger.take().unwrap_or_default();
            let gpu = self.choose_rearranged(demand, allowed, &mut arranger);
            for failed in arranger.failed.drain(..) {
                self.gpus[failed as usize].give_up([demand.quota.get(), demand.sm.get()]);
            }
            self.arranger = Some(arranger);
            if let Some(gpu) = gpu {
                return Ok(Choice::Rearranged(gpu));
            }
        }
        self.choose_empty(demand, allowed).map(Choice::Empty)
    }

    /// A hole of an open GPU for the demand.
    fn choose_hole(&self, demand: &Demand, allowed: &impl Fn(GpuId) -> bool) -> Option<Hole> {
        let (w, h) = (demand.quota.get(), demand.sm.get());
        let accept = |gpu: u32| self.accepts(&self.gpus[gpu as usize], demand) && allowed(GpuId::new(gpu));
        self.index.best_area_fit(w, h, &accept)
    }

    /// An open GPU without a hole that holds the demand in another arrangement, which `arranger` then has.
    fn choose_rearranged(
        &self,
        demand: &Demand,
        allowed: &impl Fn(GpuId) -> bool,
        arranger: &mut Arranger,
    ) -> Option<u32> {
        let newcomer = Rect::new(0, 0, demand.quota.get(), demand.sm.get());
        arranger.failed.clear();
        let room = |id: &u32| {
            let gpu = &self.gpus[*id as usize];
            gpu.area_free() >= newcomer.area() && self.accepts(gpu, demand) && allowed(GpuId::new(*id))
        };
        let candidates = self.areas.freest(newcomer.area()).filter(room);
        candidates.take(self.config.rearrange_gpus as usize).find(|gpu| {
            let state = &self.gpus[*gpu as usize];
            if state.pods.len() > MOST_REARRANGED || state.hopeless.contains(&[newcomer.w(), newcomer.h()]) {
                return false;
            }
            let (bin, pods) = (state.bin(), self.pods.get_few(&state.pods));
            // A newcomer that fits neither beside nor above one of the pods fits in no arrangement.
            let excludes =
                |pod: &Pod| pod.rect.w() + newcomer.w() > bin.w() && pod.rect.h() + newcomer.h() > bin.h();
            let items = pods.iter().map(|pod| pod.rect).chain([newcomer]);
            let fits = !pods.iter().any(excludes) && arranger.arrange(bin, items);
            if !fits {
                arranger.failed.push(*gpu);
            }
            fits
        })
    }

    fn choose_empty(&self, demand: &Demand, allowed: &impl Fn(GpuId) -> bool) -> Result<u32, PackError> {
        let (w, h) = (demand.quota.get(), demand.sm.get());
        let accept = |gpu: u32| self.accepts(&self.gpus[gpu as usize], demand) && allowed(GpuId::new(gpu));
        self.index.best_empty(w, h, &accept).ok_or_else(|| self.why_not(demand, allowed))
    }

    fn why_not(&self, demand: &Demand, allowed: &impl Fn(GpuId) -> bool) -> PackError {
        let Demand { quota, sm, memory, .. } = *demand;
        let ever = self.gpus.any_size(|spec| spec.quota >= quota && spec.sm >= sm && spec.memory >= memory);
        if !ever {
            return PackError::NeverFits { quota, sm, memory };
        }
        let without_memory =
            |gpu: u32| self.keeps_apart(&self.gpus[gpu as usize], demand) && allowed(GpuId::new(gpu));
        let (w, h) = (quota.get(), sm.get());
        let room = self.index.best_area_fit(w, h, &without_memory).is_some()
            || self.index.best_empty(w, h, &without_memory).is_some();
        if room { PackError::Memory { memory } } else { PackError::NoRoom { quota, sm } }
    }

    /// Where on its GPU: the lowest, leftmost of the free rectangles of the size of `hole`.
    pub(super) fn position(&self, hole: Hole, w: u16, h: u16) -> Option<Rect> {
        let state = &self.gpus[hole.gpu() as usize];
        Rect::in_the_lowest(self.free.get_few(&state.free), hole.extent(), w, h)
    }

    pub(super) fn check_place_at(
        &self,
        gpu: GpuId,
        at: Rectangle,
        demand: &Demand,
    ) -> Result<Rect, PackError> {
        demand.validate()?;
        let state = self.gpus.known(gpu)?;
        let rect = Rect::from_public(at)
            .filter(|rect| (at.quota, at.sm) == (demand.quota, demand.sm) && state.bin().contains(*rect))
            .ok_or(PackError::BadRectangle { gpu })?;
        if demand.memory.get() > state.facts.memory_free() {
            return Err(PackError::Memory { memory: demand.memory });
        }
        let taken = self.pods.get_few(&state.pods).iter().any(|pod| pod.rect.meets(rect));
        if taken || !self.keeps_apart(state, demand) {
            return Err(PackError::Occupied { gpu });
        }
        Ok(rect)
    }
}
