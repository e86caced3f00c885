//! The admin socket: questions about a daemon, one JSON object per line and answer.
//!
//! ```text
//! {"query":"snapshot"}    ──▶    ◀── a Snapshot
//! {"query":"metrics"}     ──▶    ◀── {"text":"…"}
//! ```
//! The admin socket is a stream socket of its own, served by a thread of its own: a slow reader delays no other client.
//! Before a snapshot the clients are asked how much memory they use, for a fifth of a second at most
//! (`inquiry.rs`). The users that may connect may ask.

use crate::handle::{Access, Handle};
use crate::peer::Peer;
use crate::server::DaemonError;
use crate::snapshot::Snapshot;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// How long who asks waits for the daemon.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the daemon takes for one question, whatever it is kept waiting by: less than others wait for their turn.
const TURN: Duration = Duration::from_secs(2);
/// The longest question.
const MAX_QUERY: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "query", rename_all = "snake_case", deny_unknown_fields)]
enum Query {
    Snapshot,
    Metrics,
}

#[derive(Debug, Serialize, Deserialize)]
struct Text {
    text: String,
}

#[derive(Debug, Serialize)]
struct Failure {
    error: String,
}

/// Asks the daemon behind an admin socket for a snapshot.
pub fn snapshot(socket: &Path) -> io::Result<Snapshot> {
    ask(socket, &Query::Snapshot)
}

/// Asks the daemon behind an admin socket for its metrics in Prometheus' text form.
pub fn metrics(socket: &Path) -> io::Result<String> {
    ask::<Text>(socket, &Query::Metrics).map(|answer| answer.text)
}

fn ask<T: for<'de> Deserialize<'de>>(socket: &Path, query: &Query) -> io::Result<T> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(query)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}

/// Answers questions until the daemon is gone.
pub(crate) fn serve(listener: &UnixListener, handle: &Handle, access: &Access) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // It was shut down.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(error) => {
                tracing::debug!(%error, "an admin question was not heard");
                // No descriptor left, most likely: others have to close theirs first.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            }
        };
        let allowed = || match access.allows(Peer::of(&stream)?.uid) {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
        };
        let answered = allowed().and_then(|()| answer(&stream, handle));
        match answered {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => tracing::debug!(%error, "an admin question was not answered"),
        }
    }
}

/// A stream until some time: its own time-outs are for each read and write alone.
struct Bounded<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Bounded<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Bounded<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(buffer)
    }
}

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Answers one question; `false` when the daemon is gone.
fn answer(stream: &UnixStream, handle: &Handle) -> io::Result<bool> {
    let mut stream = Bounded { stream, until: Instant::now() + TURN };
    let mut line = String::new();
    BufReader::new((&mut stream).take(MAX_QUERY)).read_line(&mut line)?;
    let answer = match serde_json::from_str(&line) {
        Ok(Query::Snapshot) => handle.snapshot().and_then(|snapshot| json(&snapshot)),
        Ok(Query::Metrics) => handle.metrics().and_then(|text| json(&Text { text })),
        Err(error) => json(&Failure { error: format!("not a query: {error}") }),
    };
    match answer {
        Err(DaemonError::Stopped) => Ok(false),
        Err(error) => Err(io::Error::other(error)),
        Ok(bytes) => stream.write_all(&bytes).map(|()| true),
    }
}

fn json(value: &impl Serialize) -> Result<Vec<u8>, DaemonError> {
    let mut bytes = serde_json::to_vec(value).map_err(io::Error::from)?;
    bytes.push(b'\n');
    Ok(bytes)
}
