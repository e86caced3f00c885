//! `gshare lab`: engines without a node, and measurements by hand.

use super::{demo, engine, pack, partition, profile};

/// Measure programs, and try the engines without a node.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare lab pack pods.toml
  gshare lab profile --max-exec 40ms -- python3 serve.py
  gshare lab --help                                 all of them")]
pub(crate) struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Engine(engine::Options),
    Pack(pack::Options),
    Partition(partition::Options),
    Profile(Box<profile::Options>),
    Shares(demo::Measurement),
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    match &options.command {
        Command::Engine(options) => engine::run(options),
        Command::Pack(options) => pack::run(options),
        Command::Partition(options) => partition::run(options),
        Command::Profile(options) => profile::run(options),
        Command::Shares(options) => demo::measure(options),
    }
}
