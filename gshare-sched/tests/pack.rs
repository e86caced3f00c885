//! The packers against a model that looks at everything.

mod pack_dilu;
mod pack_optimum;
mod pack_slots;
#[path = "support/packer_model.rs"]
mod support;

use gshare_core::{Bytes, GpuId, Quota, SmShare};
use gshare_sched::pack::{Demand, GpuSpec, MaxRects, MaxRectsConfig, PackError, Packer, Rectangle};
use proptest::prelude::*;

fn percent(quota: u16, sm: u16) -> Demand {
    Demand::new(Quota::from_percent(quota).unwrap(), SmShare::from_percent(sm).unwrap())
}

fn pool(gpus: u32, config: MaxRectsConfig) -> MaxRects {
    let mut pool = MaxRects::new(config);
    for gpu in 0..gpus {
        pool.add_gpu(GpuId::new(gpu), GpuSpec::new(Bytes::from_gib(16))).unwrap();
    }
    pool
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 4_000, ..ProptestConfig::default() })]
    /// Any sequence of operations, under any configuration: decisions equal the literal scan's, the free sets equal
    /// their definition, an error changes nothing, a stale id is refused.
    #[test]
    fn max_rects_equals_the_literal_scan(bytes in prop::collection::vec(any::<u8>(), 1..800)) {
        support::run_bytes(&bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 400, ..ProptestConfig::default() })]
    /// The same on one or two GPUs with dozens of small placements each: more than lie beside their GPU's own record.
    #[test]
    fn dozens_on_a_gpu_equal_the_literal_scan(
        two in any::<bool>(),
        changes in prop::collection::vec((0..40u8, any::<u16>(), any::<u16>()), 60..160),
    ) {
        const SMALL: u8 = 0x23;
        let mut bytes = vec![2 + u8::from(two) * 0x10];
        for (kind, a, b) in changes {
            let kind = match kind {
                0..30 => 31, // a place
                30..36 => 14, // a release
                36 => 7, // several at once
                37 => 8,  // a gang
                38 => 4,  // a cordon
                _ => 10,  // a release of a stale id
            };
            bytes.extend([kind, SMALL]);
            bytes.extend(a.to_le_bytes());
            bytes.extend(b.to_le_bytes());
            bytes.extend([0, 0]);
        }
        support::run_bytes(&bytes);
    }
}

/// FaST-GShare, section 5.4: 4 pods of (SM 12 %, quota 40 %), 2 of (24 %, 40 %) and 2 of (50 %, 60 %) need one GPU.
/// Algorithm 2 one by one manages 138 of the 420 arrival orders; with re-arrangement every order does.
#[test]
fn the_eight_pods_of_fast_gshare_section_5_4_fit_one_gpu_in_every_order() {
    fn orders(left: &mut [usize; 3], prefix: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
        if left.iter().all(|count| *count == 0) {
            visit(prefix);
        }
        for kind in 0..3 {
            if left[kind] > 0 {
                left[kind] -= 1;
                prefix.push(kind);
                orders(left, prefix, visit);
                prefix.pop();
                left[kind] += 1;
            }
        }
    }
    let kinds = [percent(40, 12), percent(40, 24), percent(60, 50)];
    let count = |config: MaxRectsConfig| {
        let (mut on_one, mut all) = (0, 0);
        orders(&mut [4, 2, 2], &mut Vec::new(), &mut |order| {
            let mut pool = pool(2, config);
            order.iter().for_each(|kind| {
                pool.place(&kinds[*kind]).unwrap();
            });
            all += 1;
            on_one += u32::from(pool.open_gpus() == 1);
        });
        (on_one, all)
    };
    assert_eq!(count(MaxRectsConfig::default()), (420, 420));
    let paper = MaxRectsConfig::default().with_rearrange_gpus(0);
    assert_eq!(count(paper), (138, 420));
}

