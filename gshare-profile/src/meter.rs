//! How busy the GPU was while a trial measured.
//!
//! Throughput alone does not say why a point is good: a function that holds SMs without filling them leaves room for a
//! neighbour (FaST-GShare, Figures 8 and 10 show SM activity and occupancy beside throughput). The meter is asked at the
//! beginning and at the end of the measured part.
//!
//! # Nvml
//! `NvmlMeter` (feature `nvml`) asks NVML about one device. From Hopper on its performance monitoring gives the figures
//! over exactly the time between two samples. On older devices NVML knows no SMs: only the share of time with a kernel running,
//! from the driver's samples. Other processes on the device are in the figures.
//!
//! A simulated device has no warps, and therefore no occupancy.

use gshare_core::Bytes;

/// The utilisation seen by a meter. `None`: there is no source to ask.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Utilisation {
    /// Time with at least one kernel running.
    pub busy_percent: Option<f64>,
    /// Part of the SMs with work, over all SMs and the time.
    pub sm_percent: Option<f64>,
    /// Resident warps, as a part of the most possible.
    pub occupancy_percent: Option<f64>,
    /// Used memory of the device at the end, in bytes, of all processes, with contexts and code.
    #[cfg_attr(feature = "serde", serde(default, rename = "memory_bytes"))]
    pub memory: Option<Bytes>,
}

#[cfg(feature = "nvml")]
pub use nvml::NvmlMeter;

#[cfg(feature = "nvml")]
mod nvml {
    use super::Utilisation;
    use gshare_core::Bytes;
    use nvml_wrapper::enum_wrappers::device::Sampling;
    use nvml_wrapper::enums::device::SampleValue;
    use nvml_wrapper::enums::gpm::GpmMetricId;
    use nvml_wrapper::error::NvmlError;
    use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
    use nvml_wrapper::{Device, Nvml};
    use std::path::{Path, PathBuf};
    use std::time::{SystemTime, UNIX_EPOCH};

    /// A device as NVML sees it. The library is looked for at the first measurement, when the measured program has
    /// made its context, and stays loaded for the life of this process.
    #[derive(Debug)]
    pub struct NvmlMeter {
        nvml: PathBuf,
        device: String,
        opened: Option<Result<(&'static Nvml, bool), String>>,
        begun: Option<Begun>,
    }

    #[derive(Debug)]
    enum Begun {
        Sample(GpmSample<'static>),
        /// In microseconds since 1970, as NVML counts.
        Time(u64),
    }

    impl NvmlMeter {
        /// A meter of a device by its number or UUID, through a library: `libnvidia-ml.so.1`, or another of
        /// its kind by its path.
        pub fn new(library: &Path, device: impl Into<String>) -> Self {
            Self { nvml: library.to_owned(), device: device.into(), opened: None, begun: None }
        }

        /// Why the meter sees nothing, once it has been asked.
        pub fn missing(&self) -> Option<&str> {
            self.opened.as_ref()?.as_ref().err().map(String::as_str)
        }

        /// NVML, and whether the device has performance monitoring.
        fn open(&mut self) -> Option<(&'static Nvml, bool)> {
            let (path, name) = (&self.nvml, self.device.as_str());
            let open = || {
                // A sample points into the library it came from, and is kept between two calls: the library outlives it.
                let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
                let nvml: &'static Nvml = Box::leak(Box::new(nvml));
                Ok((nvml, device(nvml, name)?.gpm_support().unwrap_or(false)))
            };
            let opened = self.opened.get_or_insert_with(|| {
                open().map_err(|error: NvmlError| format!("{}: {error}", path.display()))
            });
            opened.as_ref().ok().copied()
        }

        fn finish(&self, nvml: &'static Nvml, begun: &Begun) -> Result<Utilisation, NvmlError> {
            let device = device(nvml, &self.device)?;
            let memory = device.memory_info().ok().map(|memory| Bytes(memory.used));
            match begun {
                Begun::Sample(first) => {
                    let second = device.gpm_sample()?;
                    let asked = [GpmMetricId::GraphicsUtil, GpmMetricId::SmUtil, GpmMetricId::SmOccupancy];
                    let found = gpm_metrics_get(nvml, first, &second, &asked)?;
                    // Each metric has an answer of its own; a metric is left out if the device lacks it.
                    let value = |place: usize| {
                        let value = found.get(place)?.as_ref().ok()?.value;
                        value.is_finite().then_some(value)
                    };
                    Ok(Utilisation {
                        busy_percent: value(0),
                        sm_percent: value(1),
                        occupancy_percent: value(2),
                        memory,
                    })
                }
                Begun::Time(since) => {
                    let samples = device.samples(Sampling::GpuUtilization, *since).unwrap_or_default();
                    let number = |value: &SampleValue| match *value {
                        SampleValue::U32(value) => f64::from(value),
                        SampleValue::F64(value) => value,
                        #[expect(clippy::cast_precision_loss, reason = "a report")]
                        SampleValue::U64(value) => value as f64,
                        _ => f64::NAN,
                    };
                    let values = samples.iter().map(|sample| number(&sample.value));
                    let values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
                    #[expect(clippy::cast_precision_loss, reason = "a report")]
                    let mean = values.iter().sum::<f64>() / values.len() as f64;
                    let busy_percent = (!values.is_empty()).then_some(mean);
                    Ok(Utilisation { busy_percent, memory, ..Utilisation::default() })
                }
            }
        }
    }

    /// By number or UUID.
    fn device(nvml: &'static Nvml, name: &str) -> Result<Device<'static>, NvmlError> {
        match name.parse() {
            Ok(number) => nvml.device_by_index(number),
            Err(_) => nvml.device_by_uuid(name),
        }
    }

    impl NvmlMeter {
        /// The measured part of a trial begins now.
        pub fn begin(&mut self) {
            self.begun = self.open().and_then(|(nvml, monitors)| {
                if monitors {
                    return Some(Begun::Sample(device(nvml, &self.device).ok()?.gpm_sample().ok()?));
                }
                let since = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
                Some(Begun::Time(u64::try_from(since.as_micros()).ok()?))
            });
        }

        /// The measured part has ended; the utilisation since [`begin`](Self::begin). `None` if it is not known.
        pub fn end(&mut self) -> Option<Utilisation> {
            let begun = self.begun.take()?;
            let (nvml, _) = self.open()?;
            self.finish(nvml, &begun).ok().filter(|seen| *seen != Utilisation::default())
        }
    }
}
