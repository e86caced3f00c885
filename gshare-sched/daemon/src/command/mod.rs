//! `gshare daemon` and `gshared`: the node daemon in the foreground.

pub mod log;

use crate::config::MpsMode;
use crate::mps::Mps;
use crate::{Config, Daemon, Handle};
use anyhow::Context as _;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};

/// Exit code of a daemon after its own fault (`EX_SOFTWARE`).
pub const FAULT: i32 = 70;

/// Makes a panic of any thread end the process with one line. A daemon with broken books, or without one of its threads, must
/// not go on. The next daemon hears from its clients about their holdings and their use.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|fault| {
        eprintln!("error: a fault of the daemon ends it: {}", fault.to_string().replace('\n', " "));
        std::process::exit(FAULT);
    }));
}

const DEFAULT_CONFIG: &str = "/etc/gshare/gshared.toml";

/// Run the node daemon in the foreground.
///
/// SIGHUP re-reads the configuration, SIGTERM and SIGINT stop it.
#[derive(Debug, clap::Args)]
pub struct Options {
    /// Configuration file [default: /etc/gshare/gshared.toml, if it is there].
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Socket for hooked processes, instead of the configuration's. The admin socket is beside it, unless the configuration sets one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Be the daemon that `gshare run` starts: end when no process has been connected for this long, and keep only the last
    /// part of the log, since standard error is a file that may be read and appended to.
    #[arg(long, hide = true, value_name = "TIME")]
    pub private: Option<gshare_core::Duration>,
    /// Read the configuration, say whether it is good, and exit.
    #[arg(long)]
    check: bool,
}

impl Options {
    fn file(&self) -> Option<&Path> {
        let default = Path::new(DEFAULT_CONFIG);
        self.config.as_deref().or_else(|| default.exists().then_some(default))
    }

    fn load(&self) -> anyhow::Result<Config> {
        let mut config = match self.file() {
            Some(file) => Config::load(file).with_context(|| file.display().to_string())?,
            None => Config::default(),
        };
        if let Some(socket) = &self.socket {
            config.socket.clone_from(socket);
        }
        config.idle_exit = self.private.or(config.idle_exit);
        Ok(config)
    }
}

/// Runs the daemon until a signal or its configuration ends it.
///
/// # Errors
/// The configuration is refused, required MPS does not start, or the daemon cannot start or stops with an error.
pub fn run(options: Options) -> anyhow::Result<()> {
    let config = options.load()?;
    if options.check {
        eprintln!("the configuration is good");
        return Ok(());
    }
    end_on_panic();
    let mps = start_mps(config.mps)?;
    // The handlers come before the daemon, so that no signal is lost in between.
    let signals = Signals::new([SIGHUP, SIGTERM, SIGINT])?;
    let daemon = Daemon::new(config)?;
    let handle = daemon.handle();
    std::thread::Builder::new()
        .name("gshared-signals".into())
        .stack_size(256 << 10)
        .spawn(move || watch_signals(signals, &options, &handle))?;
    let served = daemon.run();
    if let Some(mps) = mps
        && let Err(error) = mps.stop()
    {
        tracing::warn!(%error, "MPS was not stopped");
    }
    Ok(served?)
}

fn watch_signals(mut signals: Signals, options: &Options, handle: &Handle) {
    for signal in signals.forever() {
        if signal != SIGHUP {
            return handle.stop();
        }
        let loaded = options.load().inspect_err(|_| handle.reload_failed());
        let result = loaded.and_then(|config| handle.reload(config).map_err(Into::into));
        match result {
            Ok(()) => tracing::info!("configuration re-read"),
            Err(error) => {
                let error = crate::report::told(error.as_ref());
                tracing::error!("the old configuration stays in force: {error}");
            }
        }
    }
}

/// Starts MPS as configured. Returns MPS if it must be stopped with the daemon.
fn start_mps(mode: MpsMode) -> anyhow::Result<Option<Mps>> {
    let started = match (mode, Mps::find()) {
        (MpsMode::Off, _) => return Ok(None),
        (MpsMode::On, None) => anyhow::bail!("mps = \"on\": nvidia-cuda-mps-control is not on PATH"),
        (_, None) => {
            tracing::info!("no MPS here: kernels of several processes take turns");
            return Ok(None);
        }
        (_, Some(mps)) => mps.start().map(|started| started.then_some(mps)),
    };
    match (mode, started) {
        (MpsMode::On, Err(error)) => Err(error).context("mps = \"on\""),
        (_, Err(error)) => {
            tracing::warn!(%error, "MPS does not start");
            Ok(None)
        }
        (_, Ok(mps)) => Ok(mps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(text: &str, args: &[&str]) -> Config {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            options: Options,
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("gshared.toml");
        std::fs::write(&file, text).unwrap();
        let args = ["gshared", "--config", file.to_str().unwrap()].into_iter().chain(args.iter().copied());
        <Command as clap::Parser>::parse_from(args).options.load().unwrap()
    }

    #[test]
    fn another_socket_leaves_an_admin_socket_that_the_file_sets() {
        let admin = |file: &str| loaded(file, &["--socket", "/run/b.sock"]).admin_socket();
        assert_eq!(admin("admin_socket = '/run/own.sock'"), Path::new("/run/own.sock"));
        assert_eq!(admin("socket = '/run/a.sock'"), Path::new("/run/b-admin.sock"));
        // An admin socket set to the default path stays too.
        let beside = "socket = '/run/a.sock'\nadmin_socket = '/run/a-admin.sock'";
        assert_eq!(admin(beside), Path::new("/run/a-admin.sock"));
    }
}
