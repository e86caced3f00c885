//! The GPUs of the cluster's nodes as devices of the platform, by the watch of nodes.
//!
//! A node's GPUs are found with it, and lost while it is gone or not ready. They come back once no pod of the host is left there: a kubelet
//! that was cut off may still run their containers. Changed labels make new devices. A cordoned node keeps its pods and gets no others, and
//! so does for a while a node that has refused a pod. A cordoned node without shared GPUs is lost: their functions name no nodes.
//!
//! Labels count MIG devices and name none of them. The node's daemon lists them with their UUIDs each time that the node opens, and until it
//! does so the node stays closed.

use super::injection::{Injected, Mounts};
use super::nodes::{Excluded, Offer, closed, excluded, is_cordoned, lost, slim};
use super::pods::Pods;
use super::refusals::Refusal;
use super::template::{TEMPLATE, template};
use super::watching::watch;
use crate::deployment::Wants;
use crate::host::Version;
use crate::inventory::layout;
use crate::node::Node;
use anyhow::{Context as _, ensure};
use futures::TryStreamExt as _;
use futures::future::join_all;
use gshare_core::{GpuId, GpuKind, NodeId};
use gshare_sched::mig::SliceAt;
use gshare_sched::platform::{DeviceSpec, MigLayout, Part, Regime};
use gshared::nvml::Sensors;
use k8s_openapi::api::core::v1::{Node as Kubelet, PodSpec, Toleration};
use kube::runtime::watcher;
use kube::{Api, Client, ResourceExt as _};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Label of the nodes with GPUs for the host.
pub const NODE_LABEL: &str = "gshare.io/host";
/// Pause between questions to the daemons that have not listed their MIG devices.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The MIG devices of a GPU with their UUIDs; none of a GPU that is not cut.
type Cut = Option<(MigLayout, Vec<(SliceAt, String)>)>;

/// Nodes without a list of their MIG devices, each with the last reason why not.
pub type Unlisted = BTreeMap<String, (Arc<Kubelet>, String)>;

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
    /// The GPUs of nodes that are about to open, as their daemons listed them.
    listed: BTreeMap<String, Vec<Cut>>,
}

/// The GPUs of a node.
#[derive(Debug, Clone)]
struct Place {
    first: u32,
    offer: Offer,
    /// By GPU; empty where no GPU is cut.
    cut: Vec<Cut>,
    /// The newest version of its object.
    kubelet: Arc<Kubelet>,
    /// Why the node takes no pods now.
    closed: Option<String>,
    /// Whether the platform has the devices.
    given: bool,
    /// The last refusal of a pod by its kubelet since a pod was ready there.
    refusal: Option<Refusal>,
}

impl Place {
    /// Why no new pod of any function goes there.
    fn rests(&self) -> Option<Excluded> {
        if !self.offer.is_shared() {
            return None;
        }
        if is_cordoned(&self.kubelet) {
            return Some(Excluded::Cordoned);
        }
        self.refusal.as_ref()?.holds().map(|why| Excluded::Refused(why.to_owned()))
    }

    fn gpus(&self) -> impl Iterator<Item = GpuId> + use<> {
        (self.first..self.first + self.offer.count).map(GpuId::new)
    }

    fn cut(&self, gpu: GpuId) -> Option<&(MigLayout, Vec<(SliceAt, String)>)> {
        self.cut.get((gpu.number() - self.first) as usize)?.as_ref()
    }
}

impl Places {
    /// Node, number of the GPU there, and UUID of the MIG device, of a part.
    pub fn of(&self, part: &Part) -> Option<(String, u32, Option<String>)> {
        let (first, node) = self.firsts.range(..=part.gpu.number()).next_back()?;
        let number = part.gpu.number() - first;
        let here =
            self.nodes.get(node).filter(|place| place.first == *first && number < place.offer.count)?;
        let uuid = match part.slice {
            Some(slice) => Some(here.cut(part.gpu)?.1.iter().find(|(at, _)| *at == slice)?.1.clone()),
            None => None,
        };
        Some((node.clone(), number, uuid))
    }

    /// The GPU of a node with this number there.
    pub fn gpu(&self, node: &str, number: u32) -> Option<GpuId> {
        let place = self.nodes.get(node).filter(|place| number < place.offer.count)?;
        Some(GpuId::new(place.first + number))
    }

