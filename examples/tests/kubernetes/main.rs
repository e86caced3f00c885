//! The manifests with their policies, the driver of claims, and the device plugin of a node.
#![cfg(feature = "kubernetes")]

mod dra;
mod manifests;
mod monitoring;
mod node_hooks;
#[path = "../support/policy.rs"]
mod policy;
#[path = "../support/mod.rs"]
mod support;
mod tenants;
