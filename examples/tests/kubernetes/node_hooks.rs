//! The device plugin of a node beside a small kubelet, over its UNIX sockets.

use super::dra::register;
use gshare_examples::kubernetes::controller_metrics::Metrics;
use gshare_examples::kubernetes::kubelet::device_plugin::device_plugin_client::DevicePluginClient;
use gshare_examples::kubernetes::kubelet::device_plugin::*;
use gshare_examples::kubernetes::node_hooks::{Hooks, NAME};
use gshare_examples::kubernetes::plugin::Sockets;
use gshare_openfaas::kubernetes::injection::{Injected, RESOURCE};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// Files of a node below a directory; the daemon has not yet put them there.
fn injected(dir: &TempDir) -> Injected {
    Injected {
        hook: dir.path().join("opt/libgshare_hook.so"),
        socket: dir.path().join("run/pods/gshare.sock"),
        ..Injected::default()
    }
}

/// The daemon's pod puts its files there.
fn bring(injected: &Injected) {
    for file in [&injected.hook, &injected.socket] {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    }
    for file in [&injected.hook, &injected.preload()] {
        std::fs::write(file, "").unwrap();
    }
}

fn two() -> AllocateRequest {
    let one = |id: &str| ContainerAllocateRequest { devices_ids: vec![id.into()] };
    AllocateRequest { container_requests: vec![one("hook-0"), one("hook-7")] }
}

#[tokio::test]
async fn a_kubelet_registers_the_plugin_hears_when_the_files_are_there_and_mounts_them() {
    let dir = TempDir::new().unwrap();
    let injected = injected(&dir);
    let sockets = Sockets::below(&dir.path().join("kubelet"), NAME);
    let (end, ended) = oneshot::channel::<()>();
    let hooks = Hooks::new(&injected, 3, None, Metrics::default()).unwrap();
    let served = tokio::spawn({
        let sockets = sockets.clone();
        async move { hooks.serve(&sockets, async { drop(ended.await) }).await }
    });
    let channel = register(&sockets, ["DevicePlugin", RESOURCE], &["v1beta1"]).await;
    let mut plugin = DevicePluginClient::new(channel);
    plugin.get_device_plugin_options(Empty {}).await.unwrap();

    // The plugin offers and gives nothing before the daemon has put its files there.
    let mut devices = plugin.list_and_watch(Empty {}).await.unwrap().into_inner();
    let told = devices.message().await.unwrap().unwrap().devices;
    let ids: Vec<_> = told.iter().map(|device| device.id.as_str()).collect();
    assert_eq!(ids, ["hook-0", "hook-1", "hook-2"]);
    assert!(told.iter().all(|device| device.health == UNHEALTHY));
    let refused = plugin.allocate(two()).await.unwrap_err();
    assert!(refused.message().contains("opt/libgshare_hook.so is not there"), "{refused}");
    bring(&injected);
    let told = devices.message().await.unwrap().unwrap().devices;
    assert!(told.iter().all(|device| device.health == HEALTHY));

    let answered = plugin.allocate(two()).await.unwrap().into_inner().container_responses;
    assert_eq!(answered.len(), 2, "an answer for each container");
    let below = |path: &str| dir.path().join(path).display().to_string();
    for ContainerAllocateResponse { mounts, cdi_devices } in answered {
        let mounts: Vec<_> = mounts
            .iter()
            .map(|mount| (mount.host_path.clone(), mount.container_path.as_str(), mount.read_only))
            .collect();
        let expected = [
            (below("opt/libgshare_hook.so"), "/usr/lib/gshare/libgshare_hook.so", true),
            (below("run/pods"), "/run/gshare", true),
            (below("opt/ld.so.preload"), "/etc/ld.so.preload", true),
        ];
        assert_eq!(mounts, expected);
        assert!(cdi_devices.is_empty());
    }
    // An endless stream does not keep it from ending.
    end.send(()).unwrap();
    served.await.unwrap().unwrap();
    assert!(!sockets.registration().exists() && !sockets.plugin().exists());
}

#[tokio::test]
async fn with_cdi_containers_are_given_the_device_of_a_spec_that_has_the_same_mounts() {
    use device_plugin_server::DevicePlugin as _;
    let dir = TempDir::new().unwrap();
    let mut injected = injected(&dir);
    injected.mps = Some((dir.path().join("mps"), dir.path().join("shm")));
    bring(&injected);
    let specs = dir.path().join("cdi");
    let hooks = Hooks::new(&injected, 1, Some(&specs), Metrics::default()).unwrap();
    let ask = async || hooks.allocate(tonic::Request::new(two())).await.map(tonic::Response::into_inner);
    let refused = ask().await.unwrap_err();
    assert!(refused.message().ends_with("/mps is not there"), "{refused}");
    for missing in ["mps", "shm"] {
        std::fs::create_dir(dir.path().join(missing)).unwrap();
    }
    for given in ask().await.unwrap().container_responses {
        let names: Vec<_> = given.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!((names, given.mounts.len()), (vec!["gshare.io/hook=all"], 0));
    }
    let text = std::fs::read(specs.join("hook.gshare.io.json")).unwrap();
    let spec: Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(spec["kind"], "gshare.io/hook");
    let mounts = spec["devices"][0]["containerEdits"]["mounts"].as_array().unwrap();
    let inside: Vec<_> = mounts.iter().map(|mount| (&mount["containerPath"], &mount["options"][0])).collect();
    let expected = [
        ("/usr/lib/gshare/libgshare_hook.so", "ro"),
        ("/run/gshare", "ro"),
        ("/etc/ld.so.preload", "ro"),
        ("/tmp/nvidia-mps", "rw"),
        ("/dev/shm", "rw"),
    ];
    assert_eq!(json!(inside), json!(expected));
}
