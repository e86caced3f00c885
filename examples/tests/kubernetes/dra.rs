//! The driver beside a small kubelet, over its UNIX sockets, and before a mock of the API server.

use super::policy::{INVALID, Judge, Request};
use super::support::api_server::{Api, documents, rights};
use super::support::cluster::Real;
use super::support::control_plane::User;
use gshare_core::Bytes;
use gshare_examples::kubernetes::controller_metrics::Metrics;
use gshare_examples::kubernetes::dra::claim::check;
use gshare_examples::kubernetes::dra::claim_service::{Driver, serve};
use gshare_examples::kubernetes::dra::publish::publish;
use gshare_examples::kubernetes::dra::{DRIVER, Injected, Node, cdi, command, simulated};
use gshare_examples::kubernetes::kubelet::dra_plugin_client::DraPluginClient;
use gshare_examples::kubernetes::kubelet::dra_plugin_server::DraPlugin as _;
use gshare_examples::kubernetes::kubelet::dra_resource_health_client::DraResourceHealthClient as HealthClient;
use gshare_examples::kubernetes::kubelet::registration_client::RegistrationClient;
use gshare_examples::kubernetes::kubelet::*;
use gshare_examples::kubernetes::plugin::Sockets;
use gshare_runner::libraries::{SimulatorDir, prepend};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Channel;

const UID: &str = "5c1d9a52-7f0e-4c5b-9d55-1f6b2d0e8a11";
const POLICY: &str = include_str!("../../kubernetes/dra/policy.yaml");
const RBAC: &str = include_str!("../../kubernetes/dra/rbac.yaml");
const NODE: &str = "/api/v1/nodes/n1";
const CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/rnnt";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
const LOOK: [&str; 2] = ["GET /api/v1/nodes/n1", "GET /apis/resource.k8s.io/v1/resourceslices"];

/// An API server with the node and one claim.
fn server() -> (Api, kube::Client) {
    let (api, client) = Api::start(RBAC, "");
    let known = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1", "uid": "node-uid"}});
    api.lock().put(NODE, known);
    api.lock().put(CLAIM, allocated());
    (api, client)
}

/// A slice of this node, unlike the driver's own.
fn stray(driver: &str) -> Value {
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "stray"}, "spec": {"driver": driver, "nodeName": "n1",
        "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1}}})
}

fn node() -> Arc<Node> {
    node_of("/opt/gshare/libgshare_hook.so".as_ref())
}

