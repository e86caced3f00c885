//! `kill -9` at random: functions, stages, the node's daemon and the host itself, under load.

use crate::common::{Provider, call, within};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Kills of one run; `OPENFAAS_KILLS` asks for more.
const KILLS: usize = 12;

/// Not a test by itself: the other test starts it as the node's daemon.
#[test]
fn daemon_process() {
    if let Some(socket) = std::env::var_os("OPENFAAS_CHAOS_DAEMON") {
        gshared::Daemon::new(gshared::Config::at(socket)).unwrap().run().unwrap();
    }
}

fn daemon(socket: &Path) -> Child {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "chaos::daemon_process"])
        .env("OPENFAAS_CHAOS_DAEMON", socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let admin = gshared::config::admin_socket_of(socket);
    within(|| gshared::admin::snapshot(&admin).is_ok());
    child
}

fn pids(address: SocketAddr, name: &str) -> Vec<i64> {
    let Ok((200, body)) = call(address, "GET", &format!("/system/function/{name}"), "") else {
        return Vec::new();
    };
    let status: serde_json::Value = serde_json::from_str(&body).unwrap();
    let instances = status["gshare"]["instances"].as_array().unwrap();
    instances
        .iter()
        .flat_map(|one| one["pids"].as_array().unwrap())
        .filter_map(serde_json::Value::as_i64)
        .collect()
}

fn kill(pid: i64) {
    // An instance which has just ended is dead already.
    let _ = Command::new("/bin/kill").args(["-9", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// Processes left behind by a host, with its functions' variables but another parent.
fn orphans(state: &Path, host: u32) -> Vec<i32> {
    let all = std::fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let wanted = format!("secret_mount_path={}", state.canonicalize().unwrap().display());
    let orphan = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        parent != Some(host)
            && environment.split(|byte| *byte == 0).any(|one| one.starts_with(wanted.as_bytes()))
    };
    all.filter(orphan).collect()
}

#[test]
fn whatever_is_killed_comes_back_and_each_request_ends_once() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, state) = (dir.path().join("daemon.sock"), dir.path().join("state"));
    let dag = dir.path().join("dag.json");
    let on = |slice: &str| format!(r#"{{"slice":"{slice}","time_ns":20000000,"memory_bytes":6442450944}}"#);
    let component = |name: &str| format!(r#"{{"name":"{name}","profiles":[{}]}}"#, on("1g.10gb"));
    let text = format!(
        r#"{{"components":[{},{}],"edges":[{{"from":"a","to":"b"}}]}}"#,
        component("a"),
        component("b")
    );
    std::fs::write(&dag, text).unwrap();
    let mut daemon_child = daemon(&socket);
    let arguments = [
        "--sim=v100",
        "--sim=a100,mig=1g.10gb+1g.10gb",
        "--set",
        &format!("host.daemon={}", socket.display()),
        "--set",
        "host.timeout=20",
    ];
    let mut provider = Provider::start(&state, &arguments);
    let share = r#","annotations":{"fastgshare/gpu_quota_request":"0.3","fastgshare/gpu_sm_partition":"50"}"#;
    provider.deploy("resnet", &format!(r#"{share},"labels":{{"com.openfaas.scale.min":"2"}}"#));
    let staged =
        format!(r#","annotations":{{"gshare/workload":"pipeline","gshare/dag":"{}"}}"#, dag.display());
    provider.deploy("pipe", &staged);
    provider.replicas("resnet", 2);
    assert_eq!(provider.call("GET", "/function/pipe", "").0, 200);

    let kills = std::env::var("OPENFAAS_KILLS").map_or(KILLS, |text| text.parse().unwrap());
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut next = move |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random % below as u64).unwrap()
    };
    let mut seen: BTreeMap<u16, usize> = BTreeMap::new();
    let mut longest = Duration::ZERO;
    for number in 0..kills {
        let (address, stop) = (provider.address, AtomicBool::new(false));
        let statuses = std::thread::scope(|scope| {
            let load = |name: &'static str| {
                let stop = &stop;
                move || {
                    let mut statuses = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        // 0: the host itself has gone, and with it the connection.
                        let path = format!("/function/{name}");
                        statuses.push(call(address, "GET", &path, "").map_or(0, |(status, _)| status));
                        if statuses.last() == Some(&0) {
                            std::thread::yield_now();
                        }
                    }
                    statuses
                }
            };
            let threads: Vec<_> = ["resnet", "resnet", "pipe", "pipe"]
                .into_iter()
                .map(|name| scope.spawn(load(name)))
                .collect();
            let begun = Instant::now();
            // The last two of six are the daemon and the host.
            match next(6) {
                4 => {
                    let _ = (daemon_child.kill(), daemon_child.wait());
                    daemon_child = daemon(&socket);
                }
                5 => {
                    let _ = (provider.child.kill(), provider.child.wait());
                    within(|| orphans(&state, 0).is_empty());
                    provider = Provider::start(&state, &arguments);
                }
                choice => {
                    let name = ["resnet", "resnet", "pipe", "pipe"][choice];
                    let victims = pids(address, name);
                    if let Some(victim) = victims.get(next(victims.len().max(1))) {
                        kill(*victim);
                    }
                }
            }
            provider.replicas("resnet", 2);
            within(|| provider.call("GET", "/function/pipe", "").0 == 200);
            longest = longest.max(begun.elapsed());
            stop.store(true, Ordering::Relaxed);
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<u16>>()
        });
        for status in statuses {
            assert!([0, 200, 502, 503].contains(&status), "kill {number}: status {status}");
            *seen.entry(status).or_default() += 1;
        }
        assert!(orphans(&state, provider.child.id()).is_empty(), "kill {number}");
    }
    println!("{kills} kills, all back after at most {longest:?}, answers by status: {seen:?}");
    assert!(seen[&200] > kills, "{seen:?}");
    let _ = (daemon_child.kill(), daemon_child.wait());
}
