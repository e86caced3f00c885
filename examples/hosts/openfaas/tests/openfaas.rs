//! The OpenFaaS host, with its functions on the simulated driver: the contract, and the state after a death.

use crate::common::{Provider, call, set_lost, within};
use gshare_runner::libraries::{SimulatorDir, prepend};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Statuses of continuous calls on `connections` connections while `during` runs; 0 for none. `during` gets the number of answers so far.
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

/// Waits until `calls` more calls have been answered.
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
    // A zombie does not run.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|text| !text.contains(") Z "))
}

const SHARE: &str =
    r#","annotations":{"fastgshare/gpu_quota_request":"0.4","fastgshare/gpu_sm_partition":"50"}"#;
const PLAIN: &str = r#","envVars":{"KERNELS":"0"}"#;

fn credentials(dir: &Path) -> PathBuf {
    let credentials = dir.join("credentials");
    std::fs::create_dir(&credentials).unwrap();
    std::fs::write(credentials.join("basic-auth-user"), "admin\n").unwrap();
    std::fs::write(credentials.join("basic-auth-password"), "secret").unwrap();
    credentials
}

#[test]
fn passwords_cross_no_network_in_clear_unless_the_operator_allows_it() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    host.args(["--set", "host.no_gpu=true", "--listen=0.0.0.0:0", "--state"]).arg(dir.path());
    host.arg("--credentials").arg(credentials(dir.path()));
    let refused = host.output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        !refused.status.success() && said.contains("--listen 0.0.0.0:0: the host speaks plain HTTP"),
        "{said}"
    );
    let provider = Provider::of(host.args(["--set", "host.plain_http=true"]));
    assert_eq!(provider.call("GET", "/system/functions", "").0, 401);
}

#[test]
fn the_contract_holds() {
    let dir = tempfile::tempdir().unwrap();
    let credentials = credentials(dir.path());
    let provider = Provider::start(
        dir.path(),
        &["--sim", "--credentials", credentials.to_str().unwrap(), "--set", r#"host.callback=["127.0.0.1"]"#],
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
        // Another replica is in its place, and is ready.
        within(|| {
            let now = children_of(provider.child.id(), "OPENFAAS_NAME=resnet");
            now.len() == 2 && !now.contains(&victim)
        });
        provider.replicas("resnet", 2);
    });
    let failed: Vec<_> = seen.iter().filter(|status| **status != 200).collect();
    assert!(failed.len() <= 1 && failed.iter().all(|status| **status == 502), "{failed:?} of {}", seen.len());
    // A request in service when the replica dies is answered long before the replica would have answered.
    provider.deploy("plain", PLAIN);
    provider.replicas("plain", 1);
    let (_, body) = provider.call("GET", "/system/function/plain?usage=1", "");
    assert!(body.contains("totalMemoryBytes"), "{body}");
    let (status, body) = std::thread::scope(|scope| {
        let slow = scope.spawn(|| call(address, "POST", "/function/plain/slow?ms=3600000", "").unwrap());
        within(|| provider.call("GET", "/system/logs?name=plain", "").1.contains("sleeping for 3600000 ms"));
        // The second request waits behind the first, and is served by the next replica.
        let waits = scope.spawn(|| call(address, "POST", "/function/plain/echo", "patient").unwrap());
        within(|| provider.call("GET", "/system/telemetry", "").1.contains("\"waiting\":1"));
        kill(child_of(provider.child.id(), "KERNELS=0"));
        assert_eq!(waits.join().unwrap(), (200, "patient".into()));
        slow.join().unwrap()
    });
    assert_eq!(status, 502, "{body}");
}

/// Children of `parent` with this text in their environment.
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

