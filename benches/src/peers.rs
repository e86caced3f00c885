//! Our packer and its peers behind one small trait: a fixed pool of bins of 10 000 x 10 000, place and release.
//!
//! Peers that know one bin only are asked bin by bin, first fit, as their documentation shows. Sizes go to them in
//! whole per cents or in basis points, as the input has them.

use gshare_core::{Bytes, GpuId, PlacementId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, PackError, Packer};

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

/// A pool of `gpus` GPUs of a packer that does not have them yet.
///
/// # Errors
/// The packer's own.
pub fn with_gpus(gpus: u32, mut packer: Box<dyn Packer>) -> Result<Box<dyn Packer>, PackError> {
    for gpu in 0..gpus {
        packer.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(16)))?;
    }
    Ok(packer)
}

impl Pool for Box<dyn Packer> {
    type Handle = PlacementId;
    fn place(&mut self, w: u16, h: u16) -> Option<PlacementId> {
        (**self).place(&demand(w, h)).ok().map(|placed| placed.placement.id)
    }
    fn release(&mut self, handle: PlacementId) {
        (**self).release(handle).expect("a live handle");
    }
    fn used(&self) -> usize {
        let mut used = 0;
        self.gpus(&mut |gpu| used += usize::from(gpu.placements > 0));
        used
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rect {
    x: u16,
    y: u16,
    w: u16,
    h: u16,
}

impl Rect {
    fn meets(self, o: Self) -> bool {
        self.x < o.x + o.w && o.x < self.x + self.w && self.y < o.y + o.h && o.y < self.y + self.h
    }
    fn contains(self, o: Self) -> bool {
        self.x <= o.x && self.y <= o.y && o.x + o.w <= self.x + self.w && o.y + o.h <= self.y + self.h
    }
    fn area(self) -> u32 {
        u32::from(self.w) * u32::from(self.h)
    }
}

#[derive(Debug, Clone)]
struct ScanBin {
    free: Vec<Rect>,
    used: Vec<(u32, Rect)>,
}

/// Algorithm 2 of FaST-GShare as a textbook writes it (with its mistakes mended): every free rectangle of every GPU is
/// looked at for each demand, and a release rebuilds the GPU.
#[derive(Debug)]
pub struct Scan {
    side: u16,
    /// Longest list of free rectangles to which a release only appends; 0 = each release rebuilds the list.
    keeps: usize,
    bins: Vec<ScanBin>,
    next: u32,
}

impl Scan {
    /// A pool of `bins` bins of `side` x `side`.
    pub fn new(bins: usize, side: u16) -> Self {
        let whole = Rect { x: 0, y: 0, w: side, h: side };
        Self { side, keeps: 0, bins: vec![ScanBin { free: vec![whole], used: Vec::new() }; bins], next: 0 }
    }

    /// The same with the paper's *keep-restructure* (section 3.4.2): a released rectangle joins the list as it is, even on
    /// a GPU that becomes empty; only a list of `threshold` rectangles is rebuilt. The paper names no threshold.
    #[must_use]
    pub fn keeping(self, threshold: usize) -> Self {
        Self { keeps: threshold, ..self }
    }

    fn split(free: &mut Vec<Rect>, taken: Rect) {
        let mut list = Vec::with_capacity(free.len() + 4);
        for r in free.iter() {
            if !r.meets(taken) {
                list.push(*r);
                continue;
            }
            if taken.x > r.x {
                list.push(Rect { w: taken.x - r.x, ..*r });
            }
            if taken.x + taken.w < r.x + r.w {
                list.push(Rect { x: taken.x + taken.w, w: r.x + r.w - taken.x - taken.w, ..*r });
            }
            if taken.y > r.y {
                list.push(Rect { h: taken.y - r.y, ..*r });
            }
            if taken.y + taken.h < r.y + r.h {
                list.push(Rect { y: taken.y + taken.h, h: r.y + r.h - taken.y - taken.h, ..*r });
            }
        }
        free.clear();
        for (i, r) in list.iter().enumerate() {
            let inside = |(j, o): (usize, &Rect)| j != i && o.contains(*r) && (o != r || j < i);
            if !list.iter().enumerate().any(inside) {
                free.push(*r);
            }
        }
    }
}

impl Pool for Scan {
    type Handle = (u32, u32);
    fn place(&mut self, w: u16, h: u16) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u16, usize, Rect)> = None;
        for (index, bin) in self.bins.iter().enumerate() {
            for r in bin.free.iter().filter(|r| r.w >= w && r.h >= h) {
                let key = (r.area(), r.w.min(r.h));
                if best.is_none_or(|best| key < (best.0, best.1)) {
                    best = Some((key.0, key.1, index, *r));
                }
            }
        }
        let (_, _, index, r) = best?;
        let taken = Rect { x: r.x, y: r.y, w, h };
        let bin = &mut self.bins[index];
        Self::split(&mut bin.free, taken);
        let id = self.next;
        self.next += 1;
        bin.used.push((id, taken));
        Some((u32::try_from(index).ok()?, id))
    }
    fn release(&mut self, (index, id): (u32, u32)) {
        let bin = &mut self.bins[index as usize];
        let freed = bin.used.iter().find(|used| used.0 == id).map(|used| used.1);
        bin.used.retain(|used| used.0 != id);
        if bin.free.len() < self.keeps {
            bin.free.extend(freed);
            return;
        }
        bin.free.clear();
        bin.free.push(Rect { x: 0, y: 0, w: self.side, h: self.side });
        for (_, taken) in &bin.used {
            Self::split(&mut bin.free, *taken);
        }
    }
    fn used(&self) -> usize {
        self.bins.iter().filter(|bin| !bin.used.is_empty()).count()
    }
}

