//! Pods of a FaSTPod: made with their placement, and read back from it. Pure.

use super::FaSTPod;
use super::node_hooks::RESOURCE;
use super::pod_share::{self, Profiles};
use crate::kubernetes::dra::Injection;
use crate::kubernetes::{DOMAIN, hash, run_of, share_environment};
use gshare_core::{Quota, ResourceSpec, RunId, SmShare};
use gshare_sched::pack::Rectangle;
use k8s_openapi::api::core::v1::{
    Container, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EnvVar, HostPathVolumeSource,
    ObjectFieldSelector, Pod, PodSpec, PodStatus, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource as _, ResourceExt as _};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Name of the scheduler of these pods.
pub const SCHEDULER: &str = "gshare";
/// Label of a pod: the UID of its FaSTPod.
pub const LABEL: &str = "gshare.io/fastpod-uid";
/// Label of the nodes with GPUs for FaSTPods.
pub const NODE_LABEL: &str = "gshare.io/fastpod";
/// Variable of a container: `NODE/GPU`, for which its pod was made.
const PLACE: &str = "GSHARE_PLACE";
/// Paths in a container: the hook, the file with its share beside it, and the directory of the daemon's socket.
const HOOK: &str = "/usr/lib/gshare/libgshare_hook.so";
const SHARE: &str = "/usr/lib/gshare/share.env";
const SOCKET_DIR: &str = "/run/gshare";

/// How files of the node come into containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Mounts {
    /// By `hostPath` volumes of the pod, which namespaces with `PodSecurity` `baseline` or `restricted` refuse.
    #[default]
    HostPath,
    /// By the node's kubelet, from the device plugin `fastpod --node`.
    Node,
}

/// A file or directory of the node that containers see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Name of its volume.
    name: &'static str,
    /// Path on the node.
    pub host: PathBuf,
    /// Path in containers.
    pub container: &'static str,
    /// A directory and not a file.
    pub is_directory: bool,
    /// Containers may not write.
    pub read_only: bool,
}

/// Files and sockets of the node that containers are given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injected {
    /// Directory of the hook on every node, and of the file `ld.so.preload` that names it.
    pub hook: PathBuf,
    /// How the hook is loaded.
    pub injection: Injection,
    /// The daemon's socket on every node; its directory is mounted.
    pub socket: PathBuf,
    /// Pipes of MPS and its shared memory, where it runs.
    pub mps: Option<(PathBuf, PathBuf)>,
    /// How they come into containers.
    pub mounts: Mounts,
}

impl Injected {
    /// The files and directories of the node that every container of a FaSTPod sees.
    pub fn files(&self) -> Vec<File> {
        let file =
            |name, host, container| File { name, host, container, is_directory: false, read_only: true };
        let directory = |name, host, container, read_only| File {
            is_directory: true,
            read_only,
            ..file(name, host, container)
        };
        let socket = self.socket.parent().unwrap_or(Path::new("/"));
        let mut files = vec![
            file("gshare-hook", self.hook.join("libgshare_hook.so"), HOOK),
            directory("gshare-socket", socket.to_owned(), SOCKET_DIR, true),
        ];
        if self.injection == Injection::File {
            files.push(file("gshare-preload", self.hook.join("ld.so.preload"), "/etc/ld.so.preload"));
        }
        if let Some((pipes, shm)) = &self.mps {
            files.push(directory("gshare-mps", pipes.clone(), "/tmp/nvidia-mps", false));
            files.push(directory("gshare-shm", shm.clone(), "/dev/shm", false));
        }
        files
    }

    /// Adds the containers' resource requests to a template.
    pub fn ask(&self, spec: &mut PodSpec) {
        if self.mounts == Mounts::HostPath {
            return;
        }
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            let resources = container.resources.get_or_insert_default();
            // Requests are the limits where they are left out, but for quotas.
            for asked in [&mut resources.limits, &mut resources.requests] {
                asked.get_or_insert_default().insert(RESOURCE.into(), Quantity("1".into()));
            }
        }
    }
}

impl Default for Injected {
    /// As the manifests put them.
    fn default() -> Self {
        Self {
            hook: "/opt/gshare".into(),
            injection: Injection::File,
            socket: "/run/gshare/pods/gshare.sock".into(),
            mps: None,
            mounts: Mounts::HostPath,
        }
    }
}

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

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Answers if a pod will never run again.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Failed" | "Succeeded")
}

