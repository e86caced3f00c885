//! The whole story on two GPUs, a third GPU cut into MIG devices and a GPU for one request at a time, all of them simulated: functions are
//! deployed with their needs, over HTTP alone, and everything else follows.

use crate::common::{Provider, call, set_lost, within};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A component with times on slices as of a kernel with a speed in proportion to the slice.
fn component(name: &str, memory_gib: u64) -> Value {
    let on = |slice: &str, ms: u64| json!({"slice": slice, "time_ns": ms * 1_000_000, "memory_bytes": memory_gib << 30});
    json!({"name": name, "profiles": [on("1g.10gb", 40), on("2g.20gb", 22)]})
}

/// One measured point, so that a test skips measurements outside its subject.
fn points() -> Value {
    json!({"points": [{"sm_basis_points": 2_500, "quota_basis_points": 2_000, "batch": 1, "throughput_milli_rps": 20_000,
        "p50_ns": 13_000_000, "p95_ns": 28_000_000}]})
}

pub(crate) struct Story {
    pub(crate) provider: Provider,
    pub(crate) dir: tempfile::TempDir,
}

impl Story {
    pub(crate) fn start(dir: tempfile::TempDir) -> Self {
        Self::on(
            &["--sim=v100,devices=3", "--sim=a100,mig=1g.10gb+1g.10gb+2g.20gb", "--set", "host.whole=[2]"],
            dir,
        )
    }

    pub(crate) fn on(boards: &[&str], dir: tempfile::TempDir) -> Self {
        for (name, value) in [
            (
                "dag.json",
                json!({"name": "two", "components": [component("detect", 6), component("classify", 6)],
                "edges": [{"from": "detect", "to": "classify", "bytes": 6_291_456}]}),
            ),
            ("points.json", points()),
        ] {
            std::fs::write(dir.path().join(name), value.to_string()).unwrap();
        }
        let tenants = r#"host.tenants={"blue": {"max_requests": 1, "max_waiting": 2}}"#;
        let arguments = [boards, &["--set", tenants]].concat();
        let provider = Provider::start(&dir.path().join("state"), &arguments);
        Self { provider, dir }
    }

