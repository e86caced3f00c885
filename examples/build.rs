//! The two gRPC services between the kubelet and a driver of shared devices, written out by tonic from the names of their
//! methods: no protobuf compiler is needed. The messages are in `src/kubernetes/dra/kubelet.rs`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "kubernetes")]
    services();
}

#[cfg(feature = "kubernetes")]
fn services() {
    use tonic_build::manual::{Builder, Method, Service};
    let method = |name: &str, route: &str, input: &str, output: &str| {
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::kubernetes::dra::kubelet::{input}"))
            .output_type(format!("crate::kubernetes::dra::kubelet::{output}"))
            .codec_path("tonic_prost::ProstCodec")
            .build()
    };
    let plugin = Service::builder()
        .name("DRAPlugin")
        .package("k8s.io.kubelet.pkg.apis.dra.v1")
        .method(method(
            "node_prepare_resources",
            "NodePrepareResources",
            "NodePrepareResourcesRequest",
            "NodePrepareResourcesResponse",
        ))
        .method(method(
            "node_unprepare_resources",
            "NodeUnprepareResources",
            "NodeUnprepareResourcesRequest",
            "NodeUnprepareResourcesResponse",
        ))
        .build();
    let registration = Service::builder()
        .name("Registration")
        .package("pluginregistration")
        .method(method("get_info", "GetInfo", "InfoRequest", "PluginInfo"))
        .method(method(
            "notify_registration_status",
            "NotifyRegistrationStatus",
            "RegistrationStatus",
            "RegistrationStatusResponse",
        ))
        .build();
    Builder::new().compile(&[plugin, registration]);
}
