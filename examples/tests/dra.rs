//! The driver beside a small kubelet, over its UNIX sockets, and an API server that is a function.

#[allow(dead_code, reason = "each test uses a part of it")]
mod support {
    pub(crate) mod api;
}

use gshare_core::Bytes;
use gshare_examples::kubernetes::dra::driver::{Driver, ServeError, Sockets, serve};
use gshare_examples::kubernetes::dra::kubelet::plugin_client::DRAPluginClient;
use gshare_examples::kubernetes::dra::kubelet::registration_client::RegistrationClient;
use gshare_examples::kubernetes::dra::kubelet::*;
use gshare_examples::kubernetes::dra::publish::{PublishError, publish};
use gshare_examples::kubernetes::dra::{DRIVER, Injection, Node, cdi, gpus};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use support::api::{Calls, api, list, refusal, rights};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

const UID: &str = "5c1d9a52-7f0e-4c5b-9d55-1f6b2d0e8a11";

fn node() -> Arc<Node> {
    Arc::new(Node {
        name: "n1".into(),
        gpus: gpus::simulated(2, Bytes::from_gib(16)),
        hook: "/opt/gshare/libgshare_hook.so".into(),
        injection: Injection::File,
        preload_file: "/opt/gshare/ld.so.preload".into(),
        socket: "/run/gshare/pods/gshare.sock".into(),
        mps: None,
        gpu_kind: None,
    })
}

fn allocated() -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "rnnt", "namespace": "team", "uid": UID},
        "spec": {"devices": {"requests": [{"name": "share", "exactly": {"deviceClassName": DRIVER}}]}},
        "status": {"allocation": {"devices": {"results": [{
            "request": "share", "driver": DRIVER, "pool": "n1", "device": "gpu-1", "shareID": "s-1",
            "consumedCapacity": {"sm": "24", "quota": "30", "memory": "1Gi"},
        }]}}},
    })
}

/// The kubelet's side: it finds the registration socket, and goes on from what it is told there.
async fn connect(path: &Path) -> Channel {
    let url = format!("unix://{}", path.display());
    let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap();
    // The socket is there before anybody accepts; until then the connection waits in its queue.
    endpoint.connect().await.unwrap()
}

struct Running {
    sockets: Sockets,
    end: oneshot::Sender<()>,
    served: JoinHandle<Result<(), ServeError>>,
    calls: Calls,
}

/// A driver on the directories of `dir`, and an API server with one claim.
fn start(dir: &TempDir, answer: impl FnMut(&support::api::Call) -> (u16, Value) + Send + 'static) -> Running {
    let (client, calls) = api(answer);
    let cdi = cdi::Directory::open(dir.path().join("cdi")).unwrap();
    let sockets = Sockets { registry: dir.path().join("registry"), plugins: dir.path().join("plugins") };
    let (end, ended) = oneshot::channel();
    let driver = Driver::new(node(), client, cdi);
    let served = tokio::spawn({
        let sockets = sockets.clone();
        async move {
            serve(driver, &sockets, async {
                let _ = ended.await;
            })
            .await
        }
    });
    Running { sockets, end, served, calls }
}

async fn registered(running: &Running) -> DRAPluginClient<Channel> {
    while !running.sockets.registration().exists() {
        tokio::task::yield_now().await;
    }
    let mut registration = RegistrationClient::new(connect(&running.sockets.registration()).await);
    let info = registration.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    registration.notify_registration_status(status).await.unwrap();
    DRAPluginClient::new(connect(Path::new(&info.endpoint)).await)
}

fn claims(uids: &[&str]) -> Vec<Claim> {
    let claim = |uid: &&str| Claim { namespace: "team".into(), uid: (*uid).into(), name: "rnnt".into() };
    uids.iter().map(claim).collect()
}

async fn prepare(plugin: &mut DRAPluginClient<Channel>, uid: &str) -> Result<Device, String> {
    let request = NodePrepareResourcesRequest { claims: claims(&[uid]) };
    let mut response = plugin.node_prepare_resources(request).await.unwrap().into_inner();
    let mut entry = response.claims.remove(uid).expect("an entry for every claim");
    if entry.error.is_empty() { Ok(entry.devices.remove(0)) } else { Err(entry.error) }
}

