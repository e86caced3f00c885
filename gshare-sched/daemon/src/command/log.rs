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
            eprintln!("error: {}", told(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, each once: many errors of libraries say their cause in their own text too.
pub fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    #[test]
    fn a_cause_is_told_once() {
        let of = |outer: &str| super::told(&anyhow!("no such file").context(outer.to_owned()));
        assert_eq!(of("config.toml"), "config.toml: no such file");
        assert_eq!(of("cannot read config.toml: no such file"), "cannot read config.toml: no such file");
        let doubled = anyhow!("no such file").context("x: no such file").context("--store x");
        assert_eq!(super::told(&doubled), "--store x: x: no such file");
    }
}
