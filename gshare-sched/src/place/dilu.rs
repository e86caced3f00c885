//! The placement engine. See the [module documentation](super).

use std::collections::BTreeMap;

use crate::pack::{Demand, GpuSpec, GpuStatus, PackError, Packer, Placed, Placement, Rectangle, Workload};
use gshare_core::{Bytes, ConfigError, FunctionId, GpuId, PlacementId, Quota, SmShare};

use super::grid::{Free, Grid, MAX_GPUS, Need, score};
use crate::pack::pool::{GpuFacts, Gpus, PoolGpu, Slots};
use crate::pack::runs::{Run, Runs};
use crate::pack::sets::Sets;

gshare_core::config! {
    /// Configuration of [`DiluPacker`]. Defaults are the published ones (Dilu, section 3.3).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
    #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
    pub struct DiluConfig {
        /// Most limits on a GPU, in basis points of its SMs. Default 15 000: beyond 1.5 the paper finds little more to win.
        pub gamma_bp: u32 = 15_000, with_gamma_bp;
        /// An inference instance goes first to a GPU that hosts a training job which its function shares a GPU with already
        /// (Principle 1). Default: true.
        pub affinity: bool = true, with_affinity;
    }
}

impl DiluConfig {
    fn validate(&self) -> Result<(), ConfigError> {
        gshare_core::check_fields!(self {
            gamma_bp in 10_000..=1_000_000, "need 10000 to 1000000";
        })
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Gpu {
    facts: GpuFacts,
    request_used: u32,
    limit_used: u32,
    pods: Run,
}

impl PoolGpu for Gpu {
    fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    fn placements(&self) -> usize {
        self.pods.len()
    }
}

/// Set of GPUs without placements, smallest first.
const EMPTY: usize = 0;

/// Dilu's placement over a pool of GPUs. See the [module documentation](super).
///
/// ```
/// use gshare_sched::pack::{Demand, GpuSpec, Packer};
/// use gshare_core::{Bytes, GpuId, Quota, SmShare};
/// use gshare_sched::place::{DiluConfig, DiluPacker};
///
/// let mut pool = DiluPacker::new(DiluConfig::default())?;
/// for gpu in 0..2 {
///     pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(40)))?;
/// }
/// let share = |percent| SmShare::from_percent(percent).ok_or("a share");
/// let roberta = Demand::new(Quota::WHOLE, share(30)?)
///     .with_sm_limit(share(60)?)
///     .with_memory(Bytes::from_gib(6));
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId::new(0));
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId::new(0), "limits sum to 1.2, below gamma");
/// assert_eq!(pool.place(&roberta)?.placement.gpu, GpuId::new(1), "1.8 would pass it");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct DiluPacker {
    config: DiluConfig,
    gpus: Gpus<Gpu>,
    pods: Runs<u32>,
    slots: Slots,
    /// By slot.
    demands: Vec<Demand>,
    grid: Grid,
    empty: Sets,
    largest: (u32, u64),
    /// Slots of each function's placements, for affinity.
    functions: BTreeMap<FunctionId, Vec<u32>>,
}

impl DiluPacker {
    /// A pool without GPUs.
    ///
    /// # Errors
    /// A field that is out of its bounds.
    pub fn new(config: DiluConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self {
            config,
            gpus: Gpus::default(),
            pods: Runs::default(),
            slots: Slots::default(),
            demands: Vec::new(),
            grid: Grid::new(config.gamma_bp, 10_000, 0),
            empty: Sets::new(1),
            largest: (10_000, 0),
            functions: BTreeMap::new(),
        })
    }
}

// Choosing.
impl DiluPacker {
    /// The GPUs that are open.
    fn indexed(&self) -> impl Iterator<Item = u32> {
        let open = self.gpus.present().filter(|(_, gpu)| gpu.pods.len() > 0);
        open.map(|(id, _)| id.number())
    }

    fn free(&self, gpu: u32) -> Free {
        let state = &self.gpus[gpu as usize];
        let free = self.free_when_empty(gpu);
        Free {
            request: free.request - state.request_used,
            limit: free.limit - state.limit_used,
            memory: state.facts.memory_free(),
            ..free
        }
    }

