//! The driver API as a client sees it, one process per test.
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client
#![allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // small numbers

mod common;

use std::ffi::{CStr, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use common::*;

const INVALID_VALUE: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

#[test]
fn every_name_of_the_table_is_exported_and_found_by_each_way() {
    isolated(
        "every_name_of_the_table_is_exported_and_found_by_each_way",
        &[("GSHARE_SIM_DRIVER_VERSION", "12.8")],
        || {
            let ask = |name: &CStr, version: i32, flags: u64| {
                let (mut at, mut status) = (null_mut::<c_void>(), 9);
                ok!(cuGetProcAddress_v2(name.as_ptr(), &raw mut at, version, flags, &raw mut status));
                (at, status)
            };
            for s in gshare_cuda_abi::SYMBOLS {
                let address = symbol(s.name);
                let base = std::ffi::CString::new(s.base).unwrap();
                let flags = u64::from(s.flavor == gshare_cuda_abi::Flavor::PerThread) * 2;
                let expected = if s.introduced <= 12080 { (address, 0) } else { (null_mut(), 1) };
                // An older variant may stand for a newer variant missing in this driver.
                let got = ask(&base, s.introduced as i32, flags);
                if s.introduced <= 12080
                    || gshare_cuda_abi::variants(s.base).iter().all(|v| v.introduced > 12080)
                {
                    assert_eq!(got, expected, "{}", s.name);
                }
            }
            assert_eq!(ask(c"cuMemAlloc", 13000, 0).0, symbol("cuMemAlloc_v2"));
            assert_eq!(ask(c"cuMemAlloc", 3010, 0).0, symbol("cuMemAlloc"));
            assert_eq!(ask(c"cuMemAlloc", 1000, 0), (null_mut(), 2));
            assert_eq!(ask(c"cuMemAlloc_v2", 12080, 0), (null_mut(), 1));
            assert_eq!(ask(c"", 0, 0), (null_mut(), 1));
            assert_eq!(ask(c"cuGetProcAddress", 12000, 0).0, symbol("cuGetProcAddress_v2"));
            assert_eq!(ask(c"cuGetProcAddress", 11030, 0).0, symbol("cuGetProcAddress"));
            assert_eq!(ask(c"cuLaunchKernel", 12000, 2).0, symbol("cuLaunchKernel_ptsz"));
            let mut at = null_mut();
            ok!(cuGetProcAddress(c"cuInit".as_ptr(), &raw mut at, 11030, 0));
            assert_eq!(at, symbol("cuInit"));
            assert_eq!(cu!(cuGetProcAddress(null(), &raw mut at, 11030, 0)), INVALID_VALUE);
            assert_eq!(
                cu!(cuGetProcAddress_v2(c"cuInit".as_ptr(), &raw mut at, 12000, 3, null_mut())),
                INVALID_VALUE
            );
        },
    );
}

#[test]
fn calls_before_init_and_in_a_forked_child_are_not_initialised() {
    isolated("calls_before_init_and_in_a_forked_child_are_not_initialised", &[], || {
        let mut count = 0;
        assert_eq!(cu!(cuDeviceGetCount(&raw mut count)), CUresult::CUDA_ERROR_NOT_INITIALIZED);
        assert_eq!(cu!(cuInit(1)), INVALID_VALUE);
        start();
        // SAFETY: the child calls the driver and leaves.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let mut free = 0_usize;
            let bad = CUresult::CUDA_ERROR_NOT_INITIALIZED;
            let all = cu!(cuInit(0)) == bad
                && cu!(cuMemGetInfo_v2(&raw mut free, &raw mut free)) == bad
                && cu!(cuCtxSynchronize()) == bad;
            // SAFETY: leaves without destructors.
            unsafe { libc::_exit(if all { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: our child.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(status, 0);
        ok!(cuCtxSynchronize());
        assert_eq!(truth().processes.iter().filter(|p| p.live).count(), 1);
    });
}

#[test]
fn devices_describe_themselves_and_say_that_they_are_simulated() {
    isolated(
        "devices_describe_themselves_and_say_that_they_are_simulated",
        &[("CUDA_VISIBLE_DEVICES", "1,0")],
        || {
            ok!(cuInit(0));
            let mut name = [0; 64];
            ok!(cuDeviceGetName(name.as_mut_ptr(), 64, 0));
            // SAFETY: the driver wrote a terminated string.
            let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
            assert_eq!(name, "Tiny (simulated)");
            let (bus0, bus1): (i32, i32) =
                (get!(cuDeviceGetAttribute(33, 0)), get!(cuDeviceGetAttribute(33, 1)));
            assert_eq!((bus0, bus1), (2, 1), "CUDA_VISIBLE_DEVICES orders");
            let sms: i32 = get!(cuDeviceGetAttribute(16, 0));
            assert_eq!(sms, 10);
            let a: sys::CUuuid = get!(cuDeviceGetUuid_v2(0));
            let b: sys::CUuuid = get!(cuDeviceGetUuid_v2(1));
            assert_ne!(a.bytes, b.bytes);
            let total: usize = get!(cuDeviceTotalMem_v2(1));
            assert_eq!(total, 1 << 30);
            let mut device = 0;
            assert_eq!(cu!(cuDeviceGet(&raw mut device, 2)), CUresult::CUDA_ERROR_INVALID_DEVICE);
            let mut text = null();
            ok!(cuGetErrorName(CUresult::CUDA_ERROR_OUT_OF_MEMORY, &raw mut text));
            // SAFETY: a static string.
            assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
            assert_eq!(cu!(cuGetErrorName(CUresult(12345), &raw mut text)), INVALID_VALUE);
            let mut table = null();
            assert_eq!(cu!(cuGetExportTable(&raw mut table, &raw const a)), INVALID_VALUE);
        },
    );
}

/// Blocks a stream until the gate opens: launches behind it are queued, however slow this process is.
struct Gate(CUdeviceptr);

impl Gate {
    fn shut(stream: sys::CUstream) -> Self {
        let flag: CUdeviceptr = get!(cuMemAlloc_v2(4));
        ok!(cuMemsetD32_v2(flag, 0, 1));
        ok!(cuStreamWaitValue32_v2(stream, flag, 1, 1));
        Self(flag)
    }

    fn open(self) {
        let other: sys::CUstream = get!(cuStreamCreate(1));
        ok!(cuStreamWriteValue32_v2(other, self.0, 1, 0));
    }
}

#[test]
fn kernels_take_exactly_their_time_and_events_say_so() {
    isolated("kernels_take_exactly_their_time_and_events_say_so", &[], || {
        start();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let f = kernel("spin_3000us_full");
        let ends: Vec<sys::CUevent> = (0..4).map(|_| get!(cuEventCreate(0))).collect();
        // The kernels that follow are queued back to back.
        let gate = Gate::shut(stream);
        assert_eq!(launch(f, stream), OK);
        for e in &ends {
            ok!(cuEventRecord(*e, stream));
            assert_eq!(launch(f, stream), OK);
        }
        assert_eq!(cu!(cuStreamQuery(stream)), CUresult::CUDA_ERROR_NOT_READY);
        gate.open();
        ok!(cuStreamSynchronize(stream));
        ok!(cuStreamQuery(stream));
        for pair in ends.windows(2) {
            let ms: f32 = get!(cuEventElapsedTime(pair[0], pair[1]));
            assert!((ms - 3.0).abs() < 1e-6, "{ms}");
        }
        let account = &mine().gpus[0];
        assert_eq!((account.kernels, account.kernel_ns, account.busy_ns), (5, 15_000_000, 15_000_000));
        assert_eq!(account.sm_ns, 150_000_000);
        // The duration may be an argument.
        let timed = kernel("spin_ns_sm4");
        let mut ns = 123_456_u64;
        let mut params = [(&raw mut ns).cast::<c_void>()];
        ok!(cuLaunchKernel(timed, 1, 1, 1, 1, 1, 1, 0, stream, params.as_mut_ptr(), null_mut()));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(mine().gpus[0].kernel_ns, 15_123_456);
        assert_eq!(launch(null_mut(), stream), CUresult::CUDA_ERROR_INVALID_HANDLE);
        assert_eq!(
            cu!(cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, stream, null_mut(), null_mut())),
            INVALID_VALUE
        );
        assert_eq!(
            cu!(cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, stream, null_mut(), null_mut())),
            INVALID_VALUE
        );
    });
}

#[test]
fn a_share_of_sms_cuts_demand_and_stretches_time() {
    isolated(
        "a_share_of_sms_cuts_demand_and_stretches_time",
        &[("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")],
        || {
            start();
            assert_eq!(launch(kernel("spin_1000us_full"), null_mut()), OK);
            ok!(cuCtxSynchronize());
            let account = &mine().gpus[0];
            assert_eq!((account.sm_cap, account.kernel_ns, account.sm_ns), (4, 2_500_000, 10_000_000));
        },
    );
}

#[test]
fn default_streams_are_barriers_and_own_streams_are_not() {
    isolated("default_streams_are_barriers_and_own_streams_are_not", &[], || {
        start();
        let blocking: sys::CUstream = get!(cuStreamCreate(0));
        let free: sys::CUstream = get!(cuStreamCreate(1));
        let f = kernel("spin_20us_sm1");
        let gate = Gate::shut(blocking);
        assert_eq!(launch(f, blocking), OK);
        // The legacy stream waits for the blocking stream; the free one for no stream.
        let quick = kernel("spin_10us_sm1");
        assert_eq!(launch(quick, null_mut()), OK);
        assert_eq!(launch(quick, free), OK);
        ok!(cuStreamSynchronize(free));
        assert_eq!(cu!(cuStreamQuery(null_mut())), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(cu!(cuStreamQuery(blocking)), CUresult::CUDA_ERROR_NOT_READY);
        // A blocking stream waits for the legacy stream in turn.
        let other: sys::CUstream = get!(cuStreamCreate(0));
        assert_eq!(launch(quick, other), OK);
        assert_eq!(cu!(cuStreamQuery(other)), CUresult::CUDA_ERROR_NOT_READY);
        // Waiting by an event orders streams.
        let event: sys::CUevent = get!(cuEventCreate(2));
        ok!(cuEventRecord(event, other));
        ok!(cuStreamWaitEvent(free, event, 0));
        assert_eq!(launch(quick, free), OK);
        assert_eq!(cu!(cuStreamQuery(free)), CUresult::CUDA_ERROR_NOT_READY);
        gate.open();
        ok!(cuStreamSynchronize(free));
        ok!(cuStreamQuery(blocking));
        ok!(cuEventQuery(event));
        // Under per-thread streams the null handle is a stream of the thread.
        let gate = Gate::shut(blocking);
        assert_eq!(launch(f, blocking), OK);
        ok!(cuLaunchKernel_ptsz(quick, 1, 1, 1, 1, 1, 1, 0, null_mut(), null_mut(), null_mut()));
        ok!(cuStreamSynchronize_ptsz(null_mut()));
        assert_eq!(cu!(cuStreamQuery(blocking)), CUresult::CUDA_ERROR_NOT_READY);
        gate.open();
        ok!(cuCtxSynchronize());
    });
}

static CALLS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn count_call(data: *mut c_void) {
    CALLS.fetch_add(data as usize as u32, Ordering::SeqCst);
}

unsafe extern "C" fn count_callback(stream: sys::CUstream, result: sys::CUresult, data: *mut c_void) {
    assert!(!stream.is_null() && result == sys::CUresult::CUDA_SUCCESS);
    CALLS.fetch_add(data as usize as u32, Ordering::SeqCst);
}

#[test]
fn other_forms_of_a_call_answer_alike() {
    isolated("other_forms_of_a_call_answer_alike", &[], || {
        start();
        let f = kernel("spin_1us");
        for attribute in 0..16 {
            let (of_function, of_kernel): (c_int, c_int) =
                (get!(cuFuncGetAttribute(attribute, f)), get!(cuKernelGetAttribute(attribute, f.cast(), 0)));
            assert_eq!(of_function, of_kernel);
        }
        let plain: c_int = get!(cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 256, 0));
        let flags: c_int = get!(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(f, 256, 0, 0));
        assert_eq!(plain, flags);
        let (mut grid, mut block, mut grid_too, mut block_too) = (0, 0, 0, 0);
        ok!(cuOccupancyMaxPotentialBlockSize(&raw mut grid, &raw mut block, f, None, 0, 96));
        ok!(cuOccupancyMaxPotentialBlockSizeWithFlags(
            &raw mut grid_too,
            &raw mut block_too,
            f,
            None,
            0,
            96,
            0
        ));
        assert_eq!((grid, block), (grid_too, block_too));
        assert_eq!(block, 96);
        ok!(cuFuncSetAttribute(f, 9, 40));
        let carveout: c_int = get!(cuFuncGetAttribute(9, f));
        assert_eq!(carveout, 40);
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let (mut status, mut id) = (7, 0);
        ok!(cuStreamGetCaptureInfo(stream, &raw mut status, &raw mut id));
        assert_eq!(status, 0);
        ok!(cuStreamBeginCapture(stream));
        ok!(cuStreamGetCaptureInfo(stream, &raw mut status, &raw mut id));
        assert_eq!(status, 1);
    });
}

#[test]
fn host_functions_run_in_stream_order() {
    isolated("host_functions_run_in_stream_order", &[], || {
        start();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let f = kernel("spin_5ms");
        let memory: CUdeviceptr = get!(cuMemAlloc_v2(4096));
        let mut word = 7_u32;
        let gate = Gate::shut(stream);
        assert_eq!(launch(f, stream), OK);
        ok!(cuLaunchHostFunc(stream, Some(count_call), 3 as *mut c_void));
        // The copy behind a pending host function reads its source only at its turn.
        ok!(cuMemcpyHtoDAsync_v2(memory, (&raw const word).cast(), 4, stream));
        assert_eq!(CALLS.load(Ordering::SeqCst), 0);
        word = 8;
        std::hint::black_box(&word);
        gate.open();
        ok!(cuStreamSynchronize(stream));
        assert_eq!(CALLS.load(Ordering::SeqCst), 3);
        let mut back = 0_u32;
        ok!(cuMemcpyDtoH_v2((&raw mut back).cast(), memory, 4));
        assert_eq!(back, 8);
        // A stream that waits for a value in memory.
        let flag: CUdeviceptr = get!(cuMemAlloc_v2(4));
        ok!(cuMemsetD32_v2(flag, 0, 1));
        ok!(cuStreamWaitValue32_v2(stream, flag, 5, 1));
        ok!(cuLaunchHostFunc(stream, Some(count_call), 10 as *mut c_void));
        assert_eq!(cu!(cuStreamQuery(stream)), CUresult::CUDA_ERROR_NOT_READY);
        let other: sys::CUstream = get!(cuStreamCreate(1));
        ok!(cuStreamWriteValue32_v2(other, flag, 5, 0));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(CALLS.load(Ordering::SeqCst), 13);
        ok!(cuStreamAddCallback(stream, Some(count_callback), 100 as *mut c_void, 0));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(CALLS.load(Ordering::SeqCst), 113);
    });
}

extern "C" fn takes_its_time(_: *mut c_void) {
    std::thread::sleep(std::time::Duration::from_millis(20));
}

#[test]
fn copies_behind_a_host_function_find_memory_that_is_freed_behind_them() {
    isolated("copies_behind_a_host_function_find_memory_that_is_freed_behind_them", &[], || {
        start();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let to: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
        let seen = |expected: u8| {
            let mut back = [0_u8; 4096];
            ok!(cuStreamSynchronize(stream));
            ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), to, back.len()));
            assert_eq!(back, [expected; 4096]);
        };
        // A plain free waits for the device.
        let from: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
        ok!(cuMemsetD8_v2(from, 5, 1 << 20));
        ok!(cuLaunchHostFunc(stream, Some(takes_its_time), null_mut()));
        ok!(cuMemcpyDtoDAsync_v2(to, from, 1 << 20, stream));
        ok!(cuMemFree_v2(from));
        ok!(cuStreamQuery(stream));
        seen(5);
        // A free in the order of the stream does not wait, and the memory stays until then.
        let from: CUdeviceptr = get!(cuMemAllocAsync(1 << 20, stream));
        ok!(cuMemsetD8Async(from, 6, 1 << 20, stream));
        ok!(cuLaunchHostFunc(stream, Some(takes_its_time), null_mut()));
        ok!(cuMemcpyDtoDAsync_v2(to, from, 1 << 20, stream));
        ok!(cuMemFreeAsync(from, stream));
        assert_eq!(cu!(cuStreamQuery(stream)), CUresult::CUDA_ERROR_NOT_READY);
        let other: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
        ok!(cuMemsetD8_v2(other, 7, 1 << 20));
        seen(6);
        // Page-locked host memory is freed like plain memory.
        let host: *mut c_void = get!(cuMemHostAlloc(1 << 20, 0));
        ok!(cuLaunchHostFunc(stream, Some(takes_its_time), null_mut()));
        ok!(cuMemcpyDtoHAsync_v2(host, other, 1 << 20, stream));
        ok!(cuMemFreeHost(host));
        ok!(cuStreamQuery(stream));
    });
}

