//! `gshare run`: starts a program with the hook, under a share.
//!
//! The command sets the environment of the program, and no more:
//!
//! | variable | value |
//! |---|---|
//! | `LD_PRELOAD` | the hook, before the previous value |
//! | `GSHARE_SOCKET` | the daemon's socket |
//! | `GSHARE_RUN` | one random number for all processes of this run: they share its name and its share |
//! | `GSHARE_NAME`, `GSHARE_QUOTA`, `GSHARE_SM`, `GSHARE_MEM`, `GSHARE_OBSERVE`, `GSHARE_PARK`, `GSHARE_CLASS` | the options |
//! | `LD_LIBRARY_PATH` | with `--sim`: a private directory with the simulated driver, before the previous value |
//! | `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` | with `--sm`, if MPS runs or the device is simulated |
//! | `PYTHONPATH`, `GSHARE_STORE`, `GSHARE_STORE_LIBRARY` | with `--shim`: see [`Shim`] |
//! | `PYTHONPATH`, `GSHARE_SIM_COMPUTE`, `TRITON_INTERPRET` | with `--compute`: see [`Compute`] |
//! | `CUDA_MPS_PIPE_DIRECTORY` | where MPS runs: its pipes, in the service's own directory |

use super::compute::Compute;
use super::shim::Shim;
use super::sim::{self, Kind, Simulate};
use super::{Where, private};
use gshare_core::wire::{DaemonWait, OnDaemonLoss, ToDaemon};
use gshare_core::{Bytes, DeviceUuid, MemoryRange, QuotaRange, ResourceSpec, ServiceClass, SmShare};
use gshare_fake_cuda_spec::Spec;
use gshare_runner::libraries::{HOOK, SimulatorDir};
use gshared::enforce::Partition;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::origin::WithOrigin;
use signal_hook::low_level::siginfo::Cause;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

/// Run a program under a share of the GPU.
///
/// The program starts only if the daemon accepts it and has room on a device that the program will see. Signals are
/// forwarded to the program, and its exit code becomes the command's; 126 means that the program cannot be started, 127
/// that it does not exist, and 1 any other failure. If no daemon listens, the command starts a private daemon for this
/// user, which ends half a minute after its last client. A share for this name in the daemon's configuration overrides the
/// options here. If a limit cannot be kept, the program's launches and allocations fail; with `GSHARE_ON_FAILURE=run` in
/// the environment it runs without limits.
///
/// Two more variables say what happens without a daemon. `GSHARE_ON_DAEMON_LOSS` is `open` (default: the program keeps its
/// last share) or `closed` (its launches fail). `GSHARE_DAEMON_WAIT` is the longest wait of launches and allocations for a
/// daemon that is gone or silent: 200ms to 600s [default: 5s].
#[derive(Debug, Default, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare run --quota 0.3:0.8 --mem 4GiB -- python3 serve.py       30 % of the time at least and 80 % at most
  gshare run --class slo-sensitive --quota 0.4:0.9 -- ./server    others give way when its launches get slower
  gshare run --observe -- python3 train.py                        no limit; `gshare ps --usage` shows its use
  gshare run --sim=a100,devices=2 -- ./my_cuda_program            on two simulated A100s
  gshare run --sim --compute -- pytest                            tests of PyTorch code, with values")]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) simulate: Simulate,
    #[command(flatten)]
    pub(crate) compute: Compute,
    /// Share of GPU time: `request:limit` such as 0.3:0.8, or one share for both [default: the free time].
    #[arg(long, value_name = "SHARE")]
    pub(crate) quota: Option<QuotaRange>,
    /// SM partition, in per cent of the SMs [default: 100].
    #[arg(long, value_name = "PERCENT", value_parser = parse_sm)]
    pub(crate) sm: Option<SmShare>,
    /// GPU memory: a limit such as 1GiB, or a range `guaranteed:most` such as 6GiB:14GiB. Memory beyond the guarantee depends on the
    /// room that other programs leave [default: no limit; with --park `0:`, no guarantee and up to the whole device].
    #[arg(long, value_name = "BYTES", value_parser = parse_memory)]
    pub(crate) mem: Option<MemoryRange>,
    /// Only observe the program: no limit holds, no launch waits, and `gshare ps --usage` shows its use of the GPU.
    #[arg(long, conflicts_with_all = ["quota", "sm", "mem", "class"])]
    pub(crate) observe: bool,
    /// The program's device memory goes to host memory while other programs need the room, or by `gshare daemon park`, and comes
    /// back when the program works.
    #[arg(long)]
    pub(crate) park: bool,
    /// Name of the instance, unique on the node [default: program and pid].
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Claim on time beside other programs. slo-sensitive[:PERCENT]: others yield when the program's launching cycles become
    /// longer by more than this percentage, by default 30. best-effort: the program gets the time that those leave, and at
    /// least the request of its --quota.
    #[arg(long)]
    pub(crate) class: Option<ServiceClass>,
    /// Wait for room on a device that the program will see.
    #[arg(long)]
    pub(crate) wait: bool,
    #[command(flatten)]
    pub(crate) shim: Shim,
    #[command(flatten)]
    pub(crate) place: Where,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

