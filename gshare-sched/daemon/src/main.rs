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
    log::start("info", arguments.options.private.is_some());
    gshared::report::exit(run(arguments.options))
}