    fn free_when_empty(&self, gpu: u32) -> Free {
        let GpuFacts { sm, memory, .. } = self.gpus[gpu as usize].facts;
        let sm = u32::from(sm.get());
        let most_limit = u64::from(sm) * u64::from(self.config.gamma_bp) / 10_000;
        let limit = u32::try_from(most_limit).unwrap_or(u32::MAX);
        // Requests are at most all SMs (Omega is 1): guarantees are not oversold.
        Free { request: sm, limit, memory, sm, capacity: memory }
    }

    fn keeps_apart(&self, gpu: u32, demand: &Demand) -> bool {
        let Some(group) = demand.apart else { return true };
        let mut pods = self.pods.get(self.gpus[gpu as usize].pods).iter();
        pods.all(|slot| self.demands[*slot as usize].apart != Some(group))
    }

    fn choose(&self, demand: &Demand, allowed: &impl Fn(GpuId) -> bool) -> Result<u32, PackError> {
        demand.validate()?;
        let need = need(demand);
        if let Some(gpu) = self.choose_open(demand, need, allowed) {
            return Ok(gpu);
        }
        let start = need.memory >> 20 << (GPU_BITS + SM_BITS);
        let mut cursor = self.empty.seek(EMPTY, start);
        while let Some(at) = cursor {
            let gpu = gpu_of(self.empty.key(at));
            if self.free(gpu).holds(need) && allowed(GpuId::new(gpu)) {
                return Ok(gpu);
            }
            cursor = self.empty.next(at);
        }
        Err(self.why_not(demand, need, allowed))
    }

    /// An open GPU: by affinity, else by best fit.
    fn choose_open(&self, demand: &Demand, need: Need, allowed: &impl Fn(GpuId) -> bool) -> Option<u32> {
        let accept = |gpu: u32| allowed(GpuId::new(gpu)) && self.keeps_apart(gpu, demand);
        match demand.workload {
            Workload::Inference if self.config.affinity && demand.function.is_some() => self
                .best_affine(demand, need, &accept)
                .or_else(|| self.grid.best_fit(need, |gpu| self.free(gpu), &accept)),
            _ => self.grid.best_fit(need, |gpu| self.free(gpu), &accept),
        }
    }

    /// The best of the GPUs that host another worker of a training job with which this function shares a GPU already.
    fn best_affine(&self, demand: &Demand, need: Need, accept: &impl Fn(u32) -> bool) -> Option<u32> {
        let own = self.functions.get(&demand.function?)?;
        let hosts = |gpu: u32| own.iter().any(|slot| self.slots.gpu(*slot) == gpu);
        let mut best: Option<(u64, u32)> = None;
        for slot in own {
            let gpu = self.slots.gpu(*slot);
            for neighbour in self.pods.get(self.gpus[gpu as usize].pods) {
                let neighbour = &self.demands[*neighbour as usize];
                let (Workload::Training, Some(job)) = (neighbour.workload, neighbour.function) else {
                    continue;
                };
                for worker in self.functions.get(&job).into_iter().flatten() {
                    let gpu = self.slots.gpu(*worker);
                    let free = self.free(gpu);
                    let key = (score(&free), gpu);
                    if best.is_none_or(|best| key < best) && !hosts(gpu) && free.holds(need) && accept(gpu) {
                        best = Some(key);
                    }
                }
            }
        }
        best.map(|(_, gpu)| gpu)
    }

    fn why_not(&self, demand: &Demand, need: Need, allowed: &impl Fn(GpuId) -> bool) -> PackError {
        let Demand { quota, sm, memory, .. } = *demand;
        let ever = self.gpus.any_size(|spec| {
            let whole = u64::from(spec.sm.get());
            let limit = whole * u64::from(self.config.gamma_bp) / 10_000;
            u64::from(need.request) <= whole && u64::from(need.limit) <= limit && memory <= spec.memory
        });
        if !ever {
            return PackError::NeverFits { quota, sm, memory };
        }
        let without_memory = Need { memory: 0, ..need };
        let room = self.gpus.present().any(|(id, _)| {
            allowed(id)
                && self.free(id.number()).holds(without_memory)
                && self.keeps_apart(id.number(), demand)
        });
        if room { PackError::Memory { memory } } else { PackError::NoRoom { quota, sm } }
    }
}

