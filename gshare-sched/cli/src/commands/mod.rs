//! The subcommands of `gshare`, a module each.
//!
//! With `--json` a command prints exactly one JSON object on standard output; progress and logs go to standard error.

// First, since its macros hide the standard macros in the modules after it.
#[macro_use]
mod out;

mod bypass;
mod completions;
mod compute;
pub(crate) mod cuda;
mod demo;
mod doctor;
mod engine;
mod host;
mod lab;
mod man;
mod pack;
mod park;
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
use gshared::report;
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
    Run(run::Options),
    Up(up::Options),
    Ps(ps::Options),
    Status(status::Options),
    Top(top::Options),
    Why(why::Options),
    Doctor(doctor::Options),
    Store(store::Options),
    /// Run the node daemon in the foreground, or park a program.
    ///
    /// SIGHUP re-reads the configuration, SIGTERM and SIGINT stop the daemon.
    #[command(after_help = "\
EXAMPLES
  gshare daemon                                      with /etc/gshare/gshared.toml, if it is there
  gshare daemon --check --config gshared.toml        whether a configuration is good
  gshare daemon --config /dev/null                   with the defaults alone
  gshare daemon park alice                           its device memory goes to host memory until it launches")]
    Daemon(Daemon),
    Demo(demo::Options),
    Lab(lab::Options),
    #[command(hide = true)]
    Completions(completions::Options),
    #[command(hide = true)]
    Man(man::Options),
    /// The program of `gshare demo`.
    #[command(name = spin::NAME, hide = true)]
    Spin,
    /// The devices that a program sees, for `gshare run`.
    #[command(name = run::DEVICES, hide = true)]
    Devices,
}

#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
struct Daemon {
    #[command(subcommand)]
    order: Option<park::Order>,
    #[command(flatten)]
    options: daemon::Options,
}

/// Runs a command to its end, with errors and logs on standard error.
pub fn execute(gshare: Gshare) -> ExitCode {
    match &gshare.command {
        Command::Daemon(Daemon { order: None, options }) => log::start("info", options.private.is_some()),
        _ => log::start("warn", false),
    }
    match gshare.command {
        Command::Demo(options) => report::exit(demo::run(&options)),
        Command::Daemon(Daemon { order: Some(order), .. }) => report::exit(park::run(&order)),
        Command::Daemon(Daemon { order: None, options }) => report::exit(daemon::run(options)),
        Command::Run(options) => run::run(&options).unwrap_or_else(|error| report::exit(Err(error))),
        Command::Up(options) => report::exit(up::run(&options)),
        Command::Ps(options) => report::exit(ps::run(&options)),
        Command::Status(options) => report::exit(status::run(&options)),
        Command::Top(options) => report::exit(top::run(&options)),
        Command::Why(options) => report::exit(why::run(&options)),
        Command::Doctor(options) => doctor::run(&options).unwrap_or_else(|error| report::exit(Err(error))),
        Command::Store(options) => report::exit(store::run(&options)),
        Command::Lab(options) => report::exit(lab::run(&options)),
        Command::Completions(options) => report::exit(completions::run(&options)),
        Command::Man(options) => report::exit(man::run(&options)),
        Command::Spin => report::exit(spin::run()),
        Command::Devices => report::exit(cuda::devices().and_then(|devices| print_json(&devices))),
    }
}

/// The daemon that a command addresses.
#[derive(Debug, Clone, Default, clap::Args)]
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

/// The form of a command's output.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(crate) struct Form {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

fn snapshot(socket: &Path) -> anyhow::Result<gshared::Snapshot> {
    let admin = gshared::config::admin_socket_of(socket);
    gshared::admin::snapshot(&admin).map_err(|error| {
        anyhow::anyhow!(
            "no daemon answers at {}: {error}\n`gshare run` starts a private daemon with its first program, \
             `gshare daemon` starts the node's; --socket names another",
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
    serde_json::from_str(&text)
        .with_context(|| format!("{}: is read as JSON; a TOML file needs a name with .toml", name()))
}

fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser as _};
    use std::collections::BTreeSet;

    /// The words of a shell line before a comment, a pipe, a redirection or an explanation.
    fn words(line: &str) -> Vec<&str> {
        let command = line.split("  ").next().unwrap_or_default();
        command.split(' ').take_while(|word| !["#", "|", "<", ">"].contains(word)).collect()
    }

    /// The commands for people, and those of the laboratory.
    fn commands() -> (Vec<clap::Command>, Vec<clap::Command>) {
        let shown = |of: &clap::Command| -> Vec<_> {
            of.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect()
        };
        let all = shown(&Gshare::command());
        let lab = all.iter().find(|command| command.get_name() == "lab").unwrap();
        (all.iter().filter(|command| command.get_name() != "lab").cloned().collect(), shown(lab))
    }

    /// The names and meanings of all options of these commands. An option of several commands with one meaning counts once.
    fn options(commands: &[clap::Command]) -> BTreeSet<(String, String)> {
        let mut all = BTreeSet::new();
        for command in commands {
            for option in command.get_arguments().filter(|option| !option.is_hide_set()) {
                let help = option.get_help().map(ToString::to_string).unwrap_or_default();
                all.extend(option.get_long().map(|name| (name.to_owned(), help)));
            }
            all.extend(options(&command.get_subcommands().cloned().collect::<Vec<_>>()));
        }
        all
    }

    /// A person can learn these. The host of `gshare up` has seven more, and each command has `--help`.
    #[test]
    fn commands_and_their_options_are_few() {
        let (people, _) = commands();
        let names: Vec<_> = people.iter().map(clap::Command::get_name).collect();
        assert_eq!(names, ["run", "up", "ps", "status", "top", "why", "doctor", "store", "daemon", "demo"]);
        let options = options(&people);
        assert!(options.len() + 7 <= 40, "{}: {options:#?}", options.len());
    }

    /// What prints a table prints it for programs too.
    #[test]
    fn each_command_with_a_table_prints_json() {
        let (people, lab) = commands();
        let tables = ["ps", "status", "top", "why", "doctor", "store", "demo", "pack", "partition", "shares"];
        for name in tables {
            let command = people.iter().chain(&lab).find(|command| command.get_name() == name).unwrap();
            assert!(command.get_arguments().any(|option| option.get_long() == Some("json")), "{name}");
        }
    }

    #[test]
    fn each_command_has_examples_that_it_understands() {
        let (people, lab) = commands();
        let people = people.iter().map(|command| (1, command));
        for (at, command) in people.chain(lab.iter().map(|command| (2, command))) {
            let name = command.get_name();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples: Vec<_> =
                help.lines().map(str::trim_start).filter(|line| line.starts_with("gshare ")).collect();
            assert!(examples.iter().any(|line| words(line)[at] == name), "{name} has no example");
            for line in examples {
                let understood = Gshare::try_parse_from(words(line));
                assert!(understood.is_ok(), "{name}: `{line}`: {}", understood.unwrap_err());
            }
        }
    }
}
