//! The daemons of the cluster's nodes, asked over HTTP about a trial's pod.

use anyhow::{Context as _, anyhow, ensure};
use axum::body::Body;
use axum::http::{Request, header};
use gshared::Snapshot;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

/// Namespace and label of the daemons' pods, and the port of their metrics, as the manifests set them.
const NAMESPACE: &str = "gshare-system";
const LABEL: &str = "app=gshared";
const PORT: u16 = 9478;
/// Longest answer.
const MOST: usize = 16 << 20;
/// Longest wait for an answer: a trial waits for it.
const ANSWER: Duration = Duration::from_secs(5);

/// The daemons by their nodes.
#[derive(Debug)]
pub struct Daemons {
    pods: Api<Pod>,
    known: Mutex<BTreeMap<String, SocketAddr>>,
}

impl Daemons {
    /// The daemons of the cluster.
    pub fn new(client: Client) -> Self {
        Self { pods: Api::namespaced(client, NAMESPACE), known: Mutex::default() }
    }

    /// The snapshot of the daemon of a node.
    ///
    /// # Errors
    /// If the node has no daemon, or it does not answer.
    pub async fn snapshot(&self, node: &str) -> anyhow::Result<Snapshot> {
        let asked = tokio::time::timeout(ANSWER, self.answer(node)).await;
        let asked = asked.unwrap_or_else(|_| Err(anyhow!("no answer within {} s", ANSWER.as_secs())));
        if asked.is_err() {
            // Its pod may have been replaced.
            self.known.lock().remove(node);
        }
        asked
    }

    async fn answer(&self, node: &str) -> anyhow::Result<Snapshot> {
        let known = self.known.lock().get(node).copied();
        let address = if let Some(address) = known { address } else { self.find(node).await? };
        self.known.lock().insert(node.to_owned(), address);
        ask(address).await.with_context(|| address.to_string())
    }

    async fn find(&self, node: &str) -> anyhow::Result<SocketAddr> {
        let there = ListParams::default().labels(LABEL).fields(&format!("spec.nodeName={node}"));
        let pods = self.pods.list(&there).await?;
        let address = pods.items.iter().find_map(|pod| pod.status.as_ref()?.pod_ip.as_deref()?.parse().ok());
        let address: std::net::IpAddr =
            address.with_context(|| format!("need a pod with label {LABEL} in namespace {NAMESPACE}"))?;
        Ok((address, PORT).into())
    }
}

async fn ask(address: SocketAddr) -> anyhow::Result<Snapshot> {
    let request = Request::get("/status").header(header::HOST, address.to_string()).body(Body::empty())?;
    let answer = crate::proxy::exchange(address, request).await?;
    let status = answer.status();
    let body = axum::body::to_bytes(Body::new(answer.into_body()), MOST).await?;
    ensure!(status.is_success(), "{status}: {}", String::from_utf8_lossy(&body));
    Ok(serde_json::from_slice(&body)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_silent_daemon_is_given_up_and_looked_for_again() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let server = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let daemons = Daemons::new(Client::try_from(server).unwrap());
        daemons.known.lock().insert("n1".into(), silent.local_addr().unwrap());
        let error = daemons.snapshot("n1").await.unwrap_err().to_string();
        assert_eq!((error.as_str(), daemons.known.lock().len()), ("no answer within 5 s", 0));
    }
}
