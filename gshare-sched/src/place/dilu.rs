//! The placement engine. See the [module documentation](super).

use core::cmp::Reverse;
use std::collections::BTreeMap;

use gshare_core::pack::{
    Demand, GpuSpec, GpuStatus, PackError, Packer, Placed, Placement, Rectangle, RepackChange, RepackPlan,
    Workload,
};
use gshare_core::{Bytes, FunctionId, GpuId, PlacementId, Quota, SmShare};

use super::grid::{Free, Grid, MAX_GPUS, Need, Weights};
use crate::pack::runs::{Run, Runs};
use crate::pack::sets::Sets;

/// Configuration of [`DiluPacker`]. Defaults are the published ones (Dilu, section 3.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "serde", serde(default))]
#[non_exhaustive]
pub struct DiluConfig {
    /// Weight of the free SM share in the score, in basis points. Default 6000.
    pub alpha_bp: u16,
    /// Weight of the free memory share, in basis points. Default 4000.
    pub beta_bp: u16,
    /// Most requests on a GPU, in basis points of its SMs; at most 10 000. Default 10 000: guarantees are not oversold.
    pub omega_bp: u16,
    /// Most limits on a GPU, in basis points of its SMs. Default 15 000: beyond 1.5 the paper finds little more to win.
    pub gamma_bp: u32,
    /// Whether a large model takes the GPU with the most free memory (the paper) or the best fit. Default: worst fit.
    pub large_models_worst_fit: bool,
}

impl Default for DiluConfig {
    fn default() -> Self {
        Self {
            alpha_bp: 6_000,
            beta_bp: 4_000,
            omega_bp: 10_000,
            gamma_bp: 15_000,
            large_models_worst_fit: true,
        }
    }
}

impl DiluConfig {
    /// The same with another bound on limits, in basis points.
    #[must_use]
    pub const fn with_gamma_bp(self, gamma_bp: u32) -> Self {
        Self { gamma_bp, ..self }
    }

    /// The same with other weights, in basis points.
    #[must_use]
    pub const fn with_weights_bp(self, alpha_bp: u16, beta_bp: u16) -> Self {
        Self { alpha_bp, beta_bp, ..self }
    }

    /// The same with large models by best fit (`false`) or worst fit (`true`).
    #[must_use]
    pub const fn with_large_models_worst_fit(self, worst_fit: bool) -> Self {
        Self { large_models_worst_fit: worst_fit, ..self }
    }

    fn validate(&self) -> Result<(), PackError> {
        let bad = |field, bounds| Err(PackError::Config { field, bounds });
        if self.alpha_bp > 10_000 {
            return bad("alpha_bp", "must be at most 10000");
        }
        if self.beta_bp > 10_000 {
            return bad("beta_bp", "must be at most 10000");
        }
        if self.omega_bp == 0 || self.omega_bp > 10_000 {
            return bad("omega_bp", "must be 1 to 10000");
        }
        if self.gamma_bp < u32::from(self.omega_bp) || self.gamma_bp > 1_000_000 {
            return bad("gamma_bp", "must be omega_bp to 1000000");
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Gpu {
    present: bool,
    cordoned: bool,
    quota: u16,
    sm: u16,
    request_used: u32,
    limit_used: u32,
    memory: u64,
    memory_used: u64,
    pods: Run,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    generation: u32,
    /// `NOWHERE` while the slot is free.
    gpu: u32,
    demand: Demand,
}

const NOWHERE: u32 = u32::MAX;
/// Set of GPUs without placements, smallest first.
const EMPTY: usize = 0;
/// Set of GPUs with placements, by free memory. Kept from the first large model on.
const BY_MEMORY: usize = 1;

/// Dilu's placement over a pool of GPUs. See the [module documentation](super).
///
/// ```
/// use gshare_core::pack::{Demand, GpuSpec, Packer};
/// use gshare_core::{Bytes, GpuId, Quota, SmShare};
/// use gshare_sched::place::{DiluConfig, DiluPacker};
///
/// let mut pool = DiluPacker::new(DiluConfig::default())?;
/// for gpu in 0..2 {
///     pool.add_gpu(GpuId(gpu), GpuSpec::new(Bytes::from_gib(40)))?;
/// }
/// let share = |percent| SmShare::from_percent(percent).ok_or("a share");
/// let roberta = Demand::new(Quota::WHOLE, share(30)?)
///     .with_sm_limit(share(60)?)
///     .with_memory(Bytes::from_gib(6));
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId(0));
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId(0), "limits sum to 1.2, below gamma");
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId(1), "1.8 would pass it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct DiluPacker {
    config: DiluConfig,
    version: u64,
    gpus: Vec<Gpu>,
    pods: Runs<u32>,
    slots: Vec<Slot>,
    free_slots: Vec<u32>,
    grid: Grid,
    orders: Sets,
    has_by_memory: bool,
    largest: (u32, u64),
    specs: Vec<(GpuSpec, u32)>,
    open: u32,
    /// Slots of each function's placements, for affinity.
    functions: BTreeMap<FunctionId, Vec<u32>>,
}