#[test]
fn copies_fail_as_told() {
    isolated("copies_fail_as_told", &[("GSHARE_SIM_FAILED_COPIES", "2, 4")], || {
        if std::env::var("GSHARE_SIM_FAILED_COPIES").unwrap() == "0" {
            assert_eq!(cu!(cuInit(0)), CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
            return;
        }
        start();
        let (from, mut seen): ([u8; 4], [u8; 4]) = ([5; 4], [0; 4]);
        let memory: CUdeviceptr = get!(cuMemAlloc_v2(4));
        let other: CUdeviceptr = get!(cuMemAlloc_v2(4));
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        ok!(cuMemcpyHtoD_v2(memory, from.as_ptr().cast(), 4));
        // A copy within the device does not count.
        ok!(cuMemcpyDtoD_v2(other, memory, 4));
        let failed = CUresult::CUDA_ERROR_UNKNOWN;
        assert_eq!(cu!(cuMemcpyDtoHAsync_v2(seen.as_mut_ptr().cast(), memory, 4, stream)), failed);
        ok!(cuStreamSynchronize(stream));
        assert_eq!(seen, [0; 4]);
        ok!(cuMemcpyDtoHAsync_v2(seen.as_mut_ptr().cast(), other, 4, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(seen, from);
        assert_eq!(cu!(cuMemcpyDtoH_v2(seen.as_mut_ptr().cast(), memory, 4)), failed);
    });
    if std::env::var_os("SIM_TEST").is_none() {
        isolated("copies_fail_as_told", &[("GSHARE_SIM_FAILED_COPIES", "0")], || {});
    }
}

#[test]
fn memory_is_counted_to_the_byte_by_kind() {
    isolated("memory_is_counted_to_the_byte_by_kind", &[], || {
        start();
        let info = || {
            let (mut free, mut total) = (0, 0);
            ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
            (free, total)
        };
        let context = 16 << 20;
        assert_eq!(info(), ((1 << 30) - context, 1 << 30));
        let a: CUdeviceptr = get!(cuMemAlloc_v2(1000));
        let mut pitch = 0;
        let b: CUdeviceptr = get!(cuMemAllocPitch_v2(&raw mut pitch, 100, 3, 4));
        let c: CUdeviceptr = get!(cuMemAllocManaged(5000, 1));
        assert_eq!(pitch, 512);
        let kinds = mine().gpus[0].memory_bytes.clone();
        assert_eq!(
            (kinds["plain"], kinds["managed"], kinds["context"]),
            (1000 + 3 * 512, 5000, context as u64)
        );
        assert_eq!(info().0, (1 << 30) - context - 1000 - 1536 - 5000);
        let mut too_much = 0;
        let left = info().0;
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut too_much, left + 1)), CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let all: CUdeviceptr = get!(cuMemAlloc_v2(left));
        assert_eq!(info().0, 0);
        for p in [a, b, c, all] {
            ok!(cuMemFree_v2(p));
        }
        assert_eq!(cu!(cuMemFree_v2(a)), INVALID_VALUE);
        ok!(cuMemFree_v2(0));
        assert_eq!(info().0, (1 << 30) - context);
        // Bytes are real.
        let from: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
        let to: CUdeviceptr = get!(cuMemAlloc_v2(1 << 20));
        let data: Vec<u8> = (0..1 << 20).map(|i| (i * 7 % 251) as u8).collect();
        let mut back = vec![0_u8; 1 << 20];
        ok!(cuMemcpyHtoD_v2(from, data.as_ptr().cast(), data.len()));
        ok!(cuMemcpyDtoD_v2(to, from, data.len()));
        ok!(cuMemsetD16_v2(to + 100, 0xabcd, 50));
        ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), to, back.len()));
        assert_eq!(back[..100], data[..100]);
        assert_eq!(back[100..102], [0xcd, 0xab]);
        assert_eq!(back[200..], data[200..]);
        assert_eq!(cu!(cuMemcpyHtoD_v2(from, data.as_ptr().cast(), (1 << 20) + 1)), INVALID_VALUE);
        assert_eq!(cu!(cuMemcpyHtoD_v2(4096, data.as_ptr().cast(), 1)), INVALID_VALUE);
        let (mut base, mut size) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&raw mut base, &raw mut size, to + 77));
        assert_eq!((base, size), (to, 1 << 20));
        let kind: u32 = {
            let mut kind = 0_u32;
            ok!(cuPointerGetAttribute((&raw mut kind).cast(), 2, to + 5));
            kind
        };
        assert_eq!(kind, 2);
        let mut kind = 0_u32;
        assert_eq!(cu!(cuPointerGetAttribute((&raw mut kind).cast(), 2, 4096)), INVALID_VALUE);
        // Destroying the context returns its memory.
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        let account = &truth().processes[0].gpus[0];
        assert_eq!(account.memory_used_bytes, 0);
    });
}

