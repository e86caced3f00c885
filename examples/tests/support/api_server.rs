//! An API server in memory: it keeps objects as the real one does, with versions and conflicts, merge patches, subresources, lists by
//! selectors and by pages, watches that break off or have gone too far back, and the rights that a manifest gives. Quantities are stored in
//! their shortest form, fields without a value are left out, pods that make no sense are refused. Each request is recorded.

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Query;
use futures::channel::mpsc::{UnboundedSender, unbounded};
use http::{Request, Response};
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};

/// Group, resource with its subresource, verb.
pub(crate) type Right = (String, String, String);

/// A request that was made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) body: Value,
}

impl Seen {
    pub(crate) async fn of<B>(request: Request<B>) -> Self
    where
        B: HttpBody<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
    {
        let (parts, body) = request.into_parts();
        let body = axum::body::to_bytes(Body::new(body), usize::MAX).await.unwrap();
        Self {
            method: parts.method.to_string(),
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().unwrap_or_default().to_owned(),
            body: if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() },
        }
    }

    /// `GET /api/v1/nodes/n1`.
    pub(crate) fn line(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    pub(crate) fn is_watch(&self) -> bool {
        self.query.contains("watch=true")
    }
}

/// What admission does to an object before each write, and the reason why it is refused, if any.
pub(crate) type Admission = Box<dyn Fn(&mut Value) -> Option<String> + Send>;

struct Watch {
    collection: String,
    selectors: Selectors,
    events: UnboundedSender<Result<Bytes, Infallible>>,
}

#[derive(Default)]
pub(crate) struct Server {
    /// By path.
    objects: BTreeMap<String, Value>,
    version: u64,
    /// Versions below are no longer known.
    compacted: u64,
    pub(crate) seen: Vec<Seen>,
    pub(crate) used: BTreeSet<Right>,
    rights: BTreeSet<Right>,
    /// The name under which all writes are made.
    manager: &'static str,
    pub(crate) admit: Option<Admission>,
    /// Schemas of custom resources, by group.
    schemas: BTreeMap<String, jsonschema::Validator>,
    /// Deleted pods that are bound stay, until their kubelet has ended them.
    pub(crate) is_graceful: bool,
    /// Requests are not answered.
    pub(crate) deaf: bool,
    /// Answers to send in place of the right ones: start of `METHOD path`, status, reason.
    pub(crate) faults: VecDeque<(String, u16, &'static str)>,
    watches: Vec<Watch>,
    /// Version, object's path, event.
    history: Vec<(u64, String, Value)>,
}

#[derive(Clone, Default)]
pub(crate) struct Api(Arc<Mutex<Server>>);

/// The documents of a YAML file.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    serde_saphyr::from_multiple(text).unwrap()
}

/// Permissions of the roles in a manifest.
pub(crate) fn rights(manifest: &str) -> BTreeSet<Right> {
    let texts = |rule: &Value, key| serde_json::from_value::<Vec<String>>(rule[key].clone()).unwrap();
    let mut rights = BTreeSet::new();
    for document in documents(manifest) {
        // Roles of two namespaces may give the same.
        let mut own = BTreeSet::new();
        for rule in document["rules"].as_array().into_iter().flatten() {
            for group in texts(rule, "apiGroups") {
                for resource in texts(rule, "resources") {
                    for verb in texts(rule, "verbs") {
                        assert!(own.insert((group.clone(), resource.clone(), verb)), "twice: {rule}");
                    }
                }
            }
        }
        rights.extend(own);
    }
    rights
}

/// A path of the API, taken apart.
struct Target {
    group: String,
    /// One namespace, or all of them.
    collection: String,
    resource: String,
    /// The object's, without a subresource.
    object: Option<String>,
    subresource: Option<String>,
}