fn node_of(hook: &Path) -> Arc<Node> {
    Arc::new(Node {
        name: "n1".into(),
        gpus: simulated(2, Bytes::from_gib(16)),
        injected: Injected { hook: hook.to_owned(), ..Injected::default() },
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

/// The kubelet's side: it finds the registration socket, and follows the addresses given there.
async fn connect(path: &Path) -> Channel {
    let url = format!("unix://{}", path.display());
    let endpoint = tonic::transport::Endpoint::from_shared(url).unwrap();
    // The socket exists before the server accepts; until then the connection waits in its queue.
    endpoint.connect().await.unwrap()
}

/// The hook on the host.
fn hook(dir: &TempDir) -> std::path::PathBuf {
    dir.path().join("opt/libgshare_hook.so")
}

struct Running {
    sockets: Sockets,
    end: oneshot::Sender<()>,
    served: JoinHandle<anyhow::Result<()>>,
    api: Api,
}

fn driver(dir: &TempDir, client: kube::Client) -> Driver {
    let hook = hook(dir);
    let cdi = cdi::Directory::open(dir.path().join("cdi"), &hook).unwrap();
    Driver::new(node_of(&hook), client, cdi, Metrics::default())
}

/// A driver on the directories of `dir`, and an API server.
fn start(dir: &TempDir) -> Running {
    let (api, client) = server();
    let sockets = Sockets::below(dir.path(), DRIVER);
    let (end, ended) = oneshot::channel();
    let driver = driver(dir, client);
    let served = tokio::spawn({
        let sockets = sockets.clone();
        async move { serve(driver, &sockets, async { drop(ended.await) }).await }
    });
    Running { sockets, end, served, api }
}

/// The registration of a plugin, once its socket is there.
async fn registration(sockets: &Sockets) -> RegistrationClient<Channel> {
    // A socket of a killed plugin refuses until the new socket is in its place.
    let there = async {
        while UnixStream::connect(sockets.registration()).await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_mins(1), there).await.expect("a plugin listens");
    RegistrationClient::new(connect(&sockets.registration()).await)
}

/// Registers a plugin that tells its kind, its name and its versions, and connects to it.
pub(crate) async fn register(sockets: &Sockets, told: [&str; 2], versions: &[&str]) -> Channel {
    let mut registration = registration(sockets).await;
    let info = registration.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!([info.r#type.as_str(), info.name.as_str()], told);
    assert_eq!(info.supported_versions, versions);
    let status = RegistrationStatus { plugin_registered: true, error: String::new() };
    registration.notify_registration_status(status).await.unwrap();
    connect(Path::new(&info.endpoint)).await
}

async fn registered(running: &Running) -> DraPluginClient<Channel> {
    let versions = ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"];
    DraPluginClient::new(register(&running.sockets, ["DRAPlugin", DRIVER], &versions).await)
}

fn claims(uids: &[&str]) -> Vec<Claim> {
    let claim = |uid: &&str| Claim { namespace: "team".into(), uid: (*uid).into(), name: "rnnt".into() };
    uids.iter().map(claim).collect()
}

fn preparation(uids: &[&str]) -> NodePrepareResourcesRequest {
    NodePrepareResourcesRequest { claims: claims(uids) }
}

async fn prepare(plugin: &mut DraPluginClient<Channel>, uid: &str) -> Result<Device, String> {
    let mut response = plugin.node_prepare_resources(preparation(&[uid])).await.unwrap().into_inner();
    let mut entry = response.claims.remove(uid).expect("an entry for every claim");
    if entry.error.is_empty() { Ok(entry.devices.remove(0)) } else { Err(entry.error) }
}

async fn unprepare(plugin: &mut DraPluginClient<Channel>, uid: &str) -> String {
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
    let running = start(&dir);
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
    // The same share in a file, for programs which clear their environment.
    let file = cdi::share_file(&hook(&dir), UID);
    let share = json!({"hostPath": file, "containerPath": "/usr/lib/gshare/share.env",
        "options": ["ro", "nosuid", "nodev", "rbind"]});
    assert!(edits["mounts"].as_array().unwrap().contains(&share), "{edits}");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.contains("GSHARE_QUOTA=30%:30%\n") && text.contains("GSHARE_MEM=1073741824\n"), "{text}");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(running.api.lock().lines(), [format!("GET {CLAIM}")]);

    assert_eq!(prepare(&mut plugin, UID).await.unwrap(), device);
    assert!(running.api.lock().take().is_empty(), "the spec has all that is needed to answer again");
    assert!(file.exists(), "what a container needs is there again");
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert!(specs(&dir).is_empty() && !file.exists());

    let registration = running.sockets.registration();
    running.end.send(()).unwrap();
    running.served.await.unwrap().unwrap();
    assert!(!registration.exists(), "the kubelet asks no more");
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
}

/// A unary call in the form of gRPC for Go. The authority goes into the dynamic table, for later calls.
fn call(stream: u8, method: &str, authority: Option<&str>, message: &impl prost::Message) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let mut block = vec![0x83, 0x86, 0x04];
    block.extend(text(&format!("/pluginregistration.Registration/{method}")));
    match authority {
        Some(authority) => block.extend([vec![0x41], text(authority)].concat()),
        None => block.push(0x80 | 62),
    }
    block
        .extend([vec![0x0f, 0x10], text("application/grpc"), vec![0], text("te"), text("trailers")].concat());
    let body = message.encode_to_vec();
    let body = [&[0, 0, 0, 0, u8::try_from(body.len()).unwrap()], &body[..]].concat();
    [frame(1, 4, stream, &block), frame(0, 1, stream, &body)].concat()
}

/// The answer to a call, or the code of the server's reset.
async fn answer(socket: &mut UnixStream, stream: u8) -> Result<Vec<u8>, u32> {
    loop {
        let mut head = [0; 9];
        socket.read_exact(&mut head).await.unwrap();
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        socket.read_exact(&mut payload).await.unwrap();
        match (head[3], head[8]) {
            (0, of) if of == stream => return Ok(payload[5..].to_vec()),
            (3, of) if of == stream => return Err(u32::from_be_bytes(payload.try_into().unwrap())),
            _ => {}
        }
    }
}

/// The kubelet dials the registration socket by its path, and gRPC for Go sends that as the authority.
#[tokio::test]
async fn a_kubelet_that_sends_the_path_of_the_socket_as_authority_is_answered_and_so_is_a_stock_client() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir);
    registered(&running).await;
    let path = running.sockets.registration();
    for authority in ["%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fgpu.gshare.io-reg.sock", "localhost"] {
        let mut socket = UnixStream::connect(&path).await.unwrap();
        let greeting = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, 0, &[])].concat();
        socket.write_all(&greeting).await.unwrap();
        socket.write_all(&call(1, "GetInfo", Some(authority), &InfoRequest {})).await.unwrap();
        let info = answer(&mut socket, 1).await.expect("an answer to GetInfo");
        let info = <PluginInfo as prost::Message>::decode(&info[..]).unwrap();
        assert_eq!(info.endpoint, running.sockets.plugin().display().to_string());
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        // In pieces, and by the table.
        for piece in call(3, "NotifyRegistrationStatus", None, &status).chunks(7) {
            socket.write_all(piece).await.unwrap();
        }
        assert_eq!(answer(&mut socket, 3).await, Ok(Vec::new()));
    }
}

