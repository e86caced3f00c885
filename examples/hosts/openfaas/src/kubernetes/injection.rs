//! The hook, the daemon's socket and a share in the containers of a pod. Pure.

use gshare_core::{ResourceSpec, RunId};
use k8s_openapi::api::core::v1::{
    Container, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EnvVar, HostPathVolumeSource,
    ObjectFieldSelector, PodSpec, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::path::{Path, PathBuf};

/// The extended resource of which each container of a function asks for one.
pub const RESOURCE: &str = "gshare.io/hook";
/// Annotation of a pod: the content of `share.env`.
pub const ENVIRONMENT: &str = "gshare.io/environment";

/// How a container's processes come to load the hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Injection {
    /// A read-only `/etc/ld.so.preload`: stays when a program clears its environment, leaves its `LD_PRELOAD` as it is, and
    /// is not read by the loader of musl, which could not load the hook.
    File,
    /// `LD_PRELOAD`: for images that have an `/etc/ld.so.preload` of their own, and are of glibc. A function's own
    /// `LD_PRELOAD` is loaded after the hook; a CDI spec can only set the variable, so a claim replaces its container's
    /// value.
    Environment,
}

/// Variable of a container: `NODE/GPU`, for which its pod was made.
pub const PLACE: &str = "GSHARE_PLACE";
/// Variable of a container: its GPUs, for NVIDIA's runtime.
pub(super) const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// Path of the hook in a container.
pub const HOOK: &str = "/usr/lib/gshare/libgshare_hook.so";
/// The file with a container's share, beside the hook, which reads it in any environment.
pub const SHARE: &str = "/usr/lib/gshare/share.env";
/// Directory of the daemon's socket in a container, which holds nothing else.
const SOCKET_DIR: &str = "/run/gshare";

/// How files of the node come into containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mounts {
    /// By `hostPath` volumes of the pod, which namespaces with `PodSecurity` `baseline` or `restricted` refuse.
    #[default]
    HostPath,
    /// By the node's kubelet, from the device plugin `gshare-dra --hooks`.
    Node,
}

/// A file or directory of the node that containers see.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Name of its volume.
    pub name: &'static str,
    /// Path on the node.
    pub host: PathBuf,
    /// Path in containers.
    pub container: &'static str,
    /// A directory and not a file.
    pub is_directory: bool,
    /// Containers may not write.
    pub read_only: bool,
}

impl File {
    /// A file that containers read.
    pub const fn of(name: &'static str, host: PathBuf, container: &'static str) -> Self {
        Self { name, host, container, is_directory: false, read_only: true }
    }
}

/// Files and sockets of the node that containers are given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injected {
    /// The hook on every node; beside it is the file `ld.so.preload` that names it.
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
    /// The files and directories of the node that every container of a function sees.
    pub fn files(&self) -> Vec<File> {
        let directory = |name, host, container, read_only| File {
            is_directory: true,
            read_only,
            ..File::of(name, host, container)
        };
        let socket = self.socket.parent().unwrap_or(Path::new("/"));
        let mut files = vec![
            File::of("gshare-hook", self.hook.clone(), HOOK),
            directory("gshare-socket", socket.to_owned(), SOCKET_DIR, true),
        ];
        if self.injection == Injection::File {
            files.push(File::of("gshare-preload", self.preload(), "/etc/ld.so.preload"));
        }
        if let Some((pipes, shm)) = &self.mps {
            files.push(directory("gshare-mps", pipes.clone(), "/tmp/nvidia-mps", false));
            files.push(directory("gshare-shm", shm.clone(), "/dev/shm", false));
        }
        files
    }

    /// The file on a node that names the hook.
    pub fn preload(&self) -> PathBuf {
        self.hook.with_file_name("ld.so.preload")
    }

    /// The variables of a process under the hook: the process's share, and the pipe of MPS where MPS runs. Processes with the same name
    /// and run have one share together.
    pub fn environment(
        &self,
        name: &str,
        run: RunId,
        share: &ResourceSpec,
    ) -> [Vec<(&'static str, String)>; 2] {
        let socket = self.socket.file_name().unwrap_or_default().to_string_lossy();
        let mut told = vec![
            ("GSHARE_SOCKET", format!("{SOCKET_DIR}/{socket}")),
            ("GSHARE_NAME", name.to_owned()),
            ("GSHARE_RUN", run.to_string()),
            ("GSHARE_QUOTA", share.quota().to_string()),
            ("GSHARE_SM", share.sm().to_string()),
        ];
        told.extend(share.memory_range().map(|memory| ("GSHARE_MEM", memory.to_string())));
        let (pipes, percent) = ("/tmp/nvidia-mps".to_owned(), share.sm().to_string());
        let percent = percent.trim_end_matches('%').to_owned();
        let mps = [("CUDA_MPS_PIPE_DIRECTORY", pipes), ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent)];
        [told, if self.mps.is_some() { mps.into() } else { Vec::new() }]
    }

    /// Adds the containers' resource requests to a template.
    pub fn ask(&self, spec: &mut PodSpec) {
        if self.mounts == Mounts::HostPath {
            return;
        }
        for container in containers(spec) {
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
            hook: "/opt/gshare/libgshare_hook.so".into(),
            injection: Injection::File,
            socket: "/run/gshare/pods/gshare.sock".into(),
            mps: None,
            mounts: Mounts::HostPath,
        }
    }
}

