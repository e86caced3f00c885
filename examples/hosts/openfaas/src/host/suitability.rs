//! Reasons why the devices of this node cannot serve a deployment, with the annotation to change.

use super::{Host, Version};
use crate::deployment::{Plan, Wants};
use crate::trials::Measured;
use gshare_core::profile::{ProfilePoint, ProfileTable};
use gshare_core::{Bytes, Duration, FunctionId, GpuId};
use gshare_sched::platform::{DeviceSpec, Regime};
use gshare_sched::scale::max_p95;
use std::collections::BTreeMap;

impl Host {
    /// Notes a device, of which each deployment asks later.
    pub(super) fn know(&mut self, gpu: GpuId, spec: DeviceSpec) {
        let count = |all: &mut BTreeMap<Regime, (usize, Bytes)>, spec: &DeviceSpec| {
            let (count, most) = all.entry(spec.effective_regime()).or_insert((0, Bytes::ZERO));
            (*count, *most) = (*count + 1, largest(spec).max(*most));
        };
        count(&mut self.kinds, &spec);
        if self.devices.insert(gpu, spec).is_some() {
            // It may have been of another kind.
            self.kinds.clear();
            self.devices.values().for_each(|spec| count(&mut self.kinds, spec));
        }
    }

    /// The reason why no device of this node can ever serve a plan; none if one can.
    pub fn unsuitable(&self, plan: &Plan) -> Option<String> {
        let spec = plan.spec(plan.bounds, self.guess).ok()?;
        let regime = self.platform.regime_for(&spec);
        let (count, most) = self.kinds.get(&regime).copied().unwrap_or((0, Bytes::ZERO));
        if count == 0 {
            let (what, need) = match (&plan.wants, regime) {
                (Wants::Training { .. }, _) => ("gshare/workload: `training`", "GPUs whose time is shared"),
                (Wants::Pipeline { .. }, _) => {
                    ("gshare/workload: `pipeline`", "GPUs that are cut into MIG devices")
                }
                (_, Regime::Fractional) => ("gshare/regime: `fractional`", "GPUs whose time is shared"),
                (_, Regime::Sliced) => ("gshare/regime: `sliced`", "GPUs that are cut into MIG devices"),
                (_, Regime::Whole) => {
                    ("gshare/regime: `whole`", "GPUs that serve one request at a time (`host.whole`)")
                }
            };
            return Some(format!("annotations: {what}: need {need}, and this node has none"));
        }
        if let Wants::Training { workers, .. } = plan.wants
            && workers as usize > count
        {
            return Some(format!(
                "annotations: gshare/workers: `{workers}`: each has a GPU of its own, and {count} of this node are shared: need at most {count}"
            ));
        }
        if plan.devices as usize > count {
            let asked = plan.devices;
            return Some(format!(
                "annotations: gshare/devices: `{asked}`: need at most {count}, the GPUs of this node"
            ));
        }
        match (&plan.wants, regime) {
            (Wants::Share { .. }, Regime::Sliced) => {
                return Some(
                    "annotations: fastgshare/gpu_quota_request: the GPUs of this node are cut into MIG devices, whose time is not shared out: \
                     leave the share out, and the function is measured on a MIG device"
                        .to_owned(),
                );
            }
            (_, Regime::Whole) if plan.bounds.0 > 1 => {
                return Some(format!(
                    "labels: com.openfaas.scale.min: `{}`: need at most 1 on GPUs that serve one request at a time",
                    plan.bounds.0
                ));
            }
            _ => {}
        }
        let asked =
            plan.memory.or(plan.expected).filter(|_| !matches!(plan.wants, Wants::Pipeline { .. }))?;
        let asked = Bytes(asked.get().div_ceil(plan.devices.into()));
        if let (Some(model), Some(weights)) = (&plan.model, plan.weights()) {
            let (path, bytes) = (model.path.display(), weights.bytes);
            return (asked.saturating_add(bytes) > most).then(|| {
                format!(
                    "annotations: gshare/model: `{path}`: its weights take {bytes} of GPU memory, and an instance {asked} beside them: need at \
                     most {most} together, which the largest device of this node has: name a smaller model, or less in fastgshare/gpu_mem"
                )
            });
        }
        let key = if plan.model.is_some() { "gshare/model" } else { "fastgshare/gpu_mem" };
        (asked > most).then(|| {
            format!("annotations: {key}: {asked} of GPU memory: need at most {most}, which the largest device here has")
        })
    }

    /// Whether a plan's instances share their model's weights on each device.
    pub fn shares_weights(&self, plan: &Plan) -> bool {
        let spec = plan.weights().and_then(|_| plan.spec(plan.bounds, self.guess).ok());
        spec.is_some_and(|spec| self.platform.regime_for(&spec) == Regime::Fractional)
    }