fn target(path: &str) -> Target {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let (group, rest) = match parts.as_slice() {
        ["apis", group, _, rest @ ..] => (*group, rest),
        ["api", "v1", rest @ ..] => ("", rest),
        _ => panic!("{path}: not of a group"),
    };
    let (resource, rest) = match rest {
        ["namespaces", _, resource, rest @ ..] | [resource, rest @ ..] => (*resource, rest),
        [] => panic!("{path}: no resource"),
    };
    let below: usize = rest.iter().map(|part| part.len() + 1).sum();
    let collection = path[..path.len() - below].to_owned();
    Target {
        group: group.to_owned(),
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

/// Whether an object is in a collection, of its namespace or of all namespaces.
fn is_in(path: &str, collection: &str) -> bool {
    let own = target(path).collection;
    let of_all =
        own.split_once("/namespaces/").and_then(|(start, rest)| Some((start, rest.split_once('/')?.1)));
    own == collection || of_all.is_some_and(|(start, resource)| collection == format!("{start}/{resource}"))
}

/// Required values of labels and fields; a label without a value must exist.
#[derive(Default)]
struct Selectors(Vec<(String, Option<String>)>);

impl Selectors {
    fn of(query: &BTreeMap<String, String>) -> Self {
        let mut all = Vec::new();
        for (key, start) in [("labelSelector", "/metadata/labels/"), ("fieldSelector", "/")] {
            let parts = query.get(key).into_iter().flat_map(|text| text.split(','));
            for part in parts.filter(|part| !part.is_empty()) {
                let (name, value) =
                    part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value)));
                // As a pointer into the object.
                let name =
                    if key == "fieldSelector" { name.replace('.', "/") } else { name.replace('/', "~1") };
                all.push((format!("{start}{name}"), value.map(str::to_owned)));
            }
        }
        Self(all)
    }

    fn select(&self, object: &Value) -> bool {
        self.0.iter().all(|(pointer, value)| {
            let found = object.pointer(pointer);
            found.is_some_and(|found| value.as_ref().is_none_or(|value| found == value.as_str()))
        })
    }
}

impl Server {
    pub(crate) fn object(&self, path: &str) -> Option<&Value> {
        self.objects.get(path)
    }

    /// Changes with each change of an object.
    pub(crate) const fn version(&self) -> u64 {
        self.version
    }

    /// The objects of a collection, by path.
    pub(crate) fn objects(&self, collection: &str) -> Vec<(&String, &Value)> {
        self.objects.iter().filter(|(path, _)| is_in(path, collection)).collect()
    }

    /// Requests since the last call.
    pub(crate) fn take(&mut self) -> Vec<Seen> {
        std::mem::take(&mut self.seen)
    }

    /// The same; only methods and paths.
    pub(crate) fn lines(&mut self) -> Vec<String> {
        self.take().iter().map(Seen::line).collect()
    }

    /// Answers the next request with this start with an error.
    pub(crate) fn fail(&mut self, line: impl Into<String>, code: u16, reason: &'static str) {
        self.faults.push_back((line.into(), code, reason));
    }

    /// A client other than the controller makes or changes an object.
    pub(crate) fn put(&mut self, path: &str, mut object: Value) {
        if !is_custom(&target(path).group) {
            tidy(&mut object);
        }
        let kind = match self.objects.get(path) {
            // A write that changes nothing makes no version.
            Some(before) if *before == object => return,
            Some(_) => "MODIFIED",
            None => "ADDED",
        };
        let object = self.tell(path, object, kind);
        self.objects.insert(path.to_owned(), object);
    }

    /// The same, by a merge patch. A changed spec makes a new generation.
    pub(crate) fn edit(&mut self, path: &str, patch: &Value) {
        let mut object = self.objects[path].clone();
        merge(&mut object, patch);
        if patch.get("spec").is_some() {
            object["metadata"]["generation"] =
                json!(object["metadata"]["generation"].as_i64().unwrap_or(0) + 1);
        }
        self.put(path, object);
    }

    /// The same, of which no watch tells.
    pub(crate) fn edit_unseen(&mut self, path: &str, patch: &Value) {
        let watches = std::mem::take(&mut self.watches);
        self.edit(path, patch);
        self.watches = watches;
    }

    pub(crate) fn delete(&mut self, path: &str) {
        let object = self.objects.remove(path).unwrap();
        self.tell(path, object, "DELETED");
    }

