//! The maximal-rectangles packer. See the [module documentation](super) for the algorithm.

mod choice;

use core::cmp::Reverse;

use crate::pack::{
    Demand, GpuSpec, GpuStatus, PackError, Packer, Placed, Placement, Rectangle, Workload,
    in_order_of_demands,
};
use gshare_core::{Bytes, FunctionId, GpuId, PlacementId, SmShare};

use super::areas::FreeAreas;
use super::geometry::{FreeSet, Rect};
use super::index::{ClassIndex, MAX_GPUS};
use super::pool::{GpuFacts, Gpus, PoolGpu, Slots};
use super::rearrange::Arranger;
use super::runs::{Few, Runs};
use choice::Choice;

gshare_core::config! {
    /// Configuration of [`MaxRects`].
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    pub struct MaxRectsConfig {
        /// How many open GPUs to try to re-arrange before an empty one is opened; 0 = none. Default 4: a GPU costs more
        /// than the microseconds this takes, and the freest four hold most of the gain.
        pub rearrange_gpus: u32 = 4, with_rearrange_gpus;
    }
}

/// All data that a call reads of a GPU lies side by side, since cache misses dominate at 100 000 GPUs: data in four places
/// takes four times as long, and this little more than one miss. In this order a GPU with few placements takes its first
/// three cache lines.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(512))]
struct Gpu {
    facts: GpuFacts,
    /// Its one free rectangle is itself, and the index lists it among the empty GPUs.
    whole: bool,
    area_used: u32,
    /// Sizes (quota, SMs) that fit in no arrangement of its placements as they are, the last found first.
    hopeless: [[u16; 2]; 4],
    free: Few<Rect, 9>,
    pods: Few<Pod, 22>,
}

impl Gpu {
    fn bin(&self) -> Rect {
        Rect::new(0, 0, self.facts.quota.get(), self.facts.sm.get())
    }

    fn area_free(&self) -> u32 {
        self.bin().area() - self.area_used
    }

    fn give_up(&mut self, size: [u16; 2]) {
        self.hopeless.rotate_right(1);
        self.hopeless[0] = size;
    }
}

impl PoolGpu for Gpu {
    fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    fn placements(&self) -> usize {
        self.pods.len()
    }
}

/// A placement on its GPU, and the slot that its id names.
#[derive(Debug, Clone, Copy, Default)]
struct Pod {
    rect: Rect,
    slot: u32,
    /// Zero stands for none: a limit is at least the request, which is not zero.
    sm_limit: SmShare,
    workload: Workload,
    /// Flags of the rare data that [`Extra`] holds for this placement.
    has: u8,
}

impl Pod {
    const APART: u8 = 1;
    const FUNCTION: u8 = 2;

    fn new(rect: Rect, slot: u32, demand: &Demand) -> Self {
        let has = u8::from(demand.apart.is_some()) * Self::APART
            + u8::from(demand.function.is_some()) * Self::FUNCTION;
        Self { rect, slot, sm_limit: demand.sm_limit.unwrap_or_default(), workload: demand.workload, has }
    }
}

/// The parts of a demand beside its size, by slot of its placement.
#[derive(Debug, Clone, Copy, Default)]
#[repr(align(16))]
struct Extra {
    memory: u64,
    apart: u32,
    function: u32,
}

/// The changes that a placement made, to undo them when the rest of its batch does not fit.
struct Undo {
    slot: u32,
    /// The slot was added to the table for it.
    fresh: bool,
    /// Rectangles of the other placements before a re-arrangement.
    before: Option<Vec<Rect>>,
}

/// A pool of GPUs packed by maximal free rectangles. See the [module documentation](super).
///
/// A GPU takes half a KiB with up to 22 placements; ids need not be dense, but every one below the largest takes as much.
///
/// ```
/// use gshare_sched::pack::{Demand, GpuSpec, Packer, MaxRects, MaxRectsConfig};
/// use gshare_core::{Bytes, GpuId, Quota, SmShare};
///
/// let mut pool = MaxRects::new(MaxRectsConfig::default());
/// pool.add_gpu(GpuId::new(0), GpuSpec::new(Bytes::from_gib(16)))?;
/// let half = Demand::new(Quota::WHOLE, SmShare::from_percent(50).ok_or("a share")?);
/// let first = pool.place(&half)?.placement;
/// let second = pool.place(&half)?.placement;
/// assert_eq!(second.rectangle.sm_offset.get(), 5_000);
/// assert!(pool.place(&half).is_err(), "the GPU is full");
/// pool.release(first.id)?;
/// assert!(pool.release(first.id).is_err(), "a stale id is an error");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct MaxRects {
    config: MaxRectsConfig,
    gpus: Gpus<Gpu>,
    pods: Runs<Pod>,
    free: Runs<Rect>,
    slots: Slots,
    /// By slot.
    extras: Vec<Extra>,
    index: ClassIndex,
    /// Open GPUs that are not cordoned. Not kept without re-arrangement.
    areas: FreeAreas,
    open: u32,
    set: FreeSet,
    /// Boxed, for it is taken out while it works. `None` until it is needed.
    arranger: Option<Box<Arranger>>,
}

