//! An API server in memory behind `tower-test`.

use axum::body::{Body, Bytes};
use futures::channel::mpsc::{UnboundedSender, unbounded};
use http::{Request, Response};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

/// Group, resource with its subresource, verb.
pub(crate) type Right = (String, String, String);

/// A request that was made; paths are without what is asked of each write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) body: Value,
}

struct Watch {
    collection: String,
    label: Option<(String, String)>,
    events: UnboundedSender<Result<Bytes, Infallible>>,
}

#[derive(Default)]
pub(crate) struct Server {
    /// By path.
    objects: BTreeMap<String, Value>,
    version: u64,
    pub(crate) seen: Vec<Seen>,
    pub(crate) used: BTreeSet<Right>,
    rights: BTreeSet<Right>,
    /// Answers to come instead of what would be right: start of `METHOD path`, status, reason.
    pub(crate) faults: VecDeque<(String, u16, &'static str)>,
    watches: Vec<Watch>,
    /// Version, object's path, event.
    history: Vec<(u64, String, Value)>,
}

#[derive(Clone, Default)]
pub(crate) struct Api(Arc<Mutex<Server>>);

/// What the manifest allows.
pub(crate) fn rights() -> BTreeSet<Right> {
    let manifest = include_str!("../../knative/rbac.yaml");
    let documents: Vec<Value> = serde_saphyr::from_multiple(manifest).unwrap();
    let role = documents.iter().find(|document| document["kind"] == "ClusterRole").unwrap();
    let texts = |rule: &Value, key: &str| -> Vec<String> {
        let texts = rule[key].as_array().unwrap().iter();
        texts.map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let mut rights = BTreeSet::new();
    for rule in role["rules"].as_array().unwrap() {
        for group in texts(rule, "apiGroups") {
            for resource in texts(rule, "resources") {
                for verb in texts(rule, "verbs") {
                    assert!(rights.insert((group.clone(), resource.clone(), verb)), "twice: {rule}");
                }
            }
        }
    }
    rights
}

/// A path of the API, taken apart.
struct Target {
    group: String,
    /// Of a namespace or of all.
    collection: String,
    resource: String,
    /// The object's, without a subresource.
    object: Option<String>,
    subresource: Option<String>,
}

fn target(path: &str) -> Target {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let ["apis", group, _, rest @ ..] = parts.as_slice() else { panic!("{path}: not of a group") };
    let (resource, rest) = match rest {
        ["namespaces", _, resource, rest @ ..] | [resource, rest @ ..] => (*resource, rest),
        [] => panic!("{path}: no resource"),
    };
    let below: usize = rest.iter().map(|part| part.len() + 1).sum();
    let collection = path[..path.len() - below].to_owned();
    Target {
        group: (*group).to_owned(),
        resource: resource.to_owned(),
        object: rest.first().map(|name| format!("{collection}/{name}")),
        subresource: rest.get(1).map(|sub| (*sub).to_owned()),
        collection,
    }
}

/// RFC 7386.
fn merge(into: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else { return into.clone_from(patch) };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            into.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut into[key], value);
        }
    }
}

/// Whether an object is in a collection: in the one of its namespace, or in that of all.
fn is_in(path: &str, collection: &str) -> bool {
    let own = target(path).collection;
    let (start, rest) = own.split_once("/namespaces/").unwrap();
    own == collection || format!("{start}/{}", rest.split_once('/').unwrap().1) == collection
}

fn is_labelled(object: &Value, label: Option<&(String, String)>) -> bool {
    label.is_none_or(|(key, value)| object["metadata"]["labels"][key] == **value)
}

impl Server {
    pub(crate) fn object(&self, path: &str) -> Option<&Value> {
        self.objects.get(path)
    }

    /// Requests since the last call.
    pub(crate) fn take(&mut self) -> Vec<Seen> {
        std::mem::take(&mut self.seen)
    }

    /// Another one than the controller makes or changes an object.
    pub(crate) fn put(&mut self, path: &str, object: Value) {
        let kind = if self.objects.contains_key(path) { "MODIFIED" } else { "ADDED" };
        self.store(path, object, kind);
    }

