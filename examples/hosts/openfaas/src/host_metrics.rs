//! Metrics for Prometheus, under the names that OpenFaaS dashboards expect.

use super::host::View;
use super::node::Node;
use gshared::metrics::{About, family, integer};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode, encode_registry};
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
        };
        let Self { registry, requests, durations, invocations, seconds } = &mut metrics;
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
        let mut scrape = Registry::default();
        let host = node.host();
        let lost = host.devices().map(|(gpu, ..)| ([("gpu", gpu.number())], host.why_lost(gpu).is_some()));
        let about = ("gshare_device_lost", "1 while the driver has lost the device", None);
        family(&mut scrape, about, lost, |gauge: &Gauge, lost| _ = gauge.set(lost.into()));
        let views = host.views();
        drop(host);
        let views =
            || views.iter().map(|view| ([("function_name", view.version.deployment.service.clone())], view));
        let text = "Device time of the function's instances since the host began";
        family(
            &mut scrape,
            ("gshare_function_gpu_seconds", text, None),
            views(),
            |gauge: &Gauge<f64, AtomicU64>, view| _ = gauge.set(view.gpu_seconds),
        );
        let counts: [About<View, u64>; 7] = [
            ("gateway_service_count", "Replicas that are ready", View::available),
            ("gshare_requests_waiting", "Requests that wait for a replica", |view| view.waiting),
            ("gshare_requests_answered", "Requests answered since the host began", |view| view.answered),
            ("gshare_requests_within_slo", "Those answered within the SLO, waiting included", |view| {
                view.within_slo
            }),
            ("gshare_instance_starts", "Instances started since the host began", |view| view.starts),
            ("gshare_instances_parked", "Times an instance made room for another function", |view| {
                view.parked
            }),
            (
                "gshare_instances_migrated",
                "Times an instance took the place of another one on better slices",
                |view| view.migrated,
            ),
        ];
        for (name, help, count) in counts {
            family(&mut scrape, (name, help, None), views(), |gauge: &Gauge, view| {
                gauge.set(integer(count(view)));
            });
        }
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode_registry(&mut text, &self.registry);
        let _ = encode(&mut text, &scrape);
        text
    }
}
