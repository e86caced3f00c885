//! Health of the GPUs for the kubelet (KEP-4680), which shows it in the status of pods with shares of them.
//!
//! A GPU that its driver has lost, for example after an error that took it off the bus, is unhealthy. If NVML does not answer, the health of
//! all GPUs is unknown. Simulated GPUs are healthy.

use super::{Gpu, Node};
use crate::kubernetes::kubelet::dra_resource_health_server::DraResourceHealth;
use crate::kubernetes::kubelet::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use gshared::nvml::{News, NvmlHealth};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tonic::{Request, Response, Status};

/// Time between two looks. Kubelets take a device of which they hear nothing for 30 s as one of unknown health.
const LOOK: Duration = Duration::from_secs(10);
/// The service. A stream says what holds when it begins, and then at each look.
#[derive(Debug, Clone)]
pub(super) struct Watch(pub(super) Arc<Node>);

/// Health of each GPU of a node, by the driver's news if there are any. A GPU that was lost before the first look is not among them.
fn health(node: &Node, news: Option<&News>, now: SystemTime) -> NodeWatchResourcesResponse {
    let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let works = |gpu: &Gpu, (lost, present): &News| {
        present.iter().any(|one| one.uuids.contains(&gpu.uuid)) && lost.iter().all(|one| one.uuid != gpu.uuid)
    };
    let of = |gpu: &Gpu| DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: node.name.clone(), device_name: gpu.name() }),
        health: match (&node.gpu_kind, news.map(|news| works(gpu, news))) {
            (None, _) | (_, Some(true)) => HealthStatus::Healthy,
            (_, Some(false)) => HealthStatus::Unhealthy,
            (_, None) => HealthStatus::Unknown,
        }
        .into(),
        last_updated_time: i64::try_from(since).unwrap_or(i64::MAX),
    };
    NodeWatchResourcesResponse { devices: node.gpus.iter().map(of).collect() }
}

#[tonic::async_trait]
impl DraResourceHealth for Watch {
    type NodeWatchResourcesStream = BoxStream<'static, Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let begin = (Arc::clone(&self.0), NvmlHealth::default(), Duration::ZERO);
        let looks = stream::unfold(begin, |(node, mut nvml, pause)| async move {
            tokio::time::sleep(pause).await;
            let look = tokio::task::spawn_blocking(move || {
                let news = node.gpu_kind.as_ref().and_then(|_| nvml.look());
                (Ok(health(&node, news.as_ref(), SystemTime::now())), (node, nvml, LOOK))
            });
            look.await.ok()
        });
        Ok(Response::new(looks.boxed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_gpu_that_its_driver_has_lost_is_unhealthy_and_without_an_answer_none_is_judged() {
        let node = super::super::tests::node();
        let news = |lost: &[&str], present: &[&str]| -> News {
            let lost: Vec<_> = lost.iter().map(|uuid| json!({ "uuid": uuid, "why": "it is gone" })).collect();
            let present: Vec<_> =
                present.iter().map(|uuid| json!({ "uuids": [uuid], "name": "H" })).collect();
            serde_json::from_value(json!([lost, present])).unwrap()
        };
        let healths = |news: Option<News>| {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(7);
            let devices = health(&node, news.as_ref(), now).devices;
            assert!(devices.iter().all(|device| device.last_updated_time == 7));
            let name = |device: &DeviceHealth| device.device.clone().unwrap();
            assert_eq!(name(&devices[1]).pool_name, "n1");
            assert_eq!(name(&devices[1]).device_name, "gpu-1");
            [devices[0].health(), devices[1].health()]
        };
        let both = ["GPU-a", "GPU-b"];
        assert_eq!(healths(Some(news(&[], &both))), [HealthStatus::Healthy, HealthStatus::Healthy]);
        assert_eq!(healths(Some(news(&both[1..], &both))), [HealthStatus::Healthy, HealthStatus::Unhealthy]);
        let before = news(&[], &both[..1]);
        assert_eq!(healths(Some(before)), [HealthStatus::Healthy, HealthStatus::Unhealthy], "lost before");
        assert_eq!(healths(None), [HealthStatus::Unknown, HealthStatus::Unknown]);
    }
}
