//! The GPUs of the cluster's nodes as devices of the platform, by the watch of nodes.
//!
//! A node's GPUs are found with it, and lost while it is gone or not ready. They come back once no pod of the host is left there: a kubelet
//! that was cut off may still run their containers. Changed labels make new devices. A cordoned node keeps its pods and gets no others, and
//! so does for a while a node that has refused a pod.

use super::injection::Mounts;
use super::nodes::{Excluded, excluded, gpus, is_cordoned, lost, slim};
use super::pods::Pods;
use super::template::{TEMPLATE, template};
use crate::api::FunctionDeployment;
use crate::node::Node;
use futures::{StreamExt as _, TryStreamExt as _};
use gshare_core::{Bytes, GpuId, GpuKind, NodeId};
use gshare_sched::platform::DeviceSpec;
use k8s_openapi::api::core::v1::{Node as Kubelet, PodSpec};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, ResourceExt as _};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Label of the nodes with GPUs for the host.
pub const NODE_LABEL: &str = "gshare.io/host";
/// Label of a node with the name of its GPUs, by NVIDIA's GPU feature discovery.
const PRODUCT: &str = "nvidia.com/gpu.product";

/// First and longest pause after a pod that a kubelet refused, in which no other pod goes to its node.
const RESTS: (Duration, Duration) = (Duration::from_mins(1), Duration::from_mins(10));

/// The numbers of all GPUs.
#[derive(Debug, Default)]
pub struct Places {
    nodes: BTreeMap<String, Place>,
    /// Nodes by the number of their first GPU.
    firsts: BTreeMap<u32, String>,
    next: u32,
    products: Vec<String>,
}

/// The GPUs of a node.
#[derive(Debug, Clone)]
struct Place {
    first: u32,
    count: u32,
    memory: Bytes,
    product: String,
    /// The newest version of its object.
    kubelet: Arc<Kubelet>,
    /// Why the node takes no pods now.
    closed: Option<String>,
    /// Whether the platform has the devices.
    given: bool,
    /// The last refusal of a pod by its kubelet since a pod was ready there.
    refusal: Option<Refusal>,
}

/// Until when no other pod goes to a node, for how long, and why.
#[derive(Debug, Clone)]
struct Refusal {
    until: Instant,
    pause: Duration,
    why: String,
}

impl Place {
    /// Why no new pod of any function goes there.
    fn rests(&self) -> Option<Excluded> {
        if is_cordoned(&self.kubelet) {
            return Some(Excluded::Cordoned);
        }
        let refusal = self.refusal.as_ref().filter(|refusal| Instant::now() < refusal.until)?;
        Some(Excluded::Refused(refusal.why.clone()))
    }

    fn gpus(&self) -> impl Iterator<Item = GpuId> + use<> {
        (self.first..self.first + self.count).map(GpuId::new)
    }
}

impl Places {
    /// Node, and number of the GPU there.
    pub fn of(&self, gpu: GpuId) -> Option<(String, u32)> {
        let (first, node) = self.firsts.range(..=gpu.number()).next_back()?;
        let number = gpu.number() - first;
        let here = self.nodes.get(node).filter(|place| place.first == *first && number < place.count);
        here.map(|_| (node.clone(), number))
    }

    /// The GPU of a node with this number there.
    pub fn gpu(&self, node: &str, number: u32) -> Option<GpuId> {
        let place = self.nodes.get(node).filter(|place| number < place.count)?;
        Some(GpuId::new(place.first + number))
    }

    /// The nodes with GPUs that the platform has.
    pub fn given(&self) -> Vec<String> {
        let given = self.nodes.iter().filter(|(_, place)| place.given);
        given.map(|(name, _)| name.clone()).collect()
    }

    /// The nodes that take pods of a spec when they are open, and why open ones do not.
    fn sift(&self, spec: Option<&PodSpec>) -> (BTreeSet<NodeId>, BTreeMap<Excluded, usize>) {
        let (mut taken, mut out) = (BTreeSet::new(), BTreeMap::new());
        for place in self.nodes.values() {
            match place.rests().or_else(|| excluded(&place.kubelet, spec?)) {
                None => drop(taken.insert(NodeId::new(place.first))),
                Some(why) if place.closed.is_none() => *out.entry(why).or_default() += 1,
                Some(_) => {}
            }
        }
        (taken, out)
    }

