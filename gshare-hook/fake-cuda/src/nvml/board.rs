//! The board in the profile, and the readings of its sensors.
//!
//! Power and temperature rise linearly with the utilisation of the last second, from the profile's idle to its busy figure; energy is the
//! integral of power. Clocks never change. The boards have no fan of their own, and no error is ever counted.

use super::*;

/// Power, temperature and energy of a GPU now.
struct Sensors {
    power_mw: c_uint,
    celsius: c_uint,
    energy_mj: u64,
    is_idle: bool,
}

/// A value between `low` and `high`, as `percent` goes from 0 to 100.
fn between(low: u32, high: u32, percent: u32) -> u32 {
    low + (u64::from(high - low) * u64::from(percent) / 100) as u32
}

fn sensors(gpu: Gpu) -> Sensors {
    let truth = gpu.device.truth();
    let board = gpu.board();
    // A cut GPU is as busy as its busiest part.
    let parts = &truth.gpus[gpu.device.parts(gpu.number)];
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
fn serial(gpu: Gpu) -> String {
    let uuid = gpu_uuid(gpu.device, gpu.number);
    let half = uuid.iter().take(8).fold(0u64, |hash, byte| hash << 8 | u64::from(*byte));
    format!("{:013}", half % 10_000_000_000_000)
}

structures! {
    /// `nvmlFieldValue_t`.
    FieldValue {
        field: c_uint,
        scope: c_uint,
        time_us: i64,
        latency_us: i64,
        value_type: c_uint,
        result: Return,
        value: u64,
    }
    /// `nvmlTemperature_v1_t`.
    Temperature { version: c_uint, sensor: c_uint, celsius: c_int }
}

/// The value of a field and its `nvmlValueType_t`, for a field with a value.
fn field(gpu: Gpu, field: c_uint) -> Result<(u64, c_uint), Return> {
    const UNSIGNED_INT: c_uint = 1;
    const UNSIGNED_LONG_LONG: c_uint = 3;
    let value = match field {
        83 => return Ok((sensors(gpu).energy_mj, UNSIGNED_LONG_LONG)),
        185 | 186 => sensors(gpu).power_mw,
        187 => gpu.board().power_min_mw,
        188..=190 => gpu.board().power_limit_mw,
        _ => return Err(NOT_SUPPORTED),
    };
    Ok((u64::from(value), UNSIGNED_INT))
}

nvml! {
    fn nvmlDeviceGetBrand (gpu: Gpu, brand: *mut c_uint) {
        const TESLA: c_uint = 2;
        const NVIDIA: c_uint = 14;
        put(brand, if gpu.profile().device_name.starts_with("Tesla") { TESLA } else { NVIDIA })
    }
    fn nvmlDeviceGetSerial (gpu: Gpu, text: *mut c_char, length: c_uint) { put_text(text, length, &serial(gpu)) }
    fn nvmlDeviceGetBoardId (gpu: Gpu) -> c_uint { (gpu.number + 1) << 8 }
    fn nvmlDeviceGetVbiosVersion (_gpu: Gpu, text: *mut c_char, length: c_uint) {
        put_text(text, length, "00.00.00.00.00")
    }
    fn nvmlDeviceGetArchitecture (part: Part) -> c_uint {
        architecture(part.device.profile().compute_capability)
    }
    fn nvmlDeviceGetNumGpuCores (gpu: Gpu) -> c_uint {
        gpu.profile().sms * cores_per_sm(gpu.profile().compute_capability)
    }
    fn nvmlDeviceGetMemoryBusWidth (gpu: Gpu) -> c_uint { gpu.profile().memory_bus_bits }
    fn nvmlDeviceGetBAR1MemoryInfo (gpu: Gpu, memory: *mut [u64; 3]) {
        // Total, free, used: the simulator maps nothing through the aperture.
        let total = gpu.board().bar1_bytes;
        put(memory, [total, total, 0])
    }
    fn nvmlDeviceGetMultiGpuBoard | nvmlDeviceGetDisplayActive | nvmlDeviceGetNumFans
        | nvmlDeviceGetAccountingMode | nvmlDeviceGetVirtualizationMode | nvmlDeviceGetComputeMode
        | nvmlDeviceGetPerformanceState | nvmlDeviceGetPowerState (_gpu: Gpu) -> c_uint {
        // No; off; none; the default mode; the highest performance state.
        0
    }
    fn nvmlDeviceGetPersistenceMode | nvmlDeviceGetPowerManagementMode | nvmlDeviceGetDisplayMode
        | nvmlDeviceGetDefaultEccMode (_gpu: Gpu) -> c_uint { 1 }

    fn nvmlDeviceGetTemperature (gpu: Gpu, sensor: c_uint, celsius: *mut c_uint) {
        refuse_if(sensor != 0, INVALID_ARGUMENT)?;
        put(celsius, sensors(gpu).celsius)
    }
    fn nvmlDeviceGetTemperatureV (gpu: Gpu, temperature: *mut Temperature) {
        refuse_if(temperature.is_null() || (*temperature).sensor != 0, INVALID_ARGUMENT)?;
        check_version(temperature, 1, VERSION_MISMATCH)?;
        (*temperature).celsius = sensors(gpu).celsius as c_int;
        Ok(())
    }
    fn nvmlDeviceGetTemperatureThreshold (gpu: Gpu, kind: c_uint) -> c_uint {
        match kind {
            0 => gpu.board().shutdown_celsius,
            1 => gpu.board().slowdown_celsius,
            3 => gpu.board().max_celsius,
            _ => return Err(NOT_SUPPORTED),
        }
    }
    fn nvmlDeviceGetPowerUsage (gpu: Gpu) -> c_uint { sensors(gpu).power_mw }
    fn nvmlDeviceGetTotalEnergyConsumption (gpu: Gpu) -> c_ulonglong { sensors(gpu).energy_mj }
    fn nvmlDeviceGetPowerManagementLimit | nvmlDeviceGetEnforcedPowerLimit | nvmlDeviceGetPowerManagementDefaultLimit
        (gpu: Gpu) -> c_uint { gpu.board().power_limit_mw }
    fn nvmlDeviceGetPowerManagementLimitConstraints (gpu: Gpu, low: *mut c_uint, high: *mut c_uint) {
        put(low, gpu.board().power_min_mw)?;
        put(high, gpu.board().power_limit_mw)
    }
    fn nvmlDeviceGetFieldValues (gpu: Gpu, count: c_int, values: *mut FieldValue) {
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        refuse_if(values.is_null(), INVALID_ARGUMENT)?;
        let time_us = unix_us()? as i64;
        for place in 0..count {
            let value = &mut *values.add(place);
            (value.time_us, value.latency_us) = (time_us, 0);
            match field(gpu, value.field) {
                Ok((number, kind)) => (value.value, value.value_type, value.result) = (number, kind, SUCCESS),
                Err(code) => value.result = code,
            }
        }
        Ok(())
    }

    fn nvmlDeviceGetClockInfo | nvmlDeviceGetMaxClockInfo | nvmlDeviceGetApplicationsClock
        | nvmlDeviceGetDefaultApplicationsClock | nvmlDeviceGetMaxCustomerBoostClock
        (gpu: Gpu, kind: c_uint) -> c_uint { clock_mhz(gpu.profile(), kind)? }
    fn nvmlDeviceGetClock (gpu: Gpu, kind: c_uint, _id: c_uint) -> c_uint { clock_mhz(gpu.profile(), kind)? }
    fn nvmlDeviceGetSupportedMemoryClocks (gpu: Gpu, count: *mut c_uint, list: *mut c_uint) {
        put_list(vec![clock_mhz(gpu.profile(), 2)?], count, list)
    }
    fn nvmlDeviceGetSupportedGraphicsClocks (gpu: Gpu, memory: c_uint, count: *mut c_uint, list: *mut c_uint) {
        refuse_if(memory != clock_mhz(gpu.profile(), 2)?, NOT_FOUND)?;
        put_list(vec![clock_mhz(gpu.profile(), 0)?], count, list)
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons | nvmlDeviceGetCurrentClocksEventReasons
        (gpu: Gpu) -> c_ulonglong {
        // Idle, or no reason for lower clocks.
        c_ulonglong::from(sensors(gpu).is_idle)
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons | nvmlDeviceGetSupportedClocksEventReasons
        (_gpu: Gpu) -> c_ulonglong { 1 }

    fn nvmlDeviceGetEncoderUtilization | nvmlDeviceGetDecoderUtilization | nvmlDeviceGetJpgUtilization
        | nvmlDeviceGetOfaUtilization (gpu: Gpu, percent: *mut c_uint, period_us: *mut c_uint) {
        gpu.whole()?;
        put(percent, 0)?;
        put(period_us, 167_000)
    }

    fn nvmlDeviceGetEccMode (_gpu: Gpu, current: *mut c_uint, pending: *mut c_uint) {
        put(current, 1)?;
        put(pending, 1)
    }
    fn nvmlDeviceGetTotalEccErrors (_gpu: Gpu, _kind: c_uint, _counter: c_uint) -> c_ulonglong { 0 }
    fn nvmlDeviceGetMemoryErrorCounter
        (_gpu: Gpu, _kind: c_uint, _counter: c_uint, _location: c_uint) -> c_ulonglong { 0 }
    fn nvmlDeviceGetRemappedRows
        (gpu: Gpu, corrected: *mut c_uint, uncorrected: *mut c_uint, pending: *mut c_uint, failed: *mut c_uint) {
        // Boards before Ampere retire pages instead.
        refuse_if(gpu.profile().compute_capability.0 < 8, NOT_SUPPORTED)?;
        [corrected, uncorrected, pending, failed].into_iter().try_for_each(|to| put(to, 0))
    }
    fn nvmlDeviceGetRetiredPages (gpu: Gpu, _cause: c_uint, count: *mut c_uint, _pages: *mut c_ulonglong) {
        refuse_if(gpu.profile().compute_capability.0 >= 8, NOT_SUPPORTED)?;
        put(count, 0)
    }
    fn nvmlDeviceGetRetiredPagesPendingStatus (gpu: Gpu, pending: *mut c_uint) {
        refuse_if(gpu.profile().compute_capability.0 >= 8, NOT_SUPPORTED)?;
        put(pending, 0)
    }
}
