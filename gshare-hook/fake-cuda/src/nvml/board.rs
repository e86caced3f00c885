//! The board as the profile describes it, and the readings of its sensors.
//!
//! Power and temperature go linearly with the utilisation of the last second, from the profile's idle to its busy figure; energy
//! is that power over time. Clocks never change. The boards have no fan of their own, and no error is ever counted.

use super::*;
use gshare_fake_cuda_spec::{Board, Profile};

/// Power, temperature and energy of a GPU now.
struct Sensors {
    power_mw: c_uint,
    celsius: c_uint,
    energy_mj: u64,
    is_idle: bool,
}

/// `low` to `high` as `percent` goes from 0 to 100.
fn between(low: u32, high: u32, percent: u32) -> u32 {
    low + (u64::from(high - low) * u64::from(percent) / 100) as u32
}

fn sensors(device: &SimDevice, number: u32) -> Sensors {
    let truth = device.truth();
    let board = &device.profile().board;
    // The GPU that is cut is as busy as its busiest part.
    let parts = if device.is_cut() { 0..truth.gpus.len() } else { number as usize..number as usize + 1 };
    let parts = &truth.gpus[parts];
    let percent = parts.iter().map(|gpu| gpu.utilisation_percent).max().unwrap_or(0);
    let busy_ns = parts.iter().map(|gpu| gpu.busy_ns).max().unwrap_or(0);
    // mW x ns = 10^-12 J.
    let millijoules =
        |milliwatts: u32, ns: u64| (u128::from(milliwatts) * u128::from(ns) / 1_000_000_000) as u64;
    Sensors {
        power_mw: between(board.power_idle_mw, board.power_limit_mw, percent),
        celsius: between(board.idle_celsius, board.busy_celsius, percent),
        energy_mj: millijoules(board.power_idle_mw, truth.time_ns)
            + millijoules(board.power_limit_mw - board.power_idle_mw, busy_ns),
        is_idle: percent == 0,
    }
}

/// The profile of a whole GPU.
fn profile(handle: Handle) -> Result<&'static Profile, Return> {
    Ok(gpu(handle)?.0.profile())
}

fn board(handle: Handle) -> Result<&'static Board, Return> {
    Ok(&profile(handle)?.board)
}

/// `nvmlDeviceArchitecture_t` of a compute capability.
fn architecture(capability: (u32, u32)) -> c_uint {
    match capability {
        (7, 0..=4) => 5,
        (7, _) => 6,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        (10 | 12, _) => 10,
        _ => c_uint::MAX,
    }
}

/// FP32 cores of an SM, from the table of throughputs in NVIDIA's programming guide.
fn cores_per_sm(capability: (u32, u32)) -> u32 {
    match capability {
        (7, _) | (8, 0) => 64,
        _ => 128,
    }
}

/// MHz of one of `nvmlClockType_t`: graphics, SM, memory, video.
fn clock_mhz(profile: &Profile, kind: c_uint) -> Result<c_uint, Return> {
    match kind {
        0 | 1 => Ok(profile.clock_khz / 1000),
        2 => Ok(profile.memory_clock_khz / 1000),
        // The video engines' clock follows the SMs' at a fixed ratio.
        3 => Ok(profile.clock_khz / 1000 * 9 / 10),
        _ => Err(INVALID_ARGUMENT),
    }
}

/// 13 decimal digits, as serial numbers of boards have.
fn serial(device: &SimDevice, number: u32) -> String {
    let uuid = gpu_uuid(device, number);
    let half = uuid.iter().take(8).fold(0u64, |hash, byte| hash << 8 | u64::from(*byte));
    format!("{:013}", half % 10_000_000_000_000)
}

/// `nvmlFieldValue_t`.
#[repr(C)]
#[derive(Debug)]
pub struct FieldValue {
    field: c_uint,
    scope: c_uint,
    time_us: i64,
    latency_us: i64,
    value_type: c_uint,
    result: Return,
    value: u64,
}

/// The value of a field and its `nvmlValueType_t`, where there is one.
fn field(device: &SimDevice, number: u32, field: c_uint) -> Result<(u64, c_uint), Return> {
    const UNSIGNED_INT: c_uint = 1;
    const UNSIGNED_LONG_LONG: c_uint = 3;
    let board = &device.profile().board;
    let value = match field {
        83 => return Ok((sensors(device, number).energy_mj, UNSIGNED_LONG_LONG)),
        185 | 186 => sensors(device, number).power_mw,
        187 => board.power_min_mw,
        188..=190 => board.power_limit_mw,
        _ => return Err(NOT_SUPPORTED),
    };
    Ok((u64::from(value), UNSIGNED_INT))
}