    /// The description of a GPU for the platform.
    fn spec(&mut self, place: &Place) -> DeviceSpec {
        let known = self.products.iter().position(|product| *product == place.product);
        let kind = known.unwrap_or_else(|| {
            self.products.push(place.product.clone());
            self.products.len() - 1
        });
        // Beyond that many products, the last ones count as equal.
        let kind = GpuKind::new(u8::try_from(kind).unwrap_or(u8::MAX).min(63));
        // The first GPU of a node names it.
        DeviceSpec::new(NodeId::new(place.first), place.memory).with_kind(kind)
    }
}

impl Pods {
    /// What the pods of a deployment ask of their nodes; none: nothing.
    fn asks(&self, deployment: &FunctionDeployment) -> Option<PodSpec> {
        let has_template = deployment.annotations.iter().flatten().any(|(key, _)| key == TEMPLATE);
        if !has_template && self.injected().mounts == Mounts::HostPath {
            return None;
        }
        let mut spec = template(deployment).ok()?.spec?;
        self.injected().ask(&mut spec);
        Some(spec)
    }

    /// The nodes that take new pods of a deployment; none: all.
    pub fn nodes_for(&self, deployment: &FunctionDeployment) -> Option<BTreeSet<NodeId>> {
        let (spec, places) = (self.asks(deployment), self.places.lock());
        let choosy = spec.is_some() || places.nodes.values().any(|place| place.rests().is_some());
        choosy.then(|| places.sift(spec.as_ref()).0)
    }