#[tokio::test]
async fn a_driver_that_was_killed_answers_from_what_it_had_written() {
    let dir = TempDir::new().unwrap();
    let first = start(&dir);
    let mut plugin = registered(&first).await;
    let device = prepare(&mut plugin, UID).await.unwrap();
    // The sockets of the killed driver stay, and so does its half-written file.
    first.served.abort();
    let _ = first.served.await;
    std::fs::write(dir.path().join("cdi/.gpu.gshare.io-share_x.json.1.new"), "{").unwrap();

    let second = start(&dir);
    assert_eq!(specs(&dir).len(), 1);
    let mut plugin = registered(&second).await;
    assert_eq!(prepare(&mut plugin, UID).await.unwrap(), device);
    assert!(second.api.lock().take().is_empty(), "the API server may be away");
    assert_eq!(unprepare(&mut plugin, UID).await, "");
    assert!(specs(&dir).is_empty());
}

#[tokio::test]
async fn one_bad_claim_is_refused_alone_and_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir);
    let mut plugin = registered(&running).await;
    running.api.lock().delete(CLAIM);
    assert_eq!(prepare(&mut plugin, UID).await.unwrap_err(), "claim team/rnnt: no ResourceClaim team/rnnt");
    let mut claim = allocated();
    claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]["sm"] = json!("0");
    running.api.lock().put(CLAIM, claim);
    running.api.lock().fail(format!("GET {CLAIM}"), 403, "Forbidden");
    assert!(prepare(&mut plugin, UID).await.unwrap_err().contains("Forbidden"));
    let error = prepare(&mut plugin, UID).await.unwrap_err();
    assert!(error.contains("results[0].consumedCapacity[sm]: `0`: need 1 to 100"), "{error}");
    running.api.lock().put(CLAIM, allocated());
    let all = preparation(&[UID, "../evil", "other"]);
    let response = plugin.node_prepare_resources(all).await.unwrap().into_inner().claims;
    assert_eq!(response.len(), 3);
    assert_eq!(response[UID].error, "");
    assert!(response["../evil"].error.contains("metadata.uid: `../evil`"));
    assert!(response["other"].error.contains("the kubelet asks for other"));
    assert!(unprepare(&mut plugin, "../evil").await.contains("metadata.uid"));
    assert_eq!(specs(&dir), [format!("gpu.gshare.io-share_{UID}.json")]);
}

