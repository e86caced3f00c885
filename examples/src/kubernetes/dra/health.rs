//! Health of the GPUs for the kubelet (KEP-4680), which shows it in the status of pods with shares of them.
//!
//! A GPU that `nvidia-smi` no longer lists is unhealthy, for example after an error that took it off the bus. If
//! `nvidia-smi` does not answer, the health of all GPUs is unknown. Simulated GPUs are healthy.

use super::kubelet::dra_resource_health_server::DraResourceHealth;
use super::kubelet::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use super::{Gpu, Node, node_gpus};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tonic::{Request, Response, Status};

/// Time between two looks. Kubelets take a device of which they hear nothing for 30 s as one of unknown health.
const LOOK: Duration = Duration::from_secs(10);
/// The service. A stream says what holds when it begins, and then at each look.
#[derive(Debug, Clone)]
pub(super) struct Watch(pub(super) Arc<Node>);

/// Health of each GPU of a node. `listed` has the present GPUs, if `nvidia-smi` answered.
fn health(node: &Node, listed: Option<&[Gpu]>, now: SystemTime) -> NodeWatchResourcesResponse {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let of = |gpu: &Gpu| DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: node.name.clone(), device_name: gpu.name() }),
        health: match listed.map(|listed| listed.iter().any(|other| other.uuid == gpu.uuid)) {
            Some(true) => HealthStatus::Healthy,
            Some(false) => HealthStatus::Unhealthy,
            None => HealthStatus::Unknown,
        }
        .into(),
        last_updated_time: i64::try_from(since).unwrap_or(i64::MAX),
    };
    NodeWatchResourcesResponse { devices: node.gpus.iter().map(of).collect() }
}

async fn look(node: &Node) -> NodeWatchResourcesResponse {
    let listed = match node.gpu_kind {
        None => Some(node.gpus.clone()),
        Some(_) => tokio::task::spawn_blocking(node_gpus::of_this_node).await.ok().and_then(Result::ok),
    };
    health(node, listed.as_deref(), SystemTime::now())
}

#[tonic::async_trait]
impl DraResourceHealth for Watch {
    type NodeWatchResourcesStream = BoxStream<'static, Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let looks = stream::unfold((Arc::clone(&self.0), Duration::ZERO), |(node, pause)| async move {
            tokio::time::sleep(pause).await;
            Some((Ok(look(&node).await), (node, LOOK)))
        });
        Ok(Response::new(looks.boxed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_no_longer_listed_is_unhealthy_and_without_an_answer_none_is_judged() {
        let node = super::super::tests::node();
        let healths = |listed: Option<&[Gpu]>| {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(7);
            let devices = health(&node, listed, now).devices;
            assert!(devices.iter().all(|device| device.last_updated_time == 7));
            let name = |device: &DeviceHealth| device.device.clone().unwrap();
            assert_eq!(name(&devices[1]).pool_name, "n1");
            assert_eq!(name(&devices[1]).device_name, "gpu-1");
            [devices[0].health(), devices[1].health()]
        };
        assert_eq!(healths(Some(&node.gpus)), [HealthStatus::Healthy, HealthStatus::Healthy]);
        assert_eq!(healths(Some(&node.gpus[..1])), [HealthStatus::Healthy, HealthStatus::Unhealthy]);
        assert_eq!(healths(None), [HealthStatus::Unknown, HealthStatus::Unknown]);
    }
}