impl DiluPacker {
    /// A pool without GPUs.
    ///
    /// # Errors
    /// [`PackError::Config`].
    pub fn new(config: DiluConfig) -> Result<Self, PackError> {
        config.validate()?;
        let weights = Weights { alpha: config.alpha_bp, beta: config.beta_bp };
        Ok(Self {
            config,
            version: 0,
            gpus: Vec::new(),
            pods: Runs::new(),
            slots: Vec::new(),
            free_slots: Vec::new(),
            grid: Grid::new(weights, config.gamma_bp, 10_000, 0),
            orders: Sets::new(2),
            has_by_memory: false,
            largest: (10_000, 0),
            specs: Vec::new(),
            open: 0,
            functions: BTreeMap::new(),
        })
    }

    /// GPUs with at least one placement.
    pub fn open_gpus(&self) -> u32 {
        self.open
    }

    /// Bytes of heap held, without the lists of functions. For reports.
    pub fn memory_bytes(&self) -> usize {
        self.gpus.capacity() * size_of::<Gpu>()
            + self.pods.bytes()
            + self.slots.capacity() * size_of::<Slot>()
            + self.free_slots.capacity() * size_of::<u32>()
            + self.grid.bytes()
            + self.orders.bytes()
    }

    /// Places a large model, over several GPUs if no single one has the memory: open GPUs with room for its request,
    /// those with the most free memory first, until its memory is covered; the request is charged on each, as its
    /// limit too (Dilu, section 3.3, and the published scheduler). With no way to split it, it gets a new GPU.
    ///
    /// # Errors
    /// As [`Packer::place`].
    pub fn place_split(&mut self, demand: &Demand, out: &mut Vec<Placed>) -> Result<(), PackError> {
        demand.validate()?;
        let need = need(demand);
        if let Some(gpu) = self.choose_open(demand, need, &|_| true) {
            out.push(self.commit(gpu, *demand));
            return Ok(());
        }
        let part = Need { request: need.request, limit: need.request, memory: 0 };
        let fits =
            |gpu: u32, free: &Free| free.memory > 0 && free.holds(part) && self.keeps_apart(gpu, demand);
        let mut candidates = Vec::new();
        self.grid.most_memory(need.request, need.memory, |gpu| self.free(gpu), &fits, &mut candidates);
        let mut parts: Vec<(u32, u64)> = Vec::new();
        let mut left = need.memory;
        for (_, gpu) in candidates {
            let memory = self.free(gpu).memory.min(left);
            if memory > 0 {
                parts.push((gpu, memory));
                left -= memory;
            }
        }
        if left > 0 {
            out.push(self.place_where(demand, &|_| true)?);
            return Ok(());
        }
        for (gpu, memory) in parts {
            let mut piece = demand.with_memory(Bytes(memory));
            piece.sm_limit = None;
            out.push(self.commit(gpu, piece));
        }
        Ok(())
    }
}

// Choosing.
impl DiluPacker {
    fn find(&self, gpu: GpuId) -> Option<&Gpu> {
        self.gpus.get(gpu.index()).filter(|gpu| gpu.present)
    }

    fn known(&self, gpu: GpuId) -> Result<&Gpu, PackError> {
        self.find(gpu).ok_or(PackError::UnknownGpu { gpu })
    }

