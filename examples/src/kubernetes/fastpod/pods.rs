//! Pods of a FaSTPod: made with their placement, and read back from it. Pure.

use super::FaSTPod;
use super::pod_share::{self, Profiles};
use crate::kubernetes::{DOMAIN, hash, run_of};
use gshare_core::{Quota, ResourceSpec, SmShare};
use gshare_openfaas::kubernetes::injection::{ENVIRONMENT, PLACE, inject};
pub use gshare_openfaas::kubernetes::injection::{File, Injected, Mounts};
pub use gshare_openfaas::kubernetes::pod_state::{failure, is_going, is_over, is_ready, node_name};
use gshare_sched::pack::Rectangle;
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource as _, ResourceExt as _};
use serde_json::Value;
use std::collections::BTreeMap;

/// Name of the scheduler of these pods.
pub const SCHEDULER: &str = "gshare";
/// Label of a pod: the UID of its FaSTPod.
pub const LABEL: &str = "gshare.io/fastpod-uid";
/// Label of the nodes with GPUs for FaSTPods.
pub const NODE_LABEL: &str = "gshare.io/fastpod";

/// The place of a pod, now or once it is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The node.
    pub node: String,
    /// Number of the GPU there.
    pub gpu: u32,
    /// The part of the GPU.
    pub rectangle: Rectangle,
}

fn key(name: &str) -> String {
    format!("{DOMAIN}/{name}")
}

impl Place {
    /// As annotations.
    pub fn annotations(&self) -> BTreeMap<String, String> {
        let Rectangle { time_offset, sm_offset, quota, sm } = self.rectangle;
        let rectangle = format!("{},{},{},{}", time_offset.get(), sm_offset.get(), quota.get(), sm.get());
        [(key("node"), self.node.clone()), (key("gpu"), self.gpu.to_string()), (key("rectangle"), rectangle)]
            .into()
    }

    /// Reads it back; nothing if the pod has none, or it was changed into nonsense.
    pub fn of(pod: &Pod) -> Option<Self> {
        let annotation = |name: &str| pod.annotations().get(&key(name));
        let mut numbers = annotation("rectangle")?.split(',').map(|number| number.parse::<u16>().ok());
        let mut next = || numbers.next().flatten();
        let rectangle = Rectangle {
            time_offset: Quota::new(next()?)?,
            sm_offset: SmShare::new(next()?)?,
            quota: Quota::new(next()?)?,
            sm: SmShare::new(next()?)?,
        };
        Some(Self { node: annotation("node")?.clone(), gpu: annotation("gpu")?.parse().ok()?, rectangle })
    }
}

/// The GPU and share that a pod was given when it was made, from the environment of its containers: the spec of a pod never
/// changes, where its annotations may be edited by its tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Given {
    /// Name of the node.
    pub node: String,
    /// Number of the GPU there.
    pub gpu: u32,
    /// Share of the GPU: time, SMs and memory.
    pub share: ResourceSpec,
}

impl Given {
    /// Reads it back. A pod of an older controller has it in its annotations alone; nothing if they make no sense.
    pub fn of(pod: &Pod) -> Option<Self> {
        let spec = pod.spec.as_ref()?;
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        let mut environments = containers.filter_map(|container| container.env.as_deref());
        let value = |environment: &'_ [EnvVar], name: &str| {
            let found = environment.iter().find(|variable| variable.name == name);
            found.and_then(|variable| variable.value.clone())
        };
        let Some(told) = environments.find(|environment| value(environment, PLACE).is_some()) else {
            let Place { node, gpu, .. } = Place::of(pod)?;
            let share = pod_share::share(pod.annotations(), &Profiles::new()).ok()?;
            return Some(Self { node, gpu, share });
        };
        let place = value(told, PLACE)?;
        let (node, gpu) = place.rsplit_once('/')?;
        let (quota, sm) =
            (value(told, "GSHARE_QUOTA")?.parse().ok()?, value(told, "GSHARE_SM")?.parse().ok()?);
        let memory = match value(told, "GSHARE_MEM") {
            Some(memory) => Some(memory.parse().ok()?),
            None => None,
        };
        let share = ResourceSpec::new(quota, sm, None).ok()?;
        let share = memory.map_or(share, |memory| share.with_memory(memory));
        Some(Self { node: node.to_owned(), gpu: gpu.parse().ok()?, share })
    }
}