    /// The same, by a merge patch. A changed spec, or annotations of a revision, make a new generation.
    pub(crate) fn edit(&mut self, path: &str, patch: &Value) {
        let mut object = self.objects[path].clone();
        merge(&mut object, patch);
        if patch.get("spec").is_some() {
            object["metadata"]["generation"] =
                json!(object["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
        }
        if object != self.objects[path] {
            self.store(path, object, "MODIFIED");
        }
    }

    pub(crate) fn delete(&mut self, path: &str) {
        let object = self.objects.remove(path).unwrap();
        self.tell(path, object, "DELETED");
    }

    fn store(&mut self, path: &str, object: Value, kind: &str) {
        let object = self.tell(path, object, kind);
        self.objects.insert(path.to_owned(), object);
    }

    fn tell(&mut self, path: &str, mut object: Value, kind: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({ "type": kind, "object": object });
        self.history.push((self.version, path.to_owned(), event.clone()));
        for watch in &self.watches {
            if is_in(path, &watch.collection) && is_labelled(&object, watch.label.as_ref()) {
                send(&watch.events, &event);
            }
        }
        object
    }

    /// Watches of this collection break off; with `gone`, what was there is forgotten, too.
    pub(crate) fn break_watches(&mut self, collection: &str, gone: bool) {
        for watch in self.watches.extract_if(.., |watch| watch.collection == collection) {
            if gone {
                send(&watch.events, &expired());
            }
        }
        if gone {
            self.history.clear();
        }
    }

    /// Whether the controller watches this collection.
    pub(crate) fn is_watched(&self, collection: &str) -> bool {
        self.watches.iter().any(|watch| watch.collection == collection)
    }

    fn answer(&mut self, request: &Seen) -> Response<Body> {
        let at = target(&request.path);
        let query: BTreeMap<String, String> = request
            .query
            .split('&')
            .filter_map(|part| part.split_once('='))
            .map(|(k, v)| (k.into(), plain(v)))
            .collect();
        let is_watch = query.get("watch").is_some_and(|watch| watch == "true");
        let verb = match (request.method.as_str(), &at.object) {
            ("GET", Some(_)) => "get",
            ("GET", None) if is_watch => "watch",
            ("GET", None) => "list",
            ("POST", None) => "create",
            ("PATCH", Some(_)) => "patch",
            other => panic!("{other:?} of {}", request.path),
        };
        if request.method != "GET" {
            assert_eq!(query.get("fieldManager").map(String::as_str), Some("gshare-knative"));
        }
        let resource = at.subresource.iter().fold(at.resource.clone(), |all, sub| format!("{all}/{sub}"));
        let right = (at.group.clone(), resource, verb.to_owned());
        if !self.rights.contains(&right) {
            return failure(403, "Forbidden");
        }
        self.used.insert(right);
        let line = format!("{} {}", request.method, request.path);
        if let Some(index) = self.faults.iter().position(|(start, ..)| line.starts_with(start)) {
            let (_, status, reason) = self.faults.remove(index).unwrap();
            return failure(status, reason);
        }
        let label = query.get("labelSelector").map(|label| {
            let (key, value) = label.split_once('=').unwrap();
            (key.to_owned(), value.to_owned())
        });
        match (verb, at.object, at.subresource.as_deref()) {
            ("list", ..) => {
                let of = |(path, object): &(&String, &Value)| {
                    is_in(path, &at.collection) && is_labelled(object, label.as_ref())
                };
                let items: Vec<_> =
                    self.objects.iter().filter(of).map(|(_, object)| object.clone()).collect();
                let version = json!({ "resourceVersion": self.version.to_string() });
                success(
                    200,
                    &json!({ "apiVersion": "v1", "kind": "List", "metadata": version, "items": items }),
                )
            }
            ("watch", ..) => self.watch(&at.collection, label, &query["resourceVersion"]),
            ("create", ..) => {
                let name = request.body["metadata"]["name"].as_str().unwrap();
                let path = format!("{}/{name}", at.collection);
                if self.objects.contains_key(&path) {
                    return failure(409, "AlreadyExists");
                }
                let mut object = request.body.clone();
                object["metadata"]["generation"] = json!(1);
                self.put(&path, object);
                success(201, &self.objects[&path])
            }
            (_, Some(path), sub) => {
                let Some(object) = self.objects.get(&path).cloned() else { return failure(404, "NotFound") };
                if sub == Some("scale") {
                    return self.scale(&path, &request.body);
                }
                let version = &request.body["metadata"]["resourceVersion"];
                if !version.is_null() && *version != object["metadata"]["resourceVersion"] {
                    return failure(409, "Conflict");
                }
                // A subresource takes its own part only, and the object's own path takes no status.
                let part = sub.unwrap_or("spec");
                let parts: Vec<_> = request.body.as_object().unwrap().keys().collect();
                assert_eq!(parts, ["metadata", part]);
                self.edit(&path, &json!({ part: request.body[part] }));
                success(200, &self.objects[&path])
            }
            other => panic!("{other:?}"),
        }
    }

    /// Reads the scale of a target, or sets it.
    fn scale(&mut self, path: &str, body: &Value) -> Response<Body> {
        if !body.is_null() {
            self.edit(path, &json!({ "spec": { "replicas": body["spec"]["replicas"] } }));
        }
        let object = &self.objects[path];
        let scale = json!({
            "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": object["metadata"],
            "spec": { "replicas": object["spec"]["replicas"] }, "status": { "replicas": 0 },
        });
        success(200, &scale)
    }

    fn watch(&mut self, collection: &str, label: Option<(String, String)>, version: &str) -> Response<Body> {
        let (events, received) = unbounded();
        let version: u64 = version.parse().unwrap();
        let forgotten = self.history.first().map_or(self.version, |(first, ..)| first - 1);
        if version < forgotten {
            send(&events, &expired());
        } else {
            let missed = self.history.iter().filter(|(at, path, event)| {
                *at > version && is_in(path, collection) && is_labelled(&event["object"], label.as_ref())
            });
            missed.for_each(|(_, _, event)| send(&events, event));
            self.watches.push(Watch { collection: collection.to_owned(), label, events });
        }
        Response::builder().status(200).body(Body::from_stream(received)).unwrap()
    }
}

fn send(events: &UnboundedSender<Result<Bytes, Infallible>>, event: &Value) {
    // The controller may have gone.
    let _ = events.unbounded_send(Ok(format!("{event}\n").into()));
}

/// The event by which a watch that is too old ends.
fn expired() -> Value {
    json!({ "type": "ERROR", "object": status(410, "Expired") })
}

fn status(code: u16, reason: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": format!("{reason} as the test wants it"),
    })
}