// Changing.
impl DiluPacker {
    fn commit(&mut self, gpu: u32, demand: Demand) -> Placed {
        let slot = self.slots.take(gpu);
        match self.demands.get_mut(slot as usize) {
            Some(entry) => *entry = demand,
            None => self.demands.push(demand),
        }
        self.attach(gpu, slot);
        self.invariants(gpu);
        Placed::new(self.placement_of(slot))
    }

    fn attach(&mut self, gpu: u32, slot: u32) {
        let demand = self.demands[slot as usize];
        self.unlink(gpu);
        let need = need(&demand);
        let state = &mut self.gpus[gpu as usize];
        self.pods.push(&mut state.pods, slot);
        state.request_used += need.request;
        state.limit_used += need.limit;
        state.facts.memory_used += need.memory;
        if let Some(function) = demand.function {
            self.functions.entry(function).or_default().push(slot);
        }
        self.link(gpu);
    }

    fn detach(&mut self, gpu: u32, slot: u32) {
        self.unlink(gpu);
        let demand = self.demands[slot as usize];
        let need = need(&demand);
        let state = &mut self.gpus[gpu as usize];
        if let Some(index) = self.pods.get(state.pods).iter().position(|held| *held == slot) {
            self.pods.remove(&mut state.pods, index);
        }
        state.request_used -= need.request;
        state.limit_used -= need.limit;
        state.facts.memory_used -= need.memory;
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
        let GpuFacts { sm, memory, .. } = self.gpus[gpu as usize].facts;
        memory >> 20 << (GPU_BITS + SM_BITS) | u64::from(sm.get()) << GPU_BITS | u64::from(gpu)
    }

    fn unlink(&mut self, gpu: u32) {
        let state = &self.gpus[gpu as usize];
        if state.pods.len() == 0 {
            self.empty.remove(EMPTY, self.empty_key(gpu));
            return;
        }
        self.grid.remove(&self.free(gpu), gpu);
    }

    fn link(&mut self, gpu: u32) {
        let state = &self.gpus[gpu as usize];
        if state.pods.len() == 0 {
            self.empty.insert(EMPTY, self.empty_key(gpu));
            return;
        }
        let free = self.free(gpu);
        self.grid.insert(&free, gpu);
    }

    fn placement_of(&self, slot: u32) -> Placement {
        let (demand, gpu) = (self.demands[slot as usize], GpuId::new(self.slots.gpu(slot)));
        Placement::new(self.slots.id(slot), gpu, rectangle(&demand), demand)
    }

    fn status(&self, id: GpuId, gpu: &Gpu) -> GpuStatus {
        let areas = self.pods.get(gpu.pods).iter().map(|slot| {
            let demand = &self.demands[*slot as usize];
            u64::from(demand.quota.get()) * u64::from(demand.sm.get())
        });
        gpu.status(id, areas.sum())
    }

    /// Checks the properties that hold of a GPU after every change. Debug builds only.
    fn invariants(&self, gpu: u32) {
        if !cfg!(debug_assertions) {
            return;
        }
        let state = &self.gpus[gpu as usize];
        let (mut request, mut limit, mut memory) = (0, 0, 0);
        for slot in self.pods.get(state.pods) {
            let need = need(&self.demands[*slot as usize]);
            assert_eq!(self.slots.gpu(*slot), gpu, "a slot knows its GPU");
            request += need.request;
            limit += need.limit;
            memory += need.memory;
        }
        assert_eq!(
            (request, limit, memory),
            (state.request_used, state.limit_used, state.facts.memory_used),
            "the ledgers are the sums"
        );
        assert!(memory + state.facts.aside <= state.facts.memory, "memory is never passed");
        let sm = u64::from(state.facts.sm.get());
        assert!(u64::from(request) <= sm, "requests are at most the whole");
        assert!(u64::from(limit) * 10_000 <= sm * u64::from(self.config.gamma_bp), "limits stay below gamma");
    }
}

