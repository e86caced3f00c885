//! Figures of the Kubernetes programs in Prometheus' text form, and what probes ask.
//!
//! `GET /metrics` has each figure that was set or counted so far; `GET /healthz` answers while the program runs, `GET /readyz` once
//! it does its work: the kubelet has registered it, or it waits for none. Every figure is listed in [`ALL`].

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A figure of a program.
#[derive(Debug, PartialEq, Eq)]
pub struct Metric {
    /// Name in the exposition; counters end in `_total`.
    pub name: &'static str,
    /// Meaning and unit of the figure.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($constant:ident: $name:literal, $help:literal;)*) => {
        $(#[doc = $help] pub const $constant: Metric = Metric { name: $name, help: $help };)*
        /// Every figure of every program.
        pub const ALL: &[Metric] = &[$($constant),*];
    };
}

metrics! {
    HOOK_OFFERED: "gshare_hook_offered", "Containers that may run on the node at a time; 0 while files of the daemon are missing";
    HOOK_CONTAINERS: "gshare_hook_containers_total", "Containers that were given hook and socket";
    DRA_GPUS: "gshare_dra_gpus", "GPUs of the node that the driver offers";
    DRA_PREPARED: "gshare_dra_claims_prepared_total", "Claims that the kubelet asked to prepare, by result: prepared, refused";
    DRA_SWEPT: "gshare_dra_claims_swept_total", "Claims whose unprepare was missed, and whose files were removed";
    DRA_SLICE_WRITES: "gshare_dra_slice_writes_total", "Writes of the slice of the node";
}

type Series = BTreeMap<String, f64>;

#[derive(Debug, Default)]
struct Inner {
    values: Mutex<BTreeMap<&'static str, (&'static str, Series)>>,
    is_ready: AtomicBool,
}

/// The figures of one program. Clones count for the same program.
#[derive(Debug, Clone, Default)]
pub struct Metrics(Arc<Inner>);

impl Metrics {
    fn change(&self, metric: &Metric, label: Option<(&str, &str)>, change: impl FnOnce(&mut f64)) {
        let label = label.map_or(String::new(), |(name, value)| {
            let value = value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', "\\n");
            format!("{{{name}=\"{value}\"}}")
        });
        let mut values = self.0.values.lock();
        let (_, series) = values.entry(metric.name).or_insert((metric.help, Series::new()));
        change(series.entry(label).or_default());
    }

    /// Counts up; `label`: name and value.
    pub fn add(&self, metric: &Metric, label: Option<(&str, &str)>, by: f64) {
        self.change(metric, label, |value| *value += by);
    }

    /// Sets a gauge.
    pub fn set(&self, metric: &Metric, label: Option<(&str, &str)>, to: usize) {
        #[expect(clippy::cast_precision_loss, reason = "counts of objects")]
        self.change(metric, label, |value| *value = to as f64);
    }

    /// The program does its work from now on.
    pub fn ready(&self) {
        self.0.is_ready.store(true, Ordering::Relaxed);
    }

    /// All of it as Prometheus reads it.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, (help, series)) in self.0.values.lock().iter() {
            let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (label, value) in series {
                let _ = writeln!(text, "{name}{label} {value}");
            }
        }
        text
    }

    fn router(&self) -> Router {
        let (text, ready) = (self.clone(), self.clone());
        let readiness = move || {
            let is_ready = ready.0.is_ready.load(Ordering::Relaxed);
            std::future::ready(if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
        };
        let content = [("content-type", "text/plain; version=0.0.4")];
        Router::new()
            .route("/metrics", get(move || std::future::ready((content, text.text()))))
            .route("/healthz", get(|| std::future::ready(StatusCode::OK)))
            .route("/readyz", get(readiness))
    }

    /// Answers at an address as long as the program runs. Returns the address, with the chosen port if it was 0.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn serve(&self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = tokio::net::TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, self.router()).into_future());
        Ok(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    #[tokio::test]
    async fn figures_and_probes_are_answered_over_http() {
        let metrics = Metrics::default();
        let address = metrics.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let ask = async |path: &str| {
            let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        };
        assert!(ask("/healthz").await.starts_with("HTTP/1.1 200"));
        assert!(ask("/readyz").await.starts_with("HTTP/1.1 503"));
        metrics.ready();
        assert!(ask("/readyz").await.starts_with("HTTP/1.1 200"));
        metrics.add(&DRA_PREPARED, Some(("result", "prepared")), 2.0);
        metrics.add(&DRA_PREPARED, Some(("result", "prepared")), 0.5);
        metrics.set(&HOOK_OFFERED, Some(("reason", "a\"b")), 3);
        let answer = ask("/metrics").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let expected = "# HELP gshare_dra_claims_prepared_total Claims that the kubelet asked to prepare, by result: prepared, refused\n\
             # TYPE gshare_dra_claims_prepared_total counter\ngshare_dra_claims_prepared_total{result=\"prepared\"} 2.5\n\
             # HELP gshare_hook_offered Containers that may run on the node at a time; 0 while files of the daemon are missing\n\
             # TYPE gshare_hook_offered gauge\ngshare_hook_offered{reason=\"a\\\"b\"} 3\n";
        assert_eq!(body, expected);
    }
}
