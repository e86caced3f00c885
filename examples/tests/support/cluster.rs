//! A real API server with the objects of the manifests, if there is one.

use super::api_server::documents;
use super::control_plane::{ControlPlane, User, send};
use http::StatusCode;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::sync::MutexGuard;

pub(crate) struct Real {
    pub(crate) plane: &'static ControlPlane,
    _turn: MutexGuard<'static, ()>,
}

/// The namespace of everything started by the manifests.
const SYSTEM: &str = "gshare-system";

impl Real {
    pub(crate) async fn here() -> Option<Self> {
        let plane = ControlPlane::here()?;
        let turn = plane.turn.lock().await;
        plane.ready().await;
        let real = Self { plane, _turn: turn };
        // The label lets claims ask for an access forbidden by the policies alone.
        let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
        let metadata = json!({ "name": "team", "labels": labels });
        real.apply(&[json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": metadata })]).await;
        Some(real)
    }

    /// Sends a request as this user.
    pub(crate) async fn ask_as(&self, user: User<'_>, line: &str, body: &Value) -> (StatusCode, Value) {
        send(&self.plane.client(user), line, body).await.unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    /// Gives the accounts of a manifest their rights.
    pub(crate) async fn give(&self, manifest: &str) {
        let mut objects = documents(manifest);
        objects.insert(0, json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SYSTEM } }));
        self.apply(&objects).await;
    }

    /// Applies objects of manifests as `kubectl apply --server-side --validate=strict` does.
    pub(crate) async fn apply(&self, objects: &[Value]) {
        let admin = self.plane.client(User::Admin);
        for object in objects {
            let path = path_of(object);
            let line = format!("APPLY {path}?fieldManager=tests&fieldValidation=Strict&force=true");
            // A definition is served some time after the server took it.
            let began = Instant::now();
            loop {
                let (status, said) = send(&admin, &line, object).await.unwrap();
                if status.is_success() {
                    break;
                }
                assert!(status == 404 && began.elapsed() < Duration::from_secs(30), "{path}: {said}");
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
    }
}

/// The path of an object of a manifest.
fn path_of(object: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (version, kind) = (text(&object["apiVersion"]), text(&object["kind"]).to_lowercase());
    let plural = match kind.strip_suffix('y') {
        Some(stem) => format!("{stem}ies"),
        None if kind.ends_with('s') => format!("{kind}es"),
        None => format!("{kind}s"),
    };
    let root = if version.contains('/') { "apis" } else { "api" };
    let within = match &object["metadata"]["namespace"] {
        Value::String(namespace) => format!("namespaces/{namespace}/"),
        _ => String::new(),
    };
    format!("/{root}/{version}/{within}{plural}/{}", text(&object["metadata"]["name"]))
}

/// The path of the collection of an object that may leave its namespace out.
pub(crate) fn collection_of(object: &Value) -> String {
    let path = path_of(object);
    path.rsplit_once('/').unwrap().0.to_owned()
}
