//! A cluster of the tests: an API server, which is a mock or a real one, and nodes with kubelets that run pods as processes.

use super::common::{Provider, within};
use super::life::{SHARE, deploy};
use super::objects::{at, condition, object};
use super::support::api_server::Api;
use super::support::cluster::Real;
use super::support::control_plane::{ADMIN, User, admin_of, send};
use gshare_openfaas::kubernetes::pod_spec::{FUNCTION, Given};
use gshare_runner::libraries::{HOOK, SimulatorDir, prepend};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;
use tokio::runtime::{Builder, Handle, Runtime};

pub(crate) const NAMESPACE: &str = "gshare-functions";
pub(crate) const FUNCTIONS: &str = "/apis/gshare.io/v1alpha1/namespaces/gshare-functions/gpufunctions";
pub(crate) const PODS: &str = "/api/v1/namespaces/gshare-functions/pods";
pub(crate) const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/gshare-functions/events";
pub(crate) const DAEMONS: &str = "/api/v1/namespaces/gshare-system/pods";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/gshare-system/leases";
const ACCOUNT: &str = "/api/v1/namespaces/gshare-system/serviceaccounts/gshare-up";
const CRD: &str = include_str!("../../../../kubernetes/host/crd.yaml");
const LEASE: &str = include_str!("../../../../kubernetes/host/lease.yaml");
const RBAC: &str = include_str!("../../../../kubernetes/host/rbac.yaml");
const SPACE: &str = include_str!("../../../../kubernetes/host/namespace.yaml");
const POLICY: &str = include_str!("../../../../kubernetes/host/policy.yaml");

/// An address of a pod or a daemon that no other has, in this program or another one that runs beside it.
fn address() -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::SeqCst).to_be_bytes();
    Ipv4Addr::new(127, 64 + (std::process::id() % 128) as u8, high, low)
}

/// Requests to the API server by others than the host: users, kubelets, the controllers of nodes.
#[derive(Clone)]
pub(crate) struct Server {
    client: kube::Client,
    runtime: Handle,
}

impl Server {
    /// The answer, if the object is there.
    pub(crate) fn ask(&self, line: &str, body: &Value) -> Option<Value> {
        let (status, answer) = self.runtime.block_on(send(&self.client, line, body)).unwrap();
        assert!(status.is_success() || status == 404, "{line}: {answer}");
        status.is_success().then_some(answer)
    }

    pub(crate) fn put(&self, path: &str, object: &Value) {
        self.ask(&format!("APPLY {path}?fieldManager=tests&force=true"), object).unwrap();
    }

    pub(crate) fn edit(&self, path: &str, patch: &Value) {
        self.ask(&format!("PATCH {path}"), patch).unwrap();
    }

    /// Deletes an object at once, as a kubelet does after the end of a pod.
    pub(crate) fn delete(&self, path: &str) {
        self.ask(&format!("DELETE {path}"), &json!({ "gracePeriodSeconds": 0 }));
    }

    pub(crate) fn list<K: DeserializeOwned>(&self, collection: &str) -> Vec<K> {
        let mut list = self.ask(&format!("GET {collection}"), &Value::Null).unwrap();
        serde_json::from_value(list["items"].take()).unwrap()
    }
}

/// The server of a cluster: a real one if there is one, or the mock, which counts requests and has faults.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum On {
    Any,
    Mock,
}

pub(crate) struct Cluster {
    api: Api,
    pub(crate) server: Server,
    pub(crate) dir: tempfile::TempDir,
    nodes: Vec<FakeNode>,
    real: Option<Real>,
    _runtime: Runtime,
}

impl Cluster {
    /// Nodes `n0`, `n1` and so on, each with a simulated GPU of 16 GiB.
    pub(crate) fn start(nodes: usize, on: On) -> Self {
        Self::of(&vec![("v100", json!({})); nodes], on)
    }