fn parse_sm(text: &str) -> Result<SmShare, String> {
    let sm: SmShare = text.parse().map_err(|error: gshare_core::ParseUnitError| error.to_string())?;
    if sm.is_zero() { Err(gshare_core::SpecError::ZeroSm.to_string()) } else { Ok(sm) }
}

/// Refuses a small number without a unit: `--mem 4` hardly means four bytes.
fn parse_memory(text: &str) -> Result<MemoryRange, String> {
    let small = |part: &&str| part.parse::<f64>().is_ok_and(|number| number > 0.0 && number < 1_048_576.0);
    if let Some(part) = text.split(':').find(small) {
        return Err(format!(
            "`{part}` has no unit and would be less than 1 MiB: need one, such as {part}GiB"
        ));
    }
    text.parse().map_err(|error: gshare_core::SpecError| error.to_string())
}

/// A setting in the environment, which the program reads for itself.
fn setting<T, E: std::fmt::Display>(
    name: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> anyhow::Result<Option<T>> {
    let Some(text) = std::env::var_os(name).filter(|text| !text.is_empty()) else { return Ok(None) };
    parse(&text.to_string_lossy()).map(Some).map_err(|error| anyhow::anyhow!("{name}: {error}"))
}

fn parse_loss(text: &str) -> Result<OnDaemonLoss, String> {
    match text {
        "open" => Ok(OnDaemonLoss::Open),
        "closed" => Ok(OnDaemonLoss::Closed),
        _ => Err("need `open` or `closed`".into()),
    }
}

/// Exit code for an existing program that cannot start, as of `env` and `nohup`.
const NOT_STARTED: u8 = 126;
/// Exit code for a missing program.
const NOT_FOUND: u8 = 127;

/// The option with its value in the program's place, because it was written without `=`.
fn lost_value(options: &Options) -> Option<&'static str> {
    let word = options.command[0].to_str()?;
    let bare_sim = options.simulate.sim.as_ref().is_some_and(|spec| *spec == Spec::default());
    if bare_sim && !word.contains('/') && sim::checked(word).is_ok() {
        return Some("--sim");
    }
    let is_socket = |file: std::fs::Metadata| std::os::unix::fs::FileTypeExt::is_socket(&file.file_type());
    (options.shim.is_bare() && std::fs::metadata(word).is_ok_and(is_socket)).then_some("--shim")
}

pub(crate) fn run(options: &Options) -> anyhow::Result<ExitCode> {
    if let Some(option) = lost_value(options) {
        let word = options.command[0].to_string_lossy();
        anyhow::bail!("{option} {word}: the value needs `=`: write {option}={word}");
    }
    let hook = HOOK.find()?;
    let kind = options.simulate.announce("run")?;
    if kind.is_simulated() && !sim::jax_would_look() && sim::has_jax(Path::new(&options.command[0])) {
        eprintln!("gshare: {}", sim::JAX_ADVICE);
    }
    let shim = options.shim.environment()?;
    // Kept until the program has ended.
    let (socket, _held) = socket(&options.place, kind.is_simulated())?;
    let prepared = prepare(options, &hook, &socket)?;
    let program = options.command[0].to_string_lossy().into_owned();
    let Prepared { mut command, simulator, hello } = prepared;
    if let Some((variables, _)) = &shim {
        command.envs(variables.iter().map(|(name, value)| (name, value)));
    }
    let path = shim.iter().flat_map(|(variables, _)| variables).find(|(name, _)| name == "PYTHONPATH");
    let path = path.map(|(_, value)| value.clone()).or_else(|| std::env::var_os("PYTHONPATH"));
    let compute = options.compute.environment(path)?;
    if let Some((variables, _)) = &compute {
        command.envs(variables.iter().map(|(name, value)| (name, value)));
    }
    if let Some(notice) = private::ask(&socket, &hello)? {
        eprintln!("gshare: {notice}");
    }
    find_room(&command, &socket, &hello, options.wait)?;
    // Before the child exists, so that no signal in between is lost.
    let forwarded = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
    // Ignored signals (`nohup`, a job in the background) stay ignored in the program: a handler would not be inherited.
    let ignored = ignored();
    let forwarded = forwarded.into_iter().filter(|signal| ignored & 1 << (signal - 1) == 0);
    let signals = SignalsInfo::<WithOrigin>::new(forwarded)?;
    let child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("error: {program}: {error}");
            return Ok(ExitCode::from(if error.kind() == ErrorKind::NotFound {
                NOT_FOUND
            } else {
                NOT_STARTED
            }));
        }
    };
    let status = wait(child, signals)?;
    drop((simulator, shim, compute));
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)))
}