    /// Whether a version may use the measurement of an earlier deployment.
    ///
    /// A measurement on another kind of device is not used. A measurement that is too slow for the SLO still counts, and the
    /// deployment is refused, unless other processes may have disturbed it or an earlier host accepted the function.
    pub fn can_use(&self, version: &Version, restored: bool) -> bool {
        let Wants::Profile { table, .. } = &version.plan.wants else { return false };
        let Some(found) = &version.plan.measured else { return false };
        // Without an SLO nothing was timed.
        let timed = found.uses_gpu() || found.least > Duration::from_nanos(1);
        if version.plan.slo.is_some() && !timed {
            return false;
        }
        let same = version.plan.spec(version.plan.bounds, self.guess);
        let same = same.is_ok_and(|spec| self.platform.regime_for(&spec) == found.regime);
        let doubtful = restored || found.is_doubtful();
        same && (!doubtful || self.unmet(version, table, Some(found)).is_none())
    }

    /// The reason why a measurement refuses the function: a batch that fails, or every point too slow for its SLO. None if it is fine.
    pub(super) fn unmet(
        &self,
        version: &Version,
        table: &ProfileTable,
        found: Option<&Measured>,
    ) -> Option<String> {
        let (plan, name) = (&version.plan, &version.deployment.service);
        let failed = found.and_then(|found| found.failed_batch.as_ref());
        if let Some((failed, asked)) = failed.zip(plan.batch) {
            let answered = table.points().iter().map(|point| point.batch).filter(|size| *size < failed.batch);
            return Some(format!(
                "annotations: gshare/batch: `{asked}`: a batch of {} fails ({}): need at most {}, which {name} has answered, or \
                 more gpu_mem",
                failed.batch,
                failed.why,
                answered.max().unwrap_or(1)
            ));
        }
        let slo = plan.slo?;
        let regime = self.platform.regime_for(&plan.spec(plan.bounds, self.guess).ok()?);
        let shared = regime == Regime::Fractional;
        let time = |point: &&ProfilePoint| if shared { point.p95 } else { point.p50 };
        let sizes = self.sizes();
        let here = |point: &&ProfilePoint| {
            regime != Regime::Sliced || sizes.last().is_some_and(|largest| point.sm <= *largest)
        };
        let best = table.points().iter().filter(here).min_by_key(time)?;
        if time(&best) <= if shared { max_p95(slo) } else { slo } {
            return None;
        }
        let takes = time(&best);
        let at = match found.is_none_or(Measured::uses_gpu) {
            true => best.setting().to_string(),
            false => "without a GPU".to_owned(),
        };
        let mut why = match shared {
            true => format!(
                "annotations: gshare/slo: `{slo}`: half of it is for waiting, and 95 of 100 answers of {name} take up to {takes} at best \
                 ({at}): need {} or more",
                takes.saturating_mul(2)
            ),
            false => format!(
                "annotations: gshare/slo: `{slo}`: an answer of {name} takes {takes} at best ({at}): need more"
            ),
        };
        if let Some(found) = found {
            let others = match found.uses_gpu() {
                true => format!(", while other processes had {} of the device's time", found.others),
                false => String::new(),
            };
            why += &format!(
                "; the least latency that was measured is {}{others}; `gshare lab profile --again {name}` measures it again",
                found.least
            );
        }
        Some(why)
    }

    /// Replaces the function numbers in an engine's message by the functions' names.
    pub(super) fn in_words(&self, text: &str) -> String {
        let (mut words, mut rest) = (String::new(), text);
        while let Some(at) = rest.find("fn") {
            let (before, after) = rest.split_at(at);
            let digits = after[2..].bytes().take_while(u8::is_ascii_digit).count();
            let begins = !before.ends_with(|last: char| last.is_alphanumeric());
            words += before;
            let number = after[2..2 + digits].parse().ok().filter(|_| begins);
            match number.and_then(|number| self.versions.get(&FunctionId::new(number))) {
                Some(known) => words += &known.version.deployment.service,
                None => words += &after[..2 + digits],
            }
            rest = &after[2 + digits..];
        }
        words + rest
    }
}

/// Memory of a device, or of its largest MIG slice.
fn largest(device: &DeviceSpec) -> Bytes {
    let Some(layout) = &device.mig else { return device.memory };
    let slices = layout.slices().iter().filter_map(|at| layout.model().get(at.profile));
    slices.map(|profile| profile.memory).max().unwrap_or(Bytes::ZERO)
}
