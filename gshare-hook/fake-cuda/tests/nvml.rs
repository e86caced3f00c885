//! NVML as a monitor sees it, one process per test.
#![allow(unsafe_code, clippy::macro_metavars_in_unsafe)] // a C client
#![allow(clippy::cast_possible_truncation)] // small numbers

mod common;

use std::ffi::{CStr, CString, c_char, c_uint, c_void};
use std::ptr::null_mut;

use common::*;

const NOT_SUPPORTED: c_uint = 3;

/// Address of a name in NVML; null where there is none.
fn found(name: &str) -> *mut c_void {
    let name = CString::new(name).unwrap();
    // SAFETY: loads the library, whose initialisers are std's; a valid handle and name.
    unsafe {
        let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null(), "libnvidia-ml.so.1 is not found");
        libc::dlsym(library, name.as_ptr())
    }
}

/// Calls a function of NVML; every argument is a pointer or an integer.
macro_rules! nvml {
    ($name:literal, ($($ty:ty),*), $($arg:expr),*) => {{
        let at = found($name);
        assert!(!at.is_null(), "{} is not exported", $name);
        // SAFETY: NVML's function of that name has this signature; the arguments are the test's.
        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> c_uint>(at)($($arg),*) }
    }};
}

fn started() -> *mut c_void {
    assert_eq!(nvml!("nvmlInit_v2", (),), 0);
    let mut handle = null_mut();
    assert_eq!(nvml!("nvmlDeviceGetHandleByIndex_v2", (c_uint, *mut *mut c_void), 0, &raw mut handle), 0);
    handle
}

fn number(name: &str, handle: *mut c_void) -> Result<c_uint, c_uint> {
    let at = found(name);
    assert!(!at.is_null(), "{name} is not exported");
    let mut value = c_uint::MAX;
    // SAFETY: the names asked for here take a device and an unsigned int to fill.
    let code = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_uint>(at)(
            handle,
            &raw mut value,
        )
    };
    if code == 0 { Ok(value) } else { Err(code) }
}

fn clock(name: &str, handle: *mut c_void, kind: c_uint) -> c_uint {
    let at = found(name);
    let mut value = 0;
    // SAFETY: as above, with the kind in between.
    let code = unsafe {
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint) -> c_uint>(
            at,
        )(handle, kind, &raw mut value)
    };
    assert_eq!(code, 0, "{name}");
    value
}

fn driver_text(name: &str) -> String {
    let at = found(name);
    let mut text = [0 as c_char; 96];
    // SAFETY: the function fills a buffer of the length given, and ends it with 0.
    unsafe {
        let f = std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_char, c_uint) -> c_uint>(at);
        assert_eq!(f(text.as_mut_ptr(), 96), 0);
        CStr::from_ptr(text.as_ptr()).to_str().unwrap().to_owned()
    }
}

#[test]
fn names_that_clients_look_up_together_are_all_there() {
    isolated("names_that_clients_look_up_together_are_all_there", &[], || {
        // PyTorch takes all of these names or none.
        let pytorch = [
            "nvmlInit_v2",
            "nvmlDeviceGetHandleByPciBusId_v2",
            "nvmlDeviceGetNvLinkRemoteDeviceType",
            "nvmlDeviceGetNvLinkRemotePciInfo_v2",
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlSystemGetCudaDriverVersion_v2",
            "nvmlDeviceGetGpuFabricInfoV",
        ];
        let nccl = [
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetNvLinkCapability",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetPciInfoExt",
            "nvmlDeviceGetPlatformInfo",
            "nvmlSystemGetConfComputeSettings",
        ];
        for name in pytorch.into_iter().chain(nccl) {
            assert!(!found(name).is_null(), "{name}");
        }
        // A card without the function answers so, but only after NVML is initialised.
        assert_eq!(number("nvmlDeviceGetNvLinkRemoteDeviceType", null_mut()), Err(1));
        let handle = started();
        for name in ["nvmlDeviceGetFanSpeed", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetGpuFabricInfoV"] {
            assert_eq!(number(name, handle), Err(NOT_SUPPORTED), "{name}");
        }
        assert!(found("nvmlNoSuchFunction").is_null());
    });
}

