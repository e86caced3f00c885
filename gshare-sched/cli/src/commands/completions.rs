//! `gshare completions`: the script for completing this command's options in a shell.

use super::Gshare;
use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_complete::Shell;

/// Print the script with which a shell completes commands and options.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
EXAMPLES
  mkdir -p ~/.local/share/bash-completion/completions
  gshare completions bash > ~/.local/share/bash-completion/completions/gshare
  gshare completions zsh > ~/.zfunc/_gshare        # with ~/.zfunc in fpath
  gshare completions fish > ~/.config/fish/completions/gshare.fish")]
pub(crate) struct Options {
    /// Name of the shell that reads the script.
    shell: Shell,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Gshare::command(), "gshare", &mut script);
    super::out::write(&mut std::io::stdout(), &script).context("standard output")?;
    Ok(())
}
