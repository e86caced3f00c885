//! Logs on standard error.

use std::fs::File;
use std::io::{self, IsTerminal as _, Read as _, Seek as _, SeekFrom, Write};
use std::os::fd::AsFd as _;
use std::sync::Mutex;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::{self, writer::BoxMakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Starts logging at `level` and above, or by `GSHARE_LOG`. `trimmed` states that standard error is a file for reading and appending, to
/// be cut to its last part.
pub fn start(level: &str, trimmed: bool) {
    let asked = std::env::var("GSHARE_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    let filter = asked.or_else(|| level.parse().ok()).unwrap_or_default();
    let colour = io::stderr().is_terminal();
    let writer = match io::stderr().as_fd().try_clone_to_owned() {
        Ok(file) if trimmed => BoxMakeWriter::new(Mutex::new(Trimmed(file.into()))),
        _ => BoxMakeWriter::new(io::stderr),
    };
    let lines = fmt::layer().with_writer(writer).with_ansi(colour);
    tracing_subscriber::registry().with(filter).with(lines).init();
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

#[cfg(test)]
mod tests {
    use super::{Trimmed, Write as _};

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
}
