//! The lowest floor: the driver's functions, the loader, threads, locks, time, settings and the daemon's socket.

pub(crate) mod bell;
pub(crate) mod clock;
pub(crate) mod config;
pub(crate) mod connection;
pub(crate) mod descriptor;
pub(crate) mod dlsym;
pub(crate) mod driver;
pub(crate) mod host_memory;
pub(crate) mod leak;
pub(crate) mod lock;
pub(crate) mod setting_sources;
pub(crate) mod signals;
pub(crate) mod stderr;
pub(crate) mod thread;
pub(crate) mod tls;