    fn tell(&mut self, path: &str, mut object: Value, kind: &str) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({ "type": kind, "object": object });
        self.history.push((self.version, path.to_owned(), event.clone()));
        for watch in &self.watches {
            if is_in(path, &watch.collection) && watch.selectors.select(&object) {
                send(&watch.events, &event);
            }
        }
        object
    }

    /// Watches of this collection end, since the server forgets the history.
    pub(crate) fn expire_watches(&mut self, collection: &str) {
        for watch in self.watches.extract_if(.., |watch| watch.collection == collection) {
            send(&watch.events, &expired());
        }
        self.history.clear();
        self.compacted = self.version;
    }

    /// The answer to a request. Requests of the tests have all rights, are not recorded, and meet no fault.
    fn answer(&mut self, request: &Seen, is_ours: bool) -> Response<Body> {
        let at = target(&request.path);
        let query = format!("/?{}", request.query).parse().unwrap();
        let Query(query) = Query::<BTreeMap<String, String>>::try_from_uri(&query).unwrap();
        let is_watch = query.get("watch").is_some_and(|watch| watch == "true");
        let verb = match (request.method.as_str(), &at.object) {
            ("GET", Some(_)) => "get",
            ("GET", None) if is_watch => "watch",
            ("GET", None) => "list",
            ("POST", None) => "create",
            ("PUT", Some(_)) => "update",
            ("PATCH", Some(_)) if query.contains_key("fieldManager") => "apply",
            ("PATCH", Some(_)) => "patch",
            ("DELETE", Some(_)) => "delete",
            other => panic!("{other:?} of {}", request.path),
        };
        if !is_ours {
            if !["get", "list", "watch", "delete"].contains(&verb) && !self.manager.is_empty() {
                assert_eq!(query.get("fieldManager").map(String::as_str), Some(self.manager));
            }
            let resource = at.subresource.iter().fold(at.resource.clone(), |all, sub| format!("{all}/{sub}"));
            let right = (at.group.clone(), resource, verb.to_owned());
            if !self.rights.contains(&right) {
                return failure(403, "Forbidden");
            }
            self.used.insert(right);
            let line = request.line();
            if let Some(index) = self.faults.iter().position(|(start, ..)| line.starts_with(start)) {
                let (_, status, reason) = self.faults.remove(index).unwrap();
                return failure(status, reason);
            }
        }
        let selectors = Selectors::of(&query);
        match (verb, at.object, at.subresource.as_deref()) {
            ("list", ..) => {
                let of = |(path, object): &(&String, &Value)| {
                    is_in(path, &at.collection) && selectors.select(object)
                };
                let number = |text: &str| text.parse::<u64>().unwrap();
                // A page begins after the last object of the previous page, and all pages have one version.
                let (version, last) = match query.get("continue").and_then(|token| token.split_once('@')) {
                    Some((version, last)) => (number(version), last.to_owned()),
                    None => (self.version, String::new()),
                };
                if version < self.compacted {
                    return failure(410, "Expired");
                }
                let limit = query.get("limit").map_or(0, |limit| number(limit));
                let limit = usize::try_from(limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
                let mut rest =
                    self.objects.range(last.clone()..).filter(|(path, _)| **path != last).filter(of);
                let page: Vec<_> = rest.by_ref().take(limit).collect();
                let mut about = json!({ "resourceVersion": version.to_string() });
                if let (Some((path, _)), Some(_)) = (page.last(), rest.next()) {
                    about["continue"] = json!(format!("{version}@{path}"));
                }
                let items: Vec<_> = page.into_iter().map(|(_, object)| object).collect();
                let list = json!({ "apiVersion": "v1", "kind": "List", "metadata": about, "items": items });
                success(200, &list)
            }
            ("watch", ..) => self.watch(&at.collection, selectors, &query["resourceVersion"]),
            ("create", None, _) => {
                let name = request.body["metadata"]["name"].as_str().unwrap();
                let path = format!("{}/{name}", at.collection);
                if self.objects.contains_key(&path) {
                    return failure(409, "AlreadyExists");
                }
                let mut object = request.body.clone();
                if let Some(refused) = self.refused(&path, &mut object) {
                    return refused;
                }
                object["metadata"]["generation"] = json!(1);
                object["metadata"]["uid"] = json!(format!("made-{}", self.version + 1));
                self.put(&path, object);
                success(201, &self.objects[&path])
            }
            ("apply", Some(path), None) => {
                self.put(&path, request.body.clone());
                success(200, &self.objects[&path])
            }
            (_, Some(path), sub) => {
                let Some(object) = self.objects.get(&path).cloned() else { return failure(404, "NotFound") };
                let body = &request.body;
                for key in ["uid", "resourceVersion"] {
                    for part in ["metadata", "preconditions"] {
                        if !body[part][key].is_null() && body[part][key] != object["metadata"][key] {
                            return failure(409, "Conflict");
                        }
                    }
                }
                self.change(verb, &path, sub, body)
            }
            other => panic!("{other:?}"),
        }
    }

    /// The answer to an object that is not admitted, or that the real server would find invalid: a pod with inconsistent parts, a custom
    /// resource against its schema.
    fn refused(&self, path: &str, object: &mut Value) -> Option<Response<Body>> {
        let at = target(path);
        let invalid = match self.schemas.get(&at.group) {
            Some(schema) => schema.iter_errors(object).next().map(|error| {
                let field = error.instance_path().to_string();
                format!("{}: Invalid value: {error}", field.trim_start_matches('/').replace('/', "."))
            }),
            None if at.resource == "pods" => senseless(object),
            None => None,
        };
        if let Some(why) = invalid {
            return Some(said(422, "Invalid", &format!("{path} is invalid: {why}")));
        }
        let why = self.admit.as_ref()?(object)?;
        Some(said(403, "Forbidden", &format!("{path} is forbidden: {why}")))
    }

    /// Carries out a request on an object.
    fn change(&mut self, verb: &str, path: &str, sub: Option<&str>, body: &Value) -> Response<Body> {
        match (verb, sub) {
            ("get", None) => {}
            ("patch", _) => self.edit(path, body),
            ("delete", None) => {
                let object = self.objects[path].clone();
                let runs = path.contains("/pods/") && !object["spec"]["nodeName"].is_null();
                if self.is_graceful && runs && body["gracePeriodSeconds"] != 0 {
                    self.edit(path, &json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } }));
                    return success(200, &self.objects[path]);
                }
                self.delete(path);
                return success(200, &object);
            }
            ("update", part) => {
                if is_custom(&target(path).group) && body["metadata"]["resourceVersion"].is_null() {
                    let why = "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update";
                    return said(422, "Invalid", why);
                }
                let mut object = body.clone();
                object["metadata"]["uid"] = self.objects[path]["metadata"]["uid"].clone();
                if let Some(part) = part {
                    // A subresource takes its own part only.
                    object = self.objects[path].clone();
                    object[part] = body[part].clone();
                }
                if let Some(refused) = self.refused(path, &mut object) {
                    return refused;
                }
                self.put(path, object);
            }
            other => panic!("{other:?} of {path}"),
        }
        success(200, &self.objects[path])
    }

    fn watch(&mut self, collection: &str, selectors: Selectors, version: &str) -> Response<Body> {
        let (events, received) = unbounded();
        let version: u64 = version.parse().unwrap();
        if version < self.compacted {
            send(&events, &expired());
        } else {
            let missed = self.history.iter().filter(|(at, path, event)| {
                *at > version && is_in(path, collection) && selectors.select(&event["object"])
            });
            missed.for_each(|(_, _, event)| send(&events, event));
            self.watches.push(Watch { collection: collection.to_owned(), selectors, events });
        }
        Response::builder().status(200).body(Body::from_stream(received)).unwrap()
    }
}