    /// The kubelet of a node has refused a pod: for a while others go elsewhere.
    pub fn node_refused(&self, node: &Arc<Node>, name: &str, why: String) {
        let pause = {
            let mut places = self.places.lock();
            let Some(place) = places.nodes.get_mut(name) else { return };
            let pause = place.refusal.as_ref().map_or(RESTS.0, |last| (last.pause * 2).min(RESTS.1));
            place.refusal = Some(Refusal { until: Instant::now() + pause, pause, why });
            pause
        };
        node.host().nodes_changed(node.now());
        let weak = Arc::downgrade(node);
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            if let Some(node) = weak.upgrade() {
                node.host().nodes_changed(node.now());
            }
        });
    }

    /// A pod is ready on a node: a later refusal is a first one.
    pub fn works(&self, name: &str) {
        if let Some(place) = self.places.lock().nodes.get_mut(name) {
            place.refusal.take_if(|last| last.until <= Instant::now());
        }
    }

    /// Why no node takes a pod of a deployment.
    pub fn why_out(&self, deployment: &FunctionDeployment) -> Option<String> {
        let (spec, places) = (self.asks(deployment), self.places.lock());
        let out = places.sift(spec.as_ref()).1;
        let said: Vec<String> = out.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let (count, open) =
            (out.values().sum::<usize>(), places.nodes.values().filter(|place| place.closed.is_none()));
        (count > 0).then(|| format!("{count} of {} nodes are out: {}", open.count(), said.join(", ")))
    }

    /// Watches the nodes, and tells the platform of their GPUs.
    pub async fn watch_nodes(self: Arc<Self>, node: Weak<Node>, client: Client) {
        let config = watcher::Config::default().labels(&format!("{NODE_LABEL}=true"));
        let mut events = watcher(Api::<Kubelet>::all(client), config).default_backoff().boxed();
        let mut seen = BTreeSet::new();
        loop {
            let event = events.try_next().await;
            let Some(node) = node.upgrade() else { return };
            match event {
                Ok(Some(watcher::Event::Init)) => seen.clear(),
                Ok(Some(watcher::Event::InitApply(kubelet))) => {
                    seen.insert(kubelet.name_any());
                    self.see_node(&node, &slim(kubelet));
                }
                Ok(Some(watcher::Event::InitDone)) => {
                    let all: Vec<String> = self.places.lock().nodes.keys().cloned().collect();
                    for name in all.into_iter().filter(|name| !seen.contains(name)) {
                        self.close(&node, &name, "the node is gone");
                    }
                }
                Ok(Some(watcher::Event::Apply(kubelet))) => self.see_node(&node, &slim(kubelet)),
                Ok(Some(watcher::Event::Delete(kubelet))) => {
                    self.close(&node, &kubelet.name_any(), "the node is gone");
                }
                Ok(None) => return,
                Err(error) => eprintln!("openfaas: watch of nodes: {error}"),
            }
        }
    }

    /// The state of a node, by its newest version.
    pub fn see_node(&self, node: &Node, kubelet: &Kubelet) {
        let name = kubelet.name_any();
        let (count, memory) = match gpus(kubelet) {
            Ok(found) => found,
            Err(why) => {
                eprintln!("openfaas: node {name}: {why}");
                return self.close(node, &name, &why);
            }
        };
        if let Some(lost) = lost(kubelet) {
            return self.close(node, &name, &format!("the node is {lost}"));
        }
        let product = kubelet.labels().get(PRODUCT).cloned().unwrap_or_default();
        let known = self.places.lock().nodes.get(&name).cloned();
        let same = |place: &Place| (place.count, place.memory, &place.product) == (count, memory, &product);
        if known.as_ref().is_some_and(|place| !same(place)) {
            self.close(node, &name, "the labels of its node were changed");
        }
        let kubelet = Arc::new(kubelet.clone());
        {
            let mut places = self.places.lock();
            match places.nodes.get_mut(&name).filter(|place| same(place)) {
                Some(place) => (place.closed, place.kubelet) = (None, Arc::clone(&kubelet)),
                None => {
                    let first = places.next;
                    places.next += count;
                    places.firsts.insert(first, name.clone());
                    let kubelet = Arc::clone(&kubelet);
                    let place = Place {
                        first,
                        count,
                        memory,
                        product,
                        kubelet,
                        closed: None,
                        given: false,
                        refusal: None,
                    };
                    places.nodes.insert(name.clone(), place);
                }
            }
        }
        self.open(node, &name);
        let asked = |of: &Kubelet| {
            let taints = of.spec.as_ref().and_then(|spec| spec.taints.clone());
            let offered = of.status.as_ref().and_then(|status| status.allocatable.clone());
            (of.metadata.labels.clone(), taints, offered, is_cordoned(of))
        };
        if known.is_none_or(|place| asked(&place.kubelet) != asked(&kubelet)) {
            node.host().nodes_changed(node.now());
        }
    }

    /// Gives the GPUs of an open node to the platform, once no pod that was given up is left there.
    pub fn open(&self, node: &Node, name: &str) {
        // The host is locked before the places, here and in `close`: the host hears of both in their order.
        let mut host = node.host();
        if self.is_left(name) {
            return;
        }
        let mut places = self.places.lock();
        let open = |place: &&Place| place.closed.is_none() && !place.given;
        let Some(place) = places.nodes.get(name).filter(open).cloned() else { return };
        let spec = places.spec(&place);
        if let Some(place) = places.nodes.get_mut(name) {
            place.given = true;
        }
        for gpu in place.gpus() {
            if host.why_lost(gpu).is_some() {
                host.device_back(node.now(), gpu, &spec);
                continue;
            }
            let known = format!("{name}/{}", gpu.number() - place.first);
            let shown = if place.product.is_empty() { known } else { format!("{} ({known})", place.product) };
            if let Err(error) = host.find_device(node.now(), gpu, shown, spec.clone()) {
                eprintln!("openfaas: node {name}: {}", error.message);
            }
        }
    }

    /// Takes the GPUs of a node from the platform, with their instances.
    fn close(&self, node: &Node, name: &str, why: &str) {
        let mut host = node.host();
        let mut places = self.places.lock();
        let Some(place) = places.nodes.get_mut(name) else { return };
        place.closed = Some(why.to_owned());
        if !core::mem::replace(&mut place.given, false) {
            return;
        }
        for gpu in place.gpus() {
            host.lose_device(node.now(), gpu, &format!("{name}: {why}"));
        }
    }
}