    pub(crate) fn file(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn try_deploy(&self, name: &str, annotations: &Value, more: &Value) -> (u16, String) {
        let mut body =
            json!({"service": name, "image": env!("CARGO_BIN_EXE_gpu_function"), "annotations": annotations});
        for (key, value) in more.as_object().unwrap() {
            body[key] = value.clone();
        }
        self.provider.call("POST", "/system/functions", &body.to_string())
    }

    pub(crate) fn deploy(&self, name: &str, annotations: &Value, more: &Value) {
        let (status, said) = self.try_deploy(name, annotations, more);
        assert_eq!(status, 202, "{name}: {said}");
    }

    pub(crate) fn ask(&self, name: &str) -> Value {
        let (status, body) = self.provider.call("GET", &format!("/function/{name}"), "");
        assert_eq!(status, 200, "{name}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    pub(crate) fn status(&self, name: &str) -> Value {
        let (_, body) = self.provider.call("GET", &format!("/system/function/{name}"), "");
        serde_json::from_str::<Value>(&body).unwrap()["gshare"].take()
    }

    /// The parts of the function's instances in this state.
    pub(crate) fn parts(&self, name: &str, life: &str) -> Vec<Vec<Value>> {
        let status = self.status(name);
        let instances = status["instances"].as_array().unwrap().iter();
        let alive = instances.filter(|instance| instance["life"] == life);
        alive.map(|instance| instance["parts"].as_array().unwrap().clone()).collect()
    }

    fn metric(&self, name: &str, function: &str) -> f64 {
        let (_, text) = self.provider.call("GET", "/metrics", "");
        let wanted = format!("{name}{{function_name=\"{function}\"}} ");
        text.lines()
            .find_map(|line| line.strip_prefix(&wanted)?.parse().ok())
            .unwrap_or_else(|| panic!("no {wanted}in\n{text}"))
    }
}

#[test]
fn a_function_with_an_slo_is_measured_placed_scaled_and_served_and_comes_back() {
    let story = Story::start(tempfile::tempdir().unwrap());
    // Deployed with a latency, profiled, placed with a share, started under the hook, served.
    story.deploy(
        "resnet",
        &json!({"gshare/slo": "1s"}),
        &json!({"labels": {"com.openfaas.scale.max": "3"}, "envVars": {"KERNELS": "2"}}),
    );
    assert!(story.ask("resnet")["gpu_ms"].as_f64().unwrap() > 3.6);
    let status = story.status("resnet");
    let measured = status["profile"]["points"].as_array().unwrap().len();
    assert!((2..=4).contains(&measured), "{status}");
    let share = &status["instances"][0]["parts"][0]["share"];
    assert!(
        share["time"]["request"].as_u64() >= Some(500) && share["memory_bytes"].as_u64() > Some(64 << 20),
        "{share}"
    );
    let client = status["instances"][0]["clients"][0].as_str().unwrap().to_owned();
    let admin = gshared::config::admin_socket_of(&story.dir.path().join("state/gshare.sock"));
    let snapshot = gshared::admin::snapshot(&admin).unwrap();
    let hooked =
        snapshot.clients.iter().find(|one| one.name == client).expect("the instance is the daemon's client");
    let request = share["time"]["request"].as_f64().unwrap() / 1e4;
    assert!((hooked.quota_request - request).abs() < 1e-9, "{hooked:?} {share}");

    // Load beyond one instance starts others, and its GPU time is counted.
    let address = story.provider.address;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    assert_eq!(call(address, "GET", "/function/resnet", "").unwrap().0, 200);
                }
            });
        }
        within(|| story.parts("resnet", "ready").len() == 3);
        within(|| story.metric("gshare_function_gpu_seconds", "resnet") > 0.1);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(story.metric("gshare_requests_within_slo", "resnet") > 0.0);
    assert!(story.metric("gshare_instance_starts", "resnet") >= 3.0);

    // To zero, and back at the next request.
    assert_eq!(story.provider.call("POST", "/system/scale-function/resnet", r#"{"replicas":0}"#).0, 202);
    within(|| story.status("resnet")["instances"].as_array().unwrap().is_empty());
    story.ask("resnet");

    // The next host of the same directory has the function and its measurement.
    let Story { provider, dir } = story;
    drop(provider);
    let story = Story::start(dir);
    story.ask("resnet");
    assert_eq!(story.status("resnet")["profile"]["points"].as_array().unwrap().len(), measured);
    let (_, logs) = story.provider.call("GET", "/system/logs?name=resnet", "");
    assert!(!logs.contains("is measured"), "{logs}");
}

/// As on a GPU without MPS: the function is measured at parts of the time, and its instances have all SMs.
#[test]
fn without_sm_partitions_a_function_is_measured_and_served_by_time_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("settings.json");
    std::fs::write(&file, json!({"fractional": {"pool": {"sm_partitions": false}}}).to_string()).unwrap();
    let story = Story::on(&["--sim=v100", "--settings", file.to_str().unwrap()], dir);
    story.deploy("resnet", &json!({"gshare/slo": "2s"}), &json!({"envVars": {"KERNELS": "2"}}));
    story.ask("resnet");
    let status = story.status("resnet");
    let points = status["profile"]["points"].as_array().unwrap();
    let of = |point: &Value, key: &str| point[key].as_u64().unwrap();
    assert!(points.iter().all(|point| of(point, "sm_basis_points") == 10_000), "{status}");
    let quotas: BTreeSet<u64> = points.iter().map(|point| of(point, "quota_basis_points")).collect();
    assert_eq!(quotas, BTreeSet::from([1_000, 2_000, 4_000]));
    assert_eq!(status["instances"][0]["parts"][0]["share"]["sm_bp"], 10_000, "{status}");
    // A quarter of the SMs for 60 % of the time: by its SMs it would fit beside the other.
    let share = json!({"fastgshare/gpu_quota_request": "0.6", "fastgshare/gpu_sm_partition": "25", "fastgshare/gpu_mem": "1GiB"});
    story.deploy("given", &share, &json!({}));
    story.ask("given");
    assert_eq!(story.status("given")["instances"][0]["parts"][0]["share"]["sm_bp"], 10_000);
}

