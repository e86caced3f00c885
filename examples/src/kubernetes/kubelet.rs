//! The gRPC services that plugins have towards the kubelet: `pluginregistration`, `k8s.io.kubelet.pkg.apis.dra.v1`, `DRAResourceHealth`
//! (KEP-4680), and `v1beta1.DevicePlugin`, generated from `proto/`.
#![allow(missing_docs, reason = "the generated services are tonic's")]
#![allow(
    clippy::doc_markdown,
    clippy::default_trait_access,
    clippy::missing_const_for_fn,
    unused_qualifications,
    unreachable_pub
)]

tonic::include_proto!("pluginregistration");
tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");
tonic::include_proto!("v1alpha1");

/// Entry of the list of versions when `NodeWatchResources` is served.
pub const HEALTH_V1ALPHA1: &str = "v1alpha1.DRAResourceHealth";
/// Entry of the list of versions when `NodePrepareResources` of `dra.v1` is served.
pub const DRA_V1: &str = "v1.DRAPlugin";

/// The service of a device plugin.
pub mod device_plugin {
    tonic::include_proto!("v1beta1");

    /// A device that may be given out.
    pub const HEALTHY: &str = "Healthy";
    /// A device that may not.
    pub const UNHEALTHY: &str = "Unhealthy";
}
