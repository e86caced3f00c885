//! Reads objects from the API server, and makes the writes that [`reconcile`] computes.
//!
//! - **Conflict (409)**, **not found (404)**, **gone (410)** on a write: another client was faster. Pods are deleted, bound
//!   and annotated by UID, and statuses are written at the version that was read, so no other write is lost. The next look
//!   follows soon.
//! - **Refused** pods (a quota, an admission policy, an invalid `podSpec`): reported in the condition of their FaSTPod, and
//!   tried again after a growing pause ([`super::backoff`]). A refused write holds up no other.
//! - Up to `AT_ONCE` writes run at a time; pods are created last, and each namespace has its own order.
//! - **A watch** that ends or is too old (410) is started again with a list. Watches only trigger looks. They are read
//!   during looks too, so changes meanwhile cause one more look.

use super::backoff::{Backoff, WINDOW};
use super::fastpod_writes::{News, Observed, PodName, Settings, Write, degraded, news, reconcile};
use super::pods::{self, LABEL, NODE_LABEL, owner};
use super::{FaSTPod, nodes};
use crate::kubernetes::controller_metrics::{
    FASTPOD_HELD_UP, FASTPOD_LOOK_SECONDS, FASTPOD_LOOKS, FASTPOD_NODES, FASTPOD_OBJECTS, FASTPOD_REPLICAS,
    FASTPOD_WRITES, Metrics,
};
use crate::kubernetes::{hash, said};
use futures::{Stream, StreamExt as _, stream};
use gshare_openfaas::kubernetes::writes;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::runtime::{WatchStreamExt as _, watcher::Config};
use kube::{Api, Client, Resource as _, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::json;
use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// Until the next look when something did not work.
const RETRY: Duration = Duration::from_secs(2);
/// Objects of a page of a list.
const PAGE: u32 = 500;
/// Concurrent writes.
const AT_ONCE: usize = 32;
/// Field manager of the controller's writes.
pub const MANAGER: &str = "gshare-fastpod";

/// Result of a look.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Completed writes.
    pub written: usize,
    /// Writes that met something changed in between; the next look sees it.
    pub overtaken: usize,
    /// Refused writes, and faults of nodes or pods.
    pub complaints: Vec<String>,
    /// When to look again, even if nothing changes.
    pub again: Option<Duration>,
}

impl Outcome {
    fn again_in(&mut self, pause: Duration) {
        self.again = Some(self.again.map_or(pause, |again| again.min(pause)));
    }

    fn merge(&mut self, other: Self) {
        self.written += other.written;
        self.overtaken += other.overtaken;
        self.complaints.extend(other.complaints);
        if let Some(again) = other.again {
            self.again_in(again);
        }
    }

    fn overtaken(&mut self) {
        self.overtaken += 1;
        self.again_in(RETRY);
    }
}

/// Result of making the pods of a namespace.
#[derive(Default)]
struct Created {
    outcome: Outcome,
    /// Why pods were refused, by the UID of their FaSTPod.
    refused: BTreeMap<String, String>,
    /// A FaSTPod was refused that had not been before.
    is_new: bool,
}

/// The controller.
#[derive(Clone)]
pub struct Controller {
    client: Client,
    settings: Arc<Settings>,
    backoff: Arc<Mutex<Backoff>>,
    metrics: Metrics,
}

gshare_core::debug_fields!(Controller { settings });

/// Not there any more, there already, or another by now.
fn is_overtaken(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 404 | 409 | 410))
}

/// Refused for its content, not for a missing API server.
fn is_refused(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
}

impl Controller {
    /// A controller of the cluster of `client`.
    pub fn new(client: Client, settings: Settings) -> Self {
        let (backoff, metrics) = (Arc::default(), Metrics::default());
        Self { client, settings: Arc::new(settings), backoff, metrics }
    }

    /// Counts its work in these metrics.
    #[must_use]
    pub fn counting(self, metrics: Metrics) -> Self {
        Self { metrics, ..self }
    }