/// One process with both devices, and its share on each, also while it is measured.
#[test]
fn a_large_model_is_spread_over_two_devices() {
    let story = Story::on(&["--sim=v100,devices=2"], tempfile::tempdir().unwrap());
    story.deploy("large", &json!({"gshare/slo": "10s", "gshare/devices": "2"}), &json!({}));
    assert_eq!(story.ask("large")["devices"], 2);
    let status = story.status("large");
    let parts = story.parts("large", "ready").remove(0);
    let on: BTreeSet<u64> = parts.iter().map(|part| part["gpu"].as_u64().unwrap()).collect();
    assert_eq!((parts.len(), on.len(), status["instances"][0]["pids"].as_array().unwrap().len()), (2, 2, 1));
    let memory = parts[0]["share"]["memory_bytes"].as_u64().unwrap();
    assert!(memory > 32 << 20 && memory == parts[1]["share"]["memory_bytes"], "{parts:?}");
    let client = status["instances"][0]["clients"][0].as_str().unwrap().to_owned();
    let admin = gshared::config::admin_socket_of(&story.dir.path().join("state/gshare.sock"));
    let snapshot = gshared::admin::snapshot(&admin).unwrap();
    let mine: Vec<_> = snapshot.clients.iter().filter(|one| one.name == client).collect();
    let devices: BTreeSet<_> = mine.iter().map(|one| one.gpu).collect();
    assert_eq!(devices.len(), 2, "{mine:?}");
    // Half of the weights and a context on each.
    assert!(mine.iter().all(|one| (32 << 20..memory).contains(&one.memory_bytes.get())), "{mine:?}");
    assert!(
        mine.iter().all(|one| one.memory_limit_bytes.map(|limit| limit.get()) == Some(memory)),
        "{mine:?}"
    );
    let (status, said) = story.try_deploy("larger", &json!({"gshare/devices": "0"}), &json!({}));
    assert!(status == 400 && said.contains("gshare/devices: `0`: need 1 to 64"), "{status} {said}");
}

#[test]
fn a_pipeline_lies_on_mig_devices_and_a_trainer_runs_beside_functions() {
    let story = Story::start(tempfile::tempdir().unwrap());
    let dag = story.file("dag.json");
    story.deploy(
        "pipe",
        &json!({"gshare/workload": "pipeline", "gshare/dag": dag, "gshare/slo": "500ms"}),
        &json!({"envVars": {"FILE_KIB": "1024"}}),
    );
    story.deploy(
        "train",
        &json!({"gshare/workload": "training", "gshare/workers": "2", "fastgshare/gpu_mem": "1GiB"}),
        &json!({"envVars": {"STEPS": "5", "KERNELS": "1"}}),
    );
    // Twelve GiB of components fit no 10 GiB device at once: two of these hold a stage each. One instance stays on the third device, and
    // eight requests at once are answered in time there. Under more load requests go through both stages, one after the other.
    let mut staged = Vec::new();
    within(|| {
        let seen = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..40).map(|_| scope.spawn(|| story.ask("pipe"))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        let through =
            |answer: &Value| answer["components"] == "classify" && answer["before"]["components"] == "detect";
        // The first stage's output goes to the second stage in shared memory.
        for answer in seen.iter().filter(|answer| through(answer)) {
            assert_eq!(answer["before"]["file_bytes"], (1 << 20) + 1, "{answer}");
        }
        staged.extend(story.parts("pipe", "ready").into_iter().find(|parts| parts.len() == 2));
        seen.iter().any(through)
    });
    let stages: Vec<_> = staged[0].iter().map(|part| (&part["stage"], &part["components"])).collect();
    assert_eq!(stages, [(&json!(0), &json!([0])), (&json!(1), &json!([1]))]);

    // The gang has finished its training; it is not started again.
    within(|| {
        story.provider.call("GET", "/system/logs?name=train", "").1.matches("5 steps done").count() == 2
    });
    within(|| story.status("train")["instances"].as_array().unwrap().is_empty());
    assert_eq!(story.metric("gshare_instance_starts", "train"), 1.0);
}

