//! `gshare up --kubernetes` before a mock of the API server at the size of a large cluster: pods decided and made per second, memory of the
//! host, and its requests while nothing changes. `cargo bench -p gshare-openfaas --features kubernetes --bench pods`; arguments are the
//! numbers of nodes (of 8 GPUs), functions, replicas of each, and further functions with refused pods. Each function is of a tenant of its
//! own, and all those with refused pods are of one further tenant. Its objects come first: a run without them goes before, and the last
//! lines compare the two.

#[allow(dead_code, reason = "the tests of other hosts use the rest")]
#[path = "../../../tests/support/api_server.rs"]
mod api_server;

use api_server::Api;
use serde_json::json;
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLES: [&str; 2] =
    [include_str!("../../../kubernetes/host/rbac.yaml"), include_str!("../../../kubernetes/host/lease.yaml")];
const FUNCTIONS: &str = "/apis/gshare.io/v1alpha1/namespaces/gshare-functions/gpufunctions";
const PODS: &str = "/api/v1/namespaces/gshare-functions/pods";
const PATIENCE: Duration = Duration::from_secs(540);

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    /// Its largest memory so far, in MiB.
    fn most_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
        line.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
    }
}

/// Numbers of nodes, functions, replicas of each, and functions with refused pods.
type Size = [usize; 4];

/// Seconds until all pods are made, and until all functions are told as ready.
type Times = [f64; 2];

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let numbers: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    // `cargo test --bench pods -- --test` asks only that it works.
    let runs_as_test = std::env::args().any(|argument| argument == "--test");
    let size = if runs_as_test { [5, 5, 4, 5] } else { [500, 2_000, 5, 0] };
    let idle = Duration::from_secs(if runs_as_test { 1 } else { 20 });
    let size: Size = numbers[..].try_into().unwrap_or(size);
    let [nodes, functions, replicas, refused] = size;
    if refused == 0 {
        return trial(size, idle).await.map(drop);
    }
    let alone = trial([nodes, functions, replicas, 0], idle).await?;
    let beside = trial(size, idle).await?;
    for (what, alone, beside) in [("made", alone[0], beside[0]), ("told as ready", alone[1], beside[1])] {
        let more = 100.0 * (beside / alone - 1.0);
        println!(
            "beside a tenant with {refused} refused functions: {what} after {beside:.2} s, {more:+.0} % ({alone:.2} s)"
        );
    }
    Ok(())
}

async fn trial([nodes, functions, replicas, refused]: Size, idle: Duration) -> Result<Times, Failure> {
    let (api, address) = Api::serve(ROLES[0], "gshare-up").await;
    api.allow(ROLES[1]);
    for index in 0..nodes {
        let name = format!("n{index:05}");
        let labels = json!({ "gshare.io/host": "true", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81920" });
        let status = json!({ "conditions": [{ "type": "Ready", "status": "True" }] });
        let node = json!({ "metadata": { "name": name, "labels": labels }, "status": status });
        api.lock().put(&format!("/api/v1/nodes/{name}"), node);
    }
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("config");
    let cluster = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://{address}") } }],
        "users": [{ "name": "u", "user": {} }],
        "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u", "namespace": "gshare-functions" } }] });
    std::fs::write(&config, cluster.to_string())?;
    let tenants: BTreeMap<String, serde_json::Value> = (0..functions)
        .map(|index| (format!("t{index}"), json!({})))
        .chain([("bad".to_owned(), json!({}))])
        .collect();
    let settings = directory.path().join("settings.json");
    let host = json!({ "tenants": tenants, "kubernetes": { "lease": "gshare-system/gshare-up" } });
    std::fs::write(&settings, json!({ "host": host }).to_string())?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command.args(["--kubernetes", "--listen=127.0.0.1:0", "--settings"]).arg(&settings);
    let program = Program(command.env("KUBECONFIG", &config).stdout(Stdio::null()).spawn()?);
    while !api.lock().seen.iter().any(|seen| seen.is_watch() && seen.path == FUNCTIONS) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // Pods run at once, and are ready.
    api.lock().admit = Some(Box::new(|object| {
        if !object["spec"]["nodeName"].is_null() {
            object["status"] = json!({ "phase": "Running", "podIP": "127.0.0.1",
                "conditions": [{ "type": "Ready", "status": "True" }] });
        }
        let function = object["metadata"]["labels"]["gshare.io/function"].as_str();
        function.is_some_and(|name| name.starts_with("bad")).then(|| "exceeded quota".to_owned())
    }));
    let put = |name: String, tenant: String| {
        let share = json!({ "quota": "0.3", "sm": "12", "memory": "1GiB" });
        let object = json!({ "apiVersion": "gshare.io/v1alpha1", "kind": "GpuFunction",
            "metadata": { "name": name, "namespace": "gshare-functions", "uid": name, "generation": 1 },
            "spec": { "image": "localhost/f:1", "replicas": replicas, "tenant": tenant, "share": share } });
        api.lock().put(&format!("{FUNCTIONS}/{name}"), object);
    };
    (0..refused).for_each(|index| put(format!("bad{index}"), "bad".to_owned()));
    let begin = Instant::now();
    (0..functions).for_each(|index| put(format!("f{index}"), format!("t{index}")));
    let pods = functions * replicas;
    let look = Duration::from_millis(if pods > 1_000 { 100 } else { 20 });
    let there = || api.lock().objects(PODS).len();
    while there() < pods {
        if begin.elapsed() > PATIENCE {
            return Err(format!("{} of {pods} pods after {PATIENCE:?}", there()).into());
        }
        tokio::time::sleep(look).await;
    }
    let made = begin.elapsed().as_secs_f64();
    // Statuses follow; then nothing but the lease is written.
    let is_ready = |index: usize| {
        let server = api.lock();
        let object = server
            .object(&format!("{FUNCTIONS}/f{index}"))
            .map(|object| object["status"]["readyReplicas"].clone());
        object == Some(json!(replicas))
    };
    while !(0..functions).all(is_ready) {
        if begin.elapsed() > PATIENCE {
            return Err(format!("not all functions are ready after {PATIENCE:?}").into());
        }
        tokio::time::sleep(look).await;
    }
    let told = begin.elapsed().as_secs_f64();
    tokio::time::sleep(Duration::from_secs(3)).await;
    api.lock().take();
    tokio::time::sleep(idle).await;
    let seen = api.lock().take();
    println!(
        "{nodes} nodes of 8 GPUs, {functions} functions of {replicas} replicas, {refused} with refused pods"
    );
    println!("all pods made after {made:.1} s: {:.0} pods/s decided, written and bound", pods as f64 / made);
    println!("all told as ready after {told:.1} s");
    println!("memory: {} MiB at its highest", program.most_mib());
    let others = seen.iter().filter(|seen| !seen.path.contains("/leases")).count();
    println!(
        "afterwards: {:.2} requests/s, {others} of them not of the lease",
        seen.len() as f64 / idle.as_secs_f64()
    );
    Ok([made, told])
}