    /// Nodes with these simulated boards and labels.
    pub(crate) fn of(boards: &[(&str, Value)], on: On) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let real = if on == On::Any { runtime.block_on(Real::here()) } else { None };
        let (api, address) = runtime.block_on(Api::serve(RBAC, "gshare-up"));
        api.allow(LEASE);
        api.lock().is_graceful = true;
        api.define(CRD);
        let url = real.as_ref().map_or_else(|| format!("http://{address}"), |real| real.plane.url.clone());
        let client = runtime.block_on(async { kube::Client::try_from(admin_of(&url)) }).unwrap();
        let server = Server { client, runtime: runtime.handle().clone() };
        let token = real.as_ref().map(|real| install(real, runtime.handle()));
        let dir = tempfile::tempdir().unwrap();
        for (name, token) in [("config", token.as_deref()), ("admin", Some(ADMIN))] {
            let config = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
                "clusters": [{ "name": "c", "cluster": { "server": url, "insecure-skip-tls-verify": true } }],
                "users": [{ "name": "u", "user": token.map_or(json!({}), |token| json!({ "token": token })) }],
                "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u", "namespace": NAMESPACE } }] });
            std::fs::write(dir.path().join(name), config.to_string()).unwrap();
        }
        let nodes = boards.iter().enumerate();
        let nodes =
            nodes.map(|(number, board)| FakeNode::start(&server, dir.path(), number, board)).collect();
        Self { api, server, dir, nodes, real, _runtime: runtime }
    }

    pub(crate) fn mock(&self) -> &Api {
        assert!(self.real.is_none(), "the server is no mock");
        &self.api
    }

    /// A user's command with `kubectl`, or the request in its place where there is none.
    fn kubectl(&self, words: &str, line: &str, body: &Value) {
        let Some(program) = self.real.as_ref().and_then(|real| real.plane.kubectl.as_ref()) else {
            self.server.ask(line, body).unwrap();
            return;
        };
        let (home, mut command) = (self.dir.path(), Command::new(program));
        command
            .arg("--request-timeout=50s")
            .args(words.split(' '))
            .current_dir(home)
            .env("HOME", home)
            .env("KUBECONFIG", "admin");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        write!(child.stdin.take().unwrap(), "{body}").unwrap();
        assert!(child.wait().unwrap().success(), "kubectl {words}");
    }

    /// The host's program.
    pub(crate) fn host(&self, more: &[&str]) -> Provider {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
        command.args(["--kubernetes", "--listen", "127.0.0.1:0"]).args(more);
        Provider::of(command.env("KUBECONFIG", self.dir.path().join("config")))
    }

    pub(crate) fn pods(&self) -> Vec<Pod> {
        self.server.list(PODS)
    }

    /// So many nodes with a GPU each, and a host.
    pub(crate) fn with_host(nodes: usize, on: On) -> (Self, Provider) {
        let cluster = Self::start(nodes, on);
        let host = cluster.host(&[]);
        (cluster, host)
    }

    /// A client makes a function, or replaces it.
    pub(crate) fn put(&self, name: &str, spec: &Value) {
        let line = format!("APPLY {}?fieldManager=tests&force=true", at(name));
        self.kubectl("apply --filename -", &line, &object(name, spec));
    }

    pub(crate) fn object(&self, name: &str) -> Value {
        self.server.ask(&format!("GET {}", at(name)), &Value::Null).unwrap()
    }

    /// The status of a function, as the host has told it.
    pub(crate) fn status(&self, name: &str) -> Value {
        self.object(name)["status"].take()
    }

    /// The same, with a pod of a function `f` with a share that is ready.
    pub(crate) fn with_f(nodes: usize, on: On) -> (Self, Provider) {
        let (cluster, host) = Self::with_host(nodes, on);
        deploy(&host, "f", SHARE);
        host.replicas("f", 1);
        (cluster, host)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.pods().iter().map(Pod::name_any).collect()
    }

    /// The pods that the host has sent since the beginning.
    pub(crate) fn posts(&self) -> Vec<Value> {
        let api = self.mock().lock();
        let of = api.seen.iter().filter(|seen| seen.line() == format!("POST {PODS}"));
        of.map(|seen| seen.body.clone()).collect()
    }

    /// Another client changes the spec of a function.
    pub(crate) fn edit(&self, name: &str, spec: &Value) {
        let words = format!("patch gpufunctions {name} --type merge --patch-file /dev/stdin");
        self.kubectl(&words, &format!("PATCH {}", at(name)), &json!({ "spec": spec }));
    }

    pub(crate) fn scale(&self, name: &str, replicas: u32) {
        let patch = json!({ "spec": { "replicas": replicas } });
        let words = format!("scale gpufunctions {name} --replicas {replicas}");
        self.kubectl(&words, &format!("PATCH {}", at(name)), &patch);
    }

    pub(crate) fn delete(&self, name: &str) {
        self.kubectl(&format!("delete gpufunctions {name}"), &format!("DELETE {}", at(name)), &Value::Null);
    }

    /// Waits until a function says that it is degraded for such a reason.
    #[track_caller]
    pub(crate) fn degraded(&self, name: &str, is: impl Fn(&str) -> bool) {
        within(|| condition(&self.status(name), "Degraded").is_some_and(|(_, why)| is(&why)));
    }

    /// Waits until a function is not degraded.
    #[track_caller]
    pub(crate) fn well(&self, name: &str) {
        within(|| condition(&self.status(name), "Degraded").is_none());
    }

    /// The server refuses all pods from now on.
    pub(crate) fn refuse_pods(&self) {
        self.mock().lock().admit = Some(Box::new(|object| {
            object["spec"]["containers"].is_array().then(|| "exceeded quota: pods=0".to_owned())
        }));
    }

    /// Waits for this number of pods, all ready.
    pub(crate) fn ready(&self, count: usize) {
        within(|| {
            let pods = self.pods();
            pods.len() == count && pods.iter().all(gshare_openfaas::kubernetes::pod_state::is_ready)
        });
    }

    pub(crate) fn node(&self, number: usize) -> &FakeNode {
        &self.nodes[number]
    }
}

