//! The node daemon: admits hooked processes, and hands out GPU time and memory.
//!
//! # Problem
//! Processes that share a GPU must agree which of them launches now, and none can be trusted to keep the books. One daemon per node keeps
//! them: the kernel tells it which processes are there, it journals each event, asks the pure [`Node`](gshare_sched::node::Node) for
//! actions, and tells the processes. The daemon is never on the path of a launch, since it hands out leases, renewed ahead of time.
//! ```text
//!  process + hook ──┐                       ┌─▶ journal   (now, event), before its frames are sent
//!  process + hook ──┼─ SOCK_SEQPACKET ─▶ Daemon ─▶ Node: sessions, shares, tokens, memory, debts, admission
//!  process + hook ──┘                       ├─▶ Prometheus metrics, log
//!                                           └─▶ admin socket and page: snapshots for `gshare status` and browsers
//! ```
//! The daemon decides nothing: it hands events to the node and carries out the node's actions. The journal, the metrics and the log
//! observe both; the node knows none of these observers.
//!
//! # Algorithm
//! One thread takes one event at a time: a frame of a peer, the end of a connection or of its process (a pidfd, since a forked child
//! keeps its parent's socket open), the engine's deadline, or a command of the host. The thread journals each event, handles it, and
//! sends the resulting frames without waiting for a peer: a peer that does not read loses its connection, not the others their time.
//!
//! # Embedding
//! A [`Daemon`] owns its socket, clock, journal and metrics, so a host may run several daemons in one process. A [`DaemonBuilder`] takes
//! another [`Clock`] or another policy ([`gshare_core::TokenScheduler`]).
//! ```
//! # let dir = tempfile::tempdir()?;
//! let config = gshared::Config::at(dir.path().join("gshare.sock"));
//! let running = gshared::Daemon::new(config)?.spawn()?;
//! let snapshot = running.handle().snapshot()?;
//! assert!(snapshot.clients.is_empty());
//! running.stop()?;
//! # Ok::<(), gshared::DaemonError>(())
//! ```
//! # Guarantees
//! - A connection that breaks the protocol is dropped, and its [`Reason`](gshare_core::reason::Reason) counted; others notice nothing.
//! - `kill -9` of a client frees its token, its share and its memory as soon as the kernel reports its end.
//! - `kill -9` of the daemon loses no journalled event; hooks go on by their own policy and register again.
//! - A bad configuration changes nothing.
//!
//! # Limits
//! Linux 5.11 or later. The daemon checks uids, not programs: the enforcement in hooked processes is cooperative, no security boundary.

mod access;
pub mod admin;
pub mod clock;
#[cfg(feature = "command")]
pub mod command;
pub mod config;
mod crowd;
pub mod enforce;
mod facts;
mod front;
pub mod journal;
pub mod mps;
pub mod nvml;
pub mod page;
pub mod report;
pub mod why;

mod handle;
mod health;
mod http;
pub mod metrics;
mod moves;
mod neighbours;
mod observed;
mod peer;
mod server;
mod snapshot;
mod sockets;
mod ticket;
mod usage;

pub use clock::{Clock, ManualClock, MonotonicClock};
pub use config::{Config, ConfigError, DeviceUuid};
pub use handle::{Handle, Running};
pub use metrics::Metrics;
pub use moves::Progress;
pub use neighbours::Neighbour;
pub use server::{Daemon, DaemonBuilder, DaemonError};
pub use snapshot::{ClientSnapshot, DeviceSnapshot, Snapshot};
pub use usage::{Owner, ProcessUse};
