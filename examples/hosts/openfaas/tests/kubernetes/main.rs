//! `gshare up --kubernetes` before an API server, with kubelets of the tests: pods are processes under the hook, and each node has its daemon
//! and simulated devices. Where there is a real server, scenarios run on it in place of the mock; the story runs on both.
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
