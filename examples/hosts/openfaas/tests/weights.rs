//! Weights that instances share on a device: the accounts of the simulated driver, the daemon and the platform, in the life of the
//! instances and of the store.

use crate::common::within;
use crate::story::Story;
use gshare_modelstore::store::{Access, MemoryTier};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

/// A safetensors file with one tensor of `bytes` bytes, of which the header claims `claimed`. Most of it is a hole.
fn safetensors(path: &Path, bytes: u64, claimed: u64) {
    let header = json!({"w": {"dtype": "U8", "shape": [claimed], "data_offsets": [0, claimed]}}).to_string();
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&u64::try_from(header.len()).unwrap().to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    let end = file.seek(SeekFrom::End(0)).unwrap() + bytes;
    file.set_len(end).unwrap();
}

fn wishes(model: &Path, memory: &str) -> Value {
    json!({"gshare/model": model, "fastgshare/gpu_quota_request": "0.1", "fastgshare/gpu_sm_partition": "25",
        "fastgshare/gpu_mem": memory})
}

fn at_least(count: u32) -> Value {
    json!({"labels": {"com.openfaas.scale.min": count.to_string()}})
}

fn state(story: &Story) -> Value {
    serde_json::from_str(&story.provider.call("GET", "/system/state", "").1).unwrap()
}

/// Weights on the first device, of which there is one.
fn weights(story: &Story) -> Value {
    let weights = state(story)["devices"][0]["weights"].take();
    assert!(weights.as_array().unwrap().len() <= 1, "{weights}");
    weights[0].clone()
}

fn pids(story: &Story, name: &str) -> BTreeSet<u64> {
    let status = story.status(name);
    let instances = status["instances"].as_array().unwrap().iter();
    let ready = instances.filter(|instance| instance["life"] == "ready");
    ready.flat_map(|one| one["pids"].as_array().unwrap()).filter_map(Value::as_u64).collect()
}

/// Bytes on the first board by process: the driver's own account.
fn bytes(story: &Story, counts: fn(&str) -> bool) -> BTreeMap<u64, u64> {
    let file = story.dir.path().join("state/device");
    let truth = fake_cuda::sim::SimDevice::open(&file, &fake_cuda::Spec::default()).unwrap().truth();
    let of = |process: &fake_cuda::sim::ProcessTruth| {
        let kinds = process.gpus.iter().flat_map(|gpu| &gpu.memory_bytes);
        kinds.filter(|(kind, _)| counts(kind)).map(|(_, bytes)| bytes).sum::<u64>()
    };
    let live = truth.processes.iter().filter(|process| process.live);
    live.map(|process| (process.pid.into(), of(process))).filter(|(_, bytes)| *bytes > 0).collect()
}

/// The same without contexts.
fn truth(story: &Story) -> BTreeMap<u64, u64> {
    bytes(story, |kind| kind != "context")
}

fn contexts(story: &Story) -> BTreeMap<u64, u64> {
    bytes(story, |kind| kind == "context")
}

