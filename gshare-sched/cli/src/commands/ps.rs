//! `gshare ps`: the functions of a host, and their places; with `--usage` the use of the GPUs by each process.

use super::host::Host;
use super::out::table;
use super::{Form, Where, print_json};
use anyhow::Context as _;
use gshared::ProcessUse;
use serde::Deserialize;

/// Show the functions of `gshare up`: state, SLO, instances, and requested and used GPU time.
///
/// ASKED and MEASURED are `-` until a process of the function uses a GPU.
///
/// With --usage the command shows how much each process, running or recently ended, has used this node's GPUs. BUSY is the
/// time with kernels of the process on the GPU. OCCUPIED is its own part of the GPU's time: busy time, weighed by its share
/// of the SMs, and divided among processes that were busy at the same time. MEMORY is memory times its time.
///
/// --json prints the host's state, the data of its page, or with --usage the use of each process.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare ps                              of the host on this machine
  gshare ps --host http://10.0.0.7:8080 --credentials /etc/gshare/credentials
  gshare ps --json
  gshare ps --usage                      GPU time and memory of each process
  gshare ps --usage=csv                  the same for a spreadsheet: times in ns, memory in byte-seconds")]
pub(crate) struct Options {
    #[command(flatten)]
    host: Host,
    #[command(flatten)]
    form: Form,
    /// Show the use of this node's GPUs by each process, as a table or as comma-separated values.
    #[arg(long, value_name = "FORM", num_args = 0..=1, require_equals = true, default_missing_value = "table",
        conflicts_with_all = ["host", "credentials"])]
    usage: Option<Usage>,
    #[command(flatten)]
    place: Where,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Usage {
    Table,
    Csv,
}

/// The host's state, as far as the table shows it.
#[derive(Debug, Deserialize)]
struct State {
    #[serde(default)]
    devices: Vec<Device>,
    functions: Vec<Function>,
    #[serde(default)]
    neighbours: Vec<gshared::Neighbour>,
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
    quota_request: f64,
    measured: f64,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    if let Some(as_table_or_csv) = options.usage {
        let usage = options.place.snapshot()?.usage;
        return match (options.form.json, as_table_or_csv) {
            (true, _) => print_json(&usage),
            (false, Usage::Csv) => print_csv(&usage),
            (false, Usage::Table) => {
                print!("{}", usage_table(&usage));
                Ok(())
            }
        };
    }
    let text = options.host.get("/system/state")?;
    if options.form.json {
        let state: serde_json::Value = serde_json::from_str(&text).context("the host's answer")?;
        return print_json(&state);
    }
    let state: State = serde_json::from_str(&text).context("the host's answer")?;
    for line in losses(&state.devices) {
        println!("{line}");
    }
    for other in &state.neighbours {
        println!("WARNING: {other}");
    }
    let rows: Vec<_> = [HEAD.map(str::to_owned)].into_iter().chain(state.functions.iter().map(row)).collect();
    let table = table(&rows);
    let mut lines = table.lines();
    lines.by_ref().take(1).for_each(|head| println!("{head}"));
    for (line, of) in lines.zip(&state.functions) {
        println!("{line}");
        if let Some(more) = of.problem.as_ref().or(of.measuring.as_ref()) {
            println!("  {more}");
        } else if of.waiting > 0 && of.instances.is_empty() {
            println!("  requests wait for an instance, which needs room on a device");
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

const HEAD: [&str; 10] =
    ["FUNCTION", "STATE", "INSTANCES", "SLO", "ANSWERED", "IN TIME", "WAITING", "ASKED", "MEASURED", "GPU s"];

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn row(of: &Function) -> [String; HEAD.len()] {
    let percent = |share: f64| format!("{:.1}%", share * 100.0);
    let ready = of.instances.iter().filter(|instance| instance.life == "ready").count();
    let slo = of.slo_ns.map_or("-".to_owned(), |slo| format!("{}ms", slo / 1_000_000));
    let kept = match (of.slo_ns, of.answered) {
        (None, _) | (_, 0) => "-".to_owned(),
        (Some(_), answered) => percent(of.within_slo as f64 / answered as f64),
    };
    // The daemon knows a process from its first use of a GPU on.
    let sum = |value: fn(&Client) -> f64| match of.clients.is_empty() {
        true => "-".to_owned(),
        false => percent(of.clients.iter().map(value).sum()),
    };
    [
        of.name.clone(),
        of.state.clone(),
        format!("{ready}/{}", of.instances.len()),
        slo,
        of.answered.to_string(),
        kept,
        of.waiting.to_string(),
        sum(|client| client.quota_request),
        sum(|client| client.measured),
        format!("{:.1}", of.gpu_seconds),
    ]
}

/// The columns of the values for programs.
const CSV: [&str; 15] = [
    "name",
    "pid",
    "uid",
    "program",
    "gpu",
    "uuid",
    "ended",
    "busy_ns",
    "occupied_ns",
    "byte_seconds",
    "launches",
    "waited_ns",
    "pod",
    "container",
    "cgroup",
];

fn print_csv(usage: &[ProcessUse]) -> anyhow::Result<()> {
    let mut out = csv::Writer::from_writer(std::io::stdout());
    out.write_record(CSV)?;
    for of in usage {
        out.write_record(csv_row(of))?;
    }
    Ok(out.flush()?)
}

fn csv_row(of: &ProcessUse) -> [String; CSV.len()] {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    [
        of.name.clone(),
        of.pid.to_string(),
        of.uid.to_string(),
        of.program.clone(),
        of.gpu.number().to_string(),
        of.uuid.clone(),
        of.ended.to_string(),
        of.usage.busy.as_nanos().to_string(),
        of.usage.occupied.as_nanos().to_string(),
        of.usage.byte_seconds.to_string(),
        of.usage.launches.to_string(),
        of.usage.waited.as_nanos().to_string(),
        text(&of.owner.pod),
        text(&of.owner.container),
        of.owner.cgroup.clone(),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "a report")]
fn usage_table(usage: &[ProcessUse]) -> String {
    let head = [
        "NAME",
        "PID",
        "UID",
        "GPU",
        "STATE",
        "BUSY s",
        "OCCUPIED s",
        "MEMORY GiB s",
        "LAUNCHES",
        "CONTAINER",
    ];
    let row = |of: &ProcessUse| {
        let container = of.owner.container.as_deref().unwrap_or("-");
        let seconds = |time: gshare_core::Duration| format!("{:.3}", time.as_secs_f64());
        [
            of.name.clone(),
            of.pid.to_string(),
            of.uid.to_string(),
            of.gpu.number().to_string(),
            if of.ended { "ended" } else { "runs" }.to_owned(),
            seconds(of.usage.busy),
            seconds(of.usage.occupied),
            format!("{:.3}", of.usage.byte_seconds as f64 / f64::from(1 << 30)),
            of.usage.launches.to_string(),
            container.get(..12).unwrap_or(container).to_owned(),
        ]
    };
    let rows: Vec<_> = [head.map(str::to_owned)].into_iter().chain(usage.iter().map(row)).collect();
    table(&rows)
}

#[cfg(test)]
mod tests;
