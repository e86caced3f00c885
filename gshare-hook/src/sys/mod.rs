//! The lowest floor: the driver's functions, the loader, threads, time, the environment and the daemon's socket.

pub(crate) mod clock;
pub(crate) mod config;
pub(crate) mod connection;
pub(crate) mod driver;
pub(crate) mod resolve;
pub(crate) mod tls;
