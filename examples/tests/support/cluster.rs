//! A real API server with the objects of the manifests, if there is one.

use super::api_server::documents;
use super::control_plane::{ControlPlane, User, send};
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::MutexGuard;

pub(crate) struct Real {
    pub(crate) plane: &'static ControlPlane,
    admin: kube::Client,
    /// The namespace in place of `team`.
    namespace: String,
    _turn: MutexGuard<'static, ()>,
}

/// The namespace of everything started by the manifests.
const SYSTEM: &str = "gshare-system";

static NAMESPACES: AtomicU32 = AtomicU32::new(0);

impl Real {
    pub(crate) async fn here() -> Option<Self> {
        let plane = ControlPlane::here()?;
        let turn = plane.turn.lock().await;
        plane.ready().await;
        let admin = plane.client(User::Admin);
        let namespace = format!("team-{}", NAMESPACES.fetch_add(1, Ordering::Relaxed));
        // The label lets claims ask for an access forbidden by the policies alone.
        let labels = json!({ "resource.kubernetes.io/admin-access": "true" });
        let made = json!({ "metadata": { "name": namespace, "labels": labels } });
        let (status, said) = send(&admin, "POST /api/v1/namespaces", &made).await.unwrap();
        assert_eq!(status, 201, "{said}");
        Some(Self { plane, admin, namespace, _turn: turn })
    }

    /// Sends a request as this user.
    pub(crate) async fn ask_as(&self, user: User<'_>, line: &str, body: Value) -> (StatusCode, Value) {
        let client = match user {
            User::Admin => self.admin.clone(),
            other => self.plane.client(other),
        };
        let line = self.here_is(line);
        let body = serde_json::from_str(&self.here_is(&body.to_string())).unwrap();
        send(&client, &line, &body).await.unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    /// The text with this namespace instead of `team`.
    fn here_is(&self, text: &str) -> String {
        let own = &self.namespace;
        let text = text.replace("/namespaces/team", &format!("/namespaces/{own}"));
        text.replace("\"namespace\":\"team\"", &format!("\"namespace\":\"{own}\""))
    }

    /// Gives the accounts of a manifest their rights.
    pub(crate) async fn give(&self, manifest: &str) {
        let mut objects = documents(manifest);
        objects.insert(0, json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SYSTEM } }));
        self.apply(&objects).await;
    }

    /// Applies objects of manifests as `kubectl apply --server-side --validate=strict` does.
    pub(crate) async fn apply(&self, objects: &[Value]) {
        for object in objects {
            let path = path_of(object);
            let line = format!("APPLY {path}?fieldManager=tests&fieldValidation=Strict&force=true");
            // A definition is served some time after the server took it.
            let began = Instant::now();
            loop {
                let (status, said) = send(&self.admin, &line, object).await.unwrap();
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