#[tokio::test]
async fn files_of_claims_that_are_over_are_swept_and_no_others() {
    let dir = TempDir::new().unwrap();
    let (api, client) = server();
    let driver = driver(&dir, client);
    let prepare = || driver.node_prepare_resources(tonic::Request::new(preparation(&[UID])));
    prepare().await.unwrap();
    std::fs::write(dir.path().join("cdi/nvidia.yaml"), "{}").unwrap();
    assert_eq!(driver.sweep().await.unwrap(), [""; 0], "in use");
    api.lock().fail(format!("GET {CLAIM}"), 500, "InternalError");
    assert!(driver.sweep().await.is_err());
    assert_eq!(specs(&dir).len(), 2, "what is not known is not swept");
    // The claim's pod is gone, or the claim was made again under its name, or is gone itself.
    let mut free = allocated();
    free.as_object_mut().unwrap().remove("status");
    let mut other = allocated();
    other["metadata"]["uid"] = json!("other");
    for now in [Some(free), Some(other), None] {
        match now {
            Some(now) => api.lock().put(CLAIM, now),
            None => api.lock().delete(CLAIM),
        }
        assert_eq!(driver.sweep().await.unwrap(), [UID]);
        assert_eq!(specs(&dir), ["nvidia.yaml"]);
        assert!(!cdi::share_file(&hook(&dir), UID).exists());
        api.lock().put(CLAIM, allocated());
        prepare().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn the_driver_waits_for_the_hook_that_the_daemons_pod_puts_there() {
    let dir = TempDir::new().unwrap();
    let hook = hook(&dir);
    let mut waits = std::pin::pin!(command::hook_is_there(&hook));
    tokio::select! {
        () = &mut waits => panic!("there is none"),
        () = tokio::time::sleep(std::time::Duration::from_secs(600)) => {}
    }
    std::fs::create_dir_all(hook.parent().unwrap()).unwrap();
    std::fs::write(&hook, "").unwrap();
    waits.await;
}

/// Kubelets of 1.36 ask every driver for the health of its devices, and again every 5 s without an answer.
#[tokio::test]
async fn a_kubelet_is_told_of_the_health_of_each_gpu() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir);
    registered(&running).await;
    let mut watch = HealthClient::new(connect(&running.sockets.plugin()).await);
    let mut told = watch.node_watch_resources(NodeWatchResourcesRequest {}).await.unwrap().into_inner();
    let devices = told.message().await.unwrap().unwrap().devices;
    let name = |device: &DeviceHealth| {
        let DeviceIdentifier { pool_name, device_name } = device.device.clone().unwrap();
        (pool_name, device_name, device.health())
    };
    let expected = ["gpu-0", "gpu-1"].map(|gpu| ("n1".to_owned(), gpu.to_owned(), HealthStatus::Healthy));
    assert_eq!(devices.iter().map(name).collect::<Vec<_>>(), expected);
    // An endless stream does not keep the driver from ending.
    running.end.send(()).unwrap();
    running.served.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_driver_that_the_kubelet_refuses_ends_with_its_reason() {
    let dir = TempDir::new().unwrap();
    let running = start(&dir);
    let mut registration = registration(&running.sockets).await;
    let status = RegistrationStatus { plugin_registered: false, error: "no such version".into() };
    registration.notify_registration_status(status).await.unwrap();
    drop(registration);
    let error = running.served.await.unwrap().unwrap_err();
    assert_eq!(error.to_string(), "the kubelet refuses the plugin: no such version");
}

#[tokio::test]
async fn the_slice_is_made_kept_replaced_and_strays_are_deleted() {
    let (api, client) = server();
    // A claim of another driver: not for this one.
    let foreign = format!("{SLICES}/foreign");
    api.lock().put(&foreign, stray("gpu.example.com"));
    assert_eq!(publish(&client, &node()).await.unwrap(), 1);
    let made = api.lock().take();
    assert_eq!(made[2].line(), format!("POST {SLICES}"));
    let slice = &made[2].body;
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    let device = &slice["spec"]["devices"][1];
    assert_eq!((&device["name"], &device["allowMultipleAllocations"]), (&json!("gpu-1"), &json!(true)));
    let memory = json!({"value": "16Gi", "requestPolicy": {"default": "16Gi",
        "validRange": {"min": "1Mi", "max": "16Gi", "step": "1Mi"}}});
    assert_eq!(device["capacity"]["memory"], memory);

    // A slice of an older driver, or of another name of this driver; and another client is faster.
    let old = format!("{SLICES}/stray");
    api.lock().put(&old, stray(DRIVER));
    api.lock().fail(format!("DELETE {old}"), 404, "NotFound");
    assert_eq!(publish(&client, &node()).await.unwrap(), 1, "the stray");
    assert_eq!(api.lock().lines(), [LOOK[0], LOOK[1], &format!("DELETE {old}")]);
    assert_eq!(publish(&client, &node()).await.unwrap(), 1, "it was there still");
    api.lock().take();
    // The server spells the same quantities in its own way.
    let path = format!("{SLICES}/n1-gpu.gshare.io");
    let stored = api.lock().object(&path).unwrap()["spec"]["devices"][0]["capacity"].clone();
    assert_eq!((&stored["sm"]["value"], &stored["memory"]["value"]), (&json!("10k"), &json!("16Gi")));
    assert_eq!(publish(&client, &node()).await.unwrap(), 0);
    assert_eq!(api.lock().lines(), LOOK);
    assert!(api.lock().object(&foreign).is_some() && api.lock().object(&old).is_none());

    let mut fewer = (*node()).clone();
    fewer.gpus.pop();
    let version = api.lock().object(&path).unwrap()["metadata"]["resourceVersion"].clone();
    assert_eq!(publish(&client, &fewer).await.unwrap(), 1);
    let replaced = api.lock().take();
    assert_eq!(replaced[2].line(), format!("PUT {path}"));
    assert_eq!(replaced[2].body["metadata"]["resourceVersion"], version);
    assert_eq!(replaced[2].body["spec"]["pool"]["generation"], 2);
    let dir = TempDir::new().unwrap();
    let driver = driver(&dir, client);
    let prepared = driver.node_prepare_resources(tonic::Request::new(preparation(&[UID]))).await.unwrap();
    assert_eq!(prepared.into_inner().claims[UID].error, "");
    assert_eq!(api.lock().used, rights(RBAC), "the role allows what is used and no more");
}

/// On the mock; and under its own account, with the rights of its manifest and under the policy, on a real server if there is one.
#[tokio::test]
async fn a_driver_writes_again_only_what_has_changed() {
    let (_api, client) = server();
    let real = Real::here().await;
    let mut clients = vec![client];
    if let Some(real) = &real {
        real.give(RBAC).await;
        real.apply(&documents(POLICY)).await;
        let known = |name: &str| json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
        real.apply(&["n1", "n2"].map(known)).await;
        clients.push(real.plane.client(User::Account("gshare-system:gshare-dra", Some("n1"))));
    }
    let mut fewer = (*node()).clone();
    fewer.gpus.pop();
    for client in &clients {
        for (node, writes) in [(&*node(), 1), (&*node(), 0), (&fewer, 1), (&fewer, 0)] {
            assert_eq!(publish(client, node).await.unwrap(), writes, "{} GPUs", node.gpus.len());
        }
    }
    if let Some(real) = &real {
        // The policy takes force some time after its creation.
        let other = Node { name: "n2".into(), ..fewer };
        let refused = async || loop {
            match publish(&clients[1], &other).await {
                Err(error) => return error.to_string(),
                Ok(_) => {
                    let line = format!("DELETE {SLICES}/n2-{DRIVER}");
                    real.ask_as(User::Admin, &line, &Value::Null).await;
                }
            }
        };
        let error = tokio::time::timeout(std::time::Duration::from_secs(30), refused()).await.unwrap();
        assert!(error.contains("spec.nodeName: need the node of the driver"), "{error}");
    }
}

#[tokio::test]
async fn what_hinders_publishing_is_told() {
    let (api, client) = server();
    api.lock().delete(NODE);
    let told = async |client| publish(&client, &node()).await.unwrap_err().to_string();
    assert_eq!(told(client).await, "node `n1`: not known to the API server: see --node");

    for code in [409, 404, 403] {
        let (api, client) = server();
        api.lock().fail(format!("POST {SLICES}"), code, "Because");
        let error = told(client).await;
        assert_eq!(error == "the slice changed while it was written", code != 403, "{error}");
    }
    // Without the feature gate the API server drops unknown fields.
    let (api, client) = server();
    api.lock().admit = Some(Box::new(|slice| {
        slice["spec"]["devices"][0].as_object_mut().unwrap().remove("allowMultipleAllocations");
        None
    }));
    let error = told(client).await;
    assert!(error.starts_with("the API server dropped allowMultipleAllocations"), "{error}");
}

/// An unknown name of a request, and text in place of a quantity: a server takes neither, with the policy or without.
const INVALID_ANYWAY: [&str; 2] = [r#"["another"]"#, r#""lots""#];

/// The policy of the manifests and [`check`] agree on each.
#[tokio::test]
async fn parameters_are_validated_when_a_claim_is_made() {
    let template = documents(include_str!("../../kubernetes/dra/example.yaml")).remove(0);
    let class = documents(include_str!("../../kubernetes/dra/device-class.yaml")).remove(0);
    let request = |object: Value| {
        let user = "system:serviceaccount:team:someone".to_owned();
        Request { operation: "CREATE", user, node: None, object, old: Value::Null }
    };
    let mut bad = class.clone();
    bad["spec"]["config"][0]["opaque"]["parameters"]["onDaemonLoss"] = json!("panic");
    let judges = Judge::all(POLICY, "gshare-dra-claims", &request(bad.clone())).await;
    for judge in &judges {
        assert_eq!(judge.admit(&request(class.clone())).await, Ok(()));
        assert!(judge.admit(&request(bad.clone())).await.unwrap_err().contains("onDaemonLoss"));
    }
    let twice = json!([template["spec"]["spec"]["devices"]["requests"][0], {"name": "other", "exactly": {
        "deviceClassName": DRIVER}}]);
    // For each field, refused values under a word of the message, and accepted values under an empty word. A claim of another driver is not for this one to judge.
    let cases = json!({
        "/devices/config/0/requests": {"": [[], ["another"]]},
        "/devices/config/0/opaque": {"": [{"driver": "gpu.nvidia.com", "parameters": {"sharing": 1}}]},
        "/devices/requests": {"one claim": [twice]},
        "OPTION/quotaLimitPercent": {"": [30], "quotaLimitPercent": [29, 0, 101, 50.5, "80"]},
        "OPTION/class": {"": ["slo-sensitive:7%"], "class": ["slo-sensitive:0", "slo-sensitive:101", "vip"]},
        "OPTION/onDaemonLoss": {"onDaemonLoss": ["panic"]},
        "OPTION/daemonWait": {"": ["200ms", "0600s", "600000ms"],
            "daemonWait": ["199ms", "601s", "600001ms", "0.5s", "500000us", "5"]},
        "OPTION/colour": {"parameters": ["red"]},
        "OPTION/kind": {"apiVersion, kind": ["Other"]},
        "OPTION/apiVersion": {"apiVersion, kind": ["gshare.io/v2"]},
        "EXACTLY/capacity/requests/sm": {"": ["1500m"], "requests": ["101", "0"]},
        "EXACTLY/capacity/requests/quota": {"quotaLimitPercent": ["81"], "quota": ["lots"]},
        "EXACTLY/capacity/requests/memory": {"requests": ["0"]},
        "EXACTLY/adminAccess": {"adminAccess": [true]},
        "EXACTLY/count": {"count": [2]},
        "EXACTLY/deviceClassName": {"": ["gpu.nvidia.com"]},
    });
    let by_words = |(path, of): (&String, &Value)| -> Vec<(String, String, Value)> {
        let path = path.replace("OPTION", "/devices/config/0/opaque/parameters");
        let path = path.replace("EXACTLY", "/devices/requests/0/exactly");
        let of = of.as_object().unwrap().iter();
        let each =
            of.flat_map(|(why, values)| values.as_array().unwrap().iter().map(move |value| (why, value)));
        each.map(|(why, value)| (path.clone(), why.clone(), value.clone())).collect()
    };
    for (path, why, value) in cases.as_object().unwrap().iter().flat_map(by_words) {
        let mut object = template.clone();
        let (parent, key) = path.rsplit_once('/').unwrap();
        object.pointer_mut(&format!("/spec/spec{parent}")).unwrap()[key] = value.clone();
        let spec = object["spec"]["spec"].clone();
        let claim = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "c"}, "spec": spec});
        let mut all = vec![check(&serde_json::from_value(spec).unwrap()).map_err(|error| error.to_string())];
        for judge in &judges {
            all.push(judge.admit(&request(object.clone())).await);
            all.push(judge.admit(&request(claim.clone())).await);
        }
        for said in all {
            let is_right = match &said {
                Ok(()) => why.is_empty(),
                Err(said) if said.starts_with(INVALID) => INVALID_ANYWAY.contains(&&*value.to_string()),
                Err(said) => !why.is_empty() && said.contains(&why),
            };
            assert!(is_right, "{path} {value}: {said:?}");
        }
    }
}