    /// The objects as they are now: read again each time, so that the controller's own writes are seen.
    ///
    /// # Errors
    /// When one of the lists cannot be read.
    pub async fn observe(&self) -> Result<Observed, kube::Error> {
        let labelled = |label: &str| ListParams::default().labels(label);
        let fastpods =
            pages(Api::<FaSTPod>::all(self.client.clone()), ListParams::default(), |one| one).await?;
        // The lock is not held while the API server is asked.
        let refused = self.backoff.lock().refused(&fastpods, Instant::now());
        Ok(Observed {
            refused,
            fastpods,
            pods: pages(Api::all(self.client.clone()), labelled(LABEL), pods::slim).await?,
            nodes: pages(self.nodes(), labelled(&format!("{NODE_LABEL}=true")), nodes::slim).await?,
        })
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Looks once and makes the wanted writes. A refused write does not hold up the others.
    ///
    /// # Errors
    /// When the API server could not be asked.
    pub async fn look(&self, now: &Time) -> Result<Outcome, kube::Error> {
        let began = Instant::now();
        let observed = self.observe().await?;
        let outcome = self.write_all(now, &observed).await;
        self.count(&observed, &outcome, began.elapsed());
        Ok(outcome)
    }

    fn count(&self, observed: &Observed, outcome: &Outcome, took: Duration) {
        let metrics = &self.metrics;
        metrics.add(&FASTPOD_LOOKS, None, 1.0);
        metrics.add(&FASTPOD_LOOK_SECONDS, None, took.as_secs_f64());
        let refused = outcome.complaints.len();
        for (result, count) in
            [("written", outcome.written), ("overtaken", outcome.overtaken), ("refused", refused)]
        {
            #[expect(clippy::cast_precision_loss, reason = "counts of objects")]
            metrics.add(&FASTPOD_WRITES, Some(("result", result)), count as f64);
        }
        metrics.set(&FASTPOD_OBJECTS, None, observed.fastpods.len());
        metrics.set(&FASTPOD_NODES, None, observed.nodes.len());
        let (mut wanted, mut ready, mut held_up) = (0, 0, BTreeMap::new());
        for fastpod in &observed.fastpods {
            wanted += usize::try_from(fastpod.spec.replicas).unwrap_or(0);
            let Some(status) = &fastpod.status else { continue };
            ready += usize::try_from(status.ready_replicas).unwrap_or(0);
            if let Some(condition) = degraded(status) {
                *held_up.entry(condition.reason.as_str()).or_insert(0) += 1;
            }
        }
        for (state, count) in [("wanted", wanted), ("there", observed.pods.len()), ("ready", ready)] {
            metrics.set(&FASTPOD_REPLICAS, Some(("state", state)), count);
        }
        metrics.set_all(&FASTPOD_HELD_UP, "reason", held_up);
    }

    /// Makes the writes for the observed objects.
    pub async fn write_all(&self, now: &Time, observed: &Observed) -> Outcome {
        let wanted = reconcile(now, observed, &self.settings);
        let mut outcome =
            Outcome { complaints: wanted.complaints, again: wanted.again, ..Outcome::default() };
        let mut creations: BTreeMap<String, VecDeque<&Pod>> = BTreeMap::new();
        let mut others = Vec::new();
        for write in &wanted.writes {
            match write {
                Write::Create(pod) => {
                    creations.entry(pod.namespace().unwrap_or_default()).or_default().push_back(pod);
                }
                other => others.push(other),
            }
        }
        let others = stream::iter(others).map(|write| async move { (write, self.write(write).await) });
        for (write, written) in others.buffered(AT_ONCE).collect::<Vec<_>>().await {
            match written {
                Ok(()) => outcome.written += 1,
                Err(error) if is_overtaken(&error) => outcome.overtaken(),
                Err(error) => {
                    outcome.again_in(RETRY);
                    outcome.complaints.push(format!("{}: {}", describe(write), said(&error)));
                }
            }
        }
        let (mut refused, mut is_new) = (BTreeMap::new(), false);
        let known: BTreeMap<String, &FaSTPod> =
            observed.fastpods.iter().filter_map(|one| Some((one.uid()?, one))).collect();
        let turns = Semaphore::new(AT_ONCE);
        let all = creations.into_iter().map(|(namespace, pods)| self.create(namespace, pods, &known, &turns));
        for created in futures::future::join_all(all).await {
            outcome.merge(created.outcome);
            refused.extend(created.refused);
            is_new |= created.is_new;
        }
        if is_new {
            // The places that their other pods were to have are free for others at once.
            outcome.again_in(Duration::ZERO);
        }
        if let Some(next) = self.backoff.lock().next(Instant::now()) {
            outcome.again_in(next);
        }
        let statuses = wanted.statuses.into_iter().filter_map(|told| {
            let why = refused.get(&told.uid()).map(String::as_str);
            // The room that it lacks may be what refused pods were to have: the next look knows.
            if is_new && why.is_none() && told.lacks_places() {
                return None;
            }
            let before = known.get(&told.uid()).and_then(|one| one.status.as_ref());
            let fastpod = told.write(now, why)?;
            let news = fastpod.status.as_ref().and_then(|after| news(before, after));
            Some((fastpod, news))
        });
        let statuses = stream::iter(statuses.collect::<Vec<_>>()).map(|(fastpod, news)| async move {
            let namespace = fastpod.namespace().unwrap_or_default();
            let api = Api::<FaSTPod>::namespaced(self.client.clone(), &namespace);
            let mut written = api.replace_status(&fastpod.name_any(), &post(), &fastpod).await.map(drop);
            if let (Ok(()), Some(news)) = (&written, news) {
                let api = Api::<Event>::namespaced(self.client.clone(), &namespace);
                written = api.create(&post(), &event(&fastpod, now, news)).await.map(drop);
            }
            (format!("status of {namespace}/{}", fastpod.name_any()), written)
        });
        for (what, written) in statuses.buffered(AT_ONCE).collect::<Vec<_>>().await {
            match written {
                Ok(()) => outcome.written += 1,
                Err(error) if is_overtaken(&error) => outcome.overtaken(),
                Err(error) => {
                    outcome.again_in(RETRY);
                    outcome.complaints.push(format!("{what}: {}", said(&error)));
                }
            }
        }
        outcome
    }

    /// Makes the pods of a namespace. Stops at a FaSTPod's first refused pod.
    async fn create(
        &self,
        namespace: String,
        mut pods: VecDeque<&Pod>,
        known: &BTreeMap<String, &FaSTPod>,
        turns: &Semaphore,
    ) -> Created {
        let Created { mut outcome, mut refused, mut is_new } = Created::default();
        while !pods.is_empty() {
            let most = self.backoff.lock().allowance(&namespace, Instant::now());
            if most == 0 {
                outcome.again_in(WINDOW);
                break;
            }
            let batch: Vec<_> = pods.drain(..most.min(pods.len())).collect();
            let made = batch.into_iter().map(|pod| async move {
                // Open as long as it is borrowed.
                let _turn = turns.acquire().await.ok();
                let api = Api::<Pod>::namespaced(self.client.clone(), &pod.namespace().unwrap_or_default());
                (pod, api.create(&post(), pod).await)
            });
            for (pod, made) in futures::future::join_all(made).await {
                let (uid, now) = (owner(pod).unwrap_or_default(), Instant::now());
                match made {
                    Ok(_) => {
                        self.backoff.lock().accept(uid);
                        outcome.written += 1;
                    }
                    Err(error) if is_overtaken(&error) => outcome.overtaken(),
                    Err(error) => {
                        let why = format!("create pod {namespace}/{}: {}", pod.name_any(), said(&error));
                        if is_refused(&error) {
                            let generation = known.get(uid).and_then(|one| one.metadata.generation);
                            is_new |= self.backoff.lock().refuse((&namespace, uid), generation, now, &why);
                            if refused.insert(uid.to_owned(), why.clone()).is_some() {
                                continue;
                            }
                        } else {
                            outcome.again_in(RETRY);
                        }
                        outcome.complaints.push(why);
                    }
                }
            }
            pods.retain(|pod| owner(pod).is_none_or(|uid| !refused.contains_key(uid)));
        }
        Created { outcome, refused, is_new }
    }

    async fn write(&self, write: &Write) -> Result<(), kube::Error> {
        let pods = |namespace: &str| Api::<Pod>::namespaced(self.client.clone(), namespace);
        match write {
            Write::Create(pod) => {
                pods(&pod.namespace().unwrap_or_default()).create(&post(), pod).await?;
            }
            Write::Bind(PodName { namespace, name, uid }, node) => {
                writes::bind(&pods(namespace), MANAGER, (name, uid), node).await?;
            }
            Write::Delete(PodName { namespace, name, uid }) => {
                writes::delete(&pods(namespace), (name, uid)).await?;
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

    /// Something to look at: an event of a FaSTPod, of a pod of one, or of a node. A watch that ends, is too old or cannot
    /// start is started again after a growing pause.
    pub fn changes(&self) -> impl Stream<Item = ()> + Send + use<> {
        let fastpods = Api::<FaSTPod>::all(self.client.clone());
        let pods = (Api::<Pod>::all(self.client.clone()), Config::default().labels(LABEL));
        let nodes = (self.nodes(), Config::default().labels(&format!("{NODE_LABEL}=true")));
        stream::select_all([
            events("FaSTPods", watcher(fastpods, Config::default())),
            events("pods", watcher(pods.0, pods.1)),
            events("nodes", watcher(nodes.0, nodes.1)),
        ])
    }

    /// Looks whenever something changes, until `end` is ready. Changes that come during a look are looked at together after it.
    pub async fn run(&self, end: impl Future<Output = ()>) {
        let changed = Notify::new();
        // Watches are read during looks, too: unread, they would fill up, and each part that is read would make a look.
        let watching = self.changes().for_each(|()| {
            changed.notify_one();
            std::future::ready(())
        });
        let looking = async {
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
                        eprintln!("fastpod: {}", said(&error));
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
                    () = changed.notified() => {}
                }
            }
        };
        tokio::select! {
            () = looking => {}
            () = watching => {}
        }
    }
}

/// All objects of a list, each as `slim` leaves it. They are read by pages, so that no more than one is there whole.
async fn pages<K>(api: Api<K>, parameters: ListParams, slim: fn(K) -> K) -> Result<Vec<K>, kube::Error>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut parameters = parameters.limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        all.extend(page.items.into_iter().map(slim));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(all),
        }
    }
}