impl MaxRects {
    /// A pool without GPUs.
    pub fn new(config: MaxRectsConfig) -> Self {
        Self { config, ..Self::default() }
    }

    /// GPUs with at least one placement.
    pub fn open_gpus(&self) -> u32 {
        self.open
    }

    /// The maximal free rectangles of a GPU: a demand fits it without re-arrangement exactly when it fits one.
    pub fn free_rectangles(&self, gpu: GpuId) -> impl Iterator<Item = Rectangle> + '_ {
        let holes = self.gpus.find(gpu).map(|gpu| self.free.get_few(&gpu.free)).unwrap_or_default();
        holes.iter().map(|rect| rect.public())
    }

    /// A cordoned GPU keeps its placements and takes no new ones, except by [`MaxRects::place_at`].
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`].
    pub fn set_cordoned(&mut self, gpu: GpuId, cordoned: bool) -> Result<(), PackError> {
        if self.gpus.known(gpu)?.facts.cordoned != cordoned {
            // One of the two does nothing: a cordoned GPU is not in the index.
            self.unlink(gpu.number());
            self.gpus[gpu.index()].facts.cordoned = cordoned;
            self.link(gpu.number());
        }
        Ok(())
    }

    /// Places a demand exactly here, to restore a running instance.
    ///
    /// # Errors
    /// [`PackError::UnknownGpu`], [`PackError::BadRectangle`], [`PackError::Occupied`], [`PackError::Memory`], and the
    /// errors of an invalid demand.
    pub fn place_at(&mut self, gpu: GpuId, at: Rectangle, demand: &Demand) -> Result<Placement, PackError> {
        let rect = self.check_place_at(gpu, at, demand)?;
        let slot = self.take_slot(gpu.number(), demand);
        let pod = Pod::new(rect, slot, demand);
        self.occupy(gpu.number(), pod);
        self.invariants(gpu.number());
        Ok(self.placement_of(pod))
    }
}

impl MaxRects {
    fn place_filtered(
        &mut self,
        demand: &Demand,
        allowed: &impl Fn(GpuId) -> bool,
        undo: Option<&mut Vec<Undo>>,
    ) -> Result<Placed, PackError> {
        let choice = self.choose(demand, allowed)?;
        let (w, h) = (demand.quota.get(), demand.sm.get());
        let gpu = choice.gpu();
        let mut before = None;
        let rect = match choice {
            // The index found it on this GPU, so there is a position.
            Choice::Hole(hole) => {
                let none = || PackError::NoRoom { quota: demand.quota, sm: demand.sm };
                self.position(hole, w, h).ok_or_else(none)?
            }
            Choice::Rearranged(_) => {
                if undo.is_some() {
                    let pods = self.pods.get_few(&self.gpus[gpu as usize].pods);
                    before = Some(pods.iter().map(|pod| pod.rect).collect());
                }
                // The newcomer was the last item of the arrangement.
                self.arranger.as_ref().and_then(|found| found.placed.last().copied()).unwrap_or_default()
            }
            Choice::Empty(_) => Rect::new(0, 0, w, h),
        };
        let rearranged = matches!(choice, Choice::Rearranged(_));
        let fresh = self.slots.free().is_empty();
        let slot = self.take_slot(gpu, demand);
        if rearranged {
            self.adopt_arrangement(gpu, Pod::new(rect, slot, demand));
        } else {
            self.occupy(gpu, Pod::new(rect, slot, demand));
        }
        self.invariants(gpu);
        let id = self.slots.id(slot);
        if let Some(undo) = undo {
            undo.push(Undo { slot, fresh, before });
        }
        let mut placed = Placed::new(Placement::new(id, GpuId::new(gpu), rect.public(), *demand));
        placed.rearranged = rearranged;
        Ok(placed)
    }

    /// Places all or none. `allowed` sees the GPUs taken so far by this call.
    fn transaction(
        &mut self,
        demands: &[Demand],
        out: &mut Vec<Placed>,
        allowed: impl Fn(&[Placed], GpuId) -> bool,
    ) -> Result<(), PackError> {
        let mut order: Vec<usize> = (0..demands.len()).collect();
        order.sort_by_key(|index| Reverse(self.weight(&demands[*index])));
        let start = out.len();
        let mut undo = Vec::with_capacity(demands.len());
        for index in &order {
            let result = {
                let taken = &out[start..];
                self.place_filtered(&demands[*index], &|gpu| allowed(taken, gpu), Some(&mut undo))
            };
            match result {
                Ok(placed) => out.push(placed),
                Err(reason) => {
                    while let Some(step) = undo.pop() {
                        self.take_back(step);
                    }
                    out.truncate(start);
                    return Err(PackError::Batch { index: *index, reason: Box::new(reason) });
                }
            }
        }
        // The rectangles are those after all re-arrangements.
        for placed in &mut out[start..] {
            if let Some(now) = self.placement(placed.placement.id) {
                placed.placement = now;
            }
        }
        in_order_of_demands(&order, &mut out[start..]);
        Ok(())
    }

    /// As if the placement had never been made: its id will be given again.
    fn take_back(&mut self, step: Undo) {
        let slot = step.slot;
        let gpu = self.slots.gpu(slot);
        if let Some(index) = self.index_of(gpu, slot) {
            self.vacate(gpu, index);
        }
        self.slots.take_back(slot, step.fresh);
        if let Some(before) = step.before {
            self.unlink(gpu);
            let pods = &mut self.gpus[gpu as usize].pods;
            for (pod, rect) in self.pods.get_few_mut(pods).iter_mut().zip(before) {
                pod.rect = rect;
            }
            self.rebuild_free(gpu);
            self.link(gpu);
        }
        self.invariants(gpu);
    }

    #[inline]
    fn take_slot(&mut self, gpu: u32, demand: &Demand) -> u32 {
        let slot = self.slots.take(gpu);
        if slot as usize == self.extras.len() {
            self.extras.push(Extra::default());
        }
        self.fill_slot(slot, demand);
        slot
    }

    #[inline]
    fn fill_slot(&mut self, slot: u32, demand: &Demand) {
        self.extras[slot as usize] = Extra {
            memory: demand.memory.get(),
            apart: demand.apart.unwrap_or_default(),
            function: demand.function.map_or(0, |function| function.number()),
        };
    }

    /// Puts a placement where it says, which is free.
    #[inline]
    fn occupy(&mut self, gpu: u32, pod: Pod) {
        let state = &mut self.gpus[gpu as usize];
        let was_whole = core::mem::replace(&mut state.whole, false);
        self.open += u32::from(!state.is_open());
        if was_whole && !state.facts.cordoned {
            self.index.remove_empty(state.bin(), gpu);
        }
        self.set.occupy(self.free.get_few(&state.free), pod.rect);
        self.pods.push_few(&mut state.pods, pod);
        state.area_used += pod.rect.area();
        state.facts.memory_used += self.extras[pod.slot as usize].memory;
        self.store_free(gpu, was_whole);
    }

    /// Index of the placement of `slot` among its GPU's placements.
    fn index_of(&self, gpu: u32, slot: u32) -> Option<usize> {
        self.pods.get_few(&self.gpus[gpu as usize].pods).iter().position(|pod| pod.slot == slot)
    }

    /// Takes a placement, by [`MaxRects::index_of`], off its GPU.
    fn vacate(&mut self, gpu: u32, index: usize) -> Pod {
        let state = &mut self.gpus[gpu as usize];
        let pod = self.pods.get_few(&state.pods)[index];
        let freed = pod.rect;
        self.pods.remove_few(&mut state.pods, index);
        state.area_used -= freed.area();
        state.facts.memory_used -= self.extras[pod.slot as usize].memory;
        self.open -= u32::from(!state.is_open());
        let used = self.pods.get_few(&state.pods).iter().map(|pod| pod.rect);
        let free = self.free.get_few(&state.free);
        self.set.vacate(state.bin(), free, used, freed);
        self.store_free(gpu, false);
        pod
    }

    /// Writes the work space's result to the GPU and to the index, in which a GPU that is not whole has each of its sizes
    /// once: a size that goes stays when another rectangle has it, and to add or remove one twice changes nothing.
    fn store_free(&mut self, gpu: u32, was_whole: bool) {
        let state = &mut self.gpus[gpu as usize];
        state.hopeless = Default::default();
        state.whole = !state.is_open() && *self.set.after == [state.bin()];
        if !state.facts.cordoned {
            // Hardly ever does another rectangle have the size: one bit each says most often that none has.
            let sizes = self.set.after.iter().fold(0, |sizes, rect| sizes | rect.size_bit());
            for size in self.set.gone.iter() {
                let stays = sizes & size.size_bit() != 0 && !state.whole && same_size(&self.set.after, *size);
                if !was_whole && !stays {
                    self.index.remove(*size, gpu);
                }
            }
            if state.whole {
                self.index.insert_empty(state.bin(), gpu);
            } else {
                for size in self.set.new_ones() {
                    self.index.insert(*size, gpu);
                }
            }
            if self.config.rearrange_gpus > 0 {
                match state.whole {
                    true => self.areas.remove(gpu),
                    false => self.areas.set(gpu, state.area_free()),
                }
            }
        }
        let (after, len) = self.set.after.and_beyond();
        self.free.set_few_of(&mut state.free, after, len);
    }

    /// Takes over the arrangement that the arranger found, with `newcomer` as its last item.
    fn adopt_arrangement(&mut self, gpu: u32, newcomer: Pod) {
        self.unlink(gpu);
        let arranger = self.arranger.take().unwrap_or_default();
        let state = &mut self.gpus[gpu as usize];
        for (pod, rect) in self.pods.get_few_mut(&mut state.pods).iter_mut().zip(&arranger.placed) {
            pod.rect = *rect;
        }
        self.open += u32::from(!state.is_open());
        self.pods.push_few(&mut state.pods, newcomer);
        state.area_used += newcomer.rect.area();
        state.facts.memory_used += self.extras[newcomer.slot as usize].memory;
        self.free.set_few(&mut state.free, &arranger.free);
        self.arranger = Some(arranger);
        self.gpus[gpu as usize].whole = false;
        self.link(gpu);
    }

    fn rebuild_free(&mut self, gpu: u32) {
        let state = &mut self.gpus[gpu as usize];
        let bin = state.bin();
        self.free.set_few(&mut state.free, &[bin]);
        state.whole = !state.is_open();
        for index in 0..state.pods.len() {
            let rect = self.pods.get_few(&state.pods)[index].rect;
            self.set.occupy(self.free.get_few(&state.free), rect);
            self.free.set_few(&mut state.free, &self.set.after);
        }
    }

    /// Takes the GPU out of the index.
    fn unlink(&mut self, gpu: u32) {
        let state = &self.gpus[gpu as usize];
        if state.facts.cordoned {
            return;
        }
        if state.whole {
            self.index.remove_empty(state.bin(), gpu);
            return;
        }
        let free = self.free.get_few(&state.free);
        for (i, size) in free.iter().enumerate() {
            if !same_size(&free[..i], *size) {
                self.index.remove(*size, gpu);
            }
        }
        if self.config.rearrange_gpus > 0 {
            self.areas.remove(gpu);
        }
    }

    /// Brings the GPU into the index.
    fn link(&mut self, gpu: u32) {
        let state = &mut self.gpus[gpu as usize];
        state.hopeless = Default::default();
        if state.facts.cordoned {
            return;
        }
        if state.whole {
            self.index.insert_empty(state.bin(), gpu);
            return;
        }
        let free = self.free.get_few(&state.free);
        for (i, size) in free.iter().enumerate() {
            if !same_size(&free[..i], *size) {
                self.index.insert(*size, gpu);
            }
        }
        if self.config.rearrange_gpus > 0 {
            self.areas.set(gpu, state.area_free());
        }
    }

    fn apart(&self, pod: Pod) -> Option<u32> {
        (pod.has & Pod::APART != 0).then(|| self.extras[pod.slot as usize].apart)
    }

    fn placement_of(&self, pod: Pod) -> Placement {
        let extra = self.extras[pod.slot as usize];
        let rectangle = pod.rect.public();
        let mut demand = Demand::new(rectangle.quota, rectangle.sm)
            .with_memory(Bytes(extra.memory))
            .with_workload(pod.workload);
        demand.sm_limit = (!pod.sm_limit.is_zero()).then_some(pod.sm_limit);
        demand.apart = self.apart(pod);
        demand.function = (pod.has & Pod::FUNCTION != 0).then_some(FunctionId::new(extra.function));
        Placement::new(self.slots.id(pod.slot), GpuId::new(self.slots.gpu(pod.slot)), rectangle, demand)
    }

    /// Checks the properties that hold of a GPU after every change. Debug builds only.
    fn invariants(&self, gpu: u32) {
        if !cfg!(debug_assertions) {
            return;
        }
        let state = &self.gpus[gpu as usize];
        let (pods, free) = (self.pods.get_few(&state.pods), self.free.get_few(&state.free));
        let (mut area, mut memory) = (0, 0);
        for (i, pod) in pods.iter().enumerate() {
            area += pod.rect.area();
            memory += self.extras[pod.slot as usize].memory;
            assert!(state.bin().contains(pod.rect), "a placement lies inside its GPU");
            assert!(!pods[..i].iter().any(|other| other.rect.meets(pod.rect)), "no two placements overlap");
            assert_eq!(self.slots.gpu(pod.slot), gpu, "a slot knows its GPU");
        }
        assert_eq!((area, memory), (state.area_used, state.facts.memory_used), "the ledgers are the sums");
        assert!(memory + state.facts.aside <= state.facts.memory, "memory is never passed");
        for (i, hole) in free.iter().enumerate() {
            assert!(
                state.bin().contains(*hole) && !pods.iter().any(|pod| pod.rect.meets(*hole)),
                "free is free"
            );
            let maximal = !free.iter().enumerate().any(|(j, other)| j != i && other.contains(*hole));
            assert!(maximal, "no free rectangle lies in another");
        }
    }
}

impl Packer for MaxRects {
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.gpus.check_new(gpu, spec, MAX_GPUS)?;
        let state = Gpu { facts: GpuFacts::new(spec), whole: true, ..Gpu::default() };
        self.gpus.insert(gpu, state);
        if self.config.rearrange_gpus > 0 {
            self.areas.reserve(self.gpus.len());
        }
        self.free.set_few(&mut self.gpus[gpu.index()].free, &[state.bin()]);
        self.link(gpu.number());
        Ok(())
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.gpus.check_removal(gpu)?;
        self.unlink(gpu.number());
        let state = &mut self.gpus[gpu.index()];
        self.free.set_few(&mut state.free, &[]);
        self.pods.set_few(&mut state.pods, &[]);
        self.gpus.remove(gpu);
        Ok(())
    }

    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        self.place_filtered(demand, &|gpu| allowed(gpu), None)
    }

    /// Apart from the above, since a search without a filter is faster.
    fn place(&mut self, demand: &Demand) -> Result<Placed, PackError> {
        self.place_filtered(demand, &|_| true, None)
    }

    /// Area, then the longer side.
    fn weight(&self, demand: &Demand) -> u64 {
        let long_side = demand.quota.get().max(demand.sm.get());
        u64::from(area(demand)) << 16 | u64::from(long_side)
    }

    fn place_set(
        &mut self,
        demands: &[Demand],
        allowed: &dyn Fn(&[Placed], GpuId) -> bool,
        out: &mut Vec<Placed>,
    ) -> Result<(), PackError> {
        self.transaction(demands, out, allowed)
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        // Asked for now, this comes in the time that the GPU takes to come.
        core::hint::black_box(self.extras.get(id.index()).map(|extra| extra.memory));
        let gpu = self.slots.find(id)?;
        let index = self.index_of(gpu, id.slot()).ok_or(PackError::UnknownPlacement { id })?;
        let pod = self.vacate(gpu, index);
        let placement = self.placement_of(pod);
        self.slots.release(id.slot());
        self.invariants(gpu);
        Ok(placement)
    }

    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.gpus.known(gpu)?;
        self.gpus[gpu.index()].facts.set_aside(memory)
    }

    fn placement(&self, id: PlacementId) -> Option<Placement> {
        let gpu = self.slots.find(id).ok()?;
        let pods = self.pods.get_few(&self.gpus[gpu as usize].pods);
        pods.iter().find(|pod| pod.slot == id.slot()).map(|pod| self.placement_of(*pod))
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        for (id, _) in self.gpus.present() {
            self.placements_on(id, visit);
        }
    }

    fn placements_on(&self, gpu: GpuId, visit: &mut dyn FnMut(&Placement)) {
        let pods = self.gpus.find(gpu).map(|gpu| self.pods.get_few(&gpu.pods)).unwrap_or_default();
        for pod in pods {
            visit(&self.placement_of(*pod));
        }
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        for (id, gpu) in self.gpus.present() {
            visit(&gpu.status(id, gpu.area_used.into()));
        }
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuStatus> {
        self.gpus.find(gpu).map(|state| state.status(gpu, state.area_used.into()))
    }
}

fn same_size(rects: &[Rect], size: Rect) -> bool {
    rects.iter().any(|rect| rect.size() == size.size())
}

fn area(demand: &Demand) -> u32 {
    u32::from(demand.quota.get()) * u32::from(demand.sm.get())
}