/// Whether a group is of custom resources, which are stored as they are written.
fn is_custom(group: &str) -> bool {
    group.contains('.') && !group.ends_with(".k8s.io")
}

/// An object as the real server stores it if it knows the types: without empty fields, and with quantities in their shortest form.
fn tidy(value: &mut Value) {
    const MAPS: [&str; 5] = ["labels", "annotations", "nodeSelector", "limits", "requests"];
    const QUANTITIES: [&str; 4] = ["limits", "requests", "capacity", "allocatable"];
    match value {
        Value::Array(all) => all.iter_mut().for_each(tidy),
        Value::Object(fields) => {
            fields.retain(|key, value| match value {
                Value::Null => false,
                Value::Array(all) => !all.is_empty(),
                Value::Object(all) => !all.is_empty() || !MAPS.contains(&key.as_str()),
                _ => true,
            });
            for (key, value) in fields {
                if value.is_object() && QUANTITIES.contains(&key.as_str()) {
                    canonical(value);
                } else {
                    tidy(value);
                }
            }
        }
        _ => {}
    }
}

fn differ<'a>(mut names: impl Iterator<Item = &'a String>) -> bool {
    let mut seen = BTreeSet::new();
    names.all(|name| seen.insert(name))
}

/// The inconsistent part of a pod, by the name in the real server's validation.
fn senseless(pod: &Value) -> Option<String> {
    let read = match serde_json::from_value::<Pod>(pod.clone()) {
        Ok(read) => read,
        Err(why) => return Some(why.to_string()),
    };
    let (name, spec) = (read.metadata.name.unwrap_or_default(), read.spec.unwrap_or_default());
    let is_label = |text: &str| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let bounds = text.len() <= 63 && text.starts_with(plain) && text.ends_with(plain);
        bounds && text.chars().all(|c| plain(c) || c == '-')
    };
    let volumes: Vec<_> = spec.volumes.iter().flatten().map(|volume| &volume.name).collect();
    // A volume without a type is an `emptyDir`.
    let mut kinds = pod["spec"]["volumes"].as_array().into_iter().flatten().filter_map(Value::as_object);
    let mut labels = read.metadata.labels.iter().flatten();
    let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
    let of_pod = [
        ("metadata.name: a lowercase RFC 1123 subdomain", name.len() <= 253 && name.split('.').all(is_label)),
        ("metadata.labels: must be no more than 63 bytes", labels.all(|(_, value)| value.len() <= 63)),
        ("spec.volumes.name: Duplicate value", differ(volumes.iter().copied())),
        ("spec.volumes.name: a lowercase RFC 1123 label", volumes.iter().all(|name| is_label(name))),
        ("spec.volumes: may not specify more than 1 volume type", kinds.all(|volume| volume.len() <= 2)),
        ("spec.containers: Required value", !spec.containers.is_empty()),
        ("containers.name: Duplicate value", differ(containers.clone().map(|one| &one.name))),
    ];
    let of_container = |one: &Container| {
        let (mut mounts, mut env) = (one.volume_mounts.iter().flatten(), one.env.iter().flatten());
        let asked = one.resources.clone().unwrap_or_default();
        let requests = asked.requests.unwrap_or_default();
        let mut limits = asked.limits.iter().flatten().filter(|(name, _)| name.contains('/'));
        let is_sound =
            |one: &EnvVar| !one.name.is_empty() && (one.value.is_none() || one.value_from.is_none());
        [
            ("volumeMounts.mountPath: must be unique", differ(mounts.clone().map(|mount| &mount.mount_path))),
            ("volumeMounts.name: Not found", mounts.all(|mount| volumes.contains(&&mount.name))),
            ("env: needs a name, and a value or a source", env.all(is_sound)),
            (
                "resources.requests: must be equal to the limit of an extended resource",
                limits.all(|(name, limit)| requests.get(name).is_none_or(|request| request == limit)),
            ),
        ]
    };
    let mut checks = of_pod.into_iter().chain(containers.flat_map(of_container));
    checks.find(|(_, is)| !is).map(|(why, _)| why.to_owned())
}