#[test]
fn arrays_and_host_memory() {
    isolated("arrays_and_host_memory", &[], || {
        start();
        // 8-bit, two channels, 30 x 4.
        let shape = sys::CUDA_ARRAY3D_DESCRIPTOR {
            Width: 30,
            Height: 4,
            Depth: 0,
            Format: sys::CUarray_format::CU_AD_FORMAT_UNSIGNED_INT8,
            NumChannels: 2,
            Flags: 0,
        };
        let array: sys::CUarray = get!(cuArray3DCreate_v2(&raw const shape));
        assert_eq!(mine().gpus[0].memory_bytes["array"], 240);
        let mut need = std::mem::MaybeUninit::<sys::CUDA_ARRAY_MEMORY_REQUIREMENTS>::zeroed();
        assert_eq!(cu!(cuArrayGetMemoryRequirements(need.as_mut_ptr(), array, 0)), INVALID_VALUE);
        // Sparse, then with deferred mapping: neither has memory.
        for flags in [0x40, 0x80] {
            let shape = sys::CUDA_ARRAY3D_DESCRIPTOR { Flags: flags, ..shape };
            let without: sys::CUarray = get!(cuArray3DCreate_v2(&raw const shape));
            let levels: sys::CUmipmappedArray = get!(cuMipmappedArrayCreate(&raw const shape, 3));
            assert_eq!(mine().gpus[0].memory_bytes["array"], 240);
            if flags == 0x80 {
                let need: sys::CUDA_ARRAY_MEMORY_REQUIREMENTS =
                    get!(cuArrayGetMemoryRequirements(without, 0));
                assert_eq!(need.size, 240);
            }
            let mut byte = 0_u8;
            assert_eq!(cu!(cuMemcpyAtoH_v2((&raw mut byte).cast(), without, 0, 1)), INVALID_VALUE);
            ok!(cuMipmappedArrayDestroy(levels));
            ok!(cuArrayDestroy(without));
        }
        let data: Vec<u8> = (0..240).collect();
        let mut back = vec![0_u8; 240];
        let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY2D>::zeroed();
        let to = copy.as_mut_ptr();
        // SAFETY: every field that must not be zero is written.
        unsafe {
            (*to).srcMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_HOST;
            (*to).srcHost = data.as_ptr().cast();
            (*to).srcPitch = 60;
            (*to).dstMemoryType = sys::CUmemorytype::CU_MEMORYTYPE_ARRAY;
            (*to).dstArray = array;
            (*to).WidthInBytes = 60;
            (*to).Height = 4;
        }
        ok!(cuMemcpy2D_v2(to));
        ok!(cuMemcpyAtoH_v2(back.as_mut_ptr().cast(), array, 0, 240));
        assert_eq!(back, data);
        let mipmapped: sys::CUmipmappedArray = get!(cuMipmappedArrayCreate(&raw const shape, 3));
        assert_eq!(mine().gpus[0].memory_bytes["array"], 240 + 240 + 15 * 2 * 2 + 7 * 2);
        ok!(cuMipmappedArrayDestroy(mipmapped));
        ok!(cuArrayDestroy(array));
        assert_eq!(mine().gpus[0].memory_bytes["array"], 0);
        let host: *mut c_void = get!(cuMemHostAlloc(100, 2));
        let device: CUdeviceptr = get!(cuMemHostGetDevicePointer_v2(host, 0));
        assert_eq!(device, host as u64);
        ok!(cuMemFreeHost(host));
        assert_eq!(cu!(cuMemFreeHost(host)), INVALID_VALUE);
    });
}