/// A pod without the parts that are not looked at: the controller has all pods of FaSTPods in memory.
pub fn slim(mut pod: Pod) -> Pod {
    pod.metadata.managed_fields = None;
    pod.spec = pod.spec.map(|spec| {
        let containers = spec.containers.into_iter().chain(spec.init_containers.into_iter().flatten());
        let told = containers.map(|container| {
            let mut env = container.env.unwrap_or_default();
            env.retain(|variable| variable.name.starts_with("GSHARE_"));
            env.shrink_to_fit();
            Container { name: container.name, env: Some(env), ..Container::default() }
        });
        PodSpec { node_name: spec.node_name, containers: told.collect(), ..PodSpec::default() }
    });
    pod.status = pod.status.map(|status| {
        let PodStatus { phase, reason, message, mut conditions, .. } = status;
        conditions.iter_mut().for_each(|all| all.retain(|condition| condition.type_ == "Ready"));
        PodStatus { phase, reason, message, conditions, ..PodStatus::default() }
    });
    pod
}

/// UID of the FaSTPod that a pod says it is of.
pub fn owner(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut ours = owners.filter(|owner| {
        owner.controller == Some(true)
            && owner.kind == FaSTPod::kind(&())
            && owner.api_version.split_once('/').is_some_and(|(group, _)| group == FaSTPod::group(&()))
    });
    ours.next().map(|owner| owner.uid.as_str())
}

/// Answers if a pod is one of this FaSTPod.
pub fn is_owned(pod: &Pod, fastpod: &FaSTPod) -> bool {
    owner(pod).is_some_and(|uid| fastpod.metadata.uid.as_deref() == Some(uid))
        && pod.metadata.namespace == fastpod.metadata.namespace
}

/// The pod spec of a template. A field that pods do not have is an error: dropped silently, a mistyped `resources` would run
/// without its limits.
///
/// # Errors
/// Names the field.
pub fn decode(template: &Value) -> Result<PodSpec, String> {
    let spec: PodSpec = serde_path_to_error::deserialize(template).map_err(|error| {
        let path = error.path().to_string();
        let path = if path == "." { String::new() } else { format!(".{path}") };
        format!("podSpec{path}: {}", error.inner())
    })?;
    let kept = serde_json::to_value(&spec).map_err(|error| format!("podSpec: {error}"))?;
    unknown(template, &kept, "podSpec").map_or(Ok(spec), Err)
}

/// The first field of `given` that was not read.
fn unknown(given: &Value, kept: &Value, path: &str) -> Option<String> {
    match (given, kept) {
        (Value::Object(given), Value::Object(kept)) => {
            given.iter().filter(|(_, value)| !value.is_null()).find_map(|(key, value)| match kept.get(key) {
                Some(kept) => unknown(value, kept, &format!("{path}.{key}")),
                None => Some(format!("{path}.{key}: no field of a pod")),
            })
        }
        (Value::Array(given), Value::Array(kept)) => {
            let mut both = given.iter().zip(kept).enumerate();
            both.find_map(|(index, (given, kept))| unknown(given, kept, &format!("{path}[{index}]")))
        }
        _ => None,
    }
}

/// Changes whenever pods must be made again: with their template, their share, or their labels.
pub fn template(fastpod: &FaSTPod, share: &ResourceSpec) -> String {
    let text =
        serde_json::json!([fastpod.spec.pod_spec, fastpod.spec.selector, pod_share::annotations(share)]);
    format!("{:016x}", hash(&text.to_string()))
}

/// Answers if a pod was made of this template.
pub fn is_of(pod: &Pod, template: &str) -> bool {
    pod.annotations().get(&key("template")).is_some_and(|of| of == template)
}

/// Name of the pod with a number, which no other FaSTPod's has.
pub fn name(fastpod: &FaSTPod, number: usize) -> String {
    let uid = hash(&fastpod.uid().unwrap_or_default()) & 0xf_ffff;
    let name: String = fastpod.name_any().chars().take(200).collect();
    format!("{}-{uid:05x}-{number}", name.trim_end_matches(['.', '-']))
}

/// The pod of a FaSTPod with a name, at its place.
pub fn pod(
    fastpod: &FaSTPod,
    name: &str,
    mut spec: PodSpec,
    share: &ResourceSpec,
    place: &Place,
    injected: &Injected,
) -> Pod {
    let namespace = fastpod.namespace().unwrap_or_default();
    let mut annotations = place.annotations();
    annotations.insert(key("template"), template(fastpod, share));
    annotations.extend(pod_share::annotations(share));
    let mut labels = fastpod.spec.selector.clone().unwrap_or_default().match_labels;
    labels.insert(LABEL.into(), fastpod.uid().unwrap_or_default());
    spec.scheduler_name = Some(SCHEDULER.into());
    let full = format!("{namespace}/{name}");
    let run = run_of(&fastpod.uid().unwrap_or_default(), &full);
    let at = format!("{}/{}", place.node, place.gpu);
    let environment = inject(&mut spec, (&full, run), share, &at, injected);
    annotations.insert(ENVIRONMENT.into(), environment);
    Pod {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace),
            annotations: Some(annotations),
            labels: Some(labels),
            owner_references: Some(fastpod.controller_owner_ref(&()).into_iter().collect()),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        ..Pod::default()
    }
}
