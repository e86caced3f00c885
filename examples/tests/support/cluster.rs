//! Scenarios for the mock of an API server, and for a real one if there is one.

use super::api_server::{Api, Seen, documents};
use super::control_plane::{ControlPlane, User, send};
use http::StatusCode;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::MutexGuard;

pub(crate) enum Cluster {
    /// Gives the rights of a manifest.
    Mock(Api, kube::Client),
    Real(Real),
}

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

    pub(crate) async fn object(&self, path: &str) -> Option<Value> {
        let (status, object) = self.ask_as(User::Admin, &format!("GET {path}"), Value::Null).await;
        (status == 200).then_some(object)
    }

    /// Makes the object, or replaces it, and its status.
    pub(crate) async fn put(&self, path: &str, mut object: Value) {
        for key in ["uid", "resourceVersion", "generation", "creationTimestamp"] {
            object["metadata"].as_object_mut().unwrap().remove(key);
        }
        let (status, there) = self.ask_as(User::Admin, &format!("GET {path}"), Value::Null).await;
        let (collection, name) = path.rsplit_once('/').unwrap();
        object["metadata"]["name"] =
            json!(if path.ends_with("/namespaces/team") { &self.namespace } else { name });
        let line = if status == 404 { format!("POST {collection}") } else { format!("PUT {path}") };
        object["metadata"]["resourceVersion"] = there["metadata"]["resourceVersion"].clone();
        let (status, made) = self.ask_as(User::Admin, &line, object.clone()).await;
        assert!(status.is_success(), "{line}: {made}");
        if !object["status"].is_null() {
            object["metadata"]["resourceVersion"] = made["metadata"]["resourceVersion"].clone();
            let line = format!("PUT {path}/status");
            let (status, said) = self.ask_as(User::Admin, &line, object).await;
            assert!(status.is_success(), "{line}: {said}");
        }
    }

    /// Gives the accounts of a manifest their rights, in the namespace of all manifests.
    pub(crate) async fn give(&self, manifest: &str) {
        let mut objects = documents(manifest);
        objects.insert(0, json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": SYSTEM } }));
        for object in &mut objects {
            if ["ServiceAccount", "Role", "RoleBinding"].contains(&object["kind"].as_str().unwrap()) {
                object["metadata"]["namespace"] = json!(SYSTEM);
            }
            for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
                subject["namespace"] = json!(SYSTEM);
            }
        }
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

impl Cluster {
    /// Each with a namespace `team`. The mock gives the rights of this manifest.
    pub(crate) async fn all(role: &str) -> Vec<Self> {
        let (api, client) = Api::start(role, "");
        let mut all = vec![Self::Mock(api, client)];
        all.extend(Real::here().await.map(Self::Real));
        all
    }

    /// `METHOD PATH`, with a body or null.
    pub(crate) async fn ask(&self, line: &str, body: Value) -> (StatusCode, Value) {
        let api = match self {
            Self::Mock(api, _) => api,
            Self::Real(real) => return real.ask_as(User::Admin, line, body).await,
        };
        let (method, path) = line.split_once(' ').unwrap();
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let seen = Seen { method: method.into(), path: path.into(), query: query.into(), body };
        let answer = api.answer(&seen);
        let status = answer.status();
        let bytes = axum::body::to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap())
    }

    /// An administrator makes or changes an object.
    pub(crate) async fn put(&self, path: &str, object: Value) {
        match self {
            Self::Mock(api, _) => api.lock().put(path, object),
            Self::Real(real) => real.put(path, object).await,
        }
    }

    pub(crate) async fn object(&self, path: &str) -> Option<Value> {
        match self {
            Self::Mock(api, _) => api.lock().object(path).cloned(),
            Self::Real(real) => real.object(path).await,
        }
    }
}
