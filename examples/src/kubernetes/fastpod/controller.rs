//! Asks the API server what there is, and writes what [`reconcile`] wants.
//!
//! - **Conflict (409)**, **not found (404)**, **gone (410)** on a write: somebody else was faster. Pods are deleted, bound and
//!   annotated by their UID and statuses written at the version they were read at, so nothing of theirs is overwritten; the next
//!   look, soon after, sees what there is now.
//! - **Refused** pods (a quota, an admission policy, a `podSpec` that is none): said in the condition of their FaSTPod, and
//!   tried again after a while. One write that is refused keeps no other back.
//! - **A watch** that ends or has gone too far back (410) is begun anew by a list. Watches only say when to look.

use super::FaSTPod;
use super::core::{Observed, PodName, Settings, Write, reconcile};
use super::pods::{LABEL, NODE_LABEL, owner};
use futures::{FutureExt as _, Stream, StreamExt as _};
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::watcher;
use kube::runtime::{WatchStreamExt as _, watcher::Config};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// Until the next look when something did not work.
const RETRY: Duration = Duration::from_secs(2);
/// The same when the API server would not have a pod: that seldom mends by itself.
const RETRY_REFUSED: Duration = Duration::from_secs(30);
/// Who writes, in the books of the API server.
pub const MANAGER: &str = "gshare-fastpod";

/// What came of a look.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Writes that were done.
    pub written: usize,
    /// Writes that met something changed in between; the next look sees it.
    pub overtaken: usize,
    /// Writes that were refused, and what is wrong with nodes or pods.
    pub complaints: Vec<String>,
    /// When to look again, even if nothing changes.
    pub again: Option<Duration>,
}

impl Outcome {
    fn again_in(&mut self, pause: Duration) {
        self.again = Some(self.again.map_or(pause, |again| again.min(pause)));
    }

    fn overtaken(&mut self) {
        self.overtaken += 1;
        self.again_in(RETRY);
    }
}

/// The controller.
#[derive(Clone)]
pub struct Controller {
    client: Client,
    settings: Arc<Settings>,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// Not there any more, there already, or another by now.
fn is_overtaken(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 404 | 409 | 410))
}

/// Refused for what it is, not for want of an API server.
fn is_refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
}

impl Controller {
    /// Of the cluster of `client`.
    pub fn new(client: Client, settings: Settings) -> Self {
        Self { client, settings: Arc::new(settings) }
    }

    /// What there is: read anew each time, so that its own writes are seen.
    ///
    /// # Errors
    /// When one of the lists cannot be read.
    pub async fn observe(&self) -> Result<Observed, kube::Error> {
        let labelled = |label: &str| ListParams::default().labels(label);
        Ok(Observed {
            fastpods: Api::<FaSTPod>::all(self.client.clone()).list(&ListParams::default()).await?.items,
            pods: Api::<Pod>::all(self.client.clone()).list(&labelled(LABEL)).await?.items,
            nodes: self.nodes().list(&labelled(&format!("{NODE_LABEL}=true"))).await?.items,
        })
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Looks once, and writes what is wanted. One write that is refused does not keep the others back.
    ///
    /// # Errors
    /// When the API server could not be asked.
    pub async fn look(&self, now: &Time) -> Result<Outcome, kube::Error> {
        let observed = self.observe().await?;
        Ok(self.write_all(now, &observed).await)
    }

    /// Writes what is wanted of what was observed.
    pub async fn write_all(&self, now: &Time, observed: &Observed) -> Outcome {
        let wanted = reconcile(now, observed, &self.settings);
        let mut outcome =
            Outcome { complaints: wanted.complaints, again: wanted.again, ..Outcome::default() };
        let mut refused = BTreeMap::new();
        for write in &wanted.writes {
            match self.write(write).await {
                Ok(()) => outcome.written += 1,
                Err(error) if is_overtaken(&error) => outcome.overtaken(),
                Err(error) => {
                    let why = format!("{}: {error}", describe(write));
                    match write {
                        Write::Create(pod) if is_refused(&error) => {
                            outcome.again_in(RETRY_REFUSED);
                            refused.insert(owner(pod).unwrap_or_default().to_owned(), why.clone());
                        }
                        _ => outcome.again_in(RETRY),
                    }
                    outcome.complaints.push(why);
                }
            }
        }
        for told in wanted.statuses {
            let why = refused.get(&told.uid()).map(String::as_str);
            let Some(fastpod) = told.write(now, why) else { continue };
            let namespace = fastpod.namespace().unwrap_or_default();
            let api = Api::<FaSTPod>::namespaced(self.client.clone(), &namespace);
            match api.replace_status(&fastpod.name_any(), &post(), &fastpod).await {
                Ok(_) => outcome.written += 1,
                Err(error) if is_overtaken(&error) => outcome.overtaken(),
                Err(error) => {
                    outcome.again_in(RETRY);
                    outcome.complaints.push(format!("status of {namespace}/{}: {error}", fastpod.name_any()));
                }
            }
        }
        outcome
    }

    async fn write(&self, write: &Write) -> Result<(), kube::Error> {
        let pods = |namespace: &str| Api::<Pod>::namespaced(self.client.clone(), namespace);
        match write {
            Write::Create(pod) => {
                pods(&pod.namespace().unwrap_or_default()).create(&post(), pod).await?;
            }
            Write::Bind(PodName { namespace, name, uid }, node) => {
                let binding = Binding {
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        namespace: Some(namespace.clone()),
                        // Of this pod, and not of another one of its name.
                        uid: Some(uid.clone()),
                        ..ObjectMeta::default()
                    },
                    target: ObjectReference {
                        api_version: Some("v1".into()),
                        kind: Some("Node".into()),
                        name: Some(node.clone()),
                        ..ObjectReference::default()
                    },
                };
                let bound: serde_json::Value =
                    pods(namespace).create_subresource("binding", name, &post(), &binding).await?;
                drop(bound);
            }
            Write::Delete(PodName { namespace, name, uid }) => {
                let only = Preconditions { uid: Some(uid.clone()), resource_version: None };
                let parameters = DeleteParams { preconditions: Some(only), ..DeleteParams::default() };
                pods(namespace).delete(name, &parameters).await?;
            }
            Write::Note(PodName { namespace, name, uid }, annotations) => {
                // With another UID the patch is a conflict.
                let patch = json!({"metadata": {"uid": uid, "annotations": annotations}});
                let manager = PatchParams { field_manager: Some(MANAGER.into()), ..PatchParams::default() };
                pods(namespace).patch(name, &manager, &Patch::Merge(patch)).await?;
            }
        }
        Ok(())
    }