async fn unprepare(plugin: &mut DRAPluginClient<Channel>, uid: &str) -> String {
    let request = NodeUnprepareResourcesRequest { claims: claims(&[uid]) };
    let mut response = plugin.node_unprepare_resources(request).await.unwrap().into_inner();
    response.claims.remove(uid).expect("an entry for every claim").error
}

fn specs(dir: &TempDir) -> Vec<String> {
    let entries = std::fs::read_dir(dir.path().join("cdi")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[tokio::test]
async fn a_kubelet_registers_prepares_and_unprepares_and_each_of_them_twice() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir, |_| (200, allocated()));
    let mut plugin = registered(&running).await;

    let device = prepare(&mut plugin, UID).await.unwrap();
    assert_eq!(device.cdi_device_ids, [format!("gpu.gshare.io/share={UID}")]);
    assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), ("n1", "gpu-1"));
    assert_eq!(
        (device.request_names.as_slice(), device.share_id.as_deref()),
        (&["share".into()][..], Some("s-1"))
    );
    assert_eq!(specs(&dir), [format!("gpu.gshare.io-share_{UID}.json")]);
    let file = dir.path().join("cdi").join(specs(&dir).remove(0));
    let spec: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!((&spec["cdiVersion"], &spec["kind"]), (&json!("0.6.0"), &json!("gpu.gshare.io/share")));
    let edits = &spec["devices"][0]["containerEdits"];
    assert!(edits["env"].as_array().unwrap().contains(&json!("GSHARE_QUOTA=30%:30%")), "{edits}");
    assert_eq!(running.calls.lines(), ["GET /apis/resource.k8s.io/v1/namespaces/team/resourceclaims/rnnt"]);

    assert_eq!(prepare(&mut plugin, UID).await.unwrap(), device);
    assert!(running.calls.take().is_empty(), "the spec has all that is needed to answer again");
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert!(specs(&dir).is_empty());

    let registration = running.sockets.registration();
    running.end.send(()).unwrap();
    running.served.await.unwrap().unwrap();
    assert!(!registration.exists(), "the kubelet asks no more");
}

#[tokio::test]
async fn a_driver_that_was_killed_answers_from_what_it_had_written() {
    let dir = TempDir::new().unwrap();
    let first = start(&dir, |_| (200, allocated()));
    let mut plugin = registered(&first).await;
    let device = prepare(&mut plugin, UID).await.unwrap();
    // Its sockets stay where they are, and so does a file that it was about to write.
    first.served.abort();
    let _ = first.served.await;
    std::fs::write(dir.path().join("cdi/gpu.gshare.io-share_x.1-1.tmp"), "{").unwrap();

    let second = start(&dir, |_| refusal(500, "the API server is away"));
    assert_eq!(specs(&dir).len(), 1);
    let mut plugin = loop {
        // The old registration socket refuses until the new one is in its place.
        if tokio::net::UnixStream::connect(second.sockets.registration()).await.is_ok() {
            break registered(&second).await;
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(prepare(&mut plugin, UID).await.unwrap(), device);
    assert!(second.calls.take().is_empty());
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert!(specs(&dir).is_empty());
}

#[tokio::test]
async fn one_bad_claim_is_refused_alone_and_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let mut answers = 0;
    let running = start(&dir, move |_| {
        answers += 1;
        match answers {
            1 => refusal(404, "NotFound"),
            2 => refusal(403, "Forbidden"),
            3 => {
                let mut claim = allocated();
                claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["sm"] = json!("0");
                (200, claim)
            }
            _ => (200, allocated()),
        }
    });
    let mut plugin = registered(&running).await;
    assert_eq!(prepare(&mut plugin, UID).await.unwrap_err(), "claim team/rnnt: no ResourceClaim team/rnnt");
    assert!(prepare(&mut plugin, UID).await.unwrap_err().contains("Forbidden"));
    let error = prepare(&mut plugin, UID).await.unwrap_err();
    assert!(error.contains("results[0].consumedCapacity[sm]: `0`: need 1 to 100"), "{error}");
    let request = NodePrepareResourcesRequest { claims: claims(&[UID, "../evil", "other"]) };
    let response = plugin.node_prepare_resources(request).await.unwrap().into_inner().claims;
    assert_eq!(response.len(), 3);
    assert_eq!(response[UID].error, "");
    assert!(response["../evil"].error.contains("metadata.uid: `../evil`"));
    assert!(response["other"].error.contains("the kubelet asks for other"));
    assert!(unprepare(&mut plugin, "../evil").await.contains("metadata.uid"));
    assert_eq!(specs(&dir), [format!("gpu.gshare.io-share_{UID}.json")]);
}

#[tokio::test]
async fn a_driver_that_the_kubelet_refuses_ends_with_its_reason() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir, |_| refusal(500, ""));
    while !running.sockets.registration().exists() {
        tokio::task::yield_now().await;
    }
    let mut registration = RegistrationClient::new(connect(&running.sockets.registration()).await);
    let status = RegistrationStatus { plugin_registered: false, error: "no such version".into() };
    registration.notify_registration_status(status).await.unwrap();
    drop(registration);
    let error = running.served.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the kubelet refuses the driver: no such version");
}