#[tokio::test]
async fn a_driver_writes_the_slice_of_its_own_node_only() {
    let request = |operation, node, slice: Value| {
        let user = "system:serviceaccount:gshare-system:gshare-dra".to_owned();
        let (object, old) = match operation {
            "DELETE" => (Value::Null, slice),
            "UPDATE" => (slice.clone(), slice),
            _ => (slice, Value::Null),
        };
        Request { operation, user, node, object, old }
    };
    let other = Request {
        user: "system:serviceaccount:kube-system:other".to_owned(),
        ..request("CREATE", None, stray("gpu.nvidia.com"))
    };
    let denied = request("CREATE", Some("n2"), stray(DRIVER));
    for judge in Judge::all(POLICY, "gshare-dra-slices", &denied).await {
        for operation in ["CREATE", "UPDATE", "DELETE"] {
            let decide =
                async |node, driver: &str| judge.admit(&request(operation, node, stray(driver))).await;
            assert_eq!(decide(Some("n1"), DRIVER).await, Ok(()));
            for node in [Some("n2"), None] {
                assert!(decide(node, DRIVER).await.unwrap_err().contains("spec.nodeName"));
            }
            assert!(decide(Some("n1"), "gpu.nvidia.com").await.unwrap_err().contains("spec.driver"));
        }
        assert_eq!(judge.admit(&other).await, Ok(()));
    }
}