#[test]
fn bad_input_is_a_typed_error() {
    let mut pool = pool(1, MaxRectsConfig::default());
    let zero = Demand::new(Quota::ZERO, SmShare::WHOLE);
    assert_eq!(pool.place(&zero), Err(PackError::ZeroSize { field: "quota" }));
    let zero = Demand::new(Quota::WHOLE, SmShare::ZERO);
    assert_eq!(pool.place(&zero), Err(PackError::ZeroSize { field: "sm" }));
    assert!(matches!(
        pool.place(&percent(10, 50).with_sm_limit(SmShare::from_percent(40).unwrap())),
        Err(PackError::LimitBelowRequest { .. })
    ));
    let large = percent(10, 10).with_memory(Bytes::from_gib(17));
    assert!(matches!(pool.place(&large), Err(PackError::NeverFits { .. })));
    pool.place(&percent(100, 50).with_memory(Bytes::from_gib(10))).unwrap();
    let memory = Bytes::from_gib(7);
    assert_eq!(pool.place(&percent(10, 10).with_memory(memory)), Err(PackError::Memory { memory }));
    assert!(matches!(pool.place(&percent(10, 60)), Err(PackError::NoRoom { .. })));
    let unknown = GpuId::new(9);
    assert_eq!(pool.remove_gpu(unknown), Err(PackError::UnknownGpu { gpu: unknown }));
    assert_eq!(pool.set_cordoned(unknown, true), Err(PackError::UnknownGpu { gpu: unknown }));
    assert_eq!(
        pool.remove_gpu(GpuId::new(0)),
        Err(PackError::GpuInUse { gpu: GpuId::new(0), placements: 1 })
    );
    let spec = GpuSpec::new(Bytes(1));
    assert_eq!(pool.add_gpu(GpuId::new(0), spec), Err(PackError::GpuExists { gpu: GpuId::new(0) }));
    assert!(matches!(pool.add_gpu(GpuId::new(u32::MAX), spec), Err(PackError::GpuIdTooLarge { .. })));
    let at = Rectangle {
        time_offset: Quota::from_percent(95).unwrap(),
        sm_offset: SmShare::ZERO,
        quota: Quota::from_percent(10).unwrap(),
        sm: SmShare::from_percent(10).unwrap(),
    };
    assert_eq!(
        pool.place_at(GpuId::new(0), at, &percent(10, 10)),
        Err(PackError::BadRectangle { gpu: GpuId::new(0) })
    );
    let taken = Rectangle { time_offset: Quota::ZERO, ..at };
    assert_eq!(
        pool.place_at(GpuId::new(0), taken, &percent(10, 10)),
        Err(PackError::Occupied { gpu: GpuId::new(0) })
    );
}

/// A size that fits in no arrangement of a GPU is remembered until the GPU changes, and no longer.
#[test]
fn what_did_not_fit_is_tried_again_once_a_placement_has_left() {
    let mut pool = pool(1, MaxRectsConfig::default());
    let ids: Vec<_> = (0..9).map(|_| pool.place(&percent(33, 33)).unwrap().placement.id).collect();
    for id in [ids[0], ids[4], ids[8]] {
        pool.release(id).unwrap();
    }
    let wide = percent(60, 33);
    let placed = pool.place(&wide).unwrap();
    assert!(placed.rearranged, "two of three holes are brought together");
    let large = percent(36, 36);
    for _ in 0..6 {
        assert!(matches!(pool.place(&large), Err(PackError::NoRoom { .. })));
    }
    for id in [ids[1], ids[2], ids[3]] {
        pool.release(id).unwrap();
    }
    pool.place(&large).unwrap();
}

#[test]
fn a_batch_that_does_not_fit_whole_changes_nothing() {
    let mut pool = pool(1, MaxRectsConfig::default());
    let before = support::held(&pool);
    let mut out = Vec::new();
    let error = pool.place_all(&[percent(60, 60), percent(10, 10), percent(60, 60)], &mut out).unwrap_err();
    assert!(matches!(error, PackError::Batch { index: 2, .. }), "{error}");
    assert_eq!((support::held(&pool), out.len()), (before, 0));
}

/// A million operations on a small pool: no panic, and every invariant (checked inside in debug builds).
#[test]
fn a_million_operations_keep_the_invariants() {
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % bound
    };
    let mut pool = pool(12, MaxRectsConfig::default().with_rearrange_gpus(1));
    let mut live = Vec::new();
    for _ in 0..1_000_000u32 {
        let share = |raw: u64| u16::try_from(raw + 1).unwrap();
        if next(100) < 52 {
            let demand = Demand::new(
                Quota::new(share(next(9_000))).unwrap(),
                SmShare::new(share(next(9_000))).unwrap(),
            )
            .with_memory(Bytes(next(4 << 30)));
            if let Ok(placed) = pool.place(&demand) {
                live.push(placed.placement.id);
            }
        } else if !live.is_empty() {
            let index = usize::try_from(next(live.len() as u64)).unwrap();
            let id = live.swap_remove(index);
            pool.release(id).unwrap();
            assert!(pool.release(id).is_err());
        }
    }
    for id in live {
        pool.release(id).unwrap();
    }
    assert_eq!(pool.open_gpus(), 0);
}

/// Inputs that once broke the packer, as the fuzz target writes them.
#[test]
fn regressions_of_the_fuzz_target_hold() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/regressions/pack");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        support::run_bytes(&std::fs::read(entry.unwrap().path()).unwrap());
        count += 1;
    }
    assert!(count > 0, "the regressions lie in {folder}");
}
