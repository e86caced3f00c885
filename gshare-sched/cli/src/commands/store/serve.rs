//! `gshare store serve`: the store in the foreground, from flags, a file, or both.

use super::DEFAULT_SOCKET;
use crate::commands::sim::Simulate;
use anyhow::Context as _;
use gshare_core::text::some_text;
use gshare_core::{Bytes, Duration};
use gshare_modelstore::backend::cuda::{PinnedBackend, VmmBackend};
use gshare_modelstore::server::{Server, ServerConfig};
use gshare_modelstore::store::StoreLimits;
use gshare_runner::libraries::SimulatorDir;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getppid, getrlimit, kill_process, set_parent_process_death_signal,
    setrlimit,
};
use serde::Deserialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A --config file is TOML with any of these settings, which options override:
///
///     socket = "/run/gshare/store.sock"
///     host = "4GiB"
///     gpu = "8GiB"
///     # Number of the GPU.
///     device = 0
///     models = "/srv/models"
///     # Permissions of the socket.
///     mode = "666"
///     # Limits of each user, by default half of the memory except for root and the store's own user; then of uid 1000.
///     [limits]
///     bytes = "2GiB"
///     models = 20
///     load_interval = "1s"
///     load_burst = 5
///     [users.1000]
///     bytes = "8GiB"
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(super) struct Serve {
    /// Settings from a file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Host memory for models [default: 4GiB].
    #[arg(long, value_name = "BYTES")]
    host: Option<Bytes>,
    /// GPU memory for models [default: none]. The store itself has no CUDA context: a short-lived process per load fills
    /// the memory, and clients map it for reading. Host memory is then page-locked, up to the limit of locked memory.
    #[arg(long, value_name = "BYTES")]
    gpu: Option<Bytes>,
    #[command(flatten)]
    simulate: Simulate,
    /// Directory of *.safetensors files that all users may read as models, loaded on demand.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// End with the process of this number, the parent.
    #[arg(long, value_name = "PID", hide = true)]
    dies_with: Option<i32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct File {
    socket: Option<PathBuf>,
    #[serde(deserialize_with = "some_text")]
    host: Option<Bytes>,
    #[serde(deserialize_with = "some_text")]
    gpu: Option<Bytes>,
    device: Option<u32>,
    models: Option<PathBuf>,
    mode: Option<String>,
    limits: Limits,
    users: BTreeMap<String, Limits>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Limits {
    #[serde(deserialize_with = "some_text")]
    bytes: Option<Bytes>,
    models: Option<u32>,
    #[serde(deserialize_with = "some_text")]
    load_interval: Option<Duration>,
    load_burst: Option<u32>,
}

impl Limits {
    fn check(self) -> anyhow::Result<StoreLimits> {
        let mut limits = StoreLimits::default();
        limits.bytes = self.bytes.unwrap_or(limits.bytes);
        limits.models = self.models.unwrap_or(limits.models);
        limits.load_interval = self.load_interval.unwrap_or(limits.load_interval);
        limits.load_burst = self.load_burst.unwrap_or(limits.load_burst);
        anyhow::ensure!(limits.load_burst > 0, "`load_burst` is 0: need at least 1");
        Ok(limits)
    }
}

fn octal(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("`{text}` is not a mode such as 660"))
}

fn uid(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("`{text}` is not a uid"))
}

impl Serve {
    pub(super) fn run(&self, socket: Option<&Path>) -> anyhow::Result<()> {
        let file = match &self.config {
            None => File::default(),
            Some(path) => {
                let context = || format!("--config {}", path.display());
                let text = std::fs::read_to_string(path).with_context(context)?;
                toml::from_str(&text).with_context(context)?
            }
        };
        let gpu = self.gpu.or(file.gpu);
        if gpu.is_none() {
            for (name, given) in [("sim", self.simulate.sim.is_some()), ("device", file.device.is_some())] {
                anyhow::ensure!(!given, "`{name}` is about memory of a GPU, and `gpu` says no bytes of it");
            }
        }
        if let Some((command, dir)) = self.simulate.again()? {
            eprintln!("gshare: simulated device");
            return simulated(command, dir);
        }
        let socket = socket.map(Path::to_owned).or(file.socket).unwrap_or_else(|| DEFAULT_SOCKET.into());
        let mut config = ServerConfig::at(socket);
        config.store.host = self.host.or(file.host).unwrap_or(config.store.host);
        config.models = self.models.clone().or(file.models);
        let mode = file.mode.map(|text| octal(&text)).transpose().map_err(anyhow::Error::msg)?;
        config.socket_mode = mode.unwrap_or(config.socket_mode);
        config.default_limits = file.limits.check()?;
        for (user, limits) in file.users {
            let limits = limits.check().with_context(|| format!("user {user}"))?;
            config.limits.insert(uid(&user).map_err(anyhow::Error::msg)?, limits);
        }
        if let Some(directory) = config.socket.parent() {
            std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
        }
        self.serve(config, gpu, file.device.unwrap_or(0))
    }

    fn serve(&self, mut config: ServerConfig, gpu: Option<Bytes>, device: u32) -> anyhow::Result<()> {
        // Before the store starts, so that no signal in between is lost.
        let mut signals = Signals::new([SIGTERM, SIGINT])?;
        if let Some(parent) = self.dies_with {
            set_parent_process_death_signal(Some(Signal::TERM))?;
            let alive = getppid().is_some_and(|pid| pid.as_raw_nonzero().get() == parent);
            anyhow::ensure!(alive, "the process that started this one is gone");
        }
        let socket = config.socket.clone();
        // Each model takes a descriptor, and each user may take a part of them. The part is smaller if the system refuses
        // more.
        let open = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: open.maximum, ..open });
        let server = match gpu {
            None => Server::new(config)?,
            Some(bytes) => {
                config.store.gpu = bytes;
                let loader = vec![std::env::current_exe()?.into(), "store".into(), "loader".into()];
                let gpu = VmmBackend::new(device, loader)
                    .context("no memory of a GPU; to serve from a simulated one, add --sim")?;
                Server::with_backends(config, Box::new(PinnedBackend), Some(Box::new(gpu)))?
            }
        };
        let running = server.spawn()?;
        eprintln!("the store listens at {}", socket.display());
        signals.forever().next();
        running.stop();
        Ok(())
    }
}

/// Runs the same command in an environment with the simulated driver.
fn simulated(mut command: std::process::Command, dir: SimulatorDir) -> anyhow::Result<()> {
    command.args(["--dies-with", &std::process::id().to_string()]);
    // Before the child exists, so that no signal in between is lost.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let mut child = command.spawn()?;
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
            let _ = pid.map(|pid| kill_process(pid, signal));
        }
    });
    let status = child.wait()?;
    drop(dir);
    anyhow::ensure!(status.success(), "the store on the simulated device: {status}");
    Ok(())
}