#[test]
fn without_a_cluster_the_slice_and_a_claims_spec_are_printed_as_the_readme_shows() {
    // Without `--sim` the GPUs are those that the driver lists.
    let (driver, dir) = (SimulatorDir::new().unwrap(), TempDir::new().unwrap());
    let board: gshare_fake_cuda_spec::Spec = "v100,devices=2".parse().unwrap();
    let command = |arguments: &[&str]| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_gshare-dra"));
        program.env("LD_LIBRARY_PATH", prepend("LD_LIBRARY_PATH", driver.path())).envs(board.variables());
        program.env("GSHARE_SIM_DEVICE", dir.path().join("device")).args(arguments);
        let output = program.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let claim = "examples/kubernetes/dra/allocated-claim.yaml";
    let dry = ["--sim", "--node", "n1", "--dry-run", "--claim", claim];
    let (ok, printed, stderr) = command(&dry);
    assert!(ok, "{stderr}");
    let readme = include_str!("../../README.md");
    let spec = printed.split_once("---\n").unwrap().1;
    assert!(readme.contains(spec), "{spec}");
    assert!(printed.contains("allowMultipleAllocations: true"), "{printed}");
    let (ok, printed, stderr) = command(&["--dry-run", "--node", "n1"]);
    assert!(ok && printed.contains("name: gpu-1") && printed.contains("V100"), "{printed} {stderr}");
    let (ok, printed, stderr) = command(&["--check", "examples/kubernetes/dra/example.yaml"]);
    assert!(ok && printed == "rnnt: can be granted\n", "{printed} {stderr}");
    let (ok, _, stderr) = command(&["--sim", "--dry-run", "--claim", "no-such-file", "--node", "n1"]);
    assert!(!ok && stderr.contains("no-such-file"), "{stderr}");
}
