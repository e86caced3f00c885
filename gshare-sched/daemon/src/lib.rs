//! The node daemon: lets hooked processes in, and hands out GPU time and memory.
//!
//! # Problem
//! Processes that share a GPU must agree on who launches now, and none of them can be trusted to keep the books. One
//! daemon per node keeps them: it knows who is there (the kernel says so, not the process), journals what happens,
//! asks the pure [`Node`](gshare_sched::node::Node) what to do about it, and tells the processes. It is never on the path
//! of a launch: what it hands out are leases, renewed ahead of time.
//!
//! ```text
//!  process + hook ──┐                       ┌─▶ journal   (now, event), before its frames are sent
//!  process + hook ──┼─ SOCK_SEQPACKET ─▶ Daemon ─▶ Node: sessions, shares, tokens, memory, debts, admission
//!  process + hook ──┘                       ├─▶ Prometheus metrics, log
//!                                           └─▶ admin socket and page: snapshots for `gshare status` and browsers
//! ```
//! The daemon decides nothing: it hands events to the node and carries out its actions. Journal, metrics and log are
//! observers of both; the node knows none of them.
//!
//! # Algorithm
//! One thread, one event at a time: a frame of a peer, the end of a connection or of its process (a pidfd, since a
//! forked child keeps the socket of its parent open), the engine's deadline, a command of the host. Each event is
//! journalled, then handled, then its frames are sent without ever waiting for a peer: a peer that does not read
//! loses its connection, not the others their time.
//!
//! # Embedding
//! A [`Daemon`] owns its socket, clock, journal and metrics, so that a host may run several in one process:
//!
//! ```
//! # let dir = tempfile::tempdir()?;
//! let config = gshared::Config::at(dir.path().join("gshare.sock"));
//! let running = gshared::Daemon::new(config)?.spawn()?;
//! let snapshot = running.handle().snapshot()?;
//! assert!(snapshot.clients.is_empty());
//! running.stop()?;
//! # Ok::<(), gshared::DaemonError>(())
//! ```
//! [`DaemonBuilder`] takes another [`Clock`] or another policy ([`gshare_core::TokenScheduler`]).
//!
//! # Guarantees
//! - A connection that breaks the protocol is dropped with a counted reason ([`Reason`](gshare_core::reason::Reason)); the others notice
//!   nothing.
//! - `kill -9` of a client frees its token, its share and its memory as soon as the kernel reports it.
//! - `kill -9` of the daemon loses no journalled event; hooks go on by their own policy and re-register.
//! - A bad configuration changes nothing.
//!
//! # Limits
//! Linux 5.11 or later. The uid is checked, the program is not: what is enforced inside a hooked process is
//! cooperative, not a security boundary.

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
pub mod why;

mod handle;
mod health;
mod http;
mod metrics;
mod observed;
mod peer;
mod server;
mod snapshot;
mod sockets;

pub use clock::{Clock, ManualClock, MonotonicClock};
pub use config::{Config, ConfigError, DeviceUuid};
pub use handle::{Handle, Running};
pub use metrics::Metrics;
pub use server::{Daemon, DaemonBuilder, DaemonError};
pub use snapshot::{ClientSnapshot, DeviceSnapshot, Snapshot};
