//! Figures of the Kubernetes programs in the text form of `OpenMetrics`, and what probes ask.
//!
//! `GET /metrics` has each figure that was set or counted so far; `GET /healthz` answers while the program runs, `GET /readyz` once
//! it does its work: the kubelet has registered it, or it waits for none.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A figure's series by their labels. Without a series the figure is left out.
type Figure<M> = Family<Vec<(&'static str, &'static str)>, M>;

/// The figures of one program. Clones count for the same program.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    /// Most containers of functions on the node at a time.
    pub hooks_offered: Figure<Gauge>,
    /// Containers with hook and socket so far.
    pub hooks_given: Figure<Counter>,
    /// Offered GPUs of the node.
    pub gpus: Figure<Gauge>,
    /// Claims of the kubelet, by `result`.
    pub prepared: Figure<Counter>,
    /// Claims with a missed unprepare.
    pub swept: Figure<Counter>,
    /// Writes of the node's slice.
    pub slice_writes: Figure<Counter>,
    is_ready: Arc<AtomicBool>,
}

impl Metrics {
    /// The program does its work from now on.
    pub fn ready(&self) {
        self.is_ready.store(true, Ordering::Relaxed);
    }

    /// All of it as Prometheus reads it.
    pub fn text(&self) -> String {
        let Self { hooks_offered, hooks_given, gpus, prepared, swept, slice_writes, .. } = self.clone();
        let (mut all, mut text) = (Registry::with_prefix("gshare"), String::new());
        all.register("hook_offered", "Most containers; 0 if files of the daemon are missing", hooks_offered);
        all.register("hook_containers", "Containers that were given hook and socket", hooks_given);
        all.register("dra_gpus", "GPUs of the node that the driver offers", gpus);
        all.register("dra_claims_prepared", "Claims that the kubelet asked to prepare", prepared);
        all.register("dra_claims_swept", "Claims with a missed unprepare", swept);
        all.register("dra_slice_writes", "Writes of the slice of the node", slice_writes);
        // Writing to a string does not fail.
        let _ = encode(&mut text, &all);
        text
    }

    /// Answers at an address as long as the program runs. Returns the address, with the chosen port if it was 0.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn serve(&self, address: SocketAddr) -> io::Result<SocketAddr> {
        let (text, ready) = (self.clone(), self.clone());
        let readiness = move || {
            let is_ready = ready.is_ready.load(Ordering::Relaxed);
            std::future::ready(if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
        };
        let content = [("content-type", "application/openmetrics-text; version=1.0.0; charset=utf-8")];
        let router = Router::new()
            .route("/metrics", get(move || std::future::ready((content, text.text()))))
            .route("/healthz", get(|| std::future::ready(StatusCode::OK)))
            .route("/readyz", get(readiness));
        let listener = tokio::net::TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        tokio::spawn(axum::serve(listener, router).into_future());
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
        metrics.prepared.get_or_create(&vec![("result", "prepared")]).inc_by(2);
        metrics.hooks_offered.get_or_create(&Vec::new()).set(3);
        let answer = ask("/metrics").await;
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let expected = "# HELP gshare_hook_offered Most containers; 0 if files of the daemon are missing.\n\
             # TYPE gshare_hook_offered gauge\ngshare_hook_offered{} 3\n\
             # HELP gshare_dra_claims_prepared Claims that the kubelet asked to prepare.\n\
             # TYPE gshare_dra_claims_prepared counter\ngshare_dra_claims_prepared_total{result=\"prepared\"} 2\n# EOF\n";
        assert_eq!(body, expected);
    }
}