macro_rules! atlas_pool {
    ($(#[$doc:meta])* $name:ident, $krate:ident) => {
        $(#[$doc])*
        #[expect(missing_debug_implementations, reason = "the peer's type has none")]
        pub struct $name {
            bins: Vec<($krate::AtlasAllocator, u32)>,
        }

        impl $name {
            /// A pool of `bins` bins of `side` x `side`.
            pub fn new(bins: usize, side: u16) -> Self {
                let size = $krate::size2(i32::from(side), i32::from(side));
                Self { bins: (0..bins).map(|_| ($krate::AtlasAllocator::new(size), 0)).collect() }
            }
        }

        impl Pool for $name {
            type Handle = (u32, $krate::AllocId);
            fn place(&mut self, w: u16, h: u16) -> Option<Self::Handle> {
                let size = $krate::size2(i32::from(w), i32::from(h));
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
    };
}

atlas_pool! {
    /// `guillotiere`: guillotine cuts, merging release; first fit over the bins.
    Guillotiere, guillotiere
}

atlas_pool! {
    /// `etagere`: shelves; first fit over the bins.
    Etagere, etagere
}

/// `binpack2d`: maximal rectangles, best area fit in a bin, first fit over the bins; no release.
#[expect(missing_debug_implementations, reason = "the peer's type has none")]
pub struct Binpack2d {
    side: u16,
    bins: Vec<binpack2d::maxrects::MaxRectsBin>,
}

impl Binpack2d {
    /// A pool that opens bins of `side` x `side` as needed.
    pub const fn new(side: u16) -> Self {
        Self { side, bins: Vec::new() }
    }

    /// Places w x h.
    pub fn insert(&mut self, w: u16, h: u16) {
        use binpack2d::Dimension;
        use binpack2d::maxrects::{Heuristic, MaxRectsBin};
        let item = Dimension::with_id(0, i32::from(w), i32::from(h), 0);
        for bin in &mut self.bins {
            if bin.insert(&item, Heuristic::BestAreaFit).is_some() {
                return;
            }
        }
        let mut bin = MaxRectsBin::new(i32::from(self.side), i32::from(self.side));
        bin.insert(&item, Heuristic::BestAreaFit);
        self.bins.push(bin);
    }

    /// Bins opened.
    pub fn used(&self) -> usize {
        self.bins.len()
    }
}

/// Bins that `bin-packing`'s maximal rectangles (best area fit over all sheets, largest first) uses for a batch.
pub fn bin_packing_batch(side: (u32, u32), items: &[(u16, u16)]) -> Option<usize> {
    use bin_packing::two_d::{RectDemand2D, Sheet2D, TwoDAlgorithm, TwoDOptions, TwoDProblem, solve_2d};
    let demands = items.iter().enumerate().map(|(i, (w, h))| RectDemand2D {
        name: i.to_string(),
        width: u32::from(*w),
        height: u32::from(*h),
        quantity: 1,
        can_rotate: false,
    });
    let sheet = Sheet2D {
        name: String::from("gpu"),
        width: side.0,
        height: side.1,
        cost: 1.0,
        quantity: None,
        kerf: 0,
        edge_kerf_relief: false,
    };
    let problem = TwoDProblem { sheets: vec![sheet], demands: demands.collect() };
    let options = TwoDOptions { algorithm: TwoDAlgorithm::MaxRects, ..TwoDOptions::default() };
    solve_2d(problem, options).ok().map(|solution| solution.sheet_count)
}

/// Bins that `rectangle-pack` uses for a batch: it is given one more bin than `guess` until everything fits.
pub fn rectangle_pack_batch(side: (u32, u32), items: &[(u16, u16)], guess: usize) -> usize {
    use rectangle_pack::{
        GroupedRectsToPlace, RectToInsert, TargetBin, contains_smallest_box, pack_rects, volume_heuristic,
    };
    let mut rects: GroupedRectsToPlace<usize, ()> = GroupedRectsToPlace::new();
    for (i, (w, h)) in items.iter().enumerate() {
        rects.push_rect(i, None, RectToInsert::new(u32::from(*w), u32::from(*h), 1));
    }
    (guess.max(1)..=items.len())
        .find(|bins| {
            let mut targets: std::collections::BTreeMap<usize, TargetBin> =
                (0..*bins).map(|bin| (bin, TargetBin::new(side.0, side.1, 1))).collect();
            pack_rects(&rects, &mut targets, &volume_heuristic, &contains_smallest_box).is_ok()
        })
        .unwrap_or(items.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FaST-GShare, section 3.4.2, as printed: released rectangles are not merged, so a GPU that is empty again cannot
    /// take a demand of its own size until the list passes the threshold.
    #[test]
    fn keep_restructure_forgets_that_an_empty_gpu_is_whole() {
        let takes_a_whole_one = |mut pool: Scan| {
            let halves = [pool.place(100, 50), pool.place(100, 50)];
            halves.into_iter().flatten().for_each(|half| pool.release(half));
            pool.place(100, 100).is_some()
        };
        assert!(!takes_a_whole_one(Scan::new(1, 100).keeping(16)));
        assert!(takes_a_whole_one(Scan::new(1, 100).keeping(1)), "past the threshold the list is rebuilt");
        assert!(takes_a_whole_one(Scan::new(1, 100)));
    }
}
