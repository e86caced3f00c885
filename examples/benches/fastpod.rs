//! The FaSTPod controller on a large cluster: `cargo bench -p gshare-examples --bench fastpod [-- NODES FASTPODS REPLICAS]`.
//!
//! The program `fastpod` itself, as a process of its own, leads before the mock API server of the tests, which answers over HTTP on
//! loopback and lets each bound pod run at once. Measured are the time until all pods are bound and told as ready, the memory of the
//! program at its highest, and its requests while nothing happens. Server and program share the machine, and the server answers one
//! request at a time: pods per second are a lower bound.

#[allow(dead_code, unreachable_pub, reason = "made for the tests")]
#[path = "../tests/support/api_server.rs"]
mod api_server;

use api_server::{Api, Seen};
use axum::Router;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ROLES: [&str; 2] =
    [include_str!("../kubernetes/fastpod/rbac.yaml"), include_str!("../kubernetes/fastpod/lease.yaml")];
/// Time without requests, but for the lease, after which nothing more is expected.
const QUIET: Duration = Duration::from_secs(8);
/// Time for which the program is watched while nothing happens.
const IDLE: Duration = Duration::from_secs(20);
/// Time after which the measurement is given up.
const PATIENCE: Duration = Duration::from_secs(300);

async fn answer(State(api): State<Api>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    let seen = Seen {
        method: parts.method.to_string(),
        path: parts.uri.path().to_owned(),
        query: parts.uri.query().unwrap_or_default().to_owned(),
        body: serde_json::from_slice(&body).unwrap_or_default(),
    };
    let answered = api.answer(&seen);
    api.lock().seen.push(Seen { body: Value::Null, ..seen });
    answered
}

/// A program that ends with its measurement.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Program {
    /// A figure of `/proc/PID/status`, in MiB.
    fn mib(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or("0");
        let digits: String = line.chars().filter(char::is_ascii_digit).collect();
        digits.parse::<u64>().unwrap_or(0) / 1024
    }
}

fn fastpod(index: usize, replicas: usize) -> (String, Value) {
    let (namespace, name) = (format!("team{}", index % 10), format!("f{index}"));
    let path = format!("/apis/gshare.io/v1alpha1/namespaces/{namespace}/fastpods/{name}");
    let object = json!({
        "apiVersion": "gshare.io/v1alpha1", "kind": "FaSTPod",
        "metadata": {"name": name, "namespace": namespace, "uid": format!("uid-{index}"), "generation": 1, "annotations": {
            "faasshare/sm_partition": "12", "faasshare/quota_request": "0.3", "faasshare/gpu_mem": "1073741824"}},
        "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "podSpec": {
            "containers": [{"name": "main", "image": "x", "ports": [{"containerPort": 8080}]}]}},
    });
    (path, object)
}

fn node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "uid": name, "labels": {"gshare.io/fastpod": "true",
            "nvidia.com/gpu.count": "8", "nvidia.com/gpu.memory": "81920"}},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let numbers: Vec<usize> = std::env::args().filter_map(|word| word.parse().ok()).collect();
    // `cargo test --bench fastpod -- --test` asks only that it works.
    let runs_as_test = std::env::args().any(|argument| argument == "--test");
    let (size, quiet, idle) = if runs_as_test {
        ([20, 5, 10], Duration::from_secs(2), Duration::from_secs(1))
    } else {
        ([500, 100, 100], QUIET, IDLE)
    };
    let [nodes, fastpods, replicas] = numbers[..].try_into().unwrap_or(size);
    let pods = fastpods * replicas;
    let (api, _) = Api::start(ROLES[0], "");
    api.allow(ROLES[1]);
    api.lock().has_kubelets = true;
    for index in 0..nodes {
        api.lock().put(&format!("/api/v1/nodes/n{index:05}"), node(&format!("n{index:05}")));
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let router = Router::new().fallback(answer).with_state(api.clone());
    tokio::spawn(axum::serve(listener, router).into_future());
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("config");
    let cluster = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": url}}], "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}]});
    std::fs::write(&config, cluster.to_string())?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_fastpod"));
    command.args(["--lease", "gshare-system/fastpod"]).env("KUBECONFIG", &config).stdout(Stdio::null());
    let program = Program(command.spawn()?);
    while !api.lock().is_watched("/apis/gshare.io/v1alpha1/fastpods") {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let empty = program.mib("VmRSS:");
    let made: Vec<_> = (0..fastpods).map(|index| fastpod(index, replicas)).collect();
    let begin = Instant::now();
    for (path, object) in &made {
        api.lock().put(path, object.clone());
    }
    let is_ready = |(path, _): &(String, Value)| {
        let server = api.lock();
        let ready = server.object(path).and_then(|object| object.pointer("/status/readyReplicas")?.as_u64());
        ready == Some(replicas as u64)
    };
    let (mut bound, mut ready) = (None, None);
    while ready.is_none() && begin.elapsed() < PATIENCE {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let bindings = || api.lock().seen.iter().filter(|seen| seen.path.ends_with("/binding")).count();
        if bound.is_none() && bindings() >= pods {
            bound = Some(begin.elapsed());
        }
        if made.iter().all(is_ready) {
            ready = Some(begin.elapsed());
        }
    }
    let (Some(bound), Some(ready)) = (bound, ready) else {
        return Err(format!("not ready after {PATIENCE:?}").into());
    };
    // Looks that the last writes have set off come to an end.
    let mut requests = 0;
    loop {
        let seen = api.lock().take();
        requests += seen.len();
        if begin.elapsed() > ready && seen.iter().all(|seen| seen.path.contains("/leases")) {
            break;
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("not quiet after {PATIENCE:?}").into());
        }
        tokio::time::sleep(quiet).await;
    }
    let quiet_after = begin.elapsed().as_secs_f64();
    tokio::time::sleep(idle).await;
    let while_idle = api.lock().take();
    let rate = |count: usize, time: Duration| count as f64 / time.as_secs_f64();
    println!("{nodes} nodes of 8 GPUs, {fastpods} FaSTPods of {replicas} replicas");
    println!(
        "all bound after {:.1} s: {:.0} pods/s decided, written and bound",
        bound.as_secs_f64(),
        rate(pods, bound)
    );
    println!("all told as ready after {:.1} s, {requests} requests", ready.as_secs_f64());
    println!("memory: {empty} MiB with the nodes alone, {} MiB at its highest", program.mib("VmHWM:"));
    let others = while_idle.iter().filter(|seen| !seen.path.contains("/leases")).count();
    println!(
        "idle from {quiet_after:.1} s on: {:.2} requests/s, {others} of them not of the lease",
        rate(while_idle.len(), idle)
    );
    Ok(())
}