    fn present(&self) -> impl Iterator<Item = (GpuId, &Gpu)> {
        (0..).map(GpuId).zip(&self.gpus).filter(|(_, gpu)| gpu.present)
    }

    /// The GPUs that are open and not cordoned.
    fn indexed(&self) -> impl Iterator<Item = u32> {
        let open = self.present().filter(|(_, gpu)| !gpu.cordoned && gpu.pods.len() > 0);
        open.map(|(id, _)| id.0)
    }

    fn free(&self, gpu: u32) -> Free {
        let state = &self.gpus[gpu as usize];
        let sm = u32::from(state.sm);
        let most_limit = u64::from(sm) * u64::from(self.config.gamma_bp) / 10_000;
        Free {
            request: sm * u32::from(self.config.omega_bp) / 10_000 - state.request_used,
            limit: u32::try_from(most_limit).unwrap_or(u32::MAX) - state.limit_used,
            memory: state.memory - state.memory_used,
            sm,
            capacity: state.memory,
        }
    }

    fn keeps_apart(&self, gpu: u32, demand: &Demand) -> bool {
        let Some(group) = demand.apart else { return true };
        let mut pods = self.pods.get(self.gpus[gpu as usize].pods).iter();
        pods.all(|slot| self.slots[*slot as usize].demand.apart != Some(group))
    }

    fn choose(&self, demand: &Demand, allowed: &impl Fn(GpuId) -> bool) -> Result<u32, PackError> {
        demand.validate()?;
        let need = need(demand);
        if let Some(gpu) = self.choose_open(demand, need, allowed) {
            return Ok(gpu);
        }
        let start = need.memory >> 20 << (GPU_BITS + SM_BITS);
        let mut cursor = self.orders.seek(EMPTY, start);
        while let Some(at) = cursor {
            let gpu = gpu_of(self.orders.key(at));
            if self.free(gpu).holds(need) && allowed(GpuId(gpu)) {
                return Ok(gpu);
            }
            cursor = self.orders.next(at);
        }
        Err(self.why_not(demand, need, allowed))
    }

    /// An open GPU: by affinity, else by best fit (a large model: by worst fit).
    fn choose_open(&self, demand: &Demand, need: Need, allowed: &impl Fn(GpuId) -> bool) -> Option<u32> {
        let accept = |gpu: u32| allowed(GpuId(gpu)) && self.keeps_apart(gpu, demand);
        match demand.workload {
            Workload::LargeModel if self.config.large_models_worst_fit && !self.has_by_memory => {
                let holds = |gpu: &u32| self.free(*gpu).holds(need) && accept(*gpu);
                self.indexed().filter(holds).max_by_key(|gpu| memory_key(&self.free(*gpu), *gpu))
            }
            Workload::LargeModel if self.config.large_models_worst_fit => {
                let mut cursor = self.orders.last(BY_MEMORY);
                while let Some(at) = cursor {
                    let key = self.orders.key(at);
                    if (key >> GPU_BITS) < need.memory >> 20 {
                        return None;
                    }
                    let gpu = gpu_by_memory(key);
                    if self.free(gpu).holds(need) && accept(gpu) {
                        return Some(gpu);
                    }
                    cursor = self.orders.previous(at);
                }
                None
            }
            Workload::Inference if demand.function.is_some() => self
                .best_affine(demand, need, &accept)
                .or_else(|| self.grid.best_fit(need, |gpu| self.free(gpu), &accept)),
            _ => self.grid.best_fit(need, |gpu| self.free(gpu), &accept),
        }
    }

    /// The best of the GPUs that host another worker of a training job with which this function shares a GPU already.
    fn best_affine(&self, demand: &Demand, need: Need, accept: &impl Fn(u32) -> bool) -> Option<u32> {
        let own = self.functions.get(&demand.function?)?;
        let hosts = |gpu: u32| own.iter().any(|slot| self.slots[*slot as usize].gpu == gpu);
        let weights = Weights { alpha: self.config.alpha_bp, beta: self.config.beta_bp };
        let mut best: Option<(u64, u32)> = None;
        for slot in own {
            let gpu = self.slots[*slot as usize].gpu;
            for neighbour in self.pods.get(self.gpus[gpu as usize].pods) {
                let neighbour = &self.slots[*neighbour as usize].demand;
                let (Workload::Training, Some(job)) = (neighbour.workload, neighbour.function) else {
                    continue;
                };
                for worker in self.functions.get(&job).into_iter().flatten() {
                    let gpu = self.slots[*worker as usize].gpu;
                    let free = self.free(gpu);
                    let key = (weights.score(&free), gpu);
                    if best.is_none_or(|best| key < best)
                        && !hosts(gpu)
                        && !self.gpus[gpu as usize].cordoned
                        && free.holds(need)
                        && accept(gpu)
                    {
                        best = Some(key);
                    }
                }
            }
        }
        best.map(|(_, gpu)| gpu)
    }