#[test]
fn a_pipeline_and_a_gang_go_elsewhere_when_a_gpu_under_them_is_lost() {
    let boards = ["--sim=a100,devices=2,mig=1g.10gb+1g.10gb+2g.20gb", "--sim=v100,devices=3"];
    let story = Story::on(&boards, tempfile::tempdir().unwrap());
    let state = story.dir.path().join("state");
    // GPUs under a function's instances, in every state of their life.
    let gpus = |name: &str| {
        let status = story.status(name);
        let instances = status["instances"].as_array().unwrap().iter();
        let parts = instances.flat_map(|instance| instance["parts"].as_array().unwrap());
        let gpu = |part: &Value| u32::try_from(part["gpu"].as_u64().unwrap()).unwrap();
        parts.map(gpu).collect::<BTreeSet<_>>()
    };
    let wishes =
        json!({"gshare/workload": "pipeline", "gshare/dag": story.file("dag.json"), "gshare/slo": "500ms"});
    story.deploy("pipe", &wishes, &json!({}));
    story.ask("pipe");
    let before = gpus("pipe");
    let lost = *before.first().unwrap();
    assert!(lost < 2, "on a MIG device: {before:?}");
    // A cut board has one GPU, so the V100s are the GPUs of the third.
    set_lost(&state, lost, 0, true);
    within(|| !gpus("pipe").contains(&lost));
    story.ask("pipe");
    assert_eq!(gpus("pipe"), BTreeSet::from([1 - lost]), "all MIG devices of a GPU are lost with it");

    let wishes = json!({"gshare/workload": "training", "gshare/workers": "2", "fastgshare/gpu_mem": "1GiB"});
    story.deploy("train", &wishes, &json!({"envVars": {"STEPS": "1000000", "KERNELS": "1"}}));
    within(|| story.parts("train", "ready").concat().len() == 2);
    let before = gpus("train");
    let lost = *before.last().unwrap();
    set_lost(&state, 2, lost - 2, true);
    // A gang runs as a whole: the worker on the present GPU starts again as well.
    within(|| {
        let gang = story.parts("train", "ready").concat();
        gang.len() == 2 && gang.iter().all(|part| part["gpu"] != lost)
    });
    assert!(story.metric("gshare_instance_starts", "train") >= 2.0);
}

