//! A cluster of the tests: a mock of the API server, and nodes with kubelets that run pods as processes.

use super::api_server::{Api, listed};
use super::common::{Provider, within};
use super::life::{SHARE, deploy};
use super::objects::{at, condition, object};
use gshare_openfaas::kubernetes::pod_spec::{FUNCTION, Given};
use gshare_runner::libraries::{HOOK, SimulatorDir, prepend};
use k8s_openapi::api::core::v1::Pod;
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

pub(crate) const NAMESPACE: &str = "gshare-functions";
pub(crate) const FUNCTIONS: &str = "/apis/gshare.io/v1alpha1/namespaces/gshare-functions/gpufunctions";
pub(crate) const PODS: &str = "/api/v1/namespaces/gshare-functions/pods";
const CRD: &str = include_str!("../../../../kubernetes/host/crd.yaml");
const LEASE: &str = include_str!("../../../../kubernetes/host/lease.yaml");
const RBAC: &str = include_str!("../../../../kubernetes/host/rbac.yaml");

/// An address of a pod or a daemon that no other has, in this program or another one that runs beside it.
fn address() -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [high, low] = NEXT.fetch_add(1, Ordering::SeqCst).to_be_bytes();
    Ipv4Addr::new(127, 64 + (std::process::id() % 128) as u8, high, low)
}

pub(crate) struct Cluster {
    pub(crate) api: Api,
    pub(crate) dir: tempfile::TempDir,
    nodes: Vec<FakeNode>,
    _runtime: tokio::runtime::Runtime,
}

impl Cluster {
    /// Nodes `n0`, `n1` and so on, each with `gpus` simulated GPUs of 16 GiB.
    pub(crate) fn start(nodes: usize, gpus: u32) -> Self {
        let board = format!("v100,devices={gpus}");
        let labels = json!({ "nvidia.com/gpu.count": gpus.to_string() });
        Self::of(&vec![(board.as_str(), labels); nodes])
    }

