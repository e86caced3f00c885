//! A deployment's annotations, each checked with its bounds.

use super::{KEYS, MOST_BATCH, PREFIX, Probe, SHARE_PREFIXES, SHARES, Wants, bad, file, meant, profile};
use crate::api::ApiError;
use gshare_core::{Duration, GpuShare, Quota, QuotaRange, ResourceSpec, ServiceClass, SmShare, SpecError};
use gshare_sched::platform::Regime;
use std::collections::BTreeMap;
use std::path::Path;

pub(super) struct Annotations<'a>(pub(super) BTreeMap<&'a String, &'a String>);

impl Annotations<'_> {
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| **name == key).map(|(_, value)| value.as_str())
    }

    /// Refuses keys that this host would not read although they are meant for it.
    pub(super) fn known(&self) -> Result<(), ApiError> {
        let is_share = |key: &str| {
            let name = SHARE_PREFIXES.iter().find_map(|prefix| key.strip_prefix(prefix));
            let short = |name: &str| name.trim_start_matches("gpu_").to_owned();
            name.is_some_and(|name| SHARES.into_iter().map(short).any(|share| share == short(name)))
        };
        let known = |key: &str| KEYS.iter().any(|(name, _)| *name == key) || is_share(key);
        let mut prefixes = SHARE_PREFIXES.into_iter().chain([PREFIX]);
        let ours = prefixes.any(|prefix| self.0.keys().any(|key| key.starts_with(prefix)));
        for key in self.0.keys().filter(|key| !known(key)) {
            if let Some(meant) = meant(key, ours) {
                return Err(ApiError::bad(format!("annotations: unknown `{key}`: need `{meant}`")));
            }
            if key.starts_with(PREFIX) {
                let all: Vec<String> = KEYS.iter().map(|(name, what)| format!("{name} ({what})")).collect();
                let all = all.join(", ");
                return Err(ApiError::bad(format!("annotations: unknown `{key}`; there are: {all}")));
            }
        }
        Ok(())
    }

    pub(super) fn share(&self) -> Result<Option<ResourceSpec>, ApiError> {
        let is_share = |key: &str| SHARE_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
        let shares = || self.0.iter().filter(|(key, _)| is_share(key));
        if shares().next().is_none() {
            return Ok(None);
        }
        let spec =
            ResourceSpec::from_annotations(shares().map(|(key, value)| (key.as_str(), value.as_str())))
                .map_err(|error| {
                    let mut text = error.to_string();
                    let key_of =
                        |name: &str| shares().find(|(key, _)| key.ends_with(name)).map(|(key, _)| key);
                    if let SpecError::Field { field, .. } = error
                        && let Some(key) = key_of(field)
                    {
                        text = text.replacen(field, key, 1);
                    } else if let Some(key) = field_of(&error).and_then(key_of) {
                        text = format!("{key}: {text}");
                    }
                    ApiError::bad(format!("annotations: {text}"))
                })?;
        if spec.guaranteed().is_some() {
            return Err(ApiError::bad(
                "annotations: fastgshare/gpu_mem: is a range: need one size, since the host books the memory of an instance",
            ));
        }
        // Memory alone limits a function but gives it no share.
        let only_memory = shares().all(|(key, _)| key.ends_with("/gpu_mem"));
        if spec.quota().request().is_zero() && !only_memory {
            return Err(ApiError::bad(
                "annotations: fastgshare/gpu_quota_request: is 0 or missing: need more, since an instance is placed by it",
            ));
        }
        Ok(Some(spec))
    }

    pub(super) fn number(
        &self,
        key: &str,
        range: core::ops::RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(text) = self.get(key) else { return Ok(None) };
        match text.parse::<f64>() {
            Ok(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(bad(key, text, &format!("need {} to {}", range.start(), range.end()))),
        }
    }

    pub(super) fn count(
        &self,
        key: &str,
        default: u32,
        range: core::ops::RangeInclusive<u32>,
    ) -> Result<u32, ApiError> {
        let Some(text) = self.get(key) else { return Ok(default) };
        match text.parse::<u32>() {
            Ok(number) if range.contains(&number) => Ok(number),
            _ => Err(bad(key, text, &format!("need {} to {}", range.start(), range.end()))),
        }
    }

    pub(super) fn time(&self, key: &str) -> Result<Option<Duration>, ApiError> {
        let Some(text) = self.get(key) else { return Ok(None) };
        let hour = Duration::from_secs(3600);
        match text.parse::<Duration>() {
            Ok(time) if !time.is_zero() && time <= hour => Ok(Some(time)),
            Ok(_) => Err(bad(key, text, "need more than 0, at most 3600s")),
            Err(error) => Err(ApiError::bad(format!("annotations: {key}: {error}"))),
        }
    }

    pub(super) fn class(&self) -> Result<Option<ServiceClass>, ApiError> {
        let Some(text) = self.get("gshare/class") else { return Ok(None) };
        let class = text.parse::<ServiceClass>();
        class.map(Some).map_err(|error| {
            bad("gshare/class", text, &format!("{error}; need slo-sensitive or best-effort"))
        })
    }

    pub(super) fn regime(&self) -> Result<Option<Regime>, ApiError> {
        match self.get("gshare/regime") {
            None => Ok(None),
            Some("fractional") => Ok(Some(Regime::Fractional)),
            Some("sliced") => Ok(Some(Regime::Sliced)),
            Some("whole") => Ok(Some(Regime::Whole)),
            Some(other) => Err(bad("gshare/regime", other, "need fractional, sliced or whole")),
        }
    }

    pub(super) fn batch(&self, wants: &Wants, regime: Option<Regime>) -> Result<Option<u32>, ApiError> {
        let key = "gshare/batch";
        let Some(text) = self.get(key) else { return Ok(None) };
        let most = self.count(key, 1, 1..=MOST_BATCH)?;
        let why = if self.get("gshare/concurrency").is_some() {
            "gshare/concurrency is given too, and a batch is the one thing that an instance works on: need one of both"
        } else if matches!(wants, Wants::Pipeline { .. } | Wants::Training { .. }) {
            "need an inference function"
        } else if matches!(regime, Some(Regime::Sliced | Regime::Whole)) {
            "need gshare/regime fractional: elsewhere a device serves one request at a time"
        } else {
            return Ok(Some(most));
        };
        Err(bad(key, text, why))
    }

    /// Training is never parked, and neither is a process with several devices.
    pub(super) fn parks(&self, wants: &Wants, devices: u32) -> Result<bool, ApiError> {
        let key = "gshare/park";
        let can = devices == 1 && !matches!(wants, Wants::NoGpu { .. } | Wants::Training { .. });
        match self.get(key) {
            None => Ok(can),
            Some("false") => Ok(false),
            Some("true") if can => Ok(true),
            Some("true") => Err(bad(
                key,
                "true",
                "need an inference function or a pipeline, with one GPU for each process",
            )),
            Some(other) => Err(bad(key, other, "need true or false")),
        }
    }

    pub(super) fn probe(&self) -> Result<Probe, ApiError> {
        let path = self.get("gshare/probe_path").unwrap_or("/");
        if !path.starts_with('/') || path.contains(char::is_whitespace) {
            return Err(bad("gshare/probe_path", path, "need a path that begins with `/`, without spaces"));
        }
        let key = "gshare/probe_body";
        let body = self.get(key).map_or(Ok(Vec::new()), |path| file(key, path))?;
        Ok(Probe { path: path.to_owned(), body })
    }

    pub(super) fn wants(&self, share: Option<ResourceSpec>, rate: Option<f64>) -> Result<Wants, ApiError> {
        let timed = share.filter(|share| !share.quota().request().is_zero());
        match self.get("gshare/workload").unwrap_or("inference") {
            "inference" => {}
            "pipeline" => {
                let key = "gshare/dag";
                let path = self
                    .get(key)
                    .ok_or_else(|| ApiError::bad(format!("annotations: {key}: a pipeline needs it")))?;
                let dag = serde_json::from_slice(&file(key, path)?);
                let dag = dag.map_err(|error| bad(key, path, &error.to_string()))?;
                return Ok(Wants::Pipeline { dag: Box::new(dag) });
            }
            "training" => {
                let workers = self.count("gshare/workers", 1, 1..=64)?;
                // By default a worker is best effort: a tenth of the time is guaranteed, and idle time comes on top.
                let tenth =
                    Quota::from_percent(10).and_then(|tenth| QuotaRange::new(tenth, Quota::WHOLE).ok());
                let time = timed.map_or(tenth.unwrap_or(QuotaRange::BEST_EFFORT), |share| share.quota());
                let sm = timed.map_or(SmShare::WHOLE, |share| share.sm());
                let share = GpuShare::new(time, sm, sm, share.and_then(|share| share.memory()));
                let share = share.map_err(|error| ApiError::bad(format!("annotations: {error}")))?;
                return Ok(Wants::Training { workers, share });
            }
            other => return Err(bad("gshare/workload", other, "need inference, pipeline or training")),
        }
        let key = "gshare/profile";
        match (self.get(key), timed) {
            (None, Some(share)) | (Some("none"), Some(share)) => Ok(Wants::Share { share, rate }),
            (Some("none"), None) => Ok(Wants::NoGpu { rate }),
            (None, None) if rate.is_some() => Ok(Wants::NoGpu { rate }),
            (None | Some("auto"), _) => Ok(Wants::Measured),
            (Some(path), _) => Ok(Wants::Profile { table: profile(key, Path::new(path))?, memory: None }),
        }
    }
}

/// The field of a fault between two quantities, or of a quantity of 0.
fn field_of(error: &SpecError) -> Option<&'static str> {
    match error {
        SpecError::RequestAboveLimit { .. } => Some("quota_request"),
        SpecError::ZeroLimit => Some("quota_limit"),
        SpecError::ZeroSm | SpecError::SmLimitBelowRequest { .. } => Some("sm_partition"),
        SpecError::ZeroMemory | SpecError::GuaranteedAboveMost { .. } | SpecError::Memory(_) => {
            Some("gpu_mem")
        }
        _ => None,
    }
}