    /// The node takes pods: under its earlier numbers, if it has the same devices.
    fn take(&mut self, name: &str, offer: Offer, cut: Vec<Cut>, kubelet: &Arc<Kubelet>) {
        let layouts = |all: &[Cut]| -> Vec<Option<MigLayout>> {
            all.iter().map(|of| of.as_ref().map(|(layout, _)| layout.clone())).collect()
        };
        let same = |place: &&mut Place| place.offer == offer && layouts(&place.cut) == layouts(&cut);
        if let Some(place) = self.nodes.get_mut(name).filter(same) {
            (place.closed, place.cut, place.kubelet) = (None, cut, Arc::clone(kubelet));
            return;
        }
        let first = self.next;
        self.next += offer.count;
        self.firsts.insert(first, name.to_owned());
        let kubelet = Arc::clone(kubelet);
        let place = Place { first, offer, cut, kubelet, closed: None, given: false, refusal: None };
        self.nodes.insert(name.to_owned(), place);
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
    fn spec(&mut self, place: &Place, gpu: GpuId) -> DeviceSpec {
        let product = &place.offer.product;
        let known = self.products.iter().position(|known| known == product);
        let kind = known.unwrap_or_else(|| {
            self.products.push(product.clone());
            self.products.len() - 1
        });
        // Beyond that many products, the last ones count as equal.
        let kind = GpuKind::new(u8::try_from(kind).unwrap_or(u8::MAX).min(63));
        // The first GPU of a node names it.
        let spec = DeviceSpec::new(NodeId::new(place.first), place.offer.memory).with_kind(kind);
        match place.cut(gpu) {
            Some((layout, _)) => spec.with_mig(layout.clone()),
            None if place.offer.whole => spec.with_regime(Regime::Whole),
            None => spec,
        }
    }
}

/// The MIG devices of each of a node's GPUs, by its daemon's list.
fn cut(offer: &Offer, gpus: &[Sensors]) -> anyhow::Result<Vec<Cut>> {
    let (listed, count) = (gpus.len(), offer.count);
    ensure!(
        listed == count as usize,
        "the daemon lists {listed} GPUs, and label nvidia.com/gpu.count says {count}"
    );
    ensure!(gpus.iter().any(|gpu| !gpu.mig.is_empty()), "the daemon lists no MIG device");
    let of = |gpu: &Sensors| match gpu.mig.is_empty() {
        true => Ok(None),
        false => layout(&gpu.mig).map(Some).with_context(|| gpu.name.clone()),
    };
    gpus.iter().map(of).collect()
}

/// The demands of a version's pods on their nodes, if they have any.
fn asks(version: &Version, injected: &Injected) -> Option<PodSpec> {
    let deployment = &version.deployment;
    let has_template = deployment.annotations.iter().flatten().any(|(key, _)| key == TEMPLATE);
    let hooked = injected.mounts == Mounts::Node && !matches!(version.plan.wants, Wants::NoGpu { .. });
    if !has_template && !hooked {
        return None;
    }
    let mut spec = template(deployment).ok()?.spec?;
    if hooked {
        injected.ask(&mut spec);
    }
    if !has_template {
        // The label of the host's nodes is enough where a function says nothing of taints.
        let all = Toleration { operator: Some("Exists".into()), ..Toleration::default() };
        spec.tolerations = Some(vec![all]);
    }
    Some(spec)
}

impl Pods {
    /// The nodes that take new pods of a version; none: all.
    pub fn nodes_for(&self, version: &Version) -> Option<BTreeSet<NodeId>> {
        let (spec, places) = (asks(version, &self.injected), self.places.lock());
        // Functions that share no GPU name no nodes, and no node for them rests.
        let regime = version.deployment.annotations.as_ref().and_then(|all| all.get("gshare/regime"));
        let shares = regime.is_none_or(|regime| regime == "fractional");
        let choosy = spec.is_some() || shares && places.nodes.values().any(|place| place.rests().is_some());
        choosy.then(|| places.sift(spec.as_ref()).0)
    }

    /// The kubelet of a node has refused a pod: for a while others go elsewhere.
    pub fn node_refused(&self, node: &Arc<Node>, name: &str, why: String) {
        let pause = {
            let mut places = self.places.lock();
            let Some(place) = places.nodes.get_mut(name) else { return };
            place.refusal.insert(Refusal::after(place.refusal.as_ref(), RESTS, why)).pause
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
            place.refusal.take_if(|last| last.holds().is_none());
        }
    }

    /// Why no node takes a pod of a version.
    pub fn why_out(&self, version: &Version) -> Option<String> {
        let (spec, places) = (asks(version, &self.injected), self.places.lock());
        let out = places.sift(spec.as_ref()).1;
        let said: Vec<String> = out.iter().map(|(why, count)| format!("{count} {why}")).collect();
        let (count, open) =
            (out.values().sum::<usize>(), places.nodes.values().filter(|place| place.closed.is_none()));
        (count > 0).then(|| format!("{count} of {} nodes are out: {}", open.count(), said.join(", ")))
    }