/// `nvmlTemperature_v1_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Temperature {
    version: c_uint,
    sensor: c_uint,
    celsius: c_int,
}

unsafe fn put_zeros<const N: usize>(to: [*mut c_uint; N]) -> Result<(), Return> {
    to.into_iter().try_for_each(|to| put(to, 0))
}

nvml! {
    fn nvmlDeviceGetBrand (handle: Handle, brand: *mut c_uint) {
        const TESLA: c_uint = 2;
        const NVIDIA: c_uint = 14;
        put(brand, if profile(handle)?.device_name.starts_with("Tesla") { TESLA } else { NVIDIA })
    }
    fn nvmlDeviceGetSerial (handle: Handle, text: *mut c_char, length: c_uint) {
        let (device, number) = gpu(handle)?;
        put_text(text, length, &serial(device, number))
    }
    fn nvmlDeviceGetBoardId (handle: Handle, id: *mut c_uint) { put(id, (gpu(handle)?.1 + 1) << 8) }
    fn nvmlDeviceGetVbiosVersion (handle: Handle, text: *mut c_char, length: c_uint) {
        gpu(handle)?;
        put_text(text, length, "00.00.00.00.00")
    }
    fn nvmlDeviceGetArchitecture (handle: Handle, kind: *mut c_uint) {
        put(kind, architecture(part(handle)?.device.profile().compute_capability))
    }
    fn nvmlDeviceGetNumGpuCores (handle: Handle, cores: *mut c_uint) {
        let profile = profile(handle)?;
        put(cores, profile.sms * cores_per_sm(profile.compute_capability))
    }
    fn nvmlDeviceGetMemoryBusWidth (handle: Handle, bits: *mut c_uint) { put(bits, profile(handle)?.memory_bus_bits) }
    fn nvmlDeviceGetBAR1MemoryInfo (handle: Handle, memory: *mut [u64; 3]) {
        // Total, free, used: nothing is mapped through it here.
        let total = board(handle)?.bar1_bytes;
        put(memory, [total, total, 0])
    }
    fn nvmlDeviceGetMultiGpuBoard | nvmlDeviceGetDisplayActive | nvmlDeviceGetNumFans
        | nvmlDeviceGetAccountingMode | nvmlDeviceGetVirtualizationMode | nvmlDeviceGetComputeMode
        | nvmlDeviceGetPerformanceState | nvmlDeviceGetPowerState (handle: Handle, value: *mut c_uint) {
        // No; off; none; the default mode; the highest performance state.
        gpu(handle)?;
        put(value, 0)
    }
    fn nvmlDeviceGetPersistenceMode | nvmlDeviceGetPowerManagementMode | nvmlDeviceGetDisplayMode (handle: Handle, value: *mut c_uint) {
        gpu(handle)?;
        put(value, 1)
    }

    fn nvmlDeviceGetTemperature (handle: Handle, sensor: c_uint, celsius: *mut c_uint) {
        let (device, number) = gpu(handle)?;
        refuse_if(sensor != 0, INVALID_ARGUMENT)?;
        put(celsius, sensors(device, number).celsius)
    }
    fn nvmlDeviceGetTemperatureV (handle: Handle, temperature: *mut Temperature) {
        let (device, number) = gpu(handle)?;
        refuse_if(temperature.is_null() || (*temperature).sensor != 0, INVALID_ARGUMENT)?;
        check_version(temperature, 1)?;
        (*temperature).celsius = sensors(device, number).celsius as c_int;
        Ok(())
    }
    fn nvmlDeviceGetTemperatureThreshold (handle: Handle, kind: c_uint, celsius: *mut c_uint) {
        let board = board(handle)?;
        let value = match kind {
            0 => board.shutdown_celsius,
            1 => board.slowdown_celsius,
            3 => board.max_celsius,
            _ => return Err(NOT_SUPPORTED),
        };
        put(celsius, value)
    }
    fn nvmlDeviceGetPowerUsage (handle: Handle, milliwatts: *mut c_uint) {
        let (device, number) = gpu(handle)?;
        put(milliwatts, sensors(device, number).power_mw)
    }
    fn nvmlDeviceGetTotalEnergyConsumption (handle: Handle, millijoules: *mut c_ulonglong) {
        let (device, number) = gpu(handle)?;
        put(millijoules, sensors(device, number).energy_mj)
    }
    fn nvmlDeviceGetPowerManagementLimit | nvmlDeviceGetEnforcedPowerLimit | nvmlDeviceGetPowerManagementDefaultLimit
        (handle: Handle, milliwatts: *mut c_uint) {
        put(milliwatts, board(handle)?.power_limit_mw)
    }
    fn nvmlDeviceGetPowerManagementLimitConstraints (handle: Handle, low: *mut c_uint, high: *mut c_uint) {
        let board = board(handle)?;
        put(low, board.power_min_mw)?;
        put(high, board.power_limit_mw)
    }
    fn nvmlDeviceGetFieldValues (handle: Handle, count: c_int, values: *mut FieldValue) {
        let (device, number) = gpu(handle)?;
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        refuse_if(values.is_null(), INVALID_ARGUMENT)?;
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_err(|_| UNKNOWN)?;
        for place in 0..count {
            let value = values.add(place);
            (*value).time_us = now.as_micros() as i64;
            (*value).latency_us = 0;
            match field(device, number, (*value).field) {
                Ok((number, kind)) => {
                    (*value).value = number;
                    (*value).value_type = kind;
                    (*value).result = SUCCESS;
                }
                Err(code) => (*value).result = code,
            }
        }
        Ok(())
    }

    fn nvmlDeviceGetClockInfo | nvmlDeviceGetMaxClockInfo | nvmlDeviceGetApplicationsClock
        | nvmlDeviceGetDefaultApplicationsClock | nvmlDeviceGetMaxCustomerBoostClock
        (handle: Handle, kind: c_uint, mhz: *mut c_uint) {
        put(mhz, clock_mhz(profile(handle)?, kind)?)
    }
    fn nvmlDeviceGetClock (handle: Handle, kind: c_uint, _id: c_uint, mhz: *mut c_uint) {
        put(mhz, clock_mhz(profile(handle)?, kind)?)
    }
    fn nvmlDeviceGetSupportedMemoryClocks (handle: Handle, count: *mut c_uint, list: *mut c_uint) {
        put_list(vec![clock_mhz(profile(handle)?, 2)?], count, list)
    }
    fn nvmlDeviceGetSupportedGraphicsClocks (handle: Handle, memory: c_uint, count: *mut c_uint, list: *mut c_uint) {
        let profile = profile(handle)?;
        refuse_if(memory != clock_mhz(profile, 2)?, NOT_FOUND)?;
        put_list(vec![clock_mhz(profile, 0)?], count, list)
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons | nvmlDeviceGetCurrentClocksEventReasons
        (handle: Handle, reasons: *mut c_ulonglong) {
        // Idle, or nothing that holds the clocks back.
        let (device, number) = gpu(handle)?;
        put(reasons, c_ulonglong::from(sensors(device, number).is_idle))
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons | nvmlDeviceGetSupportedClocksEventReasons
        (handle: Handle, reasons: *mut c_ulonglong) {
        gpu(handle)?;
        put(reasons, 1)
    }

    fn nvmlDeviceGetEncoderUtilization | nvmlDeviceGetDecoderUtilization | nvmlDeviceGetJpgUtilization
        | nvmlDeviceGetOfaUtilization (handle: Handle, percent: *mut c_uint, period_us: *mut c_uint) {
        let (device, _) = gpu(handle)?;
        refuse_if(device.is_cut(), NOT_SUPPORTED)?;
        put(percent, 0)?;
        put(period_us, 167_000)
    }

    fn nvmlDeviceGetEccMode (handle: Handle, current: *mut c_uint, pending: *mut c_uint) {
        gpu(handle)?;
        put(current, 1)?;
        put(pending, 1)
    }
    fn nvmlDeviceGetDefaultEccMode (handle: Handle, mode: *mut c_uint) { gpu(handle)?; put(mode, 1) }
    fn nvmlDeviceGetTotalEccErrors (handle: Handle, _kind: c_uint, _counter: c_uint, count: *mut c_ulonglong) {
        gpu(handle)?;
        put(count, 0)
    }
    fn nvmlDeviceGetMemoryErrorCounter
        (handle: Handle, _kind: c_uint, _counter: c_uint, _location: c_uint, count: *mut c_ulonglong) {
        gpu(handle)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRemappedRows
        (handle: Handle, corrected: *mut c_uint, uncorrected: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint) {
        // Boards before Ampere retire pages instead.
        refuse_if(profile(handle)?.compute_capability.0 < 8, NOT_SUPPORTED)?;
        put_zeros([corrected, uncorrected, pending, failed])
    }
    fn nvmlDeviceGetRetiredPages (handle: Handle, _cause: c_uint, count: *mut c_uint, _pages: *mut c_ulonglong) {
        refuse_if(profile(handle)?.compute_capability.0 >= 8, NOT_SUPPORTED)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRetiredPagesPendingStatus (handle: Handle, pending: *mut c_uint) {
        refuse_if(profile(handle)?.compute_capability.0 >= 8, NOT_SUPPORTED)?;
        put(pending, 0)
    }
}