/// The node of a pod.
pub(crate) fn node_of(pod: &Pod) -> &str {
    pod.spec.as_ref().unwrap().node_name.as_deref().unwrap()
}

/// The manifests of the host on a server, with nothing of an earlier cluster. Returns a token of the host's account.
fn install(real: &Real, runtime: &Handle) -> String {
    let ask = |line: &str, body: &Value| runtime.block_on(real.ask_as(User::Admin, line, body));
    for manifest in [SPACE, RBAC, LEASE, CRD, POLICY] {
        runtime.block_on(real.give(manifest));
    }
    for old in [FUNCTIONS, PODS, EVENTS, DAEMONS, LEASES, "/api/v1/nodes"] {
        ask(&format!("DELETE {old}?gracePeriodSeconds=0"), &Value::Null);
    }
    // The policy takes effect some time after the server has accepted it.
    let stray = json!({ "metadata": { "name": "stray", "labels": { FUNCTION: "stray" } },
        "spec": { "containers": [{ "name": "function", "image": "x" }] } });
    within(|| ask(&format!("POST {PODS}?dryRun=All"), &stray).0 == 422);
    let asked = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {} });
    let (_, said) = ask(&format!("POST {ACCOUNT}/token"), &asked);
    said["status"]["token"].as_str().unwrap_or_else(|| panic!("{said}")).to_owned()
}

#[derive(Default)]
struct Switches {
    over: AtomicBool,
    cut_off: AtomicBool,
    refuses: AtomicBool,
}

/// A node with its daemon.
pub(crate) struct FakeNode {
    path: String,
    server: Server,
    socket: PathBuf,
    switches: Arc<Switches>,
    kubelet: Option<std::thread::JoinHandle<()>>,
    _daemon: gshared::Running,
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.switches.over.store(true, Ordering::SeqCst);
        let ended = self.kubelet.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the kubelet has ended early");
    }
}

impl FakeNode {
    /// Changes the node as an administrator does.
    pub(crate) fn edit(&self, patch: &Value) {
        self.server.edit(&self.path, patch);
    }