#[test]
fn a_device_that_is_zeroed_takes_no_memory_of_the_host() {
    isolated("a_device_that_is_zeroed_takes_no_memory_of_the_host", &[], || {
        start();
        let resident = || {
            let text = std::fs::read_to_string("/proc/self/statm").unwrap();
            text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
        };
        let (size, odd) = (512 << 20, 5000);
        let at: CUdeviceptr = get!(cuMemAlloc_v2(size));
        let bytes = [7_u8; 3 * 4096];
        let ends = [at, at + size as u64 - bytes.len() as u64];
        for end in ends {
            ok!(cuMemcpyHtoD_v2(end, bytes.as_ptr().cast(), bytes.len()));
        }
        let before = resident();
        ok!(cuMemsetD8_v2(at + odd as u64, 0, size - 2 * odd));
        assert!(resident() < before + (16 << 20), "{} bytes more", resident() - before);
        // Bytes beside the range stay, and all of the range is zero.
        let mut back = bytes;
        ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), ends[0], back.len()));
        assert!(back[..odd].iter().all(|b| *b == 7) && back[odd..].iter().all(|b| *b == 0));
        ok!(cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), ends[1], back.len()));
        let kept = back.len() - odd;
        assert!(back[kept..].iter().all(|b| *b == 7) && back[..kept].iter().all(|b| *b == 0));
        ok!(cuMemFree_v2(at));
    });
}

