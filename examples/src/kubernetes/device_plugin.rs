//! The service of a device plugin towards the kubelet, `v1beta1.DevicePlugin`, generated from `proto/`.
#![allow(missing_docs, reason = "the generated service is tonic's")]
#![allow(
    clippy::doc_markdown,
    clippy::default_trait_access,
    clippy::missing_const_for_fn,
    unused_qualifications,
    unreachable_pub
)]

tonic::include_proto!("v1beta1");

/// A device that may be given out.
pub const HEALTHY: &str = "Healthy";
/// A device that may not.
pub const UNHEALTHY: &str = "Unhealthy";