#[test]
fn a_board_says_what_its_profile_says() {
    let env = [("GSHARE_SIM_PROFILE", "a100"), ("GSHARE_SIM_GPUS", "2")];
    isolated("a_board_says_what_its_profile_says", &env, || {
        let handle = started();
        for (name, expected) in [
            ("nvmlDeviceGetCurrPcieLinkGeneration", 4),
            ("nvmlDeviceGetCurrPcieLinkWidth", 16),
            ("nvmlDeviceGetPcieLinkMaxSpeed", 4),
            ("nvmlDeviceGetPcieSpeed", 16_000),
            ("nvmlDeviceGetNumGpuCores", 6_912),
            ("nvmlDeviceGetMemoryBusWidth", 5_120),
            ("nvmlDeviceGetArchitecture", 7),
            ("nvmlDeviceGetBrand", 14),
            ("nvmlDeviceGetEnforcedPowerLimit", 400_000),
            ("nvmlDeviceGetPerformanceState", 0),
            // Nothing runs.
            ("nvmlDeviceGetPowerUsage", 60_000),
        ] {
            assert_eq!(number(name, handle), Ok(expected), "{name}");
        }
        assert_eq!(clock("nvmlDeviceGetTemperature", handle, 0), 32);
        assert_eq!(clock("nvmlDeviceGetTemperatureThreshold", handle, 1), 89);
        assert_eq!(clock("nvmlDeviceGetMaxClockInfo", handle, 1), 1_410);
        assert_eq!(clock("nvmlDeviceGetClockInfo", handle, 2), 1_593);
        let mut bar1 = [0u64; 3];
        assert_eq!(
            nvml!("nvmlDeviceGetBAR1MemoryInfo", (*mut c_void, *mut [u64; 3]), handle, &raw mut bar1),
            0
        );
        assert_eq!(bar1, [128 << 30, 128 << 30, 0]);
        let (mut second, mut status) = (null_mut(), 9);
        assert_eq!(nvml!("nvmlDeviceGetHandleByIndex_v2", (c_uint, *mut *mut c_void), 1, &raw mut second), 0);
        for (capability, expected) in [(0, 0), (1, 0), (2, 5)] {
            let code = nvml!(
                "nvmlDeviceGetP2PStatus",
                (*mut c_void, *mut c_void, c_uint, *mut c_uint),
                handle,
                second,
                capability,
                &raw mut status
            );
            assert_eq!((code, status), (0, expected));
        }
    });
}

#[test]
fn a_busy_gpu_is_warmer_and_draws_more() {
    isolated("a_busy_gpu_is_warmer_and_draws_more", &[("GSHARE_SIM_PROFILE", "a100")], || {
        let handle = started();
        let idle = number("nvmlDeviceGetPowerUsage", handle).unwrap();
        let energy = || {
            let mut joules = 0u64;
            let code = nvml!(
                "nvmlDeviceGetTotalEnergyConsumption",
                (*mut c_void, *mut u64),
                handle,
                &raw mut joules
            );
            assert_eq!(code, 0);
            joules
        };
        let before = energy();
        let mut context = null_mut();
        ok!(cuInit(0));
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok!(cuCtxSetCurrent(context));
        let (mut module, mut function) = (null_mut(), null_mut());
        let ptx = c".version 7.0\n.visible .entry spin_200ms_full() { ret; }\n";
        ok!(cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()));
        ok!(cuModuleGetFunction(&raw mut function, module, c"spin_200ms_full".as_ptr()));
        let (mut arguments, mut extra) = (null_mut(), null_mut());
        ok!(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, null_mut(), &raw mut arguments, &raw mut extra));
        ok!(cuCtxSynchronize());
        let busy = number("nvmlDeviceGetPowerUsage", handle).unwrap();
        assert!((idle + 10_000..=400_000).contains(&busy), "{idle} mW idle, {busy} mW busy");
        assert!(clock("nvmlDeviceGetTemperature", handle, 0) > 32);
        // 200 ms at 400 W, less the rounding of the idle part.
        assert!(energy() - before >= 79_000, "{before} mJ before, {} mJ after", energy());
    });
}

