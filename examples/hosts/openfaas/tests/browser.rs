//! The page in a headless Chromium: it shows the data of `/system/state`. Without Chromium the test reports this and ends.

use crate::common::{Provider, within};
use serde_json::Value;
use std::process::Command;

/// Distributions' names of the browser.
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn browser() -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH")?;
    let all = std::env::split_paths(&path).flat_map(|dir| BROWSERS.map(|name| dir.join(name)));
    all.into_iter().find(|file| file.is_file())
}

/// The page's document after it has run for some seconds of its own clock.
fn render(browser: &std::path::Path, address: &str, width: u32, dir: &std::path::Path) -> String {
    let profile = dir.join(format!("chromium-{width}"));
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--window-size={width},900"))
        .args(["--virtual-time-budget=5000", "--dump-dom", &format!("http://{address}/ui")])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_page_shows_what_the_host_says() {
    let Some(browser) = browser() else {
        println!("skipped: no chromium");
        return;
    };
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
    let state = || serde_json::from_str::<Value>(&provider.call("GET", "/system/state", "").1).unwrap();
    // The daemon knows the process, so the page shows its request.
    within(|| !state()["functions"][1]["clients"].as_array().unwrap().is_empty());
    let said = state();
    for width in [1280, 400] {
        let page = render(&browser, &provider.address.to_string(), width, dir.path());
        assert!(page.contains("2 GPUs, 2 functions, 2 instances"), "{page}");
        for of in said["functions"].as_array().unwrap() {
            let (name, answered) = (of["name"].as_str().unwrap(), of["answered"].as_u64().unwrap());
            let row = page.split("<tr>").find(|row| row.contains(&format!("<td>{name}</td>"))).expect(name);
            assert!(row.contains(of["state"].as_str().unwrap()) && row.contains("1 ready"), "{row}");
            assert!(row.contains(&format!(">{answered}</td>")), "{answered} in {row}");
        }
        for device in said["devices"].as_array().unwrap() {
            assert!(page.contains(device["name"].as_str().unwrap()), "{device}");
        }
        assert!(
            page.contains("resnet: 40 % of the time, 50 % of the SMs"),
            "what is read aloud of a GPU: {page}"
        );
        let newest = said["decisions"][0]["what"].as_str().unwrap();
        assert!(page.contains(newest), "{newest}");
        assert!(page.contains("id=\"gone\" role=\"alert\" style=\"display: none;\""), "the host answers");
    }
    // The page reports a lost GPU with the driver's reason, in words and to screen readers.
    let board = dir.path().join("device");
    let board = fake_cuda::sim::SimDevice::open(&board, &fake_cuda::Spec::default()).unwrap();
    assert!(board.set_lost(1, true));
    within(|| state()["devices"][1]["lost"].is_string());
    let why = state()["devices"][1]["lost"].as_str().unwrap().to_owned();
    let page = render(&browser, &provider.address.to_string(), 400, dir.path());
    assert!(page.contains(&format!(">Lost: {why}<")) && page.contains("GPU 1 is lost"), "{page}");
    assert_eq!(page.matches(">Lost: ").count(), 1, "the other one is not: {page}");
}