/// Quantities as the real server stores them: without a rest in the largest unit of their kind, `10000` as `10k` and `16384Mi`
/// as `16Gi`.
fn canonical(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.values_mut().for_each(canonical);
    }
    let Value::String(text) = value else { return };
    let (base, units) = match text.strip_suffix('i') {
        Some(_) => (1024, ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]),
        None => (1000, ["", "k", "M", "G", "T", "P", "E"]),
    };
    let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = units.iter().position(|unit| *unit == &text[number.len()..]);
    let (Some(mut unit), Ok(mut number)) = (unit, number.parse::<u64>()) else { return };
    while number > 0 && number.is_multiple_of(base) && unit < 6 {
        (number, unit) = (number / base, unit + 1);
    }
    *text = format!("{number}{}", units[unit]);
}

fn send(events: &UnboundedSender<Result<Bytes, Infallible>>, event: &Value) {
    // The controller may have gone.
    let _ = events.unbounded_send(Ok(format!("{event}\n").into()));
}

/// The event at the end of a watch which is too old.
fn expired() -> Value {
    json!({ "type": "ERROR", "object": status(410, "Expired", "too old") })
}

fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({ "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure", "code": code, "reason": reason,
        "message": message })
}

fn success(code: u16, body: &Value) -> Response<Body> {
    Response::builder().status(code).body(Body::from(body.to_string())).unwrap()
}