    fn why_not(&self, demand: &Demand, need: Need, allowed: &impl Fn(GpuId) -> bool) -> PackError {
        let Demand { quota, sm, memory, .. } = *demand;
        let ever = self.specs.iter().any(|(spec, _)| {
            let whole = u64::from(spec.sm.get());
            let request = whole * u64::from(self.config.omega_bp) / 10_000;
            let limit = whole * u64::from(self.config.gamma_bp) / 10_000;
            u64::from(need.request) <= request && u64::from(need.limit) <= limit && memory <= spec.memory
        });
        if !ever {
            return PackError::NeverFits { quota, sm, memory };
        }
        let without_memory = Need { memory: 0, ..need };
        let room = self.present().any(|(id, gpu)| {
            !gpu.cordoned
                && allowed(id)
                && self.free(id.0).holds(without_memory)
                && self.keeps_apart(id.0, demand)
        });
        if room { PackError::Memory { memory } } else { PackError::NoRoom { quota, sm } }
    }
}

// Changing.
impl DiluPacker {
    fn commit(&mut self, gpu: u32, demand: Demand) -> Placed {
        let slot = match self.free_slots.pop() {
            Some(slot) => {
                let entry = &mut self.slots[slot as usize];
                (entry.gpu, entry.demand) = (gpu, demand);
                slot
            }
            None => {
                self.slots.push(Slot { generation: 0, gpu, demand });
                u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
            }
        };
        self.attach(gpu, slot);
        self.version += 1;
        self.invariants(gpu);
        Placed::new(self.placement_of(slot))
    }

    fn attach(&mut self, gpu: u32, slot: u32) {
        let demand = self.slots[slot as usize].demand;
        if demand.workload == Workload::LargeModel && !self.has_by_memory {
            self.has_by_memory = true;
            let keys: Vec<u64> = self.indexed().map(|gpu| memory_key(&self.free(gpu), gpu)).collect();
            for key in keys {
                self.orders.insert(BY_MEMORY, key);
            }
        }
        self.unlink(gpu);
        let need = need(&demand);
        let state = &mut self.gpus[gpu as usize];
        self.open += u32::from(state.pods.len() == 0);
        self.pods.push(&mut state.pods, slot);
        state.request_used += need.request;
        state.limit_used += need.limit;
        state.memory_used += need.memory;
        if let Some(function) = demand.function {
            self.functions.entry(function).or_default().push(slot);
        }
        self.link(gpu);
    }

    fn detach(&mut self, gpu: u32, slot: u32) {
        self.unlink(gpu);
        let demand = self.slots[slot as usize].demand;
        let need = need(&demand);
        let state = &mut self.gpus[gpu as usize];
        if let Some(index) = self.pods.get(state.pods).iter().position(|held| *held == slot) {
            self.pods.remove(&mut state.pods, index);
        }
        self.open -= u32::from(state.pods.len() == 0);
        state.request_used -= need.request;
        state.limit_used -= need.limit;
        state.memory_used -= need.memory;
        if let Some(function) = demand.function
            && let Some(slots) = self.functions.get_mut(&function)
        {
            slots.retain(|held| *held != slot);
            if slots.is_empty() {
                self.functions.remove(&function);
            }
        }
        self.link(gpu);
    }

    fn empty_key(&self, gpu: u32) -> u64 {
        let state = &self.gpus[gpu as usize];
        state.memory >> 20 << (GPU_BITS + SM_BITS) | u64::from(state.sm) << GPU_BITS | u64::from(gpu)
    }

