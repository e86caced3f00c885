//! `gshare up`: the host of this node's functions, with its daemon.
//!
//! The host is a program of its own, so this command builds without a web server. The command looks for the host beside itself,
//! where `cargo gshare` and packages put the host, and then on the search path.

use anyhow::{Context as _, anyhow};
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

/// The program.
const HOST: &str = "gshare-openfaas";
pub(crate) const MISSING: &str = "gshare-openfaas is neither beside this command nor on the search path; \
    packages bring it along, and `cargo install --path examples/hosts/openfaas --bin gshare-openfaas` builds it in a checkout";

/// Start the host of this node's functions.
///
/// Deploy functions with a latency objective, and the host measures, places, scales and serves them.
///
/// The host uses the GPUs of this machine, or simulated GPUs: `gshare up --sim=a100,devices=2`. `gshare up --demo` deploys
/// some functions, loads them and prints the results. All arguments go to the host: `gshare up --help` lists them.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
#[command(after_help = "\
EXAMPLES
  gshare up --demo                   some functions and a trainer under load for 30 s, and what became of them
  gshare up                          on the GPUs of this machine; `gshare ps` shows its functions
  gshare up --sim=a100,devices=2     on two simulated A100s")]
pub(crate) struct Options {
    /// Arguments of the host.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENT")]
    arguments: Vec<OsString>,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let host = host().context(MISSING)?;
    // `exec` returns only if the program cannot start. Its help names this command.
    let error = Command::new(&host).arg0("gshare up").args(&options.arguments).exec();
    Err(anyhow!("{}: {error}", host.display()))
}

pub(crate) fn host() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(HOST));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).map(|dir| dir.join(HOST));
    beside.into_iter().chain(dirs).find(|file| file.is_file())
}
