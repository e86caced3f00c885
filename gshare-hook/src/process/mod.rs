//! The process: its beginning, its forks and its end, and the helper thread that speaks with the daemon.

pub(crate) mod control;
pub(crate) mod helper;
pub(crate) mod lifecycle;
