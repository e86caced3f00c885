//! `gshare up --kubernetes` before a mock of the API server, with kubelets of the tests: pods are processes under the hook, each node has its
//! daemon and simulated devices. The story runs before a real server as well, if there is one.
#![cfg(feature = "kubernetes")]

#[path = "../common/mod.rs"]
mod common;
mod faults;
mod kubelet;
mod leader;
mod lease;
mod life;
mod objects;
mod story;
#[path = "../../../../tests/support/mod.rs"]
mod support;
mod templates;