fn known_node() -> (u16, Value) {
    (200, json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": "node-uid"}}))
}

#[tokio::test]
async fn the_slice_is_made_kept_replaced_and_strays_are_deleted() {
    let mut slices: Vec<Value> = Vec::new();
    let mut version = 7;
    let (client, calls) = api(move |call| match (call.method.as_str(), call.path.as_str()) {
        ("GET", "/api/v1/nodes/n1") => known_node(),
        ("GET", "/apis/resource.k8s.io/v1/resourceslices") => {
            assert!(
                call.query.contains("spec.driver%3Dgpu.gshare.io%2Cspec.nodeName%3Dn1"),
                "{}",
                call.query
            );
            list("ResourceSliceList", &slices)
        }
        ("POST" | "PUT", _) => {
            version += 1;
            let mut slice = call.body.clone();
            slice["metadata"]["resourceVersion"] = json!(version.to_string());
            slices.retain(|other| other["metadata"]["name"] != slice["metadata"]["name"]);
            slices.push(slice.clone());
            if call.method == "POST" {
                // Of an older driver, or of another name of this one.
                let mut stray = slice.clone();
                stray["metadata"]["name"] = json!("stray");
                slices.push(stray);
            }
            (201, slice)
        }
        ("DELETE", "/apis/resource.k8s.io/v1/resourceslices/stray") => {
            slices.retain(|other| other["metadata"]["name"] != "stray");
            // Somebody else was faster.
            refusal(404, "NotFound")
        }
        other => panic!("{other:?}"),
    });
    let look = ["GET /api/v1/nodes/n1", "GET /apis/resource.k8s.io/v1/resourceslices"];
    assert_eq!(publish(&client, &node()).await.unwrap(), 1);
    let made = calls.take();
    assert_eq!(made[2].line(), "POST /apis/resource.k8s.io/v1/resourceslices");
    let slice = &made[2].body;
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    let device = &slice["spec"]["devices"][1];
    assert_eq!((&device["name"], &device["allowMultipleAllocations"]), (&json!("gpu-1"), &json!(true)));
    let memory = json!({"value": "16384Mi", "requestPolicy": {"default": "16384Mi",
        "validRange": {"min": "1Mi", "max": "16384Mi", "step": "1Mi"}}});
    assert_eq!(device["capacity"]["memory"], memory);

    assert_eq!(publish(&client, &node()).await.unwrap(), 1, "the stray");
    let delete = "DELETE /apis/resource.k8s.io/v1/resourceslices/stray";
    assert_eq!(calls.lines(), [look[0], look[1], delete]);
    assert_eq!(publish(&client, &node()).await.unwrap(), 0);
    assert_eq!(calls.lines(), look);

    let mut fewer = (*node()).clone();
    fewer.gpus.pop();
    assert_eq!(publish(&client, &fewer).await.unwrap(), 1);
    let replaced = calls.take();
    assert_eq!(replaced[2].line(), "PUT /apis/resource.k8s.io/v1/resourceslices/n1-gpu.gshare.io");
    assert_eq!(replaced[2].body["metadata"]["resourceVersion"], "8");
    assert_eq!(replaced[2].body["spec"]["pool"]["generation"], 2);
}

#[tokio::test]
async fn what_hinders_publishing_is_told() {
    let (client, _) = api(|_| refusal(404, "NotFound"));
    let error = publish(&client, &node()).await.unwrap_err();
    assert!(matches!(error, PublishError::NoNode { .. }), "{error}");

    for code in [409, 404, 403] {
        let (client, _) = api(move |call| match call.method.as_str() {
            "GET" if call.path.contains("/nodes/") => known_node(),
            "GET" => list("ResourceSliceList", &[]),
            _ => refusal(code, "no"),
        });
        let error = publish(&client, &node()).await.unwrap_err();
        assert_eq!(matches!(error, PublishError::Conflict), code != 403, "{error}");
    }
    // Without the feature gate the API server drops what it does not know.
    let (client, _) = api(|call| match call.method.as_str() {
        "GET" if call.path.contains("/nodes/") => known_node(),
        "GET" => list("ResourceSliceList", &[]),
        _ => {
            let mut slice = call.body.clone();
            slice["spec"]["devices"][0].as_object_mut().unwrap().remove("allowMultipleAllocations");
            (201, slice)
        }
    });
    let error = publish(&client, &node()).await.unwrap_err();
    assert!(matches!(error, PublishError::NotShareable), "{error}");
}

/// Everything that the driver asks of an API server, against the role that its manifest gives it.
#[tokio::test]
async fn the_role_allows_what_is_used_and_no_more() {
    let stray = json!({"metadata": {"name": "stray"}, "spec": {"driver": DRIVER, "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}}});
    let mut old = stray.clone();
    old["metadata"]["name"] = json!("n1-gpu.gshare.io");
    let mut found = vec![stray];
    let answer = move |call: &support::api::Call| match call.method.as_str() {
        "GET" if call.path.contains("/nodes/") => known_node(),
        "GET" if call.path.contains("/resourceclaims/") => (200, allocated()),
        "GET" => {
            let answer = list("ResourceSliceList", &found);
            found = vec![old.clone()];
            answer
        }
        "DELETE" => (200, json!({"kind": "Status", "apiVersion": "v1", "status": "Success"})),
        _ => (201, call.body.clone()),
    };
    let (client, calls) = api(answer);
    publish(&client, &node()).await.unwrap();
    publish(&client, &node()).await.unwrap();
    let dir = TempDir::new().unwrap();
    let driver = Driver::new(node(), client, cdi::Directory::open(dir.path()).unwrap());
    let request = NodePrepareResourcesRequest { claims: claims(&[UID]) };
    use gshare_examples::kubernetes::dra::kubelet::plugin_server::DRAPlugin as _;
    driver.node_prepare_resources(tonic::Request::new(request)).await.unwrap();
    let used: BTreeSet<_> = calls.take().iter().map(support::api::Call::right).collect();
    assert_eq!(used, rights(include_str!("../kubernetes/dra/rbac.yaml")));
}

#[test]
fn without_a_cluster_the_slice_and_a_claims_spec_are_printed_as_the_readme_shows() {
    let command = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_gshare-dra"))
            .args(arguments)
            .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
            .output()
            .unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let claim = "examples/kubernetes/dra/allocated-claim.yaml";
    let dry = ["--sim", "--node", "n1", "--dry-run", "--claim", claim];
    let (ok, printed, stderr) = command(&dry);
    assert!(ok, "{stderr}");
    let readme = include_str!("../README.md");
    let spec = printed.split_once("---\n").unwrap().1;
    assert!(readme.contains(spec), "{spec}");
    assert!(printed.contains("allowMultipleAllocations: true"), "{printed}");
    let (ok, _, stderr) = command(&["--sim", "--dry-run", "--claim", "no-such-file", "--node", "n1"]);
    assert!(!ok && stderr.contains("no-such-file"), "{stderr}");
}
