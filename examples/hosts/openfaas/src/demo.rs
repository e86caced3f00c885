//! `--demo`: deploys functions with an SLO, a pipeline and a training job, loads them, and prints the results.
//!
//! All functions are this program ([`super::gpu_function`]), and every step is a request that `curl` could send. The story uses
//! the GPUs of this machine, or simulated GPUs if there are none. Without MIG devices there is no pipeline. The training job
//! has as many workers as there are GPUs with shared time, at most two. The story fails if a promised part is missing.

use anyhow::{Context as _, bail};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Default simulated devices for a machine without GPUs.
pub const BOARDS: [&str; 2] = ["v100,devices=2", "a100,mig=1g.10gb+1g.10gb+2g.20gb"];
/// Duration of the load.
const LOAD: Duration = Duration::from_secs(30);
/// Time limit for trials and starts.
const PATIENCE: Duration = Duration::from_secs(120);

/// A function of the story: name, load in requests per second, and deployment.
struct Part {
    name: &'static str,
    rate: f64,
    deployment: Value,
}

/// Runs the story against the host at `url`, and prints it.
///
/// # Errors
/// If a step fails.
pub fn run(url: &str, dir: &Path) -> anyhow::Result<()> {
    let begun = Instant::now();
    let say = |text: String| println!("{:5.1} s  {text}", begun.elapsed().as_secs_f64());
    let program = format!("{} --gpu-function", std::env::current_exe()?.display());
    let dag = dir.join("dag.json");
    std::fs::write(&dag, pipeline().to_string()).with_context(|| dag.display().to_string())?;
    let devices = state(url)?["devices"].take();
    let names = names(&devices);
    say(format!("devices: {names}"));
    let parts = parts(&program, &dag, &devices);
    for part in &parts {
        let annotations = &part.deployment["annotations"];
        say(format!("deploy {:<9} {}", part.name, said(annotations)));
        let answer = ureq::post(&format!("{url}/system/functions"))
            .header("content-type", "application/json")
            .send(part.deployment.to_string());
        answer.with_context(|| part.name)?;
    }
    wait(url, &parts, &say)?;
    say(format!("load for {} s: {url}/ui shows what happens", LOAD.as_secs()));
    std::thread::scope(|scope| {
        for part in parts.iter().filter(|part| part.rate > 0.0) {
            scope.spawn(|| load(url, part));
        }
    });
    let state = state(url)?;
    say("results".to_owned());
    println!(
        "\n  {:<9} {:>8} {:>9} {:>9} {:>8} {:>7} {:>7} {:>6}  where",
        "FUNCTION", "SLO", "ANSWERED", "IN TIME", "REFUSED", "STARTS", "PARKED", "GPU s"
    );
    for of in state["functions"].as_array().into_iter().flatten() {
        let (answered, within) =
            (of["answered"].as_u64().unwrap_or(0), of["within_slo"].as_u64().unwrap_or(0));
        let part = if answered == 0 {
            "-".into()
        } else {
            format!("{:.1} %", within as f64 * 100.0 / answered as f64)
        };
        let slo = of["slo_ns"].as_u64().map_or("-".into(), |slo| format!("{} ms", slo / 1_000_000));
        println!(
            "  {:<9} {slo:>8} {answered:>9} {part:>9} {:>8} {:>7} {:>7} {:>6.1}  {}",
            of["name"].as_str().unwrap_or_default(),
            of["rejected"].to_string(),
            of["starts"].to_string(),
            of["parked"].to_string(),
            of["gpu_seconds"].as_f64().unwrap_or(0.0),
            places(of)
        );
    }
    println!("\n  on {names}; all of them are processes of this machine, under the hook");
    let missing = missing(&parts, &state);
    if !missing.is_empty() {
        bail!("the demonstration does not show what it promises: {}", missing.join("; "));
    }
    Ok(())
}

/// Least part of a function's answers that must meet the SLO.
const IN_TIME: f64 = 0.9;