#[test]
fn pools_reserve_and_trim() {
    isolated("pools_reserve_and_trim", &[], || {
        start();
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let pool: sys::CUmemoryPool = get!(cuDeviceGetDefaultMemPool(0));
        let attribute = |n: u32| {
            let mut value = 0_u64;
            ok!(cuMemPoolGetAttribute(pool, n, (&raw mut value).cast()));
            value
        };
        let a: CUdeviceptr = get!(cuMemAllocAsync(3 << 20, stream));
        assert_eq!((attribute(5), attribute(7)), (32 << 20, 3 << 20));
        assert_eq!(mine().gpus[0].memory_bytes["pool"], 32 << 20);
        ok!(cuMemFreeAsync(a, stream));
        assert_eq!((attribute(5), attribute(7)), (32 << 20, 0));
        ok!(cuStreamSynchronize(stream));
        assert_eq!((attribute(5), attribute(6)), (0, 32 << 20));
        let mut keep = u64::MAX;
        ok!(cuMemPoolSetAttribute(pool, 4, (&raw mut keep).cast()));
        let a: CUdeviceptr = get!(cuMemAllocAsync(1 << 20, stream));
        ok!(cuMemFreeAsync(a, stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(attribute(5), 32 << 20);
        // Nothing but one free stretch of one chunk serves an allocation.
        let a: CUdeviceptr = get!(cuMemAllocAsync(1 << 20, stream));
        let b: CUdeviceptr = get!(cuMemAllocAsync(40 << 20, stream));
        ok!(cuMemFreeAsync(b, stream));
        assert_eq!((attribute(5), attribute(7)), (96 << 20, 1 << 20));
        let b: CUdeviceptr = get!(cuMemAllocAsync(70 << 20, stream));
        assert_eq!((attribute(5), attribute(7)), (192 << 20, 71 << 20));
        ok!(cuMemPoolTrimTo(pool, 0));
        assert_eq!(attribute(5), 128 << 20, "one chunk is empty");
        ok!(cuMemFreeAsync(a, stream));
        ok!(cuMemFreeAsync(b, stream));
        ok!(cuMemPoolTrimTo(pool, 32 << 20));
        assert_eq!(attribute(5), 96 << 20, "whole chunks go, and no more than leaves what is to be kept");
        // An allocation without room takes unused memory of the pools.
        let (mut free, mut total) = (0, 0);
        ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
        let all: CUdeviceptr = get!(cuMemAlloc_v2(free + (2 << 20)));
        assert_eq!(attribute(5), 0);
        ok!(cuMemFree_v2(all));
        assert_eq!(cu!(cuMemFreeAsync(1234, stream)), INVALID_VALUE);
    });
}

#[test]
fn virtual_memory_maps_handles() {
    isolated("virtual_memory_maps_handles", &[], || {
        start();
        // SAFETY: all zero is a valid description.
        let mut prop: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        prop.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let step: usize = get!(cuMemGetAllocationGranularity(&raw const prop, 0));
        assert_eq!(step, 2 << 20);
        let mut handle = 0;
        assert_eq!(cu!(cuMemCreate(&raw mut handle, 1000, &raw const prop, 0)), INVALID_VALUE);
        ok!(cuMemCreate(&raw mut handle, 2 * step, &raw const prop, 0));
        assert_eq!(mine().gpus[0].memory_bytes["vmm"], 2 * step as u64);
        let at: CUdeviceptr = get!(cuMemAddressReserve(8 * step, 0, 0, 0));
        ok!(cuMemMap(at, 2 * step, 0, handle, 0));
        ok!(cuMemMap(at + 4 * step as u64, 2 * step, 0, handle, 0));
        assert_eq!(cu!(cuMemMap(at + step as u64, step, 0, handle, 0)), INVALID_VALUE);
        assert_eq!(cu!(cuMemsetD8_v2(at, 1, 16)), INVALID_VALUE, "no access yet");
        let access = sys::CUmemAccessDesc {
            location: prop.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        ok!(cuMemSetAccess(at, 2 * step, &raw const access, 1));
        ok!(cuMemSetAccess(at + 4 * step as u64, 2 * step, &raw const access, 1));
        ok!(cuMemsetD8_v2(at + 5, 0x5a, 3));
        let mut word = [0_u8; 4];
        ok!(cuMemcpyDtoH_v2(word.as_mut_ptr().cast(), at + 4 * step as u64 + 4, 4));
        assert_eq!(word, [0, 0x5a, 0x5a, 0x5a], "one memory at two addresses");
        let mut read_only = access;
        read_only.flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
        ok!(cuMemSetAccess(at, 2 * step, &raw const read_only, 1));
        assert_eq!(get!(cuMemGetAccess((&raw const access.location).cast(), at)), 1);
        assert_eq!(cu!(cuMemsetD8_v2(at + 5, 1, 3)), INVALID_VALUE, "it may be read alone");
        assert_eq!(cu!(cuMemcpyHtoD_v2(at, word.as_ptr().cast(), 4)), INVALID_VALUE);
        ok!(cuMemcpyDtoH_v2(word.as_mut_ptr().cast(), at + 4, 4));
        assert_eq!(word, [0, 0x5a, 0x5a, 0x5a]);
        let again: u64 = get!(cuMemRetainAllocationHandle((at + 10) as *mut c_void));
        assert_eq!(again, handle);
        ok!(cuMemRelease(handle));
        ok!(cuMemRelease(again));
        assert_eq!(mine().gpus[0].memory_bytes["vmm"], 2 * step as u64, "mappings hold it");
        ok!(cuMemUnmap(at, 2 * step));
        ok!(cuMemUnmap(at + 4 * step as u64, 2 * step));
        assert_eq!(mine().gpus[0].memory_bytes["vmm"], 0);
        assert_eq!(cu!(cuMemRelease(handle)), INVALID_VALUE);
        ok!(cuMemAddressFree(at, 8 * step));
        // A wish is granted where the addresses are free.
        let wished: CUdeviceptr = get!(cuMemAddressReserve(8 * step, 0, at, 0));
        assert_eq!(wished, at);
        let elsewhere: CUdeviceptr = get!(cuMemAddressReserve(8 * step, 0, at, 0));
        assert_ne!(elsewhere, at);
        ok!(cuMemAddressFree(wished, 8 * step));
        ok!(cuMemAddressFree(elsewhere, 8 * step));
    });
}

#[test]
fn capture_records_and_graphs_replay() {
    isolated("capture_records_and_graphs_replay", &[], || {
        start();
        let (main, side): (sys::CUstream, sys::CUstream) = (get!(cuStreamCreate(0)), get!(cuStreamCreate(0)));
        let f = kernel("spin_100us_sm5");
        let event: sys::CUevent = get!(cuEventCreate(2));
        let back: sys::CUevent = get!(cuEventCreate(2));
        ok!(cuStreamBeginCapture_v2(main, 0));
        assert_eq!(launch(f, main), OK);
        ok!(cuEventRecord(event, main));
        ok!(cuStreamWaitEvent(side, event, 0));
        assert_eq!(launch(f, side), OK);
        ok!(cuEventRecord(back, side));
        assert_eq!(launch(f, main), OK);
        ok!(cuStreamWaitEvent(main, back, 0));
        let status: u32 = {
            let mut status = 9;
            ok!(cuStreamIsCapturing(side, &raw mut status));
            status
        };
        assert_eq!(status, 1);
        let memory: CUdeviceptr = get!(cuMemAllocAsync(1 << 20, main));
        ok!(cuMemsetD8Async(memory, 3, 1 << 20, main));
        ok!(cuMemFreeAsync(memory, main));
        let graph: sys::CUgraph = get_graph(main);
        let mut count = 0;
        ok!(cuGraphGetNodes(graph, null_mut(), &raw mut count));
        assert_eq!(count, 6);
        let mut edges = 0;
        ok!(cuGraphGetEdges(graph, null_mut(), null_mut(), &raw mut edges));
        assert_eq!(edges, 6);
        assert_eq!(mine().gpus[0].kernels, 0, "nothing has run");
        let exec: sys::CUgraphExec = get!(cuGraphInstantiateWithFlags(graph, 0));
        for _ in 0..3 {
            ok!(cuGraphLaunch(exec, main));
        }
        ok!(cuStreamSynchronize(main));
        let account = &mine().gpus[0];
        assert_eq!((account.kernels, account.kernel_ns, account.copies), (9, 900_000, 3));
        assert_eq!(account.memory_bytes["graph"], 1 << 20);
        ok!(cuDeviceGraphMemTrim(0));
        assert_eq!(mine().gpus[0].memory_bytes["graph"], 0);
        // SAFETY: the driver fills it.
        let mut info: sys::CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
        ok!(cuGraphExecUpdate_v2(exec, graph, &raw mut info));
        let empty: sys::CUgraph = get!(cuGraphCreate(0));
        assert_eq!(cu!(cuGraphExecUpdate_v2(exec, empty, &raw mut info)), CUresult(910));
        ok!(cuGraphExecDestroy(exec));
        ok!(cuGraphDestroy(graph));
        assert_eq!(cu!(cuGraphLaunch(exec, main)), INVALID_VALUE);
    });
}

fn get_graph(stream: sys::CUstream) -> sys::CUgraph {
    let mut graph = null_mut();
    ok!(cuStreamEndCapture(stream, &raw mut graph));
    assert!(!graph.is_null());
    graph
}

#[test]
fn capture_has_the_documented_errors() {
    isolated("capture_has_the_documented_errors", &[], || {
        start();
        let (s, other): (sys::CUstream, sys::CUstream) = (get!(cuStreamCreate(0)), get!(cuStreamCreate(0)));
        let f = kernel("spin_1us");
        let mut graph = null_mut();
        let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        let invalidated = CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        assert_eq!(cu!(cuStreamBeginCapture_v2(null_mut(), 0)), unsupported);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), CUresult::CUDA_ERROR_ILLEGAL_STATE);
        // Synchronising a capturing stream, or its context.
        ok!(cuStreamBeginCapture_v2(s, 2));
        assert_eq!(cu!(cuStreamSynchronize(s)), unsupported);
        assert_eq!(launch(f, s), invalidated);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        assert!(graph.is_null());
        ok!(cuStreamBeginCapture_v2(s, 2));
        assert_eq!(cu!(cuCtxSynchronize()), unsupported);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        // The legacy stream would depend on the capturing stream.
        ok!(cuStreamBeginCapture_v2(s, 2));
        assert_eq!(launch(f, null_mut()), CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        // Allocation while a global capture runs; allowed in relaxed mode.
        let mut p = 0;
        ok!(cuStreamBeginCapture_v2(s, 0));
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut p, 64)), unsupported);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        ok!(cuStreamBeginCapture_v2(s, 0));
        let mut mode = 2;
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(mode, 0);
        ok!(cuMemAlloc_v2(&raw mut p, 64));
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        // A captured event cannot be asked.
        let event: sys::CUevent = get!(cuEventCreate(0));
        ok!(cuEventRecord(event, s));
        assert_eq!(cu!(cuEventQuery(event)), CUresult::CUDA_ERROR_CAPTURED_EVENT);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        // A side stream which does not join its origin again.
        ok!(cuStreamBeginCapture_v2(s, 2));
        ok!(cuEventRecord(event, s));
        ok!(cuStreamWaitEvent(other, event, 0));
        assert_eq!(launch(f, other), OK);
        assert_eq!(
            cu!(cuStreamEndCapture(other, &raw mut graph)),
            CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        );
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), invalidated);
        ok!(cuStreamBeginCapture_v2(s, 2));
        ok!(cuEventRecord(event, s));
        ok!(cuStreamWaitEvent(other, event, 0));
        assert_eq!(launch(f, other), OK);
        assert_eq!(cu!(cuStreamEndCapture(s, &raw mut graph)), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
        // All streams are as before.
        assert_eq!((launch(f, s), launch(f, other)), (OK, OK));
        ok!(cuCtxSynchronize());
    });
}

