//! Functions that take several requests at once, as processes.

use crate::common::{Provider, call, within};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn deploy(provider: &Provider, name: &str, image: &str, annotations: &Value, env: &Value) {
    let body = json!({"service": name, "image": image, "annotations": annotations, "envVars": env,
        "labels": {"com.openfaas.scale.max": "1"}});
    let (status, said) = provider.call("POST", "/system/functions", &body.to_string());
    assert_eq!(status, 202, "{said}");
}

/// The program of the documents, in another language, over the wire alone.
#[test]
fn requests_that_come_together_are_one_call_and_each_has_its_own_answer() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--set", "host.no_gpu=true"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../batch_function.py");
    deploy(&provider, "f", &format!("python3 {script}"), &json!({"gshare/batch": "8"}), &json!({}));
    provider.replicas("f", 1);
    let (to, batched) = (provider.address, AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..12 {
            let batched = &batched;
            scope.spawn(move || {
                for number in 0..4 {
                    let body = "x".repeat(client) + &number.to_string();
                    let (status, said) = call(to, "POST", "/function/f", &body).unwrap();
                    let (size, echo) = said.split_once(' ').unwrap();
                    assert_eq!((status, echo), (200, body.as_str()), "{said}");
                    assert!((1..=8).contains(&size.parse::<u64>().unwrap()), "{said}");
                    batched.fetch_add(u64::from(size != "1"), Ordering::Relaxed);
                }
            });
        }
    });
    assert!(batched.into_inner() > 24, "most of 48 requests were in a batch");
    let (status, said) = provider.call("POST", "/function/f", &"x".repeat((16 << 20) + 1));
    assert!(status == 413 && said.contains("16 MiB"), "{status}: {said}");
}

/// Bursts of eight requests, one every 160 ms: how long each request took, in order.
fn load(provider: &Provider, name: &str, count: u64) -> Vec<Duration> {
    let (to, begun) = (provider.address, Instant::now());
    let mut took: Vec<Duration> = std::thread::scope(|scope| {
        let ask = |number: u64| {
            let due = Duration::from_millis(number / 8 * 160);
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
            let path = format!("/function/{name}");
            scope.spawn(move || {
                let since = Instant::now();
                let (status, said) = call(to, "GET", &path, "").unwrap();
                assert_eq!(status, 200, "{said}");
                since.elapsed()
            })
        };
        let asked: Vec<_> = (0..count).map(ask).collect();
        asked.into_iter().map(|one| one.join().unwrap()).collect()
    });
    took.sort_unstable();
    took
}

fn gpu_seconds(provider: &Provider, name: &str) -> f64 {
    let (_, text) = provider.call("GET", "/metrics", "");
    let label = format!("gshare_function_gpu_seconds{{function_name=\"{name}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&label)?.parse().ok()).unwrap_or_else(|| panic!("{text}"))
}

/// The same program without and with batches, in one run on one simulated device, under the same bursts.
#[test]
fn a_measured_function_takes_less_gpu_time_in_batches() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim=a100"]);
    let program = env!("CARGO_BIN_EXE_gpu_function");
    let run = |name: &str, annotations: &Value| {
        deploy(&provider, name, program, annotations, &json!({"KERNEL_US": "2000"}));
        assert_eq!(provider.call("GET", &format!("/function/{name}"), "").0, 200);
        std::thread::sleep(Duration::from_secs(2));
        let before = gpu_seconds(&provider, name);
        let count = 240;
        let took = load(&provider, name, count);
        // The daemon is asked once a second.
        std::thread::sleep(Duration::from_secs(2));
        let gpu = (gpu_seconds(&provider, name) - before) * 1e3 / count as f64;
        let at = |percent: usize| took[(took.len() - 1) * percent / 100].as_millis();
        println!("{name}: {gpu:.2} ms of GPU time a request, p50 {} ms, p95 {} ms", at(50), at(95));
        let p95 = at(95);
        assert_eq!(
            provider.call("DELETE", "/system/functions", &format!(r#"{{"functionName":"{name}"}}"#)).0,
            202
        );
        (gpu, p95)
    };
    let single = run("single", &json!({"gshare/slo": "400ms"}));
    let batches = run("batches", &json!({"gshare/slo": "400ms", "gshare/batch": "8"}));
    assert!(
        batches.0 < 0.5 * single.0,
        "GPU time of a request and p95, in ms: {batches:?}, {single:?} without"
    );
    assert!(batches.1 < single.1, "GPU time of a request and p95, in ms: {batches:?}, {single:?} without");
}

#[test]
fn a_batch_that_does_not_fit_the_memory_refuses_the_function_with_the_largest_that_does() {
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim=a100", "--set", "host.guess=2GiB"]);
    let env = json!({"BATCH_MIB": "700", "KERNEL_US": "500"});
    deploy(&provider, "f", env!("CARGO_BIN_EXE_gpu_function"), &json!({"gshare/batch": "8"}), &env);
    let problem = || {
        let (_, body) = provider.call("GET", "/system/function/f", "");
        serde_json::from_str::<Value>(&body).unwrap()["gshare"]["problem"].as_str().map(str::to_owned)
    };
    within(|| problem().is_some_and(|why| why.contains("gshare/batch: `8`: a batch of")));
    let why = problem().unwrap();
    assert!(why.contains("need at most 2"), "{why}");
    let (status, said) = provider.call("GET", "/function/f", "");
    assert!(status == 503 && said.contains("gshare/batch"), "{status}: {said}");
}
