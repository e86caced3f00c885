//! Facts about the driver's symbols, from NVIDIA's headers: introducing releases, flavours and look-up rules.

use gshare_cuda_abi::{Class, Flavor, Resolution, SYMBOLS, Symbol, by_name, index, resolve, variants};
use proptest::prelude::*;

/// The releases of a base name's legacy variants, oldest first.
fn legacy_releases(base: &str) -> Vec<u32> {
    variants(base).iter().filter(|s| s.flavor == Flavor::Legacy).map(|s| s.introduced).collect()
}

fn found(base: &str, release: u32, flags: u64) -> &'static str {
    match resolve(base, release, flags) {
        Resolution::Found(symbol) => symbol.name,
        other => panic!("{base} at {release} with {flags}: {other:?}"),
    }
}

#[test]
fn rows_are_sorted_unique_and_indexed() {
    for (position, symbol) in SYMBOLS.iter().enumerate() {
        assert_eq!(symbol.index, position);
        assert_eq!(by_name(symbol.name), Some(symbol));
        assert!(symbol.name.starts_with(symbol.base), "{symbol:?}");
    }
    for pair in SYMBOLS.windows(2) {
        let key = |s: &Symbol| (s.base, s.flavor, s.introduced);
        assert!(key(&pair[0]) < key(&pair[1]), "{pair:?}");
    }
    assert_eq!(SYMBOLS[index::cuMemAlloc_v2].name, "cuMemAlloc_v2");
}

#[test]
fn variants_that_change_the_signature_carry_their_releases() {
    for (bases, releases) in [
        (&["cuCtxCreate"][..], &[2000, 3020, 11040, 12050][..]),
        (&["cuCtxGetDevice", "cuCtxSynchronize"], &[2000, 13000]),
        (
            &[
                "cuMemAlloc",
                "cuMemAllocPitch",
                "cuMemFree",
                "cuMemGetInfo",
                "cuMemAllocHost",
                "cuDeviceTotalMem",
            ],
            &[2000, 3020],
        ),
        (&["cuArrayCreate", "cuArray3DCreate"], &[2000, 3020]),
        (&["cuMemAdvise", "cuMemPrefetchAsync"], &[8000, 12020]),
        (&["cuGraphInstantiate"], &[10000, 11000]),
        (&["cuGraphInstantiateWithFlags"], &[11040]),
        (&["cuGraphInstantiateWithParams"], &[12000]),
        (&["cuGraphAddKernelNode"], &[10000, 12000]),
        (&["cuGraphAddNode"], &[12020, 12030, 13040]),
        (&["cuStreamBeginCapture"], &[10000, 10010]),
        (&["cuStreamGetCaptureInfo"], &[10010, 11030, 12030]),
        (&["cuIpcOpenMemHandle"], &[4010, 11000]),
        (&["cuMemHostRegister"], &[4000, 6050]),
        (&["cuEventElapsedTime"], &[2000, 12080]),
        (&["cuStreamGetCtx"], &[9020, 12050]),
        (&["cuLaunchHostFunc"], &[10000, 13010]),
        (&["cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"], &[12080, 13000]),
        (&["cuMulticastBindMem", "cuMulticastBindAddr"], &[12010, 13010]),
        (&["cuDeviceGetUuid"], &[9020, 11040]),
        (
            &["cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxSetFlags"],
            &[7000, 11000],
        ),
        (
            &["cuStreamDestroy", "cuEventDestroy", "cuCtxDestroy", "cuCtxPushCurrent", "cuCtxPopCurrent"],
            &[2000, 4000],
        ),
        (&["cuGetProcAddress"], &[11030, 12000]),
    ] {
        for base in bases {
            assert_eq!(legacy_releases(base), releases, "{base}");
        }
    }
}

#[test]
fn launch_family_has_both_flavours_at_the_right_releases() {
    for (base, legacy, per_thread) in [
        ("cuLaunchKernel", 4000, 7000),
        ("cuLaunchKernelEx", 11060, 11060),
        ("cuLaunchCooperativeKernel", 9000, 9000),
        ("cuGraphLaunch", 10000, 10000),
        ("cuMemAllocAsync", 11020, 11020),
        ("cuMemFreeAsync", 11020, 11020),
        ("cuMemAllocFromPoolAsync", 11020, 11020),
    ] {
        let introduced: Vec<_> = variants(base).iter().map(|s| (s.flavor, s.introduced)).collect();
        assert_eq!(introduced, [(Flavor::Legacy, legacy), (Flavor::PerThread, per_thread)], "{base}");
    }
}