fn kill(pid: u64) {
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[test]
fn seven_instances_of_a_model_have_one_copy_on_the_device_and_the_books_agree() {
    const BYTES: u64 = 64 << 20;
    let story = Story::start(tempfile::tempdir().unwrap());
    let (file, liar) = (story.dir.path().join("m.safetensors"), story.dir.path().join("liar.safetensors"));
    safetensors(&file, BYTES, BYTES);
    safetensors(&liar, 16, 1 << 20);
    let (status, why) = story.try_deploy("liar", &wishes(&liar, "128MiB"), &json!({}));
    assert!(
        status == 400 && why.contains("gshare/model") && why.contains("liar.safetensors"),
        "{status} {why}"
    );
    story.deploy("seven", &wishes(&file, "128MiB"), &at_least(7));
    story.provider.replicas("seven", 7);
    let users = |name: &str| {
        let clients =
            state(&story)["functions"].as_array().unwrap().iter().find(|of| of["name"] == name).cloned();
        let clients = clients.unwrap()["clients"].as_array().unwrap().clone();
        clients.iter().map(|client| client["memory_bytes"].as_u64().unwrap()).collect::<Vec<u64>>()
    };
    // Daemon: the weights are in one account, and the rest of each instance in its own, equal and less than the weights.
    within(|| users("seven").iter().filter(|bytes| **bytes > 0).count() == 7);
    within(|| weights(&story)["memory_bytes"] == BYTES);
    let held = weights(&story);
    let (arena, store) = (held["memory_bytes"].as_u64().unwrap(), held["pid"].as_u64().unwrap());
    assert_eq!(arena, BYTES, "{held}");
    assert_eq!(held["instances"].as_array().unwrap().len(), 7, "{held}");
    let used = users("seven");
    let rest = used[0];
    assert!(used.len() == 7 && used.iter().all(|one| *one == rest) && rest < arena, "{used:?}");
    // Driver: the same, to the byte.
    let driver = truth(&story);
    assert_eq!(driver.get(&store), Some(&arena), "{driver:?}");
    assert_eq!(driver.values().sum::<u64>(), arena + 7 * rest, "{driver:?}");
    assert_eq!(contexts(&story).get(&store), None, "the store has no context");
    assert_eq!(contexts(&story).len(), 7);
    // Platform: an instance is booked without them.
    let booked = story.status("seven")["instances"][0]["parts"][0]["share"]["memory_bytes"].as_u64();
    assert_eq!(booked, Some(128 << 20));
    assert_eq!(state(&story)["models"]["models"], json!([]), "and no copy in host memory");

    // Another function and another version have the same copy.
    story.deploy("eighth", &wishes(&file, "64MiB"), &json!({}));
    story.ask("eighth");
    story.deploy("eighth", &wishes(&file, "64MiB"), &json!({"envVars": {"VERSION": "2"}}));
    story.ask("eighth");
    within(|| weights(&story)["instances"].as_array().unwrap().len() == 8);
    assert_eq!(weights(&story)["pid"], store);

    // An instance that dies does not take them along.
    let before = pids(&story, "seven");
    kill(*before.first().unwrap());
    within(|| pids(&story, "seven").len() == 7 && pids(&story, "seven") != before);
    assert_eq!(weights(&story)["pid"], store);
    assert_eq!(truth(&story).get(&store), Some(&arena));

    // A file that has changed is another model: those that run keep theirs.
    safetensors(&file, BYTES / 2, BYTES / 2);
    story.deploy("ninth", &wishes(&file, "64MiB"), &json!({}));
    story.ask("ninth");
    let sizes = || -> BTreeSet<u64> {
        let both = state(&story)["devices"][0]["weights"].clone();
        both.as_array().unwrap().iter().filter_map(|one| one["memory_bytes"].as_u64()).collect()
    };
    within(|| sizes() == BTreeSet::from([BYTES, BYTES / 2]));

    // The last user's end frees them.
    for name in ["seven", "eighth", "ninth"] {
        assert_eq!(truth(&story).get(&store), (name != "ninth").then_some(&arena), "{name}");
        let removed =
            story.provider.call("DELETE", "/system/functions", &json!({"functionName": name}).to_string());
        assert_eq!(removed.0, 202);
        within(|| !state(&story)["functions"].as_array().unwrap().iter().any(|of| of["name"] == name));
        if name != "seven" {
            let begun = Instant::now();
            let left = if name == "eighth" { 1 } else { 0 };
            within(|| state(&story)["devices"][0]["weights"].as_array().unwrap().len() == left);
            assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        }
    }
    within(|| truth(&story).is_empty());
}

#[test]
fn the_death_of_the_store_of_weights_ends_their_users_with_the_reason_and_others_start() {
    const BYTES: u64 = 8 << 20;
    let story = Story::on(&["--sim=v100"], tempfile::tempdir().unwrap());
    let file = story.dir.path().join("m.safetensors");
    safetensors(&file, BYTES, BYTES);
    story.deploy("f", &wishes(&file, "64MiB"), &at_least(3));
    story.deploy(
        "other",
        &json!({"fastgshare/gpu_quota_request": "0.1", "fastgshare/gpu_sm_partition": "25",
        "fastgshare/gpu_mem": "128MiB"}),
        &at_least(1),
    );
    story.provider.replicas("f", 3);
    story.provider.replicas("other", 1);
    let (before, other, store) = (pids(&story, "f"), pids(&story, "other"), weights(&story)["pid"].clone());
    kill(store.as_u64().unwrap());
    within(|| pids(&story, "f").len() == 3 && pids(&story, "f").is_disjoint(&before));
    assert_eq!(pids(&story, "other"), other, "it uses no weights of a store");
    within(|| weights(&story)["memory_bytes"] == BYTES);
    assert_ne!(weights(&story)["pid"], store);
    let driver = truth(&story);
    assert_eq!(driver.values().filter(|bytes| **bytes == BYTES).count(), 1, "{driver:?}");
    let (_, log) = story.provider.call("GET", "/system/logs?name=f", "");
    let told = log
        .lines()
        .filter(|line| line.contains("the store of the weights of") && line.contains("m.safetensors"));
    assert_eq!(told.count(), 3, "{log}");
    story.ask("f");
}

#[test]
fn a_function_with_a_model_is_measured_without_its_weights_and_has_its_own_on_a_whole_device() {
    const BYTES: u64 = 256 << 20;
    let story = Story::on(&["--sim=v100,devices=2", "--set", "host.whole=[1]"], tempfile::tempdir().unwrap());
    let file = story.dir.path().join("m.safetensors");
    safetensors(&file, BYTES, BYTES);
    let measured = json!({"gshare/slo": "2s", "gshare/model": file});
    story.deploy("shares", &measured, &json!({"envVars": {"KERNELS": "2"}}));
    story.ask("shares");
    let memory = |name: &str| {
        let share = story.status(name)["instances"][0]["parts"][0]["share"].take();
        share["memory_bytes"].as_u64().unwrap()
    };
    assert!(memory("shares") < BYTES, "{}", memory("shares"));
    within(|| weights(&story)["memory_bytes"] == BYTES);
    let points = story.file("points.json");
    let alone = json!({"gshare/regime": "whole", "gshare/model": file, "fastgshare/gpu_mem": "128MiB", "gshare/profile": points});
    story.deploy("alone", &alone, &json!({}));
    story.ask("alone");
    assert_eq!(memory("alone"), BYTES + (128 << 20));
    within(|| {
        let clients = state(&story)["functions"][0]["clients"].take();
        clients[0]["memory_bytes"].as_u64() >= Some(BYTES)
    });
}

/// A program with nothing but its environment.
const PYTHON: &str = r#"
import http.server, json, os
import gshare_store

model = gshare_store.connect().get(os.environ["GSHARE_MODEL"], tier=gshare_store.GPU)
tensor = model["w"]
about = json.dumps({"bytes": tensor.nbytes, "read_only": tensor.__cuda_array_interface__["data"][1]})

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(about)))
        self.end_headers()
        self.wfile.write(about.encode())