/// Why the pod is over, by its kubelet.
pub fn failure(pod: &Pod) -> String {
    let status = pod.status.as_ref();
    let said =
        [status.and_then(|status| status.reason.clone()), status.and_then(|status| status.message.clone())];
    let said: Vec<_> = said.into_iter().flatten().filter(|text| !text.is_empty()).collect();
    if said.is_empty() { phase(pod).to_owned() } else { said.join(": ") }
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

/// Answers if a pod is being deleted.
pub fn is_going(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// The node that it is bound to.
pub fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

/// Answers if a pod takes requests.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !is_going(pod) && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
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
    let environment = inject(&mut spec, (&full, run), share, place, injected);
    annotations.insert(key("environment"), environment);
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

/// Brings the hook into all containers. Returns the content of `share.env` for the hook, from an annotation of the pod.
///
/// By [`Injection::File`] the hook is named in `/etc/ld.so.preload`: the loader of musl does not read it, so a container of
/// Alpine starts without the hook, and a template's own `LD_PRELOAD` stays. By [`Injection::Environment`] both are loaded,
/// and a container that is not of glibc does not start.
fn inject(
    spec: &mut PodSpec,
    (name, run): (&str, RunId),
    share: &ResourceSpec,
    place: &Place,
    injected: &Injected,
) -> String {
    let socket = injected.socket.file_name().unwrap_or_default().to_string_lossy();
    let mut environment = share_environment(name, run, share, &format!("{SOCKET_DIR}/{socket}"));
    let file = environment.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    environment.push((PLACE, format!("{}/{}", place.node, place.gpu)));
    environment.push(("NVIDIA_VISIBLE_DEVICES", place.gpu.to_string()));
    if injected.mps.is_some() {
        environment.push(("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps".into()));
        let percent = share.sm().to_string();
        environment.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.trim_end_matches('%').into()));
    }
    let annotation = ObjectFieldSelector {
        field_path: format!("metadata.annotations['{}']", key("environment")),
        ..ObjectFieldSelector::default()
    };
    let item =
        DownwardAPIVolumeFile { path: "share.env".into(), field_ref: Some(annotation), ..Default::default() };
    let told = DownwardAPIVolumeSource { items: Some(vec![item]), ..DownwardAPIVolumeSource::default() };
    let told = Volume { name: "gshare-share".into(), downward_api: Some(told), ..Volume::default() };
    let mut volumes = vec![told];
    let mut mounts = vec![VolumeMount {
        name: "gshare-share".into(),
        mount_path: SHARE.into(),
        sub_path: Some("share.env".into()),
        read_only: Some(true),
        ..VolumeMount::default()
    }];
    let files = if injected.mounts == Mounts::HostPath { injected.files() } else { Vec::new() };
    for File { name, host, container, is_directory, read_only } in files {
        // A pod that is early waits for the daemon's files.
        let kind = if is_directory { "Directory" } else { "File" };
        let host = HostPathVolumeSource { path: host.display().to_string(), type_: Some(kind.into()) };
        volumes.push(Volume { name: name.into(), host_path: Some(host), ..Volume::default() });
        mounts.push(VolumeMount {
            name: name.into(),
            mount_path: container.into(),
            read_only: Some(read_only),
            ..VolumeMount::default()
        });
    }
    let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    for container in containers {
        let mut environment = environment.clone();
        if injected.injection == Injection::Environment {
            let old = container.env.iter().flatten().find(|variable| variable.name == "LD_PRELOAD");
            let old = old.and_then(|variable| variable.value.as_deref()).filter(|value| !value.is_empty());
            let both = old.map_or(HOOK.to_owned(), |old| format!("{HOOK}:{old}"));
            environment.push(("LD_PRELOAD", both));
        }
        set_environment(container, &environment);
        container.volume_mounts.get_or_insert_default().extend(mounts.iter().cloned());
    }
    spec.volumes.get_or_insert_default().extend(volumes);
    file
}

/// Our values replace the template's values with the same names.
fn set_environment(container: &mut Container, environment: &[(&'static str, String)]) {
    let all = container.env.get_or_insert_default();
    all.retain(|old| environment.iter().all(|(name, _)| old.name != *name));
    all.extend(environment.iter().map(|(name, value)| EnvVar {
        name: (*name).into(),
        value: Some(value.clone()),
        value_from: None,
    }));
}