    fn unlink(&mut self, gpu: u32) {
        let state = &self.gpus[gpu as usize];
        if state.cordoned {
            return;
        }
        if state.pods.len() == 0 {
            self.orders.remove(EMPTY, self.empty_key(gpu));
            return;
        }
        let free = self.free(gpu);
        self.grid.remove(&free, gpu);
        if self.has_by_memory {
            self.orders.remove(BY_MEMORY, memory_key(&free, gpu));
        }
    }

    fn link(&mut self, gpu: u32) {
        let state = &self.gpus[gpu as usize];
        if state.cordoned {
            return;
        }
        if state.pods.len() == 0 {
            self.orders.insert(EMPTY, self.empty_key(gpu));
            return;
        }
        let free = self.free(gpu);
        self.grid.insert(&free, gpu);
        if self.has_by_memory {
            self.orders.insert(BY_MEMORY, memory_key(&free, gpu));
        }
    }

    /// Places all or none, in the order given.
    fn transaction(
        &mut self,
        demands: &[Demand],
        order: &[usize],
        out: &mut Vec<Placed>,
        allowed: impl Fn(&[Placed], GpuId) -> bool,
    ) -> Result<(), PackError> {
        let (start, version) = (out.len(), self.version);
        let slots = self.slots.len();
        for index in order {
            let chosen = {
                let taken = &out[start..];
                self.choose(&demands[*index], &|gpu| allowed(taken, gpu))
            };
            match chosen {
                Ok(gpu) => {
                    let placed = self.commit(gpu, demands[*index]);
                    out.push(placed);
                }
                Err(reason) => {
                    for placed in out.drain(start..).rev() {
                        let slot = placed.placement.id.slot();
                        self.detach(placed.placement.gpu.0, slot);
                        self.slots[slot as usize].gpu = NOWHERE;
                        // Youngest first, so the free slots come back in their order.
                        if (slot as usize) < slots {
                            self.free_slots.push(slot);
                        }
                    }
                    self.slots.truncate(slots);
                    self.version = version;
                    return Err(PackError::Batch { index: *index, reason: Box::new(reason) });
                }
            }
        }
        let mut answers: Vec<(usize, Placed)> = order.iter().copied().zip(out.drain(start..)).collect();
        answers.sort_by_key(|(index, _)| *index);
        out.extend(answers.into_iter().map(|(_, placed)| placed));
        Ok(())
    }

    fn live_slot(&self, id: PlacementId) -> Result<Slot, PackError> {
        let slot = self.slots.get(id.index());
        slot.filter(|slot| slot.generation == id.generation() && slot.gpu != NOWHERE)
            .copied()
            .ok_or(PackError::UnknownPlacement { id })
    }

    fn placement_of(&self, slot: u32) -> Placement {
        let entry = &self.slots[slot as usize];
        let id = PlacementId::new(slot, entry.generation);
        Placement::new(id, GpuId(entry.gpu), rectangle(&entry.demand), entry.demand)
    }

    fn status(&self, id: GpuId, gpu: &Gpu) -> GpuStatus {
        let quota = Quota::new(gpu.quota).unwrap_or(Quota::WHOLE);
        let sm = SmShare::new(gpu.sm).unwrap_or(SmShare::WHOLE);
        let mut status = GpuStatus::new(id, GpuSpec::new(Bytes(gpu.memory)).with_size(quota, sm));
        status.cordoned = gpu.cordoned;
        status.placements = u32::try_from(gpu.pods.len()).unwrap_or(u32::MAX);
        status.memory_used = Bytes(gpu.memory_used);
        let areas = self.pods.get(gpu.pods).iter().map(|slot| {
            let demand = &self.slots[*slot as usize].demand;
            u64::from(demand.quota.get()) * u64::from(demand.sm.get())
        });
        status.area_used = areas.sum();
        status
    }

