//! `gshare doctor`: checks the parts on this node, and gives advice for missing parts.

use super::sim::{self, Simulate};
use super::{Form, Where, bypass, cuda, print_json, private};
use gshare_runner::libraries::{HOOK, SIMULATOR, STORE};
use gshare_sched::node::FactSource;
use gshared::enforce::Partition;
use gshared::mps::Mps;
use gshared::nvml::{self, Nvml};
use serde::Serialize;
use std::process::ExitCode;

/// Check this node, with advice for each missing part.
///
/// The checks are about the driver, MPS, MIG, the hook, permissions, the daemon, and processes unknown to the daemon. The
/// exit code is 1 if a check is BAD.
///
/// --json prints {"device": "real", "simulated" or "none", "checks": [{"check", "status", "found", "advice"}]}.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare doctor           this machine
  gshare doctor --sim     what a program finds under `gshare run --sim`")]
pub(crate) struct Options {
    #[command(flatten)]
    simulate: Simulate,
    #[command(flatten)]
    place: Where,
    #[command(flatten)]
    form: Form,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Status {
    Good,
    /// A missing part the node can do without.
    Notice,
    Bad,
}

#[derive(Debug, Serialize)]
struct Check {
    check: &'static str,
    status: Status,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

fn check(check: &'static str, status: Status, found: impl Into<String>, advice: Option<&str>) -> Check {
    Check { check, status, found: found.into(), advice: advice.map(str::to_owned) }
}

/// Gives 1 if something is bad.
pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if let Some((mut command, _until_it_has_ended)) = options.simulate.again()? {
        let status = command.status()?;
        return match status.code().and_then(|code| u8::try_from(code).ok()) {
            Some(code) => Ok(code.into()),
            None => anyhow::bail!("doctor on the simulated device: {status}"),
        };
    }
    let (device, mut checks) = driver();
    if device == "simulated" {
        checks.push(jax());
    }
    checks.extend(mig());
    checks.push(mps());
    checks.push(limits(device == "simulated"));
    checks.extend(permissions());
    checks.extend(parts());
    checks.push(kernel());
    checks.push(daemon(&options.place));
    if let Ok(snapshot) = options.place.snapshot() {
        checks.extend(believed(&snapshot.devices));
        // Any process may take the name of a daemon, so a neighbour alone is nothing to fail for.
        let one =
            |other: &gshared::Neighbour| check("second daemon", Status::Notice, other.to_string(), None);
        checks.extend(snapshot.neighbours.iter().map(one));
    }
    checks.extend(unmetered(&options.place));
    let is_bad = checks.iter().any(|check| check.status == Status::Bad);
    let code = if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    if options.form.json {
        return print_json(&serde_json::json!({ "device": device, "checks": checks })).map(|()| code);
    }
    for Check { check, status, found, advice } in &checks {
        let mark = match status {
            Status::Good => "ok",
            Status::Notice => "note",
            Status::Bad => "BAD",
        };
        println!("{mark:<5} {check}: {found}");
        if let Some(advice) = advice {
            println!("      {advice}");
        }
    }
    Ok(code)
}

fn driver() -> (&'static str, Vec<Check>) {
    const NONE: &str = "install NVIDIA's driver, or run on a simulated device: gshare run --sim -- CMD";
    let driver = match cuda::Driver::load() {
        Ok(driver) => driver,
        Err(error) => {
            return ("none", vec![check("driver", Status::Notice, format!("{error:#}"), Some(NONE))]);
        }
    };
    let version = driver.version().map_or_else(
        |error| format!("{error:#}"),
        |version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
    );
    if let Err(error) = driver.init() {
        let advice = "the driver is there but no device is: see nvidia-smi, and the permissions below";
        return ("none", vec![check("driver", Status::Bad, format!("{version}, {error:#}"), Some(advice))]);
    }
    let kind = sim::kind(&driver);
    let word = if kind.is_simulated() { "simulated, " } else { "" };
    let nvml = Nvml::init().and_then(|nvml| nvml.sys_driver_version());
    let nvml = nvml.map_or_else(|error| format!("; NVML: {error}"), |version| format!("; driver {version}"));
    let mut checks = vec![check("driver", Status::Good, format!("{word}{version}{nvml}"), None)];
    for device in 0..driver.device_count().unwrap_or(0) {
        let name = driver.device_name(device).unwrap_or_default();
        let memory = driver.device_memory(device).unwrap_or(0);
        let memory = gshare_core::Bytes(u64::try_from(memory).unwrap_or(0));
        checks.push(check("device", Status::Good, format!("{device}: {name}, {memory}"), None));
    }
    (kind.name(), checks)
}

fn jax() -> Check {
    if sim::jax_would_look() {
        check("jax", Status::Good, "JAX looks for a driver: a device node is there", None)
    } else {
        check("jax", Status::Notice, "JAX takes the CPU: no device node is there", Some(sim::JAX_ADVICE))
    }
}

fn mig() -> Option<Check> {
    let mode = Nvml::init().and_then(|nvml| nvml::is_cut(&nvml.device_by_index(0)?)).ok()?;
    Some(if mode {
        let advice = "each MIG instance is a device of its own here; its UUID goes into [[device]]";
        check("mig", Status::Good, "on", Some(advice))
    } else {
        check("mig", Status::Good, "off", None)
    })
}

/// The possible enforcer of each limit on this node; `gshare status` shows the present enforcers for each client.
fn limits(simulated: bool) -> Check {
    let partition = Partition::of_node(simulated);
    let sm = partition.name();
    let holder = sm.unwrap_or("nothing");
    let found = format!("time is held by hook, SM partitions by {holder}, memory by hook");
    check("limits", if sm.is_some() { Status::Good } else { Status::Notice }, found, None)
}

fn mps() -> Check {
    match Mps::find() {
        None => {
            let advice =
                "without MPS kernels of several processes take turns, and SM partitions have no effect";
            check("mps", Status::Notice, "nvidia-cuda-mps-control is not on PATH", Some(advice))
        }
        Some(mps) if mps.is_running() => {
            check("mps", Status::Good, format!("{} runs", mps.program().display()), None)
        }
        Some(mps) => {
            let advice =
                "set mps = \"auto\" in the daemon's configuration, or start it: nvidia-cuda-mps-control -d";
            let found = format!("{} is there and does not run", mps.program().display());
            check("mps", Status::Notice, found, Some(advice))
        }
    }
}

fn permissions() -> Vec<Check> {
    let mut checks = Vec::new();
    for node in ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"] {
        let path = std::path::Path::new(node);
        if !path.exists() {
            continue;
        }
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
        checks.push(match opened {
            Ok(_) => check("permission", Status::Good, format!("{node} may be used"), None),
            Err(error) => {
                let advice = "add this user to the device's group, or set NVreg_DeviceFileMode";
                check("permission", Status::Bad, format!("{node}: {error}"), Some(advice))
            }
        });
    }
    checks
}

