//! Utilisation as samples and as metrics between two samples (GPM).

use super::*;

/// Time with a kernel running, and SM time, of a GPU up to an instant.
#[derive(Clone, Copy)]
struct Sample {
    time_ns: u64,
    busy_ns: u64,
    sm_ns: u64,
    sms: u64,
}

structures! {
    MetricInfo { short_name: *const c_char, long_name: *const c_char, unit: *const c_char }
    Metric { id: c_uint, result: Return, value: f64, info: MetricInfo }
    /// The head of `nvmlGpmMetricsGet_t`; `count` metrics follow.
    Metrics { version: c_uint, count: c_uint, first: *mut Sample, second: *mut Sample, metrics: [Metric; 0] }
    /// `nvmlSample_t` with a value of type unsigned int.
    UtilisationSample { time_us: c_ulonglong, value: u64 }
}

nvml! {
    fn nvmlDeviceGetSamples (gpu: Gpu, kind: c_uint, since_us: c_ulonglong, value_type: *mut c_uint, count: *mut c_uint, list: *mut UtilisationSample) {
        // NVML_GPU_UTILIZATION_SAMPLES, NVML_VALUE_TYPE_UNSIGNED_INT; times count from 1970, unlike the device's clock.
        const UTILISATION: c_uint = 1;
        refuse_if(kind != UTILISATION || gpu.device.is_cut(), NOT_SUPPORTED)?;
        put(value_type, 1)?;
        let time_us = unix_us()?;
        let sample = UtilisationSample { time_us, value: gpu.utilisation().into() };
        let samples = if time_us > since_us { vec![sample] } else { Vec::new() };
        if list.is_null() {
            return put(count, samples.len() as c_uint);
        }
        put_list(samples, count, list)
    }
    fn nvmlGpmQueryDeviceSupport (_gpu: Gpu, support: *mut [c_uint; 2]) {
        refuse_if(support.is_null(), INVALID_ARGUMENT)?;
        put(support, [(*support)[0], 1])
    }
    fn nvmlGpmSampleAlloc (sample: *mut *mut Sample) {
        device()?;
        put(sample, Box::into_raw(Box::new(Sample { time_ns: 0, busy_ns: 0, sm_ns: 0, sms: 0 })))
    }
    fn nvmlGpmSampleFree (sample: *mut Sample) {
        if !sample.is_null() {
            drop(Box::from_raw(sample));
        }
        Ok(())
    }
    fn nvmlGpmSampleGet (gpu: Gpu, sample: *mut Sample) {
        gpu.whole()?;
        let truth = gpu.device.truth();
        let number = gpu.number as usize;
        let sm_ns = truth.processes.iter().map(|process| process.gpus[number].sm_ns).sum();
        let gpu = &truth.gpus[number];
        put(sample, Sample { time_ns: truth.time_ns, busy_ns: gpu.busy_ns, sm_ns, sms: u64::from(gpu.sms) })
    }
    fn nvmlGpmMetricsGet (metrics: *mut Metrics) {
        const GRAPHICS_UTIL: c_uint = 1;
        const SM_UTIL: c_uint = 2;
        device()?;
        refuse_if(metrics.is_null() || (*metrics).version != 1 || (*metrics).first.is_null() || (*metrics).second.is_null(), INVALID_ARGUMENT)?;
        let (first, second) = (*(*metrics).first, *(*metrics).second);
        let elapsed = second.time_ns.saturating_sub(first.time_ns);
        let percent = |part: u64, whole: u64| if whole == 0 { 0.0 } else { (part as f64 / whole as f64 * 100.0).min(100.0) };
        let list = (&raw mut (*metrics).metrics).cast::<Metric>();
        for place in 0..(*metrics).count as usize {
            let metric = list.add(place);
            // The simulator has no warps, and counts no memory traffic.
            let (value, name, result) = match (*metric).id {
                GRAPHICS_UTIL => (percent(second.busy_ns.saturating_sub(first.busy_ns), elapsed), c"Graphics Util", SUCCESS),
                SM_UTIL => (percent(second.sm_ns.saturating_sub(first.sm_ns), elapsed * second.sms), c"SM Util", SUCCESS),
                _ => (0.0, c"", NOT_SUPPORTED),
            };
            let text = name.as_ptr();
            let info = MetricInfo { short_name: text, long_name: text, unit: c"%".as_ptr() };
            metric.write(Metric { id: (*metric).id, result, value, info });
        }
        Ok(())
    }
}
