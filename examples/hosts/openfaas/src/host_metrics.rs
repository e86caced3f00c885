//! Metrics for Prometheus, under the names that OpenFaaS dashboards expect.

use super::node::Node;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Http {
    code: u16,
    method: String,
    path: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Invocation {
    function_name: String,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Function {
    function_name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Device {
    gpu: u32,
}

/// Upper bounds in seconds.
const BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// Counters of the HTTP interface, and gauges that are computed on each request for them.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<Http, Counter>,
    durations: Family<Http, Histogram>,
    invocations: Family<Invocation, Counter>,
    seconds: Family<Invocation, Histogram>,
    replicas: Family<Function, Gauge>,
    waiting: Family<Function, Gauge>,
    gpu_seconds: Family<Function, Gauge<f64, AtomicU64>>,
    answered: Family<Function, Gauge>,
    within_slo: Family<Function, Gauge>,
    starts: Family<Function, Gauge>,
    parked: Family<Function, Gauge>,
    migrated: Family<Function, Gauge>,
    lost: Family<Device, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(BUCKETS);
        let mut metrics = Self {
            registry: Registry::default(),
            requests: Family::default(),
            durations: Family::new_with_constructor(histogram),
            invocations: Family::default(),
            seconds: Family::new_with_constructor(histogram),
            replicas: Family::default(),
            waiting: Family::default(),
            gpu_seconds: Family::default(),
            answered: Family::default(),
            within_slo: Family::default(),
            starts: Family::default(),
            parked: Family::default(),
            migrated: Family::default(),
            lost: Family::default(),
        };
        let Self { registry, requests, durations, invocations, seconds, replicas, waiting, .. } =
            &mut metrics;
        registry.register("provider_http_requests", "Requests to the provider", requests.clone());
        registry.register(
            "provider_http_request_duration_seconds",
            "Time until the head of the answer",
            durations.clone(),
        );
        registry.register("gateway_function_invocation", "Calls of functions", invocations.clone());
        registry.register(
            "gateway_functions_seconds",
            "Time of a call until the head of its answer",
            seconds.clone(),
        );
        registry.register("gateway_service_count", "Replicas that are ready", replicas.clone());
        registry.register("gshare_requests_waiting", "Requests that wait for a replica", waiting.clone());
        let text = "Device time of the function's instances since the host began";
        metrics.registry.register("gshare_function_gpu_seconds", text, metrics.gpu_seconds.clone());
        for (name, text, family) in [
            ("gshare_requests_answered", "Requests answered since the host began", &metrics.answered),
            (
                "gshare_requests_within_slo",
                "Those answered within the SLO, waiting included",
                &metrics.within_slo,
            ),
            ("gshare_instance_starts", "Instances started since the host began", &metrics.starts),
            ("gshare_instances_parked", "Times an instance made room for another function", &metrics.parked),
            (
                "gshare_instances_migrated",
                "Times an instance took the place of another one on better slices",
                &metrics.migrated,
            ),
        ] {
            metrics.registry.register(name, text, family.clone());
        }
        let text = "1 while the driver has lost the device";
        metrics.registry.register("gshare_device_lost", text, metrics.lost.clone());
        metrics
    }
}

impl Metrics {
    /// Counts an answered request; `path` is the route.
    pub fn served(&self, method: &str, path: &'static str, code: u16, took: Duration) {
        // Unknown methods share a label, since a client could otherwise create any number of them.
        let known = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"];
        let method = if known.contains(&method) { method } else { "other" };
        let labels = Http { code, method: method.to_owned(), path };
        self.requests.get_or_create(&labels).inc();
        self.durations.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a call of a function.
    pub fn called(&self, name: &str, code: u16, took: Duration) {
        let labels = Invocation { function_name: name.to_owned(), code };
        self.invocations.get_or_create(&labels).inc();
        self.seconds.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// All metrics in the text form of `OpenMetrics`.
    pub fn encode(&self, node: &Node) -> String {
        self.gpu_seconds.clear();
        for family in [
            &self.replicas,
            &self.waiting,
            &self.answered,
            &self.within_slo,
            &self.starts,
            &self.parked,
            &self.migrated,
        ] {
            family.clear();
        }
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.lost.clear();
        let host = node.host();
        for gpu in node.runner.devices.all.keys() {
            let lost = host.why_lost(*gpu).is_some();
            self.lost.get_or_create(&Device { gpu: gpu.number() }).set(lost.into());
        }
        let views = host.views();
        drop(host);
        for view in views {
            let labels = Function { function_name: view.version.deployment.service.clone() };
            let totals = view.totals;
            self.gpu_seconds.get_or_create(&labels).set(totals.gpu_ns as f64 / 1e9);
            for (family, value) in [
                (&self.replicas, view.available()),
                (&self.waiting, view.waiting),
                (&self.answered, totals.stats.answered),
                (&self.within_slo, totals.stats.within_slo),
                (&self.starts, totals.stats.starts),
                (&self.parked, totals.parked),
                (&self.migrated, totals.migrated),
            ] {
                family.get_or_create(&labels).set(gauge(value));
            }
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