/// The parts of the command: an error tells how to get a missing part, by the way of the command's installation.
fn parts() -> Vec<Check> {
    let library = |name, library: gshare_runner::libraries::Library, missing| match library.find() {
        Ok(path) => check(name, Status::Good, path.display().to_string(), None),
        Err(error) => check(name, missing, error.to_string(), None),
    };
    let host = match super::up::host() {
        Some(path) => check("host", Status::Good, path.display().to_string(), None),
        None => check("host", Status::Notice, super::up::MISSING, Some("only `gshare up` needs it")),
    };
    vec![
        library("hook", HOOK, Status::Bad),
        library("simulator", SIMULATOR, Status::Notice),
        library("store client", STORE, Status::Notice),
        host,
    ]
}

fn kernel() -> Check {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (5, 11) {
        check("kernel", Status::Good, release, None)
    } else {
        check(
            "kernel",
            Status::Bad,
            release,
            Some("the daemon needs Linux 5.11 or later (epoll_pwait2, pidfd)"),
        )
    }
}

fn daemon(place: &Where) -> Check {
    let socket = place.socket();
    let found = socket.display().to_string();
    if private::listens(&socket) {
        return match place.snapshot() {
            Ok(snapshot) => {
                let found = format!("{found}: pid {}, {} clients", snapshot.pid, snapshot.clients.len());
                check("daemon", Status::Good, found, None)
            }
            Err(_) => {
                let advice = "it may not let this user in: see allow_uids and allow_any_user";
                check("daemon", Status::Bad, format!("{found}: listens, and does not answer"), Some(advice))
            }
        };
    }
    let advice = "start it (`gshare daemon`, or the systemd unit), or let `gshare run` start a private one";
    check("daemon", Status::Notice, format!("no daemon listens at {found}"), Some(advice))
}

/// Devices with a memory size from a client alone: neither the configuration nor NVML knows them.
fn believed(devices: &[gshared::DeviceSnapshot]) -> Vec<Check> {
    let advice = "where programs are not to be believed, list it in the daemon's configuration: [[device]] with uuid and memory";
    let word = |device: &&gshared::DeviceSnapshot| {
        device.memory_source == FactSource::Client && device.memory_bytes > gshare_core::Bytes::ZERO
    };
    let one = |device: &gshared::DeviceSnapshot| {
        let found = format!("{} has {}, as its first client says", device.uuid, device.memory_bytes);
        check("device facts", Status::Notice, found, Some(advice))
    };
    devices.iter().filter(word).map(one).collect()
}

/// Processes on a device without registration, and the registered processes' memory beyond their allocations. Without a daemon or
/// NVML to ask, there is no check.
fn unmetered(place: &Where) -> Vec<Check> {
    let Ok(snapshot) = place.snapshot() else { return Vec::new() };
    let Ok(nvml) = Nvml::init() else { return Vec::new() };
    let bypass::Beside { strangers, overheads } = match bypass::beside(&nvml, &snapshot) {
        Ok(beside) => beside,
        Err(error) => return vec![check("bypass", Status::Notice, format!("{error:#}"), None)],
    };
    let mut checks = Vec::new();
    if let Some((pid, name, most)) = overheads.iter().max_by_key(|(_, _, bytes)| *bytes) {
        let all = overheads.iter().map(|(_, _, bytes)| bytes.0).fold(0, u64::saturating_add);
        let found = format!(
            "contexts and code of {} registered processes take {} beside what they allocated, most {most} (process {pid}, {name})",
            overheads.len(),
            gshare_core::Bytes(all)
        );
        let advice = "no memory limit counts it: leave that much per process to memory_headroom";
        checks.push(check("contexts", Status::Good, found, Some(advice)));
    }
    if strangers.is_empty() {
        checks.push(check("bypass", Status::Good, "every process on a device is registered", None));
    }
    let advice = "its GPU time and memory are not counted; where that must not be, use MPS or MIG, or the device's permissions";
    let one = |stranger: bypass::Stranger| {
        let bypass::Stranger { pid, bytes, program, why } = stranger;
        let found = format!("process {pid} ({program}) holds {}: {why}", gshare_core::Bytes(bytes));
        check("bypass", Status::Notice, found, Some(advice))
    };
    checks.extend(strangers.into_iter().map(one));
    checks
}