http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"#;

#[test]
fn a_python_program_finds_library_and_socket_and_maps_the_weights() {
    const BYTES: u64 = 6 << 20;
    let story = Story::on(&["--sim=v100"], tempfile::tempdir().unwrap());
    let (file, program) = (story.dir.path().join("m.safetensors"), story.dir.path().join("serve.py"));
    safetensors(&file, BYTES, BYTES);
    std::fs::write(&program, PYTHON).unwrap();
    let command = format!("python3 {}", program.display());
    let three = json!({"envProcess": command, "labels": {"com.openfaas.scale.min": "3"}});
    story.deploy("python", &wishes(&file, "64MiB"), &three);
    story.provider.replicas("python", 3);
    assert_eq!(story.ask("python"), json!({"bytes": BYTES, "read_only": true}));
    let store = weights(&story)["pid"].as_u64().unwrap();
    assert_eq!(truth(&story), BTreeMap::from([(store, BYTES)]), "three processes, one copy");
}

/// Three times 9 and 2 GiB would need three devices.
#[test]
fn weights_are_booked_once_on_a_device_and_a_model_larger_than_it_is_refused() {
    let story = Story::on(&["--sim=v100"], tempfile::tempdir().unwrap());
    let (large, larger) = (story.dir.path().join("9.safetensors"), story.dir.path().join("15.safetensors"));
    safetensors(&large, 9 << 30, 9 << 30);
    safetensors(&larger, 15 << 30, 15 << 30);
    // The program does not ask for them: they are booked all the same.
    let four = json!({"labels": {"com.openfaas.scale.min": "4"}, "envVars": {"KERNELS": "0"}});
    story.deploy("four", &wishes(&large, "2GiB"), &four);
    story.provider.replicas("four", 3);
    // 15 of 16 GiB are booked: there is room for this one, and for none that takes 2.
    let share = json!({"fastgshare/gpu_quota_request": "0.1", "fastgshare/gpu_sm_partition": "25", "fastgshare/gpu_mem": "512MiB"});
    story.deploy("small", &share, &json!({"envVars": {"KERNELS": "0"}}));
    story.provider.replicas("small", 1);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(story.status("four")["instances"].as_array().unwrap().len(), 3, "{}", story.status("four"));

    let (status, why) = story.try_deploy("larger", &wishes(&larger, "2GiB"), &json!({}));
    for part in
        ["gshare/model", "15.safetensors", "15 GiB", "2 GiB", "at most 15.8 GiB", "fastgshare/gpu_mem"]
    {
        assert!(status == 400 && why.contains(part), "{part}: {status} {why}");
    }
    assert_eq!(story.provider.call("GET", "/system/function/larger", "").0, 404, "nothing is half deployed");
}