    /// Watches the nodes, and tells the platform of their GPUs.
    pub async fn watch_nodes(self: Arc<Self>, node: Weak<Node>, client: Client) {
        let mut events = watch(Api::<Kubelet>::all(client), &format!("{NODE_LABEL}=true"));
        let (mut seen, mut unlisted) = (BTreeSet::new(), Unlisted::new());
        let mut again = tokio::time::interval(ASK_AGAIN);
        loop {
            let event = tokio::select! {
                event = events.try_next() => event,
                _ = again.tick(), if !unlisted.is_empty() => {
                    let Some(node) = node.upgrade() else { return };
                    self.list(&node, &mut unlisted).await;
                    continue;
                }
            };
            let Some(node) = node.upgrade() else { return };
            match event {
                Ok(Some(watcher::Event::Init)) => seen.clear(),
                Ok(Some(watcher::Event::InitApply(kubelet))) => {
                    seen.insert(kubelet.name_any());
                    self.see_node(&node, kubelet, &mut unlisted);
                }
                Ok(Some(watcher::Event::InitDone)) => {
                    let all: Vec<String> = self.places.lock().nodes.keys().cloned().collect();
                    for name in all.into_iter().filter(|name| !seen.contains(name)) {
                        self.close(&node, &name, "the node is gone");
                    }
                    unlisted.retain(|name, _| seen.contains(name));
                }
                Ok(Some(watcher::Event::Apply(kubelet))) => self.see_node(&node, kubelet, &mut unlisted),
                Ok(Some(watcher::Event::Delete(kubelet))) => {
                    unlisted.remove(&kubelet.name_any());
                    self.close(&node, &kubelet.name_any(), "the node is gone");
                }
                Ok(None) => return,
                Err(error) => eprintln!("openfaas: watch of nodes: {error}"),
            }
        }
    }

    /// The state of a node, by its newest version. It stays closed while it is `unlisted`.
    pub fn see_node(&self, node: &Node, kubelet: Kubelet, unlisted: &mut Unlisted) {
        let name = kubelet.name_any();
        let before = unlisted.remove(&name);
        let offer = match Offer::of(&kubelet) {
            Ok(offer) => offer,
            Err(why) => {
                eprintln!("openfaas: node {name}: {why}");
                return self.close(node, &name, &why);
            }
        };
        let lost = if offer.is_shared() { lost(&kubelet) } else { closed(&kubelet) };
        if let Some(lost) = lost {
            return self.close(node, &name, &format!("the node is {lost}"));
        }
        let known = self.places.lock().nodes.get(&name).cloned();
        if known.as_ref().is_some_and(|place| place.offer != offer) {
            self.close(node, &name, "the labels of its node were changed");
        }
        let kubelet = Arc::new(slim(kubelet));
        if known.as_ref().is_some_and(|place| place.offer == offer && place.given) {
            if let Some(place) = self.places.lock().nodes.get_mut(&name) {
                place.kubelet = Arc::clone(&kubelet);
            }
        } else {
            let listed = self.places.lock().listed.remove(&name);
            if !offer.mig.is_empty() && listed.is_none() {
                let why = before.map(|(_, why)| why).unwrap_or_default();
                unlisted.insert(name, (kubelet, why));
                return;
            }
            self.places.lock().take(&name, offer, listed.unwrap_or_default(), &kubelet);
            self.open(node, &name);
        }
        let asked = |of: &Kubelet| {
            let taints = of.spec.as_ref().and_then(|spec| spec.taints.clone());
            let offered = of.status.as_ref().and_then(|status| status.allocatable.clone());
            (of.metadata.labels.clone(), taints, offered, is_cordoned(of))
        };
        if known.is_none_or(|place| asked(&place.kubelet) != asked(&kubelet)) {
            node.host().nodes_changed(node.now());
        }
    }

    /// Asks the daemons of nodes for their MIG devices, and opens the nodes that are listed.
    pub async fn list(&self, node: &Node, unlisted: &mut Unlisted) {
        let ask = async |name: &String, kubelet: &Kubelet| {
            let offer = Offer::of(kubelet).map_err(anyhow::Error::msg)?;
            cut(&offer, &self.daemons.snapshot(name).await?.sensors)
        };
        let asks = unlisted.iter().map(async |(name, (kubelet, _))| (name.clone(), ask(name, kubelet).await));
        for (name, answer) in join_all(asks).await {
            match (answer, unlisted.get_mut(&name)) {
                (Ok(cut), Some((kubelet, _))) => {
                    let kubelet = Kubelet::clone(kubelet);
                    self.places.lock().listed.insert(name, cut);
                    self.see_node(node, kubelet, unlisted);
                }
                (Err(error), Some((_, why))) if *why != format!("{error:#}") => {
                    *why = format!("{error:#}");
                    eprintln!("openfaas: node {name}: its MIG devices: {why}");
                }
                _ => {}
            }
        }
    }

