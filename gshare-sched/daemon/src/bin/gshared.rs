//! The gshare node daemon.

#[path = "../commands/daemon.rs"]
mod daemon;
#[path = "../commands/log.rs"]
mod log;

use clap::Parser as _;

#[derive(Debug, clap::Parser)]
#[command(name = "gshared", version, about, long_about = None)]
struct Arguments {
    #[command(flatten)]
    options: daemon::Options,
}

fn main() -> std::process::ExitCode {
    let arguments = Arguments::parse();
    log::start("info");
    log::exit(daemon::run(arguments.options))
}