/// The simulated driver is found here as a real one is, and a shell script stands for MPS's control program: like the real program, it
/// takes time to stop.
#[test]
fn mps_is_started_for_real_gpus_and_stopped_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (program, pipes) = (dir.path().join("nvidia-cuda-mps-control"), dir.path().join("pipes"));
    let script = "#!/bin/sh\ncd \"$CUDA_MPS_PIPE_DIRECTORY\" || exit 1\n\
        if [ \"$1\" = -d ]; then echo started >> log; : > control; exit; fi\n\
        read -r line; [ \"$line\" = quit ] || exit 0\n\
        echo stopped >> log; while [ -e control ]; do sleep 0.1; done\n";
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let driver = SimulatorDir::new().unwrap();
    let mut provider = Provider::of(
        Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"))
            .args(["--listen", "127.0.0.1:0", "--set", "host.mps=true", "--state"])
            .arg(dir.path().join("state"))
            .env("LD_LIBRARY_PATH", prepend("LD_LIBRARY_PATH", driver.path()))
            .env("PATH", prepend("PATH", dir.path()))
            .env("CUDA_MPS_PIPE_DIRECTORY", &pipes)
            .env("GSHARE_SIM_DEVICE", dir.path().join("device")),
    );
    provider.deploy("resnet", SHARE);
    provider.replicas("resnet", 1);
    child_of(provider.child.id(), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50");
    let host = rustix::process::Pid::from_child(&provider.child);
    rustix::process::kill_process(host, rustix::process::Signal::TERM).unwrap();
    assert!(provider.child.wait().unwrap().success());
    assert_eq!(std::fs::read_to_string(pipes.join("log")).unwrap(), "started\nstopped\n");
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
    // Between its trial and its first instance `plain` has no process.
    first.replicas("plain", 1);
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
    // Connections end. The kernel kills the replicas as soon as one thread of the provider is dead; another thread may live long enough to
    // answer 502 to the requests in flight, one request for each of the 4 clients.
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

/// One line, as from `gshare` and `gshared`, also with `RUST_BACKTRACE=1`.
#[test]
fn an_error_is_one_line_that_names_the_option() {
    let error = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
        let output = command.args(arguments).env("RUST_BACKTRACE", "1").output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(
        error(&["--settings", "/nowhere.toml"]),
        "error: --settings /nowhere.toml: No such file or directory (os error 2)\n"
    );
    let wrong = error(&["--set", "host.timeout=0"]);
    assert_eq!(wrong, "error: host.timeout: 0 is out of range: need 1 to 3600 (seconds)\n");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, dir) = (taken.local_addr().unwrap().to_string(), tempfile::tempdir().unwrap());
    let busy = error(&["--listen", &address, "--state", dir.path().to_str().unwrap(), "--sim"]);
    assert!(busy.starts_with(&format!("error: --listen {address}: ")) && busy.lines().count() == 1, "{busy}");
}

