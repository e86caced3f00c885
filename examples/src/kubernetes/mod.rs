//! The programs of a node of Kubernetes: shares of its GPUs as devices that Kubernetes' own scheduler gives out ([`dra`]), and the files of
//! the node in the containers of functions ([`node_hooks`]).

pub mod controller_metrics;
pub mod dra;
pub mod kubelet;
pub mod node_hooks;
pub mod plugin;

use anyhow::Context as _;
use controller_metrics::Metrics;
use gshare_openfaas::kubernetes::{DOMAIN, ended, run_of, said};
use std::net::SocketAddr;

/// An error of the API server, in words for people.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it over")]
pub(crate) fn heard(error: kube::Error) -> anyhow::Error {
    anyhow::anyhow!(said(&error))
}

/// The figures of a program, answered at this address if there is one, and a future that ends when the program is asked to end.
///
/// # Errors
/// If the address cannot be bound.
pub(crate) async fn begin(
    address: Option<SocketAddr>,
) -> anyhow::Result<(Metrics, impl Future<Output = ()> + use<>)> {
    let metrics = Metrics::default();
    if let Some(address) = address {
        metrics.serve(address).await.with_context(|| format!("--metrics {address}"))?;
    }
    Ok((metrics, ended()))
}