    /// Gives the GPUs of an open node to the platform, once no pod that was given up is left there.
    pub fn open(&self, node: &Node, name: &str) {
        let open = |place: &&Place| place.closed.is_none() && !place.given;
        // Asked first without the host: each end of a pod asks.
        if !self.places.lock().nodes.get(name).is_some_and(|place| open(&place)) {
            return;
        }
        // The host is locked before the places, here and in `close`: the host hears of both in their order.
        let mut host = node.host();
        if self.is_left(name) {
            return;
        }
        let mut places = self.places.lock();
        let Some(place) = places.nodes.get(name).filter(open).cloned() else { return };
        if let Some(place) = places.nodes.get_mut(name) {
            place.given = true;
        }
        for gpu in place.gpus() {
            let spec = places.spec(&place, gpu);
            if host.why_lost(gpu).is_some() {
                host.device_back(node.now(), gpu, &spec);
                continue;
            }
            let known = format!("{name}/{}", gpu.number() - place.first);
            let product = &place.offer.product;
            let shown = if product.is_empty() { known } else { format!("{product} ({known})") };
            if let Err(error) = host.find_device(node.now(), gpu, shown, spec) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::FunctionDeployment;
    use serde_json::json;

    /// A GPU as its daemon lists it, with MIG devices of these profiles.
    fn gpu(profiles: &[&str]) -> Sensors {
        let slice = |(number, profile): (usize, &&str)| json!({ "uuid": format!("MIG-{number}"), "name": format!("A100 MIG {profile}"), "memory_bytes": 1 });
        let mig: Vec<_> = profiles.iter().enumerate().map(slice).collect();
        let gpu =
            json!({ "uuids": ["GPU-0"], "name": "A100", "mig": mig, "celsius": null, "milliwatts": null });
        serde_json::from_value(gpu).unwrap()
    }

    fn offer(count: u32) -> Offer {
        let mig = [("nvidia.com/mig-1g.10gb.count".to_owned(), "2".to_owned())].into();
        let memory = gshare_core::Bytes::from_gib(80);
        Offer { count, memory, product: String::new(), whole: false, mig }
    }

    #[test]
    fn a_node_that_opens_again_keeps_its_numbers_while_its_layout_is_the_same() {
        let (mut places, node) = (Places::default(), Arc::default());
        let list = |profiles: &[&str]| cut(&offer(1), &[gpu(profiles)]).unwrap();
        places.take("a", offer(1), list(&["1g.10gb", "2g.20gb"]), &node);
        places.take("b", offer(1), list(&["1g.10gb"]), &node);
        let gpu = places.gpu("a", 0).unwrap();
        places.take("a", offer(1), list(&["1g.10gb", "2g.20gb"]), &node);
        assert_eq!((places.gpu("a", 0), places.gpu("b", 0)), (Some(gpu), Some(GpuId::new(1))));
        places.take("a", offer(1), list(&["1g.10gb", "1g.10gb"]), &node);
        assert_eq!(places.gpu("a", 0), Some(GpuId::new(2)), "its slices are others");
    }

    #[test]
    fn a_list_that_does_not_fit_the_labels_is_refused() {
        let why = |count, gpus: &[Sensors]| cut(&offer(count), gpus).unwrap_err().to_string();
        let uncut = [gpu(&[])];
        assert_eq!(why(2, &uncut), "the daemon lists 1 GPUs, and label nvidia.com/gpu.count says 2");
        assert_eq!(why(1, &uncut), "the daemon lists no MIG device");
    }

    #[test]
    fn taints_matter_to_templates_alone_and_the_hook_to_functions_with_a_gpu() {
        let injected = Injected { mounts: Mounts::Node, ..Injected::default() };
        let out = |annotations: serde_json::Value, offered: serde_json::Value| {
            let node: Kubelet = serde_json::from_value(json!({
                "metadata": { "name": "a" }, "status": { "allocatable": offered },
                "spec": { "taints": [{ "key": "team", "value": "b", "effect": "NoSchedule" }] },
            }))
            .unwrap();
            let deployment = json!({ "service": "f", "image": "localhost/f:1", "annotations": annotations });
            let deployment: FunctionDeployment = serde_json::from_value(deployment).unwrap();
            let plan = crate::deployment::Plan::of(&deployment, &BTreeMap::new()).unwrap();
            asks(&Version { deployment, plan }, &injected).and_then(|spec| excluded(&node, &spec))
        };
        let hook = || Some(Excluded::Resource("gshare.io/hook".into()));
        let taint = || Some(Excluded::Tainted("team=b:NoSchedule".into()));
        let offered = || json!({ "gshare.io/hook": "1000" });
        assert_eq!((out(json!({}), offered()), out(json!({}), json!({}))), (None, hook()));
        assert_eq!(out(json!({ "gshare/profile": "none" }), json!({})), None);
        let template = json!({ "gshare/profile": "none", "gshare/pod_template": "{}" });
        assert_eq!(out(template, json!({})), taint());
    }
}