/// The promised parts that these figures do not show.
fn missing(parts: &[Part], state: &Value) -> Vec<String> {
    let mut missing = Vec::new();
    for part in parts {
        let name = part.name;
        let of = state["functions"].as_array().into_iter().flatten().find(|of| of["name"] == name);
        let Some(of) = of else {
            missing.push(format!("{name} is gone"));
            continue;
        };
        let count = |key: &str| of[key].as_u64().unwrap_or(0);
        if of["gpu_seconds"].as_f64().unwrap_or(0.0) <= 0.0 {
            missing.push(format!("{name} has used no GPU time"));
        }
        if part.rate <= 0.0 {
            continue;
        }
        let (answered, refused) = (count("answered"), count("rejected"));
        if answered == 0 || refused > 0 {
            missing.push(format!("{name} has answered {answered} requests and refused {refused}"));
        } else if (count("within_slo") as f64) < IN_TIME * answered as f64 {
            missing.push(format!("{name} has answered {} of {answered} in time", count("within_slo")));
        }
        if of["workload"] == "pipeline" {
            if count("pipelined") == 0 {
                missing.push(format!("no request of {name} went through several MIG devices"));
            }
        } else if points(of) == 0 {
            missing.push(format!("the host has measured {name} at no share"));
        }
    }
    missing
}

