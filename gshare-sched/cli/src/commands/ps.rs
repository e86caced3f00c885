//! `gshare ps`: the functions of a host, and their places.

use super::print_json;
use anyhow::Context as _;
use serde::Deserialize;
use std::path::PathBuf;

/// Show the functions of a host that `gshare up` started: their state, SLO, instances, and what they asked for and took.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare ps                              of the host on this machine
  gshare ps --host http://10.0.0.7:8080 --credentials /etc/gshare/credentials
  gshare ps --json")]
pub(crate) struct Options {
    /// The host's address.
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8080")]
    host: String,
    /// Directory with the files `basic-auth-user` and `basic-auth-password`, as the host has it.
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
    /// Print the host's state as one JSON object, as its page gets it.
    #[arg(long)]
    json: bool,
}

/// The host's state, as far as the table shows it.
#[derive(Debug, Deserialize)]
struct State {
    #[serde(default)]
    devices: Vec<Device>,
    functions: Vec<Function>,
}

#[derive(Debug, Deserialize)]
struct Device {
    gpu: u32,
    lost: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    state: String,
    slo_ns: Option<u64>,
    answered: u64,
    within_slo: u64,
    waiting: u64,
    gpu_seconds: f64,
    problem: Option<String>,
    measuring: Option<String>,
    instances: Vec<Instance>,
    clients: Vec<Client>,
}

#[derive(Debug, Deserialize)]
struct Instance {
    life: String,
}

#[derive(Debug, Deserialize)]
struct Client {
    request: f64,
    measured: f64,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let text =
        ask(options).with_context(|| format!("{}: no host answers; `gshare up` starts one", options.host))?;
    if options.json {
        let state: serde_json::Value = serde_json::from_str(&text).context("the host's answer")?;
        return print_json(&state);
    }
    let state: State = serde_json::from_str(&text).context("the host's answer")?;
    for line in losses(&state.devices) {
        println!("{line}");
    }
    println!(
        "{:<16} {:<10} {:>9} {:>8} {:>9} {:>8} {:>7} {:>8} {:>8} {:>8}",
        "FUNCTION",
        "STATE",
        "INSTANCES",
        "SLO",
        "ANSWERED",
        "IN TIME",
        "WAITING",
        "ASKED",
        "MEASURED",
        "GPU s"
    );
    for of in &state.functions {
        println!("{}", row(of));
        if let Some(more) = of.problem.as_ref().or(of.measuring.as_ref()) {
            println!("  {more}");
        }
    }
    Ok(())
}

/// A line for each lost device.
fn losses(devices: &[Device]) -> Vec<String> {
    let line = |device: &Device| {
        let why = device.lost.as_ref()?;
        Some(format!("WARNING: GPU {} is lost, and its instances run elsewhere or wait: {why}", device.gpu))
    };
    devices.iter().filter_map(line).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn row(of: &Function) -> String {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let ready = of.instances.iter().filter(|instance| instance.life == "ready").count();
    let slo = of.slo_ns.map_or("-".to_owned(), |slo| format!("{}ms", slo / 1_000_000));
    let kept = match (of.slo_ns, of.answered) {
        (None, _) | (_, 0) => "-".to_owned(),
        (Some(_), answered) => percent(of.within_slo as f64 / answered as f64),
    };
    let sum = |value: fn(&Client) -> f64| percent(of.clients.iter().map(value).sum());
    format!(
        "{:<16} {:<10} {:>9} {slo:>8} {:>9} {kept:>8} {:>7} {:>8} {:>8} {:>8.1}",
        of.name,
        of.state,
        format!("{ready}/{}", of.instances.len()),
        of.answered,
        of.waiting,
        sum(|client| client.request),
        sum(|client| client.measured),
        of.gpu_seconds
    )
}

fn ask(options: &Options) -> anyhow::Result<String> {
    let mut url = options.host.trim_end_matches('/').to_owned();
    if let Some(dir) = &options.credentials {
        let read = |name: &str| {
            let path = dir.join(name);
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())
        };
        let (user, password) = (read("basic-auth-user")?, read("basic-auth-password")?);
        url = url.replacen("://", &format!("://{}:{}@", user.trim_end(), password.trim_end()), 1);
    }
    let mut answer = ureq::get(&format!("{url}/system/state")).call()?;
    Ok(answer.body_mut().read_to_string()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_device_is_told_with_the_reason() {
        let text = r#"{"devices":[{"gpu":0},{"gpu":1,"lost":"it has fallen off the bus"}],"functions":[]}"#;
        let lines = losses(&serde_json::from_str::<State>(text).unwrap().devices);
        assert!(lines.len() == 1 && lines[0].contains("GPU 1") && lines[0].ends_with("the bus"), "{lines:?}");
    }

    #[test]
    fn a_function_is_one_line() {
        let text = r#"{"name":"resnet","state":"serving","slo_ns":69000000,"answered":200,"within_slo":199,"waiting":1,
            "gpu_seconds":2.04,"instances":[{"life":"ready"},{"life":"parked"}],
            "clients":[{"request":0.2,"measured":0.31}],"more":1}"#;
        let of: Function = serde_json::from_str(text).unwrap();
        let row = row(&of).split_whitespace().map(str::to_owned).collect::<Vec<_>>().join(" ");
        assert_eq!(row, "resnet serving 1/2 69ms 200 99.5% 1 20.0% 31.0% 2.0");
    }
}