/// Name of the hidden subcommand for the list of devices.
pub(crate) const DEVICES: &str = "devices";

/// Time between two requests for room.
const ROOM_EVERY: std::time::Duration = std::time::Duration::from_millis(200);

/// Checks for room on one of the program's devices, or waits for it. Without an answer from the daemon or the driver the
/// program starts, and may be refused at its first context.
fn find_room(program: &Command, socket: &Path, hello: &ToDaemon, wait: bool) -> anyhow::Result<()> {
    let ToDaemon::Hello { name, spec, .. } = hello else { return Ok(()) };
    let mut list = Command::new(std::env::current_exe()?);
    for (key, value) in program.get_envs() {
        match value {
            Some(value) => list.env(key, value),
            None => list.env_remove(key),
        };
    }
    let listed =
        list.arg(DEVICES).env_remove("LD_PRELOAD").stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    let Ok(devices) = serde_json::from_slice::<Vec<(DeviceUuid, Bytes)>>(&listed.stdout) else {
        return Ok(());
    };
    let admin = gshared::config::admin_socket_of(socket);
    let mut told = false;
    loop {
        let room = gshared::admin::Room { name: name.clone(), spec: *spec, devices: devices.clone() };
        let Ok(refusals) = gshared::admin::room(&admin, room) else { return Ok(()) };
        // A device with room refuses nothing.
        let Some(refusal) =
            refusals.into_iter().collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().next())
        else {
            return Ok(());
        };
        // No end of other programs makes a device larger.
        let is_too_large = |bytes: Bytes| devices.iter().all(|(_, all)| bytes > *all);
        let never = spec.guaranteed().or(spec.memory()).is_some_and(is_too_large);
        anyhow::ensure!(
            wait && !never,
            "the daemon at {} has no room for the program: {refusal}{}",
            socket.display(),
            if never { "" } else { "; --wait waits for it" }
        );
        if !told {
            eprintln!("gshare: waits for room: {refusal}");
            told = true;
        }
        std::thread::sleep(ROOM_EVERY);
    }
}

/// The signals ignored by this process, the first in the lowest bit.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// The named socket, the node's, or a private one; a daemon listens there while the returned hold lives. The command starts only
/// a private daemon, since a named daemon has a configuration of its own.
pub(super) fn socket(place: &Where, simulated: bool) -> anyhow::Result<(PathBuf, private::Held)> {
    let node = PathBuf::from(gshared::config::DEFAULT_SOCKET);
    let socket = match place.named() {
        Some(socket) => {
            let held = private::named(&socket)?;
            return Ok((socket, held));
        }
        // The node's daemon does not serve a simulated device.
        None if !simulated && private::listens(&node) => node,
        None => private::socket(simulated),
    };
    let held = private::ensure(&socket)?;
    if held.started {
        eprintln!("gshare: started a private daemon at {}", socket.display());
    }
    Ok((socket, held))
}

/// A program ready to start.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) command: Command,
    /// Must outlive the program.
    pub(crate) simulator: Option<SimulatorDir>,
    /// The first message of the program's processes to the daemon.
    pub(crate) hello: ToDaemon,
}