/// Regression: with a daemon and a store of their own, two hosts met in neither, and the second took away the secrets of the first one's
/// processes.
#[test]
fn a_second_provider_in_the_same_folder_is_refused_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("elsewhere.sock");
    let store = format!("host.model_store={}", store.display());
    let more = ["--set", "host.no_gpu=true", "--set", &store];
    let first = Provider::start(dir.path(), &more);
    assert_eq!(first.call("POST", "/system/secrets", r#"{"name":"key","value":"hunter2"}"#).0, 202);
    first.deploy("plain", &format!(r#"{PLAIN},"annotations":{{"gshare/profile":"none"}},"secrets":["key"]"#));
    first.replicas("plain", 1);
    // A second host, if let in, would not end by itself.
    let mut second = Command::new("timeout");
    second.args(["60", env!("CARGO_BIN_EXE_gshare-openfaas"), "--listen", "127.0.0.1:0", "--state"]);
    let second = second.arg(dir.path()).args(more).output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(said.contains(dir.path().to_str().unwrap()), "{said}");
    assert!(said.contains(&format!("(process {})", first.child.id())), "{said}");
    assert!(first.call("GET", "/function/plain/secret/key", "").1.contains("hunter2"));
}

/// Not a test by itself: [`requests_go_on_when_the_daemon_dies`] starts it as a process.
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
        .args(["--exact", "openfaas::daemon_process"])
        .env("OPENFAAS_TEST_DAEMON", &socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let admin = gshared::config::admin_socket_of(&socket);
    within(|| gshared::admin::snapshot(&admin).is_ok());
    let provider =
        Provider::start(dir.path(), &["--sim", "--set", &format!("host.daemon={}", socket.display())]);
    provider.deploy("resnet", SHARE);
    provider.replicas("resnet", 1);
    let mut next = None;
    let seen = under_load(provider.address, "/function/resnet", 2, |answered| {
        more(answered, 20);
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        more(answered, 20);
        let running = gshared::Daemon::new(gshared::Config::at(&socket)).unwrap().spawn().unwrap();
        // The replica finds the daemon, with its given share.
        within(|| {
            let clients = running.handle().snapshot().unwrap().clients;
            clients.iter().any(|client| client.name == "resnet-0" && client.quota_request == 0.4)
        });
        next = Some(running);
    });
    assert!(seen.iter().all(|status| *status == 200), "{seen:?}");
    next.unwrap().stop().unwrap();
}

#[test]
fn instances_of_a_lost_gpu_are_replaced_elsewhere_and_it_serves_again_when_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let boards = ["--sim=v100,devices=2"];
    let provider = Provider::start(dir.path(), &boards);
    let address = provider.address;
    let json =
        |path: &str| serde_json::from_str::<serde_json::Value>(&provider.call("GET", path, "").1).unwrap();
    // The GPUs under a function's instances in this state.
    let homes = |name: &str, life: &str| {
        let status = json(&format!("/system/function/{name}"));
        let instances = status["gshare"]["instances"].as_array().unwrap().clone();
        let there = instances.into_iter().filter(|one| one["life"] == life);
        there.map(|one| u32::try_from(one["parts"][0]["gpu"].as_u64().unwrap()).unwrap()).collect::<Vec<_>>()
    };
    let decided = |what: &str| {
        json("/system/state")["decisions"]
            .as_array()
            .unwrap()
            .iter()
            .any(|one| one["what"].as_str().unwrap().contains(what))
    };
    let lost = |gpu: u32| json("/system/state")["devices"][gpu as usize]["lost"].clone();
    provider.deploy("resnet", &format!(r#"{SHARE},"labels":{{"com.openfaas.scale.max":"1"}}"#));
    let victim = pid(address, "/function/resnet");
    let [gone] = homes("resnet", "ready")[..] else { panic!("one instance") };
    let other = 1 - gone;
    std::thread::scope(|scope| {
        // One request at the instance, an hour long, and one in wait behind it.
        let slow = scope.spawn(|| call(address, "POST", "/function/resnet/slow?ms=3600000", "").unwrap());
        within(|| provider.call("GET", "/system/logs?name=resnet", "").1.contains("sleeping for 3600000 ms"));
        let waits = scope.spawn(|| call(address, "POST", "/function/resnet", "").unwrap());
        within(|| provider.call("GET", "/system/telemetry", "").1.contains("\"waiting\":1"));
        set_lost(dir.path(), 0, gone, true);
        let (status, why) = slow.join().unwrap();
        assert_eq!(status, 502, "{why}");
        assert!(
            why.contains(&format!("GPU {gone} is lost")) && why.contains("NVML_ERROR_GPU_IS_LOST"),
            "{why}"
        );
        assert_eq!(waits.join().unwrap().0, 200, "another instance answers it");
    });
    within(|| !runs(victim));
    assert_eq!(homes("resnet", "ready"), [other]);
    assert!(lost(gone).as_str().unwrap().contains("fallen off the bus"), "{}", lost(gone));
    assert!(lost(other).is_null() && decided(&format!("GPU {gone} is lost: it has fallen off the bus")));
    let metrics = provider.call("GET", "/metrics", "").1;
    for (gpu, value) in [(gone, 1), (other, 0)] {
        assert!(metrics.contains(&format!("gshare_device_lost{{gpu=\"{gpu}\"}} {value}")), "{metrics}");
    }
    let admin = gshared::config::admin_socket_of(&dir.path().join("gshare.sock"));
    assert_eq!(gshared::admin::snapshot(&admin).unwrap().lost.unwrap().len(), 1, "the daemon knows it, too");

    // Nothing is started there: an instance without room beside the busy first function waits for the device.
    let mut busy = std::net::TcpStream::connect(address).unwrap();
    write!(busy, "GET /function/resnet/slow?ms=3600000 HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let slept =
        || provider.call("GET", "/system/logs?name=resnet", "").1.matches("sleeping for 3600000 ms").count();
    within(|| slept() == 2);
    let big = r#","annotations":{"fastgshare/gpu_quota_request":"0.8","fastgshare/gpu_sm_partition":"100"}"#;
    provider.deploy("big", big);
    let (status, body) = std::thread::scope(|scope| {
        let waits = scope.spawn(|| call(address, "POST", "/function/big", "").unwrap());
        within(|| json("/system/state")["functions"][0]["waiting"] == 1);
        assert_eq!((homes("big", "ready"), homes("big", "starting")), (vec![], vec![]));
        set_lost(dir.path(), 0, gone, false);
        waits.join().unwrap()
    });
    assert_eq!(status, 200, "{body}");
    assert_eq!(homes("big", "ready"), [gone]);
    assert!(lost(gone).is_null() && decided(&format!("GPU {gone} is back")));
    let seen = json("/system/function/big");
    assert!(seen["gshare"]["problem"].is_null(), "{seen}");

    // A host which starts while the GPU is lost does without it.
    drop((busy, provider));
    set_lost(dir.path(), 0, gone, true);
    let provider = Provider::start(dir.path(), &boards);
    assert!(provider.line.contains("  1 GPU, simulated"), "{}", provider.line);
    assert_eq!(provider.call("POST", "/function/resnet", "").0, 200);
}

#[test]
fn a_function_whose_only_gpu_is_lost_says_so_until_the_gpu_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim=v100"]);
    provider.deploy("resnet", &format!(r#"{SHARE},"labels":{{"com.openfaas.scale.min":"1"}}"#));
    provider.replicas("resnet", 1);
    let status = || {
        let text = provider.call("GET", "/system/function/resnet", "").1;
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["gshare"].take()
    };
    set_lost(dir.path(), 0, 0, true);
    within(|| status()["state"] == "failing");
    let seen = status();
    assert!(
        seen["problem"].as_str().unwrap().starts_with("GPU 0 is lost: it has fallen off the bus"),
        "{seen}"
    );
    assert!(seen["instances"].as_array().unwrap().is_empty(), "{seen}");
    set_lost(dir.path(), 0, 0, false);
    provider.replicas("resnet", 1);
    assert!(status()["problem"].is_null());
    assert_eq!(provider.call("POST", "/function/resnet", "").0, 200);
}

#[test]
fn a_host_that_is_told_to_end_leaves_nothing_behind() {
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command.args(["--listen", "127.0.0.1:0", "--sim", "--state"]).arg(dir.path());
    let mut provider = Provider::of(command.env("TMPDIR", temporary.path()));
    provider.deploy("resnet", SHARE);
    provider.replicas("resnet", 1);
    let function = pid(provider.address, "/function/resnet");
    assert!(std::fs::read_dir(temporary.path()).unwrap().count() > 0, "the simulated driver's folder");
    let told = Command::new("/bin/sh").args(["-c", &format!("kill {}", provider.child.id())]).status();
    assert!(told.unwrap().success() && provider.child.wait().unwrap().success());
    let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    within(|| !Path::new(&format!("/proc/{function}")).exists());
}

#[test]
fn a_host_that_waits_for_a_silent_daemon_leaves_nothing_behind() {
    let (dir, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let socket = dir.path().join("silent.sock");
    let silent = UnixListener::bind(gshared::config::admin_socket_of(&socket)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gshare-openfaas"));
    command.args(["--listen", "127.0.0.1:0", "--sim", "--state"]).arg(dir.path());
    command.arg("--set").arg(format!("host.daemon={}", socket.display()));
    let mut provider = Provider::of(command.env("TMPDIR", temporary.path()));
    let address = provider.address;
    let asks = std::thread::spawn(move || call(address, "GET", "/system/state", ""));
    // The host asks by itself too, so the second question may be the one of this test.
    let _questions = [silent.accept().unwrap(), silent.accept().unwrap()];
    let told = Command::new("/bin/sh").args(["-c", &format!("kill {}", provider.child.id())]).status();
    assert!(told.unwrap().success() && provider.child.wait().unwrap().success());
    let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().flatten().collect();
    assert!(left.is_empty(), "{left:?}");
    let _ = asks.join();
}

const NO_GPU: &str = r#","envVars":{"KERNELS":"0"},"annotations":{"gshare/profile":"none"}"#;

/// Sends these bytes on a connection of its own; the first line of the answer, and the rest.
fn raw(address: SocketAddr, bytes: &str) -> (String, String) {
    use std::io::Read as _;
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(crate::common::PATIENCE)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let (first, rest) = text.split_once("\r\n").unwrap_or((&text, ""));
    (first.to_owned(), rest.to_owned())
}

#[test]
fn a_client_that_sends_nothing_holds_no_instance_and_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--set", "host.no_gpu=true"]);
    provider.deploy("one", &format!(r#"{NO_GPU},"labels":{{"com.openfaas.scale.max":"1"}}"#));
    provider.replicas("one", 1);
    let silent = |path: &str, length: &str| {
        let mut stream = std::net::TcpStream::connect(provider.address).unwrap();
        write!(stream, "POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n").unwrap();
        stream
    };
    let _one = silent("/function/one/echo", "Content-Length: 1000");
    let _many: Vec<_> =
        (0..20).map(|_| silent("/async-function/one/echo", "Transfer-Encoding: chunked")).collect();
    let _large: Vec<_> =
        (0..20).map(|_| silent("/async-function/one/echo", "Content-Length: 10000000")).collect();
    within(|| provider.call("GET", "/metrics", "").0 == 200);
    assert_eq!(provider.call("POST", "/function/one/echo", "beside it"), (200, "beside it".into()));
    assert_eq!(provider.call("POST", "/async-function/one/echo", "beside them").0, 202);
}

#[test]
fn a_proxys_rules_hold_for_headers_bodies_and_pages_of_other_sites() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--set", "host.no_gpu=true"]);
    provider.deploy("one", NO_GPU);
    provider.replicas("one", 1);
    let seen = raw(
        provider.address,
        "GET /function/one/headers HTTP/1.1\r\nHost: localhost\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\n\
         Proxy-Connection: keep-alive\r\nX-Forwarded-For: 6.6.6.6\r\nX-Mine: 1\r\n\r\n",
    );
    assert!(seen.0.contains("200") && seen.1.contains("x-mine"), "{seen:?}");
    let body = seen.1.split_once("\r\n\r\n").unwrap().1;
    assert!(!body.contains("x-secret") && !body.contains("proxy-connection"), "{body}");
    assert!(body.contains(r#""x-forwarded-for":"6.6.6.6, 127.0.0.1""#), "{body}");
    let broken = "POST /function/one HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    let before = pids(&provider, "one");
    for chunks in ["zz\r\n", "3\r\nabc\r\nzz\r\n"] {
        let (status, said) = raw(provider.address, &format!("{broken}{chunks}"));
        assert!(status.contains(" 400 "), "{chunks:?}: {status} {said}");
    }
    assert_eq!(provider.call("POST", "/function/one/echo", "x").0, 200);
    assert_eq!(pids(&provider, "one"), before, "the instance is not to blame");
    let metrics = "GET /metrics HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n";
    assert!(raw(provider.address, metrics).0.contains(" 403 "));
}

fn pids(provider: &Provider, name: &str) -> serde_json::Value {
    let (_, body) = provider.call("GET", &format!("/system/function/{name}"), "");
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    status["gshare"]["instances"][0]["pids"].clone()
}

/// The child outlives the process which forked it, as workers of a server do, and has a session of its own.
#[test]
fn children_of_a_function_end_with_it_and_with_a_host_that_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let script = dir.path().join("forks.sh");
    let program = env!("CARGO_BIN_EXE_gpu_function");
    let left = dir.path().join("left");
    let text = format!("#!/bin/sh\nsetsid sleep 1000 &\necho $! > {}\nexec {program}\n", left.display());
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let deploy = |provider: &Provider| {
        let body = format!(r#"{{"service":"f","image":"{}"{NO_GPU}}}"#, script.display());
        within(|| provider.call("POST", "/system/functions", &body).0 == 202);
        provider.replicas("f", 1);
        std::fs::read_to_string(&left).unwrap().trim().parse::<u32>().unwrap()
    };
    let mut provider = Provider::start(&dir.path().join("state"), &["--set", "host.no_gpu=true"]);
    let child = deploy(&provider);
    assert!(runs(child));
    assert_eq!(provider.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#).0, 202);
    within(|| !runs(child));
    let child = deploy(&provider);
    provider.child.kill().unwrap();
    provider.child.wait().unwrap();
    within(|| !runs(child));
}

#[test]
fn a_function_that_listens_elsewhere_is_told_where_and_what_is_asked_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim", "--set", "host.timeout=4"]);
    for (name, annotations) in [("given", r#"{"gshare/profile":"none"}"#), ("measured", "{}")] {
        let program = format!("/usr/bin/env PORT=0 {}", env!("CARGO_BIN_EXE_gpu_function"));
        let body = format!(
            r#"{{"service":"{name}","image":"x","envProcess":"{program}","envVars":{{"KERNELS":"0"}},"annotations":{annotations}}}"#
        );
        assert_eq!(provider.call("POST", "/system/functions", &body).0, 202);
    }
    for (name, field) in [("given", "problem"), ("measured", "measuring")] {
        within(|| {
            let (_, body) = provider.call("GET", &format!("/system/function/{name}"), "");
            let status: serde_json::Value = serde_json::from_str(&body).unwrap();
            let said = status["gshare"][field].as_str().unwrap_or_default();
            said.starts_with("listens at port ") && said.contains("not at $PORT")
        });
    }
    let (status, why) = provider.call("GET", "/function/given", "");
    assert!(status == 503 && why.contains("not at $PORT"), "{status} {why}");
}