    /// What must hold of a GPU after every change. Debug builds only.
    fn invariants(&self, gpu: u32) {
        if !cfg!(debug_assertions) {
            return;
        }
        let state = &self.gpus[gpu as usize];
        let (mut request, mut limit, mut memory) = (0, 0, 0);
        for slot in self.pods.get(state.pods) {
            let entry = &self.slots[*slot as usize];
            let need = need(&entry.demand);
            assert_eq!(entry.gpu, gpu, "a slot knows its GPU");
            request += need.request;
            limit += need.limit;
            memory += need.memory;
        }
        assert_eq!(
            (request, limit, memory),
            (state.request_used, state.limit_used, state.memory_used),
            "the ledgers are the sums"
        );
        assert!(memory <= state.memory, "memory is never passed");
        let sm = u64::from(state.sm);
        assert!(
            u64::from(request) * 10_000 <= sm * u64::from(self.config.omega_bp),
            "requests stay below Omega"
        );
        assert!(u64::from(limit) * 10_000 <= sm * u64::from(self.config.gamma_bp), "limits stay below gamma");
    }

    /// The plan that moves these placements off their GPUs, as far as `allowed` and the room go.
    fn plan_moves(&self, trial: &Self, moved: &[(PlacementId, PlacementId)]) -> Vec<RepackChange> {
        let mut changes: Vec<RepackChange> = moved
            .iter()
            .filter_map(|(from, to)| {
                let (old, new) = (self.placement(*from)?, trial.placement(*to)?);
                Some(RepackChange {
                    id: old.id,
                    from_gpu: old.gpu,
                    from: old.rectangle,
                    to_gpu: new.gpu,
                    to: new.rectangle,
                })
            })
            .collect();
        changes.sort_unstable_by_key(|change| change.id);
        changes
    }
}

