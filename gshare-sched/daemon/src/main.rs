//! The gshare node daemon.

use clap::Parser as _;
use gshared::command::{Options, log, run};

#[derive(Debug, clap::Parser)]
#[command(name = "gshared", version, about, long_about = None)]
struct Arguments {
    #[command(flatten)]
    options: Options,
}

fn main() -> std::process::ExitCode {
    let arguments = Arguments::parse();
    log::start("info", arguments.options.trim_log);
    log::exit(run(arguments.options))
}
