//! The subcommands of `gshare`, a module each.
//!
//! With `--json` a command prints exactly one JSON object on standard output; progress and logs go to standard error.

// First, since its macros hide the standard macros in the modules after it.
#[macro_use]
mod out;

mod bypass;
mod completions;
pub(crate) mod cuda;
mod demo;
mod doctor;
mod engine;
mod host;
mod man;
mod pack;
mod partition;
mod private;
mod profile;
mod ps;
mod run;
mod shim;
mod sim;
pub(crate) mod spin;
mod status;
mod store;
mod top;
mod up;
mod why;

use anyhow::Context as _;
use gshared::command::{self as daemon, log};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Share GPUs among processes: quotas of GPU time, SM partitions and memory limits, enforced per process.
#[derive(Debug, clap::Parser)]
#[command(name = "gshare", version)]
pub struct Gshare {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Demo(demo::Options),
    #[command(after_help = "\
EXAMPLES
  gshare daemon                                      with /etc/gshare/gshared.toml, if it is there
  gshare daemon --check --config gshared.toml        whether a configuration is good
  gshare daemon --no-config --metrics 9400           figures for Prometheus on port 9400")]
    Daemon(daemon::Options),
    Run(run::Options),
    Up(up::Options),
    Ps(ps::Options),
    Status(status::Options),
    Top(top::Options),
    Engine(engine::Options),
    Why(why::Options),
    Pack(pack::Options),
    Partition(partition::Options),
    Profile(profile::Options),
    Doctor(doctor::Options),
    Store(store::Options),
    Completions(completions::Options),
    Man(man::Options),
    /// The program of `gshare demo`.
    #[command(name = spin::NAME, hide = true)]
    Spin,
    /// The devices that a program sees, for `gshare run`.
    #[command(name = run::DEVICES, hide = true)]
    Devices,
}

/// Runs a command to its end, with errors and logs on standard error.
pub fn execute(gshare: Gshare) -> ExitCode {
    match &gshare.command {
        Command::Daemon(options) => log::start("info", options.trim_log),
        _ => log::start("warn", false),
    }
    match gshare.command {
        Command::Demo(options) => log::exit(demo::run(&options)),
        Command::Daemon(options) => log::exit(daemon::run(options)),
        Command::Run(options) => run::run(&options).unwrap_or_else(|error| log::exit(Err(error))),
        Command::Up(options) => log::exit(up::run(&options)),
        Command::Ps(options) => log::exit(ps::run(&options)),
        Command::Status(options) => log::exit(status::run(&options)),
        Command::Top(options) => log::exit(top::run(&options)),
        Command::Engine(options) => log::exit(engine::run(&options)),
        Command::Why(options) => log::exit(why::run(&options)),
        Command::Profile(options) => log::exit(profile::run(&options)),
        Command::Pack(options) => log::exit(pack::run(&options)),
        Command::Partition(options) => log::exit(partition::run(&options)),
        Command::Doctor(options) => doctor::run(&options).unwrap_or_else(|error| log::exit(Err(error))),
        Command::Store(options) => log::exit(store::run(&options)),
        Command::Completions(options) => log::exit(completions::run(&options)),
        Command::Man(options) => log::exit(man::run(&options)),
        Command::Spin => log::exit(spin::run()),
        Command::Devices => log::exit(cuda::devices().and_then(|devices| print_json(&devices))),
    }
}

/// The daemon that a command addresses.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Where {
    /// The daemon's socket [default: `GSHARE_SOCKET`; else the node's daemon, if one listens; else the private one].
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Where {
    /// The named socket, or the first with a listening daemon.
    fn socket(&self) -> PathBuf {
        self.named().unwrap_or_else(|| {
            let node = PathBuf::from(gshared::config::DEFAULT_SOCKET);
            let of_the_node = Some(node.clone()).filter(|node| private::listens(node));
            let private = || private::found(false).or_else(|| private::found(true));
            of_the_node.or_else(private).unwrap_or(node)
        })
    }

    fn named(&self) -> Option<PathBuf> {
        let environment = || std::env::var_os("GSHARE_SOCKET").filter(|text| !text.is_empty());
        self.socket.clone().or_else(|| environment().map(PathBuf::from))
    }

    fn snapshot(&self) -> anyhow::Result<gshared::Snapshot> {
        snapshot(&self.socket())
    }
}

fn snapshot(socket: &Path) -> anyhow::Result<gshared::Snapshot> {
    let admin = gshared::config::admin_socket_of(socket);
    gshared::admin::snapshot(&admin).map_err(|error| {
        anyhow::anyhow!(
            "no daemon answers at {}: {error}\nstart one with `gshare daemon`, or name its socket with --socket",
            admin.display()
        )
    })
}

/// Reads a file of at most `max` bytes: TOML if its name ends in `.toml`, else JSON.
fn read_file<T: serde::de::DeserializeOwned>(path: &Path, max: u64) -> anyhow::Result<T> {
    let name = || path.display().to_string();
    let size = std::fs::metadata(path).with_context(name)?.len();
    anyhow::ensure!(size <= max, "{}: {size} bytes, at most {max}", name());
    let text = std::fs::read_to_string(path).with_context(name)?;
    if path.extension().is_some_and(|extension| extension == "toml") {
        return toml::from_str(&text).with_context(name);
    }
    serde_json::from_str(&text).with_context(name)
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};

    /// The words of a shell line before a comment, a pipe, a redirection or an explanation.
    fn words(line: &str) -> Vec<&str> {
        let command = line.split("  ").next().unwrap_or_default();
        command.split(' ').take_while(|word| !["#", "|", "<", ">"].contains(word)).collect()
    }

    #[test]
    fn each_command_has_examples_that_it_understands() {
        for command in Gshare::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let name = command.get_name();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<_> =
                help.lines().map(str::trim_start).filter(|line| line.starts_with("gshare ")).collect();
            assert!(examples.iter().any(|line| words(line)[1] == name), "{name} has no example");
            for line in examples {
                let understood = Gshare::try_parse_from(words(line));
                assert!(understood.is_ok(), "{name}: `{line}`: {}", understood.unwrap_err());
            }
        }
    }
}
