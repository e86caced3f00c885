//! The use of each process, with its owner: for bills, and for operators before they set limits.
//!
//! The node states each client's [`Usage`]. This list adds the process, its user and its cgroup, and keeps the last processes that
//! ended, so a program that runs for a second between two questions is not missed.

use gshare_core::{ClientId, GpuId, ServiceClass, Timestamp};
use gshare_sched::node::{ClientView, Node, NodeAction, Note, Usage};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};

/// The number of ended processes kept.
const ENDED: usize = 256;

/// A process on a device, and its use of the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessUse {
    /// Id of the client, unique in a run of the daemon.
    pub client: ClientId,
    /// Name of the instance.
    pub name: String,
    /// Process id.
    pub pid: i32,
    /// User id of the process.
    pub uid: u32,
    /// Program of the process.
    pub program: String,
    /// The service class, if the instance has one and takes part in scaling.
    #[serde(default)]
    pub class: Option<ServiceClass>,
    /// Number of the GPU.
    pub gpu: GpuId,
    /// UUID of the GPU.
    pub uuid: String,
    /// Whether the process has left the GPU.
    pub ended: bool,
    /// The cgroup of the process.
    #[serde(flatten)]
    pub owner: Owner,
    /// The use of the GPU since the process began to use it.
    #[serde(flatten)]
    pub usage: Usage,
}

/// The owner of a process, as its cgroup names it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Owner {
    /// Path of the cgroup; empty where the process cannot be seen.
    pub cgroup: String,
    /// UID of the Kubernetes pod.
    pub pod: Option<String>,
    /// Id of the container.
    pub container: Option<String>,
}

impl Owner {
    /// The owner of a process.
    fn of(pid: i32) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        // Version 2 has one line, `0::/path`. In version 1 every controller names the same container.
        let unified = text.lines().find_map(|line| line.strip_prefix("0::"));
        let path = unified.filter(|path| *path != "/").or_else(|| text.lines().next()?.splitn(3, ':').nth(2));
        Self::from_path(path.unwrap_or_default())
    }

    fn from_path(path: &str) -> Self {
        let mut owner = Self { cgroup: path.to_owned(), ..Self::default() };
        for part in path.split('/') {
            let name = part.trim_end_matches(".scope").trim_end_matches(".slice");
            // `kubepods-burstable-pod<uid>` with systemd, `pod<uid>` without.
            let uid = name.rsplit_once("pod").map(|(_, uid)| uid.replace('_', "-"));
            owner.pod = owner.pod.or(uid.filter(|uid| uid.len() == 36 && is_hex(uid)));
            // `cri-containerd-<id>`, `docker-<id>` or `libpod-<id>` with systemd, `<id>` without.
            let id = name.rsplit_once(['-', ':']).map_or(name, |(_, id)| id);
            if id.len() == 64 && is_hex(id) {
                owner.container = Some(id.to_owned());
            }
        }
        owner
    }
}

fn is_hex(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// The processes of a daemon.
#[derive(Debug, Default)]
pub(crate) struct Processes {
    present: BTreeMap<ClientId, ProcessUse>,
    /// The last ended processes, the newest first.
    ended: VecDeque<ProcessUse>,
}

impl Processes {
    /// Takes the node's actions on an event.
    pub(crate) fn observe(&mut self, now: Timestamp, node: &Node, actions: &[NodeAction]) {
        for action in actions {
            match action {
                NodeAction::Note(Note::Admitted { client, .. }) => {
                    if let Some(view) = node.client(now, *client) {
                        self.present.insert(*client, Self::of(node, &view));
                    }
                }
                NodeAction::Note(Note::Left { client, usage, .. }) => {
                    if let Some(process) = self.present.remove(client) {
                        self.ended.truncate(ENDED - 1);
                        self.ended.push_front(ProcessUse { ended: true, usage: *usage, ..process });
                    }
                }
                _ => {}
            }
        }
    }

    fn of(node: &Node, view: &ClientView) -> ProcessUse {
        let device = node.devices().find(|device| device.gpu == view.gpu);
        ProcessUse {
            client: view.client,
            name: view.name.clone(),
            pid: view.pid,
            uid: view.uid,
            program: view.program.clone(),
            class: view.class,
            gpu: view.gpu,
            uuid: device.map(|device| device.uuid.to_string()).unwrap_or_default(),
            ended: false,
            owner: Owner::of(view.pid),
            usage: view.usage,
        }
    }

    /// The present processes, then the ended ones, the newest first.
    pub(crate) fn all(&self, now: Timestamp, node: &Node) -> Vec<ProcessUse> {
        let usage = |process: &ProcessUse| node.client(now, process.client).map(|view| view.usage);
        let present = self
            .present
            .values()
            .map(|process| ProcessUse { usage: usage(process).unwrap_or(process.usage), ..process.clone() });
        present.chain(self.ended.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_names_pod_and_container() {
        let id = "0123456789abcdef".repeat(4);
        let uid = "6b1f0a34-1111-2222-3333-444455556666";
        let of = |path: String| {
            let owner = Owner::from_path(&path);
            (owner.pod, owner.container)
        };
        let both = (Some(uid.to_owned()), Some(id.clone()));
        let slice = format!("kubepods-burstable-pod{}.slice", uid.replace('-', "_"));
        assert_eq!(of(format!("/kubepods.slice/{slice}/cri-containerd-{id}.scope")), both);
        assert_eq!(of(format!("/kubepods/burstable/pod{uid}/{id}")), both);
        assert_eq!(of(format!("/system.slice/docker-{id}.scope")), (None, Some(id.clone())));
        assert_eq!(of(format!("/machine.slice/libpod-{id}.scope/container")), (None, Some(id)));
        assert_eq!(of("/user.slice/user-1000.slice/session-2.scope".into()), (None, None));
    }

    #[test]
    fn this_process_has_a_cgroup() {
        let owner = Owner::of(i32::try_from(std::process::id()).unwrap());
        assert!(owner.cgroup.starts_with('/'), "{owner:?}");
        assert_eq!(Owner::of(i32::MAX), Owner::default());
    }
}
