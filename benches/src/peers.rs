//! Our packer and a peer behind one small trait: a fixed pool of bins of 10 000 x 10 000, place and release.
//!
//! The peer knows one bin only and is asked bin by bin, first fit, as its documentation shows.

use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer};
use guillotiere::{AllocId, AtlasAllocator, size2};

/// A pool of bins.
pub trait Pool {
    /// Names a placed rectangle.
    type Handle: Copy;
    /// Places w x h, or finds no room.
    fn place(&mut self, w: u16, h: u16) -> Option<Self::Handle>;
    /// Frees a rectangle.
    fn release(&mut self, handle: Self::Handle);
    /// Bins that hold something.
    fn used(&self) -> usize;
}

/// Our maximal-rectangles packer.
#[derive(Debug)]
pub struct Ours(pub MaxRects);

impl Ours {
    /// A pool of `gpus` GPUs.
    ///
    /// # Panics
    /// When `gpus` exceeds the packer's limit.
    pub fn new(gpus: u32, config: MaxRectsConfig) -> Self {
        let mut pool = MaxRects::new(config);
        for gpu in 0..gpus {
            pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(16)))
                .expect("the ids are new and small");
        }
        Self(pool)
    }
}

/// A demand of w x h basis points.
///
/// # Panics
/// Above 10 000.
pub fn demand(w: u16, h: u16) -> Demand {
    Demand::new(Quota::new(w).expect("a share"), SmShare::new(h).expect("a share"))
}

impl Pool for Ours {
    type Handle = PlacementId;
    fn place(&mut self, w: u16, h: u16) -> Option<PlacementId> {
        self.0.place(&demand(w, h)).ok().map(|placed| placed.placement.id)
    }
    fn release(&mut self, handle: PlacementId) {
        self.0.release(handle).expect("a live handle");
    }
    fn used(&self) -> usize {
        self.0.open_gpus() as usize
    }
}

/// `guillotiere`: guillotine cuts, merging release; first fit over the bins.
#[expect(missing_debug_implementations, reason = "the peer's type has none")]
pub struct Guillotiere {
    bins: Vec<(AtlasAllocator, u32)>,
}

impl Guillotiere {
    /// A pool of `bins` bins of `side` x `side`.
    pub fn new(bins: usize, side: u16) -> Self {
        let size = size2(i32::from(side), i32::from(side));
        Self { bins: (0..bins).map(|_| (AtlasAllocator::new(size), 0)).collect() }
    }
}

impl Pool for Guillotiere {
    type Handle = (u32, AllocId);
    fn place(&mut self, w: u16, h: u16) -> Option<Self::Handle> {
        let size = size2(i32::from(w), i32::from(h));
        for (index, (bin, count)) in self.bins.iter_mut().enumerate() {
            if let Some(allocation) = bin.allocate(size) {
                *count += 1;
                return Some((u32::try_from(index).ok()?, allocation.id));
            }
        }
        None
    }
    fn release(&mut self, (index, id): Self::Handle) {
        let (bin, count) = &mut self.bins[index as usize];
        bin.deallocate(id);
        *count -= 1;
    }
    fn used(&self) -> usize {
        self.bins.iter().filter(|(_, count)| *count > 0).count()
    }
}
