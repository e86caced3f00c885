//! The admin socket: questions to a daemon and its answers, one JSON object per line.
//!
//! ```text
//! {"query":"snapshot"}    ──▶    ◀── a Snapshot
//! {"query":"metrics"}     ──▶    ◀── {"text":"…"}
//! {"query":"room",…}      ──▶    ◀── [null,"request 70% does not fit: …"]
//! {"query":"park","name":"a","on":true}  ──▶    ◀── {"Ok":[4294967296]} or {"Err":"no client is named `a` …"}
//! {"query":"moved","clients":[4294967296],"on":true}  ──▶    ◀── {"Done":1073741824}, or "Moves" after some seconds
//! ```
//! The admin socket is a separate stream socket. Users with access to the daemon may also ask questions. The daemon serves
//! a bounded number of connections side by side, so a silent peer or a slow reader delays no other peer. Before a snapshot the
//! node asks the clients for their use of memory, and waits a fifth of a second at most (rule 8 of the
//! [node](gshare_sched::node)).

use crate::handle::{Command, Handle, Moved, Park, Parked};
use crate::moves::Progress;
use crate::server::DaemonError;
use crate::snapshot::Snapshot;
use gshare_core::{Bytes, ClientId, DeviceUuid, ResourceSpec};
use serde::{Deserialize, Serialize};
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// Time-out of a client's reads and writes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time for a question and its answer.
const TURN: Duration = Duration::from_secs(5);
/// Most bytes in a question.
const MAX_QUERY: u64 = 4096;

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "query", rename_all = "snake_case", deny_unknown_fields)]
enum Query {
    Snapshot,
    Metrics,
    Room(Room),
    Park(Park),
    Moved(Moved),
}

/// The question whether a future program has room on its visible devices.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Room {
    /// Name of the instance.
    pub name: String,
    /// The share the program will ask for.
    pub spec: ResourceSpec,
    /// The program's visible devices and their memory.
    pub devices: Vec<(DeviceUuid, Bytes)>,
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

/// Asks the daemon behind an admin socket for room. The answer has the refusal, if any, for each device.
pub fn room(socket: &Path, room: Room) -> io::Result<Vec<Option<String>>> {
    ask(socket, &Query::Room(room))
}

/// Asks the daemon behind an admin socket to park an instance, or to bring it back. An instance on `hold` does not come back by itself when
/// it misses its memory. The answer has the clients with memory on the move, or the refusal.
pub fn park(socket: &Path, name: &str, order: ParkOrder) -> io::Result<Result<Vec<ClientId>, String>> {
    let (on, holds) = (order != ParkOrder::Unpark, order == ParkOrder::Hold);
    ask::<Parked>(socket, &Query::Park(Park { name: name.to_owned(), uid: 0, on, holds }))
}

/// An order for the memory of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkOrder {
    /// To host memory, until the program misses it.
    Park,
    /// To host memory, until it is asked back.
    Hold,
    /// Back to the device.
    Unpark,
}

/// Waits for the end of a move of these clients' memory, to host memory if `on`, but no longer than a few seconds.
pub fn moved(socket: &Path, clients: &[ClientId], on: bool) -> io::Result<Progress> {
    ask(socket, &Query::Moved(Moved { clients: clients.to_vec(), on }))
}

fn ask<T: for<'de> Deserialize<'de>>(socket: &Path, query: &Query) -> io::Result<T> {
    let mut stream = StdUnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(query)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}

/// Answers the question of one connection, and closes the connection.
pub(crate) async fn answer(stream: UnixStream, uid: u32, handle: Handle) {
    match tokio::time::timeout(TURN, converse(stream, uid, &handle)).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a question was not answered"),
        Err(_) => tracing::debug!("a question took longer than {TURN:?}"),
    }
}

async fn converse(mut stream: UnixStream, uid: u32, handle: &Handle) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new((&mut stream).take(MAX_QUERY)).read_line(&mut line).await?;
    let bytes = match serde_json::from_str(&line) {
        Ok(Query::Snapshot) => json(handle.snapshot_later().await),
        Ok(Query::Metrics) => json(handle.metrics_later().await.map(|text| Text { text })),
        Ok(Query::Room(room)) => json(handle.ask(|reply| Command::Room(room, reply)).await),
        Ok(Query::Park(park)) => json(handle.ask(|reply| Command::Park(Park { uid, ..park }, reply)).await),
        Ok(Query::Moved(moved)) => json(handle.ask(|reply| Command::Moved(moved, reply)).await),
        Err(error) => json(Ok(Failure { error: format!("not a query: {error}") })),
    }?;
    stream.write_all(&bytes).await
}

fn json(answer: Result<impl Serialize, DaemonError>) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(&answer.map_err(io::Error::other)?)?;
    bytes.push(b'\n');
    Ok(bytes)
}