#[test]
fn graphs_are_built_by_hand() {
    isolated("graphs_are_built_by_hand", &[], || {
        start();
        let graph: sys::CUgraph = get!(cuGraphCreate(0));
        // SAFETY: all zero is a valid description.
        let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
        params.func = kernel("spin_50us");
        (params.gridDimX, params.gridDimY, params.gridDimZ) = (4, 1, 1);
        (params.blockDimX, params.blockDimY, params.blockDimZ) = (32, 1, 1);
        let a: sys::CUgraphNode = get!(cuGraphAddKernelNode_v2(graph, null(), 0, &raw const params));
        let b: sys::CUgraphNode = get!(cuGraphAddKernelNode_v2(graph, &raw const a, 1, &raw const params));
        assert_eq!(
            cu!(cuGraphAddDependencies(graph, &raw const b, &raw const a, 1)),
            INVALID_VALUE,
            "a cycle"
        );
        let host = sys::CUDA_HOST_NODE_PARAMS {
            fn_: Some(count_call),
            userData: std::ptr::dangling_mut::<c_void>(),
        };
        let _: sys::CUgraphNode = get!(cuGraphAddHostNode(graph, &raw const b, 1, &raw const host));
        let child: sys::CUgraph = get!(cuGraphClone(graph));
        let _: sys::CUgraphNode = get!(cuGraphAddChildGraphNode(graph, &raw const b, 1, child));
        let exec: sys::CUgraphExec = get!(cuGraphInstantiate_v2(graph, null_mut(), null_mut(), 0));
        ok!(cuGraphLaunch(exec, null_mut()));
        ok!(cuCtxSynchronize());
        assert_eq!(CALLS.load(Ordering::SeqCst), 2);
        assert_eq!((mine().gpus[0].kernels, mine().gpus[0].kernel_ns), (4, 200_000));
        params.func = kernel("spin_10us");
        ok!(cuGraphExecKernelNodeSetParams_v2(exec, a, &raw const params));
        ok!(cuGraphNodeSetEnabled(exec, b, 0));
        ok!(cuGraphLaunch(exec, null_mut()));
        ok!(cuCtxSynchronize());
        assert_eq!(mine().gpus[0].kernel_ns, 200_000 + 10_000 + 100_000);
    });
}

