//! The ledger of all packers in this crate: the GPUs of the pool, and the placements by id.
//!
//! # Invariants
//! A slot is either free and listed once as free, or held by one placement and knows its GPU; a slot's generation grows
//! with each release, so a stale id finds nothing. The sizes describe exactly the present GPUs.
//!
//! # Cost
//! O(1) per call, but for the sizes: a pool has few, and they are looked through.

use core::ops::{Index, IndexMut};

use crate::pack::{GpuSpec, GpuStatus, PackError};
use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};

/// The GPU of a slot that is free.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// The GPU of a placement, by id. Kept small: a release first misses the cache here, and everything else waits for it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) generation: u32,
    /// [`NOWHERE`] while the slot is free.
    pub(crate) gpu: u32,
}

/// The table of placement ids.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    entries: Vec<Slot>,
    /// The last is used next.
    free: Vec<u32>,
}

impl Slots {
    pub(crate) fn free(&self) -> &[u32] {
        &self.free
    }

    /// A slot for a placement on `gpu`. If the slot equals the table's old length, parallel tables need another entry.
    #[inline]
    pub(crate) fn take(&mut self, gpu: u32) -> u32 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Slot { generation: 0, gpu });
            u32::try_from(self.entries.len() - 1).unwrap_or(u32::MAX)
        });
        self.hold(slot, gpu);
        slot
    }

    /// The placement of this slot is on `gpu` now.
    #[inline]
    pub(crate) fn hold(&mut self, slot: u32, gpu: u32) {
        self.entries[slot as usize].gpu = gpu;
    }

    /// Ends the id of a slot's placement.
    #[inline]
    pub(crate) fn release(&mut self, slot: u32) {
        let entry = &mut self.entries[slot as usize];
        (entry.gpu, entry.generation) = (NOWHERE, entry.generation.wrapping_add(1));
        self.free.push(slot);
    }

    /// Undoes the youngest [`Slots::take`] that was not undone: its id will be given again. `fresh` says that the table
    /// had grown for it.
    pub(crate) fn take_back(&mut self, slot: u32, fresh: bool) {
        if fresh {
            self.entries.pop();
        } else {
            self.entries[slot as usize].gpu = NOWHERE;
            self.free.push(slot);
        }
    }

    #[inline]
    pub(crate) fn id(&self, slot: u32) -> PlacementId {
        PlacementId::new(slot, self.entries[slot as usize].generation)
    }

    #[inline]
    pub(crate) fn gpu(&self, slot: u32) -> u32 {
        self.entries[slot as usize].gpu
    }

    /// The GPU of a live placement.
    #[inline]
    pub(crate) fn find(&self, id: PlacementId) -> Result<u32, PackError> {
        let slot = self.entries.get(id.index());
        let live = slot.filter(|slot| slot.generation == id.generation() && slot.gpu != NOWHERE);
        live.map(|slot| slot.gpu).ok_or(PackError::UnknownPlacement { id })
    }
}

/// The facts that every packer knows of a GPU. `Default` is a GPU that is not present. Small, since each call reads them.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct GpuFacts {
    /// Zero where there is no GPU.
    pub(crate) quota: Quota,
    pub(crate) sm: SmShare,
    pub(crate) cordoned: bool,
    pub(crate) memory: u64,
    /// Bytes held by the placements.
    pub(crate) memory_used: u64,
    /// Bytes that no placement may have.
    pub(crate) aside: u64,
}

impl GpuFacts {
    pub(crate) fn new(spec: GpuSpec) -> Self {
        Self { quota: spec.quota, sm: spec.sm, memory: spec.memory.get(), ..Self::default() }
    }

    pub(crate) const fn spec(&self) -> GpuSpec {
        GpuSpec::new(Bytes(self.memory)).with_size(self.quota, self.sm)
    }

    pub(crate) const fn memory_free(&self) -> u64 {
        self.memory - self.memory_used - self.aside
    }

    /// Sets memory aside in place of what was before.
    pub(crate) fn set_aside(&mut self, memory: Bytes) -> Result<(), PackError> {
        if memory.get() > self.memory - self.memory_used {
            return Err(PackError::Memory { memory });
        }
        self.aside = memory.get();
        Ok(())
    }
}

/// The state that a packer keeps of a GPU. `Default` is a GPU that is not present.
pub(crate) trait PoolGpu: Clone + Default {
    fn facts(&self) -> &GpuFacts;
    fn placements(&self) -> usize;

