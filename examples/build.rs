//! The gRPC services between the kubelet and a plugin, written out by tonic from the names of their methods: no protobuf compiler is
//! needed. The messages are in `kubelet.rs` of `src/kubernetes/dra` and of `src/kubernetes/fastpod`.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "kubernetes")]
    services();
}

#[cfg(feature = "kubernetes")]
fn services() {
    use tonic_build::manual::{Builder, Method, Service};
    let method = |module: &str, route: &str, input: &str, output: &str| {
        let name: String =
            route.chars().fold(String::new(), |name, letter| match letter.is_ascii_uppercase() {
                true if name.is_empty() => letter.to_ascii_lowercase().to_string(),
                true => format!("{name}_{}", letter.to_ascii_lowercase()),
                false => format!("{name}{letter}"),
            });
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::kubernetes::{module}::kubelet::{input}"))
            .output_type(format!("crate::kubernetes::{module}::kubelet::{output}"))
            .codec_path("tonic_prost::ProstCodec")
    };
    let call = |module: &str, route: &str| {
        method(module, route, &format!("{route}Request"), &format!("{route}Response")).build()
    };
    let plugin = Service::builder()
        .name("DRAPlugin")
        .package("k8s.io.kubelet.pkg.apis.dra.v1")
        .method(call("dra", "NodePrepareResources"))
        .method(call("dra", "NodeUnprepareResources"))
        .build();
    let health =
        method("dra", "NodeWatchResources", "NodeWatchResourcesRequest", "NodeWatchResourcesResponse");
    let health = Service::builder()
        .name("DRAResourceHealth")
        .package("v1alpha1")
        .method(health.server_streaming().build())
        .build();
    let registration = Service::builder()
        .name("Registration")
        .package("pluginregistration")
        .method(method("dra", "GetInfo", "InfoRequest", "PluginInfo").build())
        .method(
            method("dra", "NotifyRegistrationStatus", "RegistrationStatus", "RegistrationStatusResponse")
                .build(),
        )
        .build();
    let devices = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(method("fastpod", "GetDevicePluginOptions", "Empty", "DevicePluginOptions").build())
        .method(method("fastpod", "ListAndWatch", "Empty", "ListAndWatchResponse").server_streaming().build())
        .method(method("fastpod", "GetPreferredAllocation", "Empty", "Empty").build())
        .method(method("fastpod", "Allocate", "AllocateRequest", "AllocateResponse").build())
        .method(method("fastpod", "PreStartContainer", "Empty", "Empty").build())
        .build();
    Builder::new().compile(&[plugin, health, registration, devices]);
}