/// Sets up the environment of a program under the hook.
pub(crate) fn prepare(options: &Options, hook: &Path, socket: &Path) -> anyhow::Result<Prepared> {
    let mut command = Command::new(&options.command[0]);
    command.args(&options.command[1..]);
    if let Some(name) = &options.name
        && let Ok(snapshot) = super::snapshot(socket)
        && let Some(owner) = snapshot.clients.iter().find(|client| client.name == *name)
    {
        anyhow::bail!(
            "--name: `{name}` is in use by process {} ({}); choose another",
            owner.pid,
            owner.program
        );
    }
    command.env("LD_PRELOAD", gshare_runner::preload(hook)?).env("GSHARE_SOCKET", socket);
    let run = gshare_runner::new_run()?;
    command.env("GSHARE_RUN", run.to_string());
    let program = Path::new(&options.command[0]).file_name().unwrap_or_default().to_string_lossy();
    let name = options.name.clone().unwrap_or_else(|| format!("{program}-{}", std::process::id()));
    command.env("GSHARE_NAME", &name);
    let quota = options.quota.unwrap_or(QuotaRange::BEST_EFFORT);
    let spec = match options.observe {
        true => ResourceSpec::OBSERVED,
        false => {
            let spec = ResourceSpec::new(quota, options.sm.unwrap_or(SmShare::WHOLE), None)?;
            let memory = options.mem.or(options.park.then_some(MemoryRange::IN_TURNS));
            memory.map_or(spec, |memory| spec.with_memory(memory))
        }
    };
    let (pid_start, pid, program) = (0, 0, program.into_owned());
    let on_loss = setting("GSHARE_ON_DAEMON_LOSS", parse_loss)?.unwrap_or_default();
    setting("GSHARE_DAEMON_WAIT", str::parse::<DaemonWait>)?;
    let hello = ToDaemon::Hello { pid_start, pid, run, name, program, spec, on_loss };
    let mut set = |key: &str, value: Option<String>| {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    };
    set("GSHARE_QUOTA", options.quota.map(|quota| quota.to_string()));
    set("GSHARE_SM", options.sm.map(|sm| sm.to_string()));
    set("GSHARE_OBSERVE", options.observe.then(|| "1".to_owned()));
    set("GSHARE_PARK", options.park.then(|| "1".to_owned()));
    set("GSHARE_MEM", spec.memory_range().map(|range| range.to_string()));
    set("GSHARE_CLASS", options.class.map(|class| class.to_string()));
    let simulator = options.simulate.prepare(&mut command)?;
    let simulated = options.simulate.kind().is_ok_and(Kind::is_simulated);
    let partition = Partition::of_node(simulated);
    if counted_alone(&spec, &partition) {
        eprintln!(
            "gshare: --sm: {} of the SMs are counted and not kept, since no MPS runs (gshare doctor)",
            spec.sm()
        );
    }
    command.envs(partition.environment(&spec));
    Ok(Prepared { command, simulator, hello })
}

/// Whether the spec has an SM partition without an enforcer on this node.
fn counted_alone(spec: &ResourceSpec, partition: &Partition) -> bool {
    spec.sm() != SmShare::WHOLE && partition.name().is_none()
}

/// Waits for the program, passing on the signals of other processes. Signals of the terminal reach it anyway, since it is in the
/// same process group.
fn wait(mut child: Child, mut signals: SignalsInfo<WithOrigin>) -> anyhow::Result<std::process::ExitStatus> {
    let pid = Pid::from_child(&child);
    let handle = signals.handle();
    let forwarder = std::thread::spawn(move || {
        for origin in signals.forever() {
            if matches!(origin.cause, Cause::Kernel) {
                continue;
            }
            // The child is reaped only after this thread has ended, so the pid is still its own.
            if let Some(signal) = Signal::from_named_raw(origin.signal) {
                let _ = kill_process(pid, signal);
            }
        }
    });
    let waited = rustix::process::waitid(
        rustix::process::WaitId::Pid(pid),
        rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOWAIT,
    );
    handle.close();
    let _ = forwarder.join();
    waited?;
    Ok(child.wait()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Args as _, FromArgMatches as _};

    #[test]
    fn an_sm_partition_is_kept_by_mps_or_a_simulated_device_and_not_by_the_hook() {
        let spec =
            |sm| ResourceSpec::new(QuotaRange::WHOLE, SmShare::from_percent(sm).unwrap(), None).unwrap();
        assert!(counted_alone(&spec(25), &Partition::None));
        assert!(
            !counted_alone(&spec(100), &Partition::None) && !counted_alone(&spec(25), &Partition::Simulator)
        );
    }

    #[test]
    fn a_value_that_is_written_without_an_equals_sign_is_told_from_a_program() {
        let lost = |words: &[&str]| {
            let command = Options::augment_args(clap::Command::new("run"));
            let matches = command.try_get_matches_from([&["run"], words].concat()).unwrap();
            lost_value(&Options::from_arg_matches(&matches).unwrap())
        };
        assert_eq!(lost(&["--sim", "a100", "--", "true"]), Some("--sim"));
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("store.sock");
        let _store = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let socket = socket.to_str().unwrap();
        assert_eq!(lost(&["--shim", socket, "--", "true"]), Some("--shim"));
        assert_eq!(lost(&["--sim=a100", &format!("--shim={socket}"), "--", "true"]), None);
        assert_eq!(lost(&["--sim", "--shim", "--", "python3"]), None);
        assert_eq!(lost(&["--", "a100"]), None);
    }

    #[test]
    fn the_tolerance_that_is_left_out_is_the_librarys() {
        let class = |value: &str| {
            let command = Options::augment_args(clap::Command::new("run"));
            let matches = command.try_get_matches_from(["run", "--class", value, "true"]).unwrap();
            Options::from_arg_matches(&matches).unwrap().class
        };
        assert_eq!(class("slo-sensitive"), Some(ServiceClass::SLO_SENSITIVE));
        assert_eq!(class("slo-sensitive:60%"), ServiceClass::slo_sensitive(60));
        let help = Options::augment_args(clap::Command::new("run")).render_long_help().to_string();
        assert!(help.contains("by default 30") && ServiceClass::SLO_SENSITIVE.to_string().ends_with(":30"));
    }
}
