//! The OpenFaaS host, with its functions on the simulated driver: the contract, and what is left when something dies.

mod common;

use common::{Provider, call, within};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Statuses of calls that go on, on so many connections, while `during` runs; 0 for none. It is handed how many were
/// answered by then.
fn under_load(
    address: SocketAddr,
    path: &str,
    connections: usize,
    during: impl FnOnce(&AtomicUsize),
) -> Vec<u16> {
    /// Also when `during` fails.
    struct Over<'a>(&'a AtomicBool);
    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let load = || {
            let mut seen = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                seen.push(call(address, "POST", path, "x").map_or(0, |(status, _)| status));
                answered.fetch_add(1, Ordering::SeqCst);
            }
            seen
        };
        let threads: Vec<_> = (0..connections).map(|_| scope.spawn(load)).collect();
        let over = Over(&stop);
        during(&answered);
        drop(over);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    })
}

/// Waits until so many more calls have been answered.
fn more(answered: &AtomicUsize, calls: usize) {
    let before = answered.load(Ordering::SeqCst);
    within(|| answered.load(Ordering::SeqCst) >= before + calls);
}

fn pid(address: SocketAddr, path: &str) -> u32 {
    let (status, body) = call(address, "POST", path, "").unwrap();
    assert_eq!(status, 200, "{body}");
    let seen: serde_json::Value = serde_json::from_str(&body).unwrap();
    u32::try_from(seen["pid"].as_u64().unwrap()).unwrap()
}

fn kill(pid: u32) {
    assert!(Command::new("/bin/sh").args(["-c", &format!("kill -9 {pid}")]).status().unwrap().success());
}

fn runs(pid: u32) -> bool {
    // A zombie does not.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|text| !text.contains(") Z "))
}

const SHARE: &str =
    r#","annotations":{"fastgshare/gpu_quota_request":"0.4","fastgshare/gpu_sm_partition":"50"}"#;
const PLAIN: &str = r#","envVars":{"KERNELS":"0"}"#;

#[test]
fn the_contract_holds() {
    let dir = tempfile::tempdir().unwrap();
    let credentials = dir.path().join("credentials");
    std::fs::create_dir(&credentials).unwrap();
    std::fs::write(credentials.join("basic-auth-user"), "admin\n").unwrap();
    std::fs::write(credentials.join("basic-auth-password"), "secret").unwrap();
    let provider = Provider::start(
        dir.path(),
        &["--sim", "--credentials", credentials.to_str().unwrap(), "--callback", "127.0.0.1"],
    );
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("check.py");
    let checked = Command::new("python3")
        .arg(script)
        .arg(format!("http://{}", provider.address))
        .args([env!("CARGO_BIN_EXE_gpu_function"), "admin", "secret"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&checked.stdout);
    assert!(checked.status.success(), "{said}{}", String::from_utf8_lossy(&checked.stderr));
    assert!(said.ends_with("the contract holds\n") && said.lines().count() > 60, "{said}");
}

#[test]
fn a_dead_replica_costs_what_it_was_serving_and_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim"]);
    let two = r#","labels":{"com.openfaas.scale.min":"2"}"#;
    provider.deploy("resnet", &format!("{SHARE}{two}"));
    provider.replicas("resnet", 2);
    let address = provider.address;
    let victim = pid(address, "/function/resnet");
    let seen = under_load(address, "/function/resnet", 4, |answered| {
        more(answered, 20);
        kill(victim);
        // Another one is in its place, and is ready.
        within(|| {
            let now = children_of(provider.child.id(), "OPENFAAS_NAME=resnet");
            now.len() == 2 && !now.contains(&victim)
        });
        provider.replicas("resnet", 2);
    });
    let failed: Vec<_> = seen.iter().filter(|status| **status != 200).collect();
    assert!(failed.len() <= 1 && failed.iter().all(|status| **status == 502), "{failed:?} of {}", seen.len());
    // One that is being served when it dies: answered long before the replica would have answered.
    provider.deploy("plain", PLAIN);
    provider.replicas("plain", 1);
    let (_, body) = provider.call("GET", "/system/function/plain?usage=1", "");
    assert!(body.contains("totalMemoryBytes"), "{body}");
    let (status, body) = std::thread::scope(|scope| {
        let slow = scope.spawn(|| call(address, "POST", "/function/plain/slow?ms=3600000", "").unwrap());
        within(|| provider.call("GET", "/system/logs?name=plain", "").1.contains("sleeping for 3600000 ms"));
        // The second request waits behind that one, and is served by the next replica.
        let waits = scope.spawn(|| call(address, "POST", "/function/plain/echo", "patient").unwrap());
        within(|| provider.call("GET", "/system/telemetry", "").1.contains("\"waiting\":1"));
        kill(child_of(provider.child.id(), "KERNELS=0"));
        assert_eq!(waits.join().unwrap(), (200, "patient".into()));
        slow.join().unwrap()
    });
    assert_eq!(status, 502, "{body}");
}

