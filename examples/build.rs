//! The gRPC services between the kubelet and a plugin, from `proto/`. No protobuf compiler is needed.

#[cfg(feature = "kubernetes")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    const PROTO: &str = "proto";
    println!("cargo:rerun-if-changed={PROTO}");
    let files = ["registration.proto", "dra.proto", "dra_health.proto", "device_plugin.proto"];
    Ok(tonic_prost_build::compile_fds(protox::compile(files, [PROTO])?)?)
}

#[cfg(not(feature = "kubernetes"))]
fn main() {}
