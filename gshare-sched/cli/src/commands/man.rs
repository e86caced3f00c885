//! `gshare man`: manual pages, made from the same text as `--help`.

use super::Gshare;
use anyhow::Context as _;
use clap::CommandFactory as _;
use std::path::PathBuf;

/// Print the manual page of this command, or write one for it and for each of its commands.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  gshare man | man -l -
  gshare man --output ~/.local/share/man/man1      # then: man gshare-run")]
pub(crate) struct Options {
    /// Write `gshare.1`, `gshare-run.1` and so on into this directory, which is made if it is missing.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    // `help` is in no page, since the pages hold its text.
    let command = Gshare::command().disable_help_subcommand(true);
    if let Some(dir) = &options.output {
        std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        return clap_mangen::generate_to(command, dir).with_context(|| dir.display().to_string());
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    super::out::write(&mut std::io::stdout(), &page).context("standard output")?;
    Ok(())
}
