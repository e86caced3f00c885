//! The `gshare` command.

mod commands;

use clap::Parser as _;

fn main() -> std::process::ExitCode {
    commands::execute(commands::Gshare::parse())
}
