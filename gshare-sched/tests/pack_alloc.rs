//! In steady state a place and a release allocate nothing.
#![allow(unsafe_code, reason = "a counting allocator has to forward to the system's")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, Packer};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded unchanged to the system allocator; the counter is a plain cell of this thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: `pointer` came from `alloc` or `realloc` above, so from the system.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as for `dealloc`, and the caller's promises about `size` are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn place_and_release_allocate_nothing_in_steady_state() {
    for rearrange in [0, 4] {
        let mut pool = MaxRects::new(MaxRectsConfig::default().with_rearrange_gpus(rearrange));
        for gpu in 0..60 {
            pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(16))).unwrap();
        }
        let mut random = 7u64;
        let mut next = move |bound: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % bound
        };
        let mut live = Vec::with_capacity(10_000);
        let mut area = 0u64;
        let mut round = |pool: &mut MaxRects, live: &mut Vec<_>| {
            for _ in 0..16.min(live.len()) {
                let index = usize::try_from(next(live.len() as u64)).unwrap();
                let (id, size) = live.swap_remove(index);
                area -= size;
                pool.release(id).unwrap();
            }
            while area < 30 * 10_000 {
                let (w, h) = (next(50) + 1, next(50) + 1);
                let share = |percent: u64| u16::try_from(percent).unwrap();
                let demand = Demand::new(
                    Quota::from_percent(share(w)).unwrap(),
                    SmShare::from_percent(share(h)).unwrap(),
                );
                live.push((pool.place(&demand).unwrap().placement.id, w * h));
                area += w * h;
            }
        };
        for _ in 0..3_000 {
            round(&mut pool, &mut live);
        }
        let before = ALLOCATIONS.with(Cell::get);
        for _ in 0..500 {
            round(&mut pool, &mut live);
        }
        assert_eq!(ALLOCATIONS.with(Cell::get) - before, 0, "re-arranging {rearrange} GPUs");
    }
}