impl Packer for DiluPacker {
    fn add_gpu(&mut self, gpu: GpuId, spec: GpuSpec) -> Result<(), PackError> {
        self.gpus.check_new(gpu, spec, MAX_GPUS)?;
        let limit = Bytes(1 << (63 - 14 - GPU_BITS + 20));
        if spec.memory >= limit {
            return Err(PackError::GpuTooLarge { gpu, memory: spec.memory, limit });
        }
        let memory = spec.memory.get();
        self.gpus.insert(gpu, Gpu { facts: GpuFacts::new(spec), ..Gpu::default() });
        if memory > self.largest.1 {
            // Columns are parts of the largest GPU, so a larger one redraws the grid.
            self.largest.1 = memory;
            self.grid = Grid::new(self.config.gamma_bp, self.largest.0, self.largest.1);
            let indexed: Vec<u32> = self.indexed().collect();
            for id in indexed {
                let free = self.free(id);
                self.grid.insert(&free, id);
            }
        }
        self.link(gpu.number());
        Ok(())
    }

    fn remove_gpu(&mut self, gpu: GpuId) -> Result<(), PackError> {
        self.gpus.check_removal(gpu)?;
        self.unlink(gpu.number());
        self.pods.clear(&mut self.gpus[gpu.index()].pods);
        self.gpus.remove(gpu);
        Ok(())
    }

    fn place_where(&mut self, demand: &Demand, allowed: &dyn Fn(GpuId) -> bool) -> Result<Placed, PackError> {
        let gpu = self.choose(demand, &|gpu| allowed(gpu))?;
        Ok(self.commit(gpu, *demand))
    }

    /// Apart from the above, since a choice without a filter is faster.
    fn place(&mut self, demand: &Demand) -> Result<Placed, PackError> {
        let gpu = self.choose(demand, &|_| true)?;
        Ok(self.commit(gpu, *demand))
    }

    /// The larger of the two shares of a GPU, in basis points.
    fn weight(&self, demand: &Demand) -> u64 {
        let share = u128::from(demand.memory.get()) * 10_000 / u128::from(self.largest.1.max(1));
        u64::try_from(share).unwrap_or(u64::MAX).max(demand.sm.get().into())
    }

    fn release(&mut self, id: PlacementId) -> Result<Placement, PackError> {
        let gpu = self.slots.find(id)?;
        let placement = self.placement_of(id.slot());
        self.detach(gpu, id.slot());
        self.slots.release(id.slot());
        self.invariants(gpu);
        Ok(placement)
    }

    fn placement(&self, id: PlacementId) -> Option<Placement> {
        self.slots.find(id).ok().map(|_| self.placement_of(id.slot()))
    }

    fn set_aside(&mut self, gpu: GpuId, memory: Bytes) -> Result<(), PackError> {
        self.gpus.known(gpu)?;
        self.unlink(gpu.number());
        let set = self.gpus[gpu.index()].facts.set_aside(memory);
        self.link(gpu.number());
        set
    }

    fn placements(&self, visit: &mut dyn FnMut(&Placement)) {
        for (id, _) in self.gpus.present() {
            self.placements_on(id, visit);
        }
    }

    fn placements_on(&self, gpu: GpuId, visit: &mut dyn FnMut(&Placement)) {
        let run = self.gpus.find(gpu).map(|gpu| gpu.pods).unwrap_or_default();
        for slot in self.pods.get(run) {
            visit(&self.placement_of(*slot));
        }
    }

    fn gpus(&self, visit: &mut dyn FnMut(&GpuStatus)) {
        for (id, gpu) in self.gpus.present() {
            visit(&self.status(id, gpu));
        }
    }

    fn gpu(&self, gpu: GpuId) -> Option<GpuStatus> {
        self.gpus.find(gpu).map(|state| self.status(gpu, state))
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
