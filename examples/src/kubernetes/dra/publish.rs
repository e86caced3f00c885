//! Tells the API server which GPUs this node has.

use super::{DRIVER, Node, slice};
use crate::kubernetes::said;
use k8s_openapi::api::core::v1;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};

/// Why the slice is not as it should be. It is tried again.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// There is no such node.
    #[error("node `{name}`: not known to the API server: see --node")]
    NoNode {
        /// As given.
        name: String,
    },
    /// Devices would be given to one claim each.
    #[error(
        "the API server dropped allowMultipleAllocations: it needs Kubernetes 1.34 with the feature gate DRAConsumableCapacity"
    )]
    NotShareable,
    /// Another client wrote in between.
    #[error("the slice changed while it was written")]
    Conflict,
    /// Another answer of the API server, or none.
    #[error("{}", said(.0))]
    Api(#[from] kube::Error),
}

fn code(error: &kube::Error) -> u16 {
    match error {
        kube::Error::Api(status) => status.code,
        _ => 0,
    }
}

/// Brings the slice of `node` up to date. Returns the number of writes.
///
/// # Errors
/// If a write fails; earlier writes stay.
pub async fn publish(client: &Client, node: &Node) -> Result<usize, PublishError> {
    let nodes: Api<v1::Node> = Api::all(client.clone());
    let known = nodes.get_opt(&node.name).await?;
    let uid = known.and_then(|node| node.metadata.uid);
    let uid = uid.ok_or_else(|| PublishError::NoNode { name: node.name.clone() })?;
    let owner = OwnerReference {
        api_version: "v1".into(),
        kind: "Node".into(),
        name: node.name.clone(),
        uid,
        ..OwnerReference::default()
    };
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mine = format!("spec.driver={DRIVER},spec.nodeName={}", node.name);
    let found = slices.list(&ListParams::default().fields(&mine)).await?;
    let plan = slice::plan(node, &owner, &found.items);
    let mut writes = 0;
    for name in &plan.delete {
        match slices.delete(name, &DeleteParams::default()).await {
            Err(error) if code(&error) == 404 => {}
            result => drop(result?),
        }
        writes += 1;
    }
    let written = match (&plan.create, &plan.replace) {
        (Some(new), _) => slices.create(&PostParams::default(), new).await,
        (_, Some(new)) => slices.replace(&slice::name(node), &PostParams::default(), new).await,
        _ => return Ok(writes),
    };
    let written = written.map_err(|error| match code(&error) {
        // Made or deleted in between: the next look sees it.
        409 | 404 => PublishError::Conflict,
        _ => PublishError::Api(error),
    })?;
    if !slice::is_shareable(&written) {
        return Err(PublishError::NotShareable);
    }
    Ok(writes + 1)
}