/// Brings the hook and the share on the device `NODE/GPU` into all containers. Returns the content of `share.env` for the hook, which the
/// caller puts into the annotation [`ENVIRONMENT`].
///
/// By [`Injection::File`] the hook is named in `/etc/ld.so.preload`: the loader of musl does not read it, so a container of
/// Alpine starts without the hook, and a template's own `LD_PRELOAD` stays. By [`Injection::Environment`] both are loaded,
/// and a container that is not of glibc does not start.
pub fn inject(
    spec: &mut PodSpec,
    (name, run): (&str, RunId),
    share: &ResourceSpec,
    place: &str,
    injected: &Injected,
) -> String {
    let [mut environment, mps] = injected.environment(name, run, share);
    let file = environment.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
    environment.push((PLACE, place.to_owned()));
    let gpu = place.rsplit_once('/').map_or(place, |(_, gpu)| gpu);
    environment.push((VISIBLE, gpu.to_owned()));
    environment.extend(mps);
    let field_path = format!("metadata.annotations['{ENVIRONMENT}']");
    let annotation = Some(ObjectFieldSelector { field_path, ..Default::default() });
    let item =
        DownwardAPIVolumeFile { path: "share.env".into(), field_ref: annotation, ..Default::default() };
    let told = DownwardAPIVolumeSource { items: Some(vec![item]), ..Default::default() };
    let name = "gshare-share";
    let mut volumes = vec![Volume { name: name.into(), downward_api: Some(told), ..Volume::default() }];
    let mut mounts = vec![VolumeMount { sub_path: Some("share.env".into()), ..mount(name, SHARE, true) }];
    let files = if injected.mounts == Mounts::HostPath { injected.files() } else { Vec::new() };
    for File { name, host, container, is_directory, read_only } in files {
        // A pod that is early waits for the daemon's files.
        let kind = if is_directory { "Directory" } else { "File" };
        let host = HostPathVolumeSource { path: host.display().to_string(), type_: Some(kind.into()) };
        volumes.push(Volume { name: name.into(), host_path: Some(host), ..Volume::default() });
        mounts.push(mount(name, container, read_only));
    }
    for container in containers(spec) {
        if injected.injection == Injection::Environment {
            let old = container.env.iter().flatten().find(|variable| variable.name == "LD_PRELOAD");
            let old = old.and_then(|variable| variable.value.as_deref()).filter(|value| !value.is_empty());
            let both = old.map_or(HOOK.to_owned(), |old| format!("{HOOK}:{old}"));
            set(container, &[("LD_PRELOAD", both)]);
        }
        set(container, &environment);
        container.volume_mounts.get_or_insert_default().extend(mounts.iter().cloned());
    }
    spec.volumes.get_or_insert_default().extend(volumes);
    file
}

/// All containers of a pod.
pub(super) fn containers(spec: &mut PodSpec) -> impl Iterator<Item = &mut Container> {
    spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten())
}

/// Sets variables of a container, in place of its own variables with the same names.
pub(super) fn set<K: AsRef<str>>(container: &mut Container, variables: &[(K, String)]) {
    let all = container.env.get_or_insert_default();
    all.retain(|old| variables.iter().all(|(name, _)| old.name != name.as_ref()));
    all.extend(variables.iter().map(|(name, value)| EnvVar {
        name: name.as_ref().to_owned(),
        value: Some(value.clone()),
        value_from: None,
    }));
}

/// A volume at a path of a container.
pub(super) fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.into(),
        mount_path: path.into(),
        read_only: Some(read_only),
        ..VolumeMount::default()
    }
}
