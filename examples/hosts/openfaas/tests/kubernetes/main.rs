//! `gshare up --kubernetes` before a mock of the API server, with kubelets of the tests: pods are processes under the hook, each node has its
//! daemon and simulated devices.
#![cfg(feature = "kubernetes")]

#[allow(dead_code, reason = "the tests of other hosts use the rest")]
#[path = "../../../../tests/support/api_server.rs"]
mod api_server;
#[path = "../common/mod.rs"]
mod common;
mod faults;
mod kubelet;
mod leader;
mod lease;
mod life;
mod objects;
mod story;
mod templates;