/// Two requests a second each for 20 s: a device does not change its function with each request.
#[test]
fn three_functions_take_turns_in_the_memory_of_two_devices_and_all_are_in_time() {
    const CALLS: u32 = 40;
    let story = Story::on(&["--sim=v100,devices=2"], tempfile::tempdir().unwrap());
    let annotations = json!({"gshare/slo": "6s", "fastgshare/gpu_mem": "9GiB", "gshare/profile": story.file("points.json")});
    let names = ["a", "b", "c"];
    for name in names {
        story.deploy(name, &annotations, &json!({}));
        story.ask(name);
    }
    let sum = |metric: &str| names.iter().map(|name| story.metric(metric, name)).sum::<f64>();
    let (before, begun) = (sum("gshare_instances_parked"), std::time::Instant::now());
    let mut waits = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for call in 0..CALLS {
            for name in names {
                let story = &story;
                let ask = move || {
                    let sent = std::time::Instant::now();
                    story.ask(name);
                    sent.elapsed()
                };
                threads.push(scope.spawn(ask));
            }
            let due = begun + std::time::Duration::from_millis(500) * (call + 1);
            std::thread::sleep(due.saturating_duration_since(std::time::Instant::now()));
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    waits.sort_unstable();
    let parked = sum("gshare_instances_parked") - before;
    println!("{parked} parkings in 20 s; waits: median {:?}, longest {:?}", waits[60], waits[119]);
    assert_eq!(sum("gshare_requests_within_slo"), f64::from(3 * (CALLS + 1)), "{waits:?}");
    // An instance stays four times as long as its moves take, some 0.3 s.
    assert!((1.0..=30.0).contains(&parked), "{parked} parkings");
}

#[test]
fn requests_go_where_their_model_is_on_a_gpu_that_serves_one_at_a_time() {
    let story = Story::start(tempfile::tempdir().unwrap());
    let annotations = json!({"gshare/regime": "whole", "fastgshare/gpu_mem": "6GiB", "gshare/profile": story.file("points.json")});
    for name in ["x", "y", "z"] {
        story.deploy(name, &annotations, &json!({"labels": {"com.openfaas.scale.min": "0"}}));
    }
    let first = story.ask("x")["pid"].clone();
    assert_eq!(story.ask("x")["pid"], first, "the model is there");
    let second = story.ask("y")["pid"].clone();
    assert_eq!(story.ask("x")["pid"], first, "two models of 6 GiB fit 16 GiB");
    // A process tells of its memory within a tenth of a second.
    let admin = gshared::config::admin_socket_of(&story.dir.path().join("state/gshare.sock"));
    within(|| {
        let clients = gshared::admin::snapshot(&admin).unwrap().clients;
        let told = clients.iter().filter_map(|client| client.parking).filter(|of| of.bytes.get() > 0);
        told.count() == 2
    });
    story.ask("z");
    let there = |name: &str| story.parts(name, "ready").len();
    within(|| there("x") + there("y") + there("z") == 2);
    assert_eq!(there("z"), 1, "the third one took the place of another");
    let (evicted, process) = if there("x") == 0 { ("x", first) } else { ("y", second) };
    assert_eq!(story.ask(evicted)["pid"], process, "its process lived on, with its memory in host memory");
}

#[test]
fn a_tenant_beyond_its_limits_is_told_so_and_bad_wishes_are_refused() {
    let story = Story::start(tempfile::tempdir().unwrap());
    let points = story.file("points.json");
    story.deploy("blue", &json!({"gshare/tenant": "blue", "gshare/profile": points}), &json!({}));
    story.ask("blue");
    let address = story.provider.address;
    let seen = std::thread::scope(|scope| {
        let ask = || call(address, "GET", "/function/blue/slow?ms=800", "").unwrap();
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let refused: Vec<_> = seen.iter().filter(|(status, _)| *status == 429).collect();
    // One request runs, two wait.
    assert_eq!((refused.len(), seen.iter().filter(|(status, _)| *status == 200).count()), (3, 3), "{seen:?}");
    assert!(refused.iter().all(|(_, why)| why.contains("of the tenant")), "{refused:?}");

    let (status, why) =
        story.try_deploy("f", &json!({"gshare/slo": "1ms", "gshare/profile": points}), &json!({}));
    assert!(status == 400 && why.contains("28ms"), "the least latency that was measured: {why}");
    let (status, why) = story.try_deploy("f", &json!({"gshare/tenant": "red"}), &json!({}));
    assert!(status == 400 && why.contains("gshare/tenant: `red`"), "{why}");
    let (_, list) = story.provider.call("GET", "/system/functions", "");
    assert_eq!(list.matches("\"name\":").count(), 1, "nothing is half deployed: {list}");
    // The status of a function reports a crash at its start, with its last lines.
    let crash = json!({"envProcess": "/bin/ls /no/such/file"});
    story.deploy("crash", &json!({}), &crash);
    within(|| story.status("crash")["problem"].as_str().is_some_and(|why| why.contains("No such file")));
    assert_eq!(story.status("crash")["state"], "failing");
}

/// Shares, slices and whole devices: a deployment with nothing but a latency is measured, placed and served on each.
#[test]
fn a_deployment_with_nothing_but_an_slo_is_served_on_a_node_of_any_kind() {
    let nodes: [(&[&str], usize); 3] = [
        (&["--sim=v100"], 4),
        (&["--sim=a100,mig=1g.10gb+1g.10gb+2g.20gb"], 2),
        (&["--sim=v100,devices=2", "--set", "host.whole=[0,1]"], 1),
    ];
    for (boards, most) in nodes {
        let story = Story::on(boards, tempfile::tempdir().unwrap());
        for name in ["first", "second"] {
            story.deploy(name, &json!({"gshare/slo": "2s"}), &json!({"envVars": {"KERNELS": "2"}}));
        }
        for name in ["first", "second"] {
            assert!(story.ask(name)["gpu_ms"].as_f64().unwrap() > 3.6, "{boards:?}");
            let status = story.status(name);
            let points = status["profile"]["points"].as_array().unwrap().len();
            assert!((1..=most).contains(&points) && points * 2 >= most, "{boards:?}: {status}");
            assert!(status["problem"].is_null(), "{boards:?}: {status}");
            let sliced = status["instances"][0]["parts"][0]["slice"].is_object();
            assert_eq!(sliced, boards[0].contains("mig"), "{boards:?}: {status}");
        }
        // To zero, and back at the next request.
        let none = r#"{"replicas":0}"#;
        assert_eq!(story.provider.call("POST", "/system/scale-function/first", none).0, 202);
        story.ask("first");
        // The next host of the same directory measures nothing.
        let Story { provider, dir } = story;
        drop(provider);
        let story = Story::on(boards, dir);
        story.ask("second");
        let (_, logs) = story.provider.call("GET", "/system/logs?name=second", "");
        assert!(!logs.contains("is measured"), "{boards:?}: {logs}");
    }
}

#[test]
fn a_wish_that_no_device_of_the_node_can_meet_is_refused_in_its_own_words() {
    let refused = |story: &Story, annotations: Value, more: Value, part: &str| {
        let (status, why) = story.try_deploy("f", &annotations, &more);
        assert!(status == 400 && why.contains(part), "{annotations}: {status} {why}");
        assert!(!why.contains("fn0") && !why.contains("max_p95"), "{why}");
    };
    let trains = |workers: &str| json!({"gshare/workload": "training", "gshare/workers": workers});
    let share = json!({"fastgshare/gpu_quota_request": "0.3", "fastgshare/gpu_sm_partition": "50"});
    let story = Story::on(&["--sim=v100,devices=2"], tempfile::tempdir().unwrap());
    refused(
        &story,
        trains("5"),
        json!({}),
        "gshare/workers: `5`: each has a GPU of its own, and 2 of this node",
    );
    refused(&story, json!({"gshare/devices": "3"}), json!({}), "gshare/devices: `3`: need at most 2");
    refused(
        &story,
        json!({"gshare/regime": "sliced"}),
        json!({}),
        "gshare/regime: `sliced`: need GPUs that are cut",
    );
    refused(&story, json!({"fastgshare/gpu_mem": "20GiB"}), json!({}), "need at most 15.8 GiB");
    refused(
        &story,
        json!({}),
        json!({"envProcess": "/nope/prog"}),
        "`/nope/prog`: this host has no such program",
    );
    let slo = json!({"gshare/slo": "1ms", "gshare/profile": story.file("points.json")});
    refused(&story, slo, json!({}), "gshare/slo: `1ms`: half of it is for waiting");
    let story = Story::on(&["--sim=a100,mig=1g.10gb+2g.20gb"], tempfile::tempdir().unwrap());
    refused(
        &story,
        trains("1"),
        json!({}),
        "`training`: need GPUs whose time is shared, and this node has none",
    );
    refused(&story, share, json!({}), "gpu_quota_request: the GPUs of this node are cut into MIG devices");
    let story = Story::on(&["--sim=v100", "--set", "host.whole=[0]"], tempfile::tempdir().unwrap());
    let two = json!({"labels": {"com.openfaas.scale.min": "2"}});
    refused(&story, json!({"gshare/slo": "1s"}), two, "com.openfaas.scale.min: `2`: need at most 1");
}

/// A function with kernels of 4 ms. Beside the trainer its latencies come from turns, which once refused it for ever.
#[test]
fn a_function_that_is_measured_beside_a_trainer_is_served_and_is_measured_again_when_that_is_asked_for() {
    let story = Story::on(&["--sim=v100"], tempfile::tempdir().unwrap());
    story.deploy(
        "train",
        &json!({"gshare/workload": "training", "fastgshare/gpu_mem": "1GiB"}),
        &json!({"envVars": {"STEPS": "1000000", "KERNELS": "1"}}),
    );
    within(|| story.parts("train", "ready").len() == 1);
    let wishes = (json!({"gshare/slo": "150ms"}), json!({"envVars": {"KERNELS": "2"}}));
    story.deploy("vision", &wishes.0, &wishes.1);
    story.ask("vision");
    let status = story.status("vision");
    assert!(status["others_bp"].as_u64() > Some(0) && status["problem"].is_null(), "{status}");
    // Both classes follow from the request.
    let admin = gshared::config::admin_socket_of(&story.dir.path().join("state/gshare.sock"));
    let snapshot = gshared::admin::snapshot(&admin).unwrap();
    let class = |name: &str| {
        let mine = snapshot.clients.iter().find(|client| client.name.starts_with(name));
        mine.and_then(|client| client.class).map(|class| class.to_string())
    };
    assert_eq!(class("vision").as_deref(), Some("slo-sensitive:30"), "{snapshot:?}");
    assert_eq!(class("train").as_deref(), Some("best-effort"), "{snapshot:?}");

    let measured = || {
        let (_, logs) = story.provider.call("GET", "/system/logs?name=vision", "");
        logs.matches("is started for the first time").count()
    };
    assert_eq!(measured(), 1);
    // The same program is not measured for each deployment.
    story.deploy("vision", &wishes.0, &wishes.1);
    story.ask("vision");
    assert_eq!(measured(), 1);
    assert_eq!(story.provider.call("POST", "/system/profile/vision", "").0, 202);
    story.ask("vision");
    within(|| measured() == 2 && story.status("vision")["profile"].is_object());
    let (status, why) = story.provider.call("POST", "/system/profile/train", "");
    assert!(status == 400 && why.contains("`train` is not measured"), "{status} {why}");
    assert_eq!(story.provider.call("POST", "/system/profile/nobody", "").0, 404);
    // A returning function counts as new.
    let body = json!({"functionName": "vision"}).to_string();
    assert_eq!(story.provider.call("DELETE", "/system/functions", &body).0, 202);
    within(|| story.try_deploy("vision", &wishes.0, &wishes.1).0 == 202);
    story.ask("vision");
    assert_eq!(measured(), 1, "the log is new, and so is the measurement");
}