    /// Something to look at: an event of a FaSTPod, of a pod of one, or of a node. A watch that ends or is too old is
    /// begun anew, with a pause that grows; so is one that cannot be begun.
    pub fn changes(&self) -> impl Stream<Item = ()> + Send + use<> {
        let fastpods = Api::<FaSTPod>::all(self.client.clone());
        let pods = (Api::<Pod>::all(self.client.clone()), Config::default().labels(LABEL));
        let nodes = (self.nodes(), Config::default().labels(&format!("{NODE_LABEL}=true")));
        futures::stream::select_all([
            events("FaSTPods", watcher(fastpods, Config::default())),
            events("pods", watcher(pods.0, pods.1)),
            events("nodes", watcher(nodes.0, nodes.1)),
        ])
    }

    /// Looks whenever something changes, until `end` is ready.
    pub async fn run(&self, end: impl Future<Output = ()>) {
        let mut changes = pin!(self.changes());
        let mut end = pin!(end);
        loop {
            let again = match self.look(&Time(k8s_openapi::jiff::Timestamp::now())).await {
                Ok(outcome) => {
                    for complaint in &outcome.complaints {
                        eprintln!("fastpod: {complaint}");
                    }
                    outcome.again
                }
                Err(error) => {
                    eprintln!("fastpod: {error}");
                    Some(RETRY)
                }
            };
            let pause = async {
                match again {
                    Some(again) => tokio::time::sleep(again).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut end => return,
                () = pause => {}
                _ = changes.next() => {}
            }
            // What came together is looked at together.
            while let Some(Some(())) = changes.next().now_or_never() {}
        }
    }
}

fn post() -> PostParams {
    PostParams { field_manager: Some(MANAGER.into()), ..PostParams::default() }
}

/// That something happened; why not is told.
fn events<K>(
    what: &'static str,
    watch: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
) -> futures::stream::BoxStream<'static, ()> {
    let told = watch.default_backoff().map(move |event| {
        if let Err(error) = event {
            eprintln!("fastpod: watch of {what}: {error}");
        }
    });
    told.boxed()
}

fn describe(write: &Write) -> String {
    let pod = |pod: &PodName| format!("{}/{}", pod.namespace, pod.name);
    match write {
        Write::Create(made) => {
            format!("create pod {}/{}", made.namespace().unwrap_or_default(), made.name_any())
        }
        Write::Bind(name, node) => format!("bind pod {} to {node}", pod(name)),
        Write::Delete(name) => format!("delete pod {}", pod(name)),
        Write::Note(name, _) => format!("annotate pod {}", pod(name)),
    }
}
