//! The driver's service for the kubelet.

use super::cdi::Directory;
use super::claim::{ClaimError, answer, check_uid, prepare};
use super::kubelet::*;
use super::{DRIVER, Node, health};
use crate::kubernetes::controller_metrics::{DRA_PREPARED, Metrics};
use crate::kubernetes::plugin::{Plugin, ServeError, Sockets};
use crate::kubernetes::{plugin, said};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// Why a claim is not prepared, or not undone.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The claim is invalid.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// No such claim.
    #[error("no ResourceClaim {namespace}/{name}")]
    Unknown {
        /// Namespace of the claim.
        namespace: String,
        /// Name of the claim.
        name: String,
    },
    /// The API server.
    #[error("{}", said(.0))]
    Api(#[from] kube::Error),
    /// A file of the claim cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

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
    /// A driver that writes CDI specs to `cdi`.
    pub fn new(node: Arc<Node>, client: Client, cdi: Directory) -> Self {
        Self { node, client, cdi, metrics: Metrics::default() }
    }

    /// Counts its work in these metrics.
    #[must_use]
    pub fn counting(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    async fn prepare(&self, claim: &Claim) -> Result<Device, PrepareError> {
        let Claim { namespace, name, uid } = claim;
        check_uid(uid)?;
        let file = |source| PrepareError::File { path: self.cdi.file(uid), source };
        // An allocation never changes while it is in use, so the earlier answer still holds.
        if let Some(spec) = self.cdi.read(uid).map_err(file)?
            && let Some(device) = answer(uid, &spec)
        {
            // With the file of its share, which may be missing.
            self.cdi.write(uid, &spec).map_err(file)?;
            return Ok(device);
        }
        let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
        let found = claims
            .get_opt(name)
            .await?
            .ok_or_else(|| PrepareError::Unknown { namespace: namespace.clone(), name: name.clone() })?;
        let spec = prepare(&self.node, uid, &found)?;
        self.cdi.write(uid, &spec).map_err(file)?;
        // Made from the claim just now, so it is one of ours.
        answer(uid, &spec).ok_or_else(|| file(io::ErrorKind::InvalidData.into()))
    }

    /// Removes the files of ended claims after a missed unprepare: the API server no longer has these claims, or has them
    /// with another UID or without an allocation. Returns the UIDs. A claim that is in use stays in the API server until
    /// its pods are gone.
    ///
    /// # Errors
    /// If the API server or a file cannot be read. Earlier removals stay.
    pub async fn sweep(&self) -> Result<Vec<String>, PrepareError> {
        let mut swept = Vec::new();
        let all =
            self.cdi.uids().map_err(|source| PrepareError::File { path: self.cdi.file("*"), source })?;
        for uid in all.into_iter().filter(|uid| check_uid(uid).is_ok()) {
            let file = |source| PrepareError::File { path: self.cdi.file(&uid), source };
            let Some(spec) = self.cdi.read(&uid).map_err(file)? else { continue };
            let Some((namespace, name)) = spec.note("claim").and_then(|name| name.split_once('/')) else {
                continue;
            };
            let claims: Api<ResourceClaim> = Api::namespaced(self.client.clone(), namespace);
            let found = claims.get_opt(name).await?.filter(|found| found.metadata.uid.as_ref() == Some(&uid));
            if found.and_then(|found| found.status?.allocation).is_none() {
                self.unprepare(&uid)?;
                swept.push(uid);
            }
        }
        Ok(swept)
    }

    fn unprepare(&self, uid: &str) -> Result<(), PrepareError> {
        check_uid(uid)?;
        self.cdi.remove(uid).map_err(|source| PrepareError::File { path: self.cdi.file(uid), source })
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
            let entry = match self.prepare(&claim).await {
                Ok(device) => NodePrepareResourceResponse { devices: vec![device], error: String::new() },
                Err(error) => NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error: format!("claim {}/{}: {error}", claim.namespace, claim.name),
                },
            };
            let result = if entry.error.is_empty() { "prepared" } else { "refused" };
            self.metrics.add(&DRA_PREPARED, Some(("result", result)), 1.0);
            response.claims.insert(claim.uid, entry);
        }
        Ok(Response::new(response))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut response = NodeUnprepareResourcesResponse::default();
        for claim in request.into_inner().claims {
            let error = self.unprepare(&claim.uid).err().map(|error| error.to_string()).unwrap_or_default();
            response.claims.insert(claim.uid, NodeUnprepareResourceResponse { error });
        }
        Ok(Response::new(response))
    }
}

/// Serves until `end` is ready, or the kubelet refuses the driver.
///
/// # Errors
/// When a socket cannot be made or served, or the kubelet refuses.
pub async fn serve(
    driver: Driver,
    sockets: &Sockets,
    end: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (health, metrics) = (health::Watch::new(Arc::clone(&driver.node)), driver.metrics.clone());
    let router = tonic::transport::Server::builder()
        .add_service(dra_plugin_server::DraPluginServer::new(driver))
        .add_service(dra_resource_health_server::DraResourceHealthServer::new(health));
    let versions = [DRA_V1, HEALTH_V1ALPHA1].map(str::to_owned).into();
    let plugin = Plugin { kind: "DRAPlugin", name: DRIVER.into(), versions };
    plugin::serve(router, plugin, sockets, metrics, end).await
}
