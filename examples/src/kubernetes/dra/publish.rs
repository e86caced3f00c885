//! Tells the API server which GPUs this node has.

use super::{DRIVER, Node, slice};
use crate::kubernetes::heard;
use anyhow::{Context as _, anyhow, ensure};
use k8s_openapi::api::core::v1;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client, Resource as _};

/// Brings the slice of `node` up to date. Returns the number of writes.
///
/// # Errors
/// If a write fails, or the API server has changed the slice; earlier writes stay. It is tried again.
pub async fn publish(client: &Client, node: &Node) -> anyhow::Result<usize> {
    let nodes: Api<v1::Node> = Api::all(client.clone());
    let known = nodes.get_opt(&node.name).await.map_err(heard)?;
    let owner = known.and_then(|node| node.owner_ref(&()));
    let owner =
        owner.with_context(|| format!("node `{}`: not known to the API server: see --node", node.name))?;
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mine = format!("spec.driver={DRIVER},spec.nodeName={}", node.name);
    let found = slices.list(&ListParams::default().fields(&mine)).await.map_err(heard)?;
    let (delete, write) = slice::plan(node, &owner, &found.items);
    let mut writes = 0;
    for name in &delete {
        match slices.delete(name, &DeleteParams::default()).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => {}
            result => drop(result.map_err(heard)?),
        }
        writes += 1;
    }
    let Some(new) = &write else { return Ok(writes) };
    let written = match new.metadata.resource_version {
        None => slices.create(&PostParams::default(), new).await,
        Some(_) => slices.replace(&slice::name(node), &PostParams::default(), new).await,
    };
    let written = written.map_err(|error| match &error {
        // Made or deleted in between: the next look sees it.
        kube::Error::Api(status) if [404, 409].contains(&status.code) => {
            anyhow!("the slice changed while it was written")
        }
        _ => heard(error),
    })?;
    // Its devices would be given to one claim each.
    ensure!(
        slice::is_shareable(&written),
        "the API server dropped allowMultipleAllocations: it needs Kubernetes 1.34 with the feature gate DRAConsumableCapacity"
    );
    Ok(writes + 1)
}