fn said(code: u16, reason: &str, message: &str) -> Response<Body> {
    success(code, &status(code, reason, message))
}

fn failure(code: u16, reason: &str) -> Response<Body> {
    said(code, reason, &format!("{reason} as the test wants it"))
}

impl Api {
    /// Checks custom resources of the group of a definition by its schema.
    pub(crate) fn define(&self, definition: &str) {
        let definition = documents(definition).remove(0);
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let group = definition["spec"]["group"].as_str().unwrap().to_owned();
        self.lock().schemas.insert(group, jsonschema::validator_for(schema).unwrap());
    }

    /// A server which gives the rights of a manifest to the writer of this name.
    pub(crate) fn new(manifest: &str, manager: &'static str) -> Self {
        let api = Self::default();
        api.lock().rights = rights(manifest);
        api.lock().manager = manager;
        api
    }

    /// The same, and a client of it.
    pub(crate) fn start(manifest: &str, manager: &'static str) -> (Self, kube::Client) {
        let api = Self::new(manifest, manager);
        let server = api.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            // A sent request arrives, even if nobody waits for its answer.
            let answer = tokio::spawn(server.clone().hear(request));
            async { answer.await? }
        });
        (api, kube::Client::new(service, "default"))
    }

    /// The same server for other programs, at an address of this machine.
    pub(crate) async fn serve(manifest: &str, manager: &'static str) -> (Self, std::net::SocketAddr) {
        let api = Self::new(manifest, manager);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, server) = (listener.local_addr().unwrap(), api.clone());
        let answer = async move |request: Request<Body>| server.clone().hear(request).await.unwrap();
        tokio::spawn(axum::serve(listener, axum::Router::new().fallback(answer)).into_future());
        (api, address)
    }

    async fn hear<B>(self, request: Request<B>) -> Result<Response<Body>, axum::BoxError>
    where
        B: HttpBody<Data = Bytes, Error: Into<axum::BoxError>> + Send + 'static,
    {
        // Clients of the tests alone have a token.
        let is_ours = request.headers().contains_key("authorization");
        let seen = Seen::of(request).await;
        let answer = {
            let mut server = self.lock();
            if !is_ours {
                server.seen.push(seen.clone());
            }
            (is_ours || !server.deaf).then(|| server.answer(&seen, is_ours))
        };
        match answer {
            Some(answer) => Ok(answer),
            None => std::future::pending().await,
        }
    }

    /// The answer to a request that came over another way.
    pub(crate) fn answer(&self, request: &Seen) -> Response<Body> {
        self.lock().answer(request, false)
    }

    /// Gives the rights of more manifests.
    pub(crate) fn allow(&self, manifest: &str) {
        self.lock().rights.extend(rights(manifest));
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Server> {
        self.0.lock().unwrap()
    }
}
