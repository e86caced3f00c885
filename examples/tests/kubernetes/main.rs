//! The manifests with their policies, and the device plugin of a node.
#![cfg(feature = "kubernetes")]

mod manifests;
mod monitoring;
mod node_hooks;
#[allow(dead_code, reason = "each test uses a part of it")]
#[path = "../support/policy.rs"]
mod policy;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
