//! The driver's service for the kubelet.

use super::cdi::Directory;
use super::claim::{answer, check_uid, prepare};
use super::{DRIVER, Node, health};
use crate::kubernetes::controller_metrics::Metrics;
use crate::kubernetes::kubelet::*;
use crate::kubernetes::plugin::Sockets;
use crate::kubernetes::{heard, plugin};
use anyhow::Context as _;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Prepares the claims of one node. It has no state: a claim is prepared if it has a CDI spec.
#[derive(Clone)]
pub struct Driver {
    node: Arc<Node>,
    client: Client,
    cdi: Directory,
    metrics: Metrics,
}

gshare_core::debug_fields!(Driver { node, cdi });

impl Driver {
    /// A driver that writes CDI specs to `cdi`. The metrics count its work.
    pub fn new(node: Arc<Node>, client: Client, cdi: Directory, metrics: Metrics) -> Self {
        Self { node, client, cdi, metrics }
    }

    async fn prepare(&self, claim: &Claim) -> anyhow::Result<Device> {
        let Claim { namespace, name, uid } = claim;
        check_uid(uid)?;
        let file = || self.cdi.file(uid).display().to_string();
        // An allocation never changes while it is in use, so the earlier answer still holds.
        if let Some(spec) = self.cdi.read(uid).with_context(file)?
            && let Some(device) = answer(uid, &spec)
        {
            // With the file of its share, which may be missing.
            self.cdi.write(uid, &spec).with_context(file)?;
            return Ok(device);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = claims.get_opt(name).await.map_err(heard)?;
        let found = found.with_context(|| format!("no ResourceClaim {namespace}/{name}"))?;
        let spec = prepare(&self.node, uid, &found)?;
        self.cdi.write(uid, &spec).with_context(file)?;
        // Made from the claim just now, so it is one of ours.
        answer(uid, &spec).with_context(|| format!("{}: names no device of the claim", file()))
    }

    /// Removes the files of ended claims after a missed unprepare: the API server no longer has these claims, or has them
    /// with another UID or without an allocation. Returns the UIDs. A claim that is in use stays in the API server until
    /// its pods are gone.
    ///
    /// # Errors
    /// If the API server or a file cannot be read. Earlier removals stay.
    pub async fn sweep(&self) -> anyhow::Result<Vec<String>> {
        let mut swept = Vec::new();
        let file = |uid: &str| self.cdi.file(uid).display().to_string();
        let all = self.cdi.uids().with_context(|| file("*"))?;
        for uid in all.into_iter().filter(|uid| check_uid(uid).is_ok()) {
            let Some(spec) = self.cdi.read(&uid).with_context(|| file(&uid))? else { continue };
            let Some((namespace, name)) = spec.note("claim").and_then(|name| name.split_once('/')) else {
                continue;
            };
            let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
            let found = claims.get_opt(name).await.map_err(heard)?;
            let found = found.filter(|found| found.metadata.uid.as_ref() == Some(&uid));
            if found.and_then(|found| found.status?.allocation).is_none() {
                self.unprepare(&uid)?;
                swept.push(uid);
            }
        }
        Ok(swept)
    }

    fn unprepare(&self, uid: &str) -> anyhow::Result<()> {
        check_uid(uid)?;
        self.cdi.remove(uid).with_context(|| self.cdi.file(uid).display().to_string())
    }
}

#[tonic::async_trait]
impl dra_plugin_server::DraPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut response = NodePrepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let why = |error| format!("claim {}/{}: {error:#}", claim.namespace, claim.name);
            let (devices, result, error) = match self.prepare(&claim).await {
                Ok(device) => (vec![device], "prepared", String::new()),
                Err(error) => (Vec::new(), "refused", why(error)),
            };
            self.metrics.prepared.get_or_create(&vec![("result", result)]).inc();
            response.claims.insert(claim.uid, NodePrepareResourceResponse { devices, error });
        }
        Ok(Response::new(response))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut response = NodeUnprepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let error =
                self.unprepare(&claim.uid).err().map(|error| format!("{error:#}")).unwrap_or_default();
            response.claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(response))
    }
}

/// Serves until `end` is ready, or the kubelet refuses the driver.
///
/// # Errors
/// When a socket cannot be made or served, or the kubelet refuses.
pub async fn serve(driver: Driver, sockets: &Sockets, end: impl Future<Output = ()>) -> anyhow::Result<()> {
    let (health, metrics) = (health::Watch(Arc::clone(&driver.node)), driver.metrics.clone());
    let router = tonic::transport::Server::builder()
        .add_service(dra_plugin_server::DraPluginServer::new(driver))
        .add_service(dra_resource_health_server::DraResourceHealthServer::new(health));
    let info = ("DRAPlugin", DRIVER, &[DRA_V1, HEALTH_V1ALPHA1][..]);
    plugin::serve(router, info, sockets, metrics, end).await
}
