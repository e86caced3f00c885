//! The settings in a Revision's annotations. Knative's webhook checks only its own classes, so the annotations are checked
//! here.

use super::api::PodAutoscaler;
use gshare_core::profile::RequestRate;
use std::collections::BTreeMap;
use std::time::Duration;

/// Most pods of one target, the limit of the engines.
pub const MAX_SCALE: u32 = 4096;

/// Defaults for missing annotations, as in Knative's `config-autoscaler`.
#[derive(Debug, Clone, clap::Args)]
pub struct Defaults {
    /// First pods of a new revision.
    #[arg(long, default_value_t = 1)]
    pub initial_scale: u32,
    /// Time without load before pods are taken away.
    #[arg(long, default_value = "60s", value_parser = humantime::parse_duration)]
    pub window: Duration,
    /// Time for which a target without traffic keeps its last pods, until no route leads to them any more.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    pub scale_to_zero_grace: Duration,
    /// Time for which they are kept in any case.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    pub scale_to_zero_retention: Duration,
    /// Keep at least one pod.
    #[arg(long)]
    pub no_scale_to_zero: bool,
    /// Time in which a new revision must have its first pods.
    #[arg(long, default_value = "600s", value_parser = humantime::parse_duration)]
    pub progress_deadline: Duration,
    /// Requests at a time for one pod, where a pod may have any number.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub target_concurrency: u32,
    /// Requests per second for one pod, if this is the metric.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub target_rps: u32,
    /// Load of a pod, in per cent of its target.
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub target_utilization: u32,
}

impl Default for Defaults {
    fn default() -> Self {
        Self {
            initial_scale: 1,
            window: Duration::from_secs(60),
            scale_to_zero_grace: Duration::from_secs(30),
            scale_to_zero_retention: Duration::ZERO,
            no_scale_to_zero: false,
            progress_deadline: Duration::from_secs(600),
            target_concurrency: 100,
            target_rps: 200,
            target_utilization: 70,
        }
    }
}

/// Unit of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// Requests at a time.
    Concurrency,
    /// Requests per second.
    Rps,
}

/// Settings of one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Fewest pods; 0 if no route leads to the target.
    pub min: u32,
    /// Most pods.
    pub max: u32,
    /// Pods of a new revision.
    pub initial: u32,
    /// Pods with which it wakes up.
    pub activation: u32,
    /// Time for which fewer pods must have been enough before there are fewer.
    pub delay: Duration,
    /// Time without load before pods are taken away.
    pub window: Duration,
    /// Whether an annotation gave that time.
    pub windowed: bool,
    /// Time for which the last pods are kept in any case.
    pub retention: Duration,
    /// Unit of the load.
    pub metric: Metric,
    /// Load of a pod, in thousandths of a request (per second).
    pub target: RequestRate,
}

/// An annotation or another field with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: `{value}`: need {bound}")]
pub struct Invalid {
    /// Name of the annotation or field.
    pub field: String,
    /// The given value.
    pub value: String,
    /// The allowed values.
    pub bound: String,
}

/// Annotations by their name below `autoscaling.knative.dev/`: the current name, or else the older name.
struct Annotations<'a>(&'a BTreeMap<String, String>);

impl Annotations<'_> {
    fn text(&self, name: &str) -> Option<(String, &str)> {
        let mut old = String::new();
        let mut parts = name.split('-');
        old.push_str(parts.next()?);
        for part in parts {
            let (first, rest) = part.split_at(1);
            old.push_str(&first.to_ascii_uppercase());
            old.push_str(rest);
        }
        [name, &old].into_iter().find_map(|name| {
            let key = format!("autoscaling.knative.dev/{name}");
            let value = self.0.get(&key)?;
            Some((key, value.as_str()))
        })
    }

    fn parse<T>(
        &self,
        name: &str,
        bound: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, Invalid> {
        let Some((field, value)) = self.text(name) else { return Ok(None) };
        let parsed = parse(value);
        parsed.map(Some).ok_or_else(|| Invalid { field, value: value.to_owned(), bound: bound.to_owned() })
    }

    fn count(&self, name: &str, least: u32) -> Result<Option<u32>, Invalid> {
        let bound = format!("{least} to {MAX_SCALE}");
        self.parse(name, &bound, |text| text.parse().ok().filter(|n| (least..=MAX_SCALE).contains(n)))
    }

    fn time(&self, name: &str, low: u64, high: u64) -> Result<Option<Duration>, Invalid> {
        let bound = format!("a time such as 90s or 1m30s, from {low}s to {high}s");
        let range = Duration::from_secs(low)..=Duration::from_secs(high);
        self.parse(name, &bound, |text| {
            let time = if text == "0" { Some(Duration::ZERO) } else { humantime::parse_duration(text).ok() };
            time.filter(|time| range.contains(time))
        })
    }

    /// In thousandths.
    fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<u64>, Invalid> {
        self.parse(name, &format!("a number from {low} to {high}"), |text| {
            let number = text.parse::<f64>().ok().filter(|number| (low..=high).contains(number))?;
            milli(number)
        })
    }
}

/// A number in thousandths, if it is one: not negative, and no more than a million.
pub fn milli(number: f64) -> Option<u64> {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 10^9")]
    (0.0..=1e6).contains(&number).then(|| (number * 1e3).round() as u64)
}