    pub(crate) fn daemon(&self) -> gshared::Snapshot {
        gshared::admin::snapshot(&gshared::config::admin_socket_of(&self.socket)).unwrap()
    }

    /// A kubelet that does nothing, as of a node that is cut off.
    pub(crate) fn cut_off(&self, is: bool) {
        self.switches.cut_off.store(is, Ordering::SeqCst);
    }

    /// A kubelet that has no room for a pod.
    pub(crate) fn refuses(&self, is: bool) {
        self.switches.refuses.store(is, Ordering::SeqCst);
    }

    /// The node's controller hears of its kubelet, or no more.
    pub(crate) fn is_ready(&self, is: bool) {
        let status = if is { "True" } else { "Unknown" };
        let patch = json!({ "status": { "conditions": [{ "type": "Ready", "status": status }] } });
        self.server.edit(&format!("{}/status", self.path), &patch);
    }

    fn start(server: &Server, dir: &Path, number: usize, (board, own): &(&str, Value)) -> Self {
        let (name, folder) = (format!("n{number}"), dir.join(format!("n{number}")));
        std::fs::create_dir(&folder).unwrap();
        let simulator = SimulatorDir::new().unwrap();
        let spec: fake_cuda::Spec = board.parse().unwrap();
        let mut devices: BTreeMap<String, OsString> =
            spec.variables().into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        devices.insert("LD_LIBRARY_PATH".into(), prepend("LD_LIBRARY_PATH", simulator.path()));
        devices.insert("GSHARE_SIM_DEVICE".into(), folder.join("device").into());
        let socket = folder.join("gshare.sock");
        let ip = address();
        let mut config = gshared::Config::at(socket.clone());
        config.metrics = Some(gshared::config::MetricsAddress::Tcp((ip, 9478).into()));
        let mut daemon = gshared::Daemon::builder(config);
        if !spec.mig.is_empty() {
            daemon = daemon.health(news(&devices));
        }
        let daemon = daemon.build().unwrap().spawn().unwrap();
        let of_daemon = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": format!("gshared-{name}"), "labels": { "app": "gshared" } },
            "spec": { "nodeName": name, "containers": [{ "name": "gshared", "image": "gshare" }] } });
        let path = format!("{DAEMONS}/gshared-{name}");
        server.put(&path, &of_daemon);
        server.edit(&format!("{path}/status"), &json!({ "status": { "podIP": ip.to_string() } }));
        let path = format!("/api/v1/nodes/{name}");
        let mut labels = json!({ "gshare.io/host": "true", "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "16384",
            "nvidia.com/gpu.product": "Tesla-V100" });
        labels.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let metadata = json!({ "name": name, "labels": labels });
        server.put(&path, &json!({ "apiVersion": "v1", "kind": "Node", "metadata": metadata }));
        let switches = Arc::<Switches>::default();
        let mut kubelet = Kubelet {
            server: server.clone(),
            name,
            devices,
            _simulator: simulator,
            socket: socket.clone(),
            switches: Arc::clone(&switches),
            runs: BTreeMap::new(),
        };
        let kubelet = std::thread::spawn(move || {
            while !kubelet.switches.over.load(Ordering::SeqCst) {
                if !kubelet.switches.cut_off.load(Ordering::SeqCst) {
                    kubelet.look();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (server, kubelet) = (server.clone(), Some(kubelet));
        let node = Self { path, server, socket, switches, kubelet, _daemon: daemon };
        node.is_ready(true);
        node
    }
}

/// A program that sees the driver of a node's board.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// The news of a node's board.
fn news(devices: &BTreeMap<String, OsString>) -> impl FnMut() -> Option<gshared::nvml::News> + Send + use<> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command.arg("--print-lost").envs(devices).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut driver = Program(command.spawn().unwrap());
    let mut answers = BufReader::new(driver.0.stdout.take().unwrap());
    move || {
        let mut line = String::new();
        writeln!(driver.0.stdin.as_mut()?).ok()?;
        answers.read_line(&mut line).ok()?;
        serde_json::from_str(&line).ok()?
    }
}

struct Kubelet {
    server: Server,
    name: String,
    /// The environment of the simulated devices.
    devices: BTreeMap<String, OsString>,
    _simulator: SimulatorDir,
    socket: PathBuf,
    switches: Arc<Switches>,
    /// By the path of the pod, its process and its address.
    runs: BTreeMap<String, (Program, SocketAddr)>,
}

impl Kubelet {
    fn look(&mut self) {
        let here = format!("labelSelector={FUNCTION}&fieldSelector=spec.nodeName%3D{}", self.name);
        let pods: Vec<Pod> = self.server.list(&format!("/api/v1/pods?{here}"));
        let path = |pod: Pod| {
            (format!("/api/v1/namespaces/{}/pods/{}", pod.namespace().unwrap(), pod.name_any()), pod)
        };
        let pods: BTreeMap<String, Pod> = pods.into_iter().map(path).collect();
        // No GPU is given out twice. Shares of the SMs do not count without MPS.
        let mut booked: BTreeMap<u32, f64> = BTreeMap::new();
        for given in
            pods.values().filter(|pod| pod.metadata.deletion_timestamp.is_none()).filter_map(Given::of)
        {
            *booked.entry(given.place.1).or_default() += given.time.request().as_fraction();
        }
        assert!(booked.values().all(|sum| *sum <= 1.0), "{}: {booked:?}", self.name);
        self.runs.retain(|path, _| pods.contains_key(path));
        for (path, pod) in pods {
            if pod.metadata.deletion_timestamp.is_some() {
                self.runs.remove(&path);
                self.server.delete(&path);
                continue;
            }
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            if phase == "Succeeded" || phase == "Failed" {
                continue;
            }
            if !self.runs.contains_key(&path) && self.switches.refuses.load(Ordering::SeqCst) {
                self.says(&path, &json!({ "phase": "Failed", "reason": "OutOfcpu", "message": "no CPU" }));
                continue;
            }
            let Some((program, address)) = self.runs.get_mut(&path) else {
                let (program, address) = self.run(&pod);
                self.runs.insert(path.clone(), (program, address));
                self.says(&path, &json!({ "phase": "Running", "podIP": address.ip().to_string() }));
                continue;
            };
            if let Some(status) = program.0.try_wait().unwrap() {
                let phase = if status.success() { "Succeeded" } else { "Failed" };
                let ended = json!({ "name": "function", "ready": false, "image": "", "imageID": "", "restartCount": 0,
                    "state": { "terminated": { "exitCode": status.code().unwrap_or(137) } } });
                let ready = json!({ "type": "Ready", "status": "False" });
                let status = json!({ "phase": phase, "containerStatuses": [ended], "conditions": [ready] });
                self.says(&path, &status);
            } else if !gshare_openfaas::kubernetes::pod_state::is_ready(&pod)
                && TcpStream::connect(*address).is_ok()
            {
                self.says(&path, &json!({ "conditions": [{ "type": "Ready", "status": "True" }] }));
            }
        }
    }

    fn says(&self, path: &str, status: &Value) {
        // A pod may have been deleted meanwhile.
        self.server.ask(&format!("PATCH {path}/status"), &json!({ "status": status }));
    }

    /// The pod's container as a process: mounts become paths of this machine.
    fn run(&self, pod: &Pod) -> (Program, SocketAddr) {
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let words = container.args.as_ref().unwrap();
        let variables = container.env.iter().flatten();
        let variables: BTreeMap<_, _> =
            variables.map(|one| (one.name.clone(), one.value.clone().unwrap_or_default())).collect();
        let ip = address();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).envs(&variables).env("HOST", ip.to_string());
        if let Some(gpu) = variables.get("NVIDIA_VISIBLE_DEVICES").filter(|gpu| *gpu != "void") {
            command.envs(&self.devices).env("CUDA_VISIBLE_DEVICES", gpu);
            command.env("LD_PRELOAD", HOOK.find().unwrap()).env("GSHARE_SOCKET", &self.socket);
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        (Program(child), SocketAddr::from((ip, variables["PORT"].parse().unwrap())))
    }
}