#[test]
fn resolve_gives_the_newest_variant_not_newer_than_asked() {
    assert_eq!(found("cuMemAlloc", 2000, 0), "cuMemAlloc");
    assert_eq!(found("cuMemAlloc", 3010, 0), "cuMemAlloc");
    assert_eq!(found("cuMemAlloc", 3020, 0), "cuMemAlloc_v2");
    assert_eq!(found("cuCtxCreate", 11030, 0), "cuCtxCreate_v2");
    assert_eq!(found("cuCtxCreate", 12040, 0), "cuCtxCreate_v3");
    assert_eq!(found("cuCtxCreate", 13000, 0), "cuCtxCreate_v4");
    assert_eq!(found("cuCtxSynchronize", 12090, 0), "cuCtxSynchronize");
    assert_eq!(found("cuCtxSynchronize", 13000, 0), "cuCtxSynchronize_v2");
    assert_eq!(found("cuGetProcAddress", 11030, 0), "cuGetProcAddress");
    assert_eq!(found("cuGetProcAddress", 12000, 0), "cuGetProcAddress_v2");
    assert_eq!(resolve("cuCtxSynchronize", 1000, 0), Resolution::TooNew);
    for unknown in ["", "cu", "cuNoSuchThing", "cudnnCreate", "cuMemAlloc_v2", "cuLaunchKernel_ptsz"] {
        assert_eq!(resolve(unknown, 13050, 0), Resolution::UnknownName, "{unknown:?}");
    }
}

#[test]
fn per_thread_flag_takes_the_per_thread_variant_where_there_is_one() {
    assert_eq!(found("cuLaunchKernel", 12000, 0), "cuLaunchKernel");
    assert_eq!(found("cuLaunchKernel", 12000, 1), "cuLaunchKernel");
    assert_eq!(found("cuLaunchKernel", 12000, 2), "cuLaunchKernel_ptsz");
    assert_eq!(found("cuMemcpyHtoD", 12000, 2), "cuMemcpyHtoD_v2_ptds");
    assert_eq!(found("cuMemAlloc", 12000, 2), "cuMemAlloc_v2");
    assert_eq!(found("cuLaunchKernel", 5000, 2), "cuLaunchKernel");
}

#[test]
fn classes_name_what_a_meter_must_see() {
    let class = |name| by_name(name).map(|s| s.class);
    for (name, expected) in [
        ("cuLaunchKernelEx_ptsz", Class::Launch),
        ("cuGraphLaunch", Class::Launch),
        ("cuGraphInstantiateWithParams_ptsz", Class::Graph),
        ("cuMemsetD2D32Async", Class::Copy),
        ("cuMemAllocFromPoolAsync_ptsz", Class::Alloc),
        ("cuMemFree_v2", Class::Free),
        ("cuMemCreate", Class::Vmm),
        ("cuMemPoolTrimTo", Class::Pool),
        ("cuMipmappedArrayCreate", Class::Array),
        ("cuMemGetInfo_v2", Class::Info),
        ("cuStreamSynchronize_ptsz", Class::Sync),
        ("cuStreamBeginCapture_v2_ptsz", Class::Capture),
        ("cuDevicePrimaryCtxRetain", Class::Context),
        ("cuIpcOpenMemHandle_v2", Class::Ipc),
        ("cuInit", Class::Other),
    ] {
        assert_eq!(class(name), Some(expected), "{name}");
    }
}

proptest! {
    /// The look-up against the definition, written out over the whole table.
    #[test]
    fn resolve_equals_its_definition(row in 0..SYMBOLS.len(), release in 1000u32..14_000, flags in 0u64..4) {
        let base = SYMBOLS[row].base;
        let newest = |flavor| SYMBOLS.iter()
            .filter(|s| s.base == base && s.flavor == flavor && s.introduced <= release)
            .max_by_key(|s| s.introduced);
        let expected = if flags == 2 { newest(Flavor::PerThread) } else { None }.or_else(|| newest(Flavor::Legacy));
        prop_assert_eq!(resolve(base, release, flags), expected.map_or(Resolution::TooNew, Resolution::Found));
    }

    #[test]
    fn any_name_is_answered_without_panic(name in ".{0,24}", release: u32, flags: u64) {
        let known = SYMBOLS.iter().any(|s| s.base == name);
        prop_assert_eq!(resolve(&name, release, flags) == Resolution::UnknownName, !known);
        prop_assert_eq!(by_name(&name).is_some(), SYMBOLS.iter().any(|s| s.name == name));
    }
}