#[test]
fn contexts_are_per_thread_stacks() {
    isolated("contexts_are_per_thread_stacks", &[], || {
        ok!(cuInit(0));
        let mut context: sys::CUcontext = null_mut();
        assert_eq!(cu!(cuCtxSynchronize()), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        let a: sys::CUcontext = get!(cuCtxCreate_v2(0, 0));
        let b: sys::CUcontext = get!(cuCtxCreate_v4(null_mut(), 0, 1));
        ok!(cuCtxGetCurrent(&raw mut context));
        assert_eq!(context, b);
        let device: i32 = {
            let mut device = 9;
            ok!(cuCtxGetDevice(&raw mut device));
            device
        };
        assert_eq!(device, 1);
        ok!(cuCtxPopCurrent_v2(&raw mut context));
        ok!(cuCtxGetCurrent(&raw mut context));
        assert_eq!(context, a);
        std::thread::spawn(|| assert_eq!(cu!(cuCtxSynchronize()), CUresult::CUDA_ERROR_INVALID_CONTEXT))
            .join()
            .unwrap();
        assert_eq!(mine().gpus[0].memory_bytes["context"], 16 << 20);
        ok!(cuCtxDestroy_v2(a));
        assert_eq!(mine().gpus[0].memory_used_bytes, 0);
        assert_eq!(cu!(cuCtxPushCurrent_v2(a)), CUresult::CUDA_ERROR_INVALID_CONTEXT);
        // Part of the SMs for a green context.
        // SAFETY: the driver fills it.
        let mut whole: sys::CUdevResource = unsafe { std::mem::zeroed() };
        ok!(cuDeviceGetDevResource(0, &raw mut whole, 1));
        let mut groups = 1;
        // SAFETY: the driver fills it.
        let mut part: sys::CUdevResource = unsafe { std::mem::zeroed() };
        ok!(cuDevSmResourceSplitByCount(&raw mut part, &raw mut groups, &raw const whole, null_mut(), 0, 4));
        let desc: sys::CUdevResourceDesc = get!(cuDevResourceGenerateDesc(&raw mut part, 1));
        let green: sys::CUgreenCtx = get!(cuGreenCtxCreate(desc, 0, 1));
        let context: sys::CUcontext = get!(cuCtxFromGreenCtx(green));
        ok!(cuCtxSetCurrent(context));
        let stream: sys::CUstream = get!(cuGreenCtxStreamCreate(green, 1, 0));
        assert_eq!(launch(kernel("spin_100us_full"), stream), OK);
        ok!(cuStreamSynchronize(stream));
        assert_eq!((mine().gpus[0].kernel_ns, mine().gpus[0].sm_ns), (250_000, 1_000_000));
    });
}

#[test]
fn launches_that_cost_nothing_are_counted() {
    isolated("launches_that_cost_nothing_are_counted", &[], || {
        let context = start();
        let f = kernel("zero") as usize;
        let context = context as usize;
        let threads: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(move || {
                    ok!(cuCtxSetCurrent(context as sys::CUcontext));
                    for _ in 0..10_000 {
                        assert_eq!(launch(f as sys::CUfunction, null_mut()), OK);
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
        assert_eq!(mine().free_launches, 40_000);
        assert_eq!(mine().gpus[0].kernels, 0);
        // Behind other work in the stream they queue.
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        let gate = Gate::shut(stream);
        assert_eq!(launch(kernel("spin_2ms"), stream), OK);
        assert_eq!(launch(f as sys::CUfunction, stream), OK);
        gate.open();
        ok!(cuStreamSynchronize(stream));
        assert_eq!(mine().gpus[0].kernels, 2);
        assert_eq!(
            cu!(cuLaunchKernel(
                f as sys::CUfunction,
                0,
                1,
                1,
                1,
                1,
                1,
                0,
                null_mut(),
                null_mut(),
                null_mut()
            )),
            INVALID_VALUE
        );
    });
}

#[test]
fn libraries_give_kernels_and_names() {
    isolated("libraries_give_kernels_and_names", &[], || {
        start();
        let ptx = c".version 7.0\n.entry one(){ret;}\n.entry two(){ret;}\n.visible .global .align 4 .b8 table[16];\n";
        let library: sys::CUlibrary = get!(cuLibraryLoadData(
            ptx.as_ptr().cast(),
            null_mut(),
            null_mut(),
            0,
            null_mut(),
            null_mut(),
            0
        ));
        let mut kernel = null_mut();
        assert_eq!(
            cu!(cuLibraryGetKernel(&raw mut kernel, library, c"three".as_ptr())),
            CUresult::CUDA_ERROR_NOT_FOUND
        );
        ok!(cuLibraryGetKernel(&raw mut kernel, library, c"two".as_ptr()));
        let function: sys::CUfunction = get!(cuKernelGetFunction(kernel));
        // A kernel may be launched in a function's place.
        assert_eq!((launch(function, null_mut()), launch(kernel.cast(), null_mut())), (OK, OK));
        let (mut at, mut bytes) = (0, 0);
        ok!(cuLibraryGetGlobal(&raw mut at, &raw mut bytes, library, c"table".as_ptr()));
        assert_eq!(bytes, 16);
        // Binary images are accepted with any name in them.
        let image = *b"\x7fELF............";
        let module: sys::CUmodule = get!(cuModuleLoadData(image.as_ptr().cast()));
        let _: sys::CUfunction = get!(cuModuleGetFunction(module, c"whatever".as_ptr()));
        ok!(cuModuleUnload(module));
        assert_eq!(cu!(cuModuleUnload(module)), CUresult::CUDA_ERROR_INVALID_HANDLE);
        ok!(cuLibraryUnload(library));
        assert_eq!(launch(function, null_mut()), CUresult::CUDA_ERROR_INVALID_HANDLE);
    });
}

#[test]
fn names_without_a_function_say_not_supported() {
    isolated("names_without_a_function_say_not_supported", &[], || {
        start();
        assert!(!fake_cuda::driver::is_served("cuTexRefCreate"));
        let mut reference = null_mut();
        assert_eq!(cu!(cuTexRefCreate(&raw mut reference)), CUresult::CUDA_ERROR_NOT_SUPPORTED);
    });
}

/// Only this number shows that a name has lost its function: the library exports the name all the same.
#[test]
fn as_many_names_have_a_function_as_before() {
    let served = |symbol: &&gshare_cuda_abi::Symbol| fake_cuda::driver::is_served(symbol.name);
    assert_eq!(gshare_cuda_abi::SYMBOLS.iter().filter(served).count(), 471);
}

/// A program that launches short kernels keeps the device waiting: between two events lies the time of the calls.
#[test]
fn calls_take_their_time_before_their_work_starts() {
    isolated(
        "calls_take_their_time_before_their_work_starts",
        &[("GSHARE_SIM_PROFILE", "a100"), ("GSHARE_SIM_CALL_NS", "100000")],
        || {
            start();
            let mut stream = null_mut();
            ok!(cuStreamCreate(&raw mut stream, 1));
            let (mut before, mut after) = (null_mut(), null_mut());
            ok!(cuEventCreate(&raw mut before, 0));
            ok!(cuEventCreate(&raw mut after, 0));
            for (name, busy) in [("zero", 0), ("spin_1us", 1_000)] {
                let f = kernel(name);
                let busy_before = mine().gpus[0].busy_ns;
                ok!(cuEventRecord(before, stream));
                assert!(launch(f, stream).is_ok());
                ok!(cuEventRecord(after, stream));
                ok!(cuStreamSynchronize(stream));
                let mut ms = 0f32;
                ok!(cuEventElapsedTime(&raw mut ms, before, after));
                assert!(ms >= 0.1, "{name}: {ms} ms between the events");
                assert_eq!(mine().gpus[0].busy_ns - busy_before, busy, "{name}");
            }
        },
    );
}

#[test]
fn a_wrong_time_of_calls_is_refused() {
    isolated("a_wrong_time_of_calls_is_refused", &[("GSHARE_SIM_CALL_NS", "2us")], || {
        assert_eq!(cu!(cuInit(0)), CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
    });
}

#[test]
fn a_lost_gpu_answers_errors_and_is_not_there_for_who_begins_until_it_is_back() {
    let name = "a_lost_gpu_answers_errors_and_is_not_there_for_who_begins_until_it_is_back";
    isolated(name, &[("GSHARE_SIM_GPUS", "1")], || {
        const LOST: CUresult = CUresult::CUDA_ERROR_UNKNOWN;
        let none = null_mut();
        start();
        let device =
            fake_cuda::sim::SimDevice::open(&dir().join("device"), &fake_cuda::Spec::default()).unwrap();
        assert!(!device.set_lost(99, true), "there is no such GPU");
        let (zero, spin) = (kernel("zero"), kernel("spin_3600000000us"));
        let event: sys::CUevent = get!(cuEventCreate(0));
        let stream: sys::CUstream = get!(cuStreamCreate(1));
        assert_eq!(launch(zero, none), OK);
        // A kernel of an hour: a call in wait for it learns of the loss instead.
        assert_eq!(launch(spin, stream), OK);
        ok!(cuEventRecord(event, stream));
        std::thread::scope(|scope| {
            let (address, at) = (event as usize, stream as usize);
            let waits = scope.spawn(move || cu!(cuEventSynchronize(address as sys::CUevent)));
            let other = scope.spawn(move || cu!(cuStreamSynchronize(at as sys::CUstream)));
            assert!(device.set_lost(0, true));
            assert_eq!((waits.join().unwrap(), other.join().unwrap()), (LOST, LOST));
        });
        assert!(truth().gpus[0].lost);
        let mut at = 0;
        assert_eq!((launch(zero, none), launch(zero, stream)), (LOST, LOST));
        assert_eq!(cu!(cuMemAlloc_v2(&raw mut at, 1 << 20)), LOST);
        assert_eq!((cu!(cuCtxSynchronize()), cu!(cuEventQuery(event))), (LOST, LOST));
        let second = |lost: bool| {
            let name = "a_process_that_begins_sees_no_lost_gpu";
            let status = command(&dir(), name, &[("LOST", if lost { "1" } else { "0" })]).status().unwrap();
            assert!(status.success(), "lost: {lost}");
        };
        second(true);
        assert!(device.set_lost(0, false));
        second(false);
        assert_eq!(launch(zero, none), OK);
    });
}

/// Run by the test above, in a process of its own; it checks nothing by itself.
#[test]
fn a_process_that_begins_sees_no_lost_gpu() {
    if let Ok(lost) = std::env::var("LOST") {
        let expected = if lost == "1" { CUresult::CUDA_ERROR_NO_DEVICE } else { OK };
        assert_eq!(cu!(cuInit(0)), expected);
    }
}