fn post() -> PostParams {
    writes::post(MANAGER)
}

/// Longest note of an Event, in bytes.
const NOTE: usize = 1024;

/// An Event about a FaSTPod, in its namespace. The note has at most [`NOTE`] bytes.
fn event(fastpod: &FaSTPod, now: &Time, News { is_warning, reason, message }: News) -> Event {
    let uid = fastpod.uid().unwrap_or_default();
    let id = hash(&format!("{uid} {reason} {}", now.0.as_nanosecond()));
    let name: String = fastpod.name_any().chars().take(200).collect();
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{name}.{id:016x}")),
            namespace: fastpod.namespace(),
            ..ObjectMeta::default()
        },
        action: Some("Place".into()),
        event_time: Some(MicroTime(now.0)),
        note: Some(message[..message.floor_char_boundary(NOTE)].to_owned()),
        reason: Some(reason),
        regarding: Some(fastpod.object_ref(&())),
        reporting_controller: Some(MANAGER.into()),
        reporting_instance: Some(MANAGER.into()),
        type_: Some(if is_warning { "Warning" } else { "Normal" }.into()),
        ..Event::default()
    }
}

/// A stream that says when something has changed; errors of the watch are printed.
fn events<K>(
    what: &'static str,
    watch: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
) -> stream::BoxStream<'static, ()> {
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
