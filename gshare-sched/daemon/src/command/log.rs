//! Logs and errors on standard error.

use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Logs at `level` and above, or as `GSHARE_LOG` says.
pub fn start(level: &str) {
    let filter = EnvFilter::try_from_env("GSHARE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour).init();
}

/// The exit code of a command; an error is printed with its causes.
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
