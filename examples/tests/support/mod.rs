//! API servers of the tests: a mock, and a real one if there is one.
#![allow(dead_code, reason = "each test uses a part of it")]

pub(crate) mod api_server;
pub(crate) mod cluster;
pub(crate) mod control_plane;
