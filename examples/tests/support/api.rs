//! An API server that is a function: it sees every request, and nothing is answered that it does not answer.

use kube::client::{Body, Client};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

/// A request as the API server sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Call {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) body: Value,
}

impl Call {
    /// `GET /api/v1/nodes/n1`.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    /// API group, resource and verb, as rules of RBAC name them.
    pub(crate) fn right(&self) -> (String, String, String) {
        let mut parts = self.path.trim_start_matches('/').split('/');
        let group = match parts.next() {
            Some("api") => "",
            _ => parts.next().unwrap(),
        };
        parts.next();
        let mut rest: Vec<_> = parts.collect();
        if rest[0] == "namespaces" && rest.len() > 2 {
            rest.drain(..2);
        }
        let resource = match rest[..] {
            [resource, _, sub] => format!("{resource}/{sub}"),
            _ => rest[0].to_owned(),
        };
        let verb = match (self.method.as_str(), rest.len()) {
            ("GET", 1) if self.query.contains("watch=true") => "watch",
            ("GET", 1) => "list",
            ("GET", _) => "get",
            ("POST", _) => "create",
            ("PUT", _) => "update",
            ("PATCH", _) => "patch",
            ("DELETE", 1) => "deletecollection",
            _ => "delete",
        };
        (group.to_owned(), resource, verb.to_owned())
    }
}

/// What was asked so far.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    /// Takes them.
    pub(crate) fn take(&self) -> Vec<Call> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    /// Takes them; only methods and paths.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.take().iter().map(Call::line).collect()
    }
}

/// A client of an API server that answers with `answer`: status and body.
pub(crate) fn api(mut answer: impl FnMut(&Call) -> (u16, Value) + Send + 'static) -> (Client, Calls) {
    let (service, mut handle) = tower_test::mock::pair::<http::Request<Body>, http::Response<Body>>();
    let calls = Calls::default();
    let seen = calls.clone();
    tokio::spawn(async move {
        while let Some((request, send)) = handle.next_request().await {
            let (parts, body) = request.into_parts();
            let bytes = body.collect_bytes().await.unwrap();
            let call = Call {
                method: parts.method.to_string(),
                path: parts.uri.path().to_owned(),
                query: parts.uri.query().unwrap_or_default().to_owned(),
                body: if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() },
            };
            let (status, body) = answer(&call);
            seen.0.lock().unwrap().push(call);
            // A watch is answered with a line per event.
            let text = match body {
                Value::String(text) => text,
                body => body.to_string(),
            };
            send.send_response(
                http::Response::builder().status(status).body(Body::from(text.into_bytes())).unwrap(),
            );
        }
    });
    (Client::new(service, "default"), calls)
}

/// A refusal as API servers word it.
pub(crate) fn refusal(code: u16, reason: &str) -> (u16, Value) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code});
    (code, body)
}

/// A list of objects.
pub(crate) fn list(kind: &str, items: &[Value]) -> (u16, Value) {
    (200, json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "100"}, "items": items}))
}

/// What the roles in a manifest allow.
pub(crate) fn rights(manifest: &str) -> BTreeSet<(String, String, String)> {
    let mut rights = BTreeSet::new();
    for document in documents(manifest) {
        for rule in document["rules"].as_array().into_iter().flatten() {
            let words = |key: &str| -> Vec<String> { serde_json::from_value(rule[key].clone()).unwrap() };
            for group in words("apiGroups") {
                for resource in words("resources") {
                    for verb in words("verbs") {
                        rights.insert((group.clone(), resource.clone(), verb));
                    }
                }
            }
        }
    }
    rights
}

/// The documents of a YAML file.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}