    /// Nodes with these simulated boards and labels.
    pub(crate) fn of(boards: &[(&str, Value)]) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (api, address) = runtime.block_on(Api::serve(RBAC, "gshare-up"));
        api.allow(LEASE);
        api.lock().is_graceful = true;
        api.define(CRD);
        let dir = tempfile::tempdir().unwrap();
        let config = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{{name: c, cluster: {{server: 'http://{address}'}}}}]\n\
             users: [{{name: u, user: {{}}}}]\ncontexts: [{{name: c, context: {{cluster: c, user: u, namespace: {NAMESPACE}}}}}]\n"
        );
        std::fs::write(dir.path().join("config"), config).unwrap();
        let nodes = boards.iter().enumerate();
        let nodes = nodes.map(|(number, board)| FakeNode::start(&api, dir.path(), number, board)).collect();
        Self { api, dir, nodes, _runtime: runtime }
    }

    /// The host's program.
    pub(crate) fn host(&self, more: &[&str]) -> Provider {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
        command.args(["--kubernetes", "--listen", "127.0.0.1:0"]).args(more);
        Provider::of(command.env("KUBECONFIG", self.dir.path().join("config")))
    }

    pub(crate) fn pods(&self) -> Vec<Pod> {
        listed(&self.api, PODS)
    }

    /// So many nodes with a GPU each, and a host.
    pub(crate) fn with_host(nodes: usize) -> (Self, Provider) {
        let cluster = Self::start(nodes, 1);
        let host = cluster.host(&[]);
        (cluster, host)
    }

    /// A client makes a function, or replaces it.
    pub(crate) fn put(&self, name: &str, spec: &Value) {
        self.api.lock().put(&at(name), object(name, spec));
    }

    /// The status of a function, as the host has told it.
    pub(crate) fn status(&self, name: &str) -> Value {
        self.api.lock().object(&at(name)).map_or(Value::Null, |object| object["status"].clone())
    }

    /// The same, with a pod of a function `f` with a share that is ready.
    pub(crate) fn with_f(nodes: usize) -> (Self, Provider) {
        let (cluster, host) = Self::with_host(nodes);
        deploy(&host, "f", SHARE);
        host.replicas("f", 1);
        (cluster, host)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.pods().into_iter().map(|pod| pod.metadata.name.unwrap()).collect()
    }

    /// The pods that the host has sent since the beginning.
    pub(crate) fn posts(&self) -> Vec<Value> {
        let api = self.api.lock();
        let of = api.seen.iter().filter(|seen| seen.line() == format!("POST {PODS}"));
        of.map(|seen| seen.body.clone()).collect()
    }

    /// Another client changes the spec of a function.
    pub(crate) fn edit(&self, name: &str, spec: &Value) {
        self.api.lock().edit(&at(name), &json!({ "spec": spec }));
    }

    /// Waits until a function says that it is degraded for such a reason.
    #[track_caller]
    pub(crate) fn degraded(&self, name: &str, is: impl Fn(&str) -> bool) {
        within(|| condition(self, name, "Degraded").is_some_and(|(_, why)| is(&why)));
    }

    /// Waits until a function is not degraded.
    #[track_caller]
    pub(crate) fn well(&self, name: &str) {
        within(|| condition(self, name, "Degraded").is_none());
    }

    /// The server refuses all pods from now on.
    pub(crate) fn refuse_pods(&self) {
        self.api.lock().refuse = Some(Box::new(|object| {
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

/// A node's condition `Ready`.
pub(crate) fn ready(is: bool) -> Value {
    let status = if is { "True" } else { "Unknown" };
    json!({ "status": { "conditions": [{ "type": "Ready", "status": status }] } })
}

/// A node with its daemon.
pub(crate) struct FakeNode {
    pub(crate) path: String,
    pub(crate) socket: PathBuf,
    over: Arc<AtomicBool>,
    /// A kubelet that does nothing, as of a node that is cut off.
    pub(crate) cut_off: Arc<AtomicBool>,
    /// A kubelet that has no room for a pod.
    pub(crate) refuses: Arc<AtomicBool>,
    kubelet: Option<std::thread::JoinHandle<()>>,
    _daemon: gshared::Running,
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.kubelet.take().unwrap().join().unwrap();
    }
}

impl FakeNode {
    fn start(api: &Api, dir: &Path, number: usize, (board, own): &(&str, Value)) -> Self {
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
        let of_daemon = json!({ "metadata": { "name": format!("gshared-{name}"), "labels": { "app": "gshared" } },
            "spec": { "nodeName": name, "containers": [] }, "status": { "podIP": ip.to_string() } });
        api.lock().put(&format!("/api/v1/namespaces/gshare-system/pods/gshared-{name}"), of_daemon);
        let path = format!("/api/v1/nodes/{name}");
        let mut labels = json!({ "gshare.io/host": "true", "nvidia.com/gpu.count": "1", "nvidia.com/gpu.memory": "16384",
            "nvidia.com/gpu.product": "Tesla-V100" });
        labels.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
        let status = json!({ "conditions": [{ "type": "Ready", "status": "True" }] });
        api.lock().put(&path, json!({ "metadata": { "name": name, "labels": labels }, "status": status }));
        let (over, cut_off, refuses) = <(Arc<AtomicBool>, Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let mut kubelet = Kubelet {
            api: api.clone(),
            name,
            devices,
            _simulator: simulator,
            socket: socket.clone(),
            refuses: Arc::clone(&refuses),
            runs: BTreeMap::new(),
        };
        let (ends, cut) = (Arc::clone(&over), Arc::clone(&cut_off));
        let kubelet = std::thread::spawn(move || {
            while !ends.load(Ordering::SeqCst) {
                if !cut.load(Ordering::SeqCst) {
                    kubelet.look();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        Self { path, socket, over, cut_off, refuses, kubelet: Some(kubelet), _daemon: daemon }
    }
}

/// A program that sees the driver of a node's board.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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

fn path_of(pod: &Pod) -> String {
    let metadata = &pod.metadata;
    let (namespace, name) = (metadata.namespace.as_ref().unwrap(), metadata.name.as_ref().unwrap());
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

struct Kubelet {
    api: Api,
    name: String,
    /// The environment of the simulated devices.
    devices: BTreeMap<String, OsString>,
    _simulator: SimulatorDir,
    socket: PathBuf,
    refuses: Arc<AtomicBool>,
    /// By the path of the pod, its process and its address.
    runs: BTreeMap<String, (Program, SocketAddr)>,
}

impl Kubelet {
    fn look(&mut self) {
        let pods: Vec<Pod> = listed(&self.api, "/api/v1/pods");
        let here = |pod: &Pod| {
            let is_ours = pod.metadata.labels.as_ref().is_some_and(|all| all.contains_key(FUNCTION));
            is_ours && pod.spec.as_ref().unwrap().node_name.as_deref() == Some(self.name.as_str())
        };
        let pods: BTreeMap<String, Pod> =
            pods.into_iter().filter(here).map(|pod| (path_of(&pod), pod)).collect();
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
                self.api.lock().delete(&path);
                continue;
            }
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_default();
            if phase == "Succeeded" || phase == "Failed" {
                continue;
            }
            if !self.runs.contains_key(&path) && self.refuses.load(Ordering::SeqCst) {
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
        let mut api = self.api.lock();
        // A pod may have been deleted meanwhile.
        if api.object(path).is_some() {
            api.edit(path, &json!({ "status": status }));
        }
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