/// Names and numbers of the devices. Names of simulated devices say so.
fn names(devices: &Value) -> String {
    let mut counts: Vec<(&str, u32)> = Vec::new();
    for name in devices.as_array().into_iter().flatten().filter_map(|device| device["name"].as_str()) {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let words = counts.iter().map(|(name, count)| format!("{count} x {name}"));
    words.collect::<Vec<_>>().join(", ")
}

/// Annotations in one line, without the paths of this run's own files.
fn said(annotations: &Value) -> String {
    let all = annotations.as_object().into_iter().flatten();
    let own =
        |value: &str| value.contains("/").then(|| value.rsplit('/').next().unwrap_or_default().to_owned());
    let text = |(key, value): (&String, &Value)| {
        let value = value.as_str().unwrap_or_default();
        format!("{key}={}", own(value).unwrap_or_else(|| value.to_owned()))
    };
    all.map(text).collect::<Vec<_>>().join(" ")
}

/// The devices and slices of a function's instances.
fn places(of: &Value) -> String {
    let part = |part: &Value| match part["slice"]["start"].as_u64() {
        Some(slice) => format!("GPU {} slice {slice}", part["gpu"]),
        None => format!("GPU {}", part["gpu"]),
    };
    let instance = |instance: &Value| {
        let parts: Vec<String> = instance["parts"].as_array().into_iter().flatten().map(part).collect();
        format!("{} ({})", parts.join(" > "), instance["life"].as_str().unwrap_or_default())
    };
    let all: Vec<String> = of["instances"].as_array().into_iter().flatten().map(instance).collect();
    if all.is_empty() { of["state"].as_str().unwrap_or_default().to_owned() } else { all.join(", ") }
}

/// Two components that together fit no MIG device of the story, so each request uses two devices.
fn pipeline() -> Value {
    let on = |slice: &str, ms: u64, gib: u64| json!({"slice": slice, "time_ns": ms * 1_000_000, "memory_bytes": gib << 30});
    let detect = json!({"name": "detect", "profiles": [on("1g.10gb", 24, 8), on("2g.20gb", 14, 8)]});
    let classify = json!({"name": "classify", "profiles": [on("2g.20gb", 14, 14)]});
    json!({"name": "video", "components": [detect, classify],
        "edges": [{"from": "detect", "to": "classify", "bytes": 6_291_456}]})
}

fn parts(program: &str, dag: &Path, devices: &Value) -> Vec<Part> {
    let is_cut = |device: &&Value| device["slices"].as_array().is_some_and(|slices| !slices.is_empty());
    let (cut, whole): (Vec<_>, Vec<_>) = devices.as_array().into_iter().flatten().partition(is_cut);
    // The workers of a training job run on different devices.
    let workers = whole.len().min(2).to_string();
    let part = |name, rate, annotations: Value, variables: Value| Part {
        name,
        rate,
        deployment: json!({"service": name, "image": "gpu_function", "envProcess": program, "annotations": annotations,
            "envVars": variables}),
    };
    let mut parts = vec![
        part("resnet", 40.0, json!({"gshare/slo": "150ms"}), json!({"KERNELS": "5"})),
        part("bert", 15.0, json!({"gshare/slo": "400ms"}), json!({"KERNELS": "10", "WEIGHTS_MIB": "1024"})),
        part("ocr", 4.0, json!({"gshare/slo": "1s"}), json!({"KERNELS": "20", "WEIGHTS_MIB": "2048"})),
        part(
            "video",
            15.0,
            json!({"gshare/workload": "pipeline", "gshare/dag": dag, "gshare/slo": "400ms"}),
            json!({"KERNELS": "6"}),
        ),
        part(
            "finetune",
            0.0,
            json!({"gshare/workload": "training", "gshare/workers": workers, "fastgshare/gpu_mem": "1GiB"}),
            json!({"STEPS": "1000000"}),
        ),
    ];
    parts.retain(|part| match part.name {
        "video" => !cut.is_empty(),
        _ => !whole.is_empty(),
    });
    parts
}

fn state(url: &str) -> anyhow::Result<Value> {
    let text = ureq::get(&format!("{url}/system/state")).call()?.body_mut().read_to_string()?;
    Ok(serde_json::from_str(&text)?)
}

/// Waits until every function has an instance, and prints the measured shares.
fn wait(url: &str, parts: &[Part], say: &dyn Fn(String)) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut ready: Vec<String> = Vec::new();
    while ready.len() < parts.len() {
        if begun.elapsed() > PATIENCE {
            bail!("not all functions are ready after {} s; {url}/ui says why", PATIENCE.as_secs());
        }
        for of in state(url)?["functions"].as_array().into_iter().flatten() {
            let name = of["name"].as_str().unwrap_or_default().to_owned();
            // The minimum instance of a pipeline stays parked until a request. If it has no slices yet, the first request gets
            // them.
            let waits = ["idle", "parked"].map(Value::from).contains(&of["state"]);
            let serves = ["serving", "training"].map(Value::from).contains(&of["state"])
                || of["workload"] == "pipeline" && waits;
            if serves && !ready.contains(&name) {
                say(format!("{name} is ready{}", chosen(of)));
                ready.push(name);
            }
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    Ok(())
}

/// Number of the shares at which a function was measured.
fn points(of: &Value) -> usize {
    of["profile"]["points"].as_array().map_or(0, Vec::len)
}

/// The measured share of a function.
fn chosen(of: &Value) -> String {
    let points = points(of);
    let share = &of["instances"][0]["parts"][0]["share"];
    if points == 0 {
        return String::new();
    }
    let percent = |value: &Value| value.as_u64().unwrap_or(0) / 100;
    format!(
        ": measured at {points} shares, takes {} % of the time and {} % of the SMs",
        percent(&share["time"]["request"]),
        percent(&share["sm_bp"])
    )
}

/// Sends requests at their scheduled times, no matter how earlier ones went.
fn load(url: &str, part: &Part) {
    let (begun, address) = (Instant::now(), format!("{url}/function/{}", part.name));
    std::thread::scope(|scope| {
        for number in 0.. {
            let due = Duration::from_secs_f64(f64::from(number) / part.rate);
            if due > LOAD {
                return;
            }
            std::thread::sleep(due.saturating_sub(begun.elapsed()));
            // The host's own figures count rejected and late requests.
            scope.spawn(|| drop(ureq::get(&address).call()));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_figures_do_not_show_is_said() {
        let devices = json!([{"slices": []}, {"slices": [{"profile": "1g.10gb"}]}]);
        let parts = parts("program", Path::new("dag.json"), &devices);
        let good = |name: &str| {
            json!({"name": name, "workload": if name == "video" { "pipeline" } else { "inference" }, "gpu_seconds": 1.0,
                "answered": 100, "rejected": 0, "within_slo": 91, "pipelined": 1, "profile": {"points": [{}]}})
        };
        let mut functions: Vec<Value> = parts.iter().map(|part| good(part.name)).collect();
        let said = |functions: &[Value]| missing(&parts, &json!({"functions": functions}));
        assert_eq!(said(&functions), [""; 0]);
        (functions[0]["within_slo"], functions[1]["rejected"]) = (json!(89), json!(1));
        (functions[3]["pipelined"], functions[4]["gpu_seconds"]) = (json!(0), json!(0.0));
        functions[0]["profile"] = json!(null);
        functions.remove(2);
        let said = said(&functions);
        let parts = [
            "resnet has answered 89 of 100 in time",
            "measured resnet at no share",
            "refused 1",
            "ocr is gone",
            "several MIG devices",
            "no GPU time",
        ];
        assert_eq!(said.len(), parts.len(), "{said:?}");
        for (said, part) in said.iter().zip(parts) {
            assert!(said.contains(part), "{said}: {part}");
        }
    }
}