#[test]
fn the_drivers_version_is_numeric_and_of_its_cuda_release() {
    for (release, number, driver) in
        [("12.2", 12_020, "535.104.05"), ("12.8", 12_080, "570.124.06"), ("", 13_020, "595.58.03")]
    {
        let env = [("GSHARE_SIM_DRIVER_VERSION", release)];
        isolated("the_drivers_version_is_numeric_and_of_its_cuda_release", &env, || {
            if std::env::var("GSHARE_SIM_DRIVER_VERSION").unwrap() != release {
                return;
            }
            started();
            let mut version = 0;
            assert_eq!(nvml!("nvmlSystemGetCudaDriverVersion_v2", (*mut i32), &raw mut version), 0);
            assert_eq!(version, number);
            let mut cuda = 0;
            ok!(cuDriverGetVersion(&raw mut cuda));
            assert_eq!(cuda, number);
            assert_eq!(driver_text("nvmlSystemGetDriverVersion"), driver);
            assert_eq!(driver_text("nvmlSystemGetNVMLVersion"), format!("{}.{driver}", number / 1000));
        });
    }
}

#[test]
fn a_wrong_variable_is_refused_by_cuda_and_by_nvml() {
    let env = [("GSHARE_SIM_DRIVER_VERSION", "9.9")];
    isolated("a_wrong_variable_is_refused_by_cuda_and_by_nvml", &env, || {
        assert_eq!(cu!(cuInit(0)), CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
        assert_eq!(nvml!("nvmlInit_v2", (),), 9);
    });
}

#[test]
fn without_variables_a_new_device_is_an_a100() {
    isolated("without_variables_a_new_device_is_an_a100", &[("GSHARE_SIM_PROFILE", "")], || {
        started();
        let (mut name, mut major) = ([0 as c_char; 96], 0);
        ok!(cuInit(0));
        ok!(cuDeviceGetName(name.as_mut_ptr(), 96, 0));
        // SAFETY: the driver ended the text with 0.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        assert_eq!(name.to_str().unwrap(), "NVIDIA A100-SXM4-80GB (simulated)");
        ok!(cuDeviceGetAttribute(&raw mut major, 75, 0));
        assert_eq!(major, 8);
    });
}

#[test]
fn a_lost_gpu_says_so_and_the_others_do_not() {
    let name = "a_lost_gpu_says_so_and_the_others_do_not";
    isolated(name, &[("GSHARE_SIM_GPUS", "2")], || {
        const GPU_IS_LOST: c_uint = 15;
        let first = started();
        let mut text = [0 as c_char; 96];
        let at = text.as_mut_ptr();
        assert_eq!(nvml!("nvmlDeviceGetUUID", (*mut c_void, *mut c_char, c_uint), first, at, 96), 0);
        let uuid: String =
            text.iter().take_while(|c| **c != 0).map(|c| char::from(c.cast_unsigned())).collect();
        let device =
            fake_cuda::sim::SimDevice::open(&dir().join("device"), &fake_cuda::Spec::default()).unwrap();
        assert!(device.set_lost(0, true));
        let mut handle = null_mut();
        let mut ask = |index: c_uint| {
            nvml!("nvmlDeviceGetHandleByIndex_v2", (c_uint, *mut *mut c_void), index, &raw mut handle)
        };
        assert_eq!((ask(0), ask(1)), (GPU_IS_LOST, 0));
        let by_name = || {
            let (uuid, mut handle) = (CString::new(uuid.as_str()).unwrap(), null_mut::<c_void>());
            nvml!(
                "nvmlDeviceGetHandleByUUID",
                (*const c_char, *mut *mut c_void),
                uuid.as_ptr(),
                &raw mut handle
            )
        };
        assert_eq!((number("nvmlDeviceGetIndex", first), by_name()), (Err(GPU_IS_LOST), GPU_IS_LOST));
        assert!(device.set_lost(0, false));
        assert_eq!((number("nvmlDeviceGetIndex", first), by_name()), (Ok(0), 0));
    });
}
