//! Pods of a FaSTPod: made with their placement, and read back from it. Pure.

use super::FaSTPod;
use super::shares::{self, Profiles};
use crate::kubernetes::{DOMAIN, hash, run_of, share_environment};
use gshare_core::pack::Rectangle;
use gshare_core::{Quota, ResourceSpec, RunId, SmShare};
use k8s_openapi::api::core::v1::{
    Container, EnvVar, HostPathVolumeSource, Pod, PodSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource as _, ResourceExt as _};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Whose pods these are, and no other scheduler's.
pub const SCHEDULER: &str = "gshare";
/// Label of a pod: the UID of its FaSTPod.
pub const LABEL: &str = "gshare.io/fastpod-uid";
/// Label of the nodes whose GPUs are given out.
pub const NODE_LABEL: &str = "gshare.io/fastpod";
/// Where the hook and the daemon's socket are, in a container.
const HOOK_DIR: &str = "/usr/lib/gshare";
const SOCKET_DIR: &str = "/run/gshare";

/// What containers are given of the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injected {
    /// Directory of the hook on every node.
    pub hook: PathBuf,
    /// The daemon's socket on every node; its directory is mounted.
    pub socket: PathBuf,
    /// Pipes of MPS and its shared memory, where it runs.
    pub mps: Option<(PathBuf, PathBuf)>,
}

impl Default for Injected {
    /// As the manifests put them.
    fn default() -> Self {
        Self { hook: "/opt/gshare".into(), socket: "/run/gshare/pods/gshare.sock".into(), mps: None }
    }
}

/// Where a pod is or will be.
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

    /// Reads it back; nothing if the pod has none, or somebody has changed it into nonsense.
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

/// The share that a pod was made with.
///
/// # Errors
/// When somebody has changed it into nonsense.
pub fn share(pod: &Pod) -> Result<ResourceSpec, String> {
    shares::share(pod.annotations(), &Profiles::new())
}

/// UID of the FaSTPod that a pod says it is of.
pub fn owner(pod: &Pod) -> Option<&str> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut ours = owners.filter(|owner| owner.controller == Some(true) && owner.kind == FaSTPod::kind(&()));
    ours.next().map(|owner| owner.uid.as_str())
}

/// Whether a pod is one of this FaSTPod.
pub fn is_owned(pod: &Pod, fastpod: &FaSTPod) -> bool {
    owner(pod).is_some_and(|uid| fastpod.metadata.uid.as_deref() == Some(uid))
        && pod.metadata.namespace == fastpod.metadata.namespace
}

fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
}

/// Whether it will never run again.
pub fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), "Failed" | "Succeeded")
}

/// Whether it is being deleted.
pub fn is_going(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// The node that it is bound to.
pub fn node_name(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|name| !name.is_empty())
}

/// Whether it takes requests.
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    !is_going(pod) && conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Changes whenever pods must be made anew: with what they run, their share, and their labels.
pub fn template(fastpod: &FaSTPod, share: &ResourceSpec) -> String {
    let text = serde_json::json!([fastpod.spec.pod_spec, fastpod.spec.selector, shares::annotations(share)]);
    format!("{:016x}", hash(&text.to_string()))
}

/// Whether a pod was made of this template.
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
    annotations.extend(shares::annotations(share));
    let mut labels = fastpod.spec.selector.clone().unwrap_or_default().match_labels;
    labels.insert(LABEL.into(), fastpod.uid().unwrap_or_default());
    spec.scheduler_name = Some(SCHEDULER.into());
    let full = format!("{namespace}/{name}");
    let run = run_of(&fastpod.uid().unwrap_or_default(), &full);
    inject(&mut spec, (&full, run), share, place, injected);
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

fn inject(
    spec: &mut PodSpec,
    (name, run): (&str, RunId),
    share: &ResourceSpec,
    place: &Place,
    injected: &Injected,
) {
    let socket = injected.socket.file_name().unwrap_or_default().to_string_lossy();
    let mut environment = share_environment(name, run, share, &format!("{SOCKET_DIR}/{socket}"));
    environment.push(("LD_PRELOAD", format!("{HOOK_DIR}/libgshare_hook.so")));
    environment.push(("NVIDIA_VISIBLE_DEVICES", place.gpu.to_string()));
    let socket_dir = injected.socket.parent().unwrap_or(Path::new("/"));
    let mut mounts = vec![
        ("gshare-hook", injected.hook.as_path(), HOOK_DIR, true),
        ("gshare-socket", socket_dir, SOCKET_DIR, true),
    ];
    if let Some((pipes, shm)) = &injected.mps {
        environment.push(("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps".into()));
        let percent = share.sm().to_string();
        environment.push(("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.trim_end_matches('%').into()));
        mounts.push(("gshare-mps", pipes, "/tmp/nvidia-mps", false));
        mounts.push(("gshare-shm", shm, "/dev/shm", false));
    }
    let volume = |&(name, host, ..): &(&str, &Path, &str, bool)| Volume {
        name: name.into(),
        host_path: Some(HostPathVolumeSource { path: host.display().to_string(), type_: None }),
        ..Volume::default()
    };
    spec.volumes.get_or_insert_default().extend(mounts.iter().map(volume));
    let containers = spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten());
    for container in containers {
        set_environment(container, &environment);
        let mount = |&(name, _, path, read_only): &(&str, &Path, &str, bool)| VolumeMount {
            name: name.into(),
            mount_path: path.into(),
            read_only: Some(read_only),
            ..VolumeMount::default()
        };
        container.volume_mounts.get_or_insert_default().extend(mounts.iter().map(mount));
    }
}

/// Ours in the place of what the template says under the same names.
fn set_environment(container: &mut Container, environment: &[(&'static str, String)]) {
    let all = container.env.get_or_insert_default();
    all.retain(|old| environment.iter().all(|(name, _)| old.name != *name));
    all.extend(environment.iter().map(|(name, value)| EnvVar {
        name: (*name).into(),
        value: Some(value.clone()),
        value_from: None,
    }));
}