impl Settings {
    /// Settings from an object's annotations and spec.
    ///
    /// # Errors
    /// Names the first annotation out of its bounds.
    pub fn of(pa: &PodAutoscaler, defaults: &Defaults) -> Result<Self, Invalid> {
        let none = BTreeMap::new();
        let annotations = Annotations(pa.metadata.annotations.as_ref().unwrap_or(&none));
        let min = annotations.count("min-scale", 0)?.unwrap_or(0);
        let max = annotations.count("max-scale", 0)?.filter(|max| *max > 0).unwrap_or(MAX_SCALE);
        if max < min {
            let bound = format!("0 for any number, or at least min-scale ({min})");
            let field = "autoscaling.knative.dev/max-scale".to_owned();
            return Err(Invalid { field, value: max.to_string(), bound });
        }
        let initial = annotations.count("initial-scale", 0)?.unwrap_or(defaults.initial_scale).min(max);
        let activation = annotations.count("activation-scale", 1)?.unwrap_or(1).min(max);
        let window = annotations.time("window", 6, 3600)?;
        let words = "concurrency or rps";
        let metric = annotations.parse("metric", words, |text| match text {
            "concurrency" => Some(Metric::Concurrency),
            "rps" => Some(Metric::Rps),
            _ => None,
        })?;
        let metric = metric.unwrap_or(Metric::Concurrency);
        let target = annotations.number("target", 0.01, 1e6)?;
        let utilization = annotations.number("target-utilization-percentage", 1.0, 100.0)?;
        let utilization = utilization.unwrap_or(u64::from(defaults.target_utilization) * 1_000);
        let room = u64::from(pa.spec.container_concurrency) * 1_000;
        let whole = match metric {
            Metric::Rps => target.unwrap_or(u64::from(defaults.target_rps) * 1_000),
            Metric::Concurrency if room > 0 => target.map_or(room, |target| target.min(room)),
            Metric::Concurrency => target.unwrap_or(u64::from(defaults.target_concurrency) * 1_000),
        };
        Ok(Self {
            min: if pa.spec.reachability == "Unreachable" { 0 } else { min },
            max,
            initial,
            activation,
            delay: annotations.time("scale-down-delay", 0, 3600)?.unwrap_or_default(),
            window: window.unwrap_or(defaults.window),
            windowed: window.is_some(),
            retention: annotations
                .time("scale-to-zero-pod-retention-period", 0, 86_400)?
                .unwrap_or(defaults.scale_to_zero_retention),
            metric,
            // Whole is at most 2^32 thousand, utilization at most 100 thousand.
            target: RequestRate::from_milli((whole * utilization / 100_000).max(1)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::api::PodAutoscalerSpec;
    use super::*;

    fn settings(annotations: &[(&str, &str)], spec: PodAutoscalerSpec) -> Result<Settings, Invalid> {
        let mut pa = PodAutoscaler::new("f", spec);
        let key = |name: &str| format!("autoscaling.knative.dev/{name}");
        pa.metadata.annotations =
            Some(annotations.iter().map(|(name, value)| (key(name), (*value).to_owned())).collect());
        Settings::of(&pa, &Defaults::default())
    }

    #[test]
    fn annotations_say_what_holds() {
        let none = settings(&[], PodAutoscalerSpec::default()).unwrap();
        assert_eq!((none.min, none.max, none.initial, none.activation), (0, MAX_SCALE, 1, 1));
        assert_eq!(none.target, RequestRate::per_second(70), "70 % of 100 at a time");
        let all = [
            ("min-scale", "2"),
            ("maxScale", "9"),
            ("initial-scale", "20"),
            ("activation-scale", "3"),
            ("scale-down-delay", "1m30s"),
            ("window", "40s"),
            ("metric", "rps"),
            ("target", "12.5"),
            ("targetUtilizationPercentage", "80"),
            ("scale-to-zero-pod-retention-period", "0"),
        ];
        let all = settings(&all, PodAutoscalerSpec::default()).unwrap();
        assert_eq!((all.min, all.max, all.initial, all.activation), (2, 9, 9, 3), "an old name, and a bound");
        assert_eq!((all.delay, all.window), (Duration::from_secs(90), Duration::from_secs(40)));
        assert_eq!(all.target, RequestRate::per_second(10));
    }

    #[test]
    fn a_pod_gets_no_more_than_it_takes_at_once() {
        let spec = PodAutoscalerSpec { container_concurrency: 4, ..PodAutoscalerSpec::default() };
        let four = settings(&[("target", "50"), ("target-utilization-percentage", "100")], spec.clone());
        assert_eq!(four.unwrap().target, RequestRate::per_second(4));
        assert_eq!(settings(&[], spec).unwrap().target, RequestRate::from_milli(2_800));
    }

    #[test]
    fn the_least_is_ignored_where_no_route_leads() {
        let spec = PodAutoscalerSpec { reachability: "Unreachable".into(), ..PodAutoscalerSpec::default() };
        assert_eq!(settings(&[("min-scale", "2")], spec).unwrap().min, 0);
    }

    #[test]
    fn what_is_not_sensible_is_named() {
        let bad = [
            ("min-scale", "-1", "0 to 4096"),
            ("min-scale", "4097", "0 to 4096"),
            ("activation-scale", "0", "1 to 4096"),
            ("window", "1s", "from 6s to 3600s"),
            ("scale-down-delay", "soon", "a time such as"),
            ("target", "NaN", "a number from 0.01"),
            ("target", "0", "a number from 0.01"),
            ("metric", "cpu", "concurrency or rps"),
        ];
        for (name, value, bound) in bad {
            let error = settings(&[(name, value)], PodAutoscalerSpec::default()).unwrap_err();
            assert!(error.field.ends_with(name) && error.value == value, "{error}");
            assert!(error.to_string().contains(bound), "{error}");
        }
        let error =
            settings(&[("min-scale", "3"), ("max-scale", "2")], PodAutoscalerSpec::default()).unwrap_err();
        assert!(error.to_string().contains("at least min-scale (3)"), "{error}");
    }
}
