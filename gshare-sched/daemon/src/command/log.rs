//! Logs and errors on standard error.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Seek as _, SeekFrom, Write};
use std::os::fd::AsFd as _;
use std::process::ExitCode;
use std::sync::Mutex;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

/// Starts logging at `level` and above, or by `GSHARE_LOG`. `trimmed` states that standard error is a file for reading and appending, to
/// be cut to its last part.
pub fn start(level: &str, trimmed: bool) {
    let filter = EnvFilter::try_from_env("GSHARE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let colour = io::stderr().is_terminal();
    let writer = match io::stderr().as_fd().try_clone_to_owned() {
        Ok(file) if trimmed => BoxMakeWriter::new(Mutex::new(Trimmed(file.into()))),
        _ => BoxMakeWriter::new(io::stderr),
    };
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer).with_ansi(colour).init();
}

/// A file for reading and appending that stays below [`Trimmed::MOST`] bytes. It stays the same file, so other writers, such as a panic
/// of this process, can go on writing to it.
#[derive(Debug)]
struct Trimmed(File);

impl Trimmed {
    const MOST: u64 = 1 << 20;
    /// Bytes kept of a full file.
    const KEPT: u64 = Self::MOST / 2;

    fn trim(&mut self, length: u64) -> io::Result<()> {
        let mut kept = Vec::new();
        self.0.seek(SeekFrom::Start(length.saturating_sub(Self::KEPT)))?;
        self.0.read_to_end(&mut kept)?;
        let whole = kept.iter().position(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        self.0.set_len(0)?;
        self.0.write_all(&kept[whole..])
    }
}

impl Write for Trimmed {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let length = self.0.metadata()?.len();
        if length + line.len() as u64 > Self::MOST {
            self.trim(length)?;
        }
        self.0.write(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
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

/// An error and its causes, each once. Many errors of libraries repeat their cause in their own text.
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
    use super::{Trimmed, Write as _};
    use anyhow::anyhow;

    #[test]
    fn a_trimmed_log_is_its_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let file = std::fs::OpenOptions::new().create(true).read(true).append(true).open(&path).unwrap();
        let mut log = Trimmed(file);
        for number in 0..200_000 {
            writeln!(log, "line {number}").unwrap();
            assert!(number % 1000 > 0 || path.metadata().unwrap().len() <= Trimmed::MOST);
        }
        let kept = std::fs::read_to_string(&path).unwrap();
        let first = 200_000 - kept.lines().count();
        assert!(kept.len() as u64 > Trimmed::KEPT - 100);
        assert!(kept.lines().zip(first..).all(|(line, number)| line == format!("line {number}")));
    }

    #[test]
    fn a_cause_is_told_once() {
        let of = |outer: &str| super::told(&anyhow!("no such file").context(outer.to_owned()));
        assert_eq!(of("config.toml"), "config.toml: no such file");
        assert_eq!(of("cannot read config.toml: no such file"), "cannot read config.toml: no such file");
        let doubled = anyhow!("no such file").context("x: no such file").context("--store x");
        assert_eq!(super::told(&doubled), "--store x: x: no such file");
    }
}