fn success(code: u16, body: &Value) -> Response<Body> {
    Response::builder().status(code).body(Body::from(body.to_string())).unwrap()
}

fn failure(code: u16, reason: &str) -> Response<Body> {
    success(code, &status(code, reason))
}

/// Without percent signs.
fn plain(text: &str) -> String {
    text.replace("%3D", "=").replace("%2F", "/").replace("%26", "&")
}

impl Api {
    /// A server with the rights of the manifest, and a client of it.
    pub(crate) fn start() -> (Self, kube::Client) {
        let api = Self::default();
        api.lock().rights = rights();
        let (mock, mut handle) = tower_test::mock::pair::<Request<kube::client::Body>, Response<Body>>();
        let server = api.clone();
        tokio::spawn(async move {
            while let Some((request, answer)) = handle.next_request().await {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap();
                let seen = Seen {
                    method: parts.method.to_string(),
                    path: parts.uri.path().to_owned(),
                    query: parts.uri.query().unwrap_or_default().to_owned(),
                    body: if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() },
                };
                if seen.method == "PATCH" {
                    assert_eq!(parts.headers["content-type"], "application/merge-patch+json");
                }
                let mut server = server.lock();
                server.seen.push(seen.clone());
                answer.send_response(server.answer(&seen));
            }
        });
        (api, kube::Client::new(mock, "default"))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap()
    }
}

/// Objects of a kind, as a watch that has caught up would bring them.
pub(crate) fn listed<K: serde::de::DeserializeOwned>(api: &Api, collection: &str) -> Vec<K> {
    let server = api.lock();
    let of = server.objects.iter().filter(|(path, _)| is_in(path, collection));
    of.map(|(_, object)| serde_json::from_value(object.clone()).unwrap()).collect()
}