/// Switched off and on in one run: each instance with a copy of its own, and all with one.
#[test]
fn instances_with_a_copy_each_and_with_one_for_all() {
    const BYTES: u64 = 256 << 20;
    let story = Story::on(&["--sim=v100,devices=2"], tempfile::tempdir().unwrap());
    let file = story.dir.path().join("m.safetensors");
    safetensors(&file, BYTES, BYTES);
    // Off: the program is told of the node's store, as on devices where instances share nothing.
    let store = story.dir.path().join("state/store.sock");
    let node = gshare_modelstore::client::Client::connect(&store).unwrap();
    let name = file.to_str().unwrap();
    let more = |env: Value| json!({"labels": {"com.openfaas.scale.min": "4"}, "envVars": env});
    let mut seen = Vec::new();
    for shared in [false, true, false, true] {
        let mut annotations = wishes(&file, if shared { "64MiB" } else { "320MiB" });
        let mut env = json!({});
        let begun = Instant::now();
        if !shared {
            annotations.as_object_mut().unwrap().remove("gshare/model");
            env = json!({"GSHARE_MODEL": file, "GSHARE_STORE": store});
            let open = std::fs::File::open(&file).unwrap();
            node.put_file(name, Access::Private, MemoryTier::Host, &open, |_, _| {}).unwrap();
        }
        story.deploy("f", &annotations, &more(env));
        within(|| !pids(&story, "f").is_empty());
        let first = begun.elapsed();
        story.provider.replicas("f", 4);
        let (all, bytes) = (begun.elapsed(), truth(&story).values().sum::<u64>());
        let (again, before) = (Instant::now(), pids(&story, "f"));
        kill(*before.first().unwrap());
        within(|| pids(&story, "f").len() == 4 && pids(&story, "f") != before);
        let again = again.elapsed();
        println!(
            "shared {shared}: {} MiB, first {first:.2?}, all four {all:.2?}, one again {again:.2?}",
            bytes >> 20
        );
        seen.push(bytes);
        story.provider.call("DELETE", "/system/functions", r#"{"functionName":"f"}"#);
        within(|| truth(&story).is_empty());
        if !shared {
            within(|| node.evict(name, true).is_ok());
        }
    }
    assert!(seen[0] >= 4 * BYTES && seen[1] >= BYTES && seen[1] <= BYTES + 4 * (32 << 20), "{seen:?}");
}
