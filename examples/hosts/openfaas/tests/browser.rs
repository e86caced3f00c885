//! The page in a headless Chromium: it shows the data of `/system/state` and `/system/history`.

#[path = "../../../../gshare-sched/daemon/tests/page/browser.rs"]
mod page;

use crate::common::{Provider, within};
use page::{WINDOWS, browser, look};
use serde_json::{Value, json};

/// The part of the page about a function.
fn card<'a>(page: &'a str, name: &str) -> &'a str {
    page.split("<article>").find(|card| card.contains(&format!("Log of {name}<"))).expect(name)
}

#[test]
fn the_page_shows_what_the_host_says() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--sim=v100,devices=2"]);
    let share = r#","annotations":{"fastgshare/gpu_quota_request":"0.4","fastgshare/gpu_sm_partition":"50"}"#;
    provider.deploy("resnet", share);
    provider.deploy("plain", r#","envVars":{"KERNELS":"0"},"annotations":{"gshare/profile":"none"}"#);
    provider.replicas("resnet", 1);
    provider.replicas("plain", 1);
    for _ in 0..3 {
        assert_eq!(provider.call("GET", "/function/resnet", "").0, 200);
    }
    let get = |path: &str| serde_json::from_str::<Value>(&provider.call("GET", path, "").1).unwrap();
    let state = || get("/system/state");
    // The daemon knows the process, so the page shows its request; and a sample has the requests.
    within(|| !state()["functions"][1]["clients"].as_array().unwrap().is_empty());
    let sampled = |sample: &Value| sample["functions"]["resnet"]["p95_ns"].is_u64();
    within(|| get("/system/history").as_array().unwrap().iter().any(sampled));
    let newest = get("/system/history").as_array().unwrap().last().unwrap()["at_ns"].as_u64().unwrap();
    let since = get(&format!("/system/history?after_ns={newest}"));
    assert!(
        since.as_array().unwrap().iter().all(|sample| sample["at_ns"].as_u64() > Some(newest)),
        "{since}"
    );
    let said = state();
    for window in WINDOWS {
        let page = look(&browser, provider.address, &[], window).html;
        assert!(page.contains("2 GPUs · 2 functions · 2 instances"), "{page}");
        for of in said["functions"].as_array().unwrap() {
            let card = card(&page, of["name"].as_str().unwrap());
            assert!(card.contains(&format!("{} · 1 ready", of["state"].as_str().unwrap())), "{card}");
            if of["answered"].as_u64().unwrap() > 0 {
                assert!(card.contains(&format!("{} requests answered", of["answered"])), "{card}");
                assert!(card.contains(r#"class="first" d="M"#), "the line of the latency: {card}");
            }
        }
        assert!(card(&page, "plain").contains(" kernels a request"), "its output, once opened: {page}");
        for device in said["devices"].as_array().unwrap() {
            assert!(page.contains(device["name"].as_str().unwrap()), "{device}");
            assert!(page.contains(&format!("{} °C", device["celsius"])), "{device}");
        }
        assert!(
            page.contains("resnet 0: guaranteed 40 % of the time, at most 40 %, 50 % of the SMs"),
            "what is read aloud of a GPU: {page}"
        );
        let newest = said["decisions"][0]["what"].as_str().unwrap();
        assert!(page.contains(newest), "{newest}");
    }
    // The page reports a lost GPU with the driver's reason, in words and to screen readers.
    let board = dir.path().join("device");
    let board = fake_cuda::sim::SimDevice::open(&board, &fake_cuda::Spec::default()).unwrap();
    assert!(board.set_lost(1, true));
    within(|| state()["devices"][1]["lost"].is_string());
    let why = state()["devices"][1]["lost"].as_str().unwrap().to_owned();
    let page = look(&browser, provider.address, &[], WINDOWS[2]).html;
    assert!(page.contains(&format!("⚠ GPU 1 is lost: {why}<")) && page.contains("GPU 1 is lost\""), "{page}");
    assert_eq!(page.matches(">Lost: ").count(), 1, "the other one is not: {page}");
}

/// A state of 64 GPUs and 500 instances of twenty functions, and its history of five minutes.
fn crowd() -> (Value, Value) {
    let slices = json!([
        {"profile": "1g.10gb", "start": 0, "width": 1},
        {"profile": "1g.10gb", "start": 1, "width": 1},
        {"profile": "2g.20gb", "start": 2, "width": 2},
        {"profile": "3g.40gb", "start": 4, "width": 4}
    ]);
    let device = |gpu: u64| {
        let regime = match gpu % 3 {
            0 => "fractional",
            1 => "sliced",
            _ => "whole",
        };
        json!({
            "gpu": gpu, "name": "A100", "regime": regime,
            "memory_bytes": 80u64 << 30, "held_bytes": 40u64 << 30, "celsius": 60, "milliwatts": 250_000,
            "slices": if gpu % 3 == 1 { slices.clone() } else { json!([]) }, "weights": []
        })
    };
    let client = |name: &str, gpu: u64| {
        json!({
            "client": name, "name": name, "pid": gpu, "uid": 0, "program": "serve.py", "gpu": gpu,
            "quota_request": 0.1, "quota_limit": 0.5, "sm": 0.5, "measured": 0.09, "memory_bytes": 1u64 << 30,
            "memory_limit_bytes": null, "waited_ns": 1_000_000u64, "launches": 100_000, "holds_token": gpu < 32,
            "waiting_ns": null, "class": null, "scale_state": null, "scaled_request": null, "scaled_limit": null, "observed": false
        })
    };
    let share = json!({"time": {"request": 1000, "limit": 5000}, "sm_bp": 5000, "memory_bytes": 1u64 << 30});
    let function = |number: u64| {
        let name = format!("function-{number}");
        let staged = number % 3 == 1;
        let places: Vec<(u64, String)> =
            (0..25).map(|n| ((number + 3 * n) % 63 / 3 * 3 + number % 3, format!("{name}-{n}"))).collect();
        let part = |gpu: u64, stage: u64| {
            let slice = staged.then(|| json!({"profile": 0, "start": 2 * stage}));
            json!({"gpu": gpu, "stage": stage, "share": share, "slice": slice})
        };
        let instances = places.iter().enumerate().map(|(n, (gpu, client))| {
            let parts: Vec<Value> = (0..if staged { 3 } else { 1 }).map(|stage| part(*gpu, stage)).collect();
            json!({"instance": n, "life": "ready", "parts": parts, "requests": 1, "pids": [1], "clients": [client]})
        });
        json!({
            "name": name, "state": "serving", "workload": if staged { "pipeline" } else { "inference" }, "slo_ns": 50_000_000,
            "waiting": number % 2, "answered": 1000, "within_slo": 990, "rejected": 0, "starts": 25, "parked": 0, "migrated": 0,
            "pipelined": 0, "gpu_seconds": 12.5, "memory_bytes": 1u64 << 30, "instances": instances.collect::<Vec<_>>(),
            "clients": places.iter().map(|(gpu, name)| client(name, *gpu)).collect::<Vec<_>>()
        })
    };
    let sample = |second: u64| {
        let of = |number: u64| {
            let p95 = if number == 7 { 61_000_000 } else { 20_000_000 + second * 50_000 };
            let sample =
                json!({"rate": 12.5, "p50_ns": 10_000_000, "p95_ns": p95, "ready": 25, "waiting": 0});
            (format!("function-{number}"), sample)
        };
        let functions: serde_json::Map<String, Value> = (0..20).map(of).collect();
        let gpus: serde_json::Map<String, Value> = (0..64).map(|gpu| (gpu.to_string(), json!(0.6))).collect();
        json!({"at_ns": second * 1_000_000_000, "functions": functions, "gpus": gpus})
    };
    let state = json!({
        "now_ns": 300_000_000_000u64, "version": "0", "devices": (0..64).map(device).collect::<Vec<_>>(),
        "functions": (0..20).map(function).collect::<Vec<_>>(), "clients": [], "models": null,
        "decisions": [{"at_ns": 299_000_000_000u64, "what": "function-1 24 starts on GPU 1 slice 0"}]
    });
    (state, (1..=300).map(sample).collect())
}

#[test]
fn a_page_of_sixty_four_gpus_and_five_hundred_instances_is_whole_and_fluid() {
    let Some(browser) = browser() else { return };
    let dir = tempfile::tempdir().unwrap();
    let provider = Provider::start(dir.path(), &["--set=host.no_gpu=true"]);
    let (state, history) = crowd();
    for window in WINDOWS {
        let answers = [("/system/state", state.clone()), ("/system/history", history.clone())];
        let page = look(&browser, provider.address, &answers, window).html;
        assert!(page.contains("64 GPUs · 20 functions · 500 instances"), "{page}");
        assert_eq!(
            (page.matches("<article>").count(), page.matches("<div role=\"row\">").count()),
            (84, 500)
        );
        assert!(page.contains("⚠ function-7 is late: p95 is 61.0 ms, its SLO 50.0 ms<"), "{page}");
        assert!(
            page.contains("function-1: 1 requests wait: all of its 25 ready instances are busy"),
            "{page}"
        );
        assert!(page.contains("function-1 24 (ready): stage 0 on GPU "), "{page}");
        assert!(card(&page, "function-0").contains("Latency, p95: 35.0 ms of 50.0 ms now"), "{page}");
    }
}
