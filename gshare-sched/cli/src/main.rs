//! The `gshare` command.

use clap::Parser as _;

fn main() -> std::process::ExitCode {
    gshare_cli::execute(gshare_cli::Gshare::parse())
}
