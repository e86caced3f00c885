//! Writes to the API server about a pod by its UID, so that none reaches a later pod of the same name.

use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};

/// A creation or a replacement under the name of this program.
pub fn post(manager: &str) -> PostParams {
    PostParams { field_manager: Some(manager.to_owned()), ..PostParams::default() }
}

/// Binds a pod, of this name and UID, to a node.
///
/// # Errors
/// The API server's.
pub async fn bind(
    pods: &Api<Pod>,
    manager: &str,
    (name, uid): (&str, &str),
    node: &str,
) -> Result<(), kube::Error> {
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: pods.namespace().map(str::to_owned),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };
    let bound = pods.create_subresource("binding", name, &post(manager), &binding).await;
    bound.map(|_: serde_json::Value| ())
}

/// Longest wait for the answer to a write.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);

/// The answer to a write, or an error after some seconds without one: the server may be cut off.
///
/// # Errors
/// The API server's, or that it does not answer.
pub async fn answered<T>(write: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let late = || kube::Error::Service(format!("no answer within {} s", ANSWER.as_secs()).into());
    tokio::time::timeout(ANSWER, write).await.unwrap_or_else(|_| Err(late()))
}

/// Deletes a pod of this name and UID.
///
/// # Errors
/// The API server's.
pub async fn delete(pods: &Api<Pod>, (name, uid): (&str, &str)) -> Result<(), kube::Error> {
    let only = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
    pods.delete(name, &DeleteParams { preconditions: Some(only), ..DeleteParams::default() }).await.map(drop)
}