impl Packer for DiluPacker {
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        if gpu.0 >= MAX_GPUS {
            return Err(PackError::GpuIdTooLarge { gpu, last: GpuId(MAX_GPUS - 1) });
        }
        if self.find(gpu).is_some() {
            return Err(PackError::GpuExists { gpu });
        }
        if spec.sm.is_zero() {
            return Err(PackError::ZeroSize { field: "sm" });
        }
        if spec.quota.is_zero() {
            return Err(PackError::ZeroSize { field: "quota" });
        }
        if spec.memory.get() >> (63 - 14 - GPU_BITS + 20) != 0 {
            return Err(PackError::Config { field: "memory", bounds: "of a GPU must be below 2^48 bytes" });
        }
        if self.gpus.len() <= gpu.index() {
            self.gpus.resize(gpu.index() + 1, Gpu::default());
        }
        match self.specs.iter_mut().find(|(known, _)| *known == spec) {
            Some((_, count)) => *count += 1,
            None => self.specs.push((spec, 1)),
        }
        self.gpus[gpu.index()] = Gpu {
            present: true,
            quota: spec.quota.get(),
            sm: spec.sm.get(),
            memory: spec.memory.get(),
            ..Gpu::default()
        };
        if spec.memory.get() > self.largest.1 {
            // Columns are parts of the largest GPU, so a larger one redraws the grid.
            self.largest.1 = spec.memory.get();
            let weights = Weights { alpha: self.config.alpha_bp, beta: self.config.beta_bp };
            self.grid = Grid::new(weights, self.config.gamma_bp, self.largest.0, self.largest.1);
            let indexed: Vec<u32> = self.indexed().collect();
            for id in indexed {
                let free = self.free(id);
                self.grid.insert(&free, id);
            }
        }
        self.link(gpu.0);
        self.version += 1;
        Ok(())
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        let state = *self.known(gpu)?;
        if state.pods.len() > 0 {
            let placements = u32::try_from(state.pods.len()).unwrap_or(u32::MAX);
            return Err(PackError::GpuInUse { gpu, placements });
        }
        self.unlink(gpu.0);
        let spec = self.status(gpu, &state).spec;
        if let Some(position) = self.specs.iter().position(|(known, _)| *known == spec) {
            self.specs[position].1 -= 1;
            if self.specs[position].1 == 0 {
                self.specs.swap_remove(position);
            }
        }
        let state = &mut self.gpus[gpu.index()];
        self.pods.clear(&mut state.pods);
        *state = Gpu::default();
        self.version += 1;
        Ok(())
    }

    fn set_cordoned(&mut self, gpu: GpuId, cordoned: bool) -> Result<(), PackError> {
        if self.known(gpu)?.cordoned != cordoned {
            // One of the two does nothing: a cordoned GPU is not in the index.
            self.unlink(gpu.0);
            self.gpus[gpu.index()].cordoned = cordoned;
            self.link(gpu.0);
            self.version += 1;
        }
        Ok(())
    }

    fn probe(&self, demand: &Demand) -> Result<GpuId, PackError> {
        self.choose(demand, &|_| true).map(GpuId)
    }

    fn place(&mut self, demand: &Demand) -> Result<Placed, PackError> {
        let gpu = self.choose(demand, &|_| true)?;
        Ok(self.commit(gpu, *demand))
    }

    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        let gpu = self.choose(demand, &|gpu| allowed(gpu))?;
        Ok(self.commit(gpu, *demand))
    }

    /// Sums have no offsets: those of `at` must be zero.
    fn place_at(&mut self, gpu: GpuId, at: Rectangle, demand: &Demand) -> Result<Placement, PackError> {
        demand.validate()?;
        self.known(gpu)?;
        if at != rectangle(demand) {
            return Err(PackError::BadRectangle { gpu });
        }
        let (need, free) = (need(demand), self.free(gpu.0));
        if !free.holds(Need { memory: 0, ..need }) || !self.keeps_apart(gpu.0, demand) {
            return Err(PackError::Occupied { gpu });
        }
        if need.memory > free.memory {
            return Err(PackError::Memory { memory: demand.memory });
        }
        Ok(self.commit(gpu.0, *demand).placement)
    }

    fn place_all(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError> {
        // Largest first, by the larger of the two shares of a GPU.
        let memory = u128::from(self.largest.1.max(1));
        let weight = |demand: &Demand| {
            let share = u128::from(demand.memory.get()) * 10_000 / memory;
            share.max(u128::from(demand.sm.get()))
        };
        let mut order: Vec<usize> = (0..demands.len()).collect();
        order.sort_by_key(|index| Reverse(weight(&demands[*index])));
        self.transaction(demands, &order, out, |_, _| true)
    }

    fn place_gang(&mut self, demands: &[Demand], out: &mut Vec<Placed>) -> Result<(), PackError> {
        let order: Vec<usize> = (0..demands.len()).collect();
        let fresh = |taken: &[Placed], gpu: GpuId| taken.iter().all(|placed| placed.placement.gpu != gpu);
        self.transaction(demands, &order, out, fresh)
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        let slot = self.live_slot(id)?;
        let placement = self.placement_of(id.slot());
        self.detach(slot.gpu, id.slot());
        let entry = &mut self.slots[id.index()];
        (entry.gpu, entry.generation) = (NOWHERE, entry.generation.wrapping_add(1));
        self.free_slots.push(id.slot());
        self.version += 1;
        self.invariants(slot.gpu);
        Ok(placement)
    }

    fn placement(&self, id: PlacementId) -> Option<Placement> {
        self.live_slot(id).ok().map(|_| self.placement_of(id.slot()))
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        for (id, _) in self.present() {
            self.placements_on(id, visit);
        }
    }

    fn placements_on(&self, gpu: GpuId, visit: &mut dyn FnMut(&Placement)) {
        let run = self.find(gpu).map(|gpu| gpu.pods).unwrap_or_default();
        for slot in self.pods.get(run) {
            visit(&self.placement_of(*slot));
        }
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        for (id, gpu) in self.present() {
            visit(&self.status(id, gpu));
        }
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuStatus> {
        self.find(gpu).map(|state| self.status(gpu, state))
    }

    fn version(&self) -> u64 {
        self.version
    }

    fn plan_repack(&self, max_moves: usize) -> RepackPlan {
        let mut trial = self.clone();
        let mut moved: Vec<(PlacementId, PlacementId)> = Vec::new();
        let mut plan = RepackPlan::default();
        plan.version = self.version;
        let mut candidates: Vec<(u32, GpuId)> = self
            .present()
            .filter(|(_, gpu)| gpu.pods.len() > 0)
            .map(|(id, gpu)| (gpu.request_used, id))
            .collect();
        candidates.sort_unstable();
        for (_, gpu) in candidates {
            let mut held: Vec<Placement> = Vec::new();
            trial.placements_on(gpu, &mut |placement| held.push(*placement));
            // A GPU that took in others was filled by this plan; emptying it again would move those twice.
            let filled = held.iter().any(|placement| moved.iter().any(|(_, new)| *new == placement.id));
            if filled || moved.len() + held.len() > max_moves {
                continue;
            }
            let demands: Vec<Demand> = held.iter().map(|placement| placement.demand).collect();
            let mut order: Vec<usize> = (0..demands.len()).collect();
            order.sort_by_key(|index| Reverse((demands[*index].memory, demands[*index].sm)));
            let open: Vec<bool> = trial.gpus.iter().map(|gpu| gpu.pods.len() > 0).collect();
            let mut out = Vec::new();
            let elsewhere = |_: &[Placed], other: GpuId| other != gpu && open[other.index()];
            if trial.transaction(&demands, &order, &mut out, elsewhere).is_err() {
                continue;
            }
            for (old, new) in held.iter().zip(&out) {
                moved.push((old.id, new.placement.id));
                if trial.release(old.id).is_err() {
                    return RepackPlan::default();
                }
            }
            plan.emptied.push(gpu);
        }
        plan.emptied.sort_unstable();
        plan.changes = self.plan_moves(&trial, &moved);
        plan
    }

    fn plan_drain(&self, gpu: GpuId) -> Result<RepackPlan, PackError> {
        self.known(gpu)?;
        let mut trial = self.clone();
        let mut plan = RepackPlan::default();
        plan.version = self.version;
        let mut held: Vec<Placement> = Vec::new();
        self.placements_on(gpu, &mut |placement| held.push(*placement));
        held.sort_by_key(|placement| Reverse((placement.demand.memory, placement.demand.sm)));
        let mut moved = Vec::new();
        for placement in held {
            match trial.place_where(&placement.demand, &|other| other != gpu) {
                Ok(placed) => {
                    moved.push((placement.id, placed.placement.id));
                    trial.release(placement.id)?;
                }
                Err(_) => plan.stuck.push(placement.id),
            }
        }
        if plan.stuck.is_empty() {
            plan.emptied.push(gpu);
        }
        plan.changes = self.plan_moves(&trial, &moved);
        Ok(plan)
    }

    fn apply(&mut self, plan: &RepackPlan) -> Result<(), PackError> {
        let stale = PackError::StalePlan { planned: plan.version, current: self.version };
        if plan.version != self.version {
            return Err(stale);
        }
        // Carry it out on a copy; take the copy only when every sum holds at the end.
        let mut trial = self.clone();
        for change in &plan.changes {
            let slot = trial.live_slot(change.id).map_err(|_| stale.clone())?;
            let at = rectangle(&slot.demand);
            if slot.gpu != change.from_gpu.0 || change.from != at || change.to != at {
                return Err(stale);
            }
            trial.detach(slot.gpu, change.id.slot());
        }
        for change in &plan.changes {
            let demand = trial.slots[change.id.index()].demand;
            trial.known(change.to_gpu).map_err(|_| stale.clone())?;
            if !trial.free(change.to_gpu.0).holds(need(&demand))
                || !trial.keeps_apart(change.to_gpu.0, &demand)
            {
                return Err(stale);
            }
            trial.slots[change.id.index()].gpu = change.to_gpu.0;
            trial.attach(change.to_gpu.0, change.id.slot());
            trial.invariants(change.to_gpu.0);
        }
        trial.version += 1;
        *self = trial;
        Ok(())
    }
}

const GPU_BITS: u32 = 21;
const SM_BITS: u32 = 14;

fn need(demand: &Demand) -> Need {
    Need {
        request: u32::from(demand.sm.get()),
        limit: u32::from(demand.limit().get()),
        memory: demand.memory.get(),
    }
}

/// Sums have no place on the GPU: offsets are zero.
fn rectangle(demand: &Demand) -> Rectangle {
    Rectangle { time_offset: Quota::ZERO, sm_offset: SmShare::ZERO, quota: demand.quota, sm: demand.sm }
}

fn gpu_of(key: u64) -> u32 {
    u32::try_from(key % u64::from(MAX_GPUS)).unwrap_or(0)
}

/// Whole MiB of free memory, then the lowest id last: read from the end.
fn memory_key(free: &Free, gpu: u32) -> u64 {
    free.memory >> 20 << GPU_BITS | u64::from(MAX_GPUS - 1 - gpu)
}

fn gpu_by_memory(key: u64) -> u32 {
    MAX_GPUS - 1 - gpu_of(key)
}