/// Processes whose parent is `parent`, with this in their environment.
fn children_of(parent: u32, variable: &str) -> Vec<u32> {
    let all = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let mine = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let of = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        of == Some(parent) && environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
    };
    all.filter(mine).collect()
}

/// The only one.
fn child_of(parent: u32, variable: &str) -> u32 {
    let found = children_of(parent, variable);
    assert_eq!(found.len(), 1, "{found:?}");
    found[0]
}

#[test]
fn a_provider_that_was_killed_leaves_nothing_behind_and_comes_back_with_its_functions() {
    let dir = tempfile::tempdir().unwrap();
    let mut first = Provider::start(dir.path(), &["--sim"]);
    let secret = r#"{"name":"key","value":"hunter2"}"#;
    assert_eq!(first.call("POST", "/system/secrets", secret).0, 202);
    first.deploy("resnet", SHARE);
    first.deploy("plain", &format!(r#"{PLAIN},"secrets":["key"]"#));
    assert_eq!(first.call("POST", "/system/scale-function/resnet", r#"{"replicas":2}"#).0, 202);
    first.replicas("resnet", 2);
    let replica = pid(first.address, "/function/resnet");
    let plain = child_of(first.child.id(), "KERNELS=0");
    let address = first.address;
    let shown = first.line.replace(&address.to_string(), "127.0.0.1:8080");
    let shown = shown.replace(dir.path().to_str().unwrap(), "gshare-openfaas");
    assert!(include_str!("../README.md").contains(&shown), "{shown}");
    let seen = under_load(address, "/function/resnet", 4, |answered| {
        more(answered, 20);
        first.child.kill().unwrap();
        first.child.wait().unwrap();
        within(|| !runs(replica) && !runs(plain));
    });
    // Connections end. The kernel kills the replicas as soon as one thread of the provider is dead; another thread may live long
    // enough to answer 502 to what is in flight, one request for each of the 4 clients.
    let count = |wanted| seen.iter().filter(|&&status| status == wanted).count();
    let (served, broken, ended) = (count(200), count(502), count(0));
    let all = seen.len();
    assert!(
        served > 0 && broken <= 4 && served + broken + ended == all,
        "{served} {broken} {ended} of {all}"
    );
    let second = Provider::start(dir.path(), &["--sim"]);
    second.replicas("resnet", 2);
    assert!(second.call("GET", "/function/plain/secret/key", "").1.contains("hunter2"));
    let (_, list) = second.call("GET", "/system/functions", "");
    assert_eq!(list.matches("\"name\":").count(), 2, "{list}");
    assert_ne!(pid(second.address, "/function/resnet"), replica);
}

/// Not a test by itself: what [`requests_go_on_when_the_daemon_dies`] starts as a process.
#[test]
fn daemon_process() {
    if let Some(socket) = std::env::var_os("OPENFAAS_TEST_DAEMON") {
        gshared::Daemon::new(gshared::Config::at(socket)).unwrap().run().unwrap();
    }
}

#[test]
fn requests_go_on_when_the_daemon_dies() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("daemon.sock");
    let mut daemon = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "daemon_process"])
        .env("OPENFAAS_TEST_DAEMON", &socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let admin = gshared::config::admin_socket_of(&socket);
    within(|| gshared::admin::snapshot(&admin).is_ok());
    let provider = Provider::start(dir.path(), &["--sim", "--daemon", socket.to_str().unwrap()]);
    provider.deploy("resnet", SHARE);
    provider.replicas("resnet", 1);
    let mut next = None;
    let seen = under_load(provider.address, "/function/resnet", 2, |answered| {
        more(answered, 20);
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        more(answered, 20);
        let running = gshared::Daemon::new(gshared::Config::at(&socket)).unwrap().spawn().unwrap();
        // The replica finds it, with the share it was given.
        within(|| {
            let clients = running.handle().snapshot().unwrap().clients;
            clients.iter().any(|client| client.name == "resnet-0" && client.quota_request == 0.4)
        });
        next = Some(running);
    });
    assert!(seen.iter().all(|status| *status == 200), "{seen:?}");
    next.unwrap().stop().unwrap();
}
