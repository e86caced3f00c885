//! A packer that is a rule and nothing else: the ledger of GPUs and placements is ours.
//!
//! # Problem
//! Who wants to try another rule (which GPU for this demand?) does not want to write tables of ids. [`ByRule`] keeps
//! them, and asks a [`ChoiceRule`] for each demand. It looks at every GPU, so a place costs O(GPUs): for trials and for
//! small pools. [`MaxRects`](super::MaxRects) and [`DiluPacker`](crate::place::DiluPacker) have an index.
//!
//! # Invariants
//! Memory is never passed and members of a group never share a GPU, with any rule; all else is the rule's. Placements have no
//! offsets.

use crate::pack::{Demand, GpuSpec, GpuStatus, PackError, Packer, Placed, Placement, Rectangle};
use gshare_core::{GpuId, PlacementId, Quota, SmShare};

use super::index::MAX_GPUS;
use super::pool::{GpuFacts, Gpus, PoolGpu, Slots};

/// A GPU that may take a demand, as a rule sees it.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// The GPU's id.
    pub gpu: GpuId,
    /// The GPU's size.
    pub spec: GpuSpec,
    /// The placements on it, by arrival.
    pub held: &'a [Placement],
}

/// Which GPU a demand goes to. Equal candidates must give equal answers.
pub trait ChoiceRule: Send {
    /// One of `candidates`, which come by id and have the memory; `None` when none of them has room.
    fn choose(&self, demand: &Demand, candidates: &[Candidate<'_>]) -> Option<GpuId>;
}

#[derive(Debug, Clone, Default)]
struct Gpu {
    facts: GpuFacts,
    held: Vec<Placement>,
}

impl PoolGpu for Gpu {
    fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    fn placements(&self) -> usize {
        self.held.len()
    }
}

impl Gpu {
    fn accepts(&self, demand: &Demand) -> bool {
        let apart = |held: &Placement| demand.apart.is_none() || held.demand.apart != demand.apart;
        demand.memory.get() <= self.facts.memory_free() && self.held.iter().all(apart)
    }
}

/// A packer by a rule. See the [module documentation](self).
///
/// ```
/// use gshare_sched::pack::{Demand, GpuSpec, Packer};
/// use gshare_core::{Bytes, GpuId, Quota, SmShare};
/// use gshare_sched::pack::by_rule::{ByRule, Candidate, ChoiceRule};
///
/// /// The lowest GPU whose SMs suffice.
/// struct FirstFit;
///
/// impl ChoiceRule for FirstFit {
///     fn choose(&self, demand: &Demand, candidates: &[Candidate<'_>]) -> Option<GpuId> {
///         let used = |on: &Candidate| on.held.iter().map(|held| u32::from(held.demand.sm.get())).sum::<u32>();
///         let fits = |on: &&Candidate| used(on) + u32::from(demand.sm.get()) <= on.spec.sm.get().into();
///         candidates.iter().find(fits).map(|found| found.gpu)
///     }
/// }
///
/// let mut pool = ByRule::new(FirstFit);
/// pool.add_gpu(GpuId::new(0), GpuSpec::new(Bytes::from_gib(16)))?;
/// let half = Demand::new(Quota::WHOLE, SmShare::from_percent(50).ok_or("a share")?);
/// pool.place_all(&[half, half], &mut Vec::new())?;
/// assert!(pool.place(&half).is_err(), "the GPU is full");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ByRule<R> {
    rule: R,
    gpus: Gpus<Gpu>,
    slots: Slots,
}

impl<R: ChoiceRule> ByRule<R> {
    /// A pool without GPUs.
    pub fn new(rule: R) -> Self {
        Self { rule, gpus: Gpus::default(), slots: Slots::default() }
    }

    fn choose(&self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Option<GpuId> {
        let open = |id: GpuId, gpu: &Gpu| allowed(id) && gpu.accepts(demand);
        let present = self.gpus.present().filter(|(id, gpu)| open(*id, gpu));
        let candidates: Vec<Candidate<'_>> = present
            .map(|(gpu, state)| Candidate { gpu, spec: state.facts.spec(), held: &state.held })
            .collect();
        let chosen = self.rule.choose(demand, &candidates)?;
        // A rule that names a GPU it was not shown is not followed.
        self.gpus.find(chosen).is_some_and(|gpu| open(chosen, gpu)).then_some(chosen)
    }
}

impl<R: ChoiceRule> Packer for ByRule<R> {
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.gpus.check_new(gpu, spec, MAX_GPUS)?;
        self.gpus.insert(gpu, Gpu { facts: GpuFacts::new(spec), held: Vec::new() });
        Ok(())
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.gpus.check_removal(gpu)?;
        self.gpus.remove(gpu);
        Ok(())
    }

    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        demand.validate()?;
        let Demand { quota, sm, memory, .. } = *demand;
        if !self.gpus.any_size(|spec| spec.quota >= quota && spec.sm >= sm && spec.memory >= memory) {
            return Err(PackError::NeverFits { quota, sm, memory });
        }
        let gpu = self.choose(demand, allowed).ok_or(PackError::NoRoom { quota, sm })?;
        let slot = self.slots.take(gpu.number());
        let at = Rectangle { time_offset: Quota::ZERO, sm_offset: SmShare::ZERO, quota, sm };
        let placement = Placement::new(self.slots.id(slot), gpu, at, *demand);
        let state = &mut self.gpus[gpu.index()];
        state.facts.memory_used += memory.get();
        state.held.push(placement);
        Ok(Placed::new(placement))
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        let gpu = self.slots.find(id)?;
        let state = &mut self.gpus[gpu as usize];
        let index =
            state.held.iter().position(|held| held.id == id).ok_or(PackError::UnknownPlacement { id })?;
        self.slots.release(id.slot());
        let placement = state.held.remove(index);
        state.facts.memory_used -= placement.demand.memory.get();
        Ok(placement)
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        self.gpus.present().flat_map(|(_, gpu)| &gpu.held).for_each(visit);
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        for (id, gpu) in self.gpus.present() {
            visit(&GpuStatus::new(id, gpu.facts.spec()).with_placements(&gpu.held));
        }
    }
}