    fn is_present(&self) -> bool {
        !self.facts().quota.is_zero()
    }

    fn is_open(&self) -> bool {
        self.placements() > 0
    }

    /// The status of the GPU; `area` is the sum over its placements.
    fn status(&self, id: GpuId, area: u64) -> GpuStatus {
        let mut status = GpuStatus::new(id, self.facts().spec());
        status.cordoned = self.facts().cordoned;
        status.placements = u32::try_from(self.placements()).unwrap_or(u32::MAX);
        status.memory_used = Bytes(self.facts().memory_used + self.facts().aside);
        status.area_used = area;
        status
    }
}

/// The GPUs of a pool, by id.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gpus<G> {
    list: Vec<G>,
    /// Distinct sizes of the pool's GPUs with their count: few, and enough to say "never fits".
    sizes: Vec<(GpuSpec, u32)>,
}

impl<G: PoolGpu> Gpus<G> {
    pub(crate) fn find(&self, gpu: GpuId) -> Option<&G> {
        self.list.get(gpu.index()).filter(|gpu| gpu.is_present())
    }

    pub(crate) fn known(&self, gpu: GpuId) -> Result<&G, PackError> {
        self.find(gpu).ok_or(PackError::UnknownGpu { gpu })
    }

    /// The GPUs of the pool, by id.
    pub(crate) fn present(&self) -> impl Iterator<Item = (GpuId, &G)> {
        (0..).map(GpuId::new).zip(&self.list).filter(|(_, gpu)| gpu.is_present())
    }

    /// Ids lie below this.
    pub(crate) const fn len(&self) -> usize {
        self.list.len()
    }

    /// Refuses a GPU that cannot be added.
    pub(crate) fn check_new(&self, gpu: GpuId, spec: GpuSpec, most: u32) -> Result<(), PackError> {
        if gpu.number() >= most {
            return Err(PackError::GpuIdTooLarge { gpu, last: GpuId::new(most - 1) });
        }
        if self.find(gpu).is_some() {
            return Err(PackError::GpuExists { gpu });
        }
        if spec.quota.is_zero() {
            return Err(PackError::ZeroSize { field: "quota" });
        }
        if spec.sm.is_zero() {
            return Err(PackError::ZeroSize { field: "sm" });
        }
        Ok(())
    }

    /// Adds a GPU that was checked.
    pub(crate) fn insert(&mut self, gpu: GpuId, state: G) {
        if self.list.len() <= gpu.index() {
            self.list.resize(gpu.index() + 1, G::default());
        }
        let spec = state.facts().spec();
        match self.sizes.iter_mut().find(|(known, _)| *known == spec) {
            Some((_, count)) => *count += 1,
            None => self.sizes.push((spec, 1)),
        }
        self.list[gpu.index()] = state;
    }

    /// Refuses to remove a GPU that is not there or holds placements.
    pub(crate) fn check_removal(&self, gpu: GpuId) -> Result<(), PackError> {
        match u32::try_from(self.known(gpu)?.placements()).unwrap_or(u32::MAX) {
            0 => Ok(()),
            placements => Err(PackError::GpuInUse { gpu, placements }),
        }
    }

    /// Removes a GPU that was checked.
    pub(crate) fn remove(&mut self, gpu: GpuId) {
        let state = core::mem::take(&mut self.list[gpu.index()]);
        let spec = state.facts().spec();
        if let Some(position) = self.sizes.iter().position(|(known, _)| *known == spec) {
            self.sizes[position].1 -= 1;
            if self.sizes[position].1 == 0 {
                self.sizes.swap_remove(position);
            }
        }
    }

    /// Whether the pool has a GPU of a size that `fits`.
    pub(crate) fn any_size(&self, fits: impl Fn(&GpuSpec) -> bool) -> bool {
        self.sizes.iter().any(|(spec, _)| fits(spec))
    }
}

impl<G> Index<usize> for Gpus<G> {
    type Output = G;

    #[inline]
    fn index(&self, gpu: usize) -> &G {
        &self.list[gpu]
    }
}

impl<G> IndexMut<usize> for Gpus<G> {
    #[inline]
    fn index_mut(&mut self, gpu: usize) -> &mut G {
        &mut self.list[gpu]
    }
}
