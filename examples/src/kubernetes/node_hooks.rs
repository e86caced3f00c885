//! The part of a node in the injection of functions: the kubelet brings hook and socket into containers, instead of volumes
//! of the pod.
//!
//! # Problem
//! A pod needs `hostPath` volumes for files of its node, but namespaces with `PodSecurity` `baseline` or `restricted`
//! refuse these. Both levels allow the pod's share in its environment and in a volume of its annotations. Files of the node
//! (hook, `ld.so.preload`, the daemon's socket, MPS) must come from the node.
//!
//! # What works on a node
//! - A pod's annotation `cdi.k8s.io/...` does not: containerd and CRI-O read such annotations, and the field `CDIDevices`
//!   of the CRI, of the *container* that the kubelet describes, and the kubelet takes both from device plugins and drivers
//!   of Dynamic Resource Allocation alone. Pods' own annotations reach the sandbox only. So a tenant can neither ask for
//!   CDI devices nor be given them by a controller.
//! - A **device plugin** does: a container that asks for the extended resource [`RESOURCE`] gets the plugin's answer to `Allocate`. Every
//!   runtime supports mounts. CDI devices need a runtime with CDI enabled (containerd 1.7 with `enable_cdi = true`, 2.0 and later by
//!   default; CRI-O 1.23): a containerd 1.7 without it silently starts the container *without* them, and the program would run without its
//!   limits. So the plugin answers with mounts, and with CDI only by the operator's `--by-cdi`.
//!
//! # Algorithm
//! The kubelet's plugin watcher finds the plugin, like a driver, also after a restart of the kubelet. It offers `slots`
//! devices, of which each container takes one: they count nothing, since the host places the shares. The devices
//! are healthy while all files exist: a node without the files offers no device, and the host sends it no pod
//! ([`Excluded::Resource`](gshare_openfaas::kubernetes::nodes::Excluded::Resource)). A kubelet would start a pod with an unknown resource.
//!
//! With `--by-cdi` the plugin writes one CDI spec at its start, for all containers of the node.

use super::kubelet::device_plugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use super::kubelet::device_plugin::*;
use crate::kubernetes::controller_metrics::Metrics;
use crate::kubernetes::dra::cdi;
use crate::kubernetes::plugin::{Sockets, serve};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use gshare_openfaas::kubernetes::injection::{File, Injected, RESOURCE};
use gshare_openfaas::records::{replace, sweep};
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status};

/// Name of the plugin in the kubelet's directories, and of its CDI spec.
pub const NAME: &str = "hook.gshare.io";
/// Name of the CDI device.
const CDI_DEVICE: &str = "gshare.io/hook=all";
/// Time between two looks for the files.
const LOOK: Duration = Duration::from_secs(2);

/// The device plugin of a node.
#[derive(Debug, Clone)]
pub struct Hooks {
    files: Arc<[File]>,
    /// Number of offered devices: containers that may run at a time.
    slots: u32,
    by_cdi: bool,
    metrics: Metrics,
}

/// The first file of the node that is not there.
fn missing(files: &[File]) -> Option<&Path> {
    let is_there = |file: &File| if file.is_directory { file.host.is_dir() } else { file.host.is_file() };
    files.iter().find(|file| !is_there(file)).map(|file| file.host.as_path())
}

impl Hooks {
    /// A plugin that gives containers the files of `injected`; with `cdi`, by a spec in that directory. The metrics count its work.
    ///
    /// # Errors
    /// If the spec cannot be written.
    pub fn new(injected: &Injected, slots: u32, cdi: Option<&Path>, metrics: Metrics) -> io::Result<Self> {
        let files: Arc<[File]> = injected.files().into();
        if let Some(directory) = cdi {
            let edits = cdi::Edits { env: Vec::new(), mounts: files.iter().map(Into::into).collect() };
            let (kind, name) = CDI_DEVICE.split_once('=').unwrap_or_default();
            let spec = cdi::Spec::of(kind.into(), name, edits, BTreeMap::new());
            let file = directory.join(format!("{NAME}.json"));
            std::fs::create_dir_all(directory)?;
            sweep(directory, NAME)?;
            replace(&file, &serde_json::to_vec_pretty(&spec)?, cdi::MODE)?;
        }
        Ok(Self { files, slots, by_cdi: cdi.is_some(), metrics })
    }

    fn devices(&self, healthy: bool) -> ListAndWatchResponse {
        let health = if healthy { HEALTHY } else { UNHEALTHY };
        let device = |slot| Device { id: format!("hook-{slot}"), health: health.into() };
        ListAndWatchResponse { devices: (0..self.slots).map(device).collect() }
    }

    fn given(&self) -> ContainerAllocateResponse {
        if self.by_cdi {
            let cdi_devices = vec![CdiDevice { name: CDI_DEVICE.into() }];
            return ContainerAllocateResponse { mounts: Vec::new(), cdi_devices };
        }
        let mount = |file: &File| Mount {
            container_path: file.container.into(),
            host_path: file.host.display().to_string(),
            read_only: file.read_only,
        };
        ContainerAllocateResponse { mounts: self.files.iter().map(mount).collect(), cdi_devices: Vec::new() }
    }

    /// Serves the kubelet until `end` is ready.
    ///
    /// # Errors
    /// When a socket cannot be made or served, or the kubelet refuses.
    pub async fn serve(self, sockets: &Sockets, end: impl Future<Output = ()>) -> anyhow::Result<()> {
        let metrics = self.metrics.clone();
        let router = tonic::transport::Server::builder().add_service(DevicePluginServer::new(self));
        serve(router, ("DevicePlugin", RESOURCE, &["v1beta1"]), sockets, metrics, end).await
    }
}

#[tonic::async_trait]
impl DevicePlugin for Hooks {
    type ListAndWatchStream = BoxStream<'static, Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {}))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        // The last reported state.
        let looks = stream::unfold((self.clone(), None), |(hooks, told)| async move {
            loop {
                let missing = missing(&hooks.files);
                if told != Some(missing.is_none()) {
                    let offered = if missing.is_none() { hooks.slots.into() } else { 0 };
                    hooks.metrics.hooks_offered.get_or_create(&Vec::new()).set(offered);
                    match missing {
                        Some(file) => println!("gshare-dra: {} is not there: none offered", file.display()),
                        None => println!("gshare-dra: {} of {RESOURCE} offered", hooks.slots),
                    }
                    let (devices, told) = (hooks.devices(missing.is_none()), missing.is_none());
                    return Some((Ok(devices), (hooks, Some(told))));
                }
                tokio::time::sleep(LOOK).await;
            }
        });
        Ok(Response::new(looks.boxed()))
    }

    async fn get_preferred_allocation(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Err(Status::unimplemented("no device is better than another"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        if let Some(file) = missing(&self.files) {
            // A program without the hook would run without limits.
            return Err(Status::failed_precondition(format!("{} is not there", file.display())));
        }
        let containers = request.into_inner().container_requests;
        let container_responses: Vec<_> = containers.iter().map(|_| self.given()).collect();
        self.metrics.hooks_given.get_or_create(&Vec::new()).inc_by(container_responses.len() as u64);
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(&self, _: Request<Empty>) -> Result<Response<Empty>, Status> {
        Ok(Response::new(Empty {}))
    }
}
